"""Heads on a model's last hidden states (Medusa, blockwise parallel decoding, early exits), and look-ahead embeddings
(PaSS). K heads, H hidden, V vocabulary."""

import re
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from specbench.errors import ConfigError
from specbench.models.checkpoint import (
    TRAINED,
    WHOLE,
    check_path,
    few,
    reading,
    refuse_incomplete,
    refuse_not_finite,
    source_of,
)
from specbench.models.language_model import LanguageModel
from specbench.models.published import (
    fill_module,
    load_network,
    numbers_in,
    read_config,
    read_tensors,
)
from specbench.settings import BaseSettings

FILES = ("medusa_lm_head.pt", "medusa_lm_head.safetensors")  # of Medusa heads
RANKS = 10  # guesses of a head that may stand in a tree
_Part = TypeVar("_Part", bound=PreTrainedModel)


class PartSettings(BaseSettings):
    """Settings of which one, `part`, names a folder or a hub id, or null for none."""

    part: ClassVar[str]
    must: ClassVar[str] = TRAINED  # what it must be

    def check(self, prefix: str) -> None:
        super().check(prefix)
        path = getattr(self, self.part)
        if path is not None:
            check_path(f"{prefix}{self.part}", path, must=self.must)

    def own_bytes(self, itemsize: int) -> int:
        path = getattr(self, self.part)
        return 0 if path is None else numbers_in(path, f"drafter.{self.part}") * itemsize


class HeadsConfig(PretrainedConfig):
    """`inner` is the width of a bottleneck; None is one square matrix, as in Medusa. `layers` is how many of the
    target's first layers they follow; None is all. `accuracy[k][i]` is how often the i-th best token of head k was the
    target's argmax."""

    model_type = "specbench_heads"

    def __init__(
        self, hidden_size: int = 0, heads: int = 1, inner: int | None = None, layers: int | None = None,
        accuracy: list[list[float]] | None = None, **more: Any,
    ):  # fmt: skip
        super().__init__(**more)
        self.hidden_size, self.heads, self.inner, self.layers = hidden_size, heads, inner, layers
        self.accuracy = accuracy or []


class Heads(PreTrainedModel):
    """h + silu(U_k h) for each head k (Medusa), or with a bottleneck h + D_k silu(U_k h)."""

    config_class = HeadsConfig
    own_outputs = False  # whether they have output matrices of their own

    def __init__(self, config: HeadsConfig):
        super().__init__(config)
        heads, hidden, inner = config.heads, config.hidden_size, config.inner
        self.up = nn.Parameter(torch.zeros(heads, inner or hidden, hidden))
        self.down = None if inner is None else nn.Parameter(torch.zeros(heads, hidden, inner))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Makes every head begin as the model's own: the residual is zero."""
        if self.down is not None:
            nn.init.normal_(self.up, std=self.config.hidden_size**-0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., H] to [..., K, H], one for each head."""
        change = nn.functional.silu(torch.einsum("...h,kih->...ki", hidden, self.up))
        if self.down is not None:
            change = torch.einsum("...ki,khi->...kh", change, self.down)
        return hidden.unsqueeze(-2) + change

    def logits(self, hidden: Tensor, steps: int, output: nn.Module) -> Tensor:
        """Logits [B, steps, V] of the first heads on hidden [B, H], by the target's output matrix."""
        logits: Tensor = output(self(hidden)[:, :steps])
        return logits


