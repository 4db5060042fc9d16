# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What only real kernels can show of a move: saved work counts for no reference to the modules, so that they could be
unloaded under it; once it has moved they can be, and it goes on above another kernel.

What may go wrong in a move is tested in ../moves; an upgrade with work that moves and comes home also in test_metal.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fleet import Fleet
from node import Node

MODULES = "nvidia_drm nvidia_modeset nvidia_uvm nvidia"


def test_a_counter_moves_to_another_kernel_and_lets_go_of_its_own(fleet: Callable[[int], Fleet], counter: Any) -> None:
    machines = fleet(2)
    home, away = (Node(machines, name) for name in machines.names)
    counter.start(machines, home.name)

    saved = home.run("workload_checkpoint", state="captured", workloads=[counter.declared])
    assert not saved["failed"] and saved["workloads"][0]["source"] == "frozen", saved
    pid = saved["workloads"][0]["evidence"]["pids"][0]
    seen = home.run("module_holders_info")
    assert pid not in [one["pid"] for one in seen["holders"]], "it has let go of the device files"
    assert pid in [one["pid"] for one in seen["suspended"]] and not seen["releasable"], seen

    order = {"workloads": [{**counter.declared, "artefact": saved["workloads"][0]["artefact"]}]}
    for done in (
        away.run("checkpoint_fetch", artefact=order["workloads"][0]["artefact"], source=home.name),
        away.run("workload_restore", state="prepared", **order),
        home.run("workload_checkpoint", state="committed", target=away.name, **order),
    ):
        assert not done["failed"], done
    home.sh(f"systemctl stop nvidia-persistenced; rmmod {MODULES}")  # while the work is nowhere but in its save
    restored = away.run("workload_restore", state="restored", settle=3, **order)
    assert not restored["failed"], restored
    assert counter.went_on(machines, away.name) == machines.names
