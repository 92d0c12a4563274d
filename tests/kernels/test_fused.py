"""Llama-like layers by kernels, and on a CPU in few operations ("auto"), against the modules of transformers; kernels
to the bit against themselves.

Without a GPU they run in Triton's interpreter.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from decoder_cases import CACHES
from small_runs import parts_of, run

pytest.importorskip("triton")

import transformers
from triton import knobs

from specbench.decoding.sampling import Sampling
from specbench.decoding.token_tree import static_tree
from specbench.errors import ConfigError
from specbench.executors.compiled import CompiledExecutor
from specbench.executors.eager import EagerExecutor
from specbench.executors.half_linear import joined
from specbench.kernels import attention, fused
from specbench.models import cpu_step, reference_forward
from specbench.models.cpu_step import CpuStep
from specbench.models.fused_step import Norm
from specbench.models.language_model import LanguageModel

DEVICE = "cpu" if knobs.runtime.interpret else "cuda"
pytestmark = pytest.mark.cuda
PARENTS, CHAIN, COLUMNS = (0, 0, 1, 1, 2), (0, 1, 2, 3, 4), 32
KINDS = {
    "llama": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                                  "high_freq_factor": 4.0, "original_max_position_embeddings": 32}},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]},
    "qwen3": {"head_dim": 16}, "mistral": {"sliding_window": 5},
    "ministral3": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "original_max_position_embeddings": 24, "llama_4_scaling_beta": 0.1}},
}  # fmt: skip


def tiny(kind: str, layers: int = 2, dtype=torch.float32, **more):
    """A tiny module whose norms and biases are no ones and zeros, and whose eps matters."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**{
        "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 70, "max_position_embeddings": 96, "initializer_range": 0.3,
        "rms_norm_eps": 0.1, "pad_token_id": 0, **KINDS.get(kind, {}), **more,
    })  # fmt: skip
    module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for weight in module.parameters():
            if weight.dim() == 1:
                weight.uniform_(0.5, 1.5)
    return module.to(DEVICE, dtype)


def model_of(module, how: str = "triton", cache: str = "static", rows: int = 1, columns: int = COLUMNS):
    model = LanguageModel(copy.deepcopy(module), None, name="tiny", sampling=Sampling(), new_cache=CACHES[cache],
                          executor=EagerExecutor(), attention=how)  # fmt: skip
    assert (model.fused is not None) == (how != "sdpa")
    model.allocate(rows, columns)
    model.cache.reserve([columns] * rows)
    return model


@torch.no_grad()
def read(model, tokens, first, parents=None):
    """Logits after tokens [b, N] from the columns first on, on the CPU."""
    tree = None if parents is None else static_tree(parents, torch.device(DEVICE))
    tokens, first = torch.tensor(tokens, device=DEVICE), torch.tensor(first, device=DEVICE)
    return model.forward(tokens, first, model.cache.capacity, tree=tree).cpu()


TEXT = [5, 9, 2, 7, 11, 30, 8, 1, 64, 3, 3, 17, 20, 41]


def forwards(model):
    """Logits of two rows of unequal lengths: a text, a token, a chain and a tree; and what is cached then."""
    found = [read(model, [TEXT[:8], TEXT[3:11]], [0, -3])]
    found.append(read(model, [[12], [13]], [8, 5]))
    found.append(read(model, [TEXT[:6], TEXT[5:11]], [9, 6]))
    found.append(read(model, [[1, 2, 3, 4, 5, 6]] * 2, [12, 9], PARENTS))
    return found + [t[:, :, :9].cpu() for t in model.cache.tensors() if t.dim() == 4]


def error(module, cache="static", how="triton") -> float:
    """The largest difference from SDPA in the module itself, as a share of the largest value."""
    found, right = forwards(model_of(module, how, cache, 2)), forwards(model_of(module, "sdpa", cache, 2))
    assert len(found) == len(right) >= 4
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, right, strict=True))


@pytest.mark.parametrize(("kind", "cache"), [
    ("llama", "static"), ("llama", "paged"), ("qwen2", "paged"), ("qwen3", "static"), ("qwen3", "paged"),
    ("mistral", "paged"), ("gemma", "dynamic"),
])  # fmt: skip
def test_the_fused_step_is_the_module(kind, cache):
    if kind == "gemma":  # its own activation and norm, but it scales its embeddings
        with pytest.raises(ConfigError, match="attention=triton is not possible for tiny: it has "):
            model_of(tiny(kind, head_dim=16))
        kind = "llama"
    assert error(tiny(kind), cache) < 1e-5


on_a_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="runs on a CPU")


@on_a_cpu
@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize(("kind", "cache"), [
    ("llama", "static"), ("qwen2", "paged"), ("qwen3", "dynamic"), ("mistral", "static"),
])  # fmt: skip
def test_the_step_of_a_cpu_is_the_module(kind, cache, bits):
    """Its weights in 16 bits are read as such, by one product for all that have one input."""
    module = tiny(kind).bfloat16().float() if bits == 16 else tiny(kind)
    assert error(module, cache, "auto") < 1e-5
    model = model_of(module, "auto")
    assert {len(parts) for products in model.fused.products for parts in products} == ({1} if bits == 16 else {2, 3})
    if bits == 16:  # joined weights are not stored twice, also if another module shares them
        layer, (whole, _) = model.module.model.layers[0].self_attn, model.fused.products[0]
        assert joined((layer.q_proj, layer.k_proj, layer.v_proj))[0].packed.data_ptr() == whole[0].packed.data_ptr()
        assert layer.v_proj.packed.untyped_storage().data_ptr() == whole[0].packed.data_ptr()


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


