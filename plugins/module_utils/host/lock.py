# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One upgrade at a time: a lease in a file on one host that all controllers of a fleet agree on.

Private to this collection: may change in any release.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils import statefile

FILE, SCHEMA = "lock.json", 1


class LockError(Exception):
    """The lock is not to be had; the text says who has it and how to take it over."""


@dataclass(frozen=True)
class Lease:
    """Who holds the fleet. Times are Unix seconds: taken, last renewed, and when it runs out."""

    run_id: str
    holder: str
    since: float
    renewed: float
    expires: float

    def describe(self) -> str:
        return f"run {self.run_id} by {self.holder} since {_time(self.since)}, valid until {_time(self.expires)}"


@dataclass(frozen=True)
class Change:
    """What a call did, or in check mode would do, to the lock."""

    before: Lease | None
    after: Lease | None
    warnings: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        return self.before != self.after


def decide(
    held: Lease | None, run_id: str, holder: str | None, ttl: float, takeover: str | None, now: float
) -> tuple[Lease, tuple[str, ...]]:
    """The lease ``run_id`` gets for ``ttl`` seconds, and what to warn about. A renewal without ``holder`` keeps it.

    :raises LockError: if another run holds it and it is neither run out nor taken over by its id.
    """
    new = Lease(run_id, holder or "unknown", now, now, now + ttl)
    if held is None:
        return new, ()
    if held.run_id == run_id:
        return Lease(run_id, holder or held.holder, held.since, now, now + ttl), ()
    if takeover == held.run_id:
        return new, (f"took the fleet over from {held.describe()}",)
    if held.expires <= now:
        return new, (
            f"the fleet's lock had run out: it was held by {held.describe()}. "
            f"That run has died or lost its controller; look at its nodes before you trust them",
        )
    named = f"gpu_lock_takeover names {takeover}, but the fleet" if takeover else "the fleet"
    raise LockError(
        f"{named} is locked by {held.describe()}. Let it finish, or, if you are sure that it no longer runs, "
        f"take over with: -e gpu_lock_takeover={held.run_id}"
    )


def acquire(
    state_dir: str,
    run_id: str,
    holder: str | None,
    ttl: float,
    now: float,
    takeover: str | None = None,
    check: bool = False,
) -> Change:
    """Take the lock, or renew it if ``run_id`` holds it already.

    :raises LockError: as :func:`decide`.
    :raises StateFileError: if the file cannot be read, locked or written.
    """
    path = Path(state_dir) / FILE
    with ExitStack() as stack:
        content, save = (
            (statefile.read(path, SCHEMA), None) if check else stack.enter_context(statefile.locked(path, SCHEMA))
        )
        before = _lease(content, path)
        after, warnings = decide(before, run_id, holder, ttl, takeover, now)
        if save:
            save(asdict(after))
    return Change(before, after, warnings)


def release(state_dir: str, run_id: str, check: bool = False) -> Change:
    """Give the lock back; nothing happens if nobody holds it or another run does.

    :raises StateFileError: if the file cannot be read, locked or written.
    """
    path = Path(state_dir) / FILE
    if check or not path.exists():
        return _released(_lease(statefile.read(path, SCHEMA), path), run_id)
    with statefile.locked(path, SCHEMA) as (content, save):
        change = _released(_lease(content, path), run_id)
        if change.changed:
            save({})
    return change


def _released(before: Lease | None, run_id: str) -> Change:
    if before is None or before.run_id == run_id:
        return Change(before, None)
    return Change(before, before, (f"not released: the fleet is locked by {before.describe()}",))


def _lease(content: Mapping[str, Any], path: Path) -> Lease | None:
    if not content:
        return None
    try:
        return Lease(
            str(content["run_id"]),
            str(content["holder"]),
            float(content["since"]),
            float(content["renewed"]),
            float(content["expires"]),
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise statefile.StateFileError(
            f"{path} does not say who holds the fleet ({type(exc).__name__}: {exc}); make sure that no upgrade runs, "
            f"then move it away: mv {path} {path}.bad"
        ) from exc


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%SZ")
