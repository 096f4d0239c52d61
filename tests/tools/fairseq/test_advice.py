import functools
import json

import numpy
import pytest
import torch
from architectures import arguments

from fairseq_lowrank import cli
from fairseq_lowrank.attention import build_attention
from fairseq_lowrank.messages import FlagError
from fairseq_lowrank.parts import AXES, METHODS, PARTS, PRESETS, Method, register
from fairseq_lowrank.tools.advice import heads as rule
from fairseq_lowrank.tools.fairseq.advice import checks
from fairseq_lowrank.tools.fairseq.advice.lengths import read_lengths, read_vocab_sizes
from fairseq_lowrank.tools.fairseq.advice.remedies import cached
from fairseq_lowrank.tools.fairseq.architecture import attention_layers, build_model
from fairseq_lowrank.tools.fairseq.parameters import count

TRANSLATION = "lowrank_transformer_iwslt_de_en"
LM = "lowrank_transformer_lm"
SHORT = {name: numpy.array([20, 24, 28, 90]) for name in ("source", "target")}


def findings(architecture, flags, *, vocab_size=1000, lengths=SHORT):
    return checks.advise(arguments(architecture, flags), vocab_size, lengths)


def one(found, topic, **numbers):
    (finding,) = [
        finding
        for finding in found
        if finding.topic == topic and all(finding.numbers[key] == value for key, value in numbers.items())
    ]
    return finding


def changes(finding):
    return {change.change: change.parameters for change in finding.changes}


@functools.cache
def counted(architecture, flags, vocab_size):
    return count(build_model(arguments(architecture, flags), vocab_size))["total"]


def total(architecture, flags, vocab_size):
    return counted(architecture, tuple(flags), vocab_size)


def test_a_small_head_at_one_site_is_named_with_the_cost_of_every_remedy():
    found = findings(TRANSLATION, ["--encoder-attention-heads", "64"])
    encoder = one(found, "head size", site="encoder")
    assert encoder.verdict == rule.WORST
    assert "d_k = 8" in encoder.text and "100 %" in encoder.text
    costs = changes(encoder)
    assert costs["--score-mixing static --attention-sites encoder"] == 6 * 64 * 64
    assert costs["--encoder-attention-heads 4 (fewer heads, of size 128)"] == 0
    assert one(found, "head size", site="decoder").verdict == rule.FINE
    assert one(found, "head size", site="cross").verdict == rule.FINE


def test_scores_that_are_no_products_are_not_judged_by_the_head_size():
    flags = ["--decoder-attention-heads", "64", "--attention-score"]
    dense = one(findings(LM, [*flags, "synthesizer-dense"]), "head size")
    assert dense.verdict == rule.WORST
    assert changes(dense)["--score-mixing static"] == 6 * 64 * 64
    assert not [f for f in findings(LM, [*flags, "synthesizer-random"]) if f.topic == "head size"]


LONG = {name: numpy.array([200]) for name in ("source", "target")}


def test_one_remedy_serves_all_sites_that_want_it():
    heads = ["--encoder-attention-heads", "8", "--decoder-attention-heads", "8"]
    found = findings(TRANSLATION, heads, lengths=LONG)
    for site in ("encoder", "decoder", "cross"):
        assert changes(one(found, "head size", site=site))["--score-mixing static"] == 18 * 8 * 8
    found = findings(TRANSLATION, heads, lengths=LONG | {"source": numpy.array([20])})
    decoder = changes(one(found, "head size", site="decoder"))
    assert decoder["--score-mixing static --attention-sites decoder"] == 6 * 8 * 8
    assert one(found, "head size", site="cross").verdict == rule.FINE


def test_remedies_leave_what_was_chosen_as_it_is():
    def remedies_of(flags, site="encoder", architecture=TRANSLATION, lengths=LONG):
        return changes(one(findings(architecture, flags, lengths=lengths), "head size", site=site))

    text = {"text": numpy.array([200])}
    # one head of keys for all: mixing its scores lifts nothing
    assert next(iter(remedies_of(["--attention", "mhe-mul"]))) == "--head-dim 199"
    assert "--score-mixing static" in remedies_of(["--head-mixing", "none"], "decoder", LM, text)
    # a third kind of attention next to talking heads and plain mha is not possible, talking heads everywhere are
    flags = ["--attention", "talking-heads", "--attention-sites", "decoder,cross"]
    kept = [change for change in remedies_of(flags) if "fewer heads" not in change]
    assert kept == ["--attention-sites encoder,decoder,cross"]
    assert remedies_of(flags)[kept[0]] == 6 * 2 * 4 * 4
    # mixhead-b everywhere would not suffice
    flags[1] = "mixhead-b"
    assert all("fewer heads" in change for change in remedies_of(flags))


