"""How many kernels a round launches, with models of 3B and 1B weights on a device without memory."""

from collections import Counter

import pytest
import torch

pytest.importorskip("triton")

from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM
from without_guard import WithoutGuard

from specbench.cache.slots import StaticCache
from specbench.decoding import sampling, transfers
from specbench.decoding.rows import Rows, last_tokens
from specbench.decoding.sampling import Sampling
from specbench.drafters.model import Inputs, ModelDrafter
from specbench.executors.cudagraph import CudaGraphExecutor
from specbench.executors.pytree import flatten_arguments
from specbench.kernels import attention, fused, ops
from specbench.measure.recorder import round_numbers
from specbench.models.language_model import LanguageModel
from specbench.verifiers.base import SpeculativeVerifier

VIEWS = {"view", "_unsafe_view", "transpose", "t", "unsqueeze", "squeeze", "expand", "slice", "select", "split",
         "permute", "as_strided", "alias", "detach", "unbind", "reshape", "empty", "empty_like", "new_empty",
         "empty_strided", "new_empty_strided", "lift_fresh", "_reshape_alias"}  # fmt: skip
LAUNCHES = {"specbench::softmax": 2, "specbench::race": 2, "specbench::chain_verdict": 2}
V, COLUMNS, GAMMA = 128_256, 1024, 5
SHAPES = {
    "3B": {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "head_dim": 128},
    "1B": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64},
}
KERNELS = {fused: ("begin_kernel", "project_kernel", "multiply_kernel"), attention: ("attend_split",)}


class Nodes(TorchDispatchMode):
    """Counts what is launched: PyTorch's operations that are no views, and Triton's kernels."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        space, name = func._schema.name.split("::")
        if space != "prim" and name not in VIEWS:
            self.found[name] += LAUNCHES.get(func._schema.name, 1)
        return func(*args, **(kwargs or {}))

    def of(self, function, *given):
        """What the function returns. Its results are copied once more, as the last nodes of its graph."""
        with self:
            result = function(*given)
            for tensor in flatten_arguments(result)[1]:
                torch.empty_like(tensor).copy_(tensor)
        return result


class Kernel:
    """Counts itself, and computes nothing."""

    def __init__(self, name, found):
        self.name, self.found = name, found

    def __getitem__(self, grid):
        return self

    def __call__(self, *given, **more):
        self.found[self.name] += 1


@pytest.fixture
def nodes(monkeypatch):
    counted = Nodes()
    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, Kernel(name, counted.found))
    monkeypatch.setattr(ops, "run_on", lambda device: device.type == "cuda")
    monkeypatch.setattr(sampling, "kernels", ops)
    for name in ("allclose", "equal"):  # nothing has a value
        monkeypatch.setattr(torch, name, lambda *given, **more: True)
    monkeypatch.setattr(CudaGraphExecutor, "compiled", lambda self, function, *models: function)
    monkeypatch.setattr(CudaGraphExecutor, "mark", lambda self, stage: counted.found.update([stage]))
    for kept in (transfers._kept, transfers.counts, attention.counters):
        kept.cache_clear()
    with torch.inference_mode(False), FakeTensorMode(), torch.no_grad(), WithoutGuard():
        yield counted
    for kept in (transfers._kept, transfers.counts, attention.counters):
        kept.cache_clear()


def empty(*shape, dtype=torch.long):
    return torch.empty(*shape, dtype=dtype, device="cuda")


def model_of(shape, drawn, attention):
    config = LlamaConfig(vocab_size=V, intermediate_size=8192, num_key_value_heads=8, max_position_embeddings=2048,
                         tie_word_embeddings=True, attn_implementation="sdpa", **SHAPES[shape])  # fmt: skip
    with unset_fake_temporarily(), torch.device("meta"):
        module = LlamaForCausalLM(config).eval().to(torch.bfloat16).requires_grad_(False)
    module._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device="cuda"))
    model = LanguageModel(module, None, name=shape, sampling=drawn, new_cache=StaticCache,
                          executor=CudaGraphExecutor(), attention=attention)  # fmt: skip
    model.allocate(1, COLUMNS)
    model.forward(empty(1, 2), empty(1), COLUMNS, keep_logits=1)
    return model


@pytest.mark.parametrize(("temperature", "attention"), [(1, "auto"), (0, "auto"), (1, "sdpa")])
def test_a_round_of_3b_with_1b_launches_few_kernels(temperature, attention, nodes):
    drawn = Sampling(temperature=temperature)
    target, guide = model_of("3B", drawn, attention), model_of("1B", drawn, attention)
    assert (target.fused is not None) == (guide.fused is not None) == (attention == "auto")
    rows = Rows(empty(1, COLUMNS), empty(1), empty(1), empty(1, dtype=torch.bool), empty(3, 1, COLUMNS), empty(2))
    drafter, verifier = ModelDrafter(guide, V, GAMMA), SpeculativeVerifier(drawn)
    nodes.found.clear()
    with nodes:
        inputs = Inputs(*last_tokens(rows, 2), (), COLUMNS)
    draft, scores, verdict, kept, _ = nodes.of(
        drafter._round, target, verifier, rows, GAMMA, inputs, COLUMNS, empty(1), None
    )
    nodes.of(round_numbers, scores.p, draft, verdict, kept, verifier.beta)
    total = sum(nodes.found.values())
    print(total, nodes.found)
    if attention == "auto":
        layers = 28 + 16 * GAMMA
        assert nodes.found["attend_split"] == nodes.found["project_kernel"] == layers
        assert nodes.found["multiply_kernel"] == 3 * layers + 1 + GAMMA
        assert total <= 750
    else:  # negative control: without the fused step
        assert total > 3000
