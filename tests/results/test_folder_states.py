"""Any order of runs, kills and damages in one folder: what was finished is there, and is used again only if it is whole
and what is wanted. Any order of these and of two commands in the folder of a sweep: each summary says what is there."""

import csv
import hashlib
import json
import os
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from small_runs import finished as finished

from specbench.results.atomic_files import GROUPS
from specbench.results.completion import FILES, RESULTS, examine, make_room, move_aside
from specbench.results.fingerprint import Identity
from specbench.results.folder_lock import locked
from specbench.results.writer import PromptsFile, write_config, write_result
from specbench.run import sweep_summary
from specbench.run.sweep_summary import PlannedJob, SweepJobs

plain_csv = sweep_summary.to_csv

BUDGET = settings(max_examples=40, stateful_step_count=8, deadline=None, derandomize=True, database=None,
                  suppress_health_check=[*HealthCheck])  # fmt: skip
WRONG = settings(BUDGET, max_examples=10 * BUDGET.max_examples, phases=[Phase.generate])  # until it is found
DEATHS = st.integers(0, 60) | st.just(10**9)  # the change before which a process dies
CHANGES = ("replace", "rename", "unlink", "mkdir", "fsync")


class KilledError(BaseException):
    """Stands for a kill: nothing catches it, and nothing is written behind it."""


@contextmanager
def dying(changes: int):
    """Inside, the process dies instead of its change of this number of the file system."""
    count, plain = 0, {name: getattr(os, name) for name in CHANGES}

    def change(name):
        def call(*arguments, **named):
            nonlocal count
            count += 1
            if count > changes:
                raise KilledError
            return plain[name](*arguments, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, change(name))
        with suppress(KilledError):
            yield


def decode(folder: Path, number: int) -> None:
    """What a run writes while it decodes."""
    with open(folder / GROUPS, "w") as groups:
        groups.write("x")
    file = PromptsFile(folder)
    file.append([{"id": str(number)}])
    file.close()


def identity(kind: str) -> Identity:
    return Identity(kind, {}, {}, {}, {})


class Folder(RuleBasedStateMachine):
    """One folder of runs of two kinds."""

    made = ()  # the result, record and tokenizer of a run
    moves_aside = staticmethod(move_aside)

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp()) / "run"
        self.number, self.newest = 0, None
        self.hashes: dict[int, set[str]] = {}  # of the files of each run that was finished and not damaged

    @rule(kind=st.sampled_from("ab"), changes=DEATHS)
    def run(self, kind, changes):
        """A run of this kind, killed at some place or not."""
        result, record, tokenizer = self.made
        self.number += 1
        before = self.newest
        with dying(changes), locked(self.folder):
            if examine(self.folder, identity(kind)).corrupt:
                self.moves_aside(self.folder)
            decode(self.folder, self.number)
            self.newest = None  # what is there from now on is that of the run before, or this one's
            make_room(self.folder)
            write_config({"name": f"run {self.number}"}, self.folder)
            own = replace(result, name=f"run {self.number}")
            write_result(own, record, kind, self.folder, tokenizer, identity(kind).as_dict())
        found = self.folder / RESULTS
        if found.exists() and json.loads(found.read_text())["name"] == f"run {self.number}":
            self.newest = self.number, kind
            self.hashes[self.number] = {hash_of(self.folder / name) for name in (*FILES, RESULTS)}
        elif found.exists() and before is not None:
            self.newest = before  # or what is left of it

    @rule(name=st.sampled_from(FILES))
    def damage(self, name):
        if self.newest is not None and (self.folder / name).exists():
            (self.folder / name).write_text("damaged")
            self.hashes.pop(self.newest[0], None)
            self.newest = None

    @invariant()
    def what_was_finished_is_there(self):
        there = {hash_of(path) for path in self.folder.rglob("*") if path.is_file()}
        for number, hashes in self.hashes.items():
            assert hashes <= there, f"run {number}"

    @invariant()
    def what_is_used_again_is_whole(self):
        for kind in "ab":
            if (found := examine(self.folder, identity(kind))).finished:
                assert (found.result["name"], found.result["identity"]["config"]) == (f"run {self.newest[0]}", kind)
                assert self.newest[1] == kind and self.newest[0] in self.hashes


