"""Counter-based randomness: a number is a pure function of (seed, prompt, position, stream).

So a prompt's tokens depend neither on the batch it is decoded in nor on the order of rounds, and a decode can be
replayed. The proposal, the acceptance and the residual draw of a position use three separate streams. The bits behind a
rejected guess are used again, unless the verdict, a later gamma or a later q may depend on them: then `renew` replaces
them.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.decoding.rows import window
from specbench.decoding.token_tree import Levels, depths
from specbench.decoding.transfers import constant, upload

PROPOSAL, ACCEPTANCE, RESIDUAL = 0, 1, 2
STREAMS = 3
STREAM = 1 << 20  # more than the nodes of any tree


def prompt_key(seed: int, prompt_id: str) -> int:
    """A 63-bit integer key for one prompt under one seed."""
    digest = hashlib.sha256(f"{seed}/{prompt_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def noise_bits(keys: Tensor, positions: int) -> Tensor:
    """64 random bits for every stream, row and position: keys [B] int64 -> [3, B, positions] int64."""
    stream = torch.arange(STREAMS, device=keys.device)[:, None, None]
    counter = torch.arange(positions, device=keys.device) * STREAMS + stream  # [3, 1, T]
    return _mix(keys[None, :, None] + _mix(counter + 1))


def uniforms(bits: Tensor) -> Tensor:
    """Uniforms in (0, 1), float64, from the upper 52 of 64 random bits each: bits [...] -> [...]."""
    return (_logical_shift(bits, 12).double() + 0.5) * 2.0**-52


def exponentials(bits: Tensor, vocab_size: int) -> Tensor:
    """A standard exponential for each token, from bits [...]: [..., V] float64. `kernels/race.py` computes the same."""
    x = (bits.unsqueeze(-1) ^ constant(token_bits)(vocab_size, bits.device)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 32)) * -0x6B2FB644ECCEEE15
    return uniforms(x).log().neg()


def token_bits(vocab_size: int, device: torch.device) -> Tensor:
    """64 pseudo-random bits of each token id, [V]."""
    return _mix(_mix(torch.arange(vocab_size, device=device) - 0x61C8864680B583EB))


def sibling_bits(bits: Tensor, number: Tensor) -> Tensor:
    """Independent bits for several draws at one position: given bits [...] and the draw's number [...], the bits
    themselves for number 0 and other bits [...] for 1, 2, ..."""
    return torch.where(number == 0, bits, _mix(bits + number * -0x61C8864680B583EB))


def renew(noise: Tensor, done: Tensor) -> None:
    """Replaces the bits of rows that are not done, in place, by others that follow: noise [..., B, T], done [B]."""
    noise.copy_(torch.where(done[:, None], noise, _mix(noise + 1)))


@dataclass(frozen=True)
class Noise:
    """Uniforms for acceptance and bits for t, of streams of their own. B rows, N nodes, D levels, T columns."""

    table: Tensor  # [3, B, T]
    length: Tensor  # [B], committed tokens
    levels: Levels

    @property
    def r(self) -> Tensor:
        """[B, N] uniforms r_i of Algorithm 1, from the bits of each guess's position; independent at one position."""
        if set(self.levels) <= {1}:
            return uniforms(window(self.table[ACCEPTANCE], self.length, len(self.levels)))
        return uniforms(node_bits(self.table[ACCEPTANCE], self.length, self.levels))

    @property
    def bits(self) -> Tensor:
        """[B, D + 1] random bits: column n draws the token after n accepted guesses."""
        return window(self.table[RESIDUAL], self.length, len(self.levels) + 1)


def node_bits(bits: Tensor, length: Tensor, levels: Levels, stream: int = 0) -> Tensor:
    """Bits [B, N] of a tree's nodes, from a table [B, T] behind length [B]; another `stream` has independent ones."""
    depth, number = constant(places_of)(levels, bits.device)
    return sibling_bits(bits.gather(1, length[:, None] + depth - 1), number + stream * STREAM)


def places_of(levels: Levels, device: torch.device) -> Tensor:
    """[2, N]: the depth of each node, and how many nodes of that depth stand before it."""
    return upload([depths(levels), [i for width in levels for i in range(width)]], device)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64, [...] int64 -> [...]: every input bit flips each output bit with probability 1/2."""
    x = (x ^ _logical_shift(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _logical_shift(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _logical_shift(x, 31)


def _logical_shift(x: Tensor, bits: int) -> Tensor:
    """x [...] int64 shifted right by `bits`, with zeros shifted in: [...]."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
