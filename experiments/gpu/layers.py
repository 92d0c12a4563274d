"""The kernels of layers on a device: python experiments/gpu/layers.py exact|bits|roof|profile

exact     each kernel against PyTorch in float64, and its bits over 1 to 64 rows
bits      p of a 3B model with random weights: one token at a time, six, sixteen, in batches, static and paged
roof      each product and attention beside the rate at which memory is read, also with other tiles
profile   the thirty longest kernels of a plain step and of a round's target call, and their sum

One JSON line a number. Without CUDA (TRITON_INTERPRET=1) shapes are tiny, and times say nothing.
"""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

from specbench.cache.paged import PagedCache
from specbench.cache.slots import StaticCache
from specbench.decoding.sampling import Sampling
from specbench.executors.cudagraph import CudaGraphExecutor
from specbench.executors.eager import EagerExecutor
from specbench.kernels import attention, fused
from specbench.models.language_model import LanguageModel

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
# hidden, intermediate, query heads, key heads, head size, vocabulary, layers
SHAPES = {
    "1B": (2048, 8192, 32, 8, 64, 128256, 16), "3B": (3072, 8192, 24, 8, 128, 128256, 28),
    "8B": (4096, 14336, 32, 8, 128, 128256, 32),
} if CUDA else {"3B": (64, 96, 4, 2, 16, 80, 2)}  # fmt: skip
ROWS = (1, 2, 6, 16, 17, 48, 64) if CUDA else (1, 6, 17)
CACHES = {"static": StaticCache, "paged": lambda rows, columns: PagedCache(rows, columns, 16)}
COLUMNS = 1024 if CUDA else 64


def say(check: str, what: str, value: Any) -> None:
    print(json.dumps({"check": check, "what": what, "value": value}), flush=True)


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(DTYPE)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """In float64, in parts: a whole output matrix would take a gigabyte."""
    return torch.cat([x.double() @ part.double().T for part in weight.split(16384)], -1)


def normed(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain.double()


def far(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right).norm() / right.norm())


def exact() -> None:
    for name, (H, inner, heads, key_heads, D, V, _) in SHAPES.items():
        gain, x = randn(H) / 10 + 1, randn(max(ROWS), H)
        weights = [randn(inner, H, scale=H**-0.5) for _ in range(2)]
        back, head = randn(H, inner, scale=inner**-0.5), randn(V, H, scale=H**-0.5)
        mixed = randn(max(ROWS), inner)
        y = normed(x, gain, 1e-5)
        first, second = linear(y, weights[0]), linear(y, weights[1])
        right = {"gate": torch.nn.functional.silu(first) * second, "add": x.double() + linear(mixed, back),
                 "logits": linear(y, head)}  # fmt: skip
        kept: dict[str, Tensor] = {}
        for rows in ROWS[::-1]:
            stream = fused.begin(x[:rows], head, gain)
            found = {
                "gate": fused.gate(stream, (weights[0], weights[1]), (None, None), 1e-5, fused.SILU),
                "add": fused.add(mixed[:rows], back, None, stream, gain).x,
                "logits": fused.logits(stream, head, None, 1e-5),
            }
            for kernel, value in found.items():
                say("exact", f"{name} {kernel} {rows} rows", far(value, right[kernel][:rows]))
                whole = kept.setdefault(kernel, value)
                say("exact", f"{name} {kernel} {rows} rows have the bits of {len(whole)}", value.equal(whole[:rows]))
        attends(name, heads, key_heads, D)


