# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether a host may take work again: the wanted driver everywhere, every GPU there and computing, all as before.

Each check is a function from facts to findings; :func:`validate` gathers the facts, bounded in time, and judges.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils import version
from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Runner
from ansible_collections.gpufleet.driver.plugins.module_utils.findings import ERROR, OK, WARNING, Finding, errors
from ansible_collections.gpufleet.driver.plugins.module_utils.host import (
    companions,
    cuda,
    facts,
    gpus,
    health,
    nvml,
    settings,
)

CHECKS = (
    "versions",
    "gpus",
    "devices",
    "health",
    "memory",
    "fabric",
    "companions",
    "services",
    "settings",
    "modules",
    "compute",
    "dcgm",
    "command",
    "performance",
)
"""In the order in which they run. The ones from compute on are not tried while the driver is not fit for them."""

RETURN, ROLLBACK, QUARANTINE = "return", "rollback", "quarantine"
_FABRIC_PAUSE = 5.0


@dataclass(frozen=True)
class Wanted:
    """What to validate against; None or empty means that nothing is known, so that nothing is compared.

    ``gpus`` and ``settings`` are what :mod:`settings` remembered; ``since``, the start of what the kernel log is read
    from, and ``loaded_at``, when the driver was last loaded, in Unix seconds; ``timeout`` in seconds for each probe and
    each wait; ``tolerance`` is a fraction.
    """

    version: str | None = None
    gpus: Sequence[Mapping[str, Any]] = ()
    settings: Mapping[str, Any] | None = None
    since: float | None = None
    loaded_at: float | None = None
    services: Sequence[str] = ()
    dcgm_level: int = 0
    command: Sequence[str] = ()
    benchmark_command: Sequence[str] = ()
    baseline: Mapping[str, Any] | None = None
    compare: bool = False
    tolerance: float = 0.1
    timeout: float = 60
    checks: Sequence[str] = CHECKS


@dataclass(frozen=True)
class Verdict:
    """``act``: return (to service), rollback (another driver may cure it) or quarantine (it cannot)."""

    checks: list[Finding]
    measurements: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not errors(self.checks)

    @property
    def act(self) -> str:
        if self.ok:
            return RETURN
        return QUARANTINE if any(map(_is_hardware, errors(self.checks))) else ROLLBACK

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "act": self.act,
            "checks": [finding.as_dict() for finding in self.checks],
            "measurements": self.measurements,
        }


_NOT_OF_A_DRIVER = ("health.xid", "health.off_bus", "driver.wedged")
_HARDWARE_CHECKS = ("driver.wedged", "gpu.lost", "gpu.remap_failure", "gpu.off_bus", "health.off_bus")


def _is_hardware(finding: Finding) -> bool:
    return finding.check in _HARDWARE_CHECKS or finding.evidence.get("act") == "replace"


# --- Versions, GPUs, device nodes ----------------------------------------------------------------------------------


def check_versions(wanted: str | None, loaded: str | None, libraries: Mapping[str, str | None]) -> list[Finding]:
    """Loaded = each library = wanted."""
    evidence = {"wanted": wanted, "loaded": loaded, "libraries": dict(libraries)}
    if loaded is None:
        return [
            Finding(
                "validate.versions",
                ERROR,
                f"no NVIDIA driver is loaded, expected {wanted or 'one'}",
                evidence,
                "modprobe nvidia; journalctl -k",
            )
        ]
    expected = version.DriverVersion.parse(wanted or loaded)
    wrong = [] if version.find(loaded) == expected else [f"the loaded driver is {loaded}"]
    for name, text in libraries.items():
        if text is None:
            wrong.append(f"{name} is missing or carries no version")
        elif version.find(text) != expected:
            wrong.append(f"{name} is {text}")
    if wrong:
        return [
            Finding(
                "validate.versions",
                ERROR,
                f"{', '.join(wrong)}; expected {expected}",
                evidence,
                "see what each part has: driver_info",
            )
        ]
    return [Finding("validate.versions", OK, f"loaded driver and libraries are {expected}", evidence)]


