"""A model leaves fairseq and computes the same elsewhere: its sizes, its attention, its search, its text."""

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("fairseq")
pytest.importorskip("transformers")

from fairseq import models
from full_disk import full_disk
from tiny_transformer import first_of_all, preset_flags
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

from fairseq_lowrank import cli
from fairseq_lowrank.huggingface import apply_attention
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.plugin.flags import as_namespace
from fairseq_lowrank.tools.exported import Hypothesis, compare
from fairseq_lowrank.tools.fairseq import checkpoints
from fairseq_lowrank.tools.fairseq.export import FairseqModel
from fairseq_lowrank.tools.transformers.export import TransformersModel, write

SHORT = ["--max-len-b", "8"]


@pytest.fixture
def checkpoint(trained, tmp_path):
    """``checkpoint(name, **settings)``: a checkpoint of :func:`trained` with other settings and random weights."""

    def make(name="stock", **settings):
        state = checkpoints.load_state(trained(name))
        _, task = checkpoints.load_model(trained(name))
        args = as_namespace(state["cfg"]["model"])
        vars(args).update(settings)
        model = models.build_model(args, task)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        state["cfg"]["model"], state["model"] = args, model.state_dict()
        torch.save(state, path := tmp_path / "checkpoint.pt")
        return path

    return make


def chosen(preset, sites=("encoder", "decoder", "cross")):
    """The settings of a preset."""
    flags = preset_flags(preset, sites)
    names = (flag.removeprefix("--").replace("-", "_") for flag in flags[::2])
    return {name: int(value) if value.isdigit() else value for name, value in zip(names, flags[1::2], strict=True)}


def moved(path, folder, **options):
    """The model of a checkpoint, the one that was read from its folder, and how they compare."""
    before = FairseqModel(path, max_len_b=8, **options)
    folder.mkdir()
    write(before.exported(), folder)
    after = TransformersModel(folder)
    sentences = before.sentences("valid", 6)
    return before, after, compare(before.search(sentences), after, sentences)


def page(name):
    return (Path(__file__).parents[3] / "docs" / f"{name}.md").read_text(encoding="utf-8")


def test_weights_that_do_not_fit_on_the_disk_take_one_line(checkpoint, tmp_path):
    before = FairseqModel(checkpoint())
    with full_disk(10_000), pytest.raises(UserError, match=r"the weights cannot be written: .* Free some space"):
        write(before.exported(), tmp_path)


SIZES = {
    "post-norm": {},
    "pre-norm": {"encoder_normalize_before": True, "decoder_normalize_before": True},
    "learned": {"encoder_learned_pos": True, "decoder_learned_pos": True, "layernorm_embedding": True},
    "without positions": {
        "no_token_positional_embeddings": True,
        "no_scale_embedding": True,
        "activation_fn": "gelu_fast",
    },
    "mixed": {
        "encoder_normalize_before": True,
        "activation_fn": "relu_squared",
        "share_decoder_input_output_embed": True,
    },
    "other sizes": {"encoder_embed_dim": 12, "decoder_output_dim": 20, "decoder_attention_heads": 2},
}


@pytest.mark.parametrize("settings", SIZES.values(), ids=SIZES)
def test_export_keeps_translations_and_scores(settings, checkpoint, tmp_path):
    *_, comparison = moved(checkpoint(**settings), tmp_path / "out")
    assert comparison.equal == comparison.count == 6


@pytest.mark.parametrize("preset", first_of_all("mixhead-b", "mla", "tpa", "mhe-mul"))
def test_export_keeps_every_attention(preset, checkpoint, tmp_path):
    *_, comparison = moved(checkpoint(**chosen(preset)), tmp_path / "out")
    assert comparison.equal == 6


@pytest.mark.parametrize("score", ["relative", "synthesizer-dense"])
def test_export_keeps_scores_of_positions(score, checkpoint, tmp_path):
    settings = {"attention_score": score, "attention_sites": "encoder,decoder"}
    *_, comparison = moved(checkpoint(**settings), tmp_path / "out")
    assert comparison.equal == 6


