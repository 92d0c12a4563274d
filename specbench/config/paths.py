"""Folders: configurations, and the names of run folders."""

import hashlib
import re
from pathlib import Path

from omegaconf import OmegaConf

from specbench.data.sources import PACKAGE, UNKNOWN, of_hub, place_of
from specbench.errors import ConfigError, shown, visible
from specbench.run_config import Role, with_role

LONGEST, DEEPEST = 120, 8  # bytes of a folder name, folders of a run's name


def fields(override_dirname: str) -> str:
    """The overrides, `gamma=5,temperature=0`, as a folder name; `default` if there are none. In one that is too long
    paths lose their folders, and if need be the end is cut; a hash of all overrides follows."""
    name = _as_name(override_dirname)
    if len(name.encode()) > LONGEST:
        digest = hashlib.sha256(override_dirname.encode(errors="replace")).hexdigest()[:8]
        short = _as_name(re.sub(r"(?<=[=,\['\"])[^=,\['\"]*/(?=[^=,/])", "", override_dirname))
        name = f"{short.encode()[:LONGEST].decode(errors='ignore')}-{digest}"
    return name or "default"


def _as_name(text: str) -> str:
    """A text without what the name of a folder should not have."""
    return re.sub(r"[^\w.,=+-]+", "_", text)


def inside_outputs(name: object) -> str:
    """The name of a run, or of a multirun, as a path below outputs/. Raises ConfigError if it is none, or leaves it."""
    text = str(name)
    parts = text.split("/")
    fits = visible(text) == text and len(parts) <= DEEPEST and len(max(parts, key=len).encode()) <= LONGEST
    if name is None or not fits or any(part.strip() in ("", ".", "..") for part in parts):
        raise ConfigError(
            f"name={shown(name)} is not allowed: it must be the name of a folder inside outputs/, of at most {LONGEST} "
            "characters, without . or .. and without control characters"
        )
    return text


def conf_dir() -> Path:
    """The folder `conf/`: beside the package in a checkout, inside it in an installed wheel."""
    package = Path(__file__).resolve().parents[1]
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


def hub_or_package(hub_id: str, file: str) -> str:
    """`package:FILE` if its Python package is installed and the local cache lacks the hub id's weights; else the hub
    id."""
    package = f"{PACKAGE}{file}"
    here = place_of(package) != package and of_hub(hub_id, None, "model", "model.safetensors").startswith(UNKNOWN)
    return package if here else hub_id


# Functions that conf/config.yaml and conf/train.yaml use.
OmegaConf.register_new_resolver("fields", fields, replace=True)
OmegaConf.register_new_resolver("hub_or_package", hub_or_package, replace=True)
OmegaConf.register_new_resolver("inside_outputs", inside_outputs, replace=True)
OmegaConf.register_new_resolver("label_keys", lambda *more: [*with_role(Role.LABEL), *more], replace=True)
