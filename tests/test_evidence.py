"""The recipes of the evidence: controls that differ in what they are for, and in nothing else."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq import models, options, utils
from tiny_transformer import make_task

from fairseq_lowrank.attention import build_attention

EVIDENCE = Path(__file__).resolve().parent.parent / "examples" / "evidence"


@pytest.fixture
def controls(plugins_leave):
    utils.import_user_module(Namespace(user_dir=str(EVIDENCE / "controls")))


SMALL = [
    *("--encoder-layers", "2", "--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "16", "--lr", "0.1"),
    *("--decoder-layers", "2", "--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "16"),
    *("--encoder-attention-heads", "4", "--decoder-attention-heads", "4", "--share-all-embeddings"),
]


def build(*flags):
    args = options.parse_args_and_arch(options.get_training_parser(), input_args=["data", *SMALL, *flags])
    torch.manual_seed(1)
    return models.build_model(args, make_task())


def test_a_small_start_is_mha_to_the_bit_but_for_half_the_output_weights(controls):
    ours = build("--arch", "lowrank_transformer_iwslt_de_en").state_dict()
    small = build("--arch", "transformer_small_start_iwslt_de_en").state_dict()
    assert ours.keys() == small.keys()
    halved = [name for name in ours if name.endswith("out_proj.weight")]
    assert len(halved) == 6
    for name, tensor in ours.items():
        assert torch.equal(small[name], tensor / 2 if name in halved else tensor), name


def test_columns_of_column_sums_stay_at_1_whatever_is_learned(controls):
    torch.manual_seed(1)
    layer = build_attention("mha", 16, 4, mixing="column-sums", self_attention=True)
    other = build_attention("mixhead-a", 16, 4, self_attention=True)
    x = torch.randn(5, 2, 16)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    for _ in range(5):
        output, _ = layer(x, x, x)
        optimizer.zero_grad()
        (output - x).square().mean().backward()
        optimizer.step()
    matrix = layer.mixing.operation(x).weight
    assert (matrix - torch.eye(4)).abs().max() > 0.05
    torch.testing.assert_close(matrix.sum(0), torch.ones(4))
    other.load_state_dict({**layer.state_dict(), "mixing.weight": matrix})
    weights = layer(x, x, x, need_head_weights=True)[1]
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    torch.testing.assert_close(layer(x, x, x)[0], other(x, x, x)[0])


def test_column_sums_start_as_mha(controls):
    ours, theirs = (
        build("--arch", "lowrank_transformer_iwslt_de_en", *flags) for flags in ([], ["--head-mixing", "column-sums"])
    )
    for name, tensor in ours.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], tensor), name
    assert torch.equal(theirs.decoder.layers[0].self_attn.mixing.operation(None).weight, torch.eye(4))
