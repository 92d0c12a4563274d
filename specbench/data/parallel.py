"""Sentences with their translations as prompts, as of WMT."""

from collections.abc import Iterator

from pydantic import Field

from specbench.data.files import TEXT, need_file, read_text
from specbench.data.prompts import Data, Prompt
from specbench.data.sources import place_of
from specbench.data.template import check_template, fill
from specbench.errors import ConfigError
from specbench.settings import BaseSettings


class ParallelData(Data):
    """Two aligned text files, a sentence a line: the line of `path` is the prompt, or the template with {source} and
    {reference} in it. A line that is blank in one of them is left out."""

    class Settings(BaseSettings):
        path: str = Field(description="a text file, one sentence a line")
        reference: str = Field(description="the text file whose lines belong to those of data.path")
        template: str | None
        limit: int | None = Field(ge=1)

        def check(self, prefix: str) -> None:
            for key in ("path", "reference"):
                need_file(place_of(getattr(self, key)), f"{prefix}{key}", TEXT)
            check_template(self.template, f"{prefix}template", ("source", "reference"))

    def prompts(self) -> Iterator[Prompt]:
        s = self.settings
        sources, references = lines_of(s.path, "data.path"), lines_of(s.reference, "data.reference")
        if len(sources) != len(references):
            raise ConfigError(
                f"data.reference={s.reference} has {len(references)} lines, and data.path={s.path} {len(sources)}: "
                "they must be aligned, line by line"
            )
        for number, pair in enumerate(zip(sources, references, strict=True), 1):
            if all(pair):
                fields = dict(zip(("source", "reference"), pair, strict=True))
                yield Prompt(str(number), (fill(s.template or "{source}", fields.__getitem__),))


def lines_of(path: str, key: str) -> list[str]:
    """The lines of a text file, stripped; only line feeds end one, as in the tools that made the files. Raises
    ConfigError."""
    return [line.strip() for line in read_text(place_of(path), key).removesuffix("\n").split("\n")]
