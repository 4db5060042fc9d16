# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ansible_collections.gpufleet.driver.plugins.module_utils import account


@pytest.mark.parametrize(
    ("names", "expected"),
    [([], ""), (["a"], "a"), (list("abcd"), "a, b, c, d"), (list("abcdef"), "a, b, c, d and 2 more")],
)
def test_named(names: list[str], expected: str) -> None:
    assert account.named(names) == expected


def test_one_reason_is_said_once_for_all_its_nodes() -> None:
    nodes = [
        {
            "name": f"gpu-{number}",
            "reason": f"gpu-{number} does not answer: PID {number} since 2026-11-29 18:0{number}:00Z",
        }
        for number in range(1, 7)
    ]
    nodes.insert(0, {"name": "gpu-9", "reason": "package x is held"})
    nodes.append({"name": "gpu-8", "reason": ""})
    held = {"name": "gpu-7", "reason": "package x is held"}
    first, second = account.grouped([*nodes, held])
    assert first["nodes"] == [f"gpu-{number}" for number in range(1, 7)]
    assert first["text"] == (
        "6 nodes (gpu-1, gpu-2, gpu-3, gpu-4 and 2 more): for example of gpu-1: "
        "gpu-1 does not answer: PID 1 since 2026-11-29 18:01:00Z"
    )
    assert second["text"] == "2 nodes (gpu-9, gpu-7): package x is held"
    assert account.grouped([held])[0]["text"] == "gpu-7: package x is held"
    warned = [{"name": "gpu-1", "warnings": ["warm", "old"]}, {"name": "gpu-2", "warnings": ["old"]}, {"name": "gpu-3"}]
    assert [group["text"] for group in account.grouped(warned, "warnings")] == [
        "2 nodes (gpu-1, gpu-2): old",
        "gpu-1: warm",
    ]
    assert account.grouped([]) == []


def test_a_machine_under_two_names_is_found() -> None:
    nodes = [
        {"name": "a", "machine": "1 a"},
        {"name": "b", "machine": "2 b"},
        {"name": "a.example.com", "machine": "1 a"},
    ]
    copies = [{"name": "f", "machine": "3 f"}, {"name": "g", "machine": "3 g"}]
    unknown = [{"name": "c"}, {"name": "d", "machine": ""}, {"name": "e", "machine": ""}]
    assert account.doubles([*nodes, *copies, *unknown]) == [["a", "a.example.com"]]


def finding(check: str, message: str, following: str | None = None, level: str = "error") -> dict[str, Any]:
    return {"check": check, "message": message, "next": following, "level": level}


@pytest.mark.parametrize(
    ("findings", "expected"),
    [
        ([], ""),
        ([finding("a", "warm", level="warning")], ""),
        (
            [finding("a", "no headers", "install them"), finding("b", "no space")],
            "no headers (next: install them); no space",
        ),
        (
            [finding("a", f"{name} is not available at 5.1", f"policy {name}") for name in ("x", "y or z", "x")],
            "x, y or z are not available at 5.1 (next: policy x)",
        ),
        ([finding("a", "x is held"), finding("a", "y was lost")], "x is held; y was lost"),
        ([finding("a", "is held"), finding("a", "x is held")], "is held; x is held"),
    ],
    ids=["none", "no error", "two", "alike", "one check, not alike", "nothing before what is alike"],
)
def test_reasons(findings: list[dict[str, Any]], expected: str) -> None:
    assert account.reasons(findings) == expected


def lines(**outcomes: str) -> list[dict[str, str]]:
    return [{"name": name.replace("_", "-"), "outcome": outcome} for name, outcome in outcomes.items()]


