"""The checks of a GPU, without one: each runs on small models, on a CUDA device whose operations run on the CPU, with a
profiler that sees what it is told."""

import json
import sys
import time
import zipfile
from types import SimpleNamespace

import pytest
import torch
from cuda_on_cpu import MixedDevicesError, answer_for_a_machine, cuda_on_cpu

from specbench.config.compose import compose
from specbench.config.validate import check
from specbench.contrib.gpu_check import agreement, bench, command, decoding, timing
from specbench.contrib.gpu_check.bench import (
    FAILED,
    GRAPHS,
    INFO,
    PASSED,
    UNCLEAR,
    Bench,
    Kernel,
    Measured,
    Profile,
)
from specbench.contrib.gpu_check.command import CHECKS, Check, measure_into, numbers_file
from specbench.kernels import ops
from specbench.run.decoder import Session
from specbench.run.machine_watch import Roofs

SMALL = {
    "target=llama3b": {"vocab_size": 4096, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1,
                       "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16},
    "drafter=llama1b": {"vocab_size": 4096, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
                        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
}  # fmt: skip
WITHOUT_KERNELS = (
    4,
    5,
    6,
    7,
    8,
    11,
)  # an interpreter, which runs them here, takes most of the time; others decode with them


class CudaBench(Bench):
    """Device "cuda", small shapes, and no graphs. What is asked for must be possible on CUDA as it is."""

    def overrides(self, overrides):
        check(compose(super().overrides(overrides)))
        captured = (GRAPHS, "executor=auto")
        graphs = (GRAPHS, "executor._target_=graph_memory.Rerun", "executor.compile=false")  # run their functions again
        wanted = [word for given in overrides for word in (graphs if given in captured else (given,))]
        shapes = [
            f"{choice.partition('=')[0]}.shape.{key}={value}"
            for choice, shape in SMALL.items() if choice in overrides for key, value in shape.items()
        ]  # fmt: skip
        small = [*wanted, *shapes, "max_new_tokens=6", "data.limit=1", "gamma=1"]
        return super().overrides([word for word in small if word != "executor.compile=true"])


def bench_of(folder):
    return CudaBench(torch.device("cuda"), folder)


@pytest.fixture
def seen(monkeypatch):
    """Short texts and few cases; what the profiler sees can be set."""
    found = {"profile": Profile(kernels=12, seconds=1e-5, graphs=4, waits=4)}

    def profiled(call):
        call()
        return found["profile"]

    for module in (agreement, timing):
        monkeypatch.setattr(module, "profiled", profiled)
        monkeypatch.setattr(module, "GAMMA", 1)
    monkeypatch.setattr(bench, "MEASURED_SECONDS", 1e-6)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)  # a build for CUDA may lack the driver
    monkeypatch.setattr(agreement, "SHORT", ("executor=auto", "attention=sdpa", "target=bytes", "drafter=bytes"))
    monkeypatch.setattr(agreement, "LENGTH", 8)
    monkeypatch.setattr(agreement, "NEW", 8)
    monkeypatch.setattr(agreement, "SAMPLED", ((1, 1, "sdpa"),))
    monkeypatch.setattr(agreement, "GREEDY", (("paged", "stdlib"),))
    monkeypatch.setattr(agreement, "V", 512)
    monkeypatch.setattr(agreement, "ROWS", 2)
    monkeypatch.setattr(agreement, "COLUMNS", (16,))
    monkeypatch.setattr(timing, "CHAINS", timing.CHAINS[3:])
    monkeypatch.setattr(timing, "OTHERS", timing.OTHERS[:1])
    monkeypatch.setattr(timing, "NEW_TOKENS", 8)
    monkeypatch.setattr(timing, "TRIES", 1)
    monkeypatch.setattr(timing, "SHARES", {64: 0.85})
    for module in (timing, decoding):
        monkeypatch.setattr(module, "cuda_roofs", lambda device: Roofs(1.0, 2.0))
    monkeypatch.setattr(decoding, "WAYS", [(1, decoding.AUTO), (1, (GRAPHS,)), (2, decoding.AUTO)])
    monkeypatch.setattr(decoding, "PEERS", ())  # transformers indexes with the host's tensors, which a GPU allows
    monkeypatch.setattr(decoding, "NEW", 6)
    monkeypatch.setattr(decoding, "SHAPES", {"o": (16, 8)})
    monkeypatch.setattr(decoding, "COLD", 512)
    monkeypatch.setattr(decoding, "TOKENS", (1, 2))
    monkeypatch.setattr(decoding, "LENGTHS", (9, 12))
    monkeypatch.setattr(decoding, "kernels_of", lambda call: call() and [Kernel("mm", 4, 1e-3), Kernel("add", 8, 1e-4)])
    return found


@pytest.fixture
def cuda(monkeypatch):
    """Device "cuda" without a GPU: its operations run on the CPU, and mixed devices are refused."""
    monkeypatch.setattr(command, "inference_mode", torch.no_grad)
    with cuda_on_cpu() as device:
        answer_for_a_machine(monkeypatch)
        yield device


def measured(number, folder):
    """The numbers of a check by name, as its process would write them."""
    path = numbers_file(folder, number)
    measure_into(CHECKS[number], bench_of(folder), path)
    return {entry["name"]: entry for entry in map(json.loads, path.read_text().splitlines())}


EXPECTED = {  # numbers of each check, and their verdicts
    1: {"softmax, largest difference": PASSED, "draws that differ": PASSED, "verdicts that differ": PASSED,
        "attention 2 x 16, relative difference": PASSED, "attention 2 x 16, kernel": INFO},
    2: {"texts that differ, gamma=5, batch_size=1, temperature=1, attention=sdpa": PASSED,
        "functions that could not be captured, gamma=5, batch_size=1, temperature=1, attention=sdpa": PASSED,
        "largest difference of a beta, gamma=5, batch_size=1, temperature=1, attention=sdpa": PASSED,
        "texts that differ, cache=paged, drafter=stdlib, temperature=0, batch_size=2": PASSED},
    3: {"share of the read roof at 64 columns": PASSED, "kernels a layer at 64 columns": INFO},
    4: {"share of the read roof of a round, speculative, executor=auto, 2 rows": INFO,
        "tokens/s, speculative, executor=auto, 1 rows": INFO, "call or round, plain, executor=auto, 1 rows": INFO,
        "tokens/s, plain, executor=auto, 2 rows": INFO,
        "captures in the timed part, speculative, executor=cudagraph, 1 rows": PASSED},
    5: {"all kernels, executor=auto": INFO, "1. mm, executor=auto": INFO, "2. add, executor=eager": INFO},
    6: {"the verdict's least limit of these, executor=auto": INFO,
        "distance from p of the stock module, executor=auto, quantile 1": INFO,
        "other likeliest token than p of a call on 2 tokens, executor=eager": INFO},
    7: {"waits a round, executor=cudagraph, cache=paged": PASSED,
        "graphs a round, executor=cudagraph, cache=paged": INFO},
    8: {"events / host": PASSED, "round by events": INFO},
    9: {"product o, 2 tokens": INFO},
    10: {"distance of p from eager mode's, compiled": PASSED,
         "distance of p from eager mode's, compiled by layers": PASSED,
         "kernels a layer at 64 columns, compiled": PASSED, "step at 1,024 columns, eager": INFO},
    11: {"verdict passed, dtype=float32, temperature=0": PASSED,
         "verdict passed, dtype=bfloat16, temperature=0": PASSED,
         "verdict passed, dtype=float32, temperature=1": UNCLEAR,
         "verdict passed, dtype=bfloat16, temperature=1": UNCLEAR,
         "largest distance of p over its limit, dtype=bfloat16, temperature=1": PASSED},  # one prompt is too few
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("number", CHECKS)
def test_a_check_measures_on_cuda(number, seen, cuda, monkeypatch, tmp_path):
    cuda.any_shapes = number == 11  # the verdict is not timed
    if number in WITHOUT_KERNELS:
        monkeypatch.setattr(ops, "run_on", lambda device: False)
    found = measured(number, tmp_path)
    verdicts = {name: found[name]["verdict"] for name in EXPECTED[number]}
    assert verdicts == EXPECTED[number], found


@pytest.mark.slow
@pytest.mark.parametrize(("number", "name"), [(10, "kernels a layer"), (7, "waits")])
def test_a_profiler_that_sees_nothing_passes_nothing(number, name, seen, cuda, monkeypatch, tmp_path):
    monkeypatch.setattr(ops, "run_on", lambda device: False)
    seen["profile"] = Profile(0, 0.0, 0, 0)
    found = [entry for key, entry in measured(number, tmp_path).items() if key.startswith(name)]
    assert found and UNCLEAR in {entry["verdict"] for entry in found}
    assert all(entry["value"] is None and entry["remark"] for entry in found)


def test_a_wrong_kernel_fails(seen, cuda, monkeypatch, tmp_path):
    """Negative control: an attention kernel that misses the last column, draws of the token after, and products of the
    wrong half of the bytes."""
    attend, race = agreement.kernel_attention.attend_op, ops.race

    def blind(q, keys, values, table, first, *others):
        return attend(q, keys, values, table, first - 1, *others)

    monkeypatch.setattr(agreement.kernel_attention, "attend_op", blind)
    monkeypatch.setattr(ops, "race", lambda weights, bits: race(weights, bits) + 1)
    found = measured(1, tmp_path)
    assert found["attention 1 x 16, relative difference"]["verdict"] == FAILED
    assert found["draws that differ"]["verdict"] == FAILED and found["softmax, largest difference"]["verdict"] == PASSED


def test_a_tensor_on_the_host_is_noticed(seen, cuda, monkeypatch, tmp_path):
    """Negative control of the device."""
    attend, host = agreement.kernel_attention.attend_op, torch.ones(1, 8, 16, 128, dtype=torch.bfloat16)
    monkeypatch.setattr(agreement.kernel_attention, "attend_op", lambda q, k, v, *others: attend(q, host, v, *others))
    with pytest.raises(MixedDevicesError):
        measured(1, tmp_path)


def test_a_number_knows_its_verdict():
    for value, limit, verdict in (
        (0.9, (">=", 0.85), PASSED), (0.8, (">=", 0.85), FAILED), (0.0, ("<=", 0.0), PASSED),
        (1.0, ("<=", 0.0), FAILED), (float("nan"), ("<=", 1.0), FAILED), (None, ("<=", 1.0), UNCLEAR),
        (5.0, None, INFO), (None, None, INFO),
    ):  # fmt: skip
        assert Measured("n", value, "ms", limit).verdict == verdict


def test_the_profile_and_the_timer_are_pytorchs(monkeypatch):
    """On a CPU the profiler sees no kernel, no graph and no wait; time passes."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert bench.profiled(lambda: torch.ones(3).sum()) == Profile(0, 0.0, 0, 0)
    monkeypatch.setattr(bench, "MEASURED_SECONDS", 1e-3)
    assert 1e-3 < bench.time_call(lambda: time.sleep(1e-3)) < 1


def script_processes(folder, monkeypatch, what):
    """Processes of checks that are scripts: what[number] is a number's value, and what happens then."""

    def words(options, number):
        value, then = what[number]
        entry = Measured("time", value, "ms", ("<=", 10.0) if value else None)  # 0 has no limit
        line = json.dumps({"name": "time", "value": value, "unit": "ms", "limit": entry.limit, "remark": "",
                           "verdict": entry.verdict})  # fmt: skip
        start = f"open({str(numbers_file(folder, number))!r}, 'a').write({line + chr(10)!r})"
        return [sys.executable, "-S", "-c", f"{start}\n{then}"]

    monkeypatch.setattr(command, "child_command", words)


def checked(folder, limit, *numbers):
    options = ["--out", str(folder), "--limit-seconds", str(limit)]
    options += [word for number in numbers for word in ("--phase", str(number))]
    code = command.check_all(command.parsed(options), {"device": "fake"}, time.monotonic())
    return code, json.loads((folder / "results.json").read_text())


@pytest.mark.slow
def test_checks_go_on_after_failures_and_say_what_happened(tmp_path, monkeypatch, capsys):
    what = {
        1: (50.0, ""),
        2: (5.0, "raise RuntimeError('CUDA error: assert')"),
        3: (5.0, "import time; time.sleep(99)"),
        4: (5.0, ""),
    }
    script_processes(tmp_path, monkeypatch, what)
    began = time.monotonic()
    code, found = checked(tmp_path, 60, 1, 2)
    assert code == 1 and found["verdicts"] == {FAILED: 2} and found["facts"] == {"device": "fake"}
    assert found["checks"][0]["numbers"][0]["verdict"] == FAILED and not found["checks"][0]["error"]
    assert "CUDA error: assert" in found["checks"][1]["error"] and found["checks"][1]["numbers"]
    code, found = checked(tmp_path, 2, 3)
    (late,) = found["checks"]
    assert code == 1 and late["verdict"] == UNCLEAR and "not finished within 2 s" in late["error"] and late["numbers"]
    assert checked(tmp_path, 60, 4)[0] == 0
    assert time.monotonic() - began < 60
    assert "CUDA error: assert" in capsys.readouterr().out


def test_what_a_check_leaves_of_its_time_goes_to_later_ones(tmp_path, monkeypatch):
    allowed = []

    def quick(number, folder, seconds, words):
        allowed.append(seconds)
        return {"number": number, "title": "", "verdict": PASSED, "error": "", "seconds": 0, "numbers": []}

    monkeypatch.setattr(command, "run_check", quick)
    assert checked(tmp_path, 600)[0] == 0
    shares = [CHECKS[number].seconds for number in command.ORDER]
    assert {*command.ORDER} == {*CHECKS}
    assert allowed[0] == pytest.approx(600 * shares[0] / sum(shares), abs=2) and allowed[-1] == pytest.approx(
        600, abs=2
    )
    assert sum(shares) <= 600 and all(mine >= share - 2 for mine, share in zip(allowed, shares, strict=True))


def ends(call):
    with pytest.raises(SystemExit) as ended:
        call()
    return ended.value.code


def test_without_cuda_it_says_so_and_exits_with_2(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ends(lambda: command.main(["--out", str(tmp_path / "out")])) == 2
    assert "no CUDA device is here" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_its_own_command_line_is_understood(tmp_path):
    given = command.parsed(["--device", "cuda:1", "--out", str(tmp_path), "--compile"])
    options = command.parsed(command.child_command(given, 3)[3:])
    assert (options.child, options.device, options.out, options.compile) == (3, "cuda:1", str(tmp_path), "true")
    assert command.parsed(["--phase", "3", "--phase", "6"]).phase == [3, 6]
    assert ends(lambda: command.parsed(["--phase", "12"])) == 2


def test_a_process_of_its_own_runs_one_check(cuda, monkeypatch, tmp_path):
    def measure(given):
        yield Measured("on CUDA", float(given.device.type == "cuda" and given.compiled), "", (">=", 1.0))

    monkeypatch.setitem(CHECKS, 3, Check("one number", 1, measure))
    command.main(["--child", "3", "--out", str(tmp_path), "--compile"])
    assert json.loads(numbers_file(tmp_path, 3).read_text())["verdict"] == PASSED
    assert (tmp_path / "phase_3").is_dir()


def test_laws_that_differ_are_told():
    """Distances of laws that are known."""
    laws = [torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.2, 0.8, 0.0])]
    others = [torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.6, 0.1, 0.3])]
    found = {number.name: number.value for number in decoding._distances("another", laws, others)}
    assert found["distance from another, quantile 1"] == pytest.approx(0.7)
    assert found["distance from another, quantile 0.5"] == pytest.approx(0.35)
    assert found["other likeliest token than another"] == 1


