"""Whole decodes of the 3B and 1B shapes: how fast, beside transformers, which kernels take the time, how fast products
are, and how far p depends on the number of tokens of a call and on the executor."""

from collections.abc import Iterator, Sequence
from itertools import count, cycle

import torch
from torch.nn import functional as F

from specbench.config.components import Components
from specbench.contrib.gpu_check.bench import GRAPHS, Bench, Measured, jobs_of, kernels_of, time_call
from specbench.contrib.gpu_check.timing import ALPHA, PAIR, TARGET, score_call
from specbench.models.float_logits import float_logits
from specbench.run.decoder import Session
from specbench.run.machine_watch import cuda_roofs
from specbench.stats.records import DecodeResult
from specbench.stats.reference_distribution import largest_tv
from specbench.theory import expected_tokens

EAGER, AUTO, PEERS = ("executor=eager",), ("executor=auto",), ("baseline=transformers",)
LAYERS = (GRAPHS, "executor.compile=layers")
# Rows decoded together, and how.
WAYS = [(1, AUTO), (1, (GRAPHS,)), (1, EAGER), (8, AUTO), (32, AUTO), (1, LAYERS), (8, LAYERS)]
PROMPT, NEW = 64, 96  # tokens of a prompt, and new ones
LONGEST = 30  # kernels that are named
SHAPES = {"qkv": (5120, 3072), "o": (3072, 3072), "gate and up": (16384, 3072), "down": (3072, 8192),
          "head": (128_256, 3072)}  # of the 3B's products  # fmt: skip
TOKENS = (1, 2, 6)  # of a call
COLD = 512e6  # bytes of weights that take turns, more than a GPU's cache holds
LENGTHS = range(33, 513, 32)
QUANTILES = (0.5, 0.9, 0.99, 1.0)


def speeds(bench: Bench) -> Iterator[Measured]:
    """Tokens per second of every executor, of drafters in fewer bits and of batches, plain and speculative, and of
    transformers' generate() and its assisted generation, on the same prompts; and the weights that rounds read, in
    share of the memory's read roof."""
    roof = cuda_roofs(bench.device).read
    for rows, way in WAYS:
        parts = bench.parts(*PAIR, *way, *(PEERS if (rows, way) == WAYS[0] else ()), f"batch_size={rows}")
        session, jobs, columns = Session(parts), jobs_of(parts, rows, PROMPT, NEW), PROMPT + NEW + parts.spare
        where = f"{', '.join(way)}, {rows} rows"
        for speculative in (False, True):
            session.decode(jobs, speculative, columns)
            before = captures_of(parts)
            found = session.decode(jobs, speculative, columns)
            captures = captures_of(parts) - before
            name = f"{'speculative' if speculative else 'plain'}, {where}"
            took = found.decode_seconds / found.calls
            expected = expected_tokens(ALPHA, parts.policy.largest) if speculative else 1.0
            yield Measured(f"tokens/s, {name}", tokens_per_second(found), "", None, f"{found.calls} calls")
            # One text has more or fewer tokens a round than alpha promises.
            yield Measured(f"tokens/s at {expected:.2f} tokens a call, {name}", rows * expected / took)
            yield Measured(f"call or round, {name}", took * 1e3, "ms")
            drafts = parts.policy.largest * sum(model.step_bytes for model in parts.drafter.models)
            read = (parts.target.step_bytes + speculative * drafts) / took
            yield Measured(f"share of the read roof of a round, {name}", read / roof)
            yield Measured(f"captures in the timed part, {name}", captures, "", ("<=", 0.0))
        facts = parts.target.executor.facts()
        yield Measured(f"captures and compilations, {where}", facts.get("capture_seconds"), "s")
        made = facts.get("programs", {})
        yield Measured(f"programs made, {where}", made.get("made"), "", None, f"in {made.get('seconds', 0):.0f} s")
        for name, peer in parts.peers.items():
            peer.decode(jobs[0])
            output = peer.decode(jobs[0])
            yield Measured(f"tokens/s, {name} of transformers, {rows} rows", output.decoded / output.decode_seconds)


def captures_of(parts: Components) -> int:
    """Graphs that were captured so far."""
    return int(parts.target.executor.facts().get("captures", 0))


