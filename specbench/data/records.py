"""Prompts from records: local JSON lines, question files (Spec-Bench, MT-bench), and data sets of the hub."""

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.data.prompts import Data, Prompt
from specbench.identity import of_file, of_folder, of_hub
from specbench.settings import BaseSettings, ConfigError, setting


def need_file(path: str, prefix: str) -> None:
    """Raises ConfigError if the data file is missing or empty."""
    if not Path(path).is_file():
        raise ConfigError(f"{prefix}path={path} is not a file: it must be a file of JSON lines (.jsonl or .jsonl.gz)")
    if Path(path).stat().st_size == 0:
        raise ConfigError(f"{prefix}path={path} is empty: it must hold one JSON object per line")


def read_json_lines(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number, object) for each line that is not blank. Raises ConfigError if one is no JSON object."""
    opener = gzip.open if path.endswith(".gz") else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(
                    f"data.path={path} line {number} is not JSON ({error.msg} at column {error.colno}): "
                    "it must hold one JSON object per line"
                ) from error
            if not isinstance(record, dict):
                raise ConfigError(f"data.path={path} line {number} is not a JSON object: it must be one per line")
            yield number, record


@dataclass
class RecordSettings(BaseSettings):
    """Where the records are, and how one becomes a prompt."""

    path: str = setting(required="a file of JSON lines, or for data=hub the id of a data set")
    field: str = setting()
    template: str | None = setting()
    category_field: str | None = setting()
    limit: int | None = setting(ge=1)


def to_prompt(number: int, record: dict[str, Any], s: RecordSettings) -> Prompt:
    """The prompt of a record: its field, or the template filled with its fields. Raises ConfigError if a field is
    missing."""
    try:
        text = str(record[s.field]) if s.template is None else s.template.format(**record)
    except (KeyError, IndexError) as error:
        missing = s.field if s.template is None else error.args[0]
        raise ConfigError(
            f"data.path={s.path} record {number} has no field {missing!r}: set data.field or data.template to what "
            f"it has, {', '.join(sorted(record))}"
        ) from error
    return Prompt(str(number), (text,), str(record.get(s.category_field, "")) if s.category_field else "")


class JsonlData(Data):
    """Any local file of JSON objects, one a line, plain or gzipped."""

    @dataclass
    class Settings(RecordSettings):
        def check(self, prefix: str) -> None:
            need_file(self.path, prefix)

        def sources(self) -> Mapping[str, str]:
            return {"path": of_file(self.path)}

    def __init__(self, settings: Settings):
        self.settings, self.limit = settings, settings.limit

    @classmethod
    def from_settings(cls, settings: Settings) -> "JsonlData":
        return cls(settings)

    def prompts(self) -> Iterator[Prompt]:
        for number, record in read_json_lines(self.settings.path):
            yield to_prompt(number, record, self.settings)


class QuestionsData(Data):
    """Question files in the format of Spec-Bench and MT-bench: `question_id`, `category`, `turns`."""

    @dataclass
    class Settings(BaseSettings):
        path: str = setting(required="a question file in the Spec-Bench or MT-bench format")
        category: str | None = setting()
        turns: int | None = setting(ge=1)
        limit: int | None = setting(ge=1)

        def check(self, prefix: str) -> None:
            need_file(self.path, prefix)

        def sources(self) -> Mapping[str, str]:
            return {"path": of_file(self.path)}

    def __init__(self, settings: Settings):
        self.settings, self.limit = settings, settings.limit

    @classmethod
    def from_settings(cls, settings: Settings) -> "QuestionsData":
        return cls(settings)

    def prompts(self) -> Iterator[Prompt]:
        s = self.settings
        seen: set[str] = set()
        for number, record in read_json_lines(s.path):
            turns = record.get("turns")
            if not isinstance(turns, list) or not turns:
                raise ConfigError(f"data.path={s.path} line {number} has no list of turns: it is not a question file")
            category = str(record.get("category", ""))
            seen.add(category)
            if s.category is None or category == s.category:
                yield Prompt(str(record.get("question_id", number)), tuple(map(str, turns[: s.turns])), category)
        if s.category is not None and s.category not in seen:
            raise ConfigError(f"data.category={s.category} is not in {s.path}: it has {', '.join(sorted(seen))}")


class HubData(Data):
    """Any data set that `datasets.load_dataset` opens: a hub id, or a local folder or script."""

    @dataclass
    class Settings(RecordSettings):
        name: str | None = setting()
        split: str = setting()

        def sources(self) -> Mapping[str, str]:
            folder = Path(self.path)
            return {"path": of_folder(folder) if folder.is_dir() else of_hub(self.path, None, "dataset", "README.md")}

    def __init__(self, settings: Settings):
        self.settings, self.limit = settings, settings.limit

    @classmethod
    def from_settings(cls, settings: Settings) -> "HubData":
        return cls(settings)

    def prompts(self) -> Iterator[Prompt]:
        import datasets

        s = self.settings
        try:
            rows = datasets.load_dataset(s.path, s.name, split=s.split)
        except Exception as error:  # datasets passes on the errors of its backends
            reason = str(error).strip().splitlines()[0].rstrip(".")
            raise ConfigError(
                f"data.path={s.path} could not be loaded ({reason}): check data.name and data.split, log in with "
                "`hf auth login` if it is gated, or use data=jsonl with a local file"
            ) from error
        for number, record in enumerate(rows):
            yield to_prompt(number, record, s)
