"""The regularisers of attention as flags of every criterion, such as ``--mixing-orthogonality``.

The objective is loss + λ · sample size · R. R is summed over attention layers and averaged over the sequences of a batch.
If a model runs a layer several times, like the decoder of the Levenshtein transformer, R is averaged over the passes too.
fairseq divides by the sample size, so λ weighs R against the loss of one token in nats (of one sentence with
``--sentence-avg``). R is logged in training and validation under the flag's name. ``loss``, ``nll_loss``, ``ppl`` and the
choice of the best checkpoint do not contain R.

A layer computes its R in its forward pass, and the gradient of R is added when the gradient of the layer's heads is computed.
So this works with ``--checkpoint-activations``, which runs the forward pass of a layer again in the backward pass and keeps
nothing else of the first one.
"""

import dataclasses
import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NoReturn

import torch
from fairseq import criterions
from fairseq.criterions.label_smoothed_cross_entropy_with_alignment import (
    LabelSmoothedCrossEntropyCriterionWithAlignment,
)
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from fairseq.models import ARCH_MODEL_REGISTRY
from torch import Tensor, nn

from fairseq_lowrank.attention import AttentionConfig, AttentionSpec, MultiheadAttention
from fairseq_lowrank.attention.layer import RegularizerInput
from fairseq_lowrank.messages import UserError, flag_name
from fairseq_lowrank.ops.activation import at_least_float32
from fairseq_lowrank.ops.penalties import head_overlap, mixing_orthogonality
from fairseq_lowrank.parts import AXES, MODULE_AXES, PARTS, LayerPart, Mixing, parts_of
from fairseq_lowrank.parts.stages import declared
from fairseq_lowrank.plugin.attention import chosen_options


@dataclass
class RegulariserConfig(FairseqDataclass):
    """The weights λ; 0 computes nothing."""

    mixing_orthogonality: float = field(
        default=0.0,
        metadata={
            "help": "weight of ||M^T M - I||^2 of the head mixing (Mixhead paper, eq. 16), summed over layers; it keeps the mixed "
            "heads diverse and the mixing of unit norm (default: 0, off)"
        },
    )
    row_space_penalty: float = field(
        default=0.0,
        metadata={
            "help": "weight of ||P_i P_j^T||^2 (R_d, Mixhead paper, eq. 20) over all pairs of heads and layers; it pushes the row spaces of "
            "the heads' attention matrices apart. With n tokens a sequence and heads of size d it costs 2n/3d times the matrix "
            "products of attention (default: 0, off)"
        },
    )
    column_space_penalty: float = field(
        default=0.0,
        metadata={
            "help": "weight of ||P_i^T P_j||^2 (R_c, Mixhead paper, eq. 20), the same for the column spaces, at the same cost "
            "(default: 0, off)"
        },
    )


_SPACES = {"row_space_penalty": "row", "column_space_penalty": "column"}
REGULARISERS = ("mixing_orthogonality", *_SPACES)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _weights(config: object) -> dict[str, float]:
    """Return the weights λ that are not 0, by name, of a configuration or of parsed arguments."""
    weights = {name: float(getattr(config, name, 0.0)) for name in REGULARISERS}
    for name, weight in weights.items():
        if not 0 <= weight < math.inf:
            raise UserError(f"{_flag(name)} {weight:g}: expected a number >= 0.")
    return {name: weight for name, weight in weights.items() if weight}


def _refuse_without_layers(weights: Mapping[str, float], model: str) -> NoReturn:
    flags = ", ".join(map(_flag, weights))
    raise UserError(f"{flags}: {model} uses fairseq's own attention. Add --attention mha, or another method.")


def _refuse_without_mixing(weights: Mapping[str, float]) -> NoReturn:
    raise UserError(
        f"--mixing-orthogonality {weights['mixing_orthogonality']:g}: the model has no trained matrix that mixes heads. "
        "Add --attention mixhead-a or mixhead-b, or --head-mixing static or positionwise."
    )


def _parts(spec: AttentionSpec) -> dict[str, LayerPart]:
    """Return the parts of a layer with these choices, without memory."""
    config = AttentionConfig(spec, embed_dim=2, num_heads=1)
    with torch.device("meta"):
        return {axis: part for axis in MODULE_AXES if (part := config.build(axis)) is not None}


def _require_probabilities(parts: Mapping[str, LayerPart]) -> None:
    """Refuse an alignment loss, −log of attention weights, if the rows of the weights do not sum to 1.

    Rows of mixed heads and of differences do not, so a larger M would lower that loss. A part that learns nothing cannot do so.
    """
    for axis, part in parts.items():
        if not part.keeps_probabilities:
            raise UserError(
                f"--load-alignments: the alignment loss needs probabilities, and with {flag_name(AXES[axis].flag)} {part.name} the "
                "weights of cross attention do not sum to 1. Add --attention-sites encoder,decoder."
            )


def _learns(mixing: Mixing | type[Mixing] | None) -> bool:
    """Return True if a mixing has a trained matrix; dynamic mixing computes its matrix from the input alone."""
    return mixing is not None and mixing.learns and not mixing.reads_inputs


