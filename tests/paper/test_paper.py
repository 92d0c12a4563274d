"""The paper's printed numbers beside its formulas, and pages of our runs beside both."""

from pathlib import Path

import pytest
import yaml
from records import facts, records

from specbench.measure.results import results
from specbench.paper.callback import write
from specbench.paper.published import PRINTED, TABLE_3, TABLE_4, rows_of
from specbench.paper.tables import OURS
from specbench.report import files, page

EXPERIMENTS = Path(__file__).parents[2] / "conf" / "experiment"


def differing(name):
    return {one.text for one in PRINTED[name]() if one.formula is not None and not one.agrees}


def test_what_is_printed_and_not_the_formulas():
    """Worked out by hand: (1 - .56^4) / (.44 * 1.33) = 1.541 and so on."""
    assert differing("table1") == set()
    assert differing("table4") == {"2.4", "2.0", "1.6"}
    [found] = [one.formula for one in PRINTED["table4"]() if one.text == "1.6"]
    assert found == pytest.approx((1 - 0.56**4) / (0.44 * 1.33)) and round(found, 2) == 1.54
    assert differing("table5") == {"2.5", "3.1", "3.6"}


def test_the_best_gamma_of_table_5_is_found():
    speeds = [one.formula for one in PRINTED["table5"]() if "best gamma" in one.where["M_q"]]
    by_hand = [
        max((1 - a ** (g + 1)) / ((1 - a) * (0.015 * g + 1)) for g in range(60)) for a in (0.62, 0.71, 0.76, 0.84)
    ]
    assert speeds == pytest.approx(by_hand)


def test_tables_that_share_numbers_have_the_same():
    alphas = {(row["M_p"], row["M_q"], t): row[f"T={t}"] for row in rows_of(TABLE_3) for t in "01"}
    for row in rows_of(TABLE_4):
        assert alphas[f"T5-XXL({row['task']})", row["M_q"], row["T"]] == row["alpha"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with one finished run of synthetic records."""
    place = tmp_path_factory.mktemp("paper")
    own = records()
    choices = {name: "stdlib" for name in ("target", "drafter")} | {"gamma_policy": "fixed", "verifier": "speculative"}
    config = {"gamma": 4, "temperature": 1.0, "lenience": 1.0, "target": {"path": "x"}, "drafter": {"path": "y"}}
    found = results(own, facts(choices=choices, config=config | {"verifier": {}}))
    (place / "one").mkdir()
    page.write_run(place / "one", found, own)
    with (place / "one" / files.RECORDS).open("w") as file:
        for record in own:
            file.write(record.line() + "\n")
    return place


@pytest.mark.parametrize("name", [name for name in OURS if name != "appendix_a4"])
def test_every_table_and_figure_is_written(name, folder):
    assert yaml.safe_load((EXPERIMENTS / f"{name}.yaml").read_text())["name"] == name
    text = write(name, folder)
    alpha = files.read_run(folder / "one").results["alpha"]["mean"]
    column = (
        "alpha (tested)" if name == "table3" else "probability to accept (mean)" if name == "appendix_a2" else "alpha"
    )
    assert f"{alpha:.3f}" in text and column in text and "| stdlib" in text
    assert (folder / f"{name}.png").stat().st_size > 5000
