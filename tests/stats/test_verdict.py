"""The losslessness verdict: exact decoding passes, every planted fault fails, and what was not tested is not passed."""

import dataclasses
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from choosing import only, slow_unless
from decoder_cases import DRAFTERS, TREES, V, make_drafter, spare_of, tabular_model, verifier_of
from law_cases import (
    AcceptEverything,
    ForgetsOrder,
    PublicTraversal,
    ReleasedHSD,
    ResidualFromTarget,
    TooSmallM,
)
from small_runs import call, parts_of, small
from tabular import random_table

import specbench.run.interleave
from specbench.cache.static import StaticCache
from specbench.data.prompts import Request
from specbench.decoding.noise import PROPOSAL, sibling_bits
from specbench.decoding.rows import window
from specbench.decoding.sampling import Sampling, draw
from specbench.decoding.sequence import Sequence, StopStrings
from specbench.decoding.speculative import decode_speculative
from specbench.decoding.state import State
from specbench.decoding.timer import Clock
from specbench.decoding.verify import block_verification, dense, speculative_sampling
from specbench.decoding.verify_tree import match
from specbench.drafters.model import ModelDrafter
from specbench.models.language_model import LanguageModel
from specbench.policies.fixed import FixedGamma
from specbench.results.wording import alpha_text, verdict_text
from specbench.run.recorder import Recorder
from specbench.run.reference_scores import ends_where_it_should, read
from specbench.run.run import run
from specbench.run.strict_verdict import is_good, of_several
from specbench.stats.estimates import AlphaOwn
from specbench.stats.losslessness import decoder_tv, judge
from specbench.stats.records import DecodedRequest, Group, Result, RunRecord
from specbench.stats.reference_distribution import largest_tv, law, tie, tolerance
from specbench.stats.test_statistics import ALTERNATIVES, no_sums, of_events, of_tokens, p_value_of_sums
from specbench.stats.verdict_records import ReferenceScore
from specbench.verifiers.block import BlockVerifier
from specbench.verifiers.iterative import IterativeVerifier
from specbench.verifiers.match import MatchVerifier
from specbench.verifiers.rejection import RejectionVerifier
from specbench.verifiers.speculative import SpeculativeVerifier
from specbench.verifiers.traversal import TraversalVerifier

GAMMA, SAMPLED = 4, Sampling()


class HiddenLenience(SpeculativeVerifier):
    """Says that it is exact, and accepts with lenience .9."""

    def accept(self, p, draft, noise):
        return speculative_sampling(p, draft, noise.r, noise.bits, 0.9)


def texts(tables, number_text, kind="model", verifier=SpeculativeVerifier, rows=300, tokens=40, seed=0, model=None,
          sampling=SAMPLED):  # fmt: skip
    """A tabular pair's texts, each read again by the stock module."""
    target = tabular_model(tables.target, sampling)
    helper = tabular_model(tables.similar if model is None else model, sampling)
    drafter = make_drafter(kind, target, number_text, helper)
    judged_by = verifier_of(verifier, sampling)
    prompts = [[3, 7, 1, row % V] for row in range(rows)]
    jobs = [Sequence(prompt, 4 + tokens, (seed << 32) + key) for key, prompt in enumerate(prompts)]
    state = State.start(jobs, [], spare_of(kind, GAMMA), target.device)
    target.allocate(rows, state.tokens.shape[1])
    target.prefill(state)
    recorder = Recorder(judged_by, {}, evidence=True)
    decode_speculative(state, target, drafter, FixedGamma(GAMMA), judged_by, Clock(), recorder)
    results = []
    for prompt, new, found in zip(prompts, state.generated, recorder.evidence(rows), strict=True):
        reading = read(target, prompt, new, found)
        results.append(Result(Request("", "", "", prompt, ""), tokens, decoded(new), decoded(new), reading=reading))
    return results


def decoded(tokens):
    return DecodedRequest(tokens, [])


def record_of(results):
    return RunRecord(groups=[Group(results, None, None)])


def sampled(results):
    return judge(record_of(results), expected=True, greedy=False)


@pytest.mark.parametrize("kind", only(("model", "under_ngram"), DRAFTERS))
def test_exact_decoding_passes(kind, tables, number_text):
    verifier = IterativeVerifier if kind in TREES else SpeculativeVerifier
    results = texts(tables, number_text, kind, verifier, rows=60)
    found = sampled(results)
    assert found.verdict == "passed" and found.passed, found
    assert found.reread.tokens == found.detail["tokens"] == 60 * 40 and found.decoder_tv.positions == 60 * 40
    assert found.detectable.by_kind["tested"] < 0.2 and found.detectable.lenience is not None
    assert no_part_fails(results)


