"""What servers of the completions API have of their own: how they take prompts and sampling, and what they tell of
their speculative decoding."""

import json
import time
from abc import ABC
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar
from uuid import uuid4

from specbench.contrib.servers.answer import Answer, AnswerAcceptance, AnswerPiece
from specbench.contrib.servers.endpoint import Endpoint, ServerError
from specbench.contrib.servers.per_request import answer_acceptance, by_place
from specbench.contrib.servers.vllm_counters import NEW_TOKENS, Metrics, metrics_of, vllm_acceptance
from specbench.decoding.sampling import Sampling
from specbench.settings import LARGEST_GAMMA

NOT_TOLD = "the server tells nothing of speculative decoding"
ONLY_A_MEAN = "the server tells only the mean tokens a round of all requests since it was started"
SETTLED = 2.0  # seconds within which vLLM's counters have all tokens of an answer that has ended


class Dialect(ABC):
    """A kind of server. One object goes with one endpoint."""

    name: ClassVar[str]
    takes_ids: ClassVar[bool] = False  # whether a prompt may be token ids
    takes_top_k: ClassVar[bool] = True
    lists_models: ClassVar[bool] = True  # whether it lists all models that it serves
    keeps_prefixes: ClassVar[bool] = True  # whether it may have read a prompt's beginning before, or in an earlier run
    owner: ClassVar[str] = ""  # of the models that it lists
    version_at: ClassVar[tuple[str, str]] = ("", "")  # the path that tells its version, and the field there
    law: ClassVar[str] = ""  # with what probability it accepts a guess above temperature 0, by default

    @classmethod
    def version(cls, endpoint: Endpoint, model: Mapping[str, Any]) -> str | None:
        """The version of a server that speaks this dialect and lists this model. Raises ServerError if it is another
        kind of server."""
        if model.get("owned_by") != cls.owner:
            raise ServerError(f"{endpoint} is not {cls.name}")
        return text_at(endpoint, *cls.version_at)

    def fields(self, sampling: Sampling, stop_tokens: Sequence[int]) -> dict[str, Any]:
        """What a request has besides what all servers take."""
        return {"stream_options": {"include_usage": True}}

    def own_fields(self) -> dict[str, Any]:
        """What one request has that no other one has."""
        return {}

    def open(self, endpoint: Endpoint) -> None:
        """Called before a group of requests is sent."""

    def close(self, endpoint: Endpoint, answers: Sequence[Answer]) -> list[AnswerAcceptance]:
        """Called after it: what is known of each answer's rounds."""
        return [AnswerAcceptance(no_alpha=NOT_TOLD, no_block_efficiency=NOT_TOLD)] * len(answers)

    def rounds(self, pieces: Sequence[AnswerPiece]) -> list[AnswerPiece]:
        """The first piece of each round, as far as rounds are known."""
        return list(pieces)


def text_at(endpoint: Endpoint, path: str, name: str) -> str | None:
    """A text that a server tells of itself at a path, if it does."""
    try:
        found = endpoint.get_json(path).get(name)
    except (ServerError, AttributeError):
        return None
    return found if isinstance(found, str) and found else None


class OpenAI(Dialect):
    """A server of which no more is known than the API."""

    name = "openai"
    takes_top_k = False

    @classmethod
    def version(cls, endpoint: Endpoint, model: Mapping[str, Any]) -> str | None:
        return None


class Transformers(Dialect):
    """`transformers serve`. It takes text alone, and sampling as a generation_config; it lists the models of its cache,
    and serves others too."""

    name = "transformers"
    lists_models = False

    @classmethod
    def version(cls, endpoint: Endpoint, model: Mapping[str, Any]) -> str | None:
        paths = endpoint.get_json("/openapi.json").get("paths", {})
        if not {"/load_model", "/v1/completions"} <= set(paths):
            raise ServerError(f"{endpoint} is not {cls.name}")
        return None

    def fields(self, sampling: Sampling, stop_tokens: Sequence[int]) -> dict[str, Any]:
        found: dict[str, Any] = {"do_sample": not sampling.greedy, "repetition_penalty": 1.0}
        if not sampling.greedy:
            found |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        found |= {"eos_token_id": list(stop_tokens) or None, "pad_token_id": [*stop_tokens, 0][0]}
        return {"generation_config": json.dumps(found)}


class LlamaCpp(Dialect):
    """llama.cpp's `llama-server`. With `timings_per_token` every piece has counts of guesses, which show the rounds."""

    name = "llama_cpp"
    takes_ids = True
    keeps_prefixes = False
    owner, version_at = "llamacpp", ("/props", "build_info")
    law = "p(x): the token drawn from p has to be the guess x"

    def fields(self, sampling: Sampling, stop_tokens: Sequence[int]) -> dict[str, Any]:
        """Its samplers in transformers' order; its own has temperature last."""
        samplers: dict[str, Any] = {"samplers": ["top_k"], "top_k": 1}
        if not sampling.greedy:
            samplers = {"samplers": ["temperature", "top_k", "top_p"], "top_k": sampling.top_k}
        return {
            **super().fields(sampling, stop_tokens),
            **samplers,
            "repeat_penalty": 1.0,
            "ignore_eos": not stop_tokens,
            "cache_prompt": False,
            "timings_per_token": True,
        }

    def close(self, endpoint: Endpoint, answers: Sequence[Answer]) -> list[AnswerAcceptance]:
        return [llama_acceptance(answer) for answer in answers]

    def rounds(self, pieces: Sequence[AnswerPiece]) -> list[AnswerPiece]:
        """Tokens of one round come as pieces of their own, one right after the other."""
        found, end = [], 0
        for before, piece in pairwise([AnswerPiece(0.0, "", 0), *pieces]):
            if piece.tokens is None:
                return list(pieces)
            if before.drafted < piece.drafted or piece.tokens > end:
                kept = piece.accepted - before.accepted if before.drafted < piece.drafted else 0
                found.append(piece)
                end = piece.tokens + kept
        return found


