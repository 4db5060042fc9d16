# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.fleet import PROTECT, BadSnapshot, Demand, Snapshot
from ansible_collections.gpufleet.driver.plugins.module_utils.planning import (
    bins,
    forecast,
    options,
    plan,
    review,
    schedule,
    search,
    table,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.planning.policy import (
    BadPolicy,
    Policy,
    Window,
    batch_limits,
    canary_of,
)

from .fleets import FACTS, NEW, OLD, fate_of, fleet_of, node, workload


def given(**values: Any) -> dict[str, Any]:
    """Options of upgrade_plan with their defaults."""
    return {name: spec.get("default") for name, spec in options.ARGUMENTS.items()} | {"version": NEW} | values


def sizes(made: plan.Plan) -> list[int]:
    return [len(batch.nodes) for batch in made.batches]


@pytest.mark.parametrize(
    ("policy", "count", "expected"),
    [
        ({"batch_size": (2,)}, 6, [1, 2, 2, 1]),
        ({"batch_size": ("50%",)}, 8, [1, 4, 3]),
        ({"batch_size": (1, "25%")}, 12, [1, 1, 3, 3, 3, 1]),
        ({"batch_size": (1,), "growth": 2.0}, 12, [1, 1, 2, 4, 4]),
        ({"batch_size": (5,), "max_unavailable": 3}, 7, [1, 3, 3]),
        ({"batch_size": ("100%",), "max_unavailable": "25%"}, 8, [1, 2, 2, 2, 1]),
        ({"batch_size": (3,), "canary": 0}, 6, [3, 3]),
        ({"batch_size": (3,), "canary": ("n3", "n4")}, 6, [2, 3, 1]),
    ],
)
def test_batch_sizes(policy: dict[str, Any], count: int, expected: list[int]) -> None:
    assert sizes(plan.make(fleet_of(count), Policy(NEW, **policy))) == expected


def test_plain_nodes_keep_their_order() -> None:
    assert plan.make(fleet_of(30), Policy(NEW)).order == tuple(f"n{number}" for number in range(30))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_size": "0"}, "batch_size '0' is neither"),
        ({"batch_size": []}, "empty list"),
        ({"batch_size": "120%"}, "'120%' is neither"),
        ({"canary": "n9"}, "canary n9 is not a node"),
        ({"canary": True}, "neither a number of nodes nor names"),
        ({"reserve": ["n9"]}, "reserve n9 is not a node"),
        ({"canary": " "}, "canary is an empty text: give 0 for none"),
        *[({"growth": growth}, "not a number of 1 or more") for growth in (0.5, float("inf"), float("nan"))],
        ({"canary": "²"}, "canary ² is not a node"),
        ({"batch_size": "²"}, "batch_size '²' is neither"),
        ({"max_per_domain": {"rack": "²"}}, "max_per_domain.rack '²'"),
        *[({"now": f"{year}-12-31T23:00:00Z"}, "no window can be found") for year in ("0001", "9999")],
        *[
            ({"windows": [{"start": "22:00", "end": "23:00", **window}], "now": "2026-03-02T00:00Z"}, message)
            for window, message in (
                ({"days": []}, "empty list"),
                ({"days": ["monkey"]}, "'monkey' is none of mon"),
                ({"days": 6}, "'6' is none of mon"),
                ({"start": 1320}, "has to be in quotes"),
                ({"tz": "Europe"}, "'Europe' is unknown"),
            )
        ],
        ({"version": "580"}, "is not an NVIDIA driver version"),
        ({"waive": ["colour"]}, "'colour', which is no field"),
        ({"windows": [{"start": "22:00", "end": "25:00"}], "now": "2026-03-02T00:00:00Z"}, "'25:00' is not HH:MM"),
        ({"windows": [{"start": "22:00", "end": "23:00"}]}, "now is not"),
        ({"windows": [{"start": "1:00", "end": "2:00", "tz": "Mars/Olympus"}], "now": "2026-03-02T00:00Z"}, "HH:MM"),
        ({"windows": [{"start": "01:00", "end": "02:00", "tz": "Mars/X"}], "now": "2026-03-02T00:00Z"}, "'Mars/X'"),
        ({"windows": [{"start": "01:00", "end": "01:05"}], "now": "2026-03-02T00:00Z"}, "fits no maintenance window"),
        ({"now": "2026-03-02T00:00"}, "no time zone"),
        ({"max_per_domain": {"rack": 0}}, "max_per_domain.rack 0"),
        ({"max_wait": -1}, "max_wait -1"),
    ],
)
def test_bad_policies_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(BadPolicy) as caught:
        plan.make(fleet_of(3), options.policy_of(given(**values)))
    assert message in str(caught.value)


def test_batches_that_hardly_grow_are_no_more_than_the_nodes() -> None:
    assert sizes(plan.make(fleet_of(4), Policy(NEW, batch_size=(1,), growth=1.0000001))) == [1, 1, 1, 1]


def test_what_may_be_a_typing_error_is_told() -> None:
    policy = Policy(
        OLD,
        keep_together=("nvlink", "nvlnk"),
        max_per_domain=(("rakc", 1),),
        max_pending=(("H10", 3.0),),
        gpu_models=("H100", "h100"),
        unsupported=("K80",),
    )
    made = plan.make(Snapshot((node("a", loaded=NEW, installed=NEW),)), policy)
    told = "\n".join(made.notes)
    for name in ("kind nvlnk", "kind rakc", "model H10,", "model h100", "model K80"):
        assert name in told
    assert "nvlink" not in told and "model H100" not in told
    assert f"1 of the nodes go back to an older driver, a from {NEW}" in told


