"""Runs on sounds: from WAV files or a data set to results, and what is refused in a sentence."""

import json
import os
import shutil
import struct
import sys
from functools import partial
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow
import pytest
import torch
from audio_cases import (
    VOCABULARY,
    of,
    tokenizer_into,
    wav,
)
from pyarrow import parquet
from small_runs import parts_of
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq
from whisper_cases import ASKED, SMALL, extractor, module_of, tone

from specbench.contrib.whisper import sound as sound_module
from specbench.contrib.whisper.audio_encoder import Hearing
from specbench.contrib.whisper.data import AudioData, AudioHubData
from specbench.contrib.whisper.sound import Sound, decode_sound, length, resampled
from specbench.data.prompts import load
from specbench.errors import ConfigError
from specbench.run.interleave import InterleavedGroup
from specbench.run.run import run, run_in_turn


@pytest.mark.parametrize(("temperature", "drafter"), [pytest.param(0, "small", marks=pytest.mark.slow), (1, "large")])
def test_a_run_on_sounds_is_lossless(here, temperature, drafter, tmp_path):
    more = ("batch_size=2", f"temperature={temperature}", "baseline=transformers" if not temperature else "seed=1")
    parts = parts_of(*of(here, *more, drafter=drafter))
    assert parts.target.start_tokens == parts.drafter.model.start_tokens == [2, 3, 5, VOCABULARY - 1]
    result, record = run(parts, tmp_path)
    assert result.lossless.verdict == "passed" and result.counts.prompts == 3
    if drafter == "large":
        assert result.alpha.mean == pytest.approx(1, abs=1e-5)
    else:
        assert all(
            r.peers["generate"].tokens == [*r.baseline.tokens] == [*r.speculative.tokens] for r in record.results
        )
    lines = [json.loads(line) for line in (tmp_path / "prompts.jsonl.part").read_text().splitlines()]
    assert {line["prompt"]: line["reference"] for line in lines} == {"0.wav": None, "1.wav": "Spoken.", "2.wav": None}
    assert {line["encoder_tokens"] for line in lines} == {50}
    assert not any("values" in vars(r.request.encoder_input) for r in record.results)  # they are freed


@pytest.mark.slow
def test_a_drafter_begins_where_the_target_does(here, tmp_path):
    """It knows no languages, and suppresses other first tokens: beta is that of both laws behind the target's start."""
    own = broken(here / "small", tmp_path / "own", "generation_config.json", begin_suppress_tokens=[20, 21, 22],
                 suppress_tokens=None, lang_to_id=None, return_timestamps=True)  # fmt: skip
    more = ("temperature=1", "data.limit=1", "max_new_tokens=4", "verdict_tokens=0", f"drafter.path={own}")
    parts = parts_of(*of(here, *more))
    _, record = run(parts, tmp_path / "run")
    [result], start = record.results, parts.target.start_tokens
    result.request.prepare()
    text = torch.tensor([[*start, *result.baseline.tokens]])
    read = torch.from_numpy(result.request.encoder_input.values)[None]

    def law(folder, always, first, at):
        module = AutoModelForSpeechSeq2Seq.from_pretrained(folder)
        with torch.no_grad():
            logits = module(input_features=read, decoder_input_ids=text[:, :-1]).logits[0, len(start) - 1 :]
        logits[:, always] = -torch.inf
        logits[at, first] = -torch.inf
        return logits.softmax(-1)

    p = law(here / "large", ASKED["suppress_tokens"], ASKED["begin_suppress_tokens"], 0)
    beta, wrong = (torch.minimum(p, law(own, [], [20, 21, 22], at)).sum(-1).numpy() for at in (0, 1))
    np.testing.assert_allclose(result.baseline_laws.beta, beta, atol=1e-5)
    assert np.abs(wrong - beta).max() > 1e-4


@pytest.mark.slow
def test_runs_in_turn_make_features_before_they_are_timed(here, tmp_path, monkeypatch):
    inside, made, values, decode = [False], [], Hearing._values, InterleavedGroup.decode_all_ways

    def watched(self, *arguments, **options):
        inside[0] = True
        try:
            return decode(self, *arguments, **options)
        finally:
            inside[0] = False

    monkeypatch.setattr(InterleavedGroup, "decode_all_ways", watched)
    monkeypatch.setattr(Hearing, "_values", lambda self, sound: made.append(inside[0]) or values(self, sound))
    parts = parts_of(*of(here, "data.limit=2", "max_new_tokens=2", "verdict_tokens=0", drafter="large"))
    run_in_turn([[(parts, tmp_path / name, lambda group: None)] for name in ("a", "b")], lambda done, total, what: None)
    assert len(made) >= 4 and not any(made)


