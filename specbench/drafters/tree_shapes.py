"""Shapes of token trees: a number of children by depth (SpecInfer), the likeliest nodes by q (EAGLE-2, 2406.16858), or
drawn nodes whose number follows q (as in DySpec, 2410.11744).

B rows, n guesses of a level, m nodes that are read to draft it, V vocabulary, K width.
"""

import math
import sys
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from specbench.decoding import token_tree
from specbench.decoding.draft import Draft
from specbench.decoding.noise import PROPOSAL, exponentials, node_bits
from specbench.decoding.rows import Rows
from specbench.decoding.sampling import Sampling, draw
from specbench.decoding.token_tree import MISSING, ROOT, Tree, level_slices, levels_of
from specbench.decoding.transfers import constant, counts
from specbench.errors import ConfigError, shown
from specbench.models.language_model import LanguageModel
from specbench.settings import LARGEST_GAMMA, BaseSettings

MOST_LEAVES, MOST_NODES, MOST_WIDTH = 1000, 1000, 32
CHAIN = 0.7  # what a guess is worth beside the one before it, if guesses are drawn
CHILDREN = ("independent", "distinct", "best")


class Nodes(NamedTuple):
    """Nodes that are read next: the last m entries of `tree`."""

    tokens: Tensor  # [B, m]
    up: Tensor  # [1 or B, m], the place of each node's parent among the nodes that were read before, or 0
    tree: Tree | None  # None where drafters that read nothing more grow the tree


# Reads nodes, None for the end of the text, and returns `children` of them, with bits [B, n] if they are drawn.
Step = Callable[[Nodes | None, Tensor | None], tuple[Tensor, Tensor | None]]


