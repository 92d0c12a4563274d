"""Verification of token trees as pure functions: iterative speculative sampling, greedy verification (SpecInfer) and
traversal verification (2505.12398).

B rows, N guesses, D levels, V vocabulary. Node 0 is the last committed token, nodes 1 .. N are the guesses, in columns
0 .. N - 1 of a draft. Several nodes may spell the same text; a walk that reaches one of them stands on all of them.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.sampling import draw
from specbench.decoding.token_tree import ROOT, depth_of_nodes, level_slices
from specbench.decoding.transfers import constant
from specbench.decoding.verify import at_row


class Walk:
    """The walk of each row down a draft's tree: the nodes that it stands on, and the path so far."""

    def __init__(self, draft: Draft):
        B, N = draft.tokens.shape
        numbers = torch.arange(N + 1, device=draft.tokens.device)
        self.draft, self.exists = draft, draft.exists()
        self.guesses = numbers[1:]  # [N], the node of each guess
        self.parent = draft.parents.clamp(min=ROOT).expand(B, N)
        self.here = (numbers == ROOT).repeat(B, 1)  # [B, N + 1] bool: the row stands on this node
        self.node = torch.full_like(draft.count, ROOT)  # [B], the first of these nodes
        self.n = torch.zeros_like(draft.count)  # [B], accepted guesses
        self.path = [self.node]  # by depth [B], the node where the row stood

    def children(self, level: slice) -> Tensor:
        """[B, n] bool: which of the n guesses of this level are children of the nodes where the row stands."""
        return self.here.gather(1, self.parent[:, level]) & self.exists[:, level]

    def step(self, level: slice, token: Tensor) -> None:
        """Moves each row to its children on this level that are token [B]. A row without such a child ends its walk."""
        self.move(level, self.draft.tokens[:, level] == token[:, None])

    def move(self, level: slice, wanted: Tensor) -> None:
        """Moves each row to its children among the guesses `wanted` of this level, [B, n] bool."""
        hits = self.children(level) & wanted
        found, first = hits.any(1), self.guesses[level][hits.int().argmax(1)]
        self.here[:, 1:][:, level] = hits
        self.node = torch.where(found, first, self.node)
        self.path.append(self.node)
        self.n = self.n + found

    def descend(self, kept: Tensor) -> None:
        """Moves each row to a kept node [B, N + 1], 0 or 1: to the first child that is kept or has one under it."""
        levels = level_slices(self.draft.levels)
        for level in reversed(levels):
            kept = kept.scatter_reduce(1, self.parent[:, level], kept[:, 1:][:, level], "amax")
        for level in levels:
            hits = self.children(level) & (kept[:, 1:][:, level] > 0)
            self.move(level, hits & (hits.cumsum(1) == 1))

    def along(self, verdict: Verdict) -> Iterator[tuple[int, slice]]:
        """Each depth and level of the tree, on the way down the accepted path."""
        for depth, level in enumerate(level_slices(self.draft.levels)):
            yield depth, level
            self.step(level, torch.where(depth < verdict.accepted, verdict.tokens[:, depth], -1))

    def verdict(self, t: Tensor) -> Verdict:
        """The verdict of the finished walk, with the token t [B] after the accepted guesses."""
        x = F.pad(self.draft.tokens, (1, 1)).gather(1, torch.stack([*self.path[1:], self.node], 1))
        return Verdict(x.scatter(1, self.n[:, None], t[:, None]), self.n, torch.stack(self.path, 1))


def accepted_path(draft: Draft, verdict: Verdict) -> tuple[Tensor, Tensor, Tensor]:
    """What was tried along the accepted path of a tree. Returns the node before each step [B, D + 1], the column of the
    first guess that was tried at each step [B, D], and the number of steps at which there was a guess to try [B]."""
    walk = Walk(draft)
    first, steps = [], torch.zeros_like(walk.n)
    for _, level in walk.along(verdict):
        can_try = walk.children(level)
        first.append(can_try.int().argmax(1) + level.start)
        steps = steps + can_try.any(1)
    return torch.stack(walk.path, 1), torch.stack(first, 1), steps


def nobody(mask: Tensor) -> bool:
    """True if the mask [B] or [B, n] has no True and can be read without a device synchronisation; else False."""
    return mask.device.type == "cpu" and not torch.compiler.is_compiling() and not mask.any()


def follow(draft: Draft, choose: Callable[[Tensor, int], Tensor]) -> Verdict:
    """Walks down by the tokens of choose(node [B], depth) -> [B]; t is the first one that is not a child. With the
    argmax of p as `choose` it is greedy verification (SpecInfer)."""
    walk = Walk(draft)
    tokens: list[Tensor] = []
    for depth, level in enumerate(level_slices(draft.levels)):
        tokens.append(choose(walk.node, depth))
        walk.step(level, tokens[-1])
    tokens.append(choose(walk.node, len(tokens)))
    return Verdict(torch.stack(tokens, 1), walk.n, torch.stack(walk.path, 1))


