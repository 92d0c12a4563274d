"""Models that hear, as Whisper does: what their encoder reads of a sound, and what their text begins with.

F features of a frame.
"""

import copy
import math
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import transformers
from transformers import GenerationConfig, PreTrainedModel

from specbench.contrib.whisper.sound import Samples, Sound, Speech
from specbench.decoding.encoder_input import Features
from specbench.errors import ConfigError, first_line, shown
from specbench.models.checkpoint import source_of
from specbench.models.encoder_decoder import Encoder
from specbench.models.pretrained import PretrainedModel, options_of, reading_of

EXTRACTOR_FILES = ("preprocessor_config.json", "processor_config.json")
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

    def _values(self, sound: Sound) -> Samples:
        """[F, frames]: the log-mel spectrum of a sound, with silence behind it. Raises ConfigError."""
        rate = self.extractor.sampling_rate
        found: Samples = self.extractor(sound.samples(rate), sampling_rate=rate, return_tensors="np").input_features[0]
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


class SpeechEncoder(Encoder):
    """An encoder that reads sounds; the decoder's text begins with a language and a task."""

    pads_inputs = False  # its decoder takes no mask of the input's end, and all inputs are as long
    assisted_refusal = "draws Whisper's first token from another law"

    def __init__(self, module: PreTrainedModel, name: str, hearing: Hearing):
        """Raises ConfigError as `Encoder` does."""
        super().__init__(module, name)
        self.hearing = hearing

    def features(self, source: Any) -> Features:
        return self.hearing(source)

    def length(self, positions: int) -> str:
        return f"{positions * self.hearing.seconds:.5g} seconds"

    def speak(self, speech: Speech) -> None:
        """From now on, texts begin as those of such sounds do. Raises ConfigError if that is not possible."""
        m = self.module
        self.begin_with(start_of_speech(type(m), m.generation_config, m.config, speech, self.name))


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


def load_hearing(settings: PretrainedModel.Settings, role: str, config: Any) -> Hearing:
    """The feature extractor of a model that hears, or one in its shape for random weights without one at hand. Raises
    ConfigError."""
    source, key = source_of(settings.path), f"{role}.path={settings.path}"
    shaped = settings.weights == "random" and not any((Path(source) / name).is_file() for name in EXTRACTOR_FILES)
    with reading_of(settings, role, "feature extractor"):
        if shaped:
            return Hearing.of_shape(config, key)
        return Hearing(transformers.AutoFeatureExtractor.from_pretrained(source, **options_of(settings)), config, key)


def load_start(settings: PretrainedModel.Settings, role: str, config: Any, speech: Speech) -> list[int]:
    """The tokens that a model that hears begins the text of such sounds with; its weights are not read. Raises
    ConfigError."""
    source, options = source_of(settings.path), transformers.GenerationConfig.from_model_config(config)
    if settings.weights != "random" or (Path(source) / "generation_config.json").is_file():
        with suppress(OSError):  # there is none
            options = transformers.GenerationConfig.from_pretrained(source, revision=settings.revision or "main")
    kind: Any = transformers.AutoModelForSpeechSeq2Seq._model_mapping[type(config)]
    return start_of_speech(kind, options, config, speech, f"{role}.path={settings.path}")
