"""Measures specbench beside other engines, all on each prompt in turn, and installs the engines that are not there yet.

python experiments/peers/run.py [--folder DIR] [--precision f32,reduced] [--temperature 0,1] [--engines NAME,NAME]
    [OVERRIDE...]

A run for each precision and temperature, left in DIR/runs for make.py. Further words are the run's overrides, such as
`executor=compiled`. An engine in another precision than float32 is NAME:PRECISION, as llama:q8_0 or openvino:bf16.

target=NAME or target.path=PATH measures another checkpoint, which transformers, llama.cpp and OpenVINO decode. They
have a draft model if the run's drafter is one (drafter=model).
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from converted import folders
from engines import HERE, TRANSFORMERS
from install import ANY, FOLDER, PAIR, STEPS, install

PRECISIONS = {  # engines and overrides
    "f32": ([TRANSFORMERS, *STEPS], ["dtype=float32"]),
    "reduced": ([TRANSFORMERS, "llama:f16", "llama:q8_0", "openvino:bf16"], ["dtype=bfloat16"]),
}


def measure(
    folder: Path, precision: str, temperature: str, engines: Sequence[str], models: Sequence[Path],
    overrides: Sequence[str],
) -> int:  # fmt: skip
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
        f"+baseline.models=[{','.join(repr(str(model)) for model in models)}]",
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
    models, failed = folders(args.overrides), 0
    able = {TRANSFORMERS, *(STEPS if tuple(models) == PAIR else ANY)}
    for precision in args.precision:
        wanted = args.engines or [name for name in PRECISIONS[precision][0] if name.partition(":")[0] in able]
        names = dict.fromkeys(engine.partition(":")[0] for engine in wanted)
        if unknown := set(names) - able:
            parser.error(f"{', '.join(sorted(unknown))}: no such engine for {models[0].name}, choose of "
                         f"{', '.join(sorted(able))}")  # fmt: skip
        there = {TRANSFORMERS, *install(args.folder, [name for name in names if name != TRANSFORMERS], models)}
        engines = [engine for engine in wanted if engine.partition(":")[0] in there]
        for temperature in args.temperature:
            failed += measure(args.folder, precision, temperature, engines, models, args.overrides) != 0
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
