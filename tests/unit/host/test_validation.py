# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Each check of a validation by itself, and what follows from it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.findings import ERROR, OK, WARNING, Finding
from ansible_collections.gpufleet.driver.plugins.module_utils.host import health, validation

DEVICES = """\
Character devices:
  1 mem
195 nvidia
195 nvidiactl
234 nvidia-caps
509 nvidia-uvm

Block devices:
  8 sd
"""


def test_parse_devices() -> None:
    assert validation.parse_devices(DEVICES) == {
        "mem": 1,
        "nvidia": 195,
        "nvidiactl": 195,
        "nvidia-caps": 234,
        "nvidia-uvm": 509,
    }


def nodes(monkeypatch: pytest.MonkeyPatch, numbers: dict[str, tuple[int, int] | None]) -> None:
    """Let /made/NAME be a character device of these numbers, or a plain file (None)."""
    real = Path.stat

    def stat(self: Path, **options: Any) -> os.stat_result:
        if self.parent != Path("/made"):
            return real(self, **options)
        if self.name not in numbers:
            raise FileNotFoundError(self)
        number = numbers[self.name]
        about = list(real(Path("/dev/null")))
        about[0] = 0o020666 if number else 0o100644
        return os.stat_result(about, {"st_rdev": os.makedev(*number) if number else 0})

    monkeypatch.setattr(Path, "stat", stat)


GOOD: dict[str, tuple[int, int] | None] = {
    "nvidiactl": (195, 255),
    "nvidia0": (195, 0),
    "nvidia-uvm": (509, 0),
    "nvidia-uvm-tools": (509, 1),
}
LAB: dict[str, tuple[int, int] | None] = {name: (7, number) for number, name in enumerate(GOOD)}
MAJORS = {"nvidia": 195, "nvidia-uvm": 509}
NODES: dict[str, tuple[dict[str, Any], dict[str, int], str | None]] = {
    "A-VAL-02-complete": (GOOD, MAJORS, None),
    "A-VAL-02-535-calls-it-frontend": (GOOD, {"nvidia-frontend": 195, "nvidia-uvm": 509}, None),
    "A-VAL-02-no-uvm-tools": (
        {name: number for name, number in GOOD.items() if name != "nvidia-uvm-tools"},
        MAJORS,
        "/made/nvidia-uvm-tools is missing",
    ),
    "A-VAL-02-no-uvm": (
        {name: number for name, number in GOOD.items() if name != "nvidia-uvm"},
        MAJORS,
        "/made/nvidia-uvm is missing",
    ),
    "A-VAL-02-old-major": (
        {**GOOD, "nvidia-uvm": (508, 0)},
        MAJORS,
        "/made/nvidia-uvm is 508:0, expected 509:0",
    ),
    "A-VAL-02-plain-file": ({**GOOD, "nvidia0": None}, MAJORS, "/made/nvidia0 is not a character device"),
    "A-VAL-02-uvm-not-loaded": (GOOD, {"nvidia": 195}, "/proc/devices has no major for /made/nvidia-uvm"),
    "no-major-to-compare-with": (LAB, {"mem": 1}, None),
}


@pytest.mark.parametrize(("there", "majors", "problem"), NODES.values(), ids=NODES)
def test_device_nodes(
    monkeypatch: pytest.MonkeyPatch, there: dict[str, Any], majors: dict[str, int], problem: str | None
) -> None:
    nodes(monkeypatch, there)
    (finding,) = validation.check_devices(majors, [0], "/made")
    assert finding.level == (ERROR if problem else OK)
    assert (problem or "device nodes") in finding.message
    assert finding.evidence["compared"] is (majors != {"mem": 1})


VERSIONS: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "right": (("550.90.07", "550.90.07", {"libcuda.so.1": "550.90.07"}), OK, "are 550.90.07"),
    "old-module": (
        ("550.90.07", "535.183.01", {"libcuda.so.1": "550.90.07"}),
        ERROR,
        "the loaded driver is 535.183.01",
    ),
    "A-NVML-03": (("570.124.06", "570.124.06", {"libcuda.so.1": "570.124.04"}), ERROR, "libcuda.so.1 is 570.124.04"),
    "no-library": ((None, "550.90.07", {"libcuda.so.1": None}), ERROR, "libcuda.so.1 is missing"),
    "not-loaded": (("550.90.07", None, {}), ERROR, "no NVIDIA driver is loaded"),
}


