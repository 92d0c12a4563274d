"""The checks of a GPU, without one: every phase runs on small models, with a timer that does not measure, on a CUDA
device whose operations run on the CPU. Phases that make whole runs do it on the CPU itself, and what they ask for is
checked for CUDA."""

import json
import sys
import time

import pytest
import torch
from cuda_on_cpu import MixedDevicesError, cuda_on_cpu, to_cuda

from specbench.config.validate import check
from specbench.contrib.gpu_check import attention, command, graphs, leaves, rounds, runner, steps
from specbench.contrib.gpu_check import end_to_end as whole
from specbench.contrib.gpu_check.check import FAILED, PASSED, TOLD, UNCLEAR, Number, Outcome, Phase
from specbench.contrib.gpu_check.fixtures import GRAPHS, WITHOUT_GRAPHS, Lab, composed
from specbench.contrib.gpu_check.phases import PHASES
from specbench.contrib.gpu_check.runner import lines_of, measure_into, read, run_phases
from specbench.kernels import ops
from specbench.models import pretrained

SMALL = {
    "target=llama3b": {"vocab_size": 4096, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1,
                       "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16},
    "drafter=llama1b": {"vocab_size": 4096, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
                        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
}  # fmt: skip
WHOLE_RUNS = (10, 12)  # phases that make whole runs, here on a CPU
WITHOUT_KERNELS = (5, 6)  # an interpreter, which runs them here, takes most of the time; other phases decode with them


class SmallLab(Lab):
    """A CPU, without graphs, and small shapes. What it is asked for must be possible on CUDA."""

    def parts(self, *overrides):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "device_count", lambda: 1)
            patch.setattr(torch.cuda, "set_device", lambda index: None)
            check(composed(["device=cuda", "logger=none", *overrides]))
        return super().parts(*overrides)

    def overrides(self, overrides):
        own = ("executor._target_", "executor.compile")
        wanted = [word.replace(GRAPHS, "executor=eager") for word in overrides if not word.startswith(own)]
        return super().overrides(shrunk(wanted))


def shrunk(overrides):
    """The same run on small shapes, one prompt and few tokens."""
    shapes = [
        f"{choice.partition('=')[0]}.shape.{key}={value}"
        for choice, shape in SMALL.items() if choice in overrides for key, value in shape.items()
    ]  # fmt: skip
    policy = ["gamma_policy.largest=1"] if "gamma_policy=adaptive" in overrides else []
    return [*overrides, *shapes, *policy, "max_new_tokens=6", "data.limit=1", "gamma=1"]


class CudaLab(Lab):
    """Device "cuda", small shapes, and no graphs."""

    def overrides(self, overrides):
        wanted = [word for given in overrides for word in (WITHOUT_GRAPHS if given == GRAPHS else (given,))]
        return super().overrides([word for word in shrunk(wanted) if word != "executor.compile=true"])


class FakeTimer:
    """Calls everything once, and says that it took so many seconds."""

    def __init__(self, seconds=1e-3):
        self.seconds = seconds

    def device(self, call, calls=20):
        call()
        return self.seconds

    wall = host = device

    def kernels(self, call):
        call()
        return 100

    def synchronisations(self, call):
        call()
        return ["/x/specbench/decoding/state.py:1"] * 3

    def captured(self, call):
        return call


@pytest.fixture
def small(monkeypatch):
    """Short texts, few cases, and no other processes."""
    monkeypatch.setattr(graphs, "LENGTH", 8)
    monkeypatch.setattr(graphs, "NEW", 8)
    monkeypatch.setattr(graphs.Clobber, "cases", ((1, 1, "sdpa"),))
    monkeypatch.setattr(graphs.Equality, "cases", (("paged", "stdlib"),))
    monkeypatch.setattr(graphs, "finished", lambda words, seconds: (0, "3 passed"))
    monkeypatch.setattr(rounds, "CHAINS", rounds.CHAINS[3:])
    monkeypatch.setattr(rounds, "OTHERS", rounds.OTHERS[:1])
    monkeypatch.setattr(rounds, "NEW_TOKENS", 8)
    monkeypatch.setattr(rounds, "AHEAD_TOKENS", 28)
    monkeypatch.setattr(rounds, "TRIES", 1)
    monkeypatch.setattr(steps, "SHARES", {64: 0.85})
    monkeypatch.setattr(leaves, "V", 512)
    monkeypatch.setattr(attention, "COLUMNS", (16,))
    monkeypatch.setattr(whole, "BATCHES", {2: 6.0})
    monkeypatch.setattr(whole, "NEW", 4)
    monkeypatch.setattr(steps, "cuda_roofs", lambda device, seconds: steps.Roofs(1e9, 2e9))


EXPECTED = {  # a number of each phase, and its verdict with the timer's numbers
    1: ("texts that differ, B 1, T 1, attention sdpa", PASSED),
    2: ("longest first call, cuDNN off", PASSED),
    3: ("share of the read roof at 64 columns", PASSED),
    4: ("kernels a layer at 64 columns, compiled", FAILED),
    5: ("waits a round, cudagraph, paged", PASSED),
    6: ("events / host, waiting for the recorder", PASSED),
    7: ("verdict and commit, B 1", FAILED),
    8: ("v of 6 tokens", PASSED),
    9: ("exit code of pytest -m cuda", PASSED),
    10: ("captures after warm-up", UNCLEAR),  # the eager executor counts none
    11: ("launch of 1,300 nodes", FAILED),
    12: ("over transformers, assisted", None),
}


@pytest.fixture
def cuda(monkeypatch):
    """Device "cuda" without a GPU: its operations run on the CPU, and mixed devices are refused."""
    load = pretrained.load_module

    def loaded(settings, role, device, dtype, seed):
        return to_cuda(load(settings, role, torch.device("cpu"), dtype, seed))

    monkeypatch.setattr(pretrained, "load_module", loaded)
    monkeypatch.setattr(pretrained, "reads_trees", lambda model, key: True)  # which compares numbers
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "fake")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**11, 10**11))
    monkeypatch.setattr(runner, "inference_mode", torch.no_grad)
    with cuda_on_cpu() as device:
        yield device


