# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils import fleet
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import kubernetes_objects as objects
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.kubernetes_facts import workload_facts
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.kubernetes_snapshot import Cluster, snapshot

NOW = 1_800_000_000.0
RULES = objects.Rules()


def container(gpus: int = 0, **more: Any) -> dict[str, Any]:
    made = {"name": "main", "image": "busybox"}
    if gpus:
        made["resources"] = {"limits": {"nvidia.com/gpu": str(gpus)}}
    return made | more


def pod(name: str = "p", node: str | None = "n1", owner: str | None = None, **more: Any) -> dict[str, Any]:
    """A running pod; ``owner`` is ``Kind/name``; labels, annotations and status by name, the rest goes to its spec."""
    meta: dict[str, Any] = {"name": name, "namespace": "ml", "uid": f"uid-{name}"}
    meta |= {part: more.pop(part) for part in ("labels", "annotations", "deletionTimestamp") if part in more}
    if owner:
        kind, owner_name = owner.split("/")
        meta["ownerReferences"] = [{"kind": kind, "name": owner_name, "uid": f"uid-{owner_name}", "controller": True}]
    status = {"phase": "Running", **more.pop("status", {})}
    spec = {"containers": [container(1)], **more, **({"nodeName": node} if node else {})}
    return {"metadata": meta, "spec": spec, "status": status}


def node(name: str = "n1", gpus: int = 8, labels: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    room = {"cpu": "96", "memory": "1Ti", "nvidia.com/gpu": str(gpus)}
    given = {"kubernetes.io/hostname": name, "nvidia.com/gpu.product": "H100"} | (labels or {})
    status = {"allocatable": room, "capacity": room, "conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": {"name": name, "labels": given, "annotations": {}}, "spec": spec, "status": status}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("8", 8), (8, 8), ("250m", 0.25), ("1Ki", 1024), ("1e3", 1000), ("2Gi", 2 << 30), ("1.5G", 1.5e9)),
        *(("5E", 5e18), ("", 0), ("many", 0), ("1Zi", 0), ("1.2.3", 0), ("1K", 0)),
    ],
)
def test_quantities(text: Any, value: float) -> None:
    assert objects.quantity(text) == value


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"containers": [container(2), container(1, name="b")]}, {"gpu": 3}),
        ({"containers": [container(resources={"requests": {"cpu": "1"}, "limits": {"cpu": "4"}})]}, {"cpu": 1000}),
        ({"containers": [container(resources={"limits": {"cpu": "4", "nvidia.com/mig-1g.10gb": "2"}})]},
         {"cpu": 4000, "mig-1g.10gb": 2}),
        ({"containers": [container(1)], "initContainers": [container(4)]}, {"gpu": 4}),
        ({"containers": [container(1)], "initContainers": [container(1, restartPolicy="Always"), container(2)]},
         {"gpu": 3}),
        ({"containers": [container(1)], "initContainers": [container(2), container(1, restartPolicy="Always")]},
         {"gpu": 2}),
        ({"containers": [container(resources={"requests": {"cpu": "1"}})], "overhead": {"cpu": "250m"}}, {"cpu": 1250}),
        ({"containers": [container(resources={"requests": {"cpu": "1"}})], "resources": {"requests": {"cpu": "3"}}},
         {"cpu": 3000}),
        ({"containers": [container(resources={"limits": {"nvidia.com/gpu.shared": "1", "rdma/hca": "1"}})]},
         {"gpu": 1}),
    ],
    ids=["sum", "request", "mig", "init-larger", "sidecar-before", "sidecar-after", "overhead", "of-the-pod", "shared"],
)  # fmt: skip
def test_what_a_pod_holds(spec: Any, expected: Any) -> None:
    assert objects.requests_of(spec) == expected


