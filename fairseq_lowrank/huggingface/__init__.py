"""Head mixing in models of ``transformers``: what happens between projected heads and head outputs.

::

    from fairseq_lowrank.huggingface import apply_attention, load_attention, save_attention

    model = AutoModelForSequenceClassification.from_pretrained(folder)
    apply_attention(model, "mixhead-b")  # the outputs do not change: mixing is initialised to the identity
    save_attention(model, folder)  # the mixing alone; load_attention(model, folder) reads it

Models that compute attention through ``ALL_ATTENTION_FUNCTIONS`` pass projected (and rotated) queries, keys and values to one
registered function. So the mixing of scores, the activation and the mixing of probabilities can be chosen in each of them. The
projections stay the model's own. What is added is in float32 in models of every dtype.

Importing this package also lets ``from_pretrained`` read what ``fairseq-lowrank export`` wrote; see :mod:`.exported`.
"""

from fairseq_lowrank.attention.groups import parameter_groups
from fairseq_lowrank.attention.sharding import shard_parts, whole_state_dict
from fairseq_lowrank.huggingface import exported, restoring  # noqa: F401  from_pretrained restores attention
from fairseq_lowrank.huggingface.adapters import load_adapter, peft_modules, watch_peft
from fairseq_lowrank.huggingface.added import mixing_state
from fairseq_lowrank.huggingface.apply import apply_attention
from fairseq_lowrank.huggingface.choice import spec_of
from fairseq_lowrank.huggingface.folding import fold
from fairseq_lowrank.huggingface.function import IMPLEMENTATION, attention_calls, attention_forward, attention_weights
from fairseq_lowrank.huggingface.models import attention_modules, supported
from fairseq_lowrank.huggingface.recorded import CONFIG, WEIGHTS
from fairseq_lowrank.huggingface.resuming import watch_trainer
from fairseq_lowrank.huggingface.saving import load_attention, save_attention
from fairseq_lowrank.huggingface.sites import SITES
from fairseq_lowrank.huggingface.training import TRAIN
from fairseq_lowrank.importing import after_import

__all__ = [
    "CONFIG",
    "IMPLEMENTATION",
    "SITES",
    "TRAIN",
    "WEIGHTS",
    "apply_attention",
    "attention_calls",
    "attention_forward",
    "attention_modules",
    "attention_weights",
    "exported",
    "fold",
    "load_adapter",
    "load_attention",
    "mixing_state",
    "parameter_groups",
    "peft_modules",
    "save_attention",
    "shard_parts",
    "spec_of",
    "supported",
    "whole_state_dict",
]

after_import("peft", watch_peft)
after_import("transformers.trainer", watch_trainer)
