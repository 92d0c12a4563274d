"""Times products on the real weights of a model, and chooses one for each shape and number of rows.

What was measured is kept in a file of the user's cache, so that later runs on this machine choose alike: the last digit
of alpha depends on it.
"""

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specbench.errors import ConfigError
from specbench.executors.linear_kernels import KINDS, Product, scale_of

ROWS = (1, 5, 16, 64)  # rows of x that are timed
LIMITS = (1, 8, 32, math.inf)  # the most rows that each of them stands for
DECODING = 2  # the first ROWS are those of decoding; all the same product, unless another is much faster
EQUAL = 1.1  # a product that takes up to this much longer than the fastest is as fast
PAYS = 0.75  # of the time: a second copy of a weight is kept from here on
PASSES, WARM_UP = 9, 2  # over the sample
CACHE_BYTES = 64e6  # read before each pass: a target step leaves a drafter's weights, and code, in no cache
SECONDS = 0.6  # of timing one kind of product, at most about
SAMPLE_BYTES = 192e6  # of weights that are timed, about

Weights = Sequence[tuple[Tensor, Tensor | None]]  # weight [out, in] and bias [out]


Times = dict[str, list[float]]  # microseconds of each kind of product at each of ROWS, for one shape of a weight


def choice(times: Times, names: Sequence[str], copies: bool = True) -> list[str]:
    """The kind of product for each of LIMITS, out of `names`, of which the first is taken at equal speed; `copies` says
    whether a weight may be stored twice."""
    known = [name for name in names if name in times] or list(names[:1])
    if len(known) == 1:
        return known * len(LIMITS)
    best = [min(times[name][place] for name in known) for place in range(len(ROWS))]
    slowness = {name: [mine / fastest for mine, fastest in zip(times[name], best, strict=True)] for name in known}
    first = _fastest({name: sum(slow[:DECODING]) for name, slow in slowness.items()})
    found = []
    for place in range(len(LIMITS)):
        other = _fastest({name: slow[place] for name, slow in slowness.items()})
        found.append(other if copies and slowness[other][place] < PAYS * slowness[first][place] else first)
    return found


def _fastest(costs: Mapping[str, float]) -> str:
    """The first of the names whose cost is at most EQUAL times the lowest."""
    return next(name for name, cost in costs.items() if cost <= EQUAL * min(costs.values()))


def offered(weight: Tensor, kinds: Sequence[type[Product]] = KINDS, exact: bool = True) -> list[type[Product]]:
    """The products that multiply by exactly this weight [out, in]: in the arithmetic of its dtype or, unless `exact`,
    in that of bfloat16."""
    rounded = () if exact else [kind for kind in kinds if kind.rounds_inputs and kind.offers(weight.bfloat16())]
    return [kind for kind in kinds if kind.offers(weight) or kind in rounded]


def shape_of_layers(parent: nn.Module, names: Sequence[str]) -> str:
    """The name of the shape that the stacked weights of these layers have."""
    weights = [parent.get_submodule(name).get_parameter("weight") for name in names]
    out, inputs = sum(len(weight) for weight in weights), weights[0].shape[1]
    return shape_of(torch.empty(out, inputs, dtype=weights[0].dtype, device="meta"))


def shape_of(weight: Tensor) -> str:
    """The name of a weight's shape and dtype: "1920x640 float32"."""
    return f"{weight.shape[0]}x{weight.shape[1]} {str(weight.dtype).removeprefix('torch.')}"


class Table:
    """What was measured on this machine, by shape; a file unless `path` is None."""

    def __init__(self, path: Path | None, machine: str, pinned: bool = False):
        """`pinned` files are only read. Raises ConfigError if such a file holds no choices."""
        self.path, self.machine, self.pinned = path, machine, pinned
        stored = _read(path, pinned)
        usable = pinned or stored.get("machine") == machine
        self.shapes: dict[str, Times] = stored.get("microseconds", {}) if usable else {}

    def of(self, weight: Tensor) -> Times:
        """What was measured for weights of this shape and dtype."""
        return self.shapes.get(shape_of(weight), {})

    def add(self, found: Mapping[str, Times]) -> None:
        """Adds measurements, and writes the file."""
        if not found:
            return
        stored = _read(self.path, False).get("microseconds", {})  # another process may have added to them
        for shape in {**found, **stored}:
            self.shapes[shape] = found.get(shape, {}) | stored.get(shape, {}) | self.shapes.get(shape, {})
        if self.path is None:
            return
        content = {"machine": self.machine, "rows": ROWS, "microseconds": self.shapes}
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(content, indent=1))
            os.replace(temporary, self.path)
        except OSError:  # a cache that cannot be written costs time only
            self.path = None


def _read(path: Path | None, pinned: bool) -> dict[str, Any]:
    """The stored table, or that in a run's results.json; empty if there is none. Raises ConfigError if a pinned one is
    not of this form."""
    try:
        found = {} if path is None else json.loads(path.read_text())
        found = found.get("executor", found)
        for times in found.get("microseconds", {}).values():
            if not all(len(row) == len(ROWS) and min(row) > 0 for row in times.values()):
                raise ValueError("it is of another version")
        if pinned and not found.get("microseconds"):
            raise ValueError("it holds no times of products")
        return found  # type: ignore[no-any-return]
    except (OSError, ValueError, AttributeError, TypeError) as error:
        if pinned:
            raise ConfigError(
                f"executor.choices={path} cannot be used ({error}): give the results.json of a run with executor=auto"
            ) from error
        return {}


def measure(weights: Weights, kinds: Sequence[type[Product]], exact: bool = True) -> dict[str, Times]:
    """Times every kind of product on a model's weights in turn, as a forward would meet them."""
    found: dict[str, Times] = {}
    other = torch.ones(int(CACHE_BYTES) // 4)
    sample = [(w * scale_of(w), bias) for w, bias in weights]
    inputs = {(w.shape[1], rows): torch.randn(rows, w.shape[1], dtype=w.dtype) for w, _ in sample for rows in ROWS}
    for kind in kinds:
        products = [(w, kind(w, bias)) for w, bias in sample if offered(w, [kind], exact)]
        for rows in ROWS:
            for shape, seconds in _time(products, rows, inputs, other).items():
                times = found.setdefault(shape, {}).setdefault(kind.name, [])
                times.append(round(1e6 * seconds, 1))
    return found


def _time(
    products: Sequence[tuple[Tensor, Product]], rows: int, inputs: Mapping[tuple[int, int], Tensor], other: Tensor
) -> dict[str, float]:
    """Least seconds by shape of products with `rows` rows, one after the other as in a forward; before each pass
    `other` is read, of any shape."""
    seconds: dict[str, list[float]] = {}
    end = time.perf_counter() + SECONDS / len(ROWS)
    for number in range(WARM_UP + PASSES):
        other.sum()
        for weight, product in products:
            x = inputs[weight.shape[1], rows]
            began = time.perf_counter()
            product(x)
            taken = time.perf_counter() - began
            if number >= WARM_UP:
                seconds.setdefault(shape_of(weight), []).append(taken)
        if number >= WARM_UP and time.perf_counter() > end:
            break
    return {shape: min(times) for shape, times in seconds.items()}
