"""What a check of the GPU works with: numbers with limits, PyTorch's benchmark timer and profiler, composed runs."""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.benchmark import Timer

from specbench.config.build import build
from specbench.config.components import Components
from specbench.config.compose import compose
from specbench.config.validate import check
from specbench.decoding.noise import prompt_key
from specbench.decoding.state import Job, State
from specbench.executors.cudagraph import CudaGraphExecutor

PASSED, FAILED, UNCLEAR, INFO = "passed", "failed", "unclear", "info"
GRAPHS = "executor=cudagraph"
# The executor of graphs with the shapes of graphs, but without any.
UNCAPTURED = (GRAPHS, "executor._target_=specbench.contrib.gpu_check.bench.Uncaptured", "executor.compile=false")
MEASURED_SECONDS = 0.2  # of timing one call, at least
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")  # CUDA's functions, as the profiler names them


@dataclasses.dataclass(frozen=True)
class Measured:
    """A number with its limit, (">=", 0.85) say. Without a limit it has no verdict; `value` is None if it could not be
    measured."""

    name: str
    value: float | None
    unit: str = ""
    limit: tuple[str, float] | None = None
    remark: str = ""

    @property
    def verdict(self) -> str:
        if self.limit is None:
            return INFO
        if self.value is None:
            return UNCLEAR
        keeps = {"<=": operator.le, ">=": operator.ge}[self.limit[0]]
        return PASSED if keeps(self.value, self.limit[1]) else FAILED


class Uncaptured(CudaGraphExecutor):
    """Runs the functions that would be captured, on the same shapes, and reads every round at once: the reference for
    graphs and for rounds that are launched ahead."""

    def captured(self, function: Any, models: Any) -> Any:
        return function

    def runs_ahead(self, decoder: str, obstacle: str | None) -> bool:
        return False


@dataclasses.dataclass(frozen=True)
class Bench:
    """The device to check, a folder for the runs' files, and what `executor.compile` is for graphs."""

    device: torch.device
    folder: Path
    compile: str = "false"

    def parts(self, *overrides: str) -> Components:
        """The components of a run with these overrides on this device. Raises ConfigError."""
        with torch.inference_mode(False):
            return build(check(compose(self.overrides(overrides))), lambda text: None)

    def overrides(self, overrides: Sequence[str]) -> list[str]:
        """These overrides, and what all runs of the checks share."""
        compiled = [f"executor.compile={self.compile}"] if GRAPHS in overrides else []
        return [f"device={self.device}", "logger=none", *compiled, *overrides]

    @property
    def compiled(self) -> bool:
        """Whether graphs are of compiled functions, whose limits were measured."""
        return self.compile == "true"


def jobs_of(parts: Components, count: int, length: int, new: int) -> list[Job]:
    """Jobs with `count` prompts of `length` tokens, which end after `new` more."""
    vocab = min(parts.target.vocab_size, 256)
    return [
        Job([(7 * row + 3 * place) % vocab for place in range(length)], length + new, prompt_key(parts.seed, f"{row}"))
        for row in range(count)
    ]


def text_in_cache(parts: Components, length: int) -> State:
    """The state of one text of `length` tokens, all but the last of which the target has read, as before a round."""
    state = State.start(jobs_of(parts, 1, length, parts.spare), [], parts.spare, parts.target.device)
    parts.target.allocate(1, state.tokens.shape[1])
    parts.target.prefill(state)
    return state


class Profile(NamedTuple):
    """What PyTorch's profiler saw of a call."""

    kernels: int
    seconds: float  # of the kernels
    graphs: int  # launched
    waits: int  # of the host for the device


class Kernel(NamedTuple):
    """What PyTorch's profiler saw of the kernels with one name."""

    name: str
    calls: int
    seconds: float


def events_of(call: Callable[[], Any]) -> tuple[list[Any], list[Any]]:
    """What the profiler saw of one call on CUDA: all events, and those among them that are kernels."""
    torch.cuda.synchronize()
    with torch.profiler.profile() as profile:  # of the CPU and of CUDA
        call()
        torch.cuda.synchronize()  # which is no `WAITS`
    events = list(profile.events())
    copies = ("Memcpy", "Memset")
    return events, [e for e in events if e.device_type.name == "CUDA" and not e.name.startswith(copies)]


def kernels_of(call: Callable[[], Any]) -> list[Kernel]:
    """The kernels of one call by name, those first that take the longest together."""
    found: dict[str, list[float]] = {}
    for event in events_of(call)[1]:
        found.setdefault(event.name, []).append(event.self_device_time_total / 1e6)
    kernels = [Kernel(name, len(seconds), sum(seconds)) for name, seconds in found.items()]
    return sorted(kernels, key=lambda kernel: -kernel.seconds)


def profiled(call: Callable[[], Any]) -> Profile:
    """Profiles one call, on CUDA."""
    events, kernels = events_of(call)
    names = [event.name for event in events]
    took = sum(event.self_device_time_total for event in kernels) / 1e6
    return Profile(len(kernels), took, names.count("cudaGraphLaunch"), sum(name in WAITS for name in names))


def time_call(call: Callable[[], Any]) -> float:
    """Seconds of one of many calls in a row, the device waited for at their end."""
    return float(Timer("call()", globals={"call": call}).blocked_autorange(min_run_time=MEASURED_SECONDS).median)
