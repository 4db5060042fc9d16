# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One hosts lab for the whole run, whose machines can save and restore processes and containers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(TOP / "tests/integration"))
sys.path.insert(0, str(Path(__file__).parent))

from fleet import Fleet  # noqa: E402
from works import GPUS, NODES, Works  # noqa: E402


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    state = tmp_path_factory.mktemp("moves")
    utils = "ansible_collections/gpufleet/driver/plugins/module_utils"
    shutil.copytree(TOP / "plugins/module_utils", state / "share" / utils)
    shutil.copy(Path(__file__).with_name("die.py"), state / "share")
    command = [str(TOP / "tests/lab/hosts/lab"), "up", "--nodes", str(len(NODES)), "--gpus", str(GPUS)]
    done = subprocess.run(
        [*command, "--state", str(state / "lab"), "--podman", "--compiled", "--share", str(state / "share")],
        stderr=subprocess.PIPE, text=True, timeout=2400, check=False,
    )  # fmt: skip
    for part in ("criu", "podman"):
        if done.returncode and part in done.stderr:
            pytest.skip(f"{part} does not work here: {done.stderr.strip()[-500:]}; it needs Debian's package mirror")
    assert done.returncode == 0, done.stderr
    fleet = Fleet("hosts", state / "lab", NODES)
    yield fleet
    fleet.lab("down")


@pytest.fixture
def works(lab: Fleet) -> Iterator[Works]:
    yield Works(lab)
    shutil.rmtree(lab.state / "host_vars", ignore_errors=True)
    lab.lab("reset")