def phase_measures(number, lab, folder):
    """Runs a phase, and looks at one of its numbers."""
    measure_into(PHASES[number](), lab, FakeTimer(), lines_of(folder, number))
    found = {n.name: n for n in read(lines_of(folder, number))}
    name, verdict = EXPECTED[number]
    assert found[name].verdict == verdict or (verdict is None and found[name].value > 0), found[name]


@pytest.mark.parametrize("number", [number for number in PHASES if number not in WHOLE_RUNS])
def test_a_phase_measures_on_cuda(number, small, cuda, monkeypatch, tmp_path):
    if number in WITHOUT_KERNELS:
        monkeypatch.setattr(ops, "run_on", lambda device: False)
    phase_measures(number, CudaLab(torch.device("cuda"), tmp_path / "own"), tmp_path)


@pytest.mark.parametrize("number", WHOLE_RUNS)
def test_a_phase_measures_a_whole_run(number, small, tmp_path):
    phase_measures(number, SmallLab(torch.device("cpu"), tmp_path / "own"), tmp_path)


@pytest.mark.parametrize("number", [4, 5])
def test_tools_that_see_nothing_pass_nothing(number, small, cuda, monkeypatch, tmp_path):
    """A profiler without kernels, a debug mode without reports."""
    monkeypatch.setattr(ops, "run_on", lambda device: False)
    monkeypatch.setattr(FakeTimer, "kernels", lambda self, call: 0)
    monkeypatch.setattr(FakeTimer, "synchronisations", lambda self, call: call() or [])
    measure_into(PHASES[number](), CudaLab(torch.device("cuda"), tmp_path), FakeTimer(), tmp_path / "lines")
    seen = [n for n in read(tmp_path / "lines") if n.name.startswith(("kernels", "waits"))]
    assert seen and {n.value for n in seen} == {None} and UNCLEAR in {n.verdict for n in seen}
    assert all(n.remark for n in seen)


def test_a_tensor_on_the_host_is_noticed(small, cuda, monkeypatch, tmp_path):
    """Negative control of the device."""
    made, host = attention.tensors, torch.ones(1, 8, 16, 128, dtype=torch.bfloat16)
    monkeypatch.setattr(attention, "tensors", lambda *given: (*made(*given)[:2], host, None))
    with pytest.raises(MixedDevicesError):
        measure_into(PHASES[2](), CudaLab(torch.device("cuda"), tmp_path), FakeTimer(), tmp_path / "lines")


def test_a_number_knows_its_verdict():
    for value, limit, verdict in (
        (0.9, (">=", 0.85), PASSED), (0.8, (">=", 0.85), FAILED), (0.0, ("<=", 0.0), PASSED),
        (1.0, ("<=", 0.0), FAILED),
        (float("nan"), ("<=", 1.0), FAILED), (None, ("<=", 1.0), UNCLEAR), (5.0, None, TOLD), (None, None, TOLD),
    ):  # fmt: skip
        number = Number("n", value, "ms", limit)
        assert number.verdict == verdict
    assert Number.from_dict(json.loads(json.dumps(number.as_dict()))) == number


