"""Hydra composes the same files hundreds of times in these tests: what cannot differ is found once.

`install` replaces functions for the process. `OmegaConf.load` parses each text once. What follows from the choice of
files alone is kept: the list of defaults, and the files put together, to which each command's values are given. Where
a folder of a user's is searched, whose files may change, nothing is kept.
"""

import io
import pickle
from dataclasses import replace
from functools import cache

import yaml
from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import OmegaConf

from specbench.config.compose import conf_dir

read_yaml, list_defaults = OmegaConf.load, defaults_list.create_defaults_list
put_together = ConfigLoaderImpl._compose_config_from_defaults_list
OURS = {f"file://{conf_dir()}", str(conf_dir())}
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


def install() -> None:
    config_loader_impl.create_defaults_list = create_defaults_list
    ConfigLoaderImpl._compose_config_from_defaults_list = compose_defaults
    OmegaConf.load = staticmethod(load_yaml)
