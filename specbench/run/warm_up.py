"""Decodes before the timed prompts: warm-up of every shape, and calibration of policies that choose by cost."""

import logging
from collections import abc, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from specbench.decoding.sequence import Sequence
from specbench.errors import ConfigError, causes
from specbench.measure.record import Rounds
from specbench.policies.fixed import FixedGamma
from specbench.run.batching import Batch
from specbench.run.session import Session

log = logging.getLogger(__name__)
TOKENS = 16  # of a warm-up
SHORT = 3  # tokens of a job whose limit cuts its first draft
CALIBRATION_TOKENS = 32  # per gamma, for policies that choose by cost


def warm_up(session: Session, batch: Batch) -> None:
    """Makes the first calls, which pay for allocation, thread pools, compilation and capture. With fixed shapes these
    are decodes with every draft length and at every text length at which the executor uses other shapes; without, one
    with the largest draft and one with none."""
    parts, executor = session.parts, session.parts.target.executor
    if not parts.decoding.samples:  # a search meets its shapes within one request
        parts.decoding.decode(parts, [session.job(batch.requests[0], SHORT)], batch.columns, speculative=True)
        return
    executor.warm = False
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
                    policy = FixedGamma(gamma, parts.policy.signal)
                    jobs = row_jobs(session, batch, prompt, [gamma + TOKENS, SHORT] if fixed else [gamma + SHORT], end)
                    for keep in (False, parts.root.verdict_tokens > 0):
                        session.decode(jobs, True, batch.columns, policy=policy, verifier=verifier, keep=keep)
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


@dataclass
class MeasuredCosts:
    """Measured seconds of a call by its drafter steps, and how many guesses were accepted, for gamma policies."""

    calls: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    acceptance: tuple[float, int] = (0.0, 0)  # sum of betas, tested positions

    def add(self, rounds: Rounds) -> None:
        """Adds the rounds of a text but its first, which is slower than others."""
        for i in range(1, len(rounds)):
            seconds = rounds.draft[i] + rounds.verify[i] + rounds.accept[i] + rounds.host[i]
            self.calls[rounds.steps[i]].append(seconds)
            self.acceptance = self.acceptance[0] + sum(rounds.betas[i]), self.acceptance[1] + rounds.tested[i]

    @property
    def alpha(self) -> float:
        """Mean beta so far; 1/2 before there is one."""
        total, tested = self.acceptance
        return (total + 0.5) / (tested + 1)

    def seconds(self, largest: int) -> npt.NDArray[np.float64]:
        """Median seconds of a call with 0 .. largest drafter steps, [largest + 1]: on straight lines between the
        measured ones, and level beyond them."""
        known = sorted(self.calls)
        medians = [float(np.median(self.calls[steps])) for steps in known]
        return np.interp(np.arange(largest + 1), known, medians)


def calibrate(session: Session, batch: Batch) -> None:
    """Decodes some tokens of the first prompts with every gamma, twice in turn, for a policy that chooses by cost."""
    parts, costs = session.parts, MeasuredCosts()
    for turn, gamma in enumerate([*range(parts.policy.largest + 1)] * 2):
        requests = [batch.requests[(turn + row) % len(batch.requests)] for row in range(parts.root.batch_size)]
        jobs = [session.job(request, min(CALIBRATION_TOKENS, parts.root.max_new_tokens)) for request in requests]
        policy = FixedGamma(gamma, parts.policy.signal)
        for text in session.decode(jobs, True, batch.columns, policy=policy).texts:
            costs.add(text.rounds)
    parts.policy.calibrate(costs)
