"""Causal masks are recognised, padding that hides nothing is dropped, and neither changes a result."""

import brute_force
import pytest
import torch
import torch.nn.functional as F
from needed_axes import PRESETS

from fairseq_lowrank.attention import CAUSAL, SlidingWindow, masks
from fairseq_lowrank.attention.masks import attention_mask
from fairseq_lowrank.ops import AttentionMask
from fairseq_lowrank.ops.attention.mask import hides
from fairseq_lowrank.ops.attention.padding import begin_pass, end_pass, is_right_padding

ACTIVATIONS = ("softmax", "sigsoftmax")


def future(length, device="cpu"):
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


def additive(length, dtype=torch.float32):
    return torch.zeros(length, length, dtype=dtype).masked_fill(future(length), float("-inf"))


@pytest.fixture
def sdpa_calls(monkeypatch):
    """The keyword arguments of every call of SDPA."""
    calls, sdpa = [], F.scaled_dot_product_attention

    def spy(*tensors, **options):
        calls.append(options)
        return sdpa(*tensors, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return calls


def recognised(mask, keys=None):
    return attention_mask(mask, None, (2, 3, mask.size(-2), keys or mask.size(-1))).causal


def test_causal_tensors_are_recognised(device):
    for length in (2, 4, masks.LONGEST_KEPT + 1):
        assert recognised(future(length, device))
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        assert recognised(additive(4, dtype).to(device))
    with torch.inference_mode():
        assert recognised(additive(4).to(device))


def test_masks_that_are_nearly_causal_are_not(device):
    sees_one_more, sees_one_less = future(4, device), future(4, device)
    sees_one_more[1, 3], sees_one_less[3, 2] = False, True
    biased, padded = additive(4).to(device), additive(4).to(device)
    biased[3, 0], padded[:, 0] = 0.5, float("-inf")
    large_not_infinite = additive(4).to(device).clamp(min=-1e4)
    for mask in (sees_one_more, sees_one_less, biased, padded, large_not_infinite, torch.zeros(4, 4, device=device)):
        assert not recognised(mask)
    assert not recognised(future(5, device)[1:])  # 4 queries of 5 keys
    assert not recognised(future(1, device))


def test_a_mask_changed_in_place_is_looked_at_again(device):
    mask = additive(4).to(device)
    assert recognised(mask) and recognised(mask)
    mask[3, 0] = 1.0
    assert not recognised(mask)


def test_a_mask_is_read_once_for_all_layers_of_a_model(make, inputs, device, monkeypatch):
    read = []
    monkeypatch.setattr(masks, "LONGEST_KEPT", 0)
    monkeypatch.setattr(masks, "hides", lambda mask: read.append(mask) or hides(mask))
    layers, x = [make("mixhead-b", self_attention=True) for _ in range(4)], inputs(5, 2, 12)
    mask = additive(5).to(device)

    def model(x):
        for layer in layers:
            x, _ = layer(x, x, x, attn_mask=mask, need_weights=False)

    model(x)
    assert len(read) == 4
    for passes in (1, 2):
        begin_pass()
        model(x)
        end_pass()
        assert len(read) == 4 + passes


def test_an_interrupted_pass_leaves_no_answer_to_the_next(device):
    mask = additive(4).to(device)
    begin_pass()
    assert recognised(mask)
    mask[3, 0] = 1.0
    begin_pass()
    assert not recognised(mask)
    end_pass()


def refill(memory, mask, by):
    if by == "numpy":
        memory.numpy()[:] = mask.numpy()
    elif by == "data":
        memory.data.copy_(mask)
    elif by == "another process":  # it writes into shared memory, and no version of this process changes
        torch.from_file(memory.untyped_storage().filename, shared=True, size=12, dtype=torch.bool).copy_(mask.flatten())
    else:
        memory.copy_(mask)


@pytest.mark.parametrize("by", ["numpy", "data", "another process", "copy"])
@pytest.mark.parametrize("preset", ["mha", "mixhead-b"])
def test_a_mask_whose_memory_is_refilled_is_read_again(preset, by, make, inputs, tmp_path):
    layer, x = make(preset, self_attention=True).cpu(), inputs(6, 2, 12).cpu()
    right, left = (torch.zeros(2, 6, dtype=torch.bool) for _ in range(2))
    right[1, 4:], left[1, :3] = True, True
    padding = right.clone()
    if by == "another process":
        padding = torch.from_file(str(tmp_path / "mask"), shared=True, size=12, dtype=torch.bool).view(2, 6)
        padding.copy_(right)

    def output(mask):
        return layer(x, x, x, key_padding_mask=mask, attn_mask=CAUSAL, need_weights=False)[0]

    expected = output(left)
    output(padding)
    refill(padding, left, by)
    torch.testing.assert_close(output(padding), expected)
    causal = additive(6)
    layer(x, x, x, attn_mask=causal, need_weights=False)
    open_mask = torch.zeros(6, 6)
    if by in ("numpy", "data", "copy"):
        refill(causal, open_mask, by)
        expected = layer(x, x, x, attn_mask=open_mask, need_weights=False)[0]
        torch.testing.assert_close(layer(x, x, x, attn_mask=causal, need_weights=False)[0], expected)


def test_a_mask_on_a_gpu_is_not_read_while_a_graph_is_captured(monkeypatch):
    """A graph that is being captured cannot wait."""

    class OnGPU(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    mask = additive(4).as_subclass(OnGPU)
    assert not recognised(mask)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert recognised(mask)


@pytest.mark.parametrize("backend", ["reference", "blocked", "auto"])
def test_padding_of_the_mask_and_of_the_call_both_hide(backend, make, inputs, device):
    layer, x = make(self_attention=True, backend=backend), inputs(4, 2, 12)
    of_mask = torch.tensor([[0, 1, 0, 0], [1, 1, 0, 0]], dtype=torch.bool, device=device)
    of_call = torch.tensor([[0, 0, 0, 1], [1, 0, 1, 0]], dtype=torch.bool, device=device)
    for mask in (AttentionMask(), CAUSAL, SlidingWindow(2)):
        found = layer(x, x, x, of_call, attn_mask=mask.replace(key_padding=of_mask), need_weights=False)[0]
        expected = layer(x, x, x, of_mask | of_call, attn_mask=mask, need_weights=False)[0]
        torch.testing.assert_close(found, expected)
        assert not torch.allclose(expected, layer(x, x, x, of_mask & of_call, attn_mask=mask, need_weights=False)[0])


def test_right_padding():
    def right(*rows):
        return is_right_padding(torch.tensor(rows, dtype=torch.bool))

    assert right((0, 0, 0), (0, 1, 1)) and right((0, 0, 0))
    assert not right((0, 0, 0), (1, 0, 0)) and not right((0, 1, 0)) and not right((0, 0, 1), (1, 1, 1))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_causal_tensor_and_the_marker_are_one(preset, activation, make, inputs, device):
    layer, x = make(preset, head_dim=4, activation=activation), inputs(5, 2, 12)
    expected = layer(x, x, x, attn_mask=CAUSAL, need_weights=False)[0]
    torch.testing.assert_close(expected.cpu(), brute_force.layer(layer, x, x, x, hidden=future(5))[0])
    for mask in (future(5), additive(5)):
        assert torch.equal(layer(x, x, x, attn_mask=mask.to(device), need_weights=False)[0], expected)


def test_sdpa_is_told_of_causality_and_spared_right_padding(make, inputs, device, sdpa_calls):
    layer, x = make(self_attention=True), inputs(5, 2, 12)
    right = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]], dtype=torch.bool, device=device)
    for mask in (CAUSAL, future(5, device), additive(5).to(device)):
        for key_padding_mask in (None, right, torch.zeros(2, 5, device=device).masked_fill(right, float("-inf"))):
            layer(x, x, x, attn_mask=mask, key_padding_mask=key_padding_mask, need_weights=False)
            call = sdpa_calls.pop()
            assert call["is_causal"] and call["attn_mask"] is None
    layer(x, x, x, attn_mask=CAUSAL, key_padding_mask=right.flip(1), need_weights=False)
    call = sdpa_calls.pop()
    assert not call["is_causal"] and call["attn_mask"] is not None


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_right_padding_under_causality_leaves_real_positions_alone(preset, activation, make, inputs, device):
    layer, x = make(preset, head_dim=4, activation=activation, self_attention=True), inputs(5, 2, 12)
    right = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]], dtype=torch.bool, device=device)
    output = layer(x, x, x, attn_mask=CAUSAL, key_padding_mask=right, need_weights=False)[0].cpu()
    hidden = future(5) | right.cpu()[:, None, None, :]
    expected = brute_force.layer(layer, x, x, x, hidden=hidden)[0]
    torch.testing.assert_close(output[:, 0], expected[:, 0])
    torch.testing.assert_close(output[:3, 1], expected[:3, 1])


