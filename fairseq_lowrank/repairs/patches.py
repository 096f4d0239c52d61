"""The table of repairs: every function of fairseq that is replaced so that fairseq runs here and is right, with its reason."""

from __future__ import annotations

from fairseq_lowrank import importing
from fairseq_lowrank.repairs import (
    arguments,
    checkpoints,
    commands,
    continuing,
    dictionaries,
    evaluation,
    literals,
    loading,
    resuming,
    search,
    stack,
    stopping,
    tokens,
    user_dir,
)
from fairseq_lowrank.repairs.patch import Patch, group

SAFE_LOADING = "fairseq loads checkpoints with torch.load(weights_only=True) and a list of allowed classes"
LITERALS = "fairseq reads these texts with ast.literal_eval"
ONE_LINE = "fairseq's commands end in one line for mistakes of users"
PARSER = "fairseq.options.parse_args_and_arch"
PLATEAU = "fairseq.optim.lr_scheduler.reduce_lr_on_plateau.ReduceLROnPlateauLRSchedule"
MODEL = "fairseq.models.BaseFairseqModel"
ENSEMBLE = "fairseq.checkpoint_utils.load_model_ensemble_and_task"
LANGUAGE_MODELING = "fairseq.tasks.language_modeling.LanguageModelingTask"


