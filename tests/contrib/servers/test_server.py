"""Servers as peers (`baseline=server`): what is asked of them, what is read from their answers, and how they break."""

import json
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from itertools import accumulate, count
from types import SimpleNamespace

import pytest
import torch
from fake_server import MODEL, Fake, serving
from omegaconf import OmegaConf
from small_runs import call, composed, parts_of, small
from transformers import AutoModelForCausalLM

from specbench.config.paths import conf_dir
from specbench.config.validate import check
from specbench.contrib.servers.answer import Answer, AnswerAcceptance, AnswerPiece, Timings, read_answer
from specbench.contrib.servers.dialects import LlamaCpp, llama_acceptance, vllm_acceptance
from specbench.contrib.servers.endpoint import Endpoint, ServerError, split
from specbench.contrib.servers.lookup import find_server
from specbench.contrib.servers.numbers import pooled_server, server_numbers
from specbench.contrib.servers.per_request import answer_acceptance
from specbench.contrib.servers.server import ServerPeer, ServerPeers, shares_of_time
from specbench.contrib.servers.vllm_counters import NEW_TOKENS, metrics_of
from specbench.data.sources import SHIPPED
from specbench.decoding.sampling import Sampling
from specbench.decoding.state import Job
from specbench.errors import ConfigError
from specbench.results.reader import read_result
from specbench.results.run_table import _servers
from specbench.results.schema import plain
from specbench.results.writer import write_result
from specbench.run.batching import Requests
from specbench.run.run import run
from specbench.settings import validate
from specbench.stats.machine_noise import Use, shares

ROUNDS = [(4, 4), (4, 0), (4, 2), (4, 3)]  # drafted, accepted
TESTED = 4 + 1 + 3 + 4  # guesses up to the first rejected one
PROMPT = [5, 9, 2]


class Tokenizer:
    """Text of a token is "t5 "."""

    bos_token_id = 1

    def __call__(self, text):
        return {"input_ids": [1, *(int(word[1:]) if word[1:].isdigit() else 0 for word in text.split())]}

    def decode(self, tokens, skip_special_tokens=False, **options):
        return "".join(f"t{token} " for token in tokens if not (skip_special_tokens and token in (1, 3)))


TARGET = SimpleNamespace(tokenizer=Tokenizer(), stop_tokens=[3], vocab_size=100)


def settings(url, **more):
    values = {"model": None, "dialect": "auto", "key_env": None, "timeout": 0.5, "answer_timeout": 60.0, **more}
    return SimpleNamespace(url=url, **values)


def peer_at(url, temperature=0.0, stop=(), target=TARGET, **more):
    context = SimpleNamespace(sampling=Sampling(temperature, 40 if temperature else 0, 0.9), stop_strings=list(stop))
    return ServerPeer(find_server("baseline.url", url, settings(url, **more)), target, context)


def job(new=12, prompt=PROMPT, key=5):
    return Job(prompt, len(prompt) + new, key)


def result_of(output, prompt=PROMPT, ours=None, name="server"):
    """What a run knows of a prompt whose plain text is `ours`."""
    tokens = output.tokens if ours is None else ours
    return SimpleNamespace(
        peers={name: output},
        outputs={name: output},
        request=SimpleNamespace(id="p", prompt_id="p", tokens=prompt),
        baseline=SimpleNamespace(tokens=tokens),
    )


def numbers(peer, outputs, ours=None, greedy=True, stops=(), rows=1):
    results = [result_of(output, ours=ours) for output in outputs]
    return server_numbers("server", peer.server, results, TARGET.tokenizer, stops if greedy else None, rows)


TEXT = [*range(10, 23)]  # 13 tokens: the first one, and those of the rounds, 5 + 1 + 3 + 4 of which 12 fit


def counting(dialect, **more):
    return Fake(dialect, lambda prompt, limit: (TEXT * 2)[:limit], rounds=ROUNDS, read=reader, **more)


def reader(text):
    return Tokenizer()(text)["input_ids"]


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llama_cpp", "openai", "transformers"])
def test_each_dialect_gives_tokens_times_and_what_it_counts(dialect):
    fake = Fake(dialect, lambda prompt, limit: (TEXT * 2)[:limit], rounds=ROUNDS, read=reader)
    prompt = PROMPT if dialect in ("vllm", "sglang", "llama_cpp") else [1, *PROMPT]
    with serving(fake) as url:
        peer = peer_at(url)
        outputs = [peer.decode(job(14, prompt)) for _ in range(2)]
        server, notes = peer.server, peer.notes("server")
    for output in outputs:
        assert (output.count, output.decoded, output.first) == (14, 13, 1)
        streamed = output.streamed
        assert streamed.text == TARGET.tokenizer.decode((TEXT * 2)[:14])
        assert 0 < streamed.arrivals[0] <= streamed.arrivals[-1] <= streamed.last <= streamed.seconds
        by_rounds = dialect in ("vllm", "sglang", "llama_cpp")
        assert len(streamed.arrivals) == (1 + len(ROUNDS) if by_rounds else 14)
        assert (output.tokens == (TEXT * 2)[:14]) == (dialect == "vllm")
    versions = {"vllm": "0.99", "sglang": "0.5", "llama_cpp": "b99-abc"}
    assert (server.dialect.name, server.version, server.model) == (dialect, versions.get(dialect), MODEL)
    told = numbers(peer, outputs, ours=(TEXT * 2)[:14])
    assert any("may be too short" in note for note in notes) == (dialect not in ("vllm", "llama_cpp"))
    assert told.texts.equal == told.texts.compared == 2 and told.texts.first_difference is None
    drafted, accepted = (2 * sum(column) for column in zip(*ROUNDS, strict=True))
    if dialect in ("vllm", "llama_cpp"):
        assert (told.drafted, told.accepted) == (drafted, accepted)
        assert told.alpha.mean == pytest.approx(accepted / (2 * TESTED)) != accepted / drafted
        assert told.alpha.n == 2 * TESTED
        assert told.draft_acceptance_rate == pytest.approx(accepted / drafted)
        assert told.block_efficiency.mean == pytest.approx(1 + accepted / drafted * 4)
        assert told.block_efficiency.n == 2 * len(ROUNDS)
    elif dialect == "sglang":  # the mean that it tells, 2.5, is not this run's
        assert told.alpha.mean is told.block_efficiency.mean is None
        assert "since it was started" in told.no_alpha and "since it was started" in told.no_block_efficiency
    else:
        assert told.alpha.mean is told.block_efficiency.mean is None
        assert "tells nothing" in told.no_alpha and "tells nothing" in told.no_block_efficiency


