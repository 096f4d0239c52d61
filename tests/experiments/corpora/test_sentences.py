"""Sentences with labels, from the files of their publishers to fairseq's layout."""

import gzip
import json
import shutil

import pytest

from experiments.corpora.catalogue import CORPORA, parse_corpus_name
from experiments.corpora.cutting import IN_SENTENCES, words
from experiments.corpora.glue import TASKS
from experiments.corpora.superglue import TASKS as SUPERGLUE
from experiments.corpora.text import BytePieces
from fairseq_lowrank.files import read_lines, write_lines

TEXT = ["the cat sat on the mat .", "no dogs were seen , not one !", "entailment is what follows from what is said"] * 5


@pytest.fixture
def own(tmp_path):
    """The name of a corpus that is prepared in 300 sub-words."""
    folder = tmp_path / "work" / "data" / "brown-bpe300"
    (folder / "bin").mkdir(parents=True)
    write_lines(tmp_path / "text", TEXT)
    BytePieces.train([tmp_path / "text"], folder / "bpe.model", 300)
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "bpe.model"))
    write_lines(folder / "bin" / "dict.txt", [f"{model.id_to_piece(i)} 1" for i in range(1, model.get_piece_size())])
    return "brown-bpe300"


def joined(path) -> list[str]:
    """Lines of pieces as the text that they were cut from."""
    return [line.replace(" ", "").replace("▁", " ").strip() for line in read_lines(path)]


def tokens(folder, field, split) -> list[list[str]]:
    from fairseq.data import Dictionary, data_utils

    dictionary = Dictionary.load(str(folder / field / "dict.txt"))
    data = data_utils.load_indexed_dataset(str(folder / field / split), dictionary)
    return [[dictionary[token] for token in sentence] for sentence in data]


def test_words_of_sentences_are_as_in_the_brown_corpus():
    text = 'Atlanta\'s well-known "price" is $37.80, (U.S.) e\u0301te\u0301 6½.'
    assert [text[start:end] for start, end in words(text, IN_SENTENCES)] == [
        "Atlanta's",
        "well-known",
        '"',
        "price",
        '"',
        "is",
        "$",
        "37.80",
        ",",
        "(",
        "U.S",
        ".",
        ")",
        "été",
        "6½",
        ".",
    ]


def test_glues_rte_becomes_fairseqs_layout(prepare, own, tmp_path):
    data = tmp_path / "glue" / "RTE"
    write_lines(
        data / "train.tsv",
        [
            "index\tsentence1\tsentence2\tlabel",
            '0\tThe "cat" sat.\tA cat sat\tentailment',
            "1\tNo dogs\tDogs\tnot_entailment",
        ],
    )
    write_lines(data / "dev.tsv", ["index\tsentence1\tsentence2\tlabel", "0\tone\tone\tnot_entailment"])
    write_lines(data / "test.tsv", ["index\tsentence1\tsentence2", "0\tone\ttwo"])
    status, said = prepare(f"glue-rte-by-{own}", "--data", data.parent)
    assert status == 0, said
    folder = tmp_path / "work" / "data" / f"glue-rte-by-{own}"
    assert joined(folder / "bpe" / "train.input0") == ['The " cat " sat .', "No dogs"]
    assert [len(line) for line in tokens(folder / "bin", "label", "train")] == [2, 2]
    assert [line[0] for line in tokens(folder / "bin", "label", "train")] == ["entailment", "not_entailment"]
    # classes are numbered as the task has them, not by how often they are
    labels = [line.split()[0] for line in read_lines(folder / "bin" / "label" / "dict.txt")]
    assert labels[:2] == ["entailment", "not_entailment"]
    assert len(tokens(folder / "bin", "input1", "test")) == 1 and not (folder / "bin" / "label" / "test.bin").exists()
    about = json.loads((folder / "bin" / "task.json").read_text())
    assert about["labels"] == ["entailment", "not_entailment"] and about["server"] == {"test": "RTE.tsv"}


