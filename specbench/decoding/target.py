"""What the decoder asks of a model: reading text into a cache, and of the target, scoring a draft."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specbench.component import Component
from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.executor import Executor
from specbench.decoding.sampling import Sampling
from specbench.decoding.state import Job, State

READ_CHUNK = 2048  # tokens per row and forward where nothing else says how much


@dataclass(frozen=True)
class Scores:
    """What a target made of a draft. An entry is the last committed token (0) or node i (i + 1)."""

    p: Tensor  # [B, N + 1, V], the law after each entry
    width: int  # tokens of each row that the call read
    hidden: Tensor | None = None  # [B, width, H], what the output matrix was applied to, if it was asked for
    place: Tensor | None = None  # [B, N + 1], where each entry was read, if guesses shared places

    def hidden_after(self, verdict: Verdict) -> Tensor:
        """[B, H]: the hidden state of the last accepted guess, from which the token t was drawn."""
        assert self.hidden is not None
        n = verdict.accepted
        entry = n
        if verdict.path is not None and verdict.path.shape[1]:
            node = verdict.path.gather(1, (n - 1).clamp(min=0)[:, None])[:, 0]
            entry = torch.where(n > 0, node + 1, 0)
            if self.place is not None:
                entry = self.place.gather(1, entry[:, None])[:, 0]
        return self.hidden[torch.arange(len(n), device=n.device), entry]


class Model(Component, ABC):
    """A language model with a cache, which reads the texts of rows that come and go.

    `cached[b]` leading tokens of row b are in the cache. A forward that begins at position s forgets what
    was read at and beyond s: this is the rollback.
    """

    name: str
    tokenizer: Any
    chat_template: bool = False  # whether prompts go through the tokenizer's chat template
    random_weights: bool = False
    sampling: Sampling
    executor: Executor
    device: torch.device
    dtype: torch.dtype  # the precision of its arithmetic
    weight_bytes: int
    step_bytes: float  # bytes of weights that a one-token step reads
    operations_per_token: float  # multiply-adds with weights: what c_hat compares (Definition 3.10)
    cached: list[int]

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """V, rows of the output matrix."""

    @property
    @abstractmethod
    def context(self) -> int:
        """Positions that the model was made for."""

    @property
    @abstractmethod
    def stop_tokens(self) -> list[int]:
        """Ids of the tokens that end a text."""

    @abstractmethod
    def allocate(self, rows: int, columns: int) -> None:
        """An empty cache of at least `columns` positions for each row."""

    @abstractmethod
    def prefill(self, state: State, upto: int | None = None, start: int = 0, chunk: int = READ_CHUNK) -> None:
        """Reads committed tokens of all rows into the cache, all but the last of each row."""

    @abstractmethod
    def read(self, state: State, row: int, begin: int, end: int) -> None:
        """Reads the committed tokens begin .. end - 1 of one row; the others are left alone."""

    @abstractmethod
    def may_admit(self, job: Job, columns: int) -> bool:
        """Whether the cache has room for this request, of at most `columns` columns."""

    @abstractmethod
    def admit(self, row: int, job: Job, columns: int) -> None:
        """Gives a row of the cache to a request. `cached[row]` of its tokens may be there already."""

    @abstractmethod
    def prompt_read(self, row: int, job: Job) -> None:
        """The row's prompt has been read completely, and may be shared with other rows."""

    @abstractmethod
    def release(self, row: int) -> None:
        """The row's request has ended."""

    @abstractmethod
    def read_text(self, text: Tensor, begin: int, end: int) -> Tensor:
        """Logits [1, end - begin, V] after each of the tokens begin - 1 .. end - 2 of a text [1, T], read
        through row 0, which must hold what comes before."""

    @abstractmethod
    def open_text(self, text: Tensor, begin: int, end: int) -> None:
        """Empties the cache and reads the first begin - 1 tokens of a text [1, T] into row 0."""

    @abstractmethod
    def cache_bytes(self) -> int:
        """Bytes that keys and values occupy now."""

    @abstractmethod
    def column_bytes(self) -> float:
        """Bytes of one position's keys and values."""


class Target(Model):
    """M_p: what speculative decoding speeds up."""

    @abstractmethod
    def score(self, state: State, draft: Draft, keep_hidden: bool = False) -> Scores:
        """The target's distributions after the last committed token and after each guess, from one
        forward on all of them."""

    @abstractmethod
    def settle(self, state: State, draft: Draft, verdict: Verdict, scores: Scores, base: Tensor) -> None:
        """Keeps of the round's guesses what was accepted. base [B] is the column of node 0."""
