"""Rounds that are launched before the host has read the last one: nothing but the order of waits may differ."""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from choosing import in_turn, only
from decoder_cases import V, make_drafter, spare_of, tabular_model, verifier_of
from graph_memory import SimulatedGraphs

from specbench.contrib.traffic.lenience import LoadLenience
from specbench.decoding import state as states
from specbench.decoding.sampling import Sampling
from specbench.decoding.search import Decoding
from specbench.decoding.state import Job, State
from specbench.decoding.timer import Lap
from specbench.drafters.model import ModelDrafter
from specbench.executors.cudagraph import CudaGraphExecutor
from specbench.executors.eager import EagerExecutor
from specbench.policies.gamma.entropy import root_entropy
from specbench.policies.gamma.fixed import FixedGamma, WatchedGamma
from specbench.policies.gamma.heuristic import HeuristicGamma
from specbench.run.decoder import Session, works_on_device
from specbench.run.recorder import Recorder
from specbench.stats.metrics.calibration import Calibration
from specbench.verifiers.block import BlockVerifier
from specbench.verifiers.iterative import IterativeVerifier
from specbench.verifiers.match import MatchVerifier
from specbench.verifiers.speculative import SpeculativeVerifier

GAMMA, COLUMNS, STOPS = 3, 90, (2, 7)
ON_DEVICE = ("model", "random", "blockwise", "non_autoregressive", "pass_lookahead", "early_exit", 
             "tree_independent", "tree_distinct", "tree_best", "medusa")  # fmt: skip
BRANCHING = ("tree_independent", "tree_distinct", "tree_best", "medusa")


class Waiting(EagerExecutor):
    """Eager mode with the shapes of graphs."""

    fixed_shapes = True
    obstacle = "nobody asked"

    def runs_ahead(self, decoder, obstacle):
        self.obstacle = obstacle
        return False


class Ahead(Waiting):
    def runs_ahead(self, decoder, obstacle):
        super().runs_ahead(decoder, obstacle)
        return obstacle is None


def session_of(tables, executor, kind="model", rows=1, temperature=1.0, judge=None, stops=STOPS, text="", **parts):
    sampling = Sampling(temperature=temperature, repetition_penalty=parts.pop("penalty", 1.0))
    cache, context = parts.pop("cache", "static"), parts.pop("context", COLUMNS)
    target = tabular_model(tables.target, sampling, cache, COLUMNS, executor)
    target.stop_tokens = list(stops)
    helper = tabular_model(tables.similar, sampling, cache, context, executor)
    drafter = make_drafter(kind or "random", target, text, helper)
    judge = judge or (IterativeVerifier if kind in BRANCHING else SpeculativeVerifier)
    usual = {
        "policy": FixedGamma(min(GAMMA, drafter.longest or GAMMA)), "verifier": verifier_of(judge, sampling),
        "metrics": {}, "prefill_chunk": 4, "verdict_tokens": 0, "stop_strings": [], "batch_size": rows,
    }  # fmt: skip
    spare = spare_of(kind or "", GAMMA)
    return Session(SimpleNamespace(**usual | parts, target=target, drafter=drafter, spare=spare, decoding=Decoding()))


def jobs(count):
    generator = torch.Generator().manual_seed(8)
    lengths = torch.randint(1, 12, (count,), generator=generator).tolist()
    prompts = [torch.randint(V, (n,), generator=generator).tolist() for n in lengths]
    return [Job(p, len(p) + (40, 25, 4)[i % 3], 100 + i) for i, p in enumerate(prompts)]


def decoded(session, groups, speculative=True):
    """All that is known of groups of jobs but their times: by group, tokens and rounds of each job, calls, evidence."""
    everything = []
    for wanted in groups:
        found = session.decode(wanted, speculative, COLUMNS, evidence=True)
        requests = [(r.tokens, [replace(round_, seconds={}) for round_ in r.rounds]) for r in found.requests]
        everything.append((requests, found.calls, str([vars(evidence) for evidence in found.evidence])))
    return everything


def ends(found):
    """The last token of every job."""
    return [tokens[-1] for requests, *_ in found for tokens, _ in requests]


