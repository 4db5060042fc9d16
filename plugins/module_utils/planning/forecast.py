# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A plan played in virtual time, beside what other ways of upgrading would have cost the same fleet.

Ends of jobs, swaps and failures vary from run to run around what the snapshot says, with a fixed sequence of random
numbers: the same input gives the same forecast. The peers are played event by event:

``operator``        nodes in list order, some at a time, work evicted without saving (the GPU Operator's upgrade)
``drain_and_wait``  nodes in list order, some at a time, cordoned until empty, evicted after a deadline
``all_at_once``     every node at the same time, work evicted without saving

They keep together what the policy keeps together: the nodes of a domain are swapped when the last of them is empty.
They know of no maintenance windows.

Lost, in GPU-hours, by cause: ``moves`` (paused while saved and restored), ``cold_starts`` (progress and start-up),
``no_room`` (evicted and waiting for a node), ``idle`` (cordoned GPUs without work; a quarter if nobody queues).
If the snapshot says how long queued work runs, it takes the GPUs that become free: with a plan only as far as it ends
before its node's turn, as a maintenance reservation sees to; with the peers always.
The swap itself costs every way the same and is given apart.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf
from typing import Any

from ..fleet import Snapshot
from .bins import together
from .model import Model, in_order, same_version
from .placement import Rooms
from .plan import Plan, make, prepare
from .policy import BadPolicy, Policy
from .review import hints_of, review
from .schedule import BLOCKED, COLD, MOVE, WAIT, play

PEERS = ("operator", "drain_and_wait", "all_at_once")
CAUSES = ("moves", "cold_starts", "no_room", "idle")
_MOST_RUNS, _FEWEST_RUNS = 1000, 3
_WORK = 100_000
"""Workloads that are played in all, unless the number of runs is given."""


@dataclass(frozen=True)
class Chances:
    """How much ``runs`` differ; 0 lets :func:`beside` choose. ``ends`` and ``swap`` are relative spreads, ``failure`` a
    node's chance to fail."""

    runs: int = 20
    ends: float = 0.1
    swap: float = 0.15
    failure: float = 0.0
    seed: int = 1


@dataclass(frozen=True)
class Run:
    """One run. ``lost`` is in GPU-seconds by cause; ``curve`` is (seconds, GPUs by driver version, GPUs down)."""

    lost: dict[str, float]
    finish: float
    moves: int
    cold_starts: int
    waits: int
    failed: int
    curve: tuple[tuple[float, dict[str, int], int], ...]

    @property
    def total(self) -> float:
        return sum(self.lost.values())


@dataclass(frozen=True)
class Forecast:
    """All runs of one way to upgrade."""

    way: str
    runs: tuple[Run, ...]
    swap_lost: float

    @property
    def lost(self) -> float:
        """Mean GPU-seconds lost."""
        return sum(run.total for run in self.runs) / len(self.runs)

    def as_dict(self) -> dict[str, Any]:
        count = len(self.runs)
        finishes = sorted(run.finish for run in self.runs)
        losses = sorted(run.total for run in self.runs)
        return {
            "way": self.way,
            "lost_gpu_hours": round(self.lost / 3600, 2),
            "lost_gpu_hours_spread": [round(_quantile(losses, q) / 3600, 2) for q in (0.1, 0.5, 0.9)],
            "lost_by_cause": {
                cause: round(sum(run.lost[cause] for run in self.runs) / count / 3600, 2) for cause in CAUSES
            },
            "swap_gpu_hours": round(self.swap_lost / 3600, 2),
            "finish_seconds": round(sum(finishes) / count),
            "finish_seconds_spread": [round(_quantile(finishes, q)) for q in (0.1, 0.5, 0.9)],
            "moves": round(sum(run.moves for run in self.runs) / count, 1),
            "cold_starts": round(sum(run.cold_starts for run in self.runs) / count, 1),
            "waits": round(sum(run.waits for run in self.runs) / count, 1),
            "failed_nodes": round(sum(run.failed for run in self.runs) / count, 2),
            "curve": [
                {"seconds": round(when), "gpus": versions, "down": down} for when, versions, down in self.runs[0].curve
            ],
        }


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def forecast(snapshot: Snapshot, policy: Policy, plan: Plan, chances: Chances | None = None) -> Forecast:
    """Play a plan. Each run meets the batches in the plan's order and keeps to its moves and waits where it still can.

    :raises BadPolicy: if the plan names nodes the snapshot does not have.
    """
    chances = chances or Chances()
    model = _model(snapshot, policy, plan)
    batches = [[model.number[name] for name in batch.nodes] for batch in plan.batches]
    hints = hints_of(model, [(fate.workload, fate.fate, fate.to) for batch in plan.batches for fate in batch.fates])
    runs = []
    for number in range(chances.runs):
        dice = random.Random(chances.seed * 1000 + number)  # noqa: S311 - chance, not secrecy
        varied = _varied(model, chances, dice)
        played = play(varied, batches, hints=hints)
        lost = dict.fromkeys(CAUSES, 0.0)
        lost["idle"] = played.idle
        counts = dict.fromkeys((MOVE, COLD, WAIT), 0)
        stuck: set[int] = set()
        for fate in played.fates:
            if fate.what == BLOCKED:  # it works on, and its node is given up
                stuck.update(node for node in batches[fate.batch] if node in varied.items[fate.item].nodes)
                continue
            if fate.what in counts:
                counts[fate.what] += 1
            lost["moves" if fate.what == MOVE else "cold_starts"] += fate.lost
        failed = {node for batch in batches for node in batch if dice.random() < chances.failure}
        failed |= stuck
        finish = played.finish + varied.swap * sum(any(n in failed for n in batch) for batch in batches)
        curve = _curve(varied, batches, [end - varied.slot for end in played.ends], failed)
        runs.append(Run(lost, finish, counts[MOVE], counts[COLD], counts[WAIT], len(failed), curve))
    return Forecast("plan", tuple(runs), _swap_lost(model, batches))


def forecast_peer(
    way: str,
    snapshot: Snapshot,
    policy: Policy,
    plan: Plan,
    chances: Chances | None = None,
    *,
    parallel: int = 0,
    drain_deadline: float = 86400.0,
) -> Forecast:
    """Play one of :data:`PEERS` on the nodes that ``plan`` upgrades, in the order of the snapshot.

    :param parallel: nodes at a time; 0 is as many as the plan's largest batch. ``all_at_once`` takes all.
    :param drain_deadline: seconds after which ``drain_and_wait`` evicts what is still running.
    :raises BadPolicy: if there is no such way.
    """
    if way not in PEERS:
        raise BadPolicy(f"{way!r} is none of {', '.join(PEERS)}")
    chances = chances or Chances()
    model = _model(snapshot, policy, plan)
    wanted = set(plan.order)
    order = [index for index, node in enumerate(model.nodes) if node.name in wanted]
    width = parallel or max((len(batch.nodes) for batch in plan.batches), default=1)
    runs = []
    for number in range(chances.runs):
        dice = random.Random(chances.seed * 1000 + number)  # noqa: S311 - chance, not secrecy
        varied = _varied(model, chances, dice)
        failed = {node for node in order if dice.random() < chances.failure}
        rolling = _Rolling(
            varied,
            order,
            len(order) if way == "all_at_once" else width,
            drain_deadline if way == "drain_and_wait" else 0.0,
            failed,
            dice,
        )
        runs.append(rolling.run())
    return Forecast(way, tuple(runs), _swap_lost(model, [order]))


def beside(
    snapshot: Snapshot,
    policy: Policy,
    earlier: Mapping[str, Any] | None,
    peers: Sequence[str],
    chances: Chances,
    *,
    parallel: int = 0,
    drain_deadline: float = 86400.0,
) -> list[Forecast]:
    """The forecast of a plan (``earlier`` in its JSON form, else made now) and of ``peers`` on the same nodes.

    :raises BadPolicy: if there is nothing to forecast: the plan is impossible, or does not fit the fleet.
    """
    if not chances.runs:
        chances = replace(chances, runs=max(_FEWEST_RUNS, min(Chances.runs, _WORK // (1 + len(snapshot.workloads)))))
    if not 1 <= chances.runs <= _MOST_RUNS or not 0 <= chances.failure <= 1:
        raise BadPolicy(f"runs must be from 1 to {_MOST_RUNS}, and failure a chance from 0 to 1")
    if parallel < 0 or not 0 <= drain_deadline < inf:
        raise BadPolicy("peer_parallel and drain_deadline must be 0 or more")
    plan = make(snapshot, policy) if earlier is None else review(earlier, snapshot, policy)[0]
    if plan.impossible:
        raise BadPolicy("; ".join(f"{node}: {reason}" for node, reason in plan.blocked[:5]))
    return [
        forecast(snapshot, policy, plan, chances),
        *(
            forecast_peer(way, snapshot, policy, plan, chances, parallel=parallel, drain_deadline=drain_deadline)
            for way in peers
        ),
    ]


def _model(snapshot: Snapshot, policy: Policy, plan: Plan) -> Model:
    known = {node.name for node in snapshot.nodes}
    for name in plan.order:
        if name not in known:
            raise BadPolicy(f"the plan upgrades {name}, which is not a node of this fleet")
    model = prepare(in_order(snapshot), policy, dict(plan.blocked))
    wanted = set(plan.order)
    model.moving = [index for index, node in enumerate(model.nodes) if node.name in wanted]
    return model


def _varied(model: Model, chances: Chances, dice: random.Random) -> Model:
    """The model with ends and swap drawn anew."""
    varied = copy(model)
    swap = max(0.2, dice.gauss(1.0, chances.swap)) if chances.swap else 1.0
    varied.swap = model.swap * swap
    varied.slot = model.slot + varied.swap - model.swap
    if chances.ends:
        varied.items = []
        for item in model.items:
            other = copy(item)
            if item.end < inf:
                other.end = item.end * max(0.05, dice.gauss(1.0, chances.ends))
            varied.items.append(other)
    return varied


def _swap_lost(model: Model, batches: Sequence[Sequence[int]]) -> float:
    return sum(model.nodes[node].gpus * model.swap for batch in batches for node in batch)


def _curve(
    model: Model, batches: Sequence[Sequence[int]], begins: Sequence[float], failed: set[int]
) -> tuple[tuple[float, dict[str, int], int], ...]:
    changes = []
    for batch, begin in zip(batches, begins):
        for node in batch:
            changes.append((begin + model.slot - model.swap, node, True))
            changes.append((begin + model.slot + (model.swap if node in failed else 0.0), node, False))
    return _capacity(model, sorted(changes), failed)


def _capacity(
    model: Model, changes: Sequence[tuple[float, int, bool]], failed: set[int]
) -> tuple[tuple[float, dict[str, int], int], ...]:
    """GPUs by driver version, and those down, after each moment of change."""
    version = [node.loaded or "none" for node in model.nodes]
    gpus: dict[str, int] = {}
    for node, loaded in zip(model.nodes, version):
        if node.gpus:
            gpus[loaded] = gpus.get(loaded, 0) + node.gpus
    down = 0
    points = [(0.0, dict(gpus), 0)]
    for when, index, goes_down in changes:
        amount = model.nodes[index].gpus
        if goes_down:
            gpus[version[index]] -= amount
            down += amount
        else:
            if index not in failed and not same_version(version[index], model.policy.version):
                version[index] = model.policy.version
            gpus[version[index]] = gpus.get(version[index], 0) + amount
            down -= amount
        if points[-1][0] == when:
            points.pop()
        points.append((when, dict(gpus), down))
    return tuple(points)


class _Rolling:
    """Nodes in order, ``width`` at a time or one domain: cordoned, emptied within ``patience``, swapped, back."""

    def __init__(
        self, model: Model, order: Sequence[int], width: int, patience: float, failed: set[int], dice: random.Random
    ) -> None:
        self.dice = dice
        self.model = model
        self.todo = together(model, order)[::-1]
        self.width = width
        self.patience = patience
        self.failed = failed
        self.rooms = Rooms(model.nodes, model.free, model.classes, [0] * len(model.nodes))
        self.rooms.open(n for n in (*model.upgraded, *model.kept, *model.moving) if model.nodes[n].schedulable)
        self.where = [item.nodes for item in model.items]
        self.on: list[set[int]] = [set(items) for items in model.residents]
        self.end = [item.end for item in model.items]
        self.began = [-inf] * len(model.items)
        self.pending: dict[int, float] = {}
        self.draining: dict[int, float] = {}
        self.events: list[tuple[float, int, str, int]] = []
        self.lost = dict.fromkeys(CAUSES, 0.0)
        self.cold_starts = self.waits = 0
        self.changes: list[tuple[float, int, bool]] = []
        self.domain = {node: nodes for nodes in self.todo for node in nodes}

    def run(self) -> Run:
        for index, end in enumerate(self.end):
            if end < inf:
                self._at(end, "end", index)
        now, left, running = 0.0, len(self.domain), 0
        while left:
            nodes: list[int] = []
            while self.todo and (not running or running + len(self.todo[-1]) <= self.width):
                nodes += self.todo[-1]
                running += len(self.todo.pop())
            self._cordon(nodes, now)
            now, dummy, what, index = heappop(self.events)
            if what == "end":
                if self.end[index] == now and index not in self.pending:
                    self.end[index] = -1.0
                    refill = max(self.model.refill[node] for node in self.where[index])
                    if refill and not any(node in self.draining for node in self.where[index]):
                        self.began[index] = now
                        self.end[index] = now + refill * self.dice.uniform(0.5, 1.5)
                        self._at(self.end[index], "end", index)
                        continue
                    self.waits += any(node in self.draining for node in self.where[index])
                    self._leave(index, now)
                    self._settle_pending(now)
            elif what == "deadline":
                if index in self.draining:
                    for item in sorted(self.on[index]):
                        self._evict(item, now)
                    self._settle_pending(now)
            else:
                left -= 1
                running -= 1
                self.changes.append((now, index, False))
                self.rooms.open([index])
                more = self.events[0] if self.events else None
                if more is None or more[0] != now or more[2] != what:  # of nodes that are ready at once the last one
                    self._settle_pending(now)
        for item, since in self.pending.items():
            self.lost["no_room"] += self.model.items[item].gpus * (now - since)
        return Run(
            self.lost,
            now,
            0,
            self.cold_starts,
            self.waits,
            len(self.failed),
            _capacity(self.model, sorted(self.changes), self.failed),
        )

    def _at(self, when: float, what: str, index: int) -> None:
        heappush(self.events, (when, len(self.events), what, index))

    def _cordon(self, nodes: Sequence[int], now: float) -> None:
        self.rooms.close(nodes)
        for node in nodes:
            self.draining[node] = now
            if self.patience:
                self._at(now + self.patience, "deadline", node)
            else:
                for item in sorted(self.on[node]):
                    self._evict(item, now)
            self._swap_if_empty(self.domain[node], now)
        if nodes and not self.patience:
            self._settle_pending(now)

    def _swap_if_empty(self, domain: Sequence[int], now: float) -> None:
        if any(node not in self.draining or self.on[node] for node in domain):
            return
        for node in domain:
            idle = (now - self.draining.pop(node)) * self.model.nodes[node].gpus
            self.lost["idle"] += idle * self.model.idle_weight[node]
            self.changes.append((now, node, True))
            self._at(now + self.model.swap * (2 if node in self.failed else 1), "ready", node)

    def _leave(self, index: int, now: float) -> None:
        item = self.model.items[index]
        for node, need in zip(self.where[index], item.needs):
            self.rooms.give(node, need)
        for node in set(self.where[index]):
            self.on[node].discard(index)
            if node in self.draining:
                busy = item.gpus / len(self.where[index]) * (now - self.draining[node])
                self.lost["idle"] -= busy * self.model.idle_weight[node]
                self._swap_if_empty(self.domain[node], now)
        self.where[index] = ()

    def _evict(self, index: int, now: float) -> None:
        item = self.model.items[index]
        progress = min(item.workload.at_risk, now - self.began[index])
        self.lost["cold_starts"] += item.gpus * (progress + item.workload.start_cost)
        self.cold_starts += 1
        self.end[index] += progress + item.workload.start_cost
        self._leave(index, now)
        self.pending[index] = now

    def _settle_pending(self, now: float) -> None:
        for index in sorted(self.pending, key=self.model.rank.__getitem__):
            item = self.model.items[index]
            found = self.rooms.place(item.needs, item.kind.startable, (0,), together=item.kind.together)
            if found is None:
                continue
            waited = now - self.pending.pop(index)
            self.lost["no_room"] += item.gpus * waited
            self.where[index] = found
            for node in found:
                self.on[node].add(index)
            self.began[index] = now
            self.end[index] += waited
            if self.end[index] < inf:
                self._at(self.end[index], "end", index)
