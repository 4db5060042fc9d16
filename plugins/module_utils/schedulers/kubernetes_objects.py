# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What Kubernetes objects say about a GPU fleet: decoded JSON in, values out. Nothing here asks a server.

Names, labels and annotations are written by tenants: what they say is checked, and ignored where it makes no sense.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils.fleet import (
    PERMISSIONS,
    PROTECT,
    RESTART,
    WAIT,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.kubernetes_api import shown

PREFIX = "gpufleet.driver/"
MARK = PREFIX + "cordon"
"""Annotation of a node that we took out of service: JSON with run_id, at and what was there before."""

KEEP = PREFIX + "keep-cordoned"
"""Annotation by which a person keeps a node out of service that we took out."""

TAINT = PREFIX + "upgrading"
"""Taint (NoSchedule) of a node that we took out of service: it stays closed even if somebody uncordons it. DaemonSets
do not tolerate it, so it goes when they are to come back."""

PAUSED = PREFIX + "paused"
"""Annotation of a node: JSON of the labels by which DaemonSets were taken off it, with their former values. While a
label's value is PAUSE_VALUE, the DaemonSets that select on it keep off the node."""

STEERED = PREFIX + "to-"
"""How the labels of nodes that were chosen for moved work begin; a digest of whose it is follows."""

ELSEWHERE = {"key": PREFIX + "elsewhere", "effect": "PreferNoSchedule"}
"""Taint of nodes that the scheduler is asked to take last, where it cannot be told which pods should go where."""

PAUSE_VALUE = "paused-by-gpufleet"

NOBODY = "somebody"
"""Who cordoned a node if the API server did not note it."""

Object = Mapping[str, Any]

_GPU_RESOURCE = re.compile(r"nvidia\.com/(gpu(\.shared)?|pgpu|mig-[0-9]+g\.[0-9a-z.+]+)$")
_DRA_DRIVERS = frozenset(("gpu.nvidia.com", "compute-domain.nvidia.com"))
_GPU_DRA_DRIVER = "gpu.nvidia.com"
_AGENTS = re.compile(
    r"(?:^|/)(k8s-device-plugin|gpu-feature-discovery|dcgm(?:-exporter)?|k8s-mig-manager|k8s-dra-driver-gpu)[:@]"
)
"""NVIDIA's programs that watch over the GPUs of a node, whose images ask for all of them by themselves."""

_NO_DEVICES = frozenset(("", "void", "none"))
_DEVICE_PATHS = ("/dev/nvidia", "/dev/dri", "/proc/driver/nvidia", "/run/nvidia")
_EVERY_DEVICE_PATHS = frozenset(("/", "/dev", "/dev/"))
_OVER = frozenset(("Succeeded", "Failed"))


# ---- quantities ------------------------------------------------------------------------------------------------------

_FACTORS = {
    "": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60,
}  # fmt: skip
_QUANTITY = re.compile(r"([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)([numkKMGTPE]i?|)$")


@lru_cache(maxsize=4096)
def quantity(text: str | int | float) -> float:
    """The number that a Kubernetes quantity stands for; 0 for what is none.

    >>> quantity("250m"), quantity("1Ki"), quantity("1e3")
    (0.25, 1024.0, 1000.0)
    """
    found = _QUANTITY.match(str(text))
    try:
        return float(found[1]) * _FACTORS[found[2]] if found else 0.0
    except (ValueError, KeyError):
        return 0.0


@lru_cache(maxsize=512)
def _planned(name: str) -> tuple[str, int] | None:
    """The planner's name of a resource, and how many of its units one is; None if it does not count it."""
    if name == "cpu":
        return "cpu", 1000
    if name == "memory":
        return "memory", 1
    if is_gpu_resource(name):
        short = name[len("nvidia.com/") :]
        return (short if short.startswith("mig-") else "gpu"), 1
    return None


def resources(listed: Mapping[str, Any] | None) -> dict[str, int]:
    """A resource list in the planner's names and units (see :data:`fleet.Resources`)."""
    out: dict[str, int] = {}
    for name, amount in (listed or {}).items():
        known = _planned(name)
        if known:
            out[known[0]] = out.get(known[0], 0) + round(quantity(amount) * known[1])
    return out


def requests_of(spec: Object) -> dict[str, int]:
    """What the scheduler sets aside for a pod: its containers together, or the largest init container with the
    sidecars started before it, plus overhead; a request of the pod itself counts instead."""
    total: dict[str, int] = {}
    for container in spec.get("containers") or ():
        add(total, _asked(container))
    if spec.get("initContainers"):
        sidecars: dict[str, int] = {}
        peak: dict[str, int] = {}
        for container in spec["initContainers"]:
            asked = _asked(container)
            if container.get("restartPolicy") == "Always":
                add(sidecars, asked)
                asked = {}
            for name in {*sidecars, *asked}:
                peak[name] = max(peak.get(name, 0), sidecars.get(name, 0) + asked.get(name, 0))
        add(total, sidecars)
        for name, amount in peak.items():
            total[name] = max(total.get(name, 0), amount)
    if spec.get("resources"):
        total.update(_asked(spec))
    if spec.get("overhead"):
        add(total, resources(spec["overhead"]))
    return total


def _asked(container: Object) -> dict[str, int]:
    given = container.get("resources")
    if not given:
        return {}
    limits, requests = given.get("limits"), given.get("requests")
    return resources({**limits, **requests} if limits and requests else requests or limits)


def add(total: dict[str, int], more: Mapping[str, int]) -> None:
    for name, amount in more.items():
        total[name] = total.get(name, 0) + amount


def is_gpu_resource(name: str) -> bool:
    """Whether a resource, as Kubernetes names it, is a GPU of NVIDIA's or a part of one."""
    return name.startswith("nvidia.com/") and _GPU_RESOURCE.match(name) is not None


# ---- who uses a GPU --------------------------------------------------------------------------------------------------


def containers_of(spec: Object) -> Iterator[Object]:
    for kind in ("containers", "initContainers", "ephemeralContainers"):
        yield from spec.get(kind) or ()


CLAIMS, HOLDS = "holds a resource claim of NVIDIA's DRA driver", "has a GPU open, as its node says"


def gpu_use(pod: Object, known: Mapping[str, str] | None = None) -> str | None:
    """How a pod gets at GPUs, in words, or None. Also the pods that never asked the scheduler for one.

    :param known: what others than the pod say of it (see :func:`known_users`), by uid.
    """
    spec = pod["spec"]
    for container in containers_of(spec):
        given = container.get("resources")
        if given:
            for part in ("limits", "requests"):
                for name in given.get(part) or ():
                    if is_gpu_resource(name):
                        return f"requests {name}"
    said = (known or {}).get(pod["metadata"].get("uid", ""))
    if said:
        return said
    runtime = spec.get("runtimeClassName") or ""
    if runtime.startswith("nvidia"):
        return f"runs under runtime class {runtime}"
    every_device = None
    for volume in spec.get("volumes") or ():
        path = (volume.get("hostPath") or {}).get("path")
        if path:
            if path.startswith(_DEVICE_PATHS):
                return f"mounts {shown(path)} of the host"
            if path in _EVERY_DEVICE_PATHS:
                every_device = path
    privileged = False
    for container in containers_of(spec):
        for variable in container.get("env") or ():
            if variable.get("name") == "NVIDIA_VISIBLE_DEVICES" and variable.get("value", "") not in _NO_DEVICES:
                return f"sets NVIDIA_VISIBLE_DEVICES={shown(variable['value'])}"
        privileged = privileged or bool((container.get("securityContext") or {}).get("privileged"))
    for container in containers_of(spec):
        agent = _AGENTS.search(container.get("image", ""))
        if agent:
            return f"is {agent[1]}"
    if every_device and privileged:
        return f"{MAY_USE} {every_device} of the host"
    return None


MAY_USE = "is privileged and mounts"
"""How :func:`gpu_use` begins for a pod that could use a GPU but gives no sign that it does."""


def known_users(claims: Iterable[str], holders: Iterable[str]) -> dict[str, str]:
    """Pods that use a GPU by what others than they themselves say, by uid: ``claims`` are those of DRA, ``holders``
    those that nodes found with a device open."""
    return {**dict.fromkeys(holders, HOLDS), **dict.fromkeys(claims, CLAIMS)}


def claim_holders(claims: Iterable[Object]) -> dict[str, int]:
    """Pod uid → GPUs that DRA has allocated to it; 0 for one with access for administration only."""
    out: dict[str, int] = {}
    for claim in claims:
        status = claim.get("status") or {}
        results = ((status.get("allocation") or {}).get("devices") or {}).get("results") or ()
        ours = [each for each in results if each.get("driver") in _DRA_DRIVERS]
        if ours:
            gpus = sum(each["driver"] == _GPU_DRA_DRIVER and not each.get("adminAccess") for each in ours)
            for holder in status.get("reservedFor") or ():
                if holder.get("resource") == "pods":
                    out[holder["uid"]] = out.get(holder["uid"], 0) + gpus
    return out


# ---- whose a pod is --------------------------------------------------------------------------------------------------

_GROUP_LABELS = (
    # label of the pod → kind of what it belongs to: these start and stop as one
    ("jobset.sigs.k8s.io/jobset-name", "JobSet"),
    ("leaderworkerset.sigs.k8s.io/group-key", "LeaderWorkerSet"),
    ("ray.io/cluster", "RayCluster"),
    ("kueue.x-k8s.io/pod-group-name", "PodGroup"),
    ("scheduling.x-k8s.io/pod-group", "PodGroup"),
    ("volcano.sh/job-name", "Job.volcano"),
)
_GANG_KINDS = frozenset(
    ("PyTorchJob", "MPIJob", "TFJob", "XGBoostJob", "JAXJob", "PaddleJob", "TrainJob", "MPICluster", "RayCluster")
)
_TRAINING_LABELS = ("training.kubeflow.org/job-name", "trainer.kubeflow.org/trainjob-name")


@dataclass(frozen=True)
class Owner:
    """Whose a pod is: ``kind`` and ``name`` of the topmost owner that is known, and the ``gang`` it starts with (the
    name of all its pods together), if any. ``kind`` is Pod if nobody makes a new one when it goes."""

    kind: str
    name: str
    gang: str | None = None


def controller_of(pod: Object) -> str | None:
    """The uid of what makes a new pod when this one goes."""
    return next((each["uid"] for each in pod["metadata"].get("ownerReferences") or () if each.get("controller")), None)


def owner_of(pod: Object) -> Owner:
    meta = pod["metadata"]
    labels = meta.get("labels") or {}
    annotations = meta.get("annotations") or {}
    owner = next((each for each in meta.get("ownerReferences") or () if each.get("controller")), None)
    kind, name = (owner["kind"], owner["name"]) if owner else ("Pod", meta["name"])
    if "kubernetes.io/config.mirror" in annotations or kind == "Node":
        return Owner("StaticPod", meta["name"])
    gang = None
    if kind == "ReplicaSet":
        suffix = "-" + labels.get("pod-template-hash", "")
        if len(suffix) > 1 and name.endswith(suffix):
            kind, name = "Deployment", name[: -len(suffix)]
    elif kind in _GANG_KINDS:
        gang = name
    for label, its_kind in _GROUP_LABELS:
        group = labels.get(label)
        if group:
            if its_kind == "LeaderWorkerSet":
                group = f"{labels.get('leaderworkerset.sigs.k8s.io/name', name)}/{group[:12]}"
            return Owner(its_kind, group, group)
    if gang is None and kind == "Job":
        training = next((labels[label] for label in _TRAINING_LABELS if labels.get(label)), None)
        if training:
            return Owner("TrainJob", training, training)
        if "batch.kubernetes.io/job-completion-index" in annotations:
            gang = name
    group = annotations.get("scheduling.k8s.io/group-name")
    return Owner(kind, name, gang or group or None)


def workload_name(pod: Object, owner: Owner | None = None) -> str:
    """The name of the workload that a pod is, or is a member of: ``namespace/pod``, or ``namespace/Kind/name``."""
    owner = owner or owner_of(pod)
    namespace = pod["metadata"]["namespace"]
    return f"{namespace}/{owner.kind}/{owner.gang}" if owner.gang else f"{namespace}/{pod['metadata']['name']}"


def pod_name(pod: Object) -> str:
    return f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"


def is_over(pod: Object) -> bool:
    """Whether its processes have ended."""
    return (pod.get("status") or {}).get("phase") in _OVER


def is_serving(pod: Object) -> bool:
    """Whether it runs and says that it is ready."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def was_evicted(pod: Object) -> bool:
    """Whether its end was asked for by the eviction API."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(
        each["type"] == "DisruptionTarget" and each.get("reason") == "EvictionByEvictionAPI" for each in conditions
    )


