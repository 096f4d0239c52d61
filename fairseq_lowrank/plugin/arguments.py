"""What fairseq's commands are told: mended, and refused in one line where it cannot work."""

import argparse
import functools

import torch
from fairseq import criterions, options, trainer
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import fully_sharded_data_parallel
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.modules import multihead_attention

from fairseq_lowrank.plugin.loading import Refused, literal


# fairseq's parser takes --bf16 to mean "on a TPU" and then asks for torch_xla, on GPUs and CPUs too. And it accepts
# what cannot work: see unworkable(). And it parses the layers to keep as a list, which its models split like the text
# that it was. All are mended where every command parses its arguments.
def mend_parsed_arguments() -> None:
    """Mend ``--bf16`` without ``--tpu`` and ``--…-layers-to-keep``; refuse training that :func:`unworkable` knows of."""
    parse = options.parse_args_and_arch

    @functools.wraps(parse)
    def parse_args_and_arch(parser, input_args=None, **kwargs):
        parsed = parse(parser, input_args=input_args, **kwargs)
        args = parsed[0] if isinstance(parsed, tuple) else parsed
        if getattr(args, "bf16", False):
            tpu_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
            tpu_parser.add_argument("--tpu", action="store_true")
            args.tpu = tpu_parser.parse_known_args(input_args)[0].tpu
        if reason := refused_overrides(args):
            parser.error(reason)
        for name in ("encoder_layers_to_keep", "decoder_layers_to_keep"):
            if isinstance(layers := getattr(args, name, None), list):
                setattr(args, name, ",".join(map(str, layers)))
        if is_training(args) and (reason := unworkable(args) or refused_arguments(args)):
            parser.error(reason)
        return parsed

    options.parse_args_and_arch = parse_args_and_arch

    # fairseq-hydra-train parses nothing: it comes here with a configuration of several sections
    init = trainer.Trainer.__init__

    @functools.wraps(init)
    def __init__(self, cfg, task, model, criterion, *args, **kwargs):
        if isinstance(cfg, argparse.Namespace):
            cfg = convert_namespace_to_omegaconf(cfg)
        flat = argparse.Namespace()
        for section in (cfg.common, cfg.distributed_training, cfg.model):
            vars(flat).update(vars(section) if isinstance(section, argparse.Namespace) else section)
        if reason := unworkable(flat):
            raise Refused(reason)
        if hasattr(criterion, "check_model"):
            try:
                criterion.check_model(model)
            except ValueError as error:
                raise Refused(str(error)) from error
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


def refused_overrides(args: argparse.Namespace) -> str | None:
    """Why ``--model-overrides``, in the commands that have it, is not what fairseq takes it for, or None."""
    text = getattr(args, "model_overrides", "{}")
    try:
        if isinstance(literal(text), dict):
            return None
    except Refused:
        pass
    return f"--model-overrides {text[:200]!r}: expected a dictionary, such as {{'dropout': 0.1}}"


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


# fairseq parses twice, the second time with the flags of the chosen model, task, criterion and optimizer, and would
# print --help the first time, without them.
def show_every_flag_in_help() -> None:
    """Let ``--help`` wait for the flags of what ``--arch``, ``--task``, ``--optimizer`` … choose."""
    parse = options.parse_args_and_arch

    @functools.wraps(parse)
    def parse_args_and_arch(parser, input_args=None, *args, modify_parser=None, **kwargs):
        print_help, leave, first = parser.print_help, parser.exit, True

        # fairseq calls this before the first parsing and before the second
        def modify(parser):
            nonlocal first
            parser.print_help = (lambda: None) if first else print_help
            parser.exit = (lambda status=0, message=None: status and leave(status, message)) if first else leave
            first = False
            if modify_parser is not None:
                modify_parser(parser)

        return parse(parser, input_args, *args, modify_parser=modify, **kwargs)

    options.parse_args_and_arch = parse_args_and_arch
