"""How fast the target's call is, what a round launches and waits for, and whether the clock sees all of a round."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from specbench.config.components import Components
from specbench.contrib.gpu_check.bench import GRAPHS, Bench, Measured, jobs_of, profiled, text_in_cache, time_call
from specbench.decoding.draft import Draft
from specbench.decoding.speculative import RoundHook, decode_speculative, ignore
from specbench.decoding.state import State
from specbench.decoding.timer import Clock, Lap, Timer, decoding_seconds
from specbench.run.decoder import Session, untimed
from specbench.run.machine_watch import cuda_roofs
from specbench.run.recorder import Recorder, round_numbers
from specbench.stats.records import DecodeResult

# Llama 3.2 1B drafts for 3B: real shapes, random weights, guesses accepted at a given rate.
ALPHA = 0.8
PAIR = ("target=llama3b", "drafter=llama1b", "target.weights=random", "drafter.weights=random", "gamma=5",
        "verifier=synthetic", f"verifier.alpha={ALPHA}")  # fmt: skip
TARGET = ("target=llama3b", "target.weights=random", "drafter=ngram")  # the 3B shape alone
SHARES = {1024: 0.55, 4096: 0.50}  # of the read roof, by cache columns, of compiled graphs; .61 was measured on an H200
UNFUSED_SHARE = 0.3  # .36 and .34
APART = 0.1  # total variation of p in bfloat16 between two correct programs, at most
MOST_KERNELS = 16.0  # a layer's, when its operations are fused, and a share of what is around the layers
GAMMA = 5
CHAINS = tuple((f"executor={e}", f"cache={c}") for e in ("eager", "cudagraph") for c in ("static", "paged"))
OTHERS = tuple((GRAPHS, f"drafter={drafter}") for drafter in ("ngram", "prompt_lookup", "tree", "medusa"))
NEW_TOKENS, TRIES = 40, 3


def score_call(parts: Components, columns: int, width: int = 1) -> Callable[[], Any]:
    """The target's call on the last of `columns` tokens and width - 1 guesses, which can be repeated."""
    target, state = parts.target, text_in_cache(parts, columns - width + 1)
    draft = Draft.empty(1, target.device)
    if width > 1:
        guesses = torch.ones(1, width - 1, dtype=torch.long, device=target.device)
        draft = Draft.chain(guesses, None, torch.full((1,), width - 1, device=target.device))
    return lambda: target.score(state, draft)


def step(bench: Bench) -> Iterator[Measured]:
    """A one-token step of the 3B shape as a graph, in share of the memory's read roof, and v for gamma 5."""
    parts, roof = bench.parts(*TARGET, GRAPHS, f"gamma={GAMMA}"), cuda_roofs(bench.device).read
    yield Measured("read roof", roof / 1e9, "GB/s")
    limit = ("<=", 1.08) if bench.compiled else None  # limits are those of the executor that is measured
    for columns, share in SHARES.items():
        yield from _step(parts, columns, roof, share if bench.compiled else UNFUSED_SHARE)
        one, all_ = (time_call(score_call(parts, columns, width)) for width in (1, GAMMA + 1))
        yield Measured(f"v of {GAMMA + 1} tokens at {columns:,} columns", all_ / one, "", limit)


def compiled_step(bench: Bench) -> Iterator[Measured]:
    """The same step in eager mode, and as a graph of compiled programs, of layers and of the whole, and how far apart
    their p are."""
    roof, parts = cuda_roofs(bench.device).read, bench.parts(*TARGET, "executor=eager")
    yield from _step(parts, 1024, roof, None, ", eager")
    eager = score_call(parts, 1024)().p.clone()
    none = dict.fromkeys(SHARES)  # of layers no share has been measured
    for compile, name, shares in (("layers", "compiled by layers", none), ("true", "compiled", SHARES)):
        del parts
        parts = bench.parts(*TARGET, GRAPHS, f"executor.compile={compile}")
        apart = float((score_call(parts, 1024)().p - eager).abs().sum() / 2)
        yield Measured(f"distance of p from eager mode's, {name}", apart, "", ("<=", APART))
        for columns, share in shares.items():
            yield from _step(parts, columns, roof, share, f", {name}", MOST_KERNELS)
        yield Measured(f"programs, {name}", parts.target.executor.facts()["programs"]["seconds"], "s")


