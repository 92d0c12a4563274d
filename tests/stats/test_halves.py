"""Replay charges a text what rounds of other prompts cost, and the best gamma is judged by prompts that did not choose
it. The processes are simulated: what each gamma is worth is known."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from specbench.decoding.timer import Lap
from specbench.policies.gamma.optimal import OptimalGamma
from specbench.stats import gamma_sweep
from specbench.stats.bootstrap import group_clusters, halves
from specbench.stats.costs import CostTable, half_costs, monotone
from specbench.stats.estimates import HalfCosts, RoundCost
from specbench.stats.gamma_sweep import checked_costs, over_own, why_failed
from specbench.stats.records import Group, Round, RunRecord
from specbench.stats.replay import (
    HalfOfPrompts,
    Text,
    Trace,
    TracedCosts,
    pick,
    pick_rounds,
    priced,
    replay,
    sweep_rounds,
    traced,
)

ALPHA, TOKENS, PROMPTS, LARGEST, EXPERIMENTS = 0.6, 30, 20, 4, 32
NOISE = 0.3  # standard deviation of the logarithm of what a probe sees
OWN = 3  # the gamma that the run was made with


def laps(seconds):
    return {Lap.DRAFT: 0.0, Lap.VERIFY: float(seconds), Lap.ACCEPT: 0.0, Lap.HOST: 0.0}


def round_of(gamma, seconds):
    return Round(0, 0, gamma, 0, 1, 1, 1, 0, 0, [ALPHA], seconds=laps(seconds), steps=gamma)


def text(generator, prompt):
    whole = np.full(TOKENS, ALPHA)
    outcome = (generator.random(TOKENS) < whole).astype(float)
    return Text(prompt, 10, 10**6, float(TOKENS), TOKENS, outcome, whole, whole, whole, whole)


def experiment(seed, worth):
    """A run in which all gammas are worth the same: a round costs in the mean what its tokens need in plain decoding.
    The cost of each is known from one noisy round a prompt. Its trace with halves, and the same without."""
    generator = np.random.default_rng(seed)
    texts = [text(generator, f"p{number}") for number in range(PROMPTS)]
    table = CostTable()
    for each in texts:
        table.source = each.prompt
        table.add(
            [round_of(g, worth[g] * generator.lognormal(-(NOISE**2) / 2, NOISE)) for g in range(LARGEST + 1)], 1.0
        )
    of, both = halves([each.prompt for each in texts]), []
    for half in (0, 1):
        own = [name for name, where in of.items() if where == half]
        by_gamma = table.summary_of(own, 1.0)
        covariance = table.covariance([[name] for name in own], [cost.gamma for cost in by_gamma], 1.0)
        ids, gammas = [[name] for name in own], [cost.gamma for cost in by_gamma]
        both.append(HalfCosts(ids, by_gamma, covariance.tolist(), table.prompts_of(ids, gammas)))
    in_sample = Trace(texts, np.array([cost.share for cost in table.summary()]), 1.0)
    placed = [Text(**vars(each) | {"half": of[each.prompt]}) for each in texts]
    crossed = Trace(placed, in_sample.seconds, 1.0, [HalfOfPrompts.of(half, LARGEST) for half in both])
    return crossed, in_sample, sweep_rounds(crossed, draws=1)  # all outcomes are known


@pytest.fixture(scope="module")
def experiments():
    generator = np.random.default_rng(1000)
    many = Trace([text(generator, "") for _ in range(200)], np.ones(LARGEST + 1), 1.0)
    worth = [200 * TOKENS / rounds.sum() for rounds in sweep_rounds(many, draws=1).values()]
    return [experiment(seed, worth) for seed in range(EXPERIMENTS)]


def mean_and_error(values):
    return np.mean(values), np.std(values) / np.sqrt(len(values))


def test_the_regret_of_a_gamma_as_good_as_all_others_is_0(experiments):
    def regret(trace, swept):
        return np.log(pick(trace, swept)[1].speedup / priced(trace, swept[OWN]).speedup)

    crossed, error = mean_and_error([regret(crossed, swept) for crossed, _, swept in experiments])
    assert abs(crossed) < 3 * error < 0.08
    within, error = mean_and_error([regret(in_sample, swept) for _, in_sample, swept in experiments])
    assert within > 4 * error  # negative control: chosen and judged by the same prompts


def test_a_policy_that_chooses_by_cost_is_not_judged_by_these_costs(experiments):
    crossed, within = [], []
    for trace, in_sample, swept in experiments:
        policy = OptimalGamma(LARGEST)
        crossed.append(np.log(replay(trace, policy, draws=1).speedup / priced(trace, swept[OWN]).speedup))
        policy.calibrate(TracedCosts(in_sample))
        best = priced(in_sample, swept[policy.constant]).speedup
        within.append(np.log(best / priced(in_sample, swept[OWN]).speedup))
    crossed, error = mean_and_error(crossed)
    assert abs(crossed) < 3 * error < 0.08
    within, error = mean_and_error(within)
    assert within > 4 * error  # negative control


def test_the_interval_carries_the_error_of_the_costs(experiments):
    """How often the true speedup, 1, is outside of the interval of a gamma: 5 % of the time. One that knows nothing of
    the error of costs, the negative control, misses it far more often."""
    missed = [0, 0]
    for *pair, swept in experiments:
        for which, trace in enumerate(pair):
            for gamma in (1, 4):
                low, high = priced(trace, swept[gamma]).ci95
                missed[which] += not low < 1 < high
    assert missed[0] <= 0.1 * 2 * EXPERIMENTS and missed[1] >= 0.2 * 2 * EXPERIMENTS, missed


def test_a_text_is_charged_the_costs_of_the_other_half():
    generator = np.random.default_rng(1)
    texts = [Text(**vars(text(generator, f"p{half}")) | {"half": half}) for half in (0, 1)]
    seconds = [np.full(LARGEST + 1, value) for value in (1.0, 100.0)]
    exact, prompts = np.zeros((LARGEST + 1, LARGEST + 1)), np.full(LARGEST + 1, 9.0)
    trace = Trace(texts, seconds[0], 1.0, [HalfOfPrompts(each, exact, prompts) for each in seconds])
    rounds = sweep_rounds(trace, draws=1)[2]
    first, second = rounds.sum(1)
    assert priced(trace, rounds).speedup == pytest.approx(2 * TOKENS / (100 * first + second))


def test_halves_are_even_and_alias_with_nothing_that_turns():
    of = halves(range(200))
    assert sum(of.values()) == 100 and all(of[k] != of[k + 1] for k in range(0, 200, 2))
    for period in range(2, 12):  # gammas are probed in turn, and decoders swap at every second prompt
        for phase in range(period):
            assert len({of[k] for k in range(phase, 200, period)}) == 2
    assert halves(range(9)) == {} and len(halves(range(10))) == 10


def test_a_covariance_is_that_of_repeated_experiments():
    """Against many runs of the same process, not against the bootstrap itself."""

    def shares(seed):
        generator, table = np.random.default_rng(seed), CostTable()
        for number in range(30):
            table.source, level = str(number), generator.lognormal(0, 0.1)
            for gamma in (1, 3):
                table.add([round_of(gamma, gamma * level * generator.lognormal(0, 0.1)) for _ in range(6)], 1.0)
        return table, [cost.share for cost in table.summary_of([*map(str, range(30))], 1.0)]

    many = np.cov(np.array([shares(seed)[1] for seed in range(100)]).T)
    one = np.mean([shares(seed)[0].covariance([[str(n)] for n in range(30)], [1, 3], 1.0) for seed in range(3)], 0)
    assert one == pytest.approx(many, rel=0.5) and many[0, 1] > 0.3 * np.sqrt(many[0, 0] * many[1, 1])


def result(name, replayable=True, pace=1.0):
    request = SimpleNamespace(id=name, prompt_id=name)
    plain = SimpleNamespace(seconds=TOKENS * pace, tokens=TOKENS * [0])
    return SimpleNamespace(request=request, speculative_laws=replayable or None, baseline=plain)


def test_no_cluster_divides_a_group_whose_rounds_were_counted_together():
    """One row and several requests a group, as with requests over time: rounds are known by the first prompt."""
    names = [[f"p{number}", f"q{number}"] for number in range(10)]
    record, table = RunRecord([Group([*map(result, each)], None, None) for each in names]), CostTable()
    for number, (first, _) in enumerate(names):
        table.source = first
        table.add([round_of(2, 1.0 + number % 3)], 1.0)
    found = half_costs(table, record.results, group_clusters(record))
    assert sorted(ids for half in found for ids in half.clusters) == names
    assert [sum(cost.rounds for cost in half.by_gamma) for half in found] == [5, 5]
    assert all(np.isfinite(half.covariance).all() and half.covariance[0][0] > 0 for half in found)
    assert half_costs(table, record.results[:18], group_clusters(record)[:18]) == []  # nine groups


def test_few_texts_that_can_be_replayed_make_no_halves():
    results = [result(name, name < "i") for name in "abcdefghijklmnop"]
    table = CostTable()
    for each in results:
        table.source = each.request.id
        table.add([round_of(2, 1.0)], 1.0)
    assert half_costs(table, results, [each.request.id for each in results]) == []


POOL, RUN, USED, WITHIN = 300, 32, 4, 8  # texts, prompts of a run, its gamma, and rounds of a probe


@pytest.fixture(scope="module")
def pool():
    """Texts, their rounds with each gamma, and costs at which all gammas are equal on them."""
    generator = np.random.default_rng(7)
    texts = [text(generator, f"t{number}") for number in range(POOL)]
    rounds = sweep_rounds(Trace(texts, np.ones(LARGEST + 1), 1.0), draws=1)
    return texts, rounds, np.array([POOL * TOKENS / each.sum() for each in rounds.values()])


def as_probed(seed, pool, worth, noise, probes=1, swing=0.0, paced=True):
    """A run as they are: behind each prompt stand probes of its own gamma and of `probes` others. The rounds of a probe
    share a noise. The machine's pace varies by `swing` from prompt to prompt, and again before the probes, and is known
    there to 5 %. Its trace, and its rounds with each gamma."""
    texts, rounds, _ = pool
    generator, table = np.random.default_rng(seed), CostTable()
    drawn, paces = generator.choice(POOL, RUN, replace=False), []
    others = [gamma for gamma in range(LARGEST + 1) if gamma != USED]
    for number in range(RUN):
        table.source = f"p{number}"
        probed = [others[(number + number // len(others) + k) % len(others)] for k in range(probes)]
        paces.append(generator.lognormal(0, swing))
        later = paces[-1] * generator.lognormal(0, swing)
        beside = later * generator.lognormal(0, 0.05)  # the pace by a few plain steps
        for gamma in (USED, *probed):
            level = worth[gamma] * generator.lognormal(-(noise**2) / 2, noise) * later
            seen = [round_of(gamma, level * each) for each in generator.lognormal(0, 0.05, WITHIN)]
            table.add(seen, beside if paced else 1.0)
    results = [result(f"p{number}", pace=pace) for number, pace in enumerate(paces)]
    costs = half_costs(table, results, [each.request.id for each in results])
    own = [
        Text(**vars(texts[place]) | {"prompt": f"p{number}", "baseline_seconds": TOKENS * paces[number]})
        for number, place in enumerate(drawn)
    ]
    return traced(own, table.summary(), 1.0, costs), {gamma: each[drawn] for gamma, each in rounds.items()}


def says(trace, rounds):
    """Whether another gamma is advised: by the factor over the run's own gamma; and, the negative control, because the
    pick's speedup is 1 % above it."""
    gammas, of_pick = pick_rounds(trace, rounds)
    factor = over_own(trace, of_pick, rounds[USED])
    other = {*gammas} != {USED}
    by_point = priced(trace, of_pick).speedup > 1.01 * priced(trace, rounds[USED]).speedup
    return other and factor.ci95 is not None and factor.ci95[0] > 1, other and by_point


