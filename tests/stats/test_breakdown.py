"""Numbers by category, place in the round, entropy, confidence and kind of token: by hand, from simulated rounds whose
truth is known, and against the files of a run."""

import json
import math
from dataclasses import replace

import numpy as np
import pyarrow.parquet as parquet
import pytest
from choosing import only
from small_runs import parts_of

from specbench.data.prompts import Request
from specbench.decoding.timer import Lap
from specbench.results.writer import write_result
from specbench.run.run import run
from specbench.stats.bootstrap import BootstrapSums
from specbench.stats.breakdown import acceptance_check, acceptance_of, by_rows, recited_share
from specbench.stats.derive import by_category, by_length, of_one_process
from specbench.stats.formulas import speedup_ratios, user_rates
from specbench.stats.records import DecodedRequest, PerRequestSums, PositionStats, Result, Round
from specbench.stats.request_sums import Tokens, class_of_text, columns_of_rows, confidence_bin, recited, sums_of
from specbench.stats.two_way_bootstrap import TwoWaySums

LAPS = (Lap.DRAFT, Lap.VERIFY, Lap.ACCEPT, Lap.HOST)


class Words:
    """A tokenizer of six tokens."""

    all_special_ids = (5,)

    def decode(self, tokens, skip_special_tokens=False):
        return "".join((" word", "12", " =", "\n", "a+", "</s>")[token] for token in tokens)


def round_of(position, gamma, accepted, betas, seconds=1.0, rejected=4, rows=1):
    """A round that ends in a recovered token if a guess was rejected, else in a bonus token."""
    rejects = accepted < gamma
    tested = accepted + rejects
    return Round(0, position, gamma, accepted, tested, accepted + 1, int(rejects), int(not rejects), accepted, betas,
                 rejected if rejects else None, {}, {lap: seconds / 4 for lap in LAPS}, rows, gamma)  # fmt: skip


def plain_of(tokens, seconds=2.0, rows=1):
    laps = {lap: seconds / 4 for lap in LAPS}
    rounds = [Round(0, i, 0, 0, 0, 1, 0, 1, 0, [], None, {}, laps, rows) for i in range(len(tokens))]
    return DecodedRequest(tokens, rounds)


def result_of(rounds, tokens, laws=None, name="p", category="", rows=1, plain_seconds=2.0):
    request = Request(name, name, "", [0], category)
    plain = plain_of(tokens, plain_seconds, rows)
    return Result(request, 99, DecodedRequest(tokens, rounds), plain, {}, laws, laws)


def sums_of_results(results, tokens=None):
    """The sums of some requests, without what needs groups and models."""
    prefill = {"prefill_seconds": 1.0, "plain_prefill_seconds": 1.0, "drafter_prefill_seconds": 0.25}
    rows, names = [sums_of(result, tokens=tokens) | prefill for result in results], [r.request.id for r in results]
    categories = [r.request.category for r in results]
    return PerRequestSums(
        names, names, categories, list(range(len(rows))), [0] * len(rows), columns_of_rows(rows, len(rows))
    )


def accepted_in(result, tokens=None):
    """What the sums of one request say of its guesses."""
    return acceptance_of(BootstrapSums.of(sums_of_results([result], tokens)), True)


def geometric_mean(source):
    return speedup_ratios(source.point)["geometric_mean"]


TWO = [round_of(0, 3, 1, [0.9, 0.5]), round_of(2, 3, 3, [0.8, 0.7, 0.6]), round_of(6, 1, 0, [0.25])]
TEXT = [0, 1, 2, 3, 0, 1, 0]  # the tokens of TWO: 2 + 4 + 1


def test_places_and_lengths_by_hand():
    found = accepted_in(result_of(TWO, TEXT))
    assert found.lengths == [1, 1, 0, 1]
    # place 1: tested thrice, accepted twice; place 2: tested twice, accepted once; place 3: once, once
    assert [(e.mean, e.n) for e in found.conditional] == [(2 / 3, 3), (1 / 2, 2), (1, 1)]
    # drafts with at least 1, 2, 3 guesses: 3, 2, 2
    assert [(e.mean, e.n) for e in found.joint] == [(2 / 3, 3), (1 / 2, 2), (1 / 2, 2)]


