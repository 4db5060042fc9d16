# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Settings of GPUs that a reload or a reboot loses: remembered before, put back after.

Persistence mode, compute mode, power limit and application clocks live in the driver's memory; MIG instances vanish
with it even where MIG mode stays. The ECC mode is kept by the GPU itself and is only watched. Clocks locked with
``nvidia-smi -lgc`` cannot be read from a driver, so they cannot be put back: a person is told what locks them on this
node. Module parameters belong to the packages; files in /etc/modprobe.d that name nvidia are compared by checksum.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils import execution
from ansible_collections.gpufleet.driver.plugins.module_utils.findings import ERROR, WARNING, Finding, summary
from ansible_collections.gpufleet.driver.plugins.module_utils.host import facts, gpus, health, nvml
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import Journal

SETTINGS, GPUS = "settings", "gpus"
STEP_SAVE, STEP_RESTORE = "gpu_settings_save", "gpu_settings_restore"
_KEPT = (
    "index",
    "pci",
    "name",
    "persistence",
    "compute_mode",
    "power_limit",
    "power_limit_default",
    "application_clocks",
    "application_clocks_default",
    "mig",
    "mig_layout",
    "mig_devices",
    "ecc",
)


LOCKS = re.compile(rb"nvidia-smi\b.*\s(-lgc|--lock-gpu-clocks|-lmc|--lock-memory-clocks)\b")
LOCKERS = (
    "etc/systemd/system/**/*.service",
    "usr/local/lib/systemd/system/*.service",
    "etc/cron*/**/*",
    "etc/crontab",
    "var/spool/cron/**/*",
    "etc/udev/rules.d/*.rules",
    "etc/rc.local",
    "usr/local/bin/*",
    "usr/local/sbin/*",
)
"""Where an administrator has commands run at boot, and the scripts of such units; patterns below the root."""
_SCRIPT = 1 << 16


class SettingsError(Exception):
    """Settings cannot be read or put back; the text says why and what to do."""


@dataclass(frozen=True)
class Change:
    """One setting of one GPU that differs from what was remembered. ``command`` is what a person would type."""

    uuid: str
    setting: str
    before: Any
    after: Any
    command: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        about = asdict(self)
        del about["arguments"]
        return about


# --- Remember ------------------------------------------------------------------------------------------------------


def snapshot(report: nvml.Report, modules: Iterable[str], modprobe_dir: str = "/etc/modprobe.d") -> dict[str, Any]:
    """What to remember: settings by GPU uuid, the loaded modules, checksums of NVIDIA's modprobe files."""
    return {
        "gpus": {
            gpu["uuid"]: {key: gpu.get(key) for key in _KEPT}
            for gpu in report.gpus
            if gpu.get("uuid") and not gpu["error"]
        },
        "modules": list(modules),
        "modprobe": checksums(modprobe_dir),
    }


def checksums(directory: str) -> dict[str, str]:
    """SHA-256 of each file in ``directory`` that has nvidia in its name or text."""
    found = {}
    for path in sorted(Path(directory).glob("*.conf")):
        try:
            data = path.read_bytes()
        except OSError:
            continue
        if "nvidia" in path.name or b"nvidia" in data:
            found[str(path)] = hashlib.sha256(data).hexdigest()
    return found


