# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What apt and dpkg print, as data. Nothing here runs a command.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

DPKG_FORMAT = r"${Package}\t${Architecture}\t${Version}\t${db:Status-Abbrev}\n"
"""The format of ``dpkg-query -W`` that :func:`dpkg_packages` reads."""

_STATES = {
    "n": "not-installed",
    "c": "config-files",
    "H": "half-installed",
    "U": "unpacked",
    "F": "half-configured",
    "W": "triggers-awaited",
    "t": "triggers-pending",
    "i": "installed",
}


@dataclass(frozen=True)
class DpkgPackage:
    """A row of the dpkg database. ``name`` carries ``:arch`` for a foreign architecture only."""

    name: str
    arch: str
    version: str
    state: str
    held: bool


def dpkg_packages(text: str, native: str) -> list[DpkgPackage]:
    """Every package that is there in some way; removed ones, with or without their configuration, are left out."""
    found = []
    for line in text.splitlines():
        fields = line.split("\t")
        if len(fields) != 4 or len(fields[3]) < 2:
            continue
        package, arch, version, flags = fields
        state = _STATES.get(flags[1], f"unknown ({flags.strip()})")
        if state in ("not-installed", "config-files"):
            continue
        if flags[2:3] == "R":
            state += ", reinstallation required"
        name = package if arch in (native, "all") else f"{package}:{arch}"
        found.append(DpkgPackage(name, arch, version, state, flags[0] == "h"))
    return found


@dataclass(frozen=True)
class Policy:
    """``apt-cache policy`` of one package; ``versions`` maps each version to the repositories that have it now,
    highest version first. A version that only ``/var/lib/dpkg/status`` knows has none."""

    installed: str | None
    candidate: str | None
    versions: Mapping[str, tuple[str, ...]]


def policies(text: str) -> dict[str, Policy]:
    """Parse ``apt-cache policy NAME…``."""
    found: dict[str, Policy] = {}
    name = installed = candidate = current = None
    versions: dict[str, list[str]] = {}

    def close() -> None:
        if name is not None:
            found[name] = Policy(installed, candidate, {v: tuple(s) for v, s in versions.items()})

    for line in text.splitlines():
        if line and not line[0].isspace():
            close()
            name, installed, candidate, current = line.rstrip(":"), None, None, None
            versions = {}
        elif line.startswith("  Installed: "):
            installed = _or_none(line)
        elif line.startswith("  Candidate: "):
            candidate = _or_none(line)
        elif line.startswith((" *** ", "     ")) and not line.startswith("      "):
            current = line[5:].split()[0]
            versions[current] = []
        elif line.startswith("        ") and current is not None and not line.rstrip().endswith("/dpkg/status"):
            versions[current].append(line.strip().partition(" ")[2])
    close()
    return found


def _or_none(line: str) -> str | None:
    value = line.partition(": ")[2].strip()
    return None if value == "(none)" else value


def stanzas(text: str) -> list[dict[str, str]]:
    """Parse deb822 paragraphs (``apt-cache show``, ``/etc/apt/preferences``); continuation lines are joined."""
    found: list[dict[str, str]] = []
    current: dict[str, str] = {}
    key = ""
    for line in [*text.splitlines(), ""]:
        if not line.strip():
            if current:
                found.append(current)
            current = {}
        elif line[0].isspace() and key in current:
            current[key] += "\n" + line.strip()
        elif ":" in line and not line.startswith("#"):
            key, dummy, value = line.partition(":")
            current[key] = value.strip()
    return found


def automatic(text: str, native: str) -> set[str]:
    """Packages that ``/var/lib/apt/extended_states`` says came as dependencies, named as in :class:`DpkgPackage`.

    ``apt-mark showauto`` prints the same, but reads all package lists for it.
    """
    found = set()
    for stanza in stanzas(text):
        if stanza.get("Auto-Installed") == "1" and "Package" in stanza:
            arch = stanza.get("Architecture", native)
            found.add(stanza["Package"] if arch in (native, "all") else f"{stanza['Package']}:{arch}")
    return found


@dataclass(frozen=True)
class Pin:
    """A stanza of an apt preferences file."""

    package: str
    pin: str
    priority: int

    def __str__(self) -> str:
        return f"{self.package}: {self.pin} (priority {self.priority})"


def pins(text: str) -> list[Pin]:
    """The pins of one preferences file; a stanza without a numeric priority has no effect and is left out."""
    found = []
    for stanza in stanzas(text):
        priority = stanza.get("Pin-Priority", "")
        if re.fullmatch(r"-?\d+", priority):
            found.append(Pin(stanza.get("Package", "*"), stanza.get("Pin", ""), int(priority)))
    return found


