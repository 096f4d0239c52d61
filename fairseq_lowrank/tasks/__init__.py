"""The registered tasks: those that fairseq lacks."""

from fairseq_lowrank.tasks import question_answering  # noqa: F401
