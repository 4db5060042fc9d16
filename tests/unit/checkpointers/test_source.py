# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where work is saved: each failure leaves it running or says that it is lost, and a save that time has passed over is
never used. The process and its suspension are real (over the stand-in libcuda); CRIU and systemd are stood in for here,
and real in the metal lab."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cuda_work import Gpus, goes_on
from engines import EngineServer

from ansible_collections.gpufleet.driver.plugins.module_utils import execution
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import artefact, suspend, tree
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.base import CheckpointError, Work
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.common import Limits
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.cuda_criu import CudaCriu
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.service import Moved, ServiceError
from ansible_collections.gpufleet.driver.plugins.module_utils.host import gpus, nvml

CRIU = """#!{python}
import os, signal, sys, time
words = sys.argv[1:]
how = open({how!r}).read().split() if os.path.exists({how!r}) else []
if words[0] == "--version":
    print("Version: 4.2")
elif words[0] == "dump":
    pid, images = int(words[words.index("--tree") + 1]), words[words.index("--images-dir") + 1]
    said = "(00.1) Error (criu/files-ext.c:94): Can't dump file 9\\n" if "fail" in how else ""
    open(images + "/dump.log", "w").write(said)
    if "hang" in how:
        time.sleep(600)
    if "fail" in how:
        sys.exit(1)
    if "fork" in how:
        child = os.fork()
        if not child:
            os.execvp("sleep", ["sleep", "600"])
        os.kill(child, signal.SIGSTOP)
        open({procs!r}, "a").write(f"{{child}}\\n")
    if "no-core" not in how:
        open(images + f"/core-{{pid}}.img", "w").write("core")
    open(images + "/pages-1.img", "wb").write(os.urandom(5000))
    if "not-stopped" not in how:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.2)
"""


class Crash(BaseException):
    """The module ends here, as by SIGKILL."""


class Unit:
    """What stands for the systemd unit of one process."""

    unit = "work.service"
    status_command, members_command, log_command = "systemctl status work", "systemd-cgls -u work", "journalctl -u work"

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process = process
        self.guard_path = folder / "guard.conf"
        self.armed: list[str] | None = None
        self.seconds = 0.0
        self.moved = Moved(folder / "units", "moved")
        self.properties: dict[str, str] = {}
        self.arm_fails = False
        self.fails: set[str] = set()

    def show(self) -> dict[str, str]:
        alive = self.process.poll() is None
        plain = {
            "ActiveState": "active" if alive else "inactive",
            "MainPID": str(self.process.pid),
            "ControlGroup": "/work",
        }
        return {**plain, **self.properties}

    def fragment(self) -> str:
        return "[Service]\n"

    def guard(self) -> None:
        if "guard" in self.fails:
            raise ServiceError("systemd did not read its units again")
        self.guard_path.write_text("guard")

    def unguard(self) -> None:
        self.guard_path.unlink(missing_ok=True)

    def arm(self, argv: Sequence[str], seconds: float) -> None:
        if self.arm_fails:
            raise ServiceError("no timer")
        self.armed, self.seconds = list(argv), seconds

    def disarm(self) -> None:
        self.armed = None

    def end(self, alive: Callable[[], Sequence[int]], timeout: float) -> None:
        self.process.kill()
        self.process.wait(timeout)

    def reset(self) -> None: ...


