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

from specbench.baselines.autoregressive import AutoregressiveBaseline, PeerOutput
from specbench.data.prompts import Prompt, Request, render
from specbench.decoding.autoregressive import decode_autoregressive
from specbench.decoding.noise import prompt_key
from specbench.decoding.queue import Job, Queue
from specbench.decoding.speculative import Drafter, GammaPolicy, Verifier, decode_speculative
from specbench.decoding.state import State
from specbench.decoding.stopping import StopStrings
from specbench.measure.bandwidth import BandwidthProbe
from specbench.measure.recorder import Recorder, Round, round_numbers
from specbench.measure.summary import summarise
from specbench.measure.timers import Stopwatch
from specbench.models.language_model import LanguageModel
from specbench.results import RunResult, provenance
from specbench.settings import ConfigError

log = logging.getLogger(__name__)
WARM_UP_TOKENS = 16
ROUNDS_OF_REQUESTS = 4  # requests per row in a group that is decoded one way, then the other


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
    peers: AutoregressiveBaseline
    prefill_chunk: int
    stop_strings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    state: State | None = None


@dataclass
class Decoded:
    """Some requests, decoded one way."""

    tokens: list[list[int]]  # new tokens per request
    rounds: list[Round]
    laps: list[dict[str, float]]  # seconds by lap of each call of the target
    steps: list[int]  # drafter steps before each call of the target
    prefill_seconds: float  # of the target, and of the drafter when it reads prompts
    kv_bytes: int

    @property
    def decode_seconds(self) -> float:
        return sum(map(decoding_seconds, self.laps))

    @property
    def record_seconds(self) -> float:
        return sum(lap["record"] for lap in self.laps)

    def seconds_of(self, row: int) -> float:
        """A request's share of the time: each call's is split evenly among the rows it served."""
        return sum(decoding_seconds(r.seconds) / r.rows for r in self.rounds if r.row == row)


def decoding_seconds(laps: dict[str, float]) -> float:
    """Without reading prompts and without recording."""
    return sum(seconds for name, seconds in laps.items() if name not in ("prefill", "record"))


@dataclass
class Batch:
    """The same requests decoded both ways, or the reason why they could not be."""

    requests: list[Request]
    baseline: Decoded | None = None
    speculative: Decoded | None = None
    peers: dict[str, list[PeerOutput]] = field(default_factory=dict)
    error: str | None = None


Progress = Callable[[int, int, str], None]


def run(
    parts: Parts, out_dir: Path, progress: Progress = lambda done, total, what: None
) -> tuple[RunResult, list[Batch]]:
    """Decodes and measures. Every finished batch is appended to `prompts.jsonl.part` in `out_dir`,
    so an interrupted run keeps what it has. Raises ConfigError if no prompt fits the context."""
    started = datetime.datetime.now(datetime.UTC)
    clock, batches, status = time.perf_counter(), [], "complete"
    answers: dict[str, list[str]] = {prompt.id: [] for prompt in parts.prompts}
    total = sum(len(prompt.turns) for prompt in parts.prompts)
    too_long: list[Request] = []
    done = warm = 0
    probe = BandwidthProbe(parts.target.device)
    out_dir.mkdir(parents=True, exist_ok=True)
    with torch.inference_mode(), (out_dir / "prompts.jsonl.part").open("w", encoding="utf-8") as saved:
        try:
            for requests, columns in _groups(parts, answers, too_long):
                if columns > warm:
                    progress(done, total, "warming up")
                    _warm_up(parts, requests, columns)
                    warm = columns
                probe()
                batch = _decode_all_ways(parts, requests, columns, swap=len(batches) % 2 == 1)
                batches.append(batch)
                if batch.baseline is not None:
                    _remember(parts, batch, answers)
                for line in prompt_records(parts, batch):
                    saved.write(json.dumps(line, ensure_ascii=False) + "\n")
                saved.flush()
                done += len(requests)
                progress(done + len(too_long), total, "decoding")
        except KeyboardInterrupt:
            if not any(batch.error is None for batch in batches):
                raise
            log.warning("interrupted after %d of %d prompts: measuring what is there", done, total)
            status = "interrupted"
        facts = provenance(parts.target.device)
        facts |= {"started": started.isoformat(timespec="seconds"), "seconds": time.perf_counter() - clock}
        return summarise(parts, batches, len(too_long), status, facts, probe.bytes_per_second), batches


def _groups(
    parts: Parts, answers: dict[str, list[str]], too_long: list[Request]
) -> Iterator[tuple[list[Request], int]]:
    """Requests that are decoded one way and then the other, and the columns that the longest of
    their turn needs: all first turns, then the second turns of those that have one, ..."""
    target = parts.target
    size = parts.batch_size * (1 if parts.batch_size == 1 else ROUNDS_OF_REQUESTS)
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
        columns = max((_limit(parts, r) for r in waiting), default=0) + parts.policy.largest + 1
        for begin in range(0, len(waiting), size):
            yield waiting[begin : begin + size], columns


def _limit(parts: Parts, request: Request) -> int:
    return min(len(request.tokens) + parts.max_new_tokens, parts.target.context)