def inventory(found: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What to remember of the GPUs themselves, from :func:`facts.merge_gpus`: who they are, and their error counters
    (a reload sets the volatile ones to zero)."""
    keys = ("uuid", "pci", "pci_device_id", "name", "ecc_uncorrected", "remapped_rows", "retired_pending")
    return [{key: gpu.get(key) for key in keys} for gpu in found if gpu.get("uuid") or gpu.get("pci")]


# --- Compare -------------------------------------------------------------------------------------------------------


def plan(remembered: Mapping[str, Any], report: nvml.Report) -> tuple[list[Change], list[Finding]]:
    """What to change so that the GPUs are as remembered, and what cannot be put back."""
    changes: list[Change] = []
    findings: list[Finding] = []
    now = {gpu["uuid"]: gpu for gpu in report.gpus if gpu.get("uuid") and not gpu["error"]}
    for uuid, before in remembered["gpus"].items():
        gpu = now.get(uuid)
        if gpu is None:
            findings.append(
                Finding(
                    "settings.gpu_missing",
                    WARNING,
                    f"{before['name']} {uuid} at {before['pci']} is gone; its settings cannot be put back",
                    {"uuid": uuid, "pci": before["pci"]},
                    "nvidia-smi -L; journalctl -k -b | grep -e NVRM -e nvidia",
                )
            )
            continue
        changes += _mode_changes(uuid, before, gpu)
        layout_changes, conflicts = _layout_changes(uuid, before, gpu)
        changes += layout_changes
        findings += conflicts
        ecc = (before.get("ecc") or {}).get("current")
        if ecc is not None and gpu.get("ecc") and gpu["ecc"]["current"] != ecc:
            findings.append(
                Finding(
                    "settings.ecc",
                    WARNING,
                    f"{uuid}: ECC was {'on' if ecc else 'off'} and is not any more; a pending change took effect",
                    {"before": before["ecc"], "now": gpu["ecc"]},
                    f"nvidia-smi -i {uuid} -e {int(ecc)} and reboot, unless it is meant so",
                )
            )
    return changes, findings


def _mode_changes(uuid: str, before: Mapping[str, Any], gpu: Mapping[str, Any]) -> list[Change]:
    changes = []

    def differs(setting: str) -> bool:
        return before.get(setting) is not None and gpu.get(setting) is not None and before[setting] != gpu[setting]

    smi = f"nvidia-smi -i {uuid}"
    if differs("persistence"):
        wanted = before["persistence"]
        changes.append(Change(uuid, "persistence", gpu["persistence"], wanted, f"{smi} -pm {int(wanted)}"))
    if differs("mig") and before["mig"]["current"] != gpu["mig"]["current"]:
        wanted = before["mig"]["current"]
        changes.append(Change(uuid, "mig", gpu["mig"]["current"], wanted, f"{smi} -mig {int(wanted)}"))
    if differs("compute_mode"):
        mode = before["compute_mode"]
        changes.append(Change(uuid, "compute_mode", gpu["compute_mode"], mode, f"{smi} -c {mode.upper()}"))
    limit = _meant(before, gpu, "power_limit")
    if limit is not None and gpu.get("power_limit") is not None and abs(limit - gpu["power_limit"]) >= 0.5:
        changes.append(Change(uuid, "power_limit", gpu["power_limit"], limit, f"{smi} -pl {limit:g}"))
    clocks = _meant(before, gpu, "application_clocks")
    if clocks is not None and gpu.get("application_clocks") not in (None, clocks):
        command = f"{smi} -ac {clocks['memory']},{clocks['graphics']}"
        changes.append(Change(uuid, "application_clocks", gpu["application_clocks"], clocks, command))
    return changes


def _meant(before: Mapping[str, Any], gpu: Mapping[str, Any], setting: str) -> Any:
    """The value to restore: what was set, or today's default if the old default was in force (defaults may change)."""
    value = before.get(setting)
    if value is not None and value == before.get(f"{setting}_default"):
        return gpu.get(f"{setting}_default")
    return value


def _layout_changes(uuid: str, before: Mapping[str, Any], gpu: Mapping[str, Any]) -> tuple[list[Change], list[Finding]]:
    """Instances to create. What is there and was not remembered is never destroyed: it may be in use."""
    wanted = before.get("mig_layout") or []
    if not wanted:
        return [], []
    present = {(item["profile"], item["start"]): item for item in gpu.get("mig_layout") or []}
    remembered = {(item["profile"], item["start"]) for item in wanted}
    foreign = [item for key, item in present.items() if key not in remembered]
    if foreign:
        return [], [
            Finding(
                "settings.mig_layout",
                ERROR,
                f"{uuid} has GPU instances that it did not have; they are left alone, the old layout is not restored",
                {"uuid": uuid, "now": gpu.get("mig_layout"), "before": wanted},
                f"nvidia-smi mig -i {uuid} -lgi; destroy what is not wanted, then run this again",
            )
        ]
    changes = []
    for item in sorted(wanted, key=lambda item: item["id"]):
        there = present.get((item["profile"], item["start"]))
        existing = {(part["profile"], part["start"]) for part in there["compute_instances"]} if there else set()
        parts = [part for part in item["compute_instances"] if (part["profile"], part["start"]) not in existing]
        if there and not parts:
            continue
        profiles = ",".join(str(part["profile"]) for part in parts)
        create = f"nvidia-smi mig -i {uuid} -cgi {item['profile']}:{item['start']}"
        compute = f"nvidia-smi mig -i {uuid} -gi {there['id'] if there else 'NEW'} -cci {profiles}"
        steps = [*([] if there else [create]), *([compute] if parts else [])]
        changes.append(
            Change(
                uuid,
                "mig_layout",
                None if not there else "without compute instances",
                f"profile {item['profile']} at {item['start']} with compute instances {profiles or 'none'}",
                " && ".join(steps),
                {"instance": item, "existing_id": there["id"] if there else None, "parts": parts},
            )
        )
    return changes, []


# --- Act -----------------------------------------------------------------------------------------------------------

_ORDER = ("persistence", "mig", "mig_layout", "compute_mode", "power_limit", "application_clocks")
_MODE_NUMBERS = {name: number for number, name in nvml.COMPUTE_MODES.items()}


def apply(changes: Iterable[Change], timeout: float, library: str = nvml.LIBRARY) -> dict[int, str]:
    """Make the changes through NVML in a child; index of each change that failed → reason.

    A MIG mode that stays pending is no failure: reading it back afterwards shows it.

    :raises SettingsError: if the library cannot be entered or does not come back.
    """
    ordered = list(changes)
    outcome = execution.call(_apply, ordered, library, timeout=timeout)
    if outcome.timed_out:
        raise SettingsError(
            f"the driver did not come back within {timeout:.0f} s while settings were changed; reboot the host"
        )
    if outcome.error is not None:
        raise SettingsError(f"the process that changed settings {outcome.error}; see journalctl -k")
    failures: dict[int, str] = outcome.value
    return failures


def _apply(changes: list[Change], library: str) -> dict[int, str]:
    driver = nvml.Driver(ctypes.CDLL(library))
    driver.call("nvmlInit_v2")
    failures = {}
    try:
        for number in sorted(range(len(changes)), key=lambda number: _ORDER.index(changes[number].setting)):
            try:
                _change(driver, changes[number])
            except nvml.NvmlError as exc:
                failures[number] = str(exc)
    finally:
        driver.call("nvmlShutdown")
    return failures


def _change(driver: nvml.Driver, change: Change) -> None:
    device = driver.handle("nvmlDeviceGetHandleByUUID", ctypes.c_char_p(change.uuid.encode()))
    wanted = change.after
    if change.setting == "persistence":
        driver.call("nvmlDeviceSetPersistenceMode", device, ctypes.c_uint(int(wanted)))
    elif change.setting == "mig":
        driver.uint("nvmlDeviceSetMigMode", device, ctypes.c_uint(int(wanted)))
    elif change.setting == "compute_mode":
        driver.call("nvmlDeviceSetComputeMode", device, ctypes.c_uint(_MODE_NUMBERS[wanted]))
    elif change.setting == "power_limit":
        driver.call("nvmlDeviceSetPowerManagementLimit", device, ctypes.c_uint(round(wanted * 1000)))
    elif change.setting == "application_clocks":
        clocks = (ctypes.c_uint(wanted["memory"]), ctypes.c_uint(wanted["graphics"]))
        driver.call("nvmlDeviceSetApplicationsClocks", device, *clocks)
    else:
        _create_instances(driver, device, change.arguments)


def _create_instances(driver: nvml.Driver, device: ctypes.c_void_p, arguments: Mapping[str, Any]) -> None:
    instance = arguments["instance"]
    if arguments["existing_id"] is None:
        where = nvml.Placement(instance["start"], instance["size"])
        made = driver.handle(
            "nvmlDeviceCreateGpuInstanceWithPlacement", device, ctypes.c_uint(instance["profile"]), ctypes.byref(where)
        )
    else:
        made = driver.handle("nvmlDeviceGetGpuInstanceById", device, ctypes.c_uint(arguments["existing_id"]))
    for part in sorted(arguments["parts"], key=lambda part: part["id"]):
        profile = ctypes.c_uint(part["profile"])
        where = nvml.Placement(part["start"], part["size"])
        try:
            driver.handle("nvmlGpuInstanceCreateComputeInstanceWithPlacement", made, profile, ctypes.byref(where))
        except nvml.NvmlError as exc:
            if exc.code != nvml.FUNCTION_NOT_FOUND:
                raise
            driver.handle("nvmlGpuInstanceCreateComputeInstance", made, profile)


# --- The two states of the module ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What gpu_settings reports."""

    changed: bool
    changes: list[Change] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    reboot_required: bool = False
    settings: Mapping[str, Any] | None = None

    @property
    def error(self) -> str | None:
        """Every finding that is an error, in one text; None if there is none."""
        return summary(self.findings) or None

    def as_dict(self) -> dict[str, Any]:
        return {
            "changed": self.changed,
            "changes": [change.as_dict() for change in self.changes],
            "settings": self.settings,
            "findings": [finding.as_dict() for finding in self.findings],
            "reboot_required": self.reboot_required,
            "diff": {
                "before": "".join(f"{change.uuid} {change.setting}: {change.before}\n" for change in self.changes),
                "after": "".join(f"{change.uuid} {change.setting}: {change.after}\n" for change in self.changes),
            },
        }


def save(journal: Journal, timeout: float, now: float, roots: facts.Roots | None = None) -> Result:
    """Remember settings and GPUs, unless this run has them already.

    Without a usable NVML only the GPUs that the kernel shows are remembered, which is a warning.

    :raises SettingsError: if the driver hangs.
    """
    roots = roots or facts.Roots()
    if journal.before(SETTINGS) is not None and not _is_over(journal):
        return Result(False, settings=journal.before(SETTINGS))
    report = _ask(timeout, roots)
    bus, taken = gpus.scan_pci(roots.pci), gpus.read_proc_gpus(roots.proc_nvidia)
    found = facts.merge_gpus(bus, taken, report.gpus)
    kept = snapshot(report, facts.loaded_modules(roots.proc), f"{roots.etc}/modprobe.d")
    findings = []
    if not report.ok:
        findings.append(
            Finding(
                "settings.unknown",
                WARNING,
                f"settings of the GPUs cannot be read ({report.message}), so they will not be put back",
                {"status": report.status},
                "set persistence, compute mode, limits and MIG by hand after the upgrade if they matter",
            )
        )
    journal.start(STEP_SAVE, now)
    for kind in (SETTINGS, GPUS):
        journal.forget(kind)
    journal.remember(GPUS, inventory(found))
    journal.remember(SETTINGS, kept)
    journal.end(STEP_SAVE, now)
    return Result(True, findings=findings, settings=kept)


def _is_over(journal: Journal) -> bool:
    """What is remembered was put back already and no run is under way: it speaks of an upgrade that is over."""
    saved, restored = journal.last(STEP_SAVE), journal.last(STEP_RESTORE)
    if journal.unfinished or saved is None or restored is None or restored["state"] != "done":
        return False
    return bool(restored["at"] >= saved["at"])


def restore(
    journal: Journal, timeout: float, now: float, check: bool = False, roots: facts.Roots | None = None
) -> Result:
    """Put back what :func:`save` remembered, then read everything again and compare.

    :raises SettingsError: if NVML cannot be used, or a setting is not as before in the end.
    """
    roots = roots or facts.Roots()
    remembered = journal.before(SETTINGS)
    if remembered is None:
        return Result(False)
    notes = _modprobe_findings(remembered, f"{roots.etc}/modprobe.d")
    if not remembered["gpus"]:
        return Result(False, findings=notes, settings=remembered)
    report = _ask(timeout, roots)
    if not report.ok and not report.gpus:
        raise SettingsError(
            f"settings of the GPUs cannot be put back: {report.message}; load the kernel modules, then run this again"
        )
    changes, findings = plan(remembered, report)
    if check:
        return Result(bool(changes), changes, [*findings, *notes], settings=remembered)
    failures: dict[int, str] = {}
    if changes:
        journal.start(STEP_RESTORE, now)
        failures = apply(changes, timeout, roots.nvml)
        report = _ask(timeout, roots)
    left, findings = plan(remembered, report)
    pending = {gpu["uuid"] for gpu in report.gpus if gpu.get("mig") and gpu["mig"]["current"] != gpu["mig"]["pending"]}
    reasons = {(changes[number].uuid, changes[number].setting): reason for number, reason in failures.items()}
    for change in left:
        waits = change.uuid in pending and change.setting in ("mig", "mig_layout")
        reason = reasons.get((change.uuid, change.setting), "accepted by the driver, but not in force")
        findings.append(
            Finding(
                f"settings.{change.setting}",
                ERROR,
                f"{change.uuid}: {change.setting} is {change.before}, was {change.after} before: "
                + ("the MIG mode becomes current at a reset or reboot" if waits else reason),
                change.as_dict(),
                "reboot the host, then run this again" if waits else change.command,
            )
        )
    if changes:
        journal.end(STEP_RESTORE, now, "failed" if left else "done")
    not_done = {(change.uuid, change.setting, str(change.after)) for change in left}
    done = [change for change in changes if (change.uuid, change.setting, str(change.after)) not in not_done]
    findings += [*_mig_names(remembered, report), *notes]
    return Result(bool(done), done, findings, any(change.uuid in pending for change in left), remembered)


def _ask(timeout: float, roots: facts.Roots) -> nvml.Report:
    stuck = facts.wedged(roots.proc)
    report = None if stuck else nvml.observe(timeout, roots.nvml)
    hung = facts.wedged_finding(stuck, report)
    if hung or report is None:
        raise SettingsError(f"{hung.message if hung else 'the driver hangs'}; {health.REBOOT}")
    return report


def _mig_names(remembered: Mapping[str, Any], report: nvml.Report) -> list[Finding]:
    """MIG devices get new uuids with new instances: a warning for each GPU, with old and new ones."""
    found = []
    for gpu in report.gpus:
        before = remembered["gpus"].get(gpu.get("uuid"), {}).get("mig_devices") or []
        old, new = ([item["uuid"] for item in devices] for devices in (before, gpu.get("mig_devices") or []))
        if old and new and set(old) != set(new):
            found.append(
                Finding(
                    "settings.mig_uuids",
                    WARNING,
                    f"{gpu['uuid']}: its MIG devices have new uuids; configurations that name the old ones need them",
                    {"before": old, "now": new},
                    "nvidia-smi -L",
                )
            )
    return found


def _modprobe_findings(remembered: Mapping[str, Any], directory: str) -> list[Finding]:
    before, now = remembered.get("modprobe", {}), checksums(directory)
    changed = sorted(path for path in {*before, *now} if before.get(path) != now.get(path))
    if not changed:
        return []
    return [
        Finding(
            "settings.modprobe",
            WARNING,
            f"module parameters may differ from before: {', '.join(changed)} changed",
            {"before": {path: before.get(path) for path in changed}, "now": {path: now.get(path) for path in changed}},
            "compare the files with their backup or with the package's",
        )
    ]


def locked_clocks(root: str = "/") -> list[Finding]:
    """A warning if something on the node locks clocks, which a new driver starts without."""
    files = sorted({path for pattern in LOCKERS for path in Path(root).glob(pattern) if _locks_clocks(path)})
    if not files:
        return []
    names = [f"/{path.relative_to(root)}" for path in files]
    return [
        Finding(
            "settings.locked_clocks",
            WARNING,
            f"{', '.join(names)} locks clocks of GPUs. No driver tells which clocks are locked and a new one starts "
            f"with none, so they cannot be put back for you",
            {"files": names},
            "run it again afterwards; an upgrade stops and starts again a unit that is named in gpu_extra_units",
        )
    ]


def _locks_clocks(path: Path) -> bool:
    try:
        return path.is_file() and path.stat().st_size <= _SCRIPT and bool(LOCKS.search(path.read_bytes()))
    except OSError:
        return False
