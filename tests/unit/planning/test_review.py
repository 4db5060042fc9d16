# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.fleet import Demand, Snapshot
from ansible_collections.gpufleet.driver.plugins.module_utils.planning import plan, review
from ansible_collections.gpufleet.driver.plugins.module_utils.planning.policy import BadPolicy, Policy

from .fleets import NEW, fate_of, fleet_of, workload

POLICY = Policy(NEW, batch_size=(2,))


def test_an_earlier_plan_that_still_holds_is_safe() -> None:
    fleet = fleet_of(5, workload("w", "n4", at_risk=900.0))
    first = plan.make(fleet, POLICY)
    done = tuple(replace(n, loaded=NEW, installed=NEW) if n.name in first.canary else n for n in fleet.nodes)
    again, found = review.review(first.as_dict(), replace(fleet, nodes=done), POLICY)
    assert found == review.Review(True, "batch 1", (), ())
    assert again.order == first.order[1:]


@pytest.mark.parametrize(
    ("change", "reason", "told"),
    [
        (lambda n: replace(n, cordoned_by="somebody"), "cordoned by somebody", "is left out now: cordoned by somebody"),
        (None, "has left the fleet", "has left the fleet"),
    ],
)
def test_a_node_that_is_no_longer_fit_is_left_out_with_its_work(change: Any, reason: str, told: str) -> None:
    fleet = fleet_of(2, workload("untouched", "n0"), workload("w", "n1"))
    first = plan.make(fleet, Policy(NEW, batch_size=(2,), canary=0))
    nodes = tuple(change(n) if n.name == "n0" else n for n in fleet.nodes if change or n.name != "n0")
    works = tuple(work for work in fleet.workloads if change or work.name != "untouched")
    again, found = review.review(first.as_dict(), Snapshot(nodes, works), POLICY)
    assert (found.safe, found.next_batch, found.left_out) == (True, "batch 1", (("n0", reason),))
    assert found.changes[0] == f"n0 {told}"
    assert "n0" not in again.order
    assert [fate.workload for batch in again.batches for fate in batch.fates] == ["w"]


def test_a_batch_of_which_nothing_is_left_is_passed_over() -> None:
    first = plan.make(fleet_of(3), Policy(NEW, batch_size=(1,), canary=0))
    dummy, found = review.review(first.as_dict(), Snapshot(fleet_of(3).nodes[1:]), POLICY)
    assert (found.safe, found.next_batch, found.left_out) == (True, "batch 1", (("n0", "has left the fleet"),))


@pytest.mark.parametrize(
    ("values", "policy", "reason"),
    [
        ({}, {"canary": 1}, "n0 is left out now: cordoned by me, and no canary is left of H100"),
        ({}, {"canary": 2}, None),
        (
            {"domains": {"nvlink": "rack-1"}},
            {"canary": 0},
            "n0 is left out now: cordoned by me, and nvlink rack-1 is upgraded as a whole: n1, n2 with it",
        ),
        ({"domains": {"nvlink": "rack-1"}}, {"canary": 0, "keep_together": ()}, None),
    ],
)
def test_a_batch_does_not_go_on_without_a_node_that_it_needs(
    values: dict[str, Any], policy: dict[str, Any], reason: str | None
) -> None:
    fleet = fleet_of(3, **values)
    asked = Policy(NEW, batch_size=(3,), **policy)
    first = plan.make(fleet, asked)
    nodes = (replace(fleet.nodes[0], cordoned_by="me"), *fleet.nodes[1:])
    dummy, found = review.review(first.as_dict(), replace(fleet, nodes=nodes), asked)
    assert found.reasons == ((reason,) if reason else ())
    assert found.left_out == (("n0", "cordoned by me"),)


def test_a_node_that_could_not_be_emptied_still_takes_work() -> None:
    works = (
        workload("w", "n0", gpus=4, may=frozenset(("move",)), remaining=20000.0),
        workload("stays", "n1", gpus=4, may=frozenset(("protect",))),
    )
    fleet, policy = fleet_of(2, *works, free={"gpu": 4}), Policy(NEW, batch_size=(1,), canary=0)
    first = plan.make(fleet, policy)
    again, found = review.review(first.as_dict(), fleet, policy)
    assert fate_of(first, "w").to == fate_of(again, "w").to == ("n1",)
    assert found == review.Review(True, "batch 1", (), ())


def test_an_earlier_plan_whose_room_is_gone_is_not_safe() -> None:
    work = workload("w", "n0", gpus=8, remaining=1000.0, at_risk=9000.0)
    policy = Policy(NEW, batch_size=(1,), canary=("n0",), max_wait=0.0)
    fleet = fleet_of(3, work)
    first = plan.make(fleet, policy)
    full = tuple(replace(n, free={"gpu": 0}) if n.name != "n0" else n for n in fleet.nodes)
    dummy, found = review.review(first.as_dict(), replace(fleet, nodes=full), policy)
    assert found.reasons == ("w has lost its place to move to",)


