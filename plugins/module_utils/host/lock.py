# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One upgrade at a time: what one node knows of the lock of the fleet.

A lease in a file says which run has the node, and until when. Beside it stand the runs that are known to have ended: a
run that says so on one node has ended everywhere, so a lease that it could not give back, on a node that was lost, does
not count. Whether a run has the whole fleet is decided from the answers of several nodes (planning/gate.py).

Private to this collection: may change in any release.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Callable

from ansible_collections.gpufleet.driver.plugins.module_utils import statefile

FILE, SCHEMA = "lock.json", 1
KEPT = 50
"""How many ended runs are remembered."""


class LockError(Exception):
    """The lock is not to be had; the text says who has it and how to take it over."""

    def __init__(self, message: str, knows: Lock) -> None:
        super().__init__(message)
        self.knows = knows


@dataclass(frozen=True)
class Clock:
    """The time on one node: Unix seconds, which somebody may set, and seconds since a boot, which nobody can."""

    now: float
    uptime: float
    boot_id: str

    @classmethod
    def read(cls, proc: str = "/proc") -> Clock:
        try:
            boot_id = (Path(proc) / "sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            boot_id = ""
        return cls(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME), boot_id)


@dataclass(frozen=True)
class Lease:
    """Who has the node. Times are Unix seconds of the node's own clock: taken, last renewed, and when it runs out.

    While the node is up, ``uptime`` (seconds since the boot ``boot_id``) says when it runs out, whatever becomes of the
    clock.
    """

    run_id: str
    holder: str
    since: float
    renewed: float
    expires: float
    boot_id: str
    uptime: float

    def expired(self, clock: Clock) -> bool:
        if clock.boot_id and clock.boot_id == self.boot_id:
            return self.uptime <= clock.uptime
        return self.expires <= clock.now

    def describe(self) -> str:
        return f"run {self.run_id} by {self.holder} since {_time(self.since)}, valid until {_time(self.expires)}"


@dataclass(frozen=True)
class Lock:
    """What the file says: the lease, if the node is not free, and the ids of runs that have ended, the latest last."""

    lease: Lease | None = None
    ended: tuple[str, ...] = ()

    def with_ended(self, run_id: str) -> Lock:
        return Lock(self.lease, (*(each for each in self.ended if each != run_id), run_id)[-KEPT:])


@dataclass(frozen=True)
class Change:
    """What a call did, or in check mode would do, to the lock."""

    before: Lock
    after: Lock
    warnings: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        return self.before != self.after


def decide(
    knows: Lock,
    run_id: str,
    holder: str | None,
    ttl: float,
    takeover: str | None,
    clock: Clock,
    elsewhere: Collection[str] = (),
) -> tuple[Lock, tuple[str, ...]]:
    """The lock once ``run_id`` has it for ``ttl`` seconds, and what to warn about. Without ``holder`` that stays.

    ``elsewhere`` are runs that another node knows to have ended.

    :raises LockError: if another run has it that is neither ended, nor run out, nor taken over by its id.
    """
    held, ended = knows.lease, tuple(each for each in knows.ended if each != run_id)
    ours = held is not None and held.run_id == run_id
    lease = Lease(
        run_id,
        holder or (held.holder if held and ours else "unknown"),
        held.since if held and ours else clock.now,
        clock.now,
        clock.now + ttl,
        clock.boot_id,
        clock.uptime + ttl,
    )
    new = Lock(lease, ended)
    if held is None or ours or held.run_id in ended:
        return new, ()
    if held.run_id in elsewhere:
        return new.with_ended(held.run_id), ()
    if takeover == held.run_id:
        return new.with_ended(held.run_id), (f"took the fleet over from {held.describe()}",)
    if held.expired(clock):
        return new.with_ended(held.run_id), (
            f"the fleet's lock had run out: it was held by {held.describe()}. "
            f"That run has died or lost its controller; look at its nodes before you trust them",
        )
    named = f"gpu_lock_takeover names {takeover}, but the fleet" if takeover else "the fleet"
    raise LockError(
        f"{named} is locked by {held.describe()}. Let it finish, or, if you are sure that it no longer runs, "
        f"take over with: -e gpu_lock_takeover={held.run_id}",
        knows,
    )


