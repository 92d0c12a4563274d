"""A target that two processes share: the same tokens and numbers as in one process, ranks that go apart or end, and
what is refused. The processes are forks of this one, which meet through a file; `python -m specbench` starts them
otherwise, which the slow test runs."""

import io
import json
import multiprocessing
import os
import queue
import re
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import checkpoint, tensors
from choosing import slow_unless
from rich.console import Console
from small_runs import call, composed, small

from specbench.config.build import build
from specbench.config.validate import check
from specbench.contrib.tensor_parallel import launcher, process_group
from specbench.contrib.tensor_parallel import model_check as whole
from specbench.contrib.tensor_parallel.model_check import agrees_with_whole
from specbench.contrib.tensor_parallel.process_group import ProcessGroup, RankError
from specbench.contrib.tensor_parallel.rules import divides_unevenly, refuse_indivisible
from specbench.decoding import processes
from specbench.decoding import timer as clock
from specbench.decoding.timer import Lap, Timer
from specbench.errors import ConfigError, IncompleteError, VerdictError
from specbench.models.checkpoint_checks import refuse_offloaded
from specbench.models.pretrained import PretrainedModel, load_module
from specbench.policies.gamma.adaptive import AdaptiveGamma
from specbench.results.provenance import provenance
from specbench.results.reader import read_result
from specbench.results.run_table import run_table
from specbench.run.run import run_in_turn
from specbench.run.signals import handled

