# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Slurm on real daemons: when a node is empty, and what is done to jobs that cannot be requeued."""

from __future__ import annotations

import subprocess
import time

import pytest
from slurm_cluster import Cluster, until

from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import Fate, Mark
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.slurm_jobs import Policy

R1, R2 = Mark("run-1", 1.0), Mark("run-2", 2.0)
OURS = "gpufleet: NVIDIA driver upgrade, run=run-1"


def test_draining_is_not_drained_A_SLURM_06(slurm: Cluster) -> None:
    job = slurm.submit("sleep 4", "--gres=gpu:1", node="gpu-1")
    slurm.running(job)
    slurm.backend().cordon(["gpu-1"], R1)
    first = slurm.empty(["gpu-1"], R1, patience=0)["gpu-1"]
    assert first.waiting and f"job {job} of root runs" in first.waiting[0] and not first.failed
    result = slurm.empty(["gpu-1"], R1)["gpu-1"]
    assert not result.waiting and [(end.workload, end.how) for end in result.ends] == [(f"job {job}", "ended")]
    assert slurm.state_of(job) == "COMPLETED"


@pytest.mark.each_release
def test_a_suspended_job_holds_its_gpus_on_a_node_that_is_called_drained(slurm: Cluster) -> None:
    job = slurm.submit("sleep 60", "--gres=gpu:1", "--no-requeue", node="gpu-1")
    slurm.running(job)
    slurm.sh("scontrol", "suspend", job)
    slurm.backend().cordon(["gpu-1"], R1)
    assert slurm.sh("sinfo", "-h", "-n", "gpu-1", "-o", "%T") == "drained"
    result = slurm.empty(["gpu-1"], R1, patience=5)["gpu-1"]
    assert result.waiting and "suspended" in result.waiting[0]


def test_for_seconds_after_a_restart_a_node_at_work_looks_drained(slurm: Cluster) -> None:
    job = slurm.submit("sleep 60", "--gres=gpu:1", "--no-requeue", node="gpu-1")
    slurm.running(job)
    slurm.backend().cordon(["gpu-1"], R1)
    slurm.lab("stop", "slurmctld")
    slurm.lab("start", "slurmctld")
    result = slurm.empty(["gpu-1"], R1, patience=6)["gpu-1"]
    assert result.waiting and job in result.waiting[0]


def test_an_end_that_takes_its_time_is_waited_for(slurm: Cluster) -> None:
    job = slurm.submit("trap '' TERM; while :; do sleep 1; done", "--gres=gpu:1", "--no-requeue", node="gpu-1")
    slurm.running(job)
    slurm.backend().cordon(["gpu-1"], R1)
    slurm.sh("scancel", job)
    assert slurm.job(job).state == "COMPLETING"
    result = slurm.empty(["gpu-1"], R1)["gpu-1"]
    assert not result.waiting and not result.failed
    assert slurm.node("gpu-1").busy() == "" and slurm.job(job) is None


@pytest.mark.parametrize(
    ("policy", "how", "state"),
    [("wait", "left", "RUNNING"), ("cancel", "stopped", "CANCELLED"), ("requeue", "requeued", "PENDING")],
)
def test_jobs_without_requeue_are_dealt_with_by_policy(slurm: Cluster, policy: str, how: str, state: str) -> None:
    job = slurm.submit("sleep 300", "--gres=gpu:1", "--no-requeue", node="gpu-1")
    slurm.running(job)
    slurm.backend().cordon(["gpu-1"], R1)
    result = slurm.empty(["gpu-1"], R1, deadline=-1, policy=Policy(no_requeue=policy))["gpu-1"]
    if policy == "wait":
        assert result.failed and "--no-requeue" in result.msg and f"scancel {job}" in result.msg
    else:
        assert not result.failed and result.ends[0].how == how
    assert slurm.state_of(job) == state


