"""The settings of a run, what it decodes, and how configurations are composed.

Each group's YAML in `conf/` names its class with Hydra's `_target_`; the class has its settings as a nested pydantic
model. A new component is one .py and one .yaml; a new scalar is one field here and one line in `conf/config.yaml`.
"""

import hashlib
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.config_loader import ConfigLoader
from hydra.core.utils import setup_globals
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from pydantic import Field

from specbench.errors import ConfigError, shown, unknown, visible
from specbench.settings import (
    LARGEST_GAMMA,
    LARGEST_SEED,
    MOST_BEAMS,
    BaseSettings,
    Component,
    Lenience,
    Temperature,
    TopK,
    TopP,
    hub_or_package,
)

# Groups of `conf/`, with the base class of their options: imported when needed, since most load torch.
GROUPS = {
    "target": "specbench.models.language_model.LanguageModel",
    "drafter": "specbench.drafters.base.Drafter",
    "gamma_policy": "specbench.policies.base.GammaPolicy",
    "verifier": "specbench.verifiers.base.Verifier",
    "decoding": "specbench.config.compose.Decoding",
    "lenience_policy": "specbench.policies.base.LeniencePolicy",
    "cache": "specbench.cache.slots.SlotCache",
    "executor": "specbench.executors.base.Executor",
    "data": "specbench.data.prompts.Data",
    "workload": "specbench.policies.workload.Workload",
    "peers": "specbench.peers.Peers",
    "logger": "specbench.report.files.Logger",
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


class Decoding(Component):
    """A text that is sampled from the standardized distribution (section 2.2): by Algorithm 1, and plainly by one draw
    per target call. One that decodes otherwise has `decode`, `read` and `results` as `beams.beam.BeamDecoding` has."""

    samples: ClassVar[bool] = True
    generate_settings: tuple[str, ...] = ()  # settings of transformers' generation_config that it applies

    @classmethod
    def target_tokens(cls, settings: Any, nodes: int, gamma: int) -> int:
        """The most tokens that a target call reads, for drafts of at most `nodes` guesses and `gamma` levels."""
        return nodes + 1

    @classmethod
    def spare(cls, settings: Any, nodes: int, gamma: int, new_tokens: int) -> int:
        """Cache columns that a request may need beyond its limit, with `new_tokens` new tokens at most."""
        return nodes + 1

    def refuse_models(self, models: Sequence[Any]) -> None:
        """Raises ConfigError if it cannot decode with these models, the target first, which are loaded."""


def conf_dir() -> Path:
    """The folder `conf/`: beside the package in a checkout, inside it in an installed wheel."""
    package = Path(__file__).resolve().parents[1]
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


def loader() -> ConfigLoader:
    """What reads the configurations. Hydra's one object for a process, which a notebook may have, is not touched."""
    with _LOADING:
        setup_globals()
        return ConfigLoaderImpl(create_config_search_path(str(conf_dir())))


def compose(overrides: Sequence[str], mode: RunMode = RunMode.RUN) -> DictConfig:
    """The configuration that the command line composes in this mode, with Hydra's own part. Raises ConfigError."""
    refuse_no_overrides(overrides)
    with explained(overrides):
        return loader().load_configuration("config", list(overrides), mode, from_shell=False)


def compose_as(choices: Mapping[str, str], settings: Mapping[str, Any], words: Sequence[str]) -> DictConfig:
    """The configuration of these options by group and settings, of which `words` replace some. Raises ConfigError."""
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
    """Raises ConfigError for another command, a folder without a name, or a setting with dashes that is no option."""
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
        from specbench.config.mistakes import explain

        raise ConfigError(explain(error, overrides, known_keys)) from error


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


# Functions that conf/config.yaml and conf/train.yaml use.
OmegaConf.register_new_resolver("fields", fields, replace=True)
OmegaConf.register_new_resolver("hub_or_package", hub_or_package, replace=True)
OmegaConf.register_new_resolver("inside_outputs", inside_outputs, replace=True)
OmegaConf.register_new_resolver("label_keys", lambda *more: [*LABELS, *more], replace=True)
