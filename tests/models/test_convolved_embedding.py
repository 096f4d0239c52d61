"""A language model's input embedding by convolution (``--embed-kernel``)."""

import re
import threading
from types import SimpleNamespace

import pytest
import torch
from fairseq import checkpoint_utils, models, options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from torch.nn import functional as F

from fairseq_lowrank.plugin import architectures
from fairseq_lowrank.plugin.embedding import ConvolvedEmbedding
from fairseq_lowrank.tools.fairseq.architecture import build_model, parse_architecture

TINY = [
    *("--arch", "lowrank_transformer_lm", "--decoder-layers", "1", "--decoder-embed-dim", "32"),
    *("--decoder-output-dim", "32", "--decoder-ffn-embed-dim", "16", "--decoder-attention-heads", "4"),
]


def model_of(*flags):
    """A model of 50 words, with new random parameters."""
    arguments = ["data", "--task", "language_modeling", *TINY, "--decoder-input-dim", "32", "--tokens-per-sample", "16"]
    args = options.parse_args_and_arch(options.get_training_parser("language_modeling"), [*arguments, *flags])
    dictionary = Dictionary()
    for number in range(46):
        dictionary.add_symbol(str(number))
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    model = models.build_model(convert_namespace_to_omegaconf(args).model, task)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def test_it_is_the_convolution_of_equation_2():
    embedding = ConvolvedEmbedding(3, 5, kernel=4)
    x = torch.randn(2, 7, 3)
    kernel = embedding.weight.view(5, 4, 3).transpose(1, 2)  # W_j for each j, side by side in W
    expected = F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), kernel).transpose(1, 2)
    torch.testing.assert_close(embedding(x), expected)


@torch.no_grad()
def test_threads_that_call_one_model_get_their_own_outputs():
    model = model_of("--embed-kernel", "3")
    mine, other = torch.tensor([[5, 6, 7, 1]]), torch.tensor([[8, 9]])
    expected = model(mine)[0]

    def call_in_another_thread(module, args):
        handle.remove()
        (thread := threading.Thread(target=model, args=(other,))).start()
        thread.join()

    handle = model.decoder.project_in_dim.register_forward_pre_hook(call_in_another_thread)
    torch.testing.assert_close(model(mine)[0], expected)


@pytest.mark.parametrize("kernel, rank", [(2, 6), (4, 12), (20, 16)])
def test_its_rank_is_that_of_equation_4(kernel, rank):
    embedding = ConvolvedEmbedding(3, 16, kernel)
    tokens = torch.randn(400, kernel, 3)
    assert torch.linalg.matrix_rank(embedding.weight) == rank == min(16, 3 * kernel)
    assert torch.linalg.matrix_rank(embedding(tokens)[:, -1]) == rank


def test_it_costs_a_kernel_of_k_r_d():
    def count(*flags):
        args = parse_architecture("lowrank_transformer_lm", [*TINY[2:], *flags])
        return sum(parameter.numel() for parameter in build_model(args, 50).parameters())

    one, three = count("--embed-rank", "5"), count("--embed-rank", "5", "--embed-kernel", "3")
    assert three - one == 2 * 5 * 32
    alone = count("--decoder-input-dim", "32", "--embed-kernel", "3")
    assert alone - count("--decoder-input-dim", "32") == 3 * 32 * 32


@torch.no_grad()
def test_it_reads_the_last_tokens_and_no_later_one():
    embedding = ConvolvedEmbedding(3, 5, kernel=3)
    x = torch.randn(1, 6, 3)
    changed = x.clone()
    changed[:, 3] += 1
    moved = (embedding(x) - embedding(changed)).abs().sum(-1)[0] > 1e-6
    assert moved.tolist() == [False, False, False, True, True, True]
    assert [bool(one) for one in (embedding(x[:, 1:]) - embedding(x)[:, 1:]).abs().sum(-1)[0] > 1e-6] == [
        True,
        True,
        False,
        False,
        False,
    ]


@torch.no_grad()
@pytest.mark.parametrize(
    "rank",
    [(), ("--embed-rank", "5"), ("--quant-noise-pq", "0.1", "--quant-noise-pq-block-size", "4")],
    ids=["full", "rank 5", "noise"],
)
def test_decoding_step_by_step_gives_what_the_whole_sequence_gives(rank):
    model = model_of("--embed-kernel", "3", *rank)
    tokens = torch.randint(4, 50, (2, 8))
    whole, _ = model(tokens)
    state = {}
    for length in range(1, 9):
        step, _ = model.decoder(tokens[:, :length], incremental_state=state)
        torch.testing.assert_close(step[:, -1], whole[:, length - 1])
    other, _ = model(tokens.flip(1))
    assert not torch.allclose(other[:, -1], whole[:, -1])
    torch.testing.assert_close(model(tokens)[0], whole)  # nothing of the steps is left


