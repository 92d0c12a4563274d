"""The losslessness verdict: exact decoding passes, planted faults fail, and what was not tested is not passed."""

from collections import abc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from decoder_cases import TREES, V, make_drafter, queued, spare_of, tabular_model, verifier_of
from distribution_cases import AcceptEverything, ResidualFromTarget
from records import facts, record
from tabular import random_table

from specbench.decoding.noise import PROPOSAL
from specbench.decoding.rows import window
from specbench.decoding.sampling import Sampling, draw
from specbench.decoding.sequence import Sequence
from specbench.decoding.verify import speculative_sampling
from specbench.drafters.model import ModelDrafter
from specbench.measure.record import Record
from specbench.measure.recorder import Draws, Guess, Recorder
from specbench.measure.sequential import (
    ALTERNATIVES,
    EVERY,
    FAVOURED,
    LEVEL,
    draw_sums,
    log_ratios,
    no_sums,
    p_value,
    sums_of,
)
from specbench.measure.verdict import judge, read_text, unread
from specbench.models.reference_forward import FinishedText
from specbench.policies.base import FixedGamma
from specbench.verifiers.base import SpeculativeVerifier
from specbench.verifiers.chains import BlockVerifier, RejectionVerifier, block_verification
from specbench.verifiers.trees import IterativeVerifier, MatchVerifier

GAMMA, SAMPLED, GREEDY = 4, Sampling(), Sampling(temperature=0)


def decoded(
    tables: Any, number_text: str, kind: str = "model", verifier: Any = SpeculativeVerifier, rows: int = 60,
    tokens: int = 40, sampling: Sampling = SAMPLED, model: Any = None,
    asked: Sampling | None = None, one_key: bool = False,
) -> list[Record]:  # fmt: skip
    """A tabular pair's texts, each read again by the stock modules, as records. `asked` is the configuration's sampling
    if it is not the target's; with `one_key` all texts have the same noise."""
    target = tabular_model(tables.target, sampling)
    helper = tabular_model(tables.similar if model is None else model, sampling)
    drafter = make_drafter(kind, target, number_text, helper)
    judged_by = verifier_of(verifier, sampling)
    prompts = [[3, 7, 1, row % V] for row in range(rows)]
    jobs = [Sequence(prompt, 4 + tokens, key * (not one_key)) for key, prompt in enumerate(prompts)]
    recorder, spare = Recorder(judged_by, keep=True), spare_of(kind, GAMMA)
    queue = queued(target, drafter, jobs, rows, judged_by, FixedGamma(GAMMA), spare=spare, after_round=recorder)
    generated = [sequence.generated for sequence in queue.sequences]
    texts = zip(prompts, generated, recorder.draws(rows), [[], *generated], strict=False)
    return [
        read_as(target, drafter, prompt, new, new, draws, asked or sampling, before)
        for prompt, new, draws, before in texts
    ]


def read_as(
    target: Any, drafter: Any, prompt: list[int], new: list[int], plain: list[int], draws: Draws, asked: Sampling,
    before: abc.Sequence[int] = (),
) -> Record:  # fmt: skip
    """A record whose texts and reading are these; `before` is the text before it."""
    made = record("p", 4, 2, 0.5, np.random.default_rng(0))
    assert made.speculative and made.baseline
    made.speculative.ids, made.baseline.ids = list(new), list(plain)
    made.verdict = read_text(target, drafter, asked, FinishedText(prompt, new), plain, draws, before) | {"ended": True}
    return made


def verdict(records: list[Record], **changes: Any) -> dict[str, Any]:
    return judge(records, facts(**changes))


@pytest.mark.parametrize("kind", ["model", "tree_distinct", "under_ngram"])
def test_exact_decoding_passes(kind: str, tables: Any, number_text: str) -> None:
    verifier = IterativeVerifier if kind in TREES else SpeculativeVerifier
    records = decoded(tables, number_text, kind, verifier)
    found = verdict(records)
    assert found["passed"], found
    assert found["details"]["tokens"] == found["details"]["p"]["positions"] == 60 * 40
    assert {"every guess accepted", "tokens that q favours drawn too often"} <= {*found["detectable"]}
    assert not any(verdict(records[begin : begin + 5])["passed"] is False for begin in range(0, 60, 5))


@pytest.mark.parametrize("sampling", [SAMPLED, Sampling(0.8, top_k=5), Sampling(1.2, top_p=0.8)])
@pytest.mark.parametrize("verifier", [BlockVerifier, RejectionVerifier, MatchVerifier, IterativeVerifier])
def test_every_exact_verifier_passes(verifier: Any, sampling: Sampling, tables: Any, number_text: str) -> None:
    records = decoded(tables, number_text, verifier=verifier, sampling=sampling)
    assert verdict(records)["passed"], verdict(records)


