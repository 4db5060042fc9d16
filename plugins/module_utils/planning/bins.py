# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Groups of nodes that share a batch, and batches being filled with them within the policy's limits.

Private to this collection: may change in any release.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Optional

from ..fleet import Demand
from .model import Model, is_due, joined, out_of_service
from .policy import BadPolicy, batch_limits, most_down

Use = tuple[str, Optional[str]]
"""What a limit counts: nodes of a domain (its kind and name); ``budget``, ``gpus`` or ``stand_in`` and the name of the
budget, the GPU model, or the work that is started on another node meanwhile."""


class Group:
    """Nodes that share a batch: a domain that is kept together, or one node. ``uses`` counts against batch limits;
    ``due`` says that it comes first, ``late`` that work on it ends, ``classes`` of which kinds its nodes are."""

    def __init__(self, model: Model, nodes: Sequence[int], limits: Mapping[Use, float]) -> None:
        self.nodes = tuple(nodes)
        self.items = tuple(model.residents[nodes[0]])
        if len(nodes) > 1:
            self.items = tuple(dict.fromkeys(item for node in nodes for item in model.residents[node]))
        self.gpu_models = {model.nodes[node].gpu_model for node in nodes}
        self.free = sum([model.nodes[node].free.get("gpu", 0) for node in nodes])
        self.cost = sum([model.items[item].early for item in self.items])
        self.late = any(model.items[item].end < inf for item in self.items)
        self.due = any(is_due(model.nodes[node]) for node in nodes)
        self.classes = {model.classes.of[node] for node in nodes}
        self.uses: dict[Use, int] = {}
        for node in nodes if limits else ():
            self._use(("gpus", model.nodes[node].gpu_model), model.nodes[node].gpus, limits)
            for domain in model.nodes[node].domains.items():
                self._use(domain, 1, limits)
        for item in self.items:
            for name in model.items[item].kind.budgets:
                self._use(("budget", name), 1, limits)
        for node in nodes if model.apart else ():
            for item in model.apart.get(node, ()):
                self._use(("stand_in", model.items[item].name), 1, limits)

    def _use(self, use: Use, amount: int, limits: Mapping[Use, float]) -> None:
        if use in limits:
            self.uses[use] = self.uses.get(use, 0) + amount


def use_limits(model: Model, unused: frozenset[int] = frozenset()) -> dict[Use, float]:
    """What a batch may use at most.

    GPUs of a model that may be down at once follow from ``max_pending``: what waits already and what free GPUs absorb.
    """
    limits: dict[Use, float] = {("budget", name): allowed for name, allowed in model.snapshot.budgets.items()}
    limits.update((("stand_in", model.items[item].name), 1.0) for items in model.apart.values() for item in items)
    for kind, most in model.policy.max_per_domain:
        limits.update(((kind, node.domains[kind]), most) for node in model.nodes if kind in node.domains)
    for name, bound in model.policy.max_pending:
        demand = model.snapshot.queue.get(name, Demand())
        waiting = demand.gpus + demand.arrivals_per_hour * model.slot / 3600
        free = sum(
            node.free.get("gpu", 0)
            for number, node in enumerate(model.nodes)
            if node.gpu_model == name and node.schedulable and not node.cordoned_by and number not in unused
        )
        limits["gpus", name] = bound - waiting + free
    return limits


def exceeded(group: Group, used: Mapping[Use, float], limits: Mapping[Use, float], beside: bool) -> Use | None:
    """The limit that a batch would exceed with this group, if it uses so much already. Without others ``beside`` it, a
    group may exceed a budget or a domain limit: it cannot be divided."""
    for use, amount in group.uses.items():
        if used.get(use, 0) + amount > limits[use] and (beside or use[0] == "gpus"):
            return use
    return None


def out_already(model: Model) -> int:
    """Nodes out of service that are not to be upgraded."""
    moving = set(model.moving)
    return sum(out_of_service(node) for number, node in enumerate(model.nodes) if number not in moving)


