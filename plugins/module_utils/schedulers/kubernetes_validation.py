# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Prove a node through Kubernetes while it is closed to others: what we took off is back, its GPUs are all offered
again, and a pod that asks for them is scheduled there and succeeds.

Private to this collection: may change in any release.
"""

from __future__ import annotations

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
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import NodeResult, State

POLL_SECONDS = 0.5
NAME = "gpufleet-validation-"
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

    def __init__(self, api: Api, pod: ValidationPod, timeout: float, check: bool) -> None:
        self._api = api
        self._pod = pod
        self._check = check
        self._timeout = timeout
        self._end = time.monotonic() + timeout

    def of(self, name: str, gpus: int | None) -> NodeResult:
        """Whether a node is as it was; ``gpus`` is their number where the node has no note of what it offered."""
        node = self._api.get(object_path("v1", "nodes", name))
        mark = objects.mark_of(node)
        out = bool(node["spec"].get("unschedulable"))
        state = State(out, out and mark is not None, str(mark["run_id"]) if mark else None)
        if self._check:
            return NodeResult(state, state)
        keys = objects.paused_keys(node)
        changed = bool(keys)
        self._bring_back(name)
        wanted = (mark or {}).get("gpus") or ({"nvidia.com/gpu": gpus} if gpus else {})
        failure = self._offers(name, wanted, keys)
        if not failure and self._pod.image:
            failure, changed = self._prove(name, wanted), True
        return NodeResult(
            state, state, changed=changed, failed=bool(failure), msg=f"{name}: {failure}" if failure else ""
        )

    def _bring_back(self, name: str) -> None:
        """Let DaemonSets onto the node again, while it stays closed to everything else."""

        def change(node: Object) -> dict[str, Any] | None:
            meta, taints = node["metadata"], objects.other_taints(node)
            annotations = meta.get("annotations") or {}
            if objects.PAUSED not in annotations and taints == (node["spec"].get("taints") or []):
                return None
            labels, annotations = objects.unpaused(meta.get("labels") or {}, annotations)
            return {"/metadata/labels": labels, "/metadata/annotations": annotations, "/spec/taints": taints}

        change_node(self._api, name, change)

    def _offers(self, name: str, wanted: Mapping[str, int], keys: Sequence[str]) -> str:
        """Wait for the node to be Ready, for the DaemonSets that came back to it, and for its GPUs to be on offer.

        What keeps it from that, if anything does.
        """
        while True:
            node = self._api.get(object_path("v1", "nodes", name))
            offered = objects.gpus_listed(node)
            lacking = self._unready(name, keys)
            if not objects.is_ready(node):
                found = "its kubelet is not Ready; look with: kubectl describe node " + name
            elif lacking:
                look = f"kubectl get pods -A --field-selector spec.nodeName={name}"
                found = f"{', '.join(lacking)} not Ready; look with: {look}"
            elif {key: offered.get(key, 0) for key in wanted} != dict(wanted):
                found = (
                    f"the scheduler is offered {_amounts({key: offered.get(key, 0) for key in wanted})}, expected "
                    f"{_amounts(wanted)}; look at the log of the device plugin on it"
                )
            else:
                return ""
            if time.monotonic() >= self._end:
                return f"after {self._timeout:.0f} s {found}"
            time.sleep(POLL_SECONDS)

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
        path = object_path("v1", "pods", NAME + name, self._pod.namespace)
        self._remove(path)
        created = self._api.request(
            "POST", object_path("v1", "pods", "", self._pod.namespace), self._manifest(name, gpus)
        )
        if not created.ok:
            return f"no validation pod could be made in namespace {self._pod.namespace}: {created.message}"
        while True:
            pod = self._api.find(path)
            phase = (pod.get("status") or {}).get("phase") if pod else "gone"
            if pod is None or phase in ("Succeeded", "Failed") or time.monotonic() >= self._end:
                break
            time.sleep(POLL_SECONDS)
        said = objects.last_words(pod) if pod else "somebody deleted it"
        self._remove(path)
        if phase == "Succeeded":
            return ""
        return f"the validation pod is {phase}, expected Succeeded within {self._timeout:.0f} s: {said}"

    def _manifest(self, node: str, gpus: Mapping[str, int]) -> dict[str, Any]:
        """A pod only this node can take, whatever keeps others away from it."""
        container: dict[str, Any] = {
            "name": "validation",
            "image": self._pod.image,
            "resources": {"limits": {key: str(amount) for key, amount in gpus.items() if amount}},
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
        if self._pod.runtime_class:
            spec["runtimeClassName"] = self._pod.runtime_class
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": NAME + node, "labels": _OURS}, "spec": spec}

    def _remove(self, path: str) -> None:
        """Delete a pod of ours and wait until it is gone."""
        while True:
            answer = self._api.request("DELETE", path, {"gracePeriodSeconds": 0})
            if answer.status == 404:
                return
            if not answer.ok:
                raise ApiError("DELETE", path, answer)
            if time.monotonic() >= self._end + self._timeout:
                return
            time.sleep(0.1)

    def remove_pods(self) -> list[str]:
        """Delete every validation pod that an interrupted run left; a line for each."""
        selector = ",".join(f"{key}={value}" for key, value in _OURS.items())
        found = self._api.items(object_path("v1", "pods", "", self._pod.namespace), labelSelector=selector)
        if not self._check:
            self._api.each(
                lambda pod: self._api.request("DELETE", name_path(pod, "v1", "pods"), {"gracePeriodSeconds": 0}), found
            )
        return [f"validation pod {objects.pod_name(pod)}" for pod in found]


def _amounts(gpus: Mapping[str, int]) -> str:
    return ", ".join(f"{amount} {name}" for name, amount in sorted(gpus.items())) or "none"
