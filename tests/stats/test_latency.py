"""Waiting times and goodput of hand-made requests, segments of several rates, and how they are shown."""

import numpy as np
import pytest
from rich.console import Console
from small_runs import parts_of

from specbench.decoding.scheduler import RequestTimes
from specbench.decoding.timer import Lap
from specbench.results.latency_table import load_table
from specbench.results.writer import write_result
from specbench.run.batching import Requests
from specbench.run.run import run
from specbench.stats.latency import WaitLimits, by_rate, enough, latency
from specbench.stats.records import DecodedRequest, Group, Result, Round, Rounds, call_seconds


def request(arrived, admitted, first, finished, counts):
    """A request whose rounds bring so many tokens."""
    rounds = [Round(0, 0, 0, 0, 0, tokens, 0, 0, 0, []) for tokens in counts]
    return DecodedRequest([1] * sum(counts), rounds, RequestTimes(arrived, admitted, first, finished))


def group(ours, plain, rate=None):
    return Group([Result(None, 99, *both) for both in zip(ours, plain, strict=True)], None, None, rate)


def test_the_tokens_of_the_first_round_are_no_later_tokens():
    ours = request(1.0, 1.5, 2.0, 5.0, [4, 3, 3])  # six tokens in 3 s after the first round
    plain = request(1.0, 2.0, 3.0, 12.0, [1] * 10)
    found = latency([group([ours], [plain])], rows=1)
    assert found["speculative"].per_token["p50"] == pytest.approx(3 / 6)  # not 3 / 9, which nobody could have waited
    assert found["baseline"].per_token["p50"] == pytest.approx(9 / 9)
    assert found["speculative"].queue["p50"] == 0.5 and found["baseline"].first_token["p50"] == 2.0


def test_the_tokens_of_a_round_arrive_in_one_burst():
    """By hand: rounds of 1, 3 and 2 s after a prompt of .5 s; the third waits for another prompt of .25 s."""
    seconds = [{Lap.PREFILL: 0.5, Lap.DRAFT: 0.25, Lap.VERIFY: 0.75, Lap.RECORD: 9.0, Lap.WALL: 1.0},
               {Lap.VERIFY: 3.0, Lap.IDLE: 9.0}, {Lap.PREFILL: 0.25, Lap.HOST: 2.0}]  # fmt: skip
    rounds = [Round(0, 0, 0, 0, 0, tokens, 0, 0, 0, [], None, {}, laps)
              for tokens, laps in zip((4, 2, 1), seconds, strict=True)]  # fmt: skip
    for stored in (rounds, Rounds(rounds)):
        assert call_seconds(stored).tolist() == [1.5, 3.0, 2.25]
        ours, plain = DecodedRequest([1] * 7, stored), DecodedRequest([1], rounds[:1])
        found = latency([Group([Result(None, 99, ours, plain)], None, None)], rows=1)
        told = found["speculative"]
        assert told.inter_token == pytest.approx(
            {"mean": 2.625, "p50": 2.625, "p90": 2.925, "p95": 2.9625, "p99": 2.9925})  # fmt: skip
        assert told.first_token["p50"] == 1.5 and told.queue["p50"] is None
        assert told.per_token["p50"] == pytest.approx(5.25 / 3)
        assert told.time_per_output_token["mean"] == pytest.approx(5.25 / 6)
        assert found["baseline"].inter_token["p50"] is None  # one token
    two = latency([Group([Result(None, 99, ours, ours)] * 2, None, None)], rows=2)
    assert two["speculative"].first_token["p50"] is None and two["speculative"].inter_token["p50"] == 2.625


def test_a_text_of_one_round_has_no_later_tokens():
    only = request(0.0, 0.0, 1.0, 1.0, [4])
    (found,) = by_rate([group([only], [only])], 1, WaitLimits(per_token=1e-9))
    assert found.decoders["speculative"].latency.per_token == dict.fromkeys(("p50", "p90", "p95", "p99"))
    assert found.decoders["speculative"].goodput.share == 1 and found.ratio["per_token"]["p50"] is None


