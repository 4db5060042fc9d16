# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Virtual machines with a real kernel: three for the whole run, as new (from the saved state) for each test."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TOP = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(TOP / "tests/integration"))

from fleet import Fleet  # noqa: E402

NODES = 3


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    state = tmp_path_factory.mktemp("metal")
    command = [str(TOP / "tests/lab/metal/lab"), "up", "--nodes", str(NODES), "--state", str(state)]
    subprocess.run(command, check=True, timeout=2400)
    yield Fleet("metal", state, [f"node{number}" for number in range(1, NODES + 1)])
    subprocess.run([str(TOP / "tests/lab/metal/lab"), "down", "--state", str(state)], check=True, timeout=300)


@pytest.fixture
def fleet(lab: Fleet) -> Iterator[Callable[[int], Fleet]]:
    """The first so many machines, node1, node2, …, as if there were no more."""
    used: list[str] = []

    def take(nodes: int) -> Fleet:
        used.extend(lab.names[:nodes])
        inventory = json.loads(lab.inventory.read_text())
        hosts = inventory["gpu_nodes"]["hosts"]
        inventory["gpu_nodes"]["hosts"] = {name: hosts[name] for name in used}
        fleet = Fleet("metal", lab.state, used)
        fleet.inventory = lab.state / f"first-{nodes}.yml"
        fleet.inventory.write_text(json.dumps(inventory))
        return fleet

    yield take
    shutil.rmtree(lab.state / "host_vars", ignore_errors=True)
    lab.lab("reset", *used)


COUNTED = "/var/lib/gpu-counter"


class Counter:
    """Work that writes each step down before it takes the next, with its count in "GPU" memory: a step that was lost or
    done twice, or memory that came back wrong, shows."""

    declared: dict[str, Any] = {
        "name": "counter",
        "unit": "gpu-counter.service",
        "ready": ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000')"],
        "save": {"paths": [COUNTED], "progress": ["sh", "-c", f"wc -l <{COUNTED}/steps.log"]},
    }

    def start(self, machines: Fleet, node: str) -> None:
        """Under an id that the others have free, as it would be in a PID namespace."""
        for name in machines.names:  # stand-in GPUs that are small enough for the machines' memory
            machines.sh(name, "mkdir -p /etc/nvidia-standin; echo proc_used_mib=8 >>/etc/nvidia-standin/state")
        machines.sh(node, "echo 20000 >/proc/sys/kernel/ns_last_pid; systemctl start gpu-counter")
        machines.sh(node, f"timeout 60 sh -c 'until [ -s {COUNTED}/steps.log ]; do sleep 0.2; done'")

    def went_on(self, machines: Fleet, node: str) -> list[str]:
        """The machines it ran on, one after the other, the last of them ``node``, on which it takes a step more."""
        log = f"{COUNTED}/steps.log"
        more = f'had=$(wc -l <{log}); timeout 60 sh -c "until [ \\$(wc -l <{log}) -gt $had ]; do sleep 0.2; done"'
        rows = [line.split() for line in machines.sh(node, f"{more}; cat {log}").splitlines()]
        assert [int(row[0]) for row in rows] == list(range(1, len(rows) + 1)), "steps were lost or repeated"
        hosts = [row[1] for row in rows]
        return [host for index, host in enumerate(hosts) if not index or hosts[index - 1] != host]


@pytest.fixture
def counter() -> Counter:
    return Counter()
