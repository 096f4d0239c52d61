"""Under a causal mask heads of size r reach almost every pattern over 2·r + 1 positions, and of longer ones almost none."""

import math

import pytest
import torch

FLOAT = torch.float64


def causal_pattern(n):
    weights = torch.empty(n, n, dtype=FLOAT).exponential_().tril()
    return weights / weights.sum(-1, keepdim=True)


def fitted(pattern, size):
    """The pattern of queries and keys of this size that are chosen for it, row by row and then key by key.

    The first size + 1 keys are drawn; with a constant that the softmax ignores each query has as many unknowns, and so meets
    what it sees of them. A later key then has as many equations as there are positions from its own on.
    """
    n = len(pattern)
    wanted = pattern.log()
    keys = torch.randn(n, size, dtype=FLOAT)
    queries, constants = torch.zeros(n, size, dtype=FLOAT), torch.zeros(n, dtype=FLOAT)
    for i in range(n):
        seen = min(i, size) + 1
        known = torch.cat((keys[:seen], torch.ones(seen, 1, dtype=FLOAT)), 1)
        solution = torch.linalg.pinv(known) @ wanted[i, :seen]
        queries[i], constants[i] = solution[:-1], solution[-1]
    for j in range(size + 1, n):
        keys[j] = torch.linalg.pinv(queries[j:]) @ (wanted[j:, j] - constants[j:])
    hidden = torch.ones(n, n).triu(1).bool()
    return (queries @ keys.T).masked_fill(hidden, -math.inf).softmax(-1)


@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_heads_of_half_the_length_reach_drawn_causal_patterns(size):
    pattern = causal_pattern(2 * size + 1)
    torch.testing.assert_close(fitted(pattern, size), pattern, atol=1e-9, rtol=0)


@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_one_position_more_is_out_of_reach(size):
    pattern = causal_pattern(2 * size + 2)
    # these size + 1 positions see all of these size + 2: scores of rank `size` and a constant a row would need a row of ones among
    # the combinations of theirs
    block = pattern.log()[size + 1 :, : size + 2]
    rank = torch.linalg.matrix_rank(block)
    assert rank == size + 1 and torch.linalg.matrix_rank(torch.cat((block, torch.ones(1, size + 2)))) == rank + 1
    assert (fitted(pattern, size) - pattern).abs().max() > 1e-4


def test_heads_of_half_the_length_miss_a_causal_pattern():
    """n 3 and d_k 1: rows (.7 .3) and (.4 .4 .2) exclude each other, and finite keys only come near them.

    Without loss of generality keys 0 and 1 are 0 and 1, because the second row makes them differ. A third row with equal
    weights on them then has query 0, and is uniform.
    """
    wanted = torch.tensor([0.4, 0.4, 0.2], dtype=FLOAT)
    errors = []
    for largest_key in (10, 100, 1000):
        queries = torch.linspace(-1, 1, 20_001, dtype=FLOAT)
        keys = (math.log(0.5) / queries).clamp(-largest_key, largest_key).nan_to_num(largest_key)
        row = torch.stack((torch.zeros_like(queries), queries, queries * keys), -1).softmax(-1)
        errors.append((row - wanted).abs().amax(-1).min().item())
    assert all(0.1 < error * bound < 1 for error, bound in zip(errors, (10, 100, 1000), strict=True))
