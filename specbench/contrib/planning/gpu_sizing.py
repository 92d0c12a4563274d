"""How many devices of which size the models of a run need, from their configurations alone, without weights."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from specbench.component import Selections
from specbench.config.memory import Budget, size
from specbench.errors import ConfigError
from specbench.models.architecture import layers_of, size_of
from specbench.models.pretrained import footprint, load_config

SIZES = {24: 23.5, 40: 41.5, 48: 47.5, 80: 83.5, 141: 147}  # GB that devices are sold as, and have free, about
MOST = 64  # devices
PROMPT = 1024  # tokens that a prompt is taken to have
READ_AGAIN = 64  # positions of a text that are read at a time
NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight"}


def devices_needed(run: Selections, gamma: int) -> str:
    """A sentence for every size of device: how many of them, with the drafter whole on each and divided too, and what
    one then needs. Raises ConfigError if a model cannot be divided."""
    dtype = {"float32": torch.float32, "float16": torch.float16}.get(run.scalars["dtype"], torch.bfloat16)
    named = [(role, _shape(model)) for role in ("target", "drafter") for model in run[role].settings.models()]
    models = [footprint(model, role, dtype) for role, model in named]
    sizes = [sizes_of(load_config(model, role).get_text_config()) for role, model in named]
    if models[0].crossing or models[0].recurrent:
        raise ConfigError("the devices of an encoder-decoder, or a model with a recurrent state, are not counted")
    columns = min(PROMPT + int(run.scalars["max_new_tokens"]), models[0].context) + gamma

    def needed(shares: Sequence[int]) -> int:
        """Bytes on each device, if so many of them share the weights of each model."""
        shared = [model.share(count) for model, count in zip(models, shares, strict=True)]
        return Budget.of(
            shared, doubled=0, rows=run.batch_size, columns=columns,
            held=run.batch_size * columns, tokens=gamma + 1, prefill_chunk=int(run.scalars["prefill_chunk"]),
            read_again=READ_AGAIN, dtype=dtype, device=torch.device("cpu"),
        ).needed  # fmt: skip

    weights = " and ".join(size(model.weights) for model in models)
    rows = f"{run.batch_size} row{'s' * (run.batch_size > 1)} of {columns:,} tokens"
    kind = str(dtype).removeprefix("torch.")
    lines = [f"weights of {weights} in {kind}, {rows} (prompts of {PROMPT:,} tokens):"]
    for sold, free in SIZES.items():
        found = [*_fewest(sizes, needed, int(free * 1e9))]
        lines.append(f"{' or '.join(found) or f'more than {MOST}'} of {sold} GB ({free:g} GB free)")
    return "\n".join(lines)


def _shape(settings: Any) -> Any:
    """Settings of a model whose shape is known without a network, if it is in its YAML."""
    return replace(settings, weights="random") if settings.shape else settings


def _fewest(sizes: Sequence[dict[str, int]], needed: Callable[[Sequence[int]], int], room: int) -> Iterator[str]:
    """The fewest devices with so much room: with the drafter whole on each, then, if they are fewer, divided. `sizes`
    are what devices have to share evenly of each model, the target's first."""
    before, drafters = MOST + 1, len(sizes) - 1
    for divided in (False, True) if drafters else (False,):
        shared = sizes if divided else sizes[:1]
        for count in [1, *(n for n in divisors(sizes[0]) if n < before)]:
            if count >= before or any(n % count for model in shared for n in model.values()):
                continue
            each = needed([count] + [count if divided else 1] * drafters)
            if each <= room:
                how = f" with target.tensor_parallel={count}{f' drafter.tensor_parallel={count}' * divided}"
                yield f"{NUMBERS.get(count, str(count))} ({size(each)}{f' each{how}' * (count > 1)})"
                before = count
                break


def sizes_of(text: Any) -> dict[str, int]:
    """The sizes of a text model's configuration that processes must be able to share, by name: the smallest of each of
    its layers'."""
    found: dict[str, int] = {}
    for layer in layers_of(text):
        heads = getattr(layer, "num_attention_heads", None) or 1
        key_heads = getattr(layer, "num_key_value_heads", None) or heads
        inner = size_of(layer, "intermediate_size") or 4 * layer.hidden_size
        named = {"attention heads": heads, "key-value heads": key_heads, "inner values of an MLP": inner}
        for name, of_layer in named.items():
            sizes = of_layer if isinstance(of_layer, list) else [of_layer]
            found[name] = min(int(one) for one in (*sizes, found.get(name, sizes[0])))
    return found


def divisors(sizes: dict[str, int]) -> list[int]:
    """The numbers of processes, from 2 on, by which all of these sizes divide."""
    return [n for n in range(2, min(sizes.values()) + 1) if not any(size % n for size in sizes.values())]
