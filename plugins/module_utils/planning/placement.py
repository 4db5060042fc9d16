# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where workloads land: on nodes whose facts match, with room for every resource, gangs all or none.

Among the nodes that fit, those upgraded last come first (a moved workload then moves once), then the tightest fit,
then the class of node and the node that come first in the snapshot. The outcome depends on nothing else.

Private to this collection: may change in any release.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from typing import Callable

from ..fleet import Facts, Node, Resources, Workload, gpus_of
from . import compatibility

_NOTHING: Mapping[int, _Shelf] = {}


@dataclass(frozen=True)
class Shape:
    """What a workload asks of a node besides room; workloads of one shape fit the same classes of nodes. ``waived`` are
    the fields of the key that do not matter to it."""

    key: Facts
    gpu_model: str | None
    requires: tuple[tuple[str, tuple[str, ...]], ...]
    tolerates: tuple[str, ...]
    waived: frozenset[str] = frozenset()


class Classes:
    """Nodes grouped into classes that no shape can tell apart, and which shape fits which class."""

    def __init__(self, nodes: Sequence[Node], labels: Collection[str], waived: Collection[str] = ()) -> None:
        self.waived = waived
        self.of: list[int] = []
        self.facts: list[Facts] = []
        self.sample: list[Node] = []
        wanted = sorted(labels)
        known: dict[tuple[object, ...], int] = {}
        for node in nodes:
            seen = tuple(_label(node, label) for label in wanted)
            key = (node.facts, node.gpu_model, node.loaded, node.taints, seen)
            number = known.setdefault(key, len(known))
            if number == len(self.facts):
                self.facts.append(compatibility.offered(node))
                self.sample.append(node)
            self.of.append(number)
        self._restore: dict[Shape, frozenset[int]] = {}
        self._start: dict[Shape, frozenset[int]] = {}

    def restorable(self, shape: Shape) -> frozenset[int]:
        """Classes on which a checkpoint of this shape may be restored."""
        if shape not in self._restore:
            self._restore[shape] = frozenset(
                number for number in self.startable(shape) if not self._mismatches(shape, number)
            )
        return self._restore[shape]

    def _mismatches(self, shape: Shape, number: int) -> tuple[compatibility.Mismatch, ...]:
        waived = shape.waived.union(self.waived)
        return compatibility.explain(shape.key, self.facts[number], waived=waived, scope="node")

    def startable(self, shape: Shape) -> frozenset[int]:
        """Classes on which a workload of this shape may be started from nothing."""
        if shape not in self._start:
            self._start[shape] = frozenset(n for n, node in enumerate(self.sample) if _admission(shape, node) is None)
        return self._start[shape]

    def refusal(self, shape: Shape, number: int, *, restore: bool) -> str | None:
        """Why a shape does not fit a class, or None."""
        reason = _admission(shape, self.sample[number])
        if reason is None and restore:
            found = self._mismatches(shape, number)
            reason = str(found[0]) if found else None
        return reason


def _label(node: Node, name: str) -> str | None:
    return node.labels.get(name, node.domains.get(name))


def _admission(shape: Shape, node: Node) -> str | None:
    if shape.gpu_model is not None and node.gpu_model != shape.gpu_model:
        return f"gpu_model:{node.gpu_model} is not {shape.gpu_model}"
    for label, values in shape.requires:
        found = _label(node, label)
        if found not in values:
            return f"label:{label} is {found}, wants {' or '.join(values)}"
    for taint in node.taints:
        if taint not in shape.tolerates:
            return f"taint:{taint}"
    return None


def shape_of(workload: Workload, node: Node) -> Shape:
    """The shape of a workload that runs on ``node`` now."""
    requires = tuple(sorted(workload.requires.items())) if workload.requires else ()
    return Shape(
        compatibility.key_of(workload.facts, compatibility.offered(node)),
        node.gpu_model,
        requires,
        workload.tolerates,
        compatibility.not_compared(workload.backends),
    )


Amounts = list[int]
"""What a node has free, by column."""

Columns = dict[str, int]
"""The column of each resource that is asked for."""

_CPU = 0


def columns() -> Columns:
    """To begin with; a :class:`Need` adds its resources."""
    return {"cpu": _CPU}


