"""The command that replays gamma policies on a finished run."""

import json
import shutil
from types import SimpleNamespace

import pytest
from choosing import slow_unless
from small_runs import finished as finished

import specbench.contrib.replay.command as command
from specbench.contrib.replay import policies
from specbench.contrib.replay.table import replay_notes, replay_table
from specbench.contrib.replay.trace import load_trace
from specbench.errors import ConfigError
from specbench.stats.replay import priced, sweep_rounds


def test_the_command_prints_a_table_and_writes_it(finished, monkeypatch, tmp_path, capsys):
    folder = shutil.copytree(finished("gamma=3")[2], tmp_path / "run")
    result = json.loads((folder / "results.json").read_text())
    for cost in result["cost"]["by_gamma"]:  # as measured, plain rounds may be the best, and the oracle gains nothing
        cost["share"] = 1 + cost["gamma"] / 8
    (folder / "results.json").write_text(json.dumps(result))
    monkeypatch.setenv("COLUMNS", "200")  # a narrow terminal leaves columns out
    monkeypatch.setattr(command, "ALL", "optimal,confidence,oracle")  # at temperature 1
    command.main([str(folder)])
    shown = capsys.readouterr().out
    assert "confidence is left out: it looks at q(x) of the drawn guess" in shown
    assert "gamma 3" in shown and "oracle" in shown and "100%" in shown and "adaptive" not in shown
    stored = json.loads((folder / "replay.json").read_text())
    assert set(stored) - {"gamma 4"} == {"gamma 0", "gamma 1", "gamma 2", "gamma 3", "best gamma", "optimal", "oracle"}
    assert "in-sample" in shown  # five prompts
    command.main([str(folder), "gamma_policy=oracle"])
    kept = json.loads((folder / "replay-1.json").read_text())
    assert "the earlier one is now replay-1.json" in " ".join(capsys.readouterr().out.split()) and kept == stored
    assert stored["oracle"]["drafted"] < stored["gamma 3"]["drafted"]  # never what will not be accepted
    assert stored["oracle"]["speedup"] >= max(entry["speedup"] for entry in stored.values())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere"], "nowhere is not a finished run: results.json is not there"),
        (["{folder}", "gamma_policy=nonsense"], "gamma_policy=nonsense is not a choice"),
        (["{folder}", "gamma_policy=adaptive", "gamma_policy.prior=-1"], "gamma_policy.prior=-1.0 is not allowed"),
        (["{folder}", "gamma_policy=confidence"], "gamma_policy=confidence is not possible: it looks at q(x)"),
        (["{folder}", "gamma_policy=confidence", "cost=1,1,1,1", "tokens=9"], "gamma_policy=confidence is not"),
    ],
)
def test_bad_input_is_one_sentence(arguments, expected, finished, capsys, monkeypatch):
    _, _, folder = finished("gamma=3")
    with pytest.raises(SystemExit) as stop:
        command.main([a.replace("{folder}", str(folder)) for a in arguments])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and expected in err and "Traceback" not in err and err.count("specbench:") == 1


def test_a_verifier_without_laws_leaves_nothing_to_replay(finished, capsys):
    result, _, folder = finished("verifier=synthetic", "data.limit=1")
    assert result.alpha_on_target_text.mean is None and result.gamma_sweep == [] and result.drift.tv is None
    with pytest.raises(SystemExit):
        command.main([str(folder)])
    assert "there are no betas along its text" in capsys.readouterr().err


@pytest.mark.parametrize(("overrides", "why"), [
    (("gamma=2", "lenience=0.5", "data.limit=1"), "lenience below 1"),
    slow_unless(False, ("drafter=ngram", "temperature=0"), "where a round began"),
    slow_unless(False, ("drafter=prompt_lookup", "data.limit=1"), "where a round began"),
])  # fmt: skip
def test_runs_whose_text_tells_nothing_of_another_gamma_say_so(overrides, why, finished, capsys):
    result, _, folder = finished(*overrides)
    assert why in result.no_replay and result.gamma_sweep == [] and result.regret is None
    with pytest.raises(SystemExit):
        command.main([str(folder)])
    assert why in capsys.readouterr().err


