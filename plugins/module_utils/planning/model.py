# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A snapshot and a policy prepared for planning: nodes and workloads by number, what each fate costs, what fits where.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf
from operator import attrgetter

from ..fleet import MOVE, PROTECT, RESTART, WAIT, Member, Node, Resources, Snapshot, Workload
from ..version import DriverVersion
from .compatibility import saves_itself
from .placement import Classes, Need, Needs, columns, shape_of
from .policy import Policy

SPARE_WEIGHT = 0.25
"""What an idle GPU counts for if no work of its model queues: capacity withheld, though nobody misses it yet."""


class Kind:
    """What workloads have in common that differ only in size, times and places: what may be done to them, and the
    classes of nodes where they may be restored or started.

    One that ``saves_itself`` may move to an upgraded node, and goes on from its save wherever it starts: it loses no
    more than the time for that. ``frozen_by`` names a budget that allows no disruption.
    """

    def __init__(
        self, workload: Workload, classes: Classes, homes: tuple[int, ...], budgets: Mapping[str, int]
    ) -> None:
        may = workload.may
        self.movable = MOVE in may and bool(workload.backends)
        self.saves_itself = self.movable and saves_itself(workload.backends)
        self.waitable = WAIT in may or not may - {PROTECT}
        self.restartable = RESTART in may
        self.budgets = workload.budgets
        self.frozen_by = next((name for name in reversed(workload.budgets) if budgets[name] == 0), None)
        if self.frozen_by:
            self.movable = self.restartable = False
        self.together = workload.together
        self.spread = workload.spread
        self.stays_home = workload.stays_home
        shapes = [shape_of(workload, classes.sample[home]) for home in homes]
        self.shape = shapes[0]
        self.restorable = frozenset.intersection(*map(classes.restorable, shapes))
        self.startable = frozenset.intersection(*map(classes.startable, shapes))
        if workload.stays_home:
            self.startable = frozenset()


class Item:
    """A workload, or one member of a workload that is no gang: what gets one fate.

    ``end`` is the time at which it ends by itself (``inf`` if unknown), ``pause`` the seconds a move takes, ``again``
    those it takes to do again what a cold start loses, ``cold`` the GPU-seconds a cold start loses in all, ``early``
    those it loses if its node's turn comes while it runs, ``idle`` its GPUs weighed as idle ones are: those it keeps
    from standing idle.
    """

    __slots__ = (
        "again",
        "cold",
        "early",
        "end",
        "gpus",
        "idle",
        "kind",
        "name",
        "needs",
        "nodes",
        "pause",
        "workload",
    )

    def __init__(
        self, name: str, workload: Workload, needs: Needs, nodes: tuple[int, ...], kind: Kind, weight: float
    ) -> None:
        self.name = name
        self.workload = workload
        self.needs = needs
        self.nodes = nodes
        self.kind = kind
        self.gpus = gpus = needs[0].gpus if len(needs) == 1 else sum([need.gpus for need in needs])
        self.idle = gpus * weight
        self.end = inf if workload.remaining is None else workload.remaining
        self.pause = pause = workload.capture + workload.restore
        self.again = again = min(workload.at_risk, pause) if kind.saves_itself else workload.at_risk
        self.cold = self.early = gpus * (workload.start_cost + again)
        if not kind.restartable:
            self.early = gpus * (pause if kind.movable else 1e6)


