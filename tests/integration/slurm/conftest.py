# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One Slurm lab for each module of tests; each test gets it as new."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(TOP / "tests/integration"))

from slurm_cluster import Cluster  # noqa: E402


@pytest.fixture(scope="module")
def lab() -> Iterator[Cluster]:
    # pytest's own directories are closed to the users that Slurm's daemons run as
    state = Path(tempfile.mkdtemp(prefix="gpufleet-slurm-"))
    state.chmod(0o755)
    with Cluster.up(state, "--set", "SlurmdTimeout=8") as cluster:
        yield cluster
    shutil.rmtree(state)


@pytest.fixture
def slurm(lab: Cluster) -> Iterator[Cluster]:
    yield lab
    lab.reset()