@pytest.mark.slow  # test_the_regret_of_a_gamma_as_good_as_all_others_is_0
@pytest.mark.parametrize("noise", [0.05, 0.1, 0.2, 0.3])
def test_another_gamma_is_seldom_advised_where_all_are_equal(noise, pool):
    runs = 400
    said = np.sum([says(*as_probed(seed, pool, pool[2], noise)) for seed in range(runs)], 0) / runs
    assert said[0] <= 0.025 and said[1] > 0.1, said


def test_a_gamma_that_is_much_better_is_found(pool):
    better = pool[2] * [1, 1, 1 / 1.2, 1, 1]
    found = [says(*as_probed(seed, pool, better, 0.03))[0] for seed in range(20)]
    assert np.mean(found) > 0.8


def test_a_monotone_fit_is_the_closest_one_that_does_not_fall():
    generator = np.random.default_rng(0)
    for _ in range(20):
        values, weights = generator.normal(size=4), generator.integers(1, 9, 4)
        found = monotone(values, weights)
        assert (np.diff(found) >= -1e-12).all()
        steps = np.sort(generator.normal(size=(20_000, 4)), 1)
        assert (weights * (steps - values) ** 2).sum(1).min() >= (weights * (found - values) ** 2).sum()
        together = monotone(np.stack([values, values]), np.stack([weights, weights]))
        assert together == pytest.approx(np.stack([found, found]))
    assert monotone(np.array([1.0, 4, 2]), np.array([5, 100, 1])) == pytest.approx([1, 402 / 101, 402 / 101])


