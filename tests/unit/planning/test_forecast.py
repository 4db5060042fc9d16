# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from ansible_collections.gpufleet.driver.plugins.module_utils import fleet
from ansible_collections.gpufleet.driver.plugins.module_utils.planning import forecast, options, plan, table
from ansible_collections.gpufleet.driver.plugins.module_utils.planning.policy import BadPolicy, Policy

from .fleets import NEW, OLD, fleet_of, node, small_fleet, workload

EXAMPLES = Path(__file__).parents[3] / "examples" / "fleets"
POLICIES: dict[str, dict[str, Any]] = {
    path.stem: yaml.safe_load(path.read_text()) for path in sorted(EXAMPLES.glob("*.yml"))
}
"""Variables of the role plan, each an option of upgrade_plan, by example."""
STEADY = forecast.Chances(runs=1, ends=0.0, swap=0.0)
"""One run without chance."""


def example(name: str) -> tuple[fleet.Snapshot, Policy]:
    given = {key: spec.get("default") for key, spec in options.ARGUMENTS.items()}
    given.update(
        (key[len("gpu_") :].replace("driver_version", "version"), value) for key, value in POLICIES[name].items()
    )
    return fleet.read(str(EXAMPLES / f"{name}.json")), options.policy_of(given)


@pytest.mark.parametrize("seed", range(12))
def test_without_chance_the_forecast_is_the_plan(seed: int) -> None:
    snapshot, policy = small_fleet(seed), Policy(NEW, batch_size=(2,))
    made = plan.make(snapshot, policy)
    run = forecast.forecast(snapshot, policy, made, STEADY).runs[0]
    assert run.total == pytest.approx(made.total_lost)
    assert run.finish == pytest.approx(made.finish)


def test_the_same_input_gives_the_same_forecast() -> None:
    snapshot, policy = small_fleet(3), Policy(NEW)
    chances = forecast.Chances(runs=3, failure=0.3)
    told = [
        [each.as_dict() for each in forecast.beside(snapshot, policy, None, forecast.PEERS, chances)] for dummy in "ab"
    ]
    assert told[0] == told[1]


def test_capacity_ends_on_the_new_version_except_where_nodes_fail() -> None:
    snapshot, policy = fleet.Snapshot(tuple(node(f"n{n}") for n in range(6))), Policy(NEW, batch_size=(2,))
    made = plan.make(snapshot, policy)
    for failure, versions in ((0.0, {OLD: 0, NEW: 48}), (1.0, {OLD: 48})):
        chances = forecast.Chances(runs=1, ends=0.0, swap=0.0, failure=failure)
        for found in (
            forecast.forecast(snapshot, policy, made, chances),
            forecast.forecast_peer("operator", snapshot, policy, made, chances),
        ):
            curve = found.runs[0].curve
            assert curve[-1][1:] == (versions, 0)
            assert all(sum(gpus.values()) + down == 48 for dummy, gpus, down in curve)


def test_causes_add_up_to_what_is_lost_and_the_spread_has_it_within() -> None:
    snapshot, policy = example("training-97")
    for found in forecast.beside(snapshot, policy, None, forecast.PEERS[:2], forecast.Chances(runs=10, failure=0.2)):
        told = found.as_dict()
        assert sum(told["lost_by_cause"].values()) == pytest.approx(told["lost_gpu_hours"], abs=0.03)
        for mean in ("lost_gpu_hours", "finish_seconds"):
            low, dummy, high = told[f"{mean}_spread"]
            assert low < told[mean] < high
        assert 0 < told["failed_nodes"] < 32


@pytest.mark.parametrize(("works", "runs"), [(4, 20), (10_000, 9), (60_000, 3)])
def test_large_fleets_are_played_less_often(works: int, runs: int) -> None:
    ended = tuple(workload(f"w{n}", "n0", gpus=0, remaining=0.0) for n in range(works))
    assert len(forecast.beside(fleet_of(1, *ended), Policy(NEW), None, (), forecast.Chances(runs=0))[0].runs) == runs


def one_node(**values: Any) -> tuple[fleet.Snapshot, Policy, plan.Plan]:
    work = workload("w", "a", gpus=8, start_cost=100.0, at_risk=900.0, **values)
    snapshot = fleet.Snapshot((node("a", free={"gpu": 0}),), (work,))
    return snapshot, Policy(NEW), plan.make(snapshot, Policy(NEW))


def test_operator_evicts_and_the_work_waits_for_its_node() -> None:
    run = forecast.forecast_peer("operator", *one_node(), STEADY).runs[0]
    assert run.lost == {"moves": 0.0, "cold_starts": 8 * 1000.0, "no_room": 8 * 480.0, "idle": 0.0}
    assert (run.cold_starts, run.finish) == (1, 480.0)


def test_drain_waits_for_the_end_and_evicts_at_the_deadline() -> None:
    ended = forecast.forecast_peer("drain_and_wait", *one_node(remaining=5000.0), STEADY).runs[0]
    assert (ended.total, ended.finish, ended.waits) == (0.0, 5480.0, 1)
    late = forecast.forecast_peer("drain_and_wait", *one_node(), STEADY, drain_deadline=3600.0).runs[0]
    assert (late.cold_starts, late.finish) == (1, 4080.0)


