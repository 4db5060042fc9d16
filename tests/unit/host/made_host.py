# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A made /proc, /sys and /dev in a temporary directory, as far as the census reads them.

Device nodes need root to be made, so harmless devices that every machine has stand for those of the driver: what counts
for the census is the device number, and those are real.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

STAND_FOR = {
    "/dev/nvidiactl": "/dev/urandom",
    "/dev/nvidia0": "/dev/full",
    "/dev/nvidia-uvm": "/dev/zero",
    "/dev/gdrdrv": "/dev/random",
    "/dev/dri/card1": "/dev/tty",
}


class MadeHost:
    """Build a host; then pass ``proc``, ``sys`` and ``dev`` to what is tested."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("proc/self/ns", "sys/module", "sys/class/drm", "dev/dri"):
            (root / name).mkdir(parents=True)
        self.set_pid_namespace(4026531836)
        self.write("proc/devices", "Character devices:\n  1 mem\n\nBlock devices:\n  7 loop\n")
        for node, stand_in in STAND_FOR.items():
            if "dri" not in node:
                (root / node[1:]).symlink_to(stand_in)

    @property
    def paths(self) -> dict[str, str]:
        return {name: str(self.root / name) for name in ("proc", "sys", "dev")}

    def write(self, name: str, text: str | bytes) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())

    def set_pid_namespace(self, inode: int) -> None:
        link = self.root / "proc/self/ns/pid"
        link.unlink(missing_ok=True)
        link.symlink_to(f"pid:[{inode}]")

    def modules(self, text: str) -> None:
        """``text`` is a /proc/modules; /sys/module follows from it."""
        lines = [line.strip() for line in text.strip().splitlines()]
        self.write("proc/modules", "\n".join(lines) + "\n")
        for line in lines:
            name, dummy, count, users, *dummy = line.split()
            self.write(f"sys/module/{name}/refcnt", f"{count}\n")
            self.write(f"sys/module/{name}/initstate", "live\n")
            for user in users.split(","):
                if user not in ("", "-", "[permanent]"):
                    self.write(f"sys/module/{name}/holders/{user}", "")

    def display(self, card: str = "card1", driver: str = "nvidia") -> None:
        """A DRM node of a GPU bound to ``driver``; it stands for /dev/dri/CARD."""
        self.write(f"sys/devices/pci0/gpu/drm/{card}/dev", "5:0\n")
        (self.root / f"sys/bus/drivers/{driver}").mkdir(parents=True)
        (self.root / "sys/devices/pci0/gpu/driver").symlink_to(self.root / f"sys/bus/drivers/{driver}")
        (self.root / f"sys/devices/pci0/gpu/drm/{card}/device").symlink_to(self.root / "sys/devices/pci0/gpu")
        (self.root / f"sys/class/drm/{card}").symlink_to(self.root / f"sys/devices/pci0/gpu/drm/{card}")

    def process(
        self,
        pid: int,
        comm: str,
        opens: Iterable[str] = (),
        *,
        state: str = "S",
        ppid: int = 1,
        group: int | None = None,
        cgroup: str = "0::/user.slice/user-0.slice/session-1.scope",
        maps: str = "",
        namespaced: Iterable[int] = (),
        uid: int = 0,
        threads: Mapping[int, Iterable[str]] | None = None,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        """One process that has the devices ``opens`` open (and the usual three other descriptors)."""
        base = f"proc/{pid}"
        group = group or pid
        count = 1 + len(threads or {})
        self.write(
            f"{base}/stat",
            f"{pid} ({comm[:15]}) {state} {ppid} {group} {group} 0 -1 4194304 "
            f"0 0 0 0 1 1 0 0 20 0 {count} 0 4242 99 9\n",
        )
        pids = "\t".join(str(one) for one in (pid, *namespaced))
        self.write(f"{base}/status", f"Name:\t{comm[:15]}\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nNSpid:\t{pids}\n")
        self.write(f"{base}/cmdline", "" if state == "Z" else f"/usr/bin/{comm}\0--flag\0")
        self.write(f"{base}/cgroup", cgroup + "\n")
        self.write(f"{base}/maps", "" if state == "Z" else maps)
        for name, text in (extra or {}).items():
            self.write(f"{base}/{name}", text)
        self._descriptors(f"{base}/fd", () if state == "Z" else ("/dev/null", "socket:[1]", "pipe:[2]", *opens))
        for tid, devices in (threads or {}).items():
            self._descriptors(f"{base}/task/{tid}/fd", devices)
            self.write(f"{base}/task/{tid}/maps", "")

    def _descriptors(self, directory: str, targets: Iterable[str]) -> None:
        (self.root / directory).mkdir(parents=True)
        for number, target in enumerate(targets):
            (self.root / directory / str(number)).symlink_to(STAND_FOR.get(target, target))
