"""Memory: what models of given shapes take, compared with what is free, and what the process has in use."""

import gc
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specbench.errors import ConfigError
from specbench.executors.machine import free_bytes
from specbench.models.sizes import ModelSize

LOGIT_COPIES = 4  # float32 or wider: logits, probabilities, their differences, the exponential race
LAW_COPIES = 12  # float64: p, q and what betas along a text are computed from
GRAPH_COPIES = 2  # of what scoring takes: the pool of CUDA graphs, and the graphs' inputs and results outside of it


@dataclass(frozen=True)
class Budget:
    """Bytes that a run needs, by purpose, and bytes that are free."""

    weights: int
    kv: int
    activations: int
    graphs: int  # what CUDA graphs keep, and calls before a capture take
    free: int
    rows: int
    columns: int
    device: torch.device
    processes: int = 1  # that share the target, or the machine's memory: all of this is one process's

    @staticmethod
    def of(
        models: Sequence[ModelSize],
        *,
        rows: int,
        columns: int,
        held: int,
        tokens: int,
        prefill_chunk: int,
        read_again: int,
        dtype: torch.dtype,
        device: torch.device,
        doubled: int = 0,
        laws: int = 0,
        inputs: int = 0,
        graphs: bool = False,
        processes: int = 1,
    ) -> "Budget":
        """`held` cache columns in all rows together, forwards of `tokens` tokens per row, betas along texts computed of
        `read_again` tokens at a time; all weights and `doubled` bytes of them once more, `laws` bytes of kept
        probabilities, encoder's inputs of at most `inputs` tokens; `graphs` if calls are captured."""
        chunk = min(prefill_chunk, rows * columns)
        reading = max(chunk * (m.widest * dtype.itemsize + columns) for m in models)
        encoding = max(inputs * (m.widest + m.heads * inputs) * dtype.itemsize for m in models)
        largest = max(m.vocab_size for m in models)
        scoring, again = LOGIT_COPIES * rows * tokens * largest * 4, LAW_COPIES * read_again * largest * 8
        stand_in = held * max(m.column // m.layers for m in models)
        return Budget(
            weights=sum(m.weights for m in models) + doubled,
            kv=held * sum(m.column for m in models) + rows * inputs * sum(m.crossing for m in models),
            activations=max(reading, encoding, scoring, again) + laws,
            graphs=GRAPH_COPIES * scoring + stand_in if graphs else 0,
            free=free_bytes(device) // (processes if device.type == "cpu" else 1),
            processes=processes,
            rows=rows,
            columns=columns,
            device=device,
        )

    def __str__(self) -> str:
        graphs = f", graphs about {size(self.graphs)}" if self.graphs else ""
        whose = f" of each of {self.processes} processes" if self.processes > 1 else ""
        return (
            f"memory{whose}: weights {size(self.weights)}, keys and values {size(self.kv)} "
            f"({self.rows} rows of {self.columns:,} tokens), activations about {size(self.activations)}{graphs}; "
            f"{size(self.free)} free on {self.device}"
        )

    @property
    def needed(self) -> int:
        """Bytes in all."""
        return self.weights + self.kv + self.activations + self.graphs

    def check(self) -> None:
        """Raises ConfigError if the run does not fit."""
        if self.needed > self.free:
            change = "a smaller batch_size or max_new_tokens, or fewer cache.blocks with cache=paged"
            if self.weights >= self.free:
                change = (
                    "a smaller model, dtype=bfloat16, verdict_tokens=0, which loads no second models, another device"
                )
            raise ConfigError(f"the run needs {size(self.needed)} but does not have it ({self}): use {change}")


def reset_peak(device: torch.device) -> None:
    """Forgets the largest memory in use so far, so that `torch.cuda.max_memory_allocated` is of what follows."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """The most bytes of this process that were in use, on CUDA of the device's allocator."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def give_back() -> None:
    """Frees the models and graphs of an earlier job, which refer to each other, and returns what PyTorch keeps of the
    GPU's memory, which `free_bytes` does not count as free."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def size(count: int) -> str:
    """Bytes as text: 1500000000 is "1.5 GB"."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.3g} TB"
