# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stage a driver, put it in place, or put the previous one back: the order of acts, whatever the source is.

Nothing here knows a package manager. The journal is told before each change, and a run that was killed in the middle
is gone on with by running the same thing again.

Private to this collection: may change in any release.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils.drivers import naming
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.base import (
    DriverSource,
    Installed,
    PackagePlan,
    Snapshot,
    SourceError,
    Staged,
    Verdict,
    disk_module_version,
    error,
    read_manifest,
    staging_directory,
    verify,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Runner
from ansible_collections.gpufleet.driver.plugins.module_utils.findings import Finding, errors, summary
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import PACKAGES, Journal
from ansible_collections.gpufleet.driver.plugins.module_utils.version import DriverVersion, find

AUTO = "auto"


@dataclass(frozen=True)
class Node:
    """What these acts need of a node besides its driver source; paths are parameters for tests."""

    run: Runner
    kernel: str
    state_dir: str
    sys: Path = Path("/sys")

    def loaded(self) -> str | None:
        """The version of the loaded nvidia module, ``unknown`` if it does not say, None if it is not loaded."""
        directory = self.sys / "module/nvidia"
        if not directory.is_dir():
            return None
        try:
            version = find((directory / "version").read_text())
        except OSError:
            return "unknown"
        return version.text if version else "unknown"


@dataclass(frozen=True)
class Result:
    """What was done, or would be in check mode. ``before`` and ``after`` map package names to exact versions."""

    changed: bool
    target: str
    before: dict[str, str]
    after: dict[str, str]
    disk_module: str | None = None
    reboot_reasons: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    message: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "changed": self.changed,
            "version": self.target,
            "before": self.before,
            "after": self.after,
            "disk_module_version": self.disk_module,
            "reboot_required": bool(self.reboot_reasons),
            "reboot_reasons": list(self.reboot_reasons),
            "findings": [finding.as_dict() for finding in self.findings],
            **({"msg": self.message} if self.message else {}),
        }

    def diff(self) -> dict[str, str]:
        """The package lists before and after, one ``name version`` a line."""
        before, after = ("".join(f"{n} {v}\n" for n, v in sorted(m.items())) for m in (self.before, self.after))
        return {"before_header": "packages", "after_header": "packages", "before": before, "after": after}


@dataclass(frozen=True)
class StageResult:
    """What lies ready on the node: the target's files, and the files to go back with."""

    changed: bool
    plan: PackagePlan
    target: Staged
    rollback: Staged
    findings: tuple[Finding, ...] = field(default_factory=tuple)


class Refused(Exception):
    """The node is left as it was; the findings say why."""

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__(summary(findings))
        self.findings = findings


def flavour_for(asked: str, installed: Installed) -> str:
    """The flavour to install: what was asked for, or else what is there."""
    return (installed.flavour or naming.OPEN) if asked == AUTO else asked


def base_for(source: DriverSource, journal: Journal, installed: Installed) -> Snapshot:
    """What the target set is derived from: the remembered set while our own transaction is unfinished, else today's."""
    remembered = journal.before(PACKAGES)
    if remembered is not None and journal.interrupted:
        return Snapshot.from_dict(remembered)
    return source.snapshot(installed)


def way_back(journal: Journal, base: Snapshot) -> Snapshot:
    """What a rollback puts back: in a run that is gone on with, what was there before it changed anything, also if it
    has reached another driver since; else ``base``."""
    remembered = journal.before(PACKAGES)
    return Snapshot.from_dict(remembered) if remembered is not None and journal.goes_on else base


def stage(
    source: DriverSource,
    journal: Journal,
    target: DriverVersion,
    flavour: str,
    rollback_required: bool,
    check_mode: bool,
) -> StageResult:
    """Fetch the target's files and save today's, so that neither way needs a repository later.

    :raises Refused: if there is no whole target set, or no way back and one is required.
    :raises SourceError: if a download fails.
    """
    installed = source.detect()
    base = base_for(source, journal, installed)
    plan = source.plan(base, installed, target, flavour_for(flavour, installed))
    findings = list(plan.findings) + source.check(plan, journal.interrupted)
    former = way_back(journal, base)
    lost = source.obtainable(former)
    findings += lost if rollback_required else [replace(finding, level="warning") for finding in lost]
    if errors(findings):
        raise Refused(findings)
    if plan.empty:
        return StageResult(False, plan, Staged(""), Staged(""), tuple(findings))
    directory = staging_directory(source.state_dir, target.text)
    back = staging_directory(source.state_dir, former.version)
    if check_mode:
        ready, saved = read_manifest(directory), read_manifest(back)
        missing = any(
            staged.find(build.name, build.version) is None
            for staged, builds in ((ready, plan.install), (saved, former.builds))
            for build in builds
        )
        return StageResult(missing, plan, ready, saved, tuple(findings))
    rollback, unsaved = source.save_builds(former)
    files = source.stage(plan)
    findings += [replace(finding, level="warning") for finding in unsaved if finding not in lost]
    return StageResult(files.changed or rollback.changed, plan, files, rollback, tuple(findings))


