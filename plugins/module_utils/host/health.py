# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the kernel log says about the NVIDIA driver and its GPUs.

Reads the text of ``journalctl -k`` (short-unix, short-iso) and of ``dmesg`` (raw, iso); a line may also come bare.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils.findings import ERROR, OK, WARNING, Finding
from ansible_collections.gpufleet.driver.plugins.module_utils.host.gpus import bus_id, parse_version

XID_SOURCE = "NVIDIA Xid Errors, https://docs.nvidia.com/deploy/xid-errors/"


@dataclass(frozen=True)
class Line:
    """One message of the kernel; ``at`` in Unix seconds, None if the log does not say."""

    at: float | None
    text: str


@dataclass(frozen=True)
class Event:
    """Something the driver or the kernel said. ``kind`` is ``xid``, ``load`` or a kind of :data:`PATTERNS`."""

    kind: str
    at: float | None
    text: str
    pci: str | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class XidClass:
    """What an Xid asks for. ``kind``: application, memory, fabric, gsp, hardware or driver.

    ``act``: none (the program's fault), reset (a reset or reboot clears it), reboot (no live reload), replace
    (hardware).
    """

    kind: str
    act: str
    meaning: str


XIDS: Mapping[int, XidClass] = {
    13: XidClass("application", "none", "graphics engine exception"),
    31: XidClass("application", "none", "GPU memory page fault"),
    32: XidClass("driver", "reset", "invalid or corrupted push buffer stream"),
    38: XidClass("driver", "reset", "driver firmware error"),
    43: XidClass("application", "none", "GPU stopped processing"),
    45: XidClass("application", "none", "preemptive clean-up after an earlier error"),
    48: XidClass("memory", "reset", "double-bit ECC error"),
    61: XidClass("driver", "reset", "internal microcontroller breakpoint"),
    62: XidClass("hardware", "reset", "internal microcontroller halt"),
    63: XidClass("memory", "reset", "row remapping or page retirement recorded"),
    64: XidClass("memory", "replace", "row remapping or page retirement failed"),
    68: XidClass("application", "none", "video processor exception"),
    69: XidClass("application", "none", "graphics engine class error"),
    74: XidClass("fabric", "reset", "NVLink error"),
    79: XidClass("hardware", "replace", "GPU has fallen off the bus"),
    92: XidClass("memory", "none", "high single-bit ECC error rate"),
    94: XidClass("memory", "reset", "contained memory error"),
    95: XidClass("memory", "reset", "uncontained memory error"),
    109: XidClass("driver", "reset", "context switch time-out"),
    110: XidClass("hardware", "replace", "security fault"),
    119: XidClass("gsp", "reboot", "no answer from the GPU's system processor (GSP)"),
    120: XidClass("gsp", "reboot", "error in the GPU's system processor (GSP)"),
    121: XidClass("fabric", "reset", "chip-to-chip link error"),
    136: XidClass("fabric", "reset", "NVLink link training failed"),
    137: XidClass("application", "none", "NVLink remote access fault"),
    140: XidClass("memory", "reset", "unrecovered ECC error"),
    143: XidClass("driver", "reset", "GPU initialisation failed"),
    144: XidClass("fabric", "reset", "NVLink SAW error"),
    145: XidClass("fabric", "reset", "NVLink RLW error"),
    146: XidClass("fabric", "reset", "NVLink TLW error"),
    147: XidClass("fabric", "reset", "NVLink TREX error"),
    148: XidClass("fabric", "reset", "NVLink NVLPW control error"),
    149: XidClass("fabric", "reset", "NVLink NETIR error"),
    150: XidClass("fabric", "reset", "NVLink MSE error"),
    154: XidClass("notice", "none", "recommended recovery action changed"),
}
UNKNOWN_XID = XidClass("unknown", "reset", "not in the table")

