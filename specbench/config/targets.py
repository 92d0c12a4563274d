"""Targets whose weights several runs of one process share."""

import json
from collections.abc import Callable
from typing import Any

from specbench.config.checks import Checked
from specbench.context import Context
from specbench.models.language_model import LanguageModel

LOADED_WITH = ("target", "executor", "device", "dtype", "attention", "seed")  # settings that a loaded module depends on


class Targets:
    """The targets that were loaded so far, by the settings that they were loaded with."""

    def __init__(self) -> None:
        self._loaded: dict[str, LanguageModel] = {}

    def has(self, checked: Checked) -> bool:
        """Whether the target of these settings is loaded."""
        return _key(checked) in self._loaded

    def get(self, checked: Checked, context: Context, load: Callable[[Context], LanguageModel]) -> LanguageModel:
        """The target of these settings, with the sampling, cache and executor of `context`: loaded by `load` at most
        once."""
        known = self._loaded.get(_key(checked))
        if known is not None:
            return known.shared(context.sampling, context.new_cache, context.executor)
        return self._loaded.setdefault(_key(checked), load(context))


def _key(checked: Checked) -> str:
    settings: dict[str, Any] = {key: checked.resolved.get(key) for key in LOADED_WITH}
    return json.dumps(settings, sort_keys=True, default=str)
