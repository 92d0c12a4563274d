"""Other engines as the peers of a run (`baseline._target_=engines.Engines`): each decodes every prompt in its turn.

An engine runs in an environment of its own, as a worker process that answers over a pipe (protocol.py). transformers'
own ways of decoding are the peers of `baseline=transformers`, in this process. Every text is written to a file, so
that texts can be compared afterwards.
"""

import atexit
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from converted import name_of
from install import PAIR

from specbench.component import Selections
from specbench.decoding.state import Job
from specbench.errors import ConfigError
from specbench.models.context import Context
from specbench.models.language_model import LanguageModel
from specbench.peers.base import Peer, PeerOutput, Peers
from specbench.peers.transformers import TransformersPeers
from specbench.settings import BaseSettings, setting

log = logging.getLogger(__name__)
HERE = Path(__file__).resolve().parent
TRANSFORMERS = "transformers"
LONGEST = 4096  # tokens of a text, at most
TRIED = 16  # tokens, with which a way of decoding shows that it works


class Worker:
    """A worker process. What it prints besides its answers goes to a log."""

    def __init__(self, name: str, command: list[str], log: Path, environment: Mapping[str, str]):
        """Starts it and waits until it is ready. Raises RuntimeError."""
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1,
                env={**os.environ, **environment},
            )  # fmt: skip
        atexit.register(self.stop)
        hello = self._read()
        self.modes, self.version = hello["modes"], hello["version"]

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request. Raises RuntimeError if it is an error, or if the worker has ended."""
        with suppress(OSError):  # it has ended, as reading will tell
            self.process.stdin.write(json.dumps(request) + "\n")
        return self._read()

    def _read(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line.endswith("\n"):
            self.process.wait()
            raise RuntimeError(f"{self.name} ended with exit code {self.process.returncode}, see {self.log}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer

    def stop(self) -> None:
        """Ends it: it stops when nothing more can be read."""
        with suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()


@dataclass(frozen=True)
class WorkerMode(Peer):
    """One way of decoding of a worker."""

    worker: Worker
    mode: str
    temperature: float
    stop: list[int]

    def decode(self, job: Job) -> PeerOutput:
        answer = self.worker.ask({
            "mode": self.mode, "ids": list(job.tokens), "new": job.limit - len(job.tokens), "stop": self.stop,
            "temperature": self.temperature, "seed": job.key % 2**31,
        })  # fmt: skip
        return PeerOutput(answer["tokens"], answer["decoded"], answer["seconds"])


@dataclass(frozen=True)
class Recorded(Peer):
    """A peer whose texts are written to a file, a line of JSON each."""

    name: str
    peer: Peer
    tokenizer: Any
    path: Path

    def decode(self, job: Job) -> PeerOutput:
        output = self.peer.decode(job)
        text = self.tokenizer.decode(output.tokens, skip_special_tokens=True)
        line = {"peer": self.name, "key": job.key, "decoded": output.decoded, "seconds": output.decode_seconds}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | {"output": text}) + "\n")
        return output


class Engines(Peers):
    """Peers named ENGINE_MODE, as `llama_draft`, or ENGINE_PRECISION_MODE where the precision is not f32; and
    `generate`, `assisted` and `prompt_lookup` of transformers."""

    loads_models = True

    @dataclass
    class Settings(BaseSettings):
        engines: list[str] = setting(required="a list of engines, as [llama,llama:q8_0,transformers]")
        folder: str = setting(required="the folder of environments and converted models")
        texts: str = setting(required="the file to which texts are written")
        models: list[str] | None = setting(default=None)  # folders of target and drafter; null: the shipped pair's

    def __init__(self, peers: Mapping[str, Peer]):
        self.peers = peers

    @classmethod
    def refuses(cls, settings: Any, run: Selections) -> str | None:
        return None if run.batch_size == 1 else "with batches: choose batch_size=1"

    @classmethod
    def from_settings(
        cls, settings: Any, context: Context, target: LanguageModel, drafter: LanguageModel | None, gamma: int
    ) -> "Engines":
        sampling = context.sampling
        if sampling.top_k or sampling.top_p < 1 or sampling.repetition_penalty != 1:
            raise ConfigError("top_k, top_p and repetition_penalty are not possible with other engines")
        path = Path(settings.texts)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        found: dict[str, Peer] = {}
        for engine in settings.engines:
            if engine == TRANSFORMERS:
                found |= TransformersPeers.from_settings(None, context, target, drafter, gamma).by_name()
            else:
                stop = list(target.stop_tokens)
                models = [Path(model) for model in settings.models or PAIR]
                longest = min(LONGEST, getattr(target.config, "max_position_embeddings", LONGEST))
                started = partial(start, folder=Path(settings.folder), gamma=gamma, models=models, context=longest)
                found |= modes(engine, started, float(sampling.temperature), stop, path)
        return cls({name: Recorded(name, peer, target.tokenizer, path) for name, peer in found.items()})

    def by_name(self) -> Mapping[str, Peer]:
        return self.peers


def modes(
    engine: str, started: Callable[..., Worker], temperature: float, stop: list[int], texts: Path
) -> Iterator[tuple[str, Peer]]:
    """The ways of decoding of an engine that work, by name; of the others a sentence says why they are left out.
    `started` is `start` but for the engine's name and its precision."""
    name, _, precision = engine.partition(":")
    precision = precision or "f32"
    try:
        worker = started(name, precision=precision)
    except (OSError, RuntimeError) as error:
        log.warning("left out: %s", error)
        return
    with texts.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"engine": engine, "version": worker.version}) + "\n")
    for mode in worker.modes:
        peer = WorkerMode(worker, mode, temperature, stop)
        try:
            peer.decode(Job(range(1, TRIED), 2 * TRIED, 0))
        except RuntimeError as error:
            log.warning("left out: %s of %s", mode, error)
        else:
            yield "_".join([name, *([precision] if precision != "f32" else []), mode]), peer


def start(
    name: str, folder: Path, precision: str, gamma: int, models: Sequence[Path] = PAIR, context: int = LONGEST
) -> Worker:
    """The worker of an engine, for the checkpoints of a target and, if there are two, of a drafter, and for texts of so
    many tokens. Raises RuntimeError."""
    folder = folder.resolve()
    own = folder / "envs" / name / "bin" / "python"
    python = own if own.exists() else Path(sys.executable)  # llama.cpp's needs nothing but the standard library
    threads = torch.get_num_threads()
    options: dict[str, Any] = {"folder": folder, "precision": precision, "gamma": gamma, "threads": threads,
                               "context": context}  # fmt: skip
    for role, model in zip(("target", "drafter"), models, strict=False):
        options |= {role: model, f"{role}-name": name_of(model)}
    command = [str(python), str(HERE / f"worker_{name}.py")]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    environment = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    return Worker(f"{name} in {precision}", command, folder / "logs" / f"worker-{name}-{precision}.log", environment)
