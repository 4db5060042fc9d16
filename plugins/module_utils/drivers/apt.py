# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The driver from .deb packages: Ubuntu's archive, NVIDIA's repository, a PPA, Debian's own.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Callable

from ansible_collections.gpufleet.driver.plugins.module_utils.drivers import apt_text, naming
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.base import (
    APT,
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
from ansible_collections.gpufleet.driver.plugins.module_utils.findings import Finding
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import STATE_DIR
from ansible_collections.gpufleet.driver.plugins.module_utils.version import DriverVersion, of_package

_ENV = {"DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_SUSPEND": "1", "APT_LISTCHANGES_FRONTEND": "none"}
_LOCKS = ("var/lib/dpkg/lock-frontend", "var/lib/dpkg/lock")
_DOWNLOAD_SECONDS = 3600.0
_DKMS_FAILED = "exit status 10"


class Apt(DriverSource):
    """Everything by apt-get, apt-cache, apt-mark and dpkg-query; options are those of :class:`DriverSource`."""

    name = APT
    automatic_units = ("apt-daily.timer", "apt-daily-upgrade.timer", "unattended-upgrades.service")

    def __init__(self, run: Runner = execute, root: str = "/", state_dir: str = STATE_DIR, **options: Any) -> None:
        super().__init__(run, root, state_dir, **options)
        self._asked: dict[str, apt_text.Policy | None] = {}
        self._simulated: dict[tuple[str, ...], Completed] = {}

    # reading

    def detect(self) -> Installed:
        native = self._query(["dpkg", "--print-architecture"]).strip()
        rows = apt_text.dpkg_packages(self._query(["dpkg-query", "-W", "-f", apt_text.DPKG_FORMAT]), native)
        parts = {row.name: naming.parse_deb(row.name.partition(":")[0]) for row in rows}
        core = {
            row.name: (row, part)
            for row in rows
            for part in [parts[row.name]]
            if part and part.role != naming.TOOL and (part.role == naming.PIN or part.kernel or of_package(row.version))
        }
        versions = _versions(row.version for row, part in core.values() if part.role != naming.PIN)
        tools = [
            row
            for row in rows
            for part in [parts[row.name]]
            if part and part.role == naming.TOOL and str(of_package(row.version)) in versions
        ]
        members = sorted([row for row, dummy in core.values()] + tools, key=lambda row: row.name)
        flavours = {parsed.flavour for dummy, parsed in core.values() if parsed.flavour}
        automatic = apt_text.automatic(read_text(self.root / "var/lib/apt/extended_states"), native)
        return Installed(
            source=APT,
            packages=tuple(Package(row.name, row.version, row.arch, row.state) for row in members),
            versions=versions,
            flavour=next(iter(flavours)) if len(flavours) == 1 else None,
            methods=({"source": APT, "evidence": f"{len(members)} packages in dpkg"},) if versions else (),
            holds=tuple(row.name for row in members if row.held),
            pins=tuple(str(pin) for pin in self._pins(members)),
            automatic=tuple(row.name for row in members if row.name in automatic),
            problems=tuple(self._problems(rows, core, versions, len(flavours) > 1)),
        )

    def _pins(self, members: Iterable[apt_text.DpkgPackage]) -> list[apt_text.Pin]:
        directory = self.root / "etc/apt"
        files = [directory / "preferences", *sorted((directory / "preferences.d").glob("*"))]
        found = [pin for path in files for pin in apt_text.pins(read_text(path))]
        names = [row.name.partition(":")[0] for row in members]
        return [pin for pin in found if any(_concerns(pattern, names) for pattern in pin.package.split())]

    def _problems(
        self,
        rows: Iterable[apt_text.DpkgPackage],
        core: dict[str, tuple[apt_text.DpkgPackage, naming.DriverPackage]],
        versions: tuple[str, ...],
        two_flavours: bool,
    ) -> list[Finding]:
        found = []
        broken = {row.name: row.state for row in rows if row.state != "installed"}
        if broken:
            found.append(
                error(
                    "drivers.package_state",
                    "dpkg left unfinished: " + ", ".join(f"{name} ({state})" for name, state in sorted(broken.items())),
                    {"packages": broken},
                    "dpkg --configure -a, then apt-get install --fix-broken",
                )
            )
        updates = self.root / "var/lib/dpkg/updates"
        if updates.is_dir() and any(entry.name.isdigit() for entry in updates.iterdir()):
            found.append(
                error(
                    "drivers.package_state",
                    "dpkg was interrupted in the middle of a transaction",
                    {"directory": str(updates)},
                    "dpkg --configure -a",
                )
            )
        compute = {
            row.name: of_package(row.version)
            for row, parsed in core.values()
            if parsed.role == naming.COMPUTE and not row.name.partition(":")[2]
        }
        branches = {version.branch for version in compute.values() if version}
        if len(branches) > 1:
            odd = [n for n, v in compute.items() if v and v.branch != versions[0].split(".")[0]]
            found.append(
                error(
                    "drivers.two_branches",
                    f"driver libraries of branches {', '.join(sorted(branches))} are installed side by side"
                    + self._origin_of(odd),
                    {"packages": {n: str(v) for n, v in compute.items()}},
                    f"apt-get remove {' '.join(odd)}",
                )
            )
        elif len(versions) > 1:
            behind = [row.name for row, dummy in core.values() if str(of_package(row.version)) == versions[-1]]
            ahead = [row.name for row, dummy in core.values() if str(of_package(row.version)) == versions[0]]
            fewer = min((behind, ahead), key=len)
            found.append(
                warning(
                    "drivers.mixed_versions",
                    f"driver packages are at {' and '.join(versions)}; differing: {', '.join(sorted(fewer))}"
                    + self._origin_of(ahead),
                    {"packages": {row.name: row.version for row, dummy in core.values()}},
                    "move the whole set to one version",
                )
            )
        if two_flavours:
            found.append(
                error(
                    "drivers.two_flavours",
                    "open and proprietary kernel module packages are both installed",
                    {},
                    "remove one of them",
                )
            )
        return found

    def _origin_of(self, names: Iterable[str]) -> str:
        """When and by what one of ``names`` came, from apt's history; empty if the log does not say."""
        wanted = set(names)
        for entry in reversed(apt_text.history(read_text(self.root / "var/log/apt/history.log"))):
            hit = next((n for n in entry.changed if n in wanted and entry.changed[n][2]), None)
            if hit:
                return f"; {hit} came at {entry.start} by {entry.command or 'apt'!r}"
        return ""

    def remarks(self, installed: Installed) -> list[Finding]:
        found = []
        names = [package.name for package in installed.packages]
        loose = sorted(set(names) - set(installed.holds))
        if installed.holds and loose:
            found.append(
                warning(
                    "drivers.hold_coverage",
                    "some driver packages are held and others are not, so an "
                    f"automatic upgrade can split the set: {', '.join(loose)}",
                    {"held": list(installed.holds), "not_held": loose},
                    f"apt-mark hold {' '.join(loose)}",
                )
            )
        version = _main_version(installed)
        for name, policy in self._policies(names).items():
            parsed = naming.parse_deb(name.partition(":")[0])
            offered = of_package(policy.candidate or "")
            if parsed is None or offered is None or offered.text == version or name in installed.holds:
                continue
            if parsed.role == naming.FABRIC:
                found.append(
                    warning(
                        "drivers.fabric_candidate",
                        f"apt would move {name} to {policy.candidate} while the "
                        f"driver is {version}; Fabric Manager has to match it exactly",
                        {"package": name, "installed": policy.installed, "candidate": policy.candidate},
                        f"apt-mark hold {name}",
                    )
                )
            elif parsed.role == naming.META and naming.is_transitional(parsed.name, policy.candidate or "", ""):
                found.append(
                    warning(
                        "drivers.transitional_candidate",
                        f"a normal upgrade of {name} leads to another branch: its candidate is {policy.candidate}",
                        {"package": name, "candidate": policy.candidate},
                        f"apt-mark hold {name}",
                    )
                )
        return found

    def snapshot(self, installed: Installed) -> Snapshot:
        held, automatic = set(installed.holds), set(installed.automatic)
        builds = tuple(
            Build(p.name, p.version, p.arch, held=p.name in held, auto=p.name in automatic) for p in installed.packages
        )
        return Snapshot(
            source=APT,
            version=_main_version(installed),
            flavour=installed.flavour or naming.PROPRIETARY,
            builds=builds,
            holds=installed.holds,
            timers=self.active_units(),
        )

    # planning

    def plan(self, base: Snapshot, installed: Installed, target: DriverVersion, flavour: str) -> PackagePlan:
        wanted: dict[str, tuple[Build, naming.DriverPackage, tuple[str, ...]]] = {}
        for build in base.builds:
            bare, dummy, foreign = build.name.partition(":")
            parsed = naming.parse_deb(bare)
            if parsed is None:
                continue
            names = naming.deb_counterparts(parsed, target, flavour, naming.deb_origin(build.version))
            wanted[build.name] = (build, parsed, tuple(f"{n}:{foreign}" if foreign else n for n in names))
        if not wanted:
            nothing = error(
                "drivers.nothing_installed",
                "no driver package is installed, so there is no set to move",
                {},
                "install the driver once by its own instructions",
            )
            return PackagePlan(APT, target.text, flavour, findings=(nothing,))
        policies = self._policies([*wanted, *(name for entry in wanted.values() for name in entry[2])])
        staged = self.staged(target.text)
        builds: dict[str, Build] = {}
        findings: list[Finding] = []
        for old, (build, parsed, names) in wanted.items():
            name, version = self._choose(names, parsed, build, target, policies, staged)
            if name is None or version is None:
                findings += self._missing(old, build, parsed, names, target, policies)
                if parsed.role in (naming.TOOL, naming.PIN):
                    builds[old] = build
                continue
            already = builds.get(name)
            held = self.hold_all or build.held or bool(already and already.held)
            auto = build.auto and (already is None or already.auto)
            builds[name] = Build(name, version, build.arch, held=held, auto=auto)
        return self._finish(builds, installed, target.text, flavour, findings, self.may_release)

    def _choose(
        self,
        names: Iterable[str],
        parsed: naming.DriverPackage,
        build: Build,
        target: DriverVersion,
        policies: dict[str, apt_text.Policy],
        staged: Staged,
    ) -> tuple[str | None, str | None]:
        """The first name that exists at the target, from the same packager as before where there is a choice."""
        for name in names:
            policy = policies.get(name)
            offered = [v for v, sources in policy.versions.items() if sources] if policy else []
            if parsed.kernel:
                fitting = [v for v in offered if self._depends_on(name, v, target)]
            elif parsed.role == naming.PIN:
                fitting = offered
            else:
                saved = [file.version for file in staged.files if file.name == name]
                fitting = [v for v in [*offered, *saved] if of_package(v) == target]
            if fitting:
                origin = naming.deb_origin(build.version)
                return name, next((v for v in fitting if naming.deb_origin(v) == origin), fitting[0])
        return None, None

    def _depends_on(self, name: str, version: str, target: DriverVersion) -> bool:
        """Whether a pre-built kernel module package is for ``target``; its own version is the kernel's.

        The meta-package of a kernel flavour depends on the one of the kernel, which depends on the driver.
        """
        records = self._show([(name, version)])
        depends = " ".join(record.get("Depends", "") for record in records)
        if target.text in depends:
            return True
        inner = [part.split()[0] for part in depends.split(",") if part.strip().startswith("linux-modules-nvidia-")]
        return any(target.text in record.get("Depends", "") for n in inner for record in self._show([(n, None)]))

    def _missing(
        self,
        old: str,
        build: Build,
        parsed: naming.DriverPackage,
        names: tuple[str, ...],
        target: DriverVersion,
        policies: dict[str, apt_text.Policy],
    ) -> list[Finding]:
        seen = {name: list(policies[name].versions) for name in names if name in policies}
        evidence = {"package": old, "looked_for": list(names), "versions": seen}
        if parsed.role in (naming.TOOL, naming.PIN):
            return [warning("drivers.stays", f"{old} has no build for {target} and stays at {build.version}", evidence)]
        other = next((n for n in names if n in policies and policies[n].candidate), None)
        hint = f"; the repository offers {other} {policies[other].candidate}" if other else ""
        if other and naming.is_transitional(other.partition(":")[0], policies[other].candidate or "", ""):
            hint += ", which only leads to another branch"
        if parsed.role in naming.NEEDED:
            return [
                error(
                    "drivers.not_available",
                    f"{' or '.join(names)} is not available at {target}{hint}",
                    evidence,
                    f"apt-get update; apt-cache policy {names[0]}; or choose a version the repository has",
                )
            ]
        return [warning("drivers.dropped", f"{old} has no counterpart at {target} and is removed{hint}", evidence)]

    def _finish(
        self,
        builds: dict[str, Build],
        installed: Installed,
        target: str,
        flavour: str,
        findings: list[Finding],
        may_release: Callable[[str], bool],
    ) -> PackagePlan:
        """Complete a plan: what goes, which holds stand in the way, what is downloaded."""
        now = installed.builds()
        whole = {p.name for p in installed.packages if p.state == "installed"}
        changing = {n: b for n, b in builds.items() if now.get(n) != b.version or n not in whole}
        remove = tuple(sorted(name for name in now if name not in builds))
        marks = {n for n, b in builds.items() if b.held != (n in installed.holds)}
        held = tuple(n for n in installed.holds if n in changing or n in remove)
        refused = [name for name in held if not may_release(name)]
        if refused:
            findings.append(
                error(
                    "drivers.held",
                    f"held packages would have to move: {', '.join(refused)}",
                    {"held": refused},
                    "apt-mark unhold them, or name them in gpu_release_holds",
                )
            )
        if not changing and not remove and not marks:
            return PackagePlan(APT, target, flavour, findings=tuple(findings))
        records = {
            (record.get("Package", ""), record.get("Version", "")): record
            for record in self._show([(n, b.version) for n, b in changing.items()])
        }
        sized = []
        builds_module = False
        for name, build in sorted(builds.items()):
            record = records.get((name.partition(":")[0], build.version), {})
            sized.append(
                Build(name, build.version, build.arch, int(record.get("Size", "0") or 0), build.held, build.auto)
            )
            builds_module |= bool(re.search(r"(^|[ ,])dkms\b", record.get("Depends", "")))
            findings += _meta_findings(name, build.version, record)
        return PackagePlan(
            APT,
            target,
            flavour,
            install=tuple(sized),
            remove=remove,
            unhold=held,
            builds_module=builds_module,
            findings=tuple(findings),
        )

    def restore(self, snapshot: Snapshot, installed: Installed) -> PackagePlan:
        builds = {build.name: build for build in snapshot.builds}
        now = installed.builds()
        absent = [b for b in self.unobtainable(snapshot) if now.get(b.name) != b.version]
        findings = [self._unobtainable_finding(absent)] if absent else []
        return self._finish(builds, installed, snapshot.version, snapshot.flavour, findings, lambda name: True)

    def unobtainable(self, snapshot: Snapshot) -> list[Build]:
        policies = self._policies(build.name for build in snapshot.builds)
        staged = self.staged(snapshot.version)
        return [
            build
            for build in snapshot.builds
            if not (build.name in policies and policies[build.name].versions.get(build.version))
            and staged.find(build.name, build.version) is None
            and not self._cached(build).is_file()
        ]

    def obtainable(self, snapshot: Snapshot) -> list[Finding]:
        absent = self.unobtainable(snapshot)
        return [self._unobtainable_finding(absent)] if absent else []

    def _unobtainable_finding(self, absent: Sequence[Build]) -> Finding:
        return error(
            "drivers.rollback_unavailable",
            "no repository has the builds of the way back any more, and they were not saved: "
            + ", ".join(f"{build.name}={build.version}" for build in absent),
            {"packages": {build.name: build.version for build in absent}},
            "put these .debs into /var/cache/apt/archives, or set rollback_required to false to go without a way back",
        )

    # proving

    def check(self, plan: PackagePlan, recovering: bool = False) -> list[Finding]:
        if plan.empty or plan.refused:
            return []
        done = self._simulate(plan, ["--fix-broken"] if recovering else [])
        if not done.ok:
            pairs = apt_text.blocking(done.stdout + done.stderr)
            why = "; ".join(pairs) if pairs else done.describe()
            return [
                error(
                    "drivers.transaction",
                    f"apt cannot do it in one transaction: {why}",
                    {"pairs": pairs},
                    " ".join(done.argv),
                )
            ]
        ours = {build.name for build in plan.install} | set(plan.remove)
        changes = apt_text.simulation(done.stdout)
        found = []
        lost = sorted(change.name for change in changes if change.new is None and change.name not in ours)
        if recovering:  # dpkg has not merged what it did into the file that apt reads, so apt sees old parts of the set
            lost = [name for name in lost if naming.parse_deb(name.partition(":")[0]) is None]
        if lost:
            found.append(
                error(
                    "drivers.collateral",
                    f"apt would also remove {', '.join(lost)}",
                    {"packages": lost},
                    "see who depends on what: apt-cache rdepends --installed <package>",
                )
            )
        kernels = sorted(c.name for c in changes if c.new and c.name.startswith("linux-image-"))
        if kernels:
            found.append(
                error(
                    "drivers.kernel_moves",
                    f"a new kernel would come along: {', '.join(kernels)}",
                    {"packages": kernels},
                    "upgrade the kernel first, or hold it",
                )
            )
        moved = sorted(c.name for c in changes if c.old and c.new and c.name not in ours and c.name not in kernels)
        if moved:
            found.append(
                warning("drivers.also_upgraded", f"apt would also change {', '.join(moved)}", {"packages": moved})
            )
        return found

    def _simulate(self, plan: PackagePlan, options: Sequence[str] = ()) -> Completed:
        options = ["--simulate", *options, *(["--allow-change-held-packages"] if plan.unhold else [])]
        argv = tuple(self._install(plan, options))
        if argv not in self._simulated:
            self._simulated[argv] = self.run(argv, timeout=QUERY_SECONDS, env=_ENV)
        return self._simulated[argv]

    def _install(self, plan: PackagePlan, options: Sequence[str], offline: bool = False) -> list[str]:
        directory, staged = self.directory(plan.target), self.staged(plan.target)
        policies = self._policies(build.name for build in plan.install)
        arguments = []
        for build in plan.install:
            policy = policies.get(build.name)
            file = staged.find(build.name, build.version)
            if policy and policy.versions.get(build.version) is not None and policy.versions[build.version]:
                arguments.append(f"{build.name}={build.version}")
            elif file is not None:
                arguments.append(str(directory / file.file))
            elif policy and policy.installed == build.version:
                arguments.append(f"{build.name}={build.version}")
            else:
                raise SourceError(
                    f"{build.name}={build.version} is neither in a repository nor in {directory}; stage it first"
                )
        if offline:
            options = [
                *options,
                "--no-download",
                "-o",
                f"Dir::Cache::archives={directory}/",
                "-o",
                "APT::Keep-Downloaded-Packages=true",
            ]
        return [
            "apt-get",
            "--yes",
            "--allow-downgrades",
            "--no-install-recommends",
            "-o",
            "Dpkg::Options::=--force-confdef",
            "-o",
            "Dpkg::Options::=--force-confold",
            "-o",
            f"DPkg::Lock::Timeout={self.lock_timeout:.0f}",
            *options,
            "install",
            *arguments,
            *[f"{name}-" for name in plan.remove],
        ]

    # staging

    def update(self) -> Finding | None:
        """Refresh the package lists; what failed is a warning, since yesterday's lists may do."""
        self._changing()
        done = self.run(
            ["apt-get", "-o", f"DPkg::Lock::Timeout={self.lock_timeout:.0f}", "update"], timeout=600.0, env=_ENV
        )
        if done.ok:
            return None
        return warning(
            "drivers.lists", f"the package lists could not be refreshed: {done.describe()}", {}, "apt-get update"
        )

    def stage(self, plan: PackagePlan) -> Staged:
        done = self._simulate(plan)
        if not done.ok:
            done = self._simulate(plan, ["--fix-broken"])
        if not done.ok:
            raise SourceError(f"apt refuses the transaction: {done.describe()}")
        incoming = {
            change.name: Build(change.name, change.new, change.arch)
            for change in apt_text.simulation(done.stdout)
            if change.new
        }
        return self._fetch(list(incoming.values()), plan.target)

    def save_builds(self, snapshot: Snapshot) -> tuple[Staged, list[Finding]]:
        absent = self.unobtainable(snapshot)
        builds = [build for build in snapshot.builds if build not in absent]
        staged = self._fetch(builds, snapshot.version)
        return staged, [self._unobtainable_finding(absent)] if absent else []

    def _fetch(self, builds: Sequence[Build], version: str) -> Staged:
        """Have ``builds`` staged under ``version``, beside what is there already, each proven by its checksum."""
        directory, before = self.directory(version), self.staged(version)
        lacking = [build for build in builds if before.find(build.name, build.version) is None]
        if not lacking:
            return before
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        policies = self._policies(build.name for build in lacking)
        remote = []
        for build in lacking:
            (directory / _file_name(build)).unlink(missing_ok=True)
            policy = policies.get(build.name)
            if policy and policy.versions.get(build.version):
                remote.append(build)
            else:
                shutil.copy2(self._cached(build), directory / _file_name(build))
        if remote:
            names = [f"{build.name}={build.version}" for build in remote]
            argv = ["env", "-C", str(directory), "apt-get", "download", *names]
            done = self.run(argv, timeout=_DOWNLOAD_SECONDS, env=_ENV)
            if not done.ok:
                raise SourceError(f"{done.describe()}; nothing was installed. Check the repository, then stage again")
        sums = {
            (r.get("Package"), r.get("Version")): r.get("SHA256", "")
            for r in self._show([(build.name, build.version) for build in remote])
        }
        files = list(before.files)
        for build in lacking:
            path = directory / _file_name(build)
            if not path.is_file():
                raise SourceError(f"apt-get download did not leave {path}")
            digest = sha256(path)
            expected = sums.get((build.name.partition(":")[0], build.version))
            if expected and expected != digest:
                path.unlink()
                raise SourceError(f"{path.name} has SHA-256 {digest}, the repository says {expected}; stage again")
            files.append(StagedFile(build.name, build.version, path.name, digest, path.stat().st_size))
        return self.keep(version, files)

    def _cached(self, build: Build) -> Path:
        return self.root / "var/cache/apt/archives" / _file_name(build)

    # changing

    def apply(self, plan: PackagePlan, timeout: float, recovering: bool = False) -> None:
        options = ["--fix-broken"] if recovering else []
        argv = self._install(plan, options, offline=True)
        self._changing()
        if plan.unhold:
            self._mark("unhold", plan.unhold)
        done = self.run(argv, timeout=timeout, env=_ENV)
        if not done.ok:
            self._mark_installed("hold", plan.unhold)
            raise SourceError(self._why(done, plan))
        reached = self.detect()
        automatic, held = set(reached.automatic), set(reached.holds)
        self._mark("auto", [build.name for build in plan.install if build.auto and build.name not in automatic])
        self._mark("manual", [build.name for build in plan.install if not build.auto and build.name in automatic])
        self._mark("unhold", [build.name for build in plan.install if not build.held and build.name in held])
        self._mark("hold", [name for name in plan.hold if name not in held])

    def _mark(self, verb: str, names: Sequence[str]) -> None:
        if names:
            done = self.run(["apt-mark", verb, *names], timeout=QUERY_SECONDS)
            if not done.ok:
                raise SourceError(done.describe())

    def _mark_installed(self, verb: str, names: Sequence[str]) -> None:
        there = {package.name for package in self.detect().packages}
        self._mark(verb, [name for name in names if name in there])

    def _why(self, done: Completed, plan: PackagePlan) -> str:
        text = done.stdout + done.stderr
        if _DKMS_FAILED in text:
            cause = next((c for c in map(apt_text.make_log_cause, self._make_logs(plan.target)) if c), None)
            return f"DKMS could not build {plan.target}" + (f": {cause}" if cause else "; its make.log names no cause")
        pairs = apt_text.blocking(text)
        detail = "; ".join([*apt_text.errors(text)[:3], *pairs[:5]]) or done.describe()
        return f"apt could not move the packages to {plan.target}: {detail}"

    def _make_logs(self, version: str) -> list[str]:
        tree = self.root / "var/lib/dkms"
        return [read_text(tree / module / version / "build/make.log") for module in ("nvidia", "nvidia-srv")]

    def recover(self, timeout: float) -> None:
        self._changing()
        holder = self.busy()
        if holder:
            raise SourceError(
                f"{holder} still holds dpkg's lock after {self.lock_timeout:.0f} s; see ps and wait for it"
            )
        self.run(["dpkg", "--configure", "-a", "--force-confdef", "--force-confold"], timeout=timeout, env=_ENV)

    def busy(self) -> str | None:
        return wait_for_locks([self.root / lock for lock in _LOCKS], self.lock_timeout, self.sleep)

    # asking

    def _query(self, argv: Sequence[str]) -> str:
        done = self.run(argv, timeout=QUERY_SECONDS)
        if not done.ok:
            raise SourceError(done.describe())
        return done.stdout

    def _policies(self, names: Iterable[str]) -> dict[str, apt_text.Policy]:
        """What apt knows of ``names``. Asked once a name, since each time apt reads all its lists."""
        wanted = sorted(set(names))
        new = [name for name in wanted if name not in self._asked]
        if new:
            answer = apt_text.policies(self._query(["apt-cache", "policy", *new]))
            self._asked.update({name: answer.get(name) for name in new})
        return {name: policy for name in wanted if (policy := self._asked[name])}

    def _changing(self) -> None:
        """What apt has said so far may be over."""
        self._asked.clear()
        self._simulated.clear()

    def _show(self, builds: Sequence[tuple[str, str | None]]) -> list[dict[str, str]]:
        if not builds:
            return []
        names = [f"{name}={version}" if version else name for name, version in builds]
        return apt_text.stanzas(self.run(["apt-cache", "show", *names], timeout=QUERY_SECONDS).stdout)


def _concerns(pattern: str, names: Iterable[str]) -> bool:
    """Whether a pin's package pattern is about the driver; the one that is about everything is not."""
    return pattern != "*" and ("nvidia" in pattern or any(fnmatch(name, pattern) for name in names))


def _versions(package_versions: Iterable[str]) -> tuple[str, ...]:
    """The distinct driver versions in ``package_versions``, highest first."""
    found = {version for version in map(of_package, package_versions) if version}
    return tuple(version.text for version in sorted(found, reverse=True))


def _main_version(installed: Installed) -> str:
    """The version a set is known by: that of its kernel modules, or else of its compute library."""
    for role in (naming.KERNEL, naming.COMMON, naming.COMPUTE):
        for package in installed.packages:
            parsed = naming.parse_deb(package.name.partition(":")[0])
            inside = of_package(package.version)
            if parsed and parsed.role == role and inside:
                return inside.text
    return installed.versions[0] if installed.versions else "none"


def _meta_findings(name: str, version: str, record: dict[str, str]) -> list[Finding]:
    """A package that leads elsewhere, or a meta-package that brings no driver, must not be what we install."""
    bare = name.partition(":")[0]
    parsed = naming.parse_deb(bare)
    if not record or parsed is None:
        return []
    description = record.get("Description", record.get("Description-en", ""))
    if naming.is_transitional(bare, version, description):
        return [
            error(
                "drivers.transitional",
                f"{name}={version} is a transitional package: {description!r}",
                {"package": name, "version": version},
                "choose a version of the branch itself",
            )
        ]
    depends = record.get("Depends", "") + record.get("Pre-Depends", "")
    if parsed.role == naming.META and not any(word in depends for word in ("nvidia", "libcuda")):
        return [
            error(
                "drivers.empty_meta",
                f"{name}={version} depends on no driver package",
                {"package": name, "depends": depends},
                "use flavour open: nvidia-open replaces cuda-drivers",
            )
        ]
    return []


def _file_name(build: Build) -> str:
    return f"{build.name.partition(':')[0]}_{build.version.replace(':', '%3a')}_{build.arch}.deb"
