"""Recurrent and hybrid models (Mamba, Jamba, Qwen3-Next and others), whose layers carry a state from token to token.

Such a model reads chains only. Some cannot read several tokens behind a state: theirs are read one by one, which is
found out by trying when a model is loaded. B rows, b of them in a forward, N new tokens, V vocabulary.
"""

import copy
import inspect
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache as StockCache
from transformers import PreTrainedModel

from specbench.cache.dynamic import DynamicCache
from specbench.cache.slots import cache_argument
from specbench.decoding.rows import window
from specbench.decoding.state import State
from specbench.decoding.transfers import upload
from specbench.errors import ConfigError, first_line
from specbench.models.attention_mask import WITHOUT_MASK, AttentionMask, attending_layers, has_state
from specbench.models.recurrent_cache import RecurrentCache, States
from specbench.models.sizes import READ_CHUNK

FIRST, MORE = 5, 4  # tokens of the text that shows whether several can be read behind a state
IN_MODULES = {"conv1d_state", "recurrent_states"}  # attributes of modules
STATES = {"conv_states", "recurrent_states"}  # of a layer's dictionaries from numbers to tensors
SAME, SAME_16_BIT = 1e-4, 3e-2  # of a tensor's norm: what two ways of reading may differ by


def recurrence_of(module: PreTrainedModel, mask: AttentionMask, name: str) -> "Recurrence":
    """The state of a module's layers. Raises ConfigError if it cannot be followed."""
    if not has_state(module.config) or "state" in inspect.signature(module.forward).parameters:
        raise ConfigError(
            f"{name} is a {type(module).__name__}, whose recurrent state is kept in a way that is not known: give "
            "another model"
        )
    try:
        return Recurrence(module, mask)
    except (TypeError, ValueError, AttributeError, KeyError) as error:  # of a module with a cache of its own
        why = f"which takes no cache ({first_line(error)})"
        raise ConfigError(f"{name} is a {type(module).__name__}, {why}") from error


