"""Runs compared on the requests that they share: ratios, tests and causes, and decoding in turn."""

import json
import math
from dataclasses import asdict
from itertools import count

import numpy as np
import pytest
from choosing import only
from small_runs import composed, fail_where, interrupt_the_second_group, small

import specbench.models.load as pretrained
import specbench.run.compare_command as command
from specbench.config.build import Targets, build
from specbench.config.validate import check
from specbench.errors import ConfigError
from specbench.results.comparability import unlike_engines
from specbench.results.comparison_tables import ranking
from specbench.run import compare as in_turn
from specbench.run import reference_scores
from specbench.run.decoder import Session
from specbench.run.interleave import order_of_ways
from specbench.run.jobs import RunJob, jobs_of_one_task, jobs_that_share_decoding, labels_of
from specbench.run.run import run, run_in_turn
from specbench.run.warm_up import calibrate
from specbench.stats.bootstrap import student_tail
from specbench.stats.comparison import SPEEDUP, TOKENS_PER_SECOND, Pair, compare, holm, joined_clusters
from specbench.stats.formulas import speedup_of
from specbench.stats.records import PerRequestSums

PAIR = ["drafter=random", "drafter=prompt_lookup"]


def in_turn_of(cohorts, folder):
    """`run_in_turn` of parts that share plain decoding, each list its own."""
    numbers = count()
    runs = [[(parts, folder / str(next(numbers)), lambda group: None) for parts in own] for own in cohorts]
    return run_in_turn(runs, lambda done, total, what: None)


def few(good, *overrides) -> list[str]:
    """Overrides of a run of a tiny model without a verdict."""
    return small("logger=none", "verdict_tokens=0", "executor=eager", "target=model", f"target.path={good}", *overrides)


def simulated(prompts, seconds_a_token, seed, noise=0.05, spread=0.5, tokens_a_round=2.0) -> PerRequestSums:
    """A run of these numbers: prompts differ by `spread` (the same for every seed), single times by `noise`."""
    slow = np.exp(spread * np.random.default_rng(99).standard_normal(prompts))
    generator = np.random.default_rng(seed)

    def times(mean):
        return mean * slow * np.exp(noise * generator.standard_normal(prompts))

    tokens = np.full(prompts, 60.0)
    rounds, steps = tokens / tokens_a_round, tokens / tokens_a_round * 4
    seconds, plain = times(60 * seconds_a_token), times(60 * 0.01)
    columns = {
        "tokens": tokens, "rounds": rounds, "calls": rounds, "drafted": steps, "steps": steps, "tested": steps * 0.7,
        "beta": steps * 0.4, "expected": tokens, "stops": np.zeros(prompts), "seconds": seconds,
        "draft_seconds": 0.3 * seconds, "verify_seconds": 0.6 * seconds, "plain_tokens": tokens,
        "plain_calls": tokens, "plain_seconds": plain, "plain_step_seconds": 0.9 * plain,
        "text_beta": tokens * 0.5, "text_tested": tokens,
    }  # fmt: skip
    names = [str(number) for number in range(prompts)]
    return PerRequestSums(names, names, ["code"] * prompts, list(range(prompts)), columns=columns)


def test_pairing_finds_what_two_intervals_of_their_own_would_not():
    found = compare({"a": simulated(24, 0.0060, 1), "b": simulated(24, 0.0063, 2)}, TOKENS_PER_SECOND)
    assert [r.label for r in found.runs] == ["a", "b"] and [r.rank for r in found.runs] == [1, 2]
    low, high = found.runs[1].ratio_ci95
    assert low < 60 / 63 < high and high - low < 0.08 and found.pairs[0].corrected < 0.05
    alone = [r.ci95["tokens_per_second"] for r in found.runs]
    assert alone[0][0] < alone[1][1]  # unpaired they overlap: prompts differ by far more


def test_equal_runs_tie_and_the_test_holds_its_level():
    rejected = 0
    for seed in range(60):
        found = compare({"a": simulated(12, 0.006, 2 * seed), "b": simulated(12, 0.006, 2 * seed + 1)}, SPEEDUP)
        rejected += found.pairs[0].p_value < 0.05
        if seed == 0:
            assert [r.rank for r in found.runs] == [1, 1]
    assert rejected <= 8  # of 60 at level .05: more with probability .004
    same = simulated(12, 0.006, 1)
    assert compare({"a": same, "b": same}, SPEEDUP).pairs[0].p_value == 1


