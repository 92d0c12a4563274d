"""The product of a CPU: exact up to rounding, the same for a row in any batch, and the stock module stays as it is."""

import copy

import pytest
import torch
from small_runs import parts_of
from torch import nn

from specbench.executors.eager import EagerExecutor
from specbench.executors.half_linear import HalfLinear, is_half, joined, scale_of, with_half_weights
from specbench.kernels import half_pairs

OUT, IN = 48, 96


def layer(bits: int = 16, biased: bool = False) -> nn.Linear:
    """A layer whose weight spans some 30 binades, in 16 or 32 bits each."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(OUT, IN, generator=generator) * 2.0 ** torch.randint(-14, 2, (OUT, IN), generator=generator)
    made = nn.Linear(IN, OUT, bias=biased)
    made.weight.data = w.bfloat16().float() if bits == 16 else w
    return made


def halved(made: nn.Linear) -> nn.Module:
    return with_half_weights(nn.Sequential(made))[0]


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 13, 64])
@pytest.mark.parametrize("biased", [False, True])
def test_the_product_is_the_exact_one_up_to_rounding(biased, rows):
    stock = layer(biased=biased)
    product, x = halved(stock), torch.randn(2, rows, IN)
    assert type(product) is HalfLinear
    exact = x.double() @ stock.weight.double().T + (stock.bias.double() if biased else 0)
    size = x.double().abs() @ stock.weight.double().abs().T
    assert ((product(x).double() - exact).abs() <= 1e-5 * size + 1e-6).all()
    strided = x.transpose(0, 1)
    assert torch.equal(product(strided), product(strided.contiguous()))


def test_no_digit_of_a_16_bit_weight_is_lost():
    stock = layer()
    assert not is_half(stock.weight)  # without the scale some would be
    assert torch.equal(halved(stock)(torch.eye(IN)).T, stock.weight)


def test_a_row_does_not_depend_on_its_neighbours():
    product, x = halved(layer()), torch.randn(70, IN)
    alone = torch.cat([product(row[None]) for row in x])
    for rows in (2, 5, 9, 40, 70):
        assert torch.equal(product(x[:rows]), alone[:rows])


@pytest.mark.parametrize("made", [
    layer(bits=32), layer().double(), nn.Linear(IN, OUT + 1).bfloat16().float(),
    nn.Linear(IN + 1, OUT).bfloat16().float(),
])  # fmt: skip
def test_other_layers_stay_as_they_are(made):
    assert halved(made) is made


def test_products_of_one_input_are_joined_if_no_digit_is_lost():
    far, near, ones = layer(), layer(), torch.eye(IN)
    far.weight.data *= 2.0**20
    for other, joins in ((near, True), (far, False)):
        parts = halved(layer()), halved(other)
        right = torch.cat([part(ones) for part in parts], -1)
        found = joined(parts)
        assert len(found) == (1 if joins else 2)
        assert torch.equal(torch.cat([part(ones) for part in found], -1), right)
        assert torch.equal(torch.cat([part(ones) for part in copy.deepcopy(parts)], -1), right)


@pytest.mark.parametrize("largest", [1e-37, 0.0])
def test_weights_too_small_to_scale_stay_as_they_are(largest):
    assert scale_of(torch.full((2, 2), largest)) == 1


def test_without_a_compiler_layers_stay_as_they_are(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "false")  # a compiler that fails
    monkeypatch.setattr(half_pairs, "COMPILERS", ())
    made = layer()
    with caplog.at_level("INFO"):
        assert halved(made) is made
    assert "half_pairs cannot be compiled by false" in caplog.text and not list(tmp_path.rglob("*.so"))


def test_a_model_computes_the_stock_modules_logits_and_reads_half_of_its_bytes():
    target = parts_of("target.path=shipped:target", "drafter=ngram", "executor=eager").target
    plain = parts_of(
        "target.path=shipped:target", "drafter=ngram", "executor=eager", "executor.half_weights=false"
    ).target
    text = torch.arange(24)[None] * 7
    ours, stock = target.module(text).logits, target.stock(text).logits
    assert 0 < (ours - stock).abs().max() < 1e-4
    assert torch.equal(plain.module(text).logits, stock)
    linear = [part for part in target.stock.modules() if type(part) is nn.Linear]
    assert len(linear) == sum(type(part) is HalfLinear for part in target.module.modules()) > 20
    assert target.operations_per_token == plain.operations_per_token > 20e6
    assert target.step_bytes == plain.step_bytes - 2 * sum(part.weight.numel() for part in linear)


def test_a_copy_shares_what_is_not_replaced():
    stock = nn.Sequential(nn.Embedding(5, IN), layer(), nn.LayerNorm(OUT))
    before = copy.deepcopy(stock.state_dict())
    found = EagerExecutor().load(stock)
    assert found is not stock and found[0].weight is stock[0].weight and type(stock[1]) is nn.Linear
    assert found[1].weight.dtype == torch.float32  # routers of mixtures of experts ask their layer for it
    assert all(torch.equal(stock.state_dict()[name], value) for name, value in before.items())
