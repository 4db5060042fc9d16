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
    forecast,
    options,
    plan,
    schedule,
    table,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.planning.policy import (
    BadPolicy,
    Policy,
    Window,
    batch_limits,
    canary_of,
)

from .fleets import NEW, OLD, fate_of, fleet_of, node, workload


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


@pytest.mark.parametrize("days", ["sat,sun", "Saturday, sunday", ["sat", "SUN"]])
def test_days_of_a_window(days: Any) -> None:
    assert Window.of({"start": "22:00", "end": "23:00", "days": days}).days == ("sat", "sun")


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
    assert made.canary == ("h1", "a2")


def test_a_domain_is_not_split_unless_allowed() -> None:
    nodes = tuple(node(f"n{n}", domains={"nvlink": "left" if n < 3 else "right"}) for n in range(6))
    assert sizes(plan.make(Snapshot(nodes), Policy(NEW, batch_size=(3,)))) == [3, 3]
    with pytest.raises(BadPolicy, match="3 nodes of nvlink right are upgraded together and a batch holds 2"):
        plan.make(Snapshot(nodes), Policy(NEW, batch_size=(2,)))
    assert sizes(plan.make(Snapshot(nodes), Policy(NEW, batch_size=(2,), keep_together=()))) == [1, 2, 2, 1]


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


def test_budgets_keep_replicas_out_of_one_batch() -> None:
    works = tuple(workload(f"w{n}", f"n{n}", budgets=("pdb",)) for n in range(4))
    made = plan.make(replace(fleet_of(4, *works), budgets={"pdb": 1}), Policy(NEW, batch_size=(4,), canary=0))
    assert sizes(made) == [1, 1, 1, 1]


def test_the_reserve_is_upgraded_last() -> None:
    made = plan.make(fleet_of(6), Policy(NEW, batch_size=(2,), reserve=("n1", "n2")))
    assert made.batches[-1].nodes == ("n1", "n2")


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


@pytest.mark.parametrize(("value", "expected"), [(2, 2), ("3", 3), ("a, b", ("a", "b")), (["a"], ("a",)), ("", ())])
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
