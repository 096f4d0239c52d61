"""Checkpoint files that are damaged or made to harm: refused in one line, before anything in them is made."""

import argparse
import collections
import importlib.util
import os
import re
import resource
import struct
import tarfile
import tempfile
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("fairseq")

import omegaconf
from fairseq import checkpoint_utils, file_utils
from fairseq.data import Dictionary

from fairseq_lowrank.plugin.checkpoint_file import MOST_PICKLED
from fairseq_lowrank.plugin.loading import (
    UserError,
    load_checkpoint,
)


class Call:
    """Pickled, it is a call of ``function`` with ``args``, and then given ``state``."""

    def __init__(self, function, *args, state=None):
        self.call = (function, args, state) if state is not None else (function, args)

    def __reduce__(self):
        return self.call


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


def repack(path, compression=zipfile.ZIP_STORED, replace=None, extra=()):
    """Write the archive at ``path`` anew, with members replaced and others added."""
    with zipfile.ZipFile(path) as archive:
        members = [(member.filename, archive.read(member)) for member in archive.infolist()]
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in [*members, *extra]:
            archive.writestr(name, (replace or {}).get(name, data))


@pytest.fixture
def a_gigabyte():
    """While it is used, the process may take a gigabyte more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**30, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def nested(depth, width=1, bottom=()):
    part = list(bottom)
    for _ in range(depth):
        part = [part] * width
    return part


def cyclic():
    part = []
    part.append(part)
    return part


reconstruct = np.zeros(1).__reduce__()[0]
array_state = np.zeros(1).__reduce__()[2]
BOMBS = {
    "lists in lists in lists": ({"cfg": {"model": nested(150)}}, "nested more than 100 deep"),
    "lists of one list twice, and so on": (
        {"cfg": {"model": nested(40, width=2)}},
        "more than 20,000 entries",
    ),
    "the same in the optimizer's state": ({"last_optimizer_state": nested(40, width=2)}, "more than 1,000,000 entries"),
    "a list in itself": ({"extra_state": cyclic()}, "more than 1,000,000 entries|100 deep"),
    "100,000 settings": ({"cfg": {"model": dict.fromkeys(map(str, range(100_000)))}}, "more than 20,000 entries"),
    "100,000 arguments": ({"args": argparse.Namespace(x=[None] * 100_000)}, "more than 20,000 entries"),
    "a setting of a megabyte": ({"cfg": {"model": {"x": "x" * 2**20}}}, "a text of 1,048,576 characters"),
    "an element repeated": (
        {"model": {"w": torch.ones(1).expand(2**32)}},
        r"shape \[4294967296\] that repeats 4 bytes",
    ),
    "an element repeated, as a parameter": (
        {"model": {"w": torch.nn.Parameter(torch.ones(1).expand(2**32))}},
        r"shape \[4294967296\] that repeats 4 bytes",
    ),
    "a tensor under many names": (
        {"model": {str(number): tensor for number, tensor in enumerate(torch.ones(2**18).expand(99, -1).unbind())}},
        "share their data so often",
    ),
    "an array larger than its numbers": (
        {"extra_state": Call(reconstruct, np.ndarray, (50 * 10**9,), b"b")},
        r"holds numpy\._core\.multiarray\._reconstruct",
    ),
    "an array filled later": (
        {"extra_state": Call(reconstruct, np.ndarray, (0,), b"b", state=(1, (10**10,), np.dtype("f8"), False, b"ab"))},
        r"an array of shape \[10000000000\] lies in 2 bytes",
    ),
    "an array of objects": (
        {"extra_state": Call(reconstruct, np.ndarray, (0,), b"b", state=(1, (10**10,), np.dtype("O"), False, []))},
        "an array of 'O8'",
    ),
    "an array, made": ({"extra_state": Call(np.ndarray, (50 * 10**9,))}, r"holds numpy\.ndarray"),
    "bytes, made": ({"extra_state": Call(bytearray, 10**11)}, "holds builtins.bytearray|holds __builtin__.bytearray"),
    "a tensor, made": ({"extra_state": Call(torch.Tensor, 10**11)}, r"holds torch\._tensor\.Tensor|torch\.Tensor"),
    "a pickle of many megabytes": ({"extra_state": "x" * MOST_PICKLED}, "its pickle has"),
}


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("bomb", BOMBS)
def test_what_would_grow_beyond_measure_is_refused_before_it_grows(tmp_path, a_gigabyte, bomb, legacy):
    parts, reason = BOMBS[bomb]
    path = save(tmp_path, legacy=legacy, **parts)
    assert path.stat().st_size < 2 * MOST_PICKLED
    with pytest.raises(
        UserError, match=rf"^{re.escape(str(path))} (cannot be read as a checkpoint|was not loaded): .*({reason})"
    ):
        checkpoint_utils.load_checkpoint_to_cpu(path)


def test_a_compressed_archive_is_refused_before_it_unfolds(tmp_path, a_gigabyte):
    path = save(tmp_path, model={"w": torch.zeros(2**22)})
    repack(path, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 2**16
    with pytest.raises(UserError, match="its parts are compressed"):
        checkpoint_utils.load_checkpoint_to_cpu(path)


def test_a_key_nested_very_deep_does_not_end_the_process(tmp_path):
    path = save(tmp_path)
    deep = b"\x80\x02}(" + b")" + b"\x85" * 10**5 + b"K\x01u."
    repack(path, replace={"checkpoint/data.pkl": deep})
    with pytest.raises(UserError, match="keys are no names"):
        load_checkpoint(path)


def test_every_flipped_bit_of_an_archive_is_found_or_changes_nothing(tmp_path):
    path = save(tmp_path)
    written, expected, refused = path.read_bytes(), load_checkpoint(path), 0
    places = np.random.default_rng(1).choice(len(written), 150, replace=False)
    for place in places:
        damaged = bytearray(written)
        damaged[place] ^= 1 << int(place) % 8
        path.write_bytes(damaged)
        try:
            found = load_checkpoint(path)
        except UserError as error:
            assert "\n" not in str(error)
            refused += 1
        else:  # padding, dates and the like
            assert all(torch.equal(found["model"][name], tensor) for name, tensor in expected["model"].items())
            assert {**found, "model": 0} == {**expected, "model": 0}
    assert refused > 130


def test_a_flipped_bit_of_the_weights_is_named(tmp_path):
    path = save(tmp_path)
    written = path.read_bytes()
    value = struct.pack("<f", 2999.0)
    path.write_bytes(written.replace(value, struct.pack("<f", 2999.5)))
    with pytest.raises(UserError, match="it is damaged: checkpoint/data/0 does not match its checksum"):
        checkpoint_utils.load_checkpoint_to_cpu(path)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("cut", [1, 100, 5000, 12000])
def test_a_file_that_is_cut_short_is_refused(tmp_path, legacy, cut):
    path = save(tmp_path, legacy=legacy)
    os.truncate(path, path.stat().st_size - cut)
    with pytest.raises(UserError, match=r"cannot be read as a checkpoint: .*(damaged|cut short)"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    "data", [b"text\n", b"PK\x03\x04", b"\x80\x02}.", b"", b"\x1f\x8b\x08\x00", bytes(range(99, 199))]
)
def test_other_files_are_no_checkpoints(tmp_path, data):
    path = tmp_path / "other.pt"
    path.write_bytes(data)
    for load in (load_checkpoint, checkpoint_utils.load_checkpoint_to_cpu, checkpoint_utils.load_ema_from_checkpoint):
        with pytest.raises(
            UserError, match=f"^{path} cannot be read as a checkpoint: it is damaged, cut short or another"
        ):
            load(str(path))


@pytest.mark.parametrize("size", [11999, 12001, 0, 4])
def test_a_storage_that_is_not_all_in_the_file_is_refused(tmp_path, size):
    path = save(tmp_path)
    repack(path, replace={"checkpoint/data/0": b"\0" * size})
    with pytest.raises(UserError, match=f"3,000 elements of a tensor lie in {size:,} bytes"):
        load_checkpoint(path)


def test_a_tensor_beyond_its_storage_is_refused(tmp_path):
    path = save(tmp_path)
    with zipfile.ZipFile(path) as archive:
        pickled = archive.read("checkpoint/data.pkl")
    shape = b"M\xb8\x0b\x85"  # (3000,)
    assert shape in pickled
    repack(path, replace={"checkpoint/data.pkl": pickled.replace(shape, b"M\xb9\x0b\x85")})
    with pytest.raises(UserError, match=r"a tensor of shape \[3001\] lies in 12,000 bytes"):
        load_checkpoint(path)


def test_parts_of_one_name_are_refused(tmp_path):
    path = save(tmp_path)
    with pytest.warns(UserWarning, match="Duplicate name"):
        repack(path, extra=[("checkpoint/data.pkl", b"\x80\x02}.")])
    with pytest.raises(UserError, match="several of its parts have one name"):
        load_checkpoint(path)


def test_an_archive_that_begins_later_in_the_file_is_refused(tmp_path):
    path = save(tmp_path)
    inner = path.read_bytes()
    path.write_bytes(b"PK\x03\x04" + b"\0" * 96 + inner)
    with pytest.raises(UserError, match="cannot be read as a checkpoint"):
        load_checkpoint(path)


def test_a_file_of_torch_before_1_6_loads_as_it_was_saved(tmp_path):
    weights = torch.randn(4, 6)
    model = collections.OrderedDict(w=weights, part=weights[1:3, 2:], turned=weights.t(), none=torch.empty(0))
    state = load_checkpoint(save(tmp_path, legacy=True, model=model))
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in model.items())


def test_all_kinds_of_tensors_that_models_hold_load_as_they_were_saved(tmp_path):
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
    loaded = load_checkpoint(
        save(tmp_path, model=model, extra_state={"best": numbers}, task_state={"words": dictionary})
    )
    assert loaded["extra_state"]["best"] == numbers and loaded["task_state"]["words"].count == dictionary.count
    found = loaded["model"]
    assert all(torch.equal(found[name], tensor) for name, tensor in model.items())
    assert found["marked"].marked


# --- configurations ---


@pytest.mark.parametrize(
    "text",
    ["${oc.env:SECRET}", "a ${oc.env:SECRET} b", "${oc.decode:${oc.env:SECRET}}", "${${task.data}:SECRET}", "${x"],
)
@pytest.mark.parametrize("place", ["cfg", "deep", "args", "object"])
def test_a_setting_that_is_computed_where_it_is_read_is_refused(tmp_path, monkeypatch, text, place):
    monkeypatch.setenv("SECRET", "hidden")
    parts = {
        "cfg": {"cfg": {"model": {"data": text}}},
        "deep": {"cfg": {"model": {"data": [{"x": text}]}}},
        "args": {"args": argparse.Namespace(data=text)},
        "object": {"cfg": {"model": argparse.Namespace(data=text)}},
    }
    with pytest.raises(UserError, match="which would be computed here, from environment variables") as refused:
        checkpoint_utils.load_checkpoint_to_cpu(save(tmp_path, **parts[place]))
    assert "hidden" not in str(refused.value)


def test_a_configuration_of_2020_is_refused_where_it_computes_settings_and_loads_where_not(tmp_path):
    config = omegaconf.OmegaConf.create({"model": {"_name": "transformer_lm", "sizes": [1, 2]}, "task": {"data": "x"}})
    assert checkpoint_utils.load_checkpoint_to_cpu(save(tmp_path, cfg=config))["cfg"].model.sizes == [1, 2]
    config.task.data = "${oc.env:HOME}"
    with pytest.raises(UserError, match="which would be computed here"):
        checkpoint_utils.load_checkpoint_to_cpu(save(tmp_path, cfg=config))


def test_a_setting_may_refer_to_another(tmp_path):
    config = {"task": {"data": "here"}, "model": {"data": "${task.data}"}}
    assert checkpoint_utils.load_checkpoint_to_cpu(save(tmp_path, cfg=config))["cfg"].model.data == "here"


def test_references_that_multiply_are_refused(tmp_path):
    section = {"a0": [1] * 1000, **{f"a{number}": "${m.a0}" for number in range(1, 100)}}
    chain = {"a0": "x", **{f"a{number + 1}": f"${{m.a{number}}}" for number in range(9)}}
    doubling = {"a0": "x", **{f"a{number + 1}": [f"${{m.a{number}}}"] * 2 for number in range(40)}}
    for settings, reason in (
        (section, "refers to more than"),
        (chain, "would be computed"),
        (doubling, "would be computed"),
    ):
        with pytest.raises(UserError, match=reason):
            checkpoint_utils.load_checkpoint_to_cpu(save(tmp_path, cfg={"m": settings}))


def test_a_state_without_a_model_is_no_fairseq_checkpoint(tmp_path):
    path = tmp_path / "other.pt"
    torch.save({"weights": torch.ones(2)}, path)
    with pytest.raises(UserError, match="is no fairseq checkpoint: it lacks 'model'"):
        load_checkpoint(path)
    with pytest.raises(UserError, match="is no fairseq checkpoint"):
        checkpoint_utils.load_checkpoint_to_cpu(path)
    torch.save(torch.ones(2), path)
    with pytest.raises(UserError, match="is no fairseq checkpoint"):
        load_checkpoint(path)


@pytest.mark.parametrize("command", ["eval_lm", "validate", "generate", "interactive"])
@pytest.mark.parametrize("text", ["__import__('os').mkdir({!r})", "5", "{{'a': 1", "{{**{{}}}}"])
def test_overrides_that_are_no_dictionary_are_refused_and_run_nothing(tmp_path, monkeypatch, command, text):
    module = importlib.import_module(f"fairseq_cli.{command}")
    target = tmp_path / "made"
    overrides = text.format(str(target))
    arguments = [str(tmp_path), "--path", str(save(tmp_path)), "--task", "language_modeling"]
    monkeypatch.setattr("sys.argv", [command, *arguments, "--model-overrides", overrides])
    with pytest.raises(UserError) as refused:
        module.cli_main()
    assert f"--model-overrides {overrides!r}" in str(refused.value)
    assert not target.exists()


# --- archives of models ---


def make_archive(path, *members):
    with tarfile.open(path, "w:gz") as archive:
        for name in members:
            member = tarfile.TarInfo(name)
            member.size = 4
            archive.addfile(member, BytesIO(b"text"))
    return str(path)


def test_an_archive_of_a_model_is_unpacked_in_its_place(tmp_path):
    folder = file_utils.load_archive_file(make_archive(tmp_path / "model.tar.gz", "model/one.txt", "model/two.txt"))
    assert sorted(os.listdir(folder)) == ["one.txt", "two.txt"]


@pytest.mark.parametrize("member", ["../../out.txt", "model/../../out.txt"])
def test_an_archive_that_would_write_elsewhere_is_refused(tmp_path, monkeypatch, member):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    archive = make_archive(tmp_path / "model.tar.gz", "model/one.txt", member)
    with pytest.raises(UserError, match=r"is no archive of a model, or a damaged one: .*outside the destination"):
        file_utils.load_archive_file(archive)
    assert not list(tmp_path.rglob("out.txt"))


def test_a_damaged_archive_of_a_model_is_refused(tmp_path):
    path = Path(make_archive(tmp_path / "model.tar.gz", "model/one.txt"))
    for data in (path.read_bytes()[:60], b"text"):
        path.write_bytes(data)
        with pytest.raises(UserError, match="is no archive of a model, or a damaged one") as refused:
            file_utils.load_archive_file(str(path))
        assert "\n" not in str(refused.value)
