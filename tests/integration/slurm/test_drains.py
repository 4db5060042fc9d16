# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Slurm on real daemons: drains that are ours, and drains that are not."""

from __future__ import annotations

import json
import time

import pytest
from slurm_cluster import NEW, OLD, Cluster, until

from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import Fate, Mark, SchedulerError

R1, R2 = Mark("run-1", 1.0), Mark("run-2", 2.0)
OURS = "gpufleet: NVIDIA driver upgrade, run=run-1"


@pytest.mark.each_release
def test_drain_and_resume_leave_a_node_as_it_was(slurm: Cluster) -> None:
    cordoned = slurm.backend().cordon(["gpu-1", "gpu-2"], R1)
    assert [(r.changed, r.failed, r.after.run_id) for r in cordoned.values()] == [(True, False, "run-1")] * 2
    assert slurm.node("gpu-1").reason == OURS
    assert not slurm.backend().cordon(["gpu-1"], R1)["gpu-1"].changed
    back = slurm.backend().uncordon(["gpu-1", "gpu-2"], R2)
    assert [(r.changed, r.failed) for r in back.values()] == [(True, False)] * 2
    assert slurm.node("gpu-1").state == {"IDLE"}
    assert not slurm.backend().uncordon(["gpu-1"], R1)["gpu-1"].changed


def test_check_mode_changes_nothing(slurm: Cluster) -> None:
    cordoned = slurm.backend(versions={"gpu-1": OLD}).cordon(["gpu-1"], R1, check=True)
    assert cordoned["gpu-1"].changed and cordoned["gpu-1"].after.cordoned
    assert slurm.node("gpu-1").state == {"IDLE"} and slurm.node("gpu-1").active == ("lab",)
    slurm.backend().cordon(["gpu-1"], R1)
    assert slurm.backend().uncordon(["gpu-1"], R1, check=True)["gpu-1"].changed
    assert slurm.node("gpu-1").drain


@pytest.mark.each_release
def test_a_second_drain_would_overwrite_the_first_so_a_foreign_one_is_not_touched_A_SLURM_05(slurm: Cluster) -> None:
    slurm.drain("gpu-1", reason="bad DIMM, see #4711 | run=none")
    before = slurm.node("gpu-1")
    result = slurm.backend().cordon(["gpu-1", "gpu-2"], R1)
    assert not result["gpu-1"].changed and not result["gpu-1"].failed and "bad DIMM" in result["gpu-1"].msg
    assert result["gpu-2"].changed
    assert slurm.node("gpu-1") == before
    back = slurm.backend().uncordon(["gpu-1", "gpu-2"], R1)
    assert not back["gpu-1"].changed and back["gpu-2"].changed
    assert slurm.node("gpu-1").reason == before.reason and slurm.node("gpu-1").drain


def test_a_drain_that_somebody_took_over_meanwhile_stays(slurm: Cluster) -> None:
    slurm.backend().cordon(["gpu-1"], R1)
    slurm.drain("gpu-1", reason="fan broken")
    assert not slurm.backend().uncordon(["gpu-1"], R1)["gpu-1"].changed
    assert slurm.node("gpu-1").reason == "fan broken" and slurm.node("gpu-1").drain


@pytest.mark.each_release
@pytest.mark.parametrize("bad", ["gpu-99", "gpu-[1-2]", "ALL", "gpu-2,gpu-3", "", "gpu-2 state=down"])
def test_a_bad_name_is_refused_before_anything_is_drained(slurm: Cluster, bad: str) -> None:
    result = slurm.backend().cordon(["gpu-1", bad], R1)
    assert result[bad].failed and "knows no node" in result[bad].msg
    assert result["gpu-1"].changed
    assert [name for name, node in slurm.commands.nodes().items() if node.drain] == ["gpu-1"]


