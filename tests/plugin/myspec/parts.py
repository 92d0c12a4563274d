"""A drafter, a verifier, a data source and a logger, as a user would write them."""

from collections.abc import Iterator, Sequence

from pydantic import Field

from specbench.data.prompts import Data, Prompt
from specbench.drafters.lookup_base import PointMassDrafter
from specbench.report.files import Logger, Run
from specbench.settings import BaseSettings
from specbench.verifiers.base import SpeculativeVerifier


class EchoDrafter(PointMassDrafter):
    """Guesses that the text of `back` tokens ago repeats."""

    class Settings(BaseSettings):
        back: int = Field(ge=1)

    def __init__(self, back: int):
        self.back = back

    def guess(self, row: int, tokens: Sequence[int], gamma: int) -> list[int]:
        text = list(tokens)
        for _ in range(gamma):
            text.append(text[-min(self.back, len(text))])
        return text[len(tokens) :]


class OwnVerifier(SpeculativeVerifier):
    """Algorithm 1's rule, with a note for the reader."""

    note = "verified by a rule of the user's own"


class ListData(Data):
    """Prompts that stand in the configuration."""

    class Settings(BaseSettings):
        texts: list[str]
        limit: int | None = None

    def prompts(self) -> Iterator[Prompt]:
        for number, text in enumerate(self.settings.texts):
            yield Prompt(f"list {number}", (text,), "mine")


class OneLine(Logger):
    """Writes the speedup to a file."""

    def finish(self, run: Run) -> None:
        measured = run.results["speedup"]["measured"]
        (run.folder / "speedup.txt").write_text(f"{measured} over {len(run.records)} prompts\n")
