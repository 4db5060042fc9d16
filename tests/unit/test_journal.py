# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils import journal as subject
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import Journal, JournalBusy, JournalError


def in_child(act: Callable[[], Any]) -> int:
    """Run ``act`` in a forked child; its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def test_an_empty_place_is_an_empty_journal(tmp_path: Path) -> None:
    journal = Journal.open(str(tmp_path / "state"))
    assert journal.run is None and journal.outcome is None and journal.steps == [] and not journal.unfinished
    assert not (tmp_path / "state/journal.json").exists()
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700


def test_check_mode_writes_nothing(tmp_path: Path) -> None:
    journal = Journal.open(str(tmp_path / "state"), read_only=True)
    journal.begin("r1", "550.90.07", "535.183.01", now=1.0)
    journal.remember("services", {"a": 1})
    assert journal.unfinished and journal.before("services") == {"a": 1}
    assert not (tmp_path / "state").exists()


def test_a_run_from_begin_to_end(tmp_path: Path) -> None:
    journal = Journal.open(str(tmp_path))
    assert journal.begin("r1", "550.90.07", "535.183.01", now=1.0)
    journal.start("unload", 2.0)
    journal.end("unload", 3.0, modules=["nvidia"])
    journal.finish(subject.UPGRADED, "", None, 4.0)
    again = Journal.open(str(tmp_path), read_only=True)
    assert again.as_dict() == journal.as_dict()
    assert again.last("unload") == {
        "name": "unload",
        "state": "done",
        "at": 2.0,
        "ended": 3.0,
        "detail": {"modules": ["nvidia"]},
    }
    assert not again.unfinished


@pytest.mark.parametrize(
    ("acts", "expected"),
    [
        ([], "unchanged"),
        ([("stop services", "done"), ("unload modules", "failed")], "unchanged"),
        ([("unload modules", "done")], "upgraded"),
        ([("packages", "done")], "upgraded"),
        ([("packages", "failed")], None),
    ],
    ids=str,
)
def test_a_run_that_nobody_has_judged_ends_as_what_it_did(
    tmp_path: Path, acts: list[tuple[str, str]], expected: str | None
) -> None:
    journal = Journal.open(str(tmp_path))
    journal.begin("r1", "550.1", "535.1", now=1.0)
    for step, state in acts:
        journal.start(step, 2.0)
        journal.end(step, 3.0, state)
    if expected is None:
        with pytest.raises(JournalError, match="has not ended well"):
            print(journal.ending)
        return
    assert journal.ending == expected
    journal.finish("rolled_back", "", None, 4.0)
    assert journal.ending == "rolled_back", "what somebody has judged stands"


def test_a_step_that_was_never_started_cannot_end(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="'unload' was never started"):
        Journal.open(str(tmp_path)).end("unload", 1.0)


def test_the_first_write_wins(tmp_path: Path) -> None:
    journal = Journal.open(str(tmp_path))
    assert journal.remember("packages", ["535"]) is True
    assert journal.remember("packages", ["550"]) is False
    assert Journal.open(str(tmp_path), read_only=True).before("packages") == ["535"]


def test_the_first_write_of_each_key_wins(tmp_path: Path) -> None:
    journal = Journal.open(str(tmp_path))
    assert journal.remember_each("services", {"a": "up", "b": "down"}) == ["a", "b"]
    assert journal.remember_each("services", {"a": "down", "c": "up"}) == ["c"]
    assert journal.before("services") == {"a": "up", "b": "down", "c": "up"}


def test_nothing_to_remember_is_remembered_as_such(tmp_path: Path) -> None:
    journal = Journal.open(str(tmp_path))
    journal.remember_each("services", {})
    assert Journal.open(str(tmp_path), read_only=True).before("services") == {}


@pytest.mark.parametrize("outcome", [None, subject.QUARANTINED], ids=["unfinished", "quarantined"])
def test_a_new_run_goes_on_with_one_that_did_not_end_well(tmp_path: Path, outcome: str | None) -> None:
    journal = Journal.open(str(tmp_path))
    journal.begin("r1", "550.90.07", "535.183.01", now=1.0)
    journal.remember("packages", ["535"])
    journal.start("packages", 2.0)
    if outcome:
        journal.finish(outcome, "module does not load", "dmesg", 3.0)
    assert journal.begin("r2", "560.35.03", None, now=9.0) is False
    assert journal.run == {
        "id": "r2",
        "target": "560.35.03",
        "previous": "535.183.01",
        "begun": 1.0,
        "earlier_ids": ["r1"],
        "given_up": ["550.90.07"],
    }
    assert journal.before("packages") == ["535"] and len(journal.steps) == 1 and journal.unfinished


@pytest.mark.parametrize("outcome", [subject.UPGRADED, subject.ROLLED_BACK])
def test_a_run_after_one_that_ended_well_keeps_only_what_is_still_owed(tmp_path: Path, outcome: str) -> None:
    journal = Journal.open(str(tmp_path))
    journal.begin("r1", "550.90.07", "535.183.01", now=1.0)
    journal.remember("packages", ["535"])
    journal.remember("workloads", {"trainer": {"running": True}})
    journal.finish(outcome, "", None, 2.0)
    assert journal.begin("r2", "560.35.03", "550.90.07", now=3.0) is True
    assert journal.as_dict()["before"] == {"workloads": {"trainer": {"running": True}}}
    assert journal.steps == [] and journal.outcome is None


def test_what_a_module_alone_stopped_survives_the_begin_of_a_run(tmp_path: Path) -> None:
    journal = Journal.open(str(tmp_path))
    journal.remember_each("services", {"nvidia-persistenced.service": {"up": True}})
    journal.begin("r1", "550.90.07", None, now=1.0)
    assert journal.before("services")


@pytest.mark.parametrize("ended", [None, subject.UPGRADED], ids=["no run", "an ended run"])
def test_a_change_of_packages_by_a_module_alone_that_was_interrupted_is_the_way_back_of_a_new_run(
    tmp_path: Path, ended: str | None
) -> None:
    """Another change, that came to its end, is not."""
    journal = Journal.open(str(tmp_path))
    if ended:
        journal.begin("r0", "535.183.01", "525.1", now=0.1)
        journal.finish(ended, "", None, 0.2)
    journal.remember("packages", {"version": "535.183.01"})
    journal.start("packages", 1.0)
    assert journal.begin("r1", "550.90.07", None, now=2.0) is True
    assert journal.run["previous"] == "535.183.01" and journal.before("packages") and journal.interrupted
    journal.end("packages", 3.0)
    journal.finish(subject.UPGRADED, "", None, 4.0)
    assert journal.begin("r2", "560.35.03", "550.90.07", now=5.0) is True
    assert journal.run["previous"] == "550.90.07" and journal.before("packages") is None and journal.steps == []


BAD_FILES = {
    "empty": (b"", "damaged"),
    "zeros, as after a power cut": (b"\0" * 512, "damaged"),
    "binary": (bytes(range(128, 256)), "damaged"),
    "cut off": (b'{"schema": 1, "run": nul', "damaged"),
    "not an object": (b"[]", "schema 'list'"),
    "newer schema": (b'{"schema": 2}', "schema 2"),
    "no schema": (b"{}", "schema None"),
    "keys missing": (b'{"schema": 1, "run": null}', "no usable steps, before"),
    "wrong type": (b'{"schema": 1, "run": [], "steps": [], "before": {}, "outcome": null}', "no usable run"),
}


@pytest.mark.parametrize(("content", "message"), BAD_FILES.values(), ids=BAD_FILES.keys())
@pytest.mark.parametrize("read_only", [True, False])
def test_a_file_that_is_no_journal_is_named_and_left_alone(
    tmp_path: Path, content: bytes, message: str, read_only: bool
) -> None:
    path = tmp_path / "journal.json"
    path.write_bytes(content)
    with pytest.raises(JournalError, match=message) as caught:
        Journal.open(str(tmp_path), read_only=read_only)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == content


def test_killed_between_writing_and_renaming_the_old_content_stays(tmp_path: Path, monkeypatch: Any) -> None:
    journal = Journal.open(str(tmp_path))
    journal.remember("packages", ["535"])
    journal.close()

    def die_at_rename() -> None:
        monkeypatch.setattr(Path, "replace", lambda *dummy: os.kill(os.getpid(), signal.SIGKILL))
        Journal.open(str(tmp_path)).remember("settings", {"0": "on"})

    assert os.WTERMSIG(in_child(die_at_rename)) == signal.SIGKILL
    assert len(list(tmp_path.glob(".journal.json.*"))) == 1, "the child must have died with the new file written"
    after = Journal.open(str(tmp_path))
    assert after.as_dict()["before"] == {"packages": ["535"]}
    after.remember("settings", {"0": "off"})
    assert Journal.open(str(tmp_path), read_only=True).before("settings") == {"0": "off"}


def test_killed_at_any_moment_the_file_is_whole_and_in_order(tmp_path: Path) -> None:
    def scribble() -> None:
        journal = Journal.open(str(tmp_path))
        for number in range(len(journal.steps), 100000):
            journal.start(f"step {number}", float(number))

    for dummy in range(8):
        pid = os.fork()
        if pid == 0:
            scribble()
        time.sleep(random.uniform(0.02, 0.08))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        names = [step["name"] for step in Journal.open(str(tmp_path), read_only=True).steps]
        assert names == [f"step {number}" for number in range(len(names))]
    assert names, "the children must have written something"


FULL_DISK = """
import sys
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import Journal, JournalError
journal = Journal.open(sys.argv[1])
journal.remember("packages", ["535"])
with open(sys.argv[1] + "/filler", "wb", buffering=0) as filler:
    try:
        while True:
            filler.write(b"x" * 4096)
    except OSError:
        pass