def last_words(pod: Object) -> str:
    """Why a pod is where it is, as far as its status tells."""
    status = pod.get("status") or {}
    for container in status.get("containerStatuses") or ():
        ended = (container.get("state") or {}).get("terminated")
        if ended:
            said = (ended.get("message") or "").strip().splitlines()
            return f"exit status {ended.get('exitCode')}" + (f", its last line: {shown(said[-1])}" if said else "")
        waiting = (container.get("state") or {}).get("waiting")
        if waiting:
            return shown(f"{waiting.get('reason')} {waiting.get('message', '')}".strip())
    unmet = [each for each in status.get("conditions") or () if each["status"] != "True" and each.get("message")]
    return unmet[0]["message"] if unmet else status.get("message") or status.get("reason") or "its status says no more"


def is_operand(pod: Object) -> bool:
    """Whether it belongs to the GPU Operator, which takes it off a node and brings it back by itself."""
    labels = pod["metadata"].get("labels") or {}
    marked = labels.get("app.kubernetes.io/managed-by") == "gpu-operator" or any(
        key.startswith("nvidia.com/gpu.deploy.") for key in pod["spec"].get("nodeSelector") or ()
    )
    return marked and _is_of_daemon_set(pod)


def is_driver(pod: Object) -> bool:
    """Whether it is a driver container: the operator, not the host, owns the driver of its node."""
    labels = pod["metadata"].get("labels") or {}
    return labels.get("app.kubernetes.io/component") == "nvidia-driver" and _is_of_daemon_set(pod)