@pytest.mark.slow
def test_a_sound_that_is_too_long_is_left_out(here, tmp_path, caplog):
    shutil.copytree(here / "sounds", tmp_path / "sounds")
    (tmp_path / "sounds" / "long.wav").write_bytes(wav(np.zeros(20_000)))
    result, _ = run(parts_of(*of(here), f"data.path={tmp_path / 'sounds'}"), tmp_path / "run")
    assert result.counts.too_long == 1 and result.counts.prompts == 3
    assert "1 request does not fit the 1 seconds" in caplog.text and "the longest has 1.26 seconds" in caplog.text


def data_of(path, **more):
    given = dict(field="audio", reference="text", language=None, task=None, limit=None) | more
    return AudioData(AudioData.Settings(path=str(path), **given))


def test_json_lines_name_sounds_beside_them(here, tmp_path):
    (tmp_path / "a.wav").write_bytes(wav(tone(0)))
    lines = [{"audio": "a.wav", "text": "One."}, {"audio": str(here / "sounds" / "2.wav")}]
    (tmp_path / "f.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = data_of(tmp_path / "f.jsonl")
    prompts, known = load(data), data.settings.sources()
    assert [(p.id, p.turns, p.reference) for p in prompts] == [("1", ("a.wav",), "One."), ("2", ("2.wav",), None)]
    assert prompts[1].sound.seconds == pytest.approx(0.7) and known == data.settings.sources()
    (tmp_path / "a.wav").write_bytes(wav(tone(1)))
    assert known != data.settings.sources()


def test_a_data_set_of_the_hub_is_decoded_here(tmp_path):
    stored = [{"bytes": wav(tone(i)), "path": None} for i in range(2)]
    schema = datasets.Features({"sound": datasets.Audio(), "said": datasets.Value("string")}).arrow_schema
    (tmp_path / "set").mkdir()
    table = pyarrow.table({"sound": stored, "said": ["a", "b"]}, schema=schema)
    parquet.write_table(table, tmp_path / "set" / "test.parquet")
    given = dict(path=str(tmp_path / "set"), name=None, split="test", language=None, task=None, limit=None)
    found = load(AudioHubData(AudioHubData.Settings(field="sound", reference="said", **given)))
    assert [p.reference for p in found] == ["a", "b"]
    np.testing.assert_allclose(found[1].sound.samples(16_000), tone(1), atol=1e-4)
    with pytest.raises(ConfigError, match=r"data\.field=said is no column of sounds of data\.path"):
        load(AudioHubData(AudioHubData.Settings(field="said", reference=None, **given)))


@pytest.mark.parametrize(("width", "channels"), [(1, 1), (2, 2), (3, 1), (4, 2)])
def test_pcm_of_every_width_and_more_channels(width, channels):
    found, rate = decode_sound(wav(tone(1), 8000, width, channels), "F")
    assert rate == 8000 and found.shape == tone(1).shape
    np.testing.assert_allclose(found, tone(1), atol=2 ** (2 - 8 * width) + 1e-6)


def test_channels_are_averaged():
    both = np.stack([tone(0), -tone(0)], 1).reshape(-1)
    assert np.abs(decode_sound(wav(tone(0), channels=2), "F")[0]).max() > 0.1
    content = wav(both)[:22] + (2).to_bytes(2, "little") + wav(both)[24:32] + (4).to_bytes(2, "little") + wav(both)[34:]
    assert np.abs(decode_sound(content, "F")[0]).max() < 1e-3


@pytest.mark.parametrize("rate", [8_000, 11_025, 44_100, 48_000])
def test_other_rates_are_resampled(rate):
    """A tone that both rates can hold is the same tone; one above half of the new rate is gone."""
    seconds, new = np.arange(rate) / rate, np.arange(16_000) / 16_000
    found = resampled(np.sin(2 * np.pi * 440 * seconds).astype(np.float32), rate, 16_000)
    assert len(found) == 16_000
    np.testing.assert_allclose(found[1000:-1000], np.sin(2 * np.pi * 440 * new)[1000:-1000], atol=0.01)
    if rate > 20_000:
        high = resampled(np.sin(2 * np.pi * 10_000 * seconds).astype(np.float32), rate, 16_000)
        assert np.abs(high[1000:-1000]).max() < 0.01


def test_other_formats_need_soundfile(monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(
        ConfigError, match=r"F is no WAV file of PCM or float samples: give .*pip install 'specul.*audio"
    ):
        decode_sound(b"fLaC...", "F")
    samples = np.ones((4, 2), np.float32)
    told = SimpleNamespace(frames=4, samplerate=16_000)
    others = SimpleNamespace(read=lambda *_, **__: (samples, 16_000), info=lambda _: told)
    monkeypatch.setitem(sys.modules, "soundfile", others)
    assert decode_sound(b"fLaC...", "F")[0].tolist() == [1.0] * 4 and length(b"fLaC...", "F") == (4, 16_000)
    told.frames = 5
    with pytest.raises(ConfigError, match="F is cut: of 5 samples 4 are there"):
        decode_sound(b"fLaC...", "F")


def extensible(content: bytes) -> bytes:
    """The same WAV file with the longer header that names its format behind the other fields."""
    head, bits = content[20:36], content[34:36]
    longer = b"\xfe\xff" + head[2:] + b"\x16\0" + bits + bytes(4) + head[:2] + bytes(14)
    return b"RIFF" + bytes(4) + b"WAVE" + b"LIST\x03\0\0\0abc\0" + b"fmt \x28\0\0\0" + longer + content[36:]


def of_floats(samples: np.ndarray, kind: str) -> bytes:
    """The samples [n] in a WAV file of floats of 32 or 64 bits."""
    data = samples.astype(kind).tobytes()
    size = np.dtype(kind).itemsize
    fields = struct.pack("<HHIIHH", 3, 1, 16_000, 16_000 * size, size, 8 * size)
    return b"RIFF" + bytes(4) + b"WAVEfmt \x10\0\0\0" + fields + b"data" + len(data).to_bytes(4, "little") + data


@pytest.mark.parametrize(("width", "channels"), [(2, 1), (3, 2), (4, 6)])
def test_the_longer_header_of_many_bits_and_channels(width, channels):
    content = wav(tone(1), 8000, width, channels)
    found, rate = decode_sound(extensible(content), "F")
    np.testing.assert_array_equal(found, decode_sound(content, "F")[0])
    assert rate == 8000 and length(extensible(content), "F") == (len(found), rate)


@pytest.mark.parametrize("kind", ["<f4", "<f8"])
def test_wav_files_of_floats(kind):
    np.testing.assert_allclose(decode_sound(of_floats(tone(1), kind), "F")[0], tone(1), atol=1e-7)
    with pytest.raises(ConfigError, match="F holds samples that are not finite"):
        decode_sound(of_floats(tone(1) + np.nan, kind), "F")


def test_a_sound_that_overflows_when_its_channels_are_mixed_is_refused():
    loud = wav(np.full((8, 1), 0.5))
    stereo = loud[:20] + struct.pack("<HHIIHH", 3, 2, 16000, 128000, 8, 32) + b"data" + struct.pack("<I", 64)
    with pytest.raises(ConfigError, match="F holds samples that are not finite"):
        decode_sound(stereo + np.full(16, 3e38, "<f4").tobytes(), "F")
    assert decode_sound(stereo + np.full(16, 0.5, "<f4").tobytes(), "F")[0].tolist() == [0.5] * 8


@pytest.mark.parametrize("there", [0.99, 0.5, 0.01])
def test_a_sound_that_is_cut_is_refused(there):
    content = wav(tone(0))
    for read in (decode_sound, length):
        assert read(content, "F")
        with pytest.raises(ConfigError, match="F is cut: its header announces 12,800 bytes of samples, and "):
            read(content[: 44 + int(12800 * there)], "F")


def test_a_stream_whose_length_was_not_known_is_read_to_its_end():
    content = wav(tone(0))
    assert decode_sound(content[:40] + b"\xff" * 4 + content[44:] + b"x", "F")[0].shape == tone(0).shape


BAD_SOUNDS = {
    "text": (b"no sound", "is no WAV file of PCM or float samples"),
    "cut": (wav(tone(0))[:30], r"is no WAV file of PCM or float samples \(it is cut\)"),
    "in A-law": (wav(tone(0))[:20] + b"\6\0" + wav(tone(0))[22:], r"is no WAV file .*its format is 6 with 16 bits"),
    "of 40 bits": (wav(tone(0))[:32] + b"\5\0\x28\0" + wav(tone(0))[36:], r"is no WAV file .*is 1 with 40 bits"),
    "of 12 bits": (wav(tone(0))[:34] + b"\x0c\0" + wav(tone(0))[36:], r"is no WAV file .*is 1 with 12 bits"),
    "no wave": (wav(tone(0)).replace(b"WAVE", b"AVI "), r"is no WAV file .*of another kind of RIFF"),
    "empty": (wav(np.zeros(0)), "holds no samples"),
    "slow": (wav(tone(0), rate=10), "has 10 samples a second: it must have from 1,000 to 384,000"),
}


@pytest.mark.parametrize("kind", BAD_SOUNDS)
def test_a_file_that_is_no_sound_is_refused(kind, here, tmp_path, monkeypatch):
    content, told = BAD_SOUNDS[kind]
    monkeypatch.setitem(sys.modules, "soundfile", None)  # which reads some of them
    (tmp_path / "bad.wav").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"data\.path={tmp_path}/bad\.wav {told}"):
        parts_of(*of(here), f"data.path={tmp_path}")


def broken(source, folder, file, **values):
    shutil.copytree(source, folder)
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(content | values))
    return folder


