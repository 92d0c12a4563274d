"""What a drafter proposes, and what a verifier decides about it. B rows, N drafted nodes, V vocabulary."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specbench.decoding.noise import constant
from specbench.decoding.token_tree import (
    ROOT,
    Levels,
    chain_levels,
    chain_parent,
    depth_of_entries,
    first_children,
    levels_of,
    static_parent,
)


@dataclass(frozen=True)
class Draft:
    """Guesses as a token tree. A chain is the tree in which each node's parent is the one before.

    `probs` is q, the very tensor the tokens were drawn from; None means a point mass on each token.
    Nodes stand in order of depth, those with one parent in the order in which they are to be tried. Rows
    are ragged: node i is a guess of row b if i < count[b] and its parent is not MISSING.
    """

    tokens: Tensor  # [B, N]
    levels: Levels  # nodes of each depth
    parent: Tensor | None  # [1 or B, N], ROOT is the last committed token; None for a chain
    probs: Tensor | None  # [B, N, V]
    count: Tensor  # [B]
    repeats: bool = False  # whether nodes with one parent may be the same token

    @staticmethod
    def chain(tokens: Tensor, probs: Tensor | None, count: Tensor) -> "Draft":
        """Guesses [B, N] one after the other, the first count[b] of row b."""
        return Draft(tokens, chain_levels(tokens.shape[1]), None, probs, count)

    @staticmethod
    def tree(
        tokens: Tensor, parent: tuple[int, ...], probs: Tensor | None, count: Tensor, repeats: bool = False
    ) -> "Draft":
        """The same tree in every row, by the parent of each node."""
        levels = levels_of(parent)
        parents = constant(static_parent)(parent, tokens.device)
        return Draft(tokens, levels, None if set(levels) <= {1} else parents, probs, count, repeats)

    @staticmethod
    def empty(batch_size: int, device: torch.device) -> "Draft":
        """No guess: the round is a plain one-token step."""
        tokens = torch.zeros(batch_size, 0, dtype=torch.long, device=device)
        return Draft.chain(tokens, None, tokens.new_zeros(batch_size))

    @property
    def is_chain(self) -> bool:
        return self.parent is None

    @property
    def depth(self) -> int:
        """Guesses on the longest path."""
        return len(self.levels)

    @property
    def parents(self) -> Tensor:
        """[1 or B, N], of a chain too."""
        if self.parent is None:
            return constant(chain_parent)(self.tokens.shape[1], self.tokens.device)
        return self.parent

    def exists(self) -> Tensor:
        """[B, N]: which nodes are guesses."""
        there = torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.count[:, None]
        return there if self.parent is None else there & (self.parent >= ROOT)

    def steps(self) -> Tensor:
        """[B], the depth of each row's guesses: gamma."""
        if self.parent is None:
            return self.count
        depth = constant(depth_of_entries)(self.levels, self.count.device)
        return torch.where(F.pad(self.exists(), (1, 0), value=True), depth, 0).amax(1)

    def padded(self, width: int) -> "Draft":
        """A chain with `width` columns, for code that wants one shape; `count` tells the guesses."""
        missing = width - self.tokens.shape[1]
        if missing <= 0 or not self.tokens.shape[1] or not self.is_chain:
            return self
        probs = None if self.probs is None else F.pad(self.probs, (0, 0, 0, missing))
        return Draft.chain(F.pad(self.tokens, (0, missing)), probs, self.count)


@dataclass(frozen=True)
class Verdict:
    """What a verifier decided: x_1 .. x_n of the draft, then one token t of its own."""

    tokens: Tensor  # [B, D + 1] for drafts of depth D; columns after n + 1 mean nothing
    accepted: Tensor  # [B], n
    path: Tensor | None = None  # [B, D], the accepted nodes of a tree in order; None is a chain's first n


def along(draft: Draft, path: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The accepted path of a tree, path [B, D] and accepted [B] of the verdict: the entry before each step
    [B, D + 1], the first guess that could be tried there, as a node [B, D], and how many steps had a guess [B]."""
    B = len(path)
    first = first_children(draft.parents).expand(B, -1)
    entries = F.pad(path + 1, (1, 0))
    steps = torch.arange(entries.shape[1], device=path.device)
    entries = torch.where(steps <= accepted[:, None], entries, entries.gather(1, accepted[:, None]))
    child = first.gather(1, entries)
    there = (child >= 0) & (child < draft.count[:, None])
    return entries, child[:, :-1].clamp(min=0), accepted + there[:, -1].long()
