"""Recurrent and hybrid models among the architectures: their layers carry a state."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from transformers import PretrainedConfig, PreTrainedModel

from specbench.component import Selections
from specbench.contrib.recurrent.recurrence import Recurrence, attending_layers, keeper_of
from specbench.errors import ConfigError
from specbench.models.architecture import Family, LayerState, ModelSize
from specbench.models.attention_mask import AttentionMask


class RecurrentFamily(Family):
    """What models with a state need."""

    def sized(self, config: PretrainedConfig, size: ModelSize) -> ModelSize:
        column = size.column * attending_layers(config.get_text_config()) // size.layers
        return replace(size, recurrent=True, column=column)

    def state(self, module: PreTrainedModel, mask: AttentionMask, name: str) -> LayerState:
        return Recurrence(module, keeper_of(module, mask.config), mask, name)

    def refuse(self, run: Selections, models: Sequence[ModelSize]) -> None:
        refuse_states(run, models)


def refuse_states(chosen: Selections, models: Sequence[ModelSize]) -> None:
    """Raises ConfigError if one of the models, the target's first, has a recurrent state that another choice cannot
    use."""
    whose = [*_with_state(chosen, models)]
    if not whose:
        return
    drafter, executor, attention = chosen["drafter"], chosen["executor"], chosen.scalars["attention"]
    fits = (drafter.kind.with_states or not models[0].recurrent) and (
        drafter.kind.searches or not any(model.recurrent for model in models[1:])
    )
    for key, value, possible, others in (
        ("drafter", drafter.name, fits and not drafter.kind.trees, "model, ngram or prompt_lookup"),
        ("executor", executor.name, executor.kind.runs_recurrent, "auto, eager or prepacked"),
        ("executor.compile", "true", getattr(executor.settings, "compile", None) != "true", "auto or false"),
        ("attention", attention, attention != "triton", "sdpa"),
        ("decoding", chosen["decoding"].name, chosen["decoding"].name != "beam", "sampling"),
    ):
        if not possible:
            raise ConfigError(
                f"{key}={value} is not possible with {whose[0]}, a model with a recurrent state, which cannot branch "
                f"and is kept and restored as a whole: choose {key}={others}"
            )


def _with_state(chosen: Selections, models: Sequence[ModelSize]) -> Iterator[str]:
    """The settings that name a model with a state."""
    named = (f"{role}.path={s.path}" for role in ("target", "drafter") for s in chosen[role].settings.models())
    for name, model in zip(named, models, strict=True):
        if model.recurrent:
            yield name
