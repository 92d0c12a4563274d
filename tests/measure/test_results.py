"""From records to results.json: every number recomputed, the accounting's product, kills, repeats, failures."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from records import facts, plainly, record, records, text_of

from specbench.measure.record import Record
from specbench.measure.results import facts_of, pace_drift, results
from specbench.measure.schema import FIELDS
from specbench.measure.sums import clusters_of_times, prompts_frame, rounds_frame

NAMES = [
    *("schema_version", "name", "status", "config", "provenance", "alpha", "alpha_counted", "alpha_on_target_text"),
    *("draft_acceptance_rate", "block_efficiency", "cost", "speedup", "operations_factor", "optimal_gamma"),
    *("acceptance", "by_category", "lossless", "throughput", "speedup_over", "bandwidth", "memory", "latency"),
    *("counts", "notes", "details"),
]  # DESIGN, section 4


def total(made: list[Record], method: str, column: str, split: bool = False) -> float:
    """A column's sum over all rounds; `split` evenly among the rows of each call."""
    found = 0.0
    for own in made:
        rounds = getattr(own, method).rounds
        for value, rows in zip(getattr(rounds, column), rounds.rows, strict=True):
            found += value / (rows if split else 1)
    return found


def product(found: dict[str, Any]) -> float:
    return math.prod(factor["value"] for factor in found["speedup"]["accounting"])


