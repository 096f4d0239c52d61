"""Repairs of fairseq for current Python, torch and numpy: all of them here, each with its reason.

Seen with fairseq-fixed 0.12.3.1 (fairseq's main branch) on Python 3.11, torch 2.13, numpy 2.4. :func:`apply`
runs once, when the plugin is imported, so a stock fairseq checkpoint too needs ``--user-dir`` to load.
"""

import argparse
import ast
import collections
import dataclasses
import functools
import operator
import os
import pickle
import re
import sys
import types
import typing
import warnings

import numpy
import omegaconf
import torch
from fairseq import checkpoint_utils, criterions, models, optim, options, sequence_generator, trainer, utils
from fairseq.data import data_utils, language_pair_dataset, token_block_dataset
from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import fully_sharded_data_parallel
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import meters
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.modules import dynamic_crf_layer, multihead_attention
from fairseq.optim import composite
from fairseq.tasks import language_modeling

from fairseq_lowrank.optim import has_overrides, scale_learning_rate, split_groups


@functools.cache
def apply() -> None:
    """Apply every repair, once a process."""
    restore_numpy_names()
    load_checkpoints_safely()
    evaluate_literals_only()
    broadcast_whole_states()
    explain_unfit_checkpoints()
    mend_parsed_arguments()
    show_every_flag_in_help()
    evaluate_in_bfloat16()
    evaluate_every_sentence()
    evaluate_every_block()
    align_unknown_words()
    join_torchrun()
    quieten_hydra()
    honour_parameter_overrides()


# numpy 2 dropped names that fairseq still uses. Can go when fairseq stops using them.
def restore_numpy_names() -> None:
    """Give the old names back to the fairseq modules that use them, and leave numpy itself alone."""

    def percentile(*args, interpolation, **kwargs):
        return numpy.percentile(*args, method=interpolation, **kwargs)

    proxy = types.ModuleType("numpy")
    vars(proxy).update(vars(numpy), int=int, float=float, compat=types.SimpleNamespace(long=int), percentile=percentile)
    for module in (data_utils, language_pair_dataset, token_block_dataset, dynamic_crf_layer):
        module.np = proxy


# Since 2.6 torch.load reads weights only and refuses the classes that fairseq checkpoints hold. The
# usual answer, switching that safety off, lets a checkpoint run any code.
CHECKPOINT_CLASSES = [
    argparse.Namespace,  # the arguments of models without a dataclass
    # numpy arrays in the meters of --eval-bleu, under their name in numpy 2 and in numpy 1
    numpy.ndarray,
    numpy.dtype,
    numpy.dtypes.Int64DType,
    numpy.dtypes.Float64DType,
    numpy._core.multiarray._reconstruct,
    (numpy._core.multiarray._reconstruct, "numpy.core.multiarray._reconstruct"),
    # meters, in old public checkpoints
    meters.AverageMeter,
    meters.TimeMeter,
    meters.StopwatchMeter,
    (meters.AverageMeter, "fairseq.meters.AverageMeter"),
    (meters.TimeMeter, "fairseq.meters.TimeMeter"),
    (meters.StopwatchMeter, "fairseq.meters.StopwatchMeter"),
    # configurations, in checkpoints of 2020 and 2021 and in what workers send one another on resuming
    omegaconf.DictConfig,
    omegaconf.ListConfig,
    omegaconf.base.ContainerMetadata,
    omegaconf.base.Metadata,
    omegaconf.nodes.AnyNode,
    typing.Any,
    collections.defaultdict,
    dict,
    list,
    int,
    distributed_utils._TensorPlaceholder,
]


class Refused(ValueError):
    """What was asked for does not go together, or a checkpoint with it: commands print one line, not a traceback."""


