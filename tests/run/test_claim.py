"""Claims: what agrees is called consistent, what was altered inconsistent, and what nobody can say "cannot tell"."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from records import records
from small_runs import finished
from stored import stored

from specbench.errors import ConfigError
from specbench.measure.claim import Claim, Figure, Numbers, compared, judged, numbers_of, read_claim, within
from specbench.models import hub
from specbench.report import files
from specbench.run import claim as command

PUBLISHED = sorted((Path(__file__).parents[2] / "experiments/claims").glob("*.yaml"))

HARMFUL = (
    ("choices: {target.trust_remote_code: 'true'}", "choices.target.trust_remote_code=true is not a choice"),
    ("choices: {target._target_: os.system}", "choices.target._target_=os.system is not a choice"),
    ("choices: {hydra.searchpath: x}", "choices.hydra.searchpath=x is not a choice of an option. Available: cache, da"),
    ("choices: {peers: vllm}", "choices.peers=vllm is not a choice"),
    ("choices: {target: '[x]'}", "choices.target=[x] is not allowed"),
    ("needs: n, rows: [{choices: {target: ../x}}]", "rows.0.choices.target=../x is not allowed"),
    ("needs: n, rows: [{choices: {+gamma: '1'}}]", "choices.+gamma=1 is not a choice"),
)
HARDWARE = {"device": "cpu", "cpu": "x86_64", "threads": 1, "dtype": "float32"}  # of synthetic runs


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return stored(tmp_path_factory.mktemp("run"), records(16), greedy=True, dtype="float32", data="d")


def claim_of(run, **changes) -> Claim:
    """The claim of a run; `changes` are of its numbers."""
    numbers = numbers_of(run.results, run.records).model_dump() | changes
    data = {"sha256": "d", "rendered_sha256": run.results["details"]["prompts"]["sha256"]}
    return Claim(claim=1, source="s", target="t", drafter="d", data=data, hardware=HARDWARE, numbers=numbers)


def answers(claim, run, same=True):
    return {each.number: each.answer for each in judged(claim, run.results, run.records, same)}


def test_a_run_agrees_with_itself(run):
    found = answers(claim_of(run), run)
    assert found.keys() == {"alpha", "block_efficiency", "texts", "c", "v", "o", "speedup"}
    assert {*found.values()} == {"consistent"}


@pytest.mark.parametrize("number", ["alpha", "block_efficiency", "texts", "speedup"])
def test_an_altered_number_is_found(run, number):
    own = vars(numbers_of(run.results, run.records))[number]
    altered = "0" * 64 if number == "texts" else own.model_dump() | {"value": own.value + 1e-5}
    if number == "speedup":
        altered = {"value": 2 * own.value, "ci95": [2 * end for end in own.ci95], "prompts": 16}
    found = answers(claim_of(run, **{number: altered}), run)
    if number == "block_efficiency":
        assert found.pop("speedup") == "cannot tell"  # with so few prompts the tokens per round are not known well
    assert found.pop(number) == "inconsistent" and {*found.values()} == {"consistent"}


def test_other_settings_are_compared_by_intervals(run):
    alpha = numbers_of(run.results, run.records).alpha
    near, far = (alpha.model_dump() | {"value": alpha.value + shift * alpha.stderr} for shift in (1, 8))
    assert answers(claim_of(run, alpha=near), run, same=False)["alpha"] == "consistent"
    assert answers(claim_of(run, alpha=far), run, same=False)["alpha"] == "inconsistent"
    assert answers(claim_of(run, texts="0"), run, same=False)["texts"] == "cannot tell"
    assert answers(claim_of(run, alpha=alpha.value), run, same=False)["alpha"] == "cannot tell"  # no interval


def test_a_claim_of_0_is_answered(run):
    """As of a drafter without steps, or of nobody's speed."""
    zero = {"value": 0.0, "stderr": 0.0}
    found = answers(claim_of(run, c=zero, speedup=zero, alpha=zero), run)
    assert (found["c"], found["speedup"], found["alpha"]) == ("cannot tell", "cannot tell", "inconsistent")
    for gamma in (0, 2, 4):
        for changes in ({"c": None, "speedup": zero}, {"c": zero, "speedup": zero}):
            assert {each.answer for each in within(claim_of(run, **changes).numbers, gamma)} == {"cannot tell"}
        numbers = Numbers.model_validate({"alpha": "0.80", "c": "0.0", "theorem_3_8": "0.0", "speedup": "0.0"})
        found = {each.number: each.answer for each in within(numbers, gamma)}
        assert found == {**dict.fromkeys(("alpha", "c", "speedup"), "cannot tell"), "theorem_3_8": "inconsistent"}