@dataclass(frozen=True)
class Change:
    """A change of packages that was found possible; nothing was changed yet. ``to`` is the version it leads to, empty
    where there is nothing to go back to.

    ``base`` is what the way back leads to, None if there is nothing to change. ``recovering`` accepts a package
    database left half-way.
    """

    to: str
    installed: Installed
    disk_module: str | None
    plan: PackagePlan
    base: Snapshot | None = None
    recovering: bool = False
    findings: tuple[Finding, ...] = ()
    message: str = ""

    @property
    def needed(self) -> bool:
        return self.base is not None


def bring(
    source: DriverSource,
    journal: Journal,
    node: Node,
    target: DriverVersion | None,
    flavour: str,
    now: Callable[[], float],
    *,
    loaded_allowed: bool = False,
    rollback_required: bool = True,
    timeout: float = 1800.0,
    check_mode: bool = False,
) -> Result:
    """Bring the node to ``target``, or back to what it was where ``target`` is None.

    :raises Refused: before anything is changed.
    :raises SourceError: if the transaction failed, or left something other than one whole driver.
    """
    change = prepare(
        source, journal, node, target, flavour, rollback_required=rollback_required, loaded_allowed=loaded_allowed
    )
    if not check_mode:
        change = fetch(source, change)
    return carry_out(
        source, journal, node, change, now, loaded_allowed=loaded_allowed, timeout=timeout, check_mode=check_mode
    )


def prepare(
    source: DriverSource,
    journal: Journal,
    node: Node,
    target: DriverVersion | None,
    flavour: str,
    *,
    rollback_required: bool = True,
    loaded_allowed: bool = True,
) -> Change:
    """Work out how to bring the whole set to ``target``, or where that is None, exactly the builds, holds and streams
    back that the journal remembers. Changes nothing.

    :raises Refused: if it cannot be done.
    """
    if target is None:
        change = _back(source, journal, node)
    else:
        change = _forward(source, journal, node, target, flavour, rollback_required)
    findings = list(change.findings)
    loaded = node.loaded()
    if change.needed and not loaded_allowed and not change.plan.empty and loaded not in (None, change.to):
        findings.append(_loaded_finding(loaded))
    if change.needed and errors(findings):
        raise Refused(findings)
    return change


def _forward(
    source: DriverSource, journal: Journal, node: Node, target: DriverVersion, flavour: str, rollback_required: bool
) -> Change:
    installed = source.detect()
    unfinished = journal.interrupted
    base = base_for(source, journal, installed)
    plan = source.plan(base, installed, target, flavour_for(flavour, installed))
    disk = disk_module_version(node.run, node.kernel)
    there = plan.empty and not plan.refused and not verify(installed, disk, target.text, node.kernel).findings
    if there and not unfinished:
        return Change(target.text, installed, disk, plan, findings=plan.findings)
    findings = list(plan.findings)
    former = way_back(journal, base)
    if not unfinished:
        findings += [p for p in installed.problems if p.level == "error"] + source.check(plan)
        if rollback_required:
            findings += source.obtainable(former)
    return Change(target.text, installed, disk, plan, former, unfinished, tuple(findings))


def _back(source: DriverSource, journal: Journal, node: Node) -> Change:
    installed = source.detect()
    disk = disk_module_version(node.run, node.kernel)
    remembered = journal.before(PACKAGES)
    if remembered is None:
        text = "the journal remembers no change of packages on this node, so there is nothing to put back"
        return Change("", installed, disk, PackagePlan(source.name, "", ""), message=text)
    snapshot = Snapshot.from_dict(remembered)
    plan = source.restore(snapshot, installed)
    broken = [problem for problem in installed.problems if problem.check == "drivers.package_state"]
    if plan.empty and not plan.refused and not broken and not journal.interrupted:
        return Change(snapshot.version, installed, disk, plan, findings=plan.findings)
    return Change(snapshot.version, installed, disk, plan, snapshot, True, plan.findings)


