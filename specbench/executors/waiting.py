"""How OpenMP's threads wait for each other, which is chosen before torch is loaded: by spinning, which is fastest on
idle cores; but beside a process that computes a thread that spins keeps a core from the one that has work."""

import os
import sys
import time
from pathlib import Path

SPINS = "1000"  # of a thread that waits beside other processes
BUSY = 0.4  # cores that others use, from which on they are in the way
SHORTEST = 0.1  # seconds in which that can be measured: the system counts hundredths
CHOSEN = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME", "OMP_NUM_THREADS")  # by the user
notes: list[str] = []  # what was chosen, for results


def working() -> tuple[float, float]:
    """Seconds that others have used of this process's cores, 0 where the system does not say, and when that was."""
    used = 0.0
    try:
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        for line in Path("/proc/stat").read_text().splitlines():
            name, *ticks = line.split()
            if name in cores:  # user, nice, system, idle, waiting for disks, interrupts of two kinds, ...
                used += sum(map(int, [*ticks[:3], *ticks[5:7]])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return 0.0, time.perf_counter()
    return used - time.process_time(), time.perf_counter()


BEGUN = working()  # when specbench was imported


def choose() -> None:
    """Lets threads give their core away soon if other processes have used cores since specbench was imported. The
    user's own choice stays, and no variable changes what is loaded already."""
    if "torch" in sys.modules or any(name in os.environ for name in CHOSEN):
        return
    used, now = working()
    others, seconds = used - BEGUN[0], now - BEGUN[1]
    if seconds >= SHORTEST and others > BUSY * seconds:
        os.environ["GOMP_SPINCOUNT"] = SPINS
        notes.append(
            f"other processes used {others / seconds:.1f} cores when this one began: its waiting threads give theirs "
            f"away (GOMP_SPINCOUNT={SPINS}), and its steps take longer; measure again on an idle machine"
        )


def told() -> list[str]:
    """Notes if other processes used this one's cores when it began, or have since specbench was imported."""
    used, now = working()
    others = (used - BEGUN[0]) / max(now - BEGUN[1], SHORTEST)
    busy = f"other processes used {others:.1f} cores meanwhile: steps took longer, and intervals are wider"
    return notes or ([busy] if others > BUSY else [])
