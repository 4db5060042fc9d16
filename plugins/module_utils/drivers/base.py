# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What every source of the driver (apt, dnf, zypper, runfile) offers, and the data they speak in.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Callable

from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Runner
from ansible_collections.gpufleet.driver.plugins.module_utils.findings import ERROR, WARNING, Finding, errors
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import atomic_write
from ansible_collections.gpufleet.driver.plugins.module_utils.version import DriverVersion, of_package

APT, DNF, ZYPPER, RUNFILE, OPERATOR, NONE = "apt", "dnf", "zypper", "runfile", "operator", "none"

QUERY_SECONDS = 120.0
"""Deadline for a command that only reads package state."""


def error(check: str, message: str, evidence: Mapping[str, Any], next: str | None = None) -> Finding:
    """A finding that stands in the way."""
    return Finding(check, ERROR, message, evidence, next)


def warning(check: str, message: str, evidence: Mapping[str, Any], next: str | None = None) -> Finding:
    """A finding that somebody should look at."""
    return Finding(check, WARNING, message, evidence, next)


class SourceError(Exception):
    """A package operation failed; the text says what was seen, what was expected and what to type next."""


@dataclass(frozen=True)
class Package:
    """One installed driver package. ``state`` is installed, or what the package manager calls a broken one."""

    name: str
    version: str
    arch: str
    state: str = "installed"


@dataclass(frozen=True)
class Build:
    """One exact build to install. ``held`` and ``auto`` are marks to carry; ``bytes`` is the size to download."""

    name: str
    version: str
    arch: str
    bytes: int = 0
    held: bool = False
    auto: bool = False


@dataclass(frozen=True)
class Installed:
    """The driver that is installed, whoever installed it. ``version`` is None where there is none, or several."""

    source: str
    packages: tuple[Package, ...] = ()
    versions: tuple[str, ...] = ()
    flavour: str | None = None
    methods: tuple[Mapping[str, str], ...] = ()
    holds: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()
    streams: tuple[str, ...] = ()
    automatic: tuple[str, ...] = ()
    problems: tuple[Finding, ...] = ()

    @property
    def version(self) -> str | None:
        return self.versions[0] if len(self.versions) == 1 else None

    @property
    def branches(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(version.split(".")[0] for version in self.versions))

    def builds(self) -> dict[str, str]:
        """Package name to exact version, for reports and differences."""
        return {package.name: package.version for package in self.packages}

    def as_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "version": self.version,
            "versions": list(self.versions),
            "branches": list(self.branches),
            "flavour": self.flavour,
            "methods": [dict(method) for method in self.methods],
            "packages": {p.name: {"version": p.version, "arch": p.arch, "state": p.state} for p in self.packages},
            "holds": list(self.holds),
            "pins": list(self.pins),
            "streams": list(self.streams),
            "problems": [problem.as_dict() for problem in self.problems],
        }


@dataclass(frozen=True)
class PackagePlan:
    """One transaction: the whole set moves together. ``findings`` holds refusals (errors) and remarks.

    ``unhold`` are held packages that the transaction moves; ``stream`` is the module stream to switch to, if it
    changes; ``allow_erasing`` is set only where a package is known to replace one of another name; ``builds_module``
    tells that the kernel modules are compiled on the node.
    """

    source: str
    target: str
    flavour: str
    install: tuple[Build, ...] = ()
    remove: tuple[str, ...] = ()
    unhold: tuple[str, ...] = ()
    stream: str | None = None
    allow_erasing: bool = False
    builds_module: bool = False
    findings: tuple[Finding, ...] = ()

    @property
    def empty(self) -> bool:
        return not self.install and not self.remove and self.stream is None

    @property
    def refused(self) -> bool:
        return bool(errors(self.findings))

    @property
    def hold(self) -> tuple[str, ...]:
        return tuple(build.name for build in self.install if build.held)

    @property
    def download_bytes(self) -> int:
        return sum(build.bytes for build in self.install)

    def as_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "target": self.target,
            "flavour": self.flavour,
            "install": {build.name: build.version for build in self.install},
            "remove": list(self.remove),
            "hold": list(self.hold),
            "unhold": list(self.unhold),
            "stream": self.stream,
            "download_bytes": self.download_bytes,
        }


