"""Programs of TorchInductor inside of CUDA graphs, and products that several layers share.

The kernels of a program on CUDA are counted from the code that Inductor writes, which takes no GPU
(`inductor_kernels.py`). That a graph of programs decodes the same tokens is tested on a model of graphs.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from choosing import slow_unless
from decoder_cases import TREES
from graph_memory import SimulatedGraphs
from queue_cases import decode, jobs
from small_runs import parts_of
from torch import nn
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._guards import TracingContext, detect_fake_mode, tracing
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from specbench.cache.static import StaticCache
from specbench.decoding import verify_tree
from specbench.decoding.sampling import Sampling
from specbench.decoding.sequence import Sequence
from specbench.decoding.state import State
from specbench.executors import compiled_function as leaf_module
from specbench.executors import packed_linear
from specbench.executors.compile_cache import Programs
from specbench.executors.compiled_function import Leaf
from specbench.executors.cudagraph import stand_ins
from specbench.executors.eager import EagerExecutor
from specbench.executors.fused_norm import FusedNorm, computes_rms_norm
from specbench.executors.packed_linear import SharedLinear, packed
from specbench.models.language_model import LanguageModel
from specbench.run.run import run
from specbench.stats.reference_distribution import largest_tv

MOST_KERNELS = {"score": 10, "step": 9, "kernel": 9, "kernel step": 8, "int4": 9}  # of one layer, by leaf
OF_TWO = ("specbench.softmax", "specbench.race")  # operators that launch two kernels


@cache
def kernels_of(shape: str) -> dict[str, dict[str, list[str]]]:
    """The calls of each program, by leaf and number of layers."""
    return json_of(shape)


def json_of(*words: str):
    """What inductor_kernels.py prints."""
    pytest.importorskip("triton")
    if torch.__version__ < (2, 13):
        pytest.skip("what answers for the device is written for Inductor of torch 2.13")
    script = Path(__file__).parents[1] / "inductor_kernels.py"
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, script, *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def kernels() -> dict[str, dict[str, list[str]]]:
    return kernels_of("1b")


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "leaf"), [
    *(("1b", leaf) for leaf in MOST_KERNELS),
    *((shape, leaf) for shape in ("3b", "8b", "70b") for leaf in ("kernel", "kernel step")),
])  # fmt: skip
def test_a_layer_is_few_kernels(shape, leaf):
    two, three = (kernels_of(shape)[leaf][layers] for layers in "23")
    print(*two, sep="\n")
    assert len(three) - len(two) <= MOST_KERNELS[leaf]


@pytest.mark.slow
def test_a_round_is_few_kernels(kernels):
    """Four steps of 16 layers and a target's call of 28, as Llama 1B drafts for 3B."""

    def nodes(leaf: str, layers: int) -> int:
        two, three = (sum(1 + any(name in call for name in OF_TWO) for call in kernels[leaf][n]) for n in "23")
        return two + (layers - 2) * (three - two)

    print(nodes("kernel step", 16), nodes("kernel", 28))
    assert 4 * nodes("kernel step", 16) + nodes("kernel", 28) <= 830  # and some 10 for the verdict


@pytest.mark.slow
def test_a_layer_with_the_kernel_makes_no_constant_anew(kernels):
    found = [sum("stored" in call for call in kernels["kernel"][layers]) for layers in ("2", "3")]
    assert found == [2, 2]


@pytest.mark.slow
def test_keys_and_values_are_written_where_they_stay(kernels):
    """A program that wrote into a copy of the cache would have a kernel that copies it back."""
    for layers in ("2", "3"):  # rotations and writes of a layer are one kernel
        assert sum("triton_for_fused" in call for call in kernels["kernel"][layers]) == int(layers) + 1
    assert not any("fused_copy_" in call for of in kernels.values() for calls in of.values() for call in calls)


@pytest.mark.slow
def test_a_program_of_one_layer_is_few_kernels(kernels):
    """Of several tokens one more than a layer of a program of all: the sum at its end is written before the norm of the
    next layer reads it."""
    assert len(kernels["layer"]["1"]) <= 10 and len(kernels["layer step"]["1"]) <= 8


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["1b", "3b", "8b", "70b"])
def test_no_kernel_of_a_layer_that_inductor_writes_spills(shape):
    found = json_of(shape, "cubins")
    assert {capability for _, capability, *_ in found} == {80, 90} and len(found) >= 20
    for name, capability, registers, stack, shared in found:
        print(name, capability, registers, stack, shared)
        assert stack == 0 and registers <= 128 and shared <= 99 * 1024


