"""Exported models: fairseq's transformer for translation and for language models, with fairseq's names of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache, DynamicCache, EncoderDecoderCache, GenerationMixin, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from transformers.loss.loss_utils import fixed_cross_entropy
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    CausalLMOutputWithCrossAttentions,
    Seq2SeqLMOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from fairseq_lowrank.huggingface.exported.attention import ATTENTION, LowrankAttention, build_attention
from fairseq_lowrank.huggingface.exported.configuration import LowrankConfig, NamedByFolders
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.ops.attention.mask import hides


class SinusoidalPositions(nn.Module):
    """fairseq's table of sines and cosines, computed for the positions of a call.

    Args:
        size: d.
        padding: the position of padding, whose embedding is 0.
    """

    def __init__(self, size: int, padding: int) -> None:
        super().__init__()
        self.size, self.padding = size, padding

    def forward(self, positions: Tensor) -> Tensor:
        """Return ``[B, T, d]`` in float32 for ``positions [B, T]``."""
        half = self.size // 2
        step = math.log(10000) / (half - 1)
        factors = torch.exp(torch.arange(half, dtype=torch.float32, device=positions.device) * -step)
        angles = positions[..., None].to(torch.float32) * factors
        table = F.pad(torch.cat([angles.sin(), angles.cos()], dim=-1), (0, self.size % 2))
        return table.masked_fill((positions == self.padding)[..., None], 0)


class FeedForward(nn.Module):
    """The second half of a layer; a base class, because fairseq keeps its tensors next to those of attention."""

    def __init__(self, config: LowrankConfig, stack: str) -> None:
        super().__init__()
        size, inner = getattr(config, f"{stack}_embed_dim"), getattr(config, f"{stack}_ffn_embed_dim")
        self.pre_norm: bool = getattr(config, f"{stack}_normalize_before")
        self.dropout, self.activation_dropout = config.dropout, config.activation_dropout
        self.activation = ACT2FN[config.activation_function]
        self.fc1, self.fc2 = nn.Linear(size, inner), nn.Linear(inner, size)
        self.final_layer_norm = nn.LayerNorm(size)

    def before(self, norm: nn.Module, x: Tensor) -> Tensor:
        """Return the input of a sublayer."""
        return norm(x) if self.pre_norm else x

    def after(self, norm: nn.Module, x: Tensor, residual: Tensor) -> Tensor:
        """Return the output of a sublayer."""
        x = residual + F.dropout(x, self.dropout, self.training)
        return x if self.pre_norm else norm(x)

    def feed_forward(self, x: Tensor) -> Tensor:
        inner = self.activation(self.fc1(self.before(self.final_layer_norm, x)))
        inner = F.dropout(inner, self.activation_dropout, self.training)
        return self.after(self.final_layer_norm, self.fc2(inner), x)


class LowrankEncoderLayer(FeedForward, GradientCheckpointingLayer):
    """fairseq's encoder layer."""

    def __init__(self, config: LowrankConfig, layer_idx: int) -> None:
        super().__init__(config, "encoder")
        self.self_attn = build_attention(config, "encoder", layer_idx)
        self.self_attn_layer_norm = nn.LayerNorm(config.encoder_embed_dim)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Tensor:
        x = self.before(self.self_attn_layer_norm, hidden_states)
        x, _ = self.self_attn(x, attention_mask=attention_mask, **kwargs)
        return self.feed_forward(self.after(self.self_attn_layer_norm, x, hidden_states))


