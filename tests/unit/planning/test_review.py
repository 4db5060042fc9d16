# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.fleet import Snapshot
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


def test_an_earlier_plan_whose_room_is_gone_is_not_safe() -> None:
    work = workload("w", "n0", gpus=8, remaining=1000.0, at_risk=9000.0)
    policy = Policy(NEW, batch_size=(1,), canary=("n0",), max_wait=0.0)
    fleet = fleet_of(3, work)
    first = plan.make(fleet, policy)
    full = tuple(replace(n, free={"gpu": 0}) if n.name != "n0" else n for n in fleet.nodes)
    dummy, found = review.review(first.as_dict(), replace(fleet, nodes=full), policy)
    assert found.reasons == ("w has lost its place to move to",)


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