FORK = multiprocessing.get_context("fork")
LIMIT = 60  # seconds that two ranks may take: they take some three
SHORT = ("verdict_tokens=0", "max_new_tokens=3", "gamma=1")
WIDE = {"max_new_tokens": "10", "data.limit": "2", "gamma": "3", "verdict_tokens": "200"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    """A target of four heads, two key-value heads and two layers, and a smaller drafter."""
    folder = tmp_path_factory.mktemp("pair")
    drafter = checkpoint(folder / "drafter", num_hidden_layers=1, hidden_size=8, intermediate_size=16)
    return checkpoint(folder / "target", tie_word_embeddings=True), drafter


def checked(pair, *more: str):
    """A run's configuration, composed once for both ranks."""
    return check(composed(*overrides(pair, *more)))


def overrides(pair, *more: str) -> list[str]:
    target, drafter = pair
    given = {word.partition("=")[0] for word in more}
    models = ["target=model", f"target.path={target}", "drafter=model", f"drafter.path={drafter}", "logger=none"]
    return small(*models, *(f"{key}={value}" for key, value in WIDE.items() if key not in given), *more)


def decode(wanted, folder, told=lambda group: None):
    """The run's texts and numbers; rank 1 has no result."""
    parts = build(wanted)
    found = run_in_turn([[(parts, folder, told)]], lambda done, total, what: None)
    if not found:
        return None
    [(result, record)] = found
    texts = [[list(decoded.tokens) for decoded in each.both] for each in record.results]
    return {"texts": texts, "result": result.as_dict(), "status": result.status, "laps": record.groups[0].baseline.laps}


def _rank(work, rank, store, answers):
    torch.set_num_threads(1)
    try:
        process_group.join("cpu", rank, 2, store)
        with handled(), torch.inference_mode():
            answers.put((rank, work(rank)))
    except BaseException as error:
        answers.put((rank, error))
    process_group.leave()
    answers.close()
    answers.join_thread()
    os._exit(0)


def in_ranks(work, folder: Path, answering: int = 2) -> dict[int, object]:
    """What `work(rank)` returns or raises in two ranks, by rank; of fewer that are `answering` if others end."""
    answers = FORK.Queue()
    store = str(folder / f"store-{time.monotonic_ns()}")
    processes = [FORK.Process(target=_rank, args=(work, rank, store, answers)) for rank in (0, 1)]
    for process in processes:
        process.start()
    try:
        return dict(answers.get(timeout=LIMIT) for _ in range(answering))
    except queue.Empty:
        raise AssertionError("the ranks do not answer") from None
    finally:
        for process in processes:
            process.join(5)
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("more", [("temperature=1",), ("temperature=0", "cache=paged", "batch_size=2")])
def test_two_processes_draw_the_tokens_of_one(pair, tmp_path, more):
    """Sums in another order may turn a near-tie; these seeds have none."""
    plain = decode(checked(pair, "executor=eager", *more), tmp_path)
    wanted = checked(pair, "target.tensor_parallel=2", *more)
    answers = in_ranks(lambda rank: decode(wanted, tmp_path / str(rank)), tmp_path)
    assert answers[1] is None  # rank 1 has no results of its own
    two = answers[0]
    assert two["texts"] == plain["texts"] and two["result"]["lossless"]["passed"] is not False
    for name in ("alpha", "alpha_on_target_text", "block_efficiency"):
        assert two["result"][name]["mean"] == pytest.approx(plain["result"][name]["mean"], abs=1e-6)
    assert two["result"]["counts"] == plain["result"]["counts"]
    assert two["result"]["memory"]["kv_bytes"] < plain["result"]["memory"]["kv_bytes"]  # half of the target's
    told = two["result"]["cost"]["communication"]
    assert plain["result"]["cost"]["communication"] is None and told["processes"] == 2 and told["backend"] == "gloo"
    assert 0 < told["share"] < 1 and 0 < told["plain_share"] < 1 and 0 < told["step"] < 1
    assert told["c"] == 0 and 0 < told["v"] < two["result"]["cost"]["v"] and 0 < told["o"] < two["result"]["cost"]["o"]
    assert two["laps"][Lap.VERIFY_COLLECTIVES] < two["laps"][Lap.VERIFY]
    console = Console(file=io.StringIO(), width=200)
    console.print(run_table(two["result"], tmp_path))
    assert re.search(rf"communication +{told['share']:.0%} +of decoding, between 2 ranks \(gloo\), waiting for ",
                     console.file.getvalue())  # fmt: skip
    for name in ("operations_factor", "c_hat"):
        assert two["result"][name] == pytest.approx(plain["result"][name], rel=1e-6)
    details = [found["result"]["lossless"]["detail"] for found in (two, plain)]
    assert "2 processes" in details[0]["p"] and "p" not in details[1]
    assert not any("were not compared" in note for note in two["result"]["notes"])


ADAPTIVE = ("gamma_policy=adaptive", "gamma_policy.largest=3", "max_new_tokens=6", "verdict_tokens=0", "data.limit=1",
            "temperature=0")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("own_times", [False, True])
def test_a_policy_that_learns_from_times_chooses_alike(pair, tmp_path, own_times):
    """Drafting seems to be slow on rank 1, and verifying on rank 0: with their `own_times` they would go apart."""
    wanted = checked((pair[0], pair[0]), "target.tensor_parallel=2", *ADAPTIVE)

    def work(rank):
        laps, slow = clock._laps, {Lap.VERIFY, Lap.READ_AGAIN} if rank == 0 else {Lap.DRAFT}
        clock._laps = lambda marks: {lap: s * 1e4 if lap in slow else s for lap, s in laps(marks).items()}
        if own_times:
            processes.current.broadcast = lambda value: value
        choose = AdaptiveGamma.next_gamma  # compared here, since gloo aborts on tensors of other sizes

        def compared(self, state):
            gammas = choose(self, state)
            processes.current.compare([gammas])
            return gammas

        AdaptiveGamma.next_gamma = compared
        return decode(wanted, tmp_path / str(rank))

    answers = in_ranks(work, tmp_path)
    if own_times:
        assert all(isinstance(error, RankError) for error in answers.values())
    else:
        assert answers[1] is None and answers[0]["result"]["counts"]["drafted"] > 0


DELAY = 0.1  # seconds


def test_waiting_for_the_other_rank_is_time_in_collectives(tmp_path):
    """Rank 1 sleeps before a collective, and rank 0 as long outside of one."""

    def work(rank):
        watch, value = Timer(torch.device("cpu")), torch.ones(1)
        watch.start()
        time.sleep(DELAY * rank)
        torch.distributed.all_reduce(value)
        watch.lap(Lap.VERIFY)
        time.sleep(DELAY)
        watch.lap(Lap.ACCEPT)
        return watch.rounds()

    answers = in_ranks(work, tmp_path)
    assert answers[0] == answers[1]  # of rank 0
    [laps] = answers[0]
    assert 0.8 * DELAY < laps[Lap.VERIFY_COLLECTIVES] <= laps[Lap.VERIFY] < 3 * DELAY
    assert laps[Lap.ACCEPT] >= DELAY and Lap.OTHER_COLLECTIVES not in laps


def test_the_shares_of_communication_by_hand():
    times = {Lap.DRAFT: 4.0, Lap.VERIFY: 5.0, Lap.ACCEPT: 0.5, Lap.HOST: 0.5}
    waits = {Lap.DRAFT_COLLECTIVES: 0.4, Lap.VERIFY_COLLECTIVES: 1.5, Lap.OTHER_COLLECTIVES: 0.1}
    plain = {Lap.DRAFT: 0.0, Lap.VERIFY: 8.0, Lap.ACCEPT: 1.0, Lap.HOST: 1.0}
    plain_waits = {Lap.DRAFT_COLLECTIVES: 0.0, Lap.VERIFY_COLLECTIVES: 4.0, Lap.OTHER_COLLECTIVES: 1.0}
    found = ProcessGroup("cpu", 0, 2).communication(
        [plain | plain_waits], [times | waits], step=0.5, calls=10, steps=20
    )
    assert asdict(found) == pytest.approx(
        dict(processes=2, backend="gloo", share=0.2, plain_share=0.5, step=0.5, c=0.04, v=0.3, o=0.02)
    )


@pytest.mark.slow
def test_a_model_that_is_divided_wrongly_is_refused(pair, tmp_path, monkeypatch):
    """Biases, and a vocabulary that does not divide. `doubled` is what each of two ranks adding its biases gives."""
    path = checkpoint(tmp_path / "odd", model_type="qwen2", vocab_size=4160 + divides_unevenly())
    tensors(lambda state: [state[name].normal_() for name in state if name.endswith("bias")])(path)
    settings = PretrainedModel.Settings(str(path), weights="pretrained", chat_template="auto")
    loaded = partial(load_module, role="target", device=torch.device("cpu"), dtype=torch.float32, seed=0)

    def doubled():
        module = loaded(settings)
        for layer in module.model.layers:
            layer.self_attn.v_proj.bias.data *= 2
        return module

    def work(rank):
        divided = loaded(replace(settings, tensor_parallel=2))
        free, whole.free_bytes = whole.free_bytes, lambda device: 1000
        room = agrees_with_whole(divided, pytest.fail, "K")
        whole.free_bytes = free
        good = agrees_with_whole(divided, partial(loaded, settings), "K")
        try:
            agrees_with_whole(divided, doubled, "K")
        except ConfigError as error:
            return room, good, str(error)

    for room, good, told in in_ranks(work, tmp_path).values():
        assert not room and good and "K has other logits in 2 processes than in one" in told


@pytest.mark.slow
def test_a_divided_drafter_drafts_the_same(pair, tmp_path):
    both = checked(pair, "target.tensor_parallel=2", "drafter.tensor_parallel=2", "temperature=0")
    two = in_ranks(lambda rank: decode(both, tmp_path / str(rank)), tmp_path)[0]
    plain = decode(checked(pair, "executor=eager", "temperature=0"), tmp_path)
    assert two["texts"] == plain["texts"] and two["result"]["counts"] == plain["result"]["counts"]
    assert 0 < two["result"]["cost"]["communication"]["c"] < two["result"]["cost"]["c"]


def test_a_rank_with_other_noise_is_noticed(pair, tmp_path):
    """The negative control of the comparison in each round."""
    wanted = [checked(pair, "target.tensor_parallel=2", "temperature=1", f"seed={seed}", *SHORT) for seed in (0, 1)]
    answers = in_ranks(lambda rank: decode(wanted[rank], tmp_path / str(rank)), tmp_path)
    assert all(isinstance(error, RankError) and "other tokens" in str(error) for error in answers.values())


@pytest.mark.slow  # forked from a process that has run many tests, a rank may not answer; from a fresh one it does
def test_a_signal_to_one_rank_stops_both_in_the_same_round(pair, tmp_path):
    wanted = checked(pair, "target.tensor_parallel=2", "data.limit=8", *SHORT)

    def work(rank):
        return decode(wanted, tmp_path / str(rank), lambda group: rank == 1 and os.kill(os.getpid(), signal.SIGTERM))

    answers = in_ranks(work, tmp_path)
    assert answers[1] is None and answers[0]["status"] == "interrupted"
    assert len(answers[0]["texts"]) == 1  # rank 0 had no signal: it stopped where rank 1 did


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_other(pair, tmp_path):
    wanted = checked(pair, "target.tensor_parallel=2", *SHORT)

    def work(rank):
        return decode(wanted, tmp_path / str(rank), lambda group: rank == 1 and os._exit(9))

    begun = time.monotonic()
    answers = in_ranks(work, tmp_path, answering=1)
    assert isinstance(answers[0], RankError) and "another rank has ended" in str(answers[0])
    assert time.monotonic() - begun < LIMIT / 2


# -- The processes that are started ---------------------------------------------------------------


@pytest.mark.slow  # test_a_rank_that_was_interrupted_alone_has_not_succeeded
def test_the_others_are_ended_when_one_rank_ends(tmp_path):
    program = "import os, sys, time\nrank = int(os.environ['RANK'])\nprint(os.environ['OMP_NUM_THREADS'])\n"
    die = "os.kill(os.getpid(), 9) if rank else time.sleep(100)"
    begun = time.monotonic()
    before = signal.getsignal(signal.SIGTERM), dict(os.environ)
    failures = launcher.run_processes([sys.executable, "-c", program + die], 2, "cpu", quiet=True)
    assert failures[1] == -9 and time.monotonic() - begun < 50
    assert (signal.getsignal(signal.SIGTERM), dict(os.environ)) == before
    with pytest.raises(IncompleteError, match=r"rank 1 of target\.tensor_parallel was ended by SIGKILL"):
        launcher._raise({0: -15, 1: -9}, tmp_path, quiet=False)  # rank 0 was then ended by the agent


def test_threads_are_at_most_a_share_of_the_cores(monkeypatch, caplog):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8), raising=False)
    for wanted, threads in ((None, "4"), ("3", "3"), ("8", "4"), ("many", "4")):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if wanted is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", wanted)
        with launcher._environment(2, "cpu"):
            assert os.environ["OMP_NUM_THREADS"] == threads
    assert [record.getMessage() for record in caplog.records] == [
        "OMP_NUM_THREADS=8 is more than each process's share of the cores: each has 4"
    ]


