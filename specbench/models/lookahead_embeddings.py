"""Look-ahead embeddings (PaSS): one pass of a model guesses several tokens.

After the last token stand K trained embeddings in place of the tokens that are not known yet. The logits at the k-th of
them predict the token k + 1 positions after the last one.
"""

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


class LookAheadConfig(PretrainedConfig):
    """`hidden_size` is H of the model that they are for, `count` is K."""

    model_type = "specbench_lookahead"

    def __init__(self, hidden_size: int = 0, count: int = 1, **more: Any):
        super().__init__(**more)
        self.hidden_size, self.count = hidden_size, count

    def check(self) -> None:
        """Raises ValueError if a value is not possible."""
        for name in ("hidden_size", "count"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} in its config.json, which must be an integer >= 1")


class LookAhead(PreTrainedModel):
    """The embeddings [K, H], which are all that is trained."""

    config_class = LookAheadConfig

    def __init__(self, config: LookAheadConfig):
        super().__init__(config)
        self.embeddings = nn.Parameter(torch.zeros(config.count, config.hidden_size))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        nn.init.normal_(self.embeddings, std=0.02)
