"""A forward of few tokens by the kernels of specbench/kernels, for modules that consist of Llama-like layers. Longer
texts run as the module is written. b rows, N new tokens, R = b N, H hidden, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from triton import knobs

from specbench.decoding.token_tree import Tree
from specbench.kernels import attention, fused
from specbench.models.attention_mask import AttentionMask
from specbench.models.fused_step import ROUNDING, FusedStep, Layer, need


class TritonStep(FusedStep):
    """The kernels' forward. A row's result has the same bits whatever stands in the other rows."""

    def __init__(self, module: Any, mask: AttentionMask):
        need(module.device.type == "cuda" or knobs.runtime.interpret, "no CUDA device")
        super().__init__(module, mask)
        kinds = {(p.device, p.dtype) for p in module.parameters()}
        need(len(kinds) == 1 and self.table.dtype in ROUNDING, "several devices or dtypes, or float16")
        self.heads = [heads_of(layer) for layer in self.layers]
        self.activations = [activation_of(layer.activation) for layer in self.layers]

    def logits(
        self, cache: Any, words: Tensor, first: Tensor, visible: int, row: int | None, tree: Tree | None,
        keep_logits: int,
    ) -> Tensor:  # fmt: skip
        b, N = words.shape[:2]
        cache.choose(words, visible, row)
        places = fused.Places(
            (b, N), first, cache.block_table(), self.angles_of(cache.capacity), None if tree is None else tree.sees,
            None if tree is None else tree.depth,
        )  # fmt: skip
        stream = fused.begin(words.reshape(b * N, *words.shape[2:]), self.table, self.layers[0].before.gain)
        gains, hidden = [*(layer.before.gain for layer in self.layers[1:]), self.norm.gain], [stream.x]
        for i, gain in enumerate(gains):
            stream = self._layer(i, stream, gain, places, cache)
            hidden.append(stream.x)
        self.note(hidden, b)
        if 0 < keep_logits < N:
            last = (t.view(b, N, -1)[:, -keep_logits:].reshape(b * keep_logits, -1) for t in stream)
            stream = fused.Stream(*last)
        scores = fused.logits(stream, self.head.weight, self.head.bias, self.norm.eps)
        return scores.view(b, -1, scores.shape[-1])

    def _layer(self, i: int, stream: fused.Stream, gain: Tensor, places: fused.Places, cache: Any) -> fused.Stream:
        """The stream behind layer i, scaled by the gain [H] of the norm that comes next."""
        layer, heads = self.layers[i], self.heads[i]
        keys, values = cache.stored_blocks(layer.number, stream.x.new_empty(1, heads.key_heads, 0, heads.size))
        q = fused.project(stream, heads, places, keys, values)
        mixed = attention.attend(
            q, keys, values, places.table, places.first, places.sees, places.depth, layer.scale, layer.window
        )
        mixed = mixed.view(len(stream.x), -1)
        stream = fused.add(mixed, layer.back.weight, layer.back.bias, stream, layer.between.gain)
        gate, up = layer.gates
        weights, biases = (gate.weight, up.weight), (gate.bias, up.bias)
        gated = fused.gate(stream, weights, biases, layer.between.eps, self.activations[i])
        return fused.add(gated, layer.down.weight, layer.down.bias, stream, gain)


def heads_of(layer: Layer) -> fused.Heads:
    """What makes queries, keys and values of a layer, as the kernels take it."""
    q, k, v = layer.projections
    q_norm, k_norm = layer.norms or (None, None)
    biases = None if q.bias is None else (q.bias, k.bias, v.bias)
    return fused.Heads((q.weight, k.weight, v.weight), biases, q_norm, k_norm, layer.before.eps, layer.size)


def activation_of(function: Any) -> int:
    """The number that the kernels have for an activation, which is tried. Raises ValueError."""
    x = torch.linspace(-6, 6, 100)
    if torch.allclose(function(x), F.silu(x), atol=1e-6):
        return fused.SILU
    need(torch.allclose(function(x), F.gelu(x, approximate="tanh"), atol=1e-6), "another activation")
    return fused.GELU