def test_a_remedy_for_all_sites_takes_no_head_size_from_those_that_want_none():
    flags = ["--attention", "mhe-mul", "--encoder-attention-heads", "64"]
    found = findings(TRANSLATION, flags, lengths={name: numpy.array([20]) for name in ("source", "target")})
    assert one(found, "head size", site="decoder").verdict == rule.FINE
    costs = changes(one(found, "head size", site="encoder"))
    # the decoder has heads of size 128
    assert costs["--head-dim 128"] == total(TRANSLATION, [*flags, "--head-dim", "128"], 1000) - total(
        TRANSLATION, flags, 1000
    )


def test_heads_that_share_one_matrix_are_not_told_to_mix():
    for flags in (["--attention", "sha"], ["--attention", "sha", "--head-mixing", "static"]):
        found = one(findings(LM, flags, lengths={"text": numpy.array([300])}), "head size")
        assert "mixing them lifts nothing" in found.text
        assert not any("mix" in change for change, *_ in found.changes)


def test_the_cost_of_fixedhead_is_that_of_the_built_model():
    found = findings("lowrank_transformer_lm_wiki103_vanilla", [], lengths={"text": numpy.array([512])})
    costs = changes(one(found, "head size"))
    flags = ["--attention", "fixedhead", "--head-dim", "256"]
    totals = [
        count(build_model(arguments("lowrank_transformer_lm_wiki103_vanilla", more), 1000))["total"]
        for more in (flags, [])
    ]
    assert costs["--attention fixedhead --head-dim 256"] == totals[0] - totals[1]
    assert costs["--score-mixing static"] == 384
    assert costs["--decoder-attention-heads 2 (fewer heads, of size 256)"] == 0


FREE_HEAD_SIZE = ["--attention", "fixedhead", "--head-dim", "100", "--decoder-attention-heads", "6"]


@pytest.mark.parametrize(
    "architecture, flags, vocab_size",
    [
        (f"{LM}_wiki103_vanilla", ["--attention", "mhe-mul"], 1000),
        (f"{LM}_wiki103_vanilla", ["--attention", "mixhead-b", "--head-dim", "128"], 1000),
        (f"{LM}_wiki103_vanilla", FREE_HEAD_SIZE, 1000),
        (f"{LM}_lm1b_small", ["--attention", "mqa", "--decoder-input-dim", "64"], 1000),
        pytest.param(LM, [], 257, marks=pytest.mark.grid),
        ("transformer_lm", [], 257),
        (TRANSLATION, ["--encoder-attention-heads", "16"], 1000),
        (TRANSLATION, ["--attention", "mixhead-b", "--attention-sites", "decoder", "--head-dim", "200"], 1000),
        pytest.param(TRANSLATION, ["--attention", "mhe-mul"], 1000, marks=pytest.mark.grid),
        (TRANSLATION, ["--attention", "mixhead-b", "--attention-sites", "decoder,cross"], 1000),
        pytest.param(f"{LM}_wiki103_vanilla", ["--head-mixing", "none"], 1000, marks=pytest.mark.grid),
    ],
)
def test_every_cost_is_the_difference_of_the_built_models(architecture, flags, vocab_size):
    long = numpy.array([300])
    lengths = {"text": long} if "_lm" in architecture else {"source": long, "target": long}
    before = total(architecture, flags, vocab_size)
    checked = 0
    for finding in findings(architecture, flags, vocab_size=vocab_size, lengths=lengths):
        for change, cost, *_ in finding.changes:
            if cost is None:
                continue
            more, size = change.partition(" (")[0], vocab_size
            if change.startswith("a vocabulary of at least"):
                more, size = "", finding.numbers["width"]
            assert cost == total(architecture, [*flags, *more.split()], size) - before, change
            checked += 1
    assert checked >= 2


def test_a_head_as_large_as_the_length_less_one_is_no_bottleneck():
    for length, verdict in ((129, rule.FINE), (130, rule.WORST)):
        lengths = {name: numpy.array([length]) for name in ("source", "target")}
        found = findings(TRANSLATION, [], lengths=lengths)
        assert [one(found, "head size", site=site).verdict for site in ("encoder", "cross")] == [verdict, verdict]


def test_a_causal_head_needs_half_of_that():
    for length, verdict in ((129, rule.FINE), (130, rule.WORST)):
        found = findings("lowrank_transformer_lm_wiki103_vanilla", [], lengths={"text": numpy.array([length])})
        assert one(found, "head size").verdict == verdict
    assert "Above 2·d_k + 1" in one(found, "head size").text
    assert "--attention fixedhead --head-dim 65" in changes(one(found, "head size"))
    # a decoder that writes all words at once hides none of them
    lengths = {name: numpy.array([130]) for name in ("source", "target")}
    found = findings("nonautoregressive_transformer", ["--decoder-attention-heads", "4"], lengths=lengths)
    assert one(found, "head size", site="decoder").verdict == rule.WORST


def test_relative_scores_are_not_bounded_by_the_head_size():
    flags = ["--decoder-attention-heads", "64", "--attention-score", "relative"]
    assert not [finding for finding in findings(LM, flags) if finding.topic == "head size"]