class Place:
    """One workload on one node."""

    def __init__(self, gpus: Gpus, tmp_path: Path) -> None:
        self.gpus = gpus
        self.process = gpus.start()
        self.pid = self.process.pid
        group = tmp_path / "sys/fs/cgroup/work"
        group.mkdir(parents=True)
        (group / "cgroup.procs").write_text(f"{self.pid}\n")
        (tmp_path / "sys/fs/cgroup/cgroup.controllers").touch()
        self.how = tmp_path / "how"
        self.criu = tmp_path / "criu"
        self.criu.write_text(
            CRIU.format(
                python=sys.executable, how=str(self.how), procs=str(tmp_path / "sys/fs/cgroup/work/cgroup.procs")
            )
        )
        self.criu.chmod(0o755)
        self.unit = Unit(self.process, tmp_path)
        self.state = tmp_path / "state"
        self.store = tmp_path / "store"
        self.commands = 0
        self.crash_at = 0
        self.carried = tmp_path / "carried"
        self.carried.mkdir()
        (self.carried / "steps.log").write_text("1\n2\n")
        self.work = Work("work", "work.service", {"paths": [str(self.carried)]})
        self.limits = Limits(look=5, lock=1, freeze=900, slowest=1000)

    def run(self, argv: Sequence[str], **options: Any) -> execution.Completed:
        self.commands += 1
        if self.commands == self.crash_at:
            raise Crash
        environment = {key: self.gpus.environment[key] for key in ("NVIDIA_STANDIN_ROOT", "LD_LIBRARY_PATH")}
        return execution.run(argv, **{**options, "timeout": min(options["timeout"], 8)}, env=environment)

    def backend(self) -> CudaCriu:
        report = nvml.Report(
            "ok", "", None, None, None, None, [{"uuid": "GPU-0", "minor": 0, "name": "A", "memory": None}]
        )
        return CudaCriu(
            self.run,
            str(self.state),
            str(self.store),
            node="node1",
            criu=str(self.criu),
            limits=self.limits,
            observe=lambda: report,
            usage=lambda: {self.pid: nvml.Usage((0,), 1 << 20)},
            service=lambda dummy: self.unit,  # type: ignore[arg-type,return-value]
            sys_root=str(self.state.parent / "sys"),
        )

    def record(self) -> dict[str, Any]:
        return suspend.read_record(self.backend().record_path(self.work.name))

    @property
    def left_behind(self) -> list[str]:
        stores = sorted(path.name for path in self.store.iterdir()) if self.store.exists() else []
        return [*stores, *(["guard"] if self.unit.guard_path.exists() else []), *(["timer"] if self.unit.armed else [])]


@pytest.fixture
def place(gpus: Gpus, tmp_path: Path) -> Place:
    return Place(gpus, tmp_path)


def test_a_capture_stands_still_and_is_whole(place: Place) -> None:
    captured = place.backend().capture(place.work)
    assert captured.source == "frozen"
    assert suspend.stands_still(place.pid)
    assert place.gpus.devices(place.pid) == []
    assert artefact.verify(place.store, captured.artefact) == []
    manifest = artefact.read(place.store, captured.artefact)
    (member,) = manifest["members"]
    assert (member["pid"], member["cuda"], member["gpus"], member["gpu_bytes"]) == (place.pid, True, ["GPU-0"], 1 << 20)
    assert manifest["key"]["backend"] == "cuda_criu/1"
    assert {file["path"] for file in manifest["files"]} >= {"files/carried.tar", "images/pages-1.img"}
    assert place.unit.armed is not None
    assert place.unit.armed[-2:] == ["thaw", str(place.backend().record_path("work"))]
    assert place.unit.seconds == 900


@pytest.mark.skipif(not shutil.which("age-keygen"), reason="age is not installed: run tests/setup packages")
def test_an_encrypted_capture_is_plain_nowhere(place: Place, tmp_path: Path) -> None:
    made = subprocess.run(["age-keygen"], capture_output=True, text=True, check=True)
    scratch = tmp_path / "scratch"
    options = {"tool": "age", "recipient": made.stderr.split()[-1], "scratch": str(scratch)}
    place.work = replace(place.work, save={**place.work.save, "encrypt": options})
    captured = place.backend().capture(place.work)
    assert artefact.verify(place.store, captured.artefact) == []
    manifest = artefact.read(place.store, captured.artefact)
    assert manifest["sealed"] == {"tool": "age", "recipient": options["recipient"]}
    assert {path.suffix for path in place.store.rglob("*") if path.is_file()} == {".age", ".json"}
    assert list((scratch / "gpufleet").iterdir()) == []


def test_who_cannot_be_encrypted_for_is_not_stopped(place: Place) -> None:
    options = {"tool": "age", "recipient": "age1nobody"}
    place.work = replace(place.work, save={**place.work.save, "encrypt": options})
    (found,) = place.backend().check(place.work)
    assert found.reason == "unsupported_feature:encryption"


def test_a_second_capture_finds_the_first(place: Place) -> None:
    first = place.backend().capture(place.work)
    second = place.backend().capture(place.work)
    assert (second.artefact, second.changed) == (first.artefact, False)


