# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What both ends of a move share: records, limits, and calls into the driver that are bounded and read back.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import artefact, carried, suspend
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.base import (
    SOURCE_FROZEN,
    SOURCE_GONE,
    SOURCE_LOST,
    SOURCE_RUNNING,
    SOURCE_UNKNOWN,
    CheckpointError,
    Reason,
    Work,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.container import PREFIX, Podman
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.sealed import Seal, SealError
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.service import Service, ServiceError
from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Completed, Runner
from ansible_collections.gpufleet.driver.plugins.module_utils.host import nvml
from ansible_collections.gpufleet.driver.plugins.module_utils.host.systemd import SystemdError, unit_name
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import atomic_write

FORMAT = "cuda_criu/1"
ABORTED = "aborted"
COMMITTING, COMMITTED = suspend.COMMITTING, "committed"
PREPARED, STARTING, UNLOCKING, RUNNING, FAILED = "prepared", "starting", "unlocking", "running", "failed"
UNPACKING, ENDING = "unpacking", "ending"

MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Seconds. ``lock`` is what submitted work may take to end; ``freeze`` how long a published save waits for its
    controller before the dead-man timer lets the work go on; ``settle`` how long restored work must hold."""

    look: float = 20.0
    lock: float = 10.0
    freeze: float = 900.0
    settle: float = 10.0
    base: float = 60.0
    """What everything that grows with memory is given before it is counted by size."""
    slowest: float = 0.1
    """GB a second that everything that grows with memory is given at least."""

    def by_size(self, size: int) -> float:
        return self.base + size / 1e9 / self.slowest


Differences = Callable[[Mapping[str, Any], Mapping[str, Any]], Sequence[Any]]
"""What of the key of a save does not agree with the facts of a node: objects with ``field`` and a text."""


def unit_of(work: Work) -> str:
    """The name under which a work's service is looked up: a unit, or ``podman:NAME`` for a container."""
    return f"{PREFIX}{work.container}" if work.container and not work.unit else unit_name(work.unit or work.name)


def _say_nothing(dummy: str) -> None:
    return None


class Common:
    """One node as the place of saves and restores."""

    name = "cuda_criu"

    def __init__(
        self,
        run: Runner,
        state_dir: str,
        store: str,
        *,
        node: str = "",
        criu: str = "criu",
        limits: Limits | None = None,
        differences: Differences | None = None,
        observe: Callable[[], nvml.Report] = lambda: nvml.observe(20.0),
        usage: Callable[[], Mapping[int, nvml.Usage]] = lambda: nvml.usage(20.0),
        say: Callable[[str], None] = _say_nothing,
        service: Callable[[str], Service] | None = None,
        proc: str = "/proc",
        sys_root: str = "/sys",
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._run = run
        self._state = Path(state_dir)
        self._store = Path(store)
        self._node = node or os.uname().nodename
        self._criu = criu
        self._limits = limits or Limits()
        self._differences = differences
        self._observe, self._usage = observe, usage
        self._say = say
        self._service = service or (lambda unit: Podman(run, unit) if unit.startswith(PREFIX) else Service(run, unit))
        self._proc, self._sys = proc, sys_root
        self._now, self._sleep = now, sleep

    # -- places

    def record_path(self, work: str, side: str = "checkpoints") -> Path:
        """Where a workload's record is: ``checkpoints`` where it was saved, ``restores`` where it came back. Two
        names never have the same one, whatever signs they have."""
        safe = artefact.new_id(work, "", "").strip("-")
        if safe != work:
            safe += f"-{hashlib.sha256(work.encode('utf-8', 'surrogateescape')).hexdigest()[:16]}"
        return self._state / side / f"{safe}.json"

    @property
    def _script(self) -> Path:
        return self._state / "suspend.py"

    def _source_of_script(self) -> str:
        loader = suspend.__spec__.loader if suspend.__spec__ else None
        text = loader.get_source(suspend.__name__) if loader and hasattr(loader, "get_source") else None
        if not text:
            raise OSError(f"the source of {suspend.__name__} cannot be read")
        return str(text)

    def _place_script(self) -> None:
        """The part that runs by itself, on the node: this module's own files are gone once it returns."""
        text = self._source_of_script()
        if not self._script.exists() or self._script.read_text() != text:
            self._state.mkdir(mode=0o700, parents=True, exist_ok=True)
            atomic_write(self._script, text.encode())

    @contextlib.contextmanager
    def _held(self, work: Work, side: str = "checkpoints") -> Iterator[tuple[Path, dict[str, Any]]]:
        path = self.record_path(work.name, side)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._place_script()  # the timer needs it too
            with suspend.held(path):
                record = self._read(work, path, side)
                owner = record.get("backend") or "cuda_criu" if record else self.name
                if owner != self.name:
                    expected = f"nothing that {owner} has begun"
                    raise self._failed(work, "policy", "ownership", f"{path} is {owner}'s", expected, f"cat {path}")
                yield path, record
        except TimeoutError as exc:
            source = self._source_now(work, side)
            raise self._failed(
                work, "policy", "ownership", str(exc), "nobody else at it", f"fuser -v {path}.lock", source
            ) from exc
        except (ServiceError, artefact.ArtefactError) as exc:
            source = self._source_now(work, side)
            raise self._failed(
                work, "policy", "node", str(exc), "an answer of what is asked", "systemctl status", source
            ) from exc
        except OSError as exc:
            raise self._failed(
                work,
                "insufficient_space",
                "record",
                f"{exc.filename or path}: {exc.strerror or exc}",
                "a disk that can be written",
                f"df -h {path.parent}",
                self._source_now(work, side),
            ) from exc

    def _read(self, work: Work, path: Path, side: str) -> dict[str, Any]:
        try:
            return suspend.read_record(path)
        except ValueError as exc:
            observed, source = f"{path} is damaged ({exc})", self._source_now(work, side)
            raise self._failed(
                work, "policy", "record", observed, "a record of ours", f"mv {path} {path}.bad", source
            ) from exc

    def _source_now(self, work: Work, side: str) -> str:
        """How work is where it was saved, by its record and a look at its processes; elsewhere, nobody knows."""
        if side != "checkpoints":
            return SOURCE_UNKNOWN
        try:
            record = suspend.read_record(self.record_path(work.name))
            state = record.get("state")
            if state not in (suspend.FROZEN, suspend.PUBLISHED, COMMITTING):
                return str(record.get("source", SOURCE_GONE if state == COMMITTED else SOURCE_RUNNING))
            alive = suspend.same(record["members"], self._proc)
            if alive and record.get("killing"):
                return SOURCE_LOST
            if not alive and record["members"]:
                return {suspend.FROZEN: SOURCE_LOST, COMMITTING: SOURCE_GONE}.get(state, SOURCE_FROZEN)
            gone_on = bool(alive) and not any(suspend.stands_still(pid, self._proc) for pid in alive)
            return SOURCE_RUNNING if gone_on and state != suspend.FROZEN else SOURCE_FROZEN
        except (OSError, ValueError):
            pass
        try:
            group = self._service(unit_of(work)).show().get("ControlGroup", "")
        except (OSError, ServiceError, SystemdError):
            return SOURCE_UNKNOWN
        pids = suspend.pids_of(group, self._sys)
        stands = any(suspend.stands_still(pid, self._proc) for pid in pids)
        return SOURCE_FROZEN if stands else SOURCE_RUNNING if pids else SOURCE_GONE

    def _seal(self, work: Work) -> Seal | None:
        options = work.save.get("encrypt")
        return Seal(self._run, options) if options else None

    def _sealed_by(self, work: Work) -> dict[str, str] | None:
        seal = self._seal(work)
        return seal.describe() if seal else None

    def _unreadable(self, work: Work, manifest: Mapping[str, Any]) -> str:
        """Why a save could not be decrypted here; empty if it could, or is plain."""
        if not manifest.get("sealed"):
            return ""
        by = manifest["sealed"]
        seal = self._seal(work)
        if not seal or seal.tool != by["tool"]:
            return f"it was encrypted by {by['tool']} for {by['recipient']}, which save.encrypt does not name here"
        least = min(manifest["files"], key=lambda file: int(file["size"]))
        free = artefact.free_bytes(seal.scratch)
        if free < manifest["total"]:
            return (
                f"{free // MIB} MiB free in {seal.scratch}, and {manifest['total'] // MIB} MiB are needed to decrypt it"
            )
        return seal.can_open(artefact.place(self._store, manifest["id"]) / least["path"], self._limits.by_size(0))

    def _open(self, work: Work, path: Path, record: dict[str, Any], manifest: Mapping[str, Any]) -> Path:
        """Where the plain files of a save are: itself, or what was decrypted of it (until :meth:`_drop_plain`).

        :raises CheckpointError: if it cannot be decrypted.
        """
        root = artefact.place(self._store, manifest["id"])
        seal = self._seal(work)
        if not manifest.get("sealed") or not seal:
            return root
        record["plain"] = str(seal.plain(manifest["id"]))
        suspend.write_record(path, record)
        try:
            plain = seal.fresh(manifest["id"])
            names = [file["path"] for file in manifest["files"]]
            seal.open(root, names, plain, self._limits.by_size(manifest["total"]))
        except (SealError, OSError) as exc:
            expected = f"the key of {seal.recipient}"
            raise self._failed(
                work, "key_mismatch:encryption", "open", str(exc), expected, f"{seal.tool} --version", SOURCE_GONE
            ) from exc
        return plain

    def _put_back(self, work: Work, path: Path, record: dict[str, Any]) -> None:
        """See that nothing is still set aside of what was here before a restore that failed.

        :raises CheckpointError: if something cannot be put back; the work would start from half of another's files.
        """
        if record.get("state") != FAILED or not record.get("aside"):
            return
        record["aside"] = left = carried.undo(record["aside"])
        suspend.write_record(path, record)
        if left:
            observed = f"{left[0]['path']} is not what it was: {left[0]['trouble']}"
            look = f"ls -ld {left[0]['path']}*"
            raise self._failed(work, "policy", "files", observed, f"{left[0]['kept']} in its place", look, SOURCE_GONE)

    def _drop_plain(self, record: dict[str, Any]) -> None:
        plain = record.pop("plain", None)
        if plain:
            shutil.rmtree(plain, ignore_errors=True)

    def _failed(
        self,
        work: Work,
        reason: str,
        step: str,
        observed: str,
        expected: str,
        command: str,
        source: str = SOURCE_RUNNING,
        pid: int | None = None,
    ) -> CheckpointError:
        return CheckpointError(
            Reason(reason, step, observed, expected, command, source, workload=work.name, member=self._node, pid=pid)
        )

    # -- the driver

    def _driver(
        self, action: str, pids: Sequence[int], seconds: float, pairs: Mapping[str, str] | None = None
    ) -> dict[int, dict[str, Any]]:
        """Ask the driver about each process in one child with a deadline; who did not answer has code None."""
        answers: dict[int, dict[str, Any]] = {pid: {"pid": pid, "code": None, "state": suspend.UNKNOWN} for pid in pids}
        if not pids:
            return answers
        options = json.dumps({"timeout": self._limits.lock, "pairs": dict(pairs or {})})
        argv = [sys.executable, "-IS", "-", action, options, *map(str, pids)]
        done = self._run(argv, timeout=seconds, stdin=self._source_of_script())
        for line in done.stdout.splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                said = json.loads(line)
                answers[int(said["pid"])] = said
        return answers

    def _states(self, pids: Sequence[int]) -> dict[int, str]:
        return {pid: said["state"] for pid, said in self._driver("look", pids, self._limits.look).items()}

    def probe(self) -> list[Reason]:
        found: list[Reason] = []

        def lacks(observed: str, expected: str, command: str) -> None:
            found.append(Reason("unsupported_backend", "probe", observed, expected, command, member=self._node))

        if os.geteuid() != 0:
            lacks(f"uid {os.geteuid()}", "root", "run the play with become")
        checked = self._run([self._criu, "check"], timeout=60)
        if not checked.ok:
            lacks(checked.describe(), "criu check that succeeds", f"{self._criu} check --all")
        said = self._driver("look", [os.getpid()], self._limits.look)[os.getpid()]
        if said["code"] == suspend.NO_CALL:
            lacks(str(said.get("error")), "a driver with checkpoint calls (570 or later)", "nvidia-smi")
        elif said["code"] is None:
            lacks("the driver did not answer", f"an answer within {self._limits.look:.0f} s", "nvidia-smi")
        return found

    def _phase(
        self,
        work: Work,
        action: str,
        pids: Sequence[int],
        wanted: str,
        seconds: float,
        pairs: Mapping[str, str] | None = None,
    ) -> None:
        """One action on all processes; what counts is the state the driver tells afterwards, not what the call said."""
        for pid, said in self._driver(action, pids, seconds, pairs).items():
            if said["code"] == 0 and said["state"] == wanted:
                continue
            code, state = said["code"], said["state"]
            if code is None:
                observed = f"PID {pid}: no answer within {seconds:.0f} s"
            else:
                observed = (
                    f"PID {pid}: CUDA error {code}, state {state}" if code else f"PID {pid}: success, but it is {state}"
                )
            if action == "lock":
                reason = "lock_timeout" if code in (suspend.NOT_READY, None) else "checkpoint_failed"
            elif action == "checkpoint":
                reason = "unsupported_feature:checkpoint" if code == suspend.NOT_SUPPORTED else "checkpoint_failed"
            else:
                reason = "insufficient_gpu_memory" if code == suspend.OUT_OF_MEMORY else "cuda_restore_failed"
            raise self._failed(
                work, reason, action, observed, f"state {wanted}", f"cuda-checkpoint --get-state --pid {pid}", pid=pid
            )

    def _criu_options(self) -> list[str]:
        empty = self._state / "no-plugins"
        empty.mkdir(mode=0o700, exist_ok=True)
        return [
            "-v3",
            "--no-default-config",
            "--file-locks",
            "--link-remap",
            "--tcp-close",
            "--manage-cgroups=ignore",
            "--libdir",
            str(empty),
        ]

    def _progress(self, work: Work) -> list[float]:
        """What the work's own probes say: an error if it is not ready, and the number that grows, if there is one."""

        def wrong(observed: str, expected: str, command: str) -> CheckpointError:
            return self._failed(work, "verify_failed", "verify", observed, expected, command, SOURCE_GONE)

        if work.ready:
            deadline = time.monotonic() + work.ready_timeout
            done = self._run(work.ready, timeout=work.ready_timeout)
            while not done.ok and time.monotonic() < deadline:
                self._sleep(1.0)
                done = self._run(work.ready, timeout=work.ready_timeout)
            if not done.ok:
                raise wrong(short(done), "its own probe succeeds", " ".join(work.ready))
        if not work.save.get("progress"):
            return []
        number = self._number(work)
        if number is None:
            raise wrong("its progress command printed no number", "a number", " ".join(work.save["progress"]))
        return [number]

    def _number(self, work: Work) -> float | None:
        """What the work's progress command prints last, if there is one and that is a number."""
        if not work.save.get("progress"):
            return None
        try:
            number = float(self._run(work.save["progress"], timeout=30).stdout.split()[-1])
        except (ValueError, IndexError):
            return None
        return number if math.isfinite(number) else None


def short(done: Completed) -> str:
    text = done.describe()
    return text if len(text) <= 300 else text[:120] + " … " + text[-170:]


def why(done: Completed, log: Path | None) -> str:
    """Why a dump or a restore failed: the command's own words, and the last errors in CRIU's log, if there is one."""
    return f"{short(done)}; {_errors(log)}" if log else short(done)


def _errors(log: Path) -> str:
    """They do not decide anything, as success logs some too."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return "no log"
    found = [line.strip() for line in lines if "Error" in line]
    return " | ".join(found[-3:]) or (lines[-1] if lines else "an empty log")