@pytest.mark.parametrize(
    ("made", "use"),
    [
        (pod(), "requests nvidia.com/gpu"),
        (pod(containers=[container(resources={"limits": {"nvidia.com/mig-2g.20gb": "1"}})]),
         "requests nvidia.com/mig-2g.20gb"),
        (pod(containers=[container()], initContainers=[container(1)]), "requests nvidia.com/gpu"),
        (pod(containers=[container(resources={"limits": {"nvidia.com/hostdev": "1"}})]), None),
        (pod("claimer", containers=[container()]), "holds a resource claim of NVIDIA's DRA driver"),
        (pod(containers=[container()], runtimeClassName="nvidia-cdi"), "runs under runtime class nvidia-cdi"),
        (pod(containers=[container()], runtimeClassName="gvisor"), None),
        (pod(containers=[container(env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "0,1"}])]),
         "sets NVIDIA_VISIBLE_DEVICES=0,1"),
        (pod(containers=[container(env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "none"}])]), None),
        (pod(containers=[container(env=[{"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": {}}])]), None),
        (pod(containers=[container()], volumes=[{"name": "v", "hostPath": {"path": "/dev/nvidia-uvm"}}]),
         "mounts /dev/nvidia-uvm of the host"),
        (pod(containers=[container()], volumes=[{"name": "v", "hostPath": {"path": "/run/nvidia/driver"}}]),
         "mounts /run/nvidia/driver of the host"),
        (pod(containers=[container(securityContext={"privileged": True})],
             volumes=[{"name": "v", "hostPath": {"path": "/"}}]), "is privileged and mounts / of the host"),
        (pod(containers=[container(securityContext={"privileged": True})]), None),
        (pod(containers=[container(image="nvcr.io/nvidia/k8s-device-plugin:v0.17.0")]), "is k8s-device-plugin"),
        (pod(containers=[container(image="team/my-k8s-device-plugin:1")]), None),
        (pod(containers=[container()], volumes=[{"name": "v", "hostPath": {"path": "/var/log"}}, {"name": "e"}]), None),
        (pod("stowaway", containers=[container()]), "has a GPU open, as its node says"),
    ],
)  # fmt: skip
def test_how_a_pod_uses_a_gpu_A_OPR_04(made: Any, use: str | None) -> None:
    assert objects.gpu_use(made, objects.known_users(["uid-claimer"], ["uid-stowaway"])) == use


@pytest.mark.parametrize(
    ("made", "owner", "name"),
    [
        (pod(), objects.Owner("Pod", "p"), "ml/p"),
        (pod(owner="ReplicaSet/llama-5d9c", labels={"pod-template-hash": "5d9c"}),
         objects.Owner("Deployment", "llama"), "ml/p"),
        (pod(owner="ReplicaSet/bare"), objects.Owner("ReplicaSet", "bare"), "ml/p"),
        (pod(owner="StatefulSet/db"), objects.Owner("StatefulSet", "db"), "ml/p"),
        (pod(owner="Job/eval"), objects.Owner("Job", "eval"), "ml/p"),
        (pod(owner="Job/fit", annotations={"batch.kubernetes.io/job-completion-index": "0"}),
         objects.Owner("Job", "fit", "fit"), "ml/Job/fit"),
        (pod(owner="Job/set-w-0", labels={"jobset.sigs.k8s.io/jobset-name": "set"}),
         objects.Owner("JobSet", "set", "set"), "ml/JobSet/set"),
        (pod(owner="PyTorchJob/train"), objects.Owner("PyTorchJob", "train", "train"), "ml/PyTorchJob/train"),
        (pod(owner="Job/t-node-0", labels={"trainer.kubeflow.org/trainjob-name": "t"}),
         objects.Owner("TrainJob", "t", "t"), "ml/TrainJob/t"),
        (pod(owner="StatefulSet/lws-0", labels={"leaderworkerset.sigs.k8s.io/name": "lws",
                                                "leaderworkerset.sigs.k8s.io/group-key": "0123456789abcdef"}),
         objects.Owner("LeaderWorkerSet", "lws/0123456789ab", "lws/0123456789ab"),
         "ml/LeaderWorkerSet/lws/0123456789ab"),
        (pod(owner="RayCluster/ray", labels={"ray.io/cluster": "ray"}), objects.Owner("RayCluster", "ray", "ray"),
         "ml/RayCluster/ray"),
        (pod(labels={"kueue.x-k8s.io/pod-group-name": "g"}), objects.Owner("PodGroup", "g", "g"), "ml/PodGroup/g"),
        (pod(owner="DaemonSet/dcgm"), objects.Owner("DaemonSet", "dcgm"), "ml/p"),
        (pod(owner="Node/n1", annotations={"kubernetes.io/config.mirror": "x"}), objects.Owner("StaticPod", "p"),
         "ml/p"),
    ],
)  # fmt: skip
def test_whose_a_pod_is(made: Any, owner: objects.Owner, name: str) -> None:
    assert objects.owner_of(made) == owner and objects.workload_name(made) == name