@pytest.mark.slow
def test_layers_that_share_no_product_are_more_kernels(kernels):
    """Negative control: q, k and v, and gate and up, one by one in two layers."""
    assert len(kernels["unpacked"]["2"]) == len(kernels["score"]["2"]) + 2 * 3


# -- Shared products --------------------------------------------------------------------------------


def llama(**changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(num_hidden_layers=2, vocab_size=50, max_position_embeddings=64, **shape, **changes)
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_model_computes_the_same_and_holds_nothing_twice(bias, monkeypatch):
    """In float64, without the norms, which transformers computes in float32."""
    monkeypatch.setattr(packed_linear, "fused_norms", lambda module, dtype: ())
    x = torch.randint(50, (2, 7))
    module = llama(attention_bias=bias, mlp_bias=bias).double()
    for name, weight in module.named_parameters():
        if name.endswith("bias"):  # zero in a new model
            weight.data.normal_()
    expected = module(x).logits
    found = packed(module)
    assert torch.equal(module(x).logits, expected)  # the module itself is as it was
    torch.testing.assert_close(found(x).logits, expected)
    layer, own = found.model.layers[1], module.model.layers[1]
    assert isinstance(layer.self_attn.q_proj, SharedLinear) and type(own.self_attn.q_proj) is nn.Linear
    own.self_attn.v_proj.weight.data.fill_(1.0)  # negative control: and one memory
    own.mlp.up_proj.weight.data.fill_(1.0)
    assert not torch.allclose(found(x).logits, expected)
    torch.testing.assert_close(found(x).logits, module(x).logits)
    assert sum(p.numel() for p in found.parameters()) == sum(p.numel() for p in llama(
        attention_bias=bias, mlp_bias=bias).parameters())  # fmt: skip


def test_a_packed_model_has_the_configuration_of_its_module_and_is_packed_once():
    module = llama()
    found = packed(module)
    assert found.config is module.config and found.model.layers[0].self_attn.config is module.config
    assert packed(found) is found


def test_norms_that_are_pytorchs_own_become_one_kernel_and_others_stay():
    """Of bfloat16: PyTorch's rounds once, that of transformers twice."""
    module = llama().bfloat16()
    for name, weight in module.named_parameters():
        if "norm" in name:  # ones in a new model
            weight.data.uniform_(0.5, 2)
    found = packed(module)
    ours = {name: norm for name, norm in found.named_modules() if isinstance(norm, FusedNorm)}
    assert len(ours) == 2 * 2 + 1 and not any(isinstance(norm, FusedNorm) for norm in module.modules())
    x = torch.randn(3, 32).bfloat16()
    for name, norm in ours.items():
        theirs = module.get_submodule(name)
        assert norm.weight is theirs.weight
        torch.testing.assert_close(norm(x), theirs(x), rtol=2 * torch.finfo(x.dtype).eps, atol=0)
    assert not computes_rms_norm(Gemma3RMSNorm, 1e-6)  # negative controls
    assert not computes_rms_norm(nn.LayerNorm, 1e-6) and not computes_rms_norm(nn.Linear, 1e-6)


def test_a_deep_packed_model_in_16_bits_is_within_what_rounding_explains():
    """As deep as the 3B shape, with logits as far apart as those of trained models."""
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=28, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=500, initializer_range=0.05)  # fmt: skip
    module = LlamaForCausalLM(config).eval().bfloat16()
    module.lm_head.weight.data.mul_(5)
    for name, weight in module.named_parameters():
        if "norm" in name:
            weight.data.uniform_(0.5, 2)
    text = torch.randint(500, (1, 300))
    with torch.no_grad():
        theirs, ours = (made(text).logits[0].float() for made in (module, packed(module)))
    tv = (theirs.softmax(-1) - ours.softmax(-1)).abs().sum(-1) / 2
    share = tv / largest_tv(theirs, torch.bfloat16, Sampling())
    assert theirs.std() > 2 and share.mean() > 0.01 and share.max() < 1, (share.mean(), share.max())


