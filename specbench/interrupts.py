"""SIGINT and SIGTERM: they end a run at once while it decodes, and wait while it writes.

The state is the process's, as signals are.
"""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from specbench import ranks

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _State:
    """What is known of signals in this process."""

    installed = False  # whether the handlers are `_note`
    depth = 0  # of `held`, one inside another
    held = False  # whether a signal has to wait
    waiting = False  # whether one does
    first: int | None = None  # the first signal since the handlers were installed


_state = _State()


def _note(number: int, frame: FrameType | None) -> None:
    """The handler. After a signal has raised inside of `held`, the next one waits again: it must not disturb what
    follows the first."""
    _state.first = _state.first or number
    _state.waiting = True
    raise_waiting()


def raise_waiting() -> None:
    """Raises KeyboardInterrupt if a signal waits and nothing holds it back."""
    if _state.waiting and not _state.held:
        _state.waiting, _state.held = False, _state.depth > 0
        raise KeyboardInterrupt


@contextmanager
def handled() -> Iterator[None]:
    """Inside, SIGTERM raises KeyboardInterrupt as SIGINT does. A signal that the process was started to ignore stays
    ignored. Outside the main thread nothing changes."""
    if _state.installed or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    _state.installed, _state.first, _state.waiting = True, None, False
    try:
        for number in before:
            signal.signal(number, _note)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _state.installed = False


@contextmanager
def held() -> Iterator[None]:
    """Inside, signals wait: one that came raises KeyboardInterrupt at the end of the outermost `held`."""
    with handled():
        raise_waiting()
        _state.depth, _state.held = _state.depth + 1, True
        try:
            yield
        finally:
            _state.depth -= 1
            _state.held = _state.depth > 0
            raise_waiting()  # also after an error, which becomes its context


@contextmanager
def at_once() -> Iterator[None]:
    """Inside of `held`: a signal raises KeyboardInterrupt wherever the program is. Ranks that share a target stop in
    the same round instead (`stop_together`)."""
    _state.held = ranks.size() > 1
    try:
        raise_waiting()
        yield
    finally:
        _state.held = _state.depth > 0


def stop_together(numbers: Sequence[Sequence[int]]) -> None:
    """Compares what a round has kept with the other ranks; raises KeyboardInterrupt on all of them if a signal waits on
    any. Raises RankError if they differ."""
    if ranks.compare(numbers, _state.waiting):
        _state.waiting, _state.held = False, _state.depth > 0
        raise KeyboardInterrupt


def exit_code() -> int:
    """130 after SIGINT, 143 after SIGTERM."""
    return 128 + (_state.first or signal.SIGINT)
