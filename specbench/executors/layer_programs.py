"""One compiled program for all decoder layers that are alike, called once for each.

A model of many small layers spends its steps in calls, not in reading weights. Compiling all of its layers takes
minutes, compiling one takes seconds. On a CPU a program serves any number of columns; in CUDA graphs, where a call
costs nothing, each set of shapes has its own. Caches are those of `specbench.cache`. b rows, N new tokens, T columns.
"""

import contextlib
import hashlib
import inspect
import logging
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._inductor.output_code import CompiledFxGraph
from torch.export import Dim
from torch.nn import functional
from torch.nn.utils.stateless import _reparametrize_module
from transformers import PreTrainedModel
from transformers.integrations import sdpa_attention

from specbench.decoding.executor import cache_argument
from specbench.errors import first_line
from specbench.executors.compile_cache import CompiledProgram, Programs, program_name
from specbench.executors.compiled_function import OPTIONS, UNCHECKED, AsModule
from specbench.executors.pytree import flatten_arguments, rebuild

log = logging.getLogger(__name__)
LEAST_LAYERS = 8  # of one class: with fewer, calls are little of a step
MOST_TOKENS = 64  # of a forward: with more, products take the time
SECONDS = 24.0  # to make the programs of a model: an assumption
ROUNDING = 1e-3  # of the largest result: what a program may differ by from the layer as it is written
ROUNDINGS = 4.0  # of each result and of the layer's largest change, instead, in 16 bits
MOST_SIZE = 10**6
PLAIN = (bool, int, float, str, tuple, torch.dtype)
UNREADABLE = os.urandom(16).hex()  # in place of a source: no other process finds programs that depend on it
KNOWN = {"specbench", "torch", "transformers", *sys.stdlib_module_names}  # versions are in the machine's identity


class LayerPrograms:
    """The programs of a module's decoder layers, which copies of the module share."""

    def __init__(self, kept: Programs, graphs: bool = False):
        """Programs are found in `kept`; those that are missing are made while `compiles` is set. There is one for a
        single new token and one for several or, with `graphs`, one for the shapes of each call, of any number of rows;
        these run inside of `in_graph` only."""
        self.kept, self.used, self.compiles = kept, True, False
        self.graphs, self.runs = graphs, not graphs
        self.attached: bool | None = None  # whether there are layers that may run as programs; None: nothing is loaded
        self.warm_ups = 0  # that are left of those in which programs are made
        self.missed = 0  # calls without a program
        self.found: dict[Any, tuple[Callable[[list[Tensor]], Sequence[Tensor]], Any] | None] = {}
        self.last: Shared | None = None  # of the last call

    def attach(self, module: nn.Module) -> None:
        """From now on the layers of a causal module of transformers run as programs, if there are enough."""
        self.attached = bool(self.attached)
        for layers in module.modules() if isinstance(module, PreTrainedModel) else ():
            if isinstance(layers, nn.ModuleList) and len(layers) >= LEAST_LAYERS and len({*map(type, layers)}) == 1:
                places = [_place(layer) for layer in layers]
                if any(not isinstance(vars(layer).get("forward"), LayerCall | None) for layer in layers):
                    continue  # of parts of layers that a drafter skips
                if inspect.Parameter.VAR_POSITIONAL in {p.kind for p in _parameters(layers[0]).values()}:
                    continue  # whose names are not known
                if any(weight.dim() > 2 for weight in layers.parameters()):  # experts, whose calls are counted
                    continue
                if len({*places}) == len(layers) and None not in places:
                    self.attached = True
                    for layer, place in zip(layers, places, strict=True):
                        layer.forward = LayerCall(layer, place, self)

    def __deepcopy__(self, copies: dict[int, Any]) -> Self:
        return self

    @contextlib.contextmanager
    def in_graph(self) -> Iterator[None]:
        """Inside this context programs run that are for graphs."""
        before, self.runs = self.runs, True
        try:
            yield
        finally:
            self.runs = before

    @property
    def running(self) -> bool:
        """Whether layers run as programs."""
        return self.used and any(program is not None for program in self.found.values())

    def start(self, warm_ups: int = 1) -> None:
        """Missing programs are made from now on, until `settle` has followed so many warm-ups."""
        self.used, self.compiles, self.missed, self.last, self.warm_ups = True, True, 0, None, warm_ups
        self.found = {key: program for key, program in self.found.items() if program is not None}

    def settle(self) -> None:
        """After a warm-up: all calls run alike, so that without one of the programs none is used."""
        self.warm_ups = max(0, self.warm_ups - 1)
        if not self.warm_ups:
            self.used, self.compiles = self.used and not self.missed, False
        self.last = None


