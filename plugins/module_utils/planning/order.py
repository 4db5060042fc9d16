# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""In which order, and in which batches: groups of nodes sorted into bins, then improved by trying neighbours.

A node whose work ends during the upgrade is worth being late for: its turn is put behind that end. Nodes whose work
does not end go early, emptiest first, so that upgraded room for cold starts exists soon; but as much free room as the
moves need is kept for the end, on the old driver. Small fleets are then improved by swapping nodes between batches.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, inf
from typing import Callable, Optional

from ..fleet import Demand
from .model import Model, out_of_service
from .policy import BadPolicy, batch_limits, most_down
from .schedule import MOVE, NEAR, WAIT, Hint, Played, play

_SMALL = 10
"""Fleets of up to this many nodes also try holding back empty nodes."""

_VARIANTS = 24
_KICKS = (1, 40)
"""Disturbances from which a search starts again: of each first arrangement, and of the best one."""
_EFFORT = 400
_WORTHWHILE = 40
"""Trials a search may make at most, and those without which it is not begun: the larger the fleet, the fewer."""


Use = tuple[str, Optional[str]]
"""What a limit counts: nodes of a domain (its kind and name), ``budget`` or ``gpus`` and the name of either."""


class Group:
    """Nodes that share a batch: a domain that is kept together, or one node. ``uses`` counts against batch limits."""

    def __init__(self, model: Model, nodes: Sequence[int], limits: Mapping[Use, float]) -> None:
        self.nodes = tuple(nodes)
        self.items = tuple(model.residents[nodes[0]])
        if len(nodes) > 1:
            self.items = tuple(dict.fromkeys(item for node in nodes for item in model.residents[node]))
        self.gpu_models = {model.nodes[node].gpu_model for node in nodes}
        self.free = sum(model.nodes[node].free.get("gpu", 0) for node in nodes)
        self.cost = sum(_early_cost(model, item) for item in self.items)
        self.unfinished = any(model.nodes[node].unfinished for node in nodes)
        self.uses: dict[Use, int] = {}
        for node in nodes if limits else ():
            self._use(("gpus", model.nodes[node].gpu_model), model.nodes[node].gpus, limits)
            for domain in model.nodes[node].domains.items():
                self._use(domain, 1, limits)
        for item in self.items:
            for name in model.items[item].workload.budgets:
                self._use(("budget", name), 1, limits)

    def _use(self, use: Use, amount: int, limits: Mapping[Use, float]) -> None:
        if use in limits:
            self.uses[use] = self.uses.get(use, 0) + amount


def use_limits(model: Model) -> dict[Use, float]:
    """What a batch may use at most.

    GPUs of a model that may be down at once follow from ``max_pending``: what waits already and what free GPUs absorb.
    """
    limits: dict[Use, float] = {("budget", name): allowed for name, allowed in model.snapshot.budgets.items()}
    for kind, most in model.policy.max_per_domain:
        limits.update(((kind, node.domains[kind]), most) for node in model.nodes if kind in node.domains)
    for name, bound in model.policy.max_pending:
        demand = model.snapshot.queue.get(name, Demand())
        waiting = demand.gpus + demand.arrivals_per_hour * model.slot / 3600
        free = sum(node.free.get("gpu", 0) for node in model.nodes if node.gpu_model == name and node.schedulable)
        limits["gpus", name] = bound - waiting + free
    return limits


def _early_cost(model: Model, index: int) -> float:
    item = model.items[index]
    if item.restartable:
        return item.cold
    return item.gpus * item.pause if item.movable else item.gpus * 1e6