TROUBLE: dict[str, tuple[str, str, str, str]] = {
    # what is wrong: knob of the driver, mode of CRIU, reason, how the work is then
    "lock-runs-into-its-limit": ("cuda_busy=1", "", "lock_timeout", "running"),
    "lock-hangs": ("cuda_hang.cuCheckpointProcessLock=1", "", "lock_timeout", "running"),
    "lock-lies": ("cuda_lie.cuCheckpointProcessLock=1", "", "checkpoint_failed", "running"),
    "lock-fails": ("cuda_error.cuCheckpointProcessLock=304", "", "checkpoint_failed", "running"),
    "checkpoint-not-supported": (
        "cuda_error.cuCheckpointProcessCheckpoint=801",
        "",
        "unsupported_feature:checkpoint",
        "running",
    ),
    "checkpoint-hangs": ("cuda_hang.cuCheckpointProcessCheckpoint=1", "", "checkpoint_failed", "running"),
    "checkpoint-lies": ("cuda_lie.cuCheckpointProcessCheckpoint=1", "", "checkpoint_failed", "running"),
    "checkpoint-breaks-the-process": ("cuda_fatal.cuCheckpointProcessCheckpoint=304", "", "checkpoint_failed", "lost"),
    "dump-fails": ("", "fail", "dump_failed", "running"),
    "dump-hangs": ("", "hang", "dump_failed", "running"),
    "dump-says-success-without-an-image": ("", "no-core", "dump_failed", "running"),
    "dump-says-success-and-lets-it-run": ("", "not-stopped", "dump_failed", "running"),
}


@pytest.mark.parametrize(("knob", "criu", "reason", "source"), TROUBLE.values(), ids=TROUBLE)
def test_a_capture_that_fails_changes_nothing(place: Place, knob: str, criu: str, reason: str, source: str) -> None:
    place.gpus.knobs(knob)
    place.how.write_text(criu)
    with pytest.raises(CheckpointError) as caught:
        place.backend().capture(place.work)
    assert (caught.value.reason.reason, caught.value.reason.source) == (reason, source)
    assert caught.value.reason.next
    assert place.left_behind == []
    if source == "running":
        assert goes_on(place.process)
        place.gpus.knobs()
        place.how.write_text("")
        assert place.backend().capture(place.work).source == "frozen"


def test_why_a_dump_failed_is_told_from_its_log(place: Place) -> None:
    place.how.write_text("fail")
    with pytest.raises(CheckpointError, match="Can't dump file 9"):
        place.backend().capture(place.work)


