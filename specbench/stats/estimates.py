"""What is estimated of a run: the dataclasses of results.json. Times are seconds; None: no such number for this run."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Interval = tuple[float, float] | None  # a 95 % interval; None with too few prompts for one
Percentiles = dict[str, float | None]  # {"p50": .., "p90": .., ..}
RECITED = 8  # tokens in a row that stand earlier in prompt or text: the last of them is recited


@dataclass(frozen=True)
class Estimate:
    """A ratio of sums over prompts, with its standard error (prompts as clusters)."""

    mean: float | None
    stderr: float | None
    n: int  # the denominator: positions, guesses or rounds


@dataclass
class Factor:
    """One factor of the measured speedup."""

    factor: float
    ci95: Interval


@dataclass
class Latency:
    """Seconds that requests waited: {"p50": .., "p90": .., "p95": .., "p99": ..}, None without one."""

    queue: Percentiles  # arrival to row, if requests arrive over time
    first_token: Percentiles  # arrival to first token; if requests are all there at once and decode alone, its own time
    per_token: Percentiles  # mean of the tokens after the first round
    time_per_output_token: Percentiles = field(default_factory=dict)  # mean of the tokens after the first one
    inter_token: Percentiles = field(default_factory=dict)  # between the tokens of a round and those of the one before


@dataclass
class Goodput:
    """What is served within the limits of the workload."""

    share: float  # of requests
    tokens_per_second: float  # tokens of these requests / seconds from the first arrival to the last token
    ci95: dict[str, Interval]  # of both; None with too few segments


@dataclass
class Served:
    """How one decoder served the requests that came at one rate."""

    latency: Latency
    ci95: dict[str, dict[str, Interval]]  # of each percentile; None with too few segments, or requests beyond it
    goodput: Goodput | None  # None without limits
    tokens_per_second: float | None = None  # from the first arrival to the last token
    user_tokens_per_second: float | None = None  # of one request, after its first round


@dataclass
class RateLatency:
    """The requests that came at one rate, served by both decoders in turn, segment by segment."""

    rate: float | None  # requests per second; None if the workload has no such number
    segments: int
    requests: int  # that are counted: without the first of each segment, one for every row
    decoders: dict[str, Served]  # "speculative" and "baseline"
    ratio: dict[str, dict[str, Factor | None]]  # of each percentile, speculative over plain decoding


@dataclass
class GeometricMean:
    """The geometric mean over prompts of the speedup of each."""

    mean: float
    ci95: Interval


@dataclass
class SpeedupOfSome:
    """`Speedup`, of some of the prompts."""

    measured: float
    ci95: Interval
    end_to_end: float
    end_to_end_ci95: Interval
    geometric_mean: GeometricMean


@dataclass
class CategoryNumbers:
    """The numbers of the prompts of one category, as those of the whole run."""

    prompts: int
    tokens: int
    rounds: int
    block_efficiency: Estimate
    alpha: Estimate
    speedup: SpeedupOfSome
    tokens_per_second: float
    baseline_tokens_per_second: float
    recited: float | None = None  # share of new tokens that are recited (`RECITED`)


@dataclass
class EntropyBin:
    """Tested guesses where the entropy of a distribution was within [low, high) nats; no `high`: and above."""

    low: float
    high: float | None
    alpha: Estimate
    accepted: Estimate  # accepted / tested


@dataclass
class ConfidenceBin:
    """Positions where the drafter's largest probability was within [low, high), or [low, 1]: of the target's own text
    `positions`, the mean of that probability (`confidence`) and of p there (`agreement`); of the speculated text
    accepted / tested."""

    low: float
    high: float
    positions: int
    confidence: float | None
    agreement: float | None
    accepted: Estimate


@dataclass
class DrafterCalibration:
    """Whether the token that the drafter finds most likely is as likely as it says. `error` is the mean distance of
    confidence and agreement over bins, weighted by positions (the expected calibration error)."""

    error: float
    confidence: float
    agreement: float
    positions: int
    bins: list[ConfidenceBin]


@dataclass
class AcceptanceCheck:
    """Whether as many guesses were accepted as their betas say: z = (accepted - expected) / sd, with `expected` the sum
    of beta and `sd` the root of the sum of beta (1 - beta) over tested guesses."""

    z: float
    accepted: int
    expected: float
    sd: float


@dataclass
class Acceptance:
    """Which guesses are accepted."""

    lengths: list[int]  # rounds with 0, 1, 2, ... accepted guesses
    conditional: list[Estimate]  # by place in the round: accepted / tested
    joint: list[Estimate]  # by place i: rounds that accepted the first i guesses / rounds with so many guesses
    by_entropy: dict[str, list[EntropyBin]]  # of the "drafter" and of the "target"; empty if no text was read
    by_token_class: dict[str, Estimate]  # accepted / tested, by the kind of the guess
    calibration: DrafterCalibration | None
    check: AcceptanceCheck | None  # None for verifiers that do not accept with probability beta


@dataclass
class Rate:
    """How fast one decoder was."""

    tokens: int
    tokens_per_second: float  # all rows together
    user_tokens_per_second: float  # of one row


@dataclass
class RowsRate:
    """Calls that served `rows_from` to `rows_to` rows. None: this decoder had no such call."""

    rows_from: int
    rows_to: int
    speculative: Rate | None
    baseline: Rate | None


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
    """What rounds of probes cost on one half of the prompts, at plain decoding's mean pace. Replay charges it to the
    texts of the other half."""

    clusters: list[list[str]]  # ids of this half's requests whose text replay can use; those of a cluster together
    by_gamma: list[RoundCost]
    covariance: list[list[float]]  # of the monotone fit to the shares of `by_gamma`, seconds squared, by a bootstrap
    prompts: list[int] = field(default_factory=list)  # clusters that rounds of each of `by_gamma` are of


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
    over_own: Factor | None = None  # over the run's own gamma on the same texts and costs; None without halves


@dataclass
class CostCheck:
    """The time that replay charges for the run's own rounds over the time that they took: 1 if costs are right."""

    factor: float
    ci95: Interval  # with the error of the costs; None without halves
    passed: bool  # else there is no `gamma_sweep`: 1 is outside of the interval, or this is too wide to be of use


