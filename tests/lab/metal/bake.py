# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What every machine of the metal lab starts from, made once and kept in the cache."""

from __future__ import annotations

import fcntl
import hashlib
import lzma
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import vm
from vm import HERE, LabError, Machine, run

DISK_SIZE = "6G"
FIRST_MODULES = ("virtio_pci", "virtio_blk", "virtio_net", "virtio_rng")
WORKLOAD = HERE.parent / "hosts/workload"
FILES = (
    *(HERE / name for name in ("bake.py", "vm.py", "init.c", "serve.py", "bytecode.py")),
    WORKLOAD / "gpu_counter.py",
    WORKLOAD / "gpu-counter.service",
)


def say(text: str) -> None:
    print(f"metal: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Baked:
    """kernel, initrd, disk: what QEMU boots; state: memory of a machine booted from disk; key: SSH key of root, ops."""

    kernel: Path
    initrd: Path
    disk: Path
    state: Path
    key: Path
    host_key: str
    repository: Path


def built(script: str) -> Path:
    """The folder that another lab's build script prints."""
    done = subprocess.run([HERE.parent / script], stdout=subprocess.PIPE, text=True, timeout=3600, check=False)
    if done.returncode:
        raise LabError(f"tests/lab/{script} failed (see above)")
    return Path(done.stdout.strip().splitlines()[-1])


def extract_vmlinux(image: bytes) -> bytes:
    """The ELF kernel inside a bzImage (boot protocol 2.08 or later), so that nobody has to emulate the decompressor."""
    if image[0x202:0x206] != b"HdrS":
        raise LabError("the image's kernel is not a bzImage")
    offset, length = struct.unpack_from("<II", image, 0x248)
    start = ((image[0x1F1] or 4) + 1) * 512 + offset
    payload = image[start : start + length]
    if payload[:2] == b"\x1f\x8b":
        kernel = zlib.decompressobj(31).decompress(payload)
    elif payload[:6] == b"\xfd7zXZ\0":
        kernel = lzma.LZMADecompressor(format=lzma.FORMAT_XZ).decompress(payload)
    elif payload[:4] == b"\x28\xb5\x2f\xfd":
        kernel = piped("zstd", payload)
    elif payload[:4] == b"\x02\x21\x4c\x18":
        kernel = piped("lz4", payload)
    else:
        raise LabError(f"the kernel is compressed in a way unknown here: {payload[:6]!r}")
    if kernel[:4] != b"\x7fELF":
        raise LabError("no ELF kernel in the image's bzImage")
    return kernel


def piped(tool: str, payload: bytes) -> bytes:
    """Decompress a payload whose last four bytes are its size, added by the kernel's build."""
    try:
        return subprocess.run(
            [tool, "-dc"], input=payload[:-4], stdout=subprocess.PIPE, timeout=120, check=False
        ).stdout
    except FileNotFoundError:
        raise LabError(f"{tool} is missing: install it to unpack this kernel") from None


def modules_in_order(modules: Path) -> list[Path]:
    """Files of FIRST_MODULES and what they depend on, dependencies first."""
    depends, by_name = {}, {}
    for line in (modules / "modules.dep").read_text().splitlines():
        name, dummy, needed = line.partition(":")
        depends[name] = needed.split()
        by_name[Path(name).name.split(".")[0].replace("-", "_")] = name
    ordered: list[str] = []
    for wanted in FIRST_MODULES:
        for name in [*reversed(depends[by_name[wanted]]), by_name[wanted]]:
            if name not in ordered:
                ordered.append(name)
    return [modules / name for name in ordered]


def make_initrd(modules: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        run("gcc", "-O2", "-static", "-s", "-Wall", "-o", root / "init", HERE / "init.c")
        files = modules_in_order(modules)
        for file in files:  # not stripped: that would drop the signature
            shutil.copy(file, root)
        (root / "mods").write_text("".join(f"/{file.name}\n" for file in files))
        names = "".join(f"{path.name}\n" for path in sorted(root.iterdir()))
        packed = subprocess.run(
            ["cpio", "-o", "-H", "newc", "--quiet"],
            input=names.encode(),
            cwd=root,
            stdout=subprocess.PIPE,
            timeout=60,
            check=True,
        )
        target.write_bytes(packed.stdout)


def make_disk(image: Path, target: Path) -> None:
    """A sparse ext4 disk of the image's root, with the lab's repository as its only package source."""
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        work = Path(name)
        root, raw = work / "root", work / "disk.raw"
        root.mkdir()
        run("tar", "--numeric-owner", "--xattrs", "-C", root, "-xf", image / "root.tar")
        sources = root / "etc/apt/sources.list.d/standin.list"
        sources.write_text(f"deb [trusted=yes] {vm.REPOSITORY_URL} ./\n")
        packages = root / "usr/lib/python3/dist-packages"
        shutil.copy(HERE / "bytecode.py", packages / "gpufleet_lab_bytecode.py")
        (packages / "gpufleet_lab_bytecode.pth").write_text("import gpufleet_lab_bytecode\n")
        program = root / "usr/lib/gpufleet-lab/gpu-counter"
        program.parent.mkdir()
        program.write_text("#!/usr/bin/python3\n" + (WORKLOAD / "gpu_counter.py").read_text())
        program.chmod(0o755)
        shutil.copy(WORKLOAD / "gpu-counter.service", root / "usr/lib/systemd/system")
        run("truncate", "-s", DISK_SIZE, raw)
        run("mkfs.ext4", "-q", "-F", "-L", "root", "-J", "size=16", "-E", "lazy_itable_init=0", "-d", root, raw)
        run("qemu-img", "convert", "-O", "qcow2", raw, target)


# What tests use first: in the page cache of the saved machine, restored ones need not read it again.
WARM_UP = """
import apt, ctypes, email, hashlib, importlib, json, locale, logging, platform, pwd, selectors, shlex, shutil, socket
import ssl, subprocess, syslog, tempfile, threading, urllib.request, zipfile
print(len(apt.Cache()))
"""


def save_state(machine: Machine, driver: str, target: Path) -> None:
    """Boot, install and load the driver, warm up, write the machine's memory to target, and end QEMU."""
    started = time.monotonic()
    machine.start()
    machine.wait(900)
    say(f"booted after {time.monotonic() - started:.0f} s")
    machine.ssh("date", "-s", f"@{time.time():.0f}")
    machine.ssh("apt-get", "-q", "update")
    if driver != "none":
        branch = driver.split(".")[0]
        apt = ("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-y", "install")
        machine.ssh(*apt, f"nvidia-driver-{branch}-server={driver}-*", timeout=900)
        machine.ssh("systemctl", "restart", "systemd-modules-load.service")
        machine.ssh("nvidia-modprobe", "-c", "0", "-u")
        seen = machine.ssh("nvidia-smi", "-L").splitlines()
        say(f"driver loaded after {time.monotonic() - started:.0f} s: {len(seen)} GPUs")
    machine.ssh("python3", "-c", WARM_UP)
    machine.ssh("sudo", "-u", "ops", "sudo", "-n", "apt-get", "-s", "-q", "install", "gdrdrv-dkms")
    machine.ssh("systemctl", "list-units", "--failed")
    machine.ssh("journalctl", "--vacuum-size=1M", "-q")
    machine.ssh("fstrim", "/", timeout=300)
    machine.ssh("sync")
    with vm.Qmp(machine.monitor, timeout=120) as qmp:
        qmp("migrate", uri=f"exec:cat > {target}")
        deadline = time.monotonic() + 300
        while (status := qmp("query-migrate").get("status")) != "completed":
            if status in ("failed", "cancelled") or time.monotonic() > deadline:
                raise LabError(f"the machine's memory could not be saved: {status}")
            time.sleep(0.2)
        qmp("quit")
    deadline = time.monotonic() + 30
    while machine.running() and time.monotonic() < deadline:
        time.sleep(0.05)
    machine.kill()
    say(f"memory saved after {time.monotonic() - started:.0f} s ({target.stat().st_size >> 20} MiB)")


def bake(driver: str) -> Baked:
    """Everything for machines that have this driver version installed and loaded ("none": no driver)."""
    image, standin = built("image/build"), built("standin/build")
    abi = (image / "kernel").read_text().strip()
    host_key = (image / "root/etc/ssh/ssh_host_ed25519_key.pub").read_text().strip()
    parts = [image.name, standin.name, abi, run("qemu-system-x86_64", "--version"), " ".join(vm.accelerator())]
    parts += [path.read_text() for path in FILES]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpufleet"
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
    folder = cache / f"metal-{key}"
    saved = folder / f"driver-{driver}"
    baked = Baked(
        kernel=folder / "vmlinux",
        initrd=folder / "initrd",
        disk=saved / "saved.qcow2",
        state=saved / "saved.state",
        key=image / "id_ed25519",
        host_key=" ".join(host_key.split()[:2]),
        repository=standin / "repo",
    )
    if (saved / ".complete").exists():
        os.utime(folder)
        return baked
    folder.mkdir(parents=True, exist_ok=True)
    with (cache / "metal.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (saved / ".complete").exists():
            return baked
        if not (folder / ".complete").exists():
            say(f"making kernel, initial RAM disk and disk in {folder}")
            baked.kernel.write_bytes(extract_vmlinux((image / f"root/boot/vmlinuz-{abi}").read_bytes()))
            make_initrd(image / "root/lib/modules" / abi, baked.initrd)
            make_disk(image, folder / "base.qcow2")
            (folder / ".complete").touch()
        say(f"starting a machine to save, with driver {driver} (a minute or two, once)")
        shutil.rmtree(saved, ignore_errors=True)
        saved.mkdir()
        known_hosts = saved / "known_hosts"
        machine = Machine(
            "saved", str(saved), vm.free_port(), str(baked.kernel), str(baked.initrd), str(baked.key), str(known_hosts),
            str(baked.repository),
        )  # fmt: skip
        known_hosts.write_text(f"[127.0.0.1]:{machine.port} {baked.host_key}\n")
        machine.make_disk(folder / "base.qcow2")
        try:
            save_state(machine, driver, baked.state)
        finally:
            machine.kill()
        (saved / ".complete").touch()
        os.utime(folder)
        run(HERE.parent / "prune", "metal")
    return baked
