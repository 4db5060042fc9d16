# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a person reads before approving."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.fleet import Durations
from ansible_collections.gpufleet.driver.plugins.module_utils.planning import forecast, options, plan, table
from ansible_collections.gpufleet.driver.plugins.module_utils.planning.policy import Policy

from .fleets import NEW, fleet_of, workload

NIGHT = {"start": "22:00", "end": "04:00", "tz": "Europe/Berlin"}


def shown(count: int, **values: Any) -> list[str]:
    """The table of a plan for nodes without work, made with these options of upgrade_plan."""
    given = {name: spec.get("default") for name, spec in options.ARGUMENTS.items()} | {"version": NEW} | values
    return table.lines(plan.make(fleet_of(count), options.policy_of(given)), options.start_of(given))


@pytest.mark.parametrize(
    ("values", "dates"),
    [
        ({"windows": [NIGHT], "now": "2026-03-02T12:00:00Z"}, "Mon 2026-03-02 22:00-22:11"),
        ({"windows": [NIGHT], "now": "2026-03-02T22:55:00Z"}, "Mon 2026-03-02 23:55-Tue 2026-03-03 00:06"),
        # The clock goes from 01:59 to 03:00 that night.
        ({"windows": [NIGHT], "now": "2026-03-29T00:52:00Z"}, "Sun 2026-03-29 01:52-03:03"),
        ({"windows": [NIGHT], "now": "2026-10-25T00:55:00Z"}, "Sun 2026-10-25 02:55-02:06"),
        ({"windows": [{**NIGHT, "tz": "Asia/Kolkata"}], "now": "2026-03-02T16:30:00Z"}, "Mon 2026-03-02 22:00-22:11"),
        ({"now": "2026-03-02T23:30:00+05:30"}, "Mon 2026-03-02 23:30-23:41"),
    ],
    ids=["later today", "past midnight", "clock goes forward", "clock goes back", "other zone", "no window"],
)
def test_batches_have_dates_in_the_time_zone_of_the_window_or_of_the_start(values: Any, dates: str) -> None:
    lines = shown(1, **values)
    zone = values.get("windows", [{"tz": "UTC+05:30"}])[0]["tz"]
    assert f"in {zone} " in lines[3]
    assert f"  {dates}  " in lines[4]


def test_no_dates_are_told_if_nobody_knows_when_it_starts() -> None:
    assert shown(1)[3:5] == [
        "batch   begins  ends  nodes  stay  wait  move  cold  names of the nodes",
        "canary  0:00    0:11  1      -     -     -     -     n0",
    ]


def test_dates_beyond_all_calendars_are_left_out() -> None:
    made = plan.make(replace(fleet_of(1), durations=Durations(install=1e17)), Policy(NEW))
    assert table.lines(made, datetime(2026, 3, 2, tzinfo=timezone.utc)) == table.lines(made)


@pytest.mark.parametrize("windows", [True, False])
def test_it_is_told_that_the_other_ways_know_no_windows(windows: bool) -> None:
    snapshot, policy = fleet_of(2), Policy(NEW)
    found = forecast.beside(snapshot, policy, None, forecast.PEERS, forecast.Chances(runs=1))
    told = "the plan keeps to the maintenance windows; the other ways know none and start at once: compare losses only"
    assert (told in table.beside(found, windows)) is windows
    assert told not in table.beside(found[:1], windows)


def test_many_nodes_that_cannot_be_emptied_are_told_by_what_keeps_them() -> None:
    protected = {"may": frozenset(("protect",))}
    works = [
        workload(f"job-{n}", f"n{n}", remaining=8000.0 + 600 * n if n % 2 else None, **protected) for n in range(40)
    ]
    works += [
        workload(f"x{n}", f"n{n}", requires={f"label-{chr(97 + n)}": ()}, may=frozenset(("move",)))
        for n in range(40, 55)
    ]
    made = plan.make(fleet_of(55, *works, free={"gpu": 7}), Policy(NEW))
    assert len(made.blocked) == 55
    told = table.impossible(made)
    assert told[1].startswith(
        "  n0, n2, n4, n6, n8, n10 and 14 more: for example of n0: job-0 is protected and has no known"
    )
    assert told[2].startswith(
        "  n1, n3, n5, n7, n9, n11 and 14 more: for example of n1: job-1 is protected and ends in 2."
    )
    assert told[-1] == "  5 more, for other reasons: see the plan's JSON" and len(told) == 14


def test_a_plan_of_many_nodes_names_six_of_a_batch() -> None:
    lines = shown(10_000, batch_size="50%")
    assert len(lines) < 12 and max(map(len, lines)) < 160
    assert lines[5].endswith("n1, n2, n3, n4, n5, n6 and 4994 more")
