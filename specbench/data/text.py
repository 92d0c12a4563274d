"""Plain text as prompts: windows of text files, sentences with translations, and the same beginning each time."""

from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from specbench.data.files import TEXT, need_file, read_text
from specbench.data.prompts import Data, Prompt
from specbench.data.records import check_template, fill, label_of
from specbench.errors import ConfigError
from specbench.settings import BaseSettings, place_of

ENDINGS = (".txt", ".md", ".text")  # of the files that are read in a folder


class TextData(Data):
    """Windows of a text file, or of all text files in a folder: each of `window` characters. What is left at
    the end of a file, less than a window, is left out, unless it is the whole file."""

    class Settings(BaseSettings):
        path: str = Field(description="a text file in UTF-8, or a folder of them")
        window: int = Field(ge=1, le=10**7)
        limit: int | None = Field(ge=1)

        def check(self, prefix: str) -> None:
            if not Path(self.path).is_dir():
                need_file(self.path, f"{prefix}path", f"{TEXT}, or a folder of them")
            elif not self.files():
                raise ConfigError(f"{prefix}path={self.path} has no text files ({', '.join(ENDINGS)}): choose another")
            for path in self.files():
                label_of(path.name, f"the name of a file of {prefix}path={self.path}")

        def files(self) -> list[Path]:
            """The files, sorted by name."""
            folder = Path(self.path)
            if not folder.is_dir():
                return [folder]
            return sorted(path for path in folder.iterdir() if path.suffix in ENDINGS and path.is_file())

    def prompts(self) -> Iterator[Prompt]:
        s = self.settings
        files = s.files()
        for path in files:
            text = read_text(str(path), "data.path")
            for begin in range(0, max(1, len(text) - s.window + 1), s.window):
                part = text[begin : begin + s.window]
                if part.strip():
                    yield Prompt(f"{path.name}:{begin}", (part,), path.name if len(files) > 1 else "")


class ParallelData(Data):
    """Two aligned text files, a sentence a line, as of WMT: the line of `path` is the prompt, or the template with
    {source} and {reference} in it. A line that is blank in one of them is left out."""

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
    """The lines of a text file, stripped; only line feeds end one, as in the tools that made it. Raises ConfigError."""
    return [line.strip() for line in read_text(place_of(path), key).removesuffix("\n").split("\n")]


class UnconditionalData(Data):
    """`count` prompts of the text `start`, each with its own noise; None is the token with which texts begin."""

    class Settings(BaseSettings):
        start: str | None
        count: int = Field(ge=1, le=10**6)
        limit: int | None = Field(ge=1)

    def prompts(self) -> Iterator[Prompt]:
        s = self.settings
        return (Prompt(str(number), (s.start or "",)) for number in range(1, s.count + 1))
