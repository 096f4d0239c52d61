"""Searches ban repeated n-grams and can limit each sentence by its own length."""

import pytest

pytest.importorskip("fairseq")

import torch
from fairseq import search
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.sequence_generator import SequenceGenerator
from tiny_transformer import SIZES, build, make_task, sentences, shake

from fairseq_lowrank.repairs import patches
from fairseq_lowrank.repairs.patch import locate
from fairseq_lowrank.repairs.search import log_once

MODELS = {
    "stock": ("transformer_iwslt_de_en",),
    "mixhead-b": ("lowrank_transformer_iwslt_de_en", "--attention", "mixhead-b"),
}
LENGTHS = (9, 3, 6, 4)


@pytest.fixture(autouse=True)
def unlogged():
    log_once.cache_clear()


@pytest.fixture(params=MODELS)
def model(request):
    arch, *flags = MODELS[request.param]
    return shake(build(arch, *SIZES, *flags, task=make_task()))


def batch(*lengths):
    """Return a batch of sentences; a sentence of the same length has the same words in every batch."""
    dictionary = make_task().source_dictionary
    rows = [sentences(dictionary, length, left_pad=True) for length in lengths]
    source = torch.full((len(rows), max(lengths) + 1), dictionary.pad())
    for target, row in zip(source, rows, strict=True):
        target[-row.numel() :] = row
    net_input = {"src_tokens": source, "src_lengths": source.ne(dictionary.pad()).sum(1)}
    return {"id": torch.arange(len(rows)), "net_input": net_input}


def generate(model, sample, **options):
    """Return the hypotheses of each sentence as pairs of tokens and rounded score."""
    dictionary = make_task().target_dictionary
    options = {"beam_size": 4, "max_len_a": 0, "max_len_b": 12, **options}
    found = SequenceGenerator([model], dictionary, **options).generate([model], sample)
    return [[(tuple(h["tokens"].tolist()), round(h["score"].item(), 3)) for h in best] for best in found]


def repeats(tokens, size):
    ngrams = list(zip(*(tokens[start:] for start in range(size)), strict=False))
    return len(ngrams) > len(set(ngrams))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_generate_repeats_no_ngram(model, size):
    free, banned = (generate(model, batch(*LENGTHS), no_repeat_ngram_size=n) for n in (0, size))
    assert any(repeats(tokens, size) for best in free for tokens, _ in best)
    assert [len(best) for best in banned] == [4] * len(LENGTHS)
    assert not any(repeats(tokens, size) for best in banned for tokens, _ in best)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ngram_block_bans_exactly_the_repeats(size, compiled):
    words, length, eos = 5, 12, 0
    block = NGramRepeatBlock(size)
    block = torch.jit.script(block) if compiled else block
    tokens = torch.randint(1, words, (6, length))
    tokens[:, 0] = eos
    for step in range(length):
        padded = tokens.clone()
        padded[:, step + 1 :] = 4  # also a word
        found = block(padded, torch.zeros(6, words), 2, 3, step).isneginf()
        for row, banned in zip(tokens[:, : step + 1].tolist(), found.tolist(), strict=True):
            seen = {tuple(row[i : i + size]) for i in range(1 if size == 1 else 0, len(row) - size + 1)}
            end = row[len(row) - size + 1 :]
            assert banned == [len(end) == size - 1 and (*end, word) in seen for word in range(words)]


def test_ngram_block_logs_that_it_bans(caplog):
    with caplog.at_level("INFO"):
        NGramRepeatBlock(2)
        NGramRepeatBlock(2)
    assert caplog.text.count("--no-repeat-ngram-size 2") == 1


@pytest.fixture
def own_length_limit(monkeypatch):
    for patch in patches.PATCHES:
        if patch.name == "own-length-limit":
            holder, attribute = locate(patch.target)
            monkeypatch.setattr(holder, attribute, patch.wrap(getattr(holder, attribute)))


@pytest.mark.parametrize(
    "options",
    [
        {"max_len_a": 1.0, "max_len_b": 0},
        {"max_len_a": 0.1, "max_len_b": 0, "min_len": 0},  # the limit of a short sentence is 0 tokens
        {"match_source_len": True},
    ],
    ids=str,
)
def test_own_length_limit_depends_on_no_neighbour(model, own_length_limit, options):
    alone = [generate(model, batch(length), **options)[0] for length in LENGTHS]
    assert generate(model, batch(*LENGTHS), **options) == alone


def test_own_length_limit_is_reached_and_logged(model, own_length_limit, caplog):
    with caplog.at_level("INFO"):
        found = generate(model, batch(*LENGTHS), max_len_a=1.5, max_len_b=1)
    longest = [max(len(tokens) for tokens, _ in best) for best in found]
    assert longest == [int(1.5 * (length + 1) + 1) + 1 for length in LENGTHS]  # both ends of sentences count
    assert "--max-len-a 1.5" in caplog.text


def test_own_length_limit_waits_for_a_prefix(model, own_length_limit):
    prefix = torch.full((len(LENGTHS), 7), 6)
    found = SequenceGenerator([model], make_task().target_dictionary, beam_size=2, max_len_a=1.0, max_len_b=0)
    best = found.generate([model], batch(*LENGTHS), prefix_tokens=prefix)
    assert all(hypothesis["tokens"][:7].tolist() == [6] * 7 for sentence in best for hypothesis in sentence)


def test_own_length_limit_keeps_constraints(model, own_length_limit):
    dictionary, word = make_task().target_dictionary, 9
    strategy = search.LexicallyConstrainedBeamSearch(dictionary, "ordered")
    generator = SequenceGenerator(
        [model], dictionary, beam_size=4, max_len_a=1.0, max_len_b=0, search_strategy=strategy
    )
    found = generator.generate([model], batch(9, 5), constraints=torch.tensor([[1, word, 0]] * 2))
    assert all(word in best[0]["tokens"] for best in found)
