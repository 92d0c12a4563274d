"""Vocabularies that a family pads to different sizes: a drafter's logits as those of its target's tokens."""

import torch
from torch import Tensor
from torch.nn import functional as F


def fit_logits(logits: Tensor, vocab_size: int) -> Tensor:
    """Logits [..., V'] as [..., V]: missing tokens get -inf, surplus ones are cut off, so that softmax renormalises."""
    missing = vocab_size - logits.shape[-1]
    if missing == 0:
        return logits
    return F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[..., :vocab_size]
