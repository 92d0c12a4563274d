"""The configuration: root schema, checks before anything loads, and one `build`.

Each group's YAML in `conf/` names its class with Hydra's `_target_`; the class carries its schema
as a nested `Settings` dataclass. So a new component is one .py and one .yaml.
"""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import hydra
import torch
from omegaconf import DictConfig, OmegaConf

from specbench.context import Context
from specbench.data.prompts import Prompt, load, render
from specbench.decoding.protocols import Verifier
from specbench.decoding.sampling import Sampling
from specbench.executors.eager import EagerExecutor
from specbench.memory import Budget, Footprint
from specbench.models.pretrained import PretrainedModel, load_config, load_tokenizer
from specbench.paths import conf_dir
from specbench.run import Parts
from specbench.settings import ConfigError, setting, validate

log = logging.getLogger(__name__)
GROUPS = (
    "target", "drafter", "gamma_policy", "verifier", "lenience_policy", "cache", "executor", "data", "workload",
    "baseline", "logger",
)  # fmt: skip
# What a number does not depend on, so that a finished run with the same rest is not done again.
NOT_HASHED = ("name", "force", "logger", "experiment")


@dataclass
class Root:
    """The run's scalars."""

    name: str = setting()
    gamma: int = setting(ge=0)
    lenience: float = setting(gt=0, le=1)
    temperature: float = setting(ge=0)
    top_k: int = setting(ge=0)
    top_p: float = setting(gt=0, le=1)
    repetition_penalty: float = setting(gt=0)
    max_new_tokens: int = setting(ge=1)
    batch_size: int = setting(ge=1)
    prefill_chunk: int = setting(ge=1)
    stop: list[str] = setting()
    seed: int = setting(ge=0)
    device: str = setting()
    dtype: str = setting(choices=("auto", "float32", "bfloat16", "float16"))
    force: bool = setting()


def known_keys(overrides: list[str]) -> list[str]:
    """Every key that can be set, given the choices among the overrides: for "did you mean"."""
    chosen = dict(o.split("=", 1) for o in overrides if "=" in o)
    keys = [field.name for field in dataclasses.fields(Root)]
    for group in GROUPS:
        file = conf_dir() / group / f"{chosen.get(group, 'stdlib')}.yaml"
        files = [file] if file.is_file() else sorted((conf_dir() / group).glob("*.yaml"))
        for path in files:
            keys += [f"{group}.{key}" for key in OmegaConf.load(path) if key not in ("_target_", "defaults")]
    return [*keys, *GROUPS, "experiment"]


@dataclass
class Checked:
    """A configuration whose every key, type and bound has been checked."""

    root: Root
    classes: dict[str, type]
    settings: dict[str, Any]
    resolved: dict[str, Any]

    @property
    def digest(self) -> str:
        """A hash of everything that the numbers depend on."""
        relevant = {key: value for key, value in self.resolved.items() if key not in NOT_HASHED}
        return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:16]


def check(config: DictConfig) -> Checked:
    """Validates everything that can be known before a model loads. Raises ConfigError."""
    scalars = OmegaConf.masked_copy(config, [key for key in config if key not in (*GROUPS, "experiment", "hydra")])
    scalars._set_parent(config)
    root = validate(Root, scalars)
    pick_device(root.device)
    classes, settings = {}, {}
    for group in GROUPS:
        target = OmegaConf.select(config, f"{group}._target_")
        if target is None:
            raise ConfigError(f"{group} is not set: choose one with {group}=NAME")
        classes[group] = hydra.utils.get_class(target)
        settings[group] = validate(classes[group].Settings, config[group], f"{group}.")
        if hasattr(settings[group], "check"):
            settings[group].check(f"{group}.")
    if classes["executor"].fixed_shapes and not classes["cache"].fixed_shapes:
        names = [classes[group].__module__.rsplit(".", 1)[-1] for group in ("executor", "cache")]
        raise ConfigError("executor={} is not possible with cache={}: use cache=static or cache=paged".format(*names))
    check_policy(classes)
    check_pair(classes, settings, root)
    return Checked(root, classes, settings, _resolved(config))


