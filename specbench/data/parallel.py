"""Sentences with their translations as prompts, as of WMT."""

from collections.abc import Iterator

from pydantic import Field

from specbench.data.json_lines import need_file
from specbench.data.prompts import Prompt, StoredData
from specbench.data.sources import place_of
from specbench.data.template import check_template, fill
from specbench.data.text_file import TEXT, read_text
from specbench.errors import ConfigError, shown
from specbench.settings import BaseSettings


class ParallelData(StoredData):
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
            check_template(self.template, f"{prefix}template")

    def prompts(self) -> Iterator[Prompt]:
        s = self.settings
        sources, references = lines_of(s.path, "data.path"), lines_of(s.reference, "data.reference")
        if len(sources) != len(references):
            raise ConfigError(
                f"data.reference={s.reference} has {len(references)} lines, and data.path={s.path} {len(sources)}: "
                "they must be aligned, line by line"
            )
        for number, (source, reference) in enumerate(zip(sources, references, strict=True), 1):
            if source and reference:
                yield Prompt(str(number), (filled(s.template or "{source}", source, reference),))


def lines_of(path: str, key: str) -> list[str]:
    """The lines of a text file, stripped; only line feeds end one, as in the tools that made the files. Raises
    ConfigError."""
    return [line.strip() for line in read_text(place_of(path), key).removesuffix("\n").split("\n")]


def filled(template: str, source: str, reference: str) -> str:
    """The prompt of two aligned lines. Raises ConfigError for a field that they have not."""
    try:
        return fill(template, {"source": source, "reference": reference}.__getitem__)
    except KeyError as error:
        name = shown(error.args[0])
        raise ConfigError(f"data.template has {{{name}}}: it must be {{source}} or {{reference}}") from error
