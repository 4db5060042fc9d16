# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Check, on one machine of this lab, every behaviour of the stand-in driver that tests of the collection build on.

A few minutes on idle cores, a quarter of an hour on busy ones. Exit status 1 when a behaviour is not as it was; needs
root for the labs' image.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
UNLOAD = "rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia"
INSTALL = "DEBIAN_FRONTEND=noninteractive apt-get -q -y install"
failures = 0


def lab(state: str, command: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [HERE / "lab", command, "--state", state, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=1800,
    )


class Guest:
    """One machine; check() runs shell text in it and compares what is seen."""

    def __init__(self, state: str) -> None:
        self.state = state

    def sh(self, text: str) -> tuple[int, str]:
        done = lab(self.state, "exec", "node1", "--", "sh", "-c", text)
        return done.returncode, done.stdout.strip()

    def do(self, text: str) -> None:
        """A step that is no claim of its own, but must work for the next ones to mean anything."""
        status, output = self.sh(text)
        if status:
            print(f"     preparing failed with status {status}: {text}\n{output}", flush=True)

    def check(self, what: str, text: str, status: int = 0, sees: str = "") -> None:
        global failures
        found, output = self.sh(text)
        good = found == status and sees in output
        failures += not good
        print(f"{'ok  ' if good else 'FAIL'} {what}", flush=True)
        if not good:
            print(f"     expected status {status} and {sees!r}; got status {found}:\n{output}", flush=True)


def unloading(guest: Guest) -> None:
    guest.check("535 is installed and loaded", "cat /sys/module/nvidia/version", sees="535.183.01")
    guest.check("nvidia cannot go before its dependants", "rmmod nvidia", 1, "in use by: nvidia_uvm nvidia_modeset")
    guest.check("the persistence daemon holds the driver", "fuser -v /dev/nvidia0", sees="nvidia-persiste")
    guest.check(
        "stopping its unit lets go", "systemctl stop nvidia-persistenced && cat /sys/module/nvidia/refcnt", sees="2"
    )
    holder = "exec 9<>/dev/nvidia1; sleep 300 & sleep 1"
    guest.check(
        "a process that holds a GPU holds the module", f"{holder}; {UNLOAD}; s=$?; kill $!; exit $s", 1, "in use"
    )
    guest.check("and is gone with the process", f"{UNLOAD[:5]} nvidia; lsmod | grep -c ^nvidia", 1, "0")
    guest.check("device nodes stay when the module goes", "ls /dev/nvidia0", sees="/dev/nvidia0")
    guest.check("nvidia-smi without the module", "nvidia-smi", 9, "couldn't communicate with the NVIDIA driver")
    guest.check("loading brings the companions (udev)", "modprobe nvidia; udevadm settle; lsmod", sees="nvidia_drm")
    stuck = "/sys/module/nvidia/parameters/stuck"
    guest.check("a reference nobody explains", f"nvidia-modprobe -u; echo 1 >{stuck}; {UNLOAD}", 1, "nvidia is in use")
    guest.check("has no holders", "fuser /dev/nvidia*; ls /sys/module/nvidia/holders | wc -l", sees="0")
    guest.check("and can be taken back", f"echo 0 >{stuck}; rmmod nvidia && modprobe nvidia && udevadm settle")
    guest.do(f"{INSTALL} gdrdrv-dkms")
    guest.check("gdrdrv keeps nvidia in use", f"modprobe gdrdrv; {UNLOAD}", 1, "in use by: gdrdrv")
    guest.check("and goes first", "rmmod gdrdrv nvidia && modprobe nvidia && udevadm settle")


def settings(guest: Guest) -> None:
    query = "nvidia-smi --query-gpu=power.limit,mig.mode.current,ecc.mode.current --format=csv,noheader"
    guest.check("a power limit can be set", f"nvidia-smi -i 0 -pl 250 && {query}", sees="250.00 W, Disabled, Enabled")
    guest.check(
        "MIG instances can be made", "nvidia-smi -i 1 -mig 1 && nvidia-smi mig -i 1 -cgi 9,14 -C && nvidia-smi -L"
    )
    guest.check(
        "both are lost on reload, MIG mode is not", f"{UNLOAD}; modprobe nvidia; {query}", sees="400.00 W, Enabled"
    )
    guest.check("instances too", "nvidia-smi mig -i 1 -lgi; udevadm settle", sees="No GPU instances found")
    guest.do("nvidia-smi -i 1 -mig 0; systemctl start nvidia-persistenced")


def packages(guest: Guest) -> None:
    guest.check(
        "550 replaces 535 in one transaction",
        f"{INSTALL} nvidia-driver-550-server >/dev/null && modinfo -F version nvidia",
        sees="550.90.07",
    )
    guest.check("libraries ahead of the module", "nvidia-smi", 18, "Driver/library version mismatch")
    cuda = "python3 -c 'import ctypes, sys; sys.exit(ctypes.CDLL(\"libcuda.so.1\").cuInit(0) != {})'"
    guest.check("cuInit says so too", cuda.format(803))
    guest.check(
        "no persistence daemon over a mismatch", "systemctl is-active nvidia-persistenced; nvidia-persistenced", 1
    )
    boot = guest.sh("cat /proc/sys/kernel/random/boot_id")[1]
    guest.sh("systemctl reboot")
    deadline = time.monotonic() + 600
    while guest.sh("cat /proc/sys/kernel/random/boot_id")[1] in (boot, "") and time.monotonic() < deadline:
        time.sleep(2)
    guest.check("a reboot loads what is installed", "hostname; cat /sys/module/nvidia/version", sees="node1\n550.90.07")
    guest.check("and CUDA starts", cuda.format(0))
    guest.check("with nothing failed", "systemctl is-system-running --wait", sees="running")
    broken = (
        f"systemctl stop nvidia-persistenced; {UNLOAD}; {INSTALL} nvidia-driver-560-server >/dev/null; modprobe nvidia"
    )
    guest.check("560 refuses to load", broken, 1, "could not insert 'nvidia': No such device")
    guest.check(
        "back to 535",
        f"{INSTALL} nvidia-driver-535-server >/dev/null; modprobe nvidia && nvidia-smi",
        sees="535.183.01",
    )
    fail = "mkdir -p /etc/nvidia-standin; echo 550.90.07 >/etc/nvidia-standin/dkms-fail"
    guest.check(
        "a module that does not build",
        f"{fail}; {INSTALL} nvidia-driver-550-server",
        100,
        "Bad return status for module build",
    )
    guest.check("leaves dpkg half-way", "dpkg-query -W -f '${Status}' nvidia-dkms-550-server", sees="half-configured")
    guest.check(
        "and can be finished",
        "rm /etc/nvidia-standin/dkms-fail; dpkg --configure -a",
        sees="Setting up nvidia-driver-550-server",
    )


def power_cut(guest: Guest) -> None:
    guest.do("mkdir -p /etc/nvidia-standin; echo 600 >/etc/nvidia-standin/dkms-seconds")
    guest.do(f"systemd-run -q --unit install sh -c '{INSTALL} nvidia-driver-535-server'")
    guest.check(
        "an installation under way",
        "for i in $(seq 120); do pgrep -f [n]vidia-dkms-535-server.postinst >/dev/null && exit; sleep 1; done; exit 1",
    )
    guest.do("sync")
    lab(guest.state, "kill", "node1")
    print(lab(guest.state, "start", "node1").stdout, end="")
    guest.check("after a power cut dpkg is half-way", "dpkg --audit", sees="nvidia-dkms-535-server")
    finish = "rm /etc/nvidia-standin/dkms-seconds; dpkg --configure -a >/dev/null"
    guest.check("and can be finished", f"{finish}; modinfo -F version nvidia", sees="535.183.01")


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="gpufleet-metal-") as folder:
        state = f"{folder}/lab"
        started = time.monotonic()
        made = lab(state, "up", "--nodes", "1")
        print(made.stdout, end="", flush=True)
        if made.returncode:
            return 1
        try:
            for part in (unloading, settings, packages, power_cut):
                part(Guest(state))
        finally:
            lab(state, "down")
    print(f"{failures} failures in {time.monotonic() - started:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