class Bins:
    """Batches being filled; ``first`` is the canary's batch, which takes nothing else.

    ``total`` is the number of nodes of which a percentage in the policy is taken.

    :raises BadPolicy: if the canary's batch exceeds a limit.
    """

    def __init__(self, model: Model, first: Sequence[Group], uses: Mapping[Use, float], total: int) -> None:
        self.model = model
        policy = model.policy
        out = out_already(model)
        self.limits = batch_limits(policy, total, out)
        fresh = sum(not is_due(model.nodes[node]) for group in first for node in group.nodes)
        allowed = most_down(policy, total, out)
        if fresh > allowed:
            raise BadPolicy(
                f"the canary batch has {fresh} nodes and max_unavailable allows {allowed} down: "
                "choose fewer canaries or raise max_unavailable"
            )
        self.use_limits = uses
        self.first = bool(first)
        self.canaries = frozenset(first)
        self.batches: list[list[Group]] = []
        self.sizes: list[int] = []
        self.used: list[dict[Use, int]] = []
        self.where: dict[Group, int] = {}
        if first:
            self.append()
            for group in first:
                over = None if group.due else self._over(0, group)
                if over is not None:
                    raise BadPolicy(self._too_large(group, 0) if over[0] == "gpus" else self._too_many(group, over))
                self.add(0, group)

    def limit(self, number: int) -> int:
        return self.limits[min(number - self.first, len(self.limits) - 1)]

    def append(self) -> None:
        self.batches.append([])
        self.sizes.append(0)
        self.used.append({})

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
        if self.first and number == 0:
            return False
        return self.sizes[number] + len(group.nodes) <= self.limit(number) and self._over(number, group) is None

    def exchanges(self, group: Group) -> bool:
        """Whether the canary's batch takes a group in exchange for one that it has just lost."""
        return self._over(0, group) is None

    def _over(self, number: int, group: Group) -> Use | None:
        return exceeded(group, self.used[number], self.use_limits, bool(self.sizes[number]))

    def _too_many(self, group: Group, over: Use) -> str:
        limit = f"budget {over[1]}" if over[0] == "budget" else f"max_per_domain of {over[0]} {over[1]}"
        if over[0] == "stand_in":
            return (
                f"the canaries are both the node of {over[1]} and the one on which it is started meanwhile: choose one"
            )
        return (
            f"the canaries exceed the {limit} with {self.model.nodes[group.nodes[0]].name}: it allows "
            f"{self.use_limits[over]:g} at a time; choose fewer canaries, or others"
        )

    def add(self, number: int, group: Group) -> None:
        self.batches[number].append(group)
        self.sizes[number] += len(group.nodes)
        used = self.used[number]
        for use, amount in group.uses.items():
            used[use] = used.get(use, 0) + amount
        self.where[group] = number

    def remove(self, number: int, group: Group) -> None:
        self.batches[number].remove(group)
        self.sizes[number] -= len(group.nodes)
        for use, amount in group.uses.items():
            self.used[number][use] -= amount

    def rotate(self, number: int, to: int) -> bool:
        """Put a batch where ``to`` is, and those in between one place nearer to where it was; nothing, and False, if
        one of them would be too large for its new number."""
        low, high = sorted((number, to))
        order = list(range(low, high + 1))
        order.insert(to - low, order.pop(number - low))
        if any(self.sizes[old] > self.limit(low + place) for place, old in enumerate(order)):
            return False
        self.batches[low : high + 1] = [self.batches[old] for old in order]
        self.sizes[low : high + 1] = [self.sizes[old] for old in order]
        self.used[low : high + 1] = [self.used[old] for old in order]
        for place in range(low, high + 1):
            self.where.update(dict.fromkeys(self.batches[place], place))
        return True

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
        kinds = [kind for kind in self.model.policy.keep_together if kind in node.domains]
        domain = " and ".join(f"{kind} {node.domains[kind]}" for kind in kinds)
        return (
            f"the {len(group.nodes)} nodes of {domain} are upgraded together and a batch holds {limit}: raise "
            f"batch_size or max_unavailable, or leave {' and '.join(kinds)} out of keep_together to let it be split"
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
        return numbers_of(self.batches)


def numbers_of(batches: Iterable[Sequence[Group]]) -> list[list[int]]:
    """Node numbers by batch."""
    return [sorted([node for group in batch for node in group.nodes]) for batch in batches if batch]


def together(model: Model, nodes: Iterable[int]) -> list[list[int]]:
    """Nodes by the domains that are kept together, in the order of each one's first node."""
    return joined(model.nodes, model.policy.keep_together, nodes)


def grouped(model: Model, uses: Mapping[Use, float]) -> list[Group]:
    """The nodes to upgrade as groups, in the order of the snapshot."""
    return [Group(model, nodes, uses) for nodes in together(model, model.moving)]
