"""Shared by every test. Imports no fairseq, so that ops and attention can be tested without it."""

import contextlib
import functools
import gc
import os
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, settings

# The same examples on every run and every machine however slow, and no files left behind.
settings.register_profile(
    "fixed", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fixed")

# Recipes refuse code that is in no commit, and tests run on such code.
os.environ["DIRTY"] = "1"

REPOSITORY = Path(__file__).resolve().parent.parent

# What each folder of real data is and where it comes from, for the message when it is missing.
CORPORA = {
    "multi30k": "raw Multi30k, SPLIT.de.gz and SPLIT.en.gz, from github.com/multi30k/dataset",
    "ted-de-en": "the De-En development sets of IWSLT (XML), from wit3.fbk.eu",
    "wikitext-2": "WikiText-2's valid.txt.gz and test.txt.gz, from hf.co/datasets/Salesforce/wikitext",
    "brown": "the Brown corpus as train.txt.gz, valid.txt.gz and test.txt.gz, from nltk.org/nltk_data",
    "rte": "RTE 1 to 3 (XML), from nltk.org/nltk_data",
    "sentence-polarity": "rt-polarity.pos.gz and .neg.gz, from cs.cornell.edu/people/pabo/movie-review-data",
    "xquad": "xquad.en.json.gz, from github.com/google-deepmind/xquad",
}

# Markers of every test that uses one of the fixtures.
MARKED = {"corpus": {"corpus"}, "command": {"fairseq_command", "refusal", "trained"}}

# Files that take longest, which several workers take first: else one of them would end last, alone.
LONGEST = (
    *(
        "test_examples",
        "test_conversion",
        "test_triton_here",
        "test_tracing",
        "test_translation_commands",
        "test_launch",
    ),
    *("test_export", "test_user_dir", "test_refusals", "test_resuming", "test_criterions", "test_quickstart"),
)


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="device for the tests of ops and attention")
    parser.addoption("--all", action="store_true", help="the whole grid too, where one case of each kind is the rule")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--all"):
        left_out = [item for item in items if item.get_closest_marker("grid")]
        items[:] = [item for item in items if not item.get_closest_marker("grid")]
        config.hook.pytest_deselected(items=left_out)
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))
    for item in items:
        for marker, fixtures in MARKED.items():
            if fixtures & {*getattr(item, "fixturenames", ())}:
                item.add_marker(marker)


