"""The advice against measuring everything: is it the best, how long does it take, is its gain that of other prompts?

python experiments/advise/make.py
python experiments/advise/make.py --minutes 60 --pair "stories=target.path=P drafter.path=Q data=text data.path=F"

Each case is a pair of models, a temperature and a batch size. Its advice reads the first prompts; then all drafters
that fit, with gamma 2, 4 and 8, and what the advice tried beside them are decoded in turn on others (python -m
specbench.compare). The best is chosen on every second unit of them, and judged on the other ones. Finished
cases are in results.csv and are not measured again: the same command goes on, also within a case that was stopped, by
outputs/advice_cases. Delete both to measure all again. --stored makes the table from results.csv.
"""

import argparse
import itertools
import json
import math
import shlex
import statistics
import subprocess
import sys
import time
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Measured, commit, machine, read_rows, text, to_markdown, write_header, write_rows

from specbench.contrib.advise.race import LEVEL
from specbench.results.reader import read_result
from specbench.stats.bootstrap import student

FOLDER = Path(__file__).resolve().parent
PAIRS = {
    "stdlib": "drafter=stdlib",
    "stdlib_tv": "drafter=stdlib_tv",
    "bytes": "drafter=bytes target=bytes data=unconditional",
}  # included; others by --pair
GAMMAS = (2, 4, 8)
ADVICE = {1: 3.0, 8: 5.0}  # minutes of an advice, by rows
CASES = [(temperature, rows) for rows in (1, 8) for temperature in (0, 1)]
REQUESTS = {1: 96, 8: 160}  # of the measurement of everything: 96 units, or five of 32 requests
PROMPTS, READ = 640, {1: 480, 8: 480}  # of the included data, and those that the advice may read, by rows
WITHIN = 0.03
STORE = Path("outputs") / "advice_cases"
TABLE = {
    "pair": text("pair"),
    "T": lambda row: f"{row['temperature']:g}",
    "batch": lambda row: f"{row['batch']:g}",
    "advice": text("advice"),
    "its gain": lambda row: f"{row['gain']:.2f} ({row['low']:.2f} to {row['high']:.2f})",
    "its gain on other prompts": lambda row: (
        f"{row['advised_is']:.2f}"
        + ("" if math.isnan(row["is_low"]) else f" ({row['is_low']:.2f} to {row['is_high']:.2f})")
    ),
    "best of all": lambda row: f"{row['best']}: {row['best_is']:.2f}",
    "behind the best": lambda row: f"{row['regret']:.1%}",
    "time": lambda row: f"{row['share']:.2f}",
    "minutes": lambda row: f"{row['minutes']:.0f}",
    "verdict": text("verdict"),
}


def words_of_case(pair: str, order: int, temperature: int, rows: int) -> list[str]:
    """The overrides of a case, without which prompts it reads. Each included pair has its own order: with one order,
    pairs that share a target would be judged on the same texts at temperature 0. Some texts are still shared."""
    own = shlex.split(pair)
    count = [] if any(word.startswith("data.path=") for word in own) else [f"data.count={PROMPTS}"]
    return [*own, f"temperature={temperature}", f"batch_size={rows}", *count, f"order={order}"]


def case(name, pair, order, temperature, rows, read, requests, minutes) -> dict | None:
    """The row of a case: measures what is missing. None if something failed."""
    words = words_of_case(pair, order, temperature, rows)
    digest = zlib.crc32(shlex.join([*words, str(read), str(requests), str(minutes)]).encode())
    place = STORE / f"{name}_t{temperature}_b{rows}_{digest:08x}"
    place.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "specbench.advise", *words, f"take={read}", "--minutes", str(minutes)]
    if not timed(place / "advice", [*command, f"hydra.run.dir={place / 'advice'}"]):
        return None
    state = json.loads((place / "advice" / "advice.json").read_text())
    (stages,) = (own["stages"] for own in state["loads"].values())
    ways = [way for stage in stages.values() for way in stage["ways"].values()]
    pilot = stages["pilot"]["ways"].values()
    ways += [[f"gamma={gamma}" if word.startswith("gamma=") else word for word in way]
             for way in pilot for gamma in GAMMAS]  # fmt: skip
    unique = sorted({" ".join(way): way for way in ways}.values(), key=len)  # the first has no path
    return compared(place, words, unique, state, rows, (read, requests))


