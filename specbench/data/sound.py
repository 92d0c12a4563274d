"""Sounds, and what an encoder reads of them: features, which stand where another encoder's tokens do."""

import io
import math
import wave
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specbench.settings import ConfigError
from specbench.visible import first_line

SLOWEST, FASTEST = 1_000, 384_000  # samples a second
NEEDED = "a WAV file of PCM samples, as ffmpeg -i IN -ac 1 OUT.wav makes it"
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Speech:
    """What a model that hears is to write: words of a language (None: as its generation_config says), by a task,
    transcribe or translate (None: likewise)."""

    language: str | None = None
    task: str | None = None


@dataclass(frozen=True)
class Sound:
    """A recording. `open` gives its file, which is read when it is asked for; `where` names it in errors."""

    where: str
    seconds: float
    open: Callable[[], bytes]

    @staticmethod
    def of(where: str, opened: Callable[[], bytes]) -> "Sound":
        """The sound in a file. Raises ConfigError if it cannot be read or is empty."""
        samples, rate = decoded(opened(), where)
        return Sound(where, len(samples) / rate, opened)

    def samples(self, rate: int) -> Floats:
        """[n]: the sound in one channel, `rate` samples a second, from -1 to 1. Raises ConfigError."""
        samples, own = decoded(self.open(), self.where)
        return resampled(samples, own, rate)


class Features:
    """What an encoder reads of a sound. Its length is the number of positions that cross-attention reads, or that the
    sound would need if it is longer than the encoder reads."""

    def __init__(self, positions: int, make: Callable[[], Floats]):
        """`make` computes the values [F, frames]."""
        self.positions, self._make = positions, make

    def __len__(self) -> int:
        return self.positions

    def __getstate__(self) -> dict[str, Any]:
        """What another process gets of it: the length, since the sound may not be there."""
        return {"positions": self.positions, "_make": _not_here}

    @cached_property
    def values(self) -> Floats:
        """[F, frames], computed when they are first asked for. Raises ConfigError."""
        return self._make()

    def forget(self) -> None:
        """Frees the values, which can be computed again."""
        vars(self).pop("values", None)


def _not_here() -> Floats:
    raise RuntimeError("features of a sound are computed in the process that decodes it")


EncoderInput = Sequence[int] | Features  # tokens, or features of a sound


def bytes_of(path: Path, where: str) -> bytes:
    """The contents of a file. Raises ConfigError."""
    try:
        return path.read_bytes()
    except OSError as error:
        reason = "is not a file" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise ConfigError(f"{where} {reason}: it must be {NEEDED}") from error


def decoded(content: bytes, where: str) -> tuple[Floats, int]:
    """The samples [n] of a sound file, its channels averaged, and how many there are a second. WAV needs nothing, other
    formats the package soundfile. Raises ConfigError."""
    found, rate = _of_wave(content, where) if content[:4] == b"RIFF" else _of_others(content, where)
    if not len(found):
        raise ConfigError(f"{where} holds no samples: it must be {NEEDED}")
    if not SLOWEST <= rate <= FASTEST:
        raise ConfigError(f"{where} has {rate} samples a second: it must have from {SLOWEST:,} to {FASTEST:,}")
    if not np.isfinite(found).all():
        raise ConfigError(f"{where} holds samples that are not finite: it must be {NEEDED}")
    return found.mean(1, dtype=np.float32), rate


def _of_wave(content: bytes, where: str) -> tuple[Floats, int]:
    """Samples [n, channels] from -1 to 1, and how many there are a second."""
    try:
        with wave.open(io.BytesIO(content)) as file:
            channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
            data = file.readframes(file.getnframes())
    except (wave.Error, EOFError, OSError, RuntimeError) as error:
        return _of_others(content, where, first_line(error) or "it is cut")
    data = data[: len(data) // (width * channels) * width * channels]
    if width == 1:
        levels = np.frombuffer(data, np.uint8).astype(np.float32) - 128
    elif width == 3:
        levels = (np.frombuffer(data, np.uint8).reshape(-1, 3) @ np.array([1 << 8, 1 << 16, 1 << 24])).astype(np.int32)
        levels = levels.astype(np.float32) / 256
    else:
        levels = np.frombuffer(data, f"<i{width}").astype(np.float32)
    return (levels / 2 ** (8 * width - 1)).reshape(-1, channels), rate


def _of_others(content: bytes, where: str, reason: str = "") -> tuple[Floats, int]:
    """As `_of_wave`, of a format that only the package soundfile reads, such as FLAC. `reason` is why it is no WAV
    file."""
    told = f"{where} is no WAV file of PCM samples" + f" ({reason})" * bool(reason)
    try:
        import soundfile
    except ImportError as error:
        raise ConfigError(f"{told}: give {NEEDED}, or pip install soundfile, which reads FLAC, OGG and MP3") from error
    try:
        found, rate = soundfile.read(io.BytesIO(content), dtype="float32", always_2d=True)
    except Exception as error:  # of the library below it
        raise ConfigError(f"{told}, and soundfile cannot read it ({first_line(error)}): give {NEEDED}") from error
    return found, int(rate)


def resampled(samples: Floats, own: int, wanted: int) -> Floats:
    """Samples [n] at `own` a second as [m] at `wanted` a second: what both rates can hold of the spectrum. Silence is
    put behind the sound meanwhile, since the transform takes its end for what comes before its beginning."""
    if own == wanted:
        return samples
    block = own // math.gcd(own, wanted)  # samples that a whole number of new ones replaces
    length = -(-2 * len(samples) // block) * block
    count = length * wanted // own
    spectrum = np.fft.rfft(samples.astype(np.float64), length)
    kept = np.zeros(count // 2 + 1, complex)
    both = min(len(spectrum), len(kept))
    kept[:both] = spectrum[:both]
    found = np.fft.irfft(kept, count) * (count / length)
    return found[: -(-len(samples) * wanted // own)].astype(np.float32)
