# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The driver from NVIDIA's .run installer.

The installer is its own package manager: it knows what it installed and ``nvidia-uninstall`` takes exactly that away.
A node has one package, ``NVIDIA-Linux``, and the way back is the old installer file, kept with its checksum.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils.drivers import naming
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.base import (
    RUNFILE,
    Build,
    DriverSource,
    Installed,
    Package,
    PackagePlan,
    Snapshot,
    SourceError,
    Staged,
    StagedFile,
    disk_module_version,
    error,
    read_text,
    sha256,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Runner
from ansible_collections.gpufleet.driver.plugins.module_utils.execution import run as execute
from ansible_collections.gpufleet.driver.plugins.module_utils.findings import Finding
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import STATE_DIR
from ansible_collections.gpufleet.driver.plugins.module_utils.version import DriverVersion

PACKAGE = "NVIDIA-Linux"
_FILE = re.compile(r"^NVIDIA-Linux-(?P<arch>x86_64|aarch64)-(?P<version>\d{3}\.[\d.]*\d)(?:-[\w-]+)?\.run$")
_LOG = "var/log/nvidia-installer.log"
_UNINSTALL = "usr/bin/nvidia-uninstall"
_KERNEL_TYPE_FROM = 560
"""From this branch the installer takes ``--kernel-module-type``; before it, ``-m kernel-open`` meant the open ones."""


def file_version(name: str) -> str | None:
    """The driver version in an installer's file name: ``NVIDIA-Linux-x86_64-550.90.07.run`` → ``550.90.07``."""
    found = _FILE.match(name)
    return found["version"] if found else None


def log_version(text: str) -> str | None:
    """The version that ``/var/log/nvidia-installer.log`` says was installed."""
    found = re.search(r"^installer version: (\d{3}\.[\d.]*\d)\s*$", text, re.MULTILINE)
    return found[1] if found else None


def log_errors(text: str) -> list[str]:
    """The ``ERROR:`` sentences of an installer's log; a sentence goes on over the indented lines after it."""
    found: list[str] = []
    inside = False
    for line in text.splitlines():
        if line.startswith("ERROR:"):
            found.append(line[6:].strip())
            inside = True
        elif inside and line.startswith(" "):
            found[-1] += " " + line.strip()
        else:
            inside = False
    return found


def installer_argv(file: Path, version: DriverVersion, flavour: str, kernel: str, dkms: bool) -> list[str]:
    """How the installer is run: no questions, no X server, modules of ``flavour`` for ``kernel``."""
    argv = ["sh", str(file), "--silent", "--no-x-check", "--no-nouveau-check", f"--kernel-name={kernel}"]
    if int(version.branch) >= _KERNEL_TYPE_FROM:
        argv.append(f"--kernel-module-type={flavour}")
    elif flavour == naming.OPEN:
        argv.append("-m=kernel-open")
    return [*argv, "--dkms"] if dkms else argv


class Runfile(DriverSource):
    """``file`` and ``checksum`` (SHA-256, hexadecimal) are the installer of the target; ``previous`` that of today's
    driver, where it was not kept from the upgrade before."""

    name = RUNFILE

    def __init__(
        self,
        run: Runner = execute,
        root: str = "/",
        state_dir: str = STATE_DIR,
        file: str | None = None,
        checksum: str | None = None,
        previous: str | None = None,
        kernel: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(run, root, state_dir, **options)
        self.file = Path(file) if file else None
        self.checksum = checksum
        self.previous = Path(previous) if previous else None
        self.kernel = kernel or os.uname().release

    def detect(self) -> Installed:
        if not (self.root / _UNINSTALL).exists():
            return Installed(source=RUNFILE)
        version = log_version(read_text(self.root / _LOG))
        evidence = {"source": RUNFILE, "evidence": f"/{_UNINSTALL} exists, /{_LOG} says {version or 'nothing'}"}
        if version is None:
            return Installed(source=RUNFILE, methods=(evidence,), packages=(Package(PACKAGE, "unknown", ""),))
        return Installed(
            source=RUNFILE,
            packages=(Package(PACKAGE, version, os.uname().machine),),
            versions=(version,),
            flavour=self._flavour(),
            methods=(evidence,),
        )

    def _flavour(self) -> str | None:
        done = self.run(["modinfo", "-k", self.kernel, "-F", "license", "nvidia"], timeout=30.0)
        if not done.ok:
            return None
        return naming.PROPRIETARY if done.stdout.strip() == "NVIDIA" else naming.OPEN

    def snapshot(self, installed: Installed) -> Snapshot:
        builds = tuple(Build(p.name, p.version, p.arch) for p in installed.packages)
        version = installed.version or "none"
        return Snapshot(RUNFILE, version, installed.flavour or naming.PROPRIETARY, builds)

    def plan(self, base: Snapshot, installed: Installed, target: DriverVersion, flavour: str) -> PackagePlan:
        if installed.version == target.text and (installed.flavour or flavour) == flavour:
            return PackagePlan(RUNFILE, target.text, flavour)
        findings = [] if self.staged(target.text).find(PACKAGE, target.text) else self._file_findings(target)
        size = self.file.stat().st_size if self.file and self.file.is_file() else 0
        build = Build(PACKAGE, target.text, os.uname().machine, size)
        return PackagePlan(
            RUNFILE, target.text, flavour, install=(build,), builds_module=True, findings=tuple(findings)
        )

    def _file_findings(self, target: DriverVersion) -> list[Finding]:
        if self.file is None or not self.file.is_file():
            return [
                error(
                    "drivers.runfile",
                    f"the installer {self.file or '(none given)'} is not on this node",
                    {},
                    f"put NVIDIA-Linux-{os.uname().machine}-{target}.run there and set runfile",
                )
            ]
        if file_version(self.file.name) != target.text:
            return [
                error(
                    "drivers.runfile",
                    f"{self.file.name} is not the installer of {target}",
                    {"file": str(self.file)},
                    "set runfile to the installer of the target version",
                )
            ]
        if not self.checksum:
            return [
                error(
                    "drivers.runfile",
                    f"no checksum was given for {self.file.name}",
                    {},
                    "set runfile_checksum to the SHA-256 that NVIDIA publishes beside it",
                )
            ]
        found = sha256(self.file)
        if found != self.checksum.lower():
            return [
                error(
                    "drivers.runfile",
                    f"{self.file.name} has SHA-256 {found}, expected {self.checksum}",
                    {"found": found, "expected": self.checksum},
                    "download it again",
                )
            ]
        return []

    def restore(self, snapshot: Snapshot, installed: Installed) -> PackagePlan:
        if installed.builds() == {build.name: build.version for build in snapshot.builds}:
            return PackagePlan(RUNFILE, snapshot.version, snapshot.flavour)
        findings = tuple(self.obtainable(snapshot))
        return PackagePlan(RUNFILE, snapshot.version, snapshot.flavour, install=snapshot.builds, findings=findings)

    def obtainable(self, snapshot: Snapshot) -> list[Finding]:
        if self.staged(snapshot.version).find(PACKAGE, snapshot.version) or self._previous(snapshot.version):
            return []
        return [
            error(
                "drivers.rollback_unavailable",
                f"the installer of {snapshot.version} was not kept",
                {"version": snapshot.version},
                f"put NVIDIA-Linux-{os.uname().machine}-{snapshot.version}.run on the "
                "node and set previous_runfile, or set rollback_required to false",
            )
        ]

    def _previous(self, version: str) -> Path | None:
        if self.previous and self.previous.is_file() and file_version(self.previous.name) == version:
            return self.previous
        return None

    def check(self, plan: PackagePlan, recovering: bool = False) -> list[Finding]:
        return []

    def stage(self, plan: PackagePlan) -> Staged:
        file = next((f for f in (self.file, self.previous) if f and file_version(f.name) == plan.target), None)
        if plan.empty or file is None:
            return self.staged(plan.target)
        return self._keep(file, plan.target)

    def save_builds(self, snapshot: Snapshot) -> tuple[Staged, list[Finding]]:
        previous = self._previous(snapshot.version)
        if previous is None:
            return self.staged(snapshot.version), self.obtainable(snapshot)
        return self._keep(previous, snapshot.version), []

    def _keep(self, file: Path, version: str) -> Staged:
        directory, before = self.directory(version), self.staged(version)
        if before.find(PACKAGE, version):
            return before
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        copy = directory / file.name
        shutil.copyfile(file, copy)
        digest = sha256(copy)
        if file == self.file and digest != (self.checksum or "").lower():
            copy.unlink()
            raise SourceError(
                f"{file} has changed since it was checked: its SHA-256 is {digest}, expected {self.checksum}"
            )
        return self.keep(version, [StagedFile(PACKAGE, version, copy.name, digest, copy.stat().st_size)])

    def apply(self, plan: PackagePlan, timeout: float, recovering: bool = False) -> None:
        staged = self.staged(plan.target).find(PACKAGE, plan.target)
        if staged is None:
            raise SourceError(f"the installer of {plan.target} is not staged, or its checksum is wrong; stage it first")
        uninstall = self.root / _UNINSTALL
        if uninstall.exists():
            done = self.run([str(uninstall), "--silent"], timeout=timeout)
            if not done.ok and not recovering:
                raise SourceError(f"the old driver could not be uninstalled: {done.describe()}; see /{_LOG}")
        file = self.directory(plan.target) / staged.file
        dkms = (self.root / "usr/sbin/dkms").exists()
        version = DriverVersion.parse(plan.target)
        done = self.run(installer_argv(file, version, plan.flavour, self.kernel, dkms), timeout=timeout)
        if not done.ok and disk_module_version(self.run, self.kernel) != plan.target:
            said = log_errors(read_text(self.root / _LOG))
            raise SourceError(
                f"the installer of {plan.target} failed: {said[0] if said else done.describe()}; see /{_LOG}"
            )

    def recover(self, timeout: float) -> None:
        """Nothing to do: ``apply`` takes away whatever part of a driver is there before it installs."""
