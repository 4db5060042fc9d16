# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""upgrade.yml from end to end with Slurm: slurmd runs on the hosts lab's machines, jobs hold device files there."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fleet import Fleet, Playing
from slurm_cluster import NEW, OLD, Cluster, until

NODES = 8
FOREIGN, MOVING, FIXED, RESERVE = "gpu-8", "gpu-1", "gpu-2", "gpu-7"
HOLD = "for gpu in ${CUDA_VISIBLE_DEVICES//,/ }; do exec {fd}<>/dev/nvidia$gpu; done"
ENDS = "until [ -e %s ]; do sleep 0.2; done"
"""A job ends when the test says so, whatever the time it takes until then."""


@pytest.fixture
def machines() -> Iterator[tuple[Cluster, Fleet]]:
    top = Path(tempfile.mkdtemp(prefix="gpufleet-slurm-"))
    shared, hosts = top / "slurm", top / "hosts"
    shared.mkdir()
    for path in (top, shared):
        path.chmod(0o755)
    names = [f"gpu-{number}" for number in range(1, NODES + 1)]
    fleet = Fleet("hosts", hosts, names)
    fleet.lab("up", "--nodes", str(NODES), "--share", str(shared), "--compiled", timeout=2400)
    try:
        with Cluster.up(shared, "--machines", str(hosts), nodes=NODES) as cluster:
            yield cluster, fleet
    finally:
        fleet.lab("down")
        shutil.rmtree(top)


def only_on(slurm: Cluster, *open_: str) -> None:
    """Let jobs start on these nodes only, without binding them to the nodes for ever as --nodelist does."""
    closed = [name for name in slurm.names if name not in (*open_, FOREIGN)]
    if closed:
        slurm.drain(*closed, reason="the test places its jobs")
    slurm.sh("scontrol", "update", f"nodename={','.join(open_)}", "state=undrain")