# A line of each file with the names of its columns, as GLUE publishes it.
FILES = {
    "cola": {
        "train.tsv": "gj04\t1\t\tA sentence.",
        "dev.tsv": "gj04\t0\t*\tNo sentence.",
        "test.tsv": "index\tsentence|0\tOne.",
    },
    "sst-2": {"train.tsv": "sentence\tlabel|fine \t1", "test.tsv": "index\tsentence|0\tbad"},
    "mrpc": {
        "train.tsv": "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String|1\t1\t2\tOne.\tTwo.",
        "test.tsv": "index\t#1 ID\t#2 ID\t#1 String\t#2 String|0\t1\t2\tOne.\tTwo.",
    },
    "sts-b": {
        "train.tsv": "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore|0\ta\tb\tc\td\te\tf\tOne.\tTwo.\t3.8",
        "test.tsv": "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2|0\ta\tb\tc\td\te\tf\tOne.\tTwo.",
    },
    "qqp": {
        "train.tsv": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate|1\t2\t3\tWho?\tWhat?\t0|4\t5\t6\tcut",
        "dev.tsv": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate|1\t2\t3\tWho?\tWhat?\t1",
        "test.tsv": "id\tquestion1\tquestion2|0\tWho?\tWhat?",
    },
    "mnli": {
        "train.tsv": "index\tpromptID\tpairID\tgenre\tsentence1\tsentence2\tlabel1\tgold_label|0\t1\t2\tx\tOne.\tTwo.\tcontradiction\tneutral",
        "test_matched.tsv": "index\tpromptID\tpairID\tgenre\tsentence1\tsentence2|0\t1\t2\tx\tOne.\tTwo.",
    },
    "qnli": {
        "train.tsv": "index\tquestion\tsentence\tlabel|0\tWho?\tHe.\tentailment",
        "test.tsv": "index\tquestion\tsentence|0\tWho?\tHe.",
    },
    "wnli": {
        "train.tsv": "index\tsentence1\tsentence2\tlabel|0\tIt is.\tHe is.\t1",
        "test.tsv": "index\tsentence1\tsentence2|0\tA\tB",
    },
}


# What the training line of each says: sentences, cut as in the Brown corpus, and label.
TRAINING = {
    "cola": (["A sentence ."], "1"),
    "sst-2": (["fine"], "1"),
    "mrpc": (["One .", "Two ."], "1"),
    "sts-b": (["One .", "Two ."], "3.8"),
    "qqp": (["Who ?", "What ?"], "0"),
    "mnli": (["One .", "Two ."], "neutral"),
    "qnli": (["Who ?", "He ."], "entailment"),
    "wnli": (["It is .", "He is ."], "1"),
}


@pytest.mark.parametrize("name", FILES)
def test_every_task_of_glue_is_read_as_published(prepare, own, tmp_path, name):
    published = TASKS[name]
    data = tmp_path / "glue" / published.folder
    for split, file in published.files.items():
        kinds = {"train": "train.tsv", "test": next(one for one in FILES[name] if one.startswith("test"))}
        text = FILES[name].get(file) or FILES[name][kinds["test" if split.startswith("test") else "train"]]
        write_lines(data / file, text.split("|"))
    status, said = prepare(f"glue-{name}-by-{own}", "--data", data.parent)
    assert status == 0, said
    folder = tmp_path / "work" / "data" / f"glue-{name}-by-{own}" / "bin"
    sentences, label = TRAINING[name]
    for index, sentence in enumerate(sentences):
        assert joined(folder.with_name("bpe") / f"train.input{index}") == [sentence]
    assert list(read_lines(folder.with_name("raw") / "train.label")) == [label]
    for split in published.files:
        assert len(tokens(folder, "input0", split)) == 1
        if len(published.columns) == 2:
            assert len(tokens(folder, "input1", split)) == 1
    if name == "sts-b":
        assert list(read_lines(folder / "label" / "train.label")) == ["3.8"]
    else:
        label = tokens(folder, "label", "train")[0][0]
        assert label in published.task.labels
    assert set(published.task.server) == {split for split in published.files if split.startswith("test")}


def test_a_label_or_a_file_of_another_form_is_refused(prepare, own, tmp_path):
    data = tmp_path / "glue" / "WNLI"
    for name in ("train", "dev", "test"):
        write_lines(data / f"{name}.tsv", ["index\tsentence1\tsentence2\tlabel", "0\ta\tb\tperhaps"])
    refused = prepare(f"glue-wnli-by-{own}", "--data", data.parent)
    assert refused[0] == 2 and "wnli: the label 'perhaps' is not one of 0, 1" in refused[1]
    write_lines(data / "train.tsv", ["index\tsentence\tlabel", "0\ta\t1"])
    assert "has no column sentence1, sentence2" in prepare(f"glue-wnli-by-{own}", "--data", data.parent)[1]


