# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The driver from .rpm packages with dnf: module streams on Enterprise Linux 8 and 9, plain packages on 10.

A stream switch is one dnf transaction: ``dnf shell`` with ``module_stream_switch`` enables the stream, removes what has
no counterpart and installs the whole target set. Since ``dnf shell`` goes on after a line it could not carry out, the
same script is always played with ``--assumeno`` first, and must show exactly the planned set.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Callable

from ansible_collections.gpufleet.driver.plugins.module_utils.drivers import naming, rpm_text
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.base import (
    DNF,
    QUERY_SECONDS,
    Build,
    DriverSource,
    Installed,
    Package,
    PackagePlan,
    Snapshot,
    SourceError,
    Staged,
    StagedFile,
    error,
    read_text,
    sha256,
    wait_for_locks,
    warning,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Completed, Runner
from ansible_collections.gpufleet.driver.plugins.module_utils.execution import run as execute
from ansible_collections.gpufleet.driver.plugins.module_utils.findings import Finding, errors
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import STATE_DIR, atomic_write
from ansible_collections.gpufleet.driver.plugins.module_utils.version import DriverVersion, of_package

MODULE = "nvidia-driver"

_STREAM_FILE = "etc/dnf/modules.d/nvidia-driver.module"
_LOCKS = ("var/lib/rpm/.rpm.lock", "usr/lib/sysimage/rpm/.rpm.lock")
_LOCK_FILE = "etc/dnf/plugins/versionlock.list"
_DOWNLOAD_SECONDS = 3600.0


def rpm_installed(run: Runner, source: str) -> Installed:
    """The driver packages in the rpm database, for any front end of it.

    :raises SourceError: if the database cannot be read.
    """
    done = run(["rpm", "-qa", "--qf", rpm_text.RPM_FORMAT], timeout=QUERY_SECONDS)
    if not done.ok:
        raise SourceError(f"the rpm database cannot be read: {done.describe()}. Try rpm --rebuilddb")
    members, kernels, flavours = [], [], set()
    for row in rpm_text.rpm_packages(done.stdout):
        parsed = naming.parse_rpm(row.name)
        if parsed is None or of_package(naming.strip_kernel(row.version)) is None:
            continue
        members.append(row)
        if parsed.role == naming.KERNEL:
            kernels.append(row)
            flavours.add(parsed.flavour)
    found = {of_package(naming.strip_kernel(row.version)) for row in members}
    versions = tuple(v.text for v in sorted((v for v in found if v), reverse=True))
    problems = []
    foreign = sorted(row.name for row in members if row.arch in ("i686", "i386"))
    if foreign:
        problems.append(
            error(
                "drivers.foreign_architecture",
                f"32-bit driver packages are installed, which this release does not move: {', '.join(foreign)}",
                {"packages": foreign},
                f"dnf remove {' '.join(f'{name}.i686' for name in foreign)}",
            )
        )
        members = [row for row in members if row.name not in foreign or row.arch not in ("i686", "i386")]
    twice = sorted({row.name for row in members if sum(other.name == row.name for other in members) > 1})
    if twice:
        problems.append(
            error(
                "drivers.package_state",
                f"installed more than once, as after an interrupted transaction: {', '.join(twice)}",
                {"packages": [row.nevra for row in members if row.name in twice]},
                f"rpm -q {' '.join(twice)}, then rpm -e the one that is not wanted",
            )
        )
    if len(versions) > 1:
        rows = {row.name: row.version for row in members}
        problems.append(
            warning(
                "drivers.mixed_versions",
                f"driver packages are at {' and '.join(versions)}",
                {"packages": rows},
                "move the whole set to one version",
            )
        )
    if len(flavours) > 1:
        problems.append(
            error(
                "drivers.two_flavours",
                "open and proprietary kernel module packages are both installed",
                {"packages": [row.name for row in kernels]},
                "remove one of them",
            )
        )
    members.sort(key=lambda row: row.name)
    return Installed(
        source=source,
        packages=tuple(Package(row.name, row.version, row.arch) for row in members),
        versions=versions,
        flavour=flavours.pop() if len(flavours) == 1 else None,
        methods=({"source": source, "evidence": f"{len(members)} packages in the rpm database"},) if versions else (),
        problems=tuple(problems),
    )


class Dnf(DriverSource):
    """``kernel`` is what precompiled modules have to be for; other options are those of :class:`DriverSource`."""

    name = DNF
    automatic_units = ("dnf-automatic.timer", "dnf-automatic-install.timer", "dnf-makecache.timer")

    def __init__(
        self,
        run: Runner = execute,
        root: str = "/",
        state_dir: str = STATE_DIR,
        kernel: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(run, root, state_dir, **options)
        self.kernel = kernel or os.uname().release

    # reading

    def detect(self) -> Installed:
        installed = rpm_installed(self.run, DNF)
        stream = rpm_text.enabled_stream(read_text(self.root / _STREAM_FILE))
        names = {package.name for package in installed.packages}
        locks = {rpm_text.lock_name(entry) for entry in self._locks()}
        return replace(
            installed,
            streams=(stream,) if stream else (),
            holds=tuple(sorted(n for n in names if any(fnmatch(n, lock) for lock in locks))),
        )

    def _locks(self) -> list[str]:
        lines = read_text(self.root / _LOCK_FILE).splitlines()
        return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]

    def snapshot(self, installed: Installed) -> Snapshot:
        builds = tuple(Build(p.name, p.version, p.arch, held=p.name in installed.holds) for p in installed.packages)
        kernel = next((p for p in installed.packages if _role(p.name) == naming.KERNEL), None)
        main = of_package(kernel.version) if kernel else None
        return Snapshot(
            source=DNF,
            version=main.text if main else installed.versions[0] if installed.versions else "none",
            flavour=installed.flavour or naming.PROPRIETARY,
            builds=builds,
            holds=tuple(self._locks()),
            streams=installed.streams,
            timers=self.active_units(),
        )

    # planning

    def plan(self, base: Snapshot, installed: Installed, target: DriverVersion, flavour: str) -> PackagePlan:
        if not base.builds:
            nothing = error(
                "drivers.nothing_installed",
                "no driver package is installed, so there is no set to move",
                {},
                "install the driver once by its own instructions",
            )
            return PackagePlan(DNF, target.text, flavour, findings=(nothing,))
        findings: list[Finding] = []
        stream = self._stream(base, target, flavour, findings)
        kernel = naming.kernel_release(self.kernel)
        wanted = {}
        for build in base.builds:
            parsed = naming.parse_rpm(build.name)
            if parsed is not None:
                wanted[build.name] = (build, parsed, naming.rpm_counterparts(parsed, target, flavour, kernel))
        offered = self._offers(name for entry in wanted.values() for name in entry[2])
        staged = self.staged(target.text)
        builds: dict[str, Build] = {}
        for old, (build, parsed, names) in wanted.items():
            found = self._choose(names, build, target, offered, staged)
            if found is None:
                findings.append(self._missing(old, parsed, names, target, offered))
                continue
            held = self.hold_all or build.held or bool(found.name in builds and builds[found.name].held)
            builds[found.name] = Build(found.name, found.version, found.arch, found.bytes, held)
        renamed = any(_role(n) == naming.FABRIC and n not in builds for n in installed.builds())
        return self._finish(builds, installed, target.text, flavour, stream, findings, renamed, self.may_release)

    def _stream(self, base: Snapshot, target: DriverVersion, flavour: str, findings: list[Finding]) -> str | None:
        """The stream to enable, None to leave things as they are; a stream we cannot read is a finding."""
        if not base.streams:
            return None
        try:
            current = naming.Stream.parse(base.streams[0])
        except ValueError as exc:
            findings.append(error("drivers.stream", str(exc), {"stream": base.streams[0]}, f"dnf module list {MODULE}"))
            return None
        wanted = naming.stream_for(current, target, flavour)
        if current.branch == "latest" and current.open == (flavour == naming.OPEN):
            return None
        return None if wanted == current.text else wanted

    def _choose(
        self, names: Iterable[str], build: Build, target: DriverVersion, offered: Sequence[rpm_text.Rpm], staged: Staged
    ) -> rpm_text.Rpm | None:
        for name in names:
            fitting = [o for o in offered if o.name == name and of_package(o.version) == target]
            same = [o for o in fitting if o.arch == build.arch] or fitting
            if same:
                return same[-1]
            saved = next((f for f in staged.files if f.name == name and of_package(f.version) == target), None)
            if saved:
                return rpm_text.Rpm(saved.name, saved.version, build.arch, "", saved.bytes)
        return None

    def _missing(
        self,
        old: str,
        parsed: naming.DriverPackage,
        names: Sequence[str],
        target: DriverVersion,
        offered: Sequence[rpm_text.Rpm],
    ) -> Finding:
        seen = sorted({offer.nevra for offer in offered if offer.name in names})
        evidence = {"package": old, "looked_for": list(names), "offered": seen}
        if parsed.stem == "kmod-nvidia":
            return error(
                "drivers.no_precompiled",
                f"there is no precompiled module of {target} for kernel {self.kernel} ({names[0]})",
                evidence,
                "hold the kernel until it is published, take a version that has one, or move to a -dkms stream",
            )
        if parsed.role in naming.NEEDED:
            return error(
                "drivers.not_available",
                f"{' or '.join(names)} is not available at {target}",
                evidence,
                f"dnf --showduplicates list {names[0]}; or choose a version the repository has",
            )
        return warning("drivers.dropped", f"{old} has no counterpart at {target} and is removed", evidence)

    def _finish(
        self,
        builds: dict[str, Build],
        installed: Installed,
        target: str,
        flavour: str,
        stream: str | None,
        findings: list[Finding],
        renamed: bool,
        may_release: Callable[[str], bool],
    ) -> PackagePlan:
        now = installed.builds()
        changing = [name for name, build in builds.items() if now.get(name) != build.version]
        remove = tuple(sorted(name for name in now if name not in builds))
        held = tuple(name for name in installed.holds if name in changing or name in remove)
        refused = [name for name in held if not may_release(name)]
        if refused:
            findings.append(
                error(
                    "drivers.held",
                    f"locked packages would have to move: {', '.join(refused)}",
                    {"held": refused},
                    "dnf versionlock delete them, or name them in gpu_release_holds",
                )
            )
        marks = any(build.held != (name in installed.holds) for name, build in builds.items())
        if not changing and not remove and not marks and stream is None:
            return PackagePlan(DNF, target, flavour, findings=tuple(findings))
        return PackagePlan(
            DNF,
            target,
            flavour,
            tuple(builds[name] for name in sorted(builds)),
            remove,
            held,
            stream,
            allow_erasing=renamed,
            builds_module=any("dkms" in name for name in builds),
            findings=tuple(findings),
        )

    def restore(self, snapshot: Snapshot, installed: Installed) -> PackagePlan:
        builds = {build.name: build for build in snapshot.builds}
        now = installed.builds()
        absent = [b for b in self._absent(snapshot) if now.get(b.name) != b.version]
        findings = [_unobtainable(absent)] if absent else []
        stream = snapshot.streams[0] if snapshot.streams and snapshot.streams != installed.streams else None
        renamed = any(_role(n) == naming.FABRIC and n not in builds for n in now)
        return self._finish(
            builds, installed, snapshot.version, snapshot.flavour, stream, findings, renamed, lambda name: True
        )

    def _absent(self, snapshot: Snapshot) -> list[Build]:
        offered = {(o.name, o.version) for o in self._offers(build.name for build in snapshot.builds)}
        staged = self.staged(snapshot.version)
        return [
            build
            for build in snapshot.builds
            if (build.name, build.version) not in offered and staged.find(build.name, build.version) is None
        ]

    def obtainable(self, snapshot: Snapshot) -> list[Finding]:
        absent = self._absent(snapshot)
        return [_unobtainable(absent)] if absent else []

    # proving

    def check(self, plan: PackagePlan, recovering: bool = False) -> list[Finding]:
        if plan.empty or plan.refused:
            return []
        return self._judge(plan, self._shell(plan, ["--assumeno"], QUERY_SECONDS))

    def _judge(self, plan: PackagePlan, done: Completed) -> list[Finding]:
        """Whether what dnf would do is exactly ``plan``, and nothing of the system goes with it."""
        text = done.stdout + done.stderr
        changes = rpm_text.transaction(text)
        coming = {(change.name, change.version) for change in changes if change.action == "install"}
        now = {package.name: package.version for package in rpm_installed(self.run, DNF).packages}
        lacking = [
            build.name
            for build in plan.install
            if now.get(build.name) != build.version and (build.name, build.version) not in coming
        ]
        if lacking:
            reasons = rpm_text.problems(text)
            return [
                error(
                    "drivers.transaction",
                    f"dnf cannot do it in one transaction; it would leave out {', '.join(lacking)}"
                    + (f": {'; '.join(reasons[:5])}" if reasons else ""),
                    {"lacking": lacking, "reasons": reasons},
                    "dnf repolist; dnf module list nvidia-driver",
                )
            ]
        ours = {build.name for build in plan.install} | set(plan.remove)
        found = []
        lost = sorted(c.name for c in changes if c.action == "remove" and c.name not in ours)
        if lost:
            found.append(
                error(
                    "drivers.collateral",
                    f"dnf would also remove {', '.join(lost)}",
                    {"packages": lost},
                    f"dnf repoquery --installed --whatrequires {lost[0]}",
                )
            )
        kernels = sorted({c.name for c in changes if c.action == "install" and c.name in ("kernel", "kernel-core")})
        if kernels:
            found.append(
                error(
                    "drivers.kernel_moves",
                    f"a new kernel would come along: {', '.join(kernels)}",
                    {"packages": kernels},
                    "upgrade the kernel first, or exclude it",
                )
            )
        return found

    def _shell(self, plan: PackagePlan, options: Sequence[str], timeout: float, offline: bool = True) -> Completed:
        """Play ``plan`` as one ``dnf shell`` transaction from the metadata of the staging cache."""
        lines = [f"module enable {MODULE}:{plan.stream}"] if plan.stream else []
        now = {package.name for package in rpm_installed(self.run, DNF).packages}
        removed = [name for name in plan.remove if name in now]
        if plan.install:
            lines.append("install " + " ".join(self._arguments(plan)))
        if removed:
            lines.append("remove " + " ".join(removed))
        with tempfile.NamedTemporaryFile("w", prefix="gpufleet-dnf-") as script:
            script.write("\n".join([*lines, "run", ""]))
            script.flush()
            argv = [*self._dnf(offline), "--assumeyes", "--setopt=module_stream_switch=1", *options]
            argv += ["--allowerasing"] if plan.allow_erasing else []
            return self.run([*argv, "shell", script.name], timeout=timeout)

    def _arguments(self, plan: PackagePlan) -> list[str]:
        directory, staged = self.directory(plan.target), self.staged(plan.target)
        offered = {(o.name, o.version) for o in self._offers(build.name for build in plan.install)}
        arguments = []
        for build in plan.install:
            file = staged.find(build.name, build.version)
            if (build.name, build.version) in offered or file is None:
                arguments.append(f"{build.name}-{build.version}.{build.arch}")
            else:
                arguments.append(str(directory / file.file))
        return arguments

    def _dnf(self, offline: bool = True) -> list[str]:
        cache = self.directory("dnf-cache")
        return [
            "dnf",
            *(["--cacheonly"] if offline else []),
            f"--setopt=cachedir={cache}",
            "--setopt=keepcache=1",
            "--setopt=clean_requirements_on_remove=0",
            "--setopt=install_weak_deps=0",
            "--color=never",
        ]

    # staging

    def update(self) -> Finding | None:
        """Refresh the metadata of the staging cache, from which everything else here works without a network."""
        self.directory("dnf-cache").mkdir(mode=0o700, parents=True, exist_ok=True)
        done = self.run([*self._dnf(offline=False), "--quiet", "makecache"], timeout=600.0)
        if done.ok:
            return None
        return warning(
            "drivers.lists", f"the package lists could not be refreshed: {done.describe()}", {}, "dnf makecache"
        )

    def stage(self, plan: PackagePlan) -> Staged:
        directory, before = self.directory(plan.target), self.staged(plan.target)
        now = {package.name: package.version for package in rpm_installed(self.run, DNF).packages}
        lacking = [b for b in plan.install if now.get(b.name) != b.version and before.find(b.name, b.version) is None]
        if not lacking:
            return before
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        options = ["--downloadonly", f"--downloaddir={directory}"]
        done = self._shell(plan, options, _DOWNLOAD_SECONDS, offline=False)
        staged = self._record(plan.install, plan.target, before)
        absent = [build.name for build in lacking if staged.find(build.name, build.version) is None]
        if absent:
            raise SourceError(f"dnf did not download {', '.join(absent)}: {done.describe()}; nothing was installed")
        return staged

    def _record(self, builds: Sequence[Build], version: str, before: Staged) -> Staged:
        directory = self.directory(version)
        files = {(file.name, file.version): file for file in before.files}
        for build in builds:
            path = directory / _file_name(build)
            if (build.name, build.version) in files or not path.is_file():
                continue
            files[build.name, build.version] = StagedFile(
                build.name, build.version, path.name, sha256(path), path.stat().st_size
            )
        self._seed(directory)
        return self.keep(version, list(files.values()))

    def _seed(self, directory: Path) -> None:
        """Put the downloaded files where dnf looks for them offline: beside the metadata of their repository."""
        cache = self.directory("dnf-cache")
        for repodata in cache.glob("*/repodata"):
            packages = repodata.parent / "packages"
            packages.mkdir(exist_ok=True)
            for file in directory.glob("*.rpm"):
                link = packages / file.name
                if not link.exists():
                    os.link(file, link)

    def save_builds(self, snapshot: Snapshot) -> tuple[Staged, list[Finding]]:
        directory, before = self.directory(snapshot.version), self.staged(snapshot.version)
        absent = self._absent(snapshot)
        lacking = [b for b in snapshot.builds if b not in absent and before.find(b.name, b.version) is None]
        if lacking:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            names = [f"{build.name}-{build.version}.{build.arch}" for build in lacking]
            argv = [*self._dnf(offline=False), "--assumeyes", "--downloadonly", f"--downloaddir={directory}"]
            self.run([*argv, "reinstall", *names], timeout=_DOWNLOAD_SECONDS)
            before = self._record(snapshot.builds, snapshot.version, before)
            absent += [build for build in lacking if before.find(build.name, build.version) is None]
        return before, [_unobtainable(absent)] if absent else []

    # changing

    def apply(self, plan: PackagePlan, timeout: float, recovering: bool = False) -> None:
        self._release(plan.unhold)
        findings = self.check(plan)
        if errors(findings):
            raise SourceError(errors(findings)[0].message)
        done = self._shell(plan, [], timeout)
        now = {package.name: package.version for package in rpm_installed(self.run, DNF).packages}
        lacking = [build.name for build in plan.install if now.get(build.name) != build.version]
        if lacking:
            reasons = rpm_text.problems(done.stdout + done.stderr) or [done.describe()]
            raise SourceError(f"dnf left {', '.join(lacking)} behind: {'; '.join(reasons[:5])}")
        self._hold(plan.install)

    def _release(self, names: Sequence[str]) -> None:
        if names:
            kept = [entry for entry in self._locks() if rpm_text.lock_name(entry) not in names]
            self._write_locks(kept)

    def _hold(self, builds: Sequence[Build]) -> None:
        locks = self._locks()
        locked = {rpm_text.lock_name(entry) for entry in locks}
        new = [f"{b.name}-{b.version}.*" for b in builds if b.held and b.name not in locked]
        if new:
            self._write_locks([*locks, *new])

    def _write_locks(self, entries: Iterable[str]) -> None:
        path = self.root / _LOCK_FILE
        atomic_write(path, ("\n".join(entries) + "\n").encode(), mode=0o644)

    def recover(self, timeout: float) -> None:
        """An rpm transaction that was killed leaves packages in two versions; the lower one of each goes."""
        rows: dict[str, list[Package]] = {}
        for package in rpm_installed(self.run, DNF).packages:
            rows.setdefault(package.name, []).append(package)
        for twice in rows.values():
            twice.sort(key=lambda package: of_package(package.version) or DriverVersion("", ()))
            for package in twice[:-1]:
                spec = f"{package.name}-{package.version.rpartition(':')[2]}.{package.arch}"
                done = self.run(["rpm", "-e", "--nodeps", spec], timeout=timeout)
                if not done.ok:
                    raise SourceError(f"{spec} is installed beside {twice[-1].version}: {done.describe()}")

    def busy(self) -> str | None:
        return wait_for_locks([self.root / lock for lock in _LOCKS], self.lock_timeout, self.sleep)

    def _offers(self, names: Iterable[str]) -> list[rpm_text.Rpm]:
        wanted = sorted(set(names))
        if not wanted:
            return []
        if not self.directory("dnf-cache").is_dir():
            self.update()
        done = self.run(
            [
                *self._dnf(),
                "--quiet",
                "repoquery",
                "--disable-modular-filtering",
                "--showduplicates",
                "--qf",
                rpm_text.REPOQUERY_FORMAT,
                *wanted,
            ],
            timeout=QUERY_SECONDS,
        )
        if not done.ok:
            raise SourceError(f"dnf cannot say what its repositories have: {done.describe()}")
        return rpm_text.offers(done.stdout)


def _role(name: str) -> str | None:
    parsed = naming.parse_rpm(name)
    return parsed.role if parsed else None


def _unobtainable(absent: Sequence[Build]) -> Finding:
    return error(
        "drivers.rollback_unavailable",
        "no repository has the builds of the way back any more, and they were not saved: "
        + ", ".join(f"{build.name}-{build.version}" for build in absent),
        {"packages": {build.name: build.version for build in absent}},
        "add a repository that has them, or set rollback_required to false to go without a way back",
    )


def _file_name(build: Build) -> str:
    return f"{build.name}-{build.version.rpartition(':')[2]}.{build.arch}.rpm"
