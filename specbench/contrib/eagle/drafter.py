"""Published draft models that read the target's hidden states: EAGLE-3 (2503.01840), EAGLE-1 (2401.15077) and EAGLE-2
(2406.16858)."""

import logging
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor

from specbench.component import Selections
from specbench.contrib.eagle.config import EagleConfig, feature_layers
from specbench.contrib.eagle.model import EagleModel, ParallelEagleModel
from specbench.contrib.eagle.weights import features_of, inspect, load_eagle
from specbench.data.prompts import render
from specbench.decoding.state import State
from specbench.decoding.token_tree import Tree
from specbench.drafters.model import DraftMemory
from specbench.drafters.mtp import MtpDrafter
from specbench.drafters.sampling_overrides import OwnSampling
from specbench.drafters.tree_shapes import TreeSettings
from specbench.errors import ConfigError, shown
from specbench.models.checkpoint import MODEL, local_path
from specbench.models.context import Context
from specbench.models.heads import PartSettings
from specbench.models.language_model import LanguageModel
from specbench.models.load import load_config
from specbench.models.sizes import column_bytes

log = logging.getLogger(__name__)
TEXTS, TEXT_TOKENS = 4, 256  # prompts, and tokens of each, on which two readings of a checkpoint are compared


class EagleDrafter(MtpDrafter):
    """EAGLE-1 and EAGLE-2: a layer reads the target's last hidden states, and its output has the target's matrix."""

    class Settings(PartSettings, OwnSampling, TreeSettings):
        part: ClassVar[str] = "path"
        must: ClassVar[str] = MODEL
        version: ClassVar[int] = 1
        path: str = Field(description="a folder or hub id of an EAGLE checkpoint")

        def layers(self) -> list[int] | None:
            """The layers in front of which it reads hidden states, if they are given."""
            return None

        def own_bytes(self, target: Any, size: Any, itemsize: int) -> tuple[int, int, int]:
            weights = super().own_bytes(target, size, itemsize)[0]
            if not weights:
                return 0, 0, 0
            config, _ = inspect("drafter.path", self.path, self.version, self.layers())
            heard = config.target_hidden_size * (features_of(config, self.layers()) if config.aux else 1)
            return weights, column_bytes(config.layers, itemsize), heard * itemsize

    @classmethod
    def refuses(cls, settings: Any, run: Selections) -> str | None:
        if not local_path(settings.path).is_dir():
            return None
        layers = settings.layers()
        config, _ = inspect("drafter.path", settings.path, settings.version, layers)
        target = run["target"].settings
        text = load_config(target, "target").get_text_config()
        reason = unfit(config, text, layers)
        return reason and f"with target.path={target.path}: {reason}"

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "EagleDrafter":
        key, layers = "drafter.path", settings.layers()
        module, config, targets = load_eagle(settings.path, key, target, settings.version, layers)
        if (reason := unfit(config, target.config, layers)) is not None:
            raise ConfigError(f"{key}={settings.path} is not possible with target.path={target.name}: {reason}")
        readings = feature_layers(config, target.config.num_hidden_layers, layers)
        normed = config.norm_output or config.version == 1
        name, sampling = f"{settings.path}'s EAGLE-{settings.version} layers", settings.own(context).sampling
        kind, made = (EagleModel, cls) if config.mask_token is None else (ParallelEagleModel, ParallelEagleDrafter)
        model = kind(module, target, name, sampling, context.gamma, readings[0], normed, targets)
        drafter = made(model, target.vocab_size, context.gamma, settings.tree_shape(model, target.sampling.greedy))
        drafter.longest = None if config.mask_token is None else context.gamma  # no probe of costs drafts more
        requests = [render(prompt, [], target.tokenizer, target.chat_template) for prompt in context.prompts[:TEXTS]]
        texts = [request.tokens[:TEXT_TOKENS] for request in requests if len(request.tokens) > 1]
        drafter.notes = [choose_reading(model, target, readings, texts)] if len(readings) > 1 and texts else []
        return drafter


class Eagle3Drafter(EagleDrafter):
    """EAGLE-3: the hidden states of several of the target's layers, and often a smaller vocabulary."""

    class Settings(EagleDrafter.Settings):
        version = 3
        feature_layers: str | list[Annotated[int, Field(ge=0)]] = "auto"

        def check(self, prefix: str) -> None:
            super().check(prefix)
            if self.feature_layers != "auto" and not self.layers():
                raise ConfigError(
                    f"{prefix}feature_layers={shown(self.feature_layers)} is not allowed: it must be auto, or a list "
                    "of numbers of layers"
                )

        def layers(self) -> list[int] | None:
            return self.feature_layers if isinstance(self.feature_layers, list) else None


class ParallelEagleDrafter(Eagle3Drafter):
    """P-EAGLE: one call gives the logits of all guesses, and q of a guess does not depend on the guesses before it. The
    memory of a step is the logits of the guesses that are left."""

    def prepare(self, state: State, steps: int) -> tuple[tuple[Any, ...], int]:
        return super().prepare(state, 2 * self.gamma)

    def read(
        self, x: Tensor, first: Tensor, memory: DraftMemory, visible: int, tree: Tree | None = None
    ) -> tuple[Tensor, DraftMemory]:
        left, behind = memory
        assert left is not None and isinstance(self.pairs, ParallelEagleModel)
        if behind is not None:  # hidden states of the target
            left = self.pairs.block(x, left, first - 1, behind, visible).flatten(1)[:, None]
        each = left.unflatten(2, (-1, self.vocab_size))
        return each[:, :, 0], (each[:, :, 1:].flatten(2), None)


def unfit(config: EagleConfig, target: Any, layers: list[int] | None) -> str | None:
    """Why a draft model does not fit a target of this configuration, or None."""
    size = target.hidden_size
    if config.target_hidden_size != size:
        return f"it reads hidden states of {config.target_hidden_size}, and the target's have {size}"
    try:
        feature_layers(config, target.num_hidden_layers, layers)
    except ValueError as error:
        return f"{error}: give drafter.feature_layers"
    if config.vocab_size > target.vocab_size and config.draft_vocab_size < config.vocab_size:
        return f"it is for {config.vocab_size} tokens, and the target has {target.vocab_size}"
    return None


def choose_reading(
    model: EagleModel, target: LanguageModel, readings: Sequence[tuple[int, ...]], texts: Sequence[Sequence[int]]
) -> str:
    """Has the model read the layers of the reading that fits best, the first one if several do; returns what was
    found, in a sentence."""
    shares, positions = [], 0
    for layers in readings:
        model.listen(target, layers)
        equal, positions = model.agreement(target, texts)
        shares.append(equal / positions)
    best = max(range(len(readings)), key=shares.__getitem__)
    model.listen(target, readings[best])
    others = ", ".join(f"{shares[i]:.1%} with {list(readings[i])}" for i in range(len(readings)) if i != best)
    found = (
        f"{model.name} read the hidden states in front of layers {list(readings[best])}: at {shares[best]:.1%} of "
        f"{positions} positions of the first prompts their likeliest token is the target's, {others} "
        "(drafter.feature_layers)"
    )
    log.info(found)
    return found
