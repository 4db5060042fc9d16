# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A test's part of the Kubernetes lab: make nodes and pods, look at them, and call the backend as a module would."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TOP = Path(__file__).resolve().parents[2]
LAB = TOP / "tests/lab/kubernetes"
sys.path.insert(0, str(LAB))

import lab as lab_program  # noqa: E402
from api import Api, ApiError  # noqa: E402

from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import (  # noqa: E402
    kubernetes,
    kubernetes_steering,
    registry,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import (  # noqa: E402
    Evacuated,
    Fate,
    Mark,
)

Object = dict[str, Any]
TTL = "node.alpha.kubernetes.io/ttl"
WAIT_SECONDS = 120.0
"""Nothing waits that long but on a machine with too much to do."""
kubernetes_steering.IN_FORCE_SECONDS = 60.0


def until(what: str, holds: Callable[[], Any], seconds: float = WAIT_SECONDS, every: float = 0.05) -> Any:
    """Wait until ``holds()`` is true, looking ``every`` so many seconds, and return what it gave."""
    end = time.monotonic() + seconds
    while True:
        found = holds()
        if found:
            return found
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds:.0f} s: {what}")
        time.sleep(every)


def skip_without_control_plane() -> None:
    """Skip the test where there is none and nothing to build one with; one that does not build is an error."""
    found = subprocess.run([str(LAB / "lab"), "build"], capture_output=True, text=True, timeout=4000, check=False)
    if found.returncode == lab_program.MISSING:
        pytest.skip(found.stderr.strip())
    if found.returncode:
        pytest.fail(found.stderr.strip())


