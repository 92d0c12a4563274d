"""One run: decodes every prompt both ways, interleaved, and measures. Does not use Hydra or W&B."""

import datetime
import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch

from specbench.decoded import Failure, Group, Record, Result
from specbench.decoding.noise import prompt_key
from specbench.decoding.state import Job
from specbench.interrupts import at_once, held
from specbench.measure.bandwidth import BandwidthProbe
from specbench.measure.stock_reading import read
from specbench.measure.text_end import ends_where_it_should
from specbench.measure.text_laws import LIMIT, read_text
from specbench.memory import reset_peak
from specbench.results import RunResult
from specbench.run.parts import Parts
from specbench.run.requests import Requests, Wanted
from specbench.run.session import Session
from specbench.run.summary import summarise
from specbench.run.warm_up import calibrate, probe_costs, warm_up
from specbench.storage.provenance import provenance
from specbench.storage.write import PromptsFile, failure_records, prompt_records
from specbench.visible import first_line

log = logging.getLogger(__name__)
PROBED, PROBED_LATER = 128, 32  # costs are probed before so many groups, and then before every 32nd
Progress = Callable[[int, int, str], None]  # requests done, all requests, what is going on


def run(parts: Parts, out_dir: Path, progress: Progress = lambda done, total, what: None) -> tuple[RunResult, Record]:
    """Decodes all prompts and measures. Every finished group is appended to `prompts.jsonl.part` in `out_dir`, so that
    an interrupted run keeps what it has: a signal ends the decoding, and what is finished is measured. Raises
    KeyboardInterrupt if nothing is, ConfigError if no prompt fits the context or the folder cannot be written,
    RuntimeError if every prompt failed."""
    started, clock = datetime.datetime.now(datetime.UTC), time.perf_counter()
    session, requests, status = Session(parts), Requests(parts), "complete"
    record = Record(columns={name: metric.columns for name, metric in parts.metrics.items()})
    probe = BandwidthProbe(parts.target.device)
    reset_peak(parts.target.device)
    with held(), torch.inference_mode():
        try:
            _decode_all(session, requests, record, probe, out_dir, progress)
        except KeyboardInterrupt:
            if not record.groups:
                raise
            log.warning("interrupted after %d of %d prompts: measuring what is there", _done(record), requests.total)
            status = "interrupted"
        record.too_long = len(requests.too_long)
        facts = provenance(parts.target.device)
        facts |= {"started": started.isoformat(timespec="seconds"), "seconds": time.perf_counter() - clock}
        return summarise(session, record, status, facts, probe.roofs), record


def _decode_all(
    session: Session, requests: Requests, record: Record, probe: BandwidthProbe, out_dir: Path, progress: Progress
) -> None:
    """Decodes every group of requests all ways, after warm-up and probes, then reads betas and writes the group."""
    parts, warm, probes = session.parts, 0, 0
    with PromptsFile(out_dir) as saved:
        for number, wanted in enumerate(requests.groups()):
            with at_once():
                session.costs.source = wanted.requests[0].prompt_id
                if wanted.columns > warm:
                    progress(_done(record), requests.total, "warming up")
                    warm_up(session, wanted)
                    if not warm and parts.policy.calibrated:
                        calibrate(session, wanted)
                    warm = wanted.columns
                if number < PROBED or number % PROBED_LATER == 0:
                    probe()
                    for _ in range(wanted.probes(parts.batch_size)):
                        gamma = parts.gammas[probes % len(parts.gammas)]
                        probe_costs(session, wanted.requests, wanted.columns, gamma)
                        probes += 1
                decoded = _decoded(session, requests, wanted, swap=number % 2 == 1)
            if isinstance(decoded, Failure):
                saved.append(failure_records(decoded))
                record.failures.append(decoded)
            else:
                saved.append(prompt_records(decoded, parts.target.tokenizer))
                record.groups.append(decoded)
                session.costs.add(decoded.speculative.rounds)
                for result in decoded.results:
                    requests.remember(result)
                    with at_once():
                        _read_texts(session, result)
                with at_once():
                    read_again(session, record, decoded)
                decoded.compact()
            progress(_done(record) + len(requests.too_long), requests.total, "decoding")


