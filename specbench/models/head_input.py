"""The last hidden states of a causal model, which are the inputs of its output matrix."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel


@contextmanager
def head_inputs(module: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Yields a list to which each forward inside this context appends the inputs [B, N, H] of the model's output
    matrix: its last hidden states."""
    found: list[Tensor] = []
    head: Any = module.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, given: found.append(given[0]))
    try:
        yield found
    finally:
        hook.remove()