def pytest_collection_finish():
    """Leave modules and collected tests to no garbage collection: each one would visit their millions of objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def old_checkpoint(tmp_path_factory):
    """The file of a checkpoint of an earlier version, by its name."""
    from old_checkpoints import write

    folder = tmp_path_factory.mktemp("old-checkpoints")
    return functools.cache(lambda name: write(name, folder))


@pytest.fixture(scope="session", autouse=True)
def quick_commands():
    """Spare each command of fairseq in this process waits that change no result.

    The garbage collector may take a data loader's queue before the loader, which then waits five seconds for its workers.
    hydra takes a third of a second to compose the 300 settings of a command.
    """
    from torch.utils.data import _utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
        try:
            import quick_hydra
        except ImportError:  # without fairseq
            yield
            return
        quick_hydra.quicken(patch.setattr)
        yield


@pytest.fixture(scope="session")
def warm_python():
    """The folder of a Python whose processes start quickly, and of the commands that it runs."""
    from warm_python import WarmPython

    warm = WarmPython()
    yield warm.folder
    warm.close()


@pytest.fixture
def quick_starts(warm_python, monkeypatch):
    """Processes that a test starts by `sys.executable`, or by the folder of it, start quickly.

    A test of the start itself (what is imported, or what an installed package needs) does without.
    """
    monkeypatch.setattr("sys.executable", str(warm_python / "python"))


@pytest.fixture(autouse=True)
def seed():
    """The same random numbers in a test, whichever ran before it."""
    torch.manual_seed(1)


@pytest.fixture(scope="session")
def device(request):
    """The name of the device for tests of ops and attention."""
    return request.config.getoption("--device")


@pytest.fixture(scope="session")
def corpus():
    """``corpus(name)``: the folder of a real corpus; without it the test is skipped, in CI it fails.

    It is asked for as an argument, never by ``getfixturevalue``: tests that need it are known by that.
    """
    root = Path(os.environ.get("LOWRANK_DATA", REPOSITORY.parent / "shared" / "data"))

    def find(name: str) -> Path:
        if (root / name).is_dir():
            return root / name
        message = f"no {root / name}: put {CORPORA[name]} there, or set LOWRANK_DATA to the folder above it"
        if os.environ.get("CI"):
            pytest.fail(message)
        return pytest.skip(message)

    return find


@pytest.fixture
def fairseq_command(monkeypatch, capsys, caplog):
    """``fairseq_command("train", DATA, …)``: run ``fairseq-train DATA …`` in this process; returns what it said.

    The same code as the installed command from its argument parsing on, without the seconds that importing takes.
    """
    import fairseq_cli.eval_lm
    import fairseq_cli.generate
    import fairseq_cli.interactive
    import fairseq_cli.preprocess
    import fairseq_cli.train
    import fairseq_cli.validate

    from fairseq_lowrank.repairs.commands import as_command

    def run(name: str, *args) -> str:
        monkeypatch.setattr("sys.argv", [f"fairseq-{name}", *map(str, args)])
        caplog.clear()
        capsys.readouterr()
        with caplog.at_level("INFO"), as_command():
            getattr(fairseq_cli, name.replace("-", "_")).cli_main()
        return "\n".join([*caplog.messages, capsys.readouterr().out])  # the settings come first

    yield run
    # fairseq-preprocess logs into its folder, which pytest deletes. Where another test closes this log, the next line would open it.
    for handler in list(fairseq_cli.preprocess.logger.handlers):
        fairseq_cli.preprocess.logger.removeHandler(handler)
        handler.close()


@pytest.fixture
def limited_memory():
    """During a test, the process may take one gigabyte more than it has."""
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**30, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextlib.contextmanager
def restored(tables):
    """Give tables back what they held before."""
    before = [dict(table) for table in tables]
    yield
    for table, kept in zip(tables, before, strict=True):
        table.clear()
        table.update(kept)


@pytest.fixture
def methods_leave():
    """Methods that a test registers are forgotten after it."""
    from fairseq_lowrank.attention import AXES, METHODS, PRESETS
    from fairseq_lowrank.parts import PARTS

    with restored([AXES, METHODS, PRESETS, *PARTS.values()]):
        yield


@pytest.fixture
def plugins_leave(methods_leave):
    """What plugins register with fairseq, and with this package, during a test is forgotten after it."""
    import sys

    from fairseq import models, utils

    from fairseq_lowrank.plugin import flags

    names = [name for name in vars(models) if name.isupper() and name.endswith("REGISTRY")]
    memo = getattr(utils.import_user_module, "memo", set())
    imported, folders, path = set(sys.modules), set(memo), list(sys.path)
    configs = dict(models.MODEL_DATACLASS_REGISTRY)
    with restored([getattr(models, name) for name in names]), restored([flags.FLAGS, flags.MODEL_FLAGS]):
        yield
    for name, config in configs.items():
        if getattr(models.MODEL_REGISTRY[name], "__dataclass") is not config:
            flags.use_dataclass(name, config)
    for folder in getattr(utils.import_user_module, "memo", set()) - folders:
        utils.import_user_module.memo.discard(folder)
        if (name := Path(folder).name) not in imported:
            del sys.modules[name]
    sys.path[:] = path


@pytest.fixture
def refusal(fairseq_command, capsys):
    """``refusal("train", DATA, …)``: the one line with which ``fairseq-train DATA …`` ends, with code 2."""

    def run(name: str, *args) -> str:
        with pytest.raises(SystemExit) as exit:
            fairseq_command(name, *args)
        assert exit.value.code == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith(f"fairseq-{name}: error: ")
        return line

    return run


def _write_corpus(folder: Path) -> None:
    """Parallel text that a small model learns quickly: the target is the source in capitals, reversed."""
    words, random = ["ab", "cd", "ef", "gh", "ij", "kl", "mn", "op"], Random(1)
    for split, size in {"train": 240, "valid": 20, "test": 12}.items():
        sources = [random.choices(words, k=random.randint(3, 9)) for _ in range(size)]
        targets = [[word.upper() for word in reversed(source)] for source in sources]
        for language, sentences in {"de": sources, "en": targets}.items():
            text = "".join(" ".join(sentence) + "\n" for sentence in sentences)
            (folder / f"{split}.{language}").write_text(text)


def _preprocess(*args) -> None:
    from fairseq import options
    from fairseq_cli import preprocess

    import fairseq_lowrank.plugin  # noqa: F401

    preprocess.main(options.get_preprocessing_parser().parse_args([str(arg) for arg in args]))


@pytest.fixture(scope="session")
def translation_data(tmp_path_factory):
    """A fairseq data folder (de-en): 240, 20 and 12 sentence pairs of 3 to 9 words."""
    folder = tmp_path_factory.mktemp("translation")
    _write_corpus(folder)
    prefixes = [f"--{split}pref={folder / split}" for split in ("train", "valid", "test")]
    _preprocess("-s", "de", "-t", "en", *prefixes, "--destdir", folder / "data-bin")
    return folder / "data-bin"


@pytest.fixture(scope="session")
def language_model_data(tmp_path_factory):
    """A fairseq data folder for language models: 240, 20 and 12 lines of 3 to 9 words."""
    folder = tmp_path_factory.mktemp("language_model")
    _write_corpus(folder)
    prefixes = [f"--{split}pref={folder / split}.de" for split in ("train", "valid", "test")]
    _preprocess("--only-source", *prefixes, "--destdir", folder / "data-bin")
    return folder / "data-bin"


TRAINING = (
    *("--max-update", "2", "--max-tokens", "256", "--optimizer", "adam", "--lr", "0.05", "--num-workers", "0"),
    *("--no-progress-bar", "--no-epoch-checkpoints", "--no-last-checkpoints", "--cpu", "--seed", "3"),
)
SMALL = [
    *("--encoder-layers", "2", "--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "16"),
    *("--decoder-layers", "2", "--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "16"),
    *("--encoder-attention-heads", "4", "--decoder-attention-heads", "4"),
]
SMALL_LM = [*SMALL[6:12], "--decoder-attention-heads", "4", "--tokens-per-sample", "12"]


@pytest.fixture(scope="session")
def trained(tmp_path_factory, translation_data, language_model_data):
    """``trained(name)``: a checkpoint after two updates of ``stock``, ``mhe`` or ``mixhead-a`` (translation),
    ``mixhead-b`` (text).
    """
    import fairseq_cli.train
    from fairseq import checkpoint_utils

    import fairseq_lowrank.plugin  # noqa: F401

    flags = {
        "stock": [translation_data, "--arch", "transformer_iwslt_de_en", *SMALL],
        "mhe": [translation_data, "--arch", "lowrank_transformer_iwslt_de_en", "--attention", "mhe-mul", *SMALL],
        "mixhead-a": [
            translation_data,
            "--arch",
            "lowrank_transformer_iwslt_de_en",
            "--attention",
            "mixhead-a",
            *SMALL,
        ],
        "mixhead-b": [
            *(language_model_data, "--task", "language_modeling", "--arch", "lowrank_transformer_lm"),
            *("--attention", "mixhead-b", "--decoder-learned-pos", *SMALL_LM),
        ],
    }
    found = {}

    def train(name):
        if name not in found:
            folder = tmp_path_factory.mktemp(name)
            vars(checkpoint_utils.save_checkpoint).pop("best", None)
            words = ["fairseq-train", *flags[name], *TRAINING, "--save-dir", folder]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("sys.argv", [str(word) for word in words])
                fairseq_cli.train.cli_main()
            found[name] = folder / "checkpoint_best.pt"
        return found[name]

    return train


@pytest.fixture
def enable(monkeypatch):
    """``enable("bf16-evaluation")``: apply the optional patches of a name during a test."""
    from fairseq_lowrank.repairs.patch import locate
    from fairseq_lowrank.repairs.patches import PATCHES

    def apply(name: str) -> None:
        chosen = [patch for patch in PATCHES if patch.name == name and patch.group == "optional"]
        assert chosen
        for patch in chosen:
            holder, attribute = locate(patch.target)
            monkeypatch.setattr(holder, attribute, patch.wrap(getattr(holder, attribute)))

    return apply
