# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which GPUs a host has and which driver it runs: parsers of /proc/driver/nvidia, PCI and nvidia-smi, and the table
of which GPU works with which driver branch and kind of kernel module.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils.findings import ERROR, OK, WARNING, Finding

PCI_ROOT = "/sys/bus/pci/devices"
PROC_NVIDIA = "/proc/driver/nvidia"
OPEN, PROPRIETARY = "open", "proprietary"

_NVRM = re.compile(
    r"NVIDIA UNIX\s+(?:(?P<open>Open Kernel Module) for (?P<open_arch>\S+)|(?P<arch>\S+)\s+Kernel Module)"
    r"\s+(?P<version>\d{2,4}\.\d{1,3}(?:\.\d{1,3})?)(?=\s|$)(?P<rest>.*)"
)


@dataclass(frozen=True)
class LoadedDriver:
    """The driver in the kernel. ``flavour``: open or proprietary; ``built``: what follows the version, as written."""

    version: str
    flavour: str
    arch: str
    built: str = ""
    compiler: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def parse_version(text: str) -> LoadedDriver | None:
    """Read ``/proc/driver/nvidia/version`` or the kernel's "NVRM: loading" line; None if neither is in ``text``.

    Whatever follows the version (release kind, builder, a date in any language) may be there or not.
    """
    found = _NVRM.search(text)
    if not found:
        return None
    compiler = re.search(r"^GCC version:\s*(.+?)\s*$", text, re.MULTILINE)
    return LoadedDriver(
        version=found["version"],
        flavour=OPEN if found["open"] else PROPRIETARY,
        arch=found["open_arch"] or found["arch"],
        built=" ".join(found["rest"].split()),
        compiler=compiler.group(1) if compiler else None,
    )


def flavour_of_license(license_text: str) -> str | None:
    """The flavour from ``modinfo -F license nvidia``: ``Dual MIT/GPL`` is open, ``NVIDIA`` proprietary, else None."""
    return {"Dual MIT/GPL": OPEN, "NVIDIA": PROPRIETARY}.get(license_text.strip())


def parse_colon_pairs(text: str) -> dict[str, str]:
    """Read ``Key: value`` lines, the form of ``params`` and of ``gpus/*/information`` under /proc/driver/nvidia."""
    pairs = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip():
            pairs[key.strip()] = value.strip()
    return pairs


_BUS_ID = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{2}):([0-9a-f]{2})(\.[0-9a-f])?", re.IGNORECASE)


def bus_id(text: str) -> str:
    """A PCI address as the kernel writes it: ``00000000:41:00.0`` (NVML) and ``0000:41:00`` (NVRM) → ``0000:41:00.0``.

    Text that is no PCI address comes back as it is.
    """
    found = _BUS_ID.fullmatch(text.strip())
    if not found:
        return text
    domain, bus, device, function = found.groups()
    return f"{int(domain or '0', 16):04x}:{bus}:{device}{function or '.0'}".lower()


@dataclass(frozen=True)
class ProcGpu:
    """One entry of /proc/driver/nvidia/gpus: the GPUs the loaded driver has taken."""

    pci: str
    model: str | None
    uuid: str | None
    minor: int | None
    excluded: bool


def read_proc_gpus(root: str = PROC_NVIDIA) -> list[ProcGpu]:
    """The GPUs under ``root``/gpus in PCI order; empty if the driver is not loaded."""
    gpus = []
    for path in sorted(Path(root, "gpus").glob("*/information")):
        try:
            fields = parse_colon_pairs(path.read_text(errors="replace"))
        except OSError:
            fields = {}
        uuid = fields.get("GPU UUID", "")
        minor = fields.get("Device Minor", "")
        gpus.append(
            ProcGpu(
                pci=bus_id(path.parent.name),
                model=fields.get("Model") or None,
                uuid=uuid if uuid and "?" not in uuid else None,
                minor=int(minor) if minor.isdigit() else None,
                excluded=fields.get("GPU Excluded", "").lower() == "yes",
            )
        )
    return gpus


