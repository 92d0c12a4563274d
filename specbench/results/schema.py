"""The schema of results.json: what a run measures, with units.

Field names are those of results.json, version 1: names are added, never changed. Times are seconds; None means that a
number does not exist for this run.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import ConfigDict

from specbench.stats.estimates import (
    CostCheck,
    Derived,
    Drift,
    Experts,
    GammaPick,
    GammaSpeedup,
    Interval,
    Latency,
    Lossless,
    Machine,
    RateLatency,
    Repeats,
)

SCHEMA_VERSION = 1


@dataclass
class Memory:
    """Bytes: peak of the process (on CUDA, of the device's allocator), weights, and keys and values of both models. Of
    ranks that share a target, rank 0's."""

    peak_bytes: int
    weights_bytes: int
    kv_bytes: int


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


@dataclass(kw_only=True)
class RunResult(Derived):
    """The result of one run."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(allow_inf_nan=False)

    name: str
    status: str  # "complete", "interrupted" or, of several processes, "incomplete"
    config: dict[str, Any]
    provenance: dict[str, Any]
    operations_factor: float | None  # Theorem 3.11
    c_hat: float  # operations of a drafter step over those of a target step (Definition 3.10)
    gamma: int | None  # of every round; None if a policy varies it
    gamma_sweep: list[GammaSpeedup]  # empty where replay does not hold, see `no_replay`
    regret: float | None  # `gamma_pick` / this run's gamma in the sweep - 1; None if a policy varies it
    lossless: Lossless
    drift: Drift
    latency: dict[str, Latency]  # "speculative" and "baseline"; of a workload that arrives over time, all rates
    memory: Memory
    metrics: dict[str, dict[str, float | None]] = field(default_factory=dict)  # numbers of the group `metric`, by name
    executor: dict[str, Any] = field(default_factory=dict)  # what the executor chose: products by shape and rows
    choices: dict[str, str] = field(default_factory=dict)  # the option that was chosen in each group
    in_turn: dict[str, Any] | None = None  # of runs that were decoded in turn: when they started, and their digests
    gamma_pick: GammaPick | None = None
    cost_check: CostCheck | None = None
    latency_by_rate: list[RateLatency] = field(default_factory=list)
    no_replay: str = ""  # why there is no gamma_sweep
    machine: Machine | None = None
    repeats: Repeats | None = None  # None: it is one process
    acceptance_law: str = ""  # what beta of a guess is
    seconds: dict[str, float] = field(default_factory=dict)  # wall-clock seconds of the run's phases
    beam: BeamNumbers | None = None  # of a run by beam search
    experts: Experts | None = None  # of a mixture-of-experts target that runs eagerly
    placement: Placement | None = None  # of a job of a sweep whose jobs may run at the same time
    workers: list[WorkerNumbers] = field(default_factory=list)  # of a run on several; those that decoded anything
    notes: list[str] = field(default_factory=list)  # warnings, to read before comparing
    schema_version: int = SCHEMA_VERSION

    def as_dict(self) -> dict[str, Any]:
        """The contents of results.json."""
        return dict(plain(dataclasses.asdict(self)))


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