class Shared(NamedTuple):
    """What the calls of all layers of a kind in one forward have in common."""

    kind: str
    hidden: torch.Size
    rest: list[Any]  # values of the call but the cache
    slots: Tensor
    key: Any  # of the program
    tensors: list[Tensor]  # those of `rest`
    shape: torch.Size  # of the stored keys
    code: Callable[[list[Tensor]], Sequence[Tensor]] | None  # None without a program
    result: Any

    def serves(self, kind: str, hidden: Tensor, rest: list[Any], cache: Any) -> bool:
        """Whether a call is of the same forward: its arguments are the same objects."""
        same = kind is self.kind and getattr(cache, "slots", None) is self.slots and hidden.shape == self.hidden
        return same and len(rest) == len(self.rest) and all(map(operator.is_, rest, self.rest))


class LayerCall:
    """Stands for `forward` of one layer."""

    def __init__(self, layer: nn.Module, place: Any, programs: LayerPrograms):
        """`place` is what the layer calls itself in the cache."""
        self.layer, self.place, self.programs = layer, place, programs
        self.cache_name = cache_argument(type(layer).forward)
        self.names = [*_parameters(layer)][2:]  # behind `self` and the hidden states
        self.weights = dict([*layer.named_parameters(), *layer.named_buffers()])
        self.tensors = [*self.weights.values()]
        self.config = getattr(next(layer.children(), None), "config", None)
        types = getattr(self.config, "layer_types", None) if programs.graphs else None
        own = types[place] if isinstance(types, list) else None  # the kernel's window is a constant of a program
        kind = (_described(layer), own, *((name, t.shape, t.stride(), t.dtype) for name, t in self.weights.items()))
        self.kind = sys.intern(str(kind))  # one text for all layers of a kind: each call looks it up
        self.checked: set[Any] = set()

    def __call__(self, hidden_states: Tensor, *others: Any, **given: Any) -> Any:
        """The layer's result for hidden states [b, N, H]; by a program, if its cache and mask are of the usual form
        and, without graphs, they are of one row."""
        hidden, programs = hidden_states.contiguous(), self.programs
        if others:
            given = dict(zip(self.names, others, strict=False)) | given
        cache: Any = given.get(self.cache_name)
        rest, last = [value for value in given.values() if value is not cache], programs.last
        if last is None or not last.serves(self.kind, hidden, rest, cache):
            last = self._shared(hidden, given, rest, cache)
            if last is None:
                return self.run(hidden, given)
        number = 2 * cache.numbers[self.place]
        stored = cache.pools[number : number + 2]
        if last.code is None or stored[0].shape != last.shape:
            programs.missed += 1
            return self.run(hidden, given)
        every = [hidden, *last.tensors, cache.slots, *stored, *self.tensors]
        if last.code in self.checked:
            return rebuild(last.result, last.code(every))
        written = self.run(hidden, given)
        right = self._check(last, every, written)
        return written if right else self.run(hidden, given)  # whose keys and values are those that stay

    def _shared(self, hidden: Tensor, given: dict[str, Any], rest: list[Any], cache: Any) -> "Shared | None":
        """What the layers of this forward have in common, None if no program serves it."""
        mask: Any = given.get("attention_mask")
        programs = self.programs
        usual = programs.used and programs.runs and getattr(cache, "in_place", False) and self.place in cache.numbers
        usual = usual and isinstance(mask, Tensor)
        if not usual or torch.compiler.is_compiling():
            return None
        if not programs.graphs and (len(hidden) > 1 or hidden.shape[1] > MOST_TOKENS or mask.shape[-1] <= 1):
            return None
        number = cache.numbers[self.place]
        names = tuple(name for name, value in given.items() if value is not cache)
        spec, tensors = flatten_arguments((hidden, *rest))
        tensors, stored = [t.contiguous() for t in tensors], cache.pools[2 * number : 2 * number + 2]
        span, shapes = cache.span, tuple(t.shape for t in stored)
        called: Any = min(hidden.shape[1], 2)
        if programs.graphs:
            called = (*((t.shape, t.dtype) for t in tensors), cache.visible, cache.in_blocks)
        key = (self.kind, spec, names, called, shapes, span.start, span.stop, type(cache).__qualname__)
        try:
            known = key in programs.found
        except TypeError:  # a layer that is given a dictionary, say
            return None
        if not known:
            programs.found[key] = self._find(key, cache, number, tensors)
            if (made := programs.found[key]) is not None:
                given_to_all = [*tensors, cache.slots, *stored, *self.tensors]
                found = partial(_call, made[0]) if programs.graphs else innermost(made[0], given_to_all)
                programs.found[key] = found, made[1]
        code, result = programs.found[key] or (None, None)
        programs.last = Shared(self.kind, hidden.shape, rest, cache.slots, key, tensors[1:], shapes[0], code, result)
        return programs.last

    def run(self, hidden: Tensor, given: Any) -> Any:
        """The layer as it is written."""
        return type(self.layer).forward(self.layer, hidden, **given)

    def _check(self, shared: "Shared", every: list[Tensor], written: Any) -> bool:
        """Whether a program's first result, for the arguments `every`, is that of the layer as it is written."""
        assert shared.code is not None
        try:
            pairs = zip(shared.code([*every]), flatten_arguments(written)[1], strict=True)  # it empties its list
            right = all(is_rounding(found, own, every[0]) for found, own in pairs)
            why = "gave another result than the layer"
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of a program from the disk, say
            right, why = False, f"could not run: {first_line(error)}"
        if right:
            self.checked.add(shared.code)
        else:
            log.warning("a program of layer %s %s: it is not used", self.place, why)
            self.programs.found[shared.key] = self.programs.last = None
            self.programs.kept.reject(self._name(shared.key, every[0]), self.programs.kept.layers)
        return right

    def _name(self, key: Any, hidden: Tensor) -> str | None:
        """The name of a key's program on the disk: all that it depends on besides code and machine."""
        attention = str(getattr(self.config, "_attn_implementation", ""))
        modes = torch.is_inference_mode_enabled(), torch.get_float32_matmul_precision(), str(hidden.device)
        return program_name("layer", *map(str, key), str(self.config), attention, *modes)

    def _find(self, key: Any, cache: Any, number: int, tensors: Sequence[Tensor]) -> CompiledProgram | None:
        """The program for a key: from the disk, or compiled."""
        programs, name = self.programs, self._name(key, tensors[0])
        found = programs.kept.find(name, programs.kept.layers)
        makes = programs.compiles and programs.kept.failed is None
        if found is None and makes and not programs.kept.is_rejected(name, programs.kept.layers):
            try:
                with programs.kept.making(len(self.weights)):
                    found = self._compile(name, key, cache, number, tensors)
            except Exception as error:
                if programs.graphs:  # of a compiler that is not there, say
                    programs.kept.give_up(error)
                else:  # what cannot be traced for any number of columns runs as it is
                    log.info("layers of %s are not compiled: %s", type(self.layer).__name__, first_line(error))
        return found

    def _compile(
        self, name: str | None, key: Any, cache: Any, number: int, tensors: Sequence[Tensor]
    ) -> CompiledProgram:
        """Traces the layer, for graphs with the shapes of this call, else for any number of columns and, unless it is
        one, of new tokens; compiles and keeps it."""
        _, spec, names, count, *_ = key
        results, graphs = list[Any](), self.programs.graphs

        def call(*every: Tensor) -> tuple[Tensor, ...]:
            (slots, keys, values), weights = every[len(tensors) :][:3], every[len(tensors) + 3 :]
            hidden, *rest = rebuild(spec, every[: len(tensors)])
            given = dict(zip(names, rest, strict=True)) | {self.cache_name: cache}
            named = dict(zip(self.weights, weights, strict=True))
            visible = cache.visible if graphs else given["attention_mask"].shape[-1]
            held = _held(cache, number, slots, [keys, values], visible)
            heads = contextlib.nullcontext() if graphs else shared_heads()
            with held, heads, _reparametrize_module(self.layer, named):
                result, found = flatten_arguments(self.run(hidden, given))
            results.append(result)
            return tuple(found)

        fixed = [*cache.pools[2 * number : 2 * number + 2], *self.weights.values()]
        inputs, shapes = [*tensors, cache.slots], None
        if not graphs:
            inputs, shapes = self._of_any_size(cache, count, tensors, fixed)
        exported = torch.export.export(AsModule(call), (*inputs, *fixed), dynamic_shapes=shapes, strict=False)
        if any(entry.target is not None for entry in exported.graph_signature.input_specs):
            raise ValueError("it needs tensors that are no weights")
        with torch._inductor.config.patch(UNCHECKED | OPTIONS.get(inputs[0].device.type, {})):
            artifact = torch._inductor.standalone_compile(exported.graph_module, [*inputs, *fixed])
        self.programs.kept.keep(name, self.programs.kept.layers, artifact, results[-1])
        return artifact, results[-1]

    def _of_any_size(
        self, cache: Any, count: int, tensors: Sequence[Tensor], fixed: Sequence[Tensor]
    ) -> tuple[list[Tensor], Any]:
        """Inputs with which the layer is traced for any number of columns and, unless `count` is 1, of new tokens, and
        which of their dimensions are free; `fixed` follow them as they are."""
        # Numbers that no other size has: equal ones would be taken for one.
        others = {size for tensor in (*tensors, *fixed) for size in tensor.shape}
        tokens = 1 if count == 1 else next(n for n in range(5, MOST_SIZE) if n not in others)
        columns = next((n for n in range(cache.capacity - 1, tokens, -1) if n not in others), 0)
        if not columns:
            raise ValueError(f"the cache has {cache.capacity} columns")
        inputs, free = [], []
        for tensor in (*tensors, cache.slots):
            sizes = {1: tokens} if tensor.dim() < 4 else {2: tokens, 3: columns}
            inputs.append(tensor.new_zeros([sizes.get(d, n) for d, n in enumerate(tensor.shape)]))
            free.append({d: Dim.DYNAMIC for d, n in sizes.items() if n != 1})
        return inputs, {"tensors": (*free, *[None] * len(fixed))}


