# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Work whose members run on several nodes: all of them saved, or none, and then all go on.

All members pass their check before any is stopped. A node that stops answering fails the gang; the timer on it lets its
members go on, as nobody can be sure that an order to do so arrived.

Private to this collection: may change in any release.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable

from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.base import SOURCE_RUNNING, Reason
from ansible_collections.gpufleet.driver.plugins.module_utils.checkpointers.moving import NodeLost

Call = Callable[[str, Mapping[str, Any], bool], Mapping[str, Any]]
"""Node, options of ``workload_checkpoint``, whether only to look → its result, also if it failed. Raises
:class:`NodeLost`."""

_MODULE = "gpufleet.driver.checkpoint_info"


@dataclass(frozen=True)
class Member:
    """One member: its node, and its workload as it is declared there."""

    node: str
    workload: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.workload["name"])


def capture(
    members: Sequence[Member], call: Call, options: Mapping[str, Any], say: Callable[[str], None], only_look: bool
) -> list[dict[str, Any]]:
    """Save all members or none; what became of each, in the order given: what ``workload_checkpoint`` says of it, and
    ``node``. If any is not ``ok``, none is."""
    looked = _ask(members, call, {**options, "state": "captured"}, True)
    if only_look or not all(one["ok"] for one in looked):
        return looked if all(one["ok"] for one in looked) else [_none(one, looked) for one in looked]
    done: list[dict[str, Any]] = []
    for node in _nodes(members):
        say(f"{node}: saving {', '.join(one.name for one in members if one.node == node)}")
        done += _ask([one for one in members if one.node == node], call, {**options, "state": "captured"}, False)
        if not all(one["ok"] for one in done):
            break
    results = {(one["node"], one["workload"]): one for one in done}
    if len(done) == len(members) and all(one["ok"] for one in done):
        return [results[(one.node, one.name)] for one in members]
    begun = [one for one in members if (one.node, one.name) in results]
    for told in _ask(begun, call, {**options, "state": "aborted"}, False):
        key = (told["node"], told["workload"])
        say(f"{told['workload']} on {told['node']}: {told['source']}")
        results[key] = {**results[key], "source": told["source"], "changed": True}
        if not told["ok"] and results[key]["ok"]:
            results[key].update(ok=False, reason=told["reason"], msg=told["msg"])
    told_of = [
        results.get((one.node, one.name)) or next(row for row in looked if row["workload"] == one.name)
        for one in members
    ]
    return [_none(one, told_of) for one in told_of]


def _nodes(members: Sequence[Member]) -> list[str]:
    return list(dict.fromkeys(one.node for one in members))


def _none(one: Mapping[str, Any], everybody: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A member of a gang that was not saved: with its own reason, or with whose it is."""
    if not one["ok"]:
        return dict(one)
    failed = next((other for other in everybody if not other["ok"]), None)
    why = f"{failed['workload']} on {failed['node']} was not saved" if failed else "its gang was not saved"
    return {**one, "ok": False, "msg": f"{one['workload']} on {one['node']}: {one['source']}, as {why}"}


def _ask(members: Sequence[Member], call: Call, options: Mapping[str, Any], only_look: bool) -> list[dict[str, Any]]:
    """``workload_checkpoint`` on every node about its members; a node that does not answer has said no."""
    found: list[dict[str, Any]] = []
    for node in _nodes(members):
        its = [one for one in members if one.node == node]
        try:
            told = call(node, {**options, "node": node, "workloads": [dict(one.workload) for one in its]}, only_look)
            rows = {row["workload"]: row for row in told.get("workloads") or ()}
            if set(rows) != {one.name for one in its}:
                raise NodeLost(str(told.get("msg") or "no answer"))
            found += [{**rows[one.name], "node": node} for one in its]
        except NodeLost as exc:
            observed = f"{node} does not answer ({exc}); a timer on it lets its work go on"
            look = f"ansible {node} -b -m {_MODULE}"
            for one in its:
                reason = Reason("lost_source", "gang", observed, "an answer", look, SOURCE_RUNNING, one.name, node)
                found.append(
                    {
                        "workload": one.name,
                        "node": node,
                        "ok": False,
                        "changed": False,
                        "source": "unknown",
                        "reason": reason.as_dict(),
                        "msg": str(reason),
                    }
                )
    return found
