# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The driver's checkpoint calls on a real process that uses the stand-in libcuda: it closes and reopens its device
files, and fails, hangs and lies on demand."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cuda_work import SCRIPT, Gpus, goes_on, uuid

from ansible_collections.gpufleet.driver.plugins.module_utils import execution
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import suspend

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is needed to build the stand-in libcuda")


def test_the_whole_way_there_and_back(gpus: Gpus) -> None:
    processes = [gpus.start() for dummy in range(2)]
    pids = [process.pid for process in processes]
    found = gpus.ask("look", *pids, os.getpid())
    assert [found[pid]["state"] for pid in pids] == ["running", "running"]
    assert all(found[pid]["tid"] for pid in pids)
    assert found[os.getpid()]["state"] == "none"
    for action, state, devices in (
        ("lock", "locked", ["nvidia-uvm", "nvidia0", "nvidiactl"]),
        ("checkpoint", "checkpointed", []),
        ("restore", "locked", ["nvidia-uvm", "nvidia0", "nvidiactl"]),
        ("unlock", "running", ["nvidia-uvm", "nvidia0", "nvidiactl"]),
    ):
        said = gpus.ask(action, *pids, timeout=30)
        assert {one["code"] for one in said.values()} == {0}, (action, said)
        assert {one["state"] for one in said.values()} == {state}
        assert [gpus.devices(pid) for pid in pids] == [devices, devices]
    assert all(goes_on(process) for process in processes)


TROUBLE = {
    "lock-times-out-and-it-runs-on": (("cuda_busy=1",), ("lock",), (600, "running")),
    "lock-says-success-and-does-nothing": (("cuda_lie.cuCheckpointProcessLock=1",), ("lock",), (0, "running")),
    "checkpoint-not-supported-arm64": (
        ("cuda_error.cuCheckpointProcessCheckpoint=801",),
        ("lock", "checkpoint"),
        (801, "locked"),
    ),
    "checkpoint-fails-for-good": (
        ("cuda_fatal.cuCheckpointProcessCheckpoint=304",),
        ("lock", "checkpoint"),
        (304, "failed"),
    ),
    "checkpoint-says-success-and-does-nothing": (
        ("cuda_lie.cuCheckpointProcessCheckpoint=1",),
        ("lock", "checkpoint"),
        (0, "locked"),
    ),
    "restore-out-of-memory": (
        ("cuda_fatal.cuCheckpointProcessRestore=2",),
        ("lock", "checkpoint", "restore"),
        (2, "failed"),
    ),
    "unlock-says-success-and-does-nothing": (
        ("cuda_lie.cuCheckpointProcessUnlock=1",),
        ("lock", "checkpoint", "restore", "unlock"),
        (0, "locked"),
    ),
    "unlock-twice": ((), ("lock", "unlock", "unlock"), (401, "running")),
}


@pytest.mark.parametrize(("knobs", "actions", "end"), TROUBLE.values(), ids=TROUBLE)
def test_what_counts_is_the_state_read_back(
    gpus: Gpus, knobs: tuple[str, ...], actions: tuple[str, ...], end: tuple[int, str]
) -> None:
    process = gpus.start()
    gpus.knobs(*knobs)
    said: dict[str, Any] = {}
    for action in actions:
        said = gpus.ask(action, process.pid, timeout=30)[process.pid]
        if said["code"] == 0 and action != actions[-1]:
            assert said["state"] in ("locked", "checkpointed"), (action, said)
    assert (said["code"], said["state"]) == end


def test_a_lie_about_contents_is_seen_by_the_work_alone(gpus: Gpus) -> None:
    process = gpus.start()
    gpus.knobs("cuda_lie.cuCheckpointProcessRestore=1")
    for action in ("lock", "checkpoint", "restore", "unlock"):
        assert gpus.ask(action, process.pid)[process.pid]["code"] == 0
    assert process.wait(10) == 1