@pytest.mark.parametrize(("arguments", "level", "words"), VERSIONS.values(), ids=VERSIONS)
def test_versions(arguments: tuple[Any, ...], level: str, words: str) -> None:
    (finding,) = validation.check_versions(*arguments)
    assert finding.level == level
    assert words in finding.message


def seen(uuid: str, pci: str, by: str = "bus driver nvml", **about: Any) -> dict[str, Any]:
    return {"uuid": uuid, "pci": pci, "name": "NVIDIA A100", "error": None, "seen_by": by.split(), **about}


BEFORE = [{"uuid": "GPU-a", "pci": "0000:01:00.0", "name": "A"}, {"uuid": "GPU-b", "pci": "0000:02:00.0", "name": "B"}]
A, B = seen("GPU-a", "0000:01:00.0"), seen("GPU-b", "0000:02:00.0")
PRESENT: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]], list[str], str]] = {
    "all": (BEFORE, [A, B], [], "return"),
    "A-XID-02-gone-from-the-bus": (BEFORE, [A], ["gpu.off_bus"], "quarantine"),
    "A-OPEN-02-not-driven": (BEFORE, [A, {**B, "uuid": None, "seen_by": ["bus"]}], ["validate.gpus"], "rollback"),
    "A-XID-02-lost": (BEFORE, [A, {**B, "error": "GPU is lost"}], ["gpu.lost"], "quarantine"),
    "replaced-board": (BEFORE[:1], [A, B], [], "return"),
    "nothing-known-before": ([], [A, B], [], "return"),
    "nothing-known-and-one-not-driven": ([], [A, {**B, "seen_by": ["bus"]}], ["validate.gpus"], "rollback"),
    "A-OPEN-01-none": ([], [], ["validate.gpus"], "rollback"),
}


@pytest.mark.parametrize(("before", "now", "checks", "act"), PRESENT.values(), ids=PRESENT)
def test_gpus(before: list[dict[str, Any]], now: list[dict[str, Any]], checks: list[str], act: str) -> None:
    found = validation.check_gpus(before, now)
    assert [finding.check for finding in found if finding.level == ERROR] == checks
    assert validation.Verdict(found).act == act


ROWS = {"corrected": 0, "uncorrected": 0, "pending": False, "failure": False}
MEMORY: dict[str, tuple[dict[str, Any], dict[str, Any], list[tuple[str, str]]]] = {
    "A-XID-03-nothing-new": ({"remapped_rows": ROWS}, {"remapped_rows": ROWS}, [("validate.memory", OK)]),
    "A-XID-03-failure": ({}, {"remapped_rows": {**ROWS, "failure": True}}, [("gpu.remap_failure", ERROR)]),
    "A-XID-03-pending-new": (
        {"remapped_rows": ROWS},
        {"remapped_rows": {**ROWS, "pending": True}},
        [("gpu.remap_pending", ERROR)],
    ),
    "A-XID-03-pending-before": (
        {"remapped_rows": {**ROWS, "pending": True}},
        {"remapped_rows": {**ROWS, "pending": True}},
        [("gpu.remap_pending", WARNING)],
    ),
    "A-XID-03-row-remapped": (
        {"remapped_rows": ROWS},
        {"remapped_rows": {**ROWS, "uncorrected": 1}},
        [("gpu.remapped", WARNING)],
    ),
    "A-XID-03-ecc-in-its-life": (
        {"ecc_uncorrected": {"volatile": 9, "aggregate": 9}},
        {"ecc_uncorrected": {"volatile": 1, "aggregate": 10}},
        [("gpu.ecc", ERROR)],
    ),
    "A-XID-03-ecc-old-ones": (
        {"ecc_uncorrected": {"volatile": 9, "aggregate": 9}},
        {"ecc_uncorrected": {"volatile": 0, "aggregate": 9}},
        [("validate.memory", OK)],
    ),
    "ecc-without-anything-before": ({}, {"ecc_uncorrected": {"volatile": 2, "aggregate": 9}}, [("gpu.ecc", WARNING)]),
}


