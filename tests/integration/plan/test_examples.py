# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The commands on the pages of the example fleets, run as written."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[3]
FLEETS = TOP / "examples" / "fleets"
NAMES = sorted(path.stem for path in FLEETS.glob("*.json"))


def played(command: list[str], reports: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, "-e", f"gpu_report_dir={reports}"],
        cwd=TOP,
        env={**os.environ, "PWD": str(TOP), "ANSIBLE_COLLECTIONS_PATH": str(TOP / ".build"), "ANSIBLE_NOCOLOR": "1"},
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
    done = played(command, tmp_path)
    assert done.returncode == 0, done.stdout
    assert len(json.loads((tmp_path / "gpu-upgrade-plan.json").read_text())["order"]) == 32


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