def test_a_hanging_call_does_not_keep_the_others_from_answering(gpus: Gpus) -> None:
    first, second = gpus.start().pid, gpus.start().pid
    gpus.knobs(f"cuda_hang.cuCheckpointProcessLock.{first}=1")
    argv = [sys.executable, SCRIPT, "lock", "{}", str(first), str(second)]
    asking = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=gpus.environment)
    assert asking.stdout
    said = json.loads(asking.stdout.readline())
    asking.kill()
    asking.communicate()
    assert (said["pid"], said["state"]) == (second, "locked")


def test_other_gpus_need_a_map_of_all_that_the_kernel_shows(gpus: Gpus) -> None:
    process = gpus.start()
    for action in ("lock", "checkpoint"):
        gpus.ask(action, process.pid)
    gpus.machine(serial=7)
    whole = {uuid(0): uuid(1, 7), uuid(1): uuid(0, 7)}
    assert gpus.ask("restore", process.pid)[process.pid]["code"] == 1
    half = {uuid(0): uuid(1, 7)}
    assert gpus.ask("restore", process.pid, pairs=half)[process.pid] == {
        "pid": process.pid, "code": 1, "state": "checkpointed", "tid": None,
    }  # fmt: skip
    assert gpus.ask("restore", process.pid, pairs=whole)[process.pid]["code"] == 0
    assert gpus.ask("unlock", process.pid)[process.pid]["state"] == "running"
    assert "nvidia1" in gpus.devices(process.pid)
    assert goes_on(process)


def test_another_driver_under_a_suspended_process_ends_it(gpus: Gpus) -> None:
    process = gpus.start()
    for action in ("lock", "checkpoint"):
        gpus.ask(action, process.pid)
    gpus.machine(version="550.90.07")
    assert gpus.ask("look", process.pid)[process.pid]["state"] == "checkpointed"
    (gpus.root / "run/nvidia-standin/loaded").write_text("# none\npersistence.0=1\npersistence.1=1\n")
    assert gpus.ask("restore", process.pid)[process.pid]["state"] in ("failed", "checkpointed")


def test_a_state_that_is_a_lie_keeps_nothing_locked(gpus: Gpus) -> None:
    """The driver says that it runs, and it does not."""
    process = gpus.start()
    gpus.ask("lock", process.pid)
    gpus.knobs("cuda_lie.cuCheckpointProcessGetState=1")
    member = {"pid": process.pid, "start": suspend.start_of(process.pid), "cuda": True}

    def ask(action: str, pids: list[int], pairs: dict[str, str]) -> list[dict[str, Any]]:
        return list(gpus.ask(action, *pids).values())

    assert suspend.run_again({"members": [member]}, ask) == {process.pid: "running"}
    assert goes_on(process)


def test_a_driver_that_is_at_work_is_waited_for() -> None:
    """States 4 and 5 of CUDA 13.4: nothing is done to such a process, and it is not lost."""
    states = iter(["busy", "busy", "checkpointed"])
    after = {"restore": "locked", "unlock": "running"}
    asked = []

    def ask(action: str, pids: list[int], pairs: dict[str, str]) -> list[dict[str, Any]]:
        asked.append(action)
        return [{"pid": pid, "state": after.get(action) or next(states)} for pid in pids]

    member = {"pid": os.getpid(), "start": suspend.start_of(os.getpid()), "cuda": True}
    assert suspend.run_again({"members": [member]}, ask) == {os.getpid(): "running"}
    assert asked == ["look", "look", "look", "restore", "unlock"]
    busy = suspend.run_again({"members": [member]}, lambda *dummy: [{"pid": os.getpid(), "state": "busy"}], patience=0)
    assert busy == {os.getpid(): "busy"}


def test_a_command_that_can_only_toggle_is_not_used(tmp_path: Path) -> None:
    """C-06-cuda-checkpoint#17, C-31-criu#2953."""
    command = tmp_path / "cuda-checkpoint"
    command.write_text("#!/bin/sh\necho --toggle --pid PID\n")
    command.chmod(0o755)
    with pytest.raises(OSError, match="can only toggle"):
        suspend.Command(str(command))


def test_arguments_of_the_calls_have_the_size_the_driver_reads() -> None:
    """C-50-cuda-python#2144."""
    assert [ctypes.sizeof(one) for one in (suspend._LockArgs, suspend._RestoreArgs, suspend._Pair)] == [64, 64, 32]