class Need:
    """What one member asks of a node, by resource and by column. ``primary`` is the column it is searched by, ``gpus``
    as in :func:`gpus_of`."""

    __slots__ = ("amounts", "columns", "gpus", "least", "primary")

    def __init__(self, resources: Resources, known: Columns) -> None:
        self.amounts = tuple((name, amount) for name, amount in resources.items() if amount)
        self.columns = tuple((known.setdefault(name, len(known)), amount) for name, amount in self.amounts)
        names = [name for name, dummy in self.amounts]
        primary = "gpu" if "gpu" in names else next((name for name in names if name.startswith("mig-")), "cpu")
        self.primary = known[primary]
        self.least = _bucket(self.primary, resources.get(primary, 0))
        self.gpus = gpus_of(resources)


Needs = tuple[Need, ...]
"""Of each member of a workload; equal needs of one model are one object."""


def fits(need: Need, free: Amounts) -> bool:
    """Whether there is room for everything."""
    for column, amount in need.columns:  # noqa: SIM110 - the innermost loop of planning; all() takes twice as long
        if free[column] < amount:
            return False
    return True


def missing(need: Need, free: Amounts) -> str | None:
    """``no_room:gpu 4 of 8`` when 8 are needed and 4 are free; None when everything fits."""
    for (name, amount), (column, dummy) in zip(need.amounts, need.columns):
        if free[column] < amount:
            return f"no_room:{name} {free[column]} of {amount}"
    return None


def _bucket(column: int, amount: int) -> int:
    return amount if column else amount.bit_length()


class _Shelf:
    """The nodes of one class at one position; the open ones by column and by how much of it is free.

    ``tightest`` remembers, of needs searched before, how much is free on the node that fits best, and that node.
    """

    __slots__ = ("by_amount", "nodes", "tightest")

    def __init__(self) -> None:
        self.nodes: dict[int, None] = {}
        self.by_amount: dict[int, dict[int, list[int]]] = {}
        self.tightest: dict[Need, tuple[int, int]] = {}


def _enter(buckets: dict[int, list[int]], column: int, amount: int, index: int) -> None:
    """Note how much a node has free. Nodes without any are left out, but for CPU, which a need may have none of."""
    if not amount and column != _CPU:
        return
    bucket = _bucket(column, amount)
    heap = buckets.get(bucket)
    if heap is None:
        buckets[bucket] = [index]
    else:
        heappush(heap, index)


