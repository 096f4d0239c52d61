"""Small recipes on small corpora, their commands run in this process."""

import logging
import shlex

import pytest

from experiments.__main__ import main
from experiments.recipes.engine import RecipeEngine
from experiments.recipes.recipe import Recipe
from experiments.recipes.settings import Settings

COMMON = {
    "translation": "--arch lowrank_transformer --source-lang de --target-lang en --encoder-layers 1 --decoder-layers 1 "
    "--encoder-embed-dim 16 --decoder-embed-dim 16 --encoder-ffn-embed-dim 16 --decoder-ffn-embed-dim 16 "
    "--encoder-attention-heads 2 --decoder-attention-heads 2",
    "language-model": "--arch lowrank_transformer_lm --task language_modeling --sample-break-mode eos "
    "--tokens-per-sample 16 --decoder-layers 1 --decoder-embed-dim 16 --decoder-input-dim 16 --decoder-output-dim 16 "
    "--decoder-ffn-embed-dim 16 --decoder-attention-heads 2",
}
TRAINING = "--optimizer adam --lr 0.01 --max-tokens 100 --max-update 3 --cpu --no-epoch-checkpoints"


class InProcess:
    """Runs fairseq's commands in this process; `calls` are those it was asked for, preparations among them."""

    def __init__(self, fairseq_command, caplog):
        self.calls, self.fairseq_command, self.caplog = [], fairseq_command, caplog

    def __call__(self, words, log, keep=None, patches=""):
        self.calls.append(words[0])
        if words[:3] == ["python", "-m", "experiments"]:
            assert main(words[3:]) == 0
            return
        said = self.fairseq_command(words[0].removeprefix("fairseq-"), *words[1:])
        records = [f"date | {record.levelname} | {record.name} | {record.message}" for record in self.caplog.records]
        printed = said.removeprefix(
            "\n".join([*self.caplog.messages, ""])
        )  # the rest of what it said is in the records
        with open(log, "a", encoding="utf-8") as file:
            file.write("\n".join([f"+ {shlex.join(words)}", *records, printed, ""]))

    def prepare(self, words):
        self.calls.append(f"prepare.sh {words[0]}")


@pytest.fixture
def commands(fairseq_command, caplog):
    return InProcess(fairseq_command, caplog)


@pytest.fixture
def recipe(request):
    """``recipe(kind, **rows)``: a recipe of tiny models, each row with flags of its own."""

    def make(kind: str = "translation", **rows: str) -> Recipe:
        records = [["paper", "own"], ["table", "tiny"], ["common", *COMMON[kind].split(), *TRAINING.split()]]
        records += [["row", name, "iwslt14", "", "", *flags.split()] for name, flags in rows.items()]
        return Recipe.read(kind, request.config.rootpath, records)

    return make


@pytest.fixture
def settings(tmp_path, translation_data):
    """``settings(**changes)``: for a work folder that holds a tiny corpus in the place of `iwslt14`."""
    tiny = tmp_path / "work" / "data" / "iwslt14"
    tiny.mkdir(parents=True)
    (tiny / "bin").symlink_to(translation_data)
    (tiny / "tok").symlink_to(translation_data.parent)

    def make(**changes) -> Settings:
        return Settings(**{"work": tmp_path / "work", "results": tmp_path / "results" / "own.jsonl", **changes})

    return make


@pytest.fixture
def engine(commands):
    """``engine(recipe, settings)``: over commands run in this process."""
    return lambda recipe, settings: RecipeEngine(recipe, settings, commands)


@pytest.fixture(autouse=True)
def _quiet():
    """What fairseq's commands set up for a process of their own is undone."""
    level = logging.root.level
    yield
    logging.root.setLevel(level)
