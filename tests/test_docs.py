"""The commands of the pages on models: fairseq accepts each of them."""

import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("fairseq")

from fairseq import options

import fairseq_lowrank.plugin  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
PARSERS = {
    "fairseq-train": options.get_training_parser,
    "fairseq-eval-lm": options.get_eval_lm_parser,
    "fairseq-preprocess": options.get_preprocessing_parser,
}


def commands(page: str) -> list[list[str]]:
    """The commands of fairseq in a page, without those that leave something out."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    found = [shlex.split(line, comments=True) for line in lines if "…" not in line]
    return [words for words in found if words and words[0] in PARSERS]


@pytest.mark.parametrize(("page", "count"), [("bert.md", 4), ("language-models.md", 5)])
def test_fairseq_accepts_every_command_of_a_page(page, count):
    found = commands(page)
    assert len(found) == count
    for name, *words in found:
        if name == "fairseq-preprocess":
            PARSERS[name]().parse_args(words)
            continue
        place = words.index("--user-dir")
        assert words[place + 1] == "fairseq_lowrank"
        args = options.parse_args_and_arch(PARSERS[name](), input_args=words[:place] + words[place + 2 :])
        assert args.data.startswith("$")
