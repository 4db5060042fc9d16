# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A node is proven by a pod that the real scheduler places there while the node is closed to everybody else."""

from __future__ import annotations

import threading

import pytest
from cluster import RUN, Cluster, until

from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import kubernetes_objects as objects
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import kubernetes_validation
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.kubernetes_validation import NAME

DRA = "resource.k8s.io/v1"


class Runner(threading.Thread):
    """Ends the validation pod as soon as it runs: the lab's kubelets run nothing."""

    def __init__(self, cluster: Cluster, node: str, exit_code: int, message: str = "") -> None:
        super().__init__(daemon=True)
        self._path = cluster.path("pods", NAME + node)
        self._claim = cluster.path("resourceclaims", NAME + node, group=DRA)
        self._api = cluster.api
        self._over = {"exitCode": exit_code, "message": message}
        self.seen: dict = {}
        self.claimed: dict | None = None

    def run(self) -> None:
        self.seen = until("the validation pod runs", self._running)
        self.claimed = self._api.find(self._claim)
        container = {"name": "validation", "image": "x", "imageID": "x", "restartCount": 0, "ready": False}
        status = {
            "phase": "Failed" if self._over["exitCode"] else "Succeeded",
            "containerStatuses": [container | {"state": {"terminated": self._over}}],
        }
        self._api.patch(self._path + "/status", {"status": status})

    def _running(self) -> dict | None:
        pod = self._api.find(self._path)
        return pod if pod and pod["status"].get("phase") == "Running" else None


