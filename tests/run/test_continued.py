"""A run that is killed goes on in another process, and has the numbers of one that was not."""

import os
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pytest
import torch
from checkpoints import Harmful
from choosing import only
from split_cases import CASES, checked_for, continued, facts, one_process, prompts

from specbench.results import writer
from specbench.results.atomic_files import GROUPS
from specbench.results.reader import load_run
from specbench.results.signed_file import SignedFile, own_key
from specbench.results.wording import where
from specbench.run import batching, kept_groups
from specbench.run.execute import claimed, execute
from specbench.run.interleave import InterleavedGroup
from specbench.run.jobs import RunJob
from specbench.run.kept_groups import KeptGroups
from specbench.stats.machine_noise import Probes


class KilledError(BaseException):
    """Stands for a kill: nothing catches it."""


def killed():
    raise KilledError


def slow_groups(monkeypatch):
    """For each group that it decodes a process has been there for 1000 seconds more, 100 of them to load."""
    plain = KeptGroups.keeping

    @contextmanager
    def slowly(self, member, wanted, watch):
        self.begun -= 1000
        member.phases.seconds["load"] += 100
        with plain(self, member, wanted, watch):
            yield

    monkeypatch.setattr(KeptGroups, "keeping", slowly)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def decoded(monkeypatch):
    """The numbers of the groups that were decoded. At those of `decoded.dies` the process is killed, once."""
    plain = InterleavedGroup.decode_all_ways

    class Decoded(list):
        dies: set
        end: type

    found = Decoded()
    found.dies, found.end = set(), KilledError

    def decode(self, wanted, jobs, number):
        if number in found.dies:
            found.dies.remove(number)
            raise found.end
        found.append(number)
        return plain(self, wanted, jobs, number)

    monkeypatch.setattr(InterleavedGroup, "decode_all_ways", decode)
    return found


def execute_until_over(checked, folder, between=lambda: None):
    """The run, begun again after each kill."""
    job = RunJob([], folder, checked)
    while True:
        try:
            [outcome] = execute([job])
        except KilledError:
            between()
            continue
        assert outcome.error is None and not (folder / GROUPS).exists()
        return load_run(folder)


@pytest.mark.parametrize("case", only(["sampled"], CASES))
def test_a_run_that_is_killed_has_the_numbers_of_one_that_is_not(case, good, decoded, tmp_path, monkeypatch):
    """It is killed twice; once half of a group more stands in the file."""
    monkeypatch.setattr(batching, "FEWEST", 1)  # so that few prompts make several groups of rows
    turns = 2 if "turns" in CASES[case] else 1
    checked = checked_for(good, prompts(tmp_path, 4, turns), *CASES[case][turns - 1 :])
    one, folder, last = one_process(checked, tmp_path / "one"), tmp_path / "two", max(decoded)
    decoded.clear()
    decoded.dies, threads = {1, last}, torch.get_num_threads()
    slow_groups(monkeypatch)

    def half_a_group():
        monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
        with (folder / GROUPS).open("ab") as file:
            file.write(b"x" * 50)

    two = execute_until_over(checked, folder, half_a_group)
    assert decoded == [*range(last + 1)]  # each once
    assert continued(two).endswith("times are of 3 processes")
    assert where(two.result) == "3 processes, one after the other" and where(one.result) == "one process"
    assert two.result["provenance"]["seconds"] > 1000 * last and two.result["seconds"]["load"] > 100 * (last + 1)
    assert facts(one) == facts(two)
    told = f"1 group was decoded with {threads} threads; {last} groups were decoded with 7 threads"
    assert told in two.result["machine"]["reasons"] and not two.result["machine"]["steady"]
    assert not any("threads" in reason for reason in one.result["machine"]["reasons"])


def test_groups_that_were_decoded_with_less_are_told(tmp_path):
    """A process may have decoded in several ways, and one way may be a part of another."""
    kept, both = KeptGroups(tmp_path, {}, False), frozenset(["7 threads", "compiled programs"])
    kept.by, kept.engines, kept.probes = [1, 1, 2], [both, frozenset(["7 threads"]), both], {1: Probes(), 2: Probes()}
    kept.process = 2
    found = kept.machines(SimpleNamespace(take=Probes))
    assert found.reasons == [
        "2 groups were decoded with compiled programs; 1 group was decoded with none of these"
    ] and found.groups == {1: [0, 1], 2: [2]}  # fmt: skip


@pytest.mark.slow
def test_an_interrupted_run_goes_on_too(good, decoded, tmp_path):
    """Its results stay beside those of the whole run."""
    checked, folder = checked_for(good, prompts(tmp_path)), tmp_path / "two"
    one = one_process(checked, tmp_path / "one")
    decoded.clear()
    decoded.dies, decoded.end = {3}, KeyboardInterrupt
    [outcome] = execute([RunJob([], folder, checked)])
    assert outcome.result.status == "interrupted" and (folder / GROUPS).exists()
    two = execute_until_over(checked, folder)
    assert decoded == [*range(7)] and continued(two).endswith("times are of 2 processes")
    assert facts(one) == facts(two) and load_run(folder / "earlier-1").result["counts"]["prompts"] == 3


