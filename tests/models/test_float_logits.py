"""Logits of models in 16 bits are float32, of the same weights, in the decoder on CUDA and in the stock module."""

from types import SimpleNamespace

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from specbench.models import float_logits
from specbench.models.float_logits import FloatLinear, with_float_logits
from specbench.models.reference_forward import stock_logits

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 67}  # fmt: skip
TEXT = torch.tensor([[5, 9, 2, 7, 11]])


def llama(dtype=torch.bfloat16, **more):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.5, **more)).eval().to(dtype)


def exact(module, hidden):
    """The logits of hidden states [b, N, H], in float64."""
    return hidden.double() @ module.lm_head.weight.double().T


def hidden_of(module):
    return module.model(input_ids=TEXT).last_hidden_state


def test_the_product_is_not_rounded(monkeypatch):
    monkeypatch.setattr(float_logits, "ROWS", 20)  # several parts
    module = llama()
    found, rounded = with_float_logits(module)(input_ids=TEXT).logits, module(input_ids=TEXT).logits
    right = exact(module, hidden_of(module))
    assert found.dtype == torch.float32 and (found - right).abs().max() < 1e-5
    assert (rounded - right).abs().max() > 1e-3  # negative control


@pytest.mark.parametrize("tied", [False, True])
def test_no_weight_is_there_twice_and_the_stock_module_stays(tied):
    module = llama(tie_word_embeddings=tied)
    own = with_float_logits(module)
    assert [id(p) for p in own.parameters()] == [id(p) for p in module.parameters()]
    assert type(own.get_output_embeddings()) is FloatLinear and type(module.lm_head) is torch.nn.Linear
    assert module(input_ids=TEXT).logits.dtype == torch.bfloat16


def test_what_follows_the_product_stays():
    torch.manual_seed(0)
    config = Gemma2Config(**SIZES, final_logit_softcapping=2.0, initializer_range=0.5, attn_implementation="eager")
    module = Gemma2ForCausalLM(config).eval().bfloat16()
    right = exact(module, hidden_of(module))
    found = with_float_logits(module)(input_ids=TEXT).logits
    assert found.dtype == torch.float32 and (found - 2 * (right / 2).tanh()).abs().max() < 1e-5


def test_what_is_no_plain_layer_in_16_bits_is_left_alone():
    assert with_float_logits(module := llama(torch.float32)) is module
    module = llama()
    module.lm_head.register_forward_hook(lambda *given: None)
    assert with_float_logits(module) is module
    other = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=67)).bfloat16()
    assert with_float_logits(other)(input_ids=TEXT).logits.dtype == torch.float32


def test_the_stock_module_is_read_in_float32_and_stays_as_it_is():
    module = llama()
    model = SimpleNamespace(stock=module, decoder=SimpleNamespace(skips_logits=True), start_tokens=None)
    found = stock_logits(model, TEXT, 2)
    module.set_attn_implementation("eager")
    right = exact(module, hidden_of(module))[0, 1:-1]
    assert found.dtype == torch.float32 and (found - right).abs().max() < 1e-5
    assert type(module.lm_head) is torch.nn.Linear and module(input_ids=TEXT).logits.dtype == torch.bfloat16