def _is_of_daemon_set(pod: Object) -> bool:
    """All of the operator's are; labels alone could be on anybody's work."""
    return any(each["kind"] == "DaemonSet" for each in pod["metadata"].get("ownerReferences") or ())


# ---- what may be done to it ------------------------------------------------------------------------------------------

_STAY = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
    "karpenter.sh/do-not-evict": "true",
}


@dataclass(frozen=True)
class Rules:
    """What the user allows. ``unmanaged``: evict pods that nobody makes anew. ``local_data``: evict pods that keep
    files in an emptyDir on disk. ``taint``: take DaemonSets without a label of their own off by a taint. ``ignore``:
    patterns of owners (``namespace/Kind/name``) that use no GPU, whatever they look like. ``expressions``: fact →
    JMESPath over a pod. ``domains``: kind → node label. ``holders``: uids of pods that nodes found with a GPU open."""

    unmanaged: bool = False
    local_data: bool = False
    taint: bool = False
    ignore: Sequence[str] = ()
    expressions: Mapping[str, str] = field(default_factory=dict)
    domains: Mapping[str, str] = field(default_factory=dict)
    holders: Sequence[str] = ()

    def ignores(self, pod: Object, owner: Owner) -> bool:
        name = f"{pod['metadata']['namespace']}/{owner.kind}/{owner.name}"
        return any(fnmatchcase(name, pattern) for pattern in self.ignore)


