"""What our runs say of the paper's claims, on numbers worked out by hand."""

import pytest

from specbench import theory
from specbench.contrib.paper.judgements import best_of_oracle, judged, of_formula, theorem_3_8


def estimate(mean, stderr):
    return {"mean": mean, "stderr": stderr, "n": 100}


def result(drafter="ende", temperature=1.0, lenience=1.0, verifier="speculative", alpha=(0.6, 0.01), size=0.1,
           measured=1.3, ci95=(1.25, 1.35), predicted=1.3, tokens=None, gamma=4):  # fmt: skip
    tokens = tokens or theory.expected_tokens(alpha[0], gamma)
    return {
        "choices": {"target": "ende", "drafter": drafter, "verifier": verifier},
        "config": {"temperature": temperature, "lenience": lenience},
        "alpha": estimate(*alpha), "alpha_on_target_text": estimate(*alpha), "c_hat": size, "gamma": gamma,
        "block_efficiency": estimate(tokens, 0.02), "operations_factor": 1.5,
        "counts": {"verified": 150, "drafted": 0, "tokens": 100},
        "speedup": {"measured": measured, "ci95": ci95, "theorem_3_8": predicted},
    }  # fmt: skip


def words(name, *results):
    return [(claim.claim.split(" (")[0], claim.word) for claim in judged(name, results)]


@pytest.mark.parametrize(
    ("low", "high", "word"), [(1.25, 1.35, "agrees"), (0.81, 2.06, "cannot tell"), (1.45, 1.6, "differs")]
)
def test_a_wide_interval_tells_nothing_and_a_narrow_one_decides(low, high, word):
    assert of_formula((low + high) / 2, low, high, 1.3) == word
    assert theorem_3_8(result(measured=(low + high) / 2, ci95=(low, high))).startswith(word)


def test_a_run_without_an_interval_is_not_judged():
    assert theorem_3_8(result(ci95=None)) == "-"
    assert ("Theorem 3.8 gives the measured speedup", "agrees") not in words("table2", result(ci95=None))


def test_formulas_of_all_runs():
    """One run that differs makes the claim differ; .8 of equation 1's tokens is beyond 1.96 * (.02 and alpha's)."""
    assert words("table2", result(), result()) == [("equation 1 gives the tokens of a call", "agrees"),
                                                   ("Theorem 3.8 gives the measured speedup", "agrees")]  # fmt: skip
    low = result(tokens=0.8 * theory.expected_tokens(0.6, 4))
    assert words("table2", result(), low)[0][1] == "differs"
    assert words("table1", result())[1] == ("Theorem 3.11 gives the counted operations", "agrees")


def test_orders_of_alphas():
    """A difference of .1 with errors of .01 is one, of .02 is none."""
    small, large = result("ende_small", size=0.1, alpha=(0.6, 0.01)), result(size=0.3, alpha=(0.7, 0.01))
    assert words("table3", large, small)[0] == ("a larger drafter has a larger alpha", "agrees")
    assert words("table3", small, result(size=0.3, alpha=(0.62, 0.01)))[0][1] == "cannot tell"
    assert words("table3", small, result(size=0.3, alpha=(0.5, 0.01)))[0][1] == "differs"
    assert words("table3", result(alpha=(0.6, None)), large)[0][1] == "cannot tell"
    alike = result("ende_small", size=0.1, alpha=(0.6, 1e-17))  # one text again and again, at temperature 0
    assert words("table3", alike, large)[0][1] == "cannot tell" and judged("figure2", [alike]) == []
    cold = result(temperature=0.0, alpha=(0.7, 0.01))
    assert words("table3", result(), cold) == [("alpha is larger at T = 0 than at T = 1", "agrees")]
    assert words("table5", result(), result(lenience=0.3, alpha=(0.8, 0.01))) == [
        ("more lenience raises alpha", "agrees")
    ]
    rejected = result(verifier="rejection", alpha=(0.5, 0.01))
    assert words("appendix_a2", result(), rejected)[0][1] == "agrees"
    assert words("table3", result("unigram", alpha=(0.07, 0.01)))[-1] == (
        "a trivial drafter has alpha above 0",
        "agrees",
    )


def test_an_oracle_gains_up_to_sixty_percent():
    """Section 3.5, at the c of Figure 3: from the definitions, on a grid of its own."""
    for c in (0.01, 0.05):
        ratio, alpha = best_of_oracle(c)
        best = max((1 - alpha ** (g + 1)) / ((1 - alpha) * (g * c + 1)) for g in range(400))
        assert ratio == pytest.approx(1 / (1 - alpha + c * alpha) / best) and 1.5 < ratio < 1.6
