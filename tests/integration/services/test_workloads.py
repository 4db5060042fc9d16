# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""host_workloads with a real systemd and processes that really hold device nodes."""

from __future__ import annotations

import json
from typing import Any

from node import Node

COUNTER = {
    "name": "counter",
    "unit": "gpu-counter",
    "ready": ["python3", "-c", "import urllib.request as u; u.urlopen('http://localhost:8000/', timeout=5)"],
    "ready_timeout": 60,
}
COMPUTE = "exec 3<>/dev/nvidiactl 4<>/dev/nvidia0 5<>/dev/nvidia-uvm; exec sleep"


def counter(node: Node) -> dict[str, Any]:
    script = "import urllib.request as u; print(u.urlopen('http://localhost:8000/', timeout=5).read().decode())"
    return json.loads(node.sh(f'python3 -c "{script}"'))


def main_pid(node: Node) -> str:
    return node.sh("systemctl show -p MainPID --value gpu-counter")


def test_work_stops_stays_down_over_a_reboot_and_goes_on(node: Node) -> None:
    before = counter(node)["step"]
    result = node.run("host_workloads", state="stopped", workloads=[COUNTER], wait=10)
    assert result["stopped"] == ["counter"], result
    node.sh("systemctl start gpu-counter")
    assert node.active("gpu-counter.service") == {"gpu-counter.service": "inactive"}
    assert not node.run("host_workloads", state="stopped", workloads=[COUNTER], wait=10)["changed"]
    node.fleet.lab("kill", "gpu-1")
    node.fleet.lab("start", "gpu-1")
    assert node.active("gpu-counter.service") == {"gpu-counter.service": "inactive"}, "it must not run unvalidated"
    result = node.run("host_workloads", state="started", workloads=[COUNTER])
    assert result["started"] == ["counter"] and not result.get("failed"), result
    after = counter(node)
    assert after["step"] >= before and after["resumed_from"] >= before
    assert not node.run("host_workloads", state="started")["changed"]
    assert node.sh("find /etc/systemd/system -name 'zz-gpufleet*'") == ""


def test_undeclared_work_is_not_disturbed_nor_anything_else(node: Node) -> None:
    node.sh(f"systemd-run --quiet --scope --uid=ops bash -c '{COMPUTE} 300' >/dev/null 2>&1 & sleep 1")
    pid = main_pid(node)
    for undeclared, wait in (("refuse", 600), ("wait", 4)):
        result = node.run("host_workloads", state="stopped", workloads=[COUNTER], undeclared=undeclared, wait=wait)
        assert result["failed"] and "GPU work that nobody declared" in result["msg"], result
        assert "Nothing was stopped" in result["msg"] and result["undeclared"][0]["name"] == "sleep"
        assert result["undeclared"][0]["user"] == "ops"
    assert main_pid(node) == pid, "the declared work must have gone on"


def test_undeclared_work_that_ends_is_waited_for(node: Node) -> None:
    node.sh(f"systemd-run --quiet --scope bash -c '{COMPUTE} 8' >/dev/null 2>&1 & sleep 1")
    result = node.run("host_workloads", state="stopped", workloads=[COUNTER], wait=120)
    assert result["stopped"] == ["counter"] and result["undeclared"] == [] and result["waited"] > 0, result
    said = node.sh("journalctl --no-pager -q -o cat | grep 'waiting for undeclared GPU work'")
    assert "In 120 s this node is given up" in said or "In 119 s" in said, said


def test_undeclared_services_are_stopped_and_come_back_if_told_so(node: Node) -> None:
    node.unit("rogue.service", f"[Service]\nExecStart=/bin/bash -c '{COMPUTE} infinity'\nRestart=always")
    node.sh("systemctl daemon-reload; systemctl start rogue; sleep 1")
    result = node.run("host_workloads", state="stopped", workloads=[COUNTER], undeclared="stop", wait=0)
    assert result["stopped"] == ["counter", "rogue.service"], result
    assert node.active("rogue.service") == {"rogue.service": "inactive"}
    result = node.run("host_workloads", state="started")
    assert sorted(result["started"]) == ["counter", "rogue.service"]
    assert set(node.active("rogue.service", "gpu-counter.service").values()) == {"active"}


def test_work_that_is_not_ready_is_a_failure_that_can_be_run_again(node: Node) -> None:
    node.run("host_workloads", state="stopped", workloads=[COUNTER], wait=10)
    never = {**COUNTER, "ready": ["false"], "ready_timeout": 5}
    result = node.run("host_workloads", state="started", workloads=[never])
    assert result["failed"] and "counter: is running, but not ready after 5 s" in result["msg"], result
    assert not node.run("host_workloads", state="started", workloads=[COUNTER]).get("failed")


def test_check_mode_foretells(node: Node) -> None:
    pid = main_pid(node)
    result = node.run("host_workloads", "--check", state="stopped", workloads=[COUNTER])
    assert result["changed"] and result["stopped"] == ["counter"] and main_pid(node) == pid
    assert node.sh("ls /var/lib/gpufleet 2>/dev/null", check=False) == ""
