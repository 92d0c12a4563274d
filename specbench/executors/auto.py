"""The default executor: on a CPU each linear layer uses the product that is fastest on this machine.

At the few tokens of a decoding step a linear layer is as fast as its weight can be read, and which product reads it
fastest depends on the processor, the shape and the number of rows. Nothing is compiled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specbench.component import Choices
from specbench.decoding.executor import Executor, Module, Stored
from specbench.devices import device_name
from specbench.executors.choose import LIMITS, ROWS, Table, choice, measure, offered, shape_of
from specbench.executors.layers import Choice, Multiplier, groups_of, replace, stacked
from specbench.executors.products import KINDS, Plain, Product
from specbench.executors.quantized_products import QUANTIZED
from specbench.identity import of_libraries
from specbench.memory import free_bytes
from specbench.paths import cache_dir
from specbench.settings import BaseSettings, setting

NAMES = {kind.name: kind for kind in (*QUANTIZED, *KINDS)}
SPARE = 8  # a second copy of a weight is kept if all weights fit this many times into the free memory


class AutoExecutor(Executor):
    """Eager mode, with the fastest exact product for each linear layer on a CPU; elsewhere plain eager mode."""

    changes_modules = True

    @dataclass
    class Settings(BaseSettings):
        products: list[str] = setting(choices=tuple(NAMES))
        choices: str | None = setting()

    def __init__(self, products: Sequence[str] = tuple(NAMES), table: Table | None = None):
        """Tries these kinds of product; `table` holds what was measured."""
        self.kinds = [NAMES[name] for name in products]
        self.table = table or Table(None, "")
        self.chosen: dict[str, list[str]] = {}  # by shape, the kind for each of LIMITS

    @classmethod
    def from_settings(cls, settings: Any, device: torch.device, run: Choices) -> "AutoExecutor":
        """Raises ConfigError if `choices` holds none."""
        return cls(settings.products, stored_table(settings.choices, device))

    def load(self, module: Module, exact: bool = True) -> Module:
        """Replaces every linear layer of a module on a CPU. A weight that is also the embedding stays besides."""
        if next(module.parameters()).device.type != "cpu":
            return module
        groups = list(groups_of(module))
        self._measure([stacked(parent, names) for parent, names in groups], exact)
        copies = exact and free_bytes(torch.device("cpu")) > SPARE * sum(p.nbytes for p in module.parameters())
        for parent, names in groups:  # one after the other, so that no more than one exists twice meanwhile
            replace(parent, names, self._multiplier(*stacked(parent, names), copies, exact))
        return module

    def _measure(self, weights: Sequence[tuple[Tensor, Tensor | None]], exact: bool) -> None:
        """Times the kinds of product on shapes for which the table lacks one of them."""
        missing = [(w, bias) for w, bias in weights if self._offered(w, exact).keys() - self.table.of(w).keys()]
        if len(self.kinds) > 1 and missing and not self.table.pinned:
            self.table.add(measure(missing, self.kinds, exact))

    def _offered(self, weight: Tensor, exact: bool) -> dict[str, type[Product]]:
        """The kinds of product that multiply by this weight [out, in], by name."""
        return {kind.name: kind for kind in offered(weight, self.kinds, exact)} or {Plain.name: Plain}

    def _multiplier(self, weight: Tensor, bias: Tensor | None, copies: bool, exact: bool) -> Multiplier:
        """The products chosen for a weight [out, in] and bias [out]."""
        shape = shape_of(weight)
        kinds = self._offered(weight, exact)
        chosen = choice(self.table.of(weight), list(kinds), copies)
        self.chosen[shape] = chosen
        products: dict[str, Product] = {name: kinds[name](weight, bias) for name in dict.fromkeys(chosen)}
        rows = [Choice(most, products[name]) for most, name in zip(LIMITS, chosen, strict=True)]
        return Multiplier(rows, *weight.shape)

    def stored(self, module: nn.Module) -> Stored:
        found = super().stored(module)
        layers = [layer for layer in module.modules() if isinstance(layer, Multiplier)]
        return Stored(
            found.numbers + sum(layer.numbers for layer in layers),
            found.read + sum(layer.choices[0].product.bytes for layer in layers),
            found.held + sum(product.bytes for layer in layers for product in layer.products),
        )

    def doubles(self, weights: int, tied: int, device: torch.device, dtype: torch.dtype) -> int:
        return tied if device.type == "cpu" else 0

    def facts(self) -> dict[str, Any]:
        times = {shape: self.table.shapes[shape] for shape in self.chosen if shape in self.table.shapes}
        return {"machine": self.table.machine, "rows": list(ROWS), "microseconds": times, "chosen": self.chosen}


def stored_table(choices: str | None, device: torch.device) -> Table:
    """What was measured on this machine, or the file that the setting names. Raises ConfigError."""
    machine = f"{device_name(device)}, {torch.get_num_threads()} threads, torch {of_libraries()['torch']}"
    if choices is not None:
        return Table(Path(choices).expanduser(), machine, pinned=True)
    return Table(cache_dir() / "products.json", machine)
