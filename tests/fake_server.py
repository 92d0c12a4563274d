"""A server of OpenAI's completions API in this process, in each of the dialects, and one that breaks in each way.

It writes the tokens that `texts` says, in rounds of guesses that `rounds` says, so that what a client must find out of
its counters is known.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL = "a-model"
OWNERS = {"vllm": "vllm", "sglang": "sglang", "llama_cpp": "llamacpp"}
PATHS = {"/version": ("vllm", {"version": "0.99"}), "/props": ("llama_cpp", {"build_info": "b99-abc"}),
         "/openapi.json": ("transformers", {"paths": {"/load_model": {}, "/v1/completions": {}}})}  # fmt: skip


@dataclass
class Fake:
    """What a server does. `rounds` are (drafted, accepted) of each round after the first token."""

    dialect: str
    texts: Callable[[list[int] | str, int], list[int]] = lambda prompt, limit: [7] * limit
    pieces: Callable[[int], str] = lambda token: f"t{token} "
    rounds: list[tuple[int, int]] = field(default_factory=list)
    models: tuple[str, ...] = (MODEL,)
    key: str | None = None
    broken: str = ""  # how answers break, from answer number `after` on
    after: int = 1  # number 0 is the one token that every client asks for first
    refuses: Callable[[dict], bool] = lambda body: False  # which requests are answered with an error
    stop_token: int | None = None
    others: int = 0  # tokens that it makes for others meanwhile
    tells: str = ""  # of each answer's own rounds: "summary" or "detailed", as vLLM's levels
    read: Callable[[str], list[int]] = lambda text: [0] * len(text)  # its tokenizer
    asked: list[dict] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0
    seconds: float = 0.0  # that a round takes
    buffers: bool = False  # whether all text comes in the last event but one
    counters: dict[str, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, **more: int) -> None:
        with self.lock:
            for name, value in more.items():
                self.counters[name] = self.counters.get(name, 0) + value

    def metrics(self) -> str:
        """The counters in Prometheus' format, of two engines."""
        places = max((drafted for drafted, _ in self.rounds), default=0)
        names = ["generation_tokens"]
        if self.rounds:
            names += [f"spec_decode_num_{n}" for n in ("drafts", "draft_tokens", "accepted_tokens")]
        lines = ["# HELP vllm:generation_tokens_total Number of generation tokens processed."]
        for engine in (0, 1):
            for name in names:
                value = self.counters.get(name, 0) if engine == 0 else 0
                lines.append(f'vllm:{name}_total{{engine="{engine}",model_name="{MODEL}"}} {value}.0')
        for place in range(places):
            value = self.counters.get(f"at_{place}", 0)
            lines.append(
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{place}"}} {value}.0'
            )
        return "\n".join([*lines, "python_info 1.0", "process_open_fds nonsense", ""])

    def answer(self, body: dict) -> Iterator[dict | str]:
        """The events of one answer; a text is sent as it is."""
        number = len(self.asked) - 1
        broken = self.broken if number >= self.after else ""
        prompt, limit = body["prompt"], body["max_tokens"]
        read = prompt if isinstance(prompt, list) else self.read(prompt)
        tokens, rounds = self.texts(prompt, limit), iter(self.rounds)
        size = len(read) + (broken == "prompt")
        made = accepted = drafted = 0
        pairs: list[tuple[int, int]] = []
        for place in self._cut(tokens, rounds if number else iter(())):
            round_tokens, guesses, kept = place
            if broken == "stalls" and made:
                time.sleep(3)
            if broken == "dies" and made:
                return
            if broken == "json" and made:
                yield "{'not': json"
            if broken == "shape" and made:
                yield {"choices": ["?"]}
            if broken == "error" and made:
                yield {"error": {"message": f"out of memory, {self.key}", "code": 500}}
            time.sleep(self.seconds)
            drafted, accepted = drafted + guesses, accepted + kept
            if guesses:
                pairs.append((kept, guesses))
                self.count(spec_decode_num_drafts=1, spec_decode_num_draft_tokens=guesses)
                self.count(spec_decode_num_accepted_tokens=kept, **{f"at_{i}": 1 for i in range(kept)})
            steps = [[token] for token in round_tokens] if self.dialect not in ("vllm", "sglang") else [round_tokens]
            for step in steps:
                made += len(step)
                self.count(generation_tokens=len(step))
                yield self._event(step, made, size, drafted, accepted, broken)
        self.count(generation_tokens=self.others)
        finish = "stop" if tokens[-1] == self.stop_token else "length"
        if broken == "short":
            finish = "length"
        told = made + {"more": limit + 1 - made, "less": -2, "uncounted": -made}.get(broken, 0)
        usage = {"prompt_tokens": size, "completion_tokens": told, "total_tokens": size + told}
        last = {"choices": [{"index": 0, "text": "", "finish_reason": finish}], "model": MODEL}
        if self.dialect == "llama_cpp":
            last["timings"] = self._timings(told, drafted, accepted)
        yield last | ({"usage": usage} if self.dialect in ("transformers", "llama_cpp") else {})
        if self.dialect not in ("transformers", "llama_cpp") and broken != "uncounted":
            yield {"choices": [], "usage": usage} | (self._own_rounds(pairs) if self.tells else {})
        yield "[DONE]"

    def _own_rounds(self, pairs: list[tuple[int, int]]) -> dict:
        accepted, drafted = ([pair[part] for pair in pairs] for part in (0, 1))
        histogram = [accepted.count(n) for n in range(max(drafted, default=0) + 1)]
        if self.dialect == "sglang":
            told = {"spec_verify_ct": len(pairs), "spec_num_correct_drafts": sum(accepted),
                    "spec_num_proposed_drafts": sum(drafted), "spec_correct_drafts_histogram": histogram}  # fmt: skip
            return {"sglext": {"spec_tokens_details": told}}
        told = {"num_spec_steps": len(pairs), "num_accepted_draft_tokens": sum(accepted),
                "num_draft_tokens": sum(drafted), "acceptance_histogram": histogram}  # fmt: skip
        if self.tells == "detailed":
            told |= {"per_step_accepted": accepted, "per_step_drafted": drafted}
        return {"metrics": {"speculative_decoding": told}}

    def _cut(self, tokens: list[int], rounds: Iterator[tuple[int, int]]) -> Iterator[tuple[list[int], int, int]]:
        """The first token, then the tokens of each round; without guesses one each."""
        yield tokens[:1], 0, 0
        done = 1
        while done < len(tokens):
            guesses, kept = next(rounds, (0, 0))
            yield tokens[done : done + kept + 1], guesses, kept
            done += kept + 1

    def _event(self, step: list[int], made: int, size: int, drafted: int, accepted: int, broken: str) -> dict:
        choice = {"index": 0, "text": "".join(self.pieces(t) for t in step if t != self.stop_token)}
        event = {"id": "x", "choices": [choice | {"finish_reason": None}], "model": MODEL}
        if self.dialect == "llama_cpp":
            event["timings"] = self._timings(made, drafted, accepted)
        if self.dialect in ("vllm", "sglang"):
            event["usage"] = {"prompt_tokens": size, "completion_tokens": made}
        if self.dialect == "vllm":
            choice["token_ids"] = step[:-1] if broken == "ids" else step
            event["choices"] = [choice]
        return event

    def _timings(self, made: int, drafted: int, accepted: int) -> dict:
        guesses = {"draft_n": drafted, "draft_n_accepted": accepted} if drafted else {}
        return {"predicted_n": made, "predicted_ms": 10.0 * (made - 1), **guesses}


