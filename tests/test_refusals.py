"""Bad input ends every command in one line and code 2, and nothing is left half-written.

A case is a command line and the words that its line must hold. It runs in a folder with ``mt`` and ``lm`` (binarised data),
``mixhead.pt`` and ``lm.pt`` (checkpoints), texts and damaged files; ``out`` is where it would write.
"""

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("fairseq") is None:  # the commands import it, not this process
    pytest.skip("fairseq is not installed", allow_module_level=True)

from fairseq_lowrank.attention import build_attention

REPOSITORY = Path(__file__).resolve().parent.parent
QUICKLY = "--optimizer adam --max-tokens 500 --max-update 2 --cpu --num-workers 0"
DECODER = (
    "--decoder-layers 1 --decoder-embed-dim 16 --decoder-ffn-embed-dim 16 --decoder-attention-heads 2 "
    f"{QUICKLY} --save-dir out"
)
ENCODER = "--encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 --encoder-attention-heads 2"
TRANSLATION = f"fairseq-train mt --arch lowrank_transformer {ENCODER} {DECODER}"
STOCK = f"fairseq-train mt --arch transformer {ENCODER} {DECODER}"
LANGUAGE_MODEL = (
    f"fairseq-train lm --task language_modeling --arch lowrank_transformer_lm --tokens-per-sample 16 {DECODER}"
)
ALIGNED = "--load-alignments --criterion label_smoothed_cross_entropy_with_alignment"
EVALUATED = "--cpu --num-workers 0 --results-path out"
GENERATE = f"fairseq-generate mt {EVALUATED}"
INTERACTIVE = f"fairseq-interactive mt {EVALUATED}"
JOINED_TWICE = "--bpe sentencepiece --sentencepiece-model spm.model --remove-bpe sentencepiece"
EVAL_LM = f"fairseq-eval-lm lm {EVALUATED}"
VALIDATE = f"fairseq-validate mt {EVALUATED}"
OURS = "fairseq-lowrank"
EXPERIMENTS = "experiments"

