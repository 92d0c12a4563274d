"""What is measured: parts of at most three minutes each, which leave their runs in outputs/cpu_targets/PART."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path("outputs/cpu_targets")
SAME = ("gamma=4", "verdict_tokens=0", "logger=none")
START = ("temperature=0", "data.limit=2", "max_new_tokens=8", *SAME)  # as many columns as programs_t0
STARTS = 4  # of each executor, in turn
BATCH = ("temperature=0", "data.count=160")  # five groups of 32 for eight rows
SHORT = "max_new_tokens=4"
OTHERS = 0.1  # of the cores: a part during which other processes used more is measured again


@dataclass(frozen=True)
class Part:
    """A command, and what it is run with: `python -m MODULE WORDS`, or starts of both executors in turn."""

    module: str
    words: Sequence[str]
    timed: bool = True  # else its times are not used


def compiling(*words: str, timed: bool = False) -> Part:
    """A run that leaves compiled programs on the disk."""
    return Part("specbench", ("executor=compiled", *words, *SAME), timed)


def executors(temperature: int) -> Part:
    """Every executor of this machine in turn, the default with stored programs and without any."""
    also = ("--also", "executor=auto executor.programs=false")
    return Part("specbench.compare", ("executor=auto,compiled,prepacked,eager", *also, f"temperature={temperature}",
                                      "data.limit=6", *SAME))  # fmt: skip


def peers(temperature: int) -> Part:
    """The default, generate() and assisted generation in turn."""
    return Part("specbench", (f"temperature={temperature}", "baseline=transformers", "data.limit=12", *SAME))


PARTS = {
    "programs_t0": compiling("temperature=0", "data.limit=16", timed=True),
    "programs_t1": compiling("temperature=1", "data.limit=16", timed=True),
    "programs_batch": compiling("batch_size=8", SHORT, *BATCH),
    "programs_bfloat16": compiling("temperature=0", "dtype=bfloat16", "data.limit=8"),
    "executors_t0": executors(0),
    "executors_t1": executors(1),
    "peers_t0": peers(0),
    "peers_t1": peers(1),
    "batch": Part("specbench.compare", ("batch_size=1,8", "max_new_tokens=48", *BATCH, *SAME)),
    "bfloat16": Part("specbench.compare", ("dtype=float32,bfloat16", "temperature=0", "data.limit=8", *SAME)),
    "start": Part("specbench", START),
}


def measure(name: str) -> None:
    """Runs a part if it is not finished."""
    part, folder = PARTS[name], FOLDER / name
    done = folder / "seconds.json"
    if done.is_file():
        return
    begun = time.perf_counter()
    print(f"{name}: python -m {part.module} {' '.join(part.words)}", flush=True)
    if name == "start":
        found = starts(part, folder)
    elif part.module == "specbench":
        run([*part.words, f"hydra.run.dir={folder}"])
        found = {}
    else:
        run([*part.words, f"name={folder.relative_to('outputs')}"], part.module)
        found = {}
    if part.timed and (share := others(folder)) > OTHERS:
        print(f"{name}: other processes used {share:.0%} of the cores: it is measured again the next time", flush=True)
        folder.rename(folder.with_name(f"{name}-disturbed-{int(time.time())}"))
        return
    folder.mkdir(parents=True, exist_ok=True)
    done.write_text(json.dumps({"part": time.perf_counter() - begun, **found}))
    print(f"{name}: {time.perf_counter() - begun:.0f} s", flush=True)


def others(folder: Path) -> float:
    """The largest share of the cores that other processes had during the runs in a folder, as far as it is known."""
    found = [json.loads(path.read_text()).get("machine") or {} for path in folder.glob("**/results.json")]
    return max((machine.get("others") or 0.0 for machine in found), default=0.0)


def starts(part: Part, folder: Path) -> dict[str, list[float]]:
    """Seconds of whole runs of a few tokens, by executor, in turn."""
    found: dict[str, list[float]] = {"auto": [], "eager": []}
    for number in range(STARTS + 1):
        for executor in sorted(found, reverse=bool(number % 2)):
            begun = time.perf_counter()
            run([f"executor={executor}", *part.words, f"hydra.run.dir={folder}/{executor}-{number}"])
            if number:  # before it files were in no cache
                found[executor].append(time.perf_counter() - begun)
    return found


def run(words: Sequence[str], module: str = "specbench") -> None:
    """Runs a command with one thread a core. Its output is in its folder's run.log."""
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    subprocess.run([sys.executable, "-m", module, *words], check=True, stdout=subprocess.DEVNULL, env=environment)
