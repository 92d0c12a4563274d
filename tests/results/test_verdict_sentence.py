"""The four lines that a run's output begins with, and the details: every case, and never more than the numbers say."""

import copy
from itertools import product

import pytest

from specbench.results.recommendation import answer, closing, details, verdict_sentence

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
    "gamma_pick": {
        "gammas": [3, 3],
        "speedup": 1.44,
        "ci95": [1.38, 1.50],
        "in_sample": False,
        "over_own": {"factor": 1.07, "ci95": [1.02, 1.12]},
    },
    "lossless": {"verdict": "passed", "expected": True, "passed": True, "reason": "", "alpha_own": {"passed": True}},
    "machine": {"steady": True, "reasons": []},
    "beam": None,
    "block_efficiency": {"mean": 2.471},
    "config": {"batch_size": 1, "data": {"limit": None}},
    "provenance": {"argv": ["specbench", "gamma=4", "data.limit=32", "hydra.run.dir=D"]},
    "overrides": None,
    "counts": {"prompts": 32, "drafted": 4000, "failed": 0},
    "speedup_over": {},
    "latency_by_rate": [],
    "repeats": None,
    "workers": [],
}
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


def picked(gammas, speedup, ci95, in_sample=False, over=None):
    pick = {"gammas": gammas, "speedup": speedup, "ci95": ci95, "in_sample": in_sample, "over_own": over}
    return {"gamma_pick": pick}


UNSTEADY = {"machine": {"steady": False}}
POLICY = {"gamma": None, "choices/gamma_policy": "adaptive"}
OVER, ALIKE = {"factor": 1.2, "ci95": [1.1, 1.3]}, {"factor": 1.2, "ci95": [0.99, 1.4]}
FASTER = "On this machine it is faster than plain decoding: 1.36x (1.30 to 1.41)"
SLOWER = "On this machine it is slower than plain decoding: 0.81x (0.74 to 0.87)."
NEITHER = "On this machine it is not shown to be faster or slower than plain decoding: 1.02x (0.95 to 1.09)."
MACHINE = "The machine was not steady, measure again: speedup over plain decoding "
TAU = "per target call, where plain decoding has 1: block efficiency (tau)"
RUN = "python -m specbench data.limit=32"
SAME = "python -m specbench gamma=4 data.limit=32 hydra.run.dir=D"
PROCESSES = "python -m specbench gamma=4 data.limit=32 repeats=5"
WITHOUT = "python -m specbench gamma=4 data.limit=32 drafter=ngram"
USE = "Next: keep gamma 4; for a surer number measure in five processes, which may differ:"
TRY = "try gamma 3, expected to be 1.07x as fast as gamma 4 (1.02 to 1.12):"
OFF = "Next: leave it off, or measure a drafter without a model:"
OFF_4 = "Next: do not use gamma 4, or measure a drafter without a model:"
NONE = ("On this machine it is slower than plain decoding: 0.81x (0.74 to 0.87) with gamma 4, and no gamma up to 4 is "
        "expected to gain: leave it off.")  # fmt: skip
