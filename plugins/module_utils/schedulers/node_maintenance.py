# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Take part in the maintenance of nodes as NVIDIA's maintenance operator hands it out, so that work on GPUs, network
cards and kernels shares one cordon and one drain.

A ``NodeMaintenance`` of ``maintenance.nvidia.com/v1alpha1`` asks for a node; the operator says in its condition Ready
when the node may be worked on. One that another requestor has is joined, by adding ours to its additional requestors.
A request of our own asks for neither cordon nor drain: those are the scheduler's here, as the plan says.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Callable

from ansible_collections.gpufleet.driver.plugins.module_utils.kubernetes_api import (
    FIELD_MANAGER,
    JSON_PATCH,
    Api,
    ApiError,
    ClusterError,
    name_path,
    object_path,
)

GROUP, RESOURCE = "maintenance.nvidia.com/v1alpha1", "nodemaintenances"
REQUESTOR = "gpufleet.driver"
POLL_SECONDS = 1.0
RIGHTS = (("maintenance.nvidia.com", "nodemaintenances", ("create", "delete", "list", "patch")),)

_LONGEST_NAME = 253
_CHANGED_MEANWHILE = (409, 422)
_ATTEMPTS = 8

Object = Mapping[str, Any]


@dataclass
class Progress:
    """One node: ``ready`` to be worked on (or let go), or what it waits for. ``shared`` names other requestors."""

    ready: bool = False
    changed: bool = False
    failed: bool = False
    shared: tuple[str, ...] = ()
    waiting: str = ""
    msg: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "shared": list(self.shared)}


