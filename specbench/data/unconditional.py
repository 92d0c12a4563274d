"""Prompts for a model that writes from nothing: the same beginning each time, as in the paper's unconditional rows."""

from collections.abc import Iterator

from pydantic import Field

from specbench.data.prompts import Data, Prompt
from specbench.settings import BaseSettings


class UnconditionalData(Data):
    """`count` prompts of the text `start`, each with its own noise. A start of None is the token with which the
    tokenizer's texts begin."""

    class Settings(BaseSettings):
        start: str | None
        count: int = Field(ge=1, le=10**6)
        limit: int | None = Field(ge=1)

    def prompts(self) -> Iterator[Prompt]:
        s = self.settings
        return (Prompt(str(number), (s.start or "",)) for number in range(1, s.count + 1))
