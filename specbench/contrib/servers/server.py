"""Servers with OpenAI's completions API as peers (`baseline=server`): other processes, maybe on other machines, which
are sent the same prompts over HTTP."""

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

from specbench.component import Selections
from specbench.contrib.servers.answer import Answer, AnswerAcceptance, read_answer
from specbench.contrib.servers.dialects import DIALECTS
from specbench.contrib.servers.endpoint import ServerError, split
from specbench.contrib.servers.lookup import AUTO, COMPLETIONS, SHORT, Server, find_server
from specbench.contrib.servers.numbers import Streamed, pooled_server, server_notes, server_numbers
from specbench.decoding.state import Job
from specbench.errors import ConfigError, shown
from specbench.models.context import Context
from specbench.models.language_model import LanguageModel
from specbench.peers.base import Peer, PeerOutput, Peers
from specbench.results.schema import ServerNumbers
from specbench.settings import BaseSettings, setting
from specbench.stats.records import Result

log = logging.getLogger(__name__)
PEER = "server"  # the name of the peer, or the beginning of several
NAME = re.compile(r"[a-z][a-z0-9_]{0,30}")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,60}")
LOOKS_LIKE_A_KEY = re.compile(r"sk[-_]|hf_")
ARRIVING = 0.1  # seconds, at most, from a failure until requests that have yet to arrive are given up
TRIED = 8  # new tokens of the first request, which is not counted


