"""Checks a composed configuration, and all that can be checked before models are loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specbench.config.compose import inside_outputs
from specbench.config.scalars import GROUPS, RunConfig
from specbench.errors import ConfigError, first_line
from specbench.executors import waiting
from specbench.settings import Choice, chosen, validate

if TYPE_CHECKING:
    import torch

    from specbench.models.sizes import ModelSize

WITHOUT_TORCH = ("data", "workload", "logger")  # groups that are checked before torch is loaded
# What a beam search needs: scalars, and options of groups.
OF_BEAMS = {"temperature": 0, "top_k": 0, "top_p": 1, "repetition_penalty": 1, "lenience": 1, "batch_size": 1,
            "stop": []}  # fmt: skip
WITH_BEAMS = {"verifier": "speculative", "lenience_policy": "fixed", "gamma_policy": "fixed",
              "workload": "all_at_once", "peers": "none"}  # fmt: skip


@dataclass(frozen=True)
class Checked:
    """A configuration whose keys, types, bounds and combinations have been checked."""

    root: RunConfig
    choices: Mapping[str, Choice]  # by group
    resolved: dict[str, Any]

    @property
    def names(self) -> dict[str, str]:
        """The option that was chosen in each group."""
        return {group: choice.name for group, choice in self.choices.items()}


def check(config: DictConfig, names: Mapping[str, str] | None = None) -> Checked:
    """Checks a composed configuration. `names` are the options that were chosen, by group; by default those that Hydra
    stored in the configuration. Raises ConfigError."""
    names = names or OmegaConf.select(config, "hydra.runtime.choices") or {}
    others = (*GROUPS, "experiment", "hydra")
    scalars = OmegaConf.masked_copy(config, [str(key) for key in config if key not in others])
    scalars._set_parent(config)
    root = validate(RunConfig, scalars)
    inside_outputs(root.name)
    choices = {group: choose(config, group, names.get(group)) for group in WITHOUT_TORCH}
    waiting.choose()  # before the classes below load torch
    for group in GROUPS:
        if group not in choices:
            choices[group] = choose(config, group, names.get(group))

    from specbench.models.context import pick_device

    check_combinations(root, choices, pick_device(root.device))
    own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    resolved: Any = OmegaConf.to_container(own, resolve=True)
    return Checked(root, choices, resolved)


def choose(config: DictConfig, group: str, name: str | None) -> Choice:
    """The class and the checked settings of a group. Raises ConfigError."""
    try:
        node = OmegaConf.select(config, group)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{group} is not set: {first_line(error)}, choose one with {group}=NAME") from error
    return chosen(node, group, base_of(group), name=name)


def base_of(group: str) -> type[Any]:
    """The base class of what can be chosen in a group."""
    module, _, name = GROUPS[group].rpartition(".")
    found: type[Any] = vars(import_module(module))[name]
    return found


def check_combinations(root: RunConfig, choices: Mapping[str, Choice], device: "torch.device") -> None:
    """What combinations of settings cannot do. Raises ConfigError, which says what to choose instead."""
    drafter, verifier, policy = choices["drafter"], choices["verifier"], choices["gamma_policy"]
    cache, executor, decoding = choices["cache"], choices["executor"], choices["decoding"]
    trees = drafter.kind.branches(drafter.settings)
    lenience = choices["lenience_policy"].kind.lowest(choices["lenience_policy"].settings, root.lenience)

    def refuse(choice: Choice, why: str) -> NoReturn:
        group = next(group for group, own in choices.items() if own is choice)
        raise ConfigError(f"{group}={choice.name} is not possible {why}")

    if trees and not verifier.kind.trees:
        refuse(verifier, f"with drafter={drafter.name}, which drafts trees: use verifier=iterative, traversal or match")
    if verifier.kind.needs_q and drafter.kind.point_masses(drafter.settings) and root.temperature > 0:
        refuse(verifier, f"with drafter={drafter.name}, whose guesses have no distribution: use verifier=speculative")
    if verifier.kind.only_greedy and root.temperature > 0:
        refuse(verifier, f"with temperature={root.temperature:g}: it must be 0, or use verifier=iterative")
    if lenience < 1 and not verifier.kind.takes_lenience:
        refuse(verifier, "with lenience below 1: use verifier=speculative")
    if policy.kind.watches and (trees or not drafter.kind.ends_early):
        refuse(policy, f"with drafter={drafter.name}: it needs a drafter that is a model, and chains, drafter=model")
    if executor.kind.needs_cuda and device.type != "cuda":
        refuse(executor, f"on device={device}: it needs CUDA, use executor=compiled")
    if executor.kind.fixed_shapes and not cache.kind.fixed_shapes:
        refuse(executor, f"with cache={cache.name}: use cache=static or cache=paged")
    drafter.kind.refuse_target(drafter.settings, choices["target"].settings)
    if decoding.kind.samples:
        if root.beams > 1:
            refuse(decoding, f"with beams={root.beams}: it must be 1, or use decoding=beam")
        return
    for key, only in OF_BEAMS.items():
        if getattr(root, key) != only:
            refuse(decoding, f"with {key}={getattr(root, key)}: it must be {only}, or use decoding=sampling")
    for group, option in WITH_BEAMS.items():
        if choices[group].name != option:
            refuse(decoding, f"with {group}={choices[group].name}: use {group}={option}")
    if not vars(drafter.kind).get("searches", False):
        refuse(decoding, f"with drafter={drafter.name}, which has no beams: use a drafter that is one model")
    if executor.kind.fixed_shapes:
        refuse(decoding, f"with executor={executor.name}, whose calls have few shapes: use executor=auto or eager")


def check_models(root: RunConfig, choices: Mapping[str, Choice], sizes: "Sequence[ModelSize]", largest: int) -> None:
    """What the models of a configuration cannot do; `sizes` has the target's first, then the drafter's, `largest` is
    the policy's largest gamma. Raises ConfigError."""
    target, drafter, executor = choices["target"], choices["drafter"], choices["executor"]
    own_top_k = getattr(drafter.settings, "top_k", None)
    for key, top_k in (("top_k", root.top_k), ("drafter.top_k", own_top_k)):
        if (top_k or 0) > sizes[0].vocab_size:
            tokens = sizes[0].vocab_size
            raise ConfigError(f"{key}={top_k} is not allowed: the target has {tokens} tokens, and 0 is off")
    if largest >= sizes[0].context:
        raise ConfigError(f"gamma={largest} is not possible: the target's context is {sizes[0].context} tokens")
    if any(size.crossing for size in sizes[1:]) and not sizes[0].crossing:
        raise ConfigError(
            f"drafter={drafter.name} is not possible: it is an encoder-decoder, but target.path={target.settings.path} "
            "is not, so its encoder would have no input"
        )
    with_states = (drafter.kind.with_states or not sizes[0].recurrent) and not drafter.kind.trees
    with_states = with_states and (drafter.kind.searches or not any(size.recurrent for size in sizes[1:]))
    with_encoders = drafter.kind.with_encoders
    if any(size.recurrent for size in sizes):
        samples = choices["decoding"].kind.samples
        refuse_others(
            "a model with a recurrent state", root, choices, executor.kind.runs_recurrent, with_states, samples
        )
    if sizes[0].crossing:
        refuse_others("an encoder-decoder", root, choices, executor.kind.runs_encoders, with_encoders)


def refuse_others(
    what: str, root: RunConfig, choices: Mapping[str, Choice], runs: bool, drafts: bool, decodes: bool = True
) -> None:
    """Raises ConfigError unless the executor runs such models, the drafter drafts for them, and so on."""
    for key, value, possible, others in (
        ("drafter", choices["drafter"].name, drafts, "model, ngram or prompt_lookup"),
        ("executor", choices["executor"].name, runs, "auto or eager"),
        ("attention", root.attention, root.attention != "triton", "sdpa"),
        ("decoding", choices["decoding"].name, decodes, "sampling"),
    ):
        if not possible:
            raise ConfigError(
                f"{key}={value} is not possible with target.path={choices['target'].settings.path}, {what}: choose "
                f"{key}={others}"
            )
