"""workers=N: results equal those of one process bit for bit, whoever decodes what and whoever dies."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from choosing import slow_unless
from small_runs import call, composed, small
from split_cases import CASES, checked_for, facts, one_process, prompts
from sweep_cases import another_job

import specbench.config.build as build_of
import specbench.contrib.cluster.sweep as multirun
import specbench.contrib.ray.coordinator as team_of
import specbench.contrib.ray.rules as split
import specbench.contrib.ray.run as workers_run
from specbench.config.build import build
from specbench.config.memory import Budget
from specbench.config.validate import check
from specbench.contrib.cluster import cpu_affinity as cores
from specbench.contrib.ray import merge
from specbench.contrib.ray.coordinator import Team
from specbench.contrib.ray.data_shard import Shard
from specbench.contrib.ray.merge import GroupLimits, Merger
from specbench.contrib.ray.pool import DiedError, RayPool, _connect, answer_nobody, most_each
from specbench.contrib.ray.worker import Worker
from specbench.errors import ConfigError, IncompleteError
from specbench.results.reader import load_run
from specbench.run import batching as requests
from specbench.run.execute import save
from specbench.run.jobs import RunJob
from specbench.run.phase_timer import Phases
from specbench.stats import position_stats as text_laws


class HerePool:
    """Workers in this process, whose calls end in an order by lot. `dies(worker, method, number)` says whether a worker
    dies of its call of this number; what goes to a worker and back is pickled."""

    cores = 0

    def __init__(self, seed=0, dies=lambda worker, method, number: False):
        self.state, self.dies, self.calls, self.decoded, self.ended = seed, dies, {}, [], []

    def start(self, number):
        return Worker(number)

    def call(self, worker, method, *arguments):
        self.calls[worker.number] = self.calls.get(worker.number, 0) + 1
        return worker, method, pickle.dumps(arguments), self.calls[worker.number]

    def wait(self, calls, seconds):
        self.state = (self.state * 1103515245 + 12345) % 2**31
        return [calls[self.state // 65536 % len(calls)]]

    def end(self, worker):
        self.ended.append(worker.number)

    def result(self, call):
        worker, method, arguments, number = call
        if self.dies(worker.number, method, number):
            raise DiedError("killed")
        if method == "decode":
            self.decoded.append((worker.number, pickle.loads(arguments)[0]))
        return pickle.loads(pickle.dumps(getattr(worker, method)(*pickle.loads(arguments))))


class LatePool(HerePool):
    """The worker that loads last has opened the first turn when the other one opens the second."""

    order, opened = (), ()  # workers as they load, and as they open a turn

    def call(self, worker, method, *arguments):
        self.order += (worker.number,) * (method == "load")
        self.opened += (worker.number,) * (method == "open")
        return super().call(worker, method, *arguments)

    def wait(self, calls, seconds):
        late = [call for call in calls if call[1] == "open" and call[0].number == self.order[-1]]
        if len(self.order) < 2 or not late or self.opened.count(self.order[-1]) > 1:
            return super().wait(calls, seconds)
        others = [call for call in calls if call not in late]
        return late if self.opened.count(self.order[0]) > 1 or not others else super().wait(others, seconds)


def several(checked, folder, pool, count=2):
    """The same on workers."""
    team = Team(checked, pool, count)
    result, record = workers_run.run_on_workers(team, folder, lambda *told: None, lambda group: None, Phases())
    save(RunJob([], folder, checked), team.tokenizer, result, record)
    return load_run(folder)


@pytest.mark.parametrize("case", [slow_unless(case == "sampled", case) for case in CASES])
def test_workers_give_what_one_process_gives(case, good, tmp_path, monkeypatch):
    """With few tokens to read again, the verdict reads the first texts only. In the first case two workers
    die, one while it decodes and one while it measures: the others do what they had."""
    monkeypatch.setattr(requests, "FEWEST", 1)  # so that few prompts make several groups of rows
    turns = 2 if "turns" in CASES[case] else 1
    if turns == 2:  # betas are read along the first texts only
        for module in (merge, text_laws, sys.modules["specbench.run.interleave"]):
            monkeypatch.setattr(module, "LIMIT", 30)
    checked = checked_for(good, prompts(tmp_path, 7 if turns == 1 else 4, turns), *CASES[case][turns - 1 :])
    dying, lost = {"decode", "measure"} if case == "sampled" else set(), []

    def dies(worker, method, number):
        found = method in dying and number > 4  # after host, load, open and a group
        dying.discard(method) if found else None
        lost.extend([worker] * found)
        return found

    pool = LatePool(seed=3, dies=dies) if turns == 2 else HerePool(seed=7, dies=dies)
    one, two = one_process(checked, tmp_path / "one"), several(checked, tmp_path / "two", pool)
    assert facts(one) == facts(two)
    assert len({worker for worker, _ in pool.decoded}) >= 2
    assert sorted(group for _, group in pool.decoded) == [*range(len(pool.decoded))]  # each once
    assert sum(worker["requests"] for worker in two.result["workers"]) == two.result["counts"]["prompts"]
    assert sum(worker["tokens"] for worker in two.result["workers"]) == two.result["counts"]["tokens"]
    assert sorted(pool.ended) == sorted(lost)
    assert sum(worker["lost"] for worker in two.result["workers"]) == len(lost) == (2 if case == "sampled" else 0)


@pytest.mark.slow
def test_a_group_that_kills_its_workers_is_a_failure(good, tmp_path, monkeypatch):
    monkeypatch.setattr(team_of, "TRIES", 2)
    checked, killers = checked_for(good, prompts(tmp_path, 4)), []

    class Deadly(HerePool):
        def result(self, call):
            worker, method, arguments, _ = call
            if method == "decode" and pickle.loads(arguments)[0] == 2:
                killers.append(worker.number)
                raise DiedError("killed")
            return super().result(call)

    found = several(checked, tmp_path / "two", Deadly())
    assert len(killers) == 2 and found.result["counts"]["failed"] == 1 and found.result["counts"]["prompts"] == 3
    assert [line["error"] for line in found.prompts if "error" in line] == ["2 workers died while they decoded it"]


@pytest.mark.slow
def test_without_workers_the_run_ends(good, tmp_path, monkeypatch):
    monkeypatch.setattr(team_of, "FUTILE", 1)
    checked = checked_for(good, prompts(tmp_path, 4))
    pool = HerePool(dies=lambda worker, method, number: method == "decode" and (number > 4 or worker > 1))
    with pytest.raises(IncompleteError, match=r"all workers died \(3 were started\), and 1 request is finished"):
        several(checked, tmp_path / "two", pool)
    assert len((tmp_path / "two" / "prompts.jsonl.part").read_text().splitlines()) == 1


@pytest.mark.slow
def test_an_interrupted_run_keeps_what_is_finished(good, tmp_path):
    checked = checked_for(good, prompts(tmp_path, 5))

    class Interrupted(HerePool):
        def wait(self, calls, seconds):
            if len(self.decoded) == 3:
                self.decoded.append("a signal")
                raise KeyboardInterrupt
            return super().wait(calls, seconds)

    found = several(checked, tmp_path / "two", Interrupted())
    assert found.result["status"] == "interrupted" and 3 <= found.result["counts"]["prompts"] <= 4


def test_a_group_that_is_dropped_or_done_twice_is_noticed(good, tmp_path):
    shard = Shard(build(checked_for(good, prompts(tmp_path, 3))), 1)
    groups, known = shard.open(0, {}), shard.opened()
    assert [*groups.numbers] == [0, 1, 2]
    merger = Merger(50_000, known.reads_different, known.columns)
    first, last = (shard.decode(number, GroupLimits(50_000, 0)) for number in (0, 2))
    merger.add(last)
    assert not merger.record.groups  # it waits for those before it
    merger.add(first)
    with pytest.raises(RuntimeError, match="group 0 was decoded twice"):
        merger.add(first)
    with pytest.raises(RuntimeError, match="group 1 was not decoded"):
        merger.complete(3)
    with pytest.raises(RuntimeError, match="group 2 is none of the 1 groups"):
        merger.complete(1)


def test_what_one_process_would_not_have_read_is_dropped(good, tmp_path):
    """The negative control of the equality: without the merge's limits the verdict would stand on more texts."""
    checked = checked_for(good, prompts(tmp_path, 4), "verdict_tokens=40")
    shard = Shard(build(checked), 1)
    shard.open(0, {})
    pieces = [shard.decode(number, GroupLimits(40, 0)) for number in range(4)]
    assert all(piece.group.results[0].reading for piece in pieces)  # each worker thinks that it is the first
    merger = Merger(40, False, {})
    for piece in pieces:
        merger.add(piece)
    read = [group.results[0].reading is not None for group in merger.complete(4).groups]
    assert read == sorted(read, reverse=True) and 0 < sum(read) < 4
    assert merger.record.unread == "more than verdict_tokens=40 tokens"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["workers=0"], "workers=0 is not allowed"),
        (["gamma_policy=adaptive"], "gamma_policy=adaptive is not possible with workers=2: it learns"),
        (["gamma_policy=optimal"], "gamma_policy=optimal is not possible with workers=2"),
        (["workload=poisson"], "workload=poisson is not possible with workers=2"),
        (["target.tensor_parallel=2"], "workers=2 is not possible with target.tensor_parallel=2: a worker is one proc"),
        (["workers=65"], "workers=65 is not possible with 64 cores: each worker needs its own, so it must be 64 at mo"),
    ],
)
def test_what_cannot_be_split_is_refused(overrides, told, monkeypatch):
    monkeypatch.setattr(split, "find_spec", lambda name: "there")
    monkeypatch.setattr(split, "usable", lambda: [*range(64)])
    monkeypatch.delenv(split.CLUSTER, raising=False)
    with pytest.raises(ConfigError, match=told):
        check(composed("workers=2", *overrides))


