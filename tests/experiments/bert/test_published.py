"""A published BERT computes the same in fairseq, and other models are refused."""

import json

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq import checkpoint_utils, options
from full_disk import full_disk
from published_tiny_bert import SIZES, WORDS, publish
from safetensors.torch import load_file, save_file
from transformers import BertModel, BertTokenizer

from experiments.__main__ import main
from experiments.bert.published import PublishedBert, model_flags
from experiments.corpora.wordpieces import WordPieces
from fairseq_lowrank.tools.fairseq import architecture

PAIR = ["[CLS]", "the", "cat", "##s", "[SEP]", "un", "##able", "[MASK]", "[SEP]"]
SHORT = ["[CLS]", "cat", "sat", "[SEP]", *["[PAD]"] * 5]
TYPES = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1], [0] * 9])


@pytest.fixture
def published(tmp_path):
    (tmp_path / "published").mkdir()
    return tmp_path / "published"


@pytest.fixture
def imported(published, tmp_path, capsys):
    """The folder that the command makes of the published one."""

    def run():
        assert main(["bert", "import", str(published), "--output", str(tmp_path / "ours")]) == 0, capsys.readouterr()
        return tmp_path / "ours"

    return run


@pytest.fixture
def refusal(published, tmp_path, capsys):
    """The one line that the command prints; it writes nothing."""

    def run():
        assert main(["bert", "import", str(published), "--output", str(tmp_path / "ours")]) == 2
        assert not list((tmp_path / "ours").glob("*"))
        lines = capsys.readouterr().err.splitlines()
        assert not [line for line in lines if "Traceback" in line]
        return lines[-1]

    return run


def load(folder, *flags):
    """The model of a checkpoint, and its task; with flags, one of those flags that takes its state."""
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(folder / "model.pt")])
    if flags:
        sizes = ["layers", "embed_dim", "ffn_embed_dim", "attention_heads"]
        given = [f"--encoder-{size.replace('_', '-')}={getattr(model.args, f'encoder_{size}')}" for size in sizes]
        words = ["data", "--arch", "lowrank_bert_base", *given, "--max-positions", str(model.args.max_positions)]
        words += ["--segments", "pair", *flags]
        args = options.parse_args_and_arch(options.get_training_parser("sentence_prediction"), words)
        other = architecture.ARCH_MODEL_REGISTRY["lowrank_bert_base"].build_model(args, task)
        other.load_state_dict(dict(model.state_dict()), strict=True)
        model = other
    return model.eval(), task


