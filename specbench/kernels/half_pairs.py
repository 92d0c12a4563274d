"""The CPU product of kernels/half_pairs.cpp as the operator `specbench::half_pairs`, compiled once on a machine.

Weights are stored in float16, all arithmetic is in float32. The result of a row does not depend on the other rows.
"""

import hashlib
import logging
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

log = logging.getLogger(__name__)
SOURCE = Path(__file__).with_suffix(".cpp")
TORCH = Path(torch.__file__).parent
OLDEST_TORCH = 0x020B000000000000  # 2.11, whose stable interface the source uses
FLAGS = ("-std=c++20", "-O3", "-march=native", "-shared", "-fPIC", f"-DTORCH_TARGET_VERSION={OLDEST_TORCH:#x}",
         f"-I{TORCH / 'include'}", f"-L{TORCH / 'lib'}", "-ltorch_cpu")  # fmt: skip
COMPILERS = ("g++", "c++", "clang++")
PAIR, LINE = 2, 16  # rows and numbers that the source reads in turn


@cache
def load_operator(folder: Path) -> bool:
    """Makes the operator known to PyTorch, by a library in the folder that is compiled if missing; returns whether."""
    return any(_load_by(compiler, folder) for compiler in compilers())


def _load_by(compiler: Sequence[str], folder: Path) -> bool:
    try:
        torch.ops.load_library(compiled(compiler, folder))
        torch.library.register_fake("specbench::half_pairs", shape_of_result)
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        log.info("half_pairs cannot be compiled by %s: %s", shlex.join(compiler), str(error).partition("\n")[0])
        return False
    return True


def compilers() -> list[list[str]]:
    """Compilers with their arguments, in the order in which they are tried: that of CXX, then those of the machine."""
    given = shlex.split(os.environ.get("CXX", ""))
    return [*([given] if given else []), *([name] for name in COMPILERS if shutil.which(name))]


def compiled(compiler: Sequence[str], folder: Path) -> Path:
    """The library that this compiler makes. Raises OSError or CalledProcessError."""
    digest = hashlib.sha256(f"{SOURCE.read_text()} {compiler} {FLAGS} {torch.__version__}".encode()).hexdigest()[:16]
    path = folder / f"half_pairs-{digest}.so"
    if path.is_file():
        return path
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        subprocess.run([*compiler, str(SOURCE), *FLAGS, "-o", str(temporary)], check=True, capture_output=True)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def packed(weight: Tensor) -> Tensor:
    """A weight [N, K] as the source reads it: [N / 2, K / 16, 2, 16] in float16. N is even, K a multiple of 16."""
    pairs = weight.half().view(-1, PAIR, weight.shape[1] // LINE, LINE)
    return pairs.transpose(1, 2).contiguous()


def shape_of_result(
    x: Tensor, packed: Tensor, bias: Tensor | None, factor: float, gain: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """A tensor with the shape of factor * x [..., K] w [N, K]^T + bias [N]: [..., N]."""
    return x.new_empty(*x.shape[:-1], PAIR * packed.shape[0])
