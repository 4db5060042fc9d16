# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Slurm on real daemons: jobs are saved and put back into the queue, and nothing is lost."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from slurm_cluster import NEW, OLD, Cluster, until

from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers import slurm_jobs
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import Fate, Mark, SchedulerError
from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.slurm_jobs import Policy

R1, R2 = Mark("run-1", 1.0), Mark("run-2", 2.0)
OURS = "gpufleet: NVIDIA driver upgrade, run=run-1"


def test_a_job_that_saves_itself_goes_on_from_there_on_the_same_driver(slurm: Cluster) -> None:
    versions = {"gpu-1": OLD, "gpu-2": NEW, "gpu-3": OLD, "gpu-4": NEW}
    job = slurm.counter("a", "--constraint=lab", node="gpu-1")
    slurm.running(job)
    until(lambda: int(slurm.text("a.now") or 0) > 3, "three steps")
    slurm.sh("scontrol", "update", f"jobid={job}", "admincomment=ticket 12 | do not ask")
    slurm.backend(versions=versions).cordon(["gpu-1"], R1)
    # it asked for gpu-1 by name to get there; now it may go anywhere
    result = slurm.empty(["gpu-1"], R1, fate="move")["gpu-1"]
    assert [(end.how, "saved itself" in end.reason) for end in result.ends] == [("requeued", True)]
    saved = int(slurm.text("a"))
    assert saved > 3
    waiting = slurm.job(job)
    assert waiting.constraint == f"lab&driver-{OLD}" and waiting.admin_comment.startswith(
        "ticket 12 | do not ask | gpufleet"
    )
    assert not waiting.held


@pytest.mark.each_release
def test_moved_work_starts_on_a_node_with_its_driver(slurm: Cluster) -> None:
    slurm.drain("gpu-2", "gpu-3", "gpu-4")
    job = slurm.counter("b")
    assert slurm.running(job).nodes == ("gpu-1",)
    until(lambda: int(slurm.text("b.now") or 0) > 3, "three steps")
    slurm.sh("scontrol", "update", "nodename=gpu-2,gpu-3,gpu-4", "state=resume")
    slurm.backend(versions={"gpu-1": OLD, "gpu-2": NEW, "gpu-3": OLD, "gpu-4": NEW}).cordon(["gpu-1"], R1)
    started = time.monotonic()
    slurm.empty(["gpu-1"], R1, fate="move")
    there = slurm.running(job)
    assert there.nodes == ("gpu-3",)
    assert time.monotonic() - started < 60, "without starttime=now it would wait for two minutes"
    first, second = slurm.text("b.log").splitlines()
    assert first == "start 0 on gpu-1" and second == f"start {int(slurm.text('b'))} on gpu-3"


def test_moved_work_starts_on_an_upgraded_node_if_the_plan_has_room_there(slurm: Cluster) -> None:
    slurm.drain("gpu-2", "gpu-3", "gpu-4")
    job = slurm.counter("u")
    slurm.running(job)
    until(lambda: int(slurm.text("u.now") or 0) > 3, "three steps")
    slurm.sh("scontrol", "update", "nodename=gpu-2,gpu-3,gpu-4", "state=resume")
    slurm.backend(versions={"gpu-1": OLD, "gpu-2": OLD, "gpu-3": OLD, "gpu-4": NEW}).cordon(["gpu-1"], R1)
    slurm.empty(["gpu-1"], R1, fate="move", to=("gpu-4",))
    assert slurm.running(job).nodes == ("gpu-4",)
    assert slurm.text("u.log").splitlines()[1] == f"start {int(slurm.text('u'))} on gpu-4"


def test_a_job_is_not_taken_away_before_its_save_is_whole(slurm: Cluster) -> None:
    job = slurm.counter("c", takes=4, node="gpu-1")
    slurm.running(job)
    until(lambda: slurm.text("c.now"), "a step")
    slurm.backend().cordon(["gpu-1"], R1)
    early = slurm.empty(["gpu-1"], R1, fate="move", patience=1)["gpu-1"]
    assert "saves itself" in early.waiting[0] and slurm.job(job).state == "RUNNING"
    # another call, which has no memory of the first, goes on
    later = slurm.empty(["gpu-1"], R1, fate="move")["gpu-1"]
    assert later.ends[0].how == "requeued" and int(slurm.text("c")) > 0


