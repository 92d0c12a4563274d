"""Whisper among the architectures: its encoder reads features of sounds, as many frames of every one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from transformers import PretrainedConfig

from specbench.component import Selections
from specbench.contrib.whisper.audio_encoder import STRIDE, SpeechEncoder, load_hearing
from specbench.contrib.whisper.data import SpeechData
from specbench.contrib.whisper.rules import refuse_sounds
from specbench.decoding.encoder_input import EncoderInput, Features
from specbench.models.architecture import Family, ModelSize, context_of
from specbench.models.pretrained import PretrainedModel


class WhisperFamily(Family):
    """What models that hear need."""

    loader = "AutoModelForSpeechSeq2Seq"

    def sized(self, config: PretrainedConfig, size: ModelSize) -> ModelSize:
        return replace(size, heard=context_of(config, "encoder"))

    def encoder(self, settings: PretrainedModel.Settings, role: str, config: PretrainedConfig) -> Callable[..., Any]:
        return partial(SpeechEncoder, hearing=load_hearing(settings, role, config))

    def probe(self, config: Any, number: int, tokens: Sequence[int]) -> EncoderInput:
        """Features that such an encoder takes, the same for each number."""
        shape = (config.num_mel_bins, STRIDE * config.max_source_positions)
        values = np.random.default_rng(number).standard_normal(shape, np.float32)
        return Features(config.max_source_positions, lambda: values)

    def refuse(self, run: Selections, models: Sequence[ModelSize], data: Any) -> None:
        if not isinstance(data, SpeechData):  # which refuses by itself
            refuse_sounds(run, models, None)
