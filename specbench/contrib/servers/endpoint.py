"""An HTTP endpoint, asked with httpx: JSON and text by GET, and answers that come as server-sent events."""

import json
import re
import socket
import ssl
import time
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any
from urllib.parse import SplitResult, urlsplit

from specbench.errors import ConfigError, first_line, shown

try:
    import httpx
except ImportError:  # `ServerPeers.refuses` says how to install it
    httpx = None  # type: ignore[assignment]

LONGEST_EVENT = 2**22  # bytes, of what tells of an error too
LONGEST_BODY = 2**26  # bytes of an answer to GET
CONNECT_SECONDS = 10.0  # until a connection is made
LINE_END = re.compile(rb"\r\n|\n|\r")  # of events, which `Response.iter_lines` ends at other characters too
EVENT_END = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")
LOOK_SECONDS = 5.0  # for what a server answers without computing
VERSION = "/v1"  # the API's, which a URL may end with
CONNECTED, SENDING = ("connect_tcp.complete", "start_tls.complete"), "send_request_headers.started"  # traced events


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
class Exchange:
    """A request that is under way: its connection, and the moment when it was sent."""

    connection: socket.socket | None = None
    sent: float = 0.0  # by `time.perf_counter`


@dataclass
class Endpoint:
    """A server's address and the key that it asks for. Every request has a connection of its own; several threads may
    call at once."""

    url: SplitResult
    timeout: float  # seconds without data
    key: str | None = field(default=None, repr=False)
    aborted: bool = field(default=False, repr=False)
    _open: list[Exchange] = field(default_factory=list, repr=False)

    def __str__(self) -> str:
        return self.url.geturl()

    @cached_property
    def client(self) -> "httpx.Client":
        """Without proxies and passwords of the environment, and with the system's certificates."""
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        limits = httpx.Limits(max_keepalive_connections=0)
        return httpx.Client(headers=headers, limits=limits, verify=ssl.create_default_context(), trust_env=False)

    def get(self, path: str) -> str:
        """The text at a path. Raises ServerError."""
        with self._answered("GET", path, min(self.timeout, LOOK_SECONDS), Exchange()) as response:
            return _beginning(response, LONGEST_BODY)

    def get_json(self, path: str) -> Any:
        """The JSON at a path. Raises ServerError."""
        return self._parsed(self.get(path))

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[tuple[float, dict[str, Any]]]:
        """Posts JSON, and yields each event of the answer with the moment, by `time.perf_counter`, when it came. The
        first one is `{}`, with the moment when the request was sent, on a connection that was made before; the last
        one `{}`, when the answer is over. Raises ServerError."""
        exchange = Exchange()
        self._open.append(exchange)
        try:
            with self._answered("POST", path, self.timeout, exchange, dict(body)) as response:
                yield exchange.sent, {}
                kind = response.headers.get("content-type", "text/plain").partition(";")[0].strip().lower()
                if kind != "text/event-stream":
                    told = self._error_text(response)
                    raise ServerError(f"{self} answers with {shown(kind)} where a stream of events was asked for{told}")
                for now, data in self._events(response):
                    if data == b"[DONE]":
                        yield now, {}
                        return
                    yield now, self._event(data)
                yield time.perf_counter(), {}
        finally:
            self._open.remove(exchange)

    def abort(self) -> None:
        """Ends all answers that are still coming, and those whose connection is still being made; those who read them
        get a ServerError. So do all others until `aborted` is false again."""
        self.aborted = True
        for exchange in [*self._open]:
            with suppress(OSError):
                if exchange.connection is not None:
                    exchange.connection.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def _answered(
        self, method: str, path: str, seconds: float, exchange: Exchange, body: Mapping[str, Any] | None = None
    ) -> Iterator["httpx.Response"]:
        """The answer to a request, whose body is not read yet; `seconds` is the longest wait for data. Raises
        ServerError if its status is not 200, or the network breaks before the end of the block."""

        def trace(event: str, info: Mapping[str, Any]) -> None:
            if event.endswith(CONNECTED):
                exchange.connection = info["return_value"].get_extra_info("socket")
            elif event.endswith(SENDING):
                exchange.sent = time.perf_counter()
                if body is not None and self.aborted:  # while the connection was made
                    raise ServerError(f"the request to {self} was given up, since another one failed")

        waits = httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS), pool=None)
        address, hooks = str(self) + path, {"trace": trace}
        try:
            with self.client.stream(method, address, json=body, timeout=waits, extensions=hooks) as response:
                if response.status_code != 200:
                    told = self._error_text(response)
                    reason = f"{response.status_code} {shown(response.reason_phrase)}"
                    raise ServerError(f"{self}{path} answers {reason}{told}", response.status_code)
                yield response
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._told(error, waits.connect if isinstance(error, httpx.ConnectTimeout) else seconds) from error

    def _events(self, response: "httpx.Response") -> Iterator[tuple[float, bytes]]:
        """The data of server-sent events, each with the moment when it came: its lines of data, joined. Other fields
        and comments, which keep a connection alive, are left out. Raises ServerError, also if no data comes within the
        timeout."""
        heard, rest = time.monotonic(), b""
        with suppress(httpx.RemoteProtocolError):  # the server has ended the connection
            for read in chain(response.iter_raw(), [b"\n\n"]):
                now = time.perf_counter()
                *events, rest = EVENT_END.split(rest + read)
                for event in events:
                    lines = [line.partition(b":") for line in LINE_END.split(event.removeprefix(BOM_UTF8))]
                    if data := b"\n".join(value.strip() for name, _, value in lines if name == b"data").strip():
                        heard = time.monotonic()
                        yield now, data
                if time.monotonic() - heard > self.timeout:
                    raise ServerError(f"{self} kept the connection, but sent no data for {self.timeout:g} s")
                if len(rest) > LONGEST_EVENT:
                    raise ServerError(f"{self} sent an event of more than {LONGEST_EVENT:,} bytes")

    def _event(self, data: bytes) -> dict[str, Any]:
        """The JSON object of an event. Raises ServerError if it is none, or tells of an error."""
        event = self._parsed(data.decode("utf-8", "replace"))
        if not isinstance(event, dict):
            raise ServerError(f"{self} sent an event that is no JSON object: {shown(self._hidden(str(event)))}")
        if event.get("error"):
            raise ServerError(f"{self} sent an error in the middle of an answer: {self._message(event)}")
        return event

    def _parsed(self, text: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ServerError(f"{self} sent what is no JSON: {shown(self._hidden(text))}") from error

    def _error_text(self, response: "httpx.Response") -> str:
        """What the body of an answer says, for a sentence: with ": " before it, or nothing."""
        with suppress(httpx.HTTPError):
            text = _beginning(response, LONGEST_EVENT).strip()
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

    def _told(self, error: BaseException, seconds: float | None) -> ServerError:
        """An error of the network, in words."""
        while not isinstance(error, OSError) and (cause := error.__cause__ or error.__context__):
            error = cause  # that of the socket
        if isinstance(error, TimeoutError):
            return ServerError(f"{self} sent nothing for {seconds:g} s")
        if isinstance(error, ConnectionRefusedError | socket.gaierror):
            return ServerError(f"nothing answers at {self} ({first_line(error)})")
        return ServerError(f"the connection to {self} broke ({type(error).__name__}: {first_line(error)})")


def _beginning(response: "httpx.Response", most: int) -> str:
    """The text of an answer, of `most` bytes at most: what comes after them is not read."""
    body = b""
    for read in response.iter_bytes():
        body += read
        if len(body) >= most:
            break
    return body[:most].decode("utf-8", "replace")
