"""Gamma policies on simulated betas whose best gamma is known, and what rows remember."""

import numpy as np
import pytest
import torch

from specbench.decoding.state import State
from specbench.decoding.timer import Lap
from specbench.policies.gamma.adaptive import AdaptiveGamma
from specbench.policies.gamma.confidence import ConfidenceGamma
from specbench.policies.gamma.entropy import EntropyGamma, confidence, root_entropy
from specbench.policies.gamma.fixed import FixedGamma
from specbench.policies.gamma.goodput import AcceptanceFit, GoodputGamma, RoundCosts
from specbench.policies.gamma.heuristic import HeuristicGamma
from specbench.policies.gamma.optimal import OptimalGamma, best_gamma
from specbench.policies.gamma.oracle import KnownBetas, OracleGamma
from specbench.stats.costs import CostTable, extend
from specbench.stats.records import Round
from specbench.stats.replay import Text, Trace, replay, sweep
from specbench.theory import expected_tokens, optimal_gamma, oracle_improvement, walltime_improvement

LARGEST, C = 10, 0.1


def process(alpha, texts=60, length=400, signal=None, seed=0) -> Trace:
    """Texts whose guesses are accepted with probability alpha, a number or one per text; or alpha
    [length], one per position. Rounds cost 1 + gamma C; plain decoding 1 a token."""
    generator = np.random.default_rng(seed)
    found = []
    for index in range(texts):
        own = alpha[index] if isinstance(alpha, list) else alpha
        beta = np.full(length, own) if np.isscalar(own) else generator.permutation(own)
        said = beta if signal is None else np.full(length, signal)
        unknown = np.full(length, np.nan)
        found.append(Text(f"t{index}", 1, length + 50, float(length), length, unknown, beta, beta, 1 - said, said))
    return Trace(found, 1 + C * np.arange(LARGEST + 1), 1.0)


class Costs:
    """A trace in the place of a calibration."""

    def __init__(self, trace, alpha):
        self.alpha, self.acceptance, self.trace = alpha, (alpha * 1000, 1000), trace

    def seconds(self, largest):
        return self.trace.seconds[: largest + 1]


def policy(kind, trace, alpha=0.5, **settings):
    made = kind(largest=LARGEST, **settings)
    made.calibrate(Costs(trace, alpha))
    return made


@pytest.mark.slow  # test_optimal_chooses_the_gamma_of_the_theorem
@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.8, 0.9])
def test_replay_of_constant_betas_is_theorem_3_8(alpha):
    trace = process(alpha, texts=40)
    constant = sweep(trace, draws=3)
    for gamma, found in constant.items():
        assert found.speedup == pytest.approx(walltime_improvement(alpha, gamma, C), rel=0.02)
    oracle = replay(trace, policy(OracleGamma, trace), draws=4)
    # The bound assumes no largest gamma.
    assert oracle.speedup <= oracle_improvement(alpha, C) * 1.02
    assert oracle.speedup > max(found.speedup for found in constant.values())


@pytest.mark.slow
def test_nothing_is_above_the_oracle_where_drafting_does_not_pay():
    """A round of two tokens costs as much as two steps, and a longer one more than its tokens are worth."""
    trace = process(0.8)
    trace.seconds = np.arange(1, LARGEST + 2) ** 1.3
    oracle = replay(trace, policy(OracleGamma, trace))
    others = [*sweep(trace).values(), replay(trace, policy(KnownBetas, trace))]
    assert oracle.speedup >= max(found.speedup for found in others) == pytest.approx(1)

    class AllThatWillBeAccepted(OracleGamma):  # negative control
        def foresee(self, outcomes, betas, seconds):
            super().foresee(outcomes, betas, np.ones(LARGEST + 1))

    assert replay(trace, policy(AllThatWillBeAccepted, trace)).speedup < 0.9


@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.8])
def test_optimal_chooses_the_gamma_of_the_theorem(alpha):
    trace = process(alpha)
    assert policy(OptimalGamma, trace, alpha).constant == optimal_gamma(alpha, C, LARGEST)
    assert best_gamma(alpha, trace.seconds * 7.0) == optimal_gamma(alpha, C, LARGEST)


