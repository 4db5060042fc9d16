# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""upgrade.yml on Kubernetes with drivers of the hosts: pods are processes on the machines of the hosts lab."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cluster import LAB, Api, until
from fleet import Fleet

pytestmark = pytest.mark.skipif(
    "GPUFLEET_UNPROVEN" not in os.environ, reason="has never passed yet; GPUFLEET_UNPROVEN=1 runs it all the same"
)

NODES, GPUS = 4, 4
OLD, NEW = "535.183.01", "550.90.07"
SPACE = "/api/v1/namespaces/default"


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Api, Fleet, Path]]:
    top = tmp_path_factory.mktemp("upgrade")
    fleet = Fleet("hosts", top / "hosts", [f"gpu-{number}" for number in range(1, NODES + 1)])
    fleet.lab("up", "--nodes", str(NODES), "--gpus", str(GPUS), timeout=2400)
    cluster = [str(LAB / "lab"), "up", "--state", str(top / "kubernetes"), "--machines", str(top / "hosts")]
    try:
        cluster += ["--nodes", str(NODES), "--gpus", str(GPUS), "--driver", OLD]
        subprocess.run(cluster, check=True, timeout=300)
        kubeconfig = top / "kubernetes/kubeconfig"
        yield Api.of(kubeconfig), fleet, kubeconfig
    finally:
        subprocess.run([str(LAB / "lab"), "down", "--state", str(top / "kubernetes")], check=True, timeout=100)
        fleet.lab("down")


def deployment(api: Api, name: str, replicas: int, gpus: int) -> None:
    container = {"name": "main", "image": "vllm/vllm-openai:v0.9.1", "resources": {"limits": {"nvidia.com/gpu": gpus}}}
    template = {"metadata": {"labels": {"app": name}}, "spec": {"containers": [container]}}
    template["spec"]["terminationGracePeriodSeconds"] = 5
    spec = {"replicas": replicas, "selector": {"matchLabels": {"app": name}}, "template": template}
    api.post("/apis/apps/v1/namespaces/default/deployments", {"metadata": {"name": name}, "spec": spec})
    until(f"{name} is ready", lambda: ready(api, name) == replicas, 90)


def ready(api: Api, name: str) -> int:
    return api.get(f"/apis/apps/v1/namespaces/default/deployments/{name}")["status"].get("readyReplicas", 0)


def test_upgrade_on_kubernetes_with_drivers_of_the_hosts(machines: tuple[Api, Fleet, Path]) -> None:
    api, fleet, kubeconfig = machines
    foreign = "gpu-4"
    api.patch(f"/api/v1/nodes/{foreign}", {"spec": {"unschedulable": True}}, fieldManager="kubectl-cordon")
    deployment(api, "llama", 2, 2)
    deployment(api, "embed", 3, 1)
    budget = {"selector": {"matchLabels": {"app": "embed"}}, "maxUnavailable": 1}
    path = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"
    api.post(path, {"metadata": {"name": "embed"}, "spec": budget})
    options = {"kubeconfig": str(kubeconfig), "validation_command": ["nvidia-smi"], "validation_image": "cuda"}
    played = fleet.play(
        "upgrade",
        gpu_driver_version=NEW,
        gpu_scheduler="kubernetes",
        gpu_scheduler_options=options,
        gpu_batch_size=2,
        gpu_max_unavailable="40%",
        gpu_workload_wait=120,
        gpu_baseline_tolerance=100,
    )
    expected = {name: "upgraded" for name in fleet.names if name != foreign}
    assert {name: played.outcomes[name] for name in expected} == expected, played.output[-6000:]
    assert fleet.loaded(foreign) == OLD
    for node in api.get("/api/v1/nodes")["items"]:
        name = node["metadata"]["name"]
        assert bool(node["spec"].get("unschedulable")) is (name == foreign)
        assert not [key for key in node["metadata"].get("annotations", {}) if key.startswith("gpufleet.driver/")]
        assert not [key for key in node["metadata"]["labels"] if key.startswith("gpufleet.driver/")]
        assert name == foreign or fleet.loaded(name) == NEW
    until("all work is back", lambda: ready(api, "llama") == 2 and ready(api, "embed") == 3, 60)
    assert api.get("/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicies")["items"] == []
    assert [pod for pod in api.get(f"{SPACE}/pods")["items"] if pod["metadata"]["name"].startswith("gpufleet")] == []
