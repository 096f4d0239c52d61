"""Names of corpora: what a folder is called says how it was made, and the other way round."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.corpora.__main__ import build_parser, expand, folder, locate
from experiments.corpora.catalogue import CORPORA, parse_corpus_name
from experiments.corpora.pieces import model_and_dictionary_paths


def forms(corpus):
    """Values of all arguments that show in names."""
    return st.fixed_dictionaries(
        {
            argument.name: st.booleans()
            if argument.is_switch
            else st.sampled_from(argument.options["choices"])
            if "choices" in argument.options
            else st.none() | st.integers(1, 10**9)
            if argument.options.get("type")
            else st.none() | st.sampled_from(["brown-bpe8000", "wikitext-103-bpe30000"])
            for argument in corpus.parts
        }
    ).map(lambda values: values | ({"bert": None} if values.get("pieces_of") else {}))


# Names of own text are chosen, and known where it is prepared.
PUBLISHED = [corpus for corpus in CORPORA.values() if corpus.name != "own"]
any_form = st.sampled_from(PUBLISHED).flatmap(lambda corpus: st.tuples(st.just(corpus), forms(corpus)))


@given(any_form)
def test_a_name_is_read_as_what_it_was_spelt_from(form):
    corpus, values = form
    name = corpus.variant_name(values)
    assert parse_corpus_name(name) == (corpus, values)
    assert [one.name for one in CORPORA.values() if one.values(name) is not None] == [corpus.name]


@given(
    st.text("-0123456789abdehjoprxw", max_size=20).flatmap(
        lambda end: st.sampled_from([c.name + end for c in PUBLISHED])
    )
)
def test_what_can_be_read_is_spelt_the_same(name):
    try:
        corpus, values = parse_corpus_name(name)
    except ValueError as error:
        assert str(error).startswith(f"no corpus '{name}' here. Use one of ")
    else:
        assert corpus.variant_name(values) == name


@given(any_form)
def test_a_name_on_the_command_line_makes_the_folder_of_that_name(form):
    corpus, values = form
    name = corpus.variant_name(values)
    args = build_parser().parse_args(expand([name]))
    assert {key: getattr(args, key) for key in values} == values
    locate(args)
    joined = f"-x{args.join}" if getattr(args, "join", None) else ""
    assert args.output.name + joined == name


# Folders that were made under these names, and what prepares them.
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("multi30k", ""),
        ("iwslt14-x10", "--join 10"),
        ("iwslt14-joined", "--joined-dictionary"),
        ("wmt14", ""),
        ("wikitext-103-bpe2000", "--size 103 --pieces 2000"),
        ("wikitext-2-head5", "--size 2 --head 5"),
        ("brown-head500-bpe300", "--head 500 --pieces 300"),
        ("lm1b", ""),
        ("glue-mnli-by-brown-bpe8000", "--task mnli --pieces-of brown-bpe8000"),
        ("squad-1.1", "--version 1.1"),
    ],
)
def test_names_stay_what_they_were(name, words):
    corpus, values = parse_corpus_name(name)
    assert corpus.name == re.match("[a-z0-9]+", name)[0] and corpus.words(values) == words.split()


@pytest.mark.parametrize(
    "name", ["iwslt14-bpe2000", "wikitext", "wikitext-3", "brown-bpe9-head5", "brown-head05", "wmt14-x2"]
)
def test_a_name_of_no_form_is_refused_with_those_there_are(name):
    with pytest.raises(ValueError, match=rf"^no corpus '{name}' here\. Use one of .*brown\[-headN\]\[-bpeN\], "):
        parse_corpus_name(name)


def test_a_command_line_without_a_form_is_left_as_it_is():
    for words in ([], ["--help"], ["wikitext", "--size", "2"]):
        assert expand(words) == words


def test_a_folder_is_named_for_the_published_bert(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWRANK_WORK", str(tmp_path))
    names = [folder(["rte", *words]).name for words in ([], ["--bert", str(tmp_path / "bert-large")])]
    assert names == ["rte", "rte-from-bert-large"]
    args = build_parser().parse_args(expand(["rte-from-bert-large"]))
    (tmp_path / "elsewhere" / "bert-large").mkdir(parents=True)  # the published folder, not the imported one
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert model_and_dictionary_paths(args)[0] == tmp_path / "bert-large" / "wordpieces.json"
