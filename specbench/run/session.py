"""Decodes groups of requests by one method, timed, after warm-up of every shape and calibration of policies."""

import logging
from collections import abc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from specbench.config.build import Parts
from specbench.data.prompts import Request
from specbench.decoding.noise import prompt_key
from specbench.decoding.scheduler import CacheTooSmallError, Scheduler
from specbench.decoding.sequence import Sequence
from specbench.decoding.speculative import decode_autoregressive, decode_speculative
from specbench.decoding.state import State
from specbench.decoding.timer import Stage, Timer
from specbench.errors import ConfigError, causes
from specbench.measure.record import Rounds, Text
from specbench.measure.recorder import Recorder, round_numbers
from specbench.models.language_model import LanguageModel
from specbench.policies.base import Costs, FixedGamma, GammaPolicy
from specbench.run.batching import Batch
from specbench.verifiers.base import Verifier

log = logging.getLogger(__name__)
TOKENS = 16  # of a warm-up
SHORT = 3  # tokens of a job whose limit cuts its first draft
CALIBRATION_TOKENS = 32  # per gamma, for policies that choose by cost
# Stages whose seconds the requests share.
SHARED = {"prefill_seconds": Stage.PREFILL, "drafter_prefill_seconds": Stage.DRAFTER_PREFILL,
          "record_seconds": Stage.RECORD}  # fmt: skip


@dataclass
class Decoded:
    """What one method made of a group of requests."""

    texts: list[Text]
    draws: abc.Sequence[Any] = ()  # by request, what stood behind its tokens, for the verdict
    drift: abc.Sequence[Any] = ()  # by request, how far its output distribution is from p, of lossy verifiers
    searches: abc.Sequence[Any] = ()  # by request, what `decoding=beam` found
    kv_bytes: int = 0


@dataclass
class Session:
    """Decodes requests, speculatively or plainly, through the same rows."""

    parts: Parts
    _state: State | None = field(default=None, repr=False)

    def job(self, request: Request, new_tokens: int | None = None) -> Sequence:
        """What the decoder needs of a request, for at most `new_tokens` (those of the run) new tokens."""
        parts = self.parts
        limit = min(len(request.tokens) + (new_tokens or parts.root.max_new_tokens), parts.target.context)
        return Sequence(list(request.tokens), limit, prompt_key(parts.root.seed, request.id), request.encoder_input)

    def decode(
        self, jobs: abc.Sequence[Sequence], speculative: bool, columns: int,
        arrivals: abc.Sequence[float] | None = None, *, policy: GammaPolicy | None = None,
        verifier: Verifier | None = None, keep: bool = False,
    ) -> Decoded:  # fmt: skip
        """Decodes jobs through the run's rows of `columns` columns; `arrivals` in seconds. Policy and verifier are the
        run's own unless given. `keep`: p and q are kept as room lasts. Raises ConfigError if the cache is too small."""
        parts = self.parts
        policy, verifier = policy or parts.policy, verifier or parts.verifier
        target, drafter = parts.target, parts.drafter
        state = self._idle_state(columns)
        models: list[LanguageModel] = [target, *drafter.models] if speculative else [target]
        clock = Timer(target.device)
        numbers, drifts = target.executor.compiled(round_numbers), speculative and verifier.lenience < 1
        recorder = Recorder(verifier, numbers, keep=keep, drifts=drifts)
        reader = target.hidden_reader
        target.hidden_reader = reader if speculative else None  # plain decoding keeps no hidden states for a drafter
        target.allocate(parts.root.batch_size, columns)
        alone = target.reads_alone(parts.root.batch_size)
        scheduler = Scheduler(jobs, models, parts.root.prefill_chunk, parts.spare, arrivals, alone)

        try:
            if speculative:
                decode_speculative(state, target, drafter, policy, verifier, clock, recorder, scheduler)
            else:
                decode_autoregressive(state, target, verifier, clock, recorder, scheduler)
        except CacheTooSmallError as error:
            raise ConfigError(str(error)) from error
        finally:
            target.hidden_reader = reader
        return Decoded(
            texts_of(scheduler, clock, recorder, target.tokenizer),
            recorder.draws(len(jobs)) if keep else (),
            recorder.drift(len(jobs)),
            kv_bytes=sum(model.cache_bytes() for model in models),
        )

    def _idle_state(self, columns: int) -> State:
        """The idle state of the run: one object at the same addresses, until more columns are needed."""
        parts, target = self.parts, self.parts.target
        columns = target.executor.columns(columns)
        if self._state is None or self._state.tokens.shape[1] < columns:
            self._state = State.idle(
                parts.root.batch_size, columns, target.stop_tokens, target.device, parts.stop_strings
            )
        self._state.clear()
        return self._state


