"""The last hidden states of a causal model, which are the inputs of its output matrix."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedModel


class Listener(Protocol):
    """Hears of the hidden states of prompts when a target reads them."""

    def hear(self, row: int | None, begin: int, hidden: Tensor) -> None:
        """Hidden states [b, n, H] of the tokens from position `begin` on, of one row or of all (None)."""

    def forget(self) -> None:
        """The target's cache was emptied: no prompt that was heard of is read on."""


@contextmanager
def head_inputs(module: PreTrainedModel, select: Callable[[Tensor], Tensor] | None = None) -> Iterator[list[Tensor]]:
    """Yields a list to which each forward inside this context appends the inputs [B, N, H] of the model's output
    matrix: its last hidden states. With `select` the matrix multiplies only what it returns of them, [B, K, H], unless
    the executor computes all logits in one program."""
    found: list[Tensor] = []

    def note(_: Any, given: tuple[Tensor, ...]) -> tuple[Tensor] | None:
        found.append(given[0])
        return None if select is None else (select(given[0]),)

    head: Any = module.get_output_embeddings()
    hook = head.register_forward_pre_hook(note)
    try:
        yield found
    finally:
        hook.remove()
