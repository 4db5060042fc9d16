# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where workloads land: on nodes whose facts match, with room for every resource, gangs all or none.

Among the nodes that fit, those upgraded last come first (a moved workload then moves once), then the tightest fit,
then the class of node and the node that come first in the snapshot. The outcome depends on nothing else.

Private to this collection: may change in any release.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Callable

from ..fleet import Facts, Node, Resources, Workload
from . import compatibility

Needs = tuple[Resources, ...]


@dataclass(frozen=True)
class Shape:
    """What a workload asks of a node besides room; workloads of one shape fit the same classes of nodes."""

    key: Facts
    gpu_model: str | None
    requires: tuple[tuple[str, tuple[str, ...]], ...]
    tolerates: tuple[str, ...]


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
                number
                for number in self.startable(shape)
                if not compatibility.explain(shape.key, self.facts[number], waived=self.waived, scope="node")
            )
        return self._restore[shape]

    def startable(self, shape: Shape) -> frozenset[int]:
        """Classes on which a workload of this shape may be started from nothing."""
        if shape not in self._start:
            self._start[shape] = frozenset(n for n, node in enumerate(self.sample) if _admission(shape, node) is None)
        return self._start[shape]

    def refusal(self, shape: Shape, number: int, *, restore: bool) -> str | None:
        """Why a shape does not fit a class, or None."""
        reason = _admission(shape, self.sample[number])
        if reason is None and restore:
            found = compatibility.explain(shape.key, self.facts[number], waived=self.waived, scope="node")
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
        compatibility.key_of(workload.facts, compatibility.offered(node)), node.gpu_model, requires, workload.tolerates
    )


def missing(need: Resources, free: Resources) -> str | None:
    """``no_room:gpu 4 of 8`` when 8 are needed and 4 are free; None when everything fits."""
    for name, amount in need.items():
        if free.get(name, 0) < amount:
            return f"no_room:{name} {free.get(name, 0)} of {amount}"
    return None


def _primary(need: Resources) -> str:
    if need.get("gpu"):
        return "gpu"
    return next((name for name in need if name.startswith("mig-") and need[name]), "cpu")


def _bucket(resource: str, amount: int) -> int:
    return amount.bit_length() if resource == "cpu" else amount


def _request(needs: Needs, fitting: frozenset[int], positions: Sequence[int], together: str | None) -> object:
    """What :meth:`Rooms.place` was asked for: asked again before room grows, it is refused again."""
    return fitting, positions[0], positions[-1], together, tuple([tuple(need.items()) for need in needs])