class Bins:
    """Batches being filled; ``first`` is the canary's batch, which takes nothing else."""

    def __init__(self, model: Model, first: Sequence[Group], uses: Mapping[Use, float]) -> None:
        self.model = model
        policy = model.policy
        moving = set(model.moving)
        out = sum(out_of_service(node) for number, node in enumerate(model.nodes) if number not in moving)
        self.limits = batch_limits(policy, len(moving), out)
        fresh = sum(len(group.nodes) for group in first if not group.unfinished)
        allowed = most_down(policy, len(moving), out)
        if fresh > allowed:
            raise BadPolicy(
                f"the canary batch has {fresh} nodes and max_unavailable allows {allowed} down: "
                "choose fewer canaries or raise max_unavailable"
            )
        self.use_limits = uses
        self.first = bool(first)
        self.batches: list[list[Group]] = []
        self.sizes: list[int] = []
        self.used: list[Counter[Use]] = []
        if first:
            self.append()
            for group in first:
                if any(use[0] == "gpus" and amount > uses[use] for use, amount in group.uses.items()):
                    raise BadPolicy(self._too_large(group, 0))
                self.add(0, group)

    def limit(self, number: int) -> int:
        return self.limits[min(number - self.first, len(self.limits) - 1)]

    def append(self) -> None:
        self.batches.append([])
        self.sizes.append(0)
        self.used.append(Counter())

    def grow(self, nodes: int) -> None:
        """Add bins until ``nodes`` more nodes could be taken."""
        while nodes > 0:
            nodes -= self.limit(len(self.batches))
            self.append()

    def close_gaps(self) -> None:
        """Fill empty bins from the next one that is not, and drop those left at the end: sizes hold by number."""
        number = 0
        while number < len(self.batches):
            later = next((n for n in range(number, len(self.batches)) if self.batches[n]), None)
            if later is None:
                break
            for group in list(self.batches[later]) if later > number else ():
                if self.admits(number, group):
                    self.remove(later, group)
                    self.add(number, group)
            number += 1
        while self.batches and not self.batches[-1]:
            for part in (self.batches, self.sizes, self.used):
                del part[-1]

    def admits(self, number: int, group: Group) -> bool:
        """A group that alone exceeds a budget or a domain limit is admitted to an empty bin: it cannot be divided."""
        size = self.sizes[number]
        if size + len(group.nodes) > self.limit(number) or (self.first and number == 0):
            return False
        return not any(
            self.used[number][use] + amount > self.use_limits[use] and (size or use[0] == "gpus")
            for use, amount in group.uses.items()
        )

    def add(self, number: int, group: Group) -> None:
        self.batches[number].append(group)
        self.sizes[number] += len(group.nodes)
        self.used[number].update(group.uses)

    def remove(self, number: int, group: Group) -> None:
        self.batches[number].remove(group)
        self.sizes[number] -= len(group.nodes)
        self.used[number].subtract(group.uses)

    def put(self, group: Group, order: Iterable[int]) -> int:
        """Add to the first bin of ``order`` that admits the group, else to a new one at the end.

        :raises BadPolicy: if even an empty bin does not take the group.
        """
        for number in order:
            if self.admits(number, group):
                self.add(number, group)
                return number
        self.append()
        number = len(self.batches) - 1
        if not self.admits(number, group):
            raise BadPolicy(self._too_large(group, self.limit(number)))
        self.add(number, group)
        return number

    def _too_large(self, group: Group, limit: int) -> str:
        node = self.model.nodes[group.nodes[0]]
        for use, amount in group.uses.items():
            if use[0] == "gpus" and amount > self.use_limits[use]:
                return (
                    f"max_pending lets {max(0.0, self.use_limits[use]):g} GPUs of {use[1]} be down and {node.name} "
                    f"has {amount}: raise max_pending or let the queue shrink"
                )
        kind = next((kind for kind in self.model.policy.keep_together if kind in node.domains), "")
        return (
            f"the {len(group.nodes)} nodes of {kind} {node.domains.get(kind)} are upgraded together and a batch holds "
            f"{limit}: raise batch_size or max_unavailable, or leave {kind} out of keep_together to let it be split"
        )

    def contents(self) -> list[list[Group]]:
        return [list(batch) for batch in self.batches]

    def refill(self, contents: Sequence[Sequence[Group]]) -> None:
        """Go back to earlier contents."""
        self.batches, self.sizes, self.used = [], [], []
        for number, batch in enumerate(contents):
            self.append()
            for group in batch:
                self.add(number, group)

    def nodes(self) -> list[list[int]]:
        return [sorted(node for group in batch for node in group.nodes) for batch in self.batches if batch]


def together(model: Model, nodes: Iterable[int]) -> list[list[int]]:
    """Nodes by the domains that are kept together, in the order of each one's first node."""
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index in nodes:
        node = model.nodes[index]
        kind = next((kind for kind in model.policy.keep_together if kind in node.domains), None)
        found[(kind, node.domains[kind]) if kind else ("", node.name)].append(index)
    return list(found.values())


def grouped(model: Model, uses: Mapping[Use, float]) -> list[Group]:
    """The nodes to upgrade as groups, in the order of the snapshot."""
    return [Group(model, nodes, uses) for nodes in together(model, model.moving)]