def compare(theirs, ours, task, published, *, heads=True):
    """Hidden states of all layers, pooled output and, with `heads`, the logits of words and of the next sentence."""
    number = {word: index for index, word in enumerate(WORDS)}
    rows = torch.tensor(PublishedBert.read(published).rows)
    where = rows.argsort()
    tokens = torch.tensor([[number[word] for word in PAIR], [number[word] for word in SHORT]])
    seen = tokens.ne(number["[PAD]"])
    expected = theirs(tokens, attention_mask=seen.long(), token_type_ids=TYPES, output_hidden_states=True)
    words, extra = ours(where[tokens], return_all_hiddens=True, segment_labels=TYPES)
    assert len(task.source_dictionary) == len(rows) and len(extra["inner_states"]) == len(expected.hidden_states)
    for state, hidden in zip(extra["inner_states"], expected.hidden_states, strict=True):
        torch.testing.assert_close(state.transpose(0, 1)[seen], hidden[seen], atol=2e-6, rtol=2e-6)
    if heads:
        torch.testing.assert_close(words[seen], expected.prediction_logits[seen][:, rows], atol=5e-6, rtol=5e-6)
        torch.testing.assert_close(extra["sentence_logits"], expected.seq_relationship_logits, atol=2e-6, rtol=2e-6)
        pooled = theirs.bert(tokens, attention_mask=seen.long(), token_type_ids=TYPES).pooler_output
    else:
        pooled = expected.pooler_output
    torch.testing.assert_close(extra["pooled_output"], pooled, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(ours(where[tokens])[0][seen], words[seen])  # token types of a pair are found


@torch.no_grad()
@pytest.mark.parametrize("flags", [(), ("--attention", "mixhead-b"), ("--attention", "talking-heads")], ids=str)
def test_import_computes_what_transformers_computes(flags, published, imported):
    theirs = publish(published)
    compare(theirs, *load(imported(), *flags), published)


@torch.no_grad()
@pytest.mark.parametrize(
    "settings", [{"hidden_act": "gelu_new"}, {"layer_norm_eps": 1e-3}, {"type_vocab_size": 3}], ids=str
)
def test_import_keeps_settings_of_the_configuration(settings, published, imported):
    theirs = publish(published, **settings)
    compare(theirs, *load(imported()), published)


def test_import_prints_flags_that_make_the_same_model(published, imported, capsys):
    others = {"hidden_act": "gelu_new", "layer_norm_eps": 1e-3, "type_vocab_size": 3, "classifier_dropout": 0.2}
    publish(published, tie_word_embeddings=False, **others)
    model, _ = load(imported())
    hint = capsys.readouterr().out.splitlines()[-1].split(" --finetune-from-model")[0]
    words = ["data", "--task", "sentence_prediction", *hint.split()]
    args = options.parse_args_and_arch(options.get_training_parser("sentence_prediction"), words)
    for flag in model_flags(PublishedBert.read(published).config):
        name = flag.partition("=")[0].removeprefix("--").replace("-", "_")
        if name not in ("tokens_per_sample", "segments"):  # the task's
            assert getattr(args, name) == getattr(model.args, name), name
    assert args.untie_weights_roberta and model.args.untie_weights_roberta


@torch.no_grad()
def test_import_reads_an_old_file_of_torch(published, imported):
    """Old files name LayerNorm's parameters gamma and beta, and hold the numbers of positions."""
    theirs = publish(published)
    state = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in theirs.state_dict().items()
    }
    state["bert.embeddings.position_ids"] = torch.arange(12)[None]
    (published / "model.safetensors").unlink()
    torch.save(state, published / "pytorch_model.bin")
    compare(theirs, *load(imported()), published)


@torch.no_grad()
def test_import_keeps_a_separate_output_matrix(published, imported):
    theirs = publish(published, tie_word_embeddings=False)
    ours, task = load(imported())
    assert not ours.encoder.lm_head.weight.equal(ours.encoder.sentence_encoder.embed_tokens.weight)
    compare(theirs, ours, task, published)


@torch.no_grad()
def test_import_initialises_heads_that_are_missing(published, imported, capsys):
    theirs = publish(published, BertModel)
    compare(theirs, *load(imported()), published, heads=False)
    said = capsys.readouterr().out
    assert "at random: the masked-word head" in said and "at random: the next-sentence head" in said
    assert "the pooler" not in said


def test_import_names_what_it_leaves_out(published, imported, capsys):
    publish(published)
    state = load_file(published / "model.safetensors")
    save_file(state | {"classifier.weight": torch.ones(2, 16)}, published / "model.safetensors")
    imported()
    assert "left out: classifier.weight" in capsys.readouterr().out


def test_dictionary_has_a_place_for_every_published_row(published, imported):
    publish(published)
    task = load(imported())[1]
    dictionary, rows = task.source_dictionary, PublishedBert.read(published).rows
    assert len(dictionary) == SIZES["vocab_size"] and sorted(rows) == list(range(SIZES["vocab_size"]))
    assert [rows[index] for index in (0, 1, 2, 3, dictionary.index("<mask>"))] == [5, 0, 7, 4, 8]
    assert rows[dictionary.index("the")] == 16 and rows[dictionary.index("cat")] == 6  # of two, the last
    for row in (2, 15, len(WORDS), len(WORDS) + 1):  # repeated, a symbol of fairseq, beyond the vocabulary
        assert dictionary[rows.index(row)] == f"madeupword{row:04d}"


def test_dictionary_keeps_a_word_that_looks_made_up(published, imported):
    publish(published)
    vocabulary = published / "vocab.txt"
    words = vocabulary.read_text().splitlines()
    words[17] = "madeupword0002"  # what would stand for row 2, a repeated word
    vocabulary.write_text("".join(f"{word}\n" for word in words))
    dictionary, rows = load(imported())[1].source_dictionary, PublishedBert.read(published).rows
    assert len(dictionary) == SIZES["vocab_size"]
    assert rows[dictionary.index("madeupword0002")] == 17 and rows[dictionary.index("madeupword0002_")] == 2