@pytest.mark.parametrize("settings", [{}, {"decoder_normalize_before": True, "decoder_learned_pos": True}])
def test_export_keeps_language_models(settings, checkpoint, tmp_path):
    _, after, comparison = moved(checkpoint("mixhead-b", **settings), tmp_path / "out")
    assert comparison.equal == comparison.count > 0
    inputs = after.tokenizer("ab cd", return_tensors="pt")
    assert inputs.input_ids[0, 0] == after.model.generation_config.bos_token_id
    assert after.model.generate(**inputs, max_new_tokens=3, min_new_tokens=3, num_beams=1).shape == (1, 6)


def test_weights_that_fairseq_shares_are_one(checkpoint, tmp_path):
    _, after, _ = moved(checkpoint(share_decoder_input_output_embed=True), tmp_path / "out")
    decoder = after.model.decoder
    assert decoder.output_projection.weight is decoder.embed_tokens.weight
    assert decoder.embed_tokens.weight is not after.model.encoder.embed_tokens.weight


def test_search_without_cache_or_with_padding_is_the_same(checkpoint, tmp_path):
    before, after, _ = moved(checkpoint(**chosen("mixhead-b")), tmp_path / "out")
    batch = after.tokenizer.pad({"input_ids": before.sentences("valid", 6)}, return_tensors="pt")
    found = after.model.generate(**batch)
    assert torch.equal(found, after.model.generate(**batch, use_cache=False))
    after.tokenizer.padding_side = "right"
    batch = after.tokenizer.pad({"input_ids": before.sentences("valid", 6)}, return_tensors="pt")
    assert torch.equal(found, after.model.generate(**batch))


def test_cache_of_fixed_size_is_refused_by_our_attention(checkpoint, tmp_path):
    before, after, _ = moved(checkpoint(**chosen("mla")), tmp_path / "out")
    batch = after.tokenizer.pad({"input_ids": before.sentences("valid", 1)}, return_tensors="pt")
    with pytest.raises(UserError, match="cache_implementation"):
        after.model.generate(**batch, cache_implementation="static")


def test_weights_of_attention_are_returned(checkpoint, tmp_path):
    for number, settings in enumerate((chosen("mixhead-b"), {})):
        before, after, _ = moved(checkpoint(**settings), tmp_path / f"out{number}")
        tokens = torch.tensor(before.sentences("valid", 1))
        after.model.set_attn_implementation("eager")
        found = after.model(tokens, decoder_input_ids=tokens, output_attentions=True, output_hidden_states=True)
        size = tokens.size(1)
        for weights in (found.encoder_attentions, found.decoder_attentions, found.cross_attentions):
            assert [tuple(each.shape) for each in weights] == [(1, 4, size, size)] * 2
        assert len(found.decoder_hidden_states) == 3
        torch.testing.assert_close(before.model(tokens, torch.tensor([size]), tokens)[0], found.logits)


def test_training_saving_and_apply_attention_work(checkpoint, tmp_path, capsys):
    before, after, _ = moved(checkpoint(), tmp_path / "out")
    model, tokens = after.model.train(), torch.tensor(before.sentences("valid", 1))
    labels = tokens.clone()
    loss = model(tokens, labels=labels).loss
    start = torch.cat([labels.new_tensor([[2]]), labels[:, :-1]], dim=1)
    model.eval()
    logits = model(tokens, decoder_input_ids=start).logits
    expected = torch.nn.functional.cross_entropy(logits[0], labels[0])
    torch.testing.assert_close(model(tokens, labels=labels).loss, expected)
    loss.backward()
    assert model.encoder.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0
    apply_attention(model, "mixhead-a")
    assert "6 of 6 attention layers" in capsys.readouterr().err
    torch.testing.assert_close(model(tokens, decoder_input_ids=start).logits, logits)
    model.save_pretrained(tmp_path / "saved")
    kept = checkpoint(**chosen("mixhead-a"))
    _, after, _ = moved(kept, tmp_path / "again")
    with pytest.raises(UserError, match="computes its attention itself"):
        apply_attention(after.model, "mixhead-b")


