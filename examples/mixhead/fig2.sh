#!/usr/bin/env bash
# What: Learning curves of the runs of table 4, which are trained first if they are not done.
# Table: Mixhead paper, figure 2.
# Result: The curves, and their table, in OUTPUT (default: a folder fig2 next to the lines of results).
# Time: 9 trainings, about 11 hours on one H100 or 920 hours on 2 cores, each alone and under one seed, as COST=1 estimates.
# Our choice: Those of table4.sh.
source "$(dirname "${BASH_SOURCE[0]}")/table4.sh"
report --table "$TABLE" --output "${OUTPUT:-$(dirname "$(results_file)")/fig2}"
