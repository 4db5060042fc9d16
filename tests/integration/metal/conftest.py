# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Virtual machines with a real kernel; each test gets new ones from the saved state."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(TOP / "tests/integration"))

from fleet import Fleet  # noqa: E402


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Callable[[int], Fleet]]:
    """Start this many machines, named node1, node2, …"""
    started: list[Fleet] = []

    def start(nodes: int) -> Fleet:
        state = tmp_path / "metal"
        command = [str(TOP / "tests/lab/metal/lab"), "up", "--nodes", str(nodes), "--state", str(state)]
        subprocess.run(command, check=True, timeout=2400)
        started.append(Fleet("metal", state, [f"node{number}" for number in range(1, nodes + 1)]))
        return started[-1]

    yield start
    for each in started:
        each.lab("down")
