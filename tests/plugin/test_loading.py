"""Checkpoint files: loaded as they were saved, or refused before a small file grows."""

import argparse
import collections
import os
import tarfile
import tempfile
import zipfile
from io import BytesIO

import numpy as np
import pytest
import torch

pytest.importorskip("fairseq")

import omegaconf
from fairseq import checkpoint_utils, file_utils
from fairseq.data import Dictionary
from fairseq.file_io import PathManager
from torch.serialization import safe_globals

from fairseq_lowrank import plugin  # noqa: F401 (what --user-dir brings)
from fairseq_lowrank.messages import InvalidCheckpoint, StateDictMismatch
from fairseq_lowrank.plugin.states import explain_mismatch
from fairseq_lowrank.repairs import checkpoint_file
from fairseq_lowrank.repairs.loading import load_checkpoint


def save(folder, *, legacy=False, **parts):
    """The path of a small checkpoint with other ``parts``."""
    state = {
        "args": None,
        "cfg": {"model": {"_name": "transformer_lm", "lr": [0.1]}, "task": {"data": "here"}},
        "model": {"w": torch.arange(3000.0), "tied": torch.ones(2)},
        "optimizer_history": [{"optimizer_name": "Adam", "lr_scheduler_state": {}, "num_updates": 1}],
        "extra_state": {"train_iterator": {"epoch": 1}},
    }
    path = folder / "checkpoint.pt"
    torch.save(state | parts, path, _use_new_zipfile_serialization=not legacy)
    return path


def repack(path, compression=zipfile.ZIP_STORED, replace=None):
    """Write the archive at ``path`` again, with other compression and members."""
    with zipfile.ZipFile(path) as archive:
        members = [(member.filename, archive.read(member)) for member in archive.infolist()]
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members:
            archive.writestr(name, (replace or {}).get(name, data))


LOADERS = {
    "ours": load_checkpoint,
    "fairseq": checkpoint_utils.load_checkpoint_to_cpu,
    "average of the weights": checkpoint_utils.load_ema_from_checkpoint,
}


@pytest.fixture(params=LOADERS)
def refused(request):
    """``refused(path)``: the error of a function that loads checkpoints."""

    def refused(path):
        with pytest.raises(InvalidCheckpoint) as error:
            LOADERS[request.param](str(path))
        assert error.value.path == str(path)
        assert "\n" not in str(error.value)
        return error.value

    return refused


@pytest.mark.parametrize("legacy", [False, True])
def test_load_refuses_a_tensor_larger_than_its_storage(tmp_path, limited_memory, refused, legacy):
    repeated = torch.ones(1).expand(2**32)
    refused(save(tmp_path, legacy=legacy, model={"w": repeated}, extra_state={"ema": {"w": repeated}}))