def read_loaded(root: str = PROC_NVIDIA) -> LoadedDriver | None:
    """The driver loaded in the kernel, or None."""
    try:
        return parse_version(Path(root, "version").read_text(errors="replace"))
    except OSError:
        return None


def read_params(root: str = PROC_NVIDIA) -> dict[str, str]:
    """The parameters the nvidia module runs with; empty if it is not loaded."""
    try:
        return parse_colon_pairs(Path(root, "params").read_text(errors="replace"))
    except OSError:
        return {}


@dataclass(frozen=True)
class PciDevice:
    """An NVIDIA device on the PCI bus. ``kind`` is gpu or nvswitch; ``device_id`` is four hex digits (``2330``)."""

    pci: str
    device_id: str
    kind: str
    driver: str | None
    architecture: str | None


def scan_pci(root: str = PCI_ROOT) -> list[PciDevice]:
    """NVIDIA GPUs (display classes 0300 and 0302) and NVSwitches (class 0680) in sysfs, in bus order."""
    devices = []
    for path in sorted(Path(root).glob("*")):
        try:
            vendor, device, pci_class = ((path / name).read_text().strip() for name in ("vendor", "device", "class"))
        except OSError:
            continue
        kind = {"0x0300": "gpu", "0x0302": "gpu", "0x0680": "nvswitch"}.get(pci_class[:6])
        if vendor != "0x10de" or kind is None:
            continue
        driver = path / "driver"
        device_id = device[2:].lower()
        devices.append(
            PciDevice(
                pci=bus_id(path.name),
                device_id=device_id,
                kind=kind,
                driver=driver.resolve().name if driver.exists() else None,
                architecture=architecture(device_id) if kind == "gpu" else None,
            )
        )
    return devices


# First and last PCI device id of each chip family, as the lists of supported GPUs in NVIDIA's driver READMEs show
# them. Families are not in order of age, so gaps stay gaps: an id in none of them is unknown, never guessed.
_ARCHITECTURES: tuple[tuple[int, int, str], ...] = (
    (0x1340, 0x13FF, "maxwell"),
    (0x1400, 0x143F, "maxwell"),
    (0x15F0, 0x15FF, "pascal"),
    (0x1610, 0x166F, "maxwell"),
    (0x1740, 0x179F, "maxwell"),
    (0x17C0, 0x17FF, "maxwell"),
    (0x1B00, 0x1D7F, "pascal"),
    (0x1D80, 0x1DFF, "volta"),
    (0x1E00, 0x1FFF, "turing"),
    (0x2080, 0x20FF, "ampere"),
    (0x2180, 0x21FF, "turing"),
    (0x2200, 0x22A2, "ampere"),
    (0x2300, 0x233F, "hopper"),
    (0x2340, 0x237F, "grace-hopper"),
    (0x2400, 0x25FF, "ampere"),
    (0x2680, 0x28FF, "ada"),
    (0x2900, 0x31FF, "blackwell"),
)
_LEGACY = ("maxwell", "pascal", "volta")
_OPEN_ONLY = ("grace-hopper", "blackwell")
LAST_LEGACY_BRANCH = 580
LAST_PASCAL_VGPU_BRANCH = 535
FIRST_OPEN_BRANCH = 515

HGX_NVLINK5 = frozenset({"2901", "3182"})
"""B200 and B300 SXM: the baseboard's switches are reached through NVLink Subnet Manager (nvlsm)."""

GRACE_NVLINK5 = frozenset({"2941", "31c2"})
"""GB200 and GB300: the switches are in the rack's switch trays; the node itself runs IMEX."""


def architecture(device_id: str) -> str | None:
    """The architecture of a PCI device id (``2330`` → ``hopper``), or None if the table does not know it."""
    number = int(device_id, 16)
    return next((name for first, last, name in _ARCHITECTURES if first <= number <= last), None)