def test_joint_is_the_product_of_conditionals_for_full_drafts():
    generator, alpha, gamma = np.random.default_rng(0), (0.9, 0.5, 0.7), 3
    rounds = []
    for position in range(0, 8000, 4):
        wins = [generator.random() < a for a in alpha]
        accepted = wins.index(False) if False in wins else gamma
        rounds.append(round_of(position, gamma, accepted, list(alpha[: min(accepted + 1, gamma)])))
    found = accepted_in(result_of(rounds, [0] * 8000))
    conditional, joint = ([e.mean for e in some] for some in (found.conditional, found.joint))
    assert conditional == pytest.approx(alpha, abs=0.04) and joint == pytest.approx(np.cumprod(conditional))
    assert joint == pytest.approx(np.cumprod(alpha), abs=0.04)
    assert np.dot(range(4), found.lengths) / sum(found.lengths) == pytest.approx(sum(joint))  # E[n] = sum of P(n >= i)
    short = [*rounds, *(round_of(9000, 1, 0, [0.5]) for _ in range(1000))]  # negative control: drafts that were cut
    found = accepted_in(result_of(short, [0] * 9000))
    assert abs(found.joint[1].mean - found.conditional[0].mean * found.conditional[1].mean) > 0.05


def test_kinds_of_guesses():
    tokens = Tokens(Words(), 6)
    assert [tokens.class_of(i) for i in range(6)] == [
        "word", "number", "punctuation", "whitespace", "other", "special"]  # fmt: skip
    found = accepted_in(result_of(TWO, TEXT), tokens).by_token_class
    # guesses: round 1 token 0 (kept), token 4 (rejected); round 2 tokens 2, 3, 0 (kept); round 3 token 4 (rejected)
    assert {name: (e.mean, e.n) for name, e in found.items()} == {
        "word": (1, 2), "punctuation": (1, 1), "whitespace": (1, 1), "other": (0, 2)}  # fmt: skip


@pytest.mark.parametrize(
    "text, expected",
    [(" def", "word"), ("self_2", "word"), ("n't", "word"), ("été", "word"), ("变", "word"), ("2x", "other"),
     ("3.14", "number"), ("1_000", "number"), ("\n\n  ", "whitespace"), ("):", "punctuation"), ("__", "punctuation"),
     ("foo(", "other"), ("", "other"), ("\ufffd", "other"), (" ...", "punctuation"), ("٣", "number")],
)  # fmt: skip
def test_classes_of_texts(text, expected):
    assert class_of_text(text) == expected


def laws_of(entropy, target_entropy, confidence, agreement):
    columns = {name: np.full(len(entropy), np.nan) for name in PositionStats.__dataclass_fields__}
    columns |= {"relative_entropy": entropy, "target_entropy": target_entropy}
    columns |= {"confidence": confidence, "agreement": agreement}
    return PositionStats(**{name: np.array(column, float) for name, column in columns.items()})


def test_entropy_and_confidence_by_hand():
    nats = math.log(6)
    h = np.array([0.05, 0.2, 0.2, 4.5, 0.7, np.nan, 0.05]) / nats
    laws = laws_of(h, np.full(7, 1.5 / nats), [0.95, 0.95, 0.85, 0.05, 1.0, np.nan, 0.3],
                   [0.9, 1.0, 0.5, 0.1, 1.0, np.nan, 0.2])  # fmt: skip
    found = accepted_in(result_of(TWO, TEXT, laws), Tokens(Words(), 6))
    # tested positions 0, 1 (rejected), 2, 3, 4, 6 (rejected); betas .9 .5 .8 .7 .6 .25
    bins = {(b.low, b.high): (b.alpha.mean, b.accepted.mean, b.alpha.n) for b in found.by_entropy["drafter"]}
    assert bins == pytest.approx({
        (0.0, 0.1): pytest.approx(((0.9 + 0.25) / 2, 0.5, 2)), (0.1, 0.5): pytest.approx(((0.5 + 0.8) / 2, 0.5, 2)),
        (0.5, 1.0): pytest.approx((0.6, 1, 1)), (4.0, 5.0): pytest.approx((0.7, 1, 1))})  # fmt: skip
    (only,) = found.by_entropy["target"]
    assert (only.low, only.high) == (1, 2) and only.alpha.mean == pytest.approx(3.75 / 6)
    told = found.calibration
    bins = {b.low: (b.positions, b.confidence, b.agreement, b.accepted.mean) for b in told.bins}
    assert bins[0.9] == pytest.approx((3, 2.9 / 3, 2.9 / 3, 2 / 3)) and bins[0.8] == pytest.approx((1, 0.85, 0.5, 1))
    assert told.positions == 6 and told.error == pytest.approx((0 + 0.35 + 0.05 + 0.1) / 6)
    assert confidence_bin(np.array([0.0, 0.0999, 0.1, 0.95, 1.0])).tolist() == [0, 0, 1, 9, 9]