PATCHES: tuple[Patch, ...] = (
    # --- required: fairseq does not run on this stack without it
    *group(
        "required",
        "numpy-names",
        dict.fromkeys(
            (
                "fairseq.data.data_utils.np",
                "fairseq.data.language_pair_dataset.np",
                "fairseq.data.token_block_dataset.np",
                "fairseq.modules.dynamic_crf_layer.np",
            ),
            stack.with_old_names,
        ),
        "fairseq uses names that numpy 2 dropped.",
        "fairseq uses none of these names",
    ),
    *group(
        "required",
        "optional-types",
        {"fairseq.dataclass.utils.interpret_dc_type": importing.read_optional_types},
        "On Python 3.14 fairseq does not recognise the type of an optional setting, and cannot be imported.",
        "fairseq reads types with typing.get_args",
    ),
    *group(
        "required",
        "safe-loading",
        {
            "fairseq.checkpoint_utils.torch": loading.load_safely,
            "fairseq.distributed.utils._broadcast_object_slow": loading.broadcast_safely,
        },
        "torch refuses classes that fairseq saves, and switching its safety off lets a checkpoint run code.",
        SAFE_LOADING,
    ),
    *group(
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
    *group(
        "required",
        "no-shell",
        {"fairseq.data.fasta_dataset.FastaDataset.__init__": literals.refuse_fasta},
        "fairseq reads data in the format fasta by a line of shell that contains its path.",
        "fairseq reads these files without a shell",
    ),
    *group(
        "required",
        "overrides",
        {PARSER: arguments.parsing(finish=arguments.literal_overrides)},
        "fairseq evaluates --model-overrides.",
        LITERALS,
    ),
    *group(
        "required",
        "bf16-without-tpu",
        {PARSER: arguments.parsing(finish=arguments.bf16_without_tpu)},
        "fairseq takes --bf16 to mean a TPU, and asks for torch_xla.",
        "--bf16 leaves --tpu as it is",
    ),
    *group(
        "required",
        "torchrun",
        {"fairseq.distributed.utils.call_main": stack.join_torchrun},
        "Workers that torchrun starts divide by zero on the CPU, or train one by one into the same folder.",
        "fairseq reads the variables of torchrun",
    ),
    *group(
        "required",
        "end-of-reading",
        {"fairseq.data.iterators.BufferedIterator._create_consumer": stack.end_reading_with_the_process},
        "Python kills the thread that reads ahead when a process ends, and current torch ends the process as a failure.",
        "fairseq joins the thread",
    ),
    *group(
        "required",
        "one-line",
        {
            "sys.excepthook": commands.end_commands,
            "fairseq.distributed.utils.call_main": commands.end_workers,
            "hydra.core.utils.JobReturn.return_value": commands.end_hydra_jobs,
            PARSER: arguments.parsing(explain=arguments.name_missing_flags),
        },
        "A mistake of the user ends in one line, and anything else in a full traceback and one last line.",
        ONE_LINE,
    ),
    *group(
        "required",
        "user-dir",
        {"fairseq.utils.import_user_module": user_dir.import_user_module_once},
        "fairseq registers the plugin again or advises to rename it if --user-dir gives its folder by another path.",
        "fairseq compares the folders that paths lead to",
    ),
    # --- fix: a bug of fairseq
    *group(
        "fix",
        "archives",
        {"fairseq.file_utils.tarfile": loading.unpack_within_the_folder},
        "from_pretrained unpacks an archive over files elsewhere if its members say so.",
        "fairseq unpacks with tarfile's data filter",
    ),
    *group(
        "fix",
        "old-arguments",
        {"fairseq.checkpoint_utils._upgrade_state_dict": loading.read_old_arguments},
        "Arguments of old checkpoints give lists of numbers and largest lengths in other types, and fairseq reads only some of these.",
        "fairseq converts these arguments",
    ),
    *group(
        "fix",
        "exact-resume",
        {"fairseq.trainer.Trainer.get_train_iterator": resuming.resume_with_the_first_batches},
        "A training that resumes after epoch 1 has other batches than the uninterrupted one.",
        "a checkpoint of fairseq holds the epoch in which its batches were made",
    ),
    *group(
        "fix",
        "other-batches",
        {
            "fairseq.checkpoint_utils.load_checkpoint_to_cpu": continuing.keep_settings,
            "fairseq.trainer.Trainer.load_checkpoint": continuing.keep_settings_of_checkpoint,
            "fairseq.checkpoint_utils.load_checkpoint": continuing.name_other_batches,
            "fairseq.data.iterators.EpochBatchIterator.state_dict": continuing.save_batches,
            "fairseq.data.iterators.EpochBatchIterator.load_state_dict": continuing.compare_batches,
        },
        "A training that continues in the middle of an epoch with other batches leaves sentences out or repeats them.",
        "fairseq compares the batches",
    ),
    *group(
        "fix",
        "finished-training",
        {"fairseq.trainer.Trainer.load_checkpoint": continuing.end_if_finished},
        "If a finished training is started again, fairseq trains one more update and saves it.",
        "fairseq looks at --max-update before an update",
    ),
    *group(
        "fix",
        "patience",
        {
            "fairseq.trainer.Trainer.load_checkpoint": continuing.count_patience_in_each_run,
            "fairseq.trainer.Trainer.save_checkpoint": continuing.save_patience,
        },
        "The runs of a sweep share the best value and the count of --patience, and a training that resumes loses the count.",
        "fairseq keeps both in the trainer and saves them",
    ),
    *group(
        "fix",
        "plateau",
        {
            f"{PLATEAU}.state_dict": continuing.save_bad_epochs,
            f"{PLATEAU}.load_state_dict": continuing.load_bad_epochs,
            "fairseq.trainer.Trainer.load_checkpoint": continuing.end_epoch_of_checkpoint,
        },
        "With --lr-scheduler reduce_lr_on_plateau, a training that resumes loses the last validation and the count of bad epochs.",
        "fairseq saves the state of the schedule after the schedule has seen the validation loss",
    ),
    *group(
        "fix",
        "whole-checkpoints",
        {
            "fairseq.file_io.PathManager.copy": resuming.replace_checkpoints_whole,
            "fairseq.checkpoint_utils.load_checkpoint": resuming.name_whole_checkpoints,
        },
        "fairseq writes checkpoint_last.pt in place, so a kill leaves half a file.",
        "fairseq renames copies of checkpoints as it renames what it saves",
    ),
    *group(
        "fix",
        "restarts",
        {"fairseq.distributed.utils.call_main": stopping.resume_after_restart},
        "Workers that a launcher starts again begin with --restore-file and the flags --reset again.",
        "fairseq prefers the checkpoints that the same command wrote to --restore-file",
    ),
    *group(
        "fix",
        "signals",
        {
            "fairseq.distributed.utils.call_main": stopping.stop_at_signals,
            "fairseq.trainer.Trainer._aggregate_logging_outputs": stopping.agree_on_signals,
        },
        "SIGTERM and SIGUSR1, such as Slurm sends before it ends a job, end a training without a checkpoint.",
        "fairseq saves a checkpoint after these signals",
    ),
    *group(
        "fix",
        "orphans",
        {"fairseq.distributed.utils.call_main": stopping.end_with_launcher},
        "Workers train on after their launcher was killed.",
        "torchrun's workers end with it",
    ),
    *group(
        "fix",
        "everyday-mistakes",
        {
            PARSER: arguments.parsing(finish=arguments.check_command_line),
            "fairseq.dataclass.initialize.add_defaults": arguments.check_configuration,
        },
        "A training whose first checkpoint is missing starts from scratch, and BLEU may count subwords or take the lowest as the best.",
        "fairseq says so",
    ),
    *group(
        "fix",
        "nan-detector",
        {"fairseq.nan_detector.NanDetector.add_hooks": stack.watch_gradients_of_tensors},
        "If gradients of a Transformer for translation are not finite, its training ends in a StopIteration that hides this.",
        "fairseq finds such gradients without torch's hooks of modules",
    ),
    *group(
        "fix",
        "whole-evaluation",
        {
            "fairseq.data.data_utils.batch_by_size": evaluation.announce_sentences,
            PARSER: arguments.parsing(finish=evaluation.batches_of_any_size),
        },
        "fairseq-generate and fairseq-validate leave out the last sentences: of 12, they use 8.",
        "--required-batch-size-multiple keeps the last batch",
    ),
    *group(
        "fix",
        "shards",
        {PARSER: arguments.parsing(finish=evaluation.translate_a_shard)},
        "--num-shards and --shard-id have no effect in fairseq-generate: each of N processes translates everything.",
        "fairseq-generate passes both to its data",
    ),
    *group(
        "fix",
        "announced-validation",
        {"fairseq.trainer.Trainer.get_valid_iterator": evaluation.announce_validation},
        "Validation during training leaves out the last sentences, also for --eval-bleu, and no line says so.",
        "--required-batch-size-multiple keeps the last batch",
    ),
    *group(
        "fix",
        "whole-blocks",
        {
            PARSER: arguments.parsing(finish=evaluation.blocks_of_model),
            ENSEMBLE: evaluation.load_with_blocks_of_model,
            f"{LANGUAGE_MODELING}.eval_lm_dataloader": evaluation.evaluate_every_block,
        },
        "fairseq-eval-lm leaves out blocks that are too long, and with several workers mixes up their contexts.",
        "fairseq-eval-lm refuses blocks that it cannot use",
    ),
    *group(
        "fix",
        "other-dictionaries",
        {
            "fairseq.data.Dictionary.load": dictionaries.keep_file_of_dictionary,
            "fairseq.trainer.Trainer.state_dict": dictionaries.save_dictionaries,
            "fairseq.checkpoint_utils.load_checkpoint_to_cpu": dictionaries.remember_dictionaries,
            f"{MODEL}.load_state_dict": dictionaries.refuse_other_dictionaries,
            "fairseq.trainer.Trainer.load_checkpoint": dictionaries.name_other_dictionary,
            "fairseq.sequence_generator.SequenceGenerator.__init__": dictionaries.refuse_other_language_model,
        },
        "A checkpoint has no dictionary, so data of another one gives other words to a model, and no error.",
        "fairseq saves dictionaries in checkpoints and compares them",
    ),
    *group(
        "fix",
        "raw-text",
        {
            PARSER: arguments.parsing(finish=tokens.check_raw_text),
            "fairseq.hub_utils.GeneratorHubInterface.__init__": tokens.check_raw_text_of_programs,
        },
        "fairseq-interactive and from_pretrained take raw text for tokens, and give other translations.",
        "fairseq keeps with its data how tokens were made",
    ),
    *group(
        "fix",
        "unknown-words",
        {
            "fairseq.tasks.fairseq_task.FairseqTask.inference_step": evaluation.count_unknown_words,
            "fairseq.sequence_scorer.SequenceScorer.generate": evaluation.count_unknown_targets,
            "fairseq.scoring.build_scorer": evaluation.announce_unknown_words_with_score,
            "fairseq.distributed.utils.call_main": evaluation.announce_unknown_words_at_end,
        },
        "Text of another subword model or language has many unknown words, and neither BLEU nor perplexity says so.",
        "fairseq prints the share of unknown words next to a score",
    ),
    # --- optional: changes what a stock training does or reports
    *group(
        "optional",
        "whole-validation",
        {"fairseq.trainer.Trainer.get_valid_iterator": evaluation.validate_every_sentence},
        "Validation during training leaves out the last sentences.",
        "--required-batch-size-multiple keeps the last batch",
    ),
    *group(
        "optional",
        "last-update",
        {"fairseq.trainer.Trainer.train_step": stack.count_every_batch},
        "With several workers and --update-freq above 1, the last gradient of an epoch is divided by too few tokens.",
        "fairseq leaves out only the tokens of batches that fill up an update",
    ),
    *group(
        "optional",
        "onednn-linear",
        {"torch.nn.functional.linear": stack.multiply_by_onednn},
        "On some processors torch computes linear layers in float32 more slowly than oneDNN does.",
        "torch.nn.functional.linear takes oneDNN where it is faster",
    ),
    *group(
        "optional",
        "bf16-evaluation",
        {
            f"{MODEL}.prepare_for_inference_": evaluation.prepare_in_bfloat16,
            ENSEMBLE: evaluation.load_in_bfloat16,
        },
        "fairseq accepts --bf16 in evaluation and computes in float32.",
        "fairseq's evaluating commands convert the model to bfloat16",
    ),
    *search.PATCHES,
    *checkpoints.PATCHES,
)
"""Every repair, in the order in which they are applied."""