def test_results_have_the_command_that_was_typed(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["specbench", "target.tensor_parallel=2"])
    with launcher._environment(2, "cpu"):
        monkeypatch.setattr(sys, "argv", ["specbench", "--config-path", "/elsewhere"])
        # of no rank, such as another command that a run starts
        assert provenance(torch.device("cpu"))["argv"] == ["specbench", "--config-path", "/elsewhere"]
        monkeypatch.setattr(processes, "current", ProcessGroup("cpu", rank=0, size=2))
        assert provenance(torch.device("cpu"))["argv"] == ["specbench", "target.tensor_parallel=2"]


def test_a_rank_that_was_interrupted_alone_has_not_succeeded(monkeypatch):
    def interrupted(checked):
        raise KeyboardInterrupt

    monkeypatch.setattr("specbench.config.build.build", interrupted)
    rank = FORK.Process(target=launcher.run_worker_rank, args=(None,))
    rank.start()
    rank.join(LIMIT)
    assert rank.exitcode == 130


def test_what_rank_0_has_said_is_not_said_again(tmp_path):
    with pytest.raises(SystemExit) as stopped:
        launcher._raise({0: 2, 1: 2}, tmp_path, quiet=False)
    assert stopped.value.code == 2
    with pytest.raises(IncompleteError, match=r"rank 0 .* exit code 2"):
        launcher._raise({0: 2}, tmp_path, quiet=True)  # in a sweep, which goes on
    with pytest.raises(VerdictError):
        launcher._raise({0: 3}, tmp_path, quiet=True)