class Rooms:
    """Free resources of every node while a plan is played, searchable by class and position.

    A node's position is the number of its batch; ``close`` takes a node out of the search and ``open`` puts it back.
    """

    def __init__(self, nodes: Sequence[Node], free: Sequence[Amounts], classes: Classes, position: list[int]) -> None:
        self._nodes = nodes
        self._classes = classes
        self.free = [each[:] for each in free]
        self.position = position
        self._open = bytearray(len(nodes))
        self._shelves: dict[int, dict[int, _Shelf]] = {}
        self._shelf_of: list[_Shelf | None] = [None] * len(nodes)
        self._fitting: dict[tuple[int, frozenset[int]], list[_Shelf]] = {}
        self._searched: dict[object, int] = {}
        self._hopeless: set[object] = set()

    def open(self, indexes: Iterable[int]) -> None:
        for index in indexes:
            self._open[index] = 1
            at = self._shelves.setdefault(self.position[index], {})
            number = self._classes.of[index]
            shelf = at.get(number)
            if shelf is None:
                shelf = at[number] = _Shelf()
                self._fitting.clear()
            shelf.nodes[index] = None
            shelf.by_amount.clear()
            shelf.tightest.clear()
            self._shelf_of[index] = shelf
        self._more_room()

    def close(self, indexes: Iterable[int]) -> None:
        for index in indexes:
            self._open[index] = 0
            shelf = self._shelf_of[index]
            if shelf is not None:
                shelf.tightest.clear()

    def hide(self, indexes: Iterable[int]) -> list[int]:
        """Close the open ones among ``indexes`` for a while; :meth:`open` what this returns afterwards."""
        hidden = [index for index in dict.fromkeys(indexes) if self._open[index]]
        self.close(hidden)
        return hidden

    def take(self, index: int, need: Need) -> None:
        free = self.free[index]
        for column, amount in need.columns:
            free[column] -= amount
        self._changed(index, need)

    def give(self, index: int, need: Need) -> None:
        free = self.free[index]
        for column, amount in need.columns:
            free[column] += amount
        if self._open[index]:
            self._changed(index, None)
            self._more_room()

    def put_back(self, found: Sequence[int], needs: Needs) -> None:
        """Undo the last :meth:`place`: nothing became possible that was not before it."""
        for index, need in zip(found, needs):
            free = self.free[index]
            for column, amount in need.columns:
                free[column] += amount
            self._changed(index, None)
        if len(needs) > 1:
            # A later member was searched for while the earlier ones had their room.
            self._searched.clear()

    def _more_room(self) -> None:
        self._searched.clear()
        self._hopeless.clear()

    def _changed(self, index: int, taken: Need | None) -> None:
        """Find a node again by what it has free now, after ``taken`` was put there or (None) something left it."""
        shelf = self._shelf_of[index]
        if shelf is None or not self._open[index]:
            return
        free = self.free[index]
        for column, buckets in shelf.by_amount.items():
            _enter(buckets, column, free[column], index)
        if shelf.tightest:
            found = shelf.tightest.get(taken) if taken is not None else None
            shelf.tightest.clear()
            if taken is not None and found is not None and found[1] == index and fits(taken, free):
                # With less free than before it fits tighter still.
                shelf.tightest[taken] = (_bucket(taken.primary, free[taken.primary]), index)

    def place(
        self,
        needs: Needs,
        fitting: frozenset[int],
        positions: Sequence[int],
        *,
        together: str | None = None,
        spread: str | None = None,
    ) -> tuple[int, ...] | None:
        """Take room for all of ``needs``, or for none: the nodes chosen, in the order of ``needs``, or None.

        :param fitting: classes of nodes that are allowed.
        :param positions: positions to look at, the preferred one first.
        :param together: a domain kind all nodes must share; ``spread``: one in which they should differ.
        """
        if not positions or not fitting:
            return None
        if len(needs) == 1:
            index = self._best(needs[0], fitting, positions, None)
            if index is None:
                return None
            self.take(index, needs[0])
            return (index,)
        request = (needs, fitting, positions[0], positions[-1], together)
        if request in self._hopeless:
            return None
        found = (
            self._place_together(needs, fitting, positions, together)
            if together
            else self._place_all(needs, fitting, positions, spread=spread)
        )
        if found is None:
            self._hopeless.add(request)
        return found

    def claim(self, nodes: Sequence[int], needs: Needs, fitting: frozenset[int]) -> tuple[int, ...] | None:
        """Take room for ``needs`` on exactly these nodes, if all are open, fit and have it; else None."""
        if len(nodes) != len(needs) or len(set(nodes)) != len(nodes):
            return None
        for node, need in zip(nodes, needs):
            if not self._open[node] or self._classes.of[node] not in fitting or not fits(need, self.free[node]):
                return None
        for node, need in zip(nodes, needs):
            self.take(node, need)
        return tuple(nodes)

    def _place_together(
        self, needs: Needs, fitting: frozenset[int], positions: Sequence[int], kind: str
    ) -> tuple[int, ...] | None:
        for position in positions:
            shelves = self._shelves.get(position, {})
            domains = {
                self._nodes[index].domains[kind]
                for number in fitting.intersection(shelves)
                for index in shelves[number].nodes
                if kind in self._nodes[index].domains
            }
            for domain in sorted(domains):
                found = self._place_all(needs, fitting, positions, only=partial(self._within, kind, domain))
                if found is not None:
                    return found
        return None

    def _place_all(
        self,
        needs: Needs,
        fitting: frozenset[int],
        positions: Sequence[int],
        *,
        spread: str | None = None,
        only: Callable[[int], bool] | None = None,
    ) -> tuple[int, ...] | None:
        chosen: dict[int, int] = {}
        used: set[str] = set()
        for number in sorted(range(len(needs)), key=lambda n: -needs[n].least if needs[n].primary == "gpu" else 0):
            index = None
            if spread and used:
                index = self._best(needs[number], fitting, positions, lambda i: self._domain(i, spread) not in used)
            if index is None:
                index = self._best(needs[number], fitting, positions, only)
            if index is None:
                self.put_back(list(chosen.values()), tuple(needs[placed] for placed in chosen))
                self._searched.clear()
                return None
            self.take(index, needs[number])
            chosen[number] = index
            if spread:
                used.add(self._domain(index, spread))
        return tuple(chosen[number] for number in range(len(needs)))

    def _within(self, kind: str, domain: str, index: int) -> bool:
        return self._nodes[index].domains.get(kind) == domain

    def _domain(self, index: int, kind: str) -> str:
        return self._nodes[index].domains.get(kind, self._nodes[index].name)

    def _best(
        self, need: Need, fitting: frozenset[int], positions: Sequence[int], only: Callable[[int], bool] | None
    ) -> int | None:
        """The node at the first of ``positions`` that has room; what was found full is not searched again."""
        request = (need, fitting, positions[0], positions[-1])
        begin = place = self._searched.get(request, 0)
        best: tuple[int, int] | None = None
        for place in range(begin, len(positions)):
            for shelf in self._shelves_of(positions[place], fitting):
                found = shelf.tightest.get(need) if only is None else None
                if found is None:
                    found = self._tightest(need, shelf, only)
                if found is not None and (best is None or found < best):
                    best = found
                    if found[0] == need.least:
                        break
            if best is not None:
                break
        else:
            place = len(positions)
        if only is None and place != begin:
            self._searched[request] = place
        return best[1] if best is not None else None

    def _shelves_of(self, position: int, fitting: frozenset[int]) -> list[_Shelf]:
        found = self._fitting.get((position, fitting))
        if found is None:
            shelves = self._shelves.get(position, _NOTHING).items()
            found = self._fitting[position, fitting] = [shelf for number, shelf in shelves if number in fitting]
        return found

    def _tightest(self, need: Need, shelf: _Shelf, only: Callable[[int], bool] | None) -> tuple[int, int] | None:
        free, is_open, primary, least = self.free, self._open, need.primary, need.least
        buckets = shelf.by_amount.get(primary)
        if buckets is None:
            buckets = self._sorted_out(shelf, primary)
        for amount in sorted(buckets):
            if amount < least:
                continue
            heap = buckets[amount]
            while heap:
                index = heap[0]
                if is_open[index] and _bucket(primary, free[index][primary]) == amount:
                    break
                heappop(heap)
            else:
                del buckets[amount]
                continue
            if fits(need, free[index]) and (only is None or only(index)):
                break
            index = next((n for n in sorted(set(heap)) if self._takes(n, need, amount) and (not only or only(n))), -1)
            if index >= 0:
                break
        else:
            return None
        if only is None:
            shelf.tightest[need] = (amount, index)
        return amount, index

    def _takes(self, index: int, need: Need, amount: int) -> bool:
        here = self.free[index]
        return bool(self._open[index]) and _bucket(need.primary, here[need.primary]) == amount and fits(need, here)

    def _sorted_out(self, shelf: _Shelf, primary: int) -> dict[int, list[int]]:
        buckets: dict[int, list[int]] = {}
        for index in shelf.nodes:
            if self._open[index]:
                _enter(buckets, primary, self.free[index][primary], index)
        shelf.by_amount[primary] = buckets
        return buckets

    def refusals(self, needs: Needs, shape: Shape, positions: Collection[int], *, restore: bool) -> list[str]:
        """Why nothing fits, the most frequent reason first: ``no_room:gpu 4 of 8 (3 nodes)``."""
        reasons: Counter[str] = Counter()
        for index in range(len(self._nodes)):
            if not self._open[index] or self.position[index] not in positions:
                continue
            reason = self._classes.refusal(shape, self._classes.of[index], restore=restore)
            for need in needs:
                reason = reason or missing(need, self.free[index])
            reasons[reason or "no_room:the gang does not fit as a whole"] += 1
        return [
            f"{reason} ({number} node{'s' if number > 1 else ''})"
            for reason, number in sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
        ]
