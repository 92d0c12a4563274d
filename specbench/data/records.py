"""Prompts from records: local JSON lines, question files (Spec-Bench, MT-bench), and data sets of the hub."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from specbench.data.json_lines import need_file, read_json_lines
from specbench.data.prompts import Prompt, StoredData
from specbench.data.sources import of_folder, of_hub
from specbench.data.template import check_template, fill
from specbench.errors import ConfigError, first_line, shown, visible
from specbench.settings import BaseSettings, file_hash, setting

LONGEST_NAME = 200  # characters of an id or a category


@dataclass
class RecordSettings(BaseSettings):
    """Where the records are, and how one becomes a prompt."""

    path: str = setting(required="a file of JSON lines, or for data=hub the id of a data set")
    field: str = setting()
    template: str | None = setting()
    category_field: str | None = setting()
    limit: int | None = setting(ge=1)

    def check(self, prefix: str) -> None:
        if self.template is not None:
            check_template(self.template, f"{prefix}template")


def text_of(value: Any, what: str, blank: bool = False) -> str:
    """The value itself, if it is text; with `blank`, text that is blank too. `what` names file, line and field. Raises
    ConfigError."""
    if not isinstance(value, str):
        hint = ", and data=questions reads lists of turns" if isinstance(value, list) else ""
        raise ConfigError(f"{what} is {kind_of(value)}, not text: a prompt must be text{hint}")
    if not value.strip() and not blank:
        raise ConfigError(f"{what} is empty: a prompt must be text that is not blank")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ConfigError(f"{what} holds half of a surrogate pair, which is no text: mend or remove it")
    return value


def label_of(value: Any, what: str) -> str:
    """An id or a category: text or an integer. `what` names file, line and field. Raises ConfigError."""
    name = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
    if not name.strip() or len(name) > LONGEST_NAME or visible(name) != name:
        raise ConfigError(
            f"{what} is {shown(value) if isinstance(value, str | int) else kind_of(value)}: it must be an integer or a "
            f"text of 1 to {LONGEST_NAME} characters, none of them a control character"
        )
    return name


def kind_of(value: Any) -> str:
    """What a value of JSON is, in words."""
    kinds = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return "null" if value is None else kinds.get(type(value), f"a {type(value).__name__}")


def record_prompt(
    number: int, record: Mapping[str, Any], path: str, own: str, template: str | None, category_field: str | None
) -> Prompt:
    """The prompt of a record: its field `own`, or the template filled with its fields. Raises ConfigError if a field is
    missing or no text."""
    where = f"data.path={path} record {number}"

    def field(name: str) -> str:
        value = field_of(record, name, "data.field or data.template", where)
        return text_of(value, f"{where} field {name!r}", blank=template is not None)

    text = field(own) if template is None else text_of(fill(template, field), f"{where} as data.template")
    category = None if category_field is None else field_of(record, category_field, "data.category_field", where)
    if category is None:
        return Prompt(str(number), (text,))
    return Prompt(str(number), (text,), label_of(category, f"{where} field {category_field!r}"))


def field_of(record: Mapping[str, Any], name: str, keys: str, where: str) -> Any:
    """A field of a record. Raises ConfigError that names `where` the record is and the settings `keys`."""
    if name not in record:
        has = shown(", ".join(sorted(map(str, record))) or "none")
        raise ConfigError(f"{where} has no field {name!r}: set {keys} to what it has, {has}")
    return record[name]


class JsonlData(StoredData):
    """Any local file of JSON objects, one a line, plain or gzipped."""

    @dataclass
    class Settings(RecordSettings):
        def check(self, prefix: str) -> None:
            super().check(prefix)
            need_file(self.path, f"{prefix}path")

        def sources(self) -> Mapping[str, str]:
            return {"path": file_hash(self.path)}

    def prompts(self) -> Iterator[Prompt]:
        s = self.settings
        for number, record in read_json_lines(s.path):
            yield record_prompt(number, record, s.path, s.field, s.template, s.category_field)


class QuestionsData(StoredData):
    """Question files in the format of Spec-Bench and MT-bench: `question_id`, `category`, `turns`."""

    stratified: ClassVar[bool] = True

    @dataclass
    class Settings(BaseSettings):
        path: str = setting(required="a question file in the Spec-Bench or MT-bench format")
        category: str | None = setting()
        turns: int | None = setting(ge=1)
        limit: int | None = setting(ge=1)

        def check(self, prefix: str) -> None:
            need_file(self.path, f"{prefix}path")

        def sources(self) -> Mapping[str, str]:
            return {"path": file_hash(self.path)}

    def prompts(self) -> Iterator[Prompt]:
        yield from read_questions(self.settings.path, self.settings.category, self.settings.turns)


def read_questions(path: str, category: str | None, turns: int | None) -> Iterator[Prompt]:
    """The questions of a file, those of one category if it is given, with their first `turns` turns. Raises
    ConfigError."""
    seen: set[str] = set()
    lines: dict[str, int] = {}  # by id
    for number, record in read_json_lines(path):
        where = f"data.path={path} line {number}"
        found = record.get("turns")
        if not isinstance(found, list) or not found:
            raise ConfigError(f"{where} has no list of turns: it is not a question file")
        texts = tuple(text_of(turn, f"{where} turn {place}") for place, turn in enumerate(found, 1))
        own = label_of(record["category"], f"{where} category") if "category" in record else ""
        seen.add(own)
        if category is None or own == category:
            name = label_of(record.get("question_id", number), f"{where} question_id")
            if lines.setdefault(name, number) != number:
                raise ConfigError(f"{where} and line {lines[name]} are two prompts with the id {name}: change one")
            yield Prompt(name, texts[:turns], own)
    if category is not None and category not in seen:
        has = shown(", ".join(sorted(seen)) or "none")
        raise ConfigError(f"data.category={shown(category)} is not in {path}: it has {has}")


class HubData(StoredData):
    """Any data set that `datasets.load_dataset` opens: a hub id, or a local folder."""

    @dataclass
    class Settings(RecordSettings):
        name: str | None = setting()
        split: str = setting()

        def sources(self) -> Mapping[str, str]:
            return {"path": version_of(self.path)}

    def prompts(self) -> Iterator[Prompt]:
        s = self.settings
        for number, record in numbered(load_rows(s.path, s.name, s.split, "data=jsonl"), s.path):
            yield record_prompt(number, record, s.path, s.field, s.template, s.category_field)


def version_of(path: str) -> str:
    """What is known of the version of a data set: a hub id, or a local folder."""
    folder = Path(path)
    return of_folder(folder) if folder.is_dir() else of_hub(path, None, "dataset", "README.md")


def load_rows(path: str, name: str | None, split: str, instead: str) -> Any:
    """The split of a data set, as `datasets` loads it. `instead` is an option that reads local files. Raises
    ConfigError."""
    import datasets

    try:
        rows = datasets.load_dataset(path, name, split=split)
        if not isinstance(rows, datasets.Dataset):
            raise ValueError(f"data.split={split} is not one split")
    except Exception as error:  # datasets passes on the errors of its backends
        raise ConfigError(
            f"data.path={path} could not be loaded ({first_line(error)}): check data.name and data.split, log in "
            f"with `hf auth login` if it is gated, or use {instead} with a local file"
        ) from error
    return rows


def numbered(rows: Any, path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The records of `load_rows`, from 0 on. Raises ConfigError if one cannot be decoded."""
    number, records = 0, iter(rows)
    while record := _next(records, number, path):
        yield number, record
        number += 1


def _next(records: Iterator[Any], number: int, path: str) -> dict[str, Any] | None:
    """The record of this number, None after the last. Raises ConfigError if it cannot be decoded."""
    try:
        return next(records, None)
    except Exception as error:  # of the backend
        raise ConfigError(
            f"data.path={path} record {number} could not be read ({first_line(error)}): mend the data set, or use "
            "data=jsonl with a local file"
        ) from error
