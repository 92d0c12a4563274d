"""Prompts from records: local or published files of JSON lines, question files, and data sets of the hub."""

import functools
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from specbench.data.json_lines import need_file, read_json_lines
from specbench.data.prompts import Prompt, StoredData
from specbench.data.sources import of_folder, of_hub
from specbench.data.template import check_template, fill
from specbench.errors import ConfigError, first_line, shown, visible
from specbench.settings import BaseSettings, file_hash

log = logging.getLogger(__name__)
LONGEST_NAME = 200  # characters of an id or a category
SHA256 = re.compile("[0-9a-fA-F]{64}")
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # in turns of SPEED-Bench that its own script has to fill
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


class FileSettings(BaseSettings):
    """A file of JSON lines. With a `url` it is a local copy of a published one: a copy with another sha256 is a warning
    or, with `verify`, refused."""

    path: str | None = Field(description="a file of JSON lines, or a question file")
    limit: int | None = Field(ge=1)
    url: str | None = None
    sha256: str | None = None  # None: not known
    verify: bool = False

    def check(self, prefix: str) -> None:
        if self.url is not None:
            self._check_address(prefix)
        need_file(self.file, f"{prefix}path")
        if self.url is not None:
            self._compare(prefix, file_hash(self.file))

    def _check_address(self, prefix: str) -> None:
        if not str(self.url).startswith("https://"):
            raise ConfigError(f"{prefix}url={shown(self.url)} is not allowed: it must be an address, https://...")
        if self.sha256 is not None and not SHA256.fullmatch(self.sha256):
            raise ConfigError(
                f"{prefix}sha256={shown(self.sha256)} is not allowed: it must be 64 hexadecimal digits, or null"
            )
        if self.path is None or not Path(self.path).exists():
            said = f"{prefix}path is not set" if self.path is None else f"{prefix}path={shown(self.path)} is not there"
            raise ConfigError(f"{said}: fetch {self.url} and give its place with {prefix}path=FILE")

    def _compare(self, prefix: str, found: str) -> None:
        """Warns, or with `verify` raises ConfigError, if the file is another one than the published."""
        if self.sha256 is None:
            if self.verify:
                raise ConfigError(f"{prefix}verify=true is not possible: set {prefix}sha256 to the hash that is wanted")
        elif found != self.sha256.lower():
            told = f"{prefix}path={self.path} has the sha256 {found}, and {self.url} had {self.sha256}"
            if self.verify:
                raise ConfigError(f"{told}: fetch it again, or use {prefix}verify=false")
            _warn(f"{told}: numbers may not compare with those of others")

    @property
    def file(self) -> str:
        """The path. Raises ConfigError if it is null."""
        if self.path is None:
            raise ConfigError("data.path=null is not allowed: it must be a file")
        return self.path

    def sources(self) -> Mapping[str, str]:
        return {"path": file_hash(self.file)}


@functools.cache
def _warn(text: str) -> None:
    """Once in a process: a configuration is checked more than once."""
    log.warning("%s", text)


def text_of(value: Any, what: str, blank: bool = False) -> str:
    """The value, if it is text (`blank`: blank text too). `what` names file, line and field. Raises ConfigError."""
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


def field_of(record: Mapping[str, Any], name: str, keys: str, where: str) -> Any:
    """A field of a record. Raises ConfigError that names `where` the record is and the settings `keys`."""
    if name not in record:
        has = shown(", ".join(sorted(map(str, record))) or "none")
        if isinstance(record.get("turns"), list):
            raise ConfigError(
                f"{where} has no field {name!r} but turns: data=questions reads such a file, data=spec_bench "
                "Spec-Bench's; both take data.path"
            )
        raise ConfigError(f"{where} has no field {name!r}: set {keys} to what it has, {has}")
    return record[name]


def record_prompt(number: int, record: Mapping[str, Any], settings: Any) -> Prompt:
    """The prompt of a record: its `field`, or the `template` filled with its fields. Raises ConfigError."""
    where, template, category = f"data.path={settings.path} record {number}", settings.template, settings.category_field

    def field(name: str) -> str:
        value = field_of(record, name, "data.field or data.template", where)
        return text_of(value, f"{where} field {name!r}", blank=template is not None)

    text = field(settings.field) if template is None else text_of(fill(template, field), f"{where} as data.template")
    own = None if category is None else field_of(record, category, "data.category_field", where)
    return Prompt(str(number), (text,), "" if own is None else label_of(own, f"{where} field {category!r}"))


