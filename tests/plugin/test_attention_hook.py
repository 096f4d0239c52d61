"""The attention flags with fairseq's own architectures: refused in one line where they mean nothing, absent where not given."""

from argparse import Namespace

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq import models, options
from fairseq.criterions import CRITERION_REGISTRY, FairseqCriterion
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.modules import MultiheadAttention as StockAttention
from fairseq.sequence_generator import SequenceGeneratorWithAlignment
from fairseq.tasks import TASK_REGISTRY
from families import FAMILIES
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from tiny_transformer import SIZES, arguments, make_task, shake

from fairseq_lowrank.attention import MultiheadAttention
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.plugin import architectures, attention, foreign
from fairseq_lowrank.plugin.flags import MODEL_FLAGS, AttentionOptions, given_flags

BY_NAME = {family.arch: family for family in FAMILIES}
THREE = ["transformer_iwslt_de_en", "transformer_lm", "roberta_base"]
MIXHEAD = ("--attention", "mixhead-b")


def parse(task, *words):
    return options.parse_args_and_arch(options.get_training_parser(task), ["data", "--task", task, *words])


@pytest.mark.parametrize(
    ("task", "flags", "words"),
    [
        ("translation", ["--arch", "lstm"], ["--attention: lstm", "decoder", "(AttentionLayer)"]),
        ("translation", ["--arch", "lightconv"], ["--attention: lightconv", "cross", "(MultiheadAttention)"]),
        ("language_modeling", ["--arch", "lightconv_lm"], ["--attention: lightconv_lm"]),
        ("speech_to_text", ["--arch", "s2t_conformer"], ["encoder", "--attention-sites decoder,cross"]),
        ("audio_pretraining", ["--arch", "wav2vec2"], ["--attention: wav2vec2", "encoder", "(MultiheadAttention)"]),
        ("masked_lm", ["--arch", "roberta_base", "--mha-heads-to-keep", "2"], ["--mha-heads-to-keep 2"]),
        ("masked_lm", ["--arch", "roberta_base", "--mha-reg-scale-factor", "0.1"], ["--mha-reg-scale-factor 0.1"]),
        ("masked_lm", ["--arch", "roberta_base", "--attention-sites", "decoder"], ["--attention-sites decoder", "encoder"]),
        ("translation", ["--arch", "bart_base", "--embed-rank", "4"], ["--embed-rank 4", "bart_base"]),
        ("translation", ["--arch", "bart_base", "--encoder-attention-heads", "5"], ["embed_dim=768", "num_heads=5"]),
        ("masked_lm", ["--arch", "xmod_base_13", "--attention", "fixedhead"], ["'fixedhead'"]),
    ],
)  # fmt: skip
def test_parser_refuses_what_cannot_be_chosen(task, flags, words):
    with pytest.raises(UserError) as refused:
        parse(task, *MIXHEAD, *flags)
    assert all(word in str(refused.value) for word in words) and "\n" not in str(refused.value)


def test_no_setting_of_a_stock_model_chooses_attention():
    """A name of ours that fairseq uses too would refuse or change a stock training."""
    chosen = {}
    for name, model in models.ARCH_MODEL_REGISTRY.items():
        if not issubclass(model, attention.LowrankModel):
            chosen[name] = given_flags(architectures.default_arguments(name))
    for name, config in models.MODEL_DATACLASS_REGISTRY.items():
        if config is not None and not issubclass(models.MODEL_REGISTRY[name], attention.LowrankModel):
            chosen[name] = given_flags(config())
    assert "wav2vec2" in chosen and not any(chosen.values())
    args = parse("audio_pretraining", "--arch", "wav2vec2", "--latent-dim", "8", "--latent-vars", "4")
    config = models.MODEL_DATACLASS_REGISTRY["wav2vec2"].from_namespace(args)
    assert config.latent_dim == 8 and not given_flags(config)


