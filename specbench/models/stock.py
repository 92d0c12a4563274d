"""A plain forward pass of the stock module: the second source of p, which shares no cache, mask or executor of ours."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.logits_process import SuppressTokensLogitsProcessor

from specbench.models.language_model import LanguageModel


def stock_logits(model: LanguageModel, text: Tensor, begin: int, encoder_tokens: Sequence[int] | None = None) -> Tensor:
    """Logits [T - begin, V] that predict the tokens begin .. T - 1 of a text [1, T] after an encoder's input, if there
    is one, from one forward without a cache, with the masks and positions that transformers makes itself and its eager
    attention."""
    module = model.stock_module()
    if encoder_tokens is not None:
        return _of_encoder_decoder(module, text, begin, encoder_tokens)
    kept = {"logits_to_keep": text.shape[1] - begin} if model.decoder.skips_logits else {}
    with eager_attention(module):
        output = module(input_ids=text[:, :-1], use_cache=False, **kept)
    logits: Tensor = output.logits[0, begin - text.shape[1] :]
    return logits


def _of_encoder_decoder(module: Any, text: Tensor, begin: int, encoder_tokens: Sequence[int]) -> Tensor:
    """`stock_logits` of a module that reads its input again, without the tokens that generate() never draws."""
    read = torch.tensor([list(encoder_tokens)], device=text.device)
    with eager_attention(module):
        output = module(input_ids=read, decoder_input_ids=text[:, :-1], use_cache=False)
    logits: Tensor = output.logits[0, begin - text.shape[1] :]
    options = module.generation_config
    never = [*(options.suppress_tokens or []), *(w[0] for w in options.bad_words_ids or [] if len(w) == 1)]
    return SuppressTokensLogitsProcessor(never, device=str(text.device))(text, logits) if never else logits


@contextmanager
def eager_attention(module: PreTrainedModel) -> Iterator[None]:
    """Inside this context the module uses transformers' own eager attention."""
    before = module.config._attn_implementation
    module.set_attn_implementation("eager")
    try:
        yield
    finally:
        module.set_attn_implementation(before)
