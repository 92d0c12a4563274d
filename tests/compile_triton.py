"""Compiles Triton kernels for a GPU that is not here, and tells what they take of it.

Triton's compiler and NVIDIA's assembler, which comes with Triton, need no device. Tests run kernels in Triton's
interpreter, which has to be chosen before Triton is imported, so a process of its own compiles them.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Job:
    """A kernel and its parameters.

    `arguments` gives for each parameter the type of one that is passed at run time (`*bf16`, `*i64`, `i32`, `fp32`;
    with `:16` behind it where addresses or values are multiples of 16), or the value of a constant.
    """

    module: str
    kernel: str
    arguments: Mapping[str, Any]
    warps: int = 4
    stages: int = 3
    capability: int = 90  # of the GPU: 90 is an H100


@dataclass(frozen=True)
class Compiled:
    """What a kernel takes of the GPU. A program has 32 * `warps` threads."""

    registers: int  # of a thread
    spilled: int  # bytes of a thread's stack
    shared: int  # bytes of a program's shared memory
    ptx: str

    def __str__(self) -> str:
        return f"{self.registers} registers, {self.spilled} bytes of stack, {self.shared} bytes shared"


def compiled(jobs: Sequence[Job]) -> list[Compiled]:
    """Compiles the kernels. Raises AssertionError with the compiler's message if it fails."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    given = json.dumps([asdict(job) for job in jobs])
    done = subprocess.run([sys.executable, __file__], input=given, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [Compiled(**one) for one in json.loads(done.stdout)]


def compile_here(job: Job) -> Compiled:
    """Compiles a kernel in this process, which must not have chosen the interpreter."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(import_module(job.module), job.kernel)
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = job.arguments[name]
        if isinstance(value, str) and re.match(r"\*|[iu]\d|fp|bf", value):
            signature[name], _, divisor = value.partition(":")
            if divisor:
                attributes[(index,)] = [["tt.divisibility", int(divisor)]]
        else:
            signature[name], constants[name] = "constexpr", value
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": job.warps, "num_stages": job.stages}
    made = triton.compile(source, target=GPUTarget("cuda", job.capability, 32), options=options)
    registers, spilled = resources(made.asm["cubin"])
    return Compiled(registers, spilled, made.metadata.shared, made.asm["ptx"])


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found is not None, told
    return int(found[1]), int(found[2])


def attend_variants(shape: Sequence[int], columns: int, lengths: Sequence[int]) -> list[list[str]]:
    """For each number of new tokens the kernels that `attend` launches for a row of this shape (query heads, key heads,
    head size) over a cache of so many columns: each name with a hash of what Triton compiles it for."""
    script = f"import compile_triton; compile_triton.print_variants({tuple(shape)}, {columns}, {list(lengths)})"
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: list[list[str]] = json.loads(done.stdout)
    return found


def instead_of_compiling(note: Callable[..., None]) -> None:
    """From now on Triton's launch path in this process, for an H100 that is not here, calls `note` with the arguments
    of `JITFunction._do_compile`, and compiles and launches nothing."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    JITFunction._do_compile = note
    driver.set_active(SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    ))  # fmt: skip


def print_variants(shape: Sequence[int], columns: int, lengths: Sequence[int]) -> None:
    """`attend_variants` in this process: Triton's own launch path up to the compiler, for a GPU that is not here."""
    import torch

    from specbench.kernels.attention import attend

    H, K, D = shape
    launched: list[str] = []
    instead_of_compiling(lambda self, key, *given: launched.append(f"{self.__name__} {hash(key)}"))
    keys, table, first = (
        torch.zeros(1, K, columns, D),
        torch.zeros(1, 1, dtype=torch.long),
        torch.zeros(1, dtype=torch.long),
    )
    found = []
    for N in lengths:
        attend(torch.zeros(1, N, H, D).transpose(1, 2), keys, keys, table, first, None, None, 1.0, None)
        found.append(launched[:])
        launched.clear()
    print(json.dumps(found))


if __name__ == "__main__":
    print(json.dumps([asdict(compile_here(Job(**job))) for job in json.load(sys.stdin)]))
