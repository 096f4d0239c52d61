"""The attention flags, declared once for every ``lowrank_*`` model, and what they resolve to."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field
from typing import Optional

import torch
from fairseq.modules.fairseq_dropout import FairseqDropout
from fairseq.modules.quant_noise import quant_noise
from fairseq.utils import eval_str_list
from omegaconf import DictConfig, OmegaConf

from fairseq_lowrank.attention import AXES, PRESETS, AttentionSpec, MultiheadAttention
from fairseq_lowrank.attention.mixing import MIXINGS
from fairseq_lowrank.ops import BACKENDS

SITES = ("encoder", "decoder", "cross")
LARGEST_HEAD = 65536
"""The largest ``--head-dim``: a slip of the keyboard ends in a line, not in an allocation."""


def _choices(values: tuple[str, ...] | dict) -> dict:
    return {"choices": tuple(values), "metavar": "NAME"}


# One entry a flag: its name in the configuration, its type, what argparse needs, and its help.
FLAGS: dict[str, tuple[type, dict, str]] = {
    "attention": (str, _choices(PRESETS), f"kind of attention: {', '.join(PRESETS)} (default: mha)"),
    "head_dim": (
        int,
        {"metavar": "N"},
        "size of a head's queries, keys and values, free of the embedding size (default: embedding size / heads); "
        "the FixedHead paper sets it to the sequence length",
    ),
    "attention_projection": (
        str,
        _choices(AXES["projection"]),
        f"over the preset: how heads get queries, keys and values: {', '.join(AXES['projection'])}",
    ),
    "attention_activation": (
        str,
        _choices(AXES["activation"]),
        f"over the preset: what turns scores into probabilities: {', '.join(AXES['activation'])}",
    ),
    "head_mixing": (
        str,
        _choices(AXES["mixing"]),
        f"over the preset: how the heads' probabilities are mixed: {', '.join(AXES['mixing'])}",
    ),
    "no_attention_bias": (bool, {}, "attention projections add no bias"),
    "attention_backend": (
        str,
        _choices(BACKENDS),
        f"how attention is computed: {', '.join(BACKENDS)} (default: auto, the fastest that can)",
    ),
    "attention_sites": (
        str,
        {"metavar": "SITES"},
        f"comma list of {', '.join(SITES)}: where heads, projection, activation and mixing are as chosen; other attention "
        "is plain mha (default: all)",
    ),
    "mixing_lr_scale": (
        float,
        {"metavar": "X"},
        "factor of the learning rate of the head mixing parameters (default: 1)",
    ),
}


def add_attention_args(parser: argparse.ArgumentParser) -> None:
    """Declare the attention flags, without defaults: architectures and :class:`AttentionOptions` have those."""
    for name, (kind, details, text) in FLAGS.items():
        options = {"action": "store_true"} if kind is bool else {"type": kind, **details}
        parser.add_argument(f"--{name.replace('_', '-')}", help=text, **options)


def dataclass_fields() -> list[tuple[str, type, object]]:
    """The attention flags as fields ``(name, type, field)`` for a model that is configured by a dataclass."""
    return [
        (name, bool, field(default=False, metadata={"help": text}))
        if kind is bool
        else (name, Optional[kind], field(default=None, metadata={"help": text}))  # noqa: UP045 (fairseq reads no unions)
        for name, (kind, _, text) in FLAGS.items()
    ]


def as_namespace(args: argparse.Namespace | DictConfig) -> argparse.Namespace:
    """A plain namespace: fairseq drops the fields that it does not know from a ``DictConfig``."""
    if isinstance(args, DictConfig):
        return argparse.Namespace(**OmegaConf.to_container(args, resolve=True))
    return args


def learns_mixing(mixing: str) -> bool:
    """Whether this kind of head mixing has parameters."""
    with torch.device("meta"):
        module = MIXINGS[mixing](1, 1)
    return module is not None and any(True for _ in module.parameters())


def _of_both_sides(*templates: str) -> tuple[str, ...]:
    return tuple(template.format(side) for template in templates for side in ("encoder", "decoder"))


_SIZES = (
    *_of_both_sides("{}_embed_dim", "{}_ffn_embed_dim", "{}_attention_heads", "{}_layers"),
    *("decoder_input_dim", "decoder_output_dim", "max_source_positions", "max_target_positions"),
)
_DROPOUTS = (
    *("dropout", "attention_dropout", "activation_dropout", "adaptive_softmax_dropout"),
    *_of_both_sides("{}_layerdrop"),
)


def check_sizes(args: object) -> None:
    """Refuse sizes and probabilities that fairseq's Transformer takes without a word, or drowns in a traceback.

    Raises:
        ValueError: a flag whose value is refused, named with what would be accepted.
    """
    for name in _SIZES:
        if (size := getattr(args, name, None)) is not None and size < 1:
            raise ValueError(f"{_flag(name)} {size}: expected a number >= 1")
    for name in _DROPOUTS:
        if (rate := getattr(args, name, None)) is not None and not 0 <= rate < 1:
            raise ValueError(f"{_flag(name)} {rate:g}: expected a number from 0 to below 1")
    for side in ("encoder", "decoder"):
        check_layers_to_keep(args, side)
    for part in ("softmax", "input"):
        check_cutoff(f"adaptive_{part}_cutoff", getattr(args, f"adaptive_{part}_cutoff", None))
        if (factor := getattr(args, f"adaptive_{part}_factor", None)) is not None and not 0 < factor < math.inf:
            raise ValueError(f"--adaptive-{part}-factor {factor:g}: expected a number above 0")


def check_layers_to_keep(args: object, side: str) -> None:
    """Refuse ``--encoder-layers-to-keep`` and ``--decoder-layers-to-keep`` that name no layer of the model, or one twice."""
    if not (kept := getattr(args, f"{side}_layers_to_keep", None)):
        return
    layers = getattr(args, f"{side}_layers")
    numbers = [number.strip() for number in str(kept).split(",")]
    # a model that was loaded has been shortened to the layers that it kept
    there = set(numbers) <= set(map(str, range(layers))) or len(numbers) == layers
    if not there or len(set(numbers)) < len(numbers):
        raise ValueError(f"--{side}-layers-to-keep {kept}: expected different layers from 0 to {layers - 1}, such as 0")


def check_cutoff(name: str, cutoff: object) -> None:
    """Refuse bands of an adaptive input or softmax that are no numbers, or do not rise."""
    if not cutoff:
        return
    try:
        numbers = eval_str_list(cutoff, type=int)
    except TypeError:
        numbers = [0]
    if any(low >= high for low, high in zip([0, *numbers], numbers, strict=False)):
        given = cutoff if isinstance(cutoff, str) else ",".join(map(str, cutoff))
        raise ValueError(f"{_flag(name)} {given}: expected rising numbers of words, such as 20000,60000")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class AttentionOptions:
    """The attention flags of a model, resolved and checked; it builds every attention layer of the model.

    Args:
        spec: the composition at the chosen sites.
        sites: where it applies, of ``encoder``, ``decoder``, ``cross``; elsewhere attention is plain ``mha``.
        bias: whether projections add a bias (at every site).
        backend: how attention is computed (at every site).
        mixing_lr_scale: factor of the learning rate of the mixing parameters.
    """

    spec: AttentionSpec = field(default_factory=AttentionSpec)
    sites: frozenset[str] = frozenset(SITES)
    bias: bool = True
    backend: str = "auto"
    mixing_lr_scale: float = 1.0

    @classmethod
    def from_args(cls, args: object) -> AttentionOptions:
        """Read the flags from any configuration object; an absent flag has its default.

        Raises:
            ValueError: a flag whose value is refused, named with what would be accepted.
        """
        flags = {name: getattr(args, name, None) for name in FLAGS}
        for name in ("encoder_xformers_att_config", "decoder_xformers_att_config"):
            if getattr(args, name, None):
                raise ValueError(f"--{name.replace('_', '-')}: expected none, attention is what --attention says")
        sites = frozenset(SITES)
        if flags["attention_sites"] is not None:
            sites = frozenset(site.strip() for site in flags["attention_sites"].split(",") if site.strip())
            if not sites or sites - set(SITES):
                raise ValueError(
                    f"--attention-sites {flags['attention_sites']!r}: expected a comma list of {', '.join(SITES)}"
                )
        backend = flags["attention_backend"] or "auto"
        if backend not in BACKENDS:
            raise ValueError(f"--attention-backend {backend!r}: expected one of {', '.join(BACKENDS)}")
        scale = 1.0 if flags["mixing_lr_scale"] is None else float(flags["mixing_lr_scale"])
        if not 0 <= scale < math.inf:
            raise ValueError(f"--mixing-lr-scale {scale:g}: expected a number >= 0")
        if (flags["head_dim"] or 0) > LARGEST_HEAD:
            raise ValueError(f"--head-dim {flags['head_dim']}: expected 1 to {LARGEST_HEAD}")
        spec = AttentionSpec.from_preset(
            flags["attention"] or "mha",
            head_dim=flags["head_dim"],
            projection=flags["attention_projection"],
            activation=flags["attention_activation"],
            mixing=flags["head_mixing"],
        )
        if scale != 1 and not learns_mixing(spec.mixing):
            raise ValueError(
                f"--mixing-lr-scale {scale:g}: head mixing {spec.mixing} learns nothing whose rate could be scaled; expected it "
                "beside --attention mixhead-a or mixhead-b, or --head-mixing static or positionwise"
            )
        return cls(spec, sites, not flags["no_attention_bias"], backend, scale)

    def check_sites(self, *present: str) -> None:
        """Refuse a choice of sites where the model has no attention.

        Raises:
            ValueError: ``--attention-sites`` names a site that is not ``present``.
        """
        if self.sites != set(SITES) and (missing := sorted(self.sites - set(present))):
            raise ValueError(
                f"--attention-sites {','.join(missing)}: this model has no such attention; expected "
                f"{', '.join(present)}"
            )

    def spec_at(self, site: str) -> AttentionSpec:
        """The composition at a site."""
        return self.spec if site in self.sites else AttentionSpec()

    def check(
        self, site: str, embed_dim: int, num_heads: int, kdim: int | None = None, scale_heads: bool = False
    ) -> None:
        """Refuse what :meth:`build`, or fairseq's layer around it, would refuse.

        Raises:
            ValueError: sizes, or a backend, that do not fit the composition at this site.
        """
        try:
            with torch.device("meta"):
                layer = MultiheadAttention(
                    self.spec_at(site), embed_dim, num_heads, kdim=kdim, vdim=kdim, backend=self.backend
                )
        except ValueError as error:
            raise ValueError(f"{site} attention: {error}") from error
        if scale_heads and num_heads * layer.head_dim != embed_dim:
            raise ValueError(
                f"--scale-heads needs heads * head size = embedding size: {num_heads} * {layer.head_dim} != {embed_dim}"
            )

    def build(
        self,
        site: str,
        embed_dim: int,
        num_heads: int,
        *,
        dropout: float,
        q_noise: float = 0.0,
        qn_block_size: int = 8,
        **sizes: object,
    ) -> MultiheadAttention:
        """The attention layer of a site, with fairseq's dropout and quantisation noise."""
        layer = MultiheadAttention(
            self.spec_at(site),
            embed_dim,
            num_heads,
            dropout=FairseqDropout(dropout, module_name="MultiheadAttention"),
            bias=self.bias,
            backend=self.backend,
            wrap_projection=lambda projection: quant_noise(projection, q_noise, qn_block_size),
            **sizes,
        )
        if layer.mixing is not None:
            for parameter in layer.mixing.parameters():
                parameter.optim_overrides["optimizer"]["lr_scale"] = self.mixing_lr_scale
        return layer