def test_names_do_not_move_the_cursor_of_a_terminal() -> None:
    protected = workload("job\x1b[31m\n  x: fake", "a\x1b[2J", may=frozenset((PROTECT,)))
    made = plan.make(Snapshot((node("a\x1b[2J"),), (protected,)), Policy(NEW))
    told = "".join([*table.lines(made), *table.impossible(made)])
    assert told.isprintable() and "a\\x1b[2J: job\\x1b[31m\\n  x: fake" in told


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"loaded": NEW, "installed": NEW}, f"already on {NEW}"),
        ({"loaded": NEW, "installed": None}, f"already on {NEW}"),
        ({"cordoned_by": "maintenance"}, "cordoned by maintenance"),
        ({"gpus": 0}, "no NVIDIA GPU"),
        ({"skip": "opted out"}, "opted out"),
        ({"gpu_model": "K80"}, f"{NEW} does not support the GPU K80"),
        ({"gpu_model": "L4"}, "GPU L4 is not among the models to upgrade"),
        ({"loaded": OLD, "installed": NEW}, None),
        ({"loaded": NEW, "installed": NEW, "unfinished": True}, None),
    ],
)
def test_nodes_left_out(values: dict[str, Any], reason: str | None) -> None:
    policy = Policy(NEW, unsupported=("K80",), gpu_models=("H100", "K80"))
    made = plan.make(Snapshot((node("a", **values), node("b"))), policy)
    assert dict(made.skipped).get("a") == reason
    assert ("a" in made.order) == (reason is None)


def test_nothing_to_do_is_an_empty_plan() -> None:
    made = plan.make(fleet_of(3, loaded=NEW, installed=NEW), Policy(NEW))
    assert made.batches == () and not made.impossible
    assert table.lines(made)[1] == "nothing to upgrade"


def test_canary_is_the_cheapest_node_of_each_model() -> None:
    nodes = [node(f"h{n}") for n in range(3)] + [node(f"a{n}", gpu_model="A100") for n in range(3)]
    works = tuple(workload(f"w{name}", name, at_risk=9000.0) for name in ("h0", "h2", "a0", "a1"))
    made = plan.make(Snapshot(tuple(nodes), works), Policy(NEW))
    assert made.canary == ("a2", "h1")


def test_a_domain_is_not_split_unless_allowed() -> None:
    nodes = tuple(node(f"n{n}", domains={"nvlink": "left" if n < 3 else "right"}) for n in range(6))
    assert sizes(plan.make(Snapshot(nodes), Policy(NEW, batch_size=(3,)))) == [3, 3]
    with pytest.raises(BadPolicy, match="3 nodes of nvlink right are upgraded together and a batch holds 2"):
        plan.make(Snapshot(nodes), Policy(NEW, batch_size=(2,)))
    assert sizes(plan.make(Snapshot(nodes), Policy(NEW, batch_size=(2,), keep_together=()))) == [1, 2, 2, 1]


def test_a_node_of_two_domains_joins_them() -> None:
    where = ({"nvlink": "A", "imex": "X"}, {"nvlink": "B", "imex": "X"}, {"imex": "X"}, {"nvlink": "B"}, {})
    fleet = Snapshot(tuple(node(f"n{number}", domains=domains) for number, domains in enumerate(where)))
    made = plan.make(fleet, Policy(NEW, batch_size=(4,), canary=("n4",)))
    assert [batch.nodes for batch in made.batches] == [("n4",), ("n0", "n1", "n2", "n3")]
    with pytest.raises(BadPolicy, match="the 4 nodes of nvlink A and imex X are upgraded together and a batch holds 1"):
        plan.make(fleet, Policy(NEW, batch_size=(1,)))


@pytest.mark.parametrize(
    ("values", "work", "reason"),
    [
        ({"cordoned_by": "ops"}, (), "which is left out: cordoned by ops"),
        ({"skip": "opted out"}, (), "which is left out: opted out"),
        ({}, (workload("w", "n1", may=frozenset(("protect",))),), "which is left out: w is protected"),
    ],
)
def test_a_domain_of_which_one_node_keeps_its_driver_keeps_it_whole(values: Any, work: Any, reason: str) -> None:
    nodes = [node(f"n{n}", domains={"nvlink": "left" if n < 3 else "right"}) for n in range(6)]
    nodes[1] = replace(nodes[1], **values)
    fleet = Snapshot(tuple(nodes), work)
    made = plan.make(fleet, Policy(NEW, batch_size=(3,)))
    assert [batch.nodes for batch in made.batches] == [("n3", "n4", "n5")]
    blocked = dict(made.blocked)
    for name in ("n0", "n2"):
        assert blocked[name].startswith("is upgraded together with n1 (nvlink)") and reason in blocked[name]
    assert len(plan.make(fleet, Policy(NEW, batch_size=(3,), keep_together=())).order) == 5


@pytest.mark.parametrize("values", [{"loaded": NEW, "installed": NEW}, {"unfinished": True}])
def test_a_domain_that_is_split_already_is_finished(values: Any) -> None:
    nodes = [node(f"n{n}", domains={"nvlink": "left"}) for n in range(4)]
    nodes[0], nodes[1] = replace(nodes[0], **values), replace(nodes[1], skip="opted out")
    assert {"n2", "n3"} <= set(plan.make(Snapshot(tuple(nodes)), Policy(NEW, batch_size=(4,))).order)


def test_nodes_out_of_service_that_are_to_be_upgraded_come_first() -> None:
    """Later they would use up max_unavailable, and the gate would refuse the batches before them."""
    nodes = tuple(node(f"n{number}", schedulable=number != 3) for number in range(4))
    policy = Policy(NEW, batch_size=(1,), max_unavailable=1)
    made = plan.make(Snapshot(nodes), policy)
    assert [batch.nodes for batch in made.batches] == [("n3",), ("n0",), ("n1",), ("n2",)]
    assert review.review(made.as_dict(), Snapshot(nodes), policy)[1].safe


@pytest.mark.parametrize(
    ("values", "policy", "canary", "note"),
    [
        ({}, {"canary": 2, "max_per_domain": (("rack", 1),)}, ("n0", "n3"), None),
        ({}, {"canary": 3, "max_per_domain": (("rack", 1),)}, ("n0", "n3"), "2 canary of H100 and not 3"),
        ({"budgets": ("svc",)}, {"canary": 2}, ("n0",), "1 canary of H100 and not 2"),
        ({}, {"canary": 3, "max_unavailable": 2}, ("n0", "n1"), "2 canary of H100 and not 3"),
    ],
)
def test_canaries_keep_to_the_limits(values: Any, policy: Any, canary: Any, note: str | None) -> None:
    nodes = tuple(node(f"n{n}", domains={"rack": f"r{n // 3}"}, free={"gpu": 4}) for n in range(6))
    works = tuple(workload(f"w{n}", f"n{n}", gpus=4, **values) for n in range(6))
    made = plan.make(Snapshot(nodes, works, budgets={"svc": 1}), Policy(NEW, batch_size=(1,), **policy))
    assert made.canary == canary
    assert [text for text in made.notes if "canary of" in text and note and text.startswith(note)] or not note


