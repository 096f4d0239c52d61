"""Checkpoints on real data: the commands spectrum and inspect, and what they read."""

import argparse
import collections
import csv
import json
import math
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from fairseq.data import data_utils
from families import FAMILIES
from omegaconf import OmegaConf

from experiments.commands.bert import predict
from fairseq_lowrank import cli
from fairseq_lowrank.attention import build_attention
from fairseq_lowrank.cli import convert, export, inspect, measure, translate
from fairseq_lowrank.cli._composition import as_text
from fairseq_lowrank.files import first_folder
from fairseq_lowrank.messages import FlagError, UserError
from fairseq_lowrank.ops import HeadMixing
from fairseq_lowrank.repairs.dictionaries import OtherDictionary
from fairseq_lowrank.repairs.loading import load_checkpoint
from fairseq_lowrank.tools import inspection
from fairseq_lowrank.tools.fairseq import checkpoints
from fairseq_lowrank.tools.fairseq.architecture import attention_layers, build_model, parse_architecture
from fairseq_lowrank.tools.fairseq.checkpoints import longest_block


def samples(task, count=3, **changes):
    chosen = {"count": count, "seed": 1, "min_length": 2, "max_length": None} | changes
    return checkpoints.sequences(task, "valid", **chosen)


@pytest.mark.parametrize("name", ["stock", "mhe", "mixhead-b"])
def test_attention_weights_leaves_the_model_as_it_was(trained, name):
    model, task = checkpoints.load_model(trained(name))
    (sample,) = samples(task, 1)
    seen = []
    with torch.no_grad():
        before = model(**sample["net_input"])[0]
        with checkpoints.attention_weights(model, lambda layer, weights: seen.append((layer.site, weights))):
            during = model(**sample["net_input"])[0]
        after = model(**sample["net_input"])[0]
    torch.testing.assert_close(during, before)
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert len(seen) == len(attention_layers(model))
    for site, weights in seen:
        assert weights.shape[:2] == (4, 1)
        if name != "mixhead-b":
            torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
        if site == "decoder":
            assert (weights.triu(1) == 0).all()


def test_attention_weights_are_mixed(trained, monkeypatch):
    model, task = checkpoints.load_model(trained("mixhead-b"))
    (sample,) = samples(task, 1)
    mixed = []
    original = HeadMixing.mix_heads
    monkeypatch.setattr(HeadMixing, "mix_heads", lambda *args: mixed.append(original(*args)) or mixed[-1])
    seen = []
    with torch.no_grad(), checkpoints.attention_weights(model, lambda layer, weights: seen.append(weights)):
        model(**sample["net_input"])
    assert len(seen) == len(mixed) == 2
    for weights, expected in zip(seen, mixed, strict=True):
        torch.testing.assert_close(weights, expected.transpose(0, 1))
    # two updates at a high learning rate have moved M from I
    assert (seen[0].sum(-1) - 1).abs().max() > 1e-3


def test_calls_of_other_threads_are_not_seen(trained):
    model, task = checkpoints.load_model(trained("mixhead-b"))
    (sample,) = samples(task, 1)
    seen = []
    watched = checkpoints.attention_weights(model, lambda *_: seen.append(True))
    with watched, checkpoints.mean_mixing(model) as means, ThreadPoolExecutor(1) as pool:
        pool.submit(model, **sample["net_input"]).result()
    assert not seen and not means


def test_mean_mixing_averages_over_all_queries(trained, monkeypatch):
    model, task = checkpoints.load_model(trained("mixhead-b"))
    chosen = samples(task, 3)
    matrices = []
    original = HeadMixing.mix_heads

    def spy(mixing, weights):
        matrices.append(mixing.mixing_matrix().flatten(0, 1).double())
        return original(mixing, weights)

    monkeypatch.setattr(HeadMixing, "mix_heads", spy)
    ignored = checkpoints.attention_weights(model, lambda layer, weights: None)  # takes the path that calls it
    with torch.no_grad(), checkpoints.mean_mixing(model) as means, ignored:
        for sample in chosen:
            model(**sample["net_input"])
    for number, (name, mean) in enumerate(means.items()):
        assert name == f"decoder.layers.{number}.self_attn"
        expected = torch.cat(matrices[number::2]).mean(0)
        torch.testing.assert_close(mean, expected, atol=1e-6, rtol=0)


