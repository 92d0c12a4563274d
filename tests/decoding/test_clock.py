"""The clock of both decoders on a simulated CUDA device: what host and device do is known to the microsecond.

The host spends time in `host`, the device works off what it is given in order, and an event is the moment at which the
device reaches it. So the true length of a round is known, and the timer must find it.
"""

import pytest
import torch

from specbench.decoding import timer as module
from specbench.decoding.timer import DECODING, Stage, Timer


class Machine:
    """A host and a device, with one clock in seconds."""

    def __init__(self):
        self.now = self.idle_at = 0.0

    def host(self, seconds):
        self.now += seconds

    def give(self, seconds):
        """Work for the device, which begins when it is done with what it has."""
        self.idle_at = max(self.idle_at, self.now) + seconds

    def wait(self, device=None):
        self.now = max(self.now, self.idle_at)

    def event(self, enable_timing):
        return Event(self)


class Event:
    def __init__(self, machine):
        self.machine = machine

    def record(self, stream):
        self.at = max(self.machine.now, self.machine.idle_at)

    def elapsed_time(self, later):
        return (later.at - self.at) * 1e3


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()
    monkeypatch.setattr(module.time, "perf_counter", lambda: machine.now)
    monkeypatch.setattr(torch.cuda, "Event", machine.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: str(device))
    monkeypatch.setattr(torch.cuda, "synchronize", machine.wait)
    return machine


def round_of(machine, timer, feed=0.1, draft=5.0, verify=2.0):
    """A round as `decode_speculative` times it: every call is prepared for .2 s by the host before the device has it;
    the verdict of .3 s is waited for, and the recorder is not."""
    machine.host(feed)
    timer.end(Stage.HOST)
    for stage, work in ((Stage.DRAFT, draft), (Stage.VERIFY, verify), (Stage.ACCEPT, 0.3)):
        machine.host(0.2)
        machine.give(work)
        if stage is Stage.ACCEPT:
            machine.wait()
        timer.end(stage)
    machine.host(0.05)  # the policy learns
    timer.end(Stage.HOST)
    machine.give(1.5)  # the recorder
    timer.end(Stage.RECORD)
    timer.start()


def seconds_of(machine, timer, rounds=3, **what):
    timer.start()
    for _ in range(rounds):
        round_of(machine, timer, **what)
    return timer.rounds()[:rounds]


def test_stages_end_where_the_device_begins_the_next(machine):
    """HOST is .1 of the feed and .05 of the policy; later calls are prepared while the device drafts."""
    for seconds in seconds_of(machine, Timer(torch.device("cuda:1"))):
        assert seconds == pytest.approx({"host": 0.15, "draft": 5.2, "verify": 2.0, "accept": 0.3, "record": 1.5})


def test_what_the_host_prepares_after_the_device_is_done_is_part_of_the_call(machine):
    for seconds in seconds_of(machine, Timer(torch.device("cuda")), draft=0.05, verify=0.1):
        expected = {"host": 0.15, "draft": 0.25, "verify": 0.15 + 0.1, "accept": 0.1 + 0.3, "record": 1.5}
        assert seconds == pytest.approx(expected)


def test_stages_inside_a_graph_end_at_its_events_which_each_replay_records_again(machine):
    timer, event = Timer(torch.device("cuda")), Event(machine)
    timer.start()
    for draft in (5.0, 3.0):
        machine.give(draft)
        event.record(None)
        machine.give(2.0)
        timer.end(Stage.DRAFT, event)
        timer.end(Stage.VERIFY)
        timer.start()
    assert timer.rounds()[:2] == [pytest.approx({"draft": draft, "verify": 2.0}) for draft in (5.0, 3.0)]


def test_a_clock_that_does_not_wait_for_the_recorder_hides_host_time(machine):
    """Negative control: what this test file would find in the clock as it was."""
    timer = Timer(torch.device("cuda"))
    timer._wait = lambda: None
    first, second, _ = seconds_of(machine, timer)
    decoding = sum(second[stage] for stage in DECODING)
    assert decoding == pytest.approx(7.65 - 0.3)  # .1 and .2 of the host's are gone
    assert sum(first[stage] for stage in DECODING) == pytest.approx(7.65)


def test_prefill_is_no_part_of_the_stage_after_it(machine):
    timer = Timer(torch.device("cuda"))
    timer.start()
    machine.give(4.0)
    timer.end(Stage.PREFILL)
    round_of(machine, timer)
    seconds = timer.rounds()[0]
    assert seconds[Stage.PREFILL] == pytest.approx(4.0)
    assert sum(seconds[stage] for stage in DECODING) == pytest.approx(7.65)
    assert seconds[Stage.HOST] == pytest.approx(0.15)


def test_the_clock_that_requests_wait_by_stands_still_while_rounds_are_recorded(machine):
    """On both devices; the recorder's work on the device, which the host waits for at the start of a round, too."""
    for device, recording in (("cpu", 0.7), ("cuda", 0.7), ("cuda", 0.0)):
        machine.now = machine.idle_at = 100.0
        timer = Timer(torch.device(device))
        timer.start()
        for _ in range(3):
            machine.host(2.0)
            timer.end(Stage.VERIFY)
            machine.host(recording)
            if device == "cuda":
                machine.give(1.5)
            timer.end(Stage.RECORD)
            timer.start()
        machine.host(0.25)
        assert timer.now() == pytest.approx(100 + 3 * 2.0 + 0.25)
        assert machine.now > timer.now() + 3 * 0.7 - 1e-9  # negative control: the host's clock went on
