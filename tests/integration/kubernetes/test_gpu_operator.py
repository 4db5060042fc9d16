# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Changing drivers through the GPU Operator, and what is known to go wrong with it (the list is in README.md)."""

from __future__ import annotations

import time

import pytest
from cluster import RUN, evacuate, go, until
from operator_cluster import DRIVERS, NEW, OLD, OTHER, POLICIES, OperatorCluster
from standin import ENABLED, INITIAL, PAUSED, SKIP, STATE, is_ready

from ansible_collections.gpufleet.driver.plugins.module_utils.drivers import gpu_operator_objects as objects


def settled(operated: OperatorCluster, *names: str) -> bool:
    """Nothing of ours is left on these nodes, and the operator thinks that it has nothing to do."""
    nodes = [operated.node(name)["metadata"] for name in names]
    return all(
        SKIP not in meta["labels"] and objects.NOTE not in meta["annotations"] and INITIAL not in meta["annotations"]
        for meta in nodes
    ) and all(meta["labels"].get(STATE, "upgrade-done") == "upgrade-done" for meta in nodes)


@pytest.mark.parametrize("auto", [True, False], ids=["auto-upgrade-on", "auto-upgrade-off"])
def test_only_the_nodes_of_the_batch_get_the_driver(operated: OperatorCluster, auto: bool) -> None:
    first, second, third = operated.begin(3, auto=auto)
    policy = operated.api.get(f"{POLICIES}/cluster-policy")["spec"]["driver"]["upgradePolicy"]
    operated.cordon(first, second)
    found = operated.swap(first, second)
    assert {name: (its.before, its.after, its.loaded) for name, its in found.items()} == {
        first: (OLD, NEW, NEW),
        second: (OLD, NEW, NEW),
    }
    assert [operated.loaded(name) for name in (first, second, third)] == [NEW, NEW, OLD]
    assert operated.is_cordoned(first) and operated.is_cordoned(second) and not operated.is_cordoned(third)
    operated.cordon(third)
    operated.swap(third)
    operated.driver().settle()
    assert settled(operated, first, second, third)
    operated.let_pass()
    assert settled(operated, first, second, third) and operated.is_cordoned(first)
    assert operated.api.get(f"{POLICIES}/cluster-policy")["spec"]["driver"]["upgradePolicy"] == policy
    assert objects.NOTE not in operated.api.get(f"{POLICIES}/cluster-policy")["metadata"].get("annotations", {})
    assert not any(its.changed for its in operated.swap(first, second, third).values())


def test_nodes_go_back_after_the_upgrade_is_over(operated: OperatorCluster) -> None:
    """One, and then the others; that they went back is no upgrade to go back from."""
    first, second = operated.begin(2)
    operated.cordon(first, second)
    operated.swap(first, second)
    operated.driver().settle()
    found = operated.judged()["nodes"][first]
    assert (found["previous"], found["run_id"]) == (OLD, "run-1")
    operated.restore(first)
    said = "\n".join(operated.driver().settle())
    assert [operated.loaded(name) for name in (first, second)] == [OLD, NEW] and operated.version() == NEW
    assert f"held from the operator by the label {SKIP}" in said and settled(operated, second)
    operated.restore(second)
    operated.driver().settle()
    assert operated.loaded(second) == operated.version() == OLD and settled(operated, first, second)
    assert [found["previous"] for found in operated.judged()["nodes"].values()] == ["", ""]
    assert not any(its.changed for its in operated.restore(first, second).values())


def test_each_node_goes_back_to_what_it_had(operated: OperatorCluster) -> None:
    """Two upgrades of parts of the fleet to different versions, and one way back for both."""
    first, second, third = operated.begin(3)
    operated.cordon(first, second)
    operated.swap(first, second)
    operated.driver().settle()
    operated.swap(second, version=OTHER)
    operated.driver().settle()
    found = operated.judged()["nodes"]
    assert [found[name]["previous"] for name in (first, second, third)] == [OLD, NEW, ""]
    # a run that fails before it has touched a node undoes nothing of the ones before it
    failed = operated.driver("run-2").restore([first, second], time.time() + 120, 0, finished=False)
    assert all(its.done and not its.changed for its in failed.values()) and operated.version() == OTHER
    assert all(its.done for its in operated.restore(first, second).values())
    assert [operated.loaded(name) for name in (first, second, third)] == [OLD, NEW, OLD]


