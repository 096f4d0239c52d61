"""The attention flags, declared once for every model of fairseq, and the options that they resolve to."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import math
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, make_dataclass
from typing import Any, Optional

from fairseq import models
from fairseq.dataclass import FairseqDataclass
from fairseq.modules.fairseq_dropout import FairseqDropout
from fairseq.modules.quant_noise import quant_noise
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf, open_dict

from fairseq_lowrank.attention import AXES, PRESETS, AttentionConfig, AttentionSpec
from fairseq_lowrank.messages import IMPORT_PLUGIN, UserError, did_you_mean, flag_name
from fairseq_lowrank.ops import BACKENDS
from fairseq_lowrank.parts import MODULE_AXES, PLAIN, SLOTS, Axis, parts_of
from fairseq_lowrank.plugin.layer import FairseqAttention

SITES = ("encoder", "decoder", "cross")


# The table itself, not a copy: a plugin may add values to it later.
def _choices(values: Collection[str]) -> dict:
    return {"choices": values, "metavar": "NAME"}


def _chosen(values: Collection[str], text: str) -> str:
    """Return a value of a flag with choices.

    Raises:
        ArgumentTypeError: it is not among them. The message is argparse's, with the nearest choice.
    """
    if text not in values:
        choices = ", ".join(map(repr, values))
        raise argparse.ArgumentTypeError(
            f"invalid choice: {text!r} (choose from {choices}).{did_you_mean(text, values)} {IMPORT_PLUGIN}"
        )
    return text


def _axis_flag(axis: Axis) -> Flag:
    if axis.type is bool:
        return bool, {}, axis.help
    if axis.choices is None:
        return axis.type, {"metavar": "N" if axis.type is int else "X"}, axis.help
    default = axis.default if axis.readers else "the method's choice"
    return axis.type, _choices(axis.choices), f"{axis.help}: {', '.join(axis)} (default: {default})"


Flag = tuple[type, dict, str]
"""The type of a flag, options of argparse, and its help."""
FLAGS: dict[str, Flag] = {}
"""The flags of attention, by their names in the configuration. :func:`read_registry` fills the table."""
EMBED_RANK: Flag = (
    int,
    {"metavar": "R"},
    "language models: factor the input embedding into V x R and R x d (vocabulary bottleneck paper, section 5.1); the "
    "output matrix stays full and untied (default: not factored)",
)
EMBED_KERNEL: Flag = (
    int,
    {"metavar": "K"},
    "language models: embed each position by a convolution over the last K tokens, which multiplies the embedding's rank by up to K "
    "(vocabulary bottleneck paper, equations 2 and 4; default: none)",
)
TRAINING_FLAGS: dict[str, Flag] = {
    "train_only": (
        str,
        {"metavar": "WHICH"},
        "train some parameters and leave all others as they are: mixing (with gains, head maps and gates), encoder, decoder, or a "
        "pattern of names such as '*.self_attn.*' (default: all)",
    ),
    "embeddings_by_word": (
        str,
        {"metavar": "FOLDER", "nargs": "?", "const": "own"},
        "with --finetune-from-model and another dictionary: give each word its own embedding. FOLDER has the dictionaries of a "
        "checkpoint of an older version, which has none itself",
    ),
}
"""The flags of a training that a model's configuration records."""
MODEL_FLAGS: dict[str, Flag] = {}
"""The flags of attention, of the embedding and of a training."""


def read_registry() -> bool:
    """Write the flags of all registered methods into the tables of flags, and return True if a flag is new."""
    of_axes = {axis.flag: _axis_flag(axis) for axis in AXES.values()}
    new = not of_axes.keys() <= FLAGS.keys()
    flags: dict[str, Flag] = {
        "attention": (str, _choices(PRESETS), f"attention method: {', '.join(PRESETS)} (default: fairseq's own)"),
        **of_axes,
        "no_attention_bias": (bool, {}, "build attention projections without a bias"),
        "attention_backend": (
            str,
            _choices(BACKENDS),
            f"how attention is computed: {', '.join(BACKENDS)} (default: auto, the fastest that supports the call)",
        ),
        "attention_sites": (
            str,
            {"metavar": "SITES"},
            f"where to use the chosen attention: a comma-separated list of {', '.join(SITES)}. Plain mha elsewhere (default: all)",
        ),
        "mixing_lr_scale": (
            float,
            {"metavar": "X"},
            "factor of the learning rate of mixing, gains, head maps and gates (default: 1)",
        ),
    }
    for table, content in (
        (FLAGS, flags),
        (MODEL_FLAGS, flags | {"embed_rank": EMBED_RANK, "embed_kernel": EMBED_KERNEL} | TRAINING_FLAGS),
    ):
        table.clear()
        table.update(content)
    return new


