"""Properties of what reads texts of others: any of them is read, or is one sentence. Examples are few and always the
same; the slow tests have many."""

import json
import struct
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from specbench.contrib.dflash.config import parse_dflash
from specbench.contrib.eagle.weights import inspect
from specbench.contrib.replay.trace_file import load_file
from specbench.contrib.servers.answer import read_answer
from specbench.contrib.servers.dialects import llama_acceptance
from specbench.contrib.servers.endpoint import Endpoint, Exchange, ServerError, split
from specbench.contrib.whisper.sound import KINDS, decode_sound, length
from specbench.data.json_lines import read_json_lines
from specbench.errors import ConfigError
from specbench.models.gguf import check_gguf

USUAL = settings(max_examples=30, deadline=None, derandomize=True, database=None, suppress_health_check=[*HealthCheck])
MANY = settings(USUAL, max_examples=3000)
SMALL = st.integers(-2, 300) | st.sampled_from([2**31, 2**70, 10**400, None, True, "x", "", 1.5, -0.5, 1e300])
VALUES = st.recursive(SMALL | st.text(max_size=4), lambda of: st.lists(of, max_size=3) | st.dictionaries(
    st.text(max_size=3), of, max_size=2), max_leaves=5)  # fmt: skip


def both(strategy):
    """A test with few examples, and a slow one with many."""

    def decorate(check):
        few, many = (budget(given(strategy)(lambda value: check(value))) for budget in (USUAL, MANY))
        name = check.__name__
        return [pytest.param(few, id=name), pytest.param(many, id=f"{name}, many", marks=pytest.mark.slow)]

    return decorate


COUNTS = st.integers(0, 12) | SMALL
CHOICE = st.fixed_dictionaries({}, optional={
    "text": st.text(max_size=3) | VALUES, "finish_reason": st.sampled_from(["stop", "length", "error", None]) | VALUES,
    "token_ids": st.lists(st.integers(-1, 101), max_size=3) | VALUES})  # fmt: skip
EVENT = st.fixed_dictionaries({}, optional={
    "choices": st.lists(CHOICE, max_size=2) | VALUES,
    "usage": st.fixed_dictionaries({}, optional={"prompt_tokens": COUNTS, "completion_tokens": COUNTS}) | VALUES,
    "timings": st.dictionaries(st.sampled_from(["predicted_n", "predicted_ms", "draft_n", "draft_n_accepted"]), COUNTS,
                               max_size=4) | VALUES})  # fmt: skip


@both(st.lists(EVENT, max_size=6))
def answers(events):
    """What is accepted is consistent."""
    try:
        found = read_answer([(0.0, {}), *((0.1 * n, event) for n, event in enumerate(events, 1))], 10, 100)
    except ServerError:
        return
    assert 0 < found.tokens <= 10 and found.finish in ("stop", "length") and found.pieces
    assert found.ids is None or (len(found.ids) == found.tokens and all(0 <= own < 100 for own in found.ids))
    assert 0 <= found.timings.draft_n_accepted <= found.timings.draft_n and llama_acceptance(found)
    counts = [piece.tokens for piece in found.pieces if piece.tokens is not None]
    assert counts == sorted(counts) and 0 < found.first <= found.tokens
    found.text.encode()


@dataclass
class Response:
    """What `Endpoint` reads of a response, cut anywhere."""

    parts: list[bytes]
    num_bytes_downloaded: int = 0

    def iter_raw(self):
        yield from self.parts


@both(st.tuples(st.lists(st.binary(max_size=8) | st.sampled_from(
    [b"data:", b"\n\n", b"\r\n", b'{"a": 1}', b"[DONE]", b"\r", b": x"]), max_size=12), st.integers(0, 5)))  # fmt: skip
def streams(drawn):
    """Bytes are events whatever they are, and the same events wherever they are cut."""
    parts, size = drawn
    endpoint, whole = Endpoint(split("url", "http://x"), 9.0), b"".join(parts)

    def read(pieces):
        return [data for _, data in endpoint._events(Response(pieces), Exchange())]

    expected = read([whole])
    assert read([whole[i : i + 1 + size] for i in range(0, len(whole), 1 + size)]) == expected
    for data in expected:
        try:
            assert isinstance(endpoint._event(data), dict)
        except ServerError as error:
            assert "\n" not in str(error)


WAVES = st.tuples(st.sampled_from([*KINDS, (6, 8), (1, 12)]), st.integers(0, 3), SMALL.filter(lambda n: type(n) is int),
                  st.binary(max_size=60), st.integers(0, 90), st.integers(-4, 4))  # fmt: skip