CASES: dict[str, list[tuple[str, str]]] = {
    TRANSLATION: [
        ("--encoder-attention-heads 3", "num_heads=3"),
        ("--attention nope", "argument --attention: invalid choice: 'nope'"),
        ("--attention fixedhead", "'fixedhead'"),
        ("--attention el --head-dim 4", "'el'"),
        ("--head-dim 0", "head_dim=0"),
        ("--head-dim -4", "head_dim=-4"),
        ("--head-dim 8.5", "argument --head-dim: invalid int value: '8.5'"),
        ("--head-dim 100000000000", "head_dim=100000000000"),
        ("--attention-backend sdpa --attention talking-heads", "backend='sdpa'"),
        ("--attention mixhead-b --restore-file stock.pt", "--reset-optimizer"),
        ("--attention mixhead-a --restore-file mixhead.pt", "--attention mixhead-b"),
        ("--attention mixhead-a --finetune-from-model mixhead.pt", "--attention mixhead-b"),
        ("--attention-sites nowhere", "--attention-sites 'nowhere'"),
        ("--attention-sites ,", "--attention-sites ','"),
        ("--no-cross-attention --attention-sites cross", "--attention-sites cross"),
        ("--mixing-lr-scale 5", "--mixing-lr-scale 5"),
        ("--mixing-lr-scale 5 --attention avghead", "--mixing-lr-scale 5"),
        ("--mixing-lr-scale inf --attention mixhead-b", "--mixing-lr-scale inf"),
        ("--mixing-lr-scale nan --attention mixhead-b", "--mixing-lr-scale nan"),
        ("--mixing-lr-scale -1 --attention mixhead-b", "--mixing-lr-scale -1"),
        ("--mixing-orthogonality -1", "--mixing-orthogonality -1"),
        ("--mixing-orthogonality 1", "--mixing-orthogonality 1"),
        ("--row-space-penalty inf", "--row-space-penalty inf"),
        (f"{ALIGNED} --attention mixhead-b", "--load-alignments"),
        (f"{ALIGNED} --attention gain", "--load-alignments"),
        ("--encoder-xformers-att-config {}", "--encoder-xformers-att-config"),
        ("--nope", "unrecognized arguments: --nope"),
    ],
    STOCK: [
        ("--mixing-orthogonality 1", "--mixing-orthogonality"),
        ("--lr abc", "argument --lr"),
        ("--restore-file mixhead.pt", "encoder.layers.0.self_attn was saved with mixing=positionwise"),
        ("--restore-file lm.pt", "lm.pt"),
        ("--restore-file empty.txt", "empty.txt"),
        ("--restore-file flipped-mixhead.pt", "flipped-mixhead.pt"),
        ("--restore-file nope.pt --reset-optimizer", "--restore-file nope.pt: no such file"),
        ("--finetune-from-model words.de", "words.de"),
        ("--finetune-from-model nope.pt", "--finetune-from-model nope.pt: no such file"),
        ("--finetune-from-model bare", "--finetune-from-model bare: no such file"),
        ("--finetune-from-model mixhead.pt", "encoder.layers.0.self_attn was saved with mixing=positionwise"),
        ("--finetune-from-model flipped-mixhead.pt", "flipped-mixhead.pt"),
    ],
    LANGUAGE_MODEL: [
        ("--attention-score synthesizer-dense --synthesizer-heads 0", "synthesizer_heads=0"),
        ("--attention-score synthesizer-dense --synthesizer-heads 3", "synthesizer_heads=3"),
        ("--adaptive-softmax-cutoff a,b", "'a,b'"),
        ("--embed-rank 0", "--embed-rank 0"),
        ("--embed-rank 99", "--embed-rank 99"),
        ("--embed-rank 4 --share-decoder-input-output-embed", "--embed-rank 4"),
        ("--attention-sites encoder", "--attention-sites encoder"),
    ],
    "fairseq-train": [
        ("", "--arch: missing"),
        ("mt", "--arch: missing"),
        ("mt --arch nope", "argument --arch/-a: invalid choice: 'nope'"),
        (f"lm --task segment_lm --arch transformer_lm {QUICKLY} --save-dir out", "--task segment_lm"),
        (f"lm --task bert_pretraining --arch roberta_base {QUICKLY} --save-dir out", "--task bert_pretraining"),
        (f"lm --task question_answering --arch transformer_lm {QUICKLY} --save-dir out", "--task question_answering"),
        (
            f"lm --task masked_lm --arch lowrank_bert_base --criterion bert_pretraining {QUICKLY} --save-dir out",
            "--criterion bert_pretraining",
        ),
    ],
    GENERATE: [
        (f"--path mixhead.pt {JOINED_TWICE}", "--remove-bpe sentencepiece: --bpe sentencepiece joins subwords too"),
        ("--path mixhead.pt --model-overrides 3", "--model-overrides '3'"),
        ("--path mixhead.pt --model-overrides {'attention':", "--model-overrides"),
        ("--path mixhead.pt --model-overrides \"__import__('os').mkdir('out')\"", "--model-overrides"),
    ],
    "fairseq-generate": [
        ("", "the following arguments are required: data"),
    ],
    # without --results-path, which fairseq opens before it loads a model
    "fairseq-generate mt --cpu --num-workers 0 --max-len-b 4": [
        ("--path mixhead.pt --model-overrides \"{'attention': 'nope'}\"", "'nope'"),
        ("--path mixhead.pt --model-overrides \"{'encoder_attention_heads': 3}\"", "num_heads=3"),
        (
            "--path mixhead.pt --model-overrides \"{'encoder_embed_dim': 32}\"",
            "encoder.layers.0.self_attn was saved with head_dim=8",
        ),
        ("--path words.de", "words.de"),
        ("--path empty.txt", "empty.txt"),
        ("--path cut.pt", "cut.pt"),
        ("--path flipped.pt", "flipped.pt"),
    ],
    INTERACTIVE: [
        (f"--path mixhead.pt {JOINED_TWICE}", "--remove-bpe sentencepiece: --bpe sentencepiece joins subwords too"),
        ("--path mixhead.pt --model-overrides nope", "--model-overrides 'nope'"),
        ("--path words.de", "words.de"),
        ("--path flipped-mixhead.pt", "flipped-mixhead.pt"),
    ],
    EVAL_LM: [
        ("--path lm.pt --tokens-per-sample 1024", "--tokens-per-sample"),
        ("--path lm.pt --model-overrides \"{'attention':'nope'}\"", "'nope'"),
        ("--path lm.pt --model-overrides [1]", "--model-overrides '[1]'"),
        ("--path words.de", "words.de"),
        ("--path flipped.pt", "flipped.pt"),
    ],
    VALIDATE: [
        ("--path mixhead.pt", "--task: missing"),
        ("--task translation --path mixhead.pt --model-overrides print(3)", "--model-overrides 'print(3)'"),
        ("--task translation --max-tokens 99 --path words.de", "words.de"),
        ("--task translation --max-tokens 99 --path flipped-mixhead.pt", "flipped-mixhead.pt"),
    ],
    OURS: [
        ("", "the following arguments are required: COMMAND"),
        ("nope", "invalid choice: 'nope'"),
        ("env --nope", "unrecognized arguments: --nope"),
        ("average mixhead.pt --output out/a.pt", "--output out/a.pt"),
        ("average nope.pt --output average.pt", "nope.pt"),
        ("average words.de --output average.pt", "words.de cannot be read as a checkpoint"),
        ("average mixhead.pt flipped.pt --output average.pt", "flipped.pt"),
        ("inspect cut.pt", "cut.pt"),
        ("average mixhead.pt lm.pt --output average.pt", "was trained with another dictionary"),
        ("convert flipped-mixhead.pt --attention mha --output convert.pt", "flipped-mixhead.pt"),
        ("convert words.de --attention mha --output convert.pt", "words.de cannot be read as a checkpoint"),
        ("convert mixhead.pt --attention mha --output out/convert.pt", "--output out/convert.pt"),
        ("inspect --spectrum words.de", "words.de cannot be read as a checkpoint"),
        ("inspect --spectrum flipped.pt", "flipped.pt cannot be read as a checkpoint"),
        ("inspect words.de", "words.de cannot be read as a checkpoint"),
        ("inspect flipped.pt", "flipped.pt cannot be read as a checkpoint"),
        ("params", "no model given. Add a checkpoint, --arch ARCH --vocab-size N, or --transformers FOLDER."),
        ("params nope.pt", "nope.pt is not a checkpoint file"),
        (
            "params mixhead.pt --arch lowrank_transformer",
            "mixhead.pt: --arch gives a model too. Remove one of the two.",
        ),
        ("params mixhead.pt --encoder-layers 3", "--encoder-layers 3: does not work with a checkpoint"),
        ("params mixhead.pt --sweep heads", "--sweep works only with --arch"),
        ("params --arch lowrank_transformer", "Add --vocab-size N."),
        ("params --arch lowrank_transformer --vocab-size 0", "--vocab-size 0: expected at least 4"),
        ("params --arch lowrank_transformer --vocab-size x", "argument --vocab-size: invalid int value"),
        ("params --arch nope --vocab-size 9", "--arch nope: unknown"),
        ("params --arch lowrank_transformer --vocab-size 9 --head-dim 100000000000", "head_dim=100000000000"),
        ("inspect mixhead.pt --transformers bare", "error: mixhead.pt works only with models of fairseq"),
        ("inspect --spectrum mixhead.pt --transformers bare", "error: mixhead.pt works only with models of fairseq"),
        ("inspect --spectrum", "no model given. Add a checkpoint, or --transformers FOLDER."),
        ("inspect --spectrum nope.pt", "nope.pt is not a checkpoint file"),
        ("inspect --spectrum mixhead.pt --data nothing", "--data nothing: no such folder"),
        ("inspect --spectrum mixhead.pt --data mt --sequences 0", "--sequences 0: expected a number >= 1"),
        ("inspect --spectrum mixhead.pt --data mt --labels a b", "--labels a b: 2 names for 1 checkpoints"),
        *(
            (f"{command} --data {data}", f"--data {data}: the model's task cannot read it")
            for command, data in (
                ("translate mixhead.pt", "lm"),
                ("measure mixhead.pt", "lm"),
                ("inspect --spectrum lm.pt", "damaged-lm"),
                ("inspect mixhead.pt", "lm"),
            )
        ),
        (
            "translate mixhead.pt --data wrong-text",
            "wrong-text/text.json is damaged (subwords is 'nope', expected one of",
        ),
        ("convert mixhead.pt --attention nope --output average.pt", "--attention: invalid choice: 'nope'"),
        ("convert mixhead.pt --head-mixing nope --output average.pt", "--head-mixing: invalid choice: 'nope'"),
        ("inspect bare", "bare is not a checkpoint file"),
        ("inspect empty.txt", "empty.txt cannot be read as a checkpoint"),
        ("launch", "after -- comes fairseq-train and its arguments"),
        ("launch --workers 0 -- fairseq-train x", "--workers 0: expected a number >= 1"),
        ("launch --workers 2 -- rm -rf x", "not rm"),
        ("launch --workers 2 --nodes 2 -- fairseq-train x", "--nodes above 1 and --rendezvous"),
        *(
            (f"{command} --output words.de", "--output words.de: words.de")  # before anything else is read
            for command in (
                "inspect --spectrum nope.pt",
                "inspect nope.pt",
                "params --arch nope --vocab-size 9",
            )
        ),
        ("average nope.pt --output bare", "--output bare: is a folder"),
        ("average nope.pt --output words.de", "--output words.de: words.de exists"),
        ("convert nope.pt --attention mha --output words.de", "--output words.de: words.de exists"),
    ],
    EXPERIMENTS: [
        ("report", "the following arguments are required: results"),
        ("report nope", "nope does not exist"),
        ("report bare", "bare has no .jsonl file"),
        ("report empty.txt", "no results in empty.txt"),
        ("report wrong.jsonl", 'wrong.jsonl, line 1: seed is "1", expected a whole number'),
        ("report nope --output words.de", "--output words.de: words.de"),
        ("representation --length 0", "expected at least 2"),
        ("representation --embed-dim 0", "--embed-dim 0: X needs full row rank"),
        ("representation --head-dims nope", "argument --head-dims: invalid int value"),
        ("representation --length 0 --output words.de", "--output words.de: words.de"),
    ],
}