def test_parser_leaves_methods_of_other_plugins_alone(monkeypatch):
    def check(condition, is_strict, msg):
        raise AssertionError

    monkeypatch.setattr(models.ARCH_MODEL_REGISTRY["transformer"], "check_args", check, raising=False)
    theirs = {"check_model": staticmethod(check), "check_args": staticmethod(check), "__module__": "other"}
    monkeypatch.setitem(TASK_REGISTRY, "translation", type("Task", (TASK_REGISTRY["translation"],), theirs))
    monkeypatch.setitem(CRITERION_REGISTRY, "cross_entropy", type("Criterion", (FairseqCriterion,), theirs))
    assert parse("translation", "--arch", "transformer", *MIXHEAD).attention == "mixhead-b"


def test_a_program_gets_a_value_error():
    args = arguments("lstm", "--encoder-embed-dim", 16, "--encoder-hidden-size", 16)
    args.attention = "mixhead-b"
    with pytest.raises(UserError, match="--attention: lstm"):
        make_task().build_model(args)


def test_models_of_spectrograms_are_in_the_table():
    rows = {name: architectures.coverage(name) for name in ("s2spect_transformer", "fastspeech2")}
    assert rows["s2spect_transformer"].sites == ("encoder", "decoder", "cross")
    assert rows["fastspeech2"].reason == "encoder: MultiheadAttention"


def test_speech_whose_postnet_reads_padding_is_that_of_fairseq():
    args = architectures.default_arguments("tts_transformer")
    args.output_frame_dim, args.prenet_dropout = 8, 0
    for name in ("encoder_embed_dim", "decoder_embed_dim", "encoder_ffn_embed_dim", "decoder_ffn_embed_dim"):
        setattr(args, name, 16)
    args.encoder_transformer_layers = args.decoder_transformer_layers = 2
    model = models.ARCH_MODEL_REGISTRY["tts_transformer"]
    task = architectures.stand_in_task(model, args, make_task().source_dictionary)
    lengths = torch.tensor([7, 4])
    batch = torch.tensor([[5, 6, 7], [8, 9, 5]]), torch.tensor([3, 3]), torch.randn(2, 7, 8)
    frames, state = [], None
    for flags in ({}, {"attention": "mha"}, {"attention": "mixhead-b"}):
        built = models.build_model(Namespace(**vars(args) | flags), task).eval()
        state = state or built.state_dict()
        built.load_state_dict(state)
        frames.append(built(*batch, target_lengths=lengths)[0])
    for other in frames[1:]:
        torch.testing.assert_close(other, frames[0], atol=3e-5, rtol=1e-4)