def canaries(model: Model, groups: Sequence[Group]) -> list[Group]:
    """Unfinished nodes and those named; or of each GPU model the cheapest nodes of its most common kind."""
    policy = model.policy
    first = [group for group in groups if group.unfinished]
    if not isinstance(policy.canary, int):
        names = set(policy.canary)
        return [group for group in groups if group.unfinished or names & {model.nodes[n].name for n in group.nodes}]
    kinds = Counter(model.classes.of[group.nodes[0]] for group in groups)
    by_model: dict[str | None, list[Group]] = defaultdict(list)
    for group in groups:
        by_model[model.nodes[group.nodes[0]].gpu_model].append(group)
    for members in by_model.values():
        wanted = policy.canary - sum(len(group.nodes) for group in members if group.unfinished)
        ranked = sorted(
            (group for group in members if not group.unfinished),
            key=lambda g: (-kinds[model.classes.of[g.nodes[0]]], len(g.nodes), g.cost, g.nodes),
        )
        for group in ranked:
            if wanted <= 0:
                break
            first.append(group)
            wanted -= len(group.nodes)
    return first


def _units(model: Model, groups: Sequence[Group], limit: int) -> list[list[Group]]:
    """Groups that share a gang stand side by side, as long as they fit one batch: a gang is then disturbed once."""
    of_item: dict[int, list[int]] = defaultdict(list)
    for place, group in enumerate(groups):
        for item in group.items:
            if len(model.items[item].nodes) > 1:
                of_item[item].append(place)
    parent = list(range(len(groups)))

    def root(place: int) -> int:
        while parent[place] != place:
            parent[place] = parent[parent[place]]
            place = parent[place]
        return place

    for places in of_item.values():
        for place in places[1:]:
            parent[root(place)] = root(places[0])
    found: dict[int, list[Group]] = defaultdict(list)
    for place, group in enumerate(groups):
        found[root(place)].append(group)
    units: list[list[Group]] = []
    for unit in found.values():
        if sum(len(group.nodes) for group in unit) <= limit:
            units.append(unit)
        else:
            units.extend([group] for group in unit)
    return units


def _arranged(
    model: Model, groups: Sequence[Group], first: Sequence[Group], uses: Mapping[Use, float], late: float
) -> Bins:
    """Bins filled by the rule of this module's description; ``late`` scales the free room kept for the end."""
    bins = Bins(model, first, uses)
    chosen = set(map(id, first))
    named = set(model.policy.reserve)
    last = [g for g in groups if id(g) not in chosen and named & {model.nodes[n].name for n in g.nodes}]
    chosen.update(map(id, last))
    rest = [group for group in groups if id(group) not in chosen]
    bins.grow(sum(len(group.nodes) for group in rest))
    total = len(bins.batches)
    units = _units(model, rest, bins.limit(int(bins.first)))
    finite: list[tuple[float, int, int, list[Group]]] = []
    neutral: list[tuple[float, int, list[Group]]] = []
    horizon = (total - 1) * model.slot + model.policy.max_wait
    for place, unit in enumerate(units):
        value, release = 0.0, 0
        for group in unit:
            for index in group.items:
                end = model.items[index].end
                if end <= horizon:
                    value += _early_cost(model, index)
                    release = max(release, ceil((end - model.policy.max_wait * 0.5) / model.slot))
        if value:
            finite.append((-value, place, min(max(release, 0), total - 1), unit))
        else:
            neutral.append((sum(group.cost for group in unit), place, unit))
    movers = 0.0
    for dummy, dummy, release, unit in sorted(finite, key=lambda entry: entry[:2]):
        for group in unit:
            number = bins.put(group, [*range(release, total), *range(release - 1, -1, -1)])
            if number < release:
                movers += sum(_mover(model, index) for index in group.items)
    movers += sum(_mover(model, index) for group in first for index in group.items)
    start = int(bins.first)
    room = late * movers
    for unit in (unit for dummy, dummy, unit in sorted(neutral, key=lambda e: (-sum(g.free for g in e[2]), -e[1]))):
        free = sum(group.free for group in unit)
        if room <= 0 or not free:
            break
        room -= free
        for group in unit:
            bins.put(group, range(len(bins.batches) - 1, start - 1, -1))
            chosen.add(id(group))
    for dummy, dummy, unit in sorted(neutral, key=lambda entry: entry[:2]):
        for group in unit:
            if id(group) not in chosen:
                while start < len(bins.batches) - 1 and bins.sizes[start] >= bins.limit(start):
                    start += 1
                bins.put(group, range(start, len(bins.batches)))
    bins.close_gaps()
    begin = len(bins.batches)
    for group in last:
        bins.put(group, range(begin, len(bins.batches)))
    return bins


