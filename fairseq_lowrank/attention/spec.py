"""The axes of an attention layer, their values, and the presets that name methods of papers."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from fairseq_lowrank.methods import HEAD_MAPS, HEAD_OUTPUTS, PROJECTIONS, SCORE_FUNCTIONS
from fairseq_lowrank.methods.gated import GATE_STARTS
from fairseq_lowrank.ops.activation import ACTIVATIONS
from fairseq_lowrank.parts.mixing import MIXINGS, NORMALIZATIONS, NORMALIZED_MIXINGS, SCORE_MIXINGS
from fairseq_lowrank.parts.projection import AttentionDims, Projection
from fairseq_lowrank.parts.score import LayerContext, ScoreFunction


@dataclass(frozen=True)
class Axis:
    """An independent choice, declared here for the flags, the tables and the messages that are about it.

    Args:
        flag: its name on the command line and in a model's configuration.
        help: what it decides.
        choices: the names of its values; ``None`` where a value is a positive integer or none.
    """

    flag: str
    help: str
    choices: Collection[str] | None = None

    @property
    def type(self) -> type:
        return int if self.choices is None else str

    def __iter__(self) -> Iterator[str]:
        return iter(self.choices or ())


AXES = {
    "head_dim": Axis(
        "head_dim",
        "size of a head's queries, keys and values, free of the embedding size (default: embedding size / heads); "
        "the FixedHead paper sets it to the sequence length",
    ),
    "value_dim": Axis(
        "value_dim",
        "size of a head's values, free of that of its queries and keys: what helps outputs apart from what helps scores "
        "(default: the head size)",
    ),
    "key_value_heads": Axis(
        "key_value_heads",
        "heads of keys and values, g dividing the heads of queries: head i reads the keys of head floor(i g / h) "
        "(default: as many as heads)",
    ),
    "projection": Axis("attention_projection", "how heads get queries, keys and values", PROJECTIONS),
    "score": Axis("attention_score", "how scores are computed", SCORE_FUNCTIONS),
    "synthesizer_heads": Axis(
        "synthesizer_heads",
        "dense Synthesizer: number g of second layers, a divisor of the heads; head i uses layer floor(i g / h) (default: one per "
        "head; 1 gives the Mixhead paper's 248M parameters)",
    ),
    "score_mixing": Axis("score_mixing", "how the heads' scores are mixed before the softmax", SCORE_MIXINGS),
    "activation": Axis("attention_activation", "what turns scores into probabilities", ACTIVATIONS),
    "mixing": Axis("head_mixing", "how the heads' probabilities are mixed", MIXINGS),
    "mixing_normalization": Axis(
        "mixing_normalization",
        "divisor of each column of a learned mixing matrix: its sum (Mixhead paper, equation 13, which the paper calls "
        "numerically unstable because the sum can be 0) or its l2 norm (equation 14)",
        NORMALIZATIONS,
    ),
    "head_map": Axis(
        "head_map", "a static map of projected queries, keys and values, over features or over heads", HEAD_MAPS
    ),
    "head_output": Axis(
        "head_output", "what happens to the outputs of heads before the output projection", HEAD_OUTPUTS
    ),
    "gate_start": Axis(
        "gate_start",
        "where the gates of --head-output gate and head-gate start: at 1, or at a half as published, which halves the outputs",
        GATE_STARTS,
    ),
    "latent_dim": Axis(
        "latent_dim",
        "mla: size r of the vector from which keys and values are computed, all that a token caches (default: embedding size / 2); "
        "mfa: size of the latent of queries (default: the embedding size)",
    ),
    "shared_dim": Axis(
        "shared_dim",
        "collaborative: size D of the queries and keys that heads share (default: heads * head size, plain attention)",
    ),
    "factor_rank": Axis(
        "rank",
        "lrkv: rank of each head's own part of keys and values (default head size / 4); tpa: products of keys and values (default 2); "
        "dcmha: rank of the mixing of each query (default 2)",
    ),
    "query_rank": Axis("query_rank", "tpa: products of queries (default: 6)"),
}
"""The axes by the names of their fields in :class:`AttentionSpec`."""

PRESETS: dict[str, dict[str, str]] = {
    "mha": {},
    "fixedhead": {},
    "mixhead-a": {"mixing": "static"},
    "mixhead-b": {"mixing": "positionwise"},
    "mixhead-random": {"mixing": "random"},
    "avghead": {"mixing": "average"},
    "gain": {"mixing": "diagonal"},
    "talking-heads": {"score_mixing": "static", "mixing": "static"},
    "mhe-add": {"projection": "head-embedding-add"},
    "mhe-mul": {"projection": "head-embedding-mul"},
    "sha": {"projection": "single"},
    "mqa": {"projection": "multi-query"},
    "gqa": {},
    "skv": {"projection": "shared-kv"},
    "el": {"projection": "el"},
    "gated-head": {"head_output": "head-gate"},
    "gated": {"head_output": "gate"},
    "mla": {"projection": "latent"},
    "dcmha": {"score_mixing": "dynamic", "mixing": "dynamic"},
    "diff": {"head_output": "difference"},
    "collaborative": {"projection": "collaborative"},
    "mfa": {"projection": "factorized-query"},
    "lrkv": {"projection": "low-rank-kv"},
    "tpa": {"projection": "tensor-product"},
    "xsa": {"head_output": "exclusive"},
    "knocking-linear": {"head_map": "features"},
    "mea": {"head_map": "heads"},
}
"""The axes that each value of ``--attention`` sets. An axis flag overrides the preset."""

NEEDED = {
    "fixedhead": ("head_dim", "a head size", "the paper sets it to the sequence length"),
    "gqa": ("key_value_heads", "a number of key and value heads", "the paper takes 8 for 64 heads"),
}
"""The axis that a preset leaves to whoever chooses it, in words, and what to set it to."""

LARGEST_PROJECTION = 2**31
"""The most numbers that the weight of one projection may hold (8 GiB in float32): more is a mistake in a size."""


@dataclass(frozen=True)
class AttentionSpec:
    """One choice on every axis. Sizes are checked against it by :meth:`projection_of`.

    Args:
        head_dim: size d_k of a head's queries, keys and values; ``None`` means embed_dim / num_heads. Chosen freely it
            is FixedHead (Bhojanapalli et al. 2020, section 3, eq. 9).
        value_dim: size d_v of a head's values; ``None`` means the head size.
        key_value_heads: g heads of keys and values; head i of h reads head ⌊i·g/h⌋; ``None`` means the projection's
            own number. Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245); g = 1 is multi-query attention.
        projection: how heads get their queries, keys and values, see :data:`~.projections.PROJECTIONS`.
        score: how scores are computed, see :data:`~.scores.SCORE_FUNCTIONS`.
        synthesizer_heads: g second layers of the dense synthesizer; head i of h reads layer ⌊i·g/h⌋; ``None`` means h.
        score_mixing: how the heads' scores are mixed before the softmax, ``none`` or ``static``.
        activation: ``softmax`` or ``sigsoftmax``.
        mixing: how the heads' probabilities are mixed, see :data:`~.mixing.MIXINGS`.
        mixing_normalization: normalisation of the columns of ``static`` and ``positionwise`` mixing, see
            :func:`~.mixing.normalize_columns`.
        head_map: a static map of projected queries, keys and values, see :data:`~.maps.HEAD_MAPS`.
        head_output: what happens to the outputs of heads, see :data:`~.outputs.HEAD_OUTPUTS`.
        gate_start: where gates start, ``identity`` or ``half``.
        latent_dim, shared_dim, factor_rank, query_rank: sizes of the projections and mixings that read them.

    Raises:
        ValueError: an unknown value, or values that do not go together.
    """

    head_dim: int | None = None
    value_dim: int | None = None
    key_value_heads: int | None = None
    projection: str = "independent"
    score: str = "dot-product"
    synthesizer_heads: int | None = None
    score_mixing: str = "none"
    activation: str = "softmax"
    mixing: str = "none"
    mixing_normalization: str = "none"
    head_map: str = "none"
    head_output: str = "none"
    gate_start: str = "identity"
    latent_dim: int | None = None
    shared_dim: int | None = None
    factor_rank: int | None = None
    query_rank: int | None = None

    def __post_init__(self) -> None:
        for name, axis in AXES.items():
            value = getattr(self, name)
            if axis.choices is None:
                if value is not None:
                    _check_size(name, value)
            elif value not in tuple(axis):
                raise ValueError(f"{name}={value!r}: expected one of {', '.join(axis)}")
        if self.mixing_normalization != "none" and self.mixing not in NORMALIZED_MIXINGS:
            raise ValueError(
                f"mixing_normalization={self.mixing_normalization!r} does not work with mixing {self.mixing!r}. Use mixing "
                f"{' or '.join(map(repr, NORMALIZED_MIXINGS))}"
            )
        if self.score == "synthesizer-random" and self.mixing == "positionwise":
            raise ValueError(
                "mixing 'positionwise' is computed from the queries, and score 'synthesizer-random' has none. Use another mixing, "
                "or score 'synthesizer-dense'"
            )
        if self.synthesizer_heads is not None and self.score != "synthesizer-dense":
            raise ValueError(
                f"synthesizer_heads={self.synthesizer_heads} with score {self.score!r}: it works only with 'synthesizer-dense'"
            )

        self._check_combinations()

    def _check_combinations(self) -> None:
        """Check the axes that only work with certain values of others.

        Raises:
            ValueError: values that do not go together.
        """
        read = set(PROJECTIONS[self.projection].sizes)
        if "dynamic" in (self.mixing, self.score_mixing):
            read.add("factor_rank")
        for name in ("latent_dim", "shared_dim", "factor_rank", "query_rank"):
            if getattr(self, name) is not None and name not in read:
                raise ValueError(
                    f"{name}={getattr(self, name)}: projection {self.projection!r} and mixing {self.mixing!r} have no such size. Remove it."
                )
        if self.gate_start != "identity" and self.head_output not in ("gate", "head-gate"):
            raise ValueError(
                f"gate_start={self.gate_start!r} works only with head_output 'gate' or 'head-gate'. Remove it."
            )
        if not PROJECTIONS[self.projection].composes and self.score != "dot-product":
            raise ValueError(
                f"projection={self.projection!r} works only with score 'dot-product', not with {self.score!r}"
            )
        plain = self.projection == "independent" and self.score == "dot-product"
        for name in ("head_map", "head_output"):
            changes_queries = name == "head_map" or self.head_output == "difference"
            if getattr(self, name) != "none" and changes_queries and not plain:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} works only with projection 'independent' and score 'dot-product', not with "
                    f"{self.projection!r} and {self.score!r}"
                )
        if self.head_output == "difference" and (self.mixing, self.score_mixing) != ("none", "none"):
            raise ValueError(
                f"head_output='difference' has two heads of queries for each output, which mixing {self.mixing!r} and score mixing "
                f"{self.score_mixing!r} cannot mix"
            )

    @property
    def queries_per_head(self) -> int:
        """How many heads of queries make the output of one head."""
        output = HEAD_OUTPUTS[self.head_output]
        return 1 if output is None else output.heads_per_output

    @classmethod
    def from_preset(cls, preset: str, **axes: int | str | None) -> AttentionSpec:
        """Return the spec of a preset; each axis in ``axes`` that is not ``None`` overrides it.

        Raises:
            ValueError: an unknown preset, axis or value, or a preset without what it :data:`needs <NEEDED>`.
        """
        if preset not in PRESETS:
            raise ValueError(f"attention preset {preset!r}: expected one of {', '.join(PRESETS)}")
        if unknown := set(axes) - set(AXES):
            raise ValueError(f"unknown attention axis {', '.join(sorted(unknown))}: expected {', '.join(AXES)}")
        chosen: dict[str, Any] = {axis: value for axis, value in axes.items() if value is not None}
        needed, what, advice = NEEDED.get(preset, (None, "", ""))
        if needed and needed not in chosen:
            raise ValueError(
                f"attention preset {preset!r} needs {what} (--{AXES[needed].flag.replace('_', '-')} N, {needed}=N): {advice}"
            )
        preset_axes: dict[str, Any] = dict(PRESETS[preset])
        return replace(cls(**preset_axes), **chosen)

    def projection_of(
        self, embed_dim: int, num_heads: int, kdim: int, vdim: int, *, zero_key: bool = False
    ) -> Projection:
        """Return the projection of a layer of these sizes.

        Args:
            zero_key: the layer appends a key of zeros.

        Raises:
            ValueError: embed_dim is not divisible by num_heads and no head size is given, or the projection
                cannot work with these sizes.
        """
        for name, size in (("embed_dim", embed_dim), ("num_heads", num_heads), ("kdim", kdim), ("vdim", vdim)):
            _check_size(name, size)
        head_dim = self.head_dim
        if head_dim is None:
            if embed_dim % num_heads:
                raise ValueError(
                    f"embed_dim={embed_dim} is not divisible by num_heads={num_heads}: "
                    "change one of them, or give a head size (--head-dim N, head_dim=N)"
                )
            head_dim = embed_dim // num_heads
        value_dim = head_dim if self.value_dim is None else self.value_dim
        if self.key_value_heads is not None and num_heads % self.key_value_heads:
            raise ValueError(f"key_value_heads={self.key_value_heads}: expected a divisor of num_heads={num_heads}")
        further = (self.latent_dim or 0, self.shared_dim or 0, self.factor_rank or 0, self.query_rank or 0)
        numbers = num_heads * max(head_dim, value_dim, *further) * max(embed_dim, kdim, vdim, *further)
        if numbers > LARGEST_PROJECTION:
            raise ValueError(
                f"embed_dim={embed_dim}, num_heads={num_heads}, head_dim={head_dim}, value_dim={value_dim}, kdim={kdim}, "
                f"vdim={vdim}: a projection would hold {numbers:,} numbers; expected sizes that make at most {LARGEST_PROJECTION:,}"
            )
        dims = AttentionDims(
            embed_dim,
            num_heads,
            head_dim,
            value_dim,
            kdim,
            vdim,
            self.key_value_heads,
            zero_key,
            self.latent_dim,
            self.shared_dim,
            self.factor_rank,
            self.query_rank,
            self.queries_per_head,
        )
        return PROJECTIONS[self.projection](dims)

    def score_of(self, projection: Projection, context: LayerContext) -> ScoreFunction:
        """Return the score function of a layer with this projection.

        Raises:
            ValueError: these scores cannot work in such a layer.
        """
        if context.unused_key_projection and self.score != "synthesizer-dense":
            raise ValueError(f"unused_key_projection with score {self.score!r}: it works only with 'synthesizer-dense'")
        score = SCORE_FUNCTIONS[self.score](projection, context._replace(synthesizer_heads=self.synthesizer_heads))
        if score.num_parameters > LARGEST_PROJECTION:
            raise ValueError(
                f"max_positions={context.max_positions}: score {self.score!r} would hold {score.num_parameters:,} numbers; expected sizes "
                f"that make at most {LARGEST_PROJECTION:,}"
            )
        return score


def _check_size(name: str, size: int) -> None:
    if not isinstance(size, Integral) or isinstance(size, bool) or size < 1:
        raise ValueError(f"{name}={size!r}: expected a positive integer")