@pytest.mark.parametrize("lower", [True, False])
def test_wordpieces_are_those_of_transformers(lower, published, imported):
    publish(published)
    (published / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lower}))
    theirs = BertTokenizer.from_pretrained(published, do_lower_case=lower)
    ours = WordPieces(imported() / "wordpieces.json")
    for line in (
        "The cats sat, unable!", "CAFÉ Café café cafe\u0301", "東京 the東cat", "a\u00a0b\tc\u200bd", "x" * 101 + " " + "y" * 99,
        "it's the  cat\u0000s", "", "…", "ﬁt İstanbul", "sitting-cat 3.5",
    ):  # fmt: skip
        assert ours(line).replace("<unk>", "[UNK]").split() == theirs.tokenize(line)
    assert ours("[MASK] [SEP]").split().count("[MASK]") == 0  # names of symbols are text


def test_normalisation_follows_the_vocabulary_by_default(published, imported):
    publish(published)
    (published / "tokenizer_config.json").unlink()
    assert WordPieces(imported() / "wordpieces.json")("Cat") == "Cat"


def change_config(**settings):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | settings))

    return change


def change_tensors(change):
    def rewrite(folder):
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors")

    return rewrite


def cut(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


class Unsafe:
    def __reduce__(self):
        return (print, ("unsafe",))


def pickle_code(folder):
    (folder / "model.safetensors").unlink()
    torch.save({"bert.pooler.dense.weight": Unsafe()}, folder / "pytorch_model.bin")


def pickle_numbers(folder):
    (folder / "model.safetensors").unlink()
    torch.save({"epoch": 3}, folder / "pytorch_model.bin")


WORD_ROWS = "bert.embeddings.word_embeddings.weight"
QUERY = "bert.encoder.layer.1.attention.self.query.weight"


def set_weight(value):
    return change_tensors(lambda state: state[QUERY].view(-1)[3:4].fill_(value))


def set_type(dtype):
    return change_tensors(lambda state: state.update({QUERY: state[QUERY].to(dtype)}))


def pickle_repeated_words(folder):
    """One number that claims to be all words: a file of some kilobytes, and gigabytes of words."""
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(state | {WORD_ROWS: torch.ones(1, 1).expand(2**27, 16)}, folder / "pytorch_model.bin")
    change_config(vocab_size=2**27)(folder)


@pytest.mark.parametrize(
    "change, message",
    [
        (change_config(model_type="electra"), "model_type is 'electra'"),
        (change_config(hidden_act="silu"), "hidden_act is 'silu'"),
        (change_config(position_embedding_type="relative_key"), "position_embedding_type is 'relative_key'"),
        (change_config(is_decoder=True), "is_decoder is True"),
        (change_config(pruned_heads={"0": [1]}), "pruned_heads is {'0': [1]}"),
        (change_config(hidden_size="16"), "hidden_size is '16'"),
        (change_config(hidden_size=32), "hidden_size is 32, and the tensors have 16"),
        (change_config(hidden_size=10**9), "hidden_size is 1000000000, and the tensors have 16"),
        (change_config(vocab_size=10**9), "vocab_size is 1000000000, and the tensors have 75"),
        (change_config(vocab_size=40), "vocab_size is 40, and the tensors have 75"),
        (change_config(type_vocab_size=10**9), "type_vocab_size is 1000000000, and the tensors have 2"),
        (change_config(intermediate_size=25), "intermediate_size is 25, and the tensors have 24"),
        (change_config(max_position_embeddings=10**9), "max_position_embeddings is 1000000000, and the tensors have 12"),
        (change_config(num_hidden_layers=10**6), "num_hidden_layers is 1000000, and the tensors have 2"),
        (change_config(num_hidden_layers=1), "num_hidden_layers is 1, and the tensors have 2"),
        (change_config(num_attention_heads=5), "hidden_size is 16, which 5 heads do not divide"),
        (change_config(num_attention_heads=10**9), "which 1000000000 heads do not divide"),
        (change_tensors(lambda state: state.pop("bert.pooler.dense.bias")), "bert.pooler.dense.bias"),
        (change_tensors(lambda state: state.pop(WORD_ROWS)), WORD_ROWS),
        (change_tensors(lambda state: state.update({QUERY: torch.ones(8, 16)})), f"{QUERY} has shape [8, 16]"),
        (change_tensors(lambda state: state.update({"bert.more": torch.ones(1)})), "bert.more"),
        (set_weight(float("nan")), QUERY),
        (set_weight(float("inf")), QUERY),
        (set_type(torch.int8), f"{QUERY} has numbers of type torch.int8"),
        (set_type(torch.complex64), f"{QUERY} has numbers of type torch.complex64"),
        (cut, "model.safetensors cannot be read"),
        (pickle_code, "pytorch_model.bin cannot be read"),
        (pickle_numbers, "pytorch_model.bin cannot be read"),
        (pickle_repeated_words, "pytorch_model.bin cannot be read"),
        (lambda folder: (folder / "model.safetensors").unlink(), "pytorch_model.bin does not exist"),
        (lambda folder: (folder / "vocab.txt").unlink(), "vocab.txt does not exist"),
        (lambda folder: (folder / "vocab.txt").write_text("[PAD]\n[CLS]\n"), "[SEP], [UNK], [MASK]"),
        (lambda folder: (folder / "vocab.txt").write_text("\n".join([*WORDS, "a", "b", "c"])), "vocab.txt has 76 words"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json"),
    ],
)  # fmt: skip
def test_import_refuses_another_model_and_writes_nothing(change, message, published, refusal, limited_memory):
    publish(published)
    change(published)
    assert message in refusal()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_import_reads_other_floating_point_types(dtype, published, imported):
    publish(published)
    change_tensors(lambda state: state.update({name: tensor.to(dtype) for name, tensor in state.items()}))(published)
    saved = load(imported())[0].encoder.sentence_encoder.embed_tokens.weight
    rows = PublishedBert.read(published).rows
    torch.testing.assert_close(saved, load_file(published / "model.safetensors")[WORD_ROWS][rows].float())


@pytest.mark.parametrize(
    "how",
    [
        ["--finetune-from-model"],
        ["--reset-optimizer", "--reset-dataloader", "--reset-meters", "--reset-lr-scheduler", "--restore-file"],
    ],
    ids=lambda flags: flags[-1],
)
def test_training_continues_from_the_published_weights(how, published, imported, tmp_path, fairseq_command):
    """Text cut by the command, the published dictionary, and Mixhead B from the published state."""
    publish(published)
    folder = imported()
    (tmp_path / "text").write_text("The cats sat unable!\n" * 40)
    pieces = [str(folder / "wordpieces.json"), str(tmp_path / "text"), "--output", str(tmp_path / "pieces")]
    assert main(["bert", "wordpieces", *pieces]) == 0
    assert (tmp_path / "pieces").read_text().splitlines()[0] == "the cat ##s sat un ##able !"
    data = tmp_path / "bin"
    both = [f"--trainpref={tmp_path / 'pieces'}", f"--validpref={tmp_path / 'pieces'}"]
    fairseq_command("preprocess", "--only-source", *both, "--srcdict", folder / "dict.txt", "--destdir", data)
    log = fairseq_command(
        "train", data, "--task", "masked_lm", "--criterion", "masked_lm", "--arch", "lowrank_bert_base", "--attention", "mixhead-b",
        "--encoder-layers", 2, "--encoder-embed-dim", 16, "--encoder-ffn-embed-dim", 24, "--encoder-attention-heads", 4,
        "--max-positions", 12, "--tokens-per-sample", 12, *how, folder / "model.pt", "--optimizer", "sgd",
        "--lr", 0, "--max-update", 1, "--max-tokens", 120, "--cpu", "--num-workers", 0, "--save-dir", tmp_path / "run",
    )  # fmt: skip
    assert "num_updates: 1" in log
    state = checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "run" / "checkpoint_last.pt"))["model"]
    for name, tensor in checkpoint_utils.load_checkpoint_to_cpu(str(folder / "model.pt"))["model"].items():
        torch.testing.assert_close(state[name], tensor)
    assert "encoder.sentence_encoder.layers.1.self_attn.mixing.query_weight" in state


def test_import_to_a_full_disk_takes_one_line(published, refusal):
    publish(published)
    with full_disk(10_000):
        assert "ours: File too large; nothing was written" in refusal()