_XID = re.compile(
    r"^NVRM: Xid \((?:PCI:)?(?P<pci>[0-9a-fA-F:.]+)\): (?P<xid>\d+)"
    r"(?:, pid='?(?P<pid>[^,']+)'?)?(?:, name=(?P<name>[^,]*))?,?\s*(?P<text>.*)$"
)
_VERSION = r"\d{2,4}\.\d{1,3}(?:\.\d{1,3})?"
_PCI = r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-9a-fA-F])?"


@dataclass(frozen=True)
class Pattern:
    """How to know a kind of event in a (joined) message, how bad it is, and what to do."""

    kind: str
    level: str
    regex: re.Pattern[str]
    meaning: str
    next: str


def _pattern(kind: str, level: str, regex: str, meaning: str, next_: str) -> Pattern:
    return Pattern(kind, level, re.compile(regex, re.IGNORECASE), meaning, next_)


REBOOT = "reboot the host; if it does not come down, power-cycle it"
PATTERNS: tuple[Pattern, ...] = (
    _pattern(
        "off_bus",
        ERROR,
        rf"NVRM:.*?(?P<pci>{_PCI}).*?fallen off the bus",
        "a GPU has fallen off the bus",
        "quarantine the host and look at the hardware; another driver will not bring the GPU back",
    ),
    _pattern(
        "ignored_legacy",
        ERROR,
        rf"NVRM: The NVIDIA (?P<model>.*?) ?GPU installed in this system is supported through the NVIDIA "
        rf"(?P<branch>\d+)\.xx Legacy drivers.*?The (?P<driver>{_VERSION}) NVIDIA driver will ignore this GPU",
        "the loaded driver ignores a GPU that only an older branch drives",
        "go back to the branch named in the message",
    ),
    _pattern(
        "needs_open",
        ERROR,
        rf"NVRM: The NVIDIA GPU (?P<pci>{_PCI}).*?requires use of the NVIDIA open kernel modules",
        "a GPU needs the open kernel modules and the proprietary ones are loaded",
        "install the open kernel modules of the same version",
    ),
    _pattern(
        "mismatch",
        ERROR,
        rf"NVRM: API mismatch: (?:the client|this client).*?version (?P<client>{_VERSION}).*?"
        rf"kernel module.*?version (?P<kernel>{_VERSION})",
        "a program used a library of another version than the loaded driver",
        "reload the kernel modules or reboot",
    ),
    _pattern(
        "gsp_firmware",
        ERROR,
        rf"GSP.*?mismatch.*?got(?: version)? (?P<got>{_VERSION}).*?expected(?: version)? (?P<expected>{_VERSION})",
        "the GSP firmware and the kernel module have different versions",
        "reinstall the firmware package and the kernel modules in one version",
    ),
    _pattern(
        "init_failed",
        ERROR,
        rf"NVRM: (?:GPU (?P<pci>{_PCI}): )?(?:RmInitAdapter|rm_init_adapter) failed!?(?: \((?P<code>[^)]*)\))?",
        "the driver could not initialise a GPU",
        "see the lines before it in the kernel log",
    ),
    _pattern(
        "wedged",
        ERROR,
        r"WARNING: CPU: .*? (?P<function>nvidia_dev_(?:get|put)_uuid)\b",
        "a kernel warning after which every call into the driver hangs",
        REBOOT,
    ),
    _pattern(
        "wedged",
        ERROR,
        r"INFO: task (?P<task>nv[^:]*|nvidia[^:]*|dcgm[^:]*):\d+ blocked for more than \d+ seconds",
        "a task is stuck in the kernel",
        REBOOT,
    ),
    _pattern(
        "rejected",
        ERROR,
        r"Loading of (?:unsigned )?module(?: with (?:unavailable|unsupported) (?:key|crypto))? is rejected|"
        r"(?:Lockdown|Loading): .*unsigned module loading is restricted|"
        r"module verification failed: (?!signature and/or required key missing)|"
        r"PKCS#7 signature not signed with a trusted key",
        "the kernel refuses a module because of its signature",
        "enrol the signing key (mokutil --import), or install the distribution's signed modules",
    ),
    _pattern(
        "vermagic",
        ERROR,
        r"(?P<module>nvidia\S*|gdrdrv|nv_peer_mem): version magic '(?P<has>[^']*)' should be '(?P<wants>[^']*)'",
        "a module was built for another kernel",
        "build the modules for the running kernel",
    ),
    _pattern(
        "symbols",
        WARNING,
        r"(?P<module>nvidia\S*|gdrdrv|nv_peer_mem)(?: \(\w+\))?: "
        r"(?:disagrees about version of symbol|Unknown symbol) (?P<symbol>\w+)",
        "a module does not fit another one it builds on (GPUDirect is lost)",
        "rebuild the module against the installed RDMA stack and driver",
    ),
)

