"""alpha along finished texts: recomputed from the tables of p and q, and its controls."""

from typing import Any

import numpy as np
import pytest
import torch
from decoder_cases import V, make_drafter, tabular_model

from specbench.decoding.sampling import Sampling
from specbench.models.reference_forward import FinishedText
from specbench.run import readers
from specbench.run.alpha import read_alpha
from specbench.run.readers import read_target_text

PROMPT, NEW = [3, 7, 1, 4], [2, 9, 5, 5, 1, 0, 8]


def softmax(logits: Any, temperature: float = 1.0) -> Any:
    weights = np.exp(logits.double().numpy() / temperature)
    return weights / weights.sum()


def recomputed(target: Any, drafter: Any, lenience: float = 1.0) -> float:
    """The sum of min(p / l, q) from tables of logits by the two tokens before."""
    text, total = [*PROMPT, *NEW], 0.0
    for t in range(len(PROMPT), len(text)):
        p, q = (softmax(table[text[t - 2], text[t - 1]]) for table in (target, drafter))
        total += np.minimum(p / lenience, q).sum()
    return float(total)


@pytest.mark.parametrize("lenience", [1.0, 0.5])
def test_betas_are_recomputed_from_the_tables(lenience: float, tables: Any, number_text: str) -> None:
    target, helper = tabular_model(tables.target, Sampling()), tabular_model(tables.similar, Sampling())
    drafter = make_drafter("model", target, number_text, helper)
    found = read_target_text(target, drafter, FinishedText(PROMPT, NEW), lenience=lenience)
    assert found["positions"] == len(NEW)
    assert found["beta"] == pytest.approx(recomputed(tables.target, tables.similar, lenience), abs=1e-5)
    assert found["beta"] != pytest.approx(recomputed(tables.similar, tables.target, 0.8 * lenience), abs=1e-3)


def test_at_temperature_0_beta_is_whether_both_agree(tables: Any, number_text: str) -> None:
    greedy = Sampling(temperature=0)
    target, helper = tabular_model(tables.target, greedy), tabular_model(tables.similar, greedy)
    found = read_target_text(target, make_drafter("model", target, number_text, helper), FinishedText(PROMPT, NEW))
    text = [*PROMPT, *NEW]
    pairs = [(text[t - 2], text[t - 1]) for t in range(len(PROMPT), len(text))]
    assert found["beta"] == sum(int(tables.target[a, b].argmax() == tables.similar[a, b].argmax()) for a, b in pairs)


def test_a_drafter_without_models_is_asked_where_it_guesses(tables: Any, number_text: str) -> None:
    target = tabular_model(tables.target, Sampling())
    found = read_target_text(target, make_drafter("bigram", target, number_text, None), FinishedText(PROMPT, NEW))
    assert 0 < found["positions"] <= len(NEW) and 0 < found["beta"] < found["positions"]
    silent = read_target_text(target, make_drafter("ngram", target, number_text, None), FinishedText([0, 1], [2, 3]))
    assert silent["positions"] <= 2


@pytest.mark.parametrize("sound", [True, False])
def test_the_control_differs_from_alpha(sound: bool, tables: Any, monkeypatch: Any) -> None:
    """Where the same p stands at every position, p of the next one gives alpha too, and nothing is shown."""
    target, drafter = tabular_model(tables.target, Sampling()), tabular_model(tables.similar, Sampling())
    if not sound:
        read = readers.distribution
        monkeypatch.setattr(readers, "distribution", lambda *given: read(*given).mean(0).expand(40, V))
    rng = np.random.default_rng(0)
    texts = [([*PROMPT, *rng.integers(0, V, 40).tolist()], len(PROMPT)) for _ in range(12)]
    found = read_alpha(target, drafter, texts, 3, False)
    assert found.texts == 12 and found.positions == 480 and found.sound is sound
    assert found.alpha.value is not None and found.shifted.value is not None and found.alpha.stderr
    assert not sound or found.alpha.value > found.shifted.value + 3 * found.alpha.stderr
    one = read_alpha(target, drafter, texts[:1], 3, False)
    assert one.sound is None
    if sound:  # the last position has no next one
        text = texts[0][0]
        pairs = list(zip(text[len(PROMPT) - 2 : -1], text[len(PROMPT) - 1 : -1], strict=False))
        p, q = (torch.stack([table[a, b] for a, b in pairs]).softmax(-1) for table in (tables.target, tables.similar))
        assert one.shifted.value == pytest.approx(float(torch.minimum(p[1:], q[:-1]).sum()) / 39, rel=1e-4)
    with pytest.raises(ValueError, match="no text"):
        read_alpha(target, drafter, [([1, 2], 1)], 3, False)