def test_a_node_that_has_its_driver_is_not_done_with_as_long_as_it_is_out_of_service(operated: OperatorCluster) -> None:
    (first, dummy) = operated.begin(2)
    backend = operated.backend()
    backend.cordon([first], RUN)
    operated.swap(first)
    operated.driver().settle()
    found = operated.judged()["nodes"][first]
    assert found["already"] and found["unfinished"]
    backend.uncordon([first], RUN)
    assert not operated.judged()["nodes"][first]["unfinished"]


def test_calls_that_end_early_go_on_from_each_other(operated: OperatorCluster) -> None:
    (first, dummy) = operated.begin(2)
    operated.cordon(first)
    assert operated.swap(first, patience=0)[first].done and operated.loaded(first) == NEW


def test_check_mode_foretells_and_changes_nothing(operated: OperatorCluster) -> None:
    (first, dummy) = operated.begin(2)
    before = operated.node(first)["metadata"]["labels"]
    its = operated.driver().swap([first], NEW, time.time() + 5, 5, check=True)[first]
    assert (its.before, its.after, its.changed) == (OLD, NEW, True)
    assert operated.version() == OLD and operated.node(first)["metadata"]["labels"] == before


def test_exactly_the_failed_nodes_go_back(operated: OperatorCluster) -> None:
    """Weaknesses 3 and 48: a failed node is not called done, and stalls nobody."""
    first, second, third = operated.begin(3)
    operated.set(broken={NEW: [second]})
    operated.cordon(first, second)
    found = operated.swap(first, second)
    assert found[first].done and found[second].failed
    assert "CrashLoopBackOff" in found[second].msg and "kubectl -n gpu-operator logs" in found[second].msg
    back = operated.restore(second)
    assert back[second].done and [operated.loaded(n) for n in (first, second, third)] == [NEW, OLD, OLD]
    assert operated.version() == NEW, "a pod made anew on the upgraded node is to get the new version"
    said = "\n".join(operated.driver().settle())
    assert f"again: {first}" in said and f"{second} {third}" in said
    assert settled(operated, first) and operated.label(second, SKIP) == operated.label(third, SKIP) == "true"
    assert [operated.loaded(n) for n in (first, second, third)] == [NEW, OLD, OLD]
    assert operated.judged()["nodes"][first]["previous"] == OLD, "it can still go back, whatever became of the others"


def test_a_canary_that_fails_leaves_the_fleet_as_it_was(operated: OperatorCluster) -> None:
    first, second, third = operated.begin(3)
    operated.set(broken={NEW: ["*"]})
    operated.cordon(first)
    assert operated.swap(first)[first].failed
    operated.change(first, metadata={"annotations": {objects.NOTE: None}})  # also if somebody has removed its note
    assert operated.restore(first)[first].done and operated.loaded(first) == OLD
    operated.driver().settle()
    assert operated.version() == OLD and settled(operated, first, second, third)
    operated.let_pass()
    assert all(operated.is_up(name, OLD) for name in (first, second, third)) and not operated.is_cordoned(second)


def test_a_node_in_service_or_at_work_is_not_touched(operated: OperatorCluster) -> None:
    """Weakness 19: also a pod that holds nothing, but asked for a GPU, has the old driver's files."""
    first, second, third = operated.begin(3)
    operated.pod("job", first, gpus=1)
    operated.dra(third, 2)
    operated.claim("claim")
    claimed = [{"name": "g", "resourceClaimName": "claim"}]
    operated.pod("by-claim", gpus=0, resourceClaims=claimed, container={"resources": {"claims": [{"name": "g"}]}})
    operated.cordon(first, third)
    found = operated.swap(first, second, third)
    for name, job in ((first, "job"), (third, "by-claim")):
        assert "is not empty" in found[name].msg and f"{operated.namespace}/{job}" in found[name].msg
    assert "takes new work" in found[second].msg
    assert operated.loaded(first) == operated.loaded(second) == operated.loaded(third) == OLD


def test_the_image_is_pulled_while_nodes_work(operated: OperatorCluster) -> None:
    (first, dummy) = operated.begin(2)
    operated.pod("job", first, gpus=1)
    driver = operated.driver()
    assert driver.stage([first], NEW, time.time() + 120, 120)[first].done
    assert not [p for p in operated.operator_pods(first) if "gpufleet-pull" in p["metadata"]["name"] and is_ready(p)]
    assert operated.loaded(first) == OLD and operated.version() == OLD


