"""alpha by teacher forcing, against the betas that a run stores at every position of its text."""

import json

import numpy as np
import pytest
import torch
from small_runs import call, parts_of, small

from specbench.contrib.alpha import teacher_forced
from specbench.contrib.alpha.command import main
from specbench.contrib.alpha.teacher_forced import ScoredText, read_alpha
from specbench.results.reader import load_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder, patch = tmp_path_factory.mktemp("alpha"), pytest.MonkeyPatch()
    words = small("executor=eager", "logger=none", "data.limit=4", "hydra.run.dir=run")
    assert call(words, patch, folder) == 0
    patch.undo()
    return folder / "run"


def measured(words, monkeypatch, capsys) -> tuple[int, str]:
    """Exit code of the command, and what it printed."""
    with pytest.raises(SystemExit) as stopped:
        main(list(map(str, words)))
    shown = capsys.readouterr()
    return stopped.value.code or 0, shown.out + shown.err


def test_it_equals_the_betas_of_the_run(run, monkeypatch, capsys):
    """The run's are read through its cache in pieces of 64 positions, these by one forward without a cache."""
    code, printed = measured([run], monkeypatch, capsys)
    found = json.loads((run / "alpha.json").read_text())
    betas = np.array(load_run(run).positions["beta"], float)
    assert code == 0 and found["sound"] and found["positions"] == np.isfinite(betas).sum()
    assert found["alpha"]["mean"] == pytest.approx(np.nanmean(betas), abs=1e-5)
    assert "mean of beta" in printed and f"{found['alpha']['mean']:.3f}" in printed


def test_another_drafter_on_the_text_of_a_run(run, monkeypatch, capsys, tmp_path):
    """The target itself as drafter has alpha 1, and sees more than it may in the control without a mask."""
    words = [run, "drafter.path=shipped:drafter", "--json", tmp_path / "own.json"]
    code, _ = measured(words, monkeypatch, capsys)
    found = json.loads((tmp_path / "own.json").read_text())
    assert code == 0 and found["alpha"]["mean"] == pytest.approx(1, abs=1e-5)
    assert max(found["shifted"]["mean"], found["unmasked"]["mean"]) < 0.9


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_beta_is_that_of_both_distributions(temperature):
    """At temperature 0 beta says whether the two argmax agree; else the sum of min(p, q), written out here."""
    parts = parts_of("executor=eager", f"temperature={temperature}")
    target, drafter = parts.target, parts.drafter.models[0]
    text = next(iter(parts.rendered.values())).tokens
    found = read_alpha(target, drafter, [ScoredText("", text, 1)])
    with torch.inference_mode():
        p, q = (m.stock_module()(torch.tensor([text])).logits[0, :-1].double() for m in (target, drafter))
    if temperature:
        expected = torch.minimum((p / temperature).softmax(-1), (q / temperature).softmax(-1)).sum(-1)
    else:
        expected = (p.argmax(-1) == q.argmax(-1)).double()
    assert found.alpha.mean == pytest.approx(expected.mean().item(), abs=1e-4)
    assert found.alpha.positions == [len(text) - 1] and found.alpha.stderr is None


def test_a_measurement_that_ignores_the_mask_is_not_sound(run, monkeypatch, capsys):
    """Negative control: what is read "without a mask" has one, so it gives alpha."""
    monkeypatch.setattr(teacher_forced, "_without_mask", teacher_forced.stock_scores)
    code, printed = measured([run, "--json", run.parent / "broken.json"], monkeypatch, capsys)
    assert code == 3 and "do not trust" in printed


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["drafter=ngram"], "drafter=ngram has no model"),
        (["nowhere"], "nowhere"),
        (["drafter.paht=x"], "Did you mean drafter.path"),
    ],
)
def test_what_is_refused(words, sentence, monkeypatch, capsys):
    code, printed = measured(words, monkeypatch, capsys)
    assert code == 2 and sentence in printed and "Traceback" not in printed


def test_the_error_of_alpha_is_that_of_texts_as_clusters():
    """Two texts of equal length: half the difference of their means."""
    sums = teacher_forced.BetaSums([4.0, 6.0], [10, 10])
    assert sums.mean == 0.5 and sums.stderr == pytest.approx(0.1)