def load_checkpoints_safely() -> None:
    """Let fairseq load its own checkpoints, holding :data:`CHECKPOINT_CLASSES` and nothing else."""
    broadcast = distributed_utils._broadcast_object_slow

    def safely(load):
        @functools.wraps(load)
        def load_safely(path, *args, **kwargs):
            try:
                with torch.serialization.safe_globals(CHECKPOINT_CLASSES):
                    return load(path, *args, **kwargs)
            except (pickle.UnpicklingError, RuntimeError, EOFError, IndexError, TypeError) as error:
                raise Refused(refusal(path, error)) from error

        return load_safely

    @functools.wraps(broadcast)
    def _broadcast_object_slow(*args, **kwargs):
        with torch.serialization.safe_globals(CHECKPOINT_CLASSES):
            return broadcast(*args, **kwargs)

    checkpoint_utils.load_checkpoint_to_cpu = safely(checkpoint_utils.load_checkpoint_to_cpu)
    checkpoint_utils.load_ema_from_checkpoint = safely(checkpoint_utils.load_ema_from_checkpoint)
    distributed_utils._broadcast_object_slow = _broadcast_object_slow


def refusal(path: str, error: Exception) -> str:
    """The message for a checkpoint that did not load. torch's own advises to switch the safety off."""
    if unsafe := re.search(r"GLOBAL (\S+) (was not an allowed|whose module)", str(error)):
        return (
            f"{path} was not loaded: it holds {unsafe[1]}, which has no place in a fairseq checkpoint and could run "
            "code while loading. If you trust the file, convert it where it was written."
        )
    return f"{path} cannot be read as a checkpoint: it is damaged, cut short or another kind of file"


# fairseq gives strings of its configuration, adaptive_softmax_cutoff among them, to Python's eval, and a checkpoint
# brings a configuration along: one of plain strings could run any code.
def evaluate_literals_only() -> None:
    """Let no module of fairseq evaluate more than :func:`literal` does."""
    for name, module in list(sys.modules.items()):
        if name.startswith("fairseq.") and isinstance(module, types.ModuleType):
            module.eval = literal


OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def literal(text: str) -> object:
    """The value of literals and of arithmetic on them, such as ``[(512, 3)] * 4``.

    Raises:
        Refused: anything else.
    """

    def value(node: ast.AST) -> object:
        match node:
            case ast.Constant():
                return node.value
            case ast.Tuple() | ast.List() | ast.Set():
                kind = {ast.Tuple: tuple, ast.List: list, ast.Set: set}[type(node)]
                return kind(value(element) for element in node.elts)
            case ast.Dict() if None not in node.keys:
                return {value(key): value(item) for key, item in zip(node.keys, node.values, strict=True)}
            case ast.UnaryOp() if type(node.op) in OPERATORS:
                return OPERATORS[type(node.op)](value(node.operand))
            case ast.BinOp() if type(node.op) in OPERATORS:
                return OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise Refused(
            f"{text!r} is not evaluated: expected numbers, strings, and lists, tuples or dictionaries of them"
        )

    if not isinstance(text, str):
        raise TypeError(f"expected a string, not {text!r}")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise Refused(f"{text!r} is not a value: {error.msg}") from error
    return value(tree.body)


# fairseq sends what one worker has loaded to the others as plain dictionaries, in which a state of a model no longer
# says what its layers computed.
def broadcast_whole_states() -> None:
    """Let the state of a model reach every worker with its metadata, without which no layer can refuse it."""

    def whole(rebuild):
        @functools.wraps(rebuild)
        def rebuild_whole(obj, tensors):
            rebuilt = rebuild(obj, tensors)
            if isinstance(obj, collections.OrderedDict):
                rebuilt = collections.OrderedDict(rebuilt)
                vars(rebuilt).update(vars(obj))
            return rebuilt

        return rebuild_whole

    distributed_utils._split_tensors_from_obj = whole(distributed_utils._split_tensors_from_obj)
    distributed_utils._put_tensors_in_obj = whole(distributed_utils._put_tensors_in_obj)


