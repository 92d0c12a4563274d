"""The parts of modules that consist of Llama-like layers, and what their forwards of few operations share.

Such modules are found by their parts: norms, products, activations and rotations are looked at, and tried. Everything
else runs as the module is written. b rows, N new tokens, H hidden, D head size, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from specbench.decoding.token_tree import Tree
from specbench.executors.half_linear import HalfLinear
from specbench.models.attention_mask import AttentionMask
from specbench.models.layers import decoder_layers
from specbench.models.sizes import plain_parts

LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
PRODUCTS, HEAD_NORMS = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_norm", "k_norm"}
GATED = {"gate_proj", "up_proj", "down_proj"}
# By dtype, how far keys may differ by rounding. float16 may not hold a product in front of its norm's factor.
ROUNDING = {torch.bfloat16: 0.1, torch.float32: 1e-3}
PLAIN = {"full_attention", "sliding_attention"}  # kinds of layers
TEXT, FAR = 8, 2**24  # tokens
MOVING = ("dynamic", "longrope")  # rotations that change with the length of the text


def need(condition: bool, what: str) -> None:
    """Raises ValueError unless the condition holds: the module has `what` instead."""
    if not condition:
        raise ValueError(f"it has {what}")


class Norm(NamedTuple):
    """A root mean square norm: x over the root of its mean square plus eps, times gain [H]."""

    gain: Tensor
    eps: float


class Layer(NamedTuple):
    """The parts of a layer. Products are modules with weight [out, in] and bias [out] or None."""

    number: int  # of its keys and values in the cache
    window: int | None
    before: Norm  # of attention
    projections: tuple[Any, Any, Any]  # of q, k and v; all have biases, or none
    norms: tuple[Norm, Norm] | None  # of each head of q and of k
    size: int  # D
    scale: float  # of scores
    back: Any  # W_o
    between: Norm
    gates: tuple[Any, Any]  # of the activation and of what it is multiplied with; both have biases, or none
    activation: Any
    down: Any


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
                return Norm(gain.contiguous(), eps)
        raise ValueError(f"it has the norm {type(part).__name__}")

    def product(self, part: Any) -> Any:
        """A linear layer whose calls nothing else changes."""
        changed = "forward" in vars(part) or part._forward_hooks or part._forward_pre_hooks
        plain = isinstance(part, nn.Linear | HalfLinear) and len(plain_parts(part.weight)) == 1 and not changed
        need(plain, f"the product {type(part).__name__}")
        self.read |= {id(weight) for weight in part.parameters()}
        return part

    def layer(self, layer: Any, windows: Sequence[int | None]) -> Layer:
        """The parts of a layer, which must be the usual ones; `windows` are those of all layers, or of each."""
        need({*dict(layer.named_children())} == LAYER, f"the layer {type(layer).__name__}")
        attends, mlp = layer.self_attn, layer.mlp
        names = {*dict(attends.named_children())}
        need(names - HEAD_NORMS == PRODUCTS and len(names & HEAD_NORMS) != 1, f"the attention {type(attends).__name__}")
        need({*dict(mlp.named_children())} - {"act_fn"} == GATED, f"the MLP {type(mlp).__name__}")
        number, size = int(attends.layer_idx), int(attends.head_dim)
        norms = (self.norm(attends.q_norm), self.norm(attends.k_norm)) if names & HEAD_NORMS else None
        need(all(len(norm.gain) == size for norm in norms or ()) and size % 2 == 0, "norms of all heads at once")
        return Layer(
            number, windows[number % len(windows)], self.norm(layer.input_layernorm),
            self.together(attends.q_proj, attends.k_proj, attends.v_proj), norms, size, float(attends.scaling),
            self.product(attends.o_proj), self.norm(layer.post_attention_layernorm),
            self.together(mlp.gate_proj, mlp.up_proj), mlp.act_fn, self.product(mlp.down_proj),
        )  # fmt: skip

    def together(self, *parts: Any) -> tuple[Any, ...]:
        """Products of one input, all with biases or none."""
        need(len({part.bias is None for part in parts}) == 1, "a bias of some of several products")
        return tuple(self.product(part) for part in parts)


class FusedStep(ABC):
    """A forward of one module, on its own weights, in few operations."""

    counts = True  # whether it reads on the device how many columns there are, so that one shape serves every length
    any_head = False  # whether the output matrix may be another module
    most_rows = 64  # new tokens of all rows; beyond it weights would be read too often

    def __init__(self, module: Any, mask: AttentionMask):
        """Raises ValueError if the module has other parts."""
        need({*mask.layers} <= PLAIN and not module.config.is_encoder_decoder, "an encoder, or other kinds of layers")
        decoder, embedding = module.get_decoder(), module.get_input_embeddings()
        self.head, self.mask = module.get_output_embeddings(), mask
        need(decoder is not module and type(embedding) is nn.Embedding, "other embeddings, or no layers behind them")
        parts, reader = decoder_layers(module), Reader()
        self.layers = [reader.layer(part, mask.windows) for part in parts]
        self.table, self.norm = embedding.weight, reader.norm(decoder.norm)
        if self.any_head:
            reader.read |= {id(weight) for weight in self.head.parameters()}
        else:
            reader.product(self.head)
        self.rotation = decoder.rotary_emb
        need(vars(self.rotation).get("rope_type") not in (None, *MOVING), "another rotation of heads")
        need({id(p) for p in module.parameters()} == reader.read | {id(self.table)}, "more than Llama-like layers")
        need(all(map(self._reads_no_position, parts)), "attention that depends on positions in another way")
        self.last_norm = decoder.norm
        self.angles: list[tuple[Tensor, Tensor]] = []  # the last one is used; captured graphs may read the others
        self.notes: tuple[Sequence[int], list[Tensor]] | None = None  # layers of hidden states, and those found

    @torch.no_grad()
    def _reads_no_position(self, layer: Any) -> bool:
        """Whether a layer's attention is the same at far positions, if rotated as at near ones. Some scale queries."""
        x = self.table[None, :TEXT]
        near = torch.arange(x.shape[1], device=x.device)[None]
        turns = self.rotation(x, near)
        given = {"hidden_states": x, "position_embeddings": turns, "attention_mask": None}
        found = (layer.self_attn(**given, position_ids=positions)[0] for positions in (near, near + FAR))
        return torch.equal(*found)

    @abstractmethod
    def logits(
        self, cache: Any, words: Tensor, first: Tensor, visible: int, row: int | None, tree: Tree | None,
        keep_logits: int,
    ) -> Tensor:  # fmt: skip
        """Logits [b, N, V] in float32 (only the last `keep_logits` if not 0) of token ids words [b, N], or of vectors
        [b, N, H], as `CachedModel.forward` explains them; the cache knows its rows."""

    def serves(self, tokens: Tensor) -> bool:
        """Whether tokens [b, N], or vectors [b, N, H], are few enough, and nobody reads the module as it runs."""
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

    def note(self, hidden: list[Tensor], rows: int) -> None:
        """Notes the hidden states of `rows` rows in front of each layer and behind the last one, if anyone asked."""
        if self.notes is not None:
            layers, found = self.notes
            joined = torch.cat([hidden[layer] for layer in layers], -1) if layers else self.last_norm(hidden[-1])
            found.append(joined.view(rows, -1, joined.shape[-1]))

    def difference(self, model: Any) -> str | None:
        """How keys and values that the kernels store differ from those that the module stores, as a share of their
        length; None if by rounding. Unlike logits, keys show any other rotation. `model` has no cache."""
        ids = torch.arange(TEXT, device=self.table.device)[None] % len(self.table)
        stored: list[list[Tensor]] = []
        for model.fused in (self, None):
            model.allocate(1, TEXT)
            visible = model.rollback_to([0], TEXT)
            model.forward(ids, torch.zeros(1, dtype=torch.long, device=ids.device), visible, keep_logits=1)
            stored.append([t.float() for t in model.cache.tensors() if t.is_floating_point()])
            model.free()
        model.fused = self
        pairs = zip(*stored, strict=True)
        worst = float(torch.stack([(ours - theirs).norm() / theirs.norm() for ours, theirs in pairs]).max())
        return None if worst <= ROUNDING[self.table.dtype] else f"keys or values differ by {worst:.1g}"
