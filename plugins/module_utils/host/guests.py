# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Work of another node that runs here while that node is upgraded.

Who runs here for whom is kept in a file on this node, written before the work is started, so an interrupted run can be
gone on with, and only what was started for another node is ever stopped for it. The same work never runs on two nodes:
whoever calls stops it there first, and here before it is started there again.

Private to this collection: may change in any release.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable

from ansible_collections.gpufleet.driver.plugins.module_utils import statefile
from ansible_collections.gpufleet.driver.plugins.module_utils.host.workloads import (
    Workload,
    Workloads,
    WorkloadsError,
    record,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import QUARANTINED

FILE, SCHEMA = "guests.json", 1
_KEPT = ("name", "unit", "container", "engine", "stop_timeout", "ready_timeout", "come_back")


class Guests:
    """The guests of this node. ``origin`` is always the name of the node whose work it is."""

    def __init__(self, node: Workloads, state_dir: str, now: Callable[[], float]) -> None:
        self.node = node
        self.path = Path(state_dir) / FILE
        self.now = now

    def take_in(self, work: Sequence[Workload], origin: str, check: bool = False) -> dict[str, Any]:
        """Start ``work`` of ``origin`` here, and prove it ready.

        :raises WorkloadsError: if this node cannot have it, with nothing started; or if it did not come up.
        """
        journal, here = self.node.journal, self._guests()
        outcome = (journal.outcome or {}).get("name")
        if journal.unfinished or outcome == QUARANTINED:
            state = "in quarantine" if outcome == QUARANTINED else "in the middle of an upgrade of its own"
            raise WorkloadsError(f"this node cannot take in work of {origin}: it is {state}")
        started = []
        for one in work:
            found, known = self.node.find(one), _key(origin, one.name) in here
            if not found.present:
                what = f"unit {one.unit}" if one.unit else f"container {one.container}"
                raise WorkloadsError(f"{one.name} of {origin} cannot run here: there is no {what} on this node")
            if found.running and not known:
                raise WorkloadsError(
                    f"{one.name} of {origin} cannot run here: it runs here already, and not for {origin}; "
                    f"stop it here, or leave out elsewhere"
                )
            if not found.running:
                started.append(one.name)
        result = {"changed": bool(started), "started": started}
        if check:
            return result
        for one in work:
            self._note(_key(origin, one.name), {**{key: getattr(one, key) for key in _KEPT}, "since": self.now()})
            found = self.node.find(one)
            up = record(found)
            up.update(running=True, units=[unit.id for unit in found.units[:1]], policy=None)
            trouble = self.node.bring_up(up)
            if trouble:
                raise WorkloadsError(f"{one.name} of {origin} did not come up here: {trouble}", result)
        return result

    def send_home(self, origin: str, check: bool = False) -> dict[str, Any]:
        """Stop here what runs for ``origin``, but for what is to stay: its names are in ``kept``.

        :raises WorkloadsError: if something does not stop; it is still a guest then.
        """
        stopped, kept = [], []
        for key, guest in sorted(self._guests().items()):
            if not key.startswith(_key(origin, "")):
                continue
            work = Workload(**{name: guest[name] for name in _KEPT})
            found = self.node.find(work)
            if found.running and not work.come_back:
                kept.append(work.name)
                continue
            stopped.append(work.name)
            if not check:
                self.node.take_down(found)
                self._note(key, None)
        return {"changed": bool(stopped), "stopped": stopped, "kept": kept}

    def _guests(self) -> dict[str, Any]:
        return dict(statefile.read(self.path, SCHEMA).get("guests", {}))

    def _note(self, key: str, guest: dict[str, Any] | None) -> None:
        with statefile.locked(self.path, SCHEMA) as (content, save):
            guests = {name: kept for name, kept in content.get("guests", {}).items() if name != key}
            save({"guests": {**guests, **({key: guest} if guest else {})}})


def _key(origin: str, name: str) -> str:
    return f"{origin}/{name}"