def test_a_job_that_does_not_save_is_left_running(slurm: Cluster) -> None:
    script = "trap '' USR1; while :; do sleep 1; done"
    comment = f"gpufleet.signal=USR1 gpufleet.saved={slurm.state}/jobs/never gpufleet.may=wait,move"
    job = slurm.submit(script, f"--comment={comment}", "--gres=gpu:1", node="gpu-1")
    slurm.running(job)
    time.sleep(0.5)
    slurm.backend().cordon(["gpu-1"], R1)
    policy = Policy(save_timeout=1)
    result = slurm.empty(["gpu-1"], R1, fate="move", patience=6, policy=policy)["gpu-1"]
    assert "has not saved itself" in result.waiting[0]
    late = slurm.empty(["gpu-1"], R1, fate="move", patience=0, deadline=-1, policy=policy)["gpu-1"]
    assert late.failed and f"scancel {job}" in late.msg
    assert slurm.job(job).state == "RUNNING"


@pytest.mark.each_release
def test_a_job_that_ignores_term_is_requeued_all_the_same(slurm: Cluster) -> None:
    job = slurm.submit("trap '' TERM; while :; do sleep 1; done", "--gres=gpu:1", "--requeue")
    node = slurm.running(job).nodes[0]
    slurm.backend().cordon([node], R1)
    result = slurm.empty([node], R1, fate="cold_start")[node]
    assert [end.how for end in result.ends] == ["requeued"]
    assert slurm.running(job).nodes != (node,)


SAVING_TASK = """\
file={jobs}/{name}-$SLURM_ARRAY_TASK_ID
trap 'echo asked >>$file.asked; echo 1 >$file.part; mv $file.part $file' USR1
echo start >>$file.log
while :; do sleep 0.2; done
"""


@pytest.mark.each_release
@pytest.mark.parametrize("fate", ["cold_start", "move"])
def test_a_task_of_an_array_is_taken_off_its_node_alone(slurm: Cluster, fate: str) -> None:
    """The last task has the number of the whole array, which Slurm's commands take for all its tasks."""
    jobs, name = slurm.state / "jobs", f"array-{fate}"
    comment = f"--comment=gpufleet.signal=USR1 gpufleet.saved={jobs}/{name}-%a"
    array = slurm.submit(SAVING_TASK.format(jobs=jobs, name=name), comment, "--array=1-3", "--gres=gpu:4", "--requeue")
    tasks = [slurm.running(f"{array}_{number}") for number in (1, 2, 3)]
    until(lambda: slurm.text(f"{name}-3.log"), "the last task has begun")
    node = tasks[-1].nodes[0]
    slurm.backend(versions=dict.fromkeys(slurm.names, OLD)).cordon([node], R1)
    result = slurm.empty([node], R1, fate=fate)[node]
    assert [(end.workload, end.how) for end in result.ends] == [(f"job {array}_3", "requeued")]
    assert slurm.running(f"{array}_3").nodes[0] not in [task.nodes[0] for task in tasks]
    others = [slurm.job(f"{array}_{number}") for number in (1, 2)]
    assert [(job.state, job.nodes, job.admin_comment) for job in others] == [
        ("RUNNING", t.nodes, "") for t in tasks[:2]
    ]
    assert [slurm.restarts(f"{array}_{number}") for number in (1, 2, 3)] == [0, 0, 1]