def match(p: Tensor, draft: Draft, bits: Tensor | None) -> Verdict:
    """Draws a token from p after each accepted guess, and accepts its equal. p [B, N + 1, V]; bits [B, D + 1]."""

    def choose(node: Tensor, depth: int) -> Tensor:
        p_next = at_row(p, node)
        return p_next.argmax(-1) if bits is None else draw(p_next, bits[:, depth])

    return follow(draft, choose)


def iterative_sampling(p: Tensor, draft: Draft, r: Tensor, bits: Tensor) -> Verdict:
    """Iterative speculative sampling (SpecInfer): at each node the children are tried in order, and x is accepted when
    r q(x) < p(x); after each rejection p becomes norm(max(0, p - q)). t is drawn from the p that is left. p [B, N+1,
    V]; r [B, N] uniforms; bits [B, D+1] of a stream of their own. A token that was drafted twice is tried twice,
    because the residual is correct only then."""
    walk = Walk(draft)
    left, mass = p[:, ROOT], torch.ones(len(p), dtype=r.dtype, device=r.device)  # p unnormalised, and its sum
    q_x = None if draft.probs is None else draft.probs.gather(-1, draft.tokens[..., None])[..., 0]
    for level in level_slices(draft.levels):
        can_try = walk.children(level)
        if nobody(can_try):
            walk.path.append(walk.node)
            continue
        token, found = torch.full_like(draft.tokens[:, 0], -1), torch.zeros_like(can_try[:, 0])
        for i, there in enumerate(can_try.T, level.start):
            x, tried = draft.tokens[:, i], there & ~found
            if nobody(tried):
                continue
            threshold = r[:, i] * mass if q_x is None else r[:, i] * q_x[:, i] * mass
            accepted = tried & (threshold < left.gather(1, x[:, None])[:, 0])
            token, found = torch.where(accepted, x, token), found | accepted
            left, mass = _subtract_q(left, mass, draft, i, tried & ~accepted)
        walk.step(level, token)
        left = torch.where(found[:, None], at_row(p, walk.node), left)
        mass = torch.where(found, 1.0, mass)
    return walk.verdict(_draw_left(left, p, walk, bits))


def _subtract_q(left: Tensor, mass: Tensor, draft: Draft, i: int, rejected: Tensor) -> tuple[Tensor, Tensor]:
    """max(0, left - mass * q) [B, V] and its sum [B], with the q of column i, in the rows rejected [B] that rejected
    its guess; left [B, V] and mass [B] unchanged in the others."""
    if draft.probs is None:
        x = draft.tokens[:, i, None]
        left = left.scatter(1, x, left.gather(1, x) * ~rejected[:, None])
    else:
        left = torch.addcmul(left, draft.probs[:, i], -(mass * rejected).to(left.dtype)[:, None]).clamp_(min=0)
    return left, torch.where(rejected, left.sum(-1, dtype=mass.dtype), mass)


def _draw_left(left: Tensor, p: Tensor, walk: Walk, bits: Tensor) -> Tensor:
    """The token t [B] after a walk, drawn from what is left [B, V] of p [B, N + 1, V], with bits [B, D + 1]."""
    # Rounding alone can leave nothing: then p is what remains.
    left = torch.where(left.sum(-1, keepdim=True) > 0, left, at_row(p, walk.node))
    return draw(left, bits.gather(1, walk.n[:, None])[:, 0])


def traversal_sampling(p: Tensor, draft: Draft, r: Tensor, bits: Tensor) -> Verdict:
    """Traversal verification (2505.12398): of the guesses in post-order (children in order, then their parent) the
    first one with r_i < h_i is kept with its path, and t is drawn from the p that is left there; else the last
    committed token stands alone. p [B, N+1, V]; r [B, N] uniforms; bits [B, D+1]. Exact if the q of each child is the
    distribution that it was drawn from given its earlier siblings, drawn with or without replacement."""
    h, left = traversal_weights(p, draft)
    walk = Walk(draft)
    walk.descend(F.pad((r < h) & walk.exists, (1, 0)).int())
    return walk.verdict(_draw_left(at_row(left, walk.node), p, walk, bits))


