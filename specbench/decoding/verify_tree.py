"""Verification of token trees as pure functions: iterative speculative sampling, greedy verification (SpecInfer) and
traversal verification (2505.12398).

B rows, N nodes, D levels, V vocabulary. Entry 0 is the last committed token and entry i + 1 is node i. Several nodes
may spell the same text; a walk that reaches one of them stands on all of them.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.sampling import draw
from specbench.decoding.token_tree import level_ranges
from specbench.decoding.verify import at_row


class Walk:
    """The walk of each row down a draft's tree: the entries it stands on, and the path so far."""

    def __init__(self, draft: Draft):
        B, N = draft.tokens.shape
        device = draft.tokens.device
        self.draft, self.exists = draft, draft.exists()
        self.above = (draft.parents + 1).clamp(min=0).expand(B, N)  # [B, N], entry of each node's parent
        self.stands = (torch.arange(N + 1, device=device) == 0).repeat(B, 1)  # [B, N + 1] bool: the row stands here
        self.entry = torch.zeros(B, dtype=torch.long, device=device)  # [B], the first of these entries
        self.n = torch.zeros(B, dtype=torch.long, device=device)  # [B], accepted guesses
        self.path: list[Tensor] = []  # per level [B], the node where the row stands

    def children(self, level: range) -> Tensor:
        """[B, n] bool: which of the n nodes of this level are children of the entries where the row stands."""
        here = slice(level.start, level.stop)
        return self.stands.gather(1, self.above[:, here]) & self.exists[:, here]

    def step(self, level: range, token: Tensor) -> None:
        """Moves each row to its children on this level that are token [B]. A row without such a child ends its walk."""
        self.move(level, self.draft.tokens[:, level.start : level.stop] == token[:, None])

    def move(self, level: range, wanted: Tensor) -> None:
        """Moves each row to its children among the nodes `wanted` of this level, [B, n] bool."""
        hits = self.children(level) & wanted
        found, first = hits.any(1), hits.int().argmax(1) + level.start + 1
        self.stands[:, level.start + 1 : level.stop + 1] = hits
        self.entry = torch.where(found, first, self.entry)
        self.path.append((self.entry - 1).clamp(min=0))
        self.n = self.n + found

    def skip(self) -> None:
        """Passes a level at which no row has a child to try."""
        self.path.append((self.entry - 1).clamp(min=0))

    def along(self, verdict: Verdict) -> Iterator[tuple[int, range]]:
        """Each depth and level of the tree, on the way down the accepted path."""
        for depth, level in enumerate(level_ranges(self.draft.levels)):
            yield depth, level
            self.step(level, torch.where(depth < verdict.accepted, verdict.tokens[:, depth], -1))

    def verdict(self, tokens: Tensor) -> Verdict:
        """The verdict of the finished walk; tokens [B, D + 1] are x_1 .. x_n, t of each row."""
        return Verdict(tokens, self.n, torch.stack(self.path, 1) if self.path else tokens[:, :0])


def accepted_path(draft: Draft, verdict: Verdict) -> tuple[Tensor, Tensor, Tensor]:
    """What was tried along the accepted path of a tree. Returns the entry before each step [B, D + 1] (0: the last
    committed token; i + 1: node i), the first guess that was tried at each step as a node [B, D], and the number of
    steps at which there was a guess to try [B]."""
    walk = Walk(draft)
    entries, first, steps = [], [], torch.zeros_like(walk.n)
    for _, level in walk.along(verdict):
        can_try = walk.children(level)
        entries.append(walk.entry)
        first.append(can_try.int().argmax(1) + level.start)
        steps = steps + can_try.any(1)
    return torch.stack([*entries, walk.entry], 1), torch.stack(first, 1), steps


def nobody(mask: Tensor) -> bool:
    """True if the mask [B] or [B, n] has no True and can be read without a device synchronisation; else False."""
    return mask.device.type == "cpu" and not torch.compiler.is_compiling() and not mask.any()


