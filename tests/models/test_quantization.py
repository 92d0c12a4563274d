"""Quantised weights: what their values are, the products that multiply by them, and the law of a quantised target."""

import math
from types import SimpleNamespace

import pytest
import torch
from checkpoints import checkpoint, config
from choosing import only
from safetensors.torch import load_file, save_file
from small_runs import LITTLE, composed, parts_of, small
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from specbench.config.build import build
from specbench.config.memory import size
from specbench.config.validate import check
from specbench.decoding.executor import Executor, plain_parts
from specbench.errors import ConfigError
from specbench.executors.autotune import offered
from specbench.executors.linear_kernels import KINDS, QUANTIZED
from specbench.executors.packed_linear import PackedLinear
from specbench.executors.quant_grids import FP8, GRIDS, INT4, INT8
from specbench.models import pretrained
from specbench.models.checkpoint import hub_bytes, weight_bytes
from specbench.models.checkpoint_checks import refuse_not_finite
from specbench.models.pretrained import PretrainedModel, footprint, placed_on
from specbench.run.run import run

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALL = (*QUANTIZED, *KINDS)
BY_NAME = {kind.name: kind for kind in ALL}
ROUNDINGS = 8  # of the largest result, that a product in float32 may be off by; a result in bfloat16 is rounded once


