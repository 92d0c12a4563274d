"""Builds the parts of a run from a checked configuration: prompts, models and components."""

import dataclasses
import json
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from specbench.config.components import Components, segment_size, timed_gammas, warm_up_tokens
from specbench.config.devices import pick_device, pick_dtype
from specbench.config.memory import refuse_states_that_do_not_fit
from specbench.config.memory_estimate import memory_budget, spare_columns
from specbench.config.validate import ValidatedConfig
from specbench.data.prompts import Data, Prompt, Request, load
from specbench.decoding import processes
from specbench.decoding.drafter import Drafter
from specbench.decoding.executor import Executor
from specbench.decoding.gamma_policy import GammaPolicy
from specbench.decoding.model import Model
from specbench.decoding.sampling import Sampling
from specbench.decoding.verifier import Verifier
from specbench.errors import ConfigError, first_line
from specbench.models.context import Context
from specbench.models.language_model import LanguageModel
from specbench.policies.workload.base import Workload
from specbench.run_config import Role, with_role

log = logging.getLogger(__name__)
LONGEST_WAIT = 24 * 3600  # seconds until the last request arrives
MOST_WARM_UP_TOKENS = 500_000  # a row


class Targets:
    """The targets that were loaded so far, by the settings that they were loaded with."""

    def __init__(self) -> None:
        self._loaded: dict[str, tuple[LanguageModel, Any]] = {}  # with what its executor knew when it was loaded

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
            model, loaded = self._loaded[key]
            context.executor.share(loaded)
            return model.shared(context.sampling, context.new_cache, context.executor)
        model = load(context)
        self._loaded[key] = model, context.executor.loaded()
        return model


def _key(checked: ValidatedConfig) -> str:
    settings: dict[str, Any] = {key: checked.resolved.get(key) for key in with_role(Role.LOADED)}
    return json.dumps(settings, sort_keys=True, default=str)


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
    chosen["baseline"].kind.reach(chosen["baseline"].settings)
    refuse_missing_processes(chosen["target"].settings.processes())
    data = _make(checked, "data")
    prompts = in_seeded_order(load(data), root.order)
    policy = _make(checked, "gamma_policy")
    context = model_context(checked, policy.largest)
    workload = make_workload(checked, prompts)
    spare = spare_columns(checked, policy.largest)
    rendered: dict[Prompt, Request] = {}
    budget = memory_budget(checked, prompts, context, spare, data, rendered, targets.has(checked), beside)
    announce(str(budget))
    # Lenience at temperature 0 compares the target's probabilities before argmax; drafters keep theirs.
    scored = dataclasses.replace(context.sampling, before_argmax=chosen.lenience < 1)
    lenience = _make(checked, "lenience_policy", root.lenience)
    verifier = lenience.verifier(partial(_make, checked, "verifier", scored))
    refuse_long_warm_up(checked, policy, context.executor, budget.columns, len(verifier.levels))
    target = targets.get(checked, dataclasses.replace(context, sampling=scored), partial(_make, checked, "target"))
    drafter = build_drafter(checked, context, target, data)
    decoding = _make(checked, "decoding")
    decoding.refuse_target(target)
    first_model = drafter.models[0] if drafter.models else None
    return Components(
        name=root.name,
        config=checked.resolved,
        choices={group: choice.name for group, choice in chosen.groups.items()},
        target=target,
        drafter=drafter,
        policy=policy,
        verifier=verifier,
        decoding=decoding,
        prompts=prompts,
        rendered=rendered,
        peers=_make(checked, "baseline", context, target, first_model, root.gamma).by_name(),
        workload=workload,
        max_new_tokens=root.max_new_tokens,
        batch_size=root.batch_size,
        spare=spare,
        prefill_chunk=root.prefill_chunk,
        seed=root.seed,
        verdict_tokens=root.verdict_tokens,
        metrics={name: choice.kind.from_settings(choice.settings) for name, choice in checked.metrics.items()},
        stop_strings=root.stop_strings,
        notes=notes_on_models(target, drafter, verifier, decoding.generate_settings),
    )


def model_context(checked: ValidatedConfig, gamma: int) -> Context:
    """What all models of the run have in common; `gamma` is the largest of its policy. Raises ConfigError."""
    root, chosen = checked.root, checked.choices
    device = pick_device(root.device)
    return Context(
        device=device,
        dtype=pick_dtype(root.dtype, device),
        sampling=Sampling(root.temperature, root.top_k, root.top_p, root.repetition_penalty),
        new_cache=partial(chosen["cache"].kind.from_settings, chosen["cache"].settings),
        executor=_make(checked, "executor", device, chosen, checked.traced()),
        seed=root.seed,
        gamma=gamma,
        attention=root.attention,
        stop_strings=root.stop_strings,
    )


def make_workload(checked: ValidatedConfig, prompts: Sequence[Prompt]) -> Workload:
    """When requests arrive. Raises ConfigError if that cannot be with these prompts."""
    workload: Workload = _make(checked, "workload", checked.root.seed)
    refuse_slow_arrivals(workload, sum(len(prompt.turns) for prompt in prompts))
    refuse_few_for_rates(workload, len(prompts), checked.root.batch_size)
    return workload


def build_drafter(checked: ValidatedConfig, context: Context, target: LanguageModel, data: Data) -> Drafter:
    """The drafter, with its models loaded. Raises ConfigError if it does not fit the target or the memory."""
    drafter: Drafter = _make(checked, "drafter", context, target)
    data.prepare(target, drafter.models)
    refuse_unfit(target, drafter, context.gamma)
    refuse_states_that_do_not_fit([target, *drafter.models], checked.root.batch_size, context.gamma)
    return drafter


