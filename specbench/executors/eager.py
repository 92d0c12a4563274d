"""The reference executor: the Hugging Face module is called as it is."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from specbench.context import Context


class EagerExecutor:
    """Runs a forward through PyTorch's eager mode."""

    @dataclass
    class Settings:
        pass

    def __init__(self, settings: Settings, context: Context):
        pass

    def prepare(self, module: nn.Module) -> Callable[..., Tensor]:
        """The function that runs the module's forward; other executors return a faster one."""
        return module