def follow(draft: Draft, choose: Callable[[Tensor, int], Tensor]) -> Verdict:
    """Walks down by the tokens of choose(entry [B], depth) -> [B]; t is the first one that is not a child. With the
    argmax of p as `choose` it is greedy verification (SpecInfer)."""
    walk = Walk(draft)
    tokens: list[Tensor] = []
    for depth, level in enumerate(level_ranges(draft.levels)):
        if tokens and nobody(walk.n == depth):
            tokens.append(tokens[-1])
            walk.skip()
        else:
            tokens.append(choose(walk.entry, depth))
            walk.step(level, tokens[-1])
    tokens.append(choose(walk.entry, len(tokens)))
    return walk.verdict(torch.stack(tokens, 1))


def match(p: Tensor, draft: Draft, bits: Tensor | None) -> Verdict:
    """Draws a token from p after each accepted guess, and accepts the guess that equals it. p [B, N + 1, V]; bits
    [B, D + 1], or None for the argmax in place of a draw."""

    def choose(entry: Tensor, depth: int) -> Tensor:
        law = at_row(p, entry)
        return law.argmax(-1) if bits is None else draw(law, bits[:, depth])

    return follow(draft, choose)


def iterative_sampling(p: Tensor, draft: Draft, r: Tensor, bits: Tensor) -> Verdict:
    """Iterative speculative sampling (SpecInfer): at each node the children are tried in order, and x is accepted when
    r q(x) < p(x); after each rejection p becomes norm(max(0, p - q)). t is drawn from the p that is left. p [B, N+1,
    V]; r [B, N] uniforms; bits [B, D+1] of a stream of their own. A token that was drafted twice is tried twice,
    because the residual is correct only then."""
    walk = Walk(draft)
    tokens: list[Tensor] = []
    law, left = p[:, 0], torch.ones(len(p), dtype=r.dtype, device=r.device)  # unnormalised, and its sum
    q_x = None if draft.probs is None else draft.probs.gather(-1, draft.tokens[..., None])[..., 0]
    for level in level_ranges(draft.levels):
        can_try = walk.children(level)
        if nobody(can_try):
            walk.skip()
            tokens.append(torch.zeros_like(draft.tokens[:, 0]))
            continue
        token, found = torch.full_like(draft.tokens[:, 0], -1), torch.zeros_like(can_try[:, 0])
        for i, there in zip(level, can_try.T, strict=True):
            x, tried = draft.tokens[:, i], there & ~found
            if nobody(tried):
                continue
            threshold = r[:, i] * left if q_x is None else r[:, i] * q_x[:, i] * left
            passed = threshold < law.gather(1, x[:, None])[:, 0]
            token, found = torch.where(tried & passed, x, token), found | (tried & passed)
            law, left = _without(law, left, draft, i, tried & ~passed)
        walk.step(level, token)
        tokens.append(token.clamp(min=0))
        law = torch.where(found[:, None], at_row(p, walk.entry), law)
        left = torch.where(found, 1.0, left)
    # Rounding alone can leave nothing: then p is what remains.
    law = torch.where(law.sum(-1, keepdim=True) > 0, law, at_row(p, walk.entry))
    t = draw(law, bits.gather(1, walk.n[:, None])[:, 0])
    x = torch.stack([*tokens, t], 1)
    return walk.verdict(x.scatter(1, walk.n[:, None], t[:, None]))


def _without(law: Tensor, left: Tensor, draft: Draft, i: int, rejected: Tensor) -> tuple[Tensor, Tensor]:
    """max(0, law - left * q_i) [B, V] and its sum [B], in the rows rejected [B] that rejected guess i; law [B, V] and
    left [B] unchanged in the others."""
    if draft.probs is None:
        x = draft.tokens[:, i, None]
        law = law.scatter(1, x, law.gather(1, x) * ~rejected[:, None])
    else:
        law = torch.addcmul(law, draft.probs[:, i], -(left * rejected).to(law.dtype)[:, None]).clamp_(min=0)
    return law, torch.where(rejected, law.sum(-1, dtype=left.dtype), left)