def test_what_is_asked_of_a_server_is_what_is_decoded_here():
    asked = {}
    for dialect in ("vllm", "sglang", "llama_cpp", "transformers", "openai"):
        for temperature in (0.0, 0.5):
            with serving(Fake(dialect, read=reader)) as url:
                if dialect == "openai":
                    peer = ServerPeer(
                        find_server("baseline.url", url, settings(url)),
                        SimpleNamespace(tokenizer=TARGET.tokenizer, stop_tokens=[], vocab_size=100),
                        SimpleNamespace(sampling=Sampling(temperature, 0, 0.9), stop_strings=[]),
                    )
                else:
                    peer = peer_at(url, temperature, ["t99"])
                fields = peer.fields
                peer.decode(job(6, [1, 8], key=2**31 + 9))
            asked[dialect, temperature] = fields
    with serving(fake := Fake("vllm")) as url:
        peer_at(url, 0.5, ["t99"]).decode(job(6, [1, 8], key=2**31 + 9))
    body = fake.asked[-1]
    assert (body["prompt"], body["max_tokens"], body["seed"]) == ([1, 8], 6, 9)
    assert (body["temperature"], body["top_p"], body["top_k"]) == (0.5, 0.9, 40)
    assert (body["stop"], body["stop_token_ids"], body["ignore_eos"]) == (["t99"], [3], False)
    assert fake.asked[-2]["prompt"] == [8, 1]  # the one that is not counted
    assert len({asked["cache_salt"] for asked in fake.asked[-2:]}) == 2  # equal beginnings are read again
    assert asked["vllm", 0.0]["top_k"] == asked["sglang", 0.0]["top_k"] == -1
    assert asked["llama_cpp", 0.5]["samplers"] == ["temperature", "top_k", "top_p"]
    assert asked["llama_cpp", 0.0]["samplers"] == ["top_k"] and asked["llama_cpp", 0.0]["top_k"] == 1
    given = json.loads(asked["transformers", 0.5]["generation_config"])
    assert given["do_sample"] and (given["temperature"], given["top_k"], given["top_p"]) == (0.5, 40, 0.9)
    assert given["eos_token_id"] == [3] and not json.loads(asked["transformers", 0.0]["generation_config"])["do_sample"]
    assert {*asked["openai", 0.5]} == {"model", "temperature", "top_p", "stream", "stream_options"}


def grown(drafts, lengths, by_place, tokens=100):
    """vLLM's counters after so many drafts with this many tokens in all, accepted `by_place`."""
    spec = "vllm:spec_decode_num_"
    counts = {
        (f"{spec}drafts_total", None): drafts,
        (f"{spec}draft_tokens_total", None): lengths,
        (f"{spec}accepted_tokens_total", None): sum(by_place),
        ("vllm:generation_tokens_total", None): tokens,
    }
    return counts | {(f"{spec}accepted_tokens_per_pos_total", place): n for place, n in enumerate(by_place)}


def in_pieces(*sizes):
    """An answer whose pieces have so many tokens."""
    ends = list(accumulate(sizes))
    return Answer([AnswerPiece(0.1 * end, "x", end) for end in ends], None, ends[-1], 3, "length", 0.1 * ends[-1])


def test_alpha_from_vllms_counters_is_accepted_over_tested_or_refused():
    answers = [in_pieces(1, *[4] * 4, 3, *[2] * 3, 1, 1)]  # 28 tokens; 27 of 10 target calls, with a draft each
    found = vllm_acceptance(grown(10, 30, [8, 5, 4], 28), answers)
    assert (found.tested, found.accepted, found.rounds, found.tokens) == (10 + 8 + 5, 17, 10, 27)
    uneven = vllm_acceptance(grown(10, 27, [8, 5, 4], 28), answers)
    assert uneven.tested is None and "different lengths" in uneven.no_alpha and uneven.tokens == 27
    others = vllm_acceptance(grown(10, 30, [8, 5, 4], 27), answers)
    assert others.rounds is None and "others used it" in others.no_alpha
    other = {("vllm:spec_decode_num_accepted_tokens_total", None): 16}
    for counts in (grown(10, 30, [8, 5, 4]) | other, grown(1, 1, [9]), grown(10, 30, [5, 8, 4]), grown(10, 9, [8, 5])):
        told = vllm_acceptance(counts | {NEW_TOKENS: 28}, answers)
        assert "contradict each other" in told.no_alpha and told.accepted is None