CPU_FAULTS = {
    "rotation": (CpuStep, "_turns", lambda: lambda *given, right=CpuStep._turns: right(*given).abs()),
    "mask": (CpuStep, "_masks", lambda: lambda *given, right=CpuStep._masks: {
        window: torch.zeros_like(mask) for window, mask in right(*given).items()}),
    "eps": (cpu_step, "times", lambda: lambda parts, x, norm=(), times=cpu_step.times: times(
        parts, x, norm and Norm(norm.gain, 1e-6))),
}  # fmt: skip


@on_a_cpu
@pytest.mark.parametrize("fault", CPU_FAULTS)
def test_faults_of_a_cpu_are_seen(fault, monkeypatch):
    """Negative controls: also what is tried with every loaded model sees them."""
    module, (part, name, make) = tiny("llama", 1).bfloat16().float(), CPU_FAULTS[fault]
    model = model_of(module, "auto")
    assert reference_forward.reads_trees(model, "tiny") and model.fused is not None
    monkeypatch.setattr(part, name, make())
    assert error(module, how="auto") > 1e-3
    assert reference_forward.reads_trees(model, "tiny") and model.fused is None


def test_a_wrong_depth_in_a_tree_is_seen(monkeypatch):
    """Negative control: it shows in trees alone, which the model then does not read."""
    module = tiny("llama", 1)
    model = model_of(module)
    monkeypatch.setattr(fused, "project", with_places(a_depth_too_far))
    assert error(module) > 1e-3 and not reference_forward.reads_trees(model, "tiny") and model.fused is not None


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault, monkeypatch):
    """Negative controls: also what is tried with every loaded model sees them."""
    module, (name, make) = tiny("llama", 1), FAULTS[fault]
    model = model_of(module)
    assert reference_forward.reads_trees(model, "tiny") and model.fused is not None
    monkeypatch.setattr(fused, name, make())
    assert error(module) > 1e-3
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
        reference_forward.reads_trees(made(module, EagerExecutor(), "triton"), "tiny")
    model = made(module, EagerExecutor(), "auto")
    reference_forward.reads_trees(model, "tiny")
    assert model.fused is None


@on_a_cpu
def test_early_exits_with_a_trained_head_take_the_step():
    parts = parts_of("target.path=shipped:target", "drafter=early_exit")
    assert parts.drafter.model.fused is not None


def made(module, executor, how):
    return LanguageModel(module, None, name="tiny", sampling=Sampling(), new_cache=CACHES["static"], executor=executor,
                         attention=how)  # fmt: skip


def test_compiled_functions_and_attention_sdpa_run_the_module():
    for executor, how in ((CompiledExecutor(), "auto"), (EagerExecutor(), "sdpa")):
        model = made(tiny("llama", 1), executor, how)
        assert model.fused is None and not model.batch_invariant(1, 6, SimpleNamespace(trees=False))
    fast = model_of(tiny("llama", 1))
    for rows, trees, same in ((1, False, True), (2, False, False), (1, True, False)):
        assert fast.batch_invariant(rows, 6, SimpleNamespace(trees=trees)) == same


@pytest.mark.parametrize("fast", ["triton", pytest.param("auto", marks=on_a_cpu)])
@pytest.mark.parametrize("layers", [(), (0, 1, 2)])
def test_hidden_states_are_those_of_the_module(layers, fast):
    module, found = tiny("llama"), []
    for how in (fast, "sdpa"):
        model = model_of(module, how)
        with model.noting(layers) as hidden:
            read(model, [TEXT[:8]], [0])
            read(model, [TEXT[8:10]], [8])
        assert len(hidden) == 2 and "forward" not in vars(model.module.lm_head)
        found.append(torch.cat(hidden, 1))
    assert found[0].shape == (1, 10, 48 * max(1, len(layers)))
    assert float((found[0] - found[1]).abs().max() / found[1].abs().max()) < 1e-5


@pytest.mark.slow
def test_a_run_at_temperature_0_is_batch_invariant_and_its_texts_are_equal(tmp_path):
    """In bfloat16, where other orders of sums would turn ties; the verdict then excuses none."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def f"}')
    data = ("data=jsonl", f"data.path={tmp_path / 'prompts.jsonl'}", "max_new_tokens=8", "gamma=2")
    parts = parts_of("target=bytes", "drafter=bytes", "attention=triton", "dtype=bfloat16", "temperature=0", *data)
    results, records = run(parts, tmp_path)
    assert parts.target.fused is not None and results.details.batch_invariant and results.lossless.passed
    assert all(record.speculative.ids == record.baseline.ids for record in records)
