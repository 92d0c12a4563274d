"""Requests that were decoded together, both ways, with every raw count and time."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from specbench.baselines.autoregressive import PeerOutput
from specbench.data.prompts import Request
from specbench.decoding.queue import Latency
from specbench.measure.recorder import Round
from specbench.measure.text import TextLaws


@dataclass
class Decoded:
    """Some requests, decoded one way."""

    tokens: list[list[int]]  # new tokens per request
    rounds: list[Round]
    laps: list[dict[str, float]]  # seconds by lap of each call of the target
    prefill_seconds: float  # of the target, and of the drafter when it reads prompts
    kv_bytes: int
    latencies: list[Latency] = field(default_factory=list)  # per request, where requests arrive over time

    @property
    def decode_seconds(self) -> float:
        return sum(map(decoding_seconds, self.laps))

    @property
    def record_seconds(self) -> float:
        return sum(lap["record"] for lap in self.laps)

    def seconds_of(self, row: int) -> float:
        """A request's share of the time: each call's is split evenly among the rows it served."""
        return sum(decoding_seconds(r.seconds) / r.rows for r in self.rounds if r.row == row)

    def outcomes_of(self, row: int) -> list[int | None]:
        """Of each new token: 1 for a guess that was accepted, 0 for the token in the place of a
        rejected one, None where no guess was tested."""
        rounds = [r for r in self.rounds if r.row == row]
        return [o for r in rounds for o in [1] * r.accepted + [0 if r.recovered else None] * (r.tokens - r.accepted)]

    def lenience_of(self, row: int) -> list[float]:
        """At each new token of a request."""
        return [r.lenience for r in self.rounds if r.row == row for _ in range(r.tokens)]


def decoding_seconds(laps: dict[str, float]) -> float:
    """Without reading prompts, without recording, and without waiting for requests."""
    return sum(seconds for name, seconds in laps.items() if name not in ("prefill", "record", "idle"))


@dataclass
class Batch:
    """The same requests decoded both ways, or the reason why they could not be."""

    requests: list[Request]
    limits: list[int] = field(default_factory=list)  # new tokens at most, per request
    baseline: Decoded | None = None
    speculative: Decoded | None = None
    peers: dict[str, list[PeerOutput]] = field(default_factory=dict)
    texts: dict[str, list[TextLaws]] = field(default_factory=dict)  # betas along both texts
    error: str | None = None


def prompt_records(batch: Batch, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """prompts.jsonl: text in, text out, counts and times, one line per request. Where rows decode
    together, each has its share of the seconds."""
    for row, request in enumerate(batch.requests):
        record = {"id": request.id, "category": request.category, "prompt_tokens": len(request.tokens)}
        if batch.error is not None:
            yield record | {"error": batch.error, "prompt": request.text}
            continue
        rounds = [r for r in batch.speculative.rounds if r.row == row]
        betas = [beta for r in rounds for beta in r.beta]
        yield record | {
            "limit": batch.limits[row],
            "tokens": len(batch.speculative.tokens[row]),
            "baseline_tokens": len(batch.baseline.tokens[row]),
            "rounds": len(rounds),
            "alpha": sum(betas) / len(betas) if betas else None,
            "block_efficiency": sum(r.tokens for r in rounds) / len(rounds),
            "decode_seconds": batch.speculative.seconds_of(row),
            "baseline_decode_seconds": batch.baseline.seconds_of(row),
            "prefill_seconds": batch.speculative.prefill_seconds / len(batch.requests),
            "baseline_prefill_seconds": batch.baseline.prefill_seconds / len(batch.requests),
            **{f"{peer}_decode_seconds": outputs[row].decode_seconds for peer, outputs in batch.peers.items()},
            **{f"{peer}_tokens": len(outputs[row].tokens) for peer, outputs in batch.peers.items()},
            "prompt": request.text,
            "output": tokenizer.decode(batch.speculative.tokens[row], skip_special_tokens=True),
            "baseline_output": tokenizer.decode(batch.baseline.tokens[row], skip_special_tokens=True),
        }
