# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An earlier plan held against the fleet as it is now: is its next batch still safe, and what has changed?

Private to this collection: may change in any release.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..account import named
from ..fleet import MOVE, WAIT, Node, Snapshot, uncollected
from .bins import Group, Use, together, use_limits
from .gate import GOOD, OUT_OF_SERVICE
from .model import Model, in_order, is_due, out_of_service, skip_reason
from .plan import CANARY, Batch, Plan, blocked_reason, finished, id_of, list_of, no_plan, prepare
from .policy import BadPolicy, Policy, count
from .schedule import BLOCKED, COLD, STAY, Hint, play


@dataclass(frozen=True)
class Review:
    """Whether an earlier plan's next batch is still safe, and what changed since. ``left_out`` are nodes of that batch
    that are not to be upgraded with it any more, each with the reason."""

    safe: bool
    next_batch: str | None
    reasons: tuple[str, ...]
    changes: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "safe": self.safe,
            "next_batch": self.next_batch,
            "reasons": list(self.reasons),
            "changes": list(self.changes),
            "left_out": [{"node": node, "reason": reason} for node, reason in self.left_out],
        }


class _Planned(NamedTuple):
    """A batch of an earlier plan; of each of its workloads the name, the fate and where it goes."""

    name: str
    nodes: list[str]
    fates: list[tuple[str, str, list[str]]]


@uncollected()
def review(
    earlier: Mapping[str, Any], snapshot: Snapshot, policy: Policy, outcomes: Mapping[str, str] | None = None
) -> tuple[Plan, Review]:
    """Play what is left of an earlier plan (its JSON form) on a fresh snapshot, in the earlier order.

    The next batch is safe if every workload on it still has a fate and none loses its place to move to. A node that is
    no longer fit for its turn is left out of the batch, unless that leaves no canary, or splits a domain that is kept
    together. Nodes that appeared since are not added: a new plan would.

    :param outcomes: of each node whose turn has come, as :func:`.gate.decide` takes them.
    :raises BadPolicy: if the earlier plan is for another version or is no plan.
    """
    listed = _batches_of(earlier, policy.version)
    over = outcomes or {}
    for name, outcome in over.items():
        if not isinstance(outcome, str):
            raise BadPolicy(f"outcomes.{name} is {outcome!r}, not the name of an outcome")
    model = _as_it_is(earlier, snapshot, policy, over)
    moving = {model.nodes[index].name: index for index in model.moving}
    changes: list[str] = []
    reasons: list[str] = []
    batches: list[list[int]] = []
    names: list[str] = []
    upcoming: str | None = None
    left_out: dict[str, str] = {}
    for batch in listed:
        here = [moving[name] for name in batch.nodes if name in moving]
        gone = _gone(model, [name for name in batch.nodes if name not in moving and name not in over])
        changes.extend(f"{name} {_out(why)}" for name, why in gone.items())
        if upcoming is None and (here or gone):
            upcoming, left_out = batch.name, gone
            reasons.extend(_needed(model, batch.name, here, gone))
        if here:
            batches.append(here)
            names.append(batch.name)
    planned = {name for batch in listed for name in batch.nodes}
    changes.extend(f"{name} is new and not part of the plan" for name in moving if name not in planned)
    model.moving = [index for batch in batches for index in batch]
    if batches and names[0] == upcoming:
        reasons.extend(_too_many_down(model, batches[0], over, len(planned)))
        differs, unsafe = _exceeds(model, batches[0])
        changes.extend(differs)
        reasons.extend(unsafe)
    before: dict[str, tuple[str, Sequence[str]]] = {}
    for batch in listed:
        if any(name in moving for name in batch.nodes):
            for workload, fate, to in batch.fates:
                before.setdefault(workload, (fate, to))
    # what was to end before its node's turn is waited for, if that turn comes sooner than was planned
    told = ((workload, WAIT if fate == STAY else fate, to) for workload, (fate, to) in before.items())
    hints = hints_of(model, told)
    plan = _renamed(finished(model, policy, batches, play(model, batches, hints=hints), False, {}), names)
    for batch_now in plan.batches:
        differs, unsafe = _compared(model, batch_now, before)
        changes.extend(differs)
        reasons.extend(unsafe if batch_now.name == upcoming else ())
    return plan, Review(not reasons, upcoming, tuple(reasons), tuple(changes), tuple(left_out.items()))