@pytest.mark.parametrize(("before", "now", "expected"), MEMORY.values(), ids=MEMORY)
def test_memory(before: dict[str, Any], now: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    earlier = [{"uuid": "GPU-a", **before}] if before else []
    found = validation.check_memory(earlier, [{**A, **now}])
    assert [(finding.check, finding.level) for finding in found] == expected


def test_a_mismatch_logged_during_the_swap_is_over() -> None:  # A-NVML-01
    text = (
        "NVRM: API mismatch: the client has the version 550.90.07, but\nNVRM: this kernel module has the version "
        "535.183.01.  Please\n"
    )
    (finding,) = validation.check_health(health.findings(health.parse(text)))
    assert finding.level == WARNING


EARLIER = {
    "failed-target-at-init": ("NVRM: GPU 0000:41:00.0: RmInitAdapter failed! (0x26:0x56:1482)", WARNING),
    "failed-target-xid-143": ("NVRM: Xid (PCI:0000:41:00): 143, pid=1, x", WARNING),
    "memory-error-stays": ("NVRM: Xid (PCI:0000:41:00): 95, pid=1, x", ERROR),
    "off-the-bus-stays": ("NVRM: GPU 0000:41:00.0: GPU has fallen off the bus.", ERROR),
}


@pytest.mark.parametrize(("line", "level"), EARLIER.values(), ids=EARLIER)
def test_what_an_earlier_driver_said_is_not_held_against_the_one_loaded_after_it(line: str, level: str) -> None:
    found = health.findings(health.parse(f"1796000000.5 node1 kernel: {line}"))
    assert [finding.level for finding in validation.check_health(found, 1796000001.0)] == [level]
    assert [finding.level for finding in validation.check_health(found, 1796000000.0)] == [ERROR]
    assert [finding.level for finding in validation.check_health(found)] == [ERROR]


XIDS = {
    "A-XID-01-119-rollback": (119, "rollback"),
    "A-XID-03-64-quarantine": (64, "quarantine"),
    "A-XID-79-quarantine": (79, "quarantine"),
    "A-XID-31-application": (31, "return"),
}


@pytest.mark.parametrize(("number", "act"), XIDS.values(), ids=XIDS)
def test_xids_after_the_upgrade(number: int, act: str) -> None:
    found = validation.check_health(health.findings(health.parse(f"NVRM: Xid (PCI:0000:41:00): {number}, pid=1, x")))
    assert validation.Verdict(found).act == act


def test_services() -> None:
    text = (
        "Names=nvidia-dcgm.service dcgm.service\nActiveState=active\n\nNames=nvidia-fabricmanager.service\n"
        "ActiveState=failed\n"
    )
    states = validation.parse_active(text)
    found = validation.check_services(["dcgm.service", "nvidia-fabricmanager.service", "gone.service"], states)
    assert [finding.level for finding in found] == [OK, ERROR, ERROR]
    assert "nvidia-fabricmanager.service is failed, expected active" in found[1].message


MODULES: dict[str, tuple[list[str] | None, list[str], str]] = {
    "A-PEER-01-peermem-lost": (["nvidia", "nvidia_uvm", "nvidia_peermem"], ["nvidia", "nvidia_uvm"], WARNING),
    "A-PEER-01-gdrdrv-lost": (["gdrdrv", "nvidia", "nvidia_uvm"], ["nvidia", "nvidia_uvm"], WARNING),
    "uvm-lost": (["nvidia", "nvidia_uvm"], ["nvidia"], ERROR),
    "nothing-known": (None, ["nvidia", "nvidia_uvm"], OK),
    "nothing-known-and-no-uvm": (None, ["nvidia"], ERROR),
    "nouveau-went-away": (["nouveau"], ["nvidia"], OK),
}


@pytest.mark.parametrize(("before", "loaded", "level"), MODULES.values(), ids=MODULES)
def test_modules(before: list[str] | None, loaded: list[str], level: str) -> None:
    (finding,) = validation.check_modules(None if before is None else {"modules": before}, loaded)
    assert finding.level == level


def test_devices_to_compute() -> None:
    mig = seen(
        "GPU-m",
        "0000:03:00.0",
        mig={"current": True, "pending": True},
        mig_layout=[{"id": 1, "profile": 9, "start": 4}],
        mig_devices=[{"uuid": "MIG-1", "gpu_instance": 1, "compute_instance": 0}],
    )
    lost = {**B, "error": "GPU is lost"}
    assert validation.devices_to_compute([A, mig, lost]) == {"GPU-a": "GPU-a", "MIG-1": "GPU-m/9@4/0"}


def test_nothing_to_compute_on_is_an_error() -> None:  # A-MIG-01
    (finding,) = validation.check_compute([])
    assert finding.level == ERROR


def measured(copy: float, compute: float, benchmark: float | None = None) -> dict[str, Any]:
    return {"devices": {"GPU-a": {"copy_gib_s": copy, "compute_us": compute}}, "benchmark": benchmark}


COMPARED: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "equal": (measured(20, 100), measured(20, 100), ["ok", "ok"]),
    "within-tolerance": (measured(20, 100), measured(18.1, 109), ["ok", "ok"]),
    "copy-slower": (measured(20, 100), measured(17.9, 100), ["error", "ok"]),
    "compute-slower": (measured(20, 100), measured(20, 111), ["ok", "error"]),
    "faster": (measured(20, 100), measured(40, 50), ["ok", "ok"]),
    "benchmark-slower": (measured(20, 100, 300), measured(20, 100, 200), ["ok", "ok", "error"]),
    "not-measured": (measured(20, 100), {"devices": {}}, ["error"]),
}


