# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Slurm on real daemons: its controller, munge or a slurmd is away."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from slurm_cluster import Cluster, until

from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import Mark, SchedulerError

R1, R2 = Mark("run-1", 1.0), Mark("run-2", 2.0)
OURS = "gpufleet: NVIDIA driver upgrade, run=run-1"


def test_a_controller_that_restarts_meanwhile_is_waited_for(slurm: Cluster) -> None:
    slurm.lab("kill", "slurmctld")
    later = threading.Timer(2.0, slurm.lab, ("start", "slurmctld"))
    later.start()
    try:
        assert slurm.backend().cordon(["gpu-1"], R1)["gpu-1"].changed
    finally:
        later.join()


def restart(slurm: Cluster) -> None:
    """Not by a crash: slurmctld would forget what it has not saved yet, a job too."""
    slurm.lab("stop", "slurmctld")
    slurm.lab("start", "slurmctld")


def test_a_controller_that_restarts_while_a_job_saves_itself_costs_nothing(slurm: Cluster) -> None:
    job = slurm.counter("f", takes=4)
    node = slurm.running(job).nodes[0]
    until(lambda: slurm.text("f.now"), "a step")
    slurm.backend().cordon([node], R1)
    with ThreadPoolExecutor(1) as pool:
        emptied = pool.submit(slurm.empty, [node], R1, "move", 60)
        until(lambda: "step=asked" in slurm.job(job).admin_comment, "it is asked to save itself")
        restart(slurm)
        assert [end.how for end in emptied.result()[node].ends] == ["requeued"]
    slurm.running(job, 60)
    assert int(slurm.text("f")) > 0 and slurm.text("f.log").splitlines()[1].startswith(
        f"start {slurm.text('f').strip()}"
    )


def test_a_controller_that_restarts_during_a_proof_leaves_the_node_closed(slurm: Cluster) -> None:
    slurm.backend().cordon(["gpu-1"], R1)
    with ThreadPoolExecutor(1) as pool:
        proof = pool.submit(slurm.backend(command=["sleep", "5"]).validate, ["gpu-1"], R1, {"gpu-1": 4}, 40)
        until(lambda: any(job.name == "gpufleet-validate" and job.on_node for job in slurm.commands.jobs()), "it runs")
        restart(slurm)
        proof.result()
    assert slurm.node("gpu-1").drain and slurm.node("gpu-1").reason == OURS
    assert not slurm.commands.reservations()
    assert not slurm.backend().validate(["gpu-1"], R1, {"gpu-1": 4}, 40)["gpu-1"].failed


@pytest.mark.parametrize("daemon", ["slurmctld", "munge"])
def test_a_controller_that_stays_away_is_named_within_the_time_given(slurm: Cluster, daemon: str) -> None:
    slurm.lab("kill", daemon)
    slurm.commands.timeout, usual = 3.0, slurm.commands.timeout
    slurm.commands._there = False
    started = time.monotonic()
    try:
        with pytest.raises(SchedulerError, match=f"{daemon}.* has not answered for 3 s .*: systemctl status {daemon}"):
            slurm.backend().cordon(["gpu-1"], R1)
        assert time.monotonic() - started < 15
    finally:
        slurm.commands.timeout = usual
        slurm.lab("start", daemon)
    until(lambda: "UP" in slurm.sh("scontrol", "ping", check=False), "the controller answers")


def test_status_says_in_one_line_that_slurmctld_does_not_answer(slurm: Cluster, tmp_path: Path) -> None:
    slurm.lab("kill", "slurmctld")
    try:
        said = slurm.play("status", tmp_path, timeout=2)
    finally:
        slurm.lab("start", "slurmctld")
    assert said.count("slurmctld has not answered for 2 s (Slurmctld(primary) at ") == 1, "it is asked only once"
    assert '"a  ' in said, "the nodes are shown all the same"


def test_a_node_whose_slurmd_is_dead_is_not_put_back_to_work(slurm: Cluster) -> None:
    slurm.backend().cordon(["gpu-1"], R1)
    slurm.lab("kill", "gpu-1")
    until(lambda: slurm.node("gpu-1").silent, "the slurmd is missed", 60)
    slurm.commands.timeout, usual = 3.0, slurm.commands.timeout
    try:
        result = slurm.backend().uncordon(["gpu-1"], R1)["gpu-1"]
    finally:
        slurm.commands.timeout = usual
        slurm.lab("start", "gpu-1")
    assert result.failed and "systemctl status slurmd" in result.msg
    assert slurm.node("gpu-1").drain and slurm.node("gpu-1").reason.startswith(OURS)
    assert not slurm.backend().uncordon(["gpu-1"], R1)["gpu-1"].failed


def test_a_silent_node_is_not_taken_for_empty(slurm: Cluster) -> None:
    slurm.backend().cordon(["gpu-1"], R1)
    slurm.lab("kill", "gpu-1")
    until(lambda: slurm.node("gpu-1").silent, "the slurmd is missed", 60)
    try:
        waiting = slurm.empty(["gpu-1"], R1, patience=0)["gpu-1"]
        late = slurm.empty(["gpu-1"], R1, patience=0, deadline=-1)["gpu-1"]
    finally:
        slurm.lab("start", "gpu-1")
    assert waiting.waiting and "does not answer" in waiting.waiting[0]
    assert late.failed and "scontrol show node gpu-1" in late.msg


def test_a_drained_node_that_is_taken_for_dead_while_it_reboots_is_still_ours(slurm: Cluster) -> None:
    slurm.backend().cordon(["gpu-1"], R1)
    slurm.lab("kill", "gpu-1")
    until(lambda: "DOWN" in slurm.node("gpu-1").state, "it is taken for dead", 60)
    assert slurm.node("gpu-1").drain and slurm.empty(["gpu-1"], R1, patience=0)["gpu-1"].waiting
    slurm.lab("boot", "gpu-1")
    assert not slurm.backend().validate(["gpu-1"], R1, {"gpu-1": 4}, 60)["gpu-1"].failed
    assert slurm.node("gpu-1").drain and slurm.node("gpu-1").reason == OURS
    assert slurm.backend().uncordon(["gpu-1"], R1)["gpu-1"].changed
