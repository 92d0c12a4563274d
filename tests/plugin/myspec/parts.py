"""A drafter, a verifier, a data source, a metric and a logger, as a user would write them."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import Field
from torch import Tensor

from specbench.data.prompts import Data, Prompt
from specbench.drafters.lookup_base import PointMassDrafter
from specbench.results.loggers.base import Logger
from specbench.results.schema import RunResult
from specbench.settings import BaseSettings
from specbench.stats.metrics.base import Metric
from specbench.stats.metrics.base import Path as TakenPath
from specbench.stats.records import RunRecord
from specbench.verifiers.speculative import SpeculativeVerifier


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

    def __init__(self, texts: list[str]):
        self.texts = texts

    def prompts(self) -> Iterator[Prompt]:
        for number, text in enumerate(self.texts):
            yield Prompt(f"list {number}", (text,), "mine")


class FullRounds(Metric):
    """The share of rounds in which every guess was kept."""

    columns = ("full",)

    def of_round(self, path: TakenPath) -> Tensor:
        return (path.accepted == path.draft.count).double()[:, None]

    def of_run(self, requests: Sequence[Sequence[tuple[float, ...]]]) -> Mapping[str, float | None]:
        full = [numbers[0] for rounds in requests for numbers in rounds]
        return {"share": sum(full) / len(full) if full else None}


class OneLine(Logger):
    """Writes the speedup to a file."""

    def log(self, result: RunResult, record: RunRecord, out_dir: Path) -> None:
        (out_dir / "speedup.txt").write_text(f"{result.speedup.measured} over {len(record.results)} prompts\n")
