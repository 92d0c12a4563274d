"""The sentence that a run's output begins with: every case, and never more than the numbers say."""

import copy
import re
from itertools import product

import pytest

from specbench.results.recommendation import verdict_sentence

ONE = {"factor": 1.0, "ci95": [0.99, 1.01]}
RESULT = {
    "status": "complete",
    "choices": {"gamma_policy": "fixed"},
    "gamma": 4,
    "alpha": {"mean": 0.62},
    "cost": {"c": 0.1},
    "speedup": {
        "measured": 1.36,
        "ci95": [1.30, 1.41],
        "end_to_end": 1.31,
        "end_to_end_ci95": [1.25, 1.37],
        "accounting": {
            "theorem_3_8": {"factor": 1.7, "ci95": [1.6, 1.8]},
            "verify": {"factor": 0.79, "ci95": [0.75, 0.83]},
            "rest": {"factor": 0.96, "ci95": [0.95, 0.97]},
            "luck": ONE,
        },
    },
    "gamma_sweep": [{"gamma": g, "speedup": s, "ci95": None} for g, s in enumerate((0.98, 1.2, 1.3, 1.45, 1.35))],
    "gamma_pick": {"gammas": [3, 3], "speedup": 1.44, "ci95": [1.38, 1.50], "in_sample": False},
    "lossless": {"verdict": "passed", "expected": True, "passed": True, "reason": "", "alpha_own": {"passed": True}},
    "machine": {"steady": True, "reasons": []},
    "counts": {"prompts": 32, "drafted": 4000, "failed": 0},
    "speedup_over": {},
    "latency_by_rate": [],
    "repeats": None,
    "workers": [],
}
TRY = "try gamma 3: 1.44x (1.38 to 1.50) expected"
LOSS = "; most of the loss against Theorem 3.8 is verification (x0.79)."
MEASURED = "1.36x (1.30 to 1.41) measured with gamma 4 in one process"
HERE = "1.36x (1.30 to 1.41) measured in one process"
SLOW = {"speedup/measured": 0.81, "speedup/ci95": [0.74, 0.87], "gamma_sweep/4/speedup": 0.82}
OPEN = {"speedup/measured": 1.02, "speedup/ci95": [0.95, 1.09], "gamma_sweep/4/speedup": 1.01}
THEOREM = {"speedup/accounting/theorem_3_8": {"factor": 0.9, "ci95": [0.88, 0.92]}}
NO_REPLAY = {"gamma_sweep": [], "gamma_pick": None}


def changed(changes):
    result = copy.deepcopy(RESULT)
    for path, value in changes.items():
        *above, last = path.split("/")
        entry = result
        for key in above:
            entry = entry[int(key) if isinstance(entry, list) else key]
        entry[last] = value
    return result


def picked(gammas, speedup, ci95, in_sample=False):
    return {"gamma_pick": {"gammas": gammas, "speedup": speedup, "ci95": ci95, "in_sample": in_sample}}


