"""The clock of both decoders on a simulated CUDA device: what host and device do is known to the microsecond.

The host spends time in `host`, the device works off what it is given in order, and an event is the moment at which the
device reaches it. So the true length of a round is known, and the stopwatch must find it.
"""

import pytest
import torch
from graph_memory import SimulatedGraphs

from specbench.decoding import timer as clock
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
    monkeypatch.setattr(clock.time, "perf_counter", lambda: machine.now)
    monkeypatch.setattr(torch.cuda, "Event", machine.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: str(device))
    monkeypatch.setattr(torch.cuda, "synchronize", machine.wait)
    return machine


def round_of(machine, watch, feed=0.1, draft=5.0, verify=2.0, launches=True):
    """A round as `decode_speculative` times it: every call is prepared for .2 s by the host before it is launched; the
    verdict of .3 s is waited for, and the recorder is not."""
    machine.host(feed)
    watch.end(Stage.HOST)
    for lap, work in ((Stage.DRAFT, draft), (Stage.VERIFY, verify), (Stage.ACCEPT, 0.3)):
        machine.host(0.2)
        if launches:
            watch.launch()
        machine.give(work)
        if lap is Stage.ACCEPT:
            machine.wait()
        watch.end(lap)
    machine.host(0.05)  # the policy learns
    watch.end(Stage.HOST)
    machine.give(1.5)  # the recorder
    watch.end(Stage.RECORD)
    watch.start()


def laps_of(machine, watch, rounds=3, **what):
    watch.start()
    for _ in range(rounds):
        round_of(machine, watch, **what)
    return watch.rounds()[:rounds]


def test_laps_end_where_the_device_begins_the_next(machine):
    """.1 of the feed, .2 before the draft and .05 of the policy are HOST; the other calls are prepared while the device
    drafts."""
    for laps in laps_of(machine, Timer(torch.device("cuda:1"))):
        assert laps == pytest.approx({"host": 0.35, "draft": 5.0, "verify": 2.0, "accept": 0.3, "record": 1.5})


def test_what_the_host_prepares_after_the_device_is_done_is_host_time(machine):
    for laps in laps_of(machine, Timer(torch.device("cuda")), draft=0.05, verify=0.1):
        assert laps == pytest.approx({"host": 0.1 + 0.2 + 0.15 + 0.1 + 0.05, "draft": 0.05, "verify": 0.1,
                                      "accept": 0.3, "record": 1.5})  # fmt: skip


def test_without_launches_preparation_counts_as_the_call_as_in_eager_mode(machine):
    (laps, *_) = laps_of(machine, Timer(torch.device("cuda")), launches=False)
    assert laps[Stage.DRAFT] == pytest.approx(5.2) and laps[Stage.HOST] == pytest.approx(0.15)


def test_a_clock_that_does_not_wait_for_the_recorder_hides_host_time(machine):
    """Negative control: what this test file would find in the clock as it was."""
    watch = Timer(torch.device("cuda"))
    watch._wait = lambda: None
    first, second, _ = laps_of(machine, watch)
    decoding = sum(second[lap] for lap in DECODING)
    assert decoding == pytest.approx(7.65 - 0.3)  # .1 and .2 of the host's are gone
    assert sum(first[stage] for stage in DECODING) == pytest.approx(7.65)


def test_prefill_is_no_part_of_the_lap_after_it(machine):
    watch = Timer(torch.device("cuda"))
    watch.start()
    machine.give(4.0)
    watch.end(Stage.PREFILL)
    round_of(machine, watch)
    laps = watch.rounds()[0]
    assert laps[Stage.PREFILL] == pytest.approx(4.0)
    assert sum(laps[stage] for stage in DECODING) == pytest.approx(7.65) and laps[Stage.HOST] == pytest.approx(0.35)


def test_only_the_first_launch_of_a_lap_counts(machine):
    """A draft may consist of many graphs: they are the draft."""
    watch = Timer(torch.device("cuda"))
    watch.start()
    machine.host(0.2)
    for _ in range(3):
        watch.launch()
        machine.give(1.0)
        machine.wait()
        machine.host(0.1)
    watch.end(Stage.DRAFT)
    laps = watch.rounds()[0]
    assert laps[Stage.HOST] == pytest.approx(0.2) and laps[Stage.DRAFT] == pytest.approx(3.3)


def test_a_cpu_has_one_clock(machine):
    watch = Timer(torch.device("cpu"))
    watch.start()
    machine.host(2.0)
    watch.launch()
    machine.host(1.0)
    watch.end(Stage.VERIFY)
    machine.host(0.5)
    watch.end(Stage.RECORD)
    assert watch.rounds() == [{Stage.VERIFY: 3.0, Stage.RECORD: 0.5}]


def test_the_clock_that_requests_wait_by_stands_still_while_rounds_are_recorded(machine):
    """On both devices; the recorder's work on the device, which the host waits for at the start of a round, too."""
    for device, recording in (("cpu", 0.7), ("cuda", 0.7), ("cuda", 0.0)):
        machine.now = machine.idle_at = 100.0
        watch = Timer(torch.device(device))
        watch.start()
        for _ in range(3):
            machine.host(2.0)
            watch.end(Stage.VERIFY)
            machine.host(recording)
            if device == "cuda":
                machine.give(1.5)
            watch.end(Stage.RECORD)
            watch.start()
        machine.host(0.25)
        assert watch.now() == pytest.approx(100 + 3 * 2.0 + 0.25)
        assert machine.now > watch.now() + 3 * 0.7 - 1e-9  # negative control: the host's clock went on


def test_graphs_say_when_they_are_launched():
    """Once for each replay, before it changes the result; never to a clock that has ended."""
    told, executor = [], SimulatedGraphs()
    double = executor.compiled(lambda x: x * 2)
    result = double(torch.tensor([3.0]))  # the graph's own, which each replay overwrites
    with executor.timed(lambda: told.append(result.tolist())):
        double(torch.tensor([4.0]))
        double(torch.tensor([5.0]))
    assert told == [[6.0], [8.0]] and result.tolist() == [10.0]
    double(torch.tensor([6.0]))
    assert len(told) == 2
