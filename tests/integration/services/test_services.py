# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""gpu_services with a real systemd, real packages and processes that really hold device nodes."""

from __future__ import annotations

import os
import signal

from node import Node

PERSISTENCED = "nvidia-persistenced.service"
DAEMON = "[Service]\nExecStart=/bin/sleep infinity\nRestart=always\n[Install]\nWantedBy=multi-user.target"

MPS = """#!/usr/bin/python3
import os, signal, sys
directory = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
pipe = directory + "/control"
if "-d" not in sys.argv:
    with open(pipe, "w") as stream:
        stream.write(sys.stdin.read())
    sys.exit(0)
if __file__ == sys.argv[0] and os.path.basename(sys.orig_argv[0]) != "nvidia-cuda-mps-control":
    os.makedirs(directory, exist_ok=True)
    if not os.path.exists(pipe):
        os.mkfifo(pipe)
    if os.fork() == 0:
        os.setsid()
        os.execv("/usr/local/lib/nvidia-cuda-mps-control", ["nvidia-cuda-mps-control", "-d", __file__, "-d"])
    sys.exit(0)
while True:
    with open(pipe) as stream:
        if stream.read().startswith("quit"):
            sys.exit(0)
"""


def furnish(node: Node) -> dict[str, str]:
    """Clients of many sorts, in files of packages and of the administrator; their states."""
    node.unit("nvidia-dcgm.service", DAEMON + "\nAlias=dcgm.service", "/lib/systemd/system")
    node.unit("dcgm-exporter.service", "[Unit]\nRequires=nvidia-dcgm.service\nAfter=nvidia-dcgm.service\n" + DAEMON)
    node.unit("dcgm-exporter.socket", "[Socket]\nListenStream=/run/exporter.sock")
    node.unit("nvsm.service", "[Unit]\nWants=nvsm-core.service\n[Service]\nType=oneshot\nExecStart=/bin/true")
    node.unit("nvsm-core.service", DAEMON)
    node.unit("nvidia-powerd.service", DAEMON)
    node.unit("nvidia-cdi-refresh.service", "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/true")
    node.unit("nvidia-cdi-refresh.path", "[Path]\nPathChanged=/run/modules.dep")
    node.unit("job-agent.service", f"[Unit]\nRequires={PERSISTENCED}\nAfter={PERSISTENCED}\n" + DAEMON)
    node.sh(
        "systemctl daemon-reload; systemctl enable -q nvidia-dcgm dcgm-exporter nvsm nvsm-core job-agent;"
        "systemctl start nvidia-cdi-refresh.service nvidia-cdi-refresh.path;"
        "systemctl start dcgm-exporter.socket dcgm-exporter nvsm job-agent"
    )
    states = node.active(
        PERSISTENCED,
        "nvidia-dcgm.service",
        "dcgm-exporter.service",
        "dcgm-exporter.socket",
        "nvsm-core.service",
        "nvidia-powerd.service",
        "nvidia-cdi-refresh.service",
        "nvidia-cdi-refresh.path",
        "job-agent.service",
    )
    assert [name for name, state in states.items() if state != "active"] == ["nvidia-powerd.service"]
    return states