@pytest.mark.each_release
def test_tasks_of_an_array_whose_others_wait_are_asked_once_and_let_go(slurm: Cluster) -> None:
    """squeue shows all waiting tasks of an array as one, without the notes of some; scancel repeats a signal that Slurm
    refuses because of the waiting ones."""
    slurm.drain("gpu-2", "gpu-3", "gpu-4")
    jobs = slurm.state / "jobs"
    comment = f"--comment=gpufleet.signal=USR1 gpufleet.saved={jobs}/w-%a"
    script = SAVING_TASK.format(jobs=jobs, name="w")
    array = slurm.submit(script, comment, "--array=1-9%2", "--gres=gpu:1", "--requeue")
    tasks = [f"{array}_1", f"{array}_2"]
    for task in tasks:
        slurm.running(task)
    until(lambda: slurm.text("w-1.log") and slurm.text("w-2.log"), "both tasks have begun")
    slurm.sh("scontrol", "update", "nodename=gpu-2,gpu-3,gpu-4", "state=resume")
    slurm.backend(versions=dict.fromkeys(slurm.names, OLD)).cordon(["gpu-1"], R1)
    result = slurm.empty(["gpu-1"], R1, fate="move", patience=60)["gpu-1"]
    assert sorted((end.workload, end.how) for end in result.ends) == [(f"job {task}", "requeued") for task in tasks]
    assert not result.failed and not result.waiting
    assert [slurm.text(f"w-{number}.asked") for number in (1, 2)] == ["asked\n"] * 2
    moved = [slurm.job(task) for task in tasks]
    assert [(job.held, job.constraint) for job in moved] == [(False, f"driver-{OLD}")] * 2
    assert "BeginTime" not in [job.reason for job in moved], "they would wait for two minutes"
    slurm.sh("scontrol", "hold", *tasks)
    slurm.backend().settle(R1)
    left = [slurm.job(task) for task in tasks]
    assert [(job.constraint, job.admin_comment) for job in left] == [("", "")] * 2


def test_jobs_that_name_one_save_file_are_left_alone_and_named(slurm: Cluster) -> None:
    jobs = slurm.state / "jobs"
    comment = f"--comment=gpufleet.signal=USR1 gpufleet.saved={jobs}/s-1"
    array = slurm.submit(SAVING_TASK.format(jobs=jobs, name="s"), comment, "--array=1-2", "--gres=gpu:1")
    node = slurm.running(f"{array}_1").nodes[0]
    other = slurm.running(f"{array}_2").nodes[0]
    until(lambda: slurm.text("s-1.log") and slurm.text("s-2.log"), "both tasks have begun")
    slurm.backend().cordon([node, other], R1)
    early = slurm.empty([node, other], R1, fate="move", patience=0)[node]
    late = slurm.empty([node, other], R1, fate="move", patience=0, deadline=-1)[node]
    assert "name its save file too" in early.waiting[0]
    assert late.failed and f"scontrol update jobid={array}_1 comment=" in late.msg
    assert not slurm.text("s-1.asked") and not slurm.text("s-2.asked")
    assert [slurm.state_of(f"{array}_{number}") for number in (1, 2)] == ["RUNNING"] * 2
    # the way out that was named
    for number in (1, 2):
        own = f"comment=gpufleet.signal=USR1 gpufleet.saved={jobs}/s-{number}"
        slurm.sh("scontrol", "update", f"jobid={array}_{number}", own)
    done = slurm.empty([node, other], R1, fate="cold_start")
    assert {end.reason for one in done.values() for end in one.ends} == {
        f"has saved itself to {jobs}/s-{number}" for number in (1, 2)
    }


def test_a_save_file_with_any_name_is_noted_once(slurm: Cluster) -> None:
    job = slurm.counter("run[7],a=b\"c'|[run=x", node="gpu-1")
    slurm.running(job)
    until(lambda: int(slurm.text("run[7],a=b\"c'|[run=x.now") or 0) > 1, "a step")
    slurm.backend().cordon(["gpu-1"], R1)
    result = slurm.empty(["gpu-1"], R1, fate="move")["gpu-1"]
    assert [(end.how, "has saved itself" in end.reason) for end in result.ends] == [("requeued", True)]
    assert slurm.job(job).admin_comment.count("gpufleet:") == 1 and not slurm.job(job).held


