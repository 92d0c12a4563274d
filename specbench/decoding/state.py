"""The state of a batch being decoded: committed tokens of ragged rows. B rows, T columns, V vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.draft import Verdict
from specbench.decoding.noise import STREAMS, noise_bits
from specbench.decoding.rows import Rows
from specbench.decoding.transfers import upload


class StopStrings:
    """Finds the token that completes one of the stop strings."""

    def __init__(self, strings: Sequence[str], tokenizer: Any):
        self.strings, self.tokenizer = list(strings), tokenizer
        # A token may hold a part of a character only, so a string of n bytes spans at most n tokens.
        self.reach = max(len(s.encode()) for s in strings)

    def find(self, generated: Sequence[int], new: Sequence[int]) -> int | None:
        """How many of the new tokens to keep, the completing one included; None if none completes a stop string."""
        before = list(generated[-self.reach :])
        for kept in range(1, len(new) + 1):
            text = self.tokenizer.decode([*before, *new[:kept]], skip_special_tokens=True)
            if any(s in text for s in self.strings):
                return kept
        return None


@dataclass(frozen=True)
class Job:
    """A request to decode."""

    tokens: Sequence[int]  # the prompt in the decoder's text
    limit: int  # the length in tokens, prompt included, at which it ends
    key: int  # of its noise
    encoder_input: Any = None  # what an encoder reads, if there is one: tokens, or features that have a length


@dataclass
class State:
    """Committed tokens of B ragged rows. The last token of each row is not in any cache yet. A row is idle (`done`, and
    not `active`) before its prompt is read and after its text has ended."""

    rows: Rows
    stop_strings: StopStrings | None = None
    admitted: int = 0  # requests that ever had a row
    serials: dict[int, int] = field(default_factory=dict)  # by row, a number that is unique to its request

    def __post_init__(self) -> None:
        self.clear()

    @staticmethod
    def idle(
        rows: int, width: int, stop_tokens: Sequence[int], device: torch.device, stop_strings: StopStrings | None = None
    ) -> "State":
        """A state of `rows` idle rows of `width` columns, without requests."""
        tokens = torch.zeros(rows, width, dtype=torch.long, device=device)
        length, done = tokens.new_zeros(rows), tokens.new_zeros(rows, dtype=torch.bool)
        stops = upload(list(stop_tokens), device, torch.long)
        noise = tokens.new_zeros(STREAMS, rows, width)
        return State(Rows(tokens, length, length.clone(), done, noise, stops), stop_strings)

    def clear(self) -> None:
        """Makes all rows idle, in the same tensors."""
        self.rows.length.fill_(1)
        self.rows.limit.fill_(1)
        self.rows.done.fill_(True)
        B = self.batch_size
        self.lengths = [1] * B  # host copy of `length`, refreshed once a round
        self.limits = [1] * B  # host copy of `limit`
        self.texts: list[list[int]] = [[] for _ in range(B)]  # the committed tokens, those before `lengths`
        self.drafted = [0] * B  # `Draft.count` of the last round
        self.kept = [0] * B  # tokens that each row kept of that round, recovered or bonus token included
        self.prompt_lengths = [1] * B  # tokens
        self.active = [False] * B  # host copy of ~done
        self.owners = [-1] * B  # the number of the request that has the row; -1 if none
        self.inputs: list[Sequence[int]] = [()] * B  # the tokens of the encoder's input; empty if it reads none
        self.rehearsal = False  # whether the requests are no part of the run, as in a warm-up
        self.waiting = 0  # requests that have arrived and have no row yet
        self.drawn = 0  # the depth to which the round's draft was drawn, before it was padded

    def admit(self, jobs: Sequence[Job], rows: Sequence[int], owners: Sequence[int]) -> None:
        """Writes prompt, limit and noise of each job into one of `rows`; `owners` are the numbers of the requests. The
        rows stay idle until `begin`."""
        device, width = self.tokens.device, self.tokens.shape[1]
        where = upload(list(rows), device)
        self.tokens[where] = upload([[*j.tokens, *[0] * (width - len(j.tokens))] for j in jobs], device)
        self.length[where] = upload([len(j.tokens) for j in jobs], device)
        self.rows.limit[where] = upload([j.limit for j in jobs], device)
        self.noise[:, where] = noise_bits(upload([j.key for j in jobs], device), width)
        for row, job, owner in zip(rows, jobs, owners, strict=True):
            self.lengths[row] = self.prompt_lengths[row] = len(job.tokens)
            self.limits[row], self.owners[row], self.texts[row] = job.limit, owner, list(job.tokens)
            read = job.encoder_input
            self.inputs[row] = read if isinstance(read, Sequence) else ()
            self.admitted += 1
            self.serials[row] = self.admitted

    def begin(self, rows: Sequence[int]) -> None:
        """Makes these rows active: their prompts have been read."""
        self.rows.done[upload(list(rows), self.tokens.device)] = False
        for row in rows:
            self.active[row] = True

    def retire(self, rows: Sequence[int]) -> None:
        """Empties these rows, whose texts have ended and are stored: no call has to reach as far as they did."""
        where = upload(list(rows), self.tokens.device)
        self.length[where] = self.rows.limit[where] = 1
        for row in rows:
            self.lengths[row] = self.limits[row] = self.prompt_lengths[row] = 1
            self.owners[row], self.texts[row] = -1, []

    @staticmethod
    def start(
        jobs: Sequence[Job], stop_tokens: Sequence[int], spare: int, device: torch.device,
        stop_strings: StopStrings | None = None,
    ) -> "State":  # fmt: skip
        """A state in which every job has a row and decodes at once. `spare` columns beyond the longest limit take the
        guesses of rows that are done."""
        rows = range(len(jobs))
        state = State.idle(len(jobs), max(j.limit for j in jobs) + spare, stop_tokens, device, stop_strings)
        state.admit(jobs, rows, rows)
        state.begin(rows)
        return state

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
    def busy(self) -> int:
        """The number of rows up to the last active one: a call needs no others."""
        return max((row + 1 for row, on in enumerate(self.active) if on), default=0)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def remaining(self, context: int) -> list[int]:
        """How many guesses each row can still keep within its limit and `context` tokens. One place is left for the
        round's recovered or bonus token."""
        return [
            max(0, min(limit, context) - length - 1) if active else 0
            for limit, length, active in zip(self.limits, self.lengths, self.active, strict=True)
        ]

    def synchronise(self, summary: Tensor) -> None:
        """The one host synchronisation of a round: copies a `summary_of` it, [3 + D + 1, B], to the host."""
        lengths, done, self.drafted, *new = summary.tolist()
        for row, tokens in enumerate(zip(*new, strict=True)):
            if self.active[row]:
                self.texts[row] += tokens[: lengths[row] - self.lengths[row]]
        self.kept = [(new - was) * on for new, was, on in zip(lengths, self.lengths, self.active, strict=True)]
        self.lengths = [was + kept for was, kept in zip(self.lengths, self.kept, strict=True)]
        self.active = [on and not ended for on, ended in zip(self.active, done, strict=True)]

    def find_stop_strings(self, verdict: Verdict) -> Tensor:
        """[B]: the number of the round's tokens up to the one that completes a stop string, or more than there are if
        none does. Costs a host synchronisation of its own."""
        assert self.stop_strings is not None
        found = torch.cat([verdict.accepted[:, None], verdict.tokens], 1).tolist()
        cuts = [len(row) for row in found]
        for row, (generated, (n, *new)) in enumerate(zip(self.new_tokens(), found, strict=True)):
            if self.active[row]:
                cut = self.stop_strings.find(generated, new[: n + 1])
                cuts[row] = cuts[row] if cut is None else cut
        return upload(cuts, self.tokens.device)

    def new_tokens(self) -> list[list[int]]:
        """The generated tokens of each row, without its prompt."""
        spans = zip(self.texts, self.prompt_lengths, self.lengths, strict=True)
        return [text[start:end] for text, start, end in spans]
