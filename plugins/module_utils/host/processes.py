# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# ruff: noqa: PTH115, PTH116, PTH208 - a walk over 60,000 descriptors is no place for Path objects
"""Every process of a host that has one of a set of devices open or mapped, read from /proc and nothing else.

What is compared is the device number (``st_rdev``), because a container may have its own node for it, under any path,
in a mount namespace that tools which compare inodes (lsof, fuser) cannot see into.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Number = tuple[int, int]
"""Major and minor number of a device."""

File = bytes
"""An inode and the major and minor number of its file system, packed as PROCMAP_QUERY answers them (``=Q2I``)."""

_FIRST = tuple(str(number) for number in range(1024))
_KERNEL_THREAD = 0x00200000  # PF_KTHREAD in the flags field of /proc/PID/stat
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO, fixed by the kernel


@dataclass(frozen=True)
class Stat:
    """The fields of /proc/PID/stat used here; ``start`` is in clock ticks since boot."""

    pid: int
    comm: str
    state: str
    ppid: int
    group: int
    session: int
    kernel_thread: bool
    threads: int
    start: int


def parse_stat(data: bytes) -> Stat:
    """Parse /proc/PID/stat; the name stands in brackets and may itself hold blanks and brackets.

    :raises ValueError: if the text is not such a row.
    """
    opening, closing = data.find(b"("), data.rfind(b")")
    fields = data[closing + 2 :].split()
    if opening < 0 or len(fields) < 20:
        raise ValueError(f"not a row of /proc/PID/stat: {data[:80]!r}")
    return Stat(
        pid=int(data[:opening]),
        comm=data[opening + 1 : closing].decode("utf-8", "replace"),
        state=fields[0].decode(),
        ppid=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        kernel_thread=bool(int(fields[6]) & _KERNEL_THREAD),
        threads=int(fields[17]),
        start=int(fields[19]),
    )


@dataclass(frozen=True)
class Mapping:
    """One file-backed row of /proc/PID/maps; ``file`` tells which file, not which device."""

    addresses: str
    file: File
    path: str


def parse_maps(data: bytes) -> list[Mapping]:
    """The file-backed rows of /proc/PID/maps."""
    rows = []
    for line in data.splitlines():
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[5].startswith(b"/") and fields[4] != b"0":
            major, minor = fields[3].split(b":")
            rows.append(
                Mapping(
                    fields[0].decode(),
                    struct.pack("=Q2I", int(fields[4]), int(major, 16), int(minor, 16)),
                    fields[5].decode("utf-8", "replace"),
                )
            )
    return rows


@dataclass
class Use:
    """How one process uses the wanted devices."""

    pid: int
    opened: dict[Number, int] = field(default_factory=dict)
    """Device number → open descriptors."""
    mapped: set[Number] = field(default_factory=set)
    paths: dict[Number, str] = field(default_factory=dict)
    """Device number → the path the process opened it by, as seen from its own root."""

    @property
    def numbers(self) -> set[Number]:
        return {*self.opened, *self.mapped}


@dataclass
class Scan:
    """What one pass over /proc saw."""

    uses: dict[int, Use] = field(default_factory=dict)
    libraries: dict[int, str] = field(default_factory=dict)
    """Processes that map libcuda → its path."""
    blocked: dict[int, Stat] = field(default_factory=dict)
    """Processes in uninterruptible sleep at both looks; their maps were not read, as that could hang too."""
    zombies: dict[int, Stat] = field(default_factory=dict)
    denied: list[int] = field(default_factory=list)
    """Processes whose descriptors or maps we were not allowed to read."""
    processes: int = 0


def in_initial_pid_namespace(proc: str = "/proc") -> bool:
    """False inside a PID namespace (a container): processes outside it are invisible from there."""
    try:
        return str(Path(proc, "self/ns/pid").readlink()) == _INITIAL_PID_NAMESPACE
    except OSError:
        return True


def read(path: str) -> bytes:
    """A small file of /proc or /sys; :raises OSError: if it cannot be read (the process may have gone)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _drain(descriptor)
    finally:
        os.close(descriptor)


