# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The kernel log, in the forms in which logs are had, and what each message means for an upgrade."""

from __future__ import annotations

from typing import Any

import pytest

from ansible_collections.gpufleet.driver.plugins.module_utils.findings import ERROR, OK, WARNING
from ansible_collections.gpufleet.driver.plugins.module_utils.host import health

BOOT = 1_748_869_900.0

XID_119 = (
    "NVRM: Xid (PCI:0000:41:00): 119, pid=8123, name=nvidia-smi, Timeout after 45s of waiting for RPC response from "
    "GPU0 GSP! Expected function 76 (GSP_RM_CONTROL) (0x20800a4c 0x4)."
)
OFF_BUS = """\
NVRM: The NVIDIA GPU 0000:b6:00.0
NVRM: (PCI ID: 10de:2330) installed in this system has
NVRM: fallen off the bus and is not responding to commands.
"""
LEGACY = """\
NVRM: The NVIDIA Tesla P100-PCIE-16GB GPU installed in this system is
NVRM:  supported through the NVIDIA 580.xx Legacy drivers. Please
NVRM:  visit http://www.nvidia.com/object/unix.html for more
NVRM:  information.  The 595.71.05 NVIDIA driver will ignore
NVRM:  this GPU.  Continuing probe...
"""

EVENTS: dict[str, tuple[str, str, str | None, dict[str, Any]]] = {
    "A-XID-01": (
        XID_119,
        "xid",
        "0000:41:00.0",
        {"xid": 119, "pid": 8123, "process": "nvidia-smi"},
    ),
    "A-XID-01-120-unknown-process": (
        "NVRM: Xid (PCI:0000:41:00): 120, pid='<unknown>', name=<unknown>, GSP task panicked",
        "xid",
        "0000:41:00.0",
        {"xid": 120, "pid": None, "process": "<unknown>", "says": "GSP task panicked"},
    ),
    "xid-without-process": (
        "NVRM: Xid (PCI:0000:c1:00.0): 48, Double Bit ECC Error",
        "xid",
        "0000:c1:00.0",
        {"xid": 48, "pid": None, "process": None, "says": "Double Bit ECC Error"},
    ),
    "A-XID-03-64": (
        "NVRM: Xid (PCI:0000:01:00): 64, pid=0, Failed to remap row",
        "xid",
        "0000:01:00.0",
        {"xid": 64, "pid": 0},
    ),
    "A-XID-02": (OFF_BUS, "off_bus", "0000:b6:00.0", {}),
    "A-BOOT-02-load": (
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  390.12  Wed Dec 20 07:19:16 PST 2017",
        "load",
        None,
        {"version": "390.12", "flavour": "proprietary"},
    ),
    "A-OPEN-02": (
        LEGACY,
        "ignored_legacy",
        None,
        {"model": "Tesla P100-PCIE-16GB", "branch": "580", "driver": "595.71.05"},
    ),
    "A-OPEN-01": (
        "NVRM: The NVIDIA GPU 0000:01:00.0 (PCI ID: 10de:2b85)\nNVRM: installed in this system requires use of the "
        "NVIDIA open\nNVRM: kernel modules.\n",
        "needs_open",
        "0000:01:00.0",
        {},
    ),
    "A-OPEN-01-init": (
        "NVRM: GPU 0000:01:00.0: RmInitAdapter failed! (0x22:0x56:1017)",
        "init_failed",
        "0000:01:00.0",
        {"code": "0x22:0x56:1017"},
    ),
    "A-DKMS-04": (
        "NVRM: GPU0 GSP firmware image version mismatch: got 595.71.05, expected 595.58.03",
        "gsp_firmware",
        None,
        {"got": "595.71.05", "expected": "595.58.03"},
    ),
    "A-NVML-03": (
        "NVRM: API mismatch: the client has the version 570.124.04, but\nNVRM: this kernel module has the version "
        "570.124.06.  Please\nNVRM: make sure that this kernel module and all NVIDIA driver\nNVRM: components have the "
        "same version.\n",
        "mismatch",
        None,
        {"client": "570.124.04", "kernel": "570.124.06"},
    ),
    "A-MOD-13": (
        "WARNING: CPU: 17 PID: 4242 at nvidia/nv.c:5013 nvidia_dev_put_uuid+0x8a/0x90 [nvidia]",
        "wedged",
        None,
        {"function": "nvidia_dev_put_uuid"},
    ),
    "A-MOD-07": (
        "INFO: task nvidia-smi:3391 blocked for more than 120 seconds.",
        "wedged",
        None,
        {"task": "nvidia-smi"},
    ),
    "A-SB-01": ("Loading of module with unavailable key is rejected", "rejected", None, {}),
    "A-SB-01-lockdown": (
        "Lockdown: modprobe: unsigned module loading is restricted; see man kernel_lockdown.7",
        "rejected",
        None,
        {},
    ),
    "A-DKMS-05-vermagic": (
        "nvidia: version magic '6.1.0-18-amd64 SMP mod_unload ' should be '6.1.0-20-amd64 SMP mod_unload '",
        "vermagic",
        None,
        {"module": "nvidia"},
    ),
    "A-PEER-01": (
        "nvidia_peermem: disagrees about version of symbol ib_register_peer_memory_client",
        "symbols",
        None,
        {"module": "nvidia_peermem", "symbol": "ib_register_peer_memory_client"},
    ),
    "A-PEER-01-nvidia-fs": (
        "nvidia_fs: Unknown symbol nvidia_p2p_dma_map_pages (err -2)",
        "symbols",
        None,
        {"module": "nvidia_fs", "symbol": "nvidia_p2p_dma_map_pages"},
    ),
}


