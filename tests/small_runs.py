"""Whole runs that take a second: composed as on the command line, with little models and few tokens."""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file, save_file

import specbench.run.command as command
import specbench.run.run
from specbench.config.build import build
from specbench.config.check import check
from specbench.config.compose import conf_dir
from specbench.data.stdlib import StdlibData
from specbench.run.evaluate import Fields
from specbench.run.jobs import Job
from specbench.run.run import Group, execute
from specbench.run.session import Session
from specbench.settings import SHIPPED


def composed(*overrides: str):
    """The configuration that the command line would compose."""
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("config", overrides=list(overrides), return_hydra_config=True)


def training(*overrides: str):
    """The configuration of a training that the command line would compose."""
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("train", overrides=list(overrides))


@cache
def short_prompts() -> str:
    """A file of 32 prompts of about 50 tokens: reading long ones would be most of a test's time."""
    prompts = StdlibData(StdlibData.Settings(limit=None, count=32, kind="python")).prompts()
    path = Path(tempfile.mkdtemp()) / "short.jsonl"
    lines = (json.dumps({"prompt": "\n".join(prompt.turns[0].splitlines()[-5:])}) for prompt in prompts)
    path.write_text("\n".join(lines))
    return str(path)


@cache
def noisy_drafter() -> str:
    """A folder with the shipped drafter's matrices moved by noise: another model, which it agrees with often."""
    folder = Path(tempfile.mkdtemp()) / "noisy"
    shutil.copytree(SHIPPED / "drafter", folder)
    generator, file = torch.Generator().manual_seed(1), folder / "model.safetensors"
    weights = {name: weight.float() for name, weight in load_file(file).items()}
    for weight in weights.values():
        if weight.dim() > 1:
            weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=generator)
    save_file({name: weight.bfloat16() for name, weight in weights.items()}, file, metadata={"format": "pt"})
    return str(folder)


# Two models of one layer, for runs that ask for no others: the larger target would be most of their time.
LITTLE = {"target.path": "shipped:drafter", "drafter.path": noisy_drafter()}
FOR_ANY_TARGET = ("ngram", "prompt_lookup", "suffix", "bigram", "unigram", "random")


def given_by(overrides: Iterable[str]) -> dict[str, str]:
    """The values that overrides give, by their keys."""
    return dict(override.split("=", 1) for override in overrides if "=" in override)


def little(given: Mapping[str, str]) -> dict[str, str]:
    """More overrides: little models, unless those that are given choose models or need the shipped target."""
    drafter = given.get("drafter", "stdlib")
    if any(key.startswith(("target", "experiment")) for key in given):
        return {}
    if drafter in FOR_ANY_TARGET:
        return {"target.path": LITTLE["target.path"]}
    return LITTLE if drafter in ("stdlib", "tree") and "drafter.path" not in given else {}


def small(*overrides: str) -> list[str]:
    """Overrides of a run that takes a second, on short prompts and little models unless the overrides choose others."""
    given = given_by(overrides)
    wanted = {"device": "cpu", "gamma": "4", "max_new_tokens": "12", "data.limit": "2", **little(given)}
    if given.get("decoding") != "beam":
        wanted["temperature"] = "1"
    if not given.keys() & {"data", "data.kind", "data.count"}:
        wanted |= {"data": "jsonl", "data.path": short_prompts()}
    return [*(f"{key}={value}" for key, value in wanted.items() if key not in given), *overrides]


def parts_of(*overrides: str):
    """The parts of a small run, built."""
    return build(check(composed(*small("logger=none", *overrides))))


MADE = {}  # runs by their overrides


def run(parts, folder):
    """A run with parts that are built: its results, as attributes too, and its records."""
    job = Job(folder, parts.checked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(specbench.run.run, "build", lambda *given: parts)
        [found] = execute([job])
    if isinstance(found, Exception):
        raise found
    return json.loads(json.dumps(found.results), object_hook=Fields), found.records


def finished(*overrides):
    """A run by its overrides, made once in a process: results, records and folder."""
    if overrides not in MADE:
        folder = Path(tempfile.mkdtemp())
        limited = any(override.startswith("data.limit") for override in overrides)
        parts = parts_of("max_new_tokens=24", *([] if limited else ["data.limit=5"]), *overrides)
        MADE[overrides] = (*run(parts, folder), folder)
    return MADE[overrides]


def call(arguments, monkeypatch, folder) -> int:
    """The command in this process, typed in a folder: its exit code."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["specbench", *arguments])
    try:
        command.main()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    return 0


def interrupt_the_second_group(monkeypatch) -> None:
    """A signal while the second group of prompts decodes."""
    plain = Group.by_all_decoders

    def interrupted(self, requests, batch):
        if batch.number == 1:
            raise KeyboardInterrupt
        return plain(self, requests, batch)

    monkeypatch.setattr(Group, "by_all_decoders", interrupted)


def fail_where(monkeypatch, fails) -> None:
    """Speculative decoding, but for warm-up, raises an error of the device where `fails(session, jobs)`."""
    plain = Session.decode

    def decode(self, jobs, speculative, *others, **options):
        if speculative and "policy" not in options and fails(self, jobs):
            raise RuntimeError("out of memory")
        return plain(self, jobs, speculative, *others, **options)

    monkeypatch.setattr(Session, "decode", decode)


def run_main(arguments, monkeypatch, capsys, tmp_path) -> tuple[int, str]:
    """The command in this process: exit code and standard error."""
    return call(arguments, monkeypatch, tmp_path), capsys.readouterr().err
