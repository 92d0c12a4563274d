"""The default executor: the fastest exact product for each linear layer, and compiled programs where they are there.

At the few tokens of a decoding step a linear layer is as fast as its weight can be read, and which product reads it
fastest depends on the processor, the shape and the number of rows. Nothing is compiled here: programs that
`executor=compiled` made for the same models and settings are used if all that the run needs are there.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specbench.component import Choices as Run
from specbench.decoding.executor import Executor, HasCache, Module, Stored
from specbench.devices import device_name
from specbench.executors.arguments import Columns
from specbench.executors.buckets import bucket
from specbench.executors.choose import LIMITS, ROWS, Table, choice, measure, offered, shape_of
from specbench.executors.layers import Choices, Multiplier, groups_of, replace, stacked
from specbench.executors.leaf import Leaf
from specbench.executors.products import KINDS, Half, Plain, Product, scale_of
from specbench.executors.programs import Programs
from specbench.executors.quantized_products import QUANTIZED
from specbench.identity import of_libraries
from specbench.memory import free_bytes
from specbench.paths import cache_dir
from specbench.settings import BaseSettings, setting

NAMES = {kind.name: kind for kind in (*QUANTIZED, *KINDS)}
SPARE = 8  # a second copy of a weight is kept if all weights fit this many times into the free memory
STEP = 16  # cache columns: compiled code attends to a multiple of them
SMALL_BYTES = 16e6  # of weights: a model below this stays in the processor's caches


class AutoExecutor(Executor):
    """Eager mode or stored programs, with the fastest exact product for each linear layer on a CPU."""

    changes_modules = True
    compiles = False  # whether programs that are missing are made

    @dataclass
    class Settings(BaseSettings):
        products: list[str] = setting(choices=tuple(NAMES))
        choices: str | None = setting()
        programs: bool = setting(default=True)

    def __init__(
        self,
        products: Sequence[str] = tuple(NAMES),
        table: Table | None = None,
        programs: Programs | None = None,
    ):
        """Tries these kinds of product. `table` holds what was measured, `programs` what was compiled."""
        self.kinds = [NAMES[name] for name in products]
        self.table, self.programs = table or Table(None, ""), programs or Programs(None)
        self.chosen: dict[str, list[str]] = {}  # by shape, the kind for each of LIMITS; "rounded": inputs are, too
        self.leaves: dict[Callable[..., Any], Leaf] = {}
        self.fixed_shapes = self.compiles or self.programs.any  # while it is True, leaves look for programs

    @classmethod
    def from_settings(cls, settings: Any, device: torch.device, run: Run, identity: str) -> "AutoExecutor":
        """Raises ConfigError if `choices` holds none."""
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_dir() / "inductor"))
        keeps = settings.programs and run["cache"].kind.fixed_shapes
        folder = cache_dir() / "programs" / identity if keeps else None
        return cls(settings.products, stored_table(settings.choices, device), Programs(folder))

    # -- Programs -------------------------------------------------------------------------------

    def leaf(self, function: Callable[..., Any], model: HasCache | None = None) -> Callable[..., Any]:
        if not self.fixed_shapes or torch.compiler.is_compiling():  # no programs, or part of a phase
            return function
        if function not in self.leaves:
            self.leaves[function] = Leaf(function, model, self.programs, self.compiles)
        return self.leaves[function]

    def phase(
        self, function: Callable[..., Any], model: HasCache | None = None, usual: bool = True
    ) -> Callable[..., Any]:
        """A phase is one program if the model fits into the processor's caches, where calls and not weights take the
        time."""
        small = model is not None and model.weight_bytes < SMALL_BYTES
        return self.leaf(function, model) if usual and small else function

    def ready(self) -> None:
        """Without one of the programs that warm-up asked for none is used, so that all ways of decoding run alike."""
        if self.missing and not self.compiles:
            self.fixed_shapes, self.leaves = False, {}

    @property
    def missing(self) -> int:
        """Calls for which there was no program."""
        return sum(leaf.missed for leaf in self.leaves.values())

    def columns(self, needed: int, capacity: int | None = None) -> int:
        """With programs a power of two is allocated, so that few shapes occur, and a multiple of STEP is attended to,
        for which one program serves."""
        if not self.fixed_shapes:
            return needed
        return bucket(needed) if capacity is None else Columns(min(capacity, -(-needed // STEP) * STEP))

    # -- Products -------------------------------------------------------------------------------

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
        if len(self.kinds) == 1 or self.table.pinned:
            return
        needed = [(w, bias, self._offered(w * self._scale(w), exact)) for w, bias in weights]
        missing = [(w, bias) for w, bias, kinds in needed if kinds.keys() - self.table.of(w).keys()]
        if missing:
            self.table.add(measure(missing, self.kinds, exact))

    def _scale(self, weight: Tensor) -> float:
        """What a weight is multiplied by before it is stored."""
        return scale_of(weight) if Half in self.kinds else 1.0

    def _offered(self, weight: Tensor, exact: bool) -> dict[str, type[Product]]:
        """The kinds of product that multiply by this scaled weight [out, in], by name."""
        return {kind.name: kind for kind in offered(weight, self.kinds, exact)} or {Plain.name: Plain}

    def _multiplier(self, weight: Tensor, bias: Tensor | None, copies: bool, exact: bool) -> Multiplier:
        """The products chosen for a weight [out, in] and bias [out]."""
        shape, scale = shape_of(weight), self._scale(weight)
        weight = weight * scale
        kinds = self._offered(weight, exact)
        chosen = choice(self.table.of(weight), list(kinds), copies)
        self.chosen[shape if exact else f"{shape}, rounded"] = chosen
        products: dict[str, Product] = {name: kinds[name](weight, bias) for name in dict.fromkeys(chosen)}
        return Multiplier(Choices([products[name] for name in chosen], LIMITS), scale, *weight.shape)

    def stored(self, module: nn.Module) -> Stored:
        found = super().stored(module)
        layers = [layer for layer in module.modules() if isinstance(layer, Multiplier)]
        return Stored(
            found.numbers + sum(layer.numbers for layer in layers),
            found.read + sum(layer.choices.products[0].bytes for layer in layers),
            found.held + sum(product.bytes for layer in layers for product in layer.products),
        )

    def doubles(self, weights: int, tied: int, device: torch.device, dtype: torch.dtype) -> int:
        return tied if device.type == "cpu" else 0

    def facts(self) -> dict[str, Any]:
        shapes = {shape.partition(",")[0] for shape in self.chosen}
        times = {shape: self.table.shapes[shape] for shape in shapes if shape in self.table.shapes}
        programs = {"used": self.fixed_shapes, "found": self.programs.found, "made": self.programs.made}
        return {
            "machine": self.table.machine,
            "rows": list(ROWS),
            "microseconds": times,
            "chosen": self.chosen,
            "programs": programs | {"missed": self.missing},
        }


def stored_table(choices: str | None, device: torch.device) -> Table:
    """What was measured on this machine, or the file that the setting names. Raises ConfigError."""
    machine = f"{device_name(device)}, {torch.get_num_threads()} threads, torch {of_libraries()['torch']}"
    if choices is not None:
        return Table(Path(choices).expanduser(), machine, pinned=True)
    return Table(cache_dir() / "products.json", machine)