class Penalties:
    """The penalties of one forward pass and its backward pass; the layers' ``regulariser`` during that time.

    Args:
        weights: λ by name, of the penalties to compute.
        layers: the attention layers to penalise.
    """

    def __init__(self, weights: Mapping[str, float], layers: list[MultiheadAttention]) -> None:
        self.weights, self.layers = weights, layers
        self.passes: Counter[MultiheadAttention] = Counter()
        self._sums: dict[tuple[str, MultiheadAttention], Tensor] = {}
        self.recording = False
        self.gradient: Tensor | None = None
        """During the backward pass, the gradient of the objective with respect to Σ λ R."""
        self._query_padding: Tensor | None = None

    def __enter__(self) -> "Penalties":
        self.recording = True
        for layer in self.layers:
            layer.regulariser = self
        return self

    def __exit__(self, error: type | None, *_) -> None:
        self.recording = False
        if error or not torch.is_grad_enabled():
            self.release()

    def release(self) -> None:
        """Detach this object from the layers, after the backward pass or if there is none."""
        self.gradient = None
        for layer in self.layers:
            layer.regulariser = None

    @property
    def values(self) -> dict[str, Tensor]:
        """Return R of each penalty, summed over the layers that ran and averaged over sequences and a layer's passes."""
        nothing = torch.zeros((), device=self.layers[0].out_proj.weight.device)
        return {
            name: sum((total / self.passes[layer] for (of, layer), total in self._sums.items() if of == name), nothing)
            for name in self.weights
        }

    def add_to_loss(self, loss: Tensor, sample_size: Tensor | float) -> Tensor:
        """Return loss + sample size · Σ λ R, whose backward pass reaches the layers too."""
        return _PenalisedLoss.apply(loss, self, sample_size)

    def __call__(self, attended: RegularizerInput) -> Tensor:
        layer, call, heads, query_padding = attended
        # Cross attention has the queries of the self-attention before it.
        if layer.encoder_decoder_attention:
            query_padding = self._query_padding
        self._query_padding = query_padding
        # A forward pass while recording is the first; one in the backward pass is a checkpointed layer's second.
        if not self.recording and self.gradient is None:
            return heads
        values = {}
        if "mixing_orthogonality" in self.weights and _learns(layer.mixing) and call.prob_mixing is not None:
            values["mixing_orthogonality"] = mixing_orthogonality(call.prob_mixing, query_padding).mean()
        if names := [name for name in _SPACES if name in self.weights]:
            overlap = head_overlap(call, [_SPACES[name] for name in names], query_padding)
            values |= zip(names, overlap.mean(dim=1), strict=True)
        if self.recording:
            self.passes[layer] += 1
            for name, value in values.items():
                self._sums[name, layer] = self._sums.get((name, layer), 0) + value.detach()
        if not values:
            return heads
        penalty = sum(self.weights[name] * value for name, value in values.items())
        return _AttachPenaltyGradient.apply(heads, penalty, self, layer)


class _AttachPenaltyGradient(torch.autograd.Function):
    """The identity on heads; its backward pass adds the gradient of the layer's Σ λ R."""

    @staticmethod
    def forward(ctx, heads, penalty, penalties, layer):
        ctx.penalties, ctx.layer = penalties, layer
        return heads.view_as(heads)

    @staticmethod
    def backward(ctx, grad_heads):
        return grad_heads, ctx.penalties.gradient / ctx.penalties.passes[ctx.layer], None, None


class _PenalisedLoss(torch.autograd.Function):
    """The first step of the backward pass: a factor of the loss (loss scaling, a batch of weight 0) scales R too."""

    @staticmethod
    def forward(ctx, loss, penalties, sample_size):
        ctx.penalties, ctx.sample_size = penalties, sample_size
        total = sum(penalties.weights[name] * value for name, value in penalties.values.items())
        return loss + (total * sample_size).to(loss.dtype)

    @staticmethod
    def backward(ctx, grad):
        ctx.penalties.gradient = at_least_float32(grad).sum() * ctx.sample_size
        torch.autograd.Variable._execution_engine.queue_callback(ctx.penalties.release)
        return grad, None, None


