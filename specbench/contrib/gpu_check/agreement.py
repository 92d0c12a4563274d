"""Whether graphs and Triton kernels compute what eager mode and plain PyTorch do."""

from collections.abc import Iterator

import torch
from torch.nn import functional as F

from specbench.config.components import Components
from specbench.contrib.gpu_check.bench import GRAPHS, UNCAPTURED, Bench, Measured, jobs_of, profiled, time_call
from specbench.decoding.draft import Draft
from specbench.decoding.sampling import draw
from specbench.decoding.verify import speculative_sampling
from specbench.kernels import has_triton, ops
from specbench.models import kernel_attention
from specbench.run.decoder import Session
from specbench.stats.records import DecodeResult

SHORT = ("data.limit=8", "max_new_tokens=64")
LENGTH, NEW = 100, 200  # tokens of a prompt, and new ones: three buckets of columns
SAMPLED = (*((rows, t, "sdpa") for rows in (1, 2) for t in (0, 1)), (2, 1, "auto"))
GREEDY = (("static", "stdlib"), ("paged", "stdlib"), ("static", "tree"))
NONE = ("<=", 0.0)  # the limit of what must not happen
V, GAMMA, ROWS = 128_256, 5, 64
HEADS, KV_HEADS, SIZE = 24, 8, 128  # of the 3B shape
COLUMNS = (128, 1024, 4096)


def graphs_and_eager(bench: Bench) -> Iterator[Measured]:
    """Texts and betas of graphs against the same functions on the same shapes, and greedy texts against eager mode, all
    in float32."""
    cases: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
        (("gamma=5", f"batch_size={rows}", f"temperature={t}", f"attention={attention}"), UNCAPTURED)
        for rows, t, attention in SAMPLED
    ]
    cases += [((f"cache={c}", f"drafter={d}", "temperature=0", "batch_size=2"), ("executor=eager",)) for c, d in GREEDY]
    for overrides, other in cases:
        parts = [bench.parts("dtype=float32", *overrides, *way) for way in ((GRAPHS,), other)]
        decodes = [_decoded(each, 4) for each in parts]
        ours, theirs = ([list(request.tokens) for request in decode.requests] for decode in decodes)
        where = ", ".join(overrides)
        differ = sum(a != b for a, b in zip(ours, theirs, strict=True))
        yield Measured(f"texts that differ, {where}", differ, f"of {len(ours)}", NONE)
        left = parts[0].target.executor.facts()["not_captured"]
        yield Measured(f"functions that could not be captured, {where}", len(left), "; ".join(left.values()), NONE)
        if other is UNCAPTURED:
            yield Measured(f"largest difference of a beta, {where}", _beta_difference(*decodes), "", ("<=", 1e-4))


def whole_runs(bench: Bench) -> Iterator[Measured]:
    """Runs of the included pair to their end, by the default executor: their verdicts, and how far p is from the stock
    module's, in share of what rounding explains."""
    from specbench.run.run import run  # needs pydantic, as no other check does

    for dtype in ("float32", "bfloat16"):
        for temperature in (0, 1):
            overrides = (f"dtype={dtype}", f"temperature={temperature}", *SHORT)
            result, _ = run(bench.parts(*overrides), bench.folder / f"{dtype}_{temperature}")
            found, where = result.lossless, ", ".join(overrides[:2])
            passed = None if found.passed is None else float(found.passed)
            yield Measured(f"verdict passed, {where}", passed, "", (">=", 1.0), found.reason or str(found.detail))
            share = None if found.decoder_tv is None else found.decoder_tv.quantiles["1"]
            yield Measured(f"largest distance of p over its limit, {where}", share, "", ("<=", 1.0))
            yield Measured(f"alpha, {where}", result.alpha.mean)


def _decoded(parts: Components, count: int) -> DecodeResult:
    """Decodes `count` texts speculatively, with everything that is recorded."""
    return Session(parts).decode(jobs_of(parts, count, LENGTH, NEW), True, LENGTH + NEW + parts.spare)