def no_part_fails(results):
    """Whether all runs of five of the texts, each text with noise of its own, do not fail: of the 160 such
    runs in the default tests one would be expected to fail if the bounds were tight."""
    parts = [results[begin : begin + 5] for begin in range(0, len(results), 5)]
    return all(sampled(part).verdict != "failed" for part in parts)


@pytest.mark.parametrize(("verifier", "sampling"), [
    slow_unless(verifier is BlockVerifier and sampling == SAMPLED, verifier, sampling)
    for verifier in (BlockVerifier, RejectionVerifier, MatchVerifier, IterativeVerifier)
    for sampling in (SAMPLED, Sampling(0.8, top_k=5))
])  # fmt: skip
def test_every_exact_verifier_passes(verifier, sampling, tables, number_text):
    results = texts(tables, number_text, verifier=verifier, rows=100, sampling=sampling)
    assert sampled(results).verdict == "passed", sampled(results)
    assert no_part_fails(results)


@pytest.mark.slow  # test_every_exact_verifier_passes has chains, test_exact_decoding_passes trees
@pytest.mark.parametrize("table", ["similar", "adversarial"])
def test_traversal_of_trees_passes(table, tables, number_text):
    results = texts(tables, number_text, "tree_distinct", TraversalVerifier, rows=100, model=getattr(tables, table))
    assert sampled(results).verdict == "passed", sampled(results)
    assert no_part_fails(results)


class EagerBlock(BlockVerifier):
    """Accepts blocks too often."""

    def accept(self, p, draft, noise):
        return block_verification(p, draft, 0.8 * noise.r, noise.bits)


class OneOfTwo(MatchVerifier):
    """Takes the draw from p that matches more of the draft, out of two."""

    def accept(self, p, draft, noise):
        one, two = (match(p, draft, bits) for bits in (noise.bits, sibling_bits(noise.bits, torch.tensor(1))))
        more = (two.accepted > one.accepted)[:, None]
        path = torch.where(more, two.path, one.path)
        tokens, accepted = torch.where(more, two.tokens, one.tokens), torch.maximum(one.accepted, two.accepted)
        return dataclasses.replace(one, tokens=tokens, accepted=accepted, path=path)


BIASED = {  # drafter, verifier, the drafter's table, texts
    "block": ("model", EagerBlock, "similar", 120),
    "match": ("model", OneOfTwo, "similar", 30),
    "match in trees": ("tree_distinct", OneOfTwo, "similar", 60),
    "trees": ("tree_distinct", ForgetsOrder, "adversarial", 120),
    "rejection": ("model", TooSmallM, "similar", 30),
    "traversal": ("tree_distinct", PublicTraversal, "adversarial", 90),
    "HSD": ("model", ReleasedHSD, "similar", 300),
    "hierarchical": ("under_model", HiddenLenience, "similar", 60),
}


@pytest.mark.parametrize("name", only(("match", "rejection"), BIASED))
def test_every_kind_of_verifier_can_fail(name, tables, number_text):
    kind, verifier, model, rows = BIASED[name]
    found = sampled(texts(tables, number_text, kind, verifier, rows=rows, model=getattr(tables, model)))
    assert found.verdict == "failed", found


def test_a_bias_under_top_k_fails(tables, number_text):
    results = texts(tables, number_text, verifier=HiddenLenience, rows=60, sampling=Sampling(0.8, top_k=5))
    assert sampled(results).verdict == "failed"


@pytest.mark.parametrize(("kind", "verifier"), [
    slow_unless((kind, verifier) == ("model", AcceptEverything), kind, verifier)
    for kind in ("model", "bigram", "ngram") for verifier in (AcceptEverything, ResidualFromTarget)
])  # fmt: skip
def test_a_biased_verifier_fails(kind, verifier, tables, number_text):
    assert sampled(texts(tables, number_text, kind, verifier, rows=40)).verdict == "failed"


def test_runs_that_would_not_find_a_verifier_that_accepts_everything_do_not_pass(tables, number_text):
    """Texts of 40 tokens with a drafter near the target; alike, their bonus tokens alone would find less than a total
    variation of .5."""
    near = tables.target + random_table(V, seed=3, spread=0.25)
    found = [sampled([one]) for one in texts(tables, number_text, verifier=AcceptEverything, rows=6, model=near)]
    assert not any(own.passed for own in found) and min(own.detectable.by_kind["tested"] for own in found) < 0.5
    assert any("accepts every guess would not have been found" in own.reason for own in found)


