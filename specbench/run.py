"""One run: decode every prompt both ways, interleaved, and measure. Knows neither Hydra nor W&B."""

import contextlib
import datetime
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from specbench.baselines.autoregressive import AutoregressiveBaseline
from specbench.batch import Batch, Decoded, prompt_records
from specbench.data.prompts import Prompt, Request, render
from specbench.decoding.autoregressive import decode_autoregressive
from specbench.decoding.noise import prompt_key
from specbench.decoding.protocols import Drafter, GammaPolicy, Verifier, nodes
from specbench.decoding.queue import Job, Queue
from specbench.decoding.speculative import decode_speculative
from specbench.decoding.state import State
from specbench.decoding.stopping import StopStrings
from specbench.gamma_policies.fixed import FixedGamma
from specbench.measure.bandwidth import BandwidthProbe
from specbench.measure.costs import CostTable
from specbench.measure.recorder import Recorder, round_numbers
from specbench.measure.summary import summarise
from specbench.measure.text import LIMIT, TextLaws, read_text
from specbench.measure.timers import Stopwatch
from specbench.models.language_model import LanguageModel
from specbench.results import RunResult, provenance
from specbench.settings import ConfigError
from specbench.workloads.all_at_once import AllAtOnce

log = logging.getLogger(__name__)
WARM_UP_TOKENS = 16
PROBE_TOKENS = 16  # of a decode that only measures what a round with some gamma costs
CALIBRATION_TOKENS = 32  # per gamma, before the first prompt, for policies that choose by cost
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
    workload: AllAtOnce
    stop_strings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    state: State | None = None
    costs: CostTable = field(default_factory=CostTable)
    text_tokens: int = 0  # whose betas have been read along the text

    @property
    def spare(self) -> int:
        """Columns that a round's guesses may take behind a row's limit."""
        return nodes(self.drafter, self.policy.largest) + 1


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
    probe, gammas = BandwidthProbe(parts.target.device), _gammas(parts)
    out_dir.mkdir(parents=True, exist_ok=True)
    with torch.inference_mode(), (out_dir / "prompts.jsonl.part").open("w", encoding="utf-8") as saved:
        try:
            for requests, columns in _groups(parts, answers, too_long):
                if columns > warm:
                    progress(done, total, "warming up")
                    _warm_up(parts, requests, columns)
                    if not warm and hasattr(parts.policy, "calibrate"):
                        _calibrate(parts, requests, columns)
                    warm = columns
                probe()
                _probe_costs(parts, requests[0], columns, gammas[len(batches) % len(gammas)])
                batch = _decode_all_ways(parts, requests, columns, swap=len(batches) % 2 == 1)
                batches.append(batch)
                if batch.error is None:
                    _remember(parts, batch, answers)
                    parts.costs.add(batch.speculative.rounds)
                for line in prompt_records(batch, parts.target.tokenizer):
                    saved.write(json.dumps(line, ensure_ascii=False) + "\n")
                saved.flush()
                if batch.error is None:
                    _read_texts(parts, batch)
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
    size = len(parts.prompts) if parts.workload.rate is not None else size
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
        columns = max((_limit(parts, r) for r in waiting), default=0) + parts.spare
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
    spare = parts.spare
    for length in parts.target.executor.lengths(columns) or [len(requests[0].tokens)]:
        length = min(length, columns - spare - 1)
        prompt = (requests[0].tokens * length)[:length]
        # Some with whole drafts, and some whose limit cuts the first one, by much or by one guess.
        limits = {min(length + new, columns - spare) for new in (WARM_UP_TOKENS, 3, parts.policy.largest)}
        jobs = [Job(prompt, limit, key) for limit in limits for key in range(parts.batch_size)]
        # A failure here will be met, and recorded, by the prompt itself.
        with contextlib.suppress(RuntimeError):
            decode(parts, jobs, False, columns)
            for level in getattr(parts.verifier, "levels", [parts.verifier]):
                for gamma in _gammas(parts):
                    decode(replace(parts, verifier=level), jobs, True, columns, policy=_constant(gamma, parts.policy))
    for peer in parts.peers.names:
        with contextlib.suppress(RuntimeError):
            parts.peers.decode(peer, jobs[0])


def _gammas(parts: Parts) -> list[int]:
    """The constant gammas that are measured beside the run: all, or where each has programs of its
    own, those that the policy uses."""
    policy = parts.policy
    return [*policy.widths] if parts.target.executor.fixed_shapes else [*range(1, policy.largest + 1)] or [0]


def _constant(gamma: int, policy: GammaPolicy) -> GammaPolicy:
    """A constant gamma whose rounds pay for what `policy` looks at."""
    constant = FixedGamma(FixedGamma.Settings(gamma), None)
    if hasattr(policy, "go_on"):
        constant.signal, constant.go_on = policy.signal, lambda state, count, signals: [True] * len(count)
    return constant


def _calibrate(parts: Parts, requests: list[Request], columns: int) -> None:
    """Some tokens of the first prompts with every gamma, for a policy that chooses by cost."""
    for index, gamma in enumerate([0, *_gammas(parts)] * 2):
        _probe_costs(parts, requests[index % len(requests)], columns, gamma, CALIBRATION_TOKENS)
    parts.policy.calibrate(parts.costs)