def tokens_per_second(found: DecodeResult) -> float:
    """Of all rows together, without the reading of prompts."""
    return sum(len(request.tokens) for request in found.requests) / found.decode_seconds


def longest_kernels(bench: Bench) -> Iterator[Measured]:
    """The kernels that take most of a round, by the profiler; those that read the prompt's first token are among
    them."""
    for way in (AUTO, EAGER, LAYERS):
        parts, where = bench.parts(*PAIR, *way), ", ".join(way)
        session, jobs, columns = Session(parts), jobs_of(parts, 1, 2, NEW), 2 + NEW + parts.spare
        rounds = [session.decode(jobs, True, columns) for _ in range(2)][-1].calls
        before = captures_of(parts)
        found = kernels_of(lambda: session.decode(jobs, True, columns))  # noqa: B023
        yield Measured(f"captures in the profiled part, {where}", captures_of(parts) - before, "", ("<=", 0.0))
        total, calls = sum(f.seconds for f in found), sum(f.calls for f in found)
        yield Measured(
            f"all kernels, {where}", total / rounds * 1e6, "us a round", None, f"{calls / rounds:.0f} of them"
        )
        for place, kernel in zip(count(1), found[:LONGEST]):
            remark = f"{kernel.calls / rounds:.1f} a round, {kernel.seconds / kernel.calls * 1e6:.1f} us each"
            yield Measured(
                f"{place}. {kernel.name[:60]}, {where}", kernel.seconds / rounds * 1e6, "us a round", None, remark
            )


def products(bench: Bench) -> Iterator[Measured]:
    """The products of the 3B's layers and of its output matrix in bfloat16, in share of the memory's read roof."""
    roof = cuda_roofs(bench.device).read
    for name, shape in SHAPES.items():
        copies = max(2, int(COLD / (2 * shape[0] * shape[1])))
        weights = [torch.randn(shape, device=bench.device, dtype=torch.bfloat16) for _ in range(copies)]
        for tokens in TOKENS:
            x = torch.randn(tokens, shape[1], device=bench.device, dtype=torch.bfloat16)
            turn = cycle(weights)
            took = time_call(lambda x=x, turn=turn: F.linear(x, next(turn)))  # type: ignore[misc]
            share = weights[0].nbytes / took / roof
            yield Measured(f"product {name}, {tokens} tokens", share, "of the read roof", None, f"{took * 1e6:.1f} us")


def laws(bench: Bench) -> Iterator[Measured]:
    """How far p in bfloat16 is from that of the stock module, and p of a call on one token from that of one on more:
    total variations over texts of several lengths, and the positions at which the likeliest token is another."""
    width = max(TOKENS)
    for way in (AUTO, EAGER):
        parts, where = bench.parts(*TARGET, *way, f"gamma={width - 1}"), ", ".join(way)
        stock = parts.target.stock_module()
        one, more, theirs, limits = [], [], [], []
        for length in LENGTHS:
            text = torch.tensor([jobs_of(parts, 1, length, 1)[0].tokens], device=bench.device)
            one.append(score_call(parts, length)().p[0, 0].clone())
            more.append(score_call(parts, length + width - 1, width)().p[0, 0].clone())
            with float_logits(stock):
                logits = stock(text).logits[0, -1:].float()
            theirs.append(logits[0].softmax(-1))
            limits.append(float(largest_tv(logits, parts.target.dtype, parts.target.sampling)))
        yield from _distances(f"p of the stock module, {where}", one, theirs)
        yield Measured(f"the verdict's least limit of these, {where}", min(limits))
        yield from _distances(f"p of a call on {width} tokens, {where}", one, more)


def _distances(what: str, ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> Iterator[Measured]:
    """Quantiles of the total variation between laws [V], and how often their likeliest tokens differ."""
    found = torch.stack([(p - q).abs().sum() / 2 for p, q in zip(ours, theirs, strict=True)]).double().cpu()
    for share in QUANTILES:
        yield Measured(f"distance from {what}, quantile {share:g}", float(found.quantile(share)))
    flips = sum(int(p.argmax() != q.argmax()) for p, q in zip(ours, theirs, strict=True))
    yield Measured(f"other likeliest token than {what}", flips, f"of {len(found)}")
