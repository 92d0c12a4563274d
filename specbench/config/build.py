"""Builds the parts of a run from a checked configuration: prompts, models and components."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from specbench.component import from_ring
from specbench.config.components import MOST, Components, segment_size, timed_gammas, warm_up_tokens
from specbench.config.devices import pick_device, pick_dtype
from specbench.config.loaded_targets import Targets
from specbench.config.memory import Budget, refuse_states_that_do_not_fit
from specbench.config.validate import ValidatedConfig
from specbench.data.prompts import Data, Prompt, Request, load, render
from specbench.decoding import processes
from specbench.decoding.drafter import Drafter
from specbench.decoding.executor import Executor
from specbench.decoding.gamma_policy import GammaPolicy
from specbench.decoding.model import Model
from specbench.decoding.sampling import Sampling
from specbench.decoding.verifier import Verifier
from specbench.drafters.sampling_overrides import OwnSampling
from specbench.errors import ConfigError, first_line
from specbench.executors.machine import free_bytes
from specbench.models.architecture import ModelSize
from specbench.models.context import Context
from specbench.models.pretrained import footprint, load_tokenizer, uses_template
from specbench.policies.workload.base import Workload
from specbench.run_config import RunConfig
from specbench.stats.position_stats import CHUNK
from specbench.stats.verdict_records import LAW_BYTES

log = logging.getLogger(__name__)
LONGEST_WAIT = 24 * 3600  # seconds until the last request arrives
MOST_START_TOKENS = 4  # of an encoder-decoder's text: the start, a language, a task, and that no times are wanted
MOST_WARM_UP_TOKENS = 500_000  # a row


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
    prompts = in_order(load(data), root.order)
    device = pick_device(root.device)
    policy = _make(checked, "gamma_policy")
    context = Context(
        device=device,
        dtype=pick_dtype(root.dtype, device),
        sampling=Sampling(root.temperature, root.top_k, root.top_p, root.repetition_penalty),
        new_cache=partial(chosen["cache"].kind.from_settings, chosen["cache"].settings),
        executor=_make(checked, "executor", device, chosen, checked.traced()),
        seed=root.seed,
        gamma=policy.largest,
        attention=root.attention,
        stop_strings=root.stop_strings,
    )
    workload = _make(checked, "workload", root.seed)
    refuse_slow_arrivals(workload, sum(len(prompt.turns) for prompt in prompts))
    refuse_few_for_rates(workload, len(prompts), root.batch_size)
    spare = spare_columns(checked, policy.largest)
    rendered: dict[Prompt, Request] = {}
    budget = memory_budget(checked, prompts, context, spare, data, rendered, targets.has(checked), beside)
    announce(str(budget))
    # Lenience at temperature 0 compares the target's probabilities before argmax; drafters keep theirs.
    scored = dataclasses.replace(context.sampling, before_argmax=chosen.lenience < 1)
    verifier = _make(checked, "lenience_policy", root.lenience).verifier(
        lambda level: _make(checked, "verifier", scored, level)
    )
    refuse_long_warm_up(checked, policy, context.executor, budget.columns, len(verifier.levels))
    target = targets.get(checked, dataclasses.replace(context, sampling=scored), partial(_make, checked, "target"))
    drafter = _make(checked, "drafter", context, target)
    data.prepare(target, drafter.models)
    refuse_unfit(target, drafter, policy.largest)
    refuse_states_that_do_not_fit([target, *drafter.models], root.batch_size, policy.largest)
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
        notes=notes(target, drafter, verifier, decoding.generate_settings),
    )


def refuse_missing_processes(wanted: int) -> None:
    """Raises ConfigError if so many processes shall share the target, and this one is not one of them."""
    if wanted > 1 and processes.current.size != wanted:
        raise ConfigError(
            f"target.tensor_parallel={wanted} is not possible here, in {processes.current.size} process: python -m "
            "specbench starts so many, or give 1"
        )


def spare_columns(checked: ValidatedConfig, gamma: int) -> int:
    """The columns that a request may need beyond its limit, with rounds of at most `gamma` levels of guesses."""
    drafter, choice = checked.choices["drafter"], checked.choices["decoding"]
    nodes = drafter.kind.nodes(drafter.settings, gamma)
    spare: int = choice.kind.spare(choice.settings, nodes, gamma, checked.root.max_new_tokens)
    return spare


def in_order(prompts: list[Prompt], order: int) -> list[Prompt]:
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


def memory_budget(
    checked: ValidatedConfig,
    prompts: Sequence[Prompt],
    context: Context,
    spare: int,
    data: Data,
    rendered: dict[Prompt, Request],
    loaded: bool = False,
    beside: int = 1,
) -> Budget:
    """The most memory that the run will need, besides the target's weights if they are `loaded`; `spare` is as in
    `Components`, `prompts` are those of `data`, `rendered` and `beside` as in `longest_text` and `build`. Raises
    ConfigError if the device has less."""
    root, chosen = checked.root, checked.choices
    if any(model.processes() > 1 for role in ("target", "drafter") for model in chosen[role].settings.models()):
        from_ring("tensor_parallel.rules.refuse_indivisible")(chosen)
    footprints = [
        footprint(model, role, context.dtype).share(model.processes())
        for role in ("target", "drafter")
        for model in chosen[role].settings.models()
    ]
    data.refuse(chosen, footprints)
    for family in dict.fromkeys(model.family for model in footprints):
        family.refuse(chosen, footprints, data)
    refuse_encoders(checked, footprints)
    if any(model.recurrent for model in footprints):
        context.executor.without_programs()
    refuse_more_than_the_target_has(checked, context.gamma, footprints[0])
    longest = footprints[0].heard or longest_text(checked, prompts, rendered)
    inputs = longest if footprints[0].crossing else 0
    columns = min((MOST_START_TOKENS if inputs else longest) + root.max_new_tokens, footprints[0].context) + spare
    drafter, decoding = chosen["drafter"], chosen["decoding"]
    nodes = drafter.kind.nodes(drafter.settings, context.gamma)
    executor, cache = context.executor, chosen["cache"]
    in_all = cache.kind.columns_in_all(cache.settings, root.batch_size, executor.columns(columns))
    peers = chosen["baseline"].kind.loads_models and executor.changes_modules
    verdict = root.verdict_tokens > 0 and executor.changes_modules and not peers  # its stock target
    copies = footprints[0].weights * (drafter.kind.target_copies + (verdict and not loaded))
    if loaded:
        footprints[0] = dataclasses.replace(footprints[0], weights=0, tied=0)
    doubled = sum(executor.doubles(f.weights, f.tied, context.device, context.dtype) for f in footprints)
    budget = Budget.of(
        footprints,
        copies=2 if peers else 1,
        doubled=doubled + copies,
        laws=_laws(root, footprints[0].vocab_size),
        rows=root.batch_size,
        columns=columns,
        held=in_all,
        tokens=decoding.kind.target_tokens(decoding.settings, nodes, context.gamma),
        prefill_chunk=root.prefill_chunk,
        read_again=CHUNK,
        graphs=executor.captures_graphs,
        dtype=context.dtype,
        device=context.device,
        inputs=inputs,
        processes=max(beside, chosen["target"].settings.processes()),
    )
    if chosen["target"].settings.divided() and not chosen["target"].settings.processes() > 1:  # on all GPUs
        devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
        budget = dataclasses.replace(budget, free=sum(map(free_bytes, devices)))
    budget.check()
    return budget


def longest_text(checked: ValidatedConfig, prompts: Sequence[Prompt], rendered: dict[Prompt, Request]) -> int:
    """The most tokens of a prompt, with all its turns; the requests of prompts of one turn are put into `rendered`."""
    settings = checked.choices["target"].settings
    tokenizer = load_tokenizer(settings, "target")
    chat = uses_template(settings, tokenizer, "target")
    longest = 0
    for prompt in prompts:
        request = render(prompt, ["..."] * (len(prompt.turns) - 1), tokenizer, chat)
        longest = max(longest, len(request.tokens))
        if len(prompt.turns) == 1:
            rendered[prompt] = request
    return longest


def _laws(root: RunConfig, vocab_size: int) -> int:
    """Bytes of the target's probabilities that are kept until texts were read, at most: of speculated texts, rejected
    guesses included, and of plain decoding's."""
    if not root.temperature:
        return 0
    plain = 4 * MOST * root.batch_size * root.max_new_tokens * vocab_size
    return int(min(LAW_BYTES, 2 * plain) + min(LAW_BYTES, plain))