def weights(dtype=torch.float32) -> torch.Tensor:
    """[48, 96], with rows of very different size, an empty one and an empty group."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(48, 96, generator=generator) * torch.logspace(-3, 1, 48)[:, None]
    weight[5], weight[7, 32:64] = 0, 0
    return weight.to(dtype)


@pytest.mark.parametrize(("grid", "dtype"), [
    (grid, dtype) for grid in GRIDS.values() for dtype in DTYPES[: 2 if grid is FP8 else 3]  # float16 has no 2^-25
], ids=str)  # fmt: skip
def test_a_rounded_weight_is_the_same_in_every_dtype_and_shows_its_grid(grid, dtype):
    weight = weights(torch.bfloat16)
    rounded = grid.rounded(weight.to(dtype))
    assert rounded.dtype == dtype and torch.equal(rounded.float(), grid.rounded(weight.float()))
    assert grid.holds(rounded) and grid.holds(rounded * 2**-3) and grid.holds(torch.cat([rounded, rounded.flip(0)]))
    assert not grid.holds(weight.to(dtype))
    place = (40, int(rounded[40].abs().argmax()))
    rounded[place] *= 1 + (1 / 1000 if dtype == torch.float32 else 1 / 64)
    assert not grid.holds(rounded)


def test_e4m3_keeps_four_digits_of_a_value():
    weight = weights()
    weight[9] = 2.0 - torch.linspace(0, 0.2, 96)  # whose largest is rounded to a power of two
    rounded = FP8.rounded(weight)
    error = (rounded - weight).abs()
    step = weight.abs().amax(1, keepdim=True) * 2.0**-15  # of the smallest numbers
    assert (error <= torch.maximum(weight.abs() / 16, step)).all() and (error > weight.abs() / 20).any()
    assert torch.equal(FP8.rounded(rounded), rounded)


@pytest.mark.parametrize("grid", (INT8, INT4), ids=str)
def test_rounding_moves_a_value_by_half_a_step_or_less(grid):
    weight = weights()
    integers, scale = grid.parts(weight)
    steps = scale.repeat_interleave(weight.shape[1] // scale.shape[1], 1)
    inside = integers.abs() < grid.largest
    moved = (grid.rounded(weight) - weight).abs()
    assert (moved <= steps / 2)[inside].all() and (moved <= 0.75 * steps).all()  # the largest of a group may be cut
    # and fine enough: the largest integer of a group is more than half of what its bits can say
    largest = integers.unflatten(1, (scale.shape[1], -1)).abs().amax(-1)
    assert (largest[scale > 0] > grid.largest // 2).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grid", (INT8, INT4), ids=str)
def test_products_are_those_of_the_rounded_values(grid, dtype):
    """Against float64, for each kind of product that is offered."""
    weight, bias = grid.rounded(weights(dtype)), torch.linspace(-1, 1, 48, dtype=dtype)
    kinds = offered(weight, ALL)
    assert (BY_NAME[grid.name] in kinds) == (dtype == torch.bfloat16)  # in float32 it would be another arithmetic
    for kind in kinds:
        for rows in (1, 5, 16, 64):
            for offset in (None, bias):
                x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(rows)).to(dtype)
                exact = x.double() @ weight.double().T + (0 if offset is None else offset.double())
                error = (kind(weight, offset)(x).double() - exact).abs().max() / exact.abs().max()
                assert error < ROUNDINGS * torch.finfo(dtype).eps, (kind.name, rows)


def test_other_weights_are_not_offered_to_the_kernels():
    assert not {*QUANTIZED} & {*offered(weights(torch.bfloat16), ALL, exact=False)}
    assert not {*QUANTIZED} & {*offered(INT4.rounded(weights()), ALL)}
    odd = INT4.rounded(weights(torch.bfloat16))[:41]
    assert INT4.holds(odd) and BY_NAME["int4"] not in offered(odd, ALL)  # no layout for 41 rows


@pytest.mark.parametrize("grid", (INT8, INT4), ids=str)
def test_a_quantised_drafter_may_round_its_inputs(grid):
    weight, x = grid.rounded(weights()), torch.randn(5, 96, generator=torch.Generator().manual_seed(1))
    kind = BY_NAME[grid.name]
    assert kind in offered(weight, ALL, exact=False)
    exact, found = x.double() @ weight.double().T, kind(weight, None)(x)
    error = (found.double() - exact).abs().max() / exact.abs().max()
    assert found.dtype == torch.float32 and 1e-4 < error < ROUNDINGS * torch.finfo(torch.bfloat16).eps


PAIR = [f"{key}={value}" for key, value in LITTLE.items()]
QUANTISED_RUNS = {
    "float32": ("target.quantization=int4", "executor.products=[half,onednn]", "temperature=1", "data.limit=8"),
    "peers": ("target.quantization=int8", "executor=eager", "temperature=0", "baseline=transformers"),
    "bfloat16 int8": ("target.quantization=int8", "executor.products=[int8]", "dtype=bfloat16", "temperature=0"),
    "bfloat16 int4": ("target.quantization=int4", "executor.products=[int4]", "dtype=bfloat16", "temperature=0"),
}


@pytest.mark.parametrize("name", only(["bfloat16 int8"], QUANTISED_RUNS))
def test_a_quantised_target_passes_its_own_verdict(name, tmp_path):
    parts = parts_of("max_new_tokens=24", *PAIR, *QUANTISED_RUNS[name])
    result, record = run(parts, tmp_path)
    assert result.lossless.verdict == "passed", result.lossless
    assert any("weights in int" in note for note in parts.notes)
    grid = GRIDS[parts.target.quantization]
    stock = [layer for layer in parts.target.stock_module().modules() if type(layer) is nn.Linear]
    assert len(stock) == 8 and all(grid.holds(layer.weight) for layer in stock)
    for found in record.results:  # transformers decodes with the same weights
        assert all(output.tokens == list(found.baseline.tokens) for output in found.peers.values())
    if "bfloat16" in name:  # the kernels run, and their bytes are known
        layers = [layer for layer in parts.target.module.modules() if isinstance(layer, PackedLinear)]
        assert {layer.product.name for layer in layers} == {grid.name}
        embedding = parts.target.module.get_input_embeddings().weight
        bits = 8 * (parts.target.weight_bytes - embedding.nbytes) / sum(layer.numbers for layer in layers)
        assert grid.bits < bits < grid.bits + 1.1  # with its scales


@pytest.mark.parametrize("temperature", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_target_that_is_not_the_quantised_one_fails(temperature, tmp_path):
    """Negative control: the decoder multiplies by the checkpoint's own weights, the verdict by the quantised ones."""
    words = ("executor=eager", f"temperature={temperature}", "max_new_tokens=32", *PAIR)
    parts = parts_of("target.quantization=int4", *words)
    quantised, parts.target.module = parts.target.module, parts_of(*words).target.module
    parts.target.stock_module = lambda: quantised
    assert run(parts, tmp_path)[0].lossless.verdict == "failed"


