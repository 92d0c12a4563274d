"""The schema of results.json: what a run measures, with units.

Field names are those of results.json, version 1: names are added, never changed. Times are seconds; None means that a
number does not exist for this run.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from specbench.results.schema_parts import Acceptance as Acceptance
from specbench.results.schema_parts import CategoryNumbers as CategoryNumbers
from specbench.results.schema_parts import EqualTexts as EqualTexts
from specbench.results.schema_parts import Estimate as Estimate
from specbench.results.schema_parts import Factor as Factor
from specbench.results.schema_parts import FirstDifference as FirstDifference
from specbench.results.schema_parts import GeometricMean as GeometricMean
from specbench.results.schema_parts import Interval as Interval
from specbench.results.schema_parts import Latency as Latency
from specbench.results.schema_parts import Placement as Placement
from specbench.results.schema_parts import RateLatency as RateLatency
from specbench.results.schema_parts import RowsRate as RowsRate
from specbench.results.schema_parts import ServerNumbers as ServerNumbers
from specbench.results.schema_parts import WorkerNumbers as WorkerNumbers

SCHEMA_VERSION = 1


@dataclass
class RoundCost:
    """Seconds of a round with `gamma` drafter steps: medians over `rounds` of the run itself and of short probes
    between its prompts, all scaled by one factor to the level of the mean."""

    gamma: int
    draft_seconds: float
    verify_seconds: float
    other_seconds: float  # accept and host
    share: float  # seconds of the call / rows that it served
    rounds: int


@dataclass
class HalfCosts:
    """What rounds cost on one half of the prompts. Replay charges it to the texts of the other half."""

    clusters: list[list[str]]  # ids of this half's requests whose text replay can use; those of a cluster together
    by_gamma: list[RoundCost]
    covariance: list[list[float]]  # of the shares of `by_gamma`, seconds squared, by a bootstrap over clusters


@dataclass
class Communication:
    """Time in collectives of ranks that share the target, waiting for the slowest of them included: rank 0's."""

    processes: int
    backend: str  # gloo or nccl
    share: float  # of the time of speculative decoding
    plain_share: float  # of plain decoding
    # In single-token target steps, parts of the costs of the same names.
    step: float  # of such a step itself: at most 1
    c: float | None  # 0 where every rank has the whole drafter
    v: float
    o: float  # comparing the ranks' tokens, once a round


@dataclass
class Cost:
    """The cost coefficient c (Definition 3.7) and the costs v and o, which Theorem 3.8 leaves out, in units of a
    single-token target step."""

    c: float | None  # one drafter step
    v: float | None  # the target call of a round (gamma + 1 tokens, fewer where a limit cut it)
    o: float | None  # the part of a round in neither drafter nor target calls
    target_step_seconds: float | None
    drafter_step_seconds: float | None
    verify_seconds: float | None
    by_gamma: list[RoundCost]
    # Not in results of earlier versions.
    o_wall: float | None = None  # o with the round's length by the host's clock; on a CPU it is o
    ci95: dict[str, Interval] = field(default_factory=dict)  # of c, v, o and target_step_seconds
    prefill_seconds: float | None = None  # in which target and drafter read a prompt, mean
    drafter_prefill_seconds: float | None = None  # the drafter's part
    plain_prefill_seconds: float | None = None  # of plain decoding
    halves: list[HalfCosts] = field(default_factory=list)  # two; none with too few prompts for halves, or no replay
    read_again: float | None = None  # the part of v in which a recurrent target read kept tokens again, if it did
    communication: Communication | None = None  # None for a target of one process


@dataclass
class GammaSpeedup:
    """The speedup that a constant gamma would have had on this run's text, by replay."""

    gamma: int
    speedup: float
    ci95: Interval


@dataclass
class GammaPick:
    """What is gained by taking the gamma that replay finds best: it is chosen on one half of the prompts and judged on
    the other, both ways."""

    gammas: list[int]  # that each half chose; one if all prompts chose and judged
    speedup: float  # of all prompts, each with the gamma that the other half chose
    ci95: Interval
    in_sample: bool  # whether the same prompts chose and judged, so that the speedup is too high


@dataclass
class Prediction:
    """The speedup of every second prompt, predicted from the other prompts, and as it was measured."""

    speedup: float
    ci95: tuple[float, float]  # for what is measured
    measured: float
    requests: int  # that it is about


@dataclass
class Speedup:
    """Speculative over plain decoding: ratios of seconds per token, of decoding only except `end_to_end`."""

    measured: float
    ci95: Interval  # of one process another one may lie outside; of `repeats` it holds for another one
    end_to_end: float  # prefill of target and drafter included
    theorem_3_8: float | None  # prediction of Theorem 3.8
    corrected: float | None  # block_efficiency / (gamma c + v + o), times plain decoding's time over its calls' time
    accounting: dict[str, Factor]  # Theorem 3.8 and the causes of the difference; their product is `measured`
    # Not in results of earlier versions.
    predicted: Prediction | None = None
    end_to_end_ci95: Interval = None
    geometric_mean: GeometricMean | None = None
    wall: float | None = None  # `measured`, with both times by the host's clock; on a CPU they are the same