class Recurrence:
    """The recurrent part of a model: its state, which is kept in the linear-attention layers of a transformers cache or
    in the modules (RecurrentGemma), its masks, and whether tokens must be read one by one."""

    def __init__(self, module: PreTrainedModel, mask: AttentionMask):
        self.blank: list[Any] = StockCache(config=mask.config).layers
        self.used: list[Any] = self.blank
        parts = [(path, vars(part)) for path, part in module.named_modules()]
        self.places = [(f"{path}.{name}", part, name) for path, part in parts for name in IN_MODULES & part.keys()]
        self.mask, self.argument = mask, cache_argument(module.forward)
        parameters = inspect.signature(module.forward).parameters
        self.with_positions = "position_ids" in parameters
        self.skips_logits = "logits_to_keep" in parameters
        self.hybrid = attending_layers(mask.config) > 0
        self.one_by_one, self.state_bytes = False, 0.0  # bytes of one row
        self.one_by_one = self._differs(module)

    def _give(self, cache: RecurrentCache, states: States | None) -> None:
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

    def _take(self, cache: RecurrentCache) -> dict[str, Tensor]:
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
        self, model: Any, words: dict[str, Tensor], slots: Tensor, positions: Tensor, visible: int, row: int | None,
        keep_logits: int = 0,
    ) -> Tensor:  # fmt: skip
        """Logits [b, N, V] (only the last `keep_logits` if not 0) of new tokens, `words` being their ids or embeddings,
        at positions [b, N], in columns slots [b, N], of which attention sees `visible`. `row` is the only row of the
        forward, None for the first b. `model` has a module and a cache."""
        cache, count = model.cache, slots.shape[1]
        cache.place(slots, visible, row)
        one_by_one = self.one_by_one and not cache.begins
        found = []
        for part in [slice(i, i + 1) for i in range(count)] if one_by_one else [slice(0, count)]:
            cache.place(slots[:, part], visible, row)
            self._give(cache, cache.before())
            given: dict[str, Any] = {self.argument: cache}
            if self.hybrid:
                given["attention_mask"] = self.mask.by_kind(slots[:, part], visible) | dict.fromkeys(WITHOUT_MASK)
            if self.with_positions:
                given["position_ids"] = positions[:, part]
            if self.skips_logits:
                given["logits_to_keep"] = keep_logits
            output = model.module(**{name: word[:, part] for name, word in words.items()}, use_cache=True, **given)
            cache.after(self._take(cache), part.stop - part.start)
            found.append(output.logits)
        return found[-1] if keep_logits == 1 else torch.cat(found, 1)

    def recover(self, model: Any, state: State, width: int) -> int:
        """Rolls a `LanguageModel` back to where at most `width` committed tokens of each active row are missing in its
        state, and has it read those that no kept state has read. Returns how many tokens these are, in all rows."""
        rows = list(zip(state.lengths, model.cached, state.active, strict=True))
        ends = [max(0, length - width) if on else cached for length, cached, on in rows]
        points = [model.cache.point_before(row, end) for row, end in enumerate(ends)]
        model.cached = [point if on else end for point, end, on in zip(points, ends, state.active, strict=True)]
        model.cache.truncate(model.cached)
        model.cache.keep(every=False)  # states of rejected guesses are as long as texts to come
        missing = sum(end - begin for begin, end in zip(model.cached, ends, strict=True))
        self.read_rows(model, state, model.cached, ends, READ_CHUNK)
        return int(missing)

    def read_rows(self, model: Any, state: State, begins: Sequence[int], ends: Sequence[int], chunk: int) -> None:
        """Has a model read tokens begins[b] .. ends[b] - 1 of each row b, `chunk` at a time if possible. Nothing is
        padded: rows are read together as far as all of them go."""
        left = {row: (begin, end) for row, (begin, end) in enumerate(zip(begins, ends, strict=True)) if begin < end}
        for row, (begin, end) in list(left.items()):
            if begin == 0:  # a prompt, each by itself
                size = end if self.one_by_one else chunk
                for first in range(0, end, size):
                    model.read(state, row, first, min(first + size, end))
                del left[row]
        while left:
            count = min(chunk, *(end - begin for begin, end in left.values()))
            _read(model, state, {row: begin for row, (begin, _) in left.items()}, count)
            left = {row: (begin + count, end) for row, (begin, end) in left.items() if begin + count < end}

    @torch.no_grad()
    def _differs(self, module: PreTrainedModel) -> bool:
        """Whether several tokens that are read together behind a state leave another state, or have other logits, than
        read one by one."""
        weight = next(module.parameters())
        device, vocabulary, wide = weight.device, int(self.mask.config.vocab_size), weight.element_size() >= 4
        text = (torch.arange(FIRST + MORE, device=device) * 7 + 3)[None] % vocabulary
        ends = []
        for one_by_one in (False, True):
            self.one_by_one = one_by_one
            trial = SimpleNamespace(module=module, cache=RecurrentCache(DynamicCache(1, FIRST + MORE)))
            for begin, end in ((0, FIRST), (FIRST, FIRST + MORE)):
                slots = torch.arange(begin, end, device=device)[None]
                logits = self.logits(trial, {"input_ids": text[:, begin:end]}, slots, slots, end, None)
            ends.append([*trial.cache.now.states.values(), logits])
        self.state_bytes = trial.cache.state_bytes()
        same = SAME if wide else SAME_16_BIT
        pairs = [(together.double(), alone.double()) for together, alone in zip(*ends, strict=True)]
        return any(bool((a - b).norm() > same * b.norm()) for a, b in pairs)


def _read(model: Any, state: State, begins: Mapping[int, int], count: int) -> None:
    """Has a recurrent model read `count` committed tokens of several rows from begins[row] on. All rows of the batch
    take part in a forward of several."""
    starts = [begins.get(row, length) for row, length in enumerate(model.cached)]
    if len(begins) == 1 or max(starts) + count > state.tokens.shape[1]:
        for row, begin in begins.items():
            model.read(state, row, begin, begin + count)
        return
    model.cache.reserve([begins[row] + count if row in begins else 0 for row in range(len(starts))])
    first = upload(starts, model.device)
    tokens = window(state.tokens, first, count)
    model.forward(tokens, first, model.visible_columns(max(starts) + count), keep_logits=1)
    model.cached = [begins[row] + count if row in begins else length for row, length in enumerate(model.cached)]
