"""Medusa heads as others publish them (Cai et al. 2024): residual networks on the target's last hidden state, with
output matrices of their own. Two sets of names are read: those of FasterDecoding, the original, and those of vLLM.

B rows, K heads, H hidden, V vocabulary.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from specbench.component import Selections
from specbench.errors import ConfigError
from specbench.models.checkpoint import local_path, reading
from specbench.models.checkpoint_checks import few
from specbench.models.language_model import LanguageModel
from specbench.models.published import (
    FILES,
    MERGED,
    checked,
    fill_module,
    load_network,
    read_config,
    read_tensors,
    refuse_network,
)
from specbench.models.trained_parts import Heads, HeadsConfig, load_part
from specbench.settings import BaseSettings

BLOCK, OUTPUT = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"), re.compile(r"lm_heads\.(\d+)\.weight")
MOST = 1000  # heads, and layers of each
RANKS = 10  # guesses of a head that may stand in a tree


class MedusaConfig(BaseSettings):
    """Keys of config.json in both formats."""

    medusa_num_heads: int = Field(default=1, ge=1)
    num_heads: int = Field(default=1, ge=1)
    medusa_num_layers: int | None = Field(default=None, ge=0)
    num_hidden_layers: int | None = Field(default=None, ge=0)
    hidden_size: int | None = Field(default=None, ge=1)
    vocab_size: int | None = Field(default=None, ge=1)
    truncated_vocab_size: int | None = Field(default=None, ge=1)
    original_lm_head: bool = False
    logit_scale: float = Field(default=1.0, gt=0)
    accuracy: Any = None  # as in `HeadsConfig`


class PublishedHeads(nn.Module):
    """Logits W_k x_L of each head k, with x_0 the hidden state and x_{j+1} = x_j + silu(L_kj x_j + b_kj). There are K
    matrices W, one for all heads, or none: then the target's is used. With a `token_map` [rows], row i of a W is for
    token token_map[i]."""

    token_map: Tensor | None

    def __init__(self, config: HeadsConfig, layers: int, bias: bool, outputs: int, rows: int, vocab_size: int):
        super().__init__()
        self.config, self.hidden_size, self.vocab_size = config, config.hidden_size, vocab_size
        self.own_outputs, self.scale, hidden = outputs > 0, 1.0, config.hidden_size
        with torch.device("meta"):
            linear = [[nn.Linear(hidden, hidden, bias) for _ in range(layers)] for _ in range(config.heads)]
            self.blocks = nn.ModuleList(nn.ModuleDict({"layers": nn.ModuleList(block)}) for block in linear)
            self.lm_heads = nn.ModuleList(nn.Linear(hidden, rows, bias=False) for _ in range(outputs))
            self.register_buffer("token_map", torch.zeros(rows) if rows < vocab_size else None)

    def logits(self, hidden: Tensor, steps: int, output: nn.Module) -> Tensor:
        """Logits [B, steps, V] of the first heads on hidden [B, H]; -inf for tokens that are not in `token_map`.
        `output` is the target's output matrix."""
        found = []
        for number in range(steps):
            x = hidden
            for layer in self.blocks[number].get_submodule("layers").children():
                x = x + nn.functional.silu(layer(x))
            found.append(self.lm_heads[min(number, len(self.lm_heads) - 1)](x) if self.own_outputs else output(x))
        logits = torch.stack(found, 1) * self.scale
        if self.token_map is None:
            return logits
        own = logits if self.own_outputs else logits[..., self.token_map]
        return own.new_full((*own.shape[:2], self.vocab_size), -torch.inf).index_copy(2, self.token_map, own)


def load_heads(path: str, key: str, target: LanguageModel) -> Heads | PublishedHeads:
    """Heads of ours, or of others, for a target. Raises ConfigError."""
    ours = read_config(path, key).get("model_type") == HeadsConfig.model_type
    found: Heads | PublishedHeads
    found = load_part(Heads, path, key, target) if ours else load_network(read_heads, path, key, target)
    return found


def refuse_heads(path: str, key: str, run: Selections) -> None:
    """Raises ConfigError if heads of others in a local folder cannot be read or do not fit the run's target."""
    if local_path(path).is_dir() and read_config(path, key).get("model_type") != HeadsConfig.model_type:
        refuse_network(read_heads, path, key, run)