@pytest.mark.parametrize(
    ("selector", "chosen"),
    [
        (None, False),
        ({}, True),
        ({"matchLabels": {"a": "1"}}, True),
        ({"matchLabels": {"a": "2"}}, False),
        ({"matchExpressions": [{"key": "a", "operator": "In", "values": ["1", "3"]}]}, True),
        ({"matchExpressions": [{"key": "b", "operator": "NotIn", "values": ["1"]}]}, True),
        ({"matchExpressions": [{"key": "b", "operator": "Exists"}]}, False),
        ({"matchExpressions": [{"key": "b", "operator": "DoesNotExist"}]}, True),
        ({"matchExpressions": [{"key": "a", "operator": "Gt", "values": ["0"]}]}, True),
        ({"matchExpressions": [{"key": "a", "operator": "Lt", "values": ["x"]}]}, False),
        ({"matchExpressions": [{"key": "a", "operator": "New", "values": []}]}, False),
    ],
)
def test_selectors(selector: Any, chosen: bool) -> None:
    assert objects.selects(selector, {"a": "1"}) is chosen


def budget(name: str, app: str, allowed: int, expected: int, healthy: int) -> dict[str, Any]:
    status = {"disruptionsAllowed": allowed, "expectedPods": expected, "desiredHealthy": healthy}
    return {
        "metadata": {"namespace": "ml", "name": name},
        "spec": {"selector": {"matchLabels": {"app": app}}},
        "status": status,
    }


def test_a_budget_that_is_spent_now_but_yields_later_is_no_wall() -> None:
    budgets = objects.Budgets([budget("later", "a", 0, 4, 3), budget("never", "b", 0, 4, 4)])
    assert budgets.forbids(pod(labels={"app": "a"})) is None
    assert "the budget ml/never allows no disruption" in str(budgets.forbids(pod(labels={"app": "b"})))
    assert budgets.forbids(pod(labels={"app": "c"})) is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (container(image="vllm/vllm-openai:v0.9.1", args=["--model", "meta/llama", "--revision=abc"]),
         {"engine": "vllm", "engine_version": "v0.9.1", "model": "meta/llama", "model_revision": "abc"}),
        (container(image="reg:5000/x@sha256:00", command=["sh", "-c", "exec vllm serve qwen/q2 --port 80"]),
         {"engine": "vllm", "model": "qwen/q2"}),
        (container(image="lmsysorg/sglang:v0.4", command=["python3", "-m", "sglang.launch_server", "--model-path=/m"]),
         {"engine": "sglang", "engine_version": "v0.4", "model": "/m"}),
        (container(image="nvcr.io/nvidia/tritonserver:25.01-py3", args=["tritonserver", "--model-repository=s3://m"]),
         {"engine": "triton", "engine_version": "25.01-py3", "model": "s3://m"}),
        (container(image="ghcr.io/huggingface/text-generation-inference:3.0", args=["--model-id", "x/y"]),
         {"engine": "tgi", "engine_version": "3.0", "model": "x/y"}),
        (container(image="nvcr.io/nim/meta/llama3:1.0", env=[{"name": "NIM_MODEL_NAME", "value": "llama3"}]),
         {"engine": "nim", "engine_version": "1.0", "model": "llama3"}),
        (container(image="team/train:7", command=["torchrun", "train.py"]),
         {"engine": "pytorch", "engine_version": "7"}),
        (container(image="busybox:1"), {}),
    ],
)  # fmt: skip
def test_engine_and_model(given: Any, expected: Any) -> None:
    facts = dict(workload_facts(pod(containers=[given]), {}))
    assert facts.pop("image") == given["image"].rpartition("@")[2] and facts == expected


def test_the_image_is_known_by_what_runs_not_by_its_tag() -> None:
    running = {"containerStatuses": [{"name": "main", "imageID": "docker.io/x/y@sha256:abc"}]}
    assert dict(workload_facts(pod(status=running), {}))["image"] == "sha256:abc"


def test_expressions_give_further_facts_and_count_more() -> None:
    made = pod(containers=[container(image="vllm/vllm:1", args=["--model", "guessed"])], labels={"model": "said"})
    facts = dict(workload_facts(made, {"model": "metadata.labels.model", "arguments": "spec.containers[0].args"}))
    assert facts["model"] == "said" and facts["arguments"] == ("--model", "guessed") and facts["engine"] == "vllm"
    assert "length" not in dict(workload_facts(made, {"length": "length(metadata.generation)"}))
    with pytest.raises(ValueError, match="is no JMESPath expression"):
        workload_facts(made, {"model": "metadata[."})