def _probe_costs(parts: Parts, request: Request, columns: int, gamma: int, tokens: int = PROBE_TOKENS) -> None:
    """Decodes a few tokens with a constant gamma, for what its rounds cost."""
    limit = min(len(request.tokens) + tokens, _limit(parts, request))
    keys = [prompt_key(parts.seed, f"{request.id} probe {row}") for row in range(parts.batch_size)]
    jobs = [Job(request.tokens, limit, key) for key in keys]
    with contextlib.suppress(RuntimeError):
        parts.costs.add(decode(parts, jobs, True, columns, policy=_constant(gamma, parts.policy)).rounds)


def _read_texts(parts: Parts, batch: Batch) -> None:
    """Betas along both texts, which are one text where they are equal."""
    both = zip(batch.requests, batch.speculative.tokens, batch.baseline.tokens, strict=True)
    for row, (request, ours, theirs) in enumerate(both):
        laws = plain = TextLaws.nothing()
        lenience = batch.speculative.lenience_of(row)
        by_law = parts.verifier.judges_by_law and getattr(parts.drafter, "reads_text", True)
        if parts.text_tokens < LIMIT and by_law:
            try:
                laws = plain = read_text(parts, request.tokens, ours, lenience)
                if ours != theirs or set(lenience) != {1.0}:
                    plain = read_text(parts, request.tokens, theirs, [1.0] * len(theirs))
            except RuntimeError as error:  # out of memory: the run goes on without these betas
                plain = TextLaws.nothing()
                log.warning("no betas along the text of %s: %s", request.id, str(error).splitlines()[0])
        batch.texts.setdefault("speculative", []).append(laws)
        batch.texts.setdefault("baseline", []).append(plain)
        parts.text_tokens += len(ours)


def _decode_all_ways(parts: Parts, requests: list[Request], columns: int, swap: bool) -> Batch:
    """Baseline, speculative and peers on the same requests; who goes first alternates."""
    batch = Batch(requests, [_limit(parts, r) - len(r.tokens) for r in requests])
    jobs = [Job(r.tokens, _limit(parts, r), prompt_key(parts.seed, r.id)) for r in requests]
    arrivals = parts.workload.arrivals(len(jobs))
    ways = ["baseline", "speculative", *parts.peers.names]
    try:
        for way in reversed(ways) if swap else ways:
            if way in parts.peers.names:
                batch.peers[way] = [parts.peers.decode(way, job) for job in jobs]
            else:
                setattr(batch, way, decode(parts, jobs, way == "speculative", columns, arrivals))
    except RuntimeError as error:  # out of memory, a kernel that fails: the run goes on without it
        batch.baseline = batch.speculative = None
        batch.error = f"{type(error).__name__}: {error}".splitlines()[0]
        log.warning("prompts %s failed: %s", ", ".join(r.id for r in requests), batch.error)
    return batch


def decode(
    parts: Parts,
    jobs: list[Job],
    speculative: bool,
    columns: int,
    arrivals: list[float] | None = None,
    policy: GammaPolicy | None = None,
) -> Decoded:
    """Decodes some requests one way through `batch_size` rows of `columns`, and times it. `policy`
    is the run's own unless another is given, for rounds with some gamma."""
    target, drafter = parts.target, parts.drafter
    policy = policy or parts.policy
    if hasattr(drafter, "watch"):
        drafter.watch = policy if hasattr(policy, "go_on") else None
    state = _idle_state(parts, columns)
    models = [target, *getattr(drafter, "models", [])] if speculative else [target]
    queue = Queue(jobs, models, parts.prefill_chunk, parts.spare, arrivals)
    clock = Stopwatch(target.device)
    reduce = target.executor.leaf(round_numbers)
    recorder = Recorder(parts.verifier, target.sampling.greedy, reduce, lambda: target.width)
    target.allocate(parts.batch_size, columns)
    if speculative:
        decode_speculative(state, target, drafter, policy, parts.verifier, clock, recorder, queue)
    else:
        decode_autoregressive(state, target, parts.verifier, clock, recorder, queue)
    laps = clock.rounds()
    calls = [lap for lap in laps if "verify" in lap]
    rounds = recorder.rounds(calls)
    return Decoded(
        tokens=queue.outputs,
        rounds=[r for call in rounds for r in call],
        laps=calls,
        prefill_seconds=sum(lap.get("prefill", 0.0) for lap in laps),
        kv_bytes=sum(model.cache.bytes() for model in models),
        latencies=queue.latencies,
    )


def _idle_state(parts: Parts, columns: int) -> State:
    """One state serves the whole run, at the same addresses, until more columns are needed."""
    target = parts.target
    if parts.state is None or parts.state.tokens.shape[1] < columns:
        strings = StopStrings(parts.stop_strings, target.tokenizer) if parts.stop_strings else None
        parts.state = State.idle(parts.batch_size, columns, target.stop_tokens, target.device, strings)
    parts.state.clear()
    return parts.state
