"""Recurrent and hybrid models: parts of their memory are states, which cannot be cut to a length."""

from typing import Any

from specbench.settings import ConfigError

ATTENTION = (
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "indexed_attention",
)  # kinds of layers that can be rolled back


def refuse_recurrent(module: Any, name: str) -> None:
    """Raises ConfigError if a module of transformers keeps a state in place of keys and values in some of its
    layers."""
    config = module.config if module.config.is_encoder_decoder else module.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or [])
    if kinds - set(ATTENTION):
        raise ConfigError(
            f"{name} has layers of kind {', '.join(sorted(kinds))}: only attention layers can be rolled back"
        )
    if getattr(module, "_is_stateful", False):
        raise ConfigError(f"{name} is a {type(module).__name__}, which is recurrent: its state cannot be rolled back")
