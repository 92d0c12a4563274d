"""The verifier against the oracle: exactly with injected noise, and in distribution."""

import numpy as np
import pytest
import reference
import torch
from choosing import in_turn, only
from random_cases import ROWS, N, V, chi_square_fits, random_bits, random_distributions

from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.noise import exponentials
from specbench.decoding.sampling import Sampling
from specbench.decoding.verify import greedy_matching, speculative_sampling
from specbench.drafters.model import ModelDrafter
from specbench.drafters.suffix import PromptLookupDrafter as PromptLookup
from specbench.verifiers.base import SpeculativeVerifier
from specbench.verifiers.chains import BlockVerifier, RejectionVerifier
from specbench.verifiers.trees import IterativeVerifier, MatchVerifier


@pytest.mark.parametrize(("point_mass", "lenience"), in_turn([False, True], [(1.0,), (0.5,), (0.1,)]))
def test_equals_the_oracle_with_injected_noise(lenience, point_mass):
    generator, rows = torch.Generator().manual_seed(3), ROWS // 20
    p, q = random_distributions((rows, N + 1), 1), random_distributions((rows, N), 2)
    x = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(rows, N)
    count = torch.randint(N + 1, (rows,), generator=generator)
    r = torch.rand(rows, N, generator=generator, dtype=torch.float64)
    bits = random_bits((rows, N + 1), generator)
    times = exponentials(bits, V).numpy()
    verdict = speculative_sampling(p, Draft.chain(x, None if point_mass else q, count), r, bits, lenience)
    for row in range(rows):
        g = int(count[row])
        qs = np.eye(V, dtype=np.float32)[x[row, :g].numpy()].reshape(g, V) if point_mass else q[row, :g].numpy()
        n, t = reference.accept(p[row, : g + 1].numpy(), qs, x[row, :g].tolist(), r[row].numpy(), times[row], lenience)
        assert verdict.accepted[row] == n
        assert verdict.tokens[row, : n + 1].tolist() == [*x[row, :n].tolist(), t]


RULES = {  # of a guess x, from p [V] and q [V]
    "sum min(p, q)": lambda p, q, x: np.minimum(p, q).sum(),
    "sum min(p / l, q)": lambda p, q, x: np.minimum(p / 0.5, q).sum(),
    "sum p q": lambda p, q, x: (p * q).sum(),
    "1 / M with M = max p / q": lambda p, q, x: 1 / (p / q).max(),
    "p(x) of the guess x": lambda p, q, x: p[x],
    "p(x) / l of the guess x": lambda p, q, x: min(1, p[x] / 0.5),
    "1 if the target takes the guess, else 0": lambda p, q, x: float(p[x] == 1),
}


@pytest.mark.parametrize("points", [False, True])
@pytest.mark.parametrize("verifier", [
    SpeculativeVerifier(Sampling()), SpeculativeVerifier(Sampling(), 0.5), IterativeVerifier(greedy=False),
    MatchVerifier(greedy=False), BlockVerifier(greedy=False), RejectionVerifier(greedy=False),
    SpeculativeVerifier(Sampling(temperature=0)), MatchVerifier(greedy=True),
], ids=lambda verifier: f"{type(verifier).__name__} {verifier.rule} {verifier.greedy}")  # fmt: skip
def test_the_rule_of_acceptance_in_words_is_beta(verifier, points):
    if points and verifier.needs_q:
        pytest.skip("refuses point masses")
    p, q = random_distributions((ROWS, 2), 1), random_distributions((ROWS, 1), 2)
    x = torch.multinomial(q[:, 0], 1, generator=torch.Generator().manual_seed(3))
    if verifier.greedy:
        p = torch.nn.functional.one_hot(p.argmax(-1), V).float()
    draft = Draft.chain(x, None if points or verifier.greedy else q, torch.ones(ROWS, dtype=torch.long))
    verdict = Verdict(torch.cat([x, x], 1), torch.zeros(ROWS, dtype=torch.long))
    words = verifier.acceptance_rule(PromptLookup if points else ModelDrafter, None)
    rows = zip(p[:, 0].double().numpy(), q[:, 0].double().numpy(), x[:, 0].tolist(), strict=True)
    expected = [RULES[words](*row) for row in rows]
    assert np.allclose(verifier.beta(p, draft, verdict)[:, 0].numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("lenience", only((0.5, 0.1), [1.0, 0.5, 0.3, 0.1]))
def test_lenience_bounds_the_output_distribution(lenience):
    """s(x) <= p(x) / l for every token, exactly; and the verifier draws from that s."""
    p, q = (random_distributions((500,), seed).double() for seed in (7, 8))
    p, q = ((x / x.sum(-1, keepdim=True)).numpy() for x in (p, q))
    for p_row, q_row in zip(p, q, strict=True):
        s = reference.output_law(p_row, q_row, lenience)
        assert np.isclose(s.sum(), 1)
        assert (s <= p_row / lenience * (1 + 1e-12)).all()
        if lenience == 1:
            assert np.allclose(s, p_row)
    counts = first_tokens(torch.tensor(p[0]).float(), torch.tensor(q[0]).float(), lenience)
    assert chi_square_fits(counts, reference.output_law(p[0], q[0], lenience))


def first_tokens(p, q, lenience, trials=200_000):
    generator = torch.Generator().manual_seed(9)
    x = torch.multinomial(q.expand(trials, V), 1, generator=generator)
    noise = torch.rand(trials, 1, generator=generator, dtype=torch.float64), random_bits((trials, 2), generator)
    draft = Draft.chain(x, q.expand(trials, 1, V), torch.ones(trials, dtype=torch.long))
    verdict = speculative_sampling(p.expand(trials, 2, V), draft, *noise, lenience)
    return torch.bincount(verdict.tokens[:, 0], minlength=V).numpy()


def test_the_test_of_the_distribution_can_fail():
    """Negative control: lenience .9 is a bias that 200,000 trials must see."""
    p, q = random_distributions((1,), 7)[0], random_distributions((1,), 8)[0]
    assert chi_square_fits(first_tokens(p, q, 1.0), p.double().numpy())
    assert not chi_square_fits(first_tokens(p, q, 0.9), p.double().numpy())


def test_temperature_zero_lenience_compares_with_the_maximum():
    """Accept x when p(x) >= l * max p, p before argmax (A.5)."""
    p = torch.tensor([[[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]]])
    draft = Draft.chain(torch.tensor([[1]]), None, torch.tensor([1]))
    assert greedy_matching(p, draft, lenience=0.6).accepted.tolist() == [1]
    assert greedy_matching(p, draft, lenience=0.61).accepted.tolist() == [0]
    assert greedy_matching(p, draft, lenience=0.61).tokens[0, 0] == 0


def test_p_equal_to_q_leaves_a_valid_token():
    """Rounding can reject where p = q and nothing is left of p - q: t must still come from p."""
    p = torch.tensor([[[0.0, 1.0], [0.0, 1.0]]])
    draft = Draft.chain(torch.tensor([[1]]), p[:, :1], torch.tensor([1]))
    r = torch.ones(1, 1, dtype=torch.float64)
    assert speculative_sampling(p, draft, r, torch.zeros(1, 2, dtype=torch.long)).tokens[0, 0] == 1