def test_only_long_sequences_make_it_partly_a_bottleneck():
    assert (
        one(findings(TRANSLATION, ["--decoder-attention-heads", "16"]), "head size", site="decoder").verdict
        == rule.PARTLY
    )


def test_cross_attention_is_bounded_by_its_shorter_side():
    lengths = {"source": numpy.array([300]), "target": numpy.array([20])}
    found = findings(TRANSLATION, [], lengths=lengths)
    assert one(found, "head size", site="encoder").verdict == rule.WORST
    assert one(found, "head size", site="cross").verdict == rule.FINE


@pytest.mark.parametrize(("source", "target", "fine"), [(40, 8, True), (40, 9, False), (9, 40, True), (10, 40, False)])
def test_fewer_queries_than_keys_want_a_dimension_more(source, target, fine):
    """A constant a row takes one off the rank of log P where it has as many rows as columns, and else none."""
    patterns = torch.rand(target, source, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).softmax(-1)
    logs = patterns.log()
    if source <= target:
        # the constants that send a vector v to 0
        v = torch.ones(source, dtype=torch.float64)
        logs = logs - (logs @ v / v.sum())[:, None]
    assert (torch.linalg.matrix_rank(logs) <= 8) == fine
    lengths = {"source": numpy.array([source]), "target": numpy.array([target])}
    found = findings(TRANSLATION, ["--decoder-attention-heads", "64"], lengths=lengths)
    assert (one(found, "head size", site="cross").verdict == rule.FINE) == fine


def test_a_small_vocabulary_caps_the_width():
    finding = one(findings("lowrank_transformer_lm_wiki2", [], vocab_size=400, lengths={}), "embedding rank")
    assert finding.verdict == rule.BOTTLENECK
    assert finding.numbers["embedding_rank"] == 400
    assert "deepen rather than widen" in finding.text and "504" in finding.text
    assert changes(finding)["a vocabulary of at least 512 (subwords in place of characters)"] == 112 * 512  # tied
    untied = changes(one(findings(LM, [], vocab_size=257, lengths={}), "embedding rank"))
    assert untied["a vocabulary of at least 512 (subwords in place of characters)"] == 2 * 255 * 512
    wide_enough = one(findings("lowrank_transformer_lm_wiki2", [], vocab_size=512, lengths={}), "embedding rank")
    assert wide_enough.verdict == rule.FINE


def test_a_narrower_width_is_a_multiple_of_the_heads():
    found = one(findings(LM, [], vocab_size=257, lengths={}), "embedding rank")
    (narrower,) = [change for change, cost, *_ in found.changes if cost is None]
    assert narrower.startswith("width 256 and about 24 layers, the feed-forward in proportion")
    sizes = ["--decoder-embed-dim", "256", "--decoder-ffn-embed-dim", "1024", "--decoder-layers", "24"]
    layers = [count(build_model(arguments(LM, more), 257)) for more in ([], sizes)]
    before, after = (counted["attention"] + counted["feed_forward"] for counted in layers)
    assert after == pytest.approx(before, rel=0.01)


def test_more_heads_than_the_rank_leave_no_narrower_width():
    flags = ["--decoder-attention-heads", "32"]
    found = one(findings(LM, flags, vocab_size=20, lengths={}), "embedding rank")
    assert [change.partition(" ")[0] for change, *_ in found.changes] == ["a", "--embed-kernel"]


def test_a_smaller_head_is_no_remedy_for_a_small_one():
    flags = ["--attention", "fixedhead", "--head-dim", "600"]
    found = one(findings(LM, flags, lengths={"text": numpy.array([2000])}), "head size")
    assert not [change for change, *_ in found.changes if "fewer heads" in change]


def test_a_factored_embedding_caps_the_width_and_its_removal_is_costed():
    finding = one(
        findings("lowrank_transformer_lm", ["--embed-rank", "16"], vocab_size=2000, lengths={}), "embedding rank"
    )
    assert (finding.verdict, finding.numbers["embedding_rank"]) == (rule.BOTTLENECK, 16)
    assert changes(finding) == {
        "no --embed-rank": 2000 * 512 - 16 * (2000 + 512),
        "--embed-kernel 32 (a convolution over the last 32 tokens)": 31 * 16 * 512,
    }


def test_an_embedding_that_is_the_output_matrix_too_grows_on_both_sides():
    sizes = [
        "--decoder-embed-dim",
        "64",
        "--decoder-input-dim",
        "16",
        "--decoder-output-dim",
        "16",
        "--decoder-layers",
        "1",
    ]
    flags = [*sizes, "--share-decoder-input-output-embed"]
    finding = one(findings(LM, flags, lengths={}), "embedding rank")
    assert finding.changes[0].change == "--decoder-input-dim 64 --decoder-output-dim 64"
    assert finding.changes[0].parameters == 48 * 1000 - 2 * 16 * 64
    # two bands of ten words, and one of size 4 for all others
    bands = ["--adaptive-input", "--adaptive-input-cutoff", "10,20", "--decoder-input-dim", "64"]
    finding = one(findings(LM, [*sizes, *bands], lengths={}), "embedding rank")
    assert finding.numbers["embedding_rank"] == 24 and not finding.changes


