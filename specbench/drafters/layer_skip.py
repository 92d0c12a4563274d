"""Self-speculation: the target without some of its attention and MLP layers drafts for it, on its cache (SWIFT,
2410.06916). B texts, n tokens of each, V vocabulary, H hidden."""

import copy
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from transformers import PreTrainedModel

from specbench.cache.static import StaticCache
from specbench.data.prompts import render
from specbench.decoding.autoregressive import decode_autoregressive
from specbench.decoding.noise import prompt_key
from specbench.decoding.rows import window
from specbench.decoding.sampling import Sampling
from specbench.decoding.state import Job, State
from specbench.decoding.timer import Clock
from specbench.drafters.early_exit import EarlyExitDrafter
from specbench.drafters.sampling_overrides import OwnSampling
from specbench.errors import ConfigError, first_line, shown
from specbench.executors.eager import EagerExecutor
from specbench.models.context import Context
from specbench.models.language_model import LanguageModel, decoder_layers
from specbench.models.shared_cache import BorrowedCache, view_of, with_layers
from specbench.settings import setting
from specbench.verifiers.speculative import SpeculativeVerifier

FOUND: WeakKeyDictionary[nn.Module, dict[str, tuple[list[str], str]]] = WeakKeyDictionary()  # by target and search
# By the name that transformers gives to a part of a layer.
PLACES = dict.fromkeys(("self_attn", "self_attention", "attention", "attn"), "attention")
PLACES |= dict.fromkeys(("mlp", "feed_forward", "ffn"), "mlp")
TEXTS, READ, WRITTEN = 4, 256, 32  # prompts, the last tokens of each, and tokens that the target writes after them