def hindrance(pod: Object, owner: Owner, rules: Rules) -> str | None:
    """Why a pod may not be evicted, whatever the budgets say, or None."""
    if owner.kind == "StaticPod":
        return "is a static pod; only its manifest on the node can stop it"
    annotations = pod["metadata"].get("annotations") or {}
    said = annotations.get(PREFIX + "may")
    if said is not None:
        return None if RESTART in _permissions(said) else f"is annotated {PREFIX}may: {shown(said)}"
    for key, value in _STAY.items():
        if annotations.get(key) == value:
            return f"is annotated {key}: {value!r}"
    if owner.kind == "Pod" and not owner.gang and not rules.unmanaged:
        return "belongs to no controller: nobody makes a new one"
    if not rules.local_data:
        for volume in pod["spec"].get("volumes") or ():
            local = volume.get("emptyDir")
            if local is not None and local.get("medium") != "Memory":
                return f"keeps files in the emptyDir {volume.get('name')}"
    return None


def permissions(pod: Object, owner: Owner, rules: Rules) -> frozenset[str]:
    """What the planner may do to it (see :class:`fleet.Workload`)."""
    if owner.kind == "StaticPod":
        return frozenset((PROTECT,))
    said = (pod["metadata"].get("annotations") or {}).get(PREFIX + "may")
    found = _permissions(said) if said is not None else frozenset()
    if found:
        return found
    return frozenset((WAIT,)) if hindrance(pod, owner, rules) else frozenset((WAIT, RESTART))


