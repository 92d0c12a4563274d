"""One program for all layers: found or made once, compared with each layer, and left out where calls would differ."""

import copy
import importlib.util
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from specbench.cache.static import StaticCache
from specbench.decoding.executor import cache_argument
from specbench.executors import layer_programs
from specbench.executors.auto import AutoExecutor
from specbench.executors.compile_cache import Programs
from specbench.executors.layer_programs import LayerCall, LayerPrograms, shared_heads
from specbench.models.shared_cache import view_of

SIZES = dict(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4)


@pytest.fixture
def module():
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_key_value_heads=2, initializer_range=0.3)
    return LlamaForCausalLM(config).to(torch.bfloat16).float().eval()


class Steps:
    """Forwards of a module in a cache of 64 columns."""

    def __init__(self, module):
        self.module, self.cache = module, StaticCache(1, 64)

    @torch.inference_mode()
    def __call__(self, begin: int, count: int, near: torch.Tensor | None = None):
        """Logits of `count` tokens from position `begin` on, which read all columns or those `near` [n]."""
        slots = torch.arange(begin, begin + count)[None]
        self.cache.place(slots, begin + count, near=None if near is None else near[None])
        columns = torch.arange(begin + count) if near is None else near
        mask = (columns <= slots[:, :, None])[:, None]
        given = dict(attention_mask=mask, position_ids=slots, use_cache=True)
        given[cache_argument(self.module.forward)] = self.cache
        return self.module(input_ids=(slots * 7) % 50, **given).logits.clone()


def loaded(module, folder):
    executor = AutoExecutor(["half", "plain"], programs=Programs(folder))
    return executor, Steps(executor.load(module))


@pytest.mark.slow
def test_one_program_serves_all_layers_and_all_lengths_and_is_found_by_the_next_process(module, tmp_path):
    stock = Steps(copy.deepcopy(module))
    executor, steps = loaded(module, tmp_path / "programs")
    layers = executor.layers
    steps(0, 20), steps(20, 1)
    executor.ready()
    assert layers.missed and not layers.used and layers.attached  # nothing is there yet
    layers.start()
    for begin, count in ((20, 1), (20, 5)):
        steps(begin, count)
    executor.ready()
    assert layers.running and layers.kept.made == 2
    assert all(code.__name__ == "call" for code, _ in layers.found.values())  # Inductor's own, nothing around it
    stock(0, 20), steps(0, 20)
    for begin, count in (
        (20, 1),
        (20, 2),
        (21, 9),
        (30, 1),
        (31, 20),
        (40, 1),
        (3, 5),
        (63, 1),
        (0, 9),
        (0, 20),
        (9, 55),
    ):
        torch.testing.assert_close(steps(begin, count), stock(begin, count), rtol=1e-4, atol=1e-4)
    assert not layers.missed
    again, others = loaded(copy.deepcopy(stock.module), tmp_path / "programs")
    others(0, 20)
    for begin, count in ((20, 1), (20, 5)):
        torch.testing.assert_close(others(begin, count), stock(begin, count), rtol=1e-4, atol=1e-4)
    assert again.layers.running and again.layers.kept.found == 2 and not again.layers.kept.made