def test_the_first_requests_of_a_segment_find_empty_rows_and_are_not_counted():
    waits = [request(0.0, wait, 1.0 + wait, 2.0 + wait, [1, 1]) for wait in (0.0, 0.0, 7.0, 9.0)]
    assert latency([group(waits, waits)], rows=2)["baseline"].queue["p50"] == 8
    assert latency([group(waits, waits)], rows=1)["baseline"].queue["p50"] == 7
    assert latency([group(waits[2:], waits[2:])], rows=2)["baseline"].queue["p50"] == 8  # there are no others


def test_goodput_counts_what_is_within_both_limits():
    first, per_token = (0.5, 2.0, 0.9, 0.9), (0.1, 0.1, 0.4, 0.1)
    ours = [request(0.0, 0.0, f, f + 9 * p, [1] * 10) for f, p in zip(first, per_token, strict=True)]
    late = [request(0.0, 0.0, 5.0, 9.0, [1] * 10)] * 4
    (found,) = by_rate([group([ours[0], *ours], [late[0], *late])], 1, WaitLimits(first_token=1.0, per_token=0.2))
    good = found.decoders["speculative"].goodput
    assert good.share == 0.5 and good.tokens_per_second == pytest.approx(20 / 4.5)  # the last token comes at .9 + 3.6
    assert found.decoders["baseline"].goodput.share == 0 and found.ratio["first_token"]["p50"].factor == 0.18
    (one,) = by_rate([group([ours[0], *ours], [late[0], *late])], 1, WaitLimits(first_token=1.0))
    assert one.decoders["speculative"].goodput.share == 0.75


def segment(generator, slow, rate=4.0):
    """60 requests whose waits are exponential; a slow segment is slow for both decoders. Ours is twice as fast."""
    waits = slow * generator.exponential(size=61)
    ours, plain = ([request(0, w, w + 0.1, w + 1, [1, 1]) for w in waits * scale] for scale in (0.5, 1.0))
    return group(ours, plain, rate)


def test_errors_are_those_of_whole_segments_and_ratios_know_that_decoders_shared_them():
    generator = np.random.default_rng(0)
    slow = np.geomspace(0.4, 2.5, 8)
    groups = [segment(generator, each) for each in slow]
    (found,) = by_rate(groups, 1, WaitLimits(first_token=1.0))
    (low, high), ratio = found.decoders["baseline"].ci95["queue"]["p50"], found.ratio["queue"]["p50"]
    expected = 2 * 2.36 * np.log(slow).std() / np.sqrt(7)  # Student's interval of eight segments
    assert 0.6 * expected < np.log(high / low) < 1.5 * expected
    assert ratio.factor == pytest.approx(0.5) and np.log(ratio.ci95[1] / ratio.ci95[0]) < 0.01
    assert found.decoders["baseline"].ci95["queue"]["p99"] is None  # of 480 requests fewer than five are beyond it
    assert found.decoders["baseline"].goodput.ci95["share"] is not None
    (few,) = by_rate(groups[:4], 1, WaitLimits())
    assert few.decoders["baseline"].ci95["queue"]["p50"] is None and few.decoders["baseline"].latency.queue["p50"] > 0
    alike = [segment(generator, 1.0) for _ in range(8)]  # negative control
    (found,) = by_rate(alike, 1, WaitLimits())
    assert np.log(np.divide(*found.decoders["baseline"].ci95["queue"]["p50"][::-1])) < np.log(high / low) / 2


def test_a_percentile_needs_five_requests_beyond_it():
    found = [enough(p, n) for p, n in ((50, 9), (50, 10), (90, 49), (90, 50), (99, 499), (99, 500))]
    assert found == [False, True] * 3


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    parts = parts_of("data.limit=16", "max_new_tokens=4", "batch_size=2", "workload=poisson", "workload.rate=[40,400]",
                     "workload.slo_first_token=1e3", "workload.slo_per_token=1e-6", "verdict_tokens=0", "gamma=1",
                     "executor=eager")  # fmt: skip
    assert [(wanted.rate, len(wanted.requests)) for wanted in Requests(parts).groups()] == [(40, 8), (400, 8)]
    result, record = run(parts, folder)
    write_result(result, record, "digest", folder, parts.target.tokenizer)
    return result, record, folder


def shown(result):
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(load_table(result))
    return console.export_text()
