"""The translation models: fairseq's own but for attention, and sound in decoding with every kind of attention."""

import itertools
import math

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.hub_utils import GeneratorHubInterface
from fairseq.modules import FairseqDropout
from fairseq.sequence_generator import SequenceGenerator
from tiny_transformer import SIZES, arguments, build, make_task, preset_flags, sentences, shake

from fairseq_lowrank.attention import AXES, PRESETS, MultiheadAttention
from fairseq_lowrank.messages import StateDictMismatch

IWSLT = "transformer_iwslt_de_en"
KINDS = list(itertools.product(PRESETS, AXES["activation"]))
# Methods that read positions, or that options change.
KINDS += [
    ("alibi", "softmax"),
    ("t5-bias", "softmax"),
    ("sinks", "sigsoftmax"),
    ("mla", "softmax", "--rotary-dim", "2", "--attention-sites", "encoder,decoder"),
    ("diff", "softmax", "--diff-version", "1"),
]


def lowrank(preset="mha", *flags, **options):
    return build(f"lowrank_{IWSLT}", *SIZES, *preset_flags(preset), *flags, **options)


@pytest.fixture(scope="module")
def task():
    return make_task()


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def model(request, task):
    """A model of a preset and an activation, away from its start, where float32 would add rounding of its own."""
    preset, activation, *flags = request.param
    return shake(lowrank(preset, "--attention-activation", activation, *flags, task=task)).double()


@pytest.fixture(scope="module")
def source(task):
    return sentences(task.source_dictionary, 5, 2, 4, left_pad=True)


@pytest.fixture(scope="module")
def target(task):
    """Decoder inputs: </s> first, then the words."""
    return sentences(task.target_dictionary, 3, 6, 4, left_pad=False).roll(1, dims=1)


def encode(model, source):
    return model.encoder(source, source.ne(model.encoder.padding_idx).sum(dim=1))


def generate(model, task, source, **options):
    """The hypotheses of a beam search, best first, for every sentence."""
    options = {"beam_size": 3, "max_len_a": 0, "max_len_b": 8, **options}
    generator = SequenceGenerator([model], task.target_dictionary, **options)
    lengths = source.ne(task.source_dictionary.pad()).sum(dim=1)
    return generator.generate([model], {"net_input": {"src_tokens": source, "src_lengths": lengths}})


def assert_same_hypotheses(some, others):
    for hypotheses, expected in zip(some, others, strict=True):
        for hypothesis, other in zip(hypotheses, expected, strict=True):
            assert hypothesis["tokens"].tolist() == other["tokens"].tolist()
            torch.testing.assert_close(hypothesis["positional_scores"], other["positional_scores"], atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["transformer", IWSLT, "transformer_wmt_en_de", "transformer_wmt_en_de_big"])
def test_an_architecture_is_its_stock_counterpart(name, task):
    ours, stock = vars(arguments(f"lowrank_{name}")), vars(arguments(name))
    assert {key: value for key, value in ours.items() if key in stock} == {**stock, "arch": f"lowrank_{name}"}
    with torch.device("meta"):
        ours, stock = build(f"lowrank_{name}", task=task), build(name, task=task)
    shapes = {key: tensor.shape for key, tensor in stock.state_dict().items()}
    assert {key: tensor.shape for key, tensor in ours.state_dict().items()} == shapes
    attentions = [module for module in ours.modules() if isinstance(module, MultiheadAttention)]
    assert len(attentions) == 18


@pytest.mark.parametrize(
    ("layers", "embed_dim", "heads", "mha", "mhe"),
    [
        *((6, 512, 8, 18.87, 6.52), (6, 512, 16, 18.87, 5.63), (6, 512, 4, 18.87, 8.29), (4, 512, 8, 12.58, 4.34)),
        *((8, 512, 8, 25.17, 8.69), (6, 768, 12, 42.47, 13.31), (6, 1024, 16, 75.50, 22.47)),
    ],
)
def test_attention_has_the_published_number_of_parameters(task, layers, embed_dim, heads, mha, mhe):
    """MHE poster, millions without biases."""
    sizes = [
        f"--{side}-{what}" for side in ("encoder", "decoder") for what in ("layers", "embed-dim", "attention-heads")
    ]
    flags = [text for pair in zip(sizes, 2 * (layers, embed_dim, heads), strict=True) for text in pair]
    for preset, millions in (("mha", mha), ("mhe-add", mhe), ("mhe-mul", mhe)):
        with torch.device("meta"):
            model = build("lowrank_transformer", *flags, *preset_flags(preset), "--no-attention-bias", task=task)
        attentions = [module for module in model.modules() if isinstance(module, MultiheadAttention)]
        count = sum(parameter.numel() for module in attentions for parameter in module.parameters())
        assert round(count / 1e6, 2) == millions


