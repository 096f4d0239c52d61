"""Which of the papers' bottlenecks an architecture has on given data, what to change, and what the change costs."""

from __future__ import annotations

import math
from argparse import Namespace
from copy import copy
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import numpy
from fairseq.data import Dictionary, data_utils
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from fairseq.modules import AdaptiveInput
from torch import nn

from fairseq_lowrank.analysis.architecture import attention_layers, build, model_name, stacks
from fairseq_lowrank.analysis.parameters import count
from fairseq_lowrank.analysis.report import load_papers
from fairseq_lowrank.attention import AttentionSpec
from fairseq_lowrank.models.options import SITES, AttentionOptions

BOTTLENECK, PARTLY, FINE, NOTE = "bottleneck", "partly", "fine", "note"
FIXEDHEAD = "Bhojanapalli et al. 2020, Theorem 1"
MIXHEAD = "Mixhead paper"
WIES = "Wies et al. 2021"


@dataclass
class Finding:
    """One piece of advice: what was compared, the verdict in plain words, its source, and changes with their cost.

    `changes` are pairs of flags and the parameters that they add (negative: save; None: not counted).
    """

    topic: str
    verdict: str
    text: str
    source: str
    numbers: dict
    changes: list[tuple[str, int | None]] = field(default_factory=list)

    def as_dict(self) -> dict:
        changes = [{"change": change, "parameters": parameters} for change, parameters in self.changes]
        return asdict(self) | {"changes": changes}


def read_lengths(folder: Path, subset: str) -> dict[str, numpy.ndarray]:
    """Lengths in tokens (end of sentence included) of binarised data: `source` and `target`, or `text`.

    Raises:
        ValueError: no such data.
    """
    source, target = _language_pair(folder)
    pair = [f"{subset}.{source}-{target}.{language}" for language in (source, target)]
    names = dict(zip(("source", "target"), pair, strict=True)) if source else {"text": subset}
    found = {}
    for name, prefix in names.items():
        try:
            data = data_utils.load_indexed_dataset(str(folder / prefix), None)
        except (AssertionError, ValueError) as error:
            raise ValueError(
                f"{folder / prefix}.idx cannot be read as fairseq's: it is damaged or cut short"
            ) from error
        if data is None:
            raise ValueError(f"{folder} holds no {prefix}.idx: --data takes a folder of fairseq-preprocess")
        found[name] = numpy.array(data.sizes)  # a copy: the file's memory goes with the data set
    return found


def read_vocab_size(folder: Path) -> int:
    """Size of the dictionary (the source's where there are two), fairseq's special symbols included."""
    source, _ = _language_pair(folder)
    file = folder / (f"dict.{source}.txt" if source else "dict.txt")
    if not file.is_file():
        raise ValueError(f"--data {folder} holds no {file.name}: give --vocab-size")
    return len(Dictionary.load(str(file)))


def _language_pair(folder: Path) -> tuple[str | None, str | None]:
    if not folder.is_dir():
        raise ValueError(f"--data {folder}: no such folder")
    return data_utils.infer_language_pair(str(folder)) or (None, None)


def describe_lengths(lengths: numpy.ndarray) -> dict[str, float]:
    return {
        "sequences": len(lengths),
        "mean": round(float(lengths.mean()), 1),
        "median": float(numpy.median(lengths)),
        "p95": float(numpy.percentile(lengths, 95)),
        "longest": int(lengths.max()),
    }


def lengths_by_site(lengths: dict[str, numpy.ndarray]) -> dict[str, numpy.ndarray]:
    """What bounds the rank of each site's matrices beside the head size: the smaller of its two sides."""
    if "text" in lengths:
        return dict.fromkeys(SITES, lengths["text"])
    source, target = lengths["source"], lengths["target"]
    return {"encoder": source, "decoder": target, "cross": numpy.minimum(source, target)}


