"""scripts/setup.sh says in one line what is missing, before it downloads anything."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fairseq_lowrank.tools.locks import locked

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture
def folder(tmp_path):
    """Where the copy is; its path has a space."""
    return tmp_path / "a folder"


@pytest.fixture
def setup(folder):
    """``setup(*args, **environment)``: the script's exit status and what it says, in a copy without .venv."""
    shutil.copytree(REPOSITORY / "requirements", folder / "requirements")
    for name in ("scripts/setup.sh", "setup.py", "pyproject.toml"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, folder / name)

    def run(*args, **environment):
        offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
        result = subprocess.run(
            [folder / "scripts" / "setup.sh", *args],
            env=os.environ | offline | environment,
            capture_output=True,
            text=True,
        )
        return result.returncode, (result.stdout + result.stderr).splitlines()

    return run


@pytest.fixture(scope="module")
def quick_python(tmp_path_factory):
    """A Python that makes an environment by copying one, because pip needs seconds to install itself."""
    folder = tmp_path_factory.mktemp("an original")
    subprocess.run([sys.executable, "-m", "venv", folder / ".venv"], check=True)
    path = folder / "python"
    path.write_text(
        f"""#!/bin/sh
[ "$1 $2" = "-m venv" ] || exec {sys.executable} "$@"
cp -R -P "{folder}/.venv" "$3" && sed "s|{folder}|$(pwd -P)|g" "{folder}/.venv/bin/pip" >"$3/bin/pip"
"""
    )
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def python_of(folder):
    """``python_of("3.14")``: a Python that says it is of that version and can make no virtual environment."""

    def make(version: str) -> str:
        path = folder / f"my python{version}"
        numbers = (*version.split("."), "9")[:3]
        says = f"import sys; sys.version_info = ({', '.join(numbers)})"
        path.write_text(f'#!/bin/sh\n[ "$1" != -m ] || exit 1\nexec {sys.executable} -c "{says}\n$2"\n')
        path.chmod(0o755)
        return str(path)

    return make


def test_a_missing_python_is_named_with_ways_to_get_it(setup, folder):
    status, lines = setup(PYTHON="/nowhere/my python3")
    assert status == 1
    message = "setup: error: Python 3.11.4 or newer is needed; none of these is: /nowhere/my python3. Install it ("
    assert lines[-1].startswith(message)
    assert not (folder / ".venv").exists()


@pytest.mark.parametrize("version", ["3.9", "3.10", "3.11.3"])
def test_a_python_that_is_too_old_is_refused(setup, python_of, version):
    assert setup(PYTHON=python_of(version))[1][-1].startswith("setup: error: Python 3.11.4 or newer is needed")


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_a_python_from_3_11_to_3_13_is_used_and_the_package_that_it_lacks_is_of_its_version(setup, python_of, version):
    python = python_of(version)  # its path has a space
    status, lines = setup(PYTHON=python)
    assert status == 1 and not any("newer than those tested" in line for line in lines)
    assert lines[-1] == (
        f"setup: error: {python} cannot make a virtual environment; on Debian and Ubuntu: apt install python{version}-venv"
    )


def test_a_newer_python_is_tried_and_said_to_be_untested(setup, python_of):
    lines = setup(PYTHON=python_of("3.14"))[1]
    assert "setup: Python 3.14 is newer than those tested, 3.11 to 3.13: trying it" in lines
    assert lines[-1].endswith("apt install python3.14-venv")


def test_without_python_given_one_up_to_3_13_goes_before_a_newer_one(setup, folder, python_of):
    # python3.13 too, so that one of this machine is not found.
    for name, version in {"python3": "3.14", "python": "3.14", "python3.13": "3.14", "python3.12": "3.12"}.items():
        (folder / name).symlink_to(python_of(version))
    lines = setup(PYTHON="", PATH=f"{folder}:{os.environ['PATH']}")[1]
    assert lines[-1].startswith("setup: error: python3.12 cannot make")


@pytest.mark.skipif(shutil.which("flock") is None, reason="has no flock")
def test_a_second_setup_waits_for_the_first(setup, folder, python_of):
    with locked(folder, os.O_RDONLY):
        command = [folder / "scripts" / "setup.sh"]
        environment = os.environ | {"PYTHON": python_of("3.9")}
        second = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert second.stdout.readline() == "setup: waiting for another setup of this folder\n"
    assert "Python 3.11.4 or newer is needed" in second.communicate(timeout=30)[0]


def test_a_broken_environment_is_made_again_once_and_a_missing_compiler_is_named(setup, folder, quick_python):
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to("/nowhere/python3.11")
    error = (
        "setup: error: fairseq has to be compiled and there is no C++ compiler; on Debian and Ubuntu: apt install g++"
    )

    def fails_with_the_error():
        status, lines = setup(PYTHON=quick_python, CXX="/nowhere/c++")
        return (status, lines[-1]) == (1, error)

    assert fails_with_the_error()
    subprocess.run([python, "-c", "import pip"], check=True)
    kept = folder / ".venv" / "kept"
    kept.touch()
    assert fails_with_the_error() and kept.exists()
    moved = folder.rename(folder.with_name("another folder"))
    folder.symlink_to(moved)
    assert fails_with_the_error() and not kept.exists()


def test_an_environment_of_another_python_than_the_one_asked_for_is_made_again(setup, folder, quick_python):
    setup(PYTHON=quick_python, CXX="/nowhere/c++")
    kept = folder / ".venv" / "kept"
    kept.touch()
    assert setup(PYTHON="/nowhere/python3")[1][-1].startswith("setup: error: Python 3.11.4 or newer is needed")
    assert kept.exists()
    other = folder / "python3"
    other.write_text(f'#!/bin/sh\n[ "$1" != -VV ] || exec echo Python 3.13\nexec "{quick_python}" "$@"\n')
    other.chmod(0o755)
    setup(PYTHON=str(other), CXX="/nowhere/c++")
    assert not kept.exists()


def write_torch(folder: Path, requirement: str) -> None:
    """A wheel of the pinned torch with no code and one requirement."""
    version = re.search(r"^torch==(.+)$", (REPOSITORY / "requirements/build.txt").read_text(), re.M)[1]
    about = f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\nRequires-Dist: {requirement}\n"
        wheel.writestr(f"{about}/METADATA", metadata)
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


@pytest.mark.skipif(sys.platform != "linux" or Path("/dev/nvidiactl").exists(), reason="for Linux without a GPU")
def test_gigabytes_of_cuda_without_a_gpu_are_announced_with_the_way_to_the_cpu_build(setup, tmp_path, quick_python):
    def announcements():
        lines = setup("--test", PYTHON=quick_python, CXX="true", PIP_FIND_LINKS=str(tmp_path))[1]
        return [line for line in lines if "comes with CUDA, several gigabytes, and there is no NVIDIA GPU here" in line]

    write_torch(tmp_path, "filelock")
    assert announcements() == []
    write_torch(tmp_path, "nvidia-cublas==13.1")
    (announcement,) = announcements()
    assert announcement.endswith("PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu scripts/setup.sh --test")


def test_an_unknown_argument_is_refused(setup):
    status, lines = setup("--tset")
    assert (status, lines) == (1, ["setup: error: unknown arguments '--tset'; usage: scripts/setup.sh [--test]"])
