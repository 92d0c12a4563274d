"""The whole command on the shipped pair: files, keys, loggers, multiruns, and what goes wrong."""

import gc
import json
import weakref

import pyarrow.parquet
import pytest
import torch
import yaml
from choosing import only, slow_unless
from small_runs import call, composed, fail_where, parts_of, small

from specbench.config.build import build
from specbench.config.memory import Budget, give_back, size
from specbench.config.validate import check
from specbench.decoding.noise import prompt_key
from specbench.errors import ConfigError
from specbench.models.sizes import ModelSize
from specbench.results.loggers.wandb_records import summary
from specbench.results.reader import load_runs
from specbench.results.recommendation import verdict_sentence
from specbench.run.batching import group_size
from specbench.run.decoder import Session
from specbench.run.run import run, run_in_turn
from specbench.run.warm_up import going_on

RESULT_KEYS = {
    "alpha": {"mean", "stderr", "n"},
    "alpha_counted": {"mean", "stderr", "n"},
    "block_efficiency": {"mean", "stderr", "n"},
    "cost": {"c", "v", "o", "target_step_seconds", "drafter_step_seconds", "verify_seconds"},
    "speedup": {"measured", "ci95", "end_to_end", "theorem_3_8", "corrected"},
    "lossless": {"expected", "passed", "method", "statistic", "threshold", "detail"},
    "throughput": {"speculative_tokens_per_second", "baseline_tokens_per_second"},
    "bandwidth": {"target_bytes_per_second", "drafter_bytes_per_second", "measured_peak_bytes_per_second"},
    "memory": {"peak_bytes", "weights_bytes", "kv_bytes"},
    "provenance": {"git_sha", "dirty", "versions", "device", "threads", "argv", "started", "seconds"},
}
SCALARS = {"schema_version", "speedup_over", "recording", "name", "config", "draft_acceptance_rate",
           "operations_factor", "optimal_gamma"}  # fmt: skip
PLOTTED = {"alpha", "c", "v", "o", "block_efficiency", "speedup/measured", "speedup/theorem_3_8", "speedup/corrected",
           "counts/tokens", "throughput/speculative_tokens_per_second"}  # fmt: skip


def test_a_run_leaves_every_file_with_every_field(no_figures, monkeypatch, tmp_path, capsys):
    out = tmp_path / "here"
    assert call(small(f"hydra.run.dir={out}"), monkeypatch, tmp_path) == 0
    result = json.loads((out / "results.json").read_text())
    for key, fields in RESULT_KEYS.items():
        assert fields <= set(result[key])
    assert set(result) >= SCALARS and set(summary(result)) >= PLOTTED
    counts = result["counts"]
    assert counts["prompts"] == 2 and counts["tokens"] == 24 and counts["failed"] == 0
    assert counts["tokens"] == counts["accepted"] + counts["recovered"] + counts["bonus"]
    assert result["speedup"]["ci95"] is None  # of two prompts
    assert result["lossless"]["expected"] and result["lossless"]["verdict"] == "inconclusive"  # of 24 tokens
    assert result["alpha"]["mean"] != result["draft_acceptance_rate"]

    rounds = pyarrow.parquet.read_table(out / "rounds.parquet").to_pylist()
    assert len(rounds) == counts["rounds"]
    assert sum(len(r["beta"]) for r in rounds) == counts["tested"] == result["alpha"]["n"]
    assert sum(sum(r["beta"]) for r in rounds) / counts["tested"] == pytest.approx(result["alpha"]["mean"])
    parts = ("draft_seconds", "verify_seconds", "accept_seconds", "host_seconds")
    assert {"prompt", "position", "gamma", "accepted", *parts} <= set(rounds[0])
    assert all(r["wall_seconds"] == pytest.approx(sum(r[part] for part in parts)) for r in rounds)
    assert result["machine"]["probes"] == 3  # before, between and after two prompts
    assert result["machine"]["steady"] is not bool(result["machine"]["reasons"])
    assert result["cost"]["o_wall"] == pytest.approx(result["cost"]["o"])
    assert result["speedup"]["wall"] == pytest.approx(result["speedup"]["measured"])

    prompts = [json.loads(line) for line in (out / "prompts.jsonl").read_text().splitlines()]
    assert len(prompts) == 2 and all(p["prompt"] and p["output"] and p["decode_seconds"] > 0 for p in prompts)
    assert yaml.safe_load((out / "config.yaml").read_text())["max_new_tokens"] == 12
    assert (out / "run.log").exists()
    assert len(list(out.glob("wandb/offline-run-*/run-*.wandb"))) == 1
    shown = capsys.readouterr().out
    assert "predicted, Theorem 3.8" in shown and "lossless: inconclusive" in shown
    told = verdict_sentence(result)
    joined = " ".join(shown.split())
    assert joined.index(told) < joined.index("predicted, Theorem 3.8")
    assert told in (out / "run.log").read_text()


