"""The registered tasks: those that fairseq lacks."""

from fairseq_lowrank.tasks import bert_pretraining, question_answering, segment_lm  # noqa: F401