def test_next_steps_cover_all_nodes_in_the_order_to_type_them() -> None:
    run = lines(
        g1="upgraded", g2="rolled back", g3="refused", g4="lost", g5="quarantined", g6="not started", g7="skipped"
    )
    steps = account.next_steps(run, "upgrade", "-i inv -e gpu_driver_version=5", hosts="rack7")
    assert [(step["say"], step["command"]) for step in steps] == [
        (
            "bring up g4; then, back to the former driver and into service",
            "ansible-playbook gpufleet.driver.recover -i inv -e gpu_driver_version=5 -e gpu_hosts=g4",
        ),
        (
            "look at g5; then, back to the former driver and into service",
            "ansible-playbook gpufleet.driver.recover -i inv -e gpu_driver_version=5 -e gpu_hosts=g5",
        ),
        (
            "mend what is said of g2, g3, g7; then try again",
            "ansible-playbook gpufleet.driver.upgrade -i inv -e gpu_driver_version=5 -e gpu_hosts=g2,g3,g7",
        ),
        (
            "when that is done, go on with the other 1",
            "ansible-playbook gpufleet.driver.upgrade -i inv -e gpu_driver_version=5 -e gpu_hosts=rack7",
        ),
    ]


def test_commands_to_type_survive_a_shell() -> None:
    started = account.started_with(["my hosts.yml"], {"gpu_driver_version": "5", "gpu_lock_takeover": ""})
    assert started == "-i 'my hosts.yml' -e gpu_driver_version=5"
    (step,) = account.next_steps(lines(g1="not started"), "upgrade", started, hosts="rack7:!g2")
    assert step["command"] == f"ansible-playbook gpufleet.driver.upgrade {started} -e 'gpu_hosts=rack7:!g2'"


@pytest.mark.parametrize(
    ("run", "playbook", "good", "expected"),
    [
        (lines(a="upgraded", b="already"), "upgrade", account.GOOD, []),
        (lines(a="not started"), "upgrade", account.GOOD, ["go on with the other 1"]),
        (
            lines(a="upgraded", b="left for later"),
            "upgrade",
            (*account.GOOD, "left for later"),
            ["go on with the other 1"],
        ),
        (lines(a="rolled back"), "rollback", ("rolled back",), []),
    ],
    ids=["all good", "stopped by a window", "only the canary", "a rollback that went well"],
)
def test_next_steps_where_little_is_to_do(run: Any, playbook: str, good: Any, expected: list[str]) -> None:
    assert [step["say"] for step in account.next_steps(run, playbook, "", good)] == expected


def work(name: str, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "state": "running",
        "declared": True,
        "gpus": [0],
        "memory": 2**30,
        "since": 0.0,
        "then": "is stopped",
        **more,
    }


def test_equal_work_of_many_nodes_is_one_line_and_the_undeclared_is_a_warning() -> None:
    nodes = [
        {
            "name": f"g{number}",
            "work": [work("counter"), work("idle", state="stopped", gpus=[], memory=None, then="is left so")],
        }
        for number in range(1, 4)
    ]
    nodes[1]["work"].append(
        work("python of alice (PID 4)", declared=False, then="is waited for", gpus=[0, 1], memory=None)
    )
    nodes[1]["work"].append(work("old", declared=False, state="stopped"))
    assert account.work_lines([*nodes, {"name": "g4"}]) == [
        "3 nodes (g1, g2, g3): counter (3 GPUs, 3.0 GiB) is stopped",
        "3 nodes (g1, g2, g3): idle is left so",
        "warning: g2: python of alice (PID 4) (2 GPUs, since 1970-01-01 00:00Z) is waited for",
    ]


# -- where the time went


def step(name: str, at: float, ended: float, state: str = "done") -> dict[str, Any]:
    return {"name": name, "at": at, "ended": ended, "state": state}


UPGRADED = {
    "run": {"id": "r", "begun": 100.0},
    "steps": [
        step("stop workloads", 101, 110),
        step("stop services", 111, 112),
        step("packages", 113, 140),
        step("reboot", 141, 200),
        step("restore services", 201, 202),
        step("start workloads", 210, 212),
    ],
    "outcome": {"name": "upgraded", "at": 213.0},
}


def spans(journal: dict[str, Any]) -> list[tuple[str, float, float]]:
    return [(phase["name"], phase["start"], phase["end"]) for phase in account.phases(journal)]