def test_counters_that_are_no_counts_are_not_read():
    text = 'vllm:a 2\nvllm:a NaN\nvllm:a +Inf\nvllm:a 1e308\nvllm:a -1\nvllm:b{position="0"} 3\n'
    text += f'vllm:c{{position="{"9" * 5000}"}} 1\n'
    found = metrics_of(SimpleNamespace(get=lambda path: text))
    assert found == {("vllm:a", None): 2.0, ("vllm:b", 0): 3.0, ("vllm:c", None): 1.0}


def test_target_calls_without_a_draft_are_in_block_efficiency():
    """Prompt lookup has them, and vLLM counts no draft for them."""
    rounds = [(4, 4), (0, 0), (4, 1), (0, 0), (0, 0)]
    with serving(Fake("vllm", lambda prompt, limit: (TEXT * 2)[:limit], rounds=rounds)) as url:
        peer = peer_at(url)
        told = numbers(peer, [peer.decode(job(11))])
    assert (told.alpha.mean, told.alpha.n) == (pytest.approx(5 / 6), 6)
    assert (told.block_efficiency.mean, told.block_efficiency.n) == (10 / 5, 5)


def test_pieces_that_are_not_the_steps_of_vllm_are_refused():
    told = grown(2, 6, [1, 1, 0], 7)  # steps of 3, 1, 1 and 1 tokens, of which the first two had drafts
    assert vllm_acceptance(told, [in_pieces(1, 3, 1, 1, 1)]).rounds == 4
    for sizes in ((1, 3, 2, 1), (1, 4, 1, 1), (1, 6), (4, 1, 1, 1), (7,)):  # several steps in one piece
        refused = vllm_acceptance(told, [in_pieces(*sizes)])
        assert refused.rounds is None and "are not its steps" in refused.no_block_efficiency
        assert refused.tested == 2 + 1 + 1  # the counters still have it
    cut = grown(2, 6, [2, 1, 1], 5)  # the limit has cut a step of 4 tokens to 2
    assert vllm_acceptance(cut, [in_pieces(1, 2, 2)]).rounds == 2
    assert vllm_acceptance(cut, [in_pieces(1, 4)]).rounds is None


def test_counters_of_a_server_that_serves_others_are_refused(monkeypatch):
    monkeypatch.setattr("specbench.contrib.servers.dialects.SETTLED", 0.02)
    with serving(counting("vllm", others=5)) as url:
        peer = peer_at(url)
        peer.decode(job())
        told = numbers(peer, [peer.decode(job())])
    assert told.alpha.mean is None and "others used it" in told.no_alpha and told.drafted is None


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_what_a_server_tells_of_each_answers_rounds_is_used_though_it_serves_others(dialect):
    """Four rounds, of which one drafted nothing and the last is cut by the limit."""
    rounds = [(4, 4), (0, 0), (4, 1), (4, 2)]
    fake = Fake(dialect, lambda prompt, limit: (TEXT * 2)[:limit], rounds=rounds, others=7, tells="summary")
    with serving(fake) as url:
        peer = peer_at(url)
        told = numbers(peer, [peer.decode(job(10))], [TEXT], greedy=False)
        assert (told.alpha.mean, told.alpha.n) == (pytest.approx(7 / 9), 9)
        assert told.by_place == [[3, 3], [2, 3], [1, 2], [1, 1]]
        assert (told.block_efficiency.mean, told.block_efficiency.n) == (9 / 4, 4)
        assert told.block_efficiency_of_requests.mean == 9 / 4 and "p(x)" in told.acceptance_law
        fake.rounds = [(4, 4), (2, 0), (3, 3)]
        uneven = numbers(peer, [peer.decode(job(10))], [TEXT], greedy=False)
        assert uneven.alpha.mean is None and "different lengths" in uneven.no_alpha and uneven.accepted == 7
        fake.tells = "detailed"
        if dialect == "vllm":
            assert numbers(peer, [peer.decode(job(10))], [TEXT], greedy=False).by_place == [
                [2, 3],
                [2, 2],
                [2, 2],
                [1, 1],
            ]


@pytest.mark.parametrize("told", [
    {"num_spec_steps": 2, "num_draft_tokens": 4, "acceptance_histogram": [0, 1]},
    {"num_spec_steps": 1, "num_draft_tokens": 0, "acceptance_histogram": [0, 1]},
    {"num_spec_steps": True, "num_draft_tokens": 4, "acceptance_histogram": [0, 1]},
    {"num_spec_steps": 1, "num_draft_tokens": 4, "acceptance_histogram": "11"},
    {"num_spec_steps": 1, "num_draft_tokens": 1, "acceptance_histogram": [0, 1],
     "per_step_accepted": [1], "per_step_drafted": [0]},
    {"num_spec_steps": 1, "num_draft_tokens": 1, "acceptance_histogram": [0, 1],
     "per_step_accepted": [1], "per_step_drafted": [9]},
    {"num_spec_steps": 1, "num_draft_tokens": 10**6, "acceptance_histogram": [1],
     "per_step_accepted": [0], "per_step_drafted": [10**6]},
    {"num_spec_steps": 1, "num_draft_tokens": 2000, "acceptance_histogram": [0] * 2000 + [1]},
    {"num_spec_steps": 1000, "num_draft_tokens": 999_000, "acceptance_histogram": [10**6] * 1000},  # no list of all
])  # fmt: skip
def test_rounds_that_contradict_themselves_are_refused(told):
    answer = in_pieces(1, 2)
    answer.told = told
    assert "contradicts itself" in answer_acceptance(answer).no_alpha


