"""executor.compile=auto: what is predicted, what is decided, and that a run that compiles decodes the same tokens."""

import json
from types import SimpleNamespace

import pytest
from small_runs import composed, parts_of, small

import specbench.executors.compile_cache
from specbench.config.build import Targets, build
from specbench.config.validate import check
from specbench.decoding.component import CodeIdentity
from specbench.executors.auto import AutoExecutor
from specbench.executors.compile_cache import SAVED, SECONDS, Programs, decide
from specbench.run.run import run, run_in_turn
from specbench.run.warm_up import predicted_seconds, weights_of_programs


def test_compiling_pays_where_it_takes_less_than_it_saves():
    saved = SAVED * (500 - 100)
    assert decide(500, 100, 100 * saved / 101)[0]
    assert not decide(500, 100, 100 * saved / 99)[0]
    assert not decide(500, 500, 1e-9)[0]  # nothing but the reading of weights is left
    told = decide(500, 100, 100)[1]
    assert "100 s" in told and f"{saved:.0f} s" in told and "500" in told


def test_a_machine_learns_how_long_programs_take(tmp_path, monkeypatch):
    path = tmp_path / "new" / "compiling.json"
    ticks = iter([10.0, 30.0, 100.0, 104.0])
    programs, told = Programs(None, path), []
    programs.tell = told.append
    assert programs.seconds_per_weight == SECONDS
    for weights in (36, 0):
        with programs.making(weights, lambda: next(ticks)):
            programs.made += 1
    with pytest.raises(RuntimeError), programs.making(3):  # a program that cannot be made is not timed
        raise RuntimeError("no compiler")
    assert programs.seconds == 24 and told == [f"compiling program {number}" for number in (1, 2, 3)]
    assert Programs(None, path).seconds_per_weight == pytest.approx(24 / 36)  # in another process
    path.write_text("{")
    assert Programs(None, path).seconds_per_weight == SECONDS
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    identity = CodeIdentity("a run", "a machine")
    assert Programs.stored(identity, "a machine").times != Programs.stored(identity, "another").times


@pytest.mark.parametrize(("compile", "asked"), [("auto", True), ("false", False), ("true", False)])
def test_only_auto_decides_and_only_once_and_after_its_warm_up(compile, asked, tmp_path):
    executor = AutoExecutor(programs=Programs(tmp_path / "none"), compile=compile)
    assert executor.compiles == (compile == "true")
    assert executor.compile_seconds(10) is None  # nothing is warmed up
    executor.ready()
    assert executor.compile_seconds(10) == (10 * SECONDS if asked else None)
    if asked:
        assert not executor.decide(1, 0, 10) and executor.compile_seconds(10) is None
        assert not executor.compiles and "save 1 s of 1" in executor.facts()["programs"]["decision"]


def test_what_a_run_takes_is_predicted_from_a_short_decode():
    plain = SimpleNamespace(requests=[SimpleNamespace(tokens=[1] * 16)], calls=16, decode_seconds=1.6)
    drafts = SimpleNamespace(requests=[SimpleNamespace(tokens=[1] * 16)], calls=4, decode_seconds=0.8)
    seconds, least = predicted_seconds([(plain, 100), (drafts, 120), (drafts, 120)], 20 * 50, bytes_per_second=2000)
    assert seconds == pytest.approx(20 * 50 * (0.1 + 0.05 + 0.05))
    assert least == pytest.approx(20 * 50 * (100 / 2000 + 2 * 120 / 2000 / 4))
    model = SimpleNamespace(step_bytes=10, weight_count=7)
    parts = SimpleNamespace(
        target=SimpleNamespace(step_bytes=100, weight_count=30),
        drafter=SimpleNamespace(models=[model]),
        policy=SimpleNamespace(widths=(1, 2, 3)),
    )
    assert weights_of_programs(parts) == 4 * 30 + 3 * 7


@pytest.mark.slow  # test_every_shape_is_met_before_anything_is_timed, in test_programs.py, is a run with programs
def test_a_run_that_compiles_by_itself_decodes_the_same_tokens(traced, monkeypatch, tmp_path):
    """Programs are traced and not compiled, and take no time, so that they pay."""
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    words = ("temperature=0", "data.limit=1", "max_new_tokens=8", "gamma=1")
    expected, _ = run(parts_of("executor=auto", *words), tmp_path / "not")
    programs = expected.executor["programs"]
    assert not programs["used"] and programs["made"] == 0 and not traced  # as SECONDS has it
    monkeypatch.setattr(specbench.executors.compile_cache, "SECONDS", 1e-9)
    told: list[str] = []
    parts = parts_of("executor=auto", *words)
    result, _ = run(parts, tmp_path / "yes", lambda done, total, what: told.append(what))
    programs = result.executor["programs"]
    assert programs["used"] and programs["made"] == len(traced) > 3 and programs["missed"] == 0
    assert programs["decision"].startswith("compiles for about 0 s") and programs["seconds"] > 0
    assert [what for what in told if what.startswith("compiling")] == [
        f"compiling program {number + 1}" for number in range(len(traced))
    ]
    assert texts(tmp_path / "yes") == texts(tmp_path / "not")
    [cached] = (tmp_path / "cache").glob("compiling-*.json")
    assert json.loads(cached.read_text())["weights"] == weights_of_programs(parts)  # as was predicted


def texts(folder):
    return [json.loads(line)["output"] for line in (folder / "prompts.jsonl.part").read_text().splitlines()]


@pytest.mark.parametrize("kinds", [["auto", "auto"], ["auto", "eager"]])
def test_ways_in_turn_compile_the_layers_of_all_or_none(kinds, traced, monkeypatch, tmp_path):
    """Two ways share the target and with it the programs of its layers; what only one of them would have is not made.
    A later comparison, with another gamma, finds the programs."""
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("specbench.executors.layer_programs.LEAST_LAYERS", 1)
    monkeypatch.setattr("specbench.executors.auto.SECONDS", 1e-9)
    monkeypatch.setattr(Programs, "keep", lambda programs, name, folder, *made: kept.append((name, folder)))
    kept, targets, made = [], Targets(), []
    for kind, drafter in zip(kinds, ("random", "prompt_lookup"), strict=True):
        words = small(f"executor={kind}", f"drafter={drafter}", "logger=none", "verdict_tokens=0", "gamma=2",
                      "data.limit=1", "max_new_tokens=4")  # fmt: skip
        made.append(build(check(composed(*words)), targets=targets))
    runs = [(parts, tmp_path / str(number), lambda group: None) for number, parts in enumerate(made)]
    cohorts = [runs] if kinds[0] == kinds[1] else [[way] for way in runs]
    found = run_in_turn(cohorts, lambda *progress: None)
    used = [result.executor.get("programs", {}).get("used", False) for result, _ in found]
    assert used == [kinds[0] == kinds[1]] * 2
    assert len(traced) == len({*kept}) == (2 if used[0] else 0)  # of one new token, and of several
    assert all(folder == made[0].target.executor.programs.layers for _, folder in kept)
    other = check(composed(*small("executor=auto", "drafter=random", "gamma=4"))).traced()
    assert not used[0] or {folder.name for _, folder in kept} == {other.machine}