@pytest.mark.parametrize(("remaining", "planned"), [(3000.0, "be waited for"), (600.0, "end before")])
def test_work_that_was_to_end_by_itself_is_not_started_cold_unasked(remaining: float, planned: str) -> None:
    work = workload("w", "n1", gpus=8, may=frozenset(("wait", "restart")), remaining=remaining, at_risk=9000.0)
    policy = Policy(NEW, batch_size=(1,), canary=("n0",))
    first = plan.make(fleet_of(2, work), policy)
    assert fate_of(first, "w").fate == {"be waited for": "wait", "end before": "stay"}[planned]
    now = fleet_of(2, replace(work, remaining=None))
    dummy, found = review.review(first.as_dict(), now, policy, {"n0": "upgraded"})
    assert found.reasons == (f"w was to {planned} and would now start cold",)
    again, found = review.review(
        first.as_dict(), fleet_of(2, replace(work, remaining=100.0)), policy, {"n0": "upgraded"}
    )
    assert found.safe and fate_of(again, "w").fate == "wait"


def test_work_that_was_to_end_before_is_waited_for_if_the_turn_comes_sooner() -> None:
    """Started cold it would lose less: six other GPUs stand idle meanwhile, and work queues for them."""
    work = workload("w", "n1", gpus=2, may=frozenset(("wait", "restart")), remaining=600.0)
    fleet = replace(fleet_of(2, work, free={"gpu": 6}), queue={"H100": Demand(16.0)})
    policy = Policy(NEW, batch_size=(1,), canary=("n0",))
    first = plan.make(fleet, policy)
    assert fate_of(first, "w").fate == "stay"
    again, found = review.review(first.as_dict(), fleet, policy, {"n0": "upgraded"})
    assert found.safe and fate_of(again, "w").fate == "wait"
    assert fate_of(plan.make(fleet, replace(policy, canary=("n1",))), "w").fate == "cold_start"


def test_a_batch_larger_than_max_unavailable_is_not_safe() -> None:
    first = plan.make(fleet_of(4), Policy(NEW, batch_size=(4,), canary=0))
    dummy, found = review.review(first.as_dict(), fleet_of(4), Policy(NEW, max_unavailable="25%"))
    assert found.reasons == ("max_unavailable allows 1 nodes out of service, the next batch has 4",)


def test_unfinished_nodes_are_not_more_than_max_unavailable() -> None:
    fleet = fleet_of(4, unfinished=True, schedulable=False)
    policy = Policy(NEW, max_unavailable=1)
    assert review.review(plan.make(fleet, policy).as_dict(), fleet, policy)[1].safe


def test_a_queue_that_grew_beyond_max_pending_is_not_safe() -> None:
    fleet = fleet_of(4, free={"gpu": 0})
    policy = Policy(NEW, canary=0, batch_size=(1,), max_pending=(("H100", 8.0),))
    first = plan.make(fleet, policy)
    assert review.review(first.as_dict(), fleet, policy)[1].safe
    dummy, found = review.review(first.as_dict(), replace(fleet, queue={"H100": Demand(5.0)}), policy)
    assert found.reasons == ("max_pending lets 3 GPUs of H100 be down and the next batch has 8",)


def test_a_budget_that_was_tightened_is_told() -> None:
    works = tuple(workload(f"w{n}", f"n{n}", may=frozenset(("restart",)), budgets=("svc",)) for n in range(2))
    fleet = replace(fleet_of(2, *works), budgets={"svc": 2})
    policy = Policy(NEW, canary=0, batch_size=(2,))
    first = plan.make(fleet, policy)
    told = "budget svc allows 1 at a time and 2 workloads of the next batch share it"
    dummy, found = review.review(first.as_dict(), replace(fleet, budgets={"svc": 1}), policy)
    assert found.changes[0] == told
    assert "w1 may leave its node only when what left before runs again, and no other node has room" in found.reasons[0]
    room = replace(fleet, nodes=(*fleet.nodes, replace(fleet.nodes[0], name="n2", skip="kept")), budgets={"svc": 1})
    dummy, found = review.review(first.as_dict(), room, policy)
    assert found.safe and found.changes == (told,)
    dummy, found = review.review(first.as_dict(), replace(fleet, budgets={"svc": 0}), policy)
    assert "budget svc allows no disruption of w0" in found.reasons[0]


def test_replicas_that_have_lost_their_room_are_not_evicted_beyond_their_budget() -> None:
    works = tuple(workload(f"w{n}", "n0", gpus=4, may=frozenset(("restart",)), budgets=("svc",)) for n in range(2))
    fleet = replace(fleet_of(2, *works), budgets={"svc": 1})
    nodes = (replace(fleet.nodes[0], free={}), fleet.nodes[1])
    first = plan.make(replace(fleet, nodes=nodes), Policy(NEW, canary=("n1",)))
    assert not first.blocked and first.batches[1].nodes == ("n0",)
    full = replace(nodes[1], loaded=NEW, installed=NEW, free={"gpu": 0})
    dummy, found = review.review(first.as_dict(), replace(fleet, nodes=(nodes[0], full)), POLICY, {"n1": "upgraded"})
    assert not found.safe
    assert (
        "w1 cannot be taken off n0: budget svc allows 1 at a time: w1 may leave its node only when" in found.reasons[0]
    )