def test_a_run_id_that_would_break_the_mark_is_refused(slurm: Cluster) -> None:
    with pytest.raises(SchedulerError, match="run id"):
        slurm.backend().cordon(["gpu-1"], Mark("a b", 1.0))
    assert not slurm.node("gpu-1").drain


def test_a_node_that_somebody_else_maintains_is_not_touched(slurm: Cluster) -> None:
    slurm.sh(
        "scontrol", "create", "reservation", "reservationname=ops", "starttime=now", "duration=5",
        "users=root", "flags=MAINT,IGNORE_JOBS", "nodes=gpu-1",
    )  # fmt: skip
    result = slurm.backend().cordon(["gpu-1", "gpu-2"], R1)
    assert result["gpu-1"].failed and "reservation ops" in result["gpu-1"].msg and result["gpu-2"].changed
    assert not slurm.node("gpu-1").drain


def test_a_later_run_takes_over_what_an_earlier_one_drained(slurm: Cluster) -> None:
    slurm.backend().cordon(["gpu-1"], R1)
    assert slurm.backend().cordon(["gpu-1"], R2)["gpu-1"].before.run_id == "run-1"
    assert "run=run-2" in slurm.node("gpu-1").reason


@pytest.mark.each_release
def test_drains_survive_a_crash_of_slurmctld_and_features_are_set_again(slurm: Cluster) -> None:
    versions = {"gpu-1": NEW, "gpu-2": OLD}
    mark = Mark("run-crash", 1.0)  # a name that no earlier test has left in what slurmctld saves
    slurm.backend(versions=versions).cordon(["gpu-1"], mark)
    assert slurm.node("gpu-1").active == ("lab", f"driver-{NEW}")
    slurm.saved("run=run-crash")
    slurm.lab("kill", "slurmctld")
    slurm.lab("start", "slurmctld")
    assert slurm.node("gpu-1").drain and slurm.node("gpu-1").reason.endswith("run=run-crash")
    assert slurm.node("gpu-1").active == ("lab",), "slurmctld reads its features from slurm.conf when it starts"
    slurm.backend(versions=versions).uncordon(["gpu-1"], mark)
    assert slurm.node("gpu-1").active == ("lab", f"driver-{NEW}")
    assert slurm.node("gpu-2").active == ("lab", f"driver-{OLD}")


@pytest.mark.each_release
def test_features_lost_by_a_reconfiguration_are_set_again(slurm: Cluster) -> None:
    slurm.backend(versions={"gpu-1": OLD}).cordon(["gpu-1"], R1)
    slurm.sh("scontrol", "reconfigure")
    until(lambda: slurm.node("gpu-1").active == ("lab",), "the configuration is read")
    slurm.backend(versions={"gpu-1": NEW}).uncordon(["gpu-1"], R1)
    assert slurm.node("gpu-1").active == ("lab", f"driver-{NEW}")
    slurm.sh("scontrol", "reconfigure")
    until(lambda: slurm.node("gpu-1").active == ("lab",), "the configuration is read")
    slurm.backend(versions={"gpu-1": NEW}).settle(R1)
    assert slurm.node("gpu-1").active == ("lab", f"driver-{NEW}"), "also if it was read after the last batch"


def test_features_of_the_site_stay_as_they_are(slurm: Cluster) -> None:
    features = ["availablefeatures=lab,driver-lts,slow", "activefeatures=lab,driver-lts"]
    slurm.sh("scontrol", "update", "nodename=gpu-1", *features)
    slurm.backend(versions={"gpu-1": OLD}).cordon(["gpu-1"], R1)
    slurm.backend(versions={"gpu-1": NEW}).uncordon(["gpu-1"], R1)
    node = slurm.node("gpu-1")
    assert (set(node.available), set(node.active)) == (
        {"lab", "driver-lts", "slow", f"driver-{NEW}"},
        {"lab", "driver-lts", f"driver-{NEW}"},
    )


