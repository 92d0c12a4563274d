"""Whether a model whose weights are divided computes what the whole model does. Everything else that is compared in a
run, the verdict's forward too, is computed by the divided layers, so a wrong division would agree with itself.

T tokens, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specbench.config.memory import give_back
from specbench.decoding import processes
from specbench.errors import ConfigError
from specbench.executors.machine import free_bytes
from specbench.models.checkpoint_checks import ROUNDING, probe_text

SHARE_OF_MEMORY = 0.5  # of what is free: a whole model that needs more is not loaded
SUMS = 32  # times ROUNDING: sums of parts in another order, layer after layer


@torch.no_grad()
def agrees_with_whole(divided: PreTrainedModel, load: Callable[[], PreTrainedModel], key: str) -> bool:
    """Compares the logits of ranks with those of the whole model, which `load` loads on rank 0; False if it has no room
    beside what is loaded. Raises ConfigError, on all ranks, if they differ by more than rounding."""
    texts = torch.tensor([probe_text(divided)], device=divided.device)  # [1, T]
    ours, found = _logits(divided, texts), None
    needed = sum(weight.numel() * weight.element_size() for weight in divided.parameters())
    if processes.current.is_first_rank and needed <= SHARE_OF_MEMORY * free_bytes(divided.device):
        theirs = _logits(load(), texts)
        found = float((ours - theirs).abs().max()), float(theirs.abs().max())
        give_back()
    found = processes.current.broadcast(found)
    if found is None:
        return False
    if not found[0] <= SUMS * ROUNDING[divided.dtype] * found[1]:
        raise ConfigError(
            f"{key} has other logits in {processes.current.size} processes than in one (by {found[0]:.3g}, the largest "
            f"is {found[1]:.3g}): transformers divides this model wrongly, so use 1"
        )
    return True


def _logits(module: Any, texts: Tensor) -> Tensor:
    """[1, T, V] of texts [1, T]."""
    found: Tensor = module(input_ids=texts, use_cache=False).logits.float()
    return found
