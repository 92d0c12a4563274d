"""Acceptance as a length: given to the synthetic verifier, and by teacher forcing beside what an engine reported."""

import re
from decimal import Decimal

import pytest
import torch
from distribution_cases import start
from small_runs import composed, finished, small

from specbench.config.build import build
from specbench.config.check import check
from specbench.decoding.draft import Draft
from specbench.decoding.noise import Noise
from specbench.decoding.sampling import Sampling
from specbench.errors import ConfigError
from specbench.measure.sums import Estimate
from specbench.report.files import read_run
from specbench.run.alpha import agreement, expected_rounds, length_of, main, measure

CURVE = {1: 1.84, 2: 2.51, 3: 3.01, 4: 3.36, 5: 3.61}
LENGTHS = "".join(f"    {k}: {length:.2f}\n" for k, length in CURVE.items())
GOLDEN = f"# key = num_speculative_tokens\nsome-model:\n  thinking_on:\n{LENGTHS}"
BOTH = f"{GOLDEN}  thinking_off:\n    1: 1.50\n    2: 2.00\n"


def overrides(tmp_path, text=GOLDEN, *more):
    file = tmp_path / "golden.yaml"
    file.write_text(text)
    return ["verifier=synthetic", f"verifier.golden={file}", *more]


def kept(gamma, given, rounds=1_000):
    """Tokens of each of so many rounds of gamma guesses, as the composed verifier draws them."""
    choice = check(composed(*small(*given, f"gamma={gamma}"))).choices["verifier"]
    state = start(rounds)
    draft = Draft.chain(torch.zeros(rounds, gamma, dtype=torch.long), None, torch.full((rounds,), gamma))
    noise = Noise(state.noise, state.length, draft.levels)
    verifier = choice.build(Sampling(), 1.0)
    verdict = verifier.accept(torch.full((rounds, gamma + 1, 4), 0.25), draft, noise)
    assert verifier.beta(noise.r, draft, verdict).shape == (rounds, gamma)
    return (verdict.accepted + 1).double()


@pytest.mark.parametrize(("gamma", "length"), [(3, 2.82), (5, 2.82), (2, 2.82), (3, 1.25), (2, 3.0), (3, 1.0)])
def test_a_length_is_realised_as_closely_as_independent_rounds_can(gamma, length):
    """Of 1,000 rounds the mean has a standard error of up to .5 / sqrt(1000) tokens; of 20,000 it is within .5 %."""
    found = kept(gamma, ["verifier=synthetic", f"verifier.length={length}"], 20_000)
    part = length % 1
    assert abs(found[:1_000].mean() - length) <= 3 * (part * (1 - part) / 1_000) ** 0.5 + 1e-6
    assert found.mean() == pytest.approx(length, rel=0.005)
    assert found.max() - found.min() <= 1  # least variance: the two integers around it alone
    by_rate = kept(gamma, ["verifier=synthetic", f"verifier.alpha={length / 4}"])
    assert by_rate.mean() != pytest.approx(length, rel=0.05)


@pytest.mark.parametrize("gamma", [1, 3, 5])
def test_a_golden_file_gives_the_length_of_its_number_of_guesses(gamma, tmp_path):
    assert kept(gamma, overrides(tmp_path), 4_000).mean() == pytest.approx(CURVE[gamma], rel=0.005)
    other = overrides(tmp_path, BOTH, "verifier.mode=thinking_off")
    assert gamma > 2 or kept(gamma, other, 4_000).mean() == pytest.approx({1: 1.5, 2: 2.0}[gamma], rel=0.01)


def test_without_a_length_alpha_is_the_usual_one_and_theorem_3_8_holds():
    usual, length = (
        check(composed(*small("verifier=synthetic", *more))).choices["verifier"].build(Sampling(), 1.0)
        for more in ([], ["verifier.length=2"])
    )
    assert usual.alpha == 0.8 and usual.lengths is None and "Theorem" not in usual.note
    assert length.note.endswith("text and alpha are not, and Theorem 3.8 does not hold")


def test_a_run_keeps_the_length():
    results, *_ = finished("verifier=synthetic", "verifier.length=2", "gamma=3", "max_new_tokens=41")
    assert results.block_efficiency["mean"] == pytest.approx(2, rel=0.03)  # a text's last round may be cut


