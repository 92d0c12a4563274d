"""Reads the drafter's q of finished texts once more, for the verdict on alpha: `Lossless.alpha_own`.

n new tokens of a text, V vocabulary, K tested guesses.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbench.data.prompts import Request
from specbench.drafters.base import Drafter
from specbench.models.language_model import LanguageModel
from specbench.run.reference_scores import host, readable
from specbench.stats.draw_sums import normal
from specbench.stats.position_stats import CHUNK, asked, opened
from specbench.stats.records import DecodedRequest, Result
from specbench.stats.reference_distribution import largest_tv, law, stock_scores, tie
from specbench.stats.test_statistics import of_tokens
from specbench.stats.verdict_records import DrawnFrom, ReferenceScore, law_window

ASKED_TWICE = 1e-5  # total variation between two answers of one table, at most


@dataclass(frozen=True)
class _Guesses:
    """Some tested guesses of a text."""

    evidence: DrawnFrom
    at: Tensor  # [K], positions among the new tokens
    tokens: Tensor  # [K]
    reported: Tensor  # [K], q of them

    def parts(self) -> Iterator["_Guesses"]:
        """The guesses, a few at a time."""
        for part in zip(*(values.split(CHUNK) for values in (self.at, self.tokens, self.reported)), strict=True):
            yield _Guesses(self.evidence, *part)

    def kept(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """The decoder's q [K, V], and where it was kept [K]. `like` has V columns and the same device."""
        rows = [law_window(self.evidence.drafts, place, like[:1]) for place in self.at.tolist()]
        return torch.cat([q for q, _ in rows]), torch.cat([kept for _, kept in rows])

    def distance(self, stock: Tensor) -> Tensor:
        """Total variation [K] between stock [K, V] and q: where q was not kept, by its value of the guess."""
        q, kept = self.kept(stock)
        of_guess = (stock.gather(1, self.tokens[:, None])[:, 0] - self.reported).abs()
        return torch.where(kept, (stock - normal(q)).abs().sum(-1) / 2, of_guess)


def read_guesses(
    found: ReferenceScore, drafter: Drafter, target: LanguageModel, result: Result, evidence: DrawnFrom | None
) -> None:
    """Adds to a reading the total variation between the q of tested guesses and that of the drafter's stock module or,
    without one, of the drafter when it is asked again. Raises MemoryError or RuntimeError if the device has no room."""
    clock, request = time.perf_counter(), result.request
    evidence = of_rounds(result.speculative) if evidence is None or target.sampling.greedy else evidence
    found.q_unread = why_not(drafter, target) if evidence.at else ""
    new = result.speculative.tokens[: max(0, drafter.context - len(request.tokens))][: found.tokens]
    firsts = (1,) if drafter.fixed_in_round else evidence.place
    known = [i for i, at in enumerate(evidence.at) if at < len(new) and evidence.place[i] in firsts]
    if found.q_unread or not known:
        return
    at, tokens, reported = (
        torch.tensor([values[i] for i in known], device=target.device)
        for values in (evidence.at, evidence.guess, np.array(evidence.q))
    )
    guesses = _Guesses(evidence, at, tokens, reported)
    if drafter.models:
        whole = _stock_logits(drafter.models[0], request, new)
        tv, most = _of_module(drafter.models[0], whole, guesses)
        if not drafter.models[0].sampling.greedy:
            _add_untested(found, drafter.models[0], whole, evidence, new)
    else:
        tv = _of_table(drafter, target, request, new, guesses)
        most = torch.full_like(tv, ASKED_TWICE)
    found.q_tv, found.q_rounding = host(tv), host(most)
    found.seconds += time.perf_counter() - clock


def why_not(drafter: Drafter, target: LanguageModel) -> str:
    """Why q cannot be read again; empty if it can."""
    if not drafter.reads_text:
        return "what this drafter says depends on more than the text"
    if len(drafter.models) > 1:
        return "several models draft"
    if not target.sampling.greedy:
        return "its guesses are the likeliest tokens, without q" if drafter.only_likeliest else ""
    greedy = all(model.sampling.greedy for model in drafter.models)
    return "" if greedy and not drafter.trees else "at temperature 0 it reads chains of likeliest guesses only"


def of_rounds(decoded: DecodedRequest) -> DrawnFrom:
    """The tested guesses of a text of chains, from its rounds, as point masses."""
    found = DrawnFrom()
    for r in decoded.rounds:
        guesses = [*decoded.tokens[r.position : r.position + r.accepted], *([] if r.rejected is None else [r.rejected])]
        found.guess += guesses[: r.tested]
        found.at += range(r.position, r.position + r.tested)
        found.place += range(1, r.tested + 1)
        found.q += [1.0] * r.tested
    return found


def _stock_logits(model: Any, request: Request, new: Sequence[int]) -> Tensor:
    """Penalised logits [n, V] of new tokens by the stock module of a drafter's `LanguageModel`."""
    read, begin = request.encoder_input if model.encoder is not None else None, len(request.tokens)
    text = readable(model, request.tokens, new, read)
    return stock_scores(model, text, begin, read)


def _of_module(model: Any, whole: Tensor, guesses: _Guesses) -> tuple[Tensor, Tensor]:
    """Total variation [K] of guesses, and the largest that rounding explains, from the stock module's logits [n, V]. At
    temperature 0 it is 1 for a guess that is not the likeliest token, or a tie."""
    found = []
    for few in guesses.parts():
        logits = whole[few.at]
        if model.sampling.greedy:
            short = logits.amax(-1) - logits.gather(1, few.tokens[:, None])[:, 0]
            wrong = ~(short.double() <= tie(logits, model.dtype, model.sampling))
            found.append((wrong.double(), torch.zeros_like(few.reported)))
        else:
            stock = law(logits, *few.kept(logits), model.dtype, model.sampling)
            found.append((few.distance(stock), largest_tv(logits, model.dtype, model.sampling)))
    return torch.cat([tv for tv, _ in found]), torch.cat([most for _, most in found])


def _add_untested(found: ReferenceScore, model: Any, whole: Tensor, evidence: DrawnFrom, new: Sequence[int]) -> None:
    """Adds tokens where no guess was tested, under the law that they have if q is subtracted there too, from the logits
    [n, V] of the drafter's stock module."""
    tokens, free = torch.tensor(new, device=whole.device), torch.ones(len(whole), dtype=torch.bool, device=whole.device)
    free[[at for at in evidence.at if at < len(whole)]] = False
    for begin in range(0, len(whole) if evidence.laws else 0, CHUNK):
        here = slice(begin, begin + CHUNK)
        p, kept = law_window(evidence.laws, begin, whole[here])
        kept &= free[here]
        q = law(whole[here][kept], p[kept], torch.zeros_like(kept[kept]), model.dtype, model.sampling)
        found.sums = found.sums + of_tokens("own place", normal(p[kept]), tokens[here][kept], q)


def _of_table(
    drafter: Drafter, target: LanguageModel, request: Request, new: Sequence[int], guesses: _Guesses
) -> Tensor:
    """Total variation [K] between the q of guesses and what a drafter without models says when it is asked for each of
    them alone."""
    begin = len(request.tokens)
    state = opened(drafter, torch.tensor([[*request.tokens, *new]], device=target.device), request.encoder_input)
    found = []
    for few in guesses.parts():
        laws = [asked(drafter, target.vocab_size, state, begin + at, begin + at + 1)[0] for at in few.at.tolist()]
        found.append(few.distance(torch.cat(laws).double()))
    return torch.cat(found)
