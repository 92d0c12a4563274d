"""Prompts from records: files of JSON lines, question files, and data sets of the hub.

A template is text with `{field}` in it, which is replaced by a field of the record; `{{` is a brace."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from string import Formatter
from typing import Any, ClassVar, Literal

from pydantic import Field

from specbench.data.files import need_file, read_json_lines
from specbench.data.prompts import Data, Prompt
from specbench.errors import AbsentError, ConfigError, first_line, shown, visible
from specbench.settings import BaseSettings

LONGEST_NAME = 200  # characters of an id or a category
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
KINDS = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
SYNTAX = re.compile(r"[.\[\]!:{}]")  # what str.format would read as an attribute, an index, a conversion or a format


def check_template(template: str | None, key: str, known: tuple[str, ...] = ()) -> None:
    """Raises ConfigError unless every brace belongs to `{field}`, `{{` or `}}`, and fields are `known`, if any are."""
    if template is None:
        return
    named = f"{key}={shown(template)} is not allowed"
    try:
        fields = [found for found in Formatter().parse(template) if found[1] is not None]
    except ValueError as error:
        raise ConfigError(f"{named}: {first_line(error)}, write {{{{ or }}}} for a brace of the text") from error
    if not fields:
        raise ConfigError(f"{named}: without a {{field}} every prompt would be the same")
    for _, name, form, conversion in fields:
        if form or conversion or not str(name).strip() or str(name).isdigit() or SYNTAX.search(str(name)):
            raise ConfigError(f"{named}: {{{shown(name)}}} must be the name of a field alone, as in {{question}}")
        if known and name not in known:
            raise ConfigError(f"{named}: {{{name}}} must be one of {', '.join(f'{{{each}}}' for each in known)}")


def fill(template: str, field: Callable[[str], str]) -> str:
    """The template with field(name) in place of each `{name}`."""
    return "".join(text + ("" if name is None else field(name)) for text, name, *_ in Formatter().parse(template))


class FieldSettings(BaseSettings):
    """Which part of a record is the prompt: a field, or the template filled with its fields."""

    field: str
    template: str | None
    category_field: str | None = None
    limit: int | None = Field(ge=1)

    def check(self, prefix: str) -> None:
        check_template(self.template, f"{prefix}template")
        super().check(prefix)


class FileSettings(BaseSettings):
    """A file of JSON lines. With a `url` it is a local copy of a published one."""

    path: str | None = Field(description="a file of JSON lines, or a question file")
    limit: int | None = Field(ge=1)
    url: str | None = None

    def check(self, prefix: str) -> None:
        if self.url is not None and (self.path is None or not Path(self.path).exists()):
            said = f"{prefix}path is not set" if self.path is None else f"{prefix}path={shown(self.path)} is not there"
            raise AbsentError(f"{said}: fetch {self.url} and give its place with {prefix}path=FILE")
        need_file("null" if self.path is None else self.path, f"{prefix}path")


def text_of(value: Any, what: str, blank: bool = False) -> str:
    """The value, if it is text (`blank`: blank text too). `what` names file, line and field. Raises ConfigError."""
    if not isinstance(value, str):
        hint = ", and data=questions reads lists of turns" if isinstance(value, list) else ""
        raise ConfigError(f"{what} is {KINDS.get(type(value), 'null')}, not text: a prompt must be text{hint}")
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
            f"{what} is {shown(value)}: it must be an integer or a text of 1 to {LONGEST_NAME} characters, none of "
            "them a control character"
        )
    return name


def record_prompt(number: int, record: Mapping[str, Any], settings: Any) -> Prompt:
    """The prompt of a record: its `field`, or the `template` filled with its fields. Raises ConfigError."""
    where = f"data.path={settings.path} record {number}"

    def value_of(name: str) -> Any:
        if name not in record:
            has = shown(", ".join(sorted(map(str, record))))
            hint = ", or data=questions for a file of turns" if "turns" in record else ""
            keys = "data.field, data.template or data.category_field"
            raise ConfigError(f"{where} has no field {name!r}: set {keys} to what it has ({has}){hint}")
        return record[name]

    def text(name: str) -> str:
        return text_of(value_of(name), f"{where} field {name!r}", blank=settings.template is not None)

    label, named = "", settings.category_field
    if named is not None:
        label = label_of(value_of(named), f"{where} field {named!r}")
    if settings.template is not None:
        return Prompt(str(number), (text_of(fill(settings.template, text), f"{where} as data.template"),), label)
    value = value_of(settings.field)
    if isinstance(value, list) and value and isinstance(value[0], dict):
        from specbench.data.chat import chat_of

        return Prompt(str(number), category=label, **chat_of(record, settings.field, where))
    return Prompt(str(number), (text(settings.field),), label)


class JsonlData(Data):
    """A file of JSON objects, one a line, plain or gzipped: a field is the prompt, or fields fill the template."""

    class Settings(FieldSettings, FileSettings):
        pass

    @property
    def stratified(self) -> bool:  # type: ignore[override]
        """Whether records have categories."""
        return self.settings.category_field is not None

    def prompts(self) -> Iterator[Prompt]:
        for number, record in read_json_lines(self.settings.path):
            yield record_prompt(number, record, self.settings)


class QuestionsData(Data):
    """Question files in the format of Spec-Bench, MT-bench and SPEED-Bench: `question_id`, `category`, `turns`, and
    `system` and `tools` if there are any; or chats, with `messages` in place of turns. With `grouping: spec_bench`, the
    eight categories of MT-bench are one, `mt_bench`, as in Spec-Bench's table."""

    stratified: ClassVar[bool] = True

    class Settings(FileSettings):
        category: str | None
        grouping: Literal["spec_bench", "own"] = "own"
        turns: int | None = Field(ge=1)

    def prompts(self) -> Iterator[Prompt]:
        """The questions, those of one category if it is given, with their first `turns` turns."""
        s = self.settings
        seen: set[str] = set()
        for prompt in read_questions(s.path, s.turns):
            if s.grouping == "spec_bench" and prompt.category in MT_BENCH:
                prompt = replace(prompt, category="mt_bench")
            seen.add(prompt.category)
            if s.category in (None, prompt.category):
                yield prompt
        if s.category is not None and s.category not in seen:
            has = shown(", ".join(sorted(seen)) or "none")
            raise ConfigError(f"data.category={shown(s.category)} is not in {s.path}: it has {has}")


