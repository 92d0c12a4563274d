"""Builds the parts of a run from a checked configuration: prompts, models and components."""

import dataclasses
import json
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from specbench.component import Selections
from specbench.config.components import Components
from specbench.config.devices import pick_device, pick_dtype
from specbench.config.memory import size
from specbench.config.memory_estimate import memory_budget
from specbench.config.validate import ValidatedConfig
from specbench.data.prompts import Prompt, Request, load
from specbench.decoding import sampling
from specbench.decoding.model import Model
from specbench.decoding.sampling import Sampling
from specbench.drafters.base import Drafter
from specbench.errors import ConfigError, first_line
from specbench.executors.machine import free_bytes
from specbench.kernels import ops
from specbench.models.context import Context
from specbench.models.language_model import LanguageModel
from specbench.models.load import load_tokenizer
from specbench.run_config import Role, RunConfig, with_role
from specbench.verifiers.base import Verifier

log = logging.getLogger(__name__)
TARGET, DRAFTER = "shipped:target", "shipped:drafter"  # if none is chosen
# Scalars that components hold.
FROM_ROOT = ("name", "max_new_tokens", "batch_size", "prefill_chunk", "seed", "verdict_tokens", "stop_strings")


class Targets:
    """The targets that were loaded so far, by the settings that they were loaded with."""

    def __init__(self) -> None:
        self._loaded: dict[str, LanguageModel] = {}

    def has(self, checked: ValidatedConfig) -> bool:
        """Whether the target of these settings is loaded."""
        return _key(checked) in self._loaded

    def get(
        self, checked: ValidatedConfig, context: Context, load: Callable[[Context], LanguageModel]
    ) -> LanguageModel:
        """The target of these settings, with the sampling, cache and executor of `context`: loaded by `load` at most
        once."""
        key = _key(checked)
        if key in self._loaded:
            return self._loaded[key].shared(context.sampling, context.new_cache, context.executor)
        self._loaded[key] = load(context)
        return self._loaded[key]


def _key(checked: ValidatedConfig) -> str:
    return json.dumps([checked.resolved.get(key) for key in with_role(Role.LOADED)], sort_keys=True, default=str)


def build(
    checked: ValidatedConfig,
    announce: Callable[[str], None] = log.info,
    targets: Targets | None = None,
    beside: int = 1,
) -> Components:
    """Reads the prompts, says what memory the run needs, then loads the models and puts the parts together. A target
    among `targets` is not loaded again. `beside` processes, this one among them, need as much of the machine's memory.
    Raises ConfigError."""
    root, chosen, targets = checked.root, checked.choices, targets or Targets()
    data, policy = _make(checked, "data"), _make(checked, "gamma_policy")
    prompts = chosen_prompts(load(data), root)
    context = _context(checked, policy.largest, prompts)
    workload = _make(checked, "workload", root.seed)
    workload.refuse(prompts)
    choice = chosen["decoding"]
    spare = choice.kind.spare(choice.settings, checked.nodes(policy.largest), policy.largest, root.max_new_tokens)
    rendered: dict[Prompt, Request] = {}
    budget = memory_budget(checked, prompts, context, spare, data, rendered, targets.has(checked), beside)
    refuse_shipped_drafter(chosen)
    announce(str(budget))
    # Lenience at temperature 0 compares the target's probabilities before argmax; drafters keep theirs.
    scored = dataclasses.replace(context.sampling, before_argmax=chosen.lenience < 1)
    verifier = _make(checked, "lenience_policy", root.lenience).verifier(partial(_make, checked, "verifier", scored))
    target = targets.get(checked, dataclasses.replace(context, sampling=scored), partial(_make, checked, "target"))
    drafter = _make(checked, "drafter", context, target)
    refuse_unfit(target, drafter, policy.largest)
    refuse_states_that_do_not_fit([target, *drafter.models], root.batch_size, policy.largest)
    decoding = _make(checked, "decoding")
    decoding.refuse_target(target)
    # Of peers: one that needs the target's hidden states is no model of its own.
    first_model = drafter.models[0] if drafter.models and not drafter.needs_hidden else None
    return Components(
        **{key: getattr(root, key) for key in FROM_ROOT},
        config=checked.resolved,
        choices={group: choice.name for group, choice in chosen.groups.items()},
        target=target,
        drafter=drafter,
        policy=policy,
        verifier=verifier,
        decoding=decoding,
        prompts=prompts,
        rendered=rendered,
        peers=_make(checked, "peers", context, target, first_model, root.gamma).by_name(),
        workload=workload,
        spare=spare,
        acceptance_rule=verifier.acceptance_rule(chosen["drafter"].kind, chosen["drafter"].settings)
        if decoding.samples
        else "",
        notes=notes_on_models(target, drafter, verifier, decoding.generate_settings),
    )


def _context(checked: ValidatedConfig, gamma: int, prompts: Sequence[Prompt]) -> Context:
    """What all models of the run have in common; `gamma` is the largest of its policy. Raises ConfigError."""
    root, chosen = checked.root, checked.choices
    device = pick_device(root.device)
    sampling.use(ops)
    return Context(
        device=device,
        dtype=pick_dtype(root.dtype, device),
        sampling=Sampling(root.temperature, root.top_k, root.top_p, root.repetition_penalty),
        new_cache=partial(chosen["cache"].kind.from_settings, chosen["cache"].settings),
        executor=_make(checked, "executor", device, chosen),
        seed=root.seed,
        gamma=gamma,
        attention=root.attention,
        stop_strings=root.stop_strings,
        prompts=prompts,
    )


