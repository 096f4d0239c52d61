"""Advice on a model of fairseq: what it reads, how long its sequences are, and what each change costs."""
