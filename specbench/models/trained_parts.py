"""Parts that are trained for a model: heads on its last hidden states (Medusa, blockwise parallel decoding, early
exits), whose outputs its own output matrix turns into logits, and look-ahead embeddings. K heads, H hidden, V
vocabulary."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from specbench.data.sources import of_checkpoint
from specbench.errors import ConfigError
from specbench.models import checkpoint
from specbench.models.checkpoint import TRAINED, local_path
from specbench.models.checkpoint_checks import refuse_incomplete, refuse_not_finite
from specbench.models.language_model import LanguageModel
from specbench.models.published import numbers_in
from specbench.settings import BaseSettings

_Part = TypeVar("_Part", bound=PreTrainedModel)


class PartSettings(BaseSettings):
    """Settings of which one, `part`, names a folder or a hub id, or null for none."""

    part: ClassVar[str]
    must: ClassVar[str] = TRAINED  # what it must be

    def check(self, prefix: str) -> None:
        super().check(prefix)
        path = getattr(self, self.part)
        if path is not None:
            checkpoint.check_path(f"{prefix}{self.part}", path, must=self.must)

    def own_bytes(self, target: Any, size: Any, itemsize: int) -> tuple[int, int, int]:
        path = getattr(self, self.part)
        return (0 if path is None else numbers_in(path, f"drafter.{self.part}") * itemsize), 0, 0

    def sources(self) -> Mapping[str, str]:
        path = getattr(self, self.part)
        own = {} if path is None else {self.part: of_checkpoint(local_path(path), path, None)}
        return {**super().sources(), **own}


class PartConfig(PretrainedConfig):
    """The configuration of such a part; `hidden_size` is H of the model that it is for."""

    sizes: ClassVar[tuple[str, ...]]  # names of integers >= 1
    optional: ClassVar[tuple[str, ...]] = ()  # of others that may be None

    def check(self) -> None:
        """Raises ValueError if a value is not possible."""
        given = (name for name in self.optional if getattr(self, name) is not None)
        for name in (*self.sizes, *given):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value} in its config.json, which must be an integer >= 1")


class HeadsConfig(PartConfig):
    """`inner` is the width of a bottleneck; None is one square matrix, as in Medusa. `layers` is how many of the
    target's first layers they follow; None is all. `accuracy[k][i]` is how often the i-th best token of head k was the
    target's argmax."""

    model_type = "specbench_heads"
    sizes = ("hidden_size", "heads")
    optional = ("inner", "layers")

    def __init__(
        self, hidden_size: int = 0, heads: int = 1, inner: int | None = None, layers: int | None = None,
        accuracy: list[list[float]] | None = None, **more: Any,
    ):  # fmt: skip
        super().__init__(**more)
        self.hidden_size, self.heads, self.inner, self.layers = hidden_size, heads, inner, layers
        self.accuracy = accuracy or []

    def check(self) -> None:
        super().check()
        rows = self.accuracy
        listed = isinstance(rows, list) and all(isinstance(row, list) and row for row in rows)
        shares = listed and all(isinstance(x, (int, float)) and 0 <= x <= 1 for row in rows for x in row)
        if not shares or len(rows) not in (0, self.heads):
            raise ValueError("accuracy in its config.json must be a list of numbers from 0 to 1 for each head")


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


class LookAheadConfig(PartConfig):
    """`hidden_size` is H of the model that they are for, `count` is K."""

    model_type = "specbench_lookahead"
    sizes = ("hidden_size", "count")

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


def load_part(kind: type[_Part], path: str, key: str, model: LanguageModel) -> _Part:
    """Heads or embeddings trained for a model. Raises ConfigError if broken or for another hidden size."""
    source = checkpoint.source_of(path)
    with checkpoint.reading(key, path, "weights", advice="train it with python -m specbench.train and give its folder"):
        if Path(source).is_dir():
            checkpoint.check_files(Path(source))
            checkpoint.check_weights(Path(source), quantized=False)
        loader: Any = kind
        config = loader.config_class.from_pretrained(source)
        if config.model_type != loader.config_class.model_type:
            raise ValueError(f"its model_type is {config.model_type}, not {loader.config_class.model_type}")
        config.check()
        part, info = loader.from_pretrained(source, config=config, dtype=model.dtype, **checkpoint.WHOLE)
        refuse_incomplete(info, f"{key}={path}")
        loaded: _Part = part.to(model.device).eval()
        refuse_not_finite(loaded, f"{key}={path}", model.dtype)
    embedding: Any = model.module.get_input_embeddings()
    hidden = embedding.weight.shape[1]
    if config.hidden_size != hidden:
        raise ConfigError(f"{key}={path} is for hidden states of {config.hidden_size}, but {model.name} has {hidden}")
    return loaded