class Maintenance:
    """Requests are made in ``namespace``."""

    def __init__(
        self,
        api: Api,
        namespace: str,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._clock = clock
        self._sleep = sleep

    def request(
        self, nodes: Sequence[str], deadline: float, patience: float, check: bool = False
    ) -> dict[str, Progress]:
        """Ask for ``nodes`` and wait, for at most ``patience`` seconds, until they may be worked on; call it again for
        those that may not yet. From ``deadline`` (Unix seconds) on they fail.

        :raises ClusterError: if the cluster cannot be asked.
        """
        progress = {name: Progress() for name in nodes}
        end = time.monotonic() + patience
        while True:
            found = self._by_node()
            going = [name for name, its in progress.items() if not its.ready and not its.failed]
            turns = [(name, found.get(name, []), progress[name]) for name in going]
            self._api.each(lambda turn: self._ask(*turn, check), turns)
            for name in going:
                its = progress[name]
                if not its.ready and not its.failed and self._clock() >= deadline:
                    its.failed = True
                    its.msg = f"{name} was not handed out for maintenance in time: {its.waiting}; look with: " + (
                        f"kubectl get nodemaintenances -A; kubectl -n {self._namespace} get maintenanceoperatorconfigs"
                    )
            if check or all(its.ready or its.failed for its in progress.values()) or time.monotonic() >= end:
                return progress
            self._sleep(POLL_SECONDS)

    def release(self, nodes: Sequence[str], check: bool = False) -> dict[str, Progress]:
        """Give ``nodes`` back: our request is deleted, or taken out of one that is another's.

        :raises ClusterError: if the cluster cannot be asked.
        """
        progress: dict[str, Progress] = {}
        for dummy in range(_ATTEMPTS):
            found = self._by_node()
            going = [name for name in nodes if name not in progress or progress[name].waiting]
            turns = [(name, found.get(name, []), check) for name in going]
            for name, its in zip(going, self._api.each(lambda turn: self._let_go(*turn), turns)):
                its.changed = its.changed or (name in progress and progress[name].changed)
                progress[name] = its
            if not any(its.waiting for its in progress.values()):
                break
        for name, its in progress.items():
            if its.waiting:
                its.failed, its.ready = True, False
                its.msg = f"{name} was not given back: {its.waiting}; look with: kubectl get nodemaintenances -A"
        return progress

    def _by_node(self) -> dict[str, list[Object]]:
        listed = self._api.find(object_path(GROUP, RESOURCE))
        if listed is None:
            raise ClusterError(
                "the cluster knows no NodeMaintenance (maintenance.nvidia.com/v1alpha1); install NVIDIA's maintenance "
                "operator, or leave gpu_maintenance_namespace empty"
            )
        out: dict[str, list[Object]] = {}
        for item in listed["items"]:
            out.setdefault(item["spec"]["nodeName"], []).append(item)
        return out

    def _ask(self, name: str, there: Sequence[Object], its: Progress, check: bool) -> None:
        ours = next((item for item in there if REQUESTOR in requestors(item) and not _ends(item)), None)
        if ours is not None:
            its.shared = tuple(each for each in requestors(ours) if each != REQUESTOR)
            its.ready = is_ready(ours)
            its.waiting = "" if its.ready else state_of(ours)
            return
        ending = next((item for item in there if _ends(item)), None)
        if ending is not None:
            its.waiting = f"the maintenance of {' and '.join(requestors(ending))} ends"
            return
        its.changed = True
        its.waiting = "the request was made"
        if check:
            its.ready = True
        elif there:
            self._join(there[0], its)
        else:
            self._create(name, its)

    def _create(self, node: str, its: Progress) -> None:
        path = object_path(GROUP, RESOURCE, namespace=self._namespace)
        body = {
            "apiVersion": GROUP,
            "kind": "NodeMaintenance",
            "metadata": {"name": request_name(node), "namespace": self._namespace},
            "spec": {"requestorID": REQUESTOR, "nodeName": node, "cordon": False},
        }
        answer = self._api.request("POST", path, body, fieldManager=FIELD_MANAGER)
        if not answer.ok and answer.status != 409:
            its.failed, its.msg = True, f"{node}: {ApiError('POST', path, answer)}"

    def _join(self, item: Object, its: Progress) -> None:
        self._set_additional(item, [*additional(item), REQUESTOR], its)

    def _set_additional(self, item: Object, wanted: Sequence[str], its: Progress) -> None:
        path = name_path(item, GROUP, RESOURCE)
        patch = [
            {"op": "test", "path": "/metadata/resourceVersion", "value": item["metadata"]["resourceVersion"]},
            {"op": "add", "path": "/spec/additionalRequestors", "value": list(wanted)},
        ]
        answer = self._api.request("PATCH", path, patch, JSON_PATCH, fieldManager=FIELD_MANAGER)
        self._took(item, its, ApiError("PATCH", path, answer))

    def _took(self, item: Object, its: Progress, said: ApiError) -> None:
        """Note what became of a change; one of a request that is another by now is tried again after the next look."""
        if said.answer.status in _CHANGED_MEANWHILE:
            its.waiting = f"somebody else writes the request {item['metadata']['name']}"
        elif not said.answer.ok and said.answer.status != 404:
            its.failed, its.msg = True, f"{item['spec']['nodeName']}: {said}"

    def _let_go(self, name: str, there: Sequence[Object], check: bool) -> Progress:
        its = Progress(ready=True)
        for item in there:
            if REQUESTOR not in requestors(item) or _ends(item):
                continue
            its.shared = tuple(each for each in requestors(item) if each != REQUESTOR)
            its.changed = True
            if check:
                continue
            if item["spec"]["requestorID"] != REQUESTOR:
                self._set_additional(item, [each for each in additional(item) if each != REQUESTOR], its)
            elif its.shared:
                its.changed = False
                its.msg = (
                    f"{name} stays in maintenance for {' and '.join(its.shared)}, who joined our request; when they "
                    f"are done: kubectl -n {self._namespace} delete nodemaintenance {item['metadata']['name']}"
                )
            else:
                path, meta = name_path(item, GROUP, RESOURCE), item["metadata"]
                as_found = {
                    "uid": meta["uid"],
                    "resourceVersion": meta["resourceVersion"],
                }  # nobody has joined it since
                answer = self._api.request("DELETE", path, {"preconditions": as_found})
                self._took(item, its, ApiError("DELETE", path, answer))
        its.ready = not its.failed
        return its


def request_name(node: str) -> str:
    """The name of our request for a node; a digest in place of a node's name that is too long."""
    name = f"gpufleet-{node}"
    return name if len(name) <= _LONGEST_NAME else f"gpufleet-{hashlib.sha256(node.encode()).hexdigest()}"


def additional(item: Object) -> list[str]:
    return [str(each) for each in item["spec"].get("additionalRequestors") or ()]


def requestors(item: Object) -> list[str]:
    return [str(item["spec"]["requestorID"]), *additional(item)]


def is_ready(item: Object) -> bool:
    return any(
        each.get("type") == "Ready" and each.get("status") == "True"
        for each in (item.get("status") or {}).get("conditions") or ()
    )


def state_of(item: Object) -> str:
    """What the operator is at, in words."""
    status = item.get("status") or {}
    reason = next((c.get("reason") for c in status.get("conditions") or () if c.get("type") == "Ready"), None)
    drain = status.get("drain") or {}
    left = [str(pod) for pod in drain.get("waitForEviction") or ()]
    text = f"the maintenance operator has it as {reason or 'not seen yet'}"
    return text + (f", {len(left)} pods to evict" if left else "")


def _ends(item: Object) -> bool:
    return "deletionTimestamp" in item["metadata"]
