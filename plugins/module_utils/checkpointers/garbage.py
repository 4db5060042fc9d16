# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which saves may go: those past their expiry that nobody waits for.

A save is waited for until the work is proven to go on somewhere, or back at its source. The node that has the record of
it knows, so in a store that several nodes share, each removes only what it made itself.

Private to this collection: may change in any release.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers import artefact, suspend
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.common import (
    COMMITTED,
    COMMITTING,
    ENDING,
    FAILED,
    STARTING,
    UNLOCKING,
    UNPACKING,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.home import LEAVING, LEFT

_WAITING = {
    "checkpoints": {
        suspend.FROZEN: "stands still here",
        suspend.PUBLISHED: "stands still here",
        COMMITTING: "was ended here, and is not proven to go on elsewhere",
        COMMITTED: "was ended here, and is not proven to go on elsewhere",
    },
    "restores": {
        STARTING: "is coming back from it",
        UNLOCKING: "is coming back from it",
        UNPACKING: "is coming home with it",
        ENDING: "is not proven to have ended here",
        FAILED: "did not come back from it here",
        LEAVING: "is leaving with it",
        LEFT: "has left with it, and is not proven to be home",
    },
}


def records(state_dir: str | Path, side: str) -> list[dict[str, Any]]:
    """What is remembered of workloads on one side; of a damaged record its name, and that it is."""
    found: list[dict[str, Any]] = []
    for path in sorted(Path(state_dir, side).glob("*.json")):
        try:
            found.append(suspend.read_record(path))
        except ValueError as exc:
            found.append({"workload": path.stem, "state": "unknown", "msg": f"{path} is damaged: {exc}"})
    return found


def needed(state_dir: str | Path) -> dict[str, str]:
    """Saves that are waited for, by id, and why."""
    found = {}
    for side, states in _WAITING.items():
        for record in records(state_dir, side):
            why = states.get(str(record.get("state")))
            if why and record.get("artefact"):
                found[str(record["artefact"])] = f"{record['workload']} {why}"
    return found


def damaged(state_dir: str | Path) -> list[str]:
    """Workloads whose record cannot be read, so that nobody knows which save they wait for."""
    return [one["workload"] for side in _WAITING for one in records(state_dir, side) if one.get("state") == "unknown"]


def collect(
    store: str | Path, state_dir: str | Path, now: float, node: str, shared: bool, check: bool
) -> tuple[list[str], dict[str, str]]:
    """Remove what may go; the names removed, and what is past its expiry and stays, with the reason.

    :raises ArtefactError: if something cannot be removed.
    """
    unknown = damaged(state_dir)
    waited_for = needed(state_dir)
    removed, kept = [], {}
    for manifest in _expired(artefact.listing(store)[0], now):
        name = str(manifest["id"])
        if shared and manifest.get("node") != node:
            kept[name] = f"{manifest.get('node')} made it, and knows whether it is waited for"
        elif name in waited_for:
            kept[name] = waited_for[name]
        elif unknown:
            kept[name] = f"the record of {', '.join(unknown)} is damaged, so it may be waited for"
        else:
            removed.append(name)
    begun = [] if shared else artefact.leftovers(store, now)
    if not check:
        for name in removed:
            artefact.remove(store, name)
        for name in begun:
            artefact.remove_leftover(store, name)
    return removed + begun, kept


def _expired(manifests: Sequence[Mapping[str, Any]], now: float) -> list[Mapping[str, Any]]:
    return [one for one in manifests if isinstance(one.get("expires"), (int, float)) and one["expires"] < now]
