"""Our attention in fairseq's models: ``--arch ANYTHING --attention …``.

Nearly every text model of fairseq, and half of its speech models, make their attention in three methods of
``modules/transformer_layer.py``, and BERT in a fourth. The patched methods look up the options of the model that is being
built, and without an attention flag they call fairseq's own. The options are resolved once, in ``models.build_model``.
Attention is chosen when a layer is built, because a wrapper of the layer (FSDP, activation checkpointing) may move its
parameters at once.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

from fairseq import models, utils
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.modules import BaseLayer
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from omegaconf import OmegaConf, open_dict
from torch import Tensor, nn

from fairseq_lowrank.attention import CAUSAL, MultiheadAttention
from fairseq_lowrank.messages import UserError, did_you_mean
from fairseq_lowrank.ops import AttentionMask
from fairseq_lowrank.ops.attention.padding import begin_pass, end_pass
from fairseq_lowrank.plugin import foreign
from fairseq_lowrank.plugin.embedding import convolve_embedding
from fairseq_lowrank.plugin.flags import SITES, AttentionOptions, as_namespace, given_flags, refuse_misspelt_flags
from fairseq_lowrank.plugin.layer import FairseqAttention
from fairseq_lowrank.plugin.sizes import check_language_model, embedding_flags


@dataclass(frozen=True)
class ModelBuild:
    """A model that is being built: its class, its attention options (``None``: fairseq's own), and its layers so far by site."""

    model: type
    options: AttentionOptions | None
    built: Counter[str] = field(default_factory=Counter)

    def build_attention(self, site: str, *args, **kwargs) -> MultiheadAttention:
        """Build the next attention layer of a site."""
        assert self.options is not None
        self.built[site] += 1
        return self.options.build_attention(site, *args, depth=self.built[site], **kwargs)


_current: ContextVar[ModelBuild | None] = ContextVar("model being built", default=None)


@contextlib.contextmanager
def _building(build: ModelBuild) -> Iterator[None]:
    token = _current.set(build)
    try:
        yield
    finally:
        _current.reset(token)


def chosen_options(args: object, model: type | None) -> AttentionOptions | None:
    """Return the attention options of a configuration, or ``None`` for fairseq's own attention.

    Args:
        args: a configuration with the defaults of its architecture.
        model: the class of the model. A :class:`LowrankModel` has plain ``mha`` of this package without any flag.

    Raises:
        UserError: a flag whose value is refused.
    """
    ours = model is not None and issubclass(model, LowrankModel)
    return AttentionOptions.from_args(args) if ours or given_flags(args) else None


# --- the four methods that make attention


def build_if_chosen(ours: Callable) -> Callable[[Callable], Callable]:
    """Return a wrapper of a method that builds attention: ``ours`` builds it if the model has attention options.

    Args:
        ours: a function that takes :meth:`AttentionOptions.build_attention`, the layer and the arguments of the method.
    """

    def wrap(stock: Callable) -> Callable:
        @functools.wraps(stock)
        def build(layer, *args, **kwargs):
            current = _current.get()
            if current is None and any(given_flags(each) for each in (*args, *kwargs.values())):
                raise UserError(
                    "--attention: this model is built past fairseq.models.build_model. Call that function, or the "
                    "build_model of a task."
                )
            if current is None or current.options is None:
                return stock(layer, *args, **kwargs)
            return ours(current.build_attention, layer, *args, **kwargs)

        return build

    return wrap


def encoder_attention(build: Callable, layer: nn.Module, embed_dim: int, cfg) -> MultiheadAttention:
    return build(
        "encoder",
        embed_dim,
        cfg.encoder.attention_heads,
        self_attention=True,
        max_positions=getattr(cfg, "max_source_positions", None),
        **_noise(layer, cfg),
    )


def decoder_attention(
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
        **_noise(layer, cfg),
    )


def cross_attention(build: Callable, layer: nn.Module, embed_dim: int, cfg) -> MultiheadAttention:
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


def bert_attention(
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


# --- the model that is being built


def build_with_chosen_attention(
    cls: type, args: object, task: object, stock: Callable[[object], nn.Module], *, check: bool = True
) -> nn.Module:
    """Build a model with the attention that its configuration chooses.

    A model that builds another one with a separate configuration, such as a pre-trained encoder, calls this again.

    Args:
        cls: the class of the model.
        args: its configuration, with the defaults of the architecture.
        task: its task.
        stock: builds fairseq's model from a configuration.
        check: refuse attention that is chosen at a site where the model builds its own.

    Raises:
        UserError: a flag is refused, or attention is chosen at a site where the model builds its own.
    """
    outer = _current.get()
    if outer is not None and outer.model is cls:
        return stock(args)
    refuse_misspelt_flags(args)
    options = chosen_options(args, cls)
    if (flags := embedding_flags(args)) and not issubclass(cls, TransformerLanguageModel):
        flag, value = next(iter(flags.items()))
        raise UserError(f"{flag} {value}: works only for transformer_lm, not {_name(cls, args)}. Remove it.")
    if options is not None and options.spec.choices:
        refuse_converters(options)
    if options is not None and getattr(cls, "__dataclass", None) is None:
        args = as_namespace(args)  # these models set missing fields, which a DictConfig refuses
    with _building(ModelBuild(cls, options)):
        model = stock(args)
    if options is not None:
        if check and (outer is None or outer.options is None):
            validate_sites(model, options, _name(cls, args))
        _adapt_decoders(model, task)
        _read_masks_once(model)
    return model


def resolve_attention(build_model: Callable) -> Callable:
    """Wrap ``models.build_model``, which every task calls: resolve the attention options of the model once.

    Raises:
        UserError: no plugin that is imported has the model. fairseq fails in its own message (IndexError).
    """

    @functools.wraps(build_model)
    def build_with_options(cfg, task, from_checkpoint=False):
        name = getattr(cfg, "_name", None) or getattr(cfg, "arch", None)
        cls = models.ARCH_MODEL_REGISTRY.get(name) or models.MODEL_REGISTRY.get(name)
        if cls is None and name is not None:  # of a checkpoint: the parser knows the names of --arch
            names = {**models.ARCH_MODEL_REGISTRY, **models.MODEL_REGISTRY}
            raise UserError(
                f"the checkpoint's model {name!r} is not registered. Add --user-dir DIR with the folder of its plugin."
                f"{did_you_mean(name, names)}"
            )
        if cls is None:
            return build_model(cfg, task, from_checkpoint)
        if name in models.ARCH_CONFIG_REGISTRY and name not in models.MODEL_DATACLASS_REGISTRY:
            with open_dict(cfg) if OmegaConf.is_config(cfg) else contextlib.nullcontext():
                models.ARCH_CONFIG_REGISTRY[name](cfg)  # as fairseq does: an architecture may choose attention
        return build_with_chosen_attention(cls, cfg, task, lambda args: build_model(args, task, from_checkpoint))

    return build_with_options


class LowrankModel(models.BaseFairseqModel):
    """A base class of this package's models: their attention is this package's ``mha`` unless a flag chooses another."""

    @classmethod
    def check_args(cls, args) -> None:
        """Check the model's own flags before data is read.

        Raises:
            UserError: a flag has a value that is not accepted.
        """

    @classmethod
    def build_model(cls, args, task):
        """Build the model with the attention that its configuration chooses, also without ``models.build_model``."""
        return build_with_chosen_attention(cls, args, task, lambda args: cls.build_with_attention(args, task))

    @classmethod
    def build_with_attention(cls, args, task):
        """Build the model, after its attention options are resolved."""
        return super().build_model(args, task)


# fairseq drops unknown fields from a DictConfig, --scale-heads among them, so a language model with an attention flag
# needs a namespace.
def prepare_language_model(build_model: Callable) -> Callable:
    """Wrap ``TransformerLanguageModel.build_model``: build the embedding that --embed-rank and --embed-kernel choose."""

    @functools.wraps(build_model)
    def build_language_model(cls, args, task):
        current = _current.get()
        if embedding_flags(args) or (current is not None and current.options is not None):
            args = as_namespace(args)
            check_language_model(args)
            if getattr(args, "embed_rank", None) is not None:
                args.decoder_input_dim = args.embed_rank
        model = build_model(cls, args, task)
        if (kernel := getattr(args, "embed_kernel", None)) is not None:
            convolve_embedding(model.decoder, kernel)
        return model

    return build_language_model


def _name(model: type, args: object) -> str:
    registered = (name for name, cls in models.MODEL_REGISTRY.items() if cls is model)
    return getattr(args, "arch", None) or getattr(args, "_name", None) or next(registered, model.__name__)


# --- refusals


def validate_sites(model: nn.Module, options: AttentionOptions, name: str) -> None:
    """Refuse a chosen site where the model builds its own attention, takes another one from a model inside it, or has none.

    Raises:
        UserError: see the messages.
    """
    elsewhere = {site: kind.__name__ for site, kind in foreign.attention_by_site(model).items()}
    for layer in model.modules():
        # an encoder that comes from a checkpoint has the attention that the checkpoint was trained with
        if isinstance(layer, FairseqAttention) and layer.site in options.sites and layer.spec != options.spec:
            elsewhere.setdefault(layer.site, str(layer.spec))
    covered = [site for site in SITES if site in our_sites(model) and site not in elsewhere]
    for site, kind in elsewhere.items():
        if site in options.sites:
            remedy = f"Add --attention-sites {','.join(covered)}." if covered else SEE_ARCHITECTURES
            raise UserError(
                f"--attention: {name} builds its own {site} attention ({kind}), which cannot be replaced. {remedy}"
            )
    if not covered and options.sites == set(SITES):
        raise UserError(f"--attention: {name} has no attention that can be chosen. {SEE_ARCHITECTURES}")
    options.check_sites(*covered)


SEE_ARCHITECTURES = "Choose one that fairseq-lowrank params --list fairseq shows."


def our_sites(model: nn.Module) -> set[str]:
    """Return the sites where a model has attention of this package."""
    return {module.site for module in model.modules() if isinstance(module, FairseqAttention)}


# A converter loads a checkpoint with --user_dir, and copies q, k, v and out_proj alone.
def refuse_converters(options: AttentionOptions) -> None:
    """Refuse to build a model for the converter of CTranslate2, which would leave out what is not plain attention.

    Raises:
        UserError: a module of CTranslate2 is among the callers.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] != "ctranslate2":
        frame = frame.f_back
    if frame is not None:
        choices = ", ".join(f"{name} {value}" for name, value in options.spec.choices.items())
        raise UserError(
            f"--attention: CTranslate2 computes plain attention alone, and this model has {choices}. Use fairseq-lowrank export "
            "CKPT OUT --to ctranslate2, which converts attention that plain attention can compute."
        )


def _read_masks_once(model: nn.Module) -> None:
    """Let the layers of each encoder and decoder share what they learn from a mask, until its forward pass ends."""
    for module in model.modules():
        if not isinstance(module, (models.FairseqEncoder, models.FairseqDecoder)) or not our_sites(module):
            continue
        if begin_pass not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(begin_pass)
            module.register_forward_hook(end_pass, always_call=True)


# --- decoders with our attention


# The attributes belong to the decoders of one model, because stock models share the classes and TorchScript reads them.
def _adapt_decoders(model: nn.Module, task: object) -> None:
    """Make decoders pass a causal marker instead of a T×T mask, and compute attention weights only if they are read."""
    settings = getattr(task, "cfg", None) or getattr(task, "args", None)
    for decoder in _decoders_with_our_layers(model):
        # --cross-self-attention puts encoder states before the keys, so its mask is not square
        if hasattr(decoder, "buffered_future_mask") and not getattr(decoder, "cross_self_attention", False):
            decoder.buffered_future_mask = _causal_marker
        for layer in _our_layers(decoder) if _reads_padding(decoder) else ():
            layer.self_attn.outputs_at_padding = True
        if _reads_one_layer(decoder):
            decoder.need_alignment = True if getattr(settings, "load_alignments", False) else None
            # an embedding by convolution has already replaced this method
            stock = vars(decoder).get("extract_features") or functools.partial(type(decoder).extract_features, decoder)
            decoder.extract_features = functools.partial(_extract_features, decoder, stock)
            _read_weights_where_asked(decoder)


def _decoders_with_our_layers(model: nn.Module) -> list[models.FairseqDecoder]:
    def holds_layers(module: nn.Module) -> bool:
        return any(isinstance(child, nn.ModuleList) and _our_layers(child) for child in module.children())

    return [module for module in model.modules() if holds_layers(module)]


def _reads_padding(decoder: nn.Module) -> bool:
    """Return True if outputs at padding change others: the postnet of speech is a convolution, and base layers share out all tokens."""
    return hasattr(decoder, "postnet") or any(isinstance(module, BaseLayer) for module in decoder.modules())


def _our_layers(parent: nn.Module) -> list[TransformerDecoderLayerBase]:
    layers = (module for module in parent.modules() if isinstance(module, TransformerDecoderLayerBase))
    return [layer for layer in layers if isinstance(layer.self_attn, MultiheadAttention)]


def _causal_marker(tensor: Tensor) -> AttentionMask:
    return CAUSAL


def _reads_one_layer(decoder: nn.Module) -> bool:
    """Return True if a decoder has an argument for the layer whose weights are read; others read the last layer's."""
    extract_features = getattr(type(decoder), "extract_features", None)
    return extract_features is not None and "alignment_layer" in inspect.signature(extract_features).parameters


def _extract_features(
    decoder: nn.Module,
    stock: Callable,
    prev_output_tokens,
    encoder_out=None,
    incremental_state=None,
    full_context_alignment: bool = False,
    alignment_layer: int | None = None,
    alignment_heads: int | None = None,
    **others,
):
    """Call `stock`, the decoder's own method, without computing weights that nothing reads.

    Hypotheses of a search have weights, unless :func:`compute_weights_where_read` has found that nothing reads them.
    """
    read = incremental_state is not None if decoder.need_alignment is None else decoder.need_alignment
    if alignment_layer is None and not read:
        alignment_layer = -1  # matches no layer
    return stock(
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


def compute_weights_where_read(prepare: Callable) -> Callable:
    """Wrap ``prepare_for_inference_``: compute weights for --print-alignment and callers of the API.

    --score-reference adds up the weights of several models, and fairseq's own models always have them.
    """

    @functools.wraps(prepare)
    def prepare_for_inference_(model, cfg):
        prepare(model, cfg)
        called = cfg.common_eval.path is None  # by a program; commands have a path
        adds = not called and cfg.generation.score_reference and len(utils.split_paths(cfg.common_eval.path)) > 1
        for decoder in model.modules():
            if hasattr(decoder, "need_alignment"):
                decoder.need_alignment = called or adds or bool(cfg.generation.print_alignment)
                _read_weights_where_asked(decoder)

    return prepare_for_inference_