@pytest.mark.slow
def test_what_does_not_fit_is_said_before_a_model_loads(here, tmp_path, monkeypatch):
    monkeypatch.setattr("specbench.models.pretrained.load_module", partial(pytest.fail, "a model was loaded"))
    t5 = AutoConfig.for_model("t5", vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
                              decoder_start_token_id=0)  # fmt: skip
    AutoModelForSeq2SeqLM.from_config(t5).save_pretrained(tmp_path / "t5")
    tokenizer_into(tmp_path / "t5")
    wide = module_of(0, ASKED, vocab_size=VOCABULARY, num_mel_bins=16)
    wide.save_pretrained(tmp_path / "wide")
    extractor(**{"dither": 0.0}).__class__(feature_size=16, chunk_length=1).save_pretrained(tmp_path / "wide")
    tokenizer_into(tmp_path / "wide")
    other = broken(here / "large", tmp_path / "other", "preprocessor_config.json", feature_size=16)
    few = module_of(0, ASKED, **SMALL | {"vocab_size": 3, "suppress_tokens": None, "pad_token_id": 0})
    few.save_pretrained(tmp_path / "few")
    extractor().save_pretrained(tmp_path / "few")
    tokenizer_into(tmp_path / "few")
    times = broken(here / "large", tmp_path / "times", "generation_config.json", return_timestamps=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"data=stdlib is text, but target.path=.* hears: choose data=audio"):
        parts_of("data=stdlib", "target=model", f"target.path={here / 'large'}", "drafter=ngram")
    for more, told in (
        ((f"target.path={tmp_path / 't5'}",), "data=audio is sound, but target.path=.* reads text"),
        ((f"drafter.path={tmp_path / 't5'}",), "drafter.path=.*t5 reads text, but target.path=.* hears"),
        (
            (f"drafter.path={tmp_path / 'wide'}",),
            "hear differently .*feature_size 16 and 8",
        ),
        ((f"drafter.path={tmp_path / 'few'}",), r"few has 3 tokens, and texts begin with \[2, 3, 5, 4159\]"),
        ((f"target.path={other}",), "makes 16 features of 100 frames, but its encoder takes 8 of 100"),
        ((f"target.path={times}",), "has return_timestamps=true in its generation_config"),
        (("data.language=null",), r"data\.language is not set, and .* knows 2 languages: choose"),
        (("data.language=xx",), r"data\.language=xx is not possible with target\.path=.*Unsupported language"),
        (("data.task=sing",), r"data\.task=sing is not allowed: it must be one of transcribe, translate"),
        ((f"data.path={tmp_path / 'empty'}",), r"has no WAV files \(\*\.wav\)"),
        ((f"data.path={tmp_path / 'none'}",), "is not a file: it must be a folder of WAV files, or"),
    ):
        with pytest.raises(ConfigError, match=told):
            parts_of(*of(here), *more)


