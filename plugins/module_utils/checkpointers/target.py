# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where work comes back.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import (
    artefact,
    carried,
    facts,
    suspend,
    tree,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.base import (
    SOURCE_FROZEN,
    SOURCE_GONE,
    SOURCE_UNKNOWN,
    CheckpointError,
    Work,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.common import (
    ENDING,
    FAILED,
    FORMAT,
    MIB,
    PREPARED,
    RUNNING,
    STARTING,
    UNLOCKING,
    UNPACKING,
    Common,
    why,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.container import Podman
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.service import Service, ServiceError
from ansible_collections.gpufleet.driver.plugins.module_utils.host import health, nvml
from ansible_collections.gpufleet.driver.plugins.module_utils.host.lock import Clock


class Target(Common):
    """The end of a move at which the work comes back to life and is proven to go on."""

    def prepare(self, work: Work, artefact_id: str, digest: str = "") -> dict[str, Any]:
        """See that a save is whole and can be restored here, and keep the place; nothing is started. ``digest`` is that
        of its manifest, if whoever saved it has told.

        :raises CheckpointError: with the first thing that speaks against it.
        """
        with self._held(work, "restores") as (path, record):
            if record.get("artefact") == artefact_id and record.get("state") in (STARTING, UNLOCKING, RUNNING):
                return record
            if record.get("state") == ENDING:
                self._end(work, path, record)
            self._put_back(work, path, record)
            manifest = self._whole(work, artefact_id, digest)
            own = suspend.read_record(self.record_path(work.name)).get("artefact") == artefact_id
            report = self._observe()
            self._fits(work, manifest, own, report)
            with suspend.held(path.parent / "places", 60.0):  # two that come at once must not be promised one GPU
                record = {
                    "state": PREPARED,
                    "workload": work.name,
                    "unit": manifest["workload"]["unit"],
                    "artefact": artefact_id,
                    "digest": digest or artefact.digest(self._store, artefact_id),
                    "members": manifest["members"],
                    "home": manifest["node"],
                    "own": own,
                    "declared": manifest["workload"]["declared"],
                    "wake": manifest["workload"].get("wake", []),
                    "progress": manifest.get("progress", []),
                    "map": self._map(work, manifest, path, report),
                    "at": self._now(),
                    "clock": asdict(Clock.read(self._proc)),
                    "checked": self._stamp(artefact_id, manifest),
                }
                suspend.write_record(path, record)
            return record

    def compare(self, work: Work, artefact_id: str, digest: str = "") -> None:
        """:meth:`prepare`, but nothing is kept."""
        manifest = self._whole(work, artefact_id, digest)
        report = self._observe()
        self._fits(work, manifest, False, report)
        self._map(work, manifest, self.record_path(work.name, "restores"), report)

    def _whole(self, work: Work, artefact_id: str, digest: str) -> dict[str, Any]:
        try:
            manifest = artefact.read(self._store, artefact_id, digest)
            wrong = artefact.verify(self._store, artefact_id)
        except (artefact.ArtefactError, OSError) as exc:
            raise self._failed(
                work, "hash_mismatch", "fetch", str(exc), "a whole artefact", f"ls -l {self._store}", SOURCE_FROZEN
            ) from exc
        if wrong:
            raise self._failed(
                work,
                "hash_mismatch",
                "fetch",
                "; ".join(wrong[:3]),
                "what was published",
                f"ls -l {self._store}/{artefact_id}",
                SOURCE_FROZEN,
            )
        return manifest

    def _stamp(self, artefact_id: str, manifest: Mapping[str, Any]) -> list[list[Any]]:
        """Size and time of every file, by which a change after the check is seen."""
        root = artefact.place(self._store, artefact_id)
        found = []
        for file in manifest["files"]:
            with contextlib.suppress(FileNotFoundError):
                about = (root / file["path"]).stat()
                found.append([file["path"], about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino])
        return found

    def _fits(self, work: Work, manifest: Mapping[str, Any], own: bool, report: nvml.Report) -> None:
        """Everything that must agree between the save and this node (``own``: the one where it was made); what cannot
        be compared does not agree."""

        def refuse(reason: str, observed: str, expected: str, command: str, pid: int | None = None) -> None:
            raise self._failed(work, reason, "place", observed, expected, command, SOURCE_FROZEN, pid)

        if manifest["backend"].get("format") != FORMAT:
            refuse(
                "key_mismatch:backend", str(manifest["backend"].get("format")), FORMAT, "use the release that saved it"
            )
        for lack in self.probe():
            refuse(lack.reason, lack.observed, lack.expected, lack.next)
        for name, wanted in (work.save.get("key") or {}).items():
            saved = manifest["key"].get(name)
            if saved != wanted:
                refuse(f"key_mismatch:{name}", f"saved with {saved!r}", f"{wanted!r} as declared", "see save.key")
        offered = facts.node_facts(report, self._run, self._criu, self._proc, self._sys)
        for one in self._differences(manifest["key"], offered) if self._differences else ():
            refuse(f"key_mismatch:{one.field}", str(one), "the same on both nodes", "gpufleet.driver.checkpoint_info")
        service = self._service(manifest["workload"]["unit"])
        shown = service.show()
        box = service if isinstance(service, Podman) else None
        if box and shown.get("LoadState") != "not-found":
            name = box.container
            refuse("policy", f"there is a container {name} here", "no container of that name", f"podman rm {name}")
        if box and own:
            observed = f"{box.moved.aside} is here, the container it was made of"
            refuse(
                "policy",
                observed,
                "another node, as podman makes it anew",
                f"podman container inspect {box.moved.aside}",
            )
        trouble = box.lacks(manifest["workload"]["image"], manifest["paths"]) if box else ""
        if trouble:
            refuse(
                "key_mismatch:image",
                trouble,
                "image, mounts and runtime as where it was saved",
                "podman images --digests",
            )
        if shown.get("ActiveState") not in ("inactive", "failed", None):
            refuse(
                "policy",
                f"{service.unit} is {shown.get('ActiveState')} here",
                "a unit that does not run here",
                service.status_command,
            )
        ids = [] if box else [one for member in manifest["members"] for one in member["ids"] if one]
        taken = tree.taken(ids, self._proc)
        if taken:
            pid, name = next(iter(taken.items()))
            refuse("key_mismatch:pids", f"PID {pid} is {name} here", "every PID of the work free", f"ps -fp {pid}", pid)
        for kind, exact in (("open_files", False), ("libraries", True)):
            for one in manifest[kind]:
                try:
                    size = Path(one["path"]).stat().st_size
                except OSError:
                    size = -1
                if size != one["size"] and not (size >= 0 and not exact and one.get("log")):
                    found = "is not here" if size < 0 else f"has {size} bytes"
                    refuse(
                        f"key_mismatch:{kind}", f"{one['path']} {found}", f"{one['size']} bytes", f"ls -l {one['path']}"
                    )
        trouble = carried.no_place(self._carried_bytes(manifest), manifest["paths"])
        if trouble:
            refuse("insufficient_space", trouble, "a place for the declared paths", "findmnt; df -h")
        trouble = self._unreadable(work, manifest)
        if trouble:
            refuse("key_mismatch:encryption", trouble, "the key of whom it was encrypted for", "docs/checkpoint.md")
        needed = sum(member["rss"] + member["gpu_bytes"] for member in manifest["members"])
        available = tree.memory_available(self._proc)
        if available < needed:
            refuse("insufficient_host_ram", f"{available // MIB} MiB free", f"{needed // MIB} MiB", "free -m")
        limit, unit = shown.get("MemoryMax", ""), service.unit
        staged = sum(member["gpu_bytes"] for member in manifest["members"])
        if limit.isdecimal() and int(limit) < staged:
            seen = f"{unit} may use {int(limit) // MIB} MiB here"
            refuse("insufficient_host_ram", seen, f"{staged // MIB} MiB for GPU memory", f"systemctl cat {unit}")

    @staticmethod
    def _carried_bytes(manifest: Mapping[str, Any]) -> int:
        return sum(file["size"] for file in manifest["files"] if file["path"].startswith(carried.PACK))

    def _map(self, work: Work, manifest: Mapping[str, Any], path: Path, report: nvml.Report) -> dict[str, str]:
        """Which GPU here takes the part of each GPU there: all that the kernel showed, as the driver wants it.

        Those the work uses come first, each to the same GPU if it is here, else to a free one; the rest by position.
        """

        def refuse(reason: str, observed: str, expected: str) -> None:
            raise self._failed(work, reason, "place", observed, expected, "nvidia-smi", SOURCE_FROZEN)

        before = manifest["gpus"]
        here = facts.gpu_order(report)
        if len(here) != len(before):
            refuse("key_mismatch:topology", f"{len(here)} GPUs here", f"{len(before)} GPUs as where it was saved")
        used = {uuid for member in manifest["members"] for uuid in member["gpus"]}
        busy = {here[gpu]["uuid"] for one in self._usage().values() for gpu in one.gpus} | self._claimed(path)
        free = [gpu for gpu in here if gpu["uuid"] not in busy]
        chosen: dict[str, str] = {}
        for gpu in sorted(before, key=lambda one: one["uuid"] not in used):
            wanted = gpu["uuid"]
            need = sum(member["gpu_bytes"] for member in manifest["members"] if wanted in member["gpus"])
            open_here = [one for one in (free if wanted in used else here) if one["uuid"] not in chosen.values()]
            same = [one for one in open_here if one["uuid"] == wanted]
            fitting = [one for one in same or open_here if one["total"] - one["used"] >= need]
            if not fitting:
                refuse(
                    "insufficient_gpu_memory",
                    f"no free GPU takes {wanted}",
                    f"a GPU with {need // MIB} MiB free and no work on it",
                )
            chosen[wanted] = fitting[0]["uuid"]
        if all(old == new for old, new in chosen.items()):
            return {}
        driver = str(manifest["key"].get("driver") or "0")
        if not facts.maps_gpus(driver):
            moved = next(f"{old} to {new}" for old, new in chosen.items() if old != new)
            refuse(
                "key_mismatch:gpu_uuid",
                f"it would move from {moved} under driver {driver}",
                f"the same UUIDs, or driver {facts.MAP_SINCE} or later",
            )
        return chosen

    def _claimed(self, own: Path) -> set[str]:
        """GPUs that other restores on this node have been promised and do not hold yet."""
        claimed: set[str] = set()
        clock = Clock.read(self._proc)
        for path in own.parent.glob("*.json"):
            if path == own:
                continue
            with contextlib.suppress(ValueError, OSError):
                record = suspend.read_record(path)
                since = record.get("clock", {})  # nobody sets that one, and no place is kept through a reboot
                waits = since.get("boot_id") == clock.boot_id and clock.uptime - since["uptime"] < self._limits.freeze
                if record.get("state") in (PREPARED, STARTING, UNLOCKING) and waits:
                    had = {uuid for member in record["members"] for uuid in member["gpus"]}
                    claimed.update(record["map"].get(uuid, uuid) for uuid in had)
        return claimed

    def restore(self, work: Work, artefact_id: str) -> dict[str, Any]:
        with self._held(work, "restores") as (path, record):
            if record.get("artefact") != artefact_id or record.get("state") in (None, FAILED, ENDING):
                raise self._failed(
                    work,
                    "policy",
                    "restore",
                    f"{path} says {record.get('state', 'nothing')} of {record.get('artefact')}",
                    f"{artefact_id} prepared here",
                    f"cat {path}",
                    SOURCE_GONE,
                )
            if record["state"] == RUNNING:
                return {**self._verify(work, record, settle=0.0), "changed": False}
            service = self._service(record["unit"])
            mark = time.monotonic()
            timings: dict[str, float] = {}
            try:
                manifest = artefact.read(self._store, artefact_id, record["digest"])
                if self._stamp(artefact_id, manifest) != record["checked"]:
                    manifest = self._whole(work, artefact_id, record["digest"])
                alive = self._there(record, service) if record.get("restored") else []
                if record["state"] == UNLOCKING and not alive:
                    raise self._failed(
                        work,
                        "restore_failed",
                        "restore",
                        "it was restored and let go on, and is gone",
                        "a running service",
                        service.log_command,
                        SOURCE_GONE,
                    )
                if len(alive) != len(record["members"]):
                    self._restart(work, service, path, record, manifest)
                timings["restore"] = round(time.monotonic() - mark, 3)
                self._wake(work, path, record)
                awake = time.monotonic()
                timings["cuda"] = round(awake - mark - timings["restore"], 3)
                service.settle()
                evidence = self._verify(work, record, self._limits.settle)
            except Exception as exc:
                left = ""
                try:
                    self._give_up(path, record, service)
                except (ServiceError, OSError) as worse:
                    left = f"; it is not proven to have ended: {worse}"
                if isinstance(exc, CheckpointError):
                    reason = replace(exc.reason, source=SOURCE_GONE, observed=exc.reason.observed + left)
                    raise CheckpointError(reason) from exc
                known = isinstance(exc, (ServiceError, OSError, artefact.ArtefactError))
                raise self._failed(
                    work,
                    "restore_failed",
                    "restore",
                    (str(exc) if known else f"{type(exc).__name__}: {exc}") + left,
                    "success",
                    service.status_command,
                    SOURCE_GONE,
                ) from exc
            self._drop_plain(record)
            record.update(state=RUNNING, timings=timings, since=self._now())
            suspend.write_record(path, record)
            return {**evidence, "timings": timings, "awake": round(time.monotonic() - awake, 3), "changed": True}

    def _restart(
        self, work: Work, service: Service, path: Path, record: dict[str, Any], manifest: Mapping[str, Any]
    ) -> None:
        """Images to processes, as the unit's own; what an interrupted attempt left is ended first."""
        if record["state"] == STARTING:
            self._stop(record, service)
            service.forget()
        record.update(state=STARTING, restored=False, began=self._now())
        suspend.write_record(path, record)
        root = self._open(work, path, record, manifest)
        self._unpack(work, root, path, record, manifest)
        if record["own"]:
            service.moved.lift_one(service.unit)
        if service.show().get("LoadState") == "not-found":
            service.adopt(manifest["workload"]["fragment"])
        size = sum(member["rss"] + member["gpu_bytes"] for member in manifest["members"])
        seconds = 3 * self._limits.by_size(size) + self._limits.base
        place = Path("/run/gpufleet") / record["artefact"]
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        pid_file = place / "main.pid"
        pid_file.unlink(missing_ok=True)
        images = root / "images"
        argv = [
            self._full_path(),
            "restore",
            "--images-dir",
            str(images),
            "--work-dir",
            str(place),
            "--log-file",
            "restore.log",
            "--restore-detached",
            "--pidfile",
            str(pid_file),
            *self._criu_options(),
        ]
        for inode in manifest["journal_sockets"]:
            argv += ["--inherit-fd", f"fd[1]:socket:[{inode}]"]
        if isinstance(service, Podman):
            done = service.restore(images, seconds)
            log = service.criu_log(done)
        else:
            done = service.start_from(argv, pid_file, record["members"][0]["comm"], seconds)
            log = place / "restore.log"
        if not done.ok:
            timed_out = done.timed_out or service.show().get("Result") == "timeout"
            raise self._failed(
                work,
                "restore_timeout" if timed_out else "restore_failed",
                "restore",
                why(done, log),
                f"its processes back within {seconds:.0f} s",
                service.log_command,
                SOURCE_GONE,
            )
        pids = self._pids(record, service)
        members = []
        for member in record["members"]:
            member = {**member, "pid": pids.get(member["pid"], member["pid"])}
            start = suspend.start_of(member["pid"], self._proc)
            if start is None:
                raise self._failed(
                    work,
                    "restore_failed",
                    "restore",
                    f"PID {member['pid']} {member['comm']} is not there",
                    "every process back",
                    f"cat {log}" if log else service.log_command,
                    SOURCE_GONE,
                    member["pid"],
                )
            members.append({**member, "start": start})
        record.update(members=members, restored=True)
        suspend.write_record(path, record)
        if isinstance(service, Podman):
            for member in members:  # podman brings back what stood still, standing still
                os.kill(member["pid"], signal.SIGCONT)

    def _pids(self, record: Mapping[str, Any], service: Service) -> dict[int, int]:
        """PIDs that a container's processes had where they were saved → the ones they have here."""
        if not isinstance(service, Podman):
            return {}
        here = {
            tree.inner_pid(pid, self._proc): pid
            for pid in suspend.pids_of(service.show().get("ControlGroup", ""), self._sys)
        }
        return {one["pid"]: here.get(one["inner"], 0) for one in record["members"]}

    def _full_path(self) -> str:
        return shutil.which(self._criu) or self._criu

    def _unpack(self, work: Work, root: Path, path: Path, record: dict[str, Any], manifest: Mapping[str, Any]) -> None:
        try:
            carried.unpack(
                root,
                manifest["paths"],
                record.setdefault("aside", []),
                f"before-{record['artefact']}",
                lambda: suspend.write_record(path, record),
            )
        except carried.CarriedError as exc:
            raise self._failed(
                work, "hash_mismatch", "files", str(exc), "only the declared paths", f"ls -l {self._store}", SOURCE_GONE
            ) from exc

    def _wake(self, work: Work, path: Path, record: dict[str, Any]) -> None:
        """Bring every CUDA process to running from wherever it is, all restored before any is unlocked."""
        cuda = [member["pid"] for member in record["members"] if member["cuda"]]
        size = sum(member["rss"] + member["gpu_bytes"] for member in record["members"])
        states = self._states(cuda)
        asleep = [pid for pid in cuda if states[pid] == suspend.CHECKPOINTED]
        self._phase(work, "restore", asleep, suspend.LOCKED, self._limits.by_size(size), record["map"])
        self._memory_back(work, record, asleep)
        record.update(state=UNLOCKING)
        suspend.write_record(path, record)
        locked = [pid for pid in cuda if states[pid] in (suspend.CHECKPOINTED, suspend.LOCKED)]
        self._phase(work, "unlock", locked, suspend.RUNNING, self._limits.look)
        paused = record.get("wake")
        trouble = suspend.wake(record)
        if trouble:
            raise self._failed(
                work,
                "verify_failed",
                "wake",
                trouble,
                "an engine that goes on",
                self._service(record["unit"]).log_command,
            )
        if paused:  # an engine may take a second call amiss
            suspend.write_record(path, record)

    def _memory_back(self, work: Work, record: Mapping[str, Any], locked: Sequence[int]) -> None:
        """Each process has as much GPU memory as when it was saved, to a tenth, while it can take no more."""
        usage = self._usage()
        for member in record["members"]:
            pid, had = member["pid"], member["gpu_bytes"]
            has = usage[pid].memory if pid in usage else None
            if pid in locked and has is not None and abs(has - had) > had / 10:
                raise self._failed(
                    work,
                    "cuda_restore_failed",
                    "restore",
                    f"PID {pid} {member['comm']} has {has // MIB} MiB of GPU memory",
                    f"{had // MIB} MiB as when it was saved",
                    "nvidia-smi --query-compute-apps=pid,used_memory --format=csv",
                    SOURCE_GONE,
                    pid,
                )

    def _xids(self, record: Mapping[str, Any]) -> list[str]:
        """What the kernel has said of the GPUs of a work, or of its processes, since it began to come back."""
        since = record.get("began")
        if since is None:
            return []
        words = ["journalctl", "-k", "-b", "-q", "--no-pager", "-o", "short-unix", f"--since=@{int(since)}"]
        done = self._run(words, timeout=30)
        found = [one for one in health.parse(done.stdout, since=since) if one.kind == "xid"] if done.ok else []
        if not found:
            return []
        before = {uuid for member in record["members"] for uuid in member["gpus"]}
        uuids = {record["map"].get(uuid, uuid) for uuid in before}
        addresses = {one.get("pci") for one in self._observe().gpus if one.get("uuid") in uuids}
        pids = {member["pid"] for member in record["members"]}
        return [one.text for one in found if one.pci in addresses or one.detail["pid"] in pids]

    def _stop(self, record: Mapping[str, Any], service: Service) -> None:
        """End what there is of a restored work; :raises ServiceError: if that is not proven."""
        service.end(lambda: self._alive(record, service), 60.0)
        service.reset()

    def _alive(self, record: Mapping[str, Any], service: Service) -> list[int]:
        """PIDs of a restored work, and of what else is in its unit; :raises ServiceError: if that cannot be seen."""
        known = suspend.same(record["members"], self._proc) if record.get("restored") else []
        return sorted({*known, *suspend.pids_of(service.show().get("ControlGroup", ""), self._sys)})

    def _there(self, record: Mapping[str, Any], service: Service) -> list[int]:
        """PIDs of a restored work; before its start times are known, whatever is in its unit."""
        if record.get("restored"):
            return suspend.same(record["members"], self._proc)
        return suspend.pids_of(service.show().get("ControlGroup", ""), self._sys)

    def _give_up(self, path: Path, record: dict[str, Any], service: Service) -> None:
        """A half restored work is worse than none: end it, and put back the files it displaced.

        :raises ServiceError: if it is not proven to have ended; its files stay as they are, and the record says so.
        """
        was = record["was"] if record["state"] == ENDING else record["state"]
        record.update(state=ENDING, was=was)
        with contextlib.suppress(OSError):
            suspend.write_record(path, record)
        if was != PREPARED:
            service.guard()
            self._stop(record, service)
        left = self._alive(record, service)
        if left:
            raise ServiceError(f"{service.unit} still has PIDs {', '.join(map(str, left))}")
        if was == UNPACKING or record.get("own"):
            service.moved.place([service.unit])  # it goes on where it was, or nowhere yet
        with contextlib.suppress(ServiceError):
            service.settle()
            if was != PREPARED:
                service.unguard()
                if was != UNPACKING:
                    service.forget()
        aside = carried.undo(record.get("aside", ()))
        self._drop_plain(record)
        record.update(state=FAILED, ran=was in (UNLOCKING, RUNNING), aside=aside)
        with contextlib.suppress(OSError):
            suspend.write_record(path, record)

    def _end(self, work: Work, path: Path, record: dict[str, Any]) -> None:
        service = self._service(record["unit"])
        try:
            self._give_up(path, record, service)
        except (ServiceError, OSError) as exc:
            expected, look = "proof that it does not run here", service.status_command
            raise self._failed(work, "restore_failed", "absent", str(exc), expected, look, SOURCE_UNKNOWN) from exc

    def absent(self, work: Work, also_running: bool = False) -> dict[str, Any]:
        """See that a work that was to be restored here does not run here, ending what there is of it.

        One that was restored and proven is only ended with ``also_running``. ``ran`` says whether it had been let go
        on, so that a restore elsewhere would repeat what it did.

        :raises CheckpointError: if that cannot be seen, or it cannot be ended.
        """
        with self._held(work, "restores") as (path, record):
            state = record.get("state")
            begun = state in (PREPARED, STARTING, UNLOCKING, UNPACKING, ENDING)
            if begun or (state == RUNNING and also_running):
                self._end(work, path, record)
                return {"changed": True, "runs": False, "ran": bool(record["ran"])}
            runs = bool(record) and bool(self._alive(record, self._service(record["unit"])))
            return {"changed": False, "runs": runs, "ran": bool(record.get("ran")) or state == RUNNING}

    # -- proof

    def verify(self, work: Work) -> dict[str, Any]:
        with self._held(work, "restores") as (dummy, record):
            return self._verify(work, record, self._limits.settle)

    def _verify(self, work: Work, record: Mapping[str, Any], settle: float) -> dict[str, Any]:
        """Alive, computing as the driver and NVML see it, doing what it is for, and still so a while later."""

        def wrong(observed: str, expected: str, command: str, pid: int | None = None) -> CheckpointError:
            return self._failed(work, "verify_failed", "verify", observed, expected, command, SOURCE_GONE, pid)

        cuda = [member["pid"] for member in record["members"] if member["cuda"]]
        steps: list[float] = []
        listed: set[int] = set()
        for pause in (settle, 0.0) if settle else (0.0,):
            for member in record["members"]:
                pid = member["pid"]
                if suspend.start_of(pid, self._proc) != member["start"]:
                    raise wrong(
                        f"PID {pid} {member['comm']} is gone",
                        "every process alive",
                        self._service(record["unit"]).log_command,
                        pid,
                    )
                if suspend.stands_still(pid, self._proc):
                    raise wrong(f"PID {pid} is stopped", "every process running", f"ps -o pid,stat -p {pid}", pid)
            for pid, state in self._states(cuda).items():
                if state != suspend.RUNNING:
                    raise wrong(
                        f"CUDA says PID {pid} is {state}", "running", f"cuda-checkpoint --get-state --pid {pid}", pid
                    )
            listed = set(self._usage())
            absent = [member["pid"] for member in record["members"] if member["gpus"] and member["pid"] not in listed]
            if absent:
                raise wrong(f"NVML does not list PID {absent[0]}", "the process on its GPU", "nvidia-smi", absent[0])
            said = self._xids(record)
            if said:
                raise wrong(said[0], "no Xid since it came back", "journalctl -k -b | grep Xid")
            steps += self._progress(work)
            if pause:
                self._sleep(pause)
        had = record.get("progress")
        if had and steps and steps[0] < had[-1]:
            raise wrong(
                f"progress is {steps[0]:g}, it was {had[-1]:g} before the move",
                "a number that never falls; are all files of the work in save.paths?",
                " ".join(work.save["progress"]),
            )
        if len(steps) > 1 and steps[-1] <= steps[0]:
            raise wrong(
                f"progress stayed at {steps[0]:g} for {settle:.0f} s",
                "a number that grows",
                " ".join(work.save["progress"]),
            )
        return {"pids": [member["pid"] for member in record["members"]], "progress": steps, "nvml": sorted(listed)}
