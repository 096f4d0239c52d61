"""Searches ban repeated n-grams, keep beams diverse and can limit each sentence by its own length."""

import pytest

pytest.importorskip("fairseq")

import torch
from fairseq import search
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.sequence_generator import SequenceGenerator
from tiny_transformer import SIZES, build, make_task, sentences, shake

from fairseq_lowrank.messages import UserError
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


def batch(*lengths, ids=None):
    """Return a batch of sentences; a sentence of the same length has the same words in every batch."""
    dictionary = make_task().source_dictionary
    rows = [sentences(dictionary, length, left_pad=True) for length in lengths]
    source = torch.full((len(rows), max(lengths) + 1), dictionary.pad())
    for target, row in zip(source, rows, strict=True):
        target[-row.numel() :] = row
    net_input = {"src_tokens": source, "src_lengths": source.ne(dictionary.pad()).sum(1)}
    return {"id": torch.tensor(ids or range(len(rows))), "net_input": net_input}


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


@pytest.mark.parametrize("ids", [(2, 0, 3, 1), (70, 5, 81, 9)], ids=["permuted", "beyond the batch"])
def test_diverse_beams_depend_on_no_id(model, ids, caplog):
    dictionary = make_task().target_dictionary

    def found(sample):
        strategy = search.DiverseBeamSearch(dictionary, num_groups=2, diversity_strength=2.0)
        return generate(model, sample, search_strategy=strategy)

    alone = [found(batch(length))[0] for length in LENGTHS]
    with caplog.at_level("INFO"):
        assert found(batch(*LENGTHS)) == alone
        assert not caplog.messages
        assert found(batch(*LENGTHS, ids=ids)) == alone
    assert caplog.text.count("--diverse-beam-groups") == 1


def test_diverse_beams_keep_their_overlaps_when_sentences_leave():
    dictionary, kept = make_task().target_dictionary, torch.tensor([1, 3])
    lprobs = torch.randn(3, 4, 4, len(dictionary)).log_softmax(-1)
    lprobs[0, 3] = lprobs[0, 3, 0]  # all groups of this sentence choose the same words, so that its overlaps are large

    def steps(batch, later):
        """Return the last step of a batch from which all sentences but ``later`` leave after the first step."""
        strategy = search.DiverseBeamSearch(dictionary, num_groups=2, diversity_strength=0.5)
        scores = torch.zeros(len(batch), 4, 0)
        for step, rows in enumerate((batch, batch[later], batch[later])):
            if step == 1:
                strategy.prune_sentences(later)
                scores = scores[later]
            previous = torch.zeros(4 * len(rows), step + 1).long()
            found = strategy.step(step, lprobs[step, rows], scores, previous, rows)
            scores = torch.cat((scores, found[0][:, :4, None]), dim=2)
        return [tensor.tolist() for tensor in (*found, strategy.group_overlap)]

    assert steps(torch.arange(4), kept) == steps(kept, torch.arange(2))


def test_diverse_beams_compile():
    dictionary = make_task().target_dictionary
    strategy = search.DiverseBeamSearch(dictionary, num_groups=2, diversity_strength=2.0)
    lprobs, previous = torch.randn(2, 2, 4, len(dictionary)).log_softmax(-1), torch.zeros(8, 1).long()
    ids = torch.tensor([70, 5])
    found = []
    for module in (strategy, torch.jit.script(strategy)):
        first = module.step(0, lprobs[0], torch.zeros(2, 4, 0), previous, ids)
        second = module.step(1, lprobs[1], first[0][:, :4, None], previous, ids)
        found.append([tensor.tolist() for tensor in (*first, *second)])
    assert found[0] == found[1]


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


def test_sampling_refuses_more_words_than_the_vocabulary():
    dictionary = make_task().target_dictionary
    search.Sampling(dictionary, sampling_topk=len(dictionary))
    with pytest.raises(UserError, match="--sampling-topk 1000: the vocabulary has"):
        search.Sampling(dictionary, sampling_topk=1000)
