"""A forward on a CPU in few operations, for modules that consist of Llama-like layers: what Python spends around each
operation is a large part of a small model's step. b rows, N new tokens, T columns, H hidden, D head size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specbench.decoding.token_tree import Tree
from specbench.executors.half_linear import HalfLinear, joined
from specbench.models.attention_mask import AttentionMask, TokenPlaces, places_of
from specbench.models.fused_step import FusedStep, Layer, Norm, need

PRODUCTS = (HalfLinear, nn.Linear)


class CpuStep(FusedStep):
    """The forward in float32. Products with one input are one product, and the norm in front is a part of it."""

    counts = False
    any_head = True

    def __init__(self, module: Any, mask: AttentionMask):
        super().__init__(module, mask)
        gains = [norm.gain for layer in self.layers for norm in (layer.before, layer.between, *(layer.norms or ()))]
        numbers = {tensor.dtype for tensor in (self.table, self.norm.gain, *gains)}
        need(numbers == {torch.float32}, "numbers of 16 bits")
        cosines, _ = self.angles_of(1)
        need({layer.size for layer in self.layers} == {cosines.shape[-1]}, "heads that are rotated in part")
        heads = {tuple(part.out_features // layer.size for part in layer.projections) for layer in self.layers}
        need(len(heads) == 1, "layers with other numbers of heads")
        self.heads = next(iter(heads))  # of queries, keys and values
        self.group, self.turns = self.heads[0] // self.heads[1], torch.empty(0)
        self.products = [(joined(layer.projections), joined(layer.gates)) for layer in self.layers]

    def logits(
        self, cache: Any, words: Tensor, first: Tensor, visible: int, row: int | None, tree: Tree | None,
        keep_logits: int,
    ) -> Tensor:  # fmt: skip
        x = words if words.is_floating_point() else F.embedding(words, self.table)
        places = places_of(first, words.shape[1], visible, tree)
        cache.place(places.slots, visible, row)
        turns, masks = self._turns(places.positions, cache.capacity).chunk(2, -1), self._masks(places)
        hidden = [x]
        for layer, products in zip(self.layers, self.products, strict=True):
            hidden.append(self._layer(layer, *products, hidden[-1], turns, masks[layer.window], cache))
        self.note(hidden, len(words))
        last = hidden[-1][:, -keep_logits:]
        if type(self.head) in PRODUCTS:
            return times((self.head,), last, self.norm)
        found: Tensor = type(self.head).forward(self.head, self.last_norm(last))  # an early exit's
        return found

    def _masks(self, places: TokenPlaces) -> dict[int | None, Tensor]:
        """By a layer's window, [b, 1, group * N, T]: what is added to the scores of queries that share keys."""
        masks: dict[int | None, Tensor] = {}
        for kind, seen in self.mask.seen(places, self.mask.kinds).items():
            mask = torch.where(seen, 0.0, torch.finfo(self.table.dtype).min)
            window = self.mask.window if kind == "sliding_attention" else None
            masks[window] = mask if self.group == 1 else mask.repeat(1, 1, self.group, 1)
        return masks

    def _turns(self, positions: Tensor, most: int) -> Tensor:
        """The cosines and sines [b, N, 1, 2 D] of positions [b, N] below `most`. Sines are negative in the first half
        of a head, where they are multiplied with its second half."""
        if len(self.turns) < most:
            cosines, sines = self.angles_of(most)
            first, second = sines.chunk(2, -1)
            self.turns = torch.cat([cosines, -first, second], -1)
        return F.embedding(positions, self.turns)[:, :, None]

    def _layer(
        self, layer: Layer, projections: Sequence[Any], gates: Sequence[Any], x: Tensor, turns: Sequence[Tensor],
        mask: Tensor, cache: Any,
    ) -> Tensor:  # fmt: skip
        """x [b, N, H] behind a layer; `turns` are the cosines and sines [b, N, 1, D] of the tokens' positions."""
        (b, N, _), (heads, key_heads, _), D = x.shape, self.heads, layer.size
        made = times(projections, x, layer.before).view(b, N, -1, D)
        values, turned = made[:, :, heads + key_heads :], made[:, :, : heads + key_heads]
        if layer.norms is not None:
            parts = zip(turned.split((heads, key_heads), 2), layer.norms, strict=True)
            turned = torch.cat([F.rms_norm(part, (D,), *norm) for part, norm in parts], 2)
        turned = torch.addcmul(turned * turns[0], turned.roll(D // 2, -1), turns[1]).transpose(1, 2)
        keys, values = cache.update(turned[:, heads:], values.transpose(1, 2), layer.number)
        q = turned[:, :heads].reshape(b, key_heads, -1, D)
        mixed = F.scaled_dot_product_attention(q, keys, values, mask, scale=layer.scale)
        x = x + times((layer.back,), mixed.reshape(b, heads, N, D).transpose(1, 2).reshape(b, N, -1))
        gate, up = times(gates, x, layer.between).chunk(2, -1)
        return x + times((layer.down,), layer.activation(gate).mul_(up))


def times(parts: Sequence[Any], x: Tensor, norm: Norm | tuple[()] = ()) -> Tensor:
    """x [b, N, H], or its norm, times the weights of products, beside each other: [b, N, columns of all]."""
    if norm and not all(type(part) is HalfLinear for part in parts):
        x, norm = F.rms_norm(x, norm.gain.shape, *norm), ()
    found: list[Tensor] = [type(part).forward(part, x, *norm) for part in parts]  # not what watches the output matrix
    return found[0] if len(found) == 1 else torch.cat(found, -1)
