"""Parts of results.json that stand alone: estimates, waiting times, and the numbers of a run by category, place in the
round, kind of token, entropy and rows. Times are seconds; None means that a number does not exist for this run.
"""

from dataclasses import dataclass, field

Interval = tuple[float, float] | None  # a 95 % interval; None with too few prompts for one
Percentiles = dict[str, float | None]  # {"p50": .., "p90": .., ..}


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
    # Not in results of earlier versions.
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
    # Not in results of earlier versions.
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
class FirstDifference:
    """The first request whose text differs, and where its two texts part."""

    request: str
    character: int  # counted from 0; of texts that agree, with other tokens, their end
    ours: str  # some characters from there on
    theirs: str


@dataclass
class EqualTexts:
    """Whether a peer's texts are those of plain decoding here."""

    compared: int
    equal: int
    first_difference: FirstDifference | None
    reason: str = ""  # why none was compared


@dataclass
class ServerNumbers:
    """Of a peer that is a server: another process, which may be on another machine and serve others too. What it counts
    of its own speculative decoding is translated, or there is a reason why not."""

    url: str
    dialect: str  # vllm, sglang, llama_cpp, transformers or openai
    version: str | None  # as it says, as the model's name
    model: str
    prompts: str  # "ids" or "text": as which it was given prompts
    keeps_prefixes: bool  # whether parts of prompts may not have been read again: first tokens are then early
    at_once: int  # requests under way at once, at most
    latency: Latency  # by this process' clock, the network and HTTP included
    tokens_per_second: float | None  # with the time to the first token; None with several requests at once
    own_tokens_per_second: float | None  # of decoding, by its own clock
    alpha: Estimate  # accepted / tested
    no_alpha: str  # why there is no alpha
    block_efficiency: Estimate  # tokens a target call
    no_block_efficiency: str
    draft_acceptance_rate: float | None  # accepted / drafted, which is not alpha
    drafted: int | None
    accepted: int | None
    texts: EqualTexts


@dataclass
class Placement:
    """What a job of a sweep had of its machine, where jobs may run at the same time."""

    launcher: str
    host: str
    cores: list[int]  # that it alone could use; empty where nobody has given it any
    machine_cores: int  # that it could have used otherwise
    pinned: bool  # whether it was confined to its cores
    devices: str | None  # CUDA_VISIBLE_DEVICES
    beside: int  # other jobs that had cores of this machine: the larger number of its beginning and its end
    shared: list[str]  # why its times are not its own: cores or a device that others used too


@dataclass
class WorkerNumbers:
    """What one of several workers has decoded. Its speedup is the ratio of its own times."""

    worker: int  # from 1 on
    host: str
    device: str
    cores: list[int]  # that it had for itself; none with a device of its own
    threads: int
    requests: int
    tokens: int
    baseline_tokens: int
    tokens_per_second: float | None  # of decoding
    baseline_tokens_per_second: float | None
    speedup: float | None
    speedup_ci95: Interval
    load_seconds: float  # wall-clock seconds from its first call until its models were loaded
    seconds: float  # wall-clock seconds of its groups: all ways of decoding, probes, and what was read again
    lost: bool  # whether its process has died; what it had finished counts
