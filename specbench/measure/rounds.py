"""From records to tables: one row a round, and the sums over the rounds of each request.

A call's steps, seconds and itself are split evenly among the rows that it served.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from specbench.measure.intervals import Estimate, Floats, Formula, estimates
from specbench.measure.record import Record, Rounds, Text

PLAIN = "plain_"  # before the names of plain decoding's sums
TESTED_AT, BETA_AT = "tested at ", "beta at "  # and a place in the draft, from 1 on
ACCEPTED_OF = "rounds that accepted "  # and a number of guesses
PEER_TOKENS, PEER_SECONDS = "tokens of ", "seconds of "  # and a peer
OWN_TOKENS, OWN_SECONDS = "own tokens beside ", "own seconds beside "  # ours, of the requests that the peer answered
NAMES = ("id", "prompt_id", "turn", "category", "process", "group")


def finished(records: Iterable[Record]) -> list[Record]:
    """The records that both methods have decoded."""
    return [record for record in records if record.speculative is not None and record.baseline is not None]


def rounds_frame(records: Sequence[Record]) -> pd.DataFrame:
    """One row a round, of both methods: what `Rounds` holds, behind the request, the method, the number of the round
    and the position of its first token among the new ones."""
    parts = []
    for record in records:
        for method, text in (("speculative", record.speculative), ("baseline", record.baseline)):
            if text is not None:
                own = {name: getattr(record, name) for name in NAMES} | {"method": method}
                own |= {"round": np.arange(len(text.rounds)), "position": positions(text.rounds).astype(int)}
                parts.append(pd.DataFrame(own | {name: pd.Series(c) for name, c in vars(text.rounds).items()}))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=[*NAMES, *vars(Rounds())])


def prompts_frame(records: Sequence[Record]) -> pd.DataFrame:
    """One row for each request that both methods decoded: what it belongs to and its sums, 0 where it has none."""
    rows = [{name: getattr(record, name) for name in NAMES} | sums_of(record) for record in finished(records)]
    none = {name: 0.0 for row in rows for name in row}
    return pd.DataFrame([none | row for row in rows])


def rounds_without_room(records: Iterable[Record], context: int, begin: int | None) -> int:
    """How many rounds had no guess because a drafter that reads `context` tokens had no room for one, though the text
    had. Texts begin with `begin` tokens, None for those of their prompts."""
    found = 0
    for record in finished(records):
        assert record.speculative is not None
        new = positions(record.speculative.rounds)
        length = new + (record.prompt_tokens if begin is None else begin)
        # A round keeps one place for its recovered or bonus token.
        found += int(((length + 1 >= context) & (new + 1 < record.limit)).sum())
    return found


class Sample:
    """The sums of some requests, a `prompts_frame`: each of them, in all, and which depend on each other."""

    def __init__(self, frame: pd.DataFrame):
        self.frame = frame
        self.columns: dict[str, Floats] = {n: frame[n].to_numpy(float) for n in frame.columns if n not in NAMES}
        self.total = {name: float(column.sum()) for name, column in self.columns.items()}
        self.times = clusters_of_times(frame)

    def of_tokens(self, formula: Formula) -> dict[str, Estimate]:
        """Numbers that follow from tokens alone: the turns of a prompt are one cluster, in all processes together."""
        return estimates(self.columns, self.frame["prompt_id"].astype(str), formula, log=False)

    def of_times(self, formula: Formula) -> dict[str, Estimate]:
        """Ratios in which there are times, with `clusters_of_times`."""
        return estimates(self.columns, self.times, formula)


def clusters_of_times(frame: pd.DataFrame) -> "pd.Series[Any]":
    """For times. If several processes decoded the same requests, each process is a cluster: it has a pace of its own.
    Else requests that were decoded together are one, with all turns of their prompts."""
    if frame["id"].duplicated().any():
        return frame["process"]
    names, before = pd.Series(range(len(frame)), index=frame.index), None
    while before is None or not names.equals(before):  # a turn's group may link prompts whose first turns were apart
        before = names
        names = names.groupby([frame["process"], frame["group"]]).transform("min")
        names = names.groupby(frame["prompt_id"]).transform("min")
    return names


def sums_of(record: Record) -> dict[str, float]:
    """The sums of one request that both methods decoded, by name."""
    ours, plain = record.speculative, record.baseline
    assert ours is not None and plain is not None
    found = {"requests": 1.0, **_of_text(ours), **{PLAIN + name: value for name, value in _of_text(plain).items()}}
    columns = record.prompt_tokens + (record.encoder_tokens or 0) + positions(plain.rounds)
    found["plain_columns"] = float(columns.sum())  # of keys and values that the steps of plain decoding read
    for accepted in ours.rounds.accepted:
        found[f"{ACCEPTED_OF}{accepted}"] = found.get(f"{ACCEPTED_OF}{accepted}", 0) + 1
    for betas in ours.rounds.betas:
        for place, beta in enumerate(betas, 1):
            found[f"{TESTED_AT}{place}"] = found.get(f"{TESTED_AT}{place}", 0) + 1
            found[f"{BETA_AT}{place}"] = found.get(f"{BETA_AT}{place}", 0) + beta
    for kind, sums in (("text", record.target_text), ("drift", record.drift)):
        found |= {f"{kind} {name}": value for name, value in (sums or {}).items()}
    for name, peer in record.peers.items():
        if peer.get("seconds") and peer.get("tokens"):
            found |= {f"{PEER_TOKENS}{name}": peer["tokens"], f"{PEER_SECONDS}{name}": peer["seconds"]}
            found |= {f"{OWN_TOKENS}{name}": len(ours.ids), f"{OWN_SECONDS}{name}": ours.seconds}
    return found


def _of_text(text: Text) -> dict[str, float]:
    """The sums of one method."""
    rounds = text.rounds
    share = 1 / np.array(rounds.rows, float)
    split = {"calls": [1.0] * len(rounds), "steps": rounds.steps}
    split |= {"draft_seconds": rounds.draft, "verify_seconds": rounds.verify}
    whole = ("gamma", "drafted", "tested", "accepted", "recovered", "bonus")
    return {
        "tokens": float(len(text.ids)),
        "rounds": float(len(rounds)),
        "beta": float(sum(map(sum, rounds.betas))),
        "seconds": text.seconds,
        "prefill_seconds": text.prefill_seconds + text.drafter_prefill_seconds,
        "record_seconds": text.record_seconds,
        **{name: float(sum(getattr(rounds, name))) for name in whole},
        **{name: float((np.array(values, float) * share).sum()) for name, values in split.items()},
    }


def positions(rounds: Rounds) -> Floats:
    """The position of the first token of each round among the new ones: [rounds]."""
    tokens = np.array(rounds.tokens, float)
    return np.asarray(tokens.cumsum() - tokens)
