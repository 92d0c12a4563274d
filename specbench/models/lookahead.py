"""Look-ahead embeddings (PaSS): one pass of a model guesses several tokens.

Behind the last token stand K trained embeddings in the place of tokens that are not known yet; what the
model says at the k-th of them is its guess for the token k + 1 places ahead.
"""

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


class LookAheadConfig(PretrainedConfig):
    model_type = "specbench_lookahead"

    def __init__(self, hidden_size: int = 0, count: int = 1, **more: Any):
        super().__init__(**more)
        self.hidden_size, self.count = hidden_size, count


class LookAhead(PreTrainedModel):
    """The embeddings [K, H], which are all that is trained."""

    config_class = LookAheadConfig

    def __init__(self, config: LookAheadConfig):
        super().__init__(config)
        self.embeddings = nn.Parameter(torch.zeros(config.count, config.hidden_size))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        nn.init.normal_(self.embeddings, std=0.02)
