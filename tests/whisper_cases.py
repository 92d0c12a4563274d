"""A tiny Whisper, and tones for it."""

import numpy as np
import torch
from encoder_decoder_cases import V
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

RATE, BINS, POSITIONS = 16_000, 8, 50  # a model that hears one second


SHAPE = dict(vocab_size=V, num_mel_bins=BINS, d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
             decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_source_positions=POSITIONS,
             max_target_positions=40, init_std=0.5, pad_token_id=1, bos_token_id=1, eos_token_id=1,
             decoder_start_token_id=2)  # fmt: skip


SMALL = dict(d_model=8, decoder_layers=1, encoder_ffn_dim=12, decoder_ffn_dim=12)


ASKED = {"lang_to_id": {"<|en|>": 3, "<|de|>": 4}, "task_to_id": {"transcribe": 5, "translate": 6},
         "no_timestamps_token_id": V - 1, "is_multilingual": True, "suppress_tokens": [8, 9, 10],
         "begin_suppress_tokens": [1, 11]}  # fmt: skip


def tone(number: int, rate: int = RATE) -> np.ndarray:
    """A sound of its own pitch and length, shorter than a second."""
    seconds = np.arange(int(rate * (0.4 + 0.15 * number))) / rate
    wave = np.sin(2 * np.pi * (300 + 700 * number) * seconds * (1 + seconds)) * np.exp(-3 * seconds)
    return (0.8 * wave).astype(np.float32)


def module_of(seed: int = 0, asked=ASKED, **more):
    torch.manual_seed(seed)
    module = WhisperForConditionalGeneration(WhisperConfig(**SHAPE | more)).eval()
    module.generation_config.max_length = None
    module.generation_config._from_model_config = False  # settings of Whisper's own would not be loaded again
    for name, value in asked.items():
        setattr(module.generation_config, name, value)
    return module


def extractor(**more):
    return WhisperFeatureExtractor(feature_size=BINS, chunk_length=1, sampling_rate=RATE, **more)