@pytest.mark.parametrize("preset", ["mha", "mixhead-a", "mixhead-b"])
def test_the_same_seed_gives_the_same_start_as_stock_fairseq(preset, task):
    sizes = [*SIZES, "--encoder-embed-dim", 24]
    stock = build(IWSLT, *sizes, task=task).state_dict()
    ours = build(f"lowrank_{IWSLT}", *sizes, *preset_flags(preset), task=task).state_dict()
    added = {key for key in ours if ".mixing." in key}
    assert ours.keys() - added == stock.keys()
    assert bool(added) == (preset != "mha")
    for key, tensor in stock.items():
        assert torch.equal(ours[key], tensor), key
    for key in added:
        start = torch.eye(4) if key.endswith(".weight") else torch.zeros(len(ours[key]), 4)
        assert torch.equal(ours[key], start)


def test_a_model_of_the_same_seed_is_the_same():
    first, second = (lowrank("mixhead-random").state_dict() for _ in range(2))
    assert all(torch.equal(tensor, second[key]) for key, tensor in first.items())


@pytest.mark.parametrize("preset", ["mixhead-a", "mixhead-b"])
def test_a_mixhead_model_starts_as_the_standard_one(preset, task, source, target):
    mixhead, standard = lowrank(preset, task=task), lowrank(task=task)
    outputs = (model(source, None, target)[0] for model in (mixhead, standard))
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=0)


def test_the_decoder_sees_no_future_and_builds_no_mask(model, task, source, target):
    encoded = encode(model, source)
    expected = model.decoder(target, encoded)[0]
    cut = 3
    changed = target.clone()
    changed[:, cut:] = task.target_dictionary.nspecial
    outputs = model.decoder(changed, encoded)[0]
    torch.testing.assert_close(outputs[:, :cut], expected[:, :cut], atol=1e-5, rtol=0)
    assert not torch.allclose(outputs[:, cut:], expected[:, cut:], atol=1e-3)
    # it would be as large as the longest target squared
    assert model.decoder._future_mask.numel() == 0


def test_step_by_step_scores_are_those_of_the_whole_target(model, task, source):
    """Beam search keeps keys and values and reorders them; each hypothesis is scored again in one pass."""
    checked = 0
    for sentence, hypotheses in zip(source, generate(model, task, source), strict=True):
        for hypothesis in hypotheses:
            tokens = hypothesis["tokens"][None]
            words = sentence[sentence.ne(task.source_dictionary.pad())][None]
            output = model(words, torch.tensor([words.size(1)]), tokens.roll(1, dims=1))
            log_probs = model.get_normalized_probs(output, log_probs=True).gather(2, tokens[..., None])[0, :, 0]
            torch.testing.assert_close(hypothesis["positional_scores"], log_probs, atol=5e-5, rtol=0)
            checked += 1
    assert checked == 9


def test_hypotheses_depend_on_neither_batch_order_nor_padding(model, task, source):
    together = generate(model, task, source)
    order = torch.tensor([2, 0, 1])
    assert_same_hypotheses(generate(model, task, source[order]), [together[i] for i in order])
    padded = torch.nn.functional.pad(source, (3, 0), value=task.source_dictionary.pad())
    assert_same_hypotheses(generate(model, task, padded), together)
    alone = [generate(model, task, sentence[sentence.ne(task.source_dictionary.pad())][None])[0] for sentence in source]
    assert_same_hypotheses(alone, together)


