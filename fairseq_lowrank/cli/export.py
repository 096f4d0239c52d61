"""Export a checkpoint of fairseq to a library that does not need fairseq.

    fairseq-lowrank export checkpoint_best.pt OUT --to transformers
    fairseq-lowrank export checkpoint_best.pt OUT --to ctranslate2

transformers: OUT holds model, tokenizer, settings of generation and a model card. Any attention of this package can be
exported. In Python, `import fairseq_lowrank.huggingface` (or pass `trust_remote_code=True`) and then `AutoModelForSeq2SeqLM.from_pretrained("OUT")`, or
`AutoModelForCausalLM` for a language model, read it. They need torch and transformers, and no fairseq.

ctranslate2: the attention is first converted to plain attention with the same outputs. Attention that computes more than
plain attention is refused. OUT is written by CTranslate2's own converter.

Before OUT gets its name, 20 sentences are translated with both models. The command fails if scores differ by more than the
rounding of float32. The sentences are those of --check FILE, which also tests the tokenizer, or of the checkpoint's data.
"""

import importlib.util
import shlex
from collections.abc import Sequence
from pathlib import Path

from fairseq_lowrank import __version__
from fairseq_lowrank.cli import _output, translate
from fairseq_lowrank.messages import FlagError, UserError

NAME = "export"
HELP = "take a model out of fairseq, to transformers or CTranslate2"
TARGETS = ("transformers", "ctranslate2")
SENTENCES = 20


def add_arguments(parser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="checkpoint of a translation or language model")
    parser.add_argument("output", type=Path, metavar="OUT", help="the new folder")
    parser.add_argument("--to", choices=TARGETS, required=True, help="the library that reads OUT")
    parser.add_argument(
        "--check", type=Path, metavar="FILE", help="raw text whose first 20 sentences are translated with both models"
    )
    parser.add_argument(
        "--subset", default="valid", help="the part of the data to compare on without --check (default: %(default)s)"
    )
    translate.add_search_arguments(parser)


def run(args) -> None:
    translate.check_search_arguments(args)
    if args.to == "ctranslate2" and importlib.util.find_spec("ctranslate2") is None:
        raise FlagError("--to", "ctranslate2", "it is not installed", "Run pip install ctranslate2.")
    if args.check is not None and not args.check.is_file():
        raise FlagError("--check", args.check, "there is no such file", "Give the name of a text.")
    if args.output.exists():
        raise UserError(f"{args.output} exists already. Give a new folder, or remove this one.")
    from fairseq_lowrank.files import whole_folder
    from fairseq_lowrank.tools.exported import compare
    from fairseq_lowrank.tools.fairseq.checkpoints import load_state
    from fairseq_lowrank.tools.fairseq.export import FairseqModel

    state = load_state(args.checkpoint)
    if args.to == "ctranslate2":
        from fairseq_lowrank.tools.fairseq.ctranslate2 import check_flags

        check_flags(state)
    model = FairseqModel(
        args.checkpoint,
        state=state,
        data=args.data,
        moses=args.moses,
        subwords=args.subwords,
        beam=args.beam,
        lenpen=args.lenpen,
        max_len_b=args.max_len_b,
    )
    lines: list[str] = []
    if args.check is None:
        sentences = model.sentences(args.subset, SENTENCES)
    else:
        lines, sentences = model.lines(args.check, SENTENCES)
    with whole_folder(args.output) as folder:
        after = (to_transformers if args.to == "transformers" else to_ctranslate2)(model, folder)
        for line, sentence in zip(lines, sentences, strict=False):
            if after.encode(line) != sentence:
                raise UserError(
                    f"the exported tokenizer reads {line!r} in another way. Nothing is written. Choose other sentences with --check."
                )
        comparison = compare(model.search(sentences), after, sentences)
        text = card(model, args.to, str(comparison), args.words)
        (folder / "README.md").write_text(text, encoding="utf-8")
    _output.say(f"{args.output}: {args.checkpoint} for {args.to}\n{comparison}")


def to_transformers(model, folder: Path):
    from transformers.utils import logging

    from fairseq_lowrank.tools.transformers.export import TransformersModel, write

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        write(model.exported(), folder)
        return TransformersModel(folder)
    finally:
        if shown:
            logging.enable_progress_bar()


def to_ctranslate2(model, folder: Path):
    from fairseq_lowrank.tools.fairseq.ctranslate2 import CTranslate2Model, write

    write(model, folder)
    return CTranslate2Model(model, folder)


def card(model, target: str, comparison: str, words: Sequence[str]) -> str:
    """Return the model card; `words` are those of the command line."""
    exported = model.exported()
    kind = "translation" if exported.translates else "text-generation"
    head = ["---", f"library_name: {target}", f"pipeline_tag: {kind}", "tags:", "- fairseq", "---", ""]
    languages = f", {exported.text.source} to {exported.text.target}" if exported.translates else ""
    return "\n".join(
        [
            *head,
            f"# {model.path.stem}{languages}",
            "",
            "This model was trained with fairseq, and exported by this command:",
            "",
            f"    fairseq-lowrank {shlex.join(words)}",
            "",
            *exported.card,
            f"- compared with fairseq: {comparison}",
            "",
            *(_needs(exported.text) if target == "transformers" else ()),
            *USE[target, exported.translates],
        ]
    )


def _needs(text) -> list[str]:
    """Return the lines of the model card on the packages that read a folder for transformers."""
    packages = ["torch", "transformers", "safetensors"]
    packages += ["sacremoses"] if text.moses is not None else []
    packages += [text.subwords.replace("_", "-")] if text.subwords is not None else []
    return [
        f"Run `pip install {' '.join(packages)}`, and `pip install .` in a clone of fairseq_lowrank {__version__}.",
        "",
    ]


_TRANSFORMERS = [
    "```python",
    "import fairseq_lowrank.huggingface",
    "from transformers import AutoTokenizer, {auto}",
    "",
    'tokenizer = AutoTokenizer.from_pretrained("OUT")',
    'model = {auto}.from_pretrained("OUT")',
    'found = model.generate(**tokenizer({text}, return_tensors="pt"))',
    "print(tokenizer.decode(found[0], skip_special_tokens=True))",
    "```",
    "",
]
USE = {
    ("transformers", True): [
        line.format(auto="AutoModelForSeq2SeqLM", text='"Ein Hund läuft."') for line in _TRANSFORMERS
    ],
    ("transformers", False): [line.format(auto="AutoModelForCausalLM", text='"the"') for line in _TRANSFORMERS],
    ("ctranslate2", True): [
        '`ctranslate2.Translator("OUT").translate_batch([tokens])` translates tokens, which the corpus\'s tokenizer makes.',
        "",
    ],
    ("ctranslate2", False): [
        '`ctranslate2.Generator("OUT").generate_batch([tokens])` continues tokens, which the corpus\'s tokenizer makes.',
        "",
    ],
}
"""Lines of the model card on the use of a folder, by the target and by whether the model translates."""
