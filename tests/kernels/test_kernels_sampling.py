"""The Triton kernels of sampling against the plain code, which runs on the CPU: the same tokens, the same distribution.

Without a GPU the kernels run in Triton's interpreter, in tiles of many rows to be fast.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch
from choosing import in_turn
from random_cases import random_bits
from scheduler_cases import decode, jobs
from torch.utils._python_dispatch import TorchDispatchMode

from specbench.decoding import sampling
from specbench.decoding.draft import Draft
from specbench.decoding.sampling import Sampling, draw
from specbench.decoding.verify import at_row, speculative_sampling
from specbench.kernels import ops

triton = pytest.importorskip("triton")
from specbench.kernels import race, softmax, verdict  # noqa: E402

tl = triton.language
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.cuda
sampling.use(ops)
MODULES = (race, softmax, verdict)
# Vocabulary, rows, and the rows and tokens of a tile (None: those of a GPU).
SHAPES = [(1, 1000, None), (7, 8000, (2048, 8)), (512, 500, (512, 128)), (4096, 32, (32, 1024)), (32003, 4, (4, 4096)),
          (2500, 8, None)]  # fmt: skip


@pytest.fixture
def tiles(monkeypatch):
    def use(tile):
        if tile is not None:
            for module in MODULES:
                monkeypatch.setattr(module, "tile", lambda vocab_size: tile)

    return use


def run(operator, *arguments):
    """An operator's results on the CPU."""
    results = operator(*(a.to(DEVICE) if isinstance(a, torch.Tensor) else a for a in arguments))
    return tuple(r.cpu() for r in results) if isinstance(results, tuple) else results.cpu()


def some_distributions(rows, V, generator, spread=3.0):
    """Distributions [rows, V], half of them with many zeros."""
    logits = torch.randn(rows, V, generator=generator) * spread
    few = torch.rand(rows, V, generator=generator) < 0.2
    few[:, 0] = True
    few |= (torch.arange(rows) % 2 == 0)[:, None]
    return logits.masked_fill(~few, -torch.inf).softmax(-1)


@pytest.mark.parametrize(("V", "rows", "tile"), SHAPES)
def test_the_race_has_the_tokens_of_the_plain_code(V, rows, tile, tiles):
    tiles(tile)
    generator = torch.Generator().manual_seed(V)
    weights, bits = some_distributions(rows, V, generator), random_bits((rows,), generator)
    assert torch.equal(run(ops.race, weights, bits), draw(weights, bits))
    if V > 1:  # another stream gives other tokens
        assert not torch.equal(run(ops.race, weights, bits + 1), draw(weights, bits))


def strange_weights(V=300):
    """Rows with ties, zeros, infinities and NaN, with bits."""
    weights = some_distributions(6, V, torch.Generator().manual_seed(1))
    weights[0] = 0
    weights[1, [3, 4, V - 2]] = torch.inf
    weights[2, V - 1] = torch.nan
    weights[3, [70, 71, V - 1]] = torch.nan
    weights[3, [5, V - 2]] = torch.inf
    weights[4] = torch.nan
    weights[5] = 1e-45  # the smallest number above 0
    return weights, random_bits((6,), torch.Generator().manual_seed(2))


def test_ties_zeros_infinities_and_nan_are_those_of_the_plain_code(tiles):
    tiles((4, 64))
    weights, bits = strange_weights()
    tokens = run(ops.race, weights, bits)
    assert torch.equal(tokens, draw(weights, bits))
    assert tokens[:5].tolist() == [0, 3, 299, 70, 0]


def test_shapes_are_kept_and_checked():
    weights, bits = some_distributions(6, 9, torch.Generator().manual_seed(1)), random_bits((6,), torch.Generator())
    square = weights.view(2, 3, 9).transpose(0, 1), bits.view(2, 3).T
    assert torch.equal(run(ops.race, *square), draw(*square))
    assert run(ops.race, weights[:0], bits[:0]).shape == (0,)
    with pytest.raises(ValueError, match=r"bits have shape \(5,\) and need \(6,\)"):
        ops.race(weights, bits[:5])
    p, x, count = weights.view(2, 3, 9), torch.zeros(2, 2, dtype=torch.long), torch.tensor([2, 1])
    with pytest.raises(ValueError, match=r"need \[\(2, 3, 9\), \(2, 2, 9\), \(2, 2\), \(2, 3\), \(2,\)\]"):
        ops.chain_verdict(p, None, x, x.double(), bits.view(2, 3)[:, :2], count)