@pytest.mark.each_release
def test_a_plain_requeue_would_run_a_finished_job_again(slurm: Cluster) -> None:
    job = slurm.submit("true", "--gres=gpu:1", "--requeue", node="gpu-1")
    until(lambda: slurm.state_of(job) == "COMPLETED", "the job ends")
    slurm.sh("scontrol", "requeue", "incomplete", job)
    assert slurm.state_of(job) == "COMPLETED"
    slurm.sh("scontrol", "requeue", job)
    assert slurm.state_of(job) == "PENDING", "if not, the word incomplete is not needed any more"


@pytest.mark.each_release
def test_settling_closes_a_node_whose_proof_was_cut_short(slurm: Cluster) -> None:
    slurm.sh(
        "scontrol", "create", "reservation", "reservationname=gpufleet-gpu-1", "starttime=now", "duration=5",
        "users=root", "flags=MAINT,IGNORE_JOBS", "nodes=gpu-1",
    )  # fmt: skip
    assert slurm.backend().settle(R1, check=True) == ["reservation gpufleet-gpu-1"]
    assert slurm.commands.reservations()
    assert slurm.backend().settle(R1) == ["reservation gpufleet-gpu-1"]
    assert slurm.node("gpu-1").drain and not slurm.commands.reservations()


def test_settling_frees_work_that_was_bound_to_the_old_driver(slurm: Cluster) -> None:
    job = slurm.counter("d", "--constraint=lab", node="gpu-1")
    slurm.running(job)
    until(lambda: slurm.text("d.now"), "a step")
    slurm.backend(versions={"gpu-1": OLD}).cordon(["gpu-1"], R1)
    slurm.empty(["gpu-1"], R1, fate="move")
    assert slurm.job(job).constraint == f"lab&driver-{OLD}"
    settled = slurm.backend().settle(R1)
    assert settled == [f"constraint driver-{OLD} of job {job} of root"]
    assert slurm.job(job).constraint == "lab" and slurm.job(job).admin_comment == ""
    assert slurm.backend().settle(R1) == []


@pytest.mark.each_release
def test_work_that_moves_twice_is_bound_to_one_driver_and_free_in_the_end(slurm: Cluster) -> None:
    slurm.drain("gpu-2", "gpu-3", "gpu-4")
    job = slurm.counter("twice", "--constraint=lab")
    assert slurm.running(job).nodes == ("gpu-1",)
    until(lambda: slurm.text("twice.now"), "a step")
    slurm.sh("scontrol", "update", "nodename=gpu-2", "state=resume")
    slurm.backend(versions={"gpu-1": OLD, "gpu-2": OLD}).cordon(["gpu-1"], R1)
    slurm.empty(["gpu-1"], R1, fate="move", to=("gpu-2",))
    assert slurm.running(job).nodes == ("gpu-2",) and slurm.job(job).constraint == f"lab&driver-{OLD}"
    until(lambda: len(slurm.text("twice.log").splitlines()) == 2, "it goes on")
    slurm.backend(versions={"gpu-1": NEW}).uncordon(["gpu-1"], R1)
    slurm.backend().cordon(["gpu-2"], R1)
    slurm.empty(["gpu-2"], R1, fate="move", to=("gpu-1",))
    there = slurm.running(job)
    assert there.nodes == ("gpu-1",) and there.constraint == f"lab&driver-{NEW}"
    # the end of the run: Slurm lets nobody change what runs, so whoever cares is told
    command = f"scontrol update jobid={job} features=lab"
    assert slurm.backend().settle(R1) == [] and command in slurm.backend().doubtful()[0]
    assert command in slurm.job(job).admin_comment
    # later it comes back to the queue, when slurmctld has forgotten the feature: it would wait for ever
    slurm.sh("scontrol", "reconfigure")
    until(lambda: slurm.node("gpu-1").active == ("lab",), "the configuration is read")
    slurm.sh("scontrol", "requeue", job)
    until(lambda: slurm.job(job).state == "PENDING", "it is in the queue")
    slurm.sh("scontrol", "update", f"jobid={job}", "starttime=now")
    until(lambda: (slurm.job(job).reason, slurm.job(job).held) == ("BadConstraints", True), "Slurm gives it up")
    assert slurm.backend().settle(R2) == [f"constraint driver-{NEW} of job {job} of root"]
    assert slurm.running(job).constraint == "lab" and slurm.job(job).admin_comment == ""


