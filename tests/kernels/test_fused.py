"""Llama-like layers by kernels, against the modules of transformers and to the bit against themselves.

Without a GPU they run in Triton's interpreter.
"""

from types import SimpleNamespace

import llama_layers
import pytest
import torch
from decoder_cases import CACHES
from llama_layers import CHAIN, PARENTS, TEXT, error, error_of_hidden_states, read
from small_runs import parts_of, run

pytest.importorskip("triton")

from triton import knobs

from specbench.decoding.sequence import Sequence
from specbench.errors import ConfigError
from specbench.executors.compiled import CompiledExecutor
from specbench.executors.eager import EagerExecutor
from specbench.kernels import attention, fused
from specbench.models import reference_forward
from specbench.models.language_model import LanguageModel
from specbench.models.triton_step import TritonStep
from specbench.run.session import Session

DEVICE = "cpu" if knobs.runtime.interpret else "cuda"
pytestmark = pytest.mark.cuda


def tiny(*given, **more):
    return llama_layers.tiny(*given, **more).to(DEVICE)


def model_of(module, how: str = "triton", **more):
    return llama_layers.model_of(module, how, **more)


@pytest.mark.parametrize(("kind", "cache"), [
    ("llama", "static"), ("llama", "paged"), ("qwen2", "paged"), ("qwen3", "static"), ("qwen3", "paged"),
    ("mistral", "paged"), ("gemma", "dynamic"),
])  # fmt: skip
def test_the_fused_step_is_the_module(kind, cache):
    if kind == "gemma":  # its own activation and norm, but it scales its embeddings
        with pytest.raises(ConfigError, match="attention=triton is not possible for tiny: it has "):
            model_of(tiny(kind, head_dim=16))
        kind = "llama"
    assert error(tiny(kind), "triton", cache) < 1e-5


# -- Faults -----------------------------------------------------------------------------------------


def with_places(change):
    """`project` with other places."""
    project = fused.project
    return lambda stream, heads, places, *others: project(stream, heads, change(places), *others)


def a_slot_too_far(places):
    """And with the positions of the right ones."""
    return places._replace(first=places.first + 1, angles=tuple(t.roll(1, 0) for t in places.angles))


def a_position_too_far(places):
    """Of single tokens only: what is turned like all others is not seen."""
    return places._replace(angles=tuple(t.roll(-1, 0) for t in places.angles)) if places.shape[1] == 1 else places


def a_depth_too_far(places):
    """Of the nodes of a tree but for the root, which are turned by one position more."""
    return places if places.depth is None else places._replace(depth=places.depth + (places.depth > 0))


def without(x, weight, bias, stream, gain, add=fused.add):
    """No residual."""
    return add(x, weight, bias, fused.Stream(torch.zeros_like(stream.x), *stream[1:]), gain)


FAULTS = {
    "slot": ("project", lambda: with_places(a_slot_too_far)),
    "position": ("project", lambda: with_places(a_position_too_far)),
    "eps": ("gate", lambda: lambda *given, gate=fused.gate: gate(*given[:3], 1e-6, given[4])),
    "residual": ("add", lambda: without),
    "activation": ("gate", lambda: lambda *given, gate=fused.gate: gate(*given[:4], fused.GELU)),
}


def test_a_wrong_depth_in_a_tree_is_seen(monkeypatch):
    """Negative control: it shows in trees alone, which the model then does not read."""
    module = tiny("llama", 1)
    model = model_of(module)
    monkeypatch.setattr(fused, "project", with_places(a_depth_too_far))
    assert (
        error(module, "triton") > 1e-3 and not reference_forward.reads_trees(model, "tiny") and model.fused is not None
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault, monkeypatch):
    """Negative controls: also what is tried with every loaded model sees them."""
    module, (name, make) = tiny("llama", 1), FAULTS[fault]
    model = model_of(module)
    assert reference_forward.reads_trees(model, "tiny") and model.fused is not None
    monkeypatch.setattr(fused, name, make())
    assert error(module, "triton") > 1e-3
    model.attention = "auto"
    assert reference_forward.reads_trees(model, "tiny") and model.fused is None