def test_a_drafter_that_says_what_is_so_is_calibrated_and_a_bold_one_is_not():
    confidence = np.random.default_rng(0).uniform(size=5000)

    def error(agreement):
        laws = laws_of(confidence, confidence, confidence, agreement)
        return accepted_in(result_of([round_of(0, 0, 0, [])], [0], laws)).calibration.error

    hits = (np.random.default_rng(1).random(5000) < confidence).astype(float)  # temperature 0: right or wrong
    assert error(confidence) == pytest.approx(0, abs=1e-12) and error(hits) < 0.03
    assert error(confidence**2) == pytest.approx(1 / 6, abs=0.01)  # E[c - c^2]


def simulated(generator, requests, alpha, actual=None):
    """Requests of 40 rounds of four guesses that are accepted with probability `actual`, or their betas if None."""
    results = []
    for number in range(requests):
        rounds = []
        for position in range(0, 200, 5):
            betas = generator.beta(4 * alpha, 4 * (1 - alpha), 4)
            wins = generator.random(4) < (betas if actual is None else actual)
            accepted = 4 if wins.all() else int(wins.argmin())
            rounds.append(round_of(position, 4, accepted, betas[: min(accepted + 1, 4)].tolist()))
        results.append(result_of(rounds, [0] * 200, name=f"p{number}"))
    return results


def test_the_check_is_a_standard_normal_if_guesses_are_accepted_with_beta():
    generator = np.random.default_rng(0)
    z = [acceptance_check(BootstrapSums.of(sums_of_results(simulated(generator, 2, 0.7))).point).z for _ in range(150)]
    assert abs(np.mean(z)) < 0.3 and 0.8 < np.std(z) < 1.2
    found = acceptance_check(BootstrapSums.of(sums_of_results(simulated(generator, 20, 0.7, actual=0.8))).point)
    assert found.z > 6  # negative control: more are accepted than betas say
    assert acceptance_check({"accepted": 3, "beta": 3.0, "beta_variance": 0.0}) is None
    rare = {"accepted": 9, "beta": 9.99, "beta_variance": 0.01}  # one guess of beta .99 was rejected: no wonder
    assert acceptance_check(rare) is None


def test_categories_are_those_of_their_prompts_and_too_few_have_no_interval():
    one = [result_of(TWO, TEXT, name=f"a{i}", category="a", plain_seconds=2.0 + i / 10) for i in range(6)]
    other = [result_of(TWO[:1], TEXT[:2], name="b0", category="b", plain_seconds=1.0)]
    sums = sums_of_results([*one, *other, result_of(TWO, TEXT, name="none")])
    found = by_category(lambda: [sums], of_one_process)
    assert list(found) == ["a", "b"] and (found["a"].prompts, found["b"].prompts) == (6, 1)
    # ours: 3 seconds for 7 tokens; plain: 7 tokens at 2.0, 2.1, ... 2.5 seconds
    speedups = [7 * (2 + i / 10) / 3 for i in range(6)]
    a = found["a"]
    assert a.speedup.measured == pytest.approx(np.mean(speedups)) and a.block_efficiency.mean == pytest.approx(7 / 3)
    assert a.speedup.geometric_mean.mean == pytest.approx(math.exp(np.mean(np.log(speedups))))
    assert a.speedup.end_to_end == pytest.approx(sum(7 * (2 + i / 10) + 1 for i in range(6)) / (6 * 4))
    assert a.tokens_per_second == pytest.approx(7 / 3) and a.alpha.mean == pytest.approx(3.75 / 6)
    low, high = a.speedup.ci95
    assert low < a.speedup.measured < high and a.speedup.geometric_mean.ci95[0] > low * 0.9
    b = found["b"]
    assert b.speedup.measured == pytest.approx(2.0) and b.speedup.ci95 is None and b.alpha.stderr is None


@pytest.mark.parametrize(("prompt", "new", "count"), [
    ([*range(8)], [9, *range(8)], 1),
    ([*range(8)], [9, *range(7)], 0),
    ([*range(8)], [9, *range(8), 9], 2),
    ([*range(8), *range(8)], [9], 0),  # what a prompt repeats is not recited
    ([], [5] * 20, 12),
    ([], [*range(20)], 0),
])  # fmt: skip
def test_recited_tokens_end_eight_in_a_row_that_stand_earlier(prompt, new, count):
    assert recited(prompt, new) == count


