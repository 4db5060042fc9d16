# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""upgrade.yml from end to end with Slurm: slurmd runs on the hosts lab's machines, jobs hold device files there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet import Fleet
from slurm_cluster import NEW, OLD, Cluster, until

pytestmark = pytest.mark.skipif(
    "GPUFLEET_UNPROVEN" not in os.environ, reason="has never passed yet; GPUFLEET_UNPROVEN=1 runs it all the same"
)

NODES = 8
HOLD = "exec 3<>/dev/nvidia${CUDA_VISIBLE_DEVICES%%,*}"


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[Cluster, Fleet]]:
    top = Path(tempfile.mkdtemp(prefix="gpufleet-slurm-"))
    shared, hosts = top / "slurm", top / "hosts"
    shared.mkdir()
    for path in (top, shared):
        path.chmod(0o755)
    names = [f"gpu-{number}" for number in range(1, NODES + 1)]
    fleet = Fleet("hosts", hosts, names)
    fleet.lab("up", "--nodes", str(NODES), "--share", str(shared), timeout=2400)
    try:
        with Cluster.up(shared, "--machines", str(hosts), nodes=NODES) as cluster:
            yield cluster, fleet
    finally:
        fleet.lab("down")
        shutil.rmtree(top)


def test_upgrade_with_slurm(machines: tuple[Cluster, Fleet]) -> None:
    slurm, fleet = machines
    foreign = "gpu-8"
    slurm.drain(foreign, reason="bad DIMM")
    array = slurm.submit(f"{HOLD}; sleep 20", "--array=1-6", "--gres=gpu:1", "--requeue")
    gang = slurm.submit(f"srun sh -c '{HOLD}; sleep 600'", "--nodes=2", "--gres=gpu:3", "--requeue")
    deaf = slurm.submit(f"{HOLD}; trap '' TERM; while :; do sleep 1; done", "--gres=gpu:1", "--requeue")
    fixed = slurm.submit(f"{HOLD}; sleep 45", "--gres=gpu:1", "--no-requeue", "--time=2")
    saver = slurm.counter("saver")
    for job in (gang, deaf, fixed, saver):
        slurm.running(job)
    was_on = slurm.job(saver).nodes[0]
    until(lambda: int(slurm.text("saver.now") or 0) > 3, "three steps")

    wanted = {
        "gpu_driver_version": NEW,
        "gpu_scheduler": "slurm",
        "gpu_scheduler_options": {"slurm_conf": str(slurm.state / "etc/slurm.conf")},
        "gpu_batch_size": 3,
        "gpu_max_unavailable": "100%",
        "gpu_reserve": [was_on],
        "gpu_workload_wait": 120,
        "gpu_baseline_tolerance": 100,
    }
    playing = fleet.begin("upgrade", **wanted)
    swap = "TASK [gpufleet.driver.install : Swap the driver]"
    until(lambda: playing.log.read_text().count(swap) == 2, "the batch after the canary is at it", 300)
    slurm.lab("stop", "slurmctld")
    slurm.lab("start", "slurmctld")
    later, killed = [name for name, node in slurm.commands.nodes().items() if node.reason.startswith("gpufleet: ")][:2]
    slurm.drain(later, reason="fan broken")
    slurm.lab("kill", killed)
    played = playing.end()

    ours = [name for name in fleet.names if name != foreign]
    for dummy in range(3):
        # a plan that no longer holds, because a job is elsewhere now, ends the run in good order: one runs it again
        assert set(played.outcomes.values()) <= {"upgraded", "already", "skipped", "not started"}, played.output[-6000:]
        if all(fleet.loaded(name) == NEW for name in ours):
            break
        played = fleet.play("upgrade", **wanted)
    nodes = slurm.commands.nodes()
    assert nodes[foreign].reason == "bad DIMM" and nodes[foreign].drain and fleet.loaded(foreign) == OLD
    assert nodes[later].reason == "fan broken" and nodes[later].drain
    for name in ours:
        assert fleet.loaded(name) == NEW, played.output[-6000:]
        assert nodes[name].drain == (name == later), nodes[name]
        if name != later:
            assert f"driver-{NEW}" in nodes[name].active, nodes[name]
    assert f"driver-{OLD}" in nodes[foreign].active
    assert not slurm.commands.reservations()

    # nothing is lost: what ended ended well, what could not be waited for goes on
    until(lambda: all(slurm.state_of(f"{array}_{task}") == "COMPLETED" for task in range(1, 7)), "the array", 60)
    assert slurm.state_of(fixed) == "COMPLETED"
    for job in (gang, deaf, saver):
        slurm.running(job, 180)
    starts = [line.split() for line in slurm.text("saver.log").splitlines()]
    assert starts[0] == ["start", "0", "on", was_on] and len(starts) > 1
    assert all(int(line[1]) > 0 for line in starts[1:]), starts