def test_what_a_job_held_is_given_back():
    """Models and executors refer to each other: without a collection they stay."""
    parts = parts_of("temperature=0", "executor=eager")
    parts.target.executor.own = parts.target  # as the captured functions of an executor do
    module = weakref.ref(parts.target.module)
    gc.disable()
    try:
        del parts
        assert module() is not None  # negative control
        give_back()
    finally:
        gc.enable()
    assert module() is None


@pytest.mark.slow
def test_a_sweep_in_one_process_needs_nothing_of_the_ring(monkeypatch, tmp_path):
    """The core's own callback lists no jobs for other processes."""
    own = "hydra.callbacks.sweep._target_=specbench.run.sweep.Sweep"
    words = small("gamma=1,3", "name=s", "temperature=0", "executor=eager", "drafter=random", "logger=none",
                  "max_new_tokens=4", "data.limit=1", own)  # fmt: skip
    assert call(["-m", *words], monkeypatch, tmp_path) == 0
    sweep = tmp_path / "outputs" / "s"
    assert len((sweep / "summary.csv").read_text().splitlines()) == 3 and not [*sweep.glob(".sweep/*/jobs.json")]


def test_a_multirun_skips_finished_jobs_and_writes_a_table(monkeypatch, tmp_path, capsys):
    few = small("gamma=1,3", "name=sweep", "temperature=0", "verdict_tokens=0", "data.limit=1", "logger=none",
                "max_new_tokens=4")  # fmt: skip
    arguments, freed = ["-m", *few], []
    monkeypatch.setattr("specbench.config.memory.give_back", lambda: freed.append("memory"))
    assert call(arguments, monkeypatch, tmp_path) == 0 and len(freed) == 2  # before each job
    folders = [path.parent for path in sorted((tmp_path / "outputs" / "sweep").glob("*/results.json"))]
    assert len(folders) == 2
    stamps = [(f / "results.json").stat().st_mtime_ns for f in folders]
    rows = (tmp_path / "outputs" / "sweep" / "summary.csv").read_text().splitlines()
    assert rows[0].startswith("gamma,alpha") and len(rows) == 3
    shown = capsys.readouterr().out
    assert "1/2 gamma=1: " in shown and "2/2 gamma=3: " in shown and "predicted, Theorem 3.8" not in shown
    assert call(arguments, monkeypatch, tmp_path) == 0
    assert capsys.readouterr().out.count("finished before, skipped") == 2
    assert [(f / "results.json").stat().st_mtime_ns for f in folders] == stamps
    first = [(f / "results.json").read_bytes() for f in folders]
    assert call([*arguments, "gamma=1", "force=true"], monkeypatch, tmp_path) == 0  # another sweep of this name
    assert (folders[0] / "results.json").stat().st_mtime_ns > stamps[0]
    assert (folders[0] / "earlier-1" / "results.json").read_bytes() == first[0]
    assert (folders[1] / "results.json").read_bytes() == first[1] and not (folders[1] / "earlier-1").exists()
    own = (tmp_path / "outputs" / "sweep" / "summaries").iterdir()
    assert sorted(len(path.read_text().splitlines()) for path in own) == [2, 3]
    assert "INFO" in (folders[0] / "run.log").read_text()
    assert len(load_runs(tmp_path / "outputs" / "sweep")) == 2


def test_a_failed_prompt_is_recorded_and_the_rest_is_measured(monkeypatch, tmp_path):
    parts = parts_of("data.limit=3", "temperature=0")
    doomed = prompt_key(0, list(parts.prompts)[1].id)
    fail_where(monkeypatch, lambda session, jobs: jobs[0].key == doomed)
    result, _ = run(parts, tmp_path)
    assert result.counts.failed == 1 and result.counts.prompts == 2 and result.counts.tokens == 24
    lines = [json.loads(line) for line in (tmp_path / "prompts.jsonl.part").read_text().splitlines()]
    assert lines[1]["error"] == "RuntimeError: out of memory" and "output" not in lines[1]


FULL = [torch.OutOfMemoryError("full"), MemoryError(), RuntimeError("can't allocate memory")]


