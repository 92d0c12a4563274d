"""An HTTP endpoint: JSON and text by GET, and answers that come piece by piece as server-sent events."""

import json
import re
import socket
import time
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from typing import Any
from urllib.parse import SplitResult, urlsplit

from specbench.errors import ConfigError, first_line, shown

LONGEST_EVENT = 2**22  # bytes
READ = 2**16  # bytes at once
CONNECT_SECONDS = 10.0  # until a connection is made
LINE_END = re.compile(rb"\r\n|\n|\r")
LONGEST_BODY = 2**26  # bytes of an answer to GET
LOOK_SECONDS = 5.0  # for what a server answers without computing
VERSION = "/v1"  # the API's, which a URL may end with


class ServerError(RuntimeError):
    """What went wrong with a server, in one sentence."""

    def __init__(self, sentence: str, status: int | None = None):
        super().__init__(sentence)
        self.status = status  # of HTTP, if it answered


def split(key: str, url: Any) -> SplitResult:
    """The parts of a server's URL, without `/v1` and slashes at the end. Raises ConfigError, naming the key."""
    named = f"{key}={shown(url)} is not allowed"
    if not isinstance(url, str) or not url.isascii() or any(character <= " " for character in url):
        raise ConfigError(f"{named}: it must be a URL as http://localhost:8000/v1")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{named}: {first_line(error)}; it must be a URL as http://localhost:8000/v1") from error
    if parts.username is not None or parts.password is not None:  # configurations are stored
        raise ConfigError(f"{key} holds a name or a password, which is not allowed: name an environment variable that "
                          "has the key with baseline.key_env")  # fmt: skip
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(f"{named}: it must begin with http:// or https:// and name a host, as http://localhost:8000")
    if parts.query or parts.fragment:
        raise ConfigError(f"{named}: it must end with the path, without ? and #")
    return parts._replace(path=parts.path.rstrip("/").removesuffix(VERSION).rstrip("/"))