def test_outputs_do_not_depend_on_the_padding_of_targets(model, task, source, target):
    padded = torch.nn.functional.pad(target, (0, 2), value=task.target_dictionary.pad())
    outputs = (model(source, None, tokens)[0][:, : target.size(1)] for tokens in (target, padded))
    real = target.ne(task.target_dictionary.pad())
    some, others = (output[real] for output in outputs)
    torch.testing.assert_close(some, others, atol=1e-5, rtol=0)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_parameter_learns(preset, task, source, target):
    """Through activation checkpointing, with the gradients of a model without it."""
    gradients = []
    for flags in ((), ("--checkpoint-activations",)):
        model = shake(lowrank(preset, "--dropout", 0, *flags, task=task)).train()
        model(source, None, target)[0].pow(2).mean().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    plain, checkpointed = gradients
    assert plain.keys() == checkpointed.keys()
    for name, gradient in plain.items():
        assert gradient is not None and gradient.isfinite().all(), name
        torch.testing.assert_close(checkpointed[name], gradient, atol=1e-5, rtol=1e-4)
    # an additive key embedding cancels in softmax; key biases do too
    silent = {name for name, gradient in plain.items() if gradient.abs().max() < 1e-7}
    assert all(name.endswith(("k_proj.bias", "head_embeddings.key")) for name in silent), silent


def test_layers_know_their_depth(task):
    model = lowrank("diff", "--diff-version", "1", task=task)
    for layers, name in (
        (model.encoder.layers, "self_attn"),
        (model.decoder.layers, "self_attn"),
        (model.decoder.layers, "encoder_attn"),
    ):
        starts = [getattr(layer, name).head_output.initial.item() for layer in layers]
        assert starts == pytest.approx([0.8 - 0.6 * math.exp(-0.3 * index) for index in range(len(layers))])


def test_layer_drop_drops_whole_layers(task, source, target):
    model = lowrank("mixhead-b", "--encoder-layerdrop", 0.5, "--decoder-layerdrop", 0.5, "--dropout", 0, task=task)
    shake(model).train()
    outputs = {model(source, None, target)[0].sum().item() for _ in range(20)}
    assert 1 < len(outputs) <= 16


def test_cross_self_attention_has_encoder_states_before_the_causal_keys(task, source, target):
    flags = ["--cross-self-attention", "--no-cross-attention", "--share-decoder-input-output-embed"]
    for preset in ("mixhead-b", "mhe-add", "skv"):
        model = shake(lowrank(preset, *flags, task=task))
        encoded = encode(model, source)
        changed = target.clone()
        changed[:, 3:] = task.target_dictionary.nspecial
        some, others = (model.decoder(tokens, encoded)[0][:, :3] for tokens in (target, changed))
        torch.testing.assert_close(some, others, atol=1e-5, rtol=0)
        hypothesis = generate(model, task, source[:1])[0][0]
        output = model(source[:1], None, hypothesis["tokens"][None].roll(1, dims=1))
        log_probs = model.get_normalized_probs(output, log_probs=True)[0]
        expected = log_probs.gather(1, hypothesis["tokens"][:, None])[:, 0]
        torch.testing.assert_close(hypothesis["positional_scores"], expected, atol=5e-5, rtol=0)


def computed_weights(model, calls):
    """Append the name of every attention layer whose weights are asked for to ``calls``."""

    def note(name):
        return lambda module, args, kwargs: calls.append(name) if kwargs["need_weights"] else None

    for name, module in model.named_modules():
        if isinstance(module, MultiheadAttention):
            module.register_forward_pre_hook(note(name), with_kwargs=True)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_no_attention_weights_are_computed_where_nothing_reads_them(mode, task, source, target):
    model, calls = getattr(lowrank("mhe-mul", task=task), mode)(), []
    computed_weights(model, calls)
    assert model(source, None, target)[1]["attn"] == [None]
    assert calls == []


@pytest.mark.parametrize("flags", [["--print-alignment"], []])
def test_alignments_read_the_weights_of_the_last_layer(flags, task, source, target):
    from fairseq import options

    model, calls = shake(lowrank("mixhead-b", task=task)), []
    args = options.parse_args_and_arch(options.get_generation_parser(), ["data", "--path", "x", *flags])
    model.prepare_for_inference_(convert_namespace_to_omegaconf(args))
    computed_weights(model, calls)
    (weights,) = model(source, None, target)[1]["attn"]
    if flags:
        assert calls == ["decoder.layers.1.encoder_attn"]
        assert weights.shape == (3, target.size(1), source.size(1))
        padding = source.eq(task.source_dictionary.pad())
        assert not weights.masked_select(padding[:, None]).any()
    else:
        assert calls == [] and weights is None


