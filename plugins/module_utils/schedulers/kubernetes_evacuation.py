# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Empty nodes of the pods that use their GPUs: wait for some, evict others, take DaemonSets off by label.

Nothing on a node is disturbed if something on it cannot be taken off: that is found out first. Pods leave by the
eviction API only, which keeps disruption budgets; a pod is compared with what was decided about by its uid first, as
an eviction that fails on the uid has already spent the budget.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable

from ansible_collections.gpufleet.driver.plugins.module_utils.kubernetes_api import (
    Api,
    ApiError,
    change_node,
    name_path,
    object_path,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import kubernetes_objects as objects
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import End, Evacuated, Fate
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.kubernetes_steering import Steering

FIRST_POLL_SECONDS, POLL_SECONDS = 0.1, 1.0
"""Pods that were just evicted are looked for soon, and then ever less often, up to the second."""

BUDGET_SECONDS = 2.0
"""How long a budget that refused is left alone, if the server does not say."""

STOPPING_SECONDS = 30.0
"""How long after its grace period a pod may still be there before that is hopeless, once waiting is over."""

RETURNS = 3
"""How often all pods of a controller may come back to a node they were evicted from."""

EVICTED, ENDED = "evicted", "ended"
_GO = frozenset(("move", "cold_start"))

Object = Mapping[str, Any]


@dataclass
class Rest:
    """What is on a node that uses its GPUs: pods with their owners, and pods of DaemonSets that can be taken off."""

    pods: list[tuple[Object, objects.Owner]] = field(default_factory=list)
    daemons: list[Object] = field(default_factory=list)
    staying: list[Object] = field(default_factory=list)
    """Pods of other DaemonSets."""
    by_taint: bool = False
    """Whether DaemonSets have to be taken off by a taint."""
    bystanders: set[str] = field(default_factory=set)
    """uids of pods without a GPU that the taint would take off."""

    @property
    def empty(self) -> bool:
        return not self.pods and not self.daemons


@dataclass
class Progress:
    """One node on its way to being empty."""

    ends: dict[str, End] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)
    seen: dict[str, str] = field(default_factory=dict)
    """uid → workload of the pods that were there."""
    first: dict[str, str | None] = field(default_factory=dict)
    """uid → controller of the pods that were there at the first look."""
    emptied: set[str] = field(default_factory=set)
    """Controllers of which a pod was evicted."""
    back: set[tuple[str, str]] = field(default_factory=set)
    """Controller and uid of pods that came in place of one that was evicted, as a cordon does not keep them away."""
    changed: bool = False
    failure: str = ""
    done: bool = False

    def result(self) -> Evacuated:
        ends = tuple(self.ends.values())
        return Evacuated(ends, tuple(self.waiting), self.changed, bool(self.failure), self.failure)


