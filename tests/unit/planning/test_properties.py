# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What every plan must keep, for fleets of any kind."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from math import inf

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from ansible_collections.gpufleet.driver.plugins.module_utils.fleet import Demand, Member, Snapshot, Workload
from ansible_collections.gpufleet.driver.plugins.module_utils.planning import compatibility, plan, review
from ansible_collections.gpufleet.driver.plugins.module_utils.planning.model import Model
from ansible_collections.gpufleet.driver.plugins.module_utils.planning.placement import Need
from ansible_collections.gpufleet.driver.plugins.module_utils.planning.policy import Policy

from .fleets import FACTS, NEW, OLD, node

MANY = settings(max_examples=100, deadline=None, derandomize=True)
MAY = (("move", "wait", "restart"), ("wait", "restart"), ("move", "restart"), ("restart",), ("move",), ("protect",))


def odd_fleet(seed: int, count: int, most: int) -> Snapshot:
    """``count`` nodes and up to ``most`` workloads: two models, kernels, MIG, gangs, budgets, cordons, taints."""
    dice = random.Random(seed)
    nodes = []
    for number in range(count):
        other = tuple((k, "6.8.0-60-generic" if k == "kernel" else v) for k, v in FACTS)
        nodes.append(
            node(
                f"n{number}",
                gpu_model=dice.choice(("H100", "H100", "H100", "A100")),
                loaded=dice.choice((OLD, OLD, OLD, OLD, NEW)),
                installed=None,
                free={"gpu": 8, "cpu": 64, "mig-1g.10gb": dice.choice((0, 0, 7))},
                facts=dice.choice((FACTS, other)),
                cordoned_by=dice.choice((None,) * 8 + ("somebody",)),
                domains={"rack": dice.choice("ab")},
                taints=dice.choice(((),) * 6 + (("dedicated",),)),
                labels={"pool": dice.choice("xy")},
            )
        )
    free = [dict(each.free) for each in nodes]
    works = []
    for number in range(most):
        need = {dice.choice(("gpu", "gpu", "gpu", "mig-1g.10gb")): dice.choice((1, 2, 4)), "cpu": dice.choice((4, 16))}
        size = dice.choice((1, 1, 1, 2, 3))
        places = [n for n in range(len(nodes)) if all(free[n].get(name, 0) >= amount for name, amount in need.items())]
        if len(places) < size:
            continue
        members = []
        for place in dice.sample(places, size):
            for name, amount in need.items():
                free[place][name] -= amount
            members.append(Member(nodes[place].name, need))
        works.append(
            Workload(
                f"w{number}",
                tuple(members),
                gang=dice.random() < 0.7,
                may=frozenset(dice.choice((*MAY, *MAY[:1] * 8))),
                backends=dice.choice((("cuda_criu",),) * 4 + (("hook",), ())),
                remaining=dice.choice((None, dice.randint(1, 5000), dice.randint(1, 5000))),
                at_risk=dice.randint(0, 7200),
                start_cost=dice.randint(0, 600),
                priority=dice.choice((0, 0, 5)),
                budgets=dice.choice(((), (), ("pdb",))),
                requires=dice.choice(({}, {}, {}, {}, {"pool": ("x",)})),
                tolerates=dice.choice(((), ("dedicated",))),
                together=dice.choice((None, "rack")) if size > 1 else None,
            )
        )
    queue = dice.choice(({}, {"H100": Demand(8.0, 0.0, 3600.0)}))
    made = tuple(replace(each, free=left) for each, left in zip(nodes, free, strict=True))
    return Snapshot(made, tuple(works), budgets={"pdb": dice.choice((0, 1, 2))}, queue=queue)


fleets = st.builds(odd_fleet, st.integers(0, 10**6), st.integers(2, 8), st.integers(0, 10))

policies = st.builds(
    Policy,
    version=st.just(NEW),
    canary=st.sampled_from((0, 1, 2)),
    batch_size=st.sampled_from(((1,), (2,), (1, 3), ("50%",))),
    max_wait=st.sampled_from((0.0, 900.0)),
    max_per_domain=st.sampled_from(((), (("rack", 1),))),
)