def test_a_phase_knows_its_verdict():
    good, bad, missing, told = (Number("n", v, "", w) for v, w in ((1, ("<=", 1)), (2, ("<=", 1)), (None, ("<=", 1)),
                                                                   (3, None)))  # fmt: skip
    for numbers, error, late, verdict in (
        ([good, told], "", False, PASSED), ([good, bad], "", False, FAILED), ([good, missing], "", False, UNCLEAR),
        ([good], "CUDA error", False, FAILED), ([good], "late", True, UNCLEAR), ([bad], "late", True, FAILED),
        ([], "", False, UNCLEAR), ([told], "", False, UNCLEAR),
    ):  # fmt: skip
        assert Outcome(1, "x", 1, 1, numbers, error, late).verdict == verdict


def phase_of(index, share):
    """A phase whose process is a script."""
    body = {"number": index, "title": f"phase {index}", "seconds": share, "meaning": "what <it> means"}
    return type(f"Phase{index}", (Phase,), body)


def script_of(folder, what):
    """The command of phases by number: `what` is the number's value, and what happens then."""

    def of(number):
        value, then = what[number]
        line = json.dumps(Number("time", value, "ms", ("<=", 10.0)).as_dict())
        start = f"open({str(lines_of(folder, number))!r}, 'a').write({line + chr(10)!r})"
        return [sys.executable, "-S", "-c", f"{start}\n{then}"]

    return of


def ends(status):
    with pytest.raises(SystemExit) as ended:
        status()
    return ended.value.code


def test_checks_go_on_after_failures_and_say_what_happened(tmp_path, monkeypatch, capsys):
    phases = {number: phase_of(number, share) for number, share in ((1, 5), (2, 5), (3, 1), (4, 5))}
    monkeypatch.setattr(command, "PHASES", phases)
    what = {1: (50.0, ""), 2: (5.0, "raise RuntimeError('CUDA error: assert')"),
            3: (5.0, "import time; time.sleep(99)"), 4: (5.0, "")}  # fmt: skip
    began = time.monotonic()
    assert command.check_all([*phases.values()][:2], tmp_path, 60, script_of(tmp_path, what)) == 1
    assert command.check_all([phases[3]], tmp_path / "late", 2, script_of(tmp_path / "late", what)) == 1
    assert command.check_all([phases[4]], tmp_path / "good", 60, script_of(tmp_path / "good", what)) == 0
    assert time.monotonic() - began < 60
    found = json.loads((tmp_path / "results.json").read_text())
    assert [phase["verdict"] for phase in found["phases"]] == [FAILED, FAILED] and found["verdicts"] == {FAILED: 2}
    assert found["phases"][0]["numbers"][0]["verdict"] == FAILED
    assert "CUDA error: assert" in found["phases"][1]["error"] and found["phases"][1]["numbers"]
    (late,) = json.loads((tmp_path / "late" / "results.json").read_text())["phases"]
    assert late["verdict"] == UNCLEAR and "not finished within 2 s" in late["error"] and late["numbers"]
    page = (tmp_path / "report.html").read_text()
    assert "what &lt;it&gt; means" in page and "CUDA error: assert" in page and "1. phase 1: failed" in page
    assert "CUDA error: assert" in capsys.readouterr().out


def test_what_a_phase_leaves_of_its_time_goes_to_later_ones(tmp_path, monkeypatch):
    allowed = []

    def quick(phase, folder, seconds, words):
        allowed.append(seconds)
        return Outcome(phase.number, phase.title, seconds, 0.0)

    monkeypatch.setattr(runner, "run_phase", quick)
    phases = [phase_of(1, 100), phase_of(2, 300), phase_of(3, 200)]
    run_phases(phases, tmp_path, 600, lambda number: [], lambda what: None)
    assert allowed == pytest.approx([100, 400, 600], abs=2)
    allowed.clear()
    run_phases(phases, tmp_path, 60, lambda number: [], lambda what: None)
    assert allowed == pytest.approx([10, 40, 60], abs=2)


def test_the_twelve_checks_take_ten_minutes_at_most():
    assert [*PHASES] == [*range(1, 13)]
    assert sum(phase.seconds for phase in PHASES.values()) <= 600
    assert all(phase.title and phase.meaning for phase in PHASES.values())


def test_without_cuda_it_says_so_and_exits_with_2(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ends(lambda: command.main(["--out", str(tmp_path / "out")])) == 2
    assert "no CUDA device is here" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_its_own_command_line_is_understood(tmp_path):
    words = runner.own_command("cuda:1", tmp_path, compiled=True)(3)
    options = command.parsed(words[3:])
    assert (options.child, options.device, options.out, options.compile) == (3, "cuda:1", str(tmp_path), True)
    assert command.parsed(["--phase", "3", "--phase", "8"]).phase == [3, 8]
    assert ends(lambda: command.parsed(["--phase", "13"])) == 2