class Evacuation:
    """One call: ``fates`` are the plan's, ``deadline`` and ``clock`` in Unix seconds."""

    def __init__(
        self,
        api: Api,
        rules: objects.Rules,
        fates: Sequence[Fate],
        deadline: float,
        clock: Callable[[], float],
        steering: Steering,
    ) -> None:
        self._api = api
        self._rules = rules
        self._fates = {fate.workload: fate for fate in fates}
        self._deadline = deadline
        self._clock = clock
        self._steering = steering
        self._budgets = objects.Budgets(())
        self._known: dict[str, str] = {}  # uid → how a pod uses a GPU, where others than it say so
        self._not_before: dict[str, float] = {}  # uid → when its eviction is tried again
        self._refused: dict[str, str] = {}  # uid → what the server said last
        self._withheld: set[str] = set()  # uids that a budget or a rule of admission has refused
        self._evicted: set[str] = set()
        self._unsteered: dict[str, str] = {}  # uid → why its successor is not steered

    def run(self, nodes: Sequence[str], patience: float, check: bool) -> dict[str, Evacuated]:
        end = time.monotonic() + patience
        progress = {name: Progress() for name in nodes}
        budgets, claims = self._api.each(
            self._api.items, ["/apis/policy/v1/poddisruptionbudgets", "/apis/resource.k8s.io/v1/resourceclaims"]
        )
        self._budgets = objects.Budgets(budgets)
        self._known = objects.known_users(objects.claim_holders(claims), self._rules.holders)
        pause = FIRST_POLL_SECONDS
        while True:
            evicted = len(self._evicted)
            going = [name for name, its in progress.items() if not its.done]
            rests = dict(zip(going, self._api.each(self._look, going)))
            self._pass(rests, progress, check)
            if check or all(its.done for its in progress.values()) or time.monotonic() >= end:
                return {name: its.result() for name, its in progress.items()}
            pause = FIRST_POLL_SECONDS if len(self._evicted) > evicted else min(2 * pause, POLL_SECONDS)
            time.sleep(max(0.0, min(pause, end - time.monotonic())))

    def _look(self, node: str) -> Rest | str:
        """What is on a node; as text, why that cannot be told."""
        try:
            pods = self._api.items("/api/v1/pods", fieldSelector=f"spec.nodeName={node}")
        except ApiError as exc:
            return str(exc)
        rest = Rest()
        others: list[tuple[Object, objects.Owner]] = []
        operator_owns = any(objects.is_driver(pod) for pod in pods)
        for pod in pods:
            if objects.is_over(pod):
                continue
            owner = objects.owner_of(pod)
            use = objects.gpu_use(pod, self._known)
            if objects.is_driver(pod) or (operator_owns and objects.is_operand(pod)) or self._rules.ignores(pod, owner):
                use = None
            sure = use is not None and not use.startswith(objects.MAY_USE)
            if owner.kind == "DaemonSet":
                (rest.daemons if sure else rest.staying).append(pod)
            elif use and (sure or owner.kind != "StaticPod"):
                rest.pods.append((pod, owner))
            elif owner.kind != "StaticPod":
                others.append((pod, owner))
        tainted = not all(objects.pause_keys(pod, rest.staying) for pod in rest.daemons)
        if tainted and self._rules.taint and not operator_owns:
            rest.by_taint = True
            hit = [(pod, owner) for pod, owner in others if not objects.bears(pod, objects.OFF)]
            rest.bystanders = {pod["metadata"]["uid"] for pod, dummy in hit}
            rest.pods += hit
        return rest

    def _pass(self, rests: Mapping[str, Rest | str], progress: Mapping[str, Progress], check: bool) -> None:
        """One round over all nodes: judge, evict what is due at once, then take off DaemonSets where pods are gone."""
        due: list[tuple[str, Object]] = []
        for name, rest in rests.items():
            its = progress[name]
            its.waiting = []
            if isinstance(rest, str):
                its.failure, its.done = f"{name}: {rest}", True
                continue
            self._note_gone(its, rest)
            self._note_back(its, rest)
            failure = self._hindered(its, rest)
            if failure:
                its.failure, its.done = f"{name} cannot be emptied: {failure}", True
                its.waiting = [objects.pod_name(pod) for pod, dummy in rest.pods]
                continue
            due += [(name, pod) for pod in self._due(its, rest)]
        self._steer([pod for dummy, pod in due], check)
        said = self._api.each(lambda item: self._evict(item[1], check), due)
        for (name, pod), refusal in zip(due, said):
            self._took(progress[name], pod, refusal)
        for name, rest in rests.items():
            its = progress[name]
            if isinstance(rest, Rest) and not its.done:
                if check or not rest.pods:
                    self._take_off(name, its, rest, check)
                if rest.empty and not its.ends and not its.changed:
                    its.failure = self._unknown(name)
                its.done = check or rest.empty or bool(its.failure)

    def _unknown(self, node: str) -> str:
        """Why a node on which there is nothing is not known to be empty; nothing if it is."""
        try:
            self._api.get(object_path("v1", "nodes", node))
        except ApiError as exc:
            return f"{node}: {exc}"
        return ""

    def _note_gone(self, its: Progress, rest: Rest) -> None:
        there = {pod["metadata"]["uid"] for pod, dummy in rest.pods}
        for uid, workload in its.seen.items():
            if uid not in there and uid not in self._evicted:
                its.ends.setdefault(workload, End(workload, ENDED))
        its.seen = {pod["metadata"]["uid"]: objects.workload_name(pod, owner) for pod, owner in rest.pods}

    def _note_back(self, its: Progress, rest: Rest) -> None:
        pods = {pod["metadata"]["uid"]: objects.controller_of(pod) for pod, dummy in rest.pods}
        its.first = its.first or pods
        its.back |= {(whose, uid) for uid, whose in pods.items() if whose in its.emptied and uid not in its.first}

    def _goes(self, its: Progress, rest: Rest, pod: Object, workload: str) -> bool:
        """Whether it is to be evicted now: the plan says so, of it or of the one whose place it took, or time is up, or
        it only stands in the way of a taint."""
        fate = self._fates.get(workload)
        told = fate is not None and fate.fate in _GO
        uid = pod["metadata"]["uid"]
        told = told or (objects.controller_of(pod), uid) in its.back or uid in rest.bystanders
        return told or self._clock() >= self._deadline

    def _hindered(self, its: Progress, rest: Rest) -> str | None:
        """Why waiting longer is of no use, or None."""
        late = self._clock() >= self._deadline
        for pod, owner in rest.pods:
            name = objects.pod_name(pod)
            if "deletionTimestamp" in pod["metadata"]:
                if late and self._overdue(pod) > STOPPING_SECONDS:
                    return f"{self._stopping(pod)}; delete it by force once its processes are surely gone: " + (
                        f"kubectl -n {pod['metadata']['namespace']} delete pod {pod['metadata']['name']} --force"
                    )
                continue
            if not self._goes(its, rest, pod, objects.workload_name(pod, owner)):
                continue
            if self._returns(its, pod):
                return (
                    f"{name} comes back each time it is evicted: the template of {owner.kind}/{owner.name} tolerates a "
                    f"cordon, or names the node; mend that, or scale it down until the node is in service again"
                )
            reason = objects.hindrance(pod, owner, self._rules)
            if reason:
                return f"{name} {reason}"
            reason = self._budgets.forbids(pod)
            if reason:
                return f"{name}: {reason}"
            if late and pod["metadata"]["uid"] in self._withheld:
                return f"{name} could not be evicted in time: {self._refused[pod['metadata']['uid']]}"
        for pod in rest.daemons:
            if "deletionTimestamp" in pod["metadata"] or objects.pause_keys(pod, rest.staying):
                continue
            if not rest.by_taint or objects.bears(pod, objects.OFF):
                return (
                    f"{objects.pod_name(pod)} {objects.gpu_use(pod, self._known)} and belongs to a DaemonSet that "
                    f"cannot be taken off one node; give its template a node selector of its own, such as "
                    f"{objects.PREFIX}gpu-clients: 'true', and its nodes that label; or set taint_daemonsets, or "
                    "list it in ignore"
                )
        return None

    @staticmethod
    def _returns(its: Progress, pod: Object) -> bool:
        controller = objects.controller_of(pod)
        came = sum(whose == controller for whose, dummy in its.back)
        return came > RETURNS * sum(whose == controller for whose in its.first.values())

    def _due(self, its: Progress, rest: Rest) -> list[Object]:
        """The pods to evict now; what is waited for is noted."""
        now, due = time.monotonic(), []
        for pod, owner in rest.pods:
            uid, name = pod["metadata"]["uid"], objects.pod_name(pod)
            workload = objects.workload_name(pod, owner)
            if "deletionTimestamp" in pod["metadata"]:
                its.waiting.append(self._stopping(pod))
                its.ends.setdefault(workload, End(workload, EVICTED if objects.was_evicted(pod) else ENDED))
            elif not self._goes(its, rest, pod, workload):
                left = objects.remaining(pod, self._clock())
                its.waiting.append(
                    f"{name} may finish" + (f", in {left:.0f} s by its own account" if left is not None else "")
                )
            elif self._not_before.get(uid, now) <= now:
                due.append(pod)
            else:
                its.waiting.append(f"{name} may not go yet: {self._refused[uid]}")
        return due

    def _steer(self, pods: Sequence[Object], check: bool) -> None:
        targets = []
        for pod in pods:
            fate = self._fates.get(objects.workload_name(pod))
            if fate is not None and fate.fate in _GO and fate.to:
                targets.append((pod, fate.to, fate.fate == "move"))
        if targets and not check:
            self._unsteered.update(self._steering.steer(targets))

    def _evict(self, pod: Object, check: bool) -> str | None:
        """Evict a pod; None if that went well or it is gone, else what keeps it."""
        meta = pod["metadata"]
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": meta["name"], "namespace": meta["namespace"]},
            "deleteOptions": {"preconditions": {"uid": meta["uid"]}},
        }
        query: dict[str, Any] = {"dryRun": "All"} if check else {}
        path = name_path(pod, "v1", "pods", "eviction")
        answer = self._api.request("POST", path, body, final=(429, 500), **query)
        if answer.ok:
            self._evicted.add(meta["uid"])
            self._refused.pop(meta["uid"], None)
            return None
        if answer.status in (404, 409):  # gone, or another of that name: the next look shows
            return None
        if answer.lacks_right:
            raise ApiError("POST", path, answer)
        self._not_before[meta["uid"]] = time.monotonic() + (answer.retry_after or BUDGET_SECONDS)
        self._refused[meta["uid"]] = "; ".join(answer.causes) or answer.message
        if answer.causes or answer.status not in (429, 500):
            self._withheld.add(meta["uid"])
        return self._refused[meta["uid"]]

    def _took(self, its: Progress, pod: Object, refusal: str | None) -> None:
        name, workload = objects.pod_name(pod), objects.workload_name(pod)
        if refusal is None:
            its.changed = True
            controller = objects.controller_of(pod)
            its.emptied |= {controller} if controller else set()
            its.ends[workload] = End(workload, EVICTED, self._unsteered.get(pod["metadata"]["uid"], ""))
            its.waiting.append(f"{name} stops")
        else:
            its.waiting.append(f"{name} may not go yet: {refusal}")

    def _stopping(self, pod: Object) -> str:
        meta = pod["metadata"]
        finalizers = meta.get("finalizers") or ()
        held = f", held by finalizer {', '.join(finalizers)}" if finalizers else ""
        overdue = self._overdue(pod)
        late = f", {overdue:.0f} s past its grace period" if overdue > 1 else ""
        return f"{objects.pod_name(pod)} is being deleted{held}{late}"

    def _overdue(self, pod: Object) -> float:
        """Seconds since the end of its grace period."""
        ends = objects.moment(pod["metadata"]["deletionTimestamp"])
        return 0.0 if ends is None else self._clock() - ends

    def _take_off(self, node: str, its: Progress, rest: Rest, check: bool) -> None:
        """Have the DaemonSets that use a GPU leave this node, and remember how to bring them back."""
        staying = [pod for pod in rest.daemons if "deletionTimestamp" not in pod["metadata"]]
        its.waiting += [f"{objects.pod_name(pod)} is taken off the node" for pod in rest.daemons]
        keys = sorted({key for pod in staying for key in objects.pause_keys(pod, rest.staying)[:1]})

        def change(found: Object) -> dict[str, Any] | None:
            meta = found["metadata"]
            labels, annotations = objects.paused(meta.get("labels") or {}, meta.get("annotations") or {}, keys)
            wanted: dict[str, Any] = {}
            if labels != meta.get("labels"):
                wanted |= {"/metadata/labels": labels, "/metadata/annotations": annotations}
            taints = list(found["spec"].get("taints") or ())
            if rest.by_taint and objects.OFF not in taints:
                wanted["/spec/taints"] = [*taints, objects.OFF]
            its.changed = its.changed or bool(wanted)
            return wanted if wanted and not check else None

        if staying:
            try:
                change_node(self._api, node, change)
            except ApiError as exc:
                its.failure, its.done = f"{node}: {exc}", True