read_registry()


def add_attention_args(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of all registered methods in a group. A flag that is not given adds nothing to the arguments."""
    group = parser.add_argument_group("Attention", argument_default=argparse.SUPPRESS)
    for name, (kind, details, text) in MODEL_FLAGS.items():
        how: dict[str, Any] = {"action": "store_true"} if kind is bool else {"type": kind, **details}
        if "choices" in details:
            how["type"] = functools.partial(_chosen, details["choices"])
        group.add_argument(f"--{name.replace('_', '-')}", help=text, **how, default=argparse.SUPPRESS)


def dataclass_fields() -> list[tuple[str, Any, Any]]:
    """Return the flags as fields ``(name, type, field)`` for a model that is configured by a dataclass."""
    return [
        (name, bool, field(default=False, metadata={"help": text}))
        if kind is bool
        else (name, Optional[kind], field(default=None, metadata={"help": text}))  # noqa: UP045 (fairseq reads no unions)
        for name, (kind, _, text) in MODEL_FLAGS.items()
    ]


# A model's class declares its flags, and a class may override what it inherits. So the flags are added to the parser of
# fairseq-train, the one place that all architectures share. (fairseq ignores the second declaration by a dataclass.)
def offer_flags(add_model_args: Callable) -> Callable:
    """Wrap ``options.add_model_args``: ``fairseq-train`` takes the attention flags with every architecture."""

    @functools.wraps(add_model_args)
    def add_model_and_attention_args(parser):
        read_registry()
        group = add_model_args(parser)
        add_attention_args(parser)
        return group

    return add_model_and_attention_args


def register_with_flags(register: Callable) -> Callable:
    """Wrap ``models.register_model``: the dataclass of a model has the attention flags."""

    @functools.wraps(register)
    def register_model(name, dataclass=None):
        return register(name, dataclass if dataclass is None else with_flags(dataclass))

    return register_model


def extend_registered_models() -> None:
    """Add the attention flags to the dataclasses of the models that are registered already."""
    for name, config in models.MODEL_DATACLASS_REGISTRY.items():
        if (extended := with_flags(config)) is not config:
            use_dataclass(name, extended)


def use_dataclass(name: str, config: type[FairseqDataclass]) -> None:
    """Make a dataclass that of a registered model: for fairseq, for hydra, and in its module, where pickle looks it up."""
    models.MODEL_DATACLASS_REGISTRY[name] = config
    setattr(models.MODEL_REGISTRY[name], "__dataclass", config)
    setattr(sys.modules[config.__module__], config.__name__, config)
    node: Any = config()
    node._name = name
    ConfigStore.instance().store(name=name, group="model", node=node, provider="fairseq")


def with_flags(config: type[FairseqDataclass]) -> type[FairseqDataclass]:
    """Return a model's dataclass with the attention flags as further fields; it replaces ``config`` in its module."""
    present = {known.name for known in dataclasses.fields(config)}
    further = [flag for flag in dataclass_fields() if flag[0] not in present]
    if not further:
        return config
    extended = make_dataclass(
        config.__name__,
        further,
        bases=(config,),
        namespace={"__module__": config.__module__, "__doc__": config.__doc__},
    )
    module = sys.modules[config.__module__]
    if getattr(module, config.__name__, None) is config:  # pickle looks up a configuration's class there
        setattr(module, config.__name__, extended)
    return extended


def as_namespace(args: Any) -> argparse.Namespace:
    """Return a configuration as a plain namespace: fairseq drops unknown fields from a ``DictConfig``."""
    if isinstance(args, DictConfig):
        fields: Any = OmegaConf.to_container(args, resolve=True)  # a dictionary, of a DictConfig
        return argparse.Namespace(**fields)
    return args


def refuse_misspelt_flags(args: object) -> None:
    """Refuse a name in a ``DictConfig`` that is almost the name of a flag.

    hydra accepts any name after ``+model.``, and models ignore names that they do not know.

    Raises:
        UserError: such a name.
    """
    for name in map(str, args) if isinstance(args, DictConfig) else ():
        if near := _meant_flag(name):
            raise UserError(f"model.{name}: unknown. Did you mean model.{near}?")


def _meant_flag(name: str) -> str | None:
    """Return the flag that a misspelt name is close to. No option of fairseq's models is so close to a flag."""
    near = [] if name in MODEL_FLAGS else difflib.get_close_matches(name, MODEL_FLAGS, 1, cutoff=0.88)
    return near[0] if near else None


# fairseq changes only names that the configuration in a checkpoint has. One that was saved without this package, or by an
# older version, has no names of our (newer) flags.
def override_flags(overwrite: Callable) -> Callable:
    """Wrap ``overwrite_args_by_name``: --model-overrides may choose attention for every checkpoint.

    Raises:
        UserError: a name that is almost the name of a flag.
    """

    @functools.wraps(overwrite)
    def overwrite_args_by_name(cfg, overrides):
        for name in map(str, overrides):
            if near := _meant_flag(name):
                raise UserError(f"override {name!r}: unknown. Did you mean {near!r}?")
        model = cfg.get("model") if isinstance(cfg, DictConfig) else None
        if isinstance(model, DictConfig):
            with open_dict(model):
                for name in MODEL_FLAGS.keys() & overrides.keys() - model.keys():
                    model[name] = None
        overwrite(cfg, overrides)

    return overwrite_args_by_name


OF_FAIRSEQ = {"latent_dim": "latent_vars"}
"""Flags whose name fairseq uses too (of the quantiser of wav2vec2), each with a field of the configurations that have fairseq's."""


def given_flags(args: object) -> dict[str, Any]:
    """Return the attention flags that have a value in a configuration."""
    others = {name for name, field in OF_FAIRSEQ.items() if hasattr(args, field)}
    values = {name: getattr(args, name, None) for name in FLAGS if name not in others}
    return {name: value for name, value in values.items() if value is not None and value is not False}


def learning_parts(spec: AttentionSpec) -> list[str]:
    """Return the axes whose parts are modules with parameters: mixing, gains, head maps and gates."""
    return [axis for axis, part in spec.parts if axis in MODULE_AXES and part.learns]


@dataclass(frozen=True)
class AttentionOptions:
    """The attention flags of a model, resolved and checked; it builds every attention layer of the model.

    Args:
        spec: the composition at the chosen sites.
        sites: the sites of the composition: ``encoder``, ``decoder``, ``cross``. Attention is plain ``mha`` elsewhere.
        bias: whether projections add a bias (at every site).
        backend: how attention is computed (at every site).
        mixing_lr_scale: factor of the learning rate of all parts: mixing, gains, head maps and gates.
    """

    spec: AttentionSpec = field(default_factory=AttentionSpec)
    sites: frozenset[str] = frozenset(SITES)
    bias: bool = True
    backend: str = "auto"
    mixing_lr_scale: float = 1.0

    @classmethod
    def from_args(cls, args: Any) -> AttentionOptions:
        """Read the flags from any configuration object. A missing flag has its default.

        Raises:
            UserError: a flag has a value that is not accepted; the message lists accepted values.
        """
        flags = given_flags(args)
        _refuse_flags_of_stock_attention(args)
        sites = frozenset(SITES)
        if "attention_sites" in flags:
            names = flags["attention_sites"]
            words = names.split(",") if isinstance(names, str) else ()
            sites = frozenset(site.strip() for site in words if site.strip())
            if not sites or sites - set(SITES):
                raise UserError(f"--attention-sites {names!r}: expected a comma-separated list of {', '.join(SITES)}.")
        backend = flags.get("attention_backend", "auto")
        if backend not in tuple(BACKENDS):  # a value of any type, also a list
            raise UserError(f"--attention-backend {backend!r}: expected one of {', '.join(BACKENDS)}.")
        scale = flags.get("mixing_lr_scale", 1.0)
        if not isinstance(scale, int | float):
            raise UserError(f"--mixing-lr-scale {scale!r}: expected a number >= 0.")
        if not 0 <= scale < math.inf:
            raise UserError(f"--mixing-lr-scale {scale:g}: expected a number >= 0.")
        # A configuration file may hold "false" in quotes, a text that Python takes for true.
        if (no_bias := flags.get("no_attention_bias", False)) not in (True, False):
            raise UserError(f"--no-attention-bias {no_bias!r}: expected True or False.")
        axes = {name: flags[axis.flag] for name, axis in AXES.items() if axis.flag in flags}
        try:
            spec = AttentionSpec.from_preset(flags.get("attention", PLAIN), **axes)
        except ValueError as error:
            raise UserError(str(error)) from error
        if scale != 1 and not learning_parts(spec):
            raise UserError(
                f"--mixing-lr-scale {scale:g}: this attention has no mixing, gain, head map or gate that learns, so there is no "
                "learning rate to scale. Use it with such a method, for example --attention mixhead-a."
            )
        return cls(spec, sites, not no_bias, backend, float(scale))

    def check_sites(self, *present: str) -> None:
        """Check that the model has attention at the chosen sites.

        Raises:
            UserError: ``--attention-sites`` names a site that is not ``present``.
        """
        if self.sites != set(SITES) and (missing := sorted(self.sites - set(present))):
            raise UserError(
                f"--attention-sites {','.join(missing)}: this model has no such attention. Choose from {', '.join(present)}."
            )

    def spec_at(self, site: str) -> AttentionSpec:
        """Return the composition at a site."""
        return self.spec if site in self.sites else AttentionSpec()

    def build_attention(
        self,
        site: str,
        embed_dim: int,
        num_heads: int,
        *,
        dropout: float,
        q_noise: float = 0.0,
        qn_block_size: int = 8,
        **sizes: Any,
    ) -> FairseqAttention:
        """Build the attention layer of a site, with fairseq's dropout and quantisation noise.

        Raises:
            UserError: sizes or the backend do not work with the composition at this site.
        """
        spec = self.spec_at(site)
        if site == "decoder" and not sizes.get("self_attention", True):
            for axis, part in spec.parts:
                if (axis == "score" and not spec.is_default(axis)) or (
                    axis in MODULE_AXES and part.needs_self_attention()
                ):
                    raise UserError(
                        f"--cross-self-attention does not work with {flag_name(AXES[axis].flag)} {getattr(spec, axis)}: encoder "
                        "states have no position among the keys. Remove one of the two, or add --attention-sites encoder."
                    )

        try:
            layer = FairseqAttention(
                AttentionConfig(
                    spec,
                    embed_dim,
                    num_heads,
                    bias=self.bias,
                    backend=self.backend,
                    **sizes,
                ),
                dropout=FairseqDropout(dropout, module_name="MultiheadAttention"),
                wrap_projection=functools.partial(quant_noise, p=q_noise, block_size=qn_block_size),
            )
        except ValueError as error:
            raise UserError(f"{site} attention: {error}") from error
        layer.site = site
        for axis, part in parts_of(layer).items():
            # Checkpoints of 0.2.0 have a scale of mixing alone, and their optimizer's groups have to be found again.
            if self.mixing_lr_scale != 1 or SLOTS[axis].fields:
                for parameter in part.parameters():
                    vars(parameter)["optim_overrides"]["optimizer"]["lr_scale"] = self.mixing_lr_scale
        return layer


def _refuse_flags_of_stock_attention(args: object) -> None:
    """Refuse flags that would have no effect, and no line would say so."""
    for name in ("encoder_xformers_att_config", "decoder_xformers_att_config"):
        if getattr(args, name, None):
            raise UserError(
                f"--{name.replace('_', '-')}: --attention replaces this attention. Remove one of the two flags."
            )
    for name, off in (("mha_heads_to_keep", -1), ("mha_reg_scale_factor", 0.0)):
        value = getattr(args, name, None)
        if value is not None and value != off:
            raise UserError(
                f"--{name.replace('_', '-')} {value}: fairseq prunes heads of stock attention only, not those of --attention. "
                "Remove the flag."
            )
