# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Check mode, diff and idempotence of every module, in one upgrade of one machine and the way back.

Each row is called three times: in check mode (nothing changes, and the result is what the real call then says), for
real, and once more (nothing is left to do).
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from node import Node

TOP = Path(__file__).resolve().parents[3]
OLD, NEW = "535.183.01", "550.90.07"
FLEET = str(TOP / "examples/fleets/training-97.json")
RUN = {"run_id": "r1"}
WORKLOADS = [{"name": "counter", "unit": "gpu-counter.service"}]


@dataclass(frozen=True)
class Row:
    """``changes``: that the real call changes something. ``again``: that it does so each time, as documented.
    ``diff``: that it shows a difference. ``here``: that it runs on the controller."""

    module: str
    options: dict[str, Any] = field(default_factory=dict)
    changes: bool = True
    again: bool = False
    diff: bool = True
    here: bool = False


def controller(module: str, changes: bool = False, diff: bool = False, **options: Any) -> Row:
    return Row(module, options, changes=changes, diff=diff, here=True)


def looks(module: str, **options: Any) -> Row:
    return Row(module, options, changes=False, diff=False)


def rows(directory: Path) -> list[Row]:
    marks = {"scheduler_options": {"state_dir": str(directory / "marks")}, "nodes": ["gpu-1"], **RUN}
    plan = {"version": NEW, "snapshot": FLEET}
    return [
        looks("driver_info"),
        looks("module_holders_info"),
        looks("driver_preflight", version=NEW),
        Row("fleet_lock", {"state": "held", "holder": "me", **RUN}, again=True),
        Row("fleet_lock", {"state": "renewed", **RUN}, again=True),
        Row("driver_stage", {"version": NEW}, diff=False),
        Row("node_journal", {"state": "begun", "target": NEW, "previous": OLD, **RUN}),
        looks("node_journal", state="read"),
        controller("node_cordon", changes=True, diff=True, state="cordoned", **marks),
        Row("host_workloads", {"state": "stopped", "workloads": WORKLOADS, "wait": 10}),
        Row("gpu_settings", {"state": "saved"}),
        Row("gpu_services", {"state": "stopped"}),
        Row("kernel_modules", {"state": "unloaded"}),
        Row("driver_install", {"version": NEW}),
        Row("kernel_modules", {"state": "loaded"}),
        Row("gpu_settings", {"state": "restored"}),
        Row("gpu_services", {"state": "restored"}),
        looks("driver_validate", version=NEW),
        Row("host_workloads", {"state": "started", "workloads": WORKLOADS}),
        controller("node_cordon", changes=True, diff=True, state="uncordoned", **marks),
        Row("node_journal", {"state": "finished", "outcome": "upgraded", **RUN}),
        Row("node_journal", {"state": "reopened", **RUN}),
        Row("node_journal", {"state": "noted", "step": "rollback"}, again=True),
        Row("host_workloads", {"state": "stopped", "workloads": WORKLOADS, "wait": 10}),
        Row("gpu_services", {"state": "stopped"}),
        Row("kernel_modules", {"state": "unloaded"}),
        Row("driver_install", {"state": "previous"}),
        Row("kernel_modules", {"state": "loaded"}),
        Row("gpu_services", {"state": "restored"}),
        Row("driver_swap", {"version": NEW}),
        Row("driver_swap", {"state": "previous"}),
        Row("host_workloads", {"state": "started", "workloads": WORKLOADS}),
        Row("fleet_lock", {"state": "released", **RUN}),
        Row("checkpoint_collect"),
        controller("upgrade_gate", outcomes={}),
        controller("upgrade_plan", **plan),
        controller("upgrade_forecast", **plan),
        controller("workload_placement", workloads=[], **plan),
    ]


