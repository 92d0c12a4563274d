"""The most memory that a run needs, from the sizes of its models, before they are loaded."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specbench.config.check import Checked
from specbench.errors import ConfigError
from specbench.executors.machine import free_bytes
from specbench.models.context import Context
from specbench.models.sizes import ModelSize

LOGIT_COPIES = 4  # float32: logits, probabilities, their differences, the exponential race
MOST_START_TOKENS = 2  # of an encoder-decoder's text: the start, and a token that is forced after it


@dataclass(frozen=True)
class Budget:
    """Bytes that a run needs, by purpose, and bytes that are free; cache rows and columns."""

    weights: int
    kv: int
    activations: int
    free: int
    rows: int
    columns: int
    device: torch.device

    @property
    def needed(self) -> int:
        """Bytes in all."""
        return self.weights + self.kv + self.activations

    def __str__(self) -> str:
        return (
            f"memory: weights {size(self.weights)}, keys and values {size(self.kv)} ({self.rows} rows of "
            f"{self.columns:,} tokens), activations about {size(self.activations)}; {size(self.free)} free on "
            f"{self.device}"
        )

    def check(self) -> None:
        """Raises ConfigError if the run does not fit."""
        if self.needed > self.free:
            change = "a smaller batch_size or max_new_tokens, or fewer cache.blocks with cache=paged"
            if self.weights >= self.free:
                change = "a smaller model, dtype=bfloat16 or another device"
            raise ConfigError(f"the run needs {size(self.needed)} but does not have it ({self}): use {change}")


def memory_budget(
    checked: Checked, context: Context, models: Sequence[ModelSize], longest: int, spare: int, loaded: bool
) -> Budget:
    """What the run will need. `models` are the target's size and the drafter's; `longest` is the most tokens of a
    prompt, `spare` the cache columns of a round beyond a row's limit; with `loaded` the target's weights are there."""
    root, choices, target = checked.root, checked.choices, models[0]
    drafter, decoding, rows = choices["drafter"], choices["decoding"], root.batch_size
    inputs = longest if target.crossing else 0
    columns = min((MOST_START_TOKENS if inputs else longest) + root.max_new_tokens, target.context) + spare
    slots = choices["cache"].kind.columns_in_all(choices["cache"].settings, rows, context.executor.columns(columns))
    weights = sum(model.weights for model in models[loaded:]) + drafter.settings.own_bytes()
    if context.device.type == "cpu" and context.dtype == torch.float32:  # linear layers' in 16 bits, beside their own
        weights += sum(model.weights // 2 for model in models[loaded:] if model.halves)
    nodes = drafter.kind.nodes(drafter.settings, context.gamma)
    tokens = decoding.kind.target_tokens(decoding.settings, nodes, context.gamma)
    chunk = min(root.prefill_chunk, rows * columns)
    reading = max(chunk * (model.widest * context.dtype.itemsize + columns) for model in models)
    encoding = max(inputs * (model.widest + model.heads * inputs) * context.dtype.itemsize for model in models)
    scoring = LOGIT_COPIES * rows * tokens * max(model.vocab_size for model in models) * 4
    graphs = 2 * scoring if context.executor.captures_graphs else 0
    devices = [context.device]
    if choices["target"].settings.divided():
        devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    return Budget(
        weights=weights,
        kv=slots * sum(model.column for model in models) + rows * inputs * sum(model.crossing for model in models),
        activations=max(reading, encoding, scoring) + graphs,
        free=sum(map(free_bytes, devices)),
        rows=rows,
        columns=columns,
        device=context.device,
    )


def size(count: int) -> str:
    """Bytes as text: 1500000000 is "1.5 GB"."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.3g} TB"
