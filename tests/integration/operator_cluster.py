# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A test's cluster with a stand-in of the NVIDIA GPU Operator in it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cluster import LAB, Cluster, Object, until

sys.path.insert(0, str(LAB / "gpu_operator"))

import standin
from api import ApiError

from ansible_collections.gpufleet.driver.plugins.module_utils.drivers import gpu_operator
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.gpu_operator import (
    GpuOperator,
    Progress,
    judged,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.kubernetes_api import Api

OLD, NEW, OTHER = "570.133.20", "575.57.08", "580.95.05"
POLICIES, DRIVERS = "/apis/nvidia.com/v1/clusterpolicies", "/apis/nvidia.com/v1alpha1/nvidiadrivers"


def loaded(node: Object) -> str | None:
    """What a look into /sys/module/nvidia/version of the node would say."""
    note = standin.annotations(node).get(standin.LOADED)
    return json.loads(note)["version"] if note else None


class OperatorCluster(Cluster):
    """Nodes whose driver the operator owns. Its namespace, objects and process live as long as the test."""

    def __init__(self, state: Path, namespace: str) -> None:
        super().__init__(state, namespace)
        self.process: subprocess.Popen[bytes] | None = None
        self.names: list[str] = []

    def begin(
        self,
        nodes: int = 3,
        version: str = OLD,
        auto: bool = True,
        pools: dict[str, Object] | None = None,
        settings: Object | None = None,
        **driver: Any,
    ) -> list[str]:
        """Nodes with ``version`` loaded, by a ClusterPolicy or by NVIDIADrivers (``pools``: name → node selector)."""
        standin.install(self.api, settings)
        self.names = self.nodes(nodes)
        if pools:
            for number, name in enumerate(self.names):
                self.change(name, metadata={"labels": {"pool": "ab"[number % 2]}})
            for name, selector in pools.items():
                standin.apply(self.api, DRIVERS, standin.nvidia_driver(name, version, selector))
        standin.apply(self.api, POLICIES, standin.cluster_policy(version, auto, bool(pools), **driver))
        self.start()
        until("every node has its driver", lambda: all(self.is_up(name, version) for name in self.names))
        return self.names

    def start(self) -> None:
        with (self.state / "gpu-operator.log").open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(LAB / "gpu_operator/standin.py"), str(self.kubeconfig)], stdout=log, stderr=log
            )

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def set(self, **settings: Any) -> None:
        standin.configure(self.api, **settings)

    def let_pass(self, passes: int = 3) -> None:
        """Until the operator's own upgrade controller has gone over all nodes that many times more."""

        def count() -> int:
            return int(self.api.get(f"/api/v1/namespaces/{standin.NAMESPACE}/configmaps/lab")["data"].get("passes", 0))

        begun = count()
        until(f"{passes} passes of the operator", lambda: count() >= begun + passes)

    def is_up(self, name: str, version: str) -> bool:
        node = self.node(name)
        operands = [v for k, v in standin.labels(node).items() if k.startswith(standin.DEPLOY)]
        return (
            self.loaded(name) == version
            and standin.labels(node).get(standin.DEPLOY + "driver") is not None
            and all(value == "true" for value in operands)
            and node["status"]["allocatable"].get("nvidia.com/gpu") != "0"
            and all(standin.is_ready(pod) for pod in self.operator_pods(name))
        )

    def loaded(self, name: str) -> str | None:
        return loaded(self.node(name))

    def label(self, name: str, key: str) -> str | None:
        return standin.labels(self.node(name)).get(key)

    def operator_pods(self, node: str) -> list[Object]:
        path = f"/api/v1/namespaces/{standin.NAMESPACE}/pods"
        return self.api.get(path, fieldSelector=f"spec.nodeName={node}")["items"]

    def driver_pod(self, node: str) -> Object:
        found = [p for p in self.operator_pods(node) if standin.labels(p).get(standin.COMPONENT) == "nvidia-driver"]
        return until(f"a driver pod on {node}", lambda: found and found[0])

    def delete_driver_pod(self, node: str) -> str:
        """As a person would; the new pod's name."""
        gone = self.driver_pod(node)["metadata"]["name"]
        self.api.delete(f"/api/v1/namespaces/{standin.NAMESPACE}/pods/{gone}")

        def other() -> str | None:
            names = [
                pod["metadata"]["name"]
                for pod in self.operator_pods(node)
                if standin.labels(pod).get(standin.COMPONENT) == "nvidia-driver"
            ]
            return next((name for name in names if name != gone), None)

        return until("another driver pod", other)

    def write_version(self, version: str) -> None:
        """As a person would who lets the operator upgrade."""
        path = f"{POLICIES}/cluster-policy"
        self.api.patch(path, {"spec": {"driver": {"version": version}}}, fieldManager="somebody-else")

    def version(self) -> str:
        return self.api.get(f"{POLICIES}/cluster-policy")["spec"]["driver"]["version"]

    def cordon(self, *names: str) -> None:
        for name in names:
            self.change(name, spec={"unschedulable": True})

    def is_cordoned(self, name: str) -> bool:
        return bool(self.node(name)["spec"].get("unschedulable"))

    # ---- what is tested

    def driver(self, run: str = "run-1", **options: Any) -> GpuOperator:
        return GpuOperator(Api(str(self.kubeconfig)), run, **options)

    def judged(self, version: str = NEW) -> Object:
        return judged(self.driver().look(), version)

    def swap(self, *names: str, version: str = NEW, seconds: float = 120, patience: float = 120) -> dict[str, Progress]:
        """Until each node is there or has failed, by calls that know nothing of each other."""
        return self._until_over(lambda driver, deadline: driver.swap(names, version, deadline, patience), seconds)

    def restore(self, *names: str, seconds: float = 120) -> dict[str, Progress]:
        return self._until_over(lambda driver, deadline: driver.restore(names, deadline, seconds), seconds)

    def fails_late(self, name: str, waiting: str) -> Progress:
        """What becomes of a node that waits for this when its time is up."""
        until(f"it waits: {waiting}", lambda: waiting in self.driver().swap([name], NEW, 4e9, 0)[name].waiting)
        return self.driver().swap([name], NEW, 0, 0)[name]

    def _until_over(self, act: Any, seconds: float) -> dict[str, Progress]:
        deadline = time.time() + seconds
        while True:
            found = act(self.driver(), deadline)
            if all(its.done or its.failed for its in found.values()):
                return found

    def clean(self) -> None:
        for path in (DRIVERS, POLICIES):
            for item in self.api.get(path)["items"]:
                self.api.delete(f"{path}/{item['metadata']['name']}")
        self.stop()
        sets = f"/apis/apps/v1/namespaces/{standin.NAMESPACE}/daemonsets"
        for item in self.api.get(sets)["items"]:
            with contextlib.suppress(ApiError):
                self.api.delete(f"{sets}/{item['metadata']['name']}", propagationPolicy="Background")
        super().clean()
        pods = f"/api/v1/namespaces/{standin.NAMESPACE}/pods"
        for pod in self.api.get(pods)["items"]:
            with contextlib.suppress(ApiError):
                self.api.ask("DELETE", f"{pods}/{pod['metadata']['name']}", {"gracePeriodSeconds": 0})
        until("nothing of the operator is left", lambda: not self.api.get(pods)["items"])


gpu_operator.POLL_SECONDS = 0.2
