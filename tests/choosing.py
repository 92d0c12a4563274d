"""Cases that the default run leaves to `-m slow`."""

from collections.abc import Iterable, Sequence

import pytest


def slow_unless(fast: bool, *case):
    """A case of `parametrize`, which is slow unless it is `fast`."""
    return pytest.param(*case, marks=() if fast else pytest.mark.slow)


def only(fast: Sequence, cases: Iterable) -> list:
    """Cases of one value each; all but those in `fast` are slow."""
    cases = [*cases]
    assert all(case in cases for case in fast), "what is to be fast is no case"
    return [slow_unless(case in fast, case) for case in cases]


def in_turn(firsts: Sequence, others: Sequence[tuple], fast: Sequence | None = None) -> list:
    """The cases (first, *other) of all pairs; by default one for each first, or of `fast`: others take turns."""
    assert fast is None or all(first in firsts for first in fast), "what is to be fast is no case"
    return [slow_unless(place % len(others) == number and (fast is None or first in fast), first, *other)
            for place, first in enumerate(firsts) for number, other in enumerate(others)]  # fmt: skip
