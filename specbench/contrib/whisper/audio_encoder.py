"""Models that hear, as Whisper does: what their encoder reads of a sound, and what their text begins with.

F features of a frame.
"""

import copy
import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig

from specbench.data.sound import EncoderInput, Features, Floats, Sound, Speech
from specbench.errors import ConfigError, first_line, shown

STRIDE = 2  # frames of a position: Whisper's second convolution


class Hearing:
    """How a model hears: the feature extractor that came with it."""

    def __init__(self, extractor: Any, config: Any, key: str):
        """`key` names the model. Raises ConfigError if the features are not those that its encoder takes."""
        self.extractor, self.positions = extractor, int(config.max_source_positions)
        made = (getattr(extractor, "feature_size", None), getattr(extractor, "nb_max_frames", None))
        taken = (config.num_mel_bins, STRIDE * self.positions)
        if made != taken:
            raise ConfigError(
                f"{key} has a feature extractor that makes {made[0]} features of {made[1]} frames, but its encoder "
                f"takes {taken[0]} of {taken[1]}: give the preprocessor_config.json that the model was trained with"
            )

    @staticmethod
    def of_shape(config: Any, key: str) -> "Hearing":
        """The feature extractor of a shape without a checkpoint."""
        made = transformers.WhisperFeatureExtractor(feature_size=config.num_mel_bins)
        seconds = STRIDE * config.max_source_positions * made.hop_length // made.sampling_rate
        made = transformers.WhisperFeatureExtractor(feature_size=config.num_mel_bins, chunk_length=max(1, seconds))
        return Hearing(made, config, key)

    def __call__(self, sound: Sound) -> Features:
        """What the encoder reads of a sound; of one that is too long, only its length is of use."""
        samples = self.extractor.n_samples / self.positions  # of a position
        needed = math.ceil(sound.seconds * self.extractor.sampling_rate / samples)
        return Features(max(self.positions, needed), partial(self._values, sound))

    def _values(self, sound: Sound) -> Floats:
        """[F, frames]: the log-mel spectrum of a sound, with silence behind it. Raises ConfigError."""
        rate = self.extractor.sampling_rate
        found: Floats = self.extractor(sound.samples(rate), sampling_rate=rate, return_tensors="np").input_features[0]
        return found

    @property
    def seconds(self) -> float:
        """Seconds of a sound that a position stands for."""
        return float(self.extractor.n_samples / self.positions / self.extractor.sampling_rate)

    @property
    def description(self) -> dict[str, Any]:
        """The settings that its features follow from."""
        kept: dict[str, Any] = self.extractor.to_dict()
        return {name: value for name, value in kept.items() if name != "processor_class"}


def probe_features(config: Any, seed: int) -> Features:
    """Some features that an encoder of this configuration takes, the same for each seed."""
    shape = (config.num_mel_bins, STRIDE * config.max_source_positions)
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return Features(config.max_source_positions, lambda: values)


def words_of(module: Any, read: EncoderInput, rows: int = 1) -> dict[str, Tensor]:
    """What the encoder of a module is called with, to read an input in each of `rows` rows: ids [rows, S], or features
    [rows, F, frames]."""
    if isinstance(read, Features):
        values = torch.from_numpy(read.values).to(module.device, module.dtype)
        return {"input_features": values.expand(rows, -1, -1)}
    return {"input_ids": torch.tensor([list(read)], device=module.device).expand(rows, -1)}


def start_of_speech(kind: Any, options: GenerationConfig, config: Any, speech: Speech, name: str) -> list[int]:
    """The tokens that generate() of the class `kind` puts before the text of a sound, by its generation_config
    `options`: the start, the language, the task, and that no times are wanted. Raises ConfigError if the language is
    not known, since generate() would guess one for each sound."""
    if getattr(options, "return_timestamps", None):
        raise ConfigError(
            f"{name} has return_timestamps=true in its generation_config, with which a token's law depends on the "
            "times before it in a way that is not known here: set it to false"
        )
    chosen: Any = copy.deepcopy(options)
    chosen.return_timestamps = False

    def detect(**_: Any) -> None:
        raise ConfigError(
            f"data.language is not set, and {name} knows {len(chosen.lang_to_id)} languages: choose the one that is "
            "spoken, such as data.language=en"
        )

    alone = SimpleNamespace(device="cpu", detect_language=detect)  # all that the method looks at
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        kind._set_language_and_task(speech.language, speech.task, None, chosen)
        found: list[int] = kind._retrieve_init_tokens(alone, None, 1, chosen, config, 0, {})[0].tolist()
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        said = ", ".join(f"data.{key}={shown(value)}" for key, value in vars(speech).items() if value is not None)
        raise ConfigError(
            f"{said or 'data=audio'} is not possible with {name} ({first_line(error)}): choose another language or "
            "task, or null"
        ) from error
    finally:
        transformers.utils.logging.set_verbosity(verbosity)
    return found
