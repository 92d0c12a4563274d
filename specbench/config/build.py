"""Builds the parts of a run from a checked configuration: prompts, models and components."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.filesize import decimal

from specbench.config.check import Checked, check_models, memory_needed
from specbench.config.compose import LOADED, RunConfig
from specbench.data.prompts import Prompt, Request, load, notes_on_prompts, render
from specbench.decoding import sampling
from specbench.decoding.sampling import Sampling
from specbench.drafters.base import Drafter
from specbench.errors import ConfigError
from specbench.executors.machine import free_bytes, pick_device, pick_dtype
from specbench.models.generation import not_applied
from specbench.models.language_model import LanguageModel
from specbench.models.load import Context, footprint, load_tokenizer, uses_template
from specbench.models.sizes import ModelSize
from specbench.policies.base import GammaPolicy
from specbench.policies.workload import Workload
from specbench.verifiers.base import Verifier

if TYPE_CHECKING:
    from specbench.decoding.stops import StopStrings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """What a run is made of."""

    checked: Checked
    target: LanguageModel
    drafter: Drafter
    policy: GammaPolicy
    verifier: Verifier
    decoding: Any  # a `config.compose.Decoding`
    prompts: Sequence[Prompt]
    rendered: Mapping[Prompt, Request]  # of prompts of one turn
    peers: Mapping[str, Any]  # by name
    workload: Workload
    spare: int  # cache columns that a round's guesses may take beyond a row's limit
    notes: Sequence[str]  # what a reader of the numbers must know

    @property
    def root(self) -> RunConfig:
        """The run's scalars."""
        return self.checked.root

    @cached_property
    def stop_strings(self) -> "StopStrings | None":
        """What finds the run's stop strings, if it has any."""
        if not self.root.stop_strings:
            return None
        from specbench.decoding.stops import StopStrings

        return StopStrings(self.root.stop_strings, self.target.tokenizer)

    @property
    def longest_prompt(self) -> int:
        """The most tokens of a prompt with one to follow; of encoder-decoders, the longest input of their encoders."""
        if self.target.start_tokens is None:
            return self.target.context - 1
        return min(m.encoder.context for m in (self.target, *self.drafter.models) if m.encoder is not None)


def build(
    checked: Checked, announce: Callable[[str], None] = log.info, loaded: dict[str, LanguageModel] | None = None
) -> Parts:
    """Reads the prompts, says what memory the run needs, then loads the models and puts the parts together. Targets
    are kept in `loaded`, by the settings that they depend on, and not loaded again. Raises ConfigError."""
    root, choices = checked.root, checked.choices
    targets = {} if loaded is None else loaded
    key = json.dumps([checked.resolved.get(name) for name in LOADED], sort_keys=True, default=str)
    policy: GammaPolicy = choices["gamma_policy"].build()
    choices["verifier"].kind.refuse_gamma(choices["verifier"].settings, policy.largest)
    prompts = chosen_prompts(load(choices["data"].build()), root)
    workload: Workload = choices["workload"].build(root.seed)
    workload.refuse(prompts)
    refuse_other_tokens(checked)
    context = context_of(checked, policy.largest)
    sizes = sizes_of(checked, context)
    tokenizer = load_tokenizer(choices["target"].settings, "target")
    chat = uses_template(choices["target"].settings, tokenizer, "target")
    requests = {prompt: render(prompt, ["..."] * (len(prompt.turns) - 1), tokenizer, chat) for prompt in prompts}
    spare = spare_columns(checked, policy.largest)
    longest = max(len(request.tokens) for request in requests.values())
    announce(memory_needed(checked, context, sizes, longest, spare, key in targets))
    scored = for_scoring(checked, context)
    if key in targets:
        target = targets[key].shared(scored.sampling, scored.new_cache, scored.executor)
    else:
        target = targets[key] = choices["target"].build(scored)
    drafter: Drafter = choices["drafter"].build(context, target)
    refuse_unfit(target, drafter, policy.largest, root.batch_size)
    refuse_short_context(checked, target, drafter, requests)
    decoding = choices["decoding"].build()
    decoding.refuse_models([target, *drafter.models])
    verifier: Verifier = (
        choices["lenience_policy"].build(root.lenience).verifier(partial(choices["verifier"].build, scored.sampling))
    )
    # Of peers: a drafter that needs the target's hidden states is no model of its own.
    assistant = drafter.models[0] if drafter.models and not drafter.needs_hidden else None
    return Parts(
        checked=checked,
        target=target,
        drafter=drafter,
        policy=policy,
        verifier=verifier,
        decoding=decoding,
        prompts=prompts,
        rendered={prompt: request for prompt, request in requests.items() if len(prompt.turns) == 1},
        peers=choices["peers"].build(context, target, assistant, root.gamma),
        workload=workload,
        spare=spare,
        notes=[
            *(notes_on_prompts([*requests.values()], tokenizer, chat) if target.start_tokens is None else ()),
            *notes_on_models(target, drafter, verifier, decoding.generate_settings),
            *(
                [f"texts end at the context of {target.context} tokens, before max_new_tokens={root.max_new_tokens}"]
                if longest + root.max_new_tokens > target.context and not target.encoder
                else []
            ),
        ],
    )


def context_of(checked: Checked, gamma: int) -> Context:
    """What all models of the run have in common; `gamma` is the largest of its policy. Raises ConfigError."""
    root, choices = checked.root, checked.choices
    device = pick_device(root.device)
    if device.type == "cuda":
        from specbench.kernels import ops

        sampling.use(ops)
    return Context(
        device=device,
        dtype=pick_dtype(root.dtype, device),
        sampling=Sampling(root.temperature, root.top_k, root.top_p, root.repetition_penalty),
        new_cache=choices["cache"].build,
        executor=choices["executor"].build(device, choices),
        seed=root.seed,
        gamma=gamma,
        attention=root.attention,
        stop_strings=root.stop_strings,
    )