@pytest.mark.parametrize(("text", "kind", "pci", "detail"), EVENTS.values(), ids=EVENTS)
def test_each_message(text: str, kind: str, pci: str | None, detail: dict[str, Any]) -> None:
    (event,) = health.parse(text)
    assert (event.kind, event.pci) == (kind, pci)
    assert {key: event.detail[key] for key in detail} == detail


@pytest.mark.parametrize(
    "text",
    [
        "nvidia: module verification failed: signature and/or required key missing - tainting kernel",
        "nvidia: loading out-of-tree module taints kernel.",
        "INFO: task kworker/u8:2:77 blocked for more than 120 seconds.",
        "WARNING: CPU: 3 PID: 1 at drivers/gpu/drm/drm_fb.c:12 drm_something+0x1/0x2",
        "usb 1-1: new device, Xid (PCI:0000:41:00): 79",
    ],
)
def test_harmless_messages(text: str) -> None:
    assert health.parse(text) == []


FORMS = {
    "dmesg": ("[  104.250000] {}", BOOT + 104.25),
    "dmesg-with-caller": ("[  104.250000][ T1234] {}", BOOT + 104.25),
    "kmsg": ("4,1234,104250000,-;{}", BOOT + 104.25),
    "journal-short-unix": ("1748870004.250000 gpu-node-01 kernel: {}", 1_748_870_004.25),
    "journal-short-iso": ("2025-06-02T13:13:24+0000 gpu-node-01 kernel: {}", 1_748_870_004.0),
    "dmesg-iso": ("2025-06-02T13:13:24,250000+00:00 {}", 1_748_870_004.25),
    "journal-short": ("Jun 02 13:13:24 gpu-node-01 kernel: {}", None),
    "dmesg-human": ("[Mon Jun  2 13:13:24 2025] {}", None),
    "bare": ("{}", None),
}


@pytest.mark.parametrize(("form", "at"), FORMS.values(), ids=FORMS)
def test_each_form_of_log(form: str, at: float | None) -> None:
    text = "\n".join(form.format(line) for line in (XID_119, *OFF_BUS.splitlines()))
    xid, off_bus = health.parse(text, boot_time=BOOT)
    assert (xid.kind, xid.at, xid.text) == ("xid", at, XID_119)
    assert (off_bus.kind, off_bus.at) == ("off_bus", at)


