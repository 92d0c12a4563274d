"""Measures specbench beside other engines, all on each prompt in turn, and installs the engines that are not there yet.

python experiments/peers/run.py [--folder DIR] [--precision f32,reduced] [--temperature 0,1] [--engines NAME,NAME]
    [OVERRIDE...]

A run for each precision and temperature, left in DIR/runs for make.py. Further words are the run's overrides, such as
`executor=compiled`. An engine in another precision than float32 is NAME:PRECISION, as llama:q8_0 or openvino:bf16.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from engines import HERE, TRANSFORMERS
from install import FOLDER, STEPS, install

PRECISIONS = {  # engines and overrides
    "f32": ([TRANSFORMERS, *STEPS], ["dtype=float32"]),
    "reduced": ([TRANSFORMERS, "llama:f16", "llama:q8_0", "openvino:bf16"], ["dtype=bfloat16"]),
}


def measure(folder: Path, precision: str, temperature: str, engines: Sequence[str], overrides: Sequence[str]) -> int:
    """One run; returns its exit code."""
    words = [f"temperature={temperature}", f"precision={precision}", *overrides]
    out = (folder / "runs" / ",".join(words).replace("/", "_")).resolve()
    command = [
        *(sys.executable, "-m", "specbench", "name=peers", "logger=none", f"temperature={temperature}"),
        *PRECISIONS[precision][1],
        *overrides,
        "baseline._target_=engines.Engines",
        f"+baseline.engines=[{','.join(repr(engine) for engine in engines)}]",
        f"+baseline.folder={folder.resolve()}",
        f"+baseline.texts='{out / 'texts.jsonl'}'",
        f"hydra.run.dir='{out}'",
    ]
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}).returncode


def words(text: str) -> list[str]:
    """The words between commas."""
    return text.split(",")


def main() -> int:
    """Installs and measures; returns 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for environments, converted models and runs")
    parser.add_argument("--precision", type=words, default=[*PRECISIONS], help="f32, reduced or f32,reduced (both)")
    parser.add_argument("--temperature", type=words, default=["0", "1"], help="0, 1 or 0,1 (both)")
    parser.add_argument("--engines", type=words, help="these alone, as transformers,llama,llama:q8_0")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE")
    args = parser.parse_intermixed_args()
    if unknown := set(args.precision) - set(PRECISIONS):
        parser.error(f"--precision {', '.join(sorted(unknown))} is not allowed: it must be of {', '.join(PRECISIONS)}")
    failed = 0
    for precision in args.precision:
        wanted = args.engines or PRECISIONS[precision][0]
        names = dict.fromkeys(engine.partition(":")[0] for engine in wanted)
        if unknown := set(names) - {TRANSFORMERS, *STEPS}:
            parser.error(f"{', '.join(sorted(unknown))}: no such engine, choose of {TRANSFORMERS}, {', '.join(STEPS)}")
        there = {TRANSFORMERS, *install(args.folder, [name for name in names if name != TRANSFORMERS])}
        engines = [engine for engine in wanted if engine.partition(":")[0] in there]
        for temperature in args.temperature:
            failed += measure(args.folder, precision, temperature, engines, args.overrides) != 0
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
