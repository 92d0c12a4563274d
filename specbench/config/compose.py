"""Composes configurations as the command line does, and says in one sentence what Hydra does not accept."""

import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.config_loader import ConfigLoader
from hydra.core.utils import setup_globals
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from specbench.config.paths import conf_dir
from specbench.decoding.component import Component
from specbench.errors import ConfigError, first_line, shown, unknown
from specbench.run_config import GROUPS, RunConfig

LONGEST, MOST_COMMAS = 100_000, 5_000  # of a value: characters, commas
_LOADING = threading.Lock()  # Hydra's plugins and resolvers are of the process


def compose(overrides: Sequence[str]) -> DictConfig:
    """The configuration that the command line would compose, with Hydra's own part. Raises ConfigError."""
    refuse_no_overrides(overrides)
    with explained(overrides):
        return loader().load_configuration("config", list(overrides), RunMode.RUN, from_shell=False)


def compose_sweep(overrides: Sequence[str], by: ConfigLoader) -> DictConfig:
    """The configuration of a sweep, as of `-m`. Raises ConfigError."""
    refuse_no_overrides(overrides)
    with explained(overrides):
        return by.load_configuration("config", list(overrides), RunMode.MULTIRUN)


def refuse_no_overrides(words: Sequence[str], options: Iterable[str] = ()) -> None:
    """Raises ConfigError for words of a command that Hydra would not explain: no override and none of its `options`, or
    a folder without a name."""
    package = Path(__file__).parents[1]
    entries = [package / f"{words[0]}.py", package / words[0] / "__main__.py"] if words else []
    if words and words[0].isidentifier() and any(os.path.isfile(file) for file in entries):
        raise ConfigError(f"{words[0]} is a command of its own: python -m specbench.{' '.join(words)}")
    for number, word in enumerate(words):
        key, equals, value = word.partition("=")
        if re.fullmatch(r"\+*hydra\.(run|sweep)\.dir", key) and equals and value in ("", "null", "''", '""'):
            raise ConfigError(f"{key}={shown(value)} is not allowed: it must be the name of a folder")
        if len(value) > LONGEST or value.count(",") > MOST_COMMAS:  # of which Hydra would read for minutes
            raise ConfigError(f"{shown(key)}={shown(value)} is not allowed: a value has at most {LONGEST:,} characters "
                              f"and {MOST_COMMAS:,} commas")  # fmt: skip
        if vanishing := [each for each in value.split(",") if vanishes(each)]:
            raise ConfigError(f"{shown(key)}={shown(vanishing[0])} is not allowed: it is too small a number to be told "
                              "from 0")  # fmt: skip
        if key.startswith("--") and not any(option.startswith(key) for option in options):
            name = key[2:].replace("-", "_")
            if name not in (keys := known_keys(words)):
                raise unknown(name, keys, "setting (settings are given without --, as gamma=4)")
            after = words[number + 1] if number + 1 < len(words) else ""
            value = value or ("..." if "=" in after or after.startswith("-") else after or "...")
            raise ConfigError(f"{key} is not an option: a setting is given as {name}={value}")


def vanishes(text: str) -> bool:
    """Whether a text spells a number that is not 0 and that floats round to 0."""
    try:
        return float(text) == 0 and bool(re.search("[1-9]", re.split("[eE]", text)[0]))
    except ValueError:
        return False


def loader() -> ConfigLoader:
    """What reads the configurations of specbench. Hydra's one object for a whole process, which a notebook or another
    thread may have, is neither needed nor changed."""
    with _LOADING:
        setup_globals()
        return ConfigLoaderImpl(create_config_search_path(str(conf_dir())))


