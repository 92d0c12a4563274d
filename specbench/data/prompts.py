"""Base class of data sources, and the way from a prompt to tokens."""

import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from specbench.decoding.sequence import EncoderInput
from specbench.errors import ConfigError, shown
from specbench.settings import Component

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """A question of one or more turns. A later turn is asked after the answers to the turns before it."""

    id: str
    turns: tuple[str, ...]
    category: str = ""
    before: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)  # messages of a chat, with role and content
    tools: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)  # that the model may call

    def request_id(self, turn: int) -> str:
        """The id of the request of a turn, counted from 0: the prompt's own, with the turn if there are several."""
        return self.id if len(self.turns) == 1 else f"{self.id}/{turn + 1}"


@dataclass(frozen=True)
class Request:
    """One turn of a prompt, ready to decode."""

    id: str
    prompt_id: str
    text: str
    tokens: Sequence[int]  # the prompt in the decoder's text
    category: str
    turn: int = 0  # of the prompt
    encoder_input: EncoderInput | None = None  # if the target has an encoder

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the prompt, whichever side of a model reads it."""
        return len(self.tokens if self.encoder_input is None else self.encoder_input)


class Data(Component, ABC):
    """A source of prompts, which is read as its settings say. They have `limit`, the largest number of prompts to take,
    None for all: the first ones or, if the source is `stratified`, as many of each category."""

    stratified: ClassVar[bool] = False

    def __init__(self, settings: Any):
        self.settings, self.limit = settings, settings.limit

    @classmethod
    def from_settings(cls, settings: Any) -> Self:
        return cls(settings)

    @abstractmethod
    def prompts(self) -> Iterator[Prompt]:
        """The prompts, in a fixed order. Raises ConfigError if the source cannot be read."""


def load(data: Data) -> list[Prompt]:
    """The prompts that `data.limit` leaves. Raises ConfigError without any, or if turns share an id, and so noise."""
    found: list[Prompt] = []
    known: set[str] = set()
    for prompt in data.prompts():
        if data.limit is not None and len(found) == data.limit and not data.stratified:
            break
        names = {prompt.id, *map(prompt.request_id, range(len(prompt.turns)))}
        if names & known:
            twice = shown(min(names & known))
            raise ConfigError(f"data has two prompts, or turns, with the id {twice}: each must have its own")
        known |= names
        found.append(prompt)
    if not found:
        raise ConfigError("data has no prompts: the source is empty, or no record passes its filter")
    if data.limit is None:
        return found
    if len(found) < data.limit:
        log.warning("data has %d prompts, fewer than data.limit=%d: all of them are used", len(found), data.limit)
    return stratify(found, data.limit) if data.stratified else found


def content_hash(prompts: Sequence[Prompt]) -> str:
    """A hash of the prompts before a template or a tokenizer reads them: equal if they are, in whatever order."""
    known = sorted(json.dumps(vars(prompt), sort_keys=True, default=str) for prompt in prompts)
    return hashlib.sha256("\n".join(known).encode()).hexdigest()


def stratify(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    """At most `limit` prompts, in their order: the first of each category, then the second of each, and so on."""
    count: Counter[str] = Counter()  # by category
    ranks = []  # of each prompt in its own category
    for prompt in prompts:
        ranks.append(count[prompt.category])
        count[prompt.category] += 1
    chosen = sorted(range(len(prompts)), key=ranks.__getitem__)[:limit]
    return [prompts[i] for i in sorted(chosen)]


def render(prompt: Prompt, answers: Sequence[str], tokenizer: Any, chat: bool) -> Request:
    """The turn after these answers as text and tokens, with `chat` through the chat template. Raises ConfigError."""
    turn = len(answers)
    if chat:
        from specbench.data.chat import chat_text

        text = chat_text(prompt, answers, tokenizer)
    elif prompt.before or prompt.tools:
        raise ConfigError(
            f"prompt {prompt.id} has a system message, an earlier message or tools, which only a chat template places: "
            "give a target whose tokenizer has one, and target.chat_template=auto"
        )
    else:
        parts = [part for pair in zip(prompt.turns, answers, strict=False) for part in pair]
        text = "\n\n".join([*parts, prompt.turns[turn]])
    try:
        tokens = tokenizer(text, add_special_tokens=not chat, verbose=False)["input_ids"]
    except Exception as error:  # of a tokenizer's own code
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ConfigError(
            f"target.path is not possible with prompt {prompt.id}, which its tokenizer refuses ({reason}): give a "
            "model with another one"
        ) from error
    if not tokens and tokenizer.bos_token_id is not None:
        tokens = [tokenizer.bos_token_id]
    return Request(prompt.request_id(turn), prompt.id, text, tokens, prompt.category, turn)


def notes_on_prompts(requests: Sequence[Request], tokenizer: Any, chat: bool) -> list[str]:
    """Sentences on prompts of a model without an encoder that a reader of the numbers must know."""
    notes = []
    if chat:
        from specbench.data.chat import clock_note

        notes += clock_note(tokenizer)
    ended = sum(tokenizer.eos_token_id in request.tokens[-1:] for request in requests)
    if tokenizer.eos_token_id is not None and ended:
        notes.append(f"{ended} of {len(requests)} prompts end with {tokenizer.eos_token}, the token that ends a text")
    return notes
