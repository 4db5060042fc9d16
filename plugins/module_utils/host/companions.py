# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What has to go with the driver: Fabric Manager, NVLSM, IMEX, NSCQ, DCGM, the container toolkit's CDI files.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils import version
from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Runner
from ansible_collections.gpufleet.driver.plugins.module_utils.findings import ERROR, OK, WARNING, Finding
from ansible_collections.gpufleet.driver.plugins.module_utils.host.gpus import GRACE_NVLINK5, HGX_NVLINK5

CDI_DIRS = ("/etc/cdi", "/var/run/cdi")

# Our name → package names, unit names. A package is told from its relatives (-dev, -dbg) by a full match.
COMPANIONS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "fabricmanager": (r"(?:cuda-drivers-)?nvidia-fabric-?manager(?:-\d+)?", ("nvidia-fabricmanager.service",)),
    "nvlsm": (r"nvlsm", ("nvlsm.service",)),
    "imex": (r"nvidia-imex(?:-\d+)?", ("nvidia-imex.service",)),
    "nscq": (r"libnvidia-nscq(?:-\d+)?", ()),
    "dcgm": (r"datacenter-gpu-manager(?:-4(?:-core|-cuda\d+|-cuda-all)?)?", ("nvidia-dcgm.service", "dcgm.service")),
    "container_toolkit": (r"nvidia-container-toolkit(?:-base)?", ("nvidia-cdi-refresh.service",)),
    "persistenced": (r"nvidia-persistenced", ("nvidia-persistenced.service",)),
}
EXACT = ("fabricmanager", "imex", "nscq")
"""Companions that speak to the driver in its own version only. NVLSM counts by date (2025.03.1), so it is not one."""

# Branch → the first DCGM whose diagnostics work on it. A later branch needs at least what an earlier one does.
DCGM_MINIMUM: Mapping[int, tuple[int, int]] = {535: (3, 1), 550: (3, 3), 570: (4, 0), 580: (4, 2), 590: (4, 5)}
DETACH_DCGM, DETACH_DRIVER = (4, 5), 590


@dataclass(frozen=True)
class Unit:
    """A unit as systemd sees it; ``active`` and ``enabled`` are its own words (active, failed, masked, static …)."""

    name: str
    active: str
    enabled: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Companion:
    """``packages`` maps installed package names to versions; ``version`` is the driver's or own version in them.

    ``complaint`` is why the unit says it does not run, where that is known.
    """

    name: str
    packages: Mapping[str, str]
    version: str | None
    unit: Unit | None
    complaint: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class CdiSpec:
    """A CDI file: driver versions in its host paths, and the host paths that do not exist on this host."""

    path: str
    versions: tuple[str, ...]
    missing: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Facts:
    """What :func:`pairs` judges. ``pci`` are PCI device ids of GPUs; ``fabric`` the fabric states NVML reports."""

    companions: Mapping[str, Companion] = field(default_factory=dict)
    cdi: tuple[CdiSpec, ...] = ()
    pci: tuple[str, ...] = ()
    nvswitches: int = 0
    fabric: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            **{name: companion.as_dict() for name, companion in self.companions.items()},
            "cdi": [spec.as_dict() for spec in self.cdi],
        }


# --- Parsers -------------------------------------------------------------------------------------------------------


def parse_packages(text: str) -> dict[str, str]:
    """``name<tab>version[<tab>status]`` lines of dpkg-query or rpm: installed packages only, ``:amd64`` dropped."""
    packages = {}
    for line in text.splitlines():
        name, dummy, rest = line.partition("\t")
        package_version, dummy, status = rest.partition("\t")
        if package_version and (not status or status.strip() in ("ii", "hi")):
            packages[name.partition(":")[0]] = package_version
    return packages