def test_workers_share_no_device(monkeypatch):
    monkeypatch.setattr(split, "find_spec", lambda name: "there")
    monkeypatch.setattr(split, "visible_devices", lambda: ["0"])
    monkeypatch.delenv(split.CLUSTER, raising=False)
    root = replace(check(composed()).root, workers=2, device="cuda")
    with pytest.raises(ConfigError, match="workers=2 is not possible with 1 CUDA device: each worker needs its own"):
        split.refuse_workers(root, "cuda")
    with pytest.raises(ConfigError, match="workers=2 is not possible with device=cuda:1: each worker needs a device"):
        split.refuse_workers(replace(root, device="cuda:1"), "cuda")


def test_a_cluster_that_does_not_answer_is_told_at_once(monkeypatch):
    monkeypatch.setattr(split, "find_spec", lambda name: "there")
    with socket.socket() as closed, pytest.raises(ConfigError, match=r"RAY_ADDRESS=127.0.0.1:\d+ does not answer"):
        closed.bind(("127.0.0.1", 0))  # nobody listens
        monkeypatch.setenv(split.CLUSTER, f"127.0.0.1:{closed.getsockname()[1]}")
        check(composed("workers=2"))


def test_without_ray_the_command_says_how_to_get_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(split, "find_spec", lambda name: None)
    assert call(["workers=2", "logger=none"], monkeypatch, tmp_path) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "workers=2 is not possible without Ray: pip install 'speculative-decoding-bench[ray]'" in told


