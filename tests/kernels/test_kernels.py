"""The attention kernel against attention written as a loop, and decoding with it against decoding with SDPA.

Without a GPU the kernel runs in Triton's interpreter, and is compiled for an H100.
"""

import copy
from functools import cached_property

import pytest
import torch
from decoder_cases import CACHES, queued, verifier_of

pytest.importorskip("triton")

from torch.nn import functional as F
from triton import knobs

from specbench.decoding.sampling import Sampling
from specbench.decoding.sequence import Sequence
from specbench.decoding.token_tree import newest, static_tree
from specbench.drafters.model import ModelDrafter
from specbench.drafters.tree import TreeDrafter
from specbench.drafters.tree_shapes import FixedTree
from specbench.errors import ConfigError
from specbench.executors.eager import EagerExecutor
from specbench.kernels import attention
from specbench.models.attention_mask import aligned_bias
from specbench.models.language_model import LanguageModel
from specbench.models.reference_forward import reads_trees
from specbench.policies.base import FixedGamma
from specbench.verifiers.base import SpeculativeVerifier
from specbench.verifiers.trees import IterativeVerifier

DEVICE = "cpu" if knobs.runtime.interpret else "cuda"
pytestmark = pytest.mark.cuda
SIX, SEVENTEEN = (0, 0, 1, 1, 2), (0, 0, 0, 1, 1, 2, 3, 3, 4, 4, 6, 7, 7, 9, 11, 11)  # parents of nodes


