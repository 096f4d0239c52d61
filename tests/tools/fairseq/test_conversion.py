"""Ways of mixing turned into others: layers and whole checkpoints give the same outputs, or are refused."""

import argparse
import math

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq import checkpoint_utils, tasks
from old_checkpoints import NAMES, answer
from omegaconf import OmegaConf

from fairseq_lowrank import cli
from fairseq_lowrank.attention import CAUSAL, METHODS, PRESETS, AttentionConfig, AttentionSpec, MultiheadAttention
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.tools.axes import axes_of
from fairseq_lowrank.tools.fairseq import checkpoints
from fairseq_lowrank.tools.fairseq.conversion import as_state_of, convert, output_error, remix, resize

HEADS, WIDTH = 4, 16


def layer(spec, seed=0):
    torch.manual_seed(seed)
    made = MultiheadAttention(AttentionConfig(spec, WIDTH, HEADS, self_attention=True)).double().eval()
    with torch.no_grad():
        for tensor in made.state_dict().values():
            tensor.add_(0.3 * torch.randn_like(tensor))
    return made


def outputs(made):
    torch.manual_seed(5)
    x = torch.randn(7, 2, WIDTH, dtype=torch.double)
    return made(x, x, x, attn_mask=CAUSAL, need_weights=False)[0]


def converted(made, mixing):
    spec = AttentionSpec(projection=made.spec.projection, activation=made.spec.activation, mixing=mixing)
    tensors, _ = remix(dict(made.state_dict()), made.spec, mixing, HEADS, made.head_dim)
    other = layer(spec, seed=9)
    other.load_state_dict(tensors)  # strict: nothing lacks, nothing is left
    return other


