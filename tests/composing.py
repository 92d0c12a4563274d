"""Hydra composes the same files hundreds of times in these tests: what cannot differ is found once.

`install` replaces functions for the process. `OmegaConf.load` parses each text once, and Hydra each override. A command
is asked once whether it is a sweep: Hydra composes the whole configuration for that question and then once more, and
nothing of ours but an experiment sets `hydra.mode`. The map of choices, from which Hydra reads interpolations in lists
of defaults, is made only where there is one.
"""

import copy
import io
from functools import cache

import yaml
from hydra._internal import defaults_list
from hydra._internal.hydra import Hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

read_yaml, find_mode = OmegaConf.load, Hydra.get_mode
read_rule, map_choices = OverridesParser.parse_rule, defaults_list._create_interpolation_map
DECIDE = ("experiment=", "hydra.mode", "hydra.searchpath")  # how overrides begin that may say what a command is
NO_CHOICES = OmegaConf.create()
modes: dict[tuple[str, ...], object] = {}
rules: dict[tuple[str, str], object] = {}


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


def parse_rule(parser, text, rule):
    key = text, rule
    if key not in rules:
        rules[key] = read_rule(parser, text, rule)
    return copy.copy(rules[key])  # Hydra sets its attributes


def choices(overrides, defaults, self_added):
    interpolated = any("${" in str(value) for default in defaults for value in vars(default).values())
    return map_choices(overrides, defaults, self_added) if interpolated else NO_CHOICES


def install() -> None:
    OverridesParser.parse_rule, defaults_list._create_interpolation_map = parse_rule, choices
    OmegaConf.load, Hydra.get_mode = staticmethod(load_yaml), get_mode