@pytest.mark.slow
def test_adaptive_finds_the_gamma_of_each_text():
    alphas = [0.2, 0.95] * 30
    trace = process(alphas)
    best_fixed = max(found.speedup for found in sweep(trace, draws=2).values())
    adaptive = replay(trace, policy(AdaptiveGamma, trace, 0.6, prior=4.0, forget=0.0, probe=64), draws=2)
    assert adaptive.speedup > best_fixed * 1.1
    known = [max(walltime_improvement(alpha, gamma, C) for gamma in range(LARGEST + 1)) for alpha in (0.2, 0.95)]
    assert adaptive.speedup > 0.95 / np.mean([1 / k for k in known])
    blind = replay(trace, policy(AdaptiveGamma, trace, 0.6, prior=1e9, forget=0.0, probe=64), draws=2)
    assert blind.speedup < best_fixed * 1.01  # negative control: it never learns what it sees


@pytest.mark.parametrize("signal", ["entropy", pytest.param("confidence", marks=pytest.mark.slow)])
def test_entropy_stops_where_acceptance_is_unlikely(signal):
    betas = np.r_[np.full(200, 0.98), np.full(200, 0.1)]
    trace = process([betas] * 20, texts=20)
    best_fixed = max(found.speedup for found in sweep(trace, draws=2).values())
    learnt = replay(trace, policy(EntropyGamma, trace, signal=signal), draws=2)
    known = replay(trace, policy(KnownBetas, trace), draws=2)
    assert best_fixed * 1.02 < learnt.speedup <= known.speedup * 1.01
    deaf = process([betas] * 20, texts=20, signal=0.5)  # negative control: the signal says nothing
    assert replay(deaf, policy(EntropyGamma, deaf, signal=signal), draws=2).speedup < learnt.speedup / 1.02


def test_signals_are_of_the_law():
    q = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]])
    x = torch.tensor([1, 0, 0])
    expected = [np.sqrt(1.5 * np.log(2) / np.log(4)), 1.0, 0.0]
    assert root_entropy(q, x).tolist() == pytest.approx(expected, abs=1e-6)
    assert confidence(q, x).tolist() == [0.5, 0.25, 1.0]
    assert ConfidenceGamma(1, 0.5).signal(q, x).tolist() == [0.25, 0.25, 1.0]


def state(*owners: int) -> State:
    made = State.idle(len(owners), 8, [], torch.device("cpu"))
    made.serials, made.active = dict(enumerate(owners)), [True] * len(owners)
    return made


def test_heuristic_is_plus_two_minus_one_in_each_row():
    made, rows = HeuristicGamma(4, 7), state(0, 1)
    for chosen, kept in [([4, 4], [5, 3]), ([6, 3], [7, 1]), ([7, 2], [0, 1]), ([7, 1], [0, 1]), ([7, 1], [0, 0])]:
        assert made.next_gamma(rows) == chosen
        made.observe(chosen, kept)
    assert made.next_gamma(state(0, 2)) == [7, 4]  # another request begins anew


def test_adaptive_forgets_the_row_with_its_request():
    trace = process(0.5)
    made = policy(AdaptiveGamma, trace, 0.5, prior=1.0, forget=0.0, probe=64)
    first = made.next_gamma(state(0))
    for _ in range(30):
        made.observe([4], [5])
    assert made.next_gamma(state(0)) == [LARGEST]
    assert made.next_gamma(state(1))[0] < LARGEST and first[0] < LARGEST


def test_adaptive_chooses_one_gamma_for_what_all_active_rows_gain():
    """A call lasts as long as its longest draft, so a row beside one that drafts much gets its guesses for nothing."""
    made = policy(AdaptiveGamma, process(0.5), 0.5, prior=1.0, forget=0.0, probe=64)
    rows = state(0, 1)
    made.next_gamma(rows)
    for _ in range(50):
        made.observe([4, 4], [4, 1])  # one row accepts three of four guesses, the other none
    betas = [accepted / tested for accepted, tested in (made.rows[row][1] for row in (0, 1))]
    assert betas == pytest.approx([0.75, 0], abs=0.02)
    tokens = [expected_tokens(beta, np.arange(LARGEST + 1)) for beta in betas]
    together, alone = ([int(np.argmax(each / made.seconds))] * 2 for each in (tokens[0] + tokens[1], tokens[0]))
    assert made.next_gamma(rows) == together
    rows.active = [True, False]
    assert made.next_gamma(rows) == alone and 0 < together[0] < alone[0] < LARGEST
    rows.active = [False, True]
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