@pytest.mark.parametrize("activation", ["softmax", "sigsoftmax"])
@pytest.mark.parametrize(
    "projection", ["independent", "shared-kv", "el", "multi-query", "single", "head-embedding-add"]
)
@pytest.mark.parametrize(
    "before, after",
    [
        ("none", "static"),
        ("none", "positionwise"),
        ("static", "positionwise"),
        ("random", "static"),
        ("average", "positionwise"),
        ("none", "diagonal"),
        ("diagonal", "static"),
        ("diagonal", "positionwise"),
    ],
)
def test_a_richer_mixing_gives_the_same_outputs(projection, activation, before, after):
    made = layer(AttentionSpec(projection=projection, activation=activation, mixing=before))
    torch.testing.assert_close(outputs(converted(made, after)), outputs(made), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("projection", ["multi-query", "single", "head-embedding-mul"])
@pytest.mark.parametrize("before", ["static", "random", "average"])
def test_any_mixing_over_one_value_folds_into_the_output_projection(projection, before):
    made = layer(AttentionSpec(projection=projection, mixing=before))
    assert not torch.equal(made.mixing.weight, made.mixing.weight.diag().diag())
    torch.testing.assert_close(outputs(converted(made, "none")), outputs(made), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("projection", ["independent", "shared-kv", "el", "head-embedding-add", "head-embedding-mul"])
@pytest.mark.parametrize("before", ["static", "diagonal"])
def test_diagonal_mixing_folds_whatever_the_projection(projection, before):
    made = layer(AttentionSpec(projection=projection, mixing=before))
    if before == "static":
        with torch.no_grad():
            made.mixing.weight.mul_(torch.eye(HEADS))
        torch.testing.assert_close(outputs(converted(made, "diagonal")), outputs(made), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(outputs(converted(made, "none")), outputs(made), rtol=1e-12, atol=1e-12)


def test_positionwise_mixing_that_ignores_the_query_becomes_static():
    made = layer(AttentionSpec(mixing="positionwise"))
    with pytest.raises(UserError, match="depends on the query"):
        converted(made, "static")
    with torch.no_grad():
        made.mixing.query_weight.zero_()
    torch.testing.assert_close(outputs(converted(made, "static")), outputs(made), rtol=1e-12, atol=1e-12)


def test_mixing_that_stayed_at_the_identity_is_left_out_without_rounding():
    made = layer(AttentionSpec(mixing="static"))
    with torch.no_grad():
        made.mixing.weight.copy_(torch.eye(HEADS))
    assert torch.equal(converted(made, "none").out_proj.weight, made.out_proj.weight)


@pytest.mark.parametrize(
    "projection, before, after, message",
    [
        ("independent", "static", "none", "separate values"),
        ("independent", "average", "none", "separate values"),
        ("head-embedding-add", "static", "none", "separate values"),
        ("single", "positionwise", "none", "depends on the query"),
        ("independent", "static", "average", "--head-mixing average: this mixing is fixed"),
        ("multi-query", "static", "diagonal", "entries off the diagonal"),
    ],
)
def test_what_would_compute_something_else_is_refused(projection, before, after, message):
    with pytest.raises(UserError, match=message):
        converted(layer(AttentionSpec(projection=projection, mixing=before)), after)


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


def test_a_fold_that_overflows_is_refused():
    tensors = {"out_proj.weight": torch.full((4, 4), 6e4, dtype=torch.float16), "mixing.weight": torch.full((2,), 2.0)}
    with pytest.raises(UserError, match=r"is too large for torch\.float16"):
        remix(tensors, AttentionSpec(mixing="diagonal"), "none", 2, 2)


OURS = dict.fromkeys(("arch", "_name"), "lowrank_transformer_iwslt_de_en")


def test_a_stock_translation_model_gets_richer_mixing_step_by_step(trained, tmp_path, capsys):
    source = trained("stock")
    for name in ("gain", "mixhead-a", "mixhead-b"):
        target = tmp_path / f"{name}.pt"
        assert cli.main(["convert", str(source), "--attention", name, "--output", str(target)]) == 0
        printed = capsys.readouterr().out
        assert f"--attention {name}" in printed and "exact: the model's outputs" in printed
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
    assert "decoder.layers.0.self_attn: its mixing depends on the query" in capsys.readouterr().err
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
    for after, before in zip(answer(target), answer(checkpoint), strict=True):
        assert after["tokens"] == before["tokens"]
        assert after["scores"] == pytest.approx(before["scores"], abs=1e-4)


@pytest.mark.parametrize(
    "source, flags, message",
    [
        ("mhe", ["--attention", "mixhead-a"], "its projection is independent, the checkpoint's head-embedding-mul"),
        ("mhe", ["--attention", "mhe-mul"], "--attention mhe-mul"),
        ("mhe", ["--attention", "nope"], "--attention nope: there is no such attention. Choose from mha"),
        ("mhe", ["--head-mixing", "random"], "--head-mixing random: this mixing is fixed"),
        ("mhe", [], "Add --attention NAME"),
        ("mhe", ["--head-dim", "8"], "projection head-embedding-mul"),
        ("stock", ["--attention", "fixedhead", "--head-dim", "2"], "--head-dim 2"),
        ("stock", ["--attention", "gqa"], "--key-value-heads"),
        ("stock", ["--attention", "gqa", "--key-value-heads", "3"], "key_value_heads=3"),
        ("stock", ["--attention", "fixedhead", "--head-dim", "0"], "--head-dim 0"),
        ("stock", ["--attention", "mixhead-a", "--sequences", "3"], "--sequences 3"),
    ],
)
def test_refusals_are_one_line_and_write_nothing(trained, tmp_path, capsys, source, flags, message):
    target = tmp_path / "new.pt"
    assert cli.main(["convert", str(trained(source)), *flags, "--output", str(target)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def resized(made, **sizes):
    """A layer of other sizes with the weights of another one, and whether that is exact."""
    spec = made.spec.replace(**sizes)
    other = layer(spec, seed=9)
    tensors, exact = resize(dict(made.state_dict()), made.spec, axes_of(made), axes_of(made, spec))
    other.load_state_dict(tensors)
    return other, exact


@pytest.mark.parametrize("activation", ["softmax", "sigsoftmax"])
@pytest.mark.parametrize("mixing", ["none", "static", "positionwise"])
@pytest.mark.parametrize(
    "before, after",
    [
        ({}, {"head_dim": 7}),
        ({}, {"head_dim": 4, "value_dim": 6}),
        ({"key_value_heads": 2}, {"key_value_heads": None}),
        ({"key_value_heads": 1}, {"key_value_heads": 2}),
        ({"key_value_heads": 2}, {"key_value_heads": 4, "head_dim": 9, "value_dim": 5}),
    ],
)
def test_larger_sizes_give_the_same_outputs(before, after, mixing, activation):
    made = layer(AttentionSpec(mixing=mixing, activation=activation, **before))
    other, exact = resized(made, **after)
    assert exact and other.spec != made.spec
    torch.testing.assert_close(outputs(other), outputs(made), rtol=0, atol=1e-12)


def test_larger_heads_can_learn():
    other, _ = resized(layer(AttentionSpec()), head_dim=7)
    outputs(other).square().sum().backward()
    new = other.q_proj.weight.grad.unflatten(0, (HEADS, 7))[:, 4:]
    assert (
        new.abs().amin(-1).min() > 0 and other.out_proj.weight.grad.unflatten(1, (HEADS, 7))[:, :, 4:].abs().min() > 0
    )


def test_new_rows_of_keys_and_values_have_the_deviation_of_the_old_ones():
    made = layer(AttentionSpec())
    for scale, name in ((0.1, "k_proj"), (3.0, "v_proj")):
        getattr(made, name).weight.data *= scale
    other, _ = resized(made, head_dim=400, value_dim=400)
    for name in ("k_proj", "v_proj"):
        old, new = getattr(made, name).weight, getattr(other, name).weight.unflatten(0, (HEADS, 400))[:, 4:]
        assert new.std().item() == pytest.approx(old.std().item(), rel=0.03)
        assert abs(new.mean().item()) < 0.03 * old.std().item()


def test_fewer_key_and_value_heads_are_means_of_neighbours():
    made = layer(AttentionSpec())
    other, exact = resized(made, key_value_heads=2)
    assert not exact
    for name in ("k_proj", "v_proj"):
        heads = getattr(made, name).weight.unflatten(0, (2, 2, 4))
        torch.testing.assert_close(getattr(other, name).weight.unflatten(0, (2, 4)), heads.mean(1))
    torch.testing.assert_close(other.q_proj.weight, made.q_proj.weight)


def test_heads_that_are_alike_are_joined_without_a_difference():
    made, _ = resized(layer(AttentionSpec(key_value_heads=2)), key_value_heads=4)
    other, _ = resized(made, key_value_heads=2)
    torch.testing.assert_close(outputs(other), outputs(made), rtol=0, atol=1e-12)


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


FACTORED = {"mla": "latent", "collaborative": "collaborative", "lrkv": "low-rank-kv"}


def command(source, tmp_path, *flags):
    target = tmp_path / "converted.pt"
    assert cli.main(["convert", str(source), *flags, "--output", str(target)]) == 0
    return target


def in_float64(path):
    """The model of a checkpoint with the checkpoint's own numbers, which a loaded model rounds to float32."""
    state = checkpoints.load_state(path)
    cfg = OmegaConf.create(state["cfg"], flags={"allow_objects": True})
    model = tasks.setup_task(cfg.task).build_model(cfg.model).double().eval()
    model.load_state_dict(state["model"])
    return model


SIZED = {
    "gqa": {"key_value_heads": 2},
    "fixedhead": {"head_dim": 6},
    "lrkv": {"rank": 1},
    "collaborative": {"shared_dim": 5},
    "mfa": {"head_dim": 6, "latent_dim": 3},
    "xsa": {"attention_sites": "encoder,decoder"},
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


REFUSED = {
    "fixedhead": "--head-dim 4: smaller than the checkpoint's 6",
    "mixhead-a": "its M mixes heads that have separate values",
    "mixhead-b": "its mixing depends on the query",
    "mixhead-random": "its M mixes heads that have separate values",
    "avghead": "its M mixes heads that have separate values",
    "talking-heads": "mixing='static'",
    "gated-head": "head_output='head-gate'",
    "gated": "head_output='gate'",
    "mla": "its norm depends on the input",
    "dcmha": "mixing='dynamic'",
    "diff": "head_output='difference'",
    "tpa": "projection='tensor-product'",
    "xsa": "head_output='exclusive'",
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
    model = torch.nn.ModuleDict({"self_attn": layer(AttentionSpec(activation="sigsoftmax"))})
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


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("-translation")])
def test_every_conversion_gives_the_same_outputs_or_is_refused(name, change, tmp_path, capsys, old_checkpoint):
    source, target = old_checkpoint(name), tmp_path / "new.pt"
    code = cli.main(["convert", str(source), *CHANGES[change], "--output", str(target)])
    said = capsys.readouterr()
    if code:
        assert code == 2 and said.err.count("\n") == 1 and not list(tmp_path.iterdir()), said.err
    else:
        assert "exact" in said.out and "not exact" not in said.out
        converted = answer(target)
        for before, after in zip(answer(source), converted, strict=True):
            assert before["tokens"] == after["tokens"]
            assert before["scores"] == pytest.approx(after["scores"], abs=2e-4)


@pytest.mark.parametrize("part", ["head_map", "head_output"])
def test_a_resize_refuses_methods_that_it_does_not_know(part):
    choices = {"head_map": ("features", "heads"), "head_output": ("exclusive", "gate", "head-gate")}[part]
    for choice in choices:
        made = layer(AttentionSpec(**{part: choice}))
        with pytest.raises(UserError, match=f"{part.replace('_', ' ')} {choice}"):
            resized(made, head_dim=16)


@pytest.mark.parametrize("source, options", [("mqa", {"attention": "mha"}), ("mha", {"attention": "lrkv"})])
def test_a_model_that_was_trained_with_quantisation_noise_is_converted(source, options, old_checkpoint):
    state = checkpoints.load_state(old_checkpoint(f"{source}-translation"))
    state["cfg"]["model"].quant_noise_pq, state["cfg"]["model"].quant_noise_pq_block_size = 0.1, 4
    _, notes = convert(state, **options)
    assert notes[0].startswith("exact up to rounding")
