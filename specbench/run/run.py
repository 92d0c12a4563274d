"""Runs: every prompt is decoded by each method and plainly, in turn, read for the verdict, and recorded."""

import datetime
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import IO, Any

import numpy as np
import torch
from omegaconf import OmegaConf

from specbench.config.build import Parts, build
from specbench.config.compose import DRAFTING
from specbench.data.prompts import Request, content_hash
from specbench.errors import CommandError, ConfigError, causes, first_line
from specbench.executors import waiting
from specbench.measure.record import Facts, Record, Status, append, read
from specbench.measure.results import results
from specbench.models.language_model import LanguageModel
from specbench.report import files
from specbench.report.files import Logger, Opening
from specbench.report.terminal import progress, summary
from specbench.run.batching import Batch, Requests
from specbench.run.jobs import Job, alike, decoded_before, locked
from specbench.run.provenance import bytes_per_second, forget_earlier_runs, peak_bytes, provenance
from specbench.run.readers import read_texts, tokens_read
from specbench.run.session import Decoded, Session, calibrate, warm_up

log = logging.getLogger(__name__)
Decoder = tuple["Method | None", str]  # a method, or None for plain decoding; the name of its peer or ""


@dataclass(eq=False)
class Method:
    """One job: its parts, its session, its records, and the file to which they are appended."""

    job: Job
    parts: Parts
    session: Session
    logger: Logger
    file: IO[str]
    records: dict[str, Record]  # by id
    tokens_read: Counter[str]  # of the records, by what they were read again for
    notes: list[str] = field(default_factory=list)
    kv_bytes: int = 0

    def add(self, record: Record) -> None:
        """Writes the record of a request."""
        append(self.file, record)
        self.records[record.id] = record
        self.tokens_read.update(tokens_read([record]))
        try:
            self.logger.progress(record)
        except Exception as error:
            log.warning("the logger is not told of %s (%s)", record.id, first_line(error))


class Seconds(dict[str, float]):
    """Wall-clock seconds of the parts of a run, by name."""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Adds the time inside to a part."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self[name] = self.get(name, 0.0) + time.perf_counter() - begin


def execute(
    jobs: Sequence[Job], announce: Callable[[str], None] = log.info, place: str = "", begun: float | None = None
) -> list[files.Run | Exception]:
    """Decodes every prompt by all jobs before the next prompt begins, and writes the files of each job; returns its
    run, or why it has none. Prompts that an interrupted run with the same configuration has decoded are not decoded
    again. `begun` is when the command began, by time.perf_counter. After Ctrl-C what is finished is measured. Raises
    ConfigError if a job is not possible or its folder is in use, KeyboardInterrupt if nothing was finished."""
    seconds, started = Seconds(), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    if begun is not None:
        seconds["start"] = time.perf_counter() - begun
    begin = time.perf_counter()
    with ExitStack() as stack:
        for job in jobs:
            stack.enter_context(locked(job.folder))
        with seconds("load"):
            targets: dict[str, LanguageModel] = {}
            tell = chain([announce], repeat(log.info))  # the memory of the first of several
            cohorts = [
                [opened(job, build(job.checked, next(tell), targets), stack) for job in together]
                for together in alike(jobs, DRAFTING)
            ]
        methods = [method for cohort in cohorts for method in cohort]
        if len(methods) > 1:
            announce(f"comparing {len(methods)} methods on each prompt, with plain decoding as baseline")
        status = decode(cohorts, seconds, stack.enter_context(progress(place)))
        device = methods[0].parts.target.device
        known = provenance(device) | {"started": started, "seconds": time.perf_counter() - begin}
        finished = {id(method.job): finish(method, status, known, dict(seconds)) for method in methods}
    found = [finished[id(job)] for job in jobs]
    if status == "interrupted" and not any(isinstance(run, files.Run) for run in found):
        raise KeyboardInterrupt("before a prompt was finished")
    return found


