"""Whisper with random weights and synthesised sounds: generate()'s tokens, every cache, batch and tree, the law."""

from functools import cache

import numpy as np
import torch
from conftest import CACHES
from test_encoder_decoders import NEW, Tokenizer, V, decoded_by
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from specbench.data.sound import Features, Speech
from specbench.decoding.sampling import Sampling
from specbench.executors.eager import EagerExecutor
from specbench.models.hearing import Hearing
from specbench.models.language_model import LanguageModel
from specbench.models.likeness import reads_trees

RATE, BINS, POSITIONS = 16_000, 8, 50  # a model that hears one second
SHAPE = dict(vocab_size=V, num_mel_bins=BINS, d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
             decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_source_positions=POSITIONS,
             max_target_positions=40, init_std=0.5, pad_token_id=1, bos_token_id=1, eos_token_id=1,
             decoder_start_token_id=2)  # fmt: skip
SMALL = dict(d_model=8, decoder_layers=1, encoder_ffn_dim=12, decoder_ffn_dim=12)
ASKED = {"lang_to_id": {"<|en|>": 3, "<|de|>": 4}, "task_to_id": {"transcribe": 5, "translate": 6},
         "no_timestamps_token_id": V - 1, "is_multilingual": True, "suppress_tokens": [8, 9, 10],
         "begin_suppress_tokens": [1, 11]}  # fmt: skip
ENGLISH, GERMAN = Speech("en", "transcribe"), Speech("german", "translate")
WAYS = [("static", 1, None), ("static", 3, "model"), ("dynamic", 2, "tree_best"), ("paged", 3, "multi_draft_two"),
        ("paged", 1, "own_trees"), ("dynamic", 3, "prompt_lookup"), ("static", 2, "under_ngram")]  # fmt: skip


def tone(number: int, rate: int = RATE) -> np.ndarray:
    """A sound of its own pitch and length, shorter than a second."""
    seconds = np.arange(int(rate * (0.4 + 0.15 * number))) / rate
    wave = np.sin(2 * np.pi * (300 + 700 * number) * seconds * (1 + seconds)) * np.exp(-3 * seconds)
    return (0.8 * wave).astype(np.float32)


def module_of(seed: int = 0, asked=ASKED, **more):
    torch.manual_seed(seed)
    module = WhisperForConditionalGeneration(WhisperConfig(**SHAPE | more)).eval()
    module.generation_config.max_length = None
    for name, value in asked.items():
        setattr(module.generation_config, name, value)
    return module


def extractor(**more):
    return WhisperFeatureExtractor(feature_size=BINS, chunk_length=1, sampling_rate=RATE, **more)


@cache
def loaded(seed: int, small: bool = False) -> LanguageModel:
    module = module_of(seed, **SMALL if small else {})
    hearing = Hearing(extractor(), module.config, "tiny")
    return LanguageModel(module, Tokenizer(), name="tiny", sampling=Sampling(), new_cache=CACHES["static"],
                         executor=EagerExecutor(), hearing=hearing)  # fmt: skip


def model(temperature: float, cache_name: str = "static", seed: int = 0, small: bool = False, speech=ENGLISH):
    found = loaded(seed, small).shared(Sampling(temperature=temperature), CACHES[cache_name], EagerExecutor())
    found.speak(speech)
    return found


@cache
def inputs() -> tuple[Features, ...]:
    features = extractor()([tone(i) for i in range(3)], sampling_rate=RATE, return_tensors="np").input_features
    return tuple(Features(POSITIONS, lambda own=own: own) for own in features)


def generated(read: Features, new: int, speech=ENGLISH, module=None) -> list[int]:
    """What Whisper's own generate() writes, which leaves out the start and the end."""
    text = (module or loaded(0).module).generate(torch.from_numpy(read.values)[None], max_new_tokens=new,
                                                 language=speech.language, task=speech.task)  # fmt: skip
    return text[0].tolist()


def without_end(texts):
    return [text[:-1] if text[-1] == 1 else text for text in texts]


def test_tokens_are_those_of_generate():
    assert reads_trees(loaded(0), "tiny")
    for speech in (ENGLISH, GERMAN):
        expected = [generated(read, NEW - i, speech) for i, read in enumerate(inputs())]
        assert len({tuple(text) for text in expected}) == 3
        for cache_name, rows, drafts in WAYS:
            models = [model(0, cache_name, seed, seed == 1, speech) for seed in (0, 1)]
            found = decoded_by(models, drafts, rows, which=inputs())
            assert without_end(found) == expected, (cache_name, rows, drafts)
