# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Taking part in NVIDIA's node maintenance, on a real API server; the maintenance operator is stood in for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from cluster import Cluster, until

from ansible_collections.gpufleet.driver.plugins.module_utils.kubernetes_api import Api, ClusterError
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import node_maintenance
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.node_maintenance import REQUESTOR, Maintenance

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
NAME = "nodemaintenances.maintenance.nvidia.com"
FINALIZER = "maintenance.nvidia.com/finalizer"
TEXT = {"type": "string"}
FIXED = {**TEXT, "x-kubernetes-validations": [{"rule": "self == oldSelf", "message": "Value is immutable"}]}
OPEN = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
SPEC = {
    "type": "object",
    "required": ["nodeName", "requestorID"],
    "properties": {
        "requestorID": FIXED,
        "additionalRequestors": {"type": "array", "items": TEXT},
        "nodeName": FIXED,
        "cordon": {"type": "boolean", "default": True},
        "waitForPodCompletion": OPEN,
        "drainSpec": OPEN,
    },
}
DEFINITION = {
    "metadata": {"name": NAME},
    "spec": {
        "group": "maintenance.nvidia.com",
        "scope": "Namespaced",
        "names": {"kind": "NodeMaintenance", "plural": "nodemaintenances", "singular": "nodemaintenance"},
        "versions": [
            {
                "name": "v1alpha1",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "schema": {
                    "openAPIV3Schema": {"type": "object", "properties": {"spec": SPEC, "status": OPEN}},
                },
            }
        ],
    },
}
STEPS = ("Pending", "Scheduled", "Cordon", "WaitForPodCompletion", "Draining", "Ready")


class Operator(threading.Thread):
    """Hands out one node at a time, a step a round, and lets a deleted request go once it has let go of the node."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(daemon=True)
        self.cluster = cluster
        self.path = cluster.path("nodemaintenances", group="maintenance.nvidia.com/v1alpha1")
        self.over = threading.Event()
        self.paused = False
        self.most = 0

    def run(self) -> None:
        while not self.over.wait(0.1):
            items = self.cluster.api.get(self.path)["items"]
            at = {item["metadata"]["name"]: self.reason(item) for item in items}
            busy = sum(reason not in ("", "Pending") for reason in at.values())
            self.most = max(self.most, busy)
            for item in items:
                name, reason = item["metadata"]["name"], at[item["metadata"]["name"]]
                if "deletionTimestamp" in item["metadata"]:
                    self.cluster.api.patch(f"{self.path}/{name}", {"metadata": {"finalizers": None}})
                elif reason == "Pending" and (busy or self.paused):
                    continue
                elif reason != "Ready":
                    busy += reason == "Pending"
                    self.advance(name, STEPS[STEPS.index(reason) + 1] if reason else STEPS[0])

    def reason(self, item: dict[str, Any]) -> str:
        found = item.get("status", {}).get("conditions") or [{"reason": ""}]
        return found[0]["reason"]

    def advance(self, name: str, reason: str) -> None:
        if reason == "Scheduled":
            self.cluster.api.patch(f"{self.path}/{name}", {"metadata": {"finalizers": [FINALIZER]}})
        condition = {"type": "Ready", "status": str(reason == "Ready"), "reason": reason}
        self.cluster.api.patch(f"{self.path}/{name}/status", {"status": {"conditions": [condition]}})


@pytest.fixture
def operator(cluster: Cluster) -> Iterator[Operator]:
    if cluster.api.find(f"{DEFINITIONS}/{NAME}") is None:
        cluster.api.post(DEFINITIONS, DEFINITION)
    made = Operator(cluster)
    until("the definition is served", lambda: cluster.api.raw("GET", made.path)[0] == 200)
    made.start()
    yield made
    made.over.set()
    made.join()
    for item in cluster.api.get(made.path)["items"]:
        path = f"{made.path}/{item['metadata']['name']}"
        cluster.api.patch(path, {"metadata": {"finalizers": None}})
        if "deletionTimestamp" not in item["metadata"]:
            cluster.api.delete(path)


@pytest.fixture
def maintenance(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Maintenance:
    monkeypatch.setattr(node_maintenance, "POLL_SECONDS", 0.1)
    return Maintenance(Api(str(cluster.kubeconfig)), cluster.namespace)


def others(operator: Operator, node: str, **spec: Any) -> str:
    """A request of the network operator's."""
    body = {
        "apiVersion": "maintenance.nvidia.com/v1alpha1",
        "kind": "NodeMaintenance",
        "metadata": {"name": f"nvidia-operator-{node}"},
        "spec": {"requestorID": "nvidia.network-operator", "nodeName": node, **spec},
    }
    operator.cluster.api.post(operator.path, body)
    return f"{operator.path}/nvidia-operator-{node}"