class HiddenLenience(SpeculativeVerifier):
    """Says that it is exact, and accepts with lenience .7."""

    def accept(self, p: Any, draft: Any, noise: Any) -> Any:
        return speculative_sampling(p, draft, noise.r, noise.bits, 0.7)


class EagerBlock(BlockVerifier):
    """Accepts blocks too often."""

    def accept(self, p: Any, draft: Any, noise: Any) -> Any:
        return block_verification(p, draft, 0.6 * noise.r, noise.bits)


class OneNumber(SpeculativeVerifier):
    """One random number for all guesses of a round."""

    def accept(self, p: Any, draft: Any, noise: Any) -> Any:
        return speculative_sampling(p, draft, noise.r[:, :1].expand_as(noise.r), noise.bits)


class NoiseOfTheGuess(SpeculativeVerifier):
    """The recovered token is drawn with the noise that its guess was drawn with."""

    def accept(self, p: Any, draft: Any, noise: Any) -> Any:
        again = window(noise.table[PROPOSAL], noise.length, len(noise.levels) + 1)
        return speculative_sampling(p, draft, noise.r, again)


class LikeliestBonus(SpeculativeVerifier):
    """The bonus token is the likeliest one."""

    def accept(self, p: Any, draft: Any, noise: Any) -> Any:
        found, rows = super().accept(p, draft, noise), torch.arange(len(p))
        n, tokens = found.accepted, found.tokens.clone()
        tokens[rows, n] = torch.where(n == draft.count, p[rows, n].argmax(-1), tokens[rows, n])
        return replace(found, tokens=tokens)


FAULTS = [
    ("model", AcceptEverything, 40), ("bigram", AcceptEverything, 40), ("model", ResidualFromTarget, 40), ("ngram",
    ResidualFromTarget, 40), ("under_model", HiddenLenience, 80), ("model", EagerBlock, 150), ("model",
    HiddenLenience, 60), ("model", OneNumber, 60), ("model", NoiseOfTheGuess, 150), ("model", LikeliestBonus, 40),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "verifier", "rows"), FAULTS)
def test_a_planted_fault_fails(kind: str, verifier: Any, rows: int, tables: Any, number_text: str) -> None:
    found = verdict(decoded(tables, number_text, kind, verifier, rows))
    assert found["passed"] is False and found["reason"], found


def test_a_run_that_is_lossy_by_choice_neither_passes_nor_fails(tables: Any, number_text: str) -> None:
    records = decoded(tables, number_text, verifier=HiddenLenience, rows=40)
    found = verdict(records, expected_lossless=False, lossy_reason="lenience 0.7")
    assert found["passed"] is None and found["reason"] == "lenience 0.7" and not found["expected"]


