"""EAGLE-3 (2503.01840): a published draft model reads hidden states of several of the target's layers.

b rows, N pairs, A layers of the target whose hidden states are read, H hidden, V' vocabulary of the draft model.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel

from specbench.decoding.sampling import Sampling
from specbench.drafters.base import OwnSampling
from specbench.drafters.eagle3_checkpoint import inspect, load_eagle3, refuse_unfit
from specbench.drafters.pair_model import PairDrafter, PairModel
from specbench.drafters.tree_shapes import TreeSettings
from specbench.models.checkpoint import MODEL, local_path
from specbench.models.heads import PartSettings
from specbench.models.intersection import DraftVocabulary
from specbench.models.language_model import LanguageModel
from specbench.models.load import Context, load_config

LayerIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class Eagle3Model(PairModel):
    """`module` has a `pair_input`, and `features`, which make of the target's hidden states of A layers the one of a
    pair. Behind the text it reads its own, before its last norm, or with `normed` behind it."""

    def __init__(
        self, module: PreTrainedModel, target: LanguageModel, name: str, sampling: Sampling, gamma: int,
        layers: Sequence[int], normed: bool, targets: Tensor | None,
    ):  # fmt: skip
        """It reads hidden states in front of the target's `layers`, and predicts tokens targets [V'], or all."""
        super().__init__(module, target, name, sampling, gamma)
        self.features: Any = self.module.features
        self.own_states = () if normed else (self.config.num_hidden_layers,)
        self.layers = target.feature_layers = tuple(layers)
        if targets is not None:
            self.vocabulary = DraftVocabulary(targets.to(self.device), self.own_vocab_size, target.vocab_size)

    def project(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.features(hidden)
        return found


class Eagle3Drafter(PairDrafter):
    """Guesses follow from pairs of the target's hidden states and tokens, as by multi-token prediction."""

    class Settings(PartSettings, OwnSampling, TreeSettings):
        must: ClassVar[str] = MODEL
        path: str = Field(description="a folder or hub id of an EAGLE-3 checkpoint")
        feature_layers: Literal["auto"] | LayerIds = "auto"

        @property
        def layers(self) -> list[int] | None:
            """The target's layers in front of which it reads hidden states, if they are given."""
            return None if self.feature_layers == "auto" else self.feature_layers

    @classmethod
    def refuse_target(cls, settings: Any, target: Any) -> None:
        if local_path(settings.path).is_dir():
            config, _ = inspect(settings.path, "drafter.path", settings.layers)
            text = load_config(target, "target").get_text_config()
            refuse_unfit(config, f"drafter.path={settings.path}", target.path, text)

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "Eagle3Drafter":
        module, config, targets = load_eagle3(settings.path, "drafter.path", target, settings.layers)
        layers = config.layers_of(target.config.num_hidden_layers)
        name, sampling = f"{settings.path}'s EAGLE-3 layers", settings.own(context).sampling
        model = Eagle3Model(module, target, name, sampling, context.gamma, layers, config.options.norm_output, targets)
        return cls(model, target.vocab_size, context.gamma, settings.tree_shape(model, target.sampling.greedy))
