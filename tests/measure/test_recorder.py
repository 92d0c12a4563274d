"""The recorder: what is tested, accepted, recovered and bonus, by hand; of trees along the chosen path; with stops."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decoder_cases import V, make_drafter, spare_of, tabular_model, verifier_of

from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.sampling import Sampling
from specbench.decoding.sequence import Sequence
from specbench.decoding.speculative import decode_autoregressive, decode_speculative
from specbench.decoding.state import State
from specbench.decoding.timer import Stage, Timer
from specbench.measure.record import Rounds
from specbench.measure.recorder import Recorder, round_numbers
from specbench.policies.base import FixedGamma
from specbench.verifiers.base import SpeculativeVerifier
from specbench.verifiers.trees import IterativeVerifier

SECONDS = {Stage.DRAFT: 0.1, Stage.VERIFY: 0.2, Stage.ACCEPT: 0.03, Stage.HOST: 0.004}


def probabilities(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, 6, generator=torch.Generator().manual_seed(seed)).softmax(-1)


def one_round(
    accepted: list[int], count: list[int], kept: list[int], **options: Any
) -> tuple[Recorder, Any, Any, Draft]:
    """A round of rows with three guesses at most, seen by a recorder."""
    B = len(accepted)
    p, q = probabilities(B, 4), probabilities(B, 3, seed=1)
    draft = Draft.chain(torch.tensor([[1, 2, 3]] * B), q, torch.tensor(count))
    recorder = Recorder(verifier_of(SpeculativeVerifier, Sampling(), options.pop("lenience", 1.0)), **options)
    state: Any = SimpleNamespace(waiting=0, request_ids=[*range(B)], drawn=3)
    scores: Any = SimpleNamespace(waiting=0, p=p, logits=None, width=4)
    verdict = Verdict(torch.zeros(B, 4, dtype=torch.long), torch.tensor(accepted))
    recorder(state, scores, draft, verdict, torch.tensor(kept))
    return recorder, p, q, draft


def test_what_is_tested_recovered_and_bonus() -> None:
    """Rows: rejected at the second guess; all accepted; a stop at the second of three; none; idle; rejected."""
    recorder, p, q, _ = one_round([1, 3, 3, 0, 0, 0], [3, 3, 3, 0, 3, 1], [2, 4, 2, 1, 0, 1])
    rounds = recorder.rounds([SECONDS], 6)
    own = [{name: column[0] for name, column in vars(of).items()} if len(of) else {} for of in rounds]
    assert [x.get("tested") for x in own] == [2, 3, 2, 0, None, 1]
    assert [x.get("accepted") for x in own] == [1, 3, 2, 0, None, 0]
    assert [x.get("recovered") for x in own] == [1, 0, 0, 0, None, 1]
    assert [x.get("bonus") for x in own] == [0, 1, 0, 1, None, 0]
    assert [x.get("gamma") for x in own] == [x.get("drafted") for x in own] == [3, 3, 3, 0, None, 1]
    assert {x["rows"] for x in own if x} == {5} and own[0]["draft"] == 0.1 and own[0]["host"] == 0.004
    for row, x in enumerate(own):
        expected = torch.minimum(p[row, :3], q[row]).sum(-1)[: x.get("tested", 0)]
        assert x.get("betas", []) == pytest.approx(expected.tolist())


def test_drift_is_summed_over_tested_positions() -> None:
    recorder, *_ = one_round([1], [3], [2], lenience=0.5, drifts=True)
    (found,) = recorder.drift(1)
    assert found is not None and found["positions"] == 2 and 0 < found["tv"] < 2 and found["bound"] <= 1
    assert one_round([1], [3], [2])[0].drift(1) == [None]


def test_of_a_tree_the_chosen_path_is_recorded() -> None:
    """A tree of two children, the second of which has one child: the second was accepted, and its child rejected."""
    p, q = probabilities(1, 4), probabilities(1, 3, seed=1)
    draft = Draft.tree(torch.tensor([[1, 2, 3]]), (0, 0, 2), q, torch.tensor([3]))
    verdict = Verdict(torch.tensor([[2, 4, 0]]), torch.tensor([1]), torch.tensor([[0, 2, 2]]))
    numbers = round_numbers(p, draft, verdict, torch.tensor([2]), verifier_of(IterativeVerifier, Sampling()).beta)[0]
    kept, accepted, gamma, drafted, tested, judged, *steps = numbers.tolist()
    assert (kept, accepted, gamma, drafted, tested, judged) == (2, 1, 2, 3, 2, 2)
    beta, guess, p_x, q_x = (steps[i : i + 2] for i in (0, 2, 4, 6))
    assert guess == [1, 3] and p_x == pytest.approx([float(p[0, 0, 1]), float(p[0, 2, 3])])
    assert q_x == pytest.approx([float(q[0, 0, 1]), float(q[0, 2, 3])])
    assert beta[1] == pytest.approx(float(torch.minimum(p[0, 2], q[0, 2]).sum()))


@pytest.mark.parametrize("kind", ["model", "tree_distinct"])
def test_rounds_of_ragged_rows_add_up_to_their_texts(kind: str, tables: Any, number_text: str) -> None:
    """Rows of different limits, of which some end inside a round; plain decoding is recorded as rounds of one token."""
    sampling = Sampling()
    target, helper = tabular_model(tables.target, sampling), tabular_model(tables.similar, sampling)
    drafter = make_drafter(kind, target, number_text, helper)
    verifier = verifier_of(IterativeVerifier if kind != "model" else SpeculativeVerifier, sampling)
    limits = [3, 10, 17, 6]
    for speculative in (True, False):
        jobs = [Sequence([3, 7, row % V], 3 + limit, row) for row, limit in enumerate(limits)]
        state = State.start(jobs, [], spare_of(kind, 4), target.device)
        target.allocate(4, state.tokens.shape[1])
        target.prefill(state)
        recorder, clock = Recorder(verifier, keep=True), Timer(target.device)
        if speculative:
            decode_speculative(state, target, drafter, FixedGamma(4), verifier, clock, recorder)
        else:
            decode_autoregressive(state, target, verifier, clock, recorder)
        laps = [own for own in clock.rounds() if Stage.VERIFY in own]
        found = recorder.rounds(laps, 4)
        for rounds, text, limit in zip(found, state.generated, limits, strict=True):
            check(rounds, len(text))
            assert len(text) == limit and (speculative or set(rounds.gamma) == {0})
        spent = sum(sum(own.values()) - own.get(Stage.RECORD, 0.0) for own in laps)
        assert sum(map(seconds_of, found)) == pytest.approx(spent)
        for draws, text in zip(recorder.draws(4), state.generated, strict=True):
            assert sum(len(p) for _, p in draws.target) == len(text)
            assert [guess for guess in draws.guesses if guess.at >= len(text)] == []


def seconds_of(rounds: Rounds) -> float:
    """Seconds of each call, split evenly among its rows."""
    calls = zip(rounds.draft, rounds.verify, rounds.accept, rounds.host, rounds.rows, strict=True)
    return sum(sum(parts) / rows for *parts, rows in calls)


def check(rounds: Rounds, tokens: int) -> None:
    assert sum(rounds.tokens) == tokens
    for i in range(len(rounds)):
        own = rounds.recovered[i] + rounds.bonus[i]
        assert own <= 1 and rounds.tokens[i] == rounds.accepted[i] + own
        assert rounds.accepted[i] <= rounds.tested[i] <= rounds.gamma[i] <= rounds.drafted[i] or not rounds.gamma[i]
        assert len(rounds.betas[i]) == rounds.tested[i] and all(-1e-6 <= beta <= 2 for beta in rounds.betas[i])