@pytest.mark.each_release
def test_snapshot(slurm: Cluster) -> None:
    slurm.drain("gpu-4")
    slurm.backend(versions={"gpu-1": OLD}).cordon(["gpu-3"], R1)
    slurm.sh("scontrol", "update", "nodename=gpu-3", "state=resume")
    saver = slurm.counter("f", "--time=30", node="gpu-1")
    fixed = slurm.submit("sleep 300", "--no-requeue", "--gpus=2", "--nodes=1", node="gpu-2")
    gang = slurm.submit("sleep 300", "--nodes=2", "--gres=gpu:1", "--nodelist=gpu-1,gpu-3")
    slurm.submit("sleep 300", "--nodes=3", "--gres=gpu:4", "--time=60")
    for job in (saver, fixed, gang):
        slurm.running(job)
    seen = slurm.backend().snapshot([])
    nodes = {node.name: node for node in seen.nodes}
    assert set(nodes) == set(slurm.names)
    assert nodes["gpu-1"].loaded == OLD and nodes["gpu-1"].gpus == 4 and nodes["gpu-1"].free["gpu"] == 2
    assert nodes["gpu-4"].cordoned_by == "root: bad DIMM" and not nodes["gpu-4"].schedulable
    work = {workload.name: workload for workload in seen.workloads}
    assert set(work) == {f"job {saver}", f"job {fixed}", f"job {gang}"}
    assert work[f"job {saver}"].may == {"wait", "restart", "move"} and 1700 < work[f"job {saver}"].remaining <= 1800
    assert work[f"job {fixed}"].may == {"wait"} and work[f"job {fixed}"].gpus == 2
    assert [member.node for member in work[f"job {gang}"].members] == ["gpu-1", "gpu-3"]
    assert work[f"job {gang}"].remaining is None
    assert seen.queue["h100"].gpus == 12 and seen.queue["h100"].duration == 3600


def test_fates_name_the_jobs_of_the_snapshot(slurm: Cluster) -> None:
    array = slurm.submit("sleep 300", "--gres=gpu:1", "--array=7", node="gpu-1")
    until(lambda: any(job.on_node for job in slurm.commands.jobs()), "the task runs")
    name = slurm.backend().snapshot([]).workloads[0].name
    assert name == f"job {array}_7"
    slurm.backend().cordon(["gpu-1"], R1)
    foretold = slurm.backend().evacuate(["gpu-1"], R1, [Fate(name, "cold_start")], time.time() + 60, 5, check=True)
    assert [(end.workload, end.how) for end in foretold["gpu-1"].ends] == [(name, "requeued")]
    assert not foretold["gpu-1"].waiting and slurm.job(f"{array}_7").state == "RUNNING"


def test_inventory(slurm: Cluster) -> None:
    slurm.drain("gpu-2")
    slurm.backend(versions={"gpu-1": NEW, "gpu-3": OLD}).cordon([], R1)
    file = slurm.state / "jobs/slurm.gpu_nodes.yml"
    lines = ["plugin: gpufleet.driver.gpu_nodes", "source: slurm", f"version: {NEW}"]
    file.write_text("\n".join([*lines, f"slurm_conf: {slurm.state}/etc/slurm.conf", ""]))
    listed = json.loads(slurm.sh("ansible-inventory", "-i", str(file), "--list"))
    assert sorted(listed["gpu_nodes"]["hosts"]) == slurm.names
    assert listed["gpu_cordoned"]["hosts"] == ["gpu-2"]
    assert sorted(listed["gpu_needs_upgrade"]["hosts"]) == ["gpu-2", "gpu-3", "gpu-4"]
    assert listed["gpu_model_h100"] and listed["gpu_pool_gpu"]
    assert listed[f"gpu_driver_{NEW.replace('.', '_')}"]["hosts"] == ["gpu-1"]
    assert "127.0.0.1" in str(listed["_meta"]["hostvars"]["gpu-1"]["ansible_host"])