class _Query:
    """PROCMAP_QUERY (Linux 6.11, include/uapi/linux/fs.h): asks for the next mapping of a kind instead of having the
    kernel print all of them, several times cheaper."""

    _REQUEST = 0xC0686611  # _IOWR('f', 17, struct procmap_query), 104 bytes
    _WRITABLE, _SHARED, _NEXT, _FILE_BACKED = 0x02, 0x08, 0x10, 0x20

    def __init__(self) -> None:
        self.available = True
        self._buffer = bytearray(104)
        view = memoryview(self._buffer)
        self._whole, self._from, self._end, self._file = view, view[16:24], view[32:40], view[64:80]
        self._questions = [
            struct.pack("=2Q", 104, kind | self._NEXT | self._FILE_BACKED) + bytes(88)
            for kind in (self._SHARED, self._WRITABLE)
        ]

    def files(self, descriptor: int) -> set[File] | None:
        """Files mapped shared (as a device is) or writable (as every library's data is); None if unavailable."""
        found: set[File] = set()
        ioctl, request, buffer, file, end, start = (
            fcntl.ioctl,
            self._REQUEST,
            self._buffer,
            self._file,
            self._end,
            self._from,
        )
        for question in self._questions:
            self._whole[:] = question
            try:
                while True:
                    ioctl(descriptor, request, buffer)
                    found.add(bytes(file))
                    start[:] = end
            except FileNotFoundError:
                continue
            except ProcessLookupError:
                return set()
            except OSError:
                self.available = False
                return None
        return found


class _Tables:
    """Whether two threads share one descriptor table (kcmp(2); listings are compared where it is not to be had)."""

    _SYSCALL = {"x86_64": 312, "aarch64": 272, "ppc64le": 354}
    _FILES = 2

    def __init__(self, proc: str) -> None:
        self._proc = proc
        self._number = self._SYSCALL.get(os.uname().machine)
        self._syscall: Any = None

    def same(self, one: int, other: int) -> bool:
        if self._number is not None:
            if self._syscall is None:
                import ctypes

                self._syscall = ctypes.CDLL(None, use_errno=True).syscall
            answer = self._syscall(self._number, one, other, self._FILES, 0, 0)
            if answer >= 0:
                return bool(answer == 0)
        return self._listing(one) == self._listing(other)

    def _listing(self, tid: int) -> set[str]:
        try:
            return set(os.listdir(f"{self._proc}/{tid}/fd"))
        except OSError:
            return set()