@dataclass(frozen=True)
class Snapshot:
    """The exact builds, marks and streams of a node, as the journal keeps them under ``packages``.

    ``timers`` are the automatic-upgrade units that were active and are stopped while packages change.
    """

    source: str
    version: str
    flavour: str
    builds: tuple[Build, ...]
    holds: tuple[str, ...] = ()
    streams: tuple[str, ...] = ()
    timers: tuple[str, ...] = ()
    runfile: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Snapshot:
        """:raises SourceError: if the journal's entry is not a snapshot of this release."""
        try:
            return cls(
                source=value["source"],
                version=value["version"],
                flavour=value["flavour"],
                builds=tuple(Build(**build) for build in value["builds"]),
                holds=tuple(value["holds"]),
                streams=tuple(value["streams"]),
                timers=tuple(value["timers"]),
                runfile=value.get("runfile"),
            )
        except (KeyError, TypeError) as exc:
            raise SourceError(f"the journal's record of the packages before the upgrade is unreadable: {exc}") from exc

    def map(self) -> dict[str, str]:
        return {build.name: build.version for build in self.builds}


@dataclass(frozen=True)
class StagedFile:
    """One file of a staging directory, with the checksum taken when the package manager had verified it."""

    name: str
    version: str
    file: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Staged:
    """What is in one staging directory; ``changed`` tells whether anything had to be fetched."""

    directory: str
    files: tuple[StagedFile, ...] = ()
    changed: bool = False

    def find(self, name: str, version: str) -> StagedFile | None:
        return next((file for file in self.files if (file.name, file.version) == (name, version)), None)