class RegularisedCriterion(criterions.FairseqCriterion):
    """A mixin of criterions: it adds the penalties whose weight is not 0 to the loss, and their values to the log."""

    penalty_weights: Mapping[str, float] = MappingProxyType({})  # a criterion may have other `weights`

    @classmethod
    def build_criterion(cls, cfg, task):
        criterion = super().build_criterion(cfg, task)
        criterion.penalty_weights = _weights(cfg)
        return criterion

    @classmethod
    def check_args(cls, args) -> None:
        """Check the flags before the model is built.

        Raises:
            UserError: a weight is negative, the model uses fairseq's own attention, its mixing has no trained matrix, or an
                alignment loss needs probabilities.
        """
        if hasattr(super(), "check_args"):
            super().check_args(args)
        weights = _weights(args)
        model = ARCH_MODEL_REGISTRY.get(getattr(args, "arch", None))
        aligns = issubclass(cls, LabelSmoothedCrossEntropyCriterionWithAlignment) and getattr(
            args, "load_alignments", False
        )
        if model is None or not (weights or aligns):
            return
        options = chosen_options(args, model)
        if aligns and options is not None:
            _require_probabilities(_parts(options.spec_at("cross")))
        if not weights:
            return
        if options is None:
            _refuse_without_layers(weights, f"--arch {args.arch}")
        if "mixing_orthogonality" in weights and not _learns(PARTS["mixing"][options.spec.mixing]):
            _refuse_without_mixing(weights)

    def check_model(self, model: nn.Module) -> list[MultiheadAttention]:
        """Return the layers of a model that are penalised.

        Raises:
            UserError: the model has no attention of this package, or a penalty does not apply to any layer.
        """
        layers = [module for module in model.modules() if isinstance(module, MultiheadAttention)]
        if self.penalty_weights and not layers:
            _refuse_without_layers(self.penalty_weights, type(model).__name__)
        if "mixing_orthogonality" in self.penalty_weights and not any(_learns(layer.mixing) for layer in layers):
            _refuse_without_mixing(self.penalty_weights)
        spaces = [_flag(name) for name in _SPACES if name in self.penalty_weights]
        if spaces and all(layer.num_heads == 1 for layer in layers):
            raise UserError(
                f"{', '.join(spaces)}: compares pairs of heads, and every layer has one. Use more heads, or remove it."
            )
        return layers

    def forward(self, model, sample, *args, **kwargs):
        # a configuration that no command line checked
        if isinstance(self, LabelSmoothedCrossEntropyCriterionWithAlignment) and sample.get("alignments") is not None:
            for layer in model.modules():
                if isinstance(layer, MultiheadAttention) and layer.encoder_decoder_attention:
                    _require_probabilities({axis: declared(part) for axis, part in parts_of(layer).items()})
        if not self.penalty_weights:
            return super().forward(model, sample, *args, **kwargs)
        with Penalties(self.penalty_weights, self.check_model(model)) as penalties:
            loss, sample_size, logging_output = super().forward(model, sample, *args, **kwargs)
        # Without reduction the loss has a value for each token, and the penalties belong to none of them.
        if loss.numel() == 1:
            loss = penalties.add_to_loss(loss, sample_size)
        for name, value in penalties.values.items():
            logging_output[name] = value * sample_size
        return loss, sample_size, logging_output

    @classmethod
    def reduce_metrics(cls, logging_outputs) -> None:
        # Some criterions log every entry.
        super().reduce_metrics([{k: v for k, v in log.items() if k not in REGULARISERS} for log in logging_outputs])
        sample_size = sum(log.get("sample_size", 0) for log in logging_outputs)
        for name in REGULARISERS:
            if any(name in log for log in logging_outputs):
                total = sum(log.get(name, 0) for log in logging_outputs)
                metrics.log_scalar(name, total / sample_size, sample_size, round=6)


# fairseq's criterions share no flags. A criterion is chosen by name, so a subclass takes its place under that name.
# Criterions without a dataclass stay: they are obsolete, and one of them (composite_loss) calls others.
def register_with_regularisers(register: Callable) -> Callable:
    """Wrap ``criterions.register_criterion``: every criterion has the flags of the regularisers."""

    @functools.wraps(register)
    def register_criterion(name, dataclass=None):
        def register_and_extend(cls):
            register(name, dataclass)(cls)
            extend_criterion(name, register)
            return cls

        return register_and_extend

    return register_criterion


def extend_registered_criterions() -> None:
    """Add the regularisers to the criterions that are registered already."""
    for name in list(criterions.CRITERION_REGISTRY):
        extend_criterion(name, inspect.unwrap(criterions.register_criterion))


def extend_criterion(name: str, register: Callable) -> None:
    """Replace a registered criterion by a subclass with the regularisers."""
    cls, own = criterions.CRITERION_REGISTRY[name], criterions.CRITERION_DATACLASS_REGISTRY.get(name)
    if own is None or issubclass(cls, RegularisedCriterion):
        return
    joined = dataclasses.make_dataclass(
        own.__name__, (), bases=(own, RegulariserConfig), namespace={"__module__": own.__module__}
    )
    extended = type(cls.__name__, (RegularisedCriterion, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})
    del criterions.CRITERION_REGISTRY[name]
    register(name, dataclass=joined)(extended)


# Configurations of hydra and of programs do not pass the check of the command line.
def check_criterion(init: Callable) -> Callable:
    """Wrap ``Trainer.__init__``: refuse a model to which a regulariser does not apply."""

    @functools.wraps(init)
    def __init__(self, cfg, task, model, criterion, *args, **kwargs):
        if isinstance(criterion, RegularisedCriterion):
            criterion.check_model(model)
        init(self, cfg, task, model, criterion, *args, **kwargs)

    return __init__
