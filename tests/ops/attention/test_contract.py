"""What the operation refuses, and the types its backends share."""

from types import SimpleNamespace

import pytest
import torch
from attention_problems import fixed, hidden, problems
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_lowrank.ops import AttentionMask, HeadMixing, attention

Q, K = torch.zeros(2, 3, 4, 6), torch.zeros(2, 1, 5, 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q": Q[0]}, r"q, k, v of shapes \[3, 4, 6\], \[2, 1, 5, 6\].*: expected \[B, H, T, D\]"),
        ({"k": Q[:, :2]}, r"k of shape \[2, 2, 4, 6\] does not fit q \[2, 3, 4, 6\]: expected \[2, 1 or 3, S, 6\]"),
        ({"k": K[:1]}, r"k of shape \[1, 1, 5, 6\] does not fit"),
        ({"k": K[..., :5]}, r"k of shape \[2, 1, 5, 5\] does not fit"),
        ({"v": K[:, :, :4]}, r"v of shape \[2, 1, 4, 6\] does not fit k \[2, 1, 5, 6\]"),
        ({"activation": "relu"}, "activation='relu': expected one of softmax, sigsoftmax"),
        ({"q": Q[..., :0], "k": K[..., :0]}, r"q of shape \[2, 3, 4, 0\]: expected .* with H and D of 1 or more"),
        ({"q": Q[:, :0], "k": K}, r"q of shape \[2, 0, 4, 6\]: expected .* with H and D of 1 or more"),
        ({"q": Q.long()}, "q of torch.int64: expected a float tensor"),
        ({"k": K.int()}, "k of torch.int32: expected a float tensor"),
        ({"v": K.bool()}, "v of torch.bool: expected a float tensor"),
        ({"scale": "1"}, "scale='1': expected a finite number"),
        ({"scale": float("nan")}, "scale=nan: expected a finite number"),
        ({"score_bias": torch.zeros(4, 5).bool()}, "score_bias of torch.bool: expected a float tensor"),
        (
            {"mask": AttentionMask(additive=torch.zeros(4, 5).long())},
            "mask.additive of torch.int64: expected a bool or",
        ),
        ({"dropout_p": "0"}, "dropout_p='0': expected a number with 0 <= dropout_p < 1"),
        ({"dropout_p": 1.0}, r"dropout_p=1.0: expected a number with 0 <= dropout_p < 1"),
        ({"dropout_p": -0.1}, r"dropout_p=-0.1: expected"),
        (
            {"mask": AttentionMask(key_padding=torch.zeros(2, 5))},
            r"mask.key_padding of shape \[2, 5\] and torch.float32",
        ),
        (
            {"mask": AttentionMask(key_padding=torch.zeros(2, 4, dtype=torch.bool))},
            r"mask.key_padding of shape \[2, 4\] and torch.bool: expected bool \[2, 5\]",
        ),
        (
            {"mask": AttentionMask(additive=torch.zeros(4, 4))},
            r"mask.additive of shape \[4, 4\] does not broadcast to scores \[2, 3, 4, 5\]",
        ),
        ({"score_bias": torch.zeros(1, 2, 3, 4, 5)}, r"score_bias of shape \[1, 2, 3, 4, 5\] does not broadcast"),
        ({"mixing": HeadMixing(torch.eye(2))}, r"mixing.weight of shape \[2, 2\]: expected \[3, 3\]"),
        (
            {"mixing": HeadMixing(torch.eye(3), torch.zeros(3, 6)), "mixing_query": Q},
            r"mixing.query_weight of shape \[3, 6\]: expected \[6, 3\]",
        ),
        (
            {"mixing": HeadMixing(torch.eye(3), torch.zeros(6, 3))},
            r"position-wise mixing \(mixing.query_weight\) needs mixing_query \[2, 3, 4, 6\]: got None",
        ),
        (
            {"mixing": HeadMixing(torch.eye(3), torch.zeros(6, 3)), "mixing_query": Q[:, :1]},
            r"needs mixing_query \[2, 3, 4, 6\]: got \[2, 1, 4, 6\]",
        ),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        attention(**{"q": Q, "k": K, "v": K} | arguments)


@settings(fixed, max_examples=100)
@given(data=st.data())
def test_an_attention_mask_says_the_same_in_all_its_forms(data, device):
    problem = data.draw(problems(device))
    mask, (_, _, queries, _), keys = problem["mask"], problem["q"].shape, problem["k"].size(2)
    shape = (*problem["q"].shape[:3], keys)
    bias = 0 if mask.bias is None else mask.bias.detach()
    expected = torch.zeros(shape, dtype=torch.float64, device=device).masked_fill(
        hidden(problem).to(device), -torch.inf
    )
    expected = expected + bias
    dense = mask.dense(SimpleNamespace(q=problem["q"], k=problem["k"]))
    assert torch.equal(
        torch.zeros(shape, dtype=torch.float64, device=device) + (0 if dense is None else dense), expected
    )
    rows = torch.as_tensor(mask.rows_with_keys(queries, keys, torch.device(device)), device=device)
    assert torch.equal(rows.expand(*shape[:3], 1), (expected > -torch.inf).any(-1, keepdim=True))


def test_the_first_of_more_causal_queries_than_keys_see_none(device):
    def rows(**mask):
        return AttentionMask(causal=True, **mask).rows_with_keys(3, 2, torch.device(device)).flatten().tolist()

    assert rows() == [False, True, True]
    assert rows(key_padding=torch.tensor([[True, False]], device=device)) == [False, False, True]
    assert rows(key_padding=torch.tensor([[False, True]], device=device)) == [False, True, True]
