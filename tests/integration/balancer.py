# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A made load balancer, to see which nodes are in service."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any


class Balancer:
    """A made load balancer: a file for each node in service. ``variables`` tell the playbooks how to use it."""

    def __init__(self, directory: Path, nodes: list[str]) -> None:
        self.service = directory / "in service"
        self.service.mkdir()
        for name in nodes:
            (self.service / name).touch()
        self.script = directory / "lb"
        self.become("")
        self.options: dict[str, Any] = {
            "cordon_command": [str(self.script), "drain", "{node}"],
            "uncordon_command": [str(self.script), "enable", "{node}"],
            "state_command": [str(self.script), "state", "{node}"],
            "state_dir": str(directory / "marks"),
        }

    @property
    def variables(self) -> dict[str, Any]:
        return {"gpu_scheduler_options": self.options}

    def become(self, cases: str) -> None:
        """Another behaviour for some nodes: branches of a shell's case over drain.NODE, enable.NODE and state.NODE."""
        usual = 'drain.*) rm -- "$2";; enable.*) touch -- "$2";; state.*) test -e "$2";;'
        self.script.write_text(f"#!/bin/sh\ncd '{self.service}' || exit 9; case $1.$2 in {cases} {usual} esac\n")
        self.script.chmod(stat.S_IRWXU)

    @property
    def in_service(self) -> list[str]:
        return sorted(path.name for path in self.service.iterdir())
