"""Every rate of a run as a formula of its sums over requests, which are numbers or arrays [samples] by name.

Names of columns that end in what they count are here too.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from specbench.theory import expected_tokens

Sums = Mapping[str, Any]
# Without a drafter's step a request says nothing of its cost, and without a tested guess nothing of alpha.
OF_STEPS = dict.fromkeys(("c", "drafter_bytes_per_second", "drafting"), "steps")
OF_ALPHA = dict.fromkeys(
    ("theorem_3_8", "short_drafts", "stops", "dependence", "luck", "alpha", "gamma", "other_tokens"), "tested"
)
DRAFTS = "drafts of "  # and a number of guesses: how many drafts had so many
ACCEPTED_OF = "accepted of "  # rounds that accepted so many guesses
BETA_AT, TESTED_AT = "beta at ", "tested at "  # and a place in the round, counted from 0
SECONDS_OF, TOKENS_OF = "seconds of ", "tokens of "  # and a peer
OWN_SECONDS, OWN_TOKENS = "own seconds beside ", "own tokens beside "  # and a peer: ours, of requests that it has timed


def speedup_of(s: Sums) -> Any:
    """Seconds per token of plain decoding over ours."""
    return (s["plain_seconds"] / s["plain_tokens"]) / (s["seconds"] / s["tokens"])


def speedup_ratios(s: Sums) -> dict[str, Any]:
    """`speedup_of`, the same with prefill, and the geometric mean over requests."""
    plain = (s["plain_seconds"] + s["plain_prefill_seconds"]) / s["plain_tokens"]
    return {
        "measured": speedup_of(s),
        "end_to_end": plain / ((s["seconds"] + s["prefill_seconds"]) / s["tokens"]),
        "geometric_mean": np.exp(s["log_speedup"] / s["requests"]),
    }


def wall_speedup(s: Sums) -> Any:
    """`speedup_of`, with both times by the host's clock."""
    return (s["plain_wall_seconds"] / s["plain_tokens"]) / (s["wall_seconds"] / s["tokens"])


def rates(s: Sums) -> dict[str, Any]:
    """Ours and plain decoding's throughput, tokens per second."""
    return {
        "speculative_tokens_per_second": s["tokens"] / s["seconds"],
        "baseline_tokens_per_second": s["plain_tokens"] / s["plain_seconds"],
    }


def user_rates(s: Sums) -> dict[str, Any]:
    """Tokens per second of one row: a row waits for the whole of each call that it is in."""
    return {
        "user_tokens_per_second": s["tokens"] / s["call_seconds"],
        "baseline_user_tokens_per_second": s["plain_tokens"] / s["plain_call_seconds"],
    }


def peer_rates(s: Sums) -> dict[str, Any]:
    """Tokens per second of each peer."""
    peers = [name.removeprefix(SECONDS_OF) for name in s if name.startswith(SECONDS_OF)]
    return {name: s[f"{TOKENS_OF}{name}"] / s[f"{SECONDS_OF}{name}"] for name in peers}


def speedups_over(s: Sums) -> dict[str, Any]:
    """Ours over each peer: ratios of seconds per token."""
    return {
        name: s.get(f"{OWN_TOKENS}{name}", s["tokens"]) / s.get(f"{OWN_SECONDS}{name}", s["seconds"]) / rate
        for name, rate in peer_rates(s).items()
    }


def cost_ratios(s: Sums) -> dict[str, Any]:
    """c, v and o, and the seconds of a single-token target step; c is not a number without a drafter step."""
    step = s["plain_step_seconds"] / s["plain_calls"]
    rest = s["seconds"] - s["draft_seconds"] - s["verify_seconds"]
    return {
        "c": _drafter_step_seconds(s) / step,
        "v": s["verify_seconds"] / s["calls"] / step,
        "o": rest / s["calls"] / step,
        "target_step_seconds": step,
    }


def all_costs(s: Sums) -> dict[str, Any]:
    """`cost_ratios`, the seconds that they are made of, o by the host's clock, and the mean seconds in which a prompt
    is read."""
    found = cost_ratios(s)
    others = s["wall_seconds"] - s["draft_seconds"] - s["verify_seconds"]
    prefill = ("prefill_seconds", "drafter_prefill_seconds", "plain_prefill_seconds")
    return found | {
        "drafter_step_seconds": _drafter_step_seconds(s),
        "verify_seconds": s["verify_seconds"] / s["calls"],
        "o_wall": others / s["calls"] / found["target_step_seconds"],
        **{name: s[name] / s["requests"] for name in prefill},
    }


def _drafter_step_seconds(s: Sums) -> Any:
    return s["draft_seconds"] / np.where(s["steps"] > 0, s["steps"], np.nan)


def round_costs(s: Sums) -> dict[str, Any]:
    """A round's drafting, verifying and the rest, in target steps: g c, v and o."""
    cost = cost_ratios(s)
    return {"c": s["draft_seconds"] / s["calls"] / cost["target_step_seconds"], "v": cost["v"], "o": cost["o"]}


def drifts(s: Sums) -> dict[str, Any]:
    """Total variation and KL of a tested position."""
    return {name: s[f"drift_{name}"] / s["drift_tested"] for name in ("tv", "kl")}


def bandwidths(s: Sums) -> dict[str, Any]:
    """Bytes that a step of plain decoding reads, weights and the keys and values of every row, over its time, and of
    the drafter's step, if its bytes are known."""
    found = {"target_bytes_per_second": s["plain_bytes"] / s["plain_step_seconds"]}
    if "drafter_bytes" in s:
        found["drafter_bytes_per_second"] = s["drafter_bytes"] / s["plain_calls"] / _drafter_step_seconds(s)
    return found


def factors(s: Sums, gamma: int | None) -> dict[str, Any]:
    """The measured speedup split into Theorem 3.8's prediction and one factor for each cause of the difference, whose
    product it is. `gamma` is None if a policy varies it: then it is the mean number of drafted tokens. See
    docs/trusting_numbers.md."""
    g = s["drafted"] / s["rounds"] if gamma is None else gamma
    alpha = np.minimum(s["beta"] / s["tested"], 1 - 1e-9)  # equation 1 is continuous at 1
    drafting, v, o = round_costs(s).values()
    predicted_round = g * cost_ratios(s)["c"] + 1
    whole = expected_tokens(alpha, g)
    lengths = {name: int(name.removeprefix(DRAFTS)) for name in s if name.startswith(DRAFTS)}
    actual = sum(s[name] * expected_tokens(alpha, guesses) for name, guesses in lengths.items())
    going_on = alpha * (1 - s["stops"] / s["tokens"])  # an accepted guess that does not end the text
    stopped = sum(s[name] * expected_tokens(going_on, guesses) for name, guesses in lengths.items())
    return {
        "theorem_3_8": whole / predicted_round,
        "short_drafts": actual / s["rounds"] / whole,
        "stops": stopped / actual,
        "dependence": s["expected"] / stopped,
        "luck": s["tokens"] / s["expected"],
        "drafting": predicted_round / (drafting + 1),
        "verify": (drafting + 1) / (drafting + v),
        "rest": (drafting + v) / (drafting + v + o),
        "plain_rest": s["plain_seconds"] / s["plain_step_seconds"],
        "rows": (s["rounds"] / s["calls"]) / (s["plain_tokens"] / s["plain_calls"]),
    }