class DriverSource(ABC):
    """One way the driver gets onto a node. Only ``apply``, ``recover`` and the staging methods change anything.

    ``root`` is where the system's files are; ``release_holds`` are patterns of held or locked packages that may move;
    ``hold_all`` holds the complete target set, otherwise holds are carried from each package to its counterpart.
    """

    name: str
    automatic_units: tuple[str, ...] = ()
    """What starts upgrades behind our back. A run of theirs that has begun is waited for, never killed."""

    def __init__(
        self,
        run: Runner,
        root: str,
        state_dir: str,
        release_holds: Sequence[str] = (),
        hold_all: bool = False,
        lock_timeout: float = 300.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.run = run
        self.root = Path(root)
        self.state_dir = state_dir
        self.release_holds = tuple(release_holds)
        self.hold_all = hold_all
        self.lock_timeout = lock_timeout
        self.sleep = sleep
        self._proven: dict[Path, Staged] = {}

    def directory(self, version: str) -> Path:
        """Where the files of a driver version are staged."""
        return staging_directory(self.state_dir, version)

    def staged(self, version: str) -> Staged:
        """What is staged of a version; its checksums are computed once, until :meth:`keep` changes it."""
        directory = self.directory(version)
        if directory not in self._proven:
            self._proven[directory] = read_manifest(directory)
        return self._proven[directory]

    def keep(self, version: str, files: Sequence[StagedFile]) -> Staged:
        """Write down that ``files``, whose checksums were just computed, are what is staged of a version."""
        directory = self.directory(version)
        write_manifest(directory, files)
        self._proven[directory] = Staged(str(directory), tuple(files))
        return replace(self._proven[directory], changed=True)

    @abstractmethod
    def detect(self) -> Installed:
        """What is installed through this source."""

    @abstractmethod
    def snapshot(self, installed: Installed) -> Snapshot:
        """The exact builds, marks and streams now, to be remembered before the first change."""

    @abstractmethod
    def plan(self, base: Snapshot, installed: Installed, target: DriverVersion, flavour: str) -> PackagePlan:
        """The transaction from ``installed`` to ``target``; the target set is derived from ``base``'s packages.

        ``base`` is what the node had before the first change, so that a set half moved by a killed transaction still
        leads to the same target set.
        """

    @abstractmethod
    def restore(self, snapshot: Snapshot, installed: Installed) -> PackagePlan:
        """The transaction that puts back exactly what ``snapshot`` holds."""

    @abstractmethod
    def check(self, plan: PackagePlan, recovering: bool = False) -> list[Finding]:
        """Prove by simulation that ``plan`` would go through and touches nothing it should not.

        ``recovering`` accepts a package database that a transaction of ours left half-way.
        """

    @abstractmethod
    def stage(self, plan: PackagePlan) -> Staged:
        """Fetch everything ``plan`` needs. :raises SourceError:"""

    @abstractmethod
    def save_builds(self, snapshot: Snapshot) -> tuple[Staged, list[Finding]]:
        """Save the builds of ``snapshot`` so that a rollback needs no repository; what cannot be had is a finding."""

    @abstractmethod
    def obtainable(self, snapshot: Snapshot) -> list[Finding]:
        """What of ``snapshot`` could not be put back, since no repository has it and it was not saved."""

    @abstractmethod
    def apply(self, plan: PackagePlan, timeout: float, recovering: bool = False) -> None:
        """Carry out ``plan`` from the staged files alone; ``recovering`` accepts a database left half-way.

        :raises SourceError: with the cause, where the package manager names one.
        """

    @abstractmethod
    def recover(self, timeout: float) -> None:
        """Bring a package database that an interrupted transaction left behind into a state ``apply`` accepts."""

    def update(self) -> Finding | None:
        """Refresh the package lists; what failed is a warning, since yesterday's lists may do."""
        return None

    def busy(self) -> str | None:
        """Wait a bounded time for another package manager to end; who it is, if it did not."""
        return None

    def remarks(self, installed: Installed) -> list[Finding]:
        """What deserves a look about ``installed`` although it stands in nobody's way."""
        return []

    def active_units(self) -> tuple[str, ...]:
        """Which of :attr:`automatic_units` are active now."""
        if not self.automatic_units or not (self.root / "run/systemd/system").is_dir():
            return ()
        done = self.run(["systemctl", "is-active", *self.automatic_units], timeout=30.0)
        states = done.stdout.splitlines()
        return tuple(unit for unit, state in zip(self.automatic_units, states) if state.strip() == "active")

    def pause_automatic(self, units: tuple[str, ...]) -> None:
        """Stop the automatic-upgrade ``units``, which a snapshot found active. :raises SourceError:"""
        if units:
            done = self.run(["systemctl", "stop", *units], timeout=self.lock_timeout + 30.0)
            if not done.ok:
                raise SourceError(f"automatic upgrades could not be stopped: {done.describe()}")

    def resume_automatic(self, units: tuple[str, ...]) -> None:
        """Start ``units`` again; what fails is systemd's to report."""
        if units:
            self.run(["systemctl", "start", *units], timeout=60.0)

    def may_release(self, name: str) -> bool:
        """Whether the hold or lock on ``name`` is ours to lift."""
        return any(fnmatch(name, pattern) for pattern in self.release_holds)


def lock_holder(path: Path) -> str | None:
    """Which process holds a POSIX record lock on ``path``, asked without taking it; None if nobody does."""
    layout = "hhqqi4x"
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        asked = struct.pack(layout, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, dummy, dummy, dummy, pid = struct.unpack(layout, fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    finally:
        os.close(descriptor)
    if kind == fcntl.F_UNLCK:
        return None
    return f"process {pid} ({read_text(Path('/proc') / str(pid) / 'comm').strip() or 'gone'})"


def wait_for_locks(paths: Sequence[Path], timeout: float, sleep: Callable[[float], None]) -> str | None:
    """Wait until nobody holds any of ``paths``, at most ``timeout`` seconds; who still does, or None."""
    waited = 0.0
    while True:
        holder = next((found for found in map(lock_holder, paths) if found), None)
        if holder is None or waited >= timeout:
            return holder
        sleep(1.0)
        waited += 1.0


def read_text(path: Path, limit: int = 1 << 22) -> str:
    """The first ``limit`` characters of a file, empty if it cannot be read."""
    try:
        with path.open(errors="replace") as stream:
            return stream.read(limit)
    except OSError:
        return ""


MANIFEST = "manifest.json"


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def write_manifest(directory: Path, files: Iterable[StagedFile]) -> None:
    content = {"files": [asdict(file) for file in sorted(files, key=lambda file: file.file)]}
    atomic_write(directory / MANIFEST, (json.dumps(content, indent=1) + "\n").encode())


def read_manifest(directory: Path) -> Staged:
    """The staged files whose content still has the recorded checksum; an empty result if nothing was staged."""
    try:
        content = json.loads((directory / MANIFEST).read_text())
        files = [StagedFile(**entry) for entry in content["files"]]
    except FileNotFoundError:
        return Staged(str(directory))
    except OSError as exc:
        raise SourceError(
            f"{directory / MANIFEST} cannot be read ({exc.strerror}); look at it with: ls -ld {directory}"
        ) from exc
    except (ValueError, KeyError, TypeError) as exc:
        raise SourceError(f"{directory / MANIFEST} is damaged ({exc}); remove {directory} and stage again") from exc
    there = [file for file in files if (directory / file.file).is_file()]
    with ThreadPoolExecutor() as pool:
        sums = pool.map(sha256, [directory / file.file for file in there])
        return Staged(str(directory), tuple(file for file, found in zip(there, sums) if found == file.sha256))


def staging_directory(state_dir: str, version: str) -> Path:
    return Path(state_dir) / "packages" / version


def disk_module_version(run: Runner, kernel: str) -> str | None:
    """The version of the nvidia module that ``modprobe`` would load under ``kernel``; None if there is none."""
    done = run(["modinfo", "-k", kernel, "-F", "version", "nvidia"], timeout=30.0)
    return done.stdout.strip() or None if done.ok else None


@dataclass(frozen=True)
class Verdict:
    """Whether the driver on disk is one whole driver: ``disk_module`` is what modprobe would load."""

    disk_module: str | None
    findings: tuple[Finding, ...] = field(default_factory=tuple)


def verify(installed: Installed, disk_module: str | None, target: str, kernel: str) -> Verdict:
    """Judge an installation by its end state, before anything is unloaded or loaded."""
    findings = [problem for problem in installed.problems if problem.level == ERROR]
    behind = {p.name: p.version for p in installed.packages if not _at(p, target)}
    if behind:
        findings.append(
            error(
                "drivers.mixed_versions",
                f"not every driver package is at {target}: {', '.join(f'{n} {v}' for n, v in sorted(behind.items()))}",
                {"packages": behind},
                "install the whole set again, or put the previous one back",
            )
        )
    if disk_module is None:
        findings.append(
            error(
                "drivers.disk_module",
                f"there is no nvidia module for kernel {kernel}, expected {target}",
                {"kernel": kernel, "expected": target},
                f"modinfo -k {kernel} nvidia; dkms status",
            )
        )
    elif disk_module != target:
        findings.append(
            error(
                "drivers.disk_module",
                f"the nvidia module on disk for kernel {kernel} is {disk_module}, the packages say {target}",
                {"kernel": kernel, "found": disk_module, "expected": target},
                f"modinfo -k {kernel} -F filename nvidia, and remove the copy that does not belong there",
            )
        )
    return Verdict(disk_module, tuple(findings))


def _at(package: Package, target: str) -> bool:
    inside = of_package(package.version)
    return inside is None or inside == DriverVersion.parse(target)