def test_only_errors_of_fairseqs_data_are_named_so(tmp_path):
    (tmp_path / "train.bin").write_bytes(b"")
    (tmp_path / "train.idx").write_bytes(b"MMIDIDX\0\0")
    with (
        pytest.raises(FlagError, match="--data data: the model's task cannot read it"),
        checkpoints.reading_data("data"),
    ):
        data_utils.load_indexed_dataset(str(tmp_path / "train"), None)
    for error in (AssertionError("a fault of this code"), ValueError("another"), Exception("a third")):
        with pytest.raises(type(error), match=str(error)), checkpoints.reading_data("data"):
            raise error


def test_sequences_follow_the_seed_and_the_lengths(trained):
    _, task = checkpoints.load_model(trained("stock"))
    first, again, other = (samples(task, 6, seed=seed) for seed in (1, 1, 2))
    ids = [[sample["id"].item() for sample in chosen] for chosen in (first, again, other)]
    assert ids[0] == ids[1] != ids[2]
    assert len(set(ids[0])) == 6
    for sample in samples(task, 50, min_length=6, max_length=8):
        assert 6 <= sample["net_input"]["src_tokens"].size(1) <= 8
    with pytest.raises(UserError, match="length of 80 to any"):
        samples(task, min_length=80)


def test_sequences_have_no_padding(trained, tmp_path):
    state = checkpoints.load_state(trained("stock"))
    for section in ("task", "dataset"):
        state["cfg"][section]["required_seq_len_multiple"] = 8
    torch.save(state, tmp_path / "padded.pt")
    _, task = checkpoints.load_model(tmp_path / "padded.pt")
    for sample in samples(task, 20):
        assert not sample["net_input"]["src_tokens"].eq(task.source_dictionary.pad()).any()


def test_the_spectrum_command_compares_checkpoints_and_draws(trained, tmp_path, capsys):
    paths = [str(trained("stock")), str(trained("mhe"))]
    flags = ["--labels", "stock", "mhe", "--sequences", "3", "--output", str(tmp_path)]
    assert cli.main(["inspect", "--spectrum", *paths, *flags]) == 0
    printed = capsys.readouterr().out
    assert "stock" in printed and "cross" in printed
    data = json.loads((tmp_path / "spectrum.json").read_text())
    _, task = checkpoints.load_model(trained("stock"))
    read = samples(task, 3)
    sources, targets = (
        sum(one.ne(task.source_dictionary.pad()).sum().item() for one in rows) / 3
        for rows in zip(*((sample["net_input"]["src_tokens"], sample["target"]) for sample in read), strict=True)
    )
    assert f"3 sequences of 'valid', {sources:.0f} source and {targets:.0f} target tokens on average" in printed
    assert (data[0]["mean_source_length"], data[0]["mean_length"]) == (sources, targets)
    assert [result["label"] for result in data] == ["stock", "mhe"]
    assert list(data[0]["sites"]) == ["cross", "decoder", "encoder"]
    for result in data:
        for site in result["sites"].values():
            assert [len(layer["heads"]) for layer in site["layers"]] == [4, 4]
            curve = site["mean"]["curve"]
            assert curve[0] == 0 and curve[-1] == pytest.approx(1) and curve == sorted(curve)
            assert 0.5 <= site["mean"]["area"] < 1 and site["mean"]["mass_in_head_dim"] <= 1 + 1e-6
    with open(tmp_path / "spectrum.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == 2 * 3 * 2 * 5
    for site in ("encoder", "decoder", "cross"):
        assert (tmp_path / f"spectrum-{site}.pdf").exists()
        assert (tmp_path / f"spectrum-{site}-layers.png").exists()


def test_the_spectrum_of_a_language_model_at_another_length(trained, capsys):
    assert (
        cli.main(["inspect", "--spectrum", str(trained("mixhead-b")), "--sequences", "2", "--length", "7", "--json"])
        == 0
    )
    (result,) = json.loads(capsys.readouterr().out)
    assert list(result["sites"]) == ["decoder"]
    assert result["mean_length"] == 7
    assert cli.main(["inspect", "--spectrum", str(trained("mixhead-b")), "--length", "13"]) == 2
    assert "checkpoint_best.pt reads at most 12 tokens. Give a smaller number." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "longest"),
    [
        ([], math.inf),
        (["--attention", "alibi", "--no-token-positional-embeddings"], math.inf),
        (["--decoder-learned-pos"], 12),
        (["--attention-score", "synthesizer-dense"], 12),
    ],
)
def test_only_parameters_of_positions_limit_the_length_of_blocks(flags, longest):
    small = [
        "--decoder-layers",
        "1",
        "--decoder-embed-dim",
        "16",
        "--decoder-attention-heads",
        "4",
        "--tokens-per-sample",
        "12",
    ]
    model = build_model(parse_architecture("lowrank_transformer_lm", [*small, *flags]), 20)
    assert longest_block(model) == longest


