"""The checkpoints of a run as folders, which other engines convert or load."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specbench.component import chosen_class
from specbench.config.compose import compose
from specbench.drafters.model import ModelDrafter
from specbench.errors import ConfigError
from specbench.models.checkpoint import local_path
from specbench.models.pretrained import PretrainedModel, load_config


def folders(overrides: Sequence[str]) -> list[Path]:
    """The folder of the target of a run with these overrides, then that of its drafter if that is a model of its own.
    A GGUF file is converted first. Raises ConfigError."""
    config = compose(["name=peers", *overrides])
    _, target = chosen_class(config.get("target"), "target", PretrainedModel, "target=NAME")
    chosen: list[tuple[str, Any]] = [("target", target)]
    if config.drafter.get("_target_") == f"{ModelDrafter.__module__}.{ModelDrafter.__qualname__}":
        chosen.append(("drafter", chosen_class(config.drafter, "drafter", ModelDrafter, "drafter=NAME")[1]))
    return [folder(settings, role) for role, settings in chosen]


def folder(settings: Any, role: str) -> Path:
    """That of a local checkpoint or of the hub's cache. Raises ConfigError."""
    load_config(settings, role)  # converts, or downloads what is small
    path = local_path(settings.path)
    if not path.is_dir():
        from huggingface_hub import snapshot_download

        path = Path(snapshot_download(settings.path, revision=settings.revision))
    if settings.weights == "random":
        raise ConfigError(f"{role}.weights=random is not possible with other engines, which load checkpoints")
    return path.resolve()


def name_of(path: Path) -> str:
    """The name of what is converted from a folder: its own, and for the hub's cache that of the repository."""
    hub = [part for part in path.parts if part.startswith("models--")]
    return f"{hub[-1]}-{path.name[:12]}" if hub else path.name
