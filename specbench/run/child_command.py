"""The command of a run of this command's, for a process of its own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from specbench.config.paths import conf_dir


def overrides(folder: Path, own: Mapping[str, Any] | None = None) -> list[str]:
    """What stands behind `python -m specbench` for this job in `folder`: its overrides, with `own` values of some
    keys."""
    job, own = HydraConfig.get(), own or {}
    quoted = str(folder.resolve()).replace("\\", "\\\\").replace("'", "\\'")
    return [
        *("--config-path", _config_path(), "--config-name", job.job.config_name or "config"),
        *_config_dir(),
        *(override for override in job.overrides.task if _key(override) not in own),
        *(override for override in job.overrides.hydra if _key(override).startswith("hydra.searchpath")),
        *(f"{key}={value}" for key, value in own.items()),
        f"hydra.run.dir='{quoted}'",
    ]


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def _config_path() -> str:
    """The folder of the configuration, if the command line names another one."""
    sources = HydraConfig.get().runtime.config_sources
    return next((str(source.path) for source in sources if source.provider == "main"), str(conf_dir()))


def _config_dir() -> list[str]:
    """--config-dir, as the command line has it."""
    sources = HydraConfig.get().runtime.config_sources
    return [word for source in sources if source.provider == "command-line" for word in ("--config-dir", source.path)]