def test_other_data_for_what_is_made_already_are_refused(prepare, own, tmp_path):
    for folder, word in (("one", "cat"), ("other", "dog")):
        for name in ("train", "dev", "test"):
            columns = "index\tsentence1\tsentence2" + "\tlabel" * (name != "test")
            file = tmp_path / folder / "WNLI" / f"{name}.tsv"
            write_lines(file, [columns, f"0\tthe {word}\tthe mat" + "\t1" * (name != "test")])
    status, made = prepare(f"glue-wnli-by-{own}", "--data", tmp_path / "one")
    assert status == 0
    status, said = prepare(f"glue-wnli-by-{own}", "--data", tmp_path / "other")
    assert status == 2 and f"was begun from {tmp_path / 'one'}, not from {tmp_path / 'other'}. Add --data" in said
    for again in (["--data", tmp_path / "one"], [], ["--data", tmp_path / "gone"]):
        assert prepare(f"glue-wnli-by-{own}", *again) == (0, made)


def test_a_line_end_within_a_field_is_refused_with_its_place(prepare, own, tmp_path):
    for name in ("train", "dev", "test"):
        file = tmp_path / "glue" / "WNLI" / f"{name}.tsv"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"index\tsentence1\tsentence2\tlabel\n0\ta\rb\tb\t1\n")
    status, said = prepare(f"glue-wnli-by-{own}", "--data", tmp_path / "glue")
    assert status == 2 and "train.tsv, line 2: new-line character seen in unquoted field" in said
    (tmp_path / "glue" / "WNLI" / "train.tsv").write_bytes(b"index\tsentence1\r0\ta\r")
    assert "train.tsv, line 1: new-line" in prepare(f"glue-wnli-by-{own}", "--data", tmp_path / "glue")[1]


def test_other_data_are_taken_where_the_first_came_to_nothing(prepare, own, tmp_path):
    for folder, columns in (("bad", "index\tlabel"), ("good", "index\tsentence1\tsentence2\tlabel")):
        for name in ("train", "dev", "test"):
            write_lines(tmp_path / folder / "WNLI" / f"{name}.tsv", [columns, "0\ta\tb\t1"])
    assert "has no column" in prepare(f"glue-wnli-by-{own}", "--data", tmp_path / "bad")[1]
    assert prepare(f"glue-wnli-by-{own}", "--data", tmp_path / "good")[0] == 0


RECORDS = {
    "boolq": ({"question": "is it", "passage": "It is.", "idx": 0}, [("is it", "It is .")], "1"),
    "cb": ({"premise": "It is.", "hypothesis": "is it", "idx": 0}, [("It is .", "is it")], "neutral"),
    "rte": ({"premise": "It is.", "hypothesis": "is it", "idx": 0}, [("It is .", "is it")], "entailment"),
    "wic": (
        {"word": "place", "sentence1": "Do you want to come over to my place?", "sentence2": "A place.", "idx": 0},
        [("place : Do you want to come over to my place ?", "A place .")],
        "1",
    ),
    "multirc": (
        {
            "passage": {
                "text": "A text.",
                "questions": [
                    {"question": "Who?", "answers": [{"text": "He", "label": 1}, {"text": "she", "label": 0}]}
                ],
            }
        },
        [("Who ? He", "A text ."), ("Who ? she", "A text .")],
        "1",
    ),
}


@pytest.mark.parametrize("name", RECORDS)
def test_every_task_of_superglue_that_is_offered_is_read_as_published(prepare, own, tmp_path, name):
    record, pairs, label = RECORDS[name]
    data = tmp_path / "superglue" / SUPERGLUE[name][0]
    spelt = {"1": True}.get(label, label)
    labelled = record if name == "multirc" else {**record, "label": spelt}
    for split, content in {"train": labelled, "val": labelled, "test": record}.items():
        write_lines(data / f"{split}.jsonl", [json.dumps(content)])
    status, said = prepare(f"superglue-{name}-by-{own}", "--data", data.parent)
    assert status == 0, said
    folder = tmp_path / "work" / "data" / f"superglue-{name}-by-{own}"
    assert list(zip(*(joined(folder / "bpe" / f"train.input{i}") for i in (0, 1)), strict=True)) == pairs
    assert tokens(folder / "bin", "label", "valid")[0][0] == label


def test_rte_keeps_each_text_in_one_split(prepare, own, corpus, tmp_path):
    data = tmp_path / "rte"
    data.mkdir()
    for file in corpus("rte").glob("*.xml.gz"):
        lines = gzip.decompress(file.read_bytes()).decode().splitlines()
        ends = [number for number, line in enumerate(lines) if "</pair>" in line][:30]
        (data / file.name).write_bytes(
            gzip.compress("\n".join([*lines[: ends[-1] + 1], "</entailment-corpus>"]).encode())
        )
    assert prepare(f"rte-by-{own}", "--data", data)[0] == 0
    raw = tmp_path / "work" / "data" / f"rte-by-{own}" / "raw"
    texts = {split: list(read_lines(raw / f"{split}.input0")) for split in ("train", "valid", "test")}
    assert len(texts["test"]) == 30 and len(texts["train"]) + len(texts["valid"]) == 150
    assert 0 < len(texts["valid"]) < 30 and not set(texts["train"]) & set(texts["valid"])
    assert set(read_lines(raw / "train.label")) == {"entailment", "not_entailment"}