def check_policy(classes: dict[str, type]) -> None:
    """Not every gamma policy is possible in every run."""
    policy = classes["gamma_policy"]
    name = policy.__module__.rsplit(".", 1)[-1]
    if getattr(policy, "replay_only", False):
        raise ConfigError(f"gamma_policy={name} knows the future: use python -m specbench.replay outputs/RUN")
    if hasattr(policy, "go_on") and not getattr(classes["drafter"], "ends_early", False):
        raise ConfigError(f"gamma_policy={name} needs a drafter that is a model: use drafter=stdlib or drafter=model")


def check_pair(classes: dict[str, type], settings: dict[str, Any], root: Root) -> None:
    """Not every verifier can judge every draft."""
    drafter, verifier = classes["drafter"], classes["verifier"]
    names = {group: classes[group].__module__.rsplit(".", 1)[-1] for group in ("drafter", "verifier")}
    pair = f"verifier={names['verifier']} is not possible with drafter={names['drafter']}"
    if getattr(drafter, "trees", False) and not verifier.trees:
        raise ConfigError(f"{pair}, which drafts trees: use verifier=iterative, match or greedy_tree")
    outright = getattr(settings["drafter"], "outright", False) or getattr(drafter, "outright", False)
    if getattr(verifier, "needs_law", False) and outright and root.temperature > 0:
        raise ConfigError(f"{pair}, whose guesses have no law: nothing would be accepted, use verifier=speculative")
    if getattr(verifier, "temperatures", None) == "zero" and root.temperature > 0:
        raise ConfigError(
            f"temperature={root.temperature:g} is not possible with verifier={names['verifier']}: "
            "it must be 0, or use verifier=iterative"
        )
    lenient = root.lenience < 1 or min(getattr(settings["lenience_policy"], "levels", [1.0])) < 1
    if lenient and names["verifier"] not in ("speculative", "synthetic"):
        raise ConfigError(
            f"lenience below 1 is not possible with verifier={names['verifier']}: use verifier=speculative"
        )


def _resolved(config: DictConfig) -> dict[str, Any]:
    return OmegaConf.to_container(OmegaConf.masked_copy(config, [k for k in config if k != "hydra"]), resolve=True)


def build(checked: Checked, announce: Callable[[str], None] = log.info) -> Parts:
    """Reads the prompts, says what memory the run needs, then loads the models and puts the parts
    together. Raises ConfigError."""
    root = checked.root
    prompts = load(checked.classes["data"](checked.settings["data"]))
    device = pick_device(root.device)
    sampling = Sampling(root.temperature, root.top_k, root.top_p, root.repetition_penalty)
    context = Context(device, pick_dtype(root.dtype, device), sampling, root.lenience, root.seed, root.gamma)
    context.new_cache = partial(checked.classes["cache"], checked.settings["cache"])

    def make(group: str) -> Any:
        return checked.classes[group](checked.settings[group], context)

    context.executor = make("executor")
    announce(str(memory_budget(checked, prompts, context)))
    lenience = make("lenience_policy")
    # Lenience at temperature 0 compares the target's probabilities before argmax; drafters keep theirs.
    scored = dataclasses.replace(context, sampling=dataclasses.replace(sampling, before_argmax=lenience.lowest < 1))
    target = context.target = checked.classes["target"](checked.settings["target"], scored)
    drafter = make("drafter")
    models = getattr(drafter, "models", [])
    context.drafter = models[0] if models else None
    for model in models:
        refuse_different_tokenizers(target, model)
    refuse_too_long_drafts(drafter, checked)

    def verifier_with(level: float) -> Verifier:
        return checked.classes["verifier"](checked.settings["verifier"], dataclasses.replace(context, lenience=level))

    verifier = lenience.verifier(verifier_with)
    return Parts(
        name=root.name,
        config=checked.resolved,
        target=target,
        drafter=drafter,
        policy=make("gamma_policy"),
        verifier=verifier,
        prompts=prompts,
        gamma=root.gamma,
        lenience=root.lenience,
        max_new_tokens=root.max_new_tokens,
        batch_size=root.batch_size,
        seed=root.seed,
        dtype=context.dtype,
        peers=make("baseline"),
        prefill_chunk=root.prefill_chunk,
        workload=make("workload"),
        # A shell cannot easily say a line break, so \n and \t are read here.
        stop_strings=[text.replace("\\n", "\n").replace("\\t", "\t") for text in root.stop],
        notes=notes(target, drafter, verifier),
    )


