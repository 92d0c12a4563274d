"""Hidden states of an unmodified module of transformers, and its first layers alone. B rows, N tokens, H hidden."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specbench.errors import ConfigError
from specbench.executors.half_linear import twin_of

FIRST = "first_layers"  # attribute: how many layers a module has, if fewer than its configuration says


@contextmanager
def watched(
    module: Any, before: Callable[..., Any] | None = None, after: Callable[[Any], None] | None = None
) -> Iterator[None]:
    """Inside this context `before` is called with the first argument of each forward of the module, and may replace it;
    `after` is called with the result. `torch.compile` traces this, but not hooks that are registered meanwhile."""
    forward = module.forward

    def changed(given: Any, *others: Any, **named: Any) -> Any:
        result = forward(given if before is None else before(given), *others, **named)
        if after is not None:
            after(result)
        return result

    module.forward = changed
    try:
        yield
    finally:
        if torch.compiler.is_compiling():  # which would delete it again at each call
            module.forward = forward
        else:
            del module.forward


@contextmanager
def hidden_states(
    module: PreTrainedModel, layers: Sequence[int], select: Callable[[Tensor], Tensor] | None = None
) -> Iterator[list[Tensor]]:
    """Yields a list to which each forward inside this context appends the hidden states [B, N, A * H] in front of each
    of A `layers`, joined in this order. Layer 0 reads the embeddings; the number of all layers stands for what the last
    one returns, before the model's last norm. Without layers it is the inputs [B, N, H] of the output matrix, behind
    that norm. With `select` the matrix multiplies only what it returns of these, [B, K, H]."""
    held: dict[int, Tensor] = {}
    found: list[Tensor] = []
    parts = list(decoder_layers(module)) if layers else []

    def join(last: Tensor) -> Tensor:  # the output matrix is called behind all layers
        found.append(torch.cat([held[layer].to(last.device) for layer in layers], -1) if layers else last)
        return last if select is None else select(last)

    def before(layer: int, given: Tensor) -> Tensor:
        held[layer] = given
        return given

    def after(result: Any) -> None:
        held[len(parts)] = result[0] if isinstance(result, tuple) else result

    with ExitStack() as hooks:
        for layer, part in enumerate(parts):
            first = partial(before, layer) if layer in layers else None
            last = after if layer + 1 == len(parts) and len(parts) in layers else None
            if first or last:
                hooks.enter_context(watched(part, first, last))
        hooks.enter_context(watched(module.get_output_embeddings(), join))
        yield found


def decoder_layers(module: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of a causal module. Raises ValueError if it has no list of them."""
    total = vars(module).get(FIRST) or module.config.get_text_config().num_hidden_layers
    lists = (part for part in module.get_decoder().modules() if isinstance(part, nn.ModuleList))
    found = next((part for part in lists if len(part) == total), None)
    if found is None:
        raise ValueError(f"{type(module).__name__} has no list of its layers")
    return found


def first_layers(module: PreTrainedModel, count: int) -> PreTrainedModel:
    """A Hugging Face causal model that shares the module's weights and ends after `count` layers, with its norm and
    output matrix. Raises ConfigError if the module has no list of its layers, or not more than `count`."""
    try:
        own = decoder_layers(module)
    except ValueError as error:
        raise ConfigError(f"drafter.layers={count} is not possible: {error}") from error
    if not 0 < count < len(own):
        raise ConfigError(f"drafter.layers={count} is not allowed: it must be from 1 to {len(own) - 1}")
    path, _, name = next(name for name, part in module.named_modules() if part is own).rpartition(".")
    view = twin_of(module)
    view.get_submodule(path).register_module(name, own[:count])
    setattr(view, FIRST, count)
    return view