@pytest.mark.parametrize(("baseline", "now", "expected"), COMPARED.values(), ids=COMPARED)
def test_compare(baseline: dict[str, Any], now: dict[str, Any], expected: list[str]) -> None:
    assert [finding.level for finding in validation.compare(baseline, now, 0.1)] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("busbw 391.2 GB/s\n", 391.2), ("1 2\n3e2 4\ndone\n", 4.0), ("-1.5", -1.5), ("no number", None), ("", None)],
)
def test_last_number(text: str, expected: float | None) -> None:
    assert validation.last_number(text) == expected


DCGM3 = {
    "DCGM GPU Diagnostic": {
        "test_categories": [
            {"category": "Deployment", "tests": [{"name": "Denylist", "results": [{"status": "Pass"}]}]},
            {"category": "Hardware", "tests": [{"name": "GPU Memory", "results": [{"gpu_id": "0", "status": "Fail"}]}]},
        ]
    }
}
DCGM4 = {
    "DCGM Diagnostic": {
        "test_categories": [
            {
                "category": "Integration",
                "tests": [
                    {
                        "name": "pcie",
                        "results": [
                            {"entity_group": "GPU", "entity_group_id": 1, "entity_id": 0, "status": "Pass"},
                            {
                                "entity_group": "GPU",
                                "entity_group_id": 1,
                                "entity_id": 1,
                                "status": "Fail",
                                "warnings": [{"error_id": 46, "warning": "Bandwidth of GPU 1 is too low"}],
                            },
                        ],
                        "test_summary": {"status": "Fail"},
                    },
                    {
                        "name": "nvbandwidth",
                        "results": [{"entity_id": 0, "status": "Skip"}],
                        "test_summary": {"status": "Skip"},
                    },
                ],
            }
        ]
    },
    "entity_groups": [{"entities": [{"entity_id": 0}, {"entity_id": 1}], "entity_group": "GPU", "entity_group_id": 1}],
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (json.dumps(DCGM3), ["GPU Memory"]),
        (json.dumps(DCGM4), ["pcie"]),
        ('Warning: x\n{"DCGM Diagnostic": {"status": "Pass"}}\nWarning: y {', []),
        ("Error: unable to connect", None),
    ],
    ids=["dcgm-3", "dcgm-4", "passed", "no-json"],
)
def test_dcgm_failures(text: str, expected: list[str] | None) -> None:
    assert validation.dcgm_failures(text) == expected


@pytest.mark.parametrize(
    ("findings", "act"),
    [
        ([], "return"),
        ([Finding("x", WARNING, "m")], "return"),
        ([Finding("validate.versions", ERROR, "m")], "rollback"),
        ([Finding("validate.versions", ERROR, "m"), Finding("gpu.off_bus", ERROR, "m")], "quarantine"),
        ([Finding("driver.wedged", ERROR, "m")], "quarantine"),
        ([Finding("health.xid", ERROR, "m", {"act": "replace"})], "quarantine"),
    ],
    ids=["nothing", "warning", "software", "A-XID-02-hardware-too", "A-MOD-13-wedged", "A-XID-79"],
)
def test_what_to_do(findings: list[Finding], act: str) -> None:
    verdict = validation.Verdict(findings)
    assert (verdict.act, verdict.ok) == (act, act == "return")