def is_rounding(found: Tensor, written: Tensor, hidden: Tensor) -> bool:
    """Whether a program's result is the layer's as it is written but for rounding, both of any shape, for hidden states
    [b, N, H], most of which a layer returns as they are."""
    own = written.float()
    if written.dtype in (torch.float32, torch.float64):
        return bool((found - own).abs().max() <= ROUNDING * own.abs().max())
    change = own - hidden if own.shape == hidden.shape else own
    most = ROUNDINGS * torch.finfo(written.dtype).eps * (own.abs() + change.abs().max())
    return bool(((found - own).abs() <= most).all())


def _parameters(layer: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(type(layer).forward).parameters


def runs_by_layers(module: nn.Module) -> bool:
    """Whether some of its layers may run as programs."""
    return any(isinstance(vars(layer).get("forward"), LayerCall) for layer in module.modules())


def _call(code: Callable[..., Sequence[Tensor]], given: list[Tensor]) -> Sequence[Tensor]:
    return code(*given)


def innermost(code: Callable[..., Sequence[Tensor]], given: list[Tensor]) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """Runs a program once with tensors `given`; returns what it calls at last, if that takes and returns the very same
    tensors: what PyTorch does around it takes the host longer than a small layer."""
    calls: list[Any] = []

    def noted(graph: CompiledFxGraph, inputs: list[Tensor]) -> Any:
        taken, call = [*inputs], graph.current_callable
        calls.append((call, taken, call(inputs)))  # type: ignore[misc]
        return calls[-1][2]

    with patch.object(CompiledFxGraph, "__call__", noted):
        found = code(*given)
    if len(calls) == 1:
        call, taken, returned = calls[0]
        if all(len(a) == len(b) and all(map(operator.is_, a, b)) for a, b in ((taken, given), (returned, found))):
            return call  # type: ignore[no-any-return]
    return partial(_call, code)


@contextlib.contextmanager
def shared_heads() -> Iterator[None]:
    """Inside this context transformers' SDPA does not repeat keys and values for the heads of queries that share them:
    these become queries of one head."""
    plain = functional.scaled_dot_product_attention

    def attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, **others: Any) -> Tensor:
        (b, heads, N, _), own, T = q.shape, k.shape[1], k.shape[2]
        each = heads // own
        if each == 1 or attn_mask is None:
            k, v = (x.repeat_interleave(each, 1) if each > 1 else x for x in (k, v))
            return plain(q, k, v, attn_mask=attn_mask, **others)
        mask = attn_mask.expand(b, each if attn_mask.shape[1] == 1 else heads, N, T).reshape(b, -1, each * N, T)
        return plain(q.reshape(b, own, each * N, -1), k, v, attn_mask=mask, **others).reshape(b, heads, N, -1)

    with (
        patch.object(sdpa_attention, "repeat_kv", lambda x, times: x),
        patch.object(functional, "scaled_dot_product_attention", attend),
    ):
        yield