def refuse_more_than_the_target_has(checked: ValidatedConfig, largest: int, target: ModelSize) -> None:
    """Raises ConfigError if a top_k is above the target's vocabulary, or gamma fills its context."""
    drafts = checked.choices["drafter"].settings
    wanted = {"top_k": checked.root.top_k, "drafter.top_k": drafts.top_k if isinstance(drafts, OwnSampling) else None}
    for key, top_k in wanted.items():
        if (top_k or 0) > target.vocab_size:
            raise ConfigError(
                f"{key}={top_k} is not allowed: the target has {target.vocab_size} tokens in all, and 0 is off"
            )
    if largest >= target.context:
        raise ConfigError(f"gamma={largest} is not possible: the target's context is {target.context} tokens")


def refuse_encoders(checked: ValidatedConfig, models: Sequence[ModelSize]) -> None:
    """Raises ConfigError if one of the models, the target's first, has an encoder that another choice cannot use."""
    chosen, target = checked.choices, models[0]
    drafter, path = chosen["drafter"], chosen["target"].settings.path
    if not target.crossing:
        if any(model.crossing for model in models):
            raise ConfigError(
                f"drafter={drafter.name} is an encoder-decoder, but target.path={path} is not, so its encoder would "
                "have no input: give a drafter without an encoder"
            )
        return
    drafts = drafter.kind.drafts_with_encoders(drafter.settings)
    attention, executor, baseline = checked.root.attention, chosen["executor"], chosen["baseline"]
    for key, value, possible, others in (
        ("drafter", drafter.name, drafts, "model, tree, ngram or prompt_lookup"),
        ("executor", executor.name, executor.kind.runs_encoders, "auto, eager, prepacked or compiled"),
        ("attention", attention, attention != "triton", "sdpa"),
        ("baseline", baseline.name, baseline.kind.runs_encoders, "autoregressive or transformers"),
    ):
        if not possible:
            raise ConfigError(
                f"{key}={value} is not possible with target.path={path}, an encoder-decoder: choose {key}={others}"
            )


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


def notes(target: Model, drafter: Drafter, verifier: Verifier, applied: Sequence[str]) -> list[str]:
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
