"""One run among those that are decoded in turn: its session, what it has decoded, and the file that keeps it."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specbench.decoded import Decoded, Failure, Group, Record, Result
from specbench.decoding.state import Job
from specbench.interrupts import at_once
from specbench.measure.machine_watch import MachineWatch
from specbench.measure.stock_reading import read
from specbench.measure.text_end import ends_where_it_should
from specbench.measure.text_laws import LIMIT, Text, read_texts
from specbench.peers.peer import PeerOutput
from specbench.results import RunResult
from specbench.run.parts import Parts
from specbench.run.requests import Wanted
from specbench.run.session import Session
from specbench.run.summary import summarise
from specbench.run.warm_up import calibrate, probe_costs, warm_up
from specbench.storage.write import PromptsFile, failure_records, prompt_records
from specbench.visible import first_line

log = logging.getLogger(__name__)
Told = Callable[[Group], None]


class Member:
    """A run. `prompts.jsonl.part` in `out_dir` grows with every finished group."""

    def __init__(self, parts: Parts, out_dir: Path, told: Told = lambda group: None):
        """`told` is called with each group that is written. Raises ConfigError if the folder cannot be written."""
        self.parts, self.session = parts, Session(parts)
        self.record = Record(columns={name: metric.columns for name, metric in parts.metrics.items()})
        self.saved = PromptsFile(out_dir)
        self._probes, self._told = 0, told

    def warm_up(self, wanted: Wanted, first: bool) -> None:
        """Warm-up for requests of so many columns and, the first time, calibration."""
        warm_up(self.session, wanted)
        if first and self.parts.policy.calibrated:
            calibrate(self.session, wanted)

    def probe_costs(self, wanted: Wanted) -> None:
        """Short decodes, each with another constant gamma, whose rounds are timed."""
        for _ in range(wanted.probes(self.parts.batch_size)):
            gamma = self.parts.gammas[self._probes % len(self.parts.gammas)]
            probe_costs(self.session, wanted.requests, wanted.columns, gamma)
            self._probes += 1

    def decode(self, jobs: Sequence[Job], wanted: Wanted, speculative: bool = True) -> Decoded:
        """The jobs of a group, decoded speculatively or plainly."""
        evidence = self.session.to_read > 0
        return self.session.decode(jobs, speculative, wanted.columns, wanted.arrivals, evidence=evidence)

    def add(
        self,
        wanted: Wanted,
        jobs: Sequence[Job],
        ours: Decoded,
        plain: Decoded,
        peers: dict[str, list[PeerOutput]],
    ) -> Group:
        """Writes a group of requests that was decoded in all ways, then reads its texts."""
        results = [
            Result(
                request,
                job.limit - len(request.tokens),
                ours.requests[row],
                plain.requests[row],
                {name: outputs[row] for name, outputs in peers.items()},
            )
            for row, (request, job) in enumerate(zip(wanted.requests, jobs, strict=True))
        ]
        group = Group(results, ours, plain, wanted.rate)
        self.saved.append(prompt_records(group, self.parts.target.tokenizer))
        self.record.groups.append(group)
        self.session.costs.add(ours.rounds)
        for result in results:
            with at_once():
                _read_texts(self.session, result)
        with at_once():
            read_again(self.session, self.record, group)
        self._told(group)
        return group

    def fail(self, failure: Failure) -> None:
        """Writes that requests could not be decoded."""
        log.warning("prompts %s failed: %s", ", ".join(r.id for r in failure.requests), failure.error)
        self.saved.append(failure_records(failure))
        self.record.failures.append(failure)

    def measure(self, status: str, facts: dict[str, Any], watch: MachineWatch) -> RunResult:
        """Everything that is measured. Raises RuntimeError if every prompt failed."""
        return summarise(self.session, self.record, status, facts, watch)


def _read_texts(session: Session, result: Result) -> None:
    """Reads betas along both texts (one text if they are equal), for about the first LIMIT tokens of a run."""
    parts, ours, theirs, request = session.parts, result.speculative, result.baseline, result.request
    read_already = session.text_tokens
    session.text_tokens += len(ours.tokens)
    if read_already >= LIMIT or not (parts.verifier.judges_by_law and parts.drafter.reads_text):
        return
    texts = [Text(ours.tokens, ours.lenience())]
    if ours.tokens != theirs.tokens or set(texts[0].lenience) != {1.0}:
        texts.append(Text(theirs.tokens, [1.0] * len(theirs.tokens)))
    try:
        laws, *others = read_texts(parts.target, parts.drafter, request.tokens, texts, request.encoder_tokens)
    except RuntimeError as error:  # out of memory: the run goes on without these betas
        log.warning("no betas along the text of %s: %s", result.request.id, first_line(error))
        return
    result.speculative_laws, result.baseline_laws = laws, others[0] if others else laws


def read_again(session: Session, record: Record, group: Group) -> None:
    """Reads the group's texts with the stock module, for the verdict, while tokens may still be read. At temperature 0
    also every text that differs from plain decoding's."""
    parts, evidence = session.parts, group.speculative.evidence
    for row, result in enumerate(group.results):
        prompt, new, read_first = result.request.tokens, result.speculative.tokens, result.request.encoder_tokens
        differs = parts.target.sampling.greedy and new != result.baseline.tokens
        if session.to_read <= 0 and not differs:
            record.unread = f"more than verdict_tokens={parts.verdict_tokens} tokens"
            continue
        try:
            own = evidence[row] if evidence else None
            found = read(parts.target, prompt, new, own, result.baseline.tokens, read_first)
        except (MemoryError, RuntimeError, AssertionError) as error:  # the run goes on, but its verdict is not "passed"
            record.unread, record.unreadable = f"{type(error).__name__}: {first_line(error)}", True
            log.warning("the text of %s is not read again: %s", result.request.id, record.unread)
            continue
        found.tested = sum(r.tested for r in result.speculative.rounds)
        decode, stops = parts.target.tokenizer.decode, parts.target.stop_tokens
        found.ended = ends_where_it_should(new, result.limit, stops, parts.stop_strings, decode)
        result.reading = found
        session.to_read -= len(read_first or ()) + len(prompt) + found.tokens
    group.speculative.evidence = ()