@pytest.fixture
def left(monkeypatch):
    """Counts the rounds that were left unread when the next one began."""
    found = []

    class Counted(states.Arriving):
        def __init__(self, tensor):
            super().__init__(tensor)
            found.append(tensor)

    monkeypatch.setattr(states, "Arriving", Counted)
    return found


@pytest.mark.parametrize(
    ("kind", "rows", "temperature", "stops"), in_turn((None, *ON_DEVICE), [(1, 1, STOPS), (3, 0, ()), (3, 1, STOPS)])
)
def test_rounds_that_are_read_late_are_the_same_rounds(kind, rows, temperature, stops, tables, left):
    """Tokens, rounds, betas, evidence and calls, of texts that end by a stop token or by their limit."""
    wanted = [[job] for job in jobs(3)] if rows == 1 else [jobs(3), jobs(5)]
    options = {"kind": kind, "rows": rows, "temperature": temperature, "stops": stops}
    expected = decoded(session_of(tables, Waiting(), **options), wanted, kind is not None)
    assert not left
    executor = Ahead()
    assert decoded(session_of(tables, executor, **options), wanted, kind is not None) == expected
    assert executor.obstacle is None and len(left) > 5
    assert not stops or any(end in stops for end in ends(expected))


@pytest.mark.parametrize("options", [
    {"judge": BlockVerifier}, {"judge": MatchVerifier}, {"verifier": SpeculativeVerifier(Sampling(), 0.5)},
    {"penalty": 1.3}, {"policy": FixedGamma(0)}, {"policy": FixedGamma(1)}, {"metrics": {"c": Calibration(4)}},
], ids=["block", "match", "lenience", "penalty", "gamma 0", "gamma 1", "metric"])  # fmt: skip
@pytest.mark.parametrize("rows", only([3], [1, 3]))
def test_verifiers_and_gammas_do_not_notice(options, rows, tables, left):
    wanted = [[job] for job in jobs(3)] if rows == 1 else [jobs(5)]
    expected = decoded(session_of(tables, Waiting(), rows=rows, **options), wanted)
    assert decoded(session_of(tables, Ahead(), rows=rows, **options), wanted) == expected and left


def test_a_round_for_texts_that_had_ended_is_not_counted(tables, monkeypatch):
    calls, times, true = [], [], Session._decoded

    def watch(queue, clock, recorder, models):
        found = true(queue, clock, recorder, models)
        calls.append((len(recorder._calls), found.calls))
        times.append((found.laps[Lap.VERIFY], sum(lap.get(Lap.VERIFY, 0.0) for lap in clock.rounds())))
        return found

    monkeypatch.setattr(Session, "_decoded", staticmethod(watch))
    found = decoded(session_of(tables, Ahead()), [[job] for job in jobs(4)])
    by_stop = [end in STOPS for end in ends(found)]
    extra = [launched - counted for launched, counted in calls]  # none where the host had stopped running ahead
    assert all(0 <= more <= stopped for more, stopped in zip(extra, by_stop, strict=True)) and any(extra)
    assert [counted < all_of_them for counted, all_of_them in times] == [more > 0 for more in extra]
    for requests, number, _ in found:
        assert [r.call for _, rounds in requests for r in rounds] == list(range(number))


def without_the_guard(monkeypatch):
    monkeypatch.setattr(State, "may_leave", property(lambda self: self.stride > 0 and any(self.active)))


def with_lengths_that_are_too_short(monkeypatch):
    monkeypatch.setattr(State, "reach", property(lambda self: self.lengths))


def with_lengths_of_the_host(monkeypatch):
    """The recorder as it was before: a round's position is the host's length less what was kept."""
    true_call, true_rounds = Recorder.__call__, Recorder.rounds

    def call(self, state, *of_round):
        self.known = [*getattr(self, "known", []), state.lengths[0] - state.prompt_lengths[0]]
        true_call(self, state, *of_round)

    def rounds(self, laps):
        found = zip(self.known, true_rounds(self, laps), strict=True)
        return [[replace(r, position=length - r.tokens) for r in its] for length, its in found]

    monkeypatch.setattr(Recorder, "__call__", call)
    monkeypatch.setattr(Recorder, "rounds", rounds)


