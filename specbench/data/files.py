"""Files that a run reads: text, and JSON objects, one a line, plain or gzipped."""

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from typing import Any

from specbench.errors import AbsentError, ConfigError, first_line, shown

LINES = "a file of JSON objects, one a line (.jsonl or .jsonl.gz)"
TEXT = "a text file in UTF-8"


def need_file(path: str, key: str, what: str = LINES) -> None:
    """Raises ConfigError, naming the setting `key`, unless the path is a file with content that can be read."""
    try:
        if not os.path.isfile(path):
            reason = "is not a file"
        else:
            with open(path, "rb") as file:
                reason = "" if file.read(1) else "is empty"
    except (OSError, ValueError) as error:  # the latter of a path with a zero byte
        reason = f"cannot be read ({first_line(error)})"
    if reason:
        raise AbsentError(f"{key}={shown(path)} {reason}: it must be {what}")


def read_text(path: str, key: str) -> str:
    """The text of a file that the setting `key` names, without a byte order mark. Raises ConfigError if it is blank."""
    need_file(path, key, TEXT)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            text = file.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{key}={path} is not UTF-8 (byte {error.start + 1}): it must be {TEXT}") from error
    if not text.strip():
        raise ConfigError(f"{key}={path} is blank: it must be {TEXT}")
    return text


def read_json_lines(path: str, key: str = "data.path") -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number, object) for each line that is not blank, of a UTF-8 file with or without a byte order mark.
    Raises ConfigError, naming the setting `key` and the line, if a line is no JSON object or the file is damaged."""
    with open(path, "rb") as file:
        gzipped = file.read(2) == b"\x1f\x8b"
    number, found = 0, False
    try:
        with gzip.open(path) if gzipped else open(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if not text.strip():
                    continue
                record = json.loads(text, parse_constant=_refuse_constant)
                if not isinstance(record, dict):
                    raise ValueError("it is no JSON object")
                found = True
                yield number, record
    except UnicodeDecodeError as error:
        raise ConfigError(f"{key}={path} line {number} is not UTF-8 ({first_line(error)})") from error
    except (OSError, EOFError, zlib.error) as error:  # of gzip too
        raise ConfigError(f"{key}={path} cannot be read after line {number} ({first_line(error)})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{key}={path} line {number} must be one JSON object ({first_line(error)})") from error
    if not found:
        raise ConfigError(f"{key}={path} holds only blank lines: it must be {LINES}")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")
