from experiments.papers import complexity


def test_the_posters_formulas_are_the_parameters_of_built_layers():
    for heads, head_dim in ((8, 64), (12, 64), (4, 128)):
        rows = complexity.rows(heads, head_dim)
        assert [row["parameters"] for row in rows] == [row["built"] for row in rows]
        over = {row["attention"]: row["over_sha"] for row in rows}
        assert over["mha"] == (3 * heads**2 - 3 * heads) * head_dim**2
        assert over["mhe-mul"] == 3 * heads * head_dim


def test_the_table_is_printed_by_its_command(capsys):
    from experiments.__main__ import main

    assert main(["tables", "complexity"]) == 0
    assert "| mhe-mul | O(n) | 3d²n + 3dn | 149,760 | 149,760 | 2,304 |" in capsys.readouterr().out