def test_named_canaries_beyond_a_limit_are_refused() -> None:
    works = tuple(workload(f"w{n}", f"n{n}", budgets=("svc",)) for n in range(3))
    with pytest.raises(BadPolicy, match="the canaries exceed the budget svc with n1: it allows 1 at a time"):
        plan.make(replace(fleet_of(3, *works), budgets={"svc": 1}), Policy(NEW, canary=("n0", "n1")))


def test_a_model_for_whose_canary_there_is_no_room_has_none_and_that_is_said() -> None:
    nodes = (*fleet_of(3).nodes, node("a0", gpu_model="A100"), node("a1", gpu_model="A100"))
    made = plan.make(Snapshot(nodes), Policy(NEW, batch_size=(1,), max_unavailable="25%"))
    assert made.canary == ("n0",)
    assert made.notes[0].startswith("no canary of A100 and not 1: one node more")


def test_the_canary_is_of_the_most_common_kind_also_where_another_kind_is_cheaper() -> None:
    odd = node("odd", facts=tuple((name, "5.0" if name == "kernel" else value) for name, value in FACTS))
    works = tuple(workload(f"w{n}", f"n{n}", gpus=8, may=frozenset(("restart",)), at_risk=9000.0) for n in range(5))
    made = plan.make(Snapshot((odd, *fleet_of(5).nodes), works), Policy(NEW, batch_size=(1,)))
    assert made.canary != ("odd",)


def test_nodes_out_of_service_already_use_up_max_unavailable() -> None:
    nodes = (*fleet_of(4).nodes, node("x", skip="broken", schedulable=False))
    assert max(sizes(plan.make(Snapshot(nodes), Policy(NEW, batch_size=(4,), max_unavailable=3)))) == 2
    with pytest.raises(BadPolicy, match="1 are already out of service"):
        plan.make(Snapshot(nodes), Policy(NEW, max_unavailable=1))


def test_the_queue_limits_how_many_gpus_go_down() -> None:
    fleet = replace(fleet_of(8, free={"gpu": 0}), queue={"H100": Demand(10.0)})
    assert max(sizes(plan.make(fleet, Policy(NEW, batch_size=(8,), max_pending=(("H100", 30.0),))))) == 2
    with pytest.raises(BadPolicy, match="max_pending lets 5 GPUs of H100 be down and n0 has 8"):
        plan.make(fleet, Policy(NEW, max_pending=(("H100", 15.0),)))


def test_work_that_arrives_meanwhile_counts_as_pending() -> None:
    """A batch takes 660 seconds: 60 GPUs an hour are 11 by then."""
    fleet = replace(fleet_of(8, free={"gpu": 0}), queue={"H100": Demand(0.0, 60.0)})
    assert max(sizes(plan.make(fleet, Policy(NEW, batch_size=(8,), max_pending=(("H100", 27.0),))))) == 2
    assert max(sizes(plan.make(fleet, Policy(NEW, batch_size=(8,), max_pending=(("H100", 26.0),))))) == 1


@pytest.mark.parametrize("first", ["v", "w"])
def test_of_two_that_lose_the_same_the_one_of_higher_priority_gets_the_room(first: str) -> None:
    values = {"gpus": 4, "at_risk": 9000.0, "may": frozenset(("move", "restart"))}
    works = [workload(name, "n0", priority=5 if name == first else 0, **values) for name in "vw"]
    nodes = (node("n0", free={"gpu": 0}), node("kept", skip="opted out", free={"gpu": 4}))
    made = plan.make(Snapshot(nodes, tuple(works)), Policy(NEW))
    assert [fate_of(made, name).fate for name in "vw"] == ["move" if name == first else "cold_start" for name in "vw"]
    found = plan.place(Snapshot(nodes, tuple(works)), Policy(NEW), ["v", "w"], restore=True)
    assert [each.to for each in found] == [("kept",) if name == first else () for name in "vw"]


def test_budgets_keep_replicas_out_of_one_batch() -> None:
    works = tuple(workload(f"w{n}", f"n{n}", budgets=("pdb",)) for n in range(4))
    made = plan.make(replace(fleet_of(4, *works), budgets={"pdb": 1}), Policy(NEW, batch_size=(4,), canary=0))
    assert sizes(made) == [1, 1, 1, 1]


def test_the_reserve_is_upgraded_last() -> None:
    made = plan.make(fleet_of(6), Policy(NEW, batch_size=(2,), reserve=("n1", "n2")))
    assert made.batches[-1].nodes == ("n1", "n2")


def test_an_empty_batch_is_not_put_before_others() -> None:
    """It would use up a number, and with growth the next batch would be larger than its number allows."""
    model = plan.prepare(fleet_of(3), Policy(NEW, batch_size=(1,), growth=2.0, canary=0))
    filled = bins.Bins(model, (), {}, 3)
    filled.refill([[group] for group in bins.grouped(model, {})])
    filled.append()
    assert search._turned(filled, 3, 0) is None and search._turned(filled, 0, 3) is None
    assert search._turned(filled, 0, 2) is not None


def test_nothing_shares_a_batch_with_the_reserve_or_comes_after_it() -> None:
    """Where the work of n0 ends soon after, a later turn would lose less."""
    nodes = tuple(node(f"n{n}", free={"gpu": 0 if n < 2 else 8}) for n in range(4))
    works = tuple(workload(f"w{n}", f"n{n}", gpus=8, remaining=2500.0, at_risk=9000.0) for n in range(2))
    policy = Policy(NEW, batch_size=(2,), canary=("n3",), reserve=("n2",), max_wait=0.0)
    made = plan.make(Snapshot(nodes, works), policy)
    assert made.batches[-1].nodes == ("n2",)


def test_valuable_work_moves_to_the_node_upgraded_last_and_ends_there() -> None:
    long = workload("long", "n0", gpus=8, remaining=1000.0, at_risk=9000.0)
    made = plan.make(fleet_of(3, long), Policy(NEW, batch_size=(1,), canary=("n0",), max_wait=0.0))
    assert (fate_of(made, "long").fate, fate_of(made, "long").to) == ("move", (made.order[-1],))