def test_trainer_trains_with_padded_batches(checkpoint, tmp_path):
    before, after, _ = moved(checkpoint(**chosen("mixhead-b")), tmp_path / "out")
    rows = [{"input_ids": sentence, "labels": sentence} for sentence in before.sentences("valid", 4)]
    arguments = TrainingArguments(tmp_path / "run", max_steps=2, report_to=[], use_cpu=True, save_strategy="no")
    mixing = after.model.decoder.layers[0].self_attn.mixing.query_weight
    old = mixing.detach().clone()
    collator = DataCollatorForSeq2Seq(after.tokenizer, after.model)
    done = Trainer(after.model, arguments, train_dataset=rows, data_collator=collator).train()
    assert done.training_loss > 0 and not torch.equal(mixing, old)


def test_model_is_read_again_after_save_pretrained(checkpoint, tmp_path):
    before, after, _ = moved(checkpoint(**chosen("mixhead-b")), tmp_path / "out")
    after.model.save_pretrained(tmp_path / "saved")
    after.tokenizer.save_pretrained(tmp_path / "saved")
    again, sentences = TransformersModel(tmp_path / "saved"), before.sentences("valid", 3)
    assert again.search(sentences) == after.search(sentences)


def test_peft_adapts_our_attention(checkpoint, tmp_path):
    peft = pytest.importorskip("peft")
    before, after, _ = moved(checkpoint(**chosen("mixhead-b")), tmp_path / "out")
    tokens = torch.tensor(before.sentences("valid", 1))
    expected = after.model(tokens, labels=tokens).loss
    config = peft.LoraConfig(task_type="SEQ_2_SEQ_LM", target_modules=["q_proj", "v_proj"], r=2)
    model = peft.get_peft_model(after.model, config).eval()
    torch.testing.assert_close(model(input_ids=tokens, labels=tokens).loss, expected)
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "lora_B" in name)


