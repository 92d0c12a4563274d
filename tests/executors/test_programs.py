"""Where shapes are fixed, every program is there before anything is timed."""

import json
import os
import pickle

import pytest
import torch
from checkpoints import Harmful
from choosing import slow_unless
from small_runs import parts_of
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

import specbench.executors.auto
from specbench.decoding.component import CodeIdentity
from specbench.decoding.draft import Draft
from specbench.executors.auto import CompiledExecutor
from specbench.executors.compile_cache import Programs
from specbench.executors.pytree import COLUMNS, TENSOR, Columns, flatten_arguments, rebuild
from specbench.run.interleave import InterleavedGroup
from specbench.run.run import run


@pytest.mark.slow  # tests/decoding/test_equivalence.py compiles too
def test_compiled_programs_are_few_and_all_there_before_anything_is_timed(monkeypatch, tmp_path):
    parts = parts_of("executor=compiled", "temperature=0")
    counts, plain = [], InterleavedGroup.decode_all_ways

    def decode_all_ways(*args, **kwargs):
        counts.append(sum(len(leaf.programs) for leaf in parts.target.executor.leaves.values()))
        return plain(*args, **kwargs)

    monkeypatch.setattr(InterleavedGroup, "decode_all_ways", decode_all_ways)
    result, _ = run(parts, tmp_path)
    assert result.lossless.passed
    # In one bucket p of 1 and 5 tokens and a whole draft; verdicts and records, with and without a draft.
    assert counts == [7, 7] and sum(len(leaf.programs) for leaf in parts.target.executor.leaves.values()) == 7


@pytest.fixture(scope="module")
def growing_texts(tmp_path_factory) -> str:
    """Prompts whose texts end in different numbers of columns."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    prompts = ["x = 1\n" * lines + "def f(a):" for lines in (26, 28, 29)]
    path.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    return str(path)


@pytest.mark.parametrize("folder", [None, "/of/the/user"])
def test_what_programs_load_is_kept_with_them_unless_the_user_says_where(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", folder or default_cache_dir())
    Programs.stored(CodeIdentity("a run", "a machine"))
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == (folder or str(tmp_path / "inductor"))


@pytest.mark.parametrize("mode", [0o700, 0o720, 0o702])
def test_programs_that_others_could_have_written_do_not_run(mode, tmp_path):
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs").chmod(mode)
    (tmp_path / "programs" / "a.result").write_bytes(pickle.dumps(Harmful(tmp_path / "sprung")))
    assert Programs(None).find("a", tmp_path / "programs") is None
    assert (tmp_path / "sprung").exists() == (mode == 0o700)


class CountsShapes(CompiledExecutor):
    """Compiles nothing, but notes each set of shapes and constants that would need a program."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.keys, self.late, self.measuring, self.visible = set(), [], False, set()

    def load(self, module, exact=True):
        return module

    def columns(self, needed, capacity=None):
        found = super().columns(needed, capacity)
        if self.measuring and capacity is not None:
            self.visible.add(found)
        return found

    def leaf(self, function, model=None):
        def call(*arguments):
            spec, tensors = flatten_arguments(arguments)
            shapes = [None if isinstance(t, Columns) else (t.shape, t.stride(), t.dtype) for t in tensors]
            key = (function, spec, *shapes)
            if key not in self.keys and self.measuring:
                self.late.append(key)
            self.keys.add(key)
            return function(*arguments)

        return call


@pytest.mark.parametrize("overrides", [
    ("gamma=3",),
    *(slow_unless(False, more) for more in (
        ("gamma=4", "drafter=tree"), ("gamma=3", "drafter=medusa"),
        ("gamma_policy=adaptive", "gamma_policy.largest=4"),
        ("gamma_policy=entropy", "gamma_policy.largest=4", "batch_size=2"),
        ("gamma_policy=heuristic", "gamma=2", "gamma_policy.largest=4", "temperature=0"),
        ("lenience_policy=load", "lenience_policy.levels=[1,.5]", "lenience_policy.step=1", "workload=poisson",
         "workload.rate=1000", "batch_size=2"))),
])  # fmt: skip
def test_every_shape_is_met_before_anything_is_timed(overrides, growing_texts, monkeypatch, tmp_path):
    monkeypatch.setattr(specbench.executors.auto, "CompiledExecutor", CountsShapes)
    parts = parts_of("executor=compiled", "data.limit=3", f"data.path={growing_texts}", "data=jsonl", *overrides)
    executor = parts.target.executor
    plain = InterleavedGroup.decode_all_ways

    def measured(*arguments, **options):
        executor.measuring = True
        try:
            return plain(*arguments, **options)
        finally:
            executor.measuring = False

    monkeypatch.setattr(InterleavedGroup, "decode_all_ways", measured)
    result, _ = run(parts, tmp_path)
    assert result.counts.failed == 0 and executor.keys
    assert len(executor.visible) > 1  # a program serves any number of columns
    assert not executor.late, executor.late[:3]


def test_arguments_are_told_apart_by_their_constants_and_rebuilt():
    draft, weight, one = Draft.chain(torch.zeros(1, 4).long(), None, torch.tensor([4])), torch.ones(2), torch.ones(1)

    def described(columns, constant):
        return flatten_arguments((draft, torch.nn.Parameter(weight), Columns(columns), constant, (1, (one,)), Draft))

    spec, tensors = described(5, 3)
    assert len(tensors) == 5 and (spec[1][1], spec[1][2]) == (TENSOR, COLUMNS)
    assert hash(spec) == hash(described(6, 3)[0]) and spec == described(6, 3)[0] and spec != described(5, 4)[0]
    rebuilt = rebuild(spec, [t.tensor() if isinstance(t, Columns) else t for t in tensors])
    assert rebuilt[0].tokens is draft.tokens and rebuilt[0].levels == draft.levels
    assert rebuilt[2:4] == (5, 3) and rebuilt[4][1][0] is one and rebuilt[5] is Draft