def _decoded(session: Session, requests: Requests, wanted: Wanted, swap: bool) -> Group | Failure:
    """The requests, decoded all ways. An error of the device, as when memory runs out, is a failure of these requests,
    and the run goes on without them."""
    try:
        return decode_all_ways(session, requests, wanted, swap)
    except RuntimeError as error:
        failure = Failure(wanted.requests, f"{type(error).__name__}: {first_line(error)}")
        log.warning("prompts %s failed: %s", ", ".join(r.id for r in wanted.requests), failure.error)
        return failure


def _done(record: Record) -> int:
    return len(record.results) + sum(len(failure.requests) for failure in record.failures)


def decode_all_ways(session: Session, requests: Requests, wanted: Wanted, swap: bool) -> Group:
    """Decodes the same requests by baseline, speculative decoding and peers, in this order or reversed (`swap`)."""
    parts = session.parts
    jobs = [Job(r.tokens, requests.limit(r), prompt_key(parts.seed, r.id), r.encoder_tokens) for r in wanted.requests]
    ways = ["baseline", "speculative", *parts.peers]
    decoded, peers = {}, {}
    for way in reversed(ways) if swap else ways:
        if way in parts.peers:
            peers[way] = [parts.peers[way].decode(job) for job in jobs]
        else:
            decoded[way] = session.decode(
                jobs, way == "speculative", wanted.columns, wanted.arrivals, evidence=session.to_read > 0
            )
    results = [
        Result(
            request,
            job.limit - len(request.tokens),
            decoded["speculative"].requests[row],
            decoded["baseline"].requests[row],
            {name: peers[name][row] for name in parts.peers},
        )
        for row, (request, job) in enumerate(zip(wanted.requests, jobs, strict=True))
    ]
    return Group(results, decoded["speculative"], decoded["baseline"], wanted.rate)


def _read_texts(session: Session, result: Result) -> None:
    """Reads betas along both texts (one text if they are equal), for about the first LIMIT tokens of a run."""
    parts, ours, theirs = session.parts, result.speculative, result.baseline
    read_already = session.text_tokens
    session.text_tokens += len(ours.tokens)
    if read_already >= LIMIT or not (parts.verifier.judges_by_law and parts.drafter.reads_text):
        return
    prompt, lenience = result.request.tokens, ours.lenience()
    try:
        laws = plain = read_text(parts.target, parts.drafter, prompt, ours.tokens, lenience)
        if ours.tokens != theirs.tokens or set(lenience) != {1.0}:
            plain = read_text(parts.target, parts.drafter, prompt, theirs.tokens, [1.0] * len(theirs.tokens))
    except RuntimeError as error:  # out of memory: the run goes on without these betas
        log.warning("no betas along the text of %s: %s", result.request.id, first_line(error))
        return
    result.speculative_laws, result.baseline_laws = laws, plain


def read_again(session: Session, record: Record, group: Group) -> None:
    """Reads the group's texts with the stock module, for the verdict, while tokens may still be read. At temperature 0
    also every text that differs from plain decoding's."""
    parts, evidence = session.parts, group.speculative.evidence
    for row, result in enumerate(group.results):
        prompt, new = result.request.tokens, result.speculative.tokens
        differs = parts.target.sampling.greedy and new != result.baseline.tokens
        if session.to_read <= 0 and not differs:
            record.unread = f"more than verdict_tokens={parts.verdict_tokens} tokens"
            continue
        try:
            found = read(parts.target, prompt, new, evidence[row] if evidence else None, result.baseline.tokens)
        except (MemoryError, RuntimeError, AssertionError) as error:  # the run goes on, but its verdict is not "passed"
            record.unread, record.unreadable = f"{type(error).__name__}: {first_line(error)}", True
            log.warning("the text of %s is not read again: %s", result.request.id, record.unread)
            continue
        found.tested = sum(r.tested for r in result.speculative.rounds)
        decode, stops = parts.target.tokenizer.decode, parts.target.stop_tokens
        found.ended = ends_where_it_should(new, result.limit, stops, parts.stop_strings, decode)
        result.reading = found
        session.to_read -= len(prompt) + found.tokens
    group.speculative.evidence = ()
