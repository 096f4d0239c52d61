import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
# Read, not imported: importing the package would import fairseq.
VERSION = re.search(
    r'^__version__ = "(.+)"$', (HERE / "fairseq_lowrank/__init__.py").read_text(encoding="utf-8"), re.M
)[1]
README = HERE / "README.md"

setup(
    name="fairseq-lowrank",
    version=VERSION,
    description="A fairseq plugin for attention that breaks, avoids or measures the low-rank bottleneck",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="MIT",
    license_files=["LICENSE"],
    packages=find_packages(include=["fairseq_lowrank", "fairseq_lowrank.*"]),
    python_requires=">=3.11.4",
    classifiers=[
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
    ],
    # torch alone: a fairseq that is already installed, under whichever name, must never be replaced.
    # 2.6: the oldest torch whose safe_globals takes (class, "former name"), for checkpoints of older fairseq and numpy.
    # Layers compile with 2.13 and not with 2.6 and 2.7; nothing between was tried.
    install_requires=["torch>=2.6"],
    extras_require={
        "fairseq": ["fairseq-fixed==0.12.3.1"],
        "translation": ["sacrebleu>=2.3", "sacremoses", "sentencepiece", "subword-nmt"],
        "analysis": ["matplotlib", "scipy", "tqdm"],
        "bert": ["safetensors", "tokenizers"],
        "tensorboard": ["tensorboard"],
        "transformers": ["safetensors", "transformers>=5.23"],
    },
    entry_points={"console_scripts": ["fairseq-lowrank = fairseq_lowrank.cli:main"]},
    zip_safe=False,
)
