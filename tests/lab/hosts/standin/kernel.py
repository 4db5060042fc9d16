# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The stand-in kernel of a lab machine that is a container: what loading and unloading a module does.

    kernel boot                  put the stand-ins over /sys/module, /proc/driver and the like
    kernel load FILE [OPTIONS]   as finit_module(2): the exit status is the error number, 0 for success
    kernel unload NAME FORCE     as delete_module(2), FORCE is 0 or 1

The real modprobe, insmod, rmmod, lsmod, modinfo and depmod call it through syscalls.so; nobody types these.
State is under /run, so that a reboot forgets it as a kernel does.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
import shutil
import stat
import subprocess
import sys
import syslog
import time
import zlib
from pathlib import Path

RUN = Path("/run/gpufleet-lab")
MODULES = RUN / "modules"  # one file a loaded module; syscalls.c reads them
SYS_MODULE = Path("/sys/module")
PROC_NVIDIA = Path("/proc/driver/nvidia")
DEVICES = Path("/etc/gpufleet-lab/devices")  # "NAME MAJOR MINOR" a line, chosen for this host by the lab
FIRST_PID = Path("/etc/gpufleet-lab/first-pid")  # there if processes are to be restored here (lab up --criu)
MAX_GPUS = 8
SIZES = {"nvidia": 56713216, "nvidia_uvm": 4632576, "nvidia_modeset": 1306624, "nvidia_drm": 77824}

VERSION = """\
NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build  (standin)
GCC version:  gcc version 12.2.0 (Debian 12.2.0-14+deb12u1)
"""
PARAMS = """\
ResmanDebugLevel: 4294967295
ModifyDeviceFiles: 1
DeviceFileUID: 0
DeviceFileGID: 0
DeviceFileMode: 438
"""
INFORMATION = """\
Model: \t\t {model}
IRQ:   \t\t {irq}
GPU UUID: \t {uuid}
Video BIOS: \t 92.00.45.00.03
Bus Type: \t PCIe
DMA Size: \t 47 bits
DMA Mask: \t 0x7fffffffffff
Bus Location: \t {address}
Device Minor: \t {minor}
GPU Firmware: \t {version}
GPU Excluded:\t No
"""


class Refused(Exception):
    """The kernel's answer is an error; its number is the argument."""


def modinfo(path: Path) -> dict[str, list[str]]:
    """The key=value strings of a module's .modinfo section, found by scanning: enough for files made for the lab."""
    fields: dict[str, list[str]] = {}
    for item in path.read_bytes().split(b"\0"):
        key, equals, value = item.partition(b"=")
        if equals and key.replace(b"_", b"").isalnum():
            fields.setdefault(key.decode(), []).append(value.decode(errors="replace"))
    return fields


def gpu_address(index: int) -> str:
    return f"0000:{index + 1:02x}:00.0"


def device_numbers() -> dict[str, tuple[int, int]]:
    lines = (line.split() for line in DEVICES.read_text().splitlines() if line)
    return {name: (int(major), int(minor)) for name, major, minor in lines}


def owner(node: str) -> str:
    for module in ("nvidia_uvm", "nvidia_modeset"):
        if node.startswith(module.replace("_", "-")):
            return module
    return "nvidia"


def make_nodes(nodes: dict[str, tuple[int, int]]) -> None:
    """As nvidia-modprobe does: made once, and they stay when the module goes."""
    for name, (major, minor) in nodes.items():
        path = Path("/dev", name)
        if not path.exists():
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(major, minor))
            path.chmod(0o666)


def start_nvidia(version: str, options: dict[str, str], gpus: int) -> None:
    serial = int(options.get("serial", zlib.crc32(os.uname().nodename.encode())))
    PROC_NVIDIA.mkdir()
    (PROC_NVIDIA / "version").write_text(VERSION.format(version=version))
    (PROC_NVIDIA / "params").write_text(PARAMS)
    (PROC_NVIDIA / "standin_load_id").write_text(f"{time.time_ns()}\n")
    for index in range(gpus):
        gpu = PROC_NVIDIA / "gpus" / gpu_address(index)
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(
            INFORMATION.format(
                model=options.get("gpu_name", "NVIDIA Stand-in GPU"),
                irq=64 + index,
                uuid=f"GPU-{serial:08x}-0000-4000-8000-{index:012d}",
                address=gpu_address(index),
                minor=index,
                version=version,
            )
        )


