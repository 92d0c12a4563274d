"""Token recycling (2408.08696): the likeliest tokens of p where a token was last read are the guesses after it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.drafter import Drafter
from specbench.decoding.gamma_policy import GammaPolicy
from specbench.decoding.model import Scores
from specbench.decoding.state import State
from specbench.decoding.token_tree import MISSING, depths, level_ranges, levels_of
from specbench.decoding.transfers import constant, counts, upload
from specbench.drafters.blockwise import chosen_tree
from specbench.models.context import Context
from specbench.models.language_model import LanguageModel
from specbench.settings import BaseSettings, setting

NONE = -1  # no token
FALL = 0.5  # how likely a guess of rank r + 1 is taken to be, over one of rank r; rank 0: over that of its parent


class TokenRecyclingDrafter(Drafter):
    """Drafts a tree of one shape through a table that holds up to `children` tokens after each token of the vocabulary:
    those with the largest p at its last reading, then those of readings before. A request's table begins with the pairs
    of its prompt, and forgets at its end. Guesses are point masses."""

    trees = True
    reads_text = False

    @dataclass
    class Settings(BaseSettings):
        children: int = setting(ge=1, le=100)
        size: int = setting(ge=1, le=1000)

    @classmethod
    def point_masses(cls, settings: Any) -> bool:
        return True

    @classmethod
    def nodes(cls, settings: Settings, gamma: int) -> int:
        return settings.size

    def __init__(self, vocab_size: int, children: int, size: int, gamma: int):
        """`gamma` is the usual depth of a draft."""
        self.vocab_size, self.children = vocab_size, min(children, vocab_size)
        accuracy = [[FALL ** (rank + 1) for rank in range(self.children)]] * max(1, gamma)
        self.parent, self.rank = chosen_tree(accuracy, size)
        self.levels = levels_of(self.parent)

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "TokenRecyclingDrafter":
        return cls(target.vocab_size, settings.children, settings.size, context.gamma)

    def begin(self, state: State, stop: GammaPolicy | None = None) -> None:
        shape = state.batch_size, self.vocab_size + 1, self.children  # the last token stands for a missing one
        self.table = torch.full(shape, NONE, device=state.tokens.device)
        self.known: dict[int, int] = {}  # by row, the serial of the request whose table it is

    def propose(self, state: State, gamma: list[int]) -> Draft:
        self._open(state)
        device, missing = state.tokens.device, self.vocab_size
        above, rank = constant(upload)((tuple(node + 1 for node in self.parent), self.rank), device)
        entries = state.tokens.gather(1, state.length[:, None] - 1)  # [B, 1 + the nodes so far]
        for level in level_ranges(self.levels):
            here = slice(level.start, level.stop)
            after = self._rows(entries[:, above[here]])  # [B, n, children]
            guess = after.gather(2, rank[here].expand(len(after), -1)[..., None])[..., 0]
            entries = torch.cat([entries, torch.where(guess == NONE, missing, guess)], 1)
        there = entries[:, 1:] < missing
        depth = depths(self.levels)
        count = counts(tuple(sum(d <= g for d in depth) for g in gamma), device)
        parent = torch.where(there, above - 1, MISSING)
        return Draft(torch.where(there, entries[:, 1:], 0), self.levels, parent, None, count)

    def settle(self, state: State, draft: Draft, verdict: Verdict, scores: Scores, base: Tensor) -> None:
        """Writes the likeliest tokens of p behind each token that was read in front of those that its row had. Of nodes
        with the same token the last one counts. base [B] is the position of node 0."""
        root = state.tokens.gather(1, base[:, None] - 1)
        tokens, exists = torch.cat([root, draft.tokens], 1), draft.exists()  # [B, N + 1], [B, N]
        exists = torch.cat([torch.ones_like(root, dtype=torch.bool), exists], 1)
        same = (tokens[:, :, None] == tokens[:, None]) & exists[:, None]
        again = same.triu(1).any(-1)
        tokens = torch.where(exists & ~again, tokens, self.vocab_size)
        law, never = (scores.p, 0.0) if scores.logits is None else (scores.logits, -torch.inf)  # p before any argmax
        largest, likeliest = law.topk(self.children, dim=-1)
        both = torch.cat([torch.where(largest > never, likeliest, NONE), self._rows(tokens)], -1)
        # both [B, N + 1, 2 * children]
        twice = (both[..., :, None] == both[..., None, :]).tril(-1).any(-1)
        both = torch.where(twice, NONE, both)
        order = (both == NONE).int().argsort(dim=-1, stable=True)[..., : self.children]
        where = tokens[..., None].expand(-1, -1, self.children)
        self.table.scatter_(1, where, both.gather(-1, order))
        self.table[:, self.vocab_size] = NONE

    def _rows(self, tokens: Tensor) -> Tensor:
        """The table after tokens [B, n]: [B, n, children]."""
        return self.table.gather(1, tokens[..., None].expand(-1, -1, self.children))

    def _open(self, state: State) -> None:
        """Begins the tables of requests that are new to their rows: the followers of each token, the last first."""
        for row, on in enumerate(state.active):
            if not on or self.known.get(row) == state.serials[row]:
                continue
            self.known[row] = state.serials[row]
            text = state.texts[row][: state.lengths[row]]
            after: dict[int, dict[int, None]] = {}
            for token, follower in zip(text[-2::-1], text[:0:-1], strict=True):
                own = after.setdefault(token, {})
                if len(own) < self.children:
                    own[follower] = None
            rows = [[*own, *[NONE] * (self.children - len(own))] for own in after.values()]
            self.table[row] = NONE
            if rows:
                self.table[row, upload([*after], self.table.device)] = upload(rows, self.table.device)
