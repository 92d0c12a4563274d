"""SIGINT and SIGTERM: they end a run at once while it decodes, and wait while it writes.

The state is the process's, as signals are.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _State:
    """What is known of signals in this process."""

    installed = False  # whether the handlers are `_note`
    depth = 0  # of `defer_signals`, one inside another
    deferred = False  # whether a signal has to wait
    waiting = False  # whether one does
    came: tuple[int, ...] = ()  # the signals since the handlers were installed


_state = _State()


def _note(number: int, frame: FrameType | None) -> None:
    """The handler."""
    _state.came, _state.waiting = (*_state.came, number), True
    raise_waiting()


def raise_waiting() -> None:
    """Raises KeyboardInterrupt if a signal waits and nothing holds it back."""
    if _state.waiting and not _state.deferred:
        interrupt()


@contextmanager
def restored(*more: int) -> Iterator[None]:
    """Handlers that are set inside, as by a library, are gone afterwards. Outside the main thread nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (*SIGNALS, *more)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def handled(*more: int) -> Iterator[None]:
    """Inside, SIGTERM and `more` signals raise KeyboardInterrupt as SIGINT does. A signal that the process was started
    to ignore stays ignored. Outside the main thread nothing changes."""
    if _state.installed or threading.current_thread() is not threading.main_thread():
        yield
        return
    with restored(*more):
        _state.installed, _state.waiting, _state.came = True, False, ()
        try:
            for number in (*SIGNALS, *more):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, _note)
            yield
        finally:
            _state.installed = False


@contextmanager
def defer_signals() -> Iterator[None]:
    """Inside, signals wait: one that came raises KeyboardInterrupt at the end of the outermost `defer_signals`."""
    with handled():
        raise_waiting()
        _state.depth, _state.deferred = _state.depth + 1, True
        try:
            yield
        finally:
            _state.depth -= 1
            _state.deferred = _state.depth > 0
            raise_waiting()  # also after an error, which becomes its context


@contextmanager
def allow_signals() -> Iterator[None]:
    """Inside of `defer_signals`: a signal raises KeyboardInterrupt wherever the program is. Ranks that share a target
    stop in the same round instead (`SyncPolicy.end_round`)."""
    _state.deferred = False
    try:
        raise_waiting()
        yield
    finally:
        _state.deferred = _state.depth > 0


def is_waiting() -> bool:
    """Whether a signal has come that has not raised yet."""
    return _state.waiting


def interrupt() -> NoReturn:
    """Raises KeyboardInterrupt, whether a signal waits here or in another process of the run. Inside of `defer_signals`
    the next signal waits again: it must not disturb what follows the first."""
    _state.waiting, _state.deferred = False, _state.depth > 0
    raise KeyboardInterrupt


def was_seen(number: int) -> bool:
    """Whether this signal has come since the handlers were installed."""
    return number in _state.came


def exit_code() -> int:
    """130 after SIGINT, 143 after SIGTERM."""
    return 128 + next(iter(_state.came), signal.SIGINT)