def _remember(parts: Parts, batch: Batch, answers: dict[str, list[str]]) -> None:
    """The baseline's answers are the history of the next turn, for both decoders."""
    for request, tokens in zip(batch.requests, batch.baseline.tokens, strict=True):
        prompt_id = request.id if request.id in answers else request.id.rsplit("/", 1)[0]
        answers[prompt_id].append(parts.target.tokenizer.decode(tokens, skip_special_tokens=True))


def _warm_up(parts: Parts, requests: list[Request], columns: int) -> None:
    """First calls pay for allocation, thread pools and compilation; nobody measures them. Every
    length at which the executor uses other shapes is met once."""
    spare = parts.policy.largest + 1
    for length in parts.target.executor.lengths(columns) or [len(requests[0].tokens)]:
        length = min(length, columns - spare - 1)
        prompt = (requests[0].tokens * length)[:length]
        # Some with whole drafts, and some whose limit cuts the first one.
        limits = [min(length + new, columns - spare) for new in (WARM_UP_TOKENS, 3)]
        jobs = [Job(prompt, limit, key) for limit in limits for key in range(parts.batch_size)]
        for speculative in (False, True):
            # A failure here will be met, and recorded, by the prompt itself.
            with contextlib.suppress(RuntimeError):
                decode(parts, jobs, speculative, columns)
    for peer in parts.peers.names:
        with contextlib.suppress(RuntimeError):
            parts.peers.decode(peer, jobs[0])


def _decode_all_ways(parts: Parts, requests: list[Request], columns: int, swap: bool) -> Batch:
    """Baseline, speculative and peers on the same requests; who goes first alternates."""
    batch = Batch(requests)
    jobs = [Job(r.tokens, _limit(parts, r), prompt_key(parts.seed, r.id)) for r in requests]
    ways = ["baseline", "speculative", *parts.peers.names]
    try:
        for way in reversed(ways) if swap else ways:
            if way in parts.peers.names:
                batch.peers[way] = [parts.peers.decode(way, job) for job in jobs]
            else:
                setattr(batch, way, decode(parts, jobs, way == "speculative", columns))
    except RuntimeError as error:  # out of memory, a kernel that fails: the run goes on without it
        batch.baseline = batch.speculative = None
        batch.error = f"{type(error).__name__}: {error}".splitlines()[0]
        log.warning("prompts %s failed: %s", ", ".join(r.id for r in requests), batch.error)
    return batch


def decode(parts: Parts, jobs: list[Job], speculative: bool, columns: int) -> Decoded:
    """Decodes some requests one way through `batch_size` rows of `columns`, and times it."""
    target, drafter = parts.target, parts.drafter
    state = _idle_state(parts, columns)
    models = [target, drafter.model] if speculative and hasattr(drafter, "model") else [target]
    queue = Queue(jobs, models, parts.prefill_chunk, parts.policy.largest + 1)
    clock = Stopwatch(target.device)
    recorder = Recorder(parts.verifier.beta, target.sampling.greedy, target.executor.leaf(round_numbers))
    target.allocate(parts.batch_size, columns)
    if speculative:
        decode_speculative(state, target, drafter, parts.policy, parts.verifier, clock, recorder, queue)
    else:
        decode_autoregressive(state, target, parts.verifier, clock, recorder, queue)
    laps = clock.rounds()
    calls = [lap for lap in laps if "verify" in lap]
    rounds = recorder.rounds(calls)
    return Decoded(
        tokens=queue.outputs,
        rounds=[r for call in rounds for r in call],
        laps=calls,
        steps=[max(r.gamma for r in call) for call in rounds],
        prefill_seconds=sum(lap.get("prefill", 0.0) for lap in laps),
        kv_bytes=sum(model.cache.bytes() for model in models),
    )


def _idle_state(parts: Parts, columns: int) -> State:
    """One state serves the whole run, at the same addresses, until more columns are needed."""
    target = parts.target
    if parts.state is None or parts.state.tokens.shape[1] < columns:
        strings = StopStrings(parts.stop_strings, target.tokenizer) if parts.stop_strings else None
        parts.state = State.idle(parts.batch_size, columns, target.stop_tokens, target.device, strings)
    parts.state.clear()
    return parts.state


def prompt_records(parts: Parts, batch: Batch) -> Iterator[dict[str, Any]]:
    """prompts.jsonl: text in, text out, counts and times, one line per request. Where rows decode
    together, each has its share of the seconds."""
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
            "decode_seconds": batch.speculative.seconds_of(row),
            "baseline_decode_seconds": batch.baseline.seconds_of(row),
            "prefill_seconds": batch.speculative.prefill_seconds / len(batch.requests),
            "baseline_prefill_seconds": batch.baseline.prefill_seconds / len(batch.requests),
            **{f"{peer}_decode_seconds": outputs[row].decode_seconds for peer, outputs in batch.peers.items()},
            **{f"{peer}_tokens": len(outputs[row].tokens) for peer, outputs in batch.peers.items()},
            "prompt": request.text,
            "output": decode_text(batch.speculative.tokens[row], skip_special_tokens=True),
            "baseline_output": decode_text(batch.baseline.tokens[row], skip_special_tokens=True),
        }
