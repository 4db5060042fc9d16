# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the objects of the NVIDIA GPU Operator say about the driver of each node: decoded JSON in, facts out.

Labels, annotations and states are those of the operator's releases 23.9 to 26.7.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.base import error, warning
from ansible_collections.gpufleet.driver.plugins.module_utils.findings import Finding

STATE = "nvidia.com/gpu-driver-upgrade-state"
SKIP = "nvidia.com/gpu-driver-upgrade.skip"
INITIAL = "nvidia.com/gpu-driver-upgrade.node-initial-state.unschedulable"
REQUESTED = "nvidia.com/gpu-driver-upgrade-requested"
OWNER = "nvidia.com/gpu-operator.driver.owner"
PRESENT = "nvidia.com/gpu.present"
DEPLOY = "nvidia.com/gpu.deploy."
DEPLOY_VALIDATOR = DEPLOY + "operator-validator"
"""Label of a node that is to have a validator: between the old pod and the new one there is none for a moment."""

LOADED = "nvidia.com/cuda.driver-version.full"
DISCOVERED = "nvidia.com/gfd.timestamp"
COMPONENT = "app.kubernetes.io/component=nvidia-driver"
VALIDATOR = "app=nvidia-operator-validator"
PAUSED = "paused-for-driver-upgrade"

NOTE = "gpufleet.driver/operator"
"""Annotation of a node or of an owner: JSON of what a run of ours does with it and what was there before."""

RESTART = "restart"
"""The step in the note of a node whose driver pod was made anew and that was not proven since."""

CORDON = "gpufleet.driver/cordon"
"""Annotation of a node that a run has taken out of service, by whichever scheduler module."""

LAST = "gpufleet.driver/last-upgrade"
"""Annotation of a node: JSON of its last upgrade that is over, so that it can still go back to what it had."""

DONE, REQUIRED, FAILED = "upgrade-done", "upgrade-required", "upgrade-failed"
UNDER_WAY = (
    "cordon-required",
    "wait-for-jobs-required",
    "pod-deletion-required",
    "drain-required",
    "node-maintenance-required",
    "post-maintenance-required",
    "pod-restart-required",
    "validation-required",
    "uncordon-required",
)
STATES = ("", DONE, REQUIRED, FAILED, *UNDER_WAY)

_NOTED_AS_TEXT = ("run_id", "from", "to", "step", "gone", "strayed")
_HOPELESS = ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError")
_MANY_RESTARTS = 3
_PINNED = "sha256:"

Object = Mapping[str, Any]


@dataclass(frozen=True)
class Owner:
    """A ClusterPolicy or NVIDIADriver: whose driver DaemonSets say which version a node gets."""

    kind: str
    name: str
    uid: str
    version: str
    auto: bool
    """Whether the operator would upgrade nodes by itself."""
    precompiled: bool
    note: Mapping[str, Any]
    """What a run has written into it: its run_id, the version ``to``, and the one that was there before (``from``)."""

    @property
    def title(self) -> str:
        return f"{self.kind} {self.name}"

    @property
    def version_path(self) -> str:
        return "/spec/driver/version" if self.kind == "ClusterPolicy" else "/spec/version"

    @property
    def path(self) -> str:
        """Where the API server has it."""
        group, resource = ("v1", "clusterpolicies") if self.kind == "ClusterPolicy" else ("v1alpha1", "nvidiadrivers")
        return f"/apis/nvidia.com/{group}/{resource}/{self.name}"


@dataclass(frozen=True)
class DriverSet:
    """A driver DaemonSet. ``newest`` is the revision hash that new pods get, None while its controller is behind."""

    name: str
    uid: str
    owner: str | None
    """uid of its owner."""
    image: str
    newest: str | None
    desired: int

    @property
    def version(self) -> str:
        return version_of(self.image)


@dataclass(frozen=True)
class Trouble:
    """What keeps a pod from running. ``hopeless`` says that waiting longer is of no use."""

    container: str
    reason: str
    restarts: int
    init: bool
    hopeless: bool

    def __str__(self) -> str:
        again = f" after {self.restarts} restarts" if self.restarts else ""
        return f"container {self.container} is in {self.reason}{again}"


@dataclass(frozen=True)
class DriverPod:
    name: str
    namespace: str
    uid: str
    node: str
    set_uid: str
    image: str
    hash: str
    ready: bool
    deleting: bool
    begun: float | None
    """Unix seconds at which its driver container began to run."""
    trouble: Trouble | None
    secrets: tuple[str, ...]

    @property
    def version(self) -> str:
        return version_of(self.image)


