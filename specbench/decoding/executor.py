"""What the loop needs of an executor, which decides how functions of tensors run."""

from collections.abc import Callable
from typing import Any, Protocol


class Executor(Protocol):
    """How functions of tensors run (`executors/base.py`)."""

    @property
    def fixed_shapes(self) -> bool:
        """Whether drafts are padded to one width, so that few shapes occur."""

    def leaf(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a faster version of a function of tensors."""