def test_layers_of_different_inputs_are_not_packed():
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(4, 3), nn.Linear(5, 3)

    module = Other()
    assert packed(module) is module


# -- Programs inside of graphs ----------------------------------------------------------------------


@pytest.mark.parametrize(("cache", "temperature"), [slow_unless(False, "static", 1), ("paged", 0)])
def test_graphs_of_programs_change_no_token(cache, temperature, tables, traced):
    options = {"cache": cache, "kind": "model", "sampling": Sampling(temperature=temperature)}
    expected = decode(jobs(), 3, tables, **options)
    executor = SimulatedGraphs(Programs(None))
    assert decode(jobs(), 3, tables, executor=executor, **options) == expected
    names = sorted(f.function.__name__ if isinstance(f, Leaf) else f.__name__ for f in executor.functions)
    assert names == ["_draft", "_score_draft", "accept_and_commit"]  # a phase is one graph
    assert "_step" in {f.__name__ for f in executor.leaves}  # of programs
    assert executor.programs.made == len(traced) > 0 and executor.replays > executor.graphs > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", TREES[:1])
def test_graphs_of_programs_change_no_token_of_trees(kind, tables, traced, monkeypatch):
    expected = decode(jobs(2), 2, tables, kind=kind, gamma=2)
    monkeypatch.setattr(verify_tree, "nobody", lambda mask: False)  # as on a GPU
    executor = SimulatedGraphs(Programs(None))
    assert decode(jobs(2), 2, tables, kind=kind, gamma=2, executor=executor) == expected
    assert len(traced) > 0


@pytest.mark.slow
def test_a_run_on_graphs_of_programs_is_lossless(traced, tmp_path):
    """With shared products, and the record of each round. Every program is there before anything is timed."""
    graphs = ("executor=cudagraph", "executor._target_=graph_memory.Rerun")
    parts = parts_of(*graphs, "gamma=1", "temperature=0", "data.limit=1", "max_new_tokens=4")
    result, _ = run(parts, tmp_path)
    assert any(isinstance(layer, SharedLinear) for layer in parts.target.module.modules())
    assert result.lossless.passed and result.counts.failed == 0
    assert result.executor["captures_after_warm_up"] == 0 and result.executor["programs"]["made"] == len(traced) > 3


def functional(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
    """The program as Inductor is given it: without operations in place, which are done at its end."""
    mode = detect_fake_mode([node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"])
    with tracing(TracingContext(mode)):
        compiled = aot_module_simplified(graph, inputs, fw_compiler=lambda made, _: make_boxed_func(made.forward))
    return lambda *given: compiled(*given)


def run_on_stand_ins_and_then_on_the_cache() -> None:
    """Fails if the program, made on stand-ins, computes something else than its function on the cache."""
    model = LanguageModel(llama(), None, name="", sampling=Sampling(), new_cache=StaticCache, executor=EagerExecutor())
    state = State.start([Sequence([3, 1, 4, 1, 5], 12, 7)], [], 4, torch.device("cpu"))
    model.allocate(1, 16)
    model.prefill(state)
    call = (state.rows, torch.tensor([[9, 2, 6]]), 16, (1, 1, 1), None, None)
    leaf = Leaf(model._score_draft, model, Programs(None), compiles=True)
    with stand_ins([model]):
        leaf(*call)
    found, *_ = leaf(*call)
    stored = [t.clone() for t in model.cache_tensors()]
    expected, *_ = model._score_draft(*call)
    torch.testing.assert_close([found, *stored], [expected, *model.cache_tensors()])


@pytest.mark.slow  # test_graphs_of_programs_change_no_token makes programs on stand-ins
def test_a_program_that_was_made_on_stand_ins_is_right_on_the_cache(monkeypatch):
    """The calls before a capture use one tensor for the caches of all layers. The part of the compiler that looks at
    which tensors are one runs here, and no code is generated."""
    monkeypatch.setattr(torch._inductor, "standalone_compile", functional)
    run_on_stand_ins_and_then_on_the_cache()
    monkeypatch.setattr(leaf_module, "apart", lambda tensors: tensors)  # negative control: traced with one tensor
    with pytest.raises(AssertionError):
        run_on_stand_ins_and_then_on_the_cache()