def test_right_padding_of_other_keys_is_kept_under_a_causal_mask(make, inputs, device):
    # queries beyond the padding are real here
    layer, query, key = make(), inputs(4, 1, 12), inputs(4, 1, 12, seed=3)
    right = torch.tensor([[0, 0, 1, 1]], dtype=torch.bool, device=device)
    output = layer(query, key, key, attn_mask=CAUSAL, key_padding_mask=right, need_weights=False)[0].cpu()
    hidden = future(4) | right.cpu()[:, None, None, :]
    torch.testing.assert_close(output, brute_force.layer(layer, query, key, key, hidden=hidden)[0])


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_results_do_not_depend_on_padding_or_batch_order(preset, activation, make, inputs, device):
    layer, x = make(preset, head_dim=4, activation=activation, self_attention=True), inputs(3, 2, 12)
    noise = inputs(2, 2, 12, seed=9)
    for mask in (None, CAUSAL):
        alone = layer(x, x, x, attn_mask=mask, need_weights=False)[0]
        swapped = x.flip(1)
        torch.testing.assert_close(
            layer(swapped, swapped, swapped, attn_mask=mask, need_weights=False)[0], alone.flip(1)
        )
        for padded, real in ((torch.cat((noise, x)), slice(2, 5)), (torch.cat((x, noise)), slice(0, 3))):
            key_padding_mask = torch.ones(2, 5, dtype=torch.bool, device=device)
            key_padding_mask[:, real] = False
            output = layer(
                padded, padded, padded, key_padding_mask=key_padding_mask, attn_mask=mask, need_weights=False
            )[0]
            torch.testing.assert_close(output[real], alone)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_causal_layer_sees_nothing_of_the_future(preset, activation, make, inputs):
    layer, x = make(preset, head_dim=4, activation=activation, self_attention=True), inputs(5, 1, 12)
    before = layer(x, x, x, attn_mask=CAUSAL, need_weights=False)[0]
    x[3:] += 1
    after = layer(x, x, x, attn_mask=CAUSAL, need_weights=False)[0]
    assert torch.equal(after[:3], before[:3])
    assert (after[3:] != before[3:]).all()


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_query_without_keys_gives_the_output_bias_and_finite_gradients(preset, activation, make, inputs, device):
    layer, x = make(preset, head_dim=4, activation=activation), inputs(4, 2, 12).requires_grad_()
    padding = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.bool, device=device)
    output = layer(x, x, x, attn_mask=CAUSAL, key_padding_mask=padding, need_weights=False)[0]
    torch.testing.assert_close(output[:, 0], layer.out_proj.bias.expand(4, -1))
    torch.testing.assert_close(output[0, 1], layer.out_proj.bias)
    output.square().sum().backward()
    assert x.grad[:, 0].abs().max() == 0 and x.grad[0].abs().max() == 0 and x.grad[1:, 1].abs().min() > 0
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


@pytest.mark.parametrize(
    ("mask", "key_padding_mask", "message"),
    [
        ("causl", None, "attn_mask='causl': expected a tensor, None or 'causal'"),
        (
            torch.zeros(4, 3),
            None,
            r"attn_mask of shape \[4, 3\]: expected \[queries, keys\] = \[4, 4\], .* = \[2, 3, 4, 4\]",
        ),
        (torch.zeros(5, 4, 4), None, r"attn_mask of shape \[5, 4, 4\]: expected"),
        (None, torch.zeros(2, 3), r"key_padding_mask of shape \[2, 3\]: expected \[batch, keys\] = \[2, 4\]"),
    ],
)
def test_masks_that_do_not_fit_are_refused(mask, key_padding_mask, message, make, inputs, device):
    x = inputs(4, 2, 12)
    mask, key_padding_mask = (m.to(device) if torch.is_tensor(m) else m for m in (mask, key_padding_mask))
    with pytest.raises(ValueError, match=message):
        make()(x, x, x, attn_mask=mask, key_padding_mask=key_padding_mask)
