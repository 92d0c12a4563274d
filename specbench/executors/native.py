"""The product of specbench/kernels/half_pairs.cpp, compiled once on a machine by its C++ compiler."""

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from specbench.errors import first_line
from specbench.executors.machine import cache_dir, cpu_features

log = logging.getLogger(__name__)
SOURCE = Path(__file__).parents[1] / "kernels" / "half_pairs.cpp"
FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
COMPILERS = ("g++", "c++", "clang++")


@functools.cache
def half_pairs() -> Callable[..., None] | None:
    """The compiled function, from the cache if it is there; None without a compiler that can make it."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, COMPILERS), None)
    if compiler is None:
        return None
    name = hashlib.sha256(f"{SOURCE.read_text()} {compiler} {FLAGS} {cpu_features()}".encode()).hexdigest()[:16]
    path = cache_dir() / "kernels" / f"half_pairs-{name}.so"
    try:
        if not path.is_file() or path.stat().st_uid != os.getuid():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary = path.with_suffix(f".{os.getpid()}.tmp")
            subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(temporary)], check=True, capture_output=True)
            os.replace(temporary, path)
        found = ctypes.CDLL(str(path)).half_pairs
    except (OSError, subprocess.CalledProcessError) as error:
        log.info("the product half_pairs cannot be compiled: %s", first_line(error))
        return None
    pointer, long = ctypes.c_void_p, ctypes.c_long
    found.argtypes, found.restype = [pointer] * 3 + [long] * 3 + [ctypes.c_float, ctypes.c_int], None
    return found
