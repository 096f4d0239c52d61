"""Score translation models by beam search, with and without head mixing in the decoder.

The Mixhead paper's released code mixes heads in training but not in beam search. This program measures the difference. In a
copy of the best checkpoint, it replaces the decoder's M by I: first in self-attention, then also in attention to the source if
that is mixed. The encoder does not change. BLEU is computed as in the recipes. Rows and seeds that have a line are skipped.

    python -m experiments.evidence.decoding --results results/evidence-decoding.jsonl --table fast-start "$LOWRANK_WORK"/runs/evidence-fast-start/h4-mixhead-a-self-2e-3-seed*
"""

import argparse
import json
import re
import shlex
import tempfile
from pathlib import Path

import torch

from experiments.controlled.runs import PAPER, checked_out_commit, origin_here
from experiments.corpora.catalogue import parse_corpus_name
from experiments.engine import finished, refuse_dirty
from experiments.recipes.commands import Commands
from fairseq_lowrank.files import read_lines
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.progress import tracked
from fairseq_lowrank.records.results import append_measurement
from fairseq_lowrank.records.scores import bleu, read_run
from fairseq_lowrank.tools.fairseq.checkpoints import configuration, load_state

CONTROLS = Path(__file__).parents[2] / "examples" / "evidence" / "controls"
SITES = {"-decoder-self-unmixed": ("self_attn",), "-decoder-unmixed": ("self_attn", "encoder_attn")}


def mixing_tensors(state: dict, attention: str) -> list[str]:
    """Return the names of the decoder's mixing tensors, of ``self_attn`` or ``encoder_attn``."""
    name = re.compile(rf"decoder\..+\.{attention}\.mixing\.(weight|query_weight)")
    return [key for key in state["model"] if name.fullmatch(key)]


def unmix(state: dict, attentions: tuple[str, ...]) -> dict:
    """Return a copy of a checkpoint whose decoder has M = I in these attentions.

    Raises:
        UserError: the weight of a mixing rule is neither M nor its diagonal.
    """
    model = state["model"].copy()
    for key in (key for attention in attentions for key in mixing_tensors(state, attention)):
        weight = model[key]
        if key.endswith("query_weight"):
            model[key] = torch.zeros_like(weight)
        elif weight.dim() == 1:
            model[key] = torch.ones_like(weight)
        elif weight.size(0) == weight.size(1):
            model[key] = torch.eye(len(weight), dtype=weight.dtype)
        else:
            raise UserError(f"{key}: a weight of {tuple(weight.shape)} is not M. Use mixhead-a, mixhead-b or gain.")
    return {**state, "model": model}


def score(state: dict, data: Path, corpus: str, generate: list[str]) -> dict:
    """Return the BLEU of a checkpoint on the test set, as the recipes compute it."""
    target = configuration(state, "task", "target_lang")
    declared, values = parse_corpus_name(corpus)
    pieces = declared.bpe_to_remove(values)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, output = Path(folder) / "checkpoint.pt", Path(folder) / "generate.out"
        torch.save(state, checkpoint)
        words = ["fairseq-generate", str(data / "bin"), "--user-dir", str(CONTROLS), "--gen-subset", "test"]
        words += ["--path", str(checkpoint), *(["--remove-bpe", pieces] if pieces else [])]
        Commands()([*words, "--max-tokens", "4096", *generate], output)
        hypotheses = read_run(output).hypotheses
    raw = data / "raw" / f"test.{target}"
    references = list(read_lines(data / "tok" / f"test.{target}"))
    return bleu(hypotheses, references, list(read_lines(raw)) if raw.exists() else None, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a recipe's run: ROW-seedN-…/checkpoints")
    parser.add_argument("--results", type=Path, required=True, metavar="FILE", help="the .jsonl file to append to")
    parser.add_argument("--table", required=True, metavar="NAME", help="the recipe's table, such as fast-start")
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help="the prepared corpus (default: the one it was trained on)"
    )
    parser.add_argument("--generate", default="--beam 5", help="flags of fairseq-generate (default: --beam 5)")
    args = parser.parse_args()
    refuse_dirty(checked_out_commit())
    table = f"{args.table}-decoding"
    for run in tracked(args.runs, "scoring", "runs"):
        name, file = re.fullmatch(r"(.+)-seed(\d+)-\w+", run.name), run / "checkpoints/checkpoint_best.pt"
        if name is None or not file.is_file():
            parser.error(f"{run}: not a run. Give a folder ROW-seedN-… with checkpoints/checkpoint_best.pt.")
        state, corpus = load_state(file), json.loads((run / "run.json").read_text(encoding="utf-8"))["corpus"]
        if not mixing_tensors(state, "self_attn"):
            parser.error(f"{run}: the decoder's self-attention mixes no heads. Give a run of mixhead-a or mixhead-b.")
        data = args.data or Path(configuration(state, "task", "data")).parent
        # if attention to the source is not mixed, replacing M in self-attention is enough
        chosen = SITES if mixing_tensors(state, "encoder_attn") else {"-decoder-unmixed": ("self_attn",)}
        for suffix, attentions in {"": (), **chosen}.items():
            row, seed = name[1] + suffix, int(name[2])
            if (row, seed, False) in finished(args.results, PAPER, table):
                continue
            line = {"paper": "evidence", "table": table, "row": row, "seed": seed, "split": "test"}
            line |= score(unmix(state, attentions), data, corpus, shlex.split(args.generate))
            line |= {"scoring": args.generate, **origin_here(), "smoke": False}
            append_measurement(args.results, line)
            print(f"{row} seed {seed}: {line['value']:.2f} BLEU")


if __name__ == "__main__":
    main()