def test_a_program_gets_attention_and_alignments_with_its_hypotheses(task, source):
    model = shake(lowrank("mixhead-b", task=task))
    hub = GeneratorHubInterface(convert_namespace_to_omegaconf(arguments(f"lowrank_{IWSLT}", *SIZES)), task, [model])
    sentence = source[0]
    best = hub.generate([sentence], beam=2, max_len_b=5)[0][0]
    assert best["attention"].shape == (len(sentence), len(best["tokens"]))
    aligned = hub.generate([sentence], beam=2, max_len_b=5, print_alignment="hard")[0][0]["alignment"]
    assert all(0 <= place < len(sentence) for place, _ in aligned)


def test_dropouts_are_retained_by_the_names_of_stock_fairseq(task):
    flags = [*SIZES, "--dropout", 0.1]
    names = [
        {name: module.module_name for name, module in built.named_modules() if isinstance(module, FairseqDropout)}
        for built in (build(f"lowrank_{IWSLT}", *flags, task=task), build(IWSLT, *flags, task=task))
    ]
    assert names[0] == names[1]
    assert len(names[0]) > 10


def test_alignment_training_gets_weights(source, target):
    task = make_task()
    task.cfg.load_alignments = True
    weights = lowrank("mha", task=task)(source, None, target)[1]["attn"][0]
    torch.testing.assert_close(weights.sum(dim=2), torch.ones(weights.shape[:2]))


@pytest.mark.parametrize("preset", ["mha", "mixhead-a", "mixhead-b", "mixhead-random", "avghead", "gain"])
def test_a_stock_state_lacks_only_mixing_which_keeps_its_start(preset, task):
    stock, ours = shake(build(IWSLT, *SIZES, task=task)), lowrank(preset, task=task)
    start = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    ours.load_state_dict(stock.state_dict(), strict=True)
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, start[name] if ".mixing." in name else stock.state_dict()[name]), name


def test_layers_kept_of_a_stock_state_get_mixing(task):
    stock = shake(build(IWSLT, *SIZES, "--encoder-layers", 4, task=task)).state_dict()
    args = arguments(f"lowrank_{IWSLT}", *SIZES, "--encoder-layers", 4, *preset_flags("mixhead-b"))
    args.encoder_layers_to_keep, args.decoder_layers_to_keep = "1,3", "1"
    ours = task.build_model(args)
    ours.load_state_dict(stock, strict=True, model_cfg=args)
    assert (len(ours.encoder.layers), len(ours.decoder.layers)) == (2, 1)
    for kept, old in (("encoder.layers.0", "encoder.layers.1"), ("encoder.layers.1", "encoder.layers.3")):
        assert torch.equal(ours.state_dict()[f"{kept}.fc1.weight"], stock[f"{old}.fc1.weight"])
    assert torch.equal(ours.encoder.layers[1].self_attn.mixing.weight, torch.eye(4))


@pytest.mark.parametrize(
    ("trained", "built", "axis", "saved", "current"),
    [
        ("mhe-mul", "mha", "projection", "head-embedding-mul", "independent"),
        ("mha", "mhe-mul", "projection", "independent", "head-embedding-mul"),
        ("mixhead-b", "mixhead-a", "mixing", "positionwise", "static"),
        ("mhe-add", "mhe-mul", "projection", "head-embedding-add", "head-embedding-mul"),
        ("mixhead-a", "avghead", "mixing", "static", "average"),
        ("mha", "avghead", "mixing", "none", "average"),
        ("gain", "avghead", "mixing", "diagonal", "average"),
        ("mqa", "mha", "projection", "multi-query", "independent"),
    ],
)
def test_load_refuses_a_state_of_another_attention(trained, built, axis, saved, current, task):
    with pytest.raises(StateDictMismatch) as error:
        lowrank(built, task=task).load_state_dict(lowrank(trained, task=task).state_dict(), strict=True)
    assert error.value.name == "encoder.layers.0.self_attn"
    assert (error.value.saved, error.value.current) == ({axis: saved}, {axis: current})
    assert len(str(error.value)) < 400


def test_a_saved_state_of_other_heads_is_refused_though_its_shapes_fit(task, tmp_path):
    torch.save({"model": lowrank("mha", task=task).state_dict()}, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)["model"]
    lowrank("mixhead-a", task=task).load_state_dict(state, strict=True)
    eight = ("--encoder-attention-heads", 8, "--decoder-attention-heads", 8)
    with pytest.raises(StateDictMismatch) as error:
        lowrank("mha", *eight, task=task).load_state_dict(state, strict=True)
    assert (error.value.saved["num_heads"], error.value.current["num_heads"]) == (4, 8)
