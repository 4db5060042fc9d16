# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which source the driver of this node comes from, judged by what each install method leaves behind.

Private to this collection: may change in any release.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils.drivers import apt, dnf, runfile, zypper
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.base import (
    APT,
    DNF,
    NONE,
    OPERATOR,
    RUNFILE,
    ZYPPER,
    DriverSource,
    Installed,
    SourceError,
    error,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Runner
from ansible_collections.gpufleet.driver.plugins.module_utils.execution import run as execute
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import STATE_DIR

_MANAGERS = (("usr/bin/apt-get", APT), ("usr/bin/dnf", DNF), ("usr/bin/dnf4", DNF), ("usr/bin/zypper", ZYPPER))


def detect(run: Runner = execute, root: str = "/") -> Installed:
    """The installed driver, with a finding for two install methods at once.

    :raises SourceError: if a package database cannot be read.
    """
    found = [source.detect() for source in candidates(run, root)]
    found = [installed for installed in found if installed.versions or installed.packages]
    operator = _operator(Path(root))
    if operator:
        found.append(operator)
    if not found:
        return Installed(source=NONE)
    methods = tuple(method for installed in found for method in installed.methods)
    first = found[0]
    if len(found) == 1:
        return first
    names = " and ".join(installed.source for installed in found)
    two = error(
        "drivers.two_methods",
        f"the driver was installed twice, by {names}",
        {"methods": [dict(method) for method in methods]},
        "remove one of them by its own means before any upgrade",
    )
    return replace(first, methods=methods, problems=(*first.problems, two))


def candidates(run: Runner, root: str) -> list[DriverSource]:
    """The package manager of this system, if there is one, and the runfile."""
    manager = native(root)
    sources: list[DriverSource] = [make(manager, run, root)] if manager else []
    return [*sources, runfile.Runfile(run, root)]


def native(root: str = "/") -> str | None:
    """The package manager of the system; the database decides where apt and rpm tools are both installed."""
    base = Path(root)
    if (base / "var/lib/dpkg/status").is_file() and (base / "usr/bin/apt-get").exists():
        return APT
    return next((name for path, name in _MANAGERS if name != APT and (base / path).exists()), None)


def make(name: str, run: Runner = execute, root: str = "/", state_dir: str = STATE_DIR, **options: Any) -> DriverSource:
    """The source called ``name``; ``options`` are those of its class."""
    classes: dict[str, Any] = {APT: apt.Apt, DNF: dnf.Dnf, ZYPPER: zypper.Zypper, RUNFILE: runfile.Runfile}
    if name not in classes:
        raise SourceError(f"a driver installed by {name!r} is not ours to change; expected one of {', '.join(classes)}")
    return classes[name](run, root, state_dir, **options)


def choose(asked: str, installed: Installed, root: str = "/") -> str:
    """The source to work with: the one asked for, or the one that installed the driver.

    :raises SourceError: if another method installed it, since two methods on one node is how modules get mixed up.
    """
    if asked == "auto":
        return installed.source if installed.source != NONE else (native(root) or NONE)
    if installed.source not in (NONE, asked):
        raise SourceError(
            f"the driver here was installed by {installed.source}, and {asked} was asked for; "
            f"remove it by {installed.source} first, or set source to {installed.source}"
        )
    return asked


def _operator(root: Path) -> Installed | None:
    """A driver container of the NVIDIA GPU Operator mounts its root at /run/nvidia/driver."""
    tree = root / "run/nvidia/driver"
    if not (tree / "usr/bin/nvidia-smi").exists() and not (root / "run/nvidia/nvidia-driver.pid").exists():
        return None
    return Installed(
        source=OPERATOR, methods=({"source": OPERATOR, "evidence": f"{tree} is a driver container's root"},)
    )