@pytest.mark.slow
def test_a_group_of_another_size_is_refused(pair, tmp_path, monkeypatch, capsys):
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert call(overrides(pair, "target.tensor_parallel=2"), monkeypatch, tmp_path) == 2
    assert "in a group of 3 processes (WORLD_SIZE)" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert call(["-m", *overrides(pair, "target.tensor_parallel=2")], monkeypatch, tmp_path) != 0
    assert "not possible under torchrun" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("-m", "seed=0,1")])
def test_the_command_starts_the_processes(pair, tmp_path, monkeypatch, more):
    words = overrides(pair, "target.tensor_parallel=2", "temperature=0", "name=t")
    assert call([*more, *words, "hydra.run.dir=one"], monkeypatch, tmp_path) == 0
    folders = sorted((tmp_path / "outputs" / "t").glob("*")) if more else [tmp_path / "one"]
    results = [read_result(folder) for folder in folders if (folder / "results.json").is_file()]
    assert len(results) == 1 + bool(more)
    assert all(result["lossless"]["passed"] and result["cost"]["communication"]["processes"] == 2 for result in results)
    assert not list(tmp_path.glob("**/prompts.jsonl.part"))


# -- What is refused, and what devices are needed -------------------------------------------------


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (
            ("executor=compiled",),
            "executor=compiled is not possible with target.tensor_parallel=2: choose executor=auto",
        ),
        slow_unless(False, ("executor=prepacked",), "executor=prepacked is not possible"),
        (("decoding=beam", "beams=2"), "choose decoding=sampling"),
        slow_unless(False, ("baseline=transformers",), "choose baseline=autoregressive"),
        (("workload=poisson", "workload.rate=1"), "choose workload=all_at_once"),
        (("target.weights=random",), "choose target.weights=pretrained"),
        slow_unless(False, ("drafter=early_exit",), "drafter=early_exit is not possible with target.tensor_parallel=2"),
        (("target.device_map=auto",), "choose target.device_map=null"),
        (("target.tensor_parallel=1", "drafter.tensor_parallel=2"), "the drafter is whole on every rank"),
        (("target.tensor_parallel=1", "target.device_map=auto"), "device=cpu, which is one device"),
    ],
)
def test_what_ranks_cannot_do_together_is_refused(more, told):
    divided = [] if "target.tensor_parallel=1" in more else ["target.tensor_parallel=2"]
    words = small("logger=none", *divided, *more)
    with pytest.raises(ConfigError) as error:
        check(composed(*words))
    assert told in str(error.value)


