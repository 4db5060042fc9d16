# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is read from the objects of the GPU Operator. The objects are cut to the fields that are read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.gpu_operator_objects import (
    NOTE,
    SKIP,
    STATE,
    Listed,
    Operator,
    asks_for_gpu,
    claimants,
    image_for,
    note_of,
    of_node,
    of_operator,
    on_target,
    read,
    trouble_of,
    version_of,
)

Object = dict[str, Any]
OLD, NEW = "570.133.20", "575.57.08"
STARTED = "2026-11-29T12:00:00Z"
STARTED_AT = 1795953600


def policy(version: str = OLD, crd: bool = False, **driver: Any) -> Object:
    return {
        "kind": "ClusterPolicy",
        "metadata": {"name": "gpu-cluster-policy", "uid": "u-policy", "creationTimestamp": "2025-01-01T00:00:00Z"},
        "spec": {
            "driver": {"version": version, "useNvidiaDriverCRD": crd, "upgradePolicy": {"autoUpgrade": True}, **driver}
        },
        "status": {"namespace": "nvidia"},
    }


def nvidia_driver(name: str, selector: Object | None = None, **spec: Any) -> Object:
    where = {"nodeSelector": selector} if selector else {"default": True}
    return {
        "kind": "NVIDIADriver",
        "metadata": {"name": name, "uid": f"u-{name}"},
        "spec": {"version": OLD, **where, **spec},
    }


def driver_set(owner: str = "u-policy", version: str = OLD, behind: bool = False, chart: str = "v25.10.1") -> Object:
    return {
        "metadata": {
            "name": f"driver-{owner}",
            "namespace": "nvidia",
            "uid": f"set-{owner}",
            "generation": 2,
            "labels": {"helm.sh/chart": f"gpu-operator-{chart}"},
            "ownerReferences": [{"uid": owner}],
        },
        "spec": {"template": {"spec": {"containers": [ctr(version)]}}},
        "status": {"observedGeneration": 1 if behind else 2, "desiredNumberScheduled": 1},
    }


def ctr(version: str) -> Object:
    return {"name": "nvidia-driver-ctr", "image": f"nvcr.io/nvidia/driver:{version}-ubuntu22.04"}


def revision(name: str, number: int, of: str = "set-u-policy") -> Object:
    return {"metadata": {"name": name, "ownerReferences": [{"uid": of}]}, "revision": number}


def pod(node: str, hash: str = "h1", version: str = OLD, of: str = "set-u-policy", **meta: Any) -> Object:
    running = {
        "name": "nvidia-driver-ctr",
        "ready": True,
        "restartCount": 0,
        "state": {"running": {"startedAt": STARTED}},
    }
    return {
        "metadata": {
            "name": f"driver-{node}",
            "namespace": "nvidia",
            "uid": f"pod-{node}",
            "labels": {"controller-revision-hash": hash},
            "ownerReferences": [{"kind": "DaemonSet", "uid": of}],
            **meta,
        },
        "spec": {"nodeName": node, "containers": [ctr(version)], "imagePullSecrets": [{"name": "ngc"}]},
        "status": {"phase": "Running", "containerStatuses": [running]},
    }


def node(name: str = "n1", annotations: Object | None = None, seen: int = STARTED_AT + 5, **labels: str) -> Object:
    given = {
        "nvidia.com/gpu.present": "true",
        "nvidia.com/gpu.deploy.driver": "true",
        "nvidia.com/cuda.driver-version.full": OLD,
        "nvidia.com/gfd.timestamp": str(seen),
        **{key.replace("__", "/"): value for key, value in labels.items()},
    }
    return {"metadata": {"name": name, "labels": given, "annotations": annotations or {}}, "spec": {}}


def world(**lists: Any) -> Operator:
    usual = {
        "nodes": [node()],
        "policies": [policy()],
        "drivers": [],
        "sets": [driver_set()],
        "revisions": [revision("driver-u-policy-h1", 1)],
        "pods": [pod("n1")],
        "validators": [],
        "deployments": [],
    }
    return read(Listed(**{**usual, **lists}))