def test_phases_of_an_upgrade_follow_each_other_without_gaps() -> None:
    assert spans(UPGRADED) == [
        ("evacuate", 100, 110), ("install", 110, 140), ("reboot", 140, 200), ("install", 200, 202),
        ("validate", 202, 210), ("return", 210, 213),
    ]  # fmt: skip
    assert account.durations(UPGRADED) == {"evacuate": 10, "install": 32, "validate": 11, "reboot": 60}


def test_phases_of_a_node_that_went_back() -> None:
    journal = {
        **UPGRADED,
        "steps": [
            step("stop workloads", 101, 110),
            step("load modules", 111, 120, "failed"),
            step("rollback", 125, 125),
            step("packages", 126, 140),
            step("start workloads", 150, 151),
        ],
        "outcome": {"name": "rolled_back", "at": 155.0},
    }
    assert spans(journal) == [
        ("evacuate", 100, 110),
        ("install", 110, 125),
        ("roll back", 125, 150),
        ("return", 150, 155),
    ]
    assert account.phases(journal)[1]["failed"] == ["load modules"]
    assert account.durations(journal) == {}, "not how long an upgrade takes"


def test_phases_of_a_canary_that_failed_its_soak() -> None:
    again = [step("stop workloads", 300, 301), step("rollback", 302, 302), step("start workloads", 320, 321)]
    journal = {**UPGRADED, "steps": UPGRADED["steps"] + again, "outcome": {"name": "rolled_back", "at": 330.0}}
    assert spans(journal)[5:] == [
        ("return", 210, 212), ("in service", 212, 300), ("evacuate", 300, 302), ("roll back", 302, 320),
        ("return", 320, 330),
    ]  # fmt: skip


def test_a_rollback_of_another_day_shows_itself_only() -> None:
    again = [step("stop workloads", 9300, 9301), step("rollback", 9302, 9302), step("start workloads", 9320, 9321)]
    run = {"id": "r2", "begun": 100.0, "earlier_ids": ["r"]}
    journal = {"run": run, "steps": UPGRADED["steps"] + again, "outcome": {"name": "rolled_back", "at": 9330.0}}
    assert spans(journal) == [("evacuate", 9300, 9302), ("roll back", 9302, 9320), ("return", 9320, 9330)]


@pytest.mark.parametrize(
    "journal",
    [{}, {"run": None, "steps": [], "outcome": None}, {"run": {"id": "r", "target": "5"}, "steps": [], "outcome": {}}],
    ids=["no journal", "no run", "a run without a time"],
)
def test_no_phases_without_a_run(journal: dict[str, Any]) -> None:
    assert account.phases(journal) == [] and account.durations(journal) == {}
    assert account.timeline([{"name": "a", "journal": journal}])["nodes"] == {}


def test_an_interrupted_run_ends_with_its_last_step() -> None:
    journal = {
        **UPGRADED,
        "steps": [step("stop workloads", 101, 110), {"name": "packages", "at": 111, "state": "started"}],
    }
    journal["outcome"] = None
    assert spans(journal) == [("evacuate", 100, 110), ("install", 110, 111)]


def test_nodes_beside_each_other() -> None:
    later = {
        **UPGRADED,
        "run": {"id": "r", "begun": 200.0},
        "steps": [step("stop workloads", 201, 300)],
        "outcome": None,
    }
    told = account.timeline([{"name": "a", "journal": UPGRADED}, {"name": "b", "journal": later}, {"name": "c"}])
    assert (told["start"], told["seconds"], list(told["nodes"])) == (100, 200, ["a", "b"])
    assert told["nodes"]["b"] == [{"name": "evacuate", "left": 50, "width": 50, "seconds": 100, "failed": []}]


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.4, "0 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")]
)
def test_lasted(seconds: float, expected: str) -> None:
    assert account.lasted(seconds) == expected


PLAN = {
    "canary": ["g1"],
    "batches": [{"name": "canary", "nodes": ["g1"]}, {"name": "batch 1", "nodes": ["g2", "g3"]}],
    "skipped": [{"node": "g4", "reason": "opted out"}],
}


def found(name: str, already: bool = False, **run: str) -> dict[str, Any]:
    return {"name": name, "loaded": "" if name == "g3" else "1", "installed": "1", "already": already, "run": run}


