"""Compiled functions: one for each set of shapes and constants, any number of columns, and nothing stale is used."""

from dataclasses import dataclass

import pytest
import torch
from small_runs import parts_of, run
from torch import Tensor

from specbench.executors import compiled
from specbench.executors.compiled import CompiledExecutor
from specbench.executors.pytree import Columns
from specbench.run.session import Session


@dataclass(frozen=True)
class Pair:
    """An argument with tensors, and a constant."""

    x: Tensor
    times: int


def sums(pair: Pair, visible: int) -> Tensor:
    return (pair.x[:, :visible] * pair.times).sum(1) + visible


def test_columns_are_free_and_shapes_and_constants_are_not(traced):
    executor, x = CompiledExecutor(), torch.arange(40.0).view(2, 20)
    function = executor.compiled(sums)
    for visible in (16, 5, 20, 2):
        assert torch.equal(function(Pair(x, 3), Columns(visible)), sums(Pair(x, 3), visible))
    assert len(traced) == 1
    for other in (Pair(x, 4), Pair(x[:1], 3), Pair(x.double(), 3), Pair(x.T.contiguous().T, 3)):
        assert torch.equal(function(other, Columns(7)), sums(other, 7))
    assert len(traced) == 5
    assert executor.compiled(sums) is function


def test_functions_that_share_their_code_are_compiled_apart(traced):
    def plus(number):
        return lambda x: x + number

    executor = CompiledExecutor()
    found = [executor.compiled(plus(number)) for number in (1, 2)]
    assert [function(torch.zeros(2)).tolist() for function in found] == [[1, 1], [2, 2]] and len(traced) == 2


def test_what_cannot_be_compiled_runs_as_it_is_written_and_is_told(monkeypatch):
    def no_compiler(*given):
        raise RuntimeError("no C compiler") from FileNotFoundError("Python.h")

    monkeypatch.setattr(compiled, "compiled_for", no_compiler)
    executor = CompiledExecutor()
    for _ in range(2):
        assert executor.compiled(torch.neg)(torch.ones(2)).tolist() == [-1, -1]
    [note] = executor.notes()
    assert "no C compiler" in note and "Python.h" in note


def compiled_by(parts) -> int:
    """How many functions the executor of a run has compiled, if none failed."""
    assert not parts.target.executor.notes()
    return sum(len(function.compiled) for function in parts.target.executor.functions.values())


def test_every_shape_is_compiled_before_anything_is_timed(traced, monkeypatch, tmp_path):
    parts = parts_of("executor=compiled", "gamma=2", "data.limit=2", "max_new_tokens=6", "temperature=0")
    met, plain = [], Session.decode

    def decode(self, *others, **options):
        found = plain(self, *others, **options)
        met.extend([len(traced)] if self.parts.target.executor.warm else [])
        return found

    monkeypatch.setattr(Session, "decode", decode)
    results, _ = run(parts, tmp_path)
    assert results.lossless.passed and compiled_by(parts) >= len(traced) > 3 and {*met} == {len(traced)}


@pytest.mark.slow
def test_inductor_compiles_a_whole_run(tmp_path):
    parts = parts_of("executor=compiled", "gamma=2", "data.limit=2", "max_new_tokens=6")
    assert run(parts, tmp_path)[0].lossless.passed is not False and compiled_by(parts) > 3
