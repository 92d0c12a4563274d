"""The most memory that a run needs, from the sizes of its models, before they are loaded."""

from collections.abc import Sequence

import torch
from rich.filesize import decimal

from specbench.config.check import Checked
from specbench.errors import ConfigError
from specbench.executors.machine import free_bytes
from specbench.models.context import Context
from specbench.models.sizes import ModelSize

LOGIT_COPIES = 4  # float32: logits, probabilities, their differences, the exponential race
MOST_START_TOKENS = 2  # of an encoder-decoder's text: the start, and a token that is forced after it


def memory_needed(
    checked: Checked, context: Context, models: Sequence[ModelSize], longest: int, spare: int, loaded: bool
) -> str:
    """One sentence with the memory that the run will need. `models` are the target's size and the drafter's; `longest`
    is the most tokens of a prompt, `spare` the cache columns of a round beyond a row's limit; with `loaded` the
    target's weights are there. Raises ConfigError if less is free."""
    root, choices, target = checked.root, checked.choices, models[0]
    rows, inputs = root.batch_size, longest if target.crossing else 0
    columns = min((MOST_START_TOKENS if inputs else longest) + root.max_new_tokens, target.context) + spare
    slots = choices["cache"].kind.columns_in_all(choices["cache"].settings, rows, context.executor.columns(columns))
    kv = slots * sum(model.column for model in models) + rows * inputs * sum(model.crossing for model in models)
    weights = weight_bytes(checked, context, models[loaded:])
    activations = activation_bytes(checked, context, models, inputs, columns)
    devices = [context.device]
    if choices["target"].settings.divided():
        devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    free = sum(map(free_bytes, devices))
    sentence = (
        f"memory: weights {decimal(weights)}, keys and values {decimal(kv)} ({rows} rows of {columns:,} tokens), "
        f"activations about {decimal(activations)}; {decimal(free)} free on {context.device}"
    )
    needed = weights + kv + activations
    if needed > free:
        change = "a smaller batch_size or max_new_tokens, or fewer cache.blocks with cache=paged"
        if weights >= free:
            change = "a smaller model, dtype=bfloat16 or another device"
        raise ConfigError(f"the run needs {decimal(needed)} but does not have it ({sentence}): use {change}")
    return sentence


def weight_bytes(checked: Checked, context: Context, models: Sequence[ModelSize]) -> int:
    """Bytes of the weights of models that are not loaded yet, and of the drafter's own."""
    weights: int = sum(model.weights for model in models)
    weights += checked.choices["drafter"].settings.own_bytes()
    if context.device.type == "cpu" and context.dtype == torch.float32:  # linear layers' in 16 bits, beside their own
        weights += sum(model.weights // 2 for model in models if model.halves)
    return weights


def activation_bytes(checked: Checked, context: Context, models: Sequence[ModelSize], inputs: int, columns: int) -> int:
    """Bytes of the largest of reading prompts, encoding `inputs` tokens and scoring a draft."""
    root, drafter, decoding = checked.root, checked.choices["drafter"], checked.choices["decoding"]
    nodes = drafter.kind.nodes(drafter.settings, context.gamma)
    tokens = decoding.kind.target_tokens(decoding.settings, nodes, context.gamma)
    chunk = min(root.prefill_chunk, root.batch_size * columns)
    reading = max(chunk * (model.widest * context.dtype.itemsize + columns) for model in models)
    encoding = max(inputs * (model.widest + model.heads * inputs) * context.dtype.itemsize for model in models)
    scoring = LOGIT_COPIES * root.batch_size * tokens * max(model.vocab_size for model in models) * 4
    graphs: int = 2 * scoring if context.executor.captures_graphs else 0
    return int(max(reading, encoding, scoring)) + graphs