def rounds_with(steps, seconds, count, rows=1):
    laps = {Lap.DRAFT: 0.0, Lap.VERIFY: seconds, Lap.ACCEPT: 0.0, Lap.HOST: 0.0}
    return [Round(0, 0, steps, 0, 1, 1, 1, 0, 0, [0.5], seconds=laps, rows=rows, steps=steps) for _ in range(count)]


def test_costs_lie_on_a_line_between_and_beyond_what_was_measured():
    assert extend([0, 4], [1.0, 3.0], 6).tolist() == pytest.approx([1, 1.5, 2, 2.5, 3, 3.5, 4])
    assert extend([2, 3], [4.0, 5.0], 4).tolist() == pytest.approx([2, 3, 4, 5, 6])
    table = CostTable()
    table.add(rounds_with(1, 2.0, 9) + rounds_with(1, 11.0, 1) + rounds_with(3, 4.0, 10))
    assert table.seconds(3).tolist() == pytest.approx([1, 2, 3, 4])
    shares = {cost.gamma: cost.share * cost.rounds for cost in table.summary()}
    assert sum(shares.values()) == pytest.approx(69)  # every second is accounted for
    assert table.alpha == pytest.approx(10.5 / 21)


def test_costs_are_of_calls_that_serve_all_rows():
    """At the end of a group a call serves fewer rows and is faster: no gamma is cheaper for having been timed there."""
    table = CostTable()
    table.add(rounds_with(1, 2.0, 8, rows=8) + rounds_with(1, 0.5, 30, rows=1) + rounds_with(3, 4.0, 8, rows=8))
    assert table.seconds(3).tolist() == pytest.approx([1, 2, 3, 4])


def goodput(trace, alpha, signal="none", by_row=False, forget=0.05):
    return policy(GoodputGamma, trace, alpha, signal=signal, by_row=by_row, forget=forget, probe=20)


@pytest.mark.parametrize("draft", [0.0, 1.0])
def test_goodput_fits_what_rounds_cost_by_steps_tokens_and_context(draft):
    generator, by = np.random.default_rng(1), (2.0, draft, 0.5, 0.03, 1e-4)
    gammas = np.arange(6)
    calibrated = by[0] + draft * (gammas > 0) + by[4] * 800 + by[2] * gammas + by[3] * 8 * (gammas + 1)
    fitted = RoundCosts(calibrated, 8, 800, 0.002)
    assert fitted.seconds(3, 8 * 4, 800) == pytest.approx(calibrated[3], rel=0.01)
    for _ in range(600):
        steps, rows, context = generator.integers([0, 1, 100], [6, 9, 9000])
        seconds = by[0] + draft * (steps > 0) + by[2] * steps + by[3] * rows * (steps + 1) + by[4] * context
        fitted.add(seconds * generator.normal(1, 0.02), steps, rows * (steps + 1), context)
    assert [*fitted.by[:1], *fitted.by[2:]] == pytest.approx([*by[:1], *by[2:]], rel=0.15)
    assert fitted.by[1] == pytest.approx(draft, abs=0.15)
    before = fitted.seconds(3, 20, 500)
    fitted.add(1e9, 3, 20, 500)  # an interruption
    assert fitted.seconds(3, 20, 500) == pytest.approx(before, rel=0.1)


@pytest.mark.parametrize("seconds", [[0.1, 1, 1, 5, 9], [1, 3, 9, 27, 81], [0.5, 0.7, 3.0, 0.5, 15.0]])
def test_goodput_never_takes_a_round_to_cost_nothing(seconds):
    """The least squares of costs that rise ever faster begin below 0."""
    fitted = RoundCosts(np.array(seconds), 1, 100, 0.05)
    assert fitted.seconds(0, 1, 100) == pytest.approx(seconds[0])
    assert fitted.seconds(4, 5, 100) > fitted.seconds(0, 1, 100)


