"""Hydra composes the same files hundreds of times in these tests: what cannot differ is found once.

`install` replaces functions for the process. `OmegaConf.load` parses each text once, and Hydra each override. A command
is asked once whether it is a sweep: Hydra composes the whole configuration for that question and then once more, and
nothing of ours but an experiment sets `hydra.mode`. The map of choices, from which Hydra reads interpolations in lists
of defaults, is made only where there is one. What follows from the choice of files alone is kept: the list of defaults,
and the files put together, to which each command's values are given. Where a folder of a user's is searched, whose
files may change, nothing is kept. A composition has its own list of places to search, which it may replace, but no
copy of what they hold.
"""

import copy
import io
import pickle
from dataclasses import replace
from functools import cache

import yaml
from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.hydra import Hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from specbench.config.compose import conf_dir

read_yaml, find_mode = OmegaConf.load, Hydra.get_mode
read_rule, map_choices = OverridesParser.parse_rule, defaults_list._create_interpolation_map
list_defaults, put_together = defaults_list.create_defaults_list, ConfigLoaderImpl._compose_config_from_defaults_list
OURS = {f"file://{conf_dir()}", str(conf_dir())}
DECIDE = ("experiment=", "hydra.mode", "hydra.searchpath")  # how overrides begin that may say what a command is
NO_CHOICES = OmegaConf.create()
modes: dict[tuple[str, ...], object] = {}
rules: dict[tuple[str, str], object] = {}
lists: dict[str, object] = {}
wholes: dict[str, bytes] = {}


@cache
def parsed(text: str) -> bytes:
    return pickle.dumps(read_yaml(io.StringIO(text)))


def load_yaml(file):
    if not hasattr(file, "read"):
        return read_yaml(file)
    try:
        return pickle.loads(parsed(file.read()))
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


def is_ours(repo) -> bool:
    return all(source.scheme() != "file" or source.path in OURS for source in repo.get_sources())


def create_defaults_list(repo, config_name, overrides_list, **how):
    if not is_ours(repo):
        return list_defaults(repo, config_name, overrides_list, **how)
    given = defaults_list.Overrides(repo, overrides_list)
    key = repr((config_name, how, given.override_choices, given.append_group_defaults, given.deletions))
    if key not in lists:
        lists[key] = list_defaults(repo, config_name, overrides_list, **how)
    return replace(lists[key], config_overrides=given.config_overrides)


def compose_defaults(loader, defaults, repo):
    if not is_ours(repo):
        return put_together(loader, defaults, repo)
    if (key := repr(defaults)) not in wholes:
        wholes[key] = pickle.dumps(put_together(loader, defaults, repo))
    return pickle.loads(wholes[key])


def own_places(self, repository):
    self.delegate, self.cache = copy.copy(repository), {}


def install() -> None:
    CachingConfigRepository.__init__ = own_places
    OverridesParser.parse_rule, defaults_list._create_interpolation_map = parse_rule, choices
    config_loader_impl.create_defaults_list = create_defaults_list
    ConfigLoaderImpl._compose_config_from_defaults_list = compose_defaults
    OmegaConf.load, Hydra.get_mode = staticmethod(load_yaml), get_mode
