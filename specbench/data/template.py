"""Templates of prompts: text with `{field}` in it, which is replaced by a field of the record; `{{` is a brace."""

import re
from collections.abc import Callable

from specbench.errors import ConfigError, shown

PIECE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|([{}])")
SYNTAX = re.compile(r"[.\[\]!:]")  # what str.format would read as an attribute, an index, a conversion or a format
LARGEST_TEMPLATE = 100_000  # characters


def check_template(template: str, key: str) -> None:
    """Raises ConfigError unless every brace of the template belongs to `{field}`, `{{` or `}}`."""
    named = f"{key}={shown(template)} is not allowed"
    fields = 0
    for piece in PIECE.finditer(template):
        name, brace = piece.groups()
        if brace is not None:
            raise ConfigError(f"{named}: a {brace} in it has no other half, write {brace * 2} for a brace of the text")
        if name is None:
            continue
        if not name.strip() or name.isdigit() or SYNTAX.search(name):
            raise ConfigError(f"{named}: {{{shown(name)}}} must be the name of a field alone, as in {{question}}")
        fields += 1
    if not fields:
        raise ConfigError(f"{named}: without a {{field}} every prompt would be the same")
    if len(template) > LARGEST_TEMPLATE:
        raise ConfigError(f"{named}: it must have at most {LARGEST_TEMPLATE:,} characters")


def fill(template: str, field: Callable[[str], str]) -> str:
    """The template with field(name) in place of each `{name}`."""

    def replaced(piece: re.Match[str]) -> str:
        return piece[0][0] if piece[1] is None else field(piece[1])

    return PIECE.sub(replaced, template)