class Model:
    """What :mod:`.plan` and :mod:`.forecast` work on.

    ``upgraded``, ``kept`` and ``moving`` partition the node numbers: on the target version already, left out but able
    to take work, and to be upgraded; nodes in none of them are left out and take no work. ``slot`` is the seconds a
    batch takes that does not wait; a forecast varies it, while what a batch is ``expected`` to take stays. ``gangs``
    are the items of several members. ``apart`` has of nodes the items with a stand-in, at home or there: two nodes of
    one item are not upgraded at the same time.
    """

    def __init__(self, snapshot: Snapshot, policy: Policy, skipped: dict[str, str]) -> None:
        self.snapshot = snapshot
        self.policy = policy
        self.nodes = snapshot.nodes
        self.number = {node.name: index for index, node in enumerate(snapshot.nodes)}
        self.slot = max(1.0, snapshot.durations.swap + snapshot.durations.evacuate)
        self.swap = snapshot.durations.swap
        self.expected = self.slot
        self.moving = [index for index, node in enumerate(self.nodes) if node.name not in skipped]
        takes_work = [
            index
            for index, node in enumerate(self.nodes)
            if node.name in skipped and node.schedulable and not node.cordoned_by and node.gpus
        ]
        self.upgraded = [index for index in takes_work if same_version(self.nodes[index].loaded, policy.version)]
        self.kept = [index for index in takes_work if index not in set(self.upgraded)]
        labels = {label for workload in snapshot.workloads for label in workload.requires}
        self.classes = Classes(self.nodes, labels, policy.waive)
        wanted = {model for model, demand in snapshot.queue.items() if demand.gpus or demand.arrivals_per_hour}
        self.idle_weight = [1.0 if node.gpu_model in wanted else SPARE_WEIGHT for node in self.nodes]
        refill = {model: demand.duration for model, demand in snapshot.queue.items()}
        short = {model: demand.shortest or demand.duration for model, demand in snapshot.queue.items()}
        self.gap = [short.get(node.gpu_model or "", 0.0) / 2 for node in self.nodes]
        self.refill = [refill.get(node.gpu_model or "", 0.0) for node in self.nodes]
        self.items: list[Item] = []
        self.gangs: list[int] = []
        self.residents: list[list[int]] = [[] for dummy in self.nodes]
        self.apart: dict[int, list[int]] = {}
        self._alone: list[tuple[int, ...]] = [(index,) for index in range(len(self.nodes))]
        self._columns = columns()
        self._needs: dict[tuple[object, ...], Needs] = {}
        self._kinds: dict[tuple[object, ...], Kind] = {}
        for workload in snapshot.workloads:
            if workload.members:
                self._add(workload)
        self.free = [[node.free.get(name, 0) for name in self._columns] for node in self.nodes]
        order = sorted(range(len(self.items)), key=[-item.cold for item in self.items].__getitem__)
        order.sort(key=[-item.gpus for item in self.items].__getitem__)
        order.sort(key=[-item.workload.priority for item in self.items].__getitem__)
        self.rank = [0] * len(order)
        for rank, index in enumerate(order):
            self.rank[index] = rank

    def _add(self, workload: Workload) -> None:
        members = workload.members
        if workload.gang or len(members) == 1:
            self._add_item(workload.name, workload, members)
            return
        for index, member in enumerate(members):
            self._add_item(f"{workload.name}/{index}", workload, (member,))

    def _add_item(self, name: str, workload: Workload, members: tuple[Member, ...]) -> None:
        number, index = self.number, len(self.items)
        if len(members) == 1:
            nodes = self._alone[number[members[0].node]]
            needs = self._need(members[0].resources)
        else:
            nodes = tuple([number[member.node] for member in members])
            needs = tuple([self._need(member.resources)[0] for member in members])
            self.gangs.append(index)
        item = Item(name, workload, needs, nodes, self._kind(workload, nodes), self.idle_weight[nodes[0]])
        if workload.stand_in in number:
            for node in (nodes[0], number[workload.stand_in]):
                self.apart.setdefault(node, []).append(index)
        for node in nodes if len(nodes) == 1 else dict.fromkeys(nodes):
            self.residents[node].append(index)
        self.items.append(item)

    def _need(self, resources: Resources) -> Needs:
        key = (*resources, *resources.values())
        found = self._needs.get(key)
        if found is None:
            found = self._needs[key] = (Need(resources, self._columns),)
        return found

    def _kind(self, workload: Workload, nodes: tuple[int, ...]) -> Kind:
        of = self.classes.of
        homes = (of[nodes[0]],) if len(nodes) == 1 else tuple(dict.fromkeys([of[node] for node in nodes]))
        key = (
            homes,
            id(workload.facts),
            tuple(sorted(workload.requires.items())) if workload.requires else (),
            workload.tolerates,
            workload.backends,
            workload.may,
            workload.budgets,
            workload.together,
            workload.spread,
            workload.stays_home,
        )
        found = self._kinds.get(key)
        if found is None:
            found = self._kinds[key] = Kind(workload, self.classes, homes, self.snapshot.budgets)
        return found


