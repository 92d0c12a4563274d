"""Converts a stock Hugging Face module to an OpenVINO program of tensors: the cache's keys and values are inputs.

b rows, N new tokens, K of them with logits, T columns, H hidden, V vocabulary.
"""

import inspect
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache

from specbench.decoding.executor import cache_argument
from specbench.errors import ConfigError, first_line, shown
from specbench.models.reference_forward import eager_attention

TOLERANCE = {torch.float32: 1e-3}  # of logits, as a share of the largest one
TOLERANCE_OF_16_BITS = 0.1
PRECISION = {torch.float32: "f32", torch.bfloat16: "bf16"}  # of the arithmetic; float16 is computed in float32


@dataclass(frozen=True)
class Converted:
    """A compiled model, and what its inputs and outputs are."""

    request: Any  # OpenVINO's InferRequest
    dtype: torch.dtype
    vocab_size: int
    masks: Sequence[str]  # kinds of layers that have a mask of their own; empty if all share one
    layers: Sequence[tuple[Tensor, Tensor]]  # keys [1, heads, 1, head size] and values of each layer
    weight_bytes: int
    logits: Tensor  # float32, of the stock module for `sample` [b, N, V]
    sample: dict[str, Any]  # arguments of a forward
    tolerance: float


class FreshLayers(Cache):
    """A cache without past that keeps what each layer gives it."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.new: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [b, heads, N, head size], returned as they are."""
        self.new += [key_states, value_states]
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


