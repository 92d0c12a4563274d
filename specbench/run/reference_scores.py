"""Reads finished texts once more, by the stock module, for the verdict (`stats/losslessness.py`).

n new tokens of a text, V vocabulary, K tested guesses.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from specbench.config.memory import size
from specbench.decoding.encoder_input import EncoderInput
from specbench.decoding.sampling import Sampling
from specbench.executors.machine import free_bytes
from specbench.models.language_model import LanguageModel
from specbench.models.sizes import size_of
from specbench.stats.draw_sums import add_draws, add_guesses
from specbench.stats.estimates import Floats
from specbench.stats.losslessness import first_difference
from specbench.stats.reference_distribution import counted, largest_tv, law, stock_scores, tie
from specbench.stats.test_statistics import no_sums
from specbench.stats.verdict_records import LAW_BYTES, DrawnFrom, ReferenceScore, law_window

LONGEST = 4096  # tokens of a text that are read, its prompt included: eager attention holds their square
SHARE_OF_MEMORY = 0.25  # of what is free: more is not taken by one layer's attention
POSITIONS_AT_A_TIME = 64  # positions whose p is computed at a time


class SharedScores:
    """The stock module's logits of the texts of one group of requests: a text that `several` ways of decoding have
    written is read once, as long as all that are kept have LAW_BYTES at most."""

    def __init__(self, several: bool):
        self.several, self.room = several, LAW_BYTES
        self.kept: dict[tuple[int, ...], Tensor] = {}  # by row and text

    def __call__(
        self, row: int, model: LanguageModel, text: Tensor, begin: int, encoder_input: EncoderInput | None
    ) -> Tensor:
        """`stock_scores` of the text of a row, whose prompt and encoder's input are those of all ways."""
        if not self.several:
            return stock_scores(model, text, begin, encoder_input)
        key = (row, *text[0].tolist())
        if key in self.kept:
            return self.kept[key]
        logits = stock_scores(model, text, begin, encoder_input)
        held = logits.untyped_storage().nbytes()  # they may be a part of more
        if held <= self.room:
            self.kept[key] = logits
            self.room -= held
        return logits


def read(
    model: LanguageModel,
    prompt: Sequence[int],
    new: Sequence[int],
    evidence: DrawnFrom | None,
    plain: Sequence[int] = (),
    encoder_input: EncoderInput | None = None,
    scores: Callable[[LanguageModel, Tensor, int, EncoderInput | None], Tensor] = stock_scores,
) -> ReferenceScore:
    """Reads the tokens `new` after a prompt, and after an encoder's input if there is one, as many as fit LONGEST.
    Above temperature 0 it needs `evidence`; at temperature 0 it compares p before the argmax, which is kept there, and
    looks at the first token of `plain` decoding's text that differs. Raises MemoryError or RuntimeError if the device
    has no room for it."""
    clock = time.perf_counter()
    text, sampling = readable(model, prompt, new, encoder_input), model.sampling
    logits = scores(model, text, len(prompt), encoder_input)
    tokens, most = text[0, len(prompt) :], logits.amax(-1)
    if sampling.greedy:
        reading = _greedy(logits, tokens, tie(logits, model.dtype, sampling), plain)
        if evidence is not None:
            _compare_logits(reading, logits, model.dtype, replace(sampling, temperature=1.0), evidence)
    else:
        assert evidence is not None and len(evidence.chosen) == len(new), "one record for each token"
        reading = _sampled(logits, tokens, model.dtype, sampling, evidence)
    reading.finite = reading.finite and bool(most.isfinite().all())  # false also if a logit is not a number
    reading.seconds = time.perf_counter() - clock
    return reading


def readable(
    model: LanguageModel, prompt: Sequence[int], new: Sequence[int], encoder_input: EncoderInput | None
) -> Tensor:
    """The text [1, T], as much of it as is read. Raises MemoryError if that is none of the new tokens."""
    text = torch.tensor([[*prompt, *new][:LONGEST]], device=model.device)
    if text.shape[1] <= len(prompt):
        raise MemoryError(f"its prompt has {len(prompt)} tokens, and at most {LONGEST} are read again")
    refuse_too_long(model, max(text.shape[1], len(encoder_input or ())))
    return text


def refuse_too_long(model: LanguageModel, tokens: int) -> None:
    """Raises MemoryError if eager attention over a text would take much of the memory that is free: on a CPU nothing
    else would say so in time."""
    heads = size_of(model.config, "num_attention_heads") or 1
    needed = 2 * heads * tokens**2 * 4
    if needed > SHARE_OF_MEMORY * free_bytes(model.device):
        raise MemoryError(f"eager attention over {tokens} tokens needs {size(needed)}")


