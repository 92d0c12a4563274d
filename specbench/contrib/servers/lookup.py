"""Finds a server of OpenAI's completions API: its dialect, its version and the model that it is asked for."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specbench.contrib.servers.dialects import DIALECTS, Dialect
from specbench.contrib.servers.endpoint import Endpoint, ServerError, split
from specbench.decoding.sampling import Sampling
from specbench.errors import ConfigError, shown

AUTO = "auto"
COMPLETIONS = "/v1/completions"
UPPER_CASE = re.compile(r"[A-Z_][A-Z0-9_]*")
LISTED = 20  # models in a sentence
LONGEST_NAME = 1000  # characters of a model's name
SHORT = "a"  # a prompt that is not counted


@dataclass
class Server:
    """A server that answers."""

    endpoint: Endpoint
    dialect: Dialect
    version: str | None
    model: str


def find_server(key: str, url: str, settings: Any) -> Server:
    """The server at a URL, which has completed one token. Raises ConfigError, naming the key, if there is none, if it
    does not serve the model, or if it does not complete."""
    endpoint = Endpoint(split(key, url), settings.timeout, key_of(settings.key_env), settings.answer_timeout)
    try:
        listed = endpoint.get_json("/v1/models")
        models = {model["id"]: model for model in listed["data"]}
        if not all(isinstance(name, str) and name.isprintable() and len(name) <= LONGEST_NAME for name in models):
            raise TypeError("a name of a model is none")
    except ServerError as error:
        if settings.model is None or (error.status or 0) < 500:
            raise config_error(key, url, error, settings) from error
        models = {settings.model: {}}  # `transformers serve` fails to list where it has no cache of models
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{key}={url} is not allowed: it has no list of models at /v1/models, so it must be a server "
                          "with OpenAI's API") from error  # fmt: skip
    dialect, version = dialect_of(endpoint, next(iter(models.values()), {}), settings.dialect)
    server = Server(endpoint, dialect, version, model_of(key, url, models, dialect, settings.model))
    body = {"model": server.model, "prompt": SHORT, "max_tokens": 1, "temperature": 0, "stream": True}
    try:
        for _ in endpoint.stream(COMPLETIONS, body | dialect.fields(Sampling(0.0), [])):
            pass
    except ServerError as error:
        raise config_error(key, url, error, settings) from error
    return server


def key_of(variable: str | None) -> str | None:
    """The API key in an environment variable. Raises ConfigError."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        state = "is not a key" if key else "is not set"
        named = f"={variable}" if UPPER_CASE.fullmatch(variable) else ""  # another word may be the key itself
        raise ConfigError(f"baseline.key_env{named} is not possible: this environment variable {state}")
    return key


def config_error(key: str, url: str, error: ServerError, settings: Any) -> ConfigError:
    """The error of a server as one of the configuration."""
    if error.status in (401, 403):
        allowed = "the key in the environment variable that baseline.key_env names must be one that it knows"
        if settings.key_env is None:
            allowed = "it asks for a key, so name an environment variable that holds it with baseline.key_env=NAME"
    elif error.status is not None:
        allowed = "it must be a server with OpenAI's completions API, which serves baseline.model"
    else:
        allowed = "it must be a server that runs"
    return ConfigError(f"{key}={url} is not possible: {error}; {allowed}")


def dialect_of(endpoint: Endpoint, model: Mapping[str, Any], wanted: str) -> tuple[Dialect, str | None]:
    """The dialect of a server and its version; what it is taken for is asked unless it is `wanted`."""
    for name, kind in DIALECTS.items():
        if wanted in (AUTO, name):
            try:
                return kind(), kind.version(endpoint, model)
            except (ServerError, AttributeError, TypeError):
                if wanted == name:
                    return kind(), None
    raise AssertionError("the last dialect is every server's")


def model_of(key: str, url: str, models: Mapping[str, Any], dialect: Dialect, wanted: str | None) -> str:
    """The model that a server is asked for. Raises ConfigError, listing what it serves, if that cannot be."""
    names = ", ".join(shown(name) for name in [*models][:LISTED]) or "none"
    names += f" and {len(models) - LISTED} more" if len(models) > LISTED else ""
    if wanted is None:
        if len(models) == 1:
            return next(iter(models))
        raise ConfigError(f"baseline.model is not set, and {key}={url} lists {len(models)} models: choose one of them "
                          f"with baseline.model=NAME ({names})")  # fmt: skip
    if wanted not in models and dialect.lists_models:
        raise ConfigError(f"baseline.model={shown(wanted)} is not allowed: {url} serves {names}")
    return wanted
