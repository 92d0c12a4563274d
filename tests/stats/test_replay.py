"""Betas along a text, replay of a run, and the accounting that explains it."""

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
from choosing import only
from decoder_cases import CACHES, V, make_drafter, tabular_model
from small_runs import finished as finished

from specbench.contrib.replay.trace import load_trace
from specbench.decoding.draft import Draft
from specbench.decoding.sampling import Sampling
from specbench.decoding.verify import output_law, speculative_sampling
from specbench.policies.gamma.fixed import FixedGamma
from specbench.policies.gamma.heuristic import HeuristicGamma
from specbench.stats.position_stats import DecodedText, read_texts
from specbench.stats.replay import replay, sweep, trace_of

BATCH, GREEDY = ("gamma=2", "batch_size=2"), ("gamma=3", "temperature=0")


@pytest.mark.parametrize("overrides", only([BATCH], [("gamma=3",), GREEDY, BATCH]))
def test_replay_of_the_traced_policy_reproduces_the_trace(overrides, finished):
    result, record, folder = finished(*overrides)
    for trace in (load_trace(folder), trace_of(record.results, result.cost.by_gamma, result.speedup.measured)):
        gamma = result.gamma
        again = replay(trace, FixedGamma(gamma), draws=1)
        assert (again.rounds, again.tokens, again.drafted) == (
            result.counts.rounds, result.counts.tokens, result.counts.drafted)  # fmt: skip
        other = replay(trace, FixedGamma(gamma - 1), draws=1)
        assert other.rounds > again.rounds and other.drafted < again.drafted


@pytest.mark.slow
def test_replay_of_a_policy_that_learns_reproduces_its_trace(finished):
    result, _, folder = finished("gamma_policy=heuristic", "gamma=2", "gamma_policy.largest=5", "temperature=0")
    trace = load_trace(folder)
    again = replay(trace, HeuristicGamma(2, 5), draws=1)
    assert (again.rounds, again.drafted) == (result.counts.rounds, result.counts.drafted)


@pytest.mark.parametrize("overrides", only([BATCH, GREEDY], [
    GREEDY, BATCH, ("gamma=3",), ("drafter=ngram", "temperature=0"), ("gamma_policy=adaptive",)
]))  # fmt: skip
def test_the_factors_are_what_the_files_say(overrides, finished):
    """Each factor once more from the files of the run, with the formulas of the page on metrics."""
    result, _, folder = finished(*overrides)
    factors = {name: factor.factor for name, factor in result.speedup.accounting.items()}
    rounds = pyarrow.parquet.read_table(folder / "rounds.parquet").to_pandas()
    prompts = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    names = ("tokens", "baseline_tokens", "baseline_decode_seconds", "decode_seconds")
    tokens, plain_tokens, plain_seconds, seconds = (sum(prompt[name] for prompt in prompts) for name in names)
    measured = (plain_seconds / plain_tokens) / (seconds / tokens)
    assert math.prod(factors.values()) == pytest.approx(measured, rel=1e-6)
    assert result.speedup.measured == pytest.approx(measured, rel=1e-6)

    def expected(alpha, gamma):  # equation 1 as a sum
        return sum(alpha**i for i in range(gamma + 1))

    betas = np.concatenate(rounds.beta.tolist())
    alpha, gamma, step = betas.mean(), result.gamma or rounds.gamma.mean(), result.cost.target_step_seconds
    calls = (1 / rounds.rows).sum()
    spent = {lap: (rounds[f"{lap}_seconds"] / rounds.rows).sum() / calls / step
             for lap in ("draft", "verify", "accept", "host")}  # fmt: skip
    drafting, verify, rest = spent["draft"], spent["verify"], spent["accept"] + spent["host"]
    c = drafting * calls / (rounds.steps / rounds.rows).sum()
    whole = (1 - alpha ** (gamma + 1)) / (1 - alpha) if alpha < 1 else gamma + 1
    by_length = sum(expected(alpha, g) for g in rounds.gamma)
    ended = sum(prompt["tokens"] < prompt["limit"] for prompt in prompts) / tokens
    stopped = sum(expected(alpha * (1 - ended), g) for g in rounds.gamma)
    without_luck = tokens - rounds.accepted.sum() + betas.sum()
    own = {
        "theorem_3_8": whole / (gamma * c + 1),
        "short_drafts": by_length / len(rounds) / whole,
        "stops": stopped / by_length,
        "dependence": without_luck / stopped,
        "luck": tokens / without_luck,
        "drafting": (gamma * c + 1) / (drafting + 1),
        "verify": (drafting + 1) / (drafting + verify),
        "rest": (drafting + verify) / (drafting + verify + rest),
    }
    assert list(factors) == [*own, "plain_rest", "rows"]
    assert {name: factors[name] for name in own} == pytest.approx(own, rel=1e-6)
    assert factors["theorem_3_8"] == pytest.approx(result.speedup.theorem_3_8, rel=1e-9)
    for factor in result.speedup.accounting.values():
        if "batch_size=2" in overrides:  # fewer than five groups
            assert factor.ci95 is None
            continue
        assert factor.ci95[0] <= factor.factor * 1.0001 and factor.ci95[1] >= factor.factor * 0.9999


