# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Joining what bus, driver and library say; four versions; a driver that is wedged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils import execution
from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Completed
from ansible_collections.gpufleet.driver.plugins.module_utils.findings import ERROR, OK, WARNING
from ansible_collections.gpufleet.driver.plugins.module_utils.host import facts, gpus

LOADED = gpus.LoadedDriver("595.71.05", "proprietary", "x86_64")

VERSIONS: dict[str, tuple[tuple[Any, ...], str, str, bool | None]] = {
    "A-NVML-01-packages-moved": (
        ("550.90.07", {"libnvidia-ml.so.1": "550.107.02"}, "550.107.02", "550.107.02"),
        "driver.versions",
        ERROR,
        True,
    ),
    "A-NVML-01-module-on-disk-did-not-move": (
        ("550.90.07", {"libnvidia-ml.so.1": "550.107.02"}, "550.90.07", "550.107.02"),
        "driver.versions",
        ERROR,
        False,
    ),
    "A-NVML-02-one-library": (
        ("460.56", {"libnvidia-ml.so.1": "460.56", "libcuda.so.1": "460.73.01"}, "460.56", None),
        "driver.versions",
        ERROR,
        False,
    ),
    "A-NVML-03-last-field-differs": (
        ("570.124.06", {"libnvidia-ml.so.1": "570.124.04"}, "570.124.06", None),
        "driver.versions",
        ERROR,
        False,
    ),
    "A-NVML-05-only-packages-moved": (
        ("570.133.20", {"libnvidia-ml.so.1": "570.133.20"}, "570.158.01", "570.158.01"),
        "driver.versions",
        WARNING,
        True,
    ),
    "A-BOOT-02-disk-is-newer-than-loaded": (
        ("390.12", {"libnvidia-ml.so.1": "390.25"}, "390.25", "390.25"),
        "driver.versions",
        ERROR,
        True,
    ),
    "all-equal": (
        ("550.90.07", {"libnvidia-ml.so.1": "550.90.07", "libcuda.so.1": "550.90.07"}, "550.90.07", "550.90.07"),
        "driver.versions",
        OK,
        None,
    ),
    "no-library": (("550.90.07", {"libnvidia-ml.so.1": None}, "550.90.07", None), "driver.library", ERROR, None),
    "not-loaded": ((None, {"libnvidia-ml.so.1": "550.90.07"}, "550.90.07", None), "driver.loaded", ERROR, None),
    "no-gpu": ((None, {"libnvidia-ml.so.1": None}, None, None, False), "driver.loaded", OK, None),
}


@pytest.mark.parametrize(("arguments", "check", "level", "cures"), VERSIONS.values(), ids=VERSIONS)
def test_versions(arguments: tuple[Any, ...], check: str, level: str, cures: bool | None) -> None:
    (finding,) = facts.version_findings(*arguments)
    assert (finding.check, finding.level, finding.evidence.get("reload_cures")) == (check, level, cures)


def stat_line(pid: int, name: str, state: str) -> str:
    return f"{pid} ({name}) {state} 1 {pid} {pid} 0 -1 4194304 0 0 0 0 0 0 0 0 20 0 1 0 9"


def process(proc: Path, pid: int, name: str, state: str, wchan: str = "0", stack: str = "") -> None:
    place = proc / str(pid)
    place.mkdir(parents=True, exist_ok=True)
    (place / "stat").write_text(stat_line(pid, name, state))
    (place / "wchan").write_text(wchan)
    (place / "stack").write_text(stack)


STUCK = {
    "A-MOD-07-persistenced": (("nvidia-persiste", "D", "0", ""), True),
    "A-MOD-07-by-wait-channel": (("python3", "D", "nvidia_ioctl", ""), True),
    "A-MOD-13-by-stack": (
        ("dcgm-exporter", "D", "0", "[<0>] nvidia_dev_put_uuid+0x8a/0x90 [nvidia]\n[<0>] do_syscall_64+0x1/0x2\n"),
        True,
    ),
    "name-with-brackets": (("a) D (x", "D", "rm_ioctl", ""), True),
    "not-waiting": (("nvidia-smi", "S", "0", ""), False),
    "A-MOD-08-zombie": (("nvidia-smi", "Z", "0", ""), False),
    "disk": (("mysqld", "D", "io_schedule", "[<0>] blk_mq+0x1/0x2\n"), False),
}


