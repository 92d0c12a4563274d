"""Recurrent and hybrid models (Mamba, Jamba, Qwen3-Next and others), whose layers carry a state from token to token.

Such a model reads chains only. A state cannot be cut to fewer tokens: `RowStates` keeps earlier ones of each row, and a
forward is given copies. Some models cannot read several tokens behind a state: theirs are read one by one, which is
found out by trying when a model is loaded. B rows, b of them in a forward, N new tokens, V vocabulary.
"""

import copy
import inspect
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache as StockCache
from transformers import PreTrainedModel

from specbench.cache.dynamic import DynamicCache
from specbench.decoding.state import State
from specbench.errors import ConfigError, first_line
from specbench.models.attention_mask import (
    ATTENDING,
    WITHOUT_MASK,
    AttentionMask,
    TokenPlaces,
    attending_layers,
    has_state,
)
from specbench.models.causal_call import CausalCall
from specbench.models.sizes import READ_CHUNK

FIRST, MORE = 5, 4  # tokens of the text that shows whether several can be read behind a state
IN_MODULES = {"conv1d_state", "recurrent_states"}  # attributes of modules
STATES = {"conv_states", "recurrent_states"}  # of a layer's dictionaries from numbers to tensors
SAME, SAME_16_BIT = 1e-4, 3e-2  # of a tensor's norm: what two ways of reading may differ by
States = Mapping[str, Tensor]  # by name, a tensor [b, ...]


class Kept(NamedTuple):
    """The state of one row."""

    read: int  # the number of tokens that it has read
    states: States  # [1, ...]


class RowStates:
    """The present state of each row, and earlier ones that `truncate` goes back to."""

    def __init__(self, rows: int):
        self.kept: list[list[Kept]] = [[] for _ in range(rows)]  # by row, the present one last
        self.changing = [True] * rows
        self.keeps_all = False

    def change(self, rows: Sequence[bool], keeps_all: bool) -> None:
        """The next forwards change the states of these rows alone. With `keeps_all` a round begins: every row may go
        back to what it has read now, and after each of these forwards."""
        self.changing, self.keeps_all = list(rows), keeps_all
        if keeps_all:
            self.kept = [kept[-1:] for kept in self.kept]

    def truncate(self, lengths: Sequence[int]) -> None:
        """Restores the state behind lengths[b] tokens in rows that read more. RuntimeError if it was not kept."""
        for row, (kept, length) in enumerate(zip(self.kept, lengths, strict=True)):
            if kept and kept[-1].read > length:
                while kept and kept[-1].read > length:
                    kept.pop()
                if (kept[-1].read if kept else 0) != length:
                    raise RuntimeError(f"row {row} has no state behind {length} tokens")

    def point_before(self, row: int, length: int) -> int:
        """The largest length up to `length` to which `truncate` can cut a row."""
        return max((kept.read for kept in self.kept[row] if kept.read <= length), default=0)

    def before(self, rows: range) -> States | None:
        """Copies of the states of the rows of a forward [b, ...]; None if those that it changes have read nothing."""
        if not any(self.kept[row] for row in rows if self.changing[row]):
            return None
        like = next(self.kept[row][-1].states for row in rows if self.kept[row])
        blank = {name: torch.zeros_like(state) for name, state in like.items()}
        present = [self.kept[row][-1].states if self.kept[row] else blank for row in rows]
        return {name: torch.cat([states[name] for states in present]) for name in like}

    def after(self, rows: range, states: States, tokens: int) -> None:
        """Takes over the states [b, ...] of the rows of a forward of so many tokens each."""
        for place, row in enumerate(rows):
            if self.changing[row]:
                kept = self.kept[row]
                read = (kept[-1].read if kept else 0) + tokens
                if kept and not self.keeps_all:
                    kept.pop()
                kept.append(Kept(read, {name: state[place : place + 1] for name, state in states.items()}))

    def bytes(self) -> int:
        """Bytes of all states."""
        return sum(state.nbytes for row in self.kept for kept in row for state in kept.states.values())


def recurrence_of(module: PreTrainedModel, mask: AttentionMask, name: str) -> "Recurrence":
    """What runs a module whose layers have a state. Raises ConfigError if that cannot be followed."""
    kind = f"{name} is a {type(module).__name__}"
    if not has_state(module.config) or "state" in inspect.signature(module.forward).parameters:
        raise ConfigError(f"{kind}, whose recurrent state is kept in a way that is not known: give another model")
    try:
        return Recurrence(module, mask)
    except (TypeError, ValueError, AttributeError, KeyError) as error:  # of a module with a cache of its own
        raise ConfigError(f"{kind}, which takes no cache ({first_line(error)})") from error