class ServerPeers(Peers):
    """The peer `server`, or `server_NAME` for each of several URLs."""

    runs_encoders = False

    @dataclass
    class Settings(BaseSettings):
        url: Any = setting(required="the URL of a server with OpenAI's completions API, as http://localhost:8000")
        model: str | None = setting()
        dialect: str = setting(choices=(AUTO, *DIALECTS))
        key_env: str | None = setting()
        timeout: float = setting(gt=0, le=86400)
        answer_timeout: float = setting(gt=0, le=86400)

        def check(self, prefix: str) -> None:
            for key, url in self.urls(prefix).items():
                split(key, url)
            name = self.key_env
            if name is not None and (not VARIABLE.fullmatch(name) or LOOKS_LIKE_A_KEY.match(name)):
                raise ConfigError(  # which does not repeat what may be a key
                    f"{prefix}key_env is not allowed as it is: it must be the name of an environment variable that "
                    "holds the key, and not the key, as OPENAI_API_KEY"
                )

        def urls(self, prefix: str = "baseline.") -> dict[str, Any]:
            """The URLs by key. Raises ConfigError."""
            if not isinstance(self.url, dict):
                return {f"{prefix}url": self.url}
            if not self.url or not all(isinstance(name, str) and NAME.fullmatch(name) for name in self.url):
                raise ConfigError(
                    f"{prefix}url={shown(self.url)} is not allowed: it must be a URL, or URLs by names of small "
                    "letters, digits and _, as {plain: http://localhost:8000, draft: http://localhost:8001}"
                )
            return {f"{prefix}url.{name}": url for name, url in self.url.items()}

        @cached_property
        def servers(self) -> dict[str, Server]:
            """The servers by key, each of which is asked once. Raises ConfigError."""
            return {key: find_server(key, url, self) for key, url in self.urls().items()}

    def __init__(self, peers: Mapping[str, "ServerPeer"]):
        self.peers = peers

    @classmethod
    def refuses(cls, settings: Any, run: Selections) -> str | None:
        if find_spec("httpx") is None:
            return "without httpx: install it with pip install 'speculative-decoding-bench[servers]'"
        if (penalty := run.scalars["repetition_penalty"]) != 1:
            return f"with repetition_penalty={penalty}, which servers understand in different ways: it must be 1"
        if run.workers > 1:
            return f"with workers={run.workers}, which would ask the server at the same time: choose workers=1"
        return None

    @classmethod
    def reach(cls, settings: Any) -> None:
        for server in settings.servers.values():
            log.info("%s speaks %s", server.endpoint, server.dialect.name)

    @classmethod
    def from_settings(
        cls, settings: Any, context: Context, target: LanguageModel, drafter: LanguageModel | None, gamma: int
    ) -> "ServerPeers":
        peers = {}
        for key, server in settings.servers.items():
            name = key.partition("url.")[2]
            if context.sampling.top_k and not server.dialect.takes_top_k:
                raise ConfigError(
                    f"top_k={context.sampling.top_k} is not possible with {key}={server.endpoint}, which has no such "
                    "field in its API: it must be 0"
                )
            peers[f"{PEER}_{name}" if name else PEER] = ServerPeer(server, target, context)
        return cls(peers)

    def by_name(self) -> Mapping[str, "ServerPeer"]:
        return self.peers

    @classmethod
    def pooled_numbers(cls, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return pooled_server(found)


class ServerPeer(Peer):
    """One server. A group of requests is sent so that `at_once` of them are under way, or each when it arrives, by the
    arrival times that the run's own decoders have, however many are under way then."""

    elsewhere = True

    def __init__(self, server: Server, target: LanguageModel, context: Context):
        self.server, self.target, self.context = server, target, context
        self.fields = standard_fields(server, target, context)
        self.at_once = 1  # requests under way, at most, where they arrive over time
        self.gone = ""  # why it is not asked any more
        self.warm = False

    def numbers(self, name: str, results: Sequence[Result], rows: int) -> ServerNumbers:
        stops = self.context.stop_strings if self.context.sampling.greedy else None
        return server_numbers(name, self.server, results, self.target.tokenizer, stops, max(rows, self.at_once))

    def notes(self, name: str) -> list[str]:
        return server_notes(name, self.server)

    def decode(self, job: Job) -> PeerOutput:
        [found] = self.decode_all([job])
        if isinstance(found, RuntimeError):
            raise found
        return found

    def decode_all(
        self, jobs: Sequence[Job], at_once: int = 1, arrivals: Sequence[float] | None = None
    ) -> list[PeerOutput | RuntimeError]:
        endpoint, dialect = self.server.endpoint, self.server.dialect
        endpoint.aborted = False
        if not self.gone:
            self._warm_up(jobs[0])
            dialect.open(endpoint)
        answer, begun = self._answer, time.perf_counter()
        if arrivals is not None:
            due = {id(job): begun + second for job, second in zip(jobs, arrivals, strict=True)}
            at_once = self.at_once = len(jobs)

            def answer(job: Job) -> Answer | ServerError:
                while (left := due[id(job)] - time.perf_counter()) > 0 and not endpoint.aborted:
                    time.sleep(min(left, ARRIVING))
                return self._answer(job)

        found = answers_in_parallel(answer, jobs, at_once, endpoint.abort)
        answers = [answer for answer in found if isinstance(answer, Answer)]
        counts = dialect.close(endpoint, answers) if answers else []
        spans = [(answer.sent + answer.pieces[0].seconds, answer.sent + answer.finished) for answer in answers]
        rows = zip(answers, counts, shares_of_time(spans), strict=True)
        outputs = iter([self._output(answer, own, share) for answer, own, share in rows])
        return [next(outputs) if isinstance(answer, Answer) else answer for answer in found]

    def _answer(self, job: Job) -> Answer | ServerError:
        """The answer to a request, or what went wrong with it."""
        try:
            if self.gone:
                raise ServerError(f"{self.gone}, so it is not asked any more")
            return self._checked(job)
        except ServerError as error:
            if not self.gone and not self.server.endpoint.aborted:
                self._look(error)
            return error

    def _checked(self, job: Job) -> Answer:
        """The answer to a request. Raises ServerError."""
        answer = self._asked(self._prompt(list(job.tokens)), job.limit - len(job.tokens), job.key)
        if answer.prompt_tokens not in (None, len(job.tokens)):
            raise ServerError(
                f"{self.server.endpoint} read {answer.prompt_tokens} tokens of a prompt that has {len(job.tokens)}: "
                "its tokenizer is another one, or it adds tokens of its own"
            )
        return answer

    def _asked(self, prompt: list[int] | str, limit: int, key: int) -> Answer:
        own = {"prompt": prompt, "max_tokens": limit, "seed": key % 2**31, **self.server.dialect.own_fields()}
        with closing(self.server.endpoint.stream(COMPLETIONS, self.fields | own)) as events:
            return read_answer(events, limit, self.target.vocab_size)

    def _warm_up(self, job: Job) -> None:
        """A first answer, which does not count, even if it fails: to the prompt backwards, which no cache of prefixes
        takes for the prompt, or to a short text, since a text backwards may have more tokens than the server takes."""
        if self.warm:
            return
        self.warm = True
        prompt: list[int] | str = list(job.tokens)[::-1] if self.server.dialect.takes_ids else SHORT
        try:
            self._asked(prompt, min(TRIED, job.limit - len(job.tokens)), job.key)
        except ServerError as error:
            log.info("the first answer, which does not count, failed: %s", error)

    def _prompt(self, tokens: list[int]) -> list[int] | str:
        """A prompt as the server takes it. Raises ServerError if it takes text, and no text has these tokens."""
        if self.server.dialect.takes_ids:
            return tokens
        tokenizer = self.target.tokenizer
        for begin in (0, 1) if tokens[0] == tokenizer.bos_token_id else (0,):  # what the tokenizer adds by itself
            text: str = tokenizer.decode(tokens[begin:], clean_up_tokenization_spaces=False)
            if list(tokenizer(text)["input_ids"]) == tokens:
                return text
        raise ServerError(f"{self.server.endpoint} takes prompts as text, and no text has the tokens of this prompt")

    def _look(self, error: ServerError) -> None:
        """After an error: a server that does not answer any more is not asked again, since each request would wait."""
        try:
            self.server.endpoint.get("/v1/models")
        except ServerError as again:
            if again.status is None:
                self.gone = f"{self.server.endpoint} stopped answering"
                log.warning("%s: %s", self.gone, error)

    def _output(self, answer: Answer, counts: AnswerAcceptance, seconds: float) -> PeerOutput:
        timings, last = answer.timings, answer.pieces[-1].seconds
        own = timings.predicted_ms
        arrivals, first = tuple(piece.seconds for piece in self.server.dialect.rounds(answer.pieces)), answer.first
        if 2 * sum(before == after for before, after in pairwise(arrivals)) > len(arrivals) - 1:
            arrivals, first = arrivals[:1], answer.tokens  # kept on the way, so their moments are not the server's
        told = (None, None) if own is None else (answer.tokens - 1, own / 1e3)
        streamed = Streamed(answer.text, arrivals, last, answer.finished, counts, *told)
        return PeerOutput(answer.ids, answer.tokens - first, seconds, first, streamed)


def standard_fields(server: Server, target: LanguageModel, context: Context) -> dict[str, Any]:
    """The fields of all requests to a server."""
    sampling = context.sampling
    found = {"model": server.model, "temperature": sampling.temperature, "top_p": sampling.top_p, "stream": True}
    if context.stop_strings:
        found["stop"] = list(context.stop_strings)
    return found | server.dialect.fields(sampling, target.stop_tokens)


def answers_in_parallel(
    answer: Callable[[Job], Any], jobs: Sequence[Job], at_once: int, abort: Callable[[], None]
) -> list[Any]:
    """The answers to all jobs, `at_once` of which are under way. An error that is raised, or a signal, ends them."""
    if at_once == 1 or len(jobs) == 1:
        return [answer(job) for job in jobs]
    with ThreadPoolExecutor(at_once) as pool:
        try:
            return [future.result() for future in [pool.submit(answer, job) for job in jobs]]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            abort()
            raise


def shares_of_time(spans: Sequence[tuple[float, float]]) -> list[float]:
    """Of each span of seconds, its share: every moment is divided evenly among the spans that hold it, so that the
    shares of spans that overlap add up to the time that passed."""
    moments = sorted({moment for span in spans for moment in span})
    shares = [0.0] * len(spans)
    for begin, end in pairwise(moments):
        holding = [number for number, (first, last) in enumerate(spans) if first <= begin and end <= last]
        for number in holding:
            shares[number] += (end - begin) / len(holding)
    return shares
