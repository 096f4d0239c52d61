"""Losses a sentence are what fairseq itself says of a model."""

import math
import re
import subprocess
import sys

import pytest
import torch

from experiments.recipes.losses import sentence_losses
from fairseq_lowrank.records.results import read_results
from fairseq_lowrank.tools.fairseq.checkpoints import load_model


def test_losses_are_those_of_fairseq_generate_on_the_references(trained, translation_data, fairseq_command):
    path = trained("mhe")
    said = fairseq_command("generate", translation_data, "--path", path, "--gen-subset", "test", "--score-reference")
    # natural logarithms over log 2, of each token
    expected = {
        int(number): [-float(score) for score in scores.split()]
        for number, scores in re.findall(r"^P-(\d+)\t(.*)$", said, re.M)
    }
    bits, tokens = sentence_losses(*load_model(path), "test")
    assert len(bits) == len(expected) == 12
    for number, scores in expected.items():
        assert tokens[number] == len(scores)
        assert bits[number] == pytest.approx(sum(scores), abs=1e-3)


def test_losses_of_a_language_model_are_those_of_fairseq_validate(trained, language_model_data, fairseq_command):
    path = trained("mixhead-b")
    flags = ("--task", "language_modeling", "--valid-subset", "valid", "--max-tokens", "256", "--cpu")
    said = fairseq_command("validate", language_model_data, "--path", path, *flags)
    bits, tokens = sentence_losses(*load_model(path), "valid", max_tokens=64)
    expected = float(re.findall(r"\| loss ([\d.]+)", said)[-1])
    assert (bits.sum() / tokens.sum()).item() == pytest.approx(expected, abs=2e-3)


def test_some_sentences_are_the_same_ones_each_time_whatever_their_batches(trained):
    model, task = load_model(trained("mhe"))
    bits, tokens = sentence_losses(model, task, "train", count=50)
    again, _ = sentence_losses(model, task, "train", count=50, max_tokens=30)
    torch.testing.assert_close(again, bits, rtol=1e-4, atol=1e-4)
    every, counts = sentence_losses(model, task, "train")
    assert len(bits) == 50 and len(every) == 240
    chosen = torch.randperm(240, generator=torch.Generator().manual_seed(1))[:50].sort().values
    assert torch.equal(tokens, counts[chosen])
    torch.testing.assert_close(bits, every[chosen], rtol=1e-4, atol=1e-4)


def test_beside_another_source_a_sentence_loses_what_it_loses_with_that_source_in_its_place(trained):
    model, task = load_model(trained("mhe"))
    bits, tokens = sentence_losses(model, task, "test", own_source=False)
    dataset = task.dataset("test")
    for index in (0, 5, 11):
        pair = dataset[index] | {"source": dataset[(index + 1) % 12]["source"]}
        sample = dataset.collater([pair])
        log_probabilities = model.get_normalized_probs(model(**sample["net_input"]), log_probs=True)[0]
        expected = -log_probabilities[range(len(pair["target"])), pair["target"]].sum().item() / math.log(2)
        assert bits[index].item() == pytest.approx(expected, rel=1e-4)
    own, same = sentence_losses(model, task, "test")
    assert torch.equal(tokens, same) and not torch.allclose(own, bits)


def test_no_other_source_is_taken_where_sentences_have_none(trained):
    with pytest.raises(ValueError, match="Use a translation task"):
        sentence_losses(*load_model(trained("mixhead-b")), "valid", own_source=False)


@pytest.mark.usefixtures("quick_starts")
def test_the_script_of_source_use_appends_a_line_a_run_once(trained, tmp_path, request):
    run = tmp_path / "h4-mhe-seed3-0a1b"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints/checkpoint_best.pt").symlink_to(trained("mhe"))
    results = tmp_path / "lines.jsonl"
    command = [sys.executable, "-m", "experiments.evidence.source_use", "--results", results, "--table", "t"]
    root = request.config.rootpath
    for _ in range(2):
        said = subprocess.run([*command, run], capture_output=True, text=True, cwd=root)
        assert said.returncode == 0, said.stderr
    (line,) = read_results(results, measurements=True)
    assert (line["table"], line["row"], line["seed"]) == ("t-source-use", "h4-mhe", 3)
    assert line["value"] != 0 and "sentence_values" not in line
    refused = subprocess.run([*command, tmp_path], capture_output=True, text=True, cwd=root)
    assert refused.returncode == 2 and "Give a folder ROW-seedN" in refused.stderr


def test_a_subset_that_is_not_there_is_named(trained):
    with pytest.raises(ValueError, match="the data has no such subset"):
        sentence_losses(*load_model(trained("mhe")), "fit")
