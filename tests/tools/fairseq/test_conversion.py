"""Ways of mixing turned into others: layers and whole checkpoints give the same outputs, or are refused."""

import argparse
import functools
import math

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq import checkpoint_utils, tasks
from old_checkpoints import NAMES, answer, task_of
from omegaconf import OmegaConf
from tiny_transformer import needs_self_attention

from fairseq_lowrank import cli
from fairseq_lowrank.attention import (
    METHODS,
    PRESETS,
    AttentionConfig,
    AttentionSpec,
    MultiheadAttention,
    build_attention,
)
from fairseq_lowrank.parts import MODULE_AXES, PARTS, parts_of
from fairseq_lowrank.tools.exported import compare
from fairseq_lowrank.tools.fairseq import checkpoints
from fairseq_lowrank.tools.fairseq import subject as fairseq_subject
from fairseq_lowrank.tools.fairseq.conversion import as_state_of, convert, output_error
from fairseq_lowrank.tools.fairseq.export import FairseqModel
from fairseq_lowrank.tools.measuring.measurement import measure
from fairseq_lowrank.tools.narrowing import maps_of_data
from fairseq_lowrank.tools.transformers.export import TransformersModel, write

known_answer = functools.cache(answer)
"""The answer of a file that stays as it is."""


def changed(path, target, dtype=None, **flags):
    """A checkpoint of random parameters whose model has other flags than the one at `path`."""
    state = checkpoints.load_state(path)
    state["cfg"] = OmegaConf.to_container(state["cfg"], enum_to_str=True)
    if isinstance(state["cfg"]["model"], argparse.Namespace):
        state["cfg"]["model"] = argparse.Namespace(**vars(state["cfg"]["model"]) | flags)
    else:
        state["cfg"]["model"] |= flags
    cfg = OmegaConf.create(state["cfg"], flags={"allow_objects": True})
    torch.manual_seed(1)
    model = tasks.setup_task(cfg.task).build_model(cfg.model).to(dtype)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and "version" not in name:
                tensor.add_(0.1 * torch.randn_like(tensor))
    state["model"] = model.state_dict()
    torch.save(state, target)
    return target


def same_outputs(first, second):
    (model, task), (other, _) = checkpoints.load_model(first), checkpoints.load_model(second)
    (sample,) = checkpoints.sequences(task, "valid", count=1, seed=1, min_length=4, max_length=None)
    with torch.no_grad():
        expected, found = (each.double()(**sample["net_input"])[0] for each in (model, other))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)  # parameters are float32
    return other


OURS = dict.fromkeys(("arch", "_name"), "lowrank_transformer_iwslt_de_en")


def test_a_stock_translation_model_gets_richer_mixing_step_by_step(trained, tmp_path, capsys):
    source = trained("stock")
    for name in ("gain", "mixhead-a", "mixhead-b"):
        target = tmp_path / f"{name}.pt"
        assert cli.main(["convert", str(source), "--attention", name, "--output", str(target)]) == 0
        printed = capsys.readouterr().out
        assert f"--attention {name}" in printed and "\nexact" in printed
        model = same_outputs(source, target)
        source = target
    assert model.encoder.layers[0].self_attn.spec.mixing == "positionwise"
    state = checkpoint_utils.load_checkpoint_to_cpu(str(target))
    assert "last_optimizer_state" not in state and state["cfg"].model.attention == "mixhead-b"


def test_the_optimizer_is_left_out_and_said_so(trained, tmp_path, capsys):
    assert "last_optimizer_state" in checkpoints.load_state(trained("mhe"))
    target = tmp_path / "mixed.pt"
    assert cli.main(["convert", str(trained("mhe")), "--head-mixing", "static", "--output", str(target)]) == 0
    assert "left out: the optimizer's state" in capsys.readouterr().out
    same_outputs(trained("mhe"), target)


