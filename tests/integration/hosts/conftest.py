# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One hosts lab for the whole run; each test gets its machines as new."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(TOP / "tests/integration"))

from balancer import Balancer  # noqa: E402
from fleet import Fleet  # noqa: E402

NODES = 4


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    state = tmp_path_factory.mktemp("hosts")
    command = [str(TOP / "tests/lab/hosts/lab"), "up", "--nodes", str(NODES), "--state", str(state)]
    subprocess.run([*command, "--workload", "--compiled"], check=True, timeout=2400)
    fleet = Fleet("hosts", state, [f"gpu-{number}" for number in range(1, NODES + 1)])
    yield fleet
    fleet.lab("down")


@pytest.fixture
def fleet(lab: Fleet) -> Iterator[Fleet]:
    yield lab
    for name in lab.names:
        lab.lab("plug", name)
    shutil.rmtree(lab.state / "host_vars", ignore_errors=True)
    lab.lab("reset")


@pytest.fixture
def balancer(tmp_path: Path) -> Balancer:
    return Balancer(tmp_path, ["gpu-1", "gpu-2", "gpu-3"])