@dataclass(frozen=True)
class DriverNode:
    """One node with a GPU and who owns its driver. ``problem`` says why nobody here does."""

    name: str
    owner: Owner | None
    set: DriverSet | None
    pod: DriverPod | None
    problem: str | None
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    cordoned: bool
    validators: tuple[bool, ...]
    """For each validator pod, whether it is ready."""

    @property
    def state(self) -> str:
        return self.labels.get(STATE, "")

    @property
    def note(self) -> Mapping[str, Any]:
        return note_of(self.annotations)

    @property
    def previous(self) -> str:
        """The version that the last upgrade of ours found on it, be it over or not; empty if there was none.

        Where somebody has removed its note, it is what its owner had before the version that it has was written there.
        """
        note, last, now = self.note, self.last, self.pod.version if self.pod else ""
        if note.get("step"):
            return str(note.get("from") or "") if note.get("from") != note.get("to") else ""
        if now and not note and not last and self.owner is not None:
            last = self.owner.note
        return str(last.get("from") or "") if now and last.get("to") == now != last.get("from") else ""

    @property
    def last(self) -> Mapping[str, Any]:
        """What its last upgrade that is over did: its run_id, and the versions from and to which it brought it."""
        return note_of(self.annotations, LAST)

    @property
    def run_id(self) -> str:
        """The run that is at work on it, or was the last to be; empty if there was none."""
        return str(self.note.get("run_id") or (self.last.get("run_id") if self.previous else "") or "")

    @property
    def unfinished(self) -> bool:
        """Whether a run has not come to an end with it: its driver is not proven, or it is still out of service."""
        return self.note.get("step") == RESTART or CORDON in self.annotations

    @property
    def held(self) -> bool:
        """Whether the operator's own upgrades pass it by."""
        return self.labels.get(SKIP) == "true"

    @property
    def in_sync(self) -> bool:
        """Whether its pod is of the newest template. That is no proof of the loaded driver."""
        return self.pod is not None and self.set is not None and self.pod.hash == self.set.newest

    @property
    def paused(self) -> tuple[str, ...]:
        """Operands that are kept off the node for the time of an upgrade."""
        return tuple(
            sorted(k[len(DEPLOY) :] for k, v in self.labels.items() if k.startswith(DEPLOY) and v.endswith(PAUSED))
        )

    @property
    def loaded(self) -> str | None:
        """The version that feature discovery found loaded, if it has looked since the driver was started."""
        stamp = self.labels.get(DISCOVERED, "")
        if not stamp.isdigit() or self.pod is None or self.pod.begun is None or int(stamp) < int(self.pod.begun):
            return None
        return self.labels.get(LOADED)

    @property
    def gpus(self) -> list[str]:
        """The model of each GPU, as feature discovery names it."""
        count = self.labels.get("nvidia.com/gpu.count", "")
        return [self.labels.get("nvidia.com/gpu.product", "unknown")] * int(count) if count.isdigit() else []

    def as_dict(self) -> dict[str, Any]:
        return {
            "owner": {"kind": self.owner.kind, "name": self.owner.name} if self.owner else None,
            "wanted": self.owner.version if self.owner else None,
            "pod": self.pod.name if self.pod else None,
            "pod_version": self.pod.version if self.pod else None,
            "in_sync": self.in_sync,
            "ready": self.pod is not None and self.pod.ready,
            "loaded": self.loaded,
            "gpus": self.gpus,
            "state": self.state,
            "held": self.held,
            "note": dict(self.note),
            "previous": self.previous,
            "run_id": self.run_id,
            "unfinished": self.unfinished,
        }


@dataclass(frozen=True)
class Operator:
    """The operator of a cluster and every GPU node it has."""

    release: tuple[int, ...]
    namespace: str
    owners: Mapping[str, Owner]
    """By uid."""
    sets: tuple[DriverSet, ...]
    nodes: Mapping[str, DriverNode]
    pods_of_sets: Mapping[str, int]
    """uid of a DaemonSet → how many pods it owns."""
    policies: int
    sandbox: bool

    @property
    def release_text(self) -> str:
        return ".".join(map(str, self.release)) or "unknown"

    def members(self, owner: Owner) -> list[DriverNode]:
        return [node for node in self.nodes.values() if node.owner is not None and node.owner.uid == owner.uid]


