"""Heads on the target's hidden state draft: blockwise parallel decoding (Stern et al. 2018; sections 3.6 and 5), and
Medusa's tree of their most probable tokens (Cai et al. 2024)."""

import heapq
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from specbench.decoding.draft import Draft, Scores, Verdict
from specbench.decoding.sampling import Sampling
from specbench.decoding.state import State
from specbench.decoding.token_tree import depths, levels_of
from specbench.decoding.transfers import constant, counts, upload
from specbench.drafters.base import OwnSampling
from specbench.drafters.parallel import ParallelDrafter
from specbench.drafters.tree_shapes import BlockTreeSettings
from specbench.errors import ConfigError
from specbench.models.heads import Heads, MedusaHeads, PartSettings, load_heads
from specbench.models.language_model import LanguageModel
from specbench.models.load import Context
from specbench.models.sizes import stored
from specbench.policies.base import GammaPolicy

HEADS = "heads of python -m specbench.train or of others, which must be a hub id or a folder with a config.json"


class HeadsSettings(PartSettings, OwnSampling):
    """Heads, and how their logits become q."""

    must: ClassVar[str] = HEADS
    path: str = Field(description="a folder of heads")


class BlockwiseDrafter(ParallelDrafter):
    """Draws guess k from the logits of head k on the hidden state from which the last round drew its last token. A
    draft costs no forward pass of a model. In a row's first round, without a hidden state, nothing is drafted."""

    needs_hidden = True

    class Settings(HeadsSettings, BlockTreeSettings):
        pass

    def __init__(self, target: LanguageModel, heads: Heads | MedusaHeads, sampling: Sampling):
        self.target, self.heads, self.sampling = target, heads, sampling
        self.vocab_size, self.longest = target.vocab_size, heads.config.heads
        weights, self.own_bytes = stored(heads)
        borrowed = 0 if heads.own_outputs else heads.config.hidden_size * target.vocab_size
        self.operations_per_token = weights / self.longest + borrowed

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "BlockwiseDrafter":
        heads = load_heads(settings.path, "drafter.path", target)
        drafter = cls(target, heads, settings.own(context).sampling)
        drafter.draft_as(settings.block_shape(drafter.sampling, target.sampling.greedy, drafter.vocab_size))
        return drafter

    def begin(self, state: State, stop: GammaPolicy | None = None) -> None:
        self.hidden: Tensor | None = None  # [B, H], from which each row's last committed token was drawn
        self.known: list[int | None] = [None] * state.batch_size  # by row, the request that its hidden state belongs to

    def can_guess(self, state: State) -> list[bool]:
        return [known == now for known, now in zip(self.known, state.request_ids, strict=True)]

    def logits(self, state: State, steps: int) -> Tensor:
        output: Any = self.target.module.get_output_embeddings()
        assert self.hidden is not None
        return self.heads.logits(self.hidden, steps, output).float()

    def rollback(self, state: State, draft: Draft, verdict: Verdict, scores: Scores, root: Tensor) -> None:
        self.hidden = scores.hidden_after(verdict).clone()  # a CUDA graph overwrites it in the next round
        # A row that ended, or whose prompt is still being read, has a hidden state of no use.
        ids = zip(state.active, state.request_ids, strict=True)
        self.known = [request_id if active else None for active, request_id in ids]


class MedusaDrafter(BlockwiseDrafter):
    """Drafts the tree of `size` guesses that is most likely to contain the target's tokens, judged by the heads'
    accuracy on held-out text. Guesses are point masses at every temperature."""

    trees = True

    class Settings(HeadsSettings):
        size: int = Field(ge=1, le=10_000)

    @classmethod
    def point_masses(cls, settings: Settings) -> bool:
        return True

    @classmethod
    def nodes(cls, settings: Settings, gamma: int) -> int:
        return settings.size

    def __init__(self, target: LanguageModel, heads: Heads | MedusaHeads, sampling: Sampling, size: int, gamma: int):
        """`gamma` is the usual depth of a draft. The heads' config must hold their accuracy."""
        super().__init__(target, heads, sampling)
        accuracy = heads.config.accuracy
        self.usual = min(gamma, self.longest)
        self.trees_by_depth = {depth: chosen_tree(accuracy[:depth], size) for depth in range(1, len(accuracy) + 1)}

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "MedusaDrafter":
        heads = load_heads(settings.path, "drafter.path", target)
        if not heads.config.accuracy:
            raise ConfigError(f"drafter.path={settings.path} has no accuracy of its heads, which the tree is chosen by")
        return cls(target, heads, settings.own(context).sampling, settings.size, context.gamma)

    def guesses(self, state: State, gamma: list[int]) -> Draft:
        # Near the end of a text the usual tree too, cut by count, so that few shapes occur.
        parent, rank = self.trees_by_depth[max(max(gamma), self.usual)]
        depth = depths(levels_of(parent))
        logits = self.sampling.penalize(self.logits(state, depth[-1]), self.seen(state))  # [B, depth, V]
        best = logits.topk(max(rank) + 1, dim=-1).indices  # [B, depth, ranks]
        head, place = constant(upload)((tuple(d - 1 for d in depth), rank), best.device)
        ends = tuple(sum(d <= g for d in depth) for g in gamma)
        return Draft.tree(best[:, head, place], parent, None, counts(ends, best.device))


def chosen_tree(accuracy: list[list[float]], size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Medusa's sparse tree: the `size` nodes with the largest product of accuracies along their path. Returns the
    parent and the rank of each guess; one of rank i at depth d is the i-th best token of head d - 1. accuracy[k][i]
    is how often the i-th best token of head k was right; made falling in i, so that parents are chosen first."""
    falling = [[max(row[i:]) for i in range(len(row))] for row in accuracy]
    waiting: list[tuple[float, tuple[int, ...]]] = [(-falling[0][0], (0,))]
    chosen: list[tuple[int, ...]] = []
    while waiting and len(chosen) < size:
        score, path = heapq.heappop(waiting)
        chosen.append(path)
        depth, rank = len(path), path[-1]
        own = falling[depth - 1]
        if rank + 1 < len(own) and own[rank] > 0:
            heapq.heappush(waiting, (score / own[rank] * own[rank + 1], (*path[:-1], rank + 1)))
        if depth < len(falling):
            heapq.heappush(waiting, (score * falling[depth][0], (*path, 0)))
    chosen.sort(key=lambda path: (len(path), path))
    node = {path: i for i, path in enumerate(((), *chosen))}
    return tuple(node[path[:-1]] for path in chosen), tuple(path[-1] for path in chosen)
