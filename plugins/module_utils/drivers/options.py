# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The options that driver_preflight, driver_stage and driver_install share, and the source they stand for.

Private to this collection: may change in any release.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ansible_collections.gpufleet.driver.plugins.module_utils.drivers import detect, naming
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.base import (
    APT,
    DNF,
    OPERATOR,
    RUNFILE,
    ZYPPER,
    DriverSource,
    SourceError,
)
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.install import AUTO, Node
from ansible_collections.gpufleet.driver.plugins.module_utils.execution import Runner
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import STATE_DIR
from ansible_collections.gpufleet.driver.plugins.module_utils.version import DriverVersion

ARGUMENTS: Mapping[str, Any] = {
    "version": {"type": "str"},
    "flavour": {"type": "str", "choices": [AUTO, *naming.FLAVOURS], "default": AUTO},
    "source": {"type": "str", "choices": [AUTO, APT, DNF, ZYPPER, RUNFILE], "default": AUTO},
    "runfile": {"type": "path"},
    "runfile_checksum": {"type": "str"},
    "previous_runfile": {"type": "path"},
    "release_holds": {"type": "list", "elements": "str", "default": []},
    "rollback_required": {"type": "bool", "default": True},
    "lock_timeout": {"type": "int", "default": 300},
    "state_dir": {"type": "path", "default": STATE_DIR},
}


def source_for(params: Mapping[str, Any], run: Runner) -> DriverSource:
    """The source that the parameters of a module ask for.

    :raises SourceError: if another one installed the driver, or if it is not ours to change.
    """
    installed = detect.detect(run)
    if installed.source == OPERATOR:
        raise SourceError(
            "the driver of this node is a container of the NVIDIA GPU Operator; change its version in ClusterPolicy "
            "or NVIDIADriver resource, not on the host"
        )
    twice = [problem for problem in installed.problems if problem.check == "drivers.two_methods"]
    if twice:
        raise SourceError(f"{twice[0].message}; {twice[0].next}")
    name = detect.choose(params["source"], installed)
    options: dict[str, Any] = {"lock_timeout": float(params["lock_timeout"])}
    if name == RUNFILE:
        options.update(file=params["runfile"], checksum=params["runfile_checksum"], previous=params["previous_runfile"])
    else:
        options.update(release_holds=params["release_holds"], hold_all=params.get("hold", "") == "all")
    return detect.make(name, run, "/", params["state_dir"], **options)


def node_for(params: Mapping[str, Any], run: Runner) -> Node:
    return Node(run, os.uname().release, params["state_dir"])


def target_of(params: Mapping[str, Any]) -> DriverVersion:
    """:raises SourceError: if the version is not a full driver version."""
    try:
        return DriverVersion.parse(params["version"] or "")
    except ValueError as exc:
        raise SourceError(str(exc)) from exc