def test_lines_of_others_in_between_do_not_break_a_message() -> None:  # A-XID-02
    lines = OFF_BUS.splitlines()
    text = "\n".join([lines[0], "pcieport 0000:b0:01.0: AER: error", lines[1], "systemd[1]: hello", lines[2]])
    assert [event.kind for event in health.parse(text)] == ["off_bus"]


def test_two_messages_are_not_joined() -> None:
    text = OFF_BUS + OFF_BUS.replace("b6", "c7") + XID_119
    assert [(event.kind, event.pci) for event in health.parse(text)] == [
        ("off_bus", "0000:b6:00.0"),
        ("off_bus", "0000:c7:00.0"),
        ("xid", "0000:41:00.0"),
    ]


def test_since_drops_what_is_earlier_and_keeps_what_has_no_time() -> None:
    old, new = "[   10.0] NVRM: Xid (PCI:0000:41:00): 79, x", "[  500.0] NVRM: Xid (PCI:0000:41:00): 48, x"
    text = "\n".join([old, new, "NVRM: Xid (PCI:0000:41:00): 95, x"])
    numbers = [event.detail["xid"] for event in health.parse(text, boot_time=BOOT, since=BOOT + 100)]
    assert numbers == [48, 95]


@pytest.mark.parametrize(
    ("number", "kind", "act"),
    [
        (119, "gsp", "reboot"),
        (120, "gsp", "reboot"),
        (79, "hardware", "replace"),
        (48, "memory", "reset"),
        (63, "memory", "reset"),
        (64, "memory", "replace"),
        (94, "memory", "reset"),
        (95, "memory", "reset"),
        (13, "application", "none"),
        (31, "application", "none"),
        (999, "unknown", "reset"),
    ],
    ids=lambda value: f"A-XID-{value}" if isinstance(value, int) else value,
)
def test_xid_class(number: int, kind: str, act: str) -> None:
    known = health.xid_class(number)
    assert (known.kind, known.act) == (kind, act)


JUDGED = {
    "A-XID-01-119-needs-reboot": (XID_119, "health.xid", ERROR, True),
    "A-XID-02-off-bus": (OFF_BUS, "health.off_bus", ERROR, False),
    "A-MOD-13-wedged-needs-reboot": (EVENTS["A-MOD-13"][0], "driver.wedged", ERROR, True),
    "A-XID-03-64": (EVENTS["A-XID-03-64"][0], "health.xid", ERROR, False),
    "A-PEER-01-is-degraded": (EVENTS["A-PEER-01"][0], "health.symbols", WARNING, False),
    "application-Xid-is-no-trouble": ("NVRM: Xid (PCI:0000:41:00): 31, pid=1, name=a, x", "health.xid", OK, False),
}


@pytest.mark.parametrize(("text", "check", "level", "reboot"), JUDGED.values(), ids=JUDGED)
def test_judgement(text: str, check: str, level: str, reboot: bool) -> None:
    events = health.parse(text)
    (finding,) = health.findings(events)
    assert (finding.check, finding.level) == (check, level)
    assert health.reboot_needed(events) is reboot


def test_repeated_xids_are_one_finding() -> None:  # A-XID-01
    text = "\n".join(f"[{at}.000000] {XID_119}" for at in (45, 90, 135))
    (finding,) = health.findings(health.parse(text, boot_time=BOOT))
    assert finding.evidence["count"] == 3
    assert (finding.evidence["first"], finding.evidence["last"]) == (BOOT + 45, BOOT + 135)
    assert finding.evidence["source"] == health.XID_SOURCE


def test_a_quiet_log_is_ok() -> None:
    (finding,) = health.findings(health.parse("[ 1.0] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.90.07  x"))
    assert (finding.check, finding.level) == ("health.kernel_log", OK)