def test_no_workload_moves_a_second_time() -> None:
    fleet = fleet_of(3, workload("w", "n0", gpus=8, at_risk=9000.0))
    played = schedule.play(plan.prepare(fleet, Policy(NEW)), [[0], [1], [2]], hints={0: schedule.NEAR})
    assert [(each.what, each.to) for each in played.fates] == [("move", (1,)), ("cold_start", (0,))]


def test_work_that_may_only_move_needs_a_node_that_stays_on_the_old_driver() -> None:
    endless = workload("w", "n0", gpus=8, may=frozenset(("move",)))
    made = plan.make(fleet_of(3, endless), Policy(NEW, batch_size=(1,)))
    assert "cannot move: the node it would move to has its own turn later" in dict(made.blocked)["n0"]
    kept = (*fleet_of(3).nodes, node("kept", skip="opted out"))
    made = plan.make(Snapshot(kept, (endless,)), Policy(NEW, batch_size=(1,)))
    assert (fate_of(made, "w").fate, fate_of(made, "w").to) == ("move", ("kept",))


@pytest.mark.parametrize("may", [("move",), ("move", "wait", "restart")])
def test_endless_work_moves_to_a_node_that_stays_also_in_a_fleet_too_large_to_search(may: Any) -> None:
    kept = tuple(node(f"k{n}", skip="left on the old driver") for n in range(4))
    works = tuple(workload(f"w{n}", f"n{n}", gpus=8, may=frozenset(may), at_risk=7200.0) for n in range(4))
    nodes = tuple(replace(each, free={"gpu": 0}) if n < 4 else each for n, each in enumerate(fleet_of(1100).nodes))
    made = plan.make(Snapshot((*nodes, *kept), works), Policy(NEW, batch_size=("10%",), canary=0))
    assert not made.blocked
    assert {fate_of(made, f"w{n}").fate for n in range(4)} == {"move"}


def test_work_that_may_not_restart_moves_where_it_can_be_waited_for_also_in_a_fleet_too_large_to_search() -> None:
    """On the node upgraded last it still runs when the turn comes, and ends soon enough after that."""
    work = workload("w", "n0", gpus=8, may=frozenset(("move", "wait")), remaining=5000.0)
    nodes = tuple(replace(each, free={"gpu": 0}) if n == 0 else each for n, each in enumerate(fleet_of(1100).nodes))
    policy = Policy(NEW, batch_size=("34%",), canary=("n0",), max_wait=3600.0)
    made = plan.make(Snapshot(nodes, (work,)), policy)
    assert not made.blocked
    assert fate_of(made, "w").fate == "move"


def test_a_node_is_not_left_out_for_work_that_can_move_to_one_that_is() -> None:
    works = (
        workload("w", "n0", gpus=4, may=frozenset(("move",)), remaining=20000.0),
        workload("stays", "n1", gpus=4, may=frozenset(("protect",))),
    )
    made = plan.make(fleet_of(2, *works, free={"gpu": 4}), Policy(NEW, batch_size=(1,), canary=0))
    assert (made.order, [name for name, dummy in made.blocked]) == (("n0",), ["n1"])
    assert fate_of(made, "w").to == ("n1",)


def test_of_nodes_whose_work_can_only_change_places_some_are_upgraded() -> None:
    works = tuple(workload(f"w{n}", f"n{n}", gpus=4, may=frozenset(("move",))) for n in range(4))
    made = plan.make(fleet_of(4, *works, free={"gpu": 4}), Policy(NEW, batch_size=(1,), canary=0))
    assert len(made.order) == 2
    assert all(set(fate.to) <= set(dict(made.blocked)) for batch in made.batches for fate in batch.fates)


def test_work_that_moved_in_vain_keeps_its_first_node() -> None:
    """Room is only on the other node, whose turn comes before the work ends."""
    work = workload("w", "n0", gpus=4, may=frozenset(("move", "wait")), remaining=5000.0)
    other = workload("x", "n1", gpus=4, may=frozenset(("restart",)))
    made = plan.make(fleet_of(2, work, other, free={"gpu": 4}), Policy(NEW, batch_size=(1,), canary=0, max_wait=0.0))
    assert not [fate for batch in made.batches for fate in batch.fates if fate.fate == "blocked"]
    assert len(made.blocked) == 1


def test_a_node_and_the_stand_in_of_its_work_are_not_upgraded_at_the_same_time() -> None:
    works = tuple(
        workload(f"w{n}", f"n{n}", may=frozenset(("restart",)), stays_home=True, stand_in=f"n{n + 1}") for n in range(3)
    )
    made = plan.make(fleet_of(4, *works), Policy(NEW, batch_size=(4,), canary=0))
    batch = {name: number for number, each in enumerate(made.batches) for name in each.nodes}
    assert all(batch[f"n{n}"] != batch[f"n{n + 1}"] for n in range(3)) and len(made.batches) == 2
    assert all(fate_of(made, work.name).to == fate_of(made, work.name).nodes for work in works)
    with pytest.raises(BadPolicy, match="the canaries are both the node of w0 and the one on which it is started"):
        plan.make(fleet_of(4, *works), Policy(NEW, canary=("n0", "n1")))


def test_work_of_a_plain_host_moves_to_a_later_one_or_starts_again_at_home() -> None:
    """Its driver and GPU are known; the rest is asked of the host that it goes to."""
    nodes = tuple(node(f"n{n}", facts=()) for n in range(3))
    saved = workload("saved", "n1", gpus=2, backends=("host",), may=frozenset(("move", "restart")), stays_home=True)
    made = plan.make(Snapshot(nodes, (saved,)), Policy(NEW, batch_size=(1,)))
    assert (fate_of(made, "saved").fate, fate_of(made, "saved").to) == ("move", (made.order[-1],))
    kept = replace(saved, may=frozenset(("restart",)), backends=())
    assert fate_of(plan.make(Snapshot(nodes, (kept,)), Policy(NEW)), "saved").to == ("n1",)


