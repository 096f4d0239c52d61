"""The engine of recipes: it selects, locks, trains, resumes and scores rows, and appends a line of results for each.

A recipe (`examples/`) declares its rows in shell and passes them to `python -m experiments.recipes`. The modules, in the order of
a run: `settings` (variables of the environment), `recipe` (rows, and their runs), `engine` (the loop over runs), `commands`,
`training`, `scoring`, `results`. Only functions that read a checkpoint import fairseq.
"""
