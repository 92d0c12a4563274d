"""Medusa heads as others publish them (Cai et al. 2024): residual networks on the target's last hidden state, with
output matrices of their own. Two sets of names are read: those of FasterDecoding, the original, and those of vLLM.

B rows, K heads, H hidden, V vocabulary.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from specbench.component import Selections
from specbench.errors import ConfigError
from specbench.models.checkpoint import local_path, reading
from specbench.models.checkpoint_checks import few
from specbench.models.language_model import LanguageModel
from specbench.models.published import (
    fill,
    place,
    read_config,
    read_tensors,
    refuse_other_target,
    refuse_unknown_keys,
    sizes_before,
    sizes_of,
    whole_number,
)
from specbench.models.trained_parts import Heads, HeadsConfig, load_part
from specbench.settings import LARGEST

FILES = ("medusa_lm_head.pt", "medusa_lm_head.safetensors")
MERGED = "medusa_head."  # begins the names of heads in a checkpoint that holds their target too
KEYS = ("medusa_num_heads", "medusa_num_layers", "version", "accuracy", "num_heads", "num_hidden_layers", "hidden_size",
        "vocab_size", "truncated_vocab_size", "max_paths", "topk", "max_seq_len", "original_lm_head", "medusa_fc_bias",
        "logit_scale")  # fmt: skip
BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
OUTPUT = re.compile(r"lm_heads\.(\d+)\.weight")
MOST = 1000  # heads, and layers of each
RANKS = 10  # guesses of a head that may stand in a tree


class PublishedHeads(nn.Module):
    """Logits W_k(x_L) of each head k, with x_0 the hidden state and x_{j+1} = x_j + silu(L_kj x_j + b_kj). There are K
    matrices W, one for all heads, or none: then the target's is used. With a `token_map` [rows], row i of a W is for
    token token_map[i]."""

    def __init__(self, config: HeadsConfig, layers: int, bias: bool, outputs: int, rows: int, vocab_size: int):
        super().__init__()
        hidden = config.hidden_size
        self.config, self.vocab_size, self.own_outputs, self.scale = config, vocab_size, outputs > 0, 1.0
        with torch.device("meta"):
            self.blocks = nn.ModuleList(
                nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(hidden, hidden, bias) for _ in range(layers))})
                for _ in range(config.heads)
            )
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
            logits = self.lm_heads[min(number, len(self.lm_heads) - 1)](x) if self.own_outputs else output(x)
            found.append(logits)
        wide = torch.stack(found, 1) * self.scale
        if self.token_map is None:
            return wide
        own = wide if self.own_outputs else wide[..., self.token_map]
        return own.new_full((*own.shape[:2], self.vocab_size), -torch.inf).index_copy(2, self.token_map, own)


def load_heads(path: str, key: str, target: LanguageModel) -> Heads | PublishedHeads:
    """Heads of ours, or of others, for a target. Raises ConfigError."""
    if read_config(path, key).get("model_type") == HeadsConfig.model_type:
        return load_part(Heads, path, key, target)
    heads, named = read_heads(path, key), f"{key}={path}"
    place(heads, named, target)
    refuse_other_target(named, heads.config.hidden_size, heads.vocab_size, target.name, sizes_of(target))
    return heads


def refuse_heads(path: str, key: str, run: Selections) -> None:
    """Raises ConfigError if the heads of others in a local folder cannot be read, or are for another target, as far as
    names and shapes of tensors and the configurations say."""
    if not local_path(path).is_dir() or read_config(path, key).get("model_type") == HeadsConfig.model_type:
        return
    heads, target = read_heads(path, key, values=False), sizes_before(run)
    if target is not None:
        refuse_other_target(f"{key}={path}", heads.config.hidden_size, heads.vocab_size, *target)


def read_heads(path: str, key: str, values: bool = True) -> PublishedHeads:
    """The heads of others, without `values` on "meta". Raises ConfigError."""
    named, config, tensors = f"{key}={path}", read_config(path, key), read_tensors(path, key, FILES, values)
    if any(name.startswith(MERGED) for name in tensors):  # the other keys and tensors are the target's
        tensors = {name.removeprefix(MERGED): tensor for name, tensor in tensors.items() if name.startswith(MERGED)}
        config = {name: value for name, value in config.items() if name.startswith("medusa_") or name == "accuracy"}
    refuse_unknown_keys(config, KEYS, named)
    with reading(key, path, "weights"):
        tensors, file_name = _by_vllm_names(tensors)
        tensors, truncated = _truncated(config, tensors, named)
        heads = _shaped(config, tensors, truncated, named)
        fill(heads, tensors, named, file_name)
    return heads


def _by_vllm_names(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Callable[[str], str]]:
    """The tensors by vLLM's names, and the function that gives the file's name for one of these."""
    outputs = [found for name in tensors if (found := re.fullmatch(r"\d+\.(\d+)\.weight", name))]
    layers = max((int(found[1]) for found in outputs), default=0)
    to_block, to_output = r"^(\d+)\.(\d+)\.linear\.", rf"^(\d+)\.{layers}\.weight$"
    named = {}
    for name, tensor in tensors.items():
        name = re.sub(to_block, r"blocks.\1.layers.\2.", name.removeprefix("medusa_heads."))
        named[re.sub(to_output, r"lm_heads.\1.weight", name)] = tensor
    if layers > 1 and not any(".layers.1." in name for name in named):  # one block is repeated, and stored once
        copies = [(name.replace(".layers.0.", f".layers.{i}."), t) for name, t in named.items() for i in range(layers)]
        named = dict(copies)

    def file_name(name: str) -> str:
        if not outputs:
            return name
        block = re.sub(r"^blocks\.(\d+)\.layers\.(\d+)\.", r"\1.\2.linear.", name)
        return re.sub(r"^lm_heads\.(\d+)\.", rf"\1.{layers}.", block)

    return named, file_name


def _truncated(config: Mapping[str, Any], tensors: dict[str, Tensor], named: str) -> tuple[dict[str, Tensor], int]:
    """The tensors with matrices of the kept tokens alone and of as many heads as have one, and the number of these
    tokens. Raises ConfigError."""
    if config.get("original_lm_head"):  # one matrix for all
        tensors = {name: t for name, t in tensors.items() if not OUTPUT.fullmatch(name) or name == "lm_heads.0.weight"}
    matrices = {name: t for name, t in tensors.items() if OUTPUT.fullmatch(name)}
    rows = next((len(matrix) for matrix in matrices.values()), None)
    vocabulary = whole_number(config, "vocab_size", named, default=rows)
    kept, token_map = whole_number(config, "truncated_vocab_size", named, default=vocabulary), tensors.get("token_map")
    if kept >= vocabulary:
        return {name: tensor for name, tensor in tensors.items() if name != "token_map"}, vocabulary
    if token_map is None:
        return tensors, kept
    if not token_map.is_meta:
        whole = not token_map.is_floating_point() and token_map.dim() == 1
        if (
            not whole
            or token_map.unique().numel() < len(token_map)
            or not 0 <= token_map.min() <= token_map.max() < vocabulary
        ):
            raise ConfigError(f"{named} has a token_map that is no list of different tokens below {vocabulary}")
    cut = {name: t[token_map.long()] for name, t in matrices.items() if len(t) > len(token_map)}
    return {**tensors, **cut, "token_map": token_map.long()}, kept


def _shaped(config: Mapping[str, Any], tensors: Mapping[str, Tensor], rows: int, named: str) -> PublishedHeads:
    """Heads on "meta", whose number and layers are those of the tensors. Raises ConfigError."""
    blocks = [found for name in tensors if (found := BLOCK.fullmatch(name))]
    outputs = [int(found[1]) for name in tensors if (found := OUTPUT.fullmatch(name))]
    if not blocks and not outputs:
        raise ConfigError(f"{named} holds no Medusa heads: its tensors are {few(tensors)}")
    count = 1 + max([*outputs, *(int(found[1]) for found in blocks)])
    layers = 1 + max((int(found[2]) for found in blocks), default=-1)
    if max(count, layers) > MOST:
        raise ConfigError(f"{named} names {count} heads of {layers} layers: at most {MOST} can be read")
    for name in ("medusa_num_heads", "num_heads"):  # published configurations state fewer than there are
        if whole_number(config, name, named, default=1) > count:
            raise ConfigError(f"{named} has tensors of {count} heads, but {name}={config[name]} in its config.json")
    for name in ("medusa_num_layers", "num_hidden_layers"):
        if whole_number(config, name, named, 0, layers) != layers:
            raise ConfigError(f"{named} has heads of {layers} layers, but {name}={config[name]} in its config.json")
    first = next(tensor for name, tensor in tensors.items() if name.endswith("weight"))
    hidden = whole_number(config, "hidden_size", named, default=first.shape[-1])
    assumed = [[0.6 ** (head + 1) * 0.4**rank for rank in range(RANKS)] for head in range(count)]
    own = HeadsConfig(hidden, count, accuracy=config.get("accuracy") or assumed)
    own.check()
    own.accuracy = [row[:rows] for row in own.accuracy]
    matrices = min(len(outputs), 1) if config.get("original_lm_head") else count
    vocabulary = whole_number(config, "vocab_size", named, default=rows)
    heads = PublishedHeads(own, layers, any(found[3] == "bias" for found in blocks), matrices, rows, vocabulary)
    scale = config.get("logit_scale", 1.0)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < LARGEST:
        raise ConfigError(f"{named} has logit_scale={scale} in its config.json: it must be a number above 0")
    heads.scale = float(scale)
    return heads
