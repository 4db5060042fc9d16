# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A cluster's lists as a snapshot of the fleet: its GPU nodes, and the work on them that uses these GPUs.

Private to this collection: may change in any release.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils.fleet import (
    WAIT,
    Demand,
    Facts,
    Member,
    Node,
    Resources,
    Snapshot,
    Workload,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import kubernetes_objects as objects
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.kubernetes_facts import workload_facts

Object = Mapping[str, Any]


@dataclass(frozen=True)
class Cluster:
    """The lists a snapshot is made from, each as the API server gave it."""

    nodes: Sequence[Object]
    pods: Sequence[Object] = ()
    budgets: Sequence[Object] = ()
    claims: Sequence[Object] = ()
    slices: Sequence[Object] = ()


_DOMAINS = {
    "zone": ("topology.kubernetes.io/zone",),
    "rack": ("topology.kubernetes.io/rack",),
    "nvlink": ("nvidia.com/gpu.clique",),
    "nodepool": ("cloud.google.com/gke-nodepool", "eks.amazonaws.com/nodegroup", "agentpool", "karpenter.sh/nodepool"),
}
_NODE_FACTS = {
    "architecture": "architecture",
    "kernel": "kernelVersion",
    "runtime": "containerRuntimeVersion",
}
_TIMES = ("at_risk", "start_cost", "capture", "restore")
"""Fields of a workload that an annotation of its pod can give."""

_CPU_FEATURE = "feature.node.kubernetes.io/cpu-cpuid."


def snapshot(cluster: Cluster, rules: objects.Rules, now: float, taken_at: str | None = None) -> Snapshot:
    """The fleet: nodes with GPUs of NVIDIA's, and the work on them that uses these GPUs. ``now`` is Unix seconds."""
    return _Fleet(cluster, rules, now).snapshot(taken_at)


@dataclass(frozen=True)
class _Member:
    """A pod of a workload, and what it holds."""

    pod: Object
    owner: objects.Owner
    held: Resources


class _Fleet:
    def __init__(self, cluster: Cluster, rules: objects.Rules, now: float) -> None:
        self.rules = rules
        self.now = now
        self.holders = objects.claim_holders(cluster.claims)
        self.users = objects.known_users(self.holders, rules.holders)
        self.budgets = objects.Budgets(cluster.budgets)
        self.slices = objects.slices_of(cluster.slices)
        self.known = {node["metadata"]["name"]: node for node in cluster.nodes if _has_gpus(node, self.slices)}
        self.taints = {
            objects.taint_text(taint): taint
            for node in self.known.values()
            for taint in node["spec"].get("taints") or ()
            if objects.repels(taint)
        }
        self.used: dict[str, dict[str, int]] = {name: {} for name in self.known}
        self.started: dict[str, float] = {}
        self.queue: dict[str, float] = defaultdict(float)
        self.members: dict[str, list[_Member]] = {}
        self._requires: dict[str, dict[str, tuple[str, ...]]] = {}
        self._tolerates: dict[str, tuple[str, ...]] = {}
        self._facts: dict[tuple[Any, ...], Facts] = {}
        for pod in cluster.pods:
            self._see(pod)

    def _see(self, pod: Object) -> None:
        spec = pod["spec"]
        node = spec.get("nodeName")
        if node is None:
            self._queued(pod)
            return
        used = self.used.get(node)
        if used is None or objects.is_over(pod):
            return
        held = objects.requests_of(spec)
        gpus = self.holders.get(pod["metadata"].get("uid", ""), 0)
        if gpus:
            held["gpu"] = held.get("gpu", 0) + gpus
        objects.add(used, held)
        if objects.is_driver(pod):
            started = objects.driver_started(pod)
            if started is not None:
                self.started[node] = max(started, self.started.get(node, 0.0))
        use = objects.gpu_use(pod, self.users)
        if use is None or objects.is_operand(pod):
            return
        owner = objects.owner_of(pod)
        if self.rules.ignores(pod, owner):
            return
        if owner.kind == "DaemonSet" or (owner.kind == "StaticPod" and use.startswith(objects.MAY_USE)):
            return
        self.members.setdefault(objects.workload_name(pod, owner), []).append(_Member(pod, owner, held))

    def _queued(self, pod: Object) -> None:
        if (pod.get("status") or {}).get("phase") != "Pending":
            return
        gpus = objects.requests_of(pod["spec"]).get("gpu", 0)
        if gpus:
            self.queue[(pod["spec"].get("nodeSelector") or {}).get("nvidia.com/gpu.product", "")] += gpus

    def snapshot(self, taken_at: str | None) -> Snapshot:
        workloads = tuple([self._workload(name, members) for name, members in self.members.items()])
        wanted = {label for workload in workloads for label in workload.requires}
        nodes = tuple([self._node(node, wanted) for node in self.known.values()])
        models = {node.gpu_model for node in nodes if node.gpu_model}
        only = next(iter(models)) if len(models) == 1 else ""
        queue: dict[str, float] = defaultdict(float)
        for model, gpus in self.queue.items():
            if model or only:
                queue[model or only] += gpus
        used = {budget for workload in workloads for budget in workload.budgets}
        return Snapshot(
            nodes=nodes,
            workloads=workloads,
            taken_at=taken_at,
            budgets={name: self._allowance(name) for name in sorted(used)},
            queue={model: Demand(gpus=gpus) for model, gpus in sorted(queue.items())},
        )

    def _allowance(self, budget: str) -> int:
        return self.budgets.allowance.get(budget, 0)

    def _node(self, node: Object, wanted: Iterable[str]) -> Node:
        meta, spec, status = node["metadata"], node["spec"], node.get("status") or {}
        name, labels = meta["name"], meta.get("labels") or {}
        slices = self.slices.get(name, objects.Slices())
        room = objects.resources(status.get("allocatable"))
        gpus = room.get("gpu", 0) or slices.gpus
        if slices.gpus and not room.get("gpu"):
            room["gpu"] = slices.gpus
        used = self.used[name]
        free = {key: max(0, amount - used.get(key, 0)) for key, amount in room.items()}
        mark = objects.mark_of(node)
        out = bool(spec.get("unschedulable"))
        ready = objects.is_ready(node)
        count = labels.get("nvidia.com/gpu.count", "")
        return Node(
            name=name,
            gpu_model=labels.get("nvidia.com/gpu.product") or slices.model,
            gpus=gpus or (int(count) if count.isdigit() else 0),
            loaded=objects.label_version(node, self.started.get(name)) or slices.driver,
            free=free,
            schedulable=ready and not out,
            cordoned_by=objects.cordoned_by(node) if out and not mark else None,
            domains=_domains(labels, self.rules.domains),
            labels={label: labels[label] for label in wanted if label in labels},
            taints=tuple(objects.taint_text(taint) for taint in spec.get("taints") or () if objects.repels(taint)),
            facts=_node_facts(status.get("nodeInfo") or {}, labels),
            skip=None if ready else "not Ready",
            unfinished=mark is not None,
        )

    def _workload(self, name: str, members: Sequence[_Member]) -> Workload:
        pod, owner = members[0].pod, members[0].owner
        may = objects.permissions(pod, owner, self.rules)
        for member in members[1:]:
            may = may & objects.permissions(member.pod, member.owner, self.rules) or frozenset((WAIT,))
        if all("deletionTimestamp" in member.pod["metadata"] for member in members):
            may = frozenset((WAIT,))
        left = [objects.remaining(member.pod, self.now) for member in members]
        known = [value for value in left if value is not None]
        budgets: dict[str, None] = {}
        for member in members:
            over = self.budgets.over(member.pod)
            budgets.update(dict.fromkeys(over if len(over) < 2 else [" + ".join(over)]))
        workload = Workload(
            name=name,
            members=tuple([Member(member.pod["spec"]["nodeName"], member.held) for member in members]),
            kind="pod" if not owner.gang else owner.kind,
            owner=f"{owner.kind}/{owner.name}",
            may=may,
            backends=objects.words(pod, "checkpointers"),
            facts=self._facts_of(pod),
            remaining=max(known) if known and len(known) == len(left) else None,
            priority=pod["spec"].get("priority") or 0,
            budgets=tuple(budgets),
            requires=self._required(pod["spec"]),
            tolerates=self._tolerated(pod["spec"].get("tolerations") or ()),
        )
        times = {each: objects.seconds(pod, each.replace("_", "-")) for each in _TIMES}
        given: dict[str, Any] = {each: value for each, value in times.items() if value is not None}
        return replace(workload, **given) if given else workload

    def _facts_of(self, pod: Object) -> Facts:
        """Pods of one template have the same facts: each distinct one is looked at once."""
        key = (
            tuple(
                (c.get("image"), str(c.get("command")), str(c.get("args")), str(c.get("env")))
                for c in pod["spec"].get("containers") or ()
            ),
            tuple(each.get("imageID") for each in (pod.get("status") or {}).get("containerStatuses") or ()),
            str(pod["metadata"].get("labels")) + str(pod["metadata"].get("annotations"))
            if self.rules.expressions
            else "",
        )
        if key not in self._facts:
            self._facts[key] = workload_facts(pod, self.rules.expressions)
        return self._facts[key]

    def _required(self, spec: Object) -> dict[str, tuple[str, ...]]:
        """Where its node selector and affinity let it run: as labels where these can say it, else as node names."""
        selector = {k: v for k, v in (spec.get("nodeSelector") or {}).items() if not k.startswith(objects.STEERED)}
        terms = objects.affinity_terms(spec)
        if terms is None:
            return {key: (value,) for key, value in selector.items()}
        key = f"{sorted(selector.items())}{terms}"
        if key not in self._requires:
            names = [name for name, node in self.known.items() if objects.affine(selector, terms, node)]
            self._requires[key] = (
                {} if len(names) == len(self.known) else {"kubernetes.io/hostname": self._hosts(names)}
            )
        return self._requires[key]

    def _hosts(self, names: Iterable[str]) -> tuple[str, ...]:
        found = [(self.known[name]["metadata"].get("labels") or {}).get("kubernetes.io/hostname") for name in names]
        return tuple(sorted(each for each in found if each))

    def _tolerated(self, tolerations: Sequence[Object]) -> tuple[str, ...]:
        if not self.taints:
            return ()
        key = str(tolerations)
        if key not in self._tolerates:
            self._tolerates[key] = tuple(
                text for text, taint in self.taints.items() if objects.tolerates(tolerations, taint)
            )
        return self._tolerates[key]


def _has_gpus(node: Object, slices: Mapping[str, objects.Slices]) -> bool:
    labels = node["metadata"].get("labels") or {}
    if labels.get("nvidia.com/gpu.present") == "true" or "nvidia.com/gpu.product" in labels:
        return True
    capacity = (node.get("status") or {}).get("capacity") or {}
    return node["metadata"]["name"] in slices or any(objects.is_gpu_resource(name) for name in capacity)


def _domains(labels: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    wanted: dict[str, Sequence[str]] = {**_DOMAINS, **{kind: (label,) for kind, label in given.items()}}
    found = {kind: next((labels[name] for name in names if labels.get(name)), None) for kind, names in wanted.items()}
    return {kind: value for kind, value in found.items() if value}


def _node_facts(info: Object, labels: Mapping[str, str]) -> Facts:
    facts: dict[str, Any] = {name: info[key] for name, key in _NODE_FACTS.items() if info.get(key)}
    memory = labels.get("nvidia.com/gpu.memory", "")
    if memory.isdigit():
        facts["gpu_memory"] = int(memory) << 20
    layout = labels.get("nvidia.com/mig.config", "all-disabled")
    split = any(name.startswith("nvidia.com/mig-") and name.endswith(".count") for name in labels)
    if "nvidia.com/gpu.product" in labels:
        facts["mig"] = "off" if layout == "all-disabled" and not split else layout
        facts["mps"] = "on" if labels.get("nvidia.com/gpu.sharing-strategy") == "mps" else "off"
    features = tuple(sorted(name[len(_CPU_FEATURE) :] for name in labels if name.startswith(_CPU_FEATURE)))
    if features:
        facts["cpu_features"] = features
    return tuple(sorted(facts.items()))
