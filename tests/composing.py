"""Hydra composes the same files hundreds of times in these tests: what cannot differ is found once.

`install` replaces two functions for the process: `OmegaConf.load` parses each text once, and a command is asked once
whether it is a sweep. Hydra composes the whole configuration for that question and then once more; nothing of ours but
an experiment sets `hydra.mode`.
"""

import io
from functools import cache

import yaml
from hydra._internal.hydra import Hydra
from omegaconf import OmegaConf

read_yaml, find_mode = OmegaConf.load, Hydra.get_mode
DECIDE = ("experiment=", "hydra.mode", "hydra.searchpath")  # how overrides begin that may say what a command is
modes: dict[tuple[str, ...], object] = {}


@cache
def parsed(text: str):
    return OmegaConf.to_container(read_yaml(io.StringIO(text)))


def load_yaml(file):
    if not hasattr(file, "read"):
        return read_yaml(file)
    try:
        return OmegaConf.create(parsed(file.read()))
    except yaml.YAMLError:  # which names the file
        file.seek(0)
        return read_yaml(file)


def get_mode(hydra, config_name, overrides):
    key = (config_name, *(word for word in overrides if word.startswith(DECIDE)))
    if key not in modes:
        modes[key] = find_mode(hydra, config_name, overrides)
    return modes[key]


def install() -> None:
    OmegaConf.load, Hydra.get_mode = staticmethod(load_yaml), get_mode
