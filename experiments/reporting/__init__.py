"""Results of runs beside the values that the papers publish: papers, comparison, tables, curves."""
