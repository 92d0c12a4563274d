"""Every rate of a run as a formula of its sums over requests, which are numbers or arrays by name (`measure/sums`).

c, v and o are in units of a single-token target step: a drafter step, the target's call of a round, and the rest.
"""

from typing import Any

import numpy as np

from specbench.measure.sums import OWN_SECONDS, OWN_TOKENS, PEER_SECONDS, PEER_TOKENS, Sums
from specbench.theory import expected_tokens

NEARLY_ONE = 1 - 1e-9  # equation 1 is continuous at alpha = 1, where it divides by 0


def tokens_per_second(s: Sums) -> dict[str, Any]:
    """New tokens per second of decoding, all rows together: ours, plain decoding's and the peers'."""
    peers = [name.removeprefix(PEER_SECONDS) for name in s if name.startswith(PEER_SECONDS)]
    return {
        "speculative_tokens_per_second": s["tokens"] / s["seconds"],
        "baseline_tokens_per_second": s["plain_tokens"] / s["plain_seconds"],
        **{f"{name}_tokens_per_second": s[PEER_TOKENS + name] / s[PEER_SECONDS + name] for name in peers},
    }


def speedups(s: Sums) -> dict[str, Any]:
    """Seconds per token of plain decoding over ours: of decoding only, and with the reading of prompts."""
    plain, ours = (s[way + "seconds"] / s[way + "tokens"] for way in ("plain_", ""))
    read_plain, read_ours = (s[way + "prefill_seconds"] / s[way + "tokens"] for way in ("plain_", ""))
    return {"measured": plain / ours, "end_to_end": (plain + read_plain) / (ours + read_ours)}


def speedups_over_peers(s: Sums) -> dict[str, Any]:
    """Seconds per token of each peer over ours, of the requests that the peer answered."""
    peers = [name.removeprefix(PEER_SECONDS) for name in s if name.startswith(PEER_SECONDS)]
    return {
        name: (s[PEER_SECONDS + name] / s[PEER_TOKENS + name]) / (s[OWN_SECONDS + name] / s[OWN_TOKENS + name])
        for name in peers
    }


def costs(s: Sums) -> dict[str, Any]:
    """c (Definition 3.7), v and o, and the seconds that they are made of; c is not a number without a drafter step."""
    step = s["plain_verify_seconds"] / s["plain_calls"]
    drafter_step = s["draft_seconds"] / np.where(np.asarray(s["steps"]) > 0, s["steps"], np.nan)
    verify = s["verify_seconds"] / s["calls"]
    rest = s["seconds"] - s["draft_seconds"] - s["verify_seconds"]
    return {
        "c": drafter_step / step,
        "v": verify / step,
        "o": rest / s["calls"] / step,
        "target_step_seconds": step,
        "drafter_step_seconds": drafter_step,
        "verify_seconds": verify,
    }


def acceptance(s: Sums) -> dict[str, Any]:
    """The means of beta over tested positions and along plain decoding's text (Corollary 3.6); shares of guesses."""
    return {
        "alpha": s["beta"] / s["tested"],
        "alpha_counted": s["accepted"] / s["tested"],
        "alpha_on_target_text": s.get("text beta", np.nan) / np.asarray(s.get("text positions", np.nan)),
        "draft_acceptance_rate": s["accepted"] / s["gamma"],
    }


def block_efficiency(s: Sums) -> dict[str, Any]:
    """Tokens per target call, the recovered or bonus token included; a call of several rows counts once for each."""
    return {"block_efficiency": s["tokens"] / s["rounds"]}


def drifts(s: Sums) -> dict[str, Any]:
    """Total variation and KL divergence (nats) of the output distribution from p, means over tested positions (A.5)."""
    return {name: s[f"drift {name}"] / s["drift positions"] for name in ("tv", "kl")}


def bandwidth(s: Sums, step_bytes: float, column_bytes: float) -> float:
    """Bytes of weights, keys and values that a step of plain decoding reads, per second of its time."""
    return float((s["plain_calls"] * step_bytes + s["plain_columns"] * column_bytes) / s["plain_verify_seconds"])


def accounting(s: Sums, gamma: int | None) -> dict[str, Any]:
    """The measured speedup split into Theorem 3.8's prediction and one factor for each cause of the difference; their
    product is `speedups(s)["measured"]` exactly. `gamma` is None if a policy varies it: then it is the mean."""
    g = s["gamma"] / s["rounds"] if gamma is None else gamma
    cost = costs(s)
    expected = expected_tokens(np.minimum(s["beta"] / s["tested"], NEARLY_ONE), g)  # equation 1
    predicted_round = g * cost["c"] + 1  # in target steps, as Theorem 3.8 has it
    drafting = s["draft_seconds"] / s["calls"] / cost["target_step_seconds"]
    v, o = cost["v"], cost["o"]
    return {
        "theorem_3_8": expected / predicted_round,
        "tokens": s["tokens"] / s["rounds"] / expected,
        "drafting": predicted_round / (drafting + 1),
        "verify": (drafting + 1) / (drafting + v),
        "rest": (drafting + v) / (drafting + v + o),
        "plain_rest": s["plain_seconds"] / s["plain_verify_seconds"],
        "rows": (s["rounds"] / s["calls"]) / (s["plain_tokens"] / s["plain_calls"]),
    }


def corrected(s: Sums, gamma: int | None) -> dict[str, Any]:
    """Theorem 3.8 without its assumptions: block efficiency / (g c + v + o)."""
    g, cost = s["gamma"] / s["rounds"] if gamma is None else gamma, costs(s)
    drafting = np.where(np.asarray(s["steps"]) > 0, g * np.nan_to_num(cost["c"]), 0.0)
    return {"corrected": s["tokens"] / s["rounds"] / (drafting + cost["v"] + cost["o"])}
