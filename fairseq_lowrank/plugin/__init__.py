"""What ``--user-dir`` has to bring about in fairseq: repairs first, then our models, tasks and criterions.

fairseq itself imports only the ``models`` and ``tasks`` folders of a user directory, and not even those when
the package was imported before, so each is imported here by name. A stock fairseq checkpoint too needs ``--user-dir`` to load.
"""

from fairseq_lowrank.plugin import (
    arguments,
    attention,
    commands,
    datasets,
    evaluation,
    flags,
    inputs,
    optimizers,
    patches,
    repairs,
)

repairs.restore_numpy_names()
patches.apply(patches.PATCHES)
datasets.check_binarised_data()
datasets.close_what_was_opened()
arguments.extend_parser(
    arguments.bf16_without_tpu,
    arguments.layers_to_keep_as_text,
    arguments.literal_overrides,
    evaluation.evaluate_every_sentence(),
    evaluation.blocks_of_model,
)
arguments.refuse_unworkable_training()
evaluation.evaluate_in_bfloat16()
evaluation.evaluate_every_block()
repairs.align_unknown_words()
repairs.search_with_its_own_beam()
repairs.join_torchrun()
repairs.end_reading_with_the_process()
repairs.quieten_hydra()
repairs.quieten_pinning()
optimizers.honour_parameter_overrides()
flags.offer_flags()
attention.choose_attention()
inputs.name_empty_subsets()
commands.end_commands_in_one_line()

from fairseq_lowrank import models, tasks  # noqa: E402, F401
from fairseq_lowrank.plugin import criterions  # noqa: E402

criterions.extend_criterions(criterions.RegularisedCriterion, criterions.RegulariserConfig)
