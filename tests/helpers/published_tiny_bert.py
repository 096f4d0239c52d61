"""A tiny BERT in the layout of ``transformers``."""

import json
import string

import torch
from transformers import BertConfig, BertForPreTraining

WORDS = [
    *("[PAD]", "[unused0]", "the", "##s", "[UNK]", "[CLS]", "cat", "[SEP]", "[MASK]", "sat", "##ting", "un", "##able", "!", "cafe"),
    *("<s>", "the", "東", "'", "Cat", "Café", *string.ascii_lowercase, *(f"##{letter}" for letter in string.ascii_lowercase)),
]  # fmt: skip
SIZES = {
    **{"vocab_size": len(WORDS) + 2, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"intermediate_size": 24, "max_position_embeddings": 12, "type_vocab_size": 2},
}


def publish(folder, kind=BertForPreTraining, **settings):
    """A model of random numbers, none of them at its start, saved as transformers does, with its vocabulary."""
    torch.manual_seed(3)
    model = kind(BertConfig(**SIZES | settings)).eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in WORDS), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))
    return model