def test_embeddings_stay_and_an_output_matrix_becomes_its_own(tmp_path):
    folder = checkpoint(tmp_path, hidden_size=32, num_attention_heads=4, tie_word_embeddings=True)
    path = f"path={folder}"
    overrides = ("target=model", f"target.{path}", "drafter=model", f"drafter.{path}", "executor=eager")
    full = parts_of(*overrides).target.module
    assert full.lm_head.weight is full.model.embed_tokens.weight
    found = parts_of(*overrides, "target.quantization=int8").target
    assert torch.equal(found.module.model.embed_tokens.weight, full.model.embed_tokens.weight)
    assert torch.equal(found.module.lm_head.weight, INT8.rounded(full.lm_head.weight))
    assert torch.equal(found.module.model.norm.weight, full.model.norm.weight)
    assert found.step_bytes == sum(p.nbytes for p in full.parameters())  # as before, where one matrix was both


@pytest.mark.slow
def test_a_quantised_drafter_has_another_law_and_changes_no_text(tmp_path):
    texts, alphas = [], []
    for kind in ("null", "int4"):
        parts = parts_of("target.path=shipped:target", f"drafter.quantization={kind}", "temperature=0",
                         "executor.products=[int4,onednn]")  # fmt: skip
        result, record = run(parts, tmp_path / kind)
        texts.append([list(found.speculative.tokens) for found in record.results])
        alphas.append(result.alpha.mean)
        assert result.lossless.verdict == "passed"
    assert texts[0] == texts[1] and alphas[0] != alphas[1]


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["auto", "eager"])
def test_the_targets_own_weights_draft_on_its_cache(executor, tmp_path):
    more = ["executor.products=[int4]"] if executor == "auto" else []
    parts = parts_of("drafter=self_quantized", "temperature=0", f"executor={executor}", *more)
    drafter, target = parts.drafter, parts.target
    assert drafter.model.module.get_input_embeddings() is target.module.get_input_embeddings()
    result, _ = run(parts, tmp_path)
    assert drafter.model.cache is target.cache
    assert result.lossless.verdict == "passed" and result.alpha.mean > 0.7
    bits = 8 * drafter.own_bytes / drafter.operations_per_token
    assert 4 < bits < 6 if executor == "auto" else bits == 32
    assert result.memory.weights_bytes == target.weight_bytes + drafter.own_bytes


def test_the_estimate_knows_the_second_set_of_weights():
    told = []
    overrides = small("logger=none", "executor=eager", "drafter=self_quantized")
    target = build(check(composed(*overrides)), told.append).target
    assert f"weights {size(2 * target.weight_bytes)}," in told[0]