@both(WAVES)
def waves(drawn):
    """A file is a sound of as many finite samples as its header says, or one sentence."""
    (number, bits), channels, rate, data, cut, more = drawn
    head = struct.pack("<HHIIHH", number, channels, rate % 2**32, 0, bits // 8 * channels, bits)
    content = b"RIFF\0\0\0\0WAVEfmt " + struct.pack("<I", 16) + head + b"data"
    content += struct.pack("<I", max(0, len(data) + more)) + data
    try:
        samples, own = decode_sound(content[: len(content) - cut], "F")
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    assert (len(samples), own) == length(content[: len(content) - cut], "F") and abs(samples).max() <= 1000


def test_waves_that_are_sounds_are_met():
    """Else the property says nothing."""
    head = struct.pack("<HHIIHH", 1, 1, 8000, 0, 2, 16)
    content = b"RIFF\0\0\0\0WAVEfmt " + struct.pack("<I", 16) + head + b"data" + struct.pack("<I", 4) + b"\0\1\0\2"
    assert decode_sound(content, "F")[0].tolist() == [1 / 128, 1 / 64]


CONFIGS = st.dictionaries(st.sampled_from([
    "hidden_size", "vocab_size", "draft_vocab_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "num_key_value_heads", "eagle_config", "dflash_config", "speculators_model_type", "transformer_layer_config",
    "block_size", "model_type", "rope_theta", "head_dim", "max_position_embeddings", "quantization_config", "bias",
    "mask_token_id", "target_hidden_size", "layer_types", "other"]), VALUES, max_size=9)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory):
    """Where the properties write."""
    global folder
    folder = tmp_path_factory.mktemp("outside")


@both(CONFIGS)
def draft_checkpoints(config):
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError):  # there are no weights
        inspect("drafter.path", str(folder), 1, None)
    try:
        parse_dflash(dict(config), "x")
    except (ConfigError, ValueError, TypeError):  # `read_dflash` makes one sentence of the others
        return


@both(st.binary(max_size=40) | st.binary(max_size=40).map(b"GGUF".__add__))
def ggufs(content):
    (folder / "a.gguf").write_bytes(content)
    try:
        check_gguf("target.path", str(folder / "a.gguf"), None)
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    assert content.startswith(b"GGUF")


@both(st.lists(st.binary(max_size=12) | VALUES.map(lambda value: json.dumps(value).encode()), max_size=5))
def lines(drawn):
    (folder / "a.jsonl").write_bytes(b"\n".join(drawn))
    try:
        found = [*read_json_lines(str(folder / "a.jsonl"))]
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    assert found and all(isinstance(record, dict) for _, record in found)


COUNT_LISTS = st.lists(st.integers(0, 4), min_size=1, max_size=4) | st.lists(SMALL, max_size=3) | VALUES


@both(st.lists(st.dictionaries(st.sampled_from(["accepted", "per_step_accepted", "per_step_drafted", "confidence"]),
                               COUNT_LISTS, max_size=4), max_size=3))  # fmt: skip
def traces(drawn):
    """Guesses that are accepted stand in the text."""
    (folder / "t.jsonl").write_text("\n".join(map(json.dumps, drawn)))
    try:
        found = load_file(folder / "t.jsonl")
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    for text in found:
        assert len(text.lengths) == len(text.confidence) > 0 and not text.lengths[-1]
        assert (text.lengths >= 0).all() and (text.lengths < range(len(text.lengths), 0, -1)).all()


@pytest.mark.parametrize("prop", [*answers, *streams, *waves, *draft_checkpoints, *ggufs, *lines, *traces])
def test_any_text_is_read_or_one_sentence(prop):
    prop()


class Stream(RuleBasedStateMachine):
    """A server that streams: what it has sent, and what must be read of that."""

    def __init__(self):
        super().__init__()
        self.sent, self.text, self.count, self.finish = [(0.0, {})], "", 0, ""

    def send(self, **event):
        self.sent.append((0.1 * len(self.sent), event))

    @precondition(lambda self: not self.finish and self.count < 10)
    @rule(text=st.text("ab", min_size=1, max_size=3), tokens=st.integers(1, 3), counted=st.booleans())
    def piece(self, text, tokens, counted):
        self.text, self.count = self.text + text, min(10, self.count + tokens)
        usage = {"completion_tokens": self.count} if counted else None
        self.send(choices=[{"text": text, "finish_reason": None}], usage=usage)

    @rule()
    def nothing(self):
        self.send(choices=[], usage=None)

    @precondition(lambda self: not self.finish and self.count)
    @rule()
    def end(self):
        self.finish = "length" if self.count == 10 else "stop"
        self.send(choices=[{"text": "", "finish_reason": self.finish}], usage={"completion_tokens": self.count})

    @invariant()
    def is_read(self):
        if not self.finish:
            with pytest.raises(ServerError, match="in the middle of an answer"):
                read_answer(self.sent, 10)
            return
        found = read_answer(self.sent, 10)
        assert (found.text, found.tokens, found.finish) == (self.text, self.count, self.finish)
        assert len(found.pieces) <= len(self.sent) and 0 < found.first <= found.tokens


@pytest.mark.parametrize("times", [15, pytest.param(500, marks=pytest.mark.slow)])
def test_a_stream_of_a_server_is_read_as_it_was_sent(times):
    run_state_machine_as_test(Stream, settings=settings(USUAL, max_examples=times, stateful_step_count=12))