@pytest.mark.parametrize("policy", ["wait", "cancel"])
def test_interactive_jobs_are_dealt_with_by_policy(slurm: Cluster, policy: str) -> None:
    talk = subprocess.Popen(
        ["srun", "--gres=gpu:1", "--nodelist=gpu-1", "--job-name=talk", "sleep", "300"],
        env=slurm.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    job = until(lambda: next((job for job in slurm.commands.jobs() if job.on_node), None), "srun runs")
    assert not job.batch
    slurm.backend().cordon(["gpu-1"], R1)
    result = slurm.empty(["gpu-1"], R1, deadline=-1, policy=Policy(interactive=policy))["gpu-1"]
    if policy == "wait":
        assert result.failed and "interactive" in result.msg and talk.poll() is None
        slurm.sh("scancel", job.id)
    else:
        assert result.ends[0].how == "stopped"
    talk.wait(30)


@pytest.mark.each_release
def test_array_tasks_are_requeued_each_by_itself(slurm: Cluster) -> None:
    array = slurm.submit("sleep 300", "--gres=gpu:2", "--array=1-6%4", "--requeue")
    until(lambda: len([job for job in slurm.commands.jobs() if job.on_node]) == 4, "four tasks run")
    on = [job.shown for job in slurm.commands.jobs() if job.on_node and "gpu-1" in job.nodes]
    assert on and all(shown.startswith(f"{array}_") for shown in on)
    slurm.backend().cordon(["gpu-1"], R1)
    result = slurm.empty(["gpu-1"], R1, fate="cold_start")["gpu-1"]
    assert sorted(end.workload for end in result.ends) == sorted(f"job {shown}" for shown in on)
    until(lambda: len([job for job in slurm.commands.jobs() if job.state == "RUNNING"]) == 4, "four tasks run again")


@pytest.mark.each_release
def test_a_job_on_two_nodes_is_one(slurm: Cluster) -> None:
    job = slurm.submit("sleep 300", "--nodes=2", "--gres=gpu:4", "--requeue")
    nodes = slurm.running(job).nodes
    assert len(nodes) == 2
    slurm.backend().cordon([nodes[0]], R1)
    result = slurm.empty([nodes[0]], R1, fate="cold_start")[nodes[0]]
    assert [(end.workload, end.how) for end in result.ends] == [(f"job {job}", "requeued")]
    again = slurm.running(job)
    assert len(again.nodes) == 2 and nodes[0] not in again.nodes


def test_owners_are_told_in_the_job_and_by_a_command(slurm: Cluster) -> None:
    said = slurm.state / "jobs/said"
    job = slurm.submit("sleep 300", "--gres=gpu:1", "--requeue", user="daemon", node="gpu-1")
    slurm.running(job)
    slurm.backend().cordon(["gpu-1"], R1)
    notify = ["sh", "-c", 'echo "$@" >>"$0"', str(said), "{job}", "{user}", "{nodes}", "{message}"]
    slurm.empty(["gpu-1"], R1, fate="cold_start", notify=notify)
    assert said.read_text().startswith(f"{job} daemon gpu-1 gpu-1 gets another NVIDIA driver, and this job is put back")
    assert "another NVIDIA driver" in slurm.job(job).admin_comment
    seen = slurm.sh("scontrol", "show", "job", job, user="daemon")
    assert "another NVIDIA driver" in seen


@pytest.mark.each_release
def test_names_and_comments_that_look_like_records_are_just_texts(slurm: Cluster) -> None:
    evil = "x\n1\x1f1\x1f\x1f0\x1fRUNNING Requeue=0 NodeList=gpu-2\n"
    job = slurm.submit("sleep 300", f"--job-name={evil}", f"--comment={evil}", "--gres=gpu:1", node="gpu-1")
    found = slurm.running(job)
    assert len(slurm.commands.jobs()) == 1
    assert found.nodes == ("gpu-1",) and found.requeue and "NodeList=gpu-2" in found.name


def test_a_node_that_somebody_puts_back_to_work_meanwhile_is_given_up(slurm: Cluster) -> None:
    job = slurm.submit("sleep 300", "--gres=gpu:1", "--requeue", node="gpu-1")
    slurm.running(job)
    slurm.backend().cordon(["gpu-1"], R1)
    slurm.sh("scontrol", "update", "nodename=gpu-1", "state=resume")
    result = slurm.empty(["gpu-1"], R1, deadline=-1)["gpu-1"]
    assert result.failed and "put it back into service" in result.msg and not result.changed
    assert slurm.state_of(job) == "RUNNING" and slurm.restarts(job) == 0


def test_jobs_on_a_node_that_somebody_else_drained_are_left_alone(slurm: Cluster) -> None:
    job = slurm.submit("sleep 300", "--gres=gpu:1", "--requeue", node="gpu-1")
    slurm.running(job)
    slurm.backend().cordon(["gpu-1"], R1)
    slurm.drain("gpu-1", reason="alice: fan")
    early = slurm.empty(["gpu-1"], R1, fate="cold_start", patience=0)["gpu-1"]
    late = slurm.empty(["gpu-1"], R1, fate="cold_start", patience=0, deadline=-1)["gpu-1"]
    assert early.waiting and "is left alone: gpu-1 is drained by root (alice: fan), not by us" in early.waiting[0]
    assert late.failed and "alice: fan" in late.msg and not late.changed
    foretold = slurm.backend().evacuate(["gpu-1"], R1, [], time.time() - 1, 5, check=True)["gpu-1"]
    assert [(end.how, foretold.changed) for end in foretold.ends] == [("left", False)]
    assert slurm.state_of(job) == "RUNNING" and slurm.restarts(job) == 0


@pytest.mark.parametrize("deadline", [3600, -1], ids=["in time", "late"])
def test_what_slurm_refuses_is_said_and_fails_the_node_when_it_is_late(slurm: Cluster, deadline: float) -> None:
    job = slurm.submit("sleep 300", "--gres=gpu:1", "--requeue", node="gpu-1")
    slurm.running(job)
    slurm.backend().cordon(["gpu-1"], R1)
    fates = [Fate(f"job {job}", "cold_start")]
    result = slurm.backend_as("daemon").evacuate(["gpu-1"], R1, fates, time.time() + deadline, 1)["gpu-1"]
    text = result.msg if deadline < 0 else result.waiting[0]
    assert f"job {job} of root" in text and "Slurm refuses" in text and "gpu_scheduler_become" in text
    assert result.failed == (deadline < 0) and not result.changed
    assert slurm.job(job).admin_comment == "" and slurm.state_of(job) == "RUNNING"