class LowrankDecoderLayer(FeedForward, GradientCheckpointingLayer):
    """fairseq's decoder layer, with cross attention if the model has an encoder."""

    def __init__(self, config: LowrankConfig, layer_idx: int) -> None:
        super().__init__(config, "decoder")
        self.self_attn = build_attention(config, "decoder", layer_idx)
        self.self_attn_layer_norm = nn.LayerNorm(config.decoder_embed_dim)
        if config.is_encoder_decoder:
            self.encoder_attn = build_attention(config, "cross", layer_idx)
            self.encoder_attn_layer_norm = nn.LayerNorm(config.decoder_embed_dim)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        x = self.before(self.self_attn_layer_norm, hidden_states)
        x, _ = self.self_attn(x, past_key_values=past_key_values, attention_mask=attention_mask, **kwargs)
        x = hidden_states = self.after(self.self_attn_layer_norm, x, hidden_states)
        if encoder_hidden_states is not None:
            x = self.before(self.encoder_attn_layer_norm, x)
            x, _ = self.encoder_attn(
                x,
                encoder_hidden_states,
                past_key_values=past_key_values,
                attention_mask=encoder_attention_mask,
                **kwargs,
            )
            x = self.after(self.encoder_attn_layer_norm, x, hidden_states)
        return self.feed_forward(x)


class LowrankPreTrainedModel(NamedByFolders, PreTrainedModel):
    """What exported models share."""

    config: LowrankConfig
    config_class = LowrankConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LowrankEncoderLayer", "LowrankDecoderLayer"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True

    def init_weights(self) -> None:
        """Tie the weights of a model that is built: its modules are initialised where they are built."""
        self.tie_weights(recompute_mapping=False)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise what a file lacks, such as the mixing of a model that was saved without it."""
        reset: Any = getattr(module, "reset_parameters", None)
        if reset is None or isinstance(module, (nn.Linear, nn.Embedding, nn.LayerNorm)):
            super()._init_weights(module)
            return
        loaded = {tensor: tensor.clone() for tensor in (*module.parameters(), *module.buffers()) if is_loaded(tensor)}
        reset()  # of attention or of one of its parts
        for tensor, value in loaded.items():
            tensor.copy_(value)


def is_loaded(tensor: Tensor) -> bool:
    """Return True if ``from_pretrained`` has read a tensor from a file."""
    return getattr(tensor, "_is_hf_initialized", False)


class LowrankStack(LowrankPreTrainedModel):
    """Embeddings and positions, which encoder and decoder share."""

    def __init__(self, config: LowrankConfig, stack: str, words: int, input_size: int, longest: int) -> None:
        super().__init__(config)
        size = getattr(config, f"{stack}_embed_dim")
        self.padding = padding = config.pad_token_id or 0
        self.embed_tokens = nn.Embedding(words, input_size, padding)
        nn.init.normal_(self.embed_tokens.weight, std=input_size**-0.5)
        self.embed_scale = math.sqrt(size) if config.scale_embedding else 1.0
        self.embed_positions: nn.Module | None = None
        if config.token_positions and getattr(config, f"{stack}_learned_pos"):
            self.embed_positions = nn.Embedding(longest + padding + 1, size, padding)
        elif config.token_positions:
            self.embed_positions = SinusoidalPositions(size, padding)
        self.layernorm_embedding = nn.LayerNorm(size) if config.layernorm_embedding else None
        self.project_in_dim = nn.Linear(input_size, size, bias=False) if input_size != size else None

    def embed(self, tokens: Tensor | None, embeds: Tensor | None, counts: Tensor) -> Tensor:
        """Return the inputs of the first layer ``[B, T, d]``.

        Args:
            tokens: ``[B, T]``.
            embeds: ``[B, T, .]``, in place of those of the tokens.
            counts: ``[B, T]``, how many tokens a sentence has up to each position, 0 at padding.
        """
        embeds = self.embed_tokens(tokens) if embeds is None else embeds
        x = self.embed_scale * embeds
        x = x if self.project_in_dim is None else self.project_in_dim(x)
        if self.embed_positions is not None:
            x = x + self.embed_positions(counts + self.padding).to(x.dtype)
        x = x if self.layernorm_embedding is None else self.layernorm_embedding(x)
        return F.dropout(x, self.config.dropout, self.training)

    def mask_for(
        self, attention: nn.Module, make: Callable, mask: Tensor | None, x: Tensor, **others: Any
    ) -> Tensor | None:
        """Return a mask in the form that an attention module takes: ours ``[B, S]``, transformers' what it makes."""
        if not isinstance(attention, LowrankAttention):
            return make(config=self.config, inputs_embeds=x, attention_mask=mask, **others)
        function = ALL_ATTENTION_FUNCTIONS.get(self.config._attn_implementation)
        if getattr(function, "__module__", "").startswith("deepspeed"):
            raise UserError(
                "sequence parallelism (Ulysses) of this attention is not computed: each worker would attend to its own part of the "
                "sequence. Train without it: in accelerate, ParallelismConfig with sp_size=1."
            )
        return None if mask is None or (not torch.compiler.is_compiling() and bool(mask.all())) else mask