@pytest.mark.parametrize(("about", "expected"), STUCK.values(), ids=STUCK)
def test_stuck_processes(tmp_path: Path, about: tuple[str, str, str, str], expected: bool) -> None:
    process(tmp_path, 4242, *about)
    (tmp_path / "self").mkdir()
    assert [item.pid for item in facts.stuck_processes(str(tmp_path))] == ([4242] if expected else [])


def test_a_short_sleep_in_the_driver_is_not_stuck(tmp_path: Path) -> None:
    process(tmp_path, 1, "nvidia-smi", "D")
    process(tmp_path, 2, "nvidia-persiste", "D")
    naps: list[float] = []

    def pause(seconds: float) -> None:
        naps.append(seconds)
        process(tmp_path, 1, "nvidia-smi", "R")

    assert [item.pid for item in facts.wedged(str(tmp_path), pause)] == [2]
    assert naps == [0.5, 0.5]


def test_nobody_is_stuck_on_this_machine() -> None:
    assert facts.wedged() == []


def nvml_gpu(**about: Any) -> dict[str, Any]:
    return {"index": 0, "error": None, "uuid": "GPU-a", "pci": "0000:01:00.0", "pci_device_id": "20b2", **about}


def test_merge_counts_who_sees_each_gpu() -> None:  # A-OPEN-02, A-XID-02
    bus = [
        gpus.PciDevice("0000:01:00.0", "20b2", "gpu", "nvidia", "ampere"),
        gpus.PciDevice("0000:02:00.0", "15f8", "gpu", None, "pascal"),
        gpus.PciDevice("0000:07:00.0", "1af1", "nvswitch", None, None),
    ]
    taken = [gpus.ProcGpu("0000:01:00.0", "NVIDIA A100", "GPU-a", 0, False)]
    merged = facts.merge_gpus(bus, taken, [nvml_gpu(name="NVIDIA A100-SXM4-80GB")])
    assert [(gpu["pci"], gpu["seen_by"]) for gpu in merged] == [
        ("0000:01:00.0", ["bus", "driver", "nvml"]),
        ("0000:02:00.0", ["bus"]),
    ]
    assert (merged[0]["name"], merged[0]["minor"]) == ("NVIDIA A100-SXM4-80GB", 0)
    found = facts.gpu_findings(merged, LOADED, mps=False, vgpu_host=False)
    assert [(finding.check, finding.level) for finding in found] == [
        ("gpu.not_driven", ERROR),
        ("gpu.supported", ERROR),
    ]


def test_a_lost_gpu_is_the_one_left_over() -> None:  # A-XID-02
    taken = [gpus.ProcGpu(f"0000:0{n}:00.0", "x", f"GPU-{n}", n, False) for n in (1, 2)]
    lost = {"index": 1, "error": "GPU is lost"}
    merged = facts.merge_gpus([], taken, [nvml_gpu(uuid="GPU-1"), lost])
    assert [(gpu["uuid"], gpu["error"]) for gpu in merged] == [("GPU-1", None), ("GPU-2", "GPU is lost")]


GPUS: dict[str, tuple[dict[str, Any], dict[str, Any], list[tuple[str, str]]]] = {
    "A-OPEN-01": ({"pci_device_id": "2b85"}, {}, [("gpu.supported", ERROR)]),
    "A-XID-03-pending": (
        {"remapped_rows": {"corrected": 0, "uncorrected": 1, "pending": True, "failure": False}},
        {},
        [("gpu.remap_pending", WARNING)],
    ),
    "A-XID-03-failure": (
        {"remapped_rows": {"corrected": 0, "uncorrected": 1, "pending": False, "failure": True}},
        {},
        [("gpu.remap_failure", ERROR)],
    ),
    "A-XID-03-retired-pages": ({"retired_pending": True}, {}, [("gpu.remap_pending", WARNING)]),
    "A-MOD-12-exclusive-without-mps": ({"compute_mode": "exclusive_process"}, {}, [("gpu.compute_mode", WARNING)]),
    "A-MOD-12-exclusive-with-mps": ({"compute_mode": "exclusive_process"}, {"mps": True}, []),
    "A-MOD-10-mig-pending": ({"mig": {"current": False, "pending": True}}, {}, [("gpu.mig_pending", WARNING)]),
    "A-MIG-01-instances-gone": (
        {"mig": {"current": True, "pending": True}, "mig_layout": []},
        {},
        [("gpu.mig_empty", WARNING)],
    ),
    "ecc-pending": ({"ecc": {"current": True, "pending": False}}, {}, [("gpu.ecc_pending", WARNING)]),
    "A.16-reset-required": ({"error": "GPU requires reset"}, {}, [("gpu.lost", ERROR)]),
    "good": ({}, {}, []),
}


