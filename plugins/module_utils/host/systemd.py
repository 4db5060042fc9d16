# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Units of the system's service manager: how they are, what belongs to them, and keeping them from being started.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from ansible_collections.gpufleet.driver.plugins.module_utils.execution import NOT_FOUND_RC, Completed, Runner
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import atomic_write, sync

PROPERTIES = (
    "Id",
    "Names",
    "LoadState",
    "ActiveState",
    "SubState",
    "Type",
    "Result",
    "UnitFileState",
    "TriggeredBy",
    "RequiredBy",
    "BoundBy",
    "ConsistsOf",
    "DropInPaths",
)

_NAME = re.compile(r"[A-Za-z0-9:_.\\@-]+\.(service|socket|path|timer|target|scope|slice|mount)")
_STARTABLE = ("service", "socket", "path", "timer")
_QUERY = 30.0


class SystemdError(Exception):
    """The service manager cannot be asked, or did not do what it was told; the text says what and what to do next."""


@dataclass(frozen=True)
class Unit:
    """One unit as ``systemctl show`` tells it. ``id`` is its true name; aliases are in ``names``."""

    id: str
    names: tuple[str, ...]
    load: str
    active: str
    sub: str
    type: str
    result: str
    file_state: str
    triggered_by: tuple[str, ...]
    dependents: tuple[str, ...]
    drop_ins: tuple[str, ...]

    @property
    def present(self) -> bool:
        return self.load not in ("not-found", "")

    @property
    def up(self) -> bool:
        """Running, starting, or between two attempts to start (``activating (auto-restart)``)."""
        return self.active in ("active", "activating", "reloading", "refreshing")

    @property
    def back(self) -> bool:
        """Started to the end; a oneshot that does not remain active is, once it has succeeded."""
        done = self.type == "oneshot" and self.active == "inactive" and self.result == "success"
        return self.active == "active" or done

    @property
    def kind(self) -> str:
        return _kind(self.id)

    def describe(self) -> str:
        failed = f", result {self.result}" if self.result not in ("", "success") else ""
        stuck = ": it was told to stop and has not ended, so it cannot be started either" if self.stopping else ""
        return f"{self.id} is {self.active} ({self.sub}{failed}){stuck}"

    @property
    def stopping(self) -> bool:
        """Told to stop and not ended; a start waits until it has, which its TimeoutStopSec may put off for ever."""
        return self.active == "deactivating"

    @property
    def next(self) -> str:
        """The command to type now if it is not as it should be."""
        return f"systemctl kill --signal=KILL {self.id}" if self.stopping else f"systemctl status {self.id}"


def parse_show(text: str) -> list[Unit]:
    """Units from ``systemctl show --property=... NAME...``: ``key=value`` lines, a blank line between units."""
    units = []
    for block in re.split(r"\n\s*\n", text.strip()):
        values = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if not values.get("Id"):
            continue
        dependents = " ".join(values.get(key, "") for key in ("RequiredBy", "BoundBy", "ConsistsOf")).split()
        units.append(
            Unit(
                id=values["Id"],
                names=tuple(values.get("Names", values["Id"]).split()),
                load=values.get("LoadState", ""),
                active=values.get("ActiveState", ""),
                sub=values.get("SubState", ""),
                type=values.get("Type", ""),
                result=values.get("Result", ""),
                file_state=values.get("UnitFileState", ""),
                triggered_by=tuple(values.get("TriggeredBy", "").split()),
                dependents=tuple(dict.fromkeys(dependents)),
                drop_ins=tuple(values.get("DropInPaths", "").split()),
            )
        )
    return units


def parse_list(text: str) -> list[str]:
    """Unit names from ``systemctl list-units --plain --no-legend``; older releases put a dot before failed ones."""
    rows = (line.split()[:2] for line in text.splitlines())
    return [name for row in rows for name in [next(filter(_NAME.fullmatch, row), None)] if name]


