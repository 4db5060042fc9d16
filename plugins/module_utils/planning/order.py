# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""In which order, and in which batches: groups of nodes sorted into bins, then improved by a search.

A node whose work ends during the upgrade is worth being late for: its turn is put behind that end. Nodes whose work
does not end go early, emptiest first, so that upgraded room for cold starts exists soon; but as much free room as the
moves need is kept for the end, on the old driver.

Private to this collection: may change in any release.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import ceil, inf
from typing import Callable

from .bins import Bins, Group, Use, exceeded, grouped, numbers_of, out_already, use_limits
from .model import Model, is_due, out_of_service
from .policy import BadPolicy, most_down
from .schedule import WAIT, Hint, Played, play
from .search import EFFORT, SMALL, Best, Search

_FEW = 3
"""Empty nodes that a larger fleet may have to be tried without them."""

_WORTHWHILE = 20
_WORK = 20000
"""Trials without which a search is not begun: it may look at ``_WORK`` nodes and workloads in all."""
_LONGER = 12
"""How many times longer the search goes on from the best that was found from any beginning."""


def canaries(model: Model, groups: Sequence[Group], uses: Mapping[Use, float]) -> list[Group]:
    """Nodes that are due and those named; or of each GPU model the cheapest nodes of its most common kind, as far as
    the policy's limits let them be down at once: fewer than asked for, or none of a model, rather than too many."""
    policy = model.policy
    first = [group for group in groups if group.due]
    if not isinstance(policy.canary, int):
        return [group for group in groups if group.due or _is_canary(model, group, policy.canary)]
    used = Counter[Use]()
    for group in first:
        used.update(group.uses)
    nodes = [model.nodes[number] for group in first for number in group.nodes]
    down = sum(out_of_service(node) or not is_due(node) for node in nodes)
    room = most_down(policy, sum(len(group.nodes) for group in groups), out_already(model)) - down
    late = {group for group in groups if any(model.nodes[number].name in policy.reserve for number in group.nodes)}
    kinds = Counter(model.classes.of[group.nodes[0]] for group in groups)
    by_model: dict[str | None, list[Group]] = defaultdict(list)
    for group in groups:
        by_model[model.nodes[group.nodes[0]].gpu_model].append(group)
    for members in sorted(by_model.values(), key=len, reverse=True):
        wanted = policy.canary - sum(model.nodes[node].unfinished for group in members for node in group.nodes)
        ranked = sorted(
            (group for group in members if not group.due and group not in late),
            key=lambda g: (-kinds[model.classes.of[g.nodes[0]]], len(g.nodes), g.cost, g.nodes),
        )
        for group in ranked:
            if wanted <= 0:
                break
            if len(group.nodes) <= room and exceeded(group, used, uses, bool(first)) is None:
                first.append(group)
                used.update(group.uses)
                room -= len(group.nodes)
                wanted -= len(group.nodes)
    return first


def _is_canary(model: Model, group: Group, canary: Sequence[str]) -> bool:
    """Whether one of a group's nodes is among those named as ``canary``.

    :raises BadPolicy: if another one is of the reserve.
    """
    names = [model.nodes[number].name for number in group.nodes]
    first, last = ([name for name in names if name in listed] for listed in (canary, model.policy.reserve))
    if first and last:
        raise BadPolicy(
            f"{first[0]} is a canary and {last[0]} of the reserve, and they are upgraded together: choose another "
            "canary, or leave the kind of their domain out of keep_together to let it be split"
        )
    return bool(first)


def _units(model: Model, groups: Sequence[Group], limit: int) -> list[list[Group]]:
    """Groups that share a gang stand side by side, as long as they fit one batch: a gang is then disturbed once."""
    place_of = {node: place for place, group in enumerate(groups) for node in group.nodes} if model.gangs else {}
    parent = list(range(len(groups)))

    def root(place: int) -> int:
        while parent[place] != place:
            parent[place] = parent[parent[place]]
            place = parent[place]
        return place

    for gang in model.gangs:
        places = [place_of[node] for node in model.items[gang].nodes if node in place_of]
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


