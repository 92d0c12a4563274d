"""Arithmetic operations per token, for the ratio c_hat of Definition 3.10."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel


def operations_per_token(module: PreTrainedModel, weights: Sequence[Tensor]) -> int:
    """Multiply-adds with the weights (of any shape) of a module in a forward of one token (Definition 3.10). An
    embedding that is not also the output matrix is looked up, not multiplied."""
    head: Any = module.get_output_embeddings()
    embedding: Any = module.get_input_embeddings()
    total = sum(weight.numel() for weight in weights)
    tied = any(weight is embedding.weight for weight in head.parameters())
    return total if tied else total - int(embedding.weight.numel())