def test_upgrade_with_slurm(machines: tuple[Cluster, Fleet]) -> None:
    slurm, fleet = machines
    ours = [name for name in fleet.names if name != FOREIGN]
    slurm.drain(FOREIGN, reason="bad DIMM")

    def place(node: str, submit: Callable[[], str]) -> str:
        only_on(slurm, node)
        job = submit()
        assert slurm.running(job).nodes == (node,)
        return job

    jobs = slurm.state / "jobs"
    saver = place(RESERVE, lambda: slurm.counter("saver", hold=HOLD))
    mover = place(MOVING, lambda: slurm.counter("mover", "--time=15", hold=HOLD, may="wait,move"))
    last = f"{HOLD}; {ENDS % (jobs / 'fixed.end')}"
    fixed = place(FIXED, lambda: slurm.submit(last, "--gres=gpu:1", "--no-requeue", "--time=15"))
    only_on(slurm, *(name for name in ours if name not in (RESERVE, MOVING, FIXED)))
    task = f"{HOLD}; {ENDS % (jobs / 'array.end')}; echo $SLURM_ARRAY_TASK_ID >>{jobs}/array.log"
    array = slurm.submit(task, "--array=1-4", "--gres=gpu:2", "--requeue")
    gang = slurm.submit(f"srun bash -c '{HOLD}; sleep 3600'", "--nodes=2", "--gres=gpu:3", "--requeue")
    deaf = slurm.submit(f"{HOLD}; trap '' TERM; while :; do sleep 1; done", "--gres=gpu:1", "--requeue")
    tasks = [f"{array}_{number}" for number in range(1, 5)]
    for job in (*tasks, gang, deaf):
        slurm.running(job)
    only_on(slurm, *ours)
    until(lambda: int(slurm.text("mover.now") or 0) > 3 and int(slurm.text("saver.now") or 0) > 3, "three steps")
    # the GPU that the kernel will not let go of: only a reboot helps
    fleet.sh(FIXED, "echo 1 > /sys/module/nvidia/parameters/stuck")

    scheduler = {
        "gpu_scheduler": "slurm",
        "gpu_scheduler_options": {"slurm_conf": str(slurm.state / "etc/slurm.conf")},
    }
    playing = fleet.begin(
        "upgrade",
        gpu_driver_version=NEW,
        **scheduler,
        gpu_canary=[MOVING],
        gpu_batch_size=3,
        gpu_max_unavailable="100%",
        gpu_reserve=[RESERVE],
        gpu_workload_wait=240,
        gpu_baseline_tolerance=100,
    )

    def meanwhile(found: Callable[[], Any], what: str) -> Any:
        seen = until(lambda: found() or playing.process.poll() is not None, what, 600)
        assert playing.process.poll() is None, f"{what} never came:\n{playing.log.read_text()[-6000:]}"
        return seen

    def end_what_is_waited_for() -> None:
        meanwhile(lambda: slurm.node(FIXED).reason.startswith("gpufleet: "), "the turn of the node of the fixed job")
        assert slurm.job(fixed).state == "RUNNING"
        slurm.touch("fixed.end")

    def end_what_was_moved() -> None:
        meanwhile(lambda: len(starts(slurm, "mover")) == 2, "the moved job has started again")
        slurm.touch("mover.end")

    with ThreadPoolExecutor(2) as pool:
        ended = [pool.submit(end_what_is_waited_for), pool.submit(end_what_was_moved)]
        later, killed = meanwhile(lambda: swapping(slurm, playing), "the swap of several nodes")[:2]
        slurm.lab("stop", "slurmctld")
        slurm.lab("start", "slurmctld")
        slurm.drain(later, reason="fan broken")
        slurm.lab("kill", killed)
        for one in ended:
            one.result()
        played = playing.end()
    slurm.touch("array.end")

    assert played.outcomes == {**dict.fromkeys(ours, "upgraded"), FOREIGN: "skipped"}, played.output[-6000:]
    nodes = slurm.commands.nodes()
    for name in ours:
        assert fleet.loaded(name) == NEW
        assert nodes[name].drain == (name == later), nodes[name]
        assert f"driver-{NEW}" in nodes[name].active or name == later, nodes[name]
    assert nodes[FOREIGN].reason == "bad DIMM" and nodes[FOREIGN].drain and fleet.loaded(FOREIGN) == OLD
    assert f"driver-{OLD}" in nodes[FOREIGN].active
    assert nodes[later].reason == "fan broken"
    assert "fan broken" in played.nodes[later]["stays"] and f"note: {later}: " in played.output
    assert not slurm.commands.reservations()

    # nothing is lost: what was waited for ended well and only once, what was saved went on from there
    assert slurm.state_of(fixed) == "COMPLETED" and slurm.restarts(fixed) == 0
    first, second = starts(slurm, "mover")
    assert slurm.state_of(mover) == "COMPLETED"
    assert (first["on"], first["with"], second["with"]) == (MOVING, OLD, OLD) and int(second["start"]) > 3
    slurm.running(saver, 60)
    first, *dummy, last_start = starts(slurm, "saver")
    assert (first["on"], last_start["with"]) == (RESERVE, NEW) and int(last_start["start"]) > 3
    for job in (gang, deaf):
        assert slurm.restarts(job) > 0
        slurm.running(job, 60)
    until(lambda: all(slurm.state_of(one) == "COMPLETED" for one in tasks), "the array", 60)
    assert sorted(slurm.text("array.log").split()) == ["1", "2", "3", "4"]
    assert sum(slurm.restarts(one) for one in tasks) > 0
    # one that the plan moved to an upgraded node stays bound to that driver while it runs
    left = [(job.shown, job.held, job.constraint) for job in slurm.commands.jobs()]
    assert all(not held and constraint in ("", f"driver-{NEW}") for dummy, held, constraint in left), left

    # a node that goes back says so to Slurm before it is in service, whatever becomes of the rest of the run
    back = next(name for name in ours if name != later)
    for job in (gang, deaf, saver):
        slurm.sh("scancel", "--signal=KILL", "--full", job, check=False)
        slurm.sh("scancel", job)
    until(lambda: not slurm.commands.jobs(), "no job is left", 60)
    proofs = proofs_of(slurm, back)
    playing = fleet.begin("rollback", gpu_hosts=back, **scheduler)
    playing.wait_for("PLAY [Settle]")
    playing.kill()
    assert proofs_of(slurm, back) == proofs + 1, "a job proves it too"
    assert fleet.loaded(back) == OLD and slurm.node(back).active == ("lab", f"driver-{OLD}")
    assert not slurm.node(back).out
    shown = fleet.play("status", **scheduler)
    assert all(f"out of service: {name} " in shown.output for name in (later, FOREIGN)), shown.output[-5000:]


def proofs_of(slurm: Cluster, node: str) -> int:
    """Jobs that have proven a node so far."""
    lines = slurm.sh("scontrol", "-o", "show", "job").splitlines()
    return sum("JobName=gpufleet-validate " in line and f" NodeList={node} " in line for line in lines)


def swapping(slurm: Cluster, playing: Playing) -> list[str]:
    """The nodes of a batch of more than one, while their drivers are swapped."""
    log = playing.log.read_text()
    if log.rfind("TASK [gpufleet.driver.install : Swap the driver]") < log.rfind("PLAY [Upgrade, batch by batch]"):
        return []
    found = [node.name for node in slurm.commands.nodes().values() if node.reason.startswith("gpufleet: ")]
    return found if len(found) > 1 else []


def starts(slurm: Cluster, name: str) -> list[dict[str, str]]:
    """Of each start of a counter the step that it began with, the node, and the driver loaded there."""
    lines = [line.split() for line in slurm.text(f"{name}.log").splitlines()]
    return [dict(zip(line[::2], line[1::2], strict=True)) for line in lines]
