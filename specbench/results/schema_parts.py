"""Parts of results.json about servers among the peers, workers, and where a job of a sweep ran."""

from dataclasses import dataclass

from specbench.stats.estimates import Estimate, Interval, Latency


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
