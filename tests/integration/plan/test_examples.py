# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The commands on the pages of the example fleets, run as written, and a plan held against a fleet that changed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

TOP = Path(__file__).resolve().parents[3]
FLEETS = TOP / "examples" / "fleets"
UPGRADE = TOP / "playbooks" / "upgrade.yml"
NAMES = sorted(path.stem for path in FLEETS.glob("*.json"))


def played(command: list[str], reports: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, "-e", f"gpu_report_dir={reports}"],
        cwd=TOP,
        env={
            **os.environ,
            "PWD": str(TOP),
            "ANSIBLE_COLLECTIONS_PATH": str(TOP / ".build"),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_SHOW_CUSTOM_STATS": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def command_on(page: Path) -> list[str]:
    found = re.findall(r"^ {4}(ansible-playbook .*)$", page.read_text(), re.MULTILINE)
    assert len(found) == 1, f"{page.name} shows {len(found)} commands"
    return shlex.split(found[0])


@pytest.mark.parametrize("name", [name for name in NAMES if name != "protected"])
def test_the_page_s_command_plans_without_a_host(name: str, tmp_path: Path) -> None:
    done = played(command_on(FLEETS / f"{name}.md"), tmp_path)
    assert done.returncode == 0, done.stdout
    plan = json.loads((tmp_path / "gpu-upgrade-plan.json").read_text())
    nodes = {node["name"] for node in json.loads((FLEETS / f"{name}.json").read_text())["nodes"]}
    assert set(plan["order"]) == nodes
    assert f"plan {plan['id']}: driver 580.95.05" in done.stdout
    forecasts = json.loads((tmp_path / "gpu-upgrade-forecast.json").read_text())
    assert [each["way"] for each in forecasts] == ["plan", "operator", "drain_and_wait", "all_at_once"]
    for each in forecasts:
        assert re.search(rf'"{each["way"]} +{each["lost_gpu_hours"]:.1f} ', done.stdout)
    assert forecasts[0]["lost_gpu_hours"] < forecasts[1]["lost_gpu_hours"]


def test_a_fleet_that_cannot_be_upgraded_says_why(tmp_path: Path) -> None:
    done = played(command_on(FLEETS / "protected.md"), tmp_path)
    assert done.returncode != 0
    assert "lab-0: experiment-0 is protected and has no known end" in done.stdout
    assert not list(tmp_path.iterdir())


def test_defaults_are_enough(tmp_path: Path) -> None:
    name = "gpu_snapshot=examples/fleets/training-97.json"
    command = ["ansible-playbook", "gpufleet.driver.plan", "-e", name, "-e", "gpu_driver_version=580.95.05"]
    misspelt = played([*command, "-e", "gpu_batchsize=3"], tmp_path)
    assert misspelt.returncode != 0 and "no setting gpu_batchsize (did you mean gpu_batch_size?)" in misspelt.stdout
    done = played(command, tmp_path)
    assert done.returncode == 0, done.stdout
    plan = json.loads((tmp_path / "gpu-upgrade-plan.json").read_text())
    assert len(plan["order"]) == 32 and "in UTC" not in done.stdout
    stats = json.loads(done.stdout.split("RUN: ")[1])
    assert stats["gpu_plan_id"] == stats["gpu_approved"] == plan["id"]
    assert stats["gpu_plan_batches"] == {batch["name"]: batch["nodes"] for batch in plan["batches"]}


def test_an_upgrade_refuses_a_snapshot(tmp_path: Path) -> None:
    """Its order could name nodes that nobody looked at."""
    inventory = tmp_path / "hosts.ini"
    inventory.write_text("[gpu_nodes]\n")
    command = [
        "ansible-playbook",
        "-i",
        str(inventory),
        "gpufleet.driver.upgrade",
        "-e",
        "gpu_driver_version=580.95.05",
    ]
    done = played([*command, "-e", "gpu_snapshot=examples/fleets/training-97.json"], tmp_path)
    assert done.returncode != 0
    assert "gpu_snapshot is for planning alone" in done.stdout


def host(name: str, **values: Any) -> dict[str, Any]:
    old = {"loaded": "570.133.20", "installed": "570.133.20"}
    return (
        {"name": name, "fit": True, "reason": "", "already": False, "gpus": ["H100"], "unfinished": False}
        | old
        | values
    )


@pytest.mark.parametrize(
    ("later", "outcomes", "options", "batch", "reason"),
    [
        pytest.param("abc", {}, {}, "canary", None, id="nothing changed"),
        pytest.param("abc", {"a": "upgraded"}, {}, "batch 1", None, id="the canary is done"),
        pytest.param("abc", {"a": "upgraded", "b": "rolled_back"}, {}, "batch 2", None, id="a failed node is over too"),
        pytest.param("ac", {"a": "upgraded"}, {}, None, None, id="nothing is left of the next batch"),
        pytest.param("bc", {}, {}, None, "a has left the fleet, and no canary is left", id="the canary is gone"),
        pytest.param(
            "abc",
            {},
            {"cordon_command": ["drain"]},
            None,
            "the fleet cannot be looked at",
            id="the scheduler says nothing",
        ),
    ],
)
def test_a_plan_is_held_against_the_fleet_before_each_batch(
    later: str, outcomes: dict[str, str], options: dict[str, Any], batch: str | None, reason: str | None, tmp_path: Path
) -> None:
    given = {
        "gpu_driver_version": "580.95.05",
        "planned": [host(name) for name in "abc"],
        "later": [host(name) for name in later],
        "outcomes": outcomes,
        "options_later": {"state_dir": str(tmp_path)} | options,
    }
    done = played(["ansible-playbook", str(Path(__file__).with_name("review.yml")), "-e", json.dumps(given)], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "review.json").read_text())
    assert told["open"] is told["review"]["safe"] is (reason is None), told
    if batch:
        assert told["next"]["name"] == told["review"]["next_batch"] == batch
    elif reason is None:
        assert (told["next"], told["review"]["left_out"]) == ({}, [{"node": "b", "reason": "has left the fleet"}])
    else:
        assert reason in told["reasons"][0] and "run again to plan anew" in told["reasons"][0]


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"gpu_windows": [{"start": "22:00", "end": "22:05"}]}, "fits no maintenance window"),
        ({"gpu_windows": [{"start": "22:00", "end": "26:00"}]}, "'26:00' is not HH:MM"),
        ({"gpu_windows": [{"from": "22:00"}]}, "needs start and end"),
        ({"gpu_forecast_failure": 2}, "gpu_forecast_failure: 2 is no chance from 0 to 1"),
        ({"gpu_start": "tonight", "gpu_windows": [{"start": "22:00", "end": "23:00"}]}, "'tonight' is not a time"),
        ({"gpu_models": ["NVIDIA L4"]}, "nothing to upgrade"),
        ({"gpu_unsupported_models": ["NVIDIA H100 80GB HBM3"]}, "580.95.05 does not support the GPU"),
    ],
)
def test_windows_and_models_reach_the_planner(variables: dict[str, Any], reason: str, tmp_path: Path) -> None:
    given = {"gpu_snapshot": "examples/fleets/training-97.json", "gpu_driver_version": "580.95.05"} | variables
    done = played(["ansible-playbook", "gpufleet.driver.plan", "-e", json.dumps(given)], tmp_path)
    assert reason in done.stdout, done.stdout
    assert (done.returncode == 0) is bool({"gpu_models", "gpu_unsupported_models"} & set(variables))


