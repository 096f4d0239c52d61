"""The table of patches: every function of fairseq that this package replaces, with its reason."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from fairseq_lowrank.messages import UserError
from fairseq_lowrank.plugin import literals, loading, resuming

ENABLE, DISABLE = "LOWRANK_ENABLE", "LOWRANK_DISABLE"


@dataclass(frozen=True)
class Patch:
    """A replacement of one function, class or attribute of fairseq.

    Args:
        name: the name in ``LOWRANK_ENABLE`` and ``LOWRANK_DISABLE``; patches of one name are switched together.
        target: the full name, such as ``fairseq.checkpoint_utils.load_checkpoint_to_cpu``.
        wrap: a function from the original to its replacement.
        reason: one sentence that says why fairseq needs the replacement.
        remove_when: the condition that makes the patch unnecessary.
        group: ``required`` (fairseq does not run on this stack without it), ``attention`` (needed for our flags; does nothing
            for a model without them), ``fix`` (a bug of fairseq; on unless ``LOWRANK_DISABLE`` names it) or ``optional`` (off
            unless ``LOWRANK_ENABLE`` names it).
    """

    name: str
    target: str
    wrap: Callable[[Any], Any]
    reason: str
    remove_when: str
    group: Literal["required", "attention", "fix", "optional"]


SAFE_LOADING = "fairseq loads checkpoints with torch.load(weights_only=True) and a list of allowed classes"
LITERALS = "fairseq reads these texts with ast.literal_eval"
METADATA = "fairseq keeps the metadata of a state dict on every way from a file to the model"


def _literals(target: str, wrap: Callable[[Any], Any], reason: str) -> Patch:
    return Patch("literals", target, wrap, reason, LITERALS, "required")


PATCHES: tuple[Patch, ...] = (
    Patch(
        name="safe-loading",
        target="fairseq.distributed.utils._broadcast_object_slow",
        wrap=loading.broadcast_safely,
        reason="Workers that resume exchange objects that torch refuses to load.",
        remove_when=SAFE_LOADING,
        group="required",
    ),
    Patch(
        name="safe-loading",
        target="fairseq.checkpoint_utils.torch",
        wrap=loading.load_safely,
        reason="torch refuses classes that fairseq saves, and switching its safety off lets a checkpoint run code.",
        remove_when=SAFE_LOADING,
        group="required",
    ),
    Patch(
        name="old-arguments",
        target="fairseq.checkpoint_utils._upgrade_state_dict",
        wrap=loading.read_numbers_as_lists,
        reason="Old checkpoints give the learning rate as a text or a number, and fairseq reads only some of these.",
        remove_when="fairseq reads a text or a number for every list of numbers in old arguments",
        group="fix",
    ),
    *(
        _literals(f"fairseq.utils.{name}", literals.check_argument, "fairseq evaluates texts of a configuration.")
        for name in ("eval_str_list", "eval_str_dict", "eval_bool")
    ),
    *(
        _literals(
            f"fairseq.{target}",
            literals.check_fields(*names),
            "fairseq evaluates fields of a configuration, which a checkpoint brings along.",
        )
        for target, names in {
            "models.fconv.FConvModel.build_model": ("encoder_layers", "decoder_layers", "decoder_attention"),
            "models.fconv_lm.FConvLanguageModel.build_model": ("decoder_layers", "decoder_attention"),
            "models.fconv_self_att.FConvModelSelfAtt.build_model": (
                *("pretrained", "encoder_layers", "encoder_attention", "decoder_layers", "decoder_attention"),
                *("self_attention", "project_input", "gated_attention", "downsample"),
            ),
            "models.lightconv_lm.LightConvLanguageModel.build_model": ("character_filters",),
            "models.transformer_lm.TransformerLanguageModel.build_model": ("character_filters",),
            "models.hubert.hubert.HubertModel.__init__": ("conv_feature_layers",),
            "models.wav2vec.wav2vec.Wav2VecModel.__init__": ("conv_feature_layers", "conv_aggregator_layers"),
            "models.wav2vec.wav2vec2.Wav2Vec2Model.__init__": ("conv_feature_layers",),
            "models.wav2vec.wav2vec2.TransformerEncoder.__init__": ("conv_feature_layers",),
            "models.speech_to_text.s2t_wav_transformer.SpeechWavTransformerEncoder.__init__": ("conv_feature_layers",),
            "criterions.ctc.CtcCriterion.__init__": ("wer_args",),
            "data.audio.raw_audio_dataset.RawAudioDataset.__init__": ("feature_encoder_spec",),
        }.items()
    ),
    _literals("fairseq.data.codedataset.parse_manifest", literals.check_manifest, "fairseq evaluates lines of data."),
    *(
        Patch(
            name="state-metadata",
            target=f"fairseq.{target}",
            wrap=wrap,
            reason="The metadata of a state dict says what attention it was saved by, and fairseq drops it on this way.",
            remove_when=METADATA,
            group="attention",
        )
        for target, wrap in {
            "distributed.utils._split_tensors_from_obj": loading.rebuild_with_metadata,
            "distributed.utils._put_tensors_in_obj": loading.rebuild_with_metadata,
            "checkpoint_utils.prune_state_dict": loading.prune_with_metadata,
            "checkpoint_utils.load_ema_from_checkpoint": loading.load_average_with_metadata,
            "checkpoint_utils.load_pretrained_component_from_model": loading.load_component_with_metadata,
            "models.multilingual_transformer.MultilingualTransformerModel.load_state_dict": (
                loading.load_languages_with_metadata
            ),
        }.items()
    ),
    Patch(
        name="other-attention",
        target="fairseq.modules.MultiheadAttention._load_from_state_dict",
        wrap=loading.refuse_states_of_other_attention,
        reason="Weights of another kind of attention can have the shapes of fairseq's own and mean something else.",
        remove_when="fairseq checks what a layer's state was saved by",
        group="attention",
    ),
    Patch(
        name="unfit-checkpoints",
        target="fairseq.models.BaseFairseqModel.load_state_dict",
        wrap=loading.explain_unfit_checkpoints,
        reason="The flags that a checkpoint was trained with are named in one line.",
        remove_when="fairseq names the options that differ",
        group="attention",
    ),
    Patch(
        name="question-heads",
        target="fairseq.models.roberta.RobertaModel.upgrade_state_dict_named",
        wrap=loading.drop_heads_for_questions,
        reason="fairseq leaves out heads that a fine-tuning task does not have, and does not know our head for questions.",
        remove_when="our head for questions is one of fairseq's classification heads",
        group="attention",
    ),
    Patch(
        name="archives",
        target="fairseq.file_utils.tarfile",
        wrap=loading.unpack_within_the_folder,
        reason="from_pretrained unpacks an archive over files elsewhere if its members say so.",
        remove_when="fairseq unpacks with tarfile's data filter",
        group="fix",
    ),
    Patch(
        name="exact-resume",
        target="fairseq.trainer.Trainer.get_train_iterator",
        wrap=resuming.resume_with_the_first_batches,
        reason="A training that resumes after epoch 1 has other batches than the uninterrupted one.",
        remove_when="a checkpoint of fairseq holds the epoch in which its batches were made",
        group="fix",
    ),
    Patch(
        name="whole-checkpoints",
        target="fairseq.file_io.PathManager.copy",
        wrap=resuming.replace_checkpoints_whole,
        reason="fairseq writes checkpoint_last.pt in place, so a kill leaves half a file.",
        remove_when="fairseq renames copies of checkpoints as it renames what it saves",
        group="fix",
    ),
    Patch(
        name="whole-checkpoints",
        target="fairseq.checkpoint_utils.load_checkpoint",
        wrap=resuming.name_whole_checkpoints,
        reason="If checkpoint_last.pt is damaged, the user needs the name of the newest intact checkpoint.",
        remove_when="fairseq falls back on another checkpoint",
        group="fix",
    ),
    Patch(
        name="unfit-checkpoints",
        target="fairseq.trainer.Trainer.load_checkpoint",
        wrap=resuming.explain_what_cannot_resume,
        reason="fairseq's trainer does not say which flag makes a checkpoint fit.",
        remove_when="fairseq names the options that differ",
        group="attention",
    ),
    Patch(
        name="unfit-checkpoints",
        target="fairseq.optim.FairseqOptimizer.load_state_dict",
        wrap=resuming.check_parameter_groups,
        reason="A stock optimizer's state does not fit a model with head mixing, and torch does not name the flag that helps.",
        remove_when="fairseq names the flag",
        group="attention",
    ),
)
"""Every patch, in the order in which they are applied."""


def names_in(variable: str) -> set[str]:
    """Return the names in a comma-separated environment variable."""
    return {name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()}


def selected(patches: Iterable[Patch]) -> list[Patch]:
    """Return the patches that are switched on.

    Raises:
        UserError: ``LOWRANK_ENABLE`` names no optional patch, or ``LOWRANK_DISABLE`` no fix.
    """
    patches = list(patches)
    chosen = {}
    for variable, group in ((ENABLE, "optional"), (DISABLE, "fix")):
        known = {patch.name for patch in patches if patch.group == group}
        chosen[variable] = names_in(variable)
        if unknown := chosen[variable] - known:
            raise UserError(
                f"{variable}={','.join(sorted(unknown))}: no patch of group {group} has this name. "
                f"Choose from {', '.join(sorted(known)) or 'none'}."
            )

    def is_on(patch: Patch) -> bool:
        if patch.group == "optional":
            return patch.name in chosen[ENABLE]
        return patch.group != "fix" or patch.name not in chosen[DISABLE]

    return [patch for patch in patches if is_on(patch)]


def locate(target: str) -> tuple[object, str]:
    """Return the module or class that holds a target, and the name of the attribute.

    Raises:
        AttributeError, ModuleNotFoundError: the installed fairseq has no such target.
    """
    path, _, attribute = target.rpartition(".")
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            holder = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            if end == 1:
                raise
            continue
        for part in parts[end:]:
            holder = getattr(holder, part)
        getattr(holder, attribute)
        return holder, attribute
    raise ModuleNotFoundError(path)


ORIGINALS: dict[str, Any] = {}
"""The function of fairseq that was replaced first, by target."""


def apply(patches: Iterable[Patch]) -> None:
    """Replace the target of each selected patch by what its ``wrap`` returns for the original.

    A wrapper of a class method or static method gets the plain function, and its replacement becomes the same kind of method.
    """
    for patch in selected(patches):
        holder, attribute = locate(patch.target)
        present = vars(holder).get(attribute, getattr(holder, attribute))
        kind = type(present) if isinstance(present, classmethod | staticmethod) else None
        original = present.__func__ if kind else present
        ORIGINALS.setdefault(patch.target, original)
        replacement = patch.wrap(original)
        setattr(holder, attribute, kind(replacement) if kind else replacement)