class Scanner:
    """One pass over ``proc`` for the devices in ``numbers`` or with a major in ``majors``.

    ``paths`` maps the usual node paths to numbers, for mappings whose device number may not be asked for.
    """

    def __init__(
        self,
        numbers: Iterable[Number],
        majors: Iterable[int],
        paths: dict[str, Number],
        proc: str = "/proc",
        read_maps: bool = True,
    ) -> None:
        self._numbers = frozenset(numbers)
        self._majors = frozenset(majors)
        self._paths = paths
        self._proc = proc
        self._read_maps = read_maps
        self._query = _Query()
        self._files: dict[File, Number | None] = {}
        self._names: dict[File, str] = {}
        self._dull_rows: set[bytes] = set()
        self._tables = _Tables(proc)
        self._result = Scan()

    def run(self) -> Scan:
        """Look at every process once, and once more at those found in uninterruptible sleep.

        Goes from directory to directory, so the working directory changes meanwhile: best run in a forked child, which
        also bounds it, as a look at a process stuck inside a driver can hang.

        :raises OSError: if ``proc`` cannot be listed.
        """
        back = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        own = str(os.getpid())
        try:
            names = [name for name in os.listdir(self._proc) if name.isdigit() and name != own]
            self._result.processes = len(names)
            for name in [name for name in names if not self._process(name)]:
                self._process(name, last=True)
        finally:
            os.chdir(back)
            os.close(back)
        return self._result

    def _process(self, name: str, last: bool = False) -> bool:
        """False if the process was in uninterruptible sleep and should be looked at once more."""
        pid = int(name)
        try:
            os.chdir(f"{self._proc}/{name}/fd")
            row = _first("../stat")
            fields = row[row.rfind(b")") + 2 :].split(None, 18)
            state = fields[0]
            if int(fields[6]) & _KERNEL_THREAD or state == b"X":
                return True
            if state == b"Z":
                self._result.zombies[pid] = parse_stat(row)
            elif state == b"D":
                if not last:
                    return False
                self._result.blocked[pid] = parse_stat(row)
                self._descriptors(pid)
            else:
                self._descriptors(pid)
                if self._read_maps:
                    self._mappings(pid)
            if fields[17] != b"1":
                self._threads(pid, state != b"Z")
        except (FileNotFoundError, ProcessLookupError, ValueError, IndexError):
            return True
        except PermissionError:
            self._result.denied.append(pid)
        return True

    def _descriptors(self, pid: int) -> None:
        """Look at every descriptor in the working directory, a ``fd`` of /proc.

        Since Linux 6.2 its size is the number of descriptors. They are mostly 0, 1, 2 and so on without a gap, and then
        need not be listed; whatever lies beyond the first gap is.
        """
        count = os.stat(".").st_size
        done = self._look(pid, _FIRST[:count], until_gap=True)
        if not count or done < count:
            known = set(_FIRST[:done])
            self._look(pid, [name for name in os.listdir() if name not in known])

    def _look(self, pid: int, names: Sequence[str], until_gap: bool = False) -> int:
        """Stat descriptors: the only way to find a device that was opened by another path, and hardly dearer than
        reading the link, as no path has to be spelled out. How many there were before the first gap."""
        status = os.stat
        for position, name in enumerate(names):
            try:
                about = status(name)
            except OSError:
                if until_gap:
                    return position
                continue
            if about.st_rdev:
                number = self._wanted(about)
                if number is not None:
                    use = self._result.uses.setdefault(pid, Use(pid))
                    use.opened[number] = use.opened.get(number, 0) + 1
                    with contextlib.suppress(OSError):
                        use.paths.setdefault(number, os.readlink(name))
        return len(names)

    def _wanted(self, about: os.stat_result) -> Number | None:
        if not stat.S_ISCHR(about.st_mode):
            return None
        number = (os.major(about.st_rdev), os.minor(about.st_rdev))
        return number if number in self._numbers or number[0] in self._majors else None

    def _threads(self, pid: int, leader_alive: bool) -> None:
        """Threads that have their own descriptor table, or that outlived their leader."""
        tables = [pid] if leader_alive else []
        for name in os.listdir("../task"):
            tid = int(name)
            if tid == pid or any(self._tables.same(tid, other) for other in tables):
                continue
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                os.chdir(f"{self._proc}/{pid}/task/{name}/fd")
                self._descriptors(pid)
                if not tables and self._read_maps:
                    self._mappings(pid)
                tables.append(tid)

    def _mappings(self, pid: int) -> None:
        descriptor = os.open("../maps", os.O_RDONLY | os.O_CLOEXEC)
        try:
            files = self._query.files(descriptor) if self._query.available else None
            if files is None:
                files = self._read_files(_drain(descriptor))
            elif not files <= self._files.keys():
                self._learn(_drain(descriptor))
        finally:
            os.close(descriptor)
        for file in files:
            number = self._files.setdefault(file, None)
            if number is not None:
                use = self._result.uses.setdefault(pid, Use(pid))
                use.mapped.add(number)
                use.paths.setdefault(number, self._names[file])
            elif file in self._names:
                self._result.libraries[pid] = self._names[file]

    def _read_files(self, text: bytes) -> set[File]:
        """The files of interest in the text of maps. Most processes map the same few, so what follows the addresses of
        a row is compared with rows already known to be of none before anything is parsed."""
        tails = {row[row.find(b" ") :] for row in text.splitlines()}
        if tails <= self._dull_rows:
            return set()
        self._learn(text)
        found = {row.file for row in parse_maps(text)} & self._names.keys()
        if not found:
            self._dull_rows |= tails
        return found

    def _learn(self, text: bytes) -> None:
        """Classify each file in the text of maps that was not met before."""
        for row in parse_maps(text):
            if row.file in self._files:
                continue
            number = self._number_of(row)
            self._files[row.file] = number
            if number is not None or _is_libcuda(row.path):
                self._names[row.file] = row.path

    def _number_of(self, row: Mapping) -> Number | None:
        try:
            return self._wanted(os.stat(f"../map_files/{row.addresses}"))
        except OSError:
            number = self._paths.get(row.path)
            return number if number in self._numbers else None


def _is_libcuda(path: str) -> bool:
    return path.rpartition("/")[2].startswith("libcuda.so")


def _first(path: str) -> bytes:
    """The first 4 KiB of a file of /proc that is shorter than that."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)


def _drain(descriptor: int) -> bytes:
    chunks: list[bytes] = []
    while True:
        chunk = os.read(descriptor, 65536)
        if not chunk:
            return b"".join(chunks)
        chunks.append(chunk)
