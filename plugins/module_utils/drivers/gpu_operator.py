# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Give nodes another driver through the NVIDIA GPU Operator, node by node and in our order.

Driver DaemonSets are updated OnDelete: with a new version in its ClusterPolicy or NVIDIADriver, a node keeps its
driver until its driver pod is deleted. So every node of the owner is first held by the operator's own skip label, then
the version is written, and then the driver pods of the nodes that are cordoned and empty are deleted. The operator's
upgrade policy is neither used nor changed: this works with ``autoUpgrade`` on and off, waits for no slot of the
operator's, and nodes that it cannot get past hinder nobody.

What was there before is kept in an annotation of each node and of the owner, written before the change it is about.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Callable

from ansible_collections.gpufleet.driver.plugins.module_utils.drivers import gpu_operator_objects as objects
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.gpu_operator_objects import (
    DriverNode,
    DriverPod,
    Operator,
    Owner,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.findings import ERROR, WARNING
from ansible_collections.gpufleet.driver.plugins.module_utils.kubernetes_api import (
    FIELD_MANAGER,
    JSON_PATCH,
    MERGE_PATCH,
    Api,
    ApiError,
    ClusterError,
    change_node,
    object_path,
)

POLL_SECONDS = 1.0
RENDER_SECONDS = 120.0
"""How long the operator may take to write a version into its DaemonSets."""

DONE = "done"
"""How far a node is, in its note, that was proven since its driver pod was made anew."""

PULL_LABEL = "gpufleet.driver/pull"
_CHANGED_MEANWHILE = (409, 422)
_LISTS = {
    "nodes": ("/api/v1/nodes", ""),
    "policies": ("/apis/nvidia.com/v1/clusterpolicies", ""),
    "drivers": ("/apis/nvidia.com/v1alpha1/nvidiadrivers", ""),
    "sets": ("/apis/apps/v1/daemonsets", objects.COMPONENT),
    "revisions": ("/apis/apps/v1/controllerrevisions", objects.COMPONENT),
    "pods": ("/api/v1/pods", objects.COMPONENT),
    "validators": ("/api/v1/pods", objects.VALIDATOR),
    "deployments": ("/apis/apps/v1/deployments", "app=gpu-operator"),
}


RIGHTS = (
    ("", "nodes", ("get", "list", "patch")),
    ("", "pods", ("create", "delete", "list")),
    ("apps", "controllerrevisions", ("list",)),
    ("apps", "daemonsets", ("list",)),
    ("apps", "deployments", ("list",)),
    ("nvidia.com", "clusterpolicies", ("get", "list", "patch")),
    ("nvidia.com", "nvidiadrivers", ("get", "list", "patch")),
    ("resource.k8s.io", "resourceclaims", ("list",)),
)
"""API group, resource and verbs of every request sent from here; docs/kubernetes-rbac.yml is made from it."""


@dataclass
class Progress:
    """How far one node is. ``before`` and ``after`` are versions of its driver pod; ``waiting`` says for what."""

    before: str = ""
    after: str = ""
    loaded: str | None = None
    changed: bool = False
    done: bool = False
    failed: bool = False
    waiting: str = ""
    msg: str = ""

    def fail(self, text: str) -> None:
        self.failed, self.waiting, self.msg = True, "", text

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Turn:
    """The nodes of one owner that go to one version together. ``back`` says that they come from a failed upgrade;
    ``begun`` that the owner was written, ``made`` that their new pods are there, so that it need not have the version
    any more."""

    owner: Owner
    version: str
    progress: Mapping[str, Progress]
    back: bool = False
    begun: bool = False
    made: bool = False

    @property
    def going(self) -> list[str]:
        return [name for name, its in self.progress.items() if not its.done and not its.failed]


class Failure(Exception):
    """Nothing can be done for the nodes of one owner."""


class GpuOperator:
    """The operator of the cluster behind ``api``. ``loaded`` is what nodes themselves say is loaded, by name; it counts
    more than what feature discovery found."""

    def __init__(
        self,
        api: Api,
        run_id: str = "",
        loaded: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._api = api
        self._run_id = run_id
        self._said = loaded or {}
        self._clock = clock
        self._sleep = sleep
        self.strayed: dict[str, str] = {}
        """Nodes found with a new driver pod before their turn, and what was done about it."""

    def look(self) -> Operator:
        """:raises ClusterError: if the cluster cannot be asked."""

        def ask(wanted: tuple[str, str]) -> list[dict[str, Any]]:
            path, selector = wanted
            items = self._api.items(path, **({"labelSelector": selector} if selector else {}))
            return items

        return objects.read(objects.Listed(**dict(zip(_LISTS, self._api.each(ask, _LISTS.values())))))

    # ---- before anything is disturbed --------------------------------------------------------------------------------

    def stage(
        self, names: Sequence[str], version: str, deadline: float, patience: float, check: bool = False
    ) -> dict[str, Progress]:
        """Have the image of ``version`` pulled on working nodes, by a pod on each that does nothing and is removed."""
        operator = self.look()
        progress, pods = {}, {}
        for name in dict.fromkeys(names):
            its = progress[name] = Progress()
            node = operator.nodes.get(name)
            if node is None or node.owner is None or node.pod is None:
                its.fail(f"{name}: {_why_not(name, node)}")
                continue
            its.before = its.after = node.pod.version
            image = objects.image_for(node.pod.image, version)
            if image is None:
                its.fail(f"{name}: image {node.pod.image} names no version, so that of {version} cannot be told")
            elif node.pod.image == image:
                its.done = True
            else:
                pods[name] = self._pull_pod(operator.namespace, node.pod, image)
        if check:
            for name in pods:
                progress[name].changed = progress[name].done = True
            return progress
        self._pull(operator.namespace, pods, progress, deadline, patience)
        return progress

    def _pull_pod(self, namespace: str, driver: DriverPod, image: str) -> dict[str, Any]:
        digest = hashlib.sha256(f"{driver.node} {image}".encode()).hexdigest()[:16]
        container = {
            "name": "pull",
            "image": image,
            "imagePullPolicy": "IfNotPresent",
            "command": ["/bin/sh", "-c", "exit 0"],
            "resources": {"requests": {"cpu": "1m", "memory": "8Mi"}},
        }
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"gpufleet-pull-{digest}",
                "namespace": namespace,
                "labels": {PULL_LABEL: "true"},
            },
            "spec": {
                "nodeName": driver.node,
                "restartPolicy": "Never",
                "automountServiceAccountToken": False,
                "terminationGracePeriodSeconds": 0,
                "tolerations": [{"operator": "Exists"}],
                "imagePullSecrets": [{"name": name} for name in driver.secrets],
                "containers": [container],
            },
        }

    def _pull(
        self,
        namespace: str,
        pods: Mapping[str, Mapping[str, Any]],
        progress: Mapping[str, Progress],
        deadline: float,
        patience: float,
    ) -> None:
        path = object_path("v1", "pods", namespace=namespace)
        refused = self._api.each(lambda pod: self._create(path, pod), pods.values())
        for name, answer in zip(pods, refused):
            if answer:
                progress[name].fail(f"{name}: no pod could be made to pull the image: {answer}")
        end = time.monotonic() + patience
        while True:
            there = {pod["metadata"]["name"]: pod for pod in self._api.items(path, labelSelector=f"{PULL_LABEL}=true")}
            late = self._clock() >= deadline
            for name, pod in pods.items():
                its = progress[name]
                if not its.failed and not its.done:
                    self._judge_pull(
                        name, its, pod["spec"]["containers"][0]["image"], there.get(pod["metadata"]["name"]), late
                    )
            going = [name for name in pods if not progress[name].done and not progress[name].failed]
            if not going or time.monotonic() >= end:
                over = [pod for name, pod in pods.items() if name not in going]
                self._api.each(lambda pod: self._api.delete(f"{path}/{pod['metadata']['name']}"), over)
                return
            self._sleep(POLL_SECONDS)

    def _create(self, path: str, item: Mapping[str, Any]) -> str | None:
        answer = self._api.request("POST", path, item, fieldManager=FIELD_MANAGER)
        return None if answer.ok or answer.status == 409 else answer.message

    def _judge_pull(self, name: str, its: Progress, image: str, pod: Mapping[str, Any] | None, late: bool) -> None:
        states = [s.get("state") or {} for s in ((pod or {}).get("status") or {}).get("containerStatuses") or ()]
        its.changed = True
        if any("running" in state or "terminated" in state for state in states):
            its.done, its.waiting = True, ""
            return
        trouble = objects.trouble_of(pod) if pod else None
        its.waiting = f"{image} is being pulled" + (f": {trouble.reason}" if trouble else "")
        if (trouble is not None and trouble.hopeless) or late:
            why = trouble.reason if trouble else "not pulled in time"
            its.fail(
                f"{name} cannot pull {image} ({why}); see whether the version has an image for this operating system, "
                f"and whether the node reaches the registry; its driver was not touched"
            )

    # ---- the swap ----------------------------------------------------------------------------------------------------

    def swap(
        self, names: Sequence[str], version: str, deadline: float, patience: float, check: bool = False
    ) -> dict[str, Progress]:
        """Bring cordoned and empty nodes to ``version``; comes back after ``patience`` seconds at the latest, to be
        called again. Nodes that are not there at ``deadline`` (Unix seconds) fail."""
        return self._bring(names, lambda node: version, deadline, patience, check)

    def restore(
        self, names: Sequence[str], deadline: float, patience: float, check: bool = False, finished: bool = True
    ) -> dict[str, Progress]:
        """Bring exactly these nodes back to the version that a run of ours found on them; if ``finished``, also a run
        that is over with them."""
        if finished and not check:
            self._recall(names)

        def wanted(node: DriverNode) -> str:
            note, now = node.note, node.pod.version if node.pod else ""
            if note.get("step") or (note and note.get("from") != now):
                return str(note.get("from") or "")
            if node.owner and self._is_anew(node):
                return str(node.owner.note.get("from") or "")
            return node.previous if finished or not (note or node.last) else ""

        return self._bring(names, wanted, deadline, patience, check, back=True)

    def _recall(self, names: Sequence[str]) -> None:
        """Write the notes again that a run which is over had on the nodes of the owners of these."""
        operator = self.look()
        of_these = [operator.nodes[name] for name in names if name in operator.nodes]
        owners = {node.owner.uid: node.owner for node in of_these if node.owner and _is_over(node)}

        def recall(node: DriverNode) -> None:
            note = {
                "run_id": self._run_id,
                "from": node.previous,
                "to": node.pod.version if node.pod else None,
                "step": DONE,
                "initial": objects.INITIAL in node.annotations,
                "at": self._clock(),
            }

            def change(found: Mapping[str, Any]) -> dict[str, Any] | None:
                annotations = dict(found["metadata"].get("annotations") or {})
                return None if objects.note_of(annotations).get("step") else _with_note(annotations, note)

            self._change(node.name, change)

        members = [node for owner in owners.values() for node in operator.members(owner)]
        self._api.each(recall, [node for node in members if _is_over(node)])

    def _bring(
        self,
        names: Sequence[str],
        wanted: Callable[[DriverNode], str],
        deadline: float,
        patience: float,
        check: bool,
        back: bool = False,
    ) -> dict[str, Progress]:
        operator = self.look()
        progress = {name: Progress() for name in names}
        groups: dict[tuple[str, str], dict[str, Progress]] = {}
        for name, its in progress.items():
            node = operator.nodes.get(name)
            if node is None or node.owner is None:
                its.fail(f"{name}: {_why_not(name, node)}")
                continue
            now = node.pod.version if node.pod else ""
            its.before, its.after = str(node.note.get("from") or now), now
            version = wanted(node)
            if version:
                groups.setdefault((node.owner.uid, version), {})[name] = its
            else:
                its.done = True  # no run of ours has begun with it
        if check:
            for (dummy, version), members in groups.items():
                for name, its in members.items():
                    node = operator.nodes[name]
                    its.changed = its.after != version or not (back or node.in_sync)
                    its.after, its.done = version, True
            return progress
        end = time.monotonic() + patience
        turns = [Turn(operator.owners[uid], version, members, back) for (uid, version), members in groups.items()]
        while any(turn.going for turn in turns):
            for turn in _due(turns):
                self._guarded(turn, self._begin, operator)
                turn.begun = True
            operator = self.look()
            late = self._clock() >= deadline
            for turn in turns:
                self._guarded(turn, self._go_on if turn.begun else _wait_for_turn, operator, late)
            if time.monotonic() >= end:
                break
            self._sleep(POLL_SECONDS)
        return progress

    def _guarded(self, turn: Turn, act: Callable[..., None], *given: Any) -> None:
        try:
            if turn.going:
                act(turn, *given)
        except (Failure, ClusterError) as exc:
            for name in turn.going:
                turn.progress[name].fail(f"{name}: {exc}")

    def _begin(self, turn: Turn, operator: Operator) -> None:
        """Have new driver pods of the owner get the version, and nobody else's driver changed by that."""
        if turn.back and all(_has(operator, name, turn.version) for name in turn.progress):
            turn.made = True
            return
        members = operator.members(turn.owner)
        self._hold([node for node in members if node.name not in turn.progress or not self._is_anew(node)])
        self._write_version(turn.owner, turn.version)
        self._await_template(turn.owner, turn.version)

    def _go_on(self, turn: Turn, operator: Operator, late: bool) -> None:
        current = operator.owners.get(turn.owner.uid)
        if not turn.made and (current is None or current.version != turn.version):
            raise Failure(_written_over(turn.owner, current.version if current else "nothing", turn.version))
        self._api.each(lambda name: self._step(operator, name, turn, turn.progress[name], late), turn.going)
        self._watch(operator, turn)
        if turn.back and not turn.made and all(_has(operator, name, turn.version) for name in turn.progress):
            turn.made = True
            self._write_majority(operator, turn)

    def _hold(self, members: Sequence[DriverNode]) -> None:
        """Have the operator's own upgrades pass by every node of the owner, and note how it was before. A node that
        somebody else holds is left to them."""

        def hold(member: DriverNode) -> None:
            def change(node: Mapping[str, Any]) -> dict[str, Any] | None:
                labels = dict(node["metadata"].get("labels") or {})
                annotations = dict(node["metadata"].get("annotations") or {})
                if labels.get(objects.SKIP) == "true":
                    return None
                note = objects.note_of(annotations) or {
                    "run_id": self._run_id,
                    "from": member.pod.version if member.pod else "",
                    "initial": objects.INITIAL in annotations,
                    "at": self._clock(),
                }
                return {
                    "/metadata/labels": {**labels, objects.SKIP: "true"},
                    "/metadata/annotations": {**annotations, objects.NOTE: json.dumps(note)},
                }

            self._change(member.name, change)

        self._api.each(hold, [member for member in members if not member.held])

    def _change(self, name: str, change: Callable[[Mapping[str, Any]], Mapping[str, Any] | None]) -> None:
        """Write onto a node; there is nothing to be written onto one that was deleted meanwhile."""
        try:
            change_node(self._api, name, change)
        except ApiError as exc:
            if exc.answer.status != 404:
                raise

    def _note(self, name: str, **said: Any) -> None:
        """Write into the note of a node, before the act that it is about."""

        def change(node: Mapping[str, Any]) -> dict[str, Any] | None:
            annotations = dict(node["metadata"].get("annotations") or {})
            note = {**objects.note_of(annotations), "run_id": self._run_id, **said}
            if note == objects.note_of(annotations):
                return None
            annotations[objects.NOTE] = json.dumps(note)
            return {"/metadata/annotations": annotations}

        self._change(name, change)

    def _write_version(self, owner: Owner, version: str) -> None:
        """Into the owner, with what was there before in its note; again if it changed meanwhile. What somebody has
        written over the version that this run had written there is left."""
        for dummy in range(8):
            item = self._api.get(owner.path)
            annotations = dict(item["metadata"].get("annotations") or {})
            now = _at(item, owner.version_path)
            note = dict(objects.note_of(annotations)) or {"from": now}
            if note.get("run_id") == self._run_id and now not in (version, note.get("to", now)):
                raise Failure(_written_over(owner, now, note["to"]))
            note |= {"run_id": self._run_id, "to": version}
            if now == version and objects.note_of(annotations) == note:
                return
            annotations[objects.NOTE] = json.dumps(note)
            patch = [
                {"op": "test", "path": "/metadata/resourceVersion", "value": item["metadata"]["resourceVersion"]},
                {"op": "add", "path": "/metadata/annotations", "value": annotations},
                {"op": "add", "path": owner.version_path, "value": version},
            ]
            answer = self._api.request("PATCH", owner.path, patch, JSON_PATCH, fieldManager=FIELD_MANAGER)
            if answer.ok:
                return
            if answer.status not in _CHANGED_MEANWHILE:
                raise ApiError("PATCH", owner.path, answer)
        raise Failure(f"{owner.title} changes all the time; something else writes it: kubectl get {owner.kind} -o yaml")

    def _await_template(self, owner: Owner, version: str) -> None:
        """Until new driver pods of the owner get ``version``."""
        end = time.monotonic() + RENDER_SECONDS
        while True:
            operator = self.look()
            sets = [each for each in operator.sets if each.owner == owner.uid]
            behind = [each for each in sets if each.version != version or each.newest is None]
            if sets and not behind:
                return
            now = operator.owners[owner.uid].version if owner.uid in operator.owners else "nothing"
            if now != version:
                raise Failure(_written_over(owner, now, version))
            if time.monotonic() >= end:
                found = ", ".join(f"{each.name} has {each.version}" for each in behind) or "there is none"
                raise Failure(
                    f"the operator has not written {version} into its driver DaemonSet within {RENDER_SECONDS:.0f} s "
                    f"({found}); look at its log: kubectl -n {operator.namespace} logs deployment/gpu-operator"
                )
            self._sleep(POLL_SECONDS)

    def _step(self, operator: Operator, name: str, turn: Turn, its: Progress, late: bool) -> None:
        """Do the next thing about one node, or say what is waited for."""
        node = operator.nodes.get(name)
        if node is None or node.owner is None:
            its.fail(f"{name}: {_why_not(name, node)}")
            return
        pod = node.pod
        its.after = pod.version if pod else ""
        its.loaded = self._said.get(name) or node.loaded
        try:
            if self._is_anew(node):
                self._take_up(name, node.owner, turn)
                its.changed, its.waiting = True, "it was deleted and made anew, and is taken out of service again"
                return
            if node.note.get("step") == objects.RESTART and not node.cordoned:
                # k8s-driver-manager uncordons without a look at who had cordoned, where autoUpgrade is off
                self._change(name, lambda found: {"/spec/unschedulable": True})
            if pod is None or pod.deleting:
                its.waiting = "its new driver pod is not there yet"
            elif _is_to_restart(node, pod, its.loaded, turn):
                self._restart(node, pod, turn, its)
            elif pod.trouble is not None and pod.trouble.hopeless:
                why = self._holders(name) if pod.trouble.init else ""
                its.fail(f"{name}: driver pod {pod.name}: {pod.trouble}{why}; {_logs(pod)}")
            elif not pod.ready:
                its.waiting = f"its driver pod {pod.name} starts" + (f": {pod.trouble}" if pod.trouble else "")
            else:
                its.waiting = _unproven(node, its.loaded, turn.version)
                if not its.waiting:
                    self._finish(node)
                    its.done = True
        except ApiError as exc:
            its.fail(f"{name}: {exc}")
        if late and not its.failed and not its.done:
            its.fail(f"{name} is not on {turn.version} in time: {its.waiting}; {_logs(pod)}")

    def _is_anew(self, node: DriverNode) -> bool:
        """Whether a node in its turn has lost all that this run wrote on it, as somebody deleted it and its kubelet
        registered it again."""
        begun = node.owner is not None and node.owner.note.get("run_id") == self._run_id
        return begun and not (node.note or node.held or node.cordoned)

    def _take_up(self, name: str, owner: Owner, turn: Turn) -> None:
        """Go on with such a node; what it had before is known of its owner only."""

        def change(found: Mapping[str, Any]) -> dict[str, Any]:
            note = {"run_id": self._run_id, "from": owner.note.get("from"), "to": turn.version, "at": self._clock()}
            labels = {**(found["metadata"].get("labels") or {}), objects.SKIP: "true"}
            closed = self._closed(found)
            return {**closed, **_with_note(closed["/metadata/annotations"], note), "/metadata/labels": labels}

        self._change(name, change)

    def _working(self, name: str) -> list[str]:
        pods = self._api.items("/api/v1/pods", fieldSelector=f"spec.nodeName={name}")
        by_claim = objects.claimants(self._api.items("/apis/resource.k8s.io/v1/resourceclaims"))
        return [
            f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
            for pod in pods
            if objects.asks_for_gpu(pod, by_claim)
        ]

    def _holders(self, name: str) -> str:
        found = self._working(name)
        if found:
            return f"; it cannot unload the old driver under {', '.join(found)}"
        return "; it cannot unload the old driver, which no pod asks for: look for processes that hold /dev/nvidia*"

    def _restart(self, node: DriverNode, pod: DriverPod, turn: Turn, its: Progress) -> None:
        """Delete the driver pod of a node that is out of service and empty; its DaemonSet makes another."""
        if not node.cordoned:
            its.fail(f"{node.name} takes new work, so its driver was not touched; take it out of service first")
            return
        found = self._working(node.name)
        if found:
            its.fail(f"{node.name} is not empty, so its driver was not touched: {', '.join(found)}")
            return
        before = node.note.get("from") or (turn.version if turn.back else pod.version)
        self._note(node.name, **{"from": before}, step=objects.RESTART, to=turn.version, gone=pod.uid)
        self._api.delete(object_path("v1", "pods", pod.name, pod.namespace), preconditions={"uid": pod.uid})
        its.changed, its.waiting = True, "its driver pod was deleted"

    def _finish(self, node: DriverNode) -> None:
        """Note that a node is there, and tell the operator that it has nothing to do about it."""

        def change(found: Mapping[str, Any]) -> dict[str, Any] | None:
            labels, annotations = _settled(found)
            note = {**objects.note_of(annotations), "step": DONE}
            annotations[objects.NOTE] = json.dumps(note)
            if annotations == found["metadata"].get("annotations") and labels == found["metadata"].get("labels"):
                return None
            return {"/metadata/labels": labels, "/metadata/annotations": annotations}

        self._change(node.name, change)

    def _watch(self, operator: Operator, turn: Turn) -> None:
        """Close nodes at once that got another driver pod out of their turn."""
        for node in operator.members(turn.owner):
            note = node.note
            expected = note.get("to") if note.get("step") else note.get("from")
            if node.name in turn.progress or not expected or node.pod is None or node.pod.version == expected:
                continue
            if note.get("strayed") != node.pod.version:
                self._note(node.name, strayed=node.pod.version)
            if not node.cordoned:
                self._change(node.name, self._closed)
            self.strayed[node.name] = (
                f"{node.name} got a driver pod of {node.pod.version} in place of {expected} out of its turn (somebody "
                "has deleted the old one, or the node's labels were away for a moment); it was taken out of service"
            )

    def _closed(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """A node out of service by our doing, so that in its turn it is not taken for somebody else's."""
        annotations = dict(found["metadata"].get("annotations") or {})
        annotations.setdefault(objects.CORDON, json.dumps({"run_id": self._run_id, "at": self._clock()}))
        return {"/metadata/annotations": annotations, "/spec/unschedulable": True}

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _write_majority(self, operator: Operator, turn: Turn) -> None:
        """What goes back has its pods: one made anew elsewhere is to get the version the upgraded nodes have."""
        others = [node for node in operator.members(turn.owner) if node.name not in turn.progress]
        done = [node.note for node in others if node.note.get("step") == DONE]
        upgraded = [note["to"] for note in done if note.get("to") not in (None, note.get("from"))]
        if upgraded:
            self._write_version(turn.owner, Counter(map(str, upgraded)).most_common(1)[0][0])

    def settle(self, check: bool = False) -> list[str]:
        """Give the nodes back to the operator that are as it wants them; one line for each thing done or left."""
        operator = self.look()
        said = self._remove_pulls(operator.namespace, check)
        for owner in operator.owners.values():
            members = operator.members(owner)
            if owner.note or any(node.note for node in members):
                try:
                    said += self._settle_owner(owner, members, check)
                except Failure as exc:
                    said.append(f"{owner.title} could not be settled with: {exc}")
        return said

    def _remove_pulls(self, namespace: str, check: bool) -> list[str]:
        path = object_path("v1", "pods", namespace=namespace)
        pods = self._api.items(path, labelSelector=f"{PULL_LABEL}=true")
        if not check:
            self._api.each(lambda pod: self._api.delete(f"{path}/{pod['metadata']['name']}"), pods)
        return [f"pod {pod['metadata']['name']} of {pod['spec'].get('nodeName')} removed" for pod in pods]

    def _settle_owner(self, owner: Owner, members: Sequence[DriverNode], check: bool) -> list[str]:
        said = []
        running = Counter(node.pod.version for node in members if node.pod and node.pod.ready)
        version = owner.version if running.get(owner.version) or not running else running.most_common(1)[0][0]
        written = owner.note.get("to", owner.version)
        if written != owner.version:
            version = owner.version
            said.append(f"{_written_over(owner, version, written)}; it is left so")
        if version != owner.version:
            said.append(f"{owner.title}: {version}, which its nodes have, written back in place of {owner.version}")
        if not check:
            if version != owner.version:
                self._write_version(owner, version)
            self._await_template(owner, version)
            fresh = self.look().nodes
            members = [fresh[node.name] for node in members if node.name in fresh]
        noted = [node for node in members if node.note]
        good = [n for n in noted if n.pod is not None and n.pod.ready and n.pod.version == version and n.in_sync]
        left = [node for node in noted if node not in good]
        if left:
            names = " ".join(node.name for node in left)
            said.append(
                f"held from the operator by the label {objects.SKIP}, as their driver pods are not what {owner.title} "
                f"says now ({version}), or not ready: {names}; upgrade them, or leave them to the operator: "
                f"kubectl label node {names} {objects.SKIP}-"
            )
        if good:
            said.append(f"the operator's again: {' '.join(node.name for node in good)}")
        if not check:
            self._api.each(self._let_go, good)
            if owner.note and not left:
                body = {"metadata": {"annotations": {objects.NOTE: None}}}
                self._api.ask("PATCH", owner.path, body, MERGE_PATCH, fieldManager=FIELD_MANAGER)
        return said

    def _let_go(self, node: DriverNode) -> None:
        def change(found: Mapping[str, Any]) -> dict[str, Any] | None:
            labels, annotations = _settled(found)
            note = objects.note_of(annotations)
            annotations.pop(objects.NOTE, None)
            labels.pop(objects.SKIP, None)
            if note.get("step") == DONE:  # it can still go back; one that has gone back has nothing to go back from
                annotations.pop(objects.LAST, None)
                if note.get("from") not in (None, note.get("to")):
                    annotations[objects.LAST] = json.dumps({key: note.get(key) for key in ("run_id", "from", "to")})
            return {"/metadata/labels": labels, "/metadata/annotations": annotations}

        self._change(node.name, change)


def _is_over(node: DriverNode) -> bool:
    """Whether it can go back from an upgrade that is over, and no run has done anything to it since."""
    return bool(node.last and node.previous) and not node.note.get("step")


def _with_note(annotations: Mapping[str, str], note: Mapping[str, Any]) -> dict[str, Any]:
    return {"/metadata/annotations": {**annotations, objects.NOTE: json.dumps(note)}}


def _settled(found: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Labels and annotations of a node about which the operator has nothing to do."""
    labels = dict(found["metadata"].get("labels") or {})
    annotations = dict(found["metadata"].get("annotations") or {})
    if labels.get(objects.STATE):
        labels[objects.STATE] = objects.DONE
    if not objects.note_of(annotations).get("initial"):  # else a later upgrade would take our cordon for a person's
        annotations.pop(objects.INITIAL, None)
    return labels, annotations


def _has(operator: Operator, name: str, version: str) -> bool:
    node = operator.nodes.get(name)
    return node is not None and node.pod is not None and not node.pod.deleting and node.pod.version == version


def _is_to_restart(node: DriverNode, pod: DriverPod, loaded: str | None, turn: Turn) -> bool:
    """Whether the driver pod of a node has to be made anew.

    Also one of the right version that is not of ours, if it cannot start under what ran here or has another driver
    loaded. A node that goes back is not to be of the newest template.
    """
    if pod.version != turn.version or not (turn.back or node.in_sync):
        return True
    if node.note.get("gone") is not None and node.note.get("to") == turn.version:
        return False
    return (pod.trouble is not None and pod.trouble.hopeless) or (pod.ready and loaded not in (None, turn.version))


def _due(turns: Sequence[Turn]) -> list[Turn]:
    """The turns to begin now: one owner can have one version at a time."""
    busy = {turn.owner.uid for turn in turns if turn.begun and turn.going and not turn.made}
    due = []
    for turn in turns:
        if turn.going and not turn.begun and turn.owner.uid not in busy:
            busy.add(turn.owner.uid)
            due.append(turn)
    return due


def _wait_for_turn(turn: Turn, operator: Operator, late: bool) -> None:
    for name in turn.going:
        turn.progress[name].waiting = f"other nodes of {turn.owner.title} get another driver than {turn.version} first"
        if late:
            turn.progress[name].fail(f"{name} was not begun with in time: {turn.progress[name].waiting}")


def _written_over(owner: Owner, now: object, ours: object) -> str:
    return (
        f"somebody has written {now} over {ours} in {owner.title}; if its manifest is kept elsewhere, in git for "
        "example, change the version there"
    )


def _at(item: Mapping[str, Any], path: str) -> Any:
    for part in path.strip("/").split("/"):
        item = item.get(part) or {}
    return item or ""


def _why_not(name: str, node: DriverNode | None) -> str:
    if node is None:
        return "the operator knows no GPU node of that name"
    return node.problem or "it has no driver pod"


def _unproven(node: DriverNode, loaded: str | None, version: str) -> str:
    """What is not as it should be with a node whose driver pod is ready; empty if nothing is."""
    if node.paused:
        return f"{', '.join(node.paused)} are not back yet"
    if loaded is None:
        return "nobody has said yet which driver is loaded"
    if loaded != version:
        return f"driver {loaded} is loaded, {version} is expected"
    if not all(node.validators) or (not node.validators and node.labels.get(objects.DEPLOY_VALIDATOR) == "true"):
        return "the operator's validator is not ready yet"
    return ""


def _logs(pod: DriverPod | None) -> str:
    if pod is None:
        return "look with: kubectl get events -A"
    return f"look with: kubectl -n {pod.namespace} logs {pod.name} --all-containers --prefix"


def judged(operator: Operator, version: str, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Whether nodes can go to ``version``: all, or those named, known to the operator or not."""
    general = objects.of_operator(operator, version)
    nodes = {}
    for name in dict.fromkeys(operator.nodes if names is None else names):
        node = operator.nodes.get(name)
        if node is None:
            problem = f"the operator knows no GPU node called {name}; is it the name of the node in the cluster?"
            nodes[name] = {"ready": False, "already": False, "reason": problem, "warnings": []}
            continue
        found = [*general, *objects.of_node(node, version)]
        problems = [finding.message for finding in found if finding.level == ERROR]
        nodes[name] = {
            **node.as_dict(),
            "ready": not problems,
            "already": objects.on_target(node, version),
            "reason": "; ".join(problems),
            "warnings": [finding.message for finding in found if finding.level == WARNING],
        }
    return {
        "release": operator.release_text,
        "namespace": operator.namespace,
        "findings": [finding.as_dict() for finding in general],
        "nodes": nodes,
    }
