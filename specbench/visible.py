"""Text from outside made safe for terminals, logs, pages and figures: what does not print is shown as its escape."""

import logging
import re
from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.segment import Segment

# Control characters (C0, DEL, C1), line and paragraph separators, bidirectional controls and other invisible marks,
# halves of surrogate pairs, tags.
HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
SHOWN = 160  # characters of a value in a sentence


def visible(text: str, layout: bool = False) -> str:
    """The text with every hidden or control character as its escape, `\\x1b`. With `layout`, line breaks and tabs
    stay."""
    return HIDDEN.sub(lambda found: _escape(found[0], "\n\t" if layout else ""), text)


def _escape(character: str, kept: str) -> str:
    return character if character in kept else character.encode("unicode_escape").decode()


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


class VisibleFormatter(logging.Formatter):
    """Formats log records; a record cannot forge another one, nor send commands to a terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = visible(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return visible(super().formatException(ei), layout=True)


class Visible:
    """What Rich renders of another renderable, with its text made visible: only Rich's own styles reach a terminal."""

    def __init__(self, renderable: Any):
        self.renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self.renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text, layout=True))