def test_a_convolved_embedding_has_the_rank_of_its_kernel():
    flags = ["--embed-rank", "16", "--embed-kernel", "4"]
    finding = one(findings("lowrank_transformer_lm", flags, vocab_size=2000, lengths={}), "embedding rank")
    assert finding.numbers["embedding_rank"] == 64
    assert not [change for change in changes(finding) if "--embed-kernel" in change]


def test_adaptive_input_has_the_rank_of_its_bands_together():
    found = findings("lowrank_transformer_lm_wiki103", [], vocab_size=267744, lengths={})
    assert one(found, "embedding rank").numbers["embedding_rank"] == 1024


def test_shallow_models_are_told_that_depth_counts_most():
    for layers, verdict in ((5, rule.NOTE), (6, rule.FINE)):
        flags = ["--decoder-layers", str(layers)]
        finding = one(findings("lowrank_transformer_lm_wiki103_vanilla", flags, lengths={}), "depth")
        assert finding.verdict == verdict
    (deeper,) = one(
        findings("lowrank_transformer_lm_wiki103_vanilla", ["--decoder-layers", "3"], lengths={}), "depth"
    ).changes
    assert deeper.cached == 3 * 2 * 512
    totals = [
        count(build_model(arguments("lowrank_transformer_lm_wiki103_vanilla", ["--decoder-layers", layers]), 1000))[
            "total"
        ]
        for layers in ("6", "3")
    ]
    assert deeper.parameters == totals[0] - totals[1]


def test_attention_wider_than_the_model_is_named_with_the_papers_redundancy():
    flags = ["--attention", "fixedhead", "--head-dim", "256"]
    finding = one(findings("lowrank_transformer_lm_wiki2", flags, lengths={}), "attention width")
    assert (finding.verdict, finding.numbers["ratio"]) == (rule.BOTTLENECK, 4)
    assert "25 % at 4" in finding.text and "45 % at 16" in finding.text
    assert changes(finding)["--head-dim 64"] < 0
    narrow = one(findings("lowrank_transformer_lm_wiki2", [*flags, "--value-dim", "64"], lengths={}), "attention width")
    assert not [change for change in changes(narrow) if "--value-dim" in change]


def test_compositions_that_do_nothing_are_pointed_out():
    for flags in (["--attention", "avghead"], ["--attention", "sha", "--head-mixing", "static"]):
        assert one(findings("lowrank_transformer_lm_wiki2", flags, lengths={}), "composition")
    topics = [finding.topic for finding in findings("lowrank_transformer_lm_wiki2", ["--attention", "sha"], lengths={})]
    assert "composition" not in topics and "cost" not in topics


@pytest.mark.parametrize("architecture", ["transformer_iwslt_de_en", "transformer_lm_baevski_wiki103"])
def test_stock_architectures_get_the_costs_of_our_counterpart(architecture):
    found = findings(architecture, [], vocab_size=267744)
    assert changes(one(found, "cost"))["--attention mhe-mul"] < 0


def test_every_finding_has_numbers_and_a_source():
    for finding in findings(TRANSLATION, ["--encoder-attention-heads", "32"]):
        assert finding.source and finding.numbers and any(character.isdigit() for character in finding.text)


