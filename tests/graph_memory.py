"""CUDA graphs on a CPU: `SimulatedGraphs` is the graph executor with captures and a memory pool as CUDA has them.

A capture records operations with the tensors, that is the addresses, that they read and write, and computes nothing:
what it changed outside the pool is undone. A replay runs the recorded operations on the same tensors; no Python of the
captured function runs again.

What a capture makes lies in its graph's pool. PyTorch guarantees that memory of a pool which some tensor holds is not
handed out by a later capture, and nothing more ("Graph memory management" in
docs.pytorch.org/docs/stable/notes/cuda.html: graphs may share a pool if they are replayed in the order of their
captures, and never at the same time). So the memory of a graph may be scratch of every graph of the pool that was
captured before it, and a replay of one of these may overwrite it. Here it always does: a replay fills the memory of all
graphs captured later, and its own before it runs, with NaN and wild numbers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from specbench.executors.cudagraph import WARM_UP_CALLS, CudaGraphExecutor

HOST = ("_local_scalar_dense", "item", "nonzero", "lift_fresh", "is_nonzero", "_unique2", "masked_select")
MOST_REPLAYS = 1_000  # of an executor: a planted fault may repeat one round for ever
WILD = 2**40 + 12345  # as an index out of every range


def graphs_of(executor):
    """How many graphs an executor can replay now."""
    return sum(len(function.graphs) for function in executor.functions.values())


class SimulatedGraphs(CudaGraphExecutor):
    """The graph executor, with a model of graphs and of their memory in place of CUDA's."""

    def __init__(self, **more):
        super().__init__(**more)
        self.tapes = []  # of the graphs of the one pool, in the order of their captures
        self.replays, self.forgives = 0, False
        self.left = []  # results that the next capture leaves in the pool: none, but in a negative control

    def warm_up(self, function):
        for _ in range(WARM_UP_CALLS):
            found = function()
        return found

    def mark(self, stage):
        self.marks = [*self.marks, (stage, None)]

    def capture(self, function):
        tape = Tape()
        try:
            with tape:
                function()
        finally:
            tape.undo()
        tape.made, self.left = tape.made + self.left, []
        self.tapes.append(tape)
        number = len(self.tapes)

        def replay():
            self.replays += 1
            assert self.replays <= MOST_REPLAYS, "decoding does not end"
            for later in self.tapes[number:]:
                later.poison()
            tape.poison()
            tape.replay()

        return replay

    def give_up(self, captured, error):
        """A test fails if a function is not captured, unless that is what it is about."""
        if not self.forgives:
            raise error
        super().give_up(captured, error)


class Rerun(CudaGraphExecutor):
    """As on CUDA, but a graph is its function, run again."""

    needs_cuda = False
    mark = SimulatedGraphs.mark

    def warm_up(self, function):
        return function()

    def capture(self, function):
        def replay():
            with self.whole():
                function()

        return replay


class Marked(Rerun):
    """With events, for `cuda_on_cpu`."""

    mark = CudaGraphExecutor.mark


class NoHost(TorchDispatchMode):
    """Raises where a capture would: values that travel to the host, or from it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in HOST:
            raise RuntimeError(f"{func} inside a graph")
        return func(*args, **(kwargs or {}))


@dataclass
class Step:
    """A recorded operation; `results` are tensors of its own, not views of what it read."""

    function: object
    args: tuple
    kwargs: dict
    results: list[tuple[int, Tensor]]


class Tape(NoHost):
    """Records operations, and what they change of tensors from outside."""

    def __init__(self):
        super().__init__()
        self.steps, self.made, self.changed = [], [], {}
        self.poisoned = False
        self.own = set()  # addresses of storages that the capture made

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        if func._schema.is_mutable:
            self.keep(given)
        found = super().__torch_dispatch__(func, types, args, kwargs)
        known = {place(t) for t in given}
        made = [(i, t) for i, t in enumerate(tree_flatten(found)[0]) if isinstance(t, Tensor)]
        results = [(i, t) for i, t in made if place(t) not in known]
        self.made += [t for _, t in results]
        self.own |= {place(t) for _, t in results}
        if results or func._schema.is_mutable:  # others are views
            self.steps.append(Step(func, args, kwargs, results))
        return found

    def keep(self, given):
        """Copies tensors from outside that an operation may change."""
        for t in given:
            if place(t) not in self.own and place(t) not in self.changed:
                whole = t.new_empty(0).set_(t.untyped_storage())
                self.changed[place(t)] = whole, whole.clone()

    def undo(self):
        """Gives tensors from outside their old values: a capture computes nothing."""
        for whole, before in self.changed.values():
            whole.copy_(before)
        self.changed = {}

    def poison(self):
        """Fills all memory of the graph, if it ran since the last time."""
        if self.poisoned:
            return
        self.poisoned = True
        for t in self.made:
            if t.is_floating_point():
                t.fill_(torch.nan)
            elif t.dtype == torch.bool:
                t.logical_not_()
            else:
                t.fill_(WILD if t.dtype == torch.long else 99)

    def replay(self):
        self.poisoned = False
        for step in self.steps:
            found = tree_flatten(step.function(*step.args, **step.kwargs))[0]
            for i, t in step.results:
                t.copy_(found[i])


def place(t):
    """The address of a tensor's storage, or for one without memory something unique."""
    return t.untyped_storage().data_ptr() or id(t)
