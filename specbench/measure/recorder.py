"""The round hook that measures: each round as numbers by row, computed outside the timed parts.

B rows, N nodes of a draft, D steps of its depth, V vocabulary, T tokens of a text.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specbench.decoding.draft import Draft, Scores, Verdict
from specbench.decoding.state import State
from specbench.decoding.timer import Stage
from specbench.decoding.verify import dense, output_distribution
from specbench.measure.record import Rounds
from specbench.measure.sums import Floats
from specbench.verifiers.base import Verifier

NUMBERS = ("tv", "kl", "bound")  # how far the output distribution of a lossy verifier is from p
ROOM = 256e6  # bytes of p and q that are kept for one group of requests, decoded by one method


class Guess(NamedTuple):
    """A tested guess x: of a tree the first one that was tried at its step."""

    at: int  # position among the new tokens
    token: int
    p: float  # the decoder's p(x)
    q: float  # the drafter's q(x)
    first: bool  # whether it is the first of its round
    last: bool  # and the last one of its draft


@dataclass
class Draws:
    """What stood behind the tokens of one text, for the verdict."""

    rule: str | None = None  # how a guess x is accepted: with min(1, p(x) / q(x)), "p / q"; with p(x), "p"
    guesses: list[Guess] = field(default_factory=list)
    # p [m, V] from a position on, before the argmax of temperature 0, and q [m, V] of tested guesses, where kept.
    target: list[tuple[int, Tensor]] = field(default_factory=list)
    drafter: list[tuple[int, Tensor]] = field(default_factory=list)


class Counts(NamedTuple):
    """The first numbers of a round and row; `STEPS` numbers of each step follow."""

    kept: int  # tokens that the row kept
    accepted: int  # guesses, by the verifier
    gamma: int  # depth of the draft
    drafted: int  # nodes
    tested: int  # steps that were tested, none beyond a stop
    judged: int  # steps that had a guess


STEPS = ("beta", "guess", "p", "q", *NUMBERS)  # of each step; the last of them only of lossy verifiers


@dataclass
class _Call:
    """One round of all rows."""

    owners: list[int]  # by row, the number of its request
    lenience: float
    width: int  # tokens of each row that the target's call read
    steps: int  # drafter steps
    depth: int  # D
    numbers: Tensor  # [B, K]
    p: Tensor | None  # [B, D + 1, V], kept along the path
    q: Tensor | None  # [B, D, V]


class Recorder:
    """Called after each round. `reduce` is `round_numbers`, or an executor's version of it. With `keep` it keeps p and
    q for the verdict, as far as there is room; with `drifts` it measures the distance of A.5's distribution from p."""

    def __init__(
        self, verifier: Verifier, reduce: Callable[..., Tensor] | None = None, keep: bool = False, drifts: bool = False
    ):
        self.verifier, self.reduce = verifier, reduce or round_numbers
        self.drifts, self._room = drifts, ROOM if keep else 0.0
        self._calls: list[_Call] = []

    def __call__(self, state: State, scores: Scores, draft: Draft, verdict: Verdict, kept: Tensor) -> None:
        """Stores the numbers of a round; kept [B] is the number of tokens that each row kept."""
        judge = self.verifier.under(state)
        drift = (judge.lenience, judge.greedy) if self.drifts else None
        numbers = self.reduce(scores.p, draft, verdict, kept, judge.beta, drift)
        p, q = self._kept(scores, draft, verdict, kept)
        # A CUDA graph overwrites its outputs in the next round.
        self._calls.append(
            _Call(state.request_ids, judge.lenience, scores.width, state.drawn, draft.depth, numbers.clone(), p, q)
        )

    def _kept(
        self, scores: Scores, draft: Draft, verdict: Verdict, kept: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Copies of p [B, D + 1, V] and q [B, D, V] along the path; None if there is no room left for them."""
        if self._room <= 0:
            return None, None
        p, path, _ = chosen_path(scores.p if scores.logits is None else scores.logits, draft, verdict, kept)
        p = p.clone() if scores.logits is None else p.softmax(-1)
        q = None if path.probs is None else path.probs.clone()
        self._room -= p.nbytes + (0 if q is None else q.nbytes)
        return (p, q) if self._room >= 0 else (None, None)

    def rounds(self, calls: Sequence[Mapping[Stage, float]], requests: int) -> list[Rounds]:
        """The rounds of each of so many requests; `calls` are the seconds of each by stage."""
        found = [Rounds() for _ in range(requests)]
        for (call, active), seconds in zip(self._rows(), calls, strict=True):
            names = ("draft", "verify", "accept", "host")
            shared: dict[str, Any] = {name: seconds.get(Stage(name), 0.0) for name in names}
            shared |= {"steps": call.steps, "rows": len(active), "width": call.width, "lenience": call.lenience}
            for _, owner, _, counts, steps in active:
                own = counts.kept == counts.accepted + 1  # the last token is no guess
                found[owner].add(
                    gamma=counts.gamma,
                    drafted=counts.drafted,
                    tested=counts.tested,
                    accepted=min(counts.accepted, counts.kept),
                    tokens=counts.kept,
                    recovered=int(own and counts.accepted < counts.judged),
                    bonus=int(own and counts.accepted == counts.judged),
                    betas=steps[0, : counts.tested].tolist(),
                    **shared,
                )
        return found

    def draws(self, requests: int) -> list[Draws]:
        """What stood behind the tokens of each of so many requests."""
        found = [Draws(self.verifier.keeps_guess) for _ in range(requests)]
        for call, active in self._rows():
            for row, owner, begin, counts, steps in active:
                own, tested = found[owner], counts.tested
                own.guesses += [
                    Guess(begin + step, int(x), p, q, step == 0, step == counts.judged - 1)
                    for step, (x, p, q) in enumerate(steps[1:4, :tested].T.tolist())
                ]
                if call.p is not None:
                    own.target.append((begin, call.p[row, : counts.kept]))
                if call.q is not None:
                    own.drafter.append((begin, call.q[row, :tested]))
        return found

    def drift(self, requests: int) -> list[dict[str, float] | None]:
        """The sums over tested positions of each request, and the largest bound; None if nothing drifts."""
        if not self.drifts:
            return [None] * requests
        found = [dict.fromkeys((*NUMBERS, "positions"), 0.0) for _ in range(requests)]
        for _, active in self._rows():
            for _, owner, _, counts, steps in active:
                tv, kl, bound = steps[4:, : counts.tested]
                own = found[owner]
                own["tv"], own["kl"] = own["tv"] + float(tv.sum()), own["kl"] + float(kl.sum())
                own["bound"] = max(own["bound"], float(bound.max(initial=0.0)))
                own["positions"] += counts.tested
        return [*found]

    def _rows(self) -> Iterator[tuple[_Call, list[tuple[int, int, int, Counts, Floats]]]]:
        """Each round with the rows that kept tokens: row, request, position of the first token, counts and numbers of
        its steps [len(STEPS), D]. The lengths that the host knew during a round may be late, so they are counted."""
        lengths: dict[int, int] = {}
        for call in self._calls:
            active = []
            for row, (owner, numbers) in enumerate(zip(call.owners, call.numbers.cpu().numpy(), strict=True)):
                counts = Counts(*map(int, numbers[: len(Counts._fields)]))
                if counts.kept > 0:
                    steps = numbers[len(Counts._fields) :].reshape(-1, call.depth) if call.depth else np.zeros((7, 0))
                    active.append((row, owner, lengths.get(owner, 0), counts, steps))
                    lengths[owner] = lengths.get(owner, 0) + counts.kept
            yield call, active


def round_numbers(
    p: Tensor, draft: Draft, verdict: Verdict, kept: Tensor, beta_of: Callable[..., Tensor], drift: Any = None
) -> Tensor:
    """A round as float64 numbers by row [B, len(Counts) + len(STEPS) D]: `Counts`, then each of STEPS for all steps;
    those of the drift only with `drift`, lenience and whether the temperature is 0. p [B, N + 1, V], kept [B]."""
    beta, (along, path, tested) = beta_of(p, draft, verdict).double(), chosen_path(p, draft, verdict, kept)
    drafted = draft.exists().sum(1)
    counts = torch.stack([kept, verdict.accepted, draft.steps(), drafted, tested, path.count], 1).double()
    before, guess, q = along[:, :-1], path.tokens[..., None], path.probs
    parts = [
        counts,
        beta,
        guess[..., 0].double(),
        before.gather(-1, guess)[..., 0].double(),
        torch.ones_like(beta) if q is None else q.gather(-1, guess)[..., 0].double(),
    ]
    if drift is not None:
        parts += drift_of_steps(before, dense(path, p.shape[-1]), *drift).unbind(-1)
    return torch.cat(parts, 1)


def drift_of_steps(p: Tensor, q: Tensor, lenience: float, greedy: bool) -> Tensor:
    """The NUMBERS [..., 3] of steps with p [..., V] and q [..., V], float64: total variation between the output
    distribution s and p; KL(s | p) in nats; the largest s(x) l / p(x), which is at most 1 (A.5). At temperature 0 p is
    that before the argmax: 1 - s(best), log p lost against the best token, and the largest s(x) l max p / p(x)."""
    p, q = (values.double() / values.double().sum(-1, keepdim=True).clamp(min=1e-300) for values in (p, q))
    s, _ = output_distribution(p, q, lenience, greedy)
    positive = p.clamp(min=1e-300)
    if greedy:
        most, best = p.max(-1, keepdim=True)
        tv = 1 - s.gather(-1, best)[..., 0]
        kl = (s * (most.log() - positive.log())).sum(-1)
        bound = (s * lenience * most / positive).amax(-1)
    else:
        tv = (s - p).abs().sum(-1) / 2
        kl = (torch.xlogy(s, s) - torch.xlogy(s, positive)).sum(-1)
        bound = (s * lenience / positive).amax(-1)
    return torch.stack([tv, kl.clamp(min=0), bound], -1)


def chosen_path(p: Tensor, draft: Draft, verdict: Verdict, kept: Tensor) -> tuple[Tensor, Draft, Tensor]:
    """The path that was taken, from p [B, N + 1, V] and kept [B]: p at each step and after the last [B, D + 1, V], the
    first guess that was tried at each step as a chain, and how many were tested, none beyond a stop [B]."""
    if verdict.path is not None and not draft.is_chain:
        from specbench.decoding.verify_tree import accepted_path  # of trees alone

        entries, first, judged = accepted_path(draft, verdict)
        rows = torch.arange(len(entries), device=p.device)[:, None]
        q = None if draft.probs is None else draft.probs[rows, first]
        p, draft = p[rows, entries], Draft.chain(draft.tokens.gather(1, first), q, judged)
    tested = torch.minimum(torch.minimum(verdict.accepted + 1, draft.count), kept)
    return p, draft, tested