def test_a_pod_gets_all_gpus_of_the_closed_node_and_succeeds(cluster: Cluster) -> None:
    name, dummy = cluster.nodes(2)
    cluster.change(name, spec={"taints": [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]})
    backend = cluster.backend(validation_command=["nvidia-smi"])
    backend.cordon([name], RUN)
    runner = Runner(cluster, name, 0)
    runner.start()
    result = backend.validate([name], RUN, {name: 8}, 120)[name]
    assert not result.failed, result.msg
    spec = runner.seen["spec"]
    assert spec["nodeName"] == name and spec["containers"][0]["command"] == ["nvidia-smi"]
    assert spec["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert cluster.node(name)["spec"]["unschedulable"], "still closed: validation opens nothing"
    assert cluster.pods() == []


def test_gpus_that_dra_hands_out_are_proven_by_a_claim_of_all_of_them(cluster: Cluster) -> None:
    (name,) = cluster.nodes(1, gpus=0)
    cluster.dra(name, 4)
    backend = cluster.backend()
    backend.cordon([name], RUN)
    runner = Runner(cluster, name, 0)
    runner.start()
    result = backend.validate([name], RUN, {name: 4}, 120)[name]
    assert not result.failed, result.msg
    assert "limits" not in runner.seen["spec"]["containers"][0]["resources"]
    assert len(runner.claimed["status"]["allocation"]["devices"]["results"]) == 4
    assert cluster.pods() == [] and cluster.api.get(cluster.path("resourceclaims", group=DRA))["items"] == []
    short = backend.validate([name], RUN, {name: 5}, 0)[name]
    assert short.failed and "offered 4 gpu.nvidia.com, expected 5 gpu.nvidia.com" in short.msg


def test_a_pod_that_fails_tells_its_last_words(cluster: Cluster) -> None:
    (name,) = cluster.nodes(1)
    backend = cluster.backend()
    backend.cordon([name], RUN)
    cluster.change(name, spec={"unschedulable": None})
    Runner(cluster, name, 1, "starting\nCUDA error 802: system not yet initialized\n").start()
    result = backend.validate([name], RUN, {}, 120)[name]
    assert result.failed and "exit status 1, its last line: CUDA error 802" in result.msg
    assert cluster.pods() == []
    assert result.changed and cluster.node(name)["spec"]["unschedulable"], "closed until proven, though uncordoned"


def test_a_node_that_was_deleted_and_made_anew_is_closed_until_it_is_proven(cluster: Cluster) -> None:
    (name,) = cluster.nodes(1)
    backend = cluster.backend(validation_image="")
    backend.cordon([name], RUN)
    cluster.make_anew(name)
    result = backend.validate([name], RUN, {name: 9}, 0)[name]
    assert "offered 8 nvidia.com/gpu, expected 9" in result.msg
    assert backend.cordon([name], RUN)[name].before.ours, "another run can go on with it"
    assert not backend.validate([name], RUN, {name: 8}, 120)[name].failed
    backend.uncordon([name], RUN)
    node = cluster.node(name)
    assert not node["spec"].get("unschedulable") and objects.MARK not in node["metadata"].get("annotations", {})


def test_an_earlier_pod_that_does_not_go_is_no_proof(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_validation, "_REMOVAL_SECONDS", 0.5)
    (name,) = cluster.nodes(1)
    backend = cluster.backend()
    backend.cordon([name], RUN)
    cluster.pod(NAME + name, node=name, gpus=0)
    path = cluster.path("pods", NAME + name)
    cluster.api.patch(path, {"metadata": {"finalizers": ["example.com/accounting"]}})
    cluster.api.patch(path + "/status", {"status": {"phase": "Succeeded"}})
    result = backend.validate([name], RUN, {}, 0.5)[name]
    assert result.failed and "of an earlier validation" in result.msg and "example.com/accounting" in result.msg


def test_a_gpu_that_is_not_offered_again_is_found(cluster: Cluster) -> None:
    good, bad, mended, unknown, edited = names = cluster.nodes(5)
    backend = cluster.backend(validation_image="")
    for name in (mended, unknown):
        cluster.on_offer(name, 0)
    backend.cordon(names, RUN)
    cluster.change(edited, metadata={"annotations": {objects.MARK: "{}"}})
    for name, gpus in ((bad, 7), (mended, 8), (edited, 0)):
        cluster.on_offer(name, gpus)
    results = backend.validate(names, RUN, {good: 8, bad: 8}, 1)
    assert not results[good].failed and not results[mended].failed
    for name in (unknown, edited):
        assert results[name].failed and "offers no GPU, and nobody knows how many it should" in results[name].msg
    assert results[bad].failed and "offered 7 nvidia.com/gpu, expected 8 nvidia.com/gpu" in results[bad].msg


def test_gpus_are_waited_for(cluster: Cluster) -> None:
    (name,) = cluster.nodes(1)
    backend = cluster.backend(validation_image="")
    backend.cordon([name], RUN)
    cluster.on_offer(name, 0)
    threading.Timer(0.5, cluster.on_offer, (name, 8)).start()
    assert not backend.validate([name], RUN, {}, 120)[name].failed


def test_work_that_sits_on_a_gpu_shows_in_the_scheduler_s_words(cluster: Cluster) -> None:
    (name,) = cluster.nodes(1)
    cluster.pod("squatter", gpus=1)
    backend = cluster.backend()
    backend.cordon([name], RUN)
    until(
        "the scheduler's word", lambda: "Insufficient nvidia.com/gpu" in backend.validate([name], RUN, {}, 1)[name].msg
    )


@pytest.mark.parametrize("check", [True, False])
def test_settling_takes_away_what_an_interrupted_validation_left(cluster: Cluster, check: bool) -> None:
    (name,) = cluster.nodes(1)
    backend = cluster.backend()
    made = cluster.template()
    labels = {"app.kubernetes.io/managed-by": "gpufleet", "app.kubernetes.io/component": "validation"}
    made["metadata"] = {"name": NAME + name, "labels": labels}
    cluster.api.post(cluster.path("pods"), made)
    assert backend.settle(RUN, check) == [f"validation pod {cluster.namespace}/{NAME}{name}"]
    assert bool(cluster.pods()) is check
    assert backend.settle(RUN, check) == ([f"validation pod {cluster.namespace}/{NAME}{name}"] if check else [])
