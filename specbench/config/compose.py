"""The settings of a run, and how configurations are composed; what Hydra does not accept becomes one sentence.

Each group's YAML in `conf/` names its class with Hydra's `_target_`; the class has its settings as a nested pydantic
model. A new component is one .py and one .yaml; a new scalar is one field here and one line in `conf/config.yaml`.
"""

import hashlib
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.config_loader import ConfigLoader
from hydra.core.utils import setup_globals
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from pydantic import Field

from specbench.data.files import PACKAGE, place_of
from specbench.errors import ConfigError, first_line, shown, unknown, visible
from specbench.settings import LARGEST_GAMMA, LARGEST_SEED, MOST_BEAMS, BaseSettings, Lenience, Temperature, TopK, TopP

# Groups of `conf/`, with the base class of their options: imported when needed, since most load torch.
GROUPS = {
    "target": "specbench.models.language_model.LanguageModel",
    "drafter": "specbench.drafters.base.Drafter",
    "gamma_policy": "specbench.policies.base.GammaPolicy",
    "verifier": "specbench.verifiers.base.Verifier",
    "decoding": "specbench.config.decoding.Decoding",
    "lenience_policy": "specbench.policies.base.LeniencePolicy",
    "cache": "specbench.cache.slots.SlotCache",
    "executor": "specbench.executors.base.Executor",
    "data": "specbench.data.prompts.Data",
    "workload": "specbench.policies.workload.Workload",
    "peers": "specbench.peers.Peers",
    "logger": "specbench.report.loggers.Logger",
}
# Settings that no number depends on: a finished run that differs in these alone is not repeated.
LABELS = ("name", "logger", "force", "strict", "experiment")
# Settings that plain decoding does not depend on: methods that differ in these alone share it.
DRAFTING = ("drafter", "gamma", "gamma_policy", "verifier", "lenience", "lenience_policy", "verdict_tokens", "peers")
# Settings that a loaded target depends on.
LOADED = ("target", "executor", "device", "dtype", "attention", "seed")
MOST_STOPS, LONGEST_STOP = 64, 1000  # strings, and characters of one: all are searched after every round
LONGEST, DEEPEST = 120, 8  # bytes of a folder's name, folders of a run's name
_LOADING = threading.Lock()  # Hydra's plugins and resolvers are of the process


class RunConfig(BaseSettings):
    """The run's scalars."""

    name: str
    gamma: int = Field(ge=0, le=LARGEST_GAMMA)
    beams: int = Field(ge=1, le=MOST_BEAMS)
    lenience: Lenience
    temperature: Temperature
    top_k: TopK
    top_p: TopP
    repetition_penalty: float = Field(ge=1e-2, le=1e2)
    max_new_tokens: int = Field(ge=1, le=10**7)
    batch_size: int = Field(ge=1, le=10**6)
    prefill_chunk: int = Field(ge=1, le=10**7)
    stop: list[str]
    seed: int = Field(ge=0, le=LARGEST_SEED)
    order: int = Field(ge=0, le=LARGEST_SEED)
    skip: int = Field(ge=0, le=10**9)
    take: int = Field(ge=0, le=10**9)
    repeats: int = Field(ge=1, le=1000)
    verdict_tokens: int = Field(ge=0, le=10**9)
    strict: bool
    device: str = Field(pattern=r"^(auto|cpu|cuda(:(0|[1-9][0-9]?))?)$", description="auto, cpu, cuda or cuda:N")
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    attention: Literal["auto", "sdpa", "triton"]
    force: bool

    def check(self, prefix: str) -> None:
        if len(self.stop) > MOST_STOPS or any(not 0 < len(text) <= LONGEST_STOP for text in self.stop_strings):
            raise ConfigError(
                f"stop={shown(self.stop)} is not allowed: it must be at most {MOST_STOPS} texts of 1 to {LONGEST_STOP} "
                "characters"
            )

    @property
    def stop_strings(self) -> list[str]:
        """`stop`, with its \\n and \\t read as line breaks and tabs, which a shell cannot easily say."""
        return [text.replace("\\n", "\n").replace("\\t", "\t") for text in self.stop]