@pytest.mark.slow
def test_what_was_read_before_the_kill_counts(good, decoded, tmp_path, monkeypatch):
    """Without it the verdict of a continued run reads more texts than it may."""
    monkeypatch.setattr(kept_groups, "OF_SESSION", ())
    checked = checked_for(good, prompts(tmp_path), *CASES["sampled"])
    one, decoded.dies = one_process(checked, tmp_path / "one"), {5}
    assert facts(one) != facts(execute_until_over(checked, tmp_path / "two"))


@pytest.mark.slow  # test_another_run_and_a_finished_one_are_decoded_whole
@pytest.mark.parametrize("policy", ["adaptive"])
def test_what_learns_from_what_was_decoded_before_begins_anew(policy, good, decoded, tmp_path):
    decoded.dies = {1}
    checked = checked_for(good, prompts(tmp_path, 2), f"gamma_policy={policy}")
    found = execute_until_over(checked, tmp_path / "run")
    assert decoded == [0, 0, 1] and not any("continued" in note for note in found.result["notes"])


@pytest.mark.parametrize("change", only(("prompts", "code"), ["seed", "prompts", "code", "finished", "force"]))
def test_another_run_and_a_finished_one_are_decoded_whole(change, good, decoded, tmp_path, monkeypatch):
    path, folder = prompts(tmp_path, 2), tmp_path / "run"
    checked = checked_for(good, path)
    decoded.dies = {1}
    if change == "finished":
        decoded.dies = set()
        with monkeypatch.context() as patch:
            patch.setattr(writer, "GROUPS", "none")  # as if the process had been killed before it could remove them
            execute([RunJob([], folder, checked)])
        decoded.clear()
        with claimed(RunJob([], folder, checked)):
            assert not (folder / GROUPS).exists()
            execute_until_over(checked, folder)
    elif change in ("prompts", "code"):  # killed again, and not decoded a third time
        job = RunJob([], folder, checked)
        with pytest.raises(KilledError):
            execute([job])
        file = SignedFile(folder / GROUPS)
        identity, *kept = file.found
        file.clear()
        kept[0].requests = [kept[0].requests[0] + "x" * (change == "prompts")]
        for value in (identity | {"code": {}} if change == "code" else identity, *kept):
            file.append(value)
        decoded.clear()
        decoded.dies = {1}
        execute_until_over(checked, folder)
    else:
        other = checked_for(good, path, "seed=1" if change == "seed" else "force=true")
        with pytest.raises(KilledError):
            execute([RunJob([], folder, checked)])
        decoded.clear()
        execute([RunJob([], folder, other)])
        if change == "seed":  # what was set aside is taken again
            execute([RunJob([], folder, checked)])
            assert decoded.pop() == 1
    assert decoded == [0, 1]


@pytest.mark.parametrize("own", [True, False])
def test_a_file_of_another_user_is_not_read(own, tmp_path, monkeypatch):
    """With the own key the trap springs, so the test would see it."""
    with monkeypatch.context() as patch:
        if not own:
            patch.setenv("SPECBENCH_CACHE", str(tmp_path / "theirs"))
        file = SignedFile(tmp_path / GROUPS)
        file.append(1)
        file.append(Harmful(tmp_path / "sprung"))
        file.close()
    file = SignedFile(tmp_path / GROUPS)
    assert file.found == ([1, None] if own else []) and (tmp_path / "sprung").exists() == own
    if own:
        (tmp_path / "sprung").rmdir()
    file.append(2)
    assert SignedFile(tmp_path / GROUPS).found == [*file.found, 2]
    assert (tmp_path / f"{GROUPS}.old-1").exists() != own


def test_values_are_read_in_the_order_in_which_they_were_signed(tmp_path):
    sizes, file = [], SignedFile(tmp_path / GROUPS)
    for value in "abc":
        file.append(value)
        sizes.append(file.file.tell())
    whole = (tmp_path / GROUPS).read_bytes()
    a, b, c = whole[: sizes[0]], whole[sizes[0] : sizes[1]], whole[sizes[1] :]
    for content, found in (
        (a + c, ["a"]),
        (b + a, []),
        (a + b + c[:-1], ["a", "b"]),
        (a + a, ["a"]),
        (whole, [*"abc"]),
    ):
        (tmp_path / GROUPS).write_bytes(content)
        assert SignedFile(tmp_path / GROUPS).found == [*found]
    huge = a + a[:32] + (2**62).to_bytes(8) + b"x"
    (tmp_path / GROUPS).write_bytes(huge)
    assert SignedFile(tmp_path / GROUPS).found == ["a"] and (tmp_path / GROUPS).read_bytes() == a


