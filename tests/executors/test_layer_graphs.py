"""Programs of single layers inside of CUDA graphs, on a model of graphs. Programs are traced and not compiled."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from checkpoints import checkpoint
from graph_memory import Rerun, SimulatedGraphs
from small_runs import parts_of
from transformers import LlamaConfig, LlamaForCausalLM

from specbench.cache.static import StaticCache
from specbench.component import Selections
from specbench.decoding.sampling import Sampling
from specbench.executors import cudagraph
from specbench.executors.compile_cache import Programs
from specbench.executors.cudagraph import CudaGraphExecutor
from specbench.executors.layer_programs import LayerCall, LayerPrograms, runs_by_layers
from specbench.executors.packed_linear import twin_of
from specbench.models.language_model import LanguageModel
from specbench.run.run import run

GAMMA = 2
READ = ((0, 3), (3, 3), (6, 1), (7, 3), (5, 2), (6, 1), (7, 1))  # first position and number of tokens of each call


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=50, num_hidden_layers=8, initializer_range=0.3, **shape)
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def pair(tmp_path):
    """Overrides that choose a target of eight layers that are alike, and a drafter of nine."""
    shape = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
    target = checkpoint(tmp_path / "target", num_hidden_layers=8, **shape)
    drafter = checkpoint(tmp_path / "drafter", num_hidden_layers=9, intermediate_size=24, **shape)
    return f"target.path={target}", "drafter=model", f"drafter.path={drafter}"


def result_of(pair, folder, compile, *overrides):
    graphs = ("executor=cudagraph", "executor._target_=graph_memory.Rerun", f"executor.compile={compile}")
    words = (f"gamma={GAMMA}", "data.limit=2", "max_new_tokens=5", "cache=static")
    parts = parts_of(*pair, *graphs, *words, *overrides)
    result, _ = run(parts, folder)
    lines = (folder / "prompts.jsonl.part").read_text().splitlines()
    return parts, result, [json.loads(line)["output"] for line in lines]


@pytest.mark.parametrize("overrides", [("batch_size=2",), ("temperature=0",)])
def test_programs_of_layers_change_no_text_and_none_is_made_for_prompts(overrides, pair, traced, tmp_path):
    _, _, expected = result_of(pair, tmp_path / "without", "false", *overrides)
    assert not traced
    parts, result, texts = result_of(pair, tmp_path / "with", "layers", *overrides)
    assert texts == expected and result.lossless.passed and result.counts.failed == 0
    # Of the target one for a single token and one for a draft; of the drafter one for a token and one for two.
    programs = result.executor["programs"]
    assert programs["used"] and programs["made"] == len(traced) == 4 and programs["missed"] == 0
    assert result.executor["captures_after_warm_up"] == 0 and not result.executor["not_captured"]
    assert runs_by_layers(parts.target.module) and not runs_by_layers(parts.target.stock_module())


@pytest.mark.parametrize("fault", ["another result", "could not run"])
def test_one_program_that_is_wrong_leaves_out_all(fault, pair, traced, tmp_path, monkeypatch, caplog):
    """Plain decoding and speculative decoding would not run alike."""
    _, _, expected = result_of(pair, tmp_path / "without", "false")
    artifact = torch._inductor.standalone_compile

    def wrong(graph, inputs):
        made = artifact(graph, inputs)
        if inputs[0].shape[1] != 1:
            return made
        return lambda *given: [1.01 * made(*given)[0] if fault == "another result" else 1 / 0]

    monkeypatch.setattr(torch._inductor, "standalone_compile", wrong)
    _, result, texts = result_of(pair, tmp_path / "with", "layers")
    assert texts == expected and fault in caplog.text and result.executor["captures_after_warm_up"] == 0
    assert not result.executor["programs"]["used"] and any("not all layers" in note for note in result.notes)


def test_without_a_compiler_layers_run_as_they_are_written_and_it_is_told(pair, tmp_path, monkeypatch):
    def no_compiler(*given):
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(LayerCall, "_compile", no_compiler)
    _, result, _ = result_of(pair, tmp_path / "run", "layers")
    assert result.lossless.passed and any("no C compiler" in note for note in result.notes)


def test_a_model_of_few_layers_is_told_to_have_no_programs(tmp_path):
    few = checkpoint(tmp_path / "few", num_hidden_layers=2)
    _, result, _ = result_of((f"target.path={few}", "drafter=ngram"), tmp_path / "run", "layers")
    assert any("a model needs 8 of one class" in note for note in result.notes)


def test_a_copy_of_a_module_runs_its_own_layers_by_the_same_programs():
    """As with logits in float32, on CUDA."""
    executor = CudaGraphExecutor(Programs(None), by_layers=True)
    module = executor.load(llama())
    copy = twin_of(module)
    for own, layer in zip(copy.model.layers, module.model.layers, strict=True):
        assert own is not layer and own.forward.layer is own and own.forward.programs is executor.layers
        assert all(mine is theirs for mine, theirs in zip(own.parameters(), own.forward.weights.values(), strict=True))
        assert own.forward.kind is layer.forward.kind


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("triton", marks=pytest.mark.slow)])
def test_graphs_of_programs_of_layers_read_and_write_what_the_layers_do(attention, traced):
    """With a memory of graphs, in which what a later capture left is overwritten."""
    found = {}
    for by_layers in (False, True):
        executor = SimulatedGraphs(Programs(None) if by_layers else None, by_layers=by_layers)
        model = LanguageModel(llama(), None, name="", sampling=Sampling(), new_cache=StaticCache, executor=executor,
                              attention=attention)  # fmt: skip
        assert model.kernel == (attention == "triton")
        model.allocate(1, 16)
        steps = executor.leaf(model.forward, model)
        texts = [torch.arange(n, n + width)[None] * 7 % 50 for n, width in READ]
        logits = [steps(text, torch.tensor([n]), 16).clone() for text, (n, _) in zip(texts, READ, strict=True)]
        found[by_layers] = [*logits, *model.cache_tensors()]
        assert executor.replays == len(READ) - 1  # in the first call the cache takes its shape
    assert len(traced) == len({width for _, width in READ[1:]})
    torch.testing.assert_close(found[True], found[False])


@pytest.mark.slow
def test_programs_for_graphs_are_found_by_the_next_process(tmp_path):
    found = []
    for _ in range(2):
        executor = Rerun(Programs(tmp_path / "programs"), by_layers=True)
        model = LanguageModel(llama(), None, name="", sampling=Sampling(), new_cache=StaticCache, executor=executor)
        model.allocate(1, 16)
        steps = executor.leaf(model.forward, model)
        logits = [steps(torch.tensor([[3, 1, 4]]), torch.tensor([n]), 16).clone() for n in (0, 3)]
        assert not executor.ready()
        found.append((*logits, executor.kept.found, executor.kept.made))
    assert [made[2:] for made in found] == [(0, 1), (1, 0)]
    torch.testing.assert_close(found[0][:2], found[1][:2])


def test_layers_with_another_window_have_another_program():
    """The attention kernel's window is a constant of the program. Without it, masks are inputs."""
    shape = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 50}
    config = LlamaConfig(**shape, intermediate_size=16, layer_types=["sliding_attention"] * 2 + ["full_attention"])
    layers = LlamaForCausalLM(config).model.layers

    def kinds(graphs):
        programs = LayerPrograms(Programs(None), graphs=graphs)
        return [LayerCall(layer, place, programs).kind for place, layer in enumerate(layers)]

    assert kinds(True)[0] == kinds(True)[1] != kinds(True)[2]
    assert len({*kinds(False)}) == 1


class HasTensors:
    """A model whose cache holds keys and values of three layers."""

    def __init__(self):
        self.held = [torch.full((2,), float(n)) for n in range(6)]

    def cache_tensors(self):
        return self.held

    def on_cache(self, tensors):
        self.given = tensors
        return nullcontext()


def test_keys_and_values_are_two_tensors_before_a_capture_too():
    model = HasTensors()
    with cudagraph.stand_ins([model]):
        numbers = [float(t[0]) for t in model.given]
    assert numbers == [0, 1, 0, 1, 0, 1] and len({id(t) for t in model.given}) == 2


@pytest.mark.parametrize("compile", ["true", "layers"])
def test_layers_need_a_cache_in_place(compile):
    settings = CudaGraphExecutor.Settings(compile=compile)
    refused = CudaGraphExecutor.refuses(settings, paged_on_cuda())
    assert (refused is not None and "cache=static" in refused) == (compile == "layers")


def paged_on_cuda():
    kind = SimpleNamespace(fixed_shapes=True, in_place=False)
    groups = {"cache": SimpleNamespace(name="paged", kind=kind)}
    return Selections(groups, temperature=1.0, lenience=1.0, device="cuda", scalars={})