def conf_dir() -> Path:
    """The folder `conf/`: beside the package in a checkout, inside it in an installed wheel."""
    package = Path(__file__).resolve().parents[1]
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


def loader() -> ConfigLoader:
    """What reads the configurations. Hydra's one object for a whole process, which a notebook or another thread may
    have, is neither needed nor changed."""
    with _LOADING:
        setup_globals()
        return ConfigLoaderImpl(create_config_search_path(str(conf_dir())))


def compose(overrides: Sequence[str], mode: RunMode = RunMode.RUN) -> DictConfig:
    """The configuration that the command line would compose, with Hydra's own part; with MULTIRUN that of a sweep, as
    of `-m`. Raises ConfigError."""
    refuse_no_overrides(overrides)
    with explained(overrides):
        return loader().load_configuration("config", list(overrides), mode, from_shell=False)


def compose_as(choices: Mapping[str, str], settings: Mapping[str, Any], words: Sequence[str]) -> DictConfig:
    """The configuration of these options by group and these settings, whatever the defaults are, with overrides that
    replace some of them. Raises ConfigError."""
    keys = {word.partition("=")[0].lstrip("+") for word in words}
    kept = [f"{group}={name}" for group, name in choices.items() if group not in keys]
    config = compose([*kept, *words])
    given = {key: OmegaConf.select(config, key) for key in keys}
    with open_dict(config):
        config.merge_with(settings)
        for key, value in given.items():
            OmegaConf.update(config, key, value, merge=False)
    return config


def refuse_no_overrides(words: Sequence[str], options: Iterable[str] = ()) -> None:
    """Raises ConfigError for words that Hydra would not explain: another command, a folder without a name, or a setting
    with dashes that is none of the command's `options`."""
    place = Path(__file__).parents[1] / (words[0] if words and words[0].isidentifier() else "none")
    file = place.with_suffix(".py")
    if (place / "__main__.py").is_file() or (file.is_file() and "__main__" in file.read_text()):
        raise ConfigError(f"{words[0]} is a command of its own: python -m specbench.{' '.join(words)}")
    for number, word in enumerate(words):
        key, equals, value = word.partition("=")
        if re.fullmatch(r"\+*hydra\.(run|sweep)\.dir", key) and equals and value in ("", "null", "''", '""'):
            raise ConfigError(f"{key}={shown(value)} is not allowed: it must be the name of a folder")
        if not key.startswith("--") or any(option.startswith(key) for option in options):
            continue
        name = key[2:].replace("-", "_")
        if name not in (keys := known_keys(words)):
            raise unknown(name, keys, "setting (settings are given without --, as gamma=4)")
        after = words[number + 1] if number + 1 < len(words) else ""
        value = value or ("..." if "=" in after or after.startswith("-") else after or "...")
        raise ConfigError(f"{key} is not an option: a setting is given as {name}={value}")


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
        group, _, name = key.rpartition(".")
        own = dict(override.partition("=")[::2] for override in overrides).get(group)
        what = (f"setting of {group}={own}" if own else f"setting of the chosen {group}") if group else "setting"
        every = [*(known_keys(overrides) if keys is None else keys)]
        elsewhere = [known for known in every if known == name or known.endswith(f".{key}")]
        return str(unknown(key, (known for known in every if known.rpartition(".")[0] == group), what, elsewhere))
    if found := re.search(r"Could not find '([^']+)/([^'/]+)'\s+Available options in '[^']+':\n((?:\t.*\n?)*)", text):
        group, option, options = found[1], found[2], found[3].split()
        return str(unknown(f"{group}={option}", (f"{group}={name}" for name in options), "choice"))
    if found := re.search(r"Ambiguous value for argument '(.*?)'\n", text):
        return (
            f"{shown(found[1])} has several values: python -m specbench -m makes a run of each, python -m "
            "specbench.compare also compares them"
        )
    if override := getattr(error, "override", None):
        key, _, value = str(override).partition("=")
        hint = f"; a value with = in it needs quotes: '{key}=\"{value}\"'" if "=" in value else ""
        return f"{shown(override)} is not an override that Hydra can read: {first_line(error)}{hint}"
    where = getattr(error, "full_key", None) or "hydra."
    if where.startswith("hydra.") and overrides:  # a folder's name holds all overrides
        where = shown(", ".join(override for override in overrides if not override.startswith("-")))
    return f"{where} is not possible: {first_line(error)} (see python -m specbench --help)"


