"""Counters and estimators."""

import numpy as np
import pytest
import torch
from decoder_cases import V, make_drafter, tabular_model, verifier_of

from specbench.decoding.sampling import Sampling
from specbench.decoding.sequence import Sequence
from specbench.decoding.speculative import decode_speculative
from specbench.decoding.state import State
from specbench.decoding.timer import Lap, Timer
from specbench.policies.fixed import FixedGamma
from specbench.run import machine_watch as bandwidth
from specbench.run.recorder import Recorder
from specbench.stats.bootstrap import ratio
from specbench.verifiers.speculative import SpeculativeVerifier


def record(tables, number_text, lenience=1.0, gamma=4, stop=()):
    """The rounds of 300 texts of 40 tokens, and the state behind them."""
    sampling = Sampling()
    target = tabular_model(tables.target, sampling)
    drafter = make_drafter("model", target, number_text, tabular_model(tables.similar, sampling))
    judge = verifier_of(SpeculativeVerifier, sampling, lenience)
    jobs = [Sequence([3, 7, 1, key % V], 44, key) for key in range(300)]
    state = State.start(jobs, list(stop), gamma + 1, target.device)
    target.allocate(300, state.tokens.shape[1])
    target.prefill(state)
    recorder, clock = Recorder(judge, {}), Timer(target.device)
    decode_speculative(state, target, drafter, FixedGamma(gamma), judge, clock, recorder)
    calls = recorder.rounds([laps for laps in clock.rounds() if Lap.VERIFY in laps])
    return [r for call in calls for r in call], state


def test_counters_add_up(tables, number_text):
    rounds, state = record(tables, number_text)
    assert sum(r.tokens for r in rounds) == sum(map(len, state.generated)) == 300 * 40
    for r in rounds:
        assert r.tokens == r.accepted + r.recovered + r.bonus
        assert r.tested == len(r.beta) == min(r.accepted + 1, r.gamma)
        assert all(0 <= beta <= 1 + 1e-5 for beta in r.beta)
    by_row = {row: [r for r in rounds if r.row == row] for row in range(300)}
    for group in by_row.values():
        starts = [r.position for r in group]
        assert starts == list(np.cumsum([0, *(r.tokens for r in group)])[:-1])


def test_nothing_after_a_stop_is_counted(tables, number_text):
    rounds, state = record(tables, number_text, stop=[5], gamma=6)
    outputs = state.generated
    assert any(out[-1] == 5 and len(out) < 40 for out in outputs)
    assert all(5 not in out[:-1] for out in outputs)
    assert sum(r.tokens for r in rounds) == sum(map(len, outputs))
    assert sum(r.accepted_before_stop for r in rounds) > sum(r.accepted for r in rounds)
    assert all(len(r.beta) <= r.tokens for r in rounds)


def test_mean_beta_and_acceptances_agree_and_do_not_move_with_gamma(tables, number_text):
    """Both estimate alpha; a tabular target makes it the same at each gamma only up to noise."""
    found = []
    for gamma in (1, 3, 8):
        rounds, _ = record(tables, number_text, gamma=gamma)
        by_row = [[r for r in rounds if r.row == row] for row in range(300)]
        tested = [sum(r.tested for r in group) for group in by_row]
        beta = ratio([sum(sum(r.beta) for r in group) for group in by_row], tested)
        counted = ratio([sum(r.accepted for r in group) for group in by_row], tested)
        assert abs(beta.mean - counted.mean) < 4.5 * counted.stderr
        found.append(beta)
    for one in found[1:]:
        assert abs(one.mean - found[0].mean) < 4.5 * np.hypot(one.stderr, found[0].stderr)


def test_lenience_raises_alpha_as_a5_says(tables, number_text):
    strict, lenient = (record(tables, number_text, lenience=value)[0] for value in (1.0, 0.3))
    assert np.mean([b for r in lenient for b in r.beta]) > np.mean([b for r in strict for b in r.beta]) + 0.05
    accepted = sum(r.accepted for r in lenient) / sum(r.tested for r in lenient)
    assert accepted == pytest.approx(np.mean([b for r in lenient for b in r.beta]), abs=0.02)


def test_the_clustered_error_covers_the_truth():
    """95 % intervals from prompts that differ in their own rate hold the overall rate."""
    rng, hits = np.random.default_rng(0), 0
    for _ in range(400):
        rates = rng.beta(4, 2, size=30)
        n = rng.integers(20, 60, size=30)
        estimate = ratio(rng.binomial(n, rates), n)
        hits += abs(estimate.mean - 4 / 6) < 1.96 * estimate.stderr
    assert 0.90 < hits / 400 < 0.98


def test_the_roofs_of_cuda_are_bytes_over_seconds(monkeypatch):
    """A read of 1 GiB counts its bytes once, a copy of its halves each byte as read and as written; where little memory
    is free the buffer is smaller."""
    monkeypatch.setattr(bandwidth, "CUDA_BYTES", 2**20)
    monkeypatch.setattr(bandwidth, "free_bytes", lambda device: 2**30)
    done = []

    def seconds(call, device):
        done.append(call())
        return 0.25 if len(done) % 2 else 0.5

    roofs = bandwidth.cuda_roofs(torch.device("cpu"), seconds)
    assert roofs == (2**20 / 0.25, 2**20 / 0.5)
    assert done[0] == 2**18 and done[1].nbytes == 2**19
    monkeypatch.setattr(bandwidth, "free_bytes", lambda device: 2**18)
    assert bandwidth.cuda_roofs(torch.device("cpu"), seconds).read == 2**16 / 0.25


def test_a_cpu_is_probed_at_each_call():
    probe = bandwidth.BandwidthProbe(torch.device("cpu"))
    for _ in range(3):
        probe()
    assert len(probe.reads) == 3 and probe.roofs == (sorted(probe.reads)[1], None)