# torch lists every parameter that differs, in as many lines, and fairseq's trainer buries them under a second traceback.
def explain_unfit_checkpoints() -> None:
    """Say in one line how a checkpoint differs from the model, and end commands with the line of what is :class:`Refused`."""
    load, show = models.BaseFairseqModel.load_state_dict, sys.excepthook

    @functools.wraps(load)
    def load_state_dict(self, *args, **kwargs):
        try:
            return load(self, *args, **kwargs)
        except RuntimeError as error:
            if difference := differences(str(error)):
                raise Refused(difference) from error
            raise

    def excepthook(kind, error, traceback):
        cause, message = error, ""
        while cause is not None and not isinstance(cause, Refused):
            cause, message = cause.__cause__ or cause.__context__, f"{cause} "
        if cause is None:
            show(kind, error, traceback)
        else:
            print(f"{os.path.basename(sys.argv[0])}: error: {message}{cause}", file=sys.stderr)

    models.BaseFairseqModel.load_state_dict = load_state_dict
    sys.excepthook = excepthook


def differences(message: str) -> str | None:
    """What torch's ``message`` about a state that does not fit a model comes down to, or None if it is about other things."""

    def count(names: list[str]) -> str:
        return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")

    found = []
    for kind, owner in ("Unexpected", "checkpoint"), ("Missing", "model"):
        if listed := re.search(rf"{kind} key\(s\) in state_dict: (.*)", message):
            names = re.findall(r'"([^"]+)"', listed[1])
            found.append(f"only the {owner} has {count(names)}")
    shapes = re.findall(r"size mismatch for (\S+): .*?Size\((.*?)\) from checkpoint.*?Size\((.*?)\)", message)
    if shapes:
        name, theirs, ours = shapes[0]
        more = f", and {len(shapes) - 1} more differ" if len(shapes) > 1 else ""
        found.append(f"{name} is {theirs} in the checkpoint and {ours} in the model{more}")
    # of weights that fit, the layers of attention say what else is different
    if not found and (meanings := re.findall(r"(\S+) was saved with (\S+) and is loaded with (\S+)", message)):
        name, theirs, ours = meanings[0]
        found.append(f"{name} was saved with {theirs} and is built with {ours}")
    if not found:
        return None
    return f"The checkpoint is of another model: {'; '.join(found)}. Give the flags that it was trained with"


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


# fairseq's commands take --bf16 when they generate, score or serve, and then compute in float32. They alone are told a
# path: a model that comes by from_pretrained has the configuration of its training.
def evaluate_in_bfloat16() -> None:
    """Let ``--bf16`` mean bfloat16 in fairseq-generate, -interactive and -eval-lm, as ``--fp16`` means float16."""
    prepare = models.BaseFairseqModel.prepare_for_inference_

    @functools.wraps(prepare)
    def prepare_for_inference_(self, cfg):
        if cfg.common.bf16 and cfg.common_eval.path is not None:
            self.bfloat16()
        prepare(self, cfg)

    models.BaseFairseqModel.prepare_for_inference_ = prepare_for_inference_


# --required-batch-size-multiple, 8 by default, drops the last batch unless its size is a multiple: of a test set of 12
# sentences fairseq-generate translates 8. Training is left as it is, so that it stays comparable with stock fairseq's.
def evaluate_every_sentence() -> None:
    """Let fairseq's commands and its validation during training see every sentence of what they evaluate."""
    parse, get_valid_iterator = options.parse_args_and_arch, trainer.Trainer.get_valid_iterator

    @functools.wraps(parse)
    def parse_args_and_arch(*args, **kwargs):
        parsed = parse(*args, **kwargs)
        arguments = parsed[0] if isinstance(parsed, tuple) else parsed
        if not is_training(arguments):
            arguments.required_batch_size_multiple = 1
        return parsed

    @functools.wraps(get_valid_iterator)
    def get_whole_valid_iterator(self, *args, **kwargs):
        dataset = self.cfg.dataset
        multiple, dataset.required_batch_size_multiple = dataset.required_batch_size_multiple, 1
        try:
            return get_valid_iterator(self, *args, **kwargs)
        finally:
            dataset.required_batch_size_multiple = multiple

    options.parse_args_and_arch = parse_args_and_arch
    trainer.Trainer.get_valid_iterator = get_whole_valid_iterator