# -- To the bit -------------------------------------------------------------------------------------


def behind(model, first, groups, row=0):
    """Logits of the tokens of one row that follow its text, read in groups of so many."""
    found, begin = [], first
    for count in groups:
        tokens = [TEXT[begin : begin + count]]
        found.append(read(model, tokens, [begin]))
        begin += count
    return torch.cat(found, 1)[0]


@pytest.fixture
def parts(monkeypatch):
    """Texts of several splits."""
    monkeypatch.setattr(attention, "PART", 16)
    monkeypatch.setattr(attention, "tile_shape", lambda *given: (16, 4))


@pytest.mark.parametrize(("kind", "dtype"), [("llama", torch.bfloat16), ("qwen3", torch.float32)])
def test_a_row_is_the_same_to_the_bit_beside_any_others(kind, dtype, parts):
    module = tiny(kind, 1, dtype)
    alone, six, paged = model_of(module), model_of(module), model_of(module, cache="paged")
    for model in (alone, six, paged):
        read(model, [TEXT[:4] * 5], [0])
    one = torch.cat([read(alone, [[TEXT[i]]], [20 + i]) for i in range(6)], 1)
    assert read(six, [TEXT[:6]], [20]).equal(one) and read(paged, [TEXT[:6]], [20]).equal(one)
    assert read(alone, [TEXT[:6] + TEXT[:10]], [20])[:, :6].equal(one)  # 16 tokens; what they write is the same again
    stored = [[t[0, :, :26].cpu() for t in model.cache.tensors()] for model in (alone, six)]
    assert all(a.equal(b) for a, b in zip(*stored, strict=True))
    for cache in ("static", "paged"):
        both = model_of(module, cache=cache, rows=2)
        read(both, [TEXT[:4] * 5, TEXT[2:6] * 5], [0, -7])
        assert read(both, [TEXT[:6], TEXT[6:12]], [20, 13])[:1].equal(one)


@pytest.mark.parametrize("parents", [PARENTS, CHAIN])
def test_a_tree_is_the_same_to_the_bit_padded_or_beside_others(parents, parts):
    """More nodes behind its own, other rows and other caches change no bit; a chain as a tree is the chain."""
    module, nodes = tiny("qwen3", 1, torch.bfloat16), TEXT[:6]
    alone = model_of(module)
    read(alone, [TEXT[:4] * 5], [0])
    right = read(alone, [nodes], [20], parents)
    assert read(alone, [nodes + TEXT[6:12]], [20], (*parents, 5, 5, 5, 6, 6, 7))[:, :6].equal(right)
    assert read(alone, [nodes], [20]).equal(right) == (parents == CHAIN)
    for cache in ("static", "paged"):
        both = model_of(module, cache=cache, rows=2)
        read(both, [TEXT[:4] * 5, TEXT[2:6] * 5], [0, -7])
        assert read(both, [nodes, TEXT[6:12]], [20, 13], parents)[:1].equal(right)