def test_layers_on_no_gpu_are_refused(pair):
    """Accelerate puts them on the CPU where there is no GPU."""
    settings = PretrainedModel.Settings(str(pair[0]), weights="pretrained", chat_template="auto")
    device = torch.device("cpu")
    with pytest.raises(ConfigError, match=r"does not fit the GPUs .* device_map=auto puts layers on cpu"):
        load_module(replace(settings, device_map="auto"), "target", device, torch.float32, 0)
    gpu = [SimpleNamespace(device=torch.device("cuda:0"))]
    for places, refused in (({"a": 0, "b": 1}, False), ({"a": 0, "b": "disk"}, True)):
        with pytest.raises(ConfigError, match="puts layers on disk") if refused else nullcontext():
            refuse_offloaded(SimpleNamespace(hf_device_map=places, parameters=lambda: gpu), "K")


def test_heads_that_do_not_divide_are_refused_before_weights_load(pair, tmp_path, monkeypatch, capsys):
    (pair[0] / "model.safetensors").rename(pair[0] / "away")
    try:
        assert call(overrides(pair, "target.tensor_parallel=4"), monkeypatch, tmp_path) == 2
    finally:
        (pair[0] / "away").rename(pair[0] / "model.safetensors")
    assert "its 2 key-value heads do not divide by 4, but by 2" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="in 1 process"):
        build(check(composed(*overrides(pair, "target.tensor_parallel=2"))))


def test_tokens_that_do_not_divide_are_refused_before_transformers_does(tmp_path, monkeypatch):
    path = checkpoint(tmp_path / "odd", vocab_size=4161)
    words = small("target=model", f"target.path={path}", "target.tensor_parallel=2", "drafter=ngram")
    choices = check(composed(*words)).choices
    of_divided = refuse_indivisible.__globals__
    monkeypatch.setitem(of_divided, "transformers", SimpleNamespace(__version__="5.17.0"))
    with pytest.raises(ConfigError, match=r"its 4,161 tokens do not divide by 2, so use 1"):
        refuse_indivisible(choices)
    monkeypatch.setitem(of_divided, "transformers", SimpleNamespace(__version__="5.23.0.dev0"))
    refuse_indivisible(choices)


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        ({"model_type": "gpt_neo", "attention_types": [[["global"], 2]], "num_layers": 2}, "no plan"),
        ({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}, "a mixture of experts"),
        ({"model_type": "mamba"}, "a recurrent state"),
    ],
)
def test_kinds_that_are_not_divided_are_refused(tmp_path, shape, told):
    sizes = {"vocab_size": 4160, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(sizes | shape))
    words = small("target=model", f"target.path={tmp_path}", "target.tensor_parallel=2", "drafter=ngram")
    with pytest.raises(ConfigError, match=told):
        refuse_indivisible(check(composed(*words)).choices)
