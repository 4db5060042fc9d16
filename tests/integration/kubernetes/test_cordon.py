# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whose cordon it is, on a real API server."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from cluster import RUN, Cluster, until

from ansible_collections.gpufleet.driver.plugins.module_utils.kubernetes_api import Api, change_node
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import kubernetes_objects as objects
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import Mark, State

AUTOSCALER = "cluster-autoscaler.kubernetes.io/scale-down-disabled"


def taints(node: dict[str, Any]) -> set[str]:
    return {taint["key"] for taint in node["spec"].get("taints", ())}


def test_a_node_comes_back_as_it_was(cluster: Cluster) -> None:
    (name,) = cluster.nodes(1)
    cluster.change(name, metadata={"annotations": {AUTOSCALER: "false", "mine": "kept"}})
    cluster.change(name, spec={"taints": [{"key": "mine", "value": "x", "effect": "NoSchedule"}]})
    before = cluster.node(name)
    backend = cluster.backend()
    result = backend.cordon([name], RUN)[name]
    assert (result.before, result.after, result.changed) == (State(False), State(True, True, "run-1"), True)
    node = cluster.node(name)
    assert node["spec"]["unschedulable"] and taints(node) >= {"mine", objects.TAINT}
    assert node["metadata"]["annotations"][AUTOSCALER] == "true"
    mark = json.loads(node["metadata"]["annotations"][objects.MARK])
    assert mark["run_id"] == "run-1" and mark["gpus"] == {"nvidia.com/gpu": 8}
    assert not backend.cordon([name], RUN)[name].changed
    assert backend.uncordon([name], RUN)[name].after == State(False)
    until("the controller's taint is gone", lambda: taints(cluster.node(name)) == {"mine"})
    after = cluster.node(name)
    assert after["metadata"]["annotations"] == before["metadata"]["annotations"]
    assert after["metadata"]["labels"] == before["metadata"]["labels"]
    assert not backend.uncordon([name], RUN)[name].changed


def test_check_mode_foretells_and_changes_nothing(cluster: Cluster) -> None:
    (name,) = cluster.nodes(1)
    before = cluster.node(name)["metadata"]
    backend = cluster.backend()
    assert backend.cordon([name], RUN, check=True)[name].after == State(True, True, "run-1")
    assert cluster.node(name)["metadata"].get("annotations") == before.get("annotations")
    backend.cordon([name], RUN)
    assert backend.uncordon([name], RUN, check=True)[name].after == State(False)
    assert objects.MARK in cluster.node(name)["metadata"]["annotations"]


def test_a_second_run_takes_the_mark_over_and_keeps_what_was_there_before(cluster: Cluster) -> None:
    (name,) = cluster.nodes(1)
    backend = cluster.backend()
    backend.cordon([name], RUN)
    cluster.on_offer(name, 0)
    result = backend.cordon([name], Mark("run-2", 2.0))[name]
    assert result.after == State(True, True, "run-2") and result.changed
    mark = json.loads(cluster.node(name)["metadata"]["annotations"][objects.MARK])
    assert mark["run_id"] == "run-2" and mark["gpus"] == {"nvidia.com/gpu": 8}
    backend.uncordon([name], RUN)
    assert AUTOSCALER not in cluster.node(name)["metadata"].get("annotations", {})


def test_a_foreign_cordon_is_left_A_OPR_02(cluster: Cluster) -> None:
    (name,) = cluster.nodes(1)
    cluster.change(name, spec={"unschedulable": True})
    backend = cluster.backend()
    result = backend.cordon([name], RUN)[name]
    assert result.after == State(True) and not result.changed and "by somebody-else" in result.msg
    assert not backend.uncordon([name], RUN)[name].changed
    node = cluster.node(name)
    assert node["spec"]["unschedulable"] and objects.MARK not in node["metadata"].get("annotations", {})


def test_a_cordon_that_somebody_sets_over_ours_is_theirs_A_OPR_02(cluster: Cluster) -> None:
    """Uncordoned and cordoned again by a person while we work: the API server knows who wrote it last."""
    (name,) = cluster.nodes(1)
    backend = cluster.backend()
    backend.cordon([name], RUN)
    cluster.change(name, spec={"unschedulable": None})
    assert objects.TAINT in taints(cluster.node(name)), "our taint keeps it closed"
    cluster.change(name, spec={"unschedulable": True})
    result = backend.uncordon([name], RUN)[name]
    assert result.after == State(True) and "somebody-else has cordoned it since" in result.msg
    node = cluster.node(name)
    assert node["spec"]["unschedulable"] and objects.TAINT not in taints(node)
    assert objects.MARK not in node["metadata"].get("annotations", {})