def count_tokens(mask: Tensor) -> Tensor:
    """Return how many tokens a sentence has up to each position ``[B, T]``, 0 where the mask ``[B, T]`` of any dtype is 0."""
    real = mask.ne(0).long()
    return real.cumsum(1) * real


class LowrankEncoder(LowrankStack):
    """fairseq's ``TransformerEncoder``."""

    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": LowrankEncoderLayer,
        "attentions": [OutputRecorder(kind, index=1) for kind in ATTENTION],
    }

    def __init__(self, config: LowrankConfig) -> None:
        size = config.encoder_embed_dim
        super().__init__(config, "encoder", config.source_vocab_size, size, config.max_source_positions)
        self.layers = nn.ModuleList(LowrankEncoderLayer(config, index) for index in range(config.encoder_layers))
        self.layer_norm = nn.LayerNorm(size) if config.encoder_normalize_before else None
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Return the states of a source ``[B, S]``, 0 in its mask at padding."""
        if attention_mask is None and input_ids is not None:
            attention_mask = input_ids.ne(self.padding).long()
        elif attention_mask is None:
            assert inputs_embeds is not None
            attention_mask = torch.ones(inputs_embeds.shape[:2], dtype=torch.long, device=inputs_embeds.device)
        x: Any = self.embed(input_ids, inputs_embeds, count_tokens(attention_mask))
        x = x * attention_mask[..., None].to(x.dtype)
        first: Any = self.layers[0]
        mask = self.mask_for(first.self_attn, create_bidirectional_mask, attention_mask, x)
        for layer in self.layers:
            x = layer(x, mask, **kwargs)
        return BaseModelOutput(last_hidden_state=x if self.layer_norm is None else self.layer_norm(x))


class LowrankDecoder(LowrankStack):
    """fairseq's ``TransformerDecoder``, with the output projection."""

    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": LowrankDecoderLayer,
        "attentions": [OutputRecorder(kind, index=1, layer_name="self_attn") for kind in ATTENTION],
        "cross_attentions": [OutputRecorder(kind, index=1, layer_name="encoder_attn") for kind in ATTENTION],
    }

    def __init__(self, config: LowrankConfig) -> None:
        size = config.decoder_embed_dim
        super().__init__(config, "decoder", config.vocab_size, config.decoder_input_dim, config.max_target_positions)
        self.layers = nn.ModuleList(LowrankDecoderLayer(config, index) for index in range(config.decoder_layers))
        self.layer_norm = nn.LayerNorm(size) if config.decoder_normalize_before and config.final_norm else None
        output = config.decoder_output_dim
        self.project_out_dim = nn.Linear(size, output, bias=False) if output != size else None
        self.output_projection = nn.Linear(output, config.vocab_size, bias=False)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Return the features of a target ``[B, T]``, ready for the output projection.

        Args:
            attention_mask: ``[B, S]`` with the cached positions, 0 at padding; or a causal one ``[B, 1, T, S]`` as transformers
                makes it, for plain attention.
            encoder_attention_mask: ``[B, S]``, 0 at padding of the source.
            position_ids: ``[B, T]``, from 0; by default the mask counts them. Without mask and cache, a text begins where they
                begin again.
        """
        given = input_ids if inputs_embeds is None else inputs_embeds
        assert given is not None
        batch, length = given.shape[:2]
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
            if encoder_hidden_states is not None:
                past_key_values = EncoderDecoderCache(past_key_values, DynamicCache(config=self.config))
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        if attention_mask is None and position_ids is None and past == 0 and input_ids is not None:
            attention_mask = input_ids.ne(self.padding).long()
        if position_ids is not None:
            counts = position_ids + 1
        elif attention_mask is None:
            counts = torch.arange(past + 1, past + length + 1, device=given.device).expand(batch, length)
        elif attention_mask.dim() == 4:  # with a static cache; each query sees the tokens up to its own
            visible = attention_mask if attention_mask.dtype == torch.bool else ~hides(attention_mask)
            counts = visible[:, 0].sum(-1)
        else:
            counts = count_tokens(attention_mask)[:, -length:]
        x: Any = self.embed(input_ids, inputs_embeds, counts)
        cached = past_key_values
        if isinstance(cached, EncoderDecoderCache):
            cached = cached.self_attention_cache
        first: Any = self.layers[0]
        positions = {"position_ids": position_ids}
        mask = self.mask_for(
            first.self_attn, create_causal_mask, attention_mask, x, past_key_values=cached, **positions
        )
        source_mask = None
        if encoder_hidden_states is not None:
            source_mask = self.mask_for(
                first.encoder_attn,
                create_bidirectional_mask,
                encoder_attention_mask,
                x,
                encoder_hidden_states=encoder_hidden_states,
            )
        for layer in self.layers:
            x = layer(
                x, mask, encoder_hidden_states, source_mask, past_key_values=past_key_values, **positions, **kwargs
            )
        x = x if self.layer_norm is None else self.layer_norm(x)
        x = x if self.project_out_dim is None else self.project_out_dim(x)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=x, past_key_values=past_key_values)


class EndAtLimit(LogitsProcessor):
    """Allows only the end of the sentence as the last token, with its own probability, as fairseq's search does."""

    def __init__(self, max_length: int, end: Tensor) -> None:
        self.max_length, self.end = max_length, end

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        if input_ids.size(1) != self.max_length - 1:
            return scores
        ended = torch.full_like(scores, -math.inf)
        ended[:, self.end] = scores[:, self.end]
        return ended


