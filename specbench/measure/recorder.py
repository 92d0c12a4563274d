"""What happened in each round, as raw numbers: one record per round and row.

The betas and the losslessness statistics need p and q, which only exist during the round, so they
are reduced there, outside the timed laps, and read once at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.protocols import Verifier
from specbench.decoding.state import Draft, State, Verdict
from specbench.decoding.tree import along

Beta = Callable[[Tensor, Draft, Verdict], Tensor]  # `Verifier.beta`
LOG_FLOOR = -30.0  # log p of tokens that cannot be drawn, in nats


@dataclass
class Round:
    """One round of one request. Positions count from the first generated token."""

    row: int  # the request's place among those decoded together
    position: int
    gamma: int  # tokens drafted; of a tree, its depth
    accepted: int  # kept by the verifier and by the stop conditions
    tested: int  # guesses judged, none beyond a stop
    tokens: int  # tokens emitted
    recovered: int
    bonus: int
    accepted_before_stop: int  # by the verifier alone
    beta: list[float]  # of each tested position
    rejected: int | None = None  # the guess that was turned down
    log_p: tuple[float, float] = (0.0, 0.0)  # sums over emitted tokens: f - E f, and Var f
    draft_leak: tuple[float, float] = (0.0, 0.0)  # likewise over tested positions
    seconds: dict[str, float] = field(default_factory=dict)  # of all rows together, by lap
    rows: int = 1  # rows that decoded in it
    steps: int = 0  # drafter steps of all rows together: the longest draft among them
    lenience: float = 1.0
    width: int = 1  # tokens of each row that the target's call read


class Recorder:
    """The round hook that measures. `reduce` is `round_numbers`, or what an executor made of it;
    `width` says how many tokens of each row the target has just read."""

    def __init__(
        self,
        verifier: Verifier,
        greedy: bool = False,
        reduce: Callable[..., Tensor] | None = None,
        width: Callable[[], int] = lambda: 1,
    ):
        self.verifier, self.greedy, self.reduce, self.width = verifier, greedy, reduce or round_numbers, width
        self._rounds: list[tuple[list[int], list[int], dict[str, Any], Tensor]] = []

    def __call__(self, state: State, p: Tensor, draft: Draft, verdict: Verdict, kept: Tensor) -> None:
        judge = self.verifier.under(state)
        numbers = self.reduce(p, draft, verdict, kept, judge.beta, self.greedy).clone()  # a graph writes it again
        lengths = [length - prompt for length, prompt in zip(state.lengths, state.prompt_lengths, strict=True)]
        call = {"lenience": judge.lenience, "width": self.width()}
        self._rounds.append((list(state.owners), lengths, call, numbers))

    def rounds(self, laps: list[dict[str, float]]) -> list[list[Round]]:
        """Per round, one record for each row that was active in it, with the lap times of all."""
        result = []
        for (owners, lengths, call, numbers), seconds in zip(self._rounds, laps, strict=True):
            active = [row for row in zip(owners, lengths, numbers.tolist(), strict=True) if row[2][0] > 0]
            call |= {"seconds": seconds, "rows": len(active)}
            call["steps"] = max((int(row[2][2]) for row in active), default=0)
            result.append([_round(*row, call) for row in active])
        return result


def _round(row: int, length: int, numbers: list[float], call: dict[str, Any]) -> Round:
    kept, n, gamma, tested, judged = map(int, numbers[:5])
    own_token = kept == n + 1
    return Round(
        row=row,
        position=length - kept,
        gamma=gamma,
        accepted=min(n, kept),
        tested=tested,
        tokens=kept,
        recovered=int(own_token and n < judged),
        bonus=int(own_token and n == judged),
        accepted_before_stop=n,
        beta=numbers[10 : 10 + tested],
        rejected=int(numbers[9]) if n < judged else None,
        log_p=(numbers[5], numbers[6]),
        draft_leak=(numbers[7], numbers[8]),
        **call,
    )


def round_numbers(p: Tensor, draft: Draft, verdict: Verdict, kept: Tensor, beta_of: Beta, greedy: bool) -> Tensor:
    """A round as numbers [B, 10 + D]: tokens kept, guesses accepted, depth drafted, steps tested, steps
    that had a guess, the two statistics of the losslessness gate (two numbers each), the guess after
    the accepted ones, and beta of every step."""
    beta, gamma = beta_of(p, draft, verdict).double(), draft.steps()
    p, draft = chosen_path(p, draft, verdict)
    D = draft.tokens.shape[1]
    tested = torch.minimum(torch.minimum(verdict.accepted + 1, draft.count), kept)
    counts = torch.stack([kept, verdict.accepted, gamma, tested, draft.count], 1).double()
    log_p = draft_leak = counts.new_zeros(len(counts), 2)
    next_guess = counts.new_zeros(len(counts), 1)
    if D:
        next_guess = draft.tokens.gather(1, verdict.accepted.clamp(max=D - 1)[:, None]).double()
    if not greedy:
        places = torch.arange(D + 1, device=p.device)
        log_p = log_probability_statistic(p, verdict.tokens, places < kept[:, None])
        if D:
            judged = places[:-1] < tested[:, None]
            draft_leak = draft_leak_statistic(p[:, :-1], draft, verdict.tokens[:, :-1], judged)
    return torch.cat([counts, log_p, draft_leak, next_guess, beta], 1)


def chosen_path(p: Tensor, draft: Draft, verdict: Verdict) -> tuple[Tensor, Draft]:
    """p [B, D+1, V] along the path that was taken, and the first guess of each step as a chain."""
    if draft.is_chain:
        return p, draft
    entries, first, judged = along(draft, verdict)
    rows = torch.arange(len(entries), device=p.device)[:, None]
    q = None if draft.probs is None else draft.probs[rows, first]
    return p[rows, entries], Draft.chain(draft.tokens.gather(1, first), q, judged)


def log_probability_statistic(p: Tensor, tokens: Tensor, emitted: Tensor) -> Tensor:
    """For f = log p: sums of f(x_t) - E_p f and of Var_p f over emitted tokens, [B, 2]."""
    f = p.log().clamp(min=LOG_FLOOR)
    mean = (p * f).sum(-1)
    variance = (p * (f - mean[..., None]).square()).sum(-1)
    drawn = f.gather(-1, tokens[..., None]).squeeze(-1)
    return torch.stack([((drawn - mean) * emitted).sum(-1), (variance * emitted).sum(-1)], -1).double()


def draft_leak_statistic(p: Tensor, draft: Draft, tokens: Tensor, tested: Tensor) -> Tensor:
    """For f = 1[q(x) > p(x)], the tokens that the draft proposes too often: likewise, [B, 2]."""
    if draft.probs is None:
        mean = p.gather(-1, draft.tokens[..., None]).squeeze(-1)
        drawn = (tokens == draft.tokens).double()
        drawn = torch.where(mean < 1, drawn, mean.double())
    else:
        over = draft.probs > p
        mean = (p * over).sum(-1)
        drawn = over.gather(-1, tokens[..., None]).squeeze(-1).double()
    mean = mean.double()
    return torch.stack([((drawn - mean) * tested).sum(-1), (mean * (1 - mean) * tested).sum(-1)], -1)
