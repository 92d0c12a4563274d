"""One model drafts a tree whose shape follows its own probabilities (EAGLE-2, 2406.16858)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.model import Scores
from specbench.decoding.rows import Rows, last_tokens, seen_tokens
from specbench.decoding.state import State
from specbench.decoding.token_tree import MISSING, ROOT, Tree, depth_of_entries, tree_of
from specbench.decoding.transfers import constant, counts
from specbench.drafters.model import ModelDrafter, VocabularySettings, load_drafter
from specbench.errors import ConfigError
from specbench.models.context import Context
from specbench.models.language_model import LanguageModel
from specbench.settings import setting

MOST_NODES, MOST_WIDTH = 1000, 32


class DynamicTreeDrafter(ModelDrafter):
    """Of each of the `width` best nodes of a level, the model's `width` likeliest tokens are guesses of the next level,
    gamma levels deep. A guess is as good as the product of q along its path. The `nodes` best of all guesses are the
    draft. They are point masses at every temperature, since none is drawn."""

    trees = True
    on_device = True
    ends_early = False

    @dataclass
    class Settings(VocabularySettings):
        nodes: int = setting(ge=1, le=MOST_NODES)
        width: int = setting(ge=1, le=MOST_WIDTH)

    @classmethod
    def point_masses(cls, settings: Settings) -> bool:
        return True

    @classmethod
    def nodes(cls, settings: Settings, gamma: int) -> int:
        return max(settings.nodes, settings.width * gamma)  # those that the target reads, and those of the drafter

    def __init__(self, model: LanguageModel, vocab_size: int, gamma: int, nodes: int, width: int):
        super().__init__(model, vocab_size, gamma)
        self.most, self.width = nodes, width
        self.place = torch.empty(0)  # [B, P + 1], the entry of the drafter's cache of each entry of the draft

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "DynamicTreeDrafter":
        model = load_drafter(settings, context, target, settings.vocabulary)
        if settings.width > model.vocab_size:
            raise ConfigError(
                f"drafter.width={settings.width} is not possible: {model.name} has {model.vocab_size} tokens"
            )
        return cls(model, target.vocab_size, context.gamma, settings.nodes, settings.width)

    def propose(self, state: State, gamma: list[int]) -> Draft:
        depth, K = self.steps(gamma), self.width
        if depth == 0:
            self.draft_nothing(state)
            return Draft.empty(state.batch_size, state.tokens.device)
        levels = (K, *[K * K] * (depth - 1))
        given, visible = self.prepare(state, K * (depth - 1) + 1)
        phase = self.model.executor.phase(self._draft_tree, self.model, usual=depth == self.gamma)
        tokens, parent, score, self.place = phase(state.rows, *given, depth, visible)
        # Of each path the cache will hold all guesses but the last, which is read again.
        rows = zip(self.model.cached, state.reach, state.active, strict=True)
        self.model.cached = [length + depth - 1 if on else cached for cached, length, on in rows]
        deep = constant(depth_of_entries)(levels, tokens.device)[1:] > counts(tuple(gamma), tokens.device)[:, None]
        kept = best_nodes(score.masked_fill(deep, -torch.inf), self.most)
        count = torch.full_like(tokens[:, 0], tokens.shape[1])
        return Draft(tokens, levels, torch.where(kept, parent, MISSING), None, count, most=self.most)

    def _draft_tree(self, rows: Rows, reread: int, depth: int, visible: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All P guesses [B, P], their parents [B, P], log q of their paths [B, P], and `place` [B, P + 1]."""
        level_of, K = self.model.executor.leaf(self._level, self.model), self.width
        x, first = last_tokens(rows, reread)
        penalised = self.model.sampling.repetition_penalty != 1
        seen = seen_tokens(rows.tokens, rows.length, self.vocab_size)[:, None] if penalised else None
        root = torch.full_like(rows.length[:, None], ROOT)
        last, score = root, torch.zeros_like(root, dtype=torch.float)  # the nodes read next, log q of their paths
        number = parents = root[:, :0]  # of all nodes that are read: which they are, and their tree
        guesses: list[Tensor] = []
        above: list[Tensor] = []
        scores: list[Tensor] = []
        tree: Tree | None = None
        for level in range(depth):
            found, log_q = level_of(x, first, seen, visible, tree)  # [B, m, K]
            begin = K * K * (level - 1) + K if level else 0
            guesses.append(found.flatten(1))
            above.append(last.repeat_interleave(K, 1))
            scores.append((score[..., None] + log_q).flatten(1))
            if level + 1 == depth:
                break
            score, best = scores[-1].topk(K, dim=1)
            x, last, up = guesses[-1].gather(1, best), best + begin, best // K
            number = torch.cat([number, last], 1)
            parents = torch.cat([parents, up + K * (level - 1) if level else root.expand_as(up)], 1)
            whole = tree_of((K,) * (level + 1), parents)
            tree, first = Tree(whole.depth[:, -K:], whole.sees[:, -K:]), rows.length + K * level
            if seen is not None:
                seen = seen.gather(1, up[..., None].expand(-1, -1, seen.shape[2])).scatter(2, x[..., None], True)
        tokens = torch.cat(guesses, 1)
        read = torch.arange(1, number.shape[1] + 1, device=tokens.device).expand_as(number)
        place = torch.zeros(len(tokens), tokens.shape[1] + 1, dtype=torch.long, device=tokens.device)
        return tokens, torch.cat(above, 1), torch.cat(scores, 1), place.scatter(1, number + 1, read)

    def _level(
        self, x: Tensor, first: Tensor, seen: Tensor | None, visible: int, tree: Tree | None
    ) -> tuple[Tensor, Tensor]:
        """The likeliest tokens after each of the nodes x [B, m] of a tree, or after the last of the tokens x if `tree`
        is None, and their log q: [B, m, K] or [B, 1, K]. The first of x is at position first [B]."""
        logits = self.model.forward(x, first, visible, tree=tree, keep_logits=0 if tree else 1)
        sampling = self.model.sampling
        logits = logits[:, -(x.shape[1] if tree else 1) :].float()
        q = sampling.penalize(logits, seen).softmax(-1) if sampling.greedy else sampling.probabilities(logits, seen)
        best = q.topk(self.width, dim=-1)
        return best.indices, best.values.log()

    def settle(self, state: State, draft: Draft, verdict: Verdict, scores: Scores, base: Tensor) -> None:
        """Keeps the nodes of the accepted path that the drafter's cache holds: all but the last, which may not be
        there, and is read again. base [B] is the position of node 0."""
        if verdict.path is not None and draft.depth > 1:
            self.model.keep_path(verdict.path[:, :-1], base, self.place)


def best_nodes(score: Tensor, most: int) -> Tensor:
    """Which of the nodes [B, P] are the `most` best by score [B, P]; of equal ones the earlier, so that a node's parent
    is among them. Nodes with a score of -inf are not."""
    order = score.argsort(dim=1, descending=True, stable=True)[:, :most]
    return torch.zeros_like(score, dtype=torch.bool).scatter(1, order, True) & score.isfinite()