def execute_one(job: Job, **how: Any) -> files.Run:
    """The run of one job, as `execute` has it. Raises CommandError if it has no results, and KeyboardInterrupt."""
    forget_earlier_runs()
    [run] = execute([job], **how)
    if isinstance(run, Exception):
        raise CommandError(f"{first_line(run)}, see {job.folder / 'run.log'}") from run
    if run.results["status"] == "interrupted":
        if job.kind == "run":
            summary(run.results, job.folder)
        raise KeyboardInterrupt(f"the numbers of what was finished are in {job.folder}")
    return run


def opened(job: Job, parts: Parts, stack: ExitStack) -> Method:
    """A method with its logger and its records open; those of a run that was interrupted are kept."""
    path = job.folder / files.RECORDS
    data = f"# prompts {content_hash(parts.prompts)}\n"
    records = decoded_before(job.folder, job.checked.resolved, data)
    # Records without a configuration are not taken over, so that a kill in between mixes no two runs.
    for name in (*(() if records else (files.CONFIG,)), files.RESULTS, files.ROUNDS, files.PAGE):
        (job.folder / name).unlink(missing_ok=True)
    files.write_text(path, "".join(record.line() + "\n" for record in records))
    files.write_text(job.folder / files.CONFIG, OmegaConf.to_yaml(OmegaConf.create(job.checked.resolved)) + data)
    notes = []
    if records:
        notes.append(f"{len(records)} requests were decoded by a process that was interrupted")
        log.info("%s", notes[0])
    logger: Logger = job.checked.choices["logger"].build()
    opening = Opening(parts.root.name, job.folder, job.checked.resolved, job.checked.names, job.kind)
    try:
        logger.open(opening)
    except ConfigError:
        raise
    except Exception as error:
        name = job.checked.names["logger"]
        raise ConfigError(f"logger={name} could not be opened ({first_line(error)}): use logger=none") from error
    stack.push(lambda kind, error, trace: logger.abandon("interrupted" if kind is KeyboardInterrupt else "failed"))
    file = stack.enter_context(path.open("a", encoding="utf-8", newline="\n"))
    by_id = {record.id: record for record in records}
    return Method(job, parts, Session(parts), logger, file, by_id, tokens_read(records), notes)


def decode(cohorts: Sequence[Sequence[Method]], seconds: Seconds, report: Any) -> Status:
    """Decodes a batch by all methods of each cohort, then the next one, until all are done. The methods of a cohort
    share plain decoding. Returns "complete" or, after Ctrl-C, "interrupted"."""
    groups = [Group(cohort, seconds) for cohort in cohorts]
    total, done = sum(len(group.methods) * group.requests.total for group in groups), 0
    waiting = [(group, group.requests.batches()) for group in groups]
    try:
        with torch.inference_mode():
            while waiting:
                for group, batches in list(waiting):
                    batch = next(batches, None)
                    if batch is None:
                        waiting.remove((group, batches))
                        continue
                    report(done, total, "decoding" if group.warm else "warming up")
                    group.decode(batch)
                    done += len(batch.requests) * len(group.methods)
                    report(done, total, "decoding")
    except KeyboardInterrupt:
        log.warning("interrupted after %d of %d requests: measuring what is there", done, total)
        return "interrupted"
    finally:
        for group in groups:
            for method in group.methods:
                method.notes += group.requests.notes
    return "complete"


