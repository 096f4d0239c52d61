"""Measurements of checkpoints of fairseq: losses, stock attention, texts, and refusals by name."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.options import get_training_parser, parse_args_and_arch
from families import FAMILIES
from tiny_transformer import SIZES, build, make_task, shake

from fairseq_lowrank import cli
from fairseq_lowrank.attention import PRESETS, build_attention
from fairseq_lowrank.attention.watching import changing_calls
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.tools.fairseq import checkpoints
from fairseq_lowrank.tools.fairseq import subject as fairseq_subject
from fairseq_lowrank.tools.measuring.layers import score_rank, score_weights
from fairseq_lowrank.tools.measuring.measurement import measure
from fairseq_lowrank.tools.measuring.probe import Probe, cut_call, factors

LOADING = {"text": None, "target": None, "seed": 1, "min_length": 2, "max_length": None, "length": None}


def load(path, count=4, **changes):
    return fairseq_subject.load(path, data=None, subset="valid", count=count, **LOADING | changes)


@pytest.mark.parametrize("name", ["stock", "mhe", "mixhead-b"])
def test_loss_is_that_of_fairseq(trained, name):
    subject = load(trained(name))
    model, task = checkpoints.load_model(trained(name))
    (sample,) = checkpoints.sequences(task, "valid", count=1, seed=1, min_length=2, max_length=None)
    with torch.no_grad():
        logs = model.get_normalized_probs(model(**sample["net_input"]), log_probs=True)
    words = sample["target"]
    expected = -logs.gather(-1, words[..., None]).sum().item() / math.log(2)
    total, weight = subject.evaluate(0)
    assert (total, weight) == (pytest.approx(expected, rel=1e-5), words.numel())


@pytest.mark.parametrize("name", ["stock", "mhe", "mixhead-b"])
def test_measurement_of_a_checkpoint(trained, name):
    result = measure(load(trained(name)), name)
    sites = {"decoder"} if name == "mixhead-b" else {"encoder", "decoder", "cross"}
    assert set(result["cuts"]["scores"]["sites"]) == sites
    assert all(layer["weights"] for layer in result["layers"])
    assert result["cuts"]["scores"]["all"]["size"] == 4


def test_text_gives_the_loss_of_the_same_binarised_data(trained, translation_data, tmp_path):
    whole = load(trained("stock"), count=1000)
    task = checkpoints.load_model(trained("stock"))[1]
    task.load_dataset("valid")
    pairs = task.dataset("valid")
    files = []
    for side, dictionary in (("src", task.source_dictionary), ("tgt", task.target_dictionary)):
        lines = [dictionary.string(getattr(pairs, side)[index]) for index in range(len(pairs))]
        files.append(tmp_path / side)
        files[-1].write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = load(trained("stock"), count=1000, text=files[0], target=files[1])
    expected = [whole.evaluate(index) for index in range(len(whole.samples))]
    assert [found.evaluate(index) for index in range(len(found.samples))] == expected


def test_command_measures_a_checkpoint_and_text(trained, tmp_path, capsys):
    (tmp_path / "text").write_text("a b c\n" * 40, encoding="utf-8")
    command = ["measure", str(trained("mixhead-b")), "--text", str(tmp_path / "text"), "--sequences", "4", "--json"]
    assert cli.main(command) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["metric"] == "bits per token"


SENTENCES = torch.randint(4, 20, (1, 9), generator=torch.Generator().manual_seed(1))


def sample_of(**more):
    target = SENTENCES[:, 1:]
    inputs = {"src_tokens": SENTENCES, "src_lengths": torch.tensor([9]), "prev_output_tokens": SENTENCES[:, :-1]}
    return {"net_input": inputs, "target": target, "ntokens": 8} | more


@pytest.mark.parametrize("preset", PRESETS)
def test_cut_to_the_whole_rank_changes_no_output(preset):
    """For every preset, a cut to the greatest rank by the basis of the same sequence changes no output."""
    needed = {"fixedhead": {"head_dim": 6}, "gqa": {"key_value_heads": 2}}
    layer = shake(build_attention(preset, 16, 4, self_attention=True, **needed.get(preset, {}))).double().eval()
    x = torch.randn(40, 1, 16, dtype=torch.float64)
    if layer.spec.score != "dot-product":
        return
    subject = fairseq_subject.LayerSubject(
        preset, [("layer", "encoder", 0, layer)], [x], lambda x: (0.0, 1.0), fairseq_subject.BITS, 40
    )
    limit = subject.layers[0].limit
    with torch.no_grad():
        expected = layer(x, x, x)[0]
        probe = Probe([limit])
        probe.gathering = True
        with subject.hooked(probe):
            layer(x, x, x, need_weights=False)
        probe.gathering = False
        for kind in ("scores", "values"):
            cut = probe.layers[0].cut(kind, subject.layers[0].output_weight)
            size = limit if kind == "scores" else cut.mean.size(-1)

            def whole(index, call, cut=cut, size=size, kind=kind):
                return cut_call(call, kind, cut, size)

            with subject.hooked(whole):
                found = layer(x, x, x, need_weights=False)[0]
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("mixing", ["none", "static", "diagonal"])
@pytest.mark.parametrize("preset", PRESETS)
def test_greatest_rank_of_scores_is_reached(preset, mixing):
    if preset == "diff" and mixing != "none":  # two heads for each output are not mixed
        return
    needed = {
        "gqa": {"key_value_heads": 2},
        "mla": {"latent_dim": 10},
        "mfa": {"latent_dim": 2},
        "fixedhead": {"head_dim": 6},
    }.get(preset, {})
    layer = (
        shake(build_attention(preset, 16, 4, self_attention=True, **needed | {"score_mixing": mixing})).double().eval()
    )
    if layer.spec.score != "dot-product":
        return
    calls = []
    x = torch.randn(40, 1, 16, dtype=torch.float64)
    with changing_calls({layer: lambda call: calls.append(call) or call}):
        layer(x, x, x, need_weights=False)
    queries, keys = factors(calls[0])
    keys = keys - keys.mean(2, keepdim=True)
    assert score_rank(layer) == torch.linalg.matrix_rank(queries @ keys.mT).max()


def test_mixed_scores_have_the_rank_of_all_heads():
    layer = shake(build_attention("mha", 16, 4, self_attention=True, score_mixing="static")).double()
    query, key = score_weights(layer)
    assert query.shape == key.shape == (4, 16, 16)
    assert torch.linalg.matrix_rank(query @ key.mT).tolist() == [16] * 4
    calls = []
    x = torch.randn(9, 1, 16, dtype=torch.float64)
    with changing_calls({layer: lambda call: calls.append(call) or call}):
        layer(x, x, x)
    q, k = factors(calls[0])
    scores = torch.einsum("ji,jts->its", layer.score_mixing.weight, calls[0].scores.dense()[0])
    torch.testing.assert_close((q @ k.mT)[0] * calls[0].scores.factor, scores)


REFUSED = {
    "nonautoregressive_transformer": "writes all words at once",
    "cmlm_transformer": "writes all words at once",
    "levenshtein_transformer": "writes all words at once",
    "fconv_iwslt_de_en": "FConvModel computes attention by AttentionLayer",
    "lstm": "LSTMModel computes attention by AttentionLayer",
    "fconv_self_att_wp": "FConvModelSelfAtt computes attention by",
}


def task_of(name="translation"):
    dictionary = make_task().source_dictionary
    task = SimpleNamespace(cfg=SimpleNamespace(), target_dictionary=dictionary, source_dictionary=dictionary)
    task.name = name
    return task


@pytest.mark.parametrize("arch", REFUSED)
def test_architecture_is_refused_by_name(arch):
    known = {family.arch: family for family in FAMILIES}
    model = known[arch].build() if arch in known else build(arch)
    with pytest.raises(UserError, match=REFUSED[arch]):
        fairseq_subject.subject_of(model, [sample_of()], task_of())


def test_synthesizers_are_refused_by_name():
    flags = ("--attention", "mha", "--attention-score", "synthesizer-dense", "--max-source-positions", "32")
    model = build("lowrank_transformer", *SIZES, *flags, "--attention-sites", "encoder")
    with pytest.raises(UserError, match=r"encoder attention 0 .* has synthesizer-dense scores"):
        fairseq_subject.subject_of(model, [sample_of()], task_of())


def test_classifier_is_measured_by_its_divergence_and_its_labels():
    words = ["data", "--task", "sentence_prediction", "--arch", "lowrank_bert_base", *SIZES[:6], *SIZES[12:14]]
    args = parse_args_and_arch(get_training_parser("sentence_prediction"), [*words, "--max-positions", "48"])
    task = make_task()
    model = ARCH_MODEL_REGISTRY["lowrank_bert_base"].build_model(args, task).eval()
    model.register_classification_head("sentences", num_classes=3)
    of_classes = task_of()
    of_classes.cfg.classification_head_name = "sentences"
    samples = []
    for label in range(6):
        tokens = SENTENCES.roll(label, dims=1)
        samples.append({"net_input": {"src_tokens": tokens}, "target": torch.tensor([[label % 3]]), "ntokens": 9})
    subject = fairseq_subject.subject_of(model, samples, of_classes)
    result = measure(subject, "classifier")
    assert result["metric"] == "bits per decision of the uncut model"
    assert 0 < result["value"] <= math.log2(3) + 1e-9 and result["second_metric"] == "bits per label"
    assert all(entry["value"] > result["value"] - 1e-6 for entry in result["cuts"]["scores"]["all"]["ranks"])
    of_classes.cfg.regression_target = True
    with pytest.raises(UserError, match="predicts numbers"):
        fairseq_subject.subject_of(model, samples, of_classes)


def test_data_without_targets_is_refused():
    with pytest.raises(UserError, match="no words or labels"):
        fairseq_subject.subject_of(build("transformer", *SIZES), [{"net_input": {}, "ntokens": 1}], task_of())


@pytest.mark.parametrize("arch", ["transformer_align", "bart_base", "transformer_lm", "roberta_base", "bert_base"])
def test_stock_models_are_measured_with_unchanged_losses(arch):
    (family,) = [family for family in FAMILIES if family.arch == arch]
    model, sample = family.build(), sample_of()
    if "cross" not in family.sites:
        del sample["net_input"]["prev_output_tokens"]
        sample["target"] = SENTENCES
    if arch == "bert_base":
        sample["net_input"] = {"src_tokens": SENTENCES, "segment_labels": torch.zeros_like(SENTENCES)}
    score = fairseq_subject.scoring(model, sample, task_of())
    with torch.no_grad():
        before = score(sample)
    subject = fairseq_subject.subject_of(model, [sample] * 4, task_of())
    assert subject.evaluate(0) == (pytest.approx(before[0], rel=1e-5), before[1])
    result = measure(subject, arch)
    assert set(result["cuts"]["scores"]["sites"]) == set(family.sites)
    assert not result["never_ran"]
