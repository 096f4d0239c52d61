"""Head mixing in models of transformers: the same outputs at the identity, the formula after it, caches, saving, training."""

import copy

import pytest
import torch
import transformers
from transformers import AttentionInterface, AutoModelForMaskedLM
from transformers_families import BART, CAUSAL, FAMILIES, GENERATING, SIZES, TOKENS, build

from fairseq_lowrank import huggingface
from fairseq_lowrank.huggingface import (
    apply_attention,
    attention_modules,
    load_attention,
    mixing_state,
    save_attention,
    supported,
)
from fairseq_lowrank.huggingface.added import inputs_of
from fairseq_lowrank.huggingface.choice import usable_presets
from fairseq_lowrank.huggingface.models import small_model
from fairseq_lowrank.messages import UserError


def inputs(family: str, left: bool = False) -> dict:
    """Two sequences, the second with three positions of padding."""
    generator = torch.Generator().manual_seed(2)
    if family == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    tokens = torch.randint(2, 100, (2, 10), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, slice(None, 3) if left else slice(7, None)] = 0
    given = {"input_ids": tokens * mask, "attention_mask": mask}
    if family in ("bart", "marian", "t5"):
        given["decoder_input_ids"] = torch.randint(2, 100, (2, 6), generator=generator)
    return given


def real(family: str, logits: torch.Tensor, left: bool = False) -> torch.Tensor:
    """The outputs at positions that are no padding."""
    if family in ("vit", "bart", "marian", "t5"):
        return logits
    return torch.cat([logits[0], logits[1, 3:] if left else logits[1, :7]])


def sites_of(preset: str) -> tuple[str, ...]:
    return ("encoder", "decoder") if preset in ("xsa", "t5-bias") else huggingface.SITES


@torch.no_grad()
def add_noise(model, scale: float = 0.3) -> None:
    generator = torch.Generator().manual_seed(3)
    for tensor in mixing_state(model).values():
        tensor.add_(scale * torch.randn(tensor.shape, generator=generator))


@torch.no_grad()
def logits_of(model, family: str, left: bool = False) -> torch.Tensor:
    given = inputs(family, left)
    if family == "vit":
        given["pixel_values"] = given["pixel_values"].to(model.dtype)
    return real(family, model(**given).logits, left)