_PREFIXES: tuple[re.Pattern[str], ...] = (
    re.compile(r"^\d+,\d+,(?P<micros>\d+),[^;]*;(?P<text>.*)$"),
    re.compile(r"^(?:<\d+>)?\[\s*(?P<since_boot>\d+\.\d+)\](?:\[[^\]]*\])? (?P<text>.*)$"),
    re.compile(r"^(?P<unix>\d{9,11}(?:\.\d+)?) \S+ kernel: (?P<text>.*)$"),
    re.compile(
        r"^(?P<iso>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d+)?(?:[+-]\d\d:?\d\d|Z)?) (?:\S+ kernel: )?(?P<text>.*)$"
    ),
    re.compile(r"^[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S+ kernel: (?P<text>.*)$"),
    re.compile(r"^\[[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}\] (?P<text>.*)$"),
)


def parse_lines(text: str, boot_time: float | None = None) -> list[Line]:
    """Split a kernel log. ``boot_time`` (Unix seconds) turns dmesg's seconds since boot into times.

    Times without a date, or without a zone, are not guessed at: they come as None.
    """
    lines = []
    for raw in text.splitlines():
        for prefix in _PREFIXES:
            found = prefix.match(raw)
            if found:
                lines.append(Line(_time(found.groupdict(), boot_time), found["text"].strip()))
                break
        else:
            if raw.strip():
                lines.append(Line(None, raw.strip()))
    return lines


def _time(groups: Mapping[str, str | None], boot_time: float | None) -> float | None:
    unix, iso, since_boot, micros = (groups.get(name) for name in ("unix", "iso", "since_boot", "micros"))
    if unix:
        return float(unix)
    if boot_time is not None and since_boot:
        return boot_time + float(since_boot)
    if boot_time is not None and micros:
        return boot_time + int(micros) / 1e6
    if iso:
        text = re.sub(r"Z$", "+00:00", iso.replace(",", "."))
        text = re.sub(r"([+-]\d\d)(\d\d)$", r"\1:\2", text)
        text = re.sub(r"\.(\d+)", lambda found: "." + found.group(1)[:6].ljust(6, "0"), text)
        moment = datetime.datetime.fromisoformat(text)
        return moment.timestamp() if moment.tzinfo else None
    return None


_OPENS = re.compile(r"^NVRM: (?:The NVIDIA|API mismatch)")
_STARTS_ANEW = re.compile(r"^NVRM: (?:The NVIDIA|API mismatch|Xid|loading|GPU )")
_MAX_JOINED = 8


def join(lines: Iterable[Line]) -> list[Line]:
    """Join what the driver says over several ``NVRM:`` lines into one message; other lines may come in between."""
    joined: list[Line] = []
    open_at: int | None = None
    parts = 0
    for line in lines:
        is_nvrm = line.text.startswith("NVRM:")
        if open_at is not None and is_nvrm and not _STARTS_ANEW.match(line.text) and parts < _MAX_JOINED:
            before = joined[open_at]
            rest = line.text[len("NVRM:") :].strip()
            joined[open_at] = Line(before.at, f"{before.text} {rest}")
            parts += 1
            continue
        if is_nvrm:
            open_at, parts = (len(joined), 1) if _OPENS.match(line.text) else (None, 0)
        joined.append(line)
    return joined


