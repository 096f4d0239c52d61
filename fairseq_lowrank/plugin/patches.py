"""The table of patches: every function of fairseq that this package replaces, with its reason."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Literal

from fairseq_lowrank import importing, versions
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.plugin import (
    arguments,
    attention,
    commands,
    continuing,
    criterions,
    evaluation,
    fixes,
    flags,
    literals,
    loading,
    optimizers,
    repairs,
    resuming,
    user_dir,
)
from fairseq_lowrank.plugin.patch import Patch

ENABLE, DISABLE = "LOWRANK_ENABLE", "LOWRANK_DISABLE"
TESTED = {"fairseq-fixed": "0.12.3.1", "torch": "2.13.0"}
"""The versions that the patches are tested with, by distribution."""


SAFE_LOADING = "fairseq loads checkpoints with torch.load(weights_only=True) and a list of allowed classes"
LITERALS = "fairseq reads these texts with ast.literal_eval"
METADATA = "fairseq keeps the metadata of a state dict from the file to the model"
OUR_FLAGS = "fairseq lets a plugin add flags to every model and criterion"
ONE_LINE = "fairseq's commands end in one line for mistakes of users"
UNKNOWN_WORDS = "--replace-unk reads the alignment that --print-alignment makes"
OVERRIDES = "fairseq's optimizers read optim_overrides of every parameter"
PARSER = "fairseq.options.parse_args_and_arch"
MODEL = "fairseq.models.BaseFairseqModel"
ENSEMBLE = "fairseq.checkpoint_utils.load_model_ensemble_and_task"
LANGUAGE_MODELING = "fairseq.tasks.language_modeling.LanguageModelingTask"
LAYER = "fairseq.modules.transformer_layer.Transformer{}LayerBase.build_{}_attention"


def _group(
    group: Literal["required", "attention", "fix", "optional"],
    name: str,
    targets: dict[str, Callable[[Any], Any]],
    reason: str,
    remove_when: str,
) -> tuple[Patch, ...]:
    """Return the patches that one reason needs, one for each target."""
    return tuple(Patch(name, target, wrap, reason, remove_when, group) for target, wrap in targets.items())


PATCHES: tuple[Patch, ...] = (
    # --- required: fairseq does not run on this stack without it
    *_group(
        "required",
        "numpy-names",
        dict.fromkeys(
            (
                "fairseq.data.data_utils.np",
                "fairseq.data.language_pair_dataset.np",
                "fairseq.data.token_block_dataset.np",
                "fairseq.modules.dynamic_crf_layer.np",
            ),
            repairs.with_old_names,
        ),
        "fairseq uses names that numpy 2 dropped.",
        "fairseq uses none of these names",
    ),
    *_group(
        "required",
        "optional-types",
        {"fairseq.dataclass.utils.interpret_dc_type": importing.read_optional_types},
        "On Python 3.14 fairseq does not recognise the type of an optional setting, and cannot be imported.",
        "fairseq reads types with typing.get_args",
    ),
    *_group(
        "required",
        "safe-loading",
        {
            "fairseq.checkpoint_utils.torch": loading.load_safely,
            "fairseq.distributed.utils._broadcast_object_slow": loading.broadcast_safely,
        },
        "torch refuses classes that fairseq saves, and switching its safety off lets a checkpoint run code.",
        SAFE_LOADING,
    ),
    *_group(
        "required",
        "literals",
        {
            **dict.fromkeys(
                ("fairseq.utils.eval_str_list", "fairseq.utils.eval_str_dict", "fairseq.utils.eval_bool"),
                literals.check_argument,
            ),
            "fairseq.models.fconv.FConvModel.build_model": literals.check_fields(
                "encoder_layers", "decoder_layers", "decoder_attention"
            ),
            "fairseq.models.fconv_lm.FConvLanguageModel.build_model": literals.check_fields(
                "decoder_layers", "decoder_attention"
            ),
            "fairseq.models.fconv_self_att.FConvModelSelfAtt.build_model": literals.check_fields(
                *("pretrained", "encoder_layers", "encoder_attention", "decoder_layers", "decoder_attention"),
                *("self_attention", "project_input", "gated_attention", "downsample"),
            ),
            "fairseq.models.lightconv_lm.LightConvLanguageModel.build_model": literals.check_fields(
                "character_filters"
            ),
            "fairseq.models.transformer_lm.TransformerLanguageModel.build_model": literals.check_fields(
                "character_filters"
            ),
            "fairseq.models.hubert.hubert.HubertModel.__init__": literals.check_fields("conv_feature_layers"),
            "fairseq.models.wav2vec.wav2vec.Wav2VecModel.__init__": literals.check_fields(
                "conv_feature_layers", "conv_aggregator_layers"
            ),
            "fairseq.models.wav2vec.wav2vec2.Wav2Vec2Model.__init__": literals.check_fields("conv_feature_layers"),
            "fairseq.models.wav2vec.wav2vec2.TransformerEncoder.__init__": literals.check_fields("conv_feature_layers"),
            "fairseq.models.speech_to_text.s2t_wav_transformer.SpeechWavTransformerEncoder.__init__": (
                literals.check_fields("conv_feature_layers")
            ),
            "fairseq.criterions.ctc.CtcCriterion.__init__": literals.check_fields("wer_args"),
            "fairseq.data.audio.raw_audio_dataset.RawAudioDataset.__init__": literals.check_fields(
                "feature_encoder_spec"
            ),
            "fairseq.data.codedataset.parse_manifest": literals.check_manifest,
        },
        "fairseq evaluates texts of a configuration or of data, which could run any code.",
        LITERALS,
    ),
    *_group(
        "required",
        "no-shell",
        {"fairseq.data.fasta_dataset.FastaDataset.__init__": literals.refuse_fasta},
        "fairseq reads data in the format fasta by a line of shell that contains its path.",
        "fairseq reads these files without a shell",
    ),
    *_group(
        "required",
        "overrides",
        {PARSER: arguments.with_fixup(arguments.literal_overrides)},
        "fairseq evaluates --model-overrides.",
        LITERALS,
    ),
    *_group(
        "required",
        "bf16-without-tpu",
        {PARSER: arguments.with_fixup(arguments.bf16_without_tpu)},
        "fairseq takes --bf16 to mean a TPU, and asks for torch_xla.",
        "--bf16 leaves --tpu as it is",
    ),
    *_group(
        "required",
        "torchrun",
        {"fairseq.distributed.utils.call_main": repairs.join_torchrun},
        "Workers that torchrun starts divide by zero on the CPU, or train one by one into the same folder.",
        "fairseq reads the variables of torchrun",
    ),
    *_group(
        "required",
        "end-of-reading",
        {"fairseq.data.iterators.BufferedIterator._create_consumer": repairs.end_reading_with_the_process},
        "Python kills the thread that reads ahead when a process ends, and current torch ends the process as a failure.",
        "fairseq joins the thread",
    ),
    *_group(
        "required",
        "one-line",
        {
            "sys.excepthook": commands.end_commands,
            "fairseq.distributed.utils.call_main": commands.end_workers,
            "hydra.core.utils.JobReturn.return_value": commands.end_hydra_jobs,
            PARSER: arguments.name_missing_flags,
        },
        "A mistake of the user ends in one line, and anything else in a full traceback and one last line.",
        ONE_LINE,
    ),
    *_group(
        "required",
        "user-dir",
        {"fairseq.utils.import_user_module": user_dir.import_user_module_once},
        "fairseq registers the plugin again or advises to rename it if --user-dir gives its folder by another path.",
        "fairseq compares the folders that paths lead to",
    ),
    # --- attention: needed for our flags
    *_group(
        "attention",
        "attention-flags",
        {
            "fairseq.options.add_model_args": flags.offer_flags,
            "fairseq.models.register_model": flags.register_with_flags,
        },
        "Each class of a model declares its flags, and every model needs ours.",
        OUR_FLAGS,
    ),
    *_group(
        "attention",
        "attention-flags",
        {PARSER: arguments.complete_help},
        "--help leaves out the flags of the chosen architecture, task and criterion.",
        "fairseq prints --help after its second parsing",
    ),
    *_group(
        "attention",
        "attention-flags",
        {PARSER: arguments.with_fixup(arguments.check_our_flags)},
        "Attention flags that do not work are refused before folders are made and data is read.",
        OUR_FLAGS,
    ),
    *_group(
        "attention",
        "build-attention",
        {
            "fairseq.models.build_model": attention.resolve_attention,
            LAYER.format("Encoder", "self"): attention.build_if_chosen(attention.encoder_attention),
            LAYER.format("Decoder", "self"): attention.build_if_chosen(attention.decoder_attention),
            LAYER.format("Decoder", "encoder"): attention.build_if_chosen(attention.cross_attention),
            "fairseq.modules.transformer_sentence_encoder_layer.TransformerSentenceEncoderLayer.build_self_attention": (
                attention.build_if_chosen(attention.bert_attention)
            ),
        },
        "The attention of a model is chosen when it is built.",
        "fairseq builds attention by a registry",
    ),
    *_group(
        "attention",
        "language-model-embedding",
        {"fairseq.models.transformer_lm.TransformerLanguageModel.build_model": attention.prepare_language_model},
        "--embed-rank and --embed-kernel change the embedding, and fairseq drops fields that it does not know.",
        "fairseq's language models pass on every field of their configuration",
    ),
    *_group(
        "attention",
        "attention-weights",
        {f"{MODEL}.prepare_for_inference_": attention.compute_weights_where_read},
        "Our layers compute attention weights only if something reads them.",
        "fairseq tells its decoders whether weights are read",
    ),
    *_group(
        "attention",
        "parameter-overrides",
        {
            "fairseq.optim.build_optimizer": optimizers.build_with_overrides,
            "fairseq.optim.FP16Optimizer.build_optimizer": optimizers.build_half_with_overrides,
            "fairseq.optim.FairseqOptimizer.set_lr": optimizers.set_scaled_lr,
            "fairseq.optim.FairseqOptimizer.load_state_dict": optimizers.load_with_overrides,
        },
        "Mixing parameters and head embeddings have their own weight decay and learning rate.",
        OVERRIDES,
    ),
    *_group(
        "attention",
        "regularisers",
        {
            "fairseq.criterions.register_criterion": criterions.register_with_regularisers,
            "fairseq.trainer.Trainer.__init__": criterions.check_criterion,
        },
        "The regularisers of attention are flags of every criterion.",
        OUR_FLAGS,
    ),
    *_group(
        "attention",
        "state-metadata",
        {
            "fairseq.distributed.utils._split_tensors_from_obj": loading.rebuild_with_metadata,
            "fairseq.distributed.utils._put_tensors_in_obj": loading.rebuild_with_metadata,
            "fairseq.checkpoint_utils.prune_state_dict": loading.prune_with_metadata,
            "fairseq.checkpoint_utils.load_ema_from_checkpoint": loading.load_average_with_metadata,
            "fairseq.checkpoint_utils.load_pretrained_component_from_model": loading.load_component_with_metadata,
            "fairseq.models.multilingual_transformer.MultilingualTransformerModel.load_state_dict": (
                loading.load_languages_with_metadata
            ),
        },
        "The metadata of a state dict contains the settings of its attention, and these functions drop it.",
        METADATA,
    ),
    *_group(
        "attention",
        "other-attention",
        {"fairseq.modules.MultiheadAttention._load_from_state_dict": loading.refuse_states_of_other_attention},
        "Weights of another attention variant can have the same shapes as fairseq's and mean something else.",
        "fairseq checks what a layer's state was saved by",
    ),
    *_group(
        "attention",
        "unfit-checkpoints",
        {
            f"{MODEL}.load_state_dict": loading.explain_unfit_checkpoints,
            "fairseq.trainer.Trainer.load_checkpoint": resuming.explain_what_cannot_resume,
            "fairseq.optim.FairseqOptimizer.load_state_dict": resuming.check_parameter_groups,
        },
        "If a checkpoint does not fit, the message names the flags that it was trained with.",
        "fairseq names the options that differ",
    ),
    *_group(
        "attention",
        "question-heads",
        {"fairseq.models.roberta.RobertaModel.upgrade_state_dict_named": loading.drop_heads_for_questions},
        "fairseq leaves out heads that a fine-tuning task does not have, and does not know our head for questions.",
        "our head for questions is one of fairseq's classification heads",
    ),
    # --- fix: a bug of fairseq
    *_group(
        "fix",
        "archives",
        {"fairseq.file_utils.tarfile": loading.unpack_within_the_folder},
        "from_pretrained unpacks an archive over files elsewhere if its members say so.",
        "fairseq unpacks with tarfile's data filter",
    ),
    *_group(
        "fix",
        "old-arguments",
        {"fairseq.checkpoint_utils._upgrade_state_dict": loading.read_old_arguments},
        "Arguments of old checkpoints give lists of numbers and largest lengths in other types, and fairseq reads only some of these.",
        "fairseq converts these arguments",
    ),
    *_group(
        "fix",
        "exact-resume",
        {"fairseq.trainer.Trainer.get_train_iterator": resuming.resume_with_the_first_batches},
        "A training that resumes after epoch 1 has other batches than the uninterrupted one.",
        "a checkpoint of fairseq holds the epoch in which its batches were made",
    ),
    *_group(
        "fix",
        "other-batches",
        {
            "fairseq.checkpoint_utils.load_checkpoint_to_cpu": continuing.keep_settings,
            "fairseq.trainer.Trainer.load_checkpoint": continuing.refuse_other_batches,
        },
        "A training that continues in the middle of an epoch with other batches leaves sentences out or repeats them.",
        "fairseq compares the flags that make batches",
    ),
    *_group(
        "fix",
        "finished-training",
        {"fairseq.trainer.Trainer.load_checkpoint": continuing.end_if_finished},
        "If a finished training is started again, fairseq trains one more update and saves it.",
        "fairseq looks at --max-update before an update",
    ),
    *_group(
        "fix",
        "patience",
        {
            "fairseq.trainer.Trainer.load_checkpoint": continuing.count_patience_in_each_run,
            "fairseq.trainer.Trainer.save_checkpoint": continuing.save_patience,
        },
        "The runs of a sweep share the best value and the count of --patience, and a training that resumes loses the count.",
        "fairseq keeps both in the trainer and saves them",
    ),
    *_group(
        "fix",
        "whole-checkpoints",
        {
            "fairseq.file_io.PathManager.copy": resuming.replace_checkpoints_whole,
            "fairseq.checkpoint_utils.load_checkpoint": resuming.name_whole_checkpoints,
        },
        "fairseq writes checkpoint_last.pt in place, so a kill leaves half a file.",
        "fairseq renames copies of checkpoints as it renames what it saves",
    ),
    *_group(
        "fix",
        "everyday-mistakes",
        {
            PARSER: arguments.check_command_line,
            "fairseq.dataclass.initialize.add_defaults": arguments.check_configuration,
            f"{LANGUAGE_MODELING}.build_model": evaluation.check_evaluated_model,
        },
        "Missing data, dictionaries or checkpoints, and models that do not fit their task, end in a traceback.",
        ONE_LINE,
    ),
    *_group(
        "fix",
        "layers-to-keep",
        {PARSER: arguments.with_fixup(arguments.layers_to_keep_as_text)},
        "fairseq parses --encoder-layers-to-keep as a list, and its models split it as a text.",
        "fairseq's parser and models agree",
    ),
    *_group(
        "fix",
        "replace-unk",
        {
            f"{MODEL}.prepare_for_inference_": repairs.note_unknown_words,
            "fairseq.sequence_generator.SequenceGenerator.generate": repairs.align_unknown_words,
            "fairseq.utils.load_align_dict": repairs.load_no_align_dict,
            "fairseq.utils.replace_unk": repairs.replace_by_target,
        },
        "--replace-unk fails, with and without --print-alignment.",
        UNKNOWN_WORDS,
    ),
    *_group(
        "fix",
        "beam-size",
        dict.fromkeys(
            (
                "fairseq.sequence_generator.SequenceGenerator.generate",
                "fairseq.sequence_generator.SequenceGeneratorWithAlignment.generate",
            ),
            repairs.search_with_its_own_beam,
        ),
        "After a search with five hypotheses, a search with one uses the keys of each fifth sentence for five sentences.",
        "fairseq sets the beam size at each search",
    ),
    *_group(
        "fix",
        "whole-evaluation",
        {
            "fairseq.data.data_utils.batch_by_size": evaluation.announce_sentences,
            PARSER: arguments.with_fixup(evaluation.batches_of_any_size),
        },
        "fairseq-generate and fairseq-validate leave out the last sentences: of 12, they use 8.",
        "--required-batch-size-multiple keeps the last batch",
    ),
    *_group(
        "fix",
        "announced-validation",
        {"fairseq.trainer.Trainer.get_valid_iterator": evaluation.announce_validation},
        "Validation during training leaves out the last sentences, also for --eval-bleu, and no line says so.",
        "--required-batch-size-multiple keeps the last batch",
    ),
    *_group(
        "fix",
        "whole-blocks",
        {
            PARSER: arguments.with_fixup(evaluation.blocks_of_model),
            ENSEMBLE: evaluation.load_with_blocks_of_model,
            f"{LANGUAGE_MODELING}.load_dataset": evaluation.refuse_empty_blocks,
            f"{LANGUAGE_MODELING}.eval_lm_dataloader": evaluation.evaluate_every_block,
        },
        "fairseq-eval-lm leaves out blocks that are too long, and with several workers mixes up their contexts.",
        "fairseq-eval-lm refuses blocks that it cannot use",
    ),
    # --- optional: changes what a stock training does or reports
    *_group(
        "optional",
        "whole-validation",
        {"fairseq.trainer.Trainer.get_valid_iterator": evaluation.validate_every_sentence},
        "Validation during training leaves out the last sentences.",
        "--required-batch-size-multiple keeps the last batch",
    ),
    *_group(
        "optional",
        "bf16-evaluation",
        {
            f"{MODEL}.prepare_for_inference_": evaluation.prepare_in_bfloat16,
            ENSEMBLE: evaluation.load_in_bfloat16,
        },
        "fairseq accepts --bf16 in evaluation and computes in float32.",
        "fairseq's evaluating commands convert the model to bfloat16",
    ),
    *fixes.PATCHES,
)
"""Every patch, in the order in which they are applied."""


def warn_of_untested_versions() -> None:
    """Warn once if fairseq or torch has another version than the tested one."""
    others = []
    for distribution, tested in TESTED.items():
        version = versions.installed_version(distribution.removesuffix("-fixed"), distribution) or "missing"
        if version.partition("+")[0] != tested:
            others.append(f"{distribution} {version} (tested: {tested})")
    if others:
        warnings.warn(f"fairseq_lowrank patches functions of fairseq, untested with {', '.join(others)}", stacklevel=2)


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