def test_mixing_over_one_value_is_folded_back(trained, tmp_path, capsys):
    mixed = changed(trained("stock"), tmp_path / "mixed.pt", **OURS, attention="mqa", head_mixing="static")
    target = tmp_path / "mqa.pt"
    assert cli.main(["convert", str(mixed), "--attention", "mqa", "--output", str(target)]) == 0
    assert "exact up to rounding" in capsys.readouterr().out
    model = same_outputs(mixed, target)
    assert not [name for name in model.state_dict() if "mixing" in name]
    saved = checkpoints.load_state(target)["model"]._metadata
    assert saved["encoder.layers.0.self_attn"]["attention"]["mixing"] == "none"
    assert not [name for name in saved if "mixing" in name]


def test_a_rate_of_mixing_goes_with_what_it_was_for(trained, tmp_path):
    changes = {"attention": "mqa", "head_mixing": "static", "mixing_lr_scale": 10.0}
    mixed, target = changed(trained("stock"), tmp_path / "mixed.pt", **OURS, **changes), tmp_path / "mqa.pt"
    assert cli.main(["convert", str(mixed), "--head-mixing", "positionwise", "--output", str(target)]) == 0
    assert checkpoint_utils.load_checkpoint_to_cpu(str(target))["cfg"].model.mixing_lr_scale == 10
    assert cli.main(["convert", str(mixed), "--attention", "mqa", "--output", str(target), "--force"]) == 0
    assert getattr(checkpoint_utils.load_checkpoint_to_cpu(str(target))["cfg"].model, "mixing_lr_scale", None) is None
    same_outputs(mixed, target)


def test_a_language_model_and_chosen_sites_keep_their_own(trained, tmp_path, capsys):
    target = tmp_path / "a.pt"
    assert cli.main(["convert", str(trained("mixhead-b")), "--attention", "mixhead-a", "--output", str(target)]) == 2
    assert (
        "decoder.layers.0.self_attn: mixing 'positionwise' cannot become 'static': M depends on the query"
        in capsys.readouterr().err
    )
    source = changed(trained("mixhead-b"), tmp_path / "average.pt", attention="avghead")
    assert cli.main(["convert", str(source), "--attention", "mixhead-b", "--output", str(target)]) == 0
    same_outputs(source, target)
    sites = changed(trained("stock"), tmp_path / "sites.pt", **OURS, attention="mixhead-a", attention_sites="cross")
    assert cli.main(["convert", str(sites), "--attention", "mixhead-b", "--output", str(target), "--force"]) == 0
    model = same_outputs(sites, target)
    assert model.encoder.layers[0].self_attn.mixing is None
    assert model.decoder.layers[0].encoder_attn.spec.mixing == "positionwise"


@pytest.mark.parametrize(
    "start", [["--finetune-from-model"], ["--reset-optimizer", "--reset-dataloader", "--restore-file"]]
)
def test_training_goes_on_as_the_command_says(trained, translation_data, tmp_path, fairseq_command, start):
    target = tmp_path / "mixhead-b.pt"
    assert cli.main(["convert", str(trained("stock")), "--attention", "mixhead-b", "--output", str(target)]) == 0
    sizes = ("layers 2", "embed-dim 16", "ffn-embed-dim 16", "attention-heads 4")
    model = [word for stack in ("encoder", "decoder") for size in sizes for word in f"--{stack}-{size}".split()]
    flags = [*("--optimizer", "adam", "--lr", "0.01", "--max-tokens", "256", "--max-update", "4", "--num-workers", "0")]
    flags += ["--cpu", "--disable-validation", "--save-dir", tmp_path / "on", "--arch", OURS["arch"]]
    fairseq_command("train", translation_data, *flags, *model, "--attention", "mixhead-b", *start, target)
    weights = checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "on" / "checkpoint_last.pt"))["model"]
    assert weights["encoder.layers.0.self_attn.mixing.query_weight"].abs().max() > 0


@pytest.mark.parametrize(
    "source, preset",
    [
        ("mha-translation", "gain"),
        ("gain-translation", "mha"),
        ("gain-translation", "mixhead-a"),
        ("mixhead-a-translation", "mixhead-b"),
        ("mixhead-random-translation", "mixhead-a"),
        ("avghead-translation", "mixhead-b"),
    ],
)
def test_trained_models_translate_as_before(source, preset, tmp_path, old_checkpoint):
    target = tmp_path / "converted.pt"
    checkpoint = old_checkpoint(source)
    assert cli.main(["convert", str(checkpoint), "--attention", preset, "--output", str(target)]) == 0
    for after, before in zip(answer(target), known_answer(checkpoint), strict=True):
        assert after["tokens"] == before["tokens"]
        assert after["scores"] == pytest.approx(before["scores"], abs=1e-4)


