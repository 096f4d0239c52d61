"""Reports: results of runs next to the papers' published values, with tables, curves and contrasts."""