@pytest.mark.parametrize("drafted", [0.0, 3.5])
def test_goodput_remembers_what_a_round_without_a_draft_takes(drafted):
    """A draft costs 3.5 at once, as where the target reads its tokens by another kernel, and then 2 a guess. A line
    through the rounds, all of which have drafts, says that one without a draft takes 8.5."""
    gammas = np.arange(11)
    fitted = RoundCosts(5 + drafted * (gammas > 0) + 2.0 * gammas, 8, 800, 0.01)
    for number in range(800):
        fitted.add(5 + drafted + 2.0 * (g := 1 + number % 4), g, 8 * (g + 1), 800)
    assert fitted.seconds(0, 8, 800) == pytest.approx(5, rel=0.02)
    assert fitted.seconds(3, 32, 800) == pytest.approx(11 + drafted, rel=0.02)


def test_goodput_learns_what_a_confidence_means():
    """Guesses are accepted with the square of max q."""
    generator, learnt = np.random.default_rng(0), AcceptanceFit(0.02)
    for _ in range(400):
        c = generator.uniform(0.05, 0.95, 8)
        learnt.learn(np.log(c / (1 - c)).tolist(), (generator.random(8) < c**2).tolist())
    found = [learnt.of(float(np.log(c / (1 - c)))) for c in (0.3, 0.5, 0.7, 0.9)]
    assert found == pytest.approx([0.09, 0.25, 0.49, 0.81], abs=0.08)


@pytest.mark.parametrize("alpha", [0.3, 0.8])
def test_goodput_of_constant_betas_is_the_best_gamma(alpha):
    trace = process(alpha, texts=4)
    best = max(found.speedup for found in sweep(trace, draws=1).values())
    assert replay(trace, goodput(trace, 0.5), draws=1).speedup > best * 0.97
    wrong = goodput(trace, 0.5)  # negative control: what it sees is forgotten at once
    wrong.observe = lambda drafted, kept: None
    assert alpha != 0.8 or replay(trace, wrong, draws=1).speedup < best * 0.95


def test_goodput_drafts_next_to_nothing_after_a_calibration_that_accepted_nothing():
    """The control: gamma 1 in every round."""
    trace = process(0.0, texts=2)
    assert replay(trace, goodput(trace, 0.0), draws=1).speedup > 0.98 > 1.03 * sweep(trace, draws=1)[1].speedup


def test_goodput_stops_where_acceptance_is_unlikely():
    betas = np.r_[np.full(200, 0.98), np.full(200, 0.1)]
    trace = process([betas] * 6, texts=6)
    best = max(found.speedup for found in sweep(trace, draws=1).values())
    assert replay(trace, goodput(trace, 0.5, "confidence"), draws=1).speedup > best * 1.02
    deaf = process([betas] * 6, texts=6, signal=0.5)  # negative control: the signal says nothing
    assert replay(deaf, goodput(deaf, 0.5, "confidence"), draws=1).speedup < best * 1.02


def test_goodput_drafts_nothing_where_it_does_not_pay_and_tries_again():
    trace = process(0.2)
    trace.seconds = 1 + 0.9 * np.arange(LARGEST + 1)
    made, clock = goodput(trace, 0.2), [0.0]
    made.now = lambda: clock[0]
    chosen = []
    for _ in range(65):
        chosen += made.next_gamma(state(0))
        clock[0] += trace.seconds[chosen[-1]]
        made.observe(chosen[-1:], [1])
    assert chosen.count(1) == 3 and chosen.count(0) == 62


def test_goodput_verifies_one_prefix_of_the_guesses_of_all_rows_or_whole_columns():
    made, rows = goodput(process(0.5), 0.5, "confidence", by_row=True), state(0, 1)
    made.next_gamma(rows)
    made.costs.by, made.rate = (1.0, 0.0, 0.2, 0.1, 0.0), 4.0  # a token is worth .4
    for count, signals in (([1, 1], [0.9, 0.3]), ([2, 1], [0.8, 0.3]), ([3, 1], [0.3, 0.3])):
        made.go_on(rows, count, signals)
    assert [len(own) for own in made.survival] == [3, 1]
    assert made.survival[0] == pytest.approx([0.9, 0.72, 0.216]) and made.admit(rows) == [2, 0]
    made.by_row = False  # the first column has 1.2, the second .72 and the third .216 of the .8 that it costs
    assert made.admit(rows) == [1, 1]
