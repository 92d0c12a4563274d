"""The advice as a command, on little models: its stages, what it keeps, and what it never advises."""

import copy
import json
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from published_cases import target, written
from small_runs import LITTLE, interrupt_the_second_group, short_prompts, steady
from small_runs import finished as finished

from specbench.config import compose
from specbench.config.paths import conf_dir
from specbench.contrib.advise import answers, bench, driver, ways
from specbench.contrib.advise.answers import (
    advice,
    answer_notes,
    answer_sentence,
    best_constant,
    crossings,
    load_answer,
    more,
    rivals,
    uncompiled,
)
from specbench.contrib.advise.bench import LoadBench
from specbench.contrib.advise.command import advise, main
from specbench.contrib.advise.driver import Driver, decided
from specbench.contrib.advise.engines import ENGINES, UNKNOWN, configurations
from specbench.contrib.advise.page import engines_section
from specbench.contrib.advise.race import FIRST, PLAIN, Race
from specbench.contrib.advise.ways import Load, Trial, heads_beside, trial, variants
from specbench.contrib.traffic.poisson import Poisson
from specbench.errors import ConfigError
from specbench.stats.latency import DECODERS

COMMON = [f"target.path={LITTLE['target.path']}", "device=cpu", "executor=eager", "max_new_tokens=8", "temperature=0"]


def words(*more_words):
    return [*COMMON, "data=jsonl", f"data.path={short_prompts()}", "drafter=ngram", *more_words]


