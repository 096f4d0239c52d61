"""What fairseq's commands are told: mended, and refused in one line where it cannot work."""

import argparse
import functools
import sys
from collections.abc import Callable

import torch
from fairseq import criterions, options, trainer
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import fully_sharded_data_parallel
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.modules import multihead_attention

from fairseq_lowrank.messages import UserError, explanation, show_traceback
from fairseq_lowrank.plugin.literals import literal


# The one place where every command parses its arguments, training and the rest alike.
def extend_parser(*amendments: Callable[[argparse.Namespace, Callable[[str], bool]], None]) -> None:
    """Mend what fairseq's parser makes of the command line, refuse what cannot work in one line, and complete ``--help``.

    Args:
        amendments: functions of the parsed arguments, which they may change, and of a function that says whether a flag
            stands on the command line.
    """
    parse = options.parse_args_and_arch

    @functools.wraps(parse)
    def parse_args_and_arch(parser, input_args=None, *args, modify_parser=None, **kwargs):
        words = sys.argv[1:] if input_args is None else input_args

        def given(flag: str) -> bool:
            return any(word.partition("=")[0] == flag for word in words)

        modify = every_flag_in_help(parser, modify_parser, asked=given("--help") or given("-h"))
        try:
            parsed = parse(parser, input_args, *args, modify_parser=modify, **kwargs)
            namespace = parsed[0] if isinstance(parsed, tuple) else parsed
            for amend in amendments:
                amend(namespace, given)
            if is_training(namespace) and (reason := unworkable(namespace) or refused_arguments(namespace)):
                raise UserError(reason)
        except Exception as error:
            show_traceback()
            parser.error(unparsed(parser, error))
        return parsed

    options.parse_args_and_arch = parse_args_and_arch


# fairseq parses twice, the second time with the flags of the chosen model, task, criterion and optimizer, and would
# print --help the first time, without them.
def every_flag_in_help(parser: argparse.ArgumentParser, modify_parser: Callable | None, asked: bool) -> Callable:
    """What fairseq calls before each parsing: ``--help`` waits for the flags of what ``--arch``, ``--task`` … choose.

    Where help is asked for and no architecture is chosen, the attention flags are shown.
    """
    print_help, leave, first = parser.print_help, parser.exit, True

    def modify(parser: argparse.ArgumentParser) -> None:
        nonlocal first
        parser.print_help = (lambda: None) if first else print_help
        parser.exit = (lambda status=0, message=None: status and leave(status, message)) if first else leave
        if first and asked and any(action.dest == "arch" and action.default is None for action in parser._actions):
            parser.set_defaults(arch="lowrank_transformer")
        first = False
        if modify_parser is not None:
            modify_parser(parser)

    return modify


def unparsed(parser: argparse.ArgumentParser, error: Exception) -> str:
    """What was wrong with a command line, where fairseq has no words for it."""
    if type(error) is RuntimeError and not error.args:
        return "--arch is missing: expected an architecture, such as lowrank_transformer_iwslt_de_en"
    if isinstance(error, KeyError) and error.args == (None,):
        return "--task is missing: expected the task of the training, such as translation or language_modeling"
    return explanation(error)


# fairseq's parser takes --bf16 to mean "on a TPU" and then asks for torch_xla, on GPUs and CPUs too.
def bf16_without_tpu(args: argparse.Namespace, given: Callable[[str], bool]) -> None:
    """An amendment: ``--bf16`` means a TPU only beside ``--tpu``."""
    if getattr(args, "bf16", False):
        args.tpu = given("--tpu")


# fairseq parses the layers to keep as a list, which its models split like the text that it was.
def layers_to_keep_as_text(args: argparse.Namespace, given: Callable[[str], bool]) -> None:
    """An amendment: ``--…-layers-to-keep`` stays the text that it was."""
    for name in ("encoder_layers_to_keep", "decoder_layers_to_keep"):
        if isinstance(layers := getattr(args, name, None), list):
            setattr(args, name, ",".join(map(str, layers)))


# fairseq evaluates this text.
def literal_overrides(args: argparse.Namespace, given: Callable[[str], bool]) -> None:
    """An amendment: ``--model-overrides``, in the commands that have it, is a dictionary.

    Raises:
        UserError: it is something else.
    """
    text = getattr(args, "model_overrides", "{}")
    try:
        if isinstance(literal(text), dict):
            return
    except UserError:
        pass
    raise UserError(f"--model-overrides {text[:200]!r}: expected a dictionary, such as {{'dropout': 0.1}}")


# fairseq-hydra-train parses nothing: it comes to the trainer with a configuration of several sections.
def refuse_unworkable_training() -> None:
    """Let the trainer refuse what :func:`unworkable` knows of, and a model that the criterion has nothing to do with."""
    init = trainer.Trainer.__init__

    @functools.wraps(init)
    def __init__(self, cfg, task, model, criterion, *args, **kwargs):
        if isinstance(cfg, argparse.Namespace):
            cfg = convert_namespace_to_omegaconf(cfg)
        flat = argparse.Namespace()
        for section in (cfg.common, cfg.distributed_training, cfg.model):
            vars(flat).update(vars(section) if isinstance(section, argparse.Namespace) else section)
        if reason := unworkable(flat):
            raise UserError(reason)
        if hasattr(criterion, "check_model"):
            try:
                criterion.check_model(model)
            except ValueError as error:
                raise UserError(str(error)) from error
        init(self, cfg, task, model, criterion, *args, **kwargs)

    trainer.Trainer.__init__ = __init__


def is_training(args: argparse.Namespace) -> bool:
    """Whether these are the arguments of fairseq-train, which alone has ``--max-update``."""
    return hasattr(args, "max_update")


def unworkable(args: argparse.Namespace) -> str | None:
    """Why training with these arguments would fail obscurely, or not do what they say, on this machine; or None."""
    if args.cpu or not torch.cuda.is_available():
        if args.amp:
            return "--amp needs a GPU: on the CPU fairseq would train in float32 and not say so. --bf16 works on both"
        if args.fp16 and not (args.fp16_no_flatten_grads or args.memory_efficient_fp16):
            return "--fp16 on the CPU needs --fp16-no-flatten-grads or --memory-efficient-fp16. --bf16 needs neither"
    if args.ddp_backend == "fully_sharded" and not fully_sharded_data_parallel.has_FSDP:
        return "--ddp-backend fully_sharded needs the package fairscale; pytorch_ddp and legacy_ddp need nothing"
    for side in ("encoder", "decoder"):
        config = getattr(args, f"{side}_xformers_att_config", None)
        if config and not multihead_attention._xformers_available:
            return f"--{side}-xformers-att-config {config!r} needs the package xformers"
    return None


# A model or criterion can refuse its flags only once it is built, with a traceback; users expect argparse's one line.
def refused_arguments(args: argparse.Namespace) -> str | None:
    """Why the model or the criterion that is asked for refuses its flags (its ``check_args``), or None."""
    arch, criterion = getattr(args, "arch", None), getattr(args, "criterion", None)
    config = MODEL_DATACLASS_REGISTRY.get(ARCH_MODEL_NAME_REGISTRY.get(arch))
    checks = (
        (ARCH_MODEL_REGISTRY.get(arch), args if config is None else config.from_namespace(args)),
        (criterions.CRITERION_REGISTRY.get(criterion), args),
    )
    for part, arguments in checks:
        try:
            if hasattr(part, "check_args"):
                part.check_args(arguments)
        except ValueError as error:
            return str(error)
    return None
