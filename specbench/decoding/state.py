"""The state of a batch being decoded: committed tokens of ragged rows. B rows, T columns, V vocabulary."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specbench.decoding.draft import Verdict
from specbench.decoding.noise import STREAMS, noise_bits
from specbench.decoding.rows import Rows
from specbench.decoding.sequence import Sequence
from specbench.decoding.transfers import upload

if TYPE_CHECKING:
    from specbench.decoding.stops import StopStrings


class State:
    """Committed tokens of B ragged rows: `rows` on the device and, beside them, the sequence that has each row, None if
    a row is idle. The last token of each row is not in any cache yet. A row is `done`, and its sequence not `active`,
    before its prompt is read and after its text has ended."""

    def __init__(self, rows: Rows, stop_strings: "StopStrings | None" = None):
        self.rows, self.stop_strings = rows, stop_strings
        self._forget()

    @staticmethod
    def idle(
        rows: int, width: int, stop_tokens: Iterable[int], device: torch.device,
        stop_strings: "StopStrings | None" = None,
    ) -> "State":  # fmt: skip
        """A state of `rows` idle rows of `width` columns, without requests."""
        tokens = torch.zeros(rows, width, dtype=torch.long, device=device)
        length, done = tokens.new_ones(rows), tokens.new_ones(rows, dtype=torch.bool)
        stops = upload(list(stop_tokens), device, torch.long)
        noise = tokens.new_zeros(STREAMS, rows, width)
        return State(Rows(tokens, length, length.clone(), done, noise, stops), stop_strings)

    @staticmethod
    def start(
        sequences: Iterable[Sequence], stop_tokens: Iterable[int], spare: int, device: torch.device,
        stop_strings: "StopStrings | None" = None,
    ) -> "State":  # fmt: skip
        """A state in which every request has a row and decodes at once. `spare` columns take guesses beyond limits."""
        own = {row: sequence.fresh(row) for row, sequence in enumerate(sequences)}
        width = max(sequence.limit for sequence in own.values()) + spare
        state = State.idle(len(own), width, stop_tokens, device, stop_strings)
        state.admit(own)
        state.begin(own)
        return state

    def clear(self) -> None:
        """Makes all rows idle, in the same tensors."""
        self.rows.length.fill_(1)
        self.rows.limit.fill_(1)
        self.rows.done.fill_(True)
        self._forget()

    def _forget(self) -> None:
        """Without requests."""
        self.sequences: list[Sequence | None] = [None] * self.batch_size
        self.drafted = [0] * self.batch_size  # `Draft.count` of the last round
        self.kept = [0] * self.batch_size  # tokens that each row kept of it, recovered or bonus token included
        self.drawn = 0  # the depth to which its draft was drawn, before it was padded
        self.waiting = 0  # requests that have arrived and have no row yet

    def admit(self, sequences: Mapping[int, Sequence]) -> None:
        """Gives rows to sequences, by row. They stay idle until `begin`."""
        device, width = self.tokens.device, self.tokens.shape[1]
        own = sequences.values()
        where = upload(list(sequences), device)
        self.tokens[where] = upload([[*s.tokens, *[0] * (width - len(s.tokens))] for s in own], device)
        self.length[where] = upload([len(s.tokens) for s in own], device)
        self.rows.limit[where] = upload([s.limit for s in own], device)
        self.noise[:, where] = noise_bits(upload([s.key for s in own], device), width)
        for row, sequence in sequences.items():
            self.sequences[row] = sequence

    def begin(self, rows: Iterable[int]) -> None:
        """Makes these rows active: their prompts have been read."""
        self.rows.done[upload(list(rows), self.tokens.device)] = False
        for row in rows:
            self.at(row).active = True

    def retire(self, rows: Iterable[int]) -> None:
        """Empties these rows, whose texts have ended: no call has to reach as far as they did."""
        where = upload(list(rows), self.tokens.device)
        self.length[where] = self.rows.limit[where] = 1
        for row in rows:
            self.sequences[row] = None

    def at(self, row: int) -> Sequence:
        """The sequence of a row that is not idle."""
        sequence = self.sequences[row]
        assert sequence is not None
        return sequence

    @property
    def tokens(self) -> Tensor:
        return self.rows.tokens

    @property
    def length(self) -> Tensor:
        return self.rows.length

    @property
    def noise(self) -> Tensor:
        return self.rows.noise

    @property
    def batch_size(self) -> int:
        return self.tokens.shape[0]

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of each row, as the host knows them; 1 in idle rows, as on the device."""
        return [1 if s is None else len(s.tokens) for s in self.sequences]

    @property
    def active(self) -> list[bool]:
        return [s is not None and s.active for s in self.sequences]

    @property
    def request_ids(self) -> list[int]:
        """The number of the request that has each row; -1 in idle rows."""
        return [-1 if s is None else s.request_id for s in self.sequences]

    @property
    def generated(self) -> list[list[int]]:
        """The generated tokens of each row, without its prompt."""
        return [[] if s is None else s.generated for s in self.sequences]

    @property
    def busy(self) -> int:
        """The number of rows up to the last active one: a call needs no others."""
        return max((row + 1 for row, on in enumerate(self.active) if on), default=0)

    def remaining(self, context: int) -> list[int]:
        """Guesses that each row can keep within its limit and `context` tokens, with a recovered or bonus token."""
        return [
            max(0, min(s.limit, context) - len(s.tokens) - 1) if s is not None and s.active else 0
            for s in self.sequences
        ]

    def read_round(self, summary: Tensor) -> None:
        """The one host synchronisation of a round: copies a `summary_of` it, [3 + D + 1, B], to the sequences."""
        lengths, done, self.drafted, *new = summary.tolist()
        self.kept = [0] * self.batch_size
        for row, sequence in enumerate(self.sequences):
            if sequence is None or not sequence.active:
                continue
            self.kept[row] = lengths[row] - len(sequence.tokens)
            sequence.tokens += [tokens[row] for tokens in new[: self.kept[row]]]
            sequence.active = not done[row]

    def find_stop_strings(self, verdict: Verdict) -> Tensor:
        """[B]: tokens of the round up to one that completes a stop string; without one, more than there are. Waits."""
        assert self.stop_strings is not None
        found = torch.cat([verdict.accepted[:, None], verdict.tokens], 1).tolist()
        cuts = [len(row) for row in found]
        for row, (sequence, (n, *new)) in enumerate(zip(self.sequences, found, strict=True)):
            if sequence is not None and sequence.active:
                cut = self.stop_strings.find(sequence.generated, new[: n + 1])
                cuts[row] = cuts[row] if cut is None else cut
        return upload(cuts, self.tokens.device)
