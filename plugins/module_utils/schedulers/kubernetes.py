# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Kubernetes: nodes cordoned with a mark, pods evicted within their budgets, nodes proven by a pod of ours.

Whose doing a cordon was is kept in an annotation of the node, written in the same request as the cordon and only onto
the node as it was read. A taint of ours beside it keeps the node closed even if somebody uncordons it meanwhile, until
what belongs on the node comes back to be validated. The API server notes who wrote what, so a cordon that somebody else
has set since is known as theirs.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any, Callable

from ansible_collections.gpufleet.driver.plugins.module_utils import fleet
from ansible_collections.gpufleet.driver.plugins.module_utils.kubernetes_api import (
    FIELD_MANAGER,
    Api,
    ApiError,
    ClusterError,
    change_node,
    shown,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import kubernetes_objects as objects
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import (
    Evacuated,
    Fate,
    Mark,
    NodeResult,
    Scheduler,
    SchedulerError,
    State,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.kubernetes_evacuation import Evacuation
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.kubernetes_facts import expression
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.kubernetes_snapshot import Cluster, snapshot
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.kubernetes_steering import Steering
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.kubernetes_validation import (
    Validation,
    ValidationPod,
)

LISTS = {
    "pods": "/api/v1/pods",
    "nodes": "/api/v1/nodes",
    "budgets": "/apis/policy/v1/poddisruptionbudgets",
    "claims": "/apis/resource.k8s.io/v1/resourceclaims",
    "slices": "/apis/resource.k8s.io/v1/resourceslices",
}
"""What a snapshot is made from; what a server does not know (DRA before 1.34) is empty."""

RIGHTS = (
    ("", "nodes", ("get", "list", "patch")),
    ("", "pods", ("create", "delete", "get", "list")),
    ("", "pods/eviction", ("create",)),
    ("policy", "poddisruptionbudgets", ("list",)),
    ("resource.k8s.io", "resourceclaims", ("create", "delete", "list")),
    ("resource.k8s.io", "resourceslices", ("list",)),
    ("admissionregistration.k8s.io", "mutatingadmissionpolicies", ("create", "delete", "list", "patch")),
    ("admissionregistration.k8s.io", "mutatingadmissionpolicybindings", ("create", "delete", "patch")),
)
"""Group, resource and verbs of every request that is sent from here; ``docs/kubernetes-rbac.yml`` is made of them."""

Object = Mapping[str, Any]


class Kubernetes(Scheduler):
    """A cluster behind ``api``. ``pause`` is annotations that nodes carry while they are out of service."""

    def __init__(
        self,
        api: Api,
        rules: objects.Rules,
        pod: ValidationPod,
        pause: Mapping[str, str],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._api = api
        self._rules = rules
        self._pod = pod
        self._pause = pause
        self._clock = clock

    def snapshot(self, names: Sequence[str]) -> fleet.Snapshot:
        now = self._clock()
        taken_at = datetime.fromtimestamp(now, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        with _scheduler_errors(), _without_collector():
            lists = self._api.each(self._api.items, LISTS.values())
            return snapshot(Cluster(**dict(zip(LISTS, lists))), self._rules, now, taken_at)

    def addresses(self) -> dict[str, str]:
        with _scheduler_errors():
            return objects.addresses(self._api.items(LISTS["nodes"]))

    def cordon(self, nodes: Sequence[str], mark: Mark, check: bool = False) -> dict[str, NodeResult]:
        return self._each(nodes, lambda name: self._take_out(name, mark, check))

    def uncordon(self, nodes: Sequence[str], mark: Mark, check: bool = False) -> dict[str, NodeResult]:
        return self._each(nodes, lambda name: self._put_back(name, check))

    def evacuate(
        self,
        nodes: Sequence[str],
        mark: Mark,
        fates: Sequence[Fate],
        deadline: float,
        patience: float,
        check: bool = False,
    ) -> dict[str, Evacuated]:
        steering = Steering(self._api, mark.run_id)
        evacuation = Evacuation(self._api, self._rules, fates, deadline, self._clock, steering)
        with _scheduler_errors():
            return evacuation.run(nodes, patience, check)

    def validate(
        self, nodes: Sequence[str], mark: Mark, gpus: Mapping[str, int], timeout: float, check: bool = False
    ) -> dict[str, NodeResult]:
        validation = Validation(self._api, self._pod, mark, timeout, check)
        return self._each(nodes, lambda name: validation.of(name, gpus.get(name)))

    def settle(self, mark: Mark, check: bool = False) -> list[str]:
        with _scheduler_errors():
            gone = Validation(self._api, self._pod, mark, 0, check).remove_pods()
            return gone + Steering(self._api, mark.run_id).remove(check)

    def _each(self, nodes: Sequence[str], act: Callable[[str], NodeResult]) -> dict[str, NodeResult]:
        def one(name: str) -> NodeResult:
            try:
                return act(name)
            except ApiError as exc:
                return NodeResult(None, None, failed=True, msg=f"{name}: {exc}")

        distinct = list(dict.fromkeys(nodes))
        with _scheduler_errors():
            return dict(zip(distinct, self._api.each(one, distinct)))

    def _take_out(self, name: str, mark: Mark, check: bool) -> NodeResult:
        result: list[NodeResult] = []

        def change(node: Object) -> dict[str, Any] | None:
            before = state_of(node)
            wanted = State(True, True, mark.run_id)
            if before.cordoned and not before.ours:
                who = objects.cordoned_by(node)
                left = f"{name} was taken out of service by {who}; it will be left so"
                result[:] = [NodeResult(before, before, msg=left)]
                return None
            if before != wanted or not _was_written(result):
                result[:] = [NodeResult(before, wanted, changed=before != wanted)]
            return None if check or before == wanted else self._taken_out(node, mark)

        change_node(self._api, name, change)
        return result[0]

    def _taken_out(self, node: Object, mark: Mark) -> dict[str, Any]:
        annotations = dict(node["metadata"].get("annotations") or {})
        earlier = objects.mark_of(node) or {}
        note = {
            "run_id": mark.run_id,
            "at": mark.at,
            "gpus": earlier.get("gpus", objects.gpus_listed(node)),
            "pauses": earlier.get(
                "pauses", {name: [value, annotations.get(name)] for name, value in self._pause.items()}
            ),
        }
        annotations.update({**self._pause, objects.MARK: json.dumps(note)})
        taints = objects.other_taints(node)
        if not objects.operator_owns_driver(node):  # whose new driver pod would not tolerate it
            taints.append({"key": objects.TAINT, "effect": "NoSchedule"})
        return {"/metadata/annotations": annotations, "/spec/taints": taints, "/spec/unschedulable": True}

    def _put_back(self, name: str, check: bool) -> NodeResult:
        result: list[NodeResult] = []

        def change(node: Object) -> dict[str, Any] | None:
            before = state_of(node)
            mark = objects.mark_of(node)
            if mark is None:
                left = f"{name} was not taken out of service by this collection; it is left as it is"
                if not _was_written(result):
                    result[:] = [NodeResult(before, before, msg=left if before.cordoned else "")]
                return None
            stays, paused = _stays(node), objects.left_paused(node)
            said = [f"{name} stays out of service: {stays}"] if stays else []
            said += [f"{name}: {paused}"] if paused else []
            result[:] = [NodeResult(before, State(bool(stays)), changed=True, msg="; ".join(said))]
            return None if check else put_back(node, mark, uncordon=not stays)

        change_node(self._api, name, change)
        return result[0]


def connect(options: Mapping[str, Any]) -> Kubernetes:
    """The cluster that the options of a module lead to.

    :raises SchedulerError: if there is no way to reach it, or an option makes no sense.
    """
    _refuse_senseless(options)
    rules = objects.Rules(
        unmanaged=options["evict_unmanaged"],
        local_data=options["evict_local_data"],
        taint=options["taint_daemonsets"],
        ignore=options["ignore"],
        expressions=options["fact_expressions"],
        domains=options["domain_labels"],
        holders=options["holders"],
    )
    pod = ValidationPod(
        options["validation_image"],
        options["validation_command"],
        options["validation_namespace"],
        options["validation_runtime_class"],
    )
    with _scheduler_errors():
        api = Api(options["kubeconfig"], options["context"], timeout=options["timeout"])
    return Kubernetes(api, rules, pod, options["pause_annotations"])


def _refuse_senseless(options: Mapping[str, Any]) -> None:
    for option in ("domain_labels", "fact_expressions", "pause_annotations"):
        for name, value in options[option].items():
            if not isinstance(value, str):
                raise SchedulerError(f"{option}: {name} is {value!r}, expected text; quote it if it is one")
    try:
        for text in options["fact_expressions"].values():
            expression(text)
    except (ImportError, ValueError) as exc:
        raise SchedulerError(f"fact_expressions: {exc}") from exc


@contextmanager
def _without_collector() -> Iterator[None]:
    """Millions of small objects come and none of them is part of a cycle: looking for cycles would cost more CPU than
    decoding and judging them, also later, while what was made of them is given out."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def _scheduler_errors() -> Iterator[None]:
    """A cluster that cannot be asked is nobody's trouble in particular."""
    try:
        yield
    except ClusterError as exc:
        raise SchedulerError(str(exc)) from exc


def state_of(node: Object) -> State:
    """Whether a node takes new work; a cordon that somebody else has written over ours is theirs."""
    mark = objects.mark_of(node)
    if not node["spec"].get("unschedulable"):
        return State(False)
    if mark is None or objects.cordoned_by(node) not in (FIELD_MANAGER, objects.NOBODY):
        return State(True)
    return State(True, True, str(mark["run_id"]))


def _was_written(result: Sequence[NodeResult]) -> bool:
    """Whether this call has written the node before, and looks again as the answer to that was lost."""
    return any(each.changed for each in result)


def _stays(node: Object) -> str | None:
    """Why a node that we took out of service is not put back, or None."""
    kept = (node["metadata"].get("annotations") or {}).get(objects.KEEP)
    if kept is not None:
        return f"it is annotated {objects.KEEP}: {shown(kept)}"
    state = state_of(node)
    return f"{objects.cordoned_by(node)} has cordoned it since" if state.cordoned and not state.ours else None


def put_back(node: Object, mark: Mapping[str, Any], uncordon: bool) -> dict[str, Any]:
    """A node without anything of ours: mark, taint, pauses."""
    meta, spec = node["metadata"], node["spec"]
    annotations = dict(meta.get("annotations") or {})
    annotations.pop(objects.MARK)
    for name, (ours, former) in (mark.get("pauses") or {}).items():
        if annotations.get(name) == ours:
            annotations.pop(name)
            if former is not None:
                annotations[name] = former
    labels, annotations = objects.unpaused(meta.get("labels") or {}, annotations)
    changed = {
        "/metadata/annotations": annotations,
        "/metadata/labels": labels,
        "/spec/taints": objects.other_taints(node),
    }
    return {**changed, "/spec/unschedulable": False} if uncordon and spec.get("unschedulable") else changed