def test_a_version_without_an_image_is_refused_before_anything_is_disturbed(operated: OperatorCluster) -> None:
    """Weaknesses 41 and 42."""
    (first, dummy) = operated.begin(2)
    its = operated.driver().stage([first], "575.404.1", time.time() + 120, 120)[first]
    assert its.failed and "cannot pull nvcr.io/nvidia/driver:575.404.1-ubuntu22.04 (ImagePullBackOff)" in its.msg
    assert operated.version() == OLD and operated.loaded(first) == OLD


def test_an_image_that_is_gone_by_then_sends_the_node_back(operated: OperatorCluster) -> None:
    (first, dummy) = operated.begin(2)
    operated.cordon(first)
    assert "ImagePullBackOff" in operated.swap(first, version="575.404.1")[first].msg
    assert operated.restore(first)[first].done and operated.loaded(first) == OLD


def test_a_missing_driver_pod_elsewhere_stops_the_operator_and_not_us(operated: OperatorCluster) -> None:
    """Weaknesses 1, 8 and 9: one DaemonSet without all its pods ends each pass of the operator for all nodes."""
    first, second, third = operated.begin(3)
    absent = f"{operated.namespace}-absent"
    node = operated.node(third)
    meta = {"name": absent, "labels": {**node["metadata"]["labels"], "kubernetes.io/hostname": absent}}
    for key in ("lab.gpufleet/node",):
        meta["labels"].pop(key)
    operated.api.post("/api/v1/nodes", {"metadata": meta, "spec": {}})
    quota = {"metadata": {"name": "full"}, "spec": {"hard": {"pods": "0"}}}
    operated.api.post("/api/v1/namespaces/gpu-operator/resourcequotas", quota)
    try:
        until("the DaemonSet lacks a pod", lambda: not operated.driver().look().nodes[absent].pod)
        finding = operated.judged()["findings"][0]
        assert finding["check"] == "operator.pods_missing" and "this upgrade goes on" in finding["message"]
    finally:
        operated.api.delete("/api/v1/namespaces/gpu-operator/resourcequotas/full")
        operated.api.delete(f"/api/v1/nodes/{absent}")
    operated.cordon(first, second)
    assert all(its.done for its in operated.swap(first, second).values())


def test_slots_of_the_operator_are_not_waited_for(operated: OperatorCluster) -> None:
    """Weakness 48: with the operator's own pacing one failed node ends everything, as maxParallelUpgrades is 1."""
    first, second, third = operated.begin(3)
    operated.set(broken={NEW: [third]}, pass_seconds=0.5)
    operated.write_version(NEW)
    until("the operator has begun", lambda: NEW in map(operated.loaded, (first, second)) or _fails(operated, third))
    until("one node eats the slot", lambda: _fails(operated, third))
    waiting = [name for name in (first, second) if operated.loaded(name) == OLD]
    operated.cordon(first, second)
    assert all(its.done for its in operated.swap(first, second).values()), waiting


def _fails(operated: OperatorCluster, name: str) -> bool:
    node = operated.driver().look().nodes[name]
    return bool(node.pod and node.pod.trouble and node.pod.trouble.hopeless)


def test_ready_of_the_policy_is_not_believed(operated: OperatorCluster) -> None:
    """Weakness 10: before 26.7.0 it is ready although every pod is outdated."""
    first, second = operated.begin(2)
    operated.cordon(first)
    operated.swap(first)
    until("ready", lambda: operated.api.get(f"{POLICIES}/cluster-policy").get("status", {}).get("state") == "ready")
    nodes = operated.judged()["nodes"]
    assert nodes[first]["already"] and not nodes[second]["already"]


def test_a_cordon_of_somebody_else_starts_nothing_and_stays(operated: OperatorCluster) -> None:
    """Weaknesses 11, 13 and 14: the operator upgrades a cordoned node without a slot, and uncordons a late cordon."""
    first, second, third = operated.begin(3)
    operated.cordon(first)
    operated.swap(first)
    operated.cordon(second)  # by hand, in the middle of our run
    operated.let_pass()
    assert operated.loaded(second) == OLD and operated.is_cordoned(second)
    operated.swap(second)
    operated.driver().settle()
    operated.let_pass()
    assert operated.loaded(second) == NEW and operated.is_cordoned(second) and operated.loaded(third) == OLD


