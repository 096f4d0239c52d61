"""The commands of docs/language-models.md on adaptive input and generated text, run on a tiny corpus."""

import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("fairseq")

PAGE = (Path(__file__).resolve().parent.parent / "docs/language-models.md").read_text(encoding="utf-8")
SMALLER = {
    "train": [
        *("--adaptive-input-cutoff", "4,8", "--adaptive-softmax-cutoff", "4,8", "--max-update", "2", "--cpu"),
        *("--tokens-per-sample", "12", "--max-tokens", "256", "--num-workers", "0", "--decoder-layers", "1"),
        *("--decoder-embed-dim", "16", "--decoder-input-dim", "16", "--decoder-output-dim", "16"),
        *("--decoder-ffn-embed-dim", "16", "--decoder-attention-heads", "2", "--no-epoch-checkpoints"),
    ],
    "interactive": ["--cpu", "--max-len-b", "5", "--sampling-topk", "3"],
}


def commands(heading: str) -> list[list[str]]:
    """Return the words of each command of fairseq below a heading."""
    block = re.search(r"```bash\n(.*?)```", PAGE.partition(f"## {heading}")[2], re.DOTALL)[1]
    lines = [shlex.split(line) for line in block.replace("\\\n", " ").splitlines()]
    return [words for words in lines if words[0].startswith("fairseq-")]


def test_a_model_with_adaptive_input_is_trained_and_continues_a_text(
    language_model_data, tmp_path, monkeypatch, fairseq_command
):
    monkeypatch.chdir(tmp_path)
    Path("begin.txt").write_text("ab cd\n", encoding="utf-8")
    printed = {}
    for name, data, *words in commands("Adaptive input, and generating text"):
        assert data == "$DATA"
        place = words.index("--user-dir")
        command = name.removeprefix("fairseq-")
        words = [*words[:place], *words[place + 2 :], *SMALLER[command]]
        printed[command] = fairseq_command(command, language_model_data, *words)
    assert re.search(r"^H-0\t\S+\tab cd ", printed["interactive"], re.MULTILINE)
