"""The papers' published values, results next to them, and contrasts that were predicted before the runs."""
