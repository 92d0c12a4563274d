"""One run among those that are decoded in turn: its session, what it has decoded, and the file that keeps it."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from specbench.config.components import Components
from specbench.decoding import processes
from specbench.decoding.state import Job
from specbench.errors import first_line
from specbench.peers.base import PeerOutput
from specbench.results.schema import RunResult
from specbench.results.writer import PromptsFile, failure_records, prompt_records
from specbench.run.batching import Batch
from specbench.run.decoder import Session
from specbench.run.drafter_reading import read_guesses
from specbench.run.phase_timer import Phases
from specbench.run.reference_scores import ends_where_it_should, read
from specbench.run.signals import allow_signals
from specbench.run.summary import Watch, run_result
from specbench.run.warm_up import calibrate, pays_to_compile, probe_costs, warm_up
from specbench.stats.position_stats import LIMIT, DecodedText, read_texts
from specbench.stats.records import DecodeResult, Failure, Group, Result, RunRecord
from specbench.stats.verdict_records import LAW_BYTES, ReferenceScore

log = logging.getLogger(__name__)
GroupHook = Callable[[Group], None]


class NullWriter:
    """In place of a `PromptsFile`, for a worker of a run: the process that merges writes the file."""

    def append(self, records: Iterable[dict[str, Any]]) -> None:
        pass

    def close(self) -> None:
        pass


class MethodRun:
    """A run. `prompts.jsonl.part` in `out_dir` grows with every finished group."""

    def __init__(self, parts: Components, out_dir: Path | None, told: GroupHook, phases: Phases):
        """`told` is called with each group that is written; without a folder none is. Raises ConfigError if the folder
        cannot be written."""
        self.parts, self.session = parts, Session(parts)
        self.record = RunRecord(columns={name: metric.columns for name, metric in parts.metrics.items()})
        self.saved: PromptsFile | NullWriter = NullWriter() if out_dir is None else PromptsFile(out_dir)
        self._probes, self._told, self._phases = 0, told, phases

    def warm_up(self, wanted: Batch, first: bool, requests: int = 0) -> None:
        """Warm-up for requests of so many columns and, the first time, calibration. Programs may then be compiled for a
        run of so many requests."""
        begun = time.perf_counter()
        warm_up(self.session, wanted)
        seconds = time.perf_counter() - begun
        if first and requests and pays_to_compile(self.session, wanted, requests, seconds):
            warm_up(self.session, wanted)
        if first and self.parts.policy.calibrated:
            calibrate(self.session, wanted)

    def probe_costs(self, wanted: Batch) -> None:
        """Short decodes, each with another constant gamma, whose rounds are timed. The gamma of the run's own rounds
        has more of them than probes could add, and is left out."""
        for _ in range(wanted.probes(self.parts.batch_size)):
            gamma = self.parts.gammas[self._probes % len(self.parts.gammas)]
            self._probes += 1
            if gamma != self.parts.policy.constant:
                probe_costs(self.session, wanted.requests, wanted.columns, gamma)

    @property
    def reads_texts(self) -> bool:
        """Whether betas along the next texts will be read: those of about the first LIMIT tokens of a run."""
        parts = self.parts
        possible = parts.decoding.samples and parts.verifier.judges_by_law and parts.drafter.reads_text
        return possible and self.session.text_tokens < LIMIT

    def decode(self, jobs: Sequence[Job], wanted: Batch, speculative: bool, betas: bool) -> DecodeResult:
        """The jobs of a group, decoded speculatively or plainly. If `betas` will be read along their texts, p of all
        tokens is kept for it, if there is room even if every call keeps one token."""
        target, evidence = self.parts.target, self.session.to_read > 0
        # Positions a call: p of rejected guesses is stored too, and q.
        read = 1 + speculative * (1 + evidence) * self.parts.policy.largest
        size = 4 * target.vocab_size * read * sum(job.limit - len(job.tokens) for job in jobs)
        laws = betas and size <= LAW_BYTES
        return self.session.decode(jobs, speculative, wanted.columns, wanted.arrivals, evidence=evidence, laws=laws)

    def add(
        self,
        wanted: Batch,
        jobs: Sequence[Job],
        ours: DecodeResult,
        plain: DecodeResult,
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
        for row in range(len(results)):
            with allow_signals(), self._phases("betas"):
                self._read_texts(group, row)
        with allow_signals(), self._phases("verdict"):
            read_again(self.session, self.record, group)
        with self._phases("logger"):
            self._told(group)
        return group

    def _read_texts(self, group: Group, row: int) -> None:
        """Reads betas along both texts of a result (one text if they are equal)."""
        parts, result, wanted = self.parts, group.results[row], self.reads_texts
        (ours, theirs), request = result.both, result.request
        self.session.text_tokens += len(ours.tokens)
        if not wanted:
            return
        texts = [DecodedText(ours.tokens, ours.lenience(), kept_law(group.speculative, row))]
        if ours.tokens != theirs.tokens or set(texts[0].lenience) != {1.0}:
            texts.append(DecodedText(theirs.tokens, [1.0] * len(theirs.tokens), kept_law(group.baseline, row)))
        try:
            laws, *others = read_texts(parts.target, parts.drafter, request.tokens, texts, request.encoder_input)
        except RuntimeError as error:  # out of memory: the run goes on without these betas
            processes.current.fail_if_distributed(error)
            log.warning("no betas along the text of %s: %s", request.id, first_line(error))
            return
        result.speculative_laws, result.baseline_laws = laws, others[0] if others else laws

    def fail(self, failure: Failure) -> None:
        """Writes that requests could not be decoded."""
        log.warning("requests %s failed: %s", ", ".join(r.id for r in failure.requests), failure.error)
        self.saved.append(failure_records(failure))
        self.record.failures.append(failure)

    def measure(self, status: str, facts: dict[str, Any], watch: Watch) -> RunResult:
        """Everything that is measured. Raises RuntimeError if every prompt failed."""
        return run_result(self.session, self.record, status, facts, watch)


def kept_law(decoded: DecodeResult, row: int) -> Tensor | None:
    """p [T, V] of the text of a request, if it was kept."""
    return decoded.evidence[row].whole_law(len(decoded.requests[row].tokens)) if decoded.evidence else None


def read_again(session: Session, record: RunRecord, group: Group) -> None:
    """Reads the group's texts with the stock module, for the verdict, while tokens may still be read. At temperature 0
    also every sampled text that differs from plain decoding's."""
    parts = session.parts
    for row, result in enumerate(group.results):
        differs = parts.target.sampling.greedy and result.speculative.tokens != result.baseline.tokens
        if session.to_read <= 0 and not (differs and parts.decoding.samples):
            record.unread = f"more than verdict_tokens={parts.verdict_tokens} tokens"
            continue
        try:
            if parts.decoding.samples:
                result.reading = _read_text(parts, group, row)
            else:
                result.reading = parts.decoding.score(parts.target, result)
        except (MemoryError, RuntimeError, AssertionError) as error:  # the run goes on, but its verdict is not "passed"
            processes.current.fail_if_distributed(error)
            record.unread, record.unreadable = f"{type(error).__name__}: {first_line(error)}", True
            log.warning("the text of %s is not read again: %s", result.request.id, record.unread)
            continue
        session.to_read -= result.request.columns + result.reading.tokens


def _read_text(parts: Components, group: Group, row: int) -> ReferenceScore:
    """What the stock module says of a sampled text."""
    result, evidence = group.results[row], group.speculative.evidence
    prompt, new, own = result.request.tokens, result.speculative.tokens, evidence[row] if evidence else None
    found = read(parts.target, prompt, new, own, result.baseline.tokens, result.request.encoder_input)
    read_guesses(found, parts.drafter, parts.target, result, own)
    found.tested = sum(r.tested for r in result.speculative.rounds)
    decode, stops = parts.target.tokenizer.decode, parts.target.stop_tokens
    found.ended = ends_where_it_should(new, result.limit, stops, parts.stop_strings, decode)
    return found