def unit_name(name: str) -> str:
    """``name`` as a full unit name; ``.service`` is added if it has no suffix.

    :raises SystemdError: if it cannot be the name of a unit (it becomes a path and an argument).
    """
    full = name if _NAME.fullmatch(name) else f"{name}.service"
    if name.startswith("-") or not _NAME.fullmatch(full):
        raise SystemdError(f"{name!r} is not the name of a systemd unit; expected something like trainer.service")
    return full


class Systemd:
    """The system's service manager, asked and told through ``run`` (see execution.run)."""

    def __init__(
        self,
        run: Runner,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._sleep = sleep
        self._monotonic = monotonic

    def show(self, names: Iterable[str]) -> dict[str, Unit]:
        """The units behind ``names`` by true name; a name nobody knows gives a unit that is not present."""
        wanted = list(dict.fromkeys(names))
        if not wanted:
            return {}
        done = self._run(["systemctl", "show", f"--property={','.join(PROPERTIES)}", "--", *wanted], timeout=_QUERY)
        self._check(done)
        return {unit.id: unit for unit in parse_show(done.stdout)}

    def matching(self, patterns: Sequence[str]) -> list[str]:
        """Names of loaded units that match shell patterns."""
        argv = ["systemctl", "list-units", "--all", "--plain", "--no-legend", "--full", "--no-pager", "--", *patterns]
        done = self._run(argv, timeout=_QUERY)
        self._check(done)
        return parse_list(done.stdout)

    def stop(self, unit: str, timeout: float) -> Completed:
        return self._run(["systemctl", "stop", "--", unit], timeout=timeout)

    def start(self, unit: str, timeout: float) -> Completed:
        """Start a unit; a target is only marked as reached, for starting all that it wants is not putting back."""
        alone = ["--job-mode=ignore-dependencies"] if unit.endswith(".target") else []
        return self._run(["systemctl", "start", *alone, "--", unit], timeout=timeout)

    def set_enabled(self, unit: str, enabled: bool) -> Completed:
        verb = "enable" if enabled else "disable"
        return self._run(["systemctl", verb, "--no-reload", "--", unit], timeout=_QUERY)

    def reload(self) -> None:
        self._check(self._run(["systemctl", "daemon-reload"], timeout=_QUERY * 4))

    def last_words(self, unit: str) -> str:
        """The last line a unit logged, for an error message; empty if it cannot be had."""
        argv = ["journalctl", f"--unit={unit}", "--lines=5", "--output=cat", "--no-pager", "--quiet"]
        lines = self._run(argv, timeout=_QUERY).stdout.strip().splitlines()
        return lines[-1] if lines else ""

    def wait_back(self, units: Sequence[str], timeout: float, twice: bool = True) -> list[Unit]:
        """Wait until all ``units`` are back; the ones that are not when time is up.

        ``twice`` looks again a second later: for a service that counts as started the moment it is forked, and then
        dies. Where something else proves that it works, one look is enough.
        """
        deadline = self._monotonic() + timeout
        steady = not twice
        while True:
            shown = self.show(units)
            late = [unit for unit in shown.values() if not unit.back]
            if not late and steady:
                return []
            steady = not late
            hopeless = late and all(unit.active in ("failed", "inactive") for unit in late)
            if hopeless or (late and self._monotonic() >= deadline):
                return late
            self._sleep(1.0)

    def _check(self, done: Completed) -> None:
        if done.rc == NOT_FOUND_RC:
            raise SystemdError("systemctl is not installed: services on this node cannot be stopped or started safely")
        if not done.ok:
            raise SystemdError(f"systemd does not answer ({done.describe()}); look at: systemctl is-system-running")


def with_followers(systemd: Systemd, names: Iterable[str]) -> tuple[dict[str, Unit], dict[str, int]]:
    """The units behind ``names`` and what systemd ties to them, each with its distance (0 for those named).

    Their triggers (sockets, paths, timers) would start them again; running units that require them, are bound to them
    or are part of them are stopped by systemd when they are, so they have to be started again too.
    """
    units = systemd.show(names)
    distance = dict.fromkeys(units, 0)
    frontier, step = dict(units), 0
    while frontier:
        step += 1
        triggers = {name for unit in frontier.values() for name in unit.triggered_by}
        dependents = {name for unit in frontier.values() if unit.up for name in unit.dependents}
        found = systemd.show(sorted((triggers | dependents) - units.keys()))
        frontier = {
            name: unit
            for name, unit in found.items()
            if name not in units
            and unit.kind in (*_STARTABLE, "target")
            and (unit.up or triggers.intersection(unit.names))
        }
        units.update(frontier)
        distance.update(dict.fromkeys(frontier, step))
    return units, distance


class Hold:
    """Keeps units from being started by anything: a trigger, a package's script, udev, a person.

    A drop-in gives the unit a condition that cannot be met, so a start is skipped and reported as done. Masking would
    make it fail instead, and would not reach a unit whose file lies in ``/etc/systemd/system``: that directory comes
    before ``/run/systemd/system``, where runtime masks are put. The condition names the drop-in itself, so
    ``systemctl status`` shows which file to remove, and removing it is enough.

    ``directory`` says how long: below ``/run`` until the next boot, below ``/etc`` until it is lifted.
    """

    FILE = "zz-gpufleet-hold.conf"

    def __init__(self, directory: Path, reason: str) -> None:
        self.directory = directory
        self.reason = reason

    def held(self) -> list[str]:
        """Names of the units on hold."""
        return sorted(path.parent.name[: -len(".d")] for path in self.directory.glob(f"*.d/{self.FILE}"))

    def missing(self, units: Iterable[str]) -> list[str]:
        """Those of ``units`` that can be held and are not; a file that was cut off holds nothing."""
        return [unit for unit in units if _kind(unit) in _STARTABLE and not self._holds(unit)]

    def loaded(self, unit: Unit) -> bool:
        """Whether the service manager knows of the hold on a unit that exists; if not, it needs a daemon-reload."""
        return not unit.present or str(self._path(unit.id)) in unit.drop_ins

    def place(self, units: Iterable[str]) -> list[str]:
        """Put units on hold, whether they exist or not, also through a power cut; the ones that were not yet."""
        new = self.missing(units)
        for unit in new:
            path = self._path(unit)
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            text = f"# {self.reason}\n# Removing this file lets the unit start again.\n{self._condition(unit)}"
            atomic_write(path, text.encode(), 0o644)
            sync(path.parent.parent)
        return new

    def lift(self) -> list[str]:
        """Let all units go; the ones that were held. They can be started at once; a daemon-reload only tidies up."""
        held = self.held()
        for unit in held:
            path = self._path(unit)
            path.unlink(missing_ok=True)
            try:
                path.parent.rmdir()
            except OSError:
                continue  # somebody else's drop-ins are in there too
        return held

    def _path(self, unit: str) -> Path:
        return self.directory / f"{unit}.d" / self.FILE

    def _condition(self, unit: str) -> str:
        return f"[Unit]\nConditionPathExists=!{self._path(unit)}\n"

    def _holds(self, unit: str) -> bool:
        try:
            return self._path(unit).read_text(errors="replace").endswith(self._condition(unit))
        except FileNotFoundError:
            return False


def in_order(distance: Mapping[str, int], named: Sequence[str]) -> list[str]:
    """Units in the order to start them: sockets first, for a socket does not start once its service runs; then the
    named ones as named, what follows from them, nearest first, targets, paths and timers."""
    rank = {"socket": -1, "target": 1, "path": 2, "timer": 2}
    position = {name: index for index, name in enumerate(named)}
    return sorted(
        distance,
        key=lambda name: (rank.get(_kind(name), 0), distance[name], position.get(name, len(named)), name),
    )


def to_stop(order: Sequence[str]) -> list[str]:
    """The reverse of :func:`in_order`, but all triggers first, for one that fires in vain too often fails."""
    triggers = [name for name in order if _kind(name) in ("socket", "path", "timer")]
    return [*reversed(triggers), *(name for name in reversed(order) if name not in triggers)]


def _kind(name: str) -> str:
    return name.rpartition(".")[2]
