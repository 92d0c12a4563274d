"""Sounds: files of them, their samples, and what is to be written of them."""

import io
import math
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specbench.errors import ConfigError, first_line, installing

SLOWEST, FASTEST = 1_000, 384_000  # samples a second
LARGEST = 2**30  # bytes of a file
LOUDEST = 1000.0  # of samples that a format holds from -1 to 1; beyond it features overflow
ENDLESS = 0x7FFFF000  # announced bytes from which on a writer did not know how many there would be
NEEDED = "a WAV file of PCM samples, as ffmpeg -i IN -ac 1 OUT.wav makes it"
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE  # formats of a WAV file; the last one names another behind its other fields
KINDS = {(PCM, 8): "u1", (PCM, 16): "<i2", (PCM, 24): "u1", (PCM, 32): "<i4", (FLOAT, 32): "<f4", (FLOAT, 64): "<f8"}
Samples = npt.NDArray[np.float32]


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
        """The sound in a file, of which only the header is read. Raises ConfigError if that cannot be, or if the file
        is empty."""
        count, rate = length(opened(), where)
        return Sound(where, count / rate, opened)

    def samples(self, rate: int) -> Samples:
        """[n]: the sound in one channel, `rate` samples a second, from -1 to 1. Raises ConfigError."""
        samples, own = decode_sound(self.open(), self.where)
        return resampled(samples, own, rate)


def bytes_of(path: Path, where: str) -> bytes:
    """The contents of a file. Raises ConfigError."""
    try:
        found = path.stat()
        if stat.S_ISREG(found.st_mode) and found.st_size <= LARGEST:
            return path.read_bytes()
        reason = f"has more than {LARGEST:,} bytes" if stat.S_ISREG(found.st_mode) else "is not a file"
    except (OSError, ValueError) as error:
        reason = "is not a file" if isinstance(error, FileNotFoundError) else f"cannot be read ({first_line(error)})"
    raise ConfigError(f"{where} {reason}: it must be {NEEDED}")


@dataclass(frozen=True)
class Wave:
    """What the header of a WAV file says, and its samples as bytes."""

    kind: tuple[int, int]  # PCM or FLOAT, and bits of a sample: a key of KINDS
    channels: int
    rate: int  # samples a second
    data: bytes
    announced: int  # bytes of them

    @property
    def frame(self) -> int:
        """Bytes of a sample of all channels."""
        return self.kind[1] // 8 * self.channels

    def __len__(self) -> int:
        """Samples of a channel; one that is cut does not count."""
        return len(self.data) // self.frame

    def samples(self) -> Samples:
        """[n, channels], from -1 to 1."""
        (number, bits), values = self.kind, np.frombuffer(self.data[: len(self) * self.frame], KINDS[self.kind])
        if bits == 24:
            places = np.array([1 << 8, 1 << 16, 1 << 24])
            values = (values.reshape(-1, 3) @ places).astype(np.int32) / np.float32(256)
        levels = values.astype(np.float32) - (128 if bits == 8 else 0)
        return (levels if number == FLOAT else levels / 2 ** (bits - 1)).reshape(-1, self.channels)


def decode_sound(content: bytes, where: str) -> tuple[Samples, int]:
    """The samples [n] of a sound file, its channels averaged, and how many there are a second. WAV needs nothing, other
    formats the package soundfile. Raises ConfigError."""
    read = _header(content)
    found, rate = (read.samples(), read.rate) if isinstance(read, Wave) else _by_soundfile(content, where, read)
    _refuse(read, len(found), rate, where)
    with np.errstate(over="ignore"):
        mixed = found.mean(1, dtype=np.float32)
    if not (np.abs(mixed) <= LOUDEST).all():
        raise ConfigError(f"{where} holds samples that are not finite, or above {LOUDEST:g}: it must be {NEEDED}")
    return mixed, rate


def length(content: bytes, where: str) -> tuple[int, int]:
    """How many samples a sound file has, and how many a second, by its header. Raises ConfigError."""
    read = _header(content)
    count, rate = (len(read), read.rate) if isinstance(read, Wave) else _by_soundfile(content, where, read, False)
    _refuse(read, count, rate, where)
    return count, rate


def _refuse(read: Wave | str, count: int, rate: int, where: str) -> None:
    """Raises ConfigError if a WAV file is cut, or if there are no samples, or too few or too many a second."""
    if isinstance(read, Wave) and len(read.data) + read.frame <= read.announced < ENDLESS:
        raise ConfigError(f"{where} is cut: its header announces {read.announced:,} bytes of samples, and "
                          f"{len(read.data):,} are there: fetch it again")  # fmt: skip
    if not count:
        raise ConfigError(f"{where} holds no samples: it must be {NEEDED}")
    if not SLOWEST <= rate <= FASTEST:
        raise ConfigError(f"{where} has {rate} samples a second: it must have from {SLOWEST:,} to {FASTEST:,}")


def _header(content: bytes) -> Wave | str:
    """What a WAV file is, or why it is none that can be read here, which is empty for other formats."""
    if content[:4] != b"RIFF":
        return ""
    if content[8:12] != b"WAVE":
        return "it is cut, or of another kind of RIFF"
    kind, channels, rate, place = (0, 0), 0, 0, 12
    while place + 8 <= len(content):
        name, size = struct.unpack_from("<4sI", content, place)
        place += 8
        if name == b"fmt " and min(size, len(content) - place) >= 16:
            number, channels, rate, _, block, bits = struct.unpack_from("<HHIIHH", content, place)
            if number == EXTENSIBLE and min(size, len(content) - place) >= 26:
                [number] = struct.unpack_from("<H", content, place + 24)
            kind = number, bits
            if kind not in KINDS or not channels or block != bits // 8 * channels:
                return f"its format is {number} with {bits} bits and {channels} channels: 1 is PCM, 3 is float"
        elif name == b"data" and channels:
            return Wave(kind, channels, rate, content[place : place + size], size)
        place += size + size % 2
    return "it is cut"


def _by_soundfile(content: bytes, where: str, reason: str, whole: bool = True) -> tuple[Any, int]:
    """The samples [n, channels] of a file that only the package soundfile reads, such as FLAC, or, unless `whole`, how
    many there are; and how many a second. `reason` is why it is no WAV file. Raises ConfigError."""
    told = f"{where} is no WAV file of PCM or float samples" + f" ({reason})" * bool(reason)
    try:
        import soundfile
    except ImportError as error:
        raise ConfigError(f"{told}: give {NEEDED}, or {installing('audio')}, which reads FLAC, OGG and MP3") from error
    try:
        told_of = soundfile.info(io.BytesIO(content))
        count, rate = int(told_of.frames), int(told_of.samplerate)
        if not whole:
            return count, rate
        found, _ = soundfile.read(io.BytesIO(content), dtype="float32", always_2d=True)
    except Exception as error:  # of the library below it
        raise ConfigError(f"{told}, and soundfile cannot read it ({first_line(error)}): give {NEEDED}") from error
    if len(found) < count < ENDLESS:
        raise ConfigError(f"{where} is cut: of {count:,} samples {len(found):,} are there: fetch it again")
    return found, rate


def resampled(samples: Samples, own: int, wanted: int) -> Samples:
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
