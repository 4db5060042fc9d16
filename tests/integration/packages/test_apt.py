# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Real apt and dpkg move a driver: the whole set, offline, held, withdrawn, broken, killed."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers import install
from ansible_collections.gpufleet.driver.plugins.module_utils.drivers.base import SourceError
from ansible_collections.gpufleet.driver.plugins.module_utils.journal import Journal
from ansible_collections.gpufleet.driver.plugins.module_utils.version import DriverVersion

KERNEL, OLD, NEW, REVISION = "6.1.0-57-cloud-amd64", "535.183.01", "550.90.07", "-0ubuntu0.22.04.1"
TARGET = DriverVersion.parse(NEW)
clock = itertools.count(1000.0).__next__


def names(branch: str) -> set[str]:
    server = ("nvidia-driver", "nvidia-utils", "libnvidia-compute", "nvidia-dkms", "nvidia-kernel-common")
    return {f"{stem}-{branch}-server" for stem in server} | {f"nvidia-fabricmanager-{branch}"}


def node_of(apt_node, sys: Path | None = None) -> install.Node:
    return install.Node(apt_node.run, KERNEL, str(apt_node.root / "state"), sys or apt_node.root / "sys")


def journal_of(apt_node) -> Journal:
    return Journal.open(str(apt_node.root / "state"))


def upgrade(apt_node, target=TARGET, **options):
    source = apt_node.source(**options.pop("source", {}))
    journal = journal_of(apt_node)
    try:
        return install.install(source, journal, node_of(apt_node), target, "auto", clock, **options)
    finally:
        journal.close()


def go_back(apt_node, **options):
    journal = journal_of(apt_node)
    try:
        return install.restore(apt_node.source(), journal, node_of(apt_node), clock, **options)
    finally:
        journal.close()


def test_the_whole_set_moves_and_comes_back(apt_node):
    before = apt_node.packages()
    result = upgrade(apt_node)
    assert result.changed and result.disk_module == NEW
    assert apt_node.packages() == {n: (NEW + REVISION if "fabric" not in n else f"{NEW}-1") for n in names("550")}
    assert not upgrade(apt_node).changed
    back = go_back(apt_node)
    assert back.changed and apt_node.packages() == before and apt_node.disk_module() == OLD
    assert not go_back(apt_node).changed


def test_marks_of_automatic_packages_are_carried(apt_node):
    upgrade(apt_node)
    automatic = set(apt_node.must("apt-mark", "showauto").split())
    assert automatic == names("550") - {"nvidia-driver-550-server", "nvidia-fabricmanager-550"}