def test_json_lines_that_name_no_sound_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large.wav").open("wb") as large:
        large.truncate(2**30 + 1)
    for line, told in (
        ({"text": "a"}, "has no field 'audio': set data.field"),
        ({"audio": 3}, "a number, not text"),
        ({"audio": "none.wav"}, "none.wav, is not a file"),
        ({"audio": "/dev/zero"}, "/dev/zero, is not a file"),
        ({"audio": "pipe"}, "pipe, is not a file"),
        ({"audio": "large.wav"}, "large.wav, has more than 1,073,741,824 bytes"),
        ({"audio": "a\0b"}, "cannot be read .*embedded null (byte|character)"),
        ({"audio": "", "text": "a"}, "is empty"),
    ):
        (tmp_path / "f.jsonl").write_text(json.dumps(line))
        with pytest.raises(ConfigError, match=told):
            load(data_of(tmp_path / "f.jsonl"))


def test_a_sound_is_read_again_when_it_is_asked_for(monkeypatch):
    opened = []
    monkeypatch.setattr(sound_module.Wave, "samples", lambda self: opened.append("decoded") or np.ones((9, 1)))
    sound = Sound.of("F", lambda: opened.append(1) or wav(tone(0)))
    assert opened == [1] and sound.seconds == pytest.approx(0.4)  # by its header alone
    assert sound.samples(16_000).tolist() == sound.samples(16_000).tolist()
    assert opened == [1] + 2 * [1, "decoded"]