def fields_of_engines(sampling: Sampling, stop_tokens: Sequence[int]) -> dict[str, Any]:
    """The fields that vLLM and SGLang share."""
    return {
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": list(stop_tokens),
        "ignore_eos": not stop_tokens,
    }


def llama_acceptance(answer: Answer) -> AnswerAcceptance:
    """Counts over the rounds of an answer of llama.cpp. Each of its tokens is an event with the counts of guesses so
    far: a round begins where they grow. If an event has several tokens, since a character takes several, rounds can
    hide in it."""
    drafted, accepted = answer.timings.draft_n, answer.timings.draft_n_accepted
    known: dict[str, Any] = {"drafted": drafted, "accepted": accepted}
    if not drafted:
        return AnswerAcceptance(answer.tokens - answer.first, answer.tokens - answer.first, 0, 0, 0)
    if any(piece.tokens is None for piece in answer.pieces):
        why = "the server counts guesses only at the end of an answer, and not how many of them were tested"
        return AnswerAcceptance(**known, no_alpha=why, no_block_efficiency=why)
    rounds = tested = end = 0
    pairs = []
    hidden = answer.pieces[0].drafted > 0
    for before, piece in pairwise(answer.pieces):
        guesses, kept = piece.drafted - before.drafted, piece.accepted - before.accepted
        beyond = (piece.tokens or 0) - max(end, before.tokens or 0)  # tokens of rounds that begin with this piece
        hidden |= (guesses > 0 and beyond != 1) or guesses > LARGEST_GAMMA
        if guesses:
            pairs.append((kept, guesses))
            rounds, tested, end = rounds + 1, tested + kept + (kept < guesses), (piece.tokens or 0) + kept
        else:
            rounds += max(0, beyond)
    if hidden:
        why = "characters of several tokens hide where some rounds began"
        return AnswerAcceptance(**known, no_alpha=why, no_block_efficiency=why)
    return AnswerAcceptance(rounds, answer.tokens - answer.first, drafted, accepted, tested, by_place=by_place(pairs))


class SGLang(Dialect):
    """SGLang, which newer versions tell the counts of each answer's rounds. The mean number of tokens a round that
    others tell is of all requests since the start: of other clients, other temperatures and earlier runs."""

    name = "sglang"
    takes_ids = True
    owner, version_at = "sglang", ("/get_server_info", "version")
    law = "p(x) of the guess x, unless it was started with rejection sampling, as sum min(p, q)"

    @classmethod
    def version(cls, endpoint: Endpoint, model: Mapping[str, Any]) -> str | None:
        return super().version(endpoint, model) or text_at(endpoint, "/server_info", "version")

    def fields(self, sampling: Sampling, stop_tokens: Sequence[int]) -> dict[str, Any]:
        return fields_of_engines(sampling, stop_tokens) | {"return_spec_tokens_details": True}

    def close(self, endpoint: Endpoint, answers: Sequence[Answer]) -> list[AnswerAcceptance]:
        nothing = AnswerAcceptance(no_alpha=ONLY_A_MEAN, no_block_efficiency=ONLY_A_MEAN)
        return [answer_acceptance(answer) or nothing for answer in answers]


class VLLM(Dialect):
    """vLLM, whose counters at /metrics are of all its requests together. Started with
    `--per-request-spec-decode-metrics`, it tells those of each answer."""

    name = "vllm"
    takes_ids = True
    keeps_prefixes = False
    owner, version_at = "vllm", ("/version", "version")
    law = "p(x) of the drafter's likeliest token x, unless it was started with drawn drafts, as sum min(p, q)"

    def __init__(self) -> None:
        self.before: Metrics | str = NOT_TOLD

    def fields(self, sampling: Sampling, stop_tokens: Sequence[int]) -> dict[str, Any]:
        return fields_of_engines(sampling, stop_tokens) | {"return_token_ids": True}

    def own_fields(self) -> dict[str, Any]:
        """A salt, so that no prompt, nor the beginning of one, is found in the cache of prefixes."""
        return {"cache_salt": uuid4().hex}

    def open(self, endpoint: Endpoint) -> None:
        self.before = metrics_of(endpoint)

    def close(self, endpoint: Endpoint, answers: Sequence[Answer]) -> list[AnswerAcceptance]:
        """Each answer's own, if all have them; or those of the whole group, with its first answer."""
        own = [found for answer in answers if (found := answer_acceptance(answer)) is not None]
        if len(own) == len(answers):
            return own
        tokens = sum(answer.tokens for answer in answers)
        rest = [AnswerAcceptance()] * (len(answers) - 1)
        if isinstance(self.before, str):
            return [AnswerAcceptance(no_alpha=self.before, no_block_efficiency=self.before), *rest]
        end = time.monotonic() + SETTLED
        while True:
            after = metrics_of(endpoint)
            if isinstance(after, str):
                return [AnswerAcceptance(no_alpha=after, no_block_efficiency=after), *rest]
            grown = {name: value - self.before.get(name, 0.0) for name, value in after.items()}
            if grown.get(NEW_TOKENS) == tokens or time.monotonic() > end:
                return [vllm_acceptance(grown, answers), *rest]
            time.sleep(0.02)


DIALECTS: dict[str, type[Dialect]] = {kind.name: kind for kind in (VLLM, SGLang, LlamaCpp, Transformers, OpenAI)}
