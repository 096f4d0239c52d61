"""Results of runs next to the values that the papers publish: papers, comparison, tables, curves."""
