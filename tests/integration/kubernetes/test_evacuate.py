# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Nodes are emptied of the pods that use their GPUs, within the rules of a real API server."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from api import ApiError
from cluster import RUN, Cluster, evacuate, go, until

from ansible_collections.gpufleet.driver.plugins.module_utils import kubernetes_api
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import kubernetes_evacuation
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import kubernetes_objects as objects
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import End, Fate, SchedulerError

NOTHING: list[Fate] = []


def evict(cluster: Cluster, name: str, **options: Any) -> None:
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}, "deleteOptions": options}
    cluster.api.post(cluster.path("pods", name) + "/eviction", body)


def test_a_node_is_emptied_of_gpu_pods_and_nothing_else(cluster: Cluster) -> None:
    first, second = cluster.nodes(2)
    (pod,) = cluster.deployment("llama", gpus=8, nodeSelector={"kubernetes.io/hostname": first})
    (other,) = cluster.deployment("web", gpus=0, nodeSelector={"kubernetes.io/hostname": first})
    backend = cluster.backend()
    backend.cordon([first], RUN)
    result = evacuate(backend, [first], go(cluster, pod))[first]
    assert result.as_dict()["empty"] and result.changed
    assert result.ends == (End(f"{cluster.namespace}/{pod}", "evicted"),)
    assert cluster.pods_on(first) == [other] and cluster.pods_on(second) == []


def test_a_workload_without_a_fate_is_waited_for_and_its_end_is_told(cluster: Cluster) -> None:
    (node,) = cluster.nodes(1)
    cluster.pod("short", annotations={objects.PREFIX + "remaining": "2"})
    backend = cluster.backend()
    now = evacuate(backend, [node], NOTHING, patience=0)[node]
    assert now.waiting == (f"{cluster.namespace}/short may finish, in 2 s by its own account",) and not now.changed
    backend._api = Ending(str(cluster.kubeconfig), cluster, "short")
    later = evacuate(backend, [node], NOTHING)[node]
    assert later.as_dict()["empty"] and later.ends == (End(f"{cluster.namespace}/short", "ended"),)


class Ending(kubernetes_api.Api):
    """Before the second look at the pods, one of them ends."""

    def __init__(self, kubeconfig: str, cluster: Cluster, name: str) -> None:
        super().__init__(kubeconfig)
        self.end = lambda: cluster.api.patch(cluster.path("pods", name) + "/status", {"status": {"phase": "Succeeded"}})
        self.looks = 0

    def request(self, method: str, path: str, *given: Any, **query: Any) -> kubernetes_api.Answer:
        if path == "/api/v1/pods":
            self.looks += 1
            if self.looks == 2:
                self.end()
        return super().request(method, path, *given, **query)


def test_after_the_deadline_what_may_restart_is_evicted_and_what_may_not_fails_its_node(cluster: Cluster) -> None:
    first, second = cluster.nodes(2)
    cluster.deployment("server", nodeSelector={"kubernetes.io/hostname": first})
    cluster.pod("alone", nodeSelector={"kubernetes.io/hostname": second})
    backend = cluster.backend()
    backend.cordon([first, second], RUN)
    results = evacuate(backend, [first, second], NOTHING, deadline=-1)
    assert results[first].as_dict()["empty"]
    assert results[second].failed and "alone belongs to no controller" in results[second].msg
    assert cluster.pods_on(second) == ["alone"]


def test_check_mode_asks_the_server_and_disturbs_nothing(cluster: Cluster) -> None:
    (node,) = cluster.nodes(1)
    pods = cluster.deployment("llama", 2)
    cluster.budget("one", "llama", maxUnavailable=1)
    until("one may go", lambda: cluster.budget_status("one").get("disruptionsAllowed") == 1)
    result = evacuate(cluster.backend(), [node], go(cluster, *pods), check=True)[node]
    assert result.changed and sorted(cluster.pods_on(node)) == sorted(pods)
    assert cluster.budget_status("one")["disruptionsAllowed"] == 1


