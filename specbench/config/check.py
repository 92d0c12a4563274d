"""Checks what can be checked before models are loaded: settings, their combinations, kinds of models, and memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.filesize import decimal

from specbench.config.compose import GROUPS, RunConfig, inside_outputs
from specbench.errors import ConfigError, first_line
from specbench.executors import waiting
from specbench.settings import Choice, chosen, validate

if TYPE_CHECKING:
    import torch

    from specbench.models.load import Context
    from specbench.models.sizes import ModelSize

LOGIT_COPIES = 4  # float32: logits, probabilities, their differences, the exponential race
MOST_START_TOKENS = 2  # of an encoder-decoder's text: the start, and a token that is forced after it
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
    """Checks a composed configuration. `names` are the options by group, if Hydra stored none. Raises ConfigError."""
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

    from specbench.executors.machine import pick_device

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
        chains = "verifier=speculative and a drafter of chains, as drafter=model" if trees else "verifier=speculative"
        refuse(verifier, f"with lenience below 1: use {chains}")
    if policy.kind.watches and (trees or not drafter.kind.ends_early):
        refuse(policy, f"with drafter={drafter.name}: it needs a drafter that is a model, and chains, drafter=model")
    if policy.kind.asks and not drafter.kind.estimates(drafter.settings):
        refuse(policy, f"with drafter={drafter.name}: it needs chains of a DSpark checkpoint with a confidence head")
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
    if not vars(drafter.kind).get("searches", False):
        refuse(decoding, f"with drafter={drafter.name}, which has no beams: use a drafter that is one model")
    for group, option in WITH_BEAMS.items():
        if choices[group].name != option:
            refuse(decoding, f"with {group}={choices[group].name}: use {group}={option}")
    if executor.kind.fixed_shapes:
        refuse(decoding, f"with executor={executor.name}, whose calls have few shapes: use executor=auto or eager")


def check_models(root: RunConfig, choices: Mapping[str, Choice], sizes: "Sequence[ModelSize]", largest: int) -> None:
    """What the models cannot do; `sizes` has the target's first, `largest` is the largest gamma. Raises ConfigError."""
    drafter, executor, target = choices["drafter"], choices["executor"].kind, sizes[0]
    for key, top_k in (("top_k", root.top_k), ("drafter.top_k", vars(drafter.settings).get("top_k"))):
        if (top_k or 0) > target.vocab_size:
            raise ConfigError(f"{key}={top_k} is not allowed: the target has {target.vocab_size} tokens, and 0 is off")
    if largest >= target.context:
        raise ConfigError(f"gamma={largest} is not possible: the target's context is {target.context} tokens")
    path = f"target.path={choices['target'].settings.path}"
    if any(size.crossing for size in sizes[1:]) and not target.crossing:
        raise ConfigError(
            f"drafter={drafter.name} is not possible: it is an encoder-decoder, but {path} is not, so its encoder "
            "would have no input"
        )
    runs = drafts = samples = True
    what = f"{path}, an encoder-decoder"
    if any(size.recurrent for size in sizes):
        what = f"{path}, a model with a recurrent state"
        runs, samples = executor.runs_recurrent, choices["decoding"].kind.samples
        drafts = (drafter.kind.with_states or not target.recurrent) and not drafter.kind.trees
        drafts = drafts and (drafter.kind.searches or not any(size.recurrent for size in sizes[1:]))
    elif target.crossing:
        runs, drafts = executor.runs_encoders, drafter.kind.with_encoders
    else:
        return
    for key, value, possible, others in (
        ("drafter", drafter.name, drafts, "model, ngram or prompt_lookup"),
        ("executor", choices["executor"].name, runs, "auto or eager"),
        ("attention", root.attention, root.attention != "triton", "sdpa"),
        ("decoding", choices["decoding"].name, samples, "sampling"),
    ):
        if not possible:
            raise ConfigError(f"{key}={value} is not possible with {what}: choose {key}={others}")


def memory_needed(
    checked: Checked, context: "Context", models: "Sequence[ModelSize]", longest: int, spare: int, loaded: bool
) -> str:
    """One sentence with the memory that the run will need. `models` are the target's size and the drafter's; `longest`
    is the most tokens of a prompt, `spare` the cache columns of a round beyond a row's limit; with `loaded` the
    target's weights are there. Raises ConfigError if less is free."""
    import torch

    from specbench.executors.machine import free_bytes

    root, choices, target = checked.root, checked.choices, models[0]
    rows, inputs = root.batch_size, longest if target.crossing else 0
    columns = min((MOST_START_TOKENS if inputs else longest) + root.max_new_tokens, target.context) + spare
    slots = choices["cache"].kind.columns_in_all(choices["cache"].settings, rows, context.executor.columns(columns))
    kv = slots * sum(model.column for model in models) + rows * inputs * sum(model.crossing for model in models)
    weights = sum(model.weights for model in models[loaded:]) + choices["drafter"].settings.own_bytes()
    if context.device.type == "cpu" and context.dtype == torch.float32:  # linear layers' in 16 bits, beside their own
        weights += sum(model.weights // 2 for model in models[loaded:] if model.halves)
    activations = activation_bytes(checked, context, models, inputs, columns)
    free = free_bytes(context.device)
    sentence = (
        f"memory: weights {decimal(weights)}, keys and values {decimal(kv)} ({rows} x {columns:,} tokens), "
        f"activations about {decimal(activations)}; {decimal(free)} free on {context.device}"
    )
    needed = weights + kv + activations
    if needed > free:
        change = "a smaller batch_size or max_new_tokens, or fewer cache.blocks with cache=paged"
        if weights >= free:
            change = "a smaller model, dtype=bfloat16 or another device"
        raise ConfigError(f"the run needs {decimal(needed)} but does not have it ({sentence}): use {change}")
    return sentence


def activation_bytes(
    checked: Checked, context: "Context", models: "Sequence[ModelSize]", inputs: int, columns: int
) -> int:
    """Bytes of the largest of reading prompts, encoding `inputs` tokens and scoring a draft."""
    root, drafter, decoding = checked.root, checked.choices["drafter"], checked.choices["decoding"]
    guesses = drafter.kind.candidates(drafter.settings, context)
    tokens = decoding.kind.target_tokens(decoding.settings, guesses, context.gamma)
    chunk = min(root.prefill_chunk, root.batch_size * columns)
    reading = max(chunk * (model.widest * context.dtype.itemsize + columns) for model in models)
    encoding = max(inputs * (model.widest + model.heads * inputs) * context.dtype.itemsize for model in models)
    scoring = LOGIT_COPIES * root.batch_size * tokens * max(model.vocab_size for model in models) * 4
    return int(max(reading, encoding, scoring)) + (2 * scoring if context.executor.captures_graphs else 0)
