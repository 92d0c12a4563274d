"""The hidden states that a model's output matrix is applied to."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel


@contextmanager
def head_inputs(module: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Yields a list to which each forward of a causal model inside the block appends the hidden states
    [B, N, H] that its output matrix is applied to."""
    found: list[Tensor] = []
    head: Any = module.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, given: found.append(given[0]))
    try:
        yield found
    finally:
        hook.remove()
