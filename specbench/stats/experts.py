"""Counts the experts that the calls of a mixture-of-experts target wake. N tokens of a call, k experts of each."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from specbench.models.flops import chosen_by_token, expert_layers
from specbench.stats.estimates import Experts, WokenExperts
from specbench.stats.records import Group
from specbench.theory import distinct_experts

Woken = dict[int, tuple[int, int]]  # by tokens of a call: calls, and distinct experts of all layers of all of them


class ExpertCounter:
    """Hears what the routers of a target choose while it decodes. `layers` are its expert layers."""

    def __init__(self, layers: Sequence[nn.Module]):
        self.layers = layers
        self.chosen: list[Tensor] = []  # [N, k] of each layer of each call since the last count
        self.woken: Woken = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside this context calls are heard. What was counted before is forgotten."""
        self.woken, self.chosen = {}, []
        hooks = [layer.register_forward_pre_hook(self._note, with_kwargs=True) for layer in self.layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def count(self) -> None:
        """Counts the last call of the target, outside the timed laps, and forgets it and those before it."""
        last = self.chosen[-len(self.layers) :] if self.layers else []
        if last and len(last) == len(self.layers):
            tokens = len(last[0])
            calls, woken = self.woken.get(tokens, (0, 0))
            self.woken[tokens] = calls + 1, woken + sum(len(chosen.unique()) for chosen in last)
        self.chosen.clear()

    def _note(self, layer: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Keeps the numbers of the experts that a layer is called with. A compiled program calls no hooks."""
        if torch.compiler.is_compiling():
            return
        chosen = [t for t in (*given, *named.values()) if isinstance(t, Tensor) and not t.is_floating_point()]
        if chosen:
            self.chosen.append(chosen[0].flatten(0, -2))


def woken_experts(target: Any, groups: Sequence[Group]) -> Experts | None:
    """What calls of plain decoding by `target`, a `LanguageModel`, and the target calls of rounds woke; None if nothing
    was heard, or a round has several target calls, because a recurrent state is moved on token by token."""
    layers, chosen = expert_layers(target.module), chosen_by_token(target.config)
    ways = {name: _together([getattr(group, way).woken for group in groups])
            for name, way in (("plain", "baseline"), ("verify", "speculative"))}  # fmt: skip
    if chosen is None or (target.recurrence is not None and target.recurrence.one_by_one) or not all(ways.values()):
        return None
    experts: Any = layers[0].num_experts
    held = sum(p.nbytes for layer in layers for p in layer.parameters(recurse=False)) / experts  # one of every layer
    rest = target.step_bytes - chosen * held
    one, many = (sum(w for _, w in way.values()) / sum(calls for calls, _ in way.values()) / len(layers)
                 for way in ways.values())  # fmt: skip
    rows = [
        WokenExperts(way, tokens, calls, woken / calls / len(layers), distinct_experts(experts, chosen, tokens))
        for way, found in ways.items()
        for tokens, (calls, woken) in sorted(found.items())
    ]
    return Experts(len(layers), experts, chosen, one, many, (rest + many * held) / (rest + one * held), rows)


def _together(parts: Sequence[Woken]) -> Woken:
    """The sums of several counts."""
    found: Woken = {}
    for tokens, (calls, woken) in (entry for part in parts for entry in part.items()):
        before = found.get(tokens, (0, 0))
        found[tokens] = before[0] + calls, before[1] + woken
    return found
