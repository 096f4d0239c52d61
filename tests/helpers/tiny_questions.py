"""Fixtures: questions on a few paragraphs, prepared, and a tiny model for them."""

import argparse
import shlex

import pytest

MODEL = "--encoder-layers 2 --encoder-embed-dim 64 --encoder-ffn-embed-dim 128 --encoder-attention-heads 4 --dropout 0 --attention-dropout 0"
TRAINING = "--optimizer adam --clip-norm 1 --cpu --no-epoch-checkpoints --max-positions 300 --required-batch-size-multiple 1 --disable-validation"


@pytest.fixture
def prepare_questions(tmp_path, monkeypatch):
    """``prepare_questions(paragraphs, unanswerable=False)``: the folder `bin` of questions, cut into pieces learnt from them."""
    import sentencepiece

    from experiments.corpora.squad import CORPUS, QuestionTask, write_question_data
    from experiments.corpora.text import BytePieces
    from fairseq_lowrank.files import write_lines

    monkeypatch.setenv("LOWRANK_WORK", str(tmp_path))

    def prepare(paragraphs: list[dict], *, unanswerable: bool = False, pieces: int = 1500):
        own = tmp_path / "data" / "own"
        (own / "bin").mkdir(parents=True)
        lines = [line for one in paragraphs for line in (one["context"], *(asked["question"] for asked in one["qas"]))]
        write_lines(tmp_path / "text", lines)
        BytePieces.train([tmp_path / "text"], own / "bpe.model", pieces)
        model = sentencepiece.SentencePieceProcessor(model_file=str(own / "bpe.model"))
        write_lines(own / "bin" / "dict.txt", [f"{model.id_to_piece(i)} 1" for i in range(1, len(model))])
        args = {"output": tmp_path / "data" / "questions", "pieces_of": "own", "bert": None, "version": "1.1"}
        args = argparse.Namespace(**args, workers=1, corpus=CORPUS)
        return write_question_data(args, QuestionTask("own", unanswerable), {"train": paragraphs, "valid": paragraphs})

    return prepare


@pytest.fixture
def train(fairseq_command, tmp_path):
    """``train(data, flags)``: fairseq-train of the tiny model; the path of its last checkpoint."""

    def run(data, flags: str, name: str = "run"):
        fairseq_command("train", data, *shlex.split(f"{MODEL} {TRAINING} {flags}"), "--save-dir", tmp_path / name)
        return tmp_path / name / "checkpoint_last.pt"

    return run