def occupancy(snapshot: Snapshot, made: plan.Plan) -> list[tuple[str, list[dict[str, int]]]]:
    """What is free on every node after each batch's evacuation and after its upgrade, if no job ended early."""
    model = Model(snapshot, Policy(NEW), {})
    free = [dict(each.free) for each in model.nodes]
    where = {item.name: item.nodes for item in model.items}
    needs = {item.name: item.needs for item in model.items}
    ends = {item.name: item.end for item in model.items}
    gone: set[str] = set()
    out = []
    for batch in made.batches:
        for item in model.items:
            if ends[item.name] <= batch.starts and item.name not in gone:
                gone.add(item.name)
                _shift(free, where[item.name], needs[item.name], 1)
        for fate in batch.fates:
            if fate.fate in ("move", "cold_start"):
                _shift(free, where[fate.workload], needs[fate.workload], 1)
                where[fate.workload] = tuple(model.number[name] for name in fate.to)
                _shift(free, where[fate.workload], needs[fate.workload], -1)
                pause = next(item.pause for item in model.items if item.name == fate.workload)
                ends[fate.workload] = inf if fate.fate == "cold_start" else ends[fate.workload] + pause
            elif fate.fate == "wait":
                gone.add(fate.workload)
                _shift(free, where[fate.workload], needs[fate.workload], 1)
        out.append((batch.name, [dict(each) for each in free]))
    return out


def _shift(free: list[dict[str, int]], nodes: tuple[int, ...], needs: tuple[Need, ...], sign: int) -> None:
    for index, need in zip(nodes, needs, strict=True):
        for name, amount in need.amounts:
            free[index][name] = free[index].get(name, 0) + sign * amount


@MANY
@given(fleets, policies)
def test_every_plan(snapshot: Snapshot, policy: Policy) -> None:
    made = plan.make(snapshot, policy)
    each_node_is_in_exactly_one_batch_or_left_out_with_a_reason(snapshot, made)
    a_workload_moves_at_most_once_and_only_to_matching_nodes_upgraded_later(snapshot, made)
    no_resource_is_ever_exceeded(snapshot, made)
    batches_keep_to_their_sizes_and_domain_limits(snapshot, policy, made)


def each_node_is_in_exactly_one_batch_or_left_out_with_a_reason(snapshot: Snapshot, made: plan.Plan) -> None:
    left_out = dict(made.skipped) | dict(made.blocked)
    seen = Counter(made.order)
    for each in snapshot.nodes:
        assert seen[each.name] + (each.name in left_out) == 1
    assert all(left_out.values())


def a_workload_moves_at_most_once_and_only_to_matching_nodes_upgraded_later(
    snapshot: Snapshot, made: plan.Plan
) -> None:
    turn = {name: number for number, batch in enumerate(made.batches) for name in batch.nodes}
    nodes = {each.name: each for each in snapshot.nodes}
    works = {work.name: work for work in snapshot.workloads}
    moves: Counter[str] = Counter()
    crowded_out: set[str] = set()
    for number, batch in enumerate(made.batches):
        shared = [
            f.workload
            for f in batch.fates
            if f.fate in ("move", "cold_start") and works[f.workload.split("/")[0]].budgets
        ]
        if len(shared) > snapshot.budgets["pdb"]:
            crowded_out.update(shared)
        for fate in batch.fates:
            work = works[fate.workload.split("/")[0]]
            if fate.fate == "move":
                moves[fate.workload] += 1
                assert work.backends and "move" in work.may
                for source, target in zip(fate.nodes, fate.to, strict=True):
                    upgraded = turn.get(target, -1 if nodes[target].loaded == NEW else len(made.batches)) < number
                    assert turn.get(target, len(made.batches)) > number or upgraded
                    assert nodes[target].cordoned_by is None
                    key = compatibility.key_of(work.facts, compatibility.offered(nodes[source]))
                    there = {**dict(compatibility.offered(nodes[target])), **({"driver": NEW} if upgraded else {})}
                    waived = ("driver", "driver_flavour") if work.backends == ("hook",) else ()
                    assert not compatibility.explain(key, there, waived=waived, scope="node")
                    assert set(nodes[target].taints) <= set(work.tolerates)
                    assert all(nodes[target].labels[label] in values for label, values in work.requires.items())
                if work.together:
                    assert len({nodes[name].domains["rack"] for name in fate.to}) == 1 or len(fate.to) == 1
            if fate.fate == "cold_start":
                assert "restart" in work.may
                for target in fate.to:
                    ready = turn.get(target, -1) < number or target in fate.nodes or moves[fate.workload]
                    assert ready or nodes[target].loaded == NEW or fate.workload in crowded_out
            if fate.fate in ("move", "cold_start"):
                assert "protect" not in work.may
                assert not work.budgets or snapshot.budgets["pdb"] > 0
    event("moves" if moves else "no moves")
    assert all(count == 1 for count in moves.values())


