"""Attention by the Triton kernel of specbench/kernels, in models of transformers that run unmodified.

transformers calls the attention function that `config._attn_implementation` names, and hands it all keyword arguments
of the model's call. One of them, `SeenColumns`, says where keys and values are stored and what each token sees; calls
without it run as under the name sdpa. b rows, N new tokens, M entries of a tree, T columns.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from specbench.cache.static import StaticCache
from specbench.decoding.token_tree import static_tree
from specbench.errors import ConfigError, first_line
from specbench.kernels import has_triton
from specbench.models.attention_mask import RECURRENT, TokenPlaces

log = logging.getLogger(__name__)
NAME = "specbench"  # of the attention function in transformers
# What some models hand to attention and the kernel cannot compute: soft caps, sinks, biases, chosen columns.
UNUSUAL = ("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices")
PLAIN = {"full_attention", "sliding_attention"}  # kinds of layers
TEXT = {"cuda": 700, "cpu": 40}  # tokens of the text on which the kernel is checked; a CPU interprets it
TREES: dict[str, list[tuple[int, ...]]] = {
    "cuda": [(0, 0, 1, 1, 2), (0,) * 63],
    "cpu": [(0, 0, 1, 1, 2)],
}  # parents of the guesses of trees behind it
MORE = (40, 5, 1)  # tokens that are read behind it, one group after the other
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}  # of the largest value


@dataclass
class SeenColumns:
    """Where the columns of each row are stored, and which of them its new tokens see: arguments of `attend`."""

    table: Tensor  # [b, width]
    first: Tensor  # [b], the column of the first new token; below 0 if it stands before the text
    places: TokenPlaces
    windows: tuple[int | None, ...]  # `AttentionMask.windows`
    errors: list[Tensor] | None = None  # if a list, each layer adds its distance from plain attention


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


@torch.library.custom_op("specbench::stored", mutates_args=())
def stored_op(x: Tensor) -> Tensor:
    """A copy of x, of any shape, that a compiler makes once. Without it, Inductor writes what `attend` reads anew in
    front of every layer."""
    return x.clone()


@stored_op.register_fake
def _shape_of_stored(x: Tensor) -> Tensor:
    return torch.empty_like(x)


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
    output = attend_op(query, key, value, seen.table, seen.first, sees, depth, scale, window)
    if seen.errors is not None:
        right = plain_attention(query, key, value, seen, scale, window)
        seen.errors.append((output - right).abs().max() / right.abs().max())
    return output, None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, AttentionMaskInterface()["sdpa"])


def arguments(model: Any, first: Tensor, places: TokenPlaces) -> dict[str, Any]:
    """The keyword arguments that say what new tokens see, the first of them in columns first [b]. The mask has no
    columns, so that no other attention function takes it."""
    b, N = places.slots.shape
    table = model.cache.block_table()
    if torch.compiler.is_compiling():
        table, first = stored_op(table), stored_op(first)
    seen = SeenColumns(table, first, places, model.mask.windows, model.kernel_errors)
    return {"attention_mask": first.new_empty((b, 1, N, 0), dtype=torch.bool), "specbench_seen": seen}


def plain_attention(
    query: Tensor, keys: Tensor, values: Tensor, seen: SeenColumns, scale: float, window: int | None
) -> Tensor:
    """What the kernel computes, with a mask, copies and float64: [b, N, heads, head size]."""
    heads = query.shape[1]
    blocks = (stored[seen.table].transpose(1, 2).flatten(2, 3).double() for stored in (keys, values))
    k, v = (found.repeat_interleave(heads // found.shape[1], 1) for found in blocks)  # [b, heads, T, head size]
    places = seen.places._replace(visible=k.shape[2])
    mask = places.seen
    if window is not None:
        mask = mask & (torch.arange(k.shape[2], device=query.device) > places.positions[:, :, None] - window)
    scores = (query.double() @ k.mT * scale).masked_fill(~mask[:, None], -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def choose_kernel(attention: str, module: Any, device: torch.device, name: str) -> bool:
    """Whether the model uses the kernel; if so, the module is set to it. Raises ConfigError if it cannot and must."""
    reason = refusal(module, device)
    if reason is None:
        module.set_attn_implementation(NAME)
        if module.config.get_text_config()._attn_implementation != NAME:
            reason = f"{type(module).__name__} has an attention of its own"
    return _kept(attention, name, reason)


def refusal(module: Any, device: torch.device) -> str | None:
    """Why the kernel cannot be used, as far as that is known before a forward; None if nothing is known."""
    if not has_triton():
        return "the package triton is not installed"
    from triton import knobs

    if device.type != "cuda" and not knobs.runtime.interpret:
        return "it needs CUDA (or Triton's interpreter, TRITON_INTERPRET=1)"
    name = type(module).__name__
    if not isinstance(module, PreTrainedModel) or not module.is_backend_compatible():
        return f"{name} does not pass keyword arguments on to its attention"
    config = module.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    reasons = {
        "attends to an encoder's outputs": module.config.is_encoder_decoder,
        "has a recurrent state": kinds & RECURRENT,
        "has a soft cap": getattr(config, "attn_logit_softcapping", None) is not None,
        "has no SDPA in transformers, to which other calls would fall back": config._attn_implementation == "eager",
        f"has layers of kind {', '.join(sorted(kinds - PLAIN))}": kinds - PLAIN,
    }
    return next((f"{name} {reason}" for reason, holds in reasons.items() if holds), None)


def check_kernel(attention: str, model: Any) -> bool:
    """Whether the kernel computes what plain attention does. Raises ConfigError if it does not and must be used."""
    try:
        worst, allowed = worst_error(model), TOLERANCE[model.dtype]
        reason = None if worst <= allowed else f"it differs from plain attention by {worst:.1g} (allowed: {allowed})"
    except Exception as error:  # of the model, of Triton's compiler or of the driver
        reason = first_line(error)
    return _kept(attention, model.name, reason)


def worst_error(model: Any) -> float:
    """The largest distance of the kernel from plain attention in any layer, as a share of the layer's largest value, on
    a text, on a few tokens behind it and on a tree. The model must have no cache yet."""
    device = model.device
    trees = [static_tree(parents, device) for parents in TREES[device.type]]
    behind = [*MORE, *(tree.sees.shape[1] for tree in trees)]
    text = max(1, min(TEXT[device.type], model.context - sum(behind)))
    columns, begin = text + sum(behind), 0
    ids = torch.arange(columns, device=device)[None] % model.own_vocab_size
    model.cache, model.kernel_errors = StaticCache(1, columns), []
    try:
        with torch.inference_mode():
            for count, tree in zip((text, *behind), (None, *(None for _ in MORE), *trees), strict=True):
                first = torch.tensor([begin], device=device)
                model.forward(ids[:, begin : begin + count], first, columns, tree=tree, keep_logits=1)
                begin += count
            return float(torch.stack(model.kernel_errors).max())
    finally:
        model.free()
        model.kernel_errors = None


def lengths_of_kernels(model: Any) -> list[int]:
    """Lengths of prompts that between them run all kernels that any prompt would."""
    from specbench.kernels.attention import lengths_of_variants

    heads = model.config.num_attention_heads
    return lengths_of_variants(heads, getattr(model.config, "num_key_value_heads", None) or heads)


def _kept(attention: str, name: str, reason: str | None) -> bool:
    """Whether no reason stands against the kernel; warns otherwise. Raises ConfigError if it must be used."""
    if reason is not None:
        if attention == "triton":
            raise ConfigError(f"attention=triton is not possible for {name}: {reason}, use attention=sdpa")
        log.warning("%s uses SDPA, which is slower than the Triton kernel: %s", name, reason)
    return reason is None
