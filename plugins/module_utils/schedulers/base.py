# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a scheduler is asked for: what runs where, and to empty nodes, take them out of service and put them back.

A scheduler is one file beside this one with a subclass of :class:`Scheduler`, named in registry.py. Everything takes
and gives many nodes at once, so that a system with a central API is asked with few, concurrent requests.

Private to this collection: may change in any release.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils.fleet import (
    MOVE,
    WAIT,
    Demand,
    Durations,
    Member,
    Node,
    Snapshot,
    Workload,
)


class SchedulerError(Exception):
    """Nothing can be done for any node; the text says what was found, expected and to be done next."""


@dataclass(frozen=True)
class Mark:
    """What is left with a node that is taken out of service, so that any later run knows whose doing it was."""

    run_id: str
    at: float
    """Unix seconds."""


@dataclass(frozen=True)
class State:
    """Whether a node is out of service, and the run that took it out if it was one of ours."""

    cordoned: bool
    ours: bool = False
    run_id: str | None = None

    def describe(self) -> str:
        if not self.cordoned:
            return "in service"
        return (
            f"out of service, taken out by run {self.run_id}" if self.ours else "out of service, not by this collection"
        )


@dataclass(frozen=True)
class NodeResult:
    """What became of one node. ``before`` and ``after`` are its states around the call; in check mode ``after`` is
    foretold. ``failed`` says that it is not as it should be, and ``msg`` why and what to do next."""

    before: State | None
    after: State | None
    changed: bool = False
    failed: bool = False
    msg: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "cordoned": self.after.cordoned if self.after else None,
            "ours": self.after.ours if self.after else False,
            "before": asdict(self.before) if self.before else None,
            "changed": self.changed,
            "failed": self.failed,
            "msg": self.msg,
        }


FATES = ("move", "cold_start", "wait", "stay", "blocked")


@dataclass(frozen=True)
class Fate:
    """What becomes of one workload by the plan: ``move`` or ``cold_start`` (on nodes ``to``), ``wait`` or ``stay``."""

    workload: str
    fate: str
    to: tuple[str, ...] = ()

    @classmethod
    def of(cls, item: Mapping[str, Any]) -> Fate:
        """From the JSON form of a plan (``batches[].workloads[]`` of the module ``upgrade_plan``).

        :raises ValueError: if it is none.
        """
        workload, fate, to = (item.get(key) for key in ("workload", "fate", "to"))
        if not workload or fate not in FATES or not isinstance(to or [], list):
            raise ValueError(
                f"{dict(item)} is no fate; expected workload, fate ({', '.join(FATES)}) and to, as in a plan"
            )
        return cls(str(workload), str(fate), tuple(map(str, to or ())))


@dataclass(frozen=True)
class End:
    """What became of one workload on a node: ``ended`` by itself, ``requeued``, ``evicted``, ``stopped`` or ``left``
    where it was; ``reason`` says why, with what was seen."""

    workload: str
    how: str
    reason: str = ""


@dataclass(frozen=True)
class Evacuated:
    """How far one node is emptied. ``waiting`` tells what is still on it and what is waited for; an empty one is done.

    ``failed`` says that waiting longer is of no use, and ``msg`` why and what to do next.
    """

    ends: tuple[End, ...] = ()
    waiting: tuple[str, ...] = ()
    changed: bool = False
    failed: bool = False
    msg: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "empty": not self.waiting and not self.failed,
            "workloads": [asdict(end) for end in self.ends],
            "waiting": list(self.waiting),
            "changed": self.changed,
            "failed": self.failed,
            "msg": self.msg,
        }


class Scheduler(ABC):
    """Who places work on nodes. One node's trouble is in its own result; :class:`SchedulerError` is for all of them.

    A node that was out of service before us is foreign: it is neither marked nor, later, put back into service.
    Every call can be repeated: it finishes what an interrupted one has begun.
    """

    @abstractmethod
    def snapshot(self, names: Sequence[str]) -> Snapshot:
        """The fleet as the scheduler sees it: every node it has, also those not in ``names``, and the work on them."""

    def addresses(self) -> dict[str, str]:
        """Where nodes are reached, for those whose name does not say it."""
        return {}

    @abstractmethod
    def cordon(self, nodes: Sequence[str], mark: Mark, check: bool = False) -> dict[str, NodeResult]:
        """Take ``nodes`` out of service for new work, leaving ``mark``; with ``check``, only say what would change."""

    @abstractmethod
    def evacuate(
        self,
        nodes: Sequence[str],
        mark: Mark,
        fates: Sequence[Fate],
        deadline: float,
        patience: float,
        check: bool = False,
    ) -> dict[str, Evacuated]:
        """Empty cordoned ``nodes`` as ``fates`` say, for at most ``patience`` seconds: who calls repeats, and shows
        what is waited for in between. From ``deadline`` (Unix seconds) on, work that may not be taken away fails its
        node. A workload without a fate is waited for.
        """

    @abstractmethod
    def validate(
        self, nodes: Sequence[str], mark: Mark, gpus: Mapping[str, int], timeout: float, check: bool = False
    ) -> dict[str, NodeResult]:
        """Prove with the scheduler's own means, within ``timeout`` seconds, that cordoned ``nodes`` can work: it sees
        the number of ``gpus`` given, and its work runs there, while they stay closed to everybody else's."""

    @abstractmethod
    def uncordon(self, nodes: Sequence[str], mark: Mark, check: bool = False) -> dict[str, NodeResult]:
        """Put those of ``nodes`` back into service that this collection took out, under whatever run id."""

    @abstractmethod
    def settle(self, mark: Mark, check: bool = False) -> list[str]:
        """At the end of a run, take away what it left besides marks (constraints on moved work, reservations, taints);
        one line for each thing taken away."""

    def doubtful(self) -> list[str]:
        """What may be left of a run that died, or may be somebody else's doing: one line for each thing, with the
        command that takes it away."""
        return []


