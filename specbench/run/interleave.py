"""Runs that are decoded in turn: each group of requests is decoded in all ways before the next one begins."""

import logging
import time
from collections import abc
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from specbench.config.components import FEWEST, Components
from specbench.config.memory import give_back
from specbench.decoding.noise import prompt_key
from specbench.decoding.sequence import Sequence
from specbench.errors import causes, first_line
from specbench.executors.machine import out_of_memory
from specbench.results.writer import PromptsFile, failure_records, prompt_records
from specbench.run.batching import Batch, Requests
from specbench.run.decoder import Session
from specbench.run.drafter_reading import read_guesses
from specbench.run.machine_watch import MachineWatch
from specbench.run.phase_timer import Phases
from specbench.run.reference_scores import SharedScores, ends_where_it_should, read
from specbench.run.signals import allow_signals
from specbench.run.warm_up import calibrate, pays_to_compile, probe_costs, warm_up
from specbench.stats.position_stats import LIMIT, DecodedText, read_texts
from specbench.stats.records import DecodeResult, Failure, Group, Result, RunRecord
from specbench.stats.verdict_records import LAW_BYTES, ReferenceScore
from specbench.verifiers.base import Verifier

log = logging.getLogger(__name__)
PROBED, PROBED_LATER = 128, 32  # costs are probed on so many groups, and then on every 32nd
PROBES = 6  # gammas that are probed at a time
GOLDEN = 0.618034  # multiples of it, modulo 1, are spread evenly however many there are
GroupHook = Callable[[Group], None]
Way = tuple[Any, str]  # the member, or None for plain decoding, and the peer's name or ""
Tell = Callable[[str], None]  # what is going on


