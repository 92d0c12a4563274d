"""GPU kernels of our own, written in Triton. Import a kernel's module only where `has_triton()`."""

from functools import cache
from importlib.util import find_spec


@cache
def has_triton() -> bool:
    """Whether the package `triton` is installed."""
    return find_spec("triton") is not None
