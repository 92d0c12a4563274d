"""Compiled programs on disk, found again by all that they depend on, and whether making them pays within a run.

A program is kept under the identity of the run (its settings, checkpoints, code and machine) and of the call; that of a
layer under the code and the machine, and all that the layer and its call say of themselves.
"""

import contextlib
import dataclasses
import enum
import functools
import hashlib
import json
import logging
import os
import pickle
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch._inductor.standalone_compile import CompiledArtifact

from specbench.decoding.component import CodeIdentity
from specbench.errors import causes, first_line
from specbench.executors.machine import cache_dir, cache_file, only_own, write_cache_file
from specbench.executors.packed_linear import call_directly

log = logging.getLogger(__name__)
INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
KNOWN = ("specbench", "torch", "builtins", "functools")  # whose versions are part of the identity
SAVED = 0.6  # of decoding beyond the reading of weights that programs save: an assumption
SECONDS = 0.9  # to make a program, for each of its weights, until this machine has made some: of two AMD cores
PLAIN = (type(None), bool, int, float, str, bytes, enum.Enum, torch.dtype, torch.device)


# Code that takes tensors and returns tensors, and the description of pytree.py that rebuilds a leaf's result from them.
CompiledProgram = tuple[Callable[..., Sequence[Tensor]], Any]


class NotDescribedError(Exception):
    """A value that has no description which another process would find again."""


def decide(seconds: float, least: float, taken: float) -> tuple[bool, str]:
    """Whether to compile, and why: if the seconds that it takes are fewer than it saves of a run's decoding, of which
    reading the weights takes `least` seconds."""
    saved = SAVED * max(0.0, seconds - least)
    if saved > taken:
        return True, f"compiles for about {taken:.0f} s: it saves about {saved:.0f} s of {seconds:.0f}"
    return False, f"compiling would take about {taken:.0f} s and save {saved:.0f} s of {seconds:.0f}"


class Programs:
    """The programs of a run: a folder, or nothing that is kept if that is None."""

    def __init__(self, folder: Path | None, times: Path | None = None, layers: Path | None = None):
        """`times` is the file of how long programs take to make on this machine, None if that is not kept. `layers` is
        the folder of programs of layers, which all runs share (None: `folder`)."""
        self.folder, self.times, self.layers = folder, times, layers or folder
        self.found, self.made, self.seconds = 0, 0, 0.0  # seconds of those made
        self.failed: str | None = None  # why none can be made
        self.tell: Callable[[str], None] = lambda what: None

    @classmethod
    def stored(cls, identity: CodeIdentity, machine: str | None = None) -> "Programs":
        """Those of a run with this identity, and times on the machine of this description, kept for later runs."""
        if os.environ.get(INDUCTOR, default_cache_dir()) == default_cache_dir():  # PyTorch sets it when it is imported
            os.environ[INDUCTOR] = str(cache_dir() / "inductor")
        times, folder = None if machine is None else cache_file("compiling", machine), cache_dir() / "programs"
        return cls(folder / identity.run, times, folder / identity.machine)

    @property
    def seconds_per_weight(self) -> float:
        """Seconds to make all programs so far on this machine, over the number of their weights."""
        seconds, weights = self._stored_times()
        return seconds / weights if weights else SECONDS

    def _stored_times(self) -> tuple[float, int]:
        """Seconds and weights; zeros if none are stored."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads(self.times.read_text()) if self.times is not None else {}
            return float(found["seconds"]), int(found["weights"])
        return 0.0, 0

    @property
    def any(self) -> bool:
        """Whether some are kept."""
        return self.folder is not None and self.folder.is_dir() and any(self.folder.glob("*.result"))

    def find(self, name: str | None, folder: Path | None) -> CompiledProgram | None:
        """The program of this name in `folder` or `layers`, None if there is none or it cannot be read."""
        if folder is None or name is None or not (folder / f"{name}.result").is_file() or not only_own(folder):
            return None
        call_directly()
        try:
            result = pickle.loads((folder / f"{name}.result").read_bytes())
            code = CompiledArtifact.load(path=str(folder / f"{name}.program"))
        except Exception as error:  # another version of torch, or a damaged file: it is compiled again
            log.info("program %s cannot be used: %s", name, first_line(error))
            return None
        self.found += 1
        return code, result

    def reject(self, name: str | None, folder: Path | None) -> None:
        """Marks a program in `folder` that is not right: no later process finds it, or makes it again."""
        if folder is not None and name is not None:
            with contextlib.suppress(OSError):
                (folder / f"{name}.result").rename(folder / f"{name}.wrong")

    def is_rejected(self, name: str | None, folder: Path | None) -> bool:
        """Whether a program was marked so."""
        return folder is not None and name is not None and (folder / f"{name}.wrong").is_file()

    @contextmanager
    def making(self, weights: int, clock: Callable[[], float] = time.perf_counter) -> Iterator[None]:
        """Inside this context a program with so many weights is made."""
        call_directly()
        self.tell(f"compiling program {self.made + 1}")
        begun = clock()
        yield
        seconds = clock() - begun
        self.seconds += seconds
        before, counted = self._stored_times()
        write_cache_file(self.times, {"seconds": before + seconds, "weights": counted + weights})

    def give_up(self, error: Exception) -> None:
        """Notes that programs cannot be made here: without a compiler, say."""
        self.failed = causes(error)
        log.warning("nothing more is compiled: %s", self.failed)
        log.info("the errors in full", exc_info=error)

    def notes(self) -> list[str]:
        """What a reader of the run's times must know."""
        return (
            [] if self.failed is None else [f"functions ran uncompiled, since one could not be compiled: {self.failed}"]
        )

    def keep(self, name: str | None, folder: Path | None, artifact: CompiledArtifact, result: Any) -> None:
        """Stores a program that was just made in `folder` or `layers`."""
        self.made += 1
        if folder is None or name is None:
            return
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary = folder / f"{name}.{os.getpid()}.tmp"
            artifact.save(path=str(temporary))
            os.replace(temporary, folder / f"{name}.program")
            temporary.write_bytes(pickle.dumps(result))
            os.replace(temporary, folder / f"{name}.result")  # last: it says that the program is whole
        except Exception as error:  # no space, or an artifact that cannot be saved: it costs time only
            log.info("program %s cannot be kept: %s", name, first_line(error))