@dataclass(frozen=True)
class Listed:
    """Lists of objects as the API server gives them."""

    nodes: Sequence[Object]
    policies: Sequence[Object]
    drivers: Sequence[Object]
    sets: Sequence[Object]
    revisions: Sequence[Object]
    pods: Sequence[Object]
    validators: Sequence[Object]
    deployments: Sequence[Object]


def version_of(image: str) -> str:
    """The driver version in the name of a driver image: ``driver:570.133.20-ubuntu22.04``; empty if there is none."""
    tag = image.partition("@")[0].rpartition("/")[2].partition(":")[2]
    return tag.partition("-")[0]


def image_for(image: str, version: str) -> str | None:
    """The name of the image of another version, None if it is named by digest."""
    name, colon, tag = image.rpartition(":")
    if "@" in image or not colon or "/" in tag or "-" not in tag:
        return None
    return f"{name}:{version}-{tag.partition('-')[2]}"


def note_of(annotations: Mapping[str, str], key: str = NOTE) -> Mapping[str, Any]:
    """Our note among ``annotations``; empty if there is none, or somebody has written nonsense there."""
    try:
        found = json.loads(annotations.get(key, "{}"))
    except ValueError:
        return {}
    if not isinstance(found, dict):
        return {}
    return {
        name: str(value) if name in _NOTED_AS_TEXT else value
        for name, value in found.items()
        if isinstance(value, (str, int, float))
    }


def claimants(claims: Iterable[Object]) -> set[str]:
    """uids of the pods that have GPUs by a claim of NVIDIA's DRA driver."""
    out = set()
    for claim in claims:
        status = claim.get("status") or {}
        results = ((status.get("allocation") or {}).get("devices") or {}).get("results") or ()
        if any(str(each.get("driver", "")).endswith(".nvidia.com") for each in results):
            out |= {str(each.get("uid")) for each in status.get("reservedFor") or ()}
    return out


def asks_for_gpu(pod: Object, by_claim: Collection[str] = ()) -> bool:
    """Whether a pod that is not over asks for GPUs by name, or is one of those that have them by a claim."""
    if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
        return False
    if pod["metadata"]["uid"] in by_claim:
        return True
    spec = pod["spec"]
    for container in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ())):
        asked = container.get("resources") or {}
        names = (*(asked.get("limits") or ()), *(asked.get("requests") or ()))
        if any(name.startswith(("nvidia.com/gpu", "nvidia.com/mig-")) for name in names):
            return True
    return False


def read(listed: Listed) -> Operator:
    """Everything there is to know, from one look."""
    policies = sorted(listed.policies, key=lambda item: item["metadata"]["creationTimestamp"])
    active = policies[0] if policies else None
    driver = (active["spec"].get("driver") or {}) if active else {}
    own_objects = listed.drivers if active is None or driver.get("useNvidiaDriverCRD") else [active]
    release = _release(listed)
    owners = {item["metadata"]["uid"]: _owner(item, driver, release) for item in own_objects}
    namespace = _namespace(active, listed.sets, owners)
    sets = tuple(_set(each, listed.revisions, owners) for each in listed.sets if _is_in(each, namespace))
    by_uid = {each.uid: each for each in sets}
    pods = [pod for pod in map(_pod, listed.pods) if pod is not None and pod.namespace == namespace]
    counts: dict[str, int] = {}
    for pod in pods:
        counts[pod.set_uid] = counts.get(pod.set_uid, 0) + 1
    running: dict[str, DriverPod] = {}
    for pod in sorted(pods, key=lambda pod: not pod.deleting):  # of two, the one that stays counts
        running[pod.node] = pod
    validators: dict[str, list[bool]] = {}
    for item in listed.validators:
        if "deletionTimestamp" in item["metadata"] or not _is_in(item, namespace):
            continue
        validators.setdefault(item["spec"].get("nodeName", ""), []).append(_is_ready(item))
    nodes = {}
    for item in listed.nodes:
        labels = item["metadata"].get("labels") or {}
        name = item["metadata"]["name"]
        if labels.get(PRESENT) != "true" and name not in running:
            continue
        found = running.get(name)
        its_set = by_uid.get(found.set_uid) if found else None
        owner, problem = _owner_of(labels, its_set, owners, listed.drivers, driver)
        nodes[name] = DriverNode(
            name=name,
            owner=owner,
            set=its_set or next((each for each in sets if owner and each.owner == owner.uid), None),
            pod=found,
            problem=problem,
            labels=labels,
            annotations=item["metadata"].get("annotations") or {},
            cordoned=bool(item["spec"].get("unschedulable")),
            validators=tuple(validators.get(name, ())),
        )
    return Operator(
        release=release,
        namespace=namespace,
        owners=owners,
        sets=sets,
        nodes=nodes,
        pods_of_sets=counts,
        policies=len(policies),
        sandbox=bool(((active or {}).get("spec", {}).get("sandboxWorkloads") or {}).get("enabled")),
    )