@pytest.mark.parametrize(("key", "value"), [("device", "H100"), ("cpu", "arm64"), ("threads", 2), ("torch", "0")])
def test_another_machine_or_version_is_compared_by_intervals(run, key, value):
    own = numbers_of(run.results, run.records)
    alpha, speedup = own.alpha.model_dump(), own.speedup.model_dump()
    near, far = (alpha | {"value": alpha["value"] + shift} for shift in (1e-3, 0.5))
    double = speedup | {"value": 2 * speedup["value"], "ci95": [2 * end for end in speedup["ci95"]]}
    for changed, expected in ((alpha, "consistent"), (near, "consistent"), (far, "inconsistent")):
        claim = claim_of(run, alpha=changed, texts="0", speedup=double)
        place = claim.versions if key == "torch" else claim.hardware
        place[key] = value
        found = answers(claim, run)
        assert (found["alpha"], found["texts"]) == (expected, "cannot tell")
        assert found["speedup"] == ("inconsistent" if key == "torch" else "cannot tell")
    bare = claim_of(run, alpha={"value": alpha["value"]})  # equal numbers need no interval
    bare.hardware["threads"] = 2
    assert answers(bare, run)["alpha"] == answers(bare, run)["texts"] == "consistent"


def test_tokens_of_unknown_error_predict_no_speed(run):
    tokens = 1.01 * numbers_of(run.results, run.records).block_efficiency.value
    assert answers(claim_of(run, block_efficiency={"value": tokens}), run)["speedup"] == "cannot tell"
    assert answers(claim_of(run, block_efficiency=f"{tokens:.3f}"), run, same=False)["speedup"] == "consistent"


def test_a_printed_number_is_compared_with_its_rounding(run):
    alpha = numbers_of(run.results, run.records).alpha
    far = alpha.value + 3 * alpha.stderr
    assert compared(Figure(value=far), alpha)[0] == "cannot tell"
    assert compared(Figure(value=far, rounding=alpha.stderr), alpha)[0] == "consistent"
    assert compared(Figure(value=far + 9 * alpha.stderr, rounding=alpha.stderr), alpha)[0] == "inconsistent"


@pytest.mark.parametrize(("text", "rounding"), [("0.80", 0.005), ("1e-3", 0.5e-3), ("12", 0.5), ("1.5e2", 5)])
def test_a_printed_number_has_its_rounding(text, rounding):
    for given in (text, {"value": text}, {"value": text, "prompts": 2**53}):
        assert Figure.model_validate(given).rounding == pytest.approx(rounding)
    assert Figure.model_validate({"value": text, "rounding": 0.25}).rounding == 0.25
    assert Figure(value=1, ci95=(0, 2), prompts=2**53).error == pytest.approx(1 / 1.96, rel=1e-2)


def test_other_prompts_cannot_tell(run):
    claim = claim_of(run)
    claim.data.rendered_sha256 = "0"
    found = answers(claim, run)
    assert {found[name] for name in ("alpha", "block_efficiency", "texts")} == {"cannot tell"}


def test_honest_claims_are_seldom_inconsistent_and_others_are_found():
    rng = np.random.default_rng(0)

    def figure(mean: float) -> Figure:
        sample = rng.normal(mean, 0.1, 12)
        return Figure(value=sample.mean(), stderr=sample.std(ddof=1) / 12**0.5, prompts=12)

    def share(mean: float) -> float:
        return float(np.mean([compared(figure(0.7), figure(mean))[0] == "inconsistent" for _ in range(600)]))

    assert share(0.7) <= 0.025 and share(0.9) >= 0.9
    wide = Figure(value=0.7, stderr=0.3, prompts=4)
    assert compared(wide, figure(0.7))[0] == "cannot tell"


