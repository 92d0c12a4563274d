"""DFlash (z-lab 2026): decoder layers that guess a whole block of tokens in one pass.

The block is the last committed token and masks. Its rows see each other and, in place of the text's own keys and
values, those that each layer makes of the target's hidden states. b rows, S rows of a block, n tokens, T columns, A
layers of the target that are read, H hidden, K key heads, D head size.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from specbench.drafters.dflash_config import DFlashConfig, refuse_other_target
from specbench.models.checkpoint import reading
from specbench.models.language_model import LanguageModel
from specbench.models.published import fill_module, place, read_tensors, targets_of

MARKOV = "markov_head."
CONFIDENCE = "confidence_head.proj.weight"  # of DSpark's estimate of acceptance
MAPS = ("d2t", "t2d")


class Markov(nn.Module):
    """DSpark's bias of a guess by the token before it, of low rank."""

    def __init__(self, vocab_size: int, rank: int, predicted: int):
        super().__init__()
        self.markov_w1, self.markov_w2 = nn.Embedding(vocab_size, rank), nn.Linear(rank, predicted, bias=False)

    def forward(self, before: Tensor) -> Tensor:
        """Tokens [b] to what is added to the next guess's logits [b, V']."""
        bias: Tensor = self.markov_w2(self.markov_w1(before))
        return bias


