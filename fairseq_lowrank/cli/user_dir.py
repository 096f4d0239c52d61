"""Print the folder of this package for fairseq's --user-dir.

    fairseq-train DATA --user-dir "$(fairseq-lowrank user-dir)" --arch lowrank_transformer_iwslt_de_en …

fairseq-generate, -interactive, -validate and -eval-lm take it in the same way. fairseq-hydra-train imports plugins
after it reads its configuration, so add the model to the configuration by its name:

    fairseq-hydra-train common.user_dir="$(fairseq-lowrank user-dir)" task=translation task.data=DATA \\
        +model._name=lowrank_transformer_iwslt_de_en +model.attention=mixhead-b …

If fairseq has a configuration of the model, use its name and add flags of this package: model=transformer_lm
+model.attention=mixhead-b.

To use your own plugin too, write `import fairseq_lowrank.plugin` in its __init__.py, and give its folder to --user-dir.
"""

from pathlib import Path

import fairseq_lowrank

NAME = "user-dir"
HELP = "print the folder for fairseq's --user-dir"


def add_arguments(parser) -> None:
    """Add nothing: the command has no arguments."""


def run(args) -> None:
    print(folder())


def folder() -> Path:
    """Return the folder of this package."""
    return Path(fairseq_lowrank.__file__).resolve().parent