def known_keys(overrides: Sequence[str]) -> list[str]:
    """Every key that can be set, given the options chosen by these overrides: for "did you mean" in errors."""
    config: Any = OmegaConf.to_container(OmegaConf.load(conf_dir() / "config.yaml"))
    chosen: dict[str, str] = {}
    for entry in config["defaults"]:
        chosen |= entry if isinstance(entry, dict) else {}
    chosen |= dict(override.split("=", 1) for override in overrides if "=" in override)
    keys = [*RunConfig.model_fields, *GROUPS, "experiment"]
    for group in GROUPS:
        file = conf_dir() / group / f"{chosen[group]}.yaml"
        keys += [f"{group}.{key}" for key in option_file(file) if key not in ("_target_", "defaults")]
    return keys


def option_file(file: Path) -> dict[str, Any]:
    """What an option's file says, with the files of its group that it begins with; empty if there is none."""
    own: Any = OmegaConf.to_container(OmegaConf.load(file)) if file.is_file() else {}
    names = [name for name in own.get("defaults", ()) if isinstance(name, str) and name != "_self_"]
    before = [option_file(file.with_name(f"{name}.yaml")) for name in names]
    return {key: value for each in (*before, own) for key, value in each.items()}


def fields(override_dirname: str) -> str:
    """The overrides, `gamma=5,temperature=0`, as the name of a folder; `default` if there are none. Where it is too
    long, paths lose their folders, and if need be the end is cut; a hash of all overrides follows."""
    name = re.sub(r"[^\w.,=+-]+", "_", override_dirname)
    if len(name.encode()) > LONGEST:
        digest = hashlib.sha256(override_dirname.encode(errors="replace")).hexdigest()[:8]
        short = re.sub(r"(?<=[=,\['\"])[^=,\['\"]*/(?=[^=,/])", "", override_dirname)
        short = re.sub(r"[^\w.,=+-]+", "_", short)
        name = f"{short.encode()[:LONGEST].decode(errors='ignore')}-{digest}"
    return name or "default"


def inside_outputs(name: object) -> str:
    """The name of a run, or of a multirun, as a path below outputs/. Raises ConfigError if it is none, or leaves it."""
    text = str(name)
    parts = text.split("/")
    fits = visible(text) == text and len(parts) <= DEEPEST and all(len(part.encode()) <= LONGEST for part in parts)
    if name is None or not fits or any(part.strip() in ("", ".", "..") for part in parts):
        raise ConfigError(
            f"name={shown(name)} is not allowed: it must be the name of a folder inside outputs/, of at most {LONGEST} "
            "characters, without . or .. and without control characters"
        )
    return text


def hub_or_package(hub_id: str, file: str) -> str:
    """`package:FILE` if its Python package is installed and the local cache lacks the hub id's weights; else the hub
    id."""
    from huggingface_hub import try_to_load_from_cache

    package = f"{PACKAGE}{file}"
    cached = isinstance(try_to_load_from_cache(hub_id, "model.safetensors"), str)
    return package if place_of(package) != package and not cached else hub_id


# Functions that conf/config.yaml and conf/train.yaml use.
OmegaConf.register_new_resolver("fields", fields, replace=True)
OmegaConf.register_new_resolver("hub_or_package", hub_or_package, replace=True)
OmegaConf.register_new_resolver("inside_outputs", inside_outputs, replace=True)
OmegaConf.register_new_resolver("label_keys", lambda *more: [*LABELS, *more], replace=True)
