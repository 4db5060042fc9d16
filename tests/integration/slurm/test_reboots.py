# Copyright: gpufleet.driver contributors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Slurm on real daemons: a node that we drained reboots, without slurmctld being told or by its own means."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from slurm_cluster import Cluster, until

from ansible_collections.gpufleet.driver.plugins.module_utils.schedulers.base import Mark

R1 = Mark("run-1", 1.0)
OURS = "gpufleet: NVIDIA driver upgrade, run=run-1"


@pytest.fixture(scope="module", params=["0", "1", "2"])
def lab(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Whether a node that was down may come back by itself is ReturnToService."""
    with Cluster.fresh("--set", f"ReturnToService={request.param}", nodes=2) as cluster:
        yield cluster


def goes_to_work_when_proven(slurm: Cluster, eager: str) -> None:
    assert slurm.node("gpu-1").drain and slurm.node("gpu-1").reason.startswith(OURS)
    assert slurm.job(eager).state == "PENDING"
    proof = slurm.backend().validate(["gpu-1"], R1, {"gpu-1": 4}, 60)["gpu-1"]
    assert not proof.failed, proof.msg
    assert slurm.node("gpu-1").drain and slurm.job(eager).state == "PENDING"
    back = slurm.backend().uncordon(["gpu-1"], R1)["gpu-1"]
    assert back.changed and not back.failed, back.msg
    slurm.running(eager)


def test_a_reboot_that_slurm_is_not_told_of_keeps_the_drain(slurm: Cluster) -> None:
    slurm.backend().cordon(["gpu-1"], R1)
    eager = slurm.submit("sleep 300", "--gres=gpu:1", node="gpu-1")
    slurm.lab("kill", "gpu-1")
    slurm.lab("boot", "gpu-1")
    goes_to_work_when_proven(slurm, eager)


def test_a_node_that_slurm_hears_of_only_after_its_proof_began_is_proven_all_the_same(slurm: Cluster) -> None:
    """Slurm then takes it for one that rebooted while it was in service, and down, unless ReturnToService is 2."""
    slurm.backend().cordon(["gpu-1"], R1)
    eager = slurm.submit("sleep 300", "--gres=gpu:1", node="gpu-1")
    slurm.lab("kill", "gpu-1")
    with ThreadPoolExecutor(1) as pool:
        proof = pool.submit(slurm.backend().validate, ["gpu-1"], R1, {"gpu-1": 4}, 60)
        until(lambda: not slurm.node("gpu-1").drain or slurm.node("gpu-1").silent, "the proof has begun")
        slurm.lab("boot", "gpu-1")
        assert not proof.result()["gpu-1"].failed, proof.result()["gpu-1"].msg
    assert slurm.node("gpu-1").drain and slurm.node("gpu-1").reason == OURS
    assert slurm.job(eager).state == "PENDING"


def test_a_reboot_through_slurm_by_somebody_else_opens_the_node_and_is_noticed_A_SLURM_04(slurm: Cluster) -> None:
    """Why we do not reboot like this: from the request on, the drain is Slurm's, and ends with the reboot."""
    slurm.backend().cordon(["gpu-1"], R1)
    slurm.sh("scontrol", "reboot", "ASAP", "nextstate=RESUME", "gpu-1")
    busy = until(lambda: slurm.node("gpu-1").state & {"REBOOT_REQUESTED", "REBOOT_ISSUED"}, "the reboot is wanted")
    assert busy and slurm.empty(["gpu-1"], R1, patience=0)["gpu-1"].waiting
    until(lambda: slurm.node("gpu-1").state == {"IDLE"}, "it is back", 60)
    assert "it is in service" not in slurm.backend().uncordon(["gpu-1"], R1)["gpu-1"].msg
    proof = slurm.backend().validate(["gpu-1"], R1, {"gpu-1": 4}, 20)["gpu-1"]
    assert proof.failed and "drain it, then validate again" in proof.msg


def test_a_reboot_through_slurm_that_leaves_the_node_down_is_noticed_and_left_so(slurm: Cluster) -> None:
    """The drain is gone, and Slurm itself has the node down: that is for whoever had it rebooted."""
    slurm.backend().cordon(["gpu-1"], R1)
    eager = slurm.submit("sleep 300", "--gres=gpu:1", node="gpu-1")
    slurm.sh("scontrol", "reboot", "nextstate=DOWN", "gpu-1")
    until(lambda: slurm.node("gpu-1").state == {"DOWN"} and not slurm.node("gpu-1").silent, "it is back", 60)
    proof = slurm.backend().validate(["gpu-1"], R1, {"gpu-1": 4}, 20)["gpu-1"]
    assert "DOWN by slurm" in proof.msg and "no job was run there" in proof.msg
    left = slurm.backend().uncordon(["gpu-1"], R1)["gpu-1"]
    assert not left.changed and "it is left so" in left.msg
    assert slurm.job(eager).state == "PENDING"
