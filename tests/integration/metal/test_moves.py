# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Work that moves instead of being stopped: real CRIU, real kernels and device files, real systemd units.

The counter writes down each step before it takes the next, and keeps its count in "GPU" memory: a step that was lost or
done twice, or memory that came back wrong, shows. Only the GPU is a stand-in; its libcuda has the driver's checkpoint
calls.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import yaml
from fleet import Fleet

OLD, NEW = "535.183.01", "550.90.07"
SLOW = {
    "gpu_baseline_tolerance": 100,  # the "GPU" is an emulated processor
    "gpu_workload_wait": 20,
    "gpu_reconnect_timeout": 60,
}
HOME = "/var/lib/gpu-counter"
COUNTER = {
    "name": "counter",
    "unit": "gpu-counter.service",
    "ready": ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000')"],
    "save": {"paths": [HOME], "progress": ["sh", "-c", f"wc -l <{HOME}/steps.log"]},
}
Start = Callable[[int], Fleet]


def ready(machines: Fleet) -> None:
    """Two machines whose stand-in GPUs are small enough for their memory, the counter running on the first, its process
    under an id that the second has free, as it would be in a PID namespace."""
    for name in machines.names:
        machines.sh(name, "mkdir -p /etc/nvidia-standin; echo proc_used_mib=8 >>/etc/nvidia-standin/state")
    machines.sh("node1", "echo 20000 >/proc/sys/kernel/ns_last_pid; systemctl start gpu-counter; sleep 2")


def declare(machines: Fleet, node: str, **variables: Any) -> None:
    folder = machines.state / "host_vars"
    folder.mkdir(exist_ok=True)
    (folder / f"{node}.yml").write_text(yaml.safe_dump(variables))


def state(machines: Fleet, node: str) -> dict[str, Any]:
    """What the counter says of itself."""
    script = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:8000').read().decode())"
    return json.loads(machines.sh(node, f'python3 -c "{script}"'))


def steps(machines: Fleet, node: str) -> list[tuple[int, str]]:
    rows = [line.split() for line in machines.sh(node, f"cat {HOME}/steps.log").splitlines()]
    return [(int(row[0]), row[1]) for row in rows]


def assert_no_step_lost_or_repeated(taken: list[tuple[int, str]]) -> None:
    numbers = [number for number, dummy in taken]
    assert numbers == list(range(1, len(numbers) + 1))


def test_a_counter_moves_during_the_upgrade_and_loses_no_step(fleet: Start) -> None:
    """From the first node to the second by its process image, and home again with its own save once it is upgraded."""
    machines = fleet(2)
    ready(machines)
    declare(machines, "node1", gpu_workloads=[COUNTER])
    began = state(machines, "node1")
    played = machines.play("upgrade", gpu_driver_version=NEW, **SLOW)
    assert played.rc == 0, played.output[-5000:]
    assert machines.loaded("node1") == machines.loaded("node2") == NEW
    assert "counter: runs on node2" in played.output
    now = state(machines, "node1")
    assert (now["host"], now["driver"], now["starts"]) == ("node1", NEW, began["starts"] + 1)
    taken = steps(machines, "node1")
    assert_no_step_lost_or_repeated(taken)
    hosts = [host for dummy, host in taken]
    assert [host for index, host in enumerate(hosts) if not index or hosts[index - 1] != host] == [
        "node1",
        "node2",
        "node1",
    ]
    time.sleep(1)
    assert state(machines, "node1")["step"] > now["step"]
    for name in machines.names:  # nothing is left behind
        assert machines.sh(name, "ls -A /var/lib/gpufleet/store") == ""
        left = machines.sh(name, "find /run/systemd /etc/systemd -name '*gpufleet*'; ls -d /var/lib/*before-*; true")
        assert left == ""