class Problem:
    """Random queries, keys and values in shuffled blocks; `right` is attention as its definition says."""

    def __init__(self, N, heads, key_heads, D, rows, block=None, parents=None, window=None, dtype=torch.float32):
        generator = torch.Generator().manual_seed(N + D)
        self.parents, self.window, self.block = parents, window, block or 90
        self.first = torch.tensor(rows)
        width = -(-90 // self.block)
        numbers = torch.randperm(len(rows) * width + 1, generator=generator)[1:]
        self.table = numbers.view(len(rows), width)
        stored = (len(numbers) + 1, self.block, key_heads, D)  # as a pool of columns
        self.q = torch.randn(len(rows), N, heads, D, generator=generator).to(dtype).transpose(1, 2)
        self.keys, self.values = (torch.randn(stored, generator=generator).to(dtype).transpose(1, 2) for _ in range(2))
        self.tree = None
        if parents is not None:
            device = torch.device("cpu")
            whole = len(parents) + 1 == N
            self.tree = static_tree(parents, device) if whole else newest(parents, N, device)

    def found(self, **changes) -> torch.Tensor:
        """The kernel's result, with changed arguments."""
        sees, depth = (None, None) if self.tree is None else (self.tree.sees, self.tree.depth)
        given = {"q": self.q, "keys": self.keys, "values": self.values, "table": self.table, "first": self.first,
                 "sees": sees, "depth": depth} | changes  # fmt: skip
        moved = {name: None if t is None else t.to(DEVICE) for name, t in given.items()}
        scale = self.q.shape[-1] ** -0.5
        return attention.attend(**moved, scale=scale, window=self.window).cpu().double()

    @cached_property
    def right(self) -> torch.Tensor:
        b, heads, N, D = self.q.shape
        group = heads // self.keys.shape[1]
        result = torch.zeros(b, N, heads, D, dtype=torch.float64)
        for i in range(b):
            place = [(int(self.table[i, c // self.block]), c % self.block) for c in range(90)]
            for n in range(N):
                columns = self.columns(int(self.first[i]), n, N)
                for h in range(heads):
                    k, v = (
                        torch.stack([x[place[c][0], h // group, place[c][1]] for c in columns]).double()
                        for x in (self.keys, self.values)
                    )
                    result[i, n, h] = (k @ self.q[i, h, n].double() * D**-0.5).softmax(0) @ v
        return result

    def columns(self, first: int, n: int, N: int) -> list[int]:
        """The columns that new token n sees, from the parents of the tree."""
        if self.parents is None:
            position, seen = max(first + n, 0), list(range(max(first + n, 0) + 1))
            return [c for c in seen if self.window is None or c > position - self.window]
        root = first - (len(self.parents) + 1 - N)
        node, path = len(self.parents) + 1 - N + n, []
        while node:
            path, node = [node, *path], self.parents[node - 1]
        at = [*range(root + 1), *(root + node for node in path)]  # in order of position
        return at if self.window is None else at[-self.window :]

    def error(self, **changes) -> float:
        return float((self.found(**changes) - self.right).abs().max())


@pytest.fixture
def splits(monkeypatch):
    """Several splits for the problems below."""
    monkeypatch.setattr(attention, "PART", 16)
    monkeypatch.setattr(attention, "tile_shape", lambda *given: (16, 4))


CASES = {
    "one token": dict(N=1, heads=4, key_heads=1, D=64, rows=[70, 3]),
    "chain": dict(N=6, heads=24, key_heads=8, D=128, rows=[70]),
    "chain in blocks": dict(N=6, heads=4, key_heads=1, D=128, rows=[70, 0, 33], block=16),
    "long chain in blocks": dict(N=17, heads=8, key_heads=8, D=80, rows=[64], block=4),
    "before the text": dict(N=3, heads=4, key_heads=1, D=64, rows=[-2, 20]),
    "tree": dict(N=6, heads=24, key_heads=8, D=128, rows=[61], parents=SIX),
    "tree in blocks": dict(N=6, heads=4, key_heads=1, D=64, rows=[5, 70], parents=SIX, block=16),
    "large tree": dict(N=17, heads=4, key_heads=1, D=64, rows=[70], parents=SEVENTEEN),
    "newest of a tree": dict(N=6, heads=4, key_heads=2, D=64, rows=[40], parents=SEVENTEEN, block=7),
    "window": dict(N=6, heads=4, key_heads=1, D=64, rows=[70, 3], window=20),
    "window and tree": dict(N=6, heads=4, key_heads=1, D=64, rows=[70, 3], window=20, parents=SIX, block=16),
}


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_computes_attention(case, splits):
    assert Problem(**CASES[case]).error() < 2e-6


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_sixteen_bits_round_inputs_and_results_only(dtype, allowed, splits):
    assert Problem(**CASES["tree in blocks"], dtype=dtype).error() < allowed


def test_errors_are_seen(splits):
    """Negative controls: an ancestor too many and one too few, two blocks exchanged, a length off by one."""
    problem = Problem(**CASES["tree in blocks"])
    sees = problem.tree.sees.clone()
    for node, entry in ((5, 1), (5, 2)):
        wrong = sees.clone()
        wrong[0, node, entry] ^= True
        assert problem.error(sees=wrong) > 1e-3
    assert problem.error(table=problem.table[:, [1, 0, 2, 3, 4, 5]]) > 1e-3
    assert problem.error(first=problem.first + 1) > 1e-3
    window = Problem(**CASES["window"])
    assert window.error() < 2e-6 and window.error(first=torch.tensor([69, 3])) > 1e-3


def test_a_row_is_bitwise_the_same_alone_beside_others_and_in_blocks(splits, monkeypatch):
    problem = Problem(N=4, heads=4, key_heads=1, D=64, rows=[70, 33], block=16)
    both = problem.found()
    q, table, first = problem.q, problem.table, problem.first
    assert problem.found(q=q[:1], table=table[:1], first=first[:1]).equal(both[:1])  # rows
    assert problem.found(q=q[:, :, :1]).equal(both[:, :1])  # new tokens
    keys, values = (x[table].transpose(1, 2).flatten(2, 3) for x in (problem.keys, problem.values))  # [b, K, T, D]
    assert problem.found(keys=keys, values=values, table=torch.arange(2)[:, None]).equal(both)  # cache
    longer = Problem(N=4, heads=4, key_heads=1, D=64, rows=[30], block=16)
    assert longer.found(q=longer.q[:, :, :1]).equal(longer.found()[:, :1])  # of 2 splits and of 3
    monkeypatch.setattr(attention, "PART", 48)
    other = problem.found()  # negative control: another order of sums
    assert not other.equal(both) and torch.allclose(other, both, atol=1e-5)


def test_the_order_in_which_splits_finish_changes_no_bit(splits, monkeypatch):
    """And every call leaves the counters 0, as the next one needs them."""
    from triton.runtime import interpreter

    problem = Problem(**CASES["tree in blocks"])
    found = problem.found()
    turned = lambda *given: range(*given)[::-1] if len(given) == 1 else range(*given)  # noqa: E731
    monkeypatch.setattr(interpreter, "range", turned, raising=False)  # of the programs, not of a kernel's loops
    assert torch.equal(problem.found(), found)
    monkeypatch.undo()
    monkeypatch.setattr(attention, "PART", 16)
    monkeypatch.setattr(attention, "tile_shape", lambda *given: (16, 4))
    counters = attention.counters(problem.q.to(DEVICE).device, 4)  # rows, tiles and key heads
    assert not counters.any()
    counters += 1  # negative control: a program takes itself for the last one, and reads what no other has written
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **words: empty(*shape, **words).fill_(1e9))
    assert not torch.equal(problem.found(), found)
    counters.zero_()


def tiny_llama(seed: int = 0, **more):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=1,
        vocab_size=64, max_position_embeddings=96, initializer_range=0.3, attn_implementation="sdpa", **more,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to(DEVICE)


def language_model(module, how, cache="static"):
    return LanguageModel(copy.deepcopy(module), None, name="tiny", sampling=Sampling(temperature=0),
                         new_cache=CACHES[cache], executor=EagerExecutor(), attention=how)  # fmt: skip


def similar(module):
    """A module that often guesses what this one would say."""
    other = copy.deepcopy(module)
    for weight in other.parameters():
        weight.mul_(1 + 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).to(weight.device))
    return other


def decode(module, how, cache="static", kind="chain", rows=1, new=6):
    prompts = [[5, 9, 2, 7, 11, 30], [3] * 19, [8, 1]][:rows]
    sampling, target = Sampling(temperature=0), language_model(module, how, cache)
    judge = verifier_of(SpeculativeVerifier if kind == "chain" else IterativeVerifier, sampling)
    jobs = [Sequence(prompt, len(prompt) + new, key) for key, prompt in enumerate(prompts)]
    guide, drafter = language_model(similar(module), how, cache), None
    if kind == "chain":
        drafter = ModelDrafter(guide, 64, 3)
    elif kind == "tree":
        drafter = TreeDrafter(guide, 64, 3, FixedTree([2, 2], "best"))
    queue = queued(target, drafter, jobs, rows, judge, FixedGamma(3), spare=12)
    return [sequence.generated for sequence in queue.sequences]


@pytest.mark.parametrize(("cache", "kind", "rows"), [
    ("paged", "chain", 1), ("static", "tree", 1),
    *(pytest.param(*other, 3, marks=pytest.mark.slow) for other in (("static", "chain"), ("paged", "tree"))),
])  # fmt: skip
def test_decoding_with_kernels_gives_the_tokens_of_the_module(cache, kind, rows):
    module = tiny_llama()
    expected = decode(module, "sdpa", kind=None, rows=rows)
    assert decode(module, "triton", cache, kind, rows) == expected


def test_a_wrong_kernel_gives_other_tokens(monkeypatch):
    """Negative control: tokens see one column less."""
    module, attend = tiny_llama(), attention.attend

    def short(q, keys, values, table, first, *others, **more):
        return attend(q, keys, values, table, first - 1, *others, **more)

    monkeypatch.setattr(attention, "attend", short)
    assert decode(module, "triton", kind=None, new=4) != decode(module, "sdpa", kind=None, new=4)


def test_one_shape_serves_every_length_of_few_tokens():
    for how, new, expected in (("triton", 3, {128}), ("triton", 65, {71, 82, 95}), ("sdpa", 3, {9, 20, 33})):
        model = language_model(tiny_llama(), how)
        model.allocate(1, 128)
        assert {model.rollback_to([start], new) for start in (6, 17, 30)} == expected


def test_the_step_is_checked_on_the_model_that_uses_it(monkeypatch, caplog):
    from transformers import MistralConfig, MistralForCausalLM

    caplog.set_level("INFO")
    torch.manual_seed(0)
    config = MistralConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
                           num_key_value_heads=1, vocab_size=64, sliding_window=3)  # fmt: skip
    model = language_model(MistralForCausalLM(config).eval().to(DEVICE), "triton")
    assert reads_trees(model, "target.path=tiny") and model.fused is not None
    attend = attention.attend
    monkeypatch.setattr(attention, "attend", lambda *given: attend(*given[:-1], None))  # without the window
    with pytest.raises(ConfigError, match="attention=triton is not possible for tiny: logits differ"):
        reads_trees(model, "target.path=tiny")
    model.attention = "auto"
    assert reads_trees(model, "target.path=tiny") and model.fused is None
    assert "tiny runs as it is written, and not layer by layer in few operations: logits differ" in caplog.text


def test_the_bias_of_sdpa_on_cuda_is_the_mask_and_its_rows_are_aligned():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 16, generator=generator) for n in (5, 21, 21))
    seen = torch.rand(2, 1, 5, 21, generator=generator) < 0.5
    seen[..., 0] = True
    bias = aligned_bias(seen, torch.float32)
    masked, biased = (F.scaled_dot_product_attention(q, k, v, attn_mask=mask) for mask in (seen, bias))
    assert torch.allclose(masked, biased, atol=1e-6)
    assert bias.shape == seen.shape and bias.stride(-1) == 1 and all(s % 8 == 0 for s in bias.stride()[:3])