def _beta_difference(ours: DecodeResult, theirs: DecodeResult) -> float:
    """The largest difference between betas of the same round; 1 if rounds differ in their counts."""
    counts = [[(r.row, r.position, r.gamma, r.accepted, r.tested, r.tokens) for r in found.rounds]
              for found in (ours, theirs)]  # fmt: skip
    if counts[0] != counts[1]:
        return 1.0
    pairs = zip(ours.rounds, theirs.rounds, strict=True)
    return max(abs(a - b) for r, s in pairs for a, b in zip(r.beta, s.beta, strict=True))


def kernels_and_torch(bench: Bench) -> Iterator[Measured]:
    """The Triton kernels against plain PyTorch: sampling against the CPU, attention against SDPA in float32."""
    if not has_triton():
        yield Measured("Triton kernels", None, "", NONE, "triton is not installed")
        return
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(ROWS, GAMMA + 1, V, generator=generator)
    p = logits.double().softmax(-1).float()  # in float32 the CPU's own is off by 1e-5
    q = (logits[:, :GAMMA] + torch.randn(ROWS, GAMMA, V, generator=generator)).softmax(-1)
    bits = torch.randint(2**62, (ROWS, GAMMA + 1), generator=generator)
    guesses, r = q.argmax(-1), torch.rand(ROWS, GAMMA, generator=generator).double()
    draft = Draft.chain(guesses, q, torch.full((ROWS,), GAMMA))
    given = [t.to(bench.device) for t in (p, q, guesses, r, bits, draft.count)]
    on_device, scores, own_bits = (t.to(bench.device) for t in (logits, p, bits))
    expected = speculative_sampling(p, draft, r, bits)
    tokens, accepted = (t.cpu() for t in ops.chain_verdict(*given))
    judged = torch.arange(GAMMA + 1) <= expected.accepted[:, None]  # tokens after these are undefined
    differ = (accepted != expected.accepted) | ((tokens != expected.tokens) & judged).any(1)
    error = (ops.softmax(on_device).cpu() - p).abs().max()
    yield Measured("softmax, largest difference", float(error), "", ("<=", 1e-6))
    yield Measured("draws that differ", float((ops.race(scores, own_bits).cpu() != draw(p, bits)).sum()), "", NONE)
    yield Measured("verdicts that differ", float(differ.sum()), f"of {ROWS}", NONE)
    calls = {"softmax": lambda: ops.softmax(on_device[:1]), "draw": lambda: ops.race(scores[:1], own_bits[:1]),
             "verdict": lambda: ops.chain_verdict(*(t[:1] for t in given))}  # fmt: skip
    for name, call in calls.items():
        yield Measured(f"{name}, device", profiled(call).seconds * 1e6 or None, "us")
    for columns in COLUMNS:
        for queries in (1, GAMMA + 1):
            yield from _attention(bench.device, queries, columns)


def _attention(device: torch.device, queries: int, columns: int) -> Iterator[Measured]:
    """One layer's attention of a chain of `queries` tokens at the end of the columns."""
    generator, tokens = torch.Generator().manual_seed(columns), ((HEADS, queries), *[(KV_HEADS, columns)] * 2)
    q, k, v = (torch.randn(1, *shape, SIZE, generator=generator).bfloat16().to(device) for shape in tokens)
    table = torch.zeros(1, 1, dtype=torch.long, device=device)
    first = torch.full((1,), columns - queries, device=device)
    seen = torch.arange(columns, device=device) <= first[:, None] + torch.arange(queries, device=device)[:, None]

    def ours() -> torch.Tensor:
        found: torch.Tensor = kernel_attention.attend_op(q, k, v, table, first, None, None, SIZE**-0.5, None)
        return found

    def theirs(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        mask = seen[None, None]
        return F.scaled_dot_product_attention(q.to(dtype), k.to(dtype), v.to(dtype), attn_mask=mask, enable_gqa=True)

    expected = theirs(torch.float32).transpose(1, 2)
    error = float((ours().float() - expected).abs().max() / expected.abs().max())
    where, limit = f"{queries} x {columns:,}", kernel_attention.TOLERANCE[torch.bfloat16]
    yield Measured(f"attention {where}, relative difference", error, "", ("<=", limit))
    yield Measured(f"attention {where}, kernel", time_call(ours) * 1e6, "us")
    yield Measured(f"attention {where}, SDPA", time_call(theirs) * 1e6, "us")
