"""A function of tensors that runs as a compiled program, one for each set of shapes and constants of its calls."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.utils.stateless import _reparametrize_module

from specbench.decoding.executor import HasCache
from specbench.executors.compile_cache import CompiledProgram, Programs, program_name
from specbench.executors.pytree import Columns, flatten_arguments, rebuild

# Shapes are checked when a program is found.
UNCHECKED = {"size_asserts": False, "alignment_asserts": False, "scalar_asserts": False}
OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {"cpp.threads": 1},  # OpenMP threads of compiled loops would slow down those of the products
    # Tuning also turns the products of a single row into reductions, which fuse with what follows. Padding would time
    # each product, though its long sides are aligned. `executor=cudagraph` captures programs itself. Kernels that do
    # not depend on each other are one: those that rotate q and k and write k and v.
    "cuda": {
        "coordinate_descent_tuning": True,
        "shape_padding": False,
        "triton.cudagraphs": False,
        "combo_kernels": True,
        "combo_kernels_autotune": 0,
        "benchmark_combo_kernel": False,
    },
}


class Leaf:
    """Runs the program for a call's shapes and constants, found on the disk or, with `compiles`, made."""

    def __init__(self, function: Callable[..., Any], model: HasCache | None, programs: Programs, compiles: bool):
        self.function, self.model, self.kept, self.compiles = function, model, programs, compiles
        self.programs: dict[Any, CompiledProgram] = {}
        self.weights: dict[str, Tensor] = {}
        self.missed = 0  # calls without a program

    def __call__(self, *arguments: Any) -> Any:
        """Runs the program, or the function itself where there is none, or the model's cache has no tensors yet."""
        stored = [] if self.model is None else self.model.cache_tensors()
        if self.model is not None and not stored:  # the cache takes its shape from a first forward
            return self.function(*arguments)
        spec, tensors = flatten_arguments(arguments)
        shapes = [None if type(t) is Columns else (t.shape, t.stride(), t.dtype) for t in tensors]
        key = (spec, *shapes, (stored[0].shape, stored[-1].shape) if stored else None)
        program = self.programs.get(key) or self._find(key, spec, tensors, stored)
        if program is None:
            self.missed += 1
            return self.function(*arguments)
        inputs = [t.tensor() if type(t) is Columns else t for t in tensors]
        code, result = program
        return rebuild(result, code(*inputs, *stored, *self.weights.values()))

    def _find(self, key: Any, spec: Any, tensors: Sequence[Any], stored: Sequence[Tensor]) -> CompiledProgram | None:
        """The program for a key: from the disk, or compiled."""
        if self.model is not None and not self.weights:
            module = self.model.module
            self.weights = dict([*module.named_parameters(), *module.named_buffers()])
        name = self._name(spec, tensors, stored)
        found = self.kept.find(name, self.kept.folder)
        if found is None and self.compiles and self.kept.failed is None:
            try:
                with self.kept.making(len(self.weights)):
                    found = self._compile(name, spec, tensors, stored)
            except Exception as error:  # of a compiler that is not there, or of a function that it cannot compile
                self.kept.give_up(error)
        if found is not None:
            self.programs[key] = found
        return found

    def _name(self, spec: Any, tensors: Sequence[Any], stored: Sequence[Tensor]) -> str | None:
        """The name of the program on the disk: all that it depends on, besides the identity of the run."""
        owner = getattr(self.function, "__self__", None)
        function = self.function if owner is None else [type(owner), self.function.__qualname__]
        model = None if self.model is None else self.model.description
        everything = [t for t in (*tensors, *stored, *self.weights.values()) if type(t) is not Columns]
        shapes = [[tuple(t.shape), t.stride(), t.dtype] for t in everything]
        tracing = [torch.is_inference_mode_enabled(), torch.get_float32_matmul_precision()]
        return program_name(function, model, spec, shapes, list(self.weights), tracing)

    def _compile(
        self, name: str | None, spec: Any, tensors: Sequence[Any], stored: Sequence[Tensor]
    ) -> CompiledProgram:
        """Traces the function with these tensors, compiles it and keeps the program if it needs no other tensors."""
        exported, inputs, result = self.trace(spec, tensors, stored)
        device = inputs[-1].device
        made = [entry.target for entry in exported.graph_signature.input_specs if entry.target is not None]
        # On the device: no graph may copy them there.
        held: list[Any] = [(exported.constants | exported.state_dict)[name].to(device) for name in made]
        with torch._inductor.config.patch(UNCHECKED | OPTIONS.get(device.type, {})):
            artifact = torch._inductor.standalone_compile(exported.graph_module, [*held, *inputs])
        self.kept.keep(None if held else name, self.kept.folder, artifact, result)
        return (lambda *given: artifact(*held, *given)) if held else artifact, result

    def trace(
        self, spec: Any, tensors: Sequence[Any], stored: Sequence[Tensor]
    ) -> tuple[ExportedProgram, list[Tensor], Any]:
        """Traces the function for a call with these tensors and cache, of any shape. The weights are inputs too, so
        that a program holds none. Returns the graph, its inputs and the description that rebuilds its result."""
        results: list[Any] = []

        def call(*given: Tensor) -> tuple[Tensor, ...]:
            own, cache = given[: len(tensors)], given[len(tensors) : len(tensors) + len(stored)]
            with contextlib.ExitStack() as stack:
                if self.model is not None:
                    stack.enter_context(self.model.on_cache(cache))
                    named = dict(zip(self.weights, given[len(tensors) + len(stored) :], strict=True))
                    stack.enter_context(_reparametrize_module(self.model.module, named, tie_weights=True))
                result, found = flatten_arguments(self.function(*rebuild(spec, own)))
            results.append(result)
            return tuple(found)

        # One column less than the call's: a trace with all columns of the cache would be one for exactly so many.
        own = [Columns(max(2, t - 1)).tensor() if type(t) is Columns else t for t in tensors]
        inputs = [*own, *apart(stored), *self.weights.values()]
        free = tuple({0: Dim.DYNAMIC} if type(t) is Columns else None for t in tensors)
        sizes = {"tensors": free + (None,) * (len(inputs) - len(own))}
        exported = torch.export.export(AsModule(call), tuple(inputs), dynamic_shapes=sizes, strict=False)
        return exported, inputs, results[-1]


class AsModule(nn.Module):
    """A function of tensors in the form that `torch.export` needs, which restores every attribute of a module."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]):
        super().__init__()
        self.__dict__["function"] = function  # no attribute

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Takes and returns tensors of any shape."""
        found: tuple[Tensor, ...] = self.__dict__["function"](*tensors)
        return found


def apart(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """These tensors of any shape or, where some are one and the same, as in the calls before a capture, fake ones of
    the same shapes. A program that was traced with one tensor for two would be wrong for two."""
    if len({id(t) for t in tensors}) == len(tensors):
        return tensors
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors]