def test_an_uncordon_by_the_driver_manager_is_undone(operated: OperatorCluster) -> None:
    """Weaknesses 12 and 13: with autoUpgrade off, k8s-driver-manager uncordons whatever was cordoned before."""
    (first, dummy) = operated.begin(2, auto=False)
    operated.cordon(first)
    assert operated.node(first)["metadata"]["annotations"].get(ENABLED) is None
    assert operated.swap(first)[first].done
    until("it is closed again", lambda: operated.is_cordoned(first))


@pytest.mark.parametrize("value", [PAUSED, ""], ids=["paused", "empty"])
def test_leftover_pause_labels_are_told(operated: OperatorCluster, value: str) -> None:
    """Weaknesses 23 and 24 (an empty label is what the operator itself sets right)."""
    (first, dummy) = operated.begin(2)
    operated.change(first, metadata={"labels": {"nvidia.com/gpu.deploy.dcgm-exporter": value}})
    if value:
        reason = operated.judged()["nodes"][first]["reason"]
        assert "still has dcgm-exporter paused for an upgrade that is over" in reason
    else:
        until("mended", lambda: operated.label(first, "nvidia.com/gpu.deploy.dcgm-exporter") == "true")


def test_an_unknown_state_is_told_and_mended(operated: OperatorCluster) -> None:
    """Weakness 57: the operator never touches such a node again."""
    (first, dummy) = operated.begin(2)
    operated.change(first, metadata={"labels": {STATE: "upgrade-odd"}})
    assert "unknown to the operator" in operated.judged()["nodes"][first]["warnings"][0]
    operated.cordon(first)
    assert operated.swap(first)[first].done and operated.label(first, STATE) == "upgrade-done"


def test_a_driver_of_the_host_is_left_to_the_host(operated: OperatorCluster) -> None:
    """Weakness 2."""
    (first, dummy) = operated.begin(2)
    operated.change(first, metadata={"labels": {"nvidia.com/gpu.deploy.driver": "pre-installed"}})
    until("its driver pod is gone", lambda: not operated.driver().look().nodes[first].pod)
    assert "belongs to the host" in operated.judged()["nodes"][first]["reason"]
    operated.cordon(first)
    assert "belongs to the host" in operated.swap(first)[first].msg


def test_a_node_that_is_deleted_and_made_anew_in_its_turn_is_gone_on_with(operated: OperatorCluster) -> None:
    """Without our notes it takes work, and nothing on it says what it had."""
    first, second = operated.begin(2)

    def make_anew() -> None:
        operated.make_anew(first)
        until("the operator knows it", lambda: (its := operated.driver().look().nodes.get(first)) and its.owner)

    backend = operated.backend(validation_image="")
    backend.cordon([first], RUN)
    operated.driver().swap([first], NEW, time.time() + 120, 0)
    make_anew()
    assert operated.swap(first)[first].done and operated.loaded(first) == NEW and operated.is_cordoned(first)
    make_anew()
    assert operated.restore(first)[first].done and operated.loaded(first) == OLD and operated.is_cordoned(first)
    operated.driver().settle()
    backend.uncordon([first], RUN)
    assert settled(operated, first, second) and not operated.is_cordoned(first) and operated.version() == OLD


def test_operands_leave_a_node_whose_driver_is_the_host_s_and_come_back(operated: OperatorCluster) -> None:
    """They hold that driver too; the operator leaves labels alone that it did not write."""
    first, second = operated.begin(2)
    for name in (first, second):
        operated.change(name, metadata={"labels": {"nvidia.com/gpu.deploy.driver": "pre-installed"}})
        until("only its operands are there", lambda name=name: len(operated.operator_pods(name)) == 2)
    before = operated.node(first)["metadata"]["labels"]
    backend = operated.backend(validation_image="")
    backend.cordon([first], RUN)
    assert evacuate(backend, [first], [])[first].as_dict()["empty"]
    operated.let_pass()
    assert operated.operator_pods(first) == [] and len(operated.operator_pods(second)) == 2
    result = backend.validate([first], RUN, {first: 8}, 120)[first]
    assert not result.failed, result.msg
    assert len(operated.operator_pods(first)) == 2
    backend.uncordon([first], RUN)
    assert operated.node(first)["metadata"]["labels"] == before