def test_lengths_are_those_of_their_prompts():
    """127 and 128 tokens are told apart; the gain of each is that of its own requests."""
    gains = {100: 2.0, 127: 2.0, 128: 3.0, 600: 5.0, 20_000: 7.0}
    results = []
    for length, gain in gains.items():
        result = result_of(TWO, TEXT, name=f"p{length}", plain_seconds=gain * 3)
        results.append(replace(result, request=replace(result.request, tokens=[1] * length)))
    found = by_length(lambda: [sums_of_results(results)], of_one_process)
    assert {name: of.prompts for name, of in found.items()} == {
        "1 to 127": 2, "128 to 511": 1, "512 to 2047": 1, "8192 or more": 1}  # fmt: skip
    expected = [gain * 7 for gain in (2.0, 3.0, 5.0, 7.0)]  # 3 seconds for 7 tokens; plain: `gain * 3` for each token
    assert [of.speedup.measured for of in found.values()] == pytest.approx(expected)
    assert not by_length(lambda: [sums_of_results(results[:2])], of_one_process)  # all of one length


def test_recited_of_all_and_of_each_category():
    rounds = [round_of(0, 4, 4, [0.5] * 4)] * 4
    results = [result_of(rounds, [5] * 20, name="a", category="a"), result_of(rounds, [*range(20)], category="b")]
    sums = sums_of_results(results)
    assert recited_share(BootstrapSums.of(sums).point) == 12 / 40
    assert [of.recited for of in by_category(lambda: [sums], of_one_process).values()] == [12 / 20, 0.0]
    assert recited_share({"tokens": 40.0}) is None  # sums of an older version


def test_both_averages_of_block_efficiency():
    """10 tokens in 2 calls and 6 in 6: 2 tokens a call, and 3 in the mean of requests."""
    few, many = [round_of(0, 4, 4, [0.5] * 4)] * 2, [round_of(0, 1, 0, [0.5])] * 6
    source = BootstrapSums.of(sums_of_results([result_of(few, [*range(10)]), result_of(many, [*range(6)])]))
    assert source.estimate("tokens", "rounds").mean == 2
    assert source.estimate("tokens_per_round", "requests").mean == 3


def test_the_geometric_mean_is_of_ratios_not_of_times():
    """A long prompt that gains nothing outweighs the others in the ratio of times, not in the geometric mean."""
    long = result_of([round_of(0, 1, 1, [1.0], seconds=200.0)], [0, 0], name="long", plain_seconds=100.0)
    short = [result_of([round_of(0, 1, 1, [1.0])], [0, 0], name=f"s{i}", plain_seconds=1.0) for i in range(7)]
    source = BootstrapSums.of(sums_of_results([long, *short]))
    assert geometric_mean(source) == pytest.approx(2 ** (7 / 8))
    assert source.point["plain_seconds"] / source.point["seconds"] < 1.04


def test_a_user_waits_for_whole_calls():
    """Two rows share each call of 1 s: together they make twice as many tokens a second as one user sees."""
    rounds = [round_of(0, 1, 1, [1.0], rows=2), round_of(2, 1, 1, [1.0], rows=1)]
    source = BootstrapSums.of(sums_of_results([result_of(rounds, [0] * 4, rows=2)]))
    point = source.point
    assert point["tokens"] / point["seconds"] == pytest.approx(4 / 1.5)
    assert list(user_rates(point).values()) == pytest.approx([4 / 2, 1 / 2])
    alone, both = by_rows(source)
    assert (alone.rows_to, both.rows_from, both.rows_to) == (1, 2, 2) and alone.baseline is None
    assert both.speculative.tokens_per_second == pytest.approx(4) == 2 * both.speculative.user_tokens_per_second
    assert both.baseline.tokens_per_second == pytest.approx(1)
    assert by_rows(BootstrapSums.of(sums_of_results([result_of(TWO, TEXT)]))) == []


def test_several_processes_pool_their_sums():
    processes = [sums_of_results(simulated(np.random.default_rng(seed), 6, 0.7)) for seed in range(3)]
    pooled = acceptance_of(TwoWaySums.of(lambda: processes), False)
    alone = [acceptance_of(BootstrapSums.of(sums), False) for sums in processes]
    assert pooled.lengths == np.sum([found.lengths for found in alone], 0).tolist()
    for place in range(4):
        tested = [found.conditional[place].n for found in alone]
        mean = np.average([found.conditional[place].mean for found in alone], weights=tested)
        assert pooled.conditional[place].mean == pytest.approx(mean) and pooled.conditional[place].n == sum(tested)
        assert pooled.conditional[place].stderr > 0
    own = [geometric_mean(BootstrapSums.of(sums)) for sums in processes]
    assert geometric_mean(TwoWaySums.of(lambda: processes)) == pytest.approx(np.prod(own) ** (1 / 3))


