# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Swap the driver of an empty node in one go: which act follows which, and what happens when one does not do.

What can be refused or fetched comes before anything is disturbed. Every act may be run again and tells the journal
before it begins, so a swap that was cut off between two acts, or in one, is gone on with by running it once more.
A reboot is not an act: the swap ends where one is needed, and the same swap after it does what is left.

Nothing here knows how an act is done; the module driver_swap binds them to a node.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Callable, TypeVar

AUTO, NEVER, ALWAYS = "auto", "never", "always"
"""Whether a reboot may take the place of unloading the old driver."""

PREPARE, SAVE, STOP, UNLOAD, PACKAGES, LOAD, RESTORE, START = (
    "prepare",
    "save settings",
    "stop services",
    "unload",
    "packages",
    "load",
    "restore settings",
    "start services",
)
"""The acts, in this order."""


@dataclass(frozen=True)
class Done:
    """What an act did: ``result`` as its own module would return it, ``error`` if it did not do what it should."""

    changed: bool = False
    result: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    reboot_required: bool = False


@dataclass(frozen=True)
class Prepared(Done):
    """What the swap leads to: the driver version ``to`` (empty: the one that is there), and whether packages move."""

    to: str = ""
    moves: bool = False


class Failed(Exception):
    """An act did not do what it should; ``done`` is how far it came."""

    def __init__(self, done: Done) -> None:
        super().__init__(done.error)
        self.done = done


@dataclass(frozen=True)
class Acts:
    """The acts, bound to one node. ``packages`` is told whether another version may stay loaded meanwhile; ``loaded``
    is the version in the kernel, or None. An act returns its error or raises :class:`Failed`."""

    prepare: Callable[[], Prepared]
    save: Callable[[], Done]
    stop: Callable[[], Done]
    unload: Callable[[], Done]
    packages: Callable[[bool], Done]
    load: Callable[[], Done]
    restore: Callable[[], Done]
    start: Callable[[], Done]
    loaded: Callable[[], str | None]


Ended = TypeVar("Ended", bound=Done)


class Swap:
    """One swap. ``act`` is the act under way, ``to`` the version it leads to once that is known."""

    def __init__(
        self, acts: Acts, reboot: str, check: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.acts = acts
        self.reboot = reboot
        self.check = check
        self.clock = clock
        self.act = PREPARE
        self.to = ""
        self._report: list[dict[str, Any]] = []

    def run(self) -> bool:
        """Do what is left of the swap; whether the node has to reboot, and this to run again, before it is done.

        :raises Failed: if an act did not do what it should. The acts before it are not undone, but for one case: if the
            driver cannot be unloaded, it stays, and what was stopped for the swap is started again.
        """
        prepared = self._do(PREPARE, self.acts.prepare)
        self.to = prepared.to
        if (prepared.moves or self._other_driver()) and self._change():
            return True
        self._put_back()
        return False

    def as_dict(self) -> dict[str, Any]:
        """What was done so far, for the result of a module."""
        report = [{**line, "result": {k: v for k, v in line["result"].items() if k != "diff"}} for line in self._report]
        return {
            "changed": any(line["changed"] for line in report),
            "version": self.to,
            "acts": report,
            "findings": [finding for line in report for finding in line["result"].get("findings", ())],
            "diff": [
                {"before_header": line["act"], "after_header": line["act"], **line["result"]["diff"]}
                for line in self._report
                if line["changed"] and line["result"].get("diff")
            ],
        }

    def _other_driver(self) -> bool:
        return bool(self.to) and self.acts.loaded() not in (None, self.to)

    def _change(self) -> bool:
        """From the driver at work to the packages of the new one; whether the old one is still loaded then."""
        self._do(SAVE, self.acts.save)
        self._do(STOP, self.acts.stop)
        stays = self.reboot == ALWAYS
        if not stays:
            try:
                unloaded = self._do(UNLOAD, self.acts.unload, reboot_helps=self.reboot == AUTO)
            except Failed:
                self._put_back()
                self.act = UNLOAD
                raise
            stays = unloaded.error is not None
        self._do(PACKAGES, lambda: self.acts.packages(stays or self.check))
        return stays or (not self.check and self._other_driver())

    def _put_back(self) -> None:
        """Have whichever driver is there now at work as before."""
        self._do(LOAD, self.acts.load)
        self._do(RESTORE, self.acts.restore)
        self._do(START, self.acts.start)

    def _do(self, name: str, act: Callable[[], Ended], reboot_helps: bool = False) -> Ended:
        """``reboot_helps`` lets an error pass that a reboot will cure."""
        self.act = name
        began = self.clock()
        done = act()
        seconds = round(self.clock() - began, 3)
        if done.error is not None and not (reboot_helps and done.reboot_required):
            raise Failed(done)
        self._report.append({"act": name, "changed": done.changed, "seconds": seconds, "result": dict(done.result)})
        return done