def test_base_layers_get_the_outputs_at_padding_that_fairseq_computes(monkeypatch):
    """They share out the tokens of a batch to the workers, padding too."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(torch.distributed, "all_to_all_single", lambda output, given, **_: output.copy_(given))
    task = make_task()
    flags = ["transformer_iwslt_de_en", *SIZES, "--base-layers", 1]
    source, target = torch.tensor([[5, 6, 7, 2], [8, 9, 2, 1]]), torch.tensor([[2, 5, 6, 7], [2, 8, 1, 1]])
    stock, ours = (task.build_model(arguments(*flags, *more)).eval() for more in ([], ["--attention", "mha"]))
    ours.load_state_dict(shake(stock).state_dict())
    with torch.no_grad():
        found = [model(source, None, target)[1]["inner_states"][-1] for model in (stock, ours)]
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-4)


def test_sites_of_ours_are_chosen_beside_those_a_model_makes_itself():
    args = architectures.default_arguments("s2t_conformer")
    args.attention, args.attention_sites = "mixhead-b", "decoder,cross"
    model = architectures.build_small(models.ARCH_MODEL_REGISTRY["s2t_conformer"], args)
    assert set(foreign.attention_by_site(model)) == {"encoder"}
    assert attention.our_sites(model) == {"decoder", "cross"}


def test_model_built_past_fairseqs_function_is_refused():
    """Its flags would be ignored in silence."""
    args = arguments("transformer", *SIZES, *MIXHEAD)
    with pytest.raises(UserError, match="--attention"):
        models.ARCH_MODEL_REGISTRY["transformer"].build_model(args, make_task())


def test_options_are_resolved_once_per_build(monkeypatch):
    resolved, resolve = [], AttentionOptions.from_args
    parsed = [arguments(arch, *SIZES, *MIXHEAD) for arch in ("transformer", "transformer_align", "lowrank_transformer")]
    monkeypatch.setattr(AttentionOptions, "from_args", lambda args: resolved.append(args) or resolve(args))
    for args in parsed:
        models.build_model(args, make_task())
    assert len(resolved) == 3


@pytest.mark.parametrize("arch", ["lowrank_transformer", "lowrank_bert_base"])
def test_model_of_ours_has_our_attention_however_it_is_built(arch):
    cls = models.ARCH_MODEL_REGISTRY[arch]
    args = architectures.default_arguments(arch)
    task = architectures.stand_in_task(cls, args, architectures.SizedDictionary(9))
    model = architectures.build_on_meta(cls, args, task)
    assert attention.our_sites(model) and not foreign.attention_by_site(model)


def test_architectures_builds_transformer_xl(capsys):
    assert architectures.coverage("lowrank_transformer_xl_wiki103").sites == ("decoder",)


def test_no_flag_leaves_nothing_in_the_arguments_and_fairseq_builds_its_own():
    for arch in ("transformer_iwslt_de_en", "bart_base"):
        args = arguments(arch, *SIZES)
        assert not MODEL_FLAGS.keys() & vars(args).keys()
        model = make_task().build_model(args)
        assert not any(isinstance(module, MultiheadAttention) for module in model.modules())
        assert not {"extract_features", "buffered_future_mask", "need_alignment"} & vars(model.decoder).keys()
        assert all(layer.need_attn for layer in model.decoder.layers)


@pytest.mark.parametrize("arch", THREE)
def test_a_stock_model_of_one_seed_is_the_same_after_one_with_our_attention(arch):
    family = BY_NAME[arch]
    first, _, second = family.build(), family.build(*MIXHEAD), family.build()
    assert all(torch.equal(tensor, second.state_dict()[name]) for name, tensor in first.state_dict().items())
    assert torch.equal(family.output(first), family.output(second))


def build_around(encoder_flags, *flags):
    """A model that builds another, with a configuration of the other's own, as speech models build their encoders."""

    class Outer(models.BaseFairseqModel):
        @classmethod
        def build_model(cls, args, task):
            model = cls()
            model.encoder = task.build_model(arguments("transformer", *SIZES, *encoder_flags)).encoder
            model.decoder = models.ARCH_MODEL_REGISTRY["transformer"].build_model(args, task).decoder
            return model

    args, task = arguments("transformer", *SIZES, *flags), make_task()
    return attention.build_with_chosen_attention(Outer, args, task, lambda args: Outer.build_model(args, task))


def test_what_is_chosen_for_one_model_reaches_none_inside_it():
    model = build_around([], *MIXHEAD, "--attention-sites", "decoder,cross")
    assert isinstance(model.decoder.layers[0].self_attn, MultiheadAttention)
    assert isinstance(model.encoder.layers[0].self_attn, StockAttention)


@pytest.mark.parametrize("inside", [[], ["--attention", "mha"]])
def test_another_attention_of_a_model_inside_is_refused(inside):
    with pytest.raises(UserError, match=r"own encoder attention .* Add --attention-sites decoder,cross\."):
        build_around(inside, *MIXHEAD)
    assert build_around(MIXHEAD, *MIXHEAD)


def test_hydras_store_and_the_dataclasses_hold_the_flags():
    node = ConfigStore.instance().load("model/transformer_lm.yaml").node
    assert MODEL_FLAGS.keys() <= set(node)
    family = BY_NAME["transformer_lm"]
    words = ["data", "--task", family.task, "--arch", family.arch, *family.flags]
    args = options.parse_args_and_arch(options.get_training_parser(family.task), words)
    config = convert_namespace_to_omegaconf(args).model
    config = OmegaConf.merge(config, {"attention": "mixhead-b", "head_dim": 6})
    model = models.build_model(config, family._task(args))
    layer = model.decoder.layers[0].self_attn
    assert (layer.spec.mixing, layer.head_dim) == ("positionwise", 6)