@dataclass
class Speedup:
    """Speculative over plain decoding: ratios of seconds per token, of decoding only except `end_to_end`."""

    measured: float
    ci95: Interval  # of one process another one may lie outside; of `repeats` it holds for another one
    end_to_end: float  # prefill of target and drafter included
    theorem_3_8: float | None  # prediction of Theorem 3.8
    corrected: float | None  # block_efficiency / (gamma c + v + o): Theorem 3.8 without its assumptions
    accounting: dict[str, Factor]  # Theorem 3.8 and the causes of the difference; their product is `measured`
    end_to_end_ci95: Interval = None
    geometric_mean: GeometricMean | None = None
    wall: float | None = None  # `measured`, with both times by the host's clock; on a CPU they are the same
    clusters: int | None = None  # that `ci95` resamples: prompts, or with several rows groups of them
    process_share: float | None = None  # of `repeats`: the share of the squared width of `ci95` that is of processes


@dataclass
class DecoderTV:
    """Total variation between the p that the decoder used and the stock module's, over `positions`."""

    mean: float | None  # None if a number is not finite
    largest: float | None
    mean_limit: float | None  # what rounding explains
    largest_limit: float | None
    positions: int
    within: bool  # the mean and every position
    quantiles: dict[str, float | None] = field(default_factory=dict)  # of each position's over its limit


@dataclass
class Detectable:
    """The smallest faults that nine of ten runs of this size would find; None where there is no such number."""

    lenience: float | None  # the closest to 1; 0: that every guess is accepted
    # Total variation per draw, by kind: of the output at tested positions towards the drafter's distribution, of
    # recovered and bonus tokens and of guesses towards another temperature.
    by_kind: dict[str, float | None] = field(default_factory=dict)


@dataclass
class AlphaOwn:
    """Whether alpha is the drafter's own: the total variation between the q of tested guesses and that of the drafter's
    stock module on the same text, or what the drafter says when it is asked again."""

    passed: bool | None  # None if it was not tested
    reason: str = ""  # why not; empty also if no guess was tested
    total_variation: float | None = None  # mean
    largest: float | None = None
    limit: float | None = None  # of the largest: what rounding explains
    positions: int = 0
    mean_limit: float | None = None


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
    verdict: str = ""
    reason: str = ""
    decoder_tv: DecoderTV | None = None
    detectable: Detectable = field(default_factory=lambda: Detectable(None))
    reread: Reread = field(default_factory=lambda: Reread(0, 0, 0.0))
    alpha_own: AlphaOwn = field(default_factory=lambda: AlphaOwn(None))


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
    ci95: dict[str, Interval] = field(default_factory=dict)  # of tv and kl


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


@dataclass(kw_only=True)
class Derived:
    """The numbers that sums give: all, except what `cost` and `bandwidth` have from elsewhere. Of `drift` it has total
    variation, KL and their intervals."""

    alpha: Estimate
    alpha_counted: Estimate
    alpha_on_target_text: Estimate  # Corollary 3.6: beta at every position of plain decoding's text
    beta_by_position: list[Estimate]  # by place in the round, over tested positions
    alpha_by_category: dict[str, Estimate]
    draft_acceptance_rate: float | None  # accepted / drafted, which is not alpha
    block_efficiency: Estimate  # tokens per target call, of all calls together (pooled)
    cost: Cost
    speedup: Speedup
    optimal_gamma: int | None  # gamma* of Theorem 3.8 (section 3.5)
    throughput: dict[str, float]  # new tokens per second of decoding, all rows together
    speedup_over: dict[str, SpeedupOver]
    bandwidth: Bandwidth
    recording: float | None  # seconds spent on measuring / seconds of decoding, which do not include them
    drift: Any
    counts: Counts
    throughput_ci95: dict[str, Interval] = field(default_factory=dict)
    by_category: dict[str, CategoryNumbers] = field(default_factory=dict)  # if the data name categories
    by_length: dict[str, CategoryNumbers] = field(default_factory=dict)  # by tokens of the prompt, if they differ much
    acceptance: Acceptance | None = None
    block_efficiency_of_requests: Estimate | None = None  # the mean of each request's tokens per target call
    recited: float | None = None  # share of new tokens that end 8 tokens in a row which stand earlier in prompt or text
    throughput_by_rows: list[RowsRate] = field(default_factory=list)  # of runs whose rows decode together
