"""Packed documents: positions see their own document alone."""

import pytest
import torch

from fairseq_lowrank.attention import CAUSAL, PackedDocuments, RotaryPositions, build_attention
from fairseq_lowrank.ops.attention import blocked


def layer_of(preset="mixhead-b", **options):
    torch.manual_seed(1)
    return build_attention(preset, 8, 2, self_attention=True, batch_first=True, **options).double().eval()


@pytest.mark.parametrize("backend", ["auto", "reference", "blocked", "sdpa"])
@pytest.mark.parametrize("causal", [True, False])
def test_ids_of_each_row_give_its_documents_one_by_one(causal, backend):
    layer, x = layer_of("mha", backend=backend, rotary=RotaryPositions()), torch.randn(2, 7, 8).double()
    ids = torch.tensor([[4, 4, 4, 4, 9, 9, 9], [0, 1, 1, 1, 1, 1, 2]])
    output, _ = layer(x, x, x, attn_mask=PackedDocuments(ids=ids, causal=causal), need_weights=False)
    for row, lengths in enumerate(([4, 3], [1, 5, 1])):
        parts = x[row : row + 1].split(lengths, dim=1)
        mask = CAUSAL if causal else None
        expected = torch.cat([layer(y, y, y, attn_mask=mask, need_weights=False)[0] for y in parts], dim=1)
        torch.testing.assert_close(output[row : row + 1], expected)


def test_boundaries_and_ids_are_the_same_mask():
    layer, x = layer_of(), torch.randn(1, 6, 8).double()
    outputs = [
        layer(x, x, x, attn_mask=PackedDocuments(**given), need_weights=False)[0]
        for given in (
            {"cu_seqlens": [0, 2, 2, 5, 6]},
            {"cu_seqlens": torch.tensor([0, 2, 5, 6], dtype=torch.int32)},
            {"ids": torch.tensor([0, 0, 1, 1, 1, 2])},
        )
    ]
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def test_steps_of_decoding_begin_new_documents():
    layer, x, state = layer_of(), torch.randn(2, 6, 8).double(), {}
    ids = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 2, 2]])
    full, _ = layer(x, x, x, attn_mask=PackedDocuments(ids=ids), need_weights=False)
    steps = [
        layer(
            step,
            step,
            step,
            incremental_state=state,
            attn_mask=PackedDocuments(ids=ids[:, : index + 1]),
            need_weights=False,
        )[0]
        for index, step in enumerate(x.split(1, dim=1))
    ]
    torch.testing.assert_close(torch.cat(steps, dim=1), full)


def test_blocks_compute_no_scores_of_other_documents(monkeypatch):
    computed, product = [], blocked.Block

    def counted(index, batch, rows, keys):
        computed.append((rows.stop - rows.start) * (keys.stop - keys.start))
        return product(index, batch, rows, keys)

    monkeypatch.setattr(blocked, "Block", counted)
    layer, x = layer_of(backend="blocked"), torch.randn(1, 1024, 8).double()
    layer(x, x, x, attn_mask=PackedDocuments(cu_seqlens=range(0, 1025, 128), causal=False), need_weights=False)
    assert sum(computed) == 1024 * 128


def test_the_default_device_is_not_asked():
    layer, x, mask = layer_of(backend="blocked"), torch.randn(1, 6, 8).double(), PackedDocuments(cu_seqlens=[0, 2, 6])
    expected, _ = layer(x, x, x, attn_mask=mask, need_weights=False)
    with torch.device("meta"):
        found, _ = layer(x, x, x, attn_mask=mask, need_weights=False)
    torch.testing.assert_close(found, expected)


def test_a_packed_layer_compiles_to_one_graph():
    layer, x, mask = layer_of(), torch.randn(1, 6, 8).double(), PackedDocuments(cu_seqlens=[0, 2, 6])
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    expected, _ = layer(x, x, x, attn_mask=mask, need_weights=False)
    torch.testing.assert_close(compiled(x, x, x, attn_mask=mask, need_weights=False)[0], expected)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "give one of cu_seqlens and ids"),
        ({"cu_seqlens": [0, 2], "ids": torch.zeros(2).long()}, "give one of cu_seqlens and ids"),
        ({"cu_seqlens": [1, 2]}, r"cu_seqlens=\[1, 2\]"),
        ({"cu_seqlens": [0, 3, 2]}, r"cu_seqlens=\[0, 3, 2\]"),
        ({"cu_seqlens": [0.0, 2.0]}, r"torch.float32: expected integers \[N \+ 1\]"),
        ({"ids": torch.zeros(2)}, r"torch.float32: expected integers \[S\]"),
        ({"ids": torch.zeros(2, 2, 2).long()}, r"ids of shape \[2, 2, 2\]"),
        ({"ids": [[0, 1], [0]]}, r"ids=\[\[0, 1\], \[0\]\]: expected integers"),
        ({"ids": "0011"}, "ids='0011': expected integers"),
    ],
)
def test_malformed_documents_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        PackedDocuments(**given)


def test_documents_may_be_given_as_lists():
    x = torch.randn(1, 4, 8).double()
    layer = layer_of()
    listed, tensor = (
        layer(x, x, x, attn_mask=PackedDocuments(ids=ids), need_weights=False)[0]
        for ids in ([0, 0, 1, 1], torch.tensor([0, 0, 1, 1]))
    )
    assert torch.equal(listed, tensor)


def test_documents_that_do_not_fit_the_call_are_refused():
    x = torch.randn(2, 6, 8).double()
    for mask in (PackedDocuments(cu_seqlens=[0, 2, 5]), PackedDocuments(ids=torch.zeros(3, 6).long())):
        for options in ({}, {"before_softmax": True}):
            with pytest.raises(ValueError, match=r"mask\.documents of shape"):
                layer_of()(x, x, x, attn_mask=mask, **options)
    cross = build_attention("mha", 8, 2, encoder_decoder_attention=True, batch_first=True).double()
    with pytest.raises(ValueError, match="documents in cross attention"):
        cross(x, x, x, attn_mask=PackedDocuments(cu_seqlens=[0, 6]))
