"""Merges the groups that several workers have decoded: the record is the one that a single process would have made.

Every number of a run is computed from its record, with the groups in their order, so nothing else has to be merged. Two
things depend on the groups before: how many tokens the verdict may still read again, and along how many betas are read.
A worker does not know them exactly and reads too much rather than too little; what a single process would not have read
is dropped here.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specbench.stats.costs import CostTable
from specbench.stats.machine_noise import Probes
from specbench.stats.position_stats import LIMIT
from specbench.stats.records import Failure, Group, Result, RunRecord


@dataclass(frozen=True)
class GroupLimits:
    """What may still be read when a group begins: tokens for the verdict; and the tokens of the texts before it."""

    to_read: int
    text_tokens: int


@dataclass
class Piece:
    """A group that a worker has decoded, or the failure of its requests, with all that the run needs of it."""

    number: int  # of the group
    worker: int
    group: Group | None
    failure: Failure | None
    answers: Mapping[str, str]  # by prompt, plain decoding's, the history of its next turn
    costs: CostTable  # of its rounds and probes
    probes: Probes  # of the worker's machine
    unread: str = ""  # why a text of it was not read again
    unreadable: bool = False
    peak_bytes: int = 0  # of the worker so far
    seconds: float = 0.0  # that it took, with everything
    ended: float = field(default_factory=time.time)
    warnings: Sequence[str] = ()


class Merger:
    """The pieces of a run, in any order."""

    def __init__(self, verdict_tokens: int, reads_different: bool, columns: Mapping[str, tuple[str, ...]]):
        """`reads_different` says whether the verdict reads texts that differ from plain decoding's, however many tokens
        it has read; `columns` are those of `Record`."""
        self.reads_different, self.message = reads_different, f"more than verdict_tokens={verdict_tokens} tokens"
        self.pieces: dict[int, Piece] = {}
        self.limits = GroupLimits(verdict_tokens, 0)  # behind the groups that are merged
        self.record = RunRecord(columns=dict(columns))
        self._next = 0

    def add(self, piece: Piece) -> None:
        """Adds a piece; those that have no gap before them are merged at once. Raises RuntimeError if the group is
        there already."""
        if piece.number in self.pieces:
            raise RuntimeError(f"group {piece.number} was decoded twice")
        self.pieces[piece.number] = piece
        while (following := self.pieces.get(self._next)) is not None:
            self._merge(following)
            self._next += 1

    def complete(self, groups: int) -> RunRecord:
        """The record of a run of so many groups. Raises RuntimeError if one is missing."""
        if missing := set(range(groups)) - set(self.pieces):
            raise RuntimeError(f"group {min(missing)} was not decoded")
        if len(self.pieces) > groups:
            raise RuntimeError(f"group {max(self.pieces)} is none of the {groups} groups of the run")
        return self.record

    def so_far(self) -> RunRecord:
        """The record of all groups that there are, when no more will come."""
        for number in sorted(self.pieces):
            if number >= self._next:
                self._merge(self.pieces[number])
                self._next = number + 1
        return self.record

    def in_order(self) -> list[Piece]:
        """All pieces, in the order of their groups."""
        return [self.pieces[number] for number in sorted(self.pieces)]

    def _merge(self, piece: Piece) -> None:
        if piece.failure is not None:
            self.record.failures.append(piece.failure)
        if piece.group is None:
            return
        self.record.groups.append(piece.group)
        to_read, texts = self.limits.to_read, self.limits.text_tokens
        for result in piece.group.results:
            if texts >= LIMIT:
                result.speculative_laws = result.baseline_laws = None
            texts += len(result.speculative.tokens)
        for result in piece.group.results:
            to_read -= self._read(piece, result, to_read)
        self.limits = GroupLimits(to_read, texts)

    def _read(self, piece: Piece, result: Result, to_read: int) -> int:
        """The tokens that the verdict has read for a result, which loses its reading if no more may be read."""
        record = self.record
        differs = self.reads_different and result.speculative.tokens != result.baseline.tokens
        if to_read <= 0 and not differs:
            result.reading = None
            record.unread = self.message
            return 0
        if result.reading is None:
            record.unread, record.unreadable = piece.unread, record.unreadable or piece.unreadable
            return 0
        return int(result.request.columns + result.reading.tokens)


def joined_costs(pieces: Sequence[Piece]) -> CostTable:
    """What rounds cost, of all pieces."""
    found = CostTable()
    for piece in pieces:
        found.join(piece.costs)
    return found