@lru_cache(maxsize=512)
def _permissions(text: str) -> frozenset[str]:
    """What an annotation permits; nothing but waiting if it makes no sense."""
    said = frozenset(word.strip() for word in text.split(",") if word.strip())
    if not said or said - PERMISSIONS or (PROTECT in said and len(said) > 1):
        return frozenset((WAIT,))
    return said


_CENTURIES = 1e10


def seconds(pod: Object, name: str) -> float | None:
    """A number of seconds that an annotation of ours gives, or None."""
    said = (pod["metadata"].get("annotations") or {}).get(PREFIX + name)
    try:
        value = float(said) if said else -1.0
    except ValueError:
        return None
    return value if 0 <= value < _CENTURIES else None


def words(pod: Object, name: str) -> tuple[str, ...]:
    """The words, separated by commas, that an annotation of ours gives."""
    said = (pod["metadata"].get("annotations") or {}).get(PREFIX + name, "")
    return tuple(word.strip() for word in said.split(",") if word.strip())


def moment(text: str | None) -> float | None:
    """Unix seconds of a time as Kubernetes writes it."""
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() if text else None
    except ValueError:
        return None


def remaining(pod: Object, now: float) -> float | None:
    """Seconds until it ends, if somebody says so: an annotation, its own deadline, or that it is being deleted."""
    said = seconds(pod, "remaining")
    if said is not None:
        return said
    meta, spec = pod["metadata"], pod["spec"]
    ends = moment(meta.get("deletionTimestamp"))
    if ends is not None:
        return max(0.0, ends - now)
    started = moment((pod.get("status") or {}).get("startTime"))
    if spec.get("activeDeadlineSeconds") and started is not None:
        return max(0.0, started + float(spec["activeDeadlineSeconds"]) - now)
    return None


# ---- budgets ---------------------------------------------------------------------------------------------------------


def selects(selector: Object | None, labels: Mapping[str, str]) -> bool:
    """Whether a label selector matches; an empty one matches everything, none at all nothing."""
    if selector is None:
        return False
    for key, value in (selector.get("matchLabels") or {}).items():
        if labels.get(key) != value:
            return False
    return all(matches(each, labels) for each in selector.get("matchExpressions") or ())


