"""What models that hear cannot be combined with, found before one loads."""

from collections.abc import Sequence

from specbench.component import Selections
from specbench.contrib.whisper.audio_encoder import load_hearing, load_start
from specbench.contrib.whisper.sound import Speech
from specbench.errors import ConfigError
from specbench.models.architecture import ModelSize
from specbench.models.pretrained import load_config


def refuse_sounds(chosen: Selections, models: Sequence[ModelSize], speech: Speech | None) -> None:
    """Raises ConfigError if the target hears and the data are text, or the other way round, if a drafter reads what the
    target does not, or if the language is not known. `speech` is that of the data, None for text."""
    hears = bool(models[0].heard)
    data, path = chosen["data"].name, chosen["target"].settings.path
    if hears and speech is None:
        raise ConfigError(
            f"data={data} is text, but target.path={path} hears: choose data=audio, audio_hub or librispeech"
        )
    if speech is not None and not hears:
        raise ConfigError(
            f"data={data} is sound, but target.path={path} reads text: give a target that hears, which is whisper, or "
            "other data"
        )
    for settings, model in zip(chosen["drafter"].settings.models(), models[1:], strict=True):
        if model.crossing and bool(model.heard) != hears:
            words = ("reads text", "hears") if hears else ("hears", "reads text")
            raise ConfigError(
                f"drafter.path={settings.path} {words[0]}, but target.path={path} {words[1]}: give a drafter whose "
                "encoder has the same input, or none"
            )
    if speech is not None:
        refuse_other_features(chosen, models)
        settings = chosen["target"].settings
        start = load_start(settings, "target", load_config(settings, "target"), speech)
        for drafts, model in zip(chosen["drafter"].settings.models(), models[1:], strict=True):
            if model.heard and max(start) >= model.vocab_size:
                raise ConfigError(
                    f"drafter.path={drafts.path} has {model.vocab_size:,} tokens, and texts begin with {start}, by "
                    f"target.path={path}: give a drafter with the target's tokens"
                )


def refuse_other_features(chosen: Selections, models: Sequence[ModelSize]) -> None:
    """Raises ConfigError if a drafter's encoder takes other features of a sound than the target's."""
    target, *drafters = (
        (role, settings) for role in ("target", "drafter") for settings in chosen[role].settings.models()
    )
    wanted = load_hearing(target[1], "target", load_config(target[1], "target")).description
    for (role, settings), model in zip(drafters, models[1:], strict=True):
        if not model.heard:
            continue
        found = load_hearing(settings, role, load_config(settings, role)).description
        differ = [f"{key} {found.get(key)} and {wanted.get(key)}" for key in sorted({*found, *wanted})
                  if found.get(key) != wanted.get(key)]  # fmt: skip
        if differ:
            raise ConfigError(
                f"drafter.path={settings.path} and target.path={target[1].path} hear differently (by their feature "
                f"extractors: {', '.join(differ)}): they must take the same features of a sound"
            )