class Group:
    """Methods whose settings differ in nothing that plain decoding depends on."""

    def __init__(self, methods: Sequence[Method], seconds: Seconds):
        self.methods, self.seconds = methods, seconds
        self.requests = Requests(methods[0].parts, max(method.parts.spare for method in methods))
        # One method decodes plainly for all: one whose verifier adds nothing to a plain step.
        self.plain = min(methods, key=lambda method: extra_work(method.parts.verifier))
        self.warm = 0  # columns that were warmed up

    def decode(self, batch: Batch) -> None:
        """Decodes the requests of a batch by all methods that have no record of them, and records them."""
        missing = [request for request in batch.requests if any(request.id not in own.records for own in self.methods)]
        if missing:
            self.warm_up(batch)
            decoded = self.by_all_decoders(missing, batch)
            for method in self.methods:
                for record in self.recorded(method, missing, batch.number, decoded):
                    if record.id not in method.records:
                        method.add(record)
        for request in batch.requests:  # the baseline's answer is the history of the next turn, for every method
            known = self.plain.records.get(request.id)
            if known is not None and known.baseline is not None:
                self.requests.answers[request.prompt_id].append(known.baseline.text)

    def warm_up(self, batch: Batch) -> None:
        """Warms up if this batch needs more columns than those before it; calibrates policies once."""
        if batch.columns <= self.warm:
            return
        with self.seconds("warm_up"):
            for method in self.methods:
                warm_up(method.session, batch)
                if method.parts.policy.calibrated and not self.warm:
                    calibrate(method.session, batch)
        self.warm = batch.columns

    def by_all_decoders(self, requests: Sequence[Request], batch: Batch) -> Mapping[Decoder, Any]:
        """What each decoder made of the requests: a `Decoded`, a list of a peer's outputs or the error. The order
        changes with the number of the batch, so that none is always behind the same one."""
        decoders: list[Decoder] = [(None, ""), *((method, "") for method in self.methods)]
        decoders += [(method, name) for method in self.methods for name in method.parts.peers]
        if len(decoders) == 2:
            order = decoders[batch.number % 2 :] + decoders[: batch.number % 2]
        else:
            order = [decoders[i] for i in np.random.default_rng(batch.number).permutation(len(decoders))]
        return {decoder: self.by_one(decoder, requests, batch) for decoder in order}

    def by_one(self, decoder: Decoder, requests: Sequence[Request], batch: Batch) -> Any:
        """What one decoder made of the requests; an error of the device, as when memory runs out, is theirs alone."""
        method, peer = decoder
        session = (method or self.plain).session
        jobs = [session.job(request) for request in requests]
        arrivals = batch.arrivals[: len(jobs)] if batch.arrivals else None
        try:
            if method is not None and peer:
                with self.seconds("peers"):
                    return method.parts.peers[peer].decode_all(jobs)
            with self.seconds("plain" if method is None else "speculative"):
                if not session.parts.decoding.samples:
                    texts, found, held = session.parts.decoding.decode(
                        session.parts, jobs, batch.columns, speculative=method is not None
                    )
                    return Decoded(texts, searches=found, kv_bytes=held)
                keep = any(own.parts.verifier.judged for own in ([method] if method else self.methods))
                return session.decode(jobs, method is not None, batch.columns, arrivals, keep=keep)
        except (RuntimeError, MemoryError) as error:
            log.warning("%s failed: %s", ", ".join(request.id for request in requests), causes(error))
            return error

    def recorded(
        self, method: Method, requests: Sequence[Request], number: int, decoded: Mapping[Decoder, Any]
    ) -> Iterator[Record]:
        """The records of a batch for one method; texts are read again for the verdict."""
        plain, ours = decoded[None, ""], decoded[method, ""]
        error = next((own for own in (plain, ours) if isinstance(own, Exception)), None)
        for row, request in enumerate(requests):
            record = Record(
                request.id, request.prompt_id, request.turn, request.category, process=0, group=number,
                prompt=request.text, prompt_tokens=request.prompt_tokens,
                encoder_tokens=None if request.encoder_input is None else len(request.encoder_input),
                limit=method.session.job(request).limit - len(request.tokens), speculative=None, baseline=None,
            )  # fmt: skip
            if error is not None:
                record.failed = causes(error)
                yield record
                continue
            assert isinstance(plain, Decoded) and isinstance(ours, Decoded)
            record.speculative, record.baseline = ours.texts[row], plain.texts[row]
            record.peers = {name: decoded[method, name][row] for name in method.parts.peers}
            method.kv_bytes = max(method.kv_bytes, ours.kv_bytes)
            with self.seconds("verdict"):
                read_texts(method, request, record, ours, plain, row)
            yield record


