# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Walk through given batches and give every workload on them the fate that loses least.

What a fate loses, in GPU-seconds (``g`` GPUs):

``move``        g x (capture + restore), and a cold start more if it is still running when its new node's turn comes,
                which is none for work that saves itself and finds room on an upgraded node; twice that, and no more,
                for work that stays at home: it moves back when its node is
``wait``        nothing of its own, but the GPUs of the batch that stand idle meanwhile (a quarter if nobody queues):
                until the wait is over, or as with ``stay`` where queued work is known to fill gaps
``cold_start``  g x (start + progress at risk), and g x swap more if it has to wait for its own node to come back,
                which no more of one budget may do at a time than it allows: the others start on a node that is not
                upgraded yet, if no upgraded one has room, or cannot leave;
                work that saves itself loses no more progress than its save takes, and its return to it
``stay``        nothing: it ends before its node's turn; queued work that would outlast that turn is not let in then,
                so its GPUs stand idle for up to half of what the short ones among such work take

The start of each batch is the end of the one before: the longest wait, the evacuation (as long as the longest save of
what moves, if that is more) and the swap of the driver; or the next maintenance window in which all of that fits.

Private to this collection: may change in any release.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice, product
from math import inf
from typing import NamedTuple, Optional, Union

from ..account import lasted
from .model import Item, Model
from .placement import Rooms

NEAR = "near"
"""A hint: move to a node whose turn comes soon rather than last, to be waited for there."""

MOVE, WAIT, COLD, STAY, BLOCKED = "move", "wait", "cold_start", "stay", "blocked"
BLOCKED_LOSS = 1e12
"""Stands for the loss of a batch that cannot be emptied; larger than any fleet's real loss."""


class Fate(NamedTuple):
    """What happens to an item in a batch. ``lost`` is in GPU-seconds; ``to`` are node numbers for a move or a start."""

    item: int
    batch: int
    what: str
    lost: float
    to: tuple[int, ...] = ()
    reason: str = ""


@dataclass
class Played:
    """The walk's outcome. ``idle`` is what waiting lost; ``starts``, ``waits`` and ``ends`` are seconds per batch."""

    fates: list[Fate] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    idle: float = 0.0
    lost: float = 0.0
    finish: float = 0.0

    @property
    def blocked(self) -> list[Fate]:
        return [fate for fate in self.fates if fate.what == BLOCKED]


Hint = Union[str, tuple[int, ...]]

_Back = tuple[tuple[int, ...], float, int, Optional[float]]


class _Idle:
    """What the GPUs of a batch that waits lose by standing idle, in weighed GPU-seconds.

    Those in use until some moment of the wait are told by :meth:`ends`, in the order of those moments. Where queued
    work is known to fill gaps, GPUs stand idle for the last gap only.
    """

    def __init__(self, model: Model, batch: Sequence[int]) -> None:
        self.gap = model.gap
        self.free: dict[float, float] = {}
        for node in batch:
            weight = model.nodes[node].gpus * model.idle_weight[node]
            self.free[model.gap[node]] = self.free.get(model.gap[node], 0.0) + weight
        self.recent: dict[float, deque[tuple[float, float]]] = {gap: deque() for gap in self.free}
        self.filled = dict.fromkeys(self.free, 0.0)
        self.weight = dict.fromkeys(self.free, 0.0)
        self.moments = dict.fromkeys(self.free, 0.0)

    def ends(self, item: Item, left: float) -> None:
        """An item ends ``left`` seconds into the wait."""
        gap = next((self.gap[node] for node in item.nodes if self.gap[node] in self.free), next(iter(self.free)))
        self.free[gap] -= item.idle
        self.recent[gap].append((left, item.idle))
        self.weight[gap] += item.idle
        self.moments[gap] += item.idle * left

    def until(self, left: float) -> float:
        """The loss of a wait of ``left`` seconds, which is no shorter than in the call before."""
        total = 0.0
        for gap, free in self.free.items():
            recent = self.recent[gap]
            while gap and recent and recent[0][0] <= left - gap:
                moment, weight = recent.popleft()
                self.filled[gap] += weight
                self.weight[gap] -= weight
                self.moments[gap] -= weight * moment
            idle = free * (min(left, gap) if gap else left) + self.filled[gap] * gap
            total += max(0.0, idle + self.weight[gap] * left - self.moments[gap])
        return total