def _greedy(logits: Tensor, tokens: Tensor, tolerance: Tensor, plain: Sequence[int]) -> ReferenceScore:
    """The reading at temperature 0, from logits [n, V], tokens [n] and tolerance [n]."""
    best = logits.topk(2).values.double()
    short = best[:, 0] - logits.gather(-1, tokens[:, None])[:, 0].double()
    gap = best[:, 0] - best[:, 1]
    reading = ReferenceScore(len(tokens), gap=host(gap), short=host(short), tolerance=host(tolerance))
    place = first_difference(tokens.tolist(), plain)
    if place < min(len(tokens), len(plain)):
        reading.plain_short = float(best[place, 0] - logits[place, plain[place]])
    return reading


def _compare_logits(
    found: ReferenceScore, logits: Tensor, dtype: torch.dtype, sampling: Sampling, evidence: DrawnFrom
) -> None:
    """Adds how far the softmax of the stock module's logits [n, V] is from that of the logits that the decoder chose
    tokens by, in its calls on drafts, where it was kept."""
    for begin in range(0, len(logits), POSITIONS_AT_A_TIME):
        stock = logits[begin : begin + POSITIONS_AT_A_TIME]
        decoder, kept = law_window(evidence.laws, begin, stock)
        tv = (decoder.double() - stock.double().softmax(-1)).abs().sum(-1)[kept] / 2
        found.tv = np.append(found.tv, host(tv))
        found.rounding = np.append(found.rounding, host(largest_tv(stock, dtype, sampling)[kept]))


def _sampled(
    logits: Tensor, tokens: Tensor, dtype: torch.dtype, sampling: Sampling, evidence: DrawnFrom
) -> ReferenceScore:
    """The reading above temperature 0, from logits [n, V] and tokens [n]."""
    found = ReferenceScore(len(tokens), tested=len(evidence.at), sums=no_sums())
    found.finite = bool(np.isfinite([*evidence.p, *evidence.q]).all())
    add_guesses(found, evidence, tokens.tolist())
    for begin in range(0, len(tokens), POSITIONS_AT_A_TIME):
        here = slice(begin, begin + POSITIONS_AT_A_TIME)
        _add_chunk(found, logits[here], tokens[here], dtype, sampling, evidence, begin)
    return found


def _add_chunk(
    found: ReferenceScore,
    logits: Tensor,
    tokens: Tensor,
    dtype: torch.dtype,
    sampling: Sampling,
    evidence: DrawnFrom,
    begin: int,
) -> None:
    """Adds what is read of n tokens from position `begin` on: logits [n, V], tokens [n]."""
    decoder, kept = law_window(evidence.laws, begin, logits)
    p = law(logits, decoder, kept, dtype, sampling)
    counts = counted(logits, kept, dtype, sampling)
    chosen = p.gather(1, tokens[:, None])[:, 0]
    drawn = torch.tensor(evidence.chosen[begin : begin + len(tokens)], dtype=torch.double, device=p.device)
    tv = (decoder.double() - p).abs().sum(-1)[kept] / 2
    found.finite &= bool((drawn + chosen).isfinite().all() and tv.isfinite().all())
    found.impossible += int(((drawn == 0) | ((chosen == 0) & counts)).sum())
    found.tv = np.append(found.tv, host(tv))
    found.rounding = np.append(found.rounding, host(largest_tv(logits, dtype, sampling)[kept]))
    add_draws(found, evidence, begin, p, tokens, counts, decoder.double() * kept[:, None])


def host(values: Tensor) -> Floats:
    """The values in the host's memory."""
    found: Floats = values.double().cpu().numpy()
    return found


def ends_where_it_should(
    tokens: Sequence[int], limit: int, stop_tokens: Sequence[int], strings: Sequence[str], decode: Callable[..., str]
) -> bool:
    """Whether the new tokens of a text end at the first stop token or stop string, or else at `limit` tokens. `decode`
    is the tokenizer's."""
    before, whole = (decode(list(part), skip_special_tokens=True) for part in (tokens[:-1], tokens))
    stopped_before = bool(set(tokens[:-1]) & set(stop_tokens)) or any(string in before for string in strings)
    stops = tokens[-1] in stop_tokens or any(string in whole for string in strings)
    return not stopped_before and (stops or len(tokens) == limit)
