"""The reference executor: everything runs as it is written, one operation after the other."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specbench.context import Context

if TYPE_CHECKING:
    from specbench.memory import Footprint
    from specbench.models.language_model import LanguageModel


class EagerExecutor:
    """Runs PyTorch's eager mode. The others override what they do faster."""

    fixed_shapes = False  # whether drafts are padded to one width, so that few shapes occur

    @dataclass
    class Settings:
        pass

    def __init__(self, settings: Settings, context: Context | None):
        pass

    def load(self, module: nn.Module) -> nn.Module:
        """The module that is run in place of a loaded one."""
        return module

    def leaf(self, function: Callable[..., Any], model: "LanguageModel | None" = None) -> Callable[..., Any]:
        """A faster form of a function of tensors. `model` is the model whose cache it changes."""
        return function

    def phase(
        self, function: Callable[..., Any], model: "LanguageModel | None" = None, usual: bool = True
    ) -> Callable[..., Any]:
        """Likewise for a function that calls leaves; `usual` if its shapes are those of most calls."""
        return function

    def columns(self, needed: int, capacity: int | None = None) -> int:
        """How many cache columns to allocate, or (at most `capacity`) to attend to."""
        return needed

    def lengths(self, columns: int) -> list[int]:
        """Text lengths, up to `columns`, that together meet every shape; empty if all are alike."""
        return []

    def doubles(self, footprint: "Footprint", device: torch.device, dtype: torch.dtype) -> int:
        """Bytes of a model's weights that will exist twice."""
        return 0

    def bytes(self) -> int:
        """Memory that the executor itself holds: packed weights, graph pools."""
        return 0