def chosen_prompts(prompts: list[Prompt], root: RunConfig) -> list[Prompt]:
    """The `take` prompts after the first `skip` in the run's order. Raises ConfigError if none is left."""
    found = in_seeded_order(prompts, root.order)[root.skip :]
    if not found:
        raise ConfigError(f"skip={root.skip} is not possible: data has {len(prompts)} prompts, and none is left")
    return found[: root.take or None]


def in_seeded_order(prompts: list[Prompt], order: int) -> list[Prompt]:
    """The prompts as they are if `order` is 0, else shuffled with this seed. Their noise does not depend on it."""
    return [prompts[i] for i in np.random.default_rng(order).permutation(len(prompts))] if order else prompts


def _make(checked: ValidatedConfig, group: str, *arguments: Any) -> Any:
    """The component chosen in a group, from its settings and what `from_settings` of its base class also takes."""
    choice = checked.choices[group]
    try:
        return choice.kind.from_settings(choice.settings, *arguments)
    except TypeError as error:
        log.info("%s could not be built", group, exc_info=True)
        raise ConfigError(
            f"{group}._target_={choice.kind.__module__}.{choice.kind.__qualname__} cannot be built from its settings "
            f"({first_line(error)}): choose one with {group}=NAME, or see run.log"
        ) from error


def notes_on_models(target: LanguageModel, drafter: Drafter, verifier: Verifier, applied: Sequence[str]) -> list[str]:
    """Sentences that a reader of the numbers must know; `applied` are settings of a generation_config."""
    found = []
    for role, model in (("target", target), *(("drafter", model) for model in drafter.models)):
        if model.random_weights:
            found.append(f"{role} has random weights: its times are real, its text and alpha are not")
        if asked := [setting for setting in model.unlike_generate if setting not in applied]:
            found.append(
                f"the {role}'s generation_config asks for {', '.join(asked)}, which is not applied: "
                "p is the model's own"
            )
        if role == "drafter" and model.shared_tokens is not None:
            found.append(
                f"{model.name} has {model.shared_tokens:,} of the target's {target.vocab_size:,} tokens, and guesses "
                "no others (drafter.vocabulary=intersection): alpha is at most p's share of them"
            )
    return [*found, *([verifier.note] if verifier.note else [])]


def refuse_unfit(target: Model, drafter: Drafter, largest: int) -> None:
    """Checks that need the loaded models. Raises ConfigError."""
    for model in drafter.models:
        if model.shared_tokens is None:
            refuse_different_tokenizers(target, model)
        if model.start_tokens is not None and model.start_tokens != target.start_tokens:
            raise ConfigError(
                f"target.path={target.name} and drafter.path={model.name} begin a text with different tokens "
                f"({target.start_tokens} and {model.start_tokens}, of decoder_start_token_id and forced_bos_token_id): "
                "they must be the same"
            )
    for model in (target, *drafter.models) if drafter.trees else ():
        if not model.trees:
            raise ConfigError(
                f"drafter trees are not possible with {model.name}: the masks or positions of its layers are those of "
                "chains, so choose drafter=model, ngram or prompt_lookup"
            )
    if drafter.longest is not None and largest > drafter.longest:
        raise ConfigError(
            f"gamma={largest} is not possible: this drafter was trained for at most {drafter.longest} guesses"
        )


def refuse_shipped_drafter(chosen: Selections) -> None:
    """Raises ConfigError, before a model is loaded, if the target has other tokens than the drafter, which is the one
    that is taken if none is chosen."""
    target, drafter = chosen["target"].settings, chosen["drafter"].settings
    taken = getattr(drafter, "vocabulary", "") == "same" and drafter.path == DRAFTER
    if not taken or getattr(target, "path", TARGET) == TARGET:
        return
    if load_tokenizer(target, "target").get_vocab() != load_tokenizer(drafter, "drafter").get_vocab():
        raise ConfigError(
            f"no drafter that fits target.path={target.path} was given: the default, drafter.path={DRAFTER}, has "
            "another tokenizer; try drafter=prompt_lookup or drafter=ngram, which need no "
            "second checkpoint, or drafter.path=Q, a small model with the target's tokenizer"
        )


def refuse_different_tokenizers(target: Model, drafter: Model) -> None:
    """p and q must be distributions over the same tokens. Raises ConfigError."""
    theirs, ours = target.tokenizer.get_vocab(), drafter.tokenizer.get_vocab()
    if theirs != ours:
        differing = sum(1 for token, index in ours.items() if theirs.get(token) != index)
        raise ConfigError(
            f"target.path={target.name} and drafter.path={drafter.name} have different tokenizers "
            f"({len(theirs)} and {len(ours)} tokens, {differing} of the drafter's differ): they must share one, or "
            f"drafter=model drafter.path={drafter.name} drafter.vocabulary=intersection guesses the tokens that both "
            "have"
        )


def refuse_states_that_do_not_fit(models: Sequence[Model], rows: int, gamma: int) -> None:
    """Raises ConfigError without room for states of each token of a round, of before it, and of a prompt beside it."""
    kept = gamma + 3
    needed = sum(int(model.state_bytes) for model in models) * rows * kept
    free = free_bytes(models[0].device)
    if needed > free:
        raise ConfigError(
            f"the run needs {size(needed)} for recurrent states, {kept} of each of {rows} rows, but {size(free)} "
            "are free: use a smaller batch_size or gamma"
        )
