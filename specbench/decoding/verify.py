"""Verification of chains as pure functions: speculative sampling (Algorithm 1), and greedy matching.

B rows, N drafted tokens, V vocabulary. p_1 .. p_{N+1} are the target's distributions, q_i the drafter's, x_i the
guesses, n the number accepted, t the recovered or bonus token.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from specbench.decoding import sampling
from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.sampling import draw


def speculative_sampling(p: Tensor, draft: Draft, r: Tensor, bits: Tensor, lenience: float = 1.0) -> Verdict:
    """Algorithm 1 (section 2.3) with lenience l (A.5): accept x_i when r_i * l * q_i(x_i) < p_i(x_i). p [B, N+1, V]; r
    [B, N] uniforms in (0, 1); bits [B, N+1] random bits of a stream of their own. The token t is drawn from norm(max(0,
    p_{n+1} - q_{n+1})), with q_{n+1} = 0 if every guess was accepted."""
    x, q = draft.tokens, draft.probs
    if sampling.fused(p.device):
        return Verdict(*sampling.kernels.chain_verdict(p, q, x, r * lenience, bits, draft.count))
    p_x = at(p[:, :-1], x)  # [B, N]
    q_x = 1.0 if q is None else at(q, x)
    n = leading(r * lenience * q_x < p_x, draft.count)
    p_next = at_row(p, n)  # [B, V], p_{n+1}
    residual = p_next if not x.shape[1] else (p_next - _q_next(draft, n, p.shape[-1])).clamp(min=0)
    # Rounding alone can leave nothing of p - q where p = q: then p is what remains.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_next)
    t = draw(residual, at(bits, n))
    return verdict_of(x, n, t)


def greedy_matching(p: Tensor, draft: Draft, lenience: float = 1.0) -> Verdict:
    """Temperature 0: accept x_i when p_i(x_i) >= l * max p_i (A.5, which prints <=), for lenience 1 when it is the
    argmax itself; then t = argmax p_{n+1}. p [B, N+1, V] is the distribution before argmax for lenience < 1."""
    x = draft.tokens
    if lenience == 1:
        argmax = p.argmax(-1)  # [B, N + 1], which are the accepted guesses and t
        return Verdict(argmax, leading(x == argmax[:, :-1], draft.count))
    n = leading(at(p[:, :-1], x) >= lenience * p[:, :-1].amax(-1), draft.count)
    t = at_row(p, n).argmax(-1)
    return verdict_of(x, n, t)


def dense(draft: Draft, vocab_size: int) -> Tensor:
    """q [B, N, V] of a draft; one-hot where q is a point mass."""
    return F.one_hot(draft.tokens, vocab_size).float() if draft.probs is None else draft.probs


def acceptance_probability(p: Tensor, draft: Draft, lenience: float, greedy: bool) -> Tensor:
    """beta [B, N] = sum_x min(p(x) / l, q(x)) (Theorem 3.5, with the lenience of A.5), from p [B, N, V]. For a point
    mass on x: min(p(x) / l, 1), or at temperature 0 whether p(x) >= l max p."""
    if draft.probs is not None:
        return torch.minimum(p / lenience, draft.probs).sum(-1)
    p_x = at(p, draft.tokens)
    if greedy:
        return (p_x >= lenience * p.amax(-1)).float()
    return (p_x / lenience).clamp(max=1)


def output_distribution(p: Tensor, q: Tensor, lenience: float | Tensor, greedy: bool) -> tuple[Tensor, Tensor]:
    """The output distribution s [..., V] of a tested position, and the part of it [..., V] that comes from accepted
    guesses, from p [..., V], q [..., V] and lenience, a number or [..., 1]. s = p for lenience 1 (A.1); always s(x) <=
    p(x) / lenience (A.5)."""
    if greedy:
        kept = q * (p >= lenience * p.amax(-1, keepdim=True))
        residual = torch.zeros_like(p).scatter_(-1, p.argmax(-1, keepdim=True), 1.0)
    else:
        kept = torch.minimum(p / lenience, q)
        residual = (p - q).clamp(min=0)
        mass = residual.sum(-1, keepdim=True)
        residual = torch.where(mass > 0, residual / mass, p)
    return kept + (1 - kept.sum(-1, keepdim=True)) * residual, kept


def at(values: Tensor, index: Tensor) -> Tensor:
    """values [..., V] at index [...]: [...]."""
    return values.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def at_row(values: Tensor, n: Tensor) -> Tensor:
    """values [B, M, V] at row n [B]: [B, V]."""
    return values[torch.arange(len(n), device=n.device), n]


def leading(accept: Tensor, count: Tensor) -> Tensor:
    """[B]: n, how many of the first count[b] guesses come before a rejection. accept [B, N] bool, count [B]."""
    guesses = torch.arange(accept.shape[1], device=accept.device) < count[:, None]
    return (accept & guesses).cumprod(-1).sum(-1)


def _q_next(draft: Draft, n: Tensor, vocab_size: int) -> Tensor:
    """q_{n+1} [B, V] for n [B]; zero in rows that accepted all of their guesses."""
    last = n.clamp(max=draft.tokens.shape[1] - 1)
    if draft.probs is None:
        token = draft.tokens.gather(1, last[:, None])
        q = torch.zeros(len(n), vocab_size, device=n.device).scatter_(1, token, 1.0)
    else:
        q = at_row(draft.probs, last)
    return q * (n < draft.count)[:, None]


def verdict_of(x: Tensor, n: Tensor, t: Tensor) -> Verdict:
    """The verdict x_1 .. x_n, t from the guesses x [B, N], n [B] and t [B]."""
    tokens = torch.cat([x, t[:, None]], dim=1)
    return Verdict(tokens.scatter_(1, n[:, None], t[:, None]), n)