FOUND_ELSEWHERE = {
    *("fleet_snapshot_info", "node_evacuate", "node_validate", "fleet_settle"),
    *("fleet_lease", "gpu_operator_driver", "gpu_operator_info", "node_maintenance"),
    *("checkpoint_fetch", "checkpoint_info", "workload_checkpoint", "workload_move", "workload_restore"),
    "gang_checkpoint",
}
"""The first two rows change nothing on plain machines; tests/integration/{slurm,kubernetes} prove what is behind them.
The third needs machines that can save processes: tests/integration/{moves,metal}. Of the last only the logic is proven,
by tests/unit/checkpointers/test_gang.py."""

LEFT_BEHIND = "left=/var/lib/gpufleet/store/.stage-work; mkdir -p $left; touch -d '3 days ago' $left"
"""What a save leaves that was cut off, for checkpoint_collect."""

# What an upgrade may change on a machine. The names of GPU settings are those of nvidia-smi.
FINGERPRINT = """
find /var/lib/gpufleet /etc /var/lib/dpkg /lib/modules /run/systemd/system -printf '%p %T@ %s\\n' 2>/dev/null |
  grep -v -e /var/lib/dpkg/lock -e journal.lock -e lock.json.flock -e '^/var/lib/gpufleet [0-9]'
cut -d' ' -f1 /proc/modules
systemctl list-units --plain --no-legend --state=active 'nvidia*' 'gpu*' | cut -d' ' -f1
nvidia-smi --query-gpu=persistence_mode,power.limit,compute_mode --format=csv 2>/dev/null; true
"""


def playbook(table: list[Row], answers: Path) -> list[dict[str, Any]]:
    tasks: list[dict[str, Any]] = []

    def look(name: str) -> None:
        tasks.append({"ansible.builtin.shell": FINGERPRINT, "register": name, "changed_when": False})

    for number, row in enumerate(table):
        call: dict[str, Any] = {f"gpufleet.driver.{row.module}": row.options}
        if row.here:
            call |= {"delegate_to": "localhost", "become": False}
        look(f"before{number}")
        tasks.append({**call, "check_mode": True, "diff": True, "register": f"check{number}"})
        look(f"after{number}")
        tasks.append({**call, "register": f"real{number}"})
        tasks.append({**call, "register": f"again{number}"})
    names = [
        f"{kind}{number}" for number in range(len(table)) for kind in ("before", "check", "after", "real", "again")
    ]
    content = "{{ {" + ", ".join(f"'{name}': {name} | default({{}})" for name in names) + "} | to_json }}"
    write = {"ansible.builtin.copy": {"content": content, "dest": str(answers), "mode": "0600"}}
    always = [{**write, "delegate_to": "localhost", "become": False}]
    return [{"hosts": "gpu-1", "gather_facts": False, "tasks": [{"block": tasks, "always": always}]}]


def test_check_mode_diff_and_idempotence(node: Node, tmp_path: Path) -> None:
    table = rows(tmp_path)
    modules = {path.stem for path in (TOP / "plugins/modules").glob("*.py")}
    assert modules - FOUND_ELSEWHERE == {row.module for row in table}, (
        "give a new module a row, or say where it has one"
    )
    node.sh(LEFT_BEHIND)
    answers = tmp_path / "answers.json"
    play = tmp_path / "play.yml"
    play.write_text(json.dumps(playbook(table, answers)))
    done = subprocess.run(
        ["ansible-playbook", "-i", str(node.fleet.inventory), str(play)],
        env=node.fleet.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    said = json.loads(answers.read_text())
    wrong = []
    for number, row in enumerate(table):
        check, real, again = (said[f"{kind}{number}"] for kind in ("check", "real", "again"))
        before, after = (set(said[f"{kind}{number}"]["stdout_lines"]) for kind in ("before", "after"))
        found = {
            "check mode changes nothing": before == after,
            "check mode foretells": check["changed"] == real["changed"] == row.changes,
            "a second time": again["changed"] == row.again,
            "a diff": not row.diff or bool(check.get("diff")),
        }
        name = f"{row.module} {row.options.get('state', '')}"
        wrong += [f"{number} {name}: {what} {sorted(before ^ after)[:5]}" for what, good in found.items() if not good]
    assert not wrong, "\n".join(wrong)