def supports(device_id: str, branch: str, flavour: str, vgpu_host: bool = False) -> Finding:
    """Whether ``branch`` (``"580"``) in ``flavour`` drives the GPU: a finding ``gpu.supported``.

    Maxwell, Pascal and Volta end with 580 and never had open modules; Blackwell and Grace Hopper have open ones only.
    A vGPU host's line ends earlier for Pascal (535).
    """
    family = architecture(device_id)
    evidence = {"pci_device_id": device_id, "architecture": family, "branch": branch, "flavour": flavour}
    wanted: str | None = None
    problem: str | None = None
    if family is None:
        return Finding(
            "gpu.supported",
            WARNING,
            f"GPU 10de:{device_id} is not in the table of known GPUs, so nothing is known about {branch} {flavour}",
            evidence,
            f"look for {device_id.upper()} in the list of supported GPUs of the driver's README",
        )
    last = LAST_PASCAL_VGPU_BRANCH if vgpu_host and family == "pascal" else LAST_LEGACY_BRANCH
    if family in _LEGACY and int(branch) > last:
        problem = f"branch {branch} ignores {family} GPUs; {last} is the last branch that drives them"
        problem += " on a vGPU host" if last == LAST_PASCAL_VGPU_BRANCH else ""
        wanted = f"choose a {last} driver for this host, or take it out of the run"
    elif flavour == OPEN and family in _LEGACY:
        problem = f"the open kernel modules do not drive {family} GPUs; they need the proprietary ones"
        wanted = "choose the proprietary kernel modules"
    elif flavour == OPEN and int(branch) < FIRST_OPEN_BRANCH:
        problem = f"branch {branch} has no open kernel modules; {FIRST_OPEN_BRANCH} is the first that has"
        wanted = "choose the proprietary kernel modules or a newer branch"
    elif flavour == PROPRIETARY and family in _OPEN_ONLY:
        problem = f"{family} GPUs need the open kernel modules; the proprietary ones find no device"
        wanted = "choose the open kernel modules"
    if problem:
        return Finding("gpu.supported", ERROR, f"GPU 10de:{device_id}: {problem}", evidence, wanted)
    return Finding("gpu.supported", OK, f"{branch} {flavour} drives {family} GPU 10de:{device_id}", evidence)


SMI_EXITS: Mapping[int, tuple[str, str]] = {
    0: ("ok", "answered"),
    6: ("no_device", "found no GPU that the driver drives"),
    9: ("driver_not_loaded", "cannot talk to the driver: it is not loaded"),
    12: ("library_not_found", "finds no libnvidia-ml.so.1"),
    15: ("gpu_lost", "lost a GPU: it has fallen off the bus or is otherwise unreachable"),
    18: ("mismatch", "uses a library of another version than the loaded driver"),
    124: ("hung", "did not answer within the deadline"),
    127: ("not_installed", "is not installed"),
    137: ("hung", "was killed after the deadline"),
}


def smi_status(rc: int) -> tuple[str, str]:
    """What an exit status of nvidia-smi means (manual page): a word and the end of a sentence about nvidia-smi."""
    return SMI_EXITS.get(rc, ("error", f"failed with exit status {rc}"))


KNOWN_DTDS = ("nvsmi_device_v11.dtd", "nvsmi_device_v12.dtd", "nvsmi_device_v13.dtd")
_NO_VALUE = (
    "",
    "N/A",
    "[N/A]",
    "Not Supported",
    "[Not Supported]",
    "None",
    "Requested functionality has been deprecated",
)
_BAD_VALUE = ("ERR!", "Unknown Error", "[Unknown Error]", "[GPU requires reset]", "GPU requires reset", "[GPU is lost]")


@dataclass(frozen=True)
class SmiReport:
    """``nvidia-smi -q -x``. ``notes`` says what was unusual; each GPU has the keys of :data:`SMI_FIELDS`.

    A value that is absent or not applicable is None. One that nvidia-smi itself could not read is None as well, and
    its text is under ``bad`` of the GPU.
    """

    dtd: str | None
    driver_version: str | None
    cuda_version: str | None
    gpus: list[dict[str, Any]]
    notes: list[str]


