"""The factors of the speedup, costs and predictions with their intervals, on simulated runs whose truth is known."""

import math
import tracemalloc

import numpy as np
import pytest

from specbench.data.prompts import Request
from specbench.decoding.timer import Lap
from specbench.results.wording import needs
from specbench.stats.bootstrap import (
    FEWEST,
    MOST_CLUSTERS,
    BootstrapSums,
    joined,
    prompt_clusters,
    ratio,
    resampled_sums,
    speedup_interval,
    student,
    student_tail,
    time_clusters,
    units_needed,
)
from specbench.stats.derive import accounting
from specbench.stats.formulas import cost_ratios
from specbench.stats.records import DecodedRequest, Group, PerRequestSums, Result, Round, RunRecord
from specbench.stats.request_sums import columns_of_rows, sums_of
from specbench.stats.two_way_bootstrap import TwoWaySums

STEP, C, V, REST, PLAIN_REST = 0.01, 0.2, 1.3, 0.1, 0.05  # seconds of a target step, and costs in such steps


def of_round(position, gamma, betas, accepted, tokens, noise, rows=1):
    tested = min(accepted + 1, gamma, tokens)
    seconds = {Lap.DRAFT: gamma * C, Lap.VERIFY: V if gamma else 1.0, Lap.ACCEPT: REST * 0.6, Lap.HOST: REST * 0.4}
    return Round(
        row=0, position=position, gamma=gamma, accepted=min(accepted, tokens), tested=tested, tokens=tokens,
        recovered=int(accepted < gamma), bonus=int(accepted == gamma), accepted_before_stop=accepted,
        beta=betas[:tested], seconds={lap: s * STEP * noise * rows for lap, s in seconds.items()}, steps=gamma,
        width=gamma + 1, rows=rows,
    )  # fmt: skip


def request(rng, betas_of, gamma=4, limit=64, spread=0.0, name="p", rows=1, hazard=0.0):
    """A request whose rounds draw their acceptances from the betas that `betas_of` gives for each of them."""
    rounds, position, noise = [], 0, math.exp(spread * rng.standard_normal())
    while position < limit:
        drafted = min(gamma, limit - position - 1)
        betas = list(betas_of(rng, gamma))
        accepted = next((i for i in range(drafted) if rng.random() > betas[i]), drafted)
        kept = next((i + 1 for i in range(accepted + 1) if rng.random() < hazard), None)
        rounds.append(of_round(position, drafted, betas, accepted, kept or accepted + 1, noise, rows))
        position += kept or accepted + 1
        if kept:
            break
    plain_seconds = {Lap.VERIFY: STEP * noise * rows, Lap.HOST: PLAIN_REST * STEP * noise * rows}
    plain = [Round(0, i, 0, 0, 0, 1, 0, 1, 0, [], seconds=plain_seconds, rows=rows) for i in range(position)]
    tokens = [0] * position
    return Result(
        Request(name, name.split("/")[0], "", [1], ""),
        limit, DecodedRequest(tokens, rounds), DecodedRequest(tokens, plain),
    )  # fmt: skip


def constant(alpha):
    return lambda rng, gamma: [alpha] * gamma


def one_beta_a_round(rng, gamma):
    return [rng.choice([0.36, 0.96])] * gamma


def run(betas_of, requests=400, seed=0, **options):
    rng = np.random.default_rng(seed)
    return [request(rng, betas_of, name=f"p{i}", **options) for i in range(requests)]


def columns_of(results, by_beta=True):
    return columns_of_rows([sums_of(result, by_beta) for result in results], len(results))


def factors_of(results, gamma=4, by_beta=True):
    return accounting(BootstrapSums(columns_of(results, by_beta)), gamma)


@pytest.mark.slow
def test_independent_betas_leave_only_the_cuts_at_the_limit():
    found = factors_of(run(constant(0.66)))
    assert found["dependence"].factor == pytest.approx(1, abs=0.004)
    assert found["luck"].ci95[0] < 1 < found["luck"].ci95[1]
    # Of 64 tokens the last draft is cut: by a simulation of the rounds alone.
    expected = [1 - 0.66 ** (g + 1) for g in range(5)]
    rng, values = np.random.default_rng(1), []
    for _ in range(4000):
        position = 0
        while position < 64:
            gamma = min(4, 63 - position)
            values.append(expected[gamma] / expected[4])
            position += next((i for i in range(gamma) if rng.random() > 0.66), gamma) + 1
    assert found["short_drafts"].factor == pytest.approx(np.mean(values), abs=0.003)
    assert found["short_drafts"].factor < 0.99


def test_texts_that_end_have_a_factor_of_their_own():
    found = factors_of(run(constant(0.8), 1500, hazard=0.1))
    assert found["stops"].factor < 0.9
    assert found["dependence"].factor == pytest.approx(1, abs=0.015)
    assert found["luck"].factor == pytest.approx(1, abs=0.01)


