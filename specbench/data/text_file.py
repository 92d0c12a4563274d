"""Reads a text file that drafters are fitted or trained on."""

from specbench.data.json_lines import need_file
from specbench.errors import ConfigError

TEXT = "a text file in UTF-8"


def read_text(path: str, key: str) -> str:
    """The text of a file that the setting `key` names, without a byte order mark. Raises ConfigError if it is blank."""
    need_file(path, key, TEXT)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            text = file.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{key}={path} is not UTF-8 (byte {error.start + 1}): it must be {TEXT}") from error
    if not text.strip():
        raise ConfigError(f"{key}={path} is blank: it must be {TEXT}")
    return text
