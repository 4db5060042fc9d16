# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Virtual machines with a real kernel: three for the whole run, as new (from the saved state) for each test."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(TOP / "tests/integration"))

from fleet import Fleet  # noqa: E402

NODES = 3


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    state = tmp_path_factory.mktemp("metal")
    command = [str(TOP / "tests/lab/metal/lab"), "up", "--nodes", str(NODES), "--state", str(state)]
    subprocess.run(command, check=True, timeout=2400)
    yield Fleet("metal", state, [f"node{number}" for number in range(1, NODES + 1)])
    subprocess.run([str(TOP / "tests/lab/metal/lab"), "down", "--state", str(state)], check=True, timeout=300)


@pytest.fixture
def fleet(lab: Fleet) -> Iterator[Callable[[int], Fleet]]:
    """The first so many machines, node1, node2, …, as if there were no more."""
    used: list[str] = []

    def take(nodes: int) -> Fleet:
        used.extend(lab.names[:nodes])
        inventory = json.loads(lab.inventory.read_text())
        hosts = inventory["gpu_nodes"]["hosts"]
        inventory["gpu_nodes"]["hosts"] = {name: hosts[name] for name in used}
        fleet = Fleet("metal", lab.state, used)
        fleet.inventory = lab.state / f"first-{nodes}.yml"
        fleet.inventory.write_text(json.dumps(inventory))
        return fleet

    yield take
    lab.lab("reset", *used)