def rows(lines: list[dict[str, Any]]) -> list[str]:
    keys = ("name", "batch", "before", "after", "outcome", "reason", "next")
    return [" | ".join(line[key] for key in keys) for line in lines]


WELL = {"gpu_outcome": {"name": "upgraded", "reason": "", "next": ""}}
CLOSED = {"gpu_gate": {"open": False, "reasons": ["1 node failed", "the window ends"]}}


@pytest.mark.parametrize(
    ("known", "only_canary", "expected"),
    [
        (
            {"g1": WELL},
            True,
            [
                "g1 | canary | 1 | 2 | upgraded |  | ",
                "g2 | batch 1 | 1 | 1 | left for later |  | ",
                "g3 | batch 1 | 1 |  | left for later |  | ",
                "g4 | - | 1 | 1 | skipped | opted out | ",
                "g5 | - | 1 | 2 | already |  | ",
            ],
        ),
        (
            {
                "g1": {"gpu_outcome": {"name": "rolled_back", "reason": "no load", "next": "mend"}},
                "g2": CLOSED,
                "g4": {"gpu_outcome": {"name": "lost", "reason": "away", "next": "recover"}},
            },
            False,
            [
                "g1 | canary | 1 | 1 | rolled back | no load | mend",
                "g2 | batch 1 | 1 | 1 | not started | no further batch started: 1 node failed; the window ends | ",
                "g3 | batch 1 | 1 |  | not started | no further batch started: 1 node failed; the window ends | ",
                "g4 | - | 1 | ? | lost | away | recover",
                "g5 | - | 1 | 2 | already |  | ",
            ],
        ),
    ],
)
def test_upgrade_lines(known: dict[str, Any], only_canary: bool, expected: list[str]) -> None:
    nodes = [found("g1"), found("g2"), found("g3"), found("g4"), found("g5", already=True)]
    hostvars = {node["name"]: known.get(node["name"], {}) for node in nodes}
    assert rows(account.upgrade_lines(nodes, hostvars, PLAN, "2", only_canary)) == expected


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [("rolled_back", "g1 | canary | 0 | 0 | rolled back |  | "), ("refused", "g1 | canary | 0 | 1 | refused |  | ")],
)
def test_an_upgrade_that_went_on_with_another_is_told_by_where_the_node_came_from(outcome: str, expected: str) -> None:
    known = {"gpu_outcome": {"name": outcome}}
    node = {**found("g1"), "previous": "0"}
    assert rows(account.upgrade_lines([node], {"g1": known}, PLAN, "2")) == [expected]


def test_a_node_that_is_good_but_not_in_service_goes_on_rather_than_back() -> None:
    known = {"gpu_outcome": {"name": "quarantined", "reason": "the balancer", "next": "", "loaded": "2", "go_on": True}}
    told = account.upgrade_lines([found("g1")], {"g1": known}, PLAN, "2")
    assert rows(told) == ["g1 | canary | 1 | 2 | quarantined | the balancer | "]
    assert [step["command"].split()[1] for step in account.next_steps(told, "upgrade", "")] == [
        "gpufleet.driver.upgrade"
    ]


def test_return_lines() -> None:
    nodes = [found(name, previous="0") for name in ("g1", "g2", "g4", "g5")]
    hostvars: dict[str, dict[str, Any]] = {
        "g1": {"gpu_outcome": {"name": "rolled_back", "reason": "undone", "next": "mend"}},
        "g2": {"gpu_outcome": {"name": "refused", "reason": "no packages", "next": "mend"}},
        "g4": {},
        "g5": {"gpu_outcome": {"name": "quarantined", "reason": "no load", "next": "look"}},
    }
    assert rows(account.return_lines(nodes, hostvars)) == [
        "g1 | - | 1 | 0 | rolled back |  | ",
        "g2 | - | 1 | 1 | refused | no packages | mend",
        "g4 | - | 1 | 1 | not started |  | ",
        "g5 | - | 1 | ? | quarantined | no load | look",
    ]


