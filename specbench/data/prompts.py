"""What a data source yields, and how it becomes tokens."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specbench.component import Component
from specbench.settings import ConfigError


@dataclass(frozen=True)
class Prompt:
    """One question. A later turn is asked after the answers to the turns before it."""

    id: str
    turns: tuple[str, ...]
    category: str = ""


@dataclass(frozen=True)
class Request:
    """A prompt's turn, ready to decode."""

    id: str
    text: str
    tokens: list[int]  # what the decoder's text begins with
    category: str
    encoder_tokens: list[int] | None = None  # what an encoder reads, where the target has one


class Data(Component, ABC):
    """A source of prompts; `limit` is the number of prompts to take, None for all."""

    limit: int | None = None

    @classmethod
    def from_settings(cls, settings: Any) -> "Data":
        """By default the settings are the constructor's arguments. Raises ConfigError."""
        return cls(**vars(settings))

    @abstractmethod
    def prompts(self) -> Iterator[Prompt]:
        """Prompts in a fixed order. Raises ConfigError where the source can't be read."""


def load(data: Data) -> list[Prompt]:
    """The first `data.limit` prompts. Their ids seed their noise, so each must be its own."""
    prompts: dict[str, Prompt] = {}
    for prompt in data.prompts():
        if data.limit is not None and len(prompts) == data.limit:
            break
        if prompt.id in prompts:
            raise ConfigError(f"data has two prompts with the id {prompt.id}: each must have its own")
        prompts[prompt.id] = prompt
    if not prompts:
        raise ConfigError("data has no prompts: the source is empty, or no record passes its filter")
    return list(prompts.values())


def render(prompt: Prompt, answers: Sequence[str], tokenizer: Any, chat: bool) -> Request:
    """The turn that follows the given answers, as text and tokens."""
    turn = len(answers)
    if chat:
        messages: list[dict[str, str]] = []
        for question, answer in zip(prompt.turns, answers, strict=False):
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        messages.append({"role": "user", "content": prompt.turns[turn]})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        parts = [part for pair in zip(prompt.turns, answers, strict=False) for part in pair]
        text = "\n\n".join([*parts, prompt.turns[turn]])
        tokens = tokenizer(text)["input_ids"]
    if not tokens and tokenizer.bos_token_id is not None:
        tokens = [tokenizer.bos_token_id]
    name = prompt.id if len(prompt.turns) == 1 else f"{prompt.id}/{turn + 1}"
    return Request(name, text, tokens, prompt.category)