@pytest.mark.parametrize(
    ("labels", "started", "version"),
    [
        ({"nvidia.com/cuda.driver-version.full": "570.133.20"}, None, "570.133.20"),
        ({"nvidia.com/cuda.driver.major": "570", "nvidia.com/cuda.driver.minor": "133",
          "nvidia.com/cuda.driver.rev": "20"}, None, "570.133.20"),
        ({"nvidia.com/cuda.driver-version.full": "570.133.20", "nvidia.com/gfd.timestamp": "150"}, 100.0, "570.133.20"),
        ({"nvidia.com/cuda.driver-version.full": "570.133.20", "nvidia.com/gfd.timestamp": "50"}, 100.0, None),
        ({"nvidia.com/cuda.driver-version.full": "570.133.20", "nvidia.com/gfd.timestamp": "x"}, 100.0, None),
        ({}, None, None),
    ],
    ids=["label", "old-names", "fresh", "stale", "no-time", "none"],
)  # fmt: skip
def test_a_version_label_older_than_the_driver_is_not_believed(labels: Any, started: Any, version: Any) -> None:
    assert objects.label_version(node(labels=labels), started) == version


@pytest.mark.parametrize(
    ("tolerations", "taint", "expected"),
    [
        ([{"operator": "Exists"}], {"key": "a", "effect": "NoExecute"}, True),
        ([{"key": "a", "operator": "Exists"}], {"key": "a", "value": "x", "effect": "NoSchedule"}, True),
        ([{"key": "a", "value": "x"}], {"key": "a", "value": "x", "effect": "NoSchedule"}, True),
        ([{"key": "a", "value": "y"}], {"key": "a", "value": "x", "effect": "NoSchedule"}, False),
        ([{"key": "a", "operator": "Exists", "effect": "NoExecute"}], {"key": "a", "effect": "NoSchedule"}, False),
        ([], {"key": "a", "effect": "NoSchedule"}, False),
    ],
)
def test_tolerations(tolerations: Any, taint: Any, expected: bool) -> None:
    assert objects.tolerates(tolerations, taint) is expected


# ---- the fleet


def seen(pods: list[Any], nodes: list[Any] | None = None, rules: objects.Rules = RULES, **more: Any) -> fleet.Snapshot:
    made = snapshot(Cluster(nodes or [node()], pods, **more), rules, NOW)
    assert fleet.parse(fleet.dump(made)) == made, "a snapshot can be written and read"
    return made


def test_free_is_what_the_scheduler_could_still_give() -> None:
    pods = [
        pod("a", containers=[container(2)]),
        pod("cpu", containers=[container(resources={"requests": {"cpu": "2"}})]),
        pod("over", status={"phase": "Succeeded"}),
        pod("elsewhere", node="n9"),
    ]
    (one,) = seen(pods).nodes
    assert one.free == {"gpu": 6, "cpu": 94000, "memory": 1 << 40} and one.gpus == 8