@pytest.mark.parametrize("again", [True, False], ids=["the feature is set again", "no node has that driver any more"])
def test_work_that_waits_for_a_driver_is_taken_up_again_when_nodes_are_back(slurm: Cluster, again: bool) -> None:
    """slurmctld forgets the features while it is in the queue, and Slurm then puts it aside."""
    slurm.drain("gpu-2", "gpu-3", "gpu-4")
    job = slurm.counter("waits")
    slurm.running(job)
    until(lambda: slurm.text("waits.now"), "a step")
    slurm.backend(versions=dict.fromkeys(slurm.names, OLD)).cordon(["gpu-1"], R1)
    slurm.empty(["gpu-1"], R1, fate="move")
    assert slurm.job(job).constraint == f"driver-{OLD}"
    slurm.sh("scontrol", "reconfigure")
    until(lambda: slurm.node("gpu-4").active == ("lab",), "the configuration is read")
    slurm.sh("scontrol", "update", "nodename=gpu-4", "state=resume")
    until(lambda: slurm.job(job).reason == "BadConstraints", "Slurm gives it up")
    slurm.backend(versions={"gpu-1": NEW, **({"gpu-2": OLD} if again else {})}).uncordon(["gpu-1"], R1)
    if again:
        slurm.sh("scontrol", "update", "nodename=gpu-2", "state=resume")
    found = slurm.running(job, 60)
    assert found.constraint == (f"driver-{OLD}" if again else "") and (found.nodes == ("gpu-2",)) == again


@pytest.mark.parametrize("after", ["requeuehold", "the note"])
def test_work_held_when_a_run_died_is_let_go(slurm: Cluster, after: str) -> None:
    job = slurm.counter("e", node="gpu-1")
    slurm.running(job)
    noted = slurm_jobs.Token("run-1", "held", int(time.time()))
    text = slurm_jobs.with_token("", "moves", noted)
    slurm.sh("scontrol", "update", f"jobid={job}", f"admincomment={text}")
    if after == "requeuehold":
        slurm.sh("scontrol", "requeuehold", "incomplete", job)
        until(lambda: slurm.job(job).held, "it is held")
        slurm.backend().settle(R2)
        slurm.running(job)
    else:
        slurm.backend().settle(R2)
        assert slurm.job(job).state == "RUNNING"


def held(slurm: Cluster, name: str, noted: bool) -> str:
    """A job as it is left by a run that died; ``noted`` says that nobody wrote over our note."""
    job = slurm.counter(name)
    slurm.running(job)
    if noted:
        text = slurm_jobs.with_token("", "moves", slurm_jobs.Token("run-1", "held", int(time.time())))
        slurm.sh("scontrol", "update", f"jobid={job}", f"admincomment={text}")
    slurm.sh("scontrol", "requeuehold", "incomplete", job)
    until(lambda: slurm.state_of(job) == "PENDING", "it is held")
    return job


def test_recover_lets_go_what_a_dead_run_held_though_no_node_is_to_be_brought_back(
    slurm: Cluster, tmp_path: Path
) -> None:
    ours, doubtful = held(slurm, "o", noted=True), held(slurm, "p", noted=False)
    said = slurm.play("recover", tmp_path)
    assert f"taken away: hold of job {ours} of root" in said
    assert "TASK [Ask every node of the run" in said, "only who has the lock may take away what a run uses"
    assert f"if by an upgrade that died: scontrol release {doubtful}" in said
    slurm.running(ours)
    assert slurm.job(doubtful).held


def test_what_slurm_refuses_to_settle_is_said(slurm: Cluster) -> None:
    job = held(slurm, "q", noted=True)
    with pytest.raises(SchedulerError, match=f"hold of job {job} of root: .*gpu_scheduler_become"):
        slurm.backend_as("daemon").settle(R1)
    assert slurm.job(job).held and "step=held" in slurm.job(job).admin_comment
    assert slurm.backend().settle(R1) == [f"hold of job {job} of root"]