def _by_end(model: Model, groups: Sequence[Group], first: Sequence[Group], uses: Mapping[Use, float]) -> Bins:
    """Bins filled from the last one backwards, in the order in which the groups' work ends; without any end first."""
    bins = Bins(model, first, uses)
    chosen = set(map(id, first))
    named = set(model.policy.reserve)
    last = [g for g in groups if id(g) not in chosen and named & {model.nodes[n].name for n in g.nodes}]
    chosen.update(map(id, last))
    rest = [group for group in groups if id(group) not in chosen]
    bins.grow(sum(len(group.nodes) for group in rest))

    def ends(group: Group) -> float:
        return max((end for item in group.items if (end := model.items[item].end) < inf), default=0.0)

    for group in sorted(rest, key=ends, reverse=True):
        bins.put(group, range(len(bins.batches) - 1, -1, -1))
    bins.close_gaps()
    begin = len(bins.batches)
    for group in last:
        bins.put(group, range(begin, len(bins.batches)))
    return bins


def _mover(model: Model, index: int) -> float:
    item = model.items[index]
    if not item.movable or item.gpus * item.pause >= item.cold + item.gpus * model.swap:
        return 0.0
    return item.gpus


def _key(played: Played) -> tuple[float, float]:
    return round(played.lost, 6), played.finish


