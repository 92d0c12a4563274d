"""What happened in each round, as raw numbers: one record per round and row.

The betas and the losslessness statistics need p and q, which only exist during the round, so they
are reduced there, outside the timed laps, and read once at the end.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.state import Draft, State, Verdict

LOG_FLOOR = -30.0  # log p of tokens that cannot be drawn, in nats


@dataclass
class Round:
    """One round of one row. Positions count from the first generated token."""

    row: int
    position: int
    gamma: int  # tokens drafted
    accepted: int  # kept by the verifier and by the stop conditions
    tested: int  # guesses judged, none beyond a stop
    tokens: int  # tokens emitted
    recovered: int
    bonus: int
    accepted_before_stop: int  # by the verifier alone
    beta: list[float]  # of each tested position
    log_p: tuple[float, float] = (0.0, 0.0)  # sums over emitted tokens: f - E f, and Var f
    draft_leak: tuple[float, float] = (0.0, 0.0)  # likewise over tested positions
    seconds: dict[str, float] = field(default_factory=dict)  # the batch's, by lap


class Recorder:
    """The round hook that measures."""

    def __init__(self, lenience: float = 1.0, greedy: bool = False):
        self.lenience, self.greedy = lenience, greedy
        self._rounds: list[tuple[list[int], list[bool], dict[str, Any]]] = []
        self._lengths: list[int] = []
        self._active: list[bool] = []

    def begin(self, state: State) -> None:
        self._lengths, self._active = list(state.lengths), list(state.active)

    def __call__(self, state: State, p: Tensor, draft: Draft, verdict: Verdict, kept: Tensor) -> None:
        found = {"width": draft.tokens.shape[1], "kept": kept, "n": verdict.accepted, "count": draft.count}
        x, N = draft.tokens, draft.tokens.shape[1]
        tested = torch.minimum(torch.minimum(verdict.accepted + 1, draft.count), kept)
        found["tested"] = tested
        judged = torch.arange(N, device=x.device) < tested[:, None]
        if N:
            found["beta"] = acceptance_probability(p[:, :-1], draft, self.lenience, self.greedy)
        if not self.greedy:
            emitted = torch.arange(N + 1, device=x.device) < kept[:, None]
            found["log_p"] = log_probability_statistic(p, verdict.tokens, emitted)
            if N:
                found["draft_leak"] = draft_leak_statistic(p[:, :-1], draft, verdict.tokens[:, :-1], judged)
        starts = [length - prompt for length, prompt in zip(self._lengths, state.prompt_lengths, strict=True)]
        self._rounds.append((starts, self._active, found))
        self._lengths, self._active = list(state.lengths), list(state.active)

    def steps(self) -> list[int]:
        """Drafter steps of each round of the batch."""
        return [found["width"] for *_, found in self._rounds]

    def rounds(self, laps: list[dict[str, float]]) -> list[Round]:
        """All rounds of all rows that were active in them, with the batch's lap times."""
        result = []
        for (starts, active, found), seconds in zip(self._rounds, laps, strict=True):
            host = {name: value.tolist() for name, value in found.items() if name != "width"}
            result += [_round(row, starts[row], host, seconds) for row, on in enumerate(active) if on]
        return result


def _round(row: int, position: int, host: dict[str, list], seconds: dict[str, float]) -> Round:
    kept, n, count, tested = (host[name][row] for name in ("kept", "n", "count", "tested"))
    accepted = min(n, kept)
    own_token = kept == n + 1
    return Round(
        row=row,
        position=position,
        gamma=count,
        accepted=accepted,
        tested=tested,
        tokens=kept,
        recovered=int(own_token and n < count),
        bonus=int(own_token and n == count),
        accepted_before_stop=n,
        beta=host["beta"][row][:tested] if "beta" in host else [],
        log_p=tuple(host["log_p"][row]) if "log_p" in host else (0.0, 0.0),
        draft_leak=tuple(host["draft_leak"][row]) if "draft_leak" in host else (0.0, 0.0),
        seconds=seconds,
    )


def acceptance_probability(p: Tensor, draft: Draft, lenience: float, greedy: bool) -> Tensor:
    """beta [B, N] = sum_x min(p(x) / l, q(x)) (Theorem 3.5, with the lenience of A.5)."""
    if draft.probs is not None:
        return torch.minimum(p / lenience, draft.probs).sum(-1)
    p_x = p.gather(-1, draft.tokens[..., None]).squeeze(-1)
    if greedy:
        return (p_x >= lenience * p.amax(-1)).float()
    return (p_x / lenience).clamp(max=1)


def log_probability_statistic(p: Tensor, tokens: Tensor, emitted: Tensor) -> Tensor:
    """For f = log p: sums of f(x_t) - E_p f and of Var_p f over emitted tokens, [B, 2]."""
    f = p.double().log().clamp(min=LOG_FLOOR)
    mean = (p * f).sum(-1)
    variance = (p * (f - mean[..., None]).square()).sum(-1)
    drawn = f.gather(-1, tokens[..., None]).squeeze(-1)
    return torch.stack([((drawn - mean) * emitted).sum(-1), (variance * emitted).sum(-1)], -1)


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
