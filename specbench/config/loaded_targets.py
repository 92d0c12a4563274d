"""Targets whose weights several runs of one process share."""

import json
from collections.abc import Callable
from typing import Any

from specbench.config.validate import ValidatedConfig
from specbench.models.context import Context
from specbench.models.language_model import LanguageModel
from specbench.run_config import Role, with_role


class Targets:
    """The targets that were loaded so far, by the settings that they were loaded with."""

    def __init__(self) -> None:
        self._loaded: dict[str, tuple[LanguageModel, Any]] = {}  # with what its executor knew when it was loaded

    def has(self, checked: ValidatedConfig) -> bool:
        """Whether the target of these settings is loaded."""
        return _key(checked) in self._loaded

    def get(
        self, checked: ValidatedConfig, context: Context, load: Callable[[Context], LanguageModel]
    ) -> LanguageModel:
        """The target of these settings, with the sampling, cache and executor of `context`: loaded by `load` at most
        once."""
        key = _key(checked)
        if key in self._loaded:
            model, loaded = self._loaded[key]
            context.executor.share(loaded)
            return model.shared(context.sampling, context.new_cache, context.executor)
        model = load(context)
        self._loaded[key] = model, context.executor.loaded()
        return model


def _key(checked: ValidatedConfig) -> str:
    settings: dict[str, Any] = {key: checked.resolved.get(key) for key in with_role(Role.LOADED)}
    return json.dumps(settings, sort_keys=True, default=str)
