"""Phases 3, 4 and 8: how long the target's call takes, and how much of the memory's rate it reads."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from specbench.contrib.gpu_check.check import Number, Phase
from specbench.contrib.gpu_check.fixtures import GRAPHS, TARGET, Lab, text_in_cache
from specbench.contrib.gpu_check.timer import Timer
from specbench.decoding.draft import Draft
from specbench.run.bandwidth import CALLS, cuda_roofs
from specbench.run.components import Components
from specbench.stats.machine_noise import Roofs

SHARES = {1024: 0.85, 4096: 0.80}  # of the read roof, by cache columns, when its operations are fused
UNFUSED_SHARE = 0.4
WIDTHS = (1, 2, 4, 6, 8, 16)  # tokens of a call
# A layer's, when its operations are fused: 14 calls, one of them attention in two launches, and a share of what is
# around the layers.
MOST_KERNELS = 16


def score_call(parts: Components, columns: int, width: int = 1) -> Callable[[], Any]:
    """The target's call on the last of `columns` tokens and width - 1 guesses, which can be repeated."""
    target = parts.target
    state = text_in_cache(parts, columns - width + 1)
    draft = Draft.empty(1, target.device)
    if width > 1:
        guesses = torch.ones(1, width - 1, dtype=torch.long, device=target.device)
        draft = Draft.chain(guesses, None, torch.full((1,), width - 1, device=target.device))
    return lambda: target.score(state, draft)


def roofs_by(timer: Timer, device: torch.device) -> Roofs:
    """The memory's roofs, timed by `timer`."""
    return cuda_roofs(device, lambda call, device: timer.device(call, CALLS))


def step_bytes(parts: Components, columns: int) -> float:
    """Bytes of weights, keys and values that a one-token step reads."""
    return parts.target.step_bytes + columns * parts.target.column_bytes()


class Step(Phase):
    """A one-token step of the 3B shape under graphs."""

    number, title, seconds = 3, "one-token step of the 3B shape", 35
    meaning = (
        "A step has to read every weight once, so its bytes over its time should be near what the memory can read. A "
        "low share means kernels that are too small or too many: see phases 2 and 4."
    )

    def prepare(self, lab: Lab) -> Components:
        return lab.parts(*TARGET, GRAPHS)

    def measure(self, prepared: Components, timer: Timer) -> Iterator[Number]:
        roofs = roofs_by(timer, prepared.target.device)
        yield Number("read roof", roofs.read / 1e9, "GB/s")
        yield Number("copy roof", None if roofs.copy is None else roofs.copy / 1e9, "GB/s")
        for columns in SHARES:
            yield from step(prepared, columns, timer, roofs, UNFUSED_SHARE)


def step(
    parts: Components, columns: int, timer: Timer, roofs: Roofs, share: float | None, name: str = ""
) -> Iterator[Number]:
    """A one-token step at so many columns, and the share of the read roof that it has to reach, if any."""
    call = score_call(parts, columns)
    seconds, where = timer.device(call), f"at {columns:,} columns{name}"
    rate = step_bytes(parts, columns) / seconds
    limit = None if share is None else (">=", share)
    yield Number(f"step {where}", seconds * 1e3, "ms", None, f"{rate / 1e9:,.0f} GB/s")
    yield Number(f"share of the read roof {where}", rate / roofs.read, "", limit)
    kernels = timer.kernels(call) / parts.target.config.num_hidden_layers or None
    yield Number(f"kernels a layer {where}", kernels, remark="" if kernels else "the profiler saw no kernel")


class Fused(Phase):
    """The same step in eager mode, and as a graph of a compiled program."""

    number, title, seconds = 4, "the step in eager mode, and compiled", 130
    meaning = (
        "Fusing takes kernels away, which matters most where each is short. Out of time: the programs are kept on the "
        "disk, so run this phase again. More kernels a layer than the limit: Inductor broke the forward into parts."
    )

    def prepare(self, lab: Lab) -> Lab:
        return lab

    def measure(self, prepared: Lab, timer: Timer) -> Iterator[Number]:
        roofs = roofs_by(timer, prepared.device)
        yield from step(prepared.parts(*TARGET, "executor=eager"), 1024, timer, roofs, None, ", eager")
        parts = prepared.parts(*TARGET, GRAPHS, "executor.compile=true")
        for columns, share in SHARES.items():
            for number in step(parts, columns, timer, roofs, share, ", compiled"):
                kernels = number.name.startswith("kernels")
                yield dataclasses.replace(number, limit=("<=", float(MOST_KERNELS))) if kernels else number


class Widths(Phase):
    """v: the target's call on more than one token."""

    number, title, seconds = 8, "the target's call on 1 to 16 tokens", 30
    meaning = (
        "Theorem 3.8 takes a call on gamma + 1 tokens to cost as much as on one. The limit is for gamma 5. Above it: "
        "attention reads keys once for each token, or the matrix products change their kernel."
    )

    def prepare(self, lab: Lab) -> Components:
        return lab.parts(*TARGET, GRAPHS, f"gamma={max(WIDTHS) - 1}")

    def measure(self, prepared: Components, timer: Timer) -> Iterator[Number]:
        one = 0.0
        for width in WIDTHS:
            seconds = timer.device(score_call(prepared, 1024, width))
            one = one or seconds
            yield Number(f"call on {width} tokens", seconds * 1e3, "ms")
            yield Number(f"v of {width} tokens", seconds / one, "", ("<=", 1.08) if width == 6 else None)
