# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The node's part of the compatibility key: what must be the same where a process image is restored.

The names are those of planning/compatibility.py. A fact that cannot be had is None, and counts as different.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Runner
from ansible_collections.gpufleet.driver.plugins.module_utils.host import gpus, nvml


def node_facts(
    report: nvml.Report, run: Runner, criu: str = "criu", proc: str = "/proc", sys: str = "/sys"
) -> dict[str, Any]:
    """Facts by the name of the key's field, as JSON has them (lists for sets)."""
    loaded = gpus.read_loaded(f"{proc}/driver/nvidia")
    devices = report.gpus
    return {
        "gpu_model": _common(one.get("name") for one in devices),
        "gpu_sku": _common(one.get("pci_device_id") for one in devices),
        "gpu_memory": _least(devices),
        "ecc": _switch(devices, "ecc"),
        "mig": _switch(devices, "mig"),
        "mps": "on" if _runs("nvidia-cuda-mps", proc) else "off",
        "topology": f"{len(devices)} GPUs",
        "driver": loaded.version if loaded else None,
        "driver_flavour": loaded.flavour if loaded else None,
        "architecture": os.uname().machine,
        "kernel": os.uname().release,
        "cpu_features": cpu_features(_text(f"{proc}/cpuinfo")),
        "runtime": "systemd",
        "cgroup": "2" if Path(sys, "fs/cgroup/cgroup.controllers").exists() else "1",
        "security_module": _text(f"{sys}/kernel/security/lsm").strip() or "none",
        "criu": criu_version(run, criu),
    }


MAP_SINCE = 580
"""The first driver branch whose restore takes a map from old to new GPUs."""


def maps_gpus(driver: str | None) -> bool:
    """Whether a driver can restore to other GPUs than those that a process was saved with."""
    return int((driver or "0").split(".", maxsplit=1)[0]) >= MAP_SINCE


def gpu_order(report: nvml.Report) -> list[dict[str, Any]]:
    """The GPUs in the order the driver has them: uuid, minor, total and used bytes."""
    return [
        {
            "uuid": one.get("uuid"),
            "minor": one.get("minor"),
            "total": (one.get("memory") or {}).get("total", 0),
            "used": (one.get("memory") or {}).get("used", 0),
        }
        for one in report.gpus
    ]


def cpu_features(cpuinfo: str) -> list[str] | None:
    """Sorted features of the first processor in /proc/cpuinfo (``flags`` on x86, ``Features`` on Arm)."""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    return sorted(set(found[1].split())) if found else None


def criu_version(run: Runner, criu: str = "criu") -> str | None:
    found = re.search(r"^Version:\s*(\S+)", run([criu, "--version"], timeout=30).stdout, re.MULTILINE)
    return found[1] if found else None


def _common(values: Any) -> Any:
    """The one value that all have; None if there is none, or more than one."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None


def _least(devices: list[dict[str, Any]]) -> int | None:
    sizes = [(one.get("memory") or {}).get("total") for one in devices]
    known = [size for size in sizes if isinstance(size, int)]
    return min(known) if known and len(known) == len(sizes) else None


def _switch(devices: list[dict[str, Any]], name: str) -> str | None:
    """``on`` or ``off`` if it is the same on all; a GPU that has no such mode has it off."""
    if not devices:
        return None
    return _common("on" if (one.get(name) or {}).get("current") else "off" for one in devices)


def _runs(name: str, proc: str) -> bool:
    return any(_text(str(path)).startswith(name[:15]) for path in Path(proc).glob("[0-9]*/comm"))


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
