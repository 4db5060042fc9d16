# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Have Cedana save a pod, a Slurm job or a job of its own, with our key and manifest around it.

Cedana keeps its copies itself and records neither driver nor GPU of them, so the key is ours; a request that it
accepted is no save, so what counts is the status that follows, and its checkpoint's own state and checksum. Sources:
docs.cedana.ai/references/api (actions, actions-slurm, checkpoints) and the ``cedana`` command's help.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.base import (
    SOURCE_GONE,
    SOURCE_RUNNING,
    Capabilities,
    CheckpointError,
    Estimate,
    Reason,
    Work,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.common import short
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.left_running import (
    Answer,
    LeftRunning,
    speak,
)

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_POLL = 2.0
_WAITING = ("initialized", "processing", "checkpoint_created")
RECORD = "cedana.json"


class Cedana(LeftRunning):
    """``save.cedana``: ``url`` and ``token_file`` of the API, with ``pod``, ``namespace``, ``cluster`` and
    ``runc_root``, or ``slurm_job`` and ``kind``; or, without ``url``, ``job``: a job of the daemon on this node."""

    name = "cedana"
    format = "cedana/1"
    capabilities = Capabilities(
        keeps_source_frozen=False,
        moves_nodes=True,
        survives_driver_change=False,
        multi_process=True,
        multi_gpu=False,
        needs_launch_time_setup=True,
    )
    answer: Answer = staticmethod(speak)
    monotonic = staticmethod(time.monotonic)

    def probe(self) -> list[Reason]:
        """Nothing of this node is needed for its API; its daemon is looked at by :meth:`check` where one is used."""
        return []

    def check(self, work: Work) -> Sequence[Reason]:
        options = self._options(work)
        named = [key for key in ("pod", "slurm_job", "job") if options.get(key)]
        wrong = ""
        if len(named) != 1:
            wrong = f"{' and '.join(named) or 'nothing'} to save"
        elif not all(
            _NAME.fullmatch(str(options[key])) for key in (*named, "namespace", "cluster") if options.get(key)
        ):
            wrong = f"{options} has a name that is none"
        elif named == ["job"] and options.get("url"):
            wrong = "a job of the daemon, and the URL of the API"
        elif named != ["job"] and not str(options.get("url") or "").startswith("https://"):
            wrong = f"url {options.get('url')!r}"
        elif named == ["pod"] and not options.get("cluster"):
            wrong = "a pod, but no cluster"
        if wrong:
            expected = "one of pod (with cluster), slurm_job (both with an https url) and job"
            return [self._failed(work, "policy", "check", wrong, expected, "see docs/checkpoint.md").reason]
        if named == ["job"]:
            done = self._run(["cedana", "check"], timeout=60)
            if not done.ok:
                return [
                    self._failed(
                        work, "unsupported_backend", "check", short(done), "a node on which it works", "cedana check"
                    ).reason
                ]
        return super().check(work)

    def estimate(self, work: Work) -> Estimate:
        """Its size is known to Cedana only."""
        return Estimate(0, 0, 0.0)

    # -- the save

    def _save(self, work: Work, staged: Path) -> Mapping[str, Any]:
        options = self._options(work)
        if options.get("job"):
            return self._dump(work, options, staged)
        if options.get("pod"):
            path, body = "/v2/checkpoint/pod", self._pod(options)
        else:
            path = "/v2/slurm/checkpoint/job"
            kind = options.get("kind") or "simple"
            body = {"job_id": str(options["slurm_job"]), "kind": kind, "reason": "manual"}
        action = self._action(work, "dump_failed", path, body, SOURCE_RUNNING)
        found = [one for one in self._list(work, "/v2/actions") if one.get("action_id") == action]
        if not found or not _UUID.fullmatch(str(found[0].get("checkpoint_id"))):
            raise self._wrong(work, "dump_failed", f"action {action} names no checkpoint", "its id", SOURCE_RUNNING)
        saved = {"action": action, **self._ready(work, str(found[0]["checkpoint_id"]), SOURCE_RUNNING)}
        (staged / RECORD).write_text(json.dumps(saved))
        return saved

    def _pod(self, options: Mapping[str, Any]) -> dict[str, str]:
        return {
            "cluster_id": str(options["cluster"]),
            "namespace": str(options.get("namespace") or "default"),
            "pod_name": str(options["pod"]),
            "runc_root": str(options.get("runc_root") or "/run/containerd/runc/k8s.io"),
        }

    def _dump(self, work: Work, options: Mapping[str, Any], staged: Path) -> Mapping[str, Any]:
        argv = ["cedana", "dump", "job", str(options["job"]), "--dir", str(staged), "--compression", "none"]
        done = self._run([*argv, "--leave-running", "--tcp-established", "--link-remap"], timeout=self._deadline(work))
        made = sorted(path.name for path in staged.iterdir())
        if (
            not done.ok
            or len(made) != 1
            or not any(path.is_file() and path.stat().st_size for path in staged.rglob("*"))
        ):
            observed = f"{short(done)}, which made {', '.join(made) or 'nothing'}"
            raise self._wrong(work, "dump_failed", observed, "one dump", SOURCE_RUNNING, "cedana job list")
        return {"dump": made[0]}

    # -- the return

    def _bring_back(self, work: Work, manifest: Mapping[str, Any], place: Path) -> Mapping[str, Any]:
        options, saved = self._options(work), manifest["saved"]
        if options.get("job"):
            argv = ["cedana", "restore", "job", str(options["job"]), "--path", str(place / saved["dump"])]
            done = self._run(argv, timeout=self._deadline(work))
            if not done.ok:
                raise self._wrong(work, "restore_failed", short(done), "rc 0", SOURCE_GONE, "cedana job list")
            return {}
        now = self._ready(work, saved["checkpoint"], SOURCE_GONE)
        if now["checksum"] != saved["checksum"]:
            observed = f"Cedana's checkpoint {saved['checkpoint']} has checksum {now['checksum']}"
            raise self._wrong(work, "hash_mismatch", observed, str(saved["checksum"]), SOURCE_GONE)
        body = {"action_id": saved["action"], "cluster_id": str(options.get("cluster") or "")}
        path = "/v2/restore/pod"
        if options.get("slurm_job"):
            path, body = "/v2/slurm/restore/job", {**body, "reason": "manual"}
        return {"action": self._action(work, "restore_failed", path, body, SOURCE_GONE)}

    def _forget(self, work: Work, manifest: Mapping[str, Any]) -> None:
        checkpoint = manifest["saved"].get("checkpoint")
        if checkpoint:
            self._ask(work, "publish_failed", "PATCH", f"/v2/checkpoints/deprecate/{checkpoint}", None, SOURCE_RUNNING)

    # -- the API

    def _action(self, work: Work, reason: str, path: str, body: Mapping[str, Any], source: str) -> str:
        """Ask for something, and wait until it is done; the id of the action."""
        action = self._ask(work, reason, "POST", path, body, source).strip().strip('"')
        if not _UUID.fullmatch(action):
            raise self._wrong(work, reason, f"{path} answers {action[:80]!r}", "the id of an action", source)
        deadline = self.monotonic() + self._deadline(work)
        while True:
            text = self._ask(work, reason, "GET", f"/v2/checkpoint/status/{action}", None, source)
            try:
                told = dict(json.loads(text))
            except (ValueError, TypeError):
                told = {}
            status = told.get("status")
            if status == "ready":
                return action
            if status not in _WAITING:
                observed = f"action {action} is {status or text[:80]!r}: {told.get('details') or 'no details'}"
                raise self._wrong(work, reason, observed, "ready", source)
            if self.monotonic() >= deadline:
                observed = f"action {action} is still {status} after {self._deadline(work):.0f} s"
                late = "restore_timeout" if reason == "restore_failed" else reason
                raise self._wrong(work, late, observed, "ready", source)
            self._sleep(_POLL)

    def _ready(self, work: Work, checkpoint: str, source: str) -> dict[str, Any]:
        """A checkpoint that can be restored; :raises CheckpointError: if it is none."""
        found = [one for one in self._list(work, f"/v2/checkpoints?ids={checkpoint}") if one.get("id") == checkpoint]
        status = found[0].get("status") if found else "unknown to Cedana"
        if status != "ready":
            reason = "dump_failed" if source == SOURCE_RUNNING else "hash_mismatch"
            raise self._wrong(work, reason, f"checkpoint {checkpoint} is {status}", "ready", source)
        return {"checkpoint": checkpoint, "checksum": found[0].get("checksum"), "platform": found[0].get("platform")}

    def _list(self, work: Work, path: str) -> list[dict[str, Any]]:
        text = self._ask(work, "dump_failed", "GET", path, None, SOURCE_RUNNING)
        try:
            return [dict(one) for one in json.loads(text)]
        except (ValueError, TypeError) as exc:
            raise self._wrong(work, "dump_failed", f"{path} answers {text[:80]!r}", "a list", SOURCE_RUNNING) from exc

    def _ask(self, work: Work, reason: str, method: str, path: str, body: Mapping[str, Any] | None, source: str) -> str:
        options = self._options(work)
        url = str(options["url"]).rstrip("/") + path
        try:
            status, text = self.answer(
                method, url, body, token_file=options.get("token_file"), ca=options.get("ca"), timeout=60.0
            )
        except OSError as exc:
            raise self._wrong(work, reason, str(exc), "an answer", source) from exc
        if status != 200:
            raise self._wrong(work, reason, f"{method} {path}: HTTP {status} {text[:200]}", "HTTP 200", source)
        return text

    def _deadline(self, work: Work) -> float:
        return float(work.save.get("deadline") or 300)

    def _wrong(
        self, work: Work, reason: str, observed: str, expected: str, source: str, look: str = ""
    ) -> CheckpointError:
        step = "dump" if source == SOURCE_RUNNING else "restore"
        look = look or f"curl {self._options(work).get('url')}/v2/actions"
        return self._failed(work, reason, step, observed, expected, look, source)
