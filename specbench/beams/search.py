"""A beam search as a state that advances level by level; it knows nothing of models.

Scores are sums of log p in float32. A hypothesis ends at a stop token or at the limit; its final score is its sum
over its length to the power `length_penalty`. These are the rules of `generate(num_beams=w, do_sample=False)` of
transformers.

n running hypotheses, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class BeamRules:
    """The settings of a beam search, and of the speculative one."""

    width: int  # w, the running hypotheses
    drafter_width: int  # u, of the drafter's own search
    length_penalty: float
    early_stopping: bool  # whether w finished hypotheses end the search, also if running ones may become better


class Node:
    """A token of a hypothesis. The text is read from the last one backwards; the first node is the prompt's last token.
    `children` are drafted continuations by token."""

    __slots__ = ("children", "depth", "parent", "token")

    def __init__(self, token: int, parent: "Node | None" = None):
        self.token, self.parent = token, parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[int, Node] = {}

    def path(self) -> "Iterator[Node]":
        """This node, its parent, and so on to the first node."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def text(self) -> list[int]:
        """The new tokens up to this one."""
        return [node.token for node in self.path()][-2::-1]


class Hypothesis(NamedTuple):
    """A finished hypothesis."""

    tokens: tuple[int, ...]
    score: float  # its sum of log p, over its length to the power length_penalty


@dataclass(frozen=True)
class FoundBeams:
    """What a search found for one request, and what it took. Levels behind the best text's end count too."""

    hypotheses: tuple[Hypothesis, ...]  # best first
    levels: int
    calls: int  # of the target
    target_tokens: int  # that the target read, the prompt's not counted
    drafter_tokens: int


class Chosen(NamedTuple):
    """A continuation that the search goes on with."""

    parent: Node
    token: int


class Search:
    """A search: `running` are the nodes at which the running hypotheses end, best first, and `scores` [n] their sums.
    `levels` counts the tokens of each. When it is `over`, `finished` are the w best hypotheses, best first."""

    def __init__(
        self,
        rules: BeamRules,
        last: int,
        stop_tokens: frozenset[int],
        limit: int,
        device: torch.device,
        forced: int = 0,
    ):
        """`last` is the prompt's last token, `limit` the most new tokens. `forced` tokens of the prompt count for the
        length of a hypothesis, as those that generate() forces do."""
        self.rules, self.stop_tokens, self.limit, self.forced = rules, stop_tokens, limit, forced
        self.running = [Node(last)]
        self.scores = torch.zeros(1, device=device)
        self.levels, self.over = 0, False
        self.finished: list[Hypothesis] = []

    def step(self, log_p: Tensor) -> list[Chosen]:
        """Adds a level, by log p [n, V] after each running hypothesis. Returns the continuations that the search goes
        on with, best first, whose scores are in `scores` already; their nodes become `running`. Empty if it is over."""
        w, penalty = self.rules.width, self.rules.length_penalty
        totals = (log_p + self.scores[:, None]).flatten()
        most = min(max(2, 1 + len(self.stop_tokens)) * w, len(totals))  # w of them at least end at no stop token
        best, places = totals.topk(most)
        self.levels += 1
        final = (best / (self.levels + self.forced) ** penalty).tolist()
        chosen: list[Chosen] = []
        kept: list[int] = []
        for rank, place in enumerate(places.tolist()):
            parent, token = self.running[place // log_p.shape[1]], place % log_p.shape[1]
            if self.levels == self.limit or token in self.stop_tokens:
                if rank < w:
                    self.finished.append(Hypothesis((*parent.text(), token), final[rank]))
            elif len(chosen) < w:
                chosen.append(Chosen(parent, token))
                kept.append(rank)
        self.finished = sorted(self.finished, key=lambda found: -found.score)[:w]
        self.scores = best[kept]
        self.over = not chosen or self._is_decided()
        return [] if self.over else chosen

    def _is_decided(self) -> bool:
        """Whether no running hypothesis is waited for: w have finished, and the best running one, if it ended here,
        would not be better than the worst of them."""
        if len(self.finished) < self.rules.width:
            return False
        running = float(self.scores[0] / (self.levels + self.forced) ** self.rules.length_penalty)
        return self.rules.early_stopping or not running > self.finished[-1].score
