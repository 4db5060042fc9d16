# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where work is saved.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import (
    artefact,
    carried,
    facts,
    suspend,
    tree,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import images as page_images
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.base import (
    SOURCE_FROZEN,
    SOURCE_GONE,
    SOURCE_LOST,
    SOURCE_RUNNING,
    Captured,
    CheckpointError,
    Estimate,
    Reason,
    Work,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.common import (
    ABORTED,
    COMMITTED,
    COMMITTING,
    FORMAT,
    MIB,
    Common,
    unit_of,
    why,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.container import ARCHIVE, Podman
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.engine import Engine, EngineError
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.sealed import Seal, SealError
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.service import Service, ServiceError
from ansible_collections.gpufleet.driver.plugins.module_utils.host import gpus, nvml

_CONTAINED = tuple(f"namespace_{name}" for name in ("mnt", "pid", "net", "ipc", "uts", "cgroup"))
"""What a container is made of, and podman saves and makes anew."""

_STEADY = 0.1
"""Seconds between two looks at which the processes must be the same."""

_STUCK = 2.0
"""Seconds for which a process may wait for a device before it counts as one that does not stop."""

_ATTEMPTS = 2
"""How often the same processes are suspended in vain: each time leaves something behind in some of them."""

_FULL = ("No space left on device", "Disk quota exceeded")

_GHOSTS = 512 << 20
"""Bytes of a deleted file that is still open; CRIU's own limit of 1 MB is too small for what frameworks leave."""


@dataclass(frozen=True)
class _Seen:
    """A workload's service, its properties, its processes, and which of them use CUDA (with their restore threads)."""

    service: Service
    shown: Mapping[str, str]
    processes: Sequence[tree.Process]
    cuda: Mapping[int, int]


class Source(Common):
    """The end of a move at which the work is stopped, saved, and ended or let go on."""

    def _look(self, work: Work) -> _Seen:
        """The processes are those that were seen twice the same."""
        if not work.unit and (not work.container or work.engine != "podman"):
            seen = f"a container of {work.engine}" if work.container else "no unit and no container is named"
            expected = "a systemd service or a container of podman"
            raise self._failed(work, "unsupported_feature:kind", "membership", seen, expected, "see docs/checkpoint.md")
        unit = unit_of(work)
        try:
            service = self._service(unit)
            shown = service.show()
        except ServiceError as exc:
            expected = "an answer of what runs it"
            raise self._failed(
                work, "unsupported_backend", "membership", str(exc), expected, "systemctl status"
            ) from exc
        if shown.get("ActiveState") != "active" or not int(shown.get("MainPID") or 0):
            state = f"{unit} is {shown.get('ActiveState')}, main PID {shown.get('MainPID')}"
            raise self._failed(
                work, "lost_source", "membership", state, "a running service", service.status_command, SOURCE_GONE
            )
        cgroup = shown.get("ControlGroup", "")
        for dummy in range(3):
            before = suspend.pids_of(cgroup, self._sys)
            processes = []
            for pid in before:
                with contextlib.suppress(OSError):
                    processes.append(tree.look(pid, self._proc))
            self._sleep(_STEADY)
            if processes and [one.pid for one in processes] == suspend.pids_of(cgroup, self._sys):
                return _Seen(service, shown, processes, self._cuda(processes))
            self._sleep(0.5)
        raise self._failed(
            work,
            "unsupported_feature:unsteady",
            "membership",
            f"{unit} starts and ends processes all the time",
            "the same processes at two looks",
            service.members_command,
        )

    def check(self, work: Work) -> list[Reason]:
        try:
            return self._refusals(work, self._look(work))
        except CheckpointError as exc:
            return [exc.reason]

    def _refusals(self, work: Work, looked: _Seen) -> list[Reason]:
        found: list[Reason] = []
        service, shown, processes, cuda = looked.service, looked.shown, looked.processes, looked.cuda
        unit = service.unit
        root = int(shown["MainPID"])

        def refuse(feature: str, observed: str, expected: str, command: str, pid: int | None = None) -> None:
            found.append(self._failed(work, feature, "check", observed, expected, command, pid=pid).reason)

        for one in self._uninterruptible(processes):
            refuse(
                "unsupported_feature:uninterruptible",
                f"PID {one.pid} {one.comm} is in state D for {_STUCK:.0f} s, and cannot be stopped",
                "processes that can be stopped",
                f"cat /proc/{one.pid}/stack",
                one.pid,
            )
        for one in processes:
            for feature, seen in one.problems:
                if isinstance(service, Podman) and feature in _CONTAINED:
                    continue
                refuse(
                    f"unsupported_feature:{feature}",
                    f"PID {one.pid} {one.comm}: {seen}",
                    "none",
                    f"ls -l /proc/{one.pid}",
                    one.pid,
                )
            if one.devices and one.pid not in cuda:
                refuse(
                    "unsupported_feature:device_files",
                    f"PID {one.pid} {one.comm} has {one.devices[0]} open but no CUDA",
                    "only CUDA processes with device files",
                    f"ls -l /proc/{one.pid}/fd",
                    one.pid,
                )
            for name in one.shared:
                if not isinstance(service, Podman) and not carried.below(name, work.save.get("paths") or ()):
                    refuse(
                        "unsupported_feature:shared_memory",
                        f"PID {one.pid} {one.comm} maps {name}, which does not travel by itself",
                        "shared memory that is named in save.paths, or has no name",
                        "ls -l /dev/shm",
                        one.pid,
                    )
        for one in tree.outsiders(processes, root):
            refuse(
                "unsupported_feature:several_trees",
                f"PID {one.pid} {one.comm} does not descend from the main process {root}",
                "one tree",
                service.members_command,
                one.pid,
            )
        for key, bad in (("WatchdogUSec", ("", "0", "infinity")), ("RootDirectory", ("",)), ("RootImage", ("",))):
            if shown.get(key, "") not in bad:
                refuse(
                    f"unsupported_feature:{key.lower()}",
                    f"{unit} has {key}={shown[key]}",
                    "none",
                    f"systemctl cat {unit}",
                )
        if isinstance(service, Podman):
            for feature, seen, command in service.refusals():
                refuse(f"unsupported_feature:{feature}", seen, "none", command)
            connected = tree.established(processes, f"{self._proc}/{root}")
            if connected:
                seen = f"{len(connected)} established TCP connections, which podman does not close"
                refuse("unsupported_feature:tcp", seen, "none at that moment", f"ss -tnp | grep pid={root}")
        usage = self._usage()
        used = {gpu for one in processes if one.pid in usage for gpu in usage[one.pid].gpus}
        if any(one.nccl for one in processes) and (len(used) > 1 or len(cuda) > 1):
            refuse(
                "unsupported_feature:nccl",
                f"NCCL between {len(cuda)} processes on {len(used)} GPUs",
                "work that was started to be checkpointed, or its own save",
                f"grep -l nccl {' '.join(f'/proc/{pid}/maps' for pid in sorted(cuda))}",
            )
        loaded = gpus.read_loaded(f"{self._proc}/driver/nvidia")
        for one in processes:
            if one.cuda and loaded and one.cuda != loaded.version:
                refuse(
                    "key_mismatch:driver",
                    f"PID {one.pid} {one.comm} maps libcuda {one.cuda}, {loaded.version} is loaded",
                    "one version",
                    f"grep libcuda /proc/{one.pid}/maps",
                    one.pid,
                )
        engine = work.save.get("engine") or {}
        trouble = Engine(engine).trouble() if engine else ""
        if trouble:
            refuse("unsupported_feature:engine", trouble, "an engine that can be paused", f"curl {engine.get('url')}")
        seal = self._seal(work)
        trouble = seal.trouble() if seal else ""
        if seal and trouble:
            refuse("unsupported_feature:encryption", trouble, "a key to encrypt with", f"{seal.tool} --version")
        trouble = carried.trouble(work.save.get("paths") or ())
        if trouble:
            refuse("dump_failed", trouble, "paths that can be carried", "ls -ld PATH")
        if not found:
            found += self._room(work, processes, shown, usage)
        return found

    def _uninterruptible(self, processes: Sequence[tree.Process]) -> list[tree.Process]:
        """Those that CRIU would wait for in vain, while the others stand still. A disk may be waited for a moment."""
        stuck = [one for one in processes if tree.waits(one.pid, self._proc)]
        for dummy in range(int(_STUCK / _STEADY) if stuck else 0):
            self._sleep(_STEADY)
            stuck = [one for one in stuck if tree.waits(one.pid, self._proc)]
            if not stuck:
                break
        return stuck

    def _cuda(self, processes: Sequence[tree.Process]) -> dict[int, int]:
        """PIDs of the processes the driver knows as CUDA's, each with its restore thread."""
        mapped = [one.pid for one in processes if one.cuda]
        return {
            pid: int(said["tid"])
            for pid, said in self._driver("look", mapped, self._limits.look).items()
            if said.get("tid")
        }

    @staticmethod
    def _sizes(processes: Sequence[tree.Process], usage: Mapping[int, nvml.Usage]) -> tuple[int, dict[int, int]]:
        """Resident bytes of all, and GPU bytes by PID as NVML counts them."""
        used = {one.pid: usage[one.pid].memory or 0 for one in processes if one.pid in usage}
        return sum(one.rss for one in processes), used

    def _room(
        self,
        work: Work,
        processes: Sequence[tree.Process],
        shown: Mapping[str, str],
        usage: Mapping[int, nvml.Usage],
    ) -> list[Reason]:
        rss, used = self._sizes(processes, usage)
        on_gpu = int(sum(used.values()) * 1.1)
        found = []
        available = tree.memory_available(self._proc)
        headroom = tree.cgroup_headroom(shown.get("ControlGroup", ""), self._sys)
        for label, have in (("free on the host", available), (f"left to {work.unit} by its memory limit", headroom)):
            if have is not None and have < on_gpu:
                found.append(
                    self._failed(
                        work,
                        "insufficient_host_ram",
                        "check",
                        f"{have // MIB} MiB {label}",
                        f"{on_gpu // MIB} MiB, as GPU memory is kept in host memory meanwhile",
                        "free -m",
                    ).reason
                )
        wanted = int((rss + sum(used.values()) + carried.size(work.save.get("paths") or ())) * 1.2)
        seal = self._seal(work)
        for place in (self._store, *([seal.scratch] if seal else [])):
            free = artefact.free_bytes(place)
            if free < wanted:
                found.append(
                    self._failed(
                        work,
                        "insufficient_space",
                        "check",
                        f"{free // MIB} MiB free in {place}",
                        f"{wanted // MIB} MiB",
                        f"df -h {place}",
                    ).reason
                )
        return found

    def estimate(self, work: Work) -> Estimate:
        processes = self._look(work).processes
        rss, used = self._sizes(processes, self._usage())
        on_gpu = sum(used.values())
        size = rss + on_gpu + carried.size(work.save.get("paths") or ())
        # 5 GB/s from the GPU, 0.5 GB/s to unknown storage, 1.5 GB/s to hash; 5 s for everything that has no size
        return Estimate(size, on_gpu, 5 + on_gpu / 5e9 + size / 0.5e9 + size / 1.5e9)

    # -- capture

    def capture(self, work: Work) -> Captured:
        with self._held(work) as (path, record):
            begun = record.get("state") in (suspend.FROZEN, suspend.PUBLISHED, COMMITTING, COMMITTED)
            if begun and record["unit"] != unit_of(work):
                raise self._failed(
                    work,
                    "policy",
                    "record",
                    f"a save of this name is of {record['unit']}",
                    f"one of {unit_of(work)}",
                    f"cat {path}",
                )
            if record.get("state") == suspend.PUBLISHED and self._still_stands(record):
                service = self._service(record["unit"])
                self._arm(service, path, self._limits.freeze)
                return self._captured(work, record, changed=False)
            if record.get("state") == COMMITTING:  # by a run that was interrupted
                self._end_for_good(work, path, record)
            if record.get("state") == COMMITTED:
                return replace(self._captured(work, record, changed=False), source=SOURCE_GONE, target=record["target"])
            if record.get("state") in (suspend.FROZEN, suspend.PUBLISHED):
                self._say(f"{work.name}: an earlier capture was interrupted; it runs on before the next")
                if self._undo(path, record) == SOURCE_LOST and not self._began_anew(record):
                    raise self._failed(
                        work,
                        "lost_source",
                        "capture",
                        "its processes ended while they stood still, and it was not saved yet",
                        "processes that can go on",
                        self._service(record["unit"]).log_command,
                        SOURCE_LOST,
                    )
            if record.get("state") == suspend.THAWED:
                artefact.remove(self._store, record["artefact"])  # what was saved is out of date
            same = record.get("main") in suspend.same(record.get("members", []), self._proc)
            failed = int(record.get("failed", 0)) if same else 0
            if failed >= _ATTEMPTS:
                raise self._failed(
                    work,
                    "policy",
                    "check",
                    f"its processes were stopped {failed} times and could not be saved; they may not survive a third",
                    "processes that were not, as after a restart",
                    f"rm {shlex.quote(str(path))} (to have it tried again)",
                )
            looked = self._look(work)
            refused = self._refusals(work, looked)
            if refused:
                raise CheckpointError(refused[0])
            cgroup = looked.shown.get("ControlGroup", "")
            if [one.pid for one in looked.processes] != suspend.pids_of(cgroup, self._sys):
                looked = self._look(work)  # checking takes a while, if the work is encrypted for example
            return self._captured(work, self._capture(work, path, failed, looked))

    def _began_anew(self, record: Mapping[str, Any]) -> bool:
        """Whether the unit was started by somebody else since its processes were stopped: at boot, for example."""
        shown = self._service(record["unit"]).show()
        return shown.get("ActiveState") == "active" and int(shown.get("MainPID") or 0) != record["main"]

    def _still_stands(self, record: Mapping[str, Any]) -> bool:
        """Whether a save is as good as when it was taken: nothing of the work has run since; it may have died."""
        if not self._gone_or_still(record) or self._began_anew(record):
            return False
        try:
            artefact.read(self._store, record["artefact"], record.get("digest", ""))
        except artefact.ArtefactError:
            return False
        return True

    def _captured(self, work: Work, record: Mapping[str, Any], changed: bool = True) -> Captured:
        return Captured(
            workload=work.name,
            backend=self.name,
            artefact=record["artefact"],
            source=SOURCE_FROZEN,
            bytes=record.get("bytes", 0),
            seconds=record.get("seconds", 0.0),
            frozen_since=record.get("at"),
            changed=changed,
            digest=record.get("digest", ""),
            evidence={
                "timings": record.get("timings", {}),
                "pids": [one["pid"] for one in record["members"]],
                "progress": record.get("progress", []),
            },
        )

    def _arm(self, service: Service, path: Path, seconds: float) -> None:
        service.arm([sys.executable, str(self._script), "thaw", str(path)], seconds)

    def _capture(self, work: Work, path: Path, failed: int, looked: _Seen) -> dict[str, Any]:
        service, shown, processes, cuda = looked.service, looked.shown, looked.processes, looked.cuda
        report, usage = self._observe(), self._usage()
        rss, used = self._sizes(processes, usage)
        size = rss + sum(used.values())
        order = facts.gpu_order(report)
        computes_on = {pid: [str(order[gpu]["uuid"]) for gpu in one.gpus] for pid, one in usage.items()}
        began = self._now()
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(began))
        record: dict[str, Any] = {
            "state": suspend.FROZEN,
            "workload": work.name,
            "unit": service.unit,
            "main": int(shown["MainPID"]),
            "cgroup": shown.get("ControlGroup", ""),
            "artefact": artefact.new_id(work.name, stamp, os.urandom(3).hex()),
            "members": [
                {
                    **tree.as_member(one, one.pid in cuda, computes_on.get(one.pid, ()), used.get(one.pid, 0)),
                    "inner": tree.inner_pid(one.pid, self._proc),
                }
                for one in processes
            ],
            "drop_in": str(service.guard_path),
            "at": began,
            "failed": failed,
        }
        about = self._about(work, service, report)
        seal = self._seal(work)
        if seal:
            record["plain"] = str(seal.plain(record["artefact"]))
        number = self._number(work)
        record["progress"] = [] if number is None else [number]
        suspend.write_record(path, record)
        timings: dict[str, float] = {}
        ahead: artefact.Ahead | None = None
        try:
            service.guard()
            self._arm(service, path, 2 * self._limits.by_size(size) + self._limits.freeze)
            mark = time.monotonic()
            staged = artefact.stage(self._store, record["artefact"])
            plain = seal.fresh(record["artefact"]) if seal else staged
            known = ahead = artefact.Ahead(staged, "images/pages-*.img")
            for step, act in (
                ("quiesce", lambda: self._quiesce(work, path, record)),
                ("lock", lambda: self._lock(work, list(cuda))),
                ("checkpoint", lambda: self._checkpoint(work, list(cuda), size)),
                ("dump", lambda: self._dump(work, service, shown, processes, plain, size)),
                ("files", lambda: self._carry(work, plain)),
                ("seal", lambda: self._close(work, seal, plain, staged, size)),
                (
                    "publish",
                    lambda: self._publish(work, service, record, processes, staged, about, timings, known.end()),
                ),
            ):
                act()
                timings[step] = round(time.monotonic() - mark, 3)
                mark = time.monotonic()
            if suspend.read_record(path).get("state") != suspend.FROZEN:
                seen = "its timer let it go on while it was being saved"
                raise self._failed(work, "publish_failed", "publish", seen, "work that stands still", f"cat {path}")
            self._arm(service, path, self._limits.freeze)
            record.update(state=suspend.PUBLISHED, timings=timings, seconds=round(self._now() - began, 3))
            suspend.write_record(path, record)
        except BaseException as exc:
            if ahead:
                ahead.end()
            full = any(said in str(exc) for said in _FULL)
            record["failed"] += "lock" in timings
            source = self._undo(path, record)
            if isinstance(exc, CheckpointError):
                reason = "insufficient_space" if full else exc.reason.reason
                raise CheckpointError(replace(exc.reason, reason=reason, source=source)) from exc
            if isinstance(exc, Exception):
                told = isinstance(exc, (OSError, ServiceError, artefact.ArtefactError))
                reason = "publish_failed" if isinstance(exc, (OSError, artefact.ArtefactError)) else "checkpoint_failed"
                raise self._failed(
                    work,
                    "insufficient_space" if full else reason,
                    "capture",
                    str(exc) if told else f"{type(exc).__name__}: {exc}",
                    "success",
                    f"df -h {self._store}",
                    source,
                ) from exc
            raise
        return record

    def _about(self, work: Work, service: Service, report: nvml.Report) -> dict[str, Any]:
        """What a manifest tells of the node and the service. Asking NVML, systemd or podman takes a while, so that is
        done before anything stands still."""
        try:
            return {
                "key": facts.node_facts(report, self._run, self._criu, self._proc, self._sys),
                "gpus": facts.gpu_order(report),
                "fragment": service.fragment(),
                "image": service.image() if isinstance(service, Podman) else None,
            }
        except ServiceError as exc:
            expected = "an answer of what runs it"
            raise self._failed(
                work, "unsupported_backend", "membership", str(exc), expected, service.status_command
            ) from exc

    def _quiesce(self, work: Work, path: Path, record: dict[str, Any]) -> None:
        def remember(calls: list[dict[str, Any]]) -> None:
            record["wake"] = calls
            suspend.write_record(path, record)

        engine = work.save.get("engine") or {}
        try:
            if engine:
                Engine(engine, sleep=self._sleep).quiesce(remember)
        except EngineError as exc:
            reason = "lock_timeout" if exc.late else "checkpoint_failed"
            look = f"curl {engine.get('url')}"
            raise self._failed(work, reason, "quiesce", str(exc), "an engine without requests", look) from exc

    def _lock(self, work: Work, pids: Sequence[int]) -> None:
        self._phase(work, "lock", pids, suspend.LOCKED, self._limits.lock + self._limits.look)

    def _checkpoint(self, work: Work, pids: Sequence[int], size: int) -> None:
        self._phase(work, "checkpoint", pids, suspend.CHECKPOINTED, self._limits.by_size(size))
        for pid in pids:
            held = tree.look(pid, self._proc).devices
            if held:
                raise self._failed(
                    work,
                    "checkpoint_failed",
                    "checkpoint",
                    f"PID {pid} still has {held[0]} open",
                    "no device file open",
                    f"ls -l /proc/{pid}/fd",
                    pid=pid,
                )

    def _dump_container(
        self, work: Work, service: Podman, processes: Sequence[tree.Process], images: Path, size: int
    ) -> None:
        look = f"podman container checkpoint --export FILE --keep {service.container}"
        members = [{"pid": one.pid, "start": one.start} for one in processes]
        done = service.dump(members, images, self._limits.by_size(size))
        if not done.ok:
            raise self._failed(work, "dump_failed", "dump", why(done, service.criu_log(done)), "rc 0", look)
        wanted = {f"checkpoint/core-{tree.inner_pid(one.pid, self._proc)}.img" for one in processes}
        try:
            with tarfile.open(images.parent / ARCHIVE) as archive:
                missing = sorted(wanted - set(archive.getnames()))
        except (OSError, tarfile.TarError) as exc:
            raise self._failed(work, "dump_failed", "dump", f"{images.parent / ARCHIVE}: {exc}", "rc 0", look) from exc
        running = [one.pid for one in processes if not suspend.stands_still(one.pid, self._proc)]
        if missing or running:
            observed = f"{', '.join(missing) or 'nothing'} missing, PIDs {running} not stopped"
            raise self._failed(work, "dump_failed", "dump", observed, "every process saved and stopped", look)

    def _dump(
        self,
        work: Work,
        service: Service,
        shown: Mapping[str, str],
        processes: Sequence[tree.Process],
        staged: Path,
        size: int,
    ) -> None:
        images = staged / "images"
        images.mkdir(mode=0o700)
        if isinstance(service, Podman):
            self._dump_container(work, service, processes, images, size)
            return
        argv = [
            self._criu,
            "dump",
            "--tree",
            shown["MainPID"],
            "--images-dir",
            str(images),
            "--log-file",
            "dump.log",
            "--leave-stopped",
            "--ghost-limit",
            str(_GHOSTS),
            "--timeout",
            "60",
            *self._criu_options(),
        ]
        for inode in tree.journal_sockets(processes, self._proc):
            argv += ["--external", f"unix[{inode}]"]
        done = self._run(argv, timeout=self._limits.by_size(size))
        log = images / "dump.log"
        if not done.ok:
            raise self._failed(work, "dump_failed", "dump", why(done, log), "rc 0", f"{self._criu} check --all")
        try:
            cut = page_images.wrong(images)
        except page_images.ImageError as exc:
            cut = [str(exc)]
        if cut:
            whole = "all pages that its page maps tell of"
            raise self._failed(work, "dump_failed", "dump", "; ".join(cut[:3]), whole, f"df -h {self._store}")
        missing = [one.pid for one in processes if not (images / f"core-{one.pid}.img").exists()]
        running = [one.pid for one in processes if not suspend.stands_still(one.pid, self._proc)]
        if missing or running:
            raise self._failed(
                work,
                "dump_failed",
                "dump",
                f"no image of PIDs {missing}, PIDs {running} not stopped",
                "every process saved and stopped",
                f"ls {images}",
            )
        new = sorted(set(suspend.pids_of(shown.get("ControlGroup", ""), self._sys)) - {one.pid for one in processes})
        if new:
            raise self._failed(
                work,
                "dump_failed",
                "dump",
                f"PIDs {new} were started while it was saved",
                "the processes that were looked at",
                f"systemd-cgls -u {service.unit}",
            )

    def _carry(self, work: Work, staged: Path) -> None:
        """Files that the processes have open or need: their content belongs to the moment of the freeze."""
        try:
            carried.pack(work.save.get("paths") or (), staged)
        except carried.CarriedError as exc:
            raise self._failed(work, "dump_failed", "files", str(exc), "paths that exist", "ls -ld PATH") from exc

    def _close(self, work: Work, seal: Seal | None, plain: Path, staged: Path, size: int) -> None:
        if not seal:
            return
        try:
            seal.close(plain, staged, self._limits.by_size(size))
        except SealError as exc:
            raise self._failed(
                work, "publish_failed", "seal", str(exc), "every file encrypted", f"{seal.tool} --version"
            ) from exc
        finally:
            shutil.rmtree(plain, ignore_errors=True)

    def _publish(
        self,
        work: Work,
        service: Service,
        record: dict[str, Any],
        processes: Sequence[tree.Process],
        staged: Path,
        about: Mapping[str, Any],
        timings: Mapping[str, float],
        known: Mapping[str, Sequence[str]],
    ) -> None:
        paths = [str(path) for path in work.save.get("paths") or ()]
        declared = {
            "unit": work.unit,
            "container": work.container,
            "save": dict(work.save),
            "ready": list(work.ready),
            "ready_timeout": work.ready_timeout,
        }
        # what a container has open is its image's, or its mounts'
        outside = [] if isinstance(service, Podman) else processes
        files = {one.path: one for process in outside for one in process.files}
        libraries = {path: size for process in outside for path, size in process.libraries}
        manifest = artefact.publish(
            staged,
            record["artefact"],
            {
                "created": record["at"],
                "expires": record["at"] + float(work.save.get("keep", 7 * 86400)),
                "workload": {
                    "name": work.name,
                    "unit": service.unit,
                    "fragment": about["fragment"],
                    "declared": declared,
                    "image": about["image"],
                    "wake": record.get("wake", []),
                },
                "backend": {"name": self.name, "format": FORMAT, "options": self._criu_options()},
                "key": {**about["key"], "backend": FORMAT, **dict(work.save.get("key") or {})},
                "node": self._node,
                "members": record["members"],
                "gpus": about["gpus"],
                "journal_sockets": tree.journal_sockets(outside, self._proc),
                "connections_closed": tree.established(processes, self._proc),
                "paths": paths,
                "progress": record["progress"],
                "sealed": self._sealed_by(work),
                "open_files": [
                    {"path": one.path, "size": one.size, "log": one.log}
                    for one in files.values()
                    if not one.gone and not carried.below(one.path, paths)
                ],
                "libraries": [{"path": path, "size": size} for path, size in sorted(libraries.items())],
                "timings": dict(timings),
            },
            known=known,
        )
        record.update(bytes=manifest["total"], digest=artefact.digest(self._store, record["artefact"]))

    # -- back at the source

    def _undo(self, path: Path, record: dict[str, Any]) -> str:
        """Let the work go on at its source, and forget its artefact; how it is then."""
        service = self._service(record["unit"])
        size = sum(one["rss"] + one["gpu_bytes"] for one in record["members"])

        def ask(action: str, pids: list[int], pairs: dict[str, str]) -> list[dict[str, Any]]:
            return list(self._driver(action, pids, self._limits.by_size(size), pairs).values())

        states = suspend.run_again(record, ask, self._sys)
        asleep = suspend.wake(record)
        if asleep:
            self._say(f"{record['workload']}: its engine does not go on: {asleep}")
        self._drop_plain(record)
        with contextlib.suppress(ServiceError):
            service.unguard()
        if not asleep:  # or the timer asks once more
            service.disarm()
        with contextlib.suppress(artefact.ArtefactError):
            artefact.remove(self._store, record["artefact"])
        alive = suspend.same(record["members"], self._proc)
        needed = {record["main"], *(one["pid"] for one in record["members"] if one["cuda"])}  # a helper may just end
        whole = needed <= set(alive) and all(state == suspend.RUNNING for state in states.values())
        whole = whole and not asleep
        source = SOURCE_RUNNING if whole else SOURCE_LOST
        state = suspend.THAWED if asleep else ABORTED
        record.update(state=state, source=source, states={str(pid): one for pid, one in states.items()})
        with contextlib.suppress(
            OSError
        ):  # on a full disk the timer is gone and the work runs: nothing is left to record
            suspend.write_record(path, record)
        return source

    def abort(self, work: Work) -> str:
        with self._held(work) as (path, record):
            state = record.get("state")
            if state == COMMITTING and suspend.stands(record, self._proc):  # nothing of it was ended yet
                self._service(record["unit"]).moved.lift_one(record["unit"])
            elif state not in (suspend.FROZEN, suspend.PUBLISHED, suspend.THAWED):
                return self._source_now(work, "checkpoints")
            return self._undo(path, record)

    def commit(self, work: Work, target: str) -> str:
        with self._held(work) as (path, record):
            state = record.get("state")
            begun = state == COMMITTED or (state == COMMITTING and not suspend.stands(record, self._proc))
            if begun and record.get("target") != target:
                raise self._failed(
                    work,
                    "policy",
                    "commit",
                    f"it was given to {record.get('target')}",
                    f"not given to anybody but {target}",
                    f"cat {path}",
                    SOURCE_GONE,
                )
            if state == COMMITTED:
                return SOURCE_GONE
            if state == suspend.PUBLISHED and not self._gone_or_still(record):
                state = suspend.THAWED
            if state not in (suspend.PUBLISHED, COMMITTING):
                went_on = state == suspend.THAWED
                raise self._failed(
                    work,
                    "policy",
                    "commit",
                    "it was let go on meanwhile, so what was saved is out of date"
                    if went_on
                    else f"its record says {state}",
                    "work that stands still since it was saved",
                    f"cat {path}",
                )
            service = self._service(record["unit"])
            record.update(state=COMMITTING, target=target, lift=service.moved.lifting(record["unit"]))
            suspend.write_record(path, record)
            self._end_for_good(work, path, record)
            return SOURCE_GONE

    def _end_for_good(self, work: Work, path: Path, record: dict[str, Any]) -> None:
        """Carry out what the record has announced; may be repeated. While every process stands, it can be taken back:
        by the timer too, which is needed for as long."""
        service = self._service(record["unit"])
        try:
            service.moved.place([record["unit"]])
            service.guard()
            record.update(killing=True)
            suspend.write_record(path, record)
            service.disarm()
            service.end(lambda: suspend.same(record["members"], self._proc), self._limits.base)
            service.reset()
            service.unguard()
        except (ServiceError, OSError) as exc:
            raise self._failed(
                work,
                "lost_source",
                "commit",
                str(exc),
                "its processes gone",
                service.status_command,
                self._source_now(work, "checkpoints"),
            ) from exc
        record.update(state=COMMITTED, committed_at=self._now())
        with contextlib.suppress(OSError):  # what is announced, and whose processes are gone, is known to have ended
            suspend.write_record(path, record)

    def _gone_or_still(self, record: Mapping[str, Any]) -> bool:
        """Whether nothing of the work has run since it was published: what is left of it stands still."""
        return all(suspend.stands_still(pid, self._proc) for pid in suspend.same(record["members"], self._proc))

    def reassign(self, work: Work, target: str) -> None:
        """Give a committed save to another target; for whoever has proven that it does not run at the first."""
        with self._held(work) as (path, record):
            if record.get("state") == COMMITTING:
                self._end_for_good(work, path, record)
            if record.get("state") != COMMITTED:
                raise self._failed(
                    work,
                    "policy",
                    "commit",
                    f"its record says {record.get('state')}",
                    "work that was ended here",
                    f"cat {path}",
                )
            record.update(target=target)
            suspend.write_record(path, record)
