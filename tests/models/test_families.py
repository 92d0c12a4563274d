"""Which architectures have a family, and that what the tables name is there."""

import hydra
import pytest
from transformers import LlamaConfig, MambaConfig, T5Config, WhisperConfig

from specbench.models.architecture import DECODERS, ENCODER_DECODERS, NO_FAMILY, Family, family_of, loader_of


@pytest.mark.parametrize("name", sorted({*DECODERS.values(), *ENCODER_DECODERS.values()}))
def test_a_named_family_is_a_class(name):
    assert issubclass(hydra.utils.get_class(name), Family)


def test_a_family_follows_from_the_configuration():
    assert family_of(LlamaConfig()) is family_of(T5Config()) is NO_FAMILY
    whisper, hybrid = family_of(WhisperConfig()), family_of(LlamaConfig(layer_types=["linear_attention"] * 32))
    assert NO_FAMILY not in (whisper, hybrid) and whisper is not hybrid
    assert family_of(WhisperConfig(d_model=8)) is whisper  # one for all models
    assert family_of(MambaConfig()) is hybrid
    assert (
        loader_of(WhisperConfig()) == "AutoModelForSpeechSeq2Seq" and loader_of(T5Config()) == "AutoModelForSeq2SeqLM"
    )
