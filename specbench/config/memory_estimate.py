"""The most memory that a run needs, from its checked configuration and its prompts, before models are loaded."""

import dataclasses
from collections.abc import Sequence

import torch

from specbench.component import Selections
from specbench.config.components import MOST
from specbench.config.memory import Budget
from specbench.config.validate import ValidatedConfig
from specbench.data.prompts import Data, Prompt, Request, render
from specbench.drafters.sampling_overrides import OwnSampling
from specbench.errors import ConfigError
from specbench.executors.machine import free_bytes
from specbench.measure.recorder import ROOM
from specbench.measure.target_text import CHUNK
from specbench.models.context import Context
from specbench.models.load import footprint, load_tokenizer, uses_template
from specbench.models.sizes import ModelSize
from specbench.run_config import RunConfig

MOST_START_TOKENS = 2  # of an encoder-decoder's text: the start, and a token that is forced after it


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
    root, chosen, executor = checked.root, checked.choices, context.executor
    models = checked_sizes(checked, context, data)
    target, cache, decoding = models[0], chosen["cache"], chosen["decoding"]
    longest = longest_text(checked, prompts, rendered)
    inputs = longest if target.crossing else 0
    columns = min((MOST_START_TOKENS if inputs else longest) + root.max_new_tokens, target.context) + spare
    doubled = 0
    if context.device.type == "cpu" and context.dtype == torch.float32:  # linear layers' in 16 bits, beside their own
        doubled = sum(model.weights // 2 for model in (models[1:] if loaded else models) if model.halves)
    if loaded:
        models[0] = dataclasses.replace(target, weights=0, tied=0)
    drafts = chosen["drafter"].settings.own_bytes(chosen["target"].settings, target, context.dtype.itemsize)
    slots = cache.kind.columns_in_all(cache.settings, root.batch_size, executor.columns(columns))
    budget = Budget.of(
        models,
        doubled=doubled + drafts[0],
        laws=_laws(root, target.vocab_size) + _of_draft(checked, context.gamma, target.vocab_size),
        rows=root.batch_size,
        columns=columns,
        held=slots,
        tokens=decoding.kind.target_tokens(decoding.settings, checked.nodes(context.gamma), context.gamma),
        prefill_chunk=root.prefill_chunk,
        read_again=CHUNK,
        graphs=executor.captures_graphs,
        dtype=context.dtype,
        device=context.device,
        inputs=inputs,
        processes=beside,
    )
    heard = 2 * root.batch_size * longest * drafts[2]  # they stand beside those that are read
    budget = dataclasses.replace(budget, kv=budget.kv + slots * drafts[1], activations=budget.activations + heard)
    if chosen["target"].settings.divided():  # on all GPUs
        devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
        budget = dataclasses.replace(budget, free=sum(map(free_bytes, devices)))
    budget.check()
    return budget


def checked_sizes(checked: ValidatedConfig, context: Context, data: Data) -> list[ModelSize]:
    """The sizes of the models, the target's first. Raises ConfigError if they cannot do what was chosen."""
    chosen = checked.choices
    models = [(role, model) for role in ("target", "drafter") for model in chosen[role].settings.models()]
    footprints = [footprint(model, role, context.dtype) for role, model in models]
    refuse_states(chosen, footprints)
    refuse_encoders(checked, footprints)
    if any(model.recurrent for model in footprints):
        context.executor.run_eagerly("a model has a recurrent state")
    refuse_more_than_the_target_has(checked, context.gamma, footprints[0])
    return footprints


def refuse_states(chosen: Selections, models: Sequence[ModelSize]) -> None:
    """Raises ConfigError if one of the models, the target's first, has a recurrent state that another choice cannot
    use."""
    named = [f"{role}.path={s.path}" for role in ("target", "drafter") for s in chosen[role].settings.models()]
    whose = [name for name, model in zip(named, models, strict=True) if model.recurrent]
    if not whose:
        return
    drafter, executor, attention = chosen["drafter"], chosen["executor"], chosen.scalars["attention"]
    fits = (drafter.kind.with_states or not models[0].recurrent) and (
        drafter.kind.searches or not any(model.recurrent for model in models[1:])
    )
    for key, value, possible, others in (
        ("drafter", drafter.name, fits and not drafter.kind.trees, "model, ngram or prompt_lookup"),
        ("executor", executor.name, executor.kind.runs_recurrent, "auto or eager"),
        ("attention", attention, attention != "triton", "sdpa"),
        ("decoding", chosen["decoding"].name, chosen["decoding"].name != "beam", "sampling"),
    ):
        if not possible:
            raise ConfigError(
                f"{key}={value} is not possible with {whose[0]}, a model with a recurrent state, which cannot branch "
                f"and is kept and restored as a whole: choose {key}={others}"
            )


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
    return int(min(ROOM, 4 * plain) + min(ROOM, plain))


def _of_draft(checked: ValidatedConfig, gamma: int, vocab_size: int) -> int:
    """Bytes of `Drafter.stored` p, and of as many logits at temperature 0, else of q that is no point mass."""
    drafter = checked.choices["drafter"]
    copies = 1 if checked.root.temperature and drafter.kind.point_masses(drafter.settings) else 2
    return copies * 4 * checked.root.batch_size * int(drafter.kind.stored(drafter.settings, gamma)) * vocab_size


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
    chosen = checked.choices
    drafter, executor = chosen["drafter"], chosen["executor"]
    path, attention = chosen["target"].settings.path, checked.root.attention
    if not models[0].crossing:
        if any(model.crossing for model in models):
            raise ConfigError(
                f"drafter={drafter.name} is an encoder-decoder, but target.path={path} is not, so its encoder would "
                "have no input: give a drafter without an encoder"
            )
        return
    drafts = drafter.kind.with_encoders
    for key, value, possible, others in (
        ("drafter", drafter.name, drafts, "model, tree, ngram or prompt_lookup"),
        ("executor", executor.name, executor.kind.runs_encoders, "auto, eager or compiled"),
        ("attention", attention, attention != "triton", "sdpa"),
    ):
        if not possible:
            raise ConfigError(
                f"{key}={value} is not possible with target.path={path}, an encoder-decoder: choose {key}={others}"
            )