def test_a_hydra_configuration_builds_a_model_without_a_dataclass():
    args = arguments("transformer_iwslt_de_en", *SIZES, *MIXHEAD)
    config = OmegaConf.create({name: value for name, value in vars(args).items() if not callable(value)})
    OmegaConf.set_struct(config, True)
    model = models.build_model(config, make_task())
    assert model.encoder.layers[0].self_attn.spec.mixing == "positionwise"


@pytest.mark.parametrize("arch", ["transformer_iwslt_de_en", "transformer_lm", "bart_base"])
def test_activation_checkpoints_change_no_gradient(arch):
    family, gradients = BY_NAME[arch], []
    for flags in ((), ("--checkpoint-activations",)):
        model = shake(family.build(*MIXHEAD, *flags)).train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout) or hasattr(module, "p"):
                module.p = 0.0
        family.output(model).pow(2).mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    plain, checkpointed = gradients
    assert plain.keys() == checkpointed.keys() and any("mixing" in name for name in plain)
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, atol=1e-4, rtol=1e-3)


def test_a_search_of_a_model_that_was_only_built_has_fairseqs_weights():
    """Such as --eval-bleu, or a program; --eval-bleu-args may ask for alignments."""
    task = make_task()
    dictionary = task.source_dictionary
    stock, ours = (
        task.build_model(arguments("transformer_iwslt_de_en", *SIZES, *flags)).eval()
        for flags in ([], ["--attention", "mha"])
    )
    ours.load_state_dict(shake(stock).state_dict())
    source = torch.tensor([[dictionary.pad(), 5, 6, 2], [7, 8, 9, 2]])
    sample = {"net_input": {"src_tokens": source, "src_lengths": torch.tensor([3, 4])}}
    found = []
    for model in (stock, ours):
        options = {"beam_size": 2, "max_len_a": 0, "max_len_b": 4}
        search = SequenceGeneratorWithAlignment([model], dictionary, print_alignment="soft", **options)
        found.append([hypothesis for best in search.generate([model], sample) for hypothesis in best])
    for expected, hypothesis in zip(*found, strict=True):
        torch.testing.assert_close(hypothesis["attention"], expected["attention"], atol=1e-6, rtol=0)
        assert len(hypothesis["alignment"]) == len(expected["alignment"]) > 0


@pytest.mark.parametrize("arch", THREE)
def test_quantisation_noise_and_layer_drop_reach_the_layers(arch):
    family = BY_NAME[arch]
    side = "decoder" if family.sites == ("decoder",) else "encoder"
    model = family.build(
        *MIXHEAD, "--quant-noise-pq", 0.5, "--quant-noise-pq-block-size", 4, f"--{side}-layerdrop", 0.5
    )
    layers = [module for module in model.modules() if isinstance(module, MultiheadAttention)]
    for layer in layers:
        assert all(len(getattr(layer, f"{name}_proj")._forward_pre_hooks) == 1 for name in ("q", "k", "v", "out"))
    model.train()
    assert len({family.output(model).sum().item() for _ in range(8)}) > 1


def test_a_low_rank_embedding_is_for_every_language_model():
    family = BY_NAME["transformer_lm_gpt2_tiny"]
    for flags, kind in (((), StockAttention), (MIXHEAD, MultiheadAttention)):
        model = family.build("--embed-rank", 3, *flags)
        assert model.decoder.embed_tokens.weight.shape[1] == 3
        assert isinstance(model.decoder.layers[0].self_attn, kind)


def test_the_rates_and_kinds_of_flags_are_declared_once():
    parser = options.get_training_parser("language_modeling")
    words = ["data", "--task", "language_modeling", "--arch", "transformer_lm", *MIXHEAD]
    args = options.parse_args_and_arch(parser, words)
    assert isinstance(args, Namespace) and args.attention == "mixhead-b"
    declared = [option for action in parser._actions for option in action.option_strings]
    for name in MODEL_FLAGS:
        assert declared.count(f"--{name.replace('_', '-')}") == 1
