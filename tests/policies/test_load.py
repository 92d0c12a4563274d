"""Lenience and its drift, requests that arrive over time, and lenience that follows the queue."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from decoder_cases import make_drafter, queued, tabular_model
from omegaconf import OmegaConf
from scheduler_cases import GAMMA, jobs
from small_runs import parts_of, run

from specbench.decoding.sampling import Sampling
from specbench.decoding.scheduler import Scheduler
from specbench.decoding.state import State
from specbench.decoding.timer import Timer
from specbench.errors import ConfigError
from specbench.measure.recorder import Recorder
from specbench.policies.base import FixedGamma
from specbench.policies.lenience import LoadLenience
from specbench.policies.poisson import Poisson
from specbench.settings import validate
from specbench.verifiers.base import SpeculativeVerifier


def test_arrivals_are_seeded_and_come_at_the_rate():
    times = Poisson(0, 5.0).arrivals(4000)
    assert times == Poisson(0, 5.0).arrivals(4000) and times != Poisson(1, 5.0).arrivals(4000)
    assert times == sorted(times) and times[-1] == pytest.approx(800, rel=0.05)
    gaps = np.diff(times)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)  # exponential


def decode_arrivals(tables, arrivals, verifier=None, clock=None, record=None) -> Scheduler:
    """The queue of requests that were decoded through two rows."""
    target, similar = (tabular_model(logits, Sampling()) for logits in (tables.target, tables.similar))
    verifier = verifier or SpeculativeVerifier(Sampling())
    drafter, record = make_drafter("model", target, "", similar), record or Recorder(verifier)
    return queued(target, drafter, jobs(), 2, verifier, FixedGamma(GAMMA), 5, GAMMA + 1, record, clock, arrivals)


def test_arrivals_change_no_token_and_every_wait_is_counted(tables):
    at_once, clock = decode_arrivals(tables, None), Timer(torch.device("cpu"))
    arrivals = [0.0, 0.0, 0.0, 0.001, 0.002, 0.3, 0.3, 0.3, 0.31, 0.32, 0.33]
    queue = decode_arrivals(tables, arrivals, clock=clock)
    assert [s.generated for s in queue.sequences] == [s.generated for s in at_once.sequences]
    assert not any(s.times for s in at_once.sequences)
    times = [SimpleNamespace(**s.times) for s in queue.sequences]
    for arrived, seen in zip(arrivals, times, strict=True):
        assert arrived == seen.arrived <= seen.admitted <= seen.first_token <= seen.finished
    assert sum(lap.get("idle", 0.0) for lap in clock.rounds()) > 0.05  # nothing to do until .3
    assert max(seen.admitted - seen.arrived for seen in times[:3]) > 0  # the third one had to wait


def levels(*values, step=2):
    return LoadLenience(1.0, values, step).verifier(lambda level: SpeculativeVerifier(Sampling(), level))


def test_lenience_follows_the_queue_within_its_levels(tables):
    verifier = levels(1.0, 0.5, 0.25)
    state = State.idle(1, 4, [], torch.device("cpu"))
    found = []
    for waiting in (0, 1, 2, 3, 4, 50, 2, 0):
        state.waiting = waiting
        found.append(verifier.under(state).lenience)
    assert found == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.5, 1.0]
    assert not verifier.lossless and levels(1.0).lossless
    clock, recorder = Timer(torch.device("cpu")), Recorder(verifier)
    decode_arrivals(tables, [0.0] * 11, verifier, clock=clock, record=recorder)
    laps = [lap for lap in clock.rounds() if "verify" in lap]
    rounds = recorder.rounds(laps, 11)
    assert rounds[0].lenience[0] == 0.25 and rounds[-1].lenience[-1] == 1.0
    assert {level for own in rounds for level in own.lenience} == {0.25, 0.5, 1.0}


@pytest.mark.parametrize("bad", [[], [0.5, 0.7], [1.0, 0.0], [1.5, 1.0], [1.0, 1.0]])
def test_levels_must_fall(bad):
    with pytest.raises(ConfigError, match=r"lenience_policy.levels=.* (falling numbers|a number >= 1e-06 and <= 1)"):
        validate(LoadLenience.Settings, OmegaConf.create({"levels": bad, "step": 1}), "lenience_policy.")


def test_a_run_under_load_reports_latency(tmp_path):
    overrides = ("workload=poisson", "workload.rate=50", "batch_size=2", "lenience_policy=load", "gamma=2")
    few = ("data.limit=4", "max_new_tokens=8", "verdict_tokens=0")
    result, records = run(parts_of(*few, *overrides, "lenience_policy.step=1"), tmp_path)
    assert {record.group for record in records} == {0}
    for method in ("speculative", "baseline"):
        assert 0 < result.latency.first_token[method]["p50"] <= result.latency.first_token[method]["p99"]
        assert result.latency.per_token[method]["p50"] > 0
    assert not result.lossless.expected
