"""The gamma policies that are replayed: built from their names and overrides, and simulated on a trace."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from omegaconf import DictConfig

from specbench.config.compose import compose
from specbench.config.validate import choose
from specbench.contrib.replay.table import BEST
from specbench.decoding.gamma_policy import GammaPolicy
from specbench.errors import ConfigError
from specbench.policies.gamma.confidence import ConfidenceGamma
from specbench.stats.replay import Replayed, Trace, TracedCosts, pick, priced, replay, sweep_rounds

DRAWN = "it looks at q(x) of the drawn guess, and traces have max q, which is the same at temperature 0"


def policies(trace: Trace, names: Sequence[str], overrides: list[str]) -> Iterator[tuple[str, GammaPolicy]]:
    """The named policies, with settings from `conf/gamma_policy` and the overrides; none may draft more tokens than the
    trace has costs for. Raises ConfigError, also for overrides that apply to none of them."""
    used = not any(override.startswith("gamma=") for override in overrides)
    for name in names:
        choice = [f"gamma_policy={name}", *overrides]
        config = compose(choice)
        used = used or "gamma" in config.gamma_policy
        policy = build_policy(config, trace)
        if any(override.startswith("gamma_policy.largest=") for override in overrides):
            refuse_more_than_was_measured(config.gamma_policy.largest, trace)
        yield name, policy
    if not used:
        raise ConfigError(f"gamma=... cannot apply to gamma_policy={','.join(names)}: it is for fixed and heuristic")


def refuse_more_than_was_measured(largest: int, trace: Trace) -> None:
    """Raises ConfigError if a policy is to draft more tokens than the trace has costs for."""
    if largest > trace.largest:
        raise ConfigError(
            f"gamma_policy.largest={largest} is not possible: this run's rounds were measured to {trace.largest} tokens"
        )


def refuse_drawn(policy: GammaPolicy, greedy: bool) -> None:
    """Raises ConfigError if a policy looks at drawn guesses and these are not the likeliest tokens."""
    if isinstance(policy, ConfidenceGamma) and not greedy:
        raise ConfigError(f"gamma_policy=confidence is not possible: {DRAWN}")


def build_policy(config: DictConfig, trace: Trace) -> GammaPolicy:
    """The policy of a composed configuration. Raises ConfigError."""
    choice = choose(config, "gamma_policy", None)
    policy: GammaPolicy = choice.kind.from_settings(choice.settings)
    refuse_drawn(policy, trace.greedy)
    if policy.largest > trace.largest and policy.constant is None:
        policy = choice.kind.from_settings(replace(choice.settings, largest=trace.largest))
    if policy.calibrated:
        policy.calibrate(TracedCosts(trace))
    return policy


def replay_all(trace: Trace, chosen: Sequence[tuple[str, GammaPolicy]]) -> tuple[dict[str, Replayed], list[int]]:
    """Replays every constant gamma, the best of them, and the chosen policies; and what each half took for the best."""
    rounds = sweep_rounds(trace)
    found = {f"gamma {g}": priced(trace, of_gamma) for g, of_gamma in rounds.items()}
    picked, found[BEST] = pick(trace, rounds)
    return found | {name: replay(trace, policy) for name, policy in chosen}, picked
