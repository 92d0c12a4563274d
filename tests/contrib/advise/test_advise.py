"""The advice as a command, on little models: its stages, what it keeps, and what it never advises."""

import json
import shutil
import sys
import time

import pytest
from published_cases import target, written
from small_runs import LITTLE, interrupt_the_second_group, short_prompts, steady
from small_runs import finished as finished

import specbench.contrib.advise.driver as driver
from specbench.contrib.advise.answers import answer_sentence, load_answer, more
from specbench.contrib.advise.bench import LoadBench
from specbench.contrib.advise.command import advise, main
from specbench.contrib.advise.driver import Driver
from specbench.contrib.advise.engines import ENGINES, configurations
from specbench.contrib.advise.race import FIRST, PLAIN, Race
from specbench.contrib.advise.ways import Load, Trial, heads_beside, trial
from specbench.errors import ConfigError

COMMON = [f"target.path={LITTLE['target.path']}", "device=cpu", "executor=eager", "max_new_tokens=8", "temperature=0"]


def words(*more_words):
    return [*COMMON, "data=jsonl", f"data.path={short_prompts()}", "drafter=ngram", *more_words]


@pytest.fixture
def few(monkeypatch, tmp_path):
    """A pilot of five requests, and a measurement of five others."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(driver, "MOST", (5, 5))
    monkeypatch.setattr(driver, "MEASURED", {1: (5, 5)})
    monkeypatch.setattr(driver, "variants", lambda common, own, result: {"the winner": own})
    with steady():
        yield tmp_path


def test_it_goes_from_pilot_to_measurement_on_other_prompts_and_writes_its_page(few, capsys, monkeypatch):
    folder = advise(words("gamma=1,2"), 10, only=True)
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
    assert len(seen[0]) == len(seen[1]) == 5 and not seen[0] & seen[1]
    result = json.loads((few / found["folder"] / "results.json").read_text())
    assert found["gain"] == pytest.approx(result["speedup"]["measured"]) and found["verdict"] == "passed"
    assert found["on"] == (found["ci95"][0] > 1) and found["requests"] == 5
    page, out = (folder / "report.html").read_text(), capsys.readouterr().out
    assert answer_sentence(found).split(":")[0] in page and "gamma" in page
    assert out.index("2 ways of decoding") < out.index("loading") < out.index("Advice")
    assert found["waits"]["per_output_token"]["p50"]["baseline"] > 0

    before = (folder / "advice.json").read_text()  # a finished advice is not measured again
    monkeypatch.setattr(LoadBench, "total", lambda *others: pytest.fail("loaded again"))
    assert advise(words("gamma=1,2"), 10, only=True) == folder and (folder / "advice.json").read_text() == before


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
    monkeypatch.setattr(driver, "MOST", (5, 1))
    monkeypatch.setattr(driver, "MEASURED_TOGETHER", (1, 1))
    given = words("gamma=1", "batch_size=1,2", "workload.rate=50", "workload.slo_per_token=10")
    state = json.loads((advise(given, 10, only=True) / "advice.json").read_text())
    assert [found["batch_size"] for found in state["answers"]] == [1, 2]
    for found in state["answers"]:
        decoded = len((few / found["folder"] / "prompts.jsonl").read_text().splitlines())
        assert found["requests"] == 4 * found["batch_size"] == decoded and found["rate"] == 50 and not found["on"]
        assert found["goodput"]["speculative"]["share"] == 1 and found["waits"]["first_token"]["p50"]["ratio"] > 0


def stored(verdict, rates, winner="way"):
    """What advice.json has of a load whose measurement has these seconds per token of the way, and 1 of plain."""
    race = [{"way": [rate, 1.0], PLAIN: [1.0, 1.0]} for rate in rates]
    stage = {"units": race, "verdicts": {"way": verdict}, "folders": {"way": ["run"]}, "waits": []}
    return {
        "rows": 1,
        "rate": None,
        "unit": 1,
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
    assert ("FAILED" in found["why"]) == (verdict == "failed")
    broken = stored(verdict, rates)
    broken["stages"]["measurement"]["reasons"] = {"way": "failed: out of memory"}
    assert not load_answer("batch 1", broken)["on"] and load_answer("batch 1", broken)["why"] == "failed: out of memory"
    if rates[1] == 1.6:
        assert found["needs"] in found["why"] and int(found["needs"].split()[-2].replace(",", "")) > 100


@pytest.mark.parametrize(
    ("reasons", "told"),
    [
        ({"a": "slower than b after 5 units", "b": f"slower than {PLAIN} after 8 units"}, "all ways lost"),
        ({"a": "slower than b after 5 units", "b": "its verdict failed"}, "b: its verdict failed"),
        ({"a": "failed: out of memory", "b": "failed: out of memory"}, "a: failed: out of memory"),
        ({"a": "slower than b after 5 units"}, "the time was over"),
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

        def total(self, ways):
            return 60

    def race(self, bench, stages, name, ways, limits):
        stages[name] = {"folders": {way: ["run"] for way in ways}}
        return ("a", left("a", "b", "c", "d")) if name == "pilot" else ("a2", left("a2", "b"))

    tried = Trial([], {way: ["drafter=ngram"] for way in "abcd"}, [Load(1, None)], {})
    own, found = {"stages": {}, "refused": {}}, {"a": [], "a2": [], "b": [], "c": []}
    monkeypatch.setattr(driver, "LoadBench", Bench)
    monkeypatch.setattr(driver, "read_result", lambda folder: {})
    monkeypatch.setattr(driver, "variants", lambda *others: found)
    monkeypatch.setattr(Driver, "_race", race)
    monkeypatch.setattr(Driver, "_stage", lambda *others: {})
    advised = Driver.__new__(Driver)
    advised.tried, advised.folder, advised.targets, advised.until = tried, None, None, time.monotonic() + 60
    advised._load(tried.loads[0], own, 1)
    assert own["winner"] == "a2" and own["rivals"] == ["d", "b"]


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
    assert drafters == ["model", "lookup_or_model", "suffix", "prompt_lookup", "token_recycling", "layer_skip",
                        "self_quantized"]  # fmt: skip
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
    for kind in ("eagle3", "medusa"):
        written(kind, folder / kind)
    assert heads_beside(given) == {kind: [f"drafter={kind}", f"drafter.path={folder / kind}"]
                                   for kind in ("medusa", "eagle3")}  # fmt: skip


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


def test_other_engines_get_the_same_gamma_or_say_that_they_cannot():
    for drafter in ("model", "suffix", "prompt_lookup", "self_quantized", "mtp"):
        told = configurations("P", [f"drafter={drafter}", "drafter.path=Q", "gamma=5"])
        assert told.keys() == ENGINES.keys() and '"num_speculative_tokens": 5' in told["vLLM"]
        assert "--speculative-num-draft-tokens 6" in told["SGLang"]
    assert all("has no such drafter" in text for text in configurations("P", ["drafter=token_recycling"]).values())


def test_a_race_needs_no_unit_without_a_way():
    assert Race([PLAIN], 5).over