@contextlib.contextmanager
def _held(cache: Any, number: int, slots: Tensor, stored: list[Tensor], visible: Any) -> Iterator[None]:
    """Inside this context a layer's tensors in the cache, and the placed columns, are these."""
    before = cache.slots, cache.visible, cache.pools
    cache.slots, cache.visible = slots, visible
    cache.pools = [*before[2][: 2 * number], *stored, *before[2][2 * number + 2 :]]
    try:
        yield
    finally:
        cache.slots, cache.visible, cache.pools = before


def _place(layer: nn.Module) -> Any:
    """What a layer calls itself in the cache, None if its parts do not say, or differ."""
    found = {part.layer_idx for part in layer.modules() if hasattr(part, "layer_idx")}
    return found.pop() if len(found) == 1 else None


def _described(layer: nn.Module) -> tuple[Any, ...]:
    """What the code of a layer may depend on besides tensors: the classes of its parts, their plain attributes, and
    which class or function the others are."""
    parts = []
    for name, part in layer.named_modules():
        own = {
            key: value if isinstance(value, PLAIN) else _code(value if hasattr(value, "__qualname__") else type(value))
            for key, value in vars(part).items()
            if key != "layer_idx" and not isinstance(value, LayerCall)
        }
        shared = getattr(part, "shared", None)
        own |= {} if shared is None else {"widths": (*shared.widths,)}
        parts.append((name, *_code(type(part)), str(sorted(own.items()))))
    return tuple(parts)


def _code(of: Any) -> tuple[str, ...]:
    """Which class or function it is, and the digest of its module's source unless the machine's identity knows that,
    as of code that came with a checkpoint; modules that such code imports are not looked at."""
    module = getattr(of, "__module__", None) or "builtins"
    if module.partition(".")[0] in KNOWN:
        return module, of.__qualname__
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):  # typed in, say
        source = UNREADABLE
    return module, of.__qualname__, hashlib.sha256(source.encode()).hexdigest()
