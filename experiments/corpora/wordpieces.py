"""BERT's subwords, called word pieces."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fairseq_lowrank.files import whole_file
from fairseq_lowrank.messages import UserError


class WordPieces:
    """A function that cuts lines into BERT's subwords (Devlin et al. 2019), by the package tokenizers.

    Punctuation is separated. Then the longest subword of the vocabulary is cut off repeatedly; `##` continues a word. Names such
    as `[MASK]` in a text are text. An unknown word becomes `<unk>`.
    """

    unknown = "[UNK]"

    @classmethod
    def save(cls, words: Iterable[str], model: Path, **normalisation) -> None:
        """Write the model file of a published vocabulary, whose words are the lines of vocab.txt.

        Args:
            normalisation: `lowercase`, `strip_accents` and `handle_chinese_chars` of transformers' tokenizer.
        """
        from tokenizers import Tokenizer
        from tokenizers.models import WordPiece
        from tokenizers.normalizers import BertNormalizer
        from tokenizers.pre_tokenizers import BertPreTokenizer

        vocabulary = {word: index for index, word in enumerate(words)}
        pieces = Tokenizer(WordPiece(vocabulary, unk_token=cls.unknown, max_input_chars_per_word=100))
        pieces.normalizer = BertNormalizer(clean_text=True, **normalisation)
        pieces.pre_tokenizer = BertPreTokenizer()
        with whole_file(model) as file:
            file.write(pieces.to_str())

    def __init__(self, model: Path):
        from tokenizers import Tokenizer

        try:
            self.pieces = Tokenizer.from_file(str(model))
        except Exception as error:  # tokenizers raises nothing narrower
            raise UserError(
                f"{model} has no word pieces ({error}). Give the wordpieces.json of python -m experiments bert import."
            ) from error

    def __call__(self, line: str) -> str:
        tokens = self.pieces.encode(line, add_special_tokens=False).tokens
        return " ".join("<unk>" if token == self.unknown else token for token in tokens)