def load(path: Path, options_text: str) -> None:
    info = modinfo(path)
    name = info["name"][0].replace("-", "_")
    version = info.get("version", [""])[0]
    directory = SYS_MODULE / name
    if (MODULES / name).exists():
        raise Refused(errno.EEXIST)
    if info["vermagic"][0].split()[0] != os.uname().release:
        raise Refused(errno.ENOEXEC)
    depends = [item.replace("-", "_") for item in info.get("depends", [""])[0].split(",") if item]
    if any(not (MODULES / item).exists() for item in depends):
        raise Refused(errno.ENOENT)
    options = dict(item.partition("=")[::2] for item in shlex.split(options_text))
    if "standin_init" in info or options.get("fail_load", "0") not in "0nN":
        syslog.syslog("NVRM: RmInitAdapter failed! (stand-in told to fail)")
        raise Refused(errno.ENODEV)

    gpus = min(int(options.get("gpus", "1")), MAX_GPUS)
    present = {f"nvidia{index}" for index in range(gpus)}
    nodes = {
        node: numbers
        for node, numbers in device_numbers().items()
        if owner(node) == name and (not node[6:].isdigit() or node in present)
    }
    shutil.rmtree(directory, ignore_errors=True)
    (directory / "holders").mkdir(parents=True)
    (directory / "parameters").mkdir()
    declared = {item.partition(":")[0]: "N" if item.endswith(":bool") else "0" for item in info.get("parmtype", [])}
    if name == "nvidia":
        declared["stuck"] = "N"  # may be written while loaded; syscalls.so counts it as one reference
    for key, value in declared.items():
        (directory / "parameters" / key).write_text(f"{options.get(key, value)}\n")
    size = SIZES.get(name, 16384)
    contents = {"version": version, "refcnt": "0", "coresize": str(size), "taint": "OE", "initstate": "live"}
    for key, value in contents.items():
        if value:
            (directory / key).write_text(f"{value}\n")
    if name == "nvidia":
        start_nvidia(version, options, gpus)
    make_nodes(nodes)
    for item in depends:
        (SYS_MODULE / item / "holders" / name).symlink_to(f"../../{name}")
    numbers = "".join(f" {major}:{minor}" for major, minor in nodes.values())
    (MODULES / name).write_text(f"{size}{numbers}\n")
    if name == "nvidia":
        syslog.syslog(f"NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build  (standin)")


def unload(name: str, force: bool) -> None:
    directory = SYS_MODULE / name
    if not (MODULES / name).exists():
        raise Refused(errno.ENOENT)
    if any((directory / "holders").iterdir()):
        raise Refused(errno.EWOULDBLOCK)
    if int((directory / "refcnt").read_text()) and not force:
        raise Refused(errno.EWOULDBLOCK)
    (MODULES / name).unlink()
    for holder in SYS_MODULE.glob(f"*/holders/{name}"):
        holder.unlink()
    shutil.rmtree(directory)
    if name == "nvidia":
        shutil.rmtree(PROC_NVIDIA)


def mount_over(source: Path, target: Path) -> None:
    if target.exists():
        subprocess.run(["/usr/bin/mount", "--bind", str(source), str(target)], check=True)


def boot() -> None:
    for name in ("sys_module", "proc_driver", "pci_devices"):
        (RUN / name).mkdir(parents=True)
    (RUN / "osrelease").write_text(f"{os.uname().release}\n")
    (RUN / "proc_modules").write_text("")
    gpus = sum(name[6:].isdigit() for name in device_numbers())
    for index in range(gpus):
        device = RUN / "pci_devices" / gpu_address(index)
        device.mkdir()
        for key, value in {"vendor": "0x10de", "device": "0x20b2", "class": "0x030200", "numa_node": "0"}.items():
            (device / key).write_text(f"{value}\n")
    mount_over(RUN / "sys_module", SYS_MODULE)
    mount_over(RUN / "proc_driver", PROC_NVIDIA.parent)
    mount_over(RUN / "pci_devices", Path("/sys/bus/pci/devices"))
    mount_over(RUN / "osrelease", Path("/proc/sys/kernel/osrelease"))
    MODULES.mkdir()
    if FIRST_PID.exists():
        allow_restores()


def allow_restores() -> None:
    """Let processes come back with the ids they had, which are not those of the others here, as on machines that have
    run for a while; and containers with their host names and networks."""
    ids = ("ns_last_pid", "sem_next_id", "msg_next_id", "shm_next_id")
    for path in (*(Path("/proc/sys/kernel", name) for name in (*ids, "hostname", "domainname")), Path("/proc/sys/net")):
        mount_over(path, path)
        subprocess.run(["/usr/bin/mount", "-o", "remount,bind,rw", str(path)], check=True)
    Path("/proc/sys/kernel/ns_last_pid").write_text(FIRST_PID.read_text())


def main(arguments: list[str]) -> int:
    syslog.openlog("kernel")
    if arguments == ["boot"]:
        boot()
        return 0
    with (RUN / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if arguments[0] == "load":
                load(Path(arguments[1]), arguments[2] if len(arguments) > 2 else "")
            else:
                unload(arguments[1], arguments[2] == "1")
        except Refused as refused:
            return refused.args[0]
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
