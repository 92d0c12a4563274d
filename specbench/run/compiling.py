"""Whether a run pays for compiling its programs: a short decode of both ways predicts how long all of it takes."""

from specbench.decoded import Decoded
from specbench.decoding.executor import Work
from specbench.gamma_policies.fixed import WatchedGamma
from specbench.measure.bandwidth import BandwidthProbe
from specbench.run.parts import Parts
from specbench.run.requests import Wanted
from specbench.run.session import Session
from specbench.run.warm_up import going_on, probe_jobs

TOKENS = 16  # of each row, each way
PROBES = 3  # of the memory's bandwidth


def pays_to_compile(session: Session, wanted: Wanted, requests: int) -> bool:
    """Whether the executor will compile for a run of so many requests, if it can; the run is warmed up by now."""
    parts = session.parts
    executor = parts.target.executor
    if not executor.undecided or parts.decoding.rules is not None:
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
        return executor.decide(predicted(parts, gamma, plain, drafted, requests, bandwidth.roofs.read))
    return False


def predicted(
    parts: Parts, gamma: int, plain: Decoded, speculative: Decoded, requests: int, bytes_per_second: float
) -> Work:
    """The work of a run of so many requests, from both ways of decoding a few with this gamma: as if no text ended
    before its limit, and every draft were whole."""
    models, tokens = parts.drafter.models, requests * parts.max_new_tokens
    drafted = sum(model.step_bytes for model in models) * gamma
    seconds = least = 0.0
    for decoded, read in ((plain, parts.target.step_bytes), (speculative, parts.target.step_bytes + drafted)):
        new = sum(len(request.tokens) for request in decoded.requests)
        seconds += tokens * decoded.decode_seconds / new
        least += tokens * decoded.calls * read / bytes_per_second / new
    widths = len(parts.policy.widths)  # a program for each, of a model that reads or drafts so many tokens
    weights = (1 + widths) * parts.target.weight_count + widths * sum(model.weight_count for model in models)
    return Work(seconds, least, weights)