def program_name(*parts: Any) -> str | None:
    """A hash of the description of these values, None if one of them has none."""
    try:
        return hashlib.sha256(repr([described(part) for part in parts]).encode()).hexdigest()[:32]
    except NotDescribedError as error:
        log.info("a program is not kept: %s", error)
        return None


def described(value: Any, depth: int = 8) -> Any:
    """Values of Python's simplest types that say all that a program may depend on. Raises NotDescribedError."""
    if isinstance(value, PLAIN):
        return (type(value).__name__, repr(value))
    if depth == 0 or isinstance(value, Tensor | torch.nn.Module):
        raise NotDescribedError(f"it depends on a {type(value).__name__}")
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | types.MethodType):
        return _of_code(value, depth)
    if isinstance(value, tuple | list):
        return [described(entry, depth - 1) for entry in value]
    if isinstance(value, Mapping):
        return [(described(key, depth - 1), described(entry, depth - 1)) for key, entry in value.items()]
    if isinstance(value, functools.partial):
        return [described(entry, depth - 1) for entry in (value.func, value.args, value.keywords)]
    if dataclasses.is_dataclass(value) or hasattr(value, "__dict__"):
        return [described(type(value)), described(vars(value), depth - 1)]
    raise NotDescribedError(f"it depends on a {type(value).__name__}")


def _of_code(value: Any, depth: int) -> list[Any]:
    """The name of a class or function, of whose code the identity of the run knows the version, and the object that a
    method belongs to."""
    known = value.__module__.partition(".")[0] in KNOWN and "<lambda>" not in value.__qualname__
    if not known or getattr(value, "__closure__", None):  # a function with variables of its own
        raise NotDescribedError(f"it depends on {value.__module__}.{value.__qualname__}")
    owner = getattr(value, "__self__", None)
    own = [] if owner is None or isinstance(owner, types.ModuleType) else [described(owner, depth - 1)]
    return [value.__module__, value.__qualname__, *own]
