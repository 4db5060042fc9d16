# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where evicted work lands again: its new pods are given a node selector (or a preference) as they are created.

Nothing of the user's is changed for that: a MutatingAdmissionPolicy, which the API server has from Kubernetes 1.36 on
(1.34 if enabled), adds it to pods of the controller whose pod was evicted, and the chosen nodes carry a label. A moved
workload must land there, since its checkpoint fits nowhere else; one that starts anew should. Without such a server all
other nodes get a taint that has the scheduler take them last, for whichever pod; it may still take them.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils.kubernetes_api import (
    FIELD_MANAGER,
    JSON_PATCH,
    MERGE_PATCH,
    Api,
    ApiError,
    ClusterError,
    change_node,
    name_path,
    object_path,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import kubernetes_objects as objects

OURS = "app.kubernetes.io/managed-by=gpufleet"
_GROUP = "admissionregistration.k8s.io/v1"
_POLICIES, _BINDINGS = "mutatingadmissionpolicies", "mutatingadmissionpolicybindings"
IN_FORCE_SECONDS = 10.0
_QUIET_LOOKS = 3
NO_POLICIES = (
    "this API server has no MutatingAdmissionPolicy: the scheduler was only asked, by a taint on all others, to prefer "
    "the nodes chosen for it"
)

Object = Mapping[str, Any]
Target = tuple[Object, Sequence[str], bool]
"""A pod, the nodes it should land on, and whether it must."""


@dataclass
class _Group:
    """Pods of one controller, and where its new ones should land."""

    condition: str
    pod: Object
    must: bool
    nodes: set[str] = field(default_factory=set)
    uids: list[str] = field(default_factory=list)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.condition.encode()).hexdigest()[:12]

    @property
    def label(self) -> str:
        return objects.STEERED + self.digest

    @property
    def where(self) -> tuple[frozenset[str], bool]:
        return frozenset(self.nodes), self.must


