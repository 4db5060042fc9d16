# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# ruff: noqa: PTH115, PTH116, PTH208 - links and descriptors of /proc are no files
"""The processes of a workload as /proc shows them, and what among it keeps a process checkpoint from working.

Only a restore proves a checkpoint, so whatever is known to break one is refused by name before anything is touched.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils.host import processes

NVIDIA = re.compile(
    r"/nvidia(?:\d+|ctl|-uvm|-uvm-tools|-modeset|-caps(?:-imex-channels)?/.*|-nvswitch.*)(?: \(deleted\))?$"
)
_LIBCUDA = re.compile(r"/libcuda\.so(?:\.(\d{2,4}\.\d{1,3}(?:\.\d{1,3})?))?[^/]*$")
_NCCL = re.compile(r"/libnccl[^/]*\.so")
_NAMESPACES = ("mnt", "pid", "net", "ipc", "uts", "user", "cgroup")
_APPEND, _ACCESS, _WRITE_ONLY = 0o2000, 0o3, 0o1
_NO_LIMIT = 1 << 62
"""What version 1 of control groups has as limit where there is none is above this."""

_SHARED = "/dev/shm/"  # noqa: S108 - it is only looked at
JOURNAL_SOCKET = "/run/systemd/journal/stdout"


@dataclass(frozen=True)
class Opened:
    """A regular file a process has open. ``log`` says that it is only appended to, so that its size may differ;
    ``gone`` that it has no name any more, and CRIU saves what is in it."""

    path: str
    size: int
    log: bool
    gone: bool = False


@dataclass(frozen=True)
class Process:
    """One process: ``devices`` are NVIDIA's device files it has open, ``cuda`` the driver version of the libcuda it
    maps, ``rss`` bytes, ``sockets`` the inodes of its sockets."""

    pid: int
    start: int
    ppid: int
    comm: str
    ids: tuple[int, ...]
    """Its threads, process group and session: ids that must be free where it is restored."""
    rss: int
    cuda: str | None
    nccl: bool
    devices: tuple[str, ...]
    files: tuple[Opened, ...]
    libraries: tuple[tuple[str, int], ...]
    shared: tuple[str, ...]
    """Files in /dev/shm that it maps and that have a name: CRIU saves the name only."""
    sockets: tuple[int, ...]
    problems: tuple[tuple[str, str], ...] = field(default=())
    """Feature and what was seen, for everything that a checkpoint does not survive."""


def look(pid: int, proc: str = "/proc") -> Process:
    """:raises OSError: if the process has gone."""
    base = f"{proc}/{pid}"
    about = processes.parse_stat(processes.read(f"{base}/stat"))
    mapped = processes.read(f"{base}/maps")
    cuda, nccl, libraries, shared = _mapped(mapped)
    devices, files, sockets, problems = _descriptors(base)
    environment = processes.read(f"{base}/environ").split(b"\0")
    problems += _environment(environment)
    if b"[uprobes]" in mapped:
        problems.append(("uprobes", "somebody's probes are in its code, and would be saved with it"))
    problems += [
        (f"namespace_{name}", f"it runs in a {name} namespace of its own")
        for name in _NAMESPACES
        if _link(f"{base}/ns/{name}") != _link(f"{proc}/self/ns/{name}")
    ]
    status = processes.read(f"{base}/status").decode("utf-8", "replace")
    resident = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    tracer = re.search(r"^TracerPid:\s+(\d+)$", status, re.MULTILINE)
    if tracer and tracer[1] != "0":
        problems.append(("ptrace", f"PID {tracer[1]} traces it"))
    threads = tuple(sorted(int(name) for name in os.listdir(f"{base}/task")))
    return Process(
        pid=pid,
        start=about.start,
        ppid=about.ppid,
        comm=about.comm,
        ids=(*threads, about.group, about.session),
        rss=int(resident[1]) * 1024 if resident else 0,
        cuda=cuda,
        nccl=nccl,
        devices=devices,
        files=files,
        libraries=libraries,
        shared=shared,
        sockets=sockets,
        problems=tuple(problems),
    )


def waits(pid: int, proc: str = "/proc") -> bool:
    """Whether a process waits for something so that no signal reaches it (state D)."""
    try:
        return processes.parse_stat(processes.read(f"{proc}/{pid}/stat")).state == "D"
    except OSError:
        return False


def inner_pid(pid: int, proc: str = "/proc") -> int:
    """The PID that a process has in its own PID namespace; its PID if it has none of its own, or is gone."""
    try:
        found = re.search(r"^NSpid:.*?(\d+)$", Path(proc, str(pid), "status").read_text(errors="replace"), re.MULTILINE)
    except OSError:
        found = None
    return int(found[1]) if found else pid


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _mapped(data: bytes) -> tuple[str | None, bool, tuple[tuple[str, int], ...], tuple[str, ...]]:
    cuda, nccl, libraries, shared = None, False, {}, set()
    for row in processes.parse_maps(data):
        found = _LIBCUDA.search(row.path)
        cuda = found[1] or "of unknown version" if found else cuda
        nccl = nccl or bool(_NCCL.search(row.path))
        if row.path.startswith(_SHARED) and not row.path.endswith(" (deleted)"):
            shared.add(row.path)
        if row.path not in libraries and not row.path.startswith(("/dev/", "/memfd:", "/SYSV")):
            try:
                libraries[row.path] = os.stat(row.path).st_size
            except OSError:
                libraries[row.path] = -1
    return cuda, nccl, tuple(sorted(libraries.items())), tuple(sorted(shared))


def _descriptors(
    base: str,
) -> tuple[tuple[str, ...], tuple[Opened, ...], tuple[int, ...], list[tuple[str, str]]]:
    devices, files, sockets = set(), {}, set()
    problems: list[tuple[str, str]] = []
    for name in os.listdir(f"{base}/fd"):
        path = f"{base}/fd/{name}"
        target = _link(path)
        if NVIDIA.search(target):
            devices.add(target)
        elif target.startswith("socket:["):
            sockets.add(int(target[8:-1]))
        elif "io_uring" in target:
            problems.append(("io_uring", f"descriptor {name} is an io_uring"))
        elif target.startswith("/dev/infiniband/"):
            problems.append(("rdma", f"it has {target} open"))
        elif target.startswith("/"):
            opened = _opened(base, name, target)
            if opened:
                files[target] = opened
    if any("nvidia-caps-imex" in one for one in devices):
        problems.append(("imex", "it imports memory of other nodes (IMEX)"))
    if any("nvidia-caps/" in one for one in devices):
        problems.append(("mig", "it uses a MIG instance"))
    return tuple(sorted(devices)), tuple(files.values()), tuple(sorted(sockets)), problems


def _opened(base: str, descriptor: str, target: str) -> Opened | None:
    try:
        about = os.stat(f"{base}/fd/{descriptor}")
        text = Path(f"{base}/fdinfo/{descriptor}").read_text()
    except OSError:
        return None
    if not stat.S_ISREG(about.st_mode):
        return None
    found = re.search(r"^flags:\s+(\d+)$", text, re.MULTILINE)
    flags = int(found[1], 8) if found else 0
    log = bool(flags & _APPEND) and flags & _ACCESS == _WRITE_ONLY
    return Opened(target, about.st_size, log, about.st_nlink == 0)


def _environment(words: Iterable[bytes]) -> list[tuple[str, str]]:
    problems = []
    for word in words:
        name, dummy, value = word.partition(b"=")
        text = value.decode("utf-8", "replace")
        if name in (b"CUDA_MPS_PIPE_DIRECTORY", b"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"):
            problems.append(("mps", f"{name.decode()}={text} makes it a client of MPS"))
        elif name == b"CUDA_VISIBLE_DEVICES" and text.startswith("MIG-"):
            problems.append(("mig", f"it uses the MIG instance {text}"))
        elif name == b"CUDA_CHECKPOINT_JOB_FILE":
            problems.append(("launch_job", f"it is one of a job of cuda-checkpoint ({text}), which is not saved"))
        elif name == b"LD_PRELOAD" and text:
            problems.append(("preload", f"LD_PRELOAD={text} stands between it and its libraries"))
    return problems


_UNIX_ROW = re.compile(r"^\S+: \S+ \S+ (?P<flags>\S+) (?P<type>\S+) (?P<state>\S+) +(?P<inode>\d+)(?: (?P<path>.*))?$")


def stream_sockets(text: str) -> dict[int, str]:
    """Connected UNIX stream sockets in /proc/net/unix: inode → path, empty for one without a name (unix(7))."""
    found = {}
    for line in text.splitlines()[1:]:
        row = _UNIX_ROW.match(line)
        if row and row["type"] == "0001" and row["state"] == "03":
            found[int(row["inode"])] = row["path"] or ""
    return found


def journal_sockets(everybody: Sequence[Process], proc: str = "/proc") -> list[int]:
    """Inodes of the processes' standard output and error that lead to the journal: their other end is systemd's."""
    streams = stream_sockets(Path(proc, "net/unix").read_text(errors="replace"))
    found: set[int] = set()
    for process in everybody:
        for descriptor in (1, 2):
            target = _link(f"{proc}/{process.pid}/fd/{descriptor}")
            inode = int(target[8:-1]) if target.startswith("socket:[") else 0
            if inode in streams:
                found.add(inode)
    return sorted(found)


def established(everybody: Sequence[Process], proc: str = "/proc") -> list[str]:
    """Established TCP connections of the processes, ``local remote`` as net/tcp writes addresses (proc(5))."""
    own = {inode for process in everybody for inode in process.sockets}
    found = []
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(proc, "net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "01" and int(fields[9]) in own:
                found.append(f"{fields[1]} {fields[2]}")
    return found


def outsiders(everybody: Sequence[Process], root: int) -> list[Process]:
    """Processes that do not descend from ``root``: a dump of its tree would leave them behind."""
    parents = {process.pid: process.ppid for process in everybody}

    def inside(pid: int) -> bool:
        while pid in parents and pid != root:
            pid = parents[pid]
        return pid == root

    return [process for process in everybody if not inside(process.pid)]


def taken(ids: Iterable[int], proc: str = "/proc") -> dict[int, str]:
    """Those of ``ids`` that a process or thread here has, with its name: a restored process needs the ids it had."""
    found = {}
    for one in sorted(set(ids)):
        try:
            found[one] = Path(proc, str(one), "comm").read_text(errors="replace").strip()
        except OSError:
            continue
    return found


def memory_available(proc: str = "/proc") -> int:
    """Bytes of host memory that may be had without swapping (MemAvailable)."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", Path(proc, "meminfo").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def cgroup_headroom(cgroup: str, sys: str = "/sys") -> int | None:
    """Bytes a control group may still take before its limit, or that of one above it; None without a limit."""
    least: int | None = None
    top, names = Path(sys, "fs/cgroup"), ("memory.max", "memory.current")
    if (top / "memory").is_dir():
        top, names = top / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
    folder = top / cgroup.strip("/")
    while folder != top and top in folder.parents:
        try:
            limit, used = ((folder / name).read_text().strip() for name in names)
        except OSError:
            limit, used = "max", "0"
        if limit.isdecimal() and int(limit) < _NO_LIMIT:
            left = max(0, int(limit) - int(used))
            least = left if least is None else min(least, left)
        folder = folder.parent
    return least


def as_member(process: Process, cuda: bool, gpus: Sequence[str], gpu_bytes: int) -> dict[str, Any]:
    """What a manifest and a record keep of a process; ``gpus`` are the UUIDs of those it computes on."""
    return {
        "pid": process.pid,
        "start": process.start,
        "comm": process.comm,
        "cuda": cuda,
        "ids": sorted(set(process.ids)),
        "gpus": list(gpus),
        "gpu_bytes": gpu_bytes,
        "rss": process.rss,
    }
