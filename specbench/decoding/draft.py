"""Draft (what a drafter proposes), Scores (what the target says of it) and Verdict (what a verifier decides). B rows, N
guesses, D levels, V vocabulary, H hidden."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specbench.decoding.token_tree import ROOT, Levels, depth_of_nodes, levels_of, static_parent, take_rows
from specbench.decoding.transfers import constant


@dataclass(frozen=True)
class Draft:
    """Drafted tokens, the guesses x_1 .. x_N, as a token tree: node 0 is the last committed token, node i is x_i. In a
    chain, each node's parent is the node before it. `probs` is q, the tensor that tokens were drawn from; None means
    that q is a point mass on each token. Guesses stand in order of depth, and the children of one node in the order in
    which a verifier tries them. Rows are ragged: x_i exists in row b if i <= count[b] and its parent is not MISSING.
    Whoever makes parents [B, N] by row gives every guess of depth d a parent of depth d - 1 that exists, or MISSING."""

    tokens: Tensor  # [B, N]
    levels: Levels  # number of guesses at each depth
    parent: Tensor | None  # [1 or B, N], the node above each guess; None for a chain
    probs: Tensor | None  # [B, N, V]
    count: Tensor  # [B], guesses of each row
    repeats: bool = False  # whether children of one node may be the same token
    most: int | None = None  # the most guesses that exist in a row, if they are fewer than N

    @staticmethod
    def chain(tokens: Tensor, probs: Tensor | None, count: Tensor) -> "Draft":
        """A chain of guesses [B, N], with q [B, N, V] (None: point masses); the first count[b] exist, count [B]."""
        return Draft(tokens, (1,) * tokens.shape[1], None, probs, count)

    @staticmethod
    def tree(
        tokens: Tensor, parent: tuple[int, ...], probs: Tensor | None, count: Tensor, repeats: bool = False
    ) -> "Draft":
        """A tree with one `parent` of each guess for all rows: tokens [B, N], probs [B, N, V] or None, count [B]."""
        levels = levels_of(parent)
        parents = constant(static_parent)(parent, tokens.device)
        return Draft(tokens, levels, None if set(levels) <= {1} else parents, probs, count, repeats)

    @staticmethod
    def empty(batch_size: int, device: torch.device) -> "Draft":
        """A draft without guesses: the round becomes a plain one-token step."""
        tokens = torch.zeros(batch_size, 0, dtype=torch.long, device=device)
        return Draft.chain(tokens, None, tokens.new_zeros(batch_size))

    @property
    def is_chain(self) -> bool:
        return self.parent is None

    @property
    def depth(self) -> int:
        """D, the number of guesses on the longest path."""
        return len(self.levels)

    @property
    def parents(self) -> Tensor:
        """Parents [1 or B, N] of the guesses, for a chain too."""
        if self.parent is None:
            return constant(static_parent)(tuple(range(self.tokens.shape[1])), self.tokens.device)
        return self.parent

    def exists(self) -> Tensor:
        """[B, N] bool: which guesses exist in each row."""
        there = torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.count[:, None]
        return there if self.parent is None else there & (self.parent >= ROOT)

    def steps(self) -> Tensor:
        """[B]: the depth of each row's draft, which is its gamma."""
        if self.parent is None:
            return self.count
        depth = constant(depth_of_nodes)(self.levels, self.count.device)
        return torch.where(F.pad(self.exists(), (1, 0), value=True), depth, 0).amax(1)

    def padded(self, width: int) -> "Draft":
        """The same chain padded to `width` columns, so that all drafts have one shape; `count` stays. Trees, empty
        drafts and drafts that are wide enough are returned unchanged."""
        missing = width - self.tokens.shape[1]
        if missing <= 0 or not self.tokens.shape[1] or not self.is_chain:
            return self
        probs = None if self.probs is None else F.pad(self.probs, (0, 0, 0, missing))
        return Draft.chain(F.pad(self.tokens, (0, missing)), probs, self.count)


@dataclass(frozen=True)
class Verdict:
    """What a verifier decided: x_1 .. x_n are accepted, and t, a recovered or bonus token, follows (Algorithm 1)."""

    tokens: Tensor  # [B, D + 1]: x_1 .. x_n, t; columns after these n + 1 are undefined
    accepted: Tensor  # [B], n: the number of accepted guesses
    # [B, D + 1], the root and the n accepted nodes of a tree in order, then any nodes; None for a chain.
    path: Tensor | None = None


@dataclass(frozen=True)
class Scores:
    """The target's distributions for a draft."""

    p: Tensor  # [B, N + 1, V], the distribution of the token after each node
    width: int  # tokens of each row that the call read
    hidden: Tensor | None = None  # [B, width, H], inputs of the output matrix or as `feature_layers` say, if asked for
    place: Tensor | None = None  # [B, N + 1], each node's index among the tokens read, if guesses shared places
    logits: Tensor | None = None  # [B, N + 1, V] before the argmax of temperature 0, after the repetition penalty

    def hidden_along(self, verdict: Verdict) -> Tensor:
        """[B, D + 1, H]: the hidden states of the last committed token and the n accepted guesses, then undefined."""
        assert self.hidden is not None
        if verdict.path is None:
            return self.hidden
        read = verdict.path if self.place is None else self.place.gather(1, verdict.path)
        return take_rows(self.hidden, read.clamp(max=self.hidden.shape[1] - 1))

    def hidden_after(self, verdict: Verdict) -> Tensor:
        """[B, H]: the hidden state from which t was drawn, that of the last accepted guess or committed token."""
        n = verdict.accepted
        return self.hidden_along(verdict)[torch.arange(len(n), device=n.device), n]