def with_host_facts(snapshot: Snapshot, hosts: Sequence[Mapping[str, Any]], scheduler: str) -> Snapshot:
    """The scheduler's view corrected by what the nodes say of themselves (``gpu_node`` of the role ``preflight``).

    The kernel's word on the loaded driver and the GPUs counts more than a label. A node that did not answer for itself
    is no node to upgrade, and a host that the scheduler does not know cannot be emptied by it: both are skipped, with
    the reason. GPU models go by the hosts' names, also on nodes that are skipped and in the queue. Work that the hosts
    have and the scheduler did not place is added. Without ``hosts`` the snapshot is returned as it is.
    """
    if not hosts:
        return snapshot
    said = {str(host["name"]): host for host in hosts}
    told = {node.name: _told(node, said[node.name]) for node in snapshot.nodes if node.name in said}
    called = _model_names(snapshot.nodes, told)
    nodes = [
        told[node.name]
        if node.name in told
        else replace(
            node,
            skip=node.skip or "not among the hosts of this run",
            gpu_model=_one(called.get(node.gpu_model or "")) or node.gpu_model,
        )
        for node in snapshot.nodes
    ]
    work = _work_of(hosts, {workload.name for workload in snapshot.workloads})
    known = {node.name for node in snapshot.nodes}
    nodes += [
        replace(_told(Node(name), host), skip=f"{scheduler} knows no node of that name")
        for name, host in said.items()
        if name not in known
    ]
    return replace(
        snapshot,
        nodes=tuple(_with_room(nodes, work) if scheduler == "hosts" else nodes),
        workloads=(*snapshot.workloads, *work),
        durations=_measured(hosts) or snapshot.durations,
        queue=_queue_by(called, snapshot.queue),
    )


def _work_of(hosts: Sequence[Mapping[str, Any]], known: Collection[str]) -> list[Workload]:
    """The work that runs on hosts (``work`` of each, as the module ``host_workloads`` lists it), as ``NODE/NAME``.

    A GPU that several have open counts once. What is only waited for is taken to end when that time is over.
    """
    found = []
    for host in hosts:
        node, taken = str(host["name"]), set[int]()
        for work in host.get("work") or ():
            name = _printable(f"{node}/{work['name']}")
            if work["state"] != "running" or name in known:
                continue
            gpus = set(work["gpus"]) - taken
            taken |= gpus
            may = frozenset(work["may"])
            found.append(
                Workload(
                    name,
                    (Member(node, {"gpu": len(gpus)} if gpus else {}),),
                    kind=work["kind"],
                    may=may,
                    backends=("host",) if MOVE in may else (),
                    remaining=work["wait"] if may == {WAIT} else None,
                    stays_home=True,
                    stand_in=work.get("elsewhere"),
                )
            )
    return found


def _with_room(nodes: Sequence[Node], work: Sequence[Workload]) -> list[Node]:
    """The nodes of plain machines to upgrade, with the GPUs on which nothing computes as free."""
    used = Counter[str]()
    for each in work:
        for member in each.members:
            used[member.node] += member.resources.get("gpu", 0)
    return [node if node.skip else replace(node, free={"gpu": node.gpus - used[node.name]}) for node in nodes]


def _printable(text: str) -> str:
    """A name that may come from any process, fit to be shown."""
    return "".join(each if each.isprintable() else "?" for each in text)


def _model_names(nodes: Sequence[Node], told: Mapping[str, Node]) -> dict[str, Counter[str]]:
    """What the hosts call each GPU model of the scheduler (an empty name if it has none), with their GPUs."""
    called: dict[str, Counter[str]] = {}
    for node in nodes:
        if node.name in told and (model := told[node.name].gpu_model):
            called.setdefault(node.gpu_model or "", Counter())[model] += node.gpus or 1
    return called


def _one(names: Counter[str] | None) -> str | None:
    """The name, if there is no other: a type such as ``a100`` may stand for cards that differ."""
    return next(iter(names)) if names and len(names) == 1 else None


def _queue_by(called: Mapping[str, Counter[str]], queue: Mapping[str, Demand]) -> dict[str, Demand]:
    """The queue by the hosts' names; what may run on several models waits for the one with most GPUs, and what nobody
    can tell is left out."""
    found: dict[str, Demand] = {}
    for model, demand in queue.items():
        name = called[model].most_common(1)[0][0] if model in called else model
        if name:
            found[name] = found[name].and_also(demand) if name in found else demand
    return found


def _measured(hosts: Sequence[Mapping[str, Any]]) -> Durations | None:
    """The medians of what the last upgrades of these nodes took (``durations`` of each); None if there were none."""
    known = [host["durations"] for host in hosts if host.get("durations")]
    if not known:
        return None
    return Durations(
        *(median(float(one[step]) for one in known) for step in ("evacuate", "install", "validate", "reboot"))
    )


def _told(node: Node, host: Mapping[str, Any]) -> Node:
    models = [str(model) for model in host.get("gpus") or ()]
    domain = host.get("domain")
    return replace(
        node,
        gpu_model=" + ".join(sorted(set(models))) or node.gpu_model,
        gpus=len(models) or node.gpus,
        loaded=host.get("loaded") or node.loaded,
        installed=host.get("installed") or node.installed,
        domains={**({"nvlink": str(domain)} if domain else {}), **node.domains},
        skip=host.get("skip") or node.skip,
        unfinished=bool(host.get("unfinished")),
    )
