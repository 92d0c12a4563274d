"""Drafts and verifies what raises the expected tokens per second at each round's batch, context and confidence."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from specbench.decoding.gamma_policy import Costs, GammaPolicy, RowsSeen, cannot_end_early
from specbench.policies.gamma.entropy import confidence
from specbench.policies.gamma.optimal import Array
from specbench.policies.gamma.per_request_state import PerRow
from specbench.settings import LARGEST_GAMMA, BaseSettings, setting
from specbench.theory import expected_tokens

PRIOR = 16.0  # rounds or guesses that what calibration has found counts for
REFIT = 8  # rounds after which the costs are fitted again
CERTAIN = 1e-3  # confidences count as at least so far from 0 and 1
RIDGE = np.array([1e-9, 1e-4, 1e-4, 1e-4, 1e-3])  # where rounds do not tell coefficients apart


class RoundCosts:
    """Seconds of a round, linear in drafter steps, tokens that the target reads and tokens of context, and larger by a
    constant if there is a draft, since reading a few more tokens may be another, slower computation: least squares
    without negative coefficients, over calibration and over the rounds so far, which are forgotten. Where by that a
    round without a draft would take no time, it takes what it took in calibration."""

    def __init__(self, seconds: Array, rows: int, context: int, forget: float):
        """`seconds` [largest + 1] of calibration, of rounds with so many rows and tokens of context."""
        largest, self.undrafted = len(seconds) - 1, float(seconds[0])
        self.keep = 1 - forget
        self.scale = np.array([1.0, 1.0, max(1, largest), rows * (largest + 1), max(1, context)])
        x = np.array([[1.0, g > 0, g, rows * (g + 1), context] for g in range(largest + 1)]) / self.scale
        weight = PRIOR / len(x)
        self.prior = x.T @ x * weight + np.diag(RIDGE), x.T @ seconds * weight
        self.seen: tuple[Array, Array] = np.zeros((5, 5)), np.zeros(5)
        self.new: list[tuple[float, ...]] = []  # rounds since the last fit: as `x`, and seconds
        self._fit()

    def add(self, seconds: float, steps: int, tokens: int, context: int) -> None:
        """A round; one that was interrupted counts for at most twice what was expected."""
        most = 2 * self.seconds(steps, tokens, context)
        self.new.append((1.0, steps > 0, steps, tokens, context, min(seconds, most)))
        if len(self.new) == REFIT:
            found = np.array(self.new)
            x, weight = found[:, :5] / self.scale, self.keep ** np.arange(REFIT)[::-1]
            past, weighted = self.keep**REFIT, x.T * weight
            self.seen = self.seen[0] * past + weighted @ x, self.seen[1] * past + weighted @ found[:, 5]
            self.new = []
            self._fit()

    def seconds(self, steps: Any, tokens: Any, context: int) -> Any:
        start, draft, step, token, kept = self.by
        return start + draft * (steps > 0) + step * steps + token * tokens + kept * context

    def _fit(self) -> None:
        A, b = (own + past for own, past in zip(self.prior, self.seen, strict=True))
        used = np.arange(5)
        found = np.linalg.solve(A, b)
        while len(used) > 1 and (found < 0).any():  # what would be negative is 0
            used = used[found >= 0] if (found >= 0).any() else used[:1]
            found = np.linalg.solve(A[np.ix_(used, used)], b[used])
        fitted = np.zeros(5)
        fitted[used] = np.maximum(found, 0)
        if not fitted[[0, 3, 4]].any():  # a round without a draft would take no time
            fitted[:3] = self.undrafted, 0.0, max(0.0, (b[2] - self.undrafted * A[2, 0]) / A[2, 2])
        by = fitted / self.scale
        self.by: tuple[float, ...] = tuple(by.tolist())


class AcceptanceFit:
    """The probability that a guess is accepted, a = logistic(w_0 + w_1 logit(max q)): a step of Newton's after every
    round, on what it tested; older rounds are forgotten."""

    def __init__(self, forget: float):
        self.forget, self.w = forget, (0.0, 1.0)
        self.curvature = PRIOR / 4, 0.0, PRIOR / 4  # A, B, D of [[A, B], [B, D]]

    def of(self, logit: float) -> float:
        return 1 / (1 + math.exp(-(self.w[0] + self.w[1] * logit)))

    def learn(self, logits: list[float], accepted: list[bool]) -> None:
        if not logits:
            return
        keep, prior = 1 - self.forget, self.forget * PRIOR / 4
        A, B, D = self.curvature[0] * keep + prior, self.curvature[1] * keep, self.curvature[2] * keep + prior
        rise, slope = 0.0, 0.0  # the gradient; floats: arrays of two take longer
        for logit, right in zip(logits, accepted, strict=True):
            a = self.of(logit)
            spread, error = a * (1 - a), right - a
            A, B, D = A + spread, B + spread * logit, D + spread * logit * logit
            rise, slope = rise + error, slope + error * logit
        self.curvature, det = (A, B, D), A * D - B * B
        steps = (D * rise - B * slope) / det, (A * slope - B * rise) / det
        w, v = (own + min(max(step, -1.0), 1.0) for own, step in zip(self.w, steps, strict=True))
        self.w = w, v


class GoodputGamma(GammaPolicy):
    """Goodput is expected tokens over the expected seconds of a round (TurboSpec, 2406.14066).

    With `signal: none` all rows get the gamma with the largest goodput, from each row's acceptance and that at each
    place of a draft.
    With `confidence` a guess has a probability to be accepted, `AcceptanceFit` of max q, and to survive, the product
    along its draft. Another level is drafted while the survival that it promises by each row's own acceptance so far,
    summed over the rows, is worth its time at the goodput that rounds have had, and guesses are verified while theirs
    is: in whole columns of the batch, which this decoder pads, or `by_row`, so that those that are worth a token's
    time are one prefix of all guesses in order of survival (vLLM's adaptive verification).

    Whether a guess is verified depends on the q of its draft up to its own, never on the drawn token: q of a guess
    comes before its draw, and the price of a token before the round."""

    @dataclass
    class Settings(BaseSettings):
        largest: int = setting(ge=1, le=LARGEST_GAMMA)
        signal: str = setting(choices=("confidence", "none"))
        by_row: bool = setting()
        forget: float = setting(ge=0, le=0.5)
        probe: int = setting(ge=1, le=10**9)

    calibrated = True
    trims = True
    traced_as = "confidence"

    def __init__(self, largest: int, signal: str, by_row: bool, forget: float, probe: int):
        self.largest, self.by_row, self.forget, self.probe = largest, by_row, forget, probe
        self.signal = confidence if signal == "confidence" else None
        self.widths = tuple(range(1, largest + 1))
        self.costs: RoundCosts | None = None
        self.acceptance = AcceptanceFit(forget)
        self.survival: list[list[float]] = []  # of this round's guesses, by row
        self.logits: list[list[float]] = []
        self.hope: list[float] = []  # by row, the acceptance of a guess that is not drawn yet
        self.own: PerRow[tuple[float, float]] = PerRow()  # accepted and tested guesses of a row
        self.idle = 0  # rounds without a draft since the last one with

    @classmethod
    def refuses(cls, settings: Any, run: Any) -> str | None:
        told = super().refuses(settings, run)
        if told is None and settings.signal == "confidence" and cannot_end_early(run["drafter"]):
            return f"with drafter={run['drafter'].name}, of which it sees no q: use gamma_policy.signal=none"
        return told

    def calibrate(self, costs: Costs) -> None:
        self.first, self.costs = costs.seconds(self.largest), None
        self.tested = [PRIOR] * self.largest  # by place of a draft
        self.accepted = [PRIOR * max(CERTAIN, costs.alpha)] * self.largest

    def next_gamma(self, state: RowsSeen) -> list[int]:
        lengths = [length for length, on in zip(state.lengths, state.active, strict=True) if on]
        self.rows, self.context = max(1, len(lengths)), sum(lengths)
        if self.costs is None:
            self._begin()
        self.survival = [[] for _ in range(state.batch_size)]
        self.logits = [[] for _ in range(state.batch_size)]
        mean = sum(self.accepted) / sum(self.tested)
        seen = [self.own.of(state, row, (0.0, 0.0)) for row in range(state.batch_size)]
        self.hope = [(accepted + mean * PRIOR) / (tested + PRIOR) for accepted, tested in seen]
        alphas = [hope for hope, on in zip(self.hope, state.active, strict=True) if on] or [mean]
        gamma, self.rate = self._choose(alphas, mean)
        self.idle = 0 if gamma else self.idle + 1
        if self.idle > self.probe:
            gamma = self.largest if self.signal else 1
        self.began = self.now()
        return [gamma] * state.batch_size

    def _begin(self) -> None:
        """Sets costs, and what a draft usually gives, to what calibration found."""
        self.costs = RoundCosts(self.first, self.rows, self.context, self.forget)
        tokens = expected_tokens(self.accepted[0] / self.tested[0], np.arange(self.largest + 1))
        best = 1 + int(np.argmax((tokens / self.first)[1:]))
        self.usual = [float(tokens[best]), float(best), float(best)]  # tokens a row, steps, guesses verified a row

    def _choose(self, alphas: list[float], mean: float) -> tuple[int, float]:
        """gamma, 0 where drafting does not pay, and the goodput of drafting, by the acceptance of each active row and
        that of all guesses."""
        assert self.costs is not None
        if self.signal is None:
            best, most = 0, self.rows / self.costs.seconds(0, self.rows, self.context)
            survival, expected = [1.0] * len(alphas), float(self.rows)
            for g, (accepted, tested) in enumerate(zip(self.accepted, self.tested, strict=True), 1):
                here = accepted / tested / mean
                survival = [own * min(alpha * here, 1.0) for own, alpha in zip(survival, alphas, strict=True)]
                expected += sum(survival)
                goodput = expected / self.costs.seconds(g, self.rows * (g + 1), self.context)
                if goodput > most:
                    best, most = g, goodput
            return best, most
        tokens, steps, width = self.usual
        drafting = self.rows * tokens / self.costs.seconds(steps, self.rows * (width + 1), self.context)
        plain = self.rows / self.costs.seconds(0, self.rows, self.context)
        return self.largest if drafting > plain else 0, drafting

    def go_on(self, state: RowsSeen, count: list[int], signals: list[float]) -> list[bool]:
        assert self.costs is not None
        depth = max(count)
        for own, logits, guesses, signal in zip(self.survival, self.logits, count, signals, strict=True):
            if len(own) < guesses:
                c = min(max(signal, CERTAIN), 1 - CERTAIN)
                logits.append(math.log(c / (1 - c)))
                own.append((own[-1] if own else 1.0) * self.acceptance.of(logits[-1]))
        hopes = [own[-1] * hope if own else 0.0 for own, hope in zip(self.survival, self.hope, strict=True)]
        _, _, step, token, _ = self.costs.by
        price = self.rate * token
        going = [len(own) == depth > 0 and (not self.by_row or hope >= price)
                 for own, hope in zip(self.survival, hopes, strict=True)]  # fmt: skip
        promised = sum(hope for hope, on in zip(hopes, going, strict=True) if on)
        columns = sum(going) if self.by_row else self.rows
        return going if promised >= self.rate * step + columns * price else [False] * len(count)

    def admit(self, state: RowsSeen) -> list[int]:
        if self.signal is None:
            return [self.largest] * state.batch_size
        assert self.costs is not None
        price = self.rate * self.costs.by[3]
        if self.by_row:
            return [sum(s >= price for s in own) for own in self.survival]
        depth = max(map(len, self.survival))
        columns = [sum(own[i] for own in self.survival if len(own) > i) for i in range(depth)]
        return [sum(column >= self.rows * price for column in columns)] * state.batch_size

    def observe(self, drafted: list[int], kept: list[int]) -> None:
        assert self.costs is not None
        seconds = self.now() - self.began
        width = max(drafted)
        steps = max(width, *map(len, self.survival))
        verified = sum(guesses for guesses, new in zip(drafted, kept, strict=True) if new)
        tokens = verified + self.rows if self.by_row else self.rows * (width + 1)
        self.costs.add(seconds, steps, tokens, self.context)
        logits: list[float] = []
        outcomes: list[bool] = []
        for row, (own, guesses, new) in enumerate(zip(self.logits, drafted, kept, strict=True)):
            tested = min(new, guesses)
            for place in range(tested):
                self.tested[place] += 1
                self.accepted[place] += place < new - 1
            if new:
                past, share = self.own[row][1], (1 - self.forget) ** max(1, tested)
                accepted = new - 1 if tested else 0
                self.own.change(row, (past[0] * share + accepted, past[1] * share + tested))
            logits += own[:tested]
            outcomes += [place < new - 1 for place in range(min(tested, len(own)))]
        self.acceptance.learn(logits, outcomes)
        if steps:
            self.idle, slowly = 0, 1 - self.forget / 8
            shares = [slowly if tested > PRIOR else 1.0 for tested in self.tested]
            self.tested, self.accepted = (
                [share * count for share, count in zip(shares, counts, strict=True)]
                for counts in (self.tested, self.accepted)
            )
            now = sum(kept) / self.rows, steps, (tokens - self.rows) / self.rows
            self.usual = [past + (new - past) * self.forget for past, new in zip(self.usual, now, strict=True)]