@pytest.mark.slow
def test_hidden_lenience_fails_at_3000_tokens(tables, number_text):
    """Runs of 75 texts of 40 tokens: each is 3,000 tokens."""
    runs = 4
    hidden = texts(tables, number_text, verifier=HiddenLenience, rows=75 * runs)
    assert [sampled(hidden[i::runs]).verdict for i in range(runs)].count("failed") >= runs - 1


class Redraws(SpeculativeVerifier):
    """Draws the bonus token, or the recovered one, from another law: a function of p and q, where q is that of the last
    guess for a bonus token."""

    bonus, law = True, None

    def accept(self, p, draft, noise):
        found, rows = super().accept(p, draft, noise), torch.arange(len(p))
        n, kind = found.accepted, type(self)
        if not draft.tokens.shape[1]:
            return found
        last = (n - int(kind.bonus)).clamp(min=0, max=draft.tokens.shape[1] - 1)
        t = draw(kind.law(p[rows, n], dense(draft, V)[rows, last]), noise.bits[rows, n])
        tokens = found.tokens.clone()
        tokens[rows, n] = torch.where((n == draft.count) == kind.bonus, t, tokens[rows, n])
        return dataclasses.replace(found, tokens=tokens)


class Changed(SpeculativeVerifier):
    """Judges with other random numbers."""

    def accept(self, p, draft, noise):
        return speculative_sampling(p, draft, *type(self).numbers(p, draft, noise))


def lenient_last(p, draft, noise):
    r = noise.r.clone()
    r[:, GAMMA - 1 :] *= 0.5
    return r, noise.bits


def surely_accepted(p, draft, noise):
    ratio = p[:, :-1].gather(-1, draft.tokens[..., None]) / dense(draft, V).gather(-1, draft.tokens[..., None])
    return torch.where(ratio[..., 0] > 0.6, 0.0, noise.r), noise.bits


def noise_of_the_guess(p, draft, noise):
    return noise.r, window(noise.table[PROPOSAL], noise.length, len(noise.levels) + 1)


def one_number(p, draft, noise):
    return noise.r[:, :1].expand_as(noise.r), noise.bits


def rest(p, q):
    return (p - q).clamp(min=0)


IDS = torch.arange(V)
PLANTED = {
    "bonus token is the likeliest": (Redraws, {"law": lambda p, q: (p == p.amax(-1, keepdim=True)).float()}),
    "bonus token at another temperature": (Redraws, {"law": lambda p, q: p**1.5}),
    "bonus token without the last q": (Redraws, {"law": lambda p, q: rest(p, q) + 1e-9}),
    "bonus token with an even id": (Redraws, {"law": lambda p, q: p * (IDS % 2 == 0)}),
    "recovered token at another temperature": (Redraws, {"bonus": False, "law": lambda p, q: rest(p, q) ** 1.3}),
    "recovered token without some ids":
        (Redraws, {"bonus": False, "law": lambda p, q: rest(p, q) * (IDS % 8 != 3) + 1e-9 * p}),
    "lenience at guess 4": (Changed, {"numbers": lenient_last}),
    "guesses accepted surely": (Changed, {"numbers": surely_accepted}),
    "one random number": (Changed, {"numbers": one_number}),
    "noise of the guess": (Changed, {"numbers": noise_of_the_guess}),
}  # fmt: skip


@pytest.mark.parametrize("name", only(["one random number"], PLANTED))
def test_every_kind_of_draw_can_fail(name, tables, number_text):
    """The control draws with the same code what it should."""
    base, changes = PLANTED[name]
    faulty = type("Faulty", (base,), {k: v if isinstance(v, bool) else staticmethod(v) for k, v in changes.items()})
    rows = {"recovered token at another temperature": 150, "noise of the guess": 100}.get(name, 50)
    results = texts(tables, number_text, verifier=faulty, rows=rows)
    found = sampled(results)
    assert found.verdict == "failed" and found.alpha_own.passed is None, found


@pytest.mark.slow  # test_exact_decoding_passes
def test_the_control_of_planted_draws_passes(tables, number_text):
    sound = type("Sound", (Redraws,), {"law": staticmethod(lambda p, q: p)})
    assert sampled(texts(tables, number_text, verifier=sound, rows=50)).verdict == "passed"


@pytest.mark.parametrize("temperature", [0.8, pytest.param(1.25, marks=pytest.mark.slow)])
def test_guesses_from_another_q_fail(temperature, tables, number_text, monkeypatch):
    guess = ModelDrafter.guess

    def other(self, logits, bits, *more):
        _, q, signal = guess(self, logits, bits, *more)
        return draw(q ** (1 / temperature), bits), q, signal

    monkeypatch.setattr(ModelDrafter, "guess", other)
    assert sampled(texts(tables, number_text, rows=40)).verdict == "failed"


