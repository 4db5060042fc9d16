# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""upgrade.yml on Kubernetes with drivers of the hosts: pods are processes on the machines of the hosts lab."""

from __future__ import annotations

import contextlib
import http.client
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cluster import LAB, Api, skip_without_control_plane, until
from fleet import Fleet

NODES, GPUS = 4, 4
OLD, NEW = "535.183.01", "550.90.07"
DEPLOYMENTS = "/apis/apps/v1/namespaces/default/deployments"
PODS = "/api/v1/namespaces/default/pods"


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Api, Fleet, Path]]:
    skip_without_control_plane()
    top = tmp_path_factory.mktemp("upgrade")
    fleet = Fleet("hosts", top / "hosts", [f"gpu-{number}" for number in range(1, NODES + 1)])
    fleet.lab("up", "--nodes", str(NODES), "--gpus", str(GPUS), "--compiled", timeout=2400)
    cluster = [str(LAB / "lab"), "up", "--state", str(top / "kubernetes"), "--machines", str(top / "hosts")]
    try:
        cluster += ["--nodes", str(NODES), "--gpus", str(GPUS), "--driver", OLD]
        subprocess.run(cluster, check=True, timeout=300)
        kubeconfig = top / "kubernetes/kubeconfig"
        yield Api.of(kubeconfig), fleet, kubeconfig
    finally:
        subprocess.run([str(LAB / "lab"), "down", "--state", str(top / "kubernetes")], check=True, timeout=100)
        fleet.lab("down")


class Watched(threading.Thread):
    """What a deployment had ready at each of its changes."""

    def __init__(self, api: Api, name: str) -> None:
        super().__init__(daemon=True)
        self.ready: list[int] = []
        self._api, self._name = api, name
        self._version = api.get(DEPLOYMENTS)["metadata"]["resourceVersion"]

    def run(self) -> None:
        query = {"fieldSelector": f"metadata.name={self._name}"}
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):  # while the server is restarted
                for event in self._api.watch(DEPLOYMENTS, self._version, seconds=600, **query):
                    if event.get("type") == "MODIFIED":
                        self._version = event["object"]["metadata"]["resourceVersion"]
                        self.ready.append(event["object"]["status"].get("readyReplicas", 0))
            time.sleep(0.2)


def deployment(api: Api, name: str, replicas: int, gpus: int, **annotations: str) -> None:
    container: dict[str, Any] = {"name": "main", "image": "vllm/vllm-openai:v0.9.1"}
    if gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": gpus}}
    meta = {"labels": {"app": name}, "annotations": {f"lab.gpufleet/{key}": said for key, said in annotations.items()}}
    template = {"metadata": meta, "spec": {"containers": [container], "terminationGracePeriodSeconds": 5}}
    spec = {"replicas": replicas, "selector": {"matchLabels": {"app": name}}, "template": template}
    api.post(DEPLOYMENTS, {"metadata": {"name": name}, "spec": spec})
    until(f"{name} is ready", lambda: ready(api, name) == replicas, 90)


def ready(api: Api, name: str) -> int:
    return api.get(f"{DEPLOYMENTS}/{name}")["status"].get("readyReplicas", 0)


def tainted(api: Api) -> set[str]:
    return {node["metadata"]["name"] for node in api.get("/api/v1/nodes")["items"] if node["spec"].get("taints")}


def uids(api: Api, name: str) -> set[str]:
    return {pod["metadata"]["uid"] for pod in api.get(PODS, labelSelector=f"app={name}")["items"]}


def test_upgrade_on_kubernetes_with_drivers_of_the_hosts(machines: tuple[Api, Fleet, Path]) -> None:
    """One node is cordoned by hand, the canary after it was upgraded; one does not prove itself and goes back; the API
    server is restarted while packages are swapped. A budget allows one pod to be away, and one pod has a GPU open that
    it never asked for. The canary alone has room for what its budget needs, whoever takes the other GPUs first."""
    api, fleet, kubeconfig = machines
    late, unproven, foreign = "gpu-1", "gpu-2", "gpu-4"
    api.patch(f"/api/v1/nodes/{foreign}", {"spec": {"unschedulable": True}}, fieldManager="kubectl-cordon")
    deployment(api, "llama", 2, 1)
    deployment(api, "embed", 3, 1)
    deployment(api, "stowaway", 1, 0, opens="3")
    stowaway = uids(api, "stowaway")
    budget = {"selector": {"matchLabels": {"app": "embed"}}, "maxUnavailable": 1}
    path = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"
    api.post(path, {"metadata": {"name": "embed"}, "spec": budget})
    watched = Watched(api, "embed")
    watched.start()
    fleet.vary(unproven, gpu_validate_command=["false"])
    options = {"kubeconfig": str(kubeconfig), "validation_command": ["nvidia-smi"], "validation_image": "cuda"}
    playing = fleet.begin(
        "upgrade",
        gpu_driver_version=NEW,
        gpu_scheduler="kubernetes",
        gpu_scheduler_options=options,
        gpu_canary=[late],
        gpu_batch_size=2,
        gpu_max_unavailable=3,
        gpu_max_failed=1,
        gpu_workload_wait=120,
        gpu_baseline_tolerance=100,
    )
    fleet.reach(playing, "gpu-3", "packages")
    api.patch(f"/api/v1/nodes/{late}", {"spec": {"unschedulable": True}}, fieldManager="kubectl-cordon")
    for command in ("kill", "start"):
        lab = [str(LAB / "lab"), command, "--state", str(kubeconfig.parent), "kube-apiserver"]
        subprocess.run(lab, check=True, timeout=200)
    played = playing.end()
    expected = {late: "upgraded", unproven: "rolled back", "gpu-3": "upgraded", foreign: "skipped"}
    assert played.outcomes == expected, played.output[-6000:]
    assert "cordoned by kubectl-cordon" in played.nodes[foreign]["reason"]
    assert {name: fleet.loaded(name) for name in fleet.names} == {
        name: NEW if outcome == "upgraded" else OLD for name, outcome in expected.items()
    }
    for node in api.get("/api/v1/nodes")["items"]:
        name = node["metadata"]["name"]
        assert bool(node["spec"].get("unschedulable")) is (name in (late, foreign))
        assert not [key for key in node["metadata"].get("annotations", {}) if key.startswith("gpufleet.driver/")]
        assert not [key for key in node["metadata"]["labels"] if key.startswith("gpufleet.driver/")]
    # a controller takes its own taint away a moment after a node is uncordoned
    until("no taint is left", lambda: tainted(api) <= {late, foreign}, 30)
    until("all work is back", lambda: ready(api, "llama") == 2 and ready(api, "embed") == 3, 60)
    assert not stowaway & uids(api, "stowaway") and "is not declared in gpu_workloads" not in played.output
    assert watched.ready and min(watched.ready) >= 2, watched.ready
    assert api.get("/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicies")["items"] == []
    assert [pod for pod in api.get(PODS)["items"] if pod["metadata"]["name"].startswith("gpufleet")] == []