class DFlashNetwork(nn.Module):
    """The drafter's own weights, made without values; embedding, output matrix and bias are set beside them."""

    embed_tokens: nn.Module
    lm_head: nn.Module

    def __init__(self, config: DFlashConfig, features: int):
        """`features` is A times the target's H."""
        super().__init__()
        own: Any = config.layers
        self.markov_head: Markov | None = None
        self.confidence_head: nn.ModuleDict | None = None
        self.estimate_reads_token = False  # beside the state, as the bias reads it
        self.rotary = Qwen3RotaryEmbedding(own)
        self.windows = [own.sliding_window if kind == "sliding_attention" else None for kind in own.layer_types]
        self.causal_windows = config.causal_windows
        with torch.device("meta"):
            self.fc = nn.Linear(features, own.hidden_size, bias=False)
            self.hidden_norm = Qwen3RMSNorm(own.hidden_size, eps=own.rms_norm_eps)
            self.norm = Qwen3RMSNorm(own.hidden_size, eps=own.rms_norm_eps)
            self.layers = nn.ModuleList(Qwen3DecoderLayer(own, i) for i in range(own.num_hidden_layers))

    def context(self, features: Tensor, first: Tensor) -> Tensor:
        """Keys and values [layers, 2, b, K, n, D] of the target's states [b, n, A * H], from position first [b] on."""
        states = self.hidden_norm(self.fc(features))
        angles = self._angles(states, first)
        return torch.stack([torch.stack(self._keys_and_values(layer, states, angles)) for layer in self.layers])

    def forward(self, block: Tensor, context: Tensor, first: Tensor) -> Tensor:
        """Hidden states [b, S, H] of embeddings [b, S, H] from first [b] on, behind context [layers, 2, b, K, T, D]."""
        angles, layers = self._angles(block, first), cast(Any, self.layers)
        for i, layer in enumerate(layers):
            attention = layer.self_attn
            states = layer.input_layernorm(block)
            queries = self._turned(attention.q_norm, attention.q_proj(states), angles)
            own = self._keys_and_values(layer, states, angles)
            keys, values = (torch.cat([stored, new], 2) for stored, new in zip(context[i], own, strict=True))
            mask = self._mask(context.shape[4], block.shape[1], first, self.windows[i])
            found = F.scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=True)
            block = block + attention.o_proj(found.transpose(1, 2).flatten(2))
            block = block + layer.mlp(layer.post_attention_layernorm(block))
        normed: Tensor = self.norm(block)
        return normed

    def estimate(self, states: Tensor, before: Tensor) -> Tensor:
        """Logit [b] of the probability that a guess will be accepted, from the block's states [b, H] at its place and
        the tokens [b] before it (DSpark, section 3.2.1). It does not read the guess itself."""
        if self.markov_head is not None and self.estimate_reads_token:
            states = torch.cat([states, self.markov_head.markov_w1(before)], -1)
        found: Tensor = cast(nn.ModuleDict, self.confidence_head)["proj"](states)[:, 0]
        return found.float()

    def _angles(self, states: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [b, n, D] of positions from first [b] on, for states [b, n, H]."""
        positions = first[:, None] + torch.arange(states.shape[1], device=first.device)
        found: tuple[Tensor, Tensor] = self.rotary(states, positions)
        return found

    def _turned(self, norm: Callable[[Tensor], Tensor], heads: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Heads [b, n, K * D], normed and turned by their positions: [b, K, n, D]."""
        split = norm(heads.unflatten(-1, (-1, angles[0].shape[-1]))).transpose(1, 2)
        turned: Tensor = apply_rotary_pos_emb(split, split, *angles)[1]
        return turned

    def _keys_and_values(self, layer: Any, states: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values [b, K, n, D] of states [b, n, H]."""
        attention: Any = layer.self_attn
        values = attention.v_proj(states).unflatten(-1, (-1, angles[0].shape[-1])).transpose(1, 2)
        return self._turned(attention.k_norm, attention.k_proj(states), angles), values

    def _mask(self, columns: int, block: int, first: Tensor, window: int | None) -> Tensor:
        """[b, 1, S, T + S] bool: the context before first [b], or its last `window` columns, and the block."""
        place, begin = torch.arange(columns, device=first.device), first[:, None, None]
        seen = place < begin  # [b, 1, T]
        if window is not None:
            seen = seen & (place >= begin - window)
        rows = torch.ones(block, block, dtype=torch.bool, device=first.device)
        if window is not None and self.causal_windows:
            rows = rows.tril()
        b = len(first)
        return torch.cat([seen.expand(b, block, columns), rows.expand(b, block, block)], 2)[:, None]


def load_network(
    path: str, key: str, config: DFlashConfig, target: LanguageModel
) -> tuple[DFlashNetwork, Tensor | None]:
    """The network of a folder or hub id on the target's device, with the target's embedding and output matrix where it
    has none of its own, and the target's token [V'] of each of its tokens, None if they are the same. Raises
    ConfigError if its tensors and its config.json disagree, or if it does not fit the target."""
    named, text = f"{key}={path}", target.config
    refuse_other_target(config, named, target.name, text)
    features = len(config.layers_of(text.num_hidden_layers)) * text.hidden_size
    tensors, size = named_tensors(read_tensors(path, key)), target.vocab_size
    width, predicted = config.layers.hidden_size, config.options.draft_vocab_size or size
    with reading(key, path, "weights"):
        targets = targets_of(tensors, predicted, size)
        network = DFlashNetwork(config, features)
    with reading(key, path, "weights"), torch.device("meta"):
        if "embed_tokens.weight" in tensors:
            network.embed_tokens = nn.Embedding(size, width)
        if "lm_head.weight" in tensors or predicted != size:
            network.lm_head = nn.Linear(width, predicted, bias=False)
        if config.options.markov_rank:
            network.markov_head = Markov(size, config.options.markov_rank, predicted)
        if CONFIDENCE in tensors:
            network.estimate_reads_token = tensors[CONFIDENCE].shape[-1] != width
            rank = config.options.markov_rank if network.estimate_reads_token else 0
            network.confidence_head = nn.ModuleDict({"proj": nn.Linear(width + rank, 1)})
    fill_module(network, {name: tensor for name, tensor in tensors.items() if name not in MAPS}, named)
    place(network, named, target)
    network = target.executor.load(network)
    network.rotary = Qwen3RotaryEmbedding(config.layers).to(target.device)  # its frequencies stay in 32 bits
    stock: Any = target.module
    ends = {"embed_tokens": stock.get_input_embeddings(), "lm_head": stock.get_output_embeddings()}
    for name in ends.keys() - dict(network.named_children()).keys():
        network.add_module(name, ends[name])
    return network, targets


def named_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by this network's names: DSpark's bias has its prefix."""
    names = {name: name.removeprefix("model.") for name in tensors}
    return {MARKOV + own if own.startswith("markov_w") else own: tensors[name] for name, own in names.items()}
