"""Recurrent and hybrid models among the architectures: their layers carry a state."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from specbench.component import Selections
from specbench.contrib.recurrent.recurrence import Recurrence, attending_layers, keeper_of
from specbench.contrib.recurrent.rules import refuse_states
from specbench.models.architecture import Family, LayerState, ModelSize
from specbench.models.attention_mask import AttentionMask


class RecurrentFamily(Family):
    """What models with a state need."""

    def sized(self, config: PretrainedConfig, size: ModelSize) -> ModelSize:
        column = size.column * attending_layers(config.get_text_config()) // size.layers
        return replace(size, recurrent=True, column=column)

    def state(self, module: PreTrainedModel, mask: AttentionMask, name: str) -> LayerState:
        return Recurrence(module, keeper_of(module, mask.config), mask, name)

    def refuse(self, run: Selections, models: Sequence[ModelSize], data: Any) -> None:
        refuse_states(run, models)
