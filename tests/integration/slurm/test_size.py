# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Slurm on a real controller with 5,000 nodes, which exist only there."""

from __future__ import annotations

from slurm_cluster import OLD, Cluster

from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import Mark


def test_five_thousand_nodes() -> None:
    with Cluster.fresh("--records", "5000", nodes=0) as slurm:
        names = list(slurm.commands.nodes())
        assert len(names) == 5000
        mark = Mark("run-1", 1.0)
        # slurmctld has never heard of them; a person would make them usable like this
        slurm.sh("scontrol", "update", "nodename=record-[0001-5000]", "state=down", "reason=boot")
        slurm.sh("scontrol", "update", "nodename=record-[0001-5000]", "state=resume")
        slurm.drain("record-4711")
        done = slurm.backend(versions=dict.fromkeys(names, OLD)).cordon(names[:1500], mark)
        assert sum(result.changed for result in done.values()) == 1500
        seen = slurm.backend().snapshot([])
        assert len(seen.nodes) == 5000 and {node.loaded for node in seen.nodes} == {OLD}
        assert [node.name for node in seen.nodes if node.cordoned_by] == ["record-4711"]
