"""Plain text as prompts: windows of text files."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from specbench.data.json_lines import need_file
from specbench.data.prompts import Prompt, StoredData
from specbench.data.records import label_of
from specbench.data.sources import of_folder, place_of
from specbench.data.text_file import TEXT, read_text
from specbench.errors import ConfigError, first_line, shown
from specbench.settings import BaseSettings, file_hash

ENDINGS = (".txt", ".md", ".text")  # of the files that are read in a folder


class TextData(StoredData):
    """Windows of a text file, or of all text files in a folder: each of `window` characters or tokens, `stride` after
    the one before. What is left at the end of a file, less than a window, is left out, unless it is the whole file."""

    class Settings(BaseSettings):
        path: str = Field(description="a text file in UTF-8, or a folder of them")
        window: int = Field(ge=1, le=10**7)
        stride: int | None = Field(ge=1, le=10**7)
        unit: Literal["characters", "tokens"]
        tokenizer: str
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

        def sources(self) -> Mapping[str, str]:
            folder = Path(self.path)
            return {"path": of_folder(folder) if folder.is_dir() else file_hash(folder)}

    def prompts(self) -> Iterator[Prompt]:
        s = self.settings
        files = s.files()
        for path in files:
            text = read_text(str(path), "data.path")
            places = [*range(len(text) + 1)] if s.unit == "characters" else [0, *token_ends(text, s.tokenizer)]
            for begin, end in windows(len(places) - 1, s.window, s.stride or s.window):
                part = text[places[begin] : places[end]]
                if part.strip():
                    yield Prompt(f"{path.name}:{begin}", (part,), path.name if len(files) > 1 else "")


def token_ends(text: str, name: str) -> list[int]:
    """Where tokens of the model `name` end in the text. Raises ConfigError."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(place_of(name))
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return [end for _, end in found["offset_mapping"]]
    except Exception as error:  # of any tokenizer
        raise ConfigError(
            f"data.tokenizer={shown(name)} is not possible ({first_line(error)}): give a model with a fast tokenizer, "
            "or use data.unit=characters"
        ) from error


def windows(length: int, window: int, stride: int) -> list[tuple[int, int]]:
    """(begin, end) of the whole windows in a text of this length; the text itself if it is shorter than one."""
    if length <= window:
        return [(0, length)]
    return [(begin, begin + window) for begin in range(0, length - window + 1, stride)]
