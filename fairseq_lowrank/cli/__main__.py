import sys

from fairseq_lowrank.cli import main

sys.exit(main())