def test_a_claim_is_compared_with_itself():
    claims = read_claim(next(path for path in PUBLISHED if path.stem.startswith("leviathan"))).each()
    answers = [each for own in claims for each in within(own.numbers, own.settings["gamma"])]
    printed = [each.answer for each in answers if each.number == "theorem_3_8"]
    assert printed == ["consistent"] * 12 and "inconsistent" not in {each.answer for each in answers}
    altered = claims[0].numbers.model_copy(update={"theorem_3_8": Figure.model_validate("3.8")})
    assert {each.number: each.answer for each in within(altered, 7)}["theorem_3_8"] == "inconsistent"


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_published_claims_without_their_weights_cannot_tell(path, monkeypatch, tmp_path, capsys):
    """Those of EAGLE-2 have, as printed, a speedup above the tokens of a round."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "hub_answers", lambda: False)
    command.main([str(path)])
    said = " ".join(capsys.readouterr().out.split())  # of any width
    assert "Not run here" in said and ("; inconsistent: 1 of 8 numbers (speedup); " in said) == ("eagle2" in path.stem)
    assert not (tmp_path / "outputs").exists()


def test_a_prediction_that_is_none_fails_with_and_without_a_run(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    numbers = {"alpha": "0.75", "c": "0.02", "theorem_3_8": "3.8", "speedup": "9.0"}
    claim = {"claim": 1, "source": "s", "target": "t", "drafter": "d", "settings": {"gamma": 7}, "numbers": numbers}
    Path("claim.yaml").write_text(yaml.safe_dump(claim | {"needs": "n"}))
    with pytest.raises(SystemExit) as stop:
        command.main(["claim.yaml"])
    assert stop.value.code == command.INCONSISTENT
    Path("claim.yaml").write_text(yaml.safe_dump(claim))
    monkeypatch.setattr(command, "answers", lambda claim, words: [])
    with pytest.raises(SystemExit) as stop:
        command.main(["claim.yaml"])
    assert stop.value.code == command.INCONSISTENT and "theorem_3_8" in capsys.readouterr().out


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_claim_of_a_run_is_run_again(temperature, monkeypatch, tmp_path, capsys):
    *_, made = finished(f"temperature={temperature}", "logger=none")
    folder = tmp_path / f"temperature={temperature}"
    shutil.copytree(made, folder)
    monkeypatch.chdir(tmp_path)
    command.main(["--from", str(folder)])
    file = folder / command.FILE
    command.main([str(file)])
    row = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.split()}
    assert "consistent" in row["alpha"] and "inconsistent" not in row["alpha"]
    assert ("texts" in row) == (temperature == 0)
    assert ("same settings" in row["alpha"]) == (temperature == 0)
    if temperature == 0:
        content = yaml.safe_load(file.read_text())
        content["numbers"]["alpha"]["value"] += 2e-6
        (tmp_path / "altered.yaml").write_text(yaml.safe_dump(content))
        with pytest.raises(SystemExit) as stop:  # the finished run is not decoded again
            command.main(["altered.yaml"])
        assert stop.value.code == command.INCONSISTENT
        [place] = Path("outputs/claim").rglob(files.RESULTS)  # whatever the order of a claim's keys
        for words, changed in (([], False), (["force=true"], False), ([], True)):
            results = json.loads(place.read_text())
            results["provenance"]["git_sha"] = "0" * 40 if changed else results["provenance"]["git_sha"]
            place.write_text(json.dumps(results))
            command.main([str(file), *words])
            again = json.loads(place.read_text())["provenance"]
            assert (again["seconds"] != results["provenance"]["seconds"]) == bool(words or changed)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[1]", "it must be YAML with the keys"),
        ("a: [", "cannot be read"),
        ("{claim: 2, source: s, target: t, drafter: d}", "claim=2 is not allowed, it must be 1"),
        ("{claim: 1, source: s, target: t}", "Field required"),
        ("{claim: 1, source: s, target: t, drafter: d, numbers: {alhpa: 1}}", "alhpa is not a key there. Did you mean"),
        ("{claim: 1, source: s, target: t, drafter: d, numbers: {alpha: x}}", "numbers.alpha"),
        ("{claim: 1, source: s, target: t, drafter: d, settings: {gama: 3}}", "gama is not a setting. Did you mean"),
        *(("{claim: 1, source: s, target: t, drafter: d, " + choices + "}", sentence) for choices, sentence in HARMFUL),
    ],
)  # fmt: skip
def test_a_bad_file_is_one_sentence(text, sentence, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text(text)
    with pytest.raises(SystemExit) as stop:
        command.main(["bad.yaml"])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and "bad.yaml" in said and sentence in said and said.count("\n") == 1
    with pytest.raises(ConfigError, match="missing"):
        read_claim(Path("missing.yaml"))


def test_no_setting_of_a_claim_runs_code():
    given = {"path": "p", "trust_remote_code": True, "_target_": "os.system"}
    assert command.claimed({"target": given}) == {"target": {"path": "p"}}
