# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What differs between the settings remembered and those found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.findings import WARNING
from ansible_collections.gpufleet.driver.plugins.module_utils.host import nvml, settings

CLOCKS = {"graphics": 1275, "memory": 1593}


def gpu(**about: Any) -> dict[str, Any]:
    return {
        "uuid": "GPU-a",
        "error": None,
        "index": 0,
        "pci": "0000:01:00.0",
        "name": "NVIDIA A100",
        "persistence": True,
        "compute_mode": "default",
        "power_limit": 400.0,
        "power_limit_default": 400.0,
        "application_clocks": CLOCKS,
        "application_clocks_default": CLOCKS,
        "mig": {"current": False, "pending": False},
        "mig_layout": [],
        "mig_devices": [],
        "ecc": {"current": True, "pending": True},
        **about,
    }


def report(*gpus: dict[str, Any]) -> nvml.Report:
    return nvml.Report("ok", "answered", None, None, None, None, list(gpus))


def instance(number: int, profile: int, start: int, *parts: int) -> dict[str, Any]:
    return {
        "id": number,
        "profile": profile,
        "start": start,
        "size": 4,
        "compute_instances": [{"id": n, "profile": 2, "start": start, "size": 1} for n, start in enumerate(parts)],
    }


MIG = {"mig": {"current": True, "pending": True}}
THREE = [instance(1, 9, 0, 0), instance(2, 9, 4, 0)]
Expected = list[tuple[str, Any, str]]
PLANS: dict[str, tuple[dict[str, Any], dict[str, Any], Expected]] = {
    "nothing": ({}, {}, []),
    "A-PM-01-persistence": ({}, {"persistence": False}, [("persistence", True, "nvidia-smi -i GPU-a -pm 1")]),
    "A-PM-01-was-off": (
        {"persistence": False},
        {"persistence": True},
        [("persistence", False, "nvidia-smi -i GPU-a -pm 0")],
    ),
    "A-MOD-12-compute-mode": (
        {},
        {"compute_mode": "exclusive_process"},
        [("compute_mode", "default", "nvidia-smi -i GPU-a -c DEFAULT")],
    ),
    "power-limit": (
        {"power_limit": 300.0},
        {},
        [("power_limit", 300.0, "nvidia-smi -i GPU-a -pl 300")],
    ),
    "the-default-moved-with-the-driver": ({}, {"power_limit": 450.0, "power_limit_default": 450.0}, []),
    "the-default-of-the-new-driver-is-meant": (
        {},
        {"power_limit": 400.0, "power_limit_default": 450.0},
        [("power_limit", 450.0, "nvidia-smi -i GPU-a -pl 450")],
    ),
    "clocks": (
        {"application_clocks": {"graphics": 1095, "memory": 1593}},
        {},
        [("application_clocks", {"graphics": 1095, "memory": 1593}, "nvidia-smi -i GPU-a -ac 1593,1095")],
    ),
    "unknown-is-left-alone": ({"persistence": None, "power_limit": None, "mig": None}, {"persistence": False}, []),
    "A-MIG-01-mode-and-layout": (
        {**MIG, "mig_layout": THREE[:1]},
        {},
        [
            ("mig", True, "nvidia-smi -i GPU-a -mig 1"),
            (
                "mig_layout",
                "profile 9 at 0 with compute instances 2",
                "nvidia-smi mig -i GPU-a -cgi 9:0 && nvidia-smi mig -i GPU-a -gi NEW -cci 2",
            ),
        ],
    ),
    "A-MIG-01-one-instance-is-there": (
        {**MIG, "mig_layout": THREE},
        {**MIG, "mig_layout": THREE[:1]},
        [
            (
                "mig_layout",
                "profile 9 at 4 with compute instances 2",
                "nvidia-smi mig -i GPU-a -cgi 9:4 && nvidia-smi mig -i GPU-a -gi NEW -cci 2",
            )
        ],
    ),
    "A-MIG-01-compute-instance-missing": (
        {**MIG, "mig_layout": THREE[:1]},
        {**MIG, "mig_layout": [instance(5, 9, 0)]},
        [("mig_layout", "profile 9 at 0 with compute instances 2", "nvidia-smi mig -i GPU-a -gi 5 -cci 2")],
    ),
    "A-MIG-01-complete": ({**MIG, "mig_layout": THREE}, {**MIG, "mig_layout": list(reversed(THREE))}, []),
    "mig-was-off": ({}, MIG, [("mig", False, "nvidia-smi -i GPU-a -mig 0")]),
}