REFUSED = {
    "--cross-self-attention": {"cross_self_attention": True},
    "attn_ln": {"attention": "mha", "scale_attn": True},
    "--adaptive-softmax-cutoff": {"adaptive_softmax_cutoff": "8,10"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_export_refuses_what_it_would_lose(name, checkpoint, tmp_path, capsys):
    path = checkpoint(**REFUSED[name])
    assert cli.main(["export", str(path), str(tmp_path / "out"), "--to", "transformers"]) == 2
    assert name in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.glob("out*"))


def test_export_refuses_embeddings_by_convolution(checkpoint):
    with pytest.raises(UserError, match="--embed-kernel"):
        FairseqModel(checkpoint("mixhead-b", embed_rank=8, embed_kernel=2))


def test_card_names_what_was_chosen_without_a_preset(checkpoint):
    path = checkpoint(head_mixing="static", attention_sites="encoder")
    card = FairseqModel(path).exported().card
    assert card[1].startswith("- attention: `mha`") and "- head mixing: `static`" in card
    assert "- attention sites: encoder" in card


@pytest.mark.parametrize(
    ("line", "words", "merges"),
    [("Don't zz.", ["don", "&apos;t", "zz", "."], None), ("Don zz.", ["do@@", "n", "zz", "."], ["d o", "z z</w>"])],
)
def test_export_reads_raw_text_of_language_models(line, words, merges, trained, language_model_data, tmp_path):
    subwords = None if merges is None else tmp_path / "codes"
    if merges is not None:
        subwords.write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    state = checkpoints.load_state(trained("mixhead-b"))
    data = shutil.copytree(language_model_data, tmp_path / "data")
    kept = (data / "dict.txt").read_text().splitlines()[len(words) :]
    (data / "dict.txt").write_text("\n".join([*(f"{word} 1" for word in words), *kept]) + "\n")
    del state["dictionaries"]  # so that the data may have other words
    torch.save(state, path := tmp_path / "checkpoint.pt")
    before, after, _ = moved(path, tmp_path / "out", data=data, moses=True, subwords=subwords)
    numbers = after.tokenizer(line).input_ids
    assert numbers == before.encode(line)
    assert [before.source[number] for number in numbers[1:]] == words
    assert after.tokenizer.decode(numbers, skip_special_tokens=True) == line.lower()


def test_perplexity_of_each_sentence_is_the_exported_models(
    trained, language_model_data, fairseq_command, tmp_path, monkeypatch, capsys
):
    section = page("language-models").partition("## Perplexity of each sentence")[2].partition("\n## ")[0]
    shell, python = (re.search(rf"```{name}\n(.*?)```", section, re.DOTALL)[1] for name in ("bash", "python"))
    flags = shlex.split(shell.splitlines()[-1].partition("--path lm/checkpoint_best.pt")[2].partition(" > ")[0])
    path = trained("mixhead-b")
    said = fairseq_command("eval-lm", language_model_data, "--path", path, *flags)
    (tmp_path / "words.log").write_text("".join(f"now | INFO | {line}\n" for line in said.splitlines()))
    monkeypatch.chdir(tmp_path)
    exec(python, {})
    found = sorted([float(number) for number in line.split()] for line in capsys.readouterr().out.splitlines())
    _, after, _ = moved(path, tmp_path / "out")
    lines = (language_model_data.parent / "test.de").read_text().splitlines()
    assert [number for number, *_ in found] == [*range(len(lines))]
    for line, (_, count, perplexity) in zip(lines, found, strict=True):
        tokens = torch.tensor([[*after.tokenizer(line).input_ids, after.model.config.eos_token_id]])
        assert count == tokens.size(1) - 1
        assert perplexity == pytest.approx(after.model(tokens, labels=tokens).loss.exp().item(), rel=1e-5)


def test_sentences_that_are_too_long_to_compare_are_named(trained, tmp_path, capsys):
    (tmp_path / "text").write_text("ab\n" + "ab " * 1500 + "\n")
    words = ["export", str(trained("stock")), str(tmp_path / "out"), "--to", "transformers"]
    assert cli.main([*words, "--check", str(tmp_path / "text")]) == 2
    assert "has 1,501 tokens, and the model allows 1,024" in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.glob("out*"))


def reader(found, score, *, forced, own_search=False):
    """A model whose search finds a score, and which gives another one to fairseq's tokens."""
    hypothesis = Hypothesis(found, score)
    return SimpleNamespace(
        own_search=own_search,
        search=lambda sentences: [hypothesis] * len(sentences),
        scores=lambda sentences, translations: [forced] * len(translations),
    )


def test_scores_are_those_of_fairseqs_tokens():
    expected, sentences = [Hypothesis([5, 2], -1.0)], [[4, 2]]
    assert compare(expected, reader([5, 2], -1.00001, forced=math.nan), sentences).equal == 1
    near_tie = compare(expected, reader([4, 2], -0.9, forced=-1.0), sentences)
    assert (near_tie.equal, near_tie.difference) == (0, 0.0)
    for other in (
        reader([5, 2], -1.01, forced=-1.0),
        reader([5, 2], math.nan, forced=-1.0),
        reader([4, 2], -1.0, forced=-1.01),
        reader([4, 2], -1.0, forced=math.nan),
        reader([5, 2], -1.0, forced=-1.01, own_search=True),
    ):
        with pytest.raises(UserError, match="computes something else"):
            compare(expected * 2, other, sentences * 2)


@pytest.mark.parametrize("name", ["stock", "mixhead-b"])
def test_a_reader_gives_the_score_of_given_tokens(name, checkpoint, tmp_path):
    before, after, _ = moved(checkpoint(name), tmp_path / "out", lenpen=0.4)
    sentences = before.sentences("valid", 6)
    expected = before.search(sentences)
    found = after.scores(sentences, [best.tokens for best in expected])
    assert found == pytest.approx([best.score for best in expected], abs=1e-5)


