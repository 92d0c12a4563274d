"""Reads the hypotheses of a beam search into one row of a model's cache, as a token tree.

N new nodes, M entries of the tree, P columns, V vocabulary.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specbench.beams.search import Node
from specbench.decoding.sequence import EncoderInput
from specbench.decoding.token_tree import Tree
from specbench.models.language_model import LanguageModel

MOST_UNUSED = 64  # columns
Sees = npt.NDArray[np.bool_]


class TreeReader:
    """A model's cache during one search. `columns` are the nodes in it, in order of their columns, or None where one
    was given up; those before `trunk` are the text that all running hypotheses share, at its own positions."""

    def __init__(
        self, model: LanguageModel, prompt: Sequence[int], columns: int, encoder_input: EncoderInput | None = None
    ):
        """Reads an encoder's input, if there is one, and a prompt, all but its last token, into an empty cache of so
        many columns."""
        self.model = model
        model.allocate(1, columns)
        model.open_text(torch.tensor([list(prompt)], device=model.device), len(prompt), columns, encoder_input)
        self.begin, self.trunk = len(prompt) - 1, 0
        self.columns: list[Node | None] = []
        self.place: dict[Node, int] = {}
        self.paths: dict[Node, Sees] = {}  # rows of `_sees`, up to the node's own entry: a child's begins with it
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
        token after each of them; as in generate(), suppressed tokens have none, and the others are not normalised
        again."""
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
        positions = self.begin + torch.tensor([node.depth for node in nodes], device=device)
        return self.model.suppressed(logits[0].float().log_softmax(-1), positions)

    def _sees(self, nodes: Sequence[Node]) -> Sees:
        """[N, M]: of the entries behind the trunk, those on the path to each node."""
        sees = np.zeros((len(nodes), len(self.columns) - self.trunk), bool)
        for row, end in zip(sees, nodes, strict=True):
            for node in end.path():
                if (known := self.paths.get(node)) is not None:
                    row[: len(known)] |= known
                    break
                if (entry := self.place[node] - self.trunk) < 0:
                    break
                row[entry] = True
            self.paths[end] = row[: self.place[end] - self.trunk + 1]  # ancestors are before it
        return sees

    def keep(self, running: Sequence[Node]) -> None:
        """Gives up all nodes but those on the paths to the running ones."""
        alive = {node for end in running for node in self._behind_trunk(end)}
        entries = [node if node in alive else None for node in self.columns[self.trunk :]]
        while entries and entries[-1] is None:
            entries.pop()
        left = self.columns[: self.trunk] + entries
        self.place = {node: column for column, node in enumerate(left) if node is not None}
        self.paths = {node: self.paths[node] for node in entries if node is not None and node in self.paths}
        self.columns = left
        if entries.count(None) > MOST_UNUSED:
            self._move_together()

    def _behind_trunk(self, end: Node) -> Iterable[Node]:
        """The nodes of a path that are in the cache behind the trunk."""
        for node in end.path():
            column = self.place.get(node)
            if column is not None and column < self.trunk:
                return
            if column is not None:
                yield node

    def _move_together(self) -> None:
        """Moves the columns of the nodes that are left together, by depth, and finds the trunk again."""
        entries: list[Node] = [node for node in self.columns[self.trunk :] if node is not None]
        entries.sort(key=lambda node: node.depth)  # a node that was read late may be less deep
        path = torch.tensor([[self.place[node] - self.trunk for node in entries]], device=self.model.device)
        self.model.commit_path(path, torch.tensor([self.begin + self.trunk], device=self.model.device))
        self.columns[self.trunk :] = entries
        self.paths = {}
        self.place = {node: column for column, node in enumerate(self.columns) if node is not None}
        depths = [node.depth for node in entries]
        while self.trunk < len(self.columns) and depths.count(self.trunk) == 1:
            self.trunk += 1