# Our name → places where the schemas v11, v12 and v13 keep it.
SMI_FIELDS: Mapping[str, tuple[str, ...]] = {
    "name": ("product_name",),
    "architecture": ("product_architecture",),
    "uuid": ("uuid",),
    "persistence": ("persistence_mode",),
    "compute_mode": ("compute_mode",),
    "mig_current": ("mig_mode/current_mig",),
    "mig_pending": ("mig_mode/pending_mig",),
    "ecc_current": ("ecc_mode/current_ecc",),
    "ecc_pending": ("ecc_mode/pending_ecc",),
    "remapped_corrected": ("remapped_rows/remapped_row_corr",),
    "remapped_uncorrected": ("remapped_rows/remapped_row_unc",),
    "remap_pending": ("remapped_rows/remapped_row_pending",),
    "remap_failure": ("remapped_rows/remapped_row_failure",),
    "retired_pending": (
        "retired_pages/pending_retirement",
        "retired_pages/pending_blacklist",
        "retired_pages/multiple_single_bit_retirement/pending_retirement",
    ),
    "recovery_action": ("gpu_recovery_action",),
    "fabric_state": ("fabric/state",),
    "fabric_status": ("fabric/status",),
    "fabric_cluster": ("fabric/clusterUuid", "fabric/cluster_uuid"),
    "fabric_clique": ("fabric/cliqueId", "fabric/clique_id"),
    "power_limit": (
        "gpu_power_readings/current_power_limit",
        "gpu_power_readings/power_limit",
        "power_readings/power_limit",
    ),
    "power_limit_default": ("gpu_power_readings/default_power_limit", "power_readings/default_power_limit"),
    "device_id": ("pci/pci_device_id",),
}


def parse_smi_xml(text: str) -> SmiReport:
    """Read ``nvidia-smi -q -x`` of any schema: needed fields only, absence tolerated, an unknown schema noted.

    :raises ValueError: if ``text`` is not XML of nvidia-smi at all.
    """
    try:
        root = ET.fromstring(text.strip())  # noqa: S314 - written by the host's own nvidia-smi, root's program
    except ET.ParseError as exc:
        raise ValueError(f"nvidia-smi -q -x did not print XML: {exc}") from exc
    if root.tag != "nvidia_smi_log":
        raise ValueError(f"expected <nvidia_smi_log> from nvidia-smi -q -x, found <{root.tag}>")
    doctype = re.search(r'<!DOCTYPE nvidia_smi_log SYSTEM "([^"]+)"', text)
    dtd = doctype.group(1) if doctype else None
    notes = [] if dtd in KNOWN_DTDS else [f"unknown schema {dtd}; fields may have moved"]
    attached = (root.findtext("attached_gpus") or "").strip()
    described = root.findall("gpu")
    if attached.isdigit() and int(attached) != len(described):
        notes.append(f"{attached} GPUs are attached, {len(described)} are described")
    return SmiReport(
        dtd=dtd,
        driver_version=_value(root.findtext("driver_version"))[0],
        cuda_version=_value(root.findtext("cuda_version"))[0],
        gpus=[_smi_gpu(gpu) for gpu in described],
        notes=notes,
    )


def _value(text: str | None) -> tuple[str | None, str | None]:
    """The value and, if nvidia-smi could not read it, its error text."""
    text = (text or "").strip()
    if text in _BAD_VALUE:
        return None, text
    return (None if text in _NO_VALUE else text), None


def _smi_gpu(gpu: ET.Element) -> dict[str, Any]:
    fields: dict[str, Any] = {"pci": bus_id(gpu.get("id", "0:0:0")), "bad": {}}
    for name, places in SMI_FIELDS.items():
        fields[name] = None
        for place in places:
            value, bad = _value(gpu.findtext(place))
            if bad:
                fields["bad"][name] = bad
            if value is not None:
                fields[name] = value
                break
    device = fields["device_id"]
    fields["device_id"] = device[2:6].lower() if device and re.fullmatch(r"0x[0-9A-Fa-f]{8}", device) else None
    fields["mig_devices"] = [
        {
            "gpu_instance": (device.findtext("gpu_instance_id") or "").strip(),
            "compute_instance": (device.findtext("compute_instance_id") or "").strip(),
        }
        for device in gpu.findall("mig_devices/mig_device")
    ]
    return fields