def parse(text: str, boot_time: float | None = None, since: float | None = None) -> list[Event]:
    """Every event in a kernel log, oldest first; with ``since`` only those not known to be earlier (Unix seconds)."""
    found: list[Event] = []
    for line in join(parse_lines(text, boot_time)):
        if since is not None and line.at is not None and line.at < since:
            continue
        found.extend(_events(line))
    return found


def _events(line: Line) -> Iterator[Event]:
    xid = _XID.match(line.text)
    if xid:
        pid = xid["pid"]
        detail = {
            "xid": int(xid["xid"]),
            "pid": int(pid) if pid and pid.isdigit() else None,
            "process": xid["name"],
            "says": xid["text"],
        }
        yield Event("xid", line.at, line.text, bus_id(xid["pci"]), detail)
        return
    if line.text.startswith("NVRM: loading NVIDIA UNIX"):
        loaded = parse_version(line.text)
        if loaded:
            yield Event("load", line.at, line.text, None, {"version": loaded.version, "flavour": loaded.flavour})
        return
    for pattern in PATTERNS:
        found = pattern.regex.search(line.text)
        if found:
            groups = found.groupdict()
            pci = groups.pop("pci", None)
            yield Event(pattern.kind, line.at, line.text, bus_id(pci) if pci else None, groups)
            return


def xid_class(xid: int) -> XidClass:
    """What Xid number ``xid`` means (:data:`XID_SOURCE`); unknown ones count as the driver's."""
    return XIDS.get(xid, UNKNOWN_XID)


def reboot_needed(events: Iterable[Event]) -> bool:
    """A live reload must not be tried: the GSP does not answer, or calls hang in the driver."""
    return any(
        event.kind == "wedged" or (event.kind == "xid" and xid_class(event.detail["xid"]).act == "reboot")
        for event in events
    )


def findings(events: Iterable[Event]) -> list[Finding]:
    """One finding per kind of trouble, or one ``health.kernel_log`` that is ok."""
    events = list(events)
    found = [*_xid_findings(events)]
    for kind in dict.fromkeys(pattern.kind for pattern in PATTERNS):
        of_kind = [event for event in events if event.kind == kind]
        if not of_kind:
            continue
        pattern = next(pattern for pattern in PATTERNS if pattern.kind == kind)
        check = "driver.wedged" if kind == "wedged" else f"health.{kind}"
        found.append(
            Finding(check, pattern.level, f"{pattern.meaning}: {of_kind[-1].text}", _evidence(of_kind), pattern.next)
        )
    return found or [Finding("health.kernel_log", OK, "the kernel log names no trouble of the driver")]


_XID_NEXT = {
    "reset": "reset the GPU or reboot the host before its next work",
    "reboot": "reboot the host; do not reload the modules live",
    "replace": "quarantine the host and have the GPU looked at",
}


def _xid_findings(events: list[Event]) -> Iterator[Finding]:
    numbers = dict.fromkeys(event.detail["xid"] for event in events if event.kind == "xid")
    for number in numbers:
        of_number = [event for event in events if event.kind == "xid" and event.detail["xid"] == number]
        known = xid_class(number)
        where = ", ".join(sorted({event.pci for event in of_number if event.pci}))
        message = f"Xid {number} ({known.meaning}) {len(of_number)} times on {where}"
        evidence = {**_evidence(of_number), "xid": number, "class": known.kind, "act": known.act, "source": XID_SOURCE}
        level = OK if known.act == "none" else ERROR
        yield Finding("health.xid", level, message, evidence, _XID_NEXT.get(known.act))


def _evidence(events: list[Event]) -> dict[str, Any]:
    return {
        "count": len(events),
        "first": events[0].at,
        "last": events[-1].at,
        "gpus": sorted({event.pci for event in events if event.pci}),
        "text": events[-1].text,
    }