WITHOUT_FAIRSEQ = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("fairseq", "fairseq_cli", "hydra", "omegaconf"):
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Absent())
import fairseq_lowrank.huggingface
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1]), AutoTokenizer.from_pretrained(sys.argv[1])
found = model.generate(**tokenizer(["ab cd ef", "gh"], return_tensors="pt", padding=True))
print(tokenizer.batch_decode(found, skip_special_tokens=True))
"""


def test_command_writes_a_folder_that_needs_no_fairseq(checkpoint, tmp_path, capsys):
    path, out, text = checkpoint(**chosen("mixhead-b")), tmp_path / "out", tmp_path / "text"
    text.write_text("ab cd ef\ngh\n")
    command = ["export", str(path), str(out), "--to", "transformers", "--check", str(text), *SHORT]
    assert cli.main(command) == 0
    assert "2 of 2 sentences are equal" in capsys.readouterr().out
    assert cli.main(command) == 2  # the folder exists
    assert "exists already" in capsys.readouterr().err
    card = (out / "README.md").read_text()
    assert "`pip install torch transformers safetensors`, and `pip install .` in a clone" in card
    assert f"    fairseq-lowrank {shlex.join(command)}\n" in card
    assert "Mixhead B" in card and "2 of 2 sentences" in card and "best loss on the validation data" in card
    settings = json.loads((out / "generation_config.json").read_text())
    assert (settings["num_beams"], settings["length_penalty"], settings["max_length"]) == (5, 1.0, 10)
    assert {"config.json", "model.safetensors", "vocab.json", "target_vocab.json"} <= {p.name for p in out.iterdir()}
    trusting = WITHOUT_FAIRSEQ.replace("import fairseq_lowrank.huggingface\n", "")
    trusting = trusting.replace("(sys.argv[1])", "(sys.argv[1], trust_remote_code=True)")
    trusting += "for one in (model, tokenizer):\n    one.save_pretrained(sys.argv[1] + '-again')\n"
    home = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    runs = (WITHOUT_FAIRSEQ, out), (trusting, out), (trusting, f"{out}-again")
    runs = [subprocess.run([sys.executable, "-c", *words], capture_output=True, text=True, env=home) for words in runs]
    before = FairseqModel(path, max_len_b=8)
    _, sentences = before.lines(text, 2)
    expected = [before.text.decode(before.target.string(best.tokens)) for best in before.search(sentences)]
    for done in runs:
        assert done.stdout.splitlines()[-1:] == [str(expected)], done.stderr
    assert sorted(path.suffix for path in Path(f"{out}-again").iterdir()).count(".py") == 1


@pytest.mark.parametrize("preset", ["mha", "mixhead-b", "gated"])
def test_both_roads_of_the_page_give_the_weights_of_each_head(preset, checkpoint, tmp_path, monkeypatch):
    path = checkpoint(**chosen(preset) if preset != "mha" else {})
    path.rename(tmp_path / "checkpoint_best.pt")
    moved(tmp_path / "checkpoint_best.pt", tmp_path / "OUT")
    section = page("leaving-fairseq").partition("## Attention of each layer and head")[2].partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 2 and all(len(block.splitlines()) <= 10 for block in blocks)
    monkeypatch.chdir(tmp_path)
    spaces = [{}, {}]
    for block, space in zip(blocks, spaces, strict=True):
        exec(block, space)
    weights, found = spaces[0]["weights"], spaces[1]["found"]
    sites = {"encoder": found.encoder_attentions, "decoder": found.decoder_attentions, "cross": found.cross_attentions}
    assert {site for site, _ in weights} == set(sites)
    for (site, layer), of_fairseq in weights.items():
        torch.testing.assert_close(sites[site][layer].transpose(0, 1), of_fairseq)
