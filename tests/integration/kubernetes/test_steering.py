# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Evicted work lands where the plan says: a real admission policy, the real controllers and the real scheduler."""

from __future__ import annotations

from typing import Any

import pytest
from cluster import RUN, Cluster, evacuate, go, until

from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import kubernetes_objects as objects
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import kubernetes_steering as steering
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import End

TERM = {"matchExpressions": [{"key": "kubernetes.io/os", "operator": "Exists"}]}
REQUIRED, PREFERRED = (f"{kind}DuringSchedulingIgnoredDuringExecution" for kind in ("required", "preferred"))
AFFINITIES: dict[str, dict[str, Any]] = {
    "no affinity": {},
    "only pod affinity": {"affinity": {"podAffinity": {}}},
    "only a requirement": {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [TERM]}}}},
    "another preference": {"affinity": {"nodeAffinity": {PREFERRED: [{"weight": 1, "preference": TERM}]}}},
}


def landed(cluster: Cluster, app: str, count: int) -> set[str]:
    def running() -> list[dict[str, Any]]:
        return [pod for pod in cluster.pods(labelSelector=f"app={app}") if is_up(pod)]

    until(f"{app} runs", lambda: len(running()) == count)
    return {pod["spec"]["nodeName"] for pod in running()}


def is_up(pod: dict[str, Any]) -> bool:
    return pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]


def is_unschedulable(pod: dict[str, Any]) -> bool:
    return any(each.get("reason") == "Unschedulable" for each in pod["status"].get("conditions", ()))


@pytest.mark.parametrize("kind", ["deployments", "statefulsets"])
@pytest.mark.parametrize("fate", ["move", "cold_start"])
def test_new_pods_land_on_the_chosen_node(cluster: Cluster, kind: str, fate: str) -> None:
    nodes = cluster.nodes(6)
    cluster.apps(kind, "llama", replicas=2, gpus=2)
    pods = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in cluster.pods()}
    sources = sorted(set(pods.values()))
    goal = next(node for node in reversed(nodes) if node not in sources)
    backend = cluster.backend()
    backend.cordon(sources, RUN)
    results = evacuate(backend, sources, go(cluster, *pods, to=(goal,), fate=fate))
    assert all(result.as_dict()["empty"] for result in results.values())
    assert [end.reason for result in results.values() for end in result.ends] == ["", ""]
    assert landed(cluster, "llama", 2) == {goal}
    taken = backend.settle(RUN)
    assert len(taken) == 2 and taken[1].endswith(f"of node {goal}") and backend.settle(RUN) == []


@pytest.mark.parametrize("template", AFFINITIES.values(), ids=AFFINITIES.keys())
def test_a_preference_is_added_to_what_the_pod_prefers_already(cluster: Cluster, template: dict[str, Any]) -> None:
    nodes = cluster.nodes(3)
    (pod,) = cluster.deployment("llama", **template)
    source = cluster.pods()[0]["spec"]["nodeName"]
    goal = sorted(set(nodes) - {source})[-1]
    backend = cluster.backend()
    backend.cordon([source], RUN)
    evacuate(backend, [source], go(cluster, pod, to=(goal,)))
    assert landed(cluster, "llama", 1) == {goal}
    (new,) = cluster.pods()
    before = template.get("affinity", {}).get("nodeAffinity", {})
    after = new["spec"]["affinity"]["nodeAffinity"]
    assert after[PREFERRED][:-1] == before.get(PREFERRED, []) and after.get(REQUIRED) == before.get(REQUIRED)
    backend.settle(RUN)


class Died(BaseException):
    pass


def test_moved_work_does_not_land_on_upgraded_nodes_even_if_these_are_empty(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint fits the old driver only: rather Pending than there. Settling sets it free, also if whoever took
    the policies away died before that."""
    nodes = set(cluster.nodes(3))
    (pod,) = cluster.deployment("llama", gpus=8)
    source = cluster.pods()[0]["spec"]["nodeName"]
    old, upgraded = sorted(nodes - {source})
    cluster.pod("neighbour", node=old, gpus=8)
    backend = cluster.backend()
    backend.cordon([source], RUN)
    evacuate(backend, [source], go(cluster, pod, to=(old,), fate="move"))
    until("the scheduler has no place", lambda: any(is_unschedulable(new) for new in cluster.pods()))
    assert cluster.pods_on(upgraded) == []
    with monkeypatch.context() as dying:
        dying.setattr(steering.Steering, "_release", lambda *given, **named: die())
        with pytest.raises(Died):
            backend.settle(RUN)
    taken = backend.settle(RUN)
    assert any(line.startswith("pod ") and "waited for a node chosen for it" in line for line in taken)
    assert landed(cluster, "llama", 1) == {upgraded}


def die() -> None:
    raise Died


def test_steering_again_replaces_where_it_went_before(cluster: Cluster) -> None:
    nodes = set(cluster.nodes(3))
    (pod,) = cluster.deployment("llama", gpus=8)
    backend = cluster.backend()
    been = [cluster.pods()[0]["spec"]["nodeName"]]
    for goal in sorted(nodes - set(been)):
        backend.cordon(been, RUN)
        evacuate(backend, [been[-1]], go(cluster, pod, to=(goal,), fate="move"))
        assert landed(cluster, "llama", 1) == {goal}
        (pod,) = cluster.pods_of("llama")
        been.append(goal)
    assert len(backend.settle(RUN)) == 2


def test_others_in_the_namespace_are_not_touched(cluster: Cluster) -> None:
    nodes = cluster.nodes(2)
    (pod,) = cluster.deployment("llama")
    source = cluster.pods()[0]["spec"]["nodeName"]
    (goal,) = set(nodes) - {source}
    backend = cluster.backend()
    backend.cordon([source], RUN)
    evacuate(backend, [source], go(cluster, pod, to=(goal,), fate="move"))
    cluster.deployment("other")
    (other,) = cluster.pods(labelSelector="app=other")
    assert not any(key.startswith(objects.STEERED) for key in other["spec"]["nodeSelector"])
    backend.settle(RUN)


def test_a_policy_that_does_harm_is_withdrawn_at_once(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an expression gives a list of objects, the API server of 1.36.3 panics: no pod could be created at all."""
    panics = '[JSONPatch{op: "add", path: "/spec/tolerations", value: [Object.spec.tolerations{key: "x"}]}]'
    monkeypatch.setattr(steering, "required", lambda label: panics)
    monkeypatch.setattr(steering, "IN_FORCE_SECONDS", 1.5)
    nodes = cluster.nodes(2)
    (pod,) = cluster.deployment("llama")
    source = cluster.pods()[0]["spec"]["nodeName"]
    (goal,) = set(nodes) - {source}
    backend = cluster.backend()
    backend.cordon([source], RUN)
    result = evacuate(backend, [source], go(cluster, pod, to=(goal,), fate="move"))[source]
    (end,) = result.ends
    assert end == End(f"{cluster.namespace}/{pod}", "evicted", end.reason) and "left to the scheduler" in end.reason
    assert landed(cluster, "llama", 1) == {goal}
    assert cluster.api.get("/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicies")["items"] == []
    backend.settle(RUN)
