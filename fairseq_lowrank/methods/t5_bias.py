"""T5's relative positions: a learned number for each head and range of distances is added to scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fairseq_lowrank.methods.standard import CACHED, PARAMETERS
from fairseq_lowrank.parts import AttentionConfig, DistanceBias, Method, Option, Paper, register


class BucketBias(DistanceBias):
    """S_i[t, s] + b_i[bucket(s − t)], with b: h × buckets from 0.

    Source: T5 (Raffel et al. 2020, arXiv 1910.10683, section 2.1), with the buckets of ``T5Attention`` in ``transformers``. Half of
    the buckets of a side have one distance each. The others grow with the logarithm of the distance up to ``max_distance``, and
    the last one holds all further distances. With ``bucket_sides`` ``both``, each side has half of the buckets; with ``past``,
    which is for causal attention, all keys after the query share the bucket of distance 0. Self-attention only.

    Raises:
        ValueError: too few buckets, or a ``max_distance`` that the single distances reach.
    """

    name = "t5"
    options = (
        Option("position_buckets", "number b of ranges of distances, over both sides", default=32, letter="b"),
        Option("max_distance", "distance from which on all distances share a bucket", default=128),
        Option(
            "bucket_sides",
            "sides of a query that have buckets; past gives all of them to earlier keys, for causal attention",
            default="both",
            choices=("both", "past"),
        ),
    )

    def __init__(
        self, config: AttentionConfig, position_buckets: int = 32, max_distance: int = 128, bucket_sides: str = "both"
    ) -> None:
        super().__init__(config)
        self.position_buckets, self.max_distance, self.bucket_sides = position_buckets, max_distance, bucket_sides
        self.of_side = position_buckets // 2 if bucket_sides == "both" else position_buckets
        if self.of_side < 2:
            raise ValueError(
                f"position_buckets={position_buckets}: expected at least {4 if bucket_sides == 'both' else 2} with bucket_sides "
                f"{bucket_sides!r}."
            )
        if max_distance <= self.of_side // 2:
            raise ValueError(
                f"max_distance={max_distance}: {self.of_side // 2} buckets of a side have one distance each. Use more than "
                f"{self.of_side // 2}, or fewer position_buckets."
            )
        self.weight = nn.Parameter(torch.zeros(self.num_heads, position_buckets))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def buckets(self, distances: Tensor) -> Tensor:
        """Return the bucket of each distance, key minus query."""
        single = self.of_side // 2
        if self.bucket_sides == "both":
            first, distances = (distances > 0) * self.of_side, distances.abs()
        else:
            first, distances = torch.zeros_like(distances), -distances.clamp(max=0)
        # In float32 and in this order, like T5: the borders of its buckets depend on rounding.
        growth = torch.log(distances.clamp(min=1).float() / single) / math.log(self.max_distance / single)
        ranges = (single + (growth * (self.of_side - single)).long()).clamp(max=self.of_side - 1)
        return first + torch.where(distances < single, distances, ranges)

    def bias(self, distances: Tensor) -> Tensor:
        return self.weight[:, self.buckets(distances)].transpose(0, 1)


register(
    Method(
        name="t5-bias",
        title="T5's relative positions: a learned bias for each range of distances",
        formula="P_i = softmax(Q_i K_iᵀ / √d_k + b_i[bucket(s − t)]),   b: h × b from 0",
        parts={"score_bias": BucketBias},
        parameters=f"{PARAMETERS} + h·b",
        cached=CACHED,
        kind="QK",
        papers=(
            Paper(
                "Exploring the limits of transfer learning with a unified text-to-text transformer",
                "Raffel et al. 2020",
                "https://arxiv.org/abs/1910.10683",
            ),
        ),
        examples=(
            {"position_buckets": 6, "max_distance": 9},
            {"position_buckets": 4, "max_distance": 5, "bucket_sides": "past"},
        ),
        colour="#b07aa1",
    )
)
