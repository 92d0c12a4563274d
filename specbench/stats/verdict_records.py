"""Records for the verdict: what the decoder drew from, and what the stock modules say of the same text.

B rows, V vocabulary, T tokens of a text, K tested guesses, D steps of a round, n tokens that were read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from specbench.stats.estimates import Floats
from specbench.stats.metrics.base import Path

DEVIATIONS = ("log_p", "draft_leak", "guess")
MARGIN = 1.05  # q / p above which a token is in it: more than rounding in 16 bits
LAW_BYTES = 256e6  # of the decoder's p that are kept for one group of requests, decoded one way
OVER = 32  # tokens of the set that the drafter proposes too often


@dataclass
class DrawnFrom:
    """One text: what stood behind each of its tokens. Positions count from the first generated token. All but `laws` is
    for the verdict."""

    rule: Literal["p / q", "p"] | None = None  # `Verifier.keeps_guess`
    chosen: list[float] = field(default_factory=list)  # [T], the decoder's p of each token; not a number if p is none
    at: list[int] = field(default_factory=list)  # [K], position of each tested guess
    place: list[int] = field(default_factory=list)  # [K], its place in the round, from 1 on
    guess: list[int] = field(default_factory=list)  # [K], the first guess that was tried there
    p: list[float] = field(default_factory=list)  # [K], the decoder's p of it
    q: list[float] = field(default_factory=list)  # [K], the drafter's q of it
    over: list[list[int]] = field(default_factory=list)  # [K], the tokens with the largest q - p, all with q > p
    # The decoder's p [n, V] from a position on; at temperature 0 before the argmax.
    laws: list[tuple[int, Tensor]] = field(default_factory=list)
    drafts: list[tuple[int, Tensor]] = field(default_factory=list)  # the drafter's q [n, V] of tested guesses, likewise

    def add(self, position: int, kept: int, tested: int, numbers: Floats) -> None:
        """Adds the `evidence_numbers` of a row in a round that began at `position`."""
        D = (len(numbers) - 1) // (4 + OVER)
        self.chosen += numbers[: D + 1][:kept].tolist()
        table = numbers[D + 1 :].reshape(3 + OVER, D)[:, :tested]
        self.at += range(position, position + tested)
        self.place += range(1, tested + 1)
        self.guess += table[0].astype(int).tolist()
        self.p += table[1].tolist()
        self.q += table[2].tolist()
        self.over += [[token for token in column if token >= 0] for column in table[3:].T.astype(int).tolist()]

    def whole_law(self, n: int) -> Tensor | None:
        """The decoder's p [n, V] of the first n tokens; None unless it was kept for all of them."""
        end, parts = 0, []
        for position, p in self.laws:
            if position != end:
                return None
            end += len(p)
            parts.append(p)
        return torch.cat(parts)[:n] if end >= n > 0 else None


def law_window(parts: Sequence[tuple[int, Tensor]], begin: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Of matrices [m, V] that stand from a position on: the rows of n positions from `begin` on [n, V], and which of
    them there are [n]. `like` [n, V] has the same shape and device."""
    n = len(like)
    found, kept = torch.zeros_like(like), torch.zeros(n, dtype=torch.bool, device=like.device)
    for position, matrix in parts:
        first, last = max(position, begin), min(position + len(matrix), begin + n)
        if first < last:
            found[first - begin : last - begin] = matrix[first - position : last - position]
            kept[first - begin : last - begin] = True
    return found, kept


def none() -> Floats:
    """No numbers."""
    return np.zeros(0)


@dataclass
class ReferenceScore:
    """One text under the stock module's p. Positions count from the first generated token."""

    tokens: int  # new tokens that were read
    seconds: float = 0.0
    finite: bool = True  # whether every number is, the decoder's too
    impossible: int = 0  # draws whose probability is 0
    tested: int = 0  # guesses
    ended: bool = True  # whether the text ends where it should
    # Above temperature 0: `SUMS` of every alternative; sum of f - E f and of Var f for each of DEVIATIONS.
    sums: Floats = field(default_factory=none)
    deviations: Floats = field(default_factory=lambda: np.zeros((len(DEVIATIONS), 2)))
    tv: Floats = field(default_factory=none)  # decoder's p against this one, where it was kept
    rounding: Floats = field(default_factory=none)  # the largest that rounding explains there
    gap: Floats = field(default_factory=none)  # temperature 0: best logit - second best [n]
    short: Floats = field(default_factory=none)  # temperature 0: best logit - that of the token [n]
    tolerance: Floats = field(default_factory=none)  # of logits, by rounding [n]
    plain_short: float | None = None  # best logit - that of plain decoding's token, where the texts differ first
    # Of tested guesses: the drafter's q against its stock module's, and the largest distance that rounding explains.
    q_tv: Floats = field(default_factory=none)
    q_rounding: Floats = field(default_factory=none)
    q_unread: str = ""  # why q was not read again


def width(D: int) -> int:
    """The number of `evidence_numbers` of D steps."""
    return D + 1 + (3 + OVER) * D


def evidence_numbers(path: Path) -> Tensor:
    """A round as [B, K] float64: p of each token of the path (not a number where p is no distribution); of the first
    guess of each step its id, p and q; and the ids of OVER tokens that q favours most over p, -1 for none."""
    p, draft = path.p, path.draft
    sound = (p.sum(-1) - 1).abs() < 0.01  # false also if p is not finite
    chosen = torch.where(sound, p.gather(-1, path.tokens[..., None])[..., 0].double(), torch.nan)
    before, guess = p[:, :-1], draft.tokens[..., None]
    if draft.probs is None:
        q_x = torch.ones_like(guess, dtype=torch.double)
        over = F.pad(guess, (0, OVER - 1), value=-1)
    else:
        q_x = draft.probs.gather(-1, guess).double()
        excess = torch.where(draft.probs > MARGIN * before, draft.probs - before, 0.0)
        most, ids = excess.topk(min(OVER, excess.shape[-1]), -1)
        over = F.pad(torch.where(most > 0, ids, -1), (0, OVER - most.shape[-1]), value=-1)
    table = torch.cat([guess.double(), before.gather(-1, guess).double(), q_x, over.double()], -1)  # [B, D, 3 + OVER]
    return torch.cat([chosen, table.transpose(1, 2).flatten(1)], 1)
