"""The seams of the decoding loop: what a drafter, a gamma policy and a verifier are."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specbench.decoding.noise import ACCEPTANCE, RESIDUAL, constant, sibling_bits, uniforms
from specbench.decoding.state import Draft, Rows, State, Verdict, window
from specbench.decoding.tree import depths, siblings

STREAM = 1 << 20  # more than the nodes of any tree


@dataclass(frozen=True)
class Noise:
    """The verifier's randomness for one round, cut out of the table when it is asked for."""

    table: Tensor  # [3, B, T]
    length: Tensor  # [B]
    parent: tuple[int, ...]

    @staticmethod
    def of(rows: Rows, draft: Draft) -> "Noise":
        return Noise(rows.noise, rows.length, draft.parent)

    @property
    def r(self) -> Tensor:
        """[B, N] uniforms for the acceptance of each guess: a stream's bits at the position that the
        guess would take, and for every guess at one position others."""
        if self.depth == len(self.parent):
            return uniforms(window(self.table[ACCEPTANCE], self.length, self.depth))
        return uniforms(node_bits(self.table[ACCEPTANCE], self.length, self.parent))

    @property
    def bits(self) -> Tensor:
        """[B, D + 1], to draw the token after n accepted guesses."""
        return window(self.table[RESIDUAL], self.length, self.depth + 1)

    @property
    def depth(self) -> int:
        return max(depths(self.parent), default=0)


def node_bits(bits: Tensor, length: Tensor, parent: tuple[int, ...], stream: int = 0) -> Tensor:
    """Bits [B, N] for the nodes of a tree, out of a table [B, T] at their positions; another stream has
    others."""
    depth, number = constant(places_of)(parent, bits.device)
    return sibling_bits(bits.gather(1, length[:, None] + depth - 1), number + stream * STREAM)


def places_of(parent: tuple[int, ...], device: torch.device) -> Tensor:
    """[2, N], the depth of each node and how many stand before it there."""
    return torch.tensor([depths(parent), siblings(parent)], device=device)


class Drafter(Protocol):
    """Guesses from M_q. `context` is the longest text it can read, in tokens.

    It may also have `models`, the language models that read prompts into caches of their own;
    `trees`, true if its drafts are not chains; `longest`, the most guesses in a row that it can make;
    `nodes(gamma)`, how many guesses a draft of that depth has; and `settle(state, draft, verdict, base)`,
    called after each round with the column base [B] of its first guess.
    """

    context: int

    def begin(self, state: State) -> None:
        """A new batch of rows; whatever was remembered of the last one is dropped."""

    def propose(self, state: State, gamma: list[int]) -> Draft:
        """Guesses for row b of depth gamma[b] at most, with the q that they were drawn from; where no
        row has a guess, the round is a plain one-token step."""


def nodes(drafter: Drafter, gamma: int) -> int:
    """How many guesses a draft of that depth has at most."""
    return drafter.nodes(gamma) if hasattr(drafter, "nodes") else gamma


class GammaPolicy(Protocol):
    """How many tokens to draft next, at most `largest`. `widths` are the lengths of draft that it
    uses, which executors with fixed shapes pad to; `constant` is gamma where it never changes."""

    largest: int
    widths: tuple[int, ...]
    constant: int | None

    def next_gamma(self, state: State) -> list[int]: ...

    def observe(self, draft: Draft, kept: list[int]) -> None:
        """What became of the round: `kept` tokens per row, its own one included, 0 in idle rows."""


Signal = Callable[[Tensor, Tensor], Tensor]


class DraftStop(Protocol):
    """Ends a row's draft while it is being drawn, for policies that look at the drafter's own law."""

    signal: Signal  # q [B, V] (before argmax at temperature 0) and the guess [B] to a number [B]

    def go_on(self, state: State, count: list[int], signals: list[float]) -> list[bool]:
        """Whether to draft another guess, given how many there are and the signal of the last one."""


class Verifier(Protocol):
    """Which guesses to keep."""

    lossless: bool
    lenience: float
    judges_by_law: bool  # whether acceptance at a position follows from p, q and lenience there (A.5)
    looks_ahead: bool  # whether a verdict depends on guesses behind the first one that was turned down

    def under(self, state: State) -> "Verifier":
        """The verifier for this round: itself, unless its lenience depends on the load."""

    def accept(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict: ...

    def beta(self, p: Tensor, draft: Draft, verdict: Verdict) -> Tensor:
        """The probability that a guess is accepted at each step of the way, [B, D]."""
