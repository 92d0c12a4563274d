"""One run: decode every prompt both ways, interleaved, and measure. Knows neither Hydra nor W&B."""

import contextlib
import datetime
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specbench.data.prompts import Prompt, Request, render
from specbench.decoding.autoregressive import decode_autoregressive
from specbench.decoding.noise import prompt_key
from specbench.decoding.speculative import Drafter, GammaPolicy, Verifier, decode_speculative
from specbench.decoding.state import State
from specbench.decoding.stopping import StopStrings
from specbench.measure.recorder import Recorder, Round
from specbench.measure.summary import summarise
from specbench.measure.timers import Stopwatch
from specbench.models.language_model import LanguageModel
from specbench.results import RunResult, provenance
from specbench.settings import ConfigError

log = logging.getLogger(__name__)
WARM_UP_TOKENS = 16


@dataclass
class Parts:
    """Everything a run is made of, built and checked. `config` is what to record of its origin."""

    name: str
    config: dict[str, Any]
    target: LanguageModel
    drafter: Drafter
    policy: GammaPolicy
    verifier: Verifier
    prompts: list[Prompt]
    gamma: int
    lenience: float
    max_new_tokens: int
    batch_size: int
    seed: int
    dtype: torch.dtype
    stop_strings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Decoded:
    """One batch, decoded one way."""

    tokens: list[list[int]]  # new tokens per row
    rounds: list[Round]
    laps: list[dict[str, float]]  # seconds per round of the batch
    steps: list[int]  # drafter steps per round of the batch
    prefill_seconds: float  # of the target, and of the drafter when it read the prompt
    kv_bytes: int

    @property
    def decode_seconds(self) -> float:
        return sum(seconds for laps in self.laps for name, seconds in laps.items() if name != "prefill")


@dataclass
class Batch:
    """The same requests decoded both ways, or the reason why they could not be."""

    requests: list[Request]
    baseline: Decoded | None = None
    speculative: Decoded | None = None
    error: str | None = None


Progress = Callable[[int, int], None]


def run(parts: Parts, out_dir: Path, progress: Progress = lambda done, total: None) -> tuple[RunResult, list[Batch]]:
    """Decodes and measures. Every finished batch is appended to `prompts.jsonl.part` in `out_dir`,
    so an interrupted run keeps what it has. Raises ConfigError if no prompt fits the context."""
    started = datetime.datetime.now(datetime.UTC)
    clock, batches, status = time.perf_counter(), [], "complete"
    answers: dict[str, list[str]] = {prompt.id: [] for prompt in parts.prompts}
    total = sum(len(prompt.turns) for prompt in parts.prompts)
    too_long: list[Request] = []
    done = 0
    out_dir.mkdir(parents=True, exist_ok=True)
    with torch.inference_mode(), (out_dir / "prompts.jsonl.part").open("w", encoding="utf-8") as saved:
        try:
            for requests in _requests(parts, answers, too_long):
                if not batches:
                    _warm_up(parts, requests)
                batch = _decode_both(parts, requests, swap=len(batches) % 2 == 1)
                batches.append(batch)
                if batch.baseline is not None:
                    _remember(parts, batch, answers)
                for line in prompt_records(parts, batch):
                    saved.write(json.dumps(line, ensure_ascii=False) + "\n")
                saved.flush()
                done += len(requests)
                progress(done + len(too_long), total)
        except KeyboardInterrupt:
            if not any(batch.error is None for batch in batches):
                raise
            log.warning("interrupted after %d of %d prompts: measuring what is there", done, total)
            status = "interrupted"
        facts = provenance(parts.target.device)
        facts |= {"started": started.isoformat(timespec="seconds"), "seconds": time.perf_counter() - clock}
        return summarise(parts, batches, len(too_long), status, facts), batches


def _requests(parts: Parts, answers: dict[str, list[str]], too_long: list[Request]) -> Iterator[list[Request]]:
    """Batches of requests: all first turns, then the second turns of those that have one, ..."""
    target = parts.target
    for turn in range(max(len(prompt.turns) for prompt in parts.prompts)):
        waiting = []
        for prompt in parts.prompts:
            if len(prompt.turns) <= turn or len(answers[prompt.id]) != turn:
                continue
            request = render(prompt, answers[prompt.id], target.tokenizer, target.chat_template)
            if not request.tokens:
                raise ConfigError(f"prompt {request.id} is empty, and the tokenizer of {target.name} has no BOS token")
            if len(request.tokens) < target.context:
                waiting.append(request)
            else:  # nor can the turns after it be asked
                too_long += [request] * (len(prompt.turns) - turn)
        if turn == 0 and not waiting:
            shortest = min(len(request.tokens) for request in too_long)
            raise ConfigError(
                f"no prompt fits: the shortest has {shortest} tokens, "
                f"and the context of {target.name} must hold at least one more, {target.context}"
            )
        for begin in range(0, len(waiting), parts.batch_size):
            yield waiting[begin : begin + parts.batch_size]