def _as_it_is(earlier: Mapping[str, Any], snapshot: Snapshot, policy: Policy, outcomes: Mapping[str, str]) -> Model:
    """The fleet now: nodes after their turn are as it has left them, and those that the plan leaves out still are."""
    nodes = tuple(
        _after(node, outcomes[node.name], policy) if node.name in outcomes else node for node in snapshot.nodes
    )
    stuck = _blocked_in(earlier)
    stay = {node.name: "cannot be emptied" for node in nodes if node.name in stuck and node.name not in outcomes}
    return prepare(in_order(replace(snapshot, nodes=nodes)), replace(policy, canary=0, reserve=()), stay)


_LEFT = "has left the fleet"


def _gone(model: Model, names: Iterable[str]) -> dict[str, str]:
    """Nodes that have a turn to come and are not to be upgraded any more, each with the reason."""
    upgraded = f"already on {model.policy.version}"
    found = {}
    for name in names:
        why = skip_reason(model.nodes[model.number[name]], model.policy) if name in model.number else _LEFT
        if why and why != upgraded:
            found[name] = why
    return found


def _out(why: str) -> str:
    return why if why == _LEFT else f"is left out now: {why}"


def _needed(model: Model, batch: str, here: Sequence[int], gone: Mapping[str, str]) -> list[str]:
    """Why the rest of a batch cannot go on without those that are gone."""
    rest = [model.nodes[index] for index in here]
    found = []
    for name, why in gone.items():
        text = f"{name} {_out(why)}"
        node = model.nodes[model.number[name]] if name in model.number else None
        gpu_model = node.gpu_model if node else None
        if batch == CANARY and not any(gpu_model in (None, each.gpu_model) for each in rest):
            found.append(f"{text}, and no canary is left{f' of {gpu_model}' if gpu_model else ''}")
        for kind in model.policy.keep_together:
            domain = node.domains.get(kind) if node else None
            others = [each.name for each in rest if domain and each.domains.get(kind) == domain]
            if others:
                found.append(f"{text}, and {kind} {domain} is upgraded as a whole: {named(others)} with it")
    return found


def _compared(model: Model, batch: Batch, before: dict[str, tuple[str, Sequence[str]]]) -> tuple[list[str], list[str]]:
    """What differs for the workloads of a batch, and what of that is not safe; ``before`` notes what was seen."""
    changes: list[str] = []
    unsafe: list[str] = []
    for now in batch.fates:
        old = before.get(now.workload, (None, ()))[0]
        if now.fate == BLOCKED:
            item = next(i for i in model.items if i.name == now.workload)
            text = f"{now.workload} cannot be taken off {', '.join(now.nodes)}"
            changes.append(text)
            unsafe.append(f"{text}: {now.reason or blocked_reason(model, item)}")
        elif old == _SEEN or now.fate == STAY:
            pass
        elif old is None:
            changes.append(f"{now.workload} is new on {', '.join(now.nodes)} and would {_verb(now.fate)}")
        elif now.fate != old:
            text = f"{now.workload} was to {_verb(old)} and would now {_verb(now.fate)}"
            changes.append(text)
            if old == MOVE:
                unsafe.append(f"{now.workload} has lost its place to move to")
            elif now.fate == COLD:
                unsafe.append(text)
        before[now.workload] = (_SEEN, ())
    return changes, unsafe


_SEEN = "seen"


