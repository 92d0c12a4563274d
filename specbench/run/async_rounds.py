"""Whether the host may launch a round before it has read what the one before kept."""

from specbench.config.components import Components
from specbench.decoding.drafter import Drafter
from specbench.decoding.gamma_policy import GammaPolicy
from specbench.decoding.verifier import Verifier


def stride(parts: Components, policy: GammaPolicy | None, verifier: Verifier, longest: int, over_time: bool) -> int:
    """`State.stride` for texts of up to `longest` tokens, decoded with this policy (None: plainly), whose requests
    arrive at once or `over_time`. It is 0 if the host has to read every round before it launches the next one."""
    reason, decoder, gamma = obstacle(parts, verifier, over_time), "plain", 0
    if policy is not None:
        reason = reason or obstacle_of_drafts(parts, policy, longest)
        decoder, gamma = "speculative", policy.constant or 0
    return gamma + 1 if parts.target.executor.runs_ahead(decoder, reason) else 0


def obstacle(parts: Components, verifier: Verifier, over_time: bool) -> str | None:
    """Why the host has to read every round of either decoder; None if it has not."""
    return first({
        "stop strings are searched on the host": bool(parts.stop_strings),
        "lenience follows the load": len(verifier.levels) > 1,
        "requests arrive over time": over_time,
        "the cache hands out columns as rows grow": not parts.target.cache.in_place,
    })  # fmt: skip


def obstacle_of_drafts(parts: Components, policy: GammaPolicy, longest: int) -> str | None:
    """Why drafts with this policy need the host; None if they do not. The run's own policy counts too, so that a probe
    costs what the run's rounds cost."""
    return first({
        "gamma follows what was kept": policy.constant is None or parts.policy.constant is None,
        "the gamma policy decides after each guess": policy.stop is not None,
        "the drafter reads the text or waits on the host": not works_on_device(parts.drafter),
        "texts may outgrow the drafter's context": longest > parts.drafter.context,
    })  # fmt: skip


def first(obstacles: dict[str, bool]) -> str | None:
    """The first obstacle that is there."""
    return next((reason for reason, there in obstacles.items() if there), None)


def works_on_device(drafter: Drafter) -> bool:
    """`Drafter.on_device` of the drafter's own class: what a subclass overrides may read the text."""
    return bool(vars(type(drafter)).get("on_device", False))
