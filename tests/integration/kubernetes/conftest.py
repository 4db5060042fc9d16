# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One control plane for the whole run; each test has nodes and a namespace of its own."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cluster import LAB, Cluster, skip_without_control_plane, until
from operator_cluster import OperatorCluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, and each with a short one, as workers are given two to begin with."""
    items.sort(key=lambda item: item.path.name != "test_upgrade.py")
    longest = sum(item.path.name == "test_upgrade.py" for item in items)
    paired = [item for pair in zip(items[:longest], items[longest:]) for item in pair]
    items[: len(paired)] = paired


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    skip_without_control_plane()
    state = tmp_path_factory.mktemp("kubernetes")
    subprocess.run([str(LAB / "lab"), "up", "--nodes", "0", "--state", str(state)], check=True, timeout=300)
    yield state
    subprocess.run([str(LAB / "lab"), "down", "--state", str(state)], check=True, timeout=100)


_number = itertools.count(1)


@pytest.fixture
def cluster(control_plane: Path) -> Iterator[Cluster]:
    made = Cluster(control_plane, f"t{next(_number)}")
    made.api.post("/api/v1/namespaces", {"metadata": {"name": made.namespace}})
    until("the default account", lambda: made.api.find(made.path("serviceaccounts", "default")))
    yield made
    made.clean()


@pytest.fixture
def operated(control_plane: Path) -> Iterator[OperatorCluster]:
    """A cluster whose drivers are the GPU Operator's."""
    made = OperatorCluster(control_plane, f"t{next(_number)}")
    made.api.post("/api/v1/namespaces", {"metadata": {"name": made.namespace}})
    until("the default account", lambda: made.api.find(made.path("serviceaccounts", "default")))
    yield made
    made.clean()