@pytest.mark.parametrize("template", [{"tolerations": [{"operator": "Exists"}]}, {"nodeName": ""}])
def test_pods_that_a_cordon_does_not_keep_away_are_not_evicted_for_ever(
    cluster: Cluster, template: dict[str, Any]
) -> None:
    (node,) = cluster.nodes(1)
    (pod,) = cluster.deployment("infra", **{key: value or node for key, value in template.items()})
    backend = cluster.backend()
    backend.cordon([node], RUN)
    result = evacuate(backend, [node], go(cluster, pod))[node]
    assert result.failed and "comes back each time it is evicted: the template of Deployment/infra" in result.msg
    assert len(result.ends) == 1 + kubernetes_evacuation.RETURNS


class Overloaded(kubernetes_api.Api):
    """Answers the first evictions with what a server says that has too much to do, or a store without a leader."""

    def __init__(self, kubeconfig: str) -> None:
        super().__init__(kubeconfig)
        self.answers = [429, 500]

    def request(self, method: str, path: str, *given: Any, **query: Any) -> kubernetes_api.Answer:
        if path.endswith("/eviction") and self.answers:
            return kubernetes_api.Answer(self.answers.pop(0), {"message": "not now"})
        return super().request(method, path, *given, **query)


def test_a_server_in_trouble_is_no_budget_even_after_the_deadline(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_evacuation, "BUDGET_SECONDS", 0.1)
    (node,) = cluster.nodes(1)
    cluster.deployment("llama")
    backend = cluster.backend()
    backend.cordon([node], RUN)
    backend._api = Overloaded(str(cluster.kubeconfig))
    assert evacuate(backend, [node], NOTHING, deadline=-1)[node].as_dict()["empty"]


# ---- budgets


def test_a_budget_is_waited_for_until_its_pods_are_well_elsewhere(cluster: Cluster) -> None:
    """429 without Retry-After: what the budget needs and has is told, and the eviction is tried again."""
    first, second = cluster.nodes(2)
    pods = cluster.deployment(
        "llama", 2, nodeSelector={"room": "yes"}, annotations={"lab.gpufleet/starts-after": "1.5"}, wait=False
    )
    cluster.change(first, metadata={"labels": {"room": "yes"}})
    until("both run", lambda: cluster.are_ready("deployments", "llama"))
    pods = cluster.pods_of("llama")
    assert cluster.pods_on(first) == sorted(pods)
    cluster.budget("llama", "llama", minAvailable=1)
    until("one may go", lambda: cluster.budget_status("llama").get("disruptionsAllowed") == 1)
    cluster.change(second, metadata={"labels": {"room": "yes"}})
    backend = cluster.backend()
    backend.cordon([first], RUN)
    early = evacuate(backend, [first], go(cluster, *pods), patience=0)[first]
    assert [end.how for end in early.ends] == ["evicted"]
    kept = next(line for line in early.waiting if "may not go yet" in line)
    assert re.search("The disruption budget llama needs 1 healthy pods and has [12] currently", kept)
    done = evacuate(backend, [first], go(cluster, *pods))[first]
    assert done.as_dict()["empty"] and len(cluster.pods_on(second)) == 2


def test_a_budget_that_can_never_allow_it_is_named_before_anything_is_disturbed(cluster: Cluster) -> None:
    (node,) = cluster.nodes(1)
    free = cluster.deployment("free")
    bound = cluster.deployment("bound", 2)
    cluster.budget("all", "bound", minAvailable="100%")
    until("computed", lambda: cluster.budget_status("all").get("expectedPods") == 2)
    result = evacuate(cluster.backend(), [node], go(cluster, *free, *bound))[node]
    assert result.failed and f"the budget {cluster.namespace}/all allows no disruption" in result.msg
    assert not result.changed and sorted(cluster.pods_on(node)) == sorted(free + bound)


