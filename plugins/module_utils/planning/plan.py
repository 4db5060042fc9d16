# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which nodes are upgraded, in which groups and in which order.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from ..fleet import Node, Snapshot
from ..version import DriverVersion
from .policy import BadPolicy, Policy, batch_limits


@dataclass(frozen=True)
class Batch:
    name: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """Ordered batches; ``skipped`` holds the name of each node left out and why."""

    version: str
    batches: tuple[Batch, ...]
    skipped: tuple[tuple[str, str], ...]
    canary: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def order(self) -> tuple[str, ...]:
        return tuple(name for batch in self.batches for name in batch.nodes)

    @property
    def id(self) -> str:
        """The first twelve digits of the SHA-256 of version and batches: two plans with one id do the same."""
        text = json.dumps([self.version, [batch.nodes for batch in self.batches]], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "version": self.version,
            "batches": [{"name": batch.name, "nodes": list(batch.nodes)} for batch in self.batches],
            "serial": [len(batch.nodes) for batch in self.batches],
            "order": list(self.order),
            "skipped": [{"node": node, "reason": reason} for node, reason in self.skipped],
            "canary": list(self.canary),
            "notes": list(self.notes),
        }


def skip_reason(node: Node, version: str) -> str | None:
    """Why a node is left out, or None. A node that an interrupted upgrade left half way is never left out."""
    if node.skip:
        return node.skip
    if node.unfinished:
        return None
    if node.gpus < 1:
        return "no NVIDIA GPU"
    if node.cordoned_by:
        return f"cordoned by {node.cordoned_by}"
    if _same_version(node.loaded, version) and (node.installed is None or _same_version(node.installed, version)):
        return f"already on {version}"
    return None


def _same_version(text: str | None, version: str) -> bool:
    if text is None:
        return False
    try:
        return DriverVersion.parse(text) == DriverVersion.parse(version)
    except ValueError:
        return text == version


def make(snapshot: Snapshot, policy: Policy) -> Plan:
    """The plan for a fleet; the same snapshot and policy give the same plan.

    :raises BadPolicy: if the policy contradicts itself or the fleet.
    """
    skipped = tuple((node.name, reason) for node in snapshot.nodes if (reason := skip_reason(node, policy.version)))
    left_out = {name for name, _ in skipped}
    nodes = [node for node in snapshot.nodes if node.name not in left_out]
    unavailable = sum(not node.schedulable for node in snapshot.nodes if node.name in left_out)
    limits = batch_limits(policy, len(nodes), unavailable)
    groups = _groups(nodes, policy)
    chosen = _canaries(nodes, policy, dict(skipped))
    first = [group for group in groups if any(node.unfinished or node.name in chosen for node in group)]
    if not first and groups and policy.canary:
        first = _cheapest(groups, policy)
    rest = [group for group in groups if group not in first]
    batches = [Batch("canary", tuple(node.name for group in first for node in group))] if first else []
    for number, members in enumerate(_packed(rest, limits), start=1):
        batches.append(Batch(f"batch {number}", tuple(node.name for node in members)))
    return Plan(policy.version, tuple(batches), skipped, batches[0].nodes if first else ())


def _groups(nodes: list[Node], policy: Policy) -> list[list[Node]]:
    """Nodes that must share a batch: those of one domain that is kept together, else each node alone."""
    found: dict[tuple[str, str], list[Node]] = defaultdict(list)
    for node in nodes:
        kind = next((kind for kind in policy.keep_together if kind in node.domains), None)
        found[(kind, node.domains[kind]) if kind else ("", node.name)].append(node)
    return list(found.values())


def _canaries(nodes: list[Node], policy: Policy, skipped: dict[str, str]) -> tuple[str, ...]:
    if isinstance(policy.canary, int):
        return ()
    names = {node.name for node in nodes}
    for name in policy.canary:
        if name in skipped:
            raise BadPolicy(f"canary {name} is left out of this upgrade: {skipped[name]}")
        if name not in names:
            raise BadPolicy(f"canary {name} is not a node of this fleet")
    return policy.canary


def _cheapest(groups: list[list[Node]], policy: Policy) -> list[list[Node]]:
    """As many nodes as the policy wants, the smallest groups first, one of each GPU model before a second of any."""
    wanted = policy.canary if isinstance(policy.canary, int) else 1
    ranked = sorted(enumerate(groups), key=lambda item: (len(item[1]), item[0]))
    chosen: list[tuple[int, list[Node]]] = []
    models: set[str | None] = set()
    for new_model_only in (True, False):
        for place, group in ranked:
            if sum(len(each) for _, each in chosen) >= wanted:
                break
            if (place, group) in chosen or (new_model_only and group[0].gpu_model in models):
                continue
            chosen.append((place, group))
            models.add(group[0].gpu_model)
    return [group for _, group in chosen]


def _packed(groups: list[list[Node]], limits: Any) -> list[list[Node]]:
    batches: list[list[Node]] = []
    for group in groups:
        limit = limits[min(max(len(batches) - 1, 0), len(limits) - 1)]
        if batches and len(batches[-1]) + len(group) <= limit:
            batches[-1].extend(group)
            continue
        limit = limits[min(len(batches), len(limits) - 1)]
        if len(group) > limit:
            domain = ", ".join(f"{kind} {name}" for kind, name in sorted(group[0].domains.items()))
            raise BadPolicy(
                f"the {len(group)} nodes of {domain} are upgraded together and a batch holds {limit}: "
                "raise batch_size or max_unavailable, or allow the domain to be split with keep_together"
            )
        batches.append(list(group))
    return batches
