"""A plain forward pass of the stock module: the second source of p, which shares no cache, mask or executor of ours."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from specbench.decoding.sampling import Sampling
from specbench.decoding.sequence import EncoderInput
from specbench.models.generation import generation_config, never_drawn
from specbench.models.language_model import LanguageModel
from specbench.models.sizes import HALVES

Known = dict[tuple[int, int], Tensor]  # logits of one text, by model and number of tokens
LONGEST_EAGER = 4096  # tokens of a text that eager attention reads, which holds their square: SDPA reads longer ones


def stock_scores(
    model: LanguageModel,
    text: Tensor,
    begin: int,
    encoder_input: Sequence[int] | None = None,
    sampling: Sampling | None = None,
    known: Known | None = None,
) -> Tensor:
    """Logits [T - begin, V] of the target's tokens from `begin` on of a text [1, T], by the stock module of target or
    drafter, after the repetition penalty of `sampling`, by default the model's own. `known` has what was read of the
    text before, and takes what is read now."""
    read = encoder_input if model.encoder is not None else None
    key = (id(model), text.shape[1])
    own = known.get(key) if known is not None else None
    if own is None:
        own = stock_logits(model, model.vocabulary.read(text), begin, read)
    if known is not None:
        known[key] = own
    return penalised(model.vocabulary.fit(own.float()), text, begin, sampling or model.sampling)


def penalised(logits: Tensor, text: Tensor, begin: int, sampling: Sampling) -> Tensor:
    """Logits [n, V] of the tokens from `begin` on of a text [1, T], after the repetition penalty of each position, by
    transformers' own processor."""
    if sampling.repetition_penalty == 1:
        return logits
    processor = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
    return torch.cat([processor(text[:, : begin + i], logits[i : i + 1]) for i in range(len(logits))])


def stock_logits(
    model: LanguageModel, text: Tensor, begin: int, encoder_input: EncoderInput | None = None, suppressing: bool = True
) -> Tensor:
    """Logits [T - begin, V] that predict the tokens begin .. T - 1 of a text [1, T] after an encoder's input, if there
    is one, from one forward without a cache, with the masks and positions that transformers makes itself and its own
    attention. With `suppressing` tokens that generate() never draws are impossible."""
    module = model.stock
    eager = text.shape[1] <= LONGEST_EAGER or not module._supports_sdpa
    with own_attention(module, "eager" if eager else "sdpa"), _unrounded(module):
        if encoder_input is not None:
            from specbench.models.encoder_decoder import plain_logits

            logits = plain_logits(module, text[:, :-1], encoder_input)
        else:
            kept = {"logits_to_keep": text.shape[1] - begin} if model.decoder.skips_logits else {}
            logits = module(input_ids=text[:, :-1], use_cache=False, **kept).logits
    logits = logits[0, begin - text.shape[1] :]
    return _suppressed(module, text, logits, model.start_tokens) if suppressing else logits


def _suppressed(module: Any, text: Tensor, logits: Tensor, start: Sequence[int] | None) -> Tensor:
    """Logits [n, V] of the last tokens of a text [1, T] without those that generate() never draws, and behind the
    `start` of an encoder-decoder's text those that it does not draw first, by its own processors."""
    options, device = generation_config(module), str(text.device)
    if options is None:
        return logits
    if start is not None and options.begin_suppress_tokens:
        at_first = SuppressTokensAtBeginLogitsProcessor(options.begin_suppress_tokens, len(start), device=device)
        ends = range(text.shape[1] - len(logits), text.shape[1])
        logits = torch.cat([at_first(text[:, :end], logits[i : i + 1]) for i, end in enumerate(ends)])
    never = never_drawn(options)
    return SuppressTokensLogitsProcessor(never, device=device)(text, logits) if never else logits


def _unrounded(module: PreTrainedModel) -> AbstractContextManager[None]:
    """A context in which the module's logits are float32."""
    if next(module.parameters()).dtype not in HALVES:
        return nullcontext()
    from specbench.models.float_logits import float_logits

    return float_logits(module)


@contextmanager
def own_attention(module: PreTrainedModel, name: str = "eager") -> Iterator[None]:
    """Inside this context the module uses an attention function of transformers."""
    before = module.config._attn_implementation
    module.set_attn_implementation(name)
    try:
        yield
    finally:
        module.set_attn_implementation(before)