def fetch(source: DriverSource, change: Change) -> Change:
    """Have the files on the node that ``change`` needs, and those for the way back; nothing to do after :func:`stage`.

    What a transaction was interrupted in, or what a node goes back to, is fetched once its database is mended.
    """
    if change.base is None or change.recovering:
        return change
    dummy, unsaved = source.save_builds(change.base)
    source.stage(change.plan)
    return replace(change, findings=(*change.findings, *(replace(finding, level="warning") for finding in unsaved)))


def carry_out(
    source: DriverSource,
    journal: Journal,
    node: Node,
    change: Change,
    now: Callable[[], float],
    *,
    loaded_allowed: bool = False,
    timeout: float = 1800.0,
    check_mode: bool = False,
) -> Result:
    """Do what was prepared. Raises as :func:`bring` does."""
    before = change.installed.builds()
    if change.base is None:
        target = change.to or change.installed.version or ""
        found = change.findings
        return Result(False, target, before, before, change.disk_module, findings=found, message=change.message)
    loaded = node.loaded()
    if loaded not in (None, change.to) and not loaded_allowed and not change.plan.empty:
        raise Refused([*change.findings, _loaded_finding(loaded)])
    if check_mode:
        after, reasons = _after(change.installed, change.plan), _reboot_reasons(loaded, change.to)
        return Result(True, change.to, before, after, change.disk_module, reasons, change.findings)
    if not journal.unfinished and not change.recovering:
        journal.forget(PACKAGES)
    journal.remember(PACKAGES, change.base.as_dict())
    return _transact(source, journal, node, change, change.base, now, timeout)


def _transact(
    source: DriverSource,
    journal: Journal,
    node: Node,
    change: Change,
    base: Snapshot,
    now: Callable[[], float],
    timeout: float,
) -> Result:
    """The change itself: automatic upgrades stand still, the step is in the journal, the end state is judged."""
    plan = change.plan
    reasons = _reboot_reasons(node.loaded(), change.to)
    journal.start(PACKAGES, now())
    try:
        source.pause_automatic(base.timers)
        if change.recovering:
            source.recover(timeout)
            source.stage(plan)
        if not plan.empty:
            source.apply(plan, timeout, change.recovering)
        reached = source.detect()
        verdict = _judge(node, reached, plan, base)
        if verdict.findings:
            raise SourceError(summary(verdict.findings))
    except SourceError as exc:
        journal.end(PACKAGES, now(), "failed", reason=str(exc))
        raise
    finally:
        source.resume_automatic(base.timers)
    journal.end(PACKAGES, now(), version=plan.target)
    before, after = change.installed.builds(), reached.builds()
    return Result(True, plan.target, before, after, verdict.disk_module, reasons, change.findings)


def _judge(node: Node, reached: Installed, plan: PackagePlan, base: Snapshot) -> Verdict:
    """A set that was mixed before may come back mixed; anything else has to be one whole driver."""
    disk = disk_module_version(node.run, node.kernel)
    if plan.target == base.version and reached.builds() == base.map() and len(reached.versions) > 1:
        return Verdict(disk, tuple(p for p in reached.problems if p.check == "drivers.package_state"))
    return verify(reached, disk, plan.target, node.kernel)


def _after(installed: Installed, plan: PackagePlan) -> dict[str, str]:
    kept = {name: version for name, version in installed.builds().items() if name not in plan.remove}
    return {**kept, **{build.name: build.version for build in plan.install}}


def _loaded_finding(loaded: str | None) -> Finding:
    return error(
        "drivers.loaded",
        f"the nvidia module ({loaded}) is loaded; with new libraries under it NVML fails until it is reloaded",
        {"loaded": loaded},
        "unload it first (gpufleet.driver.kernel_modules), or set loaded to allow and reboot",
    )


def _reboot_reasons(loaded: str | None, target: str) -> tuple[str, ...]:
    if loaded is None or loaded == target:
        return ()
    return (f"nvidia {loaded} stays loaded until it is unloaded or the node reboots into {target}",)