def test_a_node_that_a_person_wants_kept_stays_out(cluster: Cluster) -> None:
    (name,) = cluster.nodes(1)
    backend = cluster.backend()
    backend.cordon([name], RUN)
    cluster.change(name, metadata={"annotations": {objects.KEEP: "bad DIMM"}})
    result = backend.uncordon([name], RUN)[name]
    assert result.after == State(True) and "bad DIMM" in result.msg
    assert cluster.node(name)["spec"]["unschedulable"]


def test_what_was_written_is_told_though_the_answer_was_lost(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    (name,) = cluster.nodes(1)
    backend = cluster.backend()
    send = Api.request

    def twice(api: Api, method: str, *given: Any, **query: Any) -> Any:
        if method == "PATCH":
            send(api, method, *given, **query)
        return send(api, method, *given, **query)

    monkeypatch.setattr(Api, "request", twice)
    cordoned = backend.cordon([name], RUN)[name]
    uncordoned = backend.uncordon([name], RUN)[name]
    assert cordoned.changed and cordoned.before == State(False) and uncordoned.changed and not uncordoned.msg


def test_a_change_in_between_is_neither_lost_nor_overwritten(cluster: Cluster) -> None:
    """To the server, spec.taints is one value: whoever writes it writes all of it. So it goes onto what was read."""
    (name,) = cluster.nodes(1)
    rounds = []

    def change(node: dict[str, Any]) -> dict[str, Any]:
        rounds.append(node)
        if len(rounds) == 1:
            cluster.change(name, spec={"taints": [{"key": "theirs", "effect": "NoSchedule"}]})
        return {"/spec/taints": [*node["spec"].get("taints", ()), {"key": "ours", "effect": "NoSchedule"}]}

    change_node(Api(str(cluster.kubeconfig)), name, change)
    assert len(rounds) == 2 and taints(cluster.node(name)) == {"theirs", "ours"}


def test_one_unknown_node_does_not_hinder_the_others(cluster: Cluster) -> None:
    (name,) = cluster.nodes(1)
    results = cluster.backend().cordon([name, "absent"], RUN)
    assert results[name].after == State(True, True, "run-1")
    assert results["absent"].failed and 'nodes "absent" not found' in results["absent"].msg


@pytest.mark.parametrize("kind", ["pods", "daemonsets"])
def test_our_taint_keeps_new_pods_off_even_if_somebody_uncordons(cluster: Cluster, kind: str) -> None:
    (name,) = cluster.nodes(1)
    cluster.backend().cordon([name], RUN)
    if kind == "pods":
        early = (f"early-{number}" for number in itertools.count())
        # one that is placed was faster than the news of the cordon
        until("the scheduler sees the node as it is now", lambda: turned_away(cluster, next(early)))
        cluster.change(name, spec={"unschedulable": None})
        until("the taint keeps it off", lambda: "untolerated taint" in turned_away(cluster, "late"))
    else:
        cluster.change(name, spec={"unschedulable": None})
        cluster.apps("daemonsets", "late", wait=False)
        path = cluster.path("daemonsets", "late", group="apps/v1")
        until("the controller has seen the taint", lambda: wants_no_pod(cluster.api.get(path)["status"]))


def turned_away(cluster: Cluster, name: str) -> str:
    """Why the scheduler finds no node for a pod, which is made if it is not there; empty if it has found one."""
    path = cluster.path("pods", name)
    if cluster.api.find(path) is None:
        made = cluster.template()
        made["metadata"]["name"] = name
        cluster.api.post(cluster.path("pods"), made)
    said = until("the scheduler's word", lambda: cluster.api.get(path)["status"].get("conditions"))
    return next((one["message"] for one in said if one.get("reason") == "Unschedulable"), "")


def wants_no_pod(status: dict[str, Any]) -> bool:
    return bool(status.get("observedGeneration")) and status["desiredNumberScheduled"] == 0