class LowrankGenerator(LowrankPreTrainedModel, GenerationMixin):
    """A decoder with its output projection, and an encoder if the model translates."""

    def __init__(self, config: LowrankConfig) -> None:
        super().__init__(config)
        self._tied_weights_keys = tied_weights(config)
        if config.is_encoder_decoder:
            self.encoder = LowrankEncoder(config)
        self.decoder = LowrankDecoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self._inputs().embed_tokens

    def set_input_embeddings(self, value: Any) -> None:
        self._inputs().embed_tokens = value

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder.output_projection

    def set_output_embeddings(self, value: Any) -> None:
        self.decoder.output_projection = value

    def _inputs(self) -> LowrankStack:
        return self.encoder if self.config.is_encoder_decoder else self.decoder


class LowrankForSeq2SeqLM(LowrankGenerator):
    """An exported translation model."""

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Change the number of words, of a model whose encoder, decoder and output have one matrix.

        Raises:
            UserError: the source and the target have separate matrices, so a number of words does not say which one changes.
        """
        config: Any = self.config
        changes = new_num_tokens is not None and {config.source_vocab_size, config.vocab_size} != {new_num_tokens}
        if not config.share_all_embeddings and (changes or pad_to_multiple_of is not None):
            raise UserError(
                f"resize_token_embeddings({new_num_tokens}): the source has {config.source_vocab_size} words, and the target "
                f"{config.vocab_size} in another matrix. Keep the words, or train with --share-all-embeddings."
            )
        embeddings = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        if config.share_all_embeddings:
            config.source_vocab_size = config.vocab_size
        return embeddings

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Return the inputs of the decoder ``[B, T]``: the labels after the start, with padding for ignored labels."""
        config: Any = self.config
        start = labels.new_full((labels.size(0), 1), config.decoder_start_token_id)
        shifted = torch.cat([start, labels[:, :-1]], dim=1)
        return shifted.masked_fill(shifted == -100, config.pad_token_id)

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Search as models of transformers do. Padding of a source without ``attention_mask`` is hidden, as in :meth:`forward`."""
        source = kwargs.get("input_ids") if inputs is None else inputs
        if source is not None and kwargs.get("attention_mask") is None:
            kwargs["attention_mask"] = source.ne(self.encoder.padding).long()
        parent: Any = super()
        return parent.generate(inputs, *args, **kwargs)

    def _get_logits_processor(self, generation_config: Any, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        parent: Any = super()
        processors = parent._get_logits_processor(generation_config, *args, **kwargs)
        if generation_config.max_length is not None and generation_config._eos_token_tensor is not None:
            processors.append(EndAtLimit(generation_config.max_length, generation_config._eos_token_tensor))
        return processors

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Return logits ``[B, T, V]`` for a source ``[B, S]`` and a target ``[B, T]``, and the loss if there are ``labels``.

        Args:
            labels: ``[B, T]``, −100 where the loss ignores a position. Without ``decoder_input_ids`` they are these too.
        """
        if attention_mask is None and input_ids is not None:
            attention_mask = input_ids.ne(self.encoder.padding).long()
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask, inputs_embeds, **kwargs)
        elif not isinstance(encoder_outputs, BaseModelOutput):
            encoder_outputs = BaseModelOutput(*encoder_outputs)
        if labels is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        decoded: Any = self.decoder(
            decoder_input_ids,
            decoder_attention_mask,
            encoder_outputs[0],
            attention_mask,
            past_key_values,
            decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits: Any = self.decoder.output_projection(decoded.last_hidden_state)
        loss: Any = None if labels is None else loss_of(logits, labels, num_items_in_batch)
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=decoded.past_key_values,
            decoder_hidden_states=decoded.hidden_states,
            decoder_attentions=decoded.attentions,
            cross_attentions=decoded.cross_attentions,
            encoder_last_hidden_state=encoder_outputs[0],
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
        )


