# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.planning.gate import (
    check,
    decide,
    doubts_of,
    lock_objections,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.planning.policy import BadPolicy, Window

NIGHT = [Window.of({"start": "22:00", "end": "04:00", "tz": "Europe/Berlin"})]


def berlin(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo("Europe/Berlin")).timestamp()


@pytest.mark.parametrize(
    ("outcomes", "lost", "options", "reason"),
    [
        pytest.param({}, [], {}, None, id="first batch"),
        pytest.param({"a": "upgraded", "b": "already"}, [], {}, None, id="all good"),
        pytest.param({"a": "rolled_back"}, [], {}, "a (rolled back)", id="A-ANS-01 rescued is still failed"),
        pytest.param({}, ["a"], {}, "a (lost)", id="A-ANS-02 unreachable counts"),
        pytest.param({"a": "upgraded"}, ["a"], {}, "a (lost)", id="lost after it was upgraded"),
        pytest.param({"a": "skipped"}, ["a"], {}, None, id="left out when its turn came"),
        pytest.param({"a": "quarantined"}, [], {"max_failed": 1}, None, id="within the budget"),
        pytest.param({"a": "refused", "b": "lost"}, [], {"max_failed": 1}, "2 failed, at most 1 may", id="over it"),
        pytest.param({"a": "an outcome nobody knows"}, [], {}, "nobody knows", id="unknown outcome is not success"),
        pytest.param({}, [], {"not_after": 160.0, "batch_seconds": 60}, None, id="just fits the window"),
        pytest.param({}, [], {"not_after": 159.0, "batch_seconds": 60}, "window ends in 59 s", id="does not fit"),
        pytest.param({}, [], {"not_after": 50.0}, "window ends in 0 s", id="window is over"),
        pytest.param({}, [], {"stop_requested": "/run/stop"}, "/run/stop", id="stop file"),
        pytest.param({}, [], {"doubts": ["n2 is gone"]}, "plan anew: n2 is gone", id="the plan no longer holds"),
    ],
)
def test_gate(outcomes: dict[str, str], lost: list[str], options: dict[str, Any], reason: str | None) -> None:
    gate = decide(outcomes, lost, now=100.0, **{"max_failed": 0, **options})
    assert gate.open is (reason is None)
    assert reason is None or reason in gate.reasons[0]


@pytest.mark.parametrize(
    ("now", "minutes", "reason"),
    [
        ("2026-03-03 22:00", 60, None),
        ("2026-03-04 03:00", 60, None),
        ("2026-03-04 03:01", 60, "60 minutes left for a batch, run again when the next opens: 2026-03-04 22:00+01:00"),
        ("2026-03-04 12:00", 0, "run again when the next opens: 2026-03-04 22:00+01:00"),
        # Clocks go forward at 02:00 and back at 03:00: those windows are five and seven hours long.
        ("2026-03-28 22:00", 301, "next opens: 2026-03-29 22:00+02:00"),
        ("2026-10-24 22:00", 420, None),
        ("2026-03-04 22:00", 361, "a batch takes 361 minutes and no maintenance window is that long"),
    ],
)
def test_a_batch_that_cannot_finish_in_a_window_is_not_started(now: str, minutes: int, reason: str | None) -> None:
    gate = decide({}, [], max_failed=0, now=berlin(now), windows=NIGHT, batch_seconds=minutes * 60)
    assert gate.open is (reason is None)
    assert reason is None or gate.reasons[0].endswith(reason)


def test_every_reason_is_told_and_long_lists_are_cut() -> None:
    gate = decide({f"n{i:02}": "lost" for i in range(15)}, [], max_failed=3, now=10, not_after=5, stop_requested="x")
    assert len(gate.reasons) == 3 and len(gate.failed) == 15
    assert "and 5 more" in gate.reasons[0]


