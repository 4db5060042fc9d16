# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a real cluster's objects make of a fleet; the many cases are in tests/unit/schedulers."""

from __future__ import annotations

from typing import Any

from cluster import RUN, Cluster, evacuate, go, until

from ansible_collections.gpufleet.driver.plugins.module_utils import fleet


def own(cluster: Cluster, found: fleet.Snapshot) -> tuple[list[fleet.Node], list[fleet.Workload]]:
    """The part of a snapshot that is this test's."""
    work = [each for each in found.workloads if each.name.startswith(f"{cluster.namespace}/")]
    return [node for node in found.nodes if node.name.startswith(f"{cluster.namespace}-")], work


def test_nodes_workloads_and_budgets(cluster: Cluster) -> None:
    first, second = cluster.nodes(2)
    pods = cluster.deployment("llama", 2, gpus=4, nodeSelector={"kubernetes.io/hostname": first})
    cluster.budget("llama", "llama", maxUnavailable=1)
    until("one may go", lambda: cluster.budget_status("llama").get("disruptionsAllowed") == 1)
    waiting = cluster.template(gpus=16)
    waiting["metadata"]["name"] = "too-large"
    cluster.api.post(cluster.path("pods"), waiting)
    backend = cluster.backend()
    backend.cordon([second], RUN)
    found = backend.snapshot([])
    nodes, work = own(cluster, found)
    assert [(node.name, node.gpus, node.free["gpu"], node.loaded, node.unfinished) for node in nodes] == [
        (first, 8, 0, "570.133.20", False),
        (second, 8, 8, "570.133.20", True),
    ]
    assert sorted(each.name for each in work) == sorted(f"{cluster.namespace}/{pod}" for pod in pods)
    assert {each.owner for each in work} == {"Deployment/llama"}
    assert work[0].budgets == (f"{cluster.namespace}/llama",) and found.budgets[work[0].budgets[0]] == 1
    assert dict(work[0].facts)["engine_version"] == "v0.9.1"
    assert found.queue["NVIDIA-H100-80GB-HBM3"].gpus >= 16
    assert fleet.parse(fleet.dump(found)) == found


def test_jobs_of_one_gang(cluster: Cluster) -> None:
    first, second = cluster.nodes(2, gpus=4)
    template = cluster.template(gpus=4, restartPolicy="Never")
    spec = {"completions": 2, "parallelism": 2, "completionMode": "Indexed", "template": template}
    cluster.api.post(cluster.path("jobs", group="batch/v1"), {"metadata": {"name": "train"}, "spec": spec})
    until("both run", lambda: len([pod for pod in cluster.pods() if pod["status"].get("phase") == "Running"]) == 2)
    dummy, (gang,) = own(cluster, cluster.backend().snapshot([]))
    assert gang.name == f"{cluster.namespace}/Job/train" and sorted(m.node for m in gang.members) == [first, second]


def device(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "attributes": {
            "type": {"string": "gpu"},
            "productName": {"string": "NVIDIA B200"},
            "driverVersion": {"version": "570.133.20"},
        },
    }


def test_gpus_given_by_dra_are_found_counted_and_freed(cluster: Cluster) -> None:
    """The real scheduler allocates the claims; only the driver that published the devices is played."""
    (node,) = cluster.nodes(1, gpus=0)
    group = "/apis/resource.k8s.io/v1"
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    slice_ = {
        "driver": "gpu.nvidia.com",
        "nodeName": node,
        "pool": pool,
        "devices": [device(f"gpu-{n}") for n in range(4)],
    }
    cluster.api.post(f"{group}/resourceslices", {"metadata": {"name": node}, "spec": slice_})
    rule = {"cel": {"expression": "device.driver == 'gpu.nvidia.com'"}}
    cluster.api.post(f"{group}/deviceclasses", {"metadata": {"name": node}, "spec": {"selectors": [rule]}})
    request = {"name": "gpu", "exactly": {"deviceClassName": node, "count": 2}}
    claim = {"metadata": {"name": "two"}, "spec": {"spec": {"devices": {"requests": [request]}}}}
    cluster.api.post(cluster.path("resourceclaimtemplates", group="resource.k8s.io/v1"), claim)
    (pod,) = cluster.deployment(
        "llama",
        gpus=0,
        resourceClaims=[{"name": "gpus", "resourceClaimTemplateName": "two"}],
        container={"resources": {"claims": [{"name": "gpus"}]}},
    )
    backend = cluster.backend()
    (seen,), (work,) = own(cluster, backend.snapshot([]))
    assert (seen.gpus, seen.free["gpu"], seen.gpu_model, seen.loaded) == (4, 2, "NVIDIA B200", "570.133.20")
    assert work.members[0].resources["gpu"] == 2
    backend.cordon([node], RUN)
    assert evacuate(backend, [node], go(cluster, pod))[node].as_dict()["empty"] and not cluster.pods_on(node)
    cluster.api.delete(f"{group}/deviceclasses/{node}")
    cluster.api.delete(f"{group}/resourceslices/{node}")