def test_factors_multiply_to_the_ratio_and_turn_with_the_order():
    a, b = simulated(9, 0.006, 1), simulated(9, 0.004, 2, tokens_a_round=3.0)
    a.columns["verify_seconds"] = 0.2 * a.columns["seconds"]
    sums = [{name: values.sum() for name, values in run.columns.items()} for run in (a, b)]
    for by, expected in ((SPEEDUP, speedup_of(sums[0]) / speedup_of(sums[1])),
                         (TOKENS_PER_SECOND, sums[1]["seconds"] / sums[0]["seconds"])):  # fmt: skip
        found = {reference: compare({"a": a, "b": b}, by, reference) for reference in "ab"}
        of_a = next(r for r in found["b"].runs if r.label == "a")
        of_b = next(r for r in found["a"].runs if r.label == "b")
        assert math.prod(of_a.causes.values()) == pytest.approx(expected) == pytest.approx(of_a.ratio)
        for name, factor in of_a.causes.items():
            assert factor * of_b.causes[name] == pytest.approx(1)
    assert of_a.causes["v"] > 1 > of_a.causes["o"]  # less of a's round is verifying, and more is the rest


def test_holms_method():
    pairs = [Pair("a", "b", 1.1, None, p, None) for p in (0.01, 0.04, 0.03, None)]
    assert [pair.corrected for pair in holm(pairs)] == pytest.approx([0.03, 0.06, 0.06, None])


@pytest.mark.parametrize(("t", "freedom", "p"), [(2.776, 4, 0.05), (2.040, 31, 0.05), (12.706, 1, 0.05), (0, 7, 1)])
def test_students_tail(t, freedom, p):
    assert student_tail(t, freedom) == pytest.approx(p, rel=2e-3)


def test_only_shared_requests_count_and_clusters_of_all_runs_are_joined():
    a, b = simulated(8, 0.006, 1), simulated(8, 0.006, 2)
    b.requests = [str(number) for number in range(2, 10)]
    found = compare({"a": a, "b": b}, SPEEDUP)
    assert found.requests == found.clusters == 6
    b.clusters = [0, 0, 1, 1, 2, 2, 3, 3]  # rows of b that were decoded together
    assert len({*joined_clusters({"a": a, "b": b}, [str(n) for n in range(2, 8)])}) == 3
    assert compare({"a": a, "b": b}, SPEEDUP).pairs[0].p_value is None  # too few
    b.requests = [f"other {number}" for number in range(8)]
    with pytest.raises(ConfigError, match="share no request"):
        compare({"a": a, "b": b}, SPEEDUP)