def test_the_estimate_of_a_quantised_checkpoint_is_what_its_files_hold(tmp_path):
    folder = checkpoint(tmp_path)
    settings = PretrainedModel.Settings(path=str(folder), weights="pretrained", chat_template="never")
    whole = footprint(settings, "target", torch.float32).weights
    state = {name: tensor.to(torch.int8) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    assert footprint(settings, "target", torch.float32).weights == whole  # by its shape: nothing says otherwise
    config(quantization_config={"quant_method": "gptq", "bits": 8}, dtype="bfloat16")(folder)
    found = footprint(settings, "target", torch.float32)
    assert found.weights == (folder / "model.safetensors").stat().st_size < 0.3 * whole and found.tied == 0
    assert not found.halves  # its layers are no linear ones that an executor would store in 16 bits


@pytest.mark.parametrize("value", [1.0, math.nan])
def test_a_quantisers_own_kind_of_tensor_is_looked_at_by_its_parts(value):
    """As of torchao, whose kinds have no `aminmax` and say the bytes of the dtype that they stand for."""
    stored, scale = torch.ones(3, 4), torch.full((3, 4), value)
    layer = nn.Linear(4, 3, bias=False)
    layer.weight = nn.Parameter(TwoTensor(stored, scale), requires_grad=False)
    assert [part.data_ptr() for part in plain_parts(layer.weight)] == [stored.data_ptr(), scale.data_ptr()]
    assert Executor().stored(layer).held == stored.nbytes + scale.nbytes
    if math.isnan(value):
        with pytest.raises(ConfigError, match="not finite in bfloat16, in weight"):
            refuse_not_finite(layer, "target.path=P", torch.bfloat16)
    else:
        refuse_not_finite(layer, "target.path=P", torch.bfloat16)


@pytest.mark.parametrize(("files", "expected"), [
    ({"model-00001-of-00002.safetensors": 700, "model-00002-of-00002.safetensors": 41, "pytorch_model.bin": 5,
      "original/model.safetensors": 9, "model.safetensors.index.json": 1}, 741),
    ({"model.safetensors": 12, "model-00001-of-00002.safetensors": 700}, 12),
    ({"pytorch_model.bin": 13, "config.json": 1}, 13),
    ({"model.safetensors": None}, None),
    ({"weights.gguf": 8}, None),
    (OSError("offline"), None),
])  # fmt: skip
def test_how_large_the_weights_of_a_hub_id_are_the_hub_says(files, expected, monkeypatch):
    def model_info(self, name, **options):
        assert name == "some/where" and options["files_metadata"] and options["revision"] == "v2"
        if isinstance(files, OSError):
            raise files
        siblings = [SimpleNamespace(rfilename=name, size=size) for name, size in files.items()]
        return SimpleNamespace(siblings=siblings)

    monkeypatch.setattr("specbench.models.checkpoint.HfApi.model_info", model_info)
    monkeypatch.setattr("specbench.models.checkpoint.try_to_load_from_cache", lambda *given, **more: None)
    hub_bytes.cache_clear()
    assert weight_bytes("some/where", "v2") == expected
    monkeypatch.setattr("specbench.models.checkpoint.HfApi.model_info", None)  # it is not asked again
    assert weight_bytes("some/where", "v2") == expected


def test_how_large_the_weights_of_a_hub_id_are_its_files_in_the_local_cache_say(tmp_path, monkeypatch):
    folder, there = checkpoint(tmp_path), str(tmp_path / "config.json")
    monkeypatch.setattr("specbench.models.checkpoint.try_to_load_from_cache", lambda *given, **more: there)
    size = (folder / "model.safetensors").stat().st_size
    assert weight_bytes("some/where", None) == size == weight_bytes(str(folder), None)


def test_weights_go_to_a_gpu_one_by_one_where_accelerate_is_there(monkeypatch, caplog):
    caplog.set_level("INFO", logger=pretrained.__name__)
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert placed_on(cuda) == {"device_map": {"": cuda}} and placed_on(cpu) == {}
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)
    assert not caplog.messages and placed_on(cuda) == {} and "with accelerate" in caplog.text


def conv1d(folder):
    return checkpoint(folder, model_type="gpt2", n_embd=32, n_head=4, n_layer=2, n_positions=2048)


BAD = {
    "an unknown kind": (
        "int2",
        None,
        "target.quantization=int2 is not allowed: it must be one of int8, int4, fp8 or null",
    ),
    "layers of another kind": ("int8", conv1d, "of its weights are in linear layers, use target.quantization=null"),
    "odd inputs": ("int4", checkpoint, "has 16 inputs, which are no multiple of 32: use int8"),
    "a quantised checkpoint": (
        "int8",
        lambda folder: config(quantization_config={"quant_method": "awq"})(checkpoint(folder)),
        "is quantised already, use target.quantization=null",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_quantised_is_refused(name, tmp_path):
    kind, make, sentence = BAD[name]
    overrides = [f"target.quantization={kind}"]
    if make is not None:
        make(tmp_path)
        overrides += ["target=model", f"target.path={tmp_path}", "drafter=ngram"]
    with pytest.raises(ConfigError, match=sentence):
        parts_of(*overrides)