@pytest.mark.parametrize("parents", [None, PARENTS])
def test_an_order_of_sums_that_depends_on_the_rows_is_seen(parents, monkeypatch):
    """Negative control."""
    module, inputs = tiny("llama", hidden_size=64), fused.inputs_of_tile
    model = model_of(module)
    read(model, [TEXT[:4]], [0])
    one = read(model, [TEXT[4:5]], [4])
    assert read(model, [TEXT[4:10]], [4], parents)[:, :1].equal(one)
    monkeypatch.setattr(fused, "inputs_of_tile", lambda *given: inputs(*given) // 2)
    assert not read(model, [TEXT[4:10]], [4], parents)[:, :1].equal(one)


# -- Which modules ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["phi3", "olmo2", "glm", "cohere", "gpt_neox", "granite", "smollm3", "ministral3"])
def test_other_modules_run_as_they_are_written(kind):
    """Some are seen by their parts, others, whose parts are Llama's, by what they compute."""
    more = {"smollm3": {"no_rope_layers": [1, 0]}, "granite": {"residual_multiplier": 0.5}, "glm": {"head_dim": 16}}
    module = tiny(kind, **more.get(kind, {}))
    with pytest.raises(ConfigError, match="attention=triton is not possible for tiny: "):
        reference_forward.reads_trees(llama_layers.made(module, "triton", CACHES["static"]), "tiny")


def test_compiled_functions_and_attention_sdpa_run_the_module():
    for executor, how in ((CompiledExecutor(), "auto"), (EagerExecutor(), "sdpa")):
        model = llama_layers.made(tiny("llama", 1), how, CACHES["static"], executor)
        assert model.fused is None and not model.batch_invariant(1, 6, SimpleNamespace(trees=False))
    fast = model_of(tiny("llama", 1))
    for rows, trees, shares, same in (
        (1, False, False, True), (10, False, False, True), (11, False, False, False), (1, False, True, False),
        (1, True, False, False),
    ):  # fmt: skip
        fast.cache = SimpleNamespace(shares=shares)
        assert fast.batch_invariant(rows, 6, SimpleNamespace(trees=trees)) == same


@pytest.mark.parametrize("layers", [(), (0, 1, 2)])
def test_hidden_states_are_those_of_the_module(layers):
    assert error_of_hidden_states(tiny("llama"), "triton", layers) < 1e-5


def prompt_bits(batch):
    """Keys and values of two prompts of 10 tokens, read in one batch or one after the other."""
    how = ("attention=triton", "dtype=bfloat16", "temperature=0", f"batch_size={2 if batch else 1}")
    session, found = Session(parts_of("target=bytes", "drafter=ngram", *how)), []
    jobs = [Sequence([3, 4, 5, 6, 7] * 2, 11, 7), Sequence([9, 8] * 5, 11, 8)]
    for own in [jobs] if batch else [[job] for job in jobs]:
        session.decode(own, False, 16)
        tensors = session.parts.target.cache_tensors()
        found += [[t[row, :, :9].clone() for t in tensors] for row in range(len(own))]
    return found


@pytest.mark.slow
def test_prompts_of_a_batch_are_read_as_alone(monkeypatch):
    """Each is short enough for kernels, and both together are not."""

    def same(found):
        return [all(a.equal(b) for a, b in zip(*pair, strict=True)) for pair in zip(found, expected, strict=True)]

    monkeypatch.setattr(TritonStep, "most_rows", 16)
    expected = prompt_bits(batch=False)
    assert same(prompt_bits(batch=True)) == [True, True]
    monkeypatch.setattr(LanguageModel, "reads_alone", lambda self, rows: False)
    assert same(prompt_bits(batch=True)) == [False, False]  # negative control


@pytest.mark.slow
def test_a_run_at_temperature_0_is_batch_invariant_and_its_texts_are_equal(tmp_path):
    """In bfloat16, where other orders of sums would turn ties; the verdict then excuses none."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def f"}\n{"prompt": "x"}\n{"prompt": "import os\\n"}')
    small = ("max_new_tokens=8", "gamma=2", "batch_size=2", "prefill_chunk=4")
    data = ("data=jsonl", f"data.path={tmp_path / 'prompts.jsonl'}", *small)
    parts = parts_of("target=bytes", "drafter=bytes", "attention=triton", "dtype=bfloat16", "temperature=0", *data)
    results, records = run(parts, tmp_path)
    assert parts.target.fused is not None and results.details.batch_invariant and results.lossless.passed
    assert all(record.speculative.ids == record.baseline.ids for record in records)