def test_a_node_that_somebody_holds_is_refused_and_left_held(operated: OperatorCluster) -> None:
    first, second = operated.begin(2)
    operated.change(second, metadata={"labels": {SKIP: "true"}})
    assert "somebody has set the label" in operated.judged()["nodes"][second]["reason"]
    operated.cordon(first)
    operated.swap(first)
    operated.driver().settle()
    assert operated.label(second, SKIP) == "true" and settled(operated, first)
    assert objects.NOTE not in operated.node(second)["metadata"]["annotations"]


def test_a_driver_pod_made_anew_out_of_turn_closes_its_node(operated: OperatorCluster) -> None:
    """Weaknesses 5 and 6: labels away for a moment, and a node at work has a driver pod of the new version."""
    first, second, third = operated.begin(3)
    operated.pod("job", second, gpus=1)
    operated.cordon(first)
    operated.swap(first)
    label = "feature.node.kubernetes.io/pci-10de.present"
    operated.change(second, metadata={"labels": {label: None}})
    until("no driver pod", lambda: operated.driver().look().nodes.get(second, None) is None)
    operated.change(second, metadata={"labels": {label: "true", "nvidia.com/gpu.present": "true"}})
    until("the new one crashes", lambda: _crashes(operated, second))
    driver = operated.driver()
    operated.cordon(third)
    driver.swap([third], NEW, time.time() + 120, 120)
    assert f"{second} got a driver pod of {NEW} in place of {OLD}" in driver.strayed[second]
    assert operated.is_cordoned(second) and operated.pod_phase("job") == "Running" and operated.loaded(second) == OLD
    until("its restarts are told", lambda: _warns(operated, second, "restarted under its running work"))
    # its turn: it is ours since it was us who closed it; once it is empty it is mended
    backend = operated.backend(evict_unmanaged=True)
    assert backend.cordon([second], RUN)[second].after.ours
    assert evacuate(backend, [second], go(operated, "job"))[second].as_dict()["empty"]
    assert operated.swap(second)[second].done
    operated.driver().settle()
    backend.uncordon([second], RUN)
    assert not operated.is_cordoned(second) and operated.loaded(second) == NEW


def _warns(operated: OperatorCluster, name: str, words: str) -> bool:
    return any(words in text for text in operated.judged()["nodes"][name]["warnings"])


def _crashes(operated: OperatorCluster, name: str) -> bool:
    node = operated.driver().look().nodes.get(name)
    return bool(node and node.pod and node.pod.trouble and node.pod.trouble.restarts)


def test_a_user_without_a_request_is_found_before_the_swap(operated: OperatorCluster) -> None:
    """Weakness 15: pods that only have the runtime class are invisible to the operator, and hold the driver."""
    (first, dummy) = operated.begin(2)
    here = {"kubernetes.io/hostname": first}
    (pod,) = operated.deployment("monitor", gpus=0, runtimeClassName="nvidia", nodeSelector=here)
    backend = operated.backend()
    backend.cordon([first], RUN)
    held = operated.swap(first)[first]
    assert held.failed and "cannot unload the old driver" in held.msg
    assert operated.restore(first)[first].done and operated.loaded(first) == OLD
    assert evacuate(backend, [first], go(operated, pod))[first].as_dict()["empty"]
    assert operated.swap(first)[first].done and operated.loaded(first) == NEW


def test_a_holder_that_is_no_pod_is_told_as_such(operated: OperatorCluster) -> None:
    """Weakness 27."""
    (first, dummy) = operated.begin(2)
    operated.set(held=[first])
    operated.cordon(first)
    its = operated.swap(first)[first]
    assert "which no pod asks for: look for processes that hold /dev/nvidia*" in its.msg
    assert operated.restore(first)[first].done and operated.loaded(first) == OLD


def test_a_validator_that_never_passes_is_not_done(operated: OperatorCluster) -> None:
    """Weaknesses 3, 38 and 57: the operator turns a validation that timed out into done."""
    (first, dummy) = operated.begin(2)
    operated.set(validator_fails=[first])
    operated.cordon(first)
    its = operated.fails_late(first, "validator is not ready")
    assert its.failed and "validator is not ready" in its.msg and operated.is_cordoned(first)