@pytest.mark.parametrize(
    "source, flags, message",
    [
        ("stock", ["--attention", "mqa"], "projection 'multi-query': weights of plain attention cannot be written in"),
        ("stock", ["--attention", "xsa"], "--attention-sites encoder,decoder"),
        ("stock", ["--attention", "gated", "--gate-start", "half"], "has an initial value that changes outputs"),
        ("stock", ["--attention", "diff"], "has an initial value that changes outputs"),
        ("stock", ["--attention", "avghead"], "mixing 'average' is fixed"),
        ("stock", ["--attention", "gated", "--nope", "1"], "--nope"),
        ("stock", ["--attention", "gated", "--embed-rank", "4"], "--embed-rank: a conversion does not change this"),
        ("mhe", ["--attention", "mhe-mul"], "--attention mhe-mul"),
        ("mhe", ["--attention", "nope"], "--attention: invalid choice: 'nope' (choose from 'mha'"),
        ("mhe", ["--head-mixing", "random"], "mixing 'random' is fixed"),
        ("mhe", [], "Add --attention NAME"),
        ("mhe", ["--head-dim", "8"], "projection head-embedding-mul"),
        ("mhe", ["--head-dim", "2"], "--head-dim 2: queries and keys cannot be narrowed: projection"),
        ("stock", ["--head-dim", "2", "--data", "{data}", "--sequences", "4"], "one half has"),
        ("stock", ["--attention", "gqa"], "--key-value-heads"),
        ("stock", ["--attention", "gqa", "--key-value-heads", "3"], "key_value_heads=3"),
        ("stock", ["--attention", "fixedhead", "--head-dim", "0"], "--head-dim 0"),
        ("stock", ["--attention", "mixhead-a", "--sequences", "3"], "--sequences 3"),
        ("stock", ["--attention", "mixhead-a", "--data", "nowhere"], "--data nowhere"),
    ],
)
def test_refusals_are_one_line_and_write_nothing(trained, translation_data, tmp_path, capsys, source, flags, message):
    target = tmp_path / "new.pt"
    flags = [word.format(data=translation_data) for word in flags]
    assert cli.main(["convert", str(trained(source)), *flags, "--output", str(target)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_convert_takes_the_sizes_that_it_asks_for(trained, tmp_path, capsys):
    files = {name: tmp_path / f"{name}.pt" for name in ("fixed", "grouped", "mha", "mixed")}
    larger = ["--attention", "fixedhead", "--head-dim", "7", "--output", str(files["fixed"])]
    assert cli.main(["convert", str(trained("stock")), *larger]) == 0
    assert "exact up to rounding" in capsys.readouterr().out
    assert same_outputs(trained("stock"), files["fixed"]).encoder.layers[0].self_attn.head_dim == 7
    grouped = ["--attention", "gqa", "--key-value-heads", "2", "--output", str(files["grouped"])]
    assert cli.main(["convert", str(trained("stock")), *grouped]) == 0
    assert "not exact" in capsys.readouterr().out
    # the number of groups goes with the preset that needed it
    assert cli.main(["convert", str(files["grouped"]), "--attention", "mha", "--output", str(files["mha"])]) == 0
    assert "exact up to rounding" in capsys.readouterr().out
    layer = same_outputs(files["grouped"], files["mha"]).decoder.layers[0].encoder_attn
    assert layer.spec == AttentionSpec() and len(layer.k_proj.weight) == 16
    both = ["--attention", "mixhead-b", "--head-dim", "6", "--output", str(files["mixed"])]
    assert cli.main(["convert", str(trained("mixhead-a")), *both]) == 0
    same_outputs(trained("mixhead-a"), files["mixed"])


def test_convert_measures_the_difference_on_data(trained, translation_data, tmp_path, capsys):
    target = tmp_path / "grouped.pt"
    data = ["--data", str(translation_data), "--sequences", "3", "--output", str(target)]
    flags = ["--attention", "gqa", "--key-value-heads", "1"]
    assert cli.main(["convert", str(trained("stock")), *flags, *data]) == 0
    printed = capsys.readouterr().out.splitlines()[-1]
    models = [checkpoints.load_model(path) for path in (trained("stock"), target)]
    samples = checkpoints.sequences(models[0][1], "valid", count=3, seed=1, min_length=2, max_length=None)
    logs, targets = [[], []], []
    for sample in samples:
        targets += sample["target"][0].tolist()
        for log, (model, _) in zip(logs, models, strict=True):
            with torch.no_grad():
                log.append(model(**sample["net_input"])[0][0].double().log_softmax(-1) / math.log(2))
    before, after = (torch.cat(log) for log in logs)
    bits = [-each[range(len(targets)), targets].mean().item() for each in (before, after)]
    assert f"{bits[0]:.4f} bits" in printed and f"{bits[1]:.4f} after" in printed
    found = output_error(*(model for model, _ in models), samples, 1)
    assert found["largest"] == pytest.approx((after - before).abs().max().item(), rel=1e-4) and found["largest"] > 0
    difference = (after - before)[range(len(targets)), targets].abs().mean().item()
    assert found["mean"] == pytest.approx(difference, rel=1e-4)
    same = output_error(models[0][0], models[0][0], samples, 1)
    assert same["mean"] == same["largest"] == 0


def test_an_output_that_is_no_number_is_no_small_error():
    class Model:
        def __init__(self, score):
            self.logs = torch.tensor([[[score, 0.0]]])

        def __call__(self):
            return self.logs

        def get_normalized_probs(self, output, log_probs):
            return output

    samples = [{"net_input": {}, "target": torch.tensor([1])}]
    assert math.isnan(output_error(Model(0.0), Model(math.nan), samples, 0)["largest"])


FACTORED = {"mla": "latent", "collaborative": "collaborative", "lrkv": "low-rank-kv"}


def command(source, tmp_path, *flags):
    target = tmp_path / "converted.pt"
    assert cli.main(["convert", str(source), *flags, "--output", str(target)]) == 0
    return target


def in_float64(path):
    """The model of a checkpoint with the checkpoint's own numbers, which a loaded model rounds to float32."""
    state = checkpoints.load_state(path)
    cfg = OmegaConf.create(state["cfg"], flags={"allow_objects": True})
    return with_numbers(tasks.setup_task(cfg.task).build_model(cfg.model), state)


def with_numbers(model, state):
    model.double().eval().load_state_dict(state["model"])
    return model


SIZED = {
    "gqa": {"key_value_heads": 2},
    "fixedhead": {"head_dim": 6},
    "lrkv": {"rank": 1},
    "collaborative": {"shared_dim": 5},
    "mfa": {"head_dim": 6, "latent_dim": 3},
    **{key: {"attention_sites": "encoder,decoder"} for key in ("xsa", "alibi", "t5-bias")},
}
PLAIN = [preset for preset in PRESETS if METHODS[preset].kind in ("restricted", "equal") and preset != "mla"]
PLAIN += ["collaborative", "mfa"]  # plain attention with larger heads


def random_checkpoint(trained, path, preset, **flags):
    return changed(trained("stock"), path, **OURS, attention=preset, **SIZED.get(preset, {}), **flags)


@pytest.mark.parametrize("preset", [preset for preset in PLAIN if preset != "mha"])
def test_a_restricted_or_equal_checkpoint_becomes_plain(preset, trained, tmp_path, capsys):
    source = random_checkpoint(trained, tmp_path / "a.pt", preset, dtype=torch.double)
    target = command(source, tmp_path, "--attention", "mha")
    assert capsys.readouterr().out.count("exact up to rounding") == 1
    before, after = in_float64(source), in_float64(target)
    tokens, lengths, inputs = torch.tensor([[5, 6, 7, 2]]), torch.tensor([4]), torch.tensor([[2, 8, 9]])
    expected, found = (model(tokens, lengths, inputs)[0] for model in (before, after))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    layers = [module for module in after.modules() if isinstance(module, MultiheadAttention)]
    assert len(layers) == 6 and all(layer.spec.projection == "independent" for layer in layers)
    assert not any(layer.head_map or layer.mixing for layer in layers)
    assert {layer.head_dim for layer in layers} == {{"mfa": 6, "collaborative": 5}.get(preset, 4)}


def test_a_method_without_biases_becomes_plain_with_them(trained, tmp_path):
    source = changed(trained("stock"), tmp_path / "a.pt", **OURS, attention="mhe-add", no_attention_bias=True)
    model = same_outputs(source, command(source, tmp_path, "--attention", "mha"))
    assert model.decoder.layers[0].encoder_attn.q_proj.bias.any()


def starts_plain(preset):
    """Whether every part of a preset starts as the identity of plain attention with the same projection."""
    parts = METHODS[preset].parts
    if parts.get("projection", PARTS["projection"]["independent"]).name != "independent" or METHODS[preset].needs:
        return False
    layer = build_attention(preset, 8, 2, self_attention=True)
    return all(part.keeps_stock and part.learns for part in parts_of(layer).values())


@pytest.mark.parametrize("preset", [preset for preset in PRESETS if preset != "mha" and starts_plain(preset)])
def test_a_plain_checkpoint_gets_any_part_that_starts_as_the_identity(preset, old_checkpoint):
    state, sites = checkpoints.load_state(old_checkpoint("mha-translation")), {}
    if needs_self_attention(preset):
        sites["attention_sites"] = "encoder,decoder"
    result, notes = convert(state, attention=preset, **sites)
    assert notes[0] == "exact: the model's outputs and the returned attention weights"
    task = task_of("mha-translation")
    models = [task.build_model(checkpoints.model_arguments(each)) for each in (state, result)]
    before, after = (with_numbers(model, each) for model, each in zip(models, (state, result), strict=True))
    tokens, lengths, inputs = torch.tensor([[5, 6, 7, 2]]), torch.tensor([4]), torch.tensor([[2, 8, 9]])
    expected, found = (model(tokens, lengths, inputs)[0] for model in (before, after))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert [*parts_of(after.encoder.layers[0].self_attn)] == [
        axis for axis in MODULE_AXES if axis in METHODS[preset].parts
    ]


REFUSED = {
    "fixedhead": "--head-dim 4: smaller than the checkpoint's 6",
    "mixhead-a": "M mixes heads that have separate values",
    "mixhead-b": "M depends on the query",
    "mixhead-random": "M mixes heads that have separate values",
    "avghead": "M mixes heads that have separate values",
    "talking-heads": "mixing='static'",
    "gated-head": "head_output='head-gate'",
    "gated": "head_output='gate'",
    "mla": "its norm depends on the input",
    "dcmha": "mixing='dynamic'",
    "diff": "head_output='difference'",
    "tpa": "projection='tensor-product'",
    "xsa": "head_output='exclusive'",
    "alibi": "score_bias='alibi'",
    "t5-bias": "score_bias='t5'",
    "sinks": "attention_sinks='learned'",
}


def test_every_preset_becomes_plain_or_is_refused():
    assert set(PLAIN).isdisjoint(REFUSED)


@pytest.mark.parametrize("preset", REFUSED)
def test_more_than_plain_attention_is_refused(preset, trained, tmp_path, capsys):
    source = random_checkpoint(trained, tmp_path / "a.pt", preset)
    assert cli.main(["convert", str(source), "--attention", "mha", "--output", str(tmp_path / "b.pt")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "encoder.layers.0.self_attn" in error and REFUSED[preset] in error
    assert not (tmp_path / "b.pt").exists()


def test_only_heads_at_the_chosen_sites_need_one_size(trained, tmp_path, capsys):
    flags = {"attention_sites": "cross", "dtype": torch.double}
    source = random_checkpoint(trained, tmp_path / "a.pt", "mfa", **flags)
    model = same_outputs(source, command(source, tmp_path, "--attention", "mha"))
    assert "exact up to rounding" in capsys.readouterr().out
    sizes = {name: module.head_dim for name, module in model.named_modules() if isinstance(module, MultiheadAttention)}
    assert {size for name, size in sizes.items() if "encoder_attn" in name} == {6}
    assert {size for name, size in sizes.items() if "self_attn" in name} == {4}


def test_a_restricted_checkpoint_gets_mixing_in_one_step(trained, tmp_path, capsys):
    target = command(trained("mhe"), tmp_path, "--attention", "mixhead-a")
    assert "exact up to rounding" in capsys.readouterr().out
    layer = same_outputs(trained("mhe"), target).encoder.layers[0].self_attn
    assert (layer.spec.projection, layer.spec.mixing) == ("independent", "static")


def test_options_of_the_old_attention_are_dropped_and_others_kept(old_checkpoint):
    state = checkpoints.load_state(old_checkpoint("mha-translation"))
    state, _ = convert(state, attention="gated", gate_start="identity")
    state, notes = convert(state, head_dim=8, head_output="none")
    assert state["cfg"]["model"].head_output == "none"
    assert notes[0].startswith("exact up to rounding")


@pytest.mark.parametrize("preset", ["lrkv", "collaborative"])
def test_a_trained_is_factored_exactly(preset, trained, tmp_path, capsys):
    plain = trained("stock")
    model = same_outputs(plain, command(plain, tmp_path, "--attention", preset))
    assert "exact up to rounding" in capsys.readouterr().out
    assert model.decoder.layers[0].self_attn.spec.projection == FACTORED[preset]


@pytest.mark.parametrize(
    "flags", [("mla",), ("mla", "--latent-dim", "3"), ("lrkv", "--rank", "1"), ("collaborative", "--shared-dim", "4")]
)
def test_a_factorisation_that_loses_says_how_much(flags, trained, tmp_path, capsys):
    target = command(trained("stock"), tmp_path, "--attention", *flags)
    assert "relative error" in (said := capsys.readouterr().out) and "not exact" in said
    model, _ = checkpoints.load_model(target)
    assert model.decoder.layers[0].self_attn.spec.projection == FACTORED[flags[0]]


def test_older_state_gets_the_marker_of_its_activation():
    layer = MultiheadAttention(AttentionConfig(AttentionSpec(activation="sigsoftmax"), 16, 4))
    model = torch.nn.ModuleDict({"self_attn": layer})
    old = model.state_dict()
    del old["self_attn.activation_sigsoftmax"]
    assert list(as_state_of(model, dict(old), old)) == list(model.state_dict())


CHANGES = {
    "head size": ["--head-dim", "16"],
    "value size": ["--value-dim", "16"],
    "no mixing": ["--head-mixing", "none"],
    "mixhead-b": ["--attention", "mixhead-b"],
    "mha": ["--attention", "mha"],
    "lrkv": ["--attention", "lrkv"],
}


OLD = [name for name in NAMES if name.endswith("-translation")]
# Each checkpoint with two changes and each change with a third of the checkpoints; the others are in the grid.
CONVERSIONS = [
    pytest.param(name, change, marks=pytest.mark.grid if (place + other) % 3 else ())
    for place, name in enumerate(OLD)
    for other, change in enumerate(CHANGES)
]


@pytest.mark.parametrize(("name", "change"), CONVERSIONS)
def test_every_conversion_gives_the_same_outputs_or_is_refused(name, change, tmp_path, capsys, old_checkpoint):
    source, target = old_checkpoint(name), tmp_path / "new.pt"
    code = cli.main(["convert", str(source), *CHANGES[change], "--output", str(target)])
    said = capsys.readouterr()
    if code:
        assert code == 2 and said.err.count("\n") == 1 and not list(tmp_path.iterdir()), said.err
    else:
        assert "exact" in said.out and "not exact" not in said.out
        converted = answer(target)
        for before, after in zip(known_answer(source), converted, strict=True):
            assert before["tokens"] == after["tokens"]
            assert before["scores"] == pytest.approx(after["scores"], abs=2e-4)


@pytest.mark.parametrize("source, options", [("mqa", {"attention": "mha"}), ("mha", {"attention": "lrkv"})])
def test_a_model_that_was_trained_with_quantisation_noise_is_converted(source, options, old_checkpoint):
    state = checkpoints.load_state(old_checkpoint(f"{source}-translation"))
    state["cfg"]["model"].quant_noise_pq, state["cfg"]["model"].quant_noise_pq_block_size = 0.1, 4
    _, notes = convert(state, **options)
    assert notes[0].startswith("exact up to rounding")


def loss_of(subject, indices):
    totals = [subject.evaluate(index) for index in indices]
    return sum(bits for bits, _ in totals) / sum(words for _, words in totals)


def test_narrow_model_starts_with_the_loss_that_measure_says(trained):
    """The map of one basis, without a fit: a cut to two directions of four, on the half that is held out."""
    path = changed(trained("stock"), trained("stock").parent / "random.pt")
    loading = {"seed": 1, "min_length": 2, "max_length": None, "length": None, "text": None, "target": None}
    subject = fairseq_subject.load(path, data=None, subset="valid", count=16, **loading)
    result = measure(subject, "stock", layers=False)
    cost = {row["rank"]: row["value"] for row in result["cuts"]["scores"]["all"]["ranks"]}
    held_out, subject.samples = subject.samples[8:], subject.samples[:8]
    maps = maps_of_data(subject, 2, steps=0, centred=True)
    state, notes = convert(checkpoints.load_state(path), maps=maps, head_dim=2)
    assert notes[0].startswith("not exact: queries and keys keep fewer directions")
    _, task = checkpoints.load_model(path)
    args = checkpoints.model_arguments(state)
    assert (args.head_dim, args.value_dim) == (2, 4)
    narrow = task.build_model(args).eval()
    narrow.load_state_dict(state["model"])
    found = fairseq_subject.subject_of(narrow, held_out, task)
    assert loss_of(found, range(8)) == pytest.approx(cost[2], abs=1e-4)
    assert abs(cost[2] - cost[4]) > 1e-3


def test_narrow_checkpoint_trains_translates_and_leaves(trained, translation_data, tmp_path, capsys, fairseq_command):
    target, on = tmp_path / "narrow.pt", tmp_path / "on"
    flags = ["--head-dim", "2", "--data", str(translation_data), "--sequences", "20", "--output", str(target)]
    assert cli.main(["convert", str(trained("stock")), *flags]) == 0
    printed = capsys.readouterr().out
    assert "10 sequences of 'valid'" in printed and "bits per token before" in printed
    layer = checkpoints.load_model(target)[0].decoder.layers[0].self_attn
    assert layer.projection.state_sizes == {"key": 2, "value": 4}
    sizes = ("layers 2", "embed-dim 16", "ffn-embed-dim 16", "attention-heads 4")
    model = [word for stack in ("encoder", "decoder") for size in sizes for word in f"--{stack}-{size}".split()]
    flags = [*("--optimizer", "adam", "--lr", "0.01", "--max-tokens", "256", "--max-update", "4", "--num-workers", "0")]
    flags += ["--cpu", "--disable-validation", "--save-dir", on, "--arch", OURS["arch"]]
    narrow = ["--attention", "mha", "--head-dim", "2", "--value-dim", "4", "--finetune-from-model", target]
    fairseq_command("train", translation_data, *flags, *model, *narrow)
    (before, _), (after, _) = (checkpoints.load_model(path) for path in (target, on / "checkpoint_last.pt"))
    assert after.encoder.layers[0].self_attn.k_proj.weight.shape == (8, 16)
    assert not torch.equal(
        before.state_dict()["decoder.embed_tokens.weight"], after.state_dict()["decoder.embed_tokens.weight"]
    )
    translations = FairseqModel(on / "checkpoint_last.pt", max_len_b=8)
    sentences = translations.sentences("valid", 6)
    (tmp_path / "out").mkdir()
    write(translations.exported(), tmp_path / "out")
    comparison = compare(translations.search(sentences), TransformersModel(tmp_path / "out"), sentences)
    assert comparison.equal == comparison.count == 6
