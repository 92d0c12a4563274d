"""Where a round's time goes on this CPU: kernels, the bytes of weights that they read, and what is outside of them.

python experiments/cpu_targets/round_profile.py
python experiments/cpu_targets/round_profile.py batch_size=8 data.count=32

Decodes some prompts plainly and speculatively with torch's profiler, after a pass without it, and prints a table.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

import specbench.decoding.autoregressive
import specbench.decoding.speculative
from specbench.config.build import build
from specbench.config.components import Components
from specbench.config.compose import compose
from specbench.config.validate import check
from specbench.decoding.noise import prompt_key
from specbench.decoding.state import Job
from specbench.decoding.timer import Lap
from specbench.run.batching import Batch, Requests
from specbench.run.decoder import Session
from specbench.run.warm_up import warm_up
from specbench.stats.records import DecodeResult

WORDS = ("temperature=0", "gamma=4", "data.limit=8", "logger=none")
SPANS = {"target": Lap.VERIFY, "draft": Lap.DRAFT, "accept": Lap.ACCEPT}
LEAST = 0.02  # of a span: kernels that take less are summed


def parts_of(words: Sequence[str]) -> Components:
    """The parts of a run with these overrides."""
    given = {word.partition("=")[0] for word in words}
    overrides = [*(word for word in WORDS if word.partition("=")[0] not in given), *words]
    return build(check(compose(overrides)))


def in_span(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose calls the profiler sees as one event of this name."""

    def call(*arguments: Any, **options: Any) -> Any:
        with record_function(f"span {name}"):
            return function(*arguments, **options)

    return call


def decode(session: Session, wanted: Batch, speculative: bool) -> DecodeResult:
    """A group of requests, decoded one way."""
    parts = session.parts
    jobs = [Job(r.tokens, len(r.tokens) + parts.max_new_tokens, prompt_key(0, r.id)) for r in wanted.requests]
    return session.decode(jobs, speculative, wanted.columns)


def kernels_of(events: Sequence[Any], name: str) -> tuple[int, Counter[str], Counter[str], float]:
    """Of the spans of this name: how many there are, microseconds and calls by kernel, and microseconds outside."""
    seconds, calls, outside, spans = Counter[str](), Counter[str](), 0.0, 0
    for event in events:
        if event.name != f"span {name}":
            continue
        spans += 1
        outside += event.self_cpu_time_total
        waiting = list(event.cpu_children)
        while waiting:
            child = waiting.pop()
            if child.name.startswith("span "):
                continue
            kernel = "fused loops of the program" if child.name.startswith("## Call") else child.name
            seconds[kernel] += child.self_cpu_time_total
            calls[kernel] += 1
            waiting += child.cpu_children
    return spans, seconds, calls, outside


def lines(parts: Components, way: str, timed: Sequence[DecodeResult], events: Sequence[Any]) -> list[str]:
    """The table's lines of one way of decoding."""
    total, found = sum(decoded.calls for decoded in timed), []
    read = {"target": parts.target.step_bytes, "accept": 0}
    read["draft"] = sum(m.step_bytes for m in parts.drafter.models) * parts.policy.largest
    for name, lap in SPANS.items():
        spans, seconds, calls, outside = kernels_of(events, name)
        if not spans:
            continue
        real = 1e6 * sum(decoded.laps.get(lap, 0.0) for decoded in timed) / total
        profiled = (sum(seconds.values()) + outside) / spans
        head = f"| {way} | {name} | {real:.0f} | {profiled:.0f} | {read[name] / 1e6:.1f} |"
        small = 0.0
        for kernel, taken in seconds.most_common():
            if taken / spans < LEAST * profiled:
                small += taken
                continue
            found.append(f"{head} {kernel} | {calls[kernel] / spans:.0f} | {taken / spans:.0f} |")
        found.append(f"{head} other kernels | | {small / spans:.0f} |")
        found.append(f"{head} outside kernels: calls and Python | | {outside / spans:.0f} |")
    return found


def main() -> None:
    """Profiles and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="of python -m specbench")
    parts = parts_of(parser.parse_args().overrides)
    table = ["| way | part of a round | us a round | with the profiler | MB of weights | kernel | calls | us |"]
    table.append("|---" * 8 + "|")
    with torch.inference_mode():
        session, groups = Session(parts), list(Requests(parts).groups())
        warm_up(session, groups[0])
        parts.target.score = in_span("target", parts.target.score)  # type: ignore[method-assign]
        parts.drafter.propose = in_span("draft", parts.drafter.propose)  # type: ignore[method-assign]
        speculative, plain = specbench.decoding.speculative, specbench.decoding.autoregressive
        wrapped = in_span("accept", speculative.accept_and_append)
        speculative.accept_and_append = plain.accept_and_append = wrapped
        for way in ("plain", "speculative"):
            timed = [decode(session, wanted, way == "speculative") for wanted in groups]
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                for wanted in groups:
                    decode(session, wanted, way == "speculative")
            table += lines(parts, way, timed, profiler.events())
    print(json.dumps(parts.target.executor.facts().get("programs"), default=str))
    print("\n".join(table))


if __name__ == "__main__":
    main()