def write_texts(folder: Path) -> None:
    words = ["ab", "cd", "ef", "gh", "ij", "kl", "mn", "op", "qr", "st", "uv", "wx"]
    sentences = [" ".join(words[(start + step) % 12] for step in range(3 + start % 5)) for start in range(24)]
    (folder / "words.de").write_text("\n".join(sentences) + "\n")
    (folder / "words.en").write_text("\n".join(sentences).upper() + "\n")
    (folder / "empty.txt").touch()
    (folder / "bare").mkdir()
    fields = {"paper": "mixhead", "table": 1, "row": "mha", "seed": 1, "updates": 5, "parameters": 9, "value": 3.5}
    fields |= {"architecture": "x", "flags": [], "metric": "bleu", "split": "test", "tokens_per_second": None}
    fields |= {"versions": {}, "smoke": False, "date": "2026-01-01"}
    wrong = {"seed": "1", "value": "high", "smoke": 0, "flags": 3, "versions": [], "curve": [5], "date": None}
    lines = [json.dumps(fields | {field: value}) for field, value in wrong.items()]
    (folder / "wrong.jsonl").write_text("\n".join(lines) + "\n")


def damage_data(folder: Path) -> None:
    """Copies of data: an empty index, and settings of another program."""
    shutil.copytree(folder / "mt", folder / "wrong-text")
    shutil.copytree(folder / "lm", folder / "damaged-lm")
    (folder / "damaged-lm" / "valid.idx").write_bytes(b"")
    (folder / "wrong-text" / "text.json").write_text('{"source": "de", "target": "en", "subwords": "nope"}')


