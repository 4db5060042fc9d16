# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Bring the driver's modules to a state, with the census before and the journal beside it.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable

from ansible_collections.gpufleet.driver.plugins.module_utils.findings import ERROR, WARNING, Finding
from ansible_collections.gpufleet.driver.plugins.module_utils.host import kernel_modules
from ansible_collections.gpufleet.driver.plugins.module_utils.host.holders import Census, Holder
from ansible_collections.gpufleet.driver.plugins.module_utils.host.kernel_modules import (
    REQUIRED,
    Action,
    KernelModules,
    Module,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import UNLOAD, Journal

KIND = "modules"
"""What the journal keeps under this name: the modules that were loaded before, in the order to load them."""

LOAD = "load modules"
"""Step in the journal."""


@dataclass
class Result:
    """``error`` is None if the state was reached; else one message with what holds the driver and what to do."""

    before: Mapping[str, Module]
    after: Mapping[str, Module]
    changed: bool = False
    actions: Sequence[Action] = ()
    blocked_by: Sequence[Holder] = ()
    findings: list[Finding] = field(default_factory=list)
    reboot_required: bool = False
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "changed": self.changed,
            "before": [module.as_dict() for module in self.before.values()],
            "after": [module.as_dict() for module in self.after.values()],
            "actions": [action.as_dict() for action in self.actions],
            "blocked_by": [holder.as_dict() for holder in self.blocked_by],
            "findings": [finding.as_dict() for finding in self.findings],
            "reboot_required": self.reboot_required,
            "diff": {"before": _listing(self.before), "after": _listing(self.after)},
        }


def _listing(modules: Mapping[str, Module]) -> str:
    return "".join(f"{module.name} {module.version or ''}".rstrip() + "\n" for module in modules.values())


def unloaded(
    kernel: KernelModules,
    journal: Journal,
    census: Callable[[], Census],
    *,
    wait: float,
    check: bool = False,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
    now: Callable[[], float] = time.time,
) -> Result:
    """Unload the driver, if nothing holds it.

    A process that is just ending has ``wait`` seconds to be gone. With a holder left, nothing is touched at all: to
    take out what can be taken and put it back would disturb for nothing.
    """
    before = kernel.read()
    if not before:
        return Result(before, before)
    seen = census()
    end = clock() + wait
    while seen.processes and not seen.reboot_required and clock() < end:
        sleep(min(1.0, max(0.1, end - clock())))
        seen = census()
    if seen.blocked:
        return Result(
            before,
            before,
            blocked_by=seen.processes,
            findings=list(seen.findings),
            reboot_required=seen.reboot_required,
            error=_why_not(seen),
        )
    order = kernel_modules.unload_order(before)
    if check:
        planned = [Action("unload", name, ("rmmod", name), True) for name in order]
        return Result(before, {}, True, planned, findings=list(seen.findings))
    journal.remember(KIND, [before[name].as_dict() for name in reversed(order)])
    journal.start(UNLOAD, now())
    outcome = kernel.unload()
    journal.end(UNLOAD, now(), state="done" if outcome.ok else "failed")
    result = Result(
        before,
        kernel.read(),
        changed=bool(outcome.actions),
        actions=outcome.actions,
        findings=[*seen.findings, *outcome.findings],
        reboot_required=outcome.reboot_required,
    )
    if not outcome.ok:
        again = census()
        result.blocked_by = again.processes
        result.reboot_required = outcome.reboot_required or again.reboot_required
        result.findings += [finding for finding in again.findings if finding not in result.findings]
        result.error = _sentences([*outcome.findings, *again.findings], again.processes)
    return result


def foreseen(seen: Census, stopped: Collection[str]) -> list[Finding]:
    """Who would keep the driver from being unloaded, once the units ``stopped`` and MPS are down: for check mode, in
    which nothing is. Work may still be stopped by somebody before the real run, so these are warnings."""
    return [
        Finding(
            "modules.held",
            WARNING,
            f"{holder.title} has {', '.join(holder.devices) or 'the driver'} open; unless it has ended by then, the "
            f"driver will not be unloaded: {' '.join(holder.release.argv) or holder.release.advice}",
            holder.as_dict(),
            " ".join(holder.release.argv) or holder.release.advice,
        )
        for holder in seen.processes
        if holder.process and holder.process.owner.unit not in stopped and not holder.name.startswith("nvidia-cuda-mps")
    ]


def _why_not(seen: Census) -> str:
    return "The NVIDIA driver cannot be unloaded; nothing was touched. " + _sentences(seen.findings, seen.processes)


def _sentences(findings: Iterable[Finding], holders: Iterable[Holder]) -> str:
    told = {finding.evidence.get("pid") for finding in findings if finding.level == ERROR}
    parts = [
        f"{finding.message}; next: {finding.next}" for finding in findings if finding.level == ERROR and finding.next
    ]
    parts += [
        f"{holder.title} has {', '.join(holder.devices) or 'the driver'} open; next: "
        f"{' '.join(holder.release.argv) or holder.release.advice}"
        for holder in holders
        if holder.process and holder.process.pid not in told
    ]
    return ". ".join(parts) + "."


def loaded(
    kernel: KernelModules,
    journal: Journal,
    *,
    names: Sequence[str] = (),
    check: bool = False,
    now: Callable[[], float] = time.time,
) -> Result:
    """Load ``names``, or what the journal says was loaded before, or what CUDA needs at the least."""
    before = kernel.read()
    remembered = [str(module["name"]) for module in journal.before(KIND) or ()]
    wanted = list(names) or remembered or list(REQUIRED)
    missing = [name for name in wanted if name not in before]
    if not missing and not kernel.node_problems():
        _settle(journal)
        return Result(before, before)
    if check:
        planned = [Action("load", name, ("modprobe", name), True) for name in missing]
        return Result(before, {**before, **{name: Module(name, 0) for name in missing}}, True, planned)
    journal.start(LOAD, now())
    outcome = kernel.load(wanted)
    journal.end(LOAD, now(), state="done" if outcome.ok else "failed")
    after = kernel.read()
    result = Result(
        before,
        after,
        changed=any(action.ok for action in outcome.actions),
        actions=outcome.actions,
        findings=outcome.findings,
        reboot_required=outcome.reboot_required,
    )
    if outcome.ok:
        _settle(journal)
    else:
        result.error = "The NVIDIA driver is not usable. " + _sentences(outcome.findings, ())
    return result


def _settle(journal: Journal) -> None:
    """Forget what was loaded before once it is back, but not within a run: a roll-back wants the same set again."""
    if not journal.unfinished:
        journal.forget(KIND)
