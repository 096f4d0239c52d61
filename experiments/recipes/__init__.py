"""The engine of recipes: rows are selected, locked, trained, resumed, scored, and a line of results is appended for each.

A recipe (`examples/`) declares its rows in shell and hands them to `python -m experiments.recipes`. In the order of a run:
`settings` (variables from outside), `recipe` (rows, and the run each becomes), `engine` (one after another),
`commands`, `training`, `scoring`, `provenance`, `results`. fairseq is imported where a checkpoint is read, nowhere else.
"""
