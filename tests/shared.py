"""Fixtures that several folders use, and what is installed in every process that runs tests."""

import gc
import os
from pathlib import Path
from types import SimpleNamespace

import composing
import interpreted
import pytest
import torch

if not torch.cuda.is_available():  # before Triton is imported: its kernels run in an interpreter on the CPU
    os.environ.setdefault("TRITON_INTERPRET", "1")
    interpreted.look_once()

import loading
from checkpoints import checkpoint
from decoder_cases import V
from tabular import by_class, random_table

from specbench.run import provenance, session

# What a run decodes besides its prompts is most of a small run: here as little as shows what depends on it.
session.TOKENS, session.SHORT = 1, 1
provenance.CPU_BYTES = 2**20  # nothing depends on how much the machine's probe reads
composing.install()
loading.install()


def pytest_collection_finish() -> None:
    """What all imports have made stays: a collection, which every run begins with, need not look at it."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """At the end of the process all of it goes, or bindings in C++ call it leaked."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_gradients_and_one_seed():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@pytest.fixture
def traced(monkeypatch) -> list[torch.fx.GraphModule]:
    """Functions are traced and not compiled. The list of the graphs that were made."""
    made: list[torch.fx.GraphModule] = []
    compile = torch.compile

    def backend(graph, inputs, **options):
        made.append(graph)
        return graph.forward

    def traced_only(function, **options):
        return compile(function, **options | {"backend": backend})

    monkeypatch.setattr(torch, "compile", traced_only)
    return made


@pytest.fixture(scope="session")
def good(tmp_path_factory) -> Path:
    """A whole checkpoint of a tiny model."""
    return checkpoint(tmp_path_factory.mktemp("good"))


@pytest.fixture(scope="session")
def number_text(tmp_path_factory) -> str:
    """A text of numbers for the count models."""
    generator = torch.Generator().manual_seed(5)
    numbers = torch.randint(V, (4000,), generator=generator).tolist()
    path = tmp_path_factory.mktemp("text") / "numbers.txt"
    path.write_text(" ".join(map(str, numbers)))
    return str(path)


@pytest.fixture(scope="session")
def tables() -> SimpleNamespace:
    """A target law and an adversarial drafter: its logits are the target's, negated."""
    table = random_table(V, seed=1)
    return SimpleNamespace(target=table, adversarial=-table, similar=table + random_table(V, seed=2, spread=0.5))


@pytest.fixture(scope="session")
def few_contexts() -> SimpleNamespace:
    """A chain with nine different laws: each is met often, so that a small error of any of them is seen. Drafters: one
    that is often right, one with all laws turned around, and one with the same law everywhere."""
    table, other = (by_class(random_table(V, seed, spread)) for seed, spread in ((1, 1.5), (2, 1.2)))
    constant = random_table(V, seed=7, spread=1.0)[:1, :1].expand(V, V, V).clone()
    return SimpleNamespace(target=table, adversarial=-table, similar=table + other, constant=constant)