class Cluster:
    """A test's part of the cluster: its nodes carry the label ``test=NAMESPACE``, and its pods stay on them."""

    def __init__(self, state: Path, namespace: str) -> None:
        self.state = state
        self.kubeconfig = state / "kubeconfig"
        self.api = Api.of(self.kubeconfig)
        self.namespace = namespace
        self.selector = {"lab.gpufleet/test": namespace}

    # ---- nodes

    def nodes(
        self, count: int, gpus: int = 8, labels: dict[str, str] | None = None, named: str = "n", **node: Any
    ) -> list[str]:
        names = [f"{self.namespace}-{named}{number}" for number in range(1, count + 1)]
        made = [lab_program.node(name, number, gpus, **node) for number, name in enumerate(names)]
        for item in made:
            item["metadata"]["labels"] |= self.selector | (labels or {})
        lab_program.add_nodes(self.api, made)
        for name in names:
            until(f"{name} takes work", lambda name=name: self._settled(self.node(name)))
        return names

    @staticmethod
    def _settled(node: Object) -> bool:
        """Whether the controllers have written what they write on a new node, each at a time of its own."""
        return not node["spec"].get("taints") and TTL in node["metadata"].get("annotations", {})

    def node(self, name: str) -> Object:
        return self.api.get(f"/api/v1/nodes/{name}")

    def change(self, name: str, **fields: Any) -> Object:
        """Merge ``metadata=…`` or ``spec=…`` into a node, as somebody else would."""
        return self.api.patch(f"/api/v1/nodes/{name}", fields, fieldManager="somebody-else")

    def make_anew(self, name: str) -> None:
        """As if somebody had deleted the node, and its kubelet had registered it again."""
        self.api.delete(f"/api/v1/nodes/{name}")
        made = lab_program.node(name, 0, 8)
        made["metadata"]["labels"] |= self.selector
        lab_program.add_nodes(self.api, [made])
        until(f"{name} is back", lambda: self._settled(self.node(name)))

    def dra(self, name: str, gpus: int) -> None:
        """Have NVIDIA's DRA driver offer the GPUs of a node; only it is played."""
        group = "/apis/resource.k8s.io/v1"
        attributes = {"type": {"string": "gpu"}, "productName": {"string": "NVIDIA H100"}}
        spec = {
            "driver": "gpu.nvidia.com",
            "nodeName": name,
            "pool": {"name": name, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": f"gpu-{number}", "attributes": attributes} for number in range(gpus)],
        }
        self.api.post(f"{group}/resourceslices", {"metadata": {"name": name}, "spec": spec})
        if self.api.find(f"{group}/deviceclasses/gpu.nvidia.com") is None:
            rule = {"cel": {"expression": "device.driver == 'gpu.nvidia.com'"}}
            made = {"metadata": {"name": "gpu.nvidia.com"}, "spec": {"selectors": [rule]}}
            self.api.post(f"{group}/deviceclasses", made)

    def claim(self, name: str) -> None:
        """A claim of one GPU."""
        request = {"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}
        spec = {"devices": {"requests": [request]}}
        path = self.path("resourceclaims", group="resource.k8s.io/v1")
        self.api.post(path, {"metadata": {"name": name}, "spec": spec})

    def on_offer(self, name: str, gpus: int) -> None:
        amount = {"nvidia.com/gpu": str(gpus)}
        self.api.patch(f"/api/v1/nodes/{name}/status", {"status": {"capacity": amount, "allocatable": amount}})

    # ---- what runs

    def template(self, gpus: int = 1, annotations: dict[str, str] | None = None, **spec: Any) -> Object:
        container: Object = {"name": "main", "image": "vllm/vllm-openai:v0.9.1"}
        if gpus:
            container["resources"] = {"limits": {"nvidia.com/gpu": str(gpus)}}
        given = {"containers": [container | spec.pop("container", {})], "nodeSelector": dict(self.selector)}
        given["nodeSelector"] |= spec.pop("nodeSelector", {})
        return {"metadata": {"labels": {}, "annotations": annotations or {}}, "spec": given | spec}

    def pod(self, name: str, node: str | None = None, **template: Any) -> Object:
        made = self.template(**template)
        made["metadata"]["name"] = name
        if node:
            made["spec"]["nodeName"] = node
        made["metadata"]["labels"] |= {"app": name}
        self.api.post(self.path("pods"), made)
        return until(f"pod {name} runs", lambda: self._running(name))

    def _running(self, name: str) -> Object | None:
        pod = self.api.get(self.path("pods", name))
        return pod if pod["status"].get("phase") == "Running" else None

    def apps(self, kind: str, name: str, wait: bool = True, replicas: int | None = None, **template: Any) -> None:
        made = self.template(**template)
        made["metadata"]["labels"]["app"] = name
        spec: Object = {"selector": {"matchLabels": {"app": name}}, "template": made}
        if replicas is not None:
            spec["replicas"] = replicas
        if kind == "statefulsets":
            spec |= {"serviceName": name, "podManagementPolicy": "Parallel"}
        self.api.post(self.path(kind, group="apps/v1"), {"metadata": {"name": name}, "spec": spec})
        if wait:
            until(f"{kind} {name} ready", lambda: self.are_ready(kind, name))

    def are_ready(self, kind: str, name: str) -> bool:
        found = self.api.get(self.path(kind, name, group="apps/v1"))
        status = found.get("status", {})
        if status.get("observedGeneration", 0) < found["metadata"]["generation"]:
            return False
        if kind == "daemonsets":
            return status["desiredNumberScheduled"] == status.get("numberReady", 0) > 0
        return status.get("readyReplicas", 0) == found["spec"]["replicas"]

    def deployment(self, name: str, replicas: int = 1, **template: Any) -> list[str]:
        """A deployment that is ready; the names of its pods."""
        self.apps("deployments", name, replicas=replicas, **template)
        return self.pods_of(name)

    def pods_of(self, app: str) -> list[str]:
        return [pod["metadata"]["name"] for pod in self.pods(labelSelector=f"app={app}")]

    def pods(self, **query: Any) -> list[Object]:
        return self.api.get(self.path("pods"), **query)["items"]

    def pod_phase(self, name: str) -> str:
        return self.api.get(self.path("pods", name))["status"]["phase"]

    def pods_on(self, node: str) -> list[str]:
        return sorted(pod["metadata"]["name"] for pod in self.pods(fieldSelector=f"spec.nodeName={node}"))

    def budget(self, name: str, app: str, **spec: Any) -> None:
        wanted = {"selector": {"matchLabels": {"app": app}}, **spec}
        self.api.post(
            self.path("poddisruptionbudgets", group="policy/v1"), {"metadata": {"name": name}, "spec": wanted}
        )
        until(f"budget {name} is computed", lambda: self.budget_status(name).get("observedGeneration"))

    def budget_status(self, name: str) -> Object:
        return self.api.get(self.path("poddisruptionbudgets", name, group="policy/v1")).get("status", {})

    def path(self, resource: str, name: str = "", group: str = "v1") -> str:
        prefix = f"/api/{group}" if group == "v1" else f"/apis/{group}"
        return f"{prefix}/namespaces/{self.namespace}/{resource}" + (f"/{name}" if name else "")

    def account(self, name: str, rules: list[tuple[str, str, list[str]]]) -> Path:
        """A kubeconfig for an account with these rights (API group, resource, verbs) in the whole cluster."""
        full = f"{self.namespace}-{name}"
        rbac = "/apis/rbac.authorization.k8s.io/v1"
        subject = {"kind": "ServiceAccount", "name": name, "namespace": self.namespace}
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": full}
        listed = [{"apiGroups": [group], "resources": [what], "verbs": verbs} for group, what, verbs in rules]
        self.api.post(self.path("serviceaccounts"), {"metadata": {"name": name}})
        self.api.post(f"{rbac}/clusterroles", {"metadata": {"name": full}, "rules": listed})
        bound = {"metadata": {"name": full}, "roleRef": role, "subjects": [subject]}
        self.api.post(f"{rbac}/clusterrolebindings", bound)
        return self.kubeconfig_of(self.path("serviceaccounts", name), self.state / f"{full}.kubeconfig")

    def kubeconfig_of(self, account: str, to: Path) -> Path:
        """A kubeconfig for the service account at a path."""
        token = self.api.post(f"{account}/token", {"spec": {"expirationSeconds": 3600}})["status"]["token"]
        config = json.loads(self.kubeconfig.read_text())
        config["users"] = [{"name": "account", "user": {"token": token}}]
        config["contexts"][0]["context"]["user"] = "account"
        to.write_text(json.dumps(config))
        return to

    # ---- what is tested

    def backend(self, **options: Any) -> kubernetes.Kubernetes:
        known = registry.ARGUMENTS["scheduler_options"]["options"]
        given = {name: option.get("default") for name, option in known.items()}
        given |= {"kubeconfig": str(self.kubeconfig), "validation_namespace": self.namespace}
        return kubernetes.connect(given | options)

    def lab(self, *arguments: str) -> None:
        command, *rest = arguments
        subprocess.run([str(LAB / "lab"), command, "--state", str(self.state), *rest], check=True, timeout=200)

    def clean(self) -> None:
        for node in self.api.get("/api/v1/nodes", labelSelector=f"lab.gpufleet/test={self.namespace}")["items"]:
            self.api.delete(f"/api/v1/nodes/{node['metadata']['name']}")
            if self.api.find(f"/apis/resource.k8s.io/v1/resourceslices/{node['metadata']['name']}"):
                self.api.delete(f"/apis/resource.k8s.io/v1/resourceslices/{node['metadata']['name']}")
        for pod in self.pods():  # no kubelet is left to stop them
            if pod["metadata"].get("finalizers"):
                self.api.patch(self.path("pods", pod["metadata"]["name"]), {"metadata": {"finalizers": None}})
        try:
            self.api.delete(f"/api/v1/namespaces/{self.namespace}")
        except ApiError as exc:
            if exc.status != 409:
                raise


RUN = Mark("run-1", 1_800_000_000.0)


def go(cluster: Cluster, *pods: str, to: tuple[str, ...] = (), fate: str = "cold_start") -> list[Fate]:
    return [Fate(f"{cluster.namespace}/{pod}", fate, to) for pod in pods]


def evacuate(
    backend: kubernetes.Kubernetes,
    nodes: list[str],
    fates: list[Fate],
    patience: float = WAIT_SECONDS,
    deadline: float = 3600,
    check: bool = False,
) -> dict[str, Evacuated]:
    """Empty nodes with ``deadline`` seconds from now."""
    return backend.evacuate(nodes, RUN, fates, time.time() + deadline, patience, check)
