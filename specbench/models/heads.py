"""Heads on last hidden states (Medusa, blockwise, early exits), PaSS's embeddings. K heads, H hidden, V vocabulary."""

import re
from dataclasses import field
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from specbench.errors import ConfigError
from specbench.models import checkpoint
from specbench.models.language_model import LanguageModel
from specbench.models.published import fill_module, place, read_config, read_tensors
from specbench.settings import BaseSettings

FILES = ("medusa_lm_head.pt", "medusa_lm_head.safetensors")  # of Medusa heads
OWN_NAMES = r"\d+\.\d+\.(linear\.)?(weight|bias)"  # of their tensors: head, layer
MEDUSA = "medusa_head."  # begins their names in a checkpoint that holds their target too
RANKS = 10  # guesses of a head that may stand in a tree
_Part = TypeVar("_Part", bound=PreTrainedModel)


class PartSettings(BaseSettings):
    """Settings of which one, `part`, names a folder or a hub id, or null for none."""

    part: ClassVar[str] = "path"
    must: ClassVar[str] = checkpoint.TRAINED  # what it must be

    def check(self, prefix: str) -> None:
        super().check(prefix)
        if (path := vars(self)[self.part]) is not None:
            checkpoint.check_path(f"{prefix}{self.part}", path, must=self.must)

    def own_bytes(self) -> int:
        """Bytes of the part's files in a local folder; 0 of a hub id."""
        path = vars(self)[self.part]
        if path is None or not checkpoint.local_path(path).is_dir():
            return 0
        with checkpoint.reading(f"drafter.{self.part}", path, "weights"):
            return checkpoint.bytes_of_files(path, first=FILES)


class HeadsConfig(PretrainedConfig):
    """`inner` is the width of a bottleneck, None one square matrix, as in Medusa. `layers` is how many of the target's
    layers they follow, None all. `accuracy[k][i]`: how often the i-th best token of head k was the target's argmax."""

    model_type = "specbench_heads"

    hidden_size: int = 0
    heads: int = 1
    inner: int | None = None
    layers: int | None = None
    accuracy: list[list[float]] = field(default_factory=list)


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


class LookAheadConfig(PretrainedConfig):
    """`hidden_size` is H of the model that they are for, `count` is K."""

    model_type = "specbench_lookahead"

    hidden_size: int = 0
    count: int = 1


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


class ResidualLayer(nn.Module):
    """x + silu(L x + b) of hidden states x."""

    def __init__(self, hidden: int, bias: bool):
        super().__init__()
        self.linear = nn.Linear(hidden, hidden, bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] to [..., H]."""
        return hidden + nn.functional.silu(self.linear(hidden))


class MedusaHeads(nn.ModuleList):
    """Published heads (Cai et al. 2024), by names of tensors: head k is residual layers k.j and an output matrix."""

    own_outputs = True

    def __init__(self, config: HeadsConfig, layers: int, bias: bool, vocab_size: int):
        hidden = config.hidden_size
        with torch.device("meta"):
            super().__init__(
                nn.Sequential(
                    *(ResidualLayer(hidden, bias) for _ in range(layers)), nn.Linear(hidden, vocab_size, bias=False)
                )
                for _ in range(config.heads)
            )
        self.config, self.vocab_size = config, vocab_size

    def logits(self, hidden: Tensor, steps: int, output: nn.Module) -> Tensor:
        """Logits [B, steps, V] of the first heads on hidden [B, H]; `output`, the target's matrix, is not needed."""
        return torch.stack([head(hidden) for head in list(self)[:steps]], 1)


def read_heads(path: str, key: str) -> MedusaHeads:
    """Medusa heads of others in a folder or hub id, or in a checkpoint that holds their target too. Their number is
    that of their tensors: configurations state others. Raises ConfigError."""
    given = {name.removeprefix(MEDUSA): tensor for name, tensor in read_tensors(path, key, FILES).items()}
    tensors = {name: tensor for name, tensor in given.items() if re.fullmatch(OWN_NAMES, name)}
    if not tensors:
        raise ConfigError(f"{key}={path} holds no Medusa heads: its tensors are {checkpoint.few(given)}")
    numbers, layers = ({int(name.split(".")[part]) for name in tensors} for part in (0, 1))
    vocabulary, hidden = tensors.get(f"0.{max(layers)}.weight", torch.empty(0, 0)).shape
    accuracy = [[0.6 ** (head + 1) * 0.4**rank for rank in range(RANKS)][:vocabulary] for head in numbers]  # a guess
    own = HeadsConfig(hidden_size=hidden, heads=len(numbers), accuracy=accuracy)
    heads = MedusaHeads(own, max(layers), "0.0.linear.bias" in tensors, vocabulary)
    fill_module(heads, tensors, f"{key}={path}, by head and layer,")
    return heads


def load_heads(path: str, key: str, target: LanguageModel) -> Heads | MedusaHeads:
    """Heads of ours, or of others, for a target. Raises ConfigError."""
    if read_config(path, key).get("model_type") == HeadsConfig.model_type:
        return load_part(Heads, path, key, target)
    heads = read_heads(path, key)
    own, sizes = (heads.config.hidden_size, heads.vocab_size), (_hidden_of(target), target.vocab_size)
    if own != sizes:
        raise ConfigError(
            f"{key}={path} is for hidden states of {own[0]} and {own[1]} tokens, but {target.name} has {sizes[0]} and "
            f"{sizes[1]}: give one for this target"
        )
    place(heads, f"{key}={path}", target)
    return target.executor.load(heads)


def _hidden_of(model: LanguageModel) -> int:
    """The width of a model's embeddings."""
    embedding: Any = model.module.get_input_embeddings()
    return int(embedding.weight.shape[1])


def load_part(kind: type[_Part], path: str, key: str, model: LanguageModel) -> _Part:
    """Heads or embeddings trained for a model. Raises ConfigError if broken or for another hidden size."""
    source = checkpoint.source_of(path)
    with checkpoint.reading(key, path, "weights", advice="train it with python -m specbench.train and give its folder"):
        loader: Any = kind
        config = loader.config_class.from_pretrained(source)
        if config.model_type != loader.config_class.model_type:
            raise ValueError(f"its model_type is {config.model_type}, not {loader.config_class.model_type}")
        part, info = loader.from_pretrained(source, config=config, dtype=model.dtype, **checkpoint.WHOLE)
        checkpoint.refuse_incomplete(info, f"{key}={path}")
        loaded: _Part = part.to(model.device).eval()
        checkpoint.refuse_not_finite(loaded, f"{key}={path}", model.dtype)
    if config.hidden_size != (hidden := _hidden_of(model)):
        raise ConfigError(f"{key}={path} is for hidden states of {config.hidden_size}, but {model.name} has {hidden}")
    return loaded
