"""Random drafts that are trees."""

import numpy as np
import torch
from decoder_cases import V
from tabular import random_table

from specbench.decoding.draft import Draft
from specbench.decoding.token_tree import MISSING, branching_tree, level_slices, levels_of

ROWS = 150


TREES = {
    "wide": branching_tree([4, 2, 1]),
    "three chains": branching_tree([3, 1, 1]),
    "sparse": (0, 0, 0, 1, 1, 2, 4),
    "chain": (0, 1, 2),
}


BY_ROW = "one of its own in each row"


def p_after(table, text):
    """A distribution that depends on the last two tokens, as float64."""
    before, last = [0, 0, *text][-2:]
    return table[before, last].double().softmax(-1)


def own_parents(levels, generator):
    """Parents [B, N] that differ by row; about a fifth of the nodes is missing."""
    parents = torch.full((ROWS, sum(levels)), MISSING)
    chance = torch.rand(parents.shape, generator=generator)
    for row in range(ROWS):
        above = [0]
        for level in level_slices(levels):
            columns = range(level.start, level.stop)
            for i in columns:
                if above and chance[row, i] > 0.2:
                    parents[row, i] = above[int((chance[row, i] - 0.2) / 0.8 * len(above))]
            above = [i + 1 for i in columns if parents[row, i] != MISSING]
    return parents


def random_tree(name, seed, repeats):
    """The target's table, and a draft whose siblings were drawn independently from one q, or without replacement."""
    generator = torch.Generator().manual_seed(seed)
    levels = levels_of(TREES["wide" if name == BY_ROW else name])
    parents = own_parents(levels, generator) if name == BY_ROW else torch.tensor([TREES[name]] * ROWS)
    p_table, q_table = random_table(V, seed), random_table(V, seed + 1, spread=0.7)
    N = parents.shape[1]
    tokens = torch.zeros(ROWS, N, dtype=torch.long)
    q = torch.zeros(ROWS, N, V, dtype=torch.float64)
    for row in range(ROWS):
        texts = {0: []}
        parent = parents[row].tolist()
        for i, above in enumerate(parent):
            if above == MISSING:
                continue
            distribution = p_after(q_table, texts[above])
            if not repeats:
                for sibling in range(i):
                    if parent[sibling] == above:
                        distribution[tokens[row, sibling]] = 0
                distribution = distribution / distribution.sum()
            q[row, i] = distribution
            tokens[row, i] = torch.multinomial(distribution, 1, generator=generator)
            texts[i + 1] = [*texts[above], int(tokens[row, i])]
    depth = torch.randint(len(levels) + 1, (ROWS,), generator=generator)
    count = torch.tensor([0, *np.cumsum(levels)])[depth]
    draft = Draft(tokens, levels, None if name == "chain" else parents, q, count, repeats=repeats)
    return p_table, draft, generator


def p_of(p_table, draft):
    """The target's distributions of every node, [B, N+1, V]."""
    rows = []
    for row, parent in zip(draft.tokens.tolist(), draft.parents.expand(ROWS, -1).tolist(), strict=True):
        texts = [[]]
        for token, above in zip(row, parent, strict=True):
            texts.append([*texts[above], token] if above != MISSING else [])
        rows.append(torch.stack([p_after(p_table, text) for text in texts]))
    return torch.stack(rows)