def attends(name: str, heads: int, key_heads: int, D: int) -> None:
    N, T = 6, COLUMNS - 10
    q, keys, values = randn(1, heads, N, D), randn(1, key_heads, COLUMNS, D), randn(1, key_heads, COLUMNS, D)
    table, first = torch.zeros(1, 1, dtype=torch.long, device=DEVICE), torch.tensor([T - N], device=DEVICE)
    found = attention.attend(q, keys, values, table, first, None, None, D**-0.5, None)
    k, v = (t[:, :, :T].double().repeat_interleave(heads // key_heads, 1) for t in (keys, values))
    scores = (q.double() @ k.mT * D**-0.5).masked_fill(
        torch.ones(N, T, device=DEVICE).triu(T - N + 1).bool(), -torch.inf
    )
    say("exact", f"{name} attention {N} tokens", far(found, (scores.softmax(-1) @ v).transpose(1, 2)))
    one = attention.attend(q[:, :, :1], keys, values, table, first, None, None, D**-0.5, None)
    say("exact", f"{name} attention 1 token has the bits of {N}", one.equal(found[:, :1]))


def module_of(name: str) -> Any:
    H, inner, heads, key_heads, D, V, layers = SHAPES[name]
    config = transformers.LlamaConfig(
        hidden_size=H, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=key_heads, head_dim=D,
        vocab_size=V, num_hidden_layers=layers, max_position_embeddings=8192, tie_word_embeddings=True,
        attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device(DEVICE):
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPE)
    return made.eval()


def model_of(module: Any, cache: str = "static", executor: Any = None, rows: int = 1) -> LanguageModel:
    model = LanguageModel(module, None, name="random", sampling=Sampling(), new_cache=CACHES[cache],
                          executor=executor or EagerExecutor(), attention="triton")  # fmt: skip
    assert model.fused is not None, "the module is not recognised"
    model.allocate(rows, COLUMNS)
    model.cache.reserve([COLUMNS] * rows)
    return model


def bits() -> None:
    module = module_of("3B")
    text = torch.randint(0, SHAPES["3B"][5], (4, COLUMNS // 2), device=DEVICE)
    start = COLUMNS // 2 - 16

    def p(model: LanguageModel, rows: int, begin: int, end: int) -> Tensor:
        first = torch.full((rows,), begin, device=DEVICE)
        return model.forward(text[:rows, begin:end], first, COLUMNS).softmax(-1)

    def read(model: LanguageModel, rows: int = 1) -> LanguageModel:
        for begin in range(0, start, 16):  # by the kernels themselves
            p(model, rows, begin, min(begin + 16, start))
        return model

    one = read(model_of(module))
    right = torch.cat([p(one, 1, start + i, start + i + 1) for i in range(16)], 1)
    for count in (2, 6, 16):
        say("bits", f"{count} tokens at once", p(one, 1, start, start + count).equal(right[:, :count]))
    for cache in CACHES:
        for rows in (1, 2, 4):
            other = read(model_of(module, cache, rows=rows), rows)
            say("bits", f"6 tokens of {rows} rows, {cache}", p(other, rows, start, start + 6)[:1].equal(right[:, :6]))
    by_rows = torch.cat([module(text[:1, : start + 1 + i]).logits[:, -1:].float().softmax(-1) for i in (0, 5)], 1)
    say("bits", "total variation from the stock module", float((by_rows - right[:, [0, 5]]).abs().sum(-1).max() / 2))


def seconds(function: Callable[[int], Any], turns: int) -> float:
    """Of one call, in a graph of `turns` calls, which are numbered: each may use other weights."""
    if not CUDA:
        begin = time.perf_counter()
        function(0)
        return time.perf_counter() - begin
    for turn in range(turns):
        function(turn)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for turn in range(turns):
            function(turn)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    start.record()
    for _ in range(5):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 5e3 / turns


def roof() -> None:
    large = torch.empty(2**30 if CUDA else 2**16, dtype=torch.int16, device=DEVICE)
    rate = large.nbytes / seconds(lambda turn: large.sum(), 3)
    say("roof", "bytes read a second", rate)
    for name in [name for name in SHAPES if name != "8B"]:
        H, inner, heads, key_heads, D, V, _ = SHAPES[name]
        products = {"o": (H, heads * D), "down": (H, inner), "gate": (inner, H), "head": (V, H)}
        for kernel, (columns, inputs) in products.items():
            copies = 2 if kernel == "head" or not CUDA else 12  # more than a cache holds
            weights = [randn(columns, inputs) for _ in range(copies * (1 + (kernel == "gate")))]
            for rows in (1, 6, 16):
                timed(f"{name} {kernel} {rows} rows", kernel, weights, rows, H, rate, copies)
            if CUDA and kernel != "head":
                tiles(f"{name} {kernel} 6 rows", kernel, weights, H, rate, copies)
        keys = [randn(1, key_heads, COLUMNS, D) for _ in range(2)]
        table, first = torch.zeros(1, 1, dtype=torch.long, device=DEVICE), torch.tensor([COLUMNS - 20], device=DEVICE)
        for N in (1, 6):
            q = randn(1, heads, N, D)
            run = lambda turn, q=q: attention.attend(q, *keys, table, first, None, None, 0.1, None)  # noqa: B023, E731
            say("roof", f"{name} attention {N} tokens, {COLUMNS} columns, microseconds", 1e6 * seconds(run, 20))


def timed(what: str, kernel: str, weights: list[Tensor], rows: int, H: int, rate: float, copies: int) -> None:
    """The share of the roof that a product reaches."""
    x, stream = randn(rows, weights[0].shape[1]), fused.begin(randn(rows, H), randn(1, H), randn(H))
    calls: dict[str, Callable[[int], Any]] = {
        "gate": lambda i: fused.gate(stream, (weights[2 * i], weights[2 * i + 1]), (None, None), 1e-5, fused.SILU),
        "head": lambda i: fused.logits(stream, weights[i], None, 1e-5),
    }
    run = calls.get(kernel, lambda i: fused.add(x, weights[i], None, stream, stream.x[0]))
    spent = seconds(run, copies)
    bytes_read = weights[0].nbytes * (1 + (kernel == "gate"))
    say("roof", what, {"microseconds": 1e6 * spent, "share": bytes_read / spent / rate})


def tiles(what: str, kernel: str, weights: list[Tensor], H: int, rate: float, copies: int) -> None:
    """The same with other tiles."""
    before = fused.columns_of_tile, fused.STAGE, fused.STAGES
    for BN in (16, 32, 64):
        for stage, stages in ((2**13, 4), (2**14, 3), (2**14, 5), (2**15, 3)):
            fused.columns_of_tile = lambda *given, BN=BN: BN
            fused.STAGE, fused.STAGES = stage, stages
            try:
                timed(f"{what}, BN={BN} stage={stage} stages={stages}", kernel, weights, 6, H, rate, copies)
            except Exception as error:
                say("roof", f"{what}, BN={BN} stage={stage} stages={stages}", str(error)[:80])
    fused.columns_of_tile, fused.STAGE, fused.STAGES = before


def profile() -> None:
    model = model_of(module_of("3B"), executor=CudaGraphExecutor() if CUDA else None)
    activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if CUDA else [])]
    for count in (1, 6):
        tokens, first = (
            torch.ones(1, count, dtype=torch.long, device=DEVICE),
            torch.tensor([500 % COLUMNS], device=DEVICE),
        )
        if not CUDA:
            first[:] = 20
        call = model.executor.compiled(model.forward, model)
        for _ in range(3):
            call(tokens, first, COLUMNS)
        turns = 10 if CUDA else 1
        say("profile", f"seconds of {count} tokens", seconds(lambda turn, n=count: call(tokens, first, COLUMNS), 1))  # noqa: B023
        with torch.profiler.profile(activities=activities) as found:
            for _ in range(turns):
                call(tokens, first, COLUMNS)
            if CUDA:
                torch.cuda.synchronize()
        spent: dict[str, list[float]] = defaultdict(list)
        for event in found.events():
            if str(event.device_type).endswith("CUDA"):
                spent[event.name].append(event.device_time)
        order = sorted(spent, key=lambda name: -sum(spent[name]))[:30]
        rows = {name[:60]: (len(spent[name]) / turns, sum(spent[name]) / turns) for name in order}
        total = sum(map(sum, spent.values())) / turns
        say("profile", f"{count} tokens: microseconds in all, and by kernel (count, sum)", [total, rows])


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    {"exact": exact, "bits": bits, "roof": roof, "profile": profile}[sys.argv[1]]()