@pytest.fixture(scope="module", params=only(["temperature=0"], ["temperature=1", "temperature=0"]))
def folder(request, tmp_path_factory):
    """A run's folder."""
    folder = tmp_path_factory.mktemp("run")
    parts = parts_of("executor=eager", "verdict_tokens=0", "gamma=3", request.param)
    result, record = run(parts, folder)
    write_result(result, record, "digest", folder, parts.target.tokenizer)
    return folder


def test_a_run_agrees_with_its_files(folder):
    result = json.loads((folder / "results.json").read_text())
    rounds = parquet.read_table(folder / "rounds.parquet").to_pylist()
    positions = {(p["prompt"], p["position"]): p for p in parquet.read_table(folder / "positions.parquet").to_pylist()}
    found = result["acceptance"]
    assert found["lengths"] == np.bincount([r["accepted"] for r in rounds]).tolist()
    assert sum(e["n"] for e in found["by_token_class"].values()) == result["counts"]["tested"]
    tested = [(r["prompt"], r["position"] + i, i < r["accepted"], b) for r in rounds for i, b in enumerate(r["beta"])]
    nats = math.log(4096)  # the shipped vocabulary
    for model, column in (("drafter", "relative_entropy"), ("target", "target_entropy")):
        own = [(positions[name, place][column] * nats, accepted, beta) for name, place, accepted, beta in tested]
        assert sum(b["alpha"]["n"] for b in found["by_entropy"][model]) == len(own)
        for b in found["by_entropy"][model]:
            here = [(a, beta) for h, a, beta in own if b["low"] <= h < (b["high"] or math.inf)]
            assert b["accepted"]["mean"] == pytest.approx(np.mean([a for a, _ in here]))
            assert b["alpha"]["mean"] == pytest.approx(np.mean([beta for _, beta in here]))
    if result["config"]["temperature"] == 0:  # both texts are one, and a guess is q's most likely token
        assert found["calibration"]["positions"] == len(positions) and found["check"] is None
        for name, place, accepted, _ in tested:
            assert positions[name, place]["agreement"] == accepted
    else:
        betas = np.array([beta for *_, beta in tested])
        variance = (betas * (1 - betas)).sum()
        z = (result["counts"]["accepted"] - betas.sum()) / math.sqrt(variance)
        assert abs(z) < 4 and (found["check"] is None) == (variance < 9)
        assert found["check"] is None or found["check"]["z"] == pytest.approx(z)


def test_times_between_tokens_are_those_of_the_rounds(folder):
    result = json.loads((folder / "results.json").read_text())
    lines = {line["id"]: line for line in map(json.loads, (folder / "prompts.jsonl").read_text().splitlines())}
    rounds = parquet.read_table(folder / "rounds.parquet").to_pylist()
    spent = (*LAPS, Lap.PREFILL, Lap.DRAFTER_PREFILL)
    own = {name: [sum(r[f"{lap}_seconds"] for lap in spent) for r in rounds if r["prompt"] == name] for name in lines}
    found = result["latency"]["speculative"]
    firsts = [seconds[0] for seconds in own.values()]
    assert found["first_token"]["p50"] == pytest.approx(np.median(firsts))
    assert sum(firsts) > sum(line["prefill_seconds"] for line in lines.values()) > 0
    cost, drafter = result["cost"], sum(r["drafter_prefill_seconds"] for r in rounds)
    assert cost["prefill_seconds"] == pytest.approx(np.mean([line["prefill_seconds"] for line in lines.values()]))
    assert cost["drafter_prefill_seconds"] == pytest.approx(drafter / len(lines))
    assert 0 < cost["drafter_prefill_seconds"] < cost["prefill_seconds"]
    gaps = [gap for seconds in own.values() for gap in seconds[1:]]
    for p in (50, 90, 95, 99):
        assert found["inter_token"][f"p{p}"] == pytest.approx(np.percentile(gaps, p))
    per_token = [sum(seconds[1:]) / (lines[name]["tokens"] - 1) for name, seconds in own.items()]
    assert found["time_per_output_token"]["mean"] == pytest.approx(np.mean(per_token))
    assert found["queue"]["p50"] is None
    rates = result["throughput"]
    assert rates["user_tokens_per_second"] == pytest.approx(rates["speculative_tokens_per_second"])
    logs = [math.log(x["baseline_decode_seconds"] / x["baseline_tokens"] / x["decode_seconds"] * x["tokens"])
            for x in lines.values()]  # fmt: skip
    assert result["speedup"]["geometric_mean"]["mean"] == pytest.approx(math.exp(np.mean(logs)))
