# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An upgrade during which work moves instead of being stopped: away by its process image, home by its own save."""

from __future__ import annotations

import time

from works import HOME, NODES, Work, Works

NEW = "550.90.07"


def test_two_move_during_the_upgrade_and_come_home(works: Works) -> None:
    fleet = works.fleet
    rows = [Work("one"), Work("two", gpu=1)]
    works.start(*rows)
    fleet.vary(HOME, gpu_workloads=[work.declared() for work in rows])
    played = fleet.play("upgrade", gpu_driver_version=NEW, gpu_workload_wait=20, gpu_baseline_tolerance=100)
    assert played.rc == 0, played.output[-5000:]
    assert set(played.outcomes.values()) == {"upgraded"}
    for work in rows:
        seen = works.look_at(HOME)[work.name]
        numbers = [step for step, dummy in seen["steps"]]
        assert seen["active"] and numbers == list(range(1, len(numbers) + 1))
        hosts = [host for dummy, host in seen["steps"]]
        changes = [host for index, host in enumerate(hosts) if not index or hosts[index - 1] != host]
        assert changes == [HOME, NODES[-1], HOME]
        assert f"work: {work.name} ({HOME} to {NODES[-1]}): moved, stood still for" in played.output
        assert f"work: {work.name} ({NODES[-1]} to {HOME}): moved, stood still for" in played.output
        deadline = time.monotonic() + 30
        while works.look_at(HOME)[work.name]["steps"][-1][0] == numbers[-1]:
            assert time.monotonic() < deadline, f"{work.name} takes no step"
    for name in NODES:
        assert works.left_behind(name) == ""
    page = (fleet.state / "report.html").read_text()
    assert "<h2>Work</h2>" in page and page.count('data-head="stood still"') == 4
