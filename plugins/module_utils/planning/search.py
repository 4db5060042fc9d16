# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Better batches by trial: swap groups between batches, shift one, or hint at a fate, and keep what loses less.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp, inf
from typing import Callable, NamedTuple, Union

from .bins import Bins, Group
from .model import Model
from .policy import BadPolicy
from .schedule import MOVE, NEAR, WAIT, Hint, Played, play

SMALL = 10
"""Fleets of up to this many nodes to upgrade are searched harder, and try to do without all of their empty nodes."""

EFFORT = 200
"""Trials that a search makes at most."""

_HOT, _COLD = 0.1, 0.002
"""By which share of the least loss a change for the worse is likely taken, in the beginning and in the end."""


class _Swap(NamedTuple):
    """Two groups change places."""

    one: Group
    other: Group


class _Shift(NamedTuple):
    """A group goes to another batch."""

    group: Group
    to: int


class _Turn(NamedTuple):
    """A whole batch has its turn at another place; those in between close the gap."""

    batch: int
    to: int


class _Advice(NamedTuple):
    """An item is hinted at a fate, or no longer if it was."""

    item: int
    hint: str


_Change = Union[_Swap, _Shift, _Turn, _Advice]
_Undo = Callable[[], None]
_Key = tuple[float, float]
_Moves = Sequence[tuple[int, Group, int]]
"""Removals (-1) and additions (1) of groups, by number of the batch."""


@dataclass(frozen=True)
class Best:
    """What lost least: batches of groups, and the hints they are played with."""

    contents: list[list[Group]]
    hints: dict[int, Hint]
    played: Played


class Search:
    """Looks for batches, and remembers the best. Nothing lands on ``unused`` nodes."""

    def __init__(
        self, model: Model, first: Sequence[Group], unused: frozenset[int] = frozenset(), best: Best | None = None
    ) -> None:
        self.model = model
        self.unused = unused
        named = set(model.policy.reserve)
        chosen = not isinstance(model.policy.canary, int)
        self._fixed = {group for group in first if chosen or group.due}
        self._fixed_nodes = {index for index in model.moving if model.nodes[index].name in named}
        self._best = best

    @property
    def best(self) -> Best:
        if self._best is None:
            raise BadPolicy("no batches can be formed under these limits")
        return self._best

    def go_on(self, bins: Bins, effort: int) -> None:
        """Go on from the best, in ``effort`` different trials at most; in small fleets as many at random before."""
        if effort and len(self.model.moving) <= SMALL:
            self._anneal(bins, _Trials(self.model, self.unused, effort))
        bins.refill(self.best.contents)
        self.climb(bins, dict(self.best.hints), effort)

    def climb(self, bins: Bins, hints: dict[int, Hint], effort: int) -> None:
        """Change ``bins`` and ``hints`` in place while that loses less, in ``effort`` different trials at most."""
        if effort:
            self._descend(bins, hints, _Trials(self.model, self.unused, effort))
        self._remember(bins, hints)

    def _remember(self, bins: Bins, hints: dict[int, Hint]) -> None:
        played = play(self.model, bins.nodes(), self.unused, hints)
        if self._best is None or _key(played) < _key(self._best.played):
            self._best = Best(bins.contents(), dict(hints), played)

    @cached_property
    def _advice(self) -> list[_Advice]:
        return _advice(self.model)

    def _anneal(self, bins: Bins, trials: _Trials) -> None:
        """Change the best at random, also for the worse, but ever less so: some plans are better only in several steps,
        as to wait for one node delays another until its work has ended."""
        dice = random.Random(1)  # noqa: S311 - any fixed sequence will do, and the same input must give the same plan
        bins.refill(self.best.contents)
        hints = dict(self.best.hints)
        here = best = trials.key(bins, hints)
        changes = self._changes(bins)
        steps = trials.effort * 3 // 2
        for step in range(steps if changes else 0):
            undo = _do(bins, hints, dice.choice(changes))
            if undo is None:
                continue
            key = trials.key(bins, hints)
            worse = (key[0] - here[0]) / max(best[0], 1.0)
            if worse > 0 and dice.random() >= exp(-worse / (_HOT * (_COLD / _HOT) ** (step / steps))):
                undo()
                continue
            here = key
            changes = self._changes(bins)
            if key < best:
                best = key
                self._remember(bins, hints)

    def _descend(self, bins: Bins, hints: dict[int, Hint], trials: _Trials) -> None:
        dice = random.Random(1)  # noqa: S311 - any fixed sequence will do, and the same input must give the same plan
        best = trials.key(bins, hints)
        improved = True
        while improved:
            improved = False
            changes = self._changes(bins)
            dice.shuffle(changes)
            for change in changes:
                if trials.spent:
                    return
                undo = _do(bins, hints, change)
                if undo is None:
                    continue
                key = trials.key(bins, hints)
                if key < best:
                    best, improved = key, True
                else:
                    undo()

    def _changes(self, bins: Bins) -> list[_Change]:
        """Every swap and shift that could matter, and every hint; in small fleets also other turns of batches, and
        without a named reserve groups whose work ends may have a batch after all others. Nothing joins the reserve."""
        free = [
            group
            for batch in bins.batches
            for group in batch
            if group not in self._fixed and self._fixed_nodes.isdisjoint(group.nodes)
        ]
        kept_last = (n for n, batch in enumerate(bins.batches) for g in batch if self._fixed_nodes & {*g.nodes})
        end = min(kept_last, default=len(bins.batches))
        found: list[_Change] = [*self._advice]
        for place, one in enumerate(free):
            found += [
                _Swap(one, other) for other in free[place + 1 :] if one.items or other.items or one.free != other.free
            ]
            found += [_Shift(one, number) for number in range(int(bins.first), end)]
        if len(self.model.moving) > SMALL:
            return found
        turns = [
            number
            for number in range(int(bins.first), end)
            if not any(group in self._fixed for group in bins.batches[number])
        ]
        found += [_Turn(one, other) for one in turns for other in turns if abs(one - other) > 1]
        if not self._fixed_nodes and bins.batches and bins.batches[-1]:
            found += [_Shift(one, len(bins.batches)) for one in free if one.late]
        return found


