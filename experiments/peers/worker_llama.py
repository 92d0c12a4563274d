"""Worker of llama.cpp: a `llama-server` for each mode, asked over HTTP for token ids.

`predicted_ms` is the server's own time from the end of reading the prompt, which gives the first token, to the last
token. The draft model reads the prompt before that, too.
"""

import argparse
import atexit
import json
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from socket import socket

from protocol import DecodeResult, Mode, Request, serve

STARTED_IN = 60  # seconds


class Server:
    """A `llama-server` process that listens on a port of this machine."""

    def __init__(self, folder: Path, name: str, *options: str):
        with socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"http://127.0.0.1:{free.getsockname()[1]}"
        command = [str(folder / "build" / "llama" / "bin" / "llama-server"), *options, "--port", self.address[17:]]
        self.log = folder / "logs" / f"llama-server-{name}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        atexit.register(self.process.kill)

    def wait(self) -> None:
        """Returns when the model is loaded. Raises RuntimeError if it is not within STARTED_IN seconds."""
        end = time.monotonic() + STARTED_IN
        while self.process.poll() is None and time.monotonic() < end:
            try:
                urllib.request.urlopen(f"{self.address}/health", timeout=2).close()
                return
            except OSError:
                time.sleep(0.1)
        raise RuntimeError(f"llama-server did not start, see {self.log}")

    def decode(self, request: Request) -> DecodeResult:
        """One prompt."""
        sampled = request["temperature"] > 0
        body = {
            "prompt": request["ids"],
            "n_predict": request["new"],
            "seed": request["seed"],
            "temperature": request["temperature"],
            "samplers": ["temperature"] if sampled else ["top_k"],
            "top_k": 0 if sampled else 1,
            "cache_prompt": False,
            "return_tokens": True,
        }
        data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{self.address}/completion", data, kind)) as answer:
            found = json.load(answer)
        return found["tokens"], found["timings"]["predicted_n"] - 1, found["timings"]["predicted_ms"] / 1e3


def load(args: argparse.Namespace) -> tuple[Mapping[str, Mode], str]:
    """A server for each mode, and for a draft model if there is one. Lookup drafts what followed the last two tokens
    before, as the other engines' does."""
    kind, threads, gamma = args.precision, str(args.threads), str(args.gamma)
    kept = "f32" if kind == "f32" else "f16"  # keys and values
    target, drafter = (str(args.folder / "gguf" / f"{name}-{kind}.gguf")
                       for name in (args.target_name, args.drafter_name))  # fmt: skip
    every = ("-m", target, "-c", str(args.context), "-np", "1", "-t", threads, "-tb", threads, "-ctk", kept,
             "-ctv", kept, "--no-webui", "--cache-ram", "0")  # fmt: skip
    if kind == "q8_0":
        every += ("--no-repack",)  # repacked for AMX, this version crashes
    drafts = ("-md", drafter, "--spec-type", "draft-simple", "--spec-draft-n-max", gamma,
              "--spec-draft-n-min", "0", "--spec-draft-p-min", "0", "--spec-draft-threads", threads,
              "--spec-draft-threads-batch", threads, "-ctkd", kept, "-ctvd", kept)  # fmt: skip
    looks = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "2", "--spec-ngram-simple-size-m", gamma)
    servers = {
        mode: Server(args.folder, f"{kind}-{mode}", *every, *options)
        for mode, options in {"plain": (), "draft": drafts, "lookup": looks}.items()
        if mode != "draft" or args.drafter
    }
    for server in servers.values():
        server.wait()
    return {mode: server.decode for mode, server in servers.items()}, version(args.folder)


def version(folder: Path) -> str:
    """Of the source distribution that llama.cpp comes from."""
    package = next((folder / "src").glob("llama_cpp_python-*.tar.gz")).name.removesuffix(".tar.gz")
    return f"llama.cpp of {package.replace('_', '-')}"


if __name__ == "__main__":
    serve(load)