def refuse_missing_processes(wanted: int) -> None:
    """Raises ConfigError if so many processes shall share the target, and this one is not one of them."""
    if wanted > 1 and processes.current.size != wanted:
        raise ConfigError(
            f"target.tensor_parallel={wanted} is not possible here, in {processes.current.size} process: python -m "
            "specbench starts so many, or give 1"
        )


def in_seeded_order(prompts: list[Prompt], order: int) -> list[Prompt]:
    """The prompts as they are if `order` is 0, else shuffled with this seed. Their noise does not depend on it."""
    return [prompts[i] for i in np.random.default_rng(order).permutation(len(prompts))] if order else prompts


def _make(checked: ValidatedConfig, group: str, *arguments: Any) -> Any:
    """The component that was chosen in a group. The group's base class documents the other arguments of
    `from_settings`. Raises ConfigError."""
    choice = checked.choices[group]
    try:
        return choice.kind.from_settings(choice.settings, *arguments)
    except TypeError as error:
        log.info("%s could not be built", group, exc_info=True)
        raise ConfigError(
            f"{group}._target_={choice.kind.__module__}.{choice.kind.__qualname__} cannot be built from its settings "
            f"({first_line(error)}): choose one with {group}=NAME, or see run.log"
        ) from error


def refuse_slow_arrivals(workload: Workload, requests: int) -> None:
    """Raises ConfigError if the last of the requests would arrive after more than a day."""
    seconds = max((workload.arrivals(requests, rate) or [0.0])[-1] for rate in range(max(1, len(workload.rates))))
    if not seconds <= LONGEST_WAIT:
        raise ConfigError(
            f"the workload's last request of {requests} would arrive after {seconds / 3600:,.0f} hours: it must be "
            f"{LONGEST_WAIT // 3600} at most, so choose a higher workload.rate or workload.spike, or a lower data.limit"
        )


def refuse_few_for_rates(workload: Workload, prompts: int, rows: int) -> None:
    """Raises ConfigError if a workload of several rates has too few prompts for a segment of each."""
    rates, size = len(workload.rates), segment_size(rows, workload)
    if rates > 1 and prompts < rates * size:
        raise ConfigError(
            f"workload.rate has {rates} rates, each of which needs a segment of {size} requests, and there are "
            f"{prompts}: choose more prompts, fewer rates, or a lower batch_size or workload.segment"
        )


def refuse_long_warm_up(
    checked: ValidatedConfig, policy: GammaPolicy, executor: Executor, columns: int, levels: int
) -> None:
    """Raises ConfigError if warm-up would read more than `MOST_WARM_UP_TOKENS` tokens a row."""
    drafter = checked.choices["drafter"]
    nodes = partial(drafter.kind.nodes, drafter.settings)
    gammas = timed_gammas(policy, executor.fixed_shapes)
    tokens = warm_up_tokens([nodes(gamma) for gamma in gammas], gammas, len(executor.lengths(columns)), levels)
    if tokens > MOST_WARM_UP_TOKENS:
        raise ConfigError(
            f"gamma={policy.largest} with up to {nodes(policy.largest):,} guesses a round is not possible: warm-up "
            f"alone would read up to {tokens:,} tokens a row, more than {MOST_WARM_UP_TOKENS:,}; choose a smaller "
            "gamma, gamma_policy.largest or drafter"
        )


def notes_on_models(target: LanguageModel, drafter: Drafter, verifier: Verifier, applied: Sequence[str]) -> list[str]:
    """Sentences that a reader of the numbers must know, such as that a model has random weights. `applied` are settings
    of a generation_config that are applied."""
    models = (("target", target), *(("drafter", model) for model in drafter.models))
    found = [
        f"{role} has random weights: its times are real, its text and alpha are not"
        for role, model in models
        if model.random_weights
    ]
    for role, model in models:
        if model.unchecked:
            found.append(f"the divided {role}'s logits were not compared with the whole model's: {model.unchecked}")
        asked = [setting for setting in model.unlike_generate if setting not in applied]
        if asked:
            found.append(
                f"the {role}'s generation_config asks for {', '.join(asked)}, which is not applied: "
                "p is the model's own"
            )
    for model in drafter.models:
        if model.shared_tokens is not None:
            found.append(
                f"{model.name} has {model.shared_tokens:,} of the target's {target.vocab_size:,} tokens, and guesses "
                "no others (drafter.vocabulary=intersection): alpha is at most p's share of them"
            )
    if target.quantization is not None:
        found.append(f"the target has weights in {target.quantization}: its law is not that of {target.name} in full")
    return found + ([verifier.note] if verifier.note else [])


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


def refuse_different_tokenizers(target: Model, drafter: Model) -> None:
    """p and q must be distributions over the same tokens. Raises ConfigError."""
    theirs, ours = target.tokenizer.get_vocab(), drafter.tokenizer.get_vocab()
    if theirs != ours:
        differing = sum(1 for token, index in ours.items() if theirs.get(token) != index)
        raise ConfigError(
            f"target.path={target.name} and drafter.path={drafter.name} have different tokenizers "
            f"({len(theirs)} and {len(ours)} tokens, {differing} of the drafter's differ): they must share one, or "
            "drafter.vocabulary=intersection lets drafter=model or tree guess the tokens that both have"
        )