@pytest.mark.parametrize("error", only(FULL[:1], FULL))
def test_rows_are_halved_where_memory_runs_out(error, monkeypatch, tmp_path):
    """Texts are those of a run with as many rows as fit, and no request is lost."""
    words = ("data.limit=4", "temperature=0", "max_new_tokens=4")
    rows, decode = [], Session.decode

    def fails(session, jobs, speculative, *others, **options):
        rows.append(session.rows)
        if session.rows > 2:
            raise error
        return decode(session, jobs, speculative, *others, **options)

    texts = []
    for most in (2, 8):
        if most == 8:
            monkeypatch.setattr(Session, "decode", fails)
        result, record = run(parts_of(*words, f"batch_size={most}"), tmp_path)
        texts.append([(r.request.id, [*r.speculative.tokens]) for r in record.results])
        assert (result.counts.prompts, result.counts.failed, result.lossless.passed) == (4, 0, True)
    assert texts[0] == texts[1] and [*dict.fromkeys(rows)] == [8, 4, 2]
    assert [note.partition(": ")[2] for note in result.notes if "memory ran out" in note] == [
        "from there on 4 rows decode together, not 8", "from there on 2 rows decode together, not 4"]  # fmt: skip


@pytest.mark.slow
def test_rows_are_halved_though_the_way_that_decodes_plainly_for_all_has_stopped(monkeypatch, tmp_path):
    """Else its rows stay as many, and memory runs out for ever."""
    decode, full = Session.decode, []

    def fails(session, *others, **options):
        if full and session.rows > 1:
            raise FULL[0]
        return decode(session, *others, **options)

    def stops(records):
        full.append(True)
        assert len(full) < 9
        return [0]

    ways = [parts_of("data.limit=16", "max_new_tokens=2", "batch_size=2", f"gamma={gamma}") for gamma in (1, 2)]
    monkeypatch.setattr(Session, "decode", fails)
    runs = [(parts, tmp_path / str(place), lambda group: None) for place, parts in enumerate(ways)]
    found = [record for _, record in run_in_turn([runs], lambda *told: None, stops=stops)]
    assert [len(record.results) for record in found] == [8, 16] and not found[1].failures


LONG = "x = 1\n" * 600


@pytest.mark.parametrize(("turns", "too_long", "prompts"), [
    slow_unless(False, [[LONG], ["def f():"], ["def g(x):"]], 1, 2),
    ([[LONG, "def f():"], ["def g():"]], 2, 1),  # the turn after it cannot be asked either
])  # fmt: skip
def test_turns_that_do_not_fit_are_counted(turns, too_long, prompts, tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"question_id": n, "turns": own}) + "\n" for n, own in enumerate(turns)))
    result, _ = run(parts_of("data=questions", f"data.path={path}", "data.limit=3", "max_new_tokens=4"), tmp_path)
    assert (result.counts.too_long, result.counts.prompts) == (too_long, prompts)


def test_later_turns_follow_the_answers(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({"question_id": 7, "category": "code", "turns": ["def f(x):", "def g(x):"]}))
    result, record = run(parts_of("data=questions", f"data.path={path}", "temperature=0"), tmp_path)
    first, second = (found.request for found in record.results)
    assert (first.id, second.id) == ("7/1", "7/2") and result.counts.prompts == 2
    records = [json.loads(line) for line in (tmp_path / "prompts.jsonl.part").read_text().splitlines()]
    assert second.text == f"def f(x):\n\n{records[0]['baseline_output']}\n\ndef g(x):"


@pytest.mark.slow
def test_stop_strings_end_both_decoders_at_the_same_token(tmp_path):
    free, _ = run(parts_of("temperature=0", "max_new_tokens=40"), tmp_path)
    parts = parts_of("temperature=0", "max_new_tokens=40", "stop=['\\n','self']")
    stopped, record = run(parts, tmp_path)
    assert stopped.lossless.passed and stopped.counts.tokens < free.counts.tokens
    for found in record.results:
        text = parts.target.tokenizer.decode(found.speculative.tokens)
        without_last = parts.target.tokenizer.decode(found.speculative.tokens[:-1])
        assert ("\n" in text or "self" in text) and not ("\n" in without_last or "self" in without_last)


def test_lenience_at_temperature_zero_leaves_the_guesses_argmax(tmp_path):
    """Only the target's p is taken before argmax."""
    (tmp_path / "text.py").write_text("self " * 50 + "def ")
    parts = parts_of("lenience=0.3", "temperature=0", "max_new_tokens=4", "drafter=unigram",
                     f"drafter.path={tmp_path / 'text.py'}")  # fmt: skip
    guesses = []
    plain = parts.drafter.propose

    def propose(state, gamma):
        draft = plain(state, gamma)
        guesses.extend(draft.tokens.flatten().tolist())
        return draft

    parts.drafter.propose = propose
    run(parts, tmp_path)
    assert set(guesses) == {int(parts.drafter.unigram.argmax())}
    assert parts.target.sampling.before_argmax


