"""Sound files."""

import io
import shutil
import wave

import numpy as np
import pytest
from whisper_cases import ASKED, SMALL, extractor, module_of, tone

from specbench.data.sources import SHIPPED

VOCABULARY = 4160  # of the included tokenizer


def wav(samples: np.ndarray, rate: int = 16_000, width: int = 2, channels: int = 1) -> bytes:
    """The samples [n] in each channel of a WAV file."""
    levels = np.repeat(np.round(samples * (2 ** (8 * width - 1) - 1)).astype(np.int64), channels)
    packed = [int(level + (128 if width == 1 else 0)).to_bytes(width, "little", signed=width > 1) for level in levels]
    found = io.BytesIO()
    with wave.open(found, "wb") as file:
        file.setparams((channels, width, rate, len(samples), "NONE", ""))
        file.writeframes(b"".join(packed))
    return found.getvalue()


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """Checkpoints, large and small, and a folder of sounds, one with a transcript."""
    folder = tmp_path_factory.mktemp("audio")
    ids = {"vocab_size": VOCABULARY}
    for name, more in (("large", {}), ("small", SMALL)):
        module_of(0, ASKED | {"no_timestamps_token_id": VOCABULARY - 1}, **ids, **more).save_pretrained(folder / name)
        extractor().save_pretrained(folder / name)
        tokenizer_into(folder / name)
    (folder / "sounds").mkdir()
    for i in range(3):
        (folder / "sounds" / f"{i}.wav").write_bytes(wav(tone(i)))
    (folder / "sounds" / "1.txt").write_text("Spoken.\n")
    return folder


def tokenizer_into(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED / "target" / name, folder)


def of(here, *more, target="large", drafter="small"):
    """Overrides of a run on the sounds."""
    return ("target=model", f"target.path={here / target}", "drafter=model", f"drafter.path={here / drafter}",
            "data=audio", f"data.path={here / 'sounds'}", "data.language=en", "data.limit=null", "executor=eager",
            "max_new_tokens=8", "gamma=2", *more)  # fmt: skip
