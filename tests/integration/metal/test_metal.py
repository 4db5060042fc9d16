# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What only a real kernel can show: references, unload order, a version that will not load, reboots, power cuts.

The modules are stand-ins compiled for an unmodified Debian kernel; loading, counting references and refusing to unload
are the kernel's own doing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fleet import Fleet

OLD, NEW, BROKEN = "535.183.01", "550.90.07", "560.35.03"
SLOW = {
    "gpu_baseline_tolerance": 100,  # the "GPU" is an emulated processor
    "gpu_workload_wait": 5,
    "gpu_reconnect_timeout": 30,
    "gpu_max_unavailable": 2,
}
Start = Callable[[int], Fleet]


def boot_id(fleet: Fleet, node: str) -> str:
    return fleet.sh(node, "cat /proc/sys/kernel/random/boot_id").strip()


def test_three_machines_without_a_reboot(fleet: Start, counter: Any) -> None:
    """A third-party module (gdrdrv) uses nvidia on one of them: it is unloaded first and is back afterwards. The clocks
    of two are hours wrong, each in another direction. Work of the first moves away by its process image, and comes home
    by its own save."""
    machines = fleet(3)
    counter.start(machines, "node1")
    machines.vary("node1", gpu_workloads=[counter.declared])
    machines.sh("node2", "apt-get install -qq -y gdrdrv-dkms >/dev/null && modprobe gdrdrv; date -s '+7 hours'")
    machines.sh("node3", "date -s '-7 hours'")
    boots = {name: boot_id(machines, name) for name in machines.names}
    played = machines.play("upgrade", gpu_driver_version=NEW, gpu_batch_size=2, **SLOW)
    assert played.rc == 0, played.output[-5000:]
    for name in machines.names:
        assert machines.loaded(name) == NEW
        assert boot_id(machines, name) == boots[name]
        packages = machines.packages(name)
        assert packages and all(version.startswith(NEW) for version in packages.values()), packages
    assert "gdrdrv" in machines.sh("node2", "cat /proc/modules")
    first, away, *last = counter.went_on(machines, "node1")
    assert (first, last) == ("node1", ["node1"]) and away in ("node2", "node3")


def test_two_machines_that_cannot_be_emptied(fleet: Start) -> None:
    """A reference that nobody explains: never forced; without leave to reboot the node stays out of service, with it,
    it reboots. A holder with its own node of the device, under a path of its own mount namespace, which fuser does not
    see: named. The fleet stops."""
    machines = fleet(3)
    machines.sh("node1", "systemctl stop nvidia-persistenced; rmmod nvidia_drm nvidia_modeset nvidia_uvm nvidia")
    machines.sh("node1", "modprobe nvidia stuck=1 && nvidia-modprobe -u -c=0 && systemctl start nvidia-persistenced")
    script = "mount -t tmpfs none /mnt && mknod /mnt/gpu c 195 0 && exec -a hidden-holder sleep 1000 3<>/mnt/gpu"
    machines.sh("node2", f"systemd-run --unit=hidden unshare --mount bash -c '{script}' && sleep 2")
    assert "hidden" not in machines.sh("node2", "fuser -v /dev/nvidia0 2>&1; true")
    boot = boot_id(machines, "node1")
    canary = {"gpu_canary": ["node1", "node2"]}
    played = machines.play("upgrade", gpu_driver_version=NEW, gpu_driver_reboot="never", **canary, **SLOW)
    assert played.rc != 0
    assert played.outcomes["node1"] == "quarantined" and played.outcomes["node3"] == "not started", played.outcomes
    assert "reboot" in played.nodes["node1"]["reason"]
    assert machines.loaded("node1") == OLD and boot_id(machines, "node1") == boot
    assert machines.journal("node1")["outcome"]["name"] == "quarantined"
    assert "hidden.service" in played.nodes["node2"]["reason"]
    assert machines.loaded("node2") == OLD
    assert machines.sh("node2", "systemctl is-active hidden").strip() == "active"
    again = machines.play("upgrade", gpu_driver_version=NEW, gpu_hosts="node1", **SLOW)
    assert again.rc == 0, again.output[-5000:]
    assert machines.loaded("node1") == NEW and boot_id(machines, "node1") != boot


def test_a_machine_that_loses_power_in_the_swap(fleet: Start) -> None:
    """While dpkg configures the new kernel modules: the next batch never starts, and a second run mends the node."""
    machines = fleet(2)
    machines.sh("node1", "mkdir -p /etc/nvidia-standin; echo 600 >/etc/nvidia-standin/dkms-seconds")
    playing = machines.begin("upgrade", gpu_driver_version=NEW, gpu_run_id="first", **SLOW)
    playing.wait_for("TASK [gpufleet.driver.install : Swap the driver]", timeout=600)
    configuring = "pgrep -f [n]vidia-dkms-550-server.postinst >/dev/null"
    machines.sh("node1", f"for i in $(seq 240); do {configuring} && sync && exit; sleep 1; done; exit 1")
    machines.lab("kill", "node1")
    played = playing.end()
    assert played.rc != 0
    assert played.outcomes == {"node1": "lost", "node2": "not started"}
    assert machines.loaded("node2") == OLD
    machines.lab("start", "node1")
    assert "nvidia-dkms-550-server" in machines.sh("node1", "rm /etc/nvidia-standin/dkms-seconds; dpkg --audit")
    again = machines.play("upgrade", gpu_driver_version=NEW, gpu_hosts="node1", **SLOW)
    assert again.rc == 0, again.output[-5000:]
    assert machines.loaded("node1") == NEW
    assert machines.sh("node1", "dpkg --audit") == ""


def test_a_version_that_will_not_load_is_rolled_back_and_proven(fleet: Start) -> None:
    machines = fleet(1)
    before = machines.packages("node1")
    played = machines.play("upgrade", gpu_driver_version=BROKEN, **SLOW)
    assert played.rc != 0
    assert played.outcomes == {"node1": "rolled back"}
    assert "No such device" in played.nodes["node1"]["reason"]
    assert machines.packages("node1") == before
    assert machines.loaded("node1") == OLD