def matches(requirement: Object, labels: Mapping[str, str]) -> bool:
    """Whether labels meet one requirement of a label selector or of a node affinity."""
    key, operator = requirement["key"], requirement["operator"]
    values: Sequence[str] = requirement.get("values") or ()
    found = labels.get(key)
    if operator == "In":
        return found in values
    if operator == "NotIn":
        return found not in values
    if operator == "Exists":
        return found is not None
    if operator == "DoesNotExist":
        return found is None
    if operator in ("Gt", "Lt") and found is not None and len(values) == 1:
        try:
            return int(found) > int(values[0]) if operator == "Gt" else int(found) < int(values[0])
        except ValueError:
            return False
    return False


class Budgets:
    """The disruption budgets of a cluster. An allowance is what a budget allows now, or will once its pods are well."""

    def __init__(self, listed: Iterable[Object]) -> None:
        self._of: dict[str, list[tuple[str, Object | None]]] = defaultdict(list)
        self.allowance: dict[str, int] = {}
        for budget in listed:
            meta, status = budget["metadata"], budget.get("status") or {}
            name = f"{meta['namespace']}/{meta['name']}"
            self._of[meta["namespace"]].append((name, (budget.get("spec") or {}).get("selector")))
            in_time = status.get("expectedPods", 0) - status.get("desiredHealthy", 0)
            self.allowance[name] = max(0, in_time, status.get("disruptionsAllowed", 0))

    def over(self, pod: Object) -> tuple[str, ...]:
        """The budgets that cover a pod."""
        meta = pod["metadata"]
        listed = self._of.get(meta["namespace"])
        if not listed:
            return ()
        labels = meta.get("labels") or {}
        return tuple([name for name, selector in listed if selects(selector, labels)])

    def forbids(self, pod: Object) -> str | None:
        """Why no eviction of this pod can ever succeed, or None."""
        over = self.over(pod)
        if len(over) > 1:
            return f"is covered by {len(over)} budgets ({', '.join(over)}), which eviction does not support; keep one"
        for name in over:
            if not self.allowance[name]:
                return f"the budget {name} allows no disruption, whatever the state of its pods; relax it"
        return None


# ---- nodes -----------------------------------------------------------------------------------------------------------

_VERSION = "nvidia.com/cuda.driver-version.full"
_OLD_VERSION = ("nvidia.com/cuda.driver.major", "nvidia.com/cuda.driver.minor", "nvidia.com/cuda.driver.rev")
_GFD_TIMESTAMP = "nvidia.com/gfd.timestamp"


def is_ready(node: Object) -> bool:
    conditions = (node.get("status") or {}).get("conditions") or ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def cordoned_by(node: Object) -> str | None:
    """Who wrote that a node takes no new work, as the API server noted it; None if it takes work."""
    if not node["spec"].get("unschedulable"):
        return None
    for entry in node["metadata"].get("managedFields") or ():
        if "f:unschedulable" in ((entry.get("fieldsV1") or {}).get("f:spec") or {}):
            return str(entry.get("manager") or NOBODY)
    return NOBODY


def addresses(nodes: Iterable[Object]) -> dict[str, str]:
    """The internal address of each node that has one."""
    return {
        node["metadata"]["name"]: each["address"]
        for node in nodes
        for each in reversed((node.get("status") or {}).get("addresses") or ())
        if each.get("type") == "InternalIP" and each.get("address")
    }


def operator_owns_driver(node: Object) -> bool:
    """Whether the GPU Operator, not the host, brings the driver of a node."""
    return (node["metadata"].get("labels") or {}).get("nvidia.com/gpu.deploy.driver") == "true"


def other_taints(node: Object) -> list[Object]:
    """The taints of a node without ours."""
    return [taint for taint in node["spec"].get("taints") or () if taint["key"] != TAINT]


def label_version(node: Object, driver_started: float | None = None) -> str | None:
    """The driver version that feature discovery wrote, if it was written since the driver was last started."""
    labels = node["metadata"].get("labels") or {}
    version = labels.get(_VERSION)
    if version is None:
        version = ".".join(labels[name] for name in _OLD_VERSION if labels.get(name)) or None
    if version is None or driver_started is None:
        return version
    try:
        written = float(labels.get(_GFD_TIMESTAMP, ""))
    except ValueError:
        return None
    return version if written >= driver_started else None