@pytest.mark.parametrize("temperature", [0.8, 1.25])
def test_guesses_from_another_q_fail(temperature: float, tables: Any, number_text: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("specbench.drafters.model.draw", lambda q, bits: draw(q ** (1 / temperature), bits))
    assert verdict(decoded(tables, number_text))["passed"] is False


def test_another_p_and_another_q_are_seen(tables: Any, number_text: str, monkeypatch: Any) -> None:
    """The decoder's own standardisation is 2 % too warm, for both models."""
    probabilities = Sampling.probabilities
    monkeypatch.setattr(Sampling, "probabilities", lambda self, logits, seen=None: probabilities(self, logits / 1.02))
    records = decoded(tables, number_text, rows=5)
    monkeypatch.undo()
    found = verdict(records)
    assert found["passed"] is False and "the decoder's p" in found["reason"]
    assert not found["details"]["q"]["within"] and "alpha" in found["notes"][0]
    assert verdict(decoded(tables, number_text, rows=5))["details"]["q"]["within"]


TOP_K = Sampling(0.8, top_k=5)


@pytest.mark.parametrize(("asked", "built"), [
    (SAMPLED, Sampling(1.03)), (SAMPLED, Sampling(0.97)), (TOP_K, Sampling(0.8)), (TOP_K, Sampling(0.8, top_k=4)),
    (TOP_K, Sampling(0.8, top_k=6)), (Sampling(top_p=0.8), Sampling(top_p=0.75)),
    (Sampling(repetition_penalty=1.2), SAMPLED), (SAMPLED, GREEDY), (GREEDY, SAMPLED),
])  # fmt: skip
def test_a_target_that_samples_otherwise_than_the_configuration_fails(
    asked: Sampling, built: Sampling, tables: Any, number_text: str
) -> None:
    found = verdict(decoded(tables, number_text, rows=5, sampling=built, asked=asked), greedy=asked.greedy)
    assert found["passed"] is False, found


def test_one_noise_for_all_prompts_fails(tables: Any, number_text: str) -> None:
    found = verdict(decoded(tables, number_text, one_key=True))
    assert found["passed"] is False and "one noise for several texts" in found["reason"]
    found = verdict(decoded(tables, number_text))
    assert found["passed"] and "one noise for several texts" in found["detectable"]


@pytest.mark.parametrize("kind", ["model", "ngram"])
def test_numbers_that_are_not_finite_fail(kind: str, tables: Any, number_text: str) -> None:
    broken = tables.target.clone()
    broken[3, :] = float("nan")
    own = SimpleNamespace(target=broken, similar=tables.similar)
    found = verdict(decoded(own, number_text, kind, rows=5))
    assert found["passed"] is False, found


def test_what_shows_nothing_does_not_pass(tables: Any, number_text: str) -> None:
    assert verdict(decoded(tables, number_text, rows=1, tokens=5))["passed"] is None
    near = tables.target + random_table(V, seed=3, spread=0.25)
    accepting = decoded(tables, number_text, verifier=AcceptEverything, rows=6, model=near)
    assert True not in [verdict([one])["passed"] for one in accepting]
    assert verdict([])["passed"] is None and verdict([])["reason"]


def test_texts_that_were_not_read_do_not_pass(tables: Any, number_text: str) -> None:
    records = decoded(tables, number_text)
    records[0].verdict = unread("verdict_tokens=0")
    assert verdict(records)["passed"]
    records[0].verdict = unread("MemoryError: no room", error=True)
    found = verdict(records)
    assert found["passed"] is None and "no room" in found["reason"]
    for record_ in records:
        record_.verdict = unread("verdict_tokens=0")
    assert verdict(records)["passed"] is None and verdict(records)["reason"] == "verdict_tokens=0"


def test_a_text_that_ends_elsewhere_and_steps_without_a_guess(tables: Any, number_text: str) -> None:
    records = decoded(tables, number_text)
    assert records[0].verdict is not None
    records[0].verdict["ended"] = False
    assert verdict(records)["passed"] is False
    records[0].verdict["ended"] = True
    for record_ in records:
        assert record_.verdict is not None
        record_.verdict["tested"] = 0
    assert verdict(records)["passed"] is None


def test_an_impossible_draw_fails() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.8, 0.0]])
    half = Guess(0, 0, 0.5, 0.5, True, True)
    sound = Draws("p / q", [half], [(0, p)], [(0, p[:1])])
    assert draw_sums(sound, torch.tensor([0, 1]))[1] == 0
    assert draw_sums(sound, torch.tensor([0, 2]))[1] == 1  # a token that p excludes
    sure = replace(sound, guesses=[half._replace(q=0.4)], drafter=[(0, torch.tensor([[0.4, 0.4, 0.2]]))])
    assert draw_sums(sure, torch.tensor([0, 1]))[1] == 0
    assert draw_sums(sure, torch.tensor([1, 1]))[1] == 1  # p / q is 1.25, and the guess was rejected
    favoured = replace(sound, guesses=[half._replace(q=0.9)], drafter=[(0, torch.tensor([[0.9, 0.1, 0.0]]))])
    assert draw_sums(favoured, torch.tensor([1, 1]))[1] == 0
    excluded = replace(favoured, guesses=[half._replace(token=2, q=0.0)])  # by q
    assert draw_sums(excluded, torch.tensor([1, 1]))[1] > 0


def test_exact_draws_fail_as_rarely_as_promised() -> None:
    """The weighted mean of the products is 1, so that one run in 200 fails at most; wrong distributions fail."""
    generator = torch.Generator().manual_seed(9)
    p = torch.randn(60, V, generator=generator).mul(1.5).softmax(-1).double()
    mean = torch.rand(60, generator=generator).double()
    more = torch.ones(60).double(), (torch.arange(60) % 4 == 3).double()

    def failed(other: Any, runs: int) -> int:
        count = 0
        for _ in range(runs):
            drawn = other.multinomial(1, generator=generator)[:, 0]
            stands = torch.rand(60, generator=generator) < mean
            sums = sums_of("recovered", drawn, p) + sums_of("bonus", drawn, p)
            sums = sums + sums_of("accepted", stands, mean, *more)
            count += p_value(sums)[0] < LEVEL
        return count

    assert failed(p, 400) <= 4
    assert failed(p**3, 20) == 20
    assert p_value(no_sums())[0] == pytest.approx(1)


