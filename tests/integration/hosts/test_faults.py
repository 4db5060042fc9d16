# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What can be wrong with a node, and what can happen to it in the middle of an upgrade, each with its right ending.

Several machines have an accident each in the same run: they are a batch, and no ending may depend on another machine's.
"""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from balancer import Balancer
from fleet import Fleet

OLD, NEW = "535.183.01", "550.90.07"
WORKLOAD = {
    "gpu_workloads": [{"name": "counter", "unit": "gpu-counter.service"}],
    "gpu_baseline_tolerance": 100,  # a stand-in GPU computes on this machine's busy cores
}
SERVICES = "systemctl is-active gpu-counter nvidia-persistenced"
STATE = "mkdir -p /var/lib/gpufleet"


def read_only(*directories: str) -> str:
    return "; ".join(f"mount --bind {each} {each} && mount -o remount,ro,bind {each}" for each in directories)


def full(directory: str) -> str:
    """A small file system with what was there, and no room for more."""
    return (
        f"mkdir -p {directory}; cp -a {directory} /run/kept; size=$(($(du -sk /run/kept | cut -f1) + 64)); "
        f"mount -t tmpfs -o size=${{size}}k full {directory}; cp -a /run/kept/. {directory}; "
        f"head -c 100m /dev/zero >{directory}/ballast 2>/dev/null; true"
    )


@dataclass(frozen=True)
class Unfit:
    """A node that preflight refuses. ``told``: a pattern of what is said of it; ``node``: variables of the host."""

    name: str
    script: str
    told: str
    node: dict[str, Any] = field(default_factory=dict)


UNFIT = [
    [
        Unfit("a held package", "apt-mark hold libnvidia-compute-535-server", "held .*libnvidia-compute-535-server"),
        Unfit(
            "a broken package",
            "sed -i '/^Package: nvidia-utils-535-server$/,/^$/s/^Status: .*/Status: install ok half-configured/' "
            "/var/lib/dpkg/status",
            "nvidia-utils-535-server",
        ),
        Unfit(
            "a version no longer to be had",
            "sed -i 's/^deb/# deb/' /etc/apt/sources.list.d/lab.list; rm -rf /var/lib/apt/lists/*",
            r"550\.90\.07",
        ),
        Unfit("no room in /boot", full("/boot"), "/boot has 0 MiB free"),
    ],
    [
        Unfit(
            "a journal cut short", f"{STATE}; printf '{{\"schema\": 1,' >/var/lib/gpufleet/journal.json", "is damaged"
        ),
        Unfit(
            "a journal of a later release",
            f"{STATE}; echo '{{\"schema\": 99}}' >/var/lib/gpufleet/journal.json",
            "has schema 99, this release reads 1",
        ),
        Unfit("a disk full of something else", full("/var/lib/gpufleet"), "/var/lib/gpufleet has 0 MiB free"),
        Unfit("a disk that was remounted read-only", read_only("/var"), "/var.* is on a read-only file system"),
    ],
    [
        Unfit("no Python", "mv /usr/bin/python3 /usr/bin/python3.away", "interpreter '/usr/bin/python3' was not found"),
        Unfit("sudo refuses", "rm /etc/sudoers.d/ops", "sudo password"),
        Unfit(
            "another host key",
            "true",
            "HOST IDENTIFICATION HAS CHANGED",
            {
                "ansible_ssh_args": "-o StrictHostKeyChecking=yes -o UserKnownHostsFile={known_hosts} "
                "-o ControlMaster=no -o ControlPath=none"
            },
        ),
        Unfit(
            "a driver that never answers",
            "mkdir -p /etc/nvidia-standin; echo nvml_hang.nvmlInit=1 >/etc/nvidia-standin/state",
            "did not answer within 30 s",
        ),
    ],
]


@pytest.mark.parametrize("rows", UNFIT, ids=lambda rows: ", ".join(row.name for row in rows))
def test_preflight_refuses_before_anything_is_disturbed(fleet: Fleet, tmp_path: Path, rows: list[Unfit]) -> None:
    """All that is wrong with any node is told at once."""
    addresses = re.findall(r"ansible_host: (\S+)", fleet.inventory.read_text())
    known = tmp_path / "known_hosts"
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
    known.write_text("".join(f"{address} {key}\n" for address in addresses))
    for name, row in zip(fleet.names, rows, strict=True):
        fleet.sh(name, row.script)
        fleet.vary(name, **{key: value.format(known_hosts=known) for key, value in row.node.items()})
    played = fleet.play("upgrade", gpu_driver_version=NEW, **WORKLOAD)
    assert played.rc != 0
    told = re.search(r"4 of 4 nodes are unfit, nothing was changed\.(.*?)Mend this", played.output, re.DOTALL)
    assert told, played.output[-3000:]
    parts = re.split(r"^(gpu-\d): ", told.group(1), flags=re.MULTILINE)
    reasons = dict(zip(parts[1::2], parts[2::2], strict=True))
    for name, row in zip(fleet.names, rows, strict=True):
        assert re.search(row.told, reasons[name]), f"{row.name}: {told.group(1)}"
        assert fleet.loaded(name) == OLD
        assert fleet.sh(name, SERVICES).split() == ["active", "active"]
    assert "Traceback" not in told.group(1)


def at_stop_of(unit: str, script: str) -> str:
    """Let a script run on the node at the moment an upgrade has stopped a unit, and only once."""
    directory = f"/etc/systemd/system/{unit}.service.d"
    return (
        f"mkdir -p {directory}; printf '#!/bin/bash\nrm -r {directory}\n%s\n' '{script}' >/root/accident; "
        f"chmod 755 /root/accident; printf '[Service]\nExecStopPost=+/root/accident\n' >{directory}/accident.conf; "
        "systemctl daemon-reload"
    )


WORK, CLIENT = "gpu-counter", "nvidia-persistenced"


@dataclass(frozen=True)
class Accident:
    """``script`` arranges it. ``outcome`` and ``told`` (a pattern of the reason) are how the upgrade ends for the node;
    after ``mend``, ``then`` (a playbook) ends well."""

    name: str
    script: str
    outcome: str
    told: str
    mend: str = ""
    then: str = ""
    node: dict[str, Any] = field(default_factory=dict)


ACCIDENTS = [
    [
        Accident(
            "the modules do not build",
            "mkdir -p /etc/nvidia-standin; echo 550.90.07 >/etc/nvidia-standin/dkms-fail",
            "rolled back",
            "DKMS could not build",
        ),
        Accident(
            "slower than it was",
            "printf '#!/bin/sh\ncase $(cat /sys/module/nvidia/version) in 535*) echo 100;; *) echo 60;; esac\n' "
            ">/usr/local/bin/measure; chmod 755 /usr/local/bin/measure",
            "rolled back",
            "worse by 40%",
            node={"gpu_benchmark_command": ["/usr/local/bin/measure"], "gpu_baseline_tolerance": 0.3},
        ),
        Accident("work nobody declared", "true", "rolled back", "gpu-counter.service", node={"gpu_workloads": []}),
        Accident("somebody reboots it", at_stop_of(CLIENT, "systemctl reboot --force --force"), "rolled back", "."),
    ],
    [
        Accident(
            "the state directory fills up", at_stop_of(WORK, full("/var/lib/gpufleet")), "quarantined", "No space",
            "umount /var/lib/gpufleet", "recover",
        ),
        Accident(
            "/var becomes read-only", at_stop_of(CLIENT, read_only("/var")), "quarantined", "(?i)read-only",
            "umount /var", "recover",
        ),
        Accident(
            "no room for the packages",
            at_stop_of(CLIENT, "cd /usr/lib/nvidia-standin; mount -t tmpfs -o size=4k full $PWD; echo >$PWD/a"),
            "quarantined", "No space", "umount /usr/lib/nvidia-standin", "recover",
        ),
        Accident(
            "no room for the package database", at_stop_of(CLIENT, full("/var/lib/dpkg")), "rolled back",
            "could not move the packages.*No space", "umount /var/lib/dpkg",
        ),
    ],
    [
        Accident(
            "Python goes", at_stop_of(WORK, "mv /usr/bin/python3 /usr/bin/python3.away"), "quarantined",
            "'/usr/bin/python3' was not found", "mv /usr/bin/python3.away /usr/bin/python3", "recover",
        ),
        Accident(
            "sudo refuses", at_stop_of(WORK, "mv /etc/sudoers.d/ops /root"), "quarantined", "sudo password",
            "mv /root/ops /etc/sudoers.d", "recover",
        ),
        Accident(
            "no place for Ansible's files", at_stop_of(WORK, read_only("/home/ops")), "quarantined",
            "gpu-3 answers, but takes no files", "umount /home/ops", "recover", {"ansible_ssh_pipelining": False},
        ),
        Accident(
            "another host key", at_stop_of(WORK, "rm /etc/ssh/ssh_host_*; ssh-keygen -A; systemctl restart ssh"),
            "lost", "HOST IDENTIFICATION HAS CHANGED", "", "recover",
            {"ansible_ssh_args": "-o StrictHostKeyChecking=accept-new -o UserKnownHostsFile={known_hosts} "
             "-o ControlMaster=no -o ControlPath=none"},
        ),
    ],
]  # fmt: skip


@pytest.mark.parametrize("rows", ACCIDENTS, ids=lambda rows: ", ".join(row.name for row in rows))
def test_an_accident_ends_as_it_should(fleet: Fleet, tmp_path: Path, rows: list[Accident]) -> None:
    known = tmp_path / "known_hosts"
    before = {name: fleet.packages(name) for name in fleet.names}
    for name, row in zip(fleet.names, rows, strict=True):
        fleet.sh(name, row.script)
        arguments = {"ansible_ssh_args": row.node.get("ansible_ssh_args", "").format(known_hosts=known)}
        own = {**row.node, **arguments} if "ansible_ssh_args" in row.node else row.node
        fleet.vary(name, **{**WORKLOAD, "gpu_workload_wait": 3, **own})
    keeper = {"gpu_lock_hosts": "gpu-1"}
    patience = 5 if "lost" in [row.outcome for row in rows] else 60
    played = fleet.play(
        "upgrade", gpu_driver_version=NEW, gpu_canary=4, gpu_max_unavailable=4, gpu_reconnect_timeout=patience, **keeper
    )
    assert played.rc != 0
    told = re.findall(r"ansible-playbook .*-e gpu_lock_takeover=(\S+)", played.output)
    assert bool(told) == (rows[0].then != ""), "the only keeper of the lock cannot give it back"
    assert ("note: the lock of the fleet could not be given back (gpu-1: " in played.output) == bool(told)
    ends = {name: (row.name, row.outcome) for name, row in zip(fleet.names, rows, strict=True)}
    found = {name: (ends[name][0], outcome) for name, outcome in played.outcomes.items()}
    assert found == ends, played.nodes
    for name, row in zip(fleet.names, rows, strict=True):
        assert re.search(row.told, played.nodes[name]["reason"]), (row.name, played.nodes[name]["reason"])
        fleet.sh(name, row.mend)
    known.unlink(missing_ok=True)
    back = ",".join(name for name, row in zip(fleet.names, rows, strict=True) if row.then)
    if back:
        refused = fleet.play("recover", gpu_hosts="gpu-1", **keeper)
        assert refused.rc != 0 and f"gpu_lock_takeover={told[0]}" in refused.output
        again = fleet.play("recover", gpu_hosts=back, gpu_batch_size=4, gpu_lock_takeover=told[0], **keeper)
        assert again.rc == 0, again.output[-5000:]
    for name in fleet.names:
        assert fleet.packages(name) == before[name] and fleet.loaded(name) == OLD
        assert fleet.sh(name, SERVICES).split() == ["active", "active"]
        assert fleet.sh(name, "dpkg --audit") == ""


CUTS = [
    [
        "cordon : Begin the journal of the node",
        "evacuate : Stop or wait for the work on the node",
        "stop services",
        "unload modules",
    ],
    ["packages", "load modules", "validate : Prove the node", "uncordon : Start the workloads that were running"],
]


@pytest.mark.parametrize("steps", CUTS, ids=lambda steps: ", ".join(step.partition(" : ")[2] for step in steps))
def test_the_network_of_a_node_is_cut_for_a_moment(fleet: Fleet, steps: list[str]) -> None:
    """Longer than its connection lives, in each step of another node: it ends on one driver or the other, at work."""
    before = {name: fleet.packages(name) for name in fleet.names}
    usual = re.search(r"ansible_ssh_args: (.*)", fleet.inventory.read_text()).group(1)
    brief = re.sub(
        "ServerAliveInterval=.*?ServerAliveCountMax=\\d+", "ServerAliveInterval=1 -o ServerAliveCountMax=2", usual
    )
    playing = fleet.begin(
        "upgrade", gpu_driver_version=NEW, gpu_canary=4, gpu_max_unavailable=4, gpu_reconnect_timeout=60,
        ansible_ssh_args=brief, **WORKLOAD,
    )  # fmt: skip

    def cut(name: str, step: str) -> None:
        fleet.reach(playing, name, step)
        fleet.lab("unplug", name)
        time.sleep(5)
        fleet.lab("plug", name)

    with ThreadPoolExecutor(len(steps)) as pool:
        list(pool.map(cut, fleet.names, steps))
    played = playing.end()
    assert set(played.outcomes.values()) <= {"upgraded", "rolled back"}, played.nodes
    for name, outcome in played.outcomes.items():
        assert fleet.loaded(name) == (NEW if outcome == "upgraded" else OLD)
        assert outcome == "upgraded" or fleet.packages(name) == before[name]
        assert fleet.sh(name, SERVICES).split() == ["active", "active"]
        assert fleet.journal(name)["outcome"]["name"] == outcome.replace(" ", "_")


def test_a_load_balancer_that_hangs_or_lies(fleet: Fleet, balancer: Balancer) -> None:
    """A node is not touched unless it is out of service for sure."""
    balancer.options["timeout"] = 2
    balancer.become("drain.gpu-1) sleep 600;; drain.gpu-2) exit 0;; state.gpu-3) exit 7;;")
    told = {
        "gpu-1": "no answer within 2 s, and it is still in service",
        "gpu-2": "rc 0, and it is still in service",
        "gpu-3": "cannot tell whether it is in service",
    }
    canary = {"gpu_hosts": ",".join(told), "gpu_canary": 3, "gpu_max_unavailable": 3}
    played = fleet.play("upgrade", gpu_driver_version=NEW, **canary, **WORKLOAD, **balancer.variables)
    assert played.rc != 0
    for name, reason in told.items():
        assert reason in played.nodes[name]["reason"], played.nodes[name]
        assert fleet.loaded(name) == OLD
        assert fleet.sh(name, SERVICES).split() == ["active", "active"]


@pytest.mark.parametrize(
    ("names", "fine"),
    [(["GPU-A.Rack_7.example.com", "gpü-2"], True), (["a b", "-gpu"], False)],
    ids=str,
)
def test_host_names(fleet: Fleet, tmp_path: Path, names: list[str], fine: bool) -> None:
    """Names that differ from the machines' addresses; such as a command line would misread are refused."""
    odd = Fleet("hosts", fleet.state, fleet.names)
    odd.inventory = tmp_path / "inventory.yml"
    text = re.sub(r"^ +gpu-[34]:\n.*\n", "", fleet.inventory.read_text(), flags=re.MULTILINE)
    odd.inventory.write_text(text.replace("gpu-1:", f"'{names[0]}':").replace("gpu-2:", f"'{names[1]}':"))
    balancer = Balancer(tmp_path, names)
    played = odd.play(
        "upgrade", gpu_driver_version=NEW, gpu_canary=2, gpu_max_unavailable=2, **WORKLOAD, **balancer.variables
    )
    assert balancer.in_service == sorted(names)
    if fine:
        assert played.rc == 0 and played.outcomes == dict.fromkeys(names, "upgraded"), played.output[-5000:]
        assert fleet.loaded("gpu-1") == fleet.loaded("gpu-2") == NEW
    else:
        assert played.rc != 0
        for name in names:
            assert f"the inventory calls it '{name}', which a command line would misread" in played.output
        assert fleet.loaded("gpu-1") == fleet.loaded("gpu-2") == OLD
