"""What a target whose weights several processes or devices share cannot be combined with."""

from collections.abc import Iterator
from typing import Any

import torch
import transformers

from specbench.component import Selections
from specbench.contrib.planning.gpu_sizing import divisors, sizes_of
from specbench.decoding import processes
from specbench.errors import ConfigError
from specbench.models.architecture import NO_FAMILY, family_of, without_memory
from specbench.models.flops import chosen_by_token
from specbench.models.pretrained import load_config

SETTING = "target.tensor_parallel"
UNEVEN = (5, 23)  # of transformers


def refuse_divided(run: Selections) -> None:
    """Raises ConfigError if the target's weights are divided and another choice needs them whole, or if the drafter's
    are divided otherwise."""
    target, drafter = run["target"].settings, run["drafter"].settings
    for model in drafter.models():
        if (model.divided(), model.processes()) not in (("", 1), (target.divided(), target.processes())):
            raise ConfigError(
                f"drafter.{model.divided()} is not possible with {SETTING}={target.processes()}: the drafter is whole "
                "on every rank (1), or divided as the target is"
            )
    if not (divided := target.divided()):
        return
    executor = run["executor"]
    rules = (
        (f"executor={executor.name}", executor.kind.runs_divided, "executor=auto or eager"),
        (f"attention={run.scalars['attention']}", run.scalars["attention"] != "triton", "attention=auto or sdpa"),
        *_of_ranks(run),
    )
    for choice, possible, others in rules:
        if not possible:
            raise ConfigError(f"{choice} is not possible with target.{divided}: choose {others}")
    if not target.processes() > 1 and run.device == "cpu":
        raise ConfigError(f"target.{divided} is not possible with device=cpu, which is one device: leave it out")


def _of_ranks(run: Selections) -> Iterator[tuple[str, bool, str]]:
    """Choices that processes cannot make together: which, whether they can, and what can be chosen instead."""
    target, device = run["target"].settings, str(run.scalars["device"])
    yield f"target.weights={target.weights}", target.weights == "pretrained", "target.weights=pretrained"
    if target.processes() == 1:
        return
    yield f"target.device_map={target.device_map}", target.device_map is None, "target.device_map=null"
    yield f"device={device}", ":" not in device, "device=auto, cpu or cuda: every rank has a device of its own"
    for group, allowed in (("decoding", "sampling"), ("baseline", "autoregressive"), ("workload", "all_at_once")):
        yield f"{group}={run[group].name}", run[group].name == allowed, f"{group}={allowed}"
    drafter = run["drafter"]
    yield f"drafter={drafter.name}", drafter.kind.beside_ranks, "drafter=model, tree, ngram or prompt_lookup"


def refuse_indivisible(run: Selections) -> None:
    """Raises ConfigError if a model cannot be divided among so many processes. Of checkpoints only their configuration
    is read."""
    for role in ("target", "drafter"):
        for settings in run[role].settings.models():
            if settings.processes() > 1:
                _refuse_indivisible(settings, role)


def _refuse_indivisible(settings: Any, role: str) -> None:
    processes, config = settings.processes(), load_config(settings, role)
    refused = f"{role}.tensor_parallel={processes} is not possible with {role}.path={settings.path}"
    text = config.get_text_config()
    kind = None
    if config.is_encoder_decoder:
        kind = "an encoder-decoder"
    elif family_of(config) is not NO_FAMILY:
        kind = "a model with a recurrent state"
    elif chosen_by_token(text) is not None:
        kind = "a mixture of experts"
    if kind is not None:
        raise ConfigError(f"{refused}, {kind}: give a model whose layers are attention and one MLP, or use 1")
    sizes = sizes_of(text)
    if not divides_unevenly():
        sizes["tokens"] = int(text.vocab_size)
    if wrong := {name: size for name, size in sizes.items() if size % processes}:
        told = " and ".join(f"{size:,} {name}" for name, size in wrong.items())
        possible = ", ".join(map(str, divisors(sizes)))
        others = f"but by {possible}" if possible else "so use 1"
        raise ConfigError(f"{refused}: its {told} do not divide by {processes}, {others}")
    module = without_memory(config, torch.float32, settings.trust_remote_code)
    if not module.tp_plan:
        raise ConfigError(
            f"{refused}: transformers {transformers.__version__} has no plan for dividing {config.model_type}, so use 1"
        )


def divides_unevenly() -> bool:
    """Whether this transformers divides an output matrix whose tokens do not divide: 5.17 does not, 5.23 does."""
    found = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    return found >= UNEVEN


def refuse_missing_ranks(wanted: int) -> None:
    """Raises ConfigError if so many processes shall share the target, and this one is not one of them."""
    if processes.current.size != wanted:
        raise ConfigError(
            f"target.tensor_parallel={wanted} is not possible here, in {processes.current.size} process: python -m "
            "specbench starts so many, or give 1"
        )