def traversal_weights(p: Tensor, draft: Draft) -> tuple[Tensor, Tensor]:
    """Of each guess h [B, N], the probability that it is kept once all nodes under it were rejected; and of each node
    [B, N + 1, V] h p', where p' is the distribution of the token after it then. A child x of u, drawn from q, begins
    with h_x = min(1, h_u p'_u(x) / q(x)); its rejection replaces h_u p'_u by R / (S + 1 - h_u) and h_u by
    S / (S + 1 - h_u), with R = max(0, h_u p'_u - q) and S = sum R. On a chain these are the h_i of
    `block_verification`. p [B, N + 1, V]."""
    assert draft.probs is not None, "a q that is no point mass"
    rows, exists = torch.arange(len(p), device=p.device), draft.exists()
    parent = draft.parents.clamp(min=ROOT).expand_as(exists)
    mass, h = p.clone(), torch.ones_like(p[..., 0])
    h_guess, mass_guess = h[:, 1:], mass[:, 1:]  # the same numbers by column of the draft
    for i in range(exists.shape[1]):
        there, u, x, q = exists[:, i], parent[:, i], draft.tokens[:, i, None], draft.probs[:, i]
        if nobody(there):
            continue
        mass_u, h_u = mass[rows, u], h[rows, u]
        h_x = (mass_u.gather(1, x) / q.gather(1, x)).clamp(max=1)  # [B, 1]
        h_guess[:, i], mass_guess[:, i] = h_x[:, 0], h_x * mass_guess[:, i]
        residual = (mass_u - q).clamp(min=0)
        total = residual.sum(-1)
        both = (total + (1 - h_u)).clamp(min=1e-30)
        mass[rows, u] = torch.where(there[:, None], residual / both[:, None], mass_u)
        h[rows, u] = torch.where(there, total / both, h_u)
    return h_guess, mass


def iterative_beta(p: Tensor, draft: Draft, verdict: Verdict) -> Tensor:
    """[B, D]: the probability that some child is accepted, at each step of the path: b_1 + miss_1 (b_2 + miss_2 (...)),
    where b_k = sum_x min(p_k, q_k) and miss_k is the probability that guess k is rejected. Its mean is the share of
    steps that are taken: the tree's alpha (Theorem 3.5 for one child). p [B, N + 1, V]."""
    walk = Walk(draft)
    steps: list[Tensor] = []
    for _, level in walk.along(verdict):
        p_k = at_row(p, walk.node)
        beta, alive = torch.zeros_like(p_k[:, 0]), torch.ones_like(p_k[:, 0])
        for i, there in enumerate(walk.children(level).T, level.start):
            x = draft.tokens[:, i, None]
            q = torch.zeros_like(p_k).scatter(1, x, 1.0) if draft.probs is None else draft.probs[:, i]
            b = torch.minimum(p_k, q).sum(-1)
            # Independent guesses: the mean over x. Otherwise the next guess depends on this x.
            miss = 1 - b if draft.repeats else 1 - (p_k.gather(1, x) / q.gather(1, x))[:, 0].clamp(max=1)
            beta, alive = beta + there * alive * b, torch.where(there, alive * miss, alive)
            residual = (p_k - q).clamp(min=0)
            mass = residual.sum(-1, keepdim=True)
            p_k = torch.where(there[:, None] & (mass > 0), residual / mass, p_k)
        steps.append(beta)
    return torch.stack(steps, 1) if steps else p.new_zeros(len(p), 0)


def match_beta(p: Tensor, draft: Draft, verdict: Verdict) -> Tensor:
    """[B, D]: the probability that a draw from p is one of the guesses, at each step of the path. p [B, N + 1, V]."""
    walk = Walk(draft)
    steps: list[Tensor] = []
    for depth, level in walk.along(verdict):
        p_next = at_row(p, walk.node)
        if draft.probs is None or not draft.is_chain:
            there = walk.children(level).to(p.dtype)
            hit = torch.zeros_like(p_next).scatter_reduce(1, draft.tokens[:, level], there, "amax")
            steps.append((p_next * hit).sum(-1))
        else:  # averaged over the draw of the guess from q
            steps.append((p_next * draft.probs[:, depth]).sum(-1))
    return torch.stack(steps, 1) if steps else p.new_zeros(len(p), 0)


def longest_path(p: Tensor, draft: Draft, passes: Tensor, choose: Callable[[Tensor, Tensor], Tensor]) -> Verdict:
    """The longest path of guesses that all pass, passes [B, N] bool; of equally long paths the first (Medusa's rule).
    The token after n accepted guesses is choose(p [B, V], n [B]) -> [B]. p [B, N + 1, V]."""
    walk = Walk(draft)
    good = F.pad(passes & walk.exists, (1, 0), value=True)  # [B, N + 1], then: all nodes on the path to it pass
    for level in level_slices(draft.levels):
        good[:, 1:][:, level] &= good.gather(1, walk.parent[:, level])
    deepest = (good * constant(depth_of_nodes)(draft.levels, p.device)).argmax(1)  # the first of them
    walk.descend(F.one_hot(deepest, good.shape[1]))
    return walk.verdict(choose(at_row(p, walk.node), walk.n))