@pytest.mark.slow
def test_batches_change_no_token(tmp_path):
    singles, alone = run(parts_of("data.limit=3"), tmp_path)
    together, batch = run(parts_of("data.limit=3", "batch_size=3"), tmp_path)
    assert len(batch.groups) == 1 and len(alone.groups) == 3
    assert [r.speculative.tokens for r in batch.results] == [r.speculative.tokens for r in alone.results]
    assert together.counts.tokens == singles.counts.tokens
    assert together.counts.rounds == singles.counts.rounds
    assert together.alpha.mean == pytest.approx(singles.alpha.mean, abs=1e-4)


def test_groups_are_equal_and_many_where_there_are_enough_requests():
    sizes = {requests: group_size(requests, 8) for requests in (0, 5, 32, 63, 64, 256, 512, 1024, 5000)}
    assert sizes == {0: 1, 5: 5, 32: 32, 63: 63, 64: 32, 256: 32, 512: 64, 1024: 128, 5000: 125}
    assert {group_size(requests, 1) for requests in (1, 7, 5000)} == {1}


@pytest.mark.slow
def test_rows_of_a_calibration_read_different_prompts(tmp_path, monkeypatch):
    """A policy that chooses by cost sees a batch as the run decodes it, and as much text as fits into its time."""
    overrides = ("gamma_policy=optimal", "gamma_policy.largest=2", "batch_size=2", "data.limit=4", "temperature=0")
    calibrated, plain = [], Session.decode

    def decode(self, jobs, speculative, *others, policy=None, **options):
        if policy is not None and set(options) == {"again"}:
            calibrated.append([tuple(job.tokens) for job in jobs])
        return plain(self, jobs, speculative, *others, policy=policy, **options)

    monkeypatch.setattr(Session, "decode", decode)
    result, record = run(parts_of(*overrides), tmp_path)
    prompts = [tuple(found.request.tokens) for found in record.results]
    begun = [[next(p for p in prompts if tokens[: len(p)] == p) for tokens in pair] for pair in calibrated]  # + text
    assert all(first != second for first, second in begun)
    assert {first for first, _ in begun} == {prompts[0], prompts[2]}
    assert result.gamma in (0, 1, 2)
    assert result.lossless.passed or (result.gamma == 0 and result.lossless.passed is None)  # nothing was drafted


@pytest.mark.slow  # tests/peers/test_peers.py compares texts
@pytest.mark.parametrize("drafter", ["stdlib", "prompt_lookup"])
def test_transformers_decodes_the_same_prompts_beside_us(drafter, tmp_path):
    parts = parts_of("peers=transformers", "temperature=0", f"drafter={drafter}")
    result, record = run(parts, tmp_path)
    peers = {"generate", "prompt_lookup"} | ({"assisted"} if drafter == "stdlib" else set())
    assert set(result.speedup_over) == peers == set(parts.peers)
    assert {f"{peer}_tokens_per_second" for peer in peers} < set(result.throughput)
    for over in result.speedup_over.values():
        assert over.measured > 0 and over.ci95 is None  # of two prompts
    for found in record.results:
        for output in found.peers.values():  # greedy, so their tokens are ours
            assert output.tokens == list(found.baseline.tokens)
            assert 0 < output.decoded < len(output.tokens)
    line = json.loads((tmp_path / "prompts.jsonl.part").read_text().splitlines()[0])
    assert line["generate_tokens"] == 12 and line["prompt_lookup_decode_seconds"] > 0


def test_peers_run_stock_modules(tmp_path):
    """Packed weights would make transformers faster than it is."""
    parts = parts_of("peers=transformers", "executor=prepacked")
    stock = [type(m).__name__ for m in parts.peers["generate"].module.modules()]
    ours = [type(m).__name__ for m in parts.target.module.modules()]
    assert "PackedLinear" in ours and "PackedLinear" not in stock


@pytest.mark.slow
def test_the_synthetic_rate_is_the_alpha_and_nothing_is_claimed(tmp_path):
    result, _ = run(parts_of("verifier=synthetic", "verifier.alpha=.7", "data.limit=3", "max_new_tokens=40"), tmp_path)
    assert not result.lossless.expected and any("drawn at rate 0.7" in note for note in result.notes)
    assert result.alpha.mean == pytest.approx(0.7)
    assert result.alpha_counted.mean == pytest.approx(0.7, abs=5 * (0.21 / result.alpha.n) ** 0.5)


