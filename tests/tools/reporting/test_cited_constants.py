"""The few published values that `advise` cites are those of the papers' file."""

from fairseq_lowrank.tools.fairseq.advice import checks
from fairseq_lowrank.tools.reporting.papers import load_papers

PAPERS = load_papers()


def test_vocabulary_constants_are_those_of_the_paper():
    found = PAPERS["vocabulary_bottleneck"]["findings"]
    redundancy, crossing = found["rank_redundancy"], found["depth_beats_width_r500"]
    assert [checks.RANK_REDUNDANCY["rank"], checks.RANK_REDUNDANCY["width"]] == redundancy["rank_over_width"]
    assert checks.RANK_REDUNDANCY["redundant_percent"] == redundancy["redundant_percent"]
    assert {"rank": crossing["rank"], "width": crossing["width_at_crossing"]} == checks.DEPTH_BEATS_WIDTH
    for times, percent in checks.WIDE_ATTENTION_REDUNDANT.items():
        assert found[f"attention_width_{times}"]["redundant_percent"] == percent


def test_shares_of_head_embeddings_are_those_of_the_poster():
    tables = {"WMT'14": "wmt14", "GLUE, SuperGLUE and SQuAD": "encoder"}
    for task, table in tables.items():
        rows = PAPERS["mhe"]["tables"][table]["rows"]
        shares = [share for row in rows if "mhe" in row["row"] for share in row.get("prr", {}).values()]
        assert checks.KEPT_BY_MHE[task] == (min(shares), max(shares))