class Variants:
    """Counts parameters of an architecture with some arguments changed, as one of our models."""

    def __init__(self, args: Namespace, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.args = copy(args)
        ours = f"lowrank_{model_name(args)}"
        if ours in MODEL_REGISTRY:
            self.args.arch = ours
            for one in fields(MODEL_DATACLASS_REGISTRY[ours]) if ours in MODEL_DATACLASS_REGISTRY else ():
                if not hasattr(self.args, one.name):
                    setattr(self.args, one.name, one.default)
        self.possible = model_name(self.args).startswith("lowrank_")
        self.total = count(build(self.args, vocab_size))["total"]

    def cost(self, *, vocab_size: int | None = None, **changes: object) -> int | None:
        """Parameters that the changes add; None where the model refuses them."""
        if changes and not self.possible:
            return None
        args = copy(self.args)
        for name, value in changes.items():
            setattr(args, name, value)
        try:
            return count(build(args, vocab_size or self.vocab_size))["total"] - self.total
        except ValueError:
            return None

    def attention_remedies(
        self, site: str, sites: dict[str, nn.Module], wanted: dict[str, int]
    ) -> list[tuple[str, int]]:
        """Flags that lift the rank at a site, with their cost: mixed heads, larger heads, or what other sites have.

        A model has one composition, and plain mha at the sites that are not chosen. So a remedy is for all sites of the
        same composition that want one; where that would leave a third kind of attention, for all of that composition.

        Args:
            sites: an attention layer for each of the model's sites.
            wanted: the head size wanted at each site that wants a remedy.
        """
        if not self.possible:
            return []
        options = AttentionOptions.from_args(self.args)
        now = {each: options.spec_at(each) for each in sites}
        same = [each for each in sites if now[each] == now[site]]
        needy = [each for each in same if each in wanted]
        goals = [replace(now[site], head_dim=max(wanted[each] for each in needy))]
        if now[site].mixing == "none" and now[site].projection != "single":
            goals = [replace(now[site], mixing=mixing) for mixing in ("static", "positionwise")] + goals
        mixes = options.spec.mixing != "none" and options.spec.projection != "single"
        if options.spec not in (now[site], *goals) and (mixes or (options.spec.head_dim or 0) > sites[site].head_dim):
            goals.append(options.spec)
        found = []
        for goal in goals:
            for changed in (needy, same):
                if changed is same and goal.head_dim != now[site].head_dim and goal != options.spec:
                    # sites that want no larger heads keep theirs no smaller
                    goal = replace(goal, head_dim=max(goal.head_dim, *(sites[each].head_dim for each in same)))
                after = {each: goal if each in changed else now[each] for each in sites}
                if {goal, AttentionSpec()} >= set(after.values()):
                    break
            else:
                continue
            changes = self._flags(options, goal, [each for each in after if after[each] == goal], list(sites))
            if (cost := self.cost(**changes)) is not None:
                words = (f"--{name.replace('_', '-')} {value}" for name, value in changes.items())
                found.append((" ".join(words), cost))
        return found

    def _flags(self, options: AttentionOptions, goal: AttentionSpec, chosen: list[str], present: list[str]) -> dict:
        """The flags that, beside those given, put a composition at the chosen sites."""
        preset = getattr(self.args, "attention", None) or "mha"
        changes = {}
        if goal.mixing != options.spec.mixing:
            if preset == "mha" and getattr(self.args, "head_mixing", None) is None:
                changes["attention"] = {"static": "mixhead-a", "positionwise": "mixhead-b"}[goal.mixing]
            else:
                changes["head_mixing"] = goal.mixing
        if goal.head_dim != options.spec.head_dim:
            if preset == "mha":
                changes["attention"] = "fixedhead"
            changes["head_dim"] = goal.head_dim
        if set(chosen) != {site for site in present if site in options.sites}:
            changes["attention_sites"] = ",".join(chosen)
        return changes


def advise(args: Namespace, vocab_size: int, lengths: dict[str, numpy.ndarray]) -> list[Finding]:
    """All findings for an architecture's arguments, its vocabulary and the lengths of its data.

    Args:
        lengths: see :func:`read_lengths`; what is absent is not judged.
    """
    model = build(args, vocab_size)
    variants = Variants(args, vocab_size)
    sites = {}
    for layer in attention_layers(model):
        sites.setdefault(layer.site, layer.module)
    findings = head_sizes(sites, lengths_by_site(lengths) if lengths else {}, variants)
    for stack, layers, width, heads in stacks(args):
        if (rank := embedding_rank(model, stack, width)) is not None:
            findings.append(embedding(stack, layers, width, heads, rank, vocab_size, variants))
            findings.append(depth(stack, layers, width, heads, rank, model))
    findings += [attention_width(site, module, variants) for site, module in sites.items()]
    findings += [degenerate for site, module in sites.items() if (degenerate := pointless(site, module))]
    if (saving := cheaper(sites, variants)) is not None:
        findings.append(saving)
    return findings


def head_sizes(sites: dict[str, nn.Module], lengths: dict[str, numpy.ndarray], variants: Variants) -> list[Finding]:
    """Head size against sequence length at every site whose lengths are known."""
    short = {
        site: lengths[site] for site in sites if site in lengths and share_beyond(sites[site], lengths[site]) > 0.05
    }
    wanted = {site: math.ceil(describe_lengths(found)["p95"]) for site, found in short.items()}
    return [
        head_size(
            site,
            sites[site],
            lengths[site],
            variants.attention_remedies(site, sites, wanted) + _wider_heads(site, sites[site], wanted[site], variants)
            if site in short
            else [],
            pairs="cross" in sites,
        )
        for site in sites
        if site in lengths
    ]


def share_beyond(module: nn.Module, lengths: numpy.ndarray) -> float:
    """The share of sequences for which heads of this size can't produce every attention matrix."""
    return float((lengths > module.head_dim + 1).mean())


def head_size(
    site: str, module: nn.Module, lengths: numpy.ndarray, changes: list[tuple[str, int | None]], *, pairs: bool
) -> Finding:
    """Head size against sequence length at one site."""
    head_dim, heads, stats = module.head_dim, module.num_heads, describe_lengths(lengths)
    beyond = share_beyond(module, lengths)
    numbers = {"site": site, "head_dim": head_dim, "heads": heads, "lengths": stats, "share_beyond": beyond}
    length = (
        f"sequence length n is {stats['mean']:g} on average, {stats['median']:g} in the middle, {stats['p95']:g} at the "
        f"95th percentile; {100 * beyond:.0f} % of the sequences are longer than d_k + 1."
        if lengths.min() < lengths.max()
        else f"sequence length n = {lengths[0]}."
    )
    about = f"{site} attention: head size d_k = {head_dim}; {length}"
    evidence, tables = _mixing_evidence("pairs" if pairs else "text", short=beyond <= 0.05)
    if beyond <= 0.05:
        text = f"{about} A head of this size can produce any attention matrix of such a length. {evidence}"
        return Finding("head size", FINE, text, f"{FIXEDHEAD}; {tables}", numbers)
    spec = spec_of(module)
    text = f"{about} Above d_k + 1 there are attention matrices that no head of this size can produce. "
    if spec.projection == "single":
        text += "All heads share one matrix here, so mixing them lifts nothing."
    elif spec.mixing != "none":
        text += f"Its {heads} heads are mixed, which lifts the rank of what they produce."
    else:
        text += evidence
    verdict = BOTTLENECK if stats["median"] > head_dim + 1 else PARTLY
    return Finding(
        "head size", verdict, text, f"{FIXEDHEAD} (d_k = n − 1 already suffices); {tables}", numbers, changes
    )


def spec_of(module: nn.Module) -> AttentionSpec:
    """What an attention layer computes; fairseq's own is plain."""
    return getattr(module, "spec", None) or AttentionSpec()


def _wider_heads(site: str, module: nn.Module, wanted: int, variants: Variants) -> list[tuple[str, int | None]]:
    """Fewer heads of at least the wanted size, or the next to it, in the same width."""
    fewer = _fewer_heads(module.embed_dim, wanted)
    larger = module.embed_dim // fewer
    if fewer >= module.num_heads or larger <= module.head_dim:
        return []
    stack = "encoder" if site == "encoder" else "decoder"
    # a head size that was given does not grow by itself
    given = spec_of(module).head_dim is not None
    size, flag = ({"head_dim": larger}, f" --head-dim {larger}") if given else ({}, "")
    cost = variants.cost(**{f"{stack}_attention_heads": fewer}, **size)
    return [] if cost is None else [(f"--{stack}-attention-heads {fewer}{flag} (fewer heads, of size {larger})", cost)]


def _mixing_evidence(task: str, *, short: bool) -> tuple[str, str]:
    """What the Mixhead paper measured nearest to this case, and where: for `text` (language models) or `pairs`."""
    tables = load_papers()["mixhead"]["tables"]
    metric, name = ("perplexity", "table3" if short else "table1") if task == "text" else ("bleu", "table4")
    score = {row["row"]: row["values"][metric]["test"] for row in tables[name]["rows"]}
    if task == "text":
        row, case = ("transformer-xl", "d_k = 128 and n = 32") if short else ("baevski", "d_k = 128 and n = 512")
        base, a, b = (score[f"{row}-{kind}"] for kind in ("mha", "mixhead-a", "mixhead-b"))
        text = f"Mixing heads took a language model with {case} from perplexity {base} to {a} (A) and {b} (B)."
    elif short:
        a, b = (score["h4-mha"] - score[f"h4-mixhead-{kind}"] for kind in "ab")
        text = f"Mixing heads does not help here: with d_k = 128 and n ≈ 24 it cost {a:.2f} (A) and {b:.2f} (B) BLEU."
    else:
        a, b = (score[f"h64-mixhead-{kind}"] - score["h64-mha"] for kind in "ab")
        text = (
            f"Mixing heads is the cheap way out: with d_k = 8 and n ≈ 24 it gained {a:.2f} (A) and {b:.2f} (B) BLEU; "
            "with d_k = 16, not far below n, it gained nothing."
        )
    return text, f"{MIXHEAD}, {name.replace('table', 'table ')}"


def _fewer_heads(width: int, head_dim: int) -> int:
    """The most heads that divide the width into heads of at least this size; 1 if there is no such number."""
    return max((heads for heads in range(1, width // head_dim + 1) if width % heads == 0), default=1)


def embedding_rank(model: nn.Module, stack: str, width: int) -> int | None:
    """The greatest rank that a stack's input embedding can have, None without word embeddings."""
    part = getattr(model, stack, None)
    embed = (
        next((module for name, module in part.named_modules() if name.endswith("embed_tokens")), None) if part else None
    )
    if isinstance(embed, AdaptiveInput):
        bands = [
            next(module for module in band.modules() if isinstance(module, nn.Embedding)) for band in embed.embeddings
        ]
        return min(width, sum(min(band.weight.shape) for band in bands))
    return min(width, *embed.weight.shape) if isinstance(embed, nn.Embedding) else None


def embedding(
    stack: str, layers: int, width: int, heads: int, rank: int, vocab_size: int, variants: Variants
) -> Finding:
    """min(embedding rank, vocabulary) against width."""
    found = load_papers()["vocabulary_bottleneck"]["findings"]
    numbers = {"stack": stack, "width": width, "embedding_rank": rank, "vocab_size": vocab_size}
    about = f"{stack}: width d = {width}; the input embedding has rank {rank} at most (vocabulary {vocab_size:,})."
    source = f"{WIES}, theorems 1 and 2, §5.1 and §5.2"
    if rank >= width:
        return Finding(
            "embedding rank", FINE, f"{about} The vocabulary does not cap what the width contributes.", source, numbers
        )
    crossing, redundancy = found["depth_beats_width_r500"], found["rank_redundancy"]
    low, full = redundancy["rank_over_width"]
    text = (
        f"{about} Beyond the rank, width adds little and depth much: deepen rather than widen. In the paper's run with "
        f"rank {crossing['rank']} the deeper network won from width {crossing['width_at_crossing']} on, and a rank of "
        f"{low} at width {full} made about {redundancy['redundant_percent']} % of the parameters redundant."
    )
    changes = []
    narrower = rank // heads * heads
    deeper = round(layers * (width / narrower) ** 2) if narrower else 0
    if layers < deeper <= 4 * layers:
        deepen = f"width {narrower} and about {deeper} layers, the feed-forward in proportion"
        changes.append((f"{deepen}, for as many parameters in the layers", None))
    if vocab_size <= rank:
        more = f"a vocabulary of at least {width:,} (sub-words in place of characters)"
        changes.append((more, variants.cost(vocab_size=width)))
    elif getattr(variants.args, "embed_rank", None):
        changes.append(("no --embed-rank", variants.cost(embed_rank=None, decoder_input_dim=width)))
    elif stack == "decoder":
        changes.append((f"--decoder-input-dim {width}", variants.cost(decoder_input_dim=width)))
    return Finding("embedding rank", BOTTLENECK, text, source, numbers, changes)


def depth(stack: str, layers: int, width: int, heads: int, rank: int, model: nn.Module) -> Finding:
    """The regime in which the vocabulary-bottleneck theorems are tight: L > log₃ d and H < r."""
    threshold = math.log(width, 3)
    per_layer = sum(parameter.numel() for parameter in _layers(model, stack)[0].parameters())
    numbers = {
        "stack": stack,
        "layers": layers,
        "log3_width": round(threshold, 2),
        "heads": heads,
        "embedding_rank": rank,
    }
    about = f"{stack}: L = {layers} layers, log₃ d = {threshold:.1f}, H = {heads} heads, embedding rank r = {rank}."
    if layers > threshold and heads < rank:
        text = f"{about} L > log₃ d and H < r: depth and width both count, up to the rank."
        return Finding("depth", FINE, text, f"{WIES}, theorem 2", numbers)
    reasons = []
    if layers <= threshold:
        reasons.append("with L ≤ log₃ d another layer helps more than more width")
    if heads >= rank:
        reasons.append("with H ≥ r the theorem's lower bound is empty: fewer heads, or a higher rank")
    changes = [("one more layer", per_layer)] if layers <= threshold else []
    text = f"{about} {'; '.join(reasons)[0].upper()}{'; '.join(reasons)[1:]}."
    return Finding("depth", NOTE, text, f"{WIES}, theorem 2 and §4, after Levine et al. 2020", numbers, changes)


def _layers(model: nn.Module, stack: str) -> nn.ModuleList:
    part = getattr(model, stack)
    return next(module for name, module in part.named_modules() if name.endswith("layers"))


def attention_width(site: str, module: nn.Module, variants: Variants) -> Finding:
    """H·d_a against width."""
    heads, head_dim, width = module.num_heads, module.head_dim, module.embed_dim
    ratio = heads * head_dim / width
    found = load_papers()["vocabulary_bottleneck"]["findings"]
    numbers = {"site": site, "heads": heads, "head_dim": head_dim, "width": width, "ratio": round(ratio, 3)}
    about = f"{site} attention: internal width H·d_a = {heads}·{head_dim} = {heads * head_dim}, {ratio:g} times d = {width}."
    source = f"{WIES}, §4.2.3 and §5.3, figure 4"
    if ratio <= 1:
        return Finding("attention width", FINE, f"{about} Not above the width.", source, numbers)
    measured = ", ".join(
        f"about {found[f'attention_width_{times}']['redundant_percent']} % at {times}" for times in (4, 16)
    )
    text = (
        f"{about} Parameters put inside attention beyond the width are worth less than width: the paper found them "
        f"redundant by {measured}. A head size above d/H may still pay where n is above it (see head size)."
    )
    changes = [(f"width {heads * head_dim} with the same heads (T5.1.1 did so)", None)]
    if width % heads == 0:
        changes.append((f"--head-dim {width // heads}", variants.cost(head_dim=width // heads)))
    return Finding("attention width", BOTTLENECK, text, source, numbers, changes)


def pointless(site: str, module: nn.Module) -> Finding | None:
    """Compositions that are allowed but do less than they seem to."""
    spec = getattr(module, "spec", None)
    if spec is None or spec.mixing == "none":
        return None
    numbers = {"site": site, "projection": spec.projection, "mixing": spec.mixing}
    if spec.projection == "single":
        text = f"{site} attention: the heads of `single` projections are identical, so mixing them is only a gate for each head."
        return Finding("composition", NOTE, text, "the formulas: Σ_j M[j,i] P = (Σ_j M[j,i]) P", numbers)
    if spec.mixing == "average":
        text = f"{site} attention: averaged heads share one attention matrix, so h heads are one with more parameters."
        return Finding("composition", NOTE, text, f"{MIXHEAD}, §4.4.2, table 7", numbers)
    return None


def cheaper(sites: dict[str, nn.Module], variants: Variants) -> Finding | None:
    """What head embeddings would save."""
    if any(
        getattr(getattr(module, "spec", None), "projection", "independent") != "independent"
        for module in sites.values()
    ):
        return None
    saved = variants.cost(attention="mhe-mul")
    if saved is None or saved >= 0:
        return None
    rows = load_papers()["mhe"]["tables"]["wmt14"]["rows"]
    kept = [row["prr"]["bleu"] for row in rows if "prr" in row]
    text = (
        f"Attention could be cheaper: head embeddings over one shared projection would save {-saved:,} of "
        f"{variants.total:,} parameters; on WMT'14 such models kept {min(kept)} to {max(kept)} % of the BLEU score."
    )
    return Finding(
        "cost", NOTE, text, "MHE poster, WMT'14 table", {"total": variants.total}, [("--attention mhe-mul", saved)]
    )