@pytest.mark.parametrize(
    ("backends", "fate", "lost"),
    [(("hook",), "move", 8 * 120.0), (("slurm",), "move", 8 * 120.0), (("cuda_criu",), "cold_start", 8 * 7260.0)],
)
def test_work_that_saves_itself_goes_on_at_an_upgraded_node(backends: tuple[str, ...], fate: str, lost: float) -> None:
    """No node has a later turn: what needs its driver again has lost its progress."""
    nodes = (node("a"), node("b", loaded=NEW, installed=NEW))
    work = workload("w", "a", gpus=8, backends=backends, at_risk=7200.0)
    made = plan.make(Snapshot((replace(nodes[0], free={"gpu": 0}), nodes[1]), (work,)), Policy(NEW))
    found = fate_of(made, "w")
    assert (found.fate, found.to, found.lost) == (fate, ("b",), lost)
    if fate == "move":
        assert found.reason == "pauses 120 s, its own save goes on with another driver there"
        again, seen = review.review(
            made.as_dict(), Snapshot((replace(nodes[0], free={}), nodes[1]), (work,)), Policy(NEW)
        )
        assert seen.safe and not seen.changes and fate_of(again, "w").to == ("b",)


@pytest.mark.parametrize(("backends", "again"), [(("slurm",), 120.0), (("cuda_criu",), 7200.0)])
def test_work_that_saves_itself_goes_on_from_its_save_at_its_own_node(backends: tuple[str, ...], again: float) -> None:
    """No other node has room: it loses the time without its node, and what save and start take, not its progress."""
    work = workload("w", "n0", gpus=8, backends=backends, at_risk=7200.0)
    made = plan.make(fleet_of(1, work, free={"gpu": 0}), Policy(NEW))
    assert fate_of(made, "w").lost == 8 * (60.0 + again + 480.0)
    told = "1 workload (8 GPUs) starts again from what the work saves itself: w"
    assert (told in made.notes) is (backends == ("slurm",))
    peer = forecast.forecast_peer("operator", fleet_of(1, work, free={"gpu": 0}), Policy(NEW), made)
    assert peer.runs[0].lost["cold_starts"] == 8 * 7260.0


def test_work_that_saves_itself_leaves_old_driver_room_to_what_needs_it() -> None:
    """Both have to leave for good, and one free node keeps its driver: it is for the one that nothing else saves."""
    nodes = (
        *(node(name, free={"gpu": 0}) for name in ("a", "b")),
        node("new", loaded=NEW, installed=NEW),
        node("old", skip="kept"),
    )
    works = [
        workload("w", "a", gpus=8, backends=("hook",), at_risk=7200.0),
        workload("x", "b", gpus=8, backends=("cuda_criu",), at_risk=7200.0),
    ]
    made = plan.make(Snapshot(nodes, tuple(works)), Policy(NEW, batch_size=(1,)))
    assert (fate_of(made, "w").to, fate_of(made, "x").to) == (("new",), ("old",))
    assert made.total_lost == 2 * 8 * 120.0
    full = (*nodes[:2], replace(nodes[2], free={"gpu": 4}), nodes[3])
    made = plan.make(Snapshot(full, tuple(works)), Policy(NEW, batch_size=(1,)))
    assert sorted(fate.fate for batch in made.batches for fate in batch.fates) == ["move", "move"]


def test_saved_work_may_be_placed_on_an_upgraded_node_if_the_application_saved_it() -> None:
    nodes = (node("a", free={"gpu": 0}), node("b", loaded=NEW, installed=NEW), node("c"))
    earlier = {"version": NEW, "order": ["c", "b", "a"]}
    for backend, to in (("hook", ("b",)), ("cuda_criu", ())):
        work = workload("w", "a", gpus=8, backends=(backend,))
        found = plan.place(Snapshot(nodes, (work,)), Policy(NEW), ["w"], restore=True, plan=earlier)
        assert found[0].to == to


def test_a_batch_goes_to_the_window_that_the_wait_for_its_work_fits() -> None:
    """Ten minutes of this window are left beyond the batch, and the work takes twenty."""
    work = workload("w", "n0", gpus=8, may=frozenset(("wait",)), remaining=1200.0)
    window = given(windows=[{"start": "01:00", "end": "02:00"}], now="2026-03-02T01:39:00Z", canary=0)
    made = plan.make(fleet_of(1, work), options.policy_of(window))
    assert not made.blocked
    assert made.batches[0].starts == 23 * 3600 + 21 * 60


def test_a_gang_that_starts_again_loses_no_more_than_it_did_since() -> None:
    gang = workload("g", "n0", "n1", gpus=8, may=frozenset(("restart",)), at_risk=6000.0, start_cost=60.0)
    made = plan.make(fleet_of(2, gang, free={"gpu": 0}), Policy(NEW, batch_size=(1,), canary=0))
    first, second = (fate.lost for batch in made.batches for fate in batch.fates)
    assert (first, second) == (16 * (60 + 6000 + 480), 16 * (60 + 660 + 480))
    assert [note for note in made.notes if note.startswith("g starts cold 2 times")]


def test_a_named_canary_that_cannot_be_emptied_is_refused() -> None:
    fleet = fleet_of(3, workload("w", "n0", may=frozenset(("protect",))))
    with pytest.raises(BadPolicy, match="canary n0 cannot be emptied: w is protected"):
        plan.make(fleet, Policy(NEW, canary=("n0", "n1")))


def test_the_reserve_gives_no_canary() -> None:
    assert plan.make(fleet_of(4), Policy(NEW, reserve=("n0", "n1"))).canary == ("n2",)
    with pytest.raises(BadPolicy, match="n0 is both a canary"):
        plan.make(fleet_of(4), Policy(NEW, reserve=("n0",), canary=("n0",)))
    with pytest.raises(BadPolicy, match="n1 is a canary and n0 of the reserve, and they are upgraded together"):
        plan.make(fleet_of(4, domains={"imex": "d"}), Policy(NEW, reserve=("n0",), canary=("n1",)))


def test_free_gpus_of_a_cordoned_node_are_no_room_for_the_queue() -> None:
    nodes = (node("n0", free={"gpu": 0}), node("n1", free={"gpu": 0}), node("x", cordoned_by="ops"))
    with pytest.raises(BadPolicy, match="max_pending lets 0 GPUs of H100 be down"):
        plan.make(Snapshot(nodes), Policy(NEW, max_pending=(("H100", 0.0),)))


