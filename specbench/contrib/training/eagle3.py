"""Trains an EAGLE-3 draft model (2503.01840): it reads the target's hidden states, then its own."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from specbench.contrib.eagle.config import IDS, eagle_config
from specbench.contrib.eagle.weights import EMBEDDING, HEAD, own_name, skeleton
from specbench.contrib.training.features import FeatureStudent, applications, last_norm, layer_sizes
from specbench.contrib.training.student import quoted
from specbench.models.language_model import hidden_states
from specbench.settings import setting

MEASURED = 5  # guesses whose agreement is measured, at least


class Eagle3Student(FeatureStudent):
    """A layer that reads the target's hidden states, then its own (EAGLE-3, training-time test, section 3.2).

    Step k makes guess k behind every place at once, from the states that the layer itself made in step k - 1.
    """

    @dataclass
    class Settings(FeatureStudent.Settings):
        steps: int = setting(ge=1, le=32)
        head: str = setting(choices=("own", "target"))

        @property
        def ahead(self) -> int:
            return max(self.steps, MEASURED)

    @classmethod
    def use(cls, settings: Any, folder: Path) -> list[str]:
        return ["drafter=eagle3", quoted("drafter.path", folder)]

    def build(self, target: Any) -> None:
        ids, total = self.settings.feature_layers or None, target.num_hidden_layers
        if ids is None and total < 8:  # where 2, n // 2 and n - 3 are not three layers in order
            ids = [max(1, round(total * i / 3)) for i in (1, 2, 3)]
        self.layers = ids or [2, total // 2, total - 3]
        self.config_json = self.speculators(
            "eagle3", "Eagle3DraftModel", self.settings.steps, layer_sizes(target, "llama", self.settings),
            norm_before_residual=False, target_hidden_size=None, embed_requires_grad=False, **{IDS: ids},
        )  # fmt: skip
        self.network = skeleton(eagle_config(self.config_json, 3), (), len(self.layers))
        self.network.set_input_embeddings(self.target.get_input_embeddings())
        head = self.network.get_output_embeddings().weight.requires_grad_(self.settings.head == "own")
        head.data.copy_(self.head_rows())
        last_norm(self.target, self.network.model.norm)
        self.measured = self.settings.ahead

    @property
    def read_layers(self) -> Sequence[int]:
        return self.layers

    def guesses(self, tokens: Tensor, features: Tensor, spans: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        count = self.settings.steps if self.training else self.measured
        embedded, states = self.target.get_input_embeddings()(tokens), self.network.features(features)
        for k, (rows, given) in enumerate(applications(self.network, count, tokens), 1):
            with hidden_states(self.network, (self.settings.layers,)) as found:  # before the norm
                joined = self.network.pair_input(embedded[:, k:], states[:, : len(rows)])
                q = self.network(inputs_embeds=joined, **given).logits
            states = found[0]
            yield rows[None], q

    def tensors(self) -> Mapping[str, Tensor]:
        state = {own_name(name): tensor for name, tensor in self.network.state_dict().items()}
        theirs = (EMBEDDING,) if self.settings.head == "own" else (EMBEDDING, HEAD)
        return {name: tensor for name, tensor in state.items() if name not in theirs}
