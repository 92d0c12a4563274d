"""Medusa: heads on the target's hidden state, whose best tokens make a sparse tree."""

import heapq
from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.context import Context
from specbench.decoding.sampling import Sampling
from specbench.decoding.state import Draft, State
from specbench.decoding.tree import depth_of_count
from specbench.drafters.blockwise import BlockwiseDrafter
from specbench.models.heads import Heads
from specbench.models.language_model import LanguageModel
from specbench.settings import ConfigError, setting


class MedusaDrafter(BlockwiseDrafter):
    """The tree of `size` guesses that, by the heads' accuracy on held-out text, is likeliest to hold the
    target's. Guesses are point masses: at any temperature a draw from p is looked up among them."""

    trees = True

    @dataclass
    class Settings(BlockwiseDrafter.Settings):
        size: int = setting(ge=1)

        outright = True

        def nodes(self, gamma: int) -> int:
            return self.size

    def __init__(self, settings: Settings, context: Context):
        super().__init__(settings, context)
        self._plant(settings.size, context.gamma, settings.heads)

    @classmethod
    def of(cls, target: LanguageModel, heads: Heads, sampling: Sampling, size: int, gamma: int) -> "MedusaDrafter":
        """From heads that are already there; `gamma` is the usual depth."""
        drafter = super().of(target, heads, sampling)
        drafter._plant(size, gamma, "given")
        return drafter

    def _plant(self, size: int, gamma: int, path: str) -> None:
        accuracy = self.heads.config.accuracy
        if not accuracy:
            raise ConfigError(f"drafter.heads={path} has no accuracy of its heads, which the tree is chosen by")
        self.size, self.usual = size, min(gamma, self.longest)
        self.trees_by_depth = {gamma: chosen_tree(accuracy[:gamma], size) for gamma in range(1, len(accuracy) + 1)}

    def nodes(self, gamma: int) -> int:
        return self.size

    def propose(self, state: State, gamma: list[int]) -> Draft:
        self.was_active = [row for row, on in enumerate(state.active) if on]
        gamma = [min(g, self.longest) if able else 0 for g, able in zip(gamma, self.can_guess(state), strict=True)]
        if max(gamma) == 0:
            return Draft.empty(state.batch_size, state.tokens.device)
        # Near the end of a text the usual tree too, cut by count: few shapes are to occur.
        parent, rank = self.trees_by_depth[max(max(gamma), self.usual)]
        steps = int(depth_of_count(parent, torch.device("cpu"))[-1])
        best = self._best(self.logits(state, steps), state, max(rank) + 1)  # [B, steps, ranks]
        depth = depth_of_count(parent, best.device)[1:]
        tokens = best[:, depth - 1, torch.tensor(rank, device=best.device)]
        ends = [sum(d <= g for d in depth.tolist()) for g in gamma]
        return Draft(tokens, parent, None, torch.tensor(ends, device=best.device))

    def _best(self, logits: Tensor, state: State, count: int) -> Tensor:
        return self.sampling.penalize(logits, self._seen(state)).topk(count, dim=-1).indices


def chosen_tree(accuracy: list[list[float]], size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(parent, rank) of the `size` nodes with the largest product of accuracies along their path; the
    node of rank i is its head's i-th best token. Accuracy falls with the rank, so parents come first."""
    falling = [[max(row[i:]) for i in range(len(row))] for row in accuracy]
    waiting = [(-falling[0][0], (0,))]
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