class JsonlData(StoredData):
    """A file of JSON objects, one a line, plain or gzipped: a field is the prompt, or fields fill the template."""

    class Settings(FileSettings):
        field: str
        template: str | None
        category_field: str | None = None

        def check(self, prefix: str) -> None:
            check_template(self.template, f"{prefix}template")
            super().check(prefix)

    @property
    def stratified(self) -> bool:  # type: ignore[override]
        """Whether records have categories."""
        return self.settings.category_field is not None

    def prompts(self) -> Iterator[Prompt]:
        for number, record in read_json_lines(self.settings.file):
            yield record_prompt(number, record, self.settings)


class QuestionsData(StoredData):
    """Question files in the format of Spec-Bench, MT-bench and SPEED-Bench: `question_id`, `category`, `turns`, or as
    aiperf has them `messages`, of which the user's are the turns. With `grouping:
    spec_bench`, the eight categories of MT-bench are one, `mt_bench`, as in Spec-Bench's table."""

    stratified: ClassVar[bool] = True

    class Settings(FileSettings):
        category: str | None
        grouping: Literal["spec_bench", "own"] = "own"
        turns: int | None = Field(ge=1)

    def prompts(self) -> Iterator[Prompt]:
        """The questions, those of one category if it is given, with their first `turns` turns."""
        s = self.settings
        grouped = s.grouping == "spec_bench"
        seen: set[str] = set()
        for prompt in read_questions(s.file, s.turns):
            if grouped and prompt.category in MT_BENCH:
                prompt = replace(prompt, category="mt_bench")
            seen.add(prompt.category)
            if s.category in (None, prompt.category):
                yield prompt
        if s.category is not None and s.category not in seen:
            has = shown(", ".join(sorted(seen)) or "none")
            raise ConfigError(f"data.category={shown(s.category)} is not in {s.file}: it has {has}")


def read_questions(path: str, turns: int | None) -> Iterator[Prompt]:
    """The questions of a file, with their first `turns` turns. Raises ConfigError."""
    for number, record in read_json_lines(path):
        where = f"data.path={path} line {number}"
        found = record.get("turns", _asked(record.get("messages")))
        if not isinstance(found, list) or not found:
            raise ConfigError(f"{where} has no list of turns, nor of messages: it is not a question file")
        if any(isinstance(turn, str) and PLACEHOLDER in turn.upper() for turn in found):
            raise ConfigError(
                f"{where} is a placeholder of SPEED-Bench: fill the file with its own prepare_data.py first"
            )
        texts = tuple(text_of(turn, f"{where} turn {place}") for place, turn in enumerate(found, 1))
        name = label_of(record.get("question_id", number), f"{where} question_id")
        category = label_of(record["category"], f"{where} category") if "category" in record else ""
        yield Prompt(name, texts[:turns], category)


def _asked(messages: Any) -> list[Any] | None:
    """What the user says in a list of messages; None if it is none."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return None
    return [message.get("content") for message in messages if message.get("role") == "user"]


class HubData(StoredData):
    """Any data set that `datasets.load_dataset` opens: a hub id, or a local folder."""

    class Settings(BaseSettings):
        path: str = Field(description="the id of a data set of the hub, or a folder")
        name: str | None
        split: str
        field: str
        template: str | None
        category_field: str | None
        limit: int | None = Field(ge=1)

        def check(self, prefix: str) -> None:
            check_template(self.template, f"{prefix}template")

        def sources(self) -> Mapping[str, str]:
            return {"path": version_of(self.path)}

    def prompts(self) -> Iterator[Prompt]:
        s = self.settings
        for number, record in numbered(load_rows(s.path, s.name, s.split, "data=jsonl"), s.path):
            yield record_prompt(number, record, s)


def version_of(path: str) -> str:
    """What is known of the version of a data set: a hub id, or a local folder."""
    folder = Path(path)
    return of_folder(folder) if folder.is_dir() else of_hub(path, None, "dataset", "README.md")


def load_rows(path: str, name: str | None, split: str, instead: str) -> Any:
    """The split of a data set, as `datasets` loads it; option `instead` reads local files. Raises ConfigError."""
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
    while True:
        try:
            record = next(records, None)
        except Exception as error:  # of the backend
            raise ConfigError(
                f"data.path={path} record {number} could not be read ({first_line(error)}): mend the data set, or use "
                "data=jsonl with a local file"
            ) from error
        if not record:
            return
        yield number, record
        number += 1
