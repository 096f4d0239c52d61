"""Help comes at once: it loads neither torch nor fairseq, whose imports take seconds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EVERY_HELP = """
import contextlib, importlib, io, json, sys
from fairseq_lowrank.cli import command_modules

package, main = map(importlib.import_module, sys.argv[1:])
texts = {}
for arguments in (["--help"], *([name, "--help"] for name in command_modules(package))):
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        main.main(arguments)
    texts[arguments[0]] = printed.getvalue()
print(json.dumps([texts, sorted(name for name in sys.modules if "." not in name)]))
"""
PROGRAMS = {
    "fairseq-lowrank": (("fairseq_lowrank.cli", "fairseq_lowrank.cli"), {"inspect", "params", "compare"}),
    "python -m experiments": (("experiments.commands", "experiments.__main__"), {"controlled", "variants"}),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_help_loads_torch_or_fairseq(program):
    modules, some = PROGRAMS[program]
    words = [sys.executable, "-c", EVERY_HELP, *modules]
    root = Path(__file__).resolve().parents[2]
    printed = subprocess.run(words, capture_output=True, text=True, check=True, cwd=root).stdout
    texts, loaded = json.loads(printed)
    assert {"--help", *some} <= texts.keys()
    assert all(text.startswith(f"usage: {program}") for text in texts.values()), texts
    assert not [name for name, text in texts.items() if "default: None" in text or "<function" in text]
    assert not {"torch", "fairseq", "hydra", "omegaconf", "numpy", "matplotlib", "scipy"} & set(loaded)
