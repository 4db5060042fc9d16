# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The walk over /proc, on real processes that hold a real character device."""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.host import processes
from ansible_collections.gpufleet.driver.plugins.module_utils.host.processes import Scan, Scanner

DEVICE = "/dev/full"
NUMBER = (1, 7)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace and mknod: run as root")


def scan() -> Scan:
    return Scanner({NUMBER}, (), {}).run()


@contextlib.contextmanager
def running(program: str, *argv: str) -> Iterator[int]:
    """A Python program that prints a line when it is ready and then waits; ended by its id."""
    child = subprocess.Popen(
        [sys.executable, "-c", f"{program}\nprint('ready', flush=True)\nimport signal\nsignal.pause()", *argv],
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout and child.stdout.readline() == b"ready\n"
        yield child.pid
    finally:
        child.kill()
        child.wait()
        if child.stdout:
            child.stdout.close()


def test_open_files_are_counted_by_device_number() -> None:
    with running(f"files = [open('{DEVICE}'), open('{DEVICE}'), open('/dev/null')]") as pid:
        use = scan().uses[pid]
    assert use.opened == {NUMBER: 2} and use.paths == {NUMBER: DEVICE}


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param([3, 4], id="without a gap"),
        pytest.param([3, 5, 900], id="with gaps"),
        pytest.param([1500], id="far out"),
        pytest.param([0], id="standard input"),
    ],
)
def test_wherever_in_the_table_they_are(numbers: list[int]) -> None:
    program = f"""
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (2000, 2000))
source = os.open('/dev/full', os.O_RDONLY)
spare = os.dup2(source, 1999)
os.close(source)
for number in {numbers}:
    os.dup2(spare, number)
os.close(spare)
"""
    with running(program) as pid:
        assert scan().uses[pid].opened == {NUMBER: len(numbers)}


def test_the_working_directory_is_put_back() -> None:
    before = Path.cwd()
    scan()
    assert Path.cwd() == before


@needs_root
def test_a_node_of_its_own_in_another_mount_namespace(tmp_path: Path) -> None:
    """As in a container: another inode, under another path, in a file system that only this process sees."""
    program = f"""
import ctypes, os, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x00020000) == 0, os.strerror(ctypes.get_errno())
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "-t", "tmpfs", "-o", "dev", "none", sys.argv[1]], check=True)
os.mknod(sys.argv[1] + "/accelerator", 0o20600, os.makedev{NUMBER})
held = open(sys.argv[1] + "/accelerator")
"""
    with running(program, str(tmp_path)) as pid:
        assert not (tmp_path / "accelerator").exists(), "it must be invisible from here"
        assert scan().uses[pid].opened == {NUMBER: 1}


def test_a_thread_with_a_descriptor_table_of_its_own() -> None:
    program = f"""
import ctypes, os, threading
ready = threading.Event()
def work():
    assert ctypes.CDLL(None, use_errno=True).unshare(0x00000400) == 0
    os.open('{DEVICE}', os.O_RDONLY)
    ready.set()
    threading.Event().wait()
threading.Thread(target=work, daemon=True).start()
ready.wait()
"""
    with running(program) as pid:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # the interpreter may still be closing one
                assert link.readlink() != Path(DEVICE)
        assert scan().uses[pid].opened == {NUMBER: 1}


@pytest.mark.parametrize("query", [True, False], ids=["by query where the kernel has it", "by text"])
def test_a_process_that_maps_libcuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, query: bool) -> None:
    library = tmp_path / "libcuda.so.550.90.07"
    library.write_bytes(bytes(4096))
    program = f"""
import mmap
file = open('{library}', 'r+b')
held = mmap.mmap(file.fileno(), 4096, access=mmap.ACCESS_COPY)
file.close()
"""
    if not query:
        monkeypatch.setattr(processes._Query, "files", lambda self, descriptor: None)
    with running(program) as first, running(program) as second, running("import json") as other:
        libraries = scan().libraries
    assert {pid: libraries.get(pid) for pid in (first, second, other)} == {
        first: str(library),
        second: str(library),
        other: None,
    }


def test_both_ways_to_read_maps_agree() -> None:
    """PROCMAP_QUERY, where the kernel has it, and the text."""
    descriptor = os.open("/proc/self/maps", os.O_RDONLY)
    try:
        query = processes._Query()
        asked = query.files(descriptor)
    finally:
        os.close(descriptor)
    if asked is None:
        pytest.skip("this kernel has no PROCMAP_QUERY (Linux 6.11); the text is read, as other tests show")
    text = Path("/proc/self/maps").read_bytes()
    rows = {row.file for row in processes.parse_maps(text)}
    assert asked <= rows | {bytes(16)} and asked


def test_zombies_are_told_apart() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    try:
        seen = scan()
        assert seen.zombies[pid].ppid == os.getpid() and pid not in seen.uses
    finally:
        os.waitpid(pid, 0)


def test_processes_that_come_and_go_meanwhile() -> None:
    """A scan amid a storm of short-lived processes neither fails nor reports them."""
    stop = threading.Event()

    def storm() -> None:
        while not stop.is_set():
            subprocess.run(["true"], check=True)

    threads = [threading.Thread(target=storm) for dummy in range(2)]
    for thread in threads:
        thread.start()
    try:
        with running(f"held = open('{DEVICE}')") as pid:
            for dummy in range(5):
                assert pid in scan().uses
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes somebody else to be refused: run as root")
def test_what_may_not_be_looked_into_is_said() -> None:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setgid(65534)
        os.setuid(65534)
        os.write(write_end, struct.pack("=I", len(scan().denied)))
        os._exit(0)
    os.waitpid(pid, 0)
    assert struct.unpack("=I", os.read(read_end, 4))[0] > 0
    os.close(read_end)
    os.close(write_end)


@pytest.mark.parametrize(
    ("row", "name", "state", "kernel"),
    [
        pytest.param(
            b"7 (a) b) (c)) S 1 7 7 0 -1 4194304 0 0 0 0 1 1 0 0 20 0 3 0 42 9 9", "a) b) (c)", "S", False, id="name"
        ),
        pytest.param(
            b"2 (kthreadd) S 0 0 0 0 -1 2129984 0 0 0 0 1 1 0 0 20 0 1 0 1 0 0", "kthreadd", "S", True, id="kernel"
        ),
    ],
)
def test_stat(row: bytes, name: str, state: str, kernel: bool) -> None:
    about = processes.parse_stat(row)
    assert (about.comm, about.state, about.kernel_thread) == (name, state, kernel)


def test_stat_of_something_else() -> None:
    with pytest.raises(ValueError, match="not a row"):
        processes.parse_stat(b"")


def test_maps() -> None:
    text = (
        b"55e1-55e2 r--p 00000000 fe:00 247278      /usr/bin/head\n"
        b"7f00-7f01 rw-s 00000000 00:05 321         /dev/nvidia 0 (deleted)\n"
        b"7f02-7f03 rw-p 00000000 00:00 0 \n"
        b"7ffc-7ffd rw-p 00000000 00:00 0           [stack]\n"
    )
    assert [(row.addresses, row.path) for row in processes.parse_maps(text)] == [
        ("55e1-55e2", "/usr/bin/head"),
        ("7f00-7f01", "/dev/nvidia 0 (deleted)"),
    ]
    assert processes.parse_maps(text)[0].file == struct.pack("=Q2I", 247278, 0xFE, 0)
