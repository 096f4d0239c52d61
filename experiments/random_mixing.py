"""The spectra of trained mixing next to those of the same patterns with other matrices M."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairseq_lowrank.cli import _spectra
from fairseq_lowrank.messages import UserError

LARGEST_CONDITION = 1e5
"""Greatest condition number of an M that is inverted: the matrices are in float32, so two digits stay exact."""


def read(path, label: str, args) -> dict[str, dict]:
    """Return the spectra of a checkpoint of fairseq and, where it has one M for all queries, of :func:`controls`, by label."""
    generator = torch.Generator().manual_seed(args.seed)

    def others(layer, weights) -> dict[str, Tensor]:
        matrix = static_mixing(layer.module)
        return {} if matrix is None else controls(weights, matrix, generator)

    return _spectra.of_fairseq(path, label, args, others)


def static_mixing(module: nn.Module) -> Tensor | None:
    """Return M `[H, H]` of an attention layer that mixes probabilities by one matrix for all queries, else None."""
    mixing = getattr(module, "mixing", None)
    if mixing is None or mixing.query_weight is not None or mixing.reads_inputs:
        return None
    return mixing.operation(None).mixing_matrix()


CONTROLS = ("without mixing", "random M", "random off-diagonal", "shuffled off-diagonal")


def controls(mixed: Tensor, matrix: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Compute a layer's mixed heads with other matrices instead of the learned M, from the same patterns P_j.

    P̄_i = Σ_j M[j, i] P_j is solved for P.

    - *Without mixing* is P.
    - *Random M* is I + R, with normal entries of R and ‖R‖_F = ‖M − I‖_F: as far from I as the learned M.
    - *Random off-diagonal* keeps the diagonal of M, which only scales. The other entries are random, of either sign, with the same
      norm. So the weights of a mixed head have another sum. If M damps, its entries there are mostly negative, and the control
      removes less of what all heads share.
    - *Shuffled off-diagonal* permutes the entries off the diagonal within each column. Diagonal, norm and sum of a mixed head's
      weights stay; only the assignment of weights to heads is lost.

    Args:
        mixed: P̄, `[H, ...]`.
        matrix: M, `[H, H]` (indices j, i).
        generator: the generator of R, whose entries also give the permutation of each column.

    Returns:
        A dictionary with the names of :data:`CONTROLS`, each `[H, ...]` in float64.

    Raises:
        UserError: M is singular or nearly singular, so P cannot be computed from P̄.
    """
    matrix, identity = matrix.double(), torch.eye(len(matrix), dtype=torch.float64)
    if not torch.linalg.cond(matrix) < LARGEST_CONDITION:
        raise UserError(
            f"M of {len(matrix)} heads is singular or nearly singular, so heads before mixing are unknown. Give another checkpoint."
        )
    patterns = torch.linalg.solve(matrix.t(), mixed.double().flatten(1)).view(mixed.shape)
    noise = torch.randn(matrix.shape, dtype=torch.float64, generator=generator)
    off = noise - torch.diag(noise.diagonal())
    learned_off = matrix - torch.diag(matrix.diagonal())
    # the rows of each column except the diagonal's, in random order and in their own order
    order, places = (
        keys.clone().fill_diagonal_(torch.inf).argsort(dim=0, stable=True)[:-1]
        for keys in (noise, torch.zeros_like(noise))
    )
    others = {
        "random M": identity + noise * ((matrix - identity).norm() / noise.norm()),
        "random off-diagonal": torch.diag(matrix.diagonal()) + off * (learned_off.norm() / off.norm().clamp_min(1e-30)),
        "shuffled off-diagonal": torch.diag(matrix.diagonal()).scatter(0, places, matrix.gather(0, order)),
    }
    mix = {name: torch.einsum("ji,j...->i...", other, patterns) for name, other in others.items()}
    return {"without mixing": patterns, **mix}
