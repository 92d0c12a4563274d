"""The verifier's random numbers for one round, cut out of the noise table of a state."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.config.devices import upload
from specbench.decoding.draft import Draft
from specbench.decoding.noise import ACCEPTANCE, RESIDUAL, constant, sibling_bits, uniforms
from specbench.decoding.rows import Rows, window
from specbench.decoding.token_tree import Levels, depths, siblings

STREAM = 1 << 20  # more than the nodes of any tree


@dataclass(frozen=True)
class Noise:
    """Uniforms for acceptance and bits for the recovered or bonus token, from separate streams. B rows, N nodes, D
    levels, T columns."""

    table: Tensor  # [3, B, T]
    length: Tensor  # [B], committed tokens
    levels: Levels

    @staticmethod
    def of(rows: Rows, draft: Draft) -> "Noise":
        """The noise of a draft that follows the committed text of these rows."""
        return Noise(rows.noise, rows.length, draft.levels)

    @property
    def r(self) -> Tensor:
        """[B, N] uniforms r_i of Algorithm 1, one for each guess, from the bits of the position that it would take.
        Nodes at one position get independent uniforms."""
        if set(self.levels) <= {1}:
            return uniforms(window(self.table[ACCEPTANCE], self.length, len(self.levels)))
        return uniforms(node_bits(self.table[ACCEPTANCE], self.length, self.levels))

    @property
    def bits(self) -> Tensor:
        """[B, D + 1] random bits: column n draws the token after n accepted guesses."""
        return window(self.table[RESIDUAL], self.length, len(self.levels) + 1)


def node_bits(bits: Tensor, length: Tensor, levels: Levels, stream: int = 0) -> Tensor:
    """Bits [B, N] for the nodes of a tree, from a table [B, T] at the positions that follow length [B]. Another
    `stream` gives independent bits."""
    depth, number = constant(places_of)(levels, bits.device)
    return sibling_bits(bits.gather(1, length[:, None] + depth - 1), number + stream * STREAM)


def places_of(levels: Levels, device: torch.device) -> Tensor:
    """[2, N]: the depth of each node, and how many nodes of that depth stand before it."""
    return upload([depths(levels), siblings(levels)], device)
