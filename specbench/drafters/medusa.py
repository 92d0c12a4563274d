"""Medusa (Cai et al. 2024): heads on the target's hidden state, whose most probable tokens make a sparse tree."""

import heapq
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specbench.decoding.draft import Draft
from specbench.decoding.sampling import Sampling
from specbench.decoding.state import State
from specbench.decoding.token_tree import depths, levels_of
from specbench.decoding.transfers import constant, counts, upload
from specbench.drafters.blockwise import BlockwiseDrafter
from specbench.errors import ConfigError
from specbench.models.context import Context
from specbench.models.language_model import LanguageModel
from specbench.models.trained_parts import Heads, load_part
from specbench.settings import setting


class MedusaDrafter(BlockwiseDrafter):
    """Drafts the tree of `size` guesses that is most likely to contain the target's tokens, judged by the heads'
    accuracy on held-out text. Guesses are point masses at every temperature."""

    trees = True
    on_device = True

    @dataclass
    class Settings(BlockwiseDrafter.Settings):
        size: int = setting(ge=1, le=10_000)

    @classmethod
    def point_masses(cls, settings: Settings) -> bool:
        return True

    @classmethod
    def nodes(cls, settings: Settings, gamma: int) -> int:
        return settings.size

    def __init__(self, target: LanguageModel, heads: Heads, sampling: Sampling, size: int, gamma: int):
        """`gamma` is the usual depth of a draft. The heads' config must hold their accuracy."""
        super().__init__(target, heads, sampling)
        accuracy = heads.config.accuracy
        self.size, self.usual = size, min(gamma, self.longest)
        self.trees_by_depth = {depth: chosen_tree(accuracy[:depth], size) for depth in range(1, len(accuracy) + 1)}

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "MedusaDrafter":
        heads = load_part(Heads, settings.heads, "drafter.heads", target)
        if not heads.config.accuracy:
            raise ConfigError(
                f"drafter.heads={settings.heads} has no accuracy of its heads, which the tree is chosen by"
            )
        return cls(target, heads, settings.sampling_of(context.sampling), settings.size, context.gamma)

    def propose(self, state: State, gamma: list[int]) -> Draft:
        self.was_active = list(state.active)
        gamma = [min(g, self.longest) if able else 0 for g, able in zip(gamma, self.can_guess(state), strict=True)]
        if max(gamma) == 0:
            return Draft.empty(state.batch_size, state.tokens.device)
        # Near the end of a text the usual tree too, cut by count, so that few shapes occur.
        parent, rank = self.trees_by_depth[max(max(gamma), self.usual)]
        depth = depths(levels_of(parent))
        best = self._best(self.logits(state, depth[-1]), state, max(rank) + 1)  # [B, depth, ranks]
        head, place = constant(upload)((tuple(d - 1 for d in depth), rank), best.device)
        ends = tuple(sum(d <= g for d in depth) for g in gamma)
        return Draft.tree(best[:, head, place], parent, None, counts(ends, best.device))

    def _best(self, logits: Tensor, state: State, count: int) -> Tensor:
        """The `count` most probable tokens [B, depth, count] by logits [B, depth, V] of the heads."""
        return self.sampling.penalize(logits, self._seen(state)).topk(count, dim=-1).indices


def chosen_tree(accuracy: list[list[float]], size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Medusa's sparse tree: the `size` nodes with the largest product of accuracies along their path. Returns the
    parent and the rank of each node; a node of rank i at depth d is the i-th best token of head d - 1. accuracy[k][i]
    is how often the i-th best token of head k was right; made falling in i, so that parents are chosen first."""
    falling = [[max(row[i:]) for i in range(len(row))] for row in accuracy]
    waiting: list[tuple[float, tuple[int, ...]]] = [(-falling[0][0], (0,))]
    chosen: list[tuple[int, ...]] = []
    while waiting and len(chosen) < size:
        score, path = heapq.heappop(waiting)
        chosen.append(path)
        depth, rank = len(path), path[-1]
        if rank + 1 < len(falling[depth - 1]) and falling[depth - 1][rank] > 0:
            heapq.heappush(
                waiting, (score / falling[depth - 1][rank] * falling[depth - 1][rank + 1], (*path[:-1], rank + 1))
            )
        if depth < len(falling):
            heapq.heappush(waiting, (score * falling[depth][0], (*path, 0)))
    chosen.sort(key=lambda path: (len(path), path))
    place = {path: i for i, path in enumerate(chosen)}
    return tuple(place.get(path[:-1], -1) for path in chosen), tuple(path[-1] for path in chosen)