def test_rounds_of_llama_cpp_that_characters_hide_are_refused():
    numbers_of = [(0.1, "a", 1), (0.2, "b", 2, 4, 1), (0.3, "c", 3, 4, 1), (0.4, "d", 4, 4, 1)]
    pieces = [AnswerPiece(*known) for known in numbers_of]
    whole = Answer(
        [*pieces, AnswerPiece(0.5, "e", 5, 8, 1)], None, 5, 3, "length", 0.5, Timings(draft_n=8, draft_n_accepted=1)
    )
    found = llama_acceptance(whole)
    assert (found.rounds, found.tokens, found.tested, found.no_alpha) == (3, 4, 2 + 1, "")
    assert [p.text for p in LlamaCpp().rounds(whole.pieces)] == ["a", "b", "d", "e"]
    hidden = Answer([*pieces[:3], AnswerPiece(0.5, "é", 5, 8, 1)], None, 5, 3, "length", 0.5, whole.timings)
    assert (
        llama_acceptance(hidden).tested is None and "characters of several tokens" in llama_acceptance(hidden).no_alpha
    )
    together = [pieces[0], AnswerPiece(0.5, "é", 3, 4, 1), AnswerPiece(0.5, "f", 4, 4, 1)]
    shared = Answer(together, None, 4, 3, "length", 0.5, Timings(draft_n=4, draft_n_accepted=1))
    assert "hide" in llama_acceptance(shared).no_alpha  # a plain round and one of a guess, or one of two tokens
    late = Answer([AnswerPiece(0.1, "a", None)], None, 5, 3, "length", 0.5, Timings(draft_n=8, draft_n_accepted=1))
    assert "only at the end" in llama_acceptance(late).no_alpha and llama_acceptance(late).rounds is None


BROKEN = {
    "500": "answers 500 Internal Server Error: it broke",
    "stalls": r"sent nothing for 0.5 s",
    "dies": "in the middle of an answer",
    "json": "sent what is no JSON: {'not': json",
    "shape": "another shape",
    "error": r"an error in the middle of an answer: out of memory, \*\*\*$",
    "whole": "application/json where a stream of events was asked for",
    "more": "counted 13 new tokens where at most 12 were asked for",
    "less": "count of tokens went from 12 to 10",
    "prompt": "read 4 tokens of a prompt that has 3",
    "ids": r"sent \d+ tokens and counted 12",
}


@pytest.mark.parametrize("broken", BROKEN)
def test_an_answer_that_breaks_is_an_error_in_words(broken, monkeypatch):
    monkeypatch.setenv("A_KEY", "abc123")
    with serving(counting("vllm", broken=broken, after=2, key="abc123")) as url:
        peer = peer_at(url, key_env="A_KEY")
        peer.warm = True
        peer.decode(job())
        with pytest.raises(RuntimeError, match=BROKEN[broken]) as told:
            peer.decode(job())
        assert "abc123" not in str(told.value)
        assert not peer.gone  # it still lists its models


def wordy(text):
    """Tokens of a text, three of each word that is no token's."""
    return [1, *(token for word in text.split() for token in ([7] if word[0] == "t" else [0] * 3))]


def test_a_first_answer_that_fails_fails_no_prompt():
    """A text backwards has more tokens than the prompt, here too many for the server."""
    limited = Fake("openai", read=wordy, refuses=lambda body: len(wordy(body["prompt"])) > 4)
    with serving(limited) as url:
        assert peer_at(url).decode(job(6, [1, 8, 5, 9])).count == 6
    assert len(limited.asked) == 3 and all(len(wordy(asked["prompt"])) <= 4 for asked in limited.asked)
    failing = counting("vllm", refuses=lambda body: body["prompt"] == PROMPT[::-1])
    with serving(failing) as url:
        assert peer_at(url).decode(job()).count == 12
    assert [asked["prompt"] for asked in failing.asked[1:]] == [PROMPT[::-1], PROMPT]