def test_a_batch_goes_to_the_window_after_work_that_outlasts_every_window() -> None:
    work = workload("w", "n0", may=frozenset(("wait",)), remaining=5000.0)
    window = given(windows=[{"start": "22:00", "end": "22:40"}], now="2026-03-02T22:00:00Z", canary=0)
    made = plan.make(fleet_of(1, work), options.policy_of(window))
    assert not made.blocked and made.batches[0].starts == 86400.0


def test_domain_mates_of_an_unfinished_node_count_as_down() -> None:
    nodes = tuple(node(f"n{n}", domains={"nvlink": "A"}, unfinished=n == 0) for n in range(3))
    with pytest.raises(BadPolicy, match="the canary batch has 2 nodes and max_unavailable allows 1 down"):
        plan.make(Snapshot(nodes), Policy(NEW, max_unavailable=1))
    assert plan.make(Snapshot(nodes), Policy(NEW, max_unavailable=2)).order == ("n0", "n1", "n2")


def test_a_budget_that_one_node_exceeds_is_told() -> None:
    works = tuple(workload(f"w{n}", "n0", may=frozenset(("restart",)), budgets=("svc",)) for n in range(2))
    made = plan.make(replace(fleet_of(2, *works), budgets={"svc": 1}), Policy(NEW, canary=("n0",)))
    assert "budget svc allows 1 at a time and canary disturbs 2: one after another" in made.notes


def crowded(allowed: int, free: int, **values: Any) -> Snapshot:
    """Two nodes, of which n0 has both replicas of a service and n1 as many GPUs free as told."""
    nodes = (node("n0", free={"gpu": 0}), node("n1", free={"gpu": free}))
    works = tuple(
        workload(f"w{n}", "n0", gpus=4, **{"may": frozenset(("restart",)), "budgets": ("svc",), **values})
        for n in range(2)
    )
    return Snapshot(nodes, works, budgets={"svc": allowed})


def test_replicas_that_have_nowhere_to_go_are_not_evicted_beyond_their_budget() -> None:
    """The second may be evicted only when the first runs again, which it cannot before its node is empty and back."""
    policy = Policy(NEW, batch_size=(1,), canary=0)
    made = plan.make(crowded(1, 0), policy)
    assert made.order == ("n1",)
    assert dict(made.blocked)["n0"].startswith("budget svc allows 1 at a time: w1 may leave its node only when")
    for allowed, work in ((2, {}), (1, {"budgets": ()})):
        made = plan.make(crowded(allowed, 0, **work), policy)
        assert set(made.order) == {"n0", "n1"} and not made.blocked


def test_a_replica_beyond_its_budget_starts_on_a_node_that_is_not_upgraded_yet() -> None:
    """None is, and n1 has room: it starts there, and again when the turn of n1 comes."""
    made = plan.make(crowded(1, 4), Policy(NEW, batch_size=(1,), canary=("n0",)))
    told = [[(each.workload, each.to) for each in batch.fates] for batch in made.batches]
    assert told == [[("w0", ("n0",)), ("w1", ("n1",))], [("w1", ("n0",))]]
    assert "not upgraded yet: budget svc" in made.batches[0].fates[1].reason
    assert "budget svc allows 1 at a time and canary disturbs 2: one after another" in made.notes


def test_what_is_waited_for_does_not_count_against_a_budget() -> None:
    ends = {"may": frozenset(("wait", "restart")), "remaining": 60.0, "at_risk": 9000.0}
    made = plan.make(crowded(1, 0, **ends), Policy(NEW, batch_size=(1,), canary=("n0",)))
    assert [each.fate for each in made.batches[0].fates] == ["wait", "wait"]


def test_a_fleet_without_headroom_is_told_what_must_go_where_first_and_what_would_help() -> None:
    works = (
        workload("ends", "n0", gpus=4, may=frozenset(("wait",)), remaining=600.0),
        workload("goes", "n0", gpus=4, remaining=90000.0, at_risk=90000.0),
        workload("stays", "n1", gpus=4, may=frozenset(("protect",))),
        workload("short", "n2", gpus=8, at_risk=3600.0, remaining=9000.0),
    )
    nodes = (node("n0", free={"gpu": 0}), node("n1", free={"gpu": 4}), node("n2", free={"gpu": 0}))
    made = plan.make(Snapshot(nodes, works), Policy(NEW, batch_size=(1,), canary=("n0",)))
    assert made.notes[:2] == (
        "to empty the first batch, ends must end (ends after 10 min 00 s)",
        "to empty the first batch, goes must move to n1",
    )
    assert "1 workload (8 GPUs) could be saved but" in made.notes[2] and made.notes[2].endswith(": short")
    assert dict(made.blocked)["n1"].endswith("let it end, or let it move or restart")


def test_cheap_work_starts_cold_on_an_upgraded_node() -> None:
    nodes = (node("n0"), node("n1", free={"gpu": 0}))
    made = plan.make(Snapshot(nodes, (workload("w", "n1", gpus=8, start_cost=5.0),)), Policy(NEW, batch_size=(1,)))
    assert (fate_of(made, "w").fate, fate_of(made, "w").to) == ("cold_start", ("n0",))


def test_nothing_starts_on_a_node_kept_out_of_service() -> None:
    nodes = (node("n0", schedulable=False), node("n1", free={"gpu": 0}))
    made = plan.make(Snapshot(nodes, (workload("w", "n1", gpus=8, start_cost=5.0),)), Policy(NEW, batch_size=(1,)))
    assert fate_of(made, "w").to == ("n1",)


def test_work_that_ends_soon_is_waited_for() -> None:
    nodes = (node("n0", free={"gpu": 0}),)
    made = plan.make(Snapshot(nodes, (workload("w", "n0", gpus=8, remaining=100.0, at_risk=900.0),)), Policy(NEW))
    assert (fate_of(made, "w").fate, made.batches[0].wait) == ("wait", 100.0)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"may": frozenset(("protect",))}, "w is protected and has no known end"),
        ({"may": frozenset(("wait",)), "remaining": 36000.0}, "ends in 10.0 h, beyond the longest wait of 2.0 h"),
        (
            {"may": frozenset(("move",))},
            "w may not restart, has no known end, and cannot move: no other node has the old driver",
        ),
        ({"may": frozenset(("move",)), "backends": ()}, "no backend could save it"),
        ({"budgets": ("pdb",)}, "budget pdb allows no disruption of w"),
    ],
)
def test_an_impossible_plan_says_why(values: dict[str, Any], reason: str) -> None:
    fleet = replace(fleet_of(1, workload("w", "n0", **values)), budgets={"pdb": 0})
    made = plan.make(fleet, Policy(NEW))
    assert made.impossible
    assert reason in dict(made.blocked)["n0"]


