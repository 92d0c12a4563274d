"""Variables of the environment that a command hands to processes of a cluster that was there before it.

A cluster stores them and shows them to all who may look at it, so none holds a token.
"""

import os

OWN = "SPECBENCH_"  # begins the names of specbench's
NAMES = frozenset({
    "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE", "HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE",
    "OMP_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR", "TRANSFORMERS_OFFLINE", "TRITON_CACHE_DIR",
    "WANDB_BASE_URL", "WANDB_DIR", "WANDB_ENTITY", "WANDB_MODE", "WANDB_PROJECT",
})  # fmt: skip


def passed() -> dict[str, str]:
    """Those that are set here."""
    return {name: value for name, value in os.environ.items() if name in NAMES or name.startswith(OWN)}
