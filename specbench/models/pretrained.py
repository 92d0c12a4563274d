"""Loads Hugging Face checkpoints: from a local folder or a hub id, or random weights in a model's shape."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from transformers import PreTrainedModel

from specbench.context import Context
from specbench.identity import of_checkpoint
from specbench.models.language_model import LanguageModel
from specbench.paths import SHIPPED
from specbench.settings import BaseSettings, ConfigError, setting

Extras = TypeVar("Extras", bound=PreTrainedModel)


class PretrainedModel(LanguageModel):
    """A causal language model from `path`, or with random weights in its real shape."""

    @dataclass
    class Settings(BaseSettings):
        path: str = setting(required="a local folder or a hub id")
        revision: str | None = None
        weights: str = setting(choices=("pretrained", "random"))
        chat_template: str = setting(choices=("auto", "always", "never"))
        shape: dict[str, Any] = field(default_factory=dict)

        def check(self, prefix: str) -> None:
            """Raises ConfigError, before anything loads, if a path that can only be a folder is none."""
            path = local_path(self.path)
            looks_local = self.path.startswith((".", "/", "~", "shipped:")) or self.path.count("/") > 1
            if looks_local and not (path / "config.json").is_file():
                raise ConfigError(
                    f"{prefix}path={self.path} is not a model: it must be a hub id or a folder with a config.json"
                )

        def models(self) -> Sequence[BaseSettings]:
            return (self,)

        def sources(self) -> Mapping[str, str]:
            return {"path": of_checkpoint(local_path(self.path), self.path, self.revision)}

    @classmethod
    def from_settings(cls, settings: Settings, context: Context, role: str = "target") -> "PretrainedModel":
        """Loads the checkpoint. Errors name the group `role`. Raises ConfigError."""
        return cls(settings, context, role)

    def __init__(self, settings: Settings, context: Context, role: str):
        tokenizer = load_tokenizer(settings, role)
        self.load_again = partial(load_module, settings, role, context.device, context.dtype, context.seed)
        self.random_weights = settings.weights == "random"
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if settings.chat_template == "always" and not has_template and not self.random_weights:
            raise ConfigError(
                f"{role}.chat_template=always is not possible: the tokenizer of {settings.path} has no chat template, "
                "use auto or never"
            )
        super().__init__(
            self.load_again(),
            tokenizer,
            name=settings.path,
            sampling=context.sampling,
            new_cache=context.new_cache,
            executor=context.executor,
            chat_template=has_template and settings.chat_template != "never",
        )

    def stock_module(self) -> PreTrainedModel:
        """The module as transformers made it; loaded again if the executor may have changed it."""
        return self.load_again() if self.executor.changes_modules else self.module


def local_path(path: str) -> Path:
    """The path of a folder; `shipped:NAME` is a model that comes with specbench."""
    if path.startswith("shipped:"):
        return SHIPPED / path.removeprefix("shipped:")
    return Path(os.path.expanduser(path))


def load_tokenizer(settings: PretrainedModel.Settings, role: str) -> Any:
    """The model's own tokenizer, or the shipped one for the shipped models and for random weights without a tokenizer
    at hand. Raises ConfigError."""
    source = _source(settings)
    shares = settings.weights == "random" or settings.path.startswith("shipped:")
    if shares and not (Path(source) / "tokenizer_config.json").is_file():
        source = str(SHIPPED / "target")
    try:
        return transformers.AutoTokenizer.from_pretrained(source, revision=settings.revision)
    except (OSError, ValueError) as error:
        raise ConfigError(_what_is_missing(settings.path, role, error)) from error


def load_config(settings: PretrainedModel.Settings, role: str) -> transformers.PretrainedConfig:
    """The model's shape: that of the checkpoint or, for random weights, of the settings. Raises ConfigError."""
    source = _source(settings)
    config: transformers.PretrainedConfig
    if settings.weights == "random" and not (Path(source) / "config.json").is_file():
        if not settings.shape:
            raise ConfigError(
                f"{role}.path={settings.path} has no shape for {role}.weights=random: give a folder with a "
                "config.json, or choose a named target or drafter, which list theirs"
            )
        shape = dict(settings.shape)
        config = transformers.AutoConfig.for_model(shape.pop("model_type"), **shape)
        return config
    try:
        config = transformers.AutoConfig.from_pretrained(source, revision=settings.revision)
    except (OSError, ValueError) as error:
        raise ConfigError(_what_is_missing(settings.path, role, error)) from error
    return config


def load_module(
    settings: PretrainedModel.Settings, role: str, device: torch.device, dtype: torch.dtype, seed: int
) -> PreTrainedModel:
    """The module as transformers makes it. For random weights, which follow from `seed`, nothing is downloaded. Errors
    name the group `role`. Raises ConfigError."""
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    options = {"dtype": dtype, "attn_implementation": "sdpa"}
    module: Any
    if settings.weights == "random":
        torch.manual_seed(seed)
        with torch.device(device):
            module = transformers.AutoModelForCausalLM.from_config(load_config(settings, role), **options)
    else:
        try:
            module = transformers.AutoModelForCausalLM.from_pretrained(
                _source(settings), revision=settings.revision, **options
            )
        except (OSError, ValueError) as error:
            raise ConfigError(_what_is_missing(settings.path, role, error)) from error
    loaded: PreTrainedModel = module.to(device).eval()
    return loaded


def load_extras(kind: type[Extras], path: str, key: str, model: LanguageModel) -> Extras:
    """Heads or look-ahead embeddings that were trained for a model: `shipped:NAME`, a folder or a hub id. Raises
    ConfigError if they are missing or are for another hidden size."""
    source = local_path(path)
    try:
        extras: Any = kind.from_pretrained(str(source) if source.is_dir() else path, dtype=model.dtype)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ConfigError(
            f"{key}={path} could not be loaded ({reason}): train it with python -m specbench.train and give its folder"
        ) from error
    embedding: Any = model.module.get_input_embeddings()
    hidden = embedding.weight.shape[1]
    if extras.config.hidden_size != hidden:
        raise ConfigError(
            f"{key}={path} is for hidden states of {extras.config.hidden_size}, but {model.name} has {hidden}"
        )
    loaded: Extras = extras.to(model.device).eval()
    return loaded


def _source(settings: PretrainedModel.Settings) -> str:
    path = local_path(settings.path)
    return str(path) if path.is_dir() else settings.path


def _what_is_missing(path: str, role: str, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0].rstrip(".")
    return (
        f"{role}.path={path} could not be loaded ({reason}): either log in with `hf auth login` to an account "
        f"that has been granted access, or download the model and give {role}.path=FOLDER, or time its real "
        f"shape without weights with {role}.weights=random"
    )
