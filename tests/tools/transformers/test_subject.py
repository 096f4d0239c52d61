"""Measurements of models of transformers, compared with singular values of whole matrices of logits in float64."""

import math
import re
from dataclasses import replace

import pytest
import torch
import transformers
from transformers_families import BART, SEQUENCE, build

from fairseq_lowrank import cli
from fairseq_lowrank.cli.measure import details
from fairseq_lowrank.huggingface import apply_attention, attention_calls, attention_modules, mixing_state
from fairseq_lowrank.huggingface.models import small_config
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.ops import DotProduct
from fairseq_lowrank.tools.measuring.figure import plot_cuts
from fairseq_lowrank.tools.measuring.measurement import measure
from fairseq_lowrank.tools.measuring.probe import Probe, factors
from fairseq_lowrank.tools.transformers import pretrained
from fairseq_lowrank.tools.transformers import subject as transformers_subject
from fairseq_lowrank.tools.transformers.subject import TransformersSubject

LENGTH, RANK = 24, 3
FAMILIES = ("bert", "gpt2", "llama", "qwen3", "t5", "modernbert", "mistral")


def texts(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(5, 99, (1, LENGTH), generator=generator) for _ in range(count)]


def subject(family: str, count: int = 2, **axes) -> TransformersSubject:
    model = build(family) if family == "gpt-oss" else build(family).double()
    if axes:
        torch.manual_seed(3)
        apply_attention(model, "mha", **axes)
        for parameter in model.parameters():
            if parameter.shape == (4, 4):
                parameter.data += torch.randn_like(parameter)
    samples = texts(count)
    pairs = [(sample, sample.flip(1)) for sample in samples]
    return TransformersSubject(model, pairs if family in ("t5", "bart") else samples, mask_token=3)


def logits(call) -> torch.Tensor:
    """The scores of every head, mixed and centred, as whole matrices ``[H, T, S]``."""
    scores = call.scores.dense()[0]
    if call.score_mixing is not None:
        scores = torch.einsum("ji,jts->its", call.score_mixing.mixing_matrix(), scores)
    return scores - scores.mean(-1, keepdim=True)


def truncated(matrices: torch.Tensor, rank: int) -> torch.Tensor:
    left, values, right = torch.linalg.svd(matrices)
    return (left[..., :rank] * values[..., None, :rank]) @ right[..., :rank, :]


def calls(found: TransformersSubject, index: int = 0) -> dict[int, object]:
    seen = {}

    def keep(layer, call):
        seen[layer] = call
        return call

    with attention_calls(found.model, keep):
        found.evaluate(index)
    return seen


def gathered(found: TransformersSubject, indices) -> Probe:
    probe = Probe([layer.limit for layer in found.layers])
    probe.gathering = True
    with found.hooked(probe):
        for index in indices:
            found.evaluate(index)
    probe.gathering = False
    return probe