def driver_started(pod: Object) -> float | None:
    """When the driver container of a driver pod was started (Unix seconds)."""
    for status in (pod.get("status") or {}).get("containerStatuses") or ():
        if status["name"] == "nvidia-driver-ctr":
            return moment(((status.get("state") or {}).get("running") or {}).get("startedAt"))
    return None


@dataclass(frozen=True)
class Slices:
    """What DRA says of a node's GPUs: how many, of which model, with which driver."""

    gpus: int = 0
    model: str | None = None
    driver: str | None = None


_SLICE_FACTS = ("productName", "driverVersion")


def slices_of(listed: Iterable[Object]) -> dict[str, Slices]:
    """Node → its GPUs in resource slices; parts of a GPU (MIG) are not counted as GPUs."""
    found: dict[str, list[Object]] = defaultdict(list)
    for each in listed:
        spec = each["spec"]
        if spec.get("driver") == _GPU_DRA_DRIVER and spec.get("nodeName"):
            found[spec["nodeName"]] += spec.get("devices") or ()
    out = {}
    for node, devices in found.items():
        facts = [device.get("attributes") or (device.get("basic") or {}).get("attributes") or {} for device in devices]
        gpus = [fact for fact in facts if (fact.get("type") or {}).get("string", "gpu") == "gpu"]
        named: dict[str, Any] = {n: next((fact[n] for fact in gpus if n in fact), {}) for n in _SLICE_FACTS}
        model, driver = (named[name].get("string") or named[name].get("version") for name in _SLICE_FACTS)
        out[node] = Slices(len(gpus), model, driver)
    return out


def taint_text(taint: Object) -> str:
    """``key=value:Effect``, as kubectl writes it."""
    value = taint.get("value")
    return f"{taint['key']}{'=' + value if value else ''}:{taint['effect']}"


def tolerates(tolerations: Sequence[Object], taint: Object) -> bool:
    for each in tolerations:
        if each.get("effect") not in (None, "", taint["effect"]):
            continue
        key, operator = each.get("key"), each.get("operator", "Equal")
        if not key:
            if operator == "Exists":
                return True
        elif key == taint["key"] and (operator == "Exists" or (each.get("value") or "") == (taint.get("value") or "")):
            return True
    return False


def repels(taint: Object) -> bool:
    return taint["effect"] in ("NoSchedule", "NoExecute") and not (
        taint["key"] == TAINT or taint["key"].startswith("node.kubernetes.io/")
    )


def affine(selector: Mapping[str, str], terms: Sequence[Object] | None, node: Object) -> bool:
    """Whether a pod's node selector and the terms of its required node affinity allow a node."""
    labels = node["metadata"].get("labels") or {}
    for key, value in selector.items():
        if labels.get(key) != value:
            return False
    if terms is None:
        return True
    name = {"metadata.name": node["metadata"]["name"]}
    return any(
        (term.get("matchExpressions") or term.get("matchFields"))
        and all(matches(each, labels) for each in term.get("matchExpressions") or ())
        and all(matches(each, name) for each in term.get("matchFields") or ())
        for term in terms
    )


def affinity_terms(spec: Object) -> Sequence[Object] | None:
    """The terms of a pod's required node affinity, of which one has to fit; None if it has none."""
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    return required.get("nodeSelectorTerms") or () if required else None


OFF = {"key": TAINT, "effect": "NoExecute"}
"""Taint that takes every pod off a node that does not tolerate it, without asking any budget."""


def bears(pod: Object, taint: Object) -> bool:
    return tolerates(pod["spec"].get("tolerations") or (), taint)


def gpus_listed(node: Object) -> dict[str, int]:
    """The GPUs that the scheduler can give, by resource as Kubernetes names it."""
    room = (node.get("status") or {}).get("allocatable") or {}
    return {name: int(quantity(amount)) for name, amount in room.items() if is_gpu_resource(name)}


# ---- DaemonSets that use a GPU ---------------------------------------------------------------------------------------