try:
    journal.remember("services", {"a": "x" * 65536})
except JournalError as exc:
    print(exc)
print(journal.before("services"), Journal.open(sys.argv[1], read_only=True).as_dict()["before"])
"""


def test_on_a_full_disk_nothing_is_done_and_nothing_is_lost(tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=64k none "$1" || exit 77; exec "$2" -c "$3" "$1"'
    argv = ["unshare", "--mount", "sh", "-c", script, "sh", str(tmp_path), sys.executable, FULL_DISK]
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(argv, capture_output=True, text=True, env=environment, check=False)
    if done.returncode in (1, 77) and "ermitted" in done.stderr:
        pytest.skip(f"a small file system to fill cannot be mounted here: {done.stderr.strip()}")
    said = done.stdout.splitlines()
    assert said[0].endswith("journal.json: No space left on device; nothing was done"), done
    assert said[1] == "None {'packages': ['535']}"


def test_several_processes_write_one_after_the_other(tmp_path: Path) -> None:
    def write(number: int) -> None:
        for turn in range(5):
            journal = Journal.open(str(tmp_path), lock_timeout=60)
            journal.remember_each("services", {f"{number}.{turn}": True})
            journal.close()

    children = []
    for number in range(4):
        pid = os.fork()
        if pid == 0:
            try:
                write(number)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
    assert len(Journal.open(str(tmp_path), read_only=True).before("services")) == 20


def hold(state_dir: Path, then: str) -> subprocess.Popen[str]:
    code = (
        "import os, sys, time\n"
        "from ansible_collections.gpufleet.driver.plugins.module_utils.journal import Journal\n"
        f"journal = Journal.open({str(state_dir)!r})\n{then}\n"
    )
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)


def test_a_module_that_is_still_at_work_is_named(tmp_path: Path) -> None:
    with hold(tmp_path, "print('ready', flush=True); time.sleep(600)") as other:
        try:
            assert other.stdout and other.stdout.readline() == "ready\n"
            assert subject.at_work(str(tmp_path))
            with pytest.raises(JournalBusy, match=rf"pid {other.pid}\) is still at work"):
                Journal.open(str(tmp_path), lock_timeout=0)
            assert Journal.open(str(tmp_path), read_only=True).run is None, "reading needs no lock"
        finally:
            other.kill()
    assert not subject.at_work(str(tmp_path / "none"))
    Journal.open(str(tmp_path), lock_timeout=5).remember("packages", [])
    assert not subject.at_work(str(tmp_path))


def test_a_child_that_hangs_does_not_keep_the_journal(tmp_path: Path) -> None:
    fork = "child = os.fork()\nif child == 0:\n    time.sleep(600)\nprint(child, flush=True)"
    with hold(tmp_path, fork) as other:
        assert other.stdout
        child = int(other.stdout.readline())
    try:
        assert other.returncode == 0
        os.kill(child, 0)
        Journal.open(str(tmp_path), lock_timeout=0).remember("packages", [])
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_place_that_cannot_be_written_is_told_before_anything_is_done(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match=r"cannot open .*journal\.lock: .*; nothing was done"):
        Journal.open(str(tmp_path / "file"))


def test_the_file_is_readable_json_for_its_owner_only(tmp_path: Path) -> None:
    Journal.open(str(tmp_path)).remember("packages", ["535"])
    path = tmp_path / "journal.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert json.loads(path.read_text())["before"] == {"packages": ["535"]}


@pytest.mark.parametrize(
    ("there", "expected"),
    [("", None), ("state", None), ("file", "file is not a directory"), ("dangling", "dangling is not a directory")],
)
def test_a_directory_that_cannot_be_written_is_found_without_writing(tmp_path, there, expected):
    (tmp_path / "state").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    before = sorted(tmp_path.rglob("*"))
    why = subject.why_not_writable(tmp_path / there / "deep/er")
    assert (why is None) if expected is None else expected in why
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("flags", "expected"), [(os.ST_RDONLY, "is on a read-only file system"), (0, "cannot be written to")]
)
def test_why_a_directory_cannot_be_written(tmp_path, monkeypatch, flags, expected):
    monkeypatch.setattr(subject.os, "access", lambda path, mode: False)
    monkeypatch.setattr(subject.os, "statvfs", lambda path: os.statvfs_result((0,) * 8 + (flags, 0)))
    assert subject.why_not_writable(tmp_path / "state") == f"{tmp_path} {expected}"