@pytest.mark.slow
def test_nothing_drafted_is_not_accounted_for(finished):
    result, _, _ = finished("gamma=0")
    assert result.speedup.accounting == {} and result.regret == 0


def test_beta_by_position_and_category_are_means_of_the_rounds(finished):
    result, _, folder = finished("gamma=3", "data.kind=mixed", "data.limit=2")
    rounds = pyarrow.parquet.read_table(folder / "rounds.parquet").to_pylist()
    assert len(result.beta_by_position) == 3
    for place, estimate in enumerate(result.beta_by_position):
        betas = [r["beta"][place] for r in rounds if len(r["beta"]) > place]
        assert estimate.n == len(betas) and estimate.mean == pytest.approx(np.mean(betas))
    lines = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    kinds = {line["id"]: line["category"] for line in lines}
    assert set(result.alpha_by_category) == {"python", "prose"}
    for category, estimate in result.alpha_by_category.items():
        betas = [beta for r in rounds if kinds[r["prompt"]] == category for beta in r["beta"]]
        assert estimate.mean == pytest.approx(np.mean(betas))


def test_betas_along_the_text_are_those_of_the_rounds(finished):
    """The text is read by other calls of other shapes, so only rounding may differ."""
    for overrides in (GREEDY, ("gamma=3", "repetition_penalty=1.3", "top_k=50")):
        _, _, folder = finished(*overrides)
        rounds = pyarrow.parquet.read_table(folder / "rounds.parquet").to_pylist()
        replay_table = pyarrow.parquet.read_table(folder / "positions.parquet").to_pylist()
        positions = {(p["prompt"], p["position"]): p for p in replay_table}
        checked = 0
        for r in rounds:
            for place, beta in enumerate(r["beta"]):
                found = positions[r["prompt"], r["position"] + place]
                assert found["beta"] == pytest.approx(beta, abs=2e-4)
                assert found["outcome"] == int(place < r["accepted"])
                checked += 1
        assert checked > 60


def bigram_law(path, last):
    """Counts of what followed, and one unigram continuation more: smoothing 1 (section 3.6)."""
    numbers = list(map(int, Path(path).read_text().split()))
    unigram = np.array([numbers.count(x) + 1 for x in range(V)], float)
    following = np.array([sum(pair == (last, x) for pair in pairwise(numbers)) for x in range(V)], float)
    weights = following + unigram / unigram.sum()
    return torch.tensor(weights / weights.sum())


def ngram_law(text):
    """The shares of what followed the longest context, of three tokens to one, that stood in the text before."""
    for length in (3, 2, 1):
        context = text[-length:]
        found = [text[i + length] for i in range(len(text) - length) if text[i : i + length] == context]
        if found:
            return torch.tensor([found.count(x) / len(found) for x in range(V)], dtype=torch.double)
    return None


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", ["model", "bigram", "random", "ngram_sample"])
def test_betas_along_a_text_of_a_known_chain(kind, cache, tables, number_text):
    """The text is the second one after its prompt, behind a shorter one of other tokens."""
    sampling = Sampling()
    target = tabular_model(tables.target, sampling, cache)
    drafter = make_drafter(kind, target, number_text, tabular_model(tables.similar, sampling, cache))
    target.allocate(1, 48)
    if kind == "model":
        drafter.model.allocate(1, 48)
    text = torch.randint(V, (30,), generator=torch.Generator().manual_seed(3)).tolist()
    other = [(token + 1) % V for token in text[4:20]]
    _, laws = read_texts(target, drafter, text[:4], [DecodedText(other, [1.0] * 16), DecodedText(text[4:], [1.0] * 26)])
    p, guessed = tables.target.double().softmax(-1), 0
    for place in range(26):
        before, last, x = text[place + 2], text[place + 3], text[place + 4]
        if kind == "model":
            q = tables.similar.double().softmax(-1)[before, last]
        elif kind == "random":
            q = torch.full((V,), 1 / V, dtype=torch.double)
        elif kind == "bigram":
            q = bigram_law(number_text, last)
        elif (q := ngram_law(text[: place + 4])) is None:
            assert np.isnan(laws.beta[place])
            continue
        guessed += 1
        both = torch.minimum(p[before, last], q)
        assert laws.beta[place] == pytest.approx(both.sum().item(), abs=1e-5)
        assert laws.acceptance[place] == pytest.approx((both[x] / p[before, last, x]).item(), abs=1e-4)
        assert laws.confidence[place] == pytest.approx(q.max().item(), abs=1e-5)
    known = np.isfinite(laws.beta)
    assert known.sum() == guessed > 5
    assert (laws.drift_tv[known] < 1e-6).all() and (laws.bound[known] < 1 + 1e-5).all()


