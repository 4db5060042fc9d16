# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stands in for the NVIDIA GPU Operator, and for what its driver pods do to a node.

It renders the driver DaemonSets (OnDelete, one for each ClusterPolicy or NVIDIADriver), labels nodes, and walks nodes
through the upgrade states as the operator does, its weaknesses included. DaemonSets, evictions and revisions are the
real control plane's. Not real: no container runs; which driver a node has loaded is kept in its annotation
``lab.gpufleet/loaded``, and driver pods report what a driver container would meet there.

Run it with a kubeconfig, and a driver version to have everything installed first, with a ClusterPolicy of that version.

Settings are JSON under ``settings`` in the ConfigMap ``lab`` of its namespace, read in every pass; see DEFAULTS. Beside
them, ``passes`` counts the passes of the upgrade controller.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from api import JSON_PATCH, STRATEGIC, Api, ApiError  # noqa: E402
from crds import DEFINITIONS  # noqa: E402
from kubelets import is_missing, now  # noqa: E402

NAMESPACE = "gpu-operator"
LOADED = "lab.gpufleet/loaded"
STATE = "nvidia.com/gpu-driver-upgrade-state"
SKIP = "nvidia.com/gpu-driver-upgrade.skip"
ENABLED = "nvidia.com/gpu-driver-upgrade-enabled"
INITIAL = "nvidia.com/gpu-driver-upgrade.node-initial-state.unschedulable"
REQUESTED = "nvidia.com/gpu-driver-upgrade-requested"
WAIT_SINCE = "nvidia.com/gpu-driver-upgrade-wait-for-pod-completion-start-time"
VALIDATION_SINCE = "nvidia.com/gpu-driver-upgrade-validation-start-time"
OWNER = "nvidia.com/gpu-operator.driver.owner"
COMPONENT = "app.kubernetes.io/component"
DEPLOY = "nvidia.com/gpu.deploy."
PAUSED = "paused-for-driver-upgrade"
OPERANDS = ("device-plugin", "gpu-feature-discovery", "operator-validator", "container-toolkit", "dcgm-exporter")
WORKER_SETS = {"nvidia-device-plugin-daemonset": "device-plugin", "nvidia-operator-validator": "operator-validator"}
VALIDATOR = "nvidia-operator-validator"

DEFAULTS: dict[str, Any] = {
    "release": "v25.10.1",
    "round_seconds": 0.1,  # between two looks at the cluster
    "pass_seconds": 0.5,  # between two passes of the upgrade controller; it is 120 without an event
    "init_seconds": 0.2,
    "install_seconds": 0.5,
    "broken": {},  # version: nodes on which its module does not load ("*" for all)
    "held": [],  # nodes whose driver is held by something that is no pod
    "validator_fails": [],
    "stale_gfd": [],  # nodes whose feature discovery does not come back
    "validation_timeout": 600.0,
}

Object = dict[str, Any]


def labels(item: Object) -> dict[str, str]:
    return item["metadata"].get("labels") or {}


def annotations(item: Object) -> dict[str, str]:
    return item["metadata"].get("annotations") or {}


def release_of(settings: Object) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", settings["release"]))


def is_ready(pod: Object) -> bool:
    statuses = pod.get("status", {}).get("containerStatuses") or []
    return pod.get("status", {}).get("phase") == "Running" and bool(statuses) and all(s["ready"] for s in statuses)


def uses_gpu(pod: Object) -> bool:
    """The operator's own filter: resources of regular containers, and nothing else."""
    if pod.get("status", {}).get("phase") not in ("Running", "Pending"):
        return False
    for container in pod["spec"]["containers"]:
        asked = container.get("resources") or {}
        for name in (*(asked.get("limits") or ()), *(asked.get("requests") or ())):
            if name.startswith(("nvidia.com/gpu", "nvidia.com/mig-")):
                return True
    return False


def holds_driver(pod: Object) -> bool:
    """What really keeps the module busy: also a pod that only has the runtime class."""
    over = pod.get("status", {}).get("phase") in ("Succeeded", "Failed", "Pending")
    return not over and (uses_gpu(pod) or pod["spec"].get("runtimeClassName") == "nvidia")