class FixedTree:
    """Every node of depth d - 1 has branching[d - 1] children; one child beyond the list. `kind` says how they are
    chosen: "independent" draws from q; "distinct" draws without replacement, where q of the second child excludes the
    first; "best", the most probable tokens by q, as point masses."""

    def __init__(self, branching: list[int], kind: str, stream: int = 0):
        """Drafters that draft side by side need different numbers `stream`, for independent noise."""
        self.branching, self.kind, self.stream = branching, kind, stream
        self.point_masses = kind == "best"

    def parent(self, depth: int) -> tuple[int, ...]:
        """The parent of each guess of a draft."""
        return token_tree.branching_tree(widths(self.branching, depth))

    def reads(self, depth: int) -> int:
        """How many guesses the drafter itself reads: all but those of the last level."""
        return len(self.parent(depth)) - levels_of(self.parent(depth))[-1]

    def children(
        self, sampling: Sampling, logits: Tensor, bits: Tensor | None, seen: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Guesses [B, n] after nodes of logits [B, m, V], and q [B, n, V] or None. bits [B, n], seen [B, m, V]."""
        assert bits is not None
        each = bits.shape[1] // logits.shape[1]
        if self.point_masses:
            return sampling.penalize(logits.float(), seen).topk(each, dim=-1).indices.flatten(1), None
        q = sampling.probabilities(logits, seen)
        if self.kind == "independent":
            q = q.repeat_interleave(each, 1)
            return draw(q, bits), q
        return without_replacement(q, bits[:, ::each], each)

    def grow(self, step: Step, rows: Rows, depth: int) -> tuple[Tensor, Tensor | None]:
        """All guesses [B, N] of a draft, and the q that they were drawn from [B, N, V] or None."""
        parent, device = self.parent(depth), rows.length.device
        bits = node_bits(rows.noise[PROPOSAL], rows.length, levels_of(parent), stream=self.stream)
        guesses: list[Tensor] = []
        qs: list[Tensor] = []
        nodes = None
        for level in level_slices(levels_of(parent)):
            own = bits[:, level].clone(memory_format=torch.contiguous_format)  # same strides always
            tokens, q = step(nodes, own)
            guesses.append(tokens)
            qs += [] if q is None else [q]
            first = parent[level.start]  # node of the level above
            up = constant(token_tree.static_parent)(tuple(node - first for node in parent[level]), device)
            nodes = Nodes(tokens, up, token_tree.newest(parent[: level.stop], level.stop - level.start, device))
        return torch.cat(guesses, 1), torch.cat(qs, 1) if qs else None

    def draft(self, grown: Any, gamma: list[int], depth: int) -> tuple[Draft, None]:
        """The draft of what `grow` returned, at most gamma[b] levels of it for row b."""
        (tokens, q), parent = grown, self.parent(depth)
        ends = [0, *(level.stop for level in level_slices(levels_of(parent)))]
        count = counts(tuple(ends[g] for g in gamma), tokens.device)
        return Draft.tree(tokens, parent, q, count, repeats=self.kind == "independent"), None


class DynamicTree:
    """Of each of the `width` best nodes of a level, the `width` likeliest tokens are guesses of the next level. A guess
    is as good as the product of q along its path. The `nodes` best of all guesses are the draft. They are point masses
    at every temperature, since none is drawn."""

    point_masses = True

    def __init__(self, nodes: int, width: int):
        self.nodes, self.width = nodes, width
        self.start = 0.0  # the value of the end of the text

    def reads(self, depth: int) -> int:
        """See `FixedTree.reads`."""
        return self.width * (depth - 1)

    def children(
        self, sampling: Sampling, logits: Tensor, bits: Tensor | None, seen: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See `FixedTree.children`; in place of q, log q of each guess [B, n]."""
        logits = logits.float()
        q = sampling.penalize(logits, seen).softmax(-1) if sampling.greedy else sampling.probabilities(logits, seen)
        best = q.topk(self.width, dim=-1)
        return best.indices.flatten(1), best.values.log().flatten(1)

    def levels(self, depth: int) -> tuple[int, ...]:
        """The number of guesses by depth that the draft is chosen from."""
        return (self.width, *[self.width**2] * (depth - 1)) if depth else ()

    def values(self, above: Tensor, guesses: Tensor, q: Tensor) -> Tensor:
        """[B, m * K]: values of guesses, with q from `children`; their m parents' are above [B, m], -inf for none."""
        return above.repeat_interleave(self.width, 1) + q

    def grow(self, step: Step, rows: Rows, depth: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """All P guesses [B, P], their parents [B, P], their values [B, P], the node [B, P + 1] of each node of the
        draft among those that were read, and q [B, P, V] of guesses that are drawn, or None."""
        K, levels, root = self.width, self.levels(depth), torch.full_like(rows.length[:, None], ROOT)
        bits = None if self.point_masses else node_bits(rows.noise[PROPOSAL], rows.length, levels)
        last, value = root, torch.full_like(root, self.start, dtype=torch.float)  # of the nodes that are read next
        number = parents = root[:, :0]  # of all nodes that are read: which they are, and their tree
        guess_nodes = torch.arange(1, sum(levels) + 1, device=root.device)
        guesses: list[Tensor] = []
        above: list[Tensor] = []
        values: list[Tensor] = []
        qs: list[Tensor] = []
        nodes: Nodes | None = None
        for level, at in enumerate(level_slices(levels)):
            own = None if bits is None else bits[:, at].clone(memory_format=torch.contiguous_format)
            found, q = step(nodes, own)
            assert q is not None
            guesses.append(found)
            above.append(last.repeat_interleave(K, 1))
            values.append(self.values(value, found, q))
            qs += [] if bits is None else [q]
            if level + 1 == depth:
                break
            value, best = values[-1].topk(K, dim=1)
            last, up = guess_nodes[at][best], best // K
            number = torch.cat([number, last], 1)
            first = max(ROOT, 1 + K * (level - 1))  # node that was read at the level above
            parents = torch.cat([parents, up + first], 1)
            whole = token_tree.tree_of((K,) * (level + 1), parents)
            nodes = Nodes(found.gather(1, best), up, Tree(whole.depth[:, -K:], whole.sees[:, -K:]))
        tokens = torch.cat(guesses, 1)
        read = torch.arange(1, number.shape[1] + 1, device=tokens.device).expand_as(number)
        place = torch.zeros(len(tokens), tokens.shape[1] + 1, dtype=torch.long, device=tokens.device)
        place = place.scatter(1, number, read)
        return tokens, torch.cat(above, 1), torch.cat(values, 1), place, torch.cat(qs, 1) if qs else None

    def draft(self, grown: Any, gamma: list[int], depth: int) -> tuple[Draft, Tensor]:
        """See `FixedTree.draft`; returns the places of `grown` too."""
        tokens, parent, value, place, q = grown
        levels = self.levels(depth)
        depths = constant(token_tree.depth_of_nodes)(levels, tokens.device)[1:]
        deep = depths > counts(tuple(gamma), tokens.device)[:, None]
        kept = best_nodes(value.masked_fill(deep, -torch.inf), self.nodes)
        count = torch.full_like(tokens[:, 0], tokens.shape[1])
        return Draft(tokens, levels, torch.where(kept, parent, MISSING), q, count, most=self.nodes), place


class ProductTree(DynamicTree):
    """The `nodes` likeliest paths through the places of a block, by the product of their q, best first (DDTree,
    2604.12989). A drafter that has filled all places reads nothing for a node, so no path is left out: a node of depth
    d has d - 1 above it that are as good, so of a level the nodes - d + 1 best are enough."""

    def levels(self, depth: int) -> tuple[int, ...]:
        found = [1]
        for level in range(min(depth, self.nodes)):
            found.append(min(self.nodes - level, found[-1] * self.width))
        return tuple(found[1:])

    def grow(self, step: Step, rows: Rows, depth: int) -> tuple[Tensor, Tensor, Tensor, None, None]:  # type: ignore[override]
        """See `DynamicTree.grow`; no guess was read, and none drawn."""
        levels, number = self.levels(depth), torch.full_like(rows.length[:, None], ROOT)
        value = torch.zeros_like(number, dtype=torch.float)
        guesses: list[Tensor] = []
        above: list[Tensor] = []
        values: list[Tensor] = []
        nodes: Nodes | None = None
        for at in level_slices(levels):
            found, q = step(nodes, None)
            assert q is not None
            value, best = self.values(value, found, q).topk(at.stop - at.start, dim=1)
            up = best // self.width
            guesses.append(found.gather(1, best))
            above.append(number.gather(1, up))
            values.append(value)
            number = torch.arange(at.start + 1, at.stop + 1, device=number.device).expand_as(best)
            nodes = Nodes(guesses[-1], up, None)
        return torch.cat(guesses, 1), torch.cat(above, 1), torch.cat(values, 1), None, None


class SampledTree(DynamicTree):
    """A dynamic tree whose guesses are drawn from q, siblings without replacement. A guess's value is how many guesses
    it and those below it may be. Whether there is a guess is known before it is drawn, and what is drawn stays in the
    draft: with any other choice by q the output distribution would not be p."""

    point_masses = False

    def __init__(self, nodes: int, width: int):
        super().__init__(nodes, width)
        self.start = nodes + 1.0

    def children(
        self, sampling: Sampling, logits: Tensor, bits: Tensor | None, seen: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See `FixedTree.children`."""
        assert bits is not None
        return without_replacement(sampling.probabilities(logits, seen), bits[:, :: self.width], self.width)

    def values(self, above: Tensor, guesses: Tensor, q: Tensor) -> Tensor:
        """See `DynamicTree.values`. A guess of probability q is taken to be accepted with (1 + q) / 2, or half of it if
        a sibling was rejected, and each guess of a chain to be worth CHAIN of the one before it: a child and the next
        one get what makes the last guesses of two such chains worth as much."""
        left = above - 1  # [B, m], -inf of nodes that there are not
        q_x = q.gather(2, guesses[..., None])[..., 0].unflatten(1, (-1, self.width))
        shares = []
        for k in range(self.width):
            left = left - 1
            accepted = (1 + q_x[..., k]) / (2 if k == 0 else 4)
            ahead = (accepted / (1 - accepted) * 4).log() / -math.log(CHAIN)
            ahead = ahead.clamp(max=2 * self.nodes)  # infinite where q is 1: all that are left stand below
            below = ((left + ahead) / 2).round() if k + 1 < self.width else left
            below = torch.minimum(below, left).clamp(min=0)
            shares.append(torch.where(left < 0, -torch.inf, 1 + below))
            left = left - below
        return torch.stack(shares, 2).flatten(1)


Shape = FixedTree | DynamicTree


class TreeSettings(BaseSettings):
    """The shape of drafts: `branching` and `children`, `nodes` and `width`, or without these chains."""

    branching: list[Annotated[int, Field(ge=1, le=MOST_LEAVES)]] | None = None
    children: Literal["independent", "distinct", "best"] = "distinct"
    nodes: int | None = Field(default=None, ge=1, le=MOST_NODES)
    width: int = Field(default=4, ge=1, le=MOST_WIDTH)

    def check(self, prefix: str) -> None:
        super().check(prefix)
        if self.nodes is not None and self.children == "independent":
            raise ConfigError(f"{prefix}children=independent is not possible with {prefix}nodes={self.nodes}: it must "
                              "be distinct or best")  # fmt: skip
        if self.branching is None:
            return
        if self.nodes is not None:
            raise ConfigError(f"{prefix}branching={shown(self.branching)} is not possible with {prefix}nodes="
                              f"{self.nodes}: give null for one of them")  # fmt: skip
        if len(self.branching) > LARGEST_GAMMA or math.prod(self.branching) > MOST_LEAVES:
            raise ConfigError(
                f"{prefix}branching={shown(self.branching)} is not allowed: the product of its numbers, the leaves "
                f"of the tree, must be at most {MOST_LEAVES}"
            )

    def tree_shape(self, model: LanguageModel, greedy: bool) -> Shape | None:
        """The shape of a model's drafts for a target that is `greedy` or not; None for chains. Raises ConfigError."""
        if self.branching is None and self.nodes is None:
            return None
        if max(self.branching or [self.width]) > model.vocab_size:
            given = f"branching={self.branching}" if self.branching else f"width={self.width}"
            raise ConfigError(f"drafter.{given} is not possible: {model.name} has {model.vocab_size} tokens")
        best = greedy or model.sampling.greedy or self.children == "best"
        if self.nodes is not None:
            kind = DynamicTree if best else SampledTree
            return kind(self.nodes, self.width)
        return FixedTree(self.branching or [], "best" if best else self.children)


class BlockTreeSettings(BaseSettings):
    """The shape of drafts of a drafter that fills all places at once: chains if `nodes` is null, else a tree of as many
    guesses. They are drawn, siblings without replacement, or the likeliest."""

    nodes: int | None = Field(default=None, ge=1, le=MOST_NODES)
    children: Literal["distinct", "best"] = "distinct"
    width: int = Field(default=4, ge=1, le=MOST_WIDTH)

    def block_shape(self, sampling: Sampling, greedy: bool, vocab_size: int = sys.maxsize) -> DynamicTree | None:
        """The shape of drafts with the drafter's own sampling, None for chains; `greedy` as in `TreeSettings`."""
        if self.nodes is None:
            return None
        if self.children == "best" or sampling.greedy or greedy:
            return ProductTree(self.nodes, min(self.nodes, vocab_size))
        return SampledTree(self.nodes, min(self.width, vocab_size))


def widths(branching: list[int], gamma: int) -> list[int]:
    """The number of children of each node by depth, for a tree of depth gamma."""
    return [*branching, *[1] * gamma][:gamma]


def best_nodes(score: Tensor, most: int) -> Tensor:
    """Which nodes [B, P] are the `most` best by score [B, P], of equal ones the earlier; none with a score of -inf."""
    order = score.argsort(dim=1, descending=True, stable=True)[:, :most]
    return torch.zeros_like(score, dtype=torch.bool).scatter(1, order, True) & score.isfinite()


def without_replacement(q: Tensor, bits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Draws `count` different tokens from each q [B, n, V], in the order of an exponential race with bits [B, n].
    Returns tokens [B, n * count], and the distribution of each given those before it, [B, n * count, V]. If q has too
    few tokens, the first one is repeated as a point mass; a verifier that has rejected it will reject it again."""
    order = (q / exponentials(bits, q.shape[-1])).topk(count, dim=-1).indices  # [B, n, count]
    first = torch.zeros_like(q).scatter_(-1, order[..., :1], 1.0)
    tokens, qs, rest = [], [], q
    for k in range(count):
        left = rest.sum(-1, keepdim=True)
        enough = (left > 0) & (rest.gather(-1, order[..., k : k + 1]) > 0)
        token = torch.where(enough, order[..., k : k + 1], order[..., :1])
        qs.append(torch.where(enough, rest / left, first))
        tokens.append(token)
        rest = rest.scatter(-1, token, 0.0)
    return torch.cat(tokens, -1).flatten(1), torch.stack(qs, 2).flatten(1, 2)
