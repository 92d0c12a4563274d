"""Decodes a group of requests by one method, and times it."""

from collections import abc
from dataclasses import dataclass, field
from typing import Any

from specbench.config.build import Parts
from specbench.data.prompts import Request
from specbench.decoding.autoregressive import decode_autoregressive
from specbench.decoding.noise import prompt_key
from specbench.decoding.scheduler import CacheTooSmallError, Scheduler
from specbench.decoding.sequence import Sequence
from specbench.decoding.speculative import decode_speculative
from specbench.decoding.state import State
from specbench.decoding.timer import Stage, Timer
from specbench.errors import ConfigError
from specbench.measure.record import Text
from specbench.measure.recorder import Recorder, round_numbers
from specbench.models.language_model import LanguageModel
from specbench.policies.base import GammaPolicy
from specbench.verifiers.base import Verifier


@dataclass
class Decoded:
    """What one method made of a group of requests."""

    texts: list[Text]
    draws: abc.Sequence[Any] = ()  # by request, what stood behind its tokens, for the verdict
    drift: abc.Sequence[Any] = ()  # by request, how far its output distribution is from p, of lossy verifiers
    searches: abc.Sequence[Any] = ()  # by request, what `decoding=beam` found
    kv_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Seconds of decoding, all requests together."""
        return sum(text.seconds for text in self.texts)


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
        self,
        jobs: abc.Sequence[Sequence],
        speculative: bool,
        columns: int,
        arrivals: abc.Sequence[float] | None = None,
        *,
        policy: GammaPolicy | None = None,
        verifier: Verifier | None = None,
        keep: bool = False,
    ) -> Decoded:
        """Decodes jobs through the run's rows of `columns` columns; `arrivals` in seconds. Policy and verifier are the
        run's own unless given. `keep`: p and q of the tokens are kept for the verdict, as far as there is room.
        Raises ConfigError if the cache is too small."""
        parts = self.parts
        policy, verifier = policy or parts.policy, verifier or parts.verifier
        target, drafter = parts.target, parts.drafter
        state = self._idle_state(columns)
        models: list[LanguageModel] = [target, *drafter.models] if speculative else [target]
        scheduler = Scheduler(jobs, models, parts.root.prefill_chunk, parts.spare, arrivals)
        clock = Timer(target.device)
        recorder = Recorder(
            verifier,
            target.executor.compiled(round_numbers),
            keep=keep,
            drifts=speculative and verifier.lenience < 1,
            greedy=target.sampling.greedy,
        )
        reader = target.hidden_reader
        target.hidden_reader = reader if speculative else None  # plain decoding keeps no hidden states for a drafter
        target.allocate(parts.root.batch_size, columns)

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
    rounds = recorder.rounds([own for own in stages if Stage.VERIFY in own], len(scheduler.sequences))
    shared = {
        name: sum(own.get(stage, 0.0) for own in stages) / len(scheduler.sequences)
        for name, stage in (
            ("prefill_seconds", Stage.PREFILL),
            ("drafter_prefill_seconds", Stage.DRAFTER_PREFILL),
            ("record_seconds", Stage.RECORD),
        )
    }
    texts = []
    for sequence, own in zip(scheduler.sequences, rounds, strict=True):
        calls = zip(own.draft, own.verify, own.accept, own.host, own.rows, strict=True)
        seconds = sum(sum(phase) / rows for *phase, rows in calls)
        ids = [int(token) for token in sequence.generated]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        texts.append(Text(ids, text, seconds, **shared, rounds=own, times=sequence.times or None))
    return texts