def test_a_full_disk_lets_the_work_go_on(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(dummy: Path) -> None:
        raise OSError(28, "No space left on device", str(dummy))

    monkeypatch.setattr(artefact, "_sync", full)
    with pytest.raises(CheckpointError, match="No space left") as caught:
        place.backend().capture(place.work)
    assert (caught.value.reason.reason, caught.value.reason.source) == ("insufficient_space", "running")
    assert place.left_behind == []
    assert goes_on(place.process)


def test_too_little_memory_for_what_is_on_the_gpu(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """C-13-cuda-checkpoint#33: of the machine, or left by the limit of the unit."""
    for have, limit in ((1 << 19, None), (1 << 40, 1 << 19)):
        monkeypatch.setattr(tree, "memory_available", lambda proc, have=have: have)
        monkeypatch.setattr(tree, "cgroup_headroom", lambda cgroup, sys, limit=limit: limit)
        (found,) = place.backend().check(place.work)
        assert found.reason == "insufficient_host_ram"


def test_too_little_room_is_found_before_anything_is_stopped(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artefact, "free_bytes", lambda path: 1000)
    with pytest.raises(CheckpointError) as caught:
        place.backend().capture(place.work)
    assert caught.value.reason.reason == "insufficient_space"
    assert place.record() == {}


def test_without_a_dead_man_timer_nothing_is_frozen(place: Place) -> None:
    place.unit.arm_fails = True
    with pytest.raises(CheckpointError, match="no timer"):
        place.backend().capture(place.work)
    assert place.left_behind == []
    assert goes_on(place.process)


def test_the_same_processes_are_not_stopped_again_and_again(place: Place) -> None:
    """C-53-nvcf#893: a third time may damage them. What was begun anew is tried."""
    place.how.write_text("fail")
    for reason in ("dump_failed", "dump_failed", "policy"):
        with pytest.raises(CheckpointError) as caught:
            place.backend().capture(place.work)
        assert (caught.value.reason.reason, caught.value.reason.source) == (reason, "running")
    assert goes_on(place.process)
    record = place.record()
    suspend.write_record(place.backend().record_path("work"), {**record, "main": 4_100_000})
    place.how.write_text("")
    assert place.backend().capture(place.work).source == "frozen"


def test_a_process_that_dies_of_the_lock_is_lost(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """C-21-cuda-checkpoint#58."""

    def lock(*dummy: Any) -> None:
        place.process.kill()
        place.process.wait(10)
        raise OSError("no answer")

    monkeypatch.setattr(CudaCriu, "_lock", lock)
    with pytest.raises(CheckpointError) as caught:
        place.backend().capture(place.work)
    assert caught.value.reason.source == "lost"
    assert place.left_behind == []


def test_criu_has_no_plugin_and_no_settings_of_others(place: Place) -> None:
    """C-24-criu#2515, C-25-criu#2521, C-30-criu#2726: who asks the driver is known; C-28-criu#2654: there is no dump
    beforehand. C-43-snapshot#144: the options are the same for both ways, and are kept with the save."""
    seen: list[list[str]] = []
    real = place.run

    def run(argv: Sequence[str], **options: Any) -> execution.Completed:
        seen.append(list(argv))
        return real(argv, **options)

    place.run = run  # type: ignore[method-assign]
    captured = place.backend().capture(place.work)
    (dump,) = [argv for argv in seen if argv[0] == str(place.criu) and argv[1] != "--version"]
    options = artefact.read(place.store, captured.artefact)["backend"]["options"]
    assert dump[1] == "dump" and dump[-len(options) :] == options == place.backend()._criu_options()
    assert {"--no-default-config", "--tcp-close"} <= set(options)
    assert list(Path(options[options.index("--libdir") + 1]).iterdir()) == []


def test_the_driver_is_asked_about_all_processes_at_once(place: Place) -> None:
    """C-54-nvcf#263: a command for each costs seconds. C-12-cuda-checkpoint#30: who does not answer keeps no other."""
    asked: list[Sequence[str]] = []
    real = place.run
    place.run = lambda argv, **options: (asked.append(argv), real(argv, **options))[1]  # type: ignore[method-assign]
    second = place.gpus.start()
    place.gpus.knobs(f"cuda_hang.cuCheckpointProcessGetState.{place.pid}=1")
    place.limits = replace(place.limits, look=2)
    assert place.backend()._states([place.pid, second.pid]) == {place.pid: "unknown", second.pid: "running"}
    assert len(asked) == 1


def test_limits_grow_with_what_is_saved() -> None:
    """C-11-cuda-checkpoint#29."""
    assert (Limits().by_size(0), Limits().by_size(80 * 10**9)) == (60, 860)


def test_what_a_node_lacks_is_told(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """C-01-cuda-checkpoint#6, C-31-criu#2953: root, a CRIU that passes its own check, and a driver that has the calls,
    or a command with actions."""
    place.criu.write_text("#!/bin/sh\nexit 1\n")
    place.gpus.environment["LD_LIBRARY_PATH"] = "/nonexistent"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", "/nonexistent")
    expected = ["root", "criu check that succeeds", "a driver with checkpoint calls (570 or later)"]
    assert [one.expected for one in place.backend().probe()] == expected


PROCESSES: dict[str, tuple[dict[str, Any], str]] = {
    "C-09-cuda-checkpoint#27-nccl": ({"nccl": True}, "unsupported_feature:nccl"),
    "C-32-criu#2980-shared-memory": ({"shared": ("/dev/shm/x",)}, "unsupported_feature:shared_memory"),
    "C-08-cuda-checkpoint#21-older-library": ({"cuda": "535.1.1"}, "key_mismatch:driver"),
}


@pytest.mark.parametrize(("changes", "reason"), PROCESSES.values(), ids=PROCESSES)
def test_a_process_that_would_not_survive_is_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], reason: str
) -> None:
    backend = place.backend()
    monkeypatch.setattr(tree, "look", lambda pid, proc, real=tree.look: replace(real(pid, proc), **changes))
    monkeypatch.setattr(backend, "_usage", lambda: {place.pid: nvml.Usage((0, 1), 1 << 20)})
    monkeypatch.setattr(gpus, "read_loaded", lambda dummy: gpus.LoadedDriver("580.95.05", "open", "x86_64"))
    if "cuda" not in changes:
        monkeypatch.setattr(gpus, "read_loaded", lambda dummy: None)
    assert [one.reason for one in backend.check(place.work)] == [reason]


def test_work_that_does_not_end_is_lost_and_nobody_else_gets_it(place: Place) -> None:
    """It stands still for good, in something that no signal reaches; the next run carries its end out."""
    place.backend().capture(place.work)
    end = place.unit.end

    def hangs(*dummy: Any) -> None:
        raise ServiceError("PIDs 1 of work.service are still there after SIGKILL")

    place.unit.end = hangs  # type: ignore[method-assign]
    with pytest.raises(CheckpointError) as caught:
        place.backend().commit(place.work, "node2")
    assert (caught.value.reason.reason, caught.value.reason.step) == ("lost_source", "commit")
    assert caught.value.reason.source == place.backend().abort(place.work) == "lost"
    with pytest.raises(CheckpointError, match="given to node2"):
        place.backend().commit(place.work, "node3")
    place.unit.end = end  # type: ignore[method-assign]
    assert place.backend().capture(place.work).target == "node2"


FEATURES = {
    "watchdog": ({"WatchdogUSec": "30s"}, "unsupported_feature:watchdogusec"),
    "root-image": ({"RootImage": "/x.raw"}, "unsupported_feature:rootimage"),
    "not-running": ({"ActiveState": "inactive"}, "lost_source"),
}


@pytest.mark.parametrize(("properties", "reason"), FEATURES.values(), ids=FEATURES)
def test_what_cannot_be_saved_is_refused_by_name(place: Place, properties: dict[str, str], reason: str) -> None:
    place.unit.properties = properties
    (found,) = place.backend().check(place.work)
    assert found.reason == reason


def test_the_process_may_crash_at_any_command(place: Place) -> None:
    """The module is killed at each command it gives in turn, and started again: in the end the work stands still with a
    whole save, whatever was left in between."""
    crashes = 0
    while True:
        crashes += 1
        place.commands, place.crash_at = 0, crashes
        backend = place.backend()
        try:
            # SIGKILL runs no handler
            backend._undo = lambda path, record: "nobody knows"  # type: ignore[method-assign]
            backend.capture(place.work)
            break
        except Crash:
            pass
        place.crash_at = 0
        captured = place.backend().capture(place.work)
        assert suspend.stands_still(place.pid)
        assert artefact.verify(place.store, captured.artefact) == []
        assert place.backend().abort(place.work) == "running"
        assert goes_on(place.process)
        assert place.left_behind == []
    assert crashes > 5


def thaw(place: Place) -> None:
    """What the timer does."""
    assert place.unit.armed
    subprocess.run(place.unit.armed, env=place.gpus.environment, check=True, timeout=60, stdout=subprocess.DEVNULL)


@pytest.fixture
def engine(place: Place) -> Iterator[EngineServer]:
    """The work is an engine, which sleeps while it is saved."""
    server = EngineServer("sglang")
    place.work = replace(place.work, save={"engine": {"kind": "sglang", "url": server.url, "drain": 1, "sleep": True}})
    yield server
    server.close()


LET_GO: dict[str, Callable[[Place], object]] = {
    "aborted": lambda place: place.backend().abort(place.work),
    "nobody-came": thaw,
}


@pytest.mark.parametrize("let_go", LET_GO.values(), ids=LET_GO)
def test_an_engine_stands_by_while_it_is_saved(
    place: Place, engine: EngineServer, let_go: Callable[[Place], object]
) -> None:
    captured = place.backend().capture(place.work)
    assert (engine.paused, engine.asleep) == (True, True)
    wake = artefact.read(place.store, captured.artefact)["workload"]["wake"]
    assert [call["url"] for call in wake] == [
        f"{engine.url}/resume_memory_occupation",
        f"{engine.url}/continue_generation",
    ]
    let_go(place)
    assert (engine.paused, engine.asleep) == (False, False)


@pytest.mark.parametrize("criu", ["fail", "no-core"])
def test_an_engine_goes_on_if_it_cannot_be_saved(place: Place, engine: EngineServer, criu: str) -> None:
    place.how.write_text(criu)
    with pytest.raises(CheckpointError) as caught:
        place.backend().capture(place.work)
    assert caught.value.reason.source == "running"
    assert (engine.paused, engine.asleep) == (False, False)


def test_an_engine_with_requests_that_do_not_end_is_not_stopped(place: Place, engine: EngineServer) -> None:
    engine.running = 3
    with pytest.raises(CheckpointError, match="3 requests did not end") as caught:
        place.backend().capture(place.work)
    assert (caught.value.reason.reason, caught.value.reason.source) == ("lock_timeout", "running")
    assert not engine.paused


def test_an_engine_that_does_not_go_on_is_lost_and_asked_again(
    place: Place, engine: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspend, "PATIENCE", 1.0)
    place.backend().capture(place.work)
    engine.refuses = {"/resume_memory_occupation"}
    assert place.backend().abort(place.work) == "lost"
    assert place.unit.armed and [call["url"] for call in place.record()["wake"]] == [
        f"{engine.url}/resume_memory_occupation"
    ]
    engine.refuses = set()
    thaw(place)
    assert (engine.paused, engine.asleep, place.record()["wake"]) == (False, False, [])


def test_work_that_was_let_go_on_is_not_ended(place: Place) -> None:
    place.backend().capture(place.work)
    thaw(place)
    with pytest.raises(CheckpointError, match="let go on meanwhile") as caught:
        place.backend().commit(place.work, "node2")
    assert caught.value.reason.source == "running"
    assert goes_on(place.process)


def test_work_that_somebody_woke_is_not_ended(place: Place) -> None:
    place.backend().capture(place.work)
    place.process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + 10
    while suspend.stands_still(place.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(CheckpointError, match="let go on meanwhile"):
        place.backend().commit(place.work, "node2")


def test_ended_work_is_given_to_one_target_only(place: Place) -> None:
    captured = place.backend().capture(place.work)
    assert place.backend().commit(place.work, "node2") == "gone"
    assert place.process.poll() == -signal.SIGKILL
    assert place.unit.moved.held() == ["work.service"]
    assert place.unit.armed is None
    assert place.backend().commit(place.work, "node2") == "gone"
    with pytest.raises(CheckpointError, match="was given to node2"):
        place.backend().commit(place.work, "node3")
    again = place.backend().capture(place.work)
    assert (again.source, again.target, again.artefact) == ("gone", "node2", captured.artefact)
    place.backend().reassign(place.work, "node3")
    assert place.backend().commit(place.work, "node3") == "gone"


def test_an_end_that_was_cut_off_is_carried_out_by_the_next_run(place: Place) -> None:
    """Before it tells anybody that the work may be brought back elsewhere."""
    place.backend().capture(place.work)
    backend = place.backend()

    def crash(*dummy: Any) -> None:
        raise Crash

    place.unit.end = crash  # type: ignore[method-assign,assignment]
    with pytest.raises(Crash):
        backend.commit(place.work, "node2")
    assert place.record()["state"] == "committing" and suspend.stands_still(place.pid)
    del place.unit.end
    again = place.backend().capture(place.work)
    assert (again.source, again.target) == ("gone", "node2")
    assert place.process.poll() == -signal.SIGKILL
    assert place.unit.moved.held() == ["work.service"]


def test_a_source_that_dies_while_it_stands_still_is_still_saved(place: Place) -> None:
    place.backend().capture(place.work)
    os.kill(place.pid, signal.SIGKILL)
    place.process.wait(10)
    assert place.backend().commit(place.work, "node2") == "gone"


def test_a_save_that_somebody_waits_for_is_not_thrown_away(place: Place) -> None:
    captured = place.backend().capture(place.work)
    with pytest.raises(CheckpointError, match="says published"):
        place.backend().discard(place.work, captured.artefact)
    place.backend().commit(place.work, "node2")
    assert place.backend().discard(place.work, captured.artefact)
    assert place.record() == {}
    assert not place.backend().discard(place.work, captured.artefact)


def test_a_process_that_was_started_meanwhile_is_not_left_standing(place: Place) -> None:
    """The dump stops it, too, but it is in no list: neither the save nor what is let go on may do without it."""
    group = place.gpus.root / "sys/fs/cgroup/work/cgroup.procs"
    place.how.write_text("fork")
    with pytest.raises(CheckpointError, match="were started while it was saved") as caught:
        place.backend().capture(place.work)
    assert caught.value.reason.source == "running"
    new = int(group.read_text().split()[-1])
    try:
        assert new != place.pid
        assert not suspend.stands_still(new)
    finally:
        os.kill(new, signal.SIGKILL)
    assert goes_on(place.process)


def test_a_process_that_was_started_during_the_check_belongs_to_the_work(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = place.gpus.root / "sys/fs/cgroup/work/cgroup.procs"
    real = artefact.free_bytes
    with subprocess.Popen(["sleep", "600"]) as new:

        def slow(path: str | Path) -> int:
            group.write_text(f"{place.pid}\n{new.pid}\n")
            return real(path)

        monkeypatch.setattr(artefact, "free_bytes", slow)
        try:
            with pytest.raises(CheckpointError, match=rf"no image of PIDs \[{new.pid}\]"):
                place.backend().capture(place.work)
        finally:
            new.kill()
    assert {one["pid"] for one in place.record()["members"]} == {place.pid, new.pid}
    assert goes_on(place.process)


def test_a_save_during_which_the_timer_came_is_not_used(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store may not answer for so long that the timer no longer waits for whoever holds the record."""
    real = artefact.publish

    def slow(*args: Any, **options: Any) -> dict[str, Any]:
        suspend.thaw(place.backend().record_path("work"), patience=0.1)
        return real(*args, **options)

    monkeypatch.setattr(suspend, "tidy", lambda record: None)
    monkeypatch.setattr(suspend, "ask_child", lambda *args: [])
    monkeypatch.setattr(artefact, "publish", slow)
    with pytest.raises(CheckpointError, match="its timer let it go on while") as caught:
        place.backend().capture(place.work)
    assert caught.value.reason.source == "running"
    assert place.left_behind == []
    assert goes_on(place.process)


@pytest.mark.parametrize(
    ("one", "other"), [("train 1", "train-1"), ("日本", "本日"), ("a/b", "a b"), ("x" * 90, "x" * 91)]
)
def test_no_two_workloads_share_a_record(place: Place, one: str, other: str) -> None:
    paths = {place.backend().record_path(name) for name in (one, other)}
    assert len(paths) == 2
    assert {path.parent for path in paths} == {place.state / "checkpoints"}


def test_a_save_of_another_unit_is_not_taken_for_it(place: Place) -> None:
    place.backend().capture(place.work)
    other = Work("work", "other.service", place.work.save)
    with pytest.raises(CheckpointError, match=r"a save of this name is of work\.service"):
        place.backend().capture(other)


def test_a_deleted_file_is_not_looked_for_on_the_target(tmp_path: Path) -> None:
    """CRIU saves what is in it."""
    with (tmp_path / "gone").open("w") as gone, (tmp_path / "kept").open("w") as kept:
        (tmp_path / "gone").unlink()
        memory = os.memfd_create("scratch")
        try:
            files = {one.path.rpartition("/")[2]: one.gone for one in tree.look(os.getpid()).files}
        finally:
            os.close(memory)
        assert gone.fileno() != kept.fileno()
    assert (files["gone (deleted)"], files["memfd:scratch (deleted)"], files["kept"]) == (True, True, False)


def test_a_damaged_record_is_not_guessed_at(place: Place) -> None:
    place.backend().capture(place.work)
    place.backend().record_path("work").write_text("{")
    with pytest.raises(CheckpointError, match="is damaged") as caught:
        place.backend().capture(place.work)
    assert caught.value.reason.source == "frozen", "a look at the processes tells"


def full_disk(monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    """No record of that state can be written."""
    real = suspend.write_record

    def write(path: Path, record: dict[str, Any]) -> None:
        if record["state"] == state:
            raise OSError(28, "No space left on device", str(path))
        real(path, record)

    monkeypatch.setattr(suspend, "write_record", write)


def test_a_save_that_cannot_be_written_down_is_undone(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    full_disk(monkeypatch, "published")
    with pytest.raises(CheckpointError, match="No space left") as caught:
        place.backend().capture(place.work)
    assert caught.value.reason.source == "running"
    assert place.left_behind == [] and goes_on(place.process)


def test_work_whose_end_cannot_be_written_down_still_stands(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.backend().capture(place.work)
    with monkeypatch.context() as full:
        full_disk(full, "committing")
        with pytest.raises(CheckpointError, match="No space left") as caught:
            place.backend().commit(place.work, "node2")
    assert caught.value.reason.source == "frozen" and place.unit.armed
    assert place.backend().commit(place.work, "node3") == "gone"


def test_work_that_was_ended_needs_no_second_record_of_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = place.backend().capture(place.work)
    with monkeypatch.context() as full:
        full_disk(full, "committed")
        assert place.backend().commit(place.work, "node2") == "gone"
    assert place.record()["state"] == "committing" and place.process.poll() == -signal.SIGKILL
    with pytest.raises(CheckpointError, match="was given to node2"):
        place.backend().commit(place.work, "node3")
    assert place.backend().abort(place.work) == "gone"
    place.backend().reassign(place.work, "node3")
    assert place.record()["state"] == "committed"
    assert place.backend().discard(place.work, captured.artefact)


HALF_ENDED: dict[str, Callable[[Place], object]] = {
    **LET_GO,
    "given-to-another": lambda place: place.backend().commit(place.work, "node3"),
}


@pytest.mark.parametrize("fails", ["guard", "place"])
@pytest.mark.parametrize("then", HALF_ENDED.values(), ids=HALF_ENDED)
def test_work_that_could_not_be_ended_is_not_lost(place: Place, fails: str, then: Callable[[Place], object]) -> None:
    place.backend().capture(place.work)
    place.unit.fails = {fails}
    if fails == "place":
        place.unit.moved.directory.write_text("no directory")
    with pytest.raises(CheckpointError) as caught:
        place.backend().commit(place.work, "node2")
    assert caught.value.reason.source == "frozen" and place.unit.armed
    place.unit.fails = set()
    if fails == "place":
        place.unit.moved.directory.unlink()
    said = then(place)
    if said == "gone":
        assert place.record()["target"] == "node3" and place.unit.moved.held() == ["work.service"]
    else:
        assert goes_on(place.process)
        assert place.unit.moved.held() == [], "or it would not be started at the next boot"


def test_a_timer_that_cannot_be_set_anew_leaves_the_work_as_it_is(place: Place) -> None:
    place.backend().capture(place.work)
    place.unit.arm_fails = True
    with pytest.raises(CheckpointError, match="no timer") as caught:
        place.backend().capture(place.work)
    assert caught.value.reason.source == "frozen" and place.unit.armed


def test_a_surprise_in_a_capture_is_no_damaged_record(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def surprise(*dummy: Any) -> None:
        raise ValueError("what nobody thought of")

    monkeypatch.setattr(tree, "journal_sockets", surprise)
    with pytest.raises(CheckpointError, match="ValueError: what nobody thought of") as caught:
        place.backend().capture(place.work)
    assert (caught.value.reason.reason, caught.value.reason.source) == ("checkpoint_failed", "running")
    assert place.left_behind == [] and goes_on(place.process)


def test_the_record_is_private_and_tells_who(place: Place) -> None:
    place.backend().capture(place.work)
    path = place.backend().record_path("work")
    assert path.stat().st_mode & 0o777 == 0o600
    record = json.loads(path.read_text())
    assert (record["state"], record["unit"], record["members"][0]["pid"]) == ("published", "work.service", place.pid)


def test_a_name_that_was_cut_in_the_middle_of_a_letter(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7/status").write_bytes(b"Name:\tabcdefghijklm\xc3\nNSpid:\t7\t3\n")
    assert tree.inner_pid(7, str(tmp_path)) == 3
