"""Products with weights in few bits against products in float64, and models that hold them.

Without a GPU the kernel runs in Triton's interpreter, and is compiled for an A100 and an H100.
"""

import pytest
import torch

pytest.importorskip("triton")

from checkpoints import checkpoint
from choosing import only, slow_unless
from compile_triton import Job, compiled
from small_runs import composed, parts_of
from torch.nn import functional as F
from triton import knobs

from specbench.config.validate import check
from specbench.executors import packed_linear, quantized_linear
from specbench.executors.packed_linear import is_quantized
from specbench.executors.quant_grids import GRIDS
from specbench.executors.quantized_linear import FEW_ROWS, QuantizedLinear
from specbench.kernels import few_bits, ops
from specbench.models.pretrained import PretrainedModel, footprint
from specbench.run.run import run

DEVICE = "cpu" if knobs.runtime.interpret else "cuda"
pytestmark = pytest.mark.cuda
NAMES = list(GRIDS)


def layer_of(name, outputs, inputs, dtype=torch.float32, bias=False):
    """A layer on a grid, and its weight and bias."""
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator) * torch.logspace(-2, 1, outputs)[:, None]
    weight = GRIDS[name].rounded(weight.to(dtype)).to(DEVICE)
    offset = torch.linspace(-1, 1, outputs, dtype=dtype, device=DEVICE) if bias else None
    return QuantizedLinear(GRIDS[name], weight, offset), weight, offset


def rows(count, inputs, dtype=torch.float32):
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(count)).to(DEVICE, dtype)


def error(found, x, weight, offset=None):
    """The largest error, as a share of the sum of the absolute values that a result is the sum of."""
    x, weight = x.double(), weight.double()
    exact = x @ weight.T + (0 if offset is None else offset.double())
    return float(((found.double() - exact).abs() / (x.abs() @ weight.abs().T)).max())


DTYPES, SHAPES = (torch.float32, torch.bfloat16, torch.float16), ((32, 1024), (40, 96), (17, 160))


