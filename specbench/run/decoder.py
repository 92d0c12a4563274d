"""The session of a run: decodes groups of requests and times them."""

from collections import abc
from collections.abc import Callable
from typing import Any

from specbench.config.components import Components
from specbench.decoding.autoregressive import decode_autoregressive
from specbench.decoding.executor import Executor
from specbench.decoding.model import Model
from specbench.decoding.scheduler import CacheTooSmallError, Scheduler
from specbench.decoding.sequence import Sequence, StopStrings
from specbench.decoding.speculative import RoundHook, decode_speculative
from specbench.decoding.state import State
from specbench.decoding.timer import READING, Lap, Timer
from specbench.errors import ConfigError
from specbench.models.flops import expert_layers
from specbench.policies.base import GammaPolicy
from specbench.run.recorder import Recorder, round_numbers
from specbench.stats.costs import CostTable
from specbench.stats.experts import ExpertCounter
from specbench.stats.records import DecodedRequest, DecodeResult, RequestTimes, Round
from specbench.verifiers.base import Verifier


class Session:
    """Decodes requests, speculatively or plainly, through the same rows. It owns the state and the table of costs."""

    def __init__(self, parts: Components):
        self.parts, self.rows = parts, parts.batch_size
        self.costs = CostTable()
        self.experts = ExpertCounter(expert_layers(parts.target.module))
        self.text_tokens = 0  # generated tokens so far of the texts that `_read_texts` has met
        self.to_read = parts.verdict_tokens  # tokens that may still be read again for the verdict
        self._state: State | None = None

    def decode(
        self,
        jobs: abc.Sequence[Sequence],
        speculative: bool,
        columns: int,
        arrivals: abc.Sequence[float] | None = None,
        policy: GammaPolicy | None = None,
        verifier: Verifier | None = None,
        evidence: bool = False,
        laws: bool = False,
        again: bool = False,
    ) -> DecodeResult:
        """Decodes `jobs` one way through `rows` rows of `columns` columns; `arrivals` in seconds. Policy and
        verifier are the run's own unless given. `evidence` keeps what speculated tokens were drawn from; `laws`, above
        temperature 0, p of all tokens. `again`: a warm-up or a probe, whose texts no drafter keeps, and the target
        does not read prompts that its cache still holds."""
        parts = self.parts
        if not parts.decoding.samples:
            chosen = (policy or parts.policy) if speculative else None
            searched: DecodeResult = parts.decoding.decode(parts, jobs, columns, chosen)
            return searched
        target, drafter, listener = parts.target, parts.drafter, parts.target.hidden_reader
        policy, verifier = policy or parts.policy, verifier or parts.verifier
        state = self._idle_state(columns)
        state.warm_up = again
        models: list[Model] = [target, *drafter.models] if speculative else [target]
        queue = Scheduler(jobs, models, parts.prefill_chunk, parts.spare, arrivals)
        clock = Timer(target.device)
        evidence, greedy = evidence and speculative, target.sampling.greedy
        laws, evidence = (evidence, False) if greedy else (laws, evidence)
        recorder = Recorder(verifier, parts.metrics, target.executor.leaf(round_numbers), evidence, laws)
        target.hidden_reader = listener if speculative else None  # plain decoding keeps no hidden states for a drafter
        (target.reopen if again else target.allocate)(self.rows, columns)
        record = untimed(target.executor, recorder, self.experts.count)
        try:
            with target.executor.timed(clock.launch), self.experts.watching():
                if speculative:
                    decode_speculative(state, target, drafter, policy, verifier, clock, record, queue)
                else:
                    decode_autoregressive(state, target, verifier, clock, record, queue)
        except CacheTooSmallError as error:
            raise ConfigError(str(error)) from error
        finally:
            target.hidden_reader = listener
        decoded = self._decoded(queue, clock, recorder, models)
        decoded.woken = self.experts.woken
        if evidence or laws:
            decoded.evidence = recorder.evidence(len(jobs))
        return decoded

    @staticmethod
    def _decoded(queue: Scheduler, clock: Timer, recorder: Recorder, models: abc.Sequence[Model]) -> DecodeResult:
        """Joins what queue, clock and recorder know of each request."""
        laps = clock.rounds()
        calls: list[Any] = [lap for lap in laps if Lap.VERIFY in lap]
        own: list[list[Round]] = [[] for _ in queue.sequences]
        for rounds in recorder.rounds(calls):
            for r in rounds:
                own[r.row].append(r)
        outputs = zip(queue.sequences, own, strict=True)
        return DecodeResult(
            requests=[
                DecodedRequest(output.generated, its, RequestTimes(**output.times) if output.times else None)
                for output, its in outputs
            ],
            calls=len(calls),
            laps={lap: sum(each.get(lap, 0.0) for each in calls) for lap in Lap},
            prefill_seconds=sum(lap.get(name, 0.0) for lap in laps for name in READING),
            drafter_prefill_seconds=sum(lap.get(Lap.DRAFTER_PREFILL, 0.0) for lap in laps),
            kv_bytes=sum(model.cache_bytes() for model in models),
        )

    def halve_rows(self) -> None:
        """Half as many rows from now on."""
        self.rows, self._state = self.rows // 2, None

    def _idle_state(self, columns: int) -> State:
        """The idle state of the run: one object at the same addresses, until more columns are needed."""
        parts, target = self.parts, self.parts.target
        columns = target.executor.columns(columns)
        if self._state is None or self._state.tokens.shape[1] < columns:
            strings = StopStrings(parts.stop_strings, target.tokenizer) if parts.stop_strings else None
            self._state = State.idle(self.rows, columns, target.stop_tokens, target.device, strings)
        self._state.clear()
        return self._state


def untimed(executor: Executor, hook: RoundHook, after: Callable[[], None] = lambda: None) -> RoundHook:
    """A round hook, and a call `after` it, whose launches the clock does not count as decoding."""

    def record(*of_round: Any) -> None:
        with executor.timed(lambda: None):
            hook(*of_round)
            after()

    return record