@dataclass
class Endpoint:
    """A server's address and the key that it asks for. Every call opens a connection of its own; several threads may
    call at once."""

    url: SplitResult
    timeout: float  # seconds without data
    key: str | None = field(default=None, repr=False)
    aborted: bool = field(default=False, repr=False)
    _open: set[HTTPConnection] = field(default_factory=set, repr=False)

    def __str__(self) -> str:
        return self.url.geturl()

    def get(self, path: str) -> str:
        """The text at a path. Raises ServerError."""
        with closing(self._connected(min(self.timeout, LOOK_SECONDS))) as connection:
            response = self._ask(connection, "GET", path, None)
            try:
                return response.read(LONGEST_BODY).decode("utf-8", "replace")
            except (OSError, HTTPException) as error:
                raise self._told(error, connection) from error

    def get_json(self, path: str) -> Any:
        """The JSON at a path. Raises ServerError."""
        return self._parsed(self.get(path))

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[tuple[float, dict[str, Any]]]:
        """Posts JSON, and yields each event of the answer with the moment, by `time.perf_counter`, when it came. The
        first one is `{}`, when the request is sent, to a connection that was made before; the last one `{}`, when the
        answer is over. Raises ServerError."""
        connection = self._connected(min(self.timeout, CONNECT_SECONDS))
        self._open.add(connection)
        try:
            if self.aborted:  # while the connection was made
                raise ServerError(f"the request to {self} was given up, since another one failed")
            connection.timeout = self.timeout
            connection.sock.settimeout(self.timeout)
            yield time.perf_counter(), {}
            response = self._ask(connection, "POST", path, json.dumps(body).encode())
            kind = response.headers.get_content_type()
            if kind != "text/event-stream":
                told = self._read_error(response)
                raise ServerError(f"{self} answers with {shown(kind)} where a stream of events was asked for{told}")
            for now, data in self._events(response, connection):
                if data == b"[DONE]":
                    yield now, {}
                    return
                event = self._parsed(data.decode("utf-8", "replace"))
                if not isinstance(event, dict):
                    raise ServerError(f"{self} sent an event that is no JSON object: {shown(self._hidden(str(event)))}")
                if event.get("error"):
                    raise ServerError(f"{self} sent an error in the middle of an answer: {self._message(event)}")
                yield now, event
            yield time.perf_counter(), {}
        finally:
            self._open.discard(connection)
            connection.close()

    def abort(self) -> None:
        """Ends all answers that are still coming, and those whose connection is still being made; those who read them
        get a ServerError. So do all others until `aborted` is false again."""
        self.aborted = True
        for connection in [*self._open]:
            with suppress(OSError):
                if connection.sock is not None:
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _connected(self, timeout: float) -> HTTPConnection:
        assert self.url.hostname is not None
        kind = HTTPSConnection if self.url.scheme == "https" else HTTPConnection
        connection = kind(self.url.hostname, self.url.port, timeout=timeout)
        try:
            connection.connect()
        except (OSError, HTTPException, UnicodeError) as error:
            raise self._told(error, connection) from error
        return connection

    def _ask(self, connection: HTTPConnection, method: str, path: str, body: bytes | None) -> HTTPResponse:
        """The answer to a request, whose body was not read. Raises ServerError if its status is not 200."""
        headers = {"Content-Type": "application/json"} if body else {}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            connection.request(method, self.url.path + path, body, headers)
            response = connection.getresponse()
        except (OSError, HTTPException) as error:
            raise self._told(error, connection) from error
        if response.status != 200:
            told = self._read_error(response)
            raise ServerError(f"{self}{path} answers {response.status} {shown(response.reason)}{told}", response.status)
        return response

    def _events(self, response: HTTPResponse, connection: HTTPConnection) -> Iterator[tuple[float, bytes]]:
        """The data of server-sent events, each with the moment when it came: its lines of data, joined. An event ends
        with an empty line; other fields and comments, which keep a connection alive, are left out. Raises ServerError,
        also if no data comes within the timeout."""
        heard, data = time.monotonic(), []
        for now, lines in self._lines(response, connection):
            for line in lines:
                name, _, value = line.partition(b":")
                if name == b"data":
                    data.append(value.strip())
                    heard = time.monotonic()
                elif not line:
                    if event := b"\n".join(data).strip():
                        yield now, event
                    data = []
            if time.monotonic() - heard > self.timeout:
                raise ServerError(f"{self} kept the connection, but sent no data for {self.timeout:g} s")
            if sum(map(len, data)) > LONGEST_EVENT:
                raise ServerError(f"{self} sent an event of more than {LONGEST_EVENT:,} bytes")

    def _lines(self, response: HTTPResponse, connection: HTTPConnection) -> Iterator[tuple[float, list[bytes]]]:
        """The lines of an answer, as many as come at once, with the moment: they end with LF, CRLF or CR, and the text
        may begin with a byte order mark. Raises ServerError."""
        rest, ended, first = b"", False, True
        while True:
            try:
                read = response.read1(READ)
            except IncompleteRead:
                return  # the server has ended the connection
            except (OSError, HTTPException, ValueError) as error:
                raise self._told(error, connection) from error
            if not read:
                break
            now = time.perf_counter()
            ended, read = read.endswith(b"\r"), read.removeprefix(b"\n") if ended else read
            *lines, rest = LINE_END.split(rest + read)
            if first and lines:
                lines[0], first = lines[0].removeprefix(BOM_UTF8), False
            if len(rest) > LONGEST_EVENT:
                raise ServerError(f"{self} sent an event of more than {LONGEST_EVENT:,} bytes")
            yield now, lines
        yield time.perf_counter(), [rest, b""]

    def _parsed(self, text: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ServerError(f"{self} sent what is no JSON: {shown(self._hidden(text))}") from error

    def _read_error(self, response: HTTPResponse) -> str:
        """What the body of an answer says, for a sentence: with ": " before it, or nothing."""
        with suppress(OSError, HTTPException):
            text = response.read(LONGEST_EVENT).decode("utf-8", "replace").strip()
            with suppress(ValueError, RecursionError):
                text = self._message(json.loads(text))
            return f": {shown(self._hidden(text))}" if text else ""
        return ""

    def _message(self, found: Any) -> str:
        """The message inside an answer that tells of an error: servers nest it in different ways."""
        for name in ("error", "detail", "message"):
            if isinstance(found, dict) and found.get(name):
                return self._message(found[name])
        return shown(self._hidden(str(found)))

    def _hidden(self, text: str) -> str:
        """The text without the key, should a server repeat it."""
        return text.replace(self.key, "***") if self.key else text

    def _told(self, error: Exception, connection: HTTPConnection) -> ServerError:
        """An error of the network, in words."""
        if isinstance(error, TimeoutError):
            return ServerError(f"{self} sent nothing for {connection.timeout:g} s")
        if isinstance(error, ConnectionRefusedError | socket.gaierror):
            return ServerError(f"nothing answers at {self} ({first_line(error)})")
        return ServerError(f"the connection to {self} broke ({type(error).__name__}: {first_line(error)})")
