"""A checkpoint keeps its dictionaries, and every command refuses it together with data or a checkpoint of other ones."""

import pytest

pytest.importorskip("fairseq")

import torch
from fairseq import checkpoint_utils, options
from fairseq.data import Dictionary
from fairseq_cli import preprocess
from tiny_transformer import SIZES, build, make_task

from fairseq_lowrank import cli
from fairseq_lowrank.models.transformer import LowrankTransformerModel
from fairseq_lowrank.repairs import dictionaries
from fairseq_lowrank.repairs.dictionaries import ENTRY, OtherDictionary, check, dictionaries_of, packed, symbols_of
from fairseq_lowrank.repairs.loading import load_checkpoint
from fairseq_lowrank.repairs.search import log_once

QUICKLY = ["--cpu", "--num-workers", 0, "--max-tokens", 600]
TRAINING = ["--max-update", 2, "--max-tokens", 256, "--optimizer", "adam", "--lr", 0.05, "--num-workers", 0, "--cpu"]
TRAINING += ["--no-epoch-checkpoints", "--no-last-checkpoints"]
SMALL_DECODER = ["--decoder-layers", 2, "--decoder-embed-dim", 16, "--decoder-ffn-embed-dim", 16]
SMALL_DECODER += ["--decoder-attention-heads", 4]
SMALL = [
    flag.replace("decoder", "encoder") if isinstance(flag, str) else flag for flag in SMALL_DECODER
] + SMALL_DECODER
SMALL_LM = [*SMALL_DECODER, "--tokens-per-sample", 12]
MIXHEAD = ["--arch", "lowrank_transformer_iwslt_de_en", "--attention", "mixhead-a", *SMALL, *TRAINING]
MIXHEAD_LM = ["--task", "language_modeling", "--arch", "lowrank_transformer_lm", "--attention", "mixhead-b"]
MIXHEAD_LM += ["--decoder-learned-pos", *SMALL_LM, *TRAINING]


def binarise(folder, *words):
    args = options.get_preprocessing_parser().parse_args([str(word) for word in (*words, "--destdir", folder)])
    preprocess.main(args)
    return folder


def swapped(source, target, *more):
    """Write a dictionary with its first two lines swapped, and further words between them."""
    first, second, *others = source.read_text().splitlines(keepends=True)
    target.write_text("".join([second, *(f"{word} 1\n" for word in more), first, *others]))
    return target


@pytest.fixture(scope="module")
def others(translation_data, language_model_data, tmp_path_factory):
    """Folders of the same text by other dictionaries: as many words, two words more (of translation), and text."""
    found = {}
    for name, more in {"swapped": (), "longer": ("new", "newer")}.items():
        folder = tmp_path_factory.mktemp(name)
        text = translation_data.parent
        flags = [f"--{split}pref={text / split}" for split in ("train", "valid", "test")]
        for flag, language in {"src": "de", "tgt": "en"}.items():
            own = translation_data / f"dict.{language}.txt"
            flags += [f"--{flag}dict", swapped(own, folder / f"dict.{language}.txt", *more)]
        found[name] = binarise(folder / "data-bin", "-s", "de", "-t", "en", *flags)
    folder, text = tmp_path_factory.mktemp("text"), language_model_data.parent
    own = swapped(language_model_data / "dict.txt", folder / "dict.txt")
    flags = [f"--{split}pref={text / split}.de" for split in ("train", "valid", "test")]
    found["text"] = binarise(folder / "data-bin", "--only-source", *flags, "--srcdict", own)
    return found


EVALUATING = {
    "generate": ["--path", "CKPT", *QUICKLY, "--beam", 1],
    "validate": ["--path", "CKPT", *QUICKLY, "--task", "translation"],
    "interactive": ["--path", "CKPT", "--cpu"],
}


@pytest.mark.parametrize("command", EVALUATING)
def test_evaluation_refuses_other_data(command, trained, translation_data, others, refusal):
    path = trained("mixhead-a")
    flags = [path if flag == "CKPT" else flag for flag in EVALUATING[command]]
    for name in ("swapped", "longer"):
        line = refusal(command, others[name], *flags)
        assert f"{path} was trained with another dictionary" in line
        assert f"{translation_data}/dict.de.txt" in line and f"{others[name]}/dict.de.txt" in line
        assert "--srcdict" in line


def test_language_models_refuse_other_data(trained, language_model_data, others, refusal):
    path = trained("mixhead-b")
    line = refusal("eval-lm", others["text"], "--path", path, *QUICKLY)
    assert f"{language_model_data}/dict.txt" in line and f"{others['text']}/dict.txt" in line
    assert "--srcdict" in refusal("train", others["text"], *MIXHEAD_LM, "--restore-file", path, "--save-dir", "x")