def arrange(model: Model) -> tuple[list[list[int]], Played, bool]:
    """The best batches found: node numbers by batch, how they play, and whether the first batch is a canary.

    :raises BadPolicy: if the policy's limits leave no way to fill batches.
    """
    uses = use_limits(model)
    groups = grouped(model, uses)
    first = canaries(model, groups)
    if not groups:
        return [], play(model, []), False
    effort = min(_EFFORT, 40000 // (len(model.items) + len(model.nodes)))
    small = len(model.moving) <= _SMALL
    search = _Search(model, first)
    for held in _held_back(model, groups, first):
        unused = frozenset(node for group in held for node in group.nodes)
        used = [group for group in groups if group not in held]
        starts = [_arranged(model, used, first, uses, 1.0)]
        if effort >= _WORTHWHILE:
            starts += [_arranged(model, used, first, uses, late) for late in (0.0, inf)]
            starts.append(_by_end(model, used, first, uses))
        for bins in starts:
            hints: dict[int, Hint] = {}
            if effort >= _WORTHWHILE:
                search.climb(bins, unused, effort, hints, _KICKS[0] if small else 0)
            begin = len(bins.batches)
            for group in held:
                bins.put(group, range(begin, len(bins.batches)))
            if held:
                search.consider(bins, play(model, bins.nodes(), unused, hints), hints)
            search.consider(bins, play(model, bins.nodes(), hints=hints), hints)
    best = search.best
    if best is None:
        raise BadPolicy("no batches can be formed under these limits")
    found = (best.bins.nodes(), best.played, bool(first))
    if not small:
        return found
    hints = dict(best.hints)
    search.climb(best.bins, frozenset(), 4 * effort, hints, _KICKS[1])
    played = play(model, best.bins.nodes(), hints=hints)
    return (best.bins.nodes(), played, bool(first)) if _key(played) < best.key else found


def _held_back(model: Model, groups: Sequence[Group], first: Sequence[Group]) -> list[list[Group]]:
    """Sets of empty groups to leave for the very end, unused: with them, more headroom can never make a plan worse."""
    if len(model.moving) > _SMALL:
        return [[]]
    kinds: dict[object, list[Group]] = defaultdict(list)
    for group in groups:
        if not group.items and group not in first:
            kinds[tuple((model.classes.of[n], tuple(sorted(model.free[n].items()))) for n in group.nodes)].append(group)
    choices = list(product(*(range(len(members) + 1) for members in kinds.values())))
    sets = [
        [g for members, n in zip(kinds.values(), numbers) for g in members[len(members) - n :]] for numbers in choices
    ]
    return sets[:_VARIANTS]


@dataclass(frozen=True)
class _Best:
    key: tuple[float, float]
    bins: Bins
    played: Played
    hints: Mapping[int, Hint]


class _Search:
    """Local search by swapping groups between batches, shifting one, and hinting at fates."""

    def __init__(self, model: Model, first: Sequence[Group]) -> None:
        self.model = model
        self.best: _Best | None = None
        named = set(model.policy.reserve)
        chosen = not isinstance(model.policy.canary, int)
        self._fixed_nodes = {index for index in model.moving if model.nodes[index].name in named}
        self._fixed_nodes.update(node for group in first if chosen or group.unfinished for node in group.nodes)

    def consider(self, bins: Bins, played: Played, hints: Mapping[int, Hint]) -> None:
        key = _key(played)
        if self.best is None or key < self.best.key:
            self.best = _Best(key, bins, played, dict(hints))

    def climb(self, bins: Bins, unused: frozenset[int], effort: int, hints: dict[int, Hint], kicks: int = 0) -> None:
        """Change ``bins`` and ``hints`` in place while that loses less; at most ``effort`` different trials."""
        known: dict[object, tuple[float, float]] = {}

        def tried() -> tuple[float, float]:
            batches = bins.nodes()
            name = (tuple(map(tuple, batches)), frozenset(hints.items()))
            if name not in known:
                known[name] = _key(play(self.model, batches, unused, hints))
            return known[name]

        def spent() -> bool:
            return len(known) >= effort

        def descend() -> tuple[float, float]:
            key = tried()
            while not spent():
                found = self._step(bins, tried, spent, key) or self._hint(hints, tried, spent, key)
                if found is None:
                    break
                key = found
            return key

        best = descend()
        dice = random.Random(1)  # noqa: S311 - any fixed sequence will do, and the same input must give the same plan
        for dummy in range(kicks):
            if spent():
                break
            kept, kept_hints = bins.contents(), dict(hints)
            for dummy in range(2):
                self._kick(bins, hints, dice)
            key = descend()
            if key < best:
                best = key
            else:
                bins.refill(kept)
                hints.clear()
                hints.update(kept_hints)

    def _kick(self, bins: Bins, hints: dict[int, Hint], dice: random.Random) -> None:
        changes = _neighbours(bins, self._fixed_nodes)
        possible = _hints(self.model)
        chosen = dice.randrange(len(changes) + len(possible) or 1)
        if chosen < len(changes):
            _apply(bins, changes[chosen])
        elif possible:
            index, hint = possible[chosen - len(changes)]
            hints[index] = hint

    def _step(
        self, bins: Bins, tried: _Trial, spent: Callable[[], bool], best: tuple[float, float]
    ) -> tuple[float, float] | None:
        for change in _neighbours(bins, self._fixed_nodes):
            undo = _apply(bins, change)
            if undo is None:
                continue
            key = tried()
            if key < best:
                return key
            for number, group, sign in undo:
                (bins.add if sign > 0 else bins.remove)(number, group)
            if spent():
                break
        return None

    def _hint(
        self, hints: dict[int, Hint], tried: _Trial, spent: Callable[[], bool], best: tuple[float, float]
    ) -> tuple[float, float] | None:
        for index, hint in _hints(self.model):
            before = hints.pop(index, None)
            if hint != before:
                hints[index] = hint
            key = tried()
            if key < best:
                return key
            hints.pop(index, None)
            if before is not None:
                hints[index] = before
            if spent():
                break
        return None


def _hints(model: Model) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for index, item in enumerate(model.items):
        if item.movable and item.restorable:
            found.extend(((index, MOVE), (index, NEAR)))
        if item.waitable and item.end < inf:
            found.append((index, WAIT))
    return found


_Trial = Callable[[], "tuple[float, float]"]
_Change = tuple[tuple[int, Group, int], ...]


def _neighbours(bins: Bins, fixed: set[int]) -> list[_Change]:
    """Every swap and every shift, as removals and additions."""
    found: list[_Change] = []
    start = int(bins.first)
    free = [(n, g) for n, batch in enumerate(bins.batches) for g in batch if g.nodes[0] not in fixed]
    for place, (i, a) in enumerate(free):
        for j, b in free[place + 1 :]:
            if i == j or (not a.items and not b.items and a.free == b.free):
                continue
            if i < start and (len(a.nodes) != len(b.nodes) or a.gpu_models != b.gpu_models):
                continue
            found.append(((i, a, -1), (j, b, -1), (i, b, 1), (j, a, 1)))
        if i >= start and len(bins.batches[i]) > 1:
            found.extend(((i, a, -1), (j, a, 1)) for j in range(start, len(bins.batches)) if j != i)
    return found


def _apply(bins: Bins, change: _Change) -> list[tuple[int, Group, int]] | None:
    """Do a change and return what undoes it, or None if a limit forbids it (nothing is then changed)."""
    done: list[tuple[int, Group, int]] = []
    for number, group, sign in change:
        if sign > 0 and not (bins.first and number == 0) and not bins.admits(number, group):
            for n, g, s in done:
                (bins.add if s > 0 else bins.remove)(n, g)
            return None
        (bins.add if sign > 0 else bins.remove)(number, group)
        done.insert(0, (number, group, -sign))
    return done
