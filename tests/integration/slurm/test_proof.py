# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Slurm on real daemons: a node is proven before anybody else gets in."""

from __future__ import annotations

from typing import Any

import pytest
from slurm_cluster import NEW, Cluster, until

from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import Mark

R1, R2 = Mark("run-1", 1.0), Mark("run-2", 2.0)
OURS = "gpufleet: NVIDIA driver upgrade, run=run-1"


def test_a_node_is_proven_by_a_job_while_others_stay_out(slurm: Cluster) -> None:
    slurm.backend().cordon(["gpu-1"], R1)
    eager = slurm.submit("sleep 300", "--gres=gpu:1", user="daemon", node="gpu-1")
    (slurm.state / "nodes/gpu-1.driver").write_text(f"{NEW}\n")
    result = slurm.backend().validate(["gpu-1"], R1, {"gpu-1": 4}, 60)["gpu-1"]
    assert not result.failed, result.msg
    node = slurm.node("gpu-1")
    assert node.drain and node.reason == OURS and node.active == ("lab", f"driver-{NEW}")
    assert not slurm.commands.reservations()
    assert slurm.job(eager).state == "PENDING"
    slurm.backend().uncordon(["gpu-1"], R1)
    slurm.running(eager)


@pytest.mark.parametrize(
    ("settings", "gpus", "wrong"),
    [
        ({"command": ["false"]}, 4, "did not run a job"),
        ({"command": ["sleep", "60"]}, 4, "did not run a job"),
        ({}, 8, "has 8 GPUs, and Slurm is configured for 4"),
        ({"command": ["sh", "-c", "kill -9 $$"]}, 4, "did not run a job"),
    ],
    ids=["command fails", "command hangs", "GPU count differs", "command is killed"],
)
def test_a_node_that_is_not_proven_stays_drained(
    slurm: Cluster, settings: dict[str, Any], gpus: int, wrong: str
) -> None:
    slurm.backend().cordon(["gpu-1"], R1)
    result = slurm.backend(**settings).validate(["gpu-1"], R1, {"gpu-1": gpus}, 8)["gpu-1"]
    assert result.failed and wrong in result.msg
    until(lambda: slurm.node("gpu-1").drain and not slurm.commands.reservations(), "it is closed again")


@pytest.mark.each_release
def test_fewer_gpus_than_configured_is_slurms_own_finding_A_SLURM_01(slurm: Cluster) -> None:
    slurm.backend().cordon(["gpu-1"], R1)
    gres = slurm.state / "etc/gres.conf"
    before = gres.read_text()
    try:
        slurm.lab("kill", "gpu-1")
        gres.write_text(before.replace("NodeName=gpu-1 Name=gpu", "NodeName=gpu-1 Name=none"))
        slurm.lab("start", "gpu-1")
        until(lambda: "INVALID_REG" in slurm.node("gpu-1").state, "slurmctld refuses the node")
        result = slurm.backend().validate(["gpu-1"], R1, {"gpu-1": 4}, 10)["gpu-1"]
        back = slurm.backend().uncordon(["gpu-1"], R1)["gpu-1"]
    finally:
        gres.write_text(before)
        slurm.lab("kill", "gpu-1")
        slurm.lab("start", "gpu-1")
        until(lambda: "INVALID_REG" not in slurm.node("gpu-1").state, "the node is whole again")
    assert result.failed and "less than Slurm is configured for" in result.msg
    assert back.failed and "less than Slurm is configured for" in back.msg and slurm.node("gpu-1").drain
    # from 24.11 on Slurm has put its reason in place of ours
    assert not slurm.backend().validate(["gpu-1"], R1, {"gpu-1": 4}, 20)["gpu-1"].failed
    assert slurm.node("gpu-1").reason == OURS
    assert slurm.backend().uncordon(["gpu-1"], R1)["gpu-1"].changed


def test_the_reservation_of_a_node_is_a_lock(slurm: Cluster) -> None:
    slurm.backend().cordon(["gpu-1"], R1)
    slurm.sh(
        "scontrol", "create", "reservation", "reservationname=gpufleet-gpu-1", "starttime=now", "duration=5",
        "users=root", "flags=MAINT,IGNORE_JOBS", "nodes=gpu-1",
    )  # fmt: skip
    result = slurm.backend().validate(["gpu-1"], R1, {}, 20)["gpu-1"]
    assert result.failed and "scontrol delete reservationname=gpufleet-gpu-1" in result.msg
    assert slurm.node("gpu-1").drain


def test_a_proof_cut_short_is_cleared_by_the_next_run(slurm: Cluster) -> None:
    slurm.sh(
        "scontrol", "create", "reservation", "reservationname=gpufleet-gpu-1", "starttime=now", "duration=5",
        "users=root", "flags=MAINT,IGNORE_JOBS", "nodes=gpu-1",
    )  # fmt: skip
    assert slurm.backend().cordon(["gpu-1"], R2)["gpu-1"].changed
    assert slurm.node("gpu-1").drain and not slurm.commands.reservations()


def test_a_drain_during_the_proof_keeps_its_reason(slurm: Cluster) -> None:
    slurm.backend().cordon(["gpu-1"], R1)
    drain = ["scontrol", "update", "nodename=gpu-1", "state=drain", "reason=fan broken"]
    assert not slurm.backend(command=drain).validate(["gpu-1"], R1, {}, 30)["gpu-1"].failed
    assert slurm.node("gpu-1").reason == "fan broken" and not slurm.commands.reservations()
    assert not slurm.backend().uncordon(["gpu-1"], R1)["gpu-1"].changed


def test_a_foreign_drain_is_not_lifted_even_for_a_proof(slurm: Cluster) -> None:
    slurm.drain("gpu-1", reason="fan broken")
    result = slurm.backend().validate(["gpu-1"], R1, {}, 20)["gpu-1"]
    assert not result.failed and "fan broken" in result.msg
    assert slurm.node("gpu-1").reason == "fan broken"


def test_what_is_set_for_a_job_that_we_run_in_changes_nothing(slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SLURM_JOB_ID": "999",
        "SLURM_NNODES": "3",
        "SLURM_PARTITION": "none",
        "SRUN_DEBUG": "9",
    }.items():
        monkeypatch.setenv(name, value)
    slurm.backend().cordon(["gpu-1"], R1)
    result = slurm.backend().validate(["gpu-1"], R1, {"gpu-1": 4}, 60)["gpu-1"]
    assert not result.failed, result.msg
