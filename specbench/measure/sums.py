"""From records to tables, one row a round, and to sums over the rounds of each request; and numbers of these sums with
intervals.

A call's steps, seconds and itself are split evenly among the rows that it served. A formula is a function of sums by
name, each a number or an array. Its interval is that of the delete-one jackknife over clusters, with Student's t (Tukey
1958): it is evaluated once on all clusters together and once on all but each one. n clusters.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from specbench.measure.record import Record, Rounds, Text

Floats = npt.NDArray[np.float64]
Sums = Mapping[str, Any]
Formula = Callable[[Sums], Mapping[str, Any]]
Interval = tuple[float, float] | None

FEWEST = 3  # clusters: with fewer there is no interval
SAME = 1e-12  # relative change of a number below which a cluster says nothing of it
PLAIN = "plain_"  # before the names of plain decoding's sums
TESTED_AT, BETA_AT = "tested at ", "beta at "  # and a place in the draft, from 1 on
ACCEPTED_OF = "rounds that accepted "  # and a number of guesses
PEER_TOKENS, PEER_SECONDS = "tokens of ", "seconds of "  # and a peer
OWN_TOKENS, OWN_SECONDS = "own tokens beside ", "own seconds beside "  # ours, of the requests that the peer answered
NAMES = ("id", "prompt_id", "turn", "category", "process", "group")


@dataclass(frozen=True)
class Estimate:
    """A number of a run; None where it has no value, or no error can be given."""

    value: float | None
    stderr: float | None = None
    ci95: Interval = None


def finished(records: Iterable[Record]) -> list[Record]:
    """The records that both methods have decoded."""
    return [record for record in records if record.speculative is not None and record.baseline is not None]


def rounds_frame(records: Sequence[Record]) -> pd.DataFrame:
    """One row a round of both methods: request, method, number, position of its first new token, and its `Rounds`."""
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


def estimates(
    columns: Mapping[str, Floats], clusters: Sequence[Any] | npt.NDArray[Any], formula: Formula, log: bool = True
) -> dict[str, Estimate]:
    """The numbers that a formula makes of columns [requests], whose `clusters` [requests] are independent. With `log`
    the interval is that of the logarithm, as ratios need it; the standard error is always that of the number."""
    by = by_cluster(columns, clusters)
    total = {name: column.sum() for name, column in by.items()}
    with np.errstate(divide="ignore", invalid="ignore"):
        point = formula(total)
        without = formula({name: total[name] - column for name, column in by.items()})
    return {name: _estimate(point[name], without[name], log) for name in point}


def by_cluster(columns: Mapping[str, Floats], clusters: Sequence[Any] | npt.NDArray[Any]) -> dict[str, Floats]:
    """The sums of columns [requests] over each cluster: [n]."""
    names, numbers = np.unique(np.asarray(clusters), return_inverse=True)
    return {name: np.bincount(numbers, column, len(names)).astype(float) for name, column in columns.items()}


def _estimate(point: Any, without: Any, log: bool) -> Estimate:
    """From a number and the same without each cluster [n]. A cluster without which it is the same says nothing of it,
    as one in which nothing was drafted says nothing of c, and is not counted."""
    value = float(point)
    if not math.isfinite(value):
        return Estimate(None)
    without = np.broadcast_to(np.asarray(without, float), np.shape(without) or (1,))
    counted = without[~(np.abs(without - value) <= SAME * abs(value))]
    if not len(counted):
        return Estimate(value, 0.0, (value, value)) if len(without) >= FEWEST else Estimate(value)
    if len(counted) < FEWEST or not np.isfinite(counted).all():
        return Estimate(value)
    stderr = _spread(counted)
    if not log:
        half = student(len(counted) - 1) * stderr
        return Estimate(value, stderr, (value - half, value + half))
    if value <= 0 or (counted <= 0).any():
        return Estimate(value, stderr)
    half = student(len(counted) - 1) * _spread(np.log(counted))
    return Estimate(value, stderr, (value * math.exp(-half), value * math.exp(half)))


def _spread(without: Floats) -> float:
    """The jackknife's standard error, from the values without each of n clusters [n]."""
    n = len(without)
    return math.sqrt((n - 1) / n * float(((without - without.mean()) ** 2).sum()))


@cache
def student(freedom: float, outside: float = 0.05) -> float:
    """What Student's t exceeds with probability `outside`, both signs together."""
    angle, mass = _student(freedom := min(freedom, 1e5))  # beyond, the angles are too coarse
    return float(math.sqrt(freedom) * np.tan(np.interp(1 - outside, mass, angle)))


def student_tail(t: float, freedom: float) -> float:
    """The probability that Student's t is farther from 0 than t."""
    angle, mass = _student(freedom)
    return float(1 - np.interp(math.atan(abs(t) / math.sqrt(freedom)), angle, mass))


def _student(freedom: float) -> tuple[Floats, Floats]:
    """Angles in [0, pi / 2] and the probability that |t| is below sqrt(freedom) tan(angle): in this variable the
    density is cos(angle)^(freedom - 1), whose range is finite."""
    angle = np.linspace(0, np.pi / 2, 20_001)
    density = np.cos(angle).clip(min=0) ** (freedom - 1)
    mass = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return angle, mass / mass[-1]