@pytest.mark.parametrize(("nodes", "workers", "each"), [([2], 2, 1), ([16, 8], 2, 8), ([16, 8], 3, 8), ([4], 3, 1),
                                                        ([3, 3], 2, 3), ([1], 4, 1)])  # fmt: skip
def test_workers_have_as_many_cores_as_fit(nodes, workers, each):
    assert most_each(nodes, workers) == each


def test_a_worker_waits_for_no_cores_of_another_run(good, tmp_path, locks):
    """Unless it takes the place of a dead one."""
    there = cores.usable()
    checked = checked_for(good, prompts(tmp_path, 2))
    with (
        another_job(locks, f"core-{there[0]}"),
        pytest.raises(ConfigError, match=r"a worker waits for .* cores: other"),
    ):
        Worker(1).load(checked, "cpu", len(there), str(tmp_path))


@pytest.fixture
def built(monkeypatch):
    """What workers would build, and among how many."""
    found = []

    def record(checked, announce, beside):
        found.append((checked.root, beside))
        raise ConfigError("this is all")

    monkeypatch.setattr(build_of, "build", record)
    return found


def test_a_worker_has_the_device_of_the_command(good, tmp_path, built):
    checked = checked_for(good, prompts(tmp_path, 2))
    with pytest.raises(ConfigError, match="this is all"):
        Worker(1).load(checked, "cuda", 0, str(tmp_path))
    assert (built[0][0].device, built[0][0].workers) == ("cuda", 1)
    assert checked.root.device != "cuda"


