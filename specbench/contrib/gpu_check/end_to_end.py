"""Phase 12: the full accounting of the pair, beside transformers, and what batches add."""

import dataclasses
from collections.abc import Iterator

from specbench.config.memory import give_back
from specbench.contrib.gpu_check.check import Number, Phase
from specbench.contrib.gpu_check.fixtures import GRAPHS, PAIR, Lab
from specbench.contrib.gpu_check.graphs import decoded
from specbench.contrib.gpu_check.timer import Timer
from specbench.results.schema import RunResult
from specbench.run.components import Components
from specbench.run.run import run

BATCHES = {8: 6.0, 32: 16.0}  # rows: how many times the tokens per second of one row
LENGTH, NEW, TEXTS = 64, 64, 3  # tokens of a prompt, new ones, and texts for each row
PEERS = {"generate": 4.0, "assisted": 5.0}  # how many times as fast as transformers'


class Whole(Phase):
    """A run of the pair with transformers' decoders, then batches of rows."""

    number, title, seconds = 12, "the whole run of the 1B and 3B shapes", 95
    meaning = (
        "What a user gets. c, v and o say which part is too slow; measured / Theorem 3.8 says how much the engine adds "
        "to what the theorem counts. Batches decode many texts at once, through the paged cache."
    )

    def prepare(self, lab: Lab) -> tuple[Lab, Components]:
        new = ("data.limit=4", "max_new_tokens=64", "verdict_tokens=0")
        return lab, lab.parts(*PAIR, GRAPHS, "baseline=transformers", *new)

    def measure(self, prepared: tuple[Lab, Components], timer: Timer) -> Iterator[Number]:
        lab, parts = prepared
        lab.folder.mkdir(parents=True, exist_ok=True)
        result, _ = run(parts, lab.folder)
        yield from of_run(result)
        del prepared, parts
        give_back()
        yield from batches(lab.parts(*PAIR, GRAPHS, "cache=paged"))


def of_run(result: RunResult) -> Iterator[Number]:
    """The numbers of a finished run that have limits, and those that explain them."""
    cost, speedup = result.cost, result.speedup
    step = cost.target_step_seconds
    yield Number("step", None if step is None else step * 1e3, "ms")
    yield Number("c", cost.c, "", ("<=", 0.42))
    yield Number("v", cost.v, "", ("<=", 1.08))
    yield Number("o, by events", cost.o)
    yield Number("o, by the host's clock", cost.o_wall, "", ("<=", 0.06))
    yield Number("speedup", speedup.measured, "x")
    yield Number("speedup, by the host's clock", speedup.wall, "x")
    theorem = speedup.theorem_3_8
    yield Number("speedup / Theorem 3.8", speedup.measured / theorem if theorem else None, "", (">=", 0.92))
    yield Number("tokens per second", result.throughput["speculative_tokens_per_second"])
    for peer, times in PEERS.items():
        over = result.speedup_over.get(peer)
        yield Number(f"over transformers, {peer}", None if over is None else over.measured, "x", (">=", times))


def batches(parts: Components) -> Iterator[Number]:
    """Tokens per second of all rows together, over those of one row."""
    alone = 0.0
    for rows in (1, *BATCHES):
        own = dataclasses.replace(parts, batch_size=rows)
        decoded(own, rows, LENGTH, NEW)  # warms up
        found = decoded(own, TEXTS * rows, LENGTH, NEW)
        rate = sum(len(request.tokens) for request in found.requests) / found.wall_seconds
        alone = alone or rate
        yield Number(f"tokens per second, {rows} rows", rate)
        if rows in BATCHES:
            yield Number(f"over one row, {rows} rows", rate / alone, "x", (">=", BATCHES[rows]))
