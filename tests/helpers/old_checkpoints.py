"""What the checkpoints in tests/fixtures answer to fixed sentences."""

from pathlib import Path

import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from fairseq.tasks.translation import TranslationConfig, TranslationTask

import fairseq_lowrank.plugin  # noqa: F401

FOLDER = Path(__file__).parents[1] / "fixtures"
ANSWERS = FOLDER / "answers.json"


def _dictionary(words: list[str]) -> Dictionary:
    """As fairseq-preprocess makes it of the text in tests/fixtures/make.py: eight words and padding up to 8·n symbols."""
    dictionary = Dictionary()
    for word in words:
        dictionary.add_symbol(word)
    dictionary.pad_to_multiple_(8)
    return dictionary


def answer(path: Path) -> list[dict]:
    """The best hypotheses of a beam search for three sentences: tokens, and scores rounded to 5 digits."""
    source = _dictionary(["ab", "cd", "ef", "gh", "ij", "kl", "mn", "op"])
    text = path.stem.endswith("-text")
    if text:
        task = LanguageModelingTask(LanguageModelingConfig(), source)
    else:
        task = TranslationTask(TranslationConfig(), source, source)
    (model,), _ = checkpoint_utils.load_model_ensemble([str(path)], task=task)
    sentences = [[4, 5, 6, 7, 8], [9, 11], [10, 4, 4, 9]]
    rows = torch.full((3, 6), source.pad())
    for row, words in zip(rows, sentences, strict=True):
        row[-len(words) - 1 :] = torch.tensor([*words, source.eos()])
    generator = SequenceGenerator([model.eval()], source, beam_size=3, max_len_a=0, max_len_b=8)
    lengths = torch.tensor([len(words) + 1 for words in sentences])
    if text:
        # Prefixes of two words to go on from, without padding.
        prefix = torch.tensor([words[:2] for words in sentences])
        bos = torch.full((3, 1), source.eos())
        sample = {"net_input": {"src_tokens": torch.cat((bos, prefix), 1), "src_lengths": torch.full((3,), 3)}}
        found = generator.generate([model], sample, prefix_tokens=prefix)
    else:
        found = generator.generate([model], {"net_input": {"src_tokens": rows, "src_lengths": lengths}})
    return [
        {"tokens": best[0]["tokens"].tolist(), "scores": [round(x, 5) for x in best[0]["positional_scores"].tolist()]}
        for best in found
    ]
