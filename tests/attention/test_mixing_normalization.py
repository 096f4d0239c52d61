"""Normalised columns of learned mixing: the formulas of the Mixhead paper (eq. 13 and 14), in float64."""

import pytest
import torch

from fairseq_lowrank.attention import CAUSAL, AttentionSpec, build_attention
from fairseq_lowrank.methods.mixhead import normalize_columns

NORMALIZATIONS = ("sum", "l2")
MIXINGS = ("static", "positionwise")


def normalized(matrix, normalization):
    """The formula, column by column."""
    columns = []
    for column in matrix.unbind(dim=-1):
        total = column if normalization == "sum" else column * column
        divisor = sum(total.unbind(dim=-1))
        columns.append(column / (divisor if normalization == "sum" else divisor**0.5).unsqueeze(-1))
    return torch.stack(columns, dim=-1)


def layer(mixing, normalization, **options):
    torch.manual_seed(1)
    built = build_attention("mha", 12, 3, mixing=mixing, mixing_normalization=normalization, **options).double()
    for parameter in built.mixing.parameters():
        # positive, so that no column sums to nearly 0
        parameter.data = torch.rand(parameter.shape, dtype=torch.float64) + 0.1
    return built


def inputs(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("shape", [(3, 3), (2, 5, 3, 3)])
def test_normalized_columns_follow_the_formula(normalization, shape):
    matrix = (torch.rand(shape, dtype=torch.float64) + 0.1).requires_grad_()
    torch.testing.assert_close(normalize_columns(matrix, normalization), normalized(matrix, normalization))
    assert torch.autograd.gradcheck(lambda m: normalize_columns(m, normalization), (matrix,))


@pytest.mark.parametrize("backend", ["reference", "blocked", "auto"])
@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_a_layer_mixes_by_the_normalized_matrix(normalization, mixing, backend):
    """Values and gradients are those of weights that are mixed by hand."""
    built, plain = layer(mixing, normalization, backend=backend), build_attention("mha", 12, 3).double()
    plain.load_state_dict({name: t for name, t in built.state_dict().items() if not name.startswith("mixing")})
    x = inputs(5, 2, 12)

    def expected():
        query = built.project_query(x)
        matrix = built.mixing.weight
        if mixing == "positionwise":
            matrix = torch.einsum("bhtd,di->bthi", query, built.mixing.query_weight) + matrix
        matrix = normalized(matrix, normalization).expand(2, 5, 3, 3)
        weights = plain(x, x, x, attn_mask=CAUSAL, need_head_weights=True)[1].transpose(0, 1)
        mixed = torch.einsum("btji,bjts->bits", matrix, weights)
        values = plain.v_proj(x).unflatten(-1, (3, 4)).permute(1, 2, 0, 3)
        return plain.out_proj((mixed @ values).permute(2, 0, 1, 3).flatten(2))

    output = built(x, x, x, attn_mask=CAUSAL, need_weights=False)[0]
    torch.testing.assert_close(output, expected())
    parameters = list(built.mixing.parameters())
    found, wanted = (torch.autograd.grad(y.square().sum(), parameters) for y in (output, expected()))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_normalized_mixing_starts_as_the_identity(normalization, mixing):
    torch.manual_seed(1)
    built = build_attention("mha", 12, 3, mixing=mixing, mixing_normalization=normalization)
    plain = build_attention("mha", 12, 3)
    built.load_state_dict(plain.state_dict())
    x = inputs(4, 2, 12).float()
    torch.testing.assert_close(built(x, x, x)[0], plain(x, x, x)[0])


def test_a_state_of_another_normalization_is_refused():
    state = layer("static", "l2").state_dict()
    assert state._metadata[""]["attention"]["mixing_normalization"] == "l2"
    layer("static", "l2").load_state_dict(state)
    for other in ("none", "sum"):
        with pytest.raises(RuntimeError, match="mixing_normalization"):
            layer("static", other).load_state_dict(state)
    earlier = layer("static", "none").state_dict()
    assert "mixing_normalization" not in earlier._metadata[""]["attention"]  # as in states of versions without it
    layer("static", "none").load_state_dict(earlier)
    with pytest.raises(RuntimeError, match="mixing_normalization"):
        layer("static", "sum").load_state_dict(earlier)


@pytest.mark.parametrize("mixing", ["none", "random", "average", "diagonal"])
def test_only_learned_columns_are_normalized(mixing):
    with pytest.raises(ValueError, match=f"mixing_normalization='l2'.*{mixing}"):
        AttentionSpec(mixing=mixing, mixing_normalization="l2")
