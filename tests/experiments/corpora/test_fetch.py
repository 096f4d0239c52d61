"""Published archives: unpacked whole or not at all, and refused in one line where they are damaged or made to harm."""

import gzip
import hashlib
import io
import tarfile
import threading
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

import pytest

from experiments.corpora.__main__ import build_parser, main
from experiments.corpora.fetch import download, gather, locked, unpack
from experiments.corpora.multi30k import FILES
from fairseq_lowrank.files import read_lines, write_lines


def make_zip(path, members, compression=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return path


def make_tgz(path, members, sizes=()):
    with tarfile.open(path, "w:gz") as file:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            file.addfile(member, io.BytesIO(data))
    return path


MAKE = {"corpus.zip": make_zip, "corpus.tgz": make_tgz}


@pytest.mark.parametrize("name", MAKE)
def test_an_archive_is_unpacked_as_it_is(tmp_path, name):
    archive = MAKE[name](tmp_path / name, {"one.txt": b"a\n", "folder/two.txt": b"b\n" * 100_000})
    unpack(archive, tmp_path / "unpacked")
    assert (tmp_path / "unpacked" / "one.txt").read_bytes() == b"a\n"
    assert (tmp_path / "unpacked" / "folder" / "two.txt").stat().st_size == 200_000


def refuse(archive, reason):
    folder = archive.parent / "in" / "unpacked"
    with pytest.raises(ValueError, match=reason) as refused:
        unpack(archive, folder)
    assert str(refused.value).startswith(str(archive))
    assert "\n" not in str(refused.value)
    assert list(folder.parent.iterdir()) == []


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("damage", ["cut", "other", "empty", "bit"])
def test_a_damaged_archive_is_refused_and_leaves_nothing(tmp_path, name, damage):
    noise = bytes(range(256)) * 8
    archive = MAKE[name](tmp_path / name, {"one.txt": noise[::-1], "two.txt": noise})
    data = archive.read_bytes()
    flipped = bytearray(data)
    flipped[len(data) // 3] ^= 16
    archive.write_bytes(
        {"cut": data[: len(data) // 2], "other": b"<html>", "empty": b"", "bit": bytes(flipped)}[damage]
    )
    refuse(archive, "cannot be unpacked: it is damaged")


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("member", ["../out.txt", "folder/../../out.txt"])
def test_an_archive_that_would_write_elsewhere_is_refused(tmp_path, name, member):
    archive = MAKE[name](tmp_path / name, {"one.txt": b"a", member: b"b"})
    refuse(archive, "outside")
    assert not list(tmp_path.rglob("out.txt"))


def test_an_archive_that_would_write_through_a_link_is_refused(tmp_path):
    path = tmp_path / "corpus.tgz"
    with tarfile.open(path, "w:gz") as file:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path)
        file.addfile(link)
        file.addfile(tarfile.TarInfo("link/out.txt"))
    refuse(path, "absolute path|neither a file nor a folder")
    assert not list(tmp_path.rglob("out.txt"))


def test_a_zip_archive_of_absolute_names_is_refused(tmp_path):
    refuse(make_zip(tmp_path / "corpus.zip", {str(tmp_path / "out.txt"): b"a"}), "outside of it")


@pytest.mark.parametrize("name", MAKE)
def test_an_archive_that_would_fill_the_disk_is_refused(tmp_path, name):
    archive = MAKE[name](tmp_path / name, {"one.txt": b"a", "large.txt": bytes(20 * 2**20)})
    refuse(archive, r"bytes would become 20,971,521")


@pytest.mark.parametrize("damage", ["cut", "other", "bit", "empty"])
def test_a_damaged_gzip_file_is_named(tmp_path, damage):
    data = gzip.compress(bytes(range(128)) * 50 + b"\n")
    flipped = bytearray(data)
    flipped[len(data) - 6] ^= 1
    path = tmp_path / "train.de.gz"
    path.write_bytes({"cut": data[:60], "other": b"text", "bit": bytes(flipped), "empty": b"\x1f\x8b"}[damage])
    with pytest.raises(ValueError, match=f"^{path} is damaged, cut short, or not a gzip file: "):
        list(read_lines(path))


def test_a_file_that_is_not_utf_8_is_named(tmp_path):
    path = tmp_path / "train.de"
    path.write_bytes("Grüße\n".encode("latin-1"))
    with pytest.raises(ValueError, match=f"^{path} is not UTF-8 text"):
        list(read_lines(path))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_preparation_ends_in_one_line_for_a_damaged_file(tmp_path, capsys, workers):
    for name in FILES:
        (tmp_path / name).write_bytes(gzip.compress(b"ein Satz\n" * 50)[:-9])
    output = tmp_path / "out"
    arguments = ["multi30k", "--data", str(tmp_path), "--output", str(output), "--workers", str(workers)]
    assert main(arguments) == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith(f"scripts/prepare.sh multi30k: error: {tmp_path}/train.de.gz is damaged")
    )
    assert [path for path in output.rglob("*") if path.is_file()] == []


def archive(folder: Path) -> Path:
    source = folder / "wiki.train.raw"
    write_lines(source, ["text"])
    with tarfile.open(folder / "corpus.tgz", "w:gz") as file:
        file.add(source, "corpus/wiki.train.raw")
    return folder / "corpus.tgz"


def test_a_download_with_an_unknown_checksum_is_refused_until_it_is_accepted(tmp_path):
    packed = archive(tmp_path)
    found = hashlib.sha256(packed.read_bytes()).hexdigest()
    args = build_parser().parse_args(["brown", "--data", str(tmp_path / "none"), "--download"])
    args.output = tmp_path / "out"
    urls = {packed.as_uri(): None}
    with pytest.raises(ValueError, match=f"--sha256 {found}"):
        gather(args, ["wiki.train.raw"], urls)
    assert not (args.output / "download" / "corpus.tgz").exists()
    packed.unlink()  # it is not fetched a second time
    args.sha256 = [found]
    assert gather(args, ["wiki.train.raw"], urls)[0].read_text() == "text\n"


def test_without_a_network_the_file_can_be_put_in_place(tmp_path, monkeypatch):
    packed = archive(tmp_path)
    found = hashlib.sha256(packed.read_bytes()).hexdigest()
    args = build_parser().parse_args(["iwslt14", "--data", str(tmp_path / "data"), "--download"])
    args.output, args.sha256 = tmp_path / "out", [found]
    urls = {"https://example.org/corpus.tgz": None}

    def unreachable(url, timeout):
        raise urllib.error.URLError("no route to host")

    with monkeypatch.context() as patch:
        patch.setattr(urllib.request, "urlopen", unreachable)
        with pytest.raises(
            ValueError, match=r"^No network\. Put corpus\.tgz \(.* MB in all, https://example\.org/"
        ) as refused:
            gather(args, ["wiki.train.raw"], urls)
        assert f"into {tmp_path / 'data'}, and run the same command." in str(refused.value)
    (tmp_path / "data").mkdir()
    packed.rename(tmp_path / "data" / "corpus.tgz")
    args.download = False
    assert gather(args, ["wiki.train.raw"], urls)[0].read_text() == "text\n"


def test_a_download_that_is_cut_short_is_refused_and_not_kept(tmp_path, monkeypatch):
    class Response(io.BytesIO):
        headers = {"Content-Length": "1000"}  # noqa: RUF012

    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: Response(b"0123456789"))
    with pytest.raises(ValueError, match="10 of 1,000 bytes arrived"):
        download("https://example.org/a", tmp_path / "out" / "a", ["0" * 64])
    assert list((tmp_path / "out").iterdir()) == []


def test_a_process_that_waited_for_a_folder_that_is_gone_keeps_others_out_of_the_new_one(tmp_path, monkeypatch):
    """A leaves nothing, so that its folder goes while B waits for it; C comes while B is in."""
    rmdir = Path.rmdir

    def late_rmdir(path):
        time.sleep(0.1)  # B would come in between, were the lock gone before the folder
        rmdir(path)

    monkeypatch.setattr(Path, "rmdir", late_rmdir)
    folder, inside, most, events = tmp_path / "corpus", [], [], {name: threading.Event() for name in "ABC"}

    def enter(name):
        with locked(folder):
            inside.append(name)
            most.append(len(inside))
            events[name].wait(10)
            inside.remove(name)

    threads = [threading.Thread(target=enter, args=(name,)) for name in "ABC"]

    def until(condition):
        end = time.monotonic() + 10
        while not condition() and time.monotonic() < end:
            time.sleep(0.01)

    threads[0].start()
    until(lambda: inside == ["A"])
    threads[1].start()
    time.sleep(0.2)  # it waits
    events["A"].set()
    until(lambda: inside == ["B"])
    threads[0].join(10)
    threads[2].start()
    time.sleep(0.2)
    events["B"].set()
    events["C"].set()
    for thread in threads:
        thread.join(10)
    assert most == [1, 1, 1] and not folder.exists()


def test_a_download_that_differs_from_its_known_checksum_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not a checksum known here"):
        download(archive(tmp_path).as_uri(), tmp_path / "out" / "corpus.tgz", ["0" * 64])
    assert not (tmp_path / "out" / "corpus.tgz").exists()
