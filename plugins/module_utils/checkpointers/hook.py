# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ask an application to save itself, and prove that it did: a signal that was sent is no save.

The only kind of save that survives another driver, so the work may come back on a node that is already upgraded, or on
its own. Saving and starting again are the application's; the proof is ours: something under ``proof`` is newer than the
request, not empty, complete (it no longer grows), and passes the owner's own check.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import signal
import time
import urllib.error
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.urls import ConnectionError as UrlError
from ansible.module_utils.urls import open_url

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.base import (
    SOURCE_RUNNING,
    Capabilities,
    Captured,
    Checkpointer,
    CheckpointError,
    Estimate,
    Reason,
    Work,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Runner
from ansible_collections.gpufleet.driver.plugins.module_utils.host.systemd import unit_name

_HTTP = 30.0
_QUERY = 30.0
_STEADY = 1.0
"""Seconds over which a save must not change to count as complete."""


@dataclass(frozen=True)
class Save:
    """The newest file under a pattern: its path, modification time (nanoseconds) and bytes."""

    path: str
    mtime_ns: int
    size: int


def newest(pattern: str) -> Save | None:
    """The newest non-empty regular file that matches a glob pattern (of absolute paths); a match that is a directory
    stands for the newest file below it."""
    root = Path(pattern)
    parts = [index for index, part in enumerate(root.parts) if any(sign in part for sign in "*?[")]
    matches = [root]
    if parts:
        base = Path(*root.parts[: parts[0]])
        matches = list(base.glob(str(Path(*root.parts[parts[0] :]))))
    best: Save | None = None
    for match in matches:
        for path in match.rglob("*") if match.is_dir() else (match,):
            try:
                about = path.stat()
            except OSError:
                continue
            if path.is_file() and about.st_size and (best is None or about.st_mtime_ns > best.mtime_ns):
                best = Save(str(path), about.st_mtime_ns, about.st_size)
    return best


class Hook(Checkpointer):
    """``work.save``: one of ``command``, ``signal``, ``http`` (a URL that is posted to) asks for the save; ``proof`` is
    where it appears, ``check`` a command that judges it (its path is appended), ``deadline`` seconds for all of it."""

    name = "hook"
    capabilities = Capabilities(
        keeps_source_frozen=False,
        moves_nodes=True,
        survives_driver_change=True,
        multi_process=True,
        multi_gpu=True,
        needs_launch_time_setup=False,
    )

    def __init__(
        self,
        run: Runner,
        *,
        post: Callable[[str], str] | None = None,
        now_ns: Callable[[], int] = time.time_ns,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._run = run
        self._post = post or _post
        self._now_ns, self._monotonic, self._sleep = now_ns, monotonic, sleep

    def probe(self) -> Sequence[Reason]:
        return []

    def check(self, work: Work) -> Sequence[Reason]:
        save = work.save
        asked = [way for way in ("command", "signal", "http") if save.get(way)]
        wrong = ""
        if len(asked) != 1:
            wrong = f"{' and '.join(asked) or 'nothing'} to ask for the save"
        elif not str(save.get("proof") or "").startswith("/"):
            wrong = f"proof is {save.get('proof')!r}"
        elif save.get("engine") or save.get("encrypt"):
            wrong = "engine or encrypt, which are for saves that are not the application's own"
        elif save.get("signal") and not hasattr(signal, str(save["signal"])):
            wrong = f"{save['signal']!r} is not a signal"
        elif save.get("signal") and not work.unit:
            wrong = "a signal, but no unit to send it to"
        if not wrong:
            return []
        expected = "one of command, signal and http, and an absolute path as proof"
        return [self._reason(work, "policy", "check", wrong, expected, "see docs/checkpoint.md")]

    def estimate(self, work: Work) -> Estimate:
        last = newest(str(work.save.get("proof") or "/nonexistent"))
        return Estimate(last.size if last else 0, 0, 0.0)

    def capture(self, work: Work) -> Captured:
        """:raises CheckpointError: if no new save is proven in time; the work runs on in any case."""
        refused = self.check(work)
        if refused:
            raise CheckpointError(refused[0])
        pattern = str(work.save["proof"])
        before = newest(pattern)
        asked = self._now_ns()
        began = self._monotonic()
        deadline = began + float(work.save.get("deadline", 300))
        self._ask(work)
        found = self._wait(work, pattern, before, asked, deadline)
        if work.save.get("check"):
            argv = [*work.save["check"], found.path]
            done = self._run(argv, timeout=max(1.0, deadline - self._monotonic()))
            if not done.ok:
                observed = f"{found.path} does not pass its own check: {done.describe()}"
                raise self._failed(work, "verify_failed", "check", observed, "rc 0", " ".join(argv))
        return Captured(
            workload=work.name,
            backend=self.name,
            artefact=found.path,
            source=SOURCE_RUNNING,
            bytes=found.size,
            seconds=round(self._monotonic() - began, 3),
            evidence={
                "path": found.path,
                "saved_after_request": round((found.mtime_ns - asked) / 1e9, 3),
                "before": before.path if before else None,
            },
        )

    def _ask(self, work: Work) -> None:
        save = work.save
        seconds = float(save.get("deadline", 300))
        if save.get("command"):
            done = self._run(save["command"], timeout=seconds)
            if not done.ok:
                raise self._failed(
                    work, "checkpoint_failed", "request", done.describe(), "rc 0", " ".join(save["command"])
                )
        elif save.get("signal"):
            name = unit_name(work.unit or "")
            argv = ["systemctl", "kill", f"--signal={save['signal']}", "--kill-who=main", "--", name]
            done = self._run(argv, timeout=_QUERY)
            if not done.ok:
                raise self._failed(work, "checkpoint_failed", "request", done.describe(), "rc 0", " ".join(argv))
        else:
            trouble = self._post(str(save["http"]))
            if trouble:
                raise self._failed(
                    work, "checkpoint_failed", "request", trouble, "a status below 300", f"curl -X POST {save['http']}"
                )

    def _wait(self, work: Work, pattern: str, before: Save | None, asked: int, deadline: float) -> Save:
        while True:
            found = newest(pattern)
            if found and found.mtime_ns > asked and found != before:
                self._sleep(_STEADY)
                if newest(pattern) == found:
                    return found
            elif self._monotonic() < deadline:
                self._sleep(0.2)
            if self._monotonic() >= deadline:
                break
        old = f"the newest save is {before.path}, from before the request" if before else "there is no save at all"
        observed = f"{found.path} keeps changing" if found and found.mtime_ns > asked else old
        raise self._failed(
            work, "checkpoint_failed", "proof", observed, f"a new save under {pattern}", f"ls -lt {pattern}"
        )

    def abort(self, work: Work) -> str:
        return SOURCE_RUNNING

    def commit(self, work: Work, target: str) -> str:
        """Nothing stands still: whoever stops the work ends it."""
        return SOURCE_RUNNING

    def restore(self, work: Work, artefact_id: str) -> Mapping[str, Any]:
        raise self._failed(
            work,
            "unsupported_feature:restore",
            "restore",
            "its application loads the save itself",
            "a start of the unit",
            f"systemctl start {work.unit}",
        )

    def verify(self, work: Work) -> Mapping[str, Any]:
        if not work.ready:
            return {}
        done = self._run(work.ready, timeout=work.ready_timeout)
        if not done.ok:
            raise self._failed(work, "verify_failed", "verify", done.describe(), "rc 0", " ".join(work.ready))
        return {"ready": True}

    def discard(self, work: Work, artefact_id: str) -> bool:
        """The save is the application's own; it is not ours to remove."""
        return False

    def _reason(self, work: Work, reason: str, step: str, observed: str, expected: str, command: str) -> Reason:
        return Reason(reason, step, observed, expected, command, SOURCE_RUNNING, workload=work.name)

    def _failed(
        self, work: Work, reason: str, step: str, observed: str, expected: str, command: str
    ) -> CheckpointError:
        return CheckpointError(self._reason(work, reason, step, observed, expected, command))


def _post(url: str) -> str:
    """POST to a URL; what went wrong, or an empty text."""
    if not url.startswith(("http://", "https://")):
        return f"{url!r} is not the URL of a web server"
    try:
        with open_url(url, data=b"", method="POST", timeout=_HTTP):
            return ""
    except (urllib.error.URLError, UrlError, OSError, ValueError) as exc:
        return f"{url}: {exc}"