def _remember(parts: Parts, batch: Batch, answers: dict[str, list[str]]) -> None:
    """The baseline's answers are the history of the next turn, for both decoders."""
    for request, tokens in zip(batch.requests, batch.baseline.tokens, strict=True):
        prompt_id = request.id if request.id in answers else request.id.rsplit("/", 1)[0]
        answers[prompt_id].append(parts.target.tokenizer.decode(tokens, skip_special_tokens=True))


def _warm_up(parts: Parts, requests: list[Request]) -> None:
    """First calls pay for allocation, thread pools and compilation; nobody measures them."""
    for speculative in (False, True):
        # A failure here will be met, and recorded, by the prompt itself.
        with contextlib.suppress(RuntimeError):
            decode(parts, requests, speculative, max_new_tokens=WARM_UP_TOKENS)


def _decode_both(parts: Parts, requests: list[Request], swap: bool) -> Batch:
    """Baseline and speculative on the same requests; who goes first alternates."""
    batch = Batch(requests)
    try:
        for speculative in (True, False) if swap else (False, True):
            decoded = decode(parts, requests, speculative)
            setattr(batch, "speculative" if speculative else "baseline", decoded)
    except RuntimeError as error:  # out of memory, a kernel that fails: the run goes on without it
        batch.baseline = batch.speculative = None
        batch.error = f"{type(error).__name__}: {error}".splitlines()[0]
        log.warning("prompts %s failed: %s", ", ".join(r.id for r in requests), batch.error)
    return batch


def decode(parts: Parts, requests: list[Request], speculative: bool, max_new_tokens: int | None = None) -> Decoded:
    """Decodes one batch one way, and times it."""
    target = parts.target
    budget = parts.max_new_tokens if max_new_tokens is None else max_new_tokens
    state = State.start(
        prompts=[request.tokens for request in requests],
        limits=[min(len(request.tokens) + budget, target.context) for request in requests],
        keys=[prompt_key(parts.seed, request.id) for request in requests],
        stop_tokens=target.stop_tokens,
        spare=parts.policy.largest + 1,
        device=target.device,
        stop_strings=StopStrings(parts.stop_strings, target.tokenizer) if parts.stop_strings else None,
    )
    prefill, clock = Stopwatch(target.device), Stopwatch(target.device)
    recorder = Recorder(parts.lenience, target.sampling.greedy)
    prefill.start()
    target.allocate(state.batch_size, state.tokens.shape[1])
    target.prefill(state)
    prefill.lap("prefill")
    recorder.begin(state)
    if speculative:
        decode_speculative(state, target, parts.drafter, parts.policy, parts.verifier, clock, recorder)
    else:
        decode_autoregressive(state, target, parts.verifier, clock, recorder)
    laps = clock.rounds()
    drafter_cache = getattr(getattr(parts.drafter, "model", None), "cache", None) if speculative else None
    return Decoded(
        tokens=state.new_tokens(),
        rounds=recorder.rounds(laps),
        laps=laps,
        steps=recorder.steps(),
        prefill_seconds=prefill.total() + sum(lap.get("prefill", 0.0) for lap in laps),
        kv_bytes=target.cache.bytes() + (drafter_cache.bytes() if drafter_cache else 0),
    )


def prompt_records(parts: Parts, batch: Batch) -> Iterator[dict[str, Any]]:
    """prompts.jsonl: text in, text out, counts and times, one line per request. In a batch the
    seconds are those of the whole batch."""
    for row, request in enumerate(batch.requests):
        record = {"id": request.id, "category": request.category, "prompt_tokens": len(request.tokens)}
        if batch.error is not None:
            yield record | {"error": batch.error, "prompt": request.text}
            continue
        rounds = [r for r in batch.speculative.rounds if r.row == row]
        betas = [beta for r in rounds for beta in r.beta]
        decode_text = parts.target.tokenizer.decode
        yield record | {
            "tokens": len(batch.speculative.tokens[row]),
            "baseline_tokens": len(batch.baseline.tokens[row]),
            "rounds": len(rounds),
            "alpha": sum(betas) / len(betas) if betas else None,
            "block_efficiency": sum(r.tokens for r in rounds) / len(rounds),
            "decode_seconds": batch.speculative.decode_seconds,
            "baseline_decode_seconds": batch.baseline.decode_seconds,
            "prefill_seconds": batch.speculative.prefill_seconds,
            "baseline_prefill_seconds": batch.baseline.prefill_seconds,
            "batch_size": len(batch.requests),
            "prompt": request.text,
            "output": decode_text(batch.speculative.tokens[row], skip_special_tokens=True),
            "baseline_output": decode_text(batch.baseline.tokens[row], skip_special_tokens=True),
        }