@dataclass(frozen=True)
class Change:
    """One package of a simulated transaction; ``old`` is None for a new one, ``new`` for a removed one."""

    name: str
    old: str | None
    new: str | None
    arch: str = ""


_INST = re.compile(r"^Inst (?P<name>\S+)(?: \[(?P<old>[^\]]+)\])? \((?P<new>\S+) .*?\[(?P<arch>[^\]]+)\]\)")
_REMV = re.compile(r"^(?:Remv|Purg) (?P<name>\S+)(?: \[(?P<old>[^\]]+)\])?")


def simulation(text: str) -> list[Change]:
    """What ``apt-get --simulate`` would do."""
    changes = []
    for line in text.splitlines():
        found = _INST.match(line)
        if found:
            changes.append(Change(found["name"], found["old"], found["new"], found["arch"]))
            continue
        found = _REMV.match(line)
        if found:
            changes.append(Change(found["name"], found["old"], None))
    return changes


def blocking(text: str) -> list[str]:
    """The pairs behind "unmet dependencies" and "held broken packages", as ``package: relation`` lines."""
    pairs: list[str] = []
    package, inside = "", False
    for line in text.splitlines():
        if "have unmet dependencies" in line:
            inside = True
            continue
        found = re.match(
            r"^ (?:(?P<package>\S+) : | +)(?P<relation>(?:Pre)?Depends|Conflicts|Breaks|Recommends): (?P<what>.+)$",
            line,
        )
        if not inside or found is None:
            inside = inside and bool(found)
            continue
        package = found["package"] or package
        if found["relation"] != "Recommends":
            pairs.append(f"{package}: {found['relation'].lower()} {found['what'].strip()}")
    return pairs


@dataclass(frozen=True)
class Transaction:
    """An entry of ``/var/log/apt/history.log``; ``changed`` maps each package to (action, old, new)."""

    start: str
    command: str
    changed: Mapping[str, tuple[str, str | None, str | None]] = field(default_factory=dict)

    @property
    def automatic(self) -> bool:
        return "unattended-upgrade" in self.command or "apt.systemd.daily" in self.command


_ENTRY = re.compile(r"(?P<name>[^\s:,]+)(?::\S+)? \((?P<versions>[^)]*)\)")


def history(text: str) -> list[Transaction]:
    """Parse apt's history log, oldest first."""
    found = []
    for stanza in stanzas(text):
        changed: dict[str, tuple[str, str | None, str | None]] = {}
        for action in ("Install", "Upgrade", "Downgrade", "Reinstall", "Remove", "Purge"):
            for entry in _ENTRY.finditer(stanza.get(action, "")):
                versions = [v.strip() for v in entry["versions"].split(",") if v.strip() != "automatic"]
                old = versions[0] if action in ("Upgrade", "Downgrade", "Remove", "Purge") and versions else None
                new = versions[-1] if action not in ("Remove", "Purge") and versions else None
                changed[entry["name"]] = (action.lower(), old, new)
        found.append(Transaction(stanza.get("Start-Date", ""), stanza.get("Commandline", ""), changed))
    return found


def errors(text: str) -> list[str]:
    """What apt and dpkg call an error, a line each; dpkg tells the cause in the indented line that follows."""
    found: list[str] = []
    told = True
    for line in text.splitlines():
        if not told and line.startswith(" "):
            found[-1] += line
            told = True
        elif line.startswith(("E: ", "dpkg: error", "dpkg: unrecoverable fatal error")):
            found.append(line)
            told = not line.endswith(":")
        else:
            told = True
    return found


_MAKE_CAUSES = (
    (re.compile(r"unrecognized command[- ]line option|unrecognized option"), "the compiler is older than the kernel's"),
    (re.compile(r"compiler .* differs|different compiler|cc version check"), "the compiler is not the kernel's"),
    (re.compile(r"build: No such file or directory|Unable to find the (?:kernel|development) "), "no kernel headers"),
    (re.compile(r"No space left on device"), "the disk is full"),
    (re.compile(r"command not found|cc: not found|gcc[-\w]*: (?:not found|No such file)"), "the compiler is missing"),
)


def make_log_cause(text: str) -> str | None:
    """Why a DKMS build failed, in one line: our reading of it, where there is one, and the line itself."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for pattern, reading in _MAKE_CAUSES:
        for line in lines:
            if pattern.search(line):
                return f"{reading}: {line}"
    return next((line for line in lines if re.search(r"\berror\b|\*\*\*", line, re.IGNORECASE)), None)
