"""Base classes of models: `Model` reads text into a cache, `Target` also scores drafts.

B rows, N nodes, D levels, T columns, V vocabulary, H hidden.
"""

from abc import ABC, abstractmethod
from collections import abc
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.component import Component
from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.executor import Executor
from specbench.decoding.sampling import Sampling
from specbench.decoding.sequence import Sequence
from specbench.decoding.state import State
from specbench.decoding.token_tree import take_rows

READ_CHUNK = 2048  # tokens per row and forward, by default


@dataclass(frozen=True)
class Scores:
    """The target's distributions for a draft."""

    p: Tensor  # [B, N + 1, V], the distribution of the token after each node
    width: int  # tokens of each row that the call read
    hidden: Tensor | None = None  # [B, width, H], inputs of the output matrix or as `feature_layers` say, if asked for
    place: Tensor | None = None  # [B, N + 1], each node's index among the tokens read, if guesses shared places
    logits: Tensor | None = None  # [B, N + 1, V] before the argmax of temperature 0, after the repetition penalty

    def hidden_along(self, verdict: Verdict) -> Tensor:
        """[B, D + 1, H]: the hidden states of the last committed token and of the n accepted guesses; those after them
        are undefined."""
        assert self.hidden is not None
        if verdict.path is None:
            return self.hidden
        read = verdict.path if self.place is None else self.place.gather(1, verdict.path)
        return take_rows(self.hidden, read.clamp(max=self.hidden.shape[1] - 1))

    def hidden_after(self, verdict: Verdict) -> Tensor:
        """[B, H]: the hidden state from which t was drawn, that of the last accepted guess or committed token."""
        n = verdict.accepted
        return self.hidden_along(verdict)[torch.arange(len(n), device=n.device), n]


class Model(Component, ABC):
    """A language model with a cache, for rows that requests enter and leave. The first cached[b] tokens of row b are in
    the cache. A forward that begins at position s forgets everything at and beyond s: this is the rollback."""

    name: str
    tokenizer: Any
    trees: bool = True  # whether it can read token trees
    random_weights: bool = False
    sampling: Sampling
    executor: Executor
    device: torch.device
    dtype: torch.dtype  # the precision of its arithmetic
    weight_bytes: int  # bytes of all weights
    step_bytes: float  # bytes of weights that a one-token step reads
    operations_per_token: float  # multiply-adds with weights: what c_hat compares (Definition 3.10)
    cached: list[int]  # by row, the number of leading tokens in the cache
    state_bytes: float = 0  # bytes of one row's recurrent state, if it has one

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """V, the number of rows of the output matrix."""

    @property
    @abstractmethod
    def context(self) -> int:
        """The longest text that the model supports, in tokens."""

    @property
    @abstractmethod
    def stop_tokens(self) -> list[int]:
        """Ids of the tokens that end a text."""

    @property
    def start_tokens(self) -> abc.Sequence[int] | None:
        """What the decoder's text begins with, if a prompt is the input of an encoder; else None."""
        return None

    @property
    def unlike_generate(self) -> abc.Sequence[str]:
        """Settings of its generation_config that are not applied, as "min_length=56"."""
        return ()

    @property
    def kernel_lengths(self) -> abc.Sequence[int]:
        """Lengths of prompts that between them run every kernel of the model's attention; empty where all run one."""
        return ()

    @property
    def input_context(self) -> int:
        """The longest input of its encoder, in tokens; 0 without one."""
        return 0

    @property
    def shared_tokens(self) -> int | None:
        """How many of the target's tokens a drafter's model has, if its tokenizer is another one; else None."""
        return None

    @abstractmethod
    def allocate(self, rows: int, columns: int) -> None:
        """Makes an empty cache of at least `columns` positions for each of `rows` rows."""

    def reopen(self, rows: int, columns: int) -> None:
        """As `allocate`, but prompts that the cache still holds need not be read once more (`admit`)."""
        self.allocate(rows, columns)

    @abstractmethod
    def prefill(self, state: State, upto: int | None = None, start: int = 0, chunk: int = READ_CHUNK) -> None:
        """Reads the committed tokens start .. upto - 1 of all rows, without the last one by default, in chunks."""

    @abstractmethod
    def read(self, state: State, row: int, begin: int, end: int) -> None:
        """Reads the committed tokens begin .. end - 1 of one row into the cache; other rows are not touched."""

    @abstractmethod
    def may_admit(self, sequence: Sequence, columns: int) -> bool:
        """Whether the cache has room for this request, which needs at most `columns` columns."""

    @abstractmethod
    def admit(self, row: int, sequence: Sequence, columns: int) -> None:
        """Gives a row of the cache to a request; cached[row] becomes the number of its tokens that are there."""

    def encode(self, row: int, sequence: Sequence) -> bool:
        """Has the encoder read the sequence's input for the row; returns whether there is an encoder."""
        return False

    @abstractmethod
    def prompt_read(self, row: int, sequence: Sequence) -> None:
        """Called when the row's prompt has been read completely: other rows may share it from now on."""

    @abstractmethod
    def release(self, row: int) -> None:
        """Frees a row of the cache: its request has ended."""

    @abstractmethod
    def read_text(self, text: Tensor, begin: int, end: int) -> Tensor:
        """Logits [1, end - begin, V] that predict the tokens begin .. end - 1 of a text [1, T]. The tokens before them,
        begin - 1 .. end - 2, are read through row 0, which must hold all earlier ones."""

    @abstractmethod
    def open_text(self, text: Tensor, begin: int, end: int, encoder_input: Any = None) -> None:
        """Empties the cache and reads an encoder's input, if there is one, and the first begin - 1 tokens of a text
        [1, T] into row 0; it will be read on to position `end`."""

    @abstractmethod
    def cache_bytes(self) -> int:
        """Bytes that keys and values occupy now."""

    @abstractmethod
    def column_bytes(self) -> float:
        """Bytes of the keys and values of one position of one row, all layers."""


class Target(Model):
    """M_p, the model that speculative decoding speeds up."""

    def read_again(self, state: State) -> int:
        """Called before each round's `score`, for models whose cache cannot forget single tokens: reads the kept tokens
        of the round before again, behind a state from before it. Returns how many tokens of all rows were read."""
        return 0

    @abstractmethod
    def score(self, state: State, draft: Draft, keep_hidden: bool = False) -> Scores:
        """Runs M_p once on the last committed token and every guess ("Run M_p in parallel" of Algorithm 1). With
        `keep_hidden` the scores hold hidden states too."""

    @abstractmethod
    def rollback(self, state: State, draft: Draft, verdict: Verdict, scores: Scores, root: Tensor) -> None:
        """Keeps the accepted guesses in the cache and forgets the others. root [B] is the position of node 0,
        the last token that was committed before the round."""