CASES = {  # of each: what is changed, and the third line, the fourth and its command
    "a better gamma": ({}, f"{FASTER}.", f"Next: keep gamma 4, or {TRY}", f"{RUN} gamma=3"),
    "a better gamma of unequal halves": (
        picked([3, 2], 1.42, [1.36, 1.48], over=OVER), f"{FASTER}.",
        "Next: keep gamma 4, or try gamma 3 or 2, expected to be 1.20x as fast as gamma 4 (1.10 to 1.30):",
        f"{RUN} gamma=3"),
    "not told apart": (picked([3, 3], 1.44, [1.38, 1.50], over=ALIKE), f"{FASTER}.", USE, PROCESSES),
    "of an older run": (picked([3, 3], 1.44, [1.38, 1.50]), f"{FASTER}.", USE, PROCESSES),
    "half of it drafts nothing": (picked([0, 3], 1.44, [1.38, 1.50], over=OVER), f"{FASTER}.", USE, PROCESSES),
    "the gamma that it had": (picked([4, 4], 1.36, [1.30, 1.40], over=OVER), f"{FASTER}.", USE, PROCESSES),
    "no replay": (NO_REPLAY, f"{FASTER}.", USE, PROCESSES),
    "several processes": ({"repeats": {"processes": 5}} | NO_REPLAY, f"{FASTER} in 5 processes.",
                          "Next: keep gamma 4.", ""),
    "prefill takes the gain": (
        NO_REPLAY | {"speedup/end_to_end": 0.9, "speedup/end_to_end_ci95": [0.8, 1.0]},
        f"{FASTER}; with reading the prompt (prefill) 0.90x (0.80 to 1.00).", USE, PROCESSES),
    "not steady": (UNSTEADY, f"{MACHINE}1.36x (1.30 to 1.41).", "Next: measure again while nothing else runs:", SAME),
    "slower, not steady": (UNSTEADY | SLOW | picked([0, 0], 0.98, [0.95, 1.01]), f"{MACHINE}0.81x (0.74 to 0.87).",
                           "Next: measure again while nothing else runs:", SAME),
    "slower, another gamma gains": (
        SLOW | picked([1, 1], 1.10, [1.05, 1.15], over=OVER), SLOWER,
        "Next: try gamma 1, expected to be 1.20x as fast as gamma 4 (1.10 to 1.30):", f"{RUN} gamma=1"),
    "slower, another gamma loses less": (SLOW | picked([1, 1], 1.02, [0.95, 1.10], over=OVER), SLOWER, OFF_4, WITHOUT),
    "slower, no replay": (SLOW | NO_REPLAY, SLOWER, OFF_4, WITHOUT),
    "slower, and so is the best gamma": (SLOW | picked([1, 1], 0.93, [0.90, 0.97], over=OVER), NONE, OFF, WITHOUT),
    "slower, and best without drafts": (SLOW | picked([0, 0], 0.98, [0.95, 1.01], over=OVER), NONE, OFF, WITHOUT),
    "slower, ngram": (SLOW | NO_REPLAY | {"choices/drafter": "ngram"}, SLOWER, "Next: do not use gamma 4.", ""),
    "1 in the interval": (OPEN | NO_REPLAY, NEITHER, "Next: measure in five processes, which may differ:", PROCESSES),
    "1 in the interval, another gamma gains": (OPEN, NEITHER, f"Next: {TRY}", f"{RUN} gamma=3"),
    "1 in the interval, no gamma gains": (
        OPEN | picked([0, 0], 1.0, [0.99, 1.01]),
        "On this machine it is not shown to be faster or slower than plain decoding: 1.02x (0.95 to 1.09) with gamma "
        "4, and no gamma up to 4 is expected to gain: leave it off.", OFF, WITHOUT),
    "a policy is worse": (POLICY | {"choices/gamma_policy": "adaptive"}, f"{FASTER}.",
                          "Next: keep gamma_policy=adaptive, or try gamma 3, expected to be 1.07x as fast as "
                          "gamma_policy=adaptive (1.02 to 1.12):", f"{RUN} gamma=3 gamma_policy=fixed"),
    "few prompts": ({"speedup/ci95": None}, "Too few prompts to compare its speed with plain decoding's: 1.36x.",
                    "Next: measure more prompts, for an interval; five or more, or as many groups of rows.", ""),
    "few prompts of many": (
        {"speedup/ci95": None, "config/data": {"limit": 3}, "counts/prompts": 3},
        "Too few prompts to compare its speed with plain decoding's: 1.36x.",
        "Next: measure more prompts, for an interval:", "python -m specbench gamma=4 data.limit=32"),
    "failed": ({"lossless/verdict": "failed"}, "The output is wrong, so its speed says nothing: 1.36x (1.30 to 1.41).",
               "Next: find out whether the executor is the cause:",
               "python -m specbench gamma=4 data.limit=32 executor=eager"),
    "interrupted": ({"status": "interrupted"}, f"{FASTER}.",
                    "Next: measure all requests, by the same command:", SAME),
    "nothing drafted": ({"gamma": 0, "counts/drafted": 0, "speedup/accounting": {}},
                        "On this machine the loop without drafts, against plain decoding: 1.36x (1.30 to 1.41).",
                        "Next: measure with drafts:", f"{RUN} gamma=4"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_speed_and_what_next_of_each_case(name):
    changes, *expected = CASES[name]
    found = answer(changed(changes))
    assert [found.speed, found.next, found.command] == expected


@pytest.mark.parametrize(("changes", "works"), [
    ({}, "It works: no change of the output distribution was found (verdict passed)."),
    ({"lossless/verdict": "failed", "lossless/reason": "p-value 1e-9"},
     "It does not work, do not use it: the output is not the target's (verdict FAILED: p-value 1e-9)."),
    ({"lossless/verdict": "lossy"},
     "It works; the settings change the output distribution: not lossless by choice (verdict lossy)."),
    ({"lossless/verdict": "untested"}, "It ran; whether the output is unchanged was not tested (verdict untested)."),
    ({"lossless/verdict": "inconclusive"},
     "It ran; whether the output is unchanged is not known (verdict inconclusive)."),
    ({"counts/failed": 2},
     "It works: no change of the output distribution was found (verdict passed). 2 requests failed."),
    ({"status": "interrupted"},
     "It works: no change of the output distribution was found (verdict passed). The run is interrupted."),
])  # fmt: skip
def test_the_first_line_says_whether_it_works(changes, works):
    found = answer(changed(changes))
    assert found.lines[0] == works and verdict_sentence(changed(changes)).startswith(works)
    assert found.lines == [found.works, found.drafter, found.speed, found.next]


@pytest.mark.parametrize(("changes", "drafter"), [
    ({}, f"2.47 tokens {TAU}; 62% of the drafter's tested guesses accepted: alpha 0.62."),
    ({"beam": {"beams": 4}},
     f"2.47 levels {TAU}; 62% of the drafter's tested guesses accepted: alpha 0.62."),
    ({"alpha/mean": None}, f"2.47 tokens {TAU}."),
    ({"counts/drafted": 0}, "Nothing was drafted: both ways decode plainly."),
])  # fmt: skip
def test_the_second_line_says_what_the_drafter_is_worth(changes, drafter):
    assert answer(changed(changes)).drafter == drafter


@pytest.mark.parametrize(("changes", "told"), [
    ({}, "It is faster than plain decoding: 1.36x (1.30 to 1.41); verdict passed."),
    (SLOW | NO_REPLAY, "It is slower than plain decoding: 0.81x (0.74 to 0.87); verdict passed."),
    (UNSTEADY, f"{MACHINE}1.36x (1.30 to 1.41); verdict passed."),
    ({"lossless/verdict": "failed"},
     "The output is wrong, so its speed says nothing: 1.36x (1.30 to 1.41); verdict FAILED."),
    ({"lossless/verdict": "untested"}, "It is faster than plain decoding: 1.36x (1.30 to 1.41); verdict untested."),
])  # fmt: skip
def test_the_last_line_repeats_the_speed_and_the_verdict(changes, told):
    assert closing(changed(changes)) == told


@pytest.mark.parametrize(("overrides", "expected"), [
    (["drafter=llama1b", "drafter.path=Q", "verifier=tree", "gamma=4"], "gamma=4 drafter=ngram target=llama3b"),
    (["drafter=llama1b", "target=mine", "target.path=P"], "target=mine target.path=P drafter=ngram"),
    (["+experiment=x", "drafter_x=1"], "+experiment=x drafter_x=1 drafter=ngram"),
    ([], "drafter=ngram"),
])  # fmt: skip
def test_another_drafter_keeps_the_target_and_the_rest(overrides, expected):
    """The target follows the drafter, and settings of the drafter are not those of another."""
    result = changed(SLOW | NO_REPLAY | {"choices/target": "llama3b", "overrides": overrides})
    assert answer(result).command == f"python -m specbench {expected}"


def test_what_another_program_ran_has_no_command():
    found = answer(changed({"provenance/argv": ["/opt/lib/ipykernel_launcher.py", "-f", "k.json"]}))
    assert found.command == "" and "try gamma 3" in found.next


EXPECTED = "1.44x (1.38 to 1.50) expected"
LOSS = "most of the loss against Theorem 3.8 is verification (x0.79)."
DETAILS = {
    "a better gamma": ({}, f"{EXPECTED} with gamma 3; {LOSS}"),
    "in-sample": (picked([3], 1.44, [1.38, 1.50], True), f"{EXPECTED} (in-sample, so too high) with gamma 3; {LOSS}"),
    "not told apart": (picked([3, 3], 1.44, [1.38, 1.50], over=ALIKE),
                       f"{EXPECTED} with gamma 3, not told apart from gamma 4; {LOSS}"),
    "no better gamma": (picked([4, 4], 1.36, [1.30, 1.40]), f"No other gamma up to 4 is expected to be better; {LOSS}"),
    "hardly better": (picked([3, 3], 1.36, [1.30, 1.40]), f"No other gamma up to 4 is expected to be better; {LOSS}"),
    "no replay": (NO_REPLAY, LOSS.replace("most", "Most")),
    "in-sample of one prompt": ({"speedup/ci95": None} | picked([3], 1.44, None, True), LOSS.replace("most", "Most")),
    "no gamma gains": (SLOW | picked([0, 0], 0.98, [0.95, 1.01]), f"No gamma up to 4 is expected to gain; {LOSS}"),
    "slower by Theorem 3.8, with this gamma": (
        SLOW | NO_REPLAY | THEOREM, "By Theorem 3.8 gamma 4 is too long for alpha 0.62 and c 0.10 (0.90x)."),
    "slower by Theorem 3.8, with a policy": (
        SLOW | NO_REPLAY | THEOREM | POLICY,
        "By Theorem 3.8 the policy's gammas are too long for alpha 0.62 and c 0.10 (0.90x)."),
    "slower by Corollary 3.9": (SLOW | NO_REPLAY | THEOREM | {"alpha/mean": 0.3, "cost/c": 0.31},
                                "Alpha 0.30 is too low for c 0.31 (Theorem 3.8: 0.90x)."),
    "no loss": (NO_REPLAY | {"speedup/measured": 9.0}, ""),
    "a policy is better": (POLICY | picked([3, 3], 1.30, [1.25, 1.35]),
                           f"No constant gamma up to 4 is expected to be better; {LOSS}"),
    "pooled": ({"repeats": {"processes": 5}}, f"{EXPECTED} (first process) with gamma 3; {LOSS}"),
    "failed": ({"lossless/verdict": "failed"}, ""),
    "nothing drafted": ({"counts/drafted": 0}, ""),
    "a peer is faster": (NO_REPLAY | {"speedup_over": {"assisted": {"measured": 0.8, "ci95": [0.7, 0.9]}}},
                         f"{LOSS[:-1].replace('most', 'Most')}; assisted is faster: 0.80x (0.70 to 0.90) of it."),
    "requests arrive": (
        NO_REPLAY | {"latency_by_rate": [
            {"rate": 2.0, "ratio": {"first_token": {"p50": {"factor": 0.7, "ci95": [0.6, 0.8]}}}}]},
        f"{LOSS[:-1].replace('most', 'Most')}; the median first token at 2/s takes 0.70 (0.60 to 0.80) of plain "
        "decoding's time."),
}  # fmt: skip


@pytest.mark.parametrize("name", DETAILS)
def test_the_details_of_each_case(name):
    changes, expected = DETAILS[name]
    assert details(changed(changes)) == expected


def test_every_claim_has_its_interval():
    """Over many made-up results: "use", "try", "slower" and "leave it off" are said if the numbers show it."""
    machines = ({"steady": True}, {"steady": False})
    for measured, width, over, gammas, machine in product(
        (0.7, 0.95, 1.05, 1.4), (0.02, 0.2, None), (None, OVER, ALIKE), ([2, 2], [0, 2], [0, 0], [4, 4]), machines
    ):
        ci95 = None if width is None else [measured - width, measured + width]
        own = picked(gammas, 1.3, [1.2, 1.4], over=over)
        found = answer(changed({"speedup/measured": measured, "speedup/ci95": ci95, "machine": machine} | own))
        known = ci95 is not None and machine["steady"]
        assert "do not use" not in found.next or (known and ci95[1] < 1)
        assert ("Next: keep gamma 4" in found.next) == (known and ci95[0] > 1) == ("it is faster" in found.speed)
        assert ("it is slower than plain decoding" in found.speed) == (known and ci95[1] < 1)
        assert ("try gamma 2" in found.next) == (known and over is OVER and gammas == [2, 2])
        assert ("measure again" in found.speed) == (not machine["steady"])
        assert ("leave it off" in found.speed) == (known and ci95[0] <= 1 and gammas == [0, 0])
        assert "try gamma 0" not in found.next and "gamma=0" not in found.command


@pytest.mark.parametrize(
    ("alpha", "c"), [(0.9, 0.02), (0.56, 0.52), (0.3, 0.29), (0.3, 0.31), (0.02, 0.35), (0.0, 0.01)]
)
def test_alpha_is_too_low_only_where_no_gamma_gains(alpha, c):
    """Theorem 3.8 at every gamma up to 50 against what is said of a gamma that loses."""
    gains = [sum(alpha**i for i in range(gamma + 1)) / (gamma * c + 1) > 1 for gamma in range(1, 51)]
    found = details(changed(SLOW | NO_REPLAY | THEOREM | {"alpha/mean": alpha, "cost/c": c}))
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
    assert f"; {expected}" in details(changed({"speedup/accounting": factors}))
