# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An upgrade during which a unit and a container move instead of being stopped: away by their process images, home by
their own saves."""

from __future__ import annotations

from boxes import Box, machines
from works import HOME, NODES, Work, Works

NEW = "550.90.07"


def test_work_moves_during_the_upgrade_and_comes_home(works: Works) -> None:
    work = Work("one")
    with machines(works.fleet) as nodes:
        works.start(work)
        box = Box("notebook", nodes[HOME], "--env", "CUDA_VISIBLE_DEVICES=1")
        upgrade(works, work, box)


def upgrade(works: Works, work: Work, box: Box) -> None:
    fleet = works.fleet
    fleet.vary(HOME, gpu_workloads=[work.declared(), box.declared()])
    played = fleet.play("upgrade", gpu_driver_version=NEW, gpu_workload_wait=20, gpu_baseline_tolerance=100)
    assert played.rc == 0, played.output[-5000:]
    assert set(played.outcomes.values()) == {"upgraded"}
    for one in (work, box):
        assert f"work: {one.name} ({HOME} to {NODES[-1]}): moved, stood still for" in played.output
        assert f"work: {one.name} ({NODES[-1]} to {HOME}): moved, stood still for" in played.output
    box.assert_goes_on(works.nodes[HOME])
    assert works.sh(NODES[-1], "podman ps --all --quiet") == ""
    seen = works.look_at(HOME)[work.name]
    assert seen["active"]
    hosts = [host for dummy, host in seen["steps"]]
    changes = [host for index, host in enumerate(hosts) if not index or hosts[index - 1] != host]
    assert changes == [HOME, NODES[-1], HOME]
    works.assert_runs(work, HOME, works.look())
    for name in NODES:
        assert works.left_behind(name) == ""
    page = (fleet.state / "report.html").read_text()
    assert "<h2>Work</h2>" in page and page.count('data-head="stood still"') == 4
