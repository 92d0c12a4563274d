"""The default executor: on a CPU the fastest exact product for each linear layer, and compiled programs where they pay;
on CUDA graphs.

Which product reads a weight fastest depends on the processor, the shape and the number of rows. Programs of an earlier
run are used if all that are needed are there, and made where that takes less time than it saves of the run.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from specbench.component import Selections
from specbench.decoding.component import CodeIdentity
from specbench.decoding.executor import Executor, HasCache, Module, Stored
from specbench.executors import autotune
from specbench.executors.autotune import ROWS, ProductTable, choice, offered, shape_of
from specbench.executors.compile_cache import Programs, decide
from specbench.executors.compiled_function import Leaf
from specbench.executors.cudagraph import CudaGraphExecutor
from specbench.executors.eager import EagerExecutor
from specbench.executors.layer_programs import SECONDS, LayerPrograms
from specbench.executors.linear_kernels import KINDS, QUANTIZED, HalfWeight, Plain, Product, scale_of
from specbench.executors.machine import machine_name
from specbench.executors.packed_linear import (
    LinearGroup,
    PackedEmbedding,
    PackedLinear,
    linear_groups,
    linear_layers,
    pack_embedding,
    packed,
    replace,
    stacked,
    with_packed,
)
from specbench.executors.pytree import Columns, bucket, refuse_growing_cache
from specbench.kernels import ops
from specbench.settings import BaseSettings, file_hash

log = logging.getLogger(__name__)
NAMES = {kind.name: kind for kind in (*QUANTIZED, *KINDS)}
STEP = 16  # cache columns: compiled code attends to a multiple of them
CAPACITY = 256  # cache columns are allocated in multiples of it, where layers may run as programs
SMALL_BYTES = 16e6  # of weights: a model below this stays in the processor's caches


class AutoExecutor(Executor):
    """Eager mode or compiled programs, with the fastest exact product for each linear layer on a CPU."""

    changes_modules = True
    runs_divided = True
    falls_back = True

    class Settings(BaseSettings):
        products: list[str]
        choices: str | None
        programs: bool = True
        compile: Literal["auto", "true", "false"] = "auto"

        def sources(self) -> Mapping[str, str]:
            return {} if self.choices is None else {"choices": file_hash(Path(self.choices).expanduser())}

    def __init__(
        self,
        products: Sequence[str] = tuple(NAMES),
        table: ProductTable | None = None,
        programs: Programs | None = None,
        compile: str = "false",
        layers: bool = True,
    ):
        """Tries these kinds of product. `table` holds what was measured, `programs` what was compiled. `compile` says
        whether missing programs are made: "true", "false", or "auto", where that pays within the run. `layers`
        says whether those of single layers can serve the run."""
        self.kinds = [NAMES[name] for name in products]
        self.table, self.programs = table or ProductTable(None, ""), programs or Programs(None)
        self.chosen: dict[str, list[str]] = {}  # by shape, the kind, alone in a list; "rounded": inputs are, too
        self.leaves: dict[Callable[..., Any], Leaf] = {}
        self.compiles = type(self).compiles or compile == "true"
        self.falls_back = not self.compiles
        self.may_compile = compile == "auto" and self.programs.folder is not None
        self.layers, self.serves = LayerPrograms(self.programs), layers
        self.starts_layers = self.compiles and layers and not type(self).compiles
        self.attaches = self.starts_layers or (self.programs.folder is not None and not self.compiles)
        self.decided, self.incomplete = False, 0  # calls of the first warm-up that had no program
        self.decision: str | None = None
        self.asked = False  # for programs of layers
        self.left_out: str | None = None  # why programs that were there are not used
        self.fixed_shapes = self.compiles or self.programs.any  # while it is True, leaves look for programs

    @classmethod
    def from_settings(cls, settings: Any, device: torch.device, run: Selections, identity: CodeIdentity) -> Executor:
        """A target whose weights are divided runs eagerly. On CUDA, `executor=auto` is CUDA graphs if the cache has
        fixed shapes. Raises ConfigError if `choices` holds none."""
        if run["target"].settings.divided():
            return EagerExecutor()
        fixed = run["cache"].kind.fixed_shapes and run["decoding"].kind.samples
        if device.type == "cuda" and fixed and cls is AutoExecutor and set(settings.products) == {*NAMES}:
            compiles = settings.compile == "true"
            programs = Programs.stored(identity) if settings.programs else Programs(None) if compiles else None
            return CudaGraphExecutor(programs, compiles, falls_back=not compiles)
        keeps = settings.programs and run["cache"].kind.fixed_shapes
        machine = machine_name(device)
        programs = Programs.stored(identity, machine) if keeps else Programs(None)
        known = device.type == "cpu"  # what programs save
        makes = settings.compile if known or settings.compile != "auto" else "false"
        layers = run.batch_size == 1 and run["cache"].kind.in_place
        return cls(settings.products, ProductTable.of(settings.choices, machine), programs, makes, layers)

    @classmethod
    def refuses(cls, settings: Any, run: Selections) -> str | None:
        if (divided := run["target"].settings.divided()) and set(settings.products) != {*NAMES}:
            return f"with target.{divided}, whose layers are transformers' own: choose executor=auto or eager"
        if settings.compile != "true":
            return None
        why = refuse_growing_cache(run)
        if not run["decoding"].kind.samples:
            why = f"with decoding={run['decoding'].name}: use executor.compile=auto or false"
        return why and f"with executor.compile=true and {why.removeprefix('with ')}"

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
        """A phase is one program if the model fits into the processor's caches: there calls take the time."""
        small = model is not None and model.weight_bytes < SMALL_BYTES
        return self.leaf(function, model) if usual and small else function

    def ready(self) -> bool:
        """Decides after the first warm-up: without one of the programs that it asked for none is used, so that all ways
        of decoding run alike."""
        self.layers.settle()
        if not self.decided and not self.compiles:
            self.decided = True
            if self.missing:
                self.fixed_shapes, self.incomplete, self.leaves = False, self.missing, {}
        return False

    def compile_seconds(self, weights: int, others: Sequence[Executor] = ()) -> float | None:
        """Of several ways only layers are compiled, which are those of all that share the target."""
        open_question = self.may_compile and self.decided and not self.fixed_shapes and not self.layers.running
        shared = all(isinstance(e, AutoExecutor) and e.may_compile and e.layers is self.layers for e in others)
        possible = not others or (shared and self.layers.missed)
        return self._seconds_to_make(weights) if open_question and possible else None

    def _seconds_to_make(self, weights: int) -> float:
        """About how long making programs takes: those of layers, if the module has such, else those of whole models."""
        return SECONDS if self.layers.missed else weights * self.programs.seconds_per_weight

    def decide(self, seconds: float, least: float, weights: int, ways: int = 1) -> bool:
        self.may_compile = False
        pays, self.decision = decide(seconds, least, self._seconds_to_make(weights))
        log.info("executor.compile=auto: %s", self.decision)
        if pays and self.layers.missed:
            self.layers.start(ways)
        elif pays:
            self.compiles = self.fixed_shapes = True
            self.incomplete, self.leaves, self.programs.found = 0, {}, 0
        return pays

    def without_programs(self, why: str = "") -> None:
        self.programs, self.leaves, self.left_out = Programs(None), {}, why or None
        self.layers.used = self.attaches = self.starts_layers = False
        self.compiles = self.may_compile = self.fixed_shapes = False

    def run_eagerly(self, why: str) -> None:
        self.without_programs()

    def telling(self, tell: Callable[[str], None]) -> None:
        self.programs.tell = tell

    def notes(self) -> list[str]:
        if self.missing and not self.compiles:
            return [f"{self.missing} calls had no compiled program: times mix both, executor=compiled makes them"]
        if self.asked and not self.layers.running:
            return ["executor.compile=true: the layers could not be compiled and run as written, see run.log"]
        return [*self.programs.notes(), *([self.left_out] if self.left_out else [])]

    @property
    def missing(self) -> int:
        """Calls for which there was no program."""
        return sum(leaf.missed for leaf in self.leaves.values())

    def columns(self, needed: int, capacity: int | None = None) -> int:
        """With programs a power of two is allocated, so that few shapes occur, and a multiple of STEP is attended to,
        for which one program serves. Programs of layers serve any number, and are made for what is allocated: a
        multiple of CAPACITY, also before it is known whether the models have such layers."""
        if capacity is not None:
            return Columns(min(capacity, -(-needed // STEP) * STEP)) if self.fixed_shapes else needed
        layers = self.attaches and self.serves and self.layers.attached is not False
        least = -(-needed // CAPACITY) * CAPACITY if layers else needed
        return max(least, bucket(needed)) if self.fixed_shapes else least

    # -- Products -------------------------------------------------------------------------------

    def load(self, module: Module, exact: bool = True) -> Module:
        """Replaces every linear layer of a module on a CPU, and its embedding where that saves memory. On other devices
        layers with the same input share one product."""
        if next(module.parameters()).device.type != "cpu":
            return packed(module)
        groups = list(linear_groups(module))
        choosing = len(self.kinds) > 1 and not self.table.pinned
        if choosing and (sample := self._sample(groups, exact)):
            self.table.add(autotune.time_products(sample, self.kinds, exact))
        for group in groups:  # one after the other, so that no more than one exists twice meanwhile
            replace(group, self._product(*stacked(group), exact))
        pack_embedding(module)
        if self.attaches:
            self.layers.attach(module)
            self._start_layers()
        return module

    def _start_layers(self) -> None:
        """Once the target is there: with `compile` "true", programs of its layers, where they can have such, are made
        instead of those of whole models, in one more warm-up than so far: each of several ways has its own."""
        if self.starts_layers:
            self.starts_layers, self.attaches = False, bool(self.layers.attached)
            if self.attaches:
                self.compiles = self.fixed_shapes = False
                self.asked = True
                self.layers.start(self.layers.warm_ups + 1)

    def loaded(self) -> tuple[dict[str, list[str]], LayerPrograms]:
        return dict(self.chosen), self.layers

    def share(self, loaded: tuple[dict[str, list[str]], LayerPrograms]) -> None:
        chosen, self.layers = loaded
        self.chosen |= chosen
        self._start_layers()

    def _sample(self, groups: Sequence[LinearGroup], exact: bool) -> autotune.Weights:
        """Weights and biases to time, in the order of a forward: up to SAMPLE_BYTES, and one at least of every shape
        for which the table lacks a kind of product that its first weight is offered."""
        found: list[tuple[Tensor, Tensor | None]] = []
        wanted: dict[str, bool] = {}
        for group in groups:
            shape = shape_of(*(layer.weight for layer in linear_layers(group)))
            enough = sum(weight.nbytes for weight, _ in found) > autotune.SAMPLE_BYTES
            if shape in wanted and (enough or not wanted[shape]):
                continue
            weight, bias = stacked(group)
            if shape not in wanted:
                kinds = {kind.name for kind in offered(weight * self._scale(weight), self.kinds, exact)}
                wanted[shape] = bool(kinds - self.table.times(weight).keys())
            if wanted[shape]:
                found.append((weight, bias))
        return found

    def _scale(self, weight: Tensor) -> float:
        """What a weight is multiplied by before it is stored."""
        return scale_of(weight) if any(issubclass(kind, HalfWeight) for kind in self.kinds) else 1.0

    def _product(self, weight: Tensor, bias: Tensor | None, exact: bool) -> PackedLinear:
        """The product chosen for a weight [out, in] and bias [out]."""
        shape, scale = shape_of(weight), self._scale(weight)
        weight = weight * scale
        chosen = self._choose(weight, exact)
        self.chosen[shape if exact else f"{shape}, rounded"] = [chosen.name]
        return PackedLinear(chosen(weight, bias), scale, weight, bias)

    def _choose(self, weight: Tensor, exact: bool) -> type[Product]:
        """The kind for a scaled weight: the fastest first, since whether it offers it takes reading all values."""
        times, kinds = self.table.times(weight), {kind.name: kind for kind in self.kinds}
        while kinds:
            kind = kinds.pop(choice(times, list(kinds)))
            if offered(weight, [kind], exact):
                return kind
        return Plain

    def stored(self, module: nn.Module) -> Stored:
        found = with_packed(super().stored(module), module)
        tables = [layer.weight for layer in module.modules() if isinstance(layer, PackedEmbedding)]
        own = sum(table.nbytes for table in tables)
        return Stored(found.numbers + sum(map(Tensor.numel, tables)), found.read + own, found.held + own)

    def few_bits(self, device: torch.device) -> bool:
        return ops.run_on(device)

    def held(self, weights: int, tied: int, device: torch.device, halves: bool) -> int:
        if device.type != "cpu":
            return weights
        some = torch.zeros(2, 16)  # a processor without FBGEMM or a compiler offers no HalfWeight
        offers = halves and any(issubclass(kind, HalfWeight) and kind.offers(some) for kind in self.kinds)
        return (weights + tied) // (1 + offers)

    def facts(self) -> dict[str, Any]:
        shapes = {shape.partition(",")[0] for shape in self.chosen}
        times = {shape: self.table.shapes[shape] for shape in shapes if shape in self.table.shapes}
        kept = self.programs
        used = self.fixed_shapes or self.layers.running
        programs = {"used": used, "found": kept.found, "made": kept.made, "seconds": kept.seconds,
                    "decision": self.decision, "left_out": self.left_out,
                    "missed": self.missing or self.incomplete}  # fmt: skip
        return {"machine": self.table.machine, "rows": list(ROWS), "microseconds": times, "chosen": self.chosen,
                "programs": programs}  # fmt: skip


class CompiledExecutor(AutoExecutor):
    """Compiles the programs that are not there yet, and always runs them. A leaf is traced with `torch.export` and
    compiled ahead of its first call, so a call runs no Python of the model. A second process, and `executor=auto`, take
    the programs from the disk."""

    compiles = True
    runs_recurrent = False
    runs_divided = False
    falls_back = False

    class Settings(AutoExecutor.Settings):
        compile: Literal["true"] = "true"

    @classmethod
    def refuses(cls, settings: Any, run: Selections) -> str | None:
        return refuse_growing_cache(run)
