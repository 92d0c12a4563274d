"""The expert layers of mixture-of-experts models in transformers, and their weights."""

from typing import Any

from torch import nn

CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_top_k", "top_k_experts")  # names in configs


def expert_layers(module: nn.Module) -> list[nn.Module]:
    """The modules that hold the weights of all experts of a layer, each stacked [experts, out, in], in order."""
    return [child for child in module.modules() if count_of(child) > 1]


def count_of(child: Any) -> int:
    """How many experts a module holds, 0 if it holds none."""
    count = getattr(child, "num_experts", None)
    stacked = [p for p in child.parameters(recurse=False) if p.dim() == 3 and p.shape[0] == count]
    return int(count) if isinstance(count, int) and stacked else 0


def chosen_by_token(config: Any) -> int | None:
    """How many routed experts each token has, None if the configuration does not say."""
    found = [getattr(config, name, None) for name in CHOSEN]
    return next((value for value in found if isinstance(value, int)), None)


def idle_experts(module: Any) -> tuple[float, float]:
    """Weights, and their bytes, of the routed experts that a forward of one token does not wake."""
    chosen = chosen_by_token(module.config.get_text_config())
    numbers = held = 0.0
    if chosen is None:
        return numbers, held
    for layer in expert_layers(module):
        share = max(0.0, 1 - chosen / count_of(layer))
        numbers += share * sum(p.numel() for p in layer.parameters(recurse=False))
        held += share * sum(p.nbytes for p in layer.parameters(recurse=False))
    return numbers, held
