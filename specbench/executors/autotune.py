"""Times products on the real weights of a model, and chooses one for each shape and number of rows.

What was measured is kept in a file of the user's cache, so that later runs on this machine choose alike: the last digit
of alpha depends on it.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from specbench.errors import ConfigError
from specbench.executors.linear_kernels import KINDS, Product, scale_of
from specbench.executors.machine import cache_file, write_cache_file

ROWS = (1, 5, 16, 64)  # rows of x that are timed
DECODING = 2  # the first ROWS are those of decoding, for which one product is chosen: a weight is stored once
EQUAL = 1.1  # a product that takes up to this much longer than the fastest is as fast
PASSES, WARM_UP = 9, 2  # over the sample
CACHE_BYTES = 64e6  # read before each pass: a target step leaves a drafter's weights, and code, in no cache
SECONDS = 0.6  # of timing one kind of product, at most about
SAMPLE_BYTES = 192e6  # of weights that are timed, about

Weights = Sequence[tuple[Tensor, Tensor | None]]  # weight [out, in] and bias [out]
ProductTimes = dict[str, list[float]]  # microseconds of each kind of product at each of ROWS, for one shape


def choice(times: ProductTimes, names: Sequence[str]) -> str:
    """The kind of product for decoding, out of `names`: the first one that is as fast as the fastest."""
    known = [name for name in names if name in times] or list(names[:1])
    if len(known) == 1:
        return known[0]
    best = [min(times[name][place] for name in known) for place in range(DECODING)]
    costs = {name: sum(mine / fastest for mine, fastest in zip(times[name], best, strict=False)) for name in known}
    return next(name for name in known if costs[name] <= EQUAL * min(costs.values()))


def offered(weight: Tensor, kinds: Sequence[type[Product]] = KINDS, exact: bool = True) -> list[type[Product]]:
    """The products that multiply by exactly this weight [out, in], in its dtype or, unless `exact`, in bfloat16."""
    rounded = () if exact else [kind for kind in kinds if kind.rounds_inputs and kind.offers(weight.bfloat16())]
    return [kind for kind in kinds if kind.offers(weight) or kind in rounded]


def shape_of(*weights: Tensor) -> str:
    """The name of the shape and dtype of weights [out, in], one below the other: "1920x640 float32"."""
    dtype = str(weights[0].dtype).removeprefix("torch.")
    return f"{sum(len(weight) for weight in weights)}x{weights[0].shape[1]} {dtype}"


class ProductTable:
    """What was measured on this machine, by shape; a file unless `path` is None."""

    def __init__(self, path: Path | None, machine: str, pinned: bool = False):
        """`pinned` files are only read: the results.json of a run. Raises ConfigError if such a file has no times."""
        self.path, self.machine, self.pinned = path, machine, pinned
        self.shapes = self._stored()

    @classmethod
    def of(cls, choices: str | None, machine: str) -> "ProductTable":
        """What was measured on this machine, or the file that the setting names. Raises ConfigError."""
        path = cache_file("products", machine) if choices is None else Path(choices).expanduser()
        return cls(path, machine, pinned=choices is not None)

    def times(self, weight: Tensor) -> ProductTimes:
        """What was measured for weights of this shape and dtype."""
        return self.shapes.get(shape_of(weight), {})

    def add(self, found: Mapping[str, ProductTimes]) -> None:
        """Adds measurements, and writes the file."""
        stored = self._stored()  # another process may have added to them
        for shape in {**found, **stored}:
            self.shapes[shape] = found.get(shape, {}) | stored.get(shape, {}) | self.shapes.get(shape, {})
        write_cache_file(self.path, {"machine": self.machine, "rows": ROWS, "microseconds": self.shapes})

    def _stored(self) -> dict[str, ProductTimes]:
        """The stored table, or that in a run's results.json; empty if there is none of this machine. Raises ConfigError
        if a pinned one is not of this form."""
        try:
            found = json.loads(self.path.read_text()) if self.path is not None else {}
            found = found.get("executor", found)
            shapes: dict[str, ProductTimes] = found.get("microseconds", {})
            if not all(len(row) == len(ROWS) and min(row) > 0 for times in shapes.values() for row in times.values()):
                raise ValueError("it is of another version")
            if self.pinned and not shapes:
                raise ValueError("it holds no times of products")
            return shapes if self.pinned or found.get("machine") == self.machine else {}
        except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
            if not self.pinned:
                return {}
            wanted = "give the results.json of a run with executor=auto"
            raise ConfigError(f"executor.choices={self.path} cannot be used ({error}): {wanted}") from error


def time_products(weights: Weights, kinds: Sequence[type[Product]], exact: bool = True) -> dict[str, ProductTimes]:
    """Times every kind of product on a model's weights in turn, as a forward would meet them."""
    found: dict[str, ProductTimes] = {}
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
    seconds: dict[str, float] = {}
    end = time.perf_counter() + SECONDS / len(ROWS)
    for number in range(WARM_UP + PASSES):
        other.sum()
        for weight, product in products:
            x, shape = inputs[weight.shape[1], rows], shape_of(weight)
            began = time.perf_counter()
            product(x)
            taken = time.perf_counter() - began
            if number >= WARM_UP:
                seconds[shape] = min(taken, seconds.get(shape, taken))
        if number >= WARM_UP and time.perf_counter() > end:
            break
    return seconds
