"""Products of linear layers: exact in every layout, chosen by measured time, and the same law as the stock module."""

import copy
import gc
import json
from pathlib import Path

import pytest
import torch
from small_runs import parts_of
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from specbench.component import Selection as Option
from specbench.errors import ConfigError
from specbench.executors import autotune, native
from specbench.executors import linear_kernels as products
from specbench.executors import packed_linear as layers
from specbench.executors.auto import AutoExecutor
from specbench.executors.autotune import ROWS, ProductTable, choice, time_products
from specbench.executors.linear_kernels import KINDS, HalfPairs, HalfWeight, HalfWeightSerial, OneDnn, Plain, scale_of
from specbench.executors.packed_linear import PackedLinear, linear_groups
from specbench.models.load import PretrainedModel

OUT, IN = 48, 96


def weight(bits: int = 16) -> torch.Tensor:
    """A weight whose values span some 30 binades, in 16 or 32 bits each."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(OUT, IN, generator=generator) * 2.0 ** torch.randint(-14, 2, (OUT, IN), generator=generator)
    return w.bfloat16().float() if bits == 16 else w


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_product_is_the_exact_one_up_to_rounding(kind, biased, rows):
    w = weight() * scale_of(weight())
    bias = torch.randn(OUT) if biased else None
    x = torch.randn(2, rows, IN)
    exact = x.double() @ w.double().T + (0 if bias is None else bias.double())
    assert kind.offers(w)
    size = x.double().abs() @ w.double().abs().T
    assert ((kind(w, bias)(x).double() - exact).abs() <= 1e-5 * size + 1e-6).all()


def test_float16_storage_loses_no_digit_of_a_16_bit_weight():
    w = weight()
    scale = scale_of(w)
    assert not torch.equal(w.half().float(), w)  # without the scale it would
    found = HalfWeight(w * scale, None)(torch.eye(IN)).T / scale
    assert torch.equal(found, w)


def test_float16_storage_is_not_offered_for_32_bit_weights():
    w = weight(bits=32)
    assert not HalfWeight.offers(w * scale_of(w)) and OneDnn.offers(w) and Plain.offers(w)


@pytest.mark.parametrize("kind", [HalfPairs, HalfWeight, HalfWeightSerial])
def test_in_float16_storage_a_row_does_not_depend_on_its_neighbours(kind):
    w, x = weight() * scale_of(weight()), torch.randn(40, IN)
    product = kind(w, None)
    alone = torch.cat([product(row[None]) for row in x])
    for rows in (1, 5, 9, 40):
        if kind is HalfPairs or torch.backends.cpu.get_cpu_capability() == "AVX512":
            assert torch.equal(product(x[:rows]), alone[:rows])
        else:  # FBGEMM's other kernels sum in an order that depends on the number of rows
            assert (product(x[:rows]) - alone[:rows]).abs().max() < 1e-6 * alone.abs().max()


def test_the_own_product_is_compiled_once_and_offered_only_where_that_is_possible(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "false")  # a compiler that fails
    monkeypatch.setattr(native, "COMPILERS", ())
    monkeypatch.setattr(products, "half_pairs", native.half_pairs.__wrapped__)
    w = weight() * scale_of(weight())
    with caplog.at_level("INFO"):
        assert not HalfPairs.offers(w) and HalfWeight.offers(w)
    assert "half_pairs cannot be compiled" in caplog.text and not list(tmp_path.rglob("*.so"))


def test_after_a_compiler_that_fails_which_may_have_arguments_the_next_one_is_tried(monkeypatch, tmp_path):
    tried = []

    def fails(command, **options):
        tried.append(command[: command.index(native.BUILD_FLAGS[0])])
        raise OSError("fails")

    monkeypatch.setattr(native.subprocess, "run", fails)
    monkeypatch.setattr(native, "COMPILERS", ("sh", "not-there"))
    for given, expected in (("wrapper 'g++ 1' -D", [["wrapper", "g++ 1", "-D"]]), ("'", []), ("", [])):
        monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
        monkeypatch.setenv("CXX", given)
        tried.clear()
        assert native.half_pairs.__wrapped__() is None and tried == [*expected, ["sh"]]


def test_a_library_is_used_if_it_is_whole_and_nobody_else_can_write_it(tmp_path, monkeypatch):
    folder, loaded, made = tmp_path / "kernels", [], []

    def compile_it(command, **options):
        made.append(command)
        Path(command[-1]).write_bytes(b"code")

    def load(path):
        loaded.append(Path(path).read_bytes()[:4])
        raise OSError("not loaded")

    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "a")
    monkeypatch.setattr(native, "COMPILERS", ())
    monkeypatch.setattr(native.subprocess, "run", compile_it)
    monkeypatch.setattr(native.ctypes, "CDLL", load)
    find = native.half_pairs.__wrapped__
    find(), find()
    [library] = folder.iterdir()
    assert folder.stat().st_mode & 0o777 == library.stat().st_mode & 0o777 == 0o700 and len(made) == 1
    for content in (b"", library.read_bytes()[:-1], b"evil" + library.read_bytes()[4:]):
        library.write_bytes(content)
        find()
    library.chmod(0o722)
    find()
    assert loaded == [b"code"] * 6 and len(made) == 5 and [*folder.iterdir()] == [library]
    folder.chmod(0o770)
    assert find() is None and len(loaded) == 6 and len(made) == 5


def test_the_own_product_is_offered_for_whole_lines_of_pairs_only():
    assert HalfPairs.offers(torch.ones(4, 32))
    assert not HalfPairs.offers(torch.ones(3, 32)) and not HalfPairs.offers(torch.ones(4, 40))


def test_without_its_deprecated_operators_the_product_of_one_thread_is_not_offered(monkeypatch, recwarn):
    w = weight() * scale_of(weight())
    assert HalfWeightSerial.offers(w) and not recwarn.list
    assert torch.equal(HalfWeightSerial(w, None)(torch.eye(IN)), HalfWeight(w, None)(torch.eye(IN)))
    monkeypatch.delattr(torch, "fbgemm_linear_fp16_weight_fp32_activation")
    monkeypatch.setattr(products, "has_serial", products.has_serial.__wrapped__)
    assert not HalfWeightSerial.offers(w) and HalfWeight.offers(w)


def test_the_fastest_product_is_chosen_and_the_first_of_equals():
    names = ("half", "onednn", "plain")
    clear = {"half": [4.0, 4.0, 9.0, 40.0], "onednn": [8.0, 8.0, 9.0, 20.0], "plain": [30.0, 30.0, 30.0, 30.0]}
    assert choice(clear, names) == "half"
    equal = {"half": [4.2] * 4, "onednn": [4.0] * 4}
    assert choice(equal, names) == "half"
    assert choice(clear, ("onednn", "plain")) == "onednn"
    assert choice({}, ("plain",)) == "plain"


def test_measurements_are_kept_for_this_machine_only(tmp_path):
    path = tmp_path / "products.json"
    ProductTable(path, "this machine").add({"2x3 float32": {"half": [1.0] * 4}})
    assert ProductTable(path, "this machine").shapes == {"2x3 float32": {"half": [1.0] * 4}}
    assert ProductTable(path, "another machine").shapes == {}
    for damaged in ("{", "[" * 100_000):
        path.write_text(damaged)
        assert ProductTable(path, "this machine").shapes == {}


@pytest.mark.parametrize("content", [None, "{", "[]", '{"microseconds": {}}', '{"microseconds": {"a": {"half": [1]}}}'])
def test_a_file_of_choices_without_times_is_refused(content, tmp_path):
    path = tmp_path / "results.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"executor.choices=.*give the results.json of a run"):
        ProductTable(path, "this machine", pinned=True)


def test_every_kind_that_fits_a_weight_is_measured():
    small = [(weight(), None), (weight(bits=32), None)]
    assert set(time_products(small[:1], KINDS)["48x96 float32"]) == {
        "half_pairs",
        "half",
        "half_serial",
        "onednn",
        "plain",
    }
    assert set(time_products(small[1:], KINDS)["48x96 float32"]) == {"onednn", "plain"}
    assert all(
        len(times) == len(ROWS) and min(times) > 0 for times in time_products(small, KINDS)["48x96 float32"].values()
    )


def test_a_pinned_choice_is_the_choice(tmp_path):
    """The times of an earlier run decide, not this machine's."""
    slow = {"half": [9.0] * 4, "onednn": [1.0] * 4, "plain": [5.0] * 4}
    shapes = ("4096x640", "1920x640", "640x640", "4608x640", "640x2304", "4096x160", "480x160", "160x160", "896x160",
              "160x448")  # fmt: skip
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"executor": {"microseconds": {f"{shape} float32": slow for shape in shapes}}}))
    executor = parts_of("target.path=shipped:target", f"executor.choices={path}").target.executor
    assert {tuple(kinds) for kinds in executor.facts()["chosen"].values()} == {("onednn",)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_embedding_is_stored_in_16_bits_if_no_value_changes(dtype):
    config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=2, tie_word_embeddings=True)  # fmt: skip
    module, text = LlamaForCausalLM(config).eval(), torch.arange(9)[None]
    whole = copy.deepcopy(module)
    AutoExecutor(["plain"]).load(whole)
    assert type(whole.get_input_embeddings()) is nn.Embedding  # its values have 32 bits
    module.to(dtype).float()
    stock, embedded = module(text).logits, module.get_input_embeddings()(text)
    executor = AutoExecutor(["half"])
    packed = executor.load(module)
    table = packed.get_input_embeddings()
    assert table.weight.dtype == dtype and torch.equal(table(text), embedded)
    torch.testing.assert_close(packed(text).logits, stock)
    weights = sum(p.numel() for p in packed.parameters())  # of norms
    numbers = executor.stored(packed).numbers
    assert executor.stored(packed).held == 2 * (numbers - weights) + 4 * weights
    assert numbers == AutoExecutor().stored(whole).numbers


