# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What saves have in common that others take and that leave the work running: the key, the manifest and the proof.

Work that goes on after its save does twice what it did since, if it is restored. So it must be an engine, which stands
by from before the save until it is ended or let go on (by the timer too), or its owner must say that this may happen.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

from ansible.module_utils.urls import ConnectionError as UrlError
from ansible.module_utils.urls import open_url

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import artefact, facts, suspend
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.base import (
    SOURCE_FROZEN,
    SOURCE_GONE,
    SOURCE_LOST,
    SOURCE_RUNNING,
    Captured,
    Checkpointer,
    CheckpointError,
    Reason,
    Work,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.common import (
    COMMITTED,
    RUNNING,
    UNLOCKING,
    Common,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.engine import Engine, EngineError
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.service import Service, ServiceError

_COMPARED = ("gpu_model", "driver")
"""What a node must tell of itself, or no other would ever be found to be the same."""

Answer = Callable[..., "tuple[int, str]"]


def speak(
    method: str,
    url: str,
    body: Mapping[str, Any] | None = None,
    *,
    token_file: str | None = None,
    ca: str | None = None,
    cert: str | None = None,
    key: str | None = None,
    timeout: float = 30.0,
) -> tuple[int, str]:
    """Status and text of an HTTP answer, also of one that is no success.

    :raises OSError: if there is none in time, or the server's certificate is not trusted.
    """
    headers = {"Content-Type": "application/json"} if body is not None else {}
    if token_file:
        headers["Authorization"] = f"Bearer {Path(token_file).read_text().strip()}"
    data = json.dumps(body).encode() if body is not None else None
    try:
        with open_url(
            url,
            data=data,
            headers=headers,
            method=method,
            timeout=timeout,
            follow_redirects="none",  # the token is for this server alone
            ca_path=ca,
            client_cert=cert,
            client_key=key,
        ) as answer:
            return int(answer.status), answer.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as exc:
        return int(exc.code), exc.read().decode("utf-8", "replace")
    except (urllib.error.URLError, UrlError, ValueError) as exc:
        raise OSError(f"{method} {url}: {exc}") from exc


class LeftRunning(Common, Checkpointer):
    """A way of saving that somebody else carries out."""

    format: str
    comes_later = False
    """Whether a restore only makes ready what others then start."""

    @abstractmethod
    def _save(self, work: Work, staged: Path) -> Mapping[str, Any]:
        """Have it saved, with what is ours to keep in ``staged``; what the manifest says of it."""

    @abstractmethod
    def _bring_back(self, work: Work, manifest: Mapping[str, Any], place: Path) -> Mapping[str, Any]:
        """Have it restored here; the evidence."""

    @abstractmethod
    def _forget(self, work: Work, manifest: Mapping[str, Any]) -> None:
        """Have the other's copy removed."""

    def _options(self, work: Work) -> Mapping[str, Any]:
        return dict(work.save.get(self.name) or {})

    def check(self, work: Work) -> Sequence[Reason]:
        found: list[Reason] = []
        if work.save.get("encrypt"):
            observed, expected = f"save.encrypt with {self.name}", "save.encrypt with cuda_criu"
            found.append(
                self._failed(
                    work, "unsupported_feature:encryption", "check", observed, expected, "see docs/checkpoint.md"
                ).reason
            )
        engine = work.save.get("engine")
        if engine:
            trouble = Engine(engine).trouble()
            if trouble:
                expected, look = "an engine that can be paused", f"curl {engine.get('url')}"
                found.append(self._failed(work, "unsupported_feature:engine", "check", trouble, expected, look).reason)
        elif not work.save.get("may_repeat"):
            observed = f"{self.name} leaves work running after its save, so that a restore repeats what it did since"
            expected = "save.engine, or save.may_repeat if that does no harm"
            found.append(
                self._failed(
                    work, "unsupported_feature:left_running", "check", observed, expected, "see docs/checkpoint.md"
                ).reason
            )
        key = self._key(work)
        for name in _COMPARED:
            if key[name] is None:
                observed, expected = f"{name} of this node cannot be had", "what another node can be compared with"
                reason = f"key_mismatch:{name}"
                found.append(self._failed(work, reason, "check", observed, expected, "nvidia-smi").reason)
        return found

    def _key(self, work: Work) -> dict[str, Any]:
        node = facts.node_facts(self._observe(), self._run, self._criu, self._proc, self._sys)
        return {**node, "backend": self.format, **dict(work.save.get("key") or {})}

    def capture(self, work: Work) -> Captured:
        with self._held(work) as (path, record):
            if record.get("state") == suspend.PUBLISHED and record.get("wake"):
                return self._captured(work, record, changed=False)
            if record.get("state") in (suspend.FROZEN, suspend.PUBLISHED):
                self._undo(work, path, record)
            refused = self.check(work)
            if refused:
                raise CheckpointError(refused[0])
            began = self._now()
            stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(began))
            record = {
                "state": suspend.FROZEN,
                "workload": work.name,
                "backend": self.name,
                "artefact": artefact.new_id(work.name, stamp, os.urandom(3).hex()),
                "members": [],
                "at": began,
            }
            suspend.write_record(path, record)
            try:
                manifest = self._take(work, path, record)
                record.update(state=suspend.PUBLISHED, bytes=manifest["total"], saved=manifest["saved"])
                record.update(seconds=round(self._now() - began, 3))
                record["digest"] = artefact.digest(self._store, record["artefact"])
                suspend.write_record(path, record)
            except BaseException as exc:
                source = self._undo(work, path, record)
                if isinstance(exc, CheckpointError):
                    raise CheckpointError(replace(exc.reason, source=source)) from exc
                if isinstance(exc, (OSError, ServiceError, artefact.ArtefactError)):
                    raise self._failed(
                        work, "publish_failed", "capture", str(exc), "success", f"df -h {self._store}", source
                    ) from exc
                raise
            return self._captured(work, record)

    def _captured(self, work: Work, record: Mapping[str, Any], changed: bool = True) -> Captured:
        return Captured(
            work.name,
            self.name,
            record["artefact"],
            SOURCE_FROZEN if record.get("wake") else SOURCE_RUNNING,
            record["bytes"],
            record["seconds"],
            record["at"],
            changed=changed,
            digest=record.get("digest", ""),
            evidence=record["saved"],
        )

    def _timer(self, work: Work) -> Service:
        return self._service(f"{self.name}:{self.record_path(work.name).stem}")

    def _take(self, work: Work, path: Path, record: dict[str, Any]) -> dict[str, Any]:
        engine = work.save.get("engine")
        if engine:
            self._quiesce(work, engine, path, record)
        key = self._key(work)
        staged = artefact.stage(self._store, record["artefact"])
        saved = self._save(work, staged)
        return artefact.publish(
            staged,
            record["artefact"],
            {
                "created": record["at"],
                "expires": record["at"] + float(work.save.get("keep") or 7 * 86400),
                "workload": {"name": work.name, "wake": record.get("wake", [])},
                "backend": {"name": self.name, "format": self.format},
                "key": key,
                "node": self._node,
                "saved": dict(saved),
            },
        )

    def _quiesce(self, work: Work, engine: Mapping[str, Any], path: Path, record: dict[str, Any]) -> None:
        def remember(calls: list[dict[str, Any]]) -> None:
            record["wake"] = calls
            suspend.write_record(path, record)

        self._timer(work).arm([sys.executable, str(self._script), "thaw", str(path)], self._limits.freeze)
        try:
            Engine(engine, sleep=self._sleep).quiesce(remember)
        except EngineError as exc:
            reason = "lock_timeout" if exc.late else "checkpoint_failed"
            look = f"curl {engine.get('url')}"
            raise self._failed(work, reason, "quiesce", str(exc), "an engine without requests", look) from exc

    def _undo(self, work: Work, path: Path, record: dict[str, Any]) -> str:
        paused = bool(record.get("wake"))
        asleep = suspend.wake(record)
        if asleep:  # the timer asks once more, and so does whoever aborts it again
            record.update(state=suspend.THAWED)
            suspend.write_record(path, record)
            return SOURCE_LOST
        if paused:
            self._timer(work).disarm()
        artefact.remove(self._store, record["artefact"])
        path.unlink(missing_ok=True)
        return SOURCE_RUNNING

    def abort(self, work: Work) -> str:
        with self._held(work) as (path, record):
            if record.get("state") in (suspend.FROZEN, suspend.PUBLISHED, suspend.THAWED):
                return self._undo(work, path, record)
            return SOURCE_GONE if record.get("state") == COMMITTED else SOURCE_RUNNING

    def commit(self, work: Work, target: str) -> str:
        """Whoever has the work ends it: its scheduler. From here on nothing lets it go on."""
        with self._held(work) as (path, record):
            state = record.get("state")
            if state == COMMITTED and record.get("target") == target:
                return SOURCE_FROZEN if record.get("wake") else SOURCE_RUNNING
            if state != suspend.PUBLISHED:
                observed = "it was let go on meanwhile, so what was saved is out of date"
                if state != suspend.THAWED:
                    observed = f"its record says {state or 'nothing'}, for {record.get('target') or 'nobody'}"
                raise self._failed(work, "policy", "commit", observed, "a save that is up to date", f"cat {path}")
            record.update(state=COMMITTED, target=target)
            suspend.write_record(path, record)
            if record.get("wake"):
                self._timer(work).disarm()
            return SOURCE_FROZEN if record.get("wake") else SOURCE_RUNNING

    def compare(self, work: Work, artefact_id: str, digest: str = "") -> dict[str, Any]:
        """The manifest of a save that is whole and fits this node; ``digest`` is that of the manifest, if it is known.

        :raises CheckpointError: if it is or does not."""

        def refuse(reason: str, observed: str, expected: str, look: str) -> CheckpointError:
            return self._failed(work, reason, "place", observed, expected, look, SOURCE_GONE)

        try:
            manifest = artefact.read(self._store, artefact_id, digest)
            wrong = artefact.verify(self._store, artefact_id)
        except (artefact.ArtefactError, OSError) as exc:
            raise refuse("hash_mismatch", str(exc), "a whole artefact", f"ls -l {self._store}") from exc
        if wrong:
            raise refuse("hash_mismatch", "; ".join(wrong[:3]), "what was published", f"ls -l {self._store}")
        if manifest["backend"].get("format") != self.format:
            raise refuse("key_mismatch:backend", str(manifest["backend"].get("format")), self.format, "another backend")
        offered = facts.node_facts(self._observe(), self._run, self._criu, self._proc, self._sys)
        for one in self._differences(manifest["key"], offered) if self._differences else ():
            raise refuse(f"key_mismatch:{one.field}", str(one), "the same on both nodes", "checkpoint_info")
        return manifest

    def restore(self, work: Work, artefact_id: str, digest: str = "") -> Mapping[str, Any]:
        """Have it restored, once. What of it is left to do here is told by the record: an engine that is to go on."""
        with self._held(work, "restores") as (path, record):
            if record.get("artefact") != artefact_id:
                manifest = self.compare(work, artefact_id, digest)
                evidence = dict(self._bring_back(work, manifest, artefact.place(self._store, artefact_id)))
                record = {
                    "state": UNLOCKING,
                    "workload": work.name,
                    "backend": self.name,
                    "artefact": artefact_id,
                    "members": [],
                    "at": self._now(),
                    "wake": manifest["workload"].get("wake") or [],
                    "evidence": evidence,
                }
                suspend.write_record(path, record)
            evidence = dict(record["evidence"])
        return evidence if self.comes_later else {**evidence, **self.verify(work)}

    def verify(self, work: Work) -> Mapping[str, Any]:
        """Let an engine go on, and prove that the work does."""
        with self._held(work, "restores") as (path, record):
            asleep = suspend.wake(record)
            if asleep:
                raise self._failed(
                    work, "verify_failed", "wake", asleep, "an engine that goes on", "see its log", SOURCE_GONE
                )
            if record:
                record.update(state=RUNNING, wake=[])
                suspend.write_record(path, record)
        steps = self._progress(work)
        if steps:
            self._sleep(self._limits.settle)
            steps += self._progress(work)
            if steps[-1] <= steps[0]:
                observed = f"progress stayed at {steps[0]:g} for {self._limits.settle:.0f} s"
                look = " ".join(work.save["progress"])
                raise self._failed(work, "verify_failed", "verify", observed, "a number that grows", look, SOURCE_GONE)
        return {"progress": steps}

    def discard(self, work: Work, artefact_id: str) -> bool:
        for side in ("checkpoints", "restores"):
            with self._held(work, side) as (path, record):
                if record.get("artefact") != artefact_id:
                    continue
                if record.get("wake") and record.get("state") != COMMITTED:
                    expected, look = "a save nobody waits for", f"cat {path}"
                    raise self._failed(work, "policy", "discard", "its engine stands by", expected, look, SOURCE_FROZEN)
                path.unlink()
        if not artefact.place(self._store, artefact_id).exists():
            return False
        self._forget(work, artefact.read(self._store, artefact_id))
        return artefact.remove(self._store, artefact_id)
