# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Parsers of what the driver, PCI and nvidia-smi say, and the table of supported GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.findings import ERROR, OK, WARNING
from ansible_collections.gpufleet.driver.plugins.module_utils.host import facts, gpus

VERSION_LINES = {
    "A-NVML-01-proprietary": (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Fri May 31 09:35:42 UTC 2024\n",
        ("550.90.07", "proprietary", "x86_64", "Fri May 31 09:35:42 UTC 2024", None),
    ),
    "A.16-with-compiler": (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n"
        "GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04) \n",
        (
            "535.183.01",
            "proprietary",
            "x86_64",
            "Sun May 12 19:39:15 UTC 2024",
            "gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)",
        ),
    ),
    "A.16-open": (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  "
        "(dvs-builder@U00-A00-00-0-0)  Thu Jan 23 22:00:00 UTC 2025\n",
        (
            "570.86.15",
            "open",
            "x86_64",
            "Release Build (dvs-builder@U00-A00-00-0-0) Thu Jan 23 22:00:00 UTC 2025",
            None,
        ),
    ),
    "A.16-open-without-date": (
        "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.95.05  Release Build  (root@gpu-node-01)\n",
        ("580.95.05", "open", "aarch64", "Release Build (root@gpu-node-01)", None),
    ),
    "A.16-builder-cut": (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (root@gpu-\n",
        ("580.95.05", "open", "x86_64", "Release Build (root@gpu-", None),
    ),
    "A.16-localised-date": (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  390.25  mié 24 ene 20:02:43 PST 2018\n",
        ("390.25", "proprietary", "x86_64", "mié 24 ene 20:02:43 PST 2018", None),
    ),
    "A.16-two-fields-and-nothing-else": (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  565.77",
        ("565.77", "proprietary", "x86_64", "", None),
    ),
    "A-BOOT-02-loading-line": (
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  390.12  Wed Dec 20 07:19:16 PST 2017 (using threads)",
        ("390.12", "proprietary", "x86_64", "Wed Dec 20 07:19:16 PST 2017 (using threads)", None),
    ),
    "A-XID-02-loading-line": (
        "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.158.01  Release Build  (builder@host)  "
        "Mon Jun  2 13:13:04 UTC 2025",
        ("570.158.01", "open", "x86_64", "Release Build (builder@host) Mon Jun 2 13:13:04 UTC 2025", None),
    ),
}


@pytest.mark.parametrize(("text", "expected"), VERSION_LINES.values(), ids=VERSION_LINES)
def test_parse_version(text: str, expected: tuple[str | None, ...]) -> None:
    loaded = gpus.parse_version(text)
    assert loaded is not None
    assert (loaded.version, loaded.flavour, loaded.arch, loaded.built, loaded.compiler) == expected


@pytest.mark.parametrize("text", ["", "NVRM version: (null)", "GCC version:  gcc version 11.4.0", "550.90.07"])
def test_parse_version_of_something_else(text: str) -> None:
    assert gpus.parse_version(text) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [("Dual MIT/GPL\n", "open"), ("NVIDIA", "proprietary"), ("GPL", None), ("", None)],
    ids=["A.16-open", "A-OPEN-01-proprietary", "other", "absent"],
)
def test_flavour_of_license(text: str, expected: str | None) -> None:
    assert gpus.flavour_of_license(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("00000000:41:00.0", "0000:41:00.0"),
        ("0000:41:00", "0000:41:00.0"),
        ("0000:B6:00.0", "0000:b6:00.0"),
        ("41:00.0", "0000:41:00.0"),
        ("00010000:01:00.0", "10000:01:00.0"),
        ("weird", "weird"),
    ],
)
def test_bus_id(text: str, expected: str) -> None:
    assert gpus.bus_id(text) == expected


def information(uuid: str, minor: str, excluded: str = "No") -> str:
    return (
        f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 66\nGPU UUID: \t {uuid}\nVideo BIOS: \t 96.00.61.00.01\n"
        f"Bus Type: \t PCIe\nDMA Size: \t 52 bits\nBus Location: \t 0000:41:00.0\nDevice Minor: \t {minor}\n"
        f"GPU Firmware: \t 550.90.07\nGPU Excluded:\t {excluded}\n"
    )