@pytest.mark.slow
def test_replay_predicts_another_gamma_of_the_same_law(finished):
    """Tokens a round of gamma 2, replayed on the text of gamma 4, against a run with gamma 2."""
    wide, narrow = finished("gamma=4", "data.limit=12"), finished("gamma=2", "data.limit=12")
    predicted = replay(load_trace(wide[2]), FixedGamma(2))
    efficiency = narrow[0].block_efficiency
    assert abs(predicted.block_efficiency - efficiency.mean) < 4 * math.hypot(efficiency.stderr, 0.02)
    wrong = replay(load_trace(wide[2]), FixedGamma(4))  # negative control
    assert abs(wrong.block_efficiency - efficiency.mean) > 4 * math.hypot(efficiency.stderr, 0.02)


@pytest.mark.parametrize("lenience", [1.0, 0.6, 0.2])
def test_the_output_law_is_that_of_the_verifier(lenience):
    generator = torch.Generator().manual_seed(1)
    p, q = (torch.randn(V, generator=generator).mul(1.5).softmax(-1) for _ in range(2))
    law, kept = output_law(p.double(), q.double(), lenience, greedy=False)
    assert law.sum().item() == pytest.approx(1) and (law * lenience <= p.double() * (1 + 1e-12)).all()
    if lenience == 1:
        assert torch.allclose(law, p.double())
    trials = 200_000
    x = torch.multinomial(q, trials, replacement=True, generator=generator)[:, None]
    draft = Draft.chain(x, q.expand(trials, 1, V), torch.ones(trials, dtype=torch.long))
    r = torch.rand(trials, 1, generator=generator, dtype=torch.double)
    bits = torch.randint(-(2**62), 2**62, (trials, 2), generator=generator)
    verdict = speculative_sampling(p.expand(trials, 2, V), draft, r, bits, lenience)
    counts = torch.bincount(verdict.tokens[:, 0], minlength=V).double()
    chi_square = ((counts - law * trials).square() / (law * trials)).sum().item()
    assert chi_square < (V - 1) + 10 * math.sqrt(2 * (V - 1))
    assert verdict.accepted.double().mean().item() == pytest.approx(kept.sum().item(), abs=0.01)
    if lenience < 1:  # negative control
        assert ((counts - p * trials).square() / (p * trials)).sum().item() > 1000


@pytest.mark.slow  # tests/contrib/replay reads a run's halves, tests/stats/test_halves.py simulates them
def test_a_run_keeps_what_replay_needs_to_charge_each_half_the_other_halfs_costs(finished):
    result, record, folder = finished("gamma=4", "data.limit=12")
    ids = [[id for ids in half.clusters for id in ids] for half in result.cost.halves]
    assert [*map(len, ids)] == [6, 6] and len({*ids[0], *ids[1]}) == 12
    by_half = [cost.rounds for half in result.cost.halves for cost in half.by_gamma]
    run_rounds = sum(len(each.speculative.rounds) for each in record.results)
    assert sum(by_half) == sum(cost.rounds for cost in result.cost.by_gamma) - run_rounds  # those of probes
    assert not result.gamma_pick.in_sample and not any("in-sample" in note for note in result.notes)
    costs = result.cost.by_gamma, 1.0
    for trace in (load_trace(folder), trace_of(record.results, *costs, result.cost.halves)):
        again = sweep(trace)
        for entry in result.gamma_sweep:
            found = again[entry.gamma]
            expected = (entry.speedup, *(entry.ci95 or ()))  # none where a time is not known to be above zero
            assert (found.speedup, *(found.ci95 or ())) == pytest.approx(expected)
    in_sample = sweep(trace_of(record.results, *costs))[4]  # negative control
    assert in_sample.speedup != pytest.approx(result.gamma_sweep[4].speedup, rel=1e-9)
