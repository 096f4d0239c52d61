"""The regularisers as criterion flags: their gradients, their log, and what they do to a model."""

import argparse
import copy
import re

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq import criterions, models, options
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.criterions.cross_entropy import CrossEntropyCriterion, CrossEntropyCriterionConfig
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from fairseq.trainer import Trainer
from tiny_transformer import SIZES, arguments, build, make_task, preset_flags, sentences, shake
from torch import nn

from fairseq_lowrank.attention import PRESETS, MultiheadAttention
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.plugin import criterions as regularised

WEIGHTS = {"mixing_orthogonality": 0.3, "row_space_penalty": 0.7, "column_space_penalty": 0.2}
ALL = [text for name, weight in WEIGHTS.items() for text in (f"--{name.replace('_', '-')}", str(weight))]
CROSS_ENTROPIES = ("cross_entropy", "label_smoothed_cross_entropy")


@pytest.fixture(scope="module")
def task():
    return make_task()


def build_model(task, *flags):
    """A model without dropout, away from its start, in float64 (fairseq takes the loss in float32)."""
    flags = (*SIZES, "--dropout", "0", *flags)
    return shake(build("lowrank_transformer", *flags, task=task)).double().train()


def build_criterion(task, *flags):
    return task.build_criterion(arguments("lowrank_transformer", "--attention", "mixhead-b", *flags))


def make_sample(task, *lengths):
    """A batch whose targets have as many words as the sources, in another order."""
    dictionary = task.source_dictionary
    source = sentences(dictionary, *lengths, left_pad=True)
    target = sentences(dictionary, *reversed(lengths), left_pad=False)
    previous = target.clone()
    for row, length in zip(previous, reversed(lengths), strict=True):
        row[: length + 1] = row[: length + 1].roll(1)
    inputs = {"src_tokens": source, "src_lengths": source.ne(dictionary.pad()).sum(1), "prev_output_tokens": previous}
    return {"net_input": inputs, "target": target, "ntokens": sum(lengths) + len(lengths), "nsentences": len(lengths)}


@pytest.fixture
def sample(task):
    return make_sample(task, 3, 6, 4)


def gradients(model, loss):
    """The gradient of every parameter, by name."""
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(actual, expected, **tolerance):
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


