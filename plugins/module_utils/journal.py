# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The journal of one node: which run, which step is done, what was there before.

It is one JSON file on the node, root only, replaced atomically and synced to disk before the act it announces, so a
controller, a connection or the machine itself may stop at any instant and the next run knows where things stand.
Whoever may change it holds a lock on it for as long as its process lives: a module whose controller went away may
still be at work when the next run arrives.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import copy
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STATE_DIR = "/var/lib/gpufleet"
SCHEMA = 1

UPGRADED, ROLLED_BACK, QUARANTINED, UNCHANGED = "upgraded", "rolled_back", "quarantined", "unchanged"
OUTCOMES = (UPGRADED, ROLLED_BACK, QUARANTINED, UNCHANGED)

DEBTS = ("services", "dcgm", "workloads")
"""Kinds that say what was stopped and has to be started again; whoever starts it forgets them, nobody else."""

PACKAGES = "packages"
"""Step that changes packages, and kind that says which exact builds were there before."""

UNLOAD = "unload modules"
"""Step that takes the driver out of the kernel."""

CORDON = "cordon"
"""Kind that says whether somebody else had taken the node out of service; over once the node is given back."""


class JournalError(Exception):
    """The journal cannot be read or written; the text says which file and what to do about it."""


class JournalBusy(JournalError):
    """Another process of this collection is at work on the node; the only trouble here that passes by waiting."""