def decide_renewal(knows: Lock, run_id: str, ttl: float, clock: Clock) -> Lock:
    """The lock once the lease of ``run_id`` is good for ``ttl`` seconds again, also if it had run out meanwhile.

    :raises LockError: if this run does not have it: somebody took over.
    """
    if knows.lease is None or knows.lease.run_id != run_id:
        now = f"it is locked by {knows.lease.describe()}" if knows.lease else "it is free"
        raise LockError(f"run {run_id} no longer has the fleet: {now}", knows)
    return decide(knows, run_id, None, ttl, None, clock)[0]


def look(state_dir: str, clock: Clock) -> Lock:
    """What the node knows, with a lease only if that still counts here.

    :raises StateFileError: if the file cannot be read.
    """
    path = Path(state_dir) / FILE
    knows = _lock(statefile.read(path, SCHEMA), path)
    held = knows.lease
    return Lock(None, knows.ended) if held and (held.expired(clock) or held.run_id in knows.ended) else knows


def acquire(
    state_dir: str,
    run_id: str,
    holder: str | None,
    ttl: float,
    clock: Clock,
    takeover: str | None = None,
    elsewhere: Collection[str] = (),
    check: bool = False,
) -> Change:
    """Take the lock, or renew it if ``run_id`` holds it already.

    :raises LockError: as :func:`decide`.
    :raises StateFileError: if the file cannot be read, locked or written.
    """
    return _change(state_dir, check, lambda knows: decide(knows, run_id, holder, ttl, takeover, clock, elsewhere))


def renew(state_dir: str, run_id: str, ttl: float, clock: Clock, check: bool = False) -> Change:
    """Keep the lock for longer.

    :raises LockError: as :func:`decide_renewal`.
    :raises StateFileError: if the file cannot be read, locked or written.
    """
    return _change(state_dir, check, lambda knows: (decide_renewal(knows, run_id, ttl, clock), ()))


def _change(state_dir: str, check: bool, decision: Callable[[Lock], tuple[Lock, tuple[str, ...]]]) -> Change:
    path = Path(state_dir) / FILE
    with ExitStack() as stack:
        content, save = (
            (statefile.read(path, SCHEMA), None) if check else stack.enter_context(statefile.locked(path, SCHEMA))
        )
        before = _lock(content, path)
        after, warnings = decision(before)
        if save:
            save(_content(after))
    return Change(before, after, warnings)


def release(state_dir: str, run_id: str, check: bool = False) -> Change:
    """Give the lock back and note that the run has ended. Another run's lease is left alone; a file is not made for it.

    :raises StateFileError: if the file cannot be read, locked or written.
    """
    path = Path(state_dir) / FILE
    if check or not path.exists():
        return _released(_lock(statefile.read(path, SCHEMA), path), run_id)
    with statefile.locked(path, SCHEMA) as (content, save):
        change = _released(_lock(content, path), run_id)
        if change.changed:
            save(_content(change.after))
    return change


def _released(before: Lock, run_id: str) -> Change:
    held = before.lease
    if held is None or held.run_id == run_id:
        return Change(before, Lock(None, before.ended).with_ended(run_id) if held else before)
    return Change(before, before, (f"not released: the fleet is locked by {held.describe()}",))


def _content(lock: Lock) -> dict[str, Any]:
    return {"lease": asdict(lock.lease) if lock.lease else None, "ended": list(lock.ended)}


def _lock(content: Mapping[str, Any], path: Path) -> Lock:
    if not content:
        return Lock()
    try:
        found, ended = content["lease"], content["ended"]
        if not isinstance(ended, list):
            raise TypeError(f"ended is {ended!r}")
        return Lock(_lease(found) if found else None, tuple(str(each) for each in ended))
    except (KeyError, TypeError, ValueError) as exc:
        raise statefile.StateFileError(
            f"{path} does not say who holds the fleet ({type(exc).__name__}: {exc}); make sure that no upgrade runs, "
            f"then move it away: mv {path} {path}.bad"
        ) from exc


def _lease(found: Mapping[str, Any]) -> Lease:
    times = {name: float(found[name]) for name in ("since", "renewed", "expires", "uptime")}
    return Lease(str(found["run_id"]), str(found["holder"]), boot_id=str(found["boot_id"]), **times)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%SZ")
