"""Synthetic records of runs, for tests of measure and report: rounds are drawn from known betas and known costs."""

from typing import Any

import numpy as np

from specbench.measure.record import Facts, Record, Rounds, Text

STEP, DRAFT, VERIFY, REST = 0.010, 0.002, 0.012, 0.001  # seconds of a target step, a drafter step, a round's call


def facts(**changes: Any) -> Facts:
    """Facts of a run of `records` with gamma 4."""
    known: dict[str, Any] = {
        "name": "synthetic",
        "config": {"gamma": 4, "temperature": 1.0, "target": {"path": "shipped:target"}, "drafter": {}},
        "provenance": {
            **{"git_sha": "0" * 40, "dirty": False, "versions": {"python": "3.11"}, "device": "cpu", "cpu": "x86_64"},
            **{"threads": 1, "argv": [], "started": "2026-01-01T00:00:00+00:00", "seconds": 1.0},
        },
        "gamma": 4,
        "c_hat": 0.1,
        "step_bytes": 1e8,
        "column_bytes": 1e3,
        "peak_bytes_per_second": 2e10,
        "memory": {"peak_bytes": 3e8, "weights_bytes": 1.1e8, "kv_bytes": 1e6},
        "seconds": {"load": 1.0, "plain": 2.0, "speculative": 1.0},
        "choices": {"target": "stdlib", "drafter": "stdlib", "gamma_policy": "fixed"},
    }
    return Facts(**known | changes)


def records(count: int = 8, tokens: int = 32, gamma: int = 4, alpha: float = 0.7, seed: int = 0) -> list[Record]:
    """`count` requests of one prompt each, in two categories; betas are drawn around alpha."""
    rng = np.random.default_rng(seed)
    return [record(f"p{number}", tokens, gamma, alpha, rng, group=number) for number in range(count)]


def record(
    name: str, tokens: int, gamma: int, alpha: float, rng: np.random.Generator, rows: int = 1, **changes: Any
) -> Record:
    """One request whose text has so many tokens; `rows` is how many rows each of its calls served."""
    text = rng.integers(0, 1000, tokens).tolist()
    pace = float(np.exp(rng.normal(0, 0.05)))
    speculative, plain = speculated(tokens, gamma, alpha, rng, pace, rows), plainly(tokens, rng, pace, rows)
    known: dict[str, Any] = {
        "id": name,
        "prompt_id": name,
        "turn": 0,
        "category": ("code", "prose")[int(rng.integers(2))],
        "process": 0,
        "group": 0,
        "prompt": f"prompt {name}",
        "prompt_tokens": 20,
        "encoder_tokens": None,
        "limit": tokens,
        "speculative": text_of(text, speculative),
        "baseline": text_of(text, plain),
        "target_text": {"beta": alpha * tokens, "positions": float(tokens)},
    }
    return Record(**known | changes)


def text_of(ids: list[int], rounds: Rounds, **changes: Any) -> Text:
    """The text of these tokens; its seconds are those of the rounds."""
    known: dict[str, Any] = {
        "ids": ids,
        "text": " ".join(map(str, ids)),
        "seconds": float(sum(sum(column) / r for *column, r in _times(rounds))),
        "prefill_seconds": 0.02,
        "drafter_prefill_seconds": 0.002,
        "record_seconds": 0.001,
        "rounds": rounds,
    }
    return Text(**known | changes)


def speculated(tokens: int, gamma: int, alpha: float, rng: np.random.Generator, pace: float, rows: int) -> Rounds:
    """Rounds of Algorithm 1 until the text has so many tokens."""
    rounds, left = Rounds(), tokens
    while left:
        drafted = min(gamma, left - 1)
        betas = np.clip(rng.normal(alpha, 0.1, drafted), 0.01, 0.99)
        hits = rng.random(drafted) < betas
        accepted = int(np.argmin(np.append(hits, False)))
        tested = min(accepted + 1, drafted)
        rounds.add(
            gamma=drafted, drafted=drafted, tested=tested, accepted=accepted, tokens=accepted + 1,
            recovered=int(accepted < drafted), bonus=int(accepted == drafted), steps=drafted, rows=rows,
            width=drafted + 1, lenience=1.0, draft=drafted * DRAFT * pace * float(rng.uniform(0.9, 1.1)),
            verify=VERIFY * pace * float(rng.uniform(0.9, 1.1)), accept=REST * pace, host=REST * pace,
            betas=betas[:tested].tolist(),
        )  # fmt: skip
        left -= accepted + 1
    return rounds


def plainly(tokens: int, rng: np.random.Generator, pace: float, rows: int) -> Rounds:
    """Rounds of plain decoding: one token each."""
    rounds = Rounds()
    for _ in range(tokens):
        seconds = STEP * pace * float(rng.uniform(0.9, 1.1))
        rounds.add(
            gamma=0, drafted=0, tested=0, accepted=0, tokens=1, recovered=0, bonus=1, steps=0, rows=rows, width=1,
            lenience=1.0, draft=0.0, verify=seconds, accept=REST / 2, host=REST / 2, betas=[],
        )  # fmt: skip
    return rounds


def _times(rounds: Rounds) -> Any:
    return zip(rounds.draft, rounds.verify, rounds.accept, rounds.host, rounds.rows, strict=True)
