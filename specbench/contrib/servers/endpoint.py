"""An HTTP endpoint, asked with httpx: JSON and text by GET, and answers that come as server-sent events."""

import re
import socket
import ssl
import threading
import time
from codecs import BOM_UTF8
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any
from urllib.parse import SplitResult, urlsplit

from pydantic_core import from_json

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
LOOK_SECONDS = 5.0  # for what a server answers without computing, and for what it still sends after an answer
MOST_AFTER = 16  # events after the last token
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
    late: float | None = None  # the seconds after which it was ended, since they had passed
    finished: bool = False  # whether the answer has its last token

    def end(self) -> None:
        """Ends the connection, if it is made."""
        with suppress(OSError):
            if self.connection is not None:
                self.connection.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Inside, the exchange is ended when the seconds have passed, whatever still arrives."""

        def end() -> None:
            self.late = seconds
            self.end()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


@dataclass
class Endpoint:
    """A server's address and the key that it asks for. Every request has a connection of its own; several threads may
    call at once."""

    url: SplitResult
    timeout: float  # seconds without data
    key: str | None = field(default=None, repr=False)
    longest: float = 3600.0  # seconds of a whole answer, from its headers on
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
        exchange, seconds = Exchange(), min(self.timeout, LOOK_SECONDS)
        with exchange.within(LOOK_SECONDS), self._answered("GET", path, seconds, exchange) as response:
            text, exchange.finished = _beginning(response, LONGEST_BODY), True
        return text

    def get_json(self, path: str) -> Any:
        """The JSON at a path. Raises ServerError."""
        return self._parsed(self.get(path))

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[tuple[float, dict[str, Any]], None, None]:
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
                    with exchange.within(LOOK_SECONDS):
                        told = self._error_text(response)
                    raise ServerError(f"{self} answers with {shown(kind)} where a stream of events was asked for{told}")
                with exchange.within(self.longest), ExitStack() as after:
                    left = MOST_AFTER
                    for now, data in self._events(response, exchange):
                        if data == b"[DONE]" or not left:
                            break
                        yield now, (event := self._event(data))
                        left -= exchange.finished
                        if not exchange.finished and _ends(event):
                            exchange.finished = True
                            after.enter_context(exchange.within(LOOK_SECONDS))
            yield time.perf_counter(), {}
        finally:
            self._open.remove(exchange)

    def abort(self) -> None:
        """Ends all answers that are still coming, and those whose connection is still being made; those who read them
        get a ServerError. So do all others until `aborted` is false again."""
        self.aborted = True
        for exchange in [*self._open]:
            exchange.end()

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
            with ExitStack() as stack:
                with exchange.within(seconds + CONNECT_SECONDS):  # headers may drip too
                    call = self.client.stream(method, address, json=body, timeout=waits, extensions=hooks)
                    response = stack.enter_context(call)
                if response.status_code != 200:
                    with exchange.within(LOOK_SECONDS):
                        told = self._error_text(response)
                    reason = f"{response.status_code} {shown(response.reason_phrase)}"
                    raise ServerError(f"{self}{path} answers {reason}{told}", response.status_code)
                yield response
                if exchange.late is not None and not exchange.finished:
                    raise ServerError(f"{self} did not end its answer within {exchange.late:g} s")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            if exchange.finished:  # what was waited for is not needed
                return
            if exchange.late is not None:
                raise ServerError(f"{self} did not end its answer within {exchange.late:g} s") from error
            raise self._told(error, waits.connect if isinstance(error, httpx.ConnectTimeout) else seconds) from error

    def _events(self, response: "httpx.Response", exchange: Exchange) -> Iterator[tuple[float, bytes]]:
        """The data of server-sent events, each with the moment when it came: its lines of data, joined. Other fields
        and comments, which keep a connection alive, are left out. Raises ServerError, also if no data comes within the
        timeout, or more bytes than an answer has."""
        heard, rest = time.monotonic(), b""
        with suppress(httpx.RemoteProtocolError):  # the server has ended the connection
            for read in chain(response.iter_raw(), [b"\n\n"]):
                now = time.perf_counter()
                if response.num_bytes_downloaded > LONGEST_BODY:
                    raise ServerError(f"{self} sent an answer of more than {LONGEST_BODY:,} bytes")
                *events, rest = EVENT_END.split(rest + read)
                for event in events:
                    lines = [line.partition(b":") for line in LINE_END.split(event.removeprefix(BOM_UTF8))]
                    if data := b"\n".join(value.strip() for name, _, value in lines if name == b"data").strip():
                        heard = time.monotonic()
                        yield now, data
                if time.monotonic() - heard > self.timeout and not exchange.finished:
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
            return from_json(text, allow_inf_nan=False)
        except ValueError as error:
            raise ServerError(f"{self} sent what is no JSON: {shown(self._hidden(text))}") from error

    def _error_text(self, response: "httpx.Response") -> str:
        """What the body of an answer says, for a sentence: with ": " before it, or nothing."""
        with suppress(httpx.HTTPError):
            text = _beginning(response, LONGEST_EVENT).strip()
            with suppress(ValueError):
                text = self._message(from_json(text))
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


def _ends(event: Mapping[str, Any]) -> bool:
    """Whether an event says why the answer ends; what may follow is its counts."""
    choices = event.get("choices")
    return isinstance(choices, list) and any(isinstance(c, dict) and c.get("finish_reason") for c in choices)