def whole(events: Iterator[dict | str]) -> Iterator[dict | str]:
    """The events of an answer with all its text in one of them."""
    *pieces, last, usage, done = events
    text = "".join(piece["choices"][0]["text"] for piece in pieces)
    yield from (last | {"choices": [last["choices"][0] | {"text": text}]}, usage, done)


class Handler(BaseHTTPRequestHandler):
    """Speaks HTTP/1.1 for the server's `fake`."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *words) -> None:
        pass

    def send(self, status: int, text: str, kind: str = "application/json") -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def known(self) -> bool:
        """Whether the key is right, if there has to be one."""
        fake = self.server.fake
        if fake.key is None or self.headers["Authorization"] == f"Bearer {fake.key}":
            return True
        self.send(401, json.dumps({"error": {"message": "Invalid API Key", "code": 401}}))
        return False

    def do_GET(self) -> None:
        fake = self.server.fake
        if self.path == "/v1/models" and fake.broken != "gone" and (fake.dialect == "llama_cpp" or self.known()):
            owner = OWNERS.get(fake.dialect, "someone")
            self.send(200, json.dumps({"data": [{"id": name, "owned_by": owner} for name in fake.models]}))
        elif self.path == "/metrics" and fake.dialect == "vllm":
            self.send(200, fake.metrics(), "text/plain")
        elif self.path == "/server_info" and fake.dialect == "sglang":
            self.send(200, json.dumps({"version": "0.5", "internal_states": [{"avg_spec_accept_length": 2.5}]}))
        elif PATHS.get(self.path, ("",))[0] == fake.dialect:
            self.send(200, json.dumps(PATHS[self.path][1]))
        else:
            self.send(404, json.dumps({"detail": "Not Found"}))

    def do_POST(self) -> None:
        fake = self.server.fake
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.known():
            return
        if body["model"] not in fake.models:
            self.send(404, json.dumps({"error": {"message": f"no model {body['model']}"}}))
            return
        fake.asked.append(body)
        if fake.refuses(body):
            self.send(400, json.dumps({"error": {"message": "it is too long"}}))
            return
        broken = fake.broken if len(fake.asked) > fake.after else ""
        if broken == "500":
            self.send(500, json.dumps({"error": {"message": "it broke"}}))
            return
        if broken == "whole":
            self.send(200, "{}")
            return
        with fake.lock:
            fake.under_way += 1
            fake.most_under_way = max(fake.most_under_way, fake.under_way)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            self.chunk(": a comment\n\n")
            for event in whole(fake.answer(body)) if fake.buffers else fake.answer(body):
                self.chunk(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n")
            if broken != "dies":
                self.wfile.write(b"0\r\n\r\n")
        except OSError:
            pass  # the client has gone
        finally:
            self.close_connection = True
            with fake.lock:
                fake.under_way -= 1

    def chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


@contextmanager
def serving(fake: Fake) -> Iterator[str]:
    """The URL of a server that does what `fake` says, until the end of the block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.fake = True, fake
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