REFUSED = {
    "gamma=1 verifier.length=2.82": "verifier.length=2.82 is not possible with gamma=1, which gives at most 2 tokens",
    "verifier.length=.5": "verifier.length=0.5 is not allowed: it must be a number >= 1",
    "verifier.golden=nowhere.yaml": "verifier.golden=nowhere.yaml is not a file",
    "verifier.length=2 verifier.golden=GOLDEN": "verifier.length=2.0 is not possible with verifier.golden=",
    "verifier.alpha=0 verifier.length=2": "verifier.alpha=0.0 is not possible with verifier.length=2.0: give null",
    "verifier.alpha=.5 verifier.golden=GOLDEN": "verifier.alpha=0.5 is not possible with verifier.golden=",
    "verifier.mode=on": "verifier.mode=on is not possible with verifier.golden=null: give a file or null",
    "gamma=6 verifier.golden=GOLDEN": "which has lengths of at most 5 guesses",
    "verifier.golden=BOTH": "verifier.mode=null is not allowed with",
    "verifier.golden=GOLDEN verifier.mode=off": "it must be one of thinking_on",
    "verifier.golden=LIST": "does not have one model's lengths",
    "verifier.golden=LONG": "must have lengths from 1 to k + 1 after k guesses",
}


@pytest.mark.parametrize("given", REFUSED)
def test_a_length_that_cannot_be_is_refused_before_a_model_is_loaded(given, tmp_path, monkeypatch):
    words = REFUSED[given]
    for name, text in (("GOLDEN", GOLDEN), ("BOTH", BOTH), ("LIST", "[1, 2]"), ("LONG", "m: {thinking_on: {1: 2.5}}")):
        (tmp_path / name).write_text(text)
        given = given.replace(f"golden={name}", f"golden={tmp_path / name}")
    monkeypatch.setattr("specbench.models.load.PretrainedModel.__init__", None)
    with pytest.raises(ConfigError, match=re.escape(words)):
        build(check(composed(*small("verifier=synthetic", *given.split()))), announce=lambda text: None)


def test_expected_rounds_are_those_of_a_simulation():
    accepts, gamma = torch.rand(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64), 3
    rounds, tokens = expected_rounds(accepts.tolist(), gamma)
    generator = torch.Generator().manual_seed(1)
    lengths = []
    for _ in range(200):
        taken = (torch.rand(400, generator=generator) < accepts).tolist()
        place = 0
        for ok in taken:
            place += 1
            if place > gamma or not ok:
                lengths.append(place)
                place = 0
    simulated = sum(lengths) / len(lengths)
    assert tokens / rounds == pytest.approx(simulated, rel=0.01)
    assert expected_rounds([1.0] * 8, 3) == (2.0, 8.0) and expected_rounds([0.0] * 8, 3) == (8.0, 8.0)
    assert expected_rounds([0.5] * 8, 0) == (8.0, 8.0)


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_length_by_teacher_forcing_is_that_of_the_run(temperature, capsys):
    """Betas of a text that was not drawn from p would give another length, so the run's own text counts."""
    results, _, folder = finished(f"temperature={temperature}", "gamma=3", "max_new_tokens=64", "data.limit=8")
    tau = results.block_efficiency["mean"]
    assert measure(folder, [], Decimal(f"{tau:.2f}")) is not False
    said = capsys.readouterr().out.replace("\n", " ")
    assert "tokens per target call at gamma=3" in said and said.count("these agree.") == 1
    measure(folder, [], Decimal("1.1"))
    assert "the engine reported 1.1: these do not agree." in capsys.readouterr().out.replace("\n", " ")


def test_a_head_is_compared_by_its_run_and_rounding_counts(tmp_path, capsys):
    *_, folder = finished("drafter=blockwise", "gamma=3")
    named = tmp_path / "gamma=3"
    named.symlink_to(folder)
    main([str(named), "--reported", "1.9"])
    found = length_of(read_run(folder))
    assert f"The drafter gives {found.value:.2f}" in capsys.readouterr().out
    length = Estimate(2.83, 0.005, (2.82, 2.84))
    assert agreement(length, Decimal("2.8")) and not agreement(length, Decimal("2.80"))
    assert agreement(Estimate(2.8), Decimal("2.8")) is None


def test_what_an_engine_reported_is_a_number(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--reported", "abc"])
    assert end.value.code == 2 and "--reported=abc is not allowed" in capsys.readouterr().err