def test_sentence_polarity_in_any_of_its_encodings(prepare, own, tmp_path):
    data = tmp_path / "sentence-polarity"
    data.mkdir()
    (data / "rt-polarity.neg").write_bytes("".join(f"bad é {i}\n" for i in range(20)).encode("latin-1"))
    (data / "rt-polarity.pos.gz").write_bytes(gzip.compress("".join(f"good é {i}\n" for i in range(20)).encode()))
    assert prepare(f"sentence-polarity-by-{own}", "--data", data)[0] == 0
    raw = tmp_path / "work" / "data" / f"sentence-polarity-by-{own}" / "raw"
    assert list(read_lines(raw / "test.input0")) == ["bad é 7", "bad é 17", "good é 7", "good é 17"]
    assert list(read_lines(raw / "valid.label")) == ["negative"] * 2 + ["positive"] * 2
    assert len(list(read_lines(raw / "train.input0"))) == 32
    twice = "\n".join(f"good é \x97 {i}" for i in range(20)).encode().decode("latin-1").encode()
    (data / "rt-polarity.pos.gz").write_bytes(gzip.compress(twice))
    shutil.rmtree(raw.parent)
    assert prepare(f"sentence-polarity-by-{own}", "--data", data)[0] == 0
    assert list(read_lines(raw / "test.input0"))[2:] == ["good é — 7", "good é — 17"]
    shutil.rmtree(raw.parent)
    (data / "rt-polarity.pos.gz").write_bytes(gzip.compress(twice)[:-9])
    status, said = prepare(f"sentence-polarity-by-{own}", "--data", data)
    assert status == 2 and "rt-polarity.pos.gz is damaged, cut short, or not a gzip file" in said


def test_pieces_of_what_is_not_prepared_are_refused(prepare, tmp_path):
    data = tmp_path / "sentence-polarity"
    data.mkdir()
    for kind in ("neg", "pos"):
        (data / f"rt-polarity.{kind}").write_text("word\n" * 20)
    status, said = prepare("sentence-polarity-by-brown-bpe300", "--data", data)
    assert status == 2 and "brown-bpe300 is not prepared" in said
    shutil.rmtree(tmp_path / "work", ignore_errors=True)
    status, said = prepare("sentence-polarity", "--data", data)
    assert status == 2 and "bert-base has no wordpieces.json and dict.txt" in said and "experiments bert import" in said
    assert not (tmp_path / "work" / "data" / "sentence-polarity").exists()


def wordpieces(folder, words: list[str]):
    """A published BERT's pieces, as the command leaves them, that know these words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {piece: index for index, piece in enumerate(["[UNK]", *words])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.save(str(folder / "wordpieces.json"))
    write_lines(folder / "dict.txt", [f"{piece} 1" for piece in vocabulary])


def test_pieces_may_be_named_after_a_refusal_and_not_be_replaced_after_that(prepare, tmp_path):
    data = tmp_path / "sentence-polarity"
    data.mkdir()
    for kind in ("neg", "pos"):
        (data / f"rt-polarity.{kind}").write_text("word\n" * 20)
    assert prepare("sentence-polarity", "--data", data)[0] == 2  # says that --bert is to be given
    there = ("sentence-polarity", "--data", data, "--bert", tmp_path / "bert")
    wordpieces(tmp_path / "bert", ["word"])
    assert prepare(*there)[0] == 0
    assert prepare(*there)[0] == 0
    wordpieces(tmp_path / "bert", ["wo", "##rd"])
    status, said = prepare(*there)
    assert status == 2 and "cut into other word pieces than those that are now in" in said
    shutil.rmtree(tmp_path / "work")
    assert prepare(*there)[0] == 0


@pytest.mark.parametrize(
    "name", ["rte", "glue-sts-b", "superglue-cb", "squad-2.0-by-brown-bpe300", "xquad-unanswerable"]
)
def test_a_task_says_how_it_is_trained(name):
    corpus, values = parse_corpus_name(name)
    flags = corpus.training(values)
    if name in ("rte", "superglue-cb"):
        assert flags[flags.index("--num-classes") + 1] == {"rte": "2", "superglue-cb": "3"}[name]
    assert flags[0] == "--task" and ("--regression-target" in flags) == (name == "glue-sts-b")
    assert CORPORA[corpus.name].variant_name(values) == name
