"""Our attention in fairseq's models: ``--arch ANYTHING --attention …``.

Nearly every text model of fairseq, and half of its speech models, make their attention in three methods of
``modules/transformer_layer.py``, and BERT in a fourth. These ask what was chosen for the model that is being built. Without
an attention flag the answer is nothing, and fairseq's own code runs. Attention is chosen when it is made, not replaced
afterwards, because what wraps a layer (FSDP, activation checkpointing) may take its parameters apart at once.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

from fairseq import models
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase
from fairseq.modules.transformer_sentence_encoder_layer import TransformerSentenceEncoderLayer
from torch import Tensor, nn

from fairseq_lowrank.attention import CAUSAL, MultiheadAttention
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.ops import AttentionMask
from fairseq_lowrank.plugin.embedding import convolve_embedding
from fairseq_lowrank.plugin.flags import SITES, AttentionOptions, as_namespace, given_flags, refuse_misspelt_flags
from fairseq_lowrank.plugin.sizes import check_language_model, check_sizes, embedding_flags

logger = logging.getLogger(__name__)
_current: ContextVar[Build | None] = ContextVar("model being built", default=None)


@dataclass
class Build:
    """A model that is being built: its class, the attention chosen for it, and the sites where that was asked for."""

    model: type
    options: AttentionOptions | None
    sites: set[str] = field(default_factory=set)

    def attention(self, site: str, *args, **kwargs) -> MultiheadAttention:
        self.sites.add(site)
        layer = self.options.build(site, *args, **kwargs)
        layer.site = site
        return layer


@contextlib.contextmanager
def building(build: Build) -> Iterator[None]:
    """Let the attention made meanwhile be that of a build, and the sites where it is made be those of the build around it too."""
    outer = _current.get()
    token = _current.set(build)
    try:
        yield
    finally:
        _current.reset(token)
        if outer is not None:  # transformer_align is a transformer with another forward
            outer.sites |= build.sites


def chosen_options(args: object, model: type | None) -> AttentionOptions | None:
    """The attention that a configuration asks for, or ``None`` where it is to be fairseq's own.

    Args:
        model: the class of the model; ours, ``lowrank_*``, have plain ``mha`` of this package without any flag.

    Raises:
        ValueError: a flag whose value is refused.
    """
    if not given_flags(args) and not getattr(model, "always_chosen", False):
        return None
    return AttentionOptions.from_args(args)


# --- the four methods that make attention


def choose_attention() -> None:
    """Let the attention of a model with an attention flag be ours, and every build of a model say whether it has one."""
    for layer, method, ours in (
        (TransformerEncoderLayerBase, "build_self_attention", _encoder_attention),
        (TransformerDecoderLayerBase, "build_self_attention", _decoder_attention),
        (TransformerDecoderLayerBase, "build_encoder_attention", _cross_attention),
        (TransformerSentenceEncoderLayer, "build_self_attention", _bert_attention),
    ):
        setattr(layer, method, _ours_if_chosen(getattr(layer, method), ours))
    _announce_builds()
    models.BaseFairseqModel.check_args = classmethod(check_args)
    models.BaseFairseqModel.prepare_for_inference_ = _asking_for_alignments(
        models.BaseFairseqModel.prepare_for_inference_
    )


def _ours_if_chosen(stock: Callable, ours: Callable) -> Callable:
    @functools.wraps(stock)
    def build(layer, *args, **kwargs):
        current = _current.get()
        if current is None or current.options is None:
            return stock(layer, *args, **kwargs)
        return ours(current.attention, layer, *args, **kwargs)

    return build


def _encoder_attention(build: Callable, layer: nn.Module, embed_dim: int, cfg) -> MultiheadAttention:
    return build(
        "encoder",
        embed_dim,
        cfg.encoder.attention_heads,
        self_attention=True,
        max_positions=getattr(cfg, "max_source_positions", None),
        **_noise(layer, cfg),
    )


def _decoder_attention(
    build: Callable, layer: nn.Module, embed_dim: int, cfg, add_bias_kv: bool = False, add_zero_attn: bool = False
) -> MultiheadAttention:
    return build(
        "decoder",
        embed_dim,
        cfg.decoder.attention_heads,
        add_bias_kv=add_bias_kv,
        add_zero_attn=add_zero_attn,
        self_attention=not cfg.cross_self_attention,
        max_positions=getattr(cfg, "max_target_positions", None),
        scale_heads=bool(getattr(cfg, "scale_heads", False)),
        **_noise(layer, cfg),
    )


def _cross_attention(build: Callable, layer: nn.Module, embed_dim: int, cfg) -> MultiheadAttention:
    return build(
        "cross",
        embed_dim,
        cfg.decoder.attention_heads,
        kdim=cfg.encoder.embed_dim,
        vdim=cfg.encoder.embed_dim,
        encoder_decoder_attention=True,
        **_noise(layer, cfg),
    )


def _noise(layer: nn.Module, cfg) -> dict[str, float]:
    return {
        "dropout": cfg.attention_dropout,
        "q_noise": layer.quant_noise,
        "qn_block_size": layer.quant_noise_block_size,
    }


def _bert_attention(
    build: Callable, layer: nn.Module, embed_dim, num_attention_heads, dropout, self_attention, q_noise, qn_block_size
) -> MultiheadAttention:
    return build(
        "encoder",
        embed_dim,
        num_attention_heads,
        dropout=dropout,
        self_attention=True,
        q_noise=q_noise,
        qn_block_size=qn_block_size,
    )


# --- what is being built


# Tasks build through models.build_model, programs also through the class. Both end in the class's own method. A model that
# builds another inside (a pre-trained encoder, with flags of its own) is left for that time.
def _announce_builds() -> None:
    """Let ``build_model`` of every model, also of those defined later, say what attention is chosen."""

    def announce(model: type) -> None:
        method = vars(model).get("build_model")
        if isinstance(method, classmethod):
            model.build_model = classmethod(_announced(method.__func__))

    def announce_all(model: type) -> None:
        announce(model)
        for further in model.__subclasses__():
            announce_all(further)

    def __init_subclass__(cls, **kwargs):
        super(models.BaseFairseqModel, cls).__init_subclass__(**kwargs)
        announce(cls)

    announce_all(models.BaseFairseqModel)
    models.BaseFairseqModel.__init_subclass__ = classmethod(__init_subclass__)


def _announced(build_model: Callable) -> Callable:
    if getattr(build_model, "announced", False):
        return build_model

    @functools.wraps(build_model)
    def build(cls, args, *rest, **kwargs):
        outer = _current.get()
        if outer is not None and outer.model is cls:  # a class that calls the one above it
            return build_model(cls, args, *rest, **kwargs)
        refuse_misspelt_flags(args)
        options = chosen_options(args, cls)
        for message in other_differences(cls, args, options):
            _say_once(message)
        args = _prepared(cls, args, options)
        current = Build(cls, options)
        with building(current):
            model = build_model(cls, args, *rest, **kwargs)
        if options is not None:
            if outer is None or outer.options is None:
                check_coverage(model, current, _name(cls, args))
            task = rest[0] if rest else kwargs.get("task")
            _adapt_decoders(model, task)
        if (kernel := getattr(args, "embed_kernel", None)) is not None:
            convolve_embedding(model.decoder, kernel)
        return model

    build.announced = True
    return build


def _prepared(model: type, args: object, options: AttentionOptions | None) -> object:
    """The arguments to build from: those of a language model's low-rank embedding among them."""
    rank = getattr(args, "embed_rank", None)
    embedding = embedding_flags(args)
    if options is None and not embedding:
        return args
    language_model = issubclass(model, TransformerLanguageModel)
    # Models without a dataclass set what is missing, which a DictConfig refuses; language models pass theirs on to where
    # unknown fields are dropped, fairseq's own --scale-heads among them. Others want the DictConfig.
    if language_model or getattr(model, "__dataclass", None) is None:
        args = as_namespace(args)
    check_sizes(args)
    if language_model:
        check_language_model(args)
    elif embedding:
        flag, value = next(iter(embedding.items()))
        raise UserError(f"{flag} {value}: {_name(model, args)} is no transformer_lm, whose embedding it changes")
    if rank is not None:
        args.decoder_input_dim = rank
    return args


