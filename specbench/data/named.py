"""Data sets that papers report: Spec-Bench, MT-bench, HumanEval, GSM8K. Each reads a local copy of its file."""

import functools
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from specbench.data.json_lines import need_file, read_json_lines
from specbench.data.prompts import Prompt, StoredData
from specbench.data.records import read_questions, record_prompt
from specbench.data.template import check_template
from specbench.errors import ConfigError, shown
from specbench.settings import BaseSettings, file_hash, setting

log = logging.getLogger(__name__)
SHA256 = re.compile("[0-9a-fA-F]{64}")
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


@dataclass
class KnownFileSettings(BaseSettings):
    """A local copy of a published file. One with another sha256 is a warning or, with `verify`, refused."""

    path: str | None = setting()
    url: str = setting()
    sha256: str | None = setting()  # None: not known
    verify: bool = setting()

    def check(self, prefix: str) -> None:
        """Raises ConfigError if the file is not there, or with `verify` if it is another one."""
        if not self.url.startswith("https://"):
            raise ConfigError(f"{prefix}url={shown(self.url)} is not allowed: it must be an address, https://...")
        if self.sha256 is not None and not SHA256.fullmatch(self.sha256):
            raise ConfigError(
                f"{prefix}sha256={shown(self.sha256)} is not allowed: it must be 64 hexadecimal digits, or null"
            )
        if self.path is None or not Path(self.path).exists():
            said = f"{prefix}path is not set" if self.path is None else f"{prefix}path={self.path} is not there"
            raise ConfigError(f"{said}: fetch {self.url} and give its place with {prefix}path=FILE")
        need_file(self.path, f"{prefix}path")
        found = file_hash(self.path)
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
        """The path, which `check` has found."""
        assert self.path is not None
        return self.path

    def sources(self) -> Mapping[str, str]:
        return {"path": file_hash(self.file)}


@functools.cache
def _warn(text: str) -> None:
    """Once in a process: a configuration is checked more than once."""
    log.warning("%s", text)


class NamedQuestions(StoredData):
    """A published question file. With `grouping: spec_bench`, the eight categories of MT-bench are one, `mt_bench`, as
    in Spec-Bench's table; with `own`, categories are those of the file."""

    stratified: ClassVar[bool] = True

    @dataclass
    class Settings(KnownFileSettings):
        category: str | None = setting()
        grouping: str = setting(choices=("spec_bench", "own"))
        turns: int | None = setting(ge=1)
        limit: int | None = setting(ge=1)

    def prompts(self) -> Iterator[Prompt]:
        s = self.settings
        grouped = s.grouping == "spec_bench"
        wanted = None if grouped else s.category
        for prompt in read_questions(s.file, wanted, s.turns):
            if grouped and prompt.category in MT_BENCH:
                prompt = replace(prompt, category="mt_bench")
            if s.category in (None, prompt.category):
                yield prompt


class NamedRecords(StoredData):
    """A published file of records, one a line: a field is the prompt, or the template filled with fields."""

    @dataclass
    class Settings(KnownFileSettings):
        field: str = setting()
        template: str | None = setting()
        limit: int | None = setting(ge=1)

        def check(self, prefix: str) -> None:
            if self.template is not None:
                check_template(self.template, f"{prefix}template")
            super().check(prefix)

    def prompts(self) -> Iterator[Prompt]:
        s = self.settings
        for number, record in read_json_lines(s.file):
            yield record_prompt(number, record, s.file, s.field, s.template, None)