def chains(V, rows, N, seed):
    """p, q, guesses, r, bits, count of chains: some have q = p, or point masses, or no p above q, or NaN."""
    generator = torch.Generator().manual_seed(seed)
    p = some_distributions(rows * (N + 1), V, generator).view(rows, N + 1, V)
    q = some_distributions(rows * max(N, 1), V, generator).view(rows, -1, V)[:, :N].clone()
    kind = torch.arange(rows) % 8
    q[kind == 0] = p[kind == 0, :N]
    q[kind == 1] = p[kind == 1, :N] * (1 + 1e-6)  # more than p everywhere
    q[kind == 2] = 0.9 * p[kind == 2, :N] + 0.1 * q[kind == 2]
    q[kind == 3] = torch.nn.functional.one_hot(q[kind == 3].argmax(-1), V).float()
    x = torch.multinomial(q.reshape(-1, V), 1, generator=generator).view(rows, N) if N else torch.zeros(rows, 0).long()
    if N:
        p[0, 0, V - 1], q[9 % rows, 0, V - 1] = torch.nan, torch.nan
    r = torch.rand(rows, N, generator=generator, dtype=torch.float64)
    r[kind == 1] *= 2  # beyond 1, so that guesses with p = q are rejected too
    return p, q, x, r, random_bits((rows, N + 1), generator), torch.randint(N + 1, (rows,), generator=generator)


def kernel_verdict(p, q, x, r, bits, count, lenience):
    return run(ops.chain_verdict, p, q, x, r * lenience, bits, count)


def plain_verdict(p, q, x, r, bits, count, lenience):
    found = speculative_sampling(p, Draft.chain(x, q, count), r, bits, lenience)
    return found.tokens, found.accepted


def same(one, other):
    """Whether two verdicts accept as many guesses and have the same tokens up to t."""
    (tokens, n), (others, m) = one, other
    known = torch.arange(tokens.shape[1]) <= m[:, None]
    return torch.equal(n, m) and torch.equal(tokens * known, others * known)


PROBLEMS = ((1, 64, 3, None), (7, 2000, 4, (2048, 8)), (7, 256, 1, None), (512, 64, 5, (64, 128)),
            (4096, 8, 0, (8, 1024)), (4096, 16, 8, (16, 1024)), (32003, 2, 2, (2, 8192)))  # fmt: skip


@pytest.mark.parametrize(("shape", "point", "lenience"), in_turn(PROBLEMS, [*product((False, True), (1.0, 0.7))]))
def test_the_verdict_is_the_plain_codes(shape, point, lenience, tiles):
    V, rows, N, tile = shape
    tiles(tile)
    p, q, *rest = chains(V, rows, N, seed=V + N)
    given = (p, None if point or not N else q, *rest, lenience)
    assert same(kernel_verdict(*given), plain_verdict(*given))


def without_clamp(p, q, x, r, bits, count, lenience):
    _, n = plain_verdict(p, q, x, r, bits, count, lenience)
    left = at_row(p, n) - at_row(q, n.clamp(max=x.shape[1] - 1)) * (n < count)[:, None]
    return recovered(p, x, n, torch.where(left.sum(-1, keepdim=True) > 0, left, at_row(p, n)), bits)


def without_count(p, q, x, r, bits, count, lenience):
    return plain_verdict(p, q, x, r, bits, torch.full_like(count, x.shape[1]), lenience)


def with_another_lenience(p, q, x, r, bits, count, lenience):
    return plain_verdict(p, q, x, r, bits, count, lenience * 0.99)


def recovered(p, x, n, weights, bits):
    t = draw(weights, bits.gather(1, n[:, None])[:, 0])
    return torch.cat([x, t[:, None]], 1).scatter(1, n[:, None], t[:, None]), n


