"""Errors as one sentence, and text from outside made safe for terminals, logs, pages and figures."""

import difflib
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

# Control characters (C0, DEL, C1), line and paragraph separators, bidirectional controls and other invisible marks,
# halves of surrogate pairs, tags.
HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
SHOWN = 160  # characters of a value in a sentence
LONGEST_SENTENCE = 2000  # characters
MOST_CAUSES = 5
MOST_LISTED = 12  # names in a sentence


def visible(text: str, layout: bool = False) -> str:
    """The text with hidden and control characters as escapes; with `layout`, line breaks and tabs stay."""
    kept = "\n\t" if layout else ""
    return HIDDEN.sub(lambda c: c[0] if c[0] in kept else c[0].encode("unicode_escape").decode(), text)


def shown(value: Any) -> str:
    """A value for a sentence: visible, and shortened if it is long."""
    if value is None or value == "":
        return "null" if value is None else "''"
    try:
        text = str(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return "a number of thousands of digits"
    except RecursionError:
        return "a value nested too deeply"
    text = visible(text)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text):,} characters)"


def first_line(error: BaseException) -> str:
    """What an error of a library says, as a part of a sentence: its first line that is not blank, or its class."""
    lines = (line.strip() for line in str(error).splitlines())
    return shown(next((line for line in lines if line), type(error).__name__)).rstrip(".")


def causes(error: BaseException) -> str:
    """What an error says, as `first_line` has it, and what each of those before it said, down to the first one."""
    said, before = [f"{type(error).__name__}: {first_line(error)}"], error.__cause__ or error.__context__
    while before is not None and len(said) < MOST_CAUSES:
        said.append(f"after {type(before).__name__}: {first_line(before)}")
        before = before.__cause__ or before.__context__
    return ", ".join(said)


def installing(extra: str = "") -> str:
    """The command that installs what an extra needs or, without one, what every run needs."""
    return f"pip install 'speculative-decoding-bench{f'[{extra}]' * bool(extra)}'"


class VisibleFormatter(logging.Formatter):
    """Formats log records; a record cannot forge another one, nor send commands to a terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = visible(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return visible(super().formatException(ei), layout=True)


class CommandError(Exception):
    """Ends a command with one sentence and an exit code, as when prompts or processes have no results."""

    code = 1


class ConfigError(CommandError):
    """A mistake of the user's: the sentence names the key, the value and what is allowed."""

    code = 2


class AbsentError(ConfigError):
    """Weights or data that a run needs are not on this machine."""


class VerdictError(CommandError):
    """With strict=true: a run is finished and written, but its verdict is not good."""

    code = 3


def unknown(name: str, available: Iterable[str], kind: str, elsewhere: Sequence[str] = ()) -> ConfigError:
    """The error "X is not a KIND. Did you mean Y?", with what there is or, if that is much, where it is listed. Y are
    those that X is the end of, `elsewhere`, if there are any, else the closest three of those available."""
    available = sorted(available)
    close = list(elsewhere) or difflib.get_close_matches(name[:SHOWN], available, n=3, cutoff=0.8)
    hint = f" Did you mean {', '.join(close)}?" if close else ""
    if len(available) > MOST_LISTED:
        listed = f"python -m specbench --help lists all {len(available)}."
    else:
        listed = f"Available: {', '.join(available) or 'none'}."
    return ConfigError(f"{shown(name)} is not a {kind}.{hint} {listed}")


def comes_from(function: Callable[..., Any], error: BaseException) -> bool:
    """Whether the error was raised while the function ran; Hydra's own composition fails with errors of any class."""
    return any(frame.f_code is function.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))


def stop(sentence: str, code: int) -> NoReturn:
    """Prints one sentence on standard error; ends the program with this code."""
    line = visible(" ".join(sentence.split()))
    if len(line) > LONGEST_SENTENCE:
        line = f"{line[: LONGEST_SENTENCE // 2]} ... {line[-LONGEST_SENTENCE // 2 :]}"
    print(f"specbench: {line}", file=sys.stderr)
    sys.exit(code)


@contextmanager
def answering() -> Iterator[None]:
    """The body of a command: a CommandError becomes one sentence and its exit code, and a package that cannot be
    imported one sentence and 2. Where what reads the output is gone, as after `| head -1`, the command ends without a
    word, with the exit code of a program that SIGPIPE ends."""
    try:
        yield
        sys.stdout.flush()
    except CommandError as error:
        stop(str(error), error.code)
    except ImportError as error:
        if (error.name or "").startswith("specbench"):
            raise
        stop(f"a package is missing or does not fit ({causes(error)}): {installing()}", 2)
    except BrokenPipeError:
        with suppress(OSError, ValueError):  # so that Python's own flush at the end has somewhere to go
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