def labelled(*labels: tuple[str, str]) -> Object:
    made = node()
    made["metadata"]["labels"] |= dict(labels)
    return made


def test_the_usual_case() -> None:
    found = world()
    assert (found.release, found.namespace) == ((25, 10, 1), "nvidia")
    one = found.nodes["n1"]
    assert one.owner and one.owner.title == "ClusterPolicy gpu-cluster-policy" and one.owner.auto
    assert (one.in_sync, one.loaded, one.pod and one.pod.version) == (True, OLD, OLD)
    assert on_target(one, OLD) and not on_target(one, NEW)
    assert not of_node(one, NEW) and not of_operator(found, NEW)


def test_the_newest_revision_of_this_daemonset_and_no_other_counts() -> None:
    other = revision("driver-u-policy-more-h9", 9, of="set-other")
    found = world(revisions=[revision("driver-u-policy-h2", 2), revision("driver-u-policy-h1", 1), other])
    assert found.sets[0].newest == "h2" and not found.nodes["n1"].in_sync
    assert world(sets=[driver_set(behind=True)]).sets[0].newest is None


def test_what_feature_discovery_said_before_the_driver_was_started_is_not_believed() -> None:
    stale = world(nodes=[node(seen=STARTED_AT - 1)]).nodes["n1"]
    assert stale.loaded is None and not on_target(stale, OLD)
    assert [finding.check for finding in of_node(stale, NEW)] == ["operator.stale"]


@pytest.mark.parametrize(
    ("item", "check", "level"),
    [
        pytest.param(labelled((SKIP, "true")), "operator.held", "error", id="somebody-holds-it"),
        pytest.param(labelled((STATE, "drain-required")), "operator.under_way", "error", id="operator-is-at-it"),
        pytest.param(labelled((STATE, "upgrade-odd")), "operator.state", "warning", id="W57-unknown-state"),
        pytest.param(labelled((STATE, "upgrade-failed")), "operator.failed", "warning", id="A-OPR-06-failed"),
        pytest.param(labelled((STATE, "upgrade-required")), "operator.waiting", "warning", id="W1-waits-for-weeks"),
        pytest.param(
            labelled(("nvidia.com/gpu.deploy.dcgm", "true_paused-for-driver-upgrade")),
            "operator.paused",
            "error",
            id="W23-leftover-pause",
        ),
        pytest.param(
            labelled(("nvidia.com/gpu.deploy.driver", "pre-installed")), "operator.owner", "error", id="A-OPR-03-host"
        ),
        pytest.param(
            labelled(("nvidia.com/gpu.workload.config", "vm-passthrough")), "operator.owner", "error", id="for-machines"
        ),
        pytest.param(
            node(annotations={"nvidia.com/gpu-driver-upgrade-requested": "true"}),
            "operator.requested",
            "warning",
            id="requested",
        ),
    ],
)
def test_what_hinders_a_node(item: Object, check: str, level: str) -> None:
    found = of_node(world(nodes=[item]).nodes["n1"], NEW)
    assert [(finding.check, finding.level) for finding in found] == [(check, level)]
    assert "n1" in found[0].message


def test_a_node_of_ours_is_not_taken_for_somebody_elses() -> None:
    item = node(annotations={NOTE: '{"from": "570.133.20"}'})
    item["metadata"]["labels"] |= {SKIP: "true", STATE: "upgrade-required"}
    assert not of_node(world(nodes=[item]).nodes["n1"], NEW)