class Spelled:
    """R from the formulas, with loops over sequences and pairs of heads, in the graph of a forward pass.

    Reads each layer's scores through its ``before_softmax`` and takes rows of padding from the batch.
    """

    def __init__(self, model, source_padding, target_padding):
        self.paddings = {True: source_padding, False: target_padding}
        self.values = dict.fromkeys(WEIGHTS, 0.0)
        self.encoder = {m for name, m in model.named_modules() if name.startswith("encoder.")}
        self.handles = [
            module.register_forward_pre_hook(self.add, with_kwargs=True)
            for module in model.modules()
            if isinstance(module, MultiheadAttention)
        ]

    def add(self, layer, inputs, kwargs):
        if kwargs.get("before_softmax"):
            return
        wanted = {name: kwargs.get(name) for name in ("query", "key", "value", "key_padding_mask", "attn_mask")}
        scores, _ = layer(*inputs, **wanted, before_softmax=True)
        scores = scores.unflatten(0, (-1, layer.num_heads * layer.spec.queries_per_head))
        keys = scores.size(-1)
        if layer.attention_sinks is not None:  # a further score of each row, whose weight reads no value
            sinks = layer.attention_sinks.weight[:, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        if layer.spec.activation == "sigsoftmax":
            scores = scores + nn.functional.logsigmoid(scores)
        weights = torch.softmax(scores, dim=-1)[..., :keys]
        padding = self.paddings[layer in self.encoder]
        batch, heads = weights.shape[:2]
        for b in range(batch):
            real = range(weights.size(2)) if padding is None else torch.nonzero(~padding[b]).flatten().tolist()
            rows = weights[b, :, list(real)]
            for j in range(heads):
                for i in range(j):
                    self.values["row_space_penalty"] += (rows[i] @ rows[j].T).square().sum() / batch
                    self.values["column_space_penalty"] += (rows[i].T @ rows[j]).square().sum() / batch
            for t in real if isinstance(getattr(layer.mixing, "weight", None), nn.Parameter) else ():
                matrix = layer.mixing.weight
                if layer.mixing.query_weight is not None:
                    query = layer.q_proj(kwargs["query"][t, b]).unflatten(-1, (-1, layer.head_dim))
                    matrix = matrix + query @ layer.mixing.query_weight
                error = (matrix.T @ matrix - torch.eye(heads).double()).square().sum()
                self.values["mixing_orthogonality"] += error / len(real) / batch

    def loss(self, criterion, model, sample, names):
        """The criterion's own loss + sample size · Σ λ R of the penalties of these names."""
        loss, sample_size, _ = criterion(model, sample)
        for handle in self.handles:
            handle.remove()
        return loss + sample_size * sum(WEIGHTS[name] * self.values[name] for name in names)


def paddings(task, sample):
    return tuple(
        sample["net_input"][name].eq(task.source_dictionary.pad()) for name in ("src_tokens", "prev_output_tokens")
    )


def assert_trains_as_spelled(model, sample, regularised_criterion, plain_criterion, source_padding, target_padding):
    spelled = Spelled(model, source_padding, target_padding)
    names = regularised_criterion.penalty_weights.keys()
    expected = spelled.loss(plain_criterion, model, sample, names)
    expected_gradients = gradients(model, expected)
    loss, sample_size, log = regularised_criterion(model, sample)
    torch.testing.assert_close(loss, expected, check_dtype=False, rtol=1e-5, atol=0)
    assert log.keys() & WEIGHTS.keys() == names
    for name in names:
        torch.testing.assert_close(log[name] / sample_size, spelled.values[name].detach(), check_dtype=False)
    assert_same(gradients(model, loss), expected_gradients, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", ["mixhead-a", "mixhead-b"])
@pytest.mark.parametrize("criterion", CROSS_ENTROPIES)
def test_translation_models_are_trained_on_the_loss_and_the_penalties(task, sample, criterion, attention):
    model = build_model(task, "--attention", attention)
    flags = ("--criterion", criterion)
    assert_trains_as_spelled(
        model, sample, build_criterion(task, *flags, *ALL), build_criterion(task, *flags), *paddings(task, sample)
    )


PENALISED = [(preset, "softmax") for preset in PRESETS if not preset.startswith("mixhead-")]


@pytest.mark.parametrize(("preset", "activation"), [*PENALISED, ("mha", "sigsoftmax"), ("talking-heads", "sigsoftmax")])
def test_the_heads_of_every_preset_are_penalised_for_what_they_attend_to(task, sample, preset, activation):
    model = build_model(task, *preset_flags(preset), "--attention-activation", activation)
    criteria = build_criterion(task, *ALL[2:]), build_criterion(task)
    assert_trains_as_spelled(model, sample, *criteria, *paddings(task, sample))


def test_layers_without_mixing_are_left_out_of_its_orthogonality(task, sample):
    model = build_model(task, "--attention", "mixhead-b", "--attention-sites", "encoder,cross")
    criteria = build_criterion(task, *ALL[:2]), build_criterion(task)
    assert_trains_as_spelled(model, sample, *criteria, *paddings(task, sample))


def test_penalties_count_for_sentences_where_the_loss_does(task, sample):
    model = build_model(task, "--attention", "mixhead-b")
    flags = ("--sentence-avg",)
    criteria = build_criterion(task, *flags, *ALL), build_criterion(task, *flags)
    assert criteria[0](model, sample)[1] == 3
    assert_trains_as_spelled(model, sample, *criteria, *paddings(task, sample))


def build_language_model(task, *flags):
    sizes = ("--decoder-layers", "2", "--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "16", "--dropout", "0")
    arch = ("--task", "language_modeling", "--arch", "lowrank_transformer_lm", "--decoder-attention-heads", "4")
    parser = options.get_training_parser("language_modeling")
    args = options.parse_args_and_arch(parser, ["data", *arch, "--tokens-per-sample", "16", *sizes, *flags])
    torch.manual_seed(1)
    return shake(models.build_model(args, task)).double().train(), task.build_criterion(args)


def test_language_models_with_an_adaptive_softmax_are_trained_on_the_loss_and_the_penalties(task):
    flags = ("--criterion", "adaptive_loss", "--adaptive-softmax-cutoff", "8,16", "--ddp-backend", "legacy_ddp")
    flags = (*flags, "--attention", "mixhead-b")
    model, criterion = build_language_model(task, *flags, *ALL)
    _, plain = build_language_model(task, *flags)
    target = sentences(task.source_dictionary, 3, 6, 4, left_pad=False)
    tokens = target.roll(1, dims=1)
    tokens[:, 0] = task.source_dictionary.eos()
    sample = {"net_input": {"src_tokens": tokens}, "target": target, "ntokens": 16}
    assert_trains_as_spelled(model, sample, criterion, plain, None, tokens.eq(task.source_dictionary.pad()))


class MaskedModel(models.BaseFairseqModel):
    """As much of a masked language model as its criterion needs, over our encoder."""

    def __init__(self, encoder, words):
        super().__init__()
        self.encoder = encoder
        self.output = nn.Linear(16, words)

    def forward(self, src_tokens, masked_tokens=None):
        lengths = torch.full((src_tokens.size(0),), src_tokens.size(1))
        states = self.encoder(src_tokens, lengths)["encoder_out"][0].transpose(0, 1)
        return self.output(states if masked_tokens is None else states[masked_tokens]), None


def test_masked_language_models_are_trained_on_the_loss_and_the_penalties(task):
    encoder = build_model(task, "--attention", "mixhead-b").encoder
    assert isinstance(encoder.layers[0].self_attn, MultiheadAttention)
    model = MaskedModel(encoder, len(task.source_dictionary)).double().train()
    tokens = sentences(task.source_dictionary, 3, 6, 4, left_pad=False)
    target = tokens.masked_fill(torch.arange(7) % 3 != 0, task.source_dictionary.pad())
    sample = {"net_input": {"src_tokens": tokens}, "target": target, "ntokens": 16, "nsentences": 3}
    padding = tokens.eq(task.source_dictionary.pad())
    criteria = (build_criterion(task, "--criterion", "masked_lm", *flags) for flags in (ALL, ()))
    assert_trains_as_spelled(model, sample, *criteria, padding, None)


@pytest.mark.parametrize(("preset", "weights"), [("mixhead-b", ALL), ("mhe-mul", ALL[2:])])
def test_checkpointed_activations_change_no_gradient_and_no_value(task, sample, preset, weights):
    criterion = build_criterion(task, *weights)
    results = []
    for extra in ((), ("--checkpoint-activations",)):
        model = build_model(task, "--attention", preset, *extra)
        loss, _, log = criterion(model, sample)
        results.append((loss.detach(), log, gradients(model, loss)))
        assert all(layer.regulariser is None for layer in criterion.check_model(model))
    (loss, log, expected), (other_loss, other_log, actual) = results
    torch.testing.assert_close(other_loss, loss)
    for name in log.keys() & WEIGHTS.keys():
        torch.testing.assert_close(other_log[name], log[name])
    assert_same(actual, expected)


def test_whatever_scales_the_loss_scales_the_penalties(task, sample):
    model, criterion = build_model(task, "--attention", "mixhead-b"), build_criterion(task, *ALL)
    once = gradients(model, criterion(model, sample)[0])
    scaled = gradients(model, criterion(model, sample)[0] * 8)
    assert_same(scaled, {name: 8 * gradient for name, gradient in once.items()})
    # fairseq multiplies the loss of a batch that does not count in place
    ignored = criterion(model, sample)[0]
    ignored *= 0
    assert not any(gradient.any() for gradient in gradients(model, ignored).values())


def test_accumulated_gradients_of_batches_are_those_of_one_batch(task):
    model, criterion = build_model(task, "--attention", "mixhead-b"), build_criterion(task, *ALL)
    whole = make_sample(task, 5, 3, 3, 5)

    def half(rows):
        inputs = {name: tensor[rows] for name, tensor in whole["net_input"].items()}
        return {"net_input": inputs, "target": whole["target"][rows], "ntokens": 10, "nsentences": 2}

    halves = [half(slice(0, 2)), half(slice(2, 4))]
    expected = gradients(model, criterion(model, whole)[0])
    first, second = (gradients(model, criterion(model, sample)[0]) for sample in halves)
    assert_same({name: first[name] + second[name] for name in first}, expected)


def test_logged_values_of_batches_and_workers_are_averaged_as_they_are_minimised():
    cls = CRITERION_REGISTRY["cross_entropy"]
    logs = [
        {"loss": 6.0, "ntokens": 2, "sample_size": 2, "row_space_penalty": torch.tensor(2 * 5.0)},
        {"loss": 6.0, "ntokens": 6, "sample_size": 6, "row_space_penalty": torch.tensor(6 * 1.0)},
    ]
    with metrics.aggregate() as aggregator:
        cls.reduce_metrics(logs)
    values = aggregator.get_smoothed_values()
    assert values["row_space_penalty"] == 2.0
    assert "column_space_penalty" not in values
    assert values["ppl"] == pytest.approx(2 ** (12 / 8 / 0.6931472), abs=0.01)


def test_without_weights_nothing_is_computed_and_fairseqs_own_loss_is_returned(task, sample, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError

    monkeypatch.setattr(regularised, "Penalties", never)
    model, criterion = build_model(task, "--attention", "mixhead-b"), build_criterion(task)
    loss, sample_size, log = criterion(model, sample)
    own_loss, own_size, own_log = CrossEntropyCriterion(task, sentence_avg=False)(model, sample)
    assert sample_size == own_size
    assert log == own_log
    assert_same(gradients(model, loss), gradients(model, own_loss), rtol=0, atol=0)


def test_penalties_leave_no_trace_once_they_are_done(task, sample):
    model, criterion = build_model(task, "--attention", "mixhead-b"), build_criterion(task, *ALL)
    before = set(model.state_dict())
    layers = criterion.check_model(model)
    with torch.no_grad():
        criterion(model, sample)
    assert all(layer.regulariser is None for layer in layers)
    loss, _, _ = criterion(model, sample)
    # another pass, between its forward and backward pass
    other = model(**sample["net_input"])[0].sum()
    plain = gradients(model, other)
    loss.backward()
    assert all(layer.regulariser is None for layer in layers)
    assert_same(gradients(model, model(**sample["net_input"])[0].sum()), plain, rtol=0, atol=0)
    with pytest.raises(TypeError):
        criterion(model, {**sample, "net_input": {}})
    assert all(layer.regulariser is None for layer in layers)
    assert set(copy.deepcopy(model).state_dict()) == before


def test_layers_that_are_dropped_add_nothing(task, sample):
    model = build_model(
        task, "--attention", "mixhead-b", "--encoder-layerdrop", "0.999999", "--decoder-layerdrop", "0.999999"
    )
    loss, _, log = build_criterion(task, *ALL)(model, sample)
    assert {name: log[name].item() for name in WEIGHTS} == dict.fromkeys(WEIGHTS, 0.0)
    loss.backward()


def test_a_loss_for_each_token_stays_the_criterions_own(task, sample):
    model = build_model(task, "--attention", "mixhead-b")
    flags = ("--criterion", "cross_entropy")
    losses = [build_criterion(task, *flags, *weights)(model, sample, reduce=False)[0] for weights in (ALL, ())]
    torch.testing.assert_close(*losses, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--row-space-penalty", "-1"], "--row-space-penalty -1"),
        (["--column-space-penalty", "nan"], "--column-space-penalty nan"),
        (["--mixing-orthogonality", "1"], "--mixing-orthogonality 1"),
        (["--mixing-orthogonality", "1", "--attention", "avghead"], "--mixing-orthogonality 1"),
        (["--arch", "transformer", "--row-space-penalty", "1"], "--row-space-penalty"),
    ],
)
def test_what_cannot_be_penalised_is_refused_in_one_line(flags, message):
    with pytest.raises(UserError, match=message) as refused:
        arguments("lowrank_transformer", *flags)
    assert "\n" not in str(refused.value)


def test_obsolete_criterions_have_no_regularisers(capsys):
    with pytest.raises(SystemExit):
        arguments("lowrank_transformer", "--criterion", "composite_loss", "--row-space-penalty", "1")
    assert "--underlying-criterion" in capsys.readouterr().err


def test_a_model_without_anything_to_penalise_is_refused_before_training(task):
    orthogonality, overlap = build_criterion(task, *ALL[:2]), build_criterion(task, *ALL[2:])
    unmixed = build_model(task, "--attention", "mha", "--no-cross-attention")
    cfg = convert_namespace_to_omegaconf(arguments("lowrank_transformer", "--cpu"))
    with pytest.raises(UserError, match="--mixing-orthogonality"):
        Trainer(cfg, task, unmixed, orthogonality)
    with pytest.raises(UserError, match="--row-space-penalty"):
        overlap.check_model(nn.Linear(2, 2))
    assert len(overlap.check_model(unmixed)) == 4


def test_penalties_of_pairs_are_refused_with_one_head(task):
    overlap = build_criterion(task, *ALL[2:])
    heads = ["--encoder-attention-heads", "1", "--decoder-attention-heads", "1"]
    with pytest.raises(ValueError, match="--row-space-penalty, --column-space-penalty"):
        overlap.check_model(build_model(task, "--attention", "mha", *heads))
    assert overlap.check_model(build_model(task, "--attention", "mha", *heads[:2]))  # the decoder has pairs


def test_criterions_registered_later_have_the_flags_too(task, sample):
    name = "cross_entropy_of_a_user"

    @criterions.register_criterion(name, dataclass=CrossEntropyCriterionConfig)
    class CrossEntropyOfAUser(CrossEntropyCriterion):
        pass

    try:
        criterion = build_criterion(task, "--criterion", name, *ALL)
        assert isinstance(criterion, CrossEntropyOfAUser)
        assert "row_space_penalty" in criterion(build_model(task, "--attention", "mixhead-a"), sample)[2]
    finally:
        del CRITERION_REGISTRY[name]


def test_a_criterion_keeps_weights_of_its_own(task, sample):
    name = "weighted_cross_entropy_of_a_user"

    @criterions.register_criterion(name, dataclass=CrossEntropyCriterionConfig)
    class WeightedCrossEntropyOfAUser(CrossEntropyCriterion):
        def __init__(self, task, sentence_avg):
            super().__init__(task, sentence_avg)
            self.weights = torch.tensor([0.5])

        def forward(self, model, sample, reduce=True):
            loss, *rest = super().forward(model, sample, reduce)
            return loss * self.weights.item(), *rest

    try:
        model = build_model(task, "--attention", "mixhead-a")
        own, usual = (build_criterion(task, "--criterion", one) for one in (name, "cross_entropy"))
        assert own(model, sample)[0].item() == pytest.approx(usual(model, sample)[0].item() / 2)
        penalised = build_criterion(task, "--criterion", name, *ALL)
        assert penalised.weights.equal(own.weights) and "row_space_penalty" in penalised(model, sample)[2]
    finally:
        del CRITERION_REGISTRY[name]


class Thrice(nn.Module):
    """A model that runs its decoder three times, and means their outputs, as models that edit a translation do."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **inputs):
        encoded = self.model.encoder(inputs["src_tokens"], src_lengths=inputs["src_lengths"])
        return sum(self.model.decoder(inputs["prev_output_tokens"], encoder_out=encoded)[0] for _ in range(3)) / 3, None

    def __getattr__(self, name):
        return super().__getattr__(name) if name == "model" else getattr(self.model, name)


def test_a_layer_that_runs_several_times_counts_once(task, sample):
    model = build_model(task, "--attention", "mixhead-b")
    criterion = build_criterion(task, *ALL)
    expected, _, log = criterion(model, sample)
    expected_gradients = gradients(model, expected)
    loss, _, other = criterion(Thrice(model), sample)
    torch.testing.assert_close(loss, expected)
    for name in WEIGHTS:
        torch.testing.assert_close(other[name], log[name])
    assert_same(gradients(model, loss), expected_gradients, rtol=1e-5, atol=1e-5)


def test_help_explains_the_flags_of_every_criterion():
    for name in (*CROSS_ENTROPIES, "adaptive_loss", "masked_lm", "sentence_prediction"):
        parser = argparse.ArgumentParser()
        CRITERION_REGISTRY[name].add_args(parser)
        text = " ".join(parser.format_help().split())
        assert all(f"--{flag.replace('_', '-')}" in text for flag in WEIGHTS), name
        assert "(Mixhead paper, eq. 16)" in text


# fmt: off
TRAIN = [
    "--arch", "lowrank_transformer", *SIZES, "--encoder-layers", "1", "--decoder-layers", "1", "--dropout", "0",
    "--attention", "mixhead-b", "--cpu", "--optimizer", "adam", "--lr", "0.02", "--max-tokens", "600", "--max-update", "20",
    "--seed", "3", "--num-workers", "0", "--no-progress-bar", "--validate-interval", "100", "--no-save",
]
# fmt: on


def test_penalties_fall_against_a_training_without_them_and_the_loss_is_logged_as_ever(
    fairseq_command, translation_data
):
    def train(*flags):
        log = fairseq_command("train", translation_data, *TRAIN, *flags)
        # of the last epoch and of the validation at its end
        train, valid = (
            re.findall(rf"^epoch .*{part}.*num_updates 20.*$", log, re.M)[-1] for part in ("wpb", "valid on")
        )
        values = [dict(re.findall(r"\| (\w+) ([-\d.]+)(?= |$)", line)) for line in (train, valid)]
        return [{name: float(value) for name, value in part.items()} for part in values]

    flags = [f"--{name.replace('_', '-')}" for name in WEIGHTS]
    without = train()
    # weights too small to matter show R as it is without regularisers
    watched = train(*(text for flag in flags for text in (flag, "1e-12")))
    for part, unwatched in zip(watched, without, strict=True):
        assert part.keys() - unwatched.keys() == WEIGHTS.keys()
        assert {part[name] == unwatched[name] for name in ("loss", "ppl")} == {True}
    penalised = train(*(text for flag in flags for text in (flag, "0.1")), "--bf16")
    for part, unpenalised in zip(penalised, watched, strict=True):
        assert all(part[name] < 0.8 * unpenalised[name] for name in WEIGHTS)
