# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One machine of a lab, as tests of single modules see it."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from typing import Any

from fleet import Fleet


@dataclass(frozen=True)
class Node:
    """The machine: shell scripts as root, and modules of the collection."""

    fleet: Fleet
    name: str

    def sh(self, script: str, check: bool = True) -> str:
        return self.fleet.sh(self.name, script, check=check).strip()

    def argv(self, module: str, options: dict[str, Any]) -> list[str]:
        given = ["-a", json.dumps(options)] if options else []
        return ["ansible", "-i", str(self.fleet.inventory), self.name, "-m", f"gpufleet.driver.{module}", *given]

    def begin(self, module: str, **options: Any) -> subprocess.Popen[str]:
        """Start a module and return at once, to disturb it."""
        return subprocess.Popen(
            self.argv(module, options),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            env=self.fleet.environment(),
            start_new_session=True,
        )

    def run(self, module: str, *flags: str, **options: Any) -> dict[str, Any]:
        """The module's result, whether it failed or not."""
        done = subprocess.run(
            [*self.argv(module, options), *flags],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=self.fleet.environment(),
            timeout=300,
            check=False,
        )
        head, found, result = done.stdout.partition(" => ")
        if not found:
            raise AssertionError(f"{module}: rc {done.returncode}\n{done.stdout}{done.stderr}")
        return {**json.JSONDecoder().raw_decode(result)[0], "failed": "| FAILED!" in head}

    def unit(self, name: str, text: str, directory: str = "/etc/systemd/system") -> None:
        self.sh(f"cat >{directory}/{name} <<'END'\n{text}\nEND")

    def active(self, *names: str) -> dict[str, str]:
        states = self.sh(f"systemctl is-active {' '.join(names)}", check=False).split()
        return dict(zip(names, states, strict=True))
