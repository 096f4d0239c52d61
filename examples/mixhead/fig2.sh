#!/usr/bin/env bash
# Mixhead paper, figure 2: learning curves of the runs of table 4, which are trained first if they are not done.
# Writes the curves, and the table they belong to, into OUTPUT (default: a folder fig2 next to the lines of results).
source "$(dirname "${BASH_SOURCE[0]}")/table4.sh"
report --table "$TABLE" --output "${OUTPUT:-$(dirname "$(results_file)")/fig2}"