@pytest.mark.slow
def test_an_interval_of_costs_that_are_not_known_to_be_above_zero_is_unknown(finished):
    _, _, folder = finished("gamma=4", "data.limit=12")
    trace = load_trace(folder)
    rounds = sweep_rounds(trace)[2]
    seconds = float(trace.halves[0].seconds[2])
    for half in trace.halves:
        half.covariance[:] = 0.0
    known = priced(trace, rounds).ci95
    for half in trace.halves:
        half.covariance[2, 2] = (0.05 * seconds) ** 2
    wider = priced(trace, rounds).ci95
    assert known is not None and wider is not None and wider[1] / wider[0] < 10
    for half in trace.halves:
        half.covariance[2, 2] = (5 * seconds) ** 2  # as after a stall of the machine
    found = {"gamma 2": priced(trace, rounds), "best gamma": priced(trace, rounds)}
    assert found["gamma 2"].ci95 is None and "unknown" in str(replay_table(trace, found).rows)
    told = " ".join(replay_notes(trace, found, [2, 3]))
    assert "chose gamma 2 for the second" in told and "unknown: the times of rounds" in told
    assert "each half of the prompts chose gamma 2" in " ".join(replay_notes(trace, found, [2, 2]))


def test_halves_of_another_run_are_refused_and_older_results_are_in_sample(finished, tmp_path, capsys):
    shutil.copytree(finished("gamma=2", "data.limit=10", "max_new_tokens=8")[2], tmp_path, dirs_exist_ok=True)
    path = tmp_path / "results.json"
    text = path.read_text()
    broken = {"clusters": [["nobody"]]}, {"covariance": [[1.0]]}, {"by_gamma": []}
    for change, told in zip(broken, ("not of the texts", "not that of a run", "not that of a run"), strict=True):
        whole = json.loads(text)
        whole["cost"]["halves"][0] |= change
        path.write_text(json.dumps(whole))
        with pytest.raises(SystemExit):
            command.main([str(tmp_path)])
        assert told in capsys.readouterr().err
    path.write_text(text)
    command.main([str(tmp_path), "gamma_policy=optimal"])
    assert "each half of the prompts by the other's costs" in " ".join(capsys.readouterr().out.split())
    whole = json.loads(text)
    del whole["cost"]["halves"], whole["gamma_pick"]
    path.write_text(json.dumps(whole))
    command.main([str(tmp_path), "gamma_policy=optimal"])
    assert "in-sample" in capsys.readouterr().out


@pytest.mark.parametrize("overrides", [
    ["temperature=0"], ["gamma_policy=fixed", "gamma_policy=oracle"], ["+gamma_policy.x=1"], ["x"], ["batch_size"],
])  # fmt: skip
def test_replay_refuses_what_cannot_apply(overrides, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        command.main([str(tmp_path), *overrides])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.startswith("specbench: ") and overrides[0] in err


@pytest.mark.parametrize(("names", "overrides", "told"), [
    ("optimal", ["gamma=3"], "gamma=... cannot apply to gamma_policy=optimal"),
    ("optimal", ["gamma_policy.prior=3"], "gamma_policy.prior is not a setting of the chosen gamma_policy"),
    ("adaptive", ["gamma_policy.largest=50"], "gamma_policy.largest=50 is not possible: this run's rounds"),
    ("nope", [], "gamma_policy=nope is not a choice"),
])  # fmt: skip
def test_replay_names_the_setting_that_no_policy_has(names, overrides, told, monkeypatch):
    monkeypatch.setattr(policies, "build_policy", lambda config, trace: None)
    with pytest.raises(ConfigError) as error:
        list(policies.policies(SimpleNamespace(largest=4), [names], overrides))
    assert told in str(error.value)