def test_everything_is_in_one_file_to_send(tmp_path, monkeypatch):
    """Also if a later check never ends."""
    what = {1: (5.0, "raise ValueError('below') from OSError('first')"), 9: (0.0, "")}
    script_processes(tmp_path, monkeypatch, what)
    assert checked(tmp_path, 60, 9)[0] == 0  # numbers without limits fail nothing
    with pytest.raises(KeyError):  # what the second one ends with here
        checked(tmp_path, 60, 1, 2)
    with zipfile.ZipFile(tmp_path / "gpu_check.zip") as packed:
        assert {"results.json", "phase_1.log", "phase_1.jsonl"} <= {*packed.namelist()}
        log = packed.read("phase_1.log").decode()
    assert "OSError: first" in log and "ValueError: below" in log


@pytest.mark.slow
def test_captures_in_a_timed_part_fail(seen, cuda, monkeypatch, tmp_path):
    """Negative control: rows at other addresses in each decode."""
    monkeypatch.setattr(ops, "run_on", lambda device: False)
    monkeypatch.setattr(decoding, "WAYS", [(1, decoding.AUTO)])
    decode, states = Session.decode, []

    def anew(self, *args, **more):
        states.append(self._state)  # so that its memory is not used again
        self._state = None
        return decode(self, *args, **more)

    monkeypatch.setattr(Session, "decode", anew)
    found = measured(4, tmp_path)
    assert found["captures in the timed part, speculative, executor=auto, 1 rows"]["verdict"] == FAILED


def test_kernels_of_one_name_are_added_up(monkeypatch):
    def event(name, microseconds):
        return SimpleNamespace(name=name, self_device_time_total=microseconds)

    monkeypatch.setattr(bench, "events_of", lambda call: ([], [event("a", 2.0), event("b", 3.0), event("a", 4.0)]))
    assert bench.kernels_of(lambda: None) == [Kernel("a", 2, pytest.approx(6e-6)), Kernel("b", 1, pytest.approx(3e-6))]
