"""The most memory that a run needs, from its checked configuration and its prompts, before models are loaded."""

import dataclasses
from collections.abc import Sequence

import torch

from specbench.component import from_ring
from specbench.config.components import MOST
from specbench.config.memory import Budget
from specbench.config.validate import ValidatedConfig
from specbench.data.prompts import Data, Prompt, Request, render
from specbench.drafters.sampling_overrides import OwnSampling
from specbench.errors import ConfigError
from specbench.executors.machine import free_bytes
from specbench.models.architecture import ModelSize
from specbench.models.context import Context
from specbench.models.pretrained import footprint, load_tokenizer, uses_template
from specbench.run_config import RunConfig
from specbench.stats.position_stats import CHUNK
from specbench.stats.verdict_records import LAW_BYTES

MOST_START_TOKENS = 4  # of an encoder-decoder's text: the start, a language, a task, and that no times are wanted


def spare_columns(checked: ValidatedConfig, gamma: int) -> int:
    """The columns that a request may need beyond its limit, with rounds of at most `gamma` levels of guesses."""
    drafter, choice = checked.choices["drafter"], checked.choices["decoding"]
    nodes = drafter.kind.nodes(drafter.settings, gamma)
    spare: int = choice.kind.spare(choice.settings, nodes, gamma, checked.root.max_new_tokens)
    return spare


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
    footprints = checked_sizes(checked, context, data)
    longest = footprints[0].heard or longest_text(checked, prompts, rendered)
    inputs = longest if footprints[0].crossing else 0
    columns = min((MOST_START_TOKENS if inputs else longest) + root.max_new_tokens, footprints[0].context) + spare
    drafter, decoding = chosen["drafter"], chosen["decoding"]
    nodes = drafter.kind.nodes(drafter.settings, context.gamma)
    executor, cache = context.executor, chosen["cache"]
    in_all = cache.kind.columns_in_all(cache.settings, root.batch_size, executor.columns(columns))
    peers = chosen["baseline"].kind.loads_models and executor.changes_modules
    verdict = root.verdict_tokens > 0 and executor.changes_modules and not peers  # its stock models
    copies = footprints[0].weights * (drafter.kind.target_copies + (verdict and not loaded))
    copies += verdict * sum(model.weights for model in footprints[1:])
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


def checked_sizes(checked: ValidatedConfig, context: Context, data: Data) -> list[ModelSize]:
    """The sizes of the models, the target's first. Raises ConfigError if they cannot do what was chosen."""
    chosen = checked.choices
    models = [(role, model) for role in ("target", "drafter") for model in chosen[role].settings.models()]
    if any(model.processes() > 1 for _, model in models):
        from_ring("tensor_parallel.rules.refuse_indivisible")(chosen)
    footprints = [footprint(model, role, context.dtype).share(model.processes()) for role, model in models]
    data.refuse(chosen, footprints)
    for family in dict.fromkeys(model.family for model in footprints):
        family.refuse(chosen, footprints, data)
    refuse_encoders(checked, footprints)
    if any(model.recurrent for model in footprints):
        context.executor.without_programs()
    refuse_more_than_the_target_has(checked, context.gamma, footprints[0])
    return footprints


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
    """Bytes of probabilities that are kept until texts were read, at most: the target's and the drafter's of speculated
    texts, rejected guesses included, and the target's of plain decoding's."""
    if not root.temperature:
        return 0
    plain = 4 * MOST * root.batch_size * root.max_new_tokens * vocab_size
    return int(min(LAW_BYTES, 4 * plain) + min(LAW_BYTES, plain))


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