def memory_budget(checked: Checked, prompts: Sequence[Prompt], context: Context) -> Budget:
    """What the run will need at most. Raises ConfigError if there is not that much."""
    root, settings = checked.root, checked.settings
    footprints = [
        Footprint.of(load_config(model, role), context.dtype)
        for role in ("target", "drafter")
        for model in models_of(settings[role])
    ]
    tokenizer = load_tokenizer(settings["target"], "target")
    longest = max(len(render(prompt, [], tokenizer, chat=False).tokens) for prompt in prompts)
    largest = getattr(settings["gamma_policy"], "largest", root.gamma)
    spare = (settings["drafter"].nodes(largest) if hasattr(settings["drafter"], "nodes") else largest) + 1
    columns = min(longest + root.max_new_tokens, footprints[0].context) + spare
    budget = Budget.of(
        footprints,
        copies=2 if checked.classes["baseline"].loads_models and type(context.executor) is not EagerExecutor else 1,
        doubled=sum(context.executor.doubles(f, context.device, context.dtype) for f in footprints),
        rows=root.batch_size,
        columns=columns,
        held=checked.classes["cache"].held(settings["cache"], root.batch_size, context.executor.columns(columns)),
        tokens=spare,
        prefill_chunk=root.prefill_chunk,
        dtype=context.dtype,
        device=context.device,
    )
    budget.check()
    return budget


def models_of(settings: Any) -> list[PretrainedModel.Settings]:
    """The models that a component will load."""
    if hasattr(settings, "models"):
        return settings.models()
    return [settings] if isinstance(settings, PretrainedModel.Settings) else []


def notes(target: Any, drafter: Any, verifier: Any) -> list[str]:
    """What a reader of the numbers must know."""
    models = (("target", target), *(("drafter", model) for model in getattr(drafter, "models", [])))
    found = [
        f"{role} has random weights: its times are real, its text and alpha are not"
        for role, model in models
        if getattr(model, "random_weights", False)
    ]
    return found + ([verifier.note] if hasattr(verifier, "note") else [])


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={name} is not allowed: it must be auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not (torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()):
        raise ConfigError(f"device={name} is not here: {torch.cuda.device_count()} CUDA devices are visible, use cpu")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is float32 on a CPU, where 16 bits gain nothing, and bfloat16 on CUDA."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


def refuse_too_long_drafts(drafter: Any, checked: Checked) -> None:
    """Heads and look-ahead embeddings are as many as were trained."""
    longest = getattr(drafter, "longest", None)
    largest = getattr(checked.settings["gamma_policy"], "largest", checked.root.gamma)
    if longest is not None and largest > longest:
        raise ConfigError(f"gamma={largest} is not possible: this drafter was trained for at most {longest} guesses")


def refuse_different_tokenizers(target: Any, drafter: Any) -> None:
    """p and q must be distributions over the same tokens."""
    theirs, ours = target.tokenizer.get_vocab(), drafter.tokenizer.get_vocab()
    if theirs != ours:
        differing = sum(1 for token, index in ours.items() if theirs.get(token) != index)
        raise ConfigError(
            f"target.path={target.name} and drafter.path={drafter.name} have different tokenizers "
            f"({len(theirs)} and {len(ours)} tokens, {differing} of the drafter's differ): they must share one"
        )