def test_drain_leaves_gpus_idle() -> None:
    snapshot = fleet.Snapshot(
        (node("a", free={"gpu": 4}),),
        (workload("w", "a", gpus=4, remaining=1000.0),),
        queue={"H100": fleet.Demand(8.0)},
    )
    made = plan.make(snapshot, Policy(NEW))
    run = forecast.forecast_peer("drain_and_wait", snapshot, Policy(NEW), made, STEADY).runs[0]
    assert run.lost["idle"] == 4 * 1000.0


def test_all_at_once_leaves_no_room() -> None:
    nodes = tuple(node(name) for name in "abc")
    snapshot = fleet.Snapshot(nodes, (workload("w", "a", gpus=8, start_cost=0.0),))
    made = plan.make(snapshot, Policy(NEW))
    run = forecast.forecast_peer("all_at_once", snapshot, Policy(NEW), made, STEADY).runs[0]
    assert run.lost["no_room"] == 8 * 480.0


def test_list_order_evicts_the_same_work_again_and_again() -> None:
    nodes = tuple(node(name) for name in "abc")
    snapshot = fleet.Snapshot(nodes, (workload("w", "a", gpus=8),))
    made = plan.make(snapshot, Policy(NEW))
    assert forecast.forecast_peer("operator", snapshot, Policy(NEW), made, STEADY, parallel=1).runs[0].cold_starts > 1
    assert forecast.forecast(snapshot, Policy(NEW), made, STEADY).runs[0].cold_starts == 1


def test_work_that_may_not_be_disturbed_is_not_started_cold_by_chance() -> None:
    """It ends later than a batch may wait in some runs: its node is given up there."""
    work = workload("w", "n0", gpus=8, may=frozenset(("protect",)), remaining=7000.0)
    policy = Policy(NEW, canary=("n0",))
    found = forecast.beside(fleet_of(2, work), policy, None, (), forecast.Chances(runs=20))[0]
    assert sum(run.cold_starts for run in found.runs) == 0
    assert 0 < sum(run.failed for run in found.runs) < 20


@pytest.mark.parametrize("way", ["nobody", "plan"])
def test_unknown_ways_are_refused(way: str) -> None:
    with pytest.raises(BadPolicy, match="none of operator"):
        forecast.forecast_peer(way, *one_node(), STEADY)


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "protected"])
def test_example_fleets_lose_less_than_by_evicting(name: str) -> None:
    snapshot, policy = example(name)
    ours, operator, dummy, at_once = forecast.beside(snapshot, policy, None, forecast.PEERS, forecast.Chances(runs=3))
    assert ours.lost < operator.lost
    assert ours.lost < at_once.lost


@pytest.mark.parametrize("name", list(POLICIES))
def test_the_page_of_an_example_shows_what_is_printed(name: str) -> None:
    snapshot, policy = example(name)
    made = plan.make(snapshot, policy)
    shown = (
        table.impossible(made)
        if made.impossible
        else table.beside(forecast.beside(snapshot, policy, made.as_dict(), forecast.PEERS, forecast.Chances()))
    )
    text = "\n".join(f"    {line}".rstrip() for line in shown)
    assert text in (EXAMPLES / f"{name}.md").read_text(), f"the page of {name} should have:\n{text}"


def test_example_that_cannot_be_upgraded_says_why() -> None:
    snapshot, policy = example("protected")
    made = plan.make(snapshot, policy)
    assert made.impossible
    assert "experiment-0 is protected" in dict(made.blocked)["lab-0"]
    assert "no_room:gpu 0 of 6" in dict(made.blocked)["lab-3"]
    with pytest.raises(BadPolicy, match="lab-"):
        forecast.beside(snapshot, policy, None, (), STEADY)


def test_example_racks_are_never_split() -> None:
    snapshot, policy = example("nvl72")
    for batch in plan.make(snapshot, policy).batches:
        assert len({name.split("-")[0] for name in batch.nodes}) == 1
        assert len(batch.nodes) == 18


def test_example_mig_workloads_are_not_moved() -> None:
    snapshot, policy = example("mixed-mig")
    fates = [fate for batch in plan.make(snapshot, policy).batches for fate in batch.fates]
    assert {fate.fate for fate in fates if fate.workload.startswith("notebook")} == {"cold_start"}
    assert any(fate.fate == "move" for fate in fates)


def test_examples_are_as_their_script_writes_them(tmp_path: Path) -> None:
    script = tmp_path / "make.py"
    script.write_text((EXAMPLES / "make.py").read_text())
    runpy.run_path(str(script), run_name="__main__")
    for name in POLICIES:
        assert (tmp_path / f"{name}.json").read_text() == (EXAMPLES / f"{name}.json").read_text()


@pytest.mark.parametrize(
    ("chances", "options", "message"),
    [
        ({"runs": -1}, {}, "runs must be from 1 to 1000"),
        ({"runs": 10**6}, {}, "runs must be from 1 to 1000"),
        ({"failure": 1.5}, {}, "failure a chance from 0 to 1"),
        ({"failure": float("nan")}, {}, "failure a chance from 0 to 1"),
        ({}, {"parallel": -3}, "peer_parallel"),
        *[({}, {"drain_deadline": late}, "drain_deadline must be") for late in (-1.0, float("nan"), float("inf"))],
    ],
)
def test_what_cannot_be_forecast_with_is_refused(chances: dict, options: dict, message: str) -> None:
    snapshot = fleet.Snapshot((node("a"),))
    with pytest.raises(BadPolicy, match=message):
        forecast.beside(snapshot, Policy(NEW), None, (), forecast.Chances(**chances), **options)