def test_every_alternative_has_mean_one_and_there_are_at_most_twenty() -> None:
    """sum_x p(x) alternative(x) / p(x) = 1, which makes the products martingales."""
    assert ALTERNATIVES[EVERY].name == "every guess accepted" and ALTERNATIVES[FAVOURED].kind == "favoured"
    assert len(ALTERNATIVES) <= 20
    generator = torch.Generator().manual_seed(2)
    p, q = torch.randn(2, 30, 50, generator=generator).mul(2).softmax(-1).double()
    mean = torch.rand(30, generator=generator).double()
    for one in ALTERNATIVES:
        if one.kind in ("accepted", "favoured"):
            more = torch.rand(30, generator=generator).double(), (torch.arange(30) % 4 == 3).double()
            logs, _ = log_ratios(one.change, mean, *(more if one.kind == "accepted" else ()))
            total = (torch.stack([1 - mean, mean], -1) * logs.exp()).sum(-1)
        else:
            others = {"after": (q,), "behind": (q,), "own": (q,)}
            others["beside"] = (torch.nn.functional.one_hot(torch.full((30,), 7), 50),)
            logs, _ = log_ratios(one.change, p, *others.get(one.kind, ()))
            total = (p * logs.exp()).sum(-1)
            assert logs.abs().max() > 0.01, one.name
        assert torch.allclose(total, torch.ones_like(total), atol=1e-9), one.name


def greedy(ours: list[int], plain: list[int], table: Any, dtype: Any = torch.float32, **known: Any) -> dict[str, Any]:
    """The verdict at temperature 0 on one text after [1, 2]."""
    target = tabular_model(table, GREEDY)
    target.dtype = dtype
    target.allocate(1, 16)
    drafter = type(
        "NoModel", (), {"reads_text": True, "models": (), "trees": False, "only_likeliest": False, "context": 99}
    )
    draws = Draws("p / q", [Guess(0, ours[0], 1.0, 1.0, True, True)])
    found = read_as(target, drafter, [1, 2], ours, plain, draws, GREEDY)
    return judge([found], facts(greedy=True, **known))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_temperature_0_only_a_tie_is_forgiven(dtype: Any, tables: Any) -> None:
    """The gap is within rounding of the dtype, or ten times beyond it."""
    for roundings, passes in ((0.5, True), (10.0, False)):
        table = tables.target.clone()
        table[1, 2, 3] = float(table[2, 3].abs().max()) + 5
        best, second = (int(token) for token in table[2, 3].topk(2).indices)
        steps = 64 if dtype == torch.float32 else 4
        gap = roundings * steps * torch.finfo(dtype).eps * float(table[2, 3].abs().max())
        table[2, 3, second] = table[2, 3, best] - gap
        for ours, plain in ((second, best), (best, second)):
            found = greedy([3, ours], [3, plain], table, dtype)
            assert found["passed"] is passes, found
            assert found["details"]["differ"] == 1 and found["details"]["ties"] == int(passes)
            assert found["details"]["wrong"] == int(not passes and ours == second)
            assert not greedy([3, ours], [3, plain], table, dtype, batch_invariant=True)["passed"]
        assert greedy([3, best], [3, best], table, dtype)["passed"]
        assert greedy([3, best], [3, best], table, dtype, batch_invariant=True)["passed"]


def test_at_temperature_0_what_is_no_tie_is_a_bug(tables: Any) -> None:
    table = tables.target.clone()
    table[1, 2, 3] = 99.0
    best, second = (int(token) for token in table[2, 3].topk(2).indices)
    table[2, 3, second] = table[2, 3, best]
    worst = int(table[2, 3].argmin())
    assert greedy([3, best], [3, second], table)["passed"]
    assert greedy([3, best], [3, worst], table)["passed"] is False
    assert greedy([3, best], [3], table)["passed"] is False  # plain decoding has ended
    assert greedy([3], [3, best], table)["passed"] is False
    table[2, 3] = -torch.inf
    assert greedy([3, 0], [3, 0], table)["passed"] is False


def test_at_temperature_0_a_text_that_differs_and_was_not_read_shows_nothing(tables: Any) -> None:
    made, other = (record("p", 2, 2, 0.5, np.random.default_rng(seed)) for seed in (0, 1))
    assert made.speculative and made.baseline
    made.baseline.ids = made.speculative.ids[::-1]
    made.verdict = unread("verdict_tokens=0")
    other.verdict = {"tokens": 2, "ended": True, "tested": 1, "p": {}, "wrong": 0, "divergence": ""}
    assert judge([made, other], facts(greedy=True))["passed"] is None
    assert judge([other], facts(greedy=True))["passed"]


def test_guesses_of_another_drafter_are_seen_at_temperature_0(tables: Any, number_text: str, monkeypatch: Any) -> None:
    records = decoded(tables, number_text, sampling=GREEDY, rows=4)
    found = judge(records, facts(greedy=True))
    assert found["passed"] and found["details"]["q"]["within"] and found["details"]["q"]["positions"] > 0
    read = ModelDrafter.read

    def negated(self: Any, *given: Any) -> Any:
        logits, memory = read(self, *given)
        return -logits, memory

    monkeypatch.setattr(ModelDrafter, "read", negated)
    found = judge(decoded(tables, number_text, sampling=GREEDY, rows=4), facts(greedy=True))
    assert found["passed"] and not found["details"]["q"]["within"] and found["notes"]
