"""Parts of the package's metadata that are computed: pyproject.toml has the others."""

import re
import shutil
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
# The public address of the repository, or "" while there is none.
ADDRESS = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["fairseq-lowrank"]["repository"]
PAGES = {
    "Documentation": "/blob/HEAD/docs/README.md",
    "Changelog": "/blob/HEAD/CHANGELOG.md",
    "Issues": "/issues",
}


def description() -> str:
    """Return the README; if the repository has an address, its links and pictures lead there."""
    readme = HERE / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    if not ADDRESS:
        return text
    text = re.sub(r"(!\[[^\]]*\])\((?!\w+:|#)([^)\s]+)\)", rf"\1({ADDRESS}/raw/HEAD/\2)", text)
    return re.sub(r"\]\((?!\w+:|#)([^)\s]+)\)", rf"]({ADDRESS}/blob/HEAD/\1)", text)


class BuildFromScratch(build_py):
    """Builds without the files that an earlier build left, which may exist no more."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


setup(
    long_description=description(),
    long_description_content_type="text/markdown",
    project_urls={"Repository": ADDRESS} | {name: ADDRESS + page for name, page in PAGES.items()} if ADDRESS else {},
    cmdclass={"build_py": BuildFromScratch},
)
