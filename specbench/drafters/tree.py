"""One model drafts a static token tree: several children of each guess, one forward per level (SpecInfer)."""

import math
import operator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.model import Scores
from specbench.decoding.noise import PROPOSAL, exponentials, node_bits
from specbench.decoding.rows import Rows, last_tokens, seen_tokens
from specbench.decoding.sampling import draw
from specbench.decoding.state import State
from specbench.decoding.token_tree import branching_tree, level_ranges, levels_of, newest
from specbench.decoding.transfers import counts
from specbench.drafters.model import ModelDrafter, VocabularySettings, load_drafter
from specbench.errors import ConfigError, shown
from specbench.models.context import Context
from specbench.models.language_model import LanguageModel
from specbench.settings import LARGEST_GAMMA, setting

MOST_LEAVES = 1000
CHILDREN = ("independent", "distinct", "best")


class TreeDrafter(ModelDrafter):
    """Drafts the tree in which every node of depth d - 1 has branching[d - 1] children; one child beyond the list.
    `children` says how they are chosen: "independent" draws from q; "distinct" draws without replacement, where q of
    the second child excludes the first; "best", the most probable tokens by q, as point masses. Temperature 0 always
    uses "best"."""

    trees = True
    on_device = True
    ends_early = False

    @dataclass
    class Settings(VocabularySettings):
        branching: list[int] = setting(ge=1, le=MOST_LEAVES)
        children: str = setting(choices=CHILDREN)

        def check(self, prefix: str) -> None:
            super().check(prefix)
            if len(self.branching) > LARGEST_GAMMA or math.prod(self.branching) > MOST_LEAVES:
                raise ConfigError(
                    f"{prefix}branching={shown(self.branching)} is not allowed: the product of its numbers, the leaves "
                    f"of the tree, must be at most {MOST_LEAVES}"
                )

    @classmethod
    def point_masses(cls, settings: Settings) -> bool:
        return settings.children == "best"

    @classmethod
    def nodes(cls, settings: Settings, gamma: int) -> int:
        return sum(accumulate(widths(settings.branching, gamma), operator.mul))

    def __init__(
        self, model: LanguageModel, vocab_size: int, gamma: int, branching: list[int], children: str, stream: int = 0
    ):
        """`vocab_size` is the target's V; `gamma` is the usual gamma. Drafters that draft side by side need different
        numbers `stream`, for independent noise."""
        super().__init__(model, vocab_size, gamma)
        self.branching, self.stream = branching, stream
        self.children = "best" if model.sampling.greedy else children
        self.only_likeliest = self.children == "best"

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "TreeDrafter":
        model = load_drafter(settings, context, target, settings.vocabulary)
        if max(settings.branching, default=0) > model.vocab_size:
            raise ConfigError(
                f"drafter.branching={settings.branching} is not possible: {model.name} has {model.vocab_size} tokens"
            )
        return cls(model, target.vocab_size, context.gamma, settings.branching, settings.children)

    def propose(self, state: State, gamma: list[int]) -> Draft:
        depth = self.steps(gamma)
        if depth == 0:
            self.draft_nothing(state)
            return Draft.empty(state.batch_size, state.tokens.device)
        parent = branching_tree(widths(self.branching, depth))
        levels = level_ranges(levels_of(parent))
        given, visible = self.prepare(state, levels[-1].start + 1)
        phase = self.model.executor.phase(self._draft_tree, self.model, usual=depth == self.gamma)
        tokens, q = phase(state.rows, *given, parent, visible)
        # Of each path the cache will hold all guesses but the last.
        rows = zip(self.model.cached, state.reach, state.active, strict=True)
        self.model.cached = [length + depth - 1 if on else cached for cached, length, on in rows]
        ends = [0, *(level.stop for level in levels)]
        count = counts(tuple(ends[g] for g in gamma), tokens.device)
        return Draft.tree(tokens, parent, q, count, repeats=self.children == "independent")

    def _draft_tree(
        self, rows: Rows, width: int, parent: tuple[int, ...], visible: int
    ) -> tuple[Tensor, Tensor | None]:
        """All guesses [B, N] and the q that they were drawn from [B, N, V], None for point masses."""
        text, length = rows.tokens, rows.length
        level_of = self.model.executor.leaf(self._level, self.model)
        bits = node_bits(rows.noise[PROPOSAL], length, levels_of(parent), stream=self.stream)
        penalised = self.model.sampling.repetition_penalty != 1
        seen = seen_tokens(text, length, self.vocab_size)[:, None] if penalised else None
        (x, first), above = last_tokens(rows, width), parent[:0]
        guesses: list[Tensor] = []
        laws: list[Tensor] = []
        for level in level_ranges(levels_of(parent)):
            parents = 1 if not guesses else guesses[-1].shape[1]
            own = bits[:, level.start : level.stop].clone(memory_format=torch.contiguous_format)  # same strides always
            x, q = level_of(x, first, own, seen, visible, above, parents)
            guesses.append(x)
            laws.append(q)
            if seen is not None:
                seen = seen.repeat_interleave(len(level) // parents, 1).scatter(2, x[..., None], True)
            first, above = length + level.start, parent[: level.stop]
        return torch.cat(guesses, 1), None if self.children == "best" else torch.cat(laws, 1)

    def _level(
        self, x: Tensor, first: Tensor, bits: Tensor, seen: Tensor | None, visible: int, above: tuple[int, ...],
        parents: int,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Draws the next level of the tree: guesses [B, n], and their q [B, n, V] (None for point masses), with bits
        [B, n]. Reads x [B, m] first: the last level of the tree `above`, or if that is empty the end of the text; the
        first token is at position first [B]. seen [B, n', V] bool or None."""
        tree = newest(above, x.shape[1], x.device) if above else None
        logits = self.model.forward(x, first, visible, tree=tree, keep_logits=0 if above else 1)
        sampling, each = self.model.sampling, bits.shape[1] // parents
        if self.children == "best":
            logits = sampling.penalize(logits[:, -parents:].float(), seen)
            return logits.topk(each, dim=-1).indices.flatten(1), None
        q = sampling.probabilities(logits[:, -parents:], seen)
        if self.children == "independent":
            q = q.repeat_interleave(each, 1)
            return draw(q, bits), q
        return without_replacement(q, bits[:, ::each], each)

    def settle(self, state: State, draft: Draft, verdict: Verdict, scores: Scores, base: Tensor) -> None:
        """Keeps the accepted path in the drafter's cache too, which does not hold the last level. base [B] is the
        position of node 0."""
        if verdict.path is not None and not draft.is_chain and draft.depth > 1:
            self.model.keep_path(verdict.path[:, :-1], base)


def widths(branching: list[int], gamma: int) -> list[int]:
    """The number of children of each node by depth, for a tree of depth gamma."""
    return [*branching, *[1] * gamma][:gamma]


def without_replacement(q: Tensor, bits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Draws `count` different tokens from each q [B, n, V], in the order of an exponential race with bits [B, n].
    Returns tokens [B, n * count], and the distribution of each given those before it, [B, n * count, V]. If q has too
    few tokens, the first one is repeated as a point mass; a verifier that has rejected it will reject it again."""
    order = (q / exponentials(bits, q.shape[-1])).topk(count, dim=-1).indices  # [B, n, count]
    first = torch.zeros_like(q).scatter_(-1, order[..., :1], 1.0)
    tokens, laws, rest = [], [], q
    for k in range(count):
        left = rest.sum(-1, keepdim=True)
        enough = (left > 0) & (rest.gather(-1, order[..., k : k + 1]) > 0)
        token = torch.where(enough, order[..., k : k + 1], order[..., :1])
        laws.append(torch.where(enough, rest / left, first))
        tokens.append(token)
        rest = rest.scatter(-1, token, 0.0)
    return torch.cat(tokens, -1).flatten(1), torch.stack(laws, 2).flatten(1, 2)
