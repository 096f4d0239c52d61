"""Turn a published BERT, in the layout of transformers, into a checkpoint of fairseq that takes every attention flag.

  fairseq-lowrank import-bert bert-base-uncased --output bert-base

reads config.json, vocab.txt and model.safetensors (or pytorch_model.bin, loaded safely) from a folder, and writes

  model.pt         for --finetune-from-model, with --arch lowrank_bert_base and any --attention: mixing starts at the identity
  dict.txt         the vocabulary, for fairseq-preprocess --srcdict
  wordpieces.json  how text is cut into its pieces, for fairseq-lowrank wordpieces

Hidden states, pooled output, and the logits of both heads are those of transformers. What is not BERT as published (other
activations or positions, decoders) is refused.
"""

from pathlib import Path

from fairseq_lowrank.cli import _output

NAME = "import-bert"
HELP = "turn a published BERT into a checkpoint of fairseq"


def add_arguments(parser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="config.json, vocab.txt and model.safetensors")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write to")
    parser.set_defaults(check_output=_output.check_folder)


def run(args) -> None:
    import torch

    from fairseq_lowrank.tools import published_bert

    published = published_bert.PublishedBert.read(args.folder)
    state, notes = published_bert.convert(published, args.output)

    def fill(folder: Path) -> None:
        published_bert.write(published, folder)
        torch.save(state, folder / "model.pt")

    _output.write_together(args.output, fill)
    parameters = sum({tensor.data_ptr(): tensor.numel() for tensor in state["model"].values()}.values())
    print(f"{args.output}: {args.folder} with {parameters:,} parameters, model.pt, dict.txt, wordpieces.json")
    print(*notes, *hints(state), sep="\n")


def hints(state: dict) -> list[str]:
    """The flags that make this model, for fine-tuning: its sizes, and what else differs from the architecture's own."""
    from fairseq_lowrank.tools.architecture import parse

    model, usual = state["cfg"]["model"], parse("lowrank_bert_base")
    names = [f"encoder_{name}" for name in ("layers", "embed_dim", "ffn_embed_dim", "attention_heads")]
    names += ["max_positions"]
    others = ("num_segment", "layer_norm_eps", "activation_fn", "dropout", "attention_dropout", "pooler_dropout")
    names += [name for name in others if getattr(model, name) != getattr(usual, name)]
    flags = " ".join(f"--{name.replace('_', '-')} {getattr(model, name)}" for name in names)
    flags += " --untie-weights-roberta" if model.untie_weights_roberta else ""
    return [f"--arch lowrank_bert_base {flags} --finetune-from-model MODEL.pt"]