def test_two_budgets_on_a_pod_are_named_before_anything_is_disturbed(cluster: Cluster) -> None:
    (node,) = cluster.nodes(1)
    (pod,) = cluster.deployment("llama")
    (other,) = cluster.deployment("free")
    for name in ("one", "two"):
        cluster.budget(name, "llama", maxUnavailable=1)
    with pytest.raises(ApiError, match="500 This pod has more than one PodDisruptionBudget"):
        evict(cluster, pod)
    result = evacuate(cluster.backend(), [node], go(cluster, pod, other))[node]
    assert result.failed and f"2 budgets ({cluster.namespace}/one, {cluster.namespace}/two)" in result.msg
    assert cluster.pods_on(node) == sorted([pod, other])


def test_a_budget_that_yields_too_late_fails_the_node_with_its_reason(cluster: Cluster) -> None:
    (node,) = cluster.nodes(1)
    pods = cluster.deployment("llama", 2)
    cluster.budget("one", "llama", minAvailable=1)
    until("one may go", lambda: cluster.budget_status("one").get("disruptionsAllowed") == 1)
    backend = cluster.backend()
    backend.cordon([node], RUN)  # no other node: the first pod evicted stays Pending
    result = evacuate(backend, [node], go(cluster, *pods), deadline=3)[node]
    assert result.failed and "could not be evicted in time: The disruption budget one needs 1" in result.msg


def test_a_budget_is_not_spent_on_a_pod_that_was_replaced(cluster: Cluster) -> None:
    """The contract: an eviction that fails on the uid takes from the budget all the same, for two minutes."""
    cluster.nodes(1)
    (pod, dummy) = cluster.deployment("llama", 2)
    cluster.budget("one", "llama", maxUnavailable=1)
    until("one may go", lambda: cluster.budget_status("one").get("disruptionsAllowed") == 1)
    with pytest.raises(ApiError, match="409"):
        evict(cluster, pod, preconditions={"uid": "00000000-0000-0000-0000-000000000000"})
    status = cluster.budget_status("one")
    assert status["disruptionsAllowed"] == 0 and pod in status["disruptedPods"]


# ---- pods that cannot simply be evicted


