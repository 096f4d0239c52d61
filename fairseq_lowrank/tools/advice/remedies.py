"""Changes of an architecture, as flags, and the parameters that they add, counted on built models."""

from __future__ import annotations

import math
from argparse import Namespace
from copy import copy

from torch import nn

from fairseq_lowrank.attention import AttentionSpec
from fairseq_lowrank.plugin.flags import AttentionOptions
from fairseq_lowrank.tools.advice.heads import Change, heads_of_size, score_heads, score_rank
from fairseq_lowrank.tools.advice.measured import FEWER, SCORES, TIMES
from fairseq_lowrank.tools.architecture import attention_layers, build_model, our_arguments
from fairseq_lowrank.tools.axes import spec_of
from fairseq_lowrank.tools.parameters import count


class WhatIf:
    """Models of an architecture with some arguments changed and this package's attention, to count their parameters."""

    def __init__(self, args: Namespace, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        ours = our_arguments(args)
        self.possible = ours is not None
        self.args = ours or args
        model = build_model(self.args, vocab_size)
        self.total, self.cached = count(model)["total"], cached(model)

    def changed(self, *, vocab_size: int | None = None, **changes: object) -> nn.Module | None:
        """Return the model with these changes; None if it refuses them."""
        if changes and not self.possible:
            return None
        args = copy(self.args)
        for name, value in changes.items():
            setattr(args, name, value)
        try:
            return build_model(args, vocab_size or self.vocab_size)
        except ValueError:
            return None

    def cost(self, **changes: object) -> int | None:
        """Return the number of parameters that the changes add, see :meth:`changed`."""
        model = self.changed(**changes)
        return None if model is None else count(model)["total"] - self.total

    def priced(self, text: str = "", time: float | None = None, **changes: object) -> list[Change]:
        """Return a remedy with its parameters, cache and recorded time; none if the model refuses the changes.

        Args:
            text: by default the changes as flags.
        """
        model = self.changed(**changes)
        if model is None:
            return []
        more = cached(model) - self.cached if self.cached else None
        return [Change(text or as_flags(changes), count(model)["total"] - self.total, more, time)]

    def fewer_keys(self, sites: dict[str, nn.Module]) -> list[dict[str, object]]:
        """Return changes to fewer heads of keys and values: to about √h for h heads of queries, and to one."""
        if not self.possible:
            return []
        options = AttentionOptions.from_args(self.args)
        chosen = [module.num_heads for site, module in sites.items() if site in options.sites]
        if options.spec.projection != "independent" or not chosen:
            return []
        heads = math.gcd(*chosen)
        now = options.spec.key_value_heads or heads
        plain = (getattr(self.args, "attention", None) or "mha") == "mha"
        between = [number for number in range(2, now) if heads % number == 0]
        grouped = [min(between, key=lambda number: abs(number - math.sqrt(heads)))] if between else []
        changes = [{"key_value_heads": number} for number in (*grouped, *([1] if now > 1 else []))]
        if plain:
            changes = [
                {"attention": "mqa"} if 1 in change.values() else {"attention": "gqa"} | change for change in changes
            ]
        return changes

    def attention_remedies(self, site: str, sites: dict[str, nn.Module], wanted: dict[str, int]) -> list[Change]:
        """Return flags that give a site's scores the wanted rank, with their price.

        The remedies are mixed scores, larger heads, and the composition of other sites. A model has one composition, and plain
        mha at the sites that are not chosen. So a remedy changes all sites of the same composition that need it. If that would
        need a third composition, it changes all sites of the same composition. Mixing after the softmax is not a remedy: it
        does not change the rank of scores.

        Args:
            sites: an attention layer for each of the model's sites.
            wanted: the rank of scores wanted at each site that needs a remedy.
        """
        if not self.possible:
            return []
        options = AttentionOptions.from_args(self.args)
        now = {each: options.spec_at(each) for each in sites}
        same = [each for each in sites if now[each] == now[site]]
        needy = [each for each in same if each in wanted]

        def suffices(spec: AttentionSpec) -> bool:
            return all(score_rank(sites[each], spec) >= wanted[each] for each in needy)

        size = max(math.ceil(wanted[each] / score_heads(sites[each])) for each in needy)
        candidates = [now[site].replace(score_mixing="static"), now[site].replace(head_dim=size), options.spec]
        found = []
        for goal in dict.fromkeys(candidates):
            if goal == now[site] or not suffices(goal):
                continue
            for changed in (needy, same):
                if changed is same and goal.head_dim != now[site].head_dim and goal != options.spec:
                    # heads at sites that need no larger ones must not become smaller
                    goal = goal.replace(head_dim=max(goal.head_dim, *(sites[each].head_dim for each in same)))
                after = {each: goal if each in changed else now[each] for each in sites}
                if {goal, AttentionSpec()} >= set(after.values()):
                    break
            else:
                continue
            changes = self._flags(options, goal, [each for each in after if after[each] == goal], list(sites))
            mixes_scores = goal.score_mixing != now[site].score_mixing
            found += self.priced(time=TIMES[SCORES] if mixes_scores else None, **changes)
        return found

    def _flags(self, options: AttentionOptions, goal: AttentionSpec, chosen: list[str], present: list[str]) -> dict:
        """Return the flags that, in addition to the given ones, choose a composition at the chosen sites."""
        preset = getattr(self.args, "attention", None) or "mha"
        changes = {}
        if goal.mixing != options.spec.mixing:
            changes["head_mixing"] = goal.mixing
        if goal.score_mixing != options.spec.score_mixing:
            changes["score_mixing"] = goal.score_mixing
        if goal.head_dim != options.spec.head_dim:
            if preset == "mha":
                changes["attention"] = "fixedhead"
            changes["head_dim"] = goal.head_dim
        if set(chosen) != {site for site in present if site in options.sites}:
            changes["attention_sites"] = ",".join(chosen)
        return changes


def as_flags(changes: dict[str, object]) -> str:
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in changes.items())


def cached(model: nn.Module) -> int:
    """Return the number of values that a model caches for each token while it decodes."""
    layers = [layer.module for layer in attention_layers(model) if layer.site == "decoder"]
    return sum(layer.projection.state_heads * sum(layer.score.state_sizes.values()) for layer in layers)


def wider_heads(site: str, module: nn.Module, wanted: int, what_if: WhatIf) -> list[Change]:
    """Return the change to fewer heads of the wanted size in the same width; none if they cannot be that large."""
    width, fewer = module.embed_dim, heads_of_size(module, wanted)
    if score_heads(module) > 1 or not 0 < fewer < module.num_heads or width // fewer <= module.head_dim:
        return []
    larger, stack = width // fewer, "encoder" if site == "encoder" else "decoder"
    # a head size that was given does not grow when there are fewer heads
    given = spec_of(module).head_dim is not None
    size, flag = ({"head_dim": larger}, f" --head-dim {larger}") if given else ({}, "")
    text = f"--{stack}-attention-heads {fewer}{flag} (fewer heads, of size {larger})"
    return what_if.priced(text, TIMES[FEWER], **{f"{stack}_attention_heads": fewer}, **size)
