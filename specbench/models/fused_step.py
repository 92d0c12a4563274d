"""A forward of few tokens by the kernels of specbench/kernels, for modules that consist of Llama-like layers.

Such modules are found by their parts: norms, products, activations and rotations are looked at, and tried. Everything
else runs as the module is written, and so do longer texts. b rows, N new tokens, R = b N, H hidden, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from triton import knobs

from specbench.decoding.token_tree import Tree
from specbench.kernels import attention, fused
from specbench.models.attention_mask import AttentionMask
from specbench.models.layers import decoder_layers
from specbench.models.sizes import plain_parts

LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
PRODUCTS, HEAD_NORMS = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_norm", "k_norm"}
GATED = {"gate_proj", "up_proj", "down_proj"}
# By dtype, how far keys may differ by rounding. float16 may not hold a product in front of its norm's factor.
ROUNDING = {torch.bfloat16: 0.1, torch.float32: 1e-3}
PLAIN = {"full_attention", "sliding_attention"}  # kinds of layers
TEXT = 8  # tokens
MOVING = ("dynamic", "longrope")  # rotations that change with the length of the text


def need(condition: bool, what: str) -> None:
    """Raises ValueError unless the condition holds: the module has `what` instead."""
    if not condition:
        raise ValueError(f"it has {what}")


class Norm(NamedTuple):
    """A root mean square norm: x over the root of its mean square plus eps, times gain [H]."""

    gain: Tensor
    eps: float


class Product(NamedTuple):
    """A linear layer: weight [out, in] and bias [out]."""

    weight: Tensor
    bias: Tensor | None


class Layer(NamedTuple):
    """The parts of a layer, as the kernels take them."""

    number: int  # of its keys and values in the cache
    window: int | None
    before: Norm  # of attention
    heads: fused.Heads
    scale: float  # of scores
    back: Product  # W_o
    between: Norm
    gates: tuple[Product, Product]
    activation: int
    down: Product


class Reader:
    """Reads the parts of a module, and notes which of its parameters these are. Raises ValueError."""

    def __init__(self) -> None:
        self.read: set[int] = set()  # ids of parameters

    def norm(self, part: Any) -> Norm:
        """Tries whether a part is the norm. Some store the gain without the 1 that they add."""
        weights, eps = list(part.parameters()), vars(part).get("variance_epsilon", vars(part).get("eps"))
        need(len(weights) == 1 and weights[0].dim() == 1 and isinstance(eps, float), f"the norm {type(part).__name__}")
        self.read.add(id(weights[0]))
        weight = weights[0].detach()
        x = torch.linspace(-3, 2, 2 * len(weight), device=weight.device).view(2, -1) * eps**0.5  # so that eps matters
        plain = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        for gain in (weight, 1 + weight.float()):
            if torch.allclose(part(x).detach().float(), plain * gain, rtol=1e-4, atol=1e-5):
                return Norm(gain, eps)
        raise ValueError(f"it has the norm {type(part).__name__}")

    def product(self, part: Any) -> Product:
        """A linear layer whose calls nothing else changes."""
        changed = "forward" in vars(part) or part._forward_hooks or part._forward_pre_hooks
        plain = isinstance(part, nn.Linear) and len(plain_parts(part.weight)) == 1 and not changed
        need(plain, f"the product {type(part).__name__}")
        self.read |= {id(weight) for weight in part.parameters()}
        return Product(part.weight, part.bias)

    def layer(self, layer: Any, windows: Sequence[int | None]) -> Layer:
        """The parts of a layer, which must be the usual ones; `windows` are those of all layers, or of each."""
        need({*dict(layer.named_children())} == LAYER, f"the layer {type(layer).__name__}")
        attends, mlp = layer.self_attn, layer.mlp
        need({*dict(mlp.named_children())} - {"act_fn"} == GATED, f"the MLP {type(mlp).__name__}")
        before, gates = self.norm(layer.input_layernorm), (self.product(mlp.gate_proj), self.product(mlp.up_proj))
        need(len({gate.bias is None for gate in gates}) == 1, "a bias of one of two products")
        number = int(attends.layer_idx)
        return Layer(
            number, windows[number % len(windows)], before, self.heads(attends, before), float(attends.scaling),
            self.product(attends.o_proj), self.norm(layer.post_attention_layernorm), gates,
            activation_of(mlp.act_fn), self.product(mlp.down_proj),
        )  # fmt: skip

    def heads(self, part: Any, before: Norm) -> fused.Heads:
        """What makes queries, keys and values of an attention layer, behind the norm `before` it."""
        names = {*dict(part.named_children())}
        own = names & HEAD_NORMS
        need(names - own == PRODUCTS and len(own) != 1, f"the attention {type(part).__name__}")
        products = [self.product(child) for child in (part.q_proj, part.k_proj, part.v_proj)]
        norms = [self.norm(part.q_norm), self.norm(part.k_norm)] if own else []
        size, biased = int(part.head_dim), {product.bias is not None for product in products}
        need(size % 2 == 0 and all(len(norm.gain) == size for norm in norms), "norms of all heads at once")
        need(len(biased) == 1, "biases of some of q, k and v")
        weights, biases = zip(*products, strict=True)
        q_norm, k_norm = norms or (None, None)
        return fused.Heads(weights, biases if biased == {True} else None, q_norm, k_norm, before.eps, size)


def activation_of(function: Any) -> int:
    """The number that the kernels have for an activation, which is tried. Raises ValueError."""
    x = torch.linspace(-6, 6, 100)
    if torch.allclose(function(x), F.silu(x), atol=1e-6):
        return fused.SILU
    need(torch.allclose(function(x), F.gelu(x, approximate="tanh"), atol=1e-6), "another activation")
    return fused.GELU


class FusedStep:
    """The kernels' forward of one module, on its own weights."""

    most_rows = 64  # new tokens of all rows; beyond it weights would be read too often

    def __init__(self, module: Any, mask: AttentionMask):
        """Raises ValueError if the module has other parts."""
        need(module.device.type == "cuda" or knobs.runtime.interpret, "no CUDA device")
        need({*mask.layers} <= PLAIN and not module.config.is_encoder_decoder, "an encoder, or other kinds of layers")
        decoder, embedding = module.get_decoder(), module.get_input_embeddings()
        self.head = module.get_output_embeddings()
        need(decoder is not module and type(embedding) is nn.Embedding, "other embeddings, or no layers behind them")
        parts, reader = decoder_layers(module), Reader()
        self.layers = [reader.layer(part, mask.windows) for part in parts]
        self.table, self.norm, self.output = embedding.weight, reader.norm(decoder.norm), reader.product(self.head)
        self.rotation = decoder.rotary_emb
        need(vars(self.rotation).get("rope_type") not in (None, *MOVING), "another rotation of heads")
        need({id(p) for p in module.parameters()} == reader.read | {id(self.table)}, "more than Llama-like layers")
        kinds = {(p.device, p.dtype) for p in module.parameters()}
        need(len(kinds) == 1 and self.table.dtype in ROUNDING, "several devices or dtypes, or float16")
        self.last_norm = decoder.norm
        self.angles: list[tuple[Tensor, Tensor]] = []  # the last one is used; captured graphs may read the others
        self.notes: tuple[Sequence[int], list[Tensor]] | None = None  # layers of hidden states, and those found

    def serves(self, tokens: Tensor) -> bool:
        """Whether these new tokens [b, N], or their vectors [b, N, H], are few enough. A module that something else
        reads while it runs, runs as it is written."""
        free = self.notes is not None or "forward" not in vars(self.head)
        return free and tokens.shape[0] * tokens.shape[1] <= self.most_rows

    @contextmanager
    def noting(self, layers: Sequence[int], found: list[Tensor]) -> Iterator[None]:
        """Inside this context forwards append the hidden states that `hidden_states` would to `found`."""
        self.notes = layers, found
        try:
            yield
        finally:
            self.notes = None

    def angles_of(self, positions: int) -> tuple[Tensor, Tensor]:
        """The cosines and sines [T, D], T at least `positions`, as the module computes them."""
        if not self.angles or len(self.angles[-1][0]) < positions:
            places = torch.arange(positions, device=self.table.device)[None]
            cosines, sines = self.rotation(self.table[:1, None], places)
            self.angles.append((cosines[0].contiguous(), sines[0].contiguous()))
        return self.angles[-1]

    def logits(self, cache: Any, words: Tensor, first: Tensor, tree: Tree | None, keep_logits: int) -> Tensor:
        """Logits [b, N, V] in float32 (only the last `keep_logits` if not 0) of token ids words [b, N], or of vectors
        [b, N, H], as `CachedModel.forward` explains them; the cache knows its rows."""
        b, N = words.shape[:2]
        places = fused.Places(
            (b, N), first, cache.block_table(), self.angles_of(cache.capacity), None if tree is None else tree.sees,
            None if tree is None else tree.depth,
        )  # fmt: skip
        stream = fused.begin(words.reshape(b * N, *words.shape[2:]), self.table, self.layers[0].before.gain)
        gains, hidden = [*(layer.before.gain for layer in self.layers[1:]), self.norm.gain], [stream.x]
        for layer, gain in zip(self.layers, gains, strict=True):
            stream = self._layer(layer, stream, gain, places, cache)
            hidden.append(stream.x)
        if self.notes is not None:
            layers, found = self.notes
            joined = torch.cat([hidden[layer] for layer in layers], -1) if layers else self.last_norm(stream.x)
            found.append(joined.view(b, N, -1))
        if 0 < keep_logits < N:
            last = (t.view(b, N, -1)[:, -keep_logits:].reshape(b * keep_logits, -1) for t in stream)
            stream = fused.Stream(*last)
        scores = fused.logits(stream, *self.output, self.norm.eps)
        return scores.view(b, -1, scores.shape[-1])

    def difference(self, model: Any) -> str | None:
        """How keys and values that the kernels store differ from those that the module stores, as a share of their
        length; None if by rounding. Unlike logits, keys show any other rotation. `model` has no cache."""
        ids = torch.arange(TEXT, device=self.table.device)[None] % len(self.table)
        stored: list[list[Tensor]] = []
        for model.fused in (self, None, self):
            model.allocate(1, TEXT)
            visible = model.rollback_to([0], TEXT)
            model.forward(ids, torch.zeros(1, dtype=torch.long, device=ids.device), visible, keep_logits=1)
            stored.append([t.float() for t in model.cache.tensors() if t.is_floating_point()])
            model.free()
        pairs = zip(*stored[:2], strict=True)
        worst = float(torch.stack([(ours - theirs).norm() / theirs.norm() for ours, theirs in pairs]).max())
        return None if worst <= ROUNDING[self.table.dtype] else f"keys or values differ by {worst:.1g}"

    def _layer(
        self, layer: Layer, stream: fused.Stream, gain: Tensor, places: fused.Places, cache: Any
    ) -> fused.Stream:
        """The stream behind a layer, scaled by the gain [H] of the norm that comes next."""
        new = stream.x.new_empty(1, layer.heads.key_heads, 0, layer.heads.size)
        keys, values = cache.stored_blocks(layer.number, new)
        q = fused.project(stream, layer.heads, places, keys, values)
        mixed = attention.attend(
            q, keys, values, places.table, places.first, places.sees, places.depth, layer.scale, layer.window
        )
        stream = fused.add(mixed.view(len(stream.x), -1), *layer.back, stream, layer.between.gain)
        (gate, gate_bias), (up, up_bias) = layer.gates
        gated = fused.gate(stream, (gate, up), (gate_bias, up_bias), layer.between.eps, layer.activation)
        return fused.add(gated, *layer.down, stream, gain)