class Operator:
    def __init__(self, api: Api) -> None:
        self.api = api
        self.settings = DEFAULTS
        self.doing: dict[str, Object] = {}  # driver pod uid → what its containers are at
        self.next_pass = 0.0
        self.passes = 0
        self.deletion_since: dict[str, float] = {}

    def run(self) -> None:
        while True:
            try:
                self.round()
            except (OSError, http.client.HTTPException) as exc:
                print(f"the server is away: {exc}", flush=True)
                time.sleep(1)
            except ApiError as exc:
                if exc.status not in (404, 409, 422):
                    print(exc, flush=True)
            time.sleep(self.settings["round_seconds"])

    def round(self) -> None:
        self.settings = {**DEFAULTS, **self.read_settings()}
        self.nodes = {n["metadata"]["name"]: n for n in self.api.get("/api/v1/nodes")["items"]}
        self.policies = sorted(
            self.api.get("/apis/nvidia.com/v1/clusterpolicies")["items"],
            key=lambda item: item["metadata"]["creationTimestamp"],
        )[:1]
        self.drivers = self.api.get("/apis/nvidia.com/v1alpha1/nvidiadrivers")["items"]
        if not self.policies:
            return
        self.label_nodes()
        self.render()
        self.sets = self.api.get(self.path("daemonsets", "apps/v1"))["items"]
        self.pods = self.api.get(self.path("pods"))["items"]
        self.by_node: dict[str, list[Object]] = {}
        for pod in self.api.get("/api/v1/pods")["items"]:
            self.by_node.setdefault(pod["spec"].get("nodeName", ""), []).append(pod)
        for pod in self.pods:
            if labels(pod).get(COMPONENT) == "nvidia-driver":
                with contextlib.suppress(ApiError):
                    self.play_driver(pod)
        self.play_operands()
        if time.monotonic() >= self.next_pass:
            self.next_pass = time.monotonic() + self.settings["pass_seconds"]
            self.upgrade_controller()
            self.passes += 1
            self.api.patch(self.path("configmaps", name="lab"), {"data": {"passes": str(self.passes)}})
        self.report_status()

    def read_settings(self) -> Object:
        found = self.api.find(self.path("configmaps", name="lab"))
        return json.loads(found["data"]["settings"]) if found else {}

    def path(self, resource: str, group: str = "v1", name: str = "") -> str:
        base = f"/api/{group}" if "/" not in group else f"/apis/{group}"
        return f"{base}/namespaces/{NAMESPACE}/{resource}" + (f"/{name}" if name else "")

    # ---- what is wanted ----------------------------------------------------------------------------------------------

    @property
    def policy(self) -> Object:
        return self.policies[0]["spec"]["driver"]

    def owners(self) -> list[Object]:
        """The objects that own driver DaemonSets now."""
        return self.drivers if self.policy.get("useNvidiaDriverCRD") else self.policies

    def policy_of(self, owner: Object) -> Object:
        """The upgrade policy of an owner: before 26.7.0 the one of the ClusterPolicy is everybody's."""
        if owner["kind"] == "NVIDIADriver" and release_of(self.settings) >= (26, 7):
            return owner["spec"].get("upgradePolicy") or {"autoUpgrade": True, "maxParallelUpgrades": 1}
        return self.policy.get("upgradePolicy") or {}

    def owner_name(self, node: Object) -> str | None:
        """The NVIDIADriver of a node: one that selects it counts more than the default; None if two do."""
        chosen = [d for d in self.drivers if not d["spec"].get("default")]
        chosen = [d for d in chosen if (d["spec"].get("nodeSelector") or {}).items() <= labels(node).items()]
        chosen = chosen or [d for d in self.drivers if d["spec"].get("default")]
        return chosen[0]["metadata"]["name"] if len(chosen) == 1 else None

    def change(
        self, name: str, label: Object | None = None, note: Object | None = None, spec: Object | None = None
    ) -> None:
        """A merge patch of a node, left out if it would change nothing."""
        node = self.nodes[name]
        label = {k: v for k, v in (label or {}).items() if labels(node).get(k) != v}
        note = {k: v for k, v in (note or {}).items() if annotations(node).get(k) != v}
        if label or note or spec:
            body = {"metadata": {"labels": label, "annotations": note}, **({"spec": spec} if spec else {})}
            self.nodes[name] = self.api.patch(f"/api/v1/nodes/{name}", body)

    def label_nodes(self) -> None:
        for name, node in list(self.nodes.items()):
            if labels(node).get("feature.node.kubernetes.io/pci-10de.present") != "true":
                if labels(node).get("nvidia.com/gpu.present") == "true":  # as after a flap of node feature discovery
                    gone = {key: None for key in labels(node) if key.startswith(DEPLOY)}
                    self.change(name, {**gone, "nvidia.com/gpu.present": "false"})
                continue
            wanted: Object = {"nvidia.com/gpu.present": "true"}
            for part in ("driver", *OPERANDS):
                if not labels(node).get(DEPLOY + part):
                    wanted[DEPLOY + part] = "true"
            auto = self.policy.get("upgradePolicy", {}).get("autoUpgrade", False)
            if self.policy.get("useNvidiaDriverCRD"):
                owner = self.owner_name(node)
                if release_of(self.settings) >= (26, 7):
                    wanted[OWNER] = owner
                    auto = any(
                        d["metadata"]["name"] == owner and self.policy_of(d).get("autoUpgrade", True)
                        for d in self.drivers
                    )
            self.change(name, wanted, {ENABLED: "true" if auto else None})

    def render(self) -> None:
        wanted = {}
        if self.policy.get("enabled", True):
            for owner in self.owners():
                item = self.driver_set(owner)
                wanted[item["metadata"]["name"]] = item
        wanted |= {name: self.operand_set(name, part) for name, part in WORKER_SETS.items()}
        have = {i["metadata"]["name"]: i for i in self.api.get(self.path("daemonsets", "apps/v1"))["items"]}
        for name, item in wanted.items():
            mark = hashlib.sha256(json.dumps(item, sort_keys=True).encode()).hexdigest()[:16]
            item["metadata"]["annotations"] = {"nvidia.com/last-applied-hash": mark}
            if name not in have:
                self.api.post(self.path("daemonsets", "apps/v1"), item)
            elif annotations(have[name]).get("nvidia.com/last-applied-hash") != mark:
                item["metadata"]["resourceVersion"] = have[name]["metadata"]["resourceVersion"]
                self.api.ask("PUT", self.path("daemonsets", "apps/v1", name), item)
        for name in have.keys() - wanted.keys():
            self.api.delete(self.path("daemonsets", "apps/v1", name))

    def driver_set(self, owner: Object) -> Object:
        spec = owner["spec"]["driver"] if owner["kind"] == "ClusterPolicy" else owner["spec"]
        meta = owner["metadata"]
        selector = {DEPLOY + "driver": "true"}
        if owner["kind"] == "ClusterPolicy":
            name = app = "nvidia-driver-daemonset"
        else:
            app = name = f"nvidia-gpu-driver-ubuntu22.04-{hashlib.sha256(meta['uid'].encode()).hexdigest()[:10]}"
            newer = release_of(self.settings) >= (26, 7)
            selector |= {OWNER: meta["name"]} if newer else spec.get("nodeSelector") or {}
        image = f"{spec.get('repository') or 'nvcr.io/nvidia'}/{spec.get('image') or 'driver'}".replace("//", "/")
        if image.count("nvcr.io") > 1:
            image = spec["image"]
        image += f":{spec.get('version')}-ubuntu22.04"
        manager_env = (spec.get("manager") or {}).get("env") or []
        digest = hashlib.sha256(json.dumps([image, spec.get("kernelModuleType"), manager_env]).encode()).hexdigest()
        # what an operator upgrade changes besides: the label is in the template, and so in the revision
        marks = {"app": app, COMPONENT: "nvidia-driver", "nvidia.com/precompiled": "false"}
        chart = {"helm.sh/chart": f"gpu-operator-{self.settings['release']}"}
        env = [
            {"name": "ENABLE_GPU_POD_EVICTION", "value": "true"},
            {"name": "ENABLE_AUTO_DRAIN", "value": "false"},
            {"name": "DRIVER_CONFIG_DIGEST", "value": digest[:16]},
            *manager_env,
        ]
        pod = {
            "metadata": {"labels": {**marks, **chart}, "annotations": {"lab.gpufleet/start": "never"}},
            "spec": {
                "hostPID": True,
                "nodeSelector": selector,
                "tolerations": [{"operator": "Exists"}],
                "priorityClassName": "system-node-critical",
                "imagePullSecrets": [{"name": secret} for secret in spec.get("imagePullSecrets") or ()],
                "initContainers": [
                    {"name": "k8s-driver-manager", "image": "nvcr.io/nvidia/driver-manager:v0.9", "env": env}
                ],
                "containers": [{"name": "nvidia-driver-ctr", "image": image, "securityContext": {"privileged": True}}],
            },
        }
        return self.daemon_set(name, marks, pod, owner, "OnDelete", chart)

    def operand_set(self, name: str, part: str) -> Object:
        played = {"lab.gpufleet/start": "never"} if name == VALIDATOR else {}
        pod = {
            "metadata": {"labels": {"app": name, "app.kubernetes.io/part-of": "gpu-operator"}, "annotations": played},
            "spec": {
                "nodeSelector": {DEPLOY + part: "true"},
                "tolerations": [{"operator": "Exists"}],
                "runtimeClassName": "nvidia",
                "containers": [{"name": name, "image": "nvcr.io/nvidia/gpu-operator:v25.10.1"}],
            },
        }
        return self.daemon_set(name, {"app": name}, pod, self.policies[0], "RollingUpdate", {})

    def daemon_set(self, name: str, match: Object, pod: Object, owner: Object, how: str, more: Object) -> Object:
        reference = {
            "apiVersion": owner["apiVersion"],
            "kind": owner["kind"],
            "name": owner["metadata"]["name"],
            "uid": owner["metadata"]["uid"],
            "controller": True,
        }
        return {
            "apiVersion": "apps/v1",
            "kind": "DaemonSet",
            "metadata": {
                "name": name,
                "namespace": NAMESPACE,
                "labels": {**match, **more},
                "ownerReferences": [reference],
            },
            "spec": {"selector": {"matchLabels": match}, "template": pod, "updateStrategy": {"type": how}},
        }

    # ---- what happens on a node --------------------------------------------------------------------------------------

    def loaded(self, name: str) -> Object | None:
        note = annotations(self.nodes[name]).get(LOADED)
        return json.loads(note) if note else None

    def play_driver(self, pod: Object) -> None:
        name, meta = pod["spec"].get("nodeName"), pod["metadata"]
        if name not in self.nodes or "deletionTimestamp" in meta:
            return
        its = self.doing.setdefault(meta["uid"], {"at": "init", "due": time.monotonic(), "restarts": 0})
        if time.monotonic() < its["due"]:
            return
        if its["at"] == "init":
            self.driver_manager(pod, name, its)
        elif its["at"] == "driver":
            self.driver_container(pod, name, its)
        elif its["at"] == "running" and not is_ready(pod):  # the stand-in was restarted
            self.report_driver(pod, its, ready=True)

    def pause(self, name: str, paused: bool) -> None:
        states = {DEPLOY + part: labels(self.nodes[name]).get(DEPLOY + part) for part in OPERANDS}
        for key, value in states.items():
            if paused and value == "true":
                states[key] = PAUSED
            elif not paused and value == PAUSED:
                states[key] = "true"
        self.change(name, states)

    def driver_manager(self, pod: Object, name: str, its: Object) -> None:
        its.setdefault("begun", time.monotonic())
        self.report_driver(pod, its, waiting="PodInitializing")
        env = {e["name"]: e.get("value", "") for e in pod["spec"]["initContainers"][0]["env"]}
        own_eviction = env["ENABLE_GPU_POD_EVICTION"] == "true" and annotations(self.nodes[name]).get(ENABLED) != "true"
        found = self.loaded(name)
        if found and found["digest"] != env["DRIVER_CONFIG_DIGEST"]:
            self.pause(name, True)
            if own_eviction:
                self.change(name, spec={"unschedulable": True})
                for each in self.by_node.get(name, []):
                    if uses_gpu(each):
                        self.evict(each)
                if any(uses_gpu(each) for each in self.by_node.get(name, [])):
                    its["due"] = time.monotonic() + 0.5
                    return
            if name in self.settings["held"] or any(
                holds_driver(p) for p in self.by_node.get(name, []) if not self.is_ours(p)
            ):
                self.pause(name, False)
                its["restarts"] += 1
                its["due"] = time.monotonic() + 1.0
                self.report_driver(pod, its, waiting="CrashLoopBackOff", init=True)
                return
            if time.monotonic() < its["begun"] + self.settings["init_seconds"]:
                return
            self.change(name, note={LOADED: None})
        if own_eviction and self.nodes[name]["spec"].get("unschedulable"):  # without a look at who had cordoned it
            self.change(name, spec={"unschedulable": False})
        its.update(at="driver", restarts=0, due=time.monotonic() + self.settings["install_seconds"])
        if found and found["digest"] == env["DRIVER_CONFIG_DIGEST"]:
            its["due"] = time.monotonic()
        its["digest"] = env["DRIVER_CONFIG_DIGEST"]

    def is_ours(self, pod: Object) -> bool:
        return pod["metadata"]["namespace"] == NAMESPACE

    def driver_container(self, pod: Object, name: str, its: Object) -> None:
        image = pod["spec"]["containers"][0]["image"]
        version = image.rpartition(":")[2].partition("-")[0]
        if is_missing(image):
            its["due"] = time.monotonic() + 1.0
            self.report_driver(pod, its, waiting="ImagePullBackOff")
            return
        where = self.settings["broken"].get(version, [])
        if name in where or "*" in where:
            its["restarts"] += 1
            its["due"] = time.monotonic() + 1.0
            self.report_driver(pod, its, waiting="CrashLoopBackOff")
            return
        note = {"version": version, "digest": its["digest"], "at": now()}
        self.change(name, note={LOADED: json.dumps(note)})
        self.pause(name, False)
        its.update(at="running", due=time.monotonic())
        self.report_driver(pod, its, ready=True)

    def report_driver(
        self, pod: Object, its: Object, waiting: str = "", init: bool = False, ready: bool = False
    ) -> None:
        what = json.dumps([waiting, init, ready, its["restarts"]])
        if its.get("said") == what:
            return
        moment = now()
        over = {"terminated": {"exitCode": 0, "reason": "Completed", "finishedAt": moment, "startedAt": moment}}

        def status(container: Object, ok: bool, state: Object) -> Object:
            named = {"name": container["name"], "image": container["image"], "imageID": container["image"]}
            return {**named, "ready": ok, "started": ok, "restartCount": its["restarts"], "state": state}

        first, main = pod["spec"]["initContainers"][0], pod["spec"]["containers"][0]
        in_init = init or waiting == "PodInitializing"
        first_state = (
            {"waiting": {"reason": waiting}} if init else {"running": {"startedAt": moment}} if in_init else over
        )
        main_state = (
            {"running": {"startedAt": moment}}
            if ready
            else {"waiting": {"reason": waiting if not in_init else "PodInitializing"}}
        )
        conditions = {"Initialized": not in_init, "ContainersReady": ready, "Ready": ready}
        self.report(
            pod,
            {
                "phase": "Running" if ready or (waiting == "CrashLoopBackOff" and not init) else "Pending",
                "startTime": moment,
                "initContainerStatuses": [status(first, not in_init, first_state)],
                "containerStatuses": [status(main, ready, main_state)],
                "conditions": [
                    {"type": kind, "status": str(value), "lastTransitionTime": moment}
                    for kind, value in conditions.items()
                ],
            },
        )
        its["said"] = what  # only now: the server may be away

    def report(self, pod: Object, status: Object) -> None:
        meta = pod["metadata"]
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/status"
        pod["status"] = self.api.ask("PATCH", path, {"metadata": {"uid": meta["uid"]}, "status": status}, STRATEGIC)[
            "status"
        ]

    def play_operands(self) -> None:
        """The device plugin's GPUs, feature discovery's labels and the validator's word."""
        for name, node in list(self.nodes.items()):
            if labels(node).get("nvidia.com/gpu.present") != "true" or name not in self.by_node:
                continue
            ours = [p for p in self.by_node[name] if p["metadata"]["namespace"] == NAMESPACE]
            loaded = self.loaded(name)
            plugin = any(labels(p).get("app") == "nvidia-device-plugin-daemonset" and is_ready(p) for p in ours)
            count = labels(node).get("nvidia.com/gpu.count", "0") if plugin and loaded else "0"
            if node["status"]["allocatable"].get("nvidia.com/gpu") != count:
                patch = [{"op": "add", "path": "/status/allocatable/nvidia.com~1gpu", "value": count}]
                self.api.ask("PATCH", f"/api/v1/nodes/{name}/status", patch, JSON_PATCH)
            if (
                loaded
                and labels(node).get(DEPLOY + "gpu-feature-discovery") == "true"
                and name not in self.settings["stale_gfd"]
            ):
                self.discover(name, loaded)
            fails = name in self.settings["validator_fails"]
            for pod in ours:
                if labels(pod).get("app") == VALIDATOR and "deletionTimestamp" not in pod["metadata"] and not fails:
                    driver_ready = labels(node).get(DEPLOY + "driver") == "pre-installed" or any(
                        labels(p).get(COMPONENT) == "nvidia-driver" and is_ready(p) for p in ours
                    )
                    if loaded and driver_ready and not is_ready(pod):
                        self.report(pod, ready_status(pod))

    def discover(self, name: str, loaded: Object) -> None:
        driver = "nvidia.com/cuda.driver-version."
        version = loaded["version"]
        if (
            labels(self.nodes[name]).get(driver + "full") == version
            and annotations(self.nodes[name]).get("lab.gpufleet/discovered") == loaded["at"]
        ):
            return
        major, minor, revision = [*version.split("."), "", ""][:3]
        found = {"full": version, "major": major, "minor": minor, "revision": revision}
        stamp = {"nvidia.com/gfd.timestamp": str(int(time.time()))}
        self.change(
            name, {**{driver + k: v for k, v in found.items()}, **stamp}, {"lab.gpufleet/discovered": loaded["at"]}
        )

    def evict(self, pod: Object) -> str | None:
        """None if the eviction was taken, else the refusal."""
        meta = pod["metadata"]
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/eviction"
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": meta["name"], "namespace": meta["namespace"]},
        }
        try:
            self.api.post(path, body)
        except ApiError as exc:
            return None if exc.status == 404 else str(exc)
        return None

    # ---- the upgrade controller --------------------------------------------------------------------------------------

    def upgrade_controller(self) -> None:
        for owner in self.owners():
            sets = [s for s in self.sets if self.is_driver_set_of(s, owner)]
            policy = self.policy_of(owner)
            members = self.members(sets)
            if not policy.get("autoUpgrade") or self.policies[0]["spec"].get("sandboxWorkloads", {}).get("enabled"):
                for name in members or ():
                    self.change(name, {STATE: None})
            elif members is not None:
                with contextlib.suppress(StopIteration):
                    self.upgrade_pass(members, policy)

    def is_driver_set_of(self, item: Object, owner: Object) -> bool:
        references = item["metadata"].get("ownerReferences") or ()
        mine = any(ref["uid"] == owner["metadata"]["uid"] for ref in references)
        return mine and labels(item).get(COMPONENT) == "nvidia-driver"

    def members(self, sets: Iterable[Object]) -> dict[str, tuple[Object, Object]] | None:
        """Node → its driver pod and DaemonSet; None if a DaemonSet without all its pods fails the pass."""
        found = {}
        for item in sets:
            owned = [
                pod
                for pod in self.pods
                if any(ref["uid"] == item["metadata"]["uid"] for ref in pod["metadata"].get("ownerReferences") or ())
            ]
            if item.get("status", {}).get("desiredNumberScheduled", 0) != len(owned):
                print(f"driver DaemonSet {item['metadata']['name']} should not have unscheduled pods", flush=True)
                return None
            found.update(
                {pod["spec"]["nodeName"]: (pod, item) for pod in owned if pod["spec"].get("nodeName") in self.nodes}
            )
        return found

    def newest(self, item: Object) -> str:
        name = item["metadata"]["name"]
        query = ",".join(f"{k}={v}" for k, v in item["spec"]["selector"]["matchLabels"].items())
        found = self.api.get(self.path("controllerrevisions", "apps/v1"), labelSelector=query)["items"]
        latest = max((r for r in found if r["metadata"]["name"].startswith(name)), key=lambda r: r["revision"])
        return latest["metadata"]["name"][len(name) + 1 :]

    def upgrade_pass(self, members: dict[str, tuple[Object, Object]], policy: Object) -> None:
        hashes = {id(item): self.newest(item) for dummy, item in members.values()}
        synced = {
            name: labels(pod).get("controller-revision-hash") == hashes[id(item)]
            for name, (pod, item) in members.items()
        }
        at: dict[str, list[str]] = {}
        for name in members:
            at.setdefault(labels(self.nodes[name]).get(STATE, ""), []).append(name)
        for name in at.get("", []) + at.get("upgrade-done", []):
            out = not synced[name] or REQUESTED in annotations(self.nodes[name])
            if out and self.nodes[name]["spec"].get("unschedulable"):
                self.change(name, note={INITIAL: "true"})
            self.change(name, {STATE: "upgrade-required" if out else "upgrade-done"})
        self.release(at, members, policy)
        for name in at.get("cordon-required", []):
            self.change(name, {STATE: "wait-for-jobs-required"}, spec={"unschedulable": True})
        for name in at.get("wait-for-jobs-required", []):
            self.wait_for_jobs(name, policy.get("waitForCompletion") or {})
        for name in at.get("pod-deletion-required", []):
            self.delete_pods(name, policy)
        for name in at.get("drain-required", []):
            self.drain(name)
        for name in at.get("pod-restart-required", []):
            self.restart(name, members[name][0], synced[name])
        for name in at.get("upgrade-failed", []):  # without a look at the validator
            if synced[name] and is_ready(members[name][0]):
                self.finish(name)
        for name in at.get("validation-required", []):
            self.validated(name)
        for name in at.get("uncordon-required", []):
            self.change(name, {STATE: "upgrade-done"}, spec={"unschedulable": False})

    def release(self, at: dict[str, list[str]], members: Iterable[str], policy: Object) -> None:
        waiting = at.get("upgrade-required", [])
        total = sum(1 for dummy in members)
        idle = sum(len(at.get(state, [])) for state in ("", "upgrade-done", "upgrade-required"))
        known = {"", "upgrade-done", "upgrade-required", *STEPS}
        busy = sum(len(names) for state, names in at.items() if state in known) - idle  # failed ones count
        limit = policy.get("maxParallelUpgrades", 1) or len(waiting) + busy
        most = str(policy.get("maxUnavailable", "25%"))
        unavailable = -(-total * int(most[:-1]) // 100) if most.endswith("%") else int(most)
        away = sum(bool(self.nodes[name]["spec"].get("unschedulable")) for name in members)
        slots = min(limit - busy, unavailable - away)
        for name in waiting:
            self.change(name, note={REQUESTED: None})
            if labels(self.nodes[name]).get(SKIP) == "true":
                continue
            if slots > 0 or self.nodes[name]["spec"].get("unschedulable"):
                slots -= 1
                self.change(name, {STATE: "cordon-required"})

    def wait_for_jobs(self, name: str, wait: Object) -> None:
        selector = wait.get("podSelector")
        blocked = (
            selector
            and self.api.get("/api/v1/pods", labelSelector=selector, fieldSelector=f"spec.nodeName={name}")["items"]
        )
        blocked = [p for p in blocked or () if p.get("status", {}).get("phase") in ("Running", "Pending")]
        if not blocked:
            self.change(name, {STATE: "pod-deletion-required"}, {WAIT_SINCE: None})

    def delete_pods(self, name: str, policy: Object) -> None:
        rules = policy.get("podDeletion") or {}
        found = [p for p in self.by_node.get(name, []) if uses_gpu(p)]
        if not found:
            self.change(name, {STATE: "pod-restart-required"})
            return

        def stays(pod: Object) -> bool:
            owners = pod["metadata"].get("ownerReferences") or ()
            volumes = any("emptyDir" in volume for volume in pod["spec"].get("volumes") or ())
            daemon = any(ref["kind"] == "DaemonSet" for ref in owners)
            return daemon or (not owners and not rules.get("force")) or (volumes and not rules.get("deleteEmptyDir"))

        since = self.deletion_since.setdefault(name, time.monotonic())
        refused = [p for p in found if stays(p)] or [
            p for p in found if "deletionTimestamp" not in p["metadata"] and self.evict(p)
        ]
        if any(stays(p) for p in found) or (refused and time.monotonic() - since > rules.get("timeoutSeconds", 300)):
            self.deletion_since.pop(name)
            drains = (policy.get("drain") or {}).get("enable")
            self.change(name, {STATE: "drain-required" if drains else "upgrade-failed"})

    def drain(self, name: str) -> None:
        for pod in self.by_node.get(name, []):
            owners = pod["metadata"].get("ownerReferences") or ()
            if not any(ref["kind"] == "DaemonSet" for ref in owners) and pod["metadata"]["namespace"] != NAMESPACE:
                self.evict(pod)
        if not any(uses_gpu(p) for p in self.by_node.get(name, [])):
            self.change(name, {STATE: "pod-restart-required"})

    def restart(self, name: str, pod: Object, synced: bool) -> None:
        meta = pod["metadata"]
        if not synced:
            if "deletionTimestamp" not in meta:
                self.api.delete(self.path("pods", name=meta["name"]))
        elif is_ready(pod):
            self.change(name, {STATE: "validation-required"})
        elif any(
            s["restartCount"] > 10 and not s["ready"]
            for part in ("initContainerStatuses", "containerStatuses")
            for s in pod.get("status", {}).get(part) or ()
        ):
            self.change(name, {STATE: "upgrade-failed"})

    def validated(self, name: str) -> None:
        pods = [p for p in self.by_node.get(name, []) if labels(p).get("app") == VALIDATOR]
        if not pods:
            return
        if all(is_ready(p) for p in pods):
            self.change(name, note={VALIDATION_SINCE: None})
            self.finish(name)
            return
        since = annotations(self.nodes[name]).get(VALIDATION_SINCE)
        if since is None:
            self.change(name, note={VALIDATION_SINCE: str(int(time.time()))})
        elif time.time() - int(since) > self.settings["validation_timeout"]:
            self.change(name, {STATE: "upgrade-failed"}, {VALIDATION_SINCE: None})

    def finish(self, name: str) -> None:
        if INITIAL in annotations(self.nodes[name]):
            self.change(name, {STATE: "upgrade-done"}, {INITIAL: None})
        else:
            self.change(name, {STATE: "uncordon-required"})

    def report_status(self) -> None:
        """Ready as before 26.7.0: as soon as every driver pod is, also an outdated one."""
        pods = [pod for pod in self.pods if labels(pod).get(COMPONENT) == "nvidia-driver"]
        state = "ready" if pods and all(is_ready(pod) for pod in pods) else "notReady"
        policy = self.policies[0]
        if (policy.get("status") or {}).get("state") != state:
            path = f"/apis/nvidia.com/v1/clusterpolicies/{policy['metadata']['name']}/status"
            self.api.patch(path, {"status": {"state": state, "namespace": NAMESPACE}})


STEPS = (
    "cordon-required",
    "wait-for-jobs-required",
    "pod-deletion-required",
    "drain-required",
    "pod-restart-required",
    "validation-required",
    "uncordon-required",
    "upgrade-failed",
)


def ready_status(pod: Object) -> Object:
    moment = now()
    return {
        "phase": "Running",
        "startTime": moment,
        "containerStatuses": [
            {
                "name": c["name"],
                "image": c["image"],
                "imageID": c["image"],
                "restartCount": 0,
                "ready": True,
                "started": True,
            }
            | {"state": {"running": {"startedAt": moment}}}
            for c in pod["spec"]["containers"]
        ],
        "conditions": [
            {"type": kind, "status": "True", "lastTransitionTime": moment}
            for kind in ("Initialized", "ContainersReady", "Ready")
        ],
    }


# ---- what a test or a person sets up ---------------------------------------------------------------------------------


def apply(api: Api, path: str, item: Object) -> Object:
    """Create an object, or leave the one that is there."""
    try:
        return api.post(path, item)
    except ApiError as exc:
        if exc.status != 409:
            raise
        return api.get(f"{path}/{item['metadata']['name']}")


def cluster_policy(version: str, auto: bool = True, crd: bool = False, **driver: Any) -> Object:
    policy = {"autoUpgrade": auto, "maxParallelUpgrades": 1, "maxUnavailable": "25%"}
    return {
        "apiVersion": "nvidia.com/v1",
        "kind": "ClusterPolicy",
        "metadata": {"name": "cluster-policy"},
        "spec": {
            "driver": {
                "enabled": True,
                "useNvidiaDriverCRD": crd,
                "repository": "nvcr.io/nvidia",
                "image": "driver",
                "version": version,
                "upgradePolicy": policy,
                **driver,
            }
        },
    }


def nvidia_driver(name: str, version: str, selector: Object | None = None, **spec: Any) -> Object:
    where = {"nodeSelector": selector} if selector else {"default": True}
    return {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "NVIDIADriver",
        "metadata": {"name": name},
        "spec": {
            "driverType": "gpu",
            "repository": "nvcr.io/nvidia",
            "image": "driver",
            "version": version,
            **where,
            **spec,
        },
    }


def install(api: Api, settings: Object | None = None) -> None:
    """Definitions, namespace, settings and the operator's own Deployment (which runs nothing)."""
    for definition in DEFINITIONS:
        apply(api, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
    for path in ("/apis/nvidia.com/v1/clusterpolicies", "/apis/nvidia.com/v1alpha1/nvidiadrivers"):
        while api.raw("GET", path)[0] != 200:
            time.sleep(0.1)
    apply(api, "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    apply(api, "/apis/node.k8s.io/v1/runtimeclasses", {"metadata": {"name": "nvidia"}, "handler": "nvidia"})
    release = {**DEFAULTS, **(settings or {})}["release"]
    image = f"nvcr.io/nvidia/gpu-operator:{release}"
    marks = {
        "app": "gpu-operator",
        "app.kubernetes.io/component": "gpu-operator",
        "helm.sh/chart": f"gpu-operator-{release}",
    }
    deployment = {
        "metadata": {"name": "gpu-operator", "labels": marks},
        "spec": {
            "replicas": 0,
            "selector": {"matchLabels": {"app": "gpu-operator"}},
            "template": {
                "metadata": {"labels": {"app": "gpu-operator"}},
                "spec": {"containers": [{"name": "gpu-operator", "image": image}]},
            },
        },
    }
    apply(api, f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments", deployment)
    configure(api, **(settings or {}))


def configure(api: Api, **settings: Any) -> None:
    """Set settings, and all others back to their defaults."""
    data = {"metadata": {"name": "lab"}, "data": {"settings": json.dumps(settings)}}
    path = f"/api/v1/namespaces/{NAMESPACE}/configmaps"
    apply(api, path, data)
    api.patch(f"{path}/lab", {"data": data["data"]})


if __name__ == "__main__":
    kubeconfig, *versions = sys.argv[1:]
    server = Api.of(Path(kubeconfig))
    for version in versions:
        install(server)
        apply(server, "/apis/nvidia.com/v1/clusterpolicies", cluster_policy(version))
    Operator(server).run()