def _filled(
    model: Model, groups: Sequence[Group], first: Sequence[Group], uses: Mapping[Use, float], fill: _Fill
) -> Bins:
    """Bins with the canaries, then what ``fill`` puts into them, then the reserve."""
    bins = Bins(model, first, uses, sum(len(group.nodes) for group in groups))
    named = set(model.policy.reserve)
    middle: list[Group] = []
    last: list[Group] = []
    for group in groups:
        if group not in bins.canaries:
            (last if named & {model.nodes[n].name for n in group.nodes} else middle).append(group)
    bins.grow(sum(len(group.nodes) for group in middle))
    fill(model, bins, middle)
    bins.close_gaps()
    begin = len(bins.batches)
    for group in last:
        bins.put(group, range(begin, len(bins.batches)))
    return bins


def _by_cost(model: Model, bins: Bins, groups: Sequence[Group], late: float) -> None:
    """Fill by the rule of this module's description; ``late`` scales the free room kept for the end."""
    total = len(bins.batches)
    start = int(bins.first)
    finite, neutral = _by_worth(model, _units(model, groups, bins.limit(start)), total)
    movers = sum([_mover(model, index) for group in bins.canaries for index in group.items], 0.0)
    for unit, release in finite:
        for group in unit:
            number = bins.put(group, [*range(release, total), *range(release - 1, -1, -1)])
            if number < release:
                movers += sum(_mover(model, index) for index in group.items)
    room = late * movers
    kept: set[Group] = set()
    neutral.reverse()
    for unit in sorted(neutral, key=lambda unit: -sum(group.free for group in unit)):
        free = sum(group.free for group in unit)
        if room <= 0 or not free:
            break
        room -= free
        for group in unit:
            bins.put(group, range(len(bins.batches) - 1, start - 1, -1))
            kept.add(group)
    neutral.reverse()
    for unit in sorted(neutral, key=lambda unit: sum(group.cost for group in unit)):
        for group in unit:
            if group not in kept:
                while start < len(bins.batches) - 1 and bins.sizes[start] >= bins.limit(start):
                    start += 1
                bins.put(group, range(start, len(bins.batches)))


def _by_worth(
    model: Model, units: Sequence[list[Group]], total: int
) -> tuple[list[tuple[list[Group], int]], list[list[Group]]]:
    """Units worth being late for as their work ends, the dearest first, with the batch they should be in; the rest."""
    finite: list[tuple[float, list[Group], int]] = []
    neutral: list[list[Group]] = []
    patience = model.policy.max_wait
    horizon = (total - 1) * model.slot + patience
    for unit in units:
        value, release = 0.0, 0
        for group in unit:
            for index in group.items:
                item = model.items[index]
                end = item.end
                if end <= horizon:
                    value += item.early
                    release = max(release, ceil((end - patience * 0.5) / model.slot))
        if value:
            finite.append((value, unit, min(release, total - 1)))
        else:
            neutral.append(unit)
    finite.sort(key=lambda entry: -entry[0])
    return [(unit, release) for dummy, unit, release in finite], neutral


def _by_end(model: Model, bins: Bins, groups: Sequence[Group]) -> None:
    """Fill from the last bin backwards, in the order in which the groups' work ends; without any end first."""

    def ends(group: Group) -> float:
        return max((end for item in group.items if (end := model.items[item].end) < inf), default=0.0)

    for group in sorted(groups, key=ends, reverse=True):
        bins.put(group, range(len(bins.batches) - 1, -1, -1))


_Fill = Callable[[Model, Bins, Sequence[Group]], None]

_FILLS: tuple[_Fill, ...] = (
    partial(_by_cost, late=1.0),
    partial(_by_cost, late=0.0),
    partial(_by_cost, late=inf),
    _by_end,
)
"""Beginnings of a search, the best one first: the only one where a fleet is too large to search."""


def _mover(model: Model, index: int) -> float:
    item = model.items[index]
    if not item.kind.movable or item.gpus * item.pause >= item.cold + item.gpus * model.swap:
        return 0.0
    return item.gpus


@dataclass(frozen=True)
class Arrangement:
    """Node numbers by batch, and how they play with ``hints`` if nothing lands on ``unused`` nodes."""

    batches: list[list[int]]
    has_canary: bool
    hints: Mapping[int, Hint]
    unused: frozenset[int]
    played: Played