def test_read_proc_gpus(tmp_path: Path) -> None:
    for address, text in {
        "0000:41:00.0": information("GPU-5ca1ab1e-0000-4000-8000-000000000000", "0"),
        "0000:c1:00.0": information("GPU-????????-????-????-????-????????????", "1", "Yes"),
    }.items():
        place = tmp_path / "gpus" / address
        place.mkdir(parents=True)
        (place / "information").write_text(text)
    first, second = gpus.read_proc_gpus(str(tmp_path))
    assert first == gpus.ProcGpu(
        "0000:41:00.0", "NVIDIA H100 80GB HBM3", "GPU-5ca1ab1e-0000-4000-8000-000000000000", 0, False
    )
    assert (second.pci, second.uuid, second.minor, second.excluded) == ("0000:c1:00.0", None, 1, True)


def test_nothing_is_loaded(tmp_path: Path) -> None:
    assert gpus.read_loaded(str(tmp_path)) is None
    assert gpus.read_params(str(tmp_path)) == {}
    assert gpus.read_proc_gpus(str(tmp_path)) == []


def test_read_params(tmp_path: Path) -> None:
    (tmp_path / "params").write_text('ResmanDebugLevel: 4294967295\nRegistryDwords: ""\nEnableGpuFirmware: 18\n')
    assert gpus.read_params(str(tmp_path)) == {
        "ResmanDebugLevel": "4294967295",
        "RegistryDwords": '""',
        "EnableGpuFirmware": "18",
    }


