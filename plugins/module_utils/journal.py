# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The journal of one node: which run, which step is done, what was there before.

It is one JSON file on the node, root only, replaced atomically and synced to disk before the act it announces, so a
controller, a connection or the machine itself may stop at any instant and the next run knows where things stand.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

STATE_DIR = "/var/lib/gpufleet"
SCHEMA = 1

UPGRADED, ROLLED_BACK, QUARANTINED = "upgraded", "rolled_back", "quarantined"
OUTCOMES = (UPGRADED, ROLLED_BACK, QUARANTINED)


class JournalError(Exception):
    """The journal cannot be read or written; the text says which file and what to do about it."""


def atomic_write(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace ``path`` in one step and sync it: readers see the old content or the new, also after a power cut."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        if os.path.exists(name):
            os.unlink(name)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


class Journal:
    """The journal in ``state_dir``; every changing method writes the file before it returns."""

    def __init__(self, path: Path, content: dict[str, Any], read_only: bool = False) -> None:
        self.path = path
        self._content = content
        self._read_only = read_only

    @classmethod
    def open(cls, state_dir: str = STATE_DIR, read_only: bool = False) -> Journal:
        """Read the journal, or start an empty one; ``read_only`` (check mode) keeps all changes in memory.

        :raises JournalError: if the file is there but is not a journal this release can read.
        """
        path = Path(state_dir) / "journal.json"
        empty: dict[str, Any] = {"schema": SCHEMA, "run": None, "steps": [], "before": {}, "outcome": None}
        try:
            text = path.read_text()
        except FileNotFoundError:
            return cls(path, empty, read_only)
        except OSError as exc:
            raise JournalError(f"cannot read {path}: {exc.strerror}") from exc
        try:
            content = json.loads(text)
        except ValueError as exc:
            raise JournalError(
                f"{path} is damaged ({exc}); what the node was like before the upgrade is recorded only there. "
                f"Look at it, set the node right by hand, then move the file away"
            ) from exc
        if not isinstance(content, dict) or content.get("schema") != SCHEMA or not empty.keys() <= content.keys():
            found = content.get("schema") if isinstance(content, dict) else type(content).__name__
            raise JournalError(
                f"{path} has schema {found!r}, this release reads {SCHEMA}; "
                f"finish the run with the release that began it, or move the file away"
            )
        return cls(path, content, read_only)

    @property
    def run(self) -> Optional[Mapping[str, Any]]:
        """The run that owns the node: id, target, previous, begun (Unix seconds); None if none was begun."""
        return self._content["run"]

    @property
    def outcome(self) -> Optional[Mapping[str, Any]]:
        """How the run ended on this node: name, reason, next, at; None while it is unfinished."""
        return self._content["outcome"]

    @property
    def steps(self) -> list[Mapping[str, Any]]:
        return list(self._content["steps"])

    @property
    def unfinished(self) -> bool:
        return self.run is not None and self.outcome is None

    def as_dict(self) -> dict[str, Any]:
        return {**self._content, "unfinished": self.unfinished}

    def begin(self, run_id: str, target: str, previous: Optional[str], now: float) -> bool:
        """Begin a run, or go on with an unfinished one (which keeps what it knows of before). True if new."""
        if self.unfinished:
            if self._content["run"]["id"] != run_id:
                self._content["run"].setdefault("earlier_ids", []).append(self._content["run"]["id"])
                self._content["run"]["id"] = run_id
                self._content["run"]["target"] = target
                self._write()
            return False
        self._content.update(
            run={"id": run_id, "target": target, "previous": previous, "begun": now}, steps=[], before={}, outcome=None
        )
        self._write()
        return True

    def remember(self, kind: str, value: Any) -> bool:
        """Keep how something was before we touched it. The first write wins, so a re-run cannot overwrite the truth
        with what it has itself changed. True if it was written."""
        if kind in self._content["before"]:
            return False
        self._content["before"][kind] = value
        self._write()
        return True

    def before(self, kind: str) -> Any:
        """What :meth:`remember` kept, or None."""
        return self._content["before"].get(kind)

    def forget(self, kind: str) -> None:
        """Drop what was remembered, once it has been put back."""
        if self._content["before"].pop(kind, None) is not None:
            self._write()

    def start(self, step: str, now: float) -> None:
        """Announce a step before it is done."""
        self._content["steps"].append({"name": step, "state": "started", "at": now})
        self._write()

    def end(self, step: str, now: float, state: str = "done", **detail: Any) -> None:
        """Close the last entry of ``step`` with ``state`` done or failed."""
        for entry in reversed(self._content["steps"]):
            if entry["name"] == step and entry["state"] == "started":
                entry.update(state=state, ended=now, **({"detail": detail} if detail else {}))
                self._write()
                return
        raise JournalError(f"{self.path}: step {step!r} was never started")

    def last(self, step: str) -> Optional[Mapping[str, Any]]:
        """The latest entry of ``step``, or None."""
        return next((entry for entry in reversed(self._content["steps"]) if entry["name"] == step), None)

    def finish(self, outcome: str, reason: str, next_command: Optional[str], now: float) -> None:
        """Close the run on this node with one of :data:`OUTCOMES`."""
        self._content["outcome"] = {"name": outcome, "reason": reason, "next": next_command, "at": now}
        self._write()

    def _write(self) -> None:
        if self._read_only:
            return
        try:
            atomic_write(self.path, (json.dumps(self._content, indent=1, sort_keys=True) + "\n").encode())
        except OSError as exc:
            raise JournalError(f"cannot write {self.path}: {exc.strerror}; nothing was done") from exc
