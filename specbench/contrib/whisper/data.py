"""Recordings as prompts, for models that write what they hear: local files, and data sets of the hub."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from specbench.component import Selections
from specbench.contrib.whisper.audio_encoder import SpeechEncoder
from specbench.contrib.whisper.rules import refuse_sounds
from specbench.contrib.whisper.sound import Sound, Speech, bytes_of
from specbench.data.json_lines import need_file, read_json_lines
from specbench.data.prompts import Prompt, StoredData
from specbench.data.records import field_of, kind_of, label_of, load_rows, numbered, text_of, version_of
from specbench.data.sources import digest_of, of_folder
from specbench.data.text_file import read_text
from specbench.errors import ConfigError, shown
from specbench.models.architecture import ModelSize
from specbench.settings import BaseSettings, file_hash, setting

ENDING, TRANSCRIPT = ".wav", ".txt"  # of the files that are read in a folder
LINES = "a folder of WAV files, or a file of JSON objects, one a line, that name sound files"


@dataclass
class SpeechSettings(BaseSettings):
    """Where sounds are, and what is to be written of them."""

    path: str = setting(required=LINES)
    field: str = setting()
    reference: str | None = setting()
    language: str | None = setting()
    task: str | None = setting(choices=("transcribe", "translate"))
    limit: int | None = setting(ge=1)


class SpeechData(StoredData):
    """Recordings, and what is to be written of them."""

    @property
    def speech(self) -> Speech:
        """What the settings want to be written."""
        return Speech(self.settings.language, self.settings.task)

    def refuse(self, run: Selections, models: Sequence[ModelSize]) -> None:
        refuse_sounds(run, models, self.speech)

    def prepare(self, target: Any, drafters: Sequence[Any]) -> None:
        """Has the target begin texts as those of such sounds, and drafters that hear begin them as the target does."""
        target.encoder.speak(self.speech)
        for model in drafters:
            if isinstance(model.encoder, SpeechEncoder):
                model.encoder.begin_with(target.start_tokens)


class AudioData(SpeechData):
    """The WAV files of a folder, each with a text file of the same name as its transcript if there is one; or those
    that a file of JSON lines names, with a field as transcript."""

    @dataclass
    class Settings(SpeechSettings):
        def check(self, prefix: str) -> None:
            if not Path(self.path).is_dir():
                need_file(self.path, f"{prefix}path", LINES)
            elif not self.files():
                raise ConfigError(f"{prefix}path={self.path} has no WAV files (*{ENDING}): it must be {LINES}")

        def files(self) -> list[Path]:
            """The WAV files of a folder, sorted by name."""
            folder = Path(self.path)
            return sorted(path for path in folder.iterdir() if path.suffix.lower() == ENDING and path.is_file())

        def sources(self) -> Mapping[str, str]:
            folder = Path(self.path)
            if folder.is_dir():
                return {"path": of_folder(folder)}
            named = [file_hash(folder)]
            with suppress(ConfigError):  # `prompts` raises it too, if it comes so far
                for *_, path in self.lines():
                    found = path.stat() if path.is_file() else None
                    named.append(f"{path} {found and (found.st_size, found.st_mtime_ns)}")
            return {"path": digest_of(named)}

        def lines(self) -> Iterator[tuple[int, str, Mapping[str, Any], Path]]:
            """Of a file of JSON lines: the number of each, how errors name it, its record and its sound file. Raises
            ConfigError."""
            for number, record in read_json_lines(self.path):
                where = f"data.path={self.path} record {number}"
                path = text_of(field_of(record, self.field, "data.field", where), f"{where} sound")
                yield number, where, record, Path(self.path).parent / path

    def prompts(self) -> Iterator[Prompt]:
        if Path(self.settings.path).is_dir():
            for path in self.settings.files():
                name = label_of(path.name, f"the name of a file of data.path={self.settings.path}")
                transcript = path.with_suffix(TRANSCRIPT)
                reference = read_text(str(transcript), "data.path").strip() if transcript.is_file() else None
                yield _prompt(name, path, f"data.path={path}", reference)
            return
        for number, where, record, path in self.settings.lines():
            yield _prompt(str(number), path, f"{where}, {shown(path)},", _reference(record, self.settings, where))


class AudioHubData(SpeechData):
    """The sounds of any data set that `datasets.load_dataset` opens. They are decoded here, from the files in it."""

    @dataclass
    class Settings(SpeechSettings):
        name: str | None = setting()
        split: str = setting()

        def sources(self) -> Mapping[str, str]:
            return {"path": version_of(self.path)}

    def prompts(self) -> Iterator[Prompt]:
        import datasets

        s = self.settings
        rows = load_rows(s.path, s.name, s.split, "data=audio")
        where = f"data.path={s.path}"
        if s.field not in rows.column_names or not isinstance(rows.features[s.field], datasets.Audio):
            raise ConfigError(
                f"data.field={shown(s.field)} is no column of sounds of {where}, which has "
                f"{shown(', '.join(rows.column_names))}: choose another"
            )
        rows = rows.cast_column(s.field, datasets.Audio(decode=False))
        for number, record in numbered(rows, s.path):
            here = f"{where} record {number}"
            sound = Sound.of(here, partial(self._content, rows, number))
            yield Prompt(str(number), (str(number),), sound=sound, reference=_reference(record, s, here))

    def _content(self, rows: Any, number: int) -> bytes:
        """The file of a row's sound. Raises ConfigError."""
        stored = rows[number][self.settings.field]
        if stored["bytes"] is not None:
            content: bytes = stored["bytes"]
            return content
        return bytes_of(Path(stored["path"]), f"data.path={self.settings.path} record {number}, {stored['path']},")


def _prompt(name: str, path: Path, where: str, reference: str | None) -> Prompt:
    return Prompt(name, (path.name,), sound=Sound.of(where, partial(bytes_of, path, where)), reference=reference)


def _reference(record: Mapping[str, Any], s: SpeechSettings, where: str) -> str | None:
    """The transcript of a record, if there is one. Raises ConfigError if it is no text."""
    if s.reference is None or record.get(s.reference) is None:
        return None
    found = record[s.reference]
    if not isinstance(found, str):
        raise ConfigError(f"{where} field {s.reference!r} is {kind_of(found)}: a transcript must be text")
    return found