def pci_device(root: Path, address: str, vendor: str, device: str, pci_class: str, driver: str | None = None) -> None:
    place = root / "devices" / address
    place.mkdir(parents=True)
    for name, text in (("vendor", vendor), ("device", device), ("class", pci_class)):
        (place / name).write_text(text + "\n")
    if driver:
        (root / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (place / "driver").symlink_to(root / "drivers" / driver)


def test_scan_pci(tmp_path: Path) -> None:
    pci_device(tmp_path, "0000:00:02.0", "0x1a03", "0x2000", "0x030000", "ast")
    pci_device(tmp_path, "0000:1b:00.0", "0x10de", "0x2330", "0x030200", "nvidia")
    pci_device(tmp_path, "0000:1b:00.1", "0x10de", "0x10f7", "0x040300")
    pci_device(tmp_path, "0000:65:00.0", "0x10de", "0x1b38", "0x030000")
    pci_device(tmp_path, "0000:07:00.0", "0x10de", "0x22a3", "0x068000")
    assert gpus.scan_pci(str(tmp_path / "devices")) == [
        gpus.PciDevice("0000:07:00.0", "22a3", "nvswitch", None, None),
        gpus.PciDevice("0000:1b:00.0", "2330", "gpu", "nvidia", "hopper"),
        gpus.PciDevice("0000:65:00.0", "1b38", "gpu", None, "pascal"),
    ]


@pytest.mark.parametrize(
    ("device_id", "expected"),
    [
        ("13bd", "maxwell"),  # Tesla M10
        ("13f2", "maxwell"),  # Tesla M60
        ("17fd", "maxwell"),  # Tesla M40
        ("15f8", "pascal"),  # Tesla P100 PCIe
        ("1b38", "pascal"),  # Tesla P40
        ("1c81", "pascal"),  # GTX 1050
        ("1db6", "volta"),  # V100 PCIe 32 GB
        ("1eb8", "turing"),  # T4
        ("2184", "turing"),  # GTX 1660
        ("20b2", "ampere"),  # A100 SXM 80 GB
        ("2236", "ampere"),  # A10
        ("25b6", "ampere"),  # A2, A16
        ("26b9", "ada"),  # L40S
        ("27b8", "ada"),  # L4
        ("2330", "hopper"),  # H100 SXM
        ("2321", "hopper"),  # H100 NVL
        ("2335", "hopper"),  # H200 SXM
        ("2342", "grace-hopper"),  # GH200 120 GB
        ("2348", "grace-hopper"),  # GH200 144 GB
        ("2901", "blackwell"),  # B200
        ("2941", "blackwell"),  # GB200
        ("2b85", "blackwell"),  # RTX 5090
        ("2bb5", "blackwell"),  # RTX PRO 6000 Server
        ("3182", "blackwell"),  # B300
        ("0fc6", None),
        ("ffff", None),
    ],
)
def test_architecture(device_id: str, expected: str | None) -> None:
    assert gpus.architecture(device_id) == expected


SUPPORT = {
    "A-OPEN-01-proprietary-on-Blackwell": (("2b85", "595", "proprietary"), ERROR, "open kernel modules"),
    "A-OPEN-01-open-on-Blackwell": (("2b85", "595", "open"), OK, "blackwell"),
    "A-OPEN-01-proprietary-on-Grace-Hopper": (("2342", "570", "proprietary"), ERROR, "open kernel modules"),
    "A-OPEN-01-open-on-Volta": (("1db6", "570", "open"), ERROR, "proprietary"),
    "A-OPEN-01-Hopper-open": (("2330", "580", "open"), OK, "hopper"),
    "A-OPEN-01-Hopper-proprietary": (("2330", "580", "proprietary"), OK, "hopper"),
    "A-OPEN-01-Turing-proprietary": (("1eb8", "595", "proprietary"), OK, "turing"),
    "A-OPEN-02-P100-on-595": (("15f8", "595", "proprietary"), ERROR, "580 is the last branch"),
    "A-OPEN-02-GTX-1050-on-595": (("1c81", "595", "open"), ERROR, "580 is the last branch"),
    "A-OPEN-02-V100-on-590": (("1db6", "590", "proprietary"), ERROR, "580 is the last branch"),
    "A-OPEN-02-V100-on-580": (("1db6", "580", "proprietary"), OK, "volta"),
    "A-OPEN-02-Pascal-vGPU-host": (("1b38", "580", "proprietary", True), ERROR, "535 is the last branch"),
    "A-OPEN-02-Pascal-vGPU-host-535": (("1b38", "535", "proprietary", True), OK, "pascal"),
    "open-before-515": (("20b2", "510", "open"), ERROR, "no open kernel modules"),
    "unknown-GPU": (("ffff", "580", "open"), WARNING, "not in the table"),
}


@pytest.mark.parametrize(("arguments", "level", "words"), SUPPORT.values(), ids=SUPPORT)
def test_supports(arguments: tuple[str, str, str], level: str, words: str) -> None:
    finding = gpus.supports(*arguments)
    assert (finding.check, finding.level) == ("gpu.supported", level)
    assert words in finding.message
    assert (finding.next is None) == (level == OK)


@pytest.mark.parametrize(
    ("rc", "word"),
    [
        (0, "ok"),
        (6, "no_device"),
        (9, "driver_not_loaded"),
        (12, "library_not_found"),
        (15, "gpu_lost"),
        (18, "mismatch"),
        (124, "hung"),
        (137, "hung"),
        (127, "not_installed"),
        (255, "error"),
    ],
    ids=lambda value: f"A.16-rc-{value}" if isinstance(value, int) else value,
)
def test_smi_status(rc: int, word: str) -> None:
    assert gpus.smi_status(rc)[0] == word


def smi_xml(dtd: str, driver: str, body: str, attached: int = 1) -> str:
    return f"""<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "{dtd}">
<nvidia_smi_log>
 <timestamp>Tue Jul  1 10:00:00 2025</timestamp>
 <driver_version>{driver}</driver_version>
 <cuda_version>12.0</cuda_version>
 <attached_gpus>{attached}</attached_gpus>
 <gpu id="00000000:41:00.0">
  <product_name>NVIDIA A100-SXM4-80GB</product_name>
  <product_architecture>Ampere</product_architecture>
  <persistence_mode>Enabled</persistence_mode>
  <mig_mode><current_mig>Disabled</current_mig><pending_mig>Disabled</pending_mig></mig_mode>
  <mig_devices>None</mig_devices>
  <uuid>GPU-5ca1ab1e-0000-4000-8000-000000000000</uuid>
  <compute_mode>Default</compute_mode>
  <pci><pci_device_id>0x20B210DE</pci_device_id></pci>
  <ecc_mode><current_ecc>Enabled</current_ecc><pending_ecc>Enabled</pending_ecc></ecc_mode>
  {body}
 </gpu>
</nvidia_smi_log>"""


REMAPPED = (
    "<remapped_rows><remapped_row_corr>0</remapped_row_corr><remapped_row_unc>1</remapped_row_unc>"
    "<remapped_row_pending>Yes</remapped_row_pending><remapped_row_failure>No</remapped_row_failure></remapped_rows>"
)
BRANCHES = {
    "A-VAL-01-v11-510": smi_xml(
        "nvsmi_device_v11.dtd",
        "510.108.03",
        "<clocks_throttle_reasons><clocks_throttle_reason_gpu_idle>Active</clocks_throttle_reason_gpu_idle>"
        "</clocks_throttle_reasons><power_readings><power_draw>61.10 W</power_draw><power_limit>400.00 W</power_limit>"
        "<default_power_limit>400.00 W</default_power_limit></power_readings>" + REMAPPED,
    ),
    "A-VAL-01-v12-525": smi_xml(
        "nvsmi_device_v12.dtd",
        "525.147.05",
        "<clocks_throttle_reasons></clocks_throttle_reasons><power_readings><power_draw>61.10 W</power_draw>"
        "<power_limit>400.00 W</power_limit><default_power_limit>400.00 W</default_power_limit></power_readings>"
        + REMAPPED,
    ),
    "A-VAL-01-v12-570": smi_xml(
        "nvsmi_device_v12.dtd",
        "570.124.04",
        "<clocks_event_reasons></clocks_event_reasons><gpu_power_readings><average_power_draw>61.10 W"
        "</average_power_draw><instant_power_draw>60.00 W</instant_power_draw><current_power_limit>400.00 W"
        "</current_power_limit><default_power_limit>400.00 W</default_power_limit></gpu_power_readings>"
        "<module_power_readings><power_draw>N/A</power_draw></module_power_readings>" + REMAPPED,
    ),
    "A-VAL-01-v13-580": smi_xml(
        "nvsmi_device_v13.dtd",
        "580.65.06",
        "<clocks_event_reasons></clocks_event_reasons><gpu_recovery_action>None</gpu_recovery_action>"
        "<gpu_power_readings><instant_power_draw>60.00 W</instant_power_draw><current_power_limit>400.00 W"
        "</current_power_limit><default_power_limit>400.00 W</default_power_limit></gpu_power_readings>" + REMAPPED,
    ),
}


@pytest.mark.parametrize("text", BRANCHES.values(), ids=BRANCHES)
def test_smi_xml_of_each_branch(text: str) -> None:
    report = gpus.parse_smi_xml(text)
    assert (report.cuda_version, report.notes) == ("12.0", [])
    gpu = facts.gpu_of_smi(report.gpus[0])
    assert gpu["pci"] == "0000:41:00.0"
    assert gpu["pci_device_id"] == "20b2"
    assert gpu["persistence"] is True
    assert gpu["compute_mode"] == "default"
    assert gpu["mig"] == {"current": False, "pending": False}
    assert (gpu["power_limit"], gpu["power_limit_default"]) == (400.0, 400.0)
    assert gpu["remapped_rows"] == {"corrected": 0, "uncorrected": 1, "pending": True, "failure": False}
    assert (gpu["error"], gpu["unknown"]) == (None, {})


def test_unknown_schema_is_noted_and_read() -> None:  # A-VAL-01
    report = gpus.parse_smi_xml(smi_xml("nvsmi_device_v14.dtd", "615.71.09", ""))
    assert report.driver_version == "615.71.09"
    assert report.notes == ["unknown schema nvsmi_device_v14.dtd; fields may have moved"]
    assert report.gpus[0]["power_limit"] is None


def test_a_gpu_that_is_not_described_is_noted() -> None:  # A-OPEN-02
    report = gpus.parse_smi_xml(smi_xml("nvsmi_device_v12.dtd", "570.124.04", "", attached=2))
    assert report.notes == ["2 GPUs are attached, 1 are described"]


VALUES = {
    "A-MOD-12-exclusive": ("<compute_mode>Exclusive_Process</compute_mode>", "compute_mode", "Exclusive_Process"),
    "A-MOD-10-mig-pending": (
        "<mig_mode><current_mig>Disabled</current_mig><pending_mig>Enabled</pending_mig></mig_mode>",
        "mig_pending",
        "Enabled",
    ),
    "A-FAB-03-in-progress": (
        "<fabric><state>In Progress</state><status>N/A</status></fabric>",
        "fabric_state",
        "In Progress",
    ),
    "A-FAB-04-completed": (
        "<fabric><state>Completed</state><status>Success</status></fabric>",
        "fabric_status",
        "Success",
    ),
    "A-XID-03-retirement-old": (
        "<retired_pages><pending_blacklist>Yes</pending_blacklist></retired_pages>",
        "retired_pending",
        "Yes",
    ),
    "A-XID-03-retirement": (
        "<retired_pages><pending_retirement>Yes</pending_retirement></retired_pages>",
        "retired_pending",
        "Yes",
    ),
    "A-PM-01-persistence-off": ("<persistence_mode>Disabled</persistence_mode>", "persistence", "Disabled"),
    "A.16-N/A": ("<compute_mode>N/A</compute_mode>", "compute_mode", None),
    "A.16-ERR": ("<compute_mode>ERR!</compute_mode>", "compute_mode", None),
    "A.16-unknown-error": ("<uuid>Unknown Error</uuid>", "uuid", None),
    "A.16-requires-reset": ("<uuid>[GPU requires reset]</uuid>", "uuid", None),
    "A.16-absent": ("", "fabric_state", None),
}


@pytest.mark.parametrize(("element", "field", "expected"), VALUES.values(), ids=VALUES)
def test_smi_values(element: str, field: str, expected: str | None) -> None:
    text = f'<nvidia_smi_log><gpu id="00000000:41:00.0">{element}</gpu></nvidia_smi_log>'
    gpu = gpus.parse_smi_xml(text).gpus[0]
    assert gpu[field] == expected
    assert (field in gpu["bad"]) == any(word in element for word in ("ERR!", "Error", "reset"))


def test_gpu_that_requires_reset_is_an_error() -> None:  # A.16
    text = '<nvidia_smi_log><gpu id="00000000:41:00.0"><uuid>[GPU requires reset]</uuid></gpu></nvidia_smi_log>'
    assert facts.gpu_of_smi(gpus.parse_smi_xml(text).gpus[0])["error"] == "GPU requires reset"


def test_mig_devices_of_smi() -> None:  # A-MIG-01
    devices = "<mig_devices><mig_device><index>0</index><gpu_instance_id>1</gpu_instance_id><compute_instance_id>0"
    devices += "</compute_instance_id></mig_device></mig_devices>"
    text = f'<nvidia_smi_log><gpu id="00000000:41:00.0">{devices}</gpu></nvidia_smi_log>'
    assert gpus.parse_smi_xml(text).gpus[0]["mig_devices"] == [{"gpu_instance": "1", "compute_instance": "0"}]
    none = '<nvidia_smi_log><gpu id="00000000:41:00.0"><mig_devices>None</mig_devices></gpu></nvidia_smi_log>'
    assert gpus.parse_smi_xml(none).gpus[0]["mig_devices"] == []


@pytest.mark.parametrize("text", ["", "No devices were found", "<html></html>", "<nvidia_smi_log>"])
def test_no_xml(text: str) -> None:
    with pytest.raises(ValueError, match="nvidia-smi -q -x"):
        gpus.parse_smi_xml(text)
