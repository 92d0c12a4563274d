"""A research harness for speculative decoding. `specbench.evaluate` runs what `python -m specbench` runs.

Importing the package loads nothing else: torch, transformers and Hydra come with the first call.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specbench.executors import waiting

if TYPE_CHECKING:
    from specbench.errors import ConfigError
    from specbench.run.evaluate import Evaluation

__version__ = "0.3.0"
BEGUN = waiting.BEGUN[1]  # this process, or nearly so if it is a command of specbench
# On Linux, tensors in pages of 2 MB: gigabytes of weights load and are read faster. PyTorch looks at its first tensor.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
__all__ = ["ConfigError", "__version__", "evaluate"]


def evaluate(*overrides: str | Mapping[str, Any], **settings: Any) -> "Evaluation":
    """Runs what `python -m specbench OVERRIDES` runs, leaves the same folder, and returns its results.

    `overrides` are texts as on the command line ("drafter=ngram") or mappings of keys to values ({"data.limit": 8});
    keywords are keys without a dot (temperature=0). Raises ConfigError for a mistake, VerdictError with strict=True,
    and KeyboardInterrupt if the run is interrupted."""
    from specbench.run.evaluate import evaluate as run

    return run(*overrides, **settings)


def __getattr__(name: str) -> Any:
    if name == "ConfigError":
        from specbench.errors import ConfigError

        return ConfigError
    raise AttributeError(f"module 'specbench' has no attribute {name!r}")