@contextmanager
def sending(*parts, sent=None, pause=0.0, first=b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"):
    """An endpoint whose answer is these bytes, kept in the list `sent` as they go; the connection then stays until the
    client ends it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                connection.recv(2**16)
                connection.sendall(first)
                for part in parts:
                    connection.sendall(part)
                    if sent is not None:
                        sent.append(part)
                    time.sleep(pause)
                while connection.recv(2**16):
                    pass

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield Endpoint(split("url", f"http://127.0.0.1:{listening.getsockname()[1]}"), 0.3)
        thread.join(5)


def events_of(endpoint):
    return [event for _, event in endpoint.stream("/v1/completions", {}) if event]


DONE = b"data: [DONE]\n\n"
FORMS = {
    "more follows": (b'data: {"a": 1}\n\ndata: {"b": 2}\n\n' + DONE + b"data: {no json\n\n",),
    "byte order mark": (b'\xef\xbb\xbfdata: {"a": 1}\n\ndata: {"b": 2}\n\n' + DONE,),
    "CR": (b'data: {"a": 1}\r\rdata: {"b": 2}\r\r' + DONE,),
    "CRLF, cut anywhere": (b'data: {"a":\r', b"\ndata: 1}\r", b"\n\r\nda", b'ta:{"b": 2}\r\n\r\n', DONE),
    "several lines": (b'event: x\ndata: {"a":\ndata\ndata: 1}\nid: 5\n\n', b'data: {"b": 2}\n\n', DONE),
    "other separators": (': \u2028data: {"z": 9}\n\n'.encode(), b'data: {"a": 1}\n\ndata: {"b": 2}\n\n', DONE),
    "empty data": (b'data:\n\ndata: {"a": 1}\n\ndata: \n\n: ping\n\ndata: {"b": 2}\n\n', DONE),
}


@pytest.mark.parametrize("form", FORMS)
def test_events_in_all_forms_are_read_until_the_answer_says_that_it_is_over(form):
    """Afterwards the server keeps the connection, and nothing is waited for."""
    with sending(*FORMS[form], pause=0.01) as endpoint:
        assert events_of(endpoint) == [{"a": 1}, {"b": 2}]


def test_comments_do_not_keep_a_stuck_server_alive():
    with sending(b'data: {"a": 1}\n\n', *[b": ping\n\n"] * 100, pause=0.02) as endpoint:
        began = time.monotonic()
        with pytest.raises(ServerError, match=r"kept the connection, but sent no data for 0\.3 s"):
            events_of(endpoint)
        assert time.monotonic() - began < 1.5  # all comments take 2 s


def test_an_answer_is_over_when_its_last_token_has_come(monkeypatch):
    monkeypatch.setattr("specbench.contrib.servers.endpoint.LOOK_SECONDS", 0.1)
    end = b'data: {"choices": [{"text": "b", "finish_reason": "stop"}], "usage": {"completion_tokens": 2}}\n\n'
    for after in ((), [b": ping\n\n"] * 100, [b'data: {"usage": null}\n\n'] * 100):
        sent = []
        with sending(b'data: {"choices": [{"text": "a"}]}\n\n', end, *after, sent=sent, pause=0.01) as endpoint:
            found = read_answer(endpoint.stream("/v1/completions", {}), 5)
        assert (found.text, found.tokens, found.finish) == ("ab", 2, "stop")
        assert len(sent) < 102


DRIPS = {
    "events": b'data: {"choices": [{"text": "a"}]}\n\n',
    "letters of one event": b"a",
    "comments": b": ping\n\n",
}


@pytest.mark.parametrize("drip", DRIPS)
def test_a_whole_answer_has_one_deadline(drip):
    with sending(b'data: {"a": 1}\n\n', *[DRIPS[drip]] * 200, pause=0.01) as endpoint:
        endpoint.longest, endpoint.timeout = 0.15, 60
        with pytest.raises(ServerError, match=r"did not end its answer within 0\.15 s"):
            events_of(endpoint)


@pytest.mark.parametrize("headers", [b"X: y\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b"x"])
def test_headers_have_a_deadline(headers, monkeypatch):
    monkeypatch.setattr("specbench.contrib.servers.endpoint.CONNECT_SECONDS", 0.1)
    first = b"HTTP/1.1 200 OK\r\n" * (not headers.startswith(b"HTTP"))
    for ask in (lambda endpoint: endpoint.get("/v1/models"), events_of):
        with sending(*[headers] * 200, pause=0.01, first=first) as endpoint:
            endpoint.timeout = 0.15
            with pytest.raises(ServerError, match=r"did not end its answer within 0\.[12]5 s"):
                ask(endpoint)


ONE = {"text": "x", "finish_reason": "stop"}
IMPOSSIBLE = {
    "guesses": {"timings": {"predicted_n": 1, "draft_n": 3, "draft_n_accepted": 9}},
    "text as a count": {"timings": {"predicted_n": 1, "draft_n": "abc"}},
    "negative time": {"timings": {"predicted_n": 1, "predicted_ms": -5}},
    "no time": {"timings": {"predicted_n": 1, "predicted_ms": float("nan")}},
    "a time of 400 digits": {"timings": {"predicted_n": 1, "predicted_ms": 10**400}},
    "true tokens": {"usage": {"completion_tokens": True}},
    "parts of tokens": {"usage": {"completion_tokens": 1.5}},
    "a number as text": {"choices": [ONE | {"text": 5}], "usage": {"completion_tokens": 1}},
    "no text": {"choices": [ONE | {"text": ""}], "usage": {"completion_tokens": 4}},
    "an error as reason": {"choices": [ONE | {"finish_reason": "error"}], "usage": {"completion_tokens": 1}},
    "an object as reason": {"choices": [ONE | {"finish_reason": {}}], "usage": {"completion_tokens": 1}},
    "objects": {"choices": {}, "usage": [], "timings": 3},
    **{f"token {x}": {"choices": [ONE | {"token_ids": [x]}]} for x in (-1, 100, 2**70, None, "x", 1.5, True, [1])},
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_no_server_can_have_done_is_refused(name):
    def answer(event):
        return read_answer([(0.0, {}), (0.1, event), (0.2, {})], 5, 100)

    good = {"choices": [ONE | {"token_ids": [99]}], "usage": {"completion_tokens": 1}}
    assert answer(good).ids == [99]
    with pytest.raises(ServerError):
        answer({"choices": [ONE]} | IMPOSSIBLE[name])


@pytest.mark.parametrize("counts", [[(6, 2), (2, 2)], [(5, 0), (6, 6)], [(5, 3), (9, 2)], [(5, 0), (9, 4)]])
def test_guesses_that_come_and_go_are_refused(counts):
    """The last ones are possible."""
    events = [
        (0.1 * n, {"choices": [{"text": "x"}], "timings": {"predicted_n": n, "draft_n": d, "draft_n_accepted": a}})
        for n, (d, a) in enumerate([(0, 0), *counts], 1)
    ]
    end = {"choices": [{"text": "y", "finish_reason": "stop"}], "usage": {"completion_tokens": 4}}
    with nullcontext() if counts[1] == (9, 4) else pytest.raises(ServerError, match="count of guesses went from"):
        found = read_answer([(0.0, {}), *events, (0.4, end), (0.5, {})], 9)
        assert [piece.drafted for piece in found.pieces] == [0, 5, 9, 9]


@pytest.mark.parametrize("bad", [r'{"a": "\ud800"}', '{"a": NaN}', "[" * 100_000, "[]", "5", '{"a": 1', ""])
def test_what_is_no_object_of_json_is_refused(bad):
    with pytest.raises(ServerError):
        Endpoint(split("url", "http://x"), 1.0)._event(bad.encode())


def test_an_answer_without_end_is_refused_before_its_end():
    for event in ({}, {"choices": [{"text": "a"}]}, {"choices": [{"token_ids": [1]}]}):
        with pytest.raises(ServerError, match="goes on after"):
            read_answer(((0.0, event) for _ in count()), 5)


def test_an_answer_in_one_piece_has_no_time_per_token():
    """Every proxy that keeps a stream until its end sends one."""
    event = {"choices": [ONE], "usage": {"completion_tokens": 9}}
    found = read_answer([(0.0, {}), (0.1, event), (0.2, {})], 9)
    assert (found.first, found.tokens) == (9, 9)
    whole = Fake("openai", read=reader, buffers=True)
    with serving(whole) as url:
        peer = peer_at(url)
        output = peer.decode(job(6, [1, 8]))
    assert (output.count, output.decoded, output.decode_seconds) == (6, 0, 0.0)
    for moments, decoded in (([1] + [2] * 9, 0), ([*range(1, 11)], 9)):  # a part of it goes on, then the rest; no proxy
        pieces = [AnswerPiece(0.1 * moment, "x", n) for n, moment in enumerate(moments, 1)]
        held = peer._output(Answer(pieces, None, 10, 2, "length", 1.0), AnswerAcceptance(), 0.1)
        assert (held.count, held.decoded, len(held.streamed.arrivals)) == (10, decoded, 1 + decoded)
    told = numbers(peer, [output], ours=[7] * 6)
    assert told.latency.time_per_output_token["p50"] is None and told.latency.first_token["p50"] > 0


def test_one_request_that_fails_leaves_the_others_of_its_group():
    refusing = counting("vllm", refuses=lambda body: body["prompt"] == [5, 9, 9])
    with serving(refusing) as url:
        peer = peer_at(url)
        outputs = peer.decode_all([job(), job(prompt=[5, 9, 9]), job()], 2)
    assert [isinstance(output, ServerError) for output in outputs] == [False, True, False]
    assert outputs[0].count == outputs[2].count == 12


def test_a_request_whose_connection_is_being_made_is_given_up_with_the_others(monkeypatch):
    with sending() as endpoint:
        connected = socket.create_connection

        def slow(*where, **options):
            connection = connected(*where, **options)
            endpoint.abort()  # another request fails meanwhile
            return connection

        monkeypatch.setattr(socket, "create_connection", slow)
        with pytest.raises(ServerError, match="was given up, since another one failed"):
            events_of(endpoint)
    with serving(counting("vllm")) as url:
        peer = peer_at(url)
        peer.server.endpoint.abort()
        assert peer.decode(job()).count == 12  # the next group is asked


def test_a_text_that_ends_early_and_claims_its_limit_is_refused():
    short = Fake("openai", lambda prompt, limit: [7] * 5, read=reader)
    with serving(short) as url, pytest.raises(RuntimeError, match="calls that the limit"):
        peer_at(url).decode(job(6, [1, 8]))
    ends = Fake("openai", lambda prompt, limit: [7, 7, 3][-limit:], read=reader, stop_token=3)
    with serving(ends) as url:
        peer = peer_at(url)
        output = peer.decode(job(6, [1, 8]))
    assert (output.count, output.streamed.text) == (3, "t7 t7 ")
    assert numbers(peer, [output], ours=[7, 7, 3]).texts.equal == 1


def test_a_server_that_does_not_count_is_refused():
    silent = Fake("openai", broken="uncounted", read=reader)
    with serving(silent) as url, pytest.raises(RuntimeError, match="does not say how many tokens"):
        peer_at(url).decode(job(6, [1, 8]))


def test_a_server_that_stops_answering_is_asked_once_more_and_never_again():
    with serving(counting("vllm")) as url:
        peer = peer_at(url)
        peer.decode(job())
    with pytest.raises(RuntimeError, match="nothing answers at"):
        peer.decode(job())
    with pytest.raises(RuntimeError, match="stopped answering, so it is not asked any more"):
        peer.decode(job())


def test_requests_of_a_group_are_under_way_at_once_and_share_the_time():
    fake = counting("vllm", seconds=0.01)
    with serving(fake) as url:
        peer = peer_at(url)
        began = time.perf_counter()
        outputs = peer.decode_all([job(key=k) for k in range(6)], 3)
        passed = time.perf_counter() - began
    assert [output.count for output in outputs] == [12] * 6
    assert sum(output.decode_seconds for output in outputs) <= passed
    counts = [output.streamed.counts for output in outputs]
    assert counts[0].rounds == 6 * len(ROUNDS) and all(own.rounds is None for own in counts[1:])
    told = numbers(peer, outputs, rows=3)
    assert told.alpha.n == 6 * TESTED and told.tokens_per_second is None and told.at_once == 3 == fake.most_under_way


def test_requests_that_arrive_over_time_are_sent_then_however_many_are_under_way():
    """An open loop: with one row here, three are under way at the server."""
    fake = counting("vllm", seconds=0.1)
    with serving(fake) as url:
        peer = peer_at(url)
        peer.decode(job())
        begun = time.perf_counter()
        outputs = peer.decode_all([job(key=k) for k in range(3)], 1, [0.0, 0.05, 0.1])
    assert fake.most_under_way == peer.at_once == 3 and [output.count for output in outputs] == [12] * 3
    sent = [asked["seed"] for asked in fake.asked[-3:]]
    assert sent == [0, 1, 2] and time.perf_counter() - begun > 0.1


def test_shares_of_time_that_overlaps():
    assert shares_of_time([(0.0, 4.0), (2.0, 4.0), (6.0, 7.0)]) == [3.0, 1.0, 1.0]
    assert shares_of_time([(1.0, 1.0)]) == [0.0]


def test_texts_that_differ_are_counted_and_the_first_is_shown():
    with serving(counting("llama_cpp")) as url:
        peer = peer_at(url)
        output = peer.decode(job(5))
    told = numbers(peer, [output, output], ours=[10, 11, 99, 13, 14]).texts
    assert (told.compared, told.equal) == (2, 0)
    first = told.first_difference
    assert (first.request, first.character, first.ours, first.theirs) == ("p", 9, "99 t13 t14 ", "12 t13 t14 ")
    assert numbers(peer, [output], ours=[10, 11, 99], greedy=False).texts.compared == 0
    cut = numbers(peer, [output], ours=[10, 11, 12, 13, 14, 15], stops=["t15"]).texts
    assert cut.equal == 1  # ours ends behind the stop string, theirs before it


def refusal(url, **more):
    with pytest.raises(ConfigError) as error:
        find_server("baseline.url", url, settings(url, **more))
    return str(error.value)


def test_a_server_that_cannot_be_used_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.setenv("A_KEY", "wrong-key")
    with serving(Fake("llama_cpp", key="right-key", models=("one", "two"))) as url:
        assert "baseline.model is not set" in (told := refusal(url)) and "one, two" in told
        assert f"baseline.model=three is not allowed: {url} serves one, two" == refusal(url, model="three")
        assert "answers 401" in (told := refusal(url, model="one")) and "baseline.key_env=NAME" in told
        told = refusal(url, model="one", key_env="A_KEY")
        assert "must be one that it knows" in told and "wrong-key" not in told
        assert "NO_SUCH_KEY is not possible: this environment variable is not set" in refusal(
            url, key_env="NO_SUCH_KEY"
        )
    assert "nothing answers at" in (told := refusal(url)) and told.startswith(f"baseline.url={url} is not possible")
    with serving(Fake("openai", broken="gone")) as url:
        assert "answers 404" in refusal(url)


NO_URLS = ["localhost:8000", "ftp://x", "http://", "http://x:99999", "http://x/v1?a=b", "http://é", "http://a:b@x",
           "http://x y", {"plain": 5}, {"A": "http://x"}, {}, 7]  # fmt: skip


@pytest.mark.parametrize("url", NO_URLS)
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ConfigError, match=r"^baseline\.url") as error:
        validate(ServerPeers.Settings, settings_node(url=OmegaConf.create({"u": url}).u), "baseline.")
    assert "a:b@" not in str(error.value)


def settings_node(**values):
    return OmegaConf.merge(OmegaConf.load(conf_dir() / "baseline" / "server.yaml"), values)


def test_a_key_in_place_of_its_variable_is_refused_and_not_repeated():
    with pytest.raises(ConfigError, match="name of an environment variable") as error:
        validate(ServerPeers.Settings, settings_node(url="http://x", key_env="sk-secret"), "baseline.")
    assert "sk-secret" not in str(error.value)
    told = refusal("http://127.0.0.1:9", key_env="AIzaSyd0ub1e")  # a key that could be a variable
    assert "AIza" not in told and told.startswith("baseline.key_env is not possible: this environment variable is not")


def test_choices_that_servers_cannot_have_are_refused():
    for override, told in (("repetition_penalty=1.2", "repetition_penalty=1.2"),):
        with pytest.raises(ConfigError, match=told):
            check(composed(*small("baseline=server", "baseline.url=http://127.0.0.1:9", override, "logger=none")))


def test_without_httpx_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("specbench.contrib.servers.server.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"without httpx: install it with pip install '.*\[servers\]'"):
        check(composed(*small("baseline=server", "baseline.url=http://127.0.0.1:9", "logger=none")))


def test_a_url_may_end_with_the_version_and_have_a_path():
    for url in ("http://x:1/api/v1", "http://x:1/api/v1/", "http://x:1/api/"):
        assert str(Endpoint(split("k", url), 1.0)) == "http://x:1/api"
    assert "abc" not in repr(Endpoint(split("k", "http://x"), 1.0, "abc"))


def test_no_server_no_model(monkeypatch, tmp_path, capsys):
    """The sentence comes before any model is loaded."""
    monkeypatch.setattr(
        "specbench.config.memory_estimate.load_tokenizer", lambda *_: pytest.fail("a tokenizer was loaded")
    )
    words = ["baseline=server", "baseline.url=http://127.0.0.1:9", "logger=none"]
    assert call(small(*words), monkeypatch, tmp_path) == 2
    told = capsys.readouterr().err
    assert "baseline.url=http://127.0.0.1:9 is not possible: nothing answers" in told and told.count("\n") == 1


def test_a_run_beside_a_server(tmp_path):
    """Texts are those of another implementation of greedy decoding here; then the server dies."""
    fake = Fake("llama_cpp", rounds=ROUNDS * 2)
    with serving(fake) as url:
        parts = parts_of("baseline=server", f"baseline.url={url}/v1", "temperature=0", "data.limit=2", "executor=eager")
        tokenizer = parts.target.tokenizer
        fake.pieces = lambda token: tokenizer.decode([token])
        stock = AutoModelForCausalLM.from_pretrained(SHIPPED / "drafter", dtype=torch.float32)  # the run's target

        known = {}
        for wanted in Requests(parts).groups():
            prompt = list(wanted.requests[0].tokens)
            read = torch.tensor([prompt])
            with torch.inference_mode():
                text = stock.generate(read, attention_mask=torch.ones_like(read), max_new_tokens=12, do_sample=False)
            known[tuple(prompt)] = text[0, len(prompt) :].tolist()

        def texts(prompt, limit):
            if limit == 12 and tuple(prompt) in known:  # no warm-up: the next answer is cut off
                fake.broken, fake.after = "dies", len(fake.asked)
            return known.get(tuple(prompt), [7] * 12)[:limit]

        fake.texts = texts
        result, record = run(parts, tmp_path)
        write_result(result, record, "digest", tmp_path, tokenizer)
    assert sum(asked["max_tokens"] == 1 for asked in fake.asked) == 1  # it was looked for once
    assert (result.counts.prompts, result.counts.failed, result.status) == (2, 0, "complete")
    assert any("server failed for 1 of 2 requests" in note and "ended the connection" in note for note in result.notes)
    found = result.servers["server"]
    assert (found.texts.compared, found.texts.equal) == (1, 1)
    assert found.latency.first_token["p50"] > 0 and found.latency.inter_token["p99"] > 0
    assert result.speedup_over["server"].measured > 0 and result.throughput["server_tokens_per_second"] > 0
    assert any("another process, maybe on another machine" in note for note in result.notes)
    stored = read_result(tmp_path)["servers"]["server"]
    assert stored["model"] == MODEL and stored["url"] == url and stored["prompts"] == "ids"
    lines = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert lines[0]["server_output"] == lines[0]["baseline_output"] and "server_output" not in lines[1]
    assert "ended the connection" in lines[1]["server_error"] and lines[1]["baseline_output"]


def test_several_processes_on_one_server_are_pooled_by_their_counts():
    with serving(counting("vllm")) as url:
        peer = peer_at(url)
        short, long = (plain(asdict(numbers(peer, [peer.decode(job(new))]))) for new in (6, 14))
    both = pooled_server([short, long])
    tested, accepted = short["alpha"]["n"] + long["alpha"]["n"], short["accepted"] + long["accepted"]
    assert both["alpha"] == {"mean": pytest.approx(accepted / tested), "stderr": None, "n": tested}
    assert both["alpha"]["mean"] != pytest.approx((short["alpha"]["mean"] + long["alpha"]["mean"]) / 2)
    assert both["texts"]["compared"] == 2 and both["no_alpha"] == ""
    rates = [own | {"tokens_per_second": rate, "own_tokens_per_second": None} for own, rate in ((short, 2), (long, 6))]
    assert pooled_server(rates)["tokens_per_second"] == pytest.approx(3)  # 6 tokens in 3 s and in 1 s: 12 in 4 s
    assert pooled_server(rates)["own_tokens_per_second"] is None
    firsts = [own["latency"]["first_token"]["p50"] for own in (short, long)]
    assert firsts[0] != both["latency"]["first_token"]["p50"] == pytest.approx(sum(firsts) / 2)
    refused = pooled_server([short, long | {"alpha": {"mean": None, "stderr": None, "n": 0}, "no_alpha": "why"}])
    assert refused["alpha"]["mean"] is None and refused["no_alpha"] == "why"


def test_the_terminal_shows_a_server_and_why_a_number_is_not_known():
    with serving(counting("sglang")) as url:
        peer = peer_at(url)
        told = plain(asdict(numbers(peer, [peer.decode(job())], ours=[1, 2])))
    rows = {name: (value, remark) for name, value, remark in _servers({"servers": {"server": told}})}
    assert "another process, maybe another machine" in rows["  server, first token"][1]
    assert "prompts may have been read before" in rows["  server, first token"][1]
    assert rows["  server, alpha"][1].startswith("not known: the server tells only the mean")
    assert rows["  server, block efficiency"] == ("-", "the server tells only the mean tokens a round of all requests "
                                                       "since it was started")  # fmt: skip
    assert rows["  server, texts"] == ("0 of 1", "equal plain decoding's here; p parts at character 1")


def test_work_elsewhere_is_not_that_of_others():
    """Seconds of all cores, busy ones, given away, and our own: 4 of the 6 that others used were a peer's."""
    uses = [Use(0, 0, 0, 0), Use(20, 10, 0, 4)]
    assert shares(uses)[0] == pytest.approx(6 / 20)
    assert shares(uses, [(Use(5, 1, 0, 1), Use(9, 5, 0, 1))])[0] == pytest.approx(2 / 16)


@pytest.mark.slow  # it starts a process that imports torch, and needs the extras of `transformers serve`
def test_transformers_serve_writes_the_same_texts(tmp_path):
    for name in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(name)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    model, begin = str(SHIPPED / "drafter"), "from transformers.cli.transformers import main; main()"
    words = [sys.executable, "-c", begin, "serve", model, "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(words, stdout=log, stderr=log) as process:
        try:
            url, end = f"http://localhost:{port}", time.monotonic() + 100
            while time.monotonic() < end and process.poll() is None:
                try:
                    Endpoint(split("url", url), 1.0).get("/health")
                    break
                except RuntimeError:
                    time.sleep(0.2)
            words = ["baseline=server", f"baseline.url={url}", f"baseline.model='{model}'", "baseline.timeout=60"]
            parts = parts_of(*words, "temperature=0", "executor=eager")
            result, _ = run(parts, tmp_path)
        finally:
            process.kill()
    found = result.servers["server"]
    assert (found.dialect, found.prompts, found.texts.equal, found.texts.compared) == ("transformers", "text", 2, 2)