@pytest.mark.parametrize(
    ("review", "doubts"),
    [
        (None, []),
        ({"safe": True, "reasons": []}, []),
        ({}, ["its review does not say that it does"]),
        ({"safe": "False"}, ["its review does not say that it does"]),
        ({"safe": "True", "reasons": "a text"}, ["a text"]),
        ({"safe": False, "reasons": ["n2 is gone", 3]}, ["n2 is gone", "3"]),
    ],
)
def test_only_a_clear_yes_leaves_no_doubt(review: Any, doubts: list[str]) -> None:
    assert doubts_of(review) == doubts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"not_after": float("nan")}, "not_after nan is not"),
        ({"batch_seconds": float("inf")}, "batch_seconds inf is not"),
        ({"batch_seconds": -1.0}, "batch_seconds -1.0 is not"),
        ({"max_failed": -1}, "max_failed -1 is not"),
        ({"outcomes": {"a": None}}, "outcomes.a None is no outcome"),
        ({"outcomes": {"a": {}}}, "outcomes.a {} is no outcome"),
        ({"lock_answers": {"a": None}}, "lock_answers.a None is no result"),
        ({"lock_answers": {"a": {"lock": "x"}}}, "lock_answers.a {'lock': 'x'} is no result"),
    ],
)
def test_what_cannot_be_decided_with_is_refused(options: dict[str, Any], message: str) -> None:
    good = {
        "not_after": 0,
        "batch_seconds": 0.0,
        "max_failed": 0,
        "outcomes": {"a": "lost"},
        "lock_answers": {"a": LOST},
    }
    check(good)
    with pytest.raises(BadPolicy) as caught:
        check({**good, **options})
    assert message in str(caught.value)


OURS, FREE, LOST = (
    {"lock": {"run_id": "r2"}},
    {"lock": {}, "msg": "it is free"},
    {"msg": "stopped answering", "lost": True},
)
THEIRS = {"lock": {"run_id": "r1"}, "msg": "locked by run r1"}
TOLD = {"lock": {"run_id": "r2"}, "ended": ["r1"]}


@pytest.mark.parametrize(
    ("keepers", "others", "reason"),
    [
        pytest.param([OURS, OURS, OURS], [], None, id="all three"),
        pytest.param([OURS, OURS, LOST], [], None, id="one is lost"),
        pytest.param([OURS, OURS, THEIRS], [], None, id="one holds out, in a partition or for a dead run"),
        pytest.param([OURS, OURS, {}], [], None, id="one was never asked"),
        pytest.param([OURS, THEIRS, THEIRS], [], "b, c: locked by run r1", id="another run has two"),
        pytest.param([OURS, THEIRS, LOST], [], "b: locked by run r1; c: stopped answering", id="a tie"),
        pytest.param([OURS, LOST, LOST], [], "b, c: stopped answering", id="two are lost"),
        pytest.param([FREE, FREE, OURS], [], "a, b: it is free", id="somebody took over and ended"),
        pytest.param([TOLD, THEIRS, LOST], [], "b: locked by run r1; c: stopped answering", id="one, and an ended one"),
        pytest.param([OURS, LOST], [], None, id="of two, the one that answers"),
        pytest.param([OURS, THEIRS], [], "b: locked by run r1", id="of two, one holds out"),
        pytest.param([TOLD, THEIRS], [], None, id="of two, one holds out for a run that has ended"),
        pytest.param([OURS], [], None, id="only one"),
        pytest.param([LOST], [], "a: stopped answering", id="only one, lost"),
        pytest.param([], [], None, id="no lock"),
        pytest.param([OURS, OURS, OURS], [THEIRS], "d: locked by run r1", id="another node belongs to another run"),
        pytest.param([TOLD, OURS, OURS], [THEIRS], None, id="another node belongs to a run that has ended"),
        pytest.param([OURS, OURS, OURS], [LOST], None, id="another node is lost"),
        pytest.param([OURS, OURS, OURS], [{"msg": "cannot write"}], None, id="another node has no lock"),
    ],
)
def test_the_lock_of_the_fleet(keepers: list[dict], others: list[dict], reason: str | None) -> None:
    answers = dict(zip("abcd"[: len(keepers)] + "d", [*keepers, *others], strict=False))
    objections = lock_objections("r2", list("abc"[: len(keepers)]), answers)
    assert "; ".join(objections) == (reason or "")
    gate = decide({}, [], max_failed=0, now=1.0, objections=objections)
    assert gate.open is (reason is None)
