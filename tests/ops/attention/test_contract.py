"""What the operation refuses, and the types its backends share."""

import pytest
import torch
from attention_problems import attend, hidden, problems
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_lowrank.ops import AttentionMask, DiagonalMixing, PositionwiseMixing, StaticMixing

Q, K = torch.zeros(2, 3, 4, 6), torch.zeros(2, 1, 5, 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q": Q[0]}, r"q, k of shapes \[3, 4, 6\], \[2, 1, 5, 6\].*: expected \[B, H, T, D\]"),
        (
            {"k": Q[:, :2]},
            r"k of shape \[2, 2, 4, 6\] does not fit q \[2, 3, 4, 6\]: expected \[B, G, S, D\] = \[2, G, S, 6\], G dividing 3",
        ),
        ({"k": K[:, :0]}, r"k of shape \[2, 0, 5, 6\] does not fit q"),
        ({"v": K[:, :0]}, r"v of shape \[2, 0, 5, 6\] does not fit scores"),
        (
            {"v": K.expand(-1, 2, -1, -1)},
            r"v of shape \[2, 2, 5, 6\] .* expected \[B, G, S, Dv\] = \[2, G, 5, Dv\], G dividing 3",
        ),
        ({"k": K[:1]}, r"k of shape \[1, 1, 5, 6\] does not fit"),
        ({"k": K[..., :5]}, r"k of shape \[2, 1, 5, 5\] does not fit"),
        ({"v": K[:, :, :4]}, r"v of shape \[2, 1, 4, 6\] does not fit scores \[2, 3, 4, 5\]"),
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
            r"mask.key_padding of shape \[2, 4\] and torch.bool: expected bool \[B, S\] = \[2, 5\]",
        ),
        (
            {"mask": AttentionMask(True, query_repeats=3)},
            r"mask.query_repeats=3: expected a number that divides the 4 queries",
        ),
        (
            {"mask": AttentionMask(True, query_repeats=0)},
            r"mask.query_repeats=0: expected a number that divides the 4 queries",
        ),
        (
            {"mask": AttentionMask(True, num_appended_keys=6)},
            r"mask.num_appended_keys=6: expected 0 to 5, the number of keys",
        ),
        (
            {"mask": AttentionMask(True, num_appended_keys=-1)},
            r"mask.num_appended_keys=-1: expected 0 to 5, the number of keys",
        ),
        (
            {"mask": AttentionMask(True, window=0)},
            r"mask.window=0: expected a positive integer, together with causal=True",
        ),
        ({"mask": AttentionMask(True, window=2.0)}, r"mask.window=2.0: expected a positive integer"),
        ({"mask": AttentionMask(window=2)}, r"mask.window=2: .* together with causal=True"),
        (
            {"mask": AttentionMask(additive=torch.zeros(4, 4))},
            r"mask.additive of shape \[4, 4\]: expected one that broadcasts to scores \[B, H, T, S\] = \[2, 3, 4, 5\]",
        ),
        (
            {"score_bias": torch.zeros(1, 2, 3, 4, 5)},
            r"score_bias of shape \[1, 2, 3, 4, 5\]: expected one that broadcasts",
        ),
        (
            {"prob_mixing": StaticMixing(torch.eye(2))},
            r"weight of static mixing: \[2, 2\], expected \[H, H\] = \[3, 3\]",
        ),
        (
            {"score_mixing": StaticMixing(torch.ones(3))},
            r"weight of static mixing: \[3\], expected \[H, H\] = \[3, 3\]",
        ),
        ({"prob_mixing": DiagonalMixing(torch.eye(3))}, r"weight of diagonal mixing: \[3, 3\], expected \[H\] = \[3\]"),
        (
            {"prob_mixing": PositionwiseMixing(torch.eye(3))},
            r"weight of position-wise mixing: .* expected \[B, T, H, H\] = \[2, 4, 3, 3\]",
        ),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        attend(**{"q": Q, "k": K, "v": K} | arguments)


@settings(max_examples=100)
@given(data=st.data())
def test_an_attention_mask_says_the_same_in_all_its_forms(data, device):
    problem = data.draw(problems(device))
    mask, keys = problem["mask"], problem["k"].size(2)
    shape = (*problem["q"].shape[:3], keys)
    bias = 0 if mask.bias is None else mask.bias.detach()
    expected = torch.zeros(shape, dtype=torch.float64, device=device).masked_fill(
        hidden(problem).to(device), -torch.inf
    )
    expected = expected + bias
    dense = mask.dense(problem["q"], keys, problem["q"].dtype)
    assert torch.equal(
        torch.zeros(shape, dtype=torch.float64, device=device) + (0 if dense is None else dense), expected
    )
    rows = torch.as_tensor(mask.has_visible_key(shape, torch.device(device)), device=device)
    assert torch.equal(rows.expand(*shape[:3], 1), (expected > -torch.inf).any(-1, keepdim=True))


def test_the_first_of_more_causal_queries_than_keys_see_none(device):
    def rows(**mask):
        return AttentionMask(causal=True, **mask).has_visible_key((1, 1, 3, 2), torch.device(device)).flatten().tolist()

    assert rows() == [False, True, True]
    assert rows(key_padding=torch.tensor([[True, False]], device=device)) == [False, False, True]
    assert rows(key_padding=torch.tensor([[False, True]], device=device)) == [False, True, True]


@pytest.mark.parametrize("window", [None, 1, 2, 3, 9])
@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (3, 6), (6, 3)])
@pytest.mark.parametrize("appended", [0, 1])
def test_rows_that_window_and_padding_hide_together_see_no_key(window, queries, keys, appended, device):
    padding = torch.tensor([list(map(int, f"{number:b}".zfill(keys))) for number in range(2**keys)]).bool()
    mask = AttentionMask(True, padding.to(device), num_appended_keys=appended, window=window)
    shape = len(padding), 1, queries, keys
    hidden = mask.hidden(shape, torch.device(device))
    found = mask.has_visible_key(shape, torch.device(device))
    assert torch.equal(found, ~hidden.all(-1, keepdim=True))


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("additive", [None, (3, 4), (1, 1, 3, 1)])
def test_a_mask_grows_with_keys_and_repeats_queries(additive, window, device):
    """As the tensor of all that is hidden would."""
    padding = torch.tensor([[False, True, False, False]], device=device)
    additive = None if additive is None else torch.rand(additive, device=device) < 0.4
    mask = AttentionMask(True, padding, additive, window=window)
    before = mask.hidden((1, 1, 3, 4), torch.device(device)).expand(1, 1, 3, 4)
    after = (
        mask.append_keys(4, 1)
        .append_keys(5, 1)
        .repeat_queries(2)
        .repeat_queries(2)
        .hidden((1, 1, 12, 6), torch.device(device))
    )
    expected = torch.nn.functional.pad(before, (0, 2)).repeat(1, 1, 4, 1)
    assert torch.equal(after.expand(1, 1, 12, 6), expected)