@dataclass
class DecoderTV:
    """Total variation between the p that the decoder used and the stock module's, over `positions`."""

    mean: float | None  # None if a number is not finite
    largest: float | None
    mean_limit: float | None  # what rounding explains
    largest_limit: float | None
    positions: int
    within: bool  # the mean and every position


@dataclass
class Detectable:
    """The smallest faults that nine of ten runs of this size would find; None where there is no such number."""

    tv: float | None  # total variation of the output distribution at tested positions, towards the drafter's
    lenience: float | None  # the closest to 1


@dataclass
class Reread:
    """What the verdict read once more with the stock module, and the seconds that it took, outside all other times."""

    texts: int
    tokens: int  # new ones
    seconds: float


@dataclass
class Lossless:
    """Whether the output distribution is the target's: `expected` of these settings, `passed` by the test (None: not
    tested, or not enough). `verdict` is "passed", "failed", "untested", "inconclusive" or "lossy" (by choice)."""

    expected: bool
    passed: bool | None
    method: str
    statistic: float | None  # None if a probability is not finite
    threshold: float
    detail: dict[str, Any]
    # Not in results of earlier versions.
    verdict: str = ""
    reason: str = ""
    decoder_tv: DecoderTV | None = None
    detectable: Detectable = field(default_factory=lambda: Detectable(None, None))
    reread: Reread = field(default_factory=lambda: Reread(0, 0, 0.0))


@dataclass
class SpeedupOver:
    """Our speculative decoding over a peer: ratio of seconds per token, of decoding only."""

    measured: float
    ci95: Interval


@dataclass
class Bandwidth:
    """Bytes of weights, keys and values that a one-token step reads, per second of its time. Of ranks that share a
    target, rank 0's part of them."""

    target_bytes_per_second: float | None
    drafter_bytes_per_second: float | None
    measured_peak_bytes_per_second: float
    target_share_of_peak: float | None  # of what was measured to be read
    # Not in results of earlier versions.
    copy_bytes_per_second: float | None = None  # of a copy, each byte read and written; only on CUDA
    ci95: dict[str, Interval] = field(default_factory=dict)  # of the target's and the drafter's bytes per second


@dataclass
class Drift:
    """The distance of the output distribution from the target's at tested positions (A.5), and signs of it in the
    text."""

    tv: float | None  # mean total variation
    kl: float | None  # mean KL(output | target), nats; at temperature 0, log-probability lost to the argmax
    bound: float | None  # largest s(x) * lenience / p(x) of the output distribution s, at most 1 (A.5)
    repetition: float  # share of 4-grams that occurred before in the same output
    distinct_2: float  # different 2-grams / 2-grams, all outputs together
    baseline_repetition: float
    baseline_distinct_2: float
    # Not in results of earlier versions.
    ci95: dict[str, Interval] = field(default_factory=dict)  # of tv and kl


@dataclass
class Memory:
    """Bytes: peak of the process (on CUDA, of the device's allocator), weights, and keys and values of both models. Of
    ranks that share a target, rank 0's."""

    peak_bytes: int
    weights_bytes: int
    kv_bytes: int


@dataclass
class Machine:
    """Whether the machine was the same all through the run, and what that was judged by; None where there was too
    little to see, or no way."""

    steady: bool
    reasons: list[str]  # why it was not
    step_drift: float | None  # change of plain decoding's step time over the run: .1 is 10 % slower at the end
    step_drift_stderr: float | None
    step_halves: float | None  # the median of the second half of the groups over that of the first, - 1
    compute_variation: float | None  # (90th percentile - 10th) / median of short probes
    bandwidth_variation: float | None
    others: float | None  # other processes' share of the cores that this process may use
    steal: float | None  # share of these cores that the host gave to other machines
    probes: int


@dataclass
class Counts:
    """Raw counts over all finished prompts."""

    prompts: int = 0
    rounds: int = 0  # per row: a round of two rows counts twice
    tokens: int = 0
    drafted: int = 0
    tested: int = 0
    accepted: int = 0
    recovered: int = 0
    bonus: int = 0
    failed: int = 0
    too_long: int = 0  # requests that leave no room for a token in the context, or follow such a one
    accepted_before_stop: int = 0  # also guesses that a stop then cut off
    baseline_tokens: int = 0
    verified: int = 0  # tokens that the target's calls read: the last committed one and every guess of each row


@dataclass
class BeamNumbers:
    """Of runs by beam search: widths, and what the search took (A.4). A run is the reading of one token by one model;
    a level is a token of every hypothesis. Levels behind the end of the best text count here, and nowhere else."""

    beams: int  # w
    drafter_beams: int  # u
    length_penalty: float
    early_stopping: bool
    levels: int
    plain_levels: int
    calls: int  # of the target
    target_runs: int
    plain_target_runs: int
    drafter_runs: int
    target_runs_a_call: float  # mean
    most_target_runs_a_call: int  # w + u gamma (A.4)
    operations_factor: float  # all runs of both models, in operations, over plain beam search's
    equal: int  # requests whose hypotheses are plain beam search's, in the same order
    requests: int