def parse_units(text: str) -> dict[str, Unit]:
    """Blocks of ``systemctl show --property=Id,LoadState,ActiveState,UnitFileState``; units not found are left out.

    Keys are the names that units really have, so an alias (dcgm.service) appears once, as nvidia-dcgm.service.
    """
    units = {}
    for block in re.split(r"\n\s*\n", text):
        fields = dict(line.partition("=")[::2] for line in block.splitlines() if "=" in line)
        name = fields.get("Id")
        if name and fields.get("LoadState") in ("loaded", "masked"):
            enabled = "masked" if fields["LoadState"] == "masked" else fields.get("UnitFileState", "")
            units[name] = Unit(name, fields.get("ActiveState", "unknown"), enabled or "unknown")
    return units


def parse_dcgm_version(text: str) -> str | None:
    """``dcgmi --version``: ``dcgmi  version: 3.3.9``."""
    found = re.search(r"version:?\s*v?(\d+\.\d+(?:\.\d+)?)", text, re.IGNORECASE)
    return found[1] if found else None


_HOST_PATH = re.compile(r"""^[\s-]*["']?hostPath["']?\s*:\s*["']?(?P<path>/[^"'\n,]*?)["']?\s*,?\s*$""", re.MULTILINE)
_LIBRARY = re.compile(r"\.so\.(\d{2,4}\.\d{1,3}(?:\.\d{1,3})?)$|/lib/firmware/nvidia/(\d{2,4}\.\d{1,3}(?:\.\d{1,3})?)/")


def parse_cdi(text: str) -> tuple[list[str], list[str]]:
    """Host paths of a CDI file (YAML or JSON), and the driver versions in them. Read by line: no YAML parser needed."""
    paths = list(dict.fromkeys(found["path"].strip() for found in _HOST_PATH.finditer(text)))
    versions = {found[1] or found[2] for found in map(_LIBRARY.search, paths) if found}
    return paths, sorted(versions)


_REFUSAL = re.compile(
    r"driver interface version (\d+\.[\d.]*\d) .*?match(?:es)? with (?:the )?driver version (\d+\.[\d.]*\d)"
)


def fabric_manager_complaint(journal: str) -> str | None:
    """What nv-fabricmanager's last refusal to start because of versions says, in one sentence; None without one."""
    found = _REFUSAL.findall(journal)
    return f"Fabric Manager {found[-1][0]} does not speak to driver {found[-1][1]}" if found else None


# --- Observation ---------------------------------------------------------------------------------------------------


def read_cdi(
    directories: Iterable[str] = CDI_DIRS, exists: Callable[[str], bool] = lambda path: Path(path).exists()
) -> list[CdiSpec]:
    """The NVIDIA CDI files in ``directories``."""
    specs: dict[Path, CdiSpec] = {}
    for directory in directories:
        for path in sorted(Path(directory).glob("*")):
            if path.suffix not in (".yaml", ".yml", ".json"):
                continue
            try:
                text = path.read_text(errors="replace")
            except OSError:
                continue
            if "nvidia" not in text:
                continue
            paths, versions = parse_cdi(text)
            missing = tuple(host for host in paths if not exists(host))
            specs.setdefault(path.resolve(), CdiSpec(str(path), tuple(versions), missing))
    return list(specs.values())


_PACKAGE_PATTERNS = (
    "*fabric*manager*",
    "nvlsm*",
    "nvidia-imex*",
    "libnvidia-nscq*",
    "datacenter-gpu-manager*",
    "nvidia-container-toolkit*",
    "nvidia-persistenced*",
)


def installed(run: Runner, timeout: float = 20) -> dict[str, str]:
    """Installed packages of companions, asked from dpkg or rpm."""
    done = run(
        ["dpkg-query", "-W", "-f=${Package}\t${Version}\t${db:Status-Abbrev}\n", *_PACKAGE_PATTERNS], timeout=timeout
    )
    if done.rc == 127:
        done = run(
            ["rpm", "-qa", "--qf", "%{NAME}\t%{EPOCHNUM}:%{VERSION}-%{RELEASE}\n", *_PACKAGE_PATTERNS], timeout=timeout
        )
    return parse_packages(done.stdout)


