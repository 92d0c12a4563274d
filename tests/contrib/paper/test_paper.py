"""The paper's printed numbers beside its formulas and our runs."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from small_runs import parts_of

from specbench import theory
from specbench.contrib.paper.callback import BesideThePaper, WholePaper
from specbench.contrib.paper.measured import OURS, counted_operations, our_rows
from specbench.contrib.paper.notes import NOTES, K, alpha_for, mean_accepted, memory_rows
from specbench.contrib.paper.page import page, write
from specbench.contrib.paper.published import CLAIMS, ELSEWHERE, TABLE_3, TABLE_4, TABLE_5, Claim, inputs
from specbench.contrib.paper.theory_figures import figure_3
from specbench.results.reader import StoredRun, load_run
from specbench.results.writer import write_result
from specbench.run.run import run

EXPERIMENTS = Path(__file__).parents[3] / "conf" / "experiment"


def differing(claims):
    return {(claim.printed, claim.judgement()) for claim in claims if claim.judgement() != "agrees"}


def test_what_the_paper_prints_and_its_formulas_do_not_give():
    """Worked out by hand: (1 - .56^4) / (.44 * 1.33) = 1.541 and so on."""
    assert differing(CLAIMS["table1"]()) == set()
    assert differing(CLAIMS["table4"]()) == {("2.4", "rounding"), ("2.0", "rounding"), ("1.6", "rounding")}
    found = {c.printed: c.expected() for c in CLAIMS["table4"]() if c.judgement() == "rounding"}
    assert found["1.6"] == pytest.approx((1 - 0.56**4) / (0.44 * 1.33)) and round(found["1.6"], 2) == 1.54
    wrong = {(p, j) for p, j in differing(CLAIMS["table5"]()) if j != "-"}
    assert wrong == {("2.5", "differs"), ("3.1", "differs"), ("3.6", "differs")}


def test_numbers_that_the_paper_does_not_print_stand_apart():
    source, others = ELSEWHERE["figure2"]
    assert differing(others()) == {("2.05", "differs"), ("3.28", "differs")} and not CLAIMS["figure2"]()
    assert [round(c.expected(), 2) for c in others()] == [0.94, 1.77, 3.1]
    text = page("figure2", [])
    assert f"Not the paper's: printed in {source}" in text and "\nPrinted" not in text and "2.05" in text


def test_an_acceptance_rate_has_two_readings():
    """Worked out by hand: .7 as alpha is (1 - .7^6) / .3 = 2.94 tokens a call, as accepted / K 1 + 5 * .7 = 4.5."""
    table = next(iter(NOTES["runner_design"].tables().values()))
    assert [row["tokens a call"] for row in table] == ["3.50", "1.97", "4.50", "2.94", "5.50", "4.69"]
    assert [row["speedup"] for row in table[2:4]] == [f"{4.5 / (1 + 5 / 3):.2f}x", f"{2.941 / (1 + 5 / 3):.2f}x"]
    assert all(mean_accepted(alpha_for(share, K), K) == pytest.approx(share * K) for share in (0.1, 0.5, 0.9))


def test_the_designs_memory_stands_beside_ours():
    """By hand: 2 * 28 layers * 8 heads * 128 * 2 bytes = 114,688 for a token, 448 MiB for 4,096, 3.5 GiB for eight."""
    rows = {row["what"]: row for row in memory_rows()}
    assert rows["keys and values of a token, 3B"][""] == rows["keys and values of a token, 1B"][""] == "agrees"
    assert rows["keys and values of 3B"][""] == "agrees in binary units"
    assert rows["keys and values of 3B"]["ours, decimal units"] == f"{8 * 4096 * 114688 / 1e9:.2f}"
    assert rows["weights of 1B"][""] == "agrees in decimal units" and rows["weights of 3B"][""] == "differs"
    weights = 128256 * 3072 + 28 * (2 * 3072 * 3072 + 2 * 3072 * 1024 + 3 * 3072 * 8192 + 2 * 3072) + 3072
    assert rows["weights of 3B"]["ours, decimal units"] == f"{2 * weights / 1e9:.2f}" and rows["total"][""] == "differs"


def test_the_best_gamma_of_table_5_is_found():
    speeds = [c for c in CLAIMS["table5"]() if c.where["T"] == "1" and c.formula is not None]
    alphas = (0.62, 0.71, 0.76, 0.84)
    by_hand = [max((1 - a ** (g + 1)) / ((1 - a) * (0.015 * g + 1)) for g in range(60)) for a in alphas]
    assert [c.expected() for c in speeds] == pytest.approx(by_hand)
    assert [round(s, 2) for s in by_hand] == [2.33, 2.94, 3.45, 4.79]


def test_tables_that_share_numbers_have_the_same():
    at = {(target, name): dict(zip("01", map(float, alphas), strict=True))
          for target, rows in TABLE_3.items() for name, *alphas in rows}  # fmt: skip
    for task, name, t, _, alpha, *_ in TABLE_4:
        assert at[f"T5-XXL ({task})", name][t] == float(alpha)
    for name, alphas in TABLE_5.items():
        assert at["T5-XXL (EnDe)", name]["1"] == float(alphas[0])


def test_figure_3_has_a_curve_at_the_c_of_each_run():
    """By hand: the gamma with the largest (1 - alpha^(gamma + 1)) / ((1 - alpha) (gamma c + 1)). A run without replay
    has a curve, but no dot."""
    sweep = [{"gamma": 2, "speedup": 1.2}]
    runs = [StoredRun(Path("run"), {"alpha": {"mean": 0.7}, "cost": {"c": c}, "gamma_sweep": of})
            for c, of in ((0.333, []), (0.334, sweep), (None, sweep))]  # fmt: skip
    lines = figure_3(runs).axes[0].lines
    [ours] = [line for line in lines if line.get_label() == "gamma* at the c of a run"]
    for alpha, gamma in zip(*ours.get_data(), strict=True):
        speed = [(1 - alpha ** (g + 1)) / ((1 - alpha) * (0.33 * g + 1)) for g in range(40)]
        assert speed[int(gamma)] == pytest.approx(max(speed))
    [dots] = [line for line in lines if line.get_label() == "best by replay"]
    assert [*dots.get_xdata()] == [0.7] * 2 and [*dots.get_ydata()] == [2] * 2


@pytest.mark.parametrize("alpha, judged", [("0.62", "differs"), ("0.66", "agrees"), ("0.655", "rounding")])
def test_a_claim_is_judged_by_the_rounding_of_its_inputs(alpha, judged):
    """At gamma 4: 2.37, 2.57, and between 2.546 and 2.549 for alphas that round to .655."""
    value = {"0.62": "2.6", "0.66": "2.57", "0.655": "2.547"}[alpha]
    claim = Claim({}, "tokens", value, theory.expected_tokens, inputs(alpha=alpha, gamma="4"))
    assert claim.judgement() == judged


def test_every_table_and_figure_is_an_experiment_and_a_page():
    assert set(OURS) == set(CLAIMS)
    for name in CLAIMS:
        assert f"name: {name}\n" in (EXPERIMENTS / f"{name}.yaml").read_text()
        assert page(name, []).startswith(f"# {name}\n")
    callback = OmegaConf.load(EXPERIMENTS / "paper.yaml").hydra.callbacks.paper
    assert sorted([*callback.names, *callback.others]) == sorted({*OURS} - {*NOTES})
    assert all((EXPERIMENTS / f"{name}.yaml").exists() for name in callback.others.values())


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> list[StoredRun]:
    """A sampled run and a beam search, with their files."""
    runs = []
    for words in (("gamma=3",), ("decoding=beam", "beams=2", "gamma=1")):
        folder, parts = tmp_path_factory.mktemp("run"), parts_of("data.limit=1", *words)
        result, record = run(parts, folder)
        write_result(result, record, "0", folder, parts.target.tokenizer)
        runs.append(load_run(folder))
        c_hat = parts.drafter.operations_per_token / parts.target.operations_per_token
        assert runs[-1].result["c_hat"] == pytest.approx(c_hat) and c_hat > 0
    return runs


@pytest.mark.slow
def test_our_runs_stand_beside_the_tables_they_belong_to(finished, tmp_path, capsys):
    sampled, beams = (run.result for run in finished)
    for name in OURS:
        text = write(name, finished, tmp_path)
        assert (tmp_path / f"{name}.png").stat().st_size > 1000 and (tmp_path / f"{name}.md").read_text() == text
        [row] = our_rows(name, finished)
        assert not any("None" in cell or "nan" in cell for cell in row.values())
    rounds = finished[0].rounds
    [content], [request] = (our_rows(name, finished) for name in ("ngram_chapter", "runner_design"))
    assert request["most"] == f"{sum(r['accepted'] for r in rounds) / 3 / len(rounds):.3f}"
    assert content["category"] == "-" and content["calls"] == str(len(rounds))
    assert content["accepted a call"] == f"{sum(r['accepted'] for r in rounds) / len(rounds):.3f}"
    expected = theory.expected_tokens(sampled["counts"]["accepted"] / sampled["counts"]["tested"], 3) - 1
    assert content["equation 1, gamma"] == f"{expected:.3f}"
    [row] = our_rows("appendix_a4", finished)
    assert (row["w"], row["u"], row["w + u gamma"], row["equal"]) == ("2", "4", "6", "1 of 1")
    counts = sampled["counts"]
    target_runs = counts["verified"] + sampled["c_hat"] * counts["drafted"]
    assert counted_operations(sampled) == pytest.approx(target_runs / counts["tokens"])
    lines = (tmp_path / "figure1.md").read_text().splitlines()
    shown = (f"({r['accepted_text']})[{r['own_text']}]".replace("\n", "\\n") for r in finished[0].rounds[:12])
    assert all(any(line.startswith(part) for line in lines) for part in shown)
    assert beams["operations_factor"] is None


def test_a_gamma_that_varies_is_named_and_its_operations_are_counted(finished):
    """With gamma varied the count is the same: it is not solved for c_hat, which would give 0."""
    sampled = finished[0].result
    varied = sampled | {"gamma": None, "choices": sampled["choices"] | {"gamma_policy": "adaptive"}}
    counts = sampled["counts"]
    assert counted_operations(varied) == counted_operations(sampled) > counts["verified"] / counts["tokens"]
    for other in ({"operations_factor": None}, {"c_hat": None}):
        changed = replace(finished[0], result=varied | other)
        [row] = our_rows("table1", [changed])
        assert (row["gamma"], row["operations, counted"]) == ("adaptive", "-")
    [row] = our_rows("table1", finished)
    assert row["gamma"] == "3" and row["operations, counted"].endswith("x")


def test_a_sweep_that_failed_is_one_line(tmp_path, capsys):
    BesideThePaper(["table1"]).on_multirun_end(_config(tmp_path / "nothing"))
    assert "table1 cannot be shown" in capsys.readouterr().out


def test_the_whole_paper_is_one_page_of_several_sweeps(finished, tmp_path, monkeypatch, capsys):
    asked = []

    def other(command, check):
        """Runs figure2 by copying a run; table1 fails."""
        asked.append(command[3:])
        if command[3] == "experiment=figure2":
            shutil.copytree(finished[0].folder, tmp_path / "figure2" / "gamma=3")
        return subprocess.CompletedProcess(command, command[3] != "experiment=figure2")

    monkeypatch.setattr(subprocess, "run", other)
    shutil.copytree(finished[0].folder, tmp_path / "temperature=1")
    said = ["experiment=paper", "name=paper", "data.limit=3"]
    callback = WholePaper(["table3", "table2"], {"figure2": "figure2", "figure4": "figure2", "table1": "table1"})
    callback.on_multirun_end(_config(tmp_path, said))
    assert asked == [[f"experiment={name}", f"hydra.sweep.dir={tmp_path / name}", "max_new_tokens=40", "data.limit=3"]
                     for name in ("figure2", "table1")]  # fmt: skip
    text = (tmp_path / "paper.md").read_text()
    order = ["table1", "table2", "table3", "figure2", "figure4"]
    assert [line[2:] for line in text.splitlines() if line.startswith("# ")] == order
    images = [line[4:-1].split("](")[1] for line in text.splitlines() if line.startswith("![")]
    assert images == ["table2.png", "table3.png", "figure2/figure2.png", "figure2/figure4.png"]
    assert all((tmp_path / image).is_file() for image in images) and "# table1\n\nNot there: " in text
    assert "experiment=table1 has failed" in capsys.readouterr().out


def _config(folder, said=()):
    """The part of Hydra's configuration that the callbacks read."""
    hydra = {"sweep": {"dir": str(folder)}, "overrides": {"task": list(said)}}
    return OmegaConf.create({"hydra": hydra, "data": {"limit": 5}, "max_new_tokens": 40})
