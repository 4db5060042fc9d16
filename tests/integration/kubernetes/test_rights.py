# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The published rights are enough for everything the backend does, and none of them is for nothing."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import rbac
from api import Api, ApiError
from cluster import LAB, RUN, TOP, Cluster, evacuate, go, until
from operator_cluster import NEW, OperatorCluster

from ansible_collections.gpufleet.driver.plugins.module_utils import kubernetes_api
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers import gpu_operator
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import kubernetes, kubernetes_lease

PATHS = {
    "Namespace": "/api/v1/namespaces",
    "ServiceAccount": f"/api/v1/namespaces/{rbac.NAMESPACE}/serviceaccounts",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
}


def test_the_manifest_is_what_the_code_calls() -> None:
    written = (TOP / "docs/kubernetes-rbac.yml").read_text()
    assert written == rbac.manifest(), f"write it anew: python {LAB / 'rbac.py'} > docs/kubernetes-rbac.yml"


def apply(api: Api) -> None:
    """What kubectl apply does with the manifest."""
    for item in rbac.objects():
        try:
            api.post(PATHS[item["kind"]], item)
        except ApiError as exc:
            if exc.status != 409:
                raise


def used(log: Path) -> set[tuple[str, str, str]]:
    """Group, resource and verb of every request the account has sent; none may have been refused for its rights."""
    out = set()
    for line in log.read_text().splitlines():
        event: dict[str, Any] = json.loads(line)
        assert event["responseStatus"]["code"] != 403, event
        what = event["objectRef"]
        sub = f"/{what['subresource']}" if what.get("subresource") else ""
        out.add((what.get("apiGroup", ""), what["resource"] + sub, event["verb"]))
    return out


@pytest.mark.skipif(
    "GPUFLEET_TEST_KUBECONFIG" in os.environ,
    reason="a cluster that is given keeps its audit log to itself; unset GPUFLEET_TEST_KUBECONFIG",
)
def test_every_right_is_used_and_no_other_is_needed(cluster: Cluster, tmp_path: Path) -> None:
    apply(cluster.api)
    own = cluster.kubeconfig_of(f"{PATHS['ServiceAccount']}/{rbac.NAME}", tmp_path / "kubeconfig")
    nodes = set(cluster.nodes(3, labels={"dcgm": "on"}))
    cluster.apps("daemonsets", "dcgm", gpus=0, container={"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]},
                 nodeSelector={"dcgm": "on"})  # fmt: skip
    cluster.deployment("llama", gpus=8)
    backend = cluster.backend(kubeconfig=str(own))
    assert backend.snapshot([]).workloads
    been: list[str] = []
    while len(been) < 2:  # steering a second time changes what is there
        (pod,) = cluster.pods(labelSelector="app=llama")
        been.append(pod["spec"]["nodeName"])
        goal = sorted(nodes - set(been))[0]
        backend.cordon(been, RUN)
        fates = go(cluster, pod["metadata"]["name"], to=(goal,), fate="move")
        assert evacuate(backend, been[-1:], fates)[been[-1]].as_dict()["empty"]
        until("it runs there", lambda goal=goal: [name for name in cluster.pods_on(goal) if name.startswith("llama")])
    assert backend.validate(been, RUN, {}, 1)[been[0]].failed  # nothing runs in the lab, so no pod succeeds
    (by_claim,) = cluster.nodes(1, gpus=0, named="d")
    cluster.dra(by_claim, 2)
    assert backend.validate([by_claim], RUN, {by_claim: 2}, 1)[by_claim].failed
    backend.uncordon(been, RUN)
    (pod,) = cluster.pods(labelSelector="app=llama")
    backend.cordon([goal], RUN)
    squatters = [cluster.pod(f"squatter-{number}", node=node, gpus=8) for number, node in enumerate(been)]
    evacuate(backend, [goal], go(cluster, pod["metadata"]["name"], to=(been[0],), fate="move"))
    until("it waits", lambda: cluster.pods(labelSelector="app=llama", fieldSelector="status.phase=Pending"))
    assert any("waited for a node chosen for it" in line for line in backend.settle(RUN)) and squatters
    allowed = {(group, resource, verb) for group, resource, verbs in kubernetes.RIGHTS for verb in verbs}
    assert used(cluster.state / "audit.log") == allowed


@pytest.mark.skipif(
    "GPUFLEET_TEST_KUBECONFIG" in os.environ,
    reason="a cluster that is given keeps its audit log to itself; unset GPUFLEET_TEST_KUBECONFIG",
)
@pytest.mark.parametrize("pools", [None, {"all": None}], ids=["ClusterPolicy", "NVIDIADriver"])
def test_every_right_over_the_gpu_operator_is_used(
    operated: OperatorCluster, tmp_path: Path, pools: dict[str, Any] | None
) -> None:
    apply(operated.api)
    own = operated.kubeconfig_of(f"{PATHS['ServiceAccount']}/{rbac.NAME}", tmp_path / "kubeconfig")
    first, dummy = operated.begin(2, pools=pools)
    operated.cordon(first)
    driver = gpu_operator.GpuOperator(kubernetes_api.Api(str(own)), "run-1")
    assert driver.stage([first], NEW, time.time() + 120, 120)[first].done
    assert driver.swap([first], NEW, time.time() + 120, 120)[first].done
    assert driver.settle()
    lease = kubernetes_lease.ClusterLease(kubernetes_api.Api(str(own)), rbac.NAMESPACE)
    for dummy in range(2):
        lease.hold("run-1", "somebody", 60, None)
    assert lease.release("run-1").changed
    seen = used(operated.state / "audit.log")
    other = "clusterpolicies" if pools else "nvidiadrivers"
    rights = (*gpu_operator.RIGHTS, *kubernetes_lease.RIGHTS)
    wanted = {(group, resource, verb) for group, resource, verbs in rights for verb in verbs}
    assert seen >= {right for right in wanted if right[1] != other}
    assert seen <= {(group, resource, verb) for group, resource, verbs in rbac.RIGHTS for verb in verbs}