def observe(run: Runner, timeout: float = 20) -> dict[str, Companion]:
    """Every companion that has a package or a unit here."""
    packages = installed(run, timeout)
    names = [unit for dummy, units in COMPANIONS.values() for unit in units]
    show = run(
        ["systemctl", "show", "--no-pager", "--property=Id,LoadState,ActiveState,UnitFileState", *names],
        timeout=timeout,
    )
    units = parse_units(show.stdout)
    found = {}
    for name, (pattern, unit_names) in COMPANIONS.items():
        own = {package: text for package, text in packages.items() if re.fullmatch(pattern, package)}
        unit = next((units[unit] for unit in unit_names if unit in units), None)
        own_version = _version_of(own.values())
        if name == "dcgm" and own_version is None:
            own_version = parse_dcgm_version(run(["dcgmi", "--version"], timeout=timeout).stdout)
        complaint = None
        if name == "fabricmanager" and unit and unit.active == "failed":
            log = run(["journalctl", "-b", "-u", unit.name, "-n", "100", "--no-pager", "-o", "cat"], timeout=timeout)
            complaint = fabric_manager_complaint(log.stdout)
        if own or unit or own_version:
            found[name] = Companion(name, own, own_version, unit, complaint)
    return found


def _version_of(versions: Iterable[str]) -> str | None:
    """Epoch and packaging revision taken off: ``3:580.95.05-1.el9`` → ``580.95.05``, ``1:4.4.1-1`` → ``4.4.1``."""
    for text in versions:
        found = re.match(r"(?:\d+:)?(\d+(?:\.\d+)+)", text)
        if found:
            return found[1]
    return None


# --- Judgement -----------------------------------------------------------------------------------------------------


def dev_char_finding(numbers: Iterable[tuple[int, int]], dev: str = "/dev") -> Finding | None:
    """A warning if the links ``/dev/char/MAJOR:MINOR`` of the nodes are missing.

    systemd resolves device rules of containers through them; without them a daemon-reload, which package scripts do,
    takes the GPUs from running containers.
    """
    missing = [f"{major}:{minor}" for major, minor in numbers if not Path(dev, "char", f"{major}:{minor}").exists()]
    if not missing:
        return None
    return Finding(
        "companion.dev_char",
        WARNING,
        f"{dev}/char has no link for {', '.join(missing)}; a systemctl daemon-reload takes the GPUs from containers",
        {"missing": missing},
        "nvidia-ctk system create-dev-char-symlinks --create-all",
    )


def _fields(text: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text or ""))


def can_detach(dcgm: str | None, driver: str) -> bool:
    """DCGM can let go of the driver (``dcgmi set --detach-driver``) instead of being stopped: DCGM 4.5, driver 590."""
    return _fields(dcgm)[:2] >= DETACH_DCGM and _fields(driver)[0] >= DETACH_DRIVER


def dcgm_minimum(branch: int) -> tuple[int, int]:
    """The oldest DCGM (major, minor) that works on driver ``branch``."""
    return max((dcgm for first, dcgm in DCGM_MINIMUM.items() if first <= branch), default=(0, 0))


def pairs(driver_version: str, facts: Facts) -> list[Finding]:
    """Whether the companions fit ``driver_version`` (the loaded one, or the one that is to be installed)."""
    return [
        *_exact(driver_version, facts),
        *_fabric(driver_version, facts),
        *_dcgm(driver_version, facts),
        *_cdi(driver_version, facts),
    ]


def _exact(driver_version: str, facts: Facts) -> list[Finding]:
    found = []
    wanted = version.DriverVersion.parse(driver_version)
    for name in EXACT:
        companion = facts.companions.get(name)
        if companion is None or companion.version is None:
            continue
        own = version.find(companion.version)
        level, message = (
            (OK, f"{name} {companion.version} fits the driver")
            if own == wanted
            else (ERROR, f"{name} is {companion.version}, the driver {driver_version}; they must be equal")
        )
        found.append(
            Finding(
                f"companion.{name}",
                level,
                message,
                {"packages": dict(companion.packages), "driver": driver_version},
                f"install {name} {driver_version} in the same transaction as the driver" if level == ERROR else None,
            )
        )
    return found


