"""Hidden states of a module of transformers while it runs unmodified. B rows, N tokens, H hidden."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class HiddenReader(Protocol):
    """Is given the hidden states of prompts when a target reads them: the inputs of its output matrix or, if the target
    has `feature_layers`, those in front of these layers, joined."""

    def take_hidden(self, row: int | None, begin: int, hidden: Tensor) -> None:
        """Hidden states [b, n, H] of the tokens from position `begin` on, of one row or of all (None)."""

    def clear_hidden(self) -> None:
        """The target's cache was emptied: no prompt whose hidden states were given is read on."""


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
def head_inputs(module: PreTrainedModel, select: Callable[[Tensor], Tensor] | None = None) -> Iterator[list[Tensor]]:
    """Yields a list to which each forward inside this context appends the inputs [B, N, H] of the model's output
    matrix: its last hidden states. With `select` the matrix multiplies only what it returns of them, [B, K, H]."""
    found: list[Tensor] = []

    def note(given: Tensor) -> Tensor:
        found.append(given)
        return given if select is None else select(given)

    with watched(module.get_output_embeddings(), note):
        yield found


@contextmanager
def hidden_states(
    module: PreTrainedModel, layers: Sequence[int], select: Callable[[Tensor], Tensor] | None = None
) -> Iterator[list[Tensor]]:
    """As `head_inputs`, but each forward appends the hidden states [B, N, A * H] in front of each of A `layers`, joined
    in this order. Layer 0 reads the embeddings; the number of all layers stands for what the last one returns, before
    the model's last norm. Without layers it is `head_inputs`."""
    if not layers:
        with head_inputs(module, select) as found:
            yield found
        return
    held: dict[int, Tensor] = {}
    joined: list[Tensor] = []

    def join(last: Tensor) -> Tensor:  # the output matrix is called behind all layers
        joined.append(torch.cat([held[layer].to(last.device) for layer in layers], -1))
        return last if select is None else select(last)

    def before(layer: int) -> Callable[[Tensor], Tensor]:
        def note(given: Tensor) -> Tensor:
            held[layer] = given
            return given

        return note

    def after(result: Any) -> None:
        held[len(parts)] = result[0] if isinstance(result, tuple) else result

    parts = decoder_layers(module)
    with ExitStack() as hooks, head_inputs(module, join):
        for layer, part in enumerate(parts):
            ends = after if layer == len(parts) - 1 and len(parts) in layers else None
            if layer in layers or ends is not None:
                hooks.enter_context(watched(part, before(layer) if layer in layers else None, ends))
        yield joined


def decoder_layers(module: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of a causal module. Raises ValueError if it has no list of them."""
    total = module.config.get_text_config().num_hidden_layers
    lists = (part for part in module.get_decoder().modules() if isinstance(part, nn.ModuleList))
    found = next((part for part in lists if len(part) == total), None)
    if found is None:
        raise ValueError(f"{type(module).__name__} has no list of its layers")
    return found
