"""Plain text as prompts: windows of text files."""

from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from specbench.data.files import TEXT, need_file, read_text
from specbench.data.prompts import Data, Prompt
from specbench.data.records import label_of
from specbench.errors import ConfigError
from specbench.settings import BaseSettings

ENDINGS = (".txt", ".md", ".text")  # of the files that are read in a folder


class TextData(Data):
    """Windows of a text file, or of all text files in a folder: each of `window` characters, `stride` after the one
    before. What is left at the end of a file, less than a window, is left out, unless it is the whole file."""

    class Settings(BaseSettings):
        path: str = Field(description="a text file in UTF-8, or a folder of them")
        window: int = Field(ge=1, le=10**7)
        stride: int | None = Field(ge=1, le=10**7)
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
            for begin, end in windows(len(text), s.window, s.stride or s.window):
                part = text[begin:end]
                if part.strip():
                    yield Prompt(f"{path.name}:{begin}", (part,), path.name if len(files) > 1 else "")


def windows(length: int, window: int, stride: int) -> list[tuple[int, int]]:
    """(begin, end) of the whole windows in a text of this length; the text itself if it is shorter than one."""
    if length <= window:
        return [(0, length)]
    return [(begin, begin + window) for begin in range(0, length - window + 1, stride)]