def _fabric(driver_version: str, facts: Facts) -> list[Finding]:
    found = []
    hgx = sorted(set(facts.pci) & HGX_NVLINK5)
    rack = sorted(set(facts.pci) & GRACE_NVLINK5)
    settled = bool(facts.fabric) and all(state == "completed" for state in facts.fabric)
    severity = WARNING if settled else ERROR
    evidence = {"nvswitches": facts.nvswitches, "gpus": [*hgx, *rack], "fabric": list(facts.fabric)}
    if facts.nvswitches or hgx:
        manager = facts.companions.get("fabricmanager")
        if manager is None:
            found.append(
                Finding(
                    "companion.fabricmanager",
                    severity,
                    "the GPUs are joined by NVSwitches and no Fabric Manager is installed; CUDA fails with error 802",
                    evidence,
                    f"install Fabric Manager {driver_version}",
                )
            )
        elif manager.unit is None or manager.unit.active != "active":
            state = manager.unit.active if manager.unit else "missing"
            found.append(
                Finding(
                    "companion.fabricmanager_unit",
                    severity,
                    f"the GPUs are joined by NVSwitches and nvidia-fabricmanager.service is {state}, expected active"
                    + (f": {manager.complaint}" if manager.complaint else ""),
                    evidence,
                    "systemctl status nvidia-fabricmanager; journalctl -u nvidia-fabricmanager -b",
                )
            )
    if (hgx or rack) and "nvlsm" not in facts.companions and not settled:
        found.append(
            Finding(
                "companion.nvlsm",
                ERROR if hgx else WARNING,
                "fifth generation NVLink needs the NVLink Subnet Manager (nvlsm)"
                + (" on this host" if hgx else " here or in the rack's switch trays")
                + "; without it the fabric stays in progress",
                evidence,
                "install nvlsm and load ib_umad",
            )
        )
    if rack and "imex" not in facts.companions:
        found.append(
            Finding(
                "companion.imex",
                WARNING,
                "memory sharing across the NVLink domain needs nvidia-imex, which is not installed",
                evidence,
                f"install nvidia-imex {driver_version}",
            )
        )
    return found


def _dcgm(driver_version: str, facts: Facts) -> list[Finding]:
    dcgm = facts.companions.get("dcgm")
    if dcgm is None or dcgm.version is None:
        return []
    branch = int(driver_version.split(".")[0])
    minimum = dcgm_minimum(branch)
    evidence = {"dcgm": dcgm.version, "driver": driver_version, "can_detach": can_detach(dcgm.version, driver_version)}
    if _fields(dcgm.version)[:2] < minimum:
        wanted = ".".join(map(str, minimum))
        return [
            Finding(
                "companion.dcgm",
                ERROR,
                f"DCGM {dcgm.version} does not work with driver branch {branch}, {wanted} or newer does; "
                f"health checks of the scheduler would drain one node after another",
                evidence,
                "install datacenter-gpu-manager-4-cuda13" if branch >= 580 else f"install DCGM {wanted}",
            )
        ]
    return [Finding("companion.dcgm", OK, f"DCGM {dcgm.version} works with branch {branch}", evidence)]


def _cdi(driver_version: str, facts: Facts) -> list[Finding]:
    found = []
    for spec in facts.cdi:
        stale = [text for text in spec.versions if text != driver_version]
        if stale or spec.missing:
            seen = f"names driver {', '.join(stale)}, not {driver_version}" if stale else "names files that are gone"
            gone = f"; missing: {spec.missing[0]}" if spec.missing else ""
            found.append(
                Finding(
                    "companion.cdi",
                    WARNING,
                    f"{spec.path} {seen}{gone}; new containers fail",
                    spec.as_dict(),
                    f"nvidia-ctk cdi generate --output={spec.path}",
                )
            )
    return found