def test_weights_are_estimated_at_half_where_a_product_stores_them_so(monkeypatch):
    cpu = torch.device("cpu")
    assert AutoExecutor().held(100, 20, cpu, halves=True) == AutoExecutor(["half"]).held(100, 20, cpu, True) == 60
    assert AutoExecutor(["onednn"]).held(100, 20, cpu, True) == AutoExecutor(["plain"]).held(100, 20, cpu, True) == 120
    assert AutoExecutor().held(100, 20, cpu, halves=False) == 120
    for kind in (HalfWeight, HalfPairs):  # as without FBGEMM and a compiler
        monkeypatch.setattr(kind, "offers", classmethod(lambda kind, weight: False))
    assert AutoExecutor().held(100, 20, cpu, halves=True) == 120


def loaded(*products: str) -> PretrainedModel:
    words = ("target.path=shipped:target", f"executor.products=[{','.join(products)}]", "drafter=ngram")
    return parts_of(*words).target


@pytest.mark.parametrize("kind", ["half", "onednn", "plain"])
def test_a_packed_module_computes_the_stock_modules_logits(kind):
    target = loaded(kind)
    text = torch.arange(24)[None] * 7
    ours, stock = target.module(text).logits, target.stock_module()(text).logits
    assert 0 < (ours - stock).abs().max() < 1e-4 or kind == "plain"
    assert (
        sum(isinstance(m, PackedLinear) for m in target.module.modules()) == 3 * 4 + 1
    )  # q/k/v and gate/up are one each