def check_gpus(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """The same GPUs as before, each known to the driver and to NVML.

    A GPU that is gone from the PCI bus is a hardware loss (``gpu.off_bus``); one that is there but not driven is not.
    """
    found = [
        Finding("gpu.lost", ERROR, f"{_name(gpu)}: {gpu['error']}", {"pci": gpu.get("pci")}, health.REBOOT)
        for gpu in now
        if gpu.get("error")
    ]
    driven = {gpu.get("uuid") for gpu in now if gpu.get("uuid") and not gpu.get("error") and "nvml" in gpu["seen_by"]}
    on_bus = {gpu.get("pci") for gpu in now if "bus" in gpu["seen_by"]}
    broken = {gpu.get("pci") for gpu in now if gpu.get("error")}
    for gpu in before:
        uuid, pci = gpu.get("uuid"), gpu.get("pci")
        if uuid in driven or pci in broken or (uuid is None and any(one.get("pci") == pci for one in now)):
            continue
        evidence = {"uuid": uuid, "pci": pci}
        if on_bus and pci and pci not in on_bus:
            found.append(
                Finding(
                    "gpu.off_bus",
                    ERROR,
                    f"{gpu.get('name')} {uuid} at {pci} is gone from the PCI bus",
                    evidence,
                    "power-cycle the host; if the GPU is still gone, have the hardware looked at",
                )
            )
        else:
            found.append(
                Finding(
                    "validate.gpus",
                    ERROR,
                    f"{gpu.get('name')} {uuid} at {pci} was there before and the driver does not show it",
                    evidence,
                    "journalctl -k -b | grep -e NVRM -e nvidia",
                )
            )
    known = {gpu.get("uuid") for gpu in before}
    new = sorted(str(uuid) for uuid in driven if before and uuid not in known)
    if new:
        message = f"GPUs that were not there before: {', '.join(new)}"
        found.append(Finding("validate.gpus_new", WARNING, message, {"uuids": new}))
    if not now:
        found.append(
            Finding("validate.gpus", ERROR, "no GPU is seen by the bus, the driver or NVML", {}, "lspci -d 10de:")
        )
    for gpu in now:
        if not before and not gpu.get("error") and "nvml" not in gpu["seen_by"]:
            found.append(
                Finding(
                    "validate.gpus",
                    ERROR,
                    f"{_name(gpu)} is not shown by NVML",
                    {"pci": gpu.get("pci")},
                    "nvidia-smi -L",
                )
            )
    if not errors(found):
        found.append(
            Finding("validate.gpus", OK, f"all {len(driven)} GPUs are there", {"uuids": sorted(map(str, driven))})
        )
    return found


def _name(gpu: Mapping[str, Any]) -> str:
    return str(gpu.get("uuid") or gpu.get("pci") or f"GPU {gpu.get('index')}")


def parse_devices(text: str) -> dict[str, int]:
    """Character devices in ``/proc/devices``: name → major."""
    characters = text.partition("Block devices:")[0]
    return {name: int(major) for major, name in re.findall(r"^\s*(\d+) (\S+)$", characters, re.MULTILINE)}


def check_devices(majors: Mapping[str, int], minors: Iterable[int], dev: str = "/dev") -> list[Finding]:
    """The nodes that CUDA needs exist as character devices with the majors of ``/proc/devices``.

    Where ``/proc/devices`` names no NVIDIA major at all (a container's view), only the nodes' existence can be
    checked, which the evidence says.
    """
    gpu_major = majors.get("nvidia", majors.get("nvidia-frontend"))
    uvm_major = majors.get("nvidia-uvm")
    known = gpu_major is not None or uvm_major is not None
    wanted = [("nvidiactl", gpu_major, 255), *((f"nvidia{minor}", gpu_major, minor) for minor in sorted(minors))]
    wanted += [("nvidia-uvm", uvm_major, 0), ("nvidia-uvm-tools", uvm_major, 1)]
    wrong = []
    seen = {}
    for name, major, minor in wanted:
        path = Path(dev, name)
        try:
            about = path.stat()
        except OSError:
            wrong.append(f"{path} is missing")
            continue
        if not stat.S_ISCHR(about.st_mode):
            wrong.append(f"{path} is not a character device")
            continue
        numbers = (os.major(about.st_rdev), os.minor(about.st_rdev))
        seen[name] = f"{numbers[0]}:{numbers[1]}"
        if known and major is None:
            wrong.append(f"/proc/devices has no major for {path}: its module is not loaded")
        elif known and numbers != (major, minor):
            wrong.append(f"{path} is {numbers[0]}:{numbers[1]}, expected {major}:{minor}")
    evidence = {"majors": {key: value for key, value in majors.items() if "nvidia" in key}, "nodes": seen}
    evidence["compared"] = known
    if wrong:
        return [
            Finding(
                "validate.devices",
                ERROR,
                "; ".join(wrong),
                evidence,
                "nvidia-modprobe -c=0 -u, after removing wrong nodes",
            )
        ]
    how = "have the majors of /proc/devices" if known else "exist (/proc/devices names no NVIDIA major to compare with)"
    return [Finding("validate.devices", OK, f"the device nodes {how}", evidence)]


# --- Health and memory ---------------------------------------------------------------------------------------------


def check_health(found: Iterable[Finding], loaded_at: float | None = None) -> list[Finding]:
    """No trouble in the kernel log since the start.

    A library mismatch logged while packages were swapped is over. So is what an earlier driver said about itself
    before ``loaded_at`` (Unix seconds), when the one under test was loaded; what a reload does not cure still counts.
    """
    return [replace(finding, level=WARNING) if _is_over(finding, loaded_at) else finding for finding in found]


def _is_over(finding: Finding, loaded_at: float | None) -> bool:
    if finding.level != ERROR or finding.check == "health.mismatch":
        return finding.level == ERROR
    last = finding.evidence.get("last")
    of_the_driver = finding.evidence.get("class") == "driver" or finding.check not in _NOT_OF_A_DRIVER
    return of_the_driver and last is not None and loaded_at is not None and last < loaded_at


def check_memory(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """No new uncorrectable memory error, no remapping that failed or waits."""
    found = []
    old = {gpu.get("uuid"): gpu for gpu in before}
    for gpu in now:
        earlier = old.get(gpu.get("uuid"), {})
        rows, old_rows = gpu.get("remapped_rows") or {}, earlier.get("remapped_rows") or {}
        ecc, old_ecc = gpu.get("ecc_uncorrected") or {}, earlier.get("ecc_uncorrected") or {}
        evidence = {"remapped_rows": rows, "before": old_rows, "ecc": ecc, "ecc_before": old_ecc}
        if rows.get("failure"):
            found.append(
                Finding(
                    "gpu.remap_failure",
                    ERROR,
                    f"{_name(gpu)}: remapping of a faulty memory row failed",
                    evidence,
                    "quarantine the host and have the GPU replaced",
                )
            )
        elif rows.get("pending") or gpu.get("retired_pending"):
            waited = bool(old_rows.get("pending") or earlier.get("retired_pending"))
            found.append(
                Finding(
                    "gpu.remap_pending",
                    WARNING if waited else ERROR,
                    f"{_name(gpu)}: a faulty memory row or page waits for a reset to be replaced"
                    + (", as before" if waited else ""),
                    {**evidence, "act": "reset" if waited else "replace"},
                    "reboot the host, then validate again",
                )
            )
        elif (rows.get("uncorrected") or 0) > (old_rows.get("uncorrected") or 0) and old_rows:
            found.append(
                Finding(
                    "gpu.remapped",
                    WARNING,
                    f"{_name(gpu)}: {rows['uncorrected']} rows are remapped after uncorrectable errors, "
                    f"{old_rows['uncorrected']} were before",
                    evidence,
                )
            )
        found += _ecc(gpu, ecc, old_ecc, evidence)
    return found or [Finding("validate.memory", OK, "no new memory error", {})]


def _ecc(
    gpu: Mapping[str, Any], now: Mapping[str, Any], before: Mapping[str, Any], evidence: Mapping[str, Any]
) -> list[Finding]:
    """Uncorrectable errors: the life-long counter tells, where there is one; a reload sets the other one to zero."""
    volatile, aggregate = now.get("volatile") or 0, now.get("aggregate")
    known = before.get("aggregate") is not None and aggregate is not None
    new = aggregate > before["aggregate"] if known else volatile > (before.get("volatile") or 0)
    if not new:
        return []
    seen = (
        f"{aggregate} in its life, {before['aggregate']} before" if known else f"{volatile} since the driver was loaded"
    )
    judged = bool(before)
    return [
        Finding(
            "gpu.ecc",
            ERROR if judged else WARNING,
            f"{_name(gpu)}: uncorrectable memory errors: {seen}",
            {**evidence, "act": "replace"},
            "quarantine the host; run dcgmi diag -r 3",
        )
    ]


# --- Fabric, services, settings, modules ---------------------------------------------------------------------------


def fabric_pending(now: Iterable[Mapping[str, Any]]) -> list[str]:
    """GPUs whose NVLink fabric is not set up yet, with its state."""
    return [
        f"{_name(gpu)} {gpu['fabric']['state']}"
        for gpu in now
        if gpu.get("fabric") and gpu["fabric"]["state"] not in ("completed", "not_supported")
    ]


def check_fabric(now: Sequence[Mapping[str, Any]], waited: float, has_nvlsm: bool) -> list[Finding]:
    """Every GPU that is part of an NVLink fabric has completed its registration, with success."""
    pending = fabric_pending(now)
    bad = [
        f"{_name(gpu)} {gpu['fabric']['status']}"
        for gpu in now
        if gpu.get("fabric") and gpu["fabric"]["state"] == "completed" and gpu["fabric"]["status"] != "success"
    ]
    evidence = {"pending": pending, "failed": bad, "waited_s": round(waited, 1)}
    if pending:
        hint = "" if has_nvlsm else "; nvlsm is not installed, which B200 and GB200 need"
        return [
            Finding(
                "validate.fabric",
                ERROR,
                f"the NVLink fabric is not set up after {waited:.0f} s: {', '.join(pending)}{hint}",
                evidence,
                "systemctl status nvidia-fabricmanager nvlsm; journalctl -u nvidia-fabricmanager -b",
            )
        ]
    if bad:
        return [
            Finding(
                "validate.fabric",
                ERROR,
                f"the NVLink fabric failed: {', '.join(bad)}",
                evidence,
                "journalctl -u nvidia-fabricmanager -b",
            )
        ]
    return [Finding("validate.fabric", OK, "no GPU waits for an NVLink fabric", evidence)]


def check_services(wanted: Iterable[str], states: Mapping[str, str]) -> list[Finding]:
    """Units that should be active are."""
    found = []
    for unit in wanted:
        state = states.get(unit, "not found")
        if state == "active":
            found.append(Finding("validate.services", OK, f"{unit} is active", {"unit": unit}))
        else:
            found.append(
                Finding(
                    "validate.services",
                    ERROR,
                    f"{unit} is {state}, expected active",
                    {"unit": unit, "state": state},
                    f"systemctl status {unit}; journalctl -b -u {unit}",
                )
            )
    return found


def parse_active(text: str) -> dict[str, str]:
    """Blocks of ``systemctl show --property=Names,ActiveState``: every name of a unit → its state."""
    states = {}
    for block in re.split(r"\n\s*\n", text):
        fields = dict(line.partition("=")[::2] for line in block.splitlines() if "=" in line)
        for name in fields.get("Names", "").split():
            states[name] = fields.get("ActiveState", "unknown")
    return states


def check_settings(remembered: Mapping[str, Any] | None, report: nvml.Report) -> list[Finding]:
    """Persistence, compute mode, limits, MIG mode and layout are as remembered."""
    if not remembered or not remembered.get("gpus"):
        return []
    changes, findings = settings.plan(remembered, report)
    found = [
        Finding(
            f"settings.{change.setting}",
            ERROR,
            f"{change.uuid}: {change.setting} is {change.before}, was {change.after} before",
            change.as_dict(),
            change.command,
        )
        for change in changes
    ]
    found += [finding for finding in findings if finding.check != "settings.gpu_missing"]
    return found or [Finding("validate.settings", OK, "persistence, compute mode, limits and MIG are as before", {})]


_REQUIRED = ("nvidia", "nvidia_uvm")


def check_modules(remembered: Mapping[str, Any] | None, loaded: Iterable[str]) -> list[Finding]:
    """Modules that were loaded before are loaded: the driver's own must be, a lost third-party one is degradation.

    ``nvidia_peermem``, ``gdrdrv``, ``nvidia_fs`` are GPUDirect: work runs without them, slower.
    """
    present = set(loaded)
    before = set((remembered or {}).get("modules") or _REQUIRED) - {"nouveau"}
    lost = sorted(before - present)
    if not lost:
        return [Finding("validate.modules", OK, "the modules loaded before are loaded", {"loaded": sorted(present)})]
    fatal = [name for name in lost if name in _REQUIRED]
    what = "the driver is not complete" if fatal else "the node is degraded (GPUDirect or display is lost)"
    return [
        Finding(
            "validate.modules",
            ERROR if fatal else WARNING,
            f"{', '.join(lost)} was loaded before and is not: {what}",
            {"lost": lost, "loaded": sorted(present)},
            f"modprobe {lost[0]}; journalctl -k -b | grep {lost[0]}",
        )
    ]


# --- Computation and performance -----------------------------------------------------------------------------------


def devices_to_compute(now: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """CUDA device → name under which its measurements are compared.

    A GPU with MIG on is represented by its MIG devices. Their uuids change, so they are named by where they sit.
    """
    chosen = {}
    for gpu in now:
        if gpu.get("error") or not gpu.get("uuid"):
            continue
        if not (gpu.get("mig") or {}).get("current"):
            chosen[gpu["uuid"]] = gpu["uuid"]
            continue
        places = {item["id"]: f"{item['profile']}@{item['start']}" for item in gpu.get("mig_layout") or []}
        for device in gpu.get("mig_devices") or []:
            place = places.get(device["gpu_instance"], str(device["gpu_instance"]))
            chosen[device["uuid"]] = f"{gpu['uuid']}/{place}/{device['compute_instance']}"
    return chosen


_COMPUTE_NEXT: Mapping[int | None, str] = {
    46: "nvidia-smi -q -d COMPUTE; see who holds the GPU: module_holders_info",
    100: "ls -l /dev/nvidia*; nvidia-smi -L",
    802: "systemctl status nvidia-fabricmanager nvlsm; journalctl -u nvidia-fabricmanager -b",
    803: "reload the kernel modules or reboot",
    999: "modprobe nvidia-uvm; nvidia-modprobe -c=0 -u",
}


def check_compute(results: Iterable[cuda.Computation]) -> list[Finding]:
    """Every device computed, and computed right."""
    found = []
    for result in results:
        level = OK if result.ok else ERROR
        next_ = _COMPUTE_NEXT.get(result.code, "journalctl -k -b | grep -e NVRM -e Xid") if level == ERROR else None
        message = f"{result.device} {result.message}" if result.ok else f"{result.device}: {result.message}"
        found.append(Finding("validate.compute", level, message, result.as_dict(), next_))
    if not found:
        found.append(
            Finding("validate.compute", ERROR, "there is no GPU or MIG device to compute on", {}, "nvidia-smi -L")
        )
    return found


def compare(baseline: Mapping[str, Any], measured: Mapping[str, Any], tolerance: float) -> list[Finding]:
    """Compare measurements with the host's own baseline: ``copy_gib_s`` and ``benchmark`` may not fall, ``compute_us``
    may not rise, by more than ``tolerance`` (a fraction)."""
    found = []
    pairs: list[tuple[str, float, float, bool]] = []
    for name, before in baseline.get("devices", {}).items():
        now = measured.get("devices", {}).get(name)
        if now is None:
            message = f"{name} was measured before and is not measured now"
            found.append(Finding("performance.missing", ERROR, message, {"device": name}, "nvidia-smi -L"))
            continue
        pairs.append((f"{name} host-to-device copy (GiB/s)", before["copy_gib_s"], now["copy_gib_s"], True))
        pairs.append((f"{name} computation (µs)", before["compute_us"], now["compute_us"], False))
    if baseline.get("benchmark") is not None and measured.get("benchmark") is not None:
        pairs.append(("benchmark", baseline["benchmark"], measured["benchmark"], True))
    for what, before, now, higher_is_better in pairs:
        worse = (before - now if higher_is_better else now - before) / before if before else 0.0
        evidence = {"baseline": before, "measured": now, "worse_by": round(worse, 4), "tolerance": tolerance}
        if worse > tolerance:
            message = (
                f"{what}: {now:.6g}, was {before:.6g} on the old driver, worse by {worse:.0%} (allowed {tolerance:.0%})"
            )
            found.append(Finding("performance.worse", ERROR, message, evidence, "keep the old driver and find out why"))
        else:
            found.append(Finding("performance.kept", OK, f"{what}: {now:.6g}, was {before:.6g}", evidence))
    return found


def last_number(text: str) -> float | None:
    """The last number on the last line that has one."""
    for line in reversed(text.splitlines()):
        numbers = re.findall(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?", line)
        if numbers:
            return float(numbers[-1])
    return None


def dcgm_failures(text: str) -> list[str] | None:
    """Failed tests in the JSON of ``dcgmi diag -j`` (DCGM 3 and 4); None if ``text`` is not such JSON."""
    try:
        # warnings may stand before and after it
        tree, dummy = json.JSONDecoder().raw_decode(text, text.index("{"))
    except ValueError:
        return None
    failed: list[str] = []

    def walk(node: Any, name: str) -> None:
        if isinstance(node, dict):
            own = str(node.get("name") or node.get("category") or name)
            if str(node.get("status", "")).lower() in ("fail", "failed"):
                failed.append(own)
            for value in node.values():
                walk(value, own)
        elif isinstance(node, list):
            for value in node:
                walk(value, name)

    walk(tree, "diagnostic")
    return list(dict.fromkeys(failed))


# --- Everything ----------------------------------------------------------------------------------------------------


class _Validation:
    """One validation under way: the facts it has gathered and what it has found."""

    def __init__(
        self,
        run: Runner,
        wanted: Wanted,
        roots: facts.Roots,
        cuda_library: str,
        pause: Callable[[float], None],
        clock: Callable[[], float],
    ) -> None:
        self._run = run
        self._wanted = wanted
        self._roots = roots
        self._cuda = cuda_library
        self._pause = pause
        self._clock = clock
        self._found: list[Finding] = []
        self._measured: dict[str, Any] = {}

    def verdict(self) -> Verdict:
        wanted, roots = self._wanted, self._roots
        stuck = facts.wedged(roots.proc, self._pause)
        events, source = facts.kernel_log(self._run, roots.proc, wanted.since, wanted.timeout)
        report = None if stuck else nvml.observe(wanted.timeout, roots.nvml)
        hung = facts.wedged_finding(stuck, report)
        if hung or report is None:
            return Verdict([*([hung] if hung else []), *health.findings(events)])
        report, waited = self._settle(report)
        now = self._gpus(report)
        loaded = gpus.read_loaded(roots.proc_nvidia)
        paths = nvml.library_versions(wanted.timeout, (roots.nvml, self._cuda))
        libraries = {Path(name).name: nvml.version_of_file(path) for name, path in paths.items()}
        self._add("versions", lambda: check_versions(wanted.version, loaded.version if loaded else None, libraries))
        self._add("gpus", lambda: [*self._library(report), *check_gpus(wanted.gpus, now)])
        self._add("devices", lambda: self._devices(now))
        self._add("health", lambda: check_health(facts.log_findings(events, source), wanted.loaded_at))
        self._add("memory", lambda: check_memory(wanted.gpus, now))
        around = companions.observe(self._run, wanted.timeout) if self._asked("companions", "fabric") else {}
        self._add("fabric", lambda: check_fabric(now, waited, "nvlsm" in around))
        self._add("companions", lambda: self._companions(around, now, loaded.version if loaded else None))
        self._add("services", self._services)
        self._add("settings", lambda: check_settings(wanted.settings, report))
        self._add("modules", lambda: check_modules(wanted.settings, facts.loaded_modules(roots.proc)))
        if not report.ok and not any(gpu.get("uuid") and not gpu.get("error") for gpu in report.gpus):
            self._found.append(
                Finding(
                    "validate.compute",
                    ERROR,
                    f"not tried, since NVML says: {report.message}",
                    {"status": report.status},
                )
            )
            return Verdict(self._found, self._measured)
        self._add("compute", lambda: self._compute(now))
        self._add("dcgm", self._dcgm)
        self._add("command", lambda: self._command("command", wanted.command))
        self._add("performance", self._performance)
        return Verdict(self._found, self._measured)

    def _asked(self, *names: str) -> bool:
        return any(name in self._wanted.checks for name in names)

    def _add(self, name: str, check: Callable[[], list[Finding]]) -> None:
        if self._asked(name):
            self._found += check()

    def _settle(self, report: nvml.Report) -> tuple[nvml.Report, float]:
        """Wait, bounded, for the NVLink fabric; the report at the end, and the seconds waited."""
        started = self._clock()
        while self._asked("fabric") and report.ok and fabric_pending(report.gpus):
            if self._clock() - started >= self._wanted.timeout:
                break
            self._pause(_FABRIC_PAUSE)
            report = nvml.observe(self._wanted.timeout, self._roots.nvml)
        return report, self._clock() - started

    def _gpus(self, report: nvml.Report) -> list[dict[str, Any]]:
        taken = gpus.read_proc_gpus(self._roots.proc_nvidia)
        return facts.merge_gpus(gpus.scan_pci(self._roots.pci), taken, report.gpus)

    def _library(self, report: nvml.Report) -> list[Finding]:
        if report.ok or report.status == "gpu_lost":
            return []
        return [Finding("validate.nvml", ERROR, report.message, {"status": report.status}, "nvidia-smi; journalctl -k")]

    def _devices(self, now: list[dict[str, Any]]) -> list[Finding]:
        majors = parse_devices(facts.read(Path(self._roots.proc, "devices")))
        minors = [gpu["minor"] for gpu in now if gpu.get("minor") is not None]
        return check_devices(majors, minors, self._roots.dev)

    def _companions(
        self, around: Mapping[str, companions.Companion], now: list[dict[str, Any]], loaded: str | None
    ) -> list[Finding]:
        if loaded is None:
            return []
        bus = gpus.scan_pci(self._roots.pci)
        return companions.pairs(
            loaded,
            companions.Facts(
                companions=around,
                cdi=tuple(companions.read_cdi((f"{self._roots.etc}/cdi", f"{self._roots.run}/cdi"))),
                pci=tuple(device.device_id for device in bus if device.kind == "gpu"),
                nvswitches=sum(device.kind == "nvswitch" for device in bus),
                fabric=tuple(gpu["fabric"]["state"] for gpu in now if gpu.get("fabric")),
            ),
        )

    def _services(self) -> list[Finding]:
        units = [unit if "." in unit else f"{unit}.service" for unit in self._wanted.services]
        if not units:
            return []
        argv = ["systemctl", "show", "--no-pager", "--property=Names,ActiveState", "--", *units]
        return check_services(units, parse_active(self._run(argv, timeout=self._wanted.timeout).stdout))

    def _compute(self, now: list[dict[str, Any]]) -> list[Finding]:
        devices = devices_to_compute(now)
        results = cuda.compute_on(devices, self._wanted.timeout, self._cuda)
        self._measured["devices"] = {
            devices[result.device]: {"copy_gib_s": result.copy_gib_s, "compute_us": result.compute_us}
            for result in results
            if result.ok
        }
        return check_compute(results)

    def _dcgm(self) -> list[Finding]:
        level = self._wanted.dcgm_level
        if not level:
            return []
        done = self._run(["dcgmi", "diag", "-r", str(level), "-j"], timeout=max(self._wanted.timeout, 300 * level))
        failed = dcgm_failures(done.stdout)
        evidence = {"level": level, "rc": done.rc, "failed": failed}
        if done.ok and failed == []:
            return [Finding("validate.dcgm", OK, f"dcgmi diag -r {level} passed", evidence)]
        message = f"dcgmi diag found failures: {', '.join(failed)}" if failed else done.describe()
        return [Finding("validate.dcgm", ERROR, message, evidence, f"dcgmi diag -r {level}")]

    def _command(self, name: str, argv: Sequence[str]) -> list[Finding]:
        if not argv:
            return []
        done = self._run(list(argv), timeout=self._wanted.timeout)
        evidence = {"argv": list(argv), "rc": done.rc, "stdout": done.stdout[-2000:], "stderr": done.stderr[-2000:]}
        if name == "benchmark" and done.ok:
            self._measured["benchmark"] = last_number(done.stdout)
            if self._measured["benchmark"] is None:
                message = f"{argv[0]} printed no number"
                return [Finding("validate.benchmark", ERROR, message, evidence, " ".join(argv))]
        if done.ok:
            return [Finding(f"validate.{name}", OK, f"{argv[0]} succeeded", evidence)]
        return [Finding(f"validate.{name}", ERROR, done.describe(), evidence, " ".join(argv))]

    def _performance(self) -> list[Finding]:
        found = self._command("benchmark", self._wanted.benchmark_command)
        if not self._wanted.compare:
            return found
        if self._wanted.baseline is None:
            message = "there is no baseline of this host to compare with"
            return [*found, Finding("performance.baseline", ERROR, message, {}, "record one on the old driver first")]
        return [*found, *compare(self._wanted.baseline, self._measured, self._wanted.tolerance)]


def validate(
    run: Runner,
    wanted: Wanted,
    roots: facts.Roots | None = None,
    cuda_library: str = cuda.LIBRARY,
    pause: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Verdict:
    """Validate the host against ``wanted``. Never raises for what the driver does; a hang ends the checks."""
    return _Validation(run, wanted, roots or facts.Roots(), cuda_library, pause, clock).verdict()
