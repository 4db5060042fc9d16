# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Prove a node through Kubernetes while it is closed to others: what we took off is back, its GPUs are all offered
again, and a pod that asks for them is scheduled there and succeeds. Where DRA hands the GPUs out, it asks by a claim.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils.kubernetes_api import (
    Api,
    ApiError,
    change_node,
    name_path,
    object_path,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import kubernetes_objects as objects
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import Mark, NodeResult, State

POLL_SECONDS = 0.5
NAME = "gpufleet-validation-"
_LONGEST = 253
DRA = "gpu.nvidia.com"
"""NVIDIA's DRA driver, its device class, and how a node's GPUs are called here that are offered by it alone."""

_REMOVAL_SECONDS = 5.0
"""How long a pod without a grace period may take to be gone, if that is longer than there is time left."""

_THERE = 409
"""An earlier one was removed before; so it is ours, of a request that had to be sent twice."""

_CLAIMS = "resource.k8s.io/v1"
_OURS = {"app.kubernetes.io/managed-by": "gpufleet", "app.kubernetes.io/component": "validation"}

Object = Mapping[str, Any]


@dataclass(frozen=True)
class ValidationPod:
    """The pod that proves a node: it gets all its GPUs, and must succeed. No ``image``, no pod."""

    image: str
    command: Sequence[str] = ()
    namespace: str = "default"
    runtime_class: str | None = None


class Validation:
    """One call: ``timeout`` is seconds for each node, from now."""

    def __init__(self, api: Api, pod: ValidationPod, mark: Mark, timeout: float, check: bool) -> None:
        self._api = api
        self._pod = pod
        self._mark = mark
        self._check = check
        self._timeout = timeout
        self._end = time.monotonic() + timeout

    def of(self, name: str, gpus: int | None) -> NodeResult:
        """Whether a node is as it was; ``gpus`` is their number where the node has no note of what it offered."""
        node = self._api.get(object_path("v1", "nodes", name))
        before = _state(node)
        if self._check:
            return NodeResult(before, before)
        keys = objects.paused_keys(node)
        node = self._bring_back(name)
        after = _state(node)
        changed = bool(keys) or after != before
        offers = {key: amount for key, amount in ((objects.mark_of(node) or {}).get("gpus") or {}).items() if amount}
        failure = objects.left_paused(node)
        if not failure:
            failure, expected = self._offers(name, offers, gpus or 0, keys)
            if not failure and self._pod.image:
                failure, changed = self._prove(name, expected), True
        return NodeResult(
            before, after, changed=changed, failed=bool(failure), msg=f"{name}: {failure}" if failure else ""
        )

    def _bring_back(self, name: str) -> Object:
        """Let DaemonSets onto the node again, while it stays closed to everything else, also if somebody has uncordoned
        it since we took it out, or has deleted it so that it came back without our mark: the taint that closed it so
        far keeps DaemonSets away as well. Returns the node."""

        def change(node: Object) -> dict[str, Any] | None:
            meta, taints = node["metadata"], objects.other_taints(node)
            labels, annotations = objects.unpaused(meta.get("labels") or {}, meta.get("annotations") or {})
            wanted: dict[str, Any] = {}
            if not node["spec"].get("unschedulable"):
                wanted["/spec/unschedulable"] = True
                annotations.setdefault(objects.MARK, json.dumps({"run_id": self._mark.run_id, "at": self._mark.at}))
            if annotations != (meta.get("annotations") or {}):
                wanted |= {"/metadata/labels": labels, "/metadata/annotations": annotations}
            if taints != (node["spec"].get("taints") or []):
                wanted["/spec/taints"] = taints
            return wanted or None

        node: Object = change_node(self._api, name, change)
        return node

    def _offers(
        self, name: str, before: Mapping[str, int], gpus: int, keys: Sequence[str]
    ) -> tuple[str, Mapping[str, int]]:
        """Wait for the node to be Ready, for the DaemonSets that came back to it, and for its GPUs to be on offer.

        :param before: what it offered when it was taken out of service; if that was nothing, ``gpus`` is how many it
            has, whoever hands them out; if nobody knows, it is what it offers now, but something.
        :returns: what keeps it from that, if anything does, and what is expected to be on offer.
        """
        while True:
            node = self._api.get(object_path("v1", "nodes", name))
            offered = objects.gpus_listed(node) or ({} if before else self._by_claim(name))
            wanted = before or ({next(iter(offered), "nvidia.com/gpu"): gpus} if gpus else {})
            wanted = wanted or {key: amount for key, amount in offered.items() if amount}
            lacking = self._unready(name, keys)
            if not wanted:
                found = (
                    "it offers no GPU, and nobody knows how many it should; look at the log of the device plugin or "
                    "DRA driver on it"
                )
            elif not objects.is_ready(node):
                found = "its kubelet is not Ready; look with: kubectl describe node " + name
            elif lacking:
                look = f"kubectl get pods -A --field-selector spec.nodeName={name}"
                found = f"{', '.join(lacking)} not Ready; look with: {look}"
            elif {key: offered.get(key, 0) for key in wanted} != dict(wanted):
                found = (
                    f"the scheduler is offered {_amounts({key: offered.get(key, 0) for key in wanted})}, expected "
                    f"{_amounts(wanted)}; look at the log of the device plugin or DRA driver on it"
                )
            else:
                return "", wanted
            if time.monotonic() >= self._end:
                return f"after {self._timeout:.0f} s {found}", wanted
            time.sleep(POLL_SECONDS)

    def _by_claim(self, name: str) -> dict[str, int]:
        """The GPUs of a node that DRA hands out."""
        slices = self._api.items(object_path(_CLAIMS, "resourceslices"), fieldSelector=f"spec.nodeName={name}")
        gpus = objects.slices_of(slices).get(name, objects.Slices()).gpus
        return {DRA: gpus} if gpus else {}

    def _unready(self, name: str, keys: Sequence[str]) -> list[str]:
        """Pods of DaemonSets that select on ``keys`` and do not work yet; the keys for which there is no pod at all."""
        if not keys:
            return []
        pods = self._api.items("/api/v1/pods", fieldSelector=f"spec.nodeName={name}")
        out = []
        for key in keys:
            these = [pod for pod in pods if key in (pod["spec"].get("nodeSelector") or {})]
            out += [objects.pod_name(pod) for pod in these if not objects.is_serving(pod)]
            out += [] if these else [f"the pods that select on {key} are"]
        return sorted(set(out))

    def _prove(self, name: str, gpus: Mapping[str, int]) -> str:
        """Run the pod on the node; what went wrong, if anything did."""
        path = object_path("v1", "pods", _named(name), self._pod.namespace)
        said = self._remove(path)
        if said:
            return said
        if DRA in gpus:
            said = self._claim(name)
            if said:
                return said
        created = self._api.request(
            "POST", object_path("v1", "pods", "", self._pod.namespace), self._manifest(name, gpus)
        )
        if not created.ok and created.status != _THERE:
            return f"no validation pod could be made in namespace {self._pod.namespace}: {created.message}"
        while True:
            pod = self._api.find(path)
            phase = (pod.get("status") or {}).get("phase") if pod else "gone"
            if pod is None or phase in ("Succeeded", "Failed") or time.monotonic() >= self._end:
                break
            time.sleep(POLL_SECONDS)
        said = objects.last_words(pod) if pod else "somebody deleted it"
        self._remove(path)
        if DRA in gpus:
            self._remove(object_path(_CLAIMS, "resourceclaims", _named(name), self._pod.namespace))
        if phase == "Succeeded":
            return ""
        return f"the validation pod is {phase}, expected Succeeded within {self._timeout:.0f} s: {said}"

    def _claim(self, name: str) -> str:
        """Claim all GPUs of the node that the pod runs on; what went wrong, if anything did."""
        said = self._remove(object_path(_CLAIMS, "resourceclaims", _named(name), self._pod.namespace))
        if said:
            return said
        request = {"name": "gpus", "exactly": {"deviceClassName": DRA, "allocationMode": "All"}}
        claim = {
            "apiVersion": _CLAIMS,
            "kind": "ResourceClaim",
            "metadata": {"name": _named(name), "labels": _OURS},
            "spec": {"devices": {"requests": [request]}},
        }
        created = self._api.request("POST", object_path(_CLAIMS, "resourceclaims", "", self._pod.namespace), claim)
        if created.ok or created.status == _THERE:
            return ""
        return f"no claim of its GPUs could be made in namespace {self._pod.namespace}: {created.message}"

    def _manifest(self, node: str, gpus: Mapping[str, int]) -> dict[str, Any]:
        """A pod only this node can take, whatever keeps others away from it."""
        container: dict[str, Any] = {
            "name": "validation",
            "image": self._pod.image,
            "resources": {"claims": [{"name": "gpus"}]}
            if DRA in gpus
            else {"limits": {key: str(amount) for key, amount in gpus.items() if amount}},
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "securityContext": {"allowPrivilegeEscalation": False},
        }
        if self._pod.command:
            container["command"] = list(self._pod.command)
        here = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
        spec: dict[str, Any] = {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": max(1, int(self._end - time.monotonic())),
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "tolerations": [{"operator": "Exists"}],
            "affinity": {
                "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [here]}}
            },
            "containers": [container],
        }
        if DRA in gpus:
            spec["resourceClaims"] = [{"name": "gpus", "resourceClaimName": _named(node)}]
        if self._pod.runtime_class:
            spec["runtimeClassName"] = self._pod.runtime_class
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": _named(node), "labels": _OURS}, "spec": spec}

    def _remove(self, path: str) -> str:
        """Delete a pod or a claim of ours and wait until it is gone; what is wrong if it does not go."""
        end = max(self._end, time.monotonic() + _REMOVAL_SECONDS)
        while True:
            answer = self._api.request("DELETE", path, {"gracePeriodSeconds": 0})
            if answer.status == 404:
                return ""
            if not answer.ok:
                raise ApiError("DELETE", path, answer)
            if time.monotonic() >= end:
                held = ", ".join((answer.body.get("metadata") or {}).get("finalizers") or ()) or "nobody knows what"
                return f"{path}, of an earlier validation, was deleted and stays there, held by {held}; take that away"
            time.sleep(0.1)

    def remove_pods(self) -> list[str]:
        """Delete every validation pod, and its claim, that an interrupted run left; a line for each."""
        selector = ",".join(f"{key}={value}" for key, value in _OURS.items())
        said = []
        for group, resource, what in (("v1", "pods", "pod"), (_CLAIMS, "resourceclaims", "claim")):
            found = self._api.items(object_path(group, resource, "", self._pod.namespace), labelSelector=selector)
            paths = [name_path(each, group, resource) for each in found]
            if not self._check:
                self._api.each(lambda path: self._api.delete(path, gracePeriodSeconds=0), paths)
            said += [f"validation {what} {objects.pod_name(each)}" for each in found]
        return said


def _state(node: Object) -> State:
    mark = objects.mark_of(node)
    out = bool(node["spec"].get("unschedulable"))
    return State(out, out and mark is not None, str(mark["run_id"]) if mark else None)


def _named(node: str) -> str:
    """The name of the pod for a node, as long as a name may be."""
    name = NAME + node
    return (
        name if len(name) <= _LONGEST else f"{name[: _LONGEST - 13]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
    )


def _amounts(gpus: Mapping[str, int]) -> str:
    return ", ".join(f"{amount} {name}" for name, amount in sorted(gpus.items())) or "none"