def timed(place: Path, command: list[str]) -> bool:
    """Whether a command ended well; adds its seconds to those that are noted beside `place`."""
    begun = time.monotonic()
    failed = subprocess.run(command, check=False).returncode
    note(place.with_name(f"{place.name}_seconds.json"), time.monotonic() - begun)
    if failed:
        print(f"{place}: it failed", file=sys.stderr)
    return not failed


def compared(place, words, unique, state, rows, prompts) -> dict | None:
    """Decodes all ways in turn on other prompts (how many come before them, and how many they are), unless that was
    done, and makes the row."""
    (of_load,), (answer,), (skip, take) = state["loads"].values(), state["answers"], prompts
    out = place / "everything"
    path = out / "comparison.json"
    if not path.is_file():
        more = [f"skip={skip}", f"take={take}", f"hydra.sweep.dir={out}", "logger=none", f"name={place.name}"]
        first, *others = [shlex.join(way) for way in unique]
        common = [word for word in words if not word.startswith("drafter")]
        also = [word for other in others for word in ("--also", other)]
        command = [sys.executable, "-m", "specbench.compare", *common, *more, *shlex.split(first), *also]
        if not timed(out, command) or not path.is_file():
            return None
    runs = json.loads(path.read_text())["comparisons"][0]["runs"]
    results = {run["folder"]: read_result(out / run["folder"]) for run in runs}
    gains = {folder: (of["measured"], of["ci95"] or [math.nan] * 2)
             for folder, of in ((folder, r["speedup"]) for folder, r in results.items())}  # fmt: skip
    keys = ("drafter", "gamma", "gamma_policy", "verifier")
    named = {folder: {key: word for word in r["overrides"] for key in keys if word.startswith(f"{key}=")}
             for folder, r in results.items()}  # fmt: skip
    odd, even = ({folder: gain_of(out / folder, rows, part) for folder in gains} for part in (1, 0))
    best = max(odd, key=odd.__getitem__)
    wanted = {word.partition("=")[0]: word for word in answer.get("words", []) if word.partition("=")[0] in keys}
    found = next((folder for folder in gains if named[folder] == wanted), None)
    if answer["on"] and found is None:
        raise RuntimeError(f"{place}: the way that was advised is not among those that were decoded")
    advised = found or best
    chosen, reached = even[advised] if answer["on"] else 1.0, even[best] if odd[best] > 1 else 1.0
    seconds = [read_seconds(place / f"{what}_seconds.json") for what in ("advice", "everything")]
    low, high = answer["ci95"] or (math.nan,) * 2
    (is_low, is_high), expected, apart = gains[advised][1], math.nan, math.nan
    if answer["on"] and is_high > is_low:  # both measurements have errors
        finalists = len(of_load["stages"]["measurement"]["ways"])
        quantile = student(answer["units"] - 1, LEVEL / finalists)  # of the advice's interval
        error = math.log(high / low) / 2 / quantile
        error_there = math.log(is_high / is_low) / 2 / student(take / unit_of(rows) - 1)
        of_both = math.hypot(error, error_there)
        expected = math.erf(quantile * error / of_both / math.sqrt(2))
        apart = abs(math.log(answer["gain"] / gains[advised][0])) / of_both
    own = results[advised]
    return {
        "advice": "on" if answer["on"] else "off",
        "gain": answer["gain"] or math.nan, "low": low, "high": high, "advised_is": gains[advised][0],
        "is_low": is_low, "is_high": is_high, "inside": low <= gains[advised][0] <= high, "expected": expected,
        "apart": apart, "best": " ".join(named[best].values()), "best_is": even[best], "regret": reached / chosen - 1,
        "loses": bool(answer["on"] and gains[advised][0] < 1), "share": seconds[0] / seconds[1],
        "minutes": sum(seconds) / 60, "verdict": answer["verdict"] or "-",
        "machine": machine(own["provenance"], own["config"]["dtype"]), "commit": f"at {commit(own['provenance'])}",
    }  # fmt: skip