class GivenLayers(FreshLayers):
    """A cache whose tensors [b, heads, T, head size] are given; new tokens take the columns slots [b, N]."""

    def __init__(self, slots: Tensor, stored: Sequence[Tensor]):
        super().__init__()
        self.slots, self.stored = slots[:, None, :, None], stored

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [b, heads, N, head size] to all columns [b, heads, T, head size] with them."""
        super().update(key_states, value_states, layer_idx)
        before = self.stored[2 * layer_idx : 2 * layer_idx + 2]
        new_keys, new_values = (
            old.scatter(2, self.slots.expand(-1, new.shape[1], -1, new.shape[3]), new)
            for old, new in zip(before, (key_states, value_states), strict=True)
        )
        return new_keys, new_values


class Traceable(nn.Module):
    """A causal model as a function from tensors to tensors, with transformers' own eager attention: the sums that
    OpenVINO fuses itself."""

    def __init__(self, module: Any, masks: Sequence[str]):
        super().__init__()
        self.module, self.masks = module, masks
        self.cache_name = cache_argument(module.forward)
        self.can_skip_logits = "logits_to_keep" in inspect.signature(module.forward).parameters

    def forward(self, x: Tensor, positions: Tensor, slots: Tensor, keep: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        """Embeddings x [b, N, H] at positions [b, N], in columns slots [b, N]; keep [K] are the tokens with logits;
        masks [b, 1, N, columns] bool, then keys and values [b, heads, T, head size] of each layer. Returns logits
        [b, K, V], hidden states [b, K, H], and the new keys and values [b, heads, N, head size] of each layer."""
        count = max(1, len(self.masks))
        cache = GivenLayers(slots, more[count:])
        biases = [self._bias(mask, x, more[-1].shape[2]) for mask in more[:count]]
        hidden: list[Tensor] = []
        head = self.module.get_output_embeddings()
        hook = head.register_forward_pre_hook(lambda _, given: hidden.append(given[0]))
        logits = self.module(
            inputs_embeds=x,
            position_ids=positions,
            attention_mask=dict(zip(self.masks, biases, strict=True)) if self.masks else biases[0],
            use_cache=True,
            **{self.cache_name: cache, **({"logits_to_keep": keep} if self.can_skip_logits else {})},
        ).logits
        hook.remove()
        if not self.can_skip_logits:
            logits, hidden = logits[:, keep], [hidden[0][:, keep]]
        return (logits, hidden[0], *cache.new)

    @staticmethod
    def _bias(mask: Tensor, x: Tensor, columns: int) -> Tensor:
        """What eager attention adds to its scores [b, 1, N, T], from mask [b, 1, N, visible] bool."""
        lowest = torch.finfo(x.dtype).min
        bias = torch.where(mask, torch.zeros((), dtype=x.dtype), torch.full((), lowest, dtype=x.dtype))
        return F.pad(bias, (0, columns - mask.shape[-1]), value=lowest)


def convert_module(module: Any, threads: int) -> Converted:
    """Converts and compiles a stock causal model for a CPU. Raises ConfigError if that is not possible."""
    try:
        with eager_attention(module):
            return _convert(module, threads)
    except Exception as error:
        said = [line.strip(" -") for line in str(error).splitlines() if "aten::" in line or "prim::" in line]
        reason = shown(said[0]) if said else first_line(error)
        raise ConfigError(
            f"executor=openvino is not possible with {type(module).__name__}, which OpenVINO cannot convert "
            f"({reason}): choose executor=auto"
        ) from error


def _convert(module: Any, threads: int) -> Converted:
    """`convert_module`, of a module with eager attention. Raises whatever OpenVINO and the module do."""
    config, weight = module.config.get_text_config(), next(module.parameters())
    kinds = sorted(set(getattr(config, "layer_types", None) or []))
    masks = kinds if len(kinds) > 1 and getattr(config, "sliding_window", None) else []
    ids = 7 * torch.arange(15).view(3, 5) % config.vocab_size
    fresh = FreshLayers()
    logits = module(input_ids=ids, use_cache=True, **{cache_argument(module.forward): fresh}).logits.float()
    embedding, head = module.get_input_embeddings().weight, module.get_output_embeddings()
    tied = any(parameter is embedding for parameter in head.parameters())
    return Converted(
        request=_compiled(Traceable(module, masks).eval(), _example(module, masks, fresh.new), threads, weight.dtype),
        dtype=weight.dtype,
        vocab_size=logits.shape[-1],
        masks=masks,
        layers=_pairs([new[:1, :, :1].clone() for new in fresh.new]),
        weight_bytes=sum(p.nbytes for p in module.parameters()) - (0 if tied else embedding.nbytes),
        logits=logits,
        sample=_sample(ids, masks, fresh.new),
        tolerance=TOLERANCE.get(weight.dtype, TOLERANCE_OF_16_BITS),
    )


def _compiled(traceable: nn.Module, example: tuple[Tensor, ...], threads: int, dtype: torch.dtype) -> Any:
    """OpenVINO's request that computes what the module does, from inputs of any shape like the example's."""
    openvino = runtime()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of branches that are traced one way; `_check` of the executor tests them
        model = openvino.convert_model(traceable, example_input=example)
    if len(model.inputs) != len(example):
        raise ValueError(f"{len(example)} inputs became {len(model.inputs)}")
    hints = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": threads,
        "ENABLE_CPU_PINNING": False,  # PyTorch's threads would inherit the one core
        "INFERENCE_PRECISION_HINT": PRECISION.get(dtype, "f32"),
    }
    return openvino.Core().compile_model(model, "CPU", hints).create_infer_request()


def _example(module: Any, masks: Sequence[str], new: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Inputs of `Traceable`: other tokens, rows and columns than those that the program is checked with, for layers
    with new keys and values like `new` [b, heads, N, head size]."""
    b, N, T = 2, 4, 7
    slots = torch.arange(N).repeat(b, 1)
    mask = (torch.arange(N + 1) <= torch.arange(N)[:, None]).repeat(b, 1, 1, 1)
    stored = [like.new_zeros(b, like.shape[1], T, like.shape[3]) for like in new]
    x = module.get_input_embeddings()(slots + 1)
    return (x, slots, slots, torch.arange(N), *[mask] * max(1, len(masks)), *stored)


def _sample(ids: Tensor, masks: Sequence[str], new: Sequence[Tensor]) -> dict[str, Any]:
    """Arguments of a forward of the tokens ids [b, N] without past, for layers with new keys and values like `new`
    [b, heads, N, head size]."""
    b, N = ids.shape
    slots = torch.arange(N).repeat(b, 1)
    mask = (torch.arange(N) <= torch.arange(N)[:, None]).repeat(b, 1, 1, 1)
    stored = [torch.zeros_like(like) for like in new]
    cache = SimpleNamespace(
        slots=slots,
        near=None,
        tensors=lambda: stored,
        stored=lambda layer, keys, values: stored[2 * layer : 2 * layer + 2],
        read=lambda tensor: tensor,
        write=lambda tensor, new: None,
    )
    return {"input_ids": ids, "position_ids": slots, "cache": cache,
            "attention_mask": dict.fromkeys(masks, mask) if masks else mask}  # fmt: skip


def _pairs(tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def runtime() -> Any:
    """The package openvino, imported so that it reports nothing to its makers."""
    reporter = "openvino_telemetry"
    known = reporter in sys.modules
    if not known:
        sys.modules[reporter] = None  # type: ignore[assignment]  # an import of it fails, which openvino expects
    try:
        import openvino
    finally:
        if not known:
            del sys.modules[reporter]
    return openvino
