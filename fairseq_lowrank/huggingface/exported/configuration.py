"""The configuration of exported models."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

CODE = "lowrank_transformer.py"
AUTO_MAP = {
    name: f"{Path(CODE).stem}.{kind}"
    for name, kind in {
        "AutoConfig": "LowrankConfig",
        "AutoModelForSeq2SeqLM": "LowrankForSeq2SeqLM",
        "AutoModelForCausalLM": "LowrankForCausalLM",
    }.items()
}
"""The classes of the file of code in a folder, which ``trust_remote_code=True`` runs: it imports this package."""
_TEXT = """from fairseq_lowrank.huggingface import exported

LowrankConfig, LowrankTokenizer = exported.LowrankConfig, exported.LowrankTokenizer
LowrankForSeq2SeqLM, LowrankForCausalLM = exported.LowrankForSeq2SeqLM, exported.LowrankForCausalLM
"""


def write_code(folder: Any) -> None:
    """Write the file of code, if the folder exists."""
    if Path(folder).is_dir():
        Path(folder, CODE).write_text(_TEXT, encoding="utf-8")


class NamedByFolders:
    """A class that folders name in their file of code, so that saving need not copy its source."""

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Do nothing: ``_auto_class`` stays None."""


@strict
class LowrankConfig(NamedByFolders, PreTrainedConfig):
    """Sizes and choices of a transformer of fairseq, by the names of fairseq's flags.

    Args:
        vocab_size: number of words of the target; of a language model, of its text.
        source_vocab_size: number of words of the source.
        encoder_attention, decoder_attention, cross_attention: the choices of :class:`~fairseq_lowrank.attention.AttentionSpec`
            that differ from plain attention, at each site.
        attention_bias: whether the projections of attention add a bias.
        share_all_embeddings: encoder, decoder and output have one matrix.
        share_decoder_input_output_embed: the decoder's embedding and the output have one matrix.
        scale_embedding: multiply embeddings by the root of their size.
        token_positions: add positions to the embeddings.
        final_norm: a LayerNorm after the last layer of a pre-norm decoder.
    """

    model_type = "lowrank_transformer"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {
        "num_hidden_layers": "decoder_layers",
        "hidden_size": "decoder_embed_dim",
        "num_attention_heads": "decoder_attention_heads",
    }

    vocab_size: int = 0
    source_vocab_size: int = 0
    encoder_layers: int = 6
    encoder_embed_dim: int = 512
    encoder_ffn_embed_dim: int = 2048
    encoder_attention_heads: int = 8
    encoder_normalize_before: bool = False
    encoder_learned_pos: bool = False
    decoder_layers: int = 6
    decoder_embed_dim: int = 512
    decoder_ffn_embed_dim: int = 2048
    decoder_attention_heads: int = 8
    decoder_normalize_before: bool = False
    decoder_learned_pos: bool = False
    decoder_input_dim: int = 512
    decoder_output_dim: int = 512
    encoder_attention: dict[str, Any] | None = None
    decoder_attention: dict[str, Any] | None = None
    cross_attention: dict[str, Any] | None = None
    attention_bias: bool = True
    max_source_positions: int = 1024
    max_target_positions: int = 1024
    activation_function: str = "relu"
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    share_all_embeddings: bool = False
    share_decoder_input_output_embed: bool = False
    scale_embedding: bool = True
    token_positions: bool = True
    layernorm_embedding: bool = False
    final_norm: bool = True
    use_cache: bool = True
    is_encoder_decoder: bool = True
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = 2

    def save_pretrained(self, save_directory: Any, *args: Any, **options: Any) -> None:
        """Save, with the file of code."""
        self.auto_map = dict(AUTO_MAP)
        super().save_pretrained(save_directory, *args, **options)
        write_code(save_directory)

    @property
    def max_position_embeddings(self) -> int:
        return self.max_target_positions