def test_all_clients_stop_stay_down_and_come_back(node: Node) -> None:
    before = furnish(node)
    result = node.run("gpu_services", state="stopped")
    assert result["changed"], result
    assert sorted(result["stopped"]) == sorted(name for name, state in before.items() if state == "active")
    assert set(node.active(*before).values()) == {"inactive"}

    node.sh(f"systemctl start {' '.join(before)}; systemctl restart {PERSISTENCED} nvsm; touch /run/modules.dep")
    node.sh("python3 -c 'import socket; socket.socket(socket.AF_UNIX).connect(\"/run/exporter.sock\")'", check=False)
    node.sh("udevadm trigger; udevadm settle; deb-systemd-invoke start nvidia-persistenced nvidia-dcgm")
    package = node.sh(f"dpkg -S /lib/systemd/system/{PERSISTENCED} | cut -d: -f1")
    node.sh(f"apt-get install -y -q --reinstall {package}")
    assert set(node.active(*before).values()) == {"inactive"}, "something has started a client meanwhile"
    assert node.sh("systemctl is-system-running") == "running", "a start that is held back is no failure"
    status = node.sh(f"systemctl status {PERSISTENCED}", check=False)
    assert f"{PERSISTENCED}.d/zz-gpufleet-hold.conf was not met" in status, "a person must see why it does not start"

    assert not node.run("gpu_services", state="stopped")["changed"]
    result = node.run("gpu_services", state="restored")
    assert not result.get("failed"), result
    assert node.active(*before) == before
    assert result["left_stopped"] == ["nvidia-powerd.service", "nvsm.service"]
    assert not node.run("gpu_services", state="restored")["changed"]
    assert node.sh("systemctl show -p NeedDaemonReload --value nvidia-persistenced") == "no"
    assert node.sh("find /run/systemd/system /etc/systemd/system -name 'zz-gpufleet*'") == ""


def test_check_mode_changes_nothing(node: Node) -> None:
    before = furnish(node)
    foretold = node.run("gpu_services", "--check", state="stopped")
    assert foretold["changed"] and node.active(*before) == before
    assert node.sh("ls /var/lib/gpufleet /run/systemd/system/*.d 2>/dev/null", check=False) == ""
    assert node.run("gpu_services", state="stopped")["stopped"] == foretold["stopped"]


def test_a_reboot_in_between(node: Node) -> None:
    node.sh("systemctl disable -q --now nvidia-persistenced")
    node.unit("nvidia-dcgm.service", DAEMON)
    node.sh("systemctl daemon-reload; systemctl enable -q --now nvidia-dcgm")
    node.run("gpu_services", state="stopped")
    boot = node.sh("cat /proc/sys/kernel/random/boot_id; cat /run/gpufleet-boot-id 2>/dev/null", check=False)
    node.fleet.lab("kill", "gpu-1")
    node.fleet.lab("start", "gpu-1")
    assert boot != "" and node.active("nvidia-dcgm.service") == {"nvidia-dcgm.service": "active"}
    assert node.run("gpu_services", state="restored")["started"] == []
    states = node.active("nvidia-dcgm.service", PERSISTENCED)
    assert states == {"nvidia-dcgm.service": "active", PERSISTENCED: "inactive"}


def test_what_does_not_come_back_is_named_with_its_last_words(node: Node) -> None:
    node.unit("nvidia-fabricmanager.service", DAEMON)
    node.sh("systemctl daemon-reload; systemctl start nvidia-fabricmanager")
    node.run("gpu_services", state="stopped")
    broken = DAEMON.replace("/bin/sleep infinity", "/bin/sh -c 'echo no NVSwitch was found; exit 1'")
    node.unit("nvidia-fabricmanager.service", broken.replace("always", "no"))
    result = node.run("gpu_services", state="restored", timeout=20)
    assert result["failed"] and result["failed_units"] == ["nvidia-fabricmanager.service"]
    assert "last said" in result["msg"] and "systemctl status nvidia-fabricmanager.service" in result["msg"]
    assert node.active(PERSISTENCED) == {PERSISTENCED: "active"}
    node.unit("nvidia-fabricmanager.service", DAEMON)
    node.sh("systemctl daemon-reload")
    assert node.run("gpu_services", state="restored")["started"] == ["nvidia-fabricmanager.service"]


def test_an_agent_that_keeps_nvml_open_is_found_by_what_it_holds(node: Node) -> None:
    agent = DAEMON.replace(
        "/bin/sleep infinity", '/bin/bash -c "exec 7<>/dev/nvidiactl 8<>/dev/nvidia0; sleep infinity"'
    )
    node.unit("site-agent.service", agent)
    node.sh("systemctl daemon-reload; systemctl start site-agent")
    result = node.run("gpu_services", state="stopped")
    assert sorted(result["stopped"]) == [PERSISTENCED, "site-agent.service"], result
    holders = node.run("module_holders_info")
    left = [one["title"] for one in holders["holders"] if one["pid"] and one["unit"] != "gpu-counter.service"]
    assert left == []
    node.run("gpu_services", state="restored")
    assert node.active("site-agent.service") == {"site-agent.service": "active"}


