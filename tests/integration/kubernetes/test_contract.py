# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the backend relies on in the API server, asked of the server itself: a release that changes it fails here."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import pytest
from api import JSON_PATCH, STRATEGIC, ApiError
from cluster import Cluster, until

EVICTION = {"apiVersion": "policy/v1", "kind": "Eviction"}


def evict(cluster: Cluster, pod: str, **query: Any) -> None:
    cluster.api.post(cluster.path("pods", pod) + "/eviction", EVICTION | {"metadata": {"name": pod}}, **query)


def refused(cluster: Cluster, pod: str, **query: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        evict(cluster, pod, **query)
    return caught.value


def test_a_spent_budget_says_what_it_needs_and_not_when(cluster: Cluster) -> None:
    cluster.nodes(1)
    (pod,) = cluster.deployment("llama")
    cluster.budget("w", "llama", minAvailable=1)
    until("it is counted", lambda: cluster.budget_status("w").get("currentHealthy") == 1)
    error = refused(cluster, pod)
    assert error.status == 429 and error.body["reason"] == "TooManyRequests" and "retry-after" not in error.headers
    (cause,) = error.body["details"]["causes"]
    assert cause == {
        "reason": "DisruptionBudget",
        "message": "The disruption budget w needs 1 healthy pods and has 1 currently",
    }


def test_a_budget_that_is_not_computed_yet_says_when(cluster: Cluster) -> None:
    """The controller that computes budgets is held up for that."""
    cluster.nodes(1)
    (pod,) = cluster.deployment("llama")
    cluster.lab("kill", "kube-controller-manager")
    try:
        wanted = {"selector": {"matchLabels": {"app": "llama"}}, "maxUnavailable": 1}
        path = cluster.path("poddisruptionbudgets", group="policy/v1")
        cluster.api.post(path, {"metadata": {"name": "w"}, "spec": wanted})
        error = refused(cluster, pod)
    finally:
        cluster.lab("start", "kube-controller-manager")
    assert error.status == 429 and error.headers["retry-after"] == "10"


def test_a_dry_run_spends_no_budget_and_an_absent_pod_is_404(cluster: Cluster) -> None:
    cluster.nodes(1)
    pods = cluster.deployment("llama", 2)
    cluster.budget("w", "llama", maxUnavailable=1)
    until("one may go", lambda: cluster.budget_status("w").get("disruptionsAllowed") == 1)
    for pod in pods:
        evict(cluster, pod, dryRun="All")
    assert sorted(cluster.pods_of("llama")) == sorted(pods)
    assert refused(cluster, "absent").status == 404


def test_taints_are_one_value(cluster: Cluster) -> None:
    (name,) = cluster.nodes(1)
    path = f"/api/v1/nodes/{name}"
    for key in ("first", "second"):
        cluster.api.patch(path, {"spec": {"taints": [{"key": key, "effect": "NoSchedule"}]}}, STRATEGIC)
    assert [taint["key"] for taint in cluster.node(name)["spec"]["taints"]] == ["second"]


def test_a_patch_onto_another_version_is_refused(cluster: Cluster) -> None:
    (name,) = cluster.nodes(1)
    path, version = f"/api/v1/nodes/{name}", cluster.node(name)["metadata"]["resourceVersion"]
    cluster.change(name, metadata={"labels": {"new": "er"}})
    test = {"op": "test", "path": "/metadata/resourceVersion", "value": version}
    with pytest.raises(ApiError, match="422"):
        cluster.api.patch(path, [test, {"op": "add", "path": "/spec/unschedulable", "value": True}], JSON_PATCH)
    with pytest.raises(ApiError, match="409"):
        cluster.api.patch(path, {"metadata": {"resourceVersion": version}, "spec": {"unschedulable": True}})
    assert "unschedulable" not in cluster.node(name)["spec"]


def test_a_list_without_a_limit_is_whole(cluster: Cluster) -> None:
    """So nothing has to be paged, and no page can expire (410) half way."""
    until("a controller has written its own", lambda: cluster.api.find(cluster.path("configmaps", "kube-root-ca.crt")))
    for number in range(5):
        cluster.api.post(cluster.path("configmaps"), {"metadata": {"name": f"c{number}"}})
    whole = cluster.api.get(cluster.path("configmaps"))
    assert len(whole["items"]) >= 5 and "continue" not in whole["metadata"]
    page = cluster.api.get(cluster.path("configmaps"), limit=2)
    assert len(page["items"]) == 2 and page["metadata"]["remainingItemCount"] == len(whole["items"]) - 2


def test_a_page_expires_and_a_whole_list_does_not(cluster: Cluster) -> None:
    """What was read at a revision that the store has forgotten is 410, whether a page or a watch goes on from there.

    Events are asked for, which the server does not also keep in its memory."""
    if not (cluster.state / "etcd.json").exists():
        pytest.skip("the store of a cluster that was given cannot be made to forget; unset GPUFLEET_TEST_KUBECONFIG")
    events = cluster.path("events")
    about = {"involvedObject": {"kind": "Node", "name": "n", "namespace": cluster.namespace}, "reason": "Tried"}
    made = [cluster.api.post(events, {"metadata": {"name": f"e{number}"}, **about}) for number in range(4)]
    page = cluster.api.get(events, limit=1)["metadata"]
    newer = cluster.api.post(events, {"metadata": {"name": "newer"}, **about})["metadata"]["resourceVersion"]
    etcd = urlsplit(json.loads((cluster.state / "etcd.json").read_text())["listen-client-urls"])
    store = http.client.HTTPConnection(str(etcd.hostname), etcd.port, timeout=60)
    store.request("POST", "/v3/kv/compaction", json.dumps({"revision": newer}))
    assert store.getresponse().status == 200
    with pytest.raises(ApiError, match="410"):
        cluster.api.get(events, limit=1, **{"continue": page["continue"]})
    (event,) = cluster.api.watch(events, made[0]["metadata"]["resourceVersion"], seconds=5)
    assert (event["type"], event["object"]["code"]) == ("ERROR", 410)
    assert len(cluster.api.get(events)["items"]) == 5