def other_differences(model: type, args: object, options: AttentionOptions | None) -> Iterator[str]:
    """Where a flag of fairseq's does another thing beside an attention flag than without one, so that a stock model is no
    baseline for it."""
    names = [f"scale_{part}" for part in ("attn", "fc", "heads", "resids") if getattr(args, f"scale_{part}", False)]
    if names and issubclass(model, TransformerLanguageModel):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in names)
        yield f"{flags}: left out by fairseq in language models without an attention flag; --attention mha is the baseline"
    if options is not None and (noise := getattr(args, "quant_noise_pq", 0)):
        yield (
            f"--quant-noise-pq {noise:g}: fairseq's own self-attention computes past the noise of its projections, this package's "
            "does not; --attention mha is the baseline"
        )


_said: set[str] = set()


def _say_once(message: str) -> None:
    # a likeness that is built to check flags is built in silence
    if message not in _said and logger.isEnabledFor(logging.WARNING):
        _said.add(message)
        logger.warning(message)


def _name(model: type, args: object) -> str:
    registered = (name for name, cls in models.MODEL_REGISTRY.items() if cls is model)
    return getattr(args, "arch", None) or getattr(args, "_name", None) or next(registered, model.__name__)


# --- refusals


def check_args(cls: type, args: object) -> None:
    """Refuse attention flags before data is read: what building a small likeness of the model refuses.

    Raises:
        ValueError: a flag is refused, sizes do not fit together, or attention is chosen where the model makes its own.
    """
    from fairseq_lowrank.plugin import architectures  # which builds models by what is above

    if chosen_options(args, cls) is not None or embedding_flags(args):
        architectures.try_to_build(cls, args)