def _namespace(active: Object | None, sets: Iterable[Object], owners: Mapping[str, Owner]) -> str:
    """Where the operator has all of its pods; somebody else's may have its labels, but not there."""
    said = ((active or {}).get("status") or {}).get("namespace")
    owned = sorted(sets, key=lambda item: not any(_owned_by(item, uid) for uid in owners))
    return str(said or next((item["metadata"]["namespace"] for item in owned), "gpu-operator"))


def _is_in(item: Object, namespace: str) -> bool:
    return bool(item["metadata"]["namespace"] == namespace)


def _release(listed: Listed) -> tuple[int, ...]:
    """From the chart's label, or the tag of the operator's own image; empty if neither says."""
    for item in (*listed.sets, *listed.deployments):
        chart = (item["metadata"].get("labels") or {}).get("helm.sh/chart", "")
        found = re.fullmatch(r"gpu-operator-v?(\d+)\.(\d+)\.(\d+).*", chart)
        if found:
            return tuple(int(part) for part in found.groups())
    for item in listed.deployments:
        for container in item["spec"]["template"]["spec"].get("containers") or ():
            found = re.search(r"gpu-operator:v?(\d+)\.(\d+)\.(\d+)", container.get("image", ""))
            if found:
                return tuple(int(part) for part in found.groups())
    return ()


def _owner(item: Object, policy_driver: Object, release: tuple[int, ...]) -> Owner:
    spec, meta = item["spec"], item["metadata"]
    own = (spec.get("driver") or {}) if item["kind"] == "ClusterPolicy" else spec
    policy = own.get("upgradePolicy")
    if item["kind"] == "NVIDIADriver" and release and release < (26, 7):
        policy = policy_driver.get("upgradePolicy") or {}
    elif item["kind"] == "NVIDIADriver" and policy is None:
        policy = {"autoUpgrade": True}
    return Owner(
        kind=item["kind"],
        name=meta["name"],
        uid=meta["uid"],
        version=str(own.get("version") or ""),
        auto=bool((policy or {}).get("autoUpgrade")),
        precompiled=bool(own.get("usePrecompiled")),
        note=note_of(meta.get("annotations") or {}),
    )


def _set(item: Object, revisions: Iterable[Object], owners: Mapping[str, Owner]) -> DriverSet:
    meta = item["metadata"]
    status = item.get("status") or {}
    mine = [each for each in revisions if _owned_by(each, meta["uid"])]
    latest = max(mine, key=lambda each: each["revision"], default=None)
    behind = status.get("observedGeneration", 0) < meta.get("generation", 0)
    owner = next((ref["uid"] for ref in meta.get("ownerReferences") or () if ref["uid"] in owners), None)
    containers = item["spec"]["template"]["spec"].get("containers") or ()
    return DriverSet(
        name=meta["name"],
        uid=meta["uid"],
        owner=owner,
        image=_driver_image(containers),
        newest=latest["metadata"]["name"][len(meta["name"]) + 1 :] if latest and not behind else None,
        desired=int(status.get("desiredNumberScheduled") or 0),
    )


def _owned_by(item: Object, uid: str) -> bool:
    return any(ref["uid"] == uid for ref in item["metadata"].get("ownerReferences") or ())


def _driver_image(containers: Iterable[Object]) -> str:
    listed = list(containers)
    chosen = [each for each in listed if each["name"] == "nvidia-driver-ctr"] or listed
    return str(chosen[0].get("image", "")) if chosen else ""


def _pod(item: Object) -> DriverPod | None:
    meta, spec = item["metadata"], item["spec"]
    node = spec.get("nodeName")
    uid = next((ref["uid"] for ref in meta.get("ownerReferences") or () if ref["kind"] == "DaemonSet"), None)
    if not node or uid is None:
        return None
    return DriverPod(
        name=meta["name"],
        namespace=meta["namespace"],
        uid=meta["uid"],
        node=node,
        set_uid=uid,
        image=_driver_image(spec.get("containers") or ()),
        hash=(meta.get("labels") or {}).get("controller-revision-hash", ""),
        ready=_is_ready(item),
        deleting="deletionTimestamp" in meta,
        begun=_begun(item),
        trouble=trouble_of(item),
        secrets=tuple(each["name"] for each in spec.get("imagePullSecrets") or () if "name" in each),
    )