def test_a_line_says_why_a_good_node_stays_out_of_service() -> None:
    uncordoned = {"g1": {"failed": False, "msg": "g1 is drained by alice"}, "g2": {"failed": True, "msg": "no answer"}}
    hostvars = {name: {**WELL, "__uncordon_result": {"nodes": uncordoned}} for name in ("g1", "g2", "g4")}
    nodes = [found(name, previous="0") for name in hostvars]
    for lines in (account.upgrade_lines(nodes, hostvars, PLAN, "2"), account.return_lines(nodes, hostvars)):
        assert [line["stays"] for line in lines] == ["g1 is drained by alice", "", ""]


def test_a_line_has_the_journal_of_its_run_and_nothing_else_of_it() -> None:
    journal = {"run": {"id": "r"}, "steps": [], "outcome": {}, "before": {"secret": 1}, "schema": 1}
    kept = {"run": {"id": "r"}, "steps": [], "outcome": {}}
    for known in ({"__uncordon_closed": {"journal": journal}}, {"__quarantine_journal": {"journal": journal}}):
        (line,) = account.upgrade_lines([found("g1")], {"g1": known}, PLAN, "2")
        assert line["journal"] == kept


MOVED = {"workload": "trainer", "how": "moved", "to": "g4", "reasons": [], "bytes": 13 << 20, "seconds": 4.4}
REASON = {"reason": "lock_timeout", "observed": "PID 7: no answer"}


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (
            {**MOVED, "progress": [120.0, 121.0, 131.0]},
            "trainer (g1 to g4): moved, stood still for 4 s, 13 MiB, progress 120 before, 131 after",
        ),
        (MOVED, "trainer (g1 to g4): moved, stood still for 4 s, 13 MiB"),
        (
            {**MOVED, "how": "stayed", "to": None, "reasons": [REASON], "bytes": 0},
            "trainer (g1): not saved; lock_timeout: PID 7: no answer",
        ),
        ({**MOVED, "how": "saved", "to": None, "bytes": 1 << 20}, "trainer (g1): has saved itself, 1 MiB"),
        (
            {
                **MOVED,
                "how": "cold_start",
                "to": None,
                "reasons": [REASON],
                "bytes": 0,
                "kept": "t-1",
                "next": "ansible g1",
            },
            "trainer (g1): started again from its own state; lock_timeout: PID 7: no answer; "
            "its save t-1 is kept for now (next: ansible g1)",
        ),
        ({**MOVED, "how": "absent", "to": None}, None),
    ],
)
def test_what_became_of_work_that_was_to_move(work: dict[str, Any], text: str | None) -> None:
    hostvars: dict[str, Any] = {"g1": {"__evacuate_moved": {"workloads": [work]}}, "g2": {"__evacuate_moved": {}}}
    lines = account.upgrade_lines([found("g1"), found("g2")], hostvars, PLAN, "2")
    assert [row["text"] for row in account.moves(lines)] == ([text] if text else [])


def test_work_that_goes_home_is_told_of_the_node_it_leaves() -> None:
    hostvars = {"g1": {"__evacuate_guests": {"workloads": [{**MOVED, "to": "g0"}]}}}
    (row,) = account.moves(account.upgrade_lines([found("g1")], hostvars, PLAN, "2"))
    assert (row["origin"], row["to"], row["still"]) == ("g1", "g0", "4 s")


def test_what_became_of_nodes_and_which_driver_they_have() -> None:
    hostvars: dict[str, dict[str, Any]] = {
        "a": {"gpu_outcome": {"name": "upgraded"}},
        "b": {"gpu_outcome": {"name": "rolled_back"}},
        "c": {},
    }
    assert account.outcomes("abc", hostvars) == {"a": "upgraded", "b": "rolled_back"}
    assert account.outcomes("abc", hostvars, ["rolled_back", "lost"]) == {"b": "rolled_back"}
    nodes = [{"name": name, "loaded": loaded} for name, loaded in (("a", "535.1"), ("b", "535.2"), ("c", None))]
    gone_on_with = [{**node, "previous": "525.1"} for node in nodes]
    assert account.driver_versions(gone_on_with, hostvars, "550.1") == {"a": "550.1", "b": "525.1", "c": None}
    assert account.driver_versions(nodes, hostvars, "550.1") == {"a": "550.1", "b": "535.2", "c": None}