def test_the_distances_of_known_matrices():
    rotation = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
    assert inspection.mixing_measures(torch.eye(3)) == {"from_identity": 0, "from_orthogonal": 0, "off_diagonal": 0}
    assert inspection.mixing_measures(rotation) == {"from_identity": 2, "from_orthogonal": 0, "off_diagonal": 1}
    average = inspection.mixing_measures(torch.full((2, 2), 0.5))
    assert average["from_orthogonal"] == pytest.approx(1)
    assert average["off_diagonal"] == pytest.approx(0.5)


def test_inspect_shows_b_or_with_data_the_mean(trained, language_model_data, tmp_path, capsys):
    path = str(trained("mixhead-b"))
    assert cli.main(["inspect", path, "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "‖MᵀM − I‖" in printed
    (first, second) = json.loads((tmp_path / "inspect.json").read_text())["layers"]
    assert (first["kind"], first["site"], second["layer"]) == ("B", "decoder", 1)
    saved = checkpoints.load_state(Path(path))["model"]["decoder.layers.0.self_attn.mixing.weight"]
    torch.testing.assert_close(torch.tensor(first["matrix"]), saved)
    assert first["from_identity"] == pytest.approx((saved - torch.eye(4)).norm().item())
    sums = saved.sum(0)
    assert first["column_sums"] == pytest.approx(sums.tolist())
    assert f"{sums.mean():.3f} ({sums.min():.3f} to {sums.max():.3f})" in printed
    assert (tmp_path / "mixing.png").exists()
    assert cli.main(["inspect", path, "--data", str(language_model_data), "--sequences", "2", "--json"]) == 0
    mean = json.loads(capsys.readouterr().out)["layers"][0]
    assert mean["kind"] == "mean M_t" and mean["matrix"] != first["matrix"]


def test_inspect_shows_the_axes_of_a_stock_checkpoint(trained, capsys):
    assert cli.main(["inspect", str(trained("stock")), "--json"]) == 0
    layers = json.loads(capsys.readouterr().out)["layers"]
    assert {layer["site"] for layer in layers} == {"encoder", "decoder", "cross"}
    assert all((layer["axes"]["num_heads"], layer["axes"]["mixing"]) == (4, "none") for layer in layers)
    assert cli.main(["inspect", str(trained("stock"))]) == 0
    assert "composition" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["task", "architecture"])
def test_a_checkpoint_of_a_plugin_that_is_not_imported_names_the_flag(kind, old_checkpoint, tmp_path):
    state = checkpoints.load_state(old_checkpoint("mha-translation"))
    if kind == "task":
        state["cfg"]["task"]["_name"] = "translation-of-a-plugin"
    else:
        state["cfg"]["model"].arch = "transformer_of_a_plugin"
    with pytest.raises(
        UserError, match=rf"registered its {kind} trans.*of.a.plugin\. If it is of a plugin, add --user-dir"
    ):
        checkpoints.refuse_unregistered(state, tmp_path)


def test_inspect_refuses_flags_about_sequences_without_data(trained, language_model_data, capsys):
    path = str(trained("mixhead-b"))
    assert cli.main(["inspect", path, "--subset", "test", "--sequences", "5"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "--subset test --sequences 5" in said


def test_inspect_shows_the_norms_of_head_embeddings(trained, tmp_path, capsys):
    path = str(trained("mhe"))
    assert cli.main(["inspect", path, "--output", str(tmp_path)]) == 0
    assert "head embeddings" in capsys.readouterr().out
    layers = json.loads((tmp_path / "inspect.json").read_text())["layers"]
    assert sorted({layer["site"] for layer in layers}) == ["cross", "decoder", "encoder"]
    saved = checkpoints.load_state(Path(path))["model"]["encoder.layers.1.self_attn.head_embeddings.value"]
    layer = next(layer for layer in layers if (layer["site"], layer["layer"]) == ("encoder", 1))
    assert layer["value"] == pytest.approx(saved.norm(dim=1).tolist(), rel=1e-5)
    assert (tmp_path / "head-embeddings.png").exists()


def test_inspect_shows_what_mixes_scores(tmp_path, capsys, old_checkpoint):
    path = old_checkpoint("talking-heads-translation")
    assert cli.main(["inspect", str(path), "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "‖LᵀL − I‖" in printed and "‖MᵀM − I‖" in printed
    saved = checkpoints.load_state(path)["model"]
    for layer in json.loads((tmp_path / "inspect.json").read_text())["layers"]:
        for name, shown in (("score_mixing", layer["score_mixing"]), ("mixing", layer)):
            weight = saved[f"{layer['name']}.{name}.weight"]
            torch.testing.assert_close(torch.tensor(shown["matrix"]), weight)
            assert shown["from_identity"] == pytest.approx((weight - torch.eye(4)).norm().item())
    with open(tmp_path / "inspect.csv", newline="") as file:
        assert {"mixing", "score_mixing", "score_mixing_from_identity"} < set(next(csv.DictReader(file)))
    assert (tmp_path / "mixing.png").exists() and (tmp_path / "score-mixing.png").exists()


def test_inspect_shows_the_axes_that_a_state_names(capsys, old_checkpoint):
    assert cli.main(["inspect", str(old_checkpoint("gqa-translation")), "--json"]) == 0
    for layer in json.loads(capsys.readouterr().out)["layers"]:
        assert layer["axes"]["key_value_heads"] == 2 and layer["axes"]["projection"] == "independent"
    # those of layers and axes to come, too
    name = "encoder.layers.3.self_attn"
    state = collections.OrderedDict({f"{name}.score.weight": torch.ones(4), f"{name}.k_proj.weight": torch.ones(4)})
    state._metadata = {name: {"attention": {"score": "relative"}}}
    (layer,) = inspection.inspect(state)
    assert (layer["axes"], layer["norms"]) == ({"score": "relative"}, {"score.weight": 2})
    (printed, norms) = as_text([layer]).split("\n\n")
    assert "score  " in printed and "relative" in printed and norms.split()[-2:] == ["score.weight", "2.000"]


def test_bad_checkpoints_get_one_line(trained, tmp_path, capsys):
    no_checkpoint, without_flags = tmp_path / "weights.pt", tmp_path / "without-flags.pt"
    torch.save({"weight": torch.zeros(2)}, no_checkpoint)
    state = checkpoints.load_state(trained("stock"))
    torch.save(state | {"cfg": None, "args": None}, without_flags)
    shard = state | {"fsdp_metadata": {}, "cfg": OmegaConf.to_container(state["cfg"], enum_to_str=True)}
    torch.save(shard, tmp_path / "whole.pt")
    assert checkpoints.load_state(tmp_path / "whole.pt")["model"].keys() == state["model"].keys()
    shard["cfg"]["distributed_training"]["use_sharded_state"] = True
    torch.save(shard, tmp_path / "shard0.pt")
    for arguments, message in (
        (["inspect", str(tmp_path / "none.pt")], "not a checkpoint file"),
        (["inspect", str(no_checkpoint)], f"{no_checkpoint} cannot be read as a checkpoint"),
        (["inspect", str(without_flags)], f"{without_flags} cannot be read as a checkpoint"),
        (["params", str(tmp_path / "shard0.pt")], "it is one shard of several. Give a checkpoint of the entire model"),
        (
            ["inspect", "--spectrum", str(trained("stock")), "--data", str(tmp_path / "none")],
            f"--data {tmp_path / 'none'}",
        ),
        (
            ["inspect", "--spectrum", str(trained("stock")), "--subset", "tests"],
            "--subset tests: the data has no such subset",
        ),
        (["inspect", "--spectrum", str(trained("stock")), "--labels", "a", "b"], "2 names for 1"),
        (["inspect", "--spectrum", str(trained("stock")), "--length", "0"], "--length 0: expected a number"),
        (["inspect", str(trained("stock")), "--sequences", "0"], "--sequences 0: expected a number"),
        (["inspect", "--spectrum", str(trained("stock")), "--sequences", "0"], "--sequences 0: expected a number"),
    ):
        assert cli.main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"fairseq-lowrank {arguments[0]}: error: ") and message in error
        assert error.count("\n") == 1


def test_load_model_names_the_flag_for_other_vocabularies(trained, translation_data, tmp_path):
    data = shutil.copytree(translation_data, tmp_path / "data")
    for dictionary in data.glob("dict.*.txt"):
        dictionary.write_text(dictionary.read_text() + "".join(f"more{number} 1\n" for number in range(16)))
    path = trained("stock")
    with pytest.raises(OtherDictionary, match="--srcdict") as error:
        checkpoints.load_model(path, data=data)
    assert error.value.path == str(path)
    files = [folder / "dict.de.txt" for folder in (translation_data, data)]
    assert error.value.difference == "16 words in {}, 32 in {}".format(*files)


def test_sequences_passes_unexpected_errors_on(trained, monkeypatch):
    _, task = checkpoints.load_model(trained("stock"))

    def fail(subset):
        raise ArithmeticError("a fault of fairseq")

    monkeypatch.setattr(task, "load_dataset", fail)
    with pytest.raises(ArithmeticError, match="a fault of fairseq"):
        samples(task)


def test_inspect_takes_the_head_size_from_queries():
    layer = build_attention("mixhead-a", 8, 2, self_attention=True, head_dim=4, value_dim=16)
    state = torch.nn.ModuleDict({"encoder": torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])})}).state_dict()
    renamed = collections.OrderedDict(
        (name.replace("layers.0.", "layers.0.self_attn."), value) for name, value in state.items()
    )
    renamed._metadata = {"encoder.layers.0.self_attn": state._metadata["encoder.layers.0"]}
    (found,) = inspection.inspect(renamed)
    assert found["head_dim"] == 4 and found["axes"]["value_dim"] == 16


