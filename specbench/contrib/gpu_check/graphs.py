"""Phases 1, 9 and 10: whether graphs compute what eager mode does, and how many there are."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from specbench.contrib.gpu_check.check import Number, Phase
from specbench.contrib.gpu_check.fixtures import GRAPHS, WITHOUT_GRAPHS, Lab, jobs_of
from specbench.contrib.gpu_check.timer import Timer
from specbench.run.components import Components
from specbench.run.decoder import Session
from specbench.run.run import run
from specbench.stats.records import DecodeResult

LENGTH, NEW = 100, 200  # tokens of a prompt, and new ones: three buckets of columns
TESTS = Path(__file__).parents[3] / "tests"
SANITIZER_SECONDS, PYTEST_SECONDS = 40, 50
NONE = ("<=", 0.0)  # the limit of what must not happen
ERRORS = 9  # compute-sanitizer's exit code if it found any


def decoded(parts: Components, count: int, length: int, new: int) -> DecodeResult:
    """Decodes `count` texts speculatively, with everything that is recorded."""
    jobs = jobs_of(parts, count, length, new)
    return Session(parts).decode(jobs, True, length + new + parts.spare)


def texts(found: DecodeResult) -> list[list[int]]:
    """The new tokens of each request."""
    return [list(request.tokens) for request in found.requests]


class Clobber(Phase):
    """The same texts with and without graphs, on the same shapes."""

    number, title, seconds = 1, "graphs against the same functions without graphs", 65
    meaning = (
        "A replay may overwrite what another graph returned; tokens, counts or betas then differ from those of "
        "the same functions on the same shapes. Any difference is an error: nothing that follows can be trusted."
    )
    # With SDPA a text meets several buckets of columns, each with graphs of its own; the Triton kernel has one.
    cases = (*((rows, temperature, "sdpa") for rows in (1, 2) for temperature in (0, 1)), (2, 1, "auto"))

    def prepare(self, lab: Lab) -> Lab:
        return lab

    def measure(self, prepared: Lab, timer: Timer) -> Iterator[Number]:
        for rows, temperature, attention in self.cases:
            run = ("gamma=5", f"batch_size={rows}", f"temperature={temperature}", "dtype=float32",
                   f"attention={attention}")  # fmt: skip
            ours, plain = (
                decoded(prepared.parts(*run, *way), 2 * rows, LENGTH, NEW) for way in ((GRAPHS,), WITHOUT_GRAPHS)
            )
            where = f"B {rows}, T {temperature}, attention {attention}"
            differ = sum(a != b for a, b in zip(texts(ours), texts(plain), strict=True))
            yield Number(f"texts that differ, {where}", differ, f"of {2 * rows}", NONE)
            yield Number(f"largest difference of a beta, {where}", _beta_difference(ours, plain), "", ("<=", 1e-4))
        yield sanitised(prepared)


def _beta_difference(ours: DecodeResult, plain: DecodeResult) -> float:
    """The largest difference between betas of the same round; 1 if rounds differ in their counts."""
    pairs = [*zip(ours.rounds, plain.rounds, strict=False)]
    counts = [(r.row, r.position, r.gamma, r.accepted, r.tested, r.tokens) for r in ours.rounds]
    if counts != [(r.row, r.position, r.gamma, r.accepted, r.tested, r.tokens) for r in plain.rounds]:
        return 1.0
    return max(abs(a - b) for r, s in pairs for a, b in zip(r.beta, s.beta, strict=True))


def sanitised(lab: Lab) -> Number:
    """One short run under compute-sanitizer, if it is installed."""
    name = "errors that compute-sanitizer found"
    if shutil.which("compute-sanitizer") is None:
        return Number(name, None, remark="not checked: compute-sanitizer is not on PATH")
    run = ["data.limit=1", "max_new_tokens=8", "verdict_tokens=0", GRAPHS, f"hydra.run.dir={lab.folder / 'sanitizer'}"]
    command = ["compute-sanitizer", "--error-exitcode", str(ERRORS), sys.executable, "-m", "specbench"]
    code, log = finished([*command, *lab.overrides(run)], SANITIZER_SECONDS)
    if code not in (0, ERRORS):
        return Number(name, None, remark="not finished in time" if code is None else f"exit code {code}")
    count = re.findall(r"ERROR SUMMARY: (\d+)", log)
    return Number(name, float(count[-1]) if count else float(code == ERRORS), "", NONE)


def finished(command: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Runs a command; returns its exit code, None if it was stopped after so many seconds, and what it printed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds)
    except subprocess.TimeoutExpired as late:
        return None, (late.stdout or b"").decode(errors="replace") if isinstance(late.stdout, bytes) else ""
    return done.returncode, done.stdout + done.stderr


class Equality(Phase):
    """Greedy texts in float32, and the tests that need a GPU."""

    number, title, seconds = 9, "greedy texts of graphs and of eager mode", 65
    meaning = (
        "In float32 and at temperature 0 graphs must give eager mode's tokens, all of them, in one process after the "
        "other. A single differing text may be a tie of two logits: compare them before looking for an error."
    )
    cases = (("static", "stdlib"), ("paged", "stdlib"), ("static", "tree"))

    def prepare(self, lab: Lab) -> Lab:
        return lab

    def measure(self, prepared: Lab, timer: Timer) -> Iterator[Number]:
        for cache, drafter in self.cases:
            run = (f"cache={cache}", f"drafter={drafter}", "dtype=float32", "temperature=0", "batch_size=2")
            ours, plain = (
                texts(decoded(prepared.parts(*run, way), 6, LENGTH, NEW // 4)) for way in (GRAPHS, "executor=eager")
            )
            differ = sum(a != b for a, b in zip(ours, plain, strict=True))
            yield Number(f"texts that differ, {cache}, {drafter}", differ, "of 6", NONE)
        yield tested()


def tested() -> Number:
    """The exit code of the tests that need a GPU, if this is a checkout."""
    name = "exit code of pytest -m cuda"
    if not TESTS.is_dir():
        return Number(name, None, remark="not checked: specbench does not run from a checkout")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", str(TESTS)]
    code, log = finished(command, PYTEST_SECONDS)
    last = log.strip().splitlines()[-1:] or [""]
    if "No module named pytest" in log:
        return Number(name, None, remark="not checked: pytest is not installed")
    return Number(name, None if code is None else float(code), "", NONE, last[0])


class Captures(Phase):
    """A whole run of 32 prompts whose gamma changes."""

    number, title, seconds = 10, "captures and memory over 32 prompts", 35
    meaning = (
        "All graphs have to be captured in warm-up: a later capture takes a hundred times as long as a round and is "
        "timed with it. Reserved memory must not grow from prompt to prompt."
    )

    def prepare(self, lab: Lab) -> tuple[Lab, Components]:
        return lab, lab.parts(GRAPHS, "gamma_policy=adaptive", "data.limit=32", "verdict_tokens=0")

    def measure(self, prepared: tuple[Lab, Components], timer: Timer) -> Iterator[Number]:
        lab, parts = prepared
        half: list[int] = []

        def progress(done: int, total: int, what: str) -> None:
            if done == total // 2:
                half.append(reserved(lab.device))

        lab.folder.mkdir(parents=True, exist_ok=True)
        result, _ = run(parts, lab.folder, progress)
        facts: dict[str, Any] = result.executor
        yield Number("captures after warm-up", facts.get("captures_after_warm_up"), "", NONE)
        yield Number("graphs", facts.get("graphs"))
        yield Number("memory that PyTorch holds", reserved(lab.device) / 1e9, "GB")
        grown = (reserved(lab.device) - half[0]) / 1e6 if half else None
        yield Number("its growth over the second half", grown, "MB", ("<=", 64.0))


def reserved(device: torch.device) -> int:
    """Bytes that PyTorch's allocator holds."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
