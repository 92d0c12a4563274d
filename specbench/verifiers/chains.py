"""Other verifiers of chains: block verification (Sun et al. 2024) and non-iterative rejection sampling (A.2)."""

import torch
from torch import Tensor

from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.noise import Noise
from specbench.decoding.sampling import draw
from specbench.decoding.verify import acceptance_probability, at, at_row, dense, greedy_matching, leading, verdict_of
from specbench.verifiers.base import Verifier


def block_verification(p: Tensor, draft: Draft, r: Tensor, bits: Tensor) -> Verdict:
    """Block verification (Sun et al. 2024): n is the largest i with r_i < h_i, even if an earlier test failed. The
    output distribution is p, and the expected n is at least that of `speculative_sampling`. p [B, N+1, V]; r [B, N]
    uniforms in (0, 1); bits [B, N+1]. With w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i)), w_0 = 1 and S_i = sum_x max(0,
    w_i p_{i+1}(x) - q_{i+1}(x)), h_i = S_i / (S_i + 1 - w_i) for i < N and h_N = w_N."""
    x, N = draft.tokens, draft.tokens.shape[1]
    q = dense(draft, p.shape[-1])
    ratio = at(p[:, :-1], x) / at(q, x)  # [B, N]
    weights = [torch.ones_like(p[:, 0, 0])]
    for i in range(N):
        weights.append((weights[i] * ratio[:, i]).clamp(max=1))
    w = torch.stack(weights, 1)  # [B, N + 1]
    places = torch.arange(N + 1, device=p.device)
    q_next = torch.cat([q, torch.zeros_like(p[:, :1])], 1) * (places < draft.count[:, None])[..., None]
    residual = (w[..., None] * p - q_next).clamp(min=0)
    left = residual.sum(-1)
    h = torch.where(places < draft.count[:, None], left / (left + 1 - w).clamp(min=1e-30), w)
    stands = (r < h[:, 1:]) & (places[1:] <= draft.count[:, None])
    n = torch.where(stands, places[1:], 0).amax(1) if N else draft.count
    left = torch.where(at_row(left[..., None], n) > 0, at_row(residual, n), at_row(p, n))
    return verdict_of(x, n, draw(left, at(bits, n)))


def rejection_sampling(p: Tensor, draft: Draft, r: Tensor, bits: Tensor) -> Verdict:
    """Non-iterative rejection sampling (A.2): accept x_i when r_i M q_i(x_i) < p_i(x_i), with M = max_x p_i(x) /
    q_i(x); after a rejection t is drawn from the unmodified p_i. p [B, N+1, V]; r [B, N]; bits [B, N+1]."""
    x = draft.tokens
    q = dense(draft, p.shape[-1])
    n = leading(r * at(q, x) < rejection_rate(p[:, :-1], q) * at(p[:, :-1], x), draft.count)
    return verdict_of(x, n, draw(at_row(p, n), at(bits, n)))


def rejection_rate(p: Tensor, q: Tensor) -> Tensor:
    """1 / M [...], the probability that rejection sampling (A.2) accepts a guess, from p [..., V] and q [..., V]."""
    return 1 / torch.where(p > 0, p / q, 0.0).amax(-1)


class BlockVerifier(Verifier):
    """Judges all guesses of a chain together (block verification), and accepts more of them. Exact. A verdict depends
    on guesses after the accepted ones too, so every round renews the noise."""

    looks_ahead = True

    def accept(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        if self.greedy:
            return greedy_matching(p, draft)
        return block_verification(p, draft, noise.r, noise.bits)

    def beta(self, p: Tensor, draft: Draft, verdict: Verdict) -> Tensor:
        """sum_x min(p, q) [B, N] as for speculative sampling (Theorem 3.5), although blocks are accepted more often."""
        return acceptance_probability(p[:, :-1], draft, 1.0, self.greedy)


class RejectionVerifier(Verifier):
    """Accepts with probability p(x) / (M q(x)), M = max p / q (A.2): exact, but accepts less often than speculative
    sampling. Needs a q that is no point mass: there M is infinite, and nothing would be accepted."""

    needs_q = True
    rule = "1 / M with M = max p / q"

    def accept(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        if self.greedy:
            return greedy_matching(p, draft)
        return rejection_sampling(p, draft, noise.r, noise.bits)

    def beta(self, p: Tensor, draft: Draft, verdict: Verdict) -> Tensor:
        if self.greedy or draft.probs is None:
            return acceptance_probability(p[:, :-1], draft, 1.0, self.greedy)
        return rejection_rate(p[:, :-1], draft.probs)
