# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The gate before each batch: may the upgrade go on?

Ansible's own brakes do not hold for unreachable hosts, nor for failures that were rescued (ansible/ansible#56265), so
the decision is made here, from what is known of every node.

Private to this collection: may change in any release.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import inf
from typing import Any
from zoneinfo import ZoneInfo

from .policy import BadPolicy, Window, next_window

GOOD = frozenset({"upgraded", "already"})
"""Outcomes that count as success; every other outcome counts against the budget."""
SKIPPED = "skipped"
"""Outcome of a node that was left out when its turn came: no success and no failure."""
OUT_OF_SERVICE = frozenset({"quarantined", "lost"})
"""Outcomes after which a node does no work."""


@dataclass(frozen=True)
class Gate:
    """``open`` says whether the next batch may start; ``reasons`` says why not, in whole sentences."""

    open: bool
    failed: tuple[str, ...]
    reasons: tuple[str, ...]


def decide(
    outcomes: Mapping[str, str],
    lost: Collection[str],
    *,
    max_failed: int,
    now: float,
    not_after: float | None = None,
    windows: Sequence[Window] = (),
    batch_seconds: float = 0.0,
    stop_requested: str | None = None,
    doubts: Sequence[str] = (),
    objections: Collection[str] = (),
) -> Gate:
    """:param outcomes: node → outcome, of every node whose turn has come; nodes still to come are absent
    :param lost: nodes that Ansible dropped from the play, whatever their outcome says, unless it was skipped
    :param max_failed: how many nodes may fail before the run stops
    :param now: Unix time; ``not_after`` (end of the maintenance window) likewise
    :param batch_seconds: how long the batch is expected to take: it must end by ``not_after`` and in one of ``windows``
    :param stop_requested: what asked for a stop, for example the path of a stop file
    :param doubts: why the plan no longer holds for the next batch
    :param objections: further reasons to stop, such as :func:`lock_objections`
    """
    skipped = {node for node, outcome in outcomes.items() if outcome == SKIPPED}
    failed = tuple(sorted((set(lost) | {node for node, outcome in outcomes.items() if outcome not in GOOD}) - skipped))
    reasons = []
    if len(failed) > max_failed:
        told = ", ".join(
            f"{node} ({'lost' if node in lost else outcomes[node].replace('_', ' ')})" for node in failed[:10]
        )
        more = f" and {len(failed) - 10} more" if len(failed) > 10 else ""
        reasons.append(f"{len(failed)} failed, at most {max_failed} may: {told}{more}")
    if not_after is not None and now + batch_seconds > not_after:
        left = max(0, round(not_after - now))
        reasons.append(f"the maintenance window ends in {left} s and a batch takes {round(batch_seconds)} s")
    if windows:
        reasons.extend(_closed(windows, now, batch_seconds))
    if stop_requested:
        reasons.append(f"a stop was asked for by {stop_requested}")
    if doubts:
        reasons.append(f"the plan no longer holds, run again to plan anew: {'; '.join(doubts)}")
    reasons.extend(objections)
    return Gate(not reasons, failed, tuple(reasons))


def doubts_of(review: Mapping[str, Any] | None) -> list[str]:
    """Why the plan no longer holds, of the review by ``upgrade_plan``; anything but a clear yes is a doubt."""
    if review is None or review.get("safe") is True:
        return []
    reasons = review.get("reasons") or "its review does not say that it does"
    return [reasons] if isinstance(reasons, str) else [str(reason) for reason in reasons]


def check(options: Mapping[str, Any]) -> None:
    """Refuse numbers and answers with which nothing can be decided.

    :raises BadPolicy: naming the option.
    """
    for name in ("not_after", "batch_seconds", "max_failed"):
        if not 0 <= options[name] < inf:
            raise BadPolicy(f"{name} {options[name]} is not a number of 0 or more")
    for node, outcome in options["outcomes"].items():
        if not isinstance(outcome, str):
            raise BadPolicy(f"outcomes.{node} {outcome!r} is no outcome, such as upgraded")
    for node, answer in options["lock_answers"].items():
        if not isinstance(answer, Mapping) or not isinstance(answer.get("lock") or {}, Mapping):
            raise BadPolicy(f"lock_answers.{node} {answer!r} is no result of fleet_lock")


def _closed(windows: Sequence[Window], now: float, batch_seconds: float) -> list[str]:
    minutes = -(-batch_seconds // 60)
    found = next_window(windows, now, batch_seconds)
    if found is None:
        return [f"a batch takes {minutes:.0f} minutes and no maintenance window is that long"]
    if found[0] <= now:
        return []
    opens = datetime.fromtimestamp(found[0], ZoneInfo(windows[0].tz)).isoformat(sep=" ", timespec="minutes")
    return [f"no maintenance window has {minutes:.0f} minutes left for a batch, run again when the next opens: {opens}"]


def lock_objections(run_id: str, keepers: Collection[str], answers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Why ``run_id`` does not have the fleet; empty if it has.

    It has the fleet if most of the keepers that answer give it the lock, and these are at least half of all, so that no
    two runs can have it at once and a lost keeper keeps nobody out (of two keepers, the one that answers is enough). No
    other node may belong to another run. A run that is known on any node to have ended counts nowhere.

    :param keepers: the nodes that every controller of the fleet asks
    :param answers: node → result of the module fleet_lock, of the keepers and of any other node of the run: ``lock``
        (the lease there, with its run_id), ``ended`` (ids of runs), ``msg``; without ``lock`` if it did not answer
    """
    ended = {each for answer in answers.values() for each in answer.get("ended", ())} - {run_id}

    def owner(node: str) -> str | None:
        lease = answers.get(node, {}).get("lock") or {}
        return None if lease.get("run_id") in ended else lease.get("run_id")

    others = {node: found for node in answers if (found := owner(node)) not in (None, run_id)}
    ours = [node for node in keepers if owner(node) == run_id]
    against = [node for node in keepers if node in others]
    if len(ours) > len(against) and 2 * len(ours) >= len(keepers):
        refusals = {node: answers[node]["msg"] for node in others if node not in keepers}
    else:
        refusals = {node: answers.get(node, {}).get("msg") or "gave no answer" for node in keepers if node not in ours}
    told: dict[str, list[str]] = {}  # by the run that has the node: what is said of it differs by a second or two
    for node, text in refusals.items():
        told.setdefault(others.get(node) or str(text), []).append(node)
    return [f"{', '.join(nodes[:10])}: {refusals[nodes[0]]}" for nodes in told.values()]