def test_a_cluster_may_have_devices_that_this_machine_has_not(monkeypatch):
    monkeypatch.setattr(split, "find_spec", lambda name: "there")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv(split.CLUSTER, raising=False)
    with pytest.raises(ConfigError, match="device=cuda is not here"):
        check(composed("workers=2", "device=cuda"))
    monkeypatch.setenv(split.CLUSTER, "auto")
    with pytest.raises(ConfigError, match="device=cuda is not here"):
        check(composed("workers=1", "device=cuda"))
    checked = check(composed("workers=2", "device=cuda"))
    assert checked.choices.device == "cuda" and checked.identity().device == {}


EXCEPTIONS = ("RayActorError", "ObjectLostError", "OutOfMemoryError", "NodeDiedError", "LocalRayletDiedError",
              "WorkerCrashedError", "ActorUnschedulableError")  # fmt: skip
OTHERS = ("RayTaskError", "RuntimeEnvSetupError", "GetTimeoutError")


def pool_of(nodes=(), own=False):
    """A pool in a cluster that is none. Calls are what they raise."""
    classes = SimpleNamespace(**{name: type(name, (Exception,), {}) for name in (*EXCEPTIONS, *OTHERS)})

    def get(call):
        raise getattr(classes, call)("as asked")

    pool, killed = object.__new__(RayPool), []
    pool.ray = SimpleNamespace(
        exceptions=classes, get=get, nodes=lambda: [{"Alive": True, "Resources": node} for node in nodes],
        kill=lambda worker, no_restart: killed.append((worker, no_restart)),
    )  # fmt: skip
    pool.own, pool.started, pool.actor = own, [], SimpleNamespace(remote=lambda number: f"worker {number}")
    return pool, killed


@pytest.mark.parametrize("name", [*EXCEPTIONS, *OTHERS[1:]])
def test_what_ray_says_of_a_death(name):
    pool, _ = pool_of()
    kinds = {"RuntimeEnvSetupError": ConfigError, "GetTimeoutError": pool.ray.exceptions.GetTimeoutError}
    with pytest.raises(kinds.get(name, DiedError), match="as asked"):
        pool.result(name)


@pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")
def test_ray_has_these_errors():
    from ray import exceptions

    assert all(issubclass(getattr(exceptions, name), Exception) for name in (*EXCEPTIONS, *OTHERS))


def test_lost_workers_are_ended_and_all_others_at_the_end():
    pool, killed = pool_of()
    first, second = pool.start(1), pool.start(2)
    pool.end(first)
    assert killed == [(first, True)]
    pool.close()
    assert killed == [(first, True), (second, True)]


def test_auto_is_no_choice_where_the_cluster_has_what_this_machine_has_not():
    pool, _ = pool_of([{"CPU": 8, "GPU": 2}])
    with pytest.raises(ConfigError, match=r"device=auto is not possible with RAY_ADDRESS: .* its cluster has 2"):
        pool._share(2, "cpu", True)
    assert pool._share(2, "cuda", True) == (0, {"num_cpus": 1, "num_gpus": 1})
    assert pool_of([{"CPU": 8}])[0]._share(2, "cpu", True)[1]["num_cpus"] >= 1


