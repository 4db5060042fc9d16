# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# ruff: noqa: PTH115, PTH116, PTH118, PTH207 - glob of the standard library endures files that vanish; links of /proc
"""Ask an application to save itself, and prove that it did: a signal that was sent is no save.

The only kind of save that survives another driver, so the work may come back on a node that is already upgraded, or on
its own. Saving and starting again are the application's; the proof is ours: something under ``proof`` is newer than the
request and differs from what was there, is not empty, is complete (it no longer grows, and nobody here has it open for
writing), and passes the owner's own check.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import signal
import stat
import time
import urllib.error
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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


_COMPARED = 200
"""Saves from before the request, the newest ones, whose contents a new one must differ from."""
_SAMPLES, _SAMPLE = 16, 4096


@dataclass(frozen=True)
class Save:
    """A file under a pattern: its path, modification time (nanoseconds), bytes and inode."""

    path: str
    mtime_ns: int
    size: int
    inode: int


def saves(pattern: str) -> list[Save]:
    """The non-empty regular files that match a glob pattern (of absolute paths), the newest first; a match that is a
    directory stands for all files below it. Files may come and go meanwhile."""
    found = []
    for match in glob.glob(pattern) or [pattern]:
        below = [os.path.join(folder, name) for folder, dummy, names in os.walk(match) for name in names]
        for path in below or [match]:
            with contextlib.suppress(OSError):
                about = os.stat(path)
                if stat.S_ISREG(about.st_mode) and about.st_size:
                    found.append(Save(path, about.st_mtime_ns, about.st_size, about.st_ino))
    return sorted(found, key=lambda one: one.mtime_ns, reverse=True)


def contents(save: Save) -> str:
    """What tells the contents of one file from those of another: its size, and samples of it; empty if it is gone."""
    digest = hashlib.sha256(str(save.size).encode())
    try:
        with open(save.path, "rb") as stream:
            for index in range(_SAMPLES):
                stream.seek(max(0, save.size - _SAMPLE) * index // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE))
    except OSError:
        return ""
    return digest.hexdigest()


def writers(path: str, proc: str = "/proc") -> list[int]:
    """PIDs of the processes of this machine that have a file open for writing."""
    found = []
    for link in glob.glob(f"{proc}/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(link) == path and os.lstat(link).st_mode & stat.S_IWUSR:
                found.append(int(link.split("/")[-3]))
    return sorted(set(found))


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
        last = saves(str(work.save.get("proof") or "/nonexistent"))
        return Estimate(last[0].size if last else 0, 0, 0.0)

    def capture(self, work: Work) -> Captured:
        """:raises CheckpointError: if no new save is proven in time; the work runs on in any case."""
        refused = self.check(work)
        if refused:
            raise CheckpointError(refused[0])
        pattern = str(work.save["proof"])
        before = saves(pattern)
        known = {contents(one) for one in before[:_COMPARED]}
        ran = self._starts(work)
        asked = self._now_ns()
        began = self._monotonic()
        deadline = began + float(work.save.get("deadline", 300))
        self._ask(work)
        found = self._wait(work, pattern, before, known, asked, deadline)
        now = self._starts(work)
        if now != ran and now[0] != "inactive":  # it may end after its save
            observed = f"{work.unit} is {now[0]} and was started {now[1] or '0'} times anew, it was {ran[0]} ({ran[1]})"
            raise self._failed(
                work, "checkpoint_failed", "proof", observed, "work that survives", f"journalctl -u {work.unit}"
            )
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
                "before": before[0].path if before else None,
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

    def _starts(self, work: Work) -> tuple[str, str]:
        """State of the unit, and how often systemd has started it anew; what a crash of the work changes."""
        if not work.unit:
            return "", ""
        argv = ["systemctl", "show", "--property=ActiveState,NRestarts", "--", unit_name(work.unit)]
        shown = dict(line.split("=", 1) for line in self._run(argv, timeout=_QUERY).stdout.splitlines() if "=" in line)
        return shown.get("ActiveState", ""), shown.get("NRestarts", "")

    def _wait(
        self, work: Work, pattern: str, before: Sequence[Save], known: set[str], asked: int, deadline: float
    ) -> Save:
        """The newest file that was not there before, has other contents than what was, and is complete.

        Its time need not be after the request, as a file server's clock may be behind; nor may it be older than what
        was there, as an old save that is put back is.
        """
        earliest = min(asked, before[0].mtime_ns) if before else 0
        observed = (
            f"the newest save is {before[0].path}, from before the request" if before else "there is no save at all"
        )
        while True:
            later = [one for one in saves(pattern) if one not in before and one.mtime_ns >= earliest]
            found = next((one for one in later if contents(one) not in known), None)
            if found:
                self._sleep(_STEADY)
                whole = found in saves(pattern)
                busy = writers(found.path) if whole and not work.save.get("check") else []
                if whole and not busy:
                    return found
                observed = f"{found.path} keeps changing"
                if busy:
                    observed = f"PID {busy[0]} still has {found.path} open for writing"
            elif later:
                observed = f"{later[0].path} has the contents of a save from before the request"
                self._sleep(0.2)
            elif self._monotonic() < deadline:
                self._sleep(0.2)
            if self._monotonic() >= deadline:
                break
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