@pytest.mark.parametrize("axes", [{}, {"score_mixing": "static"}], ids=["plain", "mixed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_energies_are_squared_singular_values_of_logits(family, axes):
    found = subject(family, **axes)
    seen, probe = calls(found), gathered(found, [0])
    assert seen
    for layer, call in seen.items():
        matrices = logits(call)
        values = torch.linalg.svdvals(matrices).square() / matrices[0].numel()
        scale = call.scores.factor**2
        energies = probe.layers[layer].cut("scores", None).energies[:, : values.size(-1)] * scale
        width = min(values.size(-1), energies.size(-1))
        torch.testing.assert_close(energies[:, :width], values[:, :width], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("axes", [{}, {"score_mixing": "static"}, {"mixing": "positionwise"}])
@pytest.mark.parametrize("family", FAMILIES)
def test_cut_layer_attends_by_truncated_logits(family, axes):
    found = subject(family, **axes)
    probe = gathered(found, [0])
    probe.cuts = {index: one.cut("scores", None) for index, one in probe.layers.items()}

    def with_whole_matrices(layer, call):
        if layer != 0:
            return call
        bias = truncated(logits(call), RANK)[None]
        nothing = DotProduct(call.scores.q * 0, call.scores.k * 0, 1.0)
        bias = bias if call.score_bias is None else bias + call.score_bias
        return replace(call, scores=nothing, score_bias=bias, score_mixing=None)

    plain = found.evaluate(0)
    with attention_calls(found.model, with_whole_matrices):
        expected = found.evaluate(0)
    probe.ranks = {0: RANK}
    with found.hooked(probe):
        cut = found.evaluate(0)
    assert abs(plain[0] - expected[0]) > 1e-9
    assert cut[0] == pytest.approx(expected[0], rel=1e-9)
    assert found.evaluate(0) == plain


def test_basis_of_two_sequences_is_best_for_all_their_queries_and_keys():
    found = subject("bert")
    seen = [calls(found, index)[1].scores for index in (0, 1)]
    queries = torch.cat([scores.q[0] for scores in seen], dim=1)
    keys = torch.cat([scores.k[0] - scores.k[0].mean(1, keepdim=True) for scores in seen], dim=1)
    cut = gathered(found, [0, 1]).layers[1].cut("scores", None)
    found = queries @ (keys @ cut.down[..., :RANK] @ cut.up[:, :RANK]).mT
    torch.testing.assert_close(found, truncated(queries @ keys.mT, RANK), rtol=1e-6, atol=1e-9)


def test_cut_values_are_best_for_outputs():
    found = subject("bert")
    probe = gathered(found, [0])
    weight = found.layers[0].output_weight.detach()
    cut = probe.layers[0].cut("values", weight)
    call = calls(found)[0]
    patterns = call.scores.dense()[0].softmax(-1)
    outputs = patterns @ call.v[0]
    outputs = outputs - outputs.mean(1, keepdim=True)
    expected = truncated(outputs @ weight, RANK)
    values = cut.apply(call.v, RANK)[0] - cut.mean[:, None]
    torch.testing.assert_close(patterns @ values @ weight, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("family", ["llama", "bert", "t5", "gemma2", "gpt-oss", "bart", "roberta", "gpt2"])
def test_whole_measurement(family):
    found = subject(family, count=6)
    plain = [found.evaluate(index) for index in range(6)]
    result = measure(found, family)
    curve = result["cuts"]["scores"]["all"]
    assert result["metric"] == "bits per token"
    whole = {"rank": 8, "value": result["value"], "added": 0.0, "of_loss": 0.0, "cost": 0.0}
    assert curve["ranks"][-1] == whole
    assert result["value"] == pytest.approx(sum(a for a, _ in plain[3:]) / sum(b for _, b in plain[3:]))
    assert [entry["rank"] for entry in curve["ranks"]][-2:] == [7, 8]
    assert curve["interval"][0] <= curve["need"] <= curve["interval"][1]
    assert {layer["layer"] for layer in result["cuts"]["scores"]["layers"]} == {0, 1}
    assert all(layer["weights"] is not None for layer in result["layers"])
    assert measure(found, family) == result
    assert [found.evaluate(index) for index in range(6)] == plain
    # the loss is that of the model with its own attention
    stock = build(family) if family == "gpt-oss" else build(family).double()
    stock.config.lowrank_attention = {"preset": "mha"}  # so that the subject leaves its attention as it is
    samples = [(text, text.flip(1)) for text in texts(1)] if family in ("t5", "bart") else texts(1)
    assert TransformersSubject(stock, samples, mask_token=3).evaluate(0)[0] == pytest.approx(plain[0][0], rel=1e-6)


def big_code(*, multi_query: bool) -> TransformersSubject:
    sizes = {"vocab_size": 100, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    config = transformers.GPTBigCodeConfig(**sizes, multi_query=multi_query)
    return TransformersSubject(transformers.GPTBigCodeForCausalLM(config).double().eval(), texts(2))


def test_weights_alone_are_unknown_if_a_projection_joins_each_head():
    assert big_code(multi_query=False).layers[0].query_weight is None


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5", "bart", "big code"])
def test_weights_alone_make_queries_and_keys_of_hidden_states(family):
    found = big_code(multi_query=True) if family == "big code" else subject(family)
    module, layer = attention_modules(found.model)[0][0], found.layers[0]
    inputs = []
    module.register_forward_pre_hook(
        lambda module, args, kwargs: inputs.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    queries, keys = factors(calls(found)[0])
    hidden = inputs[0][0] - inputs[0][0].mean(0)
    for vectors, weight in ((queries[0], layer.query_weight), (keys[0], layer.key_weight)):
        torch.testing.assert_close(vectors - vectors.mean(1, keepdim=True), hidden @ weight)


def test_weights_alone_give_the_spectrum_of_the_product_of_projections():
    found = subject("bert", count=2)
    module = found.model.bert.encoder.layer[0].attention.self
    query, key = (part.weight.detach().unflatten(0, (4, 8)) for part in (module.query, module.key))
    values = torch.linalg.svdvals(query.mT @ key)[:, :8].square()
    expected = [int((head.cumsum(0) < 0.9 * head.sum()).sum()) + 1 for head in values]
    result = measure(found, "bert")
    assert result["layers"][0]["weights"]["directions_90"] == expected


REFUSED = {
    **dict.fromkeys(
        (
            "LongformerModel",
            "BigBirdModel",
            "XLNetLMHeadModel",
            "DebertaV2ForMaskedLM",
            "FNetForMaskedLM",
            "RwkvForCausalLM",
        ),
        "computes its attention itself",
    ),
    **dict.fromkeys(("BloomForCausalLM", "GPTJForCausalLM", "DeepseekV3ForCausalLM"), "computes its attention itself"),
    "ViTModel": "reads pixel_values, not tokens",
    "WhisperForConditionalGeneration": "reads input_features, not tokens",
    "CLIPModel": "reads more than text",
    "BartModel": "has no head that gives words",
    "BertForQuestionAnswering": "gives neither words, classes nor states",
}


@pytest.mark.parametrize("name", REFUSED)
def test_model_is_refused_by_name(name):
    kind = getattr(transformers, name)
    with torch.device("meta"):
        model = kind(small_config(kind.config_class()))
    with pytest.raises(UserError, match=f"^{name} {REFUSED[name]}"):
        TransformersSubject(model, texts(2))


def test_missing_target_and_mask_token_are_named():
    with pytest.raises(UserError, match="Add --target FILE"):
        TransformersSubject(build("t5"), texts(2))
    with pytest.raises(UserError, match="no mask token"):
        TransformersSubject(build("bert"), texts(2))


@pytest.mark.parametrize("kind", ["BertForSequenceClassification", "BertForTokenClassification", "BertModel"])
def test_models_without_words_keep_decisions_or_states(kind):
    model = getattr(transformers, kind)(build("bert").config).eval()
    result = measure(TransformersSubject(model, texts(6)), kind, quick=True)
    ranks = result["cuts"]["scores"]["all"]["ranks"]
    assert all(entry["cost"] >= 0 for entry in ranks)
    if kind == "BertModel":
        assert result["metric"] == "cosine of mean states" and result["value"] == pytest.approx(1)
        assert ranks[0]["value"] < 1
    else:
        assert result["metric"] == "bits per decision of the uncut model" and 0.5 < result["value"] <= 1
        assert ranks[0]["value"] > ranks[-1]["value"]


def test_classifier_of_one_number_decides_between_yes_and_no():
    config = build("bert").config
    config.num_labels = 1
    model = transformers.BertForSequenceClassification(config).eval()
    found = TransformersSubject(model, texts(2))
    with torch.no_grad():
        chance = model(found.samples[0]).logits.double().sigmoid().item()
    entropy = -chance * math.log2(chance) - (1 - chance) * math.log2(1 - chance)
    assert found.evaluate(0) == (pytest.approx(entropy, rel=1e-5), 1.0)
    config.problem_type = "regression"
    with pytest.raises(UserError, match="predicts numbers"):
        TransformersSubject(model, texts(2))


@pytest.mark.parametrize("family", ["gpt2", "bert", "without attention"])
def test_untrained_models_get_no_verdict(family):
    kind = "bert" if family == "bert" else "gpt2"
    model = getattr(transformers, "BertForMaskedLM" if kind == "bert" else "GPT2LMHeadModel")(build(kind).config).eval()
    if family == "without attention":
        for block in model.transformer.h:
            block.attn.c_proj.weight.data.zero_()
            block.attn.c_proj.bias.data.zero_()
            block.mlp.c_fc.weight.data *= 20
    result = measure(TransformersSubject(model, texts(8), mask_token=3), family)
    assert {verdict["verdict"] for verdict in result["verdicts"]} == {"no verdict"}
    reason = "patterns hardly matter here" if family == "bert" else "hardly trained, the frequency of words alone"
    assert reason in result["verdicts"][0]["text"]
    text = "\n".join(details(result))
    assert "scores of all heads, cut to a rank" in text
    assert not re.search(r"%\) +\d+$", text, re.MULTILINE)  # layers have no need
    (axes,) = plot_cuts([result]).axes
    assert not any("need" in label.get_text() for label in axes.get_legend().get_texts())


def test_sequences_of_a_masked_model_have_masks_that_differ():
    found = TransformersSubject(build("bert"), texts(4), mask_token=3, special_tokens=(7,))
    masks = [found._hidden(index, sample) for index, sample in enumerate(found.samples)]
    same = [found._hidden(index, found.samples[0]) for index in range(4)]
    assert len({tuple(mask[0].tolist()) for mask in same}) == 4
    assert all(torch.equal(found._hidden(index, found.samples[index]), masks[index]) for index in range(4))
    assert [int(mask.sum()) for mask in masks] == [round(0.15 * int((text != 7).sum())) for text in found.samples]
    assert not any((mask & (text == 7)).any() for mask, text in zip(masks, found.samples, strict=True))


def test_model_of_a_gguf_file_is_dequantised_and_measured(tmp_path, capsys):
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "text").write_text("a b c d a c b d " * 60)
    command = ["measure", "--transformers", str(tmp_path / "tiny.gguf"), "--text", str(tmp_path / "text")]
    assert cli.main([*command, "--length", "12", "--quick"]) == 0
    text = capsys.readouterr().out
    assert "tiny (LlamaForCausalLM): bits per token" in text and "dequantised to float32" in text
    assert cli.main(["measure", "--transformers", "none.gguf", "--text", str(tmp_path / "text")]) == 2
    assert "there is no such file" in capsys.readouterr().err


def write_gguf(path):
    """A Llama of two layers, whose words are single letters, with weights of 8 bits."""
    gguf = pytest.importorskip("gguf")
    words = ["<unk>", "<s>", "</s>", *(chr(code) for code in range(97, 123)), "\u0120", "ab"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    generator = torch.Generator().manual_seed(1)
    shapes = {"token_embd": (len(words), 64), "output": (len(words), 64)}
    for block in range(2):
        for name, rows in (("attn_q", 64), ("attn_k", 32), ("attn_v", 32), ("attn_output", 64)):
            shapes[f"blk.{block}.{name}"] = (rows, 64)
        for name in ("ffn_gate", "ffn_up", "ffn_down"):
            shapes[f"blk.{block}.{name}"] = (64, 64)
    for name, shape in shapes.items():
        numbers = torch.randn(shape, generator=generator).numpy()
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(numbers, kind), raw_dtype=kind)
    for name in ("output_norm", *(f"blk.{block}.{part}_norm" for block in range(2) for part in ("attn", "ffn"))):
        writer.add_tensor(f"{name}.weight", torch.ones(64).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_model_in_half_precision_is_cut_as_in_float32():
    """Its own rounding is larger than that of a cut to almost every direction."""
    costs = []
    for dtype in (torch.float32, torch.bfloat16):
        model = build("llama").to(dtype)
        ranks = measure(TransformersSubject(model, texts(4)), "llama")["cuts"]["scores"]["all"]["ranks"]
        costs.append([entry["cost"] for entry in ranks if entry["rank"] == 7])
    assert costs[1] == pytest.approx(costs[0], abs=2e-3)


@pytest.mark.parametrize("before, after", [([1], [2]), ([1], []), ([], [2]), ([], [])])
def test_blocks_of_a_text_have_the_special_tokens_of_the_tokenizer(tmp_path, before, after):
    class Tokenizer:
        bos_token_id, eos_token_id = 1, 2

        def __call__(self, text, **_):
            special = text == ""
            return {"input_ids": [*before, *after] if special else [int(word) for word in text.split()]}

    (tmp_path / "text").write_text("\n".join(f"{10 + line} {10 + line}" for line in range(30)))
    blocks, available = transformers_subject._blocks(Tokenizer(), tmp_path / "text", 3, 1, 8)
    assert available == 60 // (8 - len(before) - len(after))
    assert len(blocks) == 3
    for block in blocks:
        words = block[0, len(before) : 8 - len(after)].tolist()
        assert block.shape == (1, 8) and block[0].tolist() == [*before, *words, *after] and min(words) >= 10
        assert words == sorted(words) and words[-1] - words[0] <= 4
    with pytest.raises(UserError, match="too few for two blocks of 100"):
        transformers_subject._blocks(Tokenizer(), tmp_path / "text", 3, 1, 100)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_weights_of_adapters_and_projections_with_hooks_are_not_read(family):
    model = build(family)
    module, _, _ = attention_modules(model)[0]
    query, output = ("c_attn", "c_proj") if family == "gpt2" else ("k_proj", "o_proj")
    adapted = getattr(module, query)
    derived = type("Adapted", (type(adapted),), {})
    adapted.__class__ = derived
    getattr(module, output).register_forward_hook(lambda module, inputs, result: 2 * result)
    first, second = TransformersSubject(model, texts(1), mask_token=3).layers
    assert first.query_weight is None and first.key_weight is None and first.output_weight is None
    assert second.query_weight is not None and second.key_weight is not None


def test_lines_of_a_text_and_its_target_end_at_newlines_alone(tmp_path):
    text, target = tmp_path / "text", tmp_path / "target"
    text.write_text("a\u2028b\nc\n", encoding="utf-8")
    target.write_text("A\nB\x85C\n", encoding="utf-8")
    read = []

    def tokenizer(line=None, text_target=None, **options):
        read.append(line or text_target)
        return {"input_ids": torch.zeros(1, 3)}

    assert len(transformers_subject._pairs(tokenizer, text, target, 2, seed=0, length=8)) == 2
    assert sorted(read) == ["A", "B\x85C", "a\u2028b", "c"]
    text.write_bytes(b"\xff")
    with pytest.raises(UserError, match="text is not UTF-8"):
        transformers_subject._pairs(tokenizer, text, target, 2, seed=0, length=8)


@pytest.mark.parametrize("use", ["measure", "spectrum"])
def test_what_a_part_of_a_model_chose_is_measured_and_stays(use):
    model, (tokens,) = build("t5"), texts(1)
    apply_attention(model.decoder, "mixhead-a")
    with torch.no_grad():
        for tensor in mixing_state(model).values():
            tensor.add_(torch.randn_like(tensor))
        expected = model(input_ids=tokens, decoder_input_ids=tokens).logits
        if use == "measure":
            seen = calls(TransformersSubject(model, [(tokens, tokens)]))
            mixed = [call.prob_mixing is not None for call in seen.values()]
            assert mixed == [site != "encoder" for _, site, _ in attention_modules(model)]
        else:
            assert pretrained.measure(model, [tokens], "T5").keys() == {"encoder", "decoder", "cross"}
            assert [layer["site"] for layer in pretrained.inspect(model)] == ["decoder", "cross"] * 2
        torch.testing.assert_close(model(input_ids=tokens, decoder_input_ids=tokens).logits, expected)


def test_layers_that_can_be_chosen_are_measured_next_to_others():
    kind = transformers.LongT5ForConditionalGeneration
    sizes = {"d_model": 32, "d_kv": 8, "num_layers": 1, "num_heads": 4, "d_ff": 64, "local_radius": 3}
    model = kind(transformers.LongT5Config(vocab_size=100, decoder_start_token_id=0, **sizes)).eval()
    (tokens,) = texts(1)
    found = TransformersSubject(model, [(tokens, tokens)])
    assert [layer.site for layer in found.layers] == ["decoder", "cross"]
    assert set(calls(found)) == {0, 1}


@pytest.mark.parametrize("name", ["BartForConditionalGeneration", "M2M100ForConditionalGeneration"])
def test_translations_are_read_after_their_start(name):
    (source,), target = texts(1), torch.tensor([[15, 17, 19, 1]])
    sizes = BART | SEQUENCE | {"vocab_size": 100, "eos_token_id": 1, "pad_token_id": 0}
    model = getattr(transformers, name)(getattr(transformers, name).config_class(**sizes)).double().eval()
    bits, tokens = TransformersSubject(model, [(source, target)]).evaluate(0)
    start = torch.tensor([[1, 15, 17, 19]])
    logits = model(input_ids=source, decoder_input_ids=start).logits[0]
    expected = -sum(logits.log_softmax(-1)[place, word] for place, word in enumerate(target[0])) / math.log(2)
    assert tokens == 4 and bits == pytest.approx(expected.item(), rel=1e-9)


def test_tokens_of_a_layer_that_runs_several_times_count_once():
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.AlbertConfig(vocab_size=100, embedding_size=16, **sizes)
    found = TransformersSubject(transformers.AlbertForMaskedLM(config).eval(), texts(4), mask_token=3)
    result = measure(found, "albert", quick=True)
    assert result["tokens_of_basis"] == 2 * LENGTH
    assert [layer["runs"] for layer in result["layers"]] == [3]
    assert "runs 3 times for each sequence, with one basis" in "\n".join(details(result))