def sizes_of(checked: Checked, context: Context) -> list[ModelSize]:
    """The size of the target, then of the drafter's models, which the configuration can run. Raises ConfigError."""
    roles = ("target", "drafter")
    models = [(model, role) for role in roles for model in checked.choices[role].settings.models()]
    sizes = [footprint(model, role, context.dtype) for model, role in models]
    check_models(checked.root, checked.choices, sizes, context.gamma)
    if any(size.recurrent for size in sizes):
        context.executor.run_eagerly("a model has a recurrent state")
    return sizes


def for_scoring(checked: Checked, context: Context) -> Context:
    """Of target and verifier. Lenience at temperature 0 compares the target's probabilities before argmax."""
    leniences = checked.choices["lenience_policy"]
    least = leniences.kind.lowest(leniences.settings, checked.root.lenience)
    return replace(context, sampling=replace(context.sampling, before_argmax=least < 1))


def chosen_prompts(prompts: Sequence[Prompt], root: RunConfig) -> list[Prompt]:
    """The `take` prompts after the first `skip`, as they are or, if `order` is not 0, shuffled with this seed: their
    noise does not depend on it. Raises ConfigError if none is left."""
    found = list(prompts)
    if root.order:
        found = [prompts[i] for i in np.random.default_rng(root.order).permutation(len(prompts))]
    if root.skip >= len(found):
        raise ConfigError(f"skip={root.skip} is not possible: data has {len(found)} prompts, and none is left")
    return found[root.skip :][: root.take or None]


def spare_columns(checked: Checked, gamma: int) -> int:
    """Cache columns that a round's guesses may take beyond a row's limit."""
    drafter, decoding = checked.choices["drafter"], checked.choices["decoding"]
    nodes = drafter.kind.nodes(drafter.settings, gamma)
    return int(decoding.kind.spare(decoding.settings, nodes, gamma, checked.root.max_new_tokens))


def refuse_other_tokens(checked: Checked) -> None:
    """p and q must be distributions over the same tokens. Raises ConfigError, before a model is loaded."""
    target, drafter = checked.choices["target"].settings, checked.choices["drafter"].settings
    if "vocabulary" in vars(drafter) and drafter.vocabulary == "intersection":
        return
    for model in drafter.models():
        if model.path == target.path:
            continue
        theirs = load_tokenizer(target, "target").get_vocab()
        ours = load_tokenizer(model, "drafter").get_vocab()
        if theirs != ours:
            raise ConfigError(
                f"target.path={target.path} and drafter.path={model.path} have different tokenizers ({len(theirs)} and "
                f"{len(ours)} tokens): they must share one; drafter=suffix, prompt_lookup and ngram need no second "
                f"model, and drafter=model drafter.path={model.path} drafter.vocabulary=intersection guesses the "
                "tokens that both have"
            )


def refuse_unfit(target: LanguageModel, drafter: Drafter, largest: int, rows: int) -> None:
    """Checks that need the loaded models. Raises ConfigError."""
    for model in drafter.models:
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
    kept = largest + 3  # states of each token of a round, of before it, and of a prompt beside it
    needed = sum(int(model.state_bytes) for model in (target, *drafter.models)) * rows * kept
    if needed > (free := free_bytes(target.device)):
        raise ConfigError(
            f"the run needs {decimal(needed)} for recurrent states, {kept} of each of {rows} rows, but "
            f"{decimal(free)} are free: use a smaller batch_size or gamma"
        )


def refuse_short_context(
    checked: Checked, target: LanguageModel, drafter: Drafter, requests: Mapping[Prompt, Request]
) -> None:
    """Raises ConfigError if the drafter's context leaves no prompt room for a guess and the token after it. Of several
    turns the first may be shorter than what was rendered, the last; the prompts of encoders are not in that context."""
    if target.encoder is not None or any(len(prompt.turns) > 1 for prompt in requests):
        return
    shortest = min(len(request.tokens) for request in requests.values())
    if shortest + 2 > drafter.context:
        name = "".join(f" ({model.name})" for model in drafter.models[:1])
        raise ConfigError(
            f"drafter={checked.names['drafter']}{name} is not possible: its context is {drafter.context} tokens, and "
            f"the shortest prompt has {shortest}: choose a drafter with a longer context, or data with shorter prompts"
        )


def notes_on_models(target: LanguageModel, drafter: Drafter, verifier: Verifier, applied: Sequence[str]) -> list[str]:
    """Sentences that a reader of the numbers must know; `applied` are settings of a generation_config."""
    found = []
    for role, model in (("target", target), *(("drafter", model) for model in drafter.models)):
        if model.random_weights:
            found.append(f"{role} has random weights: its times are real, its text and alpha are not")
        found += [f"no text of the {role} is longer, since {limit}" for limit in model.limits]
        settings = not_applied(model.module, model.sampling.repetition_penalty)
        if asked := [setting for setting in settings if setting not in applied]:
            found.append(
                f"the {role}'s generation_config asks for {', '.join(asked)}, which neither the run nor its peers do"
            )
        if role == "drafter" and model.vocabulary.shared is not None:
            found.append(
                f"{model.name} has {model.vocabulary.shared:,} of the target's {target.vocab_size:,} tokens, and "
                "guesses no others (drafter.vocabulary=intersection): alpha is at most p's share of them"
            )
    return [*found, *([verifier.note] if verifier.note else [])]