def fake(factor: float, module, layers="model.layers"):
    """Stands for compiling: a program that finds the layer by its first weight, or a wrong program."""

    def compiled(self, name, key, cache, number, tensors):
        def code(*given):
            first = given[len(tensors) + 3]
            call = next(
                layer.forward
                for layer in module.get_submodule(layers)
                if any(first is own for own in layer.forward.weights.values())
            )
            hidden, *rest = layer_programs.rebuild(key[1], given[: len(tensors)])
            words = dict(zip(key[2], rest, strict=True)) | {call.cache_name: cache}
            return [factor * call.run(hidden, words)]

        return code, layer_programs.flatten_arguments(torch.zeros(1))[0]

    return compiled


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_a_program_that_gives_another_result_is_not_used(factor, module, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(LayerCall, "_compile", fake(factor, module))
    stock = Steps(copy.deepcopy(module))
    executor, steps = loaded(module, tmp_path / "programs")
    executor.layers.start()
    stock(0, 20), steps(0, 20)
    for _ in range(2):
        torch.testing.assert_close(steps(20, 1), stock(20, 1), rtol=1e-4, atol=1e-4)
    executor.ready()
    assert executor.layers.used == (factor == 1.0) and ("another result" in caplog.text) == (factor != 1.0)


@pytest.mark.parametrize("made", [False, True])
def test_a_layer_is_given_arguments_by_position(made, tmp_path, monkeypatch):
    """GPT-2 calls its blocks so."""
    torch.manual_seed(0)
    config = GPT2Config(n_embd=16, n_layer=8, n_head=2, vocab_size=50, n_positions=64, initializer_range=0.3)
    module = GPT2LMHeadModel(config).eval()
    stock = Steps(copy.deepcopy(module))
    executor, steps = loaded(module, tmp_path / "programs")
    if made:
        monkeypatch.setattr(LayerCall, "_compile", fake(1.0, module, "transformer.h"))
        executor.layers.start()
    for begin, count in ((0, 20), (20, 1), (20, 5), (25, 1)):
        torch.testing.assert_close(steps(begin, count), stock(begin, count), rtol=1e-4, atol=1e-4)
    assert bool(executor.layers.missed) != made and executor.layers.running == made


def test_a_program_that_is_wrong_is_found_by_no_later_process(module, tmp_path, monkeypatch):
    folder = tmp_path / "programs"
    monkeypatch.setattr(LayerCall, "_compile", fake(1.01, module))
    stock = Steps(copy.deepcopy(module))
    executor, steps = loaded(module, folder)
    executor.layers.start()
    folder.mkdir()
    monkeypatch.setattr(LayerCall, "_name", lambda self, key, hidden: "one")
    steps(0, 20)
    for name in ("one", "other"):
        (folder / f"{name}.result").touch()
    steps(20, 1)
    assert [file.name for file in folder.glob("*.result")] == ["other.result"]
    monkeypatch.setattr(LayerCall, "_compile", lambda *given: pytest.fail("it was made again"))
    later, steps = loaded(copy.deepcopy(stock.module), folder)
    later.layers.start()
    steps(0, 20), steps(20, 1)
    assert later.layers.missed and not later.layers.running


def test_where_a_program_is_wrong_the_keys_and_values_of_the_layer_stay(module, tmp_path, monkeypatch):
    monkeypatch.setattr(LayerCall, "_compile", fake(1.0, module))
    stock = Steps(copy.deepcopy(module))
    executor, steps = loaded(module, tmp_path / "programs")
    stock(0, 20), steps(0, 20)
    executor.layers.start()

    def wrong(self, shared, every, written):
        for stored in every[: -len(self.tensors)][-2:]:
            stored[:, :, 20] = 3.0
        return False

    monkeypatch.setattr(LayerCall, "_check", wrong)
    torch.testing.assert_close(steps(20, 1), stock(20, 1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(steps.cache.pools, stock.cache.pools, rtol=1e-4, atol=1e-4)


def test_layers_that_another_forward_stands_for_stay_as_they_are(module, tmp_path):
    """As parts of layers that a drafter skips."""
    for layer in module.model.layers:
        layer.forward = lambda hidden_states, **given: hidden_states
    layers = LayerPrograms(Programs(tmp_path))
    layers.attach(module)
    assert not layers.attached and not any(isinstance(layer.forward, LayerCall) for layer in module.model.layers)


def test_without_one_of_the_programs_none_is_used(module, tmp_path, monkeypatch):
    monkeypatch.setattr(LayerCall, "_compile", fake(1.0, module))
    executor, steps = loaded(module, tmp_path / "programs")
    steps(0, 20)
    executor.layers.start()
    steps(20, 1)
    executor.layers.settle()
    assert executor.layers.running
    steps(20, 5)  # of a length for which no program was made while that was possible
    executor.layers.settle()
    assert not executor.layers.running


def test_a_program_reads_leading_columns_only(module, tmp_path, monkeypatch):
    monkeypatch.setattr(LayerCall, "_compile", fake(1.0, module))
    stock = Steps(copy.deepcopy(module))
    executor, steps = loaded(module, tmp_path / "programs")
    executor.layers.start()
    stock(0, 20), steps(0, 20), steps(20, 1)
    executor.layers.settle()
    for key, (_, result) in executor.layers.found.items():
        executor.layers.found[key] = (lambda *given: pytest.fail("a program ran"), result)
    near = torch.tensor([0, 18, 19, 20])
    torch.testing.assert_close(steps(20, 1, near), stock(20, 1, near), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(stock(20, 1, near), stock(20, 1), atol=1e-2)
    with pytest.raises(pytest.fail.Exception, match="a program ran"):  # control
        steps(20, 1)


def test_what_layers_share_is_taken_from_their_own_forward(module, tmp_path, monkeypatch):
    monkeypatch.setattr(LayerCall, "_compile", fake(1.0, module))
    stock = Steps(copy.deepcopy(module))
    executor, steps = loaded(module, tmp_path / "programs")
    executor.layers.start()
    stock(0, 20), steps(0, 20), steps(20, 1)
    for begin in (20, 12):
        torch.testing.assert_close(steps(begin, 1), stock(begin, 1), rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(layer_programs.Shared, "serves", lambda *given: True)  # control
    with pytest.raises(RuntimeError, match="must match"):
        steps(19, 1)


@pytest.mark.parametrize("masks", [None, 1, 6])
def test_heads_that_share_keys_attend_as_if_these_were_repeated(masks):
    q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 8)
    mask = None if masks is None else (torch.rand(2, masks, 5, 9) < 0.5) | (torch.arange(9) == 0)
    written = F.scaled_dot_product_attention(q, *(x.repeat_interleave(2, 1) for x in (k, v)), attn_mask=mask)
    with shared_heads():
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        other = F.scaled_dot_product_attention(q, k.flip(1), v, attn_mask=mask)
    torch.testing.assert_close(found, written)
    assert not torch.allclose(other, written, atol=1e-2)  # control


def test_it_pays_only_where_it_saves_more_than_it_takes(module, tmp_path):
    executor, steps = loaded(module, tmp_path / "programs")
    steps(0, 9), steps(9, 1)
    executor.may_compile = True
    executor.ready()
    assert executor.compile_seconds(10**6) == layer_programs.SECONDS
    assert not executor.decide(seconds=30.0, least=10.0, weights=10**6) and not executor.layers.compiles
    assert executor.decide(seconds=100.0, least=10.0, weights=10**6) and executor.layers.compiles
    assert not executor.fixed_shapes and not executor.compiles


def test_compile_true_makes_programs_of_layers_where_these_can_have_such(module, tmp_path, monkeypatch):
    monkeypatch.setattr(LayerCall, "_compile", fake(1.0, module))
    executor = AutoExecutor(["plain"], programs=Programs(tmp_path / "programs"), compile="true")
    assert executor.compiles and executor.columns(100) == 256
    steps = Steps(executor.load(module))
    assert not executor.compiles and not executor.fixed_shapes and executor.columns(100) == 256
    steps(0, 20), steps(20, 1)
    executor.ready()
    assert executor.layers.running and not executor.layers.compiles and executor.facts()["programs"]["used"]
    few = AutoExecutor(["plain"], programs=Programs(tmp_path / "programs"), compile="true")
    few.load(GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50)))
    assert few.compiles and few.columns(100) == 128  # the whole model, and columns of its programs


def test_layers_whose_code_differs_share_no_program(module, tmp_path):
    layers = LayerPrograms(Programs(tmp_path / "programs"))
    layers.attach(module)
    calls = [layer.forward for layer in module.model.layers]
    assert len({call.kind for call in calls}) == 1
    module.model.layers[3].self_attn.sliding_window = 4
    assert LayerCall(module.model.layers[3], 3, layers).kind != calls[0].kind


def test_a_layer_whose_code_came_with_a_checkpoint_is_known_by_its_source(tmp_path, monkeypatch):
    """As with trust_remote_code: a revised file has the names of the one before."""

    def kind(number: int, source: str) -> str:
        (file := tmp_path / f"{number}.py").write_text(source)
        spec = importlib.util.spec_from_file_location("modeling_of_a_checkpoint", file)
        made = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, made)
        spec.loader.exec_module(made)
        return LayerCall(made.Layer(), 0, LayerPrograms(Programs(tmp_path))).kind

    code = "from torch import nn\nclass Layer(nn.Module):\n    def forward(self, x, cache=None):\n        return {}"
    one, same, revised = (kind(n, code.format(result)) for n, result in enumerate(("x", "x", "-x")))
    assert one == same != revised


def test_a_view_of_a_layer_runs_itself(module, tmp_path):
    """Drafters that skip parts of layers exchange the children of views."""
    LayerPrograms(Programs(tmp_path / "programs")).attach(module)
    layer, x = module.model.layers[0], torch.randn(1, 3, 32)
    view = view_of(layer)
    view._modules["mlp"] = nn.Identity()
    angles = module.model.rotary_emb(x, torch.arange(3)[None])
    assert not torch.equal(view(x, position_embeddings=angles), layer(x, position_embeddings=angles))


class Renamed(nn.Module):
    """A layer that calls its cache as transformers does from 5.24 on."""

    layer_idx = 0

    def forward(self, hidden_states, cache=None):
        return hidden_states


def test_a_layer_that_is_attached_twice_keeps_the_name_of_its_cache(tmp_path):
    """As of a target whose layers draft for it too."""
    layer, layers = Renamed(), LayerPrograms(Programs(tmp_path / "programs"))
    for _ in range(2):
        layer.forward = LayerCall(layer, 0, layers)
    assert layer.forward.cache_name == "cache"


def test_few_layers_run_as_they_are(tmp_path):
    few = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50))
    layers = LayerPrograms(Programs(tmp_path / "programs"))
    layers.attach(few)
    assert not layers.attached