OWN = "0.81x (0.74 to 0.87) measured in one process"
OWN_4 = "0.81x (0.74 to 0.87) measured with gamma 4 in one process"
NOT_HERE = "Do not use this drafter here"
POLICY = {"gamma": None, "choices/gamma_policy": "adaptive"}
CASES = {
    "a better gamma": ({}, f"Use gamma 4: {HERE}; {TRY}{LOSS}"),
    "halves disagree": (picked([3, 2], 1.42, [1.36, 1.48]),
                        f"Use gamma 4: {HERE}; try gamma 3 or 2: 1.42x (1.36 to 1.48) expected"),
    "in-sample": (picked([3], 1.44, [1.38, 1.50], True),
                  f"Use gamma 4: {HERE}; 1.44x (1.38 to 1.50) expected (in-sample, so too high) with gamma 3"),
    "no better gamma": (picked([4, 4], 1.36, [1.30, 1.40]),
                        f"Use gamma 4: {HERE}; no other gamma up to 4 is expected to be better{LOSS}"),
    "hardly better": (picked([3, 3], 1.36, [1.30, 1.40]), f"Use gamma 4: {HERE}; no other gamma up to 4 is"),
    "no replay": (NO_REPLAY, f"Use gamma 4: {HERE}{LOSS}"),
    "slower, another gamma may gain": (
        SLOW | picked([1, 1], 1.10, [1.05, 1.15]),
        "Try gamma 1: 1.10x (1.05 to 1.15) expected, 0.81x (0.74 to 0.87) measured with gamma 4"),
    "slower, another gamma is open": (SLOW | picked([1, 1], 1.02, [0.95, 1.10]),
                                      f"{NOT_HERE} with gamma 4: {OWN}; 1.02x (0.95 to 1.10) expected with gamma 1"),
    "slower, and so is the best gamma": (SLOW | picked([1, 1], 0.93, [0.90, 0.97]),
                                         f"{NOT_HERE}: {OWN_4}; no gamma up to 4 is expected to gain"),
    "slower, by replay with every gamma": (SLOW | picked([0, 0], 0.98, [0.95, 1.01]),
                                           f"{NOT_HERE}: {OWN_4}; no gamma up to 4 is expected to gain"),
    "slower, no replay": (SLOW | NO_REPLAY, f"{NOT_HERE} with gamma 4: {OWN}"),
    "slower by Theorem 3.8, with this gamma": (
        SLOW | NO_REPLAY | THEOREM,
        f"{NOT_HERE} with gamma 4: {OWN}; by Theorem 3.8 gamma 4 is too long for alpha 0.62 and c 0.10 (0.90x)."),
    "slower by Theorem 3.8, with a policy": (
        SLOW | NO_REPLAY | THEOREM | POLICY, f"{NOT_HERE} with gamma_policy=adaptive: {OWN}; "
        "by Theorem 3.8 the policy's gammas are too long for alpha 0.62 and c 0.10 (0.90x)."),
    "slower by Corollary 3.9": (
        SLOW | NO_REPLAY | THEOREM | {"alpha/mean": 0.3, "cost/c": 0.31},
        f"{NOT_HERE} with gamma 4: {OWN}; alpha 0.30 is too low for c 0.31 (Theorem 3.8: 0.90x)."),
    "1 in the interval": (OPEN | NO_REPLAY, "No gain is shown: 1.02x (0.95 to 1.09) measured with gamma 4"),
    "1 in the interval, another gamma may gain": (OPEN, "Try gamma 3: 1.44x (1.38 to 1.50) expected, 1.02x"),
    "one prompt": ({"speedup/ci95": None, "counts/prompts": 1} | picked([3], 1.44, None, True),
                   "Too few prompts to say: 1.36x measured with gamma 4 in one process, of one request; most of the"),
    "no loss": ({"speedup/measured": 9.0, "speedup/ci95": None},
                "Too few prompts to say: 9.00x measured with gamma 4 in one process; 1.44x (1.38 to 1.50) expected "
                "with gamma 3."),
    "failed": ({"lossless/verdict": "failed", "lossless/reason": "p-value 1e-9"},
               "Do not use this: the output FAILED the losslessness test (p-value 1e-9): "
               f"{MEASURED}, of a wrong output."),
    "lossy": ({"lossless/verdict": "lossy"}, f"Not lossless by choice. Use gamma 4: {HERE}; {TRY}"),
    "a policy is better": (POLICY | picked([3, 3], 1.30, [1.25, 1.35]), f"Use gamma_policy=adaptive: {HERE}; "
                           "no constant gamma up to 4 is expected to be better"),
    "a policy is worse": (POLICY, f"Use gamma_policy=adaptive: {HERE}; {TRY}"),
    "pooled": ({"repeats": {"processes": 5}},
               f"Use gamma 4: 1.36x (1.30 to 1.41) measured in 5 processes; {TRY} (first process)"),
    "nothing drafted": ({"gamma": 0, "counts/drafted": 0, "speedup/accounting": {}},
                        "Nothing was drafted: 1.36x (1.30 to 1.41) measured with gamma 0 in one process."),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_sentence_of_each_case(name):
    changes, expected = CASES[name]
    found = verdict_sentence(changed(changes))
    assert found.startswith(expected) and found.endswith(".")


@pytest.mark.parametrize(("changes", "part"), [
    ({"lossless/verdict": "untested"}, " Losslessness is untested."),
    ({"lossless/verdict": "inconclusive"}, " Losslessness is inconclusive."),
    ({"machine": {"steady": False}}, " The machine was not steady: measure again."),
    ({"status": "interrupted"}, " The run is interrupted."),
    ({"counts/failed": 2}, " 2 requests failed."),
    ({"speedup/end_to_end": 0.9, "speedup/end_to_end_ci95": [0.8, 1.0]}, "; with prefill 0.90x (0.80 to 1.00)"),
    ({"speedup_over": {"assisted": {"measured": 0.8, "ci95": [0.7, 0.9]}}}, "; assisted is faster: 0.80x (0.70 to"),
    ({"latency_by_rate": [{"rate": 2.0, "ratio": {"first_token": {"p50": {"factor": 0.7, "ci95": [0.6, 0.8]}}}}]},
     "; the median first token at 2/s takes 0.70 (0.60 to 0.80) of plain decoding's time"),
])  # fmt: skip
def test_what_limits_a_number_is_said(changes, part):
    assert part in verdict_sentence(changed(changes))
    assert part not in verdict_sentence(RESULT)


def test_a_machine_that_was_not_steady_is_no_ground_for_use_or_against():
    assert verdict_sentence(changed({"machine": {"steady": False}})).startswith(f"Try gamma 4: {HERE}; {TRY}")
    slow = SLOW | NO_REPLAY
    assert verdict_sentence(changed(slow | {"machine": {"steady": False}})).startswith("No gain is shown: 0.81x")
    assert verdict_sentence(changed(slow)).startswith("Do not use")


def test_use_needs_an_interval_above_1_and_every_interval_is_one_of_the_result():
    """Over many made-up results: what is recommended has a gain, and what replay says is called expected."""
    for measured, width, expected, in_sample in product((0.7, 0.95, 1.05, 1.4), (0.02, 0.2, None), (0.9, 1.2, 1.5),
                                                        (False, True)):  # fmt: skip
        ci95 = None if width is None else [measured - width, measured + width]
        own = picked([2, 2], expected, [expected - 0.15, expected + 0.15], in_sample)
        found = verdict_sentence(changed({"speedup/measured": measured, "speedup/ci95": ci95} | own))
        assert found.startswith("Use") == (ci95 is not None and ci95[0] > 1)
        assert ("Do not use" in found) <= (ci95 is not None and ci95[1] < 1)
        told = re.findall(r"(\d\.\d\dx)(?: \([\d. to]+\))? (\w+)", found)
        assert all(what == ("measured" if x == f"{measured:.2f}x" else "expected") for x, what in told)


@pytest.mark.parametrize(
    ("alpha", "c"), [(0.9, 0.02), (0.56, 0.52), (0.3, 0.29), (0.3, 0.31), (0.02, 0.35), (0.0, 0.01)]
)
def test_alpha_is_too_low_only_where_no_gamma_gains(alpha, c):
    """Theorem 3.8 at every gamma up to 50 against what is said of a gamma that loses."""
    gains = [sum(alpha**i for i in range(gamma + 1)) / (gamma * c + 1) > 1 for gamma in range(1, 51)]
    found = verdict_sentence(changed(SLOW | NO_REPLAY | THEOREM | {"alpha/mean": alpha, "cost/c": c}))
    assert ("is too long" in found, "too low" in found) == (any(gains), not any(gains))


@pytest.mark.parametrize(("others", "expected"), [
    ({}, "most of the loss against Theorem 3.8 is verification (x0.79)"),
    ({"dependence": {"factor": 0.7, "ci95": [0.4, 1.1]}}, "the largest loss shown against Theorem 3.8 is verif"),
    ({"luck": {"factor": 0.75, "ci95": [0.7, 0.8]}}, "the largest loss shown against Theorem 3.8 is verification"),
    ({"luck": {"factor": 1.4, "ci95": [1.3, 1.5]}}, "most of the loss against Theorem 3.8 is verification (x0.79)"),
])  # fmt: skip
def test_most_of_the_loss_is_more_than_half_of_all_losses(others, expected):
    """Those that may be chance count too."""
    factors = RESULT["speedup"]["accounting"] | others
    assert f"; {expected}" in verdict_sentence(changed({"speedup/accounting": factors}))


def test_what_was_never_measured_is_never_used():
    """Whatever replay expects, "use" and "do not use" name the gamma of the run."""
    for speedup, gammas, expected, width in product(({}, SLOW, OPEN), ([1, 1], [3, 3], [2, 3], [0, 0]),
                                                    (0.9, 1.05, 1.6), (0.01, 0.2)):  # fmt: skip
        own = picked(gammas, expected, [expected - width, expected + width])
        found = verdict_sentence(changed(speedup | own))
        assert re.findall(r"(?:Use|with) (gamma \d)", found)[0] == "gamma 4" or found.startswith("Try")
        blunt = found.startswith("Do not use this drafter here:")
        assert blunt == (speedup is SLOW and (gammas == [0, 0] or expected + width < 1))