def test_a_longer_draft_costs_no_less_and_few_rounds_tell_nothing():
    def of(*costs):
        return [RoundCost(gamma, 0, 0, 0, share, rounds) for gamma, share, rounds in costs]

    texts = [Text(**vars(text(np.random.default_rng(1), "p")))]
    assert traced(texts, of((0, 1, 50), (1, 2, 50), (2, 1, 50)), 1).seconds == pytest.approx([1, 1.5, 1.5])
    assert traced(texts, of((0, 1, 50), (1, 0.1, 7), (2, 2, 50)), 1).seconds == pytest.approx([1, 1.5, 2])
    assert traced(texts, of((0, 1, 50), (1, 1.5, 50), (2, 0.1, 7)), 1).largest == 1


def own_check(trace, rounds, worth, seed=0):
    """The check of costs of a run whose own rounds took what they are worth, each text with some noise."""
    pace = np.array([each.baseline_seconds for each in trace.texts]) / TOKENS
    noise = np.random.default_rng(seed).lognormal(0, 0.02, len(trace.texts))
    return checked_costs(trace, rounds[USED] @ worth * pace * noise, rounds[USED])


def test_rounds_that_were_cheaper_in_probes_than_in_the_run_are_found(pool):
    """As with requests that arrive over time: probes serve four rows a call, and rounds of the run one."""
    worth = np.array([1, 0.25, 0.25, 0.25, 0.25]) * pool[2]
    passed = []
    for seed, costs in product(range(12), (worth, pool[2])):
        trace, rounds = as_probed(seed, pool, costs, 0.05, LARGEST)
        check = own_check(trace, rounds, pool[2], seed)
        passed.append(check.passed)
        assert bool(why_failed(check)) is not check.passed
    assert not any(passed[::2]) and np.mean(passed[1::2]) > 0.7