def test_bytes_read_are_those_of_the_layout():
    half, onednn = loaded("half"), loaded("onednn")
    assert half.operations_per_token == onednn.operations_per_token > 20e6
    norms = sum(p.numel() for p in half.module.parameters())
    assert half.step_bytes == 2 * (half.operations_per_token - norms) + 4 * norms
    assert onednn.step_bytes == 4 * onednn.operations_per_token
    assert half.weight_bytes < onednn.weight_bytes


class Attention(nn.Module):
    """Siblings, called in any order."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(IN, out, bias=False) for out in (OUT, 16, 16))
        self.o_proj = nn.Linear(OUT, IN)


def test_layers_that_share_a_product_may_be_called_in_any_order_and_with_other_inputs():
    module, x, y = Attention(), torch.randn(3, IN), torch.randn(2, IN)
    stock = {name: layer.weight.detach().clone() for name, layer in module.named_children()}
    assert [names for _, names in linear_groups(module)] == [("q_proj", "k_proj", "v_proj"), ("o_proj",)]
    AutoExecutor(["plain"]).load(module)
    for name, given in (("v_proj", x), ("q_proj", y), ("k_proj", x), ("q_proj", x), ("k_proj", x), ("v_proj", x)):
        torch.testing.assert_close(module.get_submodule(name)(given), given @ stock[name].T)


def test_a_deleted_module_frees_its_weights():
    before = set(layers._by_number)
    module = Attention()
    AutoExecutor(["half", "plain"]).load(module)
    assert set(layers._by_number) - before
    del module
    gc.collect()
    assert not set(layers._by_number) - before


def test_another_dtype_or_a_weight_that_fits_no_kind_stays_as_it_is():
    module = Attention()  # 32-bit values
    AutoExecutor(["half"]).load(module)
    assert {type(m.product) for m in module.modules() if isinstance(m, PackedLinear)} == {Plain}


def test_the_sample_of_weights_is_bounded_and_has_every_shape(monkeypatch):
    """Of a large model only the sample is ever stacked for timing."""
    monkeypatch.setattr(autotune, "SAMPLE_BYTES", 2 * OUT * IN * 4)
    groups = [(nn.ModuleDict({"a": nn.Linear(IN, OUT)}), ("a",)) for _ in range(9)]
    groups.append((nn.ModuleDict({"a": nn.Linear(IN, 2)}), ("a",)))
    executor = AutoExecutor(["onednn", "plain"])
    assert [w.shape[0] for w, _ in executor._sample(groups, exact=True)] == [OUT] * 3 + [2]
    executor.table.add({f"{OUT}x{IN} float32": {"onednn": [1.0] * 4, "plain": [1.0] * 4}})
    assert [w.shape[0] for w, _ in executor._sample(groups, exact=True)] == [2]


@pytest.mark.parametrize("largest", [1e-37, 0.0])
def test_weights_too_small_to_scale_stay_as_they_are(largest):
    assert scale_of(torch.full((2, 2), largest)) == 1


def test_other_processes_measurements_are_kept(tmp_path):
    path = tmp_path / "products.json"
    ours, theirs = ProductTable(path, "m"), ProductTable(path, "m")
    theirs.add({"2x3 float32": {"half": [1.0] * 4}})
    ours.add({"5x3 float32": {"half": [2.0] * 4}})
    assert set(ProductTable(path, "m").shapes) == {"2x3 float32", "5x3 float32"}


def test_a_float16_drafter_with_rounded_inputs_loads():
    """float16 has no oneDNN product on most processors."""
    module = Attention().half()
    AutoExecutor(["onednn", "int8", "plain"]).load(module, exact=False)
    assert module.get_submodule("o_proj")(torch.randn(2, OUT).half()).shape == (2, IN)


def test_layers_say_the_dtype_of_their_weight():
    """Routers of mixtures of experts ask their layer for it."""
    module = Attention().bfloat16()
    AutoExecutor(["plain"]).load(module)
    assert {module.get_submodule(n).weight.dtype for n in ("q_proj", "v_proj", "o_proj")} == {torch.bfloat16}


def test_options_know_their_settings():
    """`executor=prepacked` is the default executor with one kind of product."""
    option: Option = parts_of("target.path=shipped:target", "executor=prepacked", "drafter=ngram").target.executor.kinds
    assert option == [OneDnn]
