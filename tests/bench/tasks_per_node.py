# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How many modules an upgrade runs on a node, over the acts a shell script on the node would have to do.

Counted on a node of the last batch in a real run of upgrade.yml on the hosts lab with four machines: what sudo logged
there, for each module run on a node is a connection, a sudo and a Python start. The floor is the list of acts that no
upgrade can leave out.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
LAB = TOP / "tests/lab/hosts/lab"
NODE = "gpu-4"
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
            logged = subprocess.run(
                [LAB, "exec", "--state", state, NODE, "--", "journalctl", "-q", "-t", "sudo", "--grep", "COMMAND="],
                capture_output=True,
                text=True,
                check=done.returncode == 0,
            )
        finally:
            subprocess.run([LAB, "down", "--state", state], check=True, stdout=sys.stderr)
    if done.returncode:
        print(done.stdout[-3000:], file=sys.stderr)
        return 1
    all_tasks = len(re.findall(rf"^(?:ok|changed|skipping): \[{NODE}\]", done.stdout, re.MULTILINE))
    ours = len(logged.stdout.splitlines())
    result = {"bench": "tasks_per_node", "ratio": round(ours / len(ACTS), 2), "ours": ours, "peer": len(ACTS)}
    print(json.dumps({**result, "unit": "modules run on a node over acts", "tasks_with_bookkeeping": all_tasks}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