def _step(
    parts: Components, columns: int, roof: float, share: float | None, name: str = "", kernels: float | None = None
) -> Iterator[Measured]:
    """A step at so many columns; the least share of the roof in bytes per second and the most kernels a layer."""
    call, where = score_call(parts, columns), f"at {columns:,} columns{name}"
    took = time_call(call)
    rate = (parts.target.step_bytes + columns * parts.target.column_bytes()) / took
    yield Measured(f"step {where}", took * 1e3, "ms", None, f"{rate / 1e9:,.0f} GB/s")
    yield Measured(f"share of the read roof {where}", rate / roof, "", None if share is None else (">=", share))
    found = profiled(call).kernels / parts.target.config.num_hidden_layers or None
    remark = "" if found else "the profiler saw no kernel"
    yield Measured(f"kernels a layer {where}", found, "", None if kernels is None else ("<=", kernels), remark)


def one_round(bench: Bench) -> Iterator[Measured]:
    """Waits of the host, graphs and kernels of a round. A few waits at the start of a text are allowed for."""
    for overrides in (*CHAINS, *OTHERS):
        parts, decoded = bench.parts("target=stdlib", *overrides), list[DecodeResult]()
        session, jobs, columns = Session(parts), jobs_of(parts, 1, 32, NEW_TOKENS), 32 + NEW_TOKENS + parts.spare
        session.decode(jobs, True, columns)
        found = profiled(lambda: decoded.append(session.decode(jobs, True, columns)))  # noqa: B023
        where, count = ", ".join(overrides), decoded[0].calls
        waits = found.waits / count if found.waits > 0 else None
        remark = "" if waits else "none was seen, and one is needed"
        yield Measured(f"waits a round, {where}", waits, "", ("<=", 1.5) if overrides in CHAINS else None, remark)
        yield Measured(f"graphs a round, {where}", found.graphs / count)
        yield Measured(f"kernels a round, {where}", found.kernels / count)


def round_ends(parts: Components) -> Callable[..., list[float]]:
    """A function that decodes one text and returns when its rounds ended, in seconds of the host's clock."""
    target = parts.target

    def decode(clock: Clock | None = None, after_round: RoundHook = ignore) -> list[float]:
        ends: list[float] = []

        def note(*arguments: Any) -> None:
            ends.append(time.perf_counter())
            after_round(*arguments)

        state = State.start(jobs_of(parts, 1, 32, NEW_TOKENS), [], parts.spare, target.device)
        target.allocate(1, state.tokens.shape[1])
        target.prefill(state)
        decode_speculative(state, target, parts.drafter, parts.policy, parts.verifier, clock or Clock(), note)
        return ends

    return decode


def clocks(bench: Bench) -> Iterator[Measured]:
    """The length of a round by events and by the host's clock, with and without the recorder."""
    parts = bench.parts(*PAIR, GRAPHS)
    executor, decode = parts.target.executor, round_ends(parts)
    recorder = Recorder(parts.verifier, parts.metrics, executor.leaf(round_numbers))
    decode(after_round=recorder)  # captures its graph
    alone = min(_between(decode()) for _ in range(TRIES))
    clock = Timer(parts.target.device)
    with executor.timed(clock.launch):
        decode(clock, untimed(executor, recorder))
    laps = [lap for lap in clock.rounds() if Lap.VERIFY in lap][2:]
    events, wall = (sum(map(of, laps)) / len(laps) for of in (decoding_seconds, lambda lap: lap[Lap.WALL]))
    yield Measured("round without recorder or clock, host", alone * 1e3, "ms")
    yield Measured("round by events", events * 1e3, "ms")
    yield Measured("events / host", events / wall, "", (">=", 0.97))
    yield Measured("host / host without recorder", wall / alone, "", ("<=", 1.05))


def _between(ends: list[float]) -> float:
    """Mean seconds from the end of one round to that of the next, the first two left out."""
    return (ends[-1] - ends[1]) / (len(ends) - 2)