def test_a_plan_can_be_made_for_tonight(tmp_path: Path) -> None:
    window = {"start": "22:00", "end": "02:00", "tz": "Asia/Kolkata"}
    given = {"gpu_windows": [window], "gpu_start": "2026-03-02T18:00:00+00:00", "gpu_driver_version": "580.95.05"}
    given["gpu_snapshot"] = "examples/fleets/training-97.json"
    done = played(["ansible-playbook", "gpufleet.driver.plan", "-e", json.dumps(given)], tmp_path)
    assert done.returncode == 0, done.stdout
    batches = json.loads((tmp_path / "gpu-upgrade-plan.json").read_text())["batches"]
    assert "in Asia/Kolkata" in done.stdout and "Mon 2026-03-02 23:30-" in done.stdout
    assert "the other ways know none and start at once" in done.stdout
    opens, closes = 22.5 * 3600 - 24 * 3600, 22.5 * 3600 - 20 * 3600  # of every day, from 23:30 in Kolkata
    for batch in batches:
        day = (batch["starts_seconds"] - opens) // 86400 * 86400
        assert opens + day <= batch["starts_seconds"] <= batch["ends_seconds"] <= closes + day


def test_a_node_that_somebody_took_is_left_out_and_the_rest_goes_on(tmp_path: Path) -> None:
    """The tasks of upgrade.yml around the gate, over batches of which one loses a node and one all of them."""
    tasks = {task["name"]: task for play in yaml.safe_load(UPGRADE.read_text()) for task in play.get("tasks", ())}
    around = [
        "Does the plan still hold for the fleet as it is now?",
        "May this batch start?",
        "Go on to the report",
        "Leave out a node that is no longer fit for its turn, with its work",
        "Go on without it",
    ]
    judged = next(play["vars"] for play in yaml.safe_load(UPGRADE.read_text()) if "serial" in play)
    plays = [
        {
            "hosts": "localhost",
            "gather_facts": False,
            "tasks": [
                {"import_role": {"name": "gpufleet.driver.plan"}, "vars": {"gpu_plan_nodes": "{{ planned }}"}},
                {"set_fact": {"gpu_plan_nodes": "{{ later }}", "gpu_lock_keepers": [], "gpu_run": "r"}},
            ],
        },
        {
            "hosts": "nodes",
            "gather_facts": False,
            "serial": "{{ hostvars['localhost'].gpu_plan.serial }}",
            "vars": {**judged, "gpu_lock_renewed": {"results": []}},
            "tasks": [
                *(tasks[name] for name in around),
                {"set_fact": {"gpu_outcome": {"name": "upgraded", "reason": ""}}},
            ],
        },
        {
            "hosts": "localhost",
            "gather_facts": False,
            "tasks": [
                {
                    "copy": {
                        "content": "{{ dict(groups.nodes | zip(all)) | to_json }}",
                        "dest": str(tmp_path / "outcomes.json"),
                    },
                    "vars": {"all": "{{ groups.nodes | map('extract', hostvars, 'gpu_outcome') }}"},
                }
            ],
        },
    ]
    (tmp_path / "play.yml").write_text(json.dumps(plays))
    names = "abcdef"
    taken = {"fit": False, "reason": "taken by somebody"}
    given = {
        "gpu_driver_version": "580.95.05",
        "gpu_batch_size": 2,
        "gpu_max_unavailable": "100%",
        "planned": [host(name) for name in names],
        "later": [host(name, **(taken if name in "bde" else {})) for name in names],
        "gpu_scheduler_options": {"state_dir": str(tmp_path)},
        "ansible_connection": "local",
        "ansible_python_interpreter": "{{ ansible_playbook_python }}",
    }
    (tmp_path / "hosts.ini").write_text("[nodes]\n" + "\n".join(names) + "\n")
    command = ["ansible-playbook", "-i", str(tmp_path / "hosts.ini"), str(tmp_path / "play.yml"), "-e"]
    done = played([*command, json.dumps(given)], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    plan = re.search(r"plan \w+: driver 580.95.05 for 6 nodes in 4 batches", done.stdout)
    assert plan, done.stdout
    outcomes = json.loads((tmp_path / "outcomes.json").read_text())
    assert {name: each["name"] for name, each in outcomes.items()} == {
        **dict.fromkeys("acf", "upgraded"),
        **dict.fromkeys("bde", "skipped"),
    }
    assert outcomes["b"]["reason"] == "unfit: taken by somebody since it was planned"
