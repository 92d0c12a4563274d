"""A plain forward pass of the stock module: the second source of p, which shares no cache, mask or executor of ours."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from transformers import PreTrainedModel

from specbench.models.language_model import LanguageModel


def stock_logits(model: LanguageModel, text: Tensor, begin: int) -> Tensor:
    """Logits [T - begin, V] that predict the tokens begin .. T - 1 of a text [1, T], from one forward without a cache,
    with the masks and positions that transformers makes itself and its eager attention."""
    module = model.stock_module()
    kept = {"logits_to_keep": text.shape[1] - begin} if model.can_skip_logits else {}
    with eager_attention(module):
        output = module(input_ids=text[:, :-1], use_cache=False, **kept)
    logits: Tensor = output.logits[0, begin - text.shape[1] :]
    return logits


@contextmanager
def eager_attention(module: PreTrainedModel) -> Iterator[None]:
    """Inside this context the module uses transformers' own eager attention."""
    before = module.config._attn_implementation
    module.set_attn_implementation("eager")
    try:
        yield
    finally:
        module.set_attn_implementation(before)