def extra_work(verifier: Any) -> tuple[bool, ...]:
    """What a verifier does in a plain step that others do not."""
    return verifier.looks_ahead, len(verifier.levels) > 1, verifier.lenience < 1


def finish(
    method: Method, status: Status, known: Mapping[str, Any], seconds: dict[str, float]
) -> files.Run | Exception:
    """Computes the results of a method, and gives files and logger the run. Returns it, or why every prompt failed."""
    method.file.flush()
    records, parts = read(method.job.folder / files.RECORDS), method.parts
    facts = facts_of(method, status, known, seconds)
    try:
        found = results(records, facts)
    except RuntimeError as error:
        return error
    if not parts.decoding.samples:
        own = parts.decoding.results(records, facts, parts.policy.largest, parts.target.dtype != torch.float32)
        found["lossless"] = own.pop("lossless")
        found["details"] |= own
    from specbench.report.page import write_run  # loads matplotlib, which decoding does without

    run = write_run(method.job.folder, found, records)
    try:
        method.logger.finish(run)
    except Exception as error:
        log.warning("the logger failed (%s): the results are in %s", first_line(error), run.folder)
    return run


def facts_of(method: Method, status: Status, known: Mapping[str, Any], seconds: dict[str, float]) -> Facts:
    """What the results need beside the records."""
    parts = method.parts
    target, drafter, verifier = parts.target, parts.drafter, parts.verifier
    models, chosen = [target, *drafter.models], parts.checked.choices["drafter"]
    if not method.kv_bytes:  # all requests were decoded by an earlier process
        target.allocate(parts.root.batch_size, parts.spare + 2)
    lossless, template = verifier.lossless and verifier.lenience == 1, ""
    if target.chat_template:
        from specbench.data.chat import template_name

        template = template_name(target.tokenizer)
    return Facts(
        name=parts.root.name,
        config=parts.checked.resolved,
        provenance=dict(known),
        gamma=parts.policy.constant,
        greedy=parts.root.temperature == 0,
        expected_lossless=lossless,
        lossy_reason="" if lossless else verifier.note or f"lenience={verifier.lenience:g}",
        batch_size=parts.root.batch_size,
        c_hat=drafter.operations_per_token / target.operations_per_token,
        step_bytes=target.step_bytes,
        column_bytes=target.cache.column_bytes(),
        peak_bytes_per_second=bytes_per_second(target.device),
        memory={
            "peak_bytes": peak_bytes(target.device),
            "weights_bytes": sum(model.weight_bytes for model in models) + drafter.own_bytes,
            "kv_bytes": method.kv_bytes,
        },
        seconds=seconds,
        drafter_context=drafter.context if drafter.context < target.context and parts.policy.largest else None,
        begin=None if target.start_tokens is None else len(target.start_tokens),
        status=status,
        notes=[*parts.notes, *method.notes, *waiting.told(), *target.executor.notes(), *unequal(models)],
        data=content_hash(parts.prompts),
        dtype=str(target.dtype).removeprefix("torch."),
        template=template,
        acceptance_rule=verifier.acceptance_rule(chosen.kind, chosen.settings) if parts.decoding.samples else "",
        choices=parts.checked.names,
        overrides=list(method.job.overrides),
        batch_invariant=target.batch_invariant(parts.root.batch_size, parts.policy.largest + 1, drafter),
    )  # fmt: skip


def unequal(models: Sequence[LanguageModel]) -> list[str]:
    """A note where layers of one model run in few operations or kernels, and those of another as they are written."""
    written = [model.name for model in models if model.fused is None]
    if not 0 < len(written) < len(models):
        return []
    return [f"{', '.join(written)} runs as it is written, the other in fewer operations, which c contains: see run.log"]
