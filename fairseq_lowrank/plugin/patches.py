"""The table of patches for attention: every function of fairseq that our flags, layers and states need, with its reason."""

from __future__ import annotations

from fairseq_lowrank.plugin import attention, command_line, criterions, flags, optimizers, states, training
from fairseq_lowrank.repairs import arguments
from fairseq_lowrank.repairs.patch import Patch, group
from fairseq_lowrank.repairs.patches import MODEL, PARSER
from fairseq_lowrank.repairs.patches import PATCHES as REPAIRS

METADATA = "fairseq keeps the metadata of a state dict from the file to the model"
OUR_FLAGS = "fairseq lets a plugin add flags to every model and criterion"
OVERRIDES = "fairseq's optimizers read optim_overrides of every parameter"
LAYER = "fairseq.modules.transformer_layer.Transformer{}LayerBase.build_{}_attention"


PATCHES: tuple[Patch, ...] = (
    *group(
        "attention",
        "attention-flags",
        {
            "fairseq.options.add_model_args": flags.offer_flags,
            "fairseq.models.register_model": flags.register_with_flags,
        },
        "Each class of a model declares its flags, and every model needs ours.",
        OUR_FLAGS,
    ),
    *group(
        "attention",
        "attention-flags",
        {
            PARSER: arguments.parsing(prepare=command_line.complete_help),
            "fairseq.utils.import_user_module": command_line.read_new_methods,
        },
        "--help leaves out the flags of the chosen architecture, task and criterion.",
        "fairseq prints --help after its second parsing",
    ),
    *group(
        "attention",
        "attention-flags",
        {PARSER: arguments.parsing(finish=command_line.check_our_flags)},
        "Attention flags that do not work are refused before folders are made and data is read.",
        OUR_FLAGS,
    ),
    *group(
        "attention",
        "attention-flags",
        {"fairseq.checkpoint_utils.overwrite_args_by_name": flags.override_flags},
        "fairseq ignores --model-overrides of flags that the checkpoint was saved without.",
        OUR_FLAGS,
    ),
    *group(
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
    *group(
        "attention",
        "language-model-embedding",
        {"fairseq.models.transformer_lm.TransformerLanguageModel.build_model": attention.prepare_language_model},
        "--embed-rank and --embed-kernel change the embedding, and fairseq drops fields that it does not know.",
        "fairseq's language models pass on every field of their configuration",
    ),
    *group(
        "attention",
        "attention-weights",
        {f"{MODEL}.prepare_for_inference_": attention.compute_weights_where_read},
        "Our layers compute attention weights only if something reads them.",
        "fairseq tells its decoders whether weights are read",
    ),
    *group(
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
    *group(
        "attention",
        "gradients-of-parts",
        {
            "fairseq.distributed.LegacyDistributedDataParallel.all_reduce_grads": optimizers.reduce_each_dtype,
        },
        "With --ddp-backend legacy_ddp, workers add up the gradients of parts in float32 in the precision of the first parameter.",
        "fairseq adds up gradients in their own dtype",
    ),
    *group(
        "attention",
        "train-only",
        {"fairseq.trainer.Trainer.__init__": training.train_chosen_parameters},
        "--train-only freezes parameters before the optimizer collects them.",
        "fairseq has a flag for the parameters that train",
    ),
    *group(
        "attention",
        "regularisers",
        {
            "fairseq.criterions.register_criterion": criterions.register_with_regularisers,
            "fairseq.trainer.Trainer.__init__": criterions.check_criterion,
        },
        "The regularisers of attention are flags of every criterion.",
        OUR_FLAGS,
    ),
    *group(
        "attention",
        "state-metadata",
        {
            "fairseq.distributed.utils._split_tensors_from_obj": states.rebuild_with_metadata,
            "fairseq.distributed.utils._put_tensors_in_obj": states.rebuild_with_metadata,
            "fairseq.checkpoint_utils.prune_state_dict": states.prune_with_metadata,
            "fairseq.checkpoint_utils.load_ema_from_checkpoint": states.load_average_with_metadata,
            "fairseq.checkpoint_utils.load_pretrained_component_from_model": states.load_component_with_metadata,
            "fairseq.models.multilingual_transformer.MultilingualTransformerModel.load_state_dict": (
                states.load_languages_with_metadata
            ),
        },
        "The metadata of a state dict contains the settings of its attention, and these functions drop it.",
        METADATA,
    ),
    *group(
        "attention",
        "other-attention",
        {"fairseq.modules.MultiheadAttention._load_from_state_dict": states.refuse_states_of_other_attention},
        "Weights of another attention method can have the same shapes as fairseq's and mean something else.",
        "fairseq checks what a layer's state was saved by",
    ),
    *group(
        "attention",
        "unfit-checkpoints",
        {
            f"{MODEL}.load_state_dict": states.explain_unfit_checkpoints,
            "fairseq.trainer.Trainer.load_checkpoint": states.explain_what_cannot_resume,
            "fairseq.optim.FairseqOptimizer.load_state_dict": states.check_parameter_groups,
        },
        "If a checkpoint does not fit, the message names the flags that it was trained with.",
        "fairseq names the options that differ",
    ),
    *group(
        "attention",
        "question-heads",
        {"fairseq.models.roberta.RobertaModel.upgrade_state_dict_named": states.drop_heads_for_questions},
        "fairseq leaves out heads that a fine-tuning task does not have, and does not know our head for questions.",
        "our head for questions is one of fairseq's classification heads",
    ),
)
"""The patches for attention, in the order in which they are applied, after those of :mod:`fairseq_lowrank.repairs`."""

ALL = (*REPAIRS, *PATCHES)
"""Both tables."""
