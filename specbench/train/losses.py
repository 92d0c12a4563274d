"""How far a drafter's law q is from the target's p: what training makes small.

`tv` is the total variation, 1 - beta: minimising it maximises alpha itself (section 6 of the paper).
`kl` is KL(p | q), the usual distillation.
"""

import torch
from torch import Tensor

LOSSES = ("kl", "tv")


def divergence(kind: str, p: Tensor, q: Tensor) -> Tensor:
    """Mean over all positions, from logits [..., V] of target and drafter."""
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    if kind == "tv":
        return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1).mean()
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """beta = sum_x min(p, q) of every position [...], from logits [..., V]."""
    return torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1)


def ranks(p: Tensor, q: Tensor, most: int) -> Tensor:
    """[..., most]: whether the i-th best token of q is the target's argmax."""
    return q.topk(most, dim=-1).indices == p.argmax(-1, keepdim=True)