def test_a_verifier_that_accepts_more_than_beta_has_no_luck():
    results = run(constant(0.66))
    for result in results:
        for r in result.speculative.rounds:
            r.beta = [beta / 2 for beta in r.beta]
    assert factors_of(results)["luck"].factor > 1.2  # of one that accepts with probability beta it would be luck
    assert factors_of(results, by_beta=False)["luck"].factor == 1


def test_requests_without_a_draft_leave_c_its_interval_and_have_no_factors():
    none = run(constant(0.6), 28, gamma=0)
    assert BootstrapSums(columns_of(run(constant(0.6), 4) + none)).intervals(cost_ratios)["c"] is not None
    assert factors_of(none, 0) == {}


def test_betas_of_one_round_that_are_alike_are_found():
    """Negative control for the factor `dependence`. Good rounds are tested at more positions than bad ones, so alpha is
    above the mean of the rounds, and equation 1 promises more than they give."""
    found = factors_of(run(one_beta_a_round))
    assert found["dependence"].ci95[1] < 0.97


@pytest.mark.slow
def test_costs_are_those_of_the_simulation():
    sums = BootstrapSums(columns_of(run(constant(0.7), spread=0.2)))
    cost, ranges = cost_ratios(sums.point), sums.intervals(cost_ratios)
    assert cost["c"] == pytest.approx(C, rel=5e-3) and cost["o"] == pytest.approx(REST, rel=5e-3)
    assert 1 < cost["v"] <= V  # some rounds draft nothing
    assert ranges["target_step_seconds"][0] < cost["target_step_seconds"] < ranges["target_step_seconds"][1]
    factors = factors_of(run(constant(0.7), spread=0.2))
    assert factors["plain_rest"].factor == pytest.approx(1 + PLAIN_REST)


@pytest.mark.parametrize("rows", [1, 4])
def test_the_factors_multiply_to_the_ratio_of_total_times(rows):
    results = run(one_beta_a_round, 30, rows=rows)
    seconds = [sum(sum(r.seconds.values()) / r.rows for x in results for r in way(x).rounds)
               for way in (lambda x: x.baseline, lambda x: x.speculative)]  # fmt: skip
    product = math.prod(f.factor for f in factors_of(results).values())
    assert product == pytest.approx(seconds[0] / seconds[1], rel=1e-9)


def test_an_interval_of_costs_covers_the_truth():
    """With a machine whose speed differs by request, the true ratio of two noisy times is inside."""
    rng, hits = np.random.default_rng(0), 0
    same = {name: np.ones(30) for name in ("verify_seconds", "calls", "seconds", "steps", "plain_calls")}
    for _ in range(300):
        times = {name: rng.gamma(20, 1, 30) for name in ("draft_seconds", "plain_step_seconds")}
        low, high = BootstrapSums(same | times).intervals(cost_ratios)["c"]
        hits += low < 1 < high
    assert 0.92 < hits / 300 < 0.98


@pytest.mark.parametrize("clusters", [5, *(pytest.param(more, marks=pytest.mark.slow) for more in (8, 30))])
def test_intervals_of_few_clusters_cover_the_truth(clusters):
    rng, hits = np.random.default_rng(0), 0
    for plain, ours in (rng.lognormal(0, 0.3, (2, clusters)) for _ in range(400)):
        _, (low, high) = speedup_interval(plain, [1] * clusters, ours, [1] * clusters)
        hits += low < 1 < high
    assert 0.9 < hits / 400 < 0.985


def test_the_quantile_is_students():
    """Against the tables of Student's distribution."""
    quantiles = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 30: 2.042, 10_000: 1.960}
    assert {freedom: student(freedom) for freedom in quantiles} == pytest.approx(quantiles, rel=3e-4)
    for outside, freedom in ((0.02, 4), (2e-4, 7)):
        assert student_tail(student(freedom, outside), freedom) == pytest.approx(outside, rel=0.01)


def test_the_requests_that_an_interval_needs_narrow_it_to_that():
    """Of an error that falls as 1 / sqrt(n), with Student's quantile; the control: one request fewer is too few."""
    half, sd = student(11) * 0.2 / math.sqrt(12), 0.2
    needed = units_needed((math.exp(-half), math.exp(half)), 12, 0.05)
    assert student(needed - 1) * sd / math.sqrt(needed) <= 0.05 < student(needed - 2) * sd / math.sqrt(needed - 1)
    assert needs((0.9, 1.1), 32, 32) and "needs about" in needs((0.9, 1.1), 32, 32)
    assert needs((0.97, 1.03), 32, 32) == needs(None, 3, 3) == ""