LOOKS = Path(__file__).resolve().parents[2] / "playbooks/tasks"


def looked(file: str, **found: Any) -> dict[str, Any]:
    """What a way of looking at a node tells of it: with its keys, and the values of a node that says nothing."""
    text = yaml.safe_load((LOOKS / "look.yml").read_text())[1]["rescue"][0]["ansible.builtin.set_fact"]["gpu_node"]
    tasks = yaml.safe_load((LOOKS / file).read_text())
    keys = text if file == "look.yml" else tasks[1]["ansible.builtin.set_fact"]["gpu_node"]
    known = {**text, "seen": file != "look.yml", "reason": "", "lock": {}, "machine": "", **found}
    return {key: known[key] for key in keys}


RUN = {"id": "r1", "target": "550.90.07", "previous": "535.1"}
SERVICE: dict[str, Any] = {"foreign_nodes": ["n1"], "nodes": {"n1": {"msg": "n1: drained by root"}}}


@pytest.mark.parametrize("file", ["look_host.yml", "look_gpu_operator.yml"])
def test_status_tells_of_interrupted_nodes_however_they_were_looked_at(file: str) -> None:
    found = {"run": RUN, "unfinished": True, "loaded": "535.1", "gpus": ["L40S"], "step": "packages"}
    node = looked(file, name="n1", **found)
    silent = looked("look.yml", name="gpu-22", reason="does not answer")
    assert account.status_lines([node, silent], SERVICE, ["my hosts.yml"]) == [
        "node    loaded        installed     library       GPUs  last run",
        "n1      535.1         -             -                1  r1 to 550.90.07: interrupted after or in packages",
        "gpu-22  -             -             -                0  unknown",
        "now: gpu-22: does not answer",
        "out of service: n1: drained by root",
        "next: gpu-22: mend what is said above, then ask for the status again; "
        "recover brings back what was left behind",
        "next: 1 interrupted: if no run is at work any more, run the upgrade again, which goes on with them, "
        "or bring them back, to 535.1:",
        "      ansible-playbook gpufleet.driver.recover -i 'my hosts.yml' -e gpu_hosts=n1 -e gpu_lock_takeover=r1",
    ]


@pytest.mark.parametrize(
    ("found", "last", "below"),
    [
        ({}, "none", []),
        ({"run": {**RUN, "given_up": ["r0"]}, "outcome": {"name": "upgraded"}}, "(gave up r0): upgraded", []),
        ({"run": RUN, "outcome": {"name": "rolled_back", "reason": "x"}}, "rolled back to 535.1", ["why: n1: x"]),
        ({"run": RUN, "unfinished": True}, "interrupted at the beginning", ["next: 1 interrupted", "      ansible"]),
        ({"run": RUN, "unfinished": True, "at_work": True}, "still at work", []),
        (
            {"run": RUN, "outcome": {"name": "quarantined", "reason": "no GPU"}},
            "quarantined",
            ["why: n1: no GPU", "next: 1 quarantined: look at them, then bring them back, to 535.1:", "      ansible"],
        ),
        (
            {"lock": {"lease": {"run_id": "r2", "holder": "me@here"}, "ended": ["r1"]}},
            "none",
            ["locked: the fleet is run r2's, of me@here; if"],
        ),
        ({"lock": {"lease": {"run_id": "r2", "holder": "me@here"}, "ended": ["r2"]}}, "none", []),
        ({"lock": {"error": "damaged"}}, "none", ["lock: damaged"]),
    ],
)
def test_status_of_a_node(found: dict[str, Any], last: str, below: list[str]) -> None:
    dummy, row, *rest = account.status_lines([looked("look_host.yml", name="n1", **found)], {"foreign_nodes": []})
    assert row.endswith(last)
    assert [one.startswith(start) for one, start in zip(rest, below, strict=True)] == [True] * len(below)


def test_status_says_that_the_scheduler_could_not_be_asked() -> None:
    said = account.status_lines([looked("look_host.yml", name="n1")], {"msg": "no answer"})
    assert said[-1] == "out of service: the scheduler could not be asked: no answer"