def test_processes_number_their_clusters_anew():
    """A run of three processes in other orders, and with a prompt that one of them lacks."""
    one = simulated(12, 0.006, 1)
    pooled = PerRequestSums(one.requests * 3, one.prompts * 3, one.categories * 3, columns={
        name: np.tile(values, 3) for name, values in one.columns.items()})  # fmt: skip
    pooled.processes = [process for process in range(3) for _ in range(12)]
    pooled.clusters = [(number * (1, 5, 7)[process]) % 12 for process in range(3) for number in range(12)]
    found = compare({"a": pooled, "b": one}, SPEEDUP)
    assert found.clusters == 12 and found.runs[0].ratio == pytest.approx(1) and found.pairs[0].p_value is None
    grouped = PerRequestSums(
        one.requests, one.prompts, one.categories, [n // 4 for n in range(12)], columns=one.columns
    )
    assert compare({"a": grouped, "b": one}, SPEEDUP).clusters == 3


def test_the_order_of_ways_is_balanced():
    two = [tuple(order_of_ways(["a", "b"], number)) for number in range(6)]
    assert two == [("a", "b"), ("b", "a")] * 3
    orders = [tuple(order_of_ways([*"abcd"], number)) for number in range(400)]
    for place in range(4):
        for way in "abcd":
            assert 70 < sum(order[place] == way for order in orders) < 130  # each 100 times but for chance
    follows = sum("ab" in "".join(order) for order in orders)
    assert 70 < follows < 130  # a rotation would have it three times in four


def jobs_of(tmp_path, *sweep):
    checked = {words: check(composed("logger=none", *words.split())) for words in sweep}
    return [RunJob(words.split(), tmp_path / str(n), found) for n, (words, found) in enumerate(checked.items())]


def test_jobs_share_plain_decoding_where_they_can(tmp_path):
    jobs = jobs_of(tmp_path, "gamma=1", "drafter=ngram lenience=0.5", "temperature=0", "executor=eager", "seed=1")
    assert [len(cohort) for cohort in jobs_that_share_decoding(jobs)] == [2, 1, 1, 1]
    assert [len(task) for task in jobs_of_one_task(jobs)] == [4, 1]  # other executors and seeds do the same work


def test_in_turn_gives_what_each_gives_alone(good, monkeypatch, tmp_path):
    loaded, plain = [], []
    load, decode = pretrained.load_module, Session.decode
    monkeypatch.setattr(pretrained, "load_module", lambda *given: loaded.append(1) or load(*given))
    ways = [few(good, "max_new_tokens=6", words) for words in PAIR]
    alone = [run(build(check(composed(*words))), tmp_path / words[-1])[1] for words in ways]
    assert len(loaded) == 2
    targets, made = Targets(), []
    for words in ways:
        made.append(build(check(composed(*words)), targets=targets))
    assert len(loaded) == 3 and made[0].target is not made[1].target
    assert made[0].target.module is made[1].target.module

    def counted(self, jobs, speculative, columns, *further, again=False, **named):
        plain.append(not speculative and not again and named.get("verifier") is None)
        return decode(self, jobs, speculative, columns, *further, again=again, **named)

    monkeypatch.setattr(Session, "decode", counted)
    found = in_turn_of([made], tmp_path)
    assert sum(plain) == 2  # each prompt once, for both
    for (result, record), wanted in zip(found, alone, strict=True):
        assert result.status == "complete" and result.counts.prompts == 2
        for ours, theirs in zip(record.results, wanted.results, strict=True):
            assert (
                ours.baseline.tokens == theirs.baseline.tokens and ours.speculative.tokens == theirs.speculative.tokens
            )
            assert [r.beta for r in ours.speculative.rounds] == [r.beta for r in theirs.speculative.rounds]


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_stock_module_reads_equal_texts_once(temperature, good, monkeypatch, tmp_path):
    """At temperature 0 both ways write the same text, which is read once. Above it they write others, and what is read
    of each is what is read of it alone."""
    stock, read = reference_scores.stock_scores, []
    monkeypatch.setattr(reference_scores, "stock_scores", lambda *given: read.append(1) or stock(*given))
    of_both = ("logger=none", "executor=eager", "target=model", f"target.path={good}", f"temperature={temperature}")
    targets, words = Targets(), [small(*of_both, way) for way in PAIR]
    alone = [run(build(check(composed(*own))), tmp_path / own[-1])[1] for own in words]
    assert len(read) == 4  # two prompts of each
    read.clear()
    made = [build(check(composed(*own)), targets=targets) for own in words]
    found = [record for _, record in in_turn_of([made], tmp_path)]
    texts = {(r.request.prompt_id, tuple(r.speculative.tokens)) for record in found for r in record.results}
    assert len(read) == len(texts) == (4 if temperature else 2)
    for record, wanted in zip(found, alone, strict=True):
        for ours, theirs in zip(record.results, wanted.results, strict=True):
            assert ours.reading.tokens == theirs.reading.tokens > 0
            for name in ("gap", "short", "tv", "rounding"):
                np.testing.assert_array_equal(getattr(ours.reading, name), getattr(theirs.reading, name))


@pytest.mark.slow
def test_verifiers_share_plain_decoding_that_none_of_them_changes(good, tmp_path):
    """`block` renews noise after each step, also of plain decoding; `match` writes plain decoding's text."""
    words = [["verifier=block"], ["verifier=match"]]
    targets = Targets()
    made = [build(check(composed(*few(good, "drafter=random", "temperature=1", *w))), targets=targets) for w in words]
    found = in_turn_of([made], tmp_path)
    for result in found[1][1].results:
        assert result.speculative.tokens == result.baseline.tokens
    alone = run(build(check(composed(*few(good, "drafter=random", "temperature=1", *words[0])))), tmp_path / "alone")[1]
    for ours, theirs in zip(found[0][1].results, alone.results, strict=True):
        assert ours.speculative.tokens == theirs.speculative.tokens
        assert ours.baseline.tokens != theirs.baseline.tokens  # alone, block's plain decoding renews its noise


@pytest.mark.slow
def test_a_prompt_that_fails_one_way_is_there_in_the_others(good, monkeypatch, tmp_path):
    targets, failed = Targets(), []
    made = [build(check(composed(*few(good, words))), targets=targets) for words in PAIR]

    def first_of_the_second_way(session, jobs):
        return session.parts is made[1] and not failed and not failed.append(1)

    fail_where(monkeypatch, first_of_the_second_way)
    found = in_turn_of([made], tmp_path)
    assert [(result.counts.prompts, result.counts.failed) for result, _ in found] == [(2, 0), (1, 1)]


def called(arguments, folder, monkeypatch) -> int:
    monkeypatch.chdir(folder)
    try:
        command.main(arguments)
    except SystemExit as stop:
        return stop.code
    return 0


def test_the_command_compares_a_sweep_and_then_its_folders(no_figures, good, monkeypatch, tmp_path, capsys):
    sweep = few(good, "temperature=0", "drafter=random,prompt_lookup")
    assert called(sweep, tmp_path, monkeypatch) == 0
    first = capsys.readouterr().out
    before = " ".join(first.partition("requests")[0].split())  # the table
    assert "Too few prompts to say which of 2 ways is the fastest; " in before and "earlier runs" not in first
    assert "prompt_lookup" in first and "too few prompts" in first and "verdict is untested" in first
    folder = tmp_path / "outputs" / "compare"
    [found] = json.loads((folder / "comparison.json").read_text())["comparisons"]
    assert found["by"] == "tokens_per_second" and found["requests"] == 2 and {r["rank"] for r in found["runs"]} == {1}
    rows = (folder / "comparison.csv").read_text().splitlines()
    assert rows[0].startswith("drafter,rank") and len(rows) == 3 and (folder / "summary.csv").exists()
    runs = sorted(str(path.parent) for path in folder.glob("*/results.json"))
    assert called(runs, tmp_path, monkeypatch) == 0
    assert "has" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(in_turn, "run_jobs", None)
        assert called(sweep, tmp_path, monkeypatch) == 0  # finished: nothing is decoded
    assert "finished before" in capsys.readouterr().out

    # A way without results leaves the others, and no old ones.
    fail_where(monkeypatch, lambda session, jobs: session.parts.choices["drafter"] == "random")
    assert called([*sweep, "force=true"], tmp_path, monkeypatch) == 1
    (left,) = folder.glob("*/results.json")
    assert "prompt_lookup" in left.parent.name and "out of memory" in (folder / "run.log").read_text()
    out = " ".join(capsys.readouterr().out.split())
    assert "earlier runs of 2 of 2 ways are now in" in out and len([*folder.glob("*/earlier-1/results.json")]) == 2


@pytest.mark.slow  # test_equivalence has gamma=0, and the next ones a comparison
def test_a_way_without_drafts_is_the_loop_alone(good, monkeypatch, tmp_path, capsys):
    """gamma=0 is a way like others: plain rounds of the speculative loop, with the same text."""
    assert called(few(good, "temperature=0", "drafter=random", "gamma=0,2"), tmp_path, monkeypatch) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "the verdict is untested of gamma 2" in told  # verdict_tokens=0; nothing is to be tested of gamma 0
    [found] = json.loads((tmp_path / "outputs" / "compare" / "comparison.json").read_text())["comparisons"]
    numbers = {run["label"]: run["numbers"] for run in found["runs"]}
    assert numbers["gamma 0"]["tau"] == 1 and numbers["gamma 0"]["speedup"] > 0 and numbers["gamma 0"]["o"] > 0


@pytest.mark.slow  # tests/results/test_files.py interrupts a sweep
def test_an_interrupted_comparison_keeps_what_was_finished(no_figures, good, monkeypatch, tmp_path, capsys):
    interrupt_the_second_group(monkeypatch)
    assert called(few(good, "temperature=0", "drafter=random,prompt_lookup"), tmp_path, monkeypatch) == 130
    results = [json.loads(path.read_text()) for path in tmp_path.glob("outputs/compare/*/results.json")]
    assert [(r["status"], r["counts"]["prompts"]) for r in results] == [("interrupted", 1)] * 2
    assert "what was finished is in" in " ".join(capsys.readouterr().err.split())


def test_no_way_is_lost_to_its_name():
    assert labels_of([{"drafter": "ngram"}, {"drafter": "bigram"}]) == ["ngram", "bigram"]
    assert labels_of([{"batch_size": "32", "gamma": "1"}, {"batch_size": "8", "gamma": "2"}]) == [
        "batch_size 32, gamma 1", "batch_size 8, gamma 2"]  # fmt: skip
    assert labels_of([{}, {"lenience": "0.5"}, {"drafter.temperature": "0.5"}]) == [
        "without overrides", "lenience 0.5", "drafter.temperature 0.5"]  # fmt: skip


# Ways run alike.


def ways(*several, stored=()):
    """Parts with a shared target; those numbered in `stored` find all of their programs, which are the functions."""
    targets, made = Targets(), []
    for number, own in enumerate(several):
        words = small("logger=none", "verdict_tokens=0", "max_new_tokens=4", *own.split())
        made.append(build(check(composed(*words)), targets=targets))
        if number in stored:
            executor = made[-1].target.executor
            executor.fixed_shapes, executor.leaf = True, lambda function, model=None: function
    return made


def used(found) -> list[bool]:
    return [result.executor["programs"]["used"] for result, _ in found]


def show_folders(found, folder):
    """What a comparison of these ways says, and its ranks and p-values."""
    results = [result.as_dict() for result, _ in found]
    unlike = unlike_engines(results, in_turn=True)
    sums = {f"gamma {number}": simulated(12, 0.006 + number / 1000, number) for number in range(len(found))}
    compared = asdict(compare(sums, TOKENS_PER_SECOND, unlike=unlike))
    by_label = dict(zip(sums, results, strict=True))
    compared["runs"] = [run | {"result": by_label[run["label"]]} for run in compared["runs"]]
    return ranking({"task": {}, **compared}), compared


@pytest.mark.parametrize("cohorts", only([[1, 1]], [[2], [1, 1]]))
def test_ways_run_alike_or_are_not_ranked(cohorts, monkeypatch, tmp_path):
    """One of two ways has stored programs: with a plain decoding that they share, and with one for each. Without the
    agreement, the negative control, ways that are unlike are decoded, and without the reason they are ranked."""
    words = ["drafter=random gamma=1", "drafter=random gamma=2"]

    def decoded(folder, stored):
        rest = iter(ways(*words, stored=stored))
        return in_turn_of([[next(rest) for _ in range(size)] for size in cohorts], tmp_path / folder)

    found = decoded("alike", [1])
    assert used(found) == [False, False]
    (note,) = {note for result, _ in found for note in result.notes if "compiled" in note}
    assert "since 1 of 2 ways had them" in note and all(note in result.notes for result, _ in found)
    assert "No way is ranked" not in show_folders(found, tmp_path)[0]
    assert used(decoded("all", [0, 1])) == [True, True]

    monkeypatch.setattr("specbench.run.run.run_alike", lambda groups, tell: None)
    found = decoded("unlike", [1])
    assert used(found) == [False, True]
    told, compared = show_folders(found, tmp_path)
    assert told.startswith("No way is ranked: they did not run alike (1 of 2 with") and "fastest" not in told
    assert {run["rank"] for run in compared["runs"]} == {1} and compared["pairs"][0]["p_value"] is None
    compared["unlike"] = ""
    assert "No way is ranked" not in ranking({"task": {}, **compared})
    sums = {"a": simulated(12, 0.006, 1), "b": simulated(12, 0.009, 2)}
    assert [run.rank for run in compare(sums, TOKENS_PER_SECOND).runs] == [1, 2]  # as it was
    assert [run.rank for run in compare(sums, TOKENS_PER_SECOND, unlike="why").runs] == [1, 1]


@pytest.mark.slow
def test_executors_that_are_asked_for_may_differ(tmp_path):
    made = ways("drafter=random executor=eager", "drafter=random executor=auto", stored=[1])
    found = in_turn_of([[parts] for parts in made], tmp_path)
    assert found[1][0].executor["programs"]["used"]
    results = [result.as_dict() for result, _ in found]
    assert not unlike_engines(results, in_turn=True)
    assert "1 of 2 with executor=eager and no programs compiled" in unlike_engines(results, in_turn=False)


@pytest.mark.slow
def test_a_policy_is_calibrated_as_it_will_run(monkeypatch, tmp_path):
    seen, first = [], ways("drafter=random gamma=2", "drafter=random gamma_policy=adaptive", stored=[1])

    def noted(session, wanted):
        seen.append(session.parts.target.executor.fixed_shapes)
        calibrate(session, wanted)

    monkeypatch.setattr("specbench.run.interleave.calibrate", noted)
    assert first[1].policy.calibrated
    in_turn_of([first], tmp_path)
    assert seen == [False]


def headline(*numbers):
    """The first sentence on ways with a speedup, its interval, and whether they draft; the fastest comes first."""
    runs = [
        {"label": label, "rank": 1 + (place > 0), "numbers": {"speedup": speedup}, "ci95": {"speedup": ci95},
         "result": {"lossless": {"verdict": "passed"}, "machine": None, "counts": {"drafted": drafted}}}
        for place, (label, speedup, ci95, drafted) in enumerate(numbers)
    ]  # fmt: skip
    return ranking({"task": {}, "runs": runs, "pairs": [{"p_value": 0.01}], "clusters": 12})


@pytest.mark.parametrize(("numbers", "told"), [
    ([("a", 1.3, (1.1, 1.5), 9), ("b", 0.9, (0.8, 0.95), 9)],
     "a is the fastest of 2 ways: 1.30x plain decoding's speed (1.10 to 1.50); slower than plain decoding: b."),
    ([("a", 0.99, (0.91, 1.07), 9), ("b", 0.9, (0.8, 1.01), 9)],
     "None gains: leave it off (best: a, 0.99x plain decoding's speed (0.91 to 1.07))."),
    ([("a", 0.89, (0.84, 0.95), 9), ("b", 0.8, (0.7, 0.9), 9)],
     "None gains: leave it off (best: a, 0.89x plain decoding's speed (0.84 to 0.95)); slower than plain decoding: "
     "a, b."),
    ([("a", 1.4, (0.98, 2.0), 9), ("b", 0.9, (0.7, 1.1), 9)],
     "No gain is shown: leave it off, or measure more prompts (best: a, 1.40x plain decoding's speed (0.98 to 2.00))."),
    ([("a", 1.05, (1.006, 1.1), 9), ("b", 0.9, (0.81, 0.998), 9)],
     "No gain is shown: leave it off, or measure more prompts (best: a, 1.05x plain decoding's speed (1.01 to 1.10), "
     "which may be chance among 2 ways)."),
    ([("gamma 0", 1.07, (1.01, 1.1), 0), ("gamma 1", 1.05, (1.006, 1.1), 9)],
     "No gain is shown: leave it off, or measure more prompts (best: gamma 1, 1.05x plain decoding's speed (1.01 to "
     "1.10), which may be chance among 2 ways); gamma 0 drafts nothing and measured 1.07x."),
    ([("gamma 0", 1.07, (1.01, 1.1), 0), ("gamma 1", 1.05, (1.02, 1.08), 9)],
     "The fastest way drafts nothing: gamma 0, 1.07x; best of those that draft: gamma 1, 1.05x plain decoding's speed "
     "(1.02 to 1.08)."),
])  # fmt: skip
def test_a_loss_is_called_one(numbers, told):
    assert headline(*numbers) == told


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["drafter=ngram"], "is one way of decoding"),
        (["drafter=ngram,nothing"], "drafter=nothing is not a choice"),
        (["gamma=1,-2"], "gamma=-2 is not allowed"),
        (["no_such=1,2"], "no_such"),
        (["gamma=1,2", "repeats=2"], "repeats is not possible"),
        (["/", "outputs/nowhere"], "outputs/nowhere is no folder"),
        (["/", "--also", "gamma=1"], "--also cannot apply"),
        (
            ["drafter=model,ngram", "drafter.path=Q"],
            "drafter=ngram: drafter.path is not a setting of the chosen drafter.",
        ),
        (["drafter=model,ngram", "drafter.path=Q"], 'as in --also "drafter=model drafter.path=Q"'),
    ],
)
def test_mistakes_are_one_sentence(arguments, sentence, monkeypatch, tmp_path, capsys):
    assert called(arguments, tmp_path, monkeypatch) == 2
    err = capsys.readouterr().err
    assert sentence in " ".join(err.split()) and "Traceback" not in err
