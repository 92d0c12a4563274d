"""Training losses: how far a drafter's distribution q is from the target's p.
`tv` is the total variation, D_LK of Definition 3.2 and 1 - beta (Theorem 3.5); `kl` is KL(p|q)."""

import torch
from torch import Tensor

LOSSES = ("kl", "tv")


def distances(kind: str, p: Tensor, q: Tensor) -> Tensor:
    """The loss `kind` [...] of each position, from logits p [..., V] and q [..., V]."""
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    if kind == "tv":
        return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """beta [...] = sum_x min(p, q) of every position (Theorem 3.5), from logits p [..., V] and q [..., V]."""
    return torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1)