def _is_ready(pod: Object) -> bool:
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return (pod.get("status") or {}).get("phase") == "Running" and bool(statuses) and all(s["ready"] for s in statuses)


def _begun(pod: Object) -> float | None:
    times = [
        ((status.get("state") or {}).get("running") or {}).get("startedAt")
        for status in (pod.get("status") or {}).get("containerStatuses") or ()
    ]
    moments = [datetime.fromisoformat(str(time).replace("Z", "+00:00")).timestamp() for time in times if time]
    return min(moments) if moments else None


def trouble_of(pod: Object) -> Trouble | None:
    """What keeps a pod's containers from running; None if nothing is known to."""
    status = pod.get("status") or {}
    for part, init in (("initContainerStatuses", True), ("containerStatuses", False)):
        for each in status.get(part) or ():
            reason = ((each.get("state") or {}).get("waiting") or {}).get("reason", "")
            restarts = int(each.get("restartCount") or 0)
            if reason in ("", "PodInitializing", "ContainerCreating"):
                continue
            hopeless = reason in _HOPELESS or (reason == "CrashLoopBackOff" and restarts >= _MANY_RESTARTS)
            return Trouble(each["name"], reason, restarts, init, hopeless)
    return None


def _owner_of(
    labels: Mapping[str, str],
    its_set: DriverSet | None,
    owners: Mapping[str, Owner],
    drivers: Sequence[Object],
    policy_driver: Object,
) -> tuple[Owner | None, str | None]:
    deployed = labels.get(DEPLOY + "driver", "")
    if deployed in ("pre-installed", "false"):
        return None, f"its driver belongs to the host (label {DEPLOY}driver={deployed})"
    if policy_driver.get("enabled") is False:
        return None, "the ClusterPolicy has spec.driver.enabled: false, so its driver belongs to the host"
    workload = labels.get("nvidia.com/gpu.workload.config", "container")
    if workload != "container":
        return None, f"it is for virtual machines (label nvidia.com/gpu.workload.config={workload})"
    if its_set is not None:
        if its_set.owner is None:
            return None, f"its driver pod belongs to DaemonSet {its_set.name}, which nobody owns any more"
        return owners[its_set.owner], None
    named = labels.get(OWNER)
    found = [owner for owner in owners.values() if owner.kind == "ClusterPolicy" or owner.name == named]
    if not found:
        matching = [
            item["metadata"]["uid"]
            for item in drivers
            if not item["spec"].get("default")
            and (item["spec"].get("nodeSelector") or {}).items() <= labels.items()
            and item["metadata"]["uid"] in owners
        ]
        if len(matching) > 1:
            names = " and ".join(sorted(owners[uid].name for uid in matching))
            return None, f"the NVIDIADrivers {names} both select it, so it gets no driver at all"
        default = [item["metadata"]["uid"] for item in drivers if item["spec"].get("default")]
        found = [owners[uid] for uid in matching or default if uid in owners]
    return (found[0], None) if found else (None, "no ClusterPolicy or NVIDIADriver gives it a driver")


# ---- findings --------------------------------------------------------------------------------------------------------