@pytest.mark.slow  # tests/stats/test_sums.py has sums of a batch
def test_the_seconds_of_requests_add_up_in_a_batch(tmp_path):
    parts = parts_of("data.limit=3", "batch_size=2", "temperature=0")
    result, record = run(parts, tmp_path)
    assert len(record.groups) == 1 and result.counts.prompts == 3 and result.lossless.passed
    group = record.groups[0]
    for decoded in (group.baseline, group.speculative):
        shares = [request.seconds for request in decoded.requests]
        assert sum(shares) == pytest.approx(decoded.decode_seconds) and min(shares) > 0
        assert max(r.rows for r in decoded.rounds) == 2
    assert group.baseline.calls < result.counts.baseline_tokens


@pytest.mark.slow
def test_memory_is_announced_before_anything_loads():
    told = []
    shipped = ("logger=none", "target.path=shipped:target")
    parts = build(check(composed(*small(*shipped, "batch_size=3"))), told.append)
    assert len(told) == 1 and "3 rows" in told[0]
    stock = [model.stock_module() for model in (parts.target, parts.drafter.model)]
    target, again = (sum(weight.nbytes for weight in module.parameters()) for module in stock)
    drafter = (
        again + 2 * parts.drafter.model.module.get_input_embeddings().weight.nbytes
    )  # tied: packed, it exists twice
    held = (target + drafter) // 2  # in 16 bits
    assert held * 0.99 < parts.target.weight_bytes + parts.drafter.model.weight_bytes < held * 1.01  # norms are in 32
    assert f"weights {size(held + target + again)}" in told[0]  # the verdict has models of its own
    build(check(composed(*small(*shipped, "verdict_tokens=0"))), told.append)
    assert f"weights {size(target)}" in told[1]  # while it is loaded


def test_the_memory_of_graphs_is_counted():
    shape = ModelSize(weights=10**6, tied=0, column=800, layers=4, context=64, vocab_size=100, widest=50)
    sizes = {"rows": 2, "columns": 64, "held": 128, "tokens": 6, "prefill_chunk": 64, "read_again": 32}
    where = {"doubled": 0, "laws": 0, "dtype": torch.float32, "device": torch.device("cpu")}
    eager, graphs = (Budget.of([shape], **sizes, **where, graphs=captured) for captured in (False, True))
    assert eager.graphs == 0 and "graphs" not in str(eager)
    # A pool, and inputs and results beside it, as large as what scoring takes; of the cache one layer.
    assert graphs.graphs == 2 * (4 * 2 * 6 * 100 * 4) + 128 * 800 // 4 and "graphs about" in str(graphs)
    assert graphs.activations == eager.activations == 12 * 32 * 100 * 8  # betas along a text, in float64


def test_an_error_in_warm_up_is_told(caplog):
    with going_on("warm-up at 128 tokens"):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")
    assert "warm-up at 128 tokens failed: RuntimeError: operation not permitted" in caplog.text
    assert "more" not in caplog.text
    with pytest.raises(ConfigError), going_on("warm-up"):
        raise ConfigError("not of the device")


LLAMA = ["hidden_size=64", "intermediate_size=64", "num_hidden_layers=2", "num_attention_heads=8", "head_dim=8"]
QWEN = ["hidden_size=64", "intermediate_size=64", "num_hidden_layers=2", "num_attention_heads=4",
        "num_key_value_heads=2"]  # fmt: skip


@pytest.mark.slow  # tests/models/test_architectures.py has other models without a download
@pytest.mark.parametrize(("drafter", "small"), [
    ("gpt2", ["n_embd=32", "n_layer=2", "n_head=2"]),
    ("llama1b", LLAMA), ("qwen05b", QWEN), ("llama8b", LLAMA),
])  # fmt: skip
def test_a_named_shape_builds_without_a_download(drafter, small, tmp_path):
    """Every named pair, in its own architecture and vocabulary, made narrow enough for a test."""
    shrink = [f"{role}.shape.{entry}" for role in ("target", "drafter") for entry in small]
    random = ["target.weights=random", "drafter.weights=random"]
    result, _ = run(parts_of(f"drafter={drafter}", *random, *shrink, "temperature=0", "dtype=float32"), tmp_path)
    assert result.lossless.passed and result.counts.prompts == 2
    assert sum("random weights" in note for note in result.notes) == 2


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_the_default_run_on_cuda(dtype, temperature, tmp_path):
    config = composed("logger=none", "max_new_tokens=32", "data.limit=8", "batch_size=4", "device=cuda",
                      f"dtype={dtype}", f"temperature={temperature}")  # fmt: skip
    result, _ = run(build(check(config)), tmp_path)
    assert result.lossless.passed and result.counts.tokens == 8 * 32