@dataclass
class WokenExperts:
    """Calls of one way of decoding with the same number of tokens, of all rows together."""

    way: str  # "plain", or "verify": the target calls of rounds
    tokens: int
    calls: int
    woken: float  # distinct experts of a layer, mean
    expected: float  # if tokens were routed independently and evenly


@dataclass
class Experts:
    """Of mixture-of-experts targets: how many routed experts the target's calls woke, distinct ones of a layer, mean
    over layers and calls. Weights of experts that nobody wakes are not read."""

    layers: int  # with experts
    experts: int  # of a layer
    chosen: int  # by each token
    plain: float  # woken by a call of plain decoding
    verify: float  # woken by the target call of a round
    weights_v: float  # bytes of weights that the call of a round reads / a call of plain decoding: v if bytes take time
    by_tokens: list[WokenExperts]


@dataclass
class Repeats:
    """Fresh processes on the same prompts, whose sums were pooled. Times by replay (`cost.by_gamma`, `gamma_sweep` and
    what belongs to it) are those of the first one, and so are the files on its texts."""

    processes: int  # that are pooled
    failed: int  # that have no result
    vary: str  # what differs between them: "none", "order", "seed" or "both"
    sd: dict[str, float | None]  # between processes, standard deviation / mean: of speedup, costs and throughput
    counts: Counts  # of the first process, whose prompts, rounds and positions stand in the folder


@dataclass
class RunResult:
    """The result of one run."""

    name: str
    status: str  # "complete", "interrupted" or, of several processes, "incomplete"
    config: dict[str, Any]
    provenance: dict[str, Any]
    alpha: Estimate
    alpha_counted: Estimate
    alpha_on_target_text: Estimate  # Corollary 3.6: beta at every position of plain decoding's text
    beta_by_position: list[Estimate]  # by place in the round, over tested positions
    alpha_by_category: dict[str, Estimate]
    draft_acceptance_rate: float | None  # accepted / drafted, which is not alpha
    block_efficiency: Estimate  # tokens per target call
    cost: Cost
    speedup: Speedup
    operations_factor: float | None  # Theorem 3.11
    c_hat: float  # operations of a drafter step over those of a target step (Definition 3.10)
    optimal_gamma: int | None  # gamma* of Theorem 3.8 (section 3.5)
    gamma: int | None  # of every round; None if a policy varies it
    gamma_sweep: list[GammaSpeedup]  # empty where replay does not hold, see `no_replay`
    regret: float | None  # `gamma_pick` / this run's gamma in the sweep - 1; None if a policy varies it
    lossless: Lossless
    throughput: dict[str, float]  # new tokens per second of decoding, all rows together
    speedup_over: dict[str, SpeedupOver]
    bandwidth: Bandwidth
    recording: float  # seconds spent on measuring / seconds of decoding, which do not include them
    drift: Drift
    latency: dict[str, Latency]  # "speculative" and "baseline"; of a workload that arrives over time, all rates
    memory: Memory
    counts: Counts
    metrics: dict[str, dict[str, float | None]] = field(default_factory=dict)  # numbers of the group `metric`, by name
    throughput_ci95: dict[str, Interval] = field(default_factory=dict)
    executor: dict[str, Any] = field(default_factory=dict)  # what the executor chose: products by shape and rows
    choices: dict[str, str] = field(default_factory=dict)  # the option that was chosen in each group
    in_turn: dict[str, Any] | None = None  # of runs that were decoded in turn: when they started, and their digests
    gamma_pick: GammaPick | None = None
    latency_by_rate: list[RateLatency] = field(default_factory=list)
    no_replay: str = ""  # why there is no gamma_sweep
    machine: Machine | None = None
    repeats: Repeats | None = None  # None: it is one process
    by_category: dict[str, CategoryNumbers] = field(default_factory=dict)  # if the data name categories
    acceptance: Acceptance | None = None
    throughput_by_rows: list[RowsRate] = field(default_factory=list)  # of runs whose rows decode together
    seconds: dict[str, float] = field(default_factory=dict)  # wall-clock seconds of the run's phases
    beam: BeamNumbers | None = None  # of a run by beam search
    experts: Experts | None = None  # of a mixture-of-experts target that runs eagerly
    servers: dict[str, ServerNumbers] = field(default_factory=dict)  # peers that are servers, by name
    placement: Placement | None = None  # of a job of a sweep whose jobs may run at the same time
    workers: list[WorkerNumbers] = field(default_factory=list)  # of a run on several; those that decoded anything
    notes: list[str] = field(default_factory=list)  # warnings, to read before comparing
    schema_version: int = SCHEMA_VERSION

    def as_dict(self) -> dict[str, Any]:
        """The contents of results.json."""
        found: dict[str, Any] = plain(dataclasses.asdict(self))
        return found


def plain(value: Any) -> Any:
    """The value in JSON's types only: tuples become lists, numbers that are not finite become null."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested dicts: {"speedup": {"measured": 2}} becomes {"speedup/measured": 2}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}/")
        else:
            flat[prefix + key] = value
    return flat