@pytest.mark.slow  # test_intervals_of_few_clusters_cover_the_truth
def test_many_clusters_are_resampled_in_little_memory_with_the_same_error():
    """Against the linearised error of all clusters; joining them in their own order would not see a machine that
    drifts, since then the joined ones differ by more than the clusters do."""
    rng, many = np.random.default_rng(1), 50_000
    times = rng.lognormal(0, 0.5, (2, many)) * np.linspace(1, 2, many)
    tracemalloc.start()
    _, (low, high) = speedup_interval(*(part for way in times for part in (way, np.ones(many))))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    mean = times.mean(1)
    error = np.std(times[0] / mean[0] - times[1] / mean[1]) / math.sqrt(many)
    assert math.log(high / low) / 2 / 1.96 == pytest.approx(error, rel=0.07)
    assert peak < 100e6  # 10,000 samples of every cluster would be 4 GB
    in_order = times.reshape(2, MOST_CLUSTERS, -1).sum(-1)
    spreads = [np.std(resampled_sums(table)[0]) for table in (times, in_order)]
    assert spreads[1] > 1.5 * spreads[0]  # negative control


def test_few_clusters_are_not_joined():
    more = np.random.default_rng(0).random((3, MOST_CLUSTERS + 7))
    assert joined(more).shape == (3, MOST_CLUSTERS) and np.allclose(joined(more).sum(1), more.sum(1))
    few = more[:, :MOST_CLUSTERS]
    assert joined(few) is few


def test_too_few_prompts_have_no_interval():
    few, enough = run(constant(0.6), FEWEST - 1), run(constant(0.6), FEWEST)
    assert {factor.ci95 for factor in factors_of(few).values()} == {None}
    assert None not in {factor.ci95 for factor in factors_of(enough).values()}
    assert speedup_interval([1.0] * 4, [1] * 4, [1.0] * 4, [1] * 4) == (1.0, None)
    assert ratio([1.0] * 4, [2.0] * 4).stderr is None and ratio([1.0] * 5, [2.0] * 5).stderr == 0


def test_sums_that_few_clusters_have_leave_no_interval():
    """As of peers that have timed 4 and 5 of 12 requests: all 12 are resampled, and 5 are what is known."""
    rng, names = np.random.default_rng(0), [f"p{n}" for n in range(12)]
    columns = {f"{name} {n}": rng.gamma(20, 1, 12) * (np.arange(12) < n) for n in (4, 5) for name in ("above", "below")}
    one = BootstrapSums(columns)
    several = TwoWaySums.of(lambda: [PerRequestSums(names, names, [], [*range(12)], [], columns)] * 3)
    for source in (one, several):
        found = source.intervals(lambda s: {n: s[f"above {n}"] / s[f"below {n}"] for n in (4, 5)})
        assert found[4] is None and source.estimate("above 4", "below 4").stderr is None
        own = source.estimate("above 5", "below 5")
        assert math.log(found[5][1] / found[5][0]) / 2 > 0.95 * student(4) * own.stderr / own.mean


@pytest.mark.parametrize(("prompts", "processes", "share"), [(0.3, 0.0, 0), (0.0, 0.3, 1)])
def test_the_share_of_processes_is_of_what_varies(prompts, processes, share):
    """Three processes on 30 prompts; the variance is all of the one, or all of the other."""
    rng, names = np.random.default_rng(0), [f"p{n}" for n in range(30)]
    own, ones = np.exp(prompts * rng.standard_normal(30)), np.ones(30)
    sums = [PerRequestSums(names, names, [], [*range(30)], [], {"seconds": own * pace, "tokens": ones})
            for pace in np.exp(processes * np.arange(3))]  # fmt: skip
    assert TwoWaySums.of(lambda: sums).process_share(lambda s: s["seconds"] / s["tokens"]) == pytest.approx(share)


def test_turns_of_a_prompt_and_rows_of_a_batch_are_one_cluster():
    rng = np.random.default_rng(0)
    record = RunRecord([Group([request(rng, constant(0.6), name=name) for name in names], None, None)
                        for names in (["a/1", "b/1"], ["c/1", "d/1"], ["b/2", "e/1"])])  # fmt: skip
    assert prompt_clusters(record.results) == ["a", "b", "c", "d", "b", "e"]
    assert time_clusters(record, 1) == prompt_clusters(record.results)
    found = time_clusters(record, 2)  # the second turn of b joins the first and the last group
    assert found[0] == found[1] == found[4] == found[5] != found[2] == found[3]


def test_a_cluster_counts_once():
    """Ten copies of each prompt as its turns tell no more than the prompts alone."""
    a, b = np.random.default_rng(0).random(20), np.full(20, 2.0)
    alone = ratio(a, b)
    copied = ratio(np.repeat(a, 10), np.repeat(b, 10), np.repeat(np.arange(20), 10).tolist())
    assert copied.stderr == pytest.approx(alone.stderr)
    assert ratio(np.repeat(a, 10), np.repeat(b, 10)).stderr < alone.stderr / 3  # negative control