def read_questions(path: str, turns: int | None) -> Iterator[Prompt]:
    """The questions of a file, with their first `turns` turns, or the chats of one. Raises ConfigError."""
    from specbench.data.chat import beside_turns, chat_of

    for number, record in read_json_lines(path):
        where = f"data.path={path} line {number}"
        name = label_of(record.get("question_id", number), f"{where} question_id")
        category = label_of(record["category"], f"{where} category") if "category" in record else ""
        found = record.get("turns")
        if isinstance(found, list) and found:
            texts = tuple(text_of(turn, f"{where} turn {place}") for place, turn in enumerate(found, 1))
            yield Prompt(name, texts[:turns], category, **beside_turns(record, where))
        elif isinstance(record.get("messages"), list):
            yield Prompt(name, category=category, **chat_of(record, "messages", where))
        else:
            raise ConfigError(f"{where} has no list of turns or messages: it is not a question file")


class HubData(Data):
    """Any data set that `datasets.load_dataset` opens: a hub id, or a local folder."""

    class Settings(FieldSettings):
        path: str = Field(description="the id of a data set of the hub, or a folder")
        name: str | None
        split: str

    def prompts(self) -> Iterator[Prompt]:
        import datasets

        s = self.settings
        try:
            rows = datasets.load_dataset(s.path, s.name, split=s.split)
            for number, record in enumerate(rows):
                yield record_prompt(number, record, s)
        except ConfigError:
            raise
        except Exception as error:  # datasets passes on the errors of its backends
            raise ConfigError(
                f"data.path={s.path} could not be loaded ({first_line(error)}): check data.name and data.split, log in "
                "with `hf auth login` if it is gated, or use data=jsonl with a local file"
            ) from error