class Steering:
    def __init__(self, api: Api, run_id: str) -> None:
        self._api = api
        self._run_id = run_id
        self._steered: dict[str, tuple[frozenset[str], bool]] = {}
        self._goals: set[str] = set()

    def steer(self, targets: Iterable[Target]) -> dict[str, str]:
        """From now on new pods of the controllers of these pods land where they should; uid → why not, for the others.

        Steering the pods of a controller again replaces where they went before.
        """
        groups: dict[str, _Group] = {}
        for pod, nodes, must in targets:
            condition = whose(pod)
            if condition is not None:
                group = groups.setdefault(condition, _Group(condition, pod, must))
                group.nodes.update(nodes)
                group.uids.append(pod["metadata"]["uid"])
        new = [group for group in groups.values() if self._steered.get(group.condition) != group.where]
        failures = dict(zip([group.condition for group in new], self._api.each(self._one, new)))
        self._prefer({node for group in new if failures[group.condition] == NO_POLICIES for node in group.nodes})
        self._steered.update({group.condition: group.where for group in new if not failures[group.condition]})
        return {uid: failures[group.condition] for group in new for uid in group.uids if failures[group.condition]}

    def _one(self, group: _Group) -> str:
        """Steer one controller's pods; why that cannot be, if it cannot."""
        try:
            if not self._write(group):
                return NO_POLICIES
            if self._is_in_force(group):
                return ""
            said = "the API server did not apply the policy to a pod on trial"
        except ClusterError as exc:
            said = str(exc)
        try:
            self._withdraw(f"gpufleet-{group.digest}")  # one that does something else must not stay in anybody's way
        except ClusterError as exc:
            said += f"; and what was written could not be taken back: {exc}"
        return f"where it lands is left to the scheduler: {said}"

    def _write(self, group: _Group) -> bool:
        """Label the nodes and write the policy. False if the server knows no policies."""
        pod, label, name = group.pod, group.label, f"gpufleet-{group.digest}"
        self._label(label, group.nodes)
        meta = {
            "name": name,
            "labels": dict([OURS.split("=")]),
            "annotations": {objects.PREFIX + "run": self._run_id, objects.PREFIX + "for": objects.pod_name(pod)},
        }
        policy = {
            "apiVersion": _GROUP,
            "kind": "MutatingAdmissionPolicy",
            "metadata": meta,
            "spec": {
                "failurePolicy": "Ignore",
                "reinvocationPolicy": "Never",
                "matchConstraints": {
                    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": pod["metadata"]["namespace"]}},
                    "resourceRules": [
                        {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
                    ],
                },
                "matchConditions": [{"name": "evicted-by-gpufleet", "expression": group.condition}],
                "mutations": [
                    {
                        "patchType": "JSONPatch",
                        "jsonPatch": {"expression": required(label) if group.must else preferred(label)},
                    }
                ],
            },
        }
        binding = {
            "apiVersion": _GROUP,
            "kind": "MutatingAdmissionPolicyBinding",
            "metadata": meta,
            "spec": {"policyName": name},
        }
        return self._put(_POLICIES, policy) and self._put(_BINDINGS, binding)

    def _put(self, resource: str, wanted: dict[str, Any]) -> bool:
        """Create it, or give it its new spec. False if the server knows no such resource."""
        path = object_path(_GROUP, resource)
        answer = self._api.request("POST", path, wanted, fieldManager=FIELD_MANAGER)
        if answer.status == 404:
            return False
        if answer.status == 409:
            patch = [{"op": "replace", "path": "/spec", "value": wanted["spec"]}]
            named = object_path(_GROUP, resource, wanted["metadata"]["name"])
            self._api.ask("PATCH", named, patch, JSON_PATCH, fieldManager=FIELD_MANAGER)
        elif not answer.ok:
            raise ApiError("POST", path, answer)
        return True

    def _label(self, label: str, nodes: set[str]) -> None:
        """Put the label onto these nodes and no others."""
        carrying = {node["metadata"]["name"] for node in self._api.items("/api/v1/nodes", labelSelector=label)}

        def write(change: tuple[str, str | None]) -> None:
            name, value = change
            body = {"metadata": {"labels": {label: value}}}
            path = object_path("v1", "nodes", name)
            self._api.ask("PATCH", path, body, MERGE_PATCH, fieldManager=FIELD_MANAGER)

        self._api.each(write, [(name, "true") for name in nodes - carrying] + [(n, None) for n in carrying - nodes])

    def _is_in_force(self, group: _Group) -> bool:
        """Whether the server does to a pod on trial what the policy says, which it begins a moment after it took it."""
        meta = group.pod["metadata"]
        trial = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "generateName": "gpufleet-trial-",
                "namespace": meta["namespace"],
                "labels": meta.get("labels") or {},
                "ownerReferences": meta.get("ownerReferences") or [],
            },
            "spec": {key: value for key, value in group.pod["spec"].items() if key not in ("nodeName", "nodeSelector")},
        }
        path = object_path("v1", "pods", "", meta["namespace"])
        end = time.monotonic() + IN_FORCE_SECONDS
        while time.monotonic() < end:
            answer = self._api.request("POST", path, trial, outage=IN_FORCE_SECONDS, dryRun="All")
            if answer.ok and _is_steered(answer.body["spec"], group):
                return True
            time.sleep(0.2)
        return False

    def _prefer(self, goals: set[str]) -> None:
        """Have the scheduler take the nodes last that are chosen for nothing."""
        if goals <= self._goals:
            return
        self._goals |= goals
        for node in self._api.items("/api/v1/nodes"):
            if objects.gpus_listed(node):
                self._taint(node["metadata"]["name"], node["metadata"]["name"] not in self._goals)

    def _taint(self, name: str, wanted: bool) -> None:
        def change(node: Object) -> dict[str, Any] | None:
            before = list(node["spec"].get("taints") or ())
            after = [taint for taint in before if taint["key"] != objects.ELSEWHERE["key"]]
            after += [objects.ELSEWHERE] if wanted else []
            return {"/spec/taints": after} if after != before else None

        change_node(self._api, name, change)

    def _withdraw(self, name: str) -> None:
        for resource in (_BINDINGS, _POLICIES):
            self._api.delete(object_path(_GROUP, resource, name))

    def remove(self, check: bool) -> list[str]:
        """Take away every policy, label and waiting pod that steering left; a line for each."""
        said = []
        for policy in self._api.items(object_path(_GROUP, _POLICIES), labelSelector=OURS):
            if not check:
                self._withdraw(policy["metadata"]["name"])
            whom = (policy["metadata"].get("annotations") or {}).get(objects.PREFIX + "for", "?")
            said.append(f"constraint on new pods in place of {whom}")
        for node in self._api.items("/api/v1/nodes"):
            labels = [label for label in node["metadata"].get("labels") or {} if label.startswith(objects.STEERED)]
            if labels and not check:
                body = {"metadata": {"labels": dict.fromkeys(labels)}}
                self._api.ask("PATCH", name_path(node, "v1", "nodes"), body, MERGE_PATCH, fieldManager=FIELD_MANAGER)
            said += [f"label {label} of node {node['metadata']['name']}" for label in labels]
            if any(taint["key"] == objects.ELSEWHERE["key"] for taint in node["spec"].get("taints") or ()):
                if not check:
                    self._taint(node["metadata"]["name"], wanted=False)
                said.append(f"taint {objects.ELSEWHERE['key']} of node {node['metadata']['name']}")
        return said + self._release(check, looks=_QUIET_LOOKS if said else 1)

    def _release(self, check: bool, looks: int) -> list[str]:
        """Delete pods that wait for a node we chose and that has no room: their controllers make them anew, free.

        Again until ``looks`` have found none: for a moment after a policy is gone, the server still applies it to new
        pods. One look also where there is no policy: who took it away may have died before this.
        """
        said: list[str] = []
        end = time.monotonic() + IN_FORCE_SECONDS
        quiet = 0
        while quiet < looks and time.monotonic() < end:
            bound = [
                pod
                for pod in self._api.items("/api/v1/pods", fieldSelector="status.phase=Pending,spec.nodeName=")
                if any(key.startswith(objects.STEERED) for key in pod["spec"].get("nodeSelector") or {})
            ]
            said = said or [f"pod {objects.pod_name(pod)}, which waited for a node chosen for it" for pod in bound]
            if check:
                break
            for pod in bound:
                self._api.delete(name_path(pod, "v1", "pods"), preconditions={"uid": pod["metadata"]["uid"]})
            quiet = 0 if bound else quiet + 1
            if quiet < looks:
                time.sleep(0.2)
        return said


