"""Attention by the Triton kernel of specbench/kernels, in models of transformers that run unmodified.

transformers calls the attention function that `config._attn_implementation` names, and hands it all keyword arguments
of the model's call. One of them, `SeenColumns`, says where keys and values are stored and what each token sees; calls
without it run as under the name sdpa. b rows, N new tokens, M entries of a tree, T columns.
"""

import logging
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from specbench.errors import ConfigError, first_line
from specbench.models.attention_mask import RECURRENT, TokenPlaces, layer_kinds
from specbench.models.sizes import first_of

log = logging.getLogger(__name__)
NAME = "specbench"  # of the attention function in transformers
# What some models hand to attention and the kernel cannot compute: soft caps, sinks, biases, chosen columns.
UNUSUAL = ("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices")
PLAIN = {"full_attention", "sliding_attention"}  # kinds of layers


@dataclass
class SeenColumns:
    """Where the columns of each row are stored, and which of them its new tokens see: arguments of `attend`."""

    table: Tensor  # [b, width]
    first: Tensor  # [b], the column of the first new token; below 0 if it stands before the text
    places: TokenPlaces
    windows: tuple[int | None, ...]  # `AttentionMask.windows`


@torch.library.custom_op("specbench::attend", mutates_args=())
def attend_op(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, first: Tensor, sees: Tensor | None, depth: Tensor | None,
    scale: float, window: int | None,
) -> Tensor:  # fmt: skip
    """`attend` of specbench/kernels/attention.py as an operator, for compilers and fake devices."""
    from specbench.kernels.attention import attend

    return attend(q, keys, values, table, first, sees, depth, scale, window)


@attend_op.register_fake
def _shape_of_attend(q: Tensor, keys: Tensor, values: Tensor, *others: Any) -> Tensor:
    b, heads, N, _ = q.shape
    return q.new_empty(b, N, heads, values.shape[3])


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, specbench_seen: SeenColumns | None = None, **others: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The attention function of transformers: query [b, heads, N, head size]; key and value are what the cache's
    `update` returned. Returns [b, N, heads, head size]. Raises RuntimeError for attention that is not plain."""
    seen = specbench_seen
    if seen is None:
        if attention_mask is not None and not attention_mask.shape[-1]:
            raise RuntimeError(f"{type(module).__name__} is not handed its caller's keyword arguments")
        plain: Any = AttentionInterface()["sdpa"]
        result: tuple[Tensor, None] = plain(module, query, key, value, attention_mask, scaling=scaling, **others)
        return result
    if found := [name for name in UNUSUAL if others.get(name) is not None]:
        raise RuntimeError(f"{type(module).__name__} computes attention with {', '.join(found)}")
    window = seen.windows[int(module.layer_idx) if len(seen.windows) > 1 else 0]  # type: ignore[arg-type]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    tree = seen.places.tree
    sees, depth = (None, None) if tree is None else (tree.sees, tree.depth)
    return attend_op(query, key, value, seen.table, seen.first, sees, depth, scale, window), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, AttentionMaskInterface()["sdpa"])


def arguments(model: Any, first: Tensor, places: TokenPlaces) -> dict[str, Any]:
    """The keyword arguments that say what new tokens see, the first of them in columns first [b]. The mask has no
    columns, so that no other attention function takes it."""
    b, N = places.slots.shape
    seen = SeenColumns(model.cache.block_table(), first, places, model.mask.windows)
    return {"attention_mask": first.new_empty((b, 1, N, 0), dtype=torch.bool), "specbench_seen": seen}


def choose_kernel(attention: str, module: Any, device: torch.device, name: str) -> bool:
    """Whether the model uses the kernel; if so, the module is set to it. Raises ConfigError if it cannot and must."""
    reason = refusal(module, device)
    if reason is None:
        module.set_attn_implementation(NAME)
        if module.config.get_text_config()._attn_implementation != NAME:
            reason = f"{type(module).__name__} has an attention of its own"
    return kept(attention, name, reason)


def fused_step(module: Any, windows: tuple[int | None, ...], device: torch.device, name: str) -> Any:
    """The `FusedStep` of a module, None if it has other parts than Llama's."""
    reason = refusal(module, device)
    if reason is None:
        from specbench.models.fused_step import FusedStep, UnlikeLlamaError

        try:
            return FusedStep(module, windows)
        except (AttributeError, ValueError, UnlikeLlamaError) as error:  # it lacks a part, or has another
            reason = first_line(error)
    log.info("%s runs as it is written: %s", name, reason)
    return None


def refusal(module: Any, device: torch.device) -> str | None:
    """Why the kernel cannot be used, as far as that is known before a forward; None if nothing is known."""
    if find_spec("triton") is None:
        return "the package triton is not installed"
    from triton import knobs

    if device.type != "cuda" and not knobs.runtime.interpret:
        return "it needs CUDA (or Triton's interpreter, TRITON_INTERPRET=1)"
    name = type(module).__name__
    if not isinstance(module, PreTrainedModel) or not module.is_backend_compatible():
        return f"{name} does not pass keyword arguments on to its attention"
    config = module.config.get_text_config()
    kinds = set(layer_kinds(config))
    reasons = {
        "attends to an encoder's outputs": module.config.is_encoder_decoder,
        "has a recurrent state": kinds & RECURRENT,
        "has a soft cap": first_of(config, "attn_logit_softcapping") is not None,
        "has no SDPA in transformers, to which other calls would fall back": config._attn_implementation == "eager",
        f"has layers of kind {', '.join(sorted(kinds - PLAIN))}": kinds - PLAIN,
    }
    return next((f"{name} {reason}" for reason, holds in reasons.items() if holds), None)


def kept(attention: str, name: str, reason: str | None) -> bool:
    """Whether no reason stands against the kernel; warns otherwise. Raises ConfigError if it must be used."""
    if reason is not None:
        if attention == "triton":
            raise ConfigError(f"attention=triton is not possible for {name}: {reason}, use attention=sdpa")
        log.warning("%s uses SDPA, which is slower than the Triton kernel: %s", name, reason)
    return reason is None
