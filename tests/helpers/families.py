"""A small model of each family of fairseq's architectures, what it computes of fixed sentences, and how it decodes."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from fairseq import models, options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.iterative_refinement_generator import IterativeRefinementGenerator
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks.multilingual_translation import MultilingualTranslationTask
from tiny_transformer import make_task, sentences

DICTIONARY = make_task().source_dictionary
ENCODER = [
    *("--encoder-layers", "2", "--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "16"),
    *("--encoder-attention-heads", "4"),
]
DECODER = [
    *("--decoder-layers", "2", "--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "16"),
    *("--decoder-attention-heads", "4"),
]
TEXT = [*DECODER, "--decoder-input-dim", "16", "--decoder-output-dim", "16", "--tokens-per-sample", "32"]
SPEECH = {"input_feat_per_channel": 16, "input_channels": 1}


def source() -> torch.Tensor:
    return sentences(DICTIONARY, 5, 2, 4, left_pad=True)


def target() -> torch.Tensor:
    """Decoder inputs: </s> first, then the words."""
    return sentences(DICTIONARY, 3, 6, 4, left_pad=False).roll(1, dims=1)


def whole_target() -> torch.Tensor:
    """Sentences as the models without an order of words have them: <s>, words, </s>."""
    words = sentences(DICTIONARY, 3, 6, 4, left_pad=False)
    return torch.cat((torch.full((3, 1), DICTIONARY.bos()), words), dim=1)


def features() -> torch.Tensor:
    return torch.randn(3, 24, 16, generator=torch.Generator().manual_seed(3))


def _translate(model, tokens: torch.Tensor | None = None) -> torch.Tensor:
    rows = source()
    return model(rows, rows.ne(DICTIONARY.pad()).sum(1), target() if tokens is None else tokens)[0]


def _hear(model, tokens: torch.Tensor | None = None) -> torch.Tensor:
    sounds = features().to(next(model.parameters()).dtype)
    return model(sounds, torch.tensor([24, 20, 12]), target() if tokens is None else tokens)[0]


def _read(model, tokens: torch.Tensor | None = None) -> torch.Tensor:
    return model(target() if tokens is None else tokens)[0]


def _understand(model) -> torch.Tensor:
    return model(source().flip(1))[0]


def _edit(model) -> torch.Tensor:
    """What models say that change a whole translation at once."""
    torch.manual_seed(2)
    rows, whole = source(), whole_target()
    blank = whole.masked_fill(whole.gt(3), DICTIONARY.unk())
    said = model(rows, rows.ne(DICTIONARY.pad()).sum(1), blank, whole)
    return torch.cat([part["out"].flatten() for part in said.values() if "out" in part])


def _insert(model) -> torch.Tensor:
    """What models say that insert words: of a translation without any word yet."""
    torch.manual_seed(2)
    rows, nothing = source(), torch.tensor([[DICTIONARY.bos(), DICTIONARY.eos()]]).repeat(3, 1)
    said = model(rows, rows.ne(DICTIONARY.pad()).sum(1), nothing, whole_target())
    return torch.cat([part["out"].flatten() for part in said.values() if "out" in part])


def _search(model, sample: dict, **kwargs) -> list:
    generator = SequenceGenerator([model], DICTIONARY, beam_size=3, max_len_a=0, max_len_b=8)
    return generator.generate([model], {"net_input": sample}, **kwargs)


def _search_translation(model) -> list:
    rows = source()
    return _search(model, {"src_tokens": rows, "src_lengths": rows.ne(DICTIONARY.pad()).sum(1)})


def _search_speech(model) -> list:
    sounds = features().to(next(model.parameters()).dtype)
    return _search(model, {"src_tokens": sounds, "src_lengths": torch.tensor([24, 20, 12])})


def _search_text(model) -> list:
    prefix = torch.tensor([[5, 6], [7, 8], [9, 9]])
    rows = torch.cat((torch.full((3, 1), DICTIONARY.eos()), prefix), dim=1)
    return _search(model, {"src_tokens": rows, "src_lengths": torch.full((3,), 3)}, prefix_tokens=prefix)


def _refine(model) -> list:
    rows = source()
    sample = {"net_input": {"src_tokens": rows, "src_lengths": rows.ne(DICTIONARY.pad()).sum(1)}}
    generator = IterativeRefinementGenerator(DICTIONARY, max_iter=3, max_ratio=2)
    return generator.generate([model], {**sample, "id": torch.arange(3)})


@dataclass(frozen=True)
class Family:
    """One kind of architecture.

    Args:
        arch: a value of ``--arch``.
        sites: where it has attention that can be chosen.
        flags: of sizes, and what the model cannot do without.
        task: a value of ``--task``.
        output: what the model computes, of a model.
        decode: its hypotheses, of a model; None where it makes none.
        facts: arguments that come from data.
    """

    arch: str
    sites: tuple[str, ...] = ("encoder", "decoder", "cross")
    flags: tuple[str, ...] = (*ENCODER, *DECODER)
    task: str = "translation"
    output: Callable = _translate
    decode: Callable | None = _search_translation
    facts: tuple = ()

    @property
    def one_word_after_another(self) -> bool:
        return self.decode in (_search_translation, _search_speech, _search_text)

    def build(self, *flags: object, dropout: str = "0") -> torch.nn.Module:
        """An untrained model of seed 1, ready for inference."""
        words = ["data", "--task", self.task, "--arch", self.arch, *self.flags, "--dropout", dropout, *map(str, flags)]
        args = options.parse_args_and_arch(options.get_training_parser(self.task), words)
        for name, value in self.facts:
            setattr(args, name, value)
        config = convert_namespace_to_omegaconf(args).model
        torch.manual_seed(1)
        return models.build_model(config, self._task(args)).eval()

    def _task(self, args):
        names = ("source_dictionary", "target_dictionary", "dictionary", "src_dict", "tgt_dict")
        task = SimpleNamespace(**dict.fromkeys(names, DICTIONARY), cfg=args, args=args, max_positions=lambda: 64)
        if self.task == "multilingual_translation":
            pairs = {"langs": ["a", "b"], "lang_pairs": ["a-b"], "model_lang_pairs": ["a-b"], "training": True}
            known = object.__new__(MultilingualTranslationTask)
            vars(known).update(args=args, cfg=args, dicts={"a": DICTIONARY, "b": DICTIONARY}, **pairs)
            return known
        return task


def _first(function: Callable) -> Callable:
    return lambda model, *tokens: function(model.models["a-b"], *tokens)


_hear_one = {"output": _hear, "decode": _search_speech, "facts": tuple(SPEECH.items()), "task": "speech_to_text"}
_edit_all = {"output": _edit, "decode": _refine, "task": "translation_lev", "facts": (("label_smoothing", 0.1),)}
_text = {"sites": ("decoder",), "task": "language_modeling", "output": _read, "decode": _search_text}
_masked = {"sites": ("encoder",), "output": _understand, "decode": None}

FAMILIES = [
    Family("transformer_iwslt_de_en"),
    Family("transformer_align", flags=(*ENCODER, *DECODER, "--alignment-layer", "1")),
    Family("bart_base"),
    Family("mbart_base"),
    Family("transformer_lm", flags=tuple(TEXT), **_text),
    Family("transformer_lm_gpt2_tiny", flags=tuple(TEXT), **_text),
    Family("roberta_base", flags=(*ENCODER, "--tokens-per-sample", "32"), task="masked_lm", **_masked),
    Family("xmod_base_13", flags=(*ENCODER, "--tokens-per-sample", "32"), task="masked_lm", **_masked),
    Family("bert_base", flags=(*ENCODER, "--tokens-per-sample", "32"), task="legacy_masked_lm", **_masked),
    Family("nonautoregressive_transformer", **_edit_all),
    Family("cmlm_transformer", **_edit_all),
    Family("iterative_nonautoregressive_transformer", **_edit_all),
    Family("insertion_transformer", **{**_edit_all, "output": _insert}),
    Family("levenshtein_transformer", **{**_edit_all, "output": _insert}),
    Family("multilingual_transformer", task="multilingual_translation", output=_first(_translate), decode=None),
    Family("s2t_transformer_s", flags=(*ENCODER, *DECODER, "--conv-channels", "16"), **_hear_one),
    Family("convtransformer", flags=(*ENCODER, *DECODER), **_hear_one),
]
