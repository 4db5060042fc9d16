# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How many modules an upgrade runs on a node, over the acts a shell script on the node would have to do.

Counted from a real run of upgrade.yml on the hosts lab with four machines, as the difference between the events of the
last batch's nodes; a module run on a node is what costs a connection and a Python start. The floor is the list of acts
that no upgrade can leave out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
LAB = TOP / "tests/lab/hosts/lab"
ACTS = (
    "look at the node",
    "check that the versions are to be had",
    "download",
    "take out of service",
    "stop the work",
    "save the settings",
    "stop the services",
    "unload",
    "install",
    "load",
    "restore the settings",
    "start the services",
    "check the driver",
    "start the work",
    "put back into service",
)


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        state = Path(directory)
        subprocess.run([LAB, "up", "--nodes", "4", "--workload", "--state", state], check=True, stdout=sys.stderr)
        try:
            extra = {
                "gpu_driver_version": "550.90.07",
                "gpu_batch_size": 3,
                "gpu_max_unavailable": 3,
                "gpu_baseline_tolerance": 100,
                "gpu_report_dir": directory,
                "gpu_workloads": [{"name": "counter", "unit": "gpu-counter.service"}],
            }
            inventory = state / "inventory.yml"
            done = subprocess.run(
                ["ansible-playbook", "-i", inventory, "gpufleet.driver.upgrade", "-e", json.dumps(extra)],
                env={**os.environ, "ANSIBLE_STDOUT_CALLBACK": "ansible.builtin.default", "ANSIBLE_VERBOSITY": "0"},
                capture_output=True,
                text=True,
                check=False,
            )
        finally:
            subprocess.run([LAB, "down", "--state", state], check=True, stdout=sys.stderr)
    if done.returncode:
        print(done.stdout[-3000:], file=sys.stderr)
        return 1
    node = "gpu-4"
    controller_side = (
        "Validating arguments",
        "Publish",
        "Refuse",
        "Conclude",
        "Count the node",
        "Note ",
        "Report a node",
    )
    task, on_node, all_tasks = "", 0, 0
    for line in done.stdout.splitlines():
        if line.startswith("TASK ["):
            task = line
        elif line.startswith((f"ok: [{node}]", f"changed: [{node}]", f"skipping: [{node}]")):
            all_tasks += 1
            if not line.startswith("skipping") and not any(name in task for name in controller_side):
                on_node += 1
    result = {"bench": "tasks_per_node", "ratio": round(on_node / len(ACTS), 2), "ours": on_node, "peer": len(ACTS)}
    print(json.dumps({**result, "unit": "modules run on a node over acts", "tasks_with_bookkeeping": all_tasks}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