@pytest.mark.parametrize(("shape", "dtype"), [
    slow_unless(i == j, shape, dtype) for i, shape in enumerate(SHAPES) for j, dtype in enumerate(DTYPES)
], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", NAMES)
def test_a_product_is_that_of_the_rounded_weight(name, shape, dtype):
    layer, weight, offset = layer_of(name, *shape, dtype, bias=shape[0] == 40)
    assert torch.equal(layer.wide(dtype), weight)
    for count in (1, 9):
        x = rows(count, shape[1], dtype)
        allowed = 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
        assert error(layer(x), x, weight, offset) < allowed


@pytest.mark.parametrize("name", only(["int4"], NAMES))
def test_a_row_is_the_same_bit_for_bit_among_others(name):
    layer, *_ = layer_of(name, 24, 160)
    x = rows(FEW_ROWS, 160)
    for count in (5, 16, FEW_ROWS):
        found = layer(x[:count].view(1, count, 160))[0]
        assert torch.equal(found[:1], layer(x[:1])) and torch.equal(found[-1:], layer(x[count - 1 : count]))


def test_many_rows_are_multiplied_by_the_wide_weight(monkeypatch):
    layer, weight, offset = layer_of("int4", 24, 96, bias=True)
    x = rows(FEW_ROWS + 1, 96)
    monkeypatch.setattr(ops, "multiply_few", None)
    assert torch.equal(layer(x), F.linear(x, weight, offset))


def test_errors_are_seen():
    """Negative controls: the halves of the bytes, the groups' scales and the formats exchanged."""
    x = rows(3, 160)
    layer, weight, _ = layer_of("int4", 24, 160)
    wrong = layer.stored << 4 | layer.stored >> 4
    for stored, scale in ((wrong, layer.scale), (layer.stored, layer.scale.roll(1, 1))):
        assert error(ops.multiply_few(x, stored, scale, False), x, weight) > 0.05
    layer, weight, _ = layer_of("fp8", 24, 160)
    assert error(ops.multiply_few(x, layer.stored, layer.scale, False), x, weight) > 0.05


# -- Models -----------------------------------------------------------------------------------------


@pytest.fixture
def stores_few_bits(monkeypatch):
    """Executors store weights as they do on CUDA. Interpreted, a run would take minutes: products are PyTorch's."""
    found = lambda weight: next((grid for grid in GRIDS.values() if grid.holds(weight)), None)  # noqa: E731
    monkeypatch.setattr(packed_linear, "grid_of", found)
    monkeypatch.setattr(quantized_linear, "FEW_ROWS", 0)


GRAPHS = ("executor=cudagraph", "executor._target_=graph_memory.Rerun", "executor.compile=false")


def run_of(tmp_path, *overrides):
    folder = tmp_path / "model"
    if not folder.exists():
        checkpoint(folder, hidden_size=32, num_attention_heads=4, tie_word_embeddings=True)
    both = ("target=model", f"target.path={folder}", "drafter=model", f"drafter.path={folder}")
    parts = parts_of(*both, *GRAPHS, "temperature=0", "gamma=1", "data.limit=1", "max_new_tokens=3", *overrides)
    return parts, run(parts, tmp_path / "run")[0]


def test_a_run_holds_quantised_bytes_and_passes_its_verdict(stores_few_bits, tmp_path):
    parts, result = run_of(tmp_path, "target.quantization=fp8", "drafter.quantization=int4")
    assert result.lossless.passed and result.counts.failed == 0
    models = {"target": parts.target, "drafter": parts.drafter.models[0]}
    for role, model in models.items():
        assert is_quantized(model.module) and not is_quantized(model.stock_module())
        settings = PretrainedModel.Settings(
            path=model.name, weights="pretrained", chat_template="never", quantization=model.quantization
        )
        size = footprint(settings, role, torch.float32)
        buffers = size.few - model.weight_bytes  # of rotations, which are no weights
        embedding = model.module.get_input_embeddings().weight
        assert 0 <= buffers < 100 and model.step_bytes == model.weight_bytes - embedding.nbytes
        assert size.few < 0.7 * size.weights


def test_a_wrong_product_fails_the_verdict(stores_few_bits, tmp_path, monkeypatch):
    """Negative control: the scales of other outputs."""
    wide = QuantizedLinear.wide
    monkeypatch.setattr(QuantizedLinear, "wide", lambda self, dtype: wide(self, dtype).roll(1, 0))
    _, result = run_of(tmp_path, "target.quantization=int8")
    assert result.lossless.passed is False


@pytest.mark.parametrize(("kind", "most"), [(None, 16.5e9), ("fp8", 12.5e9), ("int8", 12.5e9), ("int4", 10e9)])
def test_bytes_of_weights_that_a_round_of_llama_3b_and_1b_reads(kind, most):
    """One call of the target and four steps of the drafter, in bfloat16 but for a quantised drafter."""
    random = ("target.weights=random", "drafter.weights=random", f"drafter.quantization={kind or 'null'}")
    chosen = check(composed("drafter=llama1b", *random)).choices
    target, drafter = (footprint(chosen[role].settings, role, torch.bfloat16) for role in ("target", "drafter"))
    step = drafter.weights if kind is None else drafter.few - 2 * 128256 * 2048  # the embedding is looked up
    print(f"{kind}: {(target.weights + 4 * step) / 1e9:.2f} GB")
    assert target.weights + 4 * step < most
    assert kind is None or target.weights + 4 * (drafter.weights - 2 * 128256 * 2048) > 16e9  # control: stored wide


# -- For a GPU that is not here ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_compiles_and_spills_no_registers(name, capability):
    four = name == "int4"
    given = {"x": "*bf16:16", "out": "*bf16:16", "stored": "*u8:16", "scale": "*bf16:16" if four else "*fp32:16",
             "n": "i32"} | dict.fromkeys("KMWG", "i32:16")  # fmt: skip
    given |= {"BITS": 4 if four else 8, "FLOAT": name == "fp8", "NATIVE": capability >= 89, "PRECISION": "tf32",
              "ROWS": few_bits.ROWS, "TILE": few_bits.TILE, "PARTS": 16 if four else 4, "BYTES": 32 if four else 128,
              "WIDEN": False}  # fmt: skip
    jobs = [Job(few_bits.__name__, "_multiply_few", given | {"EVEN": even}, few_bits.WARPS, few_bits.STAGES, capability)
            for even in (True, False)]  # fmt: skip
    for one in compiled(jobs):
        print(one)
        assert one.spilled == 0 and one.shared <= 99 * 1024 and "mma" in one.ptx and "cp.async" in one.ptx
