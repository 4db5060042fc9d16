# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The way home: work that moved ends as its owner wants it to end, and starts again where it came from, with its files.

A process image does not survive another driver, so when the machine that took the work in is upgraded itself, what the
work saves when it is told to stop is what it goes on from.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import artefact, carried, suspend
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.base import (
    SOURCE_GONE,
    SOURCE_LOST,
    SOURCE_RUNNING,
    Captured,
    Work,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.common import (
    COMMITTED,
    COMMITTING,
    RUNNING,
    UNPACKING,
    Common,
    short,
    unit_of,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.sealed import SealError
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.service import Service, ServiceError

FORMAT = "files/1"
LEAVING, LEFT, HOME = "leaving", "left", "home"
_STOP = 300.0


class Home(Common):
    """Work that moved, on its way back."""

    def leave(self, work: Work) -> Captured:
        """On the machine that took it in: stop the work, and save its files for the machine it came from.

        :raises CheckpointError: if it does not stop or cannot be packed; it then runs here, if that can be had.
        """
        with self._held(work, "restores") as (path, record):
            service = self._service(unit_of(work))
            paths = [str(one) for one in work.save.get("paths") or ()]
            if record.get("state") == LEFT:
                return self._left(work, record, changed=False)
            if record.get("state") not in (RUNNING, LEAVING):
                observed = f"{path} says {record.get('state', 'nothing')}"
                raise self._failed(work, "policy", "leave", observed, "work that was taken in here", f"cat {path}")
            stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self._now()))
            record.update(state=LEAVING, artefact=artefact.new_id(f"{work.name}-home", stamp, os.urandom(3).hex()))
            suspend.write_record(path, record)
            began = self._now()
            done = service.stop(_STOP)
            try:
                if service.show().get("ActiveState") not in ("inactive", "failed"):
                    raise ServiceError(f"{service.unit} did not stop ({short(done)})")
                staged = artefact.stage(self._store, record["artefact"])
                seal = self._seal(work)
                plain = seal.fresh(record["artefact"]) if seal else staged
                carried.pack(paths, plain)
                if seal:
                    seal.close(plain, staged, self._limits.by_size(carried.size(paths)))
                    shutil.rmtree(plain, ignore_errors=True)
                manifest = artefact.publish(
                    staged,
                    record["artefact"],
                    {
                        "created": began,
                        "expires": began + float(work.save.get("keep") or 7 * 86400),
                        "workload": {"name": work.name, "unit": service.unit},
                        "backend": {"name": self.name, "format": FORMAT},
                        "node": self._node,
                        "paths": paths,
                        "sealed": self._sealed_by(work),
                    },
                )
                digest = artefact.digest(self._store, record["artefact"])
                record.update(state=LEFT, bytes=manifest["total"], digest=digest, seconds=round(self._now() - began, 3))
                suspend.write_record(path, record)
            except (ServiceError, OSError, artefact.ArtefactError, carried.CarriedError, SealError) as exc:
                source = self._start_again(service)
                with contextlib.suppress(artefact.ArtefactError):
                    artefact.remove(self._store, record["artefact"])
                record.update(state=RUNNING)
                with contextlib.suppress(OSError):  # it says then that it is leaving, and may be told to again
                    suspend.write_record(path, record)
                raise self._failed(
                    work,
                    "publish_failed",
                    "leave",
                    str(exc),
                    "its files saved",
                    service.status_command,
                    source,
                ) from exc
            return self._left(work, record)

    def _left(self, work: Work, record: dict[str, Any], changed: bool = True) -> Captured:
        return Captured(
            work.name,
            self.name,
            record["artefact"],
            SOURCE_GONE,
            record["bytes"],
            record["seconds"],
            changed=changed,
            digest=record.get("digest", ""),
        )

    def _start_again(self, service: Service) -> str:
        return SOURCE_RUNNING if service.start(_STOP) else SOURCE_LOST

    def come_home(self, work: Work, artefact_id: str, digest: str = "") -> dict[str, Any]:
        """On the machine it came from: its files back in place, its unit started, and proven to go on. ``digest`` is
        that of the manifest of what was saved when it left, if it is known."""
        with self._held(work, "restores") as (path, record):
            unit = unit_of(work)
            if record.get("state") != HOME or record.get("artefact") != artefact_id:
                try:
                    manifest = artefact.read(self._store, artefact_id, digest)
                    wrong = artefact.verify(self._store, artefact_id)
                    others = sorted(set(manifest.get("paths", ())) - set(work.save.get("paths") or ()))
                    if others:
                        raise artefact.ArtefactError(f"{artefact_id} holds {others[0]}, which save.paths does not name")
                    if wrong or manifest["backend"].get("format") != FORMAT:
                        raise artefact.ArtefactError(
                            "; ".join(wrong[:3]) or f"{artefact_id} holds no files to bring home"
                        )
                    if record.get("artefact") != artefact_id:
                        record = {
                            "workload": work.name,
                            "unit": unit,
                            "artefact": artefact_id,
                            "aside": [],
                            "members": [],
                        }
                    record.update(state=UNPACKING, at=self._now())
                    suspend.write_record(path, record)
                    carried.unpack(
                        self._open(work, path, record, manifest),
                        manifest["paths"],
                        record["aside"],
                        f"before-{artefact_id}",
                        lambda: suspend.write_record(path, record),
                    )
                    self._drop_plain(record)
                except (artefact.ArtefactError, carried.CarriedError, OSError) as exc:
                    raise self._failed(
                        work,
                        "hash_mismatch",
                        "home",
                        str(exc),
                        "its files as they left",
                        f"ls -l {self._store}",
                        SOURCE_GONE,
                    ) from exc
            return self._start_proven(work, path, record, unit)

    def _start_proven(self, work: Work, path: Path, record: dict[str, Any], unit: str) -> dict[str, Any]:
        service = self._service(unit)
        changed = record["state"] != HOME
        if service.moved.lift_one(unit):
            service.reload()
            changed = True
        if self._start_again(service) != SOURCE_RUNNING:
            said = service.last_words()
            raise self._failed(
                work,
                "verify_failed",
                "home",
                f'{unit} does not start, last said "{said}"',
                "a running service",
                service.status_command,
                SOURCE_GONE,
            )
        steps = self._progress(work)
        self._sleep(self._limits.settle if changed else 0.0)
        steps += self._progress(work)
        if len(steps) > 1 and changed and steps[-1] <= steps[0]:
            raise self._failed(
                work,
                "verify_failed",
                "home",
                f"progress stayed at {steps[0]:g}",
                "a number that grows",
                " ".join(work.save["progress"]),
                SOURCE_GONE,
            )
        record.update(state=HOME)
        suspend.write_record(path, record)
        return {"progress": steps, "changed": changed}

    def return_cold(self, work: Work, target: str) -> str:
        """Start work that was ended here again from its own state, when no save of it could be restored; for whoever
        has proven that it does not run at ``target``."""
        with self._held(work, "restores") as (path, record):
            self._put_back(work, path, record)
        with self._held(work) as (path, record):
            state = record.get("state")
            if state in (COMMITTING, COMMITTED) and record.get("target") != target:
                raise self._failed(
                    work,
                    "policy",
                    "return",
                    f"it was given to {record.get('target')}",
                    f"proof of {target} only",
                    f"cat {path}",
                    SOURCE_GONE,
                )
            unit = unit_of(work)
            service = self._service(unit)
            left = suspend.same(record.get("members", ()), self._proc)
            stands = any(suspend.stands_still(pid, self._proc) for pid in left)
            if left and (stands or record.get("source") == SOURCE_LOST):  # of no use any more
                service.guard()
                service.end(lambda: suspend.same(record["members"], self._proc), 60.0)
                service.reset()
            if record:
                service.disarm()
            service.unguard()
            if service.moved.lift_one(unit):
                service.reload()
            source = self._start_again(service)
            if source != SOURCE_RUNNING:
                raise self._failed(
                    work,
                    "lost_source",
                    "return",
                    f"{unit} does not start",
                    "a running service",
                    service.status_command,
                    SOURCE_LOST,
                )
            if record:
                record.update(state="returned")
                suspend.write_record(path, record)
        with self._held(work, "restores") as (path, record):
            if record.get("state") == LEFT:  # it did not come home, so it is still a guest here
                record.update(state=RUNNING)
                suspend.write_record(path, record)
            if record.get("own"):
                path.unlink()
        return source