@pytest.mark.parametrize("flag", ["--restore-file", "--finetune-from-model", "--continue-once", "--save-dir"])
def test_training_refuses_other_data(flag, trained, others, refusal, tmp_path):
    path = trained("mixhead-a")
    given = [flag, path] if flag != "--save-dir" else []
    if not given:
        (tmp_path / "checkpoint_last.pt").write_bytes(path.read_bytes())
    line = refusal("train", others["swapped"], *MIXHEAD, *given, "--save-dir", tmp_path)
    assert "was trained with another dictionary: word 4 is" in line
    assert ("--embeddings-by-word" in line) is (flag == "--finetune-from-model")


@pytest.mark.parametrize(
    "words",
    ["translate CKPT", "measure CKPT", "inspect CKPT", "export CKPT O --to transformers"],
)
def test_our_commands_refuse_other_data(words, trained, others, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = str(trained("mixhead-a"))
    status = cli.main([path if word == "CKPT" else word for word in words.split()] + ["--data", str(others["swapped"])])
    assert status == 2 and f"{path} was trained with another dictionary" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_programs_refuse_other_data(trained, others):
    path = trained("mixhead-a")
    with pytest.raises(OtherDictionary):
        LowrankTransformerModel.from_pretrained(str(path.parent), path.name, str(others["swapped"]))


def test_average_refuses_checkpoints_of_other_dictionaries(trained, tmp_path, capsys):
    path, other = trained("mixhead-a"), tmp_path / "other.pt"
    state = load_checkpoint(path)
    state[ENTRY]["decoder"] = packed(Dictionary()) | {"file": "/x/dict.en.txt"}
    torch.save(state, other)
    assert cli.main(["average", str(path), str(other), "--output", str(tmp_path / "mean.pt")]) == 2
    line = capsys.readouterr().err
    assert str(other) in line and "/x/dict.en.txt" in line and "data-bin/dict.en.txt" in line
    assert cli.main(["average", str(path), str(path), "--output", str(tmp_path / "mean.pt")]) == 0
    assert load_checkpoint(tmp_path / "mean.pt")[ENTRY].keys() == {"encoder", "decoder"}


def test_converted_checkpoint_keeps_its_dictionaries(trained, tmp_path):
    path = tmp_path / "converted.pt"
    assert cli.main(["convert", str(trained("stock")), "--attention", "mixhead-a", "--output", str(path)]) == 0
    assert load_checkpoint(path)[ENTRY].keys() == {"encoder", "decoder"}


@pytest.fixture
def older(trained, tmp_path):
    """A checkpoint of an older version, without dictionaries."""
    state = load_checkpoint(trained("mixhead-a"))
    del state[ENTRY]
    torch.save(state, tmp_path / "older.pt")
    return tmp_path / "older.pt"


def test_older_checkpoint_is_named_in_one_line(older, translation_data, fairseq_command):
    log_once.cache_clear()
    said = fairseq_command("generate", translation_data, "--path", older, *QUICKLY, "--beam", 1)
    assert said.count(f"{older} has no dictionary, so it cannot be compared with {translation_data}/dict.") == 2


def test_other_size_of_an_older_checkpoint_names_the_dictionary(older, others, refusal):
    line = refusal("generate", others["longer"], "--path", older, *QUICKLY)
    assert f"16 words in the checkpoint, 18 in {others['longer']}/dict.de.txt" in line and "--srcdict" in line


def words_of(path, side, data, language):
    """Return each word's row of the embedding of a checkpoint."""
    symbols = Dictionary.load(str(data / f"dict.{language}.txt")).symbols
    return dict(zip(symbols, load_checkpoint(path)["model"][f"{side}.embed_tokens.weight"], strict=True))


@pytest.mark.parametrize("age", ["new", "older"])
def test_embeddings_move_by_word(age, trained, older, translation_data, others, fairseq_command, tmp_path):
    path = trained("mixhead-a") if age == "new" else older
    flag = ["--embeddings-by-word"] if age == "new" else ["--embeddings-by-word", translation_data]
    flags = ["--finetune-from-model", path, *flag, "--lr", 0, "--max-update", 1, "--save-dir", tmp_path / "tuned"]
    said = fairseq_command("train", others["longer"], *MIXHEAD, *flags)
    assert "encoder: 16 of 18 words have their embeddings" in said
    tuned = tmp_path / "tuned" / "checkpoint_best.pt"
    for side, language in {"encoder": "de", "decoder": "en"}.items():
        before = words_of(path, side, translation_data, language)
        after = words_of(tuned, side, others["longer"], language)
        assert all(after[word].equal(row) for word, row in before.items())
        assert after.keys() - before.keys() == {"new", "newer"} and all(after["new"].abs() > 0)
    assert symbols_of(load_checkpoint(tuned)[ENTRY]["encoder"])[4:8] == [*symbols_of_file(others["longer"])[:4]]


def symbols_of_file(data):
    return [line.split()[0] for line in (data / "dict.de.txt").read_text().splitlines()]


def test_embeddings_of_an_older_checkpoint_need_a_folder(older, others, refusal, tmp_path):
    flags = ["--finetune-from-model", older, "--embeddings-by-word"]
    line = refusal("train", others["longer"], *MIXHEAD, *flags, "--save-dir", tmp_path / "tuned")
    assert "Add the folder of its data: --embeddings-by-word FOLDER." in line


def dictionary(*words):
    found = Dictionary()
    for word in words:
        found.add_symbol(word)
    return found


def test_words_at_the_end_of_a_dictionary_may_differ_in_number():
    """fairseq adds <mask> to the dictionary of a BART's pre-training, and takes its embedding away for a translation."""
    origin = {"path": "model.pt", ENTRY: {"decoder": packed(dictionary("a", "b", "<mask>"))}}
    check({"decoder": dictionary("a", "b")}, origin)
    with pytest.raises(OtherDictionary, match="word 5 is 'b' in a file"):
        check({"decoder": dictionary("a", "c", "b")}, origin)
    check({"another": dictionary("a", "c")}, origin)


def test_a_search_refuses_a_language_model_of_other_words():
    task = make_task()
    model = build("transformer_iwslt_de_en", *SIZES, task=task)
    search = {"beam_size": 2, "max_len_b": 3}
    generator = dictionaries.refuse_other_language_model(
        lambda self, *args, lm_model: vars(self).update(lm_model=lm_model)
    )
    generator(type("Generator", (), search)(), [model], task.target_dictionary, lm_model=model.decoder)
    words = task.target_dictionary.symbols[task.target_dictionary.nspecial :]
    for other in (dictionary("x", "y"), dictionary(*reversed(words))):  # of another size, and of the same
        with pytest.raises(OtherDictionary, match="--lm-path was trained with another dictionary"):
            generator(type("Generator", (), search)(), [model], other, lm_model=model.decoder)


def test_dictionaries_of_a_model_are_named_once():
    model = build("transformer_iwslt_de_en", *SIZES, task=make_task())
    assert list(dictionaries_of(model)) == ["encoder", "decoder"]


def test_state_of_a_model_without_a_file_is_not_compared():
    model, other = (build("transformer_iwslt_de_en", *SIZES, task=make_task()) for _ in range(2))
    assert not any(ENTRY in fields for fields in model.state_dict()._metadata.values())
    other.load_state_dict(model.state_dict())


def test_a_checkpoint_loads_with_its_dictionaries(trained):
    path = trained("mixhead-a")
    state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
    assert symbols_of(state[ENTRY]["encoder"])[:4] == ["<s>", "<pad>", "</s>", "<unk>"]
    assert state["model"]._metadata[""][ENTRY]["path"] == str(path)


@pytest.mark.parametrize(("share", "said"), [(0.5, True), (0.0, False)])
def test_share_of_unknown_words_stands_next_to_scores(
    share, said, trained, translation_data, language_model_data, fairseq_command, tmp_path
):
    words = ["ab", "cd", "ef", "gh"] if not share else ["ab", "zz", "cd", "yy"]
    (tmp_path / "test.de").write_text(" ".join(words) + "\n")
    (tmp_path / "test.en").write_text("AB CD\n")
    flags = ["-s", "de", "-t", "en", "--testpref", tmp_path / "test"]
    flags += [f"--{flag}dict={translation_data}/dict.{name}.txt" for flag, name in {"src": "de", "tgt": "en"}.items()]
    data = binarise(tmp_path / "mt", *flags)
    output = fairseq_command("generate", data, "--path", trained("mixhead-a"), *QUICKLY, "--beam", 1)
    assert ("40.0% of the tokens of the source are <unk>" in output) is said and "reference are <unk>" not in output
    flags = ["--only-source", "--testpref", tmp_path / "test.de", "--srcdict", language_model_data / "dict.txt"]
    data = binarise(tmp_path / "lm", *flags)
    output = fairseq_command("eval-lm", data, "--path", trained("mixhead-b"), *QUICKLY)
    assert ("40.0% of the tokens of the text are <unk>" in output) is said