@pytest.mark.parametrize(("about", "options", "expected"), GPUS.values(), ids=GPUS)
def test_gpu_findings(about: dict[str, Any], options: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    merged = facts.merge_gpus([], [], [nvml_gpu(**about)])
    found = facts.gpu_findings(merged, LOADED, **{"mps": False, "vgpu_host": False, **options})
    assert [(finding.check, finding.level) for finding in found] == expected


DOMAINS = {
    "A-FAB-05": (
        {"state": "completed", "status": "success", "cluster": "5ca1ab1e-0000-4000-8000-000000000001", "clique": 32766},
        "5ca1ab1e-0000-4000-8000-000000000001/32766",
    ),
    "one-host-fabric": (
        {"state": "completed", "status": "success", "cluster": "00000000-0000-0000-0000-000000000000", "clique": 0},
        None,
    ),
    "in-progress": ({"state": "in_progress", "cluster": "5ca1ab1e-0000-4000-8000-000000000001", "clique": 1}, None),
    "none": (None, None),
}


@pytest.mark.parametrize(("fabric", "expected"), DOMAINS.values(), ids=DOMAINS)
def test_domain(fabric: dict[str, Any] | None, expected: str | None) -> None:
    assert facts.domain([nvml_gpu(fabric=fabric)]) == expected


def test_kernel_log_falls_back_to_dmesg(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu 1\nbtime 1748869900\n")

    def run(argv: list[str], *, timeout: float) -> Completed:
        if argv[0] == "journalctl":
            assert "--since=@1748870000" in argv
            return Completed(tuple(argv), 1, "", "No journal files were found.", 0.1)
        old, new = "NVRM: Xid (PCI:0000:41:00): 48, x", "NVRM: Xid (PCI:0000:41:00): 79, x"
        return Completed(tuple(argv), 0, f"[   10.000000] {old}\n[  200.000000] {new}\n", "", 0.1)

    events, source = facts.kernel_log(run, str(tmp_path), 1_748_870_000.0, 10)
    assert source == "dmesg"
    assert [(event.detail["xid"], event.at) for event in events] == [(79, 1_748_870_100.0)]


def test_a_log_that_cannot_be_read_is_not_a_quiet_one() -> None:
    events, source = facts.kernel_log(lambda argv, timeout: Completed((), 1, "", "denied", 0.1), "/proc", None, 10)
    (finding,) = facts.log_findings(events, source)
    assert (source, finding.level) == (None, WARNING)


def test_this_machine(tmp_path: Path) -> None:
    """Everything at once, for real: each probe that finds nothing must say so and none may raise."""
    roots = facts.Roots(nvml="libnvidia-ml-that-is-not-there.so.1", pci=str(tmp_path))
    seen = facts.observe(execution.run, timeout=20, roots=roots)
    assert seen["kernel"]["running"] == Path("/proc/sys/kernel/osrelease").read_text().strip()
    assert seen["boot"]["id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert seen["boot"]["host"] == Path("/proc/sys/kernel/hostname").read_text().strip()
    assert seen["library"]["status"] == "library_not_found"
    assert {*facts.SECTIONS, "secure_boot"} <= set(seen)
    assert all(set(finding) == {"check", "level", "message", "evidence", "next"} for finding in seen["findings"])


def test_sections_that_are_not_asked_for_are_left_out() -> None:
    seen = facts.observe(execution.run, sections=(), timeout=20)
    assert set(facts.SECTIONS).isdisjoint(seen)