@pytest.fixture
def few(monkeypatch, tmp_path):
    """A pilot of five requests, and a measurement of five others."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(driver, "PILOT_UNITS", (5, 5))
    monkeypatch.setattr(driver, "MEASURED", ((5, 5), (5, 5)))
    monkeypatch.setattr(driver, "variants", lambda common, own, result: {"the winner": own})
    with steady():
        yield tmp_path


def test_it_goes_from_pilot_to_measurement_on_other_prompts_and_writes_its_page(few, capsys, monkeypatch):
    lines = [json.loads(line) for line in Path(short_prompts()).read_text().splitlines()]
    (few / "turns.jsonl").write_text("\n".join(json.dumps({"turns": [line["prompt"], "And?"]}) for line in lines))
    given = [*COMMON, "data=questions", f"data.path={few / 'turns.jsonl'}", "drafter=ngram"]
    folder = advise([*given, "gamma=1,2"], 10, only=True)
    state = json.loads((folder / "advice.json").read_text())
    (own,), (found,) = state["loads"].values(), state["answers"]
    pilot, measured = own["stages"]["pilot"], own["stages"]["measurement"]
    assert (
        set(pilot["ways"]) == {"drafter ngram, gamma 1", "drafter ngram, gamma 2"}
        and len(pilot["units"]) == len(measured["units"]) == 5
    )
    seen = [
        {json.loads(line)["id"] for line in (few / stage["folders"][own["winner"]][0] / "prompts.jsonl").open()}
        for stage in (pilot, measured)
    ]
    assert len(seen[0]) == len(seen[1]) == 5 and not seen[0] & seen[1] and "/" not in "".join(seen[0] | seen[1])
    assert "of prompts of several turns the first turn alone was decoded" in found["notes"]
    result = json.loads((few / found["folder"] / "results.json").read_text())
    assert found["gain"] == pytest.approx(result["speedup"]["measured"]) and found["verdict"] == "passed"
    assert found["on"] == (found["ci95"][0] > 1) and found["requests"] == 5
    page, out = (folder / "report.html").read_text(), " ".join(capsys.readouterr().out.split())
    assert answer_sentence(found).split(":")[0] in page and "gamma" in page
    told = (
        "2 ways of decoding",
        "At most 10 minutes",
        "1.7 % in each of the pilot",
        "loading drafter",
        "2 ways left, about",
        "Advice",
    )
    assert [*map(out.index, told)] == sorted(map(out.index, told)) and told[2] in page
    assert found["waits"]["per_token"]["p50"]["baseline"] > 0
    result["latency"]["speculative"]["per_token"]["p50"] = None  # each request ended in its first round
    assert {*answers.waits(result)["per_token"]} == {"p99"}
    assert not found["on"] or f"skip={measured['next']} " in found["command"]

    before = (folder / "advice.json").read_text()  # a finished advice is not measured again
    monkeypatch.setattr(LoadBench, "total", lambda *others: pytest.fail("loaded again"))
    assert advise([*given, "gamma=1,2"], 10, only=True) == folder and (folder / "advice.json").read_text() == before
    state["loads"] = {"batch 4": own | {"rows": 4}, **state["loads"]}  # another command's, with this folder
    (folder / "advice.json").write_text(json.dumps(state))
    advise([*given, "gamma=1,2"], 10, only=True)
    assert [each["load"] for each in json.loads((folder / "advice.json").read_text())["answers"]] == ["batch 1"]
    for gammas, kept in (("1,2", True), ("1,2,3", False)):  # gamma 3 was not tried
        assert bool(Driver(trial([*given, f"gamma={gammas}"], True), folder, 1).state["loads"]) == kept


@pytest.mark.parametrize("right", [True, False])
def test_the_faster_of_two_in_the_measurement_is_the_answer(right, few, monkeypatch):
    """In the pilot it was the other one, which is the answer where the text of the faster one is wrong."""
    names, units = ["drafter ngram, gamma 1", "drafter ngram, gamma 2"], []
    verdicts = iter(["passed"] * 3 + ["passed" if right else "failed"])

    def planned(groups):
        units.append(sorted(groups))
        seconds = (0.5, 0.6) if len(units) <= 5 else (0.6, 0.5)
        return {way: [own, 1.0] for way, own in zip([*names, PLAIN], (*seconds, 1.0), strict=True)}

    monkeypatch.setattr(bench, "unit_of", planned)
    monkeypatch.setattr(bench, "word", lambda lossless: next(verdicts))
    folder = advise(words("gamma=1,2"), 10, only=True)
    state = json.loads((folder / "advice.json").read_text())
    (own,), (found,) = state["loads"].values(), state["answers"]
    assert units == [names] * 10 and own["stages"]["pilot"]["left"][0] == names[0]
    assert (found["way"], found["rivals"]) == (names[right], [])  # the other one's interval is below this one's
    assert own["rivals"] == (names[:1] if right else [])
    assert found["words"] == ["drafter=ngram", f"gamma={1 + right}"] and found["verdict"] == "passed"
    assert found["gain"] == pytest.approx(2 if right else 1 / 0.6)
    assert "measurement" in (folder / "report.html").read_text()


@pytest.mark.slow
def test_an_interrupted_advice_keeps_what_it_has_and_goes_on(few, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="the same command goes on"):
        interrupt_the_second_group(patch)
        advise(words("gamma=1,2"), 10, only=True)
    (path,) = few.glob("outputs/advise/*/advice.json")
    (own,) = json.loads(path.read_text())["loads"].values()
    kept = own["stages"]["pilot"]["units"]
    assert len(kept) == 1 and own["stages"]["pilot"]["next"] == 1
    state = json.loads((advise(words("gamma=1,2"), 10, only=True) / "advice.json").read_text())
    (own,) = state["loads"].values()
    assert own["stages"]["pilot"]["units"][:1] == kept and len(own["stages"]["pilot"]["units"]) == 5
    assert own["over"]


@pytest.mark.slow
def test_several_rows_and_a_rate_are_loads_with_groups_as_units(few, monkeypatch):
    monkeypatch.setattr(driver, "PILOT_UNITS", (5, 1))
    monkeypatch.setattr(driver, "FIRST", 1)
    monkeypatch.setattr(driver, "FIRST_LOOK", (1, 1))
    segments, arrivals = set(), Poisson.arrivals
    monkeypatch.setattr(
        Poisson, "arrivals", lambda *own: segments.add(own[-1] if len(own) > 2 else 0) or arrivals(*own)
    )
    monkeypatch.setattr(driver, "MEASURED", ((1, 1), (1, 1)))
    given = words("gamma=1", "batch_size=1,2", "workload.rate=50", "workload.slo_per_token=10")
    state = json.loads((advise(given, 10, only=True) / "advice.json").read_text())
    assert [found["batch_size"] for found in state["answers"]] == [1, 2]
    for found in state["answers"]:
        decoded = len((few / found["folder"] / "prompts.jsonl").read_text().splitlines())
        assert found["requests"] == 4 * found["batch_size"] == decoded and found["rate"] == 50 and not found["on"]
        assert found["goodput"]["speculative"]["share"] == 1 and found["waits"]["first_token"]["p50"]["ratio"] > 0
        assert "time from arrival to last token: " in answer_sentence(found)
    assert segments == {0, 1}  # the measurement has other arrivals than the pilot


def stored(verdict, rates, winner="way"):
    """What advice.json has of a load whose measurement has these seconds per token of the way, and 1 of plain."""
    race = [{"way": [rate, 1.0], PLAIN: [1.0, 1.0]} for rate in rates]
    measured = Race(["way", PLAIN], len(race))
    for unit in race:
        measured.add(unit)
    stage = {"units": race, "gains": {"way": measured.gain("way")}, "verdicts": {"way": verdict},
             "folders": {"way": ["run"]}, "ways": {"way": ["drafter=ngram"]}}  # fmt: skip
    return {
        "rows": 1,
        "rate": None,
        "unit": 1,
        "ended": "prompts",
        "winner": winner,
        "words": ["drafter=ngram"],
        "stages": {"measurement": stage},
    }


@pytest.mark.parametrize(
    ("verdict", "rates", "on"),
    [
        ("passed", [0.5, 0.52, 0.48, 0.5, 0.51], True),
        ("failed", [0.5, 0.52, 0.48, 0.5, 0.51], False),
        ("passed", [0.5, 1.6, 0.6, 1.2, 0.9], False),
        ("passed", [0.5, 0.5], False),
        ("passed", [1.5, 1.52, 1.48, 1.5, 1.51], False),
    ],
)
def test_on_needs_an_interval_above_one_and_no_failed_verdict(finished, monkeypatch, verdict, rates, on):
    result = finished("drafter=ngram", "gamma=2")[0].as_dict()
    monkeypatch.setattr("specbench.contrib.advise.answers.read_result", lambda folder: result)
    found = load_answer("batch 1", stored(verdict, rates))
    assert found["on"] is on and answer_sentence(found).startswith(f"batch 1: {'ON' if on else 'OFF'}")
    why_off = "" if verdict == "failed" or rates[0] > 1 else ", not known" if len(rates) < FIRST else ", not decided"
    assert advice(found) == ("ON" if on else f"OFF{why_off}")
    assert decided(stored(verdict, rates)) == (not why_off or on)
    many = found | {"rivals": ["a", "b", "c", "d"]}
    assert ("4 other ways" in answer_sentence(many)) == (advice(found) != "OFF")
    assert ("FAILED" in found["why"]) == (verdict == "failed")
    unfit = load_answer("batch 1", {"rows": 1, "rate": None, "stages": {}, "refused": {"a": "too large"}})
    assert advice(unfit) == "OFF" and decided({"rows": 1, "stages": {}}) and not decided({"stages": {}})
    broken = stored(verdict, rates)
    broken["stages"]["measurement"]["reasons"] = {"way": "failed: out of memory"}
    assert not load_answer("batch 1", broken)["on"] and load_answer("batch 1", broken)["why"] == "failed: out of memory"
    assert ("give more (data.count)" in found["why"]) == (len(rates) < FIRST)
    assert "--minutes" in load_answer("batch 1", stored(verdict, rates) | {"ended": "time"})["why"] or len(rates) > 2
    if rates[1] == 1.6:
        assert found["needs"] in found["why"] and int(found["needs"].split()[-2].replace(",", "")) > 100


@pytest.mark.parametrize(
    ("used", "programs", "settings", "cache", "told"),
    [
        (False, {"decision": None}, {}, "static", True),
        (True, {"decision": None}, {}, "static", False),
        (False, {}, {}, "static", False),  # graphs
        (False, {"decision": None}, {"compile": "false"}, "static", False),
        (False, {"decision": None}, {"programs": False}, "static", False),
        (False, {"decision": None}, {}, "dynamic", False),
    ],
)
def test_that_nothing_was_compiled_is_told_where_a_longer_run_may(used, programs, settings, cache, told, finished):
    result = finished("drafter=ngram", "gamma=2")[0].as_dict()
    result["config"] = result["config"] | {"executor": {"programs": True, "compile": "auto"} | settings}
    result["choices"] = result["choices"] | {"cache": cache}
    result["executor"] = {"programs": {"used": used, **programs}}
    assert uncompiled(result) is told
    own = {
        "words": ["drafter=ngram", "gamma=2"],
        "stages": {"pilot": {"units": [], "ways": {}}},
        "unit": 1,
        "rate": None,
    }
    assert ("without compiled programs" in " ".join(answer_notes(own, [result]))) is told


@pytest.mark.parametrize(
    ("reasons", "told"),
    [
        ({"a": "slower than b after 5 units", "b": f"slower than {PLAIN} after 8 units"}, "all ways lost"),
        ({"a": "slower than b after 5 units", "b": "its verdict failed"}, "b: its verdict failed"),
        ({"a": "failed: out of memory", "b": "failed: out of memory"}, "a: failed: out of memory"),
        ({"a": "slower than b after 5 units"}, "too little time to choose a way"),
    ],
)
def test_why_no_way_is_advised_is_what_happened(reasons, told):
    stage = {"ways": {"a": [], "b": []}, "gains": {"a": [0.9, None]}, "verdicts": {}, "reasons": reasons}
    found = load_answer("batch 1", {"rows": 1, "rate": None, "stages": {"pilot": stage}, "refused": {}})
    assert told in found["why"] and not found["on"] and ("all ways lost" in found["why"]) == (told == "all ways lost")
    assert "0.90x plain decoding in the pilot" in answer_sentence(found)


def test_ways_that_the_pilot_left_and_no_stage_raced_again_are_rivals(monkeypatch):
    """Of four that the pilot left, variants of the best two are raced: one of them wins, one is left, and the third way
    of the pilot was raced as a variant, and lost."""

    def left(*ways):
        race = Race([*ways, "lost", PLAIN], 5)
        for _ in range(FIRST):  # with fewer no variants are tried
            race.add({way: [1.0, 1.0] for way in race.ways})
        race.leave("lost", "slower")
        return race

    class Bench:
        common, refused = (), {}

        def __init__(self, *others):
            pass

        example = SimpleNamespace(prompts=())

        def total(self, ways):
            clock[0] += 100.0  # which no limit counts
            return 600

        def unit_of(self, load):
            return 1

    def race(self, bench, stages, name, ways, limits):
        begins.append(limits)
        stages[name] = {"folders": {way: ["run"] for way in ways}}
        return ("a", left(*ways)) if name == "pilot" else ("a2", left("a2", "b"))

    clock = [0.0]
    tried, begins, asked = Trial([], {way: ["drafter=ngram"] for way in "abcd"}, [Load(1, None)], {}), [], []
    own, found = {"stages": {}, "refused": {}}, {"a": [], "a2": [], "b": [], "c": []}
    monkeypatch.setattr(driver, "LoadBench", Bench)
    monkeypatch.setattr(driver, "read_result", lambda folder: {})
    monkeypatch.setattr(driver, "variants", lambda *others: found)
    monkeypatch.setattr(Driver, "_race", race)
    monkeypatch.setattr(Driver, "_stage", lambda *others: asked.append(others) or {"verdicts": {}})
    monkeypatch.setattr(driver, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    advised = Driver.__new__(Driver)
    advised.tried, advised.folder, advised.targets = tried, None, None
    advised.begun, advised.until, advised.share = 0.0, 60.0, 0.0
    advised._load(tried.loads[0], own, 2)
    assert own["winner"] == "a2" and own["rivals"] == ["d", "b"]
    # Half of 60 seconds for the first of two loads: 35 % are the pilot's, 60 % when variants have been tried.
    assert begins == [(300, 100 + 0.35 * 30, 64, 17), (400, 200 + 0.6 * 30, 32, 17)]
    race, limits = asked[0][-2:]
    assert limits == (600, 230) and (race.most, race.looks) == (17, [17]) and advised.until == 260
    advised.tried = Trial([], {"a": ["drafter=ngram"]}, tried.loads, {})  # one way is dropped no earlier than others
    advised._load(tried.loads[0], {"stages": {}, "refused": {}}, 1)
    assert begins[2][2:] == (17, 17)


def test_loads_without_an_answer_come_first(monkeypatch):
    """And the others if time is left, or if all have one, unless they are over."""
    told, untold = stored("passed", [0.5, 0.52, 0.48, 0.5, 0.51]), {"stages": {}}
    lost = {"stages": {"pilot": {}}, "over": True}
    advised, asked = Driver.__new__(Driver), []
    advised.until = 0.0
    advised.tried = Trial([], {}, [Load(rows, None) for rows in (1, 2, 8, 16)], {})
    advised.state = {"loads": {"batch 1": told, "batch 2": untold, "batch 8": lost, "batch 16": dict(untold)}}
    monkeypatch.setattr(Driver, "_load", lambda self, load, own, loads: asked.append((load.rows, loads)))
    monkeypatch.setattr(Driver, "save", lambda self: None)
    advised.go()
    assert asked == [(2, 2), (16, 1)]
    advised.until = time.monotonic() + 100  # time is left
    advised.go()
    assert asked[2:] == [(2, 2), (16, 1), (1, 1)]
    advised.until = 0.0
    advised.state["loads"] |= {"batch 2": dict(told), "batch 16": dict(told)}
    advised.go()
    assert asked[5:] == [(1, 3), (2, 2), (16, 1)]


def test_a_stage_with_other_ways_than_before_begins_anew():
    """On other prompts. The control: with the same ways it goes on."""
    ways, seen, race = {"a": ["drafter=a"], "b": ["drafter=b"]}, [], Race([PLAIN], 5)
    begun = SimpleNamespace(run=lambda name, ways, race, state, *limits: seen.append([*state["units"]]))
    old = {"next": 3, "units": [{"a": [1.0, 1.0]}], "verdicts": {}, "folders": {}}
    for before, again in ((ways, False), ({"a": ways["a"]}, True), (ways | {"c": ["drafter=c"]}, True)):
        stages = {"pilot": old | {"ways": before}, "pilot-2": old | {"next": 7}}
        state = Driver._stage(None, begun, stages, "pilot", ways, race, (0, 0.0))
        assert seen.pop() == ([] if again else old["units"]) and state is stages["pilot"] and state["ways"] == ways
        assert state["next"] == 7 and ("pilot-2" in stages) != again


def test_no_way_that_fits_is_one_sentence(few, monkeypatch):
    def none(self, ways):
        self.refused["drafter ngram"] = f"too large for {self.load.label}"
        ways.clear()
        return 0

    total = LoadBench.total
    monkeypatch.setattr(LoadBench, "total", none)
    with pytest.raises(ConfigError, match="no way fits: too large for batch 2"):
        advise(words("gamma=1", "batch_size=2"), 10, only=True)
    monkeypatch.setattr(LoadBench, "total", lambda self, ways: (total if self.load.rows == 1 else none)(self, ways))

    def lost(self, bench, stages, *others):
        stages["pilot"] = {"next": 0, "units": [], "verdicts": {}, "folders": {}, "ways": {}}
        return None, Race([PLAIN], 5)

    monkeypatch.setattr(driver.Driver, "_race", lost)
    with pytest.raises(ConfigError, match=r"batch 2 needs 48 prompts, there are 32: give more by .* or a smaller"):
        advise(words("gamma=1", "batch_size=1,2"), 10, only=True)
    monkeypatch.setattr(driver, "FIRST", 1)
    state = json.loads((advise(words("gamma=1", "batch_size=1,2"), 10, only=True) / "advice.json").read_text())
    assert [found["why"] for found in state["answers"]][1] == "no way fits: too large for batch 2"


def test_what_would_gain_more_multiplies_with_the_costs(finished):
    result = finished("drafter=ngram", "gamma=2")[0].as_dict()
    told = more(result)
    cost, counts = result["cost"], result["counts"]
    g = counts["drafted"] / counts["rounds"]
    best = result["speedup"]["measured"] * (g + 1) / result["block_efficiency"]["mean"]
    assert told.endswith(f"{best:.2f}x if every guess were accepted.") and f"{cost['v']:.2f} of verifying" in told


@pytest.mark.slow
def test_a_way_whose_verdict_fails_is_left_out_and_the_others_begin_anew(few, monkeypatch):
    keep = LoadBench._keep

    def failing(self, labels, jobs, finished, state):
        keep(self, labels, jobs, finished, state)
        state["verdicts"] |= {way: "failed" for way in labels if way.endswith("gamma 2")}

    monkeypatch.setattr(LoadBench, "_keep", failing)
    state = json.loads((advise(words("gamma=1,2"), 10, only=True) / "advice.json").read_text())
    (own,) = state["loads"].values()
    assert own["winner"] == "drafter ngram, gamma 1"
    assert set(own["stages"]["pilot-2"]["ways"]) == {own["winner"]}


def test_it_tries_what_needs_no_training_and_says_what_does_not_fit():
    found = trial([f"target.path={LITTLE['target.path']}", "drafter.path=shipped:drafter_tv", "gamma=2"], only=False)
    drafters = [way[0].removeprefix("drafter=") for way in found.ways.values()]
    assert drafters == ["model", "lookup_or_model", "suffix", "prompt_lookup", "token_recycling", "layer_skip"]
    assert list(found.refused) == ["mtp"] and [load.label for load in found.loads] == ["batch 1"]
    assert all("drafter.path=shipped:drafter_tv" in way for way in list(found.ways.values())[:2])


@pytest.mark.slow  # test_it_tries_what_needs_no_training_and_says_what_does_not_fit
def test_all_ways_have_the_target_and_the_data_that_a_named_drafter_brings():
    found = trial(["drafter=bytes", "gamma=2"], only=False)
    assert {"target=bytes", "data=unconditional", "data.count=640"} <= {*found.common} and "suffix" not in found.refused


def test_trained_heads_in_the_targets_folder_are_found(tmp_path):
    """The control: a folder of another model beside them."""
    folder = tmp_path / "target"
    shutil.copytree(target(), folder)
    shutil.copytree(target(), folder / "another")
    given = ["target=model", f"target.path={folder}", "device=cpu"]
    assert heads_beside(given) == {}
    for kind in ("eagle3", "medusa", "dflash"):
        written(kind, folder / kind)
    assert heads_beside(given) == {kind: [f"drafter={kind}", f"drafter.path={folder / kind}"]
                                   for kind in ("medusa", "eagle3", "dflash")}  # fmt: skip


@pytest.mark.slow
def test_what_a_policy_does_not_fit_is_left_out_unless_it_is_named():
    given = [f"target.path={LITTLE['target.path']}", "gamma=2", "gamma_policy=goodput"]
    found = trial(given, only=False)
    assert "sees no q" in found.refused["suffix"] and ["drafter=layer_skip"] in [way[:1] for way in found.ways.values()]
    with pytest.raises(ConfigError, match=r"drafter suffix.*sees no q"):
        trial([*given, "drafter=suffix"], only=False)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["batch_size=0"], "batch_size=0 is not allowed"),
        (["batch_size=1.5"], "whole numbers"),
        (["workload.rate=fast"], "workload.rate=fast is not allowed"),
        (["batch_size=inf"], "batch_size=inf is not allowed"),
        (["drafter=ngram", "repeats=2"], "repeats and workers must be 1"),
        (["workload=poisson"], "workload=poisson is not possible without its rates"),
        (["drafter=nothing"], "drafter=nothing is not a choice"),
        (["drafter=ngram", "temperature=0,1"], "temperature=0,1 is not possible: it has several values"),
        ([], "--only needs drafters"),
    ],
)
def test_a_mistake_is_one_sentence(given, told):
    with pytest.raises(ConfigError) as error:
        trial([f"target.path={LITTLE['target.path']}", *given], only=True)
    assert told in str(error.value)


def test_minutes_are_above_zero(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["advise"])
    with pytest.raises(SystemExit) as ended:
        main(["--minutes", "0"])
    assert ended.value.code == 2 and "--minutes 0 is not allowed" in capsys.readouterr().err


def engines_of(name, path="Q"):
    """What to paste for a drafter of conf/drafter, at this path if it has one, of gamma 5."""
    own = compose.option_file(conf_dir() / "drafter" / f"{name}.yaml")
    return configurations("shipped:target", own | ({"path": path} if path and own.get("path") else {}), 5)


def test_other_engines_get_the_same_gamma_or_say_that_they_cannot():
    for drafter in ("model", "suffix", "prompt_lookup", "mtp"):
        told = engines_of(drafter)
        assert told.keys() == ENGINES.keys() and '"num_speculative_tokens": 5' in told["vLLM"]
        assert "--speculative-num-draft-tokens 6" in told["SGLang"] and "shipped:" not in str(told)
    names = ("medusa", "eagle", "mlp_speculator", "dflash", "llama1b", "llama8b_eagle3", "stdlib_tv")
    methods = [json.loads(engines_of(name)["vLLM"].split("'")[1])["method"] for name in names]
    assert methods == ["medusa", "eagle", "mlp_speculator", "dflash", "draft_model", "eagle3", "draft_model"]
    assert engines_of("medusa")["SGLang"] == UNKNOWN and "EAGLE --" in engines_of("eagle")["SGLang"]
    assert '"meta-llama/Llama-3.2-1B-Instruct"' in engines_of("llama1b", "")["vLLM"]
    for drafter in ("token_recycling", "lookup_or_model"):  # no engine chooses between a lookup and a model
        assert {*engines_of(drafter).values()} == {UNKNOWN}
    pilot = {"ways": {str(gamma): ["drafter=suffix", f"gamma={gamma}"] for gamma in (2, 4, 8)},
             "gains": {"2": [1.3, None], "4": [1.2, None], "8": [1.1, None]}}  # fmt: skip
    words = ["drafter=suffix", "gamma=4", "gamma_policy=goodput"]
    best = best_constant({"words": words, "stages": {"pilot": pilot}})
    assert best == pilot["ways"]["2"] and best_constant({"words": best, "stages": {}}) == best
    models = {"target": {"path": "P"}, "drafter": {"_target_": "specbench.drafters.suffix.SuffixDrafter"}}
    (section,) = engines_section([{"on": True, "words": words, "way": "a", "constant": best, "models": models}])
    assert section.title == "The nearest in other engines: a"
    assert "Without gamma_policy=goodput, which was measured." in section.texts


@pytest.mark.parametrize(("gain", "rate", "told"), [
    (0.8, None, "0.80x plain decoding (0.64 to 0.96)"), (0.8, 2.0, "1.25x longer (1.04 to 1.56)"),
    (2.0, 2.0, "2.00x shorter (1.60 to 2.40)"),
])  # fmt: skip
def test_a_gain_below_one_is_a_longer_wait(gain, rate, told):
    found = {"load": "batch 1", "rate": rate, "gain": gain, "ci95": [0.8 * gain, 1.2 * gain], "fresh": True,
             "fits": True, "on": False, "verdict": None, "way": "a", "why": ""}  # fmt: skip
    assert told in answer_sentence(found)


@pytest.mark.parametrize(("loads", "told"), [
    ({4: [1.1, 1.3], 16: [0.7, 0.9]}, "lies between batch 4 and 16."),
    ({1: [1.2, 1.4], 8: [0.8, 1.3]}, "is not known: at batch 8 the interval holds 1."),
    ({1: [1.2, 1.4], 8: None}, "is not known: at batch 8 nothing was measured after the pilot."),
    ({1: [1.2, 1.4], 8: [1.1, 1.2]}, "is above batch 8, the largest that was measured."),
])  # fmt: skip
def test_break_even_is_where_intervals_tell_it(loads, told):
    found = [{"batch_size": rows, "rate": None, "ci95": ci95, "fresh": bool(ci95), "verdict": "passed"}
             for rows, ci95 in loads.items()]  # fmt: skip
    assert [*crossings(found)] == [f"Break-even {told}"]


def test_the_largest_gamma_that_replay_knows_is_doubled(monkeypatch):
    monkeypatch.setattr(ways, "checked_way", lambda words: None)
    swept = {"gamma_sweep": [{"gamma": gamma} for gamma in range(7)], "config": {"temperature": 0}}
    given = ["drafter=ngram", "gamma=4", "gamma_policy=fixed"]
    for picked, doubled in (([6, 3], True), ([3, 3], False)):
        found = variants([], given, swept | {"gamma_pick": {"gammas": picked}})
        assert any("gamma=12" in way for way in found.values()) == doubled
    own = {"words": [*found.values()][-1], "stages": {"variants": {"ways": found}}, "rate": None, "unit": 1}
    part = {"machine": None, "choices": {"data": "jsonl"}, "executor": {},
            "config": {"max_new_tokens": 8, "executor": {}},
            "counts": {"tokens": 1, "baseline_tokens": 1, "prompts": 1}, "notes": [],
            "throughput": dict.fromkeys((f"{name}_tokens_per_second" for name in DECODERS), 9.0)}  # fmt: skip
    assert [*answer_notes(own, [part])] == []
    assert [*answer_notes(own | {"words": given}, [part])] == ["gamma 4 is the largest tried"]
    assert len([*answer_notes(own | {"rate": 10.0}, [part])]) == 2  # decoders that give less than is asked for
    (told,) = answer_notes(own, [part | {"choices": {"data": "stdlib"}}])
    assert "measured on Python source, and at most 8 new tokens" in told
    own["stages"]["pilot"] = {"ways": found, "left": [*found], "units": [1] * 7}
    assert "the pilot ended after 7 units, and no way is dropped before 17" in next(answer_notes(own, [part]))
    assert not [*answer_notes(own | {"unit": 32}, [part])]


def test_ways_that_are_surely_slower_than_the_winner_are_no_rivals():
    """The control: in a stage that did not try the winner, on other prompts."""
    gains = {"slow": [0.3, [0.25, 0.35]], "near": [1.1, [0.9, 1.2]], "untold": [0.5, None]}
    own = {"winner": "best", "rivals": [*gains], "stages": {"pilot": {"gains": gains}, "variants": {}}}
    assert rivals(own) == [*gains]
    gains["best"] = [1.2, [1.05, 1.3]]
    assert rivals(own) == ["near", "untold"]


def test_of_several_parts_the_worst_verdict_and_all_of_their_numbers_count(finished, monkeypatch):
    result, verdicts = finished("drafter=ngram", "gamma=2")[0], iter(["inconclusive", "passed"])
    made, state = LoadBench.__new__(LoadBench), {"verdicts": {}, "folders": {}}
    made.built = {"": SimpleNamespace(target=SimpleNamespace(tokenizer=None))}
    monkeypatch.setattr(bench, "save", lambda *others: None)
    monkeypatch.setattr(bench, "word", lambda lossless: next(verdicts))
    for folder in ("a", "b"):
        made._keep(["way"], [SimpleNamespace(folder=folder)], [(result, None)], state)
    assert state == {"verdicts": {"way": "inconclusive"}, "folders": {"way": ["a", "b"]}}
    parts = {folder: copy.deepcopy(result.as_dict()) for folder in "ab"}
    parts["a"]["machine"] = {"steady": False, "reasons": ["slower"]}
    parts["a"]["throughput"] = {name: rate / 3 for name, rate in parts["b"]["throughput"].items()}
    monkeypatch.setattr(answers, "read_result", lambda folder: parts[folder.name])
    own = stored("passed", [0.5, 0.52, 0.48, 0.5, 0.51])
    own["stages"]["measurement"]["folders"] = state["folders"]
    found = load_answer("batch 1", own)
    assert not found["steady"] and "the machine was not steady: slower" in found["notes"]
    rate = parts["b"]["throughput"]["speculative_tokens_per_second"]
    assert found["tokens_per_second"]["speculative"] == pytest.approx(rate / 2)
    assert "waiting times and goodput are of the largest of 2 parts, tokens/s of all of them" in found["notes"]


def test_a_race_needs_no_unit_without_a_way():
    assert Race([PLAIN], 5).over