class Rooms:
    """Free resources of every node while a plan is played, searchable by class and position.

    A node's position is the number of its batch; ``close`` takes a node out of the search and ``open`` puts it back.
    """

    def __init__(self, nodes: Sequence[Node], free: Sequence[Resources], classes: Classes, position: list[int]) -> None:
        self._nodes = nodes
        self._classes = classes
        self.free: list[Resources] = list(free)
        self.position = position
        self._own: list[dict[str, int] | None] = [None] * len(nodes)
        self._open = bytearray(len(nodes))
        self._at: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._classes_at: dict[int, list[int]] = {}
        self._index: dict[tuple[int, int], dict[str, dict[int, list[int]]]] = {}
        self._hopeless: set[object] = set()

    def open(self, indexes: Iterable[int]) -> None:
        for index in indexes:
            self._open[index] = 1
            where = (self._classes.of[index], self.position[index])
            if where not in self._at:
                self._classes_at.setdefault(where[1], []).append(where[0])
            self._at[where].append(index)
            self._index.pop(where, None)
        self._hopeless.clear()

    def close(self, indexes: Iterable[int]) -> None:
        for index in indexes:
            self._open[index] = 0

    def hide(self, indexes: Iterable[int]) -> list[int]:
        """Close the open ones among ``indexes`` for a while; :meth:`show` what this returns afterwards."""
        hidden = [index for index in dict.fromkeys(indexes) if self._open[index]]
        self.close(hidden)
        return hidden

    def show(self, hidden: Iterable[int]) -> None:
        for index in hidden:
            self._open[index] = 1
            self._index.pop((self._classes.of[index], self.position[index]), None)
        self._hopeless.clear()

    def take(self, index: int, need: Resources) -> None:
        self._change(index, need, -1)

    def give(self, index: int, need: Resources) -> None:
        self._change(index, need, 1)
        if self._open[index]:
            self._hopeless.clear()

    def put_back(self, found: Sequence[int], needs: Needs) -> None:
        """Undo the last :meth:`place`: nothing became possible that was not before it."""
        for index, need in zip(found, needs):
            self._change(index, need, 1)

    def _change(self, index: int, need: Resources, sign: int) -> None:
        free = self._own[index]
        if free is None:
            free = self._own[index] = self.free[index] = dict(self.free[index])
        for name, amount in need.items():
            free[name] = free.get(name, 0) + sign * amount
        if self._open[index]:
            indexed = self._index.get((self._classes.of[index], self.position[index]))
            for name, buckets in indexed.items() if indexed else ():
                if name in need:
                    amount = _bucket(name, free[name])
                    heap = buckets.get(amount)
                    if heap is None:
                        buckets[amount] = [index]
                    else:
                        heappush(heap, index)

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
        hopeless = self._hopeless
        if hopeless and _request(needs, fitting, positions, together) in hopeless:
            return None
        found = (
            self._place_together(needs, fitting, positions, together)
            if together and len(needs) > 1
            else self._place_all(needs, fitting, positions, spread=spread)
        )
        if found is None:
            hopeless.add(_request(needs, fitting, positions, together))
        return found

    def claim(self, nodes: Sequence[int], needs: Needs, fitting: frozenset[int]) -> tuple[int, ...] | None:
        """Take room for ``needs`` on exactly these nodes, if all are open, fit and have it; else None."""
        if len(nodes) != len(needs) or len(set(nodes)) != len(nodes):
            return None
        for node, need in zip(nodes, needs):
            if not self._open[node] or self._classes.of[node] not in fitting or missing(need, self.free[node]):
                return None
        for node, need in zip(nodes, needs):
            self.take(node, need)
        return tuple(nodes)

    def _place_together(
        self, needs: Needs, fitting: frozenset[int], positions: Sequence[int], kind: str
    ) -> tuple[int, ...] | None:
        for position in positions:
            domains: dict[str, None] = {}
            for number in sorted(fitting):
                for index in self._at.get((number, position), ()):
                    if kind in self._nodes[index].domains:
                        domains.setdefault(self._nodes[index].domains[kind])
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
        if len(needs) == 1 and only is None:
            index = self._best(needs[0], fitting, positions, None)
            if index is None:
                return None
            self.take(index, needs[0])
            return (index,)
        chosen: dict[int, int] = {}
        used: set[str] = set()
        for number in sorted(range(len(needs)), key=lambda n: (-needs[n].get("gpu", 0), n)):
            index = None
            if spread and used:
                index = self._best(needs[number], fitting, positions, lambda i: self._domain(i, spread) not in used)
            if index is None:
                index = self._best(needs[number], fitting, positions, only)
            if index is None:
                self.put_back(list(chosen.values()), tuple(needs[placed] for placed in chosen))
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
        self, need: Resources, fitting: frozenset[int], positions: Sequence[int], only: Callable[[int], bool] | None
    ) -> int | None:
        primary = _primary(need)
        least = _bucket(primary, need.get(primary, 0))
        classes_at, index = self._classes_at, self._index
        for position in positions:
            best: tuple[int, int] | None = None
            for number in classes_at.get(position, ()):
                if number not in fitting:
                    continue
                indexed = index.get((number, position))
                buckets = indexed.get(primary) if indexed is not None else None
                if buckets is None:
                    buckets = self._indexed(number, position, primary)
                found = self._tightest(need, primary, least, buckets, only) if buckets else None
                if found is not None and (best is None or found < best):
                    best = found
                    if found[0] == least:
                        break
            if best is not None:
                return best[1]
        return None

    def _tightest(
        self,
        need: Resources,
        primary: str,
        least: int,
        buckets: dict[int, list[int]],
        only: Callable[[int], bool] | None,
    ) -> tuple[int, int] | None:
        free, is_open, by_bit = self.free, self._open, primary == "cpu"
        for amount in sorted(buckets):
            if amount < least:
                continue
            heap = buckets[amount]
            while heap:
                have = free[heap[0]].get(primary, 0)
                if is_open[heap[0]] and (have.bit_length() if by_bit else have) == amount:
                    break
                heappop(heap)
            else:
                del buckets[amount]
                continue
            if missing(need, free[heap[0]]) is None and (only is None or only(heap[0])):
                return amount, heap[0]
            for index in sorted(set(heap)):
                if not is_open[index] or _bucket(primary, free[index].get(primary, 0)) != amount:
                    continue
                if missing(need, free[index]) is None and (only is None or only(index)):
                    return amount, index
        return None

    def _indexed(self, number: int, position: int, primary: str) -> dict[int, list[int]]:
        buckets: dict[int, list[int]] = {}
        for index in self._at[(number, position)]:
            if self._open[index]:
                buckets.setdefault(_bucket(primary, self.free[index].get(primary, 0)), []).append(index)
        for heap in buckets.values():
            heapify(heap)
        self._index.setdefault((number, position), {})[primary] = buckets
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