class LowrankForCausalLM(LowrankGenerator):
    """An exported language model."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Any = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithCrossAttentions:
        """Return logits ``[B, T, V]`` for a text ``[B, T]``, and the loss if there are ``labels``.

        Args:
            labels: ``[B, T]``, the text itself; −100 where the loss ignores a position.
            logits_to_keep: compute logits for this many last positions only, or for the positions of a tensor; 0 computes all.
            position_ids: ``[B, T]``, see :class:`LowrankDecoder`.
        """
        decoded: Any = self.decoder(
            input_ids,
            attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            position_ids=position_ids,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits: Any = self.decoder.output_projection(decoded.last_hidden_state[:, kept])
        loss: Any = None if labels is None else loss_of(logits[:, :-1], labels[:, 1:], num_items_in_batch)
        return CausalLMOutputWithCrossAttentions(
            loss=loss,
            logits=logits,
            past_key_values=decoded.past_key_values,
            hidden_states=decoded.hidden_states,
            attentions=decoded.attentions,
        )


def tied_weights(config: LowrankConfig) -> dict[str, str]:
    """Return the weights that are another one, with the name of that one, as transformers writes it."""
    embedding = "decoder.embed_tokens.weight"
    if config.share_all_embeddings and config.is_encoder_decoder:
        shared = "encoder.embed_tokens.weight"
        return {embedding: shared, "decoder.output_projection.weight": shared}
    shares = config.share_all_embeddings or config.share_decoder_input_output_embed
    return {"decoder.output_projection.weight": embedding} if shares else {}


def loss_of(logits: Tensor, labels: Tensor, num_items_in_batch: Any) -> Tensor:
    """Return the cross entropy of logits ``[B, T, V]``, as the mean over labels ``[B, T]`` or over all labels of a step."""
    flat = logits.float().flatten(0, 1)
    return fixed_cross_entropy(flat, labels.to(logits.device).flatten(), num_items_in_batch=num_items_in_batch)
