"""Runs before and between the timed prompts: warm-up, calibration, probes of costs, and a trial before compiling."""

import logging
from collections import abc
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from specbench.config.components import CALIBRATION_TOKENS, EVERY_GAMMA, SHORT, Components, new_tokens
from specbench.data.prompts import Request
from specbench.decoding.encoder_input import EncoderInput
from specbench.decoding.noise import prompt_key
from specbench.decoding.sequence import Sequence
from specbench.errors import ConfigError, causes
from specbench.policies.fixed import FixedGamma
from specbench.run.batching import Batch
from specbench.run.decoder import Session
from specbench.run.machine_watch import BandwidthProbe
from specbench.stats.costs import pace_of
from specbench.stats.records import DecodeResult

log = logging.getLogger(__name__)
Prefixed = tuple[Request, abc.Sequence[int]]  # a request, and the text that was decoded for it so far
WIDTHS, FEW = EVERY_GAMMA, 8  # other gammas that a warm-up without programs meets, at most; behind so many tokens
PROBE_TOKENS = 16  # of a decode that only times rounds with one gamma
ROOM = 4  # or so many more than its gamma
TRIAL_TOKENS, TRIAL_READS = 16, 3  # of a trial before compiling: tokens of each row, each way, and memory probes


def warm_up(session: Session, wanted: Batch) -> None:
    """Makes the first calls, which pay for allocation, thread pools and compilation: with all gammas, at every text
    length at which the executor uses other shapes. On a CPU without programs of fixed shapes these are whole decodes
    with the largest draft and with none, and behind the first FEW tokens one draft of up to WIDTHS other gammas."""
    parts, columns, first = session.parts, wanted.columns, list(wanted.requests[0].tokens)
    end, rows, plain = columns - parts.spare, session.rows, [0] * parts.decoding.samples
    all_shapes = parts.target.executor.fixed_shapes or parts.target.device.type != "cpu"
    lengths = parts.target.executor.lengths(columns) or [len(first)]
    lengths += [length for model in (parts.target, *parts.drafter.models) for length in model.kernel_lengths]
    # A length close to the end of the columns is tried once more with room for a whole draft.
    rooms = (0, parts.policy.largest) if all_shapes else (parts.policy.largest,)
    lengths = list(dict.fromkeys(max(1, min(length, end - 1 - room)) for length in lengths for room in rooms))
    jobs: list[Sequence] = []
    parts.target.executor.prepare()
    # The largest first: others use its memory.
    gammas = list(dict.fromkeys((*(reversed(parts.gammas) if all_shapes else [parts.policy.largest]), *plain)))
    for length in lengths:
        prompt = (first * length)[:length]
        # Room for the longest input is made once.
        jobs = _jobs(prompt, SHORT, end, rows, wanted.longest_input, all_shapes)
        # Texts that are not read again leave less behind, which is once the same for all lengths.
        evidences = {session.to_read > 0, length != lengths[-1] and session.to_read > 0}
        with going_on(f"warm-up at {length} tokens"):
            for level in parts.verifier.levels:
                session.decode(jobs, False, columns, verifier=level)
                for gamma in gammas:
                    policy = FixedGamma(gamma, parts.policy.signal)
                    drafted = _jobs(prompt, gamma, end, rows, wanted.longest_input, all_shapes)
                    for evidence in evidences:
                        session.decode(drafted, True, columns, policy=policy, verifier=level, evidence=evidence,
                                       again=True)  # fmt: skip
            others = [] if all_shapes or not plain else [g for g in parts.gammas if g not in gammas][:WIDTHS]
            for gamma in others:
                short = prompt[:FEW]
                limit = min(len(short) + gamma + 1, end)  # room for one whole draft
                own = [Sequence(short, limit, key, wanted.longest_input) for key in range(rows)]
                session.decode(own, True, columns, policy=FixedGamma(gamma, parts.policy.signal), again=True)
    if parts.target.executor.ready():
        warm_up(session, wanted)
        return
    for name, peer in parts.peers.items():
        with going_on(f"warm-up of {name}"):
            peer.decode(jobs[0])


