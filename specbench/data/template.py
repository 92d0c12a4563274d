"""Templates of prompts: text with `{field}` in it, which is replaced by a field of the record; `{{` is a brace."""

import re
from collections.abc import Callable
from string import Formatter

from specbench.errors import ConfigError, first_line, shown

SYNTAX = re.compile(r"[.\[\]!:{}]")  # what str.format would read as an attribute, an index, a conversion or a format


def check_template(template: str | None, key: str, known: tuple[str, ...] = ()) -> None:
    """Raises ConfigError unless every brace of the template belongs to `{field}`, `{{` or `}}`, and every field is one
    of those that are `known`, if any are. None is no template."""
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
