"""The product of specbench/kernels/half_pairs.cpp, compiled once on a machine by its C++ compiler."""

import ctypes
import functools
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from specbench.errors import first_line
from specbench.executors.machine import cache_dir, cpu_features, only_own

log = logging.getLogger(__name__)
SOURCE = Path(__file__).parents[1] / "kernels" / "half_pairs.cpp"
BUILD_FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
COMPILERS = ("g++", "c++", "clang++")
DIGEST_BYTES = 32


@functools.cache
def half_pairs() -> Callable[..., None] | None:
    """The compiled function, from the cache if it is there; None without a compiler that can make it, or where others
    can write into the folder."""
    for compiler in compilers():
        try:
            found = ctypes.CDLL(str(compiled(compiler))).half_pairs
        except (OSError, AttributeError, subprocess.CalledProcessError) as error:
            log.info("the product half_pairs cannot be compiled by %s: %s", shlex.join(compiler), first_line(error))
            continue
        pointer, long = ctypes.c_void_p, ctypes.c_long
        found.argtypes, found.restype = [pointer] * 3 + [long] * 3 + [ctypes.c_float, ctypes.c_int], None
        return found
    return None


def compilers() -> list[list[str]]:
    """Compilers with their arguments, in the order in which they are tried: that of CXX, then those of the machine."""
    try:
        given = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:  # a quotation mark without its other one
        log.info("CXX is not used: %s", error)
        given = []
    return [command for command in (given, *([name] for name in COMPILERS if shutil.which(name))) if command]


def compiled(compiler: Sequence[str]) -> Path:
    """The library that this compiler makes, behind which its digest stands. Raises OSError or CalledProcessError."""
    name = hashlib.sha256(f"{SOURCE.read_text()} {compiler} {BUILD_FLAGS} {cpu_features()}".encode()).hexdigest()[:16]
    path = cache_dir() / "kernels" / f"half_pairs-{name}.so"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not only_own(path.parent):
        raise PermissionError(f"{path.parent} is not yours alone")
    if path.is_file() and only_own(path) and path.read_bytes() == with_digest(path.read_bytes()[:-DIGEST_BYTES]):
        return path
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        subprocess.run([*compiler, *BUILD_FLAGS, str(SOURCE), "-o", str(temporary)], check=True, capture_output=True)
        temporary.write_bytes(with_digest(temporary.read_bytes()))
        temporary.chmod(0o700)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def with_digest(content: bytes) -> bytes:
    """To load a library of which the end is missing can end the process."""
    return content + hashlib.sha256(content).digest()