class SweepFolder(RuleBasedStateMachine):
    """A sweep's folder, with the folders of three jobs: the commands "x" and "y" have two each, and one in common."""

    made = ()
    COMMANDS: ClassVar = {"x": (0, 1), "y": (1, 2)}

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp()) / "sweep"
        self.number = 0
        self.summaries: set[str] = set()  # what some command has begun to write
        self.shown = dict.fromkeys(self.COMMANDS, ())  # what each logger has got

    def of(self, job):
        return self.folder / str(job)

    @rule(job=st.integers(0, 2), changes=DEATHS)
    def run(self, job, changes):
        """A job, killed at some place or not."""
        result, record, tokenizer = self.made
        self.number += 1
        own = replace(result, provenance=result.provenance | {"started": f"run {self.number}"})
        with dying(changes), locked(self.of(job)):
            if examine(self.of(job), identity("a")).corrupt:
                move_aside(self.of(job))
            decode(self.of(job), self.number)
            make_room(self.of(job))
            write_config({"name": "a"}, self.of(job))
            write_result(own, record, "a", self.of(job), tokenizer, identity("a").as_dict(), [f"gamma={job}"])

    @rule(job=st.integers(0, 2), name=st.sampled_from(FILES))
    def damage(self, job, name):
        if (self.of(job) / name).exists():
            (self.of(job) / name).write_text("damaged")

    def finished(self, command):
        """When the results of its jobs were measured; None without."""
        found = [examine(self.of(job), identity("a")) for job in self.COMMANDS[command]]
        return tuple(one.result["provenance"]["started"] if one.finished else None for one in found)

    @rule(command=st.sampled_from("xy"), changes=DEATHS)
    def summarise(self, command, changes):
        """A command's summary, killed at some place or not."""
        jobs = [PlannedJob(n, [f"gamma={job}"], self.of(job), identity("a"), False)
                for n, job in enumerate(self.COMMANDS[command])]  # fmt: skip
        expected, given, ended = self.finished(command), [], None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sweep_summary, "to_csv", lambda table: self.noted(plain_csv(table)))
            patch.setattr(sweep_summary, "log_table", lambda jobs, rows: given.append(rows) or True)
            with dying(changes):
                ended = sweep_summary.summarise(SweepJobs(self.folder, command, "s", {}, jobs), printed=False)
        if given:
            assert self.shown[command] != expected, "the logger gets a table again"
            assert [row["lossless"] != "no result" for row in given[0]] == [one is not None for one in expected]
        if ended is None:
            if given:
                self.shown[command] = ()  # whether that was noted is not known
            return
        self.shown[command] = expected if any(expected) else self.shown[command]
        rows = list(csv.DictReader((self.folder / "summary.csv").open()))
        assert [row["lossless"] != "no result" for row in rows] == [one is not None for one in expected]
        assert ended[1] == int(None in expected)
        assert (self.folder / "summaries" / f"{command}.csv").read_text() == (self.folder / "summary.csv").read_text()
        assert not list((self.folder / ".sweep" / command).rglob("*.tmp"))

    def noted(self, text):
        self.summaries.add(text)
        return text

    @invariant()
    def a_summary_is_whole(self):
        for path in (self.folder / "summary.csv", *(self.folder / "summaries").glob("*.csv")):
            assert not path.exists() or path.read_text() in self.summaries


def hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Words:
    """A tokenizer."""

    def decode(self, tokens, **options):
        return " ".join(map(str, tokens))


@pytest.mark.slow
@pytest.mark.parametrize("right", [True, False])
def test_runs_kills_and_damages_in_any_order(right, finished):
    """A program that removes what it cannot use is found."""
    result, record, _ = finished("max_new_tokens=4", "data.limit=2")

    def removes(folder):
        for name in (*FILES, RESULTS):
            (folder / name).unlink(missing_ok=True)

    class Here(Folder):
        made = result, record, Words()
        moves_aside = staticmethod(move_aside if right else removes)

    if right:
        run_state_machine_as_test(Here, settings=BUDGET)
        return
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Here, settings=WRONG)


@pytest.mark.slow
@pytest.mark.parametrize("right", [True, False])
def test_jobs_and_summaries_in_any_order(right, finished, monkeypatch):
    """A program that writes into the summary itself is found."""
    result, record, _ = finished("max_new_tokens=4", "data.limit=2")

    class Here(SweepFolder):
        made = result, record, Words()

    def write(path, text):
        with path.open("w") as file:
            file.write(text[: len(text) // 2])
            file.flush()
            os.fsync(file.fileno())
            file.write(text[len(text) // 2 :])

    if right:
        run_state_machine_as_test(Here, settings=settings(BUDGET, stateful_step_count=24))
        return
    monkeypatch.setattr(sweep_summary, "write_text", write)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Here, settings=WRONG)