class LayerSkipDrafter(EarlyExitDrafter):
    """The target without the parts `skip`. If none are given, a `share` of all, found in `trials` by the mean beta
    along what the target itself writes after the first prompts."""

    on_device = True

    @dataclass
    class Settings(OwnSampling):
        skip: list[str] | None = setting()
        share: float = setting(ge=1e-3, le=0.999)
        trials: int = setting(ge=1, le=100_000)

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "LayerSkipDrafter":
        sampling, refused = settings.own(context).sampling, f"is not possible with target.path={target.name}"
        skip, notes = settings.skip, list[str]()
        try:
            parts = LayerParts(target.module)
            if skip is None:
                skip, *notes = found_subset(parts, target, settings, context, sampling)
            if missing := [name for name in skip if name not in parts.returned]:
                raise ConfigError(f"drafter.skip={shown(missing[0])} {refused}: it has {', '.join(parts.returned)}")
            module = parts.without(skip)
            run_parts(module, {})
        except (ConfigError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # as of layers that use what others have computed
            raise ConfigError(f"drafter=layer_skip {refused}: {type(error).__name__}, {first_line(error)}") from error
        name = f"{target.name} without {', '.join(sorted(skip))}"
        drafter = cls(BorrowedCache(module, target, name, sampling), target.vocab_size, context.gamma)
        drafter.notes = notes
        return drafter


class LayerParts:
    """The parts of a module that can be left out. `names`, from which a search takes, are attention.N and mlp.N of each
    layer N if a layer without them returns what it reads; else layer.N, all of it."""

    @torch.no_grad()
    def __init__(self, module: PreTrainedModel):
        """Raises ValueError if the module has no list of its layers."""
        self.layers = list(decoder_layers(module))
        self.module = with_layers(module, self.layers)
        self.within = {f"{kind}.{n}": (n, place) for n, layer in enumerate(self.layers)
                       for place, kind in PLACES.items() if layer._modules.get(place) is not None}  # fmt: skip
        whole: dict[str, Any] = {f"layer.{n}": layer for n, layer in enumerate(self.layers)}
        parts = whole | {name: self.layers[n]._modules[place] for name, (n, place) in self.within.items()}
        self.returned = {name: result for name, (_, result) in run_parts(self.module, parts).items()}
        try:
            empty = self.without(self.within)
            passed = run_parts(empty, {str(n): layer for n, layer in enumerate(decoder_layers(empty))})
            adds = all(torch.equal(read, result[0] if isinstance(result, tuple) else result)
                       for read, result in passed.values())  # fmt: skip
        except Exception:  # what the layers of this architecture do with zeros is not known
            adds = False
        self.names = [*self.within] if adds else [*whole]

    def without(self, skip: Collection[str]) -> PreTrainedModel:
        """The module without these parts, with the weights of the others."""
        layers = [view_of(layer) for layer in self.layers]
        for name in skip:
            if name in self.within:
                n, place = self.within[name]
                layers[n]._modules[place] = stand_in(layers[n]._modules[place], self.returned[name], torch.zeros_like)
        for n in (n for n in range(len(layers)) if f"layer.{n}" in skip):
            layers[n] = stand_in(layers[n], self.returned[f"layer.{n}"], lambda read: read)
        return with_layers(self.module, layers)


def run_parts(module: PreTrainedModel, parts: Mapping[str, nn.Module]) -> dict[str, tuple[Tensor, Any]]:
    """What each of these parts of a module read, [1, 2, H], and returned, when it was run on two tokens."""
    seen: dict[str, tuple[Tensor, Any]] = {}
    with ExitStack() as hooks:
        for name, part in parts.items():

            def note(_: Any, given: Any, named: Any, result: Any, name: str = name) -> None:
                seen[name] = (*given, *named.values())[0], result

            hooks.callback(part.register_forward_hook(note, with_kwargs=True).remove)
        module(input_ids=torch.zeros(1, 2, dtype=torch.long, device=module.device), use_cache=False)
    return seen


def stand_in(part: Any, returned: Any, make: Callable[[Tensor], Tensor]) -> Any:
    """A module in the place of `part`, without its weights: it makes its result of what it reads [B, n, H], and has
    None for all else that the part `returned`."""

    def forward(*given: Any, **named: Any) -> Any:
        first = make((*given, *named.values())[0])
        return (first, *[None] * (len(returned) - 1)) if isinstance(returned, tuple) else first

    empty = copy.copy(part)
    empty._modules, empty._parameters, empty._buffers = {}, {}, {}
    vars(empty)["forward"] = forward
    return empty


@torch.no_grad()
def beta_along_own_text(
    target: LanguageModel, context: Context, sampling: Sampling
) -> tuple[Callable[[PreTrainedModel], float], str]:
    """The mean beta of any module that shares the target's layers, along what the target writes after the first
    prompts, and where that is, in words. The module reads its own keys and values of this text; in a draft it reads the
    target's up to the last committed token. There is no repetition penalty."""
    plain = target.shared(context.sampling, StaticCache, EagerExecutor())
    n, jobs = min(WRITTEN, target.context // 2), list[Job]()
    for prompt in context.prompts[:TEXTS]:
        tokens = render(prompt, [], target.tokenizer, target.chat_template).tokens[-min(READ, target.context - n) :]
        jobs.append(Job(tokens, len(tokens) + n, prompt_key(context.seed, f"{prompt.id} layer_skip")))
    state = State.start(jobs, target.stop_tokens, 1, target.device)
    plain.allocate(len(jobs), state.tokens.shape[1])
    plain.prefill(state)
    decode_autoregressive(state, plain, SpeculativeVerifier(context.sampling), Clock())
    starts = [len(job.tokens) - 1 for job in jobs]
    begin = torch.tensor(starts, device=target.device)
    x = window(state.tokens, begin, n)  # [B, n], each in front of one that was written
    known = begin[:, None] + torch.arange(n, device=target.device) < state.length[:, None] - 1  # [B, n]
    p = context.sampling.probabilities(plain.logits(x, starts))  # [B, n, V]

    @torch.no_grad()
    def beta(module: PreTrainedModel) -> float:
        model = BorrowedCache(module, plain, "a trial", sampling)
        model.borrow()
        return float(torch.minimum(p, sampling.probabilities(model.logits(x, starts))).sum(-1)[known].mean())

    return beta, f"{int(known.sum())} tokens that the target wrote after the first {len(jobs)} prompts"


def found_subset(
    parts: LayerParts, target: LanguageModel, settings: LayerSkipDrafter.Settings, context: Context, sampling: Sampling
) -> tuple[list[str], str]:
    """The parts to leave out, and how they were found, in words. Ways of decoding that share a target, such as one for
    each gamma, share the search."""
    texts = [(prompt.id, *prompt.turns[:1]) for prompt in context.prompts[:TEXTS]]
    search = repr((settings.share, settings.trials, context.seed, sampling, context.sampling, texts))
    known = FOUND.setdefault(target.module, {})
    if search not in known:
        beta, text = beta_along_own_text(target, context, sampling)
        count = max(1, round(settings.share * len(parts.names)))
        skip, most = best_subset(parts.names, count, settings.trials, context.seed,
                                 lambda skip: beta(parts.without(skip)))  # fmt: skip
        note = (
            f"the target without {', '.join(skip)} drafts: of {settings.trials} sets of {count} parts these "
            f"have the largest mean beta, {most:.3f}, at {text}, which the run may measure too, so that alpha "
            "is larger than on others. No time counts this search, which is before the run"
        )
        known[search] = skip, note
    return known[search]


def best_subset(
    names: Sequence[str], count: int, trials: int, seed: int, score: Callable[[Sequence[str]], float]
) -> tuple[list[str], float]:
    """`count` of the names with a large score, and the score: from names at equal distances on, one is exchanged for
    another in each trial, which is undone if the score falls."""
    draws, skip = random.Random(seed), [names[i * len(names) // count] for i in range(count)]
    most, others = score(skip), [name for name in names if name not in skip]
    shown_in = Console(stderr=True)
    for _ in track(range(trials - 1 if others else 0), "layers to skip", console=shown_in, transient=True):
        i, j = draws.randrange(count), draws.randrange(len(others))
        trial = [*skip[:i], others[j], *skip[i + 1 :]]
        if (found := score(trial)) >= most:
            others[j], skip, most = skip[i], trial, found
    return sorted(skip, key=names.index), most