def arrange(model: Model, absent: frozenset[int] = frozenset()) -> Arrangement:
    """The best batches found, as if ``absent`` nodes did not exist.

    :raises BadPolicy: if the policy's limits leave no way to fill batches.
    """
    uses = use_limits(model, absent)
    groups = [group for group in grouped(model, uses) if absent.isdisjoint(group.nodes)]
    if not groups:
        return Arrangement([], False, {}, absent, play(model, [], absent))
    first = canaries(model, groups, uses)
    effort = _effort(model, absent)
    small = sum(len(group.nodes) for group in groups) <= SMALL
    search = Search(model, first, absent)
    beginnings: list[dict[int, Hint]] = [{}]
    if small:
        beginnings.append({i: WAIT for i, item in enumerate(model.items) if item.kind.waitable and item.end < inf})
    for fill, hints in product(_FILLS if effort else _FILLS[:1], beginnings):
        bins = _filled(model, groups, first, uses, fill)
        search.climb(bins, dict(hints), effort)
    if small:
        search.go_on(bins, _LONGER * effort)
    return _arrangement(search.best, bool(first), absent)


def extended(model: Model, earlier: Arrangement, absent: frozenset[int]) -> Arrangement | None:
    """What was found without more nodes than ``absent``, with these in the end and unused, or something better.

    None if that cannot be, as more canaries would be needed than it has, or no batch takes one of these nodes.
    """
    uses = use_limits(model, absent)
    groups = [group for group in grouped(model, uses) if absent.isdisjoint(group.nodes)]
    number = {node: batch for batch, nodes in enumerate(earlier.batches) for node in nodes}
    known = [group for group in groups if group.nodes[0] in number]
    more = [group for group in groups if group.nodes[0] not in number]
    first = [group for group in known if number[group.nodes[0]] == 0] if earlier.has_canary else []
    if _models(canaries(model, groups, uses)) != _models(first):
        return None
    bins = Bins(model, first, uses, sum(len(group.nodes) for group in groups))
    contents: list[list[Group]] = [[] for dummy in earlier.batches]
    for group in known:
        contents[number[group.nodes[0]]].append(group)
    bins.refill(contents)
    try:
        for group in more:
            bins.put(group, range(len(contents), len(bins.batches)))
    except BadPolicy:
        return None
    unused = (earlier.unused - absent) | {node for group in more for node in group.nodes}
    begin = Best(bins.contents(), dict(earlier.hints), play(model, bins.nodes(), unused | absent, earlier.hints))
    search = Search(model, first, absent, begin)
    search.go_on(bins, _effort(model, absent))
    return _arrangement(search.best, bool(first), (unused if search.best is begin else frozenset()) | absent)


def _models(groups: Sequence[Group]) -> Counter[str]:
    """GPU models of groups, with the number of groups that have them."""
    return Counter(str(name) for group in groups for name in group.gpu_models)


def _arrangement(best: Best, has_canary: bool, unused: frozenset[int]) -> Arrangement:
    return Arrangement(numbers_of(best.contents), has_canary, best.hints, unused, best.played)


def _effort(model: Model, absent: frozenset[int]) -> int:
    """How many trials a search may make: none if the fleet is too large for enough of them."""
    effort = min(EFFORT, _WORK // max(1, len(model.items) + len(model.nodes) - len(absent)))
    return effort if effort >= _WORTHWHILE else 0


def spare(model: Model) -> list[frozenset[int]]:
    """Sets of empty nodes to try to do without: more and more of them, the last ones first, beginning with none.

    A plan with more headroom could come out worse, as a search goes where its beginning leads. The best of the plans
    with and without it cannot. Not tried are fleets with many empty nodes or a named reserve, or too large to search.
    """
    found = [frozenset[int]()]
    if model.policy.reserve or not _effort(model, found[0]):
        return found
    named = set() if isinstance(model.policy.canary, int) else set(model.policy.canary)
    groups = [group.nodes for group in grouped(model, {}) if not group.items and not group.due]
    groups += [(index,) for index in (*model.upgraded, *model.kept) if not model.residents[index]]
    groups = [group for group in groups if not named & {model.nodes[n].name for n in group}]
    if len(groups) > (SMALL if len(model.moving) <= SMALL else _FEW):
        return found
    for group in sorted(groups, reverse=True):
        found.append(found[-1].union(group))
    return found