def test_load_refuses_a_compressed_archive(tmp_path, limited_memory, refused):
    path = save(tmp_path, model={"w": torch.zeros(2**24, dtype=torch.uint8)})
    repack(path, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 2**17
    assert "compressed" in refused(path).reason


def test_load_names_a_part_that_does_not_match_its_checksum(tmp_path, refused):
    path = save(tmp_path)
    path.write_bytes(path.read_bytes().replace(np.float32(2999).tobytes(), np.float32(2999.5).tobytes()))
    assert "checkpoint/data/0" in refused(path).reason


def test_load_finds_every_flipped_bit_that_changes_something(tmp_path):
    path = save(tmp_path, model={"w": torch.arange(30.0)})
    written, expected, outcomes = path.read_bytes(), load_checkpoint(path), collections.Counter()
    for place in np.random.default_rng(1).choice(8 * len(written), 1500, replace=False):
        damaged = bytearray(written)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            found = load_checkpoint(path)
        except (InvalidCheckpoint, RuntimeError, OSError) as error:
            outcomes[type(error)] += 1
        else:  # padding, dates and the like
            outcomes["unchanged"] += 1
            assert found["model"]["w"].equal(expected["model"]["w"])
            assert {**found, "model": 0} == {**expected, "model": 0}
    assert outcomes[InvalidCheckpoint] > 500
    assert outcomes[RuntimeError] + outcomes[OSError] < 150  # of torch and Python, about the archive's directory


def test_load_refuses_an_entry_that_torch_would_not_read(tmp_path, refused):
    """torch does not read an entry that is marked as a folder, and gives what was in memory for it."""
    path = save(tmp_path)
    with zipfile.ZipFile(path) as archive:
        members = [(member, archive.read(member)) for member in archive.infolist()]
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in members:
            member.external_attr = 0x10 * (member.filename == "checkpoint/data/0")
            archive.writestr(member, data)
    refused(path)


@pytest.mark.parametrize("cut", [1, 100, 5000, 12000])
def test_load_refuses_a_file_that_is_cut_short(tmp_path, refused, cut):
    path = save(tmp_path)
    os.truncate(path, path.stat().st_size - cut)
    refused(path)


def test_load_of_a_cut_legacy_file_raises_torchs_error(tmp_path):
    """The format of torch before 1.6 has no checksums."""
    path = save(tmp_path, legacy=True)
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(RuntimeError, match="unexpected EOF"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    "data", [b"text\n", b"PK\x03\x04", b"\x80\x02}.", b"", b"\x1f\x8b\x08\x00", bytes(range(99, 199))]
)
def test_load_refuses_other_files(tmp_path, refused, data):
    path = tmp_path / "other.pt"
    path.write_bytes(data)
    refused(path)


@pytest.mark.parametrize("content", [{"weights": torch.ones(2)}, torch.ones(2)], ids=["dictionary", "tensor"])
def test_load_refuses_a_file_without_a_model(tmp_path, refused, content):
    path = tmp_path / "other.pt"
    torch.save(content, path)
    assert "'model'" in refused(path).reason


class Call:
    """Pickled, it is a call of ``mkdir``."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("legacy", [False, True])
def test_load_runs_no_code(tmp_path, refused, legacy):
    error = refused(save(tmp_path, legacy=legacy, extra_state=Call(tmp_path / "made")))
    assert not (tmp_path / "made").exists()
    assert legacy or "posix.mkdir" in error.reason


@pytest.mark.parametrize("error", [RuntimeError("no"), MemoryError(), AttributeError("x"), KeyError("model")], ids=repr)
def test_load_passes_unexpected_errors_on(tmp_path, monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(torch, "load", fail)
    path = save(tmp_path)
    for load in LOADERS.values():
        with pytest.raises(type(error)) as raised:
            load(str(path))
        assert raised.value is error


def test_upgrade_passes_unexpected_errors_on(tmp_path):
    """A state that fairseq's upgrades do not understand is not a damaged file."""
    path = save(tmp_path, optimizer_history=[{}])
    with pytest.raises(KeyError, match="best_loss"):
        checkpoint_utils.load_checkpoint_to_cpu(path)


def test_load_opens_files_by_fairseqs_path_manager(tmp_path, monkeypatch):
    path, opened = save(tmp_path), []

    def open_elsewhere(name, *args, **kwargs):
        opened.append(name)
        return open(path, *args, **kwargs)

    monkeypatch.setattr(PathManager, "open", open_elsewhere)
    load_checkpoint("remote://checkpoint.pt")
    assert opened == ["remote://checkpoint.pt"]


def test_load_reads_the_legacy_format(tmp_path):
    weights = torch.randn(4, 6)
    model = collections.OrderedDict(w=weights, part=weights[1:3, 2:], turned=weights.t(), none=torch.empty(0))
    state = load_checkpoint(save(tmp_path, legacy=True, model=model))
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in model.items())


def test_load_keeps_all_kinds_of_tensors_and_numbers(tmp_path):
    weight = torch.nn.Parameter(torch.randn(4, 6))
    weight.marked = True
    model = {"parameter": torch.nn.Parameter(torch.randn(3)), "marked": weight, "empty": torch.empty(0, 5)}
    for kind in (torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint16, torch.complex64):
        model[str(kind)] = torch.ones(3, dtype=kind)
    table = torch.randn(6, 2)
    model |= {"table": table, "tied": table, "rows": table[::2], "last": table[-1], "scalar": torch.tensor(3.0)}
    dictionary = Dictionary()
    dictionary.add_symbol("word", 3)
    numbers = {"acc_and_f1": np.float64(0.25), "count": np.int64(7), "half": np.float32(0.5), "sure": np.bool_(True)}
    path = save(tmp_path, model=model, extra_state={"best": numbers}, task_state={"words": dictionary})
    loaded = load_checkpoint(path)
    assert loaded["extra_state"]["best"] == numbers
    assert loaded["task_state"]["words"].count == dictionary.count
    found = loaded["model"]
    assert all(torch.equal(found[name], tensor) for name, tensor in model.items())
    assert found["marked"].marked


def test_load_keeps_a_configuration_of_2020(tmp_path):
    config = omegaconf.OmegaConf.create({"model": {"_name": "transformer_lm", "sizes": [1, 2]}, "task": {"data": "x"}})
    assert checkpoint_utils.load_checkpoint_to_cpu(save(tmp_path, cfg=config))["cfg"].model.sizes == [1, 2]