@pytest.mark.parametrize("change", [{"id": "ffffffffffff"}, {"batches": []}])
def test_a_plan_changed_by_hand_is_refused(change: dict[str, Any]) -> None:
    first = plan.make(fleet_of(3, workload("w", "n1")), POLICY)
    with pytest.raises(BadPolicy, match="the earlier plan's id does not stand for its batches"):
        review.review({**first.as_dict(), **change}, fleet_of(3), POLICY)


def test_an_outcome_that_is_none_is_refused() -> None:
    with pytest.raises(BadPolicy, match=r"outcomes\.n0 is None"):
        review.review(plan.make(fleet_of(3), POLICY).as_dict(), fleet_of(3), POLICY, {"n0": None})  # type: ignore[dict-item]


@pytest.mark.parametrize("outcome", ["rolled_back", "quarantined", "refused", "lost"])
def test_nodes_whose_turn_is_over_do_not_stand_in_the_way(outcome: str) -> None:
    first = plan.make(fleet_of(5), Policy(NEW, batch_size=(2,)))
    outcomes = {first.order[0]: "upgraded", first.order[1]: outcome}
    again, found = review.review(first.as_dict(), fleet_of(5), POLICY, outcomes)
    assert found == review.Review(True, "batch 1", (), ())
    assert again.order == first.order[2:]
    assert (first.order[1], f"{outcome.replace('_', ' ')} in this run") in again.skipped


def test_what_moved_to_a_node_is_not_expected_back_when_its_turn_comes() -> None:
    work = workload("w", "n0", gpus=8, remaining=1000.0, at_risk=9000.0)
    policy = Policy(NEW, batch_size=(1,), canary=("n0",), max_wait=900.0)
    first = plan.make(fleet_of(2, work), policy)
    assert fate_of(first, "w").to == ("n1",)
    moved = replace(work, members=(replace(work.members[0], node="n1"),), remaining=500.0)
    dummy, found = review.review(first.as_dict(), fleet_of(2, moved), policy, {"n0": "upgraded"})
    assert found.safe, found


@pytest.mark.parametrize(
    ("outcome", "most", "reason"),
    [
        ("quarantined", 3, None),
        ("rolled_back", 2, None),
        ("quarantined", 2, "max_unavailable allows 2 nodes out of service, 1 are (n0) and the next batch has 2"),
    ],
)
def test_nodes_that_failed_use_up_max_unavailable(outcome: str, most: int, reason: str | None) -> None:
    policy = Policy(NEW, batch_size=(2,), max_unavailable=most)
    first = plan.make(fleet_of(5), policy)
    dummy, found = review.review(first.as_dict(), fleet_of(5), policy, {"n0": outcome})
    assert found.reasons == ((reason,) if reason else ())


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("version", "570.133.20", "is for '570.133.20', not for 580.95.05"),
        ("version", None, "is for None"),
        ("batches", None, "batches is not a list of objects"),
        ("batches", {"a": 1}, "batches is not a list of objects"),
        ("batches.0", "n0", "batches is not a list of objects"),
        ("batches.0.nodes", "n0", "batches[0].nodes is not a list of names"),
        ("batches.1.nodes", ["n1", 2], "batches[1].nodes is not a list of names"),
        ("batches.1.nodes", ["n0"], "batches[1].nodes names a node a second time"),
        ("batches.1.nodes", ["n1", "n1"], "batches[1].nodes names a node a second time"),
        ("batches.0.workloads", {}, "batches[0].workloads is not a list of objects"),
        ("batches.0.workloads", [{"workload": "w"}], "batches[0].workloads[0] lacks workload or fate"),
        ("batches.0.workloads", [{"workload": "w", "fate": "move", "to": "n1"}], "batches[0].workloads[0].to is not"),
    ],
)
def test_a_plan_file_that_is_none_is_refused_with_the_path(path: str, value: Any, message: str) -> None:
    earlier: Any = json.loads(json.dumps(plan.make(fleet_of(3), POLICY).as_dict()))
    target, (*parents, last) = earlier, path.split(".")
    for part in parents:
        target = target[int(part) if part.isdigit() else part]
    target[int(last) if last.isdigit() else last] = value
    with pytest.raises(BadPolicy) as caught:
        review.review(earlier, fleet_of(3), POLICY)
    assert message in str(caught.value)


def test_an_earlier_plan_names_newcomers() -> None:
    first = plan.make(fleet_of(2), POLICY)
    dummy, found = review.review(first.as_dict(), fleet_of(3, workload("w", "n1")), POLICY)
    assert found.safe
    assert "n2 is new and not part of the plan" in found.changes
    assert any(change.startswith("w is new on n1") for change in found.changes)