def traversal_sampling(p: Tensor, draft: Draft, r: Tensor, bits: Tensor) -> Verdict:
    """Traversal verification (2505.12398): of the nodes in post-order (children in order, then their parent) the first
    one with r_i < h_i is kept with its path, and t is drawn from the p that is left there; else the last committed
    token stands alone. p [B, N+1, V]; r [B, N] uniforms; bits [B, D+1]. Exact if the q of each child is the law that it
    was drawn from given its earlier siblings, whether they were drawn with or without replacement."""
    h, left = traversal_weights(p, draft)
    walk = Walk(draft)
    kept = F.pad((r < h) & walk.exists, (1, 0), value=True).int()  # [B, N + 1], whether something under the entry is
    levels = level_ranges(draft.levels)
    for level in reversed(levels):
        here = slice(level.start, level.stop)
        kept = kept.scatter_reduce(1, walk.above[:, here], kept[:, 1:][:, here], "amax")
    for level in levels:
        hits = walk.children(level) & (kept[:, level.start + 1 : level.stop + 1] > 0)
        walk.move(level, hits & (hits.cumsum(1) == 1))
    law = at_row(left, walk.entry)
    # Rounding alone can leave nothing: then p is what remains.
    law = torch.where(law.sum(-1, keepdim=True) > 0, law, at_row(p, walk.entry))
    t = draw(law, bits.gather(1, walk.n[:, None])[:, 0])
    x = [draft.tokens.gather(1, node[:, None])[:, 0] for node in walk.path]
    return walk.verdict(torch.stack([*x, t], 1).scatter(1, walk.n[:, None], t[:, None]))


def traversal_weights(p: Tensor, draft: Draft) -> tuple[Tensor, Tensor]:
    """Of each node h [B, N], the probability that it is kept once all nodes under it were rejected; and of each entry
    [B, N + 1, V] h p', where p' is the law of the token after it then. A child x of u, drawn from q, begins with h_x =
    min(1, h_u p'_u(x) / q(x)); its rejection replaces h_u p'_u by R / (S + 1 - h_u) and h_u by S / (S + 1 - h_u), with
    R = max(0, h_u p'_u - q) and S = sum R. On a chain these are the h_i of `block_verification`. p [B, N + 1, V]."""
    assert draft.probs is not None, "a q that is no point mass"
    rows, exists = torch.arange(len(p), device=p.device), draft.exists()
    above = (draft.parents + 1).clamp(min=0).expand_as(exists)
    mass, h = p.clone(), torch.ones_like(p[..., 0])
    for i in range(exists.shape[1]):
        there, u, x, q = exists[:, i], above[:, i], draft.tokens[:, i, None], draft.probs[:, i]
        if nobody(there):
            continue
        law, h_u = mass[rows, u], h[rows, u]
        h_x = (law.gather(1, x) / q.gather(1, x)).clamp(max=1)  # [B, 1]
        h[:, i + 1], mass[:, i + 1] = h_x[:, 0], h_x * mass[:, i + 1]
        rest = (law - q).clamp(min=0)
        left = rest.sum(-1)
        both = (left + (1 - h_u)).clamp(min=1e-30)
        mass[rows, u] = torch.where(there[:, None], rest / both[:, None], law)
        h[rows, u] = torch.where(there, left / both, h_u)
    return h[:, 1:], mass


