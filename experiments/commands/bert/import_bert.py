"""Convert a published BERT of transformers to a checkpoint of fairseq that works with every attention flag.

  python -m experiments bert import bert-base-uncased --output bert-base

reads config.json, vocab.txt and model.safetensors (or pytorch_model.bin, loaded safely) from a folder, and writes

  model.pt         for --finetune-from-model, with --arch lowrank_bert_base and any --attention: mixing is the identity at first
  dict.txt         the vocabulary, for fairseq-preprocess --srcdict
  wordpieces.json  the rules to cut text into subwords, for python -m experiments bert wordpieces

Hidden states, pooled output, and the logits of both heads are those of transformers. Variants of BERT (other activations or
positions, decoders) are refused.
"""

from pathlib import Path

from fairseq_lowrank.cli import _output

NAME = "import"
HELP = "convert a published BERT to a checkpoint of fairseq"


def add_arguments(parser) -> None:
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="folder with config.json, vocab.txt and model.safetensors"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write to")
    _output.add_force_argument(parser)
    parser.set_defaults(check_output=_output.check_folder, writes=("model.pt", "dict.txt", "wordpieces.json"))


def run(args) -> None:
    import torch

    from experiments.bert.published import PublishedBert, convert, write

    published = PublishedBert.read(args.folder)
    state, notes = convert(published, args.output)

    def fill(folder: Path) -> None:
        write(published, folder)
        with open(folder / "model.pt", "wb") as file:  # given a path, torch hides that a disk is full
            torch.save(state, file)

    _output.write_together(args, fill)
    parameters = sum({tensor.data_ptr(): tensor.numel() for tensor in state["model"].values()}.values())
    about = f"{args.output}: {args.folder} with {parameters:,} parameters, model.pt, dict.txt, wordpieces.json"
    _output.say("\n".join([about, *notes, *hints(state)]))


def hints(state: dict) -> list[str]:
    """Return the flags of this model, for fine-tuning: its sizes, and other values that differ from the architecture's."""
    from fairseq_lowrank.tools.fairseq.architecture import parse_architecture

    model, usual = state["cfg"]["model"], parse_architecture("lowrank_bert_base")
    names = [f"encoder_{name}" for name in ("layers", "embed_dim", "ffn_embed_dim", "attention_heads")]
    names += ["max_positions"]
    others = ("num_segment", "layer_norm_eps", "activation_fn", "dropout", "attention_dropout", "pooler_dropout")
    names += [name for name in others if getattr(model, name) != getattr(usual, name)]
    flags = " ".join(f"--{name.replace('_', '-')} {getattr(model, name)}" for name in names)
    flags += " --untie-weights-roberta" if model.untie_weights_roberta else ""
    return [f"--arch lowrank_bert_base {flags} --finetune-from-model MODEL.pt"]