# fairseq-eval-lm leaves out the blocks that are too long for the model, with a warning, and reports the perplexity
# of the rest: 1.00 when nothing is left.
def evaluate_every_block() -> None:
    """Let ``fairseq-eval-lm`` refuse blocks longer than the model accepts instead of leaving them out."""
    task = language_modeling.LanguageModelingTask
    load, dataloader = task.load_dataset, task.eval_lm_dataloader

    @functools.wraps(load)
    def load_dataset(self, split, *args, **kwargs):
        if (block := self.args.tokens_per_sample) is not None and block < 1:
            raise Refused(f"blocks of {block} tokens: --tokens-per-sample must be above --context-window, and above 0")
        return load(self, split, *args, **kwargs)

    @functools.wraps(dataloader)
    def eval_lm_dataloader(self, dataset, *args, max_positions=None, context_window=0, **kwargs):
        # the window stands before every block but the first
        window = context_window if len(dataset) > 1 else 0
        longest = max(dataset.sizes, default=0) + window
        if max_positions is not None and longest > max_positions:
            count = sum(size + window > max_positions for size in dataset.sizes)
            raise Refused(
                f"{count} of {len(dataset)} blocks are longer than the {max_positions} tokens the model accepts (the "
                f"longest has {longest}, the context window among them) and would be left out of the perplexity or cut "
                "short. Lower --tokens-per-sample or raise max_target_positions in --model-overrides"
            )
        return dataloader(self, dataset, *args, max_positions=max_positions, context_window=context_window, **kwargs)

    task.load_dataset, task.eval_lm_dataloader = load_dataset, eval_lm_dataloader


# For --replace-unk fairseq asks the hypothesis which source word each target word is aligned with. Only --print-alignment
# makes such an alignment, and as pairs, which are not what is asked for. And without a file of translations the flag is
# parsed as "@@ ", the default of --remove-bpe and the name of no file.
def align_unknown_words() -> None:
    """Let ``--replace-unk`` put the source word with the most attention in place of an unknown one, instead of failing."""
    generate = sequence_generator.SequenceGenerator.generate
    load, replace = utils.load_align_dict, utils.replace_unk

    @functools.wraps(generate)
    def generate_aligned(self, models, sample, **kwargs):
        sentences = generate(self, models, sample, **kwargs)
        sources = sample["net_input"].get("src_tokens")
        if sources is not None and sources.dim() == 2:
            for source, hypotheses in zip(sources.cpu(), sentences, strict=True):
                for hypothesis in hypotheses:
                    if (attention := hypothesis["attention"]) is not None and attention.numel():
                        hypothesis["alignment"] = utils.extract_hard_alignment(
                            attention.cpu().T, source, hypothesis["tokens"].cpu(), self.pad, self.eos
                        )
        return sentences

    @functools.wraps(load)
    def load_align_dict(path):
        return load("" if path == "@@ " else path)

    @functools.wraps(replace)
    def replace_unk(hypo_str, src_str, alignment, align_dict, unk):
        return replace(hypo_str, src_str, {target: source for source, target in alignment}, align_dict, unk)

    sequence_generator.SequenceGenerator.generate = generate_aligned
    utils.load_align_dict = load_align_dict
    utils.replace_unk = replace_unk