@pytest.mark.parametrize(
    "arch", ["multilingual_transformer", "transformer_iwslt_de_en", "roberta_base", "transformer_lm"]
)
def test_inspect_names_sites_as_the_model_has_them(arch):
    [family] = [family for family in FAMILIES if family.arch == arch]
    model = family.build("--attention", "mixhead-a")
    expected = {layer.name: (layer.site, layer.layer) for layer in attention_layers(model)}
    found = {entry["name"]: (entry["site"], entry["layer"]) for entry in inspection.inspect(model.state_dict())}
    assert found == expected


@pytest.mark.parametrize("own", [True, False], ids=["of-the-training", "given"])
def test_first_of_several_data_folders_is_used_and_named(trained, translation_data, tmp_path, capsys, own):
    several = f"{translation_data}:{tmp_path / 'second'}"
    path, data = trained("stock"), Path(several)
    if own:
        state = load_checkpoint(path)
        state["cfg"]["task"]["data"] = several
        path, data = tmp_path / "checkpoint.pt", None
        torch.save(state, path)
    first_folder.cache_clear()
    _, task = checkpoints.load_model(path, data=data)
    assert len(samples(task)) == 3
    assert capsys.readouterr().err == f"{several} is several data folders: using the first, {translation_data}\n"


@pytest.mark.parametrize("command", [convert, export, inspect, measure, predict, translate])
def test_commands_take_the_first_of_several_data_folders(command):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    (data,) = (action for action in parser._actions if "--data" in action.option_strings)
    assert data.type("first:second") == Path("first")


def test_a_checkpoint_that_cannot_be_evaluated_is_refused_by_its_fault(trained, tmp_path, capsys):
    state, path = load_checkpoint(trained("mhe")), tmp_path / "changed.pt"
    name = next(name for name in state["model"] if name.endswith("fc1.weight"))

    def refused(*command, **changes):
        torch.save({key: value for key, value in (state | changes).items() if value is not None}, path)
        output = [] if command == ("measure",) else ["--output", str(tmp_path / "new.pt")]
        assert cli.main([*command, str(path), *output]) == 2
        return capsys.readouterr().err

    diverged = state["model"] | {name: torch.full_like(state["model"][name], torch.nan)}
    assert f"{name} has an infinity or NaN. Give one from before" in refused("measure", model=diverged)
    less = {key: value for key, value in state["model"].items() if key != name}
    assert f"only the model has {name}. Copy or download it again." in refused("measure", model=less)
    for command in (["average"], ["convert", "--attention", "mha"]):
        assert "it has no 'extra_state' entry. Give a file" in refused(*command, extra_state=None)