def gain_of(folder: Path, rows: int, part: int) -> float:
    """The speedup of a run on its units of even (0) or odd (1) numbers."""
    lines = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    own = [line for number, line in enumerate(lines) if number // unit_of(rows) % 2 == part and "error" not in line]
    keys = ("baseline_decode_seconds", "tokens", "decode_seconds", "baseline_tokens")
    plain, tokens, seconds, plain_tokens = (sum(line[key] for line in own) for key in keys)
    return plain * tokens / seconds / plain_tokens


def unit_of(rows: int) -> int:
    """The requests of a unit, which vary together."""
    return 1 if rows == 1 else 4 * rows


def note(path: Path, seconds: float) -> None:
    """Adds seconds to those that the file has."""
    path.write_text(json.dumps((read_seconds(path) if path.is_file() else 0.0) + seconds))


def read_seconds(path: Path) -> float:
    return float(json.loads(path.read_text()))


def summary(rows: list[dict]) -> str:
    """The goals, and what was reached."""
    on = [row for row in rows if row["advice"] == "on"]
    errors = [abs(row["gain"] / row["advised_is"] - 1) for row in on] or [math.nan]
    advising = sum(row["minutes"] * row["share"] / (1 + row["share"]) for row in rows)
    measuring = sum(row["minutes"] for row in rows) - advising
    return "\n".join([
        f"- best, or within {WITHIN:.0%} of the best: {sum(row['regret'] <= WITHIN for row in rows)} of {len(rows)}",
        f"- on where it loses: {sum(str(row['loses']) == 'True' for row in rows)}",
        f"- time over measuring everything: {sum(row['share'] for row in rows) / len(rows):.2f} (mean); "
        f"of all cases together {advising / measuring:.2f} ({advising:.0f} of {measuring:.0f} minutes)",
        f"- gain on other prompts within the interval: {sum(str(row['inside']) == 'True' for row in on)} of {len(on)}, "
        f"{sum(row['expected'] for row in on):.1f} expected if all intervals are right; "
        f"median error {statistics.median(errors):.1%}",
        f"- told and found gain are at most {max([row['apart'] for row in on], default=math.nan):.1f} standard errors "
        "of their difference apart",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", action="append", default=[], metavar="NAME=WORDS", help="another pair of models")
    parser.add_argument("--read", type=int, help="prompts that the advice may read")
    parser.add_argument("--minutes", type=float, default=300.0, help="no case begins after so many minutes")
    parser.add_argument("--stored", action="store_true", help="make the table from results.csv")
    args = parser.parse_args()
    until, stored = time.monotonic() + 60 * args.minutes, FOLDER / "results.csv"
    pairs = PAIRS | dict(pair.split("=", 1) for pair in args.pair)
    rows = read_rows(stored) if stored.is_file() else []
    for (temperature, size), name in () if args.stored else itertools.product(CASES, pairs):
        order = 1 + ([*PAIRS].index(name) if name in PAIRS else len(PAIRS))
        asked = {"pair": name, "words": pairs[name], "order": order, "temperature": temperature, "batch": size,
                 "read": args.read or READ[size], "requests": REQUESTS[size], "limit": ADVICE[size]}  # fmt: skip
        known = any(asked.items() <= row.items() for row in rows)
        if known or time.monotonic() >= until or not (found := case(name, *list(asked.values())[1:])):
            continue
        rows.append(asked | found)
        write_rows(stored, rows)
        machines, commits = (list(dict.fromkeys(row[key] for row in rows)) for key in ("machine", "commit"))
        commits = [of.removeprefix("at ") for of in commits]  # digits alone would be read as a number
        write_header(FOLDER / "README.md", Measured(rows, "; ".join(machines), ", ".join(commits)))
    if not rows:
        parser.error("no case is stored, and none was measured")
    shown = f"{to_markdown(rows, TABLE)}\n{summary(rows)}\n"
    (FOLDER / "table.md").write_text(shown, encoding="utf-8")
    print(shown)


if __name__ == "__main__":
    main()
