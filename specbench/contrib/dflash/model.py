"""A DFlash drafter with the keys and values that it made of the target's hidden states, for rows that requests enter
and leave. B rows, T columns, F features of a position, K key heads, D head size, V vocabulary, S rows of a block."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from specbench.contrib.dflash.config import DFlashConfig
from specbench.contrib.dflash.network import DFlashNetwork
from specbench.decoding.rows import Rows
from specbench.decoding.state import State
from specbench.models.language_model import LanguageModel
from specbench.models.vocabulary import VocabMap

AT_A_TIME = 512  # positions of a prompt whose keys and values are made in one call


class DFlashModel:
    """`module` runs with the target's executor. Column i of the context belongs to position i of the text; those of
    positions whose hidden states are not known yet hold nothing that is seen."""

    def __init__(self, module: DFlashNetwork, config: DFlashConfig, vocabulary: VocabMap, target: LanguageModel):
        """The target tells what it reads of prompts from now on."""
        self.module, self.markov, self.config, self.vocabulary = module, module.markov_head, config, vocabulary
        self.executor, self.name = target.executor, target.name
        stock: Any = target.module
        theirs = (stock.get_input_embeddings(), stock.get_output_embeddings())
        own = {name: target.executor.stored(part) for name, part in module.named_children()
               if not any(part is other for other in theirs)}  # fmt: skip
        self.weight_bytes = sum(stored.held for stored in own.values())
        self.weights = sum(stored.numbers for name, stored in own.items() if name not in ("embed_tokens", "lm_head"))
        self.context = torch.empty(0)
        self.heard: list[tuple[int | None, int, Tensor]] = []
        target.hidden_reader = self

    # -- What executors ask of a model with a cache ----------------------------------------------

    @property
    def description(self) -> tuple[Any, ...]:
        return "dflash", self.name, str(self.config.options), self.vocabulary.description

    def cache_tensors(self) -> list[Tensor]:
        return [self.context] if self.context.numel() else []

    @contextmanager
    def on_cache(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        own = self.context
        self.context = tensors[0]
        try:
            yield
        finally:
            self.context = own

    # -- The target's hidden states ---------------------------------------------------------------

    def take_hidden(self, row: int | None, begin: int, hidden: Tensor) -> None:
        """See `HiddenReader.take_hidden`: keeps them until the next draft. hidden [b, n, F]."""
        self.heard.append((row, begin, hidden))

    def clear_hidden(self) -> None:
        self.heard = []

    def allocate(self, rows: int, columns: int) -> None:
        """Room for so many rows and columns, and for a block behind them."""
        own: Any = self.config.layers
        columns = self.executor.columns(columns + self.config.options.block_size + 1)
        shape = (own.num_hidden_layers, 2, rows, own.num_key_value_heads, columns, own.head_dim)
        if self.context.shape != shape:
            like = self.module.fc.weight
            self.context = torch.zeros(shape, dtype=like.dtype, device=like.device)  # what is not seen must be finite

    def read_prompts(self) -> None:
        """Makes the keys and values of what was heard of prompts."""
        for row, start, hidden in self.heard:
            for begin in range(0, hidden.shape[1], AT_A_TIME):
                part = hidden[:, begin : begin + AT_A_TIME]
                first = torch.full((len(part),), start + begin, device=part.device)
                made = self.module.context(part, first)
                own = self.context if row is None else self.context[:, :, row : row + 1]
                own[..., start + begin : start + begin + part.shape[1], :] = made
        self.heard = []

    def take(self, hidden: Tensor, first: Tensor) -> None:
        """Makes the keys and values of hidden states [B, n, F] at positions from first [B] on."""
        self.read_prompts()  # of a row that ended without a draft: the next request's columns are not overwritten
        self.executor.leaf(self._take, self)(hidden, first)

    def _take(self, hidden: Tensor, first: Tensor) -> None:
        made = self.module.context(hidden, first)
        columns = first[:, None] + torch.arange(hidden.shape[1], device=first.device)
        columns = columns.clamp(max=self.context.shape[4] - 1)
        self.context.scatter_(4, columns[None, None, :, None, :, None].expand_as(made), made)

    # -- A draft ------------------------------------------------------------------------------------

    def logits(self, state: State) -> Tensor:
        """Logits [B, guesses, V'] of all guesses of a block behind the committed tokens of each row."""
        self.read_prompts()
        visible = self.executor.columns(max(state.lengths), self.context.shape[4])
        found: Tensor = self.executor.leaf(self._logits, self)(state.rows, visible)
        return found

    def _logits(self, rows: Rows, visible: int) -> Tensor:
        """`logits` with the first `visible` columns of the context."""
        first, own = rows.length - 1, self.config.options
        block = torch.full((len(first), own.block_size), own.mask_token_id, device=first.device)
        block[:, 0] = rows.tokens.gather(1, first[:, None])[:, 0]
        states = self.module(self.module.embed_tokens(block), self.context[..., :visible, :], first)
        found: Tensor = self.module.lm_head(states[:, own.block_size - self.config.longest :])
        return found
