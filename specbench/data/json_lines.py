"""Reads files of JSON objects, one a line, plain or gzipped. Every fault of a file is one sentence."""

import gzip
import json
import os
import stat
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from specbench.errors import ConfigError, first_line, shown

GZIP = b"\x1f\x8b"
LONGEST_LINE = 64 * 2**20  # bytes
MOST_DIGITS = 1000  # of an integer
LINES = "a file of JSON objects, one a line (.jsonl or .jsonl.gz)"


def need_file(path: str, key: str, what: str = LINES) -> None:
    """Raises ConfigError, naming the setting `key`, unless the path is a regular file with content to be read."""
    reason = ""
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            reason = "is not a file"
        else:
            with open(path, "rb"):
                reason = "" if found.st_size else "is empty"
    except FileNotFoundError:
        reason = "is not a file"
    except (OSError, ValueError) as error:  # the latter of a path with a zero byte
        reason = f"cannot be read ({getattr(error, 'strerror', None) or error})"
    if reason:
        raise ConfigError(f"{key}={shown(path)} {reason}: it must be {what}")


def read_json_lines(path: str, key: str = "data.path") -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number, object) for each line that is not blank. The file is UTF-8, with or without a byte order
    mark; that it is gzipped shows from its first bytes. Raises ConfigError if a line is no JSON object, or if the file
    cannot be read to its end; the setting `key` names it."""
    number, found = 0, False
    try:
        with open(path, "rb") as file:
            compressed = file.peek(2)[:2] == GZIP
            lines: BinaryIO = gzip.GzipFile(fileobj=file) if compressed else file  # type: ignore[assignment]
            while line := lines.readline(LONGEST_LINE + 1):
                number += 1
                where = f"{key}={path} line {number}"
                if len(line) > LONGEST_LINE:
                    raise ConfigError(f"{where} is longer than {LONGEST_LINE // 2**20} MiB: it must be one JSON object")
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if line.strip():
                    found = True
                    yield number, _record(line, where)
    except (OSError, EOFError, zlib.error) as error:  # of gzip too
        raise ConfigError(
            f"{key}={path} cannot be read after line {number} ({first_line(error)}): the file is damaged or not "
            "complete, fetch it again"
        ) from error
    if not found:
        raise ConfigError(f"{key}={path} holds only blank lines: it must be {LINES}")


def _record(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8"), parse_int=_integer, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where} is not UTF-8 (byte {error.start + 1}): save the file as UTF-8, plain or gzipped"
        ) from error
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{where} is not JSON ({error.msg} at column {error.colno}): it must hold one JSON object per line"
        ) from error
    except (ValueError, RecursionError) as error:
        why = "its values are nested too deeply" if isinstance(error, RecursionError) else error
        raise ConfigError(f"{where} is not allowed: {why}") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{where} is not a JSON object: it must be one per line")
    return record


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits is too large, write it as text")
    return int(digits)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")
