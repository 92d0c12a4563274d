"""Measures specbench beside llama.cpp's server, plain and with a draft model, all on each prompt in turn.

python experiments/server/run.py [--folder DIR] [OVERRIDE...]

Builds `llama-server` and converts the shipped pair if they are not there yet (experiments/peers/install.py), starts two
servers on this machine, and leaves a run in outputs/server. Further words are the run's overrides.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))
from install import FOLDER, install
from worker_llama import Server

GAMMA = 4


def options(folder: Path, draft: bool, threads: int) -> list[str]:
    """Of a server of the pair in float32, keys and values too, with a constant gamma and no confidence threshold."""
    count = str(threads)
    every = ["-m", str(folder / "gguf" / "target-f32.gguf"), "-c", "512", "-np", "1", "-t", count, "-tb", count,
             "-ctk", "f32", "-ctv", "f32", "--no-webui", "--cache-ram", "0"]  # fmt: skip
    if not draft:
        return every
    drafter = ["-md", str(folder / "gguf" / "drafter-f32.gguf"), "-ctkd", "f32", "-ctvd", "f32"]
    for name, value in {
        "n-max": str(GAMMA),
        "n-min": "0",
        "p-min": "0",
        "threads": count,
        "threads-batch": count,
    }.items():
        drafter += [f"--spec-draft-{name}", value]
    return [*every, *drafter, "--spec-type", "draft-simple"]


def main() -> int:
    """Installs, starts the servers and measures; returns the run's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for the server and the converted models")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE")
    args = parser.parse_intermixed_args()
    folder = args.folder.resolve()
    if not install(folder, ["llama"]):
        return 1
    threads = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
    servers = {name: Server(folder, f"server-{name}", *options(folder, name == "draft", threads))
               for name in ("plain", "draft")}  # fmt: skip
    for server in servers.values():
        server.wait()
    urls = ", ".join(f"{name}: '{server.address}'" for name, server in servers.items())
    command = [sys.executable, "-m", "specbench", "name=server", "logger=none", f"gamma={GAMMA}", "temperature=0",
               "dtype=float32", "baseline=server", f"baseline.url={{{urls}}}", *args.overrides]  # fmt: skip
    return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main())
