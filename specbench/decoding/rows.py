"""The tensors of a state, and functions of them that need no host. B rows, T columns, V vocabulary."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.decoding.draft import Draft, Verdict


@dataclass(frozen=True)
class Rows:
    """The tensors of a state. They keep their addresses, so that code can be captured around them."""

    tokens: Tensor  # [B, T]; columns at and beyond `length` are undefined
    length: Tensor  # [B], committed tokens
    limit: Tensor  # [B], the length at which max_new_tokens or the context ends the row
    done: Tensor  # [B] bool
    noise: Tensor  # [3, B, T], 64 random bits by stream, row and position
    stop_tokens: Tensor  # [S], tokens that end a text

    def first(self, rows: int) -> "Rows":
        """The first `rows` rows, on the same memory."""
        if rows == len(self.length):
            return self
        cut = (self.tokens[:rows], self.length[:rows], self.limit[:rows], self.done[:rows], self.noise[:, :rows])
        return Rows(*cut, self.stop_tokens)


def commit_tokens(rows: Rows, verdict: Verdict, cuts: Tensor | None = None) -> Tensor:
    """Writes the verdict's tokens behind the text of each row, and updates length and done, all in place. Of the n + 1
    new tokens, those up to the first stop token, to cuts[b] and to the limit are kept; cuts [B]. Returns kept [B]."""
    new, length, done = verdict.tokens, rows.length, rows.done
    offsets = torch.arange(new.shape[1], device=new.device)
    rows.tokens.scatter_(1, length[:, None] + offsets, new)
    kept = verdict.accepted + 1
    ends = (new[:, :, None] == rows.stop_tokens).any(-1)  # also among the undefined ones behind them
    if cuts is not None:
        ends = ends | (offsets + 1 == cuts[:, None])
    first_end = torch.where(ends, offsets, new.shape[1]).amin(1)  # [B]
    kept = torch.minimum(torch.minimum(kept, first_end + 1), rows.limit - length)
    stopped = first_end < kept
    kept = torch.where(done, 0, kept)
    length.add_(kept)
    done.logical_or_(stopped | (length >= rows.limit))
    return kept


def summary_of(rows: Rows, verdict: Verdict, draft: Draft) -> Tensor:
    """What the host must know of a round, as one tensor [3 + D + 1, B]: length, done, `draft.count`, and the tokens."""
    return torch.cat([torch.stack([rows.length, rows.done.long(), draft.count]), verdict.tokens.T])


def window(values: Tensor, begin: Tensor, width: int) -> Tensor:
    """values [B, T] at the `width` positions from begin [B] on: [B, width]."""
    return values.gather(1, begin[:, None] + torch.arange(width, device=values.device))


def last_tokens(rows: Rows, width: int) -> tuple[Tensor, Tensor]:
    """The last `width` tokens of each row [B, width], and the position of the first of them [B]. In a shorter row it is
    negative, and its first token comes several times: all rows have one shape."""
    first = rows.length - width
    places = (first[:, None] + torch.arange(width, device=first.device)).clamp(min=0)
    return rows.tokens.gather(1, places), first


def all_rows(values: Tensor, rows: int) -> Tensor:
    """values [b, ...] of the first b rows, with zeros for the others: [rows, ...]."""
    missing = rows - len(values)
    return torch.cat([values, values.new_zeros(missing, *values.shape[1:])]) if missing else values


def seen_tokens(text: Tensor, length: Tensor, vocab_size: int) -> Tensor:
    """[B, V] bool: the tokens among the first length[b] of each text, for the penalty; text [B, T], length [B]."""
    committed = torch.arange(text.shape[1], device=text.device) < length[:, None]
    counts = torch.zeros(text.shape[0], vocab_size, dtype=torch.long, device=text.device)
    return counts.scatter_add_(1, text, committed.long()) > 0
