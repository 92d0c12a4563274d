"""How recurrent and hybrid models are run: Mamba, Jamba, Qwen3-Next and others, whose layers carry a state.

Such a model reads chains only. Some cannot read several tokens behind a state: theirs are read one by one, which is
found out by trying when a model is loaded. B rows, b of them in a forward, N new tokens, V vocabulary.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from specbench.cache.dynamic import DynamicCache
from specbench.cache.slots import SlotCache
from specbench.contrib.recurrent.cache import RecurrentCache
from specbench.contrib.recurrent.states import InCache, InLinearCache, InModules, InOutput, StateKeeper
from specbench.decoding.model import READ_CHUNK
from specbench.decoding.rows import window
from specbench.decoding.state import State
from specbench.decoding.transfers import upload
from specbench.errors import ConfigError
from specbench.models.architecture import LayerState
from specbench.models.attention_mask import AttentionMask
from specbench.models.language_model import LanguageModel

FIRST, MORE = 5, 4  # tokens of the text that shows whether several can be read behind a state
SAME = {torch.float32: 1e-4, torch.float64: 1e-8}  # of a tensor's norm: what two ways of reading may differ by
SAME_16_BIT = 3e-2
# Of the largest logit: what reading behind a state and reading the whole text may differ by.
PLACED = {torch.float32: 1e-3, torch.float64: 1e-3}
PLACED_16_BIT = 0.1
WITHOUT_MASK = {"linear_attention", "conv", "moe", "mlp"}  # kinds of layers that see no column of the cache


class CachedModule(NamedTuple):
    """A module with a cache of its own."""

    module: PreTrainedModel
    cache: RecurrentCache


class Recurrence(LayerState):
    """The recurrent part of a model: its state, its masks, and whether tokens must be read one by one."""

    def __init__(self, module: PreTrainedModel, keeper: StateKeeper, mask: AttentionMask, name: str):
        """Raises ConfigError if reading behind a state has other logits than reading the whole text."""
        self.keeper, self.mask = keeper, mask
        parameters = inspect.signature(module.forward).parameters
        self.with_positions = "position_ids" in parameters
        self.skips_logits = "logits_to_keep" in parameters
        self.hybrid = attending_layers(mask.config) > 0
        self.one_by_one, self.state_bytes = False, 0.0  # of one row
        self.one_by_one = self._differs(module, name)

    def cache(self, columns: SlotCache) -> RecurrentCache:
        """An empty cache that keeps keys and values in `columns`."""
        return self.keeper.cache_type(columns, self.keeper.initial)

    def logits(
        self,
        model: Any,
        words: dict[str, Tensor],
        slots: Tensor,
        positions: Tensor,
        visible: int,
        row: int | None,
        keep_logits: int = 0,
    ) -> Tensor:
        """Logits [b, N, V] (only the last `keep_logits` if not 0) of new tokens, `words` being their ids or embeddings,
        at positions [b, N], in columns slots [b, N], of which attention sees `visible`. `row` is the only row of the
        forward, None for the first b. `model` has a module and a cache."""
        cache, (b, count) = model.cache, slots.shape
        if self.keeper.steps_alone and b > 1 and (count == 1 or self.one_by_one):
            alone = ({name: word[r : r + 1] for name, word in words.items()} for r in range(b))
            rows = zip(alone, slots.split(1), positions.split(1), range(b), strict=True)
            return torch.cat([self.logits(model, w, s, p, visible, r, keep_logits) for w, s, p, r in rows])
        cache.place(slots, visible, row)
        one_by_one = self.one_by_one and not cache.begins
        found = []
        for part in [slice(i, i + 1) for i in range(count)] if one_by_one else [slice(0, count)]:
            cache.place(slots[:, part], visible, row)
            given = self.keeper.give(cache, cache.before())
            if self.hybrid:
                given["attention_mask"] = self.mask.by_kind(slots[:, part], visible) | dict.fromkeys(WITHOUT_MASK)
            if self.with_positions:
                given["position_ids"] = positions[:, part]
            if self.skips_logits:
                given["logits_to_keep"] = keep_logits
            output = model.module(**{name: word[:, part] for name, word in words.items()}, use_cache=True, **given)
            cache.after(self.keeper.take(cache, output), part.stop - part.start)
            found.append(output.logits)
        return found[-1] if keep_logits == 1 else torch.cat(found, 1)

    def recover(self, model: LanguageModel, state: State, width: int) -> int:
        """See `LayerState.recover`."""
        rows = list(zip(state.lengths, model.cached, state.active, strict=True))
        ends = [max(0, length - width) if on else cached for length, cached, on in rows]
        points = [model.cache.point_before(row, end) for row, end in enumerate(ends)]
        model.cached = [point if on else end for point, end, on in zip(points, ends, state.active, strict=True)]
        model.cache.truncate(model.cached)
        model.cache.keep(every=False)  # states of rejected guesses are as long as texts to come
        missing = sum(end - begin for begin, end in zip(model.cached, ends, strict=True))
        self.read_rows(model, state, model.cached, ends, READ_CHUNK)
        return missing

    def read_rows(
        self, model: LanguageModel, state: State, begins: Sequence[int], ends: Sequence[int], chunk: int
    ) -> None:
        """See `LayerState.read_rows`. Nothing is padded: rows are read together as far as all of them go."""
        left = {row: (begin, end) for row, (begin, end) in enumerate(zip(begins, ends, strict=True)) if begin < end}
        prompts: dict[int, list[int]] = {}  # rows by the length of what they begin with
        for row, (begin, end) in list(left.items()):
            if begin == 0:
                prompts.setdefault(end, []).append(row)
                del left[row]
        for end, rows in prompts.items():
            size = end if self.one_by_one else chunk
            for first in range(0, end, size):
                _read(model, state, dict.fromkeys(rows, first), min(size, end - first))
        while left:
            count = min(chunk, *(end - begin for begin, end in left.values()))
            _read(model, state, {row: begin for row, (begin, _) in left.items()}, count)
            left = {row: (begin + count, end) for row, (begin, end) in left.items() if begin + count < end}

    @torch.no_grad()
    def _differs(self, module: PreTrainedModel, name: str) -> bool:
        """Whether several tokens that are read together behind a state leave another state, or have other logits, than
        read one by one. Raises ConfigError if these have others than the whole text."""
        weight = next(module.parameters())
        device, vocabulary = weight.device, int(self.mask.config.vocab_size)
        text = (torch.arange(FIRST + MORE, device=device) * 7 + 3)[None] % vocabulary
        ends = []
        for one_by_one in (False, True):
            self.one_by_one = one_by_one
            trial = CachedModule(module, self.cache(DynamicCache(1, FIRST + MORE)))
            for begin, end in ((0, FIRST), (FIRST, FIRST + MORE)):
                slots = torch.arange(begin, end, device=device)[None]
                logits = self.logits(trial, {"input_ids": text[:, begin:end]}, slots, slots, end, None)
            ends.append([*trial.cache.now.states.values(), logits])
        self.state_bytes = trial.cache.state_bytes()
        stock = module(input_ids=text, use_cache=False).logits[:, FIRST:]
        error = float((ends[-1][-1] - stock).abs().max() / stock.abs().max())
        if not error <= PLACED.get(weight.dtype, PLACED_16_BIT):
            raise ConfigError(
                f"{name} is a {type(module).__name__}, whose layers do not follow the state that they are given "
                f"(logits differ by {error:.1g}): give another model"
            )
        same = SAME.get(weight.dtype, SAME_16_BIT)
        pairs = [(together.double(), alone.double()) for together, alone in zip(*ends, strict=True)]
        return any(bool((a - b).norm() > same * b.norm()) for a, b in pairs)


def keeper_of(module: PreTrainedModel, config: PretrainedConfig) -> StateKeeper:
    """How a module with a state keeps it."""
    if "state" in inspect.signature(module.forward).parameters:
        return InOutput()
    if config.model_type == "minimax":
        return InLinearCache(module)
    own = InModules(module)
    if own.places:
        return own
    return InCache(module, config)


def attending_layers(config: PretrainedConfig) -> int:
    """How many layers of a model with a state also attend to earlier tokens."""
    return sum(kind not in WITHOUT_MASK for kind in getattr(config, "layer_types", None) or [])


def _read(model: LanguageModel, state: State, begins: Mapping[int, int], count: int) -> None:
    """Has a recurrent model read `count` committed tokens of several rows from begins[row] on. All rows of the batch
    take part in a forward of several, so prompts of a minority are read each by itself."""
    starts = [begins.get(row, length) for row, length in enumerate(model.cached)]
    alone = len(begins) == 1 or (0 in begins.values() and 2 * len(begins) <= len(starts))
    if alone or max(starts) + count > state.tokens.shape[1]:
        for row, begin in begins.items():
            model.read(state, row, begin, begin + count)
        return
    model.cache.reserve([begins[row] + count if row in begins else 0 for row in range(len(starts))])
    first = upload(starts, model.device)
    tokens = window(state.tokens, first, count)
    model.forward(tokens, first, model.columns_seen(max(starts) + count), keep_logits=1)
    model.cached = [begins[row] + count if row in begins else length for row, length in enumerate(model.cached)]