class _Trials:
    """Plays arrangements, each once, until ``effort`` different ones have been played."""

    def __init__(self, model: Model, unused: frozenset[int], effort: int) -> None:
        self._model = model
        self._unused = unused
        self.effort = effort
        self._known: dict[object, _Key] = {}

    @property
    def spent(self) -> bool:
        return len(self._known) >= self.effort

    def key(self, bins: Bins, hints: dict[int, Hint]) -> _Key:
        batches = bins.nodes()
        name = (tuple(map(tuple, batches)), frozenset(hints.items()))
        if name not in self._known:
            self._known[name] = _key(play(self._model, batches, self._unused, hints))
        return self._known[name]


def _key(played: Played) -> _Key:
    return round(played.lost, 6), played.finish


def _advice(model: Model) -> list[_Advice]:
    found = []
    for index, item in enumerate(model.items):
        if item.kind.movable and item.kind.restorable:
            found += [_Advice(index, MOVE), _Advice(index, NEAR)]
        if item.kind.waitable and item.end < inf:
            found.append(_Advice(index, WAIT))
    return found


def _do(bins: Bins, hints: dict[int, Hint], change: _Change) -> _Undo | None:
    """Make a change and return what undoes it, or None if it is none or not allowed (nothing is changed then)."""
    if isinstance(change, _Advice):
        return _hint(hints, change)
    start = int(bins.first)
    if isinstance(change, _Shift):
        group, to = change
        here = bins.where[group]
        if here == to or here < start or len(bins.batches[here]) == 1:
            return None
        if to == len(bins.batches):
            bins.append()
        return _moved(bins, ((here, group, -1), (to, group, 1)))
    if isinstance(change, _Turn):
        return _turned(bins, change.batch, change.to)
    one, other = change
    i, j = bins.where[one], bins.where[other]
    alike = len(one.nodes) == len(other.nodes) and one.classes == other.classes
    if i == j or (min(i, j) < start and not alike):
        return None
    return _moved(bins, ((i, one, -1), (j, other, -1), (i, other, 1), (j, one, 1)))


def _turned(bins: Bins, batch: int, to: int) -> _Undo | None:
    """One batch is put where another is; None if a batch is then larger than one of its number may be, or one is empty:
    it would use up a number."""
    if max(batch, to) >= len(bins.batches) or not (bins.batches[batch] and bins.batches[to]):
        return None
    if not bins.rotate(batch, to):
        return None

    def undo() -> None:
        bins.rotate(to, batch)

    return undo


def _hint(hints: dict[int, Hint], advice: _Advice) -> _Undo:
    item, hint = advice
    before = hints.pop(item, None)
    if hint != before:
        hints[item] = hint

    def undo() -> None:
        hints.pop(item, None)
        if before is not None:
            hints[item] = before

    return undo


def _moved(bins: Bins, moves: _Moves) -> _Undo | None:
    done: list[tuple[int, Group, int]] = []

    def undo() -> None:
        for number, group, sign in reversed(done):
            (bins.remove if sign > 0 else bins.add)(number, group)

    for number, group, sign in moves:
        if sign > 0 and not (bins.exchanges(group) if bins.first and number == 0 else bins.admits(number, group)):
            undo()
            return None
        (bins.add if sign > 0 else bins.remove)(number, group)
        done.append((number, group, sign))
    return undo