def damage_checkpoint(folder: Path) -> None:
    """Copies of checkpoints: cut short, and with one bit flipped among the parameters."""
    written = bytearray((folder / "mixhead.pt").read_bytes())
    (folder / "cut.pt").write_bytes(written[: len(written) // 2])
    for name, flipped in (("lm.pt", "flipped.pt"), ("mixhead.pt", "flipped-mixhead.pt")):
        with torch.serialization.safe_globals([argparse.Namespace]):
            parameters = torch.load(folder / name, weights_only=True)["model"]
        written = bytearray((folder / name).read_bytes())
        # not in the padding between tensors, where a bit says nothing
        written[written.index(parameters["decoder.embed_tokens.weight"].numpy().tobytes()) + 99] ^= 16
        (folder / flipped).write_bytes(written)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """``run("fairseq-train mt …")``: exit code, output, errors, and what lies in ``out`` afterwards."""
    folder = tmp_path_factory.mktemp("refusals")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(REPOSITORY)}
    environment.pop("LOWRANK_TRACEBACK", None)
    server = subprocess.Popen(
        [sys.executable, REPOSITORY / "tests" / "helpers" / "command_server.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )

    def ask(line: str, **variables: str) -> tuple[int, str, str, list[Path]]:
        shutil.rmtree(folder / "out", ignore_errors=True)
        command, *args = shlex.split(line)
        question = {"command": command, "args": args, "folder": str(folder), "environment": variables}
        print(json.dumps(question), file=server.stdin, flush=True)
        answer = json.loads(server.stdout.readline())
        written = [path for path in (folder / "out").rglob("*") if path.is_file()]
        return answer["code"], answer["output"], answer["errors"], written

    def make(line: str) -> None:
        code, output, errors, _ = ask(line)
        assert code == 0, output + errors

    write_texts(folder)
    corpus = "-s de -t en --trainpref words --validpref words --testpref words"
    make(f"fairseq-preprocess {corpus} --destdir mt")
    make("fairseq-preprocess --only-source --trainpref words.de --validpref words.de --testpref words.de --destdir lm")
    trainings = {"mixhead.pt": f"{TRANSLATION} --attention mixhead-b", "stock.pt": STOCK, "lm.pt": LANGUAGE_MODEL}
    for name, line in trainings.items():
        make(line)
        (folder / "out" / "checkpoint_last.pt").rename(folder / name)
    damage_checkpoint(folder)
    damage_data(folder)
    yield ask
    server.stdin.close()
    server.wait()


LINES = [(f"{command} {args}".strip(), words) for command, cases in CASES.items() for args, words in cases]


@pytest.mark.parametrize(("line", "words"), LINES, ids=[line for line, _ in LINES])
def test_bad_input_ends_in_one_line_and_leaves_nothing_behind(run, line, words):
    code, output, errors, written = run(line)
    assert code == 2, output + errors
    lines = [said for said in errors.splitlines() if ": error: " in said]
    assert len(lines) == 1, errors
    assert errors.splitlines()[-1] == lines[0]
    assert line.split()[0] in lines[0]
    assert words in lines[0]
    assert "Traceback" not in output + errors
    assert not written


def test_the_traceback_is_shown_where_the_environment_asks_for_it(run):
    code, _, errors, _ = run(f"{STOCK} --restore-file nothing.pt", LOWRANK_TRACEBACK="1")
    assert code == 2
    assert "Traceback (most recent call last)" in errors
    assert errors.splitlines()[-1].startswith("fairseq-train: error: --restore-file nothing.pt: ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"preset": "nope"}, "attention method 'nope': expected one of mha"),
        ({"preset": "fixedhead"}, "needs a head size"),
        ({"num_heads": 3}, "embed_dim=8 is not divisible by num_heads=3"),
        ({"num_heads": 0}, "num_heads=0: expected a positive integer"),
        ({"num_heads": -2}, "num_heads=-2: expected a positive integer"),
        ({"head_dim": 0}, "head_dim=0: expected a positive integer"),
        ({"head_dim": -1}, "head_dim=-1: expected a positive integer"),
        ({"projection": "nope"}, "projection='nope': expected one of"),
        ({"activation": "nope"}, "activation='nope': expected one of"),
        ({"mixing": "nope"}, "mixing='nope': expected one of"),
        ({"backend": "nope"}, "nope"),
        ({"preset": "el", "head_dim": 3}, "'el' cuts the hidden states into heads"),
        ({"preset": "talking-heads", "backend": "sdpa"}, "backend='sdpa' cannot compute head mixing of scores"),
        ({"num_heads": "4"}, "num_heads='4': expected a positive integer"),
        ({"embed_dim": 0}, "embed_dim=0: expected a positive integer"),
        ({"embed_dim": 8.0}, "embed_dim=8.0: expected a positive integer"),
        ({"head_dim": 8.5}, "head_dim=8.5: expected a positive integer"),
        ({"head_dim": 10**11}, "a projection would hold 1,600,000,000,000 numbers"),
        ({"dropout": 1.5}, "dropout=1.5: expected a number"),
    ],
    ids=str,
)
def test_a_layer_that_cannot_be_is_refused_in_one_line(arguments, words):
    with torch.device("meta"), pytest.raises(ValueError) as error:
        build_attention(**({"preset": "mha", "embed_dim": 8, "num_heads": 2} | arguments))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("env GPUS=x examples/multi30k/compare.sh", "GPUS=x: expected a number up to"),
        ("env SEED=abc examples/brown/compare.sh", "SEED=abc"),
    ],
)
def test_a_script_refuses_in_one_line(line, words, tmp_path):
    settings = {"SETUP": "0", "LOWRANK_WORK": str(tmp_path / "work"), "RESULTS": str(tmp_path / "results.jsonl")}
    refused = subprocess.run(
        shlex.split(line), cwd=REPOSITORY, env=os.environ | settings, capture_output=True, text=True
    )
    assert refused.returncode == 2
    (said,) = [line for line in refused.stderr.splitlines() if not line.startswith("+ ")]  # + COMMAND that it runs
    assert words in said
    assert not (tmp_path / "results.jsonl").exists()