@pytest.mark.parametrize("wrong", [without_clamp, without_count, with_another_lenience])
def test_a_wrong_verdict_is_found(wrong, tiles):
    tiles((1024, 8))
    given = (*chains(7, 1000, 4, seed=11), 0.7)
    assert same(kernel_verdict(*given), plain_verdict(*given))
    assert not same(kernel_verdict(*given), wrong(*given))


@pytest.mark.parametrize(("V", "rows", "tile"), [(1, 3, None), (7, 40, None), (2500, 2, None), (32003, 2, (2, 4096))])
def test_the_softmax_is_pytorchs(V, rows, tile, tiles):
    tiles(tile)
    logits = torch.randn(rows, V, generator=torch.Generator().manual_seed(V)) * 8
    logits[0, : V // 2] = -torch.inf  # a whole split, for the large ones
    found = run(ops.softmax, logits)
    torch.testing.assert_close(found, logits.softmax(-1), rtol=3e-6, atol=0)
    torch.testing.assert_close(found.double().sum(-1), torch.ones(rows, dtype=torch.double), rtol=0, atol=1e-5)
    assert not torch.allclose(found * (1 + 1e-5), logits.softmax(-1), rtol=3e-6, atol=0)


def test_a_softmax_of_nan_or_of_nothing_is_nan(tiles):
    tiles((4, 64))
    logits = torch.zeros(3, 300)
    logits[0, 299], logits[1] = torch.nan, -torch.inf
    assert run(ops.softmax, logits).isnan().all(-1).tolist() == [True, True, False]


class Called(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


def test_on_cuda_the_plain_code_hands_over():
    with torch._subclasses.fake_tensor.FakeTensorMode(), torch.no_grad(), Called() as called:
        integers = {"dtype": torch.long, "device": "cuda"}
        logits, bits = torch.empty(2, 3, 500, device="cuda"), torch.empty(2, 3, **integers)
        draft = Draft.chain(torch.empty(2, 2, **integers), None, torch.empty(2, **integers))
        r = torch.empty(2, 2, dtype=torch.double, device="cuda")
        assert ops.run_on(logits.device)  # the first time with a trial
        called.names.clear()
        p = Sampling().probabilities(logits)
        x = draw(p, bits)
        found = speculative_sampling(p, draft, r, bits, 0.9)
    names = ["aten::to.dtype", "specbench::softmax", "specbench::race", "aten::mul.Tensor", "specbench::chain_verdict"]
    assert called.names == names  # and nothing else, so no synchronisation
    assert (p.shape, x.shape, found.tokens.shape, found.accepted.shape) == ((2, 3, 500), (2, 3), (2, 3), (2,))
    with Called() as called:
        draw(torch.ones(2, 5), torch.ones(2, dtype=torch.long))
    assert "specbench::race" not in called.names


def test_where_no_kernel_can_be_launched_the_plain_code_stays(monkeypatch, caplog):
    def broken(weights, bits):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(ops, "race", broken)
    assert not ops._launches.__wrapped__(torch.device("cpu"))
    assert "without Triton's kernels: Failed to find C compiler" in caplog.text


@pytest.mark.parametrize("kind", ["model", "tree_independent", "random"])
def test_a_whole_decode_on_the_kernels_has_the_same_tokens(kind, tables, monkeypatch):
    wanted = [replace(job, limit=len(job.tokens) + 4) for job in jobs(4)]
    plain = decode(wanted, 3, tables, kind=kind)
    monkeypatch.setattr(ops, "run_on", lambda device: True)
    with Called() as called:
        assert decode(wanted, 3, tables, kind=kind, device=torch.device(DEVICE)) == plain
    used = {"specbench::softmax", "specbench::race" if kind.startswith("tree") else "specbench::chain_verdict"}
    assert used <= set(called.names)


def test_the_operators_pass_pytorchs_own_checks():
    p, q, x, r, bits, count = chains(7, 8, 2, seed=1)
    for operator, arguments in (
        (ops.race, (p, bits)),
        (ops.softmax, (p,)),
        (ops.chain_verdict, (p, q, x, r, bits, count)),
        (ops.chain_verdict, (p, None, x, r, bits, count)),
    ):
        arguments = tuple(None if a is None else a.to(DEVICE) for a in arguments)
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
