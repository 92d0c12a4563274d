"""Small trainings."""

from hydra import compose, initialize_config_dir

from specbench.config.paths import conf_dir


def training(*overrides):
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("train", overrides=list(overrides))