def no_resource_is_ever_exceeded(snapshot: Snapshot, made: plan.Plan) -> None:
    """Which is also: old-driver room never falls below what is saved and waiting for it."""
    for batch, free in occupancy(snapshot, made):
        for each, left in zip(snapshot.nodes, free, strict=True):
            assert min(left.values()) >= 0, f"{each.name} after {batch}: {left}"


@settings(MANY, max_examples=20)
@given(fleets, policies)
def test_the_same_input_gives_the_same_plan(snapshot: Snapshot, policy: Policy) -> None:
    assert plan.make(snapshot, policy) == plan.make(snapshot, policy)


@settings(MANY, max_examples=40)
@given(fleets, policies, st.randoms(use_true_random=False))
def test_the_order_in_which_a_fleet_is_listed_does_not_matter(
    snapshot: Snapshot, policy: Policy, dice: random.Random
) -> None:
    nodes, works = (dice.sample(each, len(each)) for each in (snapshot.nodes, snapshot.workloads))
    shuffled = replace(snapshot, nodes=tuple(nodes), workloads=tuple(works))
    made = plan.make(snapshot, policy)
    assert plan.make(shuffled, policy) == made
    again, found = review.review(made.as_dict(), shuffled, policy)
    assert (again, found) == review.review(made.as_dict(), snapshot, policy)


def batches_keep_to_their_sizes_and_domain_limits(snapshot: Snapshot, policy: Policy, made: plan.Plan) -> None:
    racks = {each.name: each.domains["rack"] for each in snapshot.nodes}
    for number, batch in enumerate(made.batches[bool(made.canary) :]):
        sizes = [max(1, len(made.order) // 2) if size == "50%" else int(size) for size in policy.batch_size]
        assert len(batch.nodes) <= sizes[min(number, len(sizes) - 1)]
        if policy.max_per_domain:
            assert max(Counter(racks[name] for name in batch.nodes).values()) == 1


@settings(MANY, max_examples=40)
@given(
    fleets,
    st.sampled_from((1, 2)),
    st.booleans(),
    st.lists(st.sampled_from(("H100", "A100")), min_size=1, max_size=2),
)
def test_empty_nodes_more_never_make_the_plan_worse(
    snapshot: Snapshot, size: int, has_canary: bool, models: list[str]
) -> None:
    """With the same canary: a number of canaries would take the empty nodes instead."""
    policy = Policy(NEW, batch_size=(size,), canary=int(has_canary), max_wait=900.0)
    before = plan.make(snapshot, policy)
    policy = replace(policy, canary=before.canary or 0)
    before = plan.make(snapshot, policy)
    room = {"gpu": 8, "cpu": 64, "mig-1g.10gb": 7}
    more = [
        node(f"extra{n}", gpu_model=model, free=room, domains={"rack": "a"}, labels={"pool": "x"})
        for n, model in enumerate(models)
    ]
    after = plan.make(replace(snapshot, nodes=(*snapshot.nodes, *more)), policy)
    assert dict(after.blocked).keys() <= dict(before.blocked).keys()
    if len(after.blocked) == len(before.blocked):
        assert after.total_lost <= before.total_lost + 1e-6


@pytest.mark.parametrize("seed", range(3))
def test_unfinished_nodes_come_first(seed: int) -> None:
    nodes = tuple(node(f"n{number}", unfinished=number == seed + 2) for number in range(6))
    made = plan.make(Snapshot(nodes), Policy(NEW, batch_size=(2,)))
    assert made.batches[0].nodes == (f"n{seed + 2}",)