_SHARED_LABELS = re.compile(
    r"([^/]*\.)?(kubernetes\.io|k8s\.io)/|nvidia\.com/(gpu\.(?!deploy\.)|mig\.|cuda\.|gfd\.|mps\.|vgpu\.)"
)
"""Labels that say what a node is; others than DaemonSets go by them."""


def pause_keys(pod: Object, others: Iterable[Object]) -> list[str]:
    """The node labels by which this pod of a DaemonSet can be taken off its node, and only DaemonSet pods that may go:
    none of ``others``, the pods of DaemonSets on that node that have to stay, selects on them."""
    selector = pod["spec"].get("nodeSelector") or {}
    return [
        key
        for key in selector
        if not _SHARED_LABELS.match(key) and all(key not in (each["spec"].get("nodeSelector") or {}) for each in others)
    ]


def paused(
    labels: Mapping[str, str], annotations: Mapping[str, str], keys: Iterable[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Labels and annotations of a node from which the DaemonSets that select on ``keys`` are taken."""
    new, former = dict(labels), dict(_decoded(annotations.get(PAUSED), ()) or {})
    for key in keys:
        if key in new and new[key] != PAUSE_VALUE:
            former[key] = new[key]
            new[key] = PAUSE_VALUE
    return new, {**annotations, PAUSED: json.dumps(former, sort_keys=True)}


def unpaused(labels: Mapping[str, str], annotations: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Labels and annotations of a node to which the DaemonSets may come back; a label changed since is left."""
    former = _decoded(annotations.get(PAUSED), ()) or {}
    new = {key: str(former[key]) if value == PAUSE_VALUE and key in former else value for key, value in labels.items()}
    return new, {key: value for key, value in annotations.items() if key != PAUSED}


def left_paused(node: Object) -> str:
    """What is to be done about labels that keep DaemonSets off a node and whose former value nobody knows any more, as
    somebody has removed or written over the annotation; nothing if there are none."""
    former = paused_keys(node)
    labels = node["metadata"].get("labels") or {}
    lost = [key for key, value in labels.items() if value == PAUSE_VALUE and key not in former]
    if not lost:
        return ""
    given = " ".join(f"{key}=VALUE" for key in lost)
    return (
        f"DaemonSets are kept off it by {', '.join(lost)}={PAUSE_VALUE}, and the annotation {PAUSED} no longer says "
        f"what that was; give it back: kubectl label node {node['metadata']['name']} --overwrite {given}"
    )


def paused_keys(node: Object) -> list[str]:
    """The labels by which we have taken DaemonSets off a node."""
    return list(_decoded((node["metadata"].get("annotations") or {}).get(PAUSED), ()) or {})


def mark_of(node: Object) -> dict[str, Any] | None:
    """What we left with a node that we took out of service, or None. What of it somebody has written over by hand, and
    makes no sense, is missing; the node is ours all the same."""
    text = (node["metadata"].get("annotations") or {}).get(MARK)
    if text is None:
        return None
    said = _decoded(text, ()) or {}
    mark: dict[str, Any] = {"run_id": str(said.get("run_id") or "unknown")}
    gpus, pauses = said.get("gpus"), said.get("pauses")
    if isinstance(gpus, dict) and all(isinstance(amount, int) for amount in gpus.values()):
        mark["gpus"] = gpus
    if isinstance(pauses, dict) and all(_is_pause(each) for each in pauses.values()):
        mark["pauses"] = pauses
    return mark


def _is_pause(said: Any) -> bool:
    """Whether it is what an annotation was given, and what it had before."""
    return (
        isinstance(said, list)
        and len(said) == 2
        and isinstance(said[0], str)
        and isinstance(said[1], (str, type(None)))
    )


def _decoded(text: str | None, needed: Sequence[str]) -> dict[str, Any] | None:
    try:
        found = json.loads(text) if text else None
    except ValueError:
        return None
    return found if isinstance(found, dict) and all(name in found for name in needed) else None
