"""Data sets that papers report: Spec-Bench, MT-bench, HumanEval, GSM8K. Each reads a local copy of its file."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from specbench.data.json_lines import read_json_lines
from specbench.data.known_file import KnownFileSettings
from specbench.data.prompts import Prompt, StoredData
from specbench.data.records import read_questions, record_prompt
from specbench.data.template import check_template
from specbench.settings import setting

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


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
