"""How large a dynamic tree is: what gives the most tokens per second, by what rounds with such trees take."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from specbench.decoding.drafter import Probe
from specbench.decoding.token_tree import level_ranges
from specbench.drafters.tree_shapes import DynamicTree, pool

FEWEST, REPEATS = 4, 2  # nodes; times that every size is measured


def sizes(most: int) -> list[int]:
    """The numbers of nodes that are measured: powers of two, and `most`."""
    return [*(FEWEST << k for k in range(10) if FEWEST << k < most), most]


def choose_size(tree: DynamicTree, depth: int, probe: Probe) -> str:
    """Gives the tree the number of nodes N and the width K, its own or half of it, with the most expected tokens per
    second, and says which they are. A round has 1 + k S expected tokens: S is the mean, over the drafts of N and more
    nodes of this width, of the sum of the N largest `chances`, and k the number of guesses that were accepted over the
    sum of what their chances promised.

    The size follows from probes, whose noise is not that of the run, and stays: no guess of the run is left out for
    what it is, and given the size the law of its texts is p, with drawn guesses too."""
    widths = dict.fromkeys((tree.widest, max(1, tree.widest // 2)))
    every = [(n, width) for width in widths for n in sizes(min(tree.nodes, sum(pool(width, depth))))]
    promised: dict[tuple[int, int], list[Tensor]] = {size: [] for size in every}
    seconds: dict[tuple[int, int], list[float]] = {size: [] for size in every}
    accepted, hoped = 0, 0.0
    for repeat in range(REPEATS):
        for n, width in every if repeat % 2 == 0 else every[::-1]:
            count, taken, sums = measured(tree, n, width, probe, repeat)
            accepted, hoped = accepted + count, hoped + float(sums[:, -1].sum())
            seconds[n, width].append(taken)
            for fewer in (m for m, own in every if own == width and m <= n):
                promised[fewer, width].append(sums[:, fewer - 1])
    k = accepted / hoped if hoped else 0.0
    tokens = np.array([1 + k * float(torch.cat(promised[size]).mean()) for size in every])
    rates = tokens / np.array([np.mean(seconds[size]) for size in every])
    if not np.isfinite(rates).all():
        tree.most, tree.width = tree.nodes, tree.widest
        return f"drafts have {tree.most} guesses, since too few rounds were measured to choose (drafter.calibrate)"
    tree.most, tree.width = every[int(rates.argmax())]
    told = ", ".join(f"{rate:.4g} with {n} of width {width}" for (n, width), rate in zip(every, rates, strict=True))
    return (f"drafts have {tree.most} guesses of width {tree.width}: expected tokens per second and row were {told} "
            "(drafter.calibrate)")  # fmt: skip


def measured(tree: DynamicTree, nodes: int, width: int, probe: Probe, number: int) -> tuple[int, float, Tensor]:
    """What a probe with trees of this size returns, and the `sums_of_chances` of each row that drafted, [rows, N]."""
    before, drafts = (tree.most, tree.width), list[Tensor]()
    tree.most, tree.width, tree.heard = nodes, width, lambda *draft: drafts.append(sums_of_chances(*draft))
    try:
        count, seconds = probe(number)
    finally:
        (tree.most, tree.width), tree.heard = before, None
    sums = torch.cat(drafts).cpu() if drafts else torch.zeros(0, nodes)
    return count, seconds, sums[sums[:, 0] > 0]


def sums_of_chances(tree: DynamicTree, grown: tuple[Tensor, ...], kept: Tensor, depth: int) -> Tensor:
    """[B, N]: the sums of the 1 .. N largest chances of a draft's guesses, those that are kept [B, P]."""
    own = chances(tree.width, grown, depth).where(kept, 0.0).sort(1, descending=True).values[:, : tree.most]
    return F.pad(own, (0, tree.most - own.shape[1])).cumsum(1)


def chances(width: int, grown: tuple[Tensor, ...], depth: int) -> Tensor:
    """[B, P]: the drafter's own probability that each guess that was `grown` is accepted. Of point masses it is the
    product of q along the path. Of drawn guesses it is the product of what `SampledTree.values` takes for accepted,
    and for earlier siblings that are rejected."""
    tokens, above, value, _, q = grown
    if q is None:
        return value.exp()
    q_x = q.gather(2, tokens[..., None])[..., 0].unflatten(1, (-1, width))
    own = (1 + q_x) / torch.where(torch.arange(width, device=q.device) == 0, 2, 4)
    tried = F.pad((1 - own).cumprod(2)[..., :-1], (1, 0), value=1.0)
    share = (own * tried).flatten(1)
    found = F.pad(torch.zeros_like(share), (1, 0), value=1.0)
    for level in level_ranges(pool(width, depth)):
        places = slice(level.start, level.stop)
        found[:, level.start + 1 : level.stop + 1] = share[:, places] * found.gather(1, above[:, places] + 1)
    return found[:, 1:]
