"""Print the folder to give to fairseq's --user-dir, wherever this package is installed.

    fairseq-train DATA --user-dir "$(fairseq-lowrank user-dir)" --arch lowrank_transformer_iwslt_de_en …

fairseq-generate, -interactive, -validate and -eval-lm take it in the same way. fairseq-hydra-train imports plugins
after it has read its configuration, so there the model is added to the configuration by name:

    fairseq-hydra-train common.user_dir="$(fairseq-lowrank user-dir)" task=translation task.data=DATA \\
        +model._name=lowrank_transformer_iwslt_de_en +model.attention=mixhead-b …

Models that fairseq has a configuration of are named by it, with flags of this package added: model=transformer_lm
+model.attention=mixhead-b.

A plugin of your own needs no second --user-dir: write `import fairseq_lowrank.plugin` in its __init__.py.
"""

from pathlib import Path

import fairseq_lowrank

NAME = "user-dir"
HELP = "print the folder for fairseq's --user-dir"


def add_arguments(parser) -> None:
    """No arguments."""


def run(args) -> None:
    print(folder())


def folder() -> Path:
    """The package's own."""
    return Path(fairseq_lowrank.__file__).resolve().parent
