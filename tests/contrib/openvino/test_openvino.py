"""The OpenVINO executor: which modules it converts, what it refuses, and what it leaves alone."""

import importlib.util

import pytest
import torch
from choosing import slow_unless
from decoder_cases import CACHES
from small_runs import composed
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaForCausalLM

from specbench.config.validate import check
from specbench.contrib.openvino.executor import OpenVINOExecutor
from specbench.contrib.openvino.program import OpenVINOProgram, whole_columns
from specbench.decoding.draft import Draft
from specbench.decoding.sampling import Sampling
from specbench.errors import ConfigError
from specbench.executors.eager import EagerExecutor
from specbench.models.language_model import LanguageModel
from specbench.models.shared_cache import NearColumns

needs_openvino = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")
V = 61
SMALL = dict(vocab_size=V, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, max_position_embeddings=64)  # fmt: skip
MIXED = ["sliding_attention", "full_attention"]
SHAPES = {
    "llama": SMALL,  # grouped queries
    "gemma3_text": SMALL | dict(sliding_window=6, layer_types=MIXED),  # two masks, scaled embeddings
    "gpt2": dict(vocab_size=V, n_embd=64, n_layer=2, n_head=4, n_positions=64),  # learned positions
}


def module_of(kind: str, **more):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**SHAPES.get(kind, SMALL), **more)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def model_of(module, executor, cache="static") -> LanguageModel:
    made = CACHES[cache]
    return LanguageModel(module, None, name="tiny", sampling=Sampling(), new_cache=made, executor=executor)


def some_logits(model: LanguageModel) -> list[torch.Tensor]:
    """A text, a tree after it, a rollback to other lengths, one row alone, and embeddings."""
    text, nodes = (torch.randint(V, (2, n), generator=torch.Generator().manual_seed(n)) for n in (20, 5))
    tree = Draft.tree(nodes, (-1, -1, 0, 1, 1), None, torch.tensor([5, 5]))
    model.allocate(2, 40)
    found = [
        model.logits(text[:, :-1], [0, 0]),
        model.logits(torch.cat([text[:, -1:], nodes], 1), [19, 19], tree),
        model.logits(nodes, [15, 7]),
        model.read_row(text[:1], 1, 3, 12),
        model.read_row(text[1:], 0, 3, 14, keep_logits=2),
    ]
    embedded = model.module.get_input_embeddings()(nodes)
    visible = model.make_room([9, 9], 5)
    return [*found, model.forward(embedded, torch.tensor([9, 9]), visible)]


@needs_openvino
@pytest.mark.parametrize(("kind", "cache"), [
    ("gpt2", "paged"), slow_unless(False, "gemma3_text", "static"), slow_unless(False, "llama", "dynamic")
])  # fmt: skip
def test_logits_are_those_of_eager_mode(kind, cache):
    module = module_of(kind)
    expected = some_logits(model_of(module, EagerExecutor(), cache))
    for found, wanted in zip(some_logits(model_of(module, OpenVINOExecutor(), cache)), expected, strict=True):
        assert found.shape == wanted.shape
        assert torch.allclose(found, wanted, atol=1e-4)


@needs_openvino
def test_a_window_reads_its_own_columns():
    module, text = module_of("llama"), torch.randint(V, (2, 20), generator=torch.Generator().manual_seed(1))
    found = []
    for executor in (EagerExecutor(), OpenVINOExecutor()):
        owner = model_of(module, executor)
        owner.allocate(2, 40)
        owner.logits(text[:, :-1], [0, 0])
        near = NearColumns(owner, Sampling(), 2, 5)
        near.borrow()
        found.append(near.logits(text[:, -1:], [19, 4]))
    assert torch.allclose(*found, atol=1e-4)
    assert not torch.allclose(found[0][0], owner.logits(text[:, -1:], [19, 4])[0], atol=1e-3)  # control: all columns


@needs_openvino
def test_the_stock_module_stays_as_it_is():
    module, executor = module_of("llama"), OpenVINOExecutor()
    model = model_of(module, executor)
    assert isinstance(vars(model.module)["forward"], OpenVINOProgram)
    assert model.stock_module() is module and "forward" not in vars(module)
    assert executor.load(model.module) is model.module  # a drafter that is the target shares its program
    embedding = module.get_input_embeddings().weight
    assert executor.bytes() == sum(p.nbytes for p in module.parameters()) - embedding.nbytes


@needs_openvino
def test_bfloat16_is_close_to_eager_mode():
    module = module_of("llama").to(torch.bfloat16)
    expected = some_logits(model_of(module, EagerExecutor()))
    for found, wanted in zip(some_logits(model_of(module, OpenVINOExecutor())), expected, strict=True):
        assert found.dtype == torch.bfloat16 and torch.allclose(found, wanted, atol=0.05)


class Doubling(nn.Module):
    """An output matrix that a trace cannot follow: it doubles the logits of some texts only."""

    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, hidden):
        logits = self.output(hidden)
        return 2 * logits if hidden.shape[0] == 3 else logits


@needs_openvino
def test_a_module_that_computes_something_else_afterwards_is_refused():
    module = module_of("llama")
    module.lm_head = Doubling(module.lm_head)
    with pytest.raises(ConfigError, match="LlamaForCausalLM: converted, its logits differ by"):
        OpenVINOExecutor().load(module)


class Sorting(LlamaForCausalLM):
    """A model with an operation that OpenVINO has not got."""

    def forward(self, *arguments, **named):
        output = super().forward(*arguments, **named)
        output.logits = output.logits + torch.histc(output.logits, 4).sum() * 0
        return output


@needs_openvino
def test_a_module_that_cannot_be_converted_is_named():
    module = module_of("llama")
    module.__class__ = Sorting
    with pytest.raises(ConfigError, match=r"with Sorting, which OpenVINO cannot convert \(.*aten::histc\): choose"):
        OpenVINOExecutor().load(module)
    assert module.config._attn_implementation == "sdpa"


def test_without_the_package_the_choice_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"executor=openvino is not possible without OpenVINO: pip "
                                          r"install 'speculative-decoding-bench\[openvino\]'"):  # fmt: skip
        check(composed("executor=openvino", "device=cpu"))


def test_columns_are_given_whole_where_that_is_no_copy():
    stored = torch.randn(2, 3, 10, 4)
    most = whole_columns(stored[:, :, :6])
    assert most.data_ptr() == stored.data_ptr() and most.shape[2] == 10
    assert torch.equal(whole_columns(stored[1:, :, :6]), stored[1:])
    few = whole_columns(stored[:, :, :4])  # of 10: attention would read too many
    assert few.data_ptr() != stored.data_ptr() and torch.equal(few, stored[:, :, :4])
    for heads in (1, 3):  # as the paged cache gives them
        paged = torch.randn(2, 6, heads, 4).transpose(1, 2)
        assert torch.equal(whole_columns(paged), paged) and whole_columns(paged).is_contiguous()