@pytest.mark.parametrize("days", [["sat", "sun"], "sat,sun", "Saturday, Sunday"])
def test_days_of_a_window(days: Any) -> None:
    assert Window.of({"start": "22:00", "end": "23:00", "days": days}).days == ("sat", "sun")


@pytest.mark.parametrize("given_as", [[], 5, '{"version": 1}', " [1]"])
def test_a_snapshot_that_is_neither_an_object_nor_a_path_is_refused(given_as: Any) -> None:
    with pytest.raises(BadSnapshot, match="is neither a dictionary"):
        options.snapshot_of({"snapshot": given_as, "nodes": []})


@pytest.mark.parametrize("canary", [2, 3, 4, 9])
def test_as_many_canaries_as_asked_for_also_among_empty_nodes(canary: int) -> None:
    work = workload("w", "n0", gpus=8, at_risk=600.0)
    fleet = fleet_of(4, work)
    nodes = (replace(fleet.nodes[0], free={"gpu": 0}), *fleet.nodes[1:])
    assert len(plan.make(replace(fleet, nodes=nodes), Policy(NEW, canary=canary)).canary) == min(canary, 4)


def test_a_canary_named_that_has_the_version_by_now_is_no_canary_any_more() -> None:
    """The same command again after it was interrupted."""
    done = (node("n0", loaded=NEW, installed=NEW), *fleet_of(3).nodes[1:])
    made = plan.make(Snapshot(done), Policy(NEW, canary=("n0",)))
    assert (made.canary, made.order) == ((), ("n1", "n2"))