def test_mps_quits_by_its_pipe_and_comes_back_as_its_user(node: Node) -> None:
    node.sh(
        f"cat >/usr/local/bin/nvidia-cuda-mps-control <<'END'\n{MPS}END\n"
        "chmod 755 /usr/local/bin/nvidia-cuda-mps-control; "
        # NVIDIA's is a program, not a script: what runs has its name
        "cp --dereference /usr/bin/python3 /usr/local/lib/nvidia-cuda-mps-control"
    )
    node.sh(
        "runuser -u ops -- env CUDA_MPS_PIPE_DIRECTORY=/tmp/mps-ops CUDA_VISIBLE_DEVICES=0 nvidia-cuda-mps-control -d"
        " </dev/null >/dev/null 2>&1"
    )
    daemon = "ps -e -o user=,args= | grep '[n]vidia-cuda-mps-control -d'"
    assert node.sh(daemon).split()[0] == "ops"
    assert node.run("gpu_services", state="stopped")["mps"] == ["/tmp/mps-ops"]
    assert node.sh(daemon, check=False) == ""
    assert node.run("gpu_services", state="restored")["mps"] == ["/tmp/mps-ops"]
    assert node.sh(daemon).split()[0] == "ops"
    pid = node.sh("pgrep -f 'nvidia-cuda-mps-control -d' | head -1")
    environment = node.sh(f"tr '\\0' '\\n' </proc/{pid}/environ")
    assert "CUDA_MPS_PIPE_DIRECTORY=/tmp/mps-ops" in environment and "CUDA_VISIBLE_DEVICES=0" in environment


def test_a_module_that_outlives_its_controller_is_not_run_into(node: Node) -> None:
    slow = "[Service]\nExecStart=/bin/sleep infinity\nExecStop=/bin/sh -c 'until test -e /run/go; do sleep 0.2; done'"
    node.unit("nvidia-imex.service", slow)
    node.sh("systemctl daemon-reload; systemctl start nvidia-imex")
    first = node.begin("gpu_services", state="stopped")
    node.sh("until systemctl show -p ActiveState nvidia-imex | grep -q deactivating; do sleep 0.2; done")
    os.killpg(first.pid, signal.SIGKILL)
    first.wait(10)
    second = node.run("gpu_services", state="stopped")
    assert second["failed"] and "is still at work on this node" in second["msg"], second
    assert node.run("node_journal")["journal"]["before"]["services"][PERSISTENCED]["up"], "reading needs no lock"
    node.sh("touch /run/go; while test -e /proc/$(cat /var/lib/gpufleet/journal.lock); do sleep 0.2; done")
    assert not node.run("gpu_services", state="stopped").get("failed")
    node.run("gpu_services", state="restored")
    states = node.active(PERSISTENCED, "nvidia-imex.service")
    assert states == {PERSISTENCED: "active", "nvidia-imex.service": "active"}


def test_a_module_killed_half_way_is_finished_by_the_next(node: Node) -> None:
    before = furnish(node)
    slow = "[Service]\nExecStart=/bin/sleep infinity\nExecStop=/bin/sleep 5"
    node.unit("nvidia-imex.service", slow)
    node.sh("systemctl daemon-reload; systemctl start nvidia-imex")
    first = node.begin("gpu_services", state="stopped")
    node.sh("until systemctl show -p ActiveState nvidia-imex | grep -q deactivating; do sleep 0.2; done")
    node.sh("kill -KILL $(cat /var/lib/gpufleet/journal.lock)")
    first.wait(60)
    result = node.run("gpu_services", state="stopped")
    assert not result.get("failed") and set(node.active(*before).values()) == {"inactive"}
    node.run("gpu_services", state="restored")
    assert node.active(*before) == before
    assert node.active("nvidia-imex.service") == {"nvidia-imex.service": "active"}
