"""How a drafter's model reads the target's tokens, and its logits as those of the target's tokens: families pad one
vocabulary to different sizes. q is a distribution over the target's tokens, so the output stays the target's."""

import torch
from torch import Tensor
from torch.nn import functional as F


class VocabMap:
    """One vocabulary, of which a model has `own` rows and the target `wanted`."""

    shared: int | None = None  # the number of shared tokens, if not all are

    def __init__(self, own: int, wanted: int):
        self.own, self.wanted = own, wanted

    def read(self, tokens: Tensor) -> Tensor:
        """The model's tokens for the target's [b, N]: the last one that has an embedding for any beyond it."""
        return tokens if self.own >= self.wanted else tokens.clamp(max=self.own - 1)

    def fit(self, logits: Tensor) -> Tensor:
        """Logits [..., V'] as those of the target's [..., V]: missing ones get -inf, surplus ones are cut off."""
        missing = self.wanted - logits.shape[-1]
        if missing == 0:
            return logits
        return F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[..., : self.wanted]