def with_a_memory_that_is_overwritten(monkeypatch):
    """The host reads where the device writes, instead of a copy."""
    monkeypatch.setattr(states, "Arriving", lambda summary: summary)


@pytest.mark.parametrize(("fault", "executor"), [
    (without_the_guard, Ahead), (with_lengths_that_are_too_short, Ahead), (with_lengths_of_the_host, Ahead),
    (with_a_memory_that_is_overwritten, SimulatedGraphs),
])  # fmt: skip
def test_what_could_go_wrong_is_found(fault, executor, tables, monkeypatch):
    """Negative controls."""
    wanted, options = [jobs(1), jobs(2)[1:]], {"kind": "random", "stops": ()}
    expected = decoded(session_of(tables, Waiting(), **options), wanted)
    assert decoded(session_of(tables, executor(), **options), wanted) == expected
    fault(monkeypatch)
    assert decoded(session_of(tables, Waiting(), **options), wanted) == expected  # a loop that waits is sound
    try:
        found = decoded(session_of(tables, executor(), **options), wanted)
    except IndexError:
        assert executor is SimulatedGraphs
    else:
        assert found != expected


NEEDS_THE_HOST = [
    ({"stop_strings": ["9 9"]}, "stop strings"), ({"cache": "paged"}, "the cache"), ({"kind": "ngram"}, "the drafter"),
    ({"kind": "prompt_lookup"}, "the drafter"), ({"kind": "bigram"}, "the drafter"),
    ({"kind": "multi_draft"}, "the drafter"), ({"kind": "under_model"}, "the drafter"),
    ({"verifier": LoadLenience([1.0, 0.5], 1).verifier(lambda level: SpeculativeVerifier(Sampling(), level))}, "load"),
    ({"policy": HeuristicGamma(gamma=2, largest=3)}, "kept"), ({"context": 40}, "context"),
    ({"policy": WatchedGamma(3, root_entropy)}, "each guess"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "reason"), NEEDS_THE_HOST, ids=[reason for _, reason in NEEDS_THE_HOST])
def test_what_needs_the_host_is_read_at_once(options, reason, tables, left, number_text):
    executor = Ahead()
    decoded(session_of(tables, executor, **options, text=number_text), [jobs(1)])
    assert reason in executor.obstacle and not left


def test_a_subclass_of_a_drafter_says_itself_that_it_needs_no_host(tables, left):
    session = session_of(tables, Ahead())
    assert works_on_device(session.parts.drafter)
    session.parts.drafter.__class__ = type("Own", (ModelDrafter,), {})
    assert not works_on_device(session.parts.drafter)
    decoded(session, [jobs(1)])
    assert not left


def test_requests_that_wait_or_come_later_are_admitted_at_once(tables, left):
    """A row that has ended unread would keep them waiting."""
    session = session_of(tables, Ahead(), stops=())
    session.decode(jobs(2), True, COLUMNS, arrivals=[0.0, 0.01])
    assert not left and "over time" in session.parts.target.executor.obstacle
    queued, true = [], State.synchronise

    def watch(state, summary):
        true(state, summary)
        queued.append((state.waiting, len(state.flights)))

    with mock.patch.object(State, "synchronise", watch):
        decoded(session, [jobs(1) * 2])
    assert {flights for waiting, flights in queued if waiting} == {0} and {f for w, f in queued if not w} == {0, 1, 2}


def test_nobody_runs_ahead_by_default(tables, left):
    """Executors that do not launch a phase in one piece gain nothing; the graphs' one says why it waits, if it does."""
    for executor in (EagerExecutor(), Waiting()):
        decoded(session_of(tables, executor), [jobs(1)])
    assert not left
    executor = CudaGraphExecutor()
    assert executor.runs_ahead("plain", None) and not executor.runs_ahead("speculative", "it reads")
    assert executor.facts()["rounds_ahead"] == {"plain": "yes", "speculative": "no: it reads"}
