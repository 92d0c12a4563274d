"""What Triton kernels take of a GPU that is not here: those of attention for the shapes of all named models.

    python tests/kernel_table.py llama3b

prints the table of docs/gpu.md. `attend` is called as a forward calls it, and Triton's own launch path chooses what
each kernel is compiled for; only the launch is left out. A process of its own compiles, as in `compile_triton`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CAPABILITIES = (80, 90)
COLUMNS, BLOCK = 4096, 16


@dataclass(frozen=True)
class Shape:
    """Heads that attend alike, and the sliding window of some of the layers."""

    heads: int
    key_heads: int
    size: int
    window: int | None = None

    def __str__(self) -> str:
        window = "" if self.window is None else f", window {self.window:,}"
        return f"{self.heads} / {self.key_heads} x {self.size}{window}"


@dataclass(frozen=True)
class Call:
    """New tokens of a row: a chain, or a tree and its root."""

    tokens: int
    tree: bool = False

    def __str__(self) -> str:
        return f"tree of {self.tokens - 1}" if self.tree else f"{self.tokens} token{'s' * (self.tokens > 1)}"


CALLS = (Call(1), Call(6), Call(512), Call(6, True), Call(17, True), Call(65, True))


@dataclass(frozen=True)
class Made:
    """A kernel that was compiled."""

    kernel: str
    shape: Shape
    call: Call
    paged: bool
    capability: int
    warps: int
    registers: int  # of a thread
    stack: int  # bytes of a thread, to which registers are spilled
    shared: int  # bytes of a program


def named_shapes() -> dict[Shape, list[str]]:
    """The shapes of the models in conf/target and conf/drafter that may use the kernel, and their names."""
    import yaml

    found: dict[Shape, list[str]] = {}
    for file in sorted(ROOT.glob("conf/target/*.yaml")) + sorted(ROOT.glob("conf/drafter/*.yaml")):
        given = yaml.safe_load(file.read_text())
        shipped = str(given.get("path", "")).removeprefix("shipped:")
        config = ROOT / "specbench" / "shipped" / shipped / "config.json"
        shape = given.get("shape") or (json.loads(config.read_text()) if shipped and config.is_file() else {})
        if not isinstance(shape, dict) or shape.get("is_encoder_decoder") or shape.get("model_type") in (None, "t5"):
            continue
        heads = shape.get("num_attention_heads") or shape.get("n_head")
        if heads is None:
            continue
        size = shape.get("head_dim") or (shape.get("hidden_size") or shape["n_embd"]) // heads
        window = shape.get("sliding_window") if shape["model_type"] == "gemma3_text" else None
        key_heads = shape.get("num_key_value_heads") or heads
        for each in {None, window}:
            names = found.setdefault(Shape(heads, key_heads, size, each), [])
            if file.stem not in names:
                names.append(file.stem)
    return found


def alike(shapes: dict[Shape, list[str]]) -> dict[Shape, list[str]]:
    """One of the shapes for which the kernels differ in the grid alone, with the names of all of them."""
    found: dict[tuple[Any, ...], Shape] = {}
    for shape in shapes:
        found.setdefault((shape.heads // shape.key_heads, shape.size, shape.window), shape)
    names = {first: list[str]() for first in found.values()}
    for shape, own in shapes.items():
        names[found[shape.heads // shape.key_heads, shape.size, shape.window]] += own
    return {shape: sorted(set(own)) for shape, own in names.items()}


def measured(shapes: list[Shape], capabilities: tuple[int, ...] = CAPABILITIES, change: str = "") -> list[Made]:
    """What the kernels of these shapes take, behind a `change` in Python. Raises AssertionError with the compiler's
    message if it fails."""
    rows = in_a_process(change, "main_of_process", [[asdict(shape) for shape in shapes], capabilities])
    return [Made(**row | {"shape": Shape(**row["shape"]), "call": Call(**row["call"])}) for row in rows]


def in_a_process(change: str, function: str, given: Any) -> list[Any]:
    """What a function of this module prints in a process without the interpreter, which gets `given`."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "-c", f"import kernel_table\n{change}\nkernel_table.{function}()"]
    done = subprocess.run(command, input=json.dumps(given), env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    """Prints registers of a thread, bytes of its stack and of a program's shared memory, on both GPUs; of attention the
    most over the models that are named on the command line, and both caches."""
    found: dict[tuple[str, str], dict[int, list[int]]] = {}
    wanted = {*sys.argv[1:]}  # models; none are all
    shapes = [shape for shape, names in alike(named_shapes()).items() if not wanted or wanted & {*names}]
    taken = [(f"`{m.kernel}`", str(m.call), m.capability, m.registers, m.stack, m.shared) for m in measured(shapes)]
    for kernel, what, capability, *used in [*taken, *in_a_process("", "others_of_process", CAPABILITIES)]:
        of = found.setdefault((kernel, what), {}).setdefault(capability, used)
        of[:] = map(max, of, used)
    print("| kernel | call |", *(f"sm_{c}: registers | stack | shared |" for c in CAPABILITIES))
    print("|---|---|" + "---|---|---|" * len(CAPABILITIES))
    for (kernel, what), by in found.items():
        print(f"| {kernel} | {what} |", *(f"{number:,} |" for c in CAPABILITIES for number in by[c]))


def other_calls(B: int, N: int, V: int, K: int) -> dict[str, Callable[[], Any]]:
    """Calls of the kernels of sampling and of few bits, for a round of B rows and N guesses, a vocabulary of V and a
    weight [K, K] in bfloat16."""
    import torch

    from specbench.executors.quant_grids import GRIDS
    from specbench.executors.quantized_linear import packed_weight
    from specbench.kernels import few_bits, race, softmax, verdict

    p, x, weight = torch.empty(B, N + 1, V), torch.empty(B * (N + 1), K, dtype=torch.bfloat16), torch.zeros(K, K)
    ids, r = torch.empty(B, N + 1, dtype=torch.long), torch.empty(B, N, dtype=torch.float64)
    calls = {"softmax": lambda: softmax.triton_softmax(p), "draw": lambda: race.triton_race(p, ids),
             "verdict": lambda: verdict.triton_verdict(p, p[:, :N], ids[:, :N], r, ids, ids[:, 0])}  # fmt: skip
    if not N:
        del calls["verdict"]
    for grid in GRIDS.values():
        parts = packed_weight(grid, weight)
        calls[f"product of {grid.name}"] = lambda parts=parts, name=grid.name: few_bits.multiply(
            x, *parts, name == "fp8"
        )
    return calls


def others_of_process() -> None:
    """Compiles the kernels of sampling and of few bits, for a round of 5 guesses, a vocabulary of 128,256 and a weight
    [4096, 4096]; prints a line for each."""
    import torch

    launched, calls = listen(), other_calls(1, 5, 128_256, 4096)
    for capability in json.load(sys.stdin):
        torch.cuda.get_device_capability = lambda device, of=capability: divmod(of, 10)  # type: ignore[assignment]
        for name, call in calls.items():
            launched.clear()
            call()
            for kernel, source, options in launched:
                print(json.dumps([f"`{kernel}`", name, capability, *compiled_for(capability, source, options)]))


def variants_of_process() -> None:
    """Prints, for rounds of so many rows and guesses, each call of the kernels of sampling and of few bits, and a hash
    of what Triton would compile its kernels for."""
    import torch

    launched = listen()
    torch.cuda.get_device_capability = lambda device: (9, 0)  # type: ignore[assignment]
    for rows, guesses in json.load(sys.stdin):
        for name, call in other_calls(rows, guesses, 4096, 512).items():
            launched.clear()
            call()
            print(json.dumps([name, *(f"{kernel} {source.hash()}" for kernel, source, _ in launched)]))


def main_of_process() -> None:
    """Compiles what it is told on standard input; prints a line for each kernel."""
    shapes, capabilities = json.load(sys.stdin)
    launched = listen()
    for capability in capabilities:
        for shape in shapes:
            for made in compile_all(Shape(**shape), capability, launched):
                print(json.dumps(asdict(made)), flush=True)


def listen() -> list[tuple[str, Any, Any]]:
    """The list that gets name, source and options of each kernel that would be compiled from now on."""
    import triton
    from compile_triton import instead_of_compiling

    launched: list[tuple[str, Any, Any]] = []

    def note(self: Any, key: Any, signature: Any, device: Any, constants: Any, options: Any, attributes: Any, _: Any):
        source = triton.compiler.ASTSource(self, signature, constants, attributes)
        launched.append((self.__name__, source, options.__dict__))

    instead_of_compiling(note)
    return launched


def compile_all(shape: Shape, capability: int, launched: list[tuple[str, Any, Any]]) -> Iterator[Made]:
    """The kernels of a shape, by call."""
    done: dict[str, tuple[int, int, int]] = {}
    for call in CALLS:
        for paged in (False, True):
            launched.clear()
            attend_once(shape, call, paged)
            for name, source, options in launched:
                if (key := f"{source.hash()} {options['num_warps']}") not in done:
                    done[key] = compiled_for(capability, source, options)
                yield Made(name, shape, call, paged, capability, options["num_warps"], *done[key])


def compiled_for(capability: int, source: Any, options: Any) -> tuple[int, int, int]:
    """Registers of a thread, bytes of its stack and of a program's shared memory."""
    import triton
    from compile_triton import resources
    from triton.backends.compiler import GPUTarget

    options = {"num_warps": options["num_warps"], "num_stages": options["num_stages"]}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return *resources(made.asm["cubin"]), made.metadata.shared


def attend_once(shape: Shape, call: Call, paged: bool) -> None:
    """Calls `attend` in bfloat16 as a forward of one row calls it."""
    import torch

    from specbench.decoding.token_tree import static_tree
    from specbench.kernels.attention import attend

    N, H, K, D = call.tokens, shape.heads, shape.key_heads, shape.size
    if paged:
        stored = torch.empty(COLUMNS // BLOCK + 1, BLOCK, K, D, dtype=torch.bfloat16).transpose(1, 2)
        table = torch.zeros(1, COLUMNS // BLOCK, dtype=torch.long)
    else:
        stored, table = torch.empty(1, K, COLUMNS, D, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.long)
    q = torch.empty(1, N, H, D, dtype=torch.bfloat16).transpose(1, 2)
    tree = static_tree((-1,) * (N - 1), torch.device("cpu")) if call.tree else None
    sees, depth = (None, None) if tree is None else (tree.sees, tree.depth)
    attend(q, stored, stored, table, torch.zeros(1, dtype=torch.long), sees, depth, D**-0.5, shape.window)


if __name__ == "__main__":
    main()