def test_what_a_tenant_writes_is_shown_on_one_line_and_in_short() -> None:
    noise = "\x1b[2J{{ 1 }}\nok" + "x" * 100_000
    said = [
        objects.hindrance(pod(annotations={objects.PREFIX + "may": noise}), objects.Owner("Job", "j"), objects.Rules()),
        objects.gpu_use(pod(containers=[container(env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": noise}])])),
        objects.gpu_use(pod(containers=[], volumes=[{"name": "v", "hostPath": {"path": f"/dev/nvidia{noise}"}}])),
    ]
    assert all(text and text.isprintable() and len(text) < 600 and "{{ 1 }}?ok" in text for text in said)


def test_only_work_with_gpus_is_work_and_daemonsets_are_not() -> None:
    pods = [
        pod("a"),
        pod("web", containers=[container()]),
        pod("dcgm", owner="DaemonSet/dcgm"),
        pod("ignored", owner="StatefulSet/x"),
        pod("driver", owner="DaemonSet/driver", labels={"app.kubernetes.io/managed-by": "gpu-operator"}),
        pod("claims-to-be-driver", labels={"app.kubernetes.io/component": "nvidia-driver"}),
        pod("claims-to-be-operand", nodeSelector={"nvidia.com/gpu.deploy.driver": "true"}),
        pod("cni", annotations={"kubernetes.io/config.mirror": "x"}, volumes=[{"name": "d", "hostPath": {"path": "/"}}],
            containers=[container(securityContext={"privileged": True})]),
        pod("static", annotations={"kubernetes.io/config.mirror": "x"}),
    ]  # fmt: skip
    work = {each.name: each for each in seen(pods, rules=objects.Rules(ignore=["ml/StatefulSet/*"])).workloads}
    assert set(work) == {"ml/a", "ml/claims-to-be-driver", "ml/claims-to-be-operand", "ml/static"}
    assert work["ml/static"].may == {fleet.PROTECT}


def test_a_gang_is_one_workload_that_waits_if_one_of_it_must() -> None:
    pods = [
        pod("w0", owner="PyTorchJob/fit", annotations={objects.PREFIX + "remaining": "60"}),
        pod("w1", node="n2", owner="PyTorchJob/fit", annotations={objects.PREFIX + "remaining": "90"}),
    ]
    (work,) = seen(pods, [node(), node("n2")]).workloads
    assert [member.node for member in work.members] == ["n1", "n2"] and work.kind == "PyTorchJob"
    assert work.may == {fleet.WAIT, fleet.RESTART} and work.remaining == 90
    pods[1]["spec"]["volumes"] = [{"name": "scratch", "emptyDir": {}}]
    (work,) = seen(pods, [node(), node("n2")]).workloads
    assert work.may == {fleet.WAIT}


def test_annotations_of_tenants_that_make_no_sense_change_nothing() -> None:
    said = {objects.PREFIX + name: "soon" for name in ("remaining", "at-risk", "capture")}
    plain, odd = seen([pod("a"), pod("b", annotations=said)]).workloads
    assert (odd.remaining, odd.at_risk, odd.capture) == (None, plain.at_risk, plain.capture)


def test_times_come_from_annotations_and_deadlines() -> None:
    said = {objects.PREFIX + "at-risk": "600", objects.PREFIX + "checkpointers": "hook, cuda_criu"}
    started = {"startTime": "2027-01-15T08:00:00Z"}  # NOW
    one, two = seen([pod("a", annotations=said), pod("b", activeDeadlineSeconds=90, status=started)]).workloads
    assert one.at_risk == 600 and one.backends == ("hook", "cuda_criu")
    assert two.remaining == 90


def test_budgets_and_two_on_one_pod() -> None:
    budgets = [budget("a", "x", 1, 3, 2), budget("b", "x", 1, 3, 2), budget("c", "y", 2, 3, 1)]
    found = seen([pod("a", labels={"app": "x"}), pod("b", labels={"app": "y"})], budgets=budgets)
    assert [work.budgets for work in found.workloads] == [("ml/a + ml/b",), ("ml/c",)]
    assert found.budgets == {"ml/a + ml/b": 0, "ml/c": 2}


def test_where_work_may_run_is_said_by_labels_or_by_names() -> None:
    terms = [
        {"matchExpressions": [{"key": "pool", "operator": "NotIn", "values": ["b"]}]},
        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n2"]}]},
    ]
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
    pods = [
        pod("plain", nodeSelector={"pool": "a", objects.STEERED + "0": "true"}),
        pod("complex", affinity=affinity),
    ]
    nodes = [node("n1", labels={"pool": "a"}), node("n2", labels={"pool": "b"}), node("n3", labels={"pool": "b"})]
    plain, complicated = seen(pods, nodes).workloads
    assert plain.requires == {"pool": ("a",)}
    assert complicated.requires == {"kubernetes.io/hostname": ("n1", "n2")}


def test_taints_of_the_fleet_and_who_bears_them() -> None:
    theirs = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
    ours = {"key": objects.TAINT, "effect": "NoSchedule"}
    cordon = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    pods = [pod("a", tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists"}]), pod("b")]
    found = seen(pods, [node(taints=[theirs, ours, cordon])])
    assert found.nodes[0].taints == ("nvidia.com/gpu=present:NoSchedule",)
    assert [work.tolerates for work in found.workloads] == [("nvidia.com/gpu=present:NoSchedule",), ()]


def test_who_keeps_a_node_out_of_service() -> None:
    fields = [{"manager": "kubectl-cordon", "fieldsV1": {"f:spec": {"f:unschedulable": {}}}}]
    theirs, ours, away = node("n1", unschedulable=True), node("n2", unschedulable=True), node("n3")
    theirs["metadata"]["managedFields"] = fields
    ours["metadata"]["annotations"][objects.MARK] = json.dumps({"run_id": "r1"})
    away["status"]["conditions"] = [{"type": "Ready", "status": "Unknown"}]
    one, two, three = seen([], [theirs, ours, away]).nodes
    assert (one.cordoned_by, one.schedulable, one.unfinished) == ("kubectl-cordon", False, False)
    assert (two.cordoned_by, two.schedulable, two.unfinished) == (None, False, True)
    assert three.skip == "not Ready"


def test_gpus_that_dra_gives() -> None:
    device = {"attributes": {"type": {"string": "gpu"}, "productName": {"string": "B200"},
                             "driverVersion": {"version": "580.65.6"}}}  # fmt: skip
    slices = [{"spec": {"driver": "gpu.nvidia.com", "nodeName": "n1", "devices": [device, device]}}]
    result = {"driver": "gpu.nvidia.com", "pool": "n1", "device": "gpu-0"}
    claim = {"status": {"allocation": {"devices": {"results": [result]}},
                        "reservedFor": [{"resource": "pods", "uid": "uid-a"}]}}  # fmt: skip
    watching = {"status": {"allocation": {"devices": {"results": [result | {"adminAccess": True}]}},
                           "reservedFor": [{"resource": "pods", "uid": "uid-b"}]}}  # fmt: skip
    bare = node(gpus=0)
    bare["metadata"]["labels"] = {}
    pods = [pod("a", containers=[container()]), pod("b", containers=[container()])]
    found = seen(pods, [bare], claims=[claim, watching], slices=slices)
    (one,) = found.nodes
    assert (one.gpus, one.free["gpu"], one.gpu_model, one.loaded) == (2, 1, "B200", "580.65.6")
    assert [work.members[0].resources.get("gpu") for work in found.workloads] == [1, None]


def test_a_stale_label_is_known_by_the_driver_container_s_start() -> None:
    started = {"containerStatuses": [{"name": "nvidia-driver-ctr",
                                      "state": {"running": {"startedAt": "2027-01-15T08:00:00Z"}}}]}  # fmt: skip
    label = {"app.kubernetes.io/component": "nvidia-driver"}
    driver = pod("driver", owner="DaemonSet/driver", labels=label, status=started, containers=[])
    labels = {"nvidia.com/cuda.driver-version.full": "570.1", "nvidia.com/gfd.timestamp": str(int(NOW) - 60)}
    assert seen([driver], [node(labels=labels)]).nodes[0].loaded is None
    labels["nvidia.com/gfd.timestamp"] = str(int(NOW) + 60)
    assert seen([driver], [node(labels=labels)]).nodes[0].loaded == "570.1"


def test_work_that_waits_for_gpus_is_the_queue() -> None:
    pods = [
        pod("a", node=None, containers=[container(4)], status={"phase": "Pending"}),
        pod("b", node=None, status={"phase": "Pending"}, nodeSelector={"nvidia.com/gpu.product": "A100"}),
    ]
    assert {model: demand.gpus for model, demand in seen(pods).queue.items()} == {"H100": 4, "A100": 1}


# ---- DaemonSets off a node and back


@pytest.mark.parametrize(
    ("selector", "others", "keys"),
    [
        ({"nvidia.com/gpu.deploy.dcgm": "true"}, [], ["nvidia.com/gpu.deploy.dcgm"]),
        ({"nvidia.com/gpu.present": "true", "kubernetes.io/os": "linux", "topology.kubernetes.io/zone": "a"}, [], []),
        ({"agents": "on"}, [{"agents": "on"}], []),
        ({"agents": "on", "dcgm": "on"}, [{"agents": "on"}], ["dcgm"]),
        ({}, [], []),
    ],
)
def test_by_which_label_a_daemonset_can_be_taken_off(selector: Any, others: Any, keys: list[str]) -> None:
    made = pod(nodeSelector=selector)
    assert objects.pause_keys(made, [pod(nodeSelector=each) for each in others]) == keys


def test_labels_come_back_as_they_were_unless_somebody_changed_them() -> None:
    before = {"dcgm": "on", "probe": "v2", "other": "x"}
    labels, annotations = objects.paused(before, {"a": "b"}, ["dcgm", "probe", "absent"])
    assert labels == {"dcgm": objects.PAUSE_VALUE, "probe": objects.PAUSE_VALUE, "other": "x"}
    again = objects.paused(labels, annotations, ["dcgm"])
    assert again == (labels, annotations), "the first write wins"
    labels["probe"] = "v3"
    assert objects.unpaused(labels, annotations) == ({"dcgm": "on", "probe": "v3", "other": "x"}, {"a": "b"})


def paths(item: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every value in an object is."""
    pairs = item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ()
    for key, value in pairs:
        yield (*at, key)
        yield from paths(value, (*at, key))


def without(item: Any, path: tuple[Any, ...]) -> Any:
    made = copy.deepcopy(item)
    at = made
    for key in path[:-1]:
        at = at[key]
    del at[path[-1]]
    return made


WHOLE: dict[str, list[Any]] = {
    "nodes": [
        node(unschedulable=True)
        | {"metadata": {"name": "n1", "annotations": {objects.MARK: "{}"}, "labels": {"nvidia.com/gpu.present": "true"},
                        "managedFields": [{"manager": "m", "fieldsV1": {"f:spec": {"f:unschedulable": {}}}}]}}
    ],
    "pods": [
        pod(owner="ReplicaSet/llama-7", labels={"pod-template-hash": "7"}, annotations={"gpufleet.driver/may": "wait"},
            tolerations=[{"key": "k", "operator": "Exists", "effect": "NoSchedule"}],
            affinity={"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]}}},
            volumes=[{"name": "v", "hostPath": {"path": "/dev"}}, {"name": "e", "emptyDir": {"medium": "Memory"}}],
            initContainers=[container(1, restartPolicy="Always", name="i")],
            status={"startTime": "2026-01-01T00:00:00Z", "conditions": [{"type": "Ready", "status": "True"}],
                    "containerStatuses": [{"name": "main", "imageID": "x@sha256:1", "state": {"running": {}}}]}),
    ],
    "budgets": [{"metadata": {"name": "b", "namespace": "ml"}, "status": {"expectedPods": 2, "desiredHealthy": 1},
                 "spec": {"selector": {"matchExpressions": [{"key": "app", "operator": "Exists"}]}}}],
    "claims": [{"status": {"reservedFor": [{"resource": "pods", "uid": "uid-p", "name": "p"}],
                           "allocation": {"devices": {"results": [{"driver": "gpu.nvidia.com", "device": "g"}]}}}}],
    "slices": [{"spec": {"driver": "gpu.nvidia.com", "nodeName": "n1",
                         "devices": [{"name": "g", "attributes": {"productName": {"string": "H100"}}}]}}],
}  # fmt: skip
"""One object of each kind with everything in it that is read."""

REQUIRED = {
    *(("metadata",), ("metadata", "name"), ("metadata", "namespace"), ("metadata", "uid"), ("spec",)),
    *(("kind",), ("name",), ("key",), ("operator",), ("uid",), ("type",), ("effect",)),
}
"""What the API server lets nobody leave out, by the end of its path."""


@pytest.mark.parametrize("kind", WHOLE)
def test_an_object_may_lack_whatever_the_server_does_not_ask_for(kind: str) -> None:
    for path in paths(WHOLE[kind][0]):
        if path[-1:] not in REQUIRED and path not in REQUIRED and "conditions" not in path[:-1]:
            snapshot(Cluster(**WHOLE | {kind: [without(WHOLE[kind][0], path)]}), RULES, NOW)
    snapshot(Cluster(**WHOLE), RULES, NOW)


@pytest.mark.parametrize(
    ("text", "mark"),
    [
        ("{", {"run_id": "unknown"}),
        ("[]", {"run_id": "unknown"}),
        ("null", {"run_id": "unknown"}),
        ('{"run_id": 7, "gpus": "eight", "pauses": [1]}', {"run_id": "7"}),
        ('{"run_id": "r", "gpus": {"nvidia.com/gpu": null}, "pauses": {"a": "b"}}', {"run_id": "r"}),
        ('{"run_id": "r", "gpus": {"nvidia.com/gpu": 8}, "pauses": {"a": ["b", null]}}',
         {"run_id": "r", "gpus": {"nvidia.com/gpu": 8}, "pauses": {"a": ["b", None]}}),
    ],
)  # fmt: skip
def test_a_mark_that_somebody_has_edited_still_says_that_the_node_is_ours(text: str, mark: dict[str, Any]) -> None:
    made = node()
    made["metadata"]["annotations"][objects.MARK] = text
    assert objects.mark_of(made) == mark