def read_heads(path: str, key: str) -> PublishedHeads:
    """The heads of others. Raises ConfigError."""
    named, config, tensors = f"{key}={path}", read_config(path, key), read_tensors(path, key, FILES)
    if any(name.startswith(MERGED) for name in tensors):  # the other keys and tensors are the target's
        tensors = {name.removeprefix(MERGED): tensor for name, tensor in tensors.items() if name.startswith(MERGED)}
        config = {name: value for name, value in config.items() if name.startswith("medusa_") or name == "accuracy"}
    own = checked(MedusaConfig, config, named)
    with reading(key, path, "weights"):
        tensors = _used(own, _by_vllm_names(tensors), named)
        heads = _shaped(own, tensors, named)
        fill_module(heads, tensors, f"{named}, by vLLM's names,")
    return heads


def _by_vllm_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    outputs = [int(found[1]) for name in tensors if (found := re.fullmatch(r"\d+\.(\d+)\.weight", name))]
    layers, named = max(outputs, default=0), {}
    for name, tensor in tensors.items():
        name = re.sub(r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name.removeprefix("medusa_heads."))
        named[re.sub(rf"^(\d+)\.{layers}\.weight$", r"lm_heads.\1.weight", name)] = tensor
    if 1 < layers <= MOST and not any(".layers.1." in name for name in named):  # one block, repeated but stored once
        return {name.replace(".layers.0.", f".layers.{i}."): t for name, t in named.items() for i in range(layers)}
    return named


def _used(config: MedusaConfig, tensors: dict[str, Tensor], named: str) -> dict[str, Tensor]:
    """The tensors that are used: matrices of the kept tokens alone, one if all heads share it. Raises ConfigError."""
    if config.original_lm_head:
        tensors = {name: t for name, t in tensors.items() if not OUTPUT.fullmatch(name) or name == "lm_heads.0.weight"}
    kept, vocabulary = tensors.pop("token_map", None), config.vocab_size or 0
    if kept is None or vocabulary <= (config.truncated_vocab_size or vocabulary):
        return tensors
    tokens = kept.tolist()
    if kept.is_floating_point() or len({*tokens}) < len(tokens) or not {*tokens} <= {*range(vocabulary)}:
        raise ConfigError(f"{named} has a token_map that is no list of different tokens below {vocabulary}")
    whole = {name: t for name, t in tensors.items() if OUTPUT.fullmatch(name) and len(t) > len(kept)}
    return {**tensors, **{name: matrix[kept.long()] for name, matrix in whole.items()}, "token_map": kept.long()}


def _shaped(config: MedusaConfig, tensors: Mapping[str, Tensor], named: str) -> PublishedHeads:
    """Heads on "meta", whose number and layers are those of the tensors. Raises ConfigError."""
    blocks = [found for name in tensors if (found := BLOCK.fullmatch(name))]
    outputs = {int(found[1]): tensors[name] for name in tensors if (found := OUTPUT.fullmatch(name))}
    if not blocks and not outputs:
        raise ConfigError(f"{named} holds no Medusa heads: its tensors are {few(tensors)}")
    count = 1 + max([*outputs, *(int(found[1]) for found in blocks)])
    layers = 1 + max((int(found[2]) for found in blocks), default=-1)
    said = config.medusa_num_layers if config.num_hidden_layers is None else config.num_hidden_layers
    heads_said = max(config.medusa_num_heads, config.num_heads)  # published ones state fewer than there are
    if heads_said > count or said not in (None, layers) or max(count, layers) > MOST:
        raise ConfigError(f"{named} has tensors of {count} heads of {layers} layers, which its config.json denies")
    hidden = config.hidden_size or next(tensor for name, tensor in tensors.items() if name.endswith("weight")).shape[-1]
    vocabulary = config.vocab_size or len(next(iter(outputs.values()), []))
    rows = min(config.truncated_vocab_size or vocabulary, vocabulary)
    assumed = [[0.6 ** (head + 1) * 0.4**rank for rank in range(RANKS)] for head in range(count)]
    own = HeadsConfig(hidden, count, accuracy=config.accuracy or assumed)
    own.check()
    own.accuracy = [row[:rows] for row in own.accuracy]
    matrices = min(len(outputs), 1) if config.original_lm_head else count
    heads = PublishedHeads(own, layers, any(found[3] == "bias" for found in blocks), matrices, rows, vocabulary)
    heads.scale = config.logit_scale
    return heads