_NUMBER = re.compile(r"([0-9]+)")


def in_order(snapshot: Snapshot) -> Snapshot:
    """The snapshot with nodes and workloads by name: a plan does not depend on who listed them, and in what order.
    Numbers in the names of nodes count as such."""
    nodes = sorted(snapshot.nodes, key=lambda node: _by_number(node.name))
    return replace(snapshot, nodes=tuple(nodes), workloads=tuple(sorted(snapshot.workloads, key=attrgetter("name"))))


def _by_number(name: str) -> tuple[list[tuple[str, tuple[int, str]]], str]:
    """Sorts n2 before n10."""
    parts = _NUMBER.split(name)
    numbers = [part.lstrip("0") for part in parts[1::2]]
    return [*zip(parts[::2], [*((len(number), number) for number in numbers), (0, "")])], name


def out_of_service(node: Node) -> bool:
    """Whether a machine with GPUs takes no work."""
    return node.gpus > 0 and not (node.schedulable and node.cordoned_by is None)


def is_due(node: Node) -> bool:
    """Whether a node to upgrade comes first: an interrupted upgrade left it half way, or it is out of service anyway
    and would use up ``max_unavailable`` until its turn."""
    return node.unfinished or out_of_service(node)


def joined(nodes: Sequence[Node], kinds: Collection[str], numbers: Iterable[int]) -> list[list[int]]:
    """The node ``numbers`` by their domains of these ``kinds``, in the order of each one's first node; a node that is
    in two domains joins them."""
    parent: dict[tuple[str, str], tuple[str, str]] = {}

    def root(domain: tuple[str, str]) -> tuple[str, str]:
        while parent[domain] != domain:
            domain = parent[domain]
        return domain

    homes: list[tuple[int, tuple[str, str] | None]] = []
    for index in numbers:
        here = [domain for domain in nodes[index].domains.items() if domain[0] in kinds]
        for domain in here:
            parent.setdefault(domain, domain)
            parent[root(domain)] = root(here[0])
        homes.append((index, here[0] if here else None))
    found: dict[object, list[int]] = {}
    for index, home in homes:
        found.setdefault(index if home is None else root(home), []).append(index)
    return list(found.values())


def skip_reason(node: Node, policy: Policy) -> str | None:
    """Why a node is left out, or None. A node that an interrupted upgrade left half way is never left out."""
    if node.skip:
        return node.skip
    if node.unfinished:
        return None
    if node.gpus < 1:
        return "no NVIDIA GPU"
    if policy.gpu_models and node.gpu_model not in policy.gpu_models:
        return f"GPU {node.gpu_model} is not among the models to upgrade"
    if node.gpu_model in policy.unsupported:
        return f"{policy.version} does not support the GPU {node.gpu_model}"
    if node.cordoned_by:
        return f"cordoned by {node.cordoned_by}"
    version = policy.version
    if same_version(node.loaded, version) and (node.installed is None or same_version(node.installed, version)):
        return f"already on {version}"
    return None


@lru_cache(maxsize=1024)
def same_version(text: str | None, version: str) -> bool:
    """Whether two driver versions are equal; texts that are no driver versions are compared as they are."""
    if text is None or text == version:
        return text == version
    try:
        return DriverVersion.parse(text) == DriverVersion.parse(version)
    except ValueError:
        return False


def without(snapshot: Snapshot, reasons: dict[str, str]) -> Snapshot:
    """The snapshot with further nodes marked as left out."""
    nodes = tuple(
        replace(node, skip=reasons[node.name], unfinished=False) if node.name in reasons else node
        for node in snapshot.nodes
    )
    return replace(snapshot, nodes=nodes)
