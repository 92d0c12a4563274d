"""The answers in a terminal and as a page."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from specbench.contrib.advise.answers import OF_A_ROUND, SHOWN, LoadAnswer, advice, gain_text
from specbench.contrib.advise.engines import ENGINES, configurations
from specbench.contrib.advise.race import ERROR
from specbench.errors import ConfigError
from specbench.results.reader import StoredRun, load_run
from specbench.results.report import run_description as description
from specbench.results.report.html_page import Drawing, Section, write_page
from specbench.results.report.sweep_figures import heat_maps
from specbench.results.table import Cell, Table
from specbench.results.wording import duration, interval
from specbench.stats.latency import DECODERS

MAP = (
    "Speedup over plain decoding in the pilot, a map for each way but its gamma: a cell of a way that left early is of "
    "few requests. What is advised was measured again, on other prompts."
)

NOT_RUN = "From their documentation; none was run here."


def answers_table(found: Sequence[LoadAnswer]) -> Table:
    """A row for each load."""
    rows = []
    for each in found:
        speeds, (gain, ci95) = each.get("tokens_per_second") or dict.fromkeys(DECODERS), gain_text(each)
        rows.append({
            "load": each["load"], "advice": Cell(advice(each), kind="good" if each["on"] else "dim"),
            "way": each["way"] or "-", "gain": gain,
            "95 %": interval(ci95), "verdict": each["verdict"] or "-",
            "tokens/s": _pair(speeds["speculative"], speeds["baseline"]),
        })  # fmt: skip
    return Table.of(rows, "Advice; in brackets plain decoding's tokens/s")


def waits_table(found: Sequence[LoadAnswer]) -> Table:
    """Waiting times and goodput of each load."""
    rows = []
    for each in found:
        for delay, of in (each.get("waits") or {}).items():
            for percentile, entry in of.items():
                milliseconds = _pair(entry["speculative"], entry["baseline"], 1000)
                rows.append({"load": each["load"], "what": f"{delay.replace('_', ' ')}, {percentile}, ms",
                             "value": milliseconds, "ratio": f"{entry['ratio']:.2f}",
                             "95 %": interval(entry["ci95"]) if entry["ci95"] else "-"})  # fmt: skip
        if (good := each.get("goodput") or {}) and all(good.values()):
            speeds = [good[way]["tokens_per_second"] for way in DECODERS]
            rows.append({"load": each["load"], "what": "goodput, tokens/s", "value": _pair(*speeds),
                         "ratio": f"{speeds[0] / speeds[1]:.2f}" if speeds[1] else "-", "95 %": "-"})  # fmt: skip
    return Table.of(rows, "Waiting times and goodput; in brackets plain decoding's")


def _pair(ours: float | None, plain: float | None, scale: float = 1.0) -> str:
    return "-" if ours is None or plain is None else f"{ours * scale:.1f} ({plain * scale:.1f})"


def pilot_table(load: str, stages: Mapping[str, Any]) -> Table:
    """What became of each way in the pilot at a load."""
    rows = []
    for name, stage in stages.items():
        for way, (gain, ci95) in sorted(stage.get("gains", {}).items(), key=lambda entry: -entry[1][0]):
            units = sum(way in unit for unit in stage["units"])
            rows.append({"stage": name, "way": way, "gain": f"{gain:.2f}x", "95 %": interval(ci95),
                         "units": str(units), "verdict": stage["verdicts"].get(way, "-"),
                         "left": stage["reasons"].get(way, "stayed to the end")})  # fmt: skip
    return Table.of(rows, load, sorts=True)


def stored_runs(state: Mapping[str, Any], measured: bool) -> list[StoredRun]:
    """The runs of the pilots, or those that were `measured` after them, with gamma, load and way as keys; those that
    cannot be read are left out."""
    runs = []
    for load, own in state["loads"].items():
        for stage in (stage for name, stage in own["stages"].items() if (name == "measurement") == measured):
            for way, folders in stage["folders"].items():
                try:
                    run = load_run(Path(folders[0]))
                except ConfigError:
                    continue
                words = dict(word.split("=", 1) for word in stage["ways"].get(way, []))
                rest = ", ".join(value for key, value in words.items() if key not in ("gamma", "drafter.path"))
                run.keys = {"load": load, "gamma": words.get("gamma", "-"), "way": rest}
                runs.append(run)
    return sorted(
        runs, key=lambda run: [int(run.keys["gamma"]) if run.keys["gamma"].isdigit() else 0, run.keys["load"]]
    )


def engines_section(found: Sequence[LoadAnswer]) -> Iterator[Section]:
    """What to paste."""
    advised = {tuple(each["words"]): each for each in found if each["on"]}
    for words, each in advised.items():
        constant, models = dict(word.split("=", 1) for word in each["constant"]), each["models"]
        told = configurations(models["target"].get("path", "TARGET"), models["drafter"], int(constant["gamma"]))
        rows = [
            {"engine": name, "paste": Cell(text), "what differs": ENGINES[name]["differs"]}
            for name, text in told.items()
        ]
        left_out = " ".join(word for word in words if word.startswith(OF_A_ROUND))
        notes = [*[f"Without {left_out}, which was measured."] * bool(left_out), NOT_RUN]
        yield Section(f"The nearest in other engines: {each['way']}", notes, tables=[Table.of(rows)])


def write_advice(folder: Path, state: Mapping[str, Any], leads: Sequence[str], typed: str) -> Path:
    """Writes the page of the answers in `state`, and returns its path."""
    found, runs = state["answers"], stored_runs(state, measured=False)
    more = [f"{each['load']}: {each['more']}" for each in found if each.get("more")]
    sections = [Section("Answer", tables=[answers_table(found), waits_table(found)])]
    if runs:
        maps = Drawing("map", MAP, partial(heat_maps, runs, "gamma", "load", "speedup/measured", "speedup"))
        sections.append(Section("Load and gamma", figures=[maps]))
    if more:
        sections.append(Section("What it would take to gain more", more))
    sections += engines_section(found)
    sections.append(
        Section("The pilot", [ERROR], tables=[pilot_table(load, own["stages"]) for load, own in state["loads"].items()])
    )
    notes = [("bad", f"{each['load']}: {note}") for each in found for note in each.get("notes") or ()]
    notes += [("dim", f"not tried: {name} ({reason})") for own in list(state["loads"].values())[:1]
              for name, reason in own["refused"].items()]  # fmt: skip
    notes += [("dim", f"{each['load']}: not told from {', '.join(each['rivals'])}") for each in found
              if len(each.get("rivals") or ()) > SHOWN]  # fmt: skip
    results = [run.result for run in (*runs, *stored_runs(state, measured=True))]
    took = {"time": f"{duration(state['seconds'])} in all, with loading"}
    on = next((each for each in found if each["on"]), None)
    return write_page(
        folder, title="advice", leads=leads, subtitle="", first=2, cards=[], notes=notes, sections=sections,
        shared=True,
        next=on["command"] if on else "", facts=took | (description.facts(results) if results else {}),
        commands=[typed], configuration=description.configuration(results) if results else "",
    )  # fmt: skip
