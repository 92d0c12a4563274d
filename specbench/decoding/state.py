"""The state of a batch being decoded, and the token tree that a drafter proposes.

Shapes: B rows, T columns, N drafted nodes, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specbench.decoding.noise import noise_bits
from specbench.decoding.stopping import StopStrings


@dataclass(frozen=True)
class Draft:
    """Guesses as a token tree. A chain is the tree in which each node's parent is the one before.

    `probs` is q, the very tensor the tokens were drawn from; None means a point mass on each
    token. Rows are ragged: only the first `count[b]` nodes of row b are guesses.
    """

    tokens: Tensor  # [B, N]
    parent: tuple[int, ...]  # [N]; -1 is the last committed token
    probs: Tensor | None  # [B, N, V]
    count: Tensor  # [B]

    @staticmethod
    def chain(tokens: Tensor, probs: Tensor | None, count: Tensor) -> "Draft":
        return Draft(tokens, tuple(range(-1, tokens.shape[1] - 1)), probs, count)

    @staticmethod
    def empty(batch_size: int, device: torch.device) -> "Draft":
        """No guess: the round is a plain one-token step."""
        tokens = torch.zeros(batch_size, 0, dtype=torch.long, device=device)
        return Draft.chain(tokens, None, tokens.new_zeros(batch_size))

    @property
    def is_chain(self) -> bool:
        return self.parent == tuple(range(-1, len(self.parent) - 1))


@dataclass(frozen=True)
class Verdict:
    """What a verifier decided: x_1 .. x_n of the draft, then one token t of its own."""

    tokens: Tensor  # [B, N + 1]; columns after n + 1 mean nothing
    accepted: Tensor  # [B], n


@dataclass
class State:
    """Committed tokens of B ragged rows. The last one of each row is not in any cache yet."""

    tokens: Tensor  # [B, T]; what stands at and beyond `length` means nothing
    length: Tensor  # [B]
    limit: Tensor  # [B], the length at which max_new_tokens or the context ends the row
    done: Tensor  # [B]
    noise: Tensor  # [3, B, T], 64 random bits by stream, row and position
    lengths: list[int]  # host copy of `length`, refreshed once a round
    limits: list[int]
    prompt_lengths: list[int]
    stop_tokens: Tensor  # [S]
    stop_strings: StopStrings | None = None
    active: list[bool] = field(default_factory=list)  # host copy of ~done

    @staticmethod
    def start(
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        keys: Sequence[int],
        stop_tokens: Sequence[int],
        spare: int,
        device: torch.device,
        stop_strings: StopStrings | None = None,
    ) -> "State":
        """`spare` columns beyond the longest limit take the guesses of rows that are done."""
        lengths = [len(p) for p in prompts]
        width = max(limits) + spare
        tokens = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        return State(
            tokens=tokens.to(device),
            length=torch.tensor(lengths, device=device),
            limit=torch.tensor(list(limits), device=device),
            done=torch.zeros(len(prompts), dtype=torch.bool, device=device),
            noise=noise_bits(torch.tensor(list(keys), device=device), width),
            lengths=lengths,
            limits=list(limits),
            prompt_lengths=list(lengths),
            stop_tokens=torch.tensor(list(stop_tokens), dtype=torch.long, device=device),
            stop_strings=stop_strings,
            active=[True] * len(prompts),
        )

    @property
    def batch_size(self) -> int:
        return self.tokens.shape[0]

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def room(self, context: int) -> list[int]:
        """Per row, how many guesses can still be kept: the round's own token needs a place too."""
        return [
            max(0, min(limit, context) - length - 1) if active else 0
            for limit, length, active in zip(self.limits, self.lengths, self.active, strict=True)
        ]

    def window(self, values: Tensor, start: int, width: int) -> Tensor:
        """values [B, T] at positions length + start .. length + start + width - 1: [B, width]."""
        offsets = torch.arange(start, start + width, device=values.device)
        return values.gather(1, self.length[:, None] + offsets)

    def seen(self, vocab_size: int) -> Tensor:
        """[B, V]: which tokens the repetition penalty counts as used."""
        committed = torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.length[:, None]
        counts = torch.zeros(self.batch_size, vocab_size, dtype=torch.long, device=self.tokens.device)
        return counts.scatter_add_(1, self.tokens, committed.long()) > 0

    def append(self, verdict: Verdict) -> Tensor:
        """Commits x_1 .. x_n, t up to the first stop; returns [B], how many tokens each row kept."""
        width = verdict.tokens.shape[1]
        offsets = torch.arange(width, device=self.tokens.device)
        self.tokens.scatter_(1, self.length[:, None] + offsets, verdict.tokens)
        kept = verdict.accepted + 1
        stops = torch.isin(verdict.tokens, self.stop_tokens) & (offsets < kept[:, None])
        stopped = stops.any(1)
        kept = torch.where(stopped, stops.int().argmax(1) + 1, kept)
        kept = torch.minimum(kept, self.limit - self.length)
        stopped &= stops.gather(1, (kept - 1).clamp(min=0)[:, None]).squeeze(1)
        if self.stop_strings is not None:
            kept, stopped = self._find_stop_strings(verdict.tokens, kept, stopped)
        kept = kept.masked_fill(self.done, 0)
        self.length += kept
        self.done |= stopped | (self.length >= self.limit)
        return kept

    def synchronise(self) -> None:
        """The one host synchronisation of a round: lengths and stops to the host."""
        host = torch.stack([self.length, self.done.long()]).tolist()
        self.lengths = host[0]
        self.active = [not done for done in host[1]]

    def _find_stop_strings(self, tokens: Tensor, kept: Tensor, stopped: Tensor) -> tuple[Tensor, Tensor]:
        """Shortens `kept` to the token that completes a stop string; costs a host synchronisation."""
        counts, flags, new = kept.tolist(), stopped.tolist(), tokens.tolist()
        for row, generated in enumerate(self.new_tokens()):
            cut = self.stop_strings.find(generated, new[row][: counts[row]])
            if cut is not None:
                counts[row], flags[row] = cut, True
        return kept.new_tensor(counts), stopped.new_tensor(flags)

    def new_tokens(self) -> list[list[int]]:
        """What was generated, per row, without the prompt."""
        rows = self.tokens.tolist()
        spans = zip(rows, self.prompt_lengths, self.lengths, strict=True)
        return [row[start:end] for row, start, end in spans]
