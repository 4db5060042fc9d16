# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The driver on SUSE: detected and judged, not moved.

The signed kernel module comes from SUSE and the libraries from NVIDIA, each at its own pace; a plan names the commands
that move both to one version, and refuses to run them.

Private to this collection: may change in any release.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from ansible_collections.gpufleet.driver.plugins.module_utils.drivers import naming, rpm_text
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.base import (
    QUERY_SECONDS,
    ZYPPER,
    Build,
    DriverSource,
    Installed,
    PackagePlan,
    Snapshot,
    SourceError,
    Staged,
    error,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.dnf import rpm_installed
from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Runner
from ansible_collections.gpufleet.driver.plugins.module_utils.execution import run as execute
from ansible_collections.gpufleet.driver.plugins.module_utils.findings import Finding
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import STATE_DIR
from ansible_collections.gpufleet.driver.plugins.module_utils.version import DriverVersion, of_package


class Zypper(DriverSource):
    """Reads what zypper offers; every method that would change something raises :class:`SourceError`."""

    name = ZYPPER

    def __init__(self, run: Runner = execute, root: str = "/", state_dir: str = STATE_DIR, **options: Any) -> None:
        super().__init__(run, root, state_dir, **options)

    def detect(self) -> Installed:
        return rpm_installed(self.run, ZYPPER)

    def snapshot(self, installed: Installed) -> Snapshot:
        builds = tuple(Build(p.name, p.version, p.arch) for p in installed.packages)
        version = installed.versions[0] if installed.versions else "none"
        return Snapshot(ZYPPER, version, installed.flavour or naming.OPEN, builds)

    def plan(self, base: Snapshot, installed: Installed, target: DriverVersion, flavour: str) -> PackagePlan:
        names = [build.name for build in base.builds]
        if installed.version == target.text:
            return PackagePlan(ZYPPER, target.text, flavour)
        offered = self._offered(names)
        here = sorted(
            name for name, versions in offered.items() if not any(_at(version, target) for version in versions)
        )
        best = rpm_text.common_version({name: versions for name, versions in offered.items() if versions})
        spec = " ".join(self._spec(name, versions, target) for name, versions in offered.items())
        if not names or here:
            reason = f"not every package is offered at {target}: {', '.join(here) or 'none is installed'}" + (
                f"; the highest version that all of them have is {best}" if best else ""
            )
        else:
            reason = "this release plans SUSE's packages but does not move them"
        finding = error(
            "drivers.zypper",
            reason,
            {"offered": {name: list(v) for name, v in offered.items()}},
            f"zypper install --oldpackage {spec} && zypper addlock {' '.join(names)}" if names and not here else None,
        )
        return PackagePlan(ZYPPER, target.text, flavour, findings=(finding,))

    def _offered(self, names: Sequence[str]) -> dict[str, list[str]]:
        if not names:
            return {}
        done = self.run(["zypper", "--non-interactive", "search", "-s", "-x", *names], timeout=QUERY_SECONDS)
        found: dict[str, list[str]] = {name: [] for name in names}
        for offer in rpm_text.zypper_offers(done.stdout):
            found.setdefault(offer.name, []).append(offer.version)
        return found

    def _spec(self, name: str, versions: Sequence[str], target: DriverVersion) -> str:
        return f"{name}={next((v for v in versions if _at(v, target)), target.text)}"

    def obtainable(self, snapshot: Snapshot) -> list[Finding]:
        return []

    def check(self, plan: PackagePlan, recovering: bool = False) -> list[Finding]:
        return []

    def restore(self, snapshot: Snapshot, installed: Installed) -> PackagePlan:
        _refuse()

    def stage(self, plan: PackagePlan) -> Staged:
        _refuse()

    def save_builds(self, snapshot: Snapshot) -> tuple[Staged, list[Finding]]:
        _refuse()

    def apply(self, plan: PackagePlan, timeout: float, recovering: bool = False) -> None:
        _refuse()

    def recover(self, timeout: float) -> None:
        _refuse()


def _at(version: str, target: DriverVersion) -> bool:
    return of_package(naming.strip_kernel(version)) == target


def _refuse() -> NoReturn:
    raise SourceError(
        "this release does not change the driver of a SUSE system; driver_preflight names the zypper commands that do"
    )