def test_what_cannot_be_used_is_kept_under_another_name(tmp_path, caplog):
    """Values behind a damaged one; those of another run; and without a key, all. A torn one is removed."""
    path, old = tmp_path / GROUPS, tmp_path / f"{GROUPS}.old-1"

    def groups(identity, afresh=False):
        with closing(KeptGroups(tmp_path, identity, afresh)) as kept:
            kept.file.append("a")
            kept.file.append("b")
        return path.read_bytes()

    whole = groups({"a": 1})
    path.write_bytes(whole[:-1])
    assert SignedFile(path).found == [{"a": 1}, "a"] and not old.exists() and not caplog.messages
    damaged = whole[:-1] + b"x"
    path.write_bytes(damaged)
    file = SignedFile(path)
    assert file.found == [{"a": 1}, "a"] and old.read_bytes() == damaged and whole.startswith(path.read_bytes())
    file.append("b")
    assert path.read_bytes() == whole
    os.utime(old, (0, 0))
    other = groups({"a": 2})
    assert other != whole and old.with_name(f"{GROUPS}.old-2").read_bytes() == whole
    file = SignedFile(path)
    file.exchange({"a": 1}, "of a run with other")  # the newer one of two
    assert path.read_bytes() == whole and file.found[1:] == ["a", "b"]
    assert old.with_name(f"{GROUPS}.old-3").read_bytes() == other and old.read_bytes() == damaged
    groups({"a": 3}, afresh=True)
    path.write_bytes(other)
    (tmp_path / "cache" / "key").chmod(0o644)
    assert groups({"a": 2}) == b"" and old.with_name(f"{GROUPS}.old-2").read_bytes() == other
    reasons = ["damaged, or was signed", *["of a run with other"] * 2, "its mode is 644", "there is no key"]
    assert len(caplog.messages) == 5 and all(map(str.__contains__, caplog.messages, reasons))


def test_seconds_are_those_of_all_processes_and_the_note_counts_those_that_decoded(tmp_path):
    with closing(KeptGroups(tmp_path, {}, False)) as kept:
        kept.process, kept.last[1] = 2, SimpleNamespace(seconds=5.0, phases={"load": 1.0, "plain": 2.0})
        kept.requests[False] = 3
        assert kept.facts(1.5) == {"seconds": 6.5}
        assert kept.notes()[0].endswith("3 of 3 requests were decoded before, and its times are of 1 process")
        kept.requests[True] = 1
        assert kept.facts(1.5) == {"seconds": 6.5, "processes": 2}
        assert kept.phases(SimpleNamespace(seconds={"load": 4.0})) == {"load": 5.0, "plain": 2.0}


@pytest.mark.slow
def test_a_run_that_is_killed_behind_its_last_group_has_its_seconds(good, decoded, tmp_path, monkeypatch):
    checked, folder = checked_for(good, prompts(tmp_path, 2)), tmp_path / "run"
    slow_groups(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(KeptGroups, "machines", lambda self, watch: killed())
        with pytest.raises(KilledError):
            execute([RunJob([], folder, checked)])
    found = execute_until_over(checked, folder)
    assert decoded == [0, 1] and where(found.result) == "one process"
    assert 2000 < found.result["provenance"]["seconds"] < 3000 and 200 < found.result["seconds"]["load"] < 300
    assert continued(found).endswith("2 of 2 requests were decoded before, and its times are of 1 process")


def test_a_key_is_made_without_hard_links_too(tmp_path, monkeypatch):
    def impossible(*names):
        raise PermissionError

    monkeypatch.setattr("os.link", impossible)
    key = own_key()
    assert key is not None and own_key() == key and [path.name for path in (tmp_path / "cache").iterdir()] == ["key"]


@pytest.mark.parametrize("damage", ["open to others", "short", "a link"])
def test_a_key_that_others_may_know_is_none(damage, tmp_path, caplog):
    key = own_key()
    assert key is not None and own_key() == key
    path = tmp_path / "cache" / "key"
    assert path.stat().st_mode & 0o077 == 0 and [*path.parent.iterdir()] == [path]
    if damage == "open to others":
        path.chmod(0o640)
    elif damage == "short":
        path.write_bytes(key[:-1])
    else:
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    assert own_key() is None
    told = {
        "open to others": "its mode is 640, not 600",
        "short": "it has 31 bytes, not 32",
        "a link": "symbolic links",
    }
    assert told[damage] in caplog.text and "cannot be continued" in caplog.text
    file = SignedFile(tmp_path / GROUPS)
    file.append(1)
    assert (tmp_path / GROUPS).read_bytes() == b""