def test_no_token_goes_to_a_cluster(monkeypatch):
    given = {"HF_TOKEN": "a", "HF_HOME": "b", "SPECBENCH_CACHE": "c", "HUGGING_FACE_HUB_TOKEN": "d"}
    for name, value in {**given, split.CLUSTER: "auto"}.items():
        monkeypatch.setenv(name, value)
    asked = {}
    _connect(SimpleNamespace(init=lambda **given: asked.update(given)), "cpu")
    sent = asked["runtime_env"]["env_vars"]
    assert sent["HF_HOME"] == "b" and sent["SPECBENCH_CACHE"] == "c" and not any("TOKEN" in name for name in sent)


def test_a_cluster_of_our_own_answers_to_nobody_else(monkeypatch):
    for name in (split.CLUSTER, "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    asked = {}
    answer_nobody()
    _connect(SimpleNamespace(init=lambda **given: asked.update(given)), "cpu")
    assert asked["address"] == "local" and asked["include_dashboard"] is False
    assert os.environ["RAY_AUTH_MODE"] == "token" and len(os.environ["RAY_AUTH_TOKEN"]) == 64


class OtherPool(HerePool):
    """Of what each worker has loaded, `name` of its `field` is another version."""

    field, name = "code", ""

    def result(self, call):
        found = super().result(call)
        if call[1] != "load":
            return found
        return (replace(found[0], **{self.field: {**getattr(found[0], self.field), self.name: "other"}}), *found[1:])


@pytest.mark.parametrize(("field", "name", "told"), [
    ("code", "specbench", "has another version of specbench than this process"),
    ("sources", "drafter.path", "finds other files as drafter.path than this process"),
])  # fmt: skip
def test_workers_have_the_programs_and_files_of_the_command(field, name, told, good, tmp_path):
    """All of them may differ from the command in the same way."""
    pool = OtherPool()
    pool.field, pool.name = field, name
    team = Team(checked_for(good, prompts(tmp_path, 2)), pool, 2)
    with pytest.raises(ConfigError, match=told):
        team._until(lambda: all(hand.place for hand in team.hands))


def test_memory_is_looked_at_for_all_workers_of_a_machine(good, tmp_path, monkeypatch):
    checked, seen = checked_for(good, prompts(tmp_path, 2)), []
    with monkeypatch.context() as patch:
        patch.setattr(Budget, "check", lambda budget: seen.append(budget.needed))
        build(checked)
    monkeypatch.setattr("specbench.config.memory.free_bytes", lambda device: int(1.5 * seen[0]))
    assert Team(checked, HerePool(), 1).load().requests == 2
    with pytest.raises(ConfigError, match=r"the run needs .* \(memory of each of 2 processes"):
        Team(checked, HerePool(), 2).load()


@pytest.mark.slow
def test_workers_on_two_machines_are_a_note(good, tmp_path):
    """Each chooses its products by its own times."""

    class Apart(HerePool):
        def result(self, call):
            found = super().result(call)
            if call[1] == "measure":
                found[0].executor = {"chosen": {"4x4 float32": ["plain"]}}
            if call[1] == "load":
                found = (replace(found[0], host=f"host {call[0].number}"), *found[1:])
            return found

    found = several(checked_for(good, prompts(tmp_path, 4)), tmp_path / "two", Apart())
    assert any("workers ran on 2 machines" in note for note in found.result["notes"])


def test_a_job_beside_others_has_no_workers(apart, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(split, "find_spec", lambda name: "there")
    assert call(["-m", "name=s", "gamma=1,2", "workers=2", "hydra/launcher=apart"], monkeypatch, tmp_path) == 2
    assert "workers=2 is not possible with hydra/launcher=apart" in " ".join(capsys.readouterr().err.split())
    job = SimpleNamespace(runtime=SimpleNamespace(choices={"hydra/launcher": "apart"}))
    monkeypatch.setattr(multirun.HydraConfig, "get", lambda: job)
    with (
        pytest.raises(ConfigError, match="hydra/launcher=apart"),
        multirun.ClusterSweep().running(SimpleNamespace(workers=2)),
    ):
        pass


needs_ray = pytest.mark.skipif(find_spec("ray") is None or len(cores.usable()) < 2, reason="needs Ray, and two cores")


def command_of(good, path, folder, *more):
    given = small("max_new_tokens=6", "data=questions", f"data.path={path}", "data.limit=null", "executor=eager",
                  "drafter=model", f"drafter.path={good}", f"target.path={good}", "logger=none", "gamma=2",
                  f"hydra.run.dir={folder}", *more)  # fmt: skip
    return [sys.executable, "-m", "specbench", *given]


@pytest.mark.slow
@needs_ray
def test_two_processes_give_what_one_gives(good, tmp_path, monkeypatch):
    """With Ray: each worker has a core of its own."""
    for name, value in {
        "OMP_NUM_THREADS": "1",
        "SPECBENCH_LOCKS": str(tmp_path / "locks"),
        "RAY_TMPDIR": "/tmp",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(split.CLUSTER, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        one = one_process(checked_for(good, prompts(tmp_path), "verdict_tokens=60"), tmp_path / "one")
    finally:
        torch.set_num_threads(threads)
    checked = checked_for(good, prompts(tmp_path), "verdict_tokens=60", "workers=2")
    with closing(RayPool(2, "cpu")) as pool:
        team = Team(checked, pool, 2)
        team.load()
        team._until(lambda: all(hand.turn == 0 for hand in team.hands))  # else one has done all of it before
        told = lambda *words: None  # noqa: E731
        result, record = workers_run.run_on_workers(team, tmp_path / "two", told, told, Phases())
        save(RunJob([], tmp_path / "two", checked), team.tokenizer, result, record)
    two = load_run(tmp_path / "two")
    assert facts(one) == facts(two)
    first, second = two.result["workers"]
    assert len(first["cores"]) == len(second["cores"]) == 1 and first["cores"] != second["cores"]


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("what", ["a worker", "the command"])
def test_a_process_is_killed_in_the_middle(what, good, tmp_path):
    """A worker that is killed is replaced, and the command ends as if nothing had been; after a signal to the command
    what was finished is there."""
    path, folder = prompts(tmp_path, 40), tmp_path / "two"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "SPECBENCH_LOCKS": str(tmp_path / "locks"), "RAY_TMPDIR": "/tmp"}
    with subprocess.Popen(command_of(good, path, folder, "workers=2", "max_new_tokens=60"), env=env,
                          stdout=subprocess.DEVNULL) as process:  # fmt: skip
        part = folder / "prompts.jsonl.part"
        while not (part.exists() and part.read_text().count("\n") > 2):
            assert process.poll() is None
            time.sleep(0.05)
        if what == "a worker":
            os.kill(worker_of(process.pid), signal.SIGKILL)
        else:
            process.send_signal(signal.SIGTERM)
        code = process.wait()
    found = load_run(folder)
    if what == "the command":
        assert code == 143 and found.result["status"] == "interrupted" and 2 < found.result["counts"]["prompts"] < 40
        return
    assert code == 0 and sum(worker["lost"] for worker in found.result["workers"]) == 1
    command = command_of(good, path, tmp_path / "one", "max_new_tokens=60")
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
    assert facts(load_run(tmp_path / "one")) == facts(found)


def worker_of(parent: int) -> int:
    """The process of a Ray actor, among those that the command has started."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
            parents[int(stat.parent.name)] = (name, int(rest.split()[1]), (stat.parent / "cmdline").read_text())
        except OSError:
            continue
    for number, (_, above, words) in parents.items():
        while above in parents and above != parent:
            above = parents[above][1]
        if above == parent and words.startswith("ray::Worker"):
            return number
    raise AssertionError("no worker runs")
