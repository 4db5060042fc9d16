# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether a node can go to a version, and come back, judged before anything is disturbed.

Private to this collection: may change in any release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils.drivers import naming
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.base import (
    DriverSource,
    Installed,
    PackagePlan,
    Snapshot,
    disk_module_version,
    error,
    verify,
    warning,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.install import (
    Node,
    base_for,
    flavour_for,
    way_back,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.findings import OK, WARNING, Finding, errors
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import Journal, why_not_writable
from ansible_collections.gpufleet.driver.plugins.module_utils.version import DriverVersion, of_package


@dataclass(frozen=True)
class Preflight:
    """``already`` tells that packages, module on disk and loaded module are all at the target."""

    installed: Installed
    plan: PackagePlan
    already: bool
    findings: tuple[Finding, ...]

    @property
    def ready(self) -> bool:
        return not errors(self.findings)

    def as_dict(self) -> dict[str, Any]:
        return {
            "ready": self.ready,
            "already": self.already,
            "findings": [finding.as_dict() for finding in self.findings],
            "plan": self.plan.as_dict(),
            "download_bytes": self.plan.download_bytes,
            "installed": self.installed.as_dict(),
        }


def preflight(
    source: DriverSource,
    journal: Journal,
    node: Node,
    target: DriverVersion,
    flavour: str,
    rollback_required: bool,
    host: Callable[[PackagePlan], Iterable[Finding]],
) -> Preflight:
    """Everything that could stop ``target`` on this node. ``host`` adds what the machine itself has to say about a
    plan: kernels, headers, space, Secure Boot, GPUs.

    :raises SourceError: if the package manager cannot be asked.
    """
    installed = source.detect()
    base = base_for(source, journal, installed)
    plan = source.plan(base, installed, target, flavour_for(flavour, installed))
    disk = disk_module_version(node.run, node.kernel)
    whole = not verify(installed, disk, target.text, node.kernel).findings
    already = plan.empty and not plan.refused and whole and node.loaded() == target.text
    if already:
        return Preflight(installed, plan, True, plan.findings)
    findings = [_ours_to_mend(problem) if journal.interrupted else problem for problem in installed.problems]
    findings += [
        *plan.findings,
        *source.check(plan, journal.interrupted),
        *source.remarks(installed),
        *pairing(installed, base.version),
    ]
    findings += _way_back(source, way_back(journal, base), rollback_required) + _given_up(journal, base, target)
    findings += _state_dir(Path(source.state_dir))
    holder = source.busy()
    if holder:
        findings.append(
            error(
                "drivers.busy",
                f"{holder} still holds the package database after {source.lock_timeout:.0f} s",
                {"holder": holder},
                "wait for it to end, then run again",
            )
        )
    if base.timers:
        text = f"{', '.join(base.timers)} are active; they stand still while packages are changed and go on afterwards"
        findings.append(Finding("drivers.automatic_upgrades", OK, text, {"units": list(base.timers)}))
    findings += host(plan)
    return Preflight(installed, plan, False, tuple(findings))


def _ours_to_mend(problem: Finding) -> Finding:
    if problem.check != "drivers.package_state":
        return problem
    text = f"{problem.message}; an upgrade of this node was interrupted, and goes on by itself"
    return replace(problem, level=WARNING, message=text, next="run the upgrade again")


def _way_back(source: DriverSource, base: Snapshot, rollback_required: bool) -> list[Finding]:
    if base.version == "none":
        return []
    lost = source.obtainable(base)
    return lost if rollback_required else [replace(finding, level=WARNING) for finding in lost]


def _given_up(journal: Journal, base: Snapshot, target: DriverVersion) -> list[Finding]:
    """Of a run that was never concluded and is gone on with to another version: that it is, and where back leads."""
    run = journal.run
    if run is None or not journal.goes_on or run["target"] == target.text:
        return []
    back = way_back(journal, base).version
    text = f"the run {run['id']} to {run['target']} was never concluded and is given up; the way back leads to {back}"
    return [warning("node.given_up", text, {"run": run["id"], "target": run["target"], "back": back})]


def _state_dir(directory: Path) -> list[Finding]:
    why = why_not_writable(directory)
    if why is None:
        return []
    return [
        error(
            "node.state_dir",
            f"neither packages nor the journal can be kept in {directory}: {why}",
            {"state_dir": str(directory)},
            f"findmnt --target {directory}; lsattr -d {directory}; or set another state_dir",
        )
    ]


def pairing(installed: Installed, driver: str) -> list[Finding]:
    """Fabric Manager, IMEX and NSCQ have to be of exactly the driver's version, not only of its branch."""
    parse = naming.parse_deb if installed.source == "apt" else naming.parse_rpm
    found = []
    for package in installed.packages:
        parsed, inside = parse(package.name.partition(":")[0]), of_package(package.version)
        if parsed and parsed.role == naming.FABRIC and inside and inside.text != driver:
            found.append(
                warning(
                    "drivers.fabric_version",
                    f"{package.name} is {inside}, the driver is {driver}; it refuses to start with another version",
                    {"package": package.name, "version": package.version, "driver": driver},
                    "move both to one version in one transaction, as an upgrade with this collection does",
                )
            )
    return found