def test_the_loaded_version_counts_and_not_the_pod(operated: OperatorCluster) -> None:
    """Weakness 35; what feature discovery said before the driver was started is not believed."""
    (first, dummy) = operated.begin(2)
    operated.set(stale_gfd=[first])
    operated.cordon(first)
    its = operated.fails_late(first, "nobody has said")
    assert its.failed and "nobody has said yet which driver is loaded" in its.msg
    driver = operated.driver(loaded={first: NEW})
    assert driver.swap([first], NEW, time.time() + 120, 120)[first].done


def test_an_owner_that_is_written_over_is_told(operated: OperatorCluster) -> None:
    """A manifest kept in git puts its version back, while we wait or between two batches; that stays."""
    (first, dummy) = operated.begin(2)
    operated.set(init_seconds=30)
    operated.cordon(first)
    operated.driver().swap([first], NEW, time.time() + 120, 0)
    while_we_wait = operated.driver(sleep=lambda seconds: operated.write_version(OLD))
    its = while_we_wait.swap([first], NEW, time.time() + 120, 120)[first]
    assert its.failed and f"somebody has written {OLD} over {NEW} in ClusterPolicy cluster-policy" in its.msg
    operated.write_version(OTHER)
    words = f"somebody has written {OTHER} over {NEW} in ClusterPolicy cluster-policy"
    for act in (operated.swap, operated.restore):
        assert words in act(first)[first].msg
    said = "\n".join(operated.driver().settle())
    assert f"{words}" in said and "it is left so" in said and operated.version() == OTHER


def test_a_cosmetic_change_of_the_operator_restarts_nothing_of_ours(operated: OperatorCluster) -> None:
    """Weaknesses 21 and 53: an operator upgrade changes a label of the template, and so every revision."""
    first, second = operated.begin(2)
    operated.pod("job", second, gpus=1)
    operated.cordon(first)
    operated.swap(first)
    operated.set(release="v25.10.2")
    until("outdated", lambda: not operated.driver().look().nodes[second].in_sync)
    operated.let_pass()
    assert operated.pod_phase("job") == "Running" and operated.loaded(second) == OLD
    assert operated.swap(first)[first].done, "made anew while it is empty, not later under work"
    assert operated.driver().look().nodes[first].in_sync


def test_the_api_server_may_be_away_in_the_middle(operated: OperatorCluster) -> None:
    """Weakness 54."""
    (first, dummy) = operated.begin(2)
    operated.cordon(first)
    operated.driver().swap([first], NEW, time.time() + 60, 0)
    operated.lab("kill", "kube-apiserver")
    operated.lab("start", "kube-apiserver")
    assert operated.swap(first, seconds=120)[first].done and operated.loaded(first) == NEW


@pytest.mark.parametrize("release", ["v25.10.1", "v26.7.0"])
def test_pools_keep_their_version_until_their_turn(operated: OperatorCluster, release: str) -> None:
    """Weakness 56, and the reserve: an NVIDIADriver none of whose nodes is in a batch yet is not written at all."""
    pools = {"pool-a": {"pool": "a"}, "pool-b": {"pool": "b"}}
    a1, b1, a2, b2 = operated.begin(4, pools=pools, settings={"release": release})
    operated.cordon(a1)
    assert operated.swap(a1)[a1].done
    versions = {i["metadata"]["name"]: i["spec"]["version"] for i in operated.api.get(DRIVERS)["items"]}
    assert versions == {"pool-a": NEW, "pool-b": OLD}
    operated.delete_driver_pod(b1)  # whatever makes it anew: it is the old version
    until("b1 is up", lambda: operated.is_up(b1, OLD))
    assert [operated.loaded(n) for n in (a1, b1, a2, b2)] == [NEW, OLD, OLD, OLD]
    operated.cordon(a2, b1, b2)
    assert all(its.done for its in operated.swap(a2, b1, b2).values())
    operated.driver().settle()
    assert settled(operated, a1, a2, b1, b2)


def test_two_drivers_for_one_node_are_refused(operated: OperatorCluster) -> None:
    (first, dummy) = operated.begin(2, pools={"pool-a": {"pool": "a"}, "pool-b": {"pool": "b"}})
    operated.change(first, metadata={"labels": {"pool": None}})
    until("no driver pod", lambda: not operated.driver().look().nodes[first].pod)
    assert "no ClusterPolicy or NVIDIADriver gives it a driver" in operated.judged()["nodes"][first]["reason"]
