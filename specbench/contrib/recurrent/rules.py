"""What models with a recurrent state cannot be combined with."""

from collections.abc import Iterator, Sequence

from specbench.component import Selections
from specbench.errors import ConfigError
from specbench.models.architecture import ModelSize


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