def test_a_driver_pod_that_crashes_under_work_is_told() -> None:
    """A-OPR-01: restarted outside the controller, it cannot unload the driver and loops in its init container."""
    crashing = pod("n1", version=NEW)
    loop = {"name": "k8s-driver-manager", "ready": False, "restartCount": 14}
    loop["state"] = {"waiting": {"reason": "CrashLoopBackOff"}}
    crashing["status"] = {"phase": "Pending", "initContainerStatuses": [loop]}
    found = of_node(world(pods=[crashing]).nodes["n1"], NEW)
    assert found[0].check == "operator.pod" and "restarted under its running work" in found[0].message
    assert "CrashLoopBackOff after 14 restarts" in found[0].message


def test_pools() -> None:
    drivers = [nvidia_driver("a", {"pool": "a"}), nvidia_driver("b", {"pool": "b"})]
    lists = {"policies": [policy(crd=True)], "drivers": drivers, "pods": [], "sets": [], "revisions": []}
    assert world(nodes=[labelled(("pool", "b"))], **lists).nodes["n1"].owner.name == "b"  # type: ignore[union-attr]
    named = labelled(("nvidia.com/gpu-operator.driver.owner", "a"), ("pool", "b"))
    assert world(nodes=[named], **lists).nodes["n1"].owner.name == "a"  # type: ignore[union-attr]
    rest = {**lists, "drivers": [*drivers, nvidia_driver("rest")]}
    assert world(nodes=[labelled(("pool", "b"))], **rest).nodes["n1"].owner.name == "b"  # type: ignore[union-attr]
    assert world(nodes=[node()], **rest).nodes["n1"].owner.name == "rest"  # type: ignore[union-attr]
    both = {**lists, "drivers": [*drivers, nvidia_driver("c", {"pool": "b"})]}
    problem = world(nodes=[labelled(("pool", "b"))], **both).nodes["n1"].problem
    assert problem == "the NVIDIADrivers b and c both select it, so it gets no driver at all"


@pytest.mark.parametrize(
    ("chart", "own", "auto"),
    [("v26.7.0", None, True), ("v26.7.0", {"autoUpgrade": False}, False), ("v25.10.1", {"autoUpgrade": False}, True)],
)
def test_whose_upgrade_policy_a_pool_follows(chart: str, own: Object | None, auto: bool) -> None:
    """Before 26.7.0 the ClusterPolicy's is everybody's, since then its own, which is on if it is left out."""
    spec = {"upgradePolicy": own} if own else {}
    found = world(
        policies=[policy(crd=True)],
        drivers=[nvidia_driver("a", {"pool": "a"}, **spec)],
        sets=[driver_set("u-a", chart=chart)],
    )
    assert found.owners["u-a"].auto is auto


@pytest.mark.parametrize(
    ("lists", "check"),
    [
        pytest.param({"policies": [], "sets": [], "pods": []}, "operator.none", id="no-operator"),
        pytest.param({"sets": [driver_set(chart="v23.6.1")]}, "operator.release", id="old-release"),
        pytest.param({"policies": [policy(usePrecompiled=True)]}, "operator.precompiled", id="precompiled"),
        pytest.param({"policies": [policy("sha256:0f")]}, "operator.version", id="digest"),
        pytest.param({"pods": []}, "operator.pods_missing", id="W8-W9-desired-is-not-owned"),
    ],
)
def test_what_hinders_all(lists: Object, check: str) -> None:
    assert check in [finding.check for finding in of_operator(world(**lists), NEW)]


def test_of_several_policies_the_oldest_counts() -> None:
    younger = policy("1.2.3")
    younger["metadata"] |= {"uid": "u-2", "creationTimestamp": "2026-01-01T00:00:00Z"}
    found = world(policies=[younger, policy()])
    assert [owner.version for owner in found.owners.values()] == [OLD]
    assert "operator.policies" in [finding.check for finding in of_operator(found, NEW)]


def test_of_two_pods_the_one_that_stays_counts() -> None:
    going = pod("n1", deletionTimestamp=STARTED)
    coming = pod("n1", version=NEW)
    coming["metadata"]["uid"] = "new"
    found = world(pods=[coming, going]).nodes["n1"].pod
    assert found is not None and found.uid == "new"