def of_operator(operator: Operator, target: str) -> list[Finding]:
    """What about the operator itself stands in the way of ``target``, or deserves a look."""
    found = []
    if not operator.owners:
        return [
            error(
                "operator.none",
                "there is no ClusterPolicy and no NVIDIADriver in this cluster",
                {},
                "set gpu_driver_owner to host if the driver was installed on the nodes",
            )
        ]
    if operator.release and operator.release < (23, 9):
        text = f"the GPU Operator is {operator.release_text}; expected 23.9.0 or newer"
        found.append(error("operator.release", text, {"release": operator.release_text}, "upgrade the operator first"))
    if operator.policies > 1:
        text = f"there are {operator.policies} ClusterPolicies; the operator ignores all but the oldest"
        found.append(warning("operator.policies", text, {}, "kubectl get clusterpolicies"))
    if operator.sandbox:
        text = "sandbox workloads are enabled, so the operator's own upgrade controller is off; this upgrade needs none"
        found.append(warning("operator.sandbox", text, {}))
    for each in operator.sets:
        owned = operator.pods_of_sets.get(each.uid, 0)
        if each.desired != owned:
            found.append(
                warning(
                    "operator.pods_missing",
                    f"DaemonSet {each.name} wants {each.desired} pods and has {owned}; the operator's own upgrade "
                    "controller does nothing for any node until they are equal, this upgrade goes on",
                    {"set": each.name, "desired": each.desired, "owned": owned},
                    f"kubectl -n {operator.namespace} get pods -o wide -l {COMPONENT}",
                )
            )
    for owner in operator.owners.values():
        if owner.precompiled:
            found.append(
                error(
                    "operator.precompiled",
                    f"{owner.title} has usePrecompiled: true, so its version is a branch ({owner.version}): what "
                    "build a node gets, or had, cannot be said, and an upgrade could be neither proven nor undone",
                    {"owner": owner.title, "version": owner.version},
                    "upgrade its nodes by the operator's own upgrade controller; do not change usePrecompiled while "
                    "they work, the operator restarts all their drivers at once",
                )
            )
        elif owner.version.startswith(_PINNED):
            found.append(
                error(
                    "operator.version",
                    f"{owner.title} names its driver by digest; {target} cannot be written there",
                    {"owner": owner.title, "version": owner.version},
                    "give spec.version a version, such as 580.95.05",
                )
            )
    return found


def of_node(node: DriverNode, target: str) -> list[Finding]:
    """What about one node stands in the way, or deserves a look."""
    name, evidence = node.name, {"node": node.name}
    if node.owner is None:
        text = f"{name} is not the operator's: {node.problem}"
        return [error("operator.owner", text, evidence, f"kubectl describe node {name}")]
    found = []
    ours = bool(node.note)
    if node.held and not ours:
        text = f"{name} is held on its driver: somebody has set the label {SKIP}=true"
        found.append(error("operator.held", text, evidence, f"kubectl label node {name} {SKIP}-"))
    if node.state in UNDER_WAY and not ours:
        text = f"the operator itself is upgrading {name} ({node.state})"
        found.append(error("operator.under_way", text, evidence, "wait for it, or set autoUpgrade to false"))
    if node.state not in STATES:
        text = f"{name} has the upgrade state {node.state!r}, unknown to the operator, which never touches it again"
        found.append(warning("operator.state", text, evidence, f"kubectl label node {name} {STATE}-"))
    if node.state == FAILED:
        text = f"{name} is in {FAILED} and takes one of maxParallelUpgrades from the operator; this upgrade needs none"
        found.append(warning("operator.failed", text, evidence))
    if REQUESTED in node.annotations:
        text = f"{name} has the annotation {REQUESTED}: the operator would evict its pods and restart nothing"
        found.append(warning("operator.requested", text, evidence, f"kubectl annotate node {name} {REQUESTED}-"))
    if node.paused and node.pod is not None and node.pod.ready and not ours:
        keys = " ".join(f"{DEPLOY}{part}=true" for part in node.paused)
        text = f"{name} still has {', '.join(node.paused)} paused for an upgrade that is over, so it offers no GPU"
        found.append(error("operator.paused", text, evidence, f"kubectl label node {name} --overwrite {keys}"))
    if node.pod is None:
        text = f"{name} has no driver pod"
        found.append(error("operator.pod", text, evidence, f"kubectl describe node {name}"))
    elif node.pod.trouble is not None:
        late = " under its running work" if node.pod.trouble.init else ""
        text = f"the driver pod {node.pod.name} of {name} was restarted{late}: {node.pod.trouble}"
        found.append(warning("operator.pod", text, evidence, "the upgrade empties the node and starts the pod anew"))
    elif node.loaded is not None and node.loaded != node.pod.version:
        text = f"{name} has driver {node.loaded} loaded and a pod of {node.pod.version}"
        found.append(warning("operator.loaded", text, evidence, "the upgrade starts the pod anew"))
    elif node.loaded is None:
        text = f"what {name} says about its driver is older than its driver pod, so it counts as unknown"
        found.append(warning("operator.stale", text, evidence, "look at the gpu-feature-discovery pod of the node"))
    if node.state == REQUIRED and not ours and not node.held:
        text = f"{name} waits in {REQUIRED} for a version that the operator has not given it"
        found.append(warning("operator.waiting", text, evidence))
    return found


def on_target(node: DriverNode, target: str) -> bool:
    """Whether there is nothing to do."""
    pod = node.pod
    return pod is not None and pod.ready and node.in_sync and pod.version == target and node.loaded == target
