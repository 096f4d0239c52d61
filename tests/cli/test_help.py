"""Help comes at once: it loads neither torch nor fairseq, whose imports take seconds."""

import json
import subprocess
import sys

EVERY_HELP = """
import contextlib, io, json, sys
from fairseq_lowrank import cli

texts = {}
for arguments in (["--help"], *([name, "--help"] for name in cli.commands())):
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        cli.main(arguments)
    texts[arguments[0]] = printed.getvalue()
print(json.dumps([texts, sorted(name for name in sys.modules if "." not in name)]))
"""


def test_no_help_loads_torch_or_fairseq():
    printed = subprocess.run([sys.executable, "-c", EVERY_HELP], capture_output=True, text=True, check=True).stdout
    texts, loaded = json.loads(printed)
    assert {"--help", "advise", "params", "report"} <= texts.keys()
    assert all(text.startswith("usage: fairseq-lowrank") for text in texts.values()), texts
    assert not {"torch", "fairseq", "hydra", "omegaconf", "numpy", "matplotlib", "scipy"} & set(loaded)
