# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run small playbooks with the real ansible-playbook, against hosts on this machine and one that never answers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[3]


class Played:
    def __init__(self, done: subprocess.CompletedProcess[str], touched: list[str]) -> None:
        self.rc = done.returncode
        self.output = done.stdout + done.stderr
        self.touched = touched
        """Hosts whose upgrade step ran, in order."""


@pytest.fixture
def play(tmp_path: Path) -> Callable[[str], Played]:
    """Play YAML text on hosts a, b, c, d; `gone` is a variable of a host that makes it unreachable."""
    inventory = tmp_path / "hosts.ini"
    inventory.write_text(
        "[gpu_nodes]\na\nb\nc\nd\n[gpu_nodes:vars]\nansible_connection=local\n"
        f"ansible_python_interpreter={sys.executable}\n"
    )
    touched = tmp_path / "touched"

    def run(text: str, *arguments: str) -> Played:
        playbook = tmp_path / "play.yml"
        playbook.write_text(text)
        done = subprocess.run(
            ["ansible-playbook", "-i", str(inventory), str(playbook), "-e", f"touched={touched}", *arguments],
            cwd=tmp_path,
            env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(TOP / ".build"), "ANSIBLE_NOCOLOR": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        lines = touched.read_text().split() if touched.exists() else []
        return Played(done, lines)

    return run