class Recurrence(CausalCall):
    """Forwards with a state in linear-attention layers of transformers' cache, or in modules (RecurrentGemma)."""

    def __init__(self, module: PreTrainedModel, mask: AttentionMask):
        super().__init__(module, module)
        self.mask = mask
        self.blank: list[Any] = StockCache(config=mask.config).layers
        self.used: list[Any] = self.blank
        parts = [(path, vars(part)) for path, part in module.named_modules()]
        self.places = [(f"{path}.{name}", part, name) for path, part in parts for name in IN_MODULES & part.keys()]
        self.hybrid = attending_layers(mask.config) > 0
        self.one_by_one, self.state_bytes = False, 0.0  # bytes of one row
        self.one_by_one = self._differs(module)

    def _give(self, cache: Any, states: States | None) -> None:
        """Prepares a forward that begins with these states [b, ...] (None: it begins its texts)."""
        for key, part, name in self.places:
            part[name] = None if states is None else states[key]
        if states is None:
            cache.layers = copy.deepcopy(self.blank)
            return
        cache.layers = [copy.copy(layer) for layer in self.used]  # with its marks of being initialised
        for index, layer in enumerate(cache.layers):
            for name in STATES.intersection(vars(layer)):
                numbers = vars(layer)[name]
                vars(layer)[name] = {number: states.get(f"{index} {name} {number}") for number in numbers}

    def _take(self, cache: Any) -> dict[str, Tensor]:
        """The states [b, ...] after the forward, which it may overwrite in the next."""
        self.used = cache.layers
        return {key: part[name] for key, part, name in self.places} | {
            f"{index} {name} {number}": state
            for index, layer in enumerate(cache.layers)
            for name in sorted(STATES.intersection(vars(layer)))
            for number, state in vars(layer)[name].items()
            if state is not None
        }

    def logits(
        self, model: Any, words: dict[str, Tensor], places: TokenPlaces, row: int | None, keep_logits: int
    ) -> Tensor:
        """As `CausalCall.logits`, of chains. `model` has a module, a cache and the states of its rows."""
        assert places.tree is None, "a recurrent model reads chains"
        cache, (b, N) = model.cache, places.slots.shape
        rows = range(b) if row is None else range(row, row + 1)
        one_by_one = self.one_by_one and model.states.before(rows) is not None
        found = []
        for part in [slice(i, i + 1) for i in range(N)] if one_by_one else [slice(0, N)]:
            own = places._replace(slots=places.slots[:, part], positions=places.positions[:, part])
            cache.place(own.slots, own.visible, row)
            self._give(cache, model.states.before(rows))
            given: dict[str, Any] = {self.cache_name: cache}
            if self.hybrid:
                given["attention_mask"] = self.mask.by_kind(own, ATTENDING) | dict.fromkeys(WITHOUT_MASK)
            if self.takes_positions:
                given["position_ids"] = own.positions
            if self.skips_logits:
                given["logits_to_keep"] = keep_logits
            output = model.module(**{name: word[:, part] for name, word in words.items()}, use_cache=True, **given)
            model.states.after(rows, self._take(cache), part.stop - part.start)
            found.append(output.logits)
        return found[-1] if keep_logits == 1 else torch.cat(found, 1)

    def recover(self, model: Any, state: State, width: int) -> None:
        """Has a `LanguageModel` read all committed tokens of active rows but `width`, from the last kept state on."""
        active = [row for row, on in enumerate(state.active) if on]
        ends = {row: max(0, state.lengths[row] - width) for row in active}
        for row, end in ends.items():
            model.cached[row] = model.states.point_before(row, end)
        model.states.truncate(model.cached)  # also what rejected guesses left, before texts are as long
        for row, end in ends.items():
            self.read(model, state, row, model.cached[row], end)

    def read(self, model: Any, state: State, row: int, begin: int, end: int, chunk: int = READ_CHUNK) -> None:
        """Has a model read the committed tokens begin .. end - 1 of one row, `chunk` at a time if possible: a state
        cannot forget padding, so rows are read one after the other."""
        size = end if begin == 0 and self.one_by_one else chunk
        for first in range(begin, end, max(1, size)):
            model.read(state, row, first, min(first + size, end))

    @torch.no_grad()
    def _differs(self, module: PreTrainedModel) -> bool:
        """Whether tokens read together behind a state leave another state, or have other logits, than one by one."""
        weight = next(module.parameters())
        device, vocabulary, wide = weight.device, int(self.mask.config.vocab_size), weight.element_size() >= 4
        text = (torch.arange(FIRST + MORE, device=device) * 7 + 3)[None] % vocabulary
        ends = []
        for one_by_one in (False, True):
            self.one_by_one = one_by_one
            trial = SimpleNamespace(module=module, cache=DynamicCache(1, FIRST + MORE), states=RowStates(1))
            for begin, end in ((0, FIRST), (FIRST, FIRST + MORE)):
                slots = torch.arange(begin, end, device=device)[None]
                places = TokenPlaces(slots, slots, slots[:, 0], end, None)
                logits = self.logits(trial, {"input_ids": text[:, begin:end]}, places, None, 0)
            ends.append([*trial.states.kept[0][-1].states.values(), logits])
        self.state_bytes = trial.states.bytes()
        same = SAME if wide else SAME_16_BIT
        pairs = [(together.double(), alone.double()) for together, alone in zip(*ends, strict=True)]
        return any(bool((a - b).norm() > same * b.norm()) for a, b in pairs)
