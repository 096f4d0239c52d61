"""The commands that score the runs of recipes."""

from experiments.recipes import scoring
from experiments.recipes.recipe import Run
from experiments.recipes.settings import Settings


def test_blocks_are_scored_with_a_window_and_segments_that_follow_each_other_with_memory(tmp_path):
    called = []
    for task in ("language_modeling", "segment_lm"):
        flags = ("--task", task, "--tokens-per-sample", "64")
        run = Run("row", 1, "brown", flags, tmp_path, tmp_path, tmp_path)
        scoring.score(
            "language-model", run, Settings(work=tmp_path, dry_run=True), lambda words, log: called.append(words)
        )
    blocks, segments = called
    assert blocks[blocks.index("--context-window") + 1] == "50" and "--task" not in blocks
    assert segments[segments.index("--task") + 1] == "segment_lm" and "--context-window" not in segments
