# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One Slurm lab for each module of tests; each test gets it as new. Those marked ``each_release`` run on the Slurm of
this machine, and on a newer one in a lab of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(TOP / "tests/integration"))

from slurm_cluster import LAB, Cluster  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "each_release: run on this machine's Slurm and on a newer one")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("each_release"):
        metafunc.parametrize("lab", ["own", "newer"], indirect=True, scope="module")


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    root = newer_root() if getattr(request, "param", "own") == "newer" else ""
    with Cluster.fresh("--set", "SlurmdTimeout=8", *(["--root", root] if root else [])) as cluster:
        yield cluster


def newer_root() -> str:
    made = subprocess.run([str(LAB.parent / "newer")], capture_output=True, text=True, timeout=1200, check=False)
    if made.returncode:
        pytest.skip(f"no newer Slurm, it is taken from a Debian mirror: {made.stderr.strip()}")
    return made.stdout.strip()


@pytest.fixture
def slurm(lab: Cluster) -> Iterator[Cluster]:
    yield lab
    lab.reset()
