"""Rounds that are launched ahead, on a CUDA device that runs on the CPU: in which order the host launches and waits."""

import functools
from unittest import mock

import pytest
from cuda_on_cpu import Device, cuda_on_cpu
from fake_cuda_cases import Case, Decoder, violations

from specbench.decoding import transfers
from specbench.decoding.state import Job
from specbench.executors.cudagraph import Captured, CudaGraphExecutor

READS = ("decoding.transfers.Arriving.tolist", "decoding.state.State.synchronise")
CLOCK = "decoding.timer.Timer._wait"


def order_on_cuda(number_text, drafter="random", rows=1):
    """New tokens of texts on a CUDA device, and the captured functions and waits in the order of launches."""
    order, true = [], Captured.__call__

    def launched(self, *arguments):
        order.append(self.function.__name__)
        return true(self, *arguments)

    def waited(what, *copies):
        Device.wait(device, what, *copies)
        order.append(device.waits[-1].place)

    with cuda_on_cpu() as device:
        decode = Decoder(Case(drafter, executor="cudagraph", rows=rows, verifier="iterative"), device, number_text)
        with mock.patch.object(Captured, "__call__", launched), mock.patch.object(device, "wait", waited):
            end = 20 if rows == 1 else 34
            found = decode.session.decode([Job([3, 4], end, 9), Job([3], end - 4, 8)][:rows], True, 60)
    return [request.tokens for request in found.requests], order


plain_order = functools.cache(order_on_cuda)  # without a change of the decoder


def how_late(order):
    """Of each read of a round, in order, how many rounds were launched after it."""
    verdicts, found = 0, []
    for name in order:
        verdicts += name == "accept_and_commit"
        if name in READS:
            found.append(verdicts - 1 - len(found))
    return verdicts, found


@pytest.mark.parametrize(("drafter", "rows"), [
    ("random", 1), *(pytest.param(drafter, 2, marks=pytest.mark.slow) for drafter in ("model", "medusa"))
])  # fmt: skip
def test_on_cuda_the_host_waits_for_a_round_when_the_next_is_launched(drafter, rows, number_text, monkeypatch):
    tokens, order = plain_order(number_text, drafter, rows)
    rounds, late = how_late(order)
    assert len(late) == rounds and set(late) == {0, 1} and sum(late) > 2
    first = late.index(1)
    assert late[first : first + sum(late)] == [1] * sum(late)  # in one piece
    reads = [i for i, name in enumerate(order) if name in READS]
    piece = order[reads[first] : reads[first + sum(late) - 1]]
    assert CLOCK not in piece and CLOCK in order[: reads[first]]
    # The recorder's graph of the later round too is launched before the wait.
    assert all(order[i - 1] == "round_numbers" for i, by in zip(reads, late, strict=True) if by)
    # Negative control: rounds that are read at once.
    monkeypatch.setattr(CudaGraphExecutor, "runs_ahead", lambda *_: False)
    same, order = order_on_cuda(number_text, drafter, rows)
    assert same == tokens and how_late(order) == (rounds, [0] * rounds)


def test_on_cuda_a_copy_that_is_read_too_early_is_noticed(number_text, monkeypatch):
    """Negative control: without the event, the host reads what the copy held before."""
    tokens, _ = plain_order(number_text)
    monkeypatch.setattr(transfers.Arriving, "tolist", lambda self: self._here.tolist())
    with pytest.raises((AssertionError, IndexError, ValueError)):
        assert order_on_cuda(number_text)[0] == tokens


def test_on_cuda_the_table_of_waits_holds_for_rounds_ahead(number_text):
    case = Case("random", executor="cudagraph", rows=1)
    with cuda_on_cpu() as device:
        decode = Decoder(case, device, number_text)
        long = [Job([3, 4], 20, 9)]
        found, _ = violations(case, device, lambda: decode.session.decode(long, True, 60))
        assert found == [] and any(wait.place == READS[0] for wait in device.waits)
