"""Writes the reference pages from the code: `python docs/generate.py`.

options.md has the settings of a run and the options of each group of conf/, from the YAML files and the settings beside
the classes; results.md has the fields of results.json, from `measure.schema.FIELDS`. `tests/test_docs.py` compares the
pages with what this module returns.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from specbench.config.compose import GROUPS, RunConfig, conf_dir, option_file
from specbench.measure.record import Rounds
from specbench.measure.schema import FIELDS
from specbench.settings import describe

REFERENCE = Path(__file__).parent / "reference"
WRITTEN = "*This page is written by `python docs/generate.py`.*\n"
COMMENT = re.compile(r"^ *(\w+):.*?\s#\s*(.+)$", re.M)


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table; bars in cells are escaped."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def comments(file: Path) -> dict[str, str]:
    """The comment behind each key of a YAML file."""
    return dict(COMMENT.findall(file.read_text()))


def first_sentence(text: str | None) -> str:
    """The first sentence of a docstring, in one line."""
    whole = " ".join((text or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.;:])\s", whole)[0].rstrip(".;:")


def class_of(target: str) -> Any:
    """The class that `_target_` names."""
    module, _, name = target.rpartition(".")
    return getattr(import_module(module), name)


def allowed(schema: Any, name: str) -> str:
    """What a setting may be, in words; `schema` is None of a class without settings."""
    return "" if schema is None or name not in schema.model_fields else describe(schema, name)


def shown(value: Any) -> str:
    """A default value."""
    return "null" if value is None else f"`{value}`" if value != "" else "''"


def scalars() -> str:
    """The settings of a run that belong to no group."""
    values, words = yaml.safe_load((conf_dir() / "config.yaml").read_text()), comments(conf_dir() / "config.yaml")
    rows = [
        (f"`{name}`", shown(values.get(name)), allowed(RunConfig, name), words.get(name, ""))
        for name in RunConfig.model_fields
    ]
    return table(("setting", "default", "allowed", "meaning"), rows)


def group(name: str) -> str:
    """The options of a group, and the settings that they have."""
    options, settings = [], {}
    files = sorted((conf_dir() / name).glob("*.yaml"))
    for file in files:
        values = option_file(file)
        if "_target_" not in values:
            continue
        kind = class_of(values["_target_"])
        options.append((f"`{file.stem}`", first_sentence(kind.__doc__)))
        for key, value in values.items():
            if key not in ("_target_", "defaults"):
                own = settings.setdefault(key, {"files": [], "kind": kind, "values": [], "words": ""})
                own["files"].append(file.stem)
                own["values"].append(shown(value))
                own["words"] = own["words"] or comments(file).get(key, "")
    rows = []
    for key, own in settings.items():
        default = own["values"][0] if len(set(own["values"])) == 1 else "varies"
        of = "all"
        if len(own["files"]) < len(options):
            of = ", ".join(own["files"][:4]) + ", ..." * (len(own["files"]) > 4)
        rows.append((f"`{name}.{key}`", default, allowed(own["kind"].Settings, key), own["words"], of))
    text = f"## {name}\n\n{table(('option', 'what it is'), options)}"
    return text + ("\n" + table(("setting", "default", "allowed", "meaning", "of"), rows) if rows else "")


def options() -> str:
    """options.md."""
    return f"# Options\n\n{WRITTEN}\n## A run\n\n{scalars()}\n" + "\n".join(map(group, GROUPS))


def results() -> str:
    """results.md."""
    fields = table(("field", "meaning"), [(f"`{name}`", meaning) for name, (_, meaning) in FIELDS.items()])
    text = f"# Fields of the results\n\n{WRITTEN}\n## results.json\n\n"
    text += f"Intervals (`ci95`) are `[low, high]`, or null with few prompts.\n\n{fields}"
    rounds = Path(import_module("specbench.measure.record").__file__).read_text()
    words = dict(re.findall(r"^    (\w+): list\[.*?#\s*(.+)$", rounds, re.M))
    rows = [(f"`{name}`", words.get(name, "")) for name in vars(Rounds())]
    text += (
        "\n## rounds.parquet\n\nA row for each round of each request, by both methods: id, prompt_id, turn, category, "
    )
    text += f"process, group, method, round, position, and\n\n{table(('column', 'meaning'), rows)}"
    text += "\n## prompts.jsonl\n\nA line for each request, which is one turn of a prompt. All times are seconds.\n\n"
    rows = [(f"`{name}`", words) for name, words in fields_of(rounds, "Record")]
    text += f"{table(('field', 'meaning'), rows)}\n`speculative` and `baseline` have\n\n"
    rows = [(f"`{name}`", words) for name, words in fields_of(rounds, "Text")]
    return text + table(("field", "meaning"), rows) + "\nand `rounds` has the columns above, a list for each.\n"


def fields_of(source: str, name: str) -> list[tuple[str, str]]:
    """The fields of a dataclass in a source text, with the comments behind them."""
    body = re.split(r"\n\n    def |\n\n\n", source.split(f"class {name}:", 1)[1])[0]
    return [(field, words) for field, words in re.findall(r"^    (\w+): [^#\n]*(?:#\s*(.+))?$", body, re.M)]


PAGES = {"options.md": options, "results.md": results}


def main() -> None:
    """Writes all pages."""
    REFERENCE.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page())


if __name__ == "__main__":
    main()
