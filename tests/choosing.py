"""Cases that the default run leaves to `-m slow`."""

from collections.abc import Sequence

import pytest


def slow_unless(fast: bool, *case):
    """A case of `parametrize`, which is slow unless it is `fast`."""
    return pytest.param(*case, marks=() if fast else pytest.mark.slow)


def in_turn(firsts: Sequence, others: Sequence[tuple]) -> list:
    """The cases (first, *other) of all pairs. The default run has one for each first: the others take turns."""
    return [slow_unless(place % len(others) == number, first, *other)
            for place, first in enumerate(firsts) for number, other in enumerate(others)]  # fmt: skip
