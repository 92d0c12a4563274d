"""Gamma policies on simulated betas whose best gamma is known, and what rows remember."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from specbench.decoding.sequence import Sequence
from specbench.decoding.state import State
from specbench.policies.base import FixedGamma
from specbench.policies.choosing import AdaptiveGamma, HeuristicGamma, OptimalGamma
from specbench.policies.stopping import ConfidenceGamma, EntropyGamma, root_entropy
from specbench.theory import expected_tokens, optimal_gamma, walltime_improvement

LARGEST, C = 10, 0.1
SECONDS = 1 + C * np.arange(LARGEST + 1)


class Costs:
    """A calibration that found this alpha."""

    def __init__(self, alpha: float):
        self.alpha, self.acceptance = alpha, (alpha * 1000, 1000)

    def seconds(self, largest):
        return SECONDS[: largest + 1]


@dataclass
class OneRow:
    """What a policy reads of a state with one row."""

    sequences: list[Any]
    active: tuple[bool, ...] = (True,)
    batch_size: int = 1


def policy(kind, alpha=0.5, **settings):
    made = kind(largest=LARGEST, **settings)
    made.calibrate(Costs(alpha))
    return made


def speedup(made, texts, signal=None, seed=0) -> float:
    """Of a policy on texts, arrays of the beta at each position; a round costs 1 + gamma C, a plain step 1. The policy
    sees the beta itself as the confidence of a guess, or `signal`."""
    draws = np.random.default_rng(seed)
    seconds = tokens = 0.0
    for number, betas in enumerate(texts):
        row, place = OneRow([Sequence([1], 2, number)]), 0
        while place < len(betas):
            gamma = min(made.next_gamma(row)[0], len(betas) - place - 1)
            for count in range(1, gamma):
                said = betas[place + count - 1] if signal is None else signal
                if made.stop is not None and not made.go_on(row, [count], [float(said)])[0]:
                    gamma = count
                    break
            taken = draws.random(gamma) < betas[place : place + gamma]
            kept = 1 + int(taken.cumprod().sum())
            made.observe([gamma], [kept])
            seconds, tokens, place = seconds + SECONDS[gamma], tokens + kept, place + kept
    return tokens / seconds


def constant(alpha, texts=40, length=400):
    return [np.full(length, alpha)] * texts


def best_fixed(texts):
    return max(speedup(FixedGamma(gamma), texts) for gamma in range(LARGEST + 1))


@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.8])
def test_optimal_chooses_the_gamma_of_the_theorem(alpha):
    assert policy(OptimalGamma, alpha).constant == optimal_gamma(alpha, C, LARGEST)


def test_the_simulation_gives_theorem_3_8():
    for gamma in (0, 2, 5):
        expected = walltime_improvement(0.8, gamma, C)
        assert speedup(FixedGamma(gamma), constant(0.8)) == pytest.approx(expected, rel=0.03)


def test_adaptive_finds_the_gamma_of_each_text():
    texts = [*constant(0.2, 1), *constant(0.95, 1)] * 15
    best = best_fixed(texts)
    adaptive = speedup(policy(AdaptiveGamma, 0.6, prior=4.0, forget=0.0, probe=64), texts)
    assert adaptive > best * 1.1
    known = [max(walltime_improvement(alpha, gamma, C) for gamma in range(LARGEST + 1)) for alpha in (0.2, 0.95)]
    assert adaptive > 0.95 / np.mean([1 / k for k in known])
    blind = speedup(policy(AdaptiveGamma, 0.6, prior=1e9, forget=0.0, probe=64), texts)
    assert blind < best * 1.01  # negative control: it never learns what it sees


def test_entropy_stops_where_acceptance_is_unlikely():
    draws = np.random.default_rng(0)
    texts = [draws.permutation(np.r_[np.full(200, 0.98), np.full(200, 0.1)]) for _ in range(20)]
    learnt = speedup(policy(EntropyGamma), texts)
    assert learnt > best_fixed(texts) * 1.02
    deaf = speedup(policy(EntropyGamma), texts, signal=0.5)
    assert deaf < learnt / 1.02  # negative control: the signal says nothing


def test_signals_are_of_the_distribution():
    q = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]])
    x = torch.tensor([1, 0, 0])
    expected = [np.sqrt(1.5 * np.log(2) / np.log(4)), 1.0, 0.0]
    assert root_entropy(q, x).tolist() == pytest.approx(expected, abs=1e-6)
    assert ConfidenceGamma(1, 0.5).signal(q, x).tolist() == [0.25, 0.25, 1.0]


REQUESTS = [Sequence([1], 8, number, active=True) for number in range(3)]


def state(*owners: int) -> State:
    made = State.idle(len(owners), 8, [], torch.device("cpu"))
    made.sequences = [REQUESTS[owner] for owner in owners]
    for sequence in made.sequences:
        sequence.active = True
    return made


def test_heuristic_is_plus_two_minus_one_in_each_row():
    made, rows = HeuristicGamma(4, 7), state(0, 1)
    for chosen, kept in [([4, 4], [5, 3]), ([6, 3], [7, 1]), ([7, 2], [0, 1]), ([7, 1], [0, 1]), ([7, 1], [0, 0])]:
        assert made.next_gamma(rows) == chosen
        made.observe(chosen, kept)
    assert made.next_gamma(state(0, 2)) == [7, 4]  # another request begins anew


def test_adaptive_forgets_the_row_with_its_request():
    made = policy(AdaptiveGamma, 0.5, prior=1.0, forget=0.0, probe=64)
    first = made.next_gamma(state(0))
    for _ in range(30):
        made.observe([4], [5])
    assert made.next_gamma(state(0)) == [LARGEST]
    assert made.next_gamma(state(1))[0] < LARGEST and first[0] < LARGEST


def test_adaptive_chooses_one_gamma_for_what_all_active_rows_gain():
    """A call lasts as long as its longest draft, so a row beside one that drafts much gets its guesses for nothing."""
    made = policy(AdaptiveGamma, 0.5, prior=1.0, forget=0.0, probe=64)
    rows = state(0, 1)
    made.next_gamma(rows)
    for _ in range(50):
        made.observe([4, 4], [4, 1])  # one row accepts three of four guesses, the other none
    betas = [made.requests[REQUESTS[row]].accepted / made.requests[REQUESTS[row]].tested for row in (0, 1)]
    assert betas == pytest.approx([0.75, 0], abs=0.02)
    tokens = [expected_tokens(beta, np.arange(LARGEST + 1)) for beta in betas]
    together, alone = ([int(np.argmax(each / made.seconds))] * 2 for each in (tokens[0] + tokens[1], tokens[0]))
    assert made.next_gamma(rows) == together
    rows.sequences[1].active = False
    assert made.next_gamma(rows) == alone and 0 < together[0] < alone[0] < LARGEST
    rows.sequences[0].active, rows.sequences[1].active = False, True
    found = []
    for number in range(67):
        found.append(made.next_gamma(rows)[0])
        made.observe([0, found[-1] * (number != 64)], [0, 1])  # once there was no room for the guess
    assert found == [0] * 64 + [1, 1, 0]  # rounds without a guess teach nothing


def test_confidence_keeps_the_guess_that_it_stops_at_and_fixed_does_not_change():
    assert ConfidenceGamma(6, 0.4).go_on(state(0, 1), [1, 1], [0.39, 0.4]) == [False, True]
    made = FixedGamma(3)
    made.observe([3], [1])
    assert made.next_gamma(state(0, 1)) == [3, 3] and made.widths == (3,) and made.constant == 3