@pytest.mark.parametrize("left", [False, True], ids=["right-padding", "left-padding"])
@pytest.mark.parametrize("preset", ["mixhead-b", "talking-heads", "gated", "dcmha", "xsa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_are_kept_at_the_identity(family, preset, left):
    model = build(family)
    before = logits_of(model, family, left)
    apply_attention(model, preset, sites=sites_of(preset))
    assert mixing_state(model)
    torch.testing.assert_close(logits_of(model, family, left), before, atol=1e-5, rtol=0)


def brute_force(
    module, query, key, value, attention_mask, *, scaling, softcap=None, s_aux=None, position_bias=None, **_
):
    """The formulas of the docstrings, one head at a time in float64."""
    heads, groups, keys, dtype = query.size(1), key.size(1), key.size(2), query.dtype
    query, key, value = query.double(), key.double(), value.double()
    if attention_mask is None and module.is_causal and query.size(2) > 1:
        attention_mask = torch.ones(query.size(2), keys, dtype=torch.bool).tril()[None, None]
    scores = []
    for head in range(heads):
        score = query[:, head] @ key[:, head * groups // heads].mT * scaling
        scores.append(score if softcap is None else softcap * torch.tanh(score / softcap))
    inputs = inputs_of(module)
    before = matrices(getattr(module, "score_mixing", None), query, inputs)
    scores = [sum(before[j, i] * scores[j] for j in range(heads)) for i in range(heads)]
    patterns = []
    if (sinks := getattr(module, "attention_sinks", None)) is not None:
        s_aux = sinks.weight
    if (bias := getattr(module, "score_bias", None)) is not None:
        last = torch.arange(keys - query.size(2), keys)
        added = bias.bias((torch.arange(keys) - last[:, None]).view(1, -1))[0].unflatten(-1, (-1, keys))
        position_bias = added[None] + (0 if position_bias is None else position_bias)
    for head, score in enumerate(scores):
        if position_bias is not None:
            score = score + position_bias[:, head].double()
        if attention_mask is not None:
            visible = attention_mask[:, min(head, attention_mask.size(1) - 1)]
            score = score.masked_fill(~visible, float("-inf")) if visible.dtype == torch.bool else score + visible
        if s_aux is not None:
            score = torch.cat([score, s_aux[head].double().expand(*score.shape[:2], 1)], dim=-1)
        patterns.append(score.softmax(dim=-1).nan_to_num(0.0)[..., :keys])
    after = matrices(getattr(module, "mixing", None), query, inputs)
    mixed = [sum(after[j, i] * patterns[j] for j in range(heads)) for i in range(heads)]
    outputs = [mixed[i] @ value[:, i * groups // heads] for i in range(heads)]
    if (output := getattr(module, "head_output", None)) is not None:
        weight = output.weight.double()
        for i in range(heads):
            if output.name == "gate":
                size = value.size(3)
                outputs[i] = outputs[i] * 2 * torch.sigmoid(inputs.double() @ weight[i * size : (i + 1) * size].T)
            else:
                own = value[:, i * groups // heads]
                own = (own / own.norm(dim=-1, keepdim=True)).nan_to_num(0.0)
                outputs[i] = outputs[i] - torch.tanh(weight[i]) * (outputs[i] * own).sum(dim=-1, keepdim=True) * own
    return torch.stack(outputs, dim=2).to(dtype), None


def matrices(mixing, query, inputs):
    """M[j, i] of each query, ``[H, H, B, T, 1]``, in float64."""
    batch, heads, length, _ = query.shape
    matrix = torch.eye(heads, dtype=torch.double).view(heads, heads, 1, 1).expand(-1, -1, batch, length).clone()
    if mixing is not None and hasattr(mixing, "diagonal"):
        first, second, diagonal = (
            inputs.double() @ w.double().T for w in (mixing.first, mixing.second, mixing.diagonal)
        )
        for j in range(heads):
            for i in range(heads):
                for rank in range(first.size(-1) // heads):
                    matrix[j, i] += first[..., rank * heads + j] * second[..., rank * heads + i]
            matrix[j, j] += torch.tanh(diagonal[..., j])
    elif mixing is not None:
        matrix = mixing.weight.double().view(heads, heads, 1, 1).expand(-1, -1, batch, length).clone()
        if mixing.query_weight is not None:
            for j in range(heads):
                for i in range(heads):
                    matrix[j, i] += query[:, j] @ mixing.query_weight[:, i].double()
    return matrix[..., None]


@pytest.mark.parametrize("preset", ["mixhead-b", "talking-heads", "gated", "dcmha", "xsa", "t5-bias", "sinks"])
@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_outputs_equal_the_formula(family, preset, monkeypatch):
    if (family, preset) == ("gpt-oss", "sinks"):
        return  # it has sinks
    # gpt-oss multiplies its experts' matrices in float32 at most; norms of other families round to it on the way
    dtype = torch.float32 if family == "gpt-oss" else torch.float64
    # the formula gets rotated queries, as the function of transformers does
    model = apply_attention(build(family), preset, sites=sites_of(preset), mixing_queries="rotated").to(dtype)
    add_noise(model)
    ours = logits_of(model, family)
    monkeypatch.setitem(AttentionInterface._global_mapping, huggingface.IMPLEMENTATION, brute_force)
    torch.testing.assert_close(ours, logits_of(model, family), atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("family", CAUSAL)
def test_causal_models_do_not_see_the_future(family):
    model = apply_attention(build(family), "mixhead-b")
    add_noise(model)
    tokens = inputs(family)["input_ids"][:1]
    changed = tokens.clone()
    changed[:, -1] = 50
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits[:, :-1], model(input_ids=changed).logits[:, :-1])


@pytest.mark.parametrize("preset", ["mixhead-b", "xsa", "t5-bias"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", GENERATING)
def test_cached_generation_equals_the_full_pass(family, cache, preset):
    model = apply_attention(build(family), preset, sites=sites_of(preset))
    add_noise(model)
    given = inputs(family, left=True)
    given.pop("decoder_input_ids", None)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "output_scores": True}
    options["return_dict_in_generate"] = True
    full = model.generate(**given, **options, use_cache=False)
    cached = model.generate(**given, **options, use_cache=True, cache_implementation=cache)
    assert torch.equal(full.sequences, cached.sequences)
    torch.testing.assert_close(torch.stack(full.scores), torch.stack(cached.scores), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("preset", ["xsa", "t5-bias", "alibi"])
@pytest.mark.parametrize("parts", [(8,), (5, 3)])
def test_static_cache_counts_positions_under_a_bidirectional_prefix(preset, parts):
    model = apply_attention(build("llama"), preset).double()
    add_noise(model)
    tokens, positions = inputs("llama")["input_ids"][:1, :8], torch.arange(8)
    visible = torch.arange(16) <= positions.clamp(min=4)[:, None]  # five tokens see each other
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        full = model(input_ids=tokens, attention_mask=visible[None, None, :, :8], use_cache=False).logits
        cached = [
            model(
                input_ids=tokens[:, part],
                attention_mask=visible[None, None, part],
                position_ids=part[None],
                past_key_values=cache,
            ).logits
            for part in positions.split(parts)
        ]
    torch.testing.assert_close(torch.cat(cached, dim=1), full)


def test_weights_are_the_mixed_ones():
    model = apply_attention(build("bert"), "mixhead-a")
    with torch.no_grad():
        for module, _, _ in attention_modules(model):
            module.mixing.weight.mul_(0.5)
        weights = model(**inputs("bert"), output_attentions=True).attentions
    assert weights[0].shape == (2, 4, 10, 10)
    torch.testing.assert_close(weights[0].sum(dim=-1), torch.full((2, 4, 10), 0.5))


def test_packed_sequences_do_not_see_each_other():
    model = apply_attention(build("llama"), "mixhead-b")
    add_noise(model)
    tokens = inputs("llama")["input_ids"][:1]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    with torch.no_grad():
        packed = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        apart = torch.cat([model(input_ids=part).logits for part in tokens.split([4, 6], dim=1)], dim=1)
    torch.testing.assert_close(packed, apart, atol=1e-5, rtol=1e-5)


def test_what_is_not_computed_is_refused_by_name():
    model = apply_attention(build("bert"), "mixhead-a")
    module = attention_modules(model)[0][0]
    heads = torch.randn(1, 4, 3, 8)
    with pytest.raises(UserError, match="block_indices"):
        huggingface.attention_forward(module, heads, heads, heads, None, block_indices=torch.zeros(1))


def test_a_preset_that_changes_projections_is_refused():
    for preset, axes in (
        ("mhe-mul", {}),
        ("mqa", {}),
        ("mla", {}),
        ("diff", {}),
        ("gqa", {"key_value_heads": 2}),
        ("mixhead-a", {"head_dim": 8}),
    ):
        with pytest.raises(UserError, match=next(iter(axes), preset) if preset == "mixhead-a" else preset):
            huggingface.spec_of(preset, **axes)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (
            {"preset": "gqa"},
            "'gqa' needs a number of key and value heads, which the projections of the model fix. Choose",
        ),
        ({"preset": "fixedhead"}, "'fixedhead' needs a head size, which the projections of the model fix. Choose"),
        ({"preset": "mixhead"}, "expected one of mha, .*dcmha.* Did you mean 'mixhead-b'"),
        ({"head_dim": 8}, "head_dim=8: head_dim is fixed by the projections of the model. Set score_mixing"),
        ({"heads": 8}, "heads=8: heads is not an axis of attention. Set score_mixing"),
        ({"train": "adapter"}, r"train='adapter': expected 'all' \(every parameter\).* For an adapter of PEFT"),
        ({"sites": ["decoder"]}, r"BertModel has attention at \['encoder'\]. Use sites=\['encoder'\]"),
        ({"sites": []}, r"Use sites=\['encoder'\]"),
        ({"sites": ["encodr"]}, "sites='encodr': .* Did you mean 'encoder'"),
        ({"layers": [7]}, "there is no layer 7. BertModel has 2 attention layers at 'encoder'. Count layers from 0"),
    ],
    ids=str,
)
def test_a_choice_that_a_model_cannot_take_says_what_it_can(choice, message):
    model = build("bert").base_model
    with pytest.raises(UserError, match=message):
        apply_attention(model, **{"preset": "mixhead-b"} | choice)


def test_parts_are_in_the_mode_of_their_model():
    for training in (False, True):
        model = apply_attention(build("bert").train(training), "talking-heads")
        assert {module.training for module in model.modules()} == {training}


def of_a_notebook(name, base, **methods):
    """Return a class whose module has no source."""
    return type(name, (base,), {"__module__": "gone", **methods})


def test_a_class_whose_attention_function_cannot_be_exchanged_is_refused():
    own = of_a_notebook("Own", transformers.PreTrainedModel, _supports_sdpa=True)
    model = own(build("llama").config)
    model.layer = build("llama").model.layers[0]
    with pytest.raises(UserError, match="Own: transformers does not exchange its attention function"):
        apply_attention(model, "mixhead-a")
    assert not mixing_state(model)


def test_a_class_of_transformers_is_refused_without_a_word_of_notebooks():
    model = small_model(transformers.Mask2FormerModel)
    with pytest.raises(UserError, match=r"does not exchange .* Use a model for which supported\(model_class\) is true"):
        apply_attention(model, "mixhead-a", sites=["encoder", "cross"])


def test_a_class_of_a_notebook_is_as_its_base(monkeypatch):
    for base in (transformers.LlamaPreTrainedModel, transformers.LlamaForCausalLM):  # nothing is known of them yet
        monkeypatch.setattr(base, "_can_set_attn_implementation_cached_value", None, raising=False)
    own = of_a_notebook("Own", transformers.LlamaForCausalLM)
    model = own(build("llama").config).eval()
    expected = logits_of(model, "llama")
    torch.testing.assert_close(logits_of(apply_attention(model, "mixhead-a"), "llama"), expected)
    add_noise(model)
    assert not torch.allclose(logits_of(model, "llama"), expected, atol=1e-4)


def test_sites_and_layers_are_chosen():
    model = apply_attention(build("bart"), "mixhead-a", sites=["decoder", "cross"], layers=[1])
    assert sorted(mixing_state(model)) == [
        "model.decoder.layers.1.encoder_attn.mixing.weight",
        "model.decoder.layers.1.self_attn.mixing.weight",
    ]
    before = logits_of(model, "bart")
    add_noise(model)
    assert not torch.allclose(logits_of(model, "bart"), before, atol=1e-4)
    with pytest.raises(UserError, match="sites='middle'"):
        apply_attention(model, "mixhead-a", sites=["middle"])
    for layers in ([0, 7], [-1], [], 1, "1", [True]):
        with pytest.raises(UserError, match="layers="):
            apply_attention(model, "mixhead-a", layers=layers)


def test_a_second_choice_replaces_the_first():
    model = apply_attention(build("bert"), "talking-heads")
    apply_attention(model, "gain", layers=[0])
    assert [tuple(tensor.shape) for tensor in mixing_state(model).values()] == [(4,)]


@pytest.mark.parametrize("preset", ["mixhead-b", "talking-heads", "mixhead-random"])
def test_mixing_is_saved_and_loaded(preset, tmp_path):
    model = apply_attention(build("bert"), preset, layers=[1])
    add_noise(model)
    expected = logits_of(model, "bert")
    save_attention(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [huggingface.CONFIG, huggingface.WEIGHTS]
    loaded = load_attention(build("bert"), tmp_path)
    assert torch.equal(logits_of(loaded, "bert"), expected)


def test_save_pretrained_keeps_the_mixing(tmp_path):
    model = apply_attention(build("bert"), "mixhead-b")
    add_noise(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    assert loaded.config.lowrank_attention["mixing"] == "positionwise"
    assert torch.equal(logits_of(loaded, "bert"), logits_of(model, "bert"))
    assert torch.equal(logits_of(load_attention(loaded, tmp_path), "bert"), logits_of(model, "bert"))
    other = transformers.BertForSequenceClassification.from_pretrained(tmp_path)
    assert all(torch.equal(tensor, mixing_state(model)[name]) for name, tensor in mixing_state(other).items())


@pytest.mark.parametrize("layers", [None, [1]])
def test_a_model_built_without_its_mixing_refuses_to_run(layers, tmp_path):
    apply_attention(build("bert"), "mixhead-b", layers=layers).save_pretrained(tmp_path)
    plain = AutoModelForMaskedLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path)).eval()
    with pytest.raises(UserError, match=f'load_attention\\(model, "{tmp_path}"\\)') as refusal:
        logits_of(plain, "bert")
    assert "\n" not in str(refusal.value)


def test_both_parts_of_a_model_are_restored(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    text = sizes | {"vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.CLIPConfig(text_config=text, vision_config=sizes | {"image_size": 16, "patch_size": 4})
    model = apply_attention(transformers.CLIPModel(config), "mixhead-a").eval()
    add_noise(model)
    model.save_pretrained(tmp_path)
    loaded, tokens = transformers.CLIPModel.from_pretrained(tmp_path), torch.ones(1, 4, dtype=torch.long)
    inputs = {"input_ids": tokens, "pixel_values": torch.randn(1, 3, 16, 16)}
    torch.testing.assert_close(loaded(**inputs).logits_per_image, model(**inputs).logits_per_image)


def test_mixing_is_not_dropped_in_silence_without_this_package(tmp_path, monkeypatch):
    apply_attention(build("bert"), "mixhead-b").save_pretrained(tmp_path)
    monkeypatch.delitem(AttentionInterface._global_mapping, huggingface.IMPLEMENTATION)  # as if it were not imported
    with pytest.raises(ValueError, match=f'attn_implementation="{huggingface.IMPLEMENTATION}"'):
        AutoModelForMaskedLM.from_pretrained(tmp_path)


def test_a_folder_without_mixing_is_refused(tmp_path):
    model = build("bert")
    with pytest.raises(UserError, match="apply_attention"):
        save_attention(model, tmp_path)
    with pytest.raises(UserError, match=str(tmp_path)):
        load_attention(model, tmp_path)
    save_attention(apply_attention(build("bert", num_attention_heads=8), "mixhead-a"), tmp_path)
    with pytest.raises(UserError, match="mixing"):
        load_attention(model, tmp_path)


@pytest.mark.parametrize("train", huggingface.TRAIN)
def test_two_trainer_steps_change_what_they_should(train, tmp_path):
    model = apply_attention(build("bert"), "mixhead-b", train=train)
    before = copy.deepcopy(model.state_dict())
    rows = [{name: tensor[index] for name, tensor in inputs("bert").items()} for index in (0, 1)]
    rows = [row | {"labels": row["input_ids"].clone()} for row in rows] * 2
    arguments = transformers.TrainingArguments(
        *(str(tmp_path),),
        max_steps=2,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    transformers.Trainer(model=model, args=arguments, train_dataset=rows).train()
    after = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    mixing = set(mixing_state(model))
    assert mixing <= changed
    assert (changed == mixing) == (train != "all")


def test_checkpointed_gradients_equal_plain_ones():
    gradients = []
    for checkpointing in (False, True):
        model = apply_attention(build("llama"), "mixhead-b").train()
        add_noise(model)
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(**inputs("llama"), labels=inputs("llama")["input_ids"]).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


def test_compiled_models_give_the_same_outputs():
    model = apply_attention(build("bert"), "mixhead-b")
    add_noise(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(logits_of(compiled, "bert"), logits_of(model, "bert"))


def test_bfloat16_is_near_float32():
    model = apply_attention(build("llama"), "mixhead-a")
    add_noise(model, 0.1)
    expected = logits_of(model, "llama")
    torch.testing.assert_close(logits_of(model.bfloat16(), "llama").float(), expected, atol=0.02, rtol=0.05)


def test_classes_say_whether_they_are_supported():
    assert supported(transformers.BertModel) and supported(transformers.LlamaForCausalLM)
    assert not supported(transformers.XLNetModel)


def test_other_parts_with_the_configuration_of_a_mixed_part_name_the_remedy():
    model = build("bart")
    apply_attention(model.model.decoder, "mixhead-a")
    with pytest.raises(UserError, match=r"BartAttention has no mixing.* on the whole model with sites= or layers="):
        logits_of(model, "bart")
    apply_attention(model, "mixhead-a", sites=["decoder", "cross"])
    torch.testing.assert_close(logits_of(model, "bart"), logits_of(build("bart"), "bart"))


@pytest.mark.parametrize("name", ["NllbMoeModel", "SplinterModel"])
def test_models_without_sdpa_keep_their_outputs(name):
    """The decoder of the first one calls itself not causal, and the encoder of the second one says nothing."""
    kind, sizes = getattr(transformers, name), BART if name == "NllbMoeModel" else SIZES
    model = kind(kind.config_class(**sizes | TOKENS)).eval()
    given = {"decoder_input_ids": torch.arange(9, 3, -1)[None]} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        expected = model(torch.arange(2, 11)[None], **given)[0]
        found = apply_attention(model, "mixhead-a")(torch.arange(2, 11)[None], **given)[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_attention_that_cannot_be_chosen_gets_the_mask_that_it_had():
    """The encoder of BigBird-Pegasus adds its mask to scores."""
    kind, tokens = transformers.BigBirdPegasusModel, torch.arange(2, 11)[None]
    model = kind(transformers.BigBirdPegasusConfig(**BART | TOKENS)).eval()
    given = {"attention_mask": (tokens < 9).long(), "decoder_input_ids": tokens}
    with torch.no_grad():
        expected = model(tokens, **given)[0]
        found = apply_attention(model, "mixhead-a", sites=["decoder", "cross"])(tokens, **given)[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_a_model_of_two_models_calls_the_chosen_attention():
    config = transformers.ViTConfig(**SIZES | {"image_size": 16, "patch_size": 8})
    encoder, other = transformers.ViTModel(config), transformers.ViTModel(config)
    decoder = transformers.BertLMHeadModel(
        transformers.BertConfig(**SIZES | TOKENS, is_decoder=True, add_cross_attention=True)
    )
    model = transformers.VisionEncoderDecoderModel(encoder=encoder, decoder=decoder).eval()
    given = {"pixel_values": torch.randn(1, 3, 16, 16), "decoder_input_ids": torch.arange(2, 9)[None]}
    with torch.no_grad():
        expected = model(**given).logits
        torch.testing.assert_close(apply_attention(model, "mixhead-a")(**given).logits, expected, atol=1e-5, rtol=0)
        model.set_attn_implementation("sdpa")
        with pytest.raises(UserError, match="'sdpa' does not compute the chosen attention"):
            model(**given)
        apply_attention(model, "mha").set_attn_implementation("sdpa")
        torch.testing.assert_close(model(**given).logits, expected, atol=1e-5, rtol=0)
        other(given["pixel_values"])  # it has the configuration that the encoder had


@pytest.mark.parametrize("preset", usable_presets())
def test_what_a_family_cannot_compute_is_refused_before_anything_changes(preset):
    for family in FAMILIES:
        model = build(family)
        before = model.config.to_dict(), [*model.state_dict()]
        try:
            apply_attention(model, preset)
        except UserError:
            assert (model.config.to_dict(), [*model.state_dict()]) == before
        else:
            logits_of(model, family)
    with pytest.raises(UserError, match="GptOssAttention has sinks already"):
        apply_attention(build("gpt-oss"), "sinks")


def test_weights_in_the_configuration_are_refused_before_a_training():
    model = build("llama")
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    for preset in ("mixhead-a", "mha"):
        with pytest.raises(
            UserError, match=r"config\.output_attentions=True: .* pass output_attentions=True to each call"
        ):
            apply_attention(model, preset)
    assert model.config._attn_implementation == "eager"
