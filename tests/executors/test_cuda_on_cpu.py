"""A CUDA device whose operations run on the CPU: where the host waits in a decode, planted faults, and indices."""

from collections import Counter

import pytest
import torch
from cuda_on_cpu import DataDependentShapeError, MixedDevicesError, answer_for_a_machine, cuda_on_cpu
from small_runs import parts_of

from specbench.decoding.sequence import Sequence
from specbench.run.session import Session
from specbench.verifiers.base import SpeculativeVerifier

ALLOWED = {
    "decoding.state.State.read_round": 1,  # lengths, ends and tokens of the rows, in one copy a round
    "decoding.timer.Timer._wait": None,  # at the ends of what is timed
    "measure.recorder.Recorder._rows": None,  # after the last round
}


def unlike_the_table(monkeypatch, *overrides) -> list[str]:
    """What waits for the device while a whole text is decoded, against ALLOWED."""
    with cuda_on_cpu() as device:
        answer_for_a_machine(monkeypatch)
        parts = parts_of("target=bytes", "drafter=bytes", "device=cuda", "gamma=2", "attention=sdpa", *overrides)
        session = Session(parts)
        session.decode([Sequence([3, 4], 12, 7)], True, 24)  # what is made once
        device.waits.clear()
        decoded = session.decode([Sequence([3, 4], 12, 7)], True, 24)
    rounds = len(decoded.texts[0].rounds)
    assert all(seconds > 0 for seconds in (*decoded.texts[0].rounds.draft, *decoded.texts[0].rounds.verify))
    found = Counter(wait.place for wait in device.waits)
    most = {place: count if times is None else times * (rounds + 1) for place, times in ALLOWED.items()
            for count in [found[place]]}  # fmt: skip
    return [f"{place} waits {count} times" for place, count in found.items() if count > most.get(place, 0)]


@pytest.mark.parametrize("overrides", [
    ("executor=eager",), ("executor=eager", "temperature=0", "cache=paged"), ("executor=eager", "drafter=ngram"),
    ("executor=cudagraph", "executor._target_=graph_memory.Marked"),
], ids=str)  # fmt: skip
def test_the_host_waits_once_a_round(overrides, monkeypatch):
    assert unlike_the_table(monkeypatch, *overrides) == []


def planted_item(self, p, draft, noise):
    assert p.sum().item() > 0
    return TRUE_ACCEPT(self, p, draft, noise)


def planted_host_tensor(self, p, draft, noise):
    return TRUE_ACCEPT(self, p + torch.zeros(p.shape[-1]), draft, noise)


def planted_mask(self, p, draft, noise):
    assert p[p > 0].dim()
    return TRUE_ACCEPT(self, p, draft, noise)


TRUE_ACCEPT = SpeculativeVerifier.accept


@pytest.mark.parametrize(("planted", "error", "match"), [
    (planted_item, None, "decoding.speculative.accept_and_commit waits"),
    (planted_host_tensor, MixedDevicesError, "tensors of both devices"),
    (planted_mask, DataDependentShapeError, "index"),
])  # fmt: skip
def test_a_planted_fault_is_found(planted, error, match, monkeypatch):
    """Negative controls: a value for the host, a tensor of the host, a shape that depends on values."""
    monkeypatch.setattr(SpeculativeVerifier, "accept", planted)
    if error is None:
        assert any(match in wait for wait in unlike_the_table(monkeypatch, "executor=eager"))
    else:
        with pytest.raises(error, match=match):
            unlike_the_table(monkeypatch, "executor=eager")


def test_copies_from_pinned_memory_are_not_waited_for():
    with cuda_on_cpu() as device:
        pinned = torch.tensor([1, 2, 3]).pin_memory()
        assert pinned.is_pinned() and pinned[1:].to("cuda", non_blocking=True).tolist() == [2, 3]
        assert [wait.what for wait in device.waits] == ["tolist"]
        for send in (lambda: pinned.to("cuda"), lambda: torch.tensor([1]).to("cuda", non_blocking=True)):
            device.waits.clear()
            assert str(send().device) == "cuda:0" and [w.what for w in device.waits] == ["copy to the device"]