class ExitHead(nn.Module):
    """One head in front of an output matrix: the logits of a model that stops early."""

    def __init__(self, head: Heads, output: nn.Module):
        super().__init__()
        self.head, self.output = head, output

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., H] to logits [..., V]."""
        logits: Tensor = self.output(self.head(hidden).squeeze(-2))
        return logits


class LookAheadConfig(PretrainedConfig):
    """`hidden_size` is H of the model that they are for, `count` is K."""

    model_type = "specbench_lookahead"

    def __init__(self, hidden_size: int = 0, count: int = 1, **more: Any):
        super().__init__(**more)
        self.hidden_size, self.count = hidden_size, count


class LookAhead(PreTrainedModel):
    """K embeddings [K, H] that stand behind a text in place of tokens that are not known yet (PaSS): the logits at the
    k-th predict the token k + 1 positions after the last one."""

    config_class = LookAheadConfig

    def __init__(self, config: LookAheadConfig):
        super().__init__(config)
        self.embeddings = nn.Parameter(torch.zeros(config.count, config.hidden_size))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        nn.init.normal_(self.embeddings, std=0.02)


class MedusaHeads(nn.Module):
    """Heads as others publish them (Cai et al. 2024): logits W_k x_L of each head k, where x_0 is the hidden state and
    x_{j+1} = x_j + silu(L_kj x_j + b_kj). Where there is one W, all heads share it. With a `token_map` [rows], row i of
    a W is for token token_map[i]."""

    own_outputs = True
    token_map: Tensor | None

    def __init__(self, config: HeadsConfig, layers: int, bias: bool, outputs: int, rows: int, vocab_size: int):
        super().__init__()
        self.config, self.hidden_size, self.vocab_size = config, config.hidden_size, vocab_size
        self.scale, hidden = 1.0, config.hidden_size
        with torch.device("meta"):
            blocks = [[nn.Linear(hidden, hidden, bias) for _ in range(layers)] for _ in range(config.heads)]
            self.blocks = nn.ModuleList(nn.ModuleList(block) for block in blocks)
            self.outputs = nn.ModuleList(nn.Linear(hidden, rows, bias=False) for _ in range(outputs))
            self.register_buffer("token_map", torch.zeros(rows) if rows < vocab_size else None)

    def logits(self, hidden: Tensor, steps: int, output: nn.Module) -> Tensor:
        """Logits [B, steps, V] of the first heads on hidden [B, H]; -inf for tokens that are not in `token_map`."""
        found = []
        for number, block in enumerate(list(self.blocks)[:steps]):
            x = hidden
            for layer in block.children():
                x = x + nn.functional.silu(layer(x))
            found.append(self.outputs[min(number, len(self.outputs) - 1)](x))
        logits = torch.stack(found, 1) * self.scale
        if self.token_map is None:
            return logits
        whole = logits.new_full((*logits.shape[:2], self.vocab_size), -torch.inf)
        return whole.index_copy(2, self.token_map, logits)


def _name_of(name: str) -> str:
    """The name in `MedusaHeads` of a tensor of FasterDecoding's (k.j.linear.weight of layers, k.LAYERS.weight of W_k)
    or of vLLM's."""
    name = name.removeprefix("medusa_head.").removeprefix("medusa_heads.")
    for pattern, own in (
        (r"(\d+)\.(\d+)\.linear\.(weight|bias)", r"blocks.\1.\2.\3"),
        (r"(\d+)\.\d+\.weight", r"outputs.\1.weight"),
        (r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", r"blocks.\1.\2.\3"),
        (r"lm_heads\.(\d+)\.weight", r"outputs.\1.weight"),
    ):
        if re.fullmatch(pattern, name):
            return re.sub(pattern, own, name)
    return name


def read_heads(path: str, key: str) -> MedusaHeads:
    """Heads of others in a folder or hub id. Their number is that of their tensors: configurations state others.
    Raises ConfigError."""
    settings, given = read_config(path, key), read_tensors(path, key, FILES)
    named = {_name_of(name): tensor for name, tensor in given.items()}
    tensors = {name: tensor for name, tensor in named.items() if name.startswith(("blocks.", "outputs."))}
    outputs = [name for name in tensors if name.startswith("outputs.")]
    if not outputs:
        raise ConfigError(f"{key}={path} holds no Medusa heads: its tensors are {few(given)}")
    if settings.get("original_lm_head"):  # one for all
        outputs, tensors = outputs[:1], {n: t for n, t in tensors.items() if n not in outputs[1:]}
    vocabulary, hidden = tensors[outputs[0]].shape
    vocabulary, kept = settings.get("vocab_size", vocabulary), given.get("token_map")
    if kept is not None and len(kept) < vocabulary:
        tensors |= {name: tensors[name][kept.long()] for name in outputs if len(tensors[name]) > len(kept)}
        tensors["token_map"] = kept.long()
    rows, numbers = len(tensors[outputs[0]]), {int(name.split(".")[1]) for name in tensors if name[0] in "bo"}
    layers = sum(name.startswith("blocks.0.") and name.endswith("weight") for name in tensors)
    accuracy = [[0.6 ** (head + 1) * 0.4**rank for rank in range(RANKS)][:rows] for head in numbers]  # a guess
    config = HeadsConfig(hidden, len(numbers), accuracy=settings.get("accuracy") or accuracy)
    heads = MedusaHeads(config, layers, any(name.endswith("bias") for name in tensors), len(outputs), rows, vocabulary)
    fill_module(heads, tensors, f"{key}={path}, by layer and head,")
    heads.scale = settings.get("logit_scale", 1.0)
    return heads


def load_heads(path: str, key: str, target: LanguageModel) -> Heads | MedusaHeads:
    """Heads of ours, or of others, for a target. Raises ConfigError."""
    found: Heads | MedusaHeads
    if read_config(path, key).get("model_type") == HeadsConfig.model_type:
        found = load_part(Heads, path, key, target)
    else:
        found = load_network(read_heads, path, key, target)
    return found


def load_part(kind: type[_Part], path: str, key: str, model: LanguageModel) -> _Part:
    """Heads or embeddings trained for a model. Raises ConfigError if broken or for another hidden size."""
    source = source_of(path)
    with reading(key, path, "weights", advice="train it with python -m specbench.train and give its folder"):
        loader: Any = kind
        config = loader.config_class.from_pretrained(source)
        if config.model_type != loader.config_class.model_type:
            raise ValueError(f"its model_type is {config.model_type}, not {loader.config_class.model_type}")
        part, info = loader.from_pretrained(source, config=config, dtype=model.dtype, **WHOLE)
        refuse_incomplete(info, f"{key}={path}")
        loaded: _Part = part.to(model.device).eval()
        refuse_not_finite(loaded, f"{key}={path}", model.dtype)
    embedding: Any = model.module.get_input_embeddings()
    hidden = embedding.weight.shape[1]
    if config.hidden_size != hidden:
        raise ConfigError(f"{key}={path} is for hidden states of {config.hidden_size}, but {model.name} has {hidden}")
    return loaded