def texts_of(scheduler: Scheduler, clock: Timer, recorder: Recorder, tokenizer: Any) -> list[Text]:
    """Joins what scheduler, timer and recorder know of each request. Seconds of a call are split evenly among the rows
    that it served; those of reading prompts and of recording evenly among the requests."""
    stages = clock.rounds()
    count = len(scheduler.sequences)
    rounds = recorder.rounds([own for own in stages if Stage.VERIFY in own], count)
    shared = {name: sum(own.get(stage, 0.0) for own in stages) / count for name, stage in SHARED.items()}
    texts = []
    for sequence, own in zip(scheduler.sequences, rounds, strict=True):
        calls = zip(own.draft, own.verify, own.accept, own.host, own.rows, strict=True)
        seconds = sum(sum(phase) / rows for *phase, rows in calls)
        ids = [int(token) for token in sequence.generated]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        texts.append(Text(ids, text, seconds, **shared, rounds=own, times=sequence.times or None))
    return texts


def warm_up(session: Session, batch: Batch) -> None:
    """Makes the first calls, which pay for allocation, thread pools, compilation and capture. With fixed shapes they
    decode every draft length at every text length that has other shapes; without, the largest draft and none."""
    parts, executor = session.parts, session.parts.target.executor
    if not parts.decoding.samples:  # a search meets its shapes within one request
        parts.decoding.decode(parts, [session.job(batch.requests[0], SHORT)], batch.columns, speculative=True)
        return
    executor.warm, whole = False, executor.whole_rounds
    fixed = executor.fixed_shapes
    end = batch.columns - parts.spare
    first = list(batch.requests[0].tokens)
    lengths = executor.lengths(batch.columns) if fixed else []
    gammas = [*reversed(parts.policy.widths)] if fixed else [parts.policy.largest]
    for length in dict.fromkeys(max(1, min(length, end - 1)) for length in lengths or [min(len(first), TOKENS)]):
        prompt = (first * length)[:length]
        with going_on(f"warm-up at {length} tokens"):
            for verifier in parts.verifier.levels:
                jobs = row_jobs(session, batch, prompt, [TOKENS], end)
                session.decode(jobs, False, batch.columns, verifier=verifier)
                for gamma in dict.fromkeys((*gammas, 0)):
                    policy = FixedGamma(gamma, parts.policy)
                    jobs = row_jobs(session, batch, prompt, [gamma + TOKENS, SHORT] if fixed else [gamma + SHORT], end)
                    for keep in (False, parts.root.verdict_tokens > 0):
                        session.decode(jobs, True, batch.columns, policy=policy, verifier=verifier, keep=keep)
    if executor.whole_rounds != whole:  # it was not possible: the calls of each stage have not been met
        return warm_up(session, batch)
    executor.warm = True
    for name, peer in parts.peers.items():
        with going_on(f"warm-up of {name}"):
            peer.columns = batch.columns
            peer.decode(session.job(batch.requests[0], TOKENS))


def row_jobs(session: Session, batch: Batch, prompt: list[int], new: abc.Sequence[int], end: int) -> list[Sequence]:
    """For each row a job of each number of new tokens, none longer than `end` tokens in all."""
    limits = {min(len(prompt) + tokens, end) for tokens in new}
    rows = range(session.parts.root.batch_size)
    return [Sequence(prompt, limit, row, batch.longest_input) for limit in limits for row in rows]


@contextmanager
def going_on(what: str) -> Iterator[None]:
    """Inside, an error of the device or of a compiler is logged, and the run goes on: a prompt will fail too."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        log.warning("%s failed: %s", what, causes(error))


def add_rounds(costs: Costs, rounds: Rounds) -> None:
    """Adds the rounds of a text but its first, which is slower than others."""
    for i in range(1, len(rounds)):
        seconds = rounds.draft[i] + rounds.verify[i] + rounds.accept[i] + rounds.host[i]
        costs.calls[rounds.steps[i]].append(seconds)
        costs.acceptance = costs.acceptance[0] + sum(rounds.betas[i]), costs.acceptance[1] + rounds.tested[i]


def calibrate(session: Session, batch: Batch) -> None:
    """Decodes some tokens of the first prompts with every gamma, twice in turn, for a policy that chooses by cost."""
    parts, costs = session.parts, Costs()
    for turn, gamma in enumerate([*range(parts.policy.largest + 1)] * 2):
        requests = [batch.requests[(turn + row) % len(batch.requests)] for row in range(parts.root.batch_size)]
        jobs = [session.job(request, min(CALIBRATION_TOKENS, parts.root.max_new_tokens)) for request in requests]
        policy = FixedGamma(gamma, parts.policy)
        for text in session.decode(jobs, True, batch.columns, policy=policy).texts:
            add_rounds(costs, text.rounds)
    parts.policy.calibrate(costs)