def test_load_allows_no_class_that_is_not_listed(tmp_path):
    with safe_globals([]), open(save(tmp_path, args=argparse.Namespace(x=1)), "rb") as file:
        with pytest.raises(InvalidCheckpoint) as error:
            checkpoint_file.load(file)
        assert "argparse.Namespace" in error.value.reason
        file.seek(0)
        assert checkpoint_file.load(file, [argparse.Namespace])["args"].x == 1


@pytest.mark.parametrize("rate", ["0.001", "[0.001]", 0.001, [0.001], ["0.001"]], ids=repr)
@pytest.mark.parametrize("frequency", ["4", 4, [4]], ids=repr)
def test_upgrade_reads_numbers_of_old_arguments(tmp_path, rate, frequency):
    arguments = argparse.Namespace(arch="transformer", lr=rate, update_freq=frequency, task="translation", data="x")
    optimization = checkpoint_utils.load_checkpoint_to_cpu(save(tmp_path, args=arguments, cfg=None))["cfg"].optimization
    assert (optimization.lr, optimization.update_freq) == ([0.001], [4])


@pytest.mark.parametrize(
    "lengths",
    [
        {"max_source_positions": None, "max_target_positions": None},
        {"max_source_positions": "1024", "max_target_positions": 1024.0},
        {"max_positions": "1024"},
        {"max_positions": 1024, "max_source_positions": None},
    ],
    ids=str,
)
def test_upgrade_reads_largest_lengths_of_old_arguments(tmp_path, lengths):
    arguments = argparse.Namespace(arch="transformer", task="translation", data="x", **lengths)
    cfg = checkpoint_utils.load_checkpoint_to_cpu(save(tmp_path, args=arguments, cfg=None))["cfg"]
    assert cfg.task.max_source_positions == getattr(cfg.model, "max_source_positions", 1024) == 1024


# --- states that do not fit ---


@pytest.mark.parametrize(
    ("change", "name", "saved", "current", "others"),
    [
        ({"weight": torch.ones(3, 2)}, "weight", (3, 2), (4, 3), 0),
        ({"weight": torch.ones(3, 2), "bias": torch.ones(3), "more": torch.ones(1)}, "weight", (3, 2), (4, 3), 2),
        ({"more": torch.ones(2), "most": torch.ones(2)}, "more", (2,), None, 1),
        ({"bias": None}, "bias", None, (4,), 0),
    ],
    ids=["shape", "shapes and names", "unexpected", "missing"],
)
def test_explain_mismatch_names_the_tensor_and_both_shapes(change, name, saved, current, others):
    layer = torch.nn.Linear(3, 4)
    state = {key: value for key, value in {**layer.state_dict(), **change}.items() if value is not None}
    for kind in (ValueError, RuntimeError, StateDictMismatch):
        with pytest.raises(kind) as error, explain_mismatch(layer):
            layer.load_state_dict(state)
    found = error.value
    assert (found.name, found.saved, found.current, found.others) == (name, saved, current, others)
    assert not layer._load_state_dict_pre_hooks
    assert not layer._load_state_dict_post_hooks


def test_explain_mismatch_passes_other_runtime_errors_on():
    layer = torch.nn.Linear(3, 4)
    layer.register_load_state_dict_pre_hook(lambda *args: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
    with pytest.raises(torch.OutOfMemoryError, match="full"), explain_mismatch(layer):
        layer.load_state_dict({})


# --- archives of models ---


def make_archive(path, *members):
    with tarfile.open(path, "w:gz") as archive:
        for name in members:
            member = tarfile.TarInfo(name)
            member.size = 4
            archive.addfile(member, BytesIO(b"text"))
    return str(path)


def test_load_archive_file_unpacks_an_archive_in_its_place(tmp_path):
    folder = file_utils.load_archive_file(make_archive(tmp_path / "model.tar.gz", "model/one.txt", "model/two.txt"))
    assert sorted(os.listdir(folder)) == ["one.txt", "two.txt"]


@pytest.mark.parametrize("member", ["../../out.txt", "model/../../out.txt"])
def test_load_archive_file_writes_nothing_elsewhere(tmp_path, monkeypatch, member):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    archive = make_archive(tmp_path / "model.tar.gz", "model/one.txt", member)
    with pytest.raises(tarfile.TarError):
        file_utils.load_archive_file(archive)
    assert not list(tmp_path.rglob("out.txt"))


def test_model_of_another_plugin_is_named(trained, translation_data, refusal, tmp_path):
    """fairseq fails while it formats its own message."""
    state = load_checkpoint(trained("mixhead-a"))
    model = state["cfg"]["model"]
    vars(model).update(arch="their_transformer", _name="their_transformer")
    torch.save(state, tmp_path / "theirs.pt")
    line = refusal("generate", translation_data, "--path", tmp_path / "theirs.pt", "--cpu")
    assert "model 'their_transformer' is not registered" in line and "--user-dir DIR" in line