def _batches_of(earlier: Mapping[str, Any], version: str) -> list[_Planned]:
    """:raises BadPolicy: with the path of the field that does not fit, or if the plan is for another version."""
    if earlier.get("version") != version:
        raise BadPolicy(f"the earlier plan is for {earlier.get('version')!r}, not for {version}: plan anew")

    found: list[_Planned] = []
    seen: set[str] = set()
    for number, batch in enumerate(list_of(Mapping, earlier.get("batches"), "batches")):
        here = f"batches[{number}]"
        nodes = list_of(str, batch.get("nodes"), f"{here}.nodes")
        if len(set(nodes)) < len(nodes) or not seen.isdisjoint(nodes):
            raise no_plan(f"{here}.nodes", "names a node a second time")
        seen.update(nodes)
        fates = []
        for place, entry in enumerate(list_of(Mapping, batch.get("workloads", []), f"{here}.workloads")):
            path = f"{here}.workloads[{place}]"
            workload, fate = entry.get("workload"), entry.get("fate")
            if not isinstance(workload, str) or not isinstance(fate, str):
                raise no_plan(path, "lacks workload or fate")
            fates.append((workload, fate, list_of(str, entry.get("to") or [], f"{path}.to")))
        fates.extend((name, STAY, []) for name in list_of(str, batch.get("undisturbed", []), f"{here}.undisturbed"))
        found.append(_Planned(str(batch.get("name", number + 1)), nodes, fates))
    canary = list_of(str, earlier.get("canary", []), "canary")
    if "id" in earlier and earlier["id"] != id_of(version, canary, [(batch.nodes, batch.fates) for batch in found]):
        raise no_plan("id", "does not stand for its batches")
    return found


def _blocked_in(earlier: Mapping[str, Any]) -> set[str]:
    """Nodes that an earlier plan leaves on their driver, as their work has nowhere to go: other work may go there."""
    return {str(entry.get("node")) for entry in list_of(Mapping, earlier.get("blocked", []), "blocked")}


def _too_many_down(model: Model, batch: Sequence[int], outcomes: Mapping[str, str], planned: int) -> list[str]:
    policy = model.policy
    if policy.max_unavailable is None:
        return []
    next_down = {model.nodes[index].name for index in batch}
    out = [
        node.name
        for node in model.nodes
        if node.name not in next_down and (out_of_service(node) or outcomes.get(node.name) in OUT_OF_SERVICE)
    ]
    most = count(policy.max_unavailable, planned, "max_unavailable")
    more = sum(not is_due(model.nodes[index]) for index in batch)
    if not more or len(out) + more <= most:
        return []
    already = f"{len(out)} are ({named(out)}) and " if out else ""
    return [f"max_unavailable allows {most} nodes out of service, {already}the next batch has {len(batch)}"]


def _exceeds(model: Model, batch: Sequence[int]) -> tuple[list[str], list[str]]:
    """Which limits the next batch goes beyond by now: of budgets and domains, which are kept to one after another
    or were looked at when the plan was made, and of queued work, which would lack its GPUs."""
    limits = use_limits(model)
    used: Counter[Use] = Counter()
    for group in (Group(model, nodes, limits) for nodes in together(model, batch)):
        used.update(group.uses)
    changes, reasons = [], []
    for (kind, name), amount in used.items():
        most = limits[kind, name]
        if kind == "gpus" and amount > most:
            reasons.append(
                f"max_pending lets {max(0.0, most):g} GPUs of {name} be down and the next batch has {amount}"
            )
        elif kind == "budget" and amount > most:
            changes.append(f"budget {name} allows {most:g} at a time and {amount} workloads of the next batch share it")
    return changes, reasons


def _after(node: Node, outcome: str, policy: Policy) -> Node:
    """A node after its turn."""
    if outcome in GOOD:
        return replace(node, loaded=policy.version, installed=policy.version, skip=None, unfinished=False)
    return replace(node, skip=f"{outcome.replace('_', ' ')} in this run", unfinished=False)


def hints_of(model: Model, fates: Iterable[tuple[str, str, Sequence[str]]]) -> dict[int, Hint]:
    """Hints that repeat the moves and waits of a plan: of each, the workload, the fate and the nodes it goes to."""
    by_name = {item.name: index for index, item in enumerate(model.items)}
    hints: dict[int, Hint] = {}
    for workload, fate, to in fates:
        index = by_name.get(workload)
        if index is None:
            continue
        if fate == MOVE and all(name in model.number for name in to):
            hints[index] = tuple(model.number[name] for name in to)
        elif fate == WAIT:
            hints.setdefault(index, WAIT)
    return hints


def _renamed(plan: Plan, names: Sequence[str]) -> Plan:
    batches = tuple(replace(batch, name=name) for batch, name in zip(plan.batches, names))
    return replace(plan, batches=batches, canary=batches[0].nodes if names and names[0] == CANARY else ())


def _verb(fate: str) -> str:
    return {"cold_start": "start cold", BLOCKED: "be stuck", WAIT: "be waited for", STAY: "end before"}.get(fate, fate)
