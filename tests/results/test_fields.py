"""The list of fields that tables, pages and loggers show."""

import dataclasses
import typing

from specbench.results.fields import FIELDS, LOGGED, LOGGED_WHOLE, REPEATS, RUN_PAGE, SUMMARY, SWEEP_PAGE
from specbench.results.schema import RunResult

FREE = ("config", "provenance")  # objects of results.json whose fields are not declared


def declared(path):
    """Whether the schema has a number at a path."""
    kind, (*above, last) = RunResult, path.split("/")
    for key in [*above, last]:
        options = [kind, *typing.get_args(kind)]
        known = [option for option in options if dataclasses.is_dataclass(option)]
        if not known:
            return True  # below a dictionary or a list
        names = {field.name for option in known for field in dataclasses.fields(option)}
        if key not in names:
            return False
        kind = typing.get_type_hints(known[0])[key]
    return True


def test_every_field_is_in_the_schema():
    for field in FIELDS.values():
        assert field.path.startswith(FREE) or declared(field.path), field
    assert all(declared(path) for path in (*LOGGED.values(), *LOGGED_WHOLE))
    assert not declared("speedup/mesured") and not declared("alfa")  # negative control


def test_every_selection_is_of_fields():
    for names in (SUMMARY, REPEATS, RUN_PAGE, SWEEP_PAGE):
        assert set(names) <= set(FIELDS) and len({*names}) == len(names)
