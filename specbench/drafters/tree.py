"""Tree drafts of any drafter whose steps give q: one read per level, of the nodes that have children."""

import operator
from itertools import accumulate
from typing import Any

from torch import Tensor

from specbench.decoding.draft import Draft, Scores, Verdict
from specbench.decoding.rows import Rows, all_rows, seen_tokens
from specbench.decoding.state import State
from specbench.decoding.token_tree import Tree, take_rows
from specbench.drafters.model import Memory, ModelDrafter, VocabularySettings, load_drafter
from specbench.drafters.tree_shapes import DynamicTree, Nodes, Shape, TreeSettings, widths
from specbench.errors import ConfigError
from specbench.models.language_model import LanguageModel
from specbench.models.load import Context


class TreeDrafter(ModelDrafter):
    """Drafts trees of a `shape`, None for chains. A node is read behind its ancestors, with its parent's memory."""

    trees = True
    ends_early = False

    class Settings(TreeSettings, VocabularySettings):
        def check(self, prefix: str) -> None:
            super().check(prefix)
            if self.branching is None and self.nodes is None:
                raise ConfigError(f"{prefix}branching=null and {prefix}nodes=null are chains: use drafter=model")

    @classmethod
    def branches(cls, settings: TreeSettings) -> bool:
        return settings.branching is not None or settings.nodes is not None

    @classmethod
    def point_masses(cls, settings: TreeSettings) -> bool:
        return settings.children == "best" and cls.branches(settings)

    @classmethod
    def nodes(cls, settings: TreeSettings, gamma: int) -> int:
        if settings.nodes is not None:
            return max(settings.nodes, settings.width * gamma)  # those that the target reads, and those of the drafter
        return sum(accumulate(widths(settings.branching or [], gamma), operator.mul))

    @classmethod
    def candidates(cls, settings: Any, context: Context) -> int:
        found = settings.nodes and sum(DynamicTree(settings.nodes, settings.width).levels(context.gamma))
        return found or cls.nodes(settings, context.gamma)

    def __init__(self, model: LanguageModel, vocab_size: int, gamma: int, shape: Shape | None):
        """`vocab_size` is the target's V; `gamma` is the usual gamma."""
        super().__init__(model, vocab_size, gamma)
        self.shape, self.trees = shape, shape is not None
        self.only_likeliest = shape is not None and shape.point_masses
        self.place: Tensor | None = None  # [B, P + 1], where the drafter read each node of the draft, if elsewhere

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "TreeDrafter":
        model = load_drafter(settings, context, target, settings.vocabulary)
        return cls(model, target.vocab_size, context.gamma, settings.tree_shape(model, target.sampling.greedy))

    def drawn(self, state: State, gamma: list[int], steps: int) -> Draft:
        if self.shape is None:
            return super().drawn(state, gamma, steps)
        inputs = self.prepare(state, self.shape.reads(steps) + 1)
        # The cache will hold the guesses of a path but for the last, which was not read.
        rows = zip(self.model.cached, state.lengths, state.active, strict=True)
        self.model.cached = [min(cached, n + steps - 1) if on else cached for cached, n, on in rows]
        draft_tree = self.model.executor.compiled_whole(self._draft_tree, self.model, usual=steps == self.gamma)
        found = draft_tree(self.model.rows_of(state), steps, *inputs)
        grown = [None if part is None else all_rows(part, state.batch_size) for part in found]
        draft, self.place = self.shape.draft(grown, gamma, steps)
        return draft

    def _draft_tree(
        self, rows: Rows, depth: int, x: Tensor, first: Tensor, memory: Memory, visible: int
    ) -> tuple[Tensor | None, ...]:
        """What `grow` of the shape returns."""
        assert self.shape is not None
        level = self.model.executor.compiled(self._level, self.model)
        penalised = self.model.sampling.repetition_penalty != 1
        seen = seen_tokens(rows.tokens, rows.length, self.vocab_size)[:, None] if penalised else None

        def step(nodes: Nodes | None, bits: Tensor | None) -> tuple[Tensor, Tensor | None]:
            nonlocal x, first, memory, seen
            tree = None
            if nodes is not None:
                x, up, tree = nodes
                assert tree is not None
                first = rows.length + tree.sees.shape[2] - 1 - x.shape[1]
                memory = tuple(None if part is None else take_rows(part, up) for part in memory)
                seen = None if seen is None else take_rows(seen, up).scatter(2, x[..., None], True)
            guesses, q, memory = level(x, first, memory, bits, seen, visible, tree)
            return guesses, q

        return self.shape.grow(step, rows, depth)

    def _level(
        self, x: Tensor, first: Tensor, memory: Memory, bits: Tensor | None, seen: Tensor | None, visible: int,
        tree: Tree | None,
    ) -> tuple[Tensor, Tensor | None, Memory]:  # fmt: skip
        """The `children` of the nodes that `read` reads, and the memory of the next step. seen [b, m, V] or None."""
        assert self.shape is not None
        logits, memory = self.read(x, first, memory, visible, tree)
        return *self.shape.children(self.model.sampling, logits, bits, seen), memory

    def rollback(self, state: State, draft: Draft, verdict: Verdict, scores: Scores, root: Tensor) -> None:
        """Keeps the accepted path in the drafter's cache too, but for its last node, which is read again."""
        if verdict.path is not None and not draft.is_chain and draft.depth > 1:
            self.model.commit_path(verdict.path[:, :-1], root, self.place)