@pytest.mark.slow  # test_exact_decoding_passes looks at parts of its texts too
def test_exact_runs_fail_as_rarely_as_promised():
    """The weighted mean of the products is 1, so that one run in 200 fails at most; a law that is wrong fails."""
    generator = torch.Generator().manual_seed(9)
    law = torch.randn(60, V, generator=generator).mul(1.5).softmax(-1).double()
    mean = torch.rand(60, 1, generator=generator).double()
    more = torch.arange(60) % 4 + 1, torch.ones(60).double()

    def failed(other, runs):
        count = 0
        for _ in range(runs):
            drawn = other.multinomial(1, generator=generator)[:, 0]
            stands = torch.rand(60, 1, generator=generator) < mean
            sums = of_tokens("recovered", law, drawn) + of_tokens("untested", law, drawn)
            count += p_value_of_sums(sums + of_events("stands", mean, stands, *more))[0] < 1 / 200
        return count

    assert failed(law, 300) <= 3
    assert failed((law**3), 20) == 20
    assert p_value_of_sums(no_sums())[0] == pytest.approx(1) and len({one.kind for one in ALTERNATIVES}) == 11


@pytest.mark.parametrize("kind", only(["model"], ["model", "ngram"]))
def test_numbers_that_are_not_finite_fail(kind, tables, number_text):
    broken = tables.target.clone()
    broken[3, :] = float("nan")
    spoilt = SimpleNamespace(target=broken, similar=tables.similar)
    found = sampled(texts(spoilt, number_text, kind, rows=20))
    assert found.verdict == "failed" and found.passed is False
    written = dataclasses.asdict(found) | {"statistic": None}  # as results.json has what is not finite
    told, style = verdict_text(written)
    assert told.startswith("FAILED: a probability of the target or the drafter is not finite") and "red" in style
    told = [verdict_text(written | {"statistic": 2.0, "passed": passed})[0] for passed in (False, True)]
    assert ["p-value" in each for each in told] == [False, True]  # a fault's number is a count


def test_a_table_without_chance_is_inconclusive(tables, number_text):
    certain = tables.target * 1e3
    spoilt = SimpleNamespace(target=certain, similar=tables.similar)
    assert sampled(texts(spoilt, number_text, rows=20)).verdict == "inconclusive"
    assert sampled(texts(tables, number_text, rows=1, tokens=5)).verdict == "inconclusive"
    assert sampled([]).verdict == "untested" and sampled([]).passed is None


@pytest.mark.slow
def test_the_detectable_lenience_is_detected_in_nine_of_ten_runs(tables, number_text, monkeypatch):
    exact = texts(tables, number_text, rows=100)
    promised = sampled(exact).detectable.lenience
    monkeypatch.setattr(
        HiddenLenience, "accept", lambda self, p, d, n: speculative_sampling(p, d, n.r, n.bits, promised)
    )
    hidden = texts(tables, number_text, verifier=HiddenLenience, rows=1200)
    assert [sampled(hidden[i::12]).verdict for i in range(12)].count("failed") >= 9