# fairseq gives every parameter the same weight decay and learning rate (but for its composite optimizer, which reads the
# settings of one parameter for a whole group), and flattens half-precision copies into one tensor in which none can differ.
def honour_parameter_overrides() -> None:
    """Let every optimizer follow what :mod:`fairseq_lowrank.optim` reads from the parameters."""
    build, build_half, set_lr = (
        optim.build_optimizer,
        optim.FP16Optimizer.build_optimizer,
        optim.FairseqOptimizer.set_lr,
    )

    @functools.wraps(build)
    def build_optimizer(cfg, params, *args, **kwargs):
        params = list(params)
        optimizer = build(cfg, params, *args, **kwargs)
        tensors = [param for param in params if isinstance(param, torch.Tensor)]
        if has_overrides(tensors):
            if isinstance(optimizer, composite.FairseqCompositeOptimizer):
                raise Refused(
                    "--optimizer composite does not go with head mixing or head embeddings, which have a learning rate "
                    "and a weight decay of their own: expected another optimizer"
                )
            split_groups(optimizer.optimizer)
        return optimizer

    @functools.wraps(build_half)
    def build_half_precision_optimizer(cls, cfg, params, **kwargs):
        params = list(params)
        if has_overrides(params):
            with omegaconf.open_dict(cfg):
                cfg.common.fp16_no_flatten_grads = True
        return build_half.__func__(cls, cfg, params, **kwargs)

    def set_scaled_lr(self, lr):
        for group in self.param_groups:
            scale_learning_rate(group, lr)

    optim.build_optimizer = build_optimizer
    optim.FP16Optimizer.build_optimizer = classmethod(build_half_precision_optimizer)
    optim.FairseqOptimizer.set_lr = functools.wraps(set_lr)(set_scaled_lr)


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


# fairseq has no flags that all its criterions share. A criterion is chosen by name, so its place under that name is taken by a
# subclass. Those without a dataclass are left alone: they are obsolete, and one of them (composite_loss) calls others.
def extend_criterions(mixin: type, config: type[FairseqDataclass]) -> None:
    """Give every criterion, also those registered later, a parent class and further flags.

    Args:
        mixin: comes before the criterion's own class.
        config: a dataclass with the flags.
    """
    register = criterions.register_criterion

    def extend(name: str) -> None:
        cls, own = criterions.CRITERION_REGISTRY[name], criterions.CRITERION_DATACLASS_REGISTRY.get(name)
        if own is None or issubclass(cls, mixin):
            return
        joined = dataclasses.make_dataclass(
            own.__name__, (), bases=(own, config), namespace={"__module__": own.__module__}
        )
        extended = type(cls.__name__, (mixin, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})
        del criterions.CRITERION_REGISTRY[name]
        register(name, dataclass=joined)(extended)

    @functools.wraps(register)
    def register_criterion(name, dataclass=None):
        def register_and_extend(cls):
            register(name, dataclass)(cls)
            extend(name)
            return cls

        return register_and_extend

    for name in list(criterions.CRITERION_REGISTRY):
        extend(name)
    criterions.register_criterion = register_criterion


# Under torchrun, fairseq divides by the number of GPUs (by zero, on the CPU), or trains each worker by itself into the
# same folder when --distributed-world-size is 1, its default with fewer than two GPUs.
def join_torchrun() -> None:
    """Let the processes that torchrun starts be the workers of one training, on GPUs or on the CPU."""
    call_main = distributed_utils.call_main

    @functools.wraps(call_main)
    def joined(cfg, main, **kwargs):
        distributed = cfg.distributed_training
        if "TORCHELASTIC_RUN_ID" in os.environ and distributed.distributed_init_method is None:
            distributed.distributed_init_method = "env://"
            distributed.distributed_world_size = int(os.environ["WORLD_SIZE"])
            distributed.distributed_rank = int(os.environ["RANK"])
            distributed.distributed_no_spawn = True
            distributed.device_id = int(os.environ["LOCAL_RANK"])
            if cfg.common.cpu or not torch.cuda.is_available():
                cfg.common.cpu = True
                distributed.device_id = 0
                distributed.distributed_backend = "gloo"
                distributed.ddp_backend = "legacy_ddp"  # pytorch_ddp is given device ids, which the CPU has not
        return call_main(cfg, main, **kwargs)

    distributed_utils.call_main = joined


def quieten_hydra() -> None:
    """Silence hydra's five warnings, at every command, about the files and calls of fairseq's own configuration."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"hydra\.")
    warnings.filterwarnings("ignore", category=UserWarning, message=r"\n?'config' is validated against ConfigStore")