def test_costs_that_are_known_too_badly_judge_no_gamma(pool):
    runs = [as_probed(seed, pool, pool[2], 0.9) for seed in range(10)]
    checks = [own_check(trace, rounds, pool[2], seed) for seed, (trace, rounds) in enumerate(runs)]
    assert not any(check.passed for check in checks) and any("too wide" in why_failed(check) for check in checks)


def test_own_rounds_are_those_of_the_texts_that_were_read():
    one, other = ([SimpleNamespace(steps=steps) for steps in each] for each in ((2, 2, 0, 5), (1,)))
    results = [SimpleNamespace(speculative_laws=read, speculative=SimpleNamespace(rounds=rounds, seconds=seconds))
               for read, rounds, seconds in ((True, one, 3.0), (None, other, 4.0), (True, other, 5.0))]  # fmt: skip
    seconds, rounds = gamma_sweep.own_rounds(results, 3)
    assert seconds.tolist() == [3, 5] and rounds.tolist() == [[1, 0, 2, 1], [0, 1, 0, 0]]


def test_nothing_is_expected_on_a_machine_that_was_not_steady(pool, monkeypatch):
    trace, rounds = as_probed(0, pool, pool[2], 0.02)
    monkeypatch.setattr(gamma_sweep, "trace_of", lambda *given: trace)
    monkeypatch.setattr(gamma_sweep, "sweep_rounds", lambda trace: rounds)
    monkeypatch.setattr(gamma_sweep, "own_rounds", lambda *given: (rounds[USED] @ pool[2], rounds[USED]))
    cost = SimpleNamespace(by_gamma=None, halves=None)
    found = gamma_sweep.gamma_sweep([], cost, 1.0, USED)
    assert len(found.gamma_sweep) == LARGEST + 1 and found.gamma_pick.over_own and found.cost_check.passed
    none = gamma_sweep.gamma_sweep([], cost, 1.0, USED, ["it drifted"])
    assert (none.gamma_sweep, none.gamma_pick, none.regret) == ([], None, None)
    assert none.no_replay == "the machine was not steady: it drifted" and none.cost_check.passed
    varied = gamma_sweep.gamma_sweep([], cost, 1.0, None)
    assert varied.gamma_pick.over_own is None and varied.regret is None


@pytest.mark.slow  # test_rounds_that_were_cheaper_in_probes_than_in_the_run_are_found has right costs too
@pytest.mark.parametrize(("noise", "swing"), [(0.03, 0.05), (0.08, 0.3)])
def test_right_costs_are_1_within_a_narrow_interval_however_the_pace_changes(noise, swing, pool):
    """With all gammas probed in each prompt. Against costs that do not know the pace beside them, the control."""

    def checks(paced, runs):
        runs = (as_probed(seed, pool, pool[2], noise, LARGEST, swing, paced) for seed in range(runs))
        return [own_check(trace, rounds, pool[2], seed).ci95 for seed, (trace, rounds) in enumerate(runs)]

    found = checks(True, 40)
    assert np.mean([low <= 1 <= high for low, high in found]) >= 0.9
    width = np.median([high / low - 1 for low, high in found])
    assert width < (0.06 if noise < 0.05 else 0.12)
    assert np.median([high / low - 1 for low, high in checks(False, 8)]) > 1.1 * width