@pytest.mark.parametrize(
    ("image", "version", "renamed"),
    [
        ("nvcr.io/nvidia/driver:570.133.20-ubuntu22.04", "570.133.20", "nvcr.io/nvidia/driver:575.57.08-ubuntu22.04"),
        (
            "reg:5000/driver:570-6.8.0-60-generic-ubuntu22.04",
            "570",
            "reg:5000/driver:575.57.08-6.8.0-60-generic-ubuntu22.04",
        ),
        ("nvcr.io/nvidia/driver@sha256:00ff", "", None),
        ("reg:5000/driver", "", None),
    ],
)
def test_versions_in_image_names(image: str, version: str, renamed: str | None) -> None:
    assert version_of(image) == version
    assert image_for(image, NEW) == renamed


@pytest.mark.parametrize("text", ["", "[]", "no json", '"x"'])
def test_a_note_that_is_nonsense_is_none(text: str) -> None:
    assert note_of({NOTE: text}) == {}


@pytest.mark.parametrize(
    ("reason", "restarts", "hopeless"),
    [
        ("ErrImagePull", 0, False),
        ("ImagePullBackOff", 0, True),
        ("CrashLoopBackOff", 1, False),
        ("CrashLoopBackOff", 3, True),
    ],
)
def test_when_waiting_longer_is_of_no_use(reason: str, restarts: int, hopeless: bool) -> None:
    status = {"name": "c", "restartCount": restarts, "state": {"waiting": {"reason": reason}}}
    found = trouble_of({"status": {"containerStatuses": [status]}})
    assert found is not None and found.hopeless is hopeless


@pytest.mark.parametrize(
    ("name", "phase", "asks"),
    [
        ("nvidia.com/gpu", "Running", True),
        ("nvidia.com/mig-1g.10gb", "Pending", True),
        ("nvidia.com/gpu", "Succeeded", False),
        ("cpu", "Running", False),
    ],
)
def test_who_asks_for_gpus(name: str, phase: str, asks: bool) -> None:
    spec = {"initContainers": [{}], "containers": [{"resources": {"limits": {name: 1}}}]}
    assert asks_for_gpu({"metadata": {"uid": "u"}, "spec": spec, "status": {"phase": phase}}) is asks


@pytest.mark.parametrize(("driver", "asks"), [("gpu.nvidia.com", True), ("net.example.com", False)])
def test_who_has_gpus_by_a_claim(driver: str, asks: bool) -> None:
    status = {"allocation": {"devices": {"results": [{"driver": driver}]}}, "reservedFor": [{"uid": "u"}]}
    by_claim = claimants([{"status": status}, {}])
    spec = {"containers": [{"resources": {"claims": [{"name": "g"}]}}]}
    assert asks_for_gpu({"metadata": {"uid": "u"}, "spec": spec}, by_claim) is asks


def test_pods_of_others_with_the_operator_s_labels_are_not_the_operator_s() -> None:
    theirs = driver_set(owner="nobody", version="999.99")
    theirs["metadata"] |= {"namespace": "a-tenant", "ownerReferences": []}
    one = pod("n1", version="999.99", of="set-nobody", namespace="a-tenant")
    for policies in ([policy()], [{**policy(), "status": {}}]):
        found = world(policies=policies, sets=[theirs, driver_set()], pods=[pod("n1"), one]).nodes["n1"]
        assert found.pod is not None and found.pod.version == OLD and found.problem is None


def test_a_node_whose_note_is_gone_goes_back_to_what_its_owner_had() -> None:
    note = {"run_id": "r", "from": OLD, "to": NEW}
    noted = policy()
    noted["metadata"]["annotations"] = {NOTE: json.dumps(note)}
    assert world(policies=[noted], pods=[pod("n1", version=NEW)]).nodes["n1"].previous == OLD
    assert world(policies=[noted], pods=[pod("n1", version=OLD)]).nodes["n1"].previous == ""