def iterative_beta(p: Tensor, draft: Draft, verdict: Verdict) -> Tensor:
    """[B, D]: the probability that some child is accepted, at each step of the path: b_1 + miss_1 (b_2 + miss_2 (...)),
    where b_k = sum_x min(p_k, q_k) and miss_k is the probability that guess k is rejected. Its mean is the share of
    steps that are taken: the tree's alpha (Theorem 3.5 for one child). p [B, N + 1, V]."""
    walk = Walk(draft)
    steps: list[Tensor] = []
    for _, level in walk.along(verdict):
        law = at_row(p, walk.entry)
        beta, alive = torch.zeros_like(law[:, 0]), torch.ones_like(law[:, 0])
        for i, there in zip(level, walk.children(level).T, strict=True):
            x = draft.tokens[:, i, None]
            q = torch.zeros_like(law).scatter(1, x, 1.0) if draft.probs is None else draft.probs[:, i]
            b = torch.minimum(law, q).sum(-1)
            # Independent guesses: the mean over x. Otherwise the next guess depends on this x.
            miss = 1 - b if draft.repeats else 1 - (law.gather(1, x) / q.gather(1, x))[:, 0].clamp(max=1)
            beta, alive = beta + there * alive * b, torch.where(there, alive * miss, alive)
            rest = (law - q).clamp(min=0)
            mass = rest.sum(-1, keepdim=True)
            law = torch.where(there[:, None] & (mass > 0), rest / mass, law)
        steps.append(beta)
    return torch.stack(steps, 1) if steps else p.new_zeros(len(p), 0)


def match_beta(p: Tensor, draft: Draft, verdict: Verdict) -> Tensor:
    """[B, D]: the probability that a draw from p is one of the guesses, at each step of the path. p [B, N + 1, V]."""
    walk = Walk(draft)
    steps: list[Tensor] = []
    for depth, level in walk.along(verdict):
        law = at_row(p, walk.entry)
        if draft.probs is None or not draft.is_chain:
            there = walk.children(level)
            hit = torch.zeros_like(law).scatter_reduce(
                1, draft.tokens[:, level.start : level.stop], there.to(law.dtype), "amax"
            )
            steps.append((law * hit).sum(-1))
        else:  # averaged over the draw of the guess from q
            steps.append((law * draft.probs[:, depth]).sum(-1))
    return torch.stack(steps, 1) if steps else p.new_zeros(len(p), 0)


def longest_path(p: Tensor, draft: Draft, passes: Tensor, choose: Callable[[Tensor, Tensor], Tensor]) -> Verdict:
    """The longest path of guesses that all pass, passes [B, N] bool; of equally long paths the first (Medusa's rule).
    The token after n accepted guesses is choose(p [B, V], n [B]) -> [B]. p [B, N + 1, V]."""
    B, N = draft.tokens.shape
    good = torch.ones(B, N + 1, dtype=torch.bool, device=p.device)
    passes = passes & draft.exists()
    above, n = (draft.parents + 1).clamp(min=0).expand(B, N), torch.zeros_like(draft.count)
    for level in level_ranges(draft.levels):
        a, b = level.start, level.stop
        good[:, a + 1 : b + 1] = good.gather(1, above[:, a:b]) & passes[:, a:b]
        n = n + good[:, a + 1 : b + 1].any(1)
    entry = torch.zeros_like(n)
    nodes: list[Tensor] = []  # upwards from the first good node of depth n
    for depth, level in reversed([*enumerate(level_ranges(draft.levels), 1)]):
        deepest = good[:, level.start + 1 : level.stop + 1].int().argmax(1) + level.start + 1
        entry = torch.where(n == depth, deepest, entry)
        nodes.insert(0, (entry - 1).clamp(min=0))
        entry = torch.where(n >= depth, F.pad(above, (1, 0)).gather(1, entry[:, None])[:, 0], entry)
    path = torch.stack(nodes, 1) if nodes else n[:, None][:, :0]
    entries = F.pad(path + 1, (1, 0))
    t = choose(at_row(p, entries.gather(1, n[:, None])[:, 0]), n)
    tokens = F.pad(draft.tokens.gather(1, path) if N else path, (0, 1))
    return Verdict(tokens.scatter(1, n[:, None], t[:, None]), n, path)