def batched(seed: int = 0) -> list[Record]:
    """Two groups of four requests whose calls served four rows each."""
    rng = np.random.default_rng(seed)
    return [record(f"p{i}", 24, 4, 0.7, rng, rows=4, group=i // 4) for i in range(8)]


def test_the_names_are_those_of_the_design() -> None:
    found = results(records(), facts())
    assert [*found] == [*FIELDS] == NAMES and len(NAMES) - 1 <= 24
    assert json.loads(json.dumps(found))["counts"] == found["counts"]
    assert facts_of(json.loads(json.dumps(found))) == facts()


def test_every_number_is_recomputed() -> None:
    made = records(10)
    found = results(made, facts())
    tokens, plain_tokens = (sum(len(getattr(r, way).ids) for r in made) for way in ("speculative", "baseline"))
    seconds, plain = (
        sum(total(made, way, name, True) for name in ("draft", "verify", "accept", "host"))
        for way in ("speculative", "baseline")
    )
    rounds, steps = sum(len(r.speculative.rounds) for r in made if r.speculative), total(made, "speculative", "steps")
    betas = [beta for r in made if r.speculative for own in r.speculative.rounds.betas for beta in own]
    step = total(made, "baseline", "verify") / plain_tokens
    c = total(made, "speculative", "draft") / steps / step
    v = total(made, "speculative", "verify") / rounds / step
    o = (total(made, "speculative", "accept") + total(made, "speculative", "host")) / rounds / step
    alpha = np.mean(betas)
    assert found["alpha"]["mean"] == pytest.approx(alpha) and found["alpha"]["n"] == len(betas)
    accepted, tested = (total(made, "speculative", name) for name in ("accepted", "tested"))
    assert found["alpha_counted"]["mean"] == pytest.approx(accepted / tested)
    assert found["draft_acceptance_rate"] == pytest.approx(accepted / total(made, "speculative", "gamma"))
    assert found["alpha_on_target_text"]["mean"] == pytest.approx(0.7)
    assert found["block_efficiency"]["mean"] == pytest.approx(tokens / rounds)
    cost = {name: found["cost"][name] for name in ("c", "v", "o", "target_step_seconds")}
    assert cost == pytest.approx({"c": c, "v": v, "o": o, "target_step_seconds": step})
    measured = (plain / plain_tokens) / (seconds / tokens)
    assert found["speedup"]["measured"] == pytest.approx(measured)
    prefill = 10 * 0.022
    end_to_end = ((plain + prefill) / plain_tokens) / ((seconds + prefill) / tokens)
    assert found["speedup"]["end_to_end"] == pytest.approx(end_to_end)
    assert found["speedup"]["theorem_3_8"] == pytest.approx((1 - alpha**5) / ((1 - alpha) * (4 * c + 1)))
    assert found["speedup"]["corrected"] == pytest.approx(tokens / rounds / (4 * c + v + o))
    assert found["operations_factor"] == pytest.approx((1 - alpha) * (4 * 0.1 + 5) / (1 - alpha**5))
    gammas = range(200)
    best = max(gammas, key=lambda g: (1 - alpha ** (g + 1)) / ((1 - alpha) * (g * c + 1)))
    assert found["optimal_gamma"] == best
    assert found["throughput"]["speculative_tokens_per_second"] == pytest.approx(tokens / seconds)
    read_bytes = 1e8 * plain_tokens + 1e3 * sum(20 + i for r in made if r.baseline for i in range(len(r.baseline.ids)))
    bandwidth = read_bytes / total(made, "baseline", "verify")
    assert found["bandwidth"]["target_bytes_per_second"] == pytest.approx(bandwidth)
    lengths = [sum(n == k for r in made if r.speculative for n in r.speculative.rounds.accepted) for k in range(5)]
    assert found["acceptance"]["lengths"] == lengths
    third = [own[2] for r in made if r.speculative for own in r.speculative.rounds.betas if len(own) > 2]
    by_place = found["acceptance"]["by_place"][2]
    assert (by_place["place"], by_place["n"]) == (3, len(third)) and by_place["mean"] == pytest.approx(np.mean(third))
    assert found["counts"]["recovered"] + found["counts"]["bonus"] + found["counts"]["accepted"] == tokens


@pytest.mark.parametrize(
    "made", [records(), records(gamma=1), records(6, 17, 7, 0.3), batched()], ids=["4", "1", "7", "rows"]
)
@pytest.mark.parametrize("gamma", [4, None])
def test_the_accounting_multiplies_exactly_to_the_speedup(made: list[Record], gamma: int | None) -> None:
    found = results(made, facts(gamma=gamma))
    assert product(found) == pytest.approx(found["speedup"]["measured"], rel=1e-12)
    names = [factor["factor"] for factor in found["speedup"]["accounting"]]
    assert names == ["theorem_3_8", "tokens", "drafting", "verify", "rest", "plain_rest", "rows"]
    assert all(factor["ci95"] is not None or len({*prompts_frame(made)["group"]}) < 3
               for factor in found["speedup"]["accounting"])  # fmt: skip


def test_a_second_that_is_moved_moves_only_its_factors() -> None:
    """The accounting's control: a slower target call is seen by verify, and what has it as unit, not by drafting."""
    made = records()
    before = {f["factor"]: f["value"] for f in results(made, facts())["speedup"]["accounting"]}
    for own in made:
        assert own.speculative
        own.speculative.rounds.verify = [2 * seconds for seconds in own.speculative.rounds.verify]
        own.speculative = text_of(own.speculative.ids, own.speculative.rounds)
    after = {f["factor"]: f["value"] for f in results(made, facts())["speedup"]["accounting"]}
    assert {name for name in before if not math.isclose(before[name], after[name])} == {"verify", "rest"}
    assert after["verify"] < before["verify"]


def test_without_a_guess_there_are_speedup_and_costs_but_no_prediction() -> None:
    made = records(4)
    for own in made:
        assert own.baseline
        own.speculative = text_of(own.baseline.ids, plainly(32, np.random.default_rng(1), 1.0, 1))
    found = results(made, facts(gamma=0))
    assert found["alpha"] == {"mean": None, "stderr": None, "n": 0} and found["cost"]["c"] is None
    assert found["speedup"]["accounting"] == [] and found["speedup"]["theorem_3_8"] is None
    assert found["optimal_gamma"] is None and found["operations_factor"] is None
    assert found["speedup"]["measured"] > 0 and found["speedup"]["corrected"] is not None
    json.dumps(found, allow_nan=False)


def test_failed_prompts_are_counted_and_left_out() -> None:
    made = records(6)
    made[2] = replace(made[2], speculative=None, failed="RuntimeError: no room")
    found = results(made, facts())
    assert found["counts"]["prompts"] == 5 and found["counts"]["failed"] == 1
    assert any("no room" in note for note in found["notes"])
    rest = results([own for own in made if own.failed is None], facts())
    assert all(found[name] == rest[name] for name in ("alpha", "speedup", "cost"))
    with pytest.raises(RuntimeError, match="no room"):
        results([made[2]], facts())


def test_peers_are_compared_on_the_prompts_that_they_answered() -> None:
    made = records(6)
    for own in made[:5]:
        own.peers = {"generate": {"tokens": 32, "seconds": 0.4, "text": "", "ids": []}}
    made[5].peers = {"generate": {"error": "OutOfMemoryError: 2 GiB"}}
    found = results(made, facts())
    ours = sum(own.speculative.seconds for own in made[:5] if own.speculative) / (5 * 32)
    assert found["speedup_over"]["generate"]["measured"] == pytest.approx((0.4 / 32) / ours)
    assert found["throughput"]["generate_tokens_per_second"] == pytest.approx(80)
    assert any("generate failed for 1 of 6" in note for note in found["notes"])
    assert not any("another text" in note for note in found["notes"])
    noted = results(made, facts(greedy=True))["notes"]  # at temperature 0 all decoders have one text
    assert any("generate decoded another text than plain decoding for 5 of 6" in note for note in noted)


def test_processes_are_the_clusters_of_times_and_prompts_of_acceptance() -> None:
    made = [replace(own, process=process) for process in range(4) for own in records(5, seed=process)]
    assert {*clusters_of_times(prompts_frame(made))} == {0, 1, 2, 3}
    found = results(made, facts())
    assert found["details"]["processes"] == found["details"]["clusters"] == 4 and found["counts"]["prompts"] == 20
    shards = [replace(own, id=f"{own.id}/{process}", prompt_id=f"{own.id}/{process}", process=process)
              for process in range(4) for own in records(5, seed=process)]  # fmt: skip
    assert len({*clusters_of_times(prompts_frame(shards))}) == 20


def test_requests_that_were_decoded_together_are_one_cluster_with_all_turns_of_their_prompts() -> None:
    made = batched()
    assert len({*clusters_of_times(prompts_frame(made))}) == 2
    turn = replace(made[0], id="p0/2", turn=1, group=2), replace(made[7], id="p7/2", turn=1, group=3)
    assert len({*clusters_of_times(prompts_frame([*made, *turn]))}) == 2
    linked = replace(made[0], id="p0/2", turn=1, group=2), replace(made[7], id="p7/2", turn=1, group=2)
    assert len({*clusters_of_times(prompts_frame([*made, *linked]))}) == 1


def test_a_pace_that_changes_is_a_note_and_never_instead_of_an_answer() -> None:
    made = records(16)
    assert pace_drift(made[:7]) is None and abs(pace_drift(made) or 1) < 0.15
    for own in made[8:]:
        assert own.baseline and own.speculative
        own.baseline.seconds *= 1.5
        own.speculative.seconds *= 1.5
    found = results(made, facts())
    assert pace_drift(made) == pytest.approx(0.5, abs=0.1) and found["speedup"]["ci95"] is not None
    assert any("changed by" in note for note in found["notes"])


def test_runs_of_the_same_prompts_have_one_hash_of_them() -> None:
    made = records(4)
    found = results(made, facts())["details"]["prompts"]
    assert results(made[::-1], facts())["details"]["prompts"] == found and len(found["sha256"]) == 64
    other = [*made[1:], replace(made[0], prompt="another")]
    assert results(other, facts())["details"]["prompts"]["sha256"] != found["sha256"]


def test_categories_are_the_results_of_their_own_prompts() -> None:
    made = records(12)
    found = {row["category"]: row for row in results(made, facts())["by_category"]}
    assert [*found] == ["code", "prose"]
    for name, row in found.items():
        own = results([each for each in made if each.category == name], facts())
        assert row["alpha"] == own["alpha"] and row["speedup"]["measured"] == own["speedup"]["measured"]
        assert row["prompts"] == own["counts"]["prompts"] and row["block_efficiency"] == own["block_efficiency"]
    assert results([replace(own, category="") for own in made], facts())["by_category"] == []


def test_rounds_are_a_table() -> None:
    made = records(3)
    frame = rounds_frame(made)
    first = made[0].speculative
    assert first is not None
    own = frame[(frame["id"] == "p0") & (frame["method"] == "speculative")]
    assert own["tokens"].tolist() == first.rounds.tokens and own["betas"].tolist() == first.rounds.betas
    assert own["position"].tolist() == [sum(first.rounds.tokens[:i]) for i in range(len(first.rounds))]
    assert len(frame) == sum(len(t.rounds) for r in made for t in (r.speculative, r.baseline) if t)
    assert "betas" in rounds_frame([])