@contextmanager
def going_on(what: str) -> Iterator[None]:
    """Inside, an error of the device or of a compiler is logged, and the run goes on: a prompt will fail too."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        log.warning("%s failed: %s", what, causes(error))


def _jobs(
    prompt: list[int], gamma: int, end: int, rows: int, encoder_input: EncoderInput | None, all_shapes: bool
) -> list[Sequence]:  # fmt: skip
    """For each row a job whose limit, which is at most `end`, has room for a whole draft. With `all_shapes` three more,
    whose limits leave room for drafts of two, gamma - 1 and no tokens."""
    limits = {min(len(prompt) + new, end) for new in new_tokens(gamma)[: None if all_shapes else 1]}
    return [Sequence(prompt, limit, key, encoder_input) for limit in limits for key in range(rows)]


def calibrate(session: Session, wanted: Batch) -> None:
    """Decodes some tokens of the first prompts with every gamma, for a policy that chooses by cost."""
    for index, gamma in enumerate([0, *session.parts.gammas] * 2):
        probe_costs(session, _others(session, wanted, index), wanted.columns, [gamma], CALIBRATION_TOKENS)
    session.parts.policy.calibrate(session.costs)


def _others(session: Session, wanted: Batch, index: int) -> list[Prefixed]:
    """The requests without texts, begun `index` times as many later as there are rows."""
    begin = index * session.rows % len(wanted.requests)
    return [(request, ()) for request in (*wanted.requests[begin:], *wanted.requests[:begin])]


def probe_costs(
    session: Session,
    texts: abc.Sequence[Prefixed],
    columns: int,
    gammas: abc.Sequence[int],
    tokens: int = 0,
    place: float = 0,
) -> None:
    """Decodes `tokens` tokens (0: enough for a whole draft) of the first requests with constant gammas, from a place
    in their texts (0: its begin, 1: the last from which so many are left), and amidst these plainly, and adds the times
    of the rounds to the session's costs, but for each text's first one, which is slower than others."""
    parts, pace = session.parts, np.nan
    found: list[DecodeResult] = []
    most = tokens or max(PROBE_TOKENS, *(gamma + ROOM for gamma in gammas))
    jobs = probe_jobs(session, texts, most, place)
    for number, gamma in enumerate(gammas):
        with going_on(f"a probe of gamma={gamma}"):
            if number == len(gammas) // 2 and parts.decoding.samples:
                pace = pace_of(session.decode(jobs, False, columns, again=True))
            policy = FixedGamma(gamma, parts.policy.signal)
            found.append(session.decode(jobs, True, columns, policy=policy, again=True))
    for decoded in found:
        session.costs.add((r for request in decoded.requests for r in request.rounds[1:]), pace)


def probe_jobs(session: Session, texts: abc.Sequence[Prefixed], tokens: int, place: float = 0.0) -> list[Sequence]:
    """A job of so many tokens for each row, of the first requests that there are, from a place in their texts."""
    jobs, parts = [], session.parts
    for row in range(session.rows):
        request, own = texts[row % len(texts)]
        begin = int(place * max(0, len(own) - tokens)) if parts.decoding.samples else 0
        prompt = [*request.tokens, *own[:begin]]
        limit = min(len(prompt) + min(parts.max_new_tokens, tokens), parts.target.context)
        jobs.append(Sequence(prompt, limit, prompt_key(parts.seed, f"{request.id} probe {row}"), request.encoder_input))
    return jobs


def pays_to_compile(sessions: abc.Sequence[Session], wanted: Batch, requests: int, warm_up_seconds: float) -> bool:
    """Whether the executor of ways that decode in turn will compile for so many requests, if it can. All are warmed up
    by now. Nothing is decoded for it where not even at the pace of the warm-ups would it take as long as compiling."""
    parts = sessions[0].parts
    executor, *others = [session.parts.target.executor for session in sessions]
    weights = weights_of_programs(parts)
    taken = executor.compile_seconds(weights, others)
    if taken is None or not parts.decoding.samples:
        return False
    if requests * parts.max_new_tokens * warm_up_seconds / SHORT < taken:  # it decoded more than so many, both ways
        return False
    with going_on("a probe before compiling"):
        texts: list[Prefixed] = [(request, ()) for request in wanted.requests]
        decoded: list[tuple[DecodeResult, float]] = []  # with the bytes that a call reads
        for session in sessions:
            own, jobs = session.parts, probe_jobs(session, texts, TRIAL_TOKENS)
            gamma = max(1, own.policy.largest // 2) if own.policy.constant is None else own.policy.constant
            policy = FixedGamma(gamma, own.policy.signal)
            if session is sessions[0]:
                plain = session.decode(jobs, False, wanted.columns, policy=policy, again=True)
                decoded.append((plain, own.target.step_bytes))
            drafts = gamma * sum(model.step_bytes for model in own.drafter.models)
            found = session.decode(jobs, True, wanted.columns, policy=policy, again=True)
            decoded.append((found, own.target.step_bytes + drafts))
        bandwidth = BandwidthProbe(parts.target.device)
        for _ in range(TRIAL_READS):
            bandwidth()
        seconds, least = predicted_seconds(decoded, requests * parts.max_new_tokens, bandwidth.roofs.read)
        return executor.decide(seconds, least, weights, len(sessions))
    return False


def predicted_seconds(
    decoded: abc.Sequence[tuple[DecodeResult, float]], tokens: int, bytes_per_second: float
) -> tuple[float, float]:
    """Seconds of decoding so many tokens in every way, and those of them that reading the weights takes, from a few
    tokens that were `decoded` in each and the bytes that a call of it reads: as if no text ended before its limit, and
    every draft were whole."""
    seconds = least = 0.0
    for found, read in decoded:
        new = sum(len(request.tokens) for request in found.requests)
        seconds += tokens * found.decode_seconds / new
        least += tokens * found.calls * read / bytes_per_second / new
    return seconds, least


def weights_of_programs(parts: Components) -> int:
    """Weights of the models, one counted for each program: the target on one token, and for each draft length of the
    policy the target and the draft."""
    widths = len(parts.policy.widths)
    return (1 + widths) * parts.target.weight_count + widths * sum(m.weight_count for m in parts.drafter.models)
