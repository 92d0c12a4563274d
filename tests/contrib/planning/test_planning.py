"""Plans: what a pilot's variances say of other numbers of prompts, tokens and processes."""

import json
import math

import numpy as np
import pytest
from small_runs import composed, small

import specbench.contrib.planning.command as command
from specbench.config.validate import check
from specbench.contrib.planning.gpu_sizing import devices_needed
from specbench.contrib.planning.plans import Spread, fewest_prompts, halves_of_alpha, plans, share_within
from specbench.stats.records import PerRequestSums
from specbench.stats.two_way_bootstrap import TwoWaySums

SD = {"process": 0.03, "prompt": 0.10, "cell": 0.05}


def processes(count, prompts, seed) -> list[PerRequestSums]:
    """Sums of several processes whose log speedups vary by SD between processes, prompts and both."""
    generator = np.random.default_rng(seed)
    of_prompt = SD["prompt"] * generator.standard_normal(prompts)
    found = []
    for _ in range(count):
        of_process = SD["process"] * generator.standard_normal()
        shift = of_prompt + of_process + SD["cell"] * generator.standard_normal(prompts)
        columns = {"slow": np.full(prompts, 2.0), "fast": np.exp(-shift)}
        names = [str(number) for number in range(prompts)]
        found.append(PerRequestSums(names, names, [""] * prompts, list(range(prompts)), columns=columns))
    return found


def ratio(s):
    return {"ratio": s["slow"] / s["fast"]}


def pilot(count, prompts, seed) -> Spread:
    runs = processes(count, prompts, seed)
    return Spread(TwoWaySums.of(lambda: runs).components(ratio)["ratio"], 0.0)


def test_components_are_those_of_the_simulation():
    found = [pilot(8, 60, seed).of for seed in range(20)]
    for name, sd in SD.items():
        variances = [getattr(each, name) for each in found]
        assert math.sqrt(np.mean(variances)) == pytest.approx(sd, rel=0.15)


@pytest.mark.parametrize(("count", "prompts"), [(4, 24), (8, 96)])
def test_a_plan_has_the_width_that_the_run_will_have(count, prompts):
    """Against intervals of simulated runs of that size, which know nothing of the plan."""
    planned = pilot(40, 400, 1).half_width(count, prompts, 1)
    widths = []
    for seed in range(60):
        runs = processes(count, prompts, 100 + seed)
        low, high = TwoWaySums.of(lambda runs=runs: runs).intervals(ratio)["ratio"]
        widths.append(math.log(high / low) / 2)
    assert planned == pytest.approx(np.sqrt(np.mean(np.square(widths))), rel=0.12)


def test_one_process_knows_nothing_of_others():
    found = pilot(1, 60, 3)
    assert found.of.process is None and found.of.cell == 0
    assert math.sqrt(found.of.prompt) == pytest.approx(math.hypot(SD["prompt"], SD["cell"]), rel=0.25)


def test_longer_texts_help_only_what_is_of_their_tokens():
    spread = pilot(8, 60, 0)
    own, tokens = Spread(spread.of, 0.0), Spread(spread.of, 1.0)
    assert tokens.half_width(1, 20, 4) == pytest.approx(own.half_width(1, 20, 1) / 2)
    assert own.half_width(1, 20, 4) > 0.8 * own.half_width(1, 20, 1)
    assert fewest_prompts(own, 1e-9, 3, 1) is None  # processes differ, however many prompts there are
    prompts = fewest_prompts(own, 0.06, 5, 1)
    assert own.half_width(5, prompts, 1) <= 0.06 < own.half_width(5, prompts - 1, 1)
    found = plans(own, 0.06, 64, 1.0)
    assert found[0].seconds == min(p.seconds for p in found) and all(p.half_width <= 0.06 for p in found)


@pytest.mark.parametrize(("own", "share"), [(0.0, 1.0), (0.2, None)])
def test_what_rounds_have_in_common_is_the_prompts_own(own, share):
    generator = np.random.default_rng(0)
    alphas = 0.6 + own * generator.uniform(-1, 1, 300)
    rounds = [{"prompt": str(p), "round": r, "beta": [float(generator.random() < alphas[p])]}
              for p in range(300) for r in range(20)]  # fmt: skip
    found = share_within(halves_of_alpha(rounds, [str(p) for p in range(300)]))
    variance, sampled = own**2 / 3, np.mean(alphas * (1 - alphas)) / 20
    assert found == pytest.approx(sampled / (variance + sampled) if share is None else share, abs=0.12)


def called(arguments, monkeypatch, folder) -> int:
    monkeypatch.chdir(folder)
    try:
        command.main(arguments)
    except SystemExit as stop:
        return stop.code
    return 0


@pytest.mark.slow
def test_the_command_plans_from_a_pilot(good, monkeypatch, tmp_path, capsys):
    words = small("verdict_tokens=0", "executor=eager", "target=model", f"target.path={good}", "drafter=random",
                  "data.limit=6")  # fmt: skip
    assert called([*words, "--speedup", "20", "--alpha", "0.1"], monkeypatch, tmp_path) == 0
    out = capsys.readouterr().out
    assert "+- 20 % of the speedup" in out and "+- 0.1 of alpha" in out and "data.limit" in out
    [folder] = (tmp_path / "outputs" / "plan").iterdir()
    assert json.loads((folder / "plan.json").read_text())["speedup"]["plans"]
    assert called(["--pilot", str(folder), "--speedup", "10"], monkeypatch, tmp_path) == 0
    assert called(["--pilot", str(folder / "repeat=0")], monkeypatch, tmp_path) == 0
    assert "too few processes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--speedup", "0"], "--speedup 0 is not allowed"),
        (["--alpha", "2"], "--alpha 2 is not allowed"),
        (["gamma=-1"], "gamma=-1 is not allowed"),
        (["drafter=nothing"], "drafter=nothing is not a choice"),
        (["--pilot", "nowhere"], "is not a finished run"),
    ],
)
def test_mistakes_are_one_sentence(arguments, sentence, monkeypatch, tmp_path, capsys):
    assert called(arguments, monkeypatch, tmp_path) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_seventy_billion_and_eight_need_two_devices_of_80_gb():
    told = devices_needed(check(composed(*small("drafter=llama8b", "logger=none"))).choices, gamma=5)
    assert told.startswith("weights of 141 GB and 16.1 GB in bfloat16, 1 row of 1,041 tokens")
    line = next(line for line in told.splitlines() if " of 80 GB" in line)
    # By hand: 141.1 GB of weights and 16.06 of the drafter's; divided by two 78.6 each, with 2.1 of embeddings in one
    # piece where transformers does not divide them, and 83.5 free on a device; the drafter in one piece needs 86.6.
    assert line.startswith("four (") and "two (" in line and "drafter.tensor_parallel=2)" in line