def at(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


@pytest.mark.parametrize(
    ("window", "after", "hours", "expected"),
    [
        ({}, "2026-03-02T23:00:00+01:00", 1, "2026-03-02T23:00:00+01:00"),
        ({}, "2026-03-03T03:30:00+01:00", 1, "2026-03-03T22:00:00+01:00"),
        ({}, "2026-03-03T12:00:00+01:00", 1, "2026-03-03T22:00:00+01:00"),
        ({"days": ["sat"]}, "2026-03-03T12:00:00+01:00", 6, "2026-03-07T22:00:00+01:00"),
        # Clocks go forward at 02:00 on 29 March 2026: that night's window is an hour shorter.
        ({}, "2026-03-28T22:00:00+01:00", 6, "2026-03-29T22:00:00+02:00"),
        # 02:30 is skipped then, and shown twice on 25 October: it is over at the first moment that may be meant.
        ({"end": "02:30"}, "2026-03-29T01:00:00+01:00", 0.6, "2026-03-29T22:00:00+02:00"),
        ({"start": "02:15", "end": "02:45"}, "2026-03-29T00:00:00+01:00", 0.1, "2026-03-30T02:15:00+02:00"),
        ({"end": "02:30"}, "2026-10-25T02:00:00+02:00", 1, "2026-10-25T22:00:00+01:00"),
        ({"start": "02:00", "end": "04:00"}, "2026-03-03T03:00:00+01:00", 1, "2026-03-03T03:00:00+01:00"),
    ],
)
def test_windows(window: dict[str, Any], after: str, hours: float, expected: str) -> None:
    made = Window.of({"start": "22:00", "end": "04:00", "tz": "Europe/Berlin", **window})
    found = made.next_start(at(after), hours * 3600)
    assert found is not None and found[0] == at(expected)


def test_batches_start_inside_windows_only() -> None:
    window = Window.of({"start": "22:00", "end": "22:30"})
    now = at("2026-03-02T21:00:00+00:00")
    made = plan.make(fleet_of(4), Policy(NEW, batch_size=(1,), windows=(window,), now=now))
    assert [batch.starts / 3600 for batch in made.batches] == [1, 1 + 660 / 3600, 25, 25 + 660 / 3600]


def test_a_batch_waits_no_longer_than_its_window_is_open() -> None:
    window = Window.of({"start": "22:00", "end": "23:00"})
    now = at("2026-03-02T22:00:00+00:00")
    policy = Policy(NEW, windows=(window,), now=now)
    for remaining, expected in ((2940.0, "wait"), (2941.0, "cold_start")):
        work = workload("w", "n0", gpus=8, remaining=remaining, at_risk=9000.0, may=frozenset(("wait", "restart")))
        made = plan.make(fleet_of(1, work), policy)
        assert fate_of(made, "w").fate == expected
        assert made.batches[0].ends <= 3600


SAVED = {"gpus": 8, "capture": 1800.0, "at_risk": 36000.0, "may": frozenset(("move", "restart"))}


def test_a_batch_takes_as_long_as_its_longest_save() -> None:
    fleet = fleet_of(3, workload("big", "n0", **SAVED), free={"gpu": 8})
    nodes = (replace(fleet.nodes[0], free={"gpu": 0}), fleet.nodes[1], replace(fleet.nodes[2], skip="stays"))
    made = plan.make(replace(fleet, nodes=nodes), Policy(NEW, batch_size=(1,), canary=("n0",)))
    assert fate_of(made, "big").fate == "move"
    assert [(batch.starts, batch.ends) for batch in made.batches] == [(0, 1800 + 480), (2280, 2280 + 180 + 480)]


@pytest.mark.parametrize(("length", "day", "fate"), [(60, 0, "move"), (20, None, "cold_start")])
def test_a_save_fits_the_window(length: int, day: int | None, fate: str) -> None:
    """Forty minutes of save and swap: in the next night if little of this one is left, and never in a short one."""
    fleet = fleet_of(2, workload("big", "n0", **SAVED))
    nodes = (replace(fleet.nodes[0], free={"gpu": 0}), replace(fleet.nodes[1], skip="stays"))
    end = f"{1 + length // 60:02}:{length % 60:02}"
    for now, starts in (("2026-03-02T01:00:00Z", 0.0), ("2026-03-02T01:40:00Z", 23 * 3600 + 1200.0)):
        given_window = options.policy_of(given(windows=[{"start": "01:00", "end": end}], now=now, canary=0))
        made = plan.make(replace(fleet, nodes=nodes), given_window)
        assert fate_of(made, "big").fate == fate
        if day is not None:
            assert made.batches[0].starts == starts


def test_work_that_takes_longer_to_save_than_any_window_is_open_says_so() -> None:
    fleet = fleet_of(2, workload("big", "n0", **{**SAVED, "may": frozenset(("move",))}))
    nodes = (fleet.nodes[0], replace(fleet.nodes[1], skip="stays"))
    window = given(windows=[{"start": "01:00", "end": "01:20"}], now="2026-03-02T01:00:00Z")
    made = plan.make(replace(fleet, nodes=nodes), options.policy_of(window))
    assert "saving it takes 30 minutes, and no maintenance window is long enough" in dict(made.blocked)["n0"]


def test_a_plan_for_days_ahead_says_that_work_is_not_known_then() -> None:
    window = {"windows": [{"start": "22:00", "end": "22:15"}], "now": "2026-03-02T21:59:00Z"}
    notes = [plan.make(fleet_of(count), options.policy_of(given(**window))).notes for count in (1, 3)]
    assert [
        any(note.startswith("the last batch starts in 48 h, and what runs") for note in each) for each in notes
    ] == [
        False,
        True,
    ]


def test_of_two_windows_the_longer_one_counts() -> None:
    windows = tuple(Window.of({"start": "22:00", "end": end}) for end in ("22:30", "23:30"))
    policy = Policy(NEW, windows=windows, now=at("2026-03-02T21:00:00+00:00"))
    assert policy.opening(0.0, 600.0) == (3600.0, 4800.0)
    assert policy.opening(0.0, 3000.0) == (3600.0, 2400.0)


def test_a_forecast_in_which_swaps_take_longer_still_keeps_to_the_windows() -> None:
    window = Window.of({"start": "22:00", "end": "22:11"})
    policy = Policy(NEW, batch_size=(1,), windows=(window,), now=at("2026-03-02T21:00:00+00:00"))
    made = plan.make(fleet_of(2), policy)
    assert [batch.starts / 3600 for batch in made.batches] == [1, 25]
    slow = forecast.forecast(fleet_of(2), policy, made, forecast.Chances(runs=5, swap=0.5))
    assert all(25 * 3600 < run.finish < 26 * 3600 for run in slow.runs)


def test_an_id_stands_for_what_is_done_to_work() -> None:
    works = (workload("w", "n0", gpus=8, may=frozenset(("wait", "restart")), remaining=3000.0, at_risk=9000.0),)
    fleet = fleet_of(2, *works)
    policy = Policy(NEW, batch_size=(1,), canary=("n0",))
    waited_for = plan.make(fleet, policy)
    endless = plan.make(replace(fleet, workloads=(replace(works[0], remaining=None),)), policy)
    assert waited_for.order == endless.order
    assert fate_of(waited_for, "w").fate == "wait" and fate_of(endless, "w").fate == "cold_start"
    assert waited_for.id != endless.id
    later = plan.make(replace(fleet, workloads=(replace(works[0], remaining=2000.0),)), policy)
    assert later.id == waited_for.id, "it is waited for as before, for less long"
    assert plan.make(fleet_of(2), policy).id != plan.make(fleet_of(2), replace(policy, canary=0)).id


def test_plain_hosts_become_a_fleet() -> None:
    nodes = [
        {"name": "a", "loaded_version": OLD, "installed_version": OLD, "gpus": ["H100"] * 8, "domain": "d"},
        {"name": "b", "gpus": [], "unfinished": False},
        {"name": "c", "gpus": ["H100"], "skip_reason": "unfit: no space", "unfinished": True},
    ]
    made = plan.make(options.snapshot_of(given(nodes=nodes)), options.policy_of(given()))
    assert made.order == ("a",)
    assert made.skipped == (("b", "no NVIDIA GPU"), ("c", "unfit: no space"))
    with pytest.raises(BadSnapshot, match="'a' is already"):
        options.snapshot_of(given(nodes=[nodes[0], nodes[0]]))


@pytest.mark.parametrize(("value", "expected"), [(2, 2), ("3", 3), ("a, b", ("a", "b")), (["a"], ("a",)), ([], ())])
def test_canary_option(value: Any, expected: Any) -> None:
    assert canary_of(value) == expected


def test_a_percentage_is_never_nothing() -> None:
    assert batch_limits(Policy(NEW, batch_size=("1%",)), 5, 0) == [1]


@pytest.mark.parametrize(
    ("demand", "idle"),
    [
        (Demand(8.0), 8 * 900.0),
        (Demand(8.0, 0.0, 3600.0, 600.0), 8 * 300.0),
        (Demand(8.0, 0.0, 3600.0, 3000.0), 8 * 900.0),
    ],
    ids=["queued work of unknown length fills no gap", "short queued work fills most of it", "the gap is too short"],
)
def test_a_domain_that_waits_is_filled_by_queued_work(demand: Demand, idle: float) -> None:
    rack = {"free": {"gpu": 0}, "domains": {"nvlink": "rack"}}
    works = [workload(f"w{n}", n, gpus=8, remaining=end, at_risk=7200.0) for n, end in (("a", 600.0), ("b", 1500.0))]
    fleet = Snapshot((node("a", **rack), node("b", **rack)), tuple(works), queue={"H100": demand})
    made = plan.make(fleet, Policy(NEW, canary=0, batch_size=(2,)))
    assert made.lost == {"moves": 0.0, "cold_starts": 0.0, "idle": idle}
    assert made.batches[0].wait == 1500.0


def test_each_node_of_a_gang_that_ended_stands_idle_once() -> None:
    nodes = (node("a", free={"gpu": 0}), node("b", free={"gpu": 0}), node("c"))
    gang = workload("w", "a", "b", gpus=8, remaining=60.0)
    fleet = Snapshot(nodes, (gang,), queue={"H100": Demand(8.0, 0.0, 3600.0, 600.0)})
    made = plan.make(fleet, Policy(NEW, canary=("c",), batch_size=(1,)))
    assert [batch.nodes for batch in made.batches] == [("c",), ("a",), ("b",)]
    assert made.lost == {"moves": 0.0, "cold_starts": 0.0, "idle": 2 * 8 * 300.0}