def test_a_job_whose_node_is_back_at_once_waits_until_it_may_start_there(slurm: Cluster) -> None:
    slurm.drain("gpu-2", "gpu-3", "gpu-4")
    job = slurm.counter("h")
    slurm.running(job)
    slurm.backend().cordon(["gpu-1"], R1)
    slurm.empty(["gpu-1"], R1, fate="cold_start")
    slurm.backend().uncordon(["gpu-1"], R1)
    waiting = slurm.job(job)
    assert waiting.state == "PENDING" and waiting.started > time.time(), "at once, it would end as failed"
    assert slurm.running(job, 60).nodes == ("gpu-1",)


def test_a_job_with_a_node_outside_the_batch_is_not_hurried_back_to_it(slurm: Cluster) -> None:
    slurm.drain("gpu-3", "gpu-4")
    job = slurm.submit("sleep 300", "--nodes=2", "--gres=gpu:4", "--requeue")
    slurm.running(job)
    slurm.backend().cordon(["gpu-1"], R1)
    slurm.empty(["gpu-1"], R1, fate="cold_start")
    slurm.sh("scontrol", "update", "nodename=gpu-3", "state=resume")
    assert set(slurm.running(job).nodes) == {"gpu-2", "gpu-3"}


def test_a_job_whose_note_a_site_writes_over_is_let_go_all_the_same(slurm: Cluster) -> None:
    """As an epilog may; here the job does it when it is told to end, and so while it is held by us."""
    over = "trap 'scontrol update jobid=$SLURM_JOB_ID admincomment=cost=7; exit 1' TERM"
    job = slurm.counter("n", hold=over)
    node = slurm.running(job).nodes[0]
    until(lambda: slurm.text("n.now"), "a step")
    slurm.backend(versions=dict.fromkeys(slurm.names, OLD)).cordon([node], R1)
    slurm.empty([node], R1, fate="move")
    there = slurm.running(job, 60)
    assert there.constraint == f"driver-{OLD}" and there.admin_comment.startswith("cost=7 | gpufleet: ")
    assert [line.split()[0] for line in slurm.text("n.log").splitlines()] == ["start", "start"]


HET = """\
#!/bin/bash
#SBATCH --requeue --gres=gpu:4 --output=/dev/null
#SBATCH hetjob
#SBATCH --requeue --gres=gpu:4 --output=/dev/null
"""


@pytest.mark.each_release
@pytest.mark.parametrize("fate", ["cold_start", "move"])
def test_a_heterogeneous_job_is_one(slurm: Cluster, fate: str) -> None:
    """Only the node of its first component is drained; the other one's must not get it back at once either."""
    slurm.drain("gpu-3", "gpu-4")
    log = slurm.state / "jobs" / f"het-{fate}"
    saves = f"#SBATCH --comment='gpufleet.signal=USR1 gpufleet.saved={log}.saved'\n" if fate == "move" else ""
    head, tail = HET.split("#SBATCH hetjob")
    body = f"trap 'echo 1 >{log}.saved' USR1; echo start >>{log}; while :; do sleep 0.2; done"
    job = slurm.submit(f"{head}{saves}#SBATCH hetjob{tail}{body}")
    first = slurm.running(f"{job}+0").nodes[0]
    until(log.exists, "the script has begun")
    slurm.sh("scontrol", "update", "nodename=gpu-3,gpu-4", "state=resume")
    slurm.backend(versions=dict.fromkeys(slurm.names, OLD)).cordon([first], R1)
    plan = [Fate(f"job {job}", fate)]
    result = slurm.backend().evacuate([first], R1, plan, time.time() + 3600, 30)[first]
    assert [(end.workload, end.how) for end in result.ends] == [(f"job {job}", "requeued")]
    parts = [slurm.running(f"{job}+{number}", 60) for number in (0, 1)]
    assert first not in (*parts[0].nodes, *parts[1].nodes) and not any(part.held for part in parts)
    until(lambda: len(log.read_text().split()) == 2, "the script has begun again")