class _Walk:
    def __init__(
        self, model: Model, batches: Sequence[Sequence[int]], unused: frozenset[int], hints: Mapping[int, Hint]
    ) -> None:
        self.model = model
        self.hints = hints
        self.unused = unused
        self.batches = batches
        self.last = len(batches)
        self.final = max((n for n, batch in enumerate(batches) if not unused.issuperset(batch)), default=-1)
        position = [-2] * len(model.nodes)
        for index in model.upgraded:
            position[index] = -1
        for index in model.kept:
            position[index] = self.last
        for number, batch in enumerate(batches):
            for index in batch:
                position[index] = number
        self.position = position
        self.rooms = Rooms(model.nodes, model.free, model.classes, position)
        self.rooms.open(index for index in (*model.upgraded, *model.kept) if index not in unused)
        self.rooms.open(index for index in model.moving if model.nodes[index].schedulable and index not in unused)
        self.end = [item.end for item in model.items]
        self.where = [item.nodes for item in model.items]
        self.moved = bytearray(len(model.items))
        self.over = bytearray(len(model.items))
        self.started: dict[int, float] = {}
        self.came: dict[int, list[int]] = {}
        self.down: Counter[str] = Counter()
        self.ending = [(end, index) for index, end in enumerate(self.end) if end < inf]
        heapify(self.ending)
        self.evacuate = model.snapshot.durations.evacuate
        self.longest_wait, self.longest_save = model.policy.max_wait, inf
        self.earliest: list[float] = []
        start = 0.0
        for dummy in batches:
            self.earliest.append(model.policy.opening(start, model.expected)[0])
            start = self.earliest[-1] + model.slot
        self.kept_classes = frozenset(model.classes.of[index] for index in model.kept if index not in unused)
        self.until_last = inf
        self.upgraded = range(0)
        self.played = Played()

    def run(self) -> Played:
        model, played = self.model, self.played
        now = 0.0
        for number, batch in enumerate(self.batches):
            now = self._opening(batch, now)
            self.until_last = self._time_until(self.final, number)
            self.upgraded = range(number - 1, -2, -1)
            self._end_until(now)
            self.rooms.close(batch)
            told = len(played.fates)
            wait = self._empty(number, batch, now)
            moving = [fate.item for fate in islice(played.fates, told, None) if fate.what == MOVE]
            played.starts.append(now)
            played.waits.append(wait)
            now += wait + max(map(self._longer, moving), default=0.0) + model.slot
            played.ends.append(now)
            for index in moving:
                if model.items[index].kind.stays_home:
                    self._go_to(index, model.items[index].nodes)
            for index in batch:
                self.position[index] = number
            back = [n for n in batch if model.nodes[n].schedulable or model.nodes[n].unfinished]
            self.rooms.open(index for index in back if index not in self.unused)
        played.finish = now
        played.lost = played.idle
        for fate in played.fates:
            played.lost += fate.lost
        return played

    def _opening(self, batch: Sequence[int], after: float) -> float:
        """When a batch can start: in a window that its longest save fits, if it fits any, and before which or in which
        work ends that may only be waited for. It may wait for the rest of that window."""
        policy, items, expected = self.model.policy, self.model.items, self.model.expected
        now, spare = policy.opening(after, expected)
        if spare == inf:
            self.longest_wait = policy.max_wait
            return now
        here = {index for node in batch for index in self.model.residents[node] if self.end[index] > now}
        saves = {self._longer(index) for index in here if items[index].kind.movable} | {0.0}
        fixed = [index for index in here if not (items[index].kind.movable or items[index].kind.restartable)]
        only = [self.end[index] - now for index in fixed]
        waits = {max((left for left in only if left <= policy.max_wait), default=0.0), 0.0}
        for longer, wait in sorted(product(saves, waits), reverse=True):
            for start, length, more in ((after, wait, wait), (after + wait, 0.0, 0.0)):
                found = policy.fits(start, expected + longer + length)
                if found is not None:
                    self.longest_save = longer
                    self.longest_wait = min(policy.max_wait, found[1] + more)
                    return found[0]
        return now

    def _longer(self, index: int) -> float:
        """Seconds by which the save of an item takes longer than an evacuation."""
        return max(0.0, self.model.items[index].workload.capture - self.evacuate)

    def _end_until(self, now: float) -> None:
        while self.ending and self.ending[0][0] <= now:
            end, index = heappop(self.ending)
            if self.end[index] == end and not self.over[index]:
                self.over[index] = 1
                self._leave(index)

    def _leave(self, index: int) -> None:
        item = self.model.items[index]
        for node, need in zip(self.where[index], item.needs):
            self.rooms.give(node, need)
        self.where[index] = ()

    def _go_to(self, index: int, nodes: tuple[int, ...]) -> None:
        self._leave(index)
        for node, need in zip(nodes, self.model.items[index].needs):
            self.rooms.take(node, need)
        self.where[index] = nodes

    def _empty(self, number: int, batch: Sequence[int], now: float) -> float:
        """Settle everything on the batch's nodes; returns how long the batch waits."""
        affected: list[int] = []
        waitable = False
        model, end, over = self.model, self.end, self.over
        longest_wait = self.longest_wait
        self.down.clear()
        seen = set()
        for node in batch:
            for index in (*model.residents[node], *self.came.get(node, ())):
                if over[index]:
                    item = model.items[index]
                    if node in item.nodes and not self.moved[index]:
                        if index not in seen:
                            seen.add(index)
                            stays = Fate(index, number, STAY, 0.0, reason="ends before its node's turn")
                            self.played.fates.append(stays)
                        here = item.nodes.count(node) / len(item.nodes)
                        self.played.idle += item.idle * here * min(now - end[index], model.gap[node])
                elif index not in seen and node in self.where[index]:
                    seen.add(index)
                    affected.append(index)
                    waitable = waitable or (model.items[index].kind.waitable and end[index] - now <= longest_wait)
        affected.sort(key=model.rank.__getitem__)
        if not waitable:
            for index in affected:
                self.played.fates.append(self._settle(index, number, now)[0])
            return 0.0
        return self._empty_waiting(number, batch, now, affected)

    def _empty_waiting(self, number: int, batch: Sequence[int], now: float, affected: list[int]) -> float:
        model = self.model
        lefts = sorted(
            (self.end[index] - now, index)
            for index in affected
            if model.items[index].kind.waitable and self.end[index] - now <= self.longest_wait
        )
        trial: dict[int, Fate] = {}
        lost: dict[int, float] = {}
        undo = []
        for index in affected:
            trial[index], lost[index], back = self._settle(index, number, now)
            undo.append((index, back))
        idle = _Idle(model, batch)
        hinted = max((left for left, index in lefts if self.hints.get(index) == WAIT), default=0.0)
        cost = sum(lost.values())
        least = inf if hinted else cost
        wait = waited = 0.0
        for left, index in lefts:
            cost -= lost[index]
            idle.ends(model.items[index], left)
            stand = idle.until(left)
            if cost + stand < least and left >= hinted:
                least, wait, waited = cost + stand, left, stand
        if wait == 0.0:
            self.played.fates.extend(trial.values())
            return 0.0
        for index, back in reversed(undo):
            self._undo(index, back)
        self.down.clear()
        waiting = {index for left, index in lefts if left <= wait}
        for index in affected:
            if index in waiting:
                left = self.end[index] - now
                self.played.fates.append(Fate(index, number, WAIT, 0.0, reason=f"ends after {lasted(left)}"))
                self.over[index] = 1
                self._leave(index)
        for index in affected:
            if index not in waiting:
                self.played.fates.append(self._settle(index, number, now)[0])
        self.played.idle += waited
        return wait

    def _settle(self, index: int, number: int, now: float) -> tuple[Fate, float, _Back]:
        """The cheapest fate other than waiting that has room, taken at once; its loss to the end; what undoes it."""
        item = self.model.items[index]
        kind = item.kind
        back = (self.where[index], self.end[index], self.moved[index], self.started.get(index))
        cold = in_place = BLOCKED_LOSS
        if kind.restartable:
            cold = self._cold(index, item, now) if self.started else item.cold
            in_place = cold + item.gpus * self.model.swap
        can_move = kind.movable and not self.moved[index] and bool(kind.restorable)
        can_move = can_move and (self.longest_save == inf or self._longer(index) <= self.longest_save)
        best = self._best_move(index, item, now, cold) if can_move else inf
        if best < cold or (can_move and self.hints.get(index) not in (None, WAIT)):
            tried = self._move(index, item, number, now, cold, in_place)
            if tried is not None:
                return (*tried, back)
        if kind.restartable and self._start_elsewhere(index, item, self.upgraded):
            self.end[index], self.started[index] = inf, now
            fate = Fate(index, number, COLD, cold, self.where[index], "starts on an upgraded node")
            return fate, cold, back
        if cold <= best < in_place:
            tried = self._move(index, item, number, now, in_place, in_place)
            if tried is not None:
                return (*tried, back)
        if not kind.restartable:
            return Fate(index, number, BLOCKED, BLOCKED_LOSS), BLOCKED_LOSS, back
        budgets = kind.budgets
        spent = self._spent(budgets) if budgets else None
        if spent is None:
            if budgets:
                self.down.update(budgets)
            self.end[index], self.started[index] = inf, now
            fate = Fate(index, number, COLD, in_place, self.where[index], "starts again when its own node is back")
            return fate, in_place, back
        if self._start_elsewhere(index, item, range(self.last, number, -1)):
            self.end[index], self.started[index], self.moved[index] = inf, now, 1
            for node in dict.fromkeys(self.where[index]):
                self.came.setdefault(node, []).append(index)
            reason = (
                f"starts on a node that is not upgraded yet: budget {spent} lets it leave only if it runs elsewhere"
            )
            return Fate(index, number, COLD, cold, self.where[index], reason), cold, back
        most = self.model.snapshot.budgets[spent]
        reason = (
            f"budget {spent} allows {most} at a time: {item.name} may leave its node only when what left before "
            "runs again, and no other node has room: make room, raise the budget, or start more replicas elsewhere"
        )
        return Fate(index, number, BLOCKED, BLOCKED_LOSS, reason=reason), BLOCKED_LOSS, back

    def _spent(self, budgets: Sequence[str]) -> str | None:
        """The one of these that is used up by work of this batch that is down until its node is back."""
        allowed = self.model.snapshot.budgets
        return next((name for name in budgets if self.down[name] >= allowed[name]), None)

    def _cold(self, index: int, item: Item, now: float) -> float:
        """What a cold start loses: no more progress than there was time for since the last one."""
        if index not in self.started:
            return item.cold
        return item.gpus * (item.workload.start_cost + min(item.again, now - self.started[index]))

    def _best_move(self, index: int, item: Item, now: float, cold: float) -> float:
        """What a move would lose at best, to the end."""
        kept = item.kind.saves_itself or not self.kept_classes.isdisjoint(item.kind.restorable)
        return self._moved_until(index, item, now, cold, inf if kept else self.until_last)

    def _moved_until(self, index: int, item: Item, now: float, cold: float, until: float) -> float:
        """What a move loses to the end, onto nodes whose turn comes in ``until`` seconds: a cold start more if it is
        still running then, unless it cannot start cold and can be waited for."""
        pause = _paused(item)
        if until == inf or item.kind.stays_home:
            return pause
        outlives = item.pause + self.end[index] - now - until
        waited_for = not item.kind.restartable and item.kind.waitable and outlives <= self.model.policy.max_wait
        return pause if outlives <= 0 or waited_for else pause + cold

    def _time_until(self, position: int, number: int) -> float:
        """Seconds from the start of batch ``number`` to that of the batch at ``position``, at the earliest."""
        return inf if position >= self.last else self.earliest[position] - self.earliest[number]

    def _cold_room(self, item: Item) -> bool:
        found = self.rooms.place(item.needs, item.kind.startable, self.upgraded, together=item.kind.together)
        if found is None:
            return False
        self.rooms.put_back(found, item.needs)
        return True

    def _move(
        self, index: int, item: Item, number: int, now: float, limit: float, in_place: float
    ) -> tuple[Fate, float] | None:
        """Move it to an upgraded node if it saves itself, or else to the latest node that has room, unless that loses
        ``limit`` or more and there is a better way."""
        hint = self.hints.get(index)
        cold = self._cold(index, item, now) if item.kind.restartable else BLOCKED_LOSS
        later = range(number + 1, self.last + 1) if hint == NEAR else range(self.last, number, -1)
        upgraded = self.upgraded if item.kind.saves_itself and not item.kind.stays_home else range(0)
        found = None
        if isinstance(hint, tuple):
            turns = {self.position[node] for node in hint}
            if turns.issubset(upgraded) or min(turns) > number:
                found = self.rooms.claim(hint, item.needs, item.kind.restorable)
        for positions in (later, upgraded) if hint == NEAR else (upgraded, later):
            found = found or self.rooms.place(
                item.needs,
                item.kind.restorable,
                positions,
                together=item.kind.together,
                spread=item.kind.spread,
            )
        if found is None:
            return None
        until = min(
            inf if self.position[node] in upgraded else self._time_until(self.position[node], number) for node in found
        )
        lost = self._moved_until(index, item, now, cold, until)
        if hint in (None, WAIT) and lost >= limit and (lost >= in_place or self._cold_room(item)):
            self.rooms.put_back(found, item.needs)
            return None
        self._leave(index)
        self.where[index] = found
        self.moved[index] = 1
        self.end[index] += item.pause
        if self.end[index] < inf:
            heappush(self.ending, (self.end[index], index))
        for node in dict.fromkeys(found):
            self.came.setdefault(node, []).append(index)
        return Fate(index, number, MOVE, _paused(item), found), lost

    def _start_elsewhere(self, index: int, item: Item, positions: range) -> bool:
        found = self.rooms.place(
            item.needs,
            item.kind.startable,
            positions,
            together=item.kind.together,
            spread=item.kind.spread,
        )
        if found is None:
            return False
        self._leave(index)
        self.where[index] = found
        return True

    def _undo(self, index: int, back: _Back) -> None:
        where, end, moved, started = back
        self.started.pop(index, None)
        if started is not None:
            self.started[index] = started
        item = self.model.items[index]
        if self.where[index] != where:
            for node, need in zip(self.where[index], item.needs):
                self.rooms.give(node, need)
            for node, need in zip(where, item.needs):
                self.rooms.take(node, need)
            for node in dict.fromkeys(self.where[index]):
                if index in self.came.get(node, ()):
                    self.came[node].remove(index)
        self.where[index], self.end[index], self.moved[index] = where, end, moved


def _paused(item: Item) -> float:
    """GPU-seconds that a move loses, there and, if that is where it belongs, home again."""
    return item.gpus * item.pause * (2 if item.kind.stays_home else 1)


def play(
    model: Model,
    batches: Sequence[Sequence[int]],
    unused: frozenset[int] = frozenset(),
    hints: Mapping[int, Hint] | None = None,
) -> Played:
    """Walk through ``batches`` of node numbers; every item on them gets a fate.

    :param unused: empty nodes on which nothing is to land; batches of nothing else come last.
    :param hints: what to do even where something else looks cheaper at that moment: ``move`` an item if it has room,
        ``near`` to a node whose turn is next, or to the nodes given; ``wait`` for it if it ends in time.
    """
    return _Walk(model, batches, unused, hints or {}).run()