def greedy(prompt, ours, plain, target) -> object:
    target.allocate(1, 16)
    reading = read(target, prompt, ours, None, plain)
    reading.tested = 1
    results = [Result(Request("r", "r", "", prompt, ""), 9, decoded(ours), decoded(plain), reading=reading)]
    return judge(record_of(results), expected=True, greedy=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_temperature_0_only_a_tie_is_forgiven(dtype, tables):
    """The gap is within rounding of the dtype, or ten times beyond it."""
    for roundings, passes in ((0.5, True), (10.0, False)):
        table = tables.target.clone()
        best, second = table[2, 3].topk(2).indices
        steps = 64 if dtype == torch.float32 else 4
        gap = roundings * steps * torch.finfo(dtype).eps * float(table[2, 3].abs().max())
        table[2, 3, second] = table[2, 3, best] - gap
        target = tabular_model(table, Sampling(temperature=0))
        target.dtype = dtype
        for ours, plain in ((second, best), (best, second)):
            found = greedy([1, 2], [3, int(ours)], [3, int(plain)], target)
            first = int(table[1, 2].argmax())
            wrong = 0 if first == 3 else 1  # the token 3 itself may not be the target's
            assert found.detail["divergences"][0]["kind"] == ("tie" if passes else "bug")
            assert (found.detail["wrong"] - wrong > 0) == (not passes and ours is second)
            assert found.detail["divergences"][0]["position"] == 1


def test_a_tie_of_16_bits_is_counted_in_steps_of_the_best_logit():
    """Its distance to the next number of the dtype, whatever sign and size the others have."""
    for best, others, expected in ((17.0, 1.0, 4 * 0.125), (-17.0, 17.5, 4 * 0.125), (1.5, 60.0, 0.25)):
        x = torch.tensor([best, others], dtype=torch.bfloat16)
        step, largest = x.abs().nextafter(torch.full_like(x, torch.inf)).float() - x.abs().float()
        logits = torch.tensor([[best, -others]])
        assert float(tie(logits, torch.bfloat16, Sampling(temperature=0))) == expected == max(4 * step, largest)
    assert tie(logits, torch.float32, Sampling(temperature=0)) == tolerance(logits, torch.float32, Sampling())
    assert tie(logits, torch.bfloat16, Sampling(temperature=0, repetition_penalty=2.0)) == 0.5


def test_ties_are_told_with_the_largest(tables):
    table = tables.target.clone()
    best, second = table[2, 3].topk(2).indices
    table[1, 2, 3] = 99.0
    table[2, 3, second] = table[2, 3, best] - 0.01
    target = tabular_model(table, Sampling(temperature=0))
    target.dtype = torch.bfloat16
    found = greedy([1, 2], [3, int(best)], [3, int(second)], target)
    assert found.verdict == "passed" and found.detail["largest_tie"] == pytest.approx(0.01, abs=1e-6)
    assert "1 text parted at ties of at most 0.01 in logits" in verdict_text(dataclasses.asdict(found))[0]


def test_distances_of_p_are_kept_in_shares_of_their_limits():
    readings = [ReferenceScore(5, tv=np.array([0.0, 0.1, 0.2, 0.3]), rounding=np.array([0.0, 1.0, 1.0, 0.5]))]
    found = decoder_tv(readings)
    assert found.quantiles == pytest.approx({"0.5": 0.2, "0.9": 0.6, "0.99": 0.6, "1": 0.6})
    readings[0].rounding[3] = 0.0
    assert decoder_tv(readings).quantiles["1"] == np.inf  # beyond a limit of 0
    for mean_limit, told in (
        (0.1, "q on average 0.2 from its own, limit 0.1"),
        (0.3, "q within 0.3 of its own, limit 0.4"),
    ):
        own = AlphaOwn(False, "x", 0.2, 0.3, 0.4, 9, mean_limit)
        assert alpha_text(dataclasses.asdict(own)) == f"ALPHA IS NOT THE DRAFTER'S OWN: x ({told})"


def test_at_temperature_0_what_is_no_tie_is_a_bug(tables):
    """Plain decoding's token must be as good as ours; a text that has only ended earlier is no tie; logits that are all
    minus infinity are no numbers."""
    table = tables.target.clone()
    best, second = table[2, 3].topk(2).indices
    table[2, 3, second] = table[2, 3, best]
    table[1, 2, 3] = 99.0
    target = tabular_model(table, Sampling(temperature=0))
    worst = int(table[2, 3].argmin())
    assert greedy([1, 2], [3, int(best)], [3, int(second)], target).verdict == "passed"
    assert greedy([1, 2], [3, int(best)], [3, worst], target).verdict == "failed"
    assert greedy([1, 2], [3, int(best)], [3], target).verdict == "failed"
    table[2, 3] = -torch.inf
    assert greedy([1, 2], [3, 0], [3, 0], tabular_model(table, Sampling(temperature=0))).verdict == "failed"


SAMPLINGS = [Sampling(), Sampling(0.7), Sampling(1.3, top_k=5), Sampling(top_p=0.8), Sampling(0.5, top_k=9, top_p=0.9)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_the_second_standardization_is_the_first(sampling):
    """Two programs for section 2.2; a wrong one is seen."""
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(3)) * 3
    decoder, nowhere = torch.zeros_like(logits), torch.zeros(50, dtype=torch.bool)
    p = law(logits, decoder, nowhere, torch.float32, sampling)
    assert torch.allclose(p, sampling.probabilities(logits).double(), atol=1e-6)
    other = Sampling(sampling.temperature * 1.1, sampling.top_k, sampling.top_p)
    assert not torch.allclose(p, other.probabilities(logits).double(), atol=1e-3)


@pytest.mark.parametrize("sampling", [*SAMPLINGS, Sampling(top_k=1), Sampling(top_p=0.3), Sampling(0.5, top_p=0.5)],
                         ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_rounding_moves_across_an_edge_is_explained(sampling, dtype):
    """The decoder's logits differ by one rounding of each; at many positions another token passes top-k or top-p. A
    decoder that has forgotten top-k or top-p is not explained."""
    logits = torch.randn(400, 40, generator=torch.Generator().manual_seed(4)) * 3
    eps, kept = torch.finfo(dtype).eps, torch.ones(400, dtype=torch.bool)
    noise = (torch.rand(logits.shape, generator=torch.Generator().manual_seed(5)) - 0.5) * eps * 3
    limit = largest_tv(logits, dtype, sampling)
    decoder = sampling.probabilities(logits + noise)
    tv = (law(logits, decoder, kept, dtype, sampling) - decoder.double()).abs().sum(-1) / 2
    assert (tv <= limit).all()
    if sampling.top_k or sampling.top_p < 1:
        forgetful = replace(sampling, top_k=0, top_p=1.0).probabilities(logits + noise)
        tv = (law(logits, forgetful, kept, dtype, sampling) - forgetful.double()).abs().sum(-1) / 2
        assert tv.mean() > 0.25 * limit.mean() or (tv > limit).any()


# Faults planted in whole runs of the shipped pair.


def shifted_positions(monkeypatch, parts):
    """Positions from 40 on are three too large."""
    module = parts.target.module
    forward = module.forward

    def shifted(**options):
        places = options.get("position_ids")
        if places is not None:
            options["position_ids"] = places + 3 * (places > 40)
        return forward(**options)

    monkeypatch.setattr(module, "forward", shifted)


def stale_cache(monkeypatch, parts):
    """What follows a rejected guess is written one column too far: the guess stays in the cache."""
    place = StaticCache.place

    def late(self, slots, *others, **named):
        place(self, slots + (slots[:, :1] % 7 == 3).long(), *others, **named)

    monkeypatch.setattr(StaticCache, "place", late)


def wrong_mask(monkeypatch, parts):
    """Every token sees the guesses after it too."""
    mask = parts.target.mask
    monkeypatch.setattr(parts.target, "mask", lambda *arguments: torch.zeros_like(mask(*arguments)))


def forgotten_penalty(monkeypatch, parts):
    monkeypatch.setattr(LanguageModel, "_seen", lambda self, *arguments: None)


def wrong_temperature(monkeypatch, parts):
    probabilities = Sampling.probabilities

    def warmer(self, logits, seen=None):
        return probabilities(self, logits if self.greedy else logits / 1.02, seen)

    monkeypatch.setattr(Sampling, "probabilities", warmer)


def sixteen_bits(monkeypatch, parts):
    probabilities = Sampling.probabilities
    monkeypatch.setattr(Sampling, "probabilities", lambda *a: probabilities(*a).to(torch.float16).float())


def not_causal(monkeypatch, parts):
    """Every layer of the module looks both ways, as an encoder does: in one forward, later tokens are seen."""
    module = parts.target.stock_module()
    parts.drafter.models[0].stock_module()  # loaded again, and checked, before the fault is there
    forward = type(module).forward

    def both_ways(self, *arguments, **options):
        if options.get("attention_mask") is None:
            n = options["input_ids"].shape[1]
            options["attention_mask"] = torch.zeros(1, 1, n, n)
        return forward(self, *arguments, **options)

    monkeypatch.setattr(type(module), "forward", both_ways)


def impossible_token(monkeypatch, parts):
    """One token of each text is the one with the smallest p."""
    accept = SpeculativeVerifier.accept

    def once(self, p, draft, noise):
        found = accept(self, p, draft, noise)
        worst = p[:, 0].argmin(-1)
        tokens = found.tokens.clone()
        tokens[:, 0] = torch.where(found.accepted == 0, worst, tokens[:, 0])
        return dataclasses.replace(found, tokens=tokens)

    monkeypatch.setattr(SpeculativeVerifier, "accept", once)


def not_a_number(monkeypatch, parts):
    probabilities = Sampling.probabilities
    monkeypatch.setattr(Sampling, "probabilities", lambda *a: probabilities(*a) * float("nan"))


def forgotten_top_p(monkeypatch, parts):
    monkeypatch.setattr(Sampling, "truncate", lambda self, logits: logits)


def stops_overlooked(monkeypatch, parts):
    """Speculative decoding goes on after a stop string inside a round."""
    find, calls = StopStrings.find, []

    def only_last(self, generated, new):
        calls.append(1)
        return find(self, generated, new[-1:]) if len(new) == 1 else None

    monkeypatch.setattr(StopStrings, "find", only_last)


FAULTS = {
    forgotten_top_p: ["top_p=.8"],
    stops_overlooked: ["stop=['(','e','s']"],
    shifted_positions: [],
    stale_cache: [],
    wrong_mask: [],
    forgotten_penalty: ["repetition_penalty=1.3"],
    wrong_temperature: [],
    sixteen_bits: [],
    not_causal: [],
    impossible_token: ["top_k=20", "target.path=shipped:target"],  # which rejects some guesses
    not_a_number: [],
}


@pytest.mark.parametrize("fault", only((stale_cache, not_causal), FAULTS), ids=lambda fault: fault.__name__)
def test_a_planted_fault_fails(fault, tmp_path, monkeypatch):
    parts = parts_of("max_new_tokens=24", "gamma=3", *FAULTS[fault])
    fault(monkeypatch, parts)
    found = run(parts, tmp_path)[0].lossless
    assert found.verdict == "failed" and found.passed is False, found


@pytest.mark.slow  # test_a_planted_fault_fails is that in 32 bits
@pytest.mark.parametrize("fault", [stale_cache, forgotten_top_p, wrong_mask, forgotten_penalty, not_a_number])
def test_a_planted_fault_fails_in_16_bits(fault, tmp_path, monkeypatch):
    parts = parts_of("max_new_tokens=24", "gamma=3", "dtype=bfloat16", *FAULTS[fault])
    fault(monkeypatch, parts)
    assert run(parts, tmp_path)[0].lossless.verdict == "failed"


@pytest.mark.slow  # test_at_temperature_0_the_logits_of_decoding_are_compared has one
@pytest.mark.parametrize("fault", [stale_cache, wrong_mask, not_causal, forgotten_penalty])
def test_a_planted_fault_fails_at_temperature_0(fault, tmp_path, monkeypatch):
    """Plain decoding makes the same error, so that the texts of both may be equal."""
    parts = parts_of("max_new_tokens=24", "gamma=3", "temperature=0", *FAULTS[fault])
    fault(monkeypatch, parts)
    found = run(parts, tmp_path)[0].lossless
    assert found.verdict == "failed" and found.detail["wrong"] > 0, found


@pytest.mark.parametrize("options", [
    ["top_k=20", "top_p=.9", "repetition_penalty=1.3"],
    *(slow_unless(False, more)
      for more in (["temperature=0"], ["drafter=tree", "cache=paged"], ["temperature=0", "repetition_penalty=1.3"],
                   ["executor=eager", "batch_size=2"], ["dtype=bfloat16", "top_p=.7"],
                   ["stop=['(','self']", "seed=3"])),
], ids=str)  # fmt: skip
def test_a_run_without_a_fault_passes(options, tmp_path):
    found = run(parts_of("max_new_tokens=96", *options), tmp_path)[0].lossless
    assert found.verdict == ("inconclusive" if "seed=3" in options else "passed"), found  # it stops after 22 tokens
    assert found.alpha_own.passed and found.reread.texts == 2 and found.reread.seconds > 0
    assert found.decoder_tv.positions == found.reread.tokens  # the logits of every kept token, at temperature 0 too


@pytest.mark.parametrize("where", only(["verification"], ["all calls", "verification"]))
def test_at_temperature_0_the_logits_of_decoding_are_compared(where, tmp_path, monkeypatch):
    """Logits that are .2 % too large, in all calls or only in those on a draft, change no token."""
    parts = parts_of("max_new_tokens=24", "temperature=0", "repetition_penalty=1.1")
    forward = parts.target.forward

    def wrong(tokens, *more, row=None, **options):
        fault = where == "all calls" or (row is None and tokens.shape[1] > 1)
        return (1.002 if fault else 1) * forward(tokens, *more, row=row, **options)

    monkeypatch.setattr(parts.target, "forward", wrong)
    found = run(parts, tmp_path)[0].lossless
    assert found.verdict == "failed" and found.detail["wrong"] == 0 and not found.decoder_tv.within, found


WRONG = {  # what a drafter's logits become in decoding steps alone
    "temperature=1": lambda logits: 0.6 * logits,
    "temperature=0": lambda logits: logits.roll(1, -1),
}


@pytest.mark.parametrize(("fault", "temperature"), [
    slow_unless(fault != (temperature == "temperature=0"), fault, temperature)
    for fault in (True, False) for temperature in WRONG
])  # fmt: skip
def test_a_drafter_that_is_wrong_in_decoding_is_told(fault, temperature, tmp_path, monkeypatch):
    guess = ModelDrafter.guess
    if fault:
        wrong = WRONG[temperature]
        monkeypatch.setattr(ModelDrafter, "guess", lambda self, logits, *more: guess(self, wrong(logits), *more))
    found = run(parts_of("max_new_tokens=96", temperature), tmp_path)[0].lossless
    assert found.verdict == "passed" and found.alpha_own.passed is not fault and found.alpha_own.positions > 10
    told, style = verdict_text(dataclasses.asdict(found))
    assert ("ALPHA IS NOT THE DRAFTER'S OWN" in told) == fault == ("red" in style)
    assert ("alpha is the drafter's own" in told) != fault
    assert is_good(dataclasses.asdict(found)) != fault


@pytest.mark.slow  # test_a_drafter_that_is_wrong_in_decoding_is_told has one that is
@pytest.mark.parametrize(("options", "passed"), [
    (["drafter=bigram"], True), (["drafter=ngram"], True), (["drafter=tree"], True),
    (["drafter=tree", "drafter.children=best"], None), (["drafter=early_exit"], None),
], ids=str)  # fmt: skip
def test_which_drafters_are_read_again(options, passed, tmp_path):
    found = run(parts_of("max_new_tokens=24", *options), tmp_path)[0].lossless.alpha_own
    assert found.passed is passed, found


def test_a_small_p_value_among_several_runs_passes():
    failed = {"verdict": "failed", "detail": {"by_chance": 0.002}, "threshold": 0.005, "alpha_own": {"passed": None},
              "method": "martingale", "statistic": 0.002}  # fmt: skip
    assert [of_several(failed, runs)["verdict"] for runs in (1, 2, 3)] == ["failed", "failed", "passed"]
    assert of_several(failed | {"detail": {}}, 9)["verdict"] == "failed"


@pytest.mark.slow  # test_a_table_without_chance_is_inconclusive has no texts
def test_nothing_tested_is_not_passed(tmp_path):
    for temperature in (0, 1):
        found = run(parts_of("gamma=0", "max_new_tokens=4", f"temperature={temperature}"), tmp_path)[0].lossless
        assert found.verdict == "untested" and found.passed is None and "no guess was tested" in found.reason


def test_an_error_while_reading_is_not_passed(tmp_path, monkeypatch):
    def fails_once(*arguments, calls=[]):  # noqa: B006
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("out of memory")
        return read(*arguments)

    monkeypatch.setattr(specbench.run.interleave, "read", fails_once)
    found = run(parts_of("temperature=0", "max_new_tokens=4"), tmp_path)[0].lossless
    assert found.verdict == "inconclusive" and "out of memory" in found.reason and found.reread.texts == 1
    assert (
        f"; {found.reread.tokens} of {found.detail['of_tokens']} tokens were read again; "
        in verdict_text(dataclasses.asdict(found))[0]
    )


def test_where_texts_end():
    def decode(tokens, **options):
        return "".join(map(chr, tokens))

    def ends(text, limit=4):
        return ends_where_it_should([ord(c) for c in text], limit, [ord("#")], ["ab"], decode)

    assert [ends(t) for t in ("xyzz", "xab", "x#", "abab", "xyab")] == [True, True, True, False, True]
    assert [ends(t) for t in ("xy", "x#y", "xabz", "#", "xyzzy")] == [False, False, False, True, False]


@pytest.mark.slow
def test_what_is_read_again_is_limited(tmp_path):
    found = run(parts_of("data.limit=4", "gamma=1", "verdict_tokens=60"), tmp_path)[0].lossless
    assert 1 <= found.reread.texts < 4
    for temperature in (0, 1):
        found = run(parts_of("verdict_tokens=0", "gamma=1", f"temperature={temperature}"), tmp_path)[0].lossless
        assert found.verdict == "untested" and found.passed is None and "verdict_tokens=0" in found.reason


@pytest.mark.slow  # tests/run/test_repeats.py has strict=true and a verdict that failed
def test_strict_sets_the_exit_code(tmp_path, monkeypatch, capsys):
    options = small("logger=none", "strict=true", "gamma=1", "max_new_tokens=4")
    assert call([*options, f"hydra.run.dir={tmp_path}/good", "temperature=0"], monkeypatch, tmp_path) == 0
    assert call([*options, f"hydra.run.dir={tmp_path}/bad", "verdict_tokens=0"], monkeypatch, tmp_path) == 3
    assert "the verdict is untested" in " ".join(capsys.readouterr().err.split())
    assert json.loads((tmp_path / "bad" / "results.json").read_text())["lossless"]["verdict"] == "untested"