def check_coverage(model: nn.Module, build: Build, name: str) -> None:
    """Refuse a chosen site whose attention the model makes by itself, or does not have.

    Raises:
        ValueError: see the messages.
    """
    elsewhere = other_attention(model)
    covered = [site for site in SITES if site in build.sites and site not in elsewhere]
    explicit = build.options.sites != set(SITES)
    for site, kind in elsewhere.items():
        if site in build.options.sites:
            instead = f"--attention-sites {','.join(covered)}" if covered else "fairseq-lowrank architectures"
            raise UserError(
                f"--attention: {name} makes its {site} attention ({kind}) by itself, so none can be chosen there; "
                f"{'try' if covered else 'other architectures are listed by'} {instead}"
            )
    if not covered and not explicit:
        raise UserError(
            f"--attention: {name} has no attention that can be chosen; architectures that have are listed by "
            "fairseq-lowrank architectures"
        )
    build.options.check_sites(*covered)


def other_attention(model: nn.Module) -> dict[str, str]:
    """The classes of attention in a model that are not ours, by site."""
    found: dict[str, str] = {}

    def search(module: nn.Module, name: str) -> None:
        if isinstance(module, MultiheadAttention):
            return
        kind = type(module).__name__
        if "attention" in kind.lower() and not isinstance(module, nn.ModuleList):
            found.setdefault(site_of(name), kind)
            return
        for child_name, child in module.named_children():
            search(child, f"{name}.{child_name}")

    search(model, "")
    return {site: found[site] for site in SITES if site in found}


def site_of(name: str) -> str:
    """The site of an attention layer, by its module's name in fairseq's models."""
    parts = name.split(".")
    if parts[-1].startswith("encoder_attn"):
        return "cross"
    stacks = [part for part in parts if "encoder" in part or "decoder" in part]
    return "decoder" if any("decoder" in part for part in stacks) or not stacks else "encoder"


# --- decoders with our attention


# These are given to the decoders of one model and not to their classes, which stock models share and TorchScript reads.
def _adapt_decoders(model: nn.Module, task: object) -> None:
    """Let decoders say "causal" instead of making a T×T mask, and compute attention weights only where they are read."""
    settings = getattr(task, "cfg", None) or getattr(task, "args", None)
    for decoder in model.modules():
        if not _holds_our_decoder_layers(decoder):
            continue
        # --cross-self-attention puts encoder states before the keys, so that its mask is not a square
        if hasattr(decoder, "buffered_future_mask") and not getattr(decoder, "cross_self_attention", False):
            decoder.buffered_future_mask = _causal_marker
        if _reads_one_layer(decoder):
            decoder.need_alignment = bool(getattr(settings, "load_alignments", False))
            decoder.extract_features = functools.partial(_extract_features, decoder)
            _read_weights_where_asked(decoder)


def _holds_our_decoder_layers(decoder: nn.Module) -> bool:
    return any(isinstance(child, nn.ModuleList) and _our_layers(child) for child in decoder.children())


def _our_layers(parent: nn.Module) -> list[TransformerDecoderLayerBase]:
    layers = (module for module in parent.modules() if isinstance(module, TransformerDecoderLayerBase))
    return [layer for layer in layers if isinstance(layer.self_attn, MultiheadAttention)]


def _causal_marker(tensor: Tensor) -> AttentionMask:
    return CAUSAL


def _reads_one_layer(decoder: nn.Module) -> bool:
    """Whether a decoder is told which layer's weights to read; others take those of the last layer that has some."""
    extract_features = getattr(type(decoder), "extract_features", None)
    return extract_features is not None and "alignment_layer" in inspect.signature(extract_features).parameters


def _extract_features(
    decoder: nn.Module,
    prev_output_tokens,
    encoder_out=None,
    incremental_state=None,
    full_context_alignment: bool = False,
    alignment_layer: int | None = None,
    alignment_heads: int | None = None,
    **others,
):
    """As the decoder's own; weights that nobody asked for are not computed."""
    if alignment_layer is None and not decoder.need_alignment:
        alignment_layer = -1  # matches no layer
    return type(decoder).extract_features(
        decoder,
        prev_output_tokens,
        encoder_out,
        incremental_state,
        full_context_alignment,
        alignment_layer,
        alignment_heads,
        **others,
    )


def _read_weights_where_asked(decoder: nn.Module) -> None:
    # Otherwise fairseq computes cross-attention weights in every layer at validation and for --print-alignment.
    for layer in _our_layers(decoder):
        layer.need_attn = False


def _asking_for_alignments(prepare: Callable) -> Callable:
    @functools.wraps(prepare)
    def prepare_for_inference_(model, cfg):
        prepare(model, cfg)
        called = cfg.common_eval.path is None  # by a program; commands are told a path
        replaces = cfg.generation.replace_unk is not None
        for decoder in model.modules():
            if hasattr(decoder, "need_alignment"):
                decoder.need_alignment = called or replaces or bool(cfg.generation.print_alignment)
                _read_weights_where_asked(decoder)

    return prepare_for_inference_
