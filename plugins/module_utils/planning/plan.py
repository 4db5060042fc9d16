# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan: which nodes are upgraded, in which groups and order, and what happens to every workload on them.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

from ..account import named
from ..fleet import MOVE, PROTECT, RESTART, WAIT, Snapshot, uncollected
from ..version import DriverVersion, find
from .model import Item, Model, in_order, joined, same_version, skip_reason, without
from .order import Arrangement, arrange, extended, spare
from .placement import Rooms
from .policy import KEPT_TOGETHER, BadPolicy, Policy
from .schedule import BLOCKED, COLD, STAY, Fate, Played

_FORESEEN = 12
"""Hours beyond which a snapshot of what runs says little."""

CANARY = "canary"
"""Name of the first batch, if it is one."""


class WorkloadFate(NamedTuple):
    """What happens to a workload in a batch; ``to`` names the nodes it moves to or starts on. Losses in GPU-seconds."""

    workload: str
    fate: str
    nodes: tuple[str, ...]
    to: tuple[str, ...]
    lost: float
    reason: str


@dataclass(frozen=True)
class Batch:
    """Nodes upgraded at the same time. ``starts`` and ``ends`` are in seconds from the plan's start, ``wait`` is how
    long it waits in between for work to end."""

    name: str
    nodes: tuple[str, ...]
    starts: float = 0.0
    wait: float = 0.0
    ends: float = 0.0
    fates: tuple[WorkloadFate, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Ordered batches. ``skipped`` and ``blocked`` hold names of nodes left out, and why; those in ``blocked`` are out
    because their work may not be disturbed or has nowhere to go. ``lost`` is in GPU-seconds by cause."""

    version: str
    batches: tuple[Batch, ...]
    skipped: tuple[tuple[str, str], ...]
    canary: tuple[str, ...] = ()
    blocked: tuple[tuple[str, str], ...] = ()
    lost: Mapping[str, float] | None = None
    finish: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def order(self) -> tuple[str, ...]:
        return tuple(name for batch in self.batches for name in batch.nodes)

    @property
    def total_lost(self) -> float:
        return sum((self.lost or {}).values())

    @property
    def impossible(self) -> bool:
        """Whether nodes want the upgrade and none of them can get it."""
        return bool(self.blocked) and not self.batches

    @cached_property
    def id(self) -> str:
        """Of :func:`id_of`: two plans with one id do the same to nodes and work."""
        fates = [[(fate.workload, fate.fate, fate.to) for fate in batch.fates] for batch in self.batches]
        return id_of(self.version, self.canary, zip([batch.nodes for batch in self.batches], fates))

    def as_dict(self) -> dict[str, Any]:
        """The JSON form. Of workloads that end before their node's turn only the names are given."""
        return {
            "id": self.id,
            "version": self.version,
            "batches": [_batch_dict(batch) for batch in self.batches],
            "serial": [len(batch.nodes) for batch in self.batches],
            "order": list(self.order),
            "skipped": [{"node": node, "reason": reason} for node, reason in (*self.skipped, *self.blocked)],
            "blocked": [{"node": node, "reason": reason} for node, reason in self.blocked],
            "canary": list(self.canary),
            "lost_gpu_hours": {cause: round(value / 3600, 3) for cause, value in sorted((self.lost or {}).items())},
            "finish_seconds": round(self.finish),
            "notes": list(self.notes),
        }


def id_of(
    version: str,
    canary: Sequence[str],
    batches: Iterable[tuple[Sequence[str], Iterable[tuple[str, str, Sequence[str]]]]],
) -> str:
    """The first twelve digits of the SHA-256 of a plan: the canary, and of each batch the nodes, and what is moved or
    started cold, and where. What ends by itself, waited for or not, is not disturbed, and may do so sooner."""
    done = [
        [list(nodes), sorted([workload, fate, list(to)] for workload, fate, to in fates if fate in (MOVE, COLD))]
        for nodes, fates in batches
    ]
    text = json.dumps([version, list(canary), done], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _batch_dict(batch: Batch) -> dict[str, Any]:
    return {
        "name": batch.name,
        "nodes": list(batch.nodes),
        "starts_seconds": round(batch.starts),
        "wait_seconds": round(batch.wait),
        "ends_seconds": round(batch.ends),
        "undisturbed": [fate.workload for fate in batch.fates if fate.fate == STAY],
        "workloads": [
            {
                "workload": fate.workload,
                "fate": fate.fate,
                "nodes": list(fate.nodes),
                "to": list(fate.to),
                "lost_gpu_hours": round(fate.lost / 3600, 3),
                "reason": fate.reason,
            }
            for fate in batch.fates
            if fate.fate != STAY
        ],
    }


@uncollected()
def make(snapshot: Snapshot, policy: Policy) -> Plan:
    """The plan for a fleet; the same snapshot, in whichever order, and policy give the same plan.

    Nodes whose work may not be disturbed, or has nowhere to go, are left out with the reason and planned around.

    :raises BadPolicy: if the policy contradicts itself or the fleet.
    """
    snapshot = in_order(snapshot)
    best = _arranged(snapshot, policy, frozenset())
    if _loss(best)[:2] > (0, 0.0):
        best = _with_less(snapshot, policy, best)
    made = best.arrangement
    return finished(best.model, policy, made.batches, made.played, made.has_canary, best.blocked)


class _Found(NamedTuple):
    model: Model
    arrangement: Arrangement
    blocked: Mapping[str, str]


def _loss(found: _Found) -> tuple[int, float, float]:
    played = found.arrangement.played
    return len(found.blocked), round(played.lost, 6), played.finish


def _with_less(snapshot: Snapshot, policy: Policy, whole: _Found) -> _Found:
    """The best of ``whole``, found with all nodes, and what is found without empty ones and then with them again: never
    a node left out that would not be without one of them, and otherwise no greater loss."""
    best: _Found | None = None
    for absent in reversed(spare(whole.model)):
        try:
            found = _arranged(snapshot, policy, absent) if absent else whole
        except BadPolicy:
            continue
        if best is not None:
            model = prepare(snapshot, policy, best.blocked)
            more = extended(model, best.arrangement, absent)
            if more is not None:
                kept = _Found(model, more, best.blocked)
                found = min(found, kept, key=_loss) if found.blocked.keys() <= best.blocked.keys() else kept
        best = found
    return best or whole


def _arranged(snapshot: Snapshot, policy: Policy, absent: frozenset[int]) -> _Found:
    """The best arrangement as if ``absent`` nodes did not exist, with what cannot be emptied planned around.

    What has no way out whatever the order is left out first. Of the other nodes half are left out at a time, those with
    most free room first: as they keep their driver, work of the rest may move there.
    """
    blocked = _mates(snapshot, policy, {})
    while True:
        model = prepare(snapshot, policy, blocked)
        made = arrange(model, absent)
        stuck: dict[int, Fate] = {}
        for fate in made.played.blocked:
            home = model.items[fate.item].nodes
            here = set(home).intersection(made.batches[fate.batch])
            stuck.update(dict.fromkeys(here or home, fate))  # it may have moved before, in vain
        if not stuck:
            return _Found(model, made, blocked)
        hopeless = [node for node, fate in stuck.items() if not (model.items[fate.item].kind.movable or fate.reason)]
        if not hopeless:
            named = () if isinstance(policy.canary, int) else policy.canary
            ranked = sorted(
                stuck,
                key=lambda node: (
                    model.nodes[node].name in named,
                    -model.nodes[node].free.get("gpu", 0),
                    node,
                ),
            )
            hopeless = ranked[: (len(ranked) + 1) // 2]
        blocked.update(
            {
                model.nodes[node].name: stuck[node].reason or blocked_reason(model, model.items[stuck[node].item])
                for node in hopeless
            }
        )
        blocked.update(_mates(snapshot, policy, blocked))


def _mates(snapshot: Snapshot, policy: Policy, blocked: Mapping[str, str]) -> dict[str, str]:
    """Nodes that are kept together with one that keeps its driver, with the reason: their domain would be split.

    Not if it is split already, as one of them has the version, or was left half way to it.
    """
    found: dict[str, str] = {}
    if not policy.keep_together:
        return found
    for numbers in joined(snapshot.nodes, policy.keep_together, range(len(snapshot.nodes))):
        domain = [snapshot.nodes[number] for number in numbers if len(numbers) > 1 and snapshot.nodes[number].gpus]
        if any(same_version(node.loaded, policy.version) or node.unfinished for node in domain):
            continue
        why = {node.name: blocked.get(node.name) or skip_reason(node, policy) for node in domain}
        left = next((name for name, reason in why.items() if reason), None)
        if left is not None:
            kinds = [kind for kind in policy.keep_together if any(kind in node.domains for node in domain)]
            text = (
                f"is upgraded together with {left} ({' and '.join(kinds)}), which is left out: {why[left]}; leave "
                f"{' and '.join(kinds)} out of keep_together to let it be split"
            )
            found.update({name: text for name, reason in why.items() if not reason})
    return found


def prepare(snapshot: Snapshot, policy: Policy, blocked: Mapping[str, str] | None = None) -> Model:
    """The model of a fleet without the nodes that are left out.

    :raises BadPolicy: if a canary or a node of the reserve is not among those to upgrade.
    """
    skipped = {node.name: reason for node in snapshot.nodes if (reason := skip_reason(node, policy))}
    canary = () if isinstance(policy.canary, int) else policy.canary
    known = {node.name for node in snapshot.nodes}
    done = {node.name for node in snapshot.nodes if same_version(node.loaded, policy.version)}
    for what, names in (("canary", canary), ("reserve", policy.reserve)):
        for name in names:
            if name not in known:
                raise BadPolicy(f"{what} {name} is not a node of this fleet")
            if name in skipped and name not in done:
                raise BadPolicy(f"{what} {name} is left out of this upgrade: {skipped[name]}")
    for name in canary:
        if name in policy.reserve:
            raise BadPolicy(f"{name} is both a canary, to be upgraded first, and of the reserve, to be upgraded last")
        if blocked and name in blocked:
            raise BadPolicy(f"canary {name} cannot be emptied: {blocked[name]}; or choose another")
    if blocked:
        snapshot = without(snapshot, dict(blocked))
        skipped.update(blocked)
    return Model(snapshot, policy, skipped)


def finished(
    model: Model,
    policy: Policy,
    batches: Sequence[Sequence[int]],
    played: Played,
    has_canary: bool,
    blocked: Mapping[str, str],
) -> Plan:
    made = described(model, batches, played, has_canary)
    skipped = tuple(
        (node.name, reason)
        for node in model.nodes
        if node.name not in blocked and (reason := skip_reason(node, policy))
    )
    causes = {"moves": 0.0, "cold_starts": 0.0, "idle": played.idle}
    for fate in played.fates:
        if fate.what != BLOCKED:
            causes["moves" if fate.what == MOVE else "cold_starts"] += fate.lost
    cold = Counter([model.items[fate.item].name for fate in played.fates if fate.what == COLD])
    return Plan(
        version=policy.version,
        batches=made,
        skipped=skipped,
        canary=made[0].nodes if has_canary and made else (),
        blocked=tuple((node.name, blocked[node.name]) for node in model.nodes if node.name in blocked),
        lost=causes,
        finish=played.finish,
        notes=(*_odd(model, policy), *_warnings(model, made, has_canary, cold), *_notes(model, made, blocked, cold)),
    )


def described(model: Model, batches: Sequence[Sequence[int]], played: Played, has_canary: bool) -> tuple[Batch, ...]:
    """Batches by name, each with the fates of its workloads."""
    fates: list[list[WorkloadFate]] = [[] for dummy in batches]
    nodes = model.nodes
    names = _Names(node.name for node in nodes)
    turn = {node: number for number, batch in enumerate(batches) for node in batch}
    for fate in played.fates:
        item = model.items[fate.item]
        fates[fate.batch].append(
            WorkloadFate(
                item.name,
                fate.what,
                names[item.nodes],
                names[fate.to],
                fate.lost,
                fate.reason or (_move_reason(model, fate, turn) if fate.what == MOVE else ""),
            )
        )
    out = []
    for number, batch in enumerate(batches):
        name = CANARY if has_canary and number == 0 else f"batch {number + (not has_canary)}"
        out.append(
            Batch(
                name,
                tuple(nodes[n].name for n in batch),
                played.starts[number],
                played.waits[number],
                played.ends[number],
                tuple(fates[number]),
            )
        )
    return tuple(out)


class _Names(dict[tuple[int, ...], tuple[str, ...]]):
    """Names of nodes by their numbers; equal ones are one object."""

    def __init__(self, of: Iterable[str]) -> None:
        super().__init__()
        self._of = tuple(of)

    def __missing__(self, numbers: tuple[int, ...]) -> tuple[str, ...]:
        found = self[numbers] = tuple([self._of[number] for number in numbers])
        return found


def _move_reason(model: Model, fate: Fate, turn: Mapping[int, int]) -> str:
    """``turn`` is the number of each node's batch."""
    item, nodes = model.items[fate.item], model.nodes
    old = {nodes[node].loaded for node in (*item.nodes, *fate.to)}
    upgraded = any(turn.get(node, fate.batch) < fate.batch for node in fate.to)
    other = upgraded or len(old) > 1
    return f"pauses {item.pause:.0f} s, {'its own save goes on with another driver' if other else 'same driver'} there"


def _odd(model: Model, policy: Policy) -> list[str]:
    """What may be a typing error: names in the policy that nothing in the fleet has, and an older driver."""
    kinds = {kind for node in model.nodes for kind in node.domains}
    models = {node.gpu_model for node in model.nodes}
    named_by = (
        ("keep_together", set(policy.keep_together) - set(KEPT_TOGETHER), kinds, "domain of the kind"),
        ("max_per_domain", {kind for kind, dummy in policy.max_per_domain}, kinds, "domain of the kind"),
        ("max_pending", {name for name, dummy in policy.max_pending}, models, "GPU model"),
        ("gpu_models", set(policy.gpu_models), models, "GPU model"),
        ("unsupported_gpu_models", set(policy.unsupported), models, "GPU model"),
    )
    notes = [
        f"{option} names the {what} {name}, which no node has"
        for option, names, known, what in named_by
        for name in sorted(names - known)
    ]
    target = DriverVersion.parse(policy.version)
    moving = [model.nodes[number] for number in model.moving]
    loaded = {version for version in {node.loaded for node in moving} if (find(version or "") or target) > target}
    newer = [node for node in moving if node.loaded in loaded]
    if newer:
        notes.append(f"{len(newer)} of the nodes go back to an older driver, {newer[0].name} from {newer[0].loaded}")
    return notes


def _warnings(model: Model, batches: Sequence[Batch], has_canary: bool, cold: Mapping[str, int]) -> list[str]:
    """What may not be as it was meant. ``cold`` is how often each workload starts cold."""
    policy, nodes = model.policy, model.nodes
    warnings: list[str] = []
    if batches and isinstance(policy.canary, int):
        have = Counter(str(nodes[model.number[name]].gpu_model) for name in batches[0].nodes if has_canary)
        wanting = Counter(str(nodes[model.number[name]].gpu_model) for batch in batches for name in batch.nodes)
        warnings.extend(
            f"{have[name] or 'no'} canary of {name} and not {min(policy.canary, number)}: one node more there would "
            "exceed max_unavailable, max_per_domain, max_pending or a budget, or all others are in the reserve"
            for name, number in sorted(wanting.items())
            if have[name] < min(policy.canary, number)
        )
    hours = batches[-1].starts / 3600 if batches else 0.0
    if policy.windows and hours > _FORESEEN:
        warnings.append(
            f"the last batch starts in {hours:.0f} h, and what runs by then is not known: plan again before each window"
        )
    warnings.extend(_beyond_budgets(model, batches))
    warnings.extend(
        f"{name} starts cold {times} times, as its nodes are in different batches: a larger batch_size may help"
        for name, times in cold.items()
        if times > 1
    )
    return warnings


def _beyond_budgets(model: Model, batches: Sequence[Batch]) -> list[str]:
    """Budgets that one node or one domain exceeds by itself."""
    budgets = model.snapshot.budgets
    of_item = {item.name: item.kind.budgets for item in model.items if item.kind.budgets} if budgets else {}
    found = []
    for batch in batches if of_item else ():
        disturbed = Counter(name for f in batch.fates if f.fate in (MOVE, COLD) for name in of_item.get(f.workload, ()))
        found += [
            f"budget {name} allows {budgets[name]} at a time and {batch.name} disturbs {number}: one after another"
            for name, number in disturbed.items()
            if number > budgets[name]
        ]
    return found


def _notes(model: Model, batches: Sequence[Batch], blocked: Mapping[str, str], cold: Mapping[str, int]) -> list[str]:
    notes = []
    if batches:
        must = [f for f in batches[0].fates if f.fate in (WAIT, MOVE)]
        for fate in must[:5]:
            way = f"move to {', '.join(fate.to)}" if fate.fate == MOVE else f"end ({fate.reason})"
            notes.append(f"to empty the first batch, {fate.workload} must {way}")
        if len(must) > 5:
            notes.append(f"and so must {len(must) - 5} more: see the plan's JSON")
    finish = batches[-1].ends if batches else 0.0
    started = [item for item in model.items if item.name in cold]
    again = [item for item in started if item.kind.saves_itself]
    saved = [item for item in started if item.kind.movable and not item.kind.saves_itself]
    lasting = [item for item in saved if item.end > finish]
    if lasting:
        notes.append(
            f"{_counted(lasting)} could be saved but, lasting longer than the upgrade, {_start(lasting)} cold: only "
            f"nodes left on the old driver that fit could keep the work: {_named(lasting)}"
        )
    if len(saved) > len(lasting):
        others = [item for item in saved if item.end <= finish]
        longer = ", or a longer max_wait," if any(item.kind.waitable for item in others) else ""
        notes.append(
            f"{_counted(others)} could be saved but {_start(others)} cold, for want of old-driver room or as that "
            f"loses less; more free GPUs there{longer} may save the work: {_named(others)}"
        )
    if again:
        notes.append(f"{_counted(again)} {_start(again)} again from what the work saves itself: {_named(again)}")
    if len(started) > len(saved) + len(again):
        others = [item for item in started if not item.kind.movable]
        notes.append(f"{_counted(others)} {_start(others)} cold as nothing could save the work: {_named(others)}")
    if blocked:
        notes.append(f"{len(blocked)} node{'s keep their' if len(blocked) > 1 else ' keeps its'} driver")
    return notes


def _named(items: Sequence[Item]) -> str:
    return named([item.name for item in items])


def _start(items: Sequence[Item]) -> str:
    return "start" if len(items) > 1 else "starts"


def _counted(items: Sequence[Item]) -> str:
    return f"{len(items)} workload{'s' * (len(items) > 1)} ({round(sum(item.gpus for item in items), 1):g} GPUs)"


def blocked_reason(model: Model, item: Item) -> str:
    """Why an item cannot be taken off its nodes, and what would help."""
    may = item.workload.may
    ends = "has no known end" if item.end == inf else f"ends in {item.end / 3600:.1f} h"
    if model.policy.max_wait < item.end < inf:
        ends += f", beyond the longest wait of {model.policy.max_wait / 3600:.1f} h"
    elif item.end < inf:
        ends += ", longer than any window lets a batch wait" if item.kind.waitable else ", may not be waited for"
    if PROTECT in may or not may:
        return f"{item.name} is protected and {ends}: let it end, or let it move or restart"
    if MOVE not in may and RESTART not in may:
        return f"{item.name} may only be waited for and {ends}: raise max_wait, or let it move or restart"
    if item.kind.frozen_by:
        return (
            f"budget {item.kind.frozen_by} allows no disruption of {item.name}, which {ends}: raise the budget or wait"
        )
    if MOVE in may and not item.workload.backends:
        return f"{item.name} may move but no backend could save it, and it {ends}: let it restart, or enable a backend"
    return (
        f"{item.name} may not restart, {ends}, and cannot move: {'; '.join(refused(model, item)[:3])}: "
        "leave room for it on the old driver until it ends, or let it restart"
    )


def refused(model: Model, item: Item) -> list[str]:
    """Why no other old-driver node takes an item now, the most frequent reason first."""
    longer = item.workload.capture - model.snapshot.durations.evacuate
    if longer > 0 and model.policy.fits(0.0, model.expected + longer) is None:
        return [f"saving it takes {item.workload.capture / 60:.0f} minutes, and no maintenance window is long enough"]
    position = [0] * len(model.nodes)
    rooms = Rooms(model.nodes, model.free, model.classes, position)
    rooms.open(n for n in (*model.kept, *model.moving) if n not in item.nodes and model.nodes[n].schedulable)
    if rooms.place(item.needs, item.kind.restorable, (0,), together=item.kind.together):
        return ["the node it would move to has its own turn later"]
    found = rooms.refusals(item.needs, item.kind.shape, {0}, restore=True)
    return found or ["no other node has the old driver"]


def list_of(kind: Any, value: Any, path: str) -> list[Any]:
    """A list of ``kind`` in the JSON form of a plan.

    :raises BadPolicy: with its path if it is none.
    """
    if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
        raise no_plan(path, f"is not a list of {'names' if kind is str else 'objects'}")
    return value


def no_plan(path: str, what: str) -> BadPolicy:
    return BadPolicy(f"the earlier plan's {path} {what}: give what upgrade_plan returned as plan")


@dataclass(frozen=True)
class Placement:
    """Where one workload could go: ``to`` is empty if nowhere, and ``refused`` says why."""

    workload: str
    to: tuple[str, ...]
    refused: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return {"workload": self.workload, "to": list(self.to), "refused": list(self.refused)}


def place(
    snapshot: Snapshot,
    policy: Policy,
    workloads: Sequence[str],
    *,
    restore: bool,
    avoid: Sequence[str] = (),
    plan: Mapping[str, Any] | None = None,
) -> list[Placement]:
    """Places for the named workloads on other nodes, found one after another by priority and size.

    :param restore: from a checkpoint, so that the compatibility key must agree; else from nothing.
    :param plan: an earlier plan in its JSON form; nodes later in its order are preferred, those left out of it most.
        Nothing is restored on a node whose turn in it is still to come and no later than that of the workload's own,
        nor on one that an interrupted upgrade left half way.
    :raises BadPolicy: if a workload or a node to avoid does not exist, or the plan is for another version.
    """
    if plan and plan.get("version", policy.version) != policy.version:
        raise BadPolicy(f"the plan is for {plan['version']!r}, not for {policy.version}")
    model = prepare(in_order(snapshot), replace(policy, canary=0, reserve=()))
    order = {name: place for place, name in enumerate(list_of(str, (plan or {}).get("order", []), "order"))}
    upgraded = frozenset(model.upgraded)
    position = [
        len(order) if number in upgraded else order.get(node.name, len(order))
        for number, node in enumerate(model.nodes)
    ]
    rooms = Rooms(model.nodes, model.free, model.classes, position)
    for name in avoid:
        if name not in model.number:
            raise BadPolicy(f"avoid names {name}, which is not a node of this fleet")
    rooms.open(
        index
        for index, node in enumerate(model.nodes)
        if node.schedulable and not node.cordoned_by and node.name not in avoid and not (restore and node.unfinished)
    )
    wanted = set(workloads)
    items = [index for index, item in enumerate(model.items) if item.workload.name in wanted]
    missing = wanted - {model.items[index].workload.name for index in items}
    if missing:
        known = {workload.name for workload in snapshot.workloads}
        name = sorted(missing)[0]
        raise BadPolicy(
            f"{name} {'has no members, so nothing to place' if name in known else 'is not a workload of this snapshot'}"
        )
    found: dict[int, Placement] = {}
    for index in sorted(items, key=model.rank.__getitem__):
        item = model.items[index]
        turn = (
            min((position[node] for node in item.nodes if model.nodes[node].name in order), default=-1)
            if restore
            else -1
        )
        positions = sorted({each for each in position if each > turn}, reverse=True)
        hidden = rooms.hide(item.nodes)
        to = rooms.place(
            item.needs,
            item.kind.restorable if restore else item.kind.startable,
            positions,
            together=item.kind.together,
            spread=item.kind.spread,
        )
        refused = () if to else tuple(rooms.refusals(item.needs, item.kind.shape, set(positions), restore=restore))
        found[index] = Placement(item.name, tuple(model.nodes[n].name for n in to or ()), refused)
        rooms.open(hidden)
    return [found[index] for index in items]