def record_of(process: subprocess.Popen[str], path: Path, state: str) -> None:
    member = {"pid": process.pid, "start": suspend.start_of(process.pid), "cuda": True}
    suspend.write_record(path, {"state": state, "workload": "work", "members": [member]})


@pytest.mark.parametrize("reached", ["locked", "checkpointed", "stopped"])
def test_the_dead_man_lets_work_go_on_from_wherever_it_was_left(gpus: Gpus, tmp_path: Path, reached: str) -> None:
    process = gpus.start()
    gpus.ask("lock", process.pid)
    if reached != "locked":
        gpus.ask("checkpoint", process.pid)
    if reached == "stopped":
        process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while not suspend.stands_still(process.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
    record = tmp_path / "work.json"
    record_of(process, record, suspend.PUBLISHED)
    done = subprocess.run(
        [sys.executable, SCRIPT, "thaw", str(record)],
        stdout=subprocess.PIPE, text=True, env=gpus.environment, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == "let work go on\n"
    assert goes_on(process)
    assert suspend.read_record(record)["state"] == suspend.THAWED


def test_one_that_hangs_keeps_the_dead_man_from_no_other(gpus: Gpus, tmp_path: Path) -> None:
    hangs, other = gpus.start(), gpus.start()
    gpus.ask("lock", hangs.pid, other.pid)
    gpus.knobs(f"cuda_hang.cuCheckpointProcessGetState.{hangs.pid}=1")
    members = [{"pid": one.pid, "start": suspend.start_of(one.pid), "cuda": True} for one in (hangs, other)]
    suspend.write_record(tmp_path / "work.json", {"state": suspend.FROZEN, "workload": "work", "members": members})
    code = f"import sys; sys.path.insert(0, {str(Path(SCRIPT).parent)!r}); import pathlib, suspend; "
    code += f"print(suspend.thaw(pathlib.Path({str(tmp_path / 'work.json')!r}), 1, 6))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE, text=True, env=gpus.environment, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == f"let work go on, but {{{hangs.pid}: 'unknown'}}\n"
    assert goes_on(other)


@pytest.mark.parametrize("state", ["committing", "committed", "aborted"])
def test_the_dead_man_leaves_alone_what_was_ended_or_given_back(gpus: Gpus, tmp_path: Path, state: str) -> None:
    process = gpus.start()
    gpus.ask("lock", process.pid)
    record_of(process, tmp_path / "work.json", state)
    assert "nothing to do" in suspend.thaw(tmp_path / "work.json")
    assert gpus.ask("look", process.pid)[process.pid]["state"] == "locked"


def test_who_hangs_in_the_driver_does_not_keep_the_others_standing(
    gpus: Gpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor what fails afterwards: an engine is woken although systemd did not read its units again."""
    stuck, other = gpus.start(), gpus.start()
    gpus.ask("lock", stuck.pid, other.pid)
    gpus.knobs(f"cuda_hang.cuCheckpointProcessUnlock.{stuck.pid}=1")
    members = [{"pid": one.pid, "start": suspend.start_of(one.pid), "cuda": True} for one in (stuck, other)]
    path = tmp_path / "work.json"
    wake = [{"url": "http://127.0.0.1:1/", "body": None, "token_file": None, "timeout": 1}]
    suspend.write_record(path, {"state": suspend.PUBLISHED, "workload": "work", "members": members, "wake": wake})
    asked: list[str] = []

    def fail(dummy: dict[str, Any]) -> None:
        raise subprocess.TimeoutExpired("systemctl daemon-reload", 120)

    monkeypatch.setattr(suspend, "tidy", fail)
    monkeypatch.setattr(suspend, "request", lambda method, url, *rest: asked.append(url))
    for name in ("NVIDIA_STANDIN_ROOT", "LD_LIBRARY_PATH"):
        monkeypatch.setenv(name, gpus.environment[name])
    said = suspend.thaw(path, limit=10.0)
    assert "TimeoutExpired" in said and str(stuck.pid) in said, said
    assert goes_on(other)
    assert asked == ["http://127.0.0.1:1/"]
    record = suspend.read_record(path)
    assert (record["state"], record["wake"]) == (suspend.THAWED, [])


def test_a_reused_pid_is_not_taken_for_the_work(tmp_path: Path) -> None:
    start = suspend.start_of(os.getpid())
    assert start
    assert suspend.same([{"pid": os.getpid(), "start": start}]) == [os.getpid()]
    assert suspend.same([{"pid": os.getpid(), "start": start + 1}]) == []


def test_without_the_calls_the_command_is_used(gpus: Gpus, tmp_path: Path) -> None:
    """A library as of branch 550 and NVIDIA's command, here a script over the stand-in's library."""
    old = tmp_path / "old"
    old.mkdir()
    (old / "empty.c").write_text("int cuInit(unsigned flags) { (void)flags; return 0; }\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", old / "libcuda.so.1", old / "empty.c"], check=True, timeout=60)
    real = gpus.environment["LD_LIBRARY_PATH"]
    command = old / "cuda-checkpoint"
    command.write_text(
        f"""#!{sys.executable}
import os, sys
sys.path.insert(0, {str(Path(SCRIPT).parent)!r})
import suspend
words = sys.argv[1:]
if "--help" in words:
    sys.exit(print("--action lock|checkpoint|restore|unlock"))
pid = int(words[words.index("--pid") + 1])
calls = suspend.Library({real + "/libcuda.so.1"!r})
if "--get-state" in words:
    code, state = calls.state(pid)
    print(state if not code else "initialization error")
    sys.exit(bool(code))
if "--get-restore-tid" in words:
    code, tid = calls.thread(pid)
    print(tid if not code else "initialization error")
    sys.exit(bool(code))
action = words[words.index("--action") + 1]
code = {{"lock": lambda: calls.lock(pid, 5.0), "checkpoint": lambda: calls.checkpoint(pid),
         "restore": lambda: calls.restore(pid, {{}}), "unlock": lambda: calls.unlock(pid)}}[action]()
sys.exit(bool(code))
"""
    )
    command.chmod(0o755)
    process = gpus.start()
    gpus.environment.update(LD_LIBRARY_PATH=str(old), PATH=f"{old}:{os.environ['PATH']}")
    seen = gpus.ask("look", process.pid, os.getpid())
    assert (seen[process.pid]["state"], seen[os.getpid()]["state"]) == ("running", "none")
    for action, state in (
        ("lock", "locked"), ("checkpoint", "checkpointed"), ("restore", "locked"), ("unlock", "running"),
    ):  # fmt: skip
        assert gpus.ask(action, process.pid)[process.pid]["state"] == state


def test_a_driver_that_has_neither_is_said(gpus: Gpus, tmp_path: Path) -> None:
    gpus.environment.update(LD_LIBRARY_PATH="/nonexistent", PATH="/nonexistent")
    said = gpus.ask("look", os.getpid())[os.getpid()]
    assert said["code"] == suspend.NO_CALL
    assert "cuda-checkpoint" in said["error"]


def test_a_record_that_cannot_be_written_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(dummy: int) -> None:
        raise OSError(28, "No space left on device")

    suspend.write_record(tmp_path / "work.json", {"state": "frozen"})
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        suspend.write_record(tmp_path / "work.json", {"state": "published"})
    assert suspend.read_record(tmp_path / "work.json") == {"state": "frozen"}
    assert [path.name for path in tmp_path.iterdir()] == ["work.json"]


def test_a_record_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
    )
    suspend.write_record(tmp_path / "work.json", {})
    assert synced[-1] == str(tmp_path)


def test_a_child_that_hangs_in_the_driver_does_not_keep_a_record(tmp_path: Path) -> None:
    path = tmp_path / "work.json"
    with suspend.held(path):
        assert execution.call(time.sleep, 0, timeout=30).ok
        child = os.fork()
        if child == 0:
            signal.pause()
        with pytest.raises(TimeoutError), suspend.held(path, 0.0):
            pass
    try:
        with suspend.held(path, 10.0):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
