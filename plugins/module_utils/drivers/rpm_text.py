# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What rpm, dnf and zypper print, as data. Nothing here runs a command.

A version is written ``[epoch:]version-release``, the epoch only where it is not 0, as in ``3:570.86.10-1.el9``.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import configparser
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.naming import strip_kernel
from ansible_collections.gpufleet.driver.plugins.module_utils.version import DriverVersion, of_package

RPM_FORMAT = r"%{NAME}|%{EPOCHNUM}|%{VERSION}|%{RELEASE}|%{ARCH}\n"
"""The format of ``rpm -qa --qf`` that :func:`rpm_packages` reads."""

REPOQUERY_FORMAT = "%{name}|%{epoch}|%{version}|%{release}|%{arch}|%{repoid}|%{downloadsize}"
"""The format of ``dnf repoquery --qf`` that :func:`offers` reads."""


@dataclass(frozen=True)
class Rpm:
    """An installed package, or with ``repository`` and ``bytes`` one that a repository offers."""

    name: str
    version: str
    arch: str
    repository: str = ""
    bytes: int = 0

    @property
    def nevra(self) -> str:
        return f"{self.name}-{self.version}.{self.arch}"


def _version(epoch: str, version: str, release: str) -> str:
    return f"{version}-{release}" if epoch in ("0", "", "(none)") else f"{epoch}:{version}-{release}"


def rpm_packages(text: str) -> list[Rpm]:
    """Parse ``rpm -qa`` in :data:`RPM_FORMAT`."""
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 4]
    return [Rpm(name, _version(epoch, version, release), arch) for name, epoch, version, release, arch in rows]


def offers(text: str) -> list[Rpm]:
    """Parse ``dnf repoquery`` in :data:`REPOQUERY_FORMAT`."""
    found = []
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) == 7:
            name, epoch, version, release, arch, repository, size = fields
            found.append(Rpm(name, _version(epoch, version, release), arch, repository, int(size or 0)))
    return found


def enabled_stream(text: str) -> str | None:
    """The stream that a file of ``/etc/dnf/modules.d`` enables, or None."""
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(text)
    except configparser.Error:
        return None
    for section in parser.sections():
        if parser.get(section, "state", fallback="") == "enabled":
            return parser.get(section, "stream", fallback="") or None
    return None


_SECTIONS = {
    "Installing:": "install",
    "Installing dependencies:": "install",
    "Installing weak dependencies:": "install",
    "Upgrading:": "install",
    "Downgrading:": "install",
    "Reinstalling:": "install",
    "Removing:": "remove",
    "Removing dependent packages:": "remove",
    "Removing unused dependencies:": "remove",
    "Switching module streams:": "switch",
    "Enabling module streams:": "switch",
    "Resetting modules:": "reset",
}


@dataclass(frozen=True)
class DnfChange:
    """One row of the table dnf shows before a transaction; ``action`` is install or remove."""

    action: str
    name: str
    version: str
    arch: str


def transaction(text: str) -> list[DnfChange]:
    """The rows of dnf's transaction table; a name too long for its column is on a line of its own."""
    changes: list[DnfChange] = []
    action, carried = "", ""
    for line in text.splitlines():
        stripped = line.strip()
        if stripped in _SECTIONS:
            action, carried = _SECTIONS[stripped], ""
        elif stripped.startswith("Transaction Summary"):
            action = ""
        elif action in ("install", "remove") and line.startswith(" "):
            fields = (carried.split() if carried else []) + stripped.split()
            if stripped.startswith("replacing "):
                changes.append(_replaced(stripped))
            elif len(fields) >= 4:
                changes.append(DnfChange(action, fields[0], fields[2], fields[1]))
                carried = ""
            else:
                carried = " ".join(fields)
    return changes


def _replaced(line: str) -> DnfChange:
    """``replacing  nvidia-fabric-manager.x86_64 3:570.86.15-1``."""
    name, dummy, arch = line.split()[1].rpartition(".")
    return DnfChange("remove", name, line.split()[-1], arch)


def problems(text: str) -> list[str]:
    """The reasons dnf gives for refusing a transaction."""
    found = []
    for line in text.splitlines():
        stripped = line.strip()
        if re.match(r"^(Problem( \d+)?:|- |Error:|Unable to find a match|All matches were filtered out)", stripped):
            found.append(re.sub(r"^(Problem( \d+)?: |- |Error: ?)", "", stripped))
    return [reason for reason in found if reason]


def lock_name(entry: str) -> str:
    """The package name of a versionlock entry: ``nvidia-driver-3:550.90.07-1.el9.*`` → ``nvidia-driver``."""
    found = re.match(r"^!?(?P<name>\S+?)-(?:\d+:)?\d[^-]*-[^-]+$", entry.strip())
    return found["name"] if found else entry.strip().lstrip("!")


def zypper_offers(text: str) -> list[Rpm]:
    """Parse ``zypper search -s``: ``status | name | type | version | arch | repository``."""
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) == 6 and fields[2] == "package":
            found.append(Rpm(fields[1], fields[3], fields[4], fields[5]))
    return found


def common_version(offered: Mapping[str, Iterable[str]]) -> DriverVersion | None:
    """The highest driver version that every one of the packages in ``offered`` has, whatever kernel a kmp names."""
    sets = [
        {version for version in (of_package(strip_kernel(text)) for text in versions) if version}
        for versions in offered.values()
    ]
    both = set.intersection(*sets) if sets else set()
    return max(both) if both else None
