"""Phases 7 and 11: the small graphs of a round alone, and what it costs the host to launch a graph."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from specbench.contrib.gpu_check.check import Number, Phase
from specbench.contrib.gpu_check.fixtures import Lab
from specbench.contrib.gpu_check.timer import Timer
from specbench.decoding.draft import Draft
from specbench.decoding.sampling import Sampling, draw
from specbench.decoding.speculative import accept_and_commit
from specbench.decoding.state import Job, State
from specbench.run.recorder import round_numbers
from specbench.verifiers.speculative import SpeculativeVerifier

V, GAMMA = 128_256, 5
ROWS = (1, 8)
ACCEPT = 80.0  # us, one row: .05 of a step of 1.6 ms
NODES = (800, 1300, 4000)  # of a graph
LAUNCH = 100.0  # us, for the middle one


class Leaves(Phase):
    """Softmax, draw, verdict and recorder, each as a graph of its own."""

    number, title, seconds = 7, "softmax, draw, verdict and recorder alone", 20
    meaning = (
        "What a round does besides the models' calls. The verdict with its commit is most of o; a draw is part of "
        "every drafter step, so of c. Too slow: p and q are read many times, or one row is one block of threads."
    )

    def prepare(self, lab: Lab) -> dict[str, Callable[[], Any]]:
        return {f"{name}, B {rows}": call for rows in ROWS for name, call in leaves(rows, lab.device).items()}

    def measure(self, prepared: dict[str, Callable[[], Any]], timer: Timer) -> Iterator[Number]:
        for name, call in prepared.items():
            limit = ("<=", ACCEPT) if name == "verdict and commit, B 1" else None
            yield Number(name, timer.device(timer.captured(call)) * 1e6, "us", limit)


def leaves(rows: int, device: torch.device) -> dict[str, Callable[[], Any]]:
    """The functions of a round on `rows` rows of V tokens, temperature 1, a draft of GAMMA guesses."""
    sampling = Sampling()
    verifier = SpeculativeVerifier(sampling)
    logits = torch.arange(V, device=device).remainder(97).div(10).bfloat16().expand(rows, GAMMA + 1, V).contiguous()
    p = sampling.probabilities(logits, None)
    q = p[:, :GAMMA].contiguous()
    guesses = torch.arange(GAMMA, device=device).repeat(rows, 1)
    draft = Draft.chain(guesses, q, torch.full((rows,), GAMMA, device=device))
    state = State.start([Job([1, 2, 3], 200, row) for row in range(rows)], [], GAMMA + 1, device)
    verdict, kept, _ = accept_and_commit(verifier, p, draft, state.rows)
    bits = state.noise[0, :, 0]
    return {
        "softmax of one position": lambda: sampling.probabilities(logits[:, 0], None),
        "draw": lambda: draw(p[:, 0], bits),
        "verdict and commit": lambda: accept_and_commit(verifier, p, draft, state.rows),
        "recorder": lambda: round_numbers(p, draft, verdict, kept, verifier.beta, ()),
    }


class Launches(Phase):
    """Graphs of many nodes that do nothing."""

    number, title, seconds = 11, "launching a graph", 15
    meaning = (
        "Until the call that replays a graph returns, Python can do nothing else. A round launches three to five "
        "graphs; too slow means that fewer, larger graphs pay."
    )

    def prepare(self, lab: Lab) -> torch.Tensor:
        return torch.zeros(1, device=lab.device)

    def measure(self, prepared: torch.Tensor, timer: Timer) -> Iterator[Number]:
        for nodes in NODES:
            replay = timer.captured(lambda nodes=nodes: _add(prepared, nodes))  # type: ignore[misc]
            limit = ("<=", LAUNCH) if nodes == NODES[1] else None
            yield Number(f"launch of {nodes:,} nodes", timer.host(replay) * 1e6, "us", limit)


def _add(x: torch.Tensor, times: int) -> None:
    for _ in range(times):
        x.add_(1)
