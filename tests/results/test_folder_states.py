"""Any order of runs, kills and damages in one folder: what was finished is there, and is used again only if it is whole
and what is wanted."""

import hashlib
import json
import os
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

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

BUDGET = settings(max_examples=40, stateful_step_count=8, deadline=None, derandomize=True, database=None,
                  suppress_health_check=[*HealthCheck])  # fmt: skip
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

    @rule(kind=st.sampled_from("ab"), changes=st.integers(0, 60) | st.just(10**9))
    def run(self, kind, changes):
        """A run of this kind, killed at some place or not."""
        result, record, tokenizer = self.made
        self.number += 1
        before = self.newest
        with dying(changes), locked(self.folder):
            if examine(self.folder, identity(kind)).corrupt:
                self.moves_aside(self.folder)
            with open(self.folder / GROUPS, "w") as groups:
                groups.write("x")
            file = PromptsFile(self.folder)
            file.append([{"id": str(self.number)}])
            file.close()
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


def hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("right", [True, False])
def test_runs_kills_and_damages_in_any_order(right, finished):
    """A program that removes what it cannot use is found."""
    result, record, _ = finished("max_new_tokens=4", "data.limit=2")

    class Words:
        def decode(self, tokens, **options):
            return " ".join(map(str, tokens))

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
        run_state_machine_as_test(Here, settings=settings(BUDGET, phases=[Phase.generate]))