@contextmanager
def explained(overrides: Sequence[str]) -> Iterator[None]:
    """Inside, whatever Hydra raises while it composes these overrides becomes a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # its composition fails with errors of any class
        raise ConfigError(explain(error, overrides)) from error


def explain(error: BaseException, overrides: Sequence[str] = (), keys: Iterable[str] | None = None) -> str:
    """A mistake that Hydra or OmegaConf found while composing these overrides, as one sentence. `keys` are those that
    can be set, if not those of a run."""
    text = str(error)
    if found := re.search(r"ConfigError raised while resolving interpolation: (.*)", text):  # by one of our resolvers
        return found[1]
    if found := re.search(r"Could not override '([^']+)'|Key '([^']+)' is not in struct", text):
        key = found[1] or found[2]
        group = key.rpartition(".")[0]
        what = f"setting of the chosen {group}" if group else "setting"
        keys = [*(known_keys(overrides) if keys is None else keys)]
        of_group = (known for known in keys if known.rpartition(".")[0] == group)
        elsewhere = [known for known in keys if known == key.rpartition(".")[2] or known.endswith(f".{key}")]
        return str(unknown(key, of_group, what, elsewhere))
    if found := re.search(r"Could not find '([^']+)/([^'/]+)'\s+Available options in '[^']+':\n((?:\t.*\n?)*)", text):
        group, option, options = found[1], found[2], found[3].split()
        return str(unknown(f"{group}={option}", (f"{group}={name}" for name in options), "choice"))
    if found := re.search(r"Could not load '([^']+)/([^'/]+)'", text):  # of a list of options
        return f"{found[1]}={found[2]} is not a choice (see python -m specbench --help)"
    if found := re.search(r"Ambiguous value for argument '(.*?)'\n", text):
        return (
            f"{shown(found[1])} has several values: python -m specbench -m makes a run of each, python -m "
            "specbench.compare also compares them"
        )
    if override := getattr(error, "override", None):
        key, _, value = str(override).partition("=")
        hint = f"; a value with = in it needs quotes: '{key}=\"{value}\"'" if "=" in value else ""
        return f"{shown(override)} is not an override that Hydra can read: {first_line(error)}{hint}"
    overrides = [override for override in overrides if not override.startswith("-")]
    where = getattr(error, "full_key", None) or "hydra."
    if where.startswith("hydra.") and overrides:  # a folder's name holds all overrides
        where = ("one of " if len(overrides) > 1 else "") + shown(", ".join(overrides))
    return f"{where} is not possible: {first_line(error)} (see python -m specbench --help)"


def known_keys(overrides: Sequence[str]) -> list[str]:
    """Every key that can be set, given the options chosen by these overrides: for "did you mean" in errors."""
    defaults = OmegaConf.to_container(OmegaConf.load(conf_dir() / "config.yaml"))["defaults"]  # type: ignore[index, call-overload]
    chosen = {group: option for entry in defaults if isinstance(entry, dict) for group, option in entry.items()}
    chosen |= dict(o.split("=", 1) for o in overrides if "=" in o)
    keys = [*RunConfig.model_fields]
    for group in GROUPS:
        file = conf_dir() / group / f"{chosen[group]}.yaml"
        keys += [f"{group}.{key}" for key in option_file(file) if key not in ("_target_", "defaults")]
    return [*keys, *GROUPS, "experiment"]


def option_files(file: Path) -> list[Path]:
    """The files of its group that an option's file begins with, and itself; none if it is not there."""
    if not file.is_file():
        return []
    own: Any = OmegaConf.load(file)
    names = [name for name in own.get("defaults", ()) if isinstance(name, str) and name != "_self_"]
    return [*(each for name in names for each in option_files(file.with_name(f"{name}.yaml"))), file]


def option_file(file: Path) -> dict[str, Any]:
    """What an option's file says, with those of `option_files`; empty if there is none."""
    found: dict[str, Any] = {}
    for each in option_files(file):
        own: Any = OmegaConf.to_container(OmegaConf.load(each))
        found |= own
    return found


def base_of(group: str) -> type[Component]:
    """The base class of what can be chosen in a group."""
    module, _, name = GROUPS[group].base.rpartition(".")
    found: type[Component] = getattr(import_module(module), name)
    return found