@pytest.mark.parametrize(
    ("template", "options", "reason"),
    [
        ({}, {}, "belongs to no controller"),
        ({}, {"evict_unmanaged": True}, None),
        ({"annotations": {objects.PREFIX + "may": "restart"}}, {}, None),
        ({"annotations": {objects.PREFIX + "may": "protect"}}, {"evict_unmanaged": True}, "may: protect"),
        ({"annotations": {objects.PREFIX + "may": "nonsense"}}, {"evict_unmanaged": True}, "may: nonsense"),
        ({"volumes": [{"name": "scratch", "emptyDir": {}}]}, {"evict_unmanaged": True}, "the emptyDir scratch"),
        (
            {"volumes": [{"name": "scratch", "emptyDir": {}}]},
            {"evict_unmanaged": True, "evict_local_data": True},
            None,
        ),
        ({"volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}]}, {"evict_unmanaged": True}, None),
        (
            {"annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}},
            {"evict_unmanaged": True},
            "safe-to-evict: 'false'",
        ),
    ],
    ids=["unmanaged", "unmanaged-allowed", "says-may", "protected", "nonsense", "disk", "disk-allowed", "shm", "safe"],
)
def test_fates_by_policy(cluster: Cluster, template: Any, options: Any, reason: str | None) -> None:
    (node,) = cluster.nodes(1)
    cluster.pod("alone", **template)
    (other,) = cluster.deployment("free")
    backend = cluster.backend(**options)
    backend.cordon([node], RUN)
    result = evacuate(backend, [node], go(cluster, "alone", other))[node]
    if reason is None:
        assert result.as_dict()["empty"]
    else:
        assert result.failed and reason in result.msg
        assert cluster.pods_on(node) == sorted(["alone", other]), "nothing was disturbed"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_evacuation, "STOPPING_SECONDS", 1.0)


@pytest.mark.usefixtures("short")
def test_a_pod_held_by_a_finalizer_is_waited_for_by_name_and_fails_in_the_end(cluster: Cluster) -> None:
    (node,) = cluster.nodes(1)
    (pod,) = cluster.deployment("llama", terminationGracePeriodSeconds=1)
    cluster.api.patch(cluster.path("pods", pod), {"metadata": {"finalizers": ["example.com/hold"]}})
    backend = cluster.backend()
    backend.cordon([node], RUN)
    result = evacuate(backend, [node], go(cluster, pod), deadline=1)[node]
    assert result.failed and "held by finalizer example.com/hold" in result.msg


@pytest.mark.usefixtures("short")
def test_a_pod_that_never_stops_fails_the_node_with_the_command_to_type(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    (node,) = cluster.nodes(1)
    (pod,) = cluster.deployment("llama", annotations={"lab.gpufleet/stuck": "true"}, terminationGracePeriodSeconds=1)
    backend = cluster.backend()
    backend.cordon([node], RUN)
    with monkeypatch.context() as patient:
        patient.setattr(kubernetes_evacuation, "STOPPING_SECONDS", 1000.0)
        evacuate(backend, [node], go(cluster, pod), patience=0)
        early = evacuate(backend, [node], go(cluster, pod), patience=0, deadline=-1)[node]
    assert not early.failed and "is being deleted" in early.waiting[0], "it has time to stop, however late it is"
    assert early.ends == (End(f"{cluster.namespace}/{pod}", "evicted"),), "a later call knows what an earlier one did"
    result = evacuate(backend, [node], go(cluster, pod), deadline=-1)[node]
    assert result.failed and "past its grace period" in result.msg
    assert f"kubectl -n {cluster.namespace} delete pod {pod} --force" in result.msg


def test_a_static_pod_with_a_gpu_cannot_be_evicted(cluster: Cluster) -> None:
    (node,) = cluster.nodes(1)
    cluster.pod("static", node=node, annotations={"kubernetes.io/config.mirror": "x"})
    result = evacuate(cluster.backend(evict_unmanaged=True), [node], go(cluster, "static"))[node]
    assert result.failed and "is a static pod" in result.msg


# ---- who uses a GPU without having asked for one


@pytest.mark.parametrize(
    ("template", "is_user"),
    [
        ({"container": {"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}}, True),
        ({"container": {"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]}}, False),
        ({"volumes": [{"name": "dev", "hostPath": {"path": "/dev/nvidia0"}}]}, True),
        ({"volumes": [{"name": "dev", "hostPath": {"path": "/dev"}}]}, False),
        (
            {
                "volumes": [{"name": "dev", "hostPath": {"path": "/dev"}}],
                "container": {"securityContext": {"privileged": True}},
            },
            True,
        ),
        ({}, False),
    ],
    ids=["visible-devices", "visible-devices-void", "device-path", "dev-unprivileged", "dev-privileged", "none"],
)
def test_users_that_never_asked_are_evicted_too_A_OPR_04(cluster: Cluster, template: Any, is_user: bool) -> None:
    (node,) = cluster.nodes(1)
    (pod,) = cluster.deployment("monitor", gpus=0, **template)
    backend = cluster.backend()
    backend.cordon([node], RUN)
    assert evacuate(backend, [node], go(cluster, pod))[node].as_dict()["empty"]
    assert cluster.pods_on(node) == ([] if is_user else [pod])


def test_users_by_runtime_class(cluster: Cluster) -> None:
    (node,) = cluster.nodes(1)
    runtime = {"metadata": {"name": "nvidia"}, "handler": "nvidia"}
    if cluster.api.find("/apis/node.k8s.io/v1/runtimeclasses/nvidia") is None:
        cluster.api.post("/apis/node.k8s.io/v1/runtimeclasses", runtime)
    (pod,) = cluster.deployment("probe", gpus=0, runtimeClassName="nvidia")
    backend = cluster.backend()
    backend.cordon([node], RUN)
    assert evacuate(backend, [node], go(cluster, pod))[node].as_dict()["empty"]
    assert cluster.pods_on(node) == []


# ---- DaemonSets


def test_a_daemonset_with_a_label_of_its_own_is_taken_off_and_comes_back(cluster: Cluster) -> None:
    first, second = cluster.nodes(2, labels={"dcgm": "on", "agents": "on"})
    env = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]
    cluster.apps("daemonsets", "dcgm", gpus=0, container={"env": env}, nodeSelector={"dcgm": "on"})
    cluster.apps("daemonsets", "log", gpus=0, nodeSelector={"agents": "on"})
    both = {pod["spec"]["nodeName"]: pod["metadata"]["name"] for pod in cluster.pods(labelSelector="app=dcgm")}
    backend = cluster.backend(validation_image="")
    backend.cordon([first], RUN)
    result = evacuate(backend, [first], NOTHING)[first]
    assert result.as_dict()["empty"] and result.changed
    assert [name for name in cluster.pods_on(first) if name.startswith("dcgm")] == []
    assert len(cluster.pods_on(first)) == 1 and both[second] in cluster.pods_on(second)
    labels = cluster.node(first)["metadata"]["labels"]
    assert labels["dcgm"] == objects.PAUSE_VALUE and labels["agents"] == "on"
    proof = backend.validate([first], RUN, {}, 120)[first]
    assert not proof.failed and proof.changed, proof.msg
    assert cluster.node(first)["metadata"]["labels"]["dcgm"] == "on"
    assert any(name.startswith("dcgm") for name in cluster.pods_on(first))
    backend.uncordon([first], RUN)
    assert objects.PAUSED not in cluster.node(first)["metadata"].get("annotations", {})


def test_uncordoning_brings_daemonsets_back_too(cluster: Cluster) -> None:
    """Also where somebody has removed what we had noted: then nobody but a person can say what it was."""
    names = cluster.nodes(2, labels={"dcgm": "on"})
    node, forgotten = names
    cluster.apps("daemonsets", "dcgm", nodeSelector={"dcgm": "on"})
    backend = cluster.backend()
    backend.cordon(names, RUN)
    assert all(its.as_dict()["empty"] for its in evacuate(backend, names, NOTHING).values())
    cluster.change(forgotten, metadata={"annotations": {objects.PAUSED: None}})
    proof = backend.validate([forgotten], RUN, {}, 0)[forgotten]
    words = f"kubectl label node {forgotten} --overwrite dcgm=VALUE"
    assert proof.failed and words in proof.msg
    said = backend.uncordon(names, RUN)
    assert words in said[forgotten].msg and not said[node].msg
    until("it is back", lambda: cluster.pods_on(node))


def test_a_daemonset_that_shares_its_label_is_named_with_what_to_do(cluster: Cluster) -> None:
    (node,) = cluster.nodes(1, labels={"agents": "on"})
    cluster.apps("daemonsets", "probe", nodeSelector={"agents": "on"})
    cluster.apps("daemonsets", "log", gpus=0, nodeSelector={"agents": "on"})
    result = evacuate(cluster.backend(), [node], NOTHING)[node]
    assert result.failed and "belongs to a DaemonSet that cannot be taken off one node" in result.msg
    ignoring = cluster.backend(ignore=[f"{cluster.namespace}/DaemonSet/probe"])
    assert evacuate(ignoring, [node], NOTHING)[node].as_dict()["empty"]


def test_a_daemonset_without_a_label_of_its_own_is_taken_off_by_taint_and_comes_back(cluster: Cluster) -> None:
    """As NVIDIA's device plugin is where no operator is. What the taint hits besides leaves within its budgets."""
    first, second = cluster.nodes(2, labels={"agents": "on"})
    plugin = {"name": "plugin", "image": "nvcr.io/nvidia/k8s-device-plugin:v0.17.0"}
    cluster.apps("daemonsets", "plugin", gpus=0, container=plugin, nodeSelector={"agents": "on"})
    cluster.apps("daemonsets", "log", gpus=0, nodeSelector={"agents": "on"})
    cluster.apps("daemonsets", "cni", gpus=0, nodeSelector={"agents": "on"}, tolerations=[{"operator": "Exists"}])
    (web,) = cluster.deployment("web", gpus=0, nodeSelector={"kubernetes.io/hostname": first})
    before = cluster.pods_on(second)
    backend = cluster.backend(taint_daemonsets=True, validation_image="")
    backend.cordon([first], RUN)
    result = evacuate(backend, [first], NOTHING)[first]
    assert result.as_dict()["empty"] and End(f"{cluster.namespace}/{web}", "evicted") in result.ends
    assert [name.partition("-")[0] for name in cluster.pods_on(first)] == ["cni"] and cluster.pods_on(second) == before
    assert not backend.validate([first], RUN, {}, 120)[first].failed
    until("all are back", lambda: len(cluster.pods_on(first)) == 3)
    assert cluster.node(first)["spec"]["unschedulable"] and "web" not in str(cluster.pods_on(first))


# ---- the server


def test_the_api_server_is_restarted_in_the_middle(cluster: Cluster) -> None:
    (node,) = cluster.nodes(1)
    pods = cluster.deployment("llama", 4)
    backend = cluster.backend()
    backend.cordon([node], RUN)
    cluster.lab("kill", "kube-apiserver")
    started = time.monotonic()
    cluster.lab("start", "kube-apiserver")
    result = evacuate(backend, [node], go(cluster, *pods))[node]
    assert result.as_dict()["empty"], (result, time.monotonic() - started)


def test_an_account_without_the_right_to_evict_is_told_so_at_once(cluster: Cluster) -> None:
    (node,) = cluster.nodes(1)
    (pod,) = cluster.deployment("llama")
    looks = (("", "pods"), ("policy", "poddisruptionbudgets"), ("resource.k8s.io", "resourceclaims"))
    kubeconfig = cluster.account("looker", [(group, what, ["list"]) for group, what in looks])
    with pytest.raises(SchedulerError, match=r"eviction with 403 .*cannot create.*docs/kubernetes-rbac\.yml"):
        evacuate(cluster.backend(kubeconfig=str(kubeconfig)), [node], go(cluster, pod))


def test_a_rule_that_forbids_one_eviction_is_no_missing_right(cluster: Cluster) -> None:
    """An admission policy, or a webhook of a tenant's, refuses as the API server does where a right is missing."""
    first, second = cluster.nodes(2)
    kept, dummy = cluster.deployment("kept", 2, gpus=8)
    held = cluster.api.get(cluster.path("pods", kept))["spec"]["nodeName"]
    free = second if held == first else first
    group, name = "/apis/admissionregistration.k8s.io/v1", cluster.namespace
    match = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}},
        "resourceRules": [
            {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods/eviction"]}
        ],
    }
    rule = {"expression": f"object.metadata.name != '{kept}'", "message": "ask llama's team", "reason": "Forbidden"}
    policies = {
        "validatingadmissionpolicies": {"matchConstraints": match, "validations": [rule]},
        "validatingadmissionpolicybindings": {"policyName": name, "validationActions": ["Deny"]},
    }
    for resource, spec in policies.items():
        cluster.api.post(f"{group}/{resource}", {"metadata": {"name": name}, "spec": spec})
    try:
        backend = cluster.backend()
        backend.cordon([first, second], RUN)
        fates = go(cluster, kept)
        until("it is in force", lambda: "llama" in str(evacuate(backend, [held], fates, check=True)[held].waiting))
        results = evacuate(backend, [first, second], NOTHING, deadline=-1)
    finally:
        for resource in policies:
            cluster.api.delete(f"{group}/{resource}/{name}")
    assert results[free].as_dict()["empty"]
    assert results[held].failed and "ask llama's team" in results[held].msg and "rbac" not in results[held].msg


def test_one_unknown_node_does_not_hinder_the_others(cluster: Cluster) -> None:
    (node,) = cluster.nodes(1)
    results = evacuate(cluster.backend(), [node, "absent"], NOTHING)
    assert results[node].as_dict()["empty"] and results["absent"].failed
    assert 'nodes "absent" not found' in results["absent"].msg