@pytest.mark.parametrize(("before", "now", "expected"), PLANS.values(), ids=PLANS)
def test_plan(before: dict[str, Any], now: dict[str, Any], expected: Expected) -> None:
    remembered = settings.snapshot(report(gpu(**before)), [], "/nonexistent")
    changes, findings = settings.plan(remembered, report(gpu(**now)))
    assert [(change.setting, change.after, change.command) for change in changes] == expected
    assert findings == []


NOTES = {
    "A-XID-02-gpu-gone": ({"uuid": "GPU-b"}, ["settings.gpu_missing"]),
    "ecc-changed": ({"ecc": {"current": False, "pending": False}}, ["settings.ecc"]),
    "A-MIG-01-foreign": ({**MIG, "mig_layout": [instance(1, 0, 0)]}, ["settings.mig_layout"]),
}


@pytest.mark.parametrize(("now", "checks"), NOTES.values(), ids=NOTES)
def test_what_cannot_be_put_back(now: dict[str, Any], checks: list[str]) -> None:
    remembered = settings.snapshot(report(gpu(**MIG, mig_layout=THREE)), [], "/nonexistent")
    changes, findings = settings.plan(remembered, report(gpu(**{**MIG, "mig_layout": THREE, **now})))
    assert [finding.check for finding in findings] == checks
    assert changes == []


def test_checksums(tmp_path: Path) -> None:
    for name, text in {"nvidia.conf": "options nvidia x=1\n", "gpu.conf": "options nvidia_drm modeset=1\n"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "sound.conf").write_text("options snd x=1\n")
    first = settings.checksums(str(tmp_path))
    assert [Path(path).name for path in first] == ["gpu.conf", "nvidia.conf"]
    (tmp_path / "gpu.conf").write_text("options nvidia_drm modeset=0\n")
    second = settings.checksums(str(tmp_path))
    assert [path for path in first if first[path] != second[path]] == [str(tmp_path / "gpu.conf")]


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("etc/systemd/system/clocks.service", "[Service]\nExecStart=/usr/bin/nvidia-smi -i 0 -lgc 1410,1410\n", True),
        ("etc/systemd/system/a.service.d/clocks.service", "ExecStart=nvidia-smi --lock-memory-clocks=1593\n", True),
        ("etc/cron.d/clocks", "@reboot root nvidia-smi --lock-gpu-clocks=tdp\n", True),
        ("etc/udev/rules.d/90-clocks.rules", 'RUN+="/usr/bin/nvidia-smi -lmc 1593"\n', True),
        ("usr/local/sbin/tune", "#!/bin/sh\nnvidia-smi -pm 1\nnvidia-smi -q\nnvidia-smi -lgc 1410\n", True),
        ("etc/systemd/system/clocks.service", "ExecStart=/usr/bin/nvidia-smi -rgc\n", False),
        ("etc/systemd/system/clocks.service", "ExecStart=/usr/bin/nvidia-smi -pl 250\n", False),
        ("usr/local/bin/big", "nvidia-smi -lgc 1410\n" + "#" * 70000, False),
    ],
)
def test_who_locks_clocks_is_told(tmp_path: Path, file: str, text: str, told: bool) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    (tmp_path / "etc/cron.d").mkdir(parents=True, exist_ok=True)
    (tmp_path / "etc/cron.d/loop").symlink_to("loop")
    found = settings.locked_clocks(str(tmp_path))
    assert [finding.level for finding in found] == ([WARNING] if told else [])
    assert not told or f"/{file} locks clocks" in found[0].message