class MethodRun:
    """One of the runs: its session, and what it has decoded. `prompts.jsonl.part` in its folder grows with every
    finished group, and `on_group` is called with each; a worker's run has no folder."""

    def __init__(self, parts: Components, out_dir: Path | None, on_group: GroupHook, phases: Phases):
        """Raises ConfigError if the folder cannot be written."""
        self.parts, self.session, self.on_group, self.phases = parts, Session(parts), on_group, phases
        self.record = RunRecord(columns={name: metric.columns for name, metric in parts.metrics.items()})
        self.saved = None if out_dir is None else PromptsFile(out_dir)
        self.probed, self._calibrated = 0, False

    def calibrate(self, wanted: Batch) -> None:
        """Calibration, once, of a policy that needs it; how the run is executed is settled by then."""
        if self.parts.policy.calibrated and not self._calibrated:
            calibrate(self.session, wanted)
        self._calibrated = True

    def probe_costs(self, wanted: Batch, decoded: DecodeResult) -> None:
        """Times rounds of constant gammas, the run's own among them: of up to PROBES in turn, each time begun one
        later, beside plain steps of the same tokens, and at all places of the texts that were `decoded`."""
        plain = [0] * self.parts.decoding.samples  # gamma 0, which replay is checked by
        gammas = list(dict.fromkeys((*plain, *self.parts.gammas)))
        texts = [(request, own.tokens) for request, own in zip(wanted.requests, decoded.requests, strict=True)]
        for _ in range(max(1, len(wanted.requests) // (FEWEST * self.parts.batch_size))):
            count = min(PROBES, len(gammas))
            first = self.probed * count + self.probed * count // len(gammas)
            self.probed += 1
            chosen = [gammas[(first + number) % len(gammas)] for number in range(count)]
            probe_costs(self.session, texts, wanted.columns, chosen, place=self.probed * GOLDEN % 1)

    @property
    def reads_texts(self) -> bool:
        """Whether betas along the next texts will be read: those of about the first LIMIT tokens of a run."""
        parts = self.parts
        possible = parts.decoding.samples and parts.verifier.judges_by_law and parts.drafter.reads_text
        return possible and self.session.text_tokens < LIMIT

    def decode(self, jobs: abc.Sequence[Sequence], wanted: Batch, speculative: bool, betas: bool) -> DecodeResult:
        """The jobs of a group, decoded speculatively or plainly. For `betas` along their texts p of all tokens is kept,
        if there is room even if every call keeps one token."""
        target, evidence = self.parts.target, self.session.to_read > 0
        # Positions a call: p of rejected guesses is stored too, and q.
        read = 1 + speculative * (1 + evidence) * self.parts.policy.largest
        size = 4 * target.vocab_size * read * sum(job.limit - len(job.tokens) for job in jobs)
        laws = betas and size <= LAW_BYTES
        return self.session.decode(jobs, speculative, wanted.columns, wanted.arrivals, evidence=evidence, laws=laws)

    def add(self, group: Group, scores: SharedScores) -> None:
        """Writes a group that was decoded in all ways, then reads its texts."""
        self._note(group)
        self.session.costs.add(group.speculative.rounds)
        for row in range(len(group.results)):
            with allow_signals(), self.phases("betas"):
                self._read_texts(group, row)
        with allow_signals(), self.phases("verdict"):
            read_again(self.session, self.record, group, scores)
        with self.phases("logger"):
            self.on_group(group)

    def _note(self, group: Group) -> None:
        if self.saved is not None:
            self.saved.append(prompt_records(group, self.parts.target.tokenizer))
        self.record.groups.append(group)

    def restore(self, group: Group | None, failure: Failure | None) -> None:
        """Writes what an earlier process has decoded, and read of its texts."""
        if failure is not None:
            self.fail(failure)
        if group is not None:
            self._note(group)
            with self.phases("logger"):
                self.on_group(group)

    def _read_texts(self, group: Group, row: int) -> None:
        """Reads betas along both texts of a result (one text if they are equal)."""
        parts, result, wanted = self.parts, group.results[row], self.reads_texts
        (ours, theirs), request = result.both, result.request
        self.session.text_tokens += len(ours.tokens)
        if not wanted:
            return
        greedy = parts.target.sampling.greedy  # what was kept is p before the argmax
        laws = [None if greedy else kept_law(decoded, row) for decoded in (group.speculative, group.baseline)]
        texts = [DecodedText(ours.tokens, ours.lenience(), laws[0])]
        if ours.tokens != theirs.tokens or set(texts[0].lenience) != {1.0}:
            texts.append(DecodedText(theirs.tokens, [1.0] * len(theirs.tokens), laws[1]))
        try:
            found, *others = read_texts(parts.target, parts.drafter, request.tokens, texts, request.encoder_input)
        except RuntimeError as error:  # out of memory: the run goes on without these betas
            log.warning("no betas along the text of %s: %s", request.id, first_line(error))
            return
        result.speculative_laws, result.baseline_laws = found, others[0] if others else found

    def fail(self, failure: Failure) -> None:
        """Writes that requests could not be decoded."""
        log.warning("requests %s failed: %s", ", ".join(r.id for r in failure.requests), failure.error)
        if self.saved is not None:
            self.saved.append(failure_records(failure))
        self.record.failures.append(failure)


def kept_law(decoded: DecodeResult, row: int) -> Tensor | None:
    """p [T, V] of the text of a request, if it was kept."""
    return decoded.evidence[row].whole_law(len(decoded.requests[row].tokens)) if decoded.evidence else None


def read_again(session: Session, record: RunRecord, group: Group, scores: SharedScores) -> None:
    """Reads the group's texts with the stock module, for the verdict, while tokens may still be read. At temperature 0
    also every sampled text that differs from plain decoding's."""
    parts = session.parts
    if not parts.verifier.judged:
        record.unread = parts.verifier.note or "its verifier is not judged"
        return
    for row, result in enumerate(group.results):
        differs = parts.target.sampling.greedy and result.speculative.tokens != result.baseline.tokens
        if session.to_read <= 0 and not (differs and parts.decoding.samples):
            record.unread = f"more than verdict_tokens={parts.verdict_tokens} tokens"
            continue
        try:
            if parts.decoding.samples:
                result.reading = _read_text(parts, group, row, partial(scores, row))
            else:
                result.reading = parts.decoding.score(parts.target, result)
        except (MemoryError, RuntimeError, AssertionError) as error:  # the run goes on, but its verdict is not "passed"
            record.unread, record.unreadable = f"{type(error).__name__}: {first_line(error)}", True
            log.warning("the text of %s is not read again: %s", result.request.id, record.unread)
            continue
        session.to_read -= result.request.columns + result.reading.tokens


def _read_text(parts: Components, group: Group, row: int, scores: Callable[..., Tensor]) -> ReferenceScore:
    """What the stock module says of a sampled text."""
    result, evidence = group.results[row], group.speculative.evidence
    prompt, new, own = result.request.tokens, result.speculative.tokens, evidence[row] if evidence else None
    found = read(parts.target, prompt, new, own, result.baseline.tokens, result.request.encoder_input, scores)
    try:
        read_guesses(found, parts.drafter, parts.target, result, own)
    except (MemoryError, RuntimeError) as error:  # the target's verdict stands without that on alpha
        found.q_unread = f"{type(error).__name__}: {first_line(error)}"
    found.tested = sum(r.tested for r in result.speculative.rounds)
    decode, stops = parts.target.tokenizer.decode, parts.target.stop_tokens
    found.ended = ends_where_it_should(new, result.limit, stops, parts.stop_strings, decode)
    return found


class InterleavedGroup:
    """Members whose settings differ in nothing that plain decoding's law depends on. One of them decodes plainly for
    all: one whose verifier adds nothing to a plain step (no renewal of noise, no lenience), if there is one."""

    def __init__(self, members: abc.Sequence[MethodRun], watch: MachineWatch, phases: Phases, alone: bool = False):
        """`alone` says that these members are all that are decoded."""
        self.every = self.members = members  # without those that stop
        self.watch, self.phases = watch, phases
        self.alone = alone  # of several groups, some would be compiled and others not
        self.requests = Requests(members[0].parts, max(member.parts.spare for member in members))
        self.plain = min(members, key=lambda member: extra_work(member.parts.verifier))
        self.done = 0  # requests
        self.warm, self.inputs = 0, 0  # columns, and tokens of an encoder's input, that were warmed up
        self.warmed: Batch | None = None  # for what it was warmed up last

    def steps(self, tell: Tell) -> Iterator[Batch]:
        """Warms up for the first group of requests, then decodes one group after the other; yields each time."""
        for wanted in self.requests.groups():
            if not self.members:
                return
            if not self.warm:
                with allow_signals():
                    self.warm_up(wanted, tell)
                yield wanted
            self.step(wanted, wanted.number, tell)
            yield wanted

    def step(self, wanted: Batch, number: int, tell: Tell) -> None:
        """Decodes a group in all ways, the one after `number` others of this process, for all members."""
        probed = number < PROBED or number % PROBED_LATER == 0
        with allow_signals():
            for member in self.members:
                member.session.costs.source = wanted.requests[0].prompt_id
            self.prepare(wanted, tell)
            if probed:
                with self.phases("probes"):
                    self.watch()
            jobs = self._jobs(wanted)
            decoded = self.decode_all_ways(wanted, jobs, number)
            while self.halve_rows(wanted, decoded, tell):
                decoded = self.decode_all_ways(wanted, jobs, number)
        try:
            with allow_signals():
                for member in self.to_probe(number) if probed else ():  # while its prompt is in the cache
                    if isinstance(ours := decoded[member, ""], DecodeResult):
                        with self.phases("probes"):
                            member.probe_costs(wanted, ours)
        finally:  # also if the probes are interrupted: the group is decoded
            self._add(wanted, jobs, decoded)

    def to_probe(self, number: int) -> abc.Sequence[MethodRun]:
        """Whose costs are probed behind a group, the one after `number` others: one of several ways in turn, so that
        probing takes a comparison no longer than a run."""
        return [self.members[number % len(self.members)]]

    def halve_rows(self, wanted: Batch, decoded: Mapping[Way, Any], tell: Tell) -> bool:
        """Whether a group is to be decoded again in all ways, through half as many rows, since memory ran out."""
        rows = self.plain.session.rows
        failed = any(isinstance(found, Failure) and found.memory for found in decoded.values())
        if not failed or rows == 1 or not self.plain.parts.decoding.samples:
            return False
        told = f"memory ran out at {wanted.requests[0].id}: from there on {rows // 2} rows decode together, not {rows}"
        log.warning(told)
        for member in self.every:  # plain decoding's too, which may have stopped
            member.session.halve_rows()
        for member in self.members:
            member.record.notes.append(told)
        give_back()
        self.warm = self.inputs = 0
        self.warm_up(wanted, tell)
        return True

    def prepare(self, wanted: Batch, tell: Tell) -> None:
        """All that comes before a group is decoded."""
        self.warm_up(wanted, tell)
        for member in self.members:
            with self.phases("warm_up"):
                member.calibrate(wanted)

    def without_programs(self, why: str, tell: Tell) -> None:
        """Goes on without compiled programs, and warms up again."""
        for member in self.members:
            member.parts.target.executor.without_programs(why)
        if self.warmed is not None:
            self.warm = self.inputs = 0
            self.warm_up(self.warmed, tell)

    def warm_up(self, wanted: Batch, tell: Tell) -> None:
        """Warms up for a group, if it needs more columns, or a longer input, than those before it."""
        longer = len(wanted.longest_input or ())
        if wanted.columns <= self.warm and longer <= self.inputs:
            return
        tell("warming up")
        first, begun, sessions = not self.warm, time.perf_counter(), [member.session for member in self.members]
        with self.phases("warm_up"):
            for session in sessions:
                session.parts.target.executor.telling(tell)
                warm_up(session, wanted)
            seconds = time.perf_counter() - begun
            if first and self.alone and pays_to_compile(sessions, wanted, self.requests.total, seconds):
                for session in sessions:
                    warm_up(session, wanted)
        self.warm, self.inputs, self.warmed = max(self.warm, wanted.columns), max(self.inputs, longer), wanted

    def decode_all_ways(self, wanted: Batch, jobs: abc.Sequence[Sequence], number: int) -> dict[Way, Any]:
        """What was decoded each way, in an order that turns with the number of the group."""
        ways: list[Way] = [(None, ""), *((member, "") for member in self.members)]
        ways += [(member, name) for member in self.members for name in member.parts.peers]
        return {way: self._one_way(way, wanted, jobs) for way in order_of_ways(ways, number)}

    def _jobs(self, wanted: Batch) -> list[Sequence]:
        parts = self.every[0].parts
        ends = [min(len(r.tokens) + parts.max_new_tokens, parts.target.context) for r in wanted.requests]
        return [
            Sequence(list(request.tokens), end, prompt_key(parts.seed, request.id), request.encoder_input)
            for request, end in zip(wanted.requests, ends, strict=True)
        ]

    def _one_way(self, way: Way, wanted: Batch, jobs: abc.Sequence[Sequence]) -> Any:
        """What was decoded one way; an error of the device, as when memory runs out, is a failure of these requests."""
        member, peer = way
        try:
            with self.phases("peers" if peer else "speculative" if member else "plain"):
                if peer:
                    found = member.parts.peers[peer].decode_all(jobs)
                    for request, output in zip(wanted.requests, found, strict=True):
                        if isinstance(output, RuntimeError):
                            log.warning("%s has no output for %s: %s", peer, request.id, causes(output))
                    return found
                betas = any(m.reads_texts for m in ([member] if member else self.members))
                return (member or self.plain).decode(jobs, wanted, member is not None, betas)
        except (RuntimeError, MemoryError) as error:
            return Failure(wanted.requests, causes(error), out_of_memory(error))

    def _add(self, wanted: Batch, jobs: abc.Sequence[Sequence], decoded: dict[Way, Any]) -> None:
        """Gives each member its part of a decoded group."""
        self.done += len(wanted.requests)
        plain, groups = decoded[None, ""], []
        scores = SharedScores(several=len(self.members) > 1)
        for member in self.members:
            ours, peers = decoded[member, ""], {name: decoded[member, name] for name in member.parts.peers}
            failures = [found for found in (plain, ours) if isinstance(found, Failure)]
            if failures:
                member.fail(failures[0])
                continue
            results = []
            for row, (request, job) in enumerate(zip(wanted.requests, jobs, strict=True)):
                by_peers = {
                    name: RuntimeError(found.error) if isinstance(found, Failure) else found[row]
                    for name, found in peers.items()
                }
                limit = job.limit - len(job.tokens)
                results.append(Result(request, limit, ours.requests[row], plain.requests[row], by_peers))
            groups.append(Group(results, ours, plain, wanted.rate))
            member.add(groups[-1], scores)
        for result in groups[0].results if groups else ():
            self.requests.remember(result)
        for group in groups:
            group.compact()


def order_of_ways(ways: abc.Sequence[Way], number: int) -> list[Way]:
    """The order for one group: two ways take turns; more are shuffled, so that none is always behind the same one."""
    if len(ways) == 2:
        return [*ways[number % 2 :], *ways[: number % 2]]
    return [ways[place] for place in np.random.default_rng(number).permutation(len(ways))]


def extra_work(verifier: Verifier) -> tuple[bool, ...]:
    """What a verifier does in a plain step that others do not."""
    return verifier.looks_ahead, len(verifier.levels) > 1, verifier.lenience < 1