def atomic_write(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace ``path`` in one step and sync it: readers see the old content or the new, also after a power cut."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(directory: Path) -> None:
    """Have the names in a directory survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def why_not_writable(directory: Path) -> str | None:
    """Why nothing could be written below ``directory``, which need not exist yet; None if it could. Changes nothing.

    For root, access(2) still tells a read-only file system and an immutable directory.
    """
    there = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
    if not there.is_dir():
        return f"{there} is not a directory"
    if not os.access(there, os.W_OK | os.X_OK):
        read_only = os.statvfs(there).f_flag & os.ST_RDONLY
        return f"{there} is on a read-only file system" if read_only else f"{there} cannot be written to"
    return None


_EMPTY: Mapping[str, Any] = {"schema": SCHEMA, "run": None, "steps": [], "before": {}, "outcome": None}
_SHAPE: Mapping[str, tuple[type, ...]] = {
    "run": (dict, type(None)),
    "steps": (list,),
    "before": (dict,),
    "outcome": (dict, type(None)),
}


class Journal:
    """The journal in ``state_dir``; every changing method writes the file before it returns.

    A change that cannot be written is not made in memory either: what the object says is what the file says.
    """

    def __init__(self, path: Path, content: dict[str, Any], read_only: bool = False, lock: int | None = None) -> None:
        self.path = path
        self._content = content
        self._read_only = read_only
        self._lock = lock

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Let the next process have the journal; done by the end of the process at the latest."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @classmethod
    def open(cls, state_dir: str = STATE_DIR, read_only: bool = False, lock_timeout: float = 10.0) -> Journal:
        """Read the journal, or start an empty one; ``read_only`` (check mode) keeps all changes in memory.

        Waits at most ``lock_timeout`` seconds for another process that may change it.

        :raises JournalBusy: if another process holds it.
        :raises JournalError: if the file is there but is not a journal this release can read, or could not be written.
        """
        path = Path(state_dir) / "journal.json"
        lock = None if read_only else _lock(path.with_name("journal.lock"), lock_timeout)
        try:
            return cls(path, _read(path), read_only, lock)
        except JournalError:
            if lock is not None:
                os.close(lock)
            raise

    @property
    def run(self) -> Mapping[str, Any] | None:
        """The run that owns the node: id, target, previous, begun (Unix seconds); None if none was begun."""
        return self._content["run"]

    @property
    def outcome(self) -> Mapping[str, Any] | None:
        """How the run ended on this node: name, reason, next, at; None while it is unfinished."""
        return self._content["outcome"]

    @property
    def steps(self) -> list[Mapping[str, Any]]:
        return list(self._content["steps"])

    @property
    def unfinished(self) -> bool:
        return self.run is not None and self.outcome is None

    @property
    def goes_on(self) -> bool:
        """Whether the next run goes on with this one, since the node was never put back into service after it."""
        return self.unfinished or (self.outcome is not None and self.outcome["name"] == QUARANTINED)

    @property
    def interrupted(self) -> bool:
        """Whether a change of packages has begun, and none has ended well since."""
        last = self.last(PACKAGES)
        return last is not None and last["state"] != "done"

    @property
    def ending(self) -> str:
        """The outcome of a run that nobody has judged: the one it has, or whether it did anything about the driver.

        :raises JournalError: if it is in the middle of that.
        """
        if not self.goes_on and self.outcome is not None:
            return str(self.outcome["name"])
        if self.interrupted:
            raise JournalError(
                f"{self.path}: a change of packages was begun and has not ended well, so the run cannot be closed; "
                f"go on with the role install, or back with the role rollback"
            )
        acts = (self.last(PACKAGES), self.last(UNLOAD))
        return UPGRADED if any(act is not None and act["state"] == "done" for act in acts) else UNCHANGED

    def as_dict(self) -> dict[str, Any]:
        return {**self._content, "unfinished": self.unfinished, "goes_on": self.goes_on}

    def begin(self, run_id: str, target: str, previous: str | None, now: float) -> bool:
        """Begin a run; True if it is new.

        A run that never ended here, or ended in quarantine, is gone on with under the new id, also to another target:
        what it remembers of before is still the only record of how the node was, and the way back leads there. A new
        run keeps nothing of an ended one but its :data:`DEBTS`, unless packages were changed since then by modules
        alone, and that was interrupted: then the node came from what was there before that.
        """
        draft = self._draft()
        run = draft["run"]
        if run is not None and self.goes_on:
            if run["id"] != run_id:
                run.setdefault("earlier_ids", []).append(run["id"])
            if run["target"] != target:
                run["given_up"] = [*run.get("given_up", ()), run["target"]]
            run.update(id=run_id, target=target)
            draft["outcome"] = None
            self._write(draft)
            return False
        before = draft["before"]
        if self.interrupted and PACKAGES in before:
            previous = before[PACKAGES]["version"]
        else:
            draft["steps"] = []
            before = {kind: value for kind, value in before.items() if kind in DEBTS}
        draft.update(
            run={"id": run_id, "target": target, "previous": previous, "begun": now}, before=before, outcome=None
        )
        self._write(draft)
        return True

    def reopen(self, run_id: str) -> None:
        """Go on, under a new id, with a run that has ended: to bring a node back to what the run remembers.

        :raises JournalError: if no run was ever begun here, so that nothing is remembered.
        """
        draft = self._draft()
        run = draft["run"]
        if run is None:
            raise JournalError(f"{self.path} knows of no run on this node; there is nothing to go back to")
        if run["id"] != run_id:
            run.setdefault("earlier_ids", []).append(run["id"])
            run["id"] = run_id
        draft["outcome"] = None
        if draft != self._content:
            self._write(draft)

    def remember(self, kind: str, value: Any) -> bool:
        """Keep how something was before we touched it. The first write wins, so a re-run cannot overwrite the truth
        with what it has itself changed. True if it was written."""
        draft = self._draft()
        if kind in draft["before"]:
            return False
        draft["before"][kind] = value
        self._write(draft)
        return True

    def remember_each(self, kind: str, values: Mapping[str, Any]) -> list[str]:
        """As :meth:`remember`, for a mapping in which the first write of each key wins. The keys that were written."""
        draft = self._draft()
        kept = draft["before"].setdefault(kind, {})
        new = [key for key in values if key not in kept]
        if new or kind not in self._content["before"]:
            kept.update((key, values[key]) for key in new)
            self._write(draft)
        return new

    def before(self, kind: str) -> Any:
        """What :meth:`remember` kept, or None."""
        return self._content["before"].get(kind)

    def forget(self, kind: str) -> None:
        """Drop what was remembered, once it has been put back."""
        draft = self._draft()
        if draft["before"].pop(kind, None) is not None:
            self._write(draft)

    def start(self, step: str, now: float) -> None:
        """Announce a step before it is done."""
        draft = self._draft()
        draft["steps"].append({"name": step, "state": "started", "at": now})
        self._write(draft)

    def end(self, step: str, now: float, state: str = "done", **detail: Any) -> None:
        """Close the last entry of ``step`` with ``state`` done or failed."""
        draft = self._draft()
        for entry in reversed(draft["steps"]):
            if entry["name"] == step and entry["state"] == "started":
                entry.update(state=state, ended=now, **({"detail": detail} if detail else {}))
                self._write(draft)
                return
        raise JournalError(f"{self.path}: step {step!r} was never started")

    def last(self, step: str) -> Mapping[str, Any] | None:
        """The latest entry of ``step``, or None."""
        return next((entry for entry in reversed(self._content["steps"]) if entry["name"] == step), None)

    def finish(self, outcome: str, reason: str, next_command: str | None, now: float) -> None:
        """Close the run on this node with one of :data:`OUTCOMES`."""
        draft = self._draft()
        draft["outcome"] = {"name": outcome, "reason": reason, "next": next_command, "at": now}
        if outcome != QUARANTINED:
            draft["before"].pop(CORDON, None)
        self._write(draft)

    def _draft(self) -> dict[str, Any]:
        return copy.deepcopy(self._content)

    def _write(self, draft: dict[str, Any]) -> None:
        if not self._read_only:
            try:
                atomic_write(self.path, (json.dumps(draft, indent=1, sort_keys=True) + "\n").encode())
            except OSError as exc:
                raise JournalError(f"cannot write {self.path}: {exc.strerror}; nothing was done") from exc
        self._content = draft


def _read(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return copy.deepcopy(dict(_EMPTY))
    except OSError as exc:
        raise JournalError(f"cannot read {path}: {exc.strerror}") from exc
    try:
        content = json.loads(data)
    except ValueError as exc:
        raise JournalError(
            f"{path} is damaged ({exc}); what the node was like before the upgrade is recorded only there. "
            f"Look at it, set the node right by hand, then: mv {path} {path}.bad"
        ) from exc
    found = content.get("schema") if isinstance(content, dict) else type(content).__name__
    if found != SCHEMA:
        raise JournalError(
            f"{path} has schema {found!r}, this release reads {SCHEMA}; "
            f"finish the run with the release that began it, or move it away: mv {path} {path}.bad"
        )
    odd = [key for key, types in _SHAPE.items() if not isinstance(content.get(key, 0), types)]
    if odd:
        raise JournalError(
            f"{path} has no usable {', '.join(odd)}, so something else has written it; "
            f"look at it, set the node right by hand, then: mv {path} {path}.bad"
        )
    return content


def at_work(state_dir: str = STATE_DIR) -> bool:
    """Whether another process that changes the node holds its journal now, such as one an interrupted run left behind.

    Not for a process that holds the journal itself: looking would let go of it, as record locks do.
    """
    try:
        descriptor = os.open(Path(state_dir) / "journal.lock", os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _lock(path: Path, timeout: float) -> int:
    """Hold ``path`` with a POSIX record lock, which a forked child does not inherit: one that hangs in the driver for
    ever must not keep the node's journal."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as exc:
        raise JournalError(f"cannot open {path}: {exc.strerror}; nothing was done") from exc
    deadline = time.monotonic() + timeout
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            raise JournalBusy(
                f"another module of this collection (pid {owner}) is still at work on this node and holds {path}; "
                f"nothing was done. See what it does with: ps -o pid,stat,lstart,args -p {owner}"
            ) from None
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except OSError:
        pass  # the pid is only for the message above; a full disk is reported by the first write of the journal
    return descriptor