def test_nodes_are_handed_out_as_the_operator_allows(
    cluster: Cluster, operator: Operator, maintenance: Maintenance
) -> None:
    first, second = cluster.nodes(2)
    early = maintenance.request([first, second], time.time() + 60, 0)
    assert not any(its.ready for its in early.values())
    until(
        "one is ready", lambda: any(i.ready for i in maintenance.request([first, second], time.time() + 60, 0).values())
    )
    ready = [name for name, its in maintenance.request([first, second], time.time() + 60, 0).items() if its.ready]
    (other,) = {first, second} - set(ready)
    assert len(ready) == 1 and not cluster.node(ready[0])["spec"].get("unschedulable"), "the cordon is the scheduler's"
    assert maintenance.release(ready)[ready[0]].ready
    assert maintenance.request([other], time.time() + 120, 120)[other].ready
    assert operator.most == 1
    maintenance.release([other])
    until("nothing is left", lambda: not cluster.api.get(operator.path)["items"])
    assert not maintenance.release([other])[other].changed


def test_a_maintenance_of_another_requestor_is_joined_and_left_to_it(
    cluster: Cluster, operator: Operator, maintenance: Maintenance
) -> None:
    (node,) = cluster.nodes(1)
    path = others(operator, node, cordon=True)
    its = maintenance.request([node], time.time() + 120, 120)[node]
    assert its.ready and its.shared == ("nvidia.network-operator",)
    assert cluster.api.get(path)["spec"]["additionalRequestors"] == [REQUESTOR]
    assert len(cluster.api.get(operator.path)["items"]) == 1
    assert maintenance.release([node])[node].changed
    assert cluster.api.get(path)["spec"]["additionalRequestors"] == []


def test_ours_is_left_to_who_joined_it(cluster: Cluster, operator: Operator, maintenance: Maintenance) -> None:
    (node,) = cluster.nodes(1)
    assert maintenance.request([node], time.time() + 120, 120)[node].ready
    path = f"{operator.path}/gpufleet-{node}"
    cluster.api.patch(path, {"spec": {"additionalRequestors": ["nvidia.network-operator"]}})
    its = maintenance.release([node])[node]
    assert its.ready and "stays in maintenance for nvidia.network-operator" in its.msg
    assert "deletionTimestamp" not in cluster.api.get(path)["metadata"]


class Rival(Api):
    """Whose requests somebody else gets in before, once for each."""

    def __init__(self, kubeconfig: str, change: Any) -> None:
        super().__init__(kubeconfig)
        self.change = change
        self.left = 1

    def request(self, method: str, path: str, *given: Any, **query: Any) -> Any:
        if method in ("PATCH", "DELETE") and self.left:
            self.left -= 1
            self.change()
        return super().request(method, path, *given, **query)


def test_a_request_that_changes_while_we_leave_it(
    cluster: Cluster, operator: Operator, maintenance: Maintenance
) -> None:
    """One that was joined meanwhile is not taken from who joined it; one of another's is left all the same."""
    (node,) = cluster.nodes(1)
    assert maintenance.request([node], time.time() + 120, 120)[node].ready
    path = f"{operator.path}/gpufleet-{node}"
    joined = {"spec": {"additionalRequestors": ["nvidia.network-operator"]}}
    rival = Rival(str(cluster.kubeconfig), lambda: cluster.api.patch(path, joined))
    its = Maintenance(rival, cluster.namespace).release([node])[node]
    assert its.ready and "stays in maintenance for nvidia.network-operator" in its.msg
    assert "deletionTimestamp" not in cluster.api.get(path)["metadata"]
    cluster.api.patch(path, {"spec": {"additionalRequestors": []}})
    maintenance.release([node])
    until("it is gone", lambda: cluster.api.find(path) is None)

    theirs = others(operator, node, cordon=True)
    assert maintenance.request([node], time.time() + 120, 120)[node].ready
    both = {"spec": {"additionalRequestors": ["third", REQUESTOR]}}
    rival = Rival(str(cluster.kubeconfig), lambda: cluster.api.patch(theirs, both))
    its = Maintenance(rival, cluster.namespace).release([node])[node]
    assert its.ready and its.changed and cluster.api.get(theirs)["spec"]["additionalRequestors"] == ["third"]


def test_a_node_that_is_not_handed_out_in_time_fails(
    cluster: Cluster, operator: Operator, maintenance: Maintenance
) -> None:
    operator.paused = True
    (node,) = cluster.nodes(1)
    its = maintenance.request([node], time.time() + 1, 10)[node]
    assert its.failed and "Pending" in its.msg and "kubectl get nodemaintenances -A" in its.msg


def test_check_mode_asks_for_nothing(cluster: Cluster, operator: Operator, maintenance: Maintenance) -> None:
    (node,) = cluster.nodes(1)
    assert maintenance.request([node], time.time() + 5, 5, check=True)[node].changed
    assert not cluster.api.get(operator.path)["items"]


def test_a_cluster_without_the_operator_is_told(cluster: Cluster) -> None:
    if cluster.api.find(f"{DEFINITIONS}/{NAME}"):
        cluster.api.delete(f"{DEFINITIONS}/{NAME}")
        until("the definition is gone", lambda: cluster.api.find(f"{DEFINITIONS}/{NAME}") is None)
    with pytest.raises(ClusterError, match="knows no NodeMaintenance"):
        Maintenance(Api(str(cluster.kubeconfig)), cluster.namespace).release(["n"])
