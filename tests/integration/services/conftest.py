# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One machine of the hosts lab; each test gets it as new."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(TOP / "tests/integration"))

from fleet import Fleet  # noqa: E402
from node import Node  # noqa: E402

NODE = "gpu-1"


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    state = tmp_path_factory.mktemp("services")
    command = [
        str(TOP / "tests/lab/hosts/lab"),
        "up",
        "--nodes",
        "1",
        "--workload",
        "--compiled",
        "--state",
        str(state),
    ]
    subprocess.run(command, check=True, timeout=2400)
    fleet = Fleet("hosts", state, [NODE])
    yield fleet
    fleet.lab("down")


@pytest.fixture
def node(fleet: Fleet) -> Iterator[Node]:
    yield Node(fleet, NODE)
    fleet.lab("reset")
