"""Whether a run pays for compiling its programs: a short decode of both ways predicts how long all of it takes."""

from specbench.config.components import Components
from specbench.decoding.executor import Work
from specbench.policies.gamma.fixed import WatchedGamma
from specbench.run.bandwidth import BandwidthProbe
from specbench.run.batching import Batch
from specbench.run.decoder import Session
from specbench.run.warm_up import SHORT, going_on, probe_jobs
from specbench.stats.records import DecodeResult

TOKENS = 16  # of each row, each way
PROBES = 3  # of the memory's bandwidth


def pays_to_compile(session: Session, wanted: Batch, requests: int, warm_up_seconds: float) -> bool:
    """Whether the executor will compile for a run of so many requests, if it can; the run is warmed up by now. Nothing
    is decoded for it where not even a run at the pace of its warm-up would take as long as compiling."""
    parts = session.parts
    executor, weights = parts.target.executor, weights_of_programs(parts)
    taken = executor.compile_seconds(weights)
    if taken is None or not parts.decoding.samples:
        return False
    if requests * parts.max_new_tokens * warm_up_seconds / SHORT < taken:  # it decoded more than so many, both ways
        return False
    constant = parts.policy.constant
    gamma = max(1, parts.policy.largest // 2) if constant is None else constant
    with going_on("a probe before compiling"):
        jobs, policy = probe_jobs(parts, wanted.requests, TOKENS), WatchedGamma(gamma, parts.policy.signal)
        plain, drafted = (
            session.decode(jobs, drafts, wanted.columns, policy=policy, again=True) for drafts in (False, True)
        )
        bandwidth = BandwidthProbe(parts.target.device)
        for _ in range(PROBES):
            bandwidth()
        seconds, least = predicted(parts, gamma, plain, drafted, requests, bandwidth.roofs.read)
        return executor.decide(Work(seconds, least, weights))
    return False


def predicted(
    parts: Components,
    gamma: int,
    plain: DecodeResult,
    speculative: DecodeResult,
    requests: int,
    bytes_per_second: float,
) -> tuple[float, float]:
    """Seconds of a run of so many requests, and those of them that reading the weights takes, from both ways of
    decoding a few with this gamma: as if no text ended before its limit, and every draft were whole."""
    tokens, seconds, least = requests * parts.max_new_tokens, 0.0, 0.0
    drafted = gamma * sum(model.step_bytes for model in parts.drafter.models)
    for decoded, read in ((plain, parts.target.step_bytes), (speculative, parts.target.step_bytes + drafted)):
        new = sum(len(request.tokens) for request in decoded.requests)
        seconds += tokens * decoded.decode_seconds / new
        least += tokens * decoded.calls * read / bytes_per_second / new
    return seconds, least


def weights_of_programs(parts: Components) -> int:
    """Weights of the models, one counted for each program: the target on one token, and for each draft length of the
    policy the target and the draft."""
    widths = len(parts.policy.widths)
    return (1 + widths) * parts.target.weight_count + widths * sum(m.weight_count for m in parts.drafter.models)
