"""Llama-like layers on a CPU in few operations, against the modules of transformers."""

from types import SimpleNamespace

import pytest
import torch
from decoder_cases import CACHES
from llama_layers import TEXT, error, error_of_hidden_states, made, model_of, read, tiny
from small_runs import parts_of

from specbench.executors.half_linear import joined
from specbench.models import cpu_step, reference_forward
from specbench.models.cpu_step import CpuStep
from specbench.models.fused_step import Norm
from specbench.run.run import unequal


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize(("kind", "cache"), [
    ("llama", "static"), ("qwen2", "paged"), ("qwen3", "dynamic"), ("mistral", "static"),
])  # fmt: skip
def test_the_step_of_a_cpu_is_the_module(kind, cache, bits):
    """Its weights in 16 bits are read as such, by one product for all that have one input."""
    module = tiny(kind).bfloat16().float() if bits == 16 else tiny(kind)
    assert error(module, "auto", cache) < 1e-5
    model = model_of(module, "auto")
    assert {len(parts) for products in model.fused.products for parts in products} == ({1} if bits == 16 else {2, 3})
    if bits == 16:  # joined weights are not stored twice, also if another module shares them
        layer, (whole, _) = model.module.model.layers[0].self_attn, model.fused.products[0]
        assert joined((layer.q_proj, layer.k_proj, layer.v_proj))[0].packed.data_ptr() == whole[0].packed.data_ptr()
        assert layer.v_proj.packed.untyped_storage().data_ptr() == whole[0].packed.data_ptr()


CPU_FAULTS = {
    "rotation": (CpuStep, "_turns", lambda: lambda *given, right=CpuStep._turns: right(*given).abs()),
    "mask": (CpuStep, "_masks", lambda: lambda *given, right=CpuStep._masks: {
        window: torch.zeros_like(mask) for window, mask in right(*given).items()}),
    "eps": (cpu_step, "times", lambda: lambda parts, x, norm=(), times=cpu_step.times: times(
        parts, x, norm and Norm(norm.gain, 1e-6))),
}  # fmt: skip


@pytest.mark.parametrize("fault", CPU_FAULTS)
def test_faults_of_a_cpu_are_seen(fault, monkeypatch):
    """Negative controls: also what is tried with every loaded model sees them."""
    module, (part, name, make) = tiny("llama", 1).bfloat16().float(), CPU_FAULTS[fault]
    model = model_of(module, "auto")
    assert reference_forward.reads_trees(model, "tiny") and model.fused is not None
    monkeypatch.setattr(part, name, make())
    assert error(module, "auto") > 1e-3
    assert reference_forward.reads_trees(model, "tiny") and model.fused is None


@pytest.mark.parametrize("layers", [(), (0, 1, 2)])
def test_hidden_states_are_those_of_the_module(layers):
    assert error_of_hidden_states(tiny("llama"), "auto", layers) < 1e-5


def test_an_early_exit_with_a_trained_head_has_the_logits_of_the_module():
    found = []
    for how in ("auto", "sdpa"):
        parts = parts_of("target.path=shipped:target", "drafter=early_exit", f"attention={how}", "cache=static")
        model = parts.drafter.model
        assert (model.fused is not None) == (how == "auto")
        parts.target.allocate(1, 16)
        model.borrow()
        found.append(read(model, [TEXT[:8]], [0]))
    assert float((found[0] - found[1]).abs().max() / found[1].abs().max()) < 1e-5


@pytest.mark.parametrize("kind", ["granite", "smollm3", "ministral3", "cohere"])
def test_other_modules_run_as_they_are_written(kind):
    """Some are seen by their parts, others, whose parts are Llama's, by what they compute."""
    more = {"smollm3": {"no_rope_layers": [1, 0]}, "granite": {"residual_multiplier": 0.5}}
    model = made(tiny(kind, **more.get(kind, {})), "auto", CACHES["static"])
    reference_forward.reads_trees(model, "tiny")
    assert model.fused is None


def test_models_that_run_in_unequal_ways_are_noted():
    written, stepped = SimpleNamespace(name="small", fused=None), SimpleNamespace(name="large", fused=object())
    assert unequal([stepped]) == unequal([written, written]) == unequal([stepped, stepped]) == []
    assert unequal([stepped, written])[0].startswith("small runs as it is written")


def test_vocabularies_smaller_than_what_is_tried_are_no_reason_not_to_load():
    model = made(tiny("llama", vocab_size=6), "auto", CACHES["static"])
    assert reference_forward.reads_trees(model, "tiny") and model.fused is not None
