"""A beam search as a state that advances level by level, and the reading of its hypotheses by a model.

Scores are sums of log p in float32. A hypothesis ends at a stop token or at the limit; its final score is its sum
over its length to the power `length_penalty`. These are the rules of `generate(num_beams=w, do_sample=False)` of
transformers.

n running hypotheses, N new nodes, M entries of a tree in the cache, V vocabulary.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specbench.decoding.sequence import EncoderInput
from specbench.decoding.token_tree import Tree
from specbench.models.language_model import LanguageModel

MOST_UNUSED = 64  # columns of a cache


@dataclass(frozen=True)
class BeamRules:
    """The settings of a beam search, and of the speculative one."""

    width: int  # w, the running hypotheses
    drafter_width: int  # u, of the drafter's own search
    length_penalty: float
    early_stopping: bool  # whether w finished hypotheses end the search, also if running ones may become better


class Node:
    """A token of a hypothesis, behind its parent; the first is the prompt's last. `children`: drafted, by token."""

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


Chosen = tuple[Node, int]  # a continuation that the search goes on with: its parent and its token


class Search:
    """A search: `running` are the nodes at which the running hypotheses end, best first, and `scores` [n] their sums.
    `levels` counts the tokens of each. When it is `over`, `finished` are the w best hypotheses, best first."""

    def __init__(
        self, rules: BeamRules, last: int, stop_tokens: frozenset[int], limit: int, device: torch.device,
        forced: int = 0,
    ):  # fmt: skip
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
                chosen.append((parent, token))
                kept.append(rank)
        self.finished = sorted(self.finished, key=lambda found: -found.score)[:w]
        self.scores = best[kept]
        self.over = not chosen or self._is_decided()
        return [] if self.over else chosen

    def _is_decided(self) -> bool:
        """Whether w have finished, and the best running one, if it ended here, would not be better than the worst."""
        if len(self.finished) < self.rules.width:
            return False
        running = float(self.scores[0] / (self.levels + self.forced) ** self.rules.length_penalty)
        return self.rules.early_stopping or not running > self.finished[-1].score


class TreeReader:
    """A model's cache during one search. `columns` are the nodes in it, in order of their columns, or None where one
    was given up; those before `trunk` are the text that all running hypotheses share, at its own positions."""

    def __init__(
        self, model: LanguageModel, prompt: Sequence[int], columns: int, encoder_input: EncoderInput | None = None
    ):
        """Reads an encoder's input, if there is one, and a prompt but for its last token, into an empty cache."""
        self.model = model
        model.allocate(1, columns)
        model.open_text(torch.tensor([list(prompt)], device=model.device), len(prompt), columns, encoder_input)
        self.begin, self.trunk = len(prompt) - 1, 0
        self.columns: list[Node | None] = []
        self.place: dict[Node, int] = {}
        self.tokens = 0  # that were read, the prompt's not counted

    def unread(self, nodes: Iterable[Node]) -> list[Node]:
        """The nodes on the paths to these that are not in the cache, by depth."""
        found: dict[Node, None] = {}
        for end in nodes:
            for node in end.path():
                if node in self.place or node in found:
                    break
                found[node] = None
        return sorted(found, key=lambda node: node.depth)

    def read(self, nodes: Sequence[Node]) -> Tensor:
        """Reads nodes, parents before their children, whose earlier nodes are in the cache. Returns log p [N, V] of the
        token after each; as in generate(), suppressed tokens have none, and the others are not normalised again."""
        first = len(self.columns)
        for node in nodes:
            self.place[node] = len(self.columns)
            self.columns.append(node)
        device, start = self.model.device, self.begin + first
        visible = self.model.rollback_to([start], len(nodes))
        depth = torch.tensor([[node.depth - self.trunk for node in nodes]], device=device)
        tree = Tree(depth, torch.from_numpy(self._sees(nodes))[None].to(device))
        tokens = torch.tensor([[node.token for node in nodes]], device=device)
        logits = self.model.forward(tokens, torch.tensor([start], device=device), visible, tree=tree, suppressing=False)
        self.tokens += len(nodes)
        return self.model.allowed(logits[0].float().log_softmax(-1))

    def _sees(self, nodes: Sequence[Node]) -> npt.NDArray[np.bool_]:
        """[N, M]: of the entries behind the trunk, those on the path to each node."""
        sees = np.zeros((len(nodes), len(self.columns) - self.trunk), bool)
        for row, end in zip(sees, nodes, strict=True):
            for node in end.path():
                if (entry := self.place[node] - self.trunk) < 0:
                    break
                row[entry] = True
        return sees

    def keep(self, running: Sequence[Node]) -> None:
        """Gives up all nodes but those on the paths to the running ones."""
        alive: set[Node] = set()
        for end in running:
            alive.update(takewhile(lambda node: node not in alive, end.path()))
        entries = [node if node in alive else None for node in self.columns[self.trunk :]]
        while entries and entries[-1] is None:
            entries.pop()
        self.columns[self.trunk :] = entries
        self.place = {node: column for column, node in enumerate(self.columns) if node is not None}
        if entries.count(None) > MOST_UNUSED:
            self._move_together()

    def _move_together(self) -> None:
        """Moves the columns of the nodes that are left together, by depth, and finds the trunk again."""
        entries: list[Node] = [node for node in self.columns[self.trunk :] if node is not None]
        entries.sort(key=lambda node: node.depth)  # a node that was read late may be less deep
        path = torch.tensor([[self.place[node] - self.trunk for node in entries]], device=self.model.device)
        self.model.commit_path(path, torch.tensor([self.begin + self.trunk], device=self.model.device))
        self.columns[self.trunk :] = entries
        self.place = {node: column for column, node in enumerate(self.columns) if node is not None}
        depths = [node.depth for node in entries]
        while self.trunk < len(self.columns) and depths.count(self.trunk) == 1:
            self.trunk += 1
