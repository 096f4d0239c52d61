"""The decoding script of the evidence: beam search with the decoder's mixing replaced by the identity."""

import json
import shutil

import pytest
import torch

pytest.importorskip("fairseq")

from experiments.evidence import decoding, patterns
from fairseq_lowrank.records.results import read_results
from fairseq_lowrank.tools.fairseq import architecture
from fairseq_lowrank.tools.fairseq.checkpoints import load_model, load_state

SMALL = [
    *("--encoder-layers", "2", "--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "16", "--lr", "0.1"),
    *("--decoder-layers", "2", "--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "16", "--max-update", "2"),
    *("--encoder-attention-heads", "4", "--decoder-attention-heads", "4", "--max-tokens", "512", "--cpu"),
    *("--criterion", "cross_entropy", "--optimizer", "adam", "--no-epoch-checkpoints", "--no-progress-bar"),
]


@pytest.fixture
def run(request, tmp_path, translation_data, fairseq_command):
    """A recipe's run of a tiny model whose mixing is far from I."""
    data = tmp_path / "data"
    shutil.copytree(translation_data, data / "bin")
    (data / "tok").mkdir()
    shutil.copy(translation_data.parent / "test.en", data / "tok")
    folder = tmp_path / "h4-mixed-seed3-0a1b"
    flags = ["--arch", "lowrank_transformer_iwslt_de_en", "--attention", request.param, *SMALL]
    flags += ["--source-lang", "de", "--target-lang", "en"]
    fairseq_command(
        "train", data / "bin", "--user-dir", "fairseq_lowrank", "--save-dir", folder / "checkpoints", *flags
    )
    (folder / "run.json").write_text(json.dumps({"corpus": "multi30k"}))
    file = folder / "checkpoints" / "checkpoint_best.pt"
    state = load_state(file)
    torch.manual_seed(1)
    for name, tensor in state["model"].items():
        if ".mixing." in name:
            tensor.normal_()
    torch.save(state, file)
    return folder


def outputs(model, task):
    task.load_dataset("test")
    dataset = task.dataset("test")
    sample = dataset.collater([dataset[index] for index in range(4)])
    with torch.no_grad():
        return model(**sample["net_input"])[0]


@pytest.mark.parametrize("run", ["mixhead-a", "mixhead-b"], indirect=True)
def test_unmix_gives_the_model_without_decoder_mixing(run, tmp_path):
    file, unmix = run / "checkpoints" / "checkpoint_best.pt", decoding.unmix
    model, task = load_model(file)
    expected, state = outputs(model, task), load_state(file)
    decoder = [layer for layer in architecture.attention_layers(model) if layer.name.startswith("decoder.")]
    for attentions in (("self_attn",), ("self_attn", "encoder_attn")):
        before = expected
        for layer in decoder:
            if layer.name.endswith(attentions):
                layer.module.mixing = None
        expected = outputs(model, task)
        assert (expected - before).abs().max() > 1e-2
        torch.save(unmix(state, attentions), tmp_path / "unmixed.pt")
        torch.testing.assert_close(outputs(*load_model(tmp_path / "unmixed.pt")), expected)


@pytest.mark.parametrize("run", ["mixhead-a"], indirect=True)
def test_decoding_script_appends_a_line_a_search_once(run, tmp_path, monkeypatch, fairseq_command, plugins_leave):
    results, searches = tmp_path / "lines.jsonl", []

    def execute(words, output):
        searches.append(words[0])
        output.write_text(fairseq_command("generate", *words[1:]))

    monkeypatch.setattr(decoding, "Commands", lambda: execute)
    for _ in range(2):
        words = ["--results", results, "--table", "t", "--generate", "--beam 2 --cpu", run]
        monkeypatch.setattr("sys.argv", ["decoding", *map(str, words)])
        decoding.main()
    assert searches == ["fairseq-generate"] * 3
    lines = read_results(results, measurements=True)
    assert [line["row"] for line in lines] == [
        f"h4-mixed{end}" for end in ("", "-decoder-self-unmixed", "-decoder-unmixed")
    ]
    assert {(line["table"], line["seed"], line["metric"]) for line in lines} == {("t-decoding", 3, "sacrebleu")}


@pytest.mark.parametrize("run", ["mixhead-a"], indirect=True)
def test_the_picture_of_mixing_shows_sums_of_patterns_by_m(run):
    drawn = patterns.mixing_figure(run / "checkpoints" / "checkpoint_best.pt")
    shown = [torch.tensor(axes.images[0].get_array()) for axes in drawn.axes if axes.images]
    plain, matrix, mixed = torch.stack(shown[:4]), shown[4], torch.stack(shown[5:])
    torch.testing.assert_close(plain.sum(-1), torch.ones(plain.shape[:-1]))
    torch.testing.assert_close(mixed, torch.einsum("ij,jts->its", matrix, plain))