def test_the_command_reads_lengths_and_vocabulary_from_data(translation_data, capsys):
    flags = ["--arch", TRANSLATION, "--data", str(translation_data), "--encoder-attention-heads", "256", "--json"]
    assert cli.main(["advise", *flags]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["lengths"]["source"]["sequences"] == 240
    assert 4 <= data["lengths"]["source"]["mean"] <= 10 and data["lengths"]["source"]["longest"] == 10
    # eight words and fairseq's special symbols, filled up to a multiple of 8
    assert data["vocab_size"] == 16
    assert data["findings"][0]["verdict"] == "worst case"


def test_the_command_reads_a_checkpoint(trained, capsys):
    assert cli.main(["advise", "--checkpoint", str(trained("mixhead-b"))]) == 0
    printed = capsys.readouterr().out
    assert "text length: mean 12" in printed and "heads are mixed after the softmax" in " ".join(printed.split())
    assert cli.main(["advise", str(trained("stock"))]) == 0
    assert "--score-mixing static: +96 parameters" in capsys.readouterr().out


def test_a_model_of_pairs_takes_no_running_text(monkeypatch, language_model_data, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.pt").touch()
    args = arguments("transformer", [])
    found = (args, language_model_data, (99,), "none", "translation")
    monkeypatch.setattr(cli.command_modules(cli)["advise"], "from_checkpoint", lambda args: found)
    assert cli.main(["advise", "--checkpoint", "model.pt"]) == 2
    assert (
        "contains running text, and model.pt was trained with --task translation, on pairs" in capsys.readouterr().err
    )


def test_a_checkpoint_keeps_its_own_vocabulary(trained, language_model_data, translation_data, capsys):
    checkpoint = str(trained("mixhead-b"))
    assert cli.main(["advise", "--checkpoint", checkpoint, "--vocab-size", "99", "--length", "9"]) == 2
    assert "--vocab-size 99" in capsys.readouterr().err
    assert cli.main(["advise", "--checkpoint", checkpoint, "--data", str(translation_data)]) == 2
    assert "contains pairs of sentences" in capsys.readouterr().err
    [size] = read_vocab_sizes(language_model_data)
    assert cli.main(["advise", "--checkpoint", checkpoint, "--length", "9", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["vocab_size"] == size and 8 < found["measurement"]["mean_length"] <= 9


def test_the_vocabularies_of_source_and_target_are_counted(tmp_path, capsys):
    for language, words in (("de", 996), ("en", 296)):
        (tmp_path / f"dict.{language}.txt").write_text("".join(f"{word} 1\n" for word in range(words)))
    (tmp_path / "train.de-en.de.idx").touch()
    flags = ["--arch", TRANSLATION, "--data", str(tmp_path), "--length", "9", "--json"]
    assert cli.main(["advise", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["vocab_size"], found["target_vocab_size"]) == (1000, 300)
    sizes = {one["numbers"]["stack"]: one["numbers"] for one in found["findings"] if one["topic"] == "embedding rank"}
    assert {stack: numbers["vocab_size"] for stack, numbers in sizes.items()} == {"encoder": 1000, "decoder": 300}
    assert cli.main(["advise", *flags, "--vocab-size", "1000"]) == 0
    width = sizes["decoder"]["width"]
    assert json.loads(capsys.readouterr().out)["parameters"] - found["parameters"] == 2 * 700 * width


def test_text_read_by_sentences_has_their_lengths(language_model_data, capsys):
    flags = ["advise", "--arch", LM, "--data", str(language_model_data), "--tokens-per-sample", "64", "--json"]
    longest = []
    for more in ([], ["--sample-break-mode", "eos"]):
        assert cli.main([*flags, *more]) == 0
        longest.append(json.loads(capsys.readouterr().out)["lengths"]["text"]["longest"])
    assert longest[0] == 64 > longest[1]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--arch", TRANSLATION, "--length", "20"], "Add --vocab-size N"),
        (["--arch", TRANSLATION, "--vocab-size", "100"], "--data DIR"),
        (["--arch", TRANSLATION, "--vocab-size", "100", "--length", "0"], "--length 0"),
        (["--arch", TRANSLATION, "--data", "nowhere"], "nowhere"),
        (["--arch", TRANSLATION, "--vocab-size", "100", "--data", "tests"], "has no train.idx"),
        (["--arch", LM, "--vocab-size", "0", "--length", "9"], "--vocab-size 0: expected at least"),
        (["--arch", "lstm", "--vocab-size", "100", "--length", "9"], "--arch lstm: no check applies"),
        (["--checkpoint", "nowhere.pt"], "not a checkpoint file"),
        (["nowhere.pt", "--attention", "mha"], "--attention mha: does not work with a checkpoint"),
    ],
)
def test_bad_input_gets_one_line(arguments, message, capsys):
    assert cli.main(["advise", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_gain_for_each_head_is_told_to_lift_nothing():
    found = findings(LM, ["--attention", "gain"], lengths={"text": numpy.array([300])})
    size = one(found, "head size")
    assert "heads are mixed" not in size.text and "--head-mixing static" not in changes(size)
    assert "lifts no rank" in one(found, "composition").text


def test_the_command_names_what_its_remedies_need_and_no_bleu_for_language_models(capsys):
    flags = ["--vocab-size", "1000", "--length", "300"]
    assert cli.main(["advise", "--arch", "transformer_lm", *flags]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1].endswith("fairseq_lowrank --arch transformer_lm") and "--user-dir /" in text
    assert "--attention mhe-mul" in text and "BLEU" not in text
    assert cli.main(["advise", "--arch", "transformer", *flags]) == 0
    assert "% of the BLEU score" in capsys.readouterr().out
    assert cli.main(["advise", "--arch", "roberta_base", *flags]) == 0
    text = capsys.readouterr().out
    assert "--attention" in text and "BLEU" not in text


@pytest.mark.parametrize(
    "flags, grouped, one_key",
    [
        ([], "--attention gqa --key-value-heads 2", "--attention gqa --key-value-heads 1"),
        (["--attention", "mixhead-a"], "--key-value-heads 2", "--key-value-heads 1"),
        (["--attention", "gqa", "--key-value-heads", "4"], "--key-value-heads 2", "--key-value-heads 1"),
    ],
)
def test_fewer_keys_are_offered_with_what_they_keep_of_a_token(flags, grouped, one_key):
    finding = one(findings(f"{LM}_wiki103_vanilla", flags, lengths={}), "cache")
    layers, size = 6, 64
    heads = 4 if "gqa" in flags else 8
    assert finding.numbers["cached"] == layers * 2 * heads * size
    assert finding.numbers["after"] == {grouped: layers * 2 * 2 * size, one_key: layers * 2 * size}
    # W_K and W_V, and their biases
    saved = {flags: cost for flags, cost in (("2", (heads - 2)), ("1", (heads - 1)))}
    costs = [-layers * 2 * saved[number] * size * (512 + 1) for number in ("2", "1")]
    assert list(changes(finding).values()) == costs


def test_no_fewer_keys_are_offered_where_there_is_one_or_nothing_is_cached():
    random = ["--attention-score", "synthesizer-random", "--attention", "mqa"]
    assert (
        cached(build_model(arguments(LM, random), 1000))
        == cached(build_model(arguments(LM, ["--attention", "mqa"]), 1000)) / 2
    )
    for architecture, flags in ((LM, ["--attention", "mqa"]), (LM, ["--attention", "mhe-mul"]), ("roberta_base", [])):
        assert "cache" not in [finding.topic for finding in findings(architecture, flags, lengths={})]


def test_models_without_our_decoder_or_without_a_cache_get_advice():
    """A decoder that writes all words at once caches nothing, and fairseq's own attention caches keys and values."""
    small = ["--encoder-layers", "1", "--decoder-layers", "2"]
    at_once = checks.ModelSummary(arguments("levenshtein_transformer", small), 100, SHORT)
    assert at_once.cached == 0 and "cache" not in {finding.topic for finding in checks.advise_on(at_once)}
    fixed = checks.ModelSummary(arguments("s2t_conformer", small), 100, SHORT)
    assert fixed.options is None and fixed.cached == 2 * 2 * fixed.sites["decoder"].embed_dim
    assert {"head size", "depth"} <= {finding.topic for finding in checks.advise_on(fixed)}


def test_the_cache_of_methods_with_several_group_counts_is_that_of_decoding():
    sizes = ["--attention", "lrkv", "--rank", "4", "--head-dim", "450"]
    now, larger = (build_model(arguments(LM, flags), 1000) for flags in (sizes[:4], sizes))
    layer = attention_layers(now)[0].module
    per_token = 2 * (layer.head_dim + 4 * layer.num_heads)
    assert cached(now) == len(attention_layers(now)) * per_token
    # only the shared key and value grow
    assert cached(larger) - cached(now) == len(attention_layers(now)) * 2 * (450 - layer.head_dim)


def test_values_narrower_than_the_model_are_pointed_out_with_the_cost_of_wider_ones():
    architecture = f"{LM}_wiki103_vanilla"
    finding = one(findings(architecture, ["--attention", "mqa"], lengths={}), "value width")
    assert "64 numbers of a position, of d = 512" in finding.text
    assert list(changes(finding)) == ["--value-dim 128", "--value-dim 512"]
    before = total(architecture, ["--attention", "mqa"], 1000)
    for change, cost, *_ in finding.changes:
        assert cost == total(architecture, ["--attention", "mqa", *change.split()], 1000) - before
    for flags in ([], ["--attention", "skv"], ["--attention", "tpa"], ["--attention", "mqa", "--value-dim", "512"]):
        assert "value width" not in [found.topic for found in findings(architecture, flags, lengths={})]
    # what a latent lacks, no wider value adds; and a shared value with a factor for each head holds both
    latent = one(findings(architecture, ["--attention", "mla", "--latent-dim", "96"], lengths={}), "value width")
    factors = one(findings(architecture, ["--attention", "lrkv", "--rank", "2"], lengths={}), "value width")
    assert [found.numbers["value_rank"] for found in (latent, factors)] == [96, 64 + 8 * 2] and not latent.changes
    wide = one(findings(architecture, ["--attention", "fixedhead", "--head-dim", "256"], lengths={}), "attention width")
    narrower = changes(wide)["--value-dim 64 (scores keep their rank)"]
    assert changes(wide)["--head-dim 64"] < narrower < 0


def test_scores_that_are_mixed_are_judged_by_the_rank_of_all_heads():
    heads = ["--decoder-attention-heads", "64"]  # of size 8
    for flags in (["--score-mixing", "static"], ["--attention", "talking-heads"]):
        fine = one(findings(LM, [*heads, *flags], lengths={"text": numpy.array([300])}), "head size")
        assert fine.verdict == rule.FINE and fine.numbers["score_rank"] == 512 and not fine.changes
        assert "rank r = 512" in fine.text
        short = one(findings(LM, [*heads, *flags], lengths={"text": numpy.array([1280])}), "head size")
        assert short.verdict == rule.WORST and "Above 2·r + 1" in short.text
        # 512 is the width, which bounds the rank for every head size
        assert not short.changes and "no heads in this width are large enough" in short.text
    # one head of keys for all: mixing its scores lifts nothing
    shared = findings(
        LM, [*heads, "--attention", "mqa", "--score-mixing", "static"], lengths={"text": numpy.array([300])}
    )
    assert one(shared, "head size").numbers["score_rank"] == 8


@pytest.mark.parametrize(
    "flags, offered",
    [([], True), (["--attention", "mhe-mul"], False), (["--attention", "gqa", "--key-value-heads", "32"], True)],
)
def test_mixing_of_scores_is_offered_where_there_are_several_heads_of_keys(flags, offered):
    flags = ["--decoder-attention-heads", "64", *flags]
    costs = changes(one(findings(LM, flags, lengths={"text": numpy.array([300])}), "head size"))
    assert ("--score-mixing static" in costs) == offered
    if offered:
        assert costs["--score-mixing static"] == total(LM, [*flags, "--score-mixing", "static"], 1000) - total(
            LM, flags, 1000
        )


def test_own_factors_of_heads_lift_no_rank(methods_leave):
    class Halves(PARTS["score_mixing"]["diagonal"]):
        name = "halves"

    register(Method("halves", "A test", "f", {"score_mixing": Halves}))
    layers = [build_attention(preset, 32, 4, self_attention=True) for preset in ("halves", "talking-heads")]
    assert [rule.score_rank(layer) for layer in layers] == [8, 32]


def test_verdict_counts_the_heads_that_are_large_enough():
    def verdict(flags, length, architecture=TRANSLATION):
        lengths = {name: numpy.array([length]) for name in (("text",) if "_lm" in architecture else SHORT)}
        return rule.verdict(checks.ModelSummary(arguments(architecture, flags), 1000, lengths))

    found = verdict([], 240)
    assert (found["too_small"], found["large_enough"]) == (["encoder", "cross"], ["decoder"])
    assert found["most_heads"] == {"encoder": 2, "decoder": 4, "cross": 2}
    assert len(found["lines"]) == 3 and "needs encoder rank 239 (heads have 128), cross rank 239" in found["lines"][0]
    # one head of the width's 512 dimensions makes 513 positions, and 1025 under a causal mask
    assert verdict([], 514)["most_heads"] == {"encoder": 0, "decoder": 1, "cross": 0}
    # neither a given head size nor mixed scores depend on the number of heads
    given = verdict(["--attention", "fixedhead", "--head-dim", "64"], 300, LM)
    assert given["too_small"] == ["decoder"] and given["most_heads"] == {"decoder": None}
    assert given["lines"][-1].endswith("in 95 % of the sequences: decoder not even one.")
    assert verdict(["--score-mixing", "static"], 300, LM)["most_heads"] == {"decoder": None}
    # the features of a factorisation are given too, and a latent bounds every head
    assert verdict(["--attention", "collaborative"], 300, LM)["most_heads"] == {"decoder": None}
    assert verdict(["--attention", "mla", "--latent-dim", "64"], 300, LM)["most_heads"] == {"decoder": 0}


def test_no_remedy_is_listed_that_does_not_suffice():
    """Every remedy, built, passes the check that it is for."""
    cases = [(TRANSLATION, [], 240), (TRANSLATION, ["--encoder-attention-heads", "64"], 60), (LM, [], 900)]
    cases += [(LM, ["--decoder-embed-dim", "256", "--decoder-input-dim", "256", "--decoder-output-dim", "256"], 514)]
    cases += [(LM, ["--decoder-embed-dim", "256", "--decoder-input-dim", "256", "--decoder-output-dim", "256"], 513)]
    cases += [(LM, ["--attention", "mla", "--latent-dim", "64"], 300)]
    cases += [(LM, ["--attention", "collaborative", "--shared-dim", "16"], 300)]
    listed, one_layer = [], ["--encoder-layers", "1", "--decoder-layers", "1"]
    for architecture, flags, length in cases:
        flags = [*flags, *one_layer[2 if architecture == LM else 0 :]]
        lengths = {name: numpy.array([length]) for name in (("text",) if architecture == LM else SHORT)}
        for finding in findings(architecture, flags, lengths=lengths):
            if finding.topic == "head size":
                for change, *_ in finding.changes:
                    more = change.partition(" (")[0].split()
                    after = findings(architecture, [*flags, *more], lengths=lengths)
                    assert one(after, "head size", site=finding.numbers["site"]).verdict == rule.FINE, change
                listed.append(len(finding.changes))
    # a width of 256 makes 513 causal positions at most, and fewer heads do not enlarge a latent or shared features
    assert listed[-4:] == [0, 3, 0, 0]


def test_a_smaller_head_is_no_remedy_for_wide_attention_if_it_is_too_small():
    flags = ["--attention", "fixedhead", "--head-dim", "256"]
    offered = [
        "--head-dim 64"
        in changes(one(findings("lowrank_transformer_lm_wiki2", flags, lengths=lengths), "attention width"))
        for lengths in ({"text": numpy.array([129])}, {"text": numpy.array([130])})
    ]
    assert offered == [True, False]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_with_small_heads_gets_advice(preset):
    needed = {} if METHODS[preset].needs is None else METHODS[preset].examples[0]
    sizes = [word for name, value in needed.items() for word in (f"--{AXES[name].flag.replace('_', '-')}", str(value))]
    flags = ["--attention", preset, "--decoder-attention-heads", "8", "--decoder-layers", "1", *sizes]
    found = findings(LM, flags, lengths={"text": numpy.array([1200])})
    assert {"embedding rank", "depth", "attention width"} <= {finding.topic for finding in found}


def test_the_command_gives_its_verdict_first_and_folds_what_is_fine(capsys):
    flags = ["advise", "--arch", TRANSLATION, "--vocab-size", "1000", "--length", "240"]
    assert cli.main(flags) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0].startswith("Not measured: an architecture has no trained heads")
    assert (
        lines[1].startswith("Worst case: some pattern of this length needs encoder")
        and "cross 2" in lines[3]
        and not lines[4]
    )
    assert "worst case: head size" in lines and "BOTTLENECK: head size" not in text
    assert "source length: 240 (--length)" in lines and "mean" not in text
    assert not any(line.startswith("fine: ") and "--all" not in line for line in lines)
    # mixing after the softmax is measured with its limits, and is no remedy
    assert not any("→" in line and "mixhead" in line for line in lines)
    assert cli.main([*flags, "--all"]) == 0
    assert "fine: depth" in capsys.readouterr().out


def advice(capsys, *flags):
    assert cli.main(["advise", *map(str, flags)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ["stock", "mixhead-b"])
def test_a_checkpoint_with_data_is_measured_first(trained, name, tmp_path, capsys):
    text = advice(capsys, "--checkpoint", trained(name), "--sequences", 4, "--output", tmp_path / "out")
    assert text.startswith("Measured: all heads, the scores: ") and text.index("Measured") < text.index("Most heads")
    assert (tmp_path / "out" / "advise.png").is_file()
    assert advice(capsys, "--checkpoint", trained(name), "--sequences", 0).startswith("Not measured: --sequences 0")
    text = advice(capsys, "--checkpoint", trained(name), "--sequences", 4, "--json")
    assert json.loads(text)["measurement"]["verdicts"][0]["where"] == "all heads"


def test_a_model_that_is_not_measured_says_why(trained, monkeypatch, capsys):
    monkeypatch.setattr(
        cli.command_modules(cli)["advise"], "measure", lambda args, data: {"not_measured": "it writes all"}
    )
    assert advice(capsys, "--checkpoint", trained("stock")).startswith("Not measured: it writes all.")


def test_measurements_are_printed_for_models_of_their_kind(capsys):
    sizes = ["--vocab-size", 1000, "--length", 2000]
    pre_norm = advice(capsys, "--arch", "transformer_lm_gpt", *sizes)
    assert "(pre-norm decoder)" in pre_norm and "leads by 0.143 bits" in pre_norm and "0.385" not in pre_norm
    translation = advice(capsys, "--arch", "transformer", *sizes)
    assert "0.385" in translation and "0.143" not in " ".join(translation.split("fine:")[0].split())
    assert "(--score-mixing static) (synthetic task)" in " ".join(translation.split())
    encoder = advice(capsys, "--arch", "roberta_base", *sizes)
    assert "0.32 points" in " ".join(encoder.split()) and "0.385" not in encoder


def test_a_remedy_has_its_price_in_cache_and_time(capsys):
    flags = ["--vocab-size", 1000, "--length", 300, "--decoder-attention-heads", 64]
    data = json.loads(advice(capsys, "--arch", LM, *flags, "--json"))
    (found,) = [one for one in data["findings"] if one["topic"] == "head size"]
    prices = {change["change"].partition(" (")[0]: change for change in found["changes"]}
    assert prices["--score-mixing static"]["cached"] == 0 and prices["--score-mixing static"]["time"] == 1.6
    # 64 heads of 150 numbers in place of 8, for keys and values of 6 layers
    assert prices["--attention fixedhead --head-dim 150"]["cached"] == 6 * 2 * 64 * (150 - 8)
    assert prices["--decoder-attention-heads 2"]["cached"] == 0 and prices["--decoder-attention-heads 2"]["time"] == 0.7
    text = advice(capsys, "--arch", LM, *flags)
    assert "numbers of each token in the cache" in text and "1.6 times the time of an update" in text


def test_the_command_says_so_if_a_remedy_doubles_the_model(capsys):
    small = "--encoder-layers 3 --decoder-layers 3 --encoder-embed-dim 256 --decoder-embed-dim 256"
    heads = "--encoder-attention-heads 32 --decoder-attention-heads 32"
    arguments = [*small.split(), *heads.split(), "--length", "100", "--vocab-size", "1000"]
    assert cli.main(["advise", "--arch", TRANSLATION, *arguments]) == 0
    larger = [line for line in capsys.readouterr().out.splitlines() if "→ --attention fixedhead" in line]
    assert larger and all("more than twice the model" in line for line in larger)


def test_a_folder_without_data_is_in_the_fields_of_the_error(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        for read in (read_vocab_sizes, lambda folder: read_lengths(folder, "train")):
            with pytest.raises(FlagError) as error:
                read(folder)
            assert (error.value.flag, error.value.value) == ("--data", folder)
