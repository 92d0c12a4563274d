"""Multiply-adds and bytes of weights per token, for the ratio c_hat of Definition 3.10 and for the bandwidth."""

from typing import Any

from transformers import PreTrainedModel

from specbench.decoding.executor import Executor


def per_token(module: PreTrainedModel, executor: Executor) -> tuple[int, int]:
    """Multiply-adds with the weights of a module in a forward of one token (Definition 3.10), and bytes of weights that
    it reads. An embedding that is not also the output matrix is looked up, not multiplied."""
    head: Any = module.get_output_embeddings()
    embedding: Any = module.get_input_embeddings()
    stored = executor.stored(module)
    if any(weight is embedding.weight for weight in head.parameters()):
        return stored.numbers, stored.read
    return stored.numbers - embedding.weight.numel(), stored.read - embedding.weight.nbytes
