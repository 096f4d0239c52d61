"""fairseq's criterions, each with the flags of the regularisers."""

from fairseq_lowrank import compat
from fairseq_lowrank.criterions.regularised import RegularisedCriterion, RegulariserConfig

compat.extend_criterions(RegularisedCriterion, RegulariserConfig)