def whose(pod: Object) -> str | None:
    """A CEL condition on ``object``, a pod: that it takes the place of this one. None if none will."""
    meta = pod["metadata"]
    labels = meta.get("labels") or {}
    for label in ("jobset.sigs.k8s.io/jobset-name", "kueue.x-k8s.io/pod-group-name"):
        if labels.get(label):  # whoever owns its pods is made anew as well
            key = json.dumps(label)
            has = f"has(object.metadata.labels) && {key} in object.metadata.labels"
            return f"{has} && object.metadata.labels[{key}] == {json.dumps(labels[label])}"
    owner = next((each for each in meta.get("ownerReferences") or () if each.get("controller")), None)
    if owner is None:
        return None
    owns = f"o.uid == {json.dumps(owner['uid'])}"
    return f"has(object.metadata.ownerReferences) && object.metadata.ownerReferences.exists(o, {owns})"


def required(label: str) -> str:
    """A CEL expression for the JSON patch that binds a pod to nodes with ``label``."""
    key = json.dumps(label)
    return (
        "has(object.spec.nodeSelector)"
        f' ? [JSONPatch{{op: "add", path: "/spec/nodeSelector/" + jsonpatch.escapeKey({key}), value: "true"}}]'
        f' : [JSONPatch{{op: "add", path: "/spec/nodeSelector", value: {{{key}: "true"}}}}]'
    )


def preferred(label: str) -> str:
    """A CEL expression for the JSON patch that has a pod prefer nodes with ``label``."""
    kind, many = "Object.spec.affinity.nodeAffinity", "preferredDuringSchedulingIgnoredDuringExecution"
    exists = f'{kind}.{many}.preference.matchExpressions{{key: {json.dumps(label)}, operator: "Exists"}}'
    preference = f"{kind}.{many}.preference{{matchExpressions: [{exists}]}}"
    term = f"{kind}.{many}{{weight: 100, preference: {preference}}}"
    affinity = f"{kind}{{{many}: [{term}]}}"
    whole = f"Object.spec.affinity{{nodeAffinity: {affinity}}}"
    where = "/spec/affinity"
    return (
        f"!has(object.spec.affinity) ? {_added(where, whole)} : "
        f"!has(object.spec.affinity.nodeAffinity) ? {_added(f'{where}/nodeAffinity', affinity)} : "
        # a list of objects as a value makes the API server (seen in 1.36.3) panic on every pod: empty first, then one
        f"(has(object.spec.affinity.nodeAffinity.{many}) ? [] : {_added(f'{where}/nodeAffinity/{many}', '[]')}) + "
        f"{_added(f'{where}/nodeAffinity/{many}/-', term)}"
    )


def _added(path: str, value: str) -> str:
    return f'[JSONPatch{{op: "add", path: "{path}", value: {value}}}]'


def _is_steered(spec: Object, group: _Group) -> bool:
    if group.must:
        return group.label in (spec.get("nodeSelector") or {})
    return group.label in json.dumps(spec.get("affinity") or {})
