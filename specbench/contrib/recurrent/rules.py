"""What models with a recurrent state cannot be combined with."""

from collections.abc import Iterator, Sequence

from specbench.config.memory import ModelSize, size
from specbench.config.validate import ValidatedConfig
from specbench.decoding.model import Model
from specbench.errors import ConfigError
from specbench.executors.machine import free_bytes


def refuse_states(checked: ValidatedConfig, models: Sequence[ModelSize]) -> None:
    """Raises ConfigError if one of the models, the target's first, has a recurrent state that another choice cannot
    use."""
    chosen, whose = checked.choices, [*_with_state(checked, models)]
    if not whose:
        return
    drafter, executor = chosen["drafter"], chosen["executor"]
    fits = (drafter.kind.with_states or not models[0].recurrent) and (
        drafter.kind.own_states or not any(model.recurrent for model in models[1:])
    )
    for key, value, possible, others in (
        ("drafter", drafter.name, fits and not drafter.kind.trees, "model, ngram or prompt_lookup"),
        ("executor", executor.name, executor.kind.runs_recurrent, "auto, eager or prepacked"),
        ("executor.compile", "true", getattr(executor.settings, "compile", None) != "true", "auto or false"),
        ("attention", checked.root.attention, checked.root.attention != "triton", "sdpa"),
        ("decoding", chosen["decoding"].name, chosen["decoding"].name != "beam", "sampling"),
    ):
        if not possible:
            raise ConfigError(
                f"{key}={value} is not possible with {whose[0]}, a model with a recurrent state, which cannot branch "
                f"and is kept and restored as a whole: choose {key}={others}"
            )


def _with_state(checked: ValidatedConfig, models: Sequence[ModelSize]) -> Iterator[str]:
    """The settings that name a model with a state."""
    named = (f"{role}.path={s.path}" for role in ("target", "drafter") for s in checked.choices[role].settings.models())
    for name, model in zip(named, models, strict=True):
        if model.recurrent:
            yield name


def refuse_states_that_do_not_fit(models: Sequence[Model], rows: int, gamma: int) -> None:
    """Raises ConfigError if the device has no room for the states that are kept: one for each token that a round reads,
    one from before it, and one that a prompt beside it is read into."""
    kept = gamma + 3
    needed = sum(int(model.state_bytes) for model in models) * rows * kept
    free = free_bytes(models[0].device)
    if needed > free:
        raise ConfigError(
            f"the run needs {size(needed)} for recurrent states, {kept} of each of {rows} rows, but {size(free)} "
            "are free: use a smaller batch_size or gamma"
        )