@torch.no_grad()
def test_padding_on_the_left_changes_nothing_where_its_embedding_was_trained():
    # (steps of fairseq's decoders count the positions of padding)
    model = model_of("--embed-kernel", "3", "--share-decoder-input-output-embed", "--no-token-positional-embeddings")
    tokens, padding = torch.randint(4, 50, (2, 6)), torch.ones(2, 3, dtype=torch.long)
    padded = torch.cat((padding, tokens), 1)
    assert model.decoder.embed_tokens.weight[1].norm() > 0.1
    alone, shown = model(tokens)[0], model(padded)[0][:, 3:]
    torch.testing.assert_close(shown, alone)
    state = {}
    for length in range(1, 10):
        step = model.decoder(padded[:, :length], incremental_state=state)[0]
    torch.testing.assert_close(step[:, -1], alone[:, -1])


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--embed-kernel", "1"], "--embed-kernel 1: expected 2 to "),
        (["--embed-kernel", "65", "--tokens-per-sample", "64"], "--embed-kernel 65: expected 2 to 64"),
        (
            ["--embed-kernel", "3", "--character-embeddings"],
            "--embed-kernel 3 does not work with --character-embeddings",
        ),
        (
            ["--embed-kernel", "3", "--adaptive-input", "--adaptive-input-cutoff", "9,30"],
            "--embed-kernel 3 does not work with --adaptive-input",
        ),
    ],
)
def test_a_kernel_that_means_nothing_is_refused(flags, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build_model(parse_architecture("lowrank_transformer_lm", [*TINY[2:], *flags]), 50)


def test_character_embeddings_are_as_wide_as_the_model_and_go_with_quantisation_noise():
    flags = ["--character-embeddings", "--decoder-input-dim", "16", "--quant-noise-pq", "0.1"]
    build_model(
        parse_architecture("lowrank_transformer_lm", [*TINY[2:], *flags, "--quant-noise-pq-block-size", "4"]), 50
    )


def test_check_of_character_embeddings_spells_few_words(monkeypatch):
    spelled = []
    monkeypatch.setattr(architectures.SizedDictionary, "__getitem__", lambda self, word: spelled.append(word) or "word")
    flags = ["--character-embeddings", "--decoder-input-dim", "16", "--adaptive-softmax-cutoff", "60,90"]
    parse_architecture("lowrank_transformer_lm", [*TINY[2:], *flags])
    assert 90 < len(spelled) < 200


def test_only_language_models_have_one():
    with pytest.raises(ValueError, match="--embed-kernel 3: works only for transformer_lm"):
        build_model(parse_architecture("transformer_iwslt_de_en", ["--embed-kernel", "3"]), 50)


def test_a_model_trains_goes_on_evaluates_and_samples(language_model_data, tmp_path, fairseq_command):
    flags = [
        *("--task", "language_modeling", *TINY, "--embed-rank", 4, "--embed-kernel", 3, "--tokens-per-sample", 16),
        *("--max-tokens", 128, "--optimizer", "adam", "--lr", 0.01, "--no-epoch-checkpoints", "--save-dir", tmp_path),
        *("--disable-validation", "--num-workers", 0),
    ]
    fairseq_command("train", language_model_data, *flags, "--max-update", 2)
    assert "(epoch " in fairseq_command("train", language_model_data, *flags, "--max-update", 4)
    path = tmp_path / "checkpoint_last.pt"
    state = checkpoint_utils.load_checkpoint_to_cpu(str(path))["model"]
    assert state["decoder.project_in_dim.weight"].shape == (32, 3 * 4)
    evaluated = fairseq_command(
        "eval-lm", language_model_data, "--path", path, "--gen-subset", "valid", "--tokens-per-sample", 16
    )
    assert "Perplexity" in evaluated
    said = fairseq_command(
        *("generate", language_model_data, "--task", "language_modeling", "--path", path, "--gen-subset", "valid"),
        *("--sample-break-mode", "eos", "--beam", 2, "--max-len-b", 4, "--prefix-size", 2, "--max-tokens", 128),
        "--skip-invalid-size-inputs-valid-test",
    )
    assert re.search(r"^H-\d+\t", said, flags=re.MULTILINE)
