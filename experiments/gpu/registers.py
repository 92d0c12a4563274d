"""Registers, spills and shared memory of the Triton kernels at the shapes of named models, without a GPU.

    python experiments/gpu/registers.py [sm_80 sm_90]

The kernels' own launches are called on tensors without values, under a driver that launches nothing. So what is
compiled is what would be: static caches and chains, trees, paged caches. Other numbers of new tokens and rows must need
no other binary. Spills are local loads and stores in the machine code, HMMA and HGMMA products of tensor cores, LDGSTS
copies to shared memory that are not waited for.
"""

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
SHAPES = {  # hidden, intermediate, query heads, key heads, head size, vocabulary, norms of heads, biases
    "1B": (2048, 8192, 32, 8, 64, 128256, False, False),
    "3B": (3072, 8192, 24, 8, 128, 128256, False, False),
    "8B": (4096, 14336, 32, 8, 128, 128256, False, False),
    "70B": (8192, 28672, 64, 8, 128, 128256, False, False),
    "70B, one of 8 ranks": (8192, 3584, 8, 1, 128, 16032, False, False),
    "Qwen3-8B": (4096, 12288, 32, 8, 128, 151936, True, False),
    "Qwen2-7B": (3584, 18944, 28, 4, 128, 152064, False, True),
    "SmolLM2-135M": (576, 1536, 9, 3, 64, 49152, False, False),
}


class Made:
    """What was compiled: a driver's functions, which load nothing."""

    def __init__(self) -> None:
        self.found: dict[str, list[dict[str, int]]] = defaultdict(list)

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary)
            file.flush()
            usage = subprocess.run([TOOL, "-res-usage", file.name], capture_output=True, text=True).stdout
            code = subprocess.run([TOOL, "-sass", file.name], capture_output=True, text=True).stdout
        registers, stack = (int(n) for n in re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
        counts = {name: len(re.findall(rf"\b{name}\b", code)) for name in ("HMMA", "HGMMA", "LDGSTS")}
        spills = len(re.findall(r"\b(?:LDL|STL)\b", code))
        self.found[name].append({"registers": registers, "stack": stack, "spills": spills, "shared": shared, **counts})
        return 1, 1, registers, spills, 1024

    def unload_module(self, module: int) -> None:
        pass

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 166_912 if capability() < 90 else 232_448, "multiprocessor_count": 132,
                "warpSize": 32, "sm_clock_rate": 1, "mem_clock_rate": 1, "mem_bus_width": 1}  # fmt: skip


class Launcher:
    def __init__(self, *given: object):
        pass

    def __call__(self, *given: object) -> None:
        pass


class NoDevice:
    """A driver of Triton that compiles for `target` and launches nothing."""

    launcher_cls, target = Launcher, GPUTarget("cuda", 90, 32)

    def __init__(self, made: Made):
        self.utils = made

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind


def capability() -> int:
    return NoDevice.target.arch


def forward(shape: tuple, dtype: torch.dtype, b: int, N: int, block: int | None, tree: bool) -> None:
    """One layer and the output matrix, as `FusedStep` calls them."""
    from specbench.kernels import attention, fused

    H, inner, heads, key_heads, D, V, norms, biases = shape
    empty = lambda *sizes, dtype=dtype: torch.empty(*sizes, dtype=dtype)  # noqa: E731
    widths, columns = (heads * D, key_heads * D, key_heads * D), 4096
    gain = empty(D)
    made = fused.Heads(
        tuple(empty(w, H) for w in widths), tuple(empty(w) for w in widths) if biases else None,
        (gain, 1e-6) if norms else None, (gain, 1e-6) if norms else None, 1e-6, D,
    )  # fmt: skip
    if block is None:
        keys = values = empty(b, key_heads, columns, D)
        table = torch.empty(b, 1, dtype=torch.long)
    else:
        keys = values = empty(b * columns // block + 1, block, key_heads, D).transpose(1, 2)
        table = torch.empty(b, columns // block, dtype=torch.long)
    sees = torch.ones(1, N, N, dtype=torch.bool) if tree else None
    depth = torch.zeros(1, N, dtype=torch.long) if tree else None
    first, angles = torch.empty(b, dtype=torch.long), (empty(columns, D), empty(columns, D))
    places = fused.Places((b, N), first, table, angles, sees, depth)
    stream = fused.begin(torch.empty(b * N, dtype=torch.long), empty(V, H), empty(H))
    q = fused.project(stream, made, places, keys, values)
    mixed = attention.attend(q, keys, values, table, first, sees, depth, D**-0.5, None)
    stream = fused.add(mixed.view(b * N, -1), empty(H, heads * D), None, stream, empty(H))
    gated = fused.gate(stream, (empty(inner, H), empty(inner, H)), (None, None), 1e-6, fused.SILU)
    stream = fused.add(gated, empty(H, inner), None, stream, empty(H))
    fused.logits(stream, empty(V, H), None, 1e-6)


def samples(N: int, V: int) -> None:
    """Probabilities, draws, and the verdicts on a chain of N guesses, drawn from q or from point masses."""
    from specbench.kernels import race, softmax, verdict

    bits, count = torch.empty(1, N + 1, dtype=torch.long), torch.empty(1, dtype=torch.long)
    limits = torch.empty(1, N, dtype=torch.float64)
    p = softmax.triton_softmax(torch.empty(1, N + 1, V, dtype=torch.float32))
    race.triton_race(p, bits)
    for q in (p[:, :-1], None):
        verdict.triton_verdict(p, q, bits[:, :-1], limits, bits, count)


def main(targets: list[str]) -> None:
    """Prints the table."""
    from specbench.kernels import attention, fused, race, softmax, verdict

    made = Made()
    driver.set_active(NoDevice(made))
    print(f"`python experiments/gpu/registers.py`, triton {triton.__version__}\n")
    print("| target | model | kernel | registers | stack | spills | shared bytes | HMMA | HGMMA | LDGSTS |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for target in targets:
        NoDevice.target = GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
        for name, shape in SHAPES.items():
            made.found.clear()
            for module in (fused, attention, race, softmax, verdict):
                for kernel in (part for part in vars(module).values() if isinstance(part, triton.JITFunction)):
                    kernel.device_caches.clear()
            for b, N, block, tree in ((1, 1, None, False), (1, 13, None, True), (1, 6, 16, False)):
                forward(shape, torch.bfloat16, b, N, block, tree)
            needed = sum(map(len, made.found.values()))
            for b, N in ((1, 6), (8, 6), (1, 16), (1, 2), (3, 1)):  # other numbers of rows need no other binary
                forward(shape, torch.bfloat16, b, N, None, False)
            assert sum(map(len, made.found.values())) == needed
            samples(5, shape[5])
            rows = [(target, name, kernel, *one.values()) for kernel, found in made.found.items() for one in found]
            for row in dict.fromkeys(rows):
                print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main(sys.argv[1:] or ["sm_80", "sm_90"])
