"""An architecture with this package's attention, and changes of it, as flags, with the parameters and cache that they add."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from copy import copy
from typing import Any

import numpy
from fairseq.models.nat import FairseqNATModel
from torch import nn

from fairseq_lowrank.attention import AttentionSpec
from fairseq_lowrank.parts import METHODS, PARTS, PLAIN
from fairseq_lowrank.plugin.flags import AttentionOptions
from fairseq_lowrank.tools.advice.heads import Change, Heads, heads_of_rank, score_heads, score_rank
from fairseq_lowrank.tools.advice.measured import FEWER, SCORES, TIMES
from fairseq_lowrank.tools.axes import spec_of
from fairseq_lowrank.tools.fairseq.advice.lengths import lengths_by_site
from fairseq_lowrank.tools.fairseq.architecture import attention_layers, build_model, our_arguments
from fairseq_lowrank.tools.fairseq.parameters import count


class ModelSummary(Heads):
    """A model that is built from its arguments, with this package's attention if that can be chosen, and the lengths of its data.

    Changes are priced on built models.

    Args:
        args: see :func:`~fairseq_lowrank.tools.fairseq.architecture.parse_architecture`.
        lengths: see :func:`~.lengths.read_lengths`; sites without lengths are not judged.
        target_vocab_size: size of the dictionary of the target, if it has another one.
    """

    def __init__(
        self, args: Namespace, vocab_size: int, lengths: dict[str, numpy.ndarray], target_vocab_size: int | None = None
    ) -> None:
        ours = our_arguments(args)
        self.args, self.vocab_size, self.target_vocab_size = ours or args, vocab_size, target_vocab_size
        self.options = AttentionOptions.from_args(ours) if ours else None
        self.model = build_model(self.args, vocab_size, target_vocab_size)
        self.total, self.cached = count(self.model)["total"], cached(self.model)
        sites: dict[str, Any] = {}
        for layer in attention_layers(self.model):
            sites.setdefault(layer.site, layer.module)
        # every decoder that writes a word after the other is causal
        causal = () if isinstance(self.model, FairseqNATModel) else ("decoder",)
        super().__init__(sites, lengths_by_site(lengths) if lengths else {}, causal)

    def priced(
        self,
        text: str = "",
        time: float | None = None,
        *,
        vocab_size: int | None = None,
        target_vocab_size: int | None = None,
        enough: Callable[[nn.Module], bool] = lambda model: True,
        **changes: Any,
    ) -> list[Change]:
        """Return a remedy with its parameters, cache and recorded time; none if the model refuses the changes, or needs more.

        Args:
            text: by default the changes as flags.
            enough: returns True if the changed model no longer has the problem.
            changes: arguments of the architecture.
        """
        if changes and self.options is None:
            return []
        args = copy(self.args)
        vars(args).update(changes)
        try:
            model = build_model(args, vocab_size or self.vocab_size, target_vocab_size or self.target_vocab_size)
        except ValueError:
            return []
        if not enough(model):
            return []
        text = text or " ".join(f"--{name.replace('_', '-')} {value}" for name, value in changes.items())
        more = cached(model) - self.cached if self.cached else None
        return [Change(text, count(model)["total"] - self.total, more, time)]

    def head_size_remedies(self, site: str) -> list[Change]:
        """Return the changes that give a site's scores the rank that its lengths need; none if the heads are large enough."""
        if site not in self.sites_too_small:
            return []
        return [*self._other_attention(site), *self._fewer_heads(site)]

    def fewer_keys(self) -> list[Change]:
        """Return changes to fewer heads of keys and values: to about √h for h heads of queries, and to one."""
        options = self.options
        chosen = [module.num_heads for site, module in self.sites.items() if options and site in options.sites]
        if options is None or not options.spec.is_default("projection") or not chosen:
            return []
        heads = math.gcd(*chosen)
        now = options.spec.key_value_heads or heads
        between = [number for number in range(2, now) if heads % number == 0]
        numbers = sorted(between, key=lambda number: abs(number - math.sqrt(heads)))[:1] + [1] * (now > 1)
        return [
            found
            for number in numbers
            for found in self.priced(**self._preset_for("key_value_heads"), key_value_heads=number)
        ]

    def _preset_for(self, axis: str) -> dict[str, Any]:
        """Return the flag of the preset that is plain attention with another size, if the model's attention is plain."""
        if (getattr(self.args, "attention", None) or PLAIN) != PLAIN:
            return {}
        for name, method in METHODS.items():
            if method.needs is not None and method.needs.axis == axis and not method.axes:
                return {"attention": name}
        return {}

    def _other_attention(self, site: str) -> list[Change]:
        """Return flags of attention that give a site's scores the wanted rank.

        The remedies are mixed scores, larger heads, and the composition of other sites. A model has one composition, and plain
        mha at the sites that are not chosen. So a remedy changes all sites of the same composition that need it. If that would
        need a third composition, it changes all sites of the same composition. Mixing after the softmax is not a remedy: it
        does not change the rank of scores.
        """
        options, sites = self.options, self.sites
        if options is None:
            return []
        wanted = {each: self.wanted_rank(each) for each in self.sites_too_small}
        now = {each: options.spec_at(each) for each in sites}
        same = [each for each in sites if now[each] == now[site]]
        needy = [each for each in same if each in wanted]
        size = max(math.ceil(wanted[each] / score_heads(sites[each])) for each in needy)

        def suffices(goal: AttentionSpec) -> bool:
            try:
                return all(score_rank(sites[each], goal) >= wanted[each] for each in needy)
            except ValueError:  # a projection that takes no other head size
                return False

        found = []
        changed_specs = _with(now[site], score_mixing=_mixing_of_scores()), _with(now[site], head_dim=size)
        for goal in dict.fromkeys((*filter(None, changed_specs), options.spec)):
            if goal == now[site] or not suffices(goal):
                continue
            for changed in (needy, same):
                if changed is same and goal.head_dim != now[site].head_dim and goal != options.spec:
                    # heads at sites that need no larger ones must not become smaller
                    goal = goal.replace(head_dim=max(goal.head_dim, *(sites[each].head_dim for each in same)))
                after = {each: goal if each in changed else now[each] for each in sites}
                if {goal, AttentionSpec()} >= set(after.values()):
                    chosen = [each for each in after if after[each] == goal]
                    time = TIMES[SCORES] if goal.score_mixing != now[site].score_mixing else None
                    found += self.priced(time=time, **self._flags(options, goal, chosen))
                    break
        return found

    def _flags(self, options: AttentionOptions, goal: AttentionSpec, chosen: list[str]) -> dict[str, Any]:
        """Return the flags that, in addition to the given ones, choose a composition at the chosen sites."""
        before, changes = options.spec, dict[str, Any]()
        if goal.head_dim != before.head_dim:
            changes |= self._preset_for("head_dim")
        for name, flag in (("mixing", "head_mixing"), ("score_mixing", "score_mixing"), ("head_dim", "head_dim")):
            if getattr(goal, name) != getattr(before, name):
                changes[flag] = getattr(goal, name)
        if set(chosen) != {site for site in self.sites if site in options.sites}:
            changes["attention_sites"] = ",".join(chosen)
        return changes

    def _fewer_heads(self, site: str) -> list[Change]:
        """Return the change to fewer heads of the wanted size in the same width; none if they cannot be that large."""
        module = self.sites[site]
        fewer = heads_of_rank(module, self.wanted_rank(site))
        if score_heads(module) > 1 or not 0 < fewer < module.num_heads or module.embed_dim // fewer <= module.head_dim:
            return []
        larger, flag = module.embed_dim // fewer, f"{'encoder' if site == 'encoder' else 'decoder'}_attention_heads"
        # a head size that was given does not grow when there are fewer heads
        given: dict[str, Any] = {} if spec_of(module).head_dim is None else {"head_dim": larger}
        flags = f"--{flag.replace('_', '-')} {fewer}" + (f" --head-dim {larger}" if given else "")
        return self.priced(f"{flags} (fewer heads, of size {larger})", TIMES[FEWER], **given | {flag: fewer})


def _mixing_of_scores() -> str:
    """Return the first registered part that mixes the scores of heads by a trained matrix, the same for all queries."""
    parts = ((name, part) for name, part in PARTS["score_mixing"].items() if part is not None)
    return next(
        name
        for name, part in parts
        if part.mixes_heads and part.learns and not (part.reads_inputs or part.reads_queries)
    )


def _with(spec: AttentionSpec, **choices: int | str) -> AttentionSpec | None:
    """Return a spec with other values; None if they do not go together."""
    try:
        return spec.replace(**choices)
    except ValueError:
        return None


def cached(model: nn.Module) -> int:
    """Return the number of values that a model caches for each token while it decodes."""
    if isinstance(model, FairseqNATModel):  # it writes all words at once
        return 0
    layers = (layer.module for layer in attention_layers(model) if layer.site == "decoder")
    # fairseq's own attention caches keys and values of its width
    return sum(getattr(layer, "cached_numbers", 2 * layer.embed_dim) for layer in layers)
